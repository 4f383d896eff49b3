"""Matrix products of linear layers on CPUs, through oneDNN, for engines and for training.

torch sends float32 products to MKL, which on AMD processors reaches as little as half of the speed of oneDNN. In
training, `_applies` decides by type and device alone, so that every process of a run computes the same bits; the
gradient of a weight (`weight_gradient`) depends on its shape and on the processor, too.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Literal, Protocol, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from trivium.models.weights.filling import is_sharded

ROWS, FEW_ROWS = 128, 32
"""Products over tokens are padded to multiples of these: few tokens to the smaller one. oneDNN compiles and keeps a
kernel for every shape, so shapes that never repeat would cost time and, over a long run, gigabytes."""


def padding(rows: int) -> int:
    """How many rows are added to a product over `rows` tokens: eight completions of a short prompt have 150 tokens or
    so, which would be 256 in multiples of `ROWS`; an update with them takes 0.8 of the time."""
    return -rows % (FEW_ROWS if rows <= 4 * ROWS else ROWS)


def available() -> bool:
    """Whether torch has oneDNN on this machine."""
    return torch.backends.mkldnn.is_available()


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matrix products of this type on this CPU."""
    if dtype == torch.bfloat16:
        return available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return available() and dtype == torch.float32


def onednn_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["none", "swish"] = "none",
) -> torch.Tensor:
    """activation(x (..., K) @ weight (N, K).T + bias (N,)), without gradient. `swish` is SiLU."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, activation, [], "")


def onednn_combined(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    operation: Literal["add", "mul"],
    other: torch.Tensor,
) -> torch.Tensor:
    """x (..., K) @ weight (N, K).T + bias (N,), added to or multiplied by `other` (..., N), without gradient."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, operation)


def reordered(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight (N, K) in the layout that oneDNN computes with. Products with it have the same bits, and take
    two thirds of the time for few rows. It does not follow changes of the weight."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


# --------------------------------------------------------------------------- in training


def use_onednn(module: nn.Module, device: torch.device) -> None:
    """Routes every float32 `nn.Linear` of a module that runs on the CPU through oneDNN. The weights need not be loaded
    yet. Not for use under autocast."""
    for layer in module.modules():
        if type(layer) is nn.Linear and _applies(layer.weight.dtype, device):
            layer.forward = partial(_forward, layer)


def matmul_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (N, K) @ b (M, K).T, without gradient."""
    if not _applies(b.dtype, b.device) or not padding(len(a)):
        return product(a, b)
    return product(pad(a, (0, 0, 0, padding(len(a)))), b)[: len(a)]


def product(a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """a (N, K) @ b (M, K).T + added (N, M), without gradient. N should need no `padding`, or rarely change."""
    if not _applies(b.dtype, b.device):
        return a @ b.T if added is None else torch.addmm(added, a, b.T)
    if added is None:
        return onednn_linear(a, b)
    return onednn_combined(a, b, None, "add", added)


def weight_gradient(grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """grad (T, N).T @ rows (T, K): the gradient of a weight (N, K), without gradient."""
    enough = len(rows) >= _GRADIENT_ROWS and grad.shape[1] * rows.shape[1] >= _GRADIENT_SIZE
    if not (enough and _applies(rows.dtype, rows.device) and _outruns_mkl()):
        return grad.T @ rows
    like = rows.new_empty(1).expand(grad.shape[1], rows.shape[1])  # only its shape is read
    return torch.ops.aten.mkldnn_linear_backward_weights(grad.to_mkldnn(), rows.to_mkldnn(), like, False)[0]


_GRADIENT_ROWS, _GRADIENT_SIZE = 256, 2**16
"""The fewest tokens, and the smallest weight, of a gradient by oneDNN. With fewer of either it takes up to five times
as long as MKL on two AMD Zen 5 cores, with more 0.5 to 1.0 of the time: it copies operands into an order of its own."""


@cache
def _outruns_mkl() -> bool:
    """Whether oneDNN computes gradients of weights faster than MKL, which on AMD processors uses AVX2 at most: with
    AVX-512, oneDNN takes half of the time (1,920 tokens, Zen 5), with AVX2 as long as MKL."""
    amd = str(torch.cpu.get_capabilities().get("cpu_name", "")).startswith("AMD")
    return amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_only_its_weight(layer: nn.Module) -> bool:
    """Whether calling the layer only multiplies by its weight: it has no bias and no hooks, ranks do not split it, and
    autocast is off."""
    weight = cast(torch.Tensor, layer.weight)
    plain = type(layer) is nn.Linear and layer.bias is None and not has_hooks(layer)
    return plain and not is_sharded(weight) and not _autocasts(weight)


def has_hooks(layer: nn.Module) -> bool:
    """Whether something is called when the layer is, besides its `forward`."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def _autocasts(weight: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(weight.device.type)


def _applies(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 and device.type == "cpu" and available()


def _forward(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    # Needs no padding: `models.backbone.packed` pads the rows of a pack.
    return _Linear.apply(input, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]


class AutogradContext(Protocol):
    """What `torch.autograd.Function` passes to its methods; `FunctionCtx` of torch declares only a part of it."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: AutogradContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0].flatten(0, -2)
        rows = x.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            onednn_linear(grad, weight.T).view(x.shape) if wants_x else None,
            weight_gradient(grad, rows) if wants_weight else None,
            grad.sum(0) if wants_bias else None,
        )
