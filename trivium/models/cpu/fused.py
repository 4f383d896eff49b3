"""RMS norms, gated activations, rotary embeddings and adapters with gradients of their own, for models on the CPU.

Each makes a few passes over memory, forward and backward, and saves its inputs and at most two inner products. Autograd
makes several times as many passes. Linear layers that are more than their weight (a bias, hooks) are called as modules.

A layer is replaced if it has the structure, and if a copy with random weights gives the same outputs for random inputs.
The weights of the model are not used: they may be one rank's part, or not loaded yet, and every process must decide in
the same way.

Legend: T tokens, N width of a norm, H heads, D head size, M and N widths of a linear layer, R rank of its adapter.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from trivium.models.cpu.linear import AutogradContext, has_hooks, is_only_its_weight, product, weight_gradient
from trivium.models.function_copies import calling, functions_called

_ROTARY = "apply_rotary_pos_emb"
"""The function in transformers' modules that rotates queries and keys."""
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_EPSILON = ("variance_epsilon", "eps")

_TOLERANCE = 1e-5
"""The largest difference of outputs for random inputs, as a part of the largest output."""

Arithmetic = Callable[..., torch.Tensor]
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fuse(module: nn.Module, device: torch.device) -> None:
    """Replaces the arithmetic of known layers on the CPU, in place. Norms in float64 are kept, because transformers
    rounds them to float32. Under autocast, norms and rotations are computed in float32."""
    if device.type != "cpu":
        return
    for layer in module.modules():
        weight = next(layer.parameters(), None)
        if weight is None or "forward" in vars(layer):
            continue
        if (fused := _fused(layer, weight.dtype)) is not None:
            layer.forward = fused


def _fused(layer: nn.Module, dtype: torch.dtype) -> Callable[..., Any] | None:
    if type(layer).__name__.endswith("RMSNorm"):
        return _fused_norm(layer) if dtype == torch.float32 else None
    if {name for name, _ in layer.named_children()} == _MLP:
        return _fused_mlp(layer)
    rotating = _fused_rotary(type(layer))
    return None if rotating is None else partial(rotating, layer)


# --------------------------------------------------------------------------- norms


def rms_norm(x: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x (..., N) / sqrt(mean(x^2) + epsilon) * scale (N,), in the type of both."""
    return cast(torch.Tensor, _RMSNorm.apply(x, scale, epsilon))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: torch.Tensor, scale: torch.Tensor, epsilon: float) -> torch.Tensor:
        # The engine has fewer operations, which round differently (`engines.torch.layers._Norm`).
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        return (x * inverse).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: AutogradContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, scale, inverse = ctx.saved_tensors
        rows, inverse = x.flatten(0, -2), inverse.flatten(0, -2)
        grad = grad_outputs[0].reshape(rows.shape)
        product = grad * rows
        grad_scale = product.T.mv(inverse.squeeze(1)) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_scale, None
        towards = product.mv(scale).div_(-rows.shape[1])[:, None] * inverse.square()
        grad_x = torch.mul(rows, towards, out=product).addcmul_(grad, scale).mul_(inverse)
        return grad_x.view(x.shape), grad_scale, None


def _fused_norm(layer: nn.Module) -> Arithmetic | None:
    """A norm with the factor `weight` or, as in Gemma, `1 + weight`."""
    epsilon = next((getattr(layer, name) for name in _EPSILON if hasattr(layer, name)), None)
    if [*dict(layer.named_parameters())] != ["weight"] or epsilon is None:
        return None
    if len(inspect.signature(layer.forward).parameters) != 1:  # a gate, for example, which the fused norm lacks
        return None
    width = len(cast(torch.Tensor, layer.weight))
    trial = _like(layer, {"weight": nn.Parameter(_random(width, seed=1))}, {})
    inputs = torch.cat([_random(2, width), 1e-3 * _random(2, width)])  # epsilon matters for small inputs
    for added in (0, 1):
        if _agree(partial(_norm_forward, trial, float(epsilon), added), trial.forward, inputs):
            return partial(_norm_forward, layer, float(epsilon), added)
    return None


def _norm_forward(layer: Any, epsilon: float, added: int, x: torch.Tensor) -> torch.Tensor:
    scale = layer.weight + 1 if added else layer.weight
    return rms_norm(x.to(scale.dtype), scale, epsilon)


# --------------------------------------------------------------------------- gated activations


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return cast(torch.Tensor, _SiluProduct.apply(gate, up))


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: AutogradContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad = grad_outputs[0]
        activation = silu(gate)
        grad_up = grad * activation
        return torch.ops.aten.silu_backward(torch.mul(grad, up, out=activation), gate), grad_up


class _GatedMLP(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) for weights (M, N), (M, N) and (N, M)."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        # An engine's layers apply SiLU and the factor inside the products. The backward pass needs what goes into them.
        rows = x.flatten(0, -2)
        gated, upper = product(rows, gate), product(rows, up)
        ctx.save_for_backward(rows, gate, up, down, gated, upper)
        return product(silu(gated).mul_(upper), down).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: AutogradContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        rows, gate, up, down, gated, upper = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        grad = grad_outputs[0].reshape(rows.shape)
        activation, grad_inner = silu(gated), product(grad, down.T)
        grad_down = weight_gradient(grad, activation * upper) if wants_down else None
        grad_upper = torch.mul(grad_inner, activation, out=activation)
        grad_gated = torch.ops.aten.silu_backward(grad_inner.mul_(upper), gated)
        grad_x = product(grad_upper, up.T, product(grad_gated, gate.T)) if wants_x else None
        return (
            None if grad_x is None else grad_x.view(grad_outputs[0].shape),
            weight_gradient(grad_gated, rows) if wants_gate else None,
            weight_gradient(grad_upper, rows) if wants_up else None,
            grad_down,
        )


def _fused_mlp(layer: nn.Module) -> Arithmetic | None:
    width = getattr(layer.gate_proj, "in_features", None)
    if width is None or len(inspect.signature(layer.forward).parameters) != 1:
        return None
    dtype = next(layer.parameters()).dtype
    shapes = {"gate_proj": (8, width), "up_proj": (8, width), "down_proj": (width, 8)}
    linear = {name: _random_linear(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items(), 1)}
    trial = _like(layer, {}, {**layer._modules, **linear})
    agrees = _agree(partial(_mlp_forward, trial), trial.forward, _random(4, width).to(dtype))
    return partial(_mlp_forward, layer) if agrees else None


def _mlp_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    linear = (layer.gate_proj, layer.up_proj, layer.down_proj)
    if all(map(is_only_its_weight, linear)):
        return cast(torch.Tensor, _GatedMLP.apply(x, *(projection.weight for projection in linear)))
    gate, up = layer.gate_proj(x), layer.up_proj(x)
    adapter = _plain_adapter(layer.down_proj, up)
    return layer.down_proj(silu_product(gate, up)) if adapter is None else _AdaptedLinear.apply(up, *adapter, gate)


# --------------------------------------------------------------------------- adapters


def fuse_adapters(module: nn.Module, device: torch.device) -> None:
    """Replaces the arithmetic of linear layers with an adapter (peft's, of one A and one B) on the CPU, in place. A
    base with a bias or in another type than its adapter, and adapters that are switched off, are left to peft."""
    if device.type != "cpu":
        return
    for layer in module.modules():
        if hasattr(layer, "lora_A") and "forward" not in vars(layer):
            layer.forward = partial(_adapted_forward, layer, layer.forward)


def _adapted_forward(layer: Any, original: Arithmetic, x: torch.Tensor) -> torch.Tensor:
    adapter = _plain_adapter(layer, x)
    return original(x) if adapter is None else cast(torch.Tensor, _AdaptedLinear.apply(x, *adapter, None))


def _plain_adapter(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float] | None:
    """W, A, B and the scale of a linear layer with an adapter; None if it is not `fuse_adapters`' to compute."""
    if not hasattr(layer, "lora_A") or x.device.type != "cpu" or layer.disable_adapters or has_hooks(layer):
        return None
    base, (down,), (up,) = layer.base_layer, layer.lora_A.values(), layer.lora_B.values()
    plain = all(map(is_only_its_weight, (base, down, up))) and not base.weight.requires_grad
    if not plain or not x.dtype == base.weight.dtype == down.weight.dtype:
        return None
    (scale,) = layer.scaling.values()
    return base.weight, down.weight, up.weight, scale


class _AdaptedContext(AutogradContext, Protocol):
    scale: float
    saved_tensors: tuple[Any, ...]
    """The last one, the gate, may be None."""


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + scale * x A^T B^T for a frozen W (M, N), A (R, N) and B (M, R); with a gate (..., N), of silu(gate) * x.

    The second term is added in place. As an operation of its own, it makes two more (T, M) tensors, forward and
    backward; with 2,048 tokens and M = 1,536, that takes 12 ms, and the product with W 52 ms. The product with the gate
    is computed again in the backward pass: kept, it is 15 % of what a layer of SmolLM2 keeps.
    """

    @staticmethod
    def forward(
        ctx: _AdaptedContext,
        x: torch.Tensor,
        weight: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        inputs = rows if gate is None else silu(gate.flatten(0, -2)).mul_(rows)
        inner = product(inputs, down)
        ctx.save_for_backward(rows, weight, down, up, inner, gate)
        ctx.scale = scale
        return product(inputs, weight).addmm_(inner, up.T, alpha=scale).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: _AdaptedContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        rows, weight, down, up, inner, gate = ctx.saved_tensors
        shape = grad_outputs[0].shape[:-1]
        grad = grad_outputs[0].reshape(-1, len(up))
        grad_inner = product(grad, up.T).mul_(ctx.scale)
        gated = None if gate is None else gate.flatten(0, -2)
        activation = None if gated is None else silu(gated)
        inputs = rows if activation is None else activation * rows
        grad_down, grad_up = grad_inner.T @ inputs, (grad.T @ inner).mul_(ctx.scale)
        grad_x = grad_gate = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[5]:
            grad_x = product(grad, weight.T).addmm_(grad_inner, down)
            if activation is not None:
                towards_gate = torch.mul(grad_x, rows, out=inputs)
                grad_gate = torch.ops.aten.silu_backward(towards_gate, gated).view(*shape, -1)
                grad_x.mul_(activation)
            grad_x = grad_x.view(*shape, -1)
        return grad_x, None, grad_down, grad_up, None, grad_gate


# --------------------------------------------------------------------------- rotary embeddings


class _Rotary(torch.autograd.Function):
    """x * cos + (-x2, x1) * sin, where x1 and x2 are the halves of x."""

    @staticmethod
    def forward(
        ctx: AutogradContext, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        signed = signed_sines(sin)
        ctx.save_for_backward(cos, signed)
        return rotated(q, cos, signed), rotated(k, cos, signed)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: AutogradContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        cos, signed = ctx.saved_tensors
        # The gradient of roll(x) * signed is roll(grad * signed), which is roll(grad) * roll(signed).
        turned = signed.roll(signed.shape[-1] // 2, -1)
        return *(rotated(grad, cos, turned) for grad in grad_outputs), None, None


def signed_sines(sin: torch.Tensor) -> torch.Tensor:
    """(..., D) sines, the first half with the opposite sign."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    """x * cos + (-x2, x1) * sin, from `signed_sines` and without gradient, where x1 and x2 are the halves of x."""
    return x.roll(x.shape[-1] // 2, -1).mul_(signed).addcmul_(x, cos)


def _rotate(
    original: Rotation, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (..., D), k (..., D); cos and sin (B, T, D), to which a dimension for the heads is added."""
    # Models that rotate a part of each head have shorter angles; the gradient of angles is not computed here.
    if {q.shape[-1], k.shape[-1]} != {cos.shape[-1]} or cos.requires_grad:
        return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    q, k = q.to(cos.dtype), k.to(cos.dtype)
    return cast(Any, _Rotary.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)))


@cache
def _fused_rotary(kind: type[nn.Module]) -> FunctionType | None:
    """A copy of an attention layer's forward function that calls the fused rotation; None if it calls another one."""
    forward = kind.forward
    if not isinstance(forward, FunctionType):
        return None
    original = functions_called(forward, [_ROTARY]).get(_ROTARY)
    if original is None or [*inspect.signature(original).parameters] != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return None
    fused = partial(_rotate, original)
    q, k, cos, sin = _random(1, 4, 5, 8), _random(1, 2, 5, 8, seed=1), *_random(2, 1, 5, 8, seed=2)
    if not all(_agree(partial(_part, fused, i), partial(_part, original, i), q, k, cos, sin) for i in range(2)):
        return None
    return calling(forward, {_ROTARY: fused})


# --------------------------------------------------------------------------- inside


def _part(rotation: Rotation, index: int, *inputs: torch.Tensor) -> torch.Tensor:
    return rotation(*inputs)[index]


def _like(layer: nn.Module, parameters: dict[str, nn.Parameter], modules: dict[str, nn.Module | None]) -> nn.Module:
    """A copy of a layer with other parameters and inner modules."""
    trial = copy.copy(layer)
    trial._parameters, trial._modules = dict[str, nn.Parameter | None](parameters), modules
    return trial


def _random_linear(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> nn.Linear:
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(_random(*shape, seed=seed).to(dtype))
    return layer


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _agree(fused: Arithmetic, original: Arithmetic, *inputs: torch.Tensor) -> bool:
    try:
        expected = original(*inputs)
    except RuntimeError:  # it takes inputs of other shapes: GPT-OSS rotates by half as many angles
        return False
    actual = fused(*inputs)
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= _TOLERANCE * expected.abs().max())
