"""`hydra.main` and `OmegaConf` for scripts of verl, over the front door's own reader of configs and overrides.

verl's scripts read their config with Hydra from YAML files that verl installs. Here the defaults are those of the
config table, so that neither verl nor Hydra has to be installed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from trivium.frontdoors.overrides import put
from trivium.frontdoors.plain_values import Section, plain, resolved
from trivium.frontdoors.verl.main_ppo import config_of, with_defaults

DictConfig = Section
ListConfig = list


def main(
    config_path: str | None = None, config_name: str | None = None, version_base: object = None
) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Decorates a function that takes a config. A call reads the config from the arguments of the command line.

    The base is the file `config_name` in the folder `config_path` beside the script, or verl's defaults if there is no
    such file. Every key that it does not set has verl's default. Raises ConfigError for invalid arguments.
    """
    del version_base

    def decorate(function: Callable[..., Any]) -> Callable[[], Any]:
        @functools.wraps(function)
        def call() -> Any:
            folder = Path(inspect.getsourcefile(function) or ".").parent / (config_path or "")
            name = (config_name or "ppo_trainer").removesuffix(".yaml")
            exists = (folder / f"{name}.yaml").is_file()
            base = [f"--config-path={folder}", f"--config-name={name}"] if exists else []
            return function(with_defaults(config_of([*base, *sys.argv[1:]])))

        return call

    return decorate


class OmegaConf:
    """The functions of OmegaConf that verl's scripts call, for configs of `main`."""

    @staticmethod
    def create(config: Any = None) -> Any:
        """Returns a mapping, or YAML text, as a config."""
        config = yaml.safe_load(config) if isinstance(config, str) else config
        return Section.of({} if config is None else plain(config))

    @staticmethod
    def is_config(config: object) -> bool:
        return isinstance(config, Section)

    @staticmethod
    def to_container(config: Any, *, resolve: bool = False, **options: Any) -> Any:
        """Returns the config as plain mappings and lists."""
        del options
        return resolved(plain(config)) if resolve else plain(config)

    @staticmethod
    def resolve(config: Section) -> None:
        """Resolves the references of a config in place."""
        config.update(Section.of(resolved(plain(config))))

    @staticmethod
    def merge(*configs: Any) -> Any:
        """Returns the first config with the keys of the others, section by section."""
        merged: dict[str, Any] = {}
        for config in configs:
            for key, value in plain(config).items():
                put(merged, [key], value)
        return Section.of(merged)

    @staticmethod
    def select(config: Any, key: str, default: Any = None) -> Any:
        """Returns the value of a dotted key, or the default."""
        for name in key.split("."):
            if not isinstance(config, Mapping) or config.get(name) is None:
                return default
            config = config[name]
        return config

    @staticmethod
    def update(config: Section, key: str, value: Any) -> None:
        """Sets a dotted key."""
        *above, last = key.split(".")
        for name in above:
            config = config.setdefault(name, Section())
        config[last] = Section.of(value)

    @staticmethod
    def set_struct(config: object, value: bool | None) -> None:
        """Does nothing: keys may always be added."""

    @staticmethod
    def to_yaml(config: Any, *, resolve: bool = False) -> str:
        return yaml.safe_dump(OmegaConf.to_container(config, resolve=resolve), sort_keys=False, allow_unicode=True)


@contextmanager
def open_dict(config: Any) -> Iterator[Any]:
    """Yields the config: keys may always be added."""
    yield config
