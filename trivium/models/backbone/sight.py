"""Adds the images of sequences to their pack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from trivium.models.backbone.packed import Pack
from trivium.models.placement import sent
from trivium.models.vision.encoder import PixelReader, Pixels, PlacedImages, Vision
from trivium.types import AnyArray, IntArray, Media


class Seen(Protocol):
    """Tokens, and the media among them."""

    @property
    def tokens(self) -> IntArray: ...

    @property
    def media(self) -> tuple[Media, ...]: ...


@dataclass(frozen=True, slots=True)
class Sight:
    """Derives the pixels, places and positions of the images of packed sequences."""

    vision: Vision
    reader: PixelReader

    def check(self, sequences: Iterable[Seen]) -> None:
        """Raises DataError for an image that is cut off by the end of its sequence, and for media other than images."""
        for sequence in sequences:
            self.vision.places(sequence.tokens, sequence.media)

    def shown(self, packed: Pack, sequences: Sequence[Seen], *, blank: bool = False) -> Pack:
        """The pack of these sequences with their images. Without images, the pack itself, or with `blank` a
        pack with one blank image."""
        if not any(sequence.media for sequence in sequences):
            return replace(packed, images=self.vision.blank()) if blank else packed
        pixels: list[Pixels] = []
        places: list[AnyArray] = []
        positions: list[torch.Tensor] = []
        start = 0
        for segment in packed.segments:
            sequence, here = sequences[segment.sequence], range(segment.first, segment.stop)
            image_places = self.vision.places(sequence.tokens, sequence.media)
            image_pixels = [self.reader(item) for item in sequence.media]
            if self.vision.family.mrope:
                whole = self.vision.positions(sequence.tokens, image_places, image_pixels)
                positions.append(whole[:, segment.first : segment.stop])
            # A shared segment has each of its images once, whichever sequences it belongs to.
            inside = [i for i, item in enumerate(sequence.media) if item.span is not None and item.span[0] in here]
            pixels += [image_pixels[i] for i in inside]
            places += [start - segment.first + image_places[i].astype(np.int64) for i in inside]
            start += len(here)
        device = packed.tokens.device
        images = PlacedImages(tuple(pixels), sent(np.concatenate(places), device), tuple(map(len, places)))
        if not positions:
            return replace(packed, images=images)
        return replace(packed, images=images, positions=sent(torch.cat(positions, 1), device))
