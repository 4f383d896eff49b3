"""`trivium doctor`: finds problems of a run, by the rules of `trivium.monitors.health`, or of this machine."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import numpy as np

from trivium.config.saved import config_file
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.errors import ConfigError, Problem, RunDirError, TriviumError
from trivium.inspection.rollout_view import decoder
from trivium.inspection.rollouts import Rollout, journals, read_rollouts
from trivium.inspection.run import RecordedRun
from trivium.models.late import torch
from trivium.monitors.health import RULES, WINDOW, earlier_problems, evidence_of
from trivium.planning.machine import host_memory
from trivium.training.device import processor_name

_GIB = 2**30
_ROLLOUT_BYTES = 4 * 2**20
"""Most bytes of recorded rollouts to read: of all train steps or, beyond this size, of evenly spread ones."""
_PORT = 8010
"""The default of `serve.port`."""


@dataclass(frozen=True)
class Report:
    """The examined facts and the problems found."""

    facts: list[str]
    findings: list[Problem]
    no_findings: str = "nothing wrong was found"
    """The line to show where `findings` is empty."""


def diagnose(run_dir: Path) -> Report:
    """Applies the rules to the directory of a finished or running run. Raises RunDirError if it holds no run."""
    run = RecordedRun(run_dir)
    rows, error = run.rows(), run.error
    if not rows and not error:
        found = "no rows in metrics.jsonl" if config_file(run_dir).is_file() else "no run there"
        raise RunDirError(
            f"the metrics of {run_dir}", found, "name the directory of a run; `monitors` needs kind jsonl"
        )
    chosen = _steps_to_read(run_dir)
    every = list(read_rollouts(run_dir, step=chosen)) if chosen else []
    groups = [
        list({(r.stage, r.group.slot, r.group.attempt): r.group for r in every if step in r.steps}.values())
        for step in chosen
    ]
    mismatched = _mismatched(run_dir, every)
    usual_lr, bounds = _usual_lr(run), _stage_bounds(run)
    further = {"groups": groups, "mismatched": mismatched, "error": error, "usual_lr": usual_lr}
    current = RULES.problems(evidence_of(rows, bounds, **further))
    steps = len({row["step"] for row in rows} - {0})  # step 0 is the evaluation before training
    facts = [f"{run_dir}: {steps} steps, {len(every)} rollouts of {len(chosen)} steps", run.bound()]
    too_few = f"too few steps to find what is wrong: most rules need {WINDOW}"
    no_findings = too_few if steps < WINDOW else Report.no_findings
    return Report(facts, [*current, *earlier_problems(rows, current, usual_lr, bounds)], no_findings)


def _usual_lr(run: RecordedRun) -> float | None:
    """Returns the learning rate that the run's config would have without one; None if it cannot be read here."""
    try:
        return run.config.usual_lr()
    except TriviumError:  # the run's own code is not on this machine
        return None


def _stage_bounds(run: RecordedRun) -> list[int]:
    """Returns `stage_bounds` of the run; none if its config cannot be read here."""
    try:
        return run.stage_bounds
    except TriviumError:
        return []


def _steps_to_read(run_dir: Path) -> list[int]:
    """Returns the train steps whose rollouts are read: as many as fit `_ROLLOUT_BYTES` and at least 3, evenly
    spread, including the newest. Empty if none are recorded."""
    files = [(step, path.stat().st_size) for _, step, path in journals(run_dir)]
    size, steps = sum(num_bytes for _, num_bytes in files), sorted({step for step, _ in files if step is not None})
    number = max(min(3, len(steps)), min(len(steps), len(steps) * _ROLLOUT_BYTES // max(1, size)))
    return [steps[(at + 1) * len(steps) // number - 1] for at in range(number)]


def _mismatched(run_dir: Path, rollouts: list[Rollout], number: int = 3) -> list[str]:
    """Describes the tokens whose log-probabilities by engine and trainer differ most; empty if the run did not keep
    them."""
    places: list[tuple[float, int, str, str]] = []
    for rollout in rollouts:
        for sequence in rollout.sequences:
            old = sequence.columns.get("old_log_prob")
            # Without a forward pass of the trainer, the column is a copy of the engine's values.
            if old is None or np.array_equal(old, sequence.log_prob):
                continue
            gaps = np.where(sequence.response_mask, np.abs(old - sequence.log_prob), 0.0)
            at = int(gaps.argmax())
            where = f"token {at} of task {rollout.group.task.task_id}"
            both = f"engine {sequence.log_prob[at]:.4g}, trainer {old[at]:.4g}"
            places.append((float(gaps[at]), int(sequence.tokens[at]), where, both))
    if not places:
        return []
    decode = _decoder(run_dir)
    worst = sorted(places, key=lambda place: -place[0])[:number]
    return [f"{where} ({decode(token)}): {both}" for _, token, where, both in worst]


def _decoder(run_dir: Path) -> Callable[[int], str]:
    """Returns a function that decodes a token; it returns the token's id if there is no tokenizer."""
    try:
        decode = decoder(run_dir)
    except RunDirError:
        return str
    return lambda token: repr(decode([token]))


# --------------------------------------------------------------------------- the machine


def examine_engine(run_dir: Path) -> Report:
    """Compares the engine of a run with transformers, in every layer of the model that the run began with. A start
    compares the first layers alone."""
    from trivium.engines.torch.engine import check_every_layer
    from trivium.engines.torch.section import DescribedTorchEngine

    run = RecordedRun(run_dir)
    engine = run.config.stage_configs()[-1].engine
    if not isinstance(engine, DescribedTorchEngine.Config):
        raise ConfigError("doctor --engine", f"engine.kind is {engine.kind}", "use it for runs with engine.kind torch")
    model_dir = run.base_model()
    try:
        optimized = check_every_layer(engine, model_dir)
    except ConfigError as error:
        return Report([], [Problem("engine", error.asked, error.found, error.do)])
    slower = Problem(
        "engine",
        "",
        "its optimized layers differ from those of transformers, which it uses instead",
        "report this model",
    )
    return Report([f"engine: compared with transformers in every layer of {model_dir}"], [] if optimized else [slower])


def examine_machine(directory: Path) -> Report:
    """Reports the resources of this machine, and problems for a run in `directory`."""
    free = {name: f"{size / _GIB:.1f} GiB" for name, size in _free(directory).items()}
    used = f"{torch.backends.cpu.get_cpu_capability()}, {usable_cores()} of {os.cpu_count()} cores are usable"
    facts = [
        f"processor: {processor_name()}, {used}",
        f"memory: {free.get('memory', 'unknown')}",
        f"disk: {free['disk']} free in {directory}",
        f"/dev/shm: {free['/dev/shm']} free" if "/dev/shm" in free else "/dev/shm: none",
        _gpus(),
        *_packages(),
        f"ports: {_PORT} (serve.port) {_refused(_PORT) or 'free'}",
    ]
    return Report(facts, list(machine_problems(directory)))


def _free(directory: Path) -> dict[str, int]:
    """Returns bytes by name: free on the disk and in /dev/shm, and total memory. Omits unknown values."""
    sizes = {"disk": shutil.disk_usage(directory).free}
    if (shm := Path("/dev/shm")).is_dir():
        sizes["/dev/shm"] = shutil.disk_usage(shm).free
    return sizes | ({"memory": memory} if (memory := host_memory()) else {})


def machine_problems(directory: Path) -> Iterator[Problem]:
    """Finds resources that this machine lacks for a run that writes to the directory, and settings that hide or block
    them."""
    for name, free in _free(directory).items():
        wanted, do = _WANTED[name]
        if free < wanted * _GIB:
            yield Problem(name, "", f"{free / _GIB:.2f} GiB, less than {wanted} GiB", do)
    if (driver := _driver_version()) and not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        found = f"the NVIDIA driver {driver} is loaded, and torch {torch.__version__} (built for {built}) finds no GPU"
        do = "install a build of torch for CUDA; look at CUDA_VISIBLE_DEVICES and nvidia-smi"
        yield Problem("GPU", "", found, do)
    cores, threads = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        found = f"OMP_NUM_THREADS is {threads}, and {cores} core(s) are usable"
        yield Problem("threads", "", found, "unset it: cluster.threads says how many")
    if refused := _refused(_PORT):
        yield Problem("ports", "", f"port {_PORT}: {refused}", "choose another serve.port, if you serve")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < 1024:
        found = f"a process may open {limit}, fewer than 1024"
        yield Problem("open files", "", found, "raise it with ulimit -n")


_WANTED = {
    "disk": (5, "free some, or choose another run.dir: checkpoints need space"),
    "/dev/shm": (1, "docker run --shm-size=8g: Ray keeps objects there"),
    "memory": (2, "close other programs; `trivium check` plans a config"),
}
"""By name of `_free`: GiB that a run needs, and the remedy if there is less."""


def _gpus() -> str:
    driver = f", driver {number}" if (number := _driver_version()) else ""
    if not torch.cuda.is_available():
        return f"GPU: torch finds no usable one{driver}"
    about = torch.cuda.get_device_properties(0)
    one = f"{about.name}, {about.total_memory / _GIB:.0f} GiB, compute capability {about.major}.{about.minor}"
    return f"GPU: {torch.cuda.device_count()} x {one}; CUDA {torch.version.cuda}{driver}"


def _driver_version() -> str:
    """The version of NVIDIA's kernel module; empty if there is none."""
    about = Path("/proc/driver/nvidia/version")
    number = re.search(r"\d+\.\d+(\.\d+)?", about.read_text()) if about.is_file() else None
    return number[0] if number else ""


def _refused(port: int) -> str:
    """Returns why a server cannot listen on the port; empty if it can."""
    with socket.socket() as listener:
        # As servers set it: a port whose last connection has just ended is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _packages() -> Iterator[str]:
    """Yields the installed versions of the required packages and of each extra."""
    wanted: dict[str, list[str]] = {}
    for line in requires("trivium") or ():
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        if name is not None and name[0] != "trivium":
            wanted.setdefault(extra[1] if extra else "base", []).append(name[0])
    for extra, names in wanted.items():
        versions = {name: _version(name) for name in names}
        absent = [name for name, number in versions.items() if not number]
        there = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
        install = f"; not installed: {', '.join(absent)} (pip install 'trivium[{extra}]')" if absent else ""
        yield f"packages, {extra}: {there or 'none'}{install}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
