"""The precision of the matrix products of the output layer.

On GPUs, products of bfloat16 matrices with sums and results in float32 are several times faster than products of
float32 matrices. `bfloat16` rounds both factors to such a matrix, as autocast does for every other layer; logits are
not rounded. `bfloat16x3` splits each factor into two of them and a rest of at most 2^-16 of the number, and
multiplies these parts, except the second with the second: its error is at most 3 * 2^-16 of the sum of |a| |b|, plus
the rounding of float32 sums. `tf32` rounds both factors to 11 bits: its error is at most 2^-10 of the sum of |a| |b|,
or twice that on a GPU that truncates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trivium.foundation.errors import ConfigError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

HeadPrecision = Literal["auto", "float32", "tf32", "bfloat16", "bfloat16x3"]

Parts = tuple["Tensor", ...]
"""A matrix, or one or two bfloat16 matrices whose sum approximates it."""

_HALVED = {"bfloat16", "bfloat16x3"}


def precision_of(name: str, device: str, dtype: str, key: str) -> str:
    """Resolves the precision `name` of the config's `key` for a device and a model's `dtype`. Raises ConfigError if the
    device or the dtype does not support it."""
    gpu = device.startswith("cuda")
    # GPUs without instructions for bfloat16 emulate it.
    supported = gpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    supported = supported and dtype != "float64"
    if name == "auto":
        return ("bfloat16" if dtype == "bfloat16" else "bfloat16x3") if supported else "float32"
    if name == "float32" or supported:
        return name
    reason = "the model computes in float64" if dtype == "float64" else "this GPU has no instructions for it"
    reason = reason if gpu else "the model is on a CPU, which computes in float32 only"
    raise ConfigError(f"{key} {name!r}", reason, "set it to auto or float32")


def set_matmul_precision(precision: str) -> None:
    """Enables TF32 for `tf32`, for all float32 matrix products of this process on GPUs."""
    if precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True


def parts_of(x: Tensor, precision: str) -> Parts:
    """Splits a matrix for `product_of`. A bfloat16 matrix needs no split."""
    if precision not in _HALVED or x.dtype == torch.bfloat16:
        return (x,)
    first = x.bfloat16()
    return (first,) if precision == "bfloat16" else (first, (x - first.float()).bfloat16())


def product(a: Tensor, b: Parts, precision: str) -> Tensor:
    """a (N, K) @ b (M, K).T without gradient, in float32 (float64 for that type)."""
    return product_of(parts_of(a, precision), b, precision)


def product_of(a: Parts, b: Parts, precision: str, into: Tensor | None = None) -> Tensor:
    """a (N, K) @ b (M, K).T of matrices in parts; added to `into`, in place, if that is given."""
    if precision not in _HALVED:
        from trivium.models.cpu.linear import matmul_transposed

        return matmul_transposed(a[0], b[0]) if into is None else into.addmm_(a[0], b[0].T)
    total = _widened(a[0], b[0], into)
    for first, second in [*((a[0], rest) for rest in b[1:]), *((rest, b[0]) for rest in a[1:])]:
        total = _widened(first, second, total)
    return total


def _widened(a: Tensor, b: Tensor, into: Tensor | None) -> Tensor:
    """a (N, K) @ b (M, K).T of bfloat16 matrices, added up and returned in float32."""
    if not a.is_cuda:  # torch.mm has `out_dtype` on GPUs only
        result = a.float() @ b.float().T
        return result if into is None else into.add_(result)
    if into is None:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return torch.addmm(into, a, b.T, out_dtype=torch.float32, out=into)


def use_in(output: nn.Linear, precision: str) -> None:
    """Makes an untrained output layer on a GPU compute in this precision. Its outputs are float32, whatever the type of
    its weights."""
    if not output.weight.is_cuda or (precision not in _HALVED and output.weight.dtype == torch.float32):
        return

    def forward(input: Tensor) -> Tensor:
        rows, weight = input.flatten(0, -2), output.weight
        if precision not in _HALVED:
            rows, weight = rows.float(), weight.float()
        logits = product(rows, parts_of(weight, precision), precision)
        logits = logits if output.bias is None else logits.add_(output.bias)
        return logits.view(*input.shape[:-1], -1)

    output.forward = forward
