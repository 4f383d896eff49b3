"""Assigns the pixel tensors of a padded batch to the image placeholders of its rows.

Legend: B rows; L tokens of one row without padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trivium.foundation.errors import DataError
from trivium.models.vision.encoder import Pixels, Vision, pixel_media
from trivium.types import IntArray, Media


def pieces_of(pixel_values: Tensor, grids: Tensor | None, further: Mapping[str, Tensor]) -> list[Pixels]:
    """Splits pixel tensors into images; for Idefics and SmolVLM into tiles, without padding tiles.

    Takes patches of all images (N, width) with `grids` (images, 3), or (images, 3, H, W), or (B, tiles, 3, H, W).
    """
    if grids is not None:
        sizes = [int(size) for size in grids.prod(1)]
        if sum(sizes) != len(pixel_values):
            raise DataError(
                "the patches of each image",
                f"image_grid_thw speaks of {sum(sizes)} patches, pixel_values has {len(pixel_values)}",
                "give both as the processor returned them",
            )
        parts = pixel_values.split(sizes)
        return [{"pixel_values": part, "image_grid_thw": grid[None]} for part, grid in zip(parts, grids, strict=True)]
    if pixel_values.ndim == 5:
        flat = [(row, tile) for row in range(len(pixel_values)) for tile in range(pixel_values.shape[1])]
        # A tile of zeros is padding: the processor subtracts 0.5 from a pixel in [0, 1], so no real tile is zero
        # throughout.
        real = [place for place in flat if bool(pixel_values[place].any())]
        mask = further.get("pixel_attention_mask")
        masks = {} if mask is None else {place: {"pixel_attention_mask": mask[place][None, None]} for place in real}
        return [{"pixel_values": pixel_values[place][None, None], **masks.get(place, {})} for place in real]
    return [{"pixel_values": image[None]} for image in pixel_values]


def media_of_rows(vision: Vision, rows: Sequence[IntArray], pieces: Sequence[Pixels]) -> list[tuple[Media, ...]]:
    """Returns the images of each row with their spans.

    Assigns images to the placeholders of the rows in order. A run of placeholders that is too short for the next image
    counts as ordinary tokens, because the policy may sample them. Raises DataError if images are left over.
    """
    remaining, media = deque(pieces), list[tuple[Media, ...]]()
    for tokens in rows:
        images: list[Media] = []
        for start, end in _runs(tokens == vision.placeholder):
            at = start
            while remaining and at + (number := vision.num_features(remaining[0])) <= end:
                images.append(pixel_media(remaining.popleft()).at(at, at + number))
                at += number
        media.append(tuple(images))
    if remaining:
        placeholders = sum(int((tokens == vision.placeholder).sum()) for tokens in rows)
        raise DataError(
            "the placeholders of each image",
            f"{len(remaining)} of {len(pieces)} images have none; the sequences hold {placeholders} in all",
            "give the pixel tensors of these sequences, in their order",
        )
    return media


def stacked_tiles(parts: Sequence[Tensor]) -> Tensor:
    """Stacks (1, tiles, ...) of each row into (B, most tiles, ...), padded with zeros."""
    most = max(part.shape[1] for part in parts)
    return torch.cat([torch.cat([p, p.new_zeros(1, most - p.shape[1], *p.shape[2:])], 1) for p in parts])


def _runs(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """Returns [start, end) of each run of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in list(pairwise(edges))[::2]]
