"""Pads the sequences of a batch as the originals do: prompts on the left, responses on the right. Cuts long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from trivium.models.late import torch
from trivium.policy import PromptTooLong
from trivium.types import AnyArray, Experience, Prompt

if TYPE_CHECKING:
    from torch import Tensor


Truncation = Literal["left", "right", "middle"]
"""Which tokens of a long prompt are dropped."""


def response_start(experience: Experience) -> int:
    """Returns the position of the first trained token; the length of the sequence if no token is trained."""
    mask = experience.response_mask
    return int(mask.argmax()) if mask.any() else len(mask)


def side_by_side(
    arrays: Sequence[AnyArray],
    starts: Sequence[int],
    filler: float,
    dtype: torch.dtype | None = None,
    widths: tuple[int, int] = (0, 0),
) -> Tensor:
    """Returns (B, P + R, ...): each array (L, ...) with its response, which begins at its start, from column P on.

    P is the largest start and R the longest response, at least `widths`. Without `dtype`, it is that of the arrays.
    """
    before = max([widths[0], *starts])
    after = max([widths[1], *(len(array) - start for array, start in zip(arrays, starts, strict=True))])
    # Copies, because recorded arrays are read-only, and torch has no such tensors.
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    further = tensors[0].shape[1:] if tensors else ()
    dtype = tensors[0].dtype if tensors and dtype is None else dtype
    table = torch.full((len(arrays), before + after, *further), filler, dtype=dtype)
    for row, tensor, start in zip(table, tensors, starts, strict=True):
        row[before - start : before - start + len(tensor)] = tensor
    return table


def cut_prompt(prompt: Prompt, longest: int, truncation: Truncation, key: str, do: str) -> Prompt:
    """Returns a prompt of at most `longest` tokens. Raises PromptTooLong, which names the `key` of the limit, for a
    longer prompt with images."""
    tokens = prompt.tokens
    if len(tokens) <= longest:
        return prompt
    if prompt.media:
        # A cut could leave a part of an image's placeholders, which the vision tower cannot fill.
        raise PromptTooLong(
            f"a prompt of at most {longest} tokens ({key})",
            f"{len(tokens)} tokens with {len(prompt.media)} image(s), which are not cut",
            f"raise {key}, or {do}",
        )
    match truncation:
        case "left":
            return Prompt(tokens[-longest:])
        case "right":
            return Prompt(tokens[:longest])
        case "middle":
            head = longest // 2
            return Prompt(np.concatenate([tokens[:head], tokens[len(tokens) - (longest - head) :]]))
