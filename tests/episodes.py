"""Turns and groups that no engine sampled, for tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trivium.types import FloatArray, Group, StopReason, Task, Trajectory, Turn


def turn(
    prompt: Sequence[int],
    tokens: Sequence[int],
    log_prob: float | FloatArray = -0.5,
    version: int = 0,
    stop: StopReason = StopReason.EOS,
    text: str = "",
    **further: Any,
) -> Turn:
    """A turn whose tokens have this log-probability, or these, and were sampled by one version."""
    number = len(tokens)
    return Turn(
        np.array(prompt, np.int32),
        np.array(tokens, np.int32),
        np.full(number, log_prob, np.float32),
        np.full(number, version, np.int32),
        stop,
        text,
        **further,
    )


def group(slot: int, *members: Trajectory, **further: Any) -> Group:
    """The group of a slot, whose task is named after the slot."""
    return Group(slot, Task(f"task-{slot}", ()), members, **further)
