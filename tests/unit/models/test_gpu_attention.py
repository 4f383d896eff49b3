"""Attention on GPUs: which kernel computes it, what it is given, and, on a GPU, what it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trivium.models.backbone.dense_attention import dense_attention
from trivium.models.backbone.gpu_attention import (
    KERNELS,
    Runs,
    attend_in_runs,
    backend_for,
    causal_attention,
    gpu_backend,
    runs_of,
)
from trivium.models.backbone.packed import Pack, pack, packed_attention
from trivium.models.backbone.prefixes import Prefixes

HALF = torch.bfloat16


def kernel(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float | None, window: int | None) -> Tensor:
    """What the kernels are documented to compute, one segment at a time: the last query sees the last key."""
    outputs: list[Tensor] = []
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for b in range(len(runs.query_bounds) - 1):
        queries = q[runs.query_bounds[b] : runs.query_bounds[b + 1]]
        keys, values = (x[runs.key_bounds[b] : runs.key_bounds[b + 1]] for x in (k, v))
        assert len(queries) <= runs.longest_query
        assert len(keys) <= runs.longest_key
        place = torch.arange(len(queries), device=q.device)[:, None] + len(keys) - len(queries)
        behind = place - torch.arange(len(keys), device=q.device)
        seen = (behind >= 0) & (behind < (window or len(keys)))
        scores = torch.einsum("lhd,shd->hls", queries, keys) * (scale or q.shape[-1] ** -0.5)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hls,shd->lhd", weights, values))
    return torch.cat(outputs)


def packs(device: str = "cpu") -> dict[str, Pack]:
    """Sequences apart, and sequences that share beginnings of beginnings, some of which are copied and some are not."""
    rng = np.random.default_rng(0)
    apart = [rng.integers(3, 30, length).astype(np.int32) for length in (7, 1, 30, 12)]
    stem = rng.integers(3, 30, 90).astype(np.int32)
    tails = [rng.integers(3, 30, length).astype(np.int32) for length in (5, 9, 40, 3, 7)]
    together = [np.concatenate([stem, tails[0], tail]) for tail in tails[1:]] + [np.concatenate([stem, tails[2]])]
    sharing = pack(together, device, Prefixes(together).tree(range(len(together))))
    assert any(segment.parent >= 0 for segment in sharing.segments)
    return {"apart": pack(apart, device), "sharing": sharing}


def drawn(batch: Pack, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    count = len(batch.tokens)
    return [torch.randn(count, heads, 16, dtype=dtype, device=device, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", ["apart", "sharing"])
@pytest.mark.parametrize("window", [None, 4, 60])
def test_what_kernels_are_given_is_what_the_cpu_computes(name: str, window: int | None) -> None:
    batch = packs()[name]
    tokens, others = drawn(batch, torch.float64), drawn(batch, torch.float64)
    heads = [x.transpose(0, 1)[None] for x in tokens]
    expected = packed_attention(torch.nn.Identity(), *heads, None, 0.3, window, batch)[0][0]
    actual = attend_in_runs(others, runs_of(batch.segments, torch.device("cpu")), 0.3, window, kernel)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(expected)
    for result in (actual, expected):
        (result * weight).sum().backward()
    for one, other in zip(tokens, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("window", [None, 4])
def test_causal_attention_in_a_dense_grid_is_that_of_kernels(window: int | None) -> None:
    torch.manual_seed(0)
    tokens = [torch.randn(3, heads, 20, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    torch.testing.assert_close(
        causal_attention(tokens, 0.3, window, None), causal_attention(tokens, 0.3, window, kernel)
    )


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, "varlen"),
        ({"dtype": torch.float16}, "varlen"),
        ({"varlen": False}, "flash_attn"),
        ({"varlen": False, "flash_attn": False}, "efficient"),
        ({"dtype": torch.float32}, "efficient"),
        ({"head_dim": 512, "value_dim": 512}, "efficient"),
        ({"head_dim": 20, "value_dim": 20}, "efficient"),
        ({"value_dim": 64}, "efficient"),
        ({"capability": (7, 5)}, "efficient"),
        ({"capability": (12, 0)}, "varlen"),
    ],
)
def test_the_kernel_follows_from_type_shape_and_what_is_installed(case: dict[str, Any], expected: str) -> None:
    usual = {"dtype": HALF, "head_dim": 128, "value_dim": 128, "capability": (9, 0), "varlen": True, "flash_attn": True}
    assert gpu_backend(**{**usual, **case}) == expected


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["apart", "sharing"])
@pytest.mark.parametrize("window", [None, 4, 60])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_gpu_computes_the_same_without_the_math_kernel(name: str, window: int | None, dtype: torch.dtype) -> None:
    batch = packs("cuda")[name]
    tokens = drawn(batch, dtype, "cuda")
    heads = [x.transpose(0, 1)[None] for x in tokens]
    with Operators() as operators:
        actual = packed_attention(torch.nn.Identity(), *heads, None, 0.3, window, batch)[0][0]
        actual.float().square().sum().backward()
    names = " ".join(operators.names)
    assert "attention_math" not in names
    # Without a kernel for sequences of any lengths, shared tokens are multiplied as matrices.
    flash = dtype == HALF and (name == "apart" or backend_for(tokens[0], tokens[2]) in KERNELS)
    assert ("_flash_attention" in names) == flash, names
    wide = [x.detach().double().requires_grad_() for x in tokens]
    expected = attend_in_runs(wide, runs_of(batch.segments, torch.device("cuda")), 0.3, window, kernel)
    expected.square().sum().backward()
    close = {"rtol": 0.05, "atol": 0.05} if dtype == HALF else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(actual.double(), expected, **close)
    for one, other in zip(tokens, wide, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, **close)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_dense_attention_on_a_gpu_takes_grouped_heads_and_a_mask() -> None:
    q, k, v = (torch.randn(2, heads, 40, 64, device="cuda") for heads in (4, 2, 2))
    mask = torch.ones(40, 40, dtype=torch.bool, device="cuda").tril()
    with Operators() as operators:
        masked = dense_attention(q, k, v, mask, None)
    assert "attention_math" not in " ".join(operators.names)
    torch.testing.assert_close(masked, dense_attention(q, k, v, None, None))


def test_every_backend_without_a_kernel_is_dense() -> None:
    assert set(KERNELS) == {"varlen", "flash_attn"}
