"""Config: a config of Trinity-RFT's shape with attributes, whose unset keys have Trinity-RFT's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from trivium.config import read_yaml
from trivium.frontdoors.plain_values import plain, resolved
from trivium.frontdoors.trinity.config.config_table import TABLE
from trivium.frontdoors.trinity.translation import translate


class Config(dict[str, Any]):
    """A mapping whose keys are attributes as well: `config.trainer.total_steps = 3`, or `Config(mode="train")`."""

    __slots__ = ("_section",)

    def __init__(self, *args: Any, **sections: Any) -> None:
        super().__init__()
        self._fill(dict(*args, **sections), "")

    @classmethod
    def of(cls, config: object) -> Self:
        """Returns a config of any kind with its references followed."""
        return cls._within(resolved(plain(config)), "")

    @classmethod
    def _within(cls, values: Mapping[str, Any], section: str) -> Self:
        config = cls()
        config._fill(values, section)
        return config

    def _fill(self, values: Mapping[str, Any], section: str) -> None:
        self._section = section
        for name, value in values.items():
            setattr(self, name, value)

    @classmethod
    def _wrapped(cls, value: Any, section: str) -> Any:
        if isinstance(value, list):
            # Items of lists have tables of their own: no key begins with `?`, so an unset one is an AttributeError.
            return [cls._within(item, "?.") if isinstance(item, Mapping) else item for item in value]
        return cls._within(value, section) if isinstance(value, Mapping) else value

    def __getattr__(self, name: str) -> Any:
        """Returns a value. A section that is not set is an empty one, another key has Trinity-RFT's default."""
        if name in self:
            return self[name]
        # `copy` and `pickle` ask for such names, which must not become sections.
        if name.startswith("_"):
            raise AttributeError(name)
        key = f"{self._section}{name}"
        if key in TABLE.sections:
            self[name] = self._within({}, f"{key}.")
            return self[name]
        if key not in TABLE.entries:
            raise AttributeError(f"{key} is not a key of Trinity-RFT's config, and it is not set")
        return TABLE.default_of(key)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_section":
            object.__setattr__(self, name, value)
        else:
            self[name] = self._wrapped(value, f"{self._section}{name}.")

    def check_and_update(self) -> Self:
        """Raises ConfigError with every key that cannot be translated. Returns the config unchanged."""
        translate(self)
        return self


def load_config(config_path: str | Path) -> Config:
    """Reads a config from a YAML file."""
    return Config.of(read_yaml(Path(config_path)))
