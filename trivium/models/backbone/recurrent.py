"""Layers with a recurrent state: gated delta rule (Qwen3-Next), Mamba 2, short convolutions (LFM 2).

transformers computes them by functions of a module: a causal convolution and a scan. `follow_sequences` gives the
layers a copy of their forward function that calls the functions below instead. In a pack, the state of each sequence
starts at zero, and the state at the end of a shared segment is handed to all of its continuations, with gradient.
In an engine, padding after a prompt does not change the prompt's state.

Legend: T tokens of a pack, S cells of the grids, C channels, K taps of a convolution, N segments, L their padded
length, B prompts, R rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.metadata import version
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from trivium.models.backbone.pack_layout import grids_of
from trivium.models.backbone.prefixes import Segment
from trivium.models.function_copies import calling, functions_called
from trivium.models.placement import sent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = {"full_attention", "sliding_attention"}
"""Values of `layer_types` in configs of models whose layers have attention."""
_RECURRENT = {"linear_attention", "conv", "hybrid", "mlp", "moe"}
"""Further values in configs of models with a recurrent state. `hybrid` layers have attention and a state; `mlp` and
`moe` layers neither."""

_SCAN = "update_recurrent_state"
_UPDATES = {_SCAN, "update_conv_state"}
"""Methods of transformers' caches that layers with a state call."""

Compute = Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""Scans N sequences: inputs (N, L, ...), the states that they begin with (None: zero), whether to return their last
states -> outputs (N, L, ...) and the last states."""


class _Pack(Protocol):
    """What a scan needs of a `packed.Pack`."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def segments(self) -> tuple[Segment, ...]: ...


def _is_supported() -> bool:
    """Whether transformers computes these layers by the functions in `_REPLACED`: since 5.20."""
    major, minor = version("transformers").split(".")[:2]
    return (int(major), int(minor)) >= (5, 20)


def follow_sequences(module: nn.Module) -> bool:
    """Makes the layers with a recurrent state follow packs (their argument `trivium_pack`) and padded prompts (`valid`
    of their cache), in place. Returns False if there are none, or any that this module does not know."""
    layers = [(layer, _following(type(layer))) for layer in module.modules() if _keeps_state(type(layer))]
    forwards = [(layer, forward) for layer, forward in layers if forward is not None]
    if len(forwards) < len(layers) or not _is_supported():
        return False
    for layer, forward in forwards:
        layer.forward = partial(_forward, forward, layer)
    return bool(forwards)


def unknown_layers(module: PreTrainedModel, recurrent: bool) -> set[str]:
    """The types of layers of a decoder that neither attention of this project nor, for a decoder whose layers
    `follow_sequences`, this module computes."""
    types = set[str](getattr(module.config.get_text_config(), "layer_types", None) or ())
    return types - (_ATTENTION | _RECURRENT if recurrent else _ATTENTION)


def _keeps_state(kind: type[nn.Module]) -> bool:
    """Whether the forward function of a layer changes states of a cache."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and bool(_UPDATES & {*code.co_names})


def _forward(forward: Callable[..., Any], layer: nn.Module, *inputs: Any, **options: Any) -> Any:
    cache = options.get("cache_params", options.get("past_key_values"))
    options["trivium_valid"] = getattr(cache, "valid", None)
    options["trivium_limit"] = getattr(layer, "time_step_limit", None)
    return forward(layer, *inputs, **options)


@cache
def _following(kind: type[nn.Module]) -> FunctionType | None:
    """A copy of the forward function of a layer with a state that calls the functions of this module; None if this
    module does not know its scan, for example that of Mamba 1."""
    forward = inspect.unwrap(kind.forward)  # without the hooks of accelerate
    if not isinstance(forward, FunctionType):
        return None
    called = functions_called(forward, _REPLACED)
    replaced = {name: partial(_REPLACED[name], function) for name, function in called.items()}
    scans = _SCAN in forward.__code__.co_names
    if "causal_conv1d_fn" not in replaced or (scans and not replaced.keys() & _SCANS):
        return None
    return calling(forward, replaced)


# --------------------------------------------------------------------------- the rows of a pack


@dataclass(frozen=True, slots=True)
class _Grid:
    """Segments of similar lengths, padded on the right."""

    cells: slice
    """Its cells among the S cells of all grids."""
    shape: tuple[int, int]
    """(N, L)"""
    parents: Tensor | None
    """(N,): the places of the segments before them, in the order of the level before; None if they begin sequences."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a pack in the order of scans."""

    before: Tensor
    """(T + 1,): the row of the previous token of the sequence; T if there is none. The last is T."""
    spread: Tensor
    """(S,): the row in each cell. Padding repeats the last row of the segment."""
    padding: Tensor
    """(S,) bool: whether a cell is padding."""
    collect: Tensor
    """(T,): the cell of each row."""
    levels: tuple[tuple[_Grid, ...], ...]
    """The segments that begin sequences, those that continue them, and so on."""


@lru_cache(maxsize=8)  # every layer asks for the rows of the same pack
def _rows_of(segments: tuple[Segment, ...], device: torch.device) -> _Rows:
    sizes = np.array([segment.stop - segment.first for segment in segments])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    before = np.arange(-1, total)
    before[-1] = total  # the row of zeros (`_convolve`) comes before itself
    by_level: list[list[int]] = []
    level_of: list[int] = []
    for here, segment in enumerate(segments):
        level_of.append(0 if segment.parent < 0 else level_of[segment.parent] + 1)
        if level_of[here] == len(by_level):
            by_level.append([])
        by_level[level_of[here]].append(here)
        before[starts[here]] = total if segment.parent < 0 else starts[segment.parent + 1] - 1
    collect = np.empty(total, np.int64)
    spread: list[npt.NDArray[np.int64]] = []
    levels: list[tuple[_Grid, ...]] = []
    place = dict[int, int]()
    offset = 0
    for number, members in enumerate(by_level):
        paths = [np.arange(starts[here], starts[here + 1]) for here in members]
        grids = grids_of(paths, [False] * len(paths), total)
        level_rows = np.concatenate(paths)
        collect[level_rows] = offset + grids.collect[level_rows]
        level: list[_Grid] = []
        first = 0
        places = dict[int, int]()
        for count, length in grids.shapes:
            beginnings = grids.spread[first : first + count * length : length]
            ids = [int(here) for here in np.searchsorted(starts, beginnings, "right") - 1]
            parents = sent(np.array([place[segments[here].parent] for here in ids]), device) if number else None
            places |= {here: len(places) + i for i, here in enumerate(ids)}
            level.append(_Grid(slice(offset + first, offset + first + count * length), (count, length), parents))
            first += count * length
        spread.append(grids.spread)
        levels.append(tuple(level))
        place, offset = places, offset + first
    rows = np.concatenate(spread)
    return _Rows(
        before=sent(before, device),
        spread=sent(rows, device),
        padding=sent(collect[rows] != np.arange(offset), device),
        collect=sent(collect, device),
        levels=tuple(levels),
    )


def _in_segments(batch: _Pack, inputs: Sequence[Tensor], fills: Sequence[float | None], compute: Compute) -> Tensor:
    """Scans (1, rows, ...) inputs segment by segment. `fills`: the values of inputs in padding, chosen so that padding
    keeps the state; None if any value does. Rows without a token are zero."""
    rows = _rows_of(batch.segments, batch.tokens.device)
    cells = [tensor[0].index_select(0, rows.spread) for tensor in inputs]
    for i, fill in enumerate(fills):
        if fill is not None:
            cells[i] = cells[i].masked_fill(rows.padding.view(-1, *[1] * (cells[i].dim() - 1)), fill)
    outputs: list[Tensor] = []
    states: Tensor | None = None
    with torch.autocast(batch.tokens.device.type, enabled=False):
        for number, level in enumerate(rows.levels):
            continues, ends = number + 1 < len(rows.levels), list[Tensor]()
            for grid in level:
                start = None if states is None or grid.parents is None else states.index_select(0, grid.parents)
                parts = [tensor[grid.cells].unflatten(0, grid.shape) for tensor in cells]
                output, end = compute(parts, start, continues)
                outputs.append(output.flatten(0, 1))
                ends += [] if end is None else [end]
            states = torch.cat(ends) if continues else None
    output = torch.cat(outputs).index_select(0, rows.collect)
    return _filled(output, inputs[0].shape[1])[None]


def _filled(output: Tensor, count: int) -> Tensor:
    """(T, ...) -> (count, ...) with zeros behind."""
    return torch.cat([output, output.new_zeros(count - len(output), *output.shape[1:])])


# --------------------------------------------------------------------------- the functions


def _convolve(
    original: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    trivium_pack: _Pack | None = None,
    trivium_valid: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A causal convolution of each channel: (B, C, length) -> (B, C, length)."""
    if trivium_pack is None:
        if trivium_valid is None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        x = pad(hidden_states.to(weight.dtype), (weight.shape[-1] - 1, 0))
        return _activated(convolved(x, weight, bias), activation).to(hidden_states.dtype)
    rows = _rows_of(trivium_pack.segments, trivium_pack.tokens.device)
    count = len(rows.collect)
    x, weight, bias = _wide(hidden_states[0, :, :count].T, weight, bias)
    # Taps before the first token of a sequence read the row behind the last one (`_Rows.before`).
    with_zero = torch.cat([x, x.new_zeros(1, x.shape[1])])
    taps = weight.T.unbind()
    output, at = x * taps[-1], rows.before
    for tap in reversed(taps[:-1]):
        output = output + with_zero.index_select(0, at[:count]) * tap
        at = rows.before.index_select(0, at)
    output = _activated(output if bias is None else output + bias, activation).to(hidden_states.dtype)
    return _filled(output, hidden_states.shape[-1]).T[None]


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, C, K - 1 + length) -> (B, C, length) for weights (C, K). Sums and products of single numbers: their bits do
    not depend on B."""
    x, weight, bias = _wide(x, weight, bias)
    taps, length = weight.shape[-1], x.shape[-1] - weight.shape[-1] + 1
    output = x[..., taps - 1 :] * weight[:, -1:]
    for tap in reversed(range(taps - 1)):
        output = output + x[..., tap : tap + length] * weight[:, tap : tap + 1]
    return output if bias is None else output + bias[:, None]


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same in float32 (float64 for that type): sums in bfloat16 would round each term."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)


def _convolve_step(
    original: Callable[..., Tensor],
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """The convolution of one more token of each row, (R, C, 1). Shifts the last inputs, `conv_state` (R, C, K)."""
    del original
    whole = torch.cat([conv_state, hidden_states], -1)
    conv_state.copy_(whole[..., 1:])  # in place: the cache of the engine holds this tensor
    output = convolved(whole[..., -weight.shape[-1] :].to(weight.dtype), weight, bias)
    return _activated(output, activation).to(hidden_states.dtype)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    from transformers.activations import ACT2FN

    return x if activation is None else ACT2FN[activation](x)


def _delta_rule(
    original: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    trivium_pack: _Pack | None = None,
    trivium_valid: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule. A token with `g` and `beta` 0 keeps the state."""
    if trivium_valid is not None:
        g, beta = (gate.masked_fill(~trivium_valid[..., None], 0) for gate in (g, beta))
    if trivium_pack is None:
        return original(query, key, value, g=g, beta=beta, **options)

    def compute(parts: list[Tensor], start: Tensor | None, continues: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, decay, rate = parts
        scan = {**options, "initial_state": start, "output_final_state": continues}
        return original(q, k, v, g=decay, beta=rate, **scan)

    return _in_segments(trivium_pack, (query, key, value, g, beta), (None, None, None, 0, 0), compute), None


def _mamba(
    original: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    trivium_pack: _Pack | None = None,
    trivium_valid: Tensor | None = None,
    **options: Any,
) -> Any:
    """The scan of Mamba 2. A token with `dt` 0 keeps the state."""
    if trivium_pack is None and trivium_valid is None:
        steps: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        return original(hidden_states, dt, A, B, C, **steps, **options)
    # Bias and softplus come first: they would turn the 0 of a padding token into a step.
    dt = _steps(dt, dt_bias, dt_softplus, dt_limit)
    if trivium_pack is None:
        dt = dt if trivium_valid is None else dt.masked_fill(~trivium_valid[..., None], 0)
        return original(hidden_states, dt, A, B, C, **options)

    def compute(parts: list[Tensor], start: Tensor | None, continues: bool) -> tuple[Tensor, Tensor | None]:
        x, steps, b, c = parts
        result = original(x, steps, A, b, c, **{**options, "initial_states": start, "return_final_states": continues})
        return result if continues else (result, None)

    return _in_segments(trivium_pack, (hidden_states, dt, B, C), (None, 0, None, None), compute)


def _mamba_step(
    original: Callable[..., Tensor],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    *matrices: Any,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    trivium_limit: tuple[float, float] | None = None,
    **options: Any,
) -> Tensor:
    """The scan of one more token of each row, which changes `state` in place. It bounds `dt` as the scan of many tokens
    does, which transformers omits: Nemotron-H and Zamba 2 have a lower bound above 0."""
    return original(state, hidden_states, _steps(dt, dt_bias, dt_softplus, trivium_limit), *matrices, **options)


def _steps(dt: Tensor, bias: Tensor | None, is_softplus: bool, limit: tuple[float, float] | None) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = softplus(dt) if is_softplus else dt
    return dt if limit is None else dt.clamp(*limit)


def _not_fused(*_: Any, **__: Any) -> None:
    """Kernels that fuse convolution and scan know no packs."""


_REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "causal_conv1d_update": _convolve_step,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba,
    "mamba2_selective_state_update": _mamba_step,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
"""Functions of transformers' modules -> what layers call instead. Its first argument is the replaced function."""
_SCANS = {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}
"""Those that scan many tokens."""
