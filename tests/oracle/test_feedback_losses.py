"""FIPO, REAL, prompt means and the steered entropy bonus, against loops written from the papers."""

import math
from dataclasses import replace

import pytest
import torch
from algebra import HOLES as MASK
from algebra import STEP as WHOLE
from algebra import finite_differences, numbers, policy_objective, run, selected
from configs import configured

from trivium.algorithms import GroupAlgorithm, catalogue, policy_inputs
from trivium.algorithms.entropy import EntropyController
from trivium.algorithms.losses.base import PolicyInputs
from trivium.algorithms.losses.future import discounted_future
from trivium.runtime.build import algorithm_of

FIPO = catalogue("policy_losses")["fipo"]


def inputs(seed: int, scale: float = 0.5) -> PolicyInputs:
    log_prob = -numbers(seed).abs() - 0.05
    return policy_inputs(
        log_prob.requires_grad_(True),
        MASK,
        old_log_prob=log_prob.detach() + numbers(seed + 1, scale),
        advantages=numbers(seed + 2),
    )


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize(
    "options",
    [{}, {"half_life": 1.0, "future_low": 0.9, "future_high": 4.0}, {"dual_clip": None}, {"dual_clip": 1.2}],
    ids=str,
)
def test_fipo_is_ppo_with_weighted_advantages(seed: int, options: dict[str, float]) -> None:
    x = inputs(seed)
    done = FIPO(x, **options)
    (gradient,) = torch.autograd.grad(done.loss[MASK].sum(), x.log_prob)
    said = {"half_life": 32.0, "future_low": 0.2, "future_high": 0.2, "dual_clip": 10.0, **options}
    discount, dual = 2 ** (-1 / said["half_life"]), said["dual_clip"]
    p, old, a = (t.detach().tolist() for t in (x.log_prob, x.old_log_prob, x.advantages))
    for i, t in MASK.nonzero().tolist():
        future = 0.0
        for k in range(t, MASK.shape[1]):
            change = p[i][k] - old[i][k]
            if MASK[i, k] and (dual is None or math.exp(change) <= dual):
                future += discount ** (k - t) * change
        weight = min(max(math.exp(future), 1 - said["future_low"]), 1 + said["future_high"])
        r, scaled = math.exp(p[i][t] - old[i][t]), a[i][t] * weight
        clipped = min(max(r, 0.8), 1.2)
        loss, slope = max((-scaled * r, -scaled * r), (-scaled * clipped, -scaled * r if clipped == r else 0.0))
        if dual is not None and scaled < 0 and loss > -scaled * dual:
            loss, slope = -scaled * dual, 0.0
        assert float(done.loss[i, t].detach()) == pytest.approx(loss, rel=1e-10)
        assert float(gradient[i, t]) == pytest.approx(slope, rel=1e-10, abs=1e-12)
        assert float(done.metrics["train/score_weight"][i, t]) == pytest.approx(weight, rel=1e-10)


def test_the_future_of_a_long_row_is_the_plain_sum() -> None:
    values = torch.randn(2, 37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for discount in (0.5, 0.97, 1.0):
        slow = [[sum(discount ** (k - t) * row[k] for k in range(t, 37)) for t in range(37)] for row in values.tolist()]
        torch.testing.assert_close(discounted_future(values, discount), torch.tensor(slow, dtype=torch.float64))


def real_step() -> object:
    """A step of groups of two rows and of one: labels of both kinds, of one kind, and a row without tokens."""
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    advantages = torch.where(WHOLE.mask, labels[:, None], 0.0)
    return replace(WHOLE, columns={**WHOLE.columns, "advantages": advantages}, groups=(0, 0, 0, 0, 1, 1))


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_real_has_the_gradient_of_the_classification(tau: float) -> None:
    """The mean over groups of log(1 + sum_+ e^(-s/tau)) + log(1 + sum_- e^(s/tau)), differentiated by autograd
    (`label_slopes`)."""
    step = real_step()
    objective = policy_objective("real", "seq-mean-token-mean", tau=tau)
    found = run(objective, step).gradients["log_prob"]

    def classification(log_prob: torch.Tensor) -> torch.Tensor:
        total = log_prob.new_zeros(())
        for group in (0, 1):
            sides = {True: log_prob.new_ones(()), False: log_prob.new_ones(())}
            for row in range(len(step.mask)):
                kept = step.mask[row]
                if step.groups[row] == group and kept.any():
                    score = (log_prob[row] - step.columns["old_log_prob"][row])[kept].mean()
                    positive = bool(step.columns["advantages"][row][kept][0] > 0)
                    sides[positive] = sides[positive] + torch.exp((-score if positive else score) / tau)
            total = total + sides[True].log() + sides[False].log()
        return total / 2

    at = step.answers["log_prob"].clone().requires_grad_(True)
    (exact,) = torch.autograd.grad(classification(at), at)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)  # slopes are columns, in float32
    torch.testing.assert_close(exact, finite_differences(classification, at.detach()), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("beta", [1e-3, 0.7])
def test_a_star_po_regresses_the_log_ratio_of_a_sequence_on_its_advantage(beta: float) -> None:
    """The mean over sequences of (beta log(policy / reference) - A)^2, differentiated by autograd."""
    advantages = torch.where(WHOLE.mask, WHOLE.columns["advantages"][:, :1], 0.0)
    step = replace(WHOLE, columns={**WHOLE.columns, "advantages": advantages})
    objective = policy_objective("a_star_po", "seq-mean-token-mean", beta=beta)

    def regression(log_prob: torch.Tensor) -> torch.Tensor:
        errors = []
        for row, kept in enumerate(step.mask):
            if kept.any():
                ratio = (log_prob[row] - step.columns["ref_log_prob"][row])[kept].sum()
                errors.append((beta * ratio - advantages[row][kept][0]) ** 2)
        return torch.stack(errors).mean()

    at = step.answers["log_prob"].clone().requires_grad_(True)
    value = regression(at)
    (exact,) = torch.autograd.grad(value, at)
    found = run(objective, step)
    assert float(found.loss) == pytest.approx(float(value.detach()), rel=1e-9)
    torch.testing.assert_close(found.gradients["log_prob"], exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(exact, finite_differences(regression, at.detach()), rtol=1e-5, atol=1e-8)


def test_the_solution_of_a_star_po_is_the_optimal_policy_of_its_problem() -> None:
    """By enumeration of a vocabulary: pi = pi_ref exp((r - V) / beta) has no loss and no gradient in any sample."""
    reference = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0)
    rewards, beta = torch.tensor([1.0, 0.0, 0.0, 0.5, 1.0, 0.0, -1.0], dtype=torch.float64), 0.3
    value = beta * torch.logsumexp(reference + rewards / beta, 0)
    optimal = reference + (rewards - value) / beta
    assert float(optimal.exp().sum()) == pytest.approx(1, rel=1e-12)
    x = policy_inputs(
        optimal[:, None].clone().requires_grad_(True),
        torch.ones(7, 1, dtype=torch.bool),
        ref_log_prob=reference[:, None],
        advantages=(rewards - value)[:, None],
    )
    done = catalogue("policy_losses")["a_star_po"](x, beta=beta)
    (gradient,) = torch.autograd.grad(done.loss.sum(), x.log_prob)
    assert float(done.loss.detach().max()) < 1e-28
    assert float(gradient.abs().max()) < 1e-14


def test_prompt_mean_is_the_mean_over_prompts_of_token_means() -> None:
    plain, weighted = (policy_objective("reinforce", gates=gates) for gates in ((), ({"kind": "prompt_mean"},)))
    step = replace(WHOLE, groups=(0, 0, 0, 1, 1, 2))
    assert "token_weight" in selected(weighted, step).columns
    losses = -(step.columns["advantages"] * step.answers["log_prob"])
    means = []
    for group in (0, 1, 2):
        rows = [row for row in range(6) if step.groups[row] == group]
        tokens = [float(loss) for row in rows for loss in losses[row][step.mask[row]]]
        means.append(sum(tokens) / len(tokens))
    assert float(run(weighted, step).loss) == pytest.approx(sum(means) / 3, rel=1e-6)
    assert float(run(plain, step).loss) != pytest.approx(sum(means) / 3, rel=1e-3)


def test_the_entropy_bonus_acts_below_its_target_and_follows_it() -> None:
    controller = EntropyController(0.0, target=0.5, step=0.01)
    seen = []
    for entropy in (0.6, 0.4, 0.4, 0.5, 0.4, 0.9, 0.9, 0.1):
        controller.update(entropy)
        seen.append((round(controller.coef, 3), round(controller.value, 3)))
    assert seen == [(0, 0), (0, 0.01), (0.01, 0.02), (0.02, 0.02), (0.02, 0.03), (0, 0.02), (0, 0.01), (0.01, 0.02)]


def test_a_resumed_run_takes_a_changed_coefficient_of_the_bonus() -> None:
    def algorithm(coef: float) -> GroupAlgorithm:
        return algorithm_of(configured(algorithm={"kind": "grpo", "entropy": {"coef": coef, "target": 0.5}}))

    before, same, changed = (algorithm(coef) for coef in (0.01, 0.01, 0.3))
    assert before.entropy_controller is not None
    before.entropy_controller.update(0.1)
    for resumed, expected in ((same, 0.015), (changed, 0.3)):
        resumed.restore(before.state())
        assert resumed.state()["entropy_coef"] == pytest.approx(expected)
