"""The run directory: the process that holds it, the configs that may continue its run, and the recorded changes."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, TextIO

import yaml

from trivium.buffers.step_log import STEPS
from trivium.checkpoint.store import CheckpointStore
from trivium.config import RunConfig
from trivium.config.merging import is_mapping
from trivium.config.resume import Difference, as_begun, resume_changes, resume_differences, to_yaml
from trivium.config.saved import BESIDE, as_yaml, config_file, from_yaml
from trivium.foundation.atomic import MANIFEST, atomic_write, fsync, made_directory, writing
from trivium.foundation.concurrency import ProcessLife, end_with, usable_cores
from trivium.foundation.errors import ConfigError, Problem, RunDirError, first_cause, one_line
from trivium.foundation.phases import SPANS
from trivium.planning.plan import Plan, plan_run
from trivium.runtime.logs import ENDED, logging_to
from trivium.training.device import machine, training_ranks

_log = logging.getLogger("trivium")
ADOPTED = "taken_up.txt"
"""Names the checkpoint of another run that this directory started from. The config of that run does not apply here."""
FORM = 1
"""The form of what a run directory holds, which plan.yaml names. A commit that changes the form raises it, and reads no
other one."""
_PLAN = "plan.yaml"
_CHANGES = "changes.jsonl"
_ROWS = "rows.json"
"""The number and hash of the rows that each task source of the run reads."""
_OF_A_START = ("rollouts", "model", "sync", "order", "tables", "metrics.jsonl", STEPS, SPANS)
"""Files and folders that a run may have written before its first step."""
_LOCK = ".lock"
_OWN = (*_OF_A_START, "checkpoints", _PLAN, _ROWS, _CHANGES, "summary.json", "bench.jsonl", BESIDE, _LOCK)
"""Files and folders that a run replaces or removes."""
_ENDING_S = 20.0
"""Seconds that a new run waits for the processes of a killed run."""
_POLL_S = 0.05
_RUN_ENDED = "ended: "
"""Precedes the owner's name once its run has ended."""
_joined: dict[Path, TextIO] = {}
"""The locks taken by `hold_with`, by run directory."""


@contextmanager
def open_run_dir(config: RunConfig, rows: Mapping[str, str] | None = None, plan: Plan | None = None) -> Generator[Path]:
    """Opens the run directory: this process and those that join it (`hold_with`) hold it while the block runs. Writes
    config.yaml (config.run.yaml beside a config.yaml of the user), plan.yaml and log.txt. `rows` are the digests of
    the task sources (`preflight`). `plan` is that of the run; None: the one that follows from the config alone.

    Raises RunDirError if another run holds the directory, its config is lost, or it holds files that no run wrote under
    names that a run needs; ConfigError if it belongs to another run.
    """
    run_dir = made_directory(Path(config.run.dir), "run.dir")
    if not _has_begun(run_dir):
        refuse_another_run(config, run_dir, rows or {})
    if (run_dir / "config.yaml").is_file() and not _has_begun(run_dir):
        atomic_write(run_dir / BESIDE, to_yaml(config))  # before the lock, which tells that a run has begun here
    with (
        _opened(run_dir / _LOCK) as lock,
        _held(lock, run_dir),
        logging_to(run_dir, "log.txt"),
    ):
        _discard_unfinished(run_dir)
        _claim(config, run_dir, rows or {}, plan)
        try:
            yield run_dir
        except Exception as error:
            _log.info("%s%s", ENDED, one_line(first_cause(error)))
            raise


def _discard_unfinished(run_dir: Path) -> None:
    """Removes the files that a killed process of this run was writing (`atomic_write`). Explorers do not hold the
    directory, and write only files of their own name."""
    for path in run_dir.glob(".*.writing"):
        if path.is_file() and not path.name.startswith(".serve-"):
            path.unlink(missing_ok=True)


def _opened(path: Path) -> TextIO:
    """The file that is locked. Raises StorageError if it cannot be written."""
    with writing(path):
        return open(path, "a+", encoding="utf-8")


@contextmanager
def _held(lock: TextIO, run_dir: Path) -> Generator[None]:
    """Holds the lock, and writes the name of this process to its file until the run ends."""
    me = ProcessLife.of(os.getpid())
    _share(lock, run_dir, me, _RUN_ENDED + _name(me))
    _write(lock, _name(me))
    try:
        yield
    finally:
        _write(lock, _RUN_ENDED + _name(me))


def hold_with(owner: ProcessLife, run_dir: Path) -> Callable[[], None]:
    """Joins the runs of `owner`: holds the run directory until this process ends, and ends this process when `owner`
    ends. No other run can begin while this process may write. Returns a function for the end of the run, after which
    this process may end later than `owner`. Raises RunDirError if another run holds the directory."""
    if owner.pid == os.getpid() or run_dir in _joined or not run_dir.is_dir():
        return lambda: None
    outlive = end_with(owner)
    lock = _opened(run_dir / _LOCK)  # open to the end of the process
    _share(lock, run_dir, owner, _name(owner), _RUN_ENDED + _name(owner))
    _joined[run_dir] = lock
    return outlive


def _share(lock: TextIO, run_dir: Path, owner: ProcessLife, *allowed: str) -> None:
    """Takes the lock, which the processes of one owner share. A process may share a lock that another one holds only if
    its file holds one of the `allowed` texts. Waits for the last process of an ended run, which may still write."""
    end = time.monotonic() + _ENDING_S
    while True:
        is_alone = _locked(lock, fcntl.LOCK_EX)
        if is_alone:
            _write(lock, _RUN_ENDED + _name(owner))
        # flock(2) does not exchange the two locks at once: another process may take it in between, and write its name.
        if (is_alone or _text(lock) in allowed) and _locked(lock, fcntl.LOCK_SH) and _text(lock) in allowed:
            return
        fcntl.flock(lock, fcntl.LOCK_UN)
        holder = _holder(lock)
        if (holder is not None and holder()) or time.monotonic() > end:
            found = "another process runs in it"
            if holder is not None:
                found = f"process {holder.pid} on host {holder.host} runs in it"
                if not holder():
                    found = f"process {holder.pid} on host {holder.host} has ended, but one that it started has not"
            raise RunDirError(f"run in {run_dir}", found, "wait for it, end it, or choose another run.dir")
        time.sleep(_POLL_S)


def _locked(lock: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name(owner: ProcessLife) -> str:
    return json.dumps(asdict(owner))


def _holder(lock: TextIO) -> ProcessLife | None:
    """Returns the process that the lock's file names; None if its run has ended, or if the file is being written."""
    try:
        return ProcessLife(**json.loads(_text(lock)))
    except (ValueError, TypeError):
        return None


def _text(lock: TextIO) -> str:
    lock.seek(0)
    return lock.read()


def _write(lock: TextIO, text: str) -> None:
    lock.truncate(0)
    lock.write(text)  # at the beginning: the mode `a+` writes at the end of the file
    lock.flush()


def as_saved(config: RunConfig) -> RunConfig:
    """Returns the config with its day. If its directory holds a run, the day is that of the run; if it holds a step,
    so are the defaults that were saved with it."""
    path = config_file(Path(config.run.dir))
    saved: Mapping[str, Any] = _saved_config(path) if path.is_file() else {}
    if saved and _has_steps(path.parent):
        config = as_begun(saved, config)
    if config.run.date is not None:
        return config
    day = (saved.get("run") or {}).get("date") or date.today()
    return on_day(config, date.fromisoformat(str(day)))


def on_day(config: RunConfig, day: date) -> RunConfig:
    """Returns the config of a run that began on this day."""
    return config.model_copy(update={"run": config.run.model_copy(update={"date": day})})


def recorded_changes(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the changes made with `--change`, in order: the last `step` before the change, and `changes`, field ->
    [value before, after]."""
    path = run_dir / _CHANGES
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    return [_read_json(row, path) for row in lines]


def refuse_another_run(config: RunConfig, run_dir: Path, rows: Mapping[str, str]) -> None:
    """Raises RunDirError or ConfigError if the directory holds a run that this config does not continue, or that began
    with other `rows`; or files that no run wrote, which this one would replace."""
    # Another run that begins at this moment makes the lock before its other files.
    foreign = [name for name in _OWN if (run_dir / name).exists() and not _is_built(run_dir / name)]
    if not _has_begun(run_dir):
        if foreign:
            found = f"it holds files that no run wrote, and that this one would replace: {', '.join(foreign)}"
            raise RunDirError(f"a new run in {run_dir}", found, "move them elsewhere, or choose another run.dir")
        return
    if (form := _form(run_dir)) not in (None, FORM):
        raise RunDirError(
            f"continue the run in {run_dir}",
            f"another version of Trivium wrote it: its form is {form}, and that of this version is {FORM}",
            "continue it with the version that began it, or choose another run.dir",
        )
    path = config_file(run_dir)
    if not path.is_file():
        if _holds_a_run(run_dir) and not (run_dir / ADOPTED).is_file():
            raise _unknown_config(run_dir, "its config.yaml is missing")
        return
    if not config.run.resume:
        raise RunDirError(f"a new run in {run_dir}", "it holds a run", "choose another run.dir, or allow run.resume")
    problems = _differences(run_dir, config, rows)
    if problems and _has_steps(run_dir):
        raise ConfigError(
            f"continue the run in {run_dir}",
            "the run began with another config, or other rows",
            "choose another run.dir, or put these back:",
            problems,
        )


def _differences(run_dir: Path, config: RunConfig, rows: Mapping[str, str]) -> list[Problem]:
    """Returns the differences from the config and the rows that the run in the directory began with."""
    path = run_dir / _ROWS
    began: Mapping[str, str] = _read_json(path.read_text(encoding="utf-8"), path) if path.is_file() else {}
    return resume_differences(_saved_config(config_file(run_dir)), config) or [
        Problem(where, digest, f"the run began with {began[where]}", "put the rows back, or start another run.dir")
        for where, digest in rows.items()
        if began.get(where, digest) != digest
    ]


def _form(run_dir: Path) -> int | None:
    """The form that the plan of a run directory names, 0 for a plan without one. None if there is no plan."""
    path = run_dir / _PLAN
    if not path.is_file():
        return None
    named = re.match(r"form: (\d+)\n", path.read_text(encoding="utf-8", errors="replace"))
    return int(named[1]) if named else 0


def _read_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunDirError(
            f"read {path}", f"it is damaged: {error}", "restore it, or remove the damaged part"
        ) from error


def _claim(config: RunConfig, run_dir: Path, rows: Mapping[str, str], plan: Plan | None) -> None:
    """Writes the config into a new run directory; in an existing one, checks that it is the same run."""
    refuse_another_run(config, run_dir, rows)
    # Before the first file, because a class of the user's may fail to describe itself.
    plan_text = (plan or plan_run(config, usable_cores(), machine(), training_ranks(config.cluster))).to_yaml()
    path = config_file(run_dir)
    if path.is_file():
        _continue(config, run_dir, rows)
        if as_yaml(_saved_config(path)) != path.read_text(encoding="utf-8"):
            path = run_dir / BESIDE  # edited by the user, who may have written comments
    if rows:
        atomic_write(run_dir / _ROWS, json.dumps(rows, indent=1))
    atomic_write(path, to_yaml(config))
    with writing(run_dir):
        fsync(run_dir)  # before the first checkpoint: without its config, a run cannot be continued
    atomic_write(run_dir / _PLAN, f"form: {FORM}\n{plan_text}")


def _continue(config: RunConfig, run_dir: Path, rows: Mapping[str, str]) -> None:
    """Records the differences of `config` from the saved one. After an aborted start, removes its files instead."""
    # With differences, the run took no step: else `refuse_another_run` has raised.
    if not _differences(run_dir, config, rows):
        _record(run_dir, resume_changes(_saved_config(config_file(run_dir)), config))
        return
    _log.warning("the run in %s ended before its first step: it starts again with this config", run_dir)
    for name in _OF_A_START:
        _remove(run_dir / name)


def _saved_config(path: Path) -> dict[str, Any]:
    try:
        saved = from_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unknown_config(path.parent, f"its config.yaml is damaged: {error}") from error
    if not is_mapping(saved):
        raise _unknown_config(path.parent, "its config.yaml is damaged: no mapping")
    return dict(saved)


def _unknown_config(run_dir: Path, cause: str) -> RunDirError:
    return RunDirError(
        f"continue the run in {run_dir}",
        f"{cause}, so it is unknown whether this config is the run's",
        "put config.yaml back; or choose another run.dir (docs/operate.md: another config from the same weights)",
    )


def _has_begun(run_dir: Path) -> bool:
    """Whether a run has opened the directory, or its checkpoints or rollouts have been copied here."""
    lock = run_dir / _LOCK
    is_locked = lock.is_file() and re.match(rf"({_RUN_ENDED})?(\{{|$)", lock.read_text(errors="replace"))
    return bool(is_locked or CheckpointStore(run_dir / "checkpoints").steps() or _journals(run_dir))


def _is_built(path: Path) -> bool:
    """Whether a model directory was built by another command for the run, as by `trivium eval --step 0`."""
    return path.name == "model" and ((path / MANIFEST).is_file() or (path / "config.json").is_symlink())


def _holds_a_run(run_dir: Path) -> bool:
    return _has_steps(run_dir) or bool(_journals(run_dir))


def _journals(run_dir: Path) -> list[Path]:
    return [*run_dir.glob("rollouts/stage-*/step-*.msgpack")]


def _has_steps(run_dir: Path) -> bool:
    """Whether a train step was taken, judged by the files: checkpoints, rows of metrics or, without those, rollouts for
    a second step."""
    if CheckpointStore(run_dir / "checkpoints").steps():
        return True
    rows = run_dir / "metrics.jsonl"
    if rows.is_file():
        return re.search(rb'^\{"step": [1-9]', rows.read_bytes(), re.MULTILINE) is not None
    numbers = (path.stem.removeprefix("step-") for path in _journals(run_dir))
    return any(number.isdecimal() and int(number) > 1 for number in numbers)


def _record(run_dir: Path, changes: Sequence[Difference]) -> None:
    """Adds a row to the changes, unless a killed start has added it."""
    steps = CheckpointStore(run_dir / "checkpoints").steps()
    row = {"step": steps[-1] if steps else 0, "changes": {c.where: [c.before, c.now] for c in changes}}
    rows = recorded_changes(run_dir)
    if not changes or row in rows[-1:]:
        return
    atomic_write(run_dir / _CHANGES, "".join(json.dumps(change) + "\n" for change in (*rows, row)))
    differences = ", ".join(f"{change.where}: {change.before} -> {change.now}" for change in changes)
    _log.warning(
        "changed after step %d: %s. A run that begins with these values gives other bits", row["step"], differences
    )


def _remove(path: Path) -> None:
    """Removes a file or a directory. A directory is renamed first, so that a killed process leaves no partial one under
    its name."""
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    if path.is_dir():
        path.rename(aside)
        shutil.rmtree(aside)
    else:
        path.unlink(missing_ok=True)
