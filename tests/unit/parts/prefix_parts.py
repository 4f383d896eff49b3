"""Sequences that begin with the same tokens, for tests of what they share."""

from __future__ import annotations

import numpy as np
from training_parts import VOCABULARY

from trivium.types import Batch, Experience, IntArray


def words(rng: np.random.Generator, *lengths: int) -> list[IntArray]:
    return [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in lengths]


def sequences() -> list[IntArray]:
    """Two prompts; under the first a turn that four of seven share; one without an end of its own, one twice. 76 and
    35 tokens under them."""
    rng = np.random.default_rng(0)
    prompt, turn, other = words(rng, 20, 13, 18)
    ends = words(rng, 3, 9, 5, 4, 1, 8, 7, 2, 6)
    first = [np.concatenate([prompt, turn, end]) for end in ends[:3]] + [np.concatenate([prompt, turn])]
    first += [np.concatenate([prompt, end]) for end in ends[3:5]] + [prompt]
    second = [np.concatenate([other, end]) for end in ends[5:8]]
    return [first[0], second[0], *first[1:], first[1], *second[1:], ends[8]]


def make_batch(*, seed: int = 0, **columns: float) -> Batch:
    """The same as experiences of two groups, of which everything behind the prompt is trained on, and one alone."""
    rng, many = np.random.default_rng(seed), sequences()
    experiences: list[Experience] = []
    for row, tokens in enumerate(many):
        mask = np.arange(len(tokens)) >= min(18, len(tokens) - 1)
        group = "alone" if len(tokens) < 18 else f"g{int(tokens[0])}"
        version = np.where(mask, 0, -1)
        experiences.append(Experience(tokens, mask, np.where(mask, -1.0, 0.0), version, group, row))
    noise = {name: [mean + rng.normal(size=len(e)) for e in many] for name, mean in columns.items()}
    return Batch(tuple(experiences)).with_columns(**noise)
