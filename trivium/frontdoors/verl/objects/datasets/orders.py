"""The order in which epochs visit rows: file order, a seeded shuffle, or the order of a sampler.

A sampler's orders are drawn once and stored in the run directory, so that a resumed run continues at the same position.
Positions of a sampler that learns from batches (`update`) are drawn per batch; checkpoints save the sampler's state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trivium.foundation.atomic import atomic_write
from trivium.foundation.errors import DataError
from trivium.foundation.randomness import permutation
from trivium.models.late import torch


@dataclass
class Orders:
    """The positions that each epoch visits, below `rows`. Raises DataError for an unsupported sampler."""

    rows: int
    batch: int
    """Number of positions in a batch."""
    sampler: Any = None
    shuffle: bool = False
    seed: int = 0
    folder: Path | None = None
    """Folder in which a sampler's orders are stored."""
    _drawn: dict[int, list[int]] = field(default_factory=dict[int, list[int]], init=False)
    """Epoch -> its positions drawn so far."""
    _ahead: list[int] = field(default_factory=list[int], init=False)
    """The first positions of the sampler, drawn in advance to validate the sampler."""
    _positions: Iterator[int] | None = field(default=None, init=False)
    _epoch: int = field(default=-1, init=False)
    """The epoch of `_positions`."""
    _state: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    """State of a learning sampler after its last update."""

    def __post_init__(self) -> None:
        length = self.rows if self.sampler is None else _length_of(self.sampler)
        self.epoch_length = length // self.batch * self.batch
        if self.sampler is not None and self.epoch_length:
            # Wrong positions are reported before any process starts; a learning sampler may draw no more than one
            # batch.
            self._ahead = self._next(0, self.batch if self.learns else self.epoch_length)

    @property
    def learns(self) -> bool:
        """Whether the sampler learns from every batch."""
        return hasattr(self.sampler, "update")

    def until(self, epoch: int, stop: int) -> Sequence[int]:
        """Returns the positions that an epoch visits, at least the first `stop` ones."""
        if self.sampler is None:
            if not self.shuffle:
                return range(self.epoch_length)
            if epoch not in self._drawn:
                order = permutation(self.rows, self.seed, "order", epoch)[: self.epoch_length]
                self._drawn[epoch] = [int(place) for place in order]
            return self._drawn[epoch]
        # The state of a sampler continues from epoch to epoch, so the earlier ones are drawn first.
        for earlier in range(epoch):
            self._extend(earlier, self.epoch_length)
        return self._extend(epoch, stop if self.learns else self.epoch_length)

    def _extend(self, epoch: int, stop: int) -> list[int]:
        """Draws an epoch's positions up to `stop` and returns them. Positions that an earlier session drew are read
        from the folder; the sampler then skips them."""
        path = None if self.folder is None else self.folder / f"epoch-{epoch:06d}.json"
        if epoch not in self._drawn:
            recorded = path is not None and path.is_file()
            self._drawn[epoch] = json.loads(path.read_text(encoding="utf-8")) if recorded and path is not None else []
            if self._drawn[epoch] and not self.learns:
                self._next(epoch, self.epoch_length)
        drawn = self._drawn[epoch]
        if len(drawn) < stop:
            drawn += self._next(epoch, stop - len(drawn))
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, json.dumps(drawn) + "\n")
        return drawn

    def _next(self, epoch: int, count: int) -> list[int]:
        """Returns the sampler's next positions of an epoch."""
        if self._epoch != epoch:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            self._positions, self._epoch = iter(self.sampler), epoch
        ahead, self._ahead = self._ahead[:count], self._ahead[count:]
        assert self._positions is not None
        places = [_position(place) for place in islice(self._positions, count - len(ahead))]
        drawn = [place for place in places if isinstance(place, int) and 0 <= place < self.rows]
        wrong = [place for place in places if not isinstance(place, int) or not 0 <= place < self.rows]
        if wrong or len(ahead) + len(drawn) < count:
            raise DataError(
                f"{self.epoch_length} positions of {self.rows} rows from train_sampler, for epoch {epoch}",
                f"{wrong[0]!r:.60}" if wrong else f"{len(ahead) + len(drawn)} of {count}",
                "yield integers below the size of the dataset, as many as `len` returns",
            )
        return [*ahead, *drawn]

    # ------------------------------------------------------------------ learning

    def update(self, batch: object) -> None:
        """Passes a step's batch to the sampler's `update`."""
        self.sampler.update(batch=batch)
        save = getattr(self.sampler, "state_dict", None)
        sampler = None if save is None else _encoded(save())
        self._state = {"sampler": sampler, "epoch": self._epoch, "drawn": len(self._drawn[self._epoch])}

    def state(self) -> dict[str, Any]:
        """Returns the sampler's state after its last update as JSON values; empty before the first update."""
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the sampler to `state`. Raises DataError for a sampler that cannot be restored."""
        if not self.learns or not state:
            return
        if state["sampler"] is None or not hasattr(self.sampler, "load_state_dict"):
            raise DataError(
                f"the {type(self.sampler).__name__} as it was when the checkpoint was saved",
                "it has no state_dict and load_state_dict",
                "give it both, or start over in another trainer.default_local_dir",
            )
        self.sampler.load_state_dict(_decoded(state["sampler"]))
        self._state, self._ahead = dict(state), []
        epoch, position = state["epoch"], state["drawn"]
        if position < self.epoch_length:
            self._positions, self._epoch = iter(self.sampler), epoch
        else:
            epoch, position = epoch + 1, 0
        more = len(self._extend(epoch, 0)) - position
        if more > 0:  # the sampler skips positions that were drawn, but not learned from
            self._next(epoch, more)


def _position(place: object) -> object:
    """Converts tensors and NumPy numbers to Python numbers. Returns the repr of a bool, which is no position."""
    if isinstance(place, torch.Tensor | np.generic | np.ndarray) and place.ndim == 0:
        place = place.item()
    return repr(place) if isinstance(place, bool) else place


def _length_of(sampler: object) -> int:
    if hasattr(sampler, "batch_size") and hasattr(sampler, "drop_last"):
        raise DataError(
            "a train_sampler of rows",
            f"a {type(sampler).__name__}, which yields batches",
            "pass its `sampler`: data.train_batch_size determines the batches",
        )
    if not (isinstance(sampler, Sized) and isinstance(sampler, Iterable)):
        raise DataError(
            "a train_sampler",
            f"a {type(sampler).__name__} without a length",
            "give it __len__ and __iter__",
        )
    return len(sampler)


def _encoded(value: Any) -> Any:
    """Converts a state to JSON values. Tensors and arrays become lists with their dtype."""
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return {f"__{kind}__": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {str(key): _encoded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(part) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DataError(
        "a sampler's state_dict of numbers, text, lists, mappings, tensors and arrays",
        f"a {type(value).__name__} in it",
        "return only values of these types",
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if "__tensor__" in value:
            return torch.tensor(value["__tensor__"], dtype=getattr(torch, value["dtype"]))
        if "__array__" in value:
            return np.array(value["__array__"], dtype=value["dtype"])
        return {key: _decoded(part) for key, part in value.items()}
    return [_decoded(part) for part in value] if isinstance(value, list) else value
