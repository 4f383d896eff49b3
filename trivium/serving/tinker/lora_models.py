"""The trained models of the service: an adapter and its optimizer each, on base weights that all of them share.

All functions block; the service calls them in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from trivium.foundation.errors import DataError
from trivium.models.weights.lora import base_adapter, linear_layers
from trivium.models.weights.section import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig
from trivium.protocols import SteppedEngine
from trivium.serving.tinker.losses import loss_batch
from trivium.serving.tinker.verbs import Lora, LossRequest
from trivium.types import AnyArray, Batch, Experience, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALPHA = 32.0
"""The adapter's product is scaled by this over its rank, as in the service (LoRA Without Regret, Schulman 2025)."""
_STATE, _ADAPTER, _PLACES = "state", "policy-adapter", "places.safetensors"
_NONE = -99999.0
"""The log-probability of no token, in tables of the most probable ones."""
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Adapters:
    """Makes the engines of adapters."""

    base: PreTrainedModel
    make: Callable[[LoraConfig, int, float], SteppedEngine]
    """(adapter, seed, temperature) -> an engine for it on the base weights, not prepared."""

    @property
    def vocabulary(self) -> int:
        return int(self.base.config.get_text_config().vocab_size)

    def new(self, lora: Lora, seed: int) -> SteppedEngine:
        """A new adapter. Raises DataError without any layer."""
        names = set(linear_layers(self.base, self.base))
        paths = (path for path, _ in self.base.named_modules() if "attn" in path or "attention" in path)
        attention = {path.rpartition(".")[2] for path in paths} & names
        chosen = (attention if lora.train_attn else set[str]()) | (names - attention if lora.train_mlp else set[str]())
        if not chosen:
            found, do = "neither attention nor MLP: the output layer has none here", "set train_attn or train_mlp"
            raise DataError("layers with an adapter", found, do)
        section = LoraConfig(rank=lora.rank, alpha=_ALPHA, targets=tuple(sorted(chosen)), push="adapter")
        return self._prepared(self.make(section, seed, 1.0))

    def saved(self, directory: Path, *, optimizer: bool) -> SteppedEngine:
        """The adapter in a directory of a saved state. Raises DataError for the optimizer of one without."""
        state = directory / _STATE
        if optimizer and not state.is_dir():
            raise DataError("the optimizer of sampler weights", "they have none", "load a state that save_state saved")
        engine = self._open(adapter_in(directory), 1.0)
        if not optimizer:
            return self._prepared(engine)
        engine.load(state)
        return engine

    def scoring(self, weights: Path | None, temperature: float) -> SteppedEngine:
        """An engine that scores with the adapter in a directory at a temperature; None: with the base model."""
        if weights is not None:
            return self._prepared(self._open(weights, temperature))
        # A new adapter changes nothing.
        return self._prepared(self.make(LoraConfig(rank=1, push="adapter"), 0, temperature))

    def _open(self, adapter: Path, temperature: float) -> SteppedEngine:
        _check_files(adapter, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        return self.make(LoraConfig(path=str(adapter), push="adapter"), 0, temperature)  # pyright: ignore[reportArgumentType]

    def weights(self, directory: Path | None) -> Named:
        """The weights of a sampler as an engine adopts them: the adapter in a directory; None: of the base model."""
        if directory is None:
            return [*base_adapter(self.base)]
        _check_files(directory, ADAPTER_WEIGHTS, _PLACES)
        return [*load_file(directory / ADAPTER_WEIGHTS).items(), *load_file(directory / _PLACES).items()]

    @staticmethod
    def _prepared(engine: SteppedEngine) -> SteppedEngine:
        engine.prepare()
        return engine


def save_state(engine: SteppedEngine, directory: Path, *, optimizer: bool) -> None:
    """Writes a peft directory, with the optimizer beside it or without."""
    if optimizer:
        engine.save(directory / _STATE)
    else:
        engine.save_adapter(directory)
    # What engines need beside the adapter to add it to their base.
    places = {name: tensor for name, tensor in engine.offered_weights() if not name.endswith(".weight")}
    save_file(places, adapter_in(directory) / _PLACES)


def adapter_in(directory: Path) -> Path:
    """The peft directory in that of a saved state."""
    state = directory / _STATE / _ADAPTER
    return state if state.is_dir() else directory


def compute_loss(engine: SteppedEngine, request: LossRequest) -> tuple[Mapping[str, float], list[AnyArray]]:
    """The sum of the loss over the data, and the log-probabilities of the targets of each datum. Adds the gradient to
    the accumulated one unless only the forward pass is wanted."""
    batch, objective = loss_batch(request.loss_fn, request.options, request.data)
    metrics, columns = engine.accumulate(batch, objective, gradient=not request.forward_only)
    log_probs: list[AnyArray] = []
    for values, (_, inputs) in zip(columns["log_prob"], request.data, strict=True):
        shape = inputs["target_tokens"].shape
        log_probs.append(values[1:].reshape(shape[0], -1)[:, : inputs["target_tokens"][0].size].reshape(shape))
    return {"loss:sum": metrics["train/loss/policy"]}, log_probs


def top_tokens(engine: SteppedEngine, sequences: Sequence[IntArray], first: int, k: int) -> list[AnyArray]:
    """(L, k, 2) for each sequence: the ids and log-probabilities of the most probable tokens at each place; before
    the place `first`, none."""
    rows: list[Experience] = []
    for number, tokens in enumerate(sequences):
        mask, zeros = np.arange(len(tokens)) >= first, np.zeros(len(tokens), np.float32)
        rows.append(Experience(tokens, mask, zeros, zeros.astype(np.int32), "top", number))
    tops = engine.top(Batch(tuple(rows)), k)
    return [np.where(row.response_mask[:, None, None], top, [0, _NONE]) for row, top in zip(rows, tops, strict=True)]


def _check_files(directory: Path, *names: str) -> None:
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        found = f"{', '.join(missing)} missing: it was deleted, or damaged"
        raise DataError("a saved adapter", found, "save it again, or name another one")
