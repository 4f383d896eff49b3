"""The head's products as three of bfloat16 matrices: a bound against float64, and where other precisions apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from configs import configured, tiny_model
from failing import refused
from training_parts import make_engine, write_model

from trivium.foundation.errors import ConfigError
from trivium.models.heads.log_prob_head import log_prob_and_entropy
from trivium.models.heads.vocabulary_part import OutputLayer
from trivium.models.precision import parts_of, precision_of, product, set_matmul_precision, use_in
from trivium.planning import choices
from trivium.planning.machine import Machine
from trivium.runtime.preflight import preflight

X3 = "bfloat16x3"
BOUND = 3 * 2.0**-16
N, H, V = 40, 96, 300


def draw(*shape: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(*shape, generator=generator).mul(spread).exp()
    return torch.randn(*shape, generator=generator) * size


def error(actual: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest, as a part of the sum of |a| |b|."""
    exact, sizes = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    return float(((actual.double() - exact).abs() / sizes).max())


def test_three_products_are_within_the_bound() -> None:
    a, b = draw(N, H, seed=0), draw(V, H, seed=1)
    assert error(product(a, parts_of(b, X3), X3), a, b) < BOUND + H * 2.0**-24
    first, second = parts_of(a, X3)
    assert float(((first.double() + second.double() - a.double()).abs() / a.double().abs()).max()) <= 2.0**-16
    halved = b.bfloat16()
    assert len(parts_of(halved, X3)) == 1
    assert error(product(a, parts_of(halved, X3), X3), a, halved) < BOUND + H * 2.0**-24
    once = a.bfloat16().float() @ b.bfloat16().float().T
    assert error(once, a, b) > 50 * BOUND  # what the other two are for
    assert torch.equal(product(a, parts_of(b, "float32"), "float32"), product(a, (b,), "tf32"))


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_log_probs_and_gradients_of_the_head(entropy_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "LOGITS_ROWS", 16)
    monkeypatch.setattr(choices, "LOGITS_CACHE_BYTES", 1)
    hidden, weight, bias = (draw(*shape, seed=2, spread=0.5) for shape in ((N, H), (V, H), (V,)))
    weight = weight / H**0.5
    targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))
    results: dict[str, list[torch.Tensor]] = {}
    for name, dtype in (("exact", torch.float64), ("float32", torch.float32), (X3, torch.float32)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        states, output, added = inputs
        layer = OutputLayer(output, added, 0.7, precision="float32" if name == "exact" else name)
        log_prob, entropy = log_prob_and_entropy(states, layer, targets, entropy_grad=entropy_grad)
        scale = torch.linspace(-2, 3, N, dtype=dtype)
        loss = (scale * log_prob).sum() + (entropy.sum() if entropy_grad else 0)
        results[name] = [log_prob.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)]
    for exact, strict, three in zip(results["exact"], results["float32"], results[X3], strict=True):
        largest = float(exact.abs().max())
        assert float((three - exact).abs().max()) < 3e-4 * largest
        assert float((strict - exact).abs().max()) < 1e-5 * largest


def test_a_bfloat16_head_is_the_float32_head_of_rounded_factors() -> None:
    hidden, weight = draw(N, H, seed=2, spread=0.5), draw(V, H, seed=3, spread=0.5) / H**0.5
    targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))
    results: list[list[torch.Tensor]] = []
    for convert, precision in ((lambda x: x.bfloat16().double(), "float32"), (lambda x: x, "bfloat16")):
        states, output = (convert(x).requires_grad_() for x in (hidden, weight))
        log_prob, entropy = log_prob_and_entropy(states, OutputLayer(output, precision=precision), targets)
        results.append([log_prob.detach(), entropy, *torch.autograd.grad(log_prob.sum(), [states, output])])
    for exact, actual, bound in zip(*results, (1e-5, 1e-5, 2.0**-7, 2.0**-7), strict=True):
        assert actual.dtype == torch.float32
        assert float((actual.double() - exact).abs().max()) < bound * float(exact.abs().max())


def test_what_does_not_apply_is_refused_by_name() -> None:
    for name in ("tf32", "bfloat16", X3):
        with refused(ConfigError, "train.head_precision", name, "CPU"):
            precision_of(name, "cpu", "float32", "train.head_precision")
        with refused(ConfigError, "engine.head_precision", name):
            precision_of(name, "cuda", "float64", "engine.head_precision")
    assert precision_of("auto", "cpu", "bfloat16", "") == "float32"
    assert precision_of("auto", "cpu", "float32", "") == precision_of("float32", "cpu", "float64", "") == "float32"


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    where: Any = {"run": {"dir": str(tmp_path / "run")}, "model": tiny_model()}
    both = {name: {"head_precision": "tf32", "device": "cpu"} for name in ("train", "engine")}
    problems = preflight(configured(**where, **both), Machine(1 << 34), 1).problems
    assert {each.asked for each in problems} == {f"{name}.head_precision 'tf32'" for name in both}
    with refused(ConfigError, "engine.head_precision", "'auto'"):
        configured(**where, train={"head_precision": "float32"})
    with refused(ConfigError, "train.head_precision", "tf32"):
        make_engine(write_model(tmp_path / "model"), head_precision="tf32")


def test_an_output_layer_on_the_cpu_stays_as_it_is() -> None:
    layer = torch.nn.Linear(4, 8)
    use_in(layer, X3)
    set_matmul_precision("float32")
    assert "forward" not in vars(layer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("name", "bound"), [("float32", 2.0**-20), ("tf32", 2.0**-9), ("bfloat16", 2.0**-7), (X3, BOUND + H * 2.0**-24)]
)
def test_precisions_on_a_gpu(name: str, bound: float) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    a, b = draw(N, H, seed=0).cuda(), draw(V, H, seed=1).cuda()
    try:
        set_matmul_precision(name)
        measured = error(product(a, parts_of(b, name), name), a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert measured < bound
    assert name == "float32" or measured > 2.0**-22  # it is not computed in float32
    layer = torch.nn.Linear(H, V, device="cuda", dtype=torch.bfloat16)
    use_in(layer, name)
    states = draw(2, 3, H, seed=6).cuda().bfloat16()
    with torch.no_grad():
        logits = layer(states)
    assert logits.dtype == torch.float32
    expected = states.double() @ layer.weight.detach().double().T + layer.bias.detach().double()
    assert float((logits - expected).abs().max() / expected.abs().max()) < 2.0**-9
