"""Another trainer's config file as a Trivium config: what `trivium translate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trivium.config import read_yaml
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.tables import Translation


def translate_file(origin: str, file: str, overrides: Sequence[str] = ()) -> Translation:
    """The config of the front door `origin` (its `translation.translate`) in a file, with overrides.

    The file is YAML, unless the front door reads others (its `translation.read`). Raises ConfigError with everything
    that cannot be translated.
    """
    door = import_module(f"trivium.frontdoors.{origin}.translation")
    return door.translate(getattr(door, "read", _read)([file, *overrides]))


def _read(words: Sequence[str]) -> dict[str, Any]:
    file, *overrides = words
    return overridden(read_yaml(Path(file)), overrides)
