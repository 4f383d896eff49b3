"""Another trainer's config file as a Trivium config: what `trivium translate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from trivium.config import read_yaml
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.tables import Translation


def translate_file(origin: str, path: Path, overrides: Sequence[str] = ()) -> Translation:
    """The config of the front door `origin` (its `translation.translate`) in a YAML file, with overrides laid over it.

    Raises ConfigError with everything that cannot be translated.
    """
    return import_module(f"trivium.frontdoors.{origin}.translation").translate(overridden(read_yaml(path), overrides))
