"""Policy, value and supervised objectives against slow loops, finite differences and the laws they declare."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trivium.algorithms import PerToken, PolicyInputs, PolicyObjective, ValueObjective, catalogue, compute_policy_loss
from trivium.algorithms.objective import Term
from trivium.errors import ConfigError
from trivium.models.loss import LossInputs, Totals

LOSSES = catalogue("policy_losses")
KL = catalogue("kl_estimators")
ENTROPY = catalogue("entropies")["exact"]
MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
TOTALS = Totals(tokens=6, sequences=2, max_response_length=3)


def random(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def columns(log_prob: Tensor) -> dict[str, Tensor]:
    """Everything a loss could ask for; old log-probabilities around the current ones, some ratios far from 1."""
    old = log_prob.detach() + random(2, 0.5)
    return {"advantages": random(3), "old_log_prob": old, "rollout_log_prob": old, "ref_log_prob": random(4)}


def objective(name: str, **settings: object) -> PolicyObjective:
    return PolicyObjective(LOSSES[name], LOSSES[name].law, **settings)  # pyright: ignore[reportArgumentType]


def kl_term(coef: float, name: str = "low_var_kl") -> Term:
    return Term(coef, KL[name], KL[name].law)


def entropy_term(coef: float) -> Term:
    return Term(coef, ENTROPY, ENTROPY.law)


def loss_of(which: PolicyObjective, log_prob: Tensor, given: dict[str, Tensor]) -> Tensor:
    return which.loss(LossInputs(MASK, torch.zeros(MASK.shape), given, log_prob), TOTALS).loss


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.detach().requires_grad_(True)
    return torch.autograd.grad(function(at), at)[0]


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    result = torch.zeros_like(at)
    for place in range(at.numel()):
        nudge = torch.zeros_like(at)
        nudge.view(-1)[place] = step
        result.view(-1)[place] = (function(at + nudge) - function(at - nudge)) / (2 * step)
    return result


def test_ppo_is_the_equation() -> None:
    log_prob = random(1)
    given = columns(log_prob)
    found = LOSSES["ppo"](PolicyInputs(log_prob, MASK, given, ~MASK & MASK), clip_low=0.1, clip_high=0.3, dual_clip=1.5)
    for row, column in MASK.nonzero().tolist():
        advantage = float(given["advantages"][row, column])
        ratio = math.exp(float(log_prob[row, column] - given["old_log_prob"][row, column]))
        surrogate = min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
        if advantage < 0:
            surrogate = max(surrogate, 1.5 * advantage)
        assert float(found.loss[row, column]) == pytest.approx(-surrogate, rel=1e-12)


def test_clip_metrics_count_the_tokens_that_clipping_decided() -> None:
    old = torch.zeros(1, 4)
    log_prob = torch.tensor([[0.5, -0.5, 0.0, 3.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    _, clipped, kl, held = compute_policy_loss(old, log_prob, advantages, torch.ones(1, 4), cliprange=0.2)
    assert float(clipped) == pytest.approx(2 / 4)
    assert float(held) == pytest.approx(1 / 4)
    assert float(kl) == pytest.approx(-3.0 / 4)


def test_compute_policy_loss_wants_a_clip_range() -> None:
    given = (torch.zeros(1, 2),) * 3
    with pytest.raises(ConfigError, match="cliprange"):
        compute_policy_loss(*given, torch.ones(1, 2))
    with pytest.raises(ConfigError, match="clip_ratio_c"):
        compute_policy_loss(*given, torch.ones(1, 2), cliprange=0.2, clip_ratio_c=1.0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    log_prob = random(1)
    given = columns(log_prob)
    which = objective(name, kl=kl_term(0.3, "k3"))
    exact = gradient(lambda at: loss_of(which, at, given), log_prob)
    torch.testing.assert_close(
        exact, finite_differences(lambda at: loss_of(which, at, given), log_prob), rtol=1e-6, atol=1e-8
    )
    assert exact[MASK].abs().max() > 0
    assert exact[~MASK].eq(0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_a_loss_has_the_gradient_it_declares(name: str) -> None:
    log_prob = random(1)
    given = columns(log_prob) | {"old_log_prob": log_prob}
    found = gradient(lambda at: loss_of(objective(name), at, given), log_prob)
    policy_gradient = torch.where(MASK, -given["advantages"] / TOTALS.tokens, 0.0)
    declared = LOSSES[name].law.on_policy
    if declared == "plain":
        torch.testing.assert_close(found, policy_gradient, rtol=1e-12, atol=1e-15)
    else:
        assert declared.startswith(("none: ", "factor: "))
        assert not torch.allclose(found, policy_gradient)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if "advantages" in loss.law.needs])
def test_advantages_of_zero_give_a_gradient_of_exactly_zero(name: str) -> None:
    log_prob = random(1).float()
    given = columns(log_prob) | {"advantages": torch.zeros(MASK.shape)}
    assert gradient(lambda at: loss_of(objective(name), at, given), log_prob).eq(0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_extreme_log_ratios_stay_finite(name: str, log_ratio: float) -> None:
    log_prob = random(1).float()
    given = columns(log_prob)
    given |= dict.fromkeys(("old_log_prob", "ref_log_prob", "rollout_log_prob"), log_prob - log_ratio)
    for sign in (-1, 1):
        given["advantages"] = torch.full(MASK.shape, float(sign))
        which = objective(name, kl=kl_term(0.1))
        at = log_prob.clone().requires_grad_(True)
        done = which.loss(LossInputs(MASK, torch.zeros(MASK.shape), given, at), TOTALS)
        assert torch.isfinite(done.loss)
        assert torch.isfinite(torch.autograd.grad(done.loss, at)[0]).all()
        assert all(torch.isfinite(value) for value in (done.sums | done.maxima).values())


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_outside_the_mask_cannot_reach_loss_gradient_or_metrics(name: str) -> None:
    log_prob = random(1)
    given = columns(log_prob)

    def everything(log_prob: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
        at = log_prob.clone().requires_grad_(True)
        entropy = torch.where(MASK, random(7), log_prob.detach())
        inputs = LossInputs(MASK, torch.zeros(MASK.shape), given, at, entropy)
        done = objective(name, kl=kl_term(0.1), entropy=entropy_term(0.1)).loss(inputs, TOTALS)
        return [done.loss, torch.autograd.grad(done.loss, at)[0], *done.sums.values(), *done.maxima.values()]

    clean = everything(log_prob.where(MASK, 0.0), {key: value.where(MASK, 0.0) for key, value in given.items()})
    for rubbish in (math.nan, math.inf, -math.inf):
        dirty = everything(
            log_prob.where(MASK, rubbish), {key: value.where(MASK, rubbish) for key, value in given.items()}
        )
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_micro_batch_without_a_trained_token_is_zero_and_not_nan(mode: str) -> None:
    nothing = torch.zeros_like(MASK)
    at = random(1).requires_grad_(True)
    given = columns(at.detach())
    done = objective("ppo", aggregate=mode).loss(LossInputs(nothing, torch.zeros(MASK.shape), given, at), TOTALS)
    assert float(done.loss.detach()) == 0
    assert torch.autograd.grad(done.loss, at)[0].eq(0).all()


def test_entropy_bonus_and_kl_penalty_enter_with_their_coefficients() -> None:
    log_prob, entropy = random(1), random(5).abs().where(MASK, 0.0)
    given = columns(log_prob)
    inputs = LossInputs(MASK, torch.zeros(MASK.shape), given, log_prob, entropy)
    plain = objective("ppo").loss(inputs, TOTALS)
    both = objective("ppo", entropy=entropy_term(0.2), kl=kl_term(0.5, "k2")).loss(inputs, TOTALS)
    k2 = ((log_prob - given["ref_log_prob"]) ** 2 / 2)[MASK].sum()
    assert objective("ppo", entropy=entropy_term(0.2), kl=kl_term(0.5)).needs >= {"entropy", "ref_log_prob"}
    torch.testing.assert_close(both.loss - plain.loss, (0.5 * k2 - 0.2 * entropy.sum()) / TOTALS.tokens)
    torch.testing.assert_close(both.sums["train/ref_kl"], k2)


def test_mismatch_compares_engine_and_trainer_where_an_engine_sampled() -> None:
    log_prob = random(1).where(MASK, 0.0)
    given = columns(log_prob) | {"rollout_log_prob": log_prob.clone()}
    given["rollout_log_prob"][0, 1] += 0.25
    given["rollout_log_prob"][1, 1] += 9.0  # an expert's token
    version = torch.zeros(MASK.shape, dtype=torch.int32)
    version[1, 1] = -1
    done = objective("ppo").loss(LossInputs(MASK, version, given, log_prob), TOTALS)
    assert float(done.maxima["mismatch/log_prob_max"]) == pytest.approx(0.25)
    assert float(done.sums["mismatch/kl"]) == pytest.approx(math.exp(-0.25) + 0.25 - 1)


def test_sft_is_the_cross_entropy_of_the_expert_tokens() -> None:
    log_prob = random(1)
    done = objective("sft").loss(LossInputs(MASK, torch.full(MASK.shape, -1), {}, log_prob), TOTALS)
    torch.testing.assert_close(done.loss, -log_prob[MASK].mean())
    assert not done.maxima


def test_value_loss_is_the_equation_and_its_gradient() -> None:
    old, returns, values = random(1), random(2), random(3)
    which = ValueObjective(clip=0.3)
    given = {"values": old, "returns": returns, "rollout_log_prob": old}

    def loss(at: Tensor) -> Tensor:
        return which.loss(LossInputs(MASK, torch.zeros(MASK.shape), given, values=at), TOTALS).loss

    expected, clipped = 0.0, 0
    for row, column in MASK.nonzero().tolist():
        v, v_old, target = (float(t[row, column]) for t in (values, old, returns))
        held = min(max(v, v_old - 0.3), v_old + 0.3)
        expected += max((v - target) ** 2, (held - target) ** 2) / 2 / TOTALS.tokens
        clipped += (held - target) ** 2 > (v - target) ** 2
    assert float(loss(values)) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient(loss, values), finite_differences(loss, values), rtol=1e-6, atol=1e-8)
    done = which.loss(LossInputs(MASK, torch.zeros(MASK.shape), given, values=values), TOTALS)
    assert int(done.sums["train/value_clip_fraction"]) == clipped > 0


def test_importance_weights_multiply_the_policy_loss() -> None:
    log_prob, weights = random(1), random(6).abs()
    given = columns(log_prob) | {"rollout_is_weights": weights}
    per_token = LOSSES["ppo"](PolicyInputs(log_prob, MASK, given, ~MASK & MASK)).loss
    found = loss_of(objective("ppo", weighted=True), log_prob, given)
    torch.testing.assert_close(found, (per_token * weights)[MASK].sum() / TOTALS.tokens)


def test_every_registered_loss_says_what_it_is() -> None:
    for name, loss in LOSSES.items():
        x = PolicyInputs(random(1), MASK, columns(random(1)), ~MASK & MASK)
        assert isinstance(loss(x), PerToken), name
        assert loss.law.formula, name
        assert loss.law.source, name
        assert loss.__doc__, name
        assert all(field.description for key, field in loss.Config.model_fields.items() if key != "kind"), name
