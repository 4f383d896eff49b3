"""How the matrix products of the output layer are computed: in float32, in TF32, or as three of bfloat16 matrices.

A float32 number is the sum of two in bfloat16 and a rest of at most 2^-16 of it. `bfloat16x3` multiplies these parts,
but not the second with the second, and adds up in float32: a third of a GPU's bfloat16 rate, which is several times
that of float32. What is left out is at most 3 * 2^-16 of the sum of |a| |b|, beside the rounding of sums that float32
has too. TF32 rounds both factors to 11 bits: at most 2^-10 of the sum of |a| |b|, or twice that where a GPU truncates.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from trivium.errors import ConfigError
from trivium.models.cpu.linear import matmul_transposed

HeadPrecision = Literal["auto", "float32", "tf32", "bfloat16x3"]

Parts = tuple[Tensor, ...]
"""A matrix as it is, or as the sum of what it is multiplied as."""


def precision_of(name: str, device: torch.device, dtype: str, key: str) -> str:
    """The precision that a config's `key` names on a device, for a model that computes in `dtype`: `name`, or what
    `auto` stands for. Raises ConfigError where the device or the dtype does not support it."""
    gpu = device.type == "cuda"
    supported = gpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    supported = supported and dtype != "float64"
    if name == "auto":
        return "bfloat16x3" if supported else "float32"
    if name == "float32" or supported:
        return name
    reason = "the model computes in float64" if dtype == "float64" else "this GPU has no instructions for it"
    reason = reason if gpu else "the model is on a CPU, where float32 is all there is"
    raise ConfigError(f"{key} {name!r}", reason, "set it to auto or float32")


def set_matmul_precision(precision: str) -> None:
    """Turns TF32 on for `tf32`. The setting holds for all float32 matrix products of this process on its GPUs."""
    if precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True


def parts_of(x: Tensor, precision: str) -> Parts:
    """What a matrix is multiplied as; a bfloat16 one is exact as it is."""
    if precision != "bfloat16x3" or x.dtype == torch.bfloat16:
        return (x,)
    first = x.bfloat16()
    return first, (x - first.float()).bfloat16()


def product(a: Tensor, b: Parts, precision: str) -> Tensor:
    """a (N, K) @ b (M, K).T without gradient, in float32 (float64 for that type)."""
    if precision != "bfloat16x3":
        return matmul_transposed(a, b[0])
    whole, *rest = parts_of(a, precision)
    total = _widened(whole, b[0])
    for first, second in [*((whole, each) for each in b[1:]), *((each, b[0]) for each in rest)]:
        total += _widened(first, second)
    return total


def _widened(a: Tensor, b: Tensor) -> Tensor:
    """a (N, K) @ b (M, K).T of bfloat16 matrices, added up and returned in float32."""
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T


def use_in(output: nn.Linear, precision: str) -> None:
    """Makes an output layer on a GPU that is not trained compute in this precision: its outputs are float32, whatever
    the type of its weights."""
    if not output.weight.is_cuda or (precision != "bfloat16x3" and output.weight.dtype == torch.float32):
        return

    def forward(input: Tensor) -> Tensor:
        rows, weight = input.flatten(0, -2), output.weight
        if precision != "bfloat16x3":
            rows, weight = rows.float(), weight.float()
        logits = product(rows, parts_of(weight, precision), precision)
        logits = logits if output.bias is None else logits.add_(output.bias)
        return logits.view(*input.shape[:-1], -1)

    output.forward = forward
