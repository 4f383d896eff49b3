"""Cuts the token sequences of rows that are too long to learn from (`tasks.*.on_overlong`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trivium.types import StopReason, Turn


def excess(turns: Sequence[Turn], longest: int) -> list[int]:
    """How many tokens each turn has beyond `longest`, its prompt included; 0 for one that fits."""
    return [max(0, len(turn.prompt_tokens) + len(turn.tokens) - longest) for turn in turns]


def cut_turns(turns: Sequence[Turn], longest: int, from_left: bool) -> list[Turn] | None:
    """The turns of a row with at most `longest` tokens each: without the beginning of their prompts (`from_left`),
    which stay equal, or without the end of their completions. None if nothing would be left of one, or an image is
    cut."""
    over = excess(turns, longest)
    if from_left and (most := max(over)):
        if any(turn.media or most >= len(turn.prompt_tokens) for turn in turns):
            return None
        return [replace(turn, prompt_tokens=turn.prompt_tokens[most:]) for turn in turns]
    if any(more >= len(turn.tokens) for turn, more in zip(turns, over, strict=True) if more):
        return None
    return [_without_end(turn, more) if more else turn for turn, more in zip(turns, over, strict=True)]


def _without_end(turn: Turn, number: int) -> Turn:
    arrays = {name: getattr(turn, name)[:-number] for name in ("tokens", "log_prob", "policy_version")}
    extra = {name: array[:-number] for name, array in turn.extra.items()}
    return replace(turn, **arrays, stop_reason=StopReason.LENGTH, extra=extra)
