"""What the tests of all folders share: one thread for each test process, and their order."""

import gc
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from typing import Any

# Read when torch is imported, here and in what tests start. A thread of a pool that waits for work sleeps: others need
# its core, where it would turn in a loop.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN and torch's layer over it each keep the kernels of the last 1,024 shapes, of half a megabyte each: in a process
# that runs many tests, over a gigabyte. To compile one again takes less than a millisecond.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

# Linux then lets a thread that wakes up wait until the running one's slice ends. With more test processes than cores,
# fewer switches save 6 % of the CPU time of `make test`, and 13 % of tests/e2e/test_learning.py.
if hasattr(os, "SCHED_BATCH"):
    with suppress(PermissionError):  # in a container that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import costs
import pytest
from example_counts import number_of
from hypothesis import HealthCheck, settings
from postgres import postgres

__all__ = ["postgres"]

# No example has a deadline: how long one takes depends on how busy the machine is.
settings.register_profile(
    "trivium", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=number_of(100)
)
settings.load_profile("trivium")


TOGETHER = {
    "contract/test_engines": ("e2e/test_kill", "unit/training/test_train_process"),
    "e2e/test_ray": ("e2e/test_ray_parts", "e2e/test_ray_ranks", "e2e/test_shown", "e2e/test_three_ways"),
    "doors/e2e/test_verl_door": (
        "doors/e2e/test_trinity_door",
        "doors/e2e/test_trinity_synchronizer",
        "doors/e2e/test_verl_vision",
    ),
    "doors/e2e/test_verl_main_ppo": (
        "doors/e2e/test_trinity_monitor",
        "doors/e2e/test_verl_scripts",
        "doors/e2e/test_worker_group",
    ),
    "unit/monitors/test_monitors": ("unit/inspection/test_report",),
}
"""Files of one test process: those that use the Ray instance of a test process, since every test process would start
its own for five CPU seconds; those of `make test` that fork from a preloaded process, and those that import wandb and
mlflow, which takes half as long. A part lies in `doors` or outside of it: these are two commands."""


PART = {f"tests/{name}.py": f"tests/{first}.py" for first, names in TOGETHER.items() for name in names}
"""The first file of the part, of each file of a part."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One test process takes all files of a part of `TOGETHER`."""
    from xdist.scheduler import LoadFileScheduling

    class ByPart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return PART.get(file, file)

    return ByPart(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", choices=("record", "check"), help="measure CPU seconds: for costs.json, or against it")


def pytest_configure(config: pytest.Config) -> None:
    if asked := config.getoption("--costs"):
        config.pluginmanager.register(costs.Costs(records=asked == "record"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import the files of which it has no test: 2 of 20 CPU seconds of each test process."""
    left_out = "not slow" in config.getoption("-m") and costs.is_left_out(collection_path)
    return True if left_out else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Marks what `make test` leaves out. Files that take long come first: the test processes end together."""
    recorded = costs.recorded()
    for item in items:
        if costs.is_slow(*costs.name_of(item.nodeid), recorded):
            item.add_marker("slow")
    yield  # `-m` takes out what it leaves out
    slow = {_file(item) for item in items if item.get_closest_marker("slow")}
    seconds = defaultdict[str, float](float)
    # Sorted, for sums of floats depend on their order, and all test processes must agree on that of the files.
    for file in sorted({_file(item) for item in items}):
        name, _ = costs.name_of(file)
        if name in recorded:
            seconds[PART.get(file, file)] += recorded[name].seconds if file in slow else recorded[name].quick

    def place(item: pytest.Item) -> tuple[float, str]:
        part = PART.get(_file(item), _file(item))
        return -seconds[part], part

    items.sort(key=place)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


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
    back six times a test. Models in float64 compute in float64."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    if "torch" in sys.modules:
        from tests import float64

        float64.install()


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
        _return_freed_memory()
    return done


_libc = CDLL(None)
if hasattr(_libc, "mallopt"):  # glibc's
    _libc.mallopt(-8, 1)  # M_ARENA_MAX: threads of tests that ended long ago would each leave an arena behind


def _return_freed_memory() -> None:
    """Returns to the system what the tests of a file have freed. `trivium.models.cpu.allocator` keeps it, because a run
    repeats the sizes of its tensors; the next file has others."""
    gc.collect()  # cycles, too: those of engines held 90 MB
    gc.freeze()  # later searches skip what is left: they took 30 CPU seconds of each process of `make test-all`
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


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
