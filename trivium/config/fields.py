"""How config fields are declared: what a resumed run may change, and paths relative to the config file."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

_BASE: ContextVar[Path | None] = ContextVar("config_base", default=None)
"""The folder of the config that is being validated: relative paths start there."""


@contextmanager
def paths_relative_to(folder: Path | None) -> Generator[None]:
    """Relative paths of a config that is validated inside this block start from `folder`."""
    token = _BASE.set(folder)
    try:
        yield
    finally:
        _BASE.reset(token)


def free(default: Any = ..., *, chosen: bool = False, **constraints: Any) -> Any:
    """A field that a resumed run may change: length, cadence, monitors, threads, micro-batch budget. `chosen`: where it
    is unset, the run chooses a value when it begins, and keeps it (`trivium.config.resume.as_begun`)."""
    extra: dict[str, Any] = {"resume": "free"} | ({"chosen": True} if chosen else {})
    return Field(default, json_schema_extra=extra, **constraints)


CHANGEABLE: dict[str, Any] = {"resume": "change"}
"""The mark of `changeable`, for fields that are declared elsewhere."""


def changeable(default: Any = ..., **constraints: Any) -> Any:
    """A field that a resumed run may change if `run.change` allows it; what follows then differs from the run's first
    config."""
    return Field(default, json_schema_extra=CHANGEABLE, **constraints)


def config_path(path: str) -> Path:
    """An absolute path; a relative one starts from the config's folder."""
    return ((_BASE.get() or Path.cwd()) / Path(path).expanduser()).resolve()


ConfigPath = Annotated[str, AfterValidator(lambda path: str(config_path(path)))]
"""A field that holds a path: relative to the config file when read, absolute from then on."""


def plugin_path(name: str) -> str:
    """The name of a class or function; the file of `file.py:Name` starts from the config's folder."""
    file_name, is_file, attribute = name.rpartition(".py:")
    return f"{config_path(file_name + '.py')}:{attribute}" if is_file else name


def _with_module(name: str) -> str:
    if ":" not in name:
        raise ValueError("expected `package.module:Name` or `file.py:Name`")
    return plugin_path(name)


PluginPath = Annotated[str, AfterValidator(_with_module)]
"""A field that names a user's class or function: `package.module:Name`, or `file.py:Name` beside the config file."""
