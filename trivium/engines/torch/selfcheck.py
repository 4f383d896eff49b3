"""Checks an engine before it serves: decoding with its cache gives the outputs of the transformers model.

The first layers stand for all layers of their kinds: a check of all 30 layers of a model of 135 M parameters would read
its 540 MB about 50 times, which takes longer than to load it. `trivium doctor --engine` checks every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trivium.engines.torch.attention import registered
from trivium.engines.torch.decoder import Decoder
from trivium.foundation.errors import ConfigError
from trivium.foundation.randomness import stream, uniforms
from trivium.models.backbone.load import set_attention
from trivium.models.backbone.rounding import explained_by_rounding
from trivium.planning.choices import DECODE_ROWS

_log = logging.getLogger("trivium")
_TOLERANCE = 1e-3
"""Largest difference of log-probabilities that passes at once. For a larger one, the check measures rounding."""
_PLACES = {"layer_idx", "layer_id", "layer_index", "layer_number"}
"""Attributes with the place of a layer."""
_PLAIN = (bool, int, float, str, tuple, type(None))


@contextmanager
def first_layers(decoder: Decoder) -> Generator[None]:
    """Inside, the decoder has only its first layers, at least one of each kind, and no rows."""
    rows, layers, parent = decoder.rows, decoder.layers, _parent_of_layers(decoder)
    if parent is None or decoder.graphs is not None:  # a captured step would compute these layers for ever
        yield
        return
    every = parent.layers
    number = _first_of_each_kind(every, decoder.text.config.get_text_config())
    parent.layers, decoder.rows = every[:number], type(rows)()
    if layers is not None:
        layers.use(number)
    try:
        yield
    finally:
        parent.layers, decoder.rows = every, rows
        if layers is not None:
            layers.use(len(every))


def _parent_of_layers(decoder: Decoder) -> Any | None:
    """The module whose `layers` are those of the text model; None for a model that names them otherwise."""
    number = getattr(decoder.text.config.get_text_config(), "num_hidden_layers", None)
    parents = [
        module
        for module in decoder.text.modules()
        if isinstance(layers := getattr(module, "layers", None), nn.ModuleList) and len(layers) == number
    ]
    return parents[0] if len(parents) == 1 else None


def _first_of_each_kind(layers: nn.ModuleList, config: Any) -> int:
    """The number of first layers, at least two, that have a layer of each kind. They are the first ones because
    transformers looks up facts of a layer (`config.layer_types`) by its place."""
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds = [(kind, _facts(layer)) for kind, layer in zip(types, layers, strict=True)]
    return min(len(layers), max(2, *(kinds.index(kind) + 1 for kind in kinds)))


def _facts(layer: nn.Module) -> list[object]:
    """All that tells a layer from one of another kind: its modules, their settings, the shapes of their weights. A
    setting that differs from layer to layer gives each layer a kind of its own."""
    return [
        (
            name,
            type(module),
            [(key, value) for key, value in vars(module).items() if key not in _PLACES and isinstance(value, _PLAIN)],
            [(key, weight.shape, weight.dtype) for key, weight in module.named_parameters(recurse=False)],
        )
        for name, module in layer.named_modules()
    ]


def check_decoder(decoder: Decoder, max_context: int) -> None:
    """Raises ConfigError when prompt reading or decoding differs from transformers' own forward pass.

    For a batch-invariant decoder, also when other rows of a batch change a bit. If the optimized `layers` differ, logs
    a warning and removes them from the decoder.
    """
    error = _difference(decoder, max_context)
    if error is not None and decoder.layers is not None:
        _log.warning("the engine uses the slower layers of transformers: with its optimized ones, %s", error.found)
        decoder.layers = None
        error = _difference(decoder, max_context)
    if error is not None:
        raise error
    if decoder.workers is not None and not _same_with_threads(decoder, max_context):
        decoder.few_rows_threads = 1


def _same_with_threads(decoder: Decoder, max_context: int) -> bool:
    """Whether steps of few rows have the same bits on one thread and with several threads in each operation."""
    assert decoder.workers is not None
    probes, half = _probes(decoder, max_context)
    for rows in (2, 2 * DECODE_ROWS - 4):  # the fewest and the most that one thread may compute
        outputs = list[Tensor]()
        for threads in (1, decoder.workers.number):
            decoder.few_rows_threads = threads
            outputs.append(_teach(decoder, np.resize(probes[:, : half + 2], (rows, half + 2)), half))
        if not torch.equal(*outputs):
            return False
    return True


def _probes(decoder: Decoder, max_context: int) -> tuple[np.ndarray, int]:
    """Tokens [4, L], and how many of them are a prompt."""
    length = min(20, max_context - 1)  # at least two rows: the engine never runs a step with one
    tokens = (uniforms(stream("engine", "probe"), np.arange(4 * length)) * decoder.vocab_size).astype(np.int64)
    return tokens.reshape(4, length), max(1, length // 2)


def _difference(decoder: Decoder, max_context: int) -> ConfigError | None:
    probes, half = _probes(decoder, max_context)
    # Beside a copy of itself: the engine never runs a step with a single row, whose bits differ.
    alone, together = _teach(decoder, probes[[0, 0]], half), _teach(decoder, probes, half)
    name = type(decoder.model).__name__
    if decoder.exact and not torch.equal(alone[0], together[0]):
        return ConfigError(
            f"batch-invariant generation with {name}",
            "other rows of the batch change the bits of its log-probabilities",
            "set engine.batch_invariant to false",
        )
    plain = _plain(decoder, probes, half)
    difference = float((plain - together).abs().max())
    if difference < _TOLERANCE or explained_by_rounding(
        decoder.model, lambda: _plain(decoder, probes, half), together, plain
    ):
        return None
    return ConfigError(
        f"generate with {name}",
        f"its log-probabilities with a key-value cache differ by {difference:.2g} from those without, more than "
        f"rounding in {str(decoder.dtype).removeprefix('torch.')} explains",
        "this architecture keeps state that the engine does not support; use another model or engine",
    )


def _teach(decoder: Decoder, probes: np.ndarray, half: int) -> Tensor:
    """Log-probabilities [B, L - half, V] with the first half read as a prompt and the rest forced token by token."""
    count, length = probes.shape
    prefixes = decoder.read(list(probes[:, :half].astype(np.int32)))
    decoder.place(prefixes, range(count))
    logits = [torch.stack([prefix.logits for prefix in prefixes])]
    for position in range(half, length - 1):
        logits.append(decoder.step(probes[:, position].copy(), np.full(count, position)))
    return torch.stack(logits, dim=1).log_softmax(-1)


def _plain(decoder: Decoder, probes: np.ndarray, half: int) -> Tensor:
    """The same from one forward pass with transformers' own attention and no cache."""
    model = decoder.model
    set_attention(decoder.text, "eager")
    try:
        logits = model(input_ids=torch.from_numpy(probes).to(decoder.device), use_cache=False).logits
    finally:
        set_attention(decoder.text, registered(exact=decoder.exact))
    return logits[:, half - 1 : -1].float().log_softmax(-1)
