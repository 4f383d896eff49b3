"""Measures how much rounding changes the outputs of a model, in the type that the model computes in.

Two correct implementations differ by their rounding, which depends on the type, the depth and the weights, so no
constant tolerance fits all models. The measurement is one more forward pass, in which random noise of the size of a
rounding error is added to the output of every module.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_FACTOR = 3.0
"""Differences up to this many times the measured one count as rounding. In float32 and bfloat16, with 2 and 12 layers,
correct engines reach 0.6 to 1.0 times; an attention scale that is 10 % off in bfloat16 reaches 3.8 times and more."""
_TF32_UNIT = 2.0**-11


def explained_by_rounding(module: nn.Module, compute: Callable[[], Tensor], actual: Tensor, expected: Tensor) -> bool:
    """Whether rounding explains the difference between `actual` and `expected`. `compute` is the pass through `module`
    that gave `expected`."""
    if not bool(torch.isfinite(actual).all()):
        return False
    with _rounded_at_random(module):
        rounded = compute()
    return _rms(actual - expected) <= _FACTOR * _rms(rounded - expected)


def _rms(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


@contextmanager
def _rounded_at_random(module: nn.Module) -> Generator[None]:
    """Changes the output of every module by up to half a unit in the last place of its type."""
    count = 0

    def move(part: nn.Module, inputs: Any, output: Any) -> Any:
        nonlocal count
        del part, inputs
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            return None
        count += 1  # a seed for each call: modules get different noise, and two measurements the same
        generator = torch.Generator(output.device).manual_seed(count)
        noise = torch.rand(output.shape, generator=generator, device=output.device, dtype=torch.float32)
        return (output.float() * (1 + _unit(output) * (2 * noise - 1))).to(output.dtype)

    handles = [part.register_forward_hook(move) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unit(output: Tensor) -> float:
    """The largest relative error of one rounding."""
    tf32 = output.is_cuda and output.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return _TF32_UNIT if tf32 else torch.finfo(output.dtype).eps / 2
