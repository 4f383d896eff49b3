"""Optimized decoder layers for the CPU: query, key and value projections are stacked, activations and residual sums are
fused into the matrix products, and a step runs little Python.

They support the families in `_FAMILIES`. The engine compares them with the model's own forward pass before it serves
(`trivium.engines.torch.selfcheck`). They share the weights of the model, and store those in float32 in another order. A
model of up to `PACKED_BYTES`, or else an output layer of up to this size, has a second copy in oneDNN's layout
(`trivium.models.cpu.linear.reordered`), which `refresh` makes again after a load.

Legend: N tokens (B sequences of L), C width, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trivium.engines.torch.attention import attend, attend_last
from trivium.engines.torch.kv_cache import PromptCache, StepRows
from trivium.models.cpu.fused import rotated, signed_sines
from trivium.models.cpu.invariance import invariant_linear
from trivium.models.cpu.linear import multiplies, onednn_combined, onednn_linear, reordered
from trivium.models.cpu.worker_threads import size_of
from trivium.planning.choices import PACKED_BYTES

_SMALLEST_TABLE = 1024
"""Smallest number of positions in the tables of cosines and sines."""
_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Models with these layers: norm, attention, residual; norm, gated SiLU MLP, residual."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """x / sqrt(mean(x^2) + epsilon) * scale."""

    scale: Tensor
    epsilon: Tensor

    @classmethod
    def of(cls, module: Any) -> _Norm:
        # A tensor, because `addcmul` takes no number.
        return cls(module.weight.data, torch.tensor(float(module.variance_epsilon)))

    def __call__(self, x: Tensor) -> Tensor:
        return self.normalised(x).mul_(self.scale)

    def normalised(self, x: Tensor) -> Tensor:
        """The norm without the scale."""
        # Not `models.cpu.fused.rms_norm`. On the few rows of a decode step an operation takes as long as its call: 8
        # rows of width 576 take 5 us with these, 11 us with that function and its gradient. In bfloat16 the scale
        # multiplies what is already rounded, as in transformers; training has norms in float32 only. In float32 the
        # two round differently, in the last bit of 5 % (width 256) to 28 % (width 896) of the rows.
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(wide, inverse).to(x.dtype)


@dataclass(slots=True)
class _Linear:
    weight: Tensor
    """[out, in]"""
    bias: Tensor | None
    operand: Tensor
    """The operand of the products: the weight, or a copy in oneDNN's packed layout."""

    @classmethod
    def of(cls, module: nn.Linear) -> _Linear:
        weight = module.weight.data
        return cls(weight, None if module.bias is None else module.bias.data, weight)

    @classmethod
    def stacked(cls, *modules: nn.Linear) -> _Linear:
        """Stacks the weights along the output dimension; the modules' parameters become views of the stack, so that a
        load of new weights changes both."""
        weight = torch.cat([module.weight.data for module in modules])
        if weight.dtype == torch.float32:
            # In the order (in, out) oneDNN reads a weight in 0.6 (8 rows) to 0.8 (128 rows) of the time, with the same
            # bits (1.2 to 1.8 of the time in bfloat16; an output layer with AVX2 1.5 of the time).
            weight = weight.T.contiguous().T
        bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
        start = 0
        for module in modules:
            end = start + len(module.weight)
            module.weight.data = weight[start:end]
            if bias is not None:
                module.bias.data = bias[start:end]
            start = end
        return cls(weight, bias, weight)

    def refresh(self, *, packed: bool) -> None:
        """Call this after a change of the weight."""
        self.operand = reordered(self.weight) if packed else self.weight

    def __call__(self, x: Tensor) -> Tensor:
        return invariant_linear(x, self.operand, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        return onednn_linear(x, self.operand, self.bias, "swish")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return onednn_combined(x, self.operand, self.bias, "mul", other)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return onednn_combined(x, self.operand, self.bias, "add", other)


@dataclass(slots=True)
class _Layer:
    before_attention: _Norm
    before_mlp: _Norm
    query_norm: _Norm | None
    key_norm: _Norm | None
    qkv: _Linear
    """Projects to (H + 2 K) D."""
    attention: nn.Module
    window: int | None
    output: _Linear
    gate: _Linear
    up: _Linear
    down: _Linear
    scales: Tensor | None = None
    """[H + K, D]: scales of the normalised queries and keys."""

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: its outputs from its inputs x [N, C] and the attention [N, H D]."""
        x = self.output.plus(attended, x)
        normed = self.before_mlp(x)
        return self.down.plus(self.up.times(normed, self.gate.silu(normed)), x)

    @property
    def products(self) -> tuple[_Linear, ...]:
        return self.qkv, self.output, self.gate, self.up, self.down


class Layers:
    """From embeddings to logits."""

    def __init__(self, model: Any, *, fast: bool) -> None:
        """`model` is one that `supports` accepts. `fast` as in `attend`."""
        config, body = model.config, model.model
        self._fast, self._rotary, self._last = fast, body.rotary_emb, _Norm.of(body.norm)
        self._layers = self._every = [_layer(layer, config) for layer in body.layers]
        attention = body.layers[0].self_attn
        self._size = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._key_heads = len(attention.k_proj.weight) // self._size
        self._heads = len(attention.q_proj.weight) // self._size
        head = model.get_output_embeddings()
        self._head = _Linear.of(head)
        self._packed, self._head_packed = (size_of(part) <= PACKED_BYTES for part in (model, head))
        self._turns = self._turns_of(torch.arange(1))
        self._fixed = not changing_rotation(model)
        self.refresh()

    def refresh(self, *, head: bool = True) -> None:
        """Call this after a change of the model's weights. `head`: the output layer may have changed."""
        for layer in self._layers:
            for linear in layer.products:
                linear.refresh(packed=self._packed)
            if layer.query_norm is not None and layer.key_norm is not None:
                counts = (layer.query_norm, self._heads), (layer.key_norm, self._key_heads)
                layer.scales = torch.cat([norm.scale.expand(count, -1) for norm, count in counts])
        if head:
            self._head.refresh(packed=self._head_packed)

    def use(self, number: int) -> None:
        """Computes the first `number` layers from now on."""
        self._layers = self._every[:number]

    @property
    def supports_step(self) -> bool:
        """Whether `step` may be called. Its products in bfloat16 would round the scores, which torch's attention does
        not, and rows that are not aligned to a vector have other bits."""
        return self._fixed and self._head.weight.dtype == torch.float32 and self._size % 16 == 0

    def prepare(self, length: int) -> None:
        """Computes the rotary tables for positions below `length`. Not thread-safe."""
        if self._fixed and length > len(self._turns[0]):
            self._turns = self._turns_of(torch.arange(max(_SMALLEST_TABLE, 1 << (length - 1).bit_length())))

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: PromptCache | StepRows,
        last: Tensor | None = None,
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        """[B, L, C] embeddings of at least two tokens -> float32 logits [B, V] after the tokens `last` [B] of each
        sequence (default: the last ones). `prepare` was called for `positions` [B or 1, L]. `mask` as in `attend`.
        Appends the inputs of the output layer [B, L, C] to `hidden`."""
        batch, length, width = x.shape
        cos, sin = (table[positions] for table in self._turns) if self._fixed else self._turns_of(positions)
        x = x.reshape(-1, width)
        for index, layer in enumerate(self._layers):
            normed = layer.before_attention(x)
            query, key, value = self._project(layer, normed.view(batch, length, width), cos, sin)
            key, value = cache.update(key, value, index)
            out, _ = attend(layer.attention, query, key, value, mask, self._scale, layer.window, fast=self._fast)
            x = layer.after(x, out.view(len(x), -1))
        if hidden is not None:
            hidden.append(self._last(x).view(batch, length, width))
        if length > 1:
            x = x.view(batch, length, width)
            x = x[:, -1] if last is None else x[torch.arange(batch), last]
        alone = x.expand(2, -1) if batch == 1 else x  # a reduction over a single row uses other code
        return self._head(self._last(alone.contiguous()))[:batch].float()

    def step(self, x: Tensor, positions: Tensor, rows: StepRows) -> Tensor:
        """One token of each of at least two rows: [R, C] embeddings at rotary positions [R] -> float32 logits [R, V].
        `supports_step` is true, and `prepare` was called. Gives the bits of `__call__`."""
        number, turned = len(x), self._heads + self._key_heads
        cos, sin = (table[positions] for table in self._turns)
        bags = rows.bags(self._heads)
        for index, layer in enumerate(self._layers):
            parts = layer.qkv(layer.before_attention(x)).view(number, -1, self._size)
            both = parts[:, :turned]
            if layer.query_norm is not None and layer.scales is not None:
                both = layer.query_norm.normalised(both).mul_(layer.scales)
            both = rotated(both, cos, sin)
            keys, table = rows.append(both[:, self._heads :], parts[:, turned:], index)
            query = both[:, : self._heads]
            out = attend_last(query, keys, table, rows.mask(layer.window), bags, self._scale)
            x = layer.after(x, out.view(number, -1))
        return self._head(self._last(x))

    def _turns_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the rotary embedding, [..., 1, D], for positions [...]."""
        where = positions if positions.ndim == 2 else positions[None]
        cos, sin = self._rotary(self._last.scale, where)
        cos, sin = (turn.view(*positions.shape, 1, self._size) for turn in (cos, signed_sines(sin)))
        return cos, sin

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Queries [B, H, L, D], keys and values [B, K, L, D]. Queries and keys are normalised and rotated."""
        batch, length, _ = x.shape
        parts = layer.qkv(x).view(batch, length, -1, self._size)
        turned, value = parts.split([self._heads + self._key_heads, self._key_heads], dim=2)
        if layer.query_norm is not None and layer.scales is not None:
            turned = layer.query_norm.normalised(turned).mul_(layer.scales)
        turned = rotated(turned, cos, sin)
        query, key = turned.split([self._heads, self._key_heads], dim=2)
        return [part.transpose(1, 2) for part in (query, key, value)]


def changing_rotation(model: Any) -> bool:
    """Whether the rotary embedding depends on the longest sequence of the batch."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    return bool(kinds & {"dynamic", "longrope"})


def supports(model: Any) -> bool:
    """Whether the model has these layers."""
    name = type(model).__name__
    if name not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return False
    config, weight = model.config, model.model.embed_tokens.weight
    attention = model.model.layers[0].self_attn
    return (
        weight.device.type == "cpu"
        and multiplies(weight.dtype)
        and config.hidden_act == "silu"
        and 2 * len(model.model.rotary_emb.inv_freq) == attention.head_dim
    )


def _layer(module: Any, config: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    query_norm, key_norm = (
        _Norm.of(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
    return _Layer(
        before_attention=_Norm.of(module.input_layernorm),
        before_mlp=_Norm.of(module.post_attention_layernorm),
        query_norm=query_norm,
        key_norm=key_norm,
        qkv=_Linear.stacked(attention.q_proj, attention.k_proj, attention.v_proj),
        attention=attention,
        window=getattr(attention, "sliding_window", getattr(config, "sliding_window", None)),
        output=_Linear.stacked(attention.o_proj),
        gate=_Linear.stacked(mlp.gate_proj),
        up=_Linear.stacked(mlp.up_proj),
        down=_Linear.stacked(mlp.down_proj),
    )
