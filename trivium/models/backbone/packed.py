"""Packed sequences: one row of T tokens without padding goes through every layer; attention keeps sequences apart.

Only attention needs to know where a sequence ends. It copies the rows into a few dense grids of nearly equal lengths,
padded on the right. Under causal attention no token attends to later ones, so no mask is needed, and no token can
attend to another sequence. A model that does not route attention through transformers' interface is run as one padded
grid.

Sequences that begin with the same tokens may share them (`prefixes`): these tokens are in the row once, and the
attention is that of `prefix_attention`.

Ranks that share a sequence (trivium.models.backbone.sequence_parallel) each run a slice of the row through the layers.

Legend: B sequences, L tokens of the longest, M tokens of all sequences, T <= M tokens of the row, H heads, D head
width, S cells of the grids.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import pad

from trivium.foundation.errors import ConfigError, TriviumError
from trivium.models.backbone.dense_attention import dense_attention, window_mask
from trivium.models.backbone.gpu_attention import (
    KERNELS,
    Kernel,
    attend_in_runs,
    backend_for,
    runs_of,
)
from trivium.models.backbone.load import max_positions, set_attention
from trivium.models.backbone.pack_layout import rows_of, tree_rows
from trivium.models.backbone.prefix_attention import TreeRows, tree_attention
from trivium.models.backbone.prefixes import Segment, Tree, separate
from trivium.models.backbone.recurrent import follow_sequences, unknown_layers
from trivium.models.backbone.rounding import explained_by_rounding
from trivium.models.backbone.sequence_parallel import (
    LocalStates,
    SequenceGroup,
    Slices,
    check_heads,
    heads_apart,
    heads_together,
    local_states,
)
from trivium.models.cpu.linear import ROWS, padding
from trivium.models.placement import sent
from trivium.models.vision.encoder import PlacedImages, refuse_images, vision_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("trivium")

PACKED = "trivium_packed"
"""The name of packed attention in transformers' registry. No mask function is registered, so no mask is built."""

_EXTRAS = ("softcap", "position_bias")
"""Arguments of attention that packed attention does not support."""


class CannotPack(Exception):
    """The model needs more than packed attention computes. It is run padded."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences end to end, shared tokens once, and the place of each token in dense grids."""

    tokens: torch.Tensor
    """(T + E,) int64. The last E are last tokens of sequences, which no layer computes (`skip_ends` of `pack`)."""
    positions: torch.Tensor
    """(T,) int64: the position of each token in its sequence. With M-RoPE (4, T): position, time, row, column."""
    before: torch.Tensor
    """(T + E,) int64: the row of the previous token of the sequence. Undefined for the first token."""
    lengths: tuple[int, ...]
    rows: torch.Tensor
    """(M,) int64: the row of each token, one sequence after another."""
    cells: torch.Tensor
    """(M,) int64: the cell of each token in the row-major (B, L) grid."""
    segments: tuple[Segment, ...]
    """The segments, in the order of the rows."""
    layout: Callable[[], TreeRows]
    """Which rows attend to which in dense grids. Built by the first call, because some GPU kernels do not read it."""
    order: torch.Tensor | None = None
    """(T,) int64: the row of each token if ranks share sequences; None if rows and tokens are in one order."""
    images: PlacedImages | None = None
    """The images of the sequences. An image without places makes this rank run the vision tower as other ranks do."""
    routing: torch.Tensor | None = None
    """(layers, K, T) int16: the experts of each token (see `trivium.models.backbone.routing`). If None, the routers
    choose."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return len(self.lengths), max(self.lengths)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.positions.shape[-1]


def pack(
    sequences: Sequence[npt.NDArray[np.int32]],
    device: torch.device | str = "cpu",
    tree: Tree | None = None,
    *,
    skip_ends: bool = False,
) -> Pack:
    """Packs sequences of at least one token each, in the given order. With a `tree`, shared tokens are in the row once.
    `skip_ends`: the last token of a sequence is not computed, unless another sequence continues after it.
    """
    lengths = np.array([len(s) for s in sequences])
    tree = tree or separate([int(n) for n in lengths])
    ends = tree.ends() if skip_ends else {}
    tree = tree.without(ends)
    sizes = np.array([segment.stop - segment.first for segment in tree.segments])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    before = np.arange(-1, sizes.sum() - 1)
    for start, segment in zip(starts, tree.segments, strict=True):
        before[start] = 0 if segment.parent < 0 else starts[segment.parent] + sizes[segment.parent] - 1
    before = np.concatenate([before, [starts[here] + sizes[here] - 1 for here in ends]])
    row_of_end = {here: sizes.sum() + i for i, here in enumerate(ends)}
    owner = np.repeat(np.arange(len(lengths)), lengths)

    def move(array: npt.NDArray[Any]) -> torch.Tensor:
        return sent(array.astype(np.int64), torch.device(device))

    positions = move(np.concatenate([np.arange(s.first, s.stop) for s in tree.segments]))
    return Pack(
        tokens=move(
            np.concatenate([sequences[s.sequence][s.first : s.stop] for s in (*tree.segments, *ends.values())])
        ),
        positions=positions,
        before=move(before),
        lengths=tuple(int(n) for n in lengths),
        rows=move(np.concatenate([rows_of(leaf, tree, starts, row_of_end) for leaf in tree.leaves])),
        cells=move(owner * lengths.max() + np.concatenate([np.arange(n) for n in lengths])),
        segments=tree.segments,
        layout=cache(partial(tree_rows, tree, starts, positions)),
    )


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    trivium_pack: Pack | None = None,
    trivium_sequence: SequenceGroup | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a pack: (1, H, T, D) -> (1, T, H, D).

    `s_aux` (H,) are attention sinks. With `trivium_sequence`, the T rows are this rank's slice of the tokens, and the
    pack describes all slices.

    Never applies dropout, which would change the ratio of two policies.
    """
    if trivium_pack is None:
        raise TriviumError(
            "packed attention",
            f"{type(module).__name__} was called without a pack",
            "call the model through trivium.models.backbone.packed.Backbone",
        )
    extras = [name for name in _EXTRAS if arguments.get(name) is not None]
    if extras or attention_mask is not None:
        raise CannotPack(f"{type(module).__name__} passes {', '.join(extras) or 'a mask of its own'} to attention")
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # On CPUs the backward pass of torch's kernel takes three times as long in bfloat16.
        dtype = torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)
        tokens = [x.to(dtype) for x in tokens]
    if trivium_sequence is not None:
        tokens = heads_apart(tokens, trivium_sequence)
    backend = None if device == "cpu" else backend_for(tokens[0], tokens[2])
    if s_aux is not None:
        attend = partial(_attend_in_tree, sinks=s_aux)
    elif backend in KERNELS:
        attend = partial(_attend_in_runs, kernel=KERNELS[backend])
    else:
        attend = _attend_in_tree if trivium_pack.layout().is_tree else _attend_in_grids
    with torch.autocast(device, enabled=False):  # else it would undo the choice of the type above
        output = attend(tokens, trivium_pack, scaling, sliding_window)
    return (output if trivium_sequence is None else heads_together(output, trivium_sequence))[None], None


def _attend_in_grids(
    tokens: Sequence[torch.Tensor], batch: Pack, scaling: float | None, sliding_window: int | None
) -> torch.Tensor:
    """(rows, H, D) queries, keys and values -> (rows, H, D), each row attending to its own sequence. Rows without a
    token are undefined."""
    outputs: list[torch.Tensor] = []
    offset = 0
    layout, order = batch.layout(), batch.order
    spread = layout.spread if order is None else order.index_select(0, layout.spread)
    dense = [x.index_select(0, spread) for x in tokens]
    for rows, length in layout.grids:
        q, k, v = (x[offset : offset + rows * length].unflatten(0, (rows, length)).transpose(1, 2) for x in dense)
        grid = dense_attention(q, k, v, window_mask(length, sliding_window, q.device), scaling)
        outputs.append(grid.transpose(1, 2).flatten(0, 1))
        offset += rows * length
    return torch.cat(outputs).index_select(0, _at_rows(batch, layout.collect, len(tokens[0])))


def _attend_in_tree(
    tokens: Sequence[torch.Tensor],
    batch: Pack,
    scaling: float | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for sequences that share tokens, or with `sinks`. Rows without a token are zero."""
    number = batch.num_rows
    q, k, v = (x[:number] if batch.order is None else x.index_select(0, batch.order) for x in tokens)
    return _at_rows(batch, tree_attention(q, k, v, batch.layout(), scaling, sliding_window, sinks), len(tokens[0]))


def _attend_in_runs(
    tokens: Sequence[torch.Tensor], batch: Pack, scaling: float | None, sliding_window: int | None, kernel: Kernel
) -> torch.Tensor:
    """The same by a kernel that accepts sequences of any lengths. Rows without a token are zero."""
    number, runs = batch.num_rows, runs_of(batch.segments, batch.tokens.device)
    listed = [x[:number] if batch.order is None else x.index_select(0, batch.order) for x in tokens]
    return _at_rows(batch, attend_in_runs(listed, runs, scaling, sliding_window, kernel), len(tokens[0]))


def _at_rows(batch: Pack, output: torch.Tensor, count: int) -> torch.Tensor:
    """(T, ...) values of the tokens -> (count, ...) values of the rows; rows without a token are zero."""
    whole = output.new_zeros(count, *output.shape[1:])  # zeros: further layers compute padding rows, too
    if batch.order is None:
        return torch.cat([output, whole[len(output) :]])
    return whole.index_copy(0, batch.order, output)


class Backbone:
    """A decoder as a function from packs to hidden states: packed if the model supports it, else padded."""

    def __init__(self, module: PreTrainedModel, sequence: SequenceGroup | None = None) -> None:
        """Call `settle` before the first pass. Raises ConfigError if the ranks of `sequence` cannot run `module`
        together."""
        self.vision = vision_of(module)
        self.module = module if self.vision is None else self.vision.decoder
        self.recurrent = follow_sequences(self.module)
        """Whether it has layers with a recurrent state."""
        self.packs = _declares_packing(self.module, self.recurrent)
        self.sequence = sequence if sequence is not None and sequence.size > 1 else None
        if self.sequence is not None:
            self._check_sequence(self.sequence.size)

    def settle(self, tolerance: float) -> None:
        """Enables packing if packed and padded passes agree within `tolerance` of the largest number, or within what
        rounding explains; else logs a warning and pads. Raises ConfigError if the ranks of `sequence` cannot run the
        model together."""
        reason = self._probe(tolerance) if self.packs else "packed attention does not support its attention"
        self.packs = not reason
        if reason:
            _log.warning("%s runs with padding, which takes more time: %s", type(self.module).__name__, reason)
        if self.sequence is not None:
            self._check_sequence(self.sequence.size)

    def __call__(self, batch: Pack) -> torch.Tensor:
        """(T, width): the last hidden state of every token, computed by this process alone."""
        return self._packed(batch) if self.packs else self._padded(batch)

    def states(self, batch: Pack, rows: torch.Tensor) -> LocalStates:
        """The last hidden states of those of the tokens `rows` (N,) that this rank holds.

        Every rank of the sequence group calls it with the same pack and rows. `LocalStates.gather` collects values
        that are computed from the states.
        """
        if self.sequence is None:
            return LocalStates(self(batch).index_select(0, rows), slice(None))
        slices = Slices(batch.num_rows, self.sequence.rank, self.sequence.size, ROWS)
        places = slices.place(torch.arange(batch.num_rows, device=rows.device))
        routing = None if batch.routing is None else slices.mine(batch.routing)
        spread = replace(batch, order=places, routing=routing)
        mine = slices.mine(batch.tokens[: batch.num_rows]), slices.mine(batch.positions)
        hidden = self._run(*mine, spread, self.sequence, slices)
        return local_states(hidden, rows, slices, self.sequence)

    def _packed(self, batch: Pack) -> torch.Tensor:
        # oneDNN compiles a kernel for each number of rows (`models.cpu.linear.ROWS`). The padding is not read.
        number, fill = batch.num_rows, (0, padding(batch.num_rows))
        filled = batch if batch.routing is None else replace(batch, routing=pad(batch.routing, fill))
        return self._run(pad(batch.tokens[:number], fill), pad(batch.positions, fill), filled)[:number]

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: Pack,
        sequence: SequenceGroup | None = None,
        slices: Slices | None = None,
    ) -> torch.Tensor:
        output = self.module(
            **self._inputs(tokens[None], batch.images, slices),
            # transformers wants (1, T), with M-RoPE (4, 1, T).
            position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
            use_cache=False,
            trivium_pack=batch,
            trivium_sequence=sequence,
        )
        return output.last_hidden_state[0]

    def _inputs(
        self, tokens: torch.Tensor, images: PlacedImages | None, slices: Slices | None = None
    ) -> dict[str, Any]:
        """The inputs of the decoder: token ids, or embeddings if there are images."""
        if images is None:
            return {"input_ids": tokens}
        if self.vision is None:
            raise refuse_images(self.module)
        features, places = self.vision.features(images), images.places
        if slices is not None and len(places):
            first = slices.rank * slices.tokens
            here = (first <= places) & (places < first + slices.tokens)
            features, places = tuple(feature[here] for feature in features), places[here] - first
        return self.vision.decoder_inputs(tokens, features, places)

    def _padded(self, batch: Pack) -> torch.Tensor:
        if batch.routing is not None:
            raise ConfigError(
                f"train.router_replay with {type(self.module).__name__}",
                "packed attention does not support its attention, and only packed sequences carry the experts of "
                "tokens",
                "set it to off for this model",
            )
        grid = batch.tokens.new_zeros(batch.shape)
        mask = torch.zeros_like(grid)
        grid.view(-1)[batch.cells], mask.view(-1)[batch.cells] = batch.tokens, 1
        images = batch.images and replace(batch.images, places=batch.cells[batch.images.places])
        further: dict[str, Any] = {}
        if batch.positions.dim() == 2:
            positions = grid.new_zeros(len(batch.positions), grid.numel())
            positions[:, batch.cells] = batch.positions
            further = {"position_ids": positions.unflatten(1, batch.shape)}
        output = self.module(**self._inputs(grid, images), **further, attention_mask=mask, use_cache=False)
        return output.last_hidden_state.flatten(0, 1).index_select(0, batch.cells)

    def _check_sequence(self, size: int) -> None:
        name = type(self.module).__name__
        if self.recurrent:
            raise ConfigError(
                f"train.sequence_parallel {size} for {name}",
                "a recurrent state passes through all tokens of a sequence, so ranks cannot share one",
                "leave it at 1 for this model",
            )
        if any(parameter.rpartition(".")[2] == "sinks" for parameter, _ in self.module.named_parameters()):
            raise ConfigError(
                f"train.sequence_parallel {size} for {name}",
                "its heads have attention sinks, which ranks cannot share",
                "leave it at 1 for this model",
            )
        if not self.packs:
            raise ConfigError(
                f"train.sequence_parallel {size} for {name}",
                "packed attention does not support its attention, so ranks cannot share a sequence",
                "leave it at 1 for this model, or train one that supports packing (Llama, Qwen, Mistral, GPT-2, ...)",
            )
        check_heads(name, self.module.config.get_text_config().num_attention_heads, size)

    @torch.no_grad()
    def _probe(self, tolerance: float) -> str:
        """Compares a packed with a padded pass. Returns why they differ (the model may ignore positions or the
        interface), or an empty string."""
        from transformers import AttentionInterface

        batch = probe_pack(self.module)
        expected = self._padded(batch)  # first: packed attention refuses a padded pass
        before = str(self.module.config._attn_implementation)
        AttentionInterface.register(PACKED, packed_attention)
        set_attention(self.module, PACKED)
        try:
            packed = self._packed(batch)
            difference = (packed - expected).abs().max()
            agrees = bool(difference <= tolerance * expected.abs().max())
            if agrees or explained_by_rounding(self.module, lambda: self._packed(batch), expected, packed):
                return ""
            reason = f"packed, its hidden states differ by {float(difference):.2g}, more than rounding explains"
        except CannotPack as error:
            reason = str(error)
        set_attention(self.module, before)
        return reason


def probe_pack(module: PreTrainedModel) -> Pack:
    """Two short sequences of valid tokens, to test a model with."""
    vocabulary = cast(nn.Embedding, module.get_input_embeddings()).num_embeddings
    tokens = np.arange(3, 14, dtype=np.int32) % vocabulary
    longest = max_positions(module)
    # Of unequal lengths, so that the padded pass that it is compared with has padding.
    return pack([tokens[:4][:longest], tokens[4:][:longest]], module.device)


def _declares_packing(module: PreTrainedModel, recurrent: bool) -> bool:
    """Checks what a short probe cannot: how attention is called, and rules that apply to long sequences only."""
    config = module.config.get_text_config()
    return (
        (recurrent or type(module)._supports_attention_backend)
        and (recurrent or "position_ids" in inspect.signature(module.forward).parameters)
        and not unknown_layers(module, recurrent)
        and getattr(config, "attention_chunk_size", None) is None
    )
