"""Adds supervised rows (PTX) from the pretraining loader to the policy's update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from trivium.foundation.errors import DataError
from trivium.frontdoors.lightrft.objects.models.placing import media_of_rows, pieces_of
from trivium.frontdoors.lightrft.objects.prompt_order import in_order
from trivium.models.vision.encoder import Vision
from trivium.types import EXPERT_VERSION, Batch, Experience, Media


class PretrainingBatches:
    """An endless iterator over a loader. `consumed` counts its batches."""

    def __init__(self, loader: DataLoader[Any], seed: int, consumed: int = 0) -> None:
        """Skips the first `consumed` batches."""
        self._loader, self._seed, self.consumed = loader, seed, 0
        self._batches = self._endless()
        while self.consumed < consumed:
            next(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.consumed += 1
        return batch

    def _endless(self) -> Iterator[Any]:
        number = 0
        while True:
            empty = True
            # Every pass has an order of its own, which a resumed run repeats.
            for batch in in_order(self._loader, self._seed, "pretraining", number):
                empty = False
                yield batch
            if empty:
                raise DataError("a batch to pretrain on", "the loader has none", "give it data, or pass None")
            number += 1


def supervised_batch(loaded: Any, vision: Vision | None) -> Batch:
    """Converts a loader's batch (_, input_ids, attention_mask, pixel_values, image_grid_thw, ...) to a core batch.

    Ids and mask are (B, S) or (B, 1, S); the pixel entries are None for text. All tokens except the first and the image
    placeholders are trained. `vision` is the vision part of the model. Raises DataError for any other form.
    """
    if not isinstance(loaded, tuple | list) or len(loaded) < 3:
        raise DataError(
            "a batch (_, input_ids, attention_mask, ...) of pretraining data",
            f"a {type(loaded).__name__}",
            "collate it so",
        )
    tokens, attention = (tensor.reshape(-1, tensor.shape[-1]).cpu().numpy() for tensor in loaded[1:3])
    rows = [ids[on.astype(bool)] for ids, on in zip(tokens, attention, strict=True)]
    media: list[tuple[Media, ...]] = [()] * len(rows)
    pixels, grids = (entry if isinstance(entry, torch.Tensor) else None for entry in (*loaded[3:5], None, None)[:2])
    if pixels is not None and pixels.numel():
        if vision is None:
            raise DataError("a batch of pretraining text", "pixel values", "leave them out: the model reads text only")
        media = media_of_rows(vision, rows, pieces_of(pixels.cpu(), None if grids is None else grids.cpu(), {}))
    return Batch(tuple(_row(ids, images, number) for number, (ids, images) in enumerate(zip(rows, media, strict=True))))


def _row(tokens: Any, media: tuple[Media, ...], number: int) -> Experience:
    # Nothing precedes the first token that could predict it.
    mask = np.arange(len(tokens)) > 0
    for image in media:
        mask[slice(*(image.span or (0, 0)))] = False
    version = np.full(len(tokens), EXPERT_VERSION, np.int32)
    return Experience(tokens, mask, np.zeros(len(tokens), np.float32), version, f"pretraining-{number}", 0, media=media)


def joined(rollouts: Batch, supervised: Batch) -> Batch:
    """Concatenates rollouts and supervised rows. The rollouts' columns are 0 on supervised rows, which the policy loss
    excludes."""
    columns = {
        name: [*arrays, *(np.zeros(len(e), np.float32) for e in supervised.experiences)]
        for name, arrays in rollouts.columns.items()
    }
    return Batch((*rollouts.experiences, *supervised.experiences)).with_columns(**columns)
