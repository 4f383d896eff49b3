"""Float32 matrix products of linear layers on CPUs: through oneDNN forward and for the gradient of the input.

torch sends them to MKL, which on AMD processors reaches as little as half of what oneDNN reaches. The gradient of the
weight stays with torch: its operands are transposed, and oneDNN would copy them. `_applies` is the one place that
decides, by type and device alone: each process of a run computes the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

ROWS = 128
"""Products over tokens are padded to multiples of this: oneDNN compiles and keeps a kernel for every shape it meets, so
shapes that never repeat would cost time and, over a long run, gigabytes."""


def use_onednn(module: nn.Module, device: torch.device) -> None:
    """Routes every float32 `nn.Linear` of a module that runs on the CPU through oneDNN; its weights may not be there
    yet. Not for use under autocast."""
    for layer in module.modules():
        if type(layer) is nn.Linear and _applies(layer.weight.dtype, device):
            layer.forward = partial(_forward, layer)


def matmul_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (N, K) @ b (M, K).T, without gradient."""
    if not _applies(b.dtype, b.device) or len(a) % ROWS == 0:
        return product(a, b)
    return product(pad(a, (0, 0, 0, -len(a) % ROWS)), b)[: len(a)]


def product(a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """a (N, K) @ b (M, K).T + added (N, M), without gradient, where N is a multiple of `ROWS` or seldom another."""
    if not _applies(b.dtype, b.device):
        return a @ b.T if added is None else torch.addmm(added, a, b.T)
    if added is None:
        return _onednn(a, b)
    return torch.ops.mkldnn._linear_pointwise.binary(a, added, b, None, "add")


def is_only_its_weight(layer: nn.Module) -> bool:
    """Whether to multiply by its weight is all that a call of the layer does: nothing listens to it, and autocast
    changes nothing."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and layer.bias is None and not any(hooks) and not _autocasts(layer.weight)


def _autocasts(weight: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(weight.device.type)


def _applies(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()


def _forward(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(input, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]


def _onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a (N, K) @ b (M, K).T + bias (M,)."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


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
        return _onednn(x, weight, bias)

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
            _onednn(grad, weight.T).view(x.shape) if wants_x else None,
            grad.T @ rows if wants_weight else None,
            grad.sum(0) if wants_bias else None,
        )
