"""The token sequences of a rollout: turns that extend one another, and where another sequence starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trivium.types.arrays import IntArray
from trivium.types.trajectories import Media, Turn


def continues(turn: Turn, earlier: Turn) -> bool:
    """Whether a turn's context begins with an earlier turn: its prompt with the same media, and its completion."""
    prompt_length = len(earlier.prompt_tokens)
    both = prompt_length + len(earlier.tokens)
    return (
        both <= len(turn.prompt_tokens)
        and np.array_equal(turn.prompt_tokens[:prompt_length], earlier.prompt_tokens)
        and np.array_equal(turn.prompt_tokens[prompt_length:both], earlier.tokens)
        and turn.media[: len(earlier.media)] == earlier.media
        and all(item.span is None or item.span[0] >= both for item in turn.media[len(earlier.media) :])
    )


def sequences_of(turns: Sequence[Turn]) -> list[list[tuple[int, Turn]]]:
    """The turns, with their numbers, of each token sequence: a turn that continues the one before it, of the same
    participant, extends its sequence. Any other one starts another."""
    sequences: list[list[tuple[int, Turn]]] = []
    for number, turn in enumerate(turns):
        last = sequences[-1][-1][1] if sequences else None
        if last is not None and turn.participant == last.participant and continues(turn, last):
            sequences[-1].append((number, turn))
        else:
            sequences.append([(number, turn)])
    return sequences


@dataclass(frozen=True, slots=True)
class Fork:
    """A turn that starts another token sequence than the first."""

    turn: int
    """Its number."""
    earlier: int
    """The earlier turn whose prompt and completion it shares the most tokens with."""
    at: int
    """The position of the first token that differs; it may be the end of either."""
    reason: str
    known: IntArray
    """The token at this position in the earlier turn; empty at its end."""
    sent: IntArray
    """The token at this position in the prompt of the turn; empty at its end."""


def forks_of(turns: Sequence[Turn]) -> list[Fork]:
    """Where and why the turns of a rollout start other sequences."""
    return [_fork(turns, sequence[0][0]) for sequence in sequences_of(turns)[1:]]


def _fork(turns: Sequence[Turn], number: int) -> Fork:
    """Where and why the turn `number` leaves all earlier ones."""
    prompt = turns[number].prompt_tokens
    earlier = [np.concatenate([turn.prompt_tokens, turn.tokens]) for turn in turns[:number]]
    shared = [_num_equal(tokens, prompt) for tokens in earlier]
    at = max(shared)
    changed = [n for n in range(number) if len(turns[n].prompt_tokens) <= at == shared[n] < len(earlier[n])]
    continued = [n for n in range(number) if shared[n] == len(earlier[n])]
    nearest = changed[0] if changed else max(n for n in range(number) if shared[n] == at)
    if not any(_seen(turns[n], at) == _seen(turns[number], at) for n in range(number) if shared[n] == at):
        reason = "its images were changed"
    elif at == len(prompt):
        reason = "its prompt ends there: turns were dropped, or a completion is sampled again"
    elif changed:
        reason = f"the completion of turn {nearest + 1} was changed"
    elif continued:
        reason = f"after turn {continued[-1] + 1}, a message was changed or dropped, or another call continues from it"
    else:
        reason = "its first messages were changed, or it is another conversation"
    return Fork(number, nearest, at, reason, earlier[nearest][at : at + 1], prompt[at : at + 1])


def _seen(turn: Turn, end: int) -> list[Media]:
    """The media of a prompt that begin before this token."""
    return [item for item in turn.media if item.span is None or item.span[0] < end]


def _num_equal(one: IntArray, other: IntArray) -> int:
    """The number of equal tokens at the beginning of both."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
