"""Converts configs of any kind to plain mappings, lists and values, and resolves references (`${...}`).

`Section` and `read` give user code and adapters access to a config by attribute or by key.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, cast

from trivium.foundation.errors import ConfigError, MissingPackage

_MISSING = "???"
"""OmegaConf's marker for a mandatory value that is not set."""
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*(\$\{.*\})")
_OPENED = re.compile(r"(\\*)\$\{")
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\\$\{")


def is_missing(value: object) -> bool:
    """Whether a value is OmegaConf's marker for a missing value."""
    return isinstance(value, str) and value == _MISSING


def unresolved(value: object) -> str | None:
    """Returns the unresolved references of a value, or None."""
    match = _REFERENCE.search(value) if isinstance(value, str) else None
    return match and match.group(1)


def escaped(value: Any) -> Any:
    """Returns a value with `\\${` for each `${`, so that its text holds no references."""
    return _of_texts(value, lambda text: _OPENED.sub(lambda match: f"{match[1] * 2}\\${{", text))


def unescaped(value: Any) -> Any:
    """Returns a value with `${` for each `\\${`: the inverse of `escaped`."""
    return _of_texts(value, lambda text: _ESCAPED.sub(lambda match: f"{match[1][::2]}${{", text))


def _of_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value with all its texts changed."""
    if isinstance(value, dict):
        return {key: _of_texts(part, change) for key, part in cast(dict[Any, Any], value).items()}
    if isinstance(value, list):
        return [_of_texts(part, change) for part in cast(list[Any], value)]
    return change(value) if type(value) is str else value


def plain(value: object) -> Any:
    """Converts OmegaConf containers, dataclasses, namespaces and mappings to plain mappings, lists and values.

    Text of a container is as in `resolved`.
    """
    # A container comes from code that imported OmegaConf: other configs are converted without the package.
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return plain(_resolved(omegaconf, value))
    items = getattr(value, "items", None)
    if items is not None and hasattr(value, "keys"):
        return {str(key): plain(part) for key, part in items()}
    if dataclasses.is_dataclass(value) or type(value).__name__ in ("SimpleNamespace", "Namespace"):
        return {key: plain(part) for key, part in vars(value).items()}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, list | tuple) or (isinstance(value, Sequence) and type(value).__name__ == "ListConfig"):
        return [plain(part) for part in value]
    return value


class Section(dict[str, Any]):
    """A config section that supports `section.key`, `section["key"]` and `section.get("key", default)`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the config has no {name!r}: it has {', '.join(self)}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @classmethod
    def of(cls, value: Any) -> Any:
        """Returns the value with its mappings converted to sections."""
        if isinstance(value, Mapping):
            return cls({str(name): cls.of(part) for name, part in value.items()})
        return [cls.of(part) for part in value] if isinstance(value, list) else value


def read(config: Any, key: str, default: Any = None) -> Any:
    """Returns a key of a mapping or an attribute of an object, or the default if it is absent or None."""
    value = config.get(key) if hasattr(config, "get") else getattr(config, key, None)
    return default if value is None else value


def resolved(config: Any) -> Any:
    """Resolves the references of a plain config, as OmegaConf does: `${a.b}`, `${.b}`, `${oc.select:a.b,default}`,
    `${oc.env:NAME,default}`. A text whose reference leads to no value stays as it is, and `\\${`
    stays escaped (`unescaped`), so that the result may be resolved again.

    Raises ConfigError for `${` that begins no reference, and MissingPackage for references without OmegaConf.
    """
    if not isinstance(config, dict) or not _has_reference(config):
        return config
    purpose = "references (${...}) in a config"
    return _resolved(imported_omegaconf(purpose), container_of(cast(dict[str, Any], config), purpose))


def imported_omegaconf(purpose: str) -> Any:
    """Returns the module. Raises MissingPackage, which names the `purpose`."""
    try:
        import omegaconf
    except ModuleNotFoundError as error:
        raise MissingPackage("omegaconf", "omegaconf", purpose) from error
    return omegaconf


def container_of(config: Mapping[str, Any], purpose: str) -> Any:
    """Returns a config as a container of OmegaConf. Raises ConfigError for `${` that begins no reference."""
    omegaconf = imported_omegaconf(purpose)
    try:
        # A config may hold functions and classes, which OmegaConf refuses without the flag (UnsupportedValueType).
        return omegaconf.OmegaConf.create(plain(config), flags={"allow_objects": True})
    except omegaconf.errors.GrammarParseError as error:
        cause, do = str(error).partition("\n")[0], "write \\${ for text without a reference"
        raise ConfigError(f"the reference in {error.full_key}", cause, do) from None


def _has_reference(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_reference, value.values()))
    return any(map(_has_reference, value)) if isinstance(value, list) else isinstance(value, str) and "${" in value


def _resolved(omegaconf: Any, value: Any) -> Any:
    """Converts a container to plain mappings and lists, reference by reference."""
    if omegaconf.OmegaConf.is_dict(value):
        return {str(key): _entry(omegaconf, value, key) for key in value}
    if omegaconf.OmegaConf.is_config(value):
        return [_entry(omegaconf, value, place) for place in range(len(value))]
    return value


def _entry(omegaconf: Any, container: Any, key: Any) -> Any:
    try:
        # Reading an entry turns `\${` into `${`; it is escaped again, because the result may be read once more.
        return _resolved(omegaconf, escaped(container[key]))
    except (omegaconf.errors.OmegaConfBaseException, RecursionError):  # a missing value, or a reference to none
        return omegaconf.OmegaConf.to_container(container, resolve=False)[key]
