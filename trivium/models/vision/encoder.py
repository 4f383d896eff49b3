"""Image encoders: the inputs of a decoder for sequences with images, in engines and in training.

The features of an image replace the embeddings of the placeholders in its span. A placeholder id anywhere else, sampled
or in a text, is an ordinary token. Positions in several dimensions (M-RoPE) are computed once for each sequence, by
the model's `get_rope_index`.

Legend: T tokens, B sequences of L tokens, N placeholders of all images, W width of the decoder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import nn

from trivium.foundation.errors import DataError
from trivium.models.placement import sent
from trivium.models.vision.families import FAMILIES, Family
from trivium.models.vision.images import Images, images_of, join_pixels
from trivium.types import IntArray, Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pixels = Mapping[str, torch.Tensor]
"""One image in the form of its family's processor: `pixel_values` and the other inputs of the tower."""
PixelReader = Callable[[Media], Pixels]
"""Derives the pixels of an image from its bytes."""


_REFUSED_TOWERS = ("pixtral",)
PIXELS = "image/x-pixels"
"""The type of media with the output of a processor: the tensors of a `Pixels`, as safetensors."""


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """The images of some sequences."""

    pixels: tuple[Pixels, ...]
    places: torch.Tensor
    """(N,) int64, ascending: the tokens that their features replace."""
    counts: tuple[int, ...]
    """The number of placeholders of each image."""


Features = tuple[torch.Tensor, ...]
"""(N, W) each: the embeddings of the placeholders; then the terms added after each of the first layers (deepstack)."""


class Vision:
    """The image encoder of a model."""

    def __init__(self, base: PreTrainedModel, family: Family) -> None:
        """`base` is the model without its output layer."""
        self.base, self.family = base, family
        self.decoder = cast("PreTrainedModel", base.get_submodule(family.decoder))
        config: Any = base.config
        self.placeholder = int(config.image_token_id)
        self._tower = str(config.vision_config.model_type)

    def places(self, tokens: IntArray, media: Sequence[Media]) -> list[IntArray]:
        """For each image, the indices in `tokens` that its features replace.

        Raises DataError for other media, and for an image whose span is not inside the sequence.
        """
        if media and self._tower in _REFUSED_TOWERS:
            raise DataError(
                f"images for a {type(self.base).__name__} with a tower of type {self._tower!r}",
                "it needs padding for images of unequal sizes, which is not supported",
                "use a model whose tower resizes every image to one size, or of another family",
            )
        places: list[IntArray] = []
        for item in media:
            refuse_other_media(item)
            start, end = item.span or (-1, -1)
            if not 0 <= start < end <= len(tokens):
                where = "it has no place in the tokens" if item.span is None else f"its tokens are {start} to {end}"
                raise DataError(
                    "an image whose tokens are all in its sequence",
                    f"{where}, the sequence has {len(tokens)} ({item.sha256[:12]})",
                    "leave out rows that a length limit cut inside an image, or raise the limit",
                )
            places.append((start + np.flatnonzero(tokens[start:end] == self.placeholder)).astype(np.int32))
        return places

    def positions(self, tokens: IntArray, places: Sequence[IntArray], pixels: Sequence[Pixels]) -> torch.Tensor:
        """(4, L) int64 for one sequence: index, time, row and column. Only for families with M-RoPE."""
        if not places:
            return torch.arange(len(tokens)).expand(4, -1)
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        grids = torch.cat([image["image_grid_thw"].cpu() for image in pixels])
        merged = int(cast(Any, self.base.config).vision_config.spatial_merge_size) ** 2
        _check_counts([len(place) for place in places], [int(patches) // merged for patches in grids.prod(1)])
        # get_rope_index takes each run of equal kinds for one image.
        if any(a[-1] + 1 == b[0] for a, b in pairwise(places)):
            raise DataError(
                "positions of consecutive images",
                "there is no token between two of them",
                "render images with the tokens that the model's template puts around each",
            )
        for place in places:
            kinds[0, place.astype(np.int64)] = 1
        rope, _ = cast(Any, self.base).get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        return torch.cat([torch.arange(ids.shape[1])[None], rope[:, 0]])

    def num_features(self, pixels: Pixels) -> int:
        """The number of placeholders of one image, or of one tile of it."""
        config: Any = self.base.config
        if self.family.mrope:
            return int(pixels["image_grid_thw"].prod()) // int(config.vision_config.spatial_merge_size) ** 2
        side = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
        if self.family.axis:
            return side**2 // int(config.scale_factor) ** 2
        whole = side**2 + int(self._tower.startswith("clip"))  # CLIP has a token for the image as a whole
        return whole - int(config.vision_feature_select_strategy == "default")

    def check_count(self, place: IntArray, pixels: Pixels) -> None:
        """Raises DataError if an image has another number of features than of placeholders, without computing them."""
        tiles = pixels["pixel_values"].shape[1] if self.family.axis else 1
        _check_counts([len(place)], [tiles * self.num_features(pixels)])

    def features(self, images: PlacedImages) -> Features:
        """The features of the images, by one pass of the tower. Raises DataError if an image has another number of
        features than of placeholders."""
        dtype, device = self.decoder.dtype, self.decoder.device
        joined = join_pixels(images.pixels)
        moved = {name: sent(x, device).to(dtype if x.is_floating_point() else None) for name, x in joined.items()}
        output = cast(Any, self.base).get_image_features(**moved, return_dict=True)
        counts = [len(features) for features in output.pooler_output]
        if len(counts) != len(images.pixels):  # one entry for all of them: each tile has as many features
            tiles = [image["pixel_values"].shape[self.family.axis] for image in images.pixels]
            counts = [sum(counts) * count // sum(tiles) for count in tiles]
        if images.counts:
            _check_counts(list(images.counts), counts)
        deep = getattr(output, "deepstack_features", None) or ()
        return torch.cat(list(output.pooler_output)), *(torch.cat(list(layer)) for layer in deep)

    def decoder_inputs(self, tokens: torch.Tensor, features: Features, places: torch.Tensor) -> dict[str, Any]:
        """The arguments of the decoder for `tokens` (B, L) with features at the N row-major `places`.

        Without places, the features are in the graph with weight zero: if one rank runs the backward pass of the tower,
        all ranks must.
        """
        embeds = cast(nn.Module, self.decoder.get_input_embeddings())(tokens)
        if not len(places):
            anchor = sum((0.0 * feature.sum() for feature in features), torch.zeros((), device=embeds.device))
            return {"inputs_embeds": embeds + anchor.to(embeds.dtype)}
        whole = embeds.flatten(0, 1).index_copy(0, places, features[0].to(embeds.dtype)).view_as(embeds)
        if len(features) == 1:
            return {"inputs_embeds": whole}
        is_image = torch.zeros(tokens.numel(), dtype=torch.bool, device=tokens.device)
        is_image[places] = True
        return {
            "inputs_embeds": whole,
            "visual_pos_masks": is_image.view(tokens.shape),
            "deepstack_visual_embeds": list(features[1:]),
        }

    def blank(self) -> PlacedImages:
        """An image of one tile without placeholders, for a pass that runs the tower because other ranks do."""
        config: Any = self.base.config.vision_config
        if self.family.mrope:
            side = config.spatial_merge_size
            width = config.in_channels * config.temporal_patch_size * config.patch_size**2
            pixels = {"pixel_values": torch.zeros(side**2, width), "image_grid_thw": torch.tensor([[1, side, side]])}
        else:
            shape = (1,) * (1 + self.family.axis) + (3, config.image_size, config.image_size)
            pixels = {"pixel_values": torch.zeros(shape)}
        return PlacedImages((pixels,), torch.empty(0, dtype=torch.int64, device=self.decoder.device), ())


def freeze_vision(module: PreTrainedModel, trained: str | None) -> None:
    """Freezes the image encoder of a model except the `trained` part: all (None, `trained`), the `projector`, or
    nothing (`frozen`)."""
    vision = vision_of(module)
    if vision is None or trained in (None, "trained"):
        return
    vision.base.requires_grad_(False)
    for part in (vision.family.decoder, *(vision.family.projector if trained == "projector" else ())):
        vision.base.get_submodule(part).requires_grad_(True)


def _check_counts(placeholders: Sequence[int], features: Sequence[int]) -> None:
    if placeholders != features:
        raise DataError(
            "one feature for each placeholder of an image",
            f"images with {placeholders} placeholders have {features} features",
            "render with the processor of this model",
        )


def vision_of(module: PreTrainedModel) -> Vision | None:
    """The image encoder of a model with or without an output layer; None if it is not one of `FAMILIES`."""
    family = FAMILIES.get(str(module.config.model_type))
    return None if family is None else Vision(cast("PreTrainedModel", module.base_model), family)


def decoder_of(module: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that reads tokens: the decoder of a vision model, else the model."""
    vision = vision_of(module)
    return module if vision is None else vision.decoder


def pixel_reader(model_dir: Path) -> PixelReader:
    """Reads images by the processor of the model in a directory. The first image that is not `pixel_media` loads it."""
    return lambda media: (
        safetensors.torch.load(media.data) if media.mime == PIXELS else _images_in(model_dir).read(media).pixels
    )


def pixel_media(pixels: Pixels) -> Media:
    """Media with the output of a processor."""
    # safetensors saves contiguous tensors only.
    return Media(PIXELS, safetensors.torch.save({name: tensor.contiguous() for name, tensor in pixels.items()}))


@lru_cache(maxsize=4)
def _images_in(model_dir: Path) -> Images:
    images = images_of(model_dir, max_pixels=sys.maxsize)  # the renderer has checked their size
    if images is None:
        raise DataError(
            f"images for the model in {model_dir}",
            "no processor is there",
            "save the files of the model's processor in the directory",
        )
    return images


def refuse_other_media(item: Media) -> None:
    """Raises DataError for media other than images."""
    if not item.mime.startswith("image/"):
        raise DataError(f"read {item.mime}", "only text and images are supported", "leave video and sound out of tasks")


def refuse_images(module: PreTrainedModel) -> DataError:
    """The error for images for a model that is not one of `FAMILIES`."""
    return DataError(
        f"images for a {type(module).__name__}",
        f"models of type {module.config.model_type!r} are supported with text only",
        f"use a model of type {', '.join(FAMILIES)}",
    )
