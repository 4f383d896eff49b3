"""KL estimators against the exact divergence of a vocabulary small enough to enumerate."""

from typing import Any

import pytest
import torch
from algebra import Variant, section, variants
from failing import refused
from torch import Tensor

from trivium.algorithms import (
    AdaptiveKLController,
    FixedKLController,
    PolicyInputs,
    catalogue,
    get_kl_controller,
    kl_penalty,
    policy_inputs,
)
from trivium.algorithms.metadata import KlMetadata, resolve_function
from trivium.foundation.errors import ConfigError, DataError, UnknownName

V = 6
ESTIMATORS = catalogue("kl_estimators")
KINDS = [variant.kind for variant in variants("kl_estimators") if not variant.options]


def setting() -> tuple[Tensor, Tensor, Tensor]:
    """(logits with gradient, log p, log q) of a policy and a reference."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(V, generator=generator, dtype=torch.float64) * 0.7).requires_grad_(True)
    reference = torch.randn(V, generator=generator, dtype=torch.float64).mul(0.7).log_softmax(-1)
    return logits, logits.log_softmax(-1), reference


def exact(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def estimate(kind: str, log_p: Tensor, log_q: Tensor, **options: Any) -> Tensor:
    """(V,): what the estimator says on policy when token v was sampled."""
    function, metadata = resolve_function("kl_estimators", section("kl_estimators", kind, **options), KlMetadata)
    columns = dict.fromkeys(metadata.needs, log_p.detach()[None]) | {"ref_log_prob": log_q[None]}
    everywhere = torch.ones(1, V, dtype=torch.bool)
    return function(PolicyInputs(log_p[None], everywhere, columns, ~everywhere))[0]


def expectation(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean of the estimator over the policy's samples, mean of its gradient, exact KL, its gradient)."""
    logits, log_p, log_q = setting()
    mean = (log_p.detach().exp() * estimate(kind, log_p, log_q)).sum()
    gradient = torch.autograd.grad(mean, logits, retain_graph=True)[0]
    kl = exact(log_p, log_q)
    return mean.detach(), gradient, kl.detach(), torch.autograd.grad(kl, logits)[0]


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimator_has_the_mean_it_declares(kind: str) -> None:
    mean, _, kl, _ = expectation(kind)
    declared, _, how = ESTIMATORS[kind].metadata.mean.partition(": ")
    assert (declared, bool(how)) in (("unbiased", False), ("biased", True))
    assert close(mean, kl) == (declared == "unbiased")


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimator_has_the_gradient_it_declares(kind: str) -> None:
    _, gradient, _, kl_gradient = expectation(kind)
    declared, _, how = ESTIMATORS[kind].metadata.gradient.partition(": ")
    assert (declared, bool(how)) in (("unbiased", False), ("zero", False), ("biased", True))
    assert close(gradient, kl_gradient) == (declared == "unbiased")
    assert close(gradient, torch.zeros(V).double()) == (declared == "zero")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("+") and f"{kind}+" in ESTIMATORS])
def test_a_plus_keeps_the_value(kind: str) -> None:
    _, log_p, log_q = setting()
    assert torch.equal(estimate(f"{kind}+", log_p, log_q), estimate(kind, log_p, log_q))


@pytest.mark.parametrize("variant", [v for v in variants("kl_estimators") if v.options.get("cap")], ids=str)
def test_a_cap_holds_the_value(variant: Variant) -> None:
    _, log_p, log_q = setting()
    cap = variant.options["cap"]
    capped, free = (estimate(variant.kind, log_p, 9 * log_q, cap=bound) for bound in (cap, None))
    assert free.abs().max() > cap
    torch.testing.assert_close(capped, free.clamp(-cap, cap))


def test_k3_has_the_gradient_of_the_reverse_divergence() -> None:
    logits, log_p, log_q = setting()
    reverse = torch.autograd.grad(exact(log_q, log_p), logits)[0]
    torch.testing.assert_close(expectation("k3")[1], reverse, rtol=1e-10, atol=1e-12)


def test_full_is_the_divergence_itself() -> None:
    logits, log_p, log_q = setting()
    kl = kl_penalty(log_p.expand(2, 3, V), log_q.expand(2, 3, V), "full")
    torch.testing.assert_close(kl, exact(log_p, log_q).expand(2, 3))
    torch.testing.assert_close(torch.autograd.grad(kl[0, 0], logits)[0], expectation("k2")[3])
    with refused(DataError, "full", "(B, L, V)"):
        kl_penalty(log_p, log_q, "full")


def test_full_skips_forbidden_tokens() -> None:
    logits = torch.tensor([[[0.0, 1.0, -torch.inf]]], requires_grad=True)
    kl = kl_penalty(logits.log_softmax(-1), torch.zeros(1, 1, 3).log_softmax(-1), "full")
    assert torch.isfinite(kl).all()
    assert torch.isfinite(torch.autograd.grad(kl.sum(), logits)[0]).all()


@pytest.mark.parametrize("kind", [name for name in catalogue("kl_estimators") if "corrected" not in name])
def test_equal_policies_are_at_distance_zero_and_extremes_are_finite(kind: str) -> None:
    same = torch.tensor([[-0.3, -7.0]], requires_grad=True)
    assert kl_penalty(same, same.detach(), kind).eq(0).all()
    far = kl_penalty(same, same.detach() + torch.tensor([[1000.0, -1000.0]]), kind)
    assert torch.isfinite(far).all()
    assert torch.isfinite(torch.autograd.grad(far.sum(), same)[0]).all()


@pytest.mark.parametrize("kind", ["", "k4", "low_var", "full+"])
def test_another_estimator_is_an_error_with_a_suggestion(kind: str) -> None:
    with refused(UnknownName, kind, "abs, abs+, full, k1"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), kind)


def test_an_adaptive_controller_steers_towards_its_target() -> None:
    controller = AdaptiveKLController(0.1, target_kl=0.2, horizon=100)
    controller.update(0.5, 10)
    assert controller.value == pytest.approx(0.102)
    controller.update(0.0, 10)
    assert controller.value == pytest.approx(0.09996)
    with refused(ConfigError, "horizon 0"):
        AdaptiveKLController(0.1, 0.2, 0)


def test_get_kl_controller_reads_a_mapping_or_an_object() -> None:
    class Section:
        type, kl_coef, target_kl, horizon = "adaptive", 0.3, 0.1, 50

    fixed = get_kl_controller({"type": "fixed", "kl_coef": 0.2})
    fixed.update(9.0, 9)
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.2
    assert isinstance(get_kl_controller(Section()), AdaptiveKLController)
    with refused(UnknownName, "'adaptiv'", "'adaptive'"):
        get_kl_controller({"type": "adaptiv"})


def test_a_corrected_kl_takes_the_weights_of_a_correction_along() -> None:
    generator = torch.Generator().manual_seed(1)
    policy, old, reference = (torch.randn(2, 3, generator=generator, dtype=torch.float64) * 0.3 - 1 for _ in range(3))
    weights = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    columns = {"old_log_prob": old, "ref_log_prob": reference}
    plain = catalogue("kl_estimators")["corrected_k3"](policy_inputs(policy, torch.ones(2, 3), **columns))
    weighted = catalogue("kl_estimators")["corrected_k3"](
        policy_inputs(policy, torch.ones(2, 3), **columns, rollout_is_weights=weights)
    )
    torch.testing.assert_close(weighted, weights * plain)


def test_a_corrected_kl_has_no_cap() -> None:
    """A token whose `k3` exceeds the default cap keeps its value and its gradient."""
    policy = torch.tensor([[-9.0, -1.0]], dtype=torch.float64, requires_grad=True)
    columns = {"old_log_prob": policy.detach(), "ref_log_prob": torch.tensor([[-4.0, -1.5]], dtype=torch.float64)}
    value = catalogue("kl_estimators")["corrected_k3"](policy_inputs(policy, torch.ones(1, 2), **columns))
    d = policy.detach() - columns["ref_log_prob"]
    torch.testing.assert_close(value.detach(), (-d).exp() + d - 1)
    # The gradient of r k3 at r = 1: that of the ratio, k3, plus that of k3 itself, 1 - exp(-d). The sum is d.
    torch.testing.assert_close(torch.autograd.grad(value.sum(), policy)[0], d)
