"""KL estimators against the exact divergence of a vocabulary small enough to enumerate."""

import pytest
import torch
from torch import Tensor

from trivium.algorithms import AdaptiveKLController, FixedKLController, catalogue, get_kl_controller, kl_penalty
from trivium.errors import ConfigError, DataError, UnknownName

V = 6


def setting() -> tuple[Tensor, Tensor, Tensor]:
    """(logits with gradient, log p, log q) of a policy and a reference."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(V, generator=generator, dtype=torch.float64) * 0.7).requires_grad_(True)
    reference = torch.randn(V, generator=generator, dtype=torch.float64).mul(0.7).log_softmax(-1)
    return logits, logits.log_softmax(-1), reference


def exact(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def expectation(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean of the estimator over the policy's samples, mean of its gradient, exact KL, its gradient)."""
    logits, log_p, log_q = setting()
    samples = kl_penalty(log_p, log_q, kind)  # entry v: what the estimator says when token v was sampled
    mean = (log_p.detach().exp() * samples).sum()
    gradient = torch.autograd.grad(mean, logits, retain_graph=True)[0]
    kl = exact(log_p, log_q)
    return mean.detach(), gradient, kl.detach(), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("kind", ["kl", "k1", "low_var_kl", "k3", "kl+", "k1+", "low_var_kl+", "k3+"])
def test_unbiased_estimators_have_the_exact_mean(kind: str) -> None:
    mean, _, kl, _ = expectation(kind)
    torch.testing.assert_close(mean, kl, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["mse", "k2", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"])
def test_k2_and_every_straight_through_estimator_have_the_exact_gradient(kind: str) -> None:
    _, gradient, _, kl_gradient = expectation(kind)
    torch.testing.assert_close(gradient, kl_gradient, rtol=1e-10, atol=1e-12)


def test_k1_teaches_nothing_in_a_loss() -> None:
    _, gradient, _, kl_gradient = expectation("k1")
    assert gradient.abs().max() < 1e-12 < kl_gradient.abs().max()


def test_k3_has_the_gradient_of_the_reverse_divergence() -> None:
    logits, log_p, log_q = setting()
    reverse = torch.autograd.grad(exact(log_q, log_p), logits)[0]
    torch.testing.assert_close(expectation("k3")[1], reverse, rtol=1e-10, atol=1e-12)


def test_full_is_the_divergence_itself() -> None:
    logits, log_p, log_q = setting()
    kl = kl_penalty(log_p.expand(2, 3, V), log_q.expand(2, 3, V), "full")
    torch.testing.assert_close(kl, exact(log_p, log_q).expand(2, 3))
    torch.testing.assert_close(torch.autograd.grad(kl[0, 0], logits)[0], expectation("k2")[3])
    with pytest.raises(DataError, match="over the vocabulary"):
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
    with pytest.raises(UnknownName, match="known: abs, abs\\+, full, k1"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), kind)


def test_an_adaptive_controller_steers_towards_its_target() -> None:
    controller = AdaptiveKLController(0.1, target_kl=0.2, horizon=100)
    controller.update(0.5, 10)
    assert controller.value == pytest.approx(0.102)
    controller.update(0.0, 10)
    assert controller.value == pytest.approx(0.09996)
    with pytest.raises(ConfigError, match="horizon 0"):
        AdaptiveKLController(0.1, 0.2, 0)


def test_get_kl_controller_reads_a_mapping_or_an_object() -> None:
    class Section:
        type, kl_coef, target_kl, horizon = "adaptive", 0.3, 0.1, 50

    fixed = get_kl_controller({"type": "fixed", "kl_coef": 0.2})
    fixed.update(9.0, 9)
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.2
    assert isinstance(get_kl_controller(Section()), AdaptiveKLController)
    with pytest.raises(UnknownName, match="did you mean 'adaptive'"):
        get_kl_controller({"type": "adaptiv"})
