"""Converts between LightRFT's experiences (padded tensors) and the core's batches.

Legend: B sequences; S = P + A tokens of one: the longest prompt, padded on the left, and the longest response, padded
on the right. The last A columns are the actions; `action_mask` marks the trained ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium import types
from trivium.errors import DataError
from trivium.frontdoors.lightrft.placing import media_of_rows, pieces_of, stacked_tiles
from trivium.models.vision.encoder import PIXELS, Pixels, Vision
from trivium.models.vision.images import Images, decoded
from trivium.types import EXPERT_VERSION, AnyArray, Batch, Media

COLUMNS = {
    "action_log_probs": "old_log_prob",
    "base_action_log_probs": "ref_log_prob",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
    "kl": "kl",
    "action_entropy": "entropy",
}
"""Per-action field -> the corresponding column of a core batch."""


@dataclass
class ExperienceVL:
    """Rollouts with their scores, advantages and returns. Text-only rollouts have no pixels."""

    sequences: Tensor
    """(B, S) int64."""
    pixel_values: Tensor | None = None
    """The concatenated patches of all images; for LLaVA (images, 3, H, W), for Idefics (B, tiles, 3, H, W)."""
    image_grid_thws: Tensor | None = None
    """(images, 3), for models that split images into patches. A list with a tensor per row is concatenated."""
    raw_images: list[Any] | None = None
    """The images of each row, as PIL images."""
    pixel_values_videos: Tensor | None = None
    video_grid_thws: Tensor | None = None
    action_log_probs: Tensor | None = None
    """(B, A) float, of the policy before the update."""
    base_action_log_probs: Tensor | None = None
    """(B, A) float, of the reference."""
    values: Tensor | None = None
    returns: Tensor | None = None
    advantages: Tensor | None = None
    attention_mask: Tensor | None = None
    """(B, S): 0 on padding. None means no padding."""
    action_mask: Tensor | None = None
    """(B, A) bool: the trained tokens. None means all actions except padding."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """`reward`, `response_length`, `total_length` (B,) and other values per row."""
    kl: Tensor | None = None
    action_entropy: Tensor | None = None
    """(B, A) float, in nats."""
    labels: list[Any] | None = None
    references: list[Any] | None = None
    image_num: list[int] | None = None
    """Number of images per row. None: determined by the placeholders."""
    group_ids: list[str] | None = None
    """Group of each row; rollouts of one prompt share a group. None: each row is its own group."""
    further: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Other columns of a core batch, (B, A, ...)."""
    pixel_inputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Further inputs of some vision towers: `pixel_attention_mask`, `image_sizes`."""
    origin: tuple[types.Experience, ...] | None = None
    """The core's experiences of the rows, with media, groups, versions and named rewards."""

    def __post_init__(self) -> None:
        grids: Any = self.image_grid_thws
        if isinstance(grids, list):  # one tensor for each row
            self.image_num = [len(each) for each in cast("list[Tensor]", grids)]
            self.image_grid_thws = torch.cat(grids) if grids else None
        for name in ("info", "further", "pixel_inputs"):
            if getattr(self, name) is None:
                setattr(self, name, {})

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_actions(self) -> int:
        """A. Raises DataError if no field determines it."""
        known = (self.action_mask, *(getattr(self, name) for name in COLUMNS))
        width = next((tensor.shape[1] for tensor in known if tensor is not None), None)
        if width is None:
            raise DataError("the actions of an experience", "no action_mask", "give one, (B, A)")
        return width

    # ------------------------------------------------------------------ devices

    def to_device(self, device: torch.device | str) -> Self:
        """Moves every tensor, in place."""
        return self._on_all(lambda tensor: tensor.to(device))

    def pin_memory(self) -> Self:
        """Moves every tensor into page-locked memory, in place. Does nothing without a GPU."""
        return self._on_all(Tensor.pin_memory) if torch.cuda.is_available() else self

    def _on_all(self, change: Callable[[Tensor], Tensor]) -> Self:
        for entry in fields(self):
            if entry.name != "origin":
                setattr(self, entry.name, _changed(getattr(self, entry.name), change))
        return self

    # ------------------------------------------------------------------ rows

    def split(self) -> list[ExperienceVL]:
        """Returns the rows as separate experiences without padding."""
        pixels = self._pixels_of_rows()
        return [self._row(row, pixels[row]) for row in range(len(self))]

    def _row(self, row: int, pixels: dict[str, Any]) -> ExperienceVL:
        attended = np.flatnonzero(self._attention()[row])
        if not len(attended):
            raise DataError("an experience with tokens", f"row {row} is nothing but padding", "leave the row out")
        first, last = int(attended[0]), int(attended[-1]) + 1
        prompts = self.sequences.shape[1] - self.num_actions
        actions = slice(max(0, first - prompts), max(0, last - prompts))
        numbers: dict[str, Any] = {name: tensor[row : row + 1, actions] for name, tensor in self._per_action().items()}
        further = {name: tensor[row : row + 1, actions] for name, tensor in self.further.items()}
        lists: dict[str, Any] = {
            name: _only(getattr(self, name), row) for name in ("labels", "references", "group_ids")
        }
        return ExperienceVL(
            self.sequences[row : row + 1, first:last],
            **numbers,
            **pixels,
            **lists,
            attention_mask=None if self.attention_mask is None else self.attention_mask[row : row + 1, first:last],
            info=_row_of(self.info, row, len(self)),
            further=further,
            origin=None if self.origin is None else self.origin[row : row + 1],
        )

    @classmethod
    def join(cls, experiences: Sequence[ExperienceVL]) -> ExperienceVL:
        """Joins all rows in order, with minimal padding.

        Raises DataError if only some experiences have a field.
        """
        rows = [row for experience in experiences for row in experience.split()]
        if not rows:
            raise DataError("join experiences", "there is none", "give at least one")
        actions = max(row.num_actions for row in rows)
        prompts = max(row.sequences.shape[1] - row.num_actions for row in rows)

        def beside(tensor: Tensor, left: int, right: int) -> Tensor:
            shape = (1, 0, *tensor.shape[2:])
            return torch.cat([tensor.new_zeros(1, left, *shape[2:]), tensor, tensor.new_zeros(1, right, *shape[2:])], 1)

        def whole(tensors: Sequence[Tensor]) -> Tensor:
            sizes = [
                (prompts - t.shape[1] + r.num_actions, actions - r.num_actions)
                for t, r in zip(tensors, rows, strict=True)
            ]
            return torch.cat([beside(t, *size) for t, size in zip(tensors, sizes, strict=True)])

        def padded(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([beside(t, 0, actions - t.shape[1]) for t in tensors])

        masks = [torch.ones_like(r.sequences) if r.attention_mask is None else r.attention_mask for r in rows]
        numbers = {name: _together(rows, name, padded) for name in (*COLUMNS, "action_mask")}
        if numbers["action_mask"] is None:
            widths = [mask.shape[1] - row.num_actions for mask, row in zip(masks, rows, strict=True)]
            numbers["action_mask"] = padded([mask[:, at:].bool() for mask, at in zip(masks, widths, strict=True)])
        names = dict.fromkeys(name for row in rows for name in row.further)
        return ExperienceVL(
            whole([row.sequences for row in rows]),
            **numbers,
            **_joined_pixels(rows),
            **{name: _together(rows, name, _concatenated) for name in ("labels", "references", "group_ids")},
            attention_mask=whole(masks),
            info=_joined_info([row.info for row in rows]),
            further={name: padded([row.further[name] for row in rows]) for name in names},
            origin=_together(rows, "origin", lambda parts: tuple(each for part in parts for each in part)),
        )

    def _per_action(self) -> dict[str, Tensor]:
        entries = {name: getattr(self, name) for name in (*COLUMNS, "action_mask")}
        return {name: tensor for name, tensor in entries.items() if tensor is not None}

    def _attention(self) -> npt.NDArray[np.bool_]:
        """Returns (B, S): False on padding."""
        mask = torch.ones_like(self.sequences) if self.attention_mask is None else self.attention_mask
        return mask.detach().cpu().numpy() != 0

    def _pixels_of_rows(self) -> list[dict[str, Any]]:
        """Returns the pixel fields of each row."""
        size = len(self)
        if self.pixel_values is None:
            raw: list[Any] = [None] * size if self.raw_images is None else [[images] for images in self.raw_images]
            return [{"raw_images": raw[row], "image_num": _only(self.image_num, row)} for row in range(size)]
        if self.pixel_values.ndim == 5 and self.image_grid_thws is None:
            counts, images = [1] * size, len(self.pixel_values)
            numbers: Sequence[int | None] = [None] * size if self.image_num is None else self.image_num
        else:
            images = len(self.pixel_values) if self.image_grid_thws is None else len(self.image_grid_thws)
            counts = [1] * size if self.image_num is None and images == size else self.image_num or []
            numbers = counts
        if len(counts) != size or sum(counts) != images:
            raise DataError(
                f"the images of each of {size} rows",
                f"{images} images, and image_num is {self.image_num}",
                "set image_num to how many each row has",
            )
        ends = np.cumsum([0, *counts])
        return [self._images_at(int(ends[row]), int(ends[row + 1]), row, numbers[row]) for row in range(size)]

    def _images_at(self, start: int, end: int, row: int, number: int | None) -> dict[str, Any]:
        assert self.pixel_values is not None
        entries: dict[str, Any] = {
            "image_num": None if number is None else [number],
            "raw_images": None if self.raw_images is None else [self.raw_images[row]],
        }
        if end == start:
            return entries
        if self.image_grid_thws is None:
            values = self.pixel_values[start:end]
        else:
            patches = np.cumsum([0, *self.image_grid_thws.prod(1).tolist()])
            values = self.pixel_values[int(patches[start]) : int(patches[end])]
            entries["image_grid_thws"] = self.image_grid_thws[start:end]
        inputs = {name: tensor[start:end] for name, tensor in self.pixel_inputs.items()}
        return {**entries, "pixel_values": values, "pixel_inputs": inputs}

    # ------------------------------------------------------------------ the core's batch

    @classmethod
    def from_batch(cls, batch: Batch, *, processor: Any | None = None, pad_token_id: int = 0) -> ExperienceVL:
        """Converts a core batch. With a `processor` (of transformers, or Images), adds pixels and raw images."""
        images = processor if processor is None or isinstance(processor, Images) else Images(processor)
        experiences = batch.experiences
        starts = [_start(each) for each in experiences]
        actions = max(len(e) - start for e, start in zip(experiences, starts, strict=True))
        prompts = max(starts)
        shape = (len(experiences), prompts + actions)
        sequences = torch.full(shape, pad_token_id, dtype=torch.int64)
        attention = torch.zeros(shape, dtype=torch.int64)
        for row, (experience, start) in enumerate(zip(experiences, starts, strict=True)):
            here = slice(prompts - start, prompts - start + len(experience))
            sequences[row, here], attention[row, here] = torch.from_numpy(experience.tokens.astype(np.int64)), 1

        def cut(arrays: Sequence[AnyArray]) -> Tensor:
            kept = [torch.tensor(array[start:]) for array, start in zip(arrays, starts, strict=True)]
            whole = kept[0].new_zeros(len(kept), actions, *kept[0].shape[1:])
            for row, values in zip(whole, kept, strict=True):
                row[: len(values)] = values
            return whole

        own = {column: name for name, column in COLUMNS.items()}
        numbers = {own[name]: cut(arrays) for name, arrays in batch.columns.items() if name in own}
        names = dict.fromkeys(name for e in experiences for name in e.rewards)
        lengths = {
            "response_length": [e.num_response_tokens for e in experiences],
            "total_length": [len(e) for e in experiences],
        }
        metrics = {name: torch.tensor([e.rewards.get(name, 0.0) for e in experiences]) for name in names}
        return cls(
            sequences,
            **numbers,
            **({} if images is None else _read_pixels(experiences, images)),
            attention_mask=attention,
            action_mask=cut([e.response_mask for e in experiences]),
            info={
                "reward": torch.tensor([e.reward for e in experiences]),
                **{name: torch.tensor(values, dtype=torch.float32) for name, values in lengths.items()},
                "reward_metrics": metrics,
            },
            image_num=[len(e.media) for e in experiences],
            group_ids=[e.group_id for e in experiences],
            further={name: cut(arrays) for name, arrays in batch.columns.items() if name not in own},
            origin=experiences,
        )

    def to_batch(self, vision: Vision | None = None) -> Batch:
        """Converts to a core batch with the current fields as columns.

        `vision` is the vision part of the model, which locates images. It is required for pixels without `origin`.
        Raises DataError for inconsistent fields.
        """
        if self.pixel_values_videos is not None or self.video_grid_thws is not None:
            raise DataError("train on videos", "pixel_values_videos", "models read text and images here")
        attention, actions = self._attention(), self.num_actions
        tokens = self.sequences.detach().cpu().numpy()
        numbers = {COLUMNS[name]: t for name, t in self._per_action().items() if name != "action_mask"} | self.further
        self._check_shapes(numbers, actions)
        mask = attention[:, -actions:] if self.action_mask is None else _array(self.action_mask).astype(np.bool_)
        if (mask & ~attention[:, attention.shape[1] - actions :]).any():
            raise DataError("actions that are tokens", "action_mask is true on padding", "correct the masks")
        kept = [tokens[row][attention[row]].astype(np.int32) for row in range(len(self))]
        places = [_action_places(attention[row], actions) for row in range(len(self))]

        def spread(values: AnyArray) -> list[AnyArray]:
            rows: list[AnyArray] = []
            for row, (columns, at) in enumerate(places):
                rows.append(np.zeros((len(kept[row]), *values.shape[2:]), values.dtype))
                rows[-1][at] = values[row][columns]
            return rows

        columns = {name: spread(_array(tensor)) for name, tensor in numbers.items()}
        masks = spread(mask)
        media = self._media(vision, kept)
        old = columns.get("old_log_prob")
        experiences = tuple(
            self._experience(row, kept[row], masks[row], None if old is None else old[row], media[row])
            for row in range(len(self))
        )
        return Batch(experiences).with_columns(**columns)

    def _check_shapes(self, numbers: dict[str, Tensor], actions: int) -> None:
        shapes = {name: tuple(tensor.shape[:2]) for name, tensor in numbers.items()}
        wrong = [name for name, shape in shapes.items() if shape != (len(self), actions)]
        if self.action_mask is not None and tuple(self.action_mask.shape) != (len(self), actions):
            wrong.append("action_mask")
        if wrong or actions > self.sequences.shape[1]:
            raise DataError(
                f"numbers for each of ({len(self)}, {actions}) actions",
                f"sequences {tuple(self.sequences.shape)}, {shapes}",
                f"give {', '.join(wrong) or 'sequences'} one entry per action",
            )

    def _experience(
        self, row: int, tokens: AnyArray, mask: AnyArray, old: AnyArray | None, media: tuple[Media, ...]
    ) -> types.Experience:
        origin = None if self.origin is None else self.origin[row]
        if origin is not None and np.array_equal(origin.tokens, tokens):
            return replace(origin, response_mask=mask)
        reward = self.info.get("reward")
        return types.Experience(
            tokens=tokens,
            response_mask=mask,
            rollout_log_prob=np.zeros(len(tokens), np.float32)
            if old is None
            else np.where(mask, old, 0).astype(np.float32),
            policy_version=np.where(mask, 0, EXPERT_VERSION),
            group_id=str(row) if self.group_ids is None else self.group_ids[row],
            index=0 if self.group_ids is None else self.group_ids[:row].count(self.group_ids[row]),
            rewards={} if reward is None else {"reward": float(reward[row])},
            media=media,
        )

    def _media(self, vision: Vision | None, rows: Sequence[AnyArray]) -> list[tuple[Media, ...]]:
        """Returns the images of rows without `origin`."""
        if self.pixel_values is None or self.origin is not None:
            return [()] * len(rows)
        if vision is None:
            raise DataError("images of an experience", "no model that reads them", "call to_batch(actor.vision)")
        pieces = pieces_of(self.pixel_values.detach().cpu(), _on_cpu(self.image_grid_thws), self.pixel_inputs)
        return media_of_rows(vision, rows, pieces)


@dataclass
class SamplesVL:
    """The raw samples of an engine. `ExperienceVL` documents the shapes."""

    sequences: Tensor
    attention_mask: Tensor | None = None
    action_mask: Tensor | None = None
    pixel_values: Tensor | None = None
    image_grid_thws: Tensor | None = None
    raw_images: list[Any] | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thws: Tensor | None = None
    num_actions: int | Tensor | None = None
    packed_seq_lens: Tensor | None = None
    response_length: Tensor | None = None
    total_length: Tensor | None = None
    references: list[Any] | None = None
    labels: list[Any] | None = None
    prompts: list[str] | None = None
    output_texts: list[str] | None = None
    image_num: list[int] | None = None
    video_num: list[int] | None = None


# --------------------------------------------------------------------------- arrays


def _start(experience: types.Experience) -> int:
    """Returns where the response begins: at the first trained token, or at the first turn."""
    trained = np.flatnonzero(experience.response_mask)
    first = int(trained[0]) if len(trained) else experience.turns[0].start if experience.turns else len(experience)
    return max(1, min(first, len(experience) - 1))


def _action_places(attended: npt.NDArray[np.bool_], actions: int) -> tuple[AnyArray, AnyArray]:
    """Returns the action columns of a row that are tokens, and their positions in the row without padding."""
    columns = np.flatnonzero(attended[len(attended) - actions :])
    return columns, (np.cumsum(attended) - 1)[len(attended) - actions :][columns]


def _array(tensor: Tensor) -> AnyArray:
    tensor = tensor.detach().cpu()
    return tensor.numpy() if tensor.dtype in (torch.float32, torch.float64, torch.bool) else tensor.float().numpy()


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to every tensor in a value."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_changed(each, change) for each in cast("list[Any]", value)]
    return value


# --------------------------------------------------------------------------- rows


def _only(values: list[Any] | None, row: int) -> list[Any] | None:
    return None if values is None else [values[row]]


def _row_of(info: dict[str, Any], row: int, size: int) -> dict[str, Any]:
    """Returns the info of one row. Values without a row dimension apply to every row."""

    def only(value: Any) -> Any:
        if isinstance(value, dict):
            return _row_of(cast("dict[str, Any]", value), row, size)
        has_rows = (isinstance(value, Tensor) and value.ndim) or isinstance(value, list)
        return value[row : row + 1] if has_rows and len(value) == size else value

    return {name: only(value) for name, value in info.items()}


def _joined_info(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, first in infos[0].items():
        values = [info[name] for info in infos if name in info]
        if len(values) < len(infos):
            raise DataError("join experiences", f"only some have info[{name!r}]", "give it to all of them")
        if isinstance(first, dict):
            joined[name] = _joined_info(values)
        elif isinstance(first, Tensor) and first.ndim:
            joined[name] = torch.cat(values)
        else:
            joined[name] = _concatenated(values) if isinstance(first, list) else first
    return joined


def _concatenated(lists: Sequence[list[Any]]) -> list[Any]:
    return [each for part in lists for each in part]


def _together(rows: Sequence[ExperienceVL], name: str, join: Callable[[Sequence[Any]], Any]) -> Any:
    """Joins a field of all rows; None if no row has it."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    if values and len(values) < len(rows):
        raise DataError("join experiences", f"{len(values)} of {len(rows)} have {name}", "give it to all of them")
    return join(values) if values else None


def _joined_pixels(rows: Sequence[ExperienceVL]) -> dict[str, Any]:
    shown = [row for row in rows if row.pixel_values is not None]
    numbers = [row.image_num for row in rows]
    fields: dict[str, Any] = {
        "raw_images": _together(rows, "raw_images", _concatenated),
        "image_num": None if any(each is None for each in numbers) else [n for each in numbers for n in each or ()],
    }
    if not shown:
        return fields
    values = [row.pixel_values for row in shown if row.pixel_values is not None]
    if values[0].ndim == 5 and shown[0].image_grid_thws is None:
        blank = {name: tensor.new_zeros(tensor.shape) for name, tensor in shown[0].pixel_inputs.items()}
        per_row = [torch.zeros_like(values[0]) if row.pixel_values is None else row.pixel_values for row in rows]
        inputs = [row.pixel_inputs if row.pixel_values is not None else blank for row in rows]
        stacked = {name: stacked_tiles([each[name] for each in inputs]) for name in blank}
        return {**fields, "pixel_values": stacked_tiles(per_row), "pixel_inputs": stacked}
    grids = [row.image_grid_thws for row in shown if row.image_grid_thws is not None]
    inputs = {name: torch.cat([row.pixel_inputs[name] for row in shown]) for name in shown[0].pixel_inputs}
    whole = {"pixel_values": torch.cat(values), "image_grid_thws": torch.cat(grids) if grids else None}
    return {**fields, **whole, "pixel_inputs": inputs}


def _read_pixels(experiences: Sequence[types.Experience], images: Images) -> dict[str, Any]:
    """Returns the pixel fields of the experiences."""
    rows: list[ExperienceVL] = []
    for experience in experiences:
        pixels: Pixels = images.pixels(experience.media)
        further = {n: t for n, t in pixels.items() if n not in ("pixel_values", "image_grid_thw")}
        raw = [decoded(item) for item in experience.media if item.mime != PIXELS]
        row = ExperienceVL(torch.zeros(1, 1), raw_images=[raw], pixel_inputs=further)
        row.pixel_values, row.image_grid_thws = pixels.get("pixel_values"), pixels.get("image_grid_thw")
        rows.append(row)
    return {name: value for name, value in _joined_pixels(rows).items() if name != "image_num"}
