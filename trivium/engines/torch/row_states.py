"""Key-value caches that also hold the recurrent states of layers, with the methods that transformers' layers call.

The state of a prompt is that after its last token, whatever padding follows. A row gets a copy, which each of its
tokens replaces: a token cannot be taken back.

Legend: B prompts of one padded length, R rows, C channels, K taps of a convolution, L tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trivium.engines.torch.kv_cache import PromptCache, RowCache, StepRows

_Key = tuple[int, str, int]
"""(layer, `inputs`, number): the last inputs of one of its convolutions, (B or R, C, K). (layer, `scan`, number): the
state of one of its scans."""


class StatefulPromptCache(PromptCache):
    """The cache and the states of prompts."""

    def __init__(self, length: int, ends: Tensor) -> None:
        """`ends` [B]: the place of the last token of each prompt."""
        super().__init__(length)
        self.states: dict[_Key, Tensor] = {}
        self.numbers: dict[int, int] = {}
        """The number of each layer with attention among those layers."""
        self.valid = ends[:, None]
        """[B, L] bool: the tokens of the chunk that are not padding."""
        self._ends = ends

    @property
    def count(self) -> int:
        return len(next(iter(self.states.values())))

    def begin(self, start: int, end: int) -> None:
        super().begin(start, end)
        self.valid = torch.arange(start, end, device=self._ends.device) <= self._ends[:, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return super().update(keys, values, self.numbers.setdefault(layer, len(self.numbers)))

    def update_conv_state(
        self, inputs: Tensor, layer: int, state_idx: int = 0, *, conv_kernel_size: int, **_: object
    ) -> Tensor:
        """Keeps the last K inputs of each prompt up to this chunk, [B, C, L]. Returns the K inputs before the chunk and
        those of the chunk."""
        earlier = self.states.get((layer, "inputs", state_idx))
        if earlier is None:
            earlier = inputs.new_zeros(*inputs.shape[:2], conv_kernel_size)
        whole = torch.cat([earlier, inputs], -1)
        # K inputs come before the chunk, so the last K valid ones begin at the number of its valid tokens.
        last = self.valid.sum(1)[:, None, None] + torch.arange(conv_kernel_size, device=inputs.device)
        self.states[layer, "inputs", state_idx] = whole.gather(-1, last.expand(-1, inputs.shape[1], -1))
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> None:
        self.states[layer_idx, "scan", state_idx] = state

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer, "inputs", state_idx))

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer, "scan", state_idx))

    def is_recording_past(self, layer: int) -> bool:
        return False

    def row(self, index: int) -> StatefulPromptCache:
        alone = StatefulPromptCache(self.length, self._ends[index : index + 1])
        alone.start, alone.layers, alone.numbers = self.start, super().row(index).layers, self.numbers
        alone.states = {key: state[index : index + 1].clone() for key, state in self.states.items()}
        return alone


class StatefulRowCache(RowCache):
    """The cache and the states of the rows that decode together."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[_Key, Tensor] = {}
        self._numbers: dict[int, int] = {}

    def place(self, prompts: PromptCache, sources: Sequence[int], rows: Sequence[int]) -> None:
        assert isinstance(prompts, StatefulPromptCache)
        if not self.states:
            self.states = {key: state[:0] for key, state in prompts.states.items()}
            self._numbers = prompts.numbers
        super().place(prompts, sources, rows)
        source, row = self._sent(sources), self._sent(rows)
        for key, state in prompts.states.items():
            self.states[key][row] = state[source]

    def move(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        super().move(sources, rows, length)
        source, row = self._sent(sources), self._sent(rows)
        for state in self.states.values():
            state[row] = state[source]

    def begin(self, positions: Tensor, width: int) -> StatefulStepRows:
        super().begin(positions, width)
        rows = slice(0, len(positions))
        step = StatefulStepRows(self.layers, self._slots, rows, positions, width)
        step.states, step.numbers = {key: state[rows] for key, state in self.states.items()}, self._numbers
        return step

    @property
    def _device(self) -> torch.device:
        return next(iter(self.states.values())).device

    def _resize(self, rows: int, length: int) -> None:
        super()._resize(rows, length)
        for key, state in self.states.items():
            more = state.new_zeros(max(0, rows - len(state)), *state.shape[1:])
            self.states[key] = torch.cat([state, more])


class StatefulStepRows(StepRows):
    """The rows in one decode step. Layers change the states in place."""

    states: dict[_Key, Tensor]
    """Views of the states of these rows."""
    numbers: dict[int, int]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return super().update(keys, values, self.numbers[layer])

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> None:
        self.states[layer_idx, "scan", state_idx].copy_(state)

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor:
        return self.states[layer, "inputs", state_idx]

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer, "scan", state_idx))

    def is_recording_past(self, layer: int) -> bool:
        return False
