"""Converts between LightRFT's experiences (padded tensors) and the core's batches.

Legend: B sequences; S = P + A tokens of one: the longest prompt, padded on the left, and the longest response, padded
on the right. The last A columns are the actions; `action_mask` marks the trained ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium import types
from trivium.foundation.errors import DataError
from trivium.frontdoors.lightrft.objects.models.placing import media_of_rows, pieces_of, stacked_tiles
from trivium.frontdoors.padding import side_by_side
from trivium.models.vision.encoder import PIXELS, Vision, pixel_reader
from trivium.models.vision.images import Images, decoded, join_pixels
from trivium.training.batching import joined as joined_rows
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
_LISTS = ("labels", "references", "raw_images")
"""Fields with one entry per row, which a core batch does not hold."""


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
    reader: Images | None = None
    """Reads the pixels of `origin`."""

    def __post_init__(self) -> None:
        grids: Any = self.image_grid_thws
        if isinstance(grids, list):  # one tensor for each row
            self.image_num = [len(grid) for grid in cast("list[Tensor]", grids)]
            self.image_grid_thws = torch.cat(grids) if grids else None
        for name in ("info", "further", "pixel_inputs"):
            if getattr(self, name) is None:
                setattr(self, name, {})

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_actions(self) -> int:
        """A. Raises DataError if no field determines it."""
        tensors = (self.action_mask, *(getattr(self, name) for name in COLUMNS))
        width = next((tensor.shape[1] for tensor in tensors if tensor is not None), None)
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
            # The core's experiences are arrays of numpy, and a reader has no tensors.
            if entry.name not in ("origin", "reader"):
                setattr(self, entry.name, _changed(getattr(self, entry.name), change))
        return self

    # ------------------------------------------------------------------ rows

    def split(self, vision: Vision | None = None) -> list[ExperienceVL]:
        """Returns the rows as separate experiences without padding. `vision` is as for `to_batch`."""
        batch = self.to_batch(vision)
        rows: list[ExperienceVL] = []
        for row in range(len(self)):
            rows.append(ExperienceVL.from_batch(batch.select([row]), processor=self.reader))
            rows[-1].info = _row_of(self.info, row, len(self))
            for name in _LISTS:
                if (values := getattr(self, name)) is not None:
                    setattr(rows[-1], name, [values[row]])
        return rows

    @classmethod
    def join(cls, experiences: Sequence[ExperienceVL], vision: Vision | None = None) -> ExperienceVL:
        """Joins all rows in order, with minimal padding. Keeps the fields that all experiences have."""
        batch = joined_rows([experience.to_batch(vision) for experience in experiences])
        if batch is None:
            raise DataError("join experiences", "there is none", "give at least one")
        reader = next((experience.reader for experience in experiences if experience.reader is not None), None)
        joined = cls.from_batch(batch, processor=reader)
        joined.info = _joined_info([experience.info for experience in experiences])
        for name in _LISTS:
            values = [getattr(experience, name) for experience in experiences]
            if None not in values:
                setattr(joined, name, [entry for rows in values for entry in rows])
        return joined

    def _per_action(self) -> dict[str, Tensor]:
        entries = {name: getattr(self, name) for name in (*COLUMNS, "action_mask")}
        return {name: tensor for name, tensor in entries.items() if tensor is not None}

    def _attention(self) -> npt.NDArray[np.bool_]:
        """Returns (B, S): False on padding."""
        mask = torch.ones_like(self.sequences) if self.attention_mask is None else self.attention_mask
        return mask.detach().cpu().numpy() != 0

    # ------------------------------------------------------------------ the core's batch

    @classmethod
    def from_batch(cls, batch: Batch, *, processor: Any | None = None, pad_token_id: int = 0) -> ExperienceVL:
        """Converts a core batch. With a `processor` (of transformers, or Images), adds pixels and raw images."""
        images = processor if processor is None or isinstance(processor, Images) else Images(processor)
        experiences = batch.experiences
        starts = [_start(experience) for experience in experiences]
        sequences = side_by_side([e.tokens for e in experiences], starts, pad_token_id, torch.int64)
        attention = side_by_side([np.ones(len(e), np.int64) for e in experiences], starts, 0)

        def cut(arrays: Sequence[AnyArray]) -> Tensor:
            return side_by_side(arrays, starts, 0)[:, max(starts) :].clone()

        field_of = {column: name for name, column in COLUMNS.items()}
        numbers = {field_of[name]: cut(arrays) for name, arrays in batch.columns.items() if name in field_of}
        return cls(
            sequences,
            **numbers,
            **_read_pixels(experiences, images),
            reader=images,
            attention_mask=attention,
            action_mask=cut([e.response_mask for e in experiences]),
            info=_info(batch),
            image_num=[len(e.media) for e in experiences],
            group_ids=[e.group_id for e in experiences],
            further={name: cut(arrays) for name, arrays in batch.columns.items() if name not in field_of},
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
        unpadded = [tokens[row][attention[row]].astype(np.int32) for row in range(len(self))]
        places = [_action_places(attention[row], actions) for row in range(len(self))]

        def spread(values: AnyArray) -> list[AnyArray]:
            rows: list[AnyArray] = []
            for row, (columns, at) in enumerate(places):
                rows.append(np.zeros((len(unpadded[row]), *values.shape[2:]), values.dtype))
                rows[-1][at] = values[row][columns]
            return rows

        columns = {name: spread(_array(tensor)) for name, tensor in numbers.items()}
        masks = spread(mask)
        media = self._media(vision, unpadded)
        old = columns.get("old_log_prob")
        experiences = tuple(
            self._experience(row, unpadded[row], masks[row], None if old is None else old[row], media[row])
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
        # A user may have replaced the sequences: the versions and log-probabilities of the origin are then of other
        # tokens.
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


# --------------------------------------------------------------------------- arrays


def _start(experience: types.Experience) -> int:
    """Returns where the response begins: at the first trained token, or at the first turn."""
    trained = np.flatnonzero(experience.response_mask)
    first = int(trained[0]) if len(trained) else experience.turns[0].start if experience.turns else len(experience)
    # The first token has nothing before it that predicts it, and there is at least one action.
    return max(1, min(first, len(experience) - 1))


def _action_places(attended: npt.NDArray[np.bool_], actions: int) -> tuple[AnyArray, AnyArray]:
    """Returns the action columns of a row that are tokens, and their positions in the row without padding."""
    columns = np.flatnonzero(attended[len(attended) - actions :])
    return columns, (np.cumsum(attended) - 1)[len(attended) - actions :][columns]


def _array(tensor: Tensor) -> AnyArray:
    tensor = tensor.detach().cpu()
    # numpy has no bfloat16.
    return tensor.numpy() if tensor.dtype in (torch.float32, torch.float64, torch.bool) else tensor.float().numpy()


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to every tensor in a value."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _changed(part, change) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_changed(part, change) for part in cast("list[Any]", value)]
    return value


# --------------------------------------------------------------------------- rows


def _info(batch: Batch) -> dict[str, Any]:
    """Returns the statistics of each row: reward, lengths, the return at the first action and the mean KL."""
    rows, zeros = batch.experiences, [np.zeros(len(e)) for e in batch.experiences]
    returns, kl = (batch.columns.get(name, zeros) for name in ("returns", "kl"))
    trained = [np.flatnonzero(e.response_mask) for e in rows]
    numbers = {
        "reward": [e.reward for e in rows],
        "response_length": [e.num_response_tokens for e in rows],
        "total_length": [len(e) for e in rows],
        "return": [array[at[0]] if len(at) else 0.0 for array, at in zip(returns, trained, strict=True)],
        "kl": [array[at].mean() if len(at) else 0.0 for array, at in zip(kl, trained, strict=True)],
    }
    named = dict.fromkeys(name for e in rows for name in e.rewards)
    parts = {name: torch.tensor([e.rewards.get(name, 0.0) for e in rows]) for name in named}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()} | {
        "reward_metrics": parts
    }


def _row_of(info: dict[str, Any], row: int, size: int) -> dict[str, Any]:
    """Returns the info of one row. Values without a row dimension apply to every row."""

    def only(value: Any) -> Any:
        if isinstance(value, dict):
            return _row_of(cast("dict[str, Any]", value), row, size)
        has_rows = (isinstance(value, Tensor) and value.ndim) or isinstance(value, list)
        return value[row : row + 1] if has_rows and len(value) == size else value

    return {name: only(value) for name, value in info.items()}


def _joined_info(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates the entries that all have. Values without a row dimension are those of the first."""
    joined: dict[str, Any] = {}
    for name in set.intersection(*map(set, infos)):
        values = [info[name] for info in infos]
        if isinstance(values[0], dict):
            joined[name] = _joined_info(values)
        elif isinstance(values[0], Tensor) and values[0].ndim:
            joined[name] = torch.cat(values)
        else:
            joined[name] = (
                values[0] if not isinstance(values[0], list) else [entry for rows in values for entry in rows]
            )
    return joined


def _read_pixels(experiences: Sequence[types.Experience], images: Images | None) -> dict[str, Any]:
    """Returns the pixel fields of the experiences, with the pixels of images if their reader is given."""
    reader = pixel_reader(Path())  # of media that are pixels

    def read(item: Media) -> Mapping[str, Tensor]:
        return reader(item) if images is None or item.mime == PIXELS else images.read(item).pixels

    media = [[item for item in e.media if images is not None or item.mime == PIXELS] for e in experiences]
    rows = [join_pixels([read(item) for item in items]) for items in media]
    raw = [[decoded(item) for item in items if item.mime != PIXELS] for items in media]
    with_images = [row for row in rows if row]
    fields: dict[str, Any] = {"raw_images": None if images is None else raw}
    if not with_images:
        return fields
    first = with_images[0]
    if first["pixel_values"].ndim == 5 and "image_grid_thw" not in first:  # (1, tiles, ...) of each row
        blank = {name: tensor.new_zeros(tensor.shape) for name, tensor in first.items()}
        joined = {name: stacked_tiles([(row or blank)[name] for row in rows]) for name in blank}
    else:
        joined = {name: torch.cat([row[name] for row in with_images]) for name in first}
    values, grids = joined.pop("pixel_values"), joined.pop("image_grid_thw", None)
    return {**fields, "pixel_values": values, "image_grid_thws": grids, "pixel_inputs": joined}
