"""Merges config mappings: `extends`, overrides, stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from trivium.foundation.errors import ConfigError


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `change`, mapping by mapping; a section whose `kind` changes starts afresh.

    A section of `base` without a kind keeps its keys, so that validation reports those that the new kind lacks. A
    section that is only a name stands for its kind. In a list, keys are indices: `{stages: {0: {...}}}` changes the
    first item. Raises ConfigError for an index outside the list.
    """
    result = copy.deepcopy(dict(base))
    for key, value in change.items():
        old = result.get(key)
        if is_mapping(value) and isinstance(old, str):
            old = {"kind": old}
        if is_mapping(value) and isinstance(old, list | tuple):
            result[key] = _merged_items(key, old, value)
        elif is_mapping(value) and is_mapping(old):
            new_kind = "kind" in value and "kind" in old and value["kind"] != old["kind"]
            result[key] = copy.deepcopy(dict(value)) if new_kind else merged(old, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged_items(name: str, items: Sequence[Any], change: Mapping[str, Any]) -> list[Any]:
    """The list with the items at these places changed."""
    places = {str(number): item for number, item in enumerate(items)}
    for place in change:
        if str(place) not in places:
            raise ConfigError(
                f"{name}.{place}",
                f"{name} has {len(items)} item(s)",
                f"use an index from 0 to {len(items) - 1}" if items else f"set {name} as a list",
            )
    return list(merged(places, {str(place): value for place, value in change.items()}).values())
