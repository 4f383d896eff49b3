"""Registries of Trinity-RFT's names: users register classes with a decorator, and configs name them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trivium.foundation.errors import ConfigError, UnknownName
from trivium.foundation.registry import resolve, suggest

T = TypeVar("T")
PLUGIN_DIRS = "TRINITY_PLUGIN_DIRS"
"""The environment variable with the folders (separated as in PATH) whose modules register classes."""


class Registry:
    """Classes by name. `get` also takes a path: `file.py:Name`, `package.module:Name` or `package.module.Name`."""

    def __init__(self, name: str, ours: Mapping[str, str] | None = None) -> None:
        """`ours` are names -> paths of classes that are imported when they are read."""
        self.name, self._paths = name, dict(ours or {})
        self.modules: dict[str, Any] = {}

    def register_module(self, module_name: str, module_cls: Any = None, *, force: bool = False, lazy: bool = False):
        """Registers a class, as a decorator or with `module_cls`. Raises ConfigError for a name that another class
        has, unless `force` is set."""
        del lazy  # a module is imported once, with its folder

        def add(target: T) -> T:
            other = self.modules.get(module_name, target)
            # A module that is imported again, under another name, replaces its own classes.
            if not force and getattr(other, "__qualname__", "") != getattr(target, "__qualname__", ""):
                raise ConfigError(
                    f"register {module_name!r} in {self.name}", f"{other!r} has that name", "choose another name"
                )
            self.modules[module_name] = target
            return target

        return add if module_cls is None else add(module_cls)

    def get(self, name: str) -> Any:
        """Returns the class of a name or a path. Raises UnknownName."""
        if path_of(name) is not None:
            return resolve(self.name, path_of(name) or name)
        load_plugins(os.environ.get(PLUGIN_DIRS, ""))
        if name in self.modules:
            return self.modules[name]
        if name in self._paths:
            return resolve(self.name, self._paths[name])
        raise UnknownName(
            f"{self.name}: {name!r}",
            f"it is not registered, and {PLUGIN_DIRS} is {os.environ.get(PLUGIN_DIRS, '')!r}",
            f"{suggest(name, self)}; or set {PLUGIN_DIRS} to the folder of the module that registers it",
        )

    def __contains__(self, name: object) -> bool:
        return name in self.modules or name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter({**self._paths, **self.modules})


def path_of(name: str) -> str | None:
    """Converts the name of a user's class or function to Trivium's form: `package.module.Name` becomes
    `package.module:Name`, and a file of the working directory gets its full path. Returns None for a registered name.
    """
    module, dot, last = name.rpartition(".")
    name = f"{module}:{last}" if dot and ":" not in name else name
    file, is_file, attribute = name.rpartition(".py:")
    path = Path(f"{file}.py").expanduser()
    if is_file and path.is_file():
        return f"{path.resolve()}:{attribute}"
    return name if ":" in name else None


@cache
def load_plugins(folders: str) -> None:
    """Imports every module of the folders, once."""
    for folder in filter(None, folders.split(os.pathsep)):
        for file in sorted(Path(folder).expanduser().glob("*.py")):
            spec = importlib.util.spec_from_file_location(file.stem, file)
            if file.stem in sys.modules or spec is None or spec.loader is None:
                continue
            # Before the module runs, as in an import: dataclasses and pickle look a class up there. The file stays
            # where it is; Trinity copies it into its package, where equal names of two users clash (its issue 243).
            module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)


_HERE = "trivium.frontdoors.trinity"
WORKFLOWS = Registry("workflows")
REWARD_FUNCTIONS = Registry("rewards")
_STRATEGY = f"{_HERE}.objects.sample_strategies:DefaultSampleStrategy"
MONITOR = Registry(
    "monitors", dict.fromkeys(("tensorboard", "wandb", "mlflow"), f"{_HERE}.monitor_views:monitor_of_run")
)
SAMPLE_STRATEGY = Registry(
    "sample_strategies", dict.fromkeys(("default", "warmup", "staleness_control", "mix"), _STRATEGY)
)
