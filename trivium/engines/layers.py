"""The layers of a decoder without their modules: stacked query, key and value products, activations and residual sums
inside the matrix products, and no Python that a step does not need.

For the families in `_FAMILIES`, on the CPU. The engine compares it with the model itself before it serves
(`trivium.engines.selfcheck`). The weights stay the model's: what is loaded into it is what is computed with.

Legend: N tokens (B sequences of L), C width, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trivium.engines.attention import attend
from trivium.engines.invariance import product

_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Models whose layers are these: norm, attention, sum; norm, gated SiLU network, sum."""


class Cache(Protocol):
    """Where keys and values are kept."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Norm:
    """x / sqrt(mean(x^2) + epsilon) * scale."""

    scale: Tensor
    epsilon: Tensor

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module.weight.data, torch.tensor(float(module.variance_epsilon)))

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.addcmul(self.epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(wide, inverse).to(x.dtype).mul_(self.scale)


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: _Norm
    before_mlp: _Norm
    query_norm: _Norm | None
    key_norm: _Norm | None
    qkv: Tensor
    """[(H + 2 K) D, C]; the parameters of the three modules are parts of it."""
    qkv_bias: Tensor | None
    attention: nn.Module
    window: int | None
    output: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear


class Layers:
    """From embeddings to the states that the output layer reads."""

    def __init__(self, model: Any, *, fast: bool) -> None:
        """Of a model that `supports` accepts. `fast` as in `attend`."""
        config, body = model.config, model.model
        self._fast, self._rotary, self._last = fast, body.rotary_emb, _Norm.of(body.norm)
        self._layers = [_layer(each, config) for each in body.layers]
        attention = body.layers[0].self_attn
        self._size = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._key_heads = len(attention.k_proj.weight) // self._size
        self._heads = len(attention.q_proj.weight) // self._size

    def __call__(self, x: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """[B, L, C] embeddings at `positions` [B or 1, L]; states [B, L, C] after the last norm. `mask` as in
        `attend`."""
        batch, length, width = x.shape
        cos, sin = self._rotary(x, positions)
        half = self._size // 2
        turn = cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]
        x = x.reshape(-1, width)
        for index, layer in enumerate(self._layers):
            normed = layer.before_attention(x).view(batch, length, width)
            query, key, value = self._project(layer, normed, turn)
            key, value = cache.update(key, value, index)
            out, _ = attend(layer.attention, query, key, value, mask, self._scale, layer.window, fast=self._fast)
            x = _plus(out.view(len(x), -1), layer.output, x)
            normed = layer.before_mlp(x)
            gate = torch.ops.mkldnn._linear_pointwise(normed, layer.gate.weight, layer.gate.bias, "swish", [], "")
            up = torch.ops.mkldnn._linear_pointwise.binary(normed, gate, layer.up.weight, layer.up.bias, "mul")
            x = _plus(up, layer.down, x)
        return self._last(x).view(batch, length, width)

    def _project(self, layer: _Layer, x: Tensor, turn: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Queries [B, H, L, D], keys and values [B, K, L, D]; the first two normalised and rotated."""
        batch, length, _ = x.shape
        heads = product(x, layer.qkv, layer.qkv_bias).view(batch, length, -1, self._size)
        parts = list(heads.split([self._heads, self._key_heads, self._key_heads], dim=2))
        for i, norm in enumerate((layer.query_norm, layer.key_norm)):
            part = parts[i] if norm is None else norm(parts[i])
            parts[i] = part.roll(self._size // 2, -1).mul_(turn[1]).addcmul_(part, turn[0])
        return [part.transpose(1, 2) for part in parts]


def supports(model: Any) -> bool:
    """Whether these layers are the model's."""
    name = type(model).__name__
    if name not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return False
    config, weight = model.config, model.model.embed_tokens.weight
    attention = model.model.layers[0].self_attn
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and config.hidden_act == "silu"
        and 2 * len(model.model.rotary_emb.inv_freq) == attention.head_dim
    )


def _layer(module: Any, config: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    weight, bias = _stacked([attention.q_proj, attention.k_proj, attention.v_proj])
    query_norm, key_norm = (
        _Norm.of(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
    return _Layer(
        before_attention=_Norm.of(module.input_layernorm),
        before_mlp=_Norm.of(module.post_attention_layernorm),
        query_norm=query_norm,
        key_norm=key_norm,
        qkv=weight,
        qkv_bias=bias,
        attention=attention,
        window=getattr(attention, "sliding_window", getattr(config, "sliding_window", None)),
        output=attention.o_proj,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
    )


def _stacked(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The modules' weights and biases one below the other; the modules' own become parts of them."""
    weight = torch.cat([module.weight.data for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
    start = 0
    for module in modules:
        end = start + len(module.weight)
        module.weight.data = weight[start:end]
        if bias is not None:
            module.bias.data = bias[start:end]
        start = end
    return weight, bias


def _plus(x: Tensor, module: nn.Linear, residual: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, module.weight, module.bias, "add")
