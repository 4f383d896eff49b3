"""Converts configs of any kind to plain mappings, lists and values, and resolves references (`${...}`).

`Section` and `read` give user code and adapters access to a config by attribute or by key.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from trivium.frontdoors.overrides import value_of

_MISSING = "???"
"""OmegaConf's marker for a mandatory value that is not set."""
_REFERENCE = re.compile(r"\$\{((?:[^${}]|\{[^${}]*\})*)\}")
"""Matches an innermost reference."""
_DEPTH = 20
"""Maximum depth of references to references."""


def is_missing(value: object) -> bool:
    """Whether a value is OmegaConf's marker for a missing value."""
    return isinstance(value, str) and value == _MISSING


def unresolved(value: object) -> str | None:
    """Returns the first unresolved reference in a value, or None."""
    match = _REFERENCE.search(value) if isinstance(value, str) else None
    return match and match.group(0)


def plain(value: object) -> Any:
    """Converts OmegaConf containers, dataclasses, namespaces and mappings to plain mappings, lists and values."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return _of_omegaconf(omegaconf, value)
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


def _of_omegaconf(omegaconf: Any, config: Any) -> Any:
    """Converts an OmegaConf container. If OmegaConf cannot resolve every reference, all of them stay unresolved."""
    options = {"throw_on_missing": False, "enum_to_str": True}
    try:
        return plain(omegaconf.OmegaConf.to_container(config, resolve=True, **options))
    except omegaconf.errors.OmegaConfBaseException:
        return plain(omegaconf.OmegaConf.to_container(config, resolve=False, **options))


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
    """Resolves the references of a config: `${a.b}`, `${.b}`, `${oc.select:a.b,default}`, `${oc.env:NAME,default}`.

    An unresolvable reference stays in the text.
    """
    return _resolved(config, config, ())


def _resolved(value: Any, root: Any, place: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(part, root, (*place, key)) for key, part in value.items()}
    if isinstance(value, list):
        return [_resolved(part, root, (*place, str(number))) for number, part in enumerate(value)]
    return _followed(value, root, place[:-1], _DEPTH)


def _followed(value: Any, root: Any, section: tuple[str, ...], depth: int) -> Any:
    """Replaces the references in a value, innermost first. A value that is one reference gets the target's type."""
    while isinstance(value, str) and depth and (match := _REFERENCE.search(value)):
        known, target = _target(match.group(1), root, section, depth - 1)
        if not known:
            return value
        if match.group(0) == value:
            return target
        value, depth = value[: match.start()] + str(target) + value[match.end() :], depth - 1
    return value


def _target(reference: str, root: Any, section: tuple[str, ...], depth: int) -> tuple[bool, Any]:
    """Resolves the text between the braces of a reference. Returns (whether it has a value, the value)."""
    resolver, colon, rest = reference.partition(":")
    if not colon:
        return _at(reference.strip(), root, section, depth)
    name, comma, default = rest.partition(",")
    name = name.strip()
    if resolver == "oc.env":
        known, value = name in os.environ, os.environ.get(name)
    elif resolver == "oc.select":
        known, value = _at(name, root, section, depth)
        comma = comma or ","  # without a default it is null
    elif resolver == "oc.decode":
        return True, value_of(rest)
    else:
        return False, None
    if known or not comma:
        return known, value
    return True, value_of(default) if default else None


def _at(path: str, root: Any, section: tuple[str, ...], depth: int) -> tuple[bool, Any]:
    """Returns (whether the path has a value, the value). Each leading dot after the first goes up one section."""
    name = path.lstrip(".")
    dots = len(path) - len(name)
    base = section[: len(section) - dots + 1] if dots else ()
    node, place = root, (*base, *name.split("."))
    for part in place:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return False, None
    if is_missing(node):
        return False, None
    node = _followed(node, root, place[:-1], depth)
    if isinstance(node, dict | list):
        node = _resolved(node, root, place) if depth else node
    return unresolved(node) is None and not is_missing(node), node
