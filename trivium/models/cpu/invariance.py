"""Makes the arithmetic of a row independent of the rows beside it, in float32 on the CPU.

Measured with torch 2.13 and AVX-512: MKL's matrix product changes bits below 12 rows. oneDNN's changes them only at one
row, and is faster from about 64 rows. Element-wise functions treat the last, incomplete vector of each thread's part
with scalar code, in which SiLU, sigmoid, softplus and tanh-GELU round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from trivium.models.cpu.linear import onednn_linear

_GRAIN = 32768
"""Elements from which torch splits an element-wise function over threads (ATen's GRAIN_SIZE)."""
_VECTOR = 32
"""Elements of one unrolled step of the widest vector loop (two AVX-512 registers of float32)."""
_ACTIVATIONS = (
    nn.SiLU,
    nn.GELU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Mish,
    nn.Hardswish,
    nn.Tanh,
    nn.ELU,
    nn.LogSigmoid,
)


_FUNCTIONS = {
    functional.silu,
    functional.softplus,
    functional.sigmoid,
    torch.sigmoid,
    Tensor.sigmoid,
    Tensor.exp,
    torch.exp,
}
"""The same as functions."""


def make_invariant(model: nn.Module) -> None:
    """Replaces the arithmetic of the model's linear layers and activations, in place. The weights are shared."""
    from transformers.activations import ACT2CLS

    kinds = (kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values() if kind is not None)
    activations = (*_ACTIVATIONS, *kinds)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)
        elif type(module) is Conv1D:
            module.forward = partial(_conv1d, module)
        elif isinstance(module, activations) and not any(True for _ in module.parameters()):
            module.forward = partial(aligned, module.forward)


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    return invariant_linear(input, _dense(module.weight), module.bias)


def _conv1d(module: Conv1D, x: Tensor) -> Tensor:
    return invariant_linear(x, module.weight.t(), module.bias)


def _dense(weight: Tensor) -> Tensor:
    """The weight without gaps between its rows or columns. A projection that an engine has stacked with others
    (`trivium.engines.torch.layers`) has them: oneDNN has only reference code for such a weight, which takes up to a
    thousand times as long as a copy and its product."""
    return weight if weight.is_contiguous() or weight.T.is_contiguous() else weight.contiguous()


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight [out, in].T + bias [out]. A single row is computed as two."""
    if x.numel() == x.shape[-1]:
        # oneDNN has other code for one row, whose sums round differently.
        pair = x.reshape(1, -1).expand(2, -1).contiguous()
        return onednn_linear(pair, weight, bias)[0].view(*x.shape[:-1], -1)
    return onednn_linear(x, weight, bias)


def aligned(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an element-wise function. Every element goes through the vector code, whatever the number of threads."""
    size = x.numel()
    parts = min(torch.get_num_threads(), max(1, -(-size // _GRAIN)))
    missing = -size % (_VECTOR * parts)  # so that the part of each thread ends with a whole vector
    if not missing:
        return function(x.contiguous())
    padded = torch.cat([x.reshape(-1), x.new_zeros(missing)])
    return function(padded)[:size].view(x.shape)


class InvariantFunctions(TorchFunctionMode):
    """Inside the block, element-wise functions that layers call directly go through the vector code, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS or not args:
            return func(*args, **(kwargs or {}))
        return aligned(lambda x: func(x, *args[1:], **(kwargs or {})), args[0])
