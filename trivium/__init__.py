"""Trivium: reinforcement fine-tuning for language and vision-language models."""

from __future__ import annotations

from typing import Any

from trivium.config import RunConfig

__all__ = ["RunConfig", "run"]


def run(config: RunConfig) -> dict[str, Any]:
    """Runs what the config describes, continuing what its run directory holds; returns the summary."""
    from trivium.runtime.launch import run as run_all  # torch and every package come with it

    return run_all(config)
