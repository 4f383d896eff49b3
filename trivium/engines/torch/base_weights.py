"""The weights that an engine's model was loaded with. Adapters are added to them, each to the same values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, reduce
from pathlib import Path

import torch
from torch import Tensor

from trivium.foundation.errors import SyncError
from trivium.models.backbone.load import load_lm
from trivium.models.weights.filling import names_in_files
from trivium.models.weights.lora import fingerprint
from trivium.models.weights.saved_tensors import SavedTensors, open_tensors, weight_files


class BaseWeights:
    """Reads a weight from the model's files whenever an adapter changes it: a copy of all layers would take the memory
    of a second model. Weights that the model does not hold as they are in a file are kept."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir, self._paths = model_dir, weight_files(model_dir)
        if all(path.suffix == ".safetensors" for path in self._paths):
            _ = self._files  # files that are removed later stay readable; unpickled ones may take memory
        self._kept: dict[str, Tensor] = {}
        self._fingerprints: dict[str, int] = {}

    def add(self, held: Mapping[str, Tensor]) -> None:
        """Makes weights available. `held`: their values in the model, which are those that it was loaded with."""
        missing = {name: weight for name, weight in held.items() if name not in self._fingerprints}
        if kept := [name for name, weight in missing.items() if not self._is_in_files(name, weight)]:
            types = (entry.dtype for entry in self._files.entries.values())
            floats = [dtype for dtype in types if isinstance(dtype, torch.dtype) and dtype.is_floating_point]
            loaded = self.load(reduce(torch.promote_types, floats))
            self._kept |= {name: loaded[name] for name in kept}
        self._fingerprints |= {name: fingerprint(self._value(name)) for name in missing}

    def fingerprint(self, name: str) -> int:
        """That of a weight that was added."""
        return self._fingerprints[name]

    def read(self, name: str) -> Tensor:
        """A weight that was added, in the type of its file, which may be more precise than the engine's. Raises
        SyncError if the file changed since."""
        weight = self._value(name)
        if fingerprint(weight) != self._fingerprints[name]:
            raise SyncError(
                f"add an adapter to {name} of {self._model_dir}",
                "the file was written to since the engine began to use it",
                "leave the files of a model as they are while a run uses them, and start the run again",
            )
        return weight

    def load(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights and buffers of the model in a type."""
        return load_lm(self._model_dir, dtype=dtype, attention=None).state_dict()

    def _value(self, name: str) -> Tensor:
        return self._kept[name] if name in self._kept else self._from_files(name)

    @cached_property
    def _files(self) -> SavedTensors:
        return open_tensors(self._paths)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """The names in the files, by those in the model."""
        empty = load_lm(self._model_dir, dtype="auto", attention=None, empty=True)
        return names_in_files(empty, self._files.entries)

    def _from_files(self, name: str) -> Tensor:
        entry = self._files.entries[self._names[name]]
        assert isinstance(entry.dtype, torch.dtype)  # `_is_in_files`
        weight = torch.empty(entry.shape, dtype=entry.dtype)
        self._files.copy_rows(self._names[name], 0, weight)
        return weight

    def _is_in_files(self, name: str, held: Tensor) -> bool:
        """Whether the files hold this weight as it was loaded."""
        entry = self._files.entries.get(self._names.get(name, ""))
        if entry is None or entry.shape != tuple(held.shape) or not isinstance(entry.dtype, torch.dtype):
            return False
        return torch.equal(self._from_files(name).to(held.dtype), held.cpu())
