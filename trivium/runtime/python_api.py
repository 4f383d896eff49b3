"""`trivium.run`: runs functions, rows and data sets that Python code holds, from a script or a notebook."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

from trivium.config import RunConfig, config_from_mapping, read_yaml
from trivium.config.merging import is_mapping
from trivium.foundation.atomic import atomic_write
from trivium.foundation.errors import ConfigError, first_cause
from trivium.foundation.registry import name_of
from trivium.runtime.launch import SendReport, run
from trivium.tasks.given import as_lines, digest_of

T = TypeVar("T")

ConfigSource = RunConfig | Mapping[str, Any] | str | Path
Reward = Callable[..., object] | str | Mapping[str, Any]
Rows = Iterable[object] | Callable[..., object] | str | Mapping[str, Any]
"""Rows, a function that returns them, or a section of the config."""


def run_given(
    config: ConfigSource,
    rewards: Sequence[Reward] | None = None,
    tasks: Rows | Mapping[str, Rows] | None = None,
    report: SendReport | None = None,
) -> dict[str, Any]:
    """Runs the config with these rewards and tasks in place of its own; see `trivium.run` and `launch.run`."""
    complete, files = configured(config, rewards, tasks)

    def work() -> dict[str, Any]:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, text)
        return run(complete, report=report)

    try:
        return beside_a_loop(work)
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


def configured(
    config: ConfigSource, rewards: Sequence[Reward] | None, tasks: Rows | Mapping[str, Rows] | None
) -> tuple[RunConfig, dict[Path, str]]:
    """Returns the complete config, and the text of each file of rows by its path."""
    base = Path(config).resolve().parent if isinstance(config, str | Path) else None
    data = _as_mapping(config)
    if rewards is not None:
        data["rewards"] = list(rewards)
    texts: dict[str, str] = {}
    if tasks is not None:
        data["tasks"] = dict(data.get("tasks") or {})
        for name, source in (tasks if is_mapping(tasks) else {"train": tasks}).items():
            data["tasks"][name], text = _section(data["tasks"].get(name), source, f"tasks[{name!r}]")
            texts |= {} if text is None else {name: text}
    # The rows are stored in the run directory, which is known once the other sections are validated.
    directory = Path(config_from_mapping(_named(data), base).run.dir).resolve() if texts else Path()
    files: dict[Path, str] = {}
    for name, text in texts.items():
        path = directory / "tasks" / f"{name}-{digest_of(text)}.jsonl"
        data["tasks"][name]["path"], files[path] = str(path), text
    return config_from_mapping(_named(data), base), files


def _as_mapping(config: ConfigSource) -> dict[str, Any]:
    """Returns the values that the config sets, without defaults."""
    if isinstance(config, RunConfig):
        return config.model_dump(exclude_unset=True)
    if isinstance(config, str | Path):
        return read_yaml(Path(config))
    if not is_mapping(config):
        raise ConfigError("a config", f"{type(config).__name__}", "give a mapping, a RunConfig or the path of a YAML")
    return dict(config)


def _section(section: object, source: Rows, where: str) -> tuple[Any, str | None]:
    """Returns a taskset's section of the config, and the given rows as text. For given rows and functions, the config's
    `template`, `answer`, ... apply, unless the config names a kind of source."""
    if isinstance(source, str) or is_mapping(source):
        return source, None
    columns = {} if not is_mapping(section) or "kind" in section else dict(section)
    if callable(source):
        return {**columns, "kind": "python", "source": source}, None
    text = as_lines(source, where, skips=columns.get("on_bad_row") == "skip")
    return {**columns, "kind": "given", "path": "", "digest": digest_of(text)}, text


def _named(value: object) -> Any:
    """Returns the value with functions, classes and callable objects as names, and paths as text."""
    if isinstance(value, Path):
        return str(value)
    if is_mapping(value):
        return {key: _named(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_named(part) for part in value]  # pyright: ignore[reportUnknownVariableType]
    return name_of(value) if callable(value) else value


def beside_a_loop(work: Callable[[], T]) -> T:
    """Runs `work`, which may run event loops, and returns its result. If this thread already runs an event loop, as in
    a notebook, `work` runs in another thread, and an interrupt is passed to that thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    result: Future[T] = Future()

    def settle() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised again in the caller
            result.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(settle,), name="trivium-run", daemon=True)
    in_main_thread = threading.current_thread() is threading.main_thread()
    # The loop's own handler would cancel the waiting task, which cannot be cancelled.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler) if in_main_thread else None
    try:
        thread.start()
        return result.result()
    except KeyboardInterrupt:
        if thread.ident is not None and not result.done():
            # Python delivers signals to the main thread alone.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
            )
            thread.join(_GRACE_S)
        raise
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)


_GRACE_S = 30.0
"""Seconds that an interrupted run has to end."""
