"""The families of vision-language models, and where their parts are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Family:
    """The paths of the parts of a model family in the base model."""

    tower: str
    projector: tuple[str, ...]
    """The modules that map outputs of the tower to the decoder's width; in some families inside the tower."""
    decoder: str
    axis: int = 0
    """The axis along which pixels of several images are concatenated."""
    mrope: bool = False
    """Whether positions of image tokens have a time, a row and a column."""


_IDEFICS = Family("vision_model", ("connector",), "text_model", axis=1)
_QWEN = Family("visual", ("visual.merger",), "language_model", mrope=True)
FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": Family("visual", ("visual.merger", "visual.deepstack_merger_list"), "language_model", mrope=True),
    "llava": Family("vision_tower", ("multi_modal_projector",), "language_model"),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
}
"""By model type. All of them have causal attention over image tokens."""


def family_in(directory: str | Path) -> Family | None:
    """The family of the model in a directory; None if it is not one of `FAMILIES`."""
    file = Path(directory) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return FAMILIES.get(str(config.get("model_type")))
