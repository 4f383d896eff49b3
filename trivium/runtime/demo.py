"""`trivium demo`: runs the arithmetic recipe."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from trivium.config import load_config
from trivium.runtime.launch import run


def demo(directory: Path, seed: int) -> dict[str, Any]:
    """Runs recipes/arithmetic.yaml in `directory`; returns its summary."""
    with as_file(files("trivium.runtime") / "arithmetic.yaml") as recipe:
        config = load_config(recipe, [f"run.dir={directory}", f"run.seed={seed}"])
    return run(config)
