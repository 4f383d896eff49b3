"""Translates another trainer's config file to a Trivium config, for `trivium translate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from trivium.config import read_yaml
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.tables import TranslatedConfig

_READERS = {
    "trl": "trivium.frontdoors.trl.scripts",
    "verl": "trivium.frontdoors.verl.launch_script",
}
"""Front door -> the module whose `read` returns a config, or a config with notes, of a file and overrides."""


def translate_file(origin: str, file: str, overrides: Sequence[str] = ()) -> TranslatedConfig:
    """Translates a config file, with overrides, by `translation.translate` of the front door `origin`.

    The file is YAML, unless the front door has its own reader. Raises a ConfigError that lists everything that cannot
    be translated.
    """
    door = import_module(f"trivium.frontdoors.{origin}.translation")
    words = [file, *overrides]
    result = import_module(_READERS[origin]).read(words) if origin in _READERS else _read(words)
    config, notes = result if isinstance(result, tuple) else (result, ())
    translation: TranslatedConfig = door.translate(config)
    return replace(translation, notes=(*notes, *translation.notes))


def _read(words: Sequence[str]) -> dict[str, Any]:
    file, *overrides = words
    return overridden(read_yaml(Path(file)), overrides)
