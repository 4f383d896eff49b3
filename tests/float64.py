"""Arithmetic in float64 of layers that transformers computes in float32, whatever the type of the weights. Tests that
compare gradients to 1e-9 need it.

Such a layer rounds the gradient of every token, and the rounded sums depend on the batch. The forward pass keeps the
bits of transformers. The backward pass differentiates the layer as if it computed in the type of its input. Layers with
a recurrent state compute in float64 in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from trivium.models.backbone import recurrent
from trivium.models.backbone.routing import ROUTER, Selection, current_selection, replaying
from trivium.models.heads.trained_models import FilledModel

_NARROW = ("RMSNorm", ROUTER)
"""Suffixes of the class names of such layers."""


@cache
def install() -> None:
    """Makes the models of this process, and of its forks, compute in float64 where their weights are float64."""
    choose, forward = FilledModel._choose_arithmetic, recurrent._forward

    def choose_arithmetic(self: FilledModel, autocast: bool) -> None:
        choose(self, autocast)
        differentiate_in_float64(self.module)

    def wide_forward(function: Callable[..., Any], layer: nn.Module, *inputs: Any, **options: Any) -> Any:
        if not any(each.dtype == torch.float64 for each in layer.parameters()):
            return forward(function, layer, *inputs, **options)
        with Float64():
            return forward(function, layer, *inputs, **options)

    FilledModel._choose_arithmetic = choose_arithmetic
    recurrent._forward = wide_forward


def differentiate_in_float64(module: nn.Module) -> None:
    """Changes a module with weights in float64, in place."""
    for layer in module.modules():
        if type(layer).__name__.endswith(_NARROW) and any(p.dtype == torch.float64 for p in layer.parameters()):
            layer.forward = partial(_forward, layer)
        if getattr(layer, "residual_in_fp32", False) and next(layer.parameters()).dtype == torch.float64:
            cast(Any, layer).residual_in_fp32 = False


def _forward(layer: nn.Module, x: torch.Tensor, *others: Any) -> Any:
    outputs = _Layer.apply(layer, others, x, *layer.parameters())
    return outputs[0] if len(outputs) == 1 else outputs  # pyright: ignore[reportIndexIssue, reportArgumentType]


class _Context(Protocol):
    layer: nn.Module
    others: tuple[Any, ...]
    """Its inputs without a gradient, such as the bias of experts."""
    selection: Selection | None
    """The experts that the router was told to choose."""
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, layer: nn.Module, others: tuple[Any, ...], x: torch.Tensor, *parameters: torch.Tensor
    ) -> Any:
        ctx.layer, ctx.others, ctx.selection = layer, others, current_selection()
        ctx.save_for_backward(x)
        output = type(layer).forward(layer, x, *others)
        outputs: tuple[torch.Tensor, ...] = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: _Context, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        router = type(ctx.layer).__name__.endswith(ROUTER)
        with torch.enable_grad(), Float64(), replaying(ctx.selection if router else None):
            output = type(ctx.layer).forward(ctx.layer, x, *ctx.others)
        outputs: tuple[torch.Tensor, ...] = output if isinstance(output, tuple) else (output,)
        pairs = [(y, g) for y, g in zip(outputs, grad_outputs, strict=True) if y.requires_grad]
        inputs = [x, *(p for p in ctx.layer.parameters() if p.requires_grad)]
        made = iter(torch.autograd.grad([y for y, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))
        return None, None, next(made), *(next(made) if needed else None for needed in ctx.needs_input_grad[3:])


class Float64(TorchFunctionMode):
    """Inside the block, conversions of float64 tensors to float32 have no effect."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            # `in` would compare every tensor among the arguments with the type, by a call of torch.
            narrow = any(arg is torch.float32 for arg in (*args, kwargs.get("dtype")))
            if func is torch.Tensor.float or (func is torch.Tensor.to and narrow):
                return first
            if narrow:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
