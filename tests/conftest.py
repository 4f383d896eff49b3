"""What the tests of all folders share: one thread for each test process, and their order."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

# Read when torch is imported, here and in what tests start. A thread of a pool that waits for work sleeps: others need
# its core, where it would turn in a loop.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings
from postgres import postgres

__all__ = ["postgres"]

# No example has a deadline: how long one takes says how busy the machine is.
settings.register_profile("trivium", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trivium")


LONG = (
    "e2e/test_verl_door.py",
    "e2e/test_ray.py",
    "simulation/test_worlds.py",
    "oracle/test_ranks.py",
    "e2e/test_environments.py",
    "oracle/test_split_hybrids.py",
    "oracle/test_split_layers.py",
    "e2e/test_learning.py",
    "e2e/test_two_nodes.py",
    "e2e/test_curricula.py",
    "e2e/test_shells.py",
    "e2e/test_kill.py",
    "unit/training/test_emulated_gpu.py",
    "e2e/test_run_ends.py",
    "e2e/test_first_hour.py",
    "e2e/test_recipes.py",
    "e2e/test_torchrun.py",
    "e2e/test_train_process.py",
    "unit/engines/test_engine_torch.py",
    "unit/engines/test_vision_engines.py",
    "unit/training/test_saving.py",
)
"""The longest first: 20 to 150 CPU seconds each, the first two with what uses the same Ray instance."""


TOGETHER = {
    "e2e/test_ray": (
        "e2e/test_ray_parts",
        "e2e/test_ray_ranks",
        "e2e/test_trinity_monitor",
        "e2e/test_verl_scripts",
        "e2e/test_worker_group",
    ),
    "e2e/test_verl_door": (
        "e2e/test_shown",
        "e2e/test_three_ways",
        "e2e/test_trinity_door",
        "e2e/test_trinity_synchronizer",
        "e2e/test_verl_main_ppo",
        "e2e/test_verl_vision",
    ),
    "unit/monitors/test_monitors": ("unit/inspection/test_report",),
}
"""Files of one test process: those that use the Ray instance of a test process, in two parts, since every test process
would start its own for five CPU seconds; and those that import wandb and mlflow, which takes as long."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One test process takes all files of a part of `TOGETHER`."""
    from xdist.scheduler import LoadFileScheduling

    first = {f"tests/{name}.py": f"tests/{file}.py" for file, names in TOGETHER.items() for name in names}

    class ByPart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return first.get(file, file)

    return ByPart(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take long come first, so that the workers of pytest-xdist end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None or "e2e" in item.path.parts}
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: (place.get(item.path, len(LONG)), item.path not in slow))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """No search for cycles: imports leave few behind, and it would be a fifth of the time. No later one looks at all
    modules and tests again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """torch's 50 loggers pass on what they are given, where pytest would give each of them its handlers and take them
    back six times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "working directory": (os.getcwd, os.chdir),
    "thresholds of the garbage collector": (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    "switch interval": (sys.getswitchinterval, sys.setswitchinterval),
}
"""Settings of the process: how to read one, and how to set it."""
_at_start: dict[Path, dict[str, Any]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """The next file finds the settings that this one has found: pytest-xdist gives a worker other files in each run."""
    settings = SETTINGS | _of_torch()
    if item.path not in _at_start:
        _at_start[item.path] = {name: read() for name, (read, _) in settings.items()}
    done = yield
    if nextitem is None or nextitem.path != item.path:
        for name, value in _at_start.pop(item.path).items():
            read, write = settings[name]
            if read() != value:
                write(value)
    return done


def _of_torch() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Where tests have imported it."""
    if "torch" not in sys.modules:
        return {}
    import torch

    return {
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "default type": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    }
