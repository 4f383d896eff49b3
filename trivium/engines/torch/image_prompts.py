"""Prepares prompts with images for a decoder.

Computes all embeddings of a prompt, images included, before the prompt is read in chunks, since a chunk may end inside
an image.

Legend: B prompts padded to L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trivium.models.placement import sent
from trivium.models.vision.encoder import PixelReader, PlacedImages, Vision
from trivium.types import IntArray, Media


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of one prompt."""

    images: tuple[PlacedImages, ...]
    """One image each. The vision tower processes each image separately, so that its bits do not depend on other
    images."""
    positions: Tensor | None
    """(4, tokens of the prompt) int64 for M-RoPE: place; time, row and column. None: no M-RoPE."""

    @property
    def ahead(self) -> int:
        """The offset from the place of a later token to its rotary position."""
        return 0 if self.positions is None else int(self.positions[1:].max()) + 1 - self.positions.shape[1]


def look(vision: Vision, prompt: IntArray, media: Sequence[Media], reader: PixelReader) -> PromptImages:
    """Reads the images of a prompt. Raises DataError for an image that the prompt holds only in part."""
    places = vision.places(prompt, media)
    pixels = [reader(item) for item in media]
    return PromptImages(
        tuple(
            PlacedImages((image,), torch.from_numpy(place).long(), (len(place),))
            for image, place in zip(pixels, places, strict=True)
        ),
        vision.positions(prompt, places, pixels) if vision.family.mrope else None,
    )


@dataclass(frozen=True, slots=True)
class SeenPrompts:
    """A batch of prompts as a decoder reads it."""

    inputs: dict[str, Any]
    """See `Vision.decoder_inputs`."""
    positions: Tensor
    """(B, L) int64; (4, B, L) with M-RoPE."""
    ahead: list[int]
    """See `PromptImages.ahead`."""

    @classmethod
    def of(cls, vision: Vision, tokens: Tensor, prompts: Sequence[PromptImages | None]) -> SeenPrompts:
        """`tokens` (B, L), padded on the right, with the images of each prompt. At least one prompt has an image."""
        rows, length = tokens.shape
        # Prompts without images get the same number in all four rows, as M-RoPE gives to text.
        positions = torch.arange(length).expand(4, rows, length).clone()
        features: list[tuple[Tensor, ...]] = []
        places: list[Tensor] = []
        for row, prompt in enumerate(prompts):
            for image in prompt.images if prompt is not None else ():
                features.append(vision.features(image))
                places.append(image.places + row * length)  # indices into the flattened `tokens`
            if prompt is not None and prompt.positions is not None:
                positions[:, row, : prompt.positions.shape[1]] = prompt.positions
        joined = tuple(torch.cat(part) for part in zip(*features, strict=True))
        return cls(
            vision.decoder_inputs(tokens, joined, sent(torch.cat(places), tokens.device)),
            sent(positions if vision.family.mrope else positions[0], tokens.device),
            [0 if prompt is None else prompt.ahead for prompt in prompts],
        )

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        """The inputs of the decoder for the columns from `start` to `end`."""
        inputs: dict[str, Any] = {
            "inputs_embeds": self.inputs["inputs_embeds"][:, start:end],
            "position_ids": self.positions[..., start:end],
        }
        is_image: Tensor | None = self.inputs.get("visual_pos_masks")
        if is_image is None:
            return inputs
        columns = is_image.nonzero()[:, 1]  # the columns of the features, in order
        here = (start <= columns) & (columns < end)
        deep = [feature[here] for feature in self.inputs["deepstack_visual_embeds"]]
        return {**inputs, "visual_pos_masks": is_image[:, start:end], "deepstack_visual_embeds": deep}
