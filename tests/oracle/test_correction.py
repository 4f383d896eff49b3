"""Off-policy correction against slow loops, numbers by hand, and three policies that must not be confused."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from algebra import policy_objective, section
from example_counts import number_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivium.algorithms import Correction, GroupAlgorithm, build_algorithm, correct
from trivium.algorithms.correction import OPTIONS
from trivium.algorithms.importance_weights import corrected, importance_weights, rejection_statistic
from trivium.algorithms.mismatch import mismatch
from trivium.algorithms.presets import GRPO, REINFORCE
from trivium.foundation.metrics import checked
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.types import EXPERT_VERSION, Batch, Experience

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
"""Holes, an empty row, a single token."""


def random(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


ENGINE = torch.where(MASK, -random(0).abs(), math.nan)
TRAINER = torch.where(MASK, ENGINE + random(1, 0.4), math.nan)
ADVANTAGES = random(2)


def correction(**said: Any) -> Correction:
    done = section("corrections", **{"kind": "custom", **said})
    assert isinstance(done, Correction)
    return done


def rows_of(values: Tensor, mask: Tensor = MASK) -> list[list[float]]:
    return [values[row][mask[row]].tolist() for row in range(len(values))]


LOG_RATIOS = rows_of(TRAINER - ENGINE)


def flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


# --------------------------------------------------------------------------- weights

WEIGHTS = {
    "truncated above": ({"threshold": 1.3}, 0.0, 1.3),
    "truncated on both sides": ({"threshold": (0.8, 1.3)}, 0.8, 1.3),
    "masked": ({"threshold": 1.3, "outside": "mask"}, 1 / 1.3, 1.3),
    "masked, bounds apart": ({"threshold": (0.6, 1.2), "outside": "mask"}, 0.6, 1.2),
    "sequences masked": ({"threshold": 1.2, "outside": "mask_sequence"}, 1 / 1.2, 1.2),
    "unbounded": ({"threshold": None}, 0.0, math.inf),
}
"""What is said, and the bounds that it means."""


def slow_weights(level: str, outside: str, low: float, high: float) -> list[list[float]]:
    """The definition, in python floats."""
    result: list[list[float]] = []
    for row in LOG_RATIOS:
        ratios = [math.exp(sum(row) if level == "sequence" else one) for one in row]
        geometric = math.exp(sum(row) / len(row)) if row else 1.0
        if outside == "truncate":
            result.append([min(max(ratio, low), high) for ratio in ratios])
        else:
            judged = [geometric] * len(row) if outside == "mask_sequence" else ratios
            result.append([r if low <= judge <= high else 0.0 for r, judge in zip(ratios, judged, strict=True)])
    return result


@pytest.mark.parametrize("case", WEIGHTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_the_definition(level: str, case: str) -> None:
    said, low, high = WEIGHTS[case]
    done = correct(TRAINER, ENGINE, MASK, correction(weights=level, **said))
    assert done.weights is not None
    expected = slow_weights(level, said.get("outside", "truncate"), low, high)
    assert flat(rows_of(done.weights)) == pytest.approx(flat(expected), rel=1e-12)
    assert done.weights[~MASK].eq(0).all()
    assert done.remaining.equal(MASK)
    raw, _ = importance_weights(torch.where(MASK, TRAINER - ENGINE, 0.0), MASK, correction(weights=level, **said))
    assert raw.equal(done.weights)
    assert done.metrics["mismatch/weight/mean"] == pytest.approx(np.mean(flat(expected)))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_mean_one(level: str) -> None:
    done = correct(TRAINER, ENGINE, MASK, correction(weights=level, threshold=1.3, normalise=True))
    assert done.weights is not None
    rows = [row for row in rows_of(done.weights) if row]
    means = flat(rows) if level == "token" else [np.mean(row) for row in rows]
    assert np.mean(means) == pytest.approx(1.0, rel=1e-12)
    plain = correct(TRAINER, ENGINE, MASK, correction(weights=level, threshold=1.3)).weights
    assert plain is not None
    factors = (plain / done.weights)[MASK]
    torch.testing.assert_close(factors, factors[:1].expand_as(factors))


def test_weights_that_are_all_zero_stay_zero() -> None:
    far = correction(weights="token", threshold=(0.99, 1.01), outside="mask", normalise=True)
    done = correct(ENGINE - 5, ENGINE, MASK, far)
    assert done.weights is not None
    assert done.weights.eq(0).all()


# --------------------------------------------------------------------------- rejection

BOUNDS: dict[str, Any] = {"k1": (0.7, 1.2), "k2": 0.04, "k3": 0.05, "seq_sum_k1": (0.5, 4.0)}


def slow_statistic(option: str, row: Sequence[float]) -> list[float]:
    """The option's statistic of each token of a sequence, in python floats."""
    level, estimator = option.rsplit("_", 1)
    formulas = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    each = [formulas[estimator](one) for one in row]
    whole = {
        "token": None,
        "seq_sum": sum(each),
        "seq_mean": sum(each) / max(len(row), 1),
        "seq_max": max(each, default=0),
    }
    return each if level == "token" else [whole[level]] * len(row)


@pytest.mark.parametrize("option", OPTIONS)
def test_rejection_is_the_definition(option: str) -> None:
    bound = BOUNDS.get(option, BOUNDS[option[-2:]])
    done = correct(TRAINER, ENGINE, MASK, correction(rejection={option: bound}))
    expected: list[bool] = []
    for row in LOG_RATIOS:
        for value in slow_statistic(option, row):
            # k1 is the logarithm of engine / trainer: that ratio is what its bounds are about.
            expected.append(bound[0] <= math.exp(value) <= bound[1] if isinstance(bound, tuple) else value <= bound)
    assert done.remaining[MASK].tolist() == expected
    assert 0 < sum(expected) < len(expected)
    assert not done.remaining[~MASK].any()
    assert done.weights is None
    statistic = rejection_statistic(torch.where(MASK, TRAINER - ENGINE, 0.0), MASK, option)
    assert flat(rows_of(statistic)) == pytest.approx(flat([slow_statistic(option, row) for row in LOG_RATIOS]))
    assert done.metrics["mismatch/rejected_tokens"] == pytest.approx(1 - np.mean(expected))


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.endswith("k1")])
@settings(max_examples=number_of(30))
@given(low=st.floats(0.2, 0.99), high=st.floats(1.01, 5.0), seed=st.integers(0, 2**16))
def test_k1_bounds_engine_over_trainer_at_both_ends(option: str, low: float, high: float, seed: int) -> None:
    """Random rows against a loop over the probabilities themselves; the bounds of the weights are about the inverse."""
    draw = torch.Generator().manual_seed(seed)
    trainer, engine = (torch.rand(4, 5, generator=draw, dtype=torch.float64) * -1.5 for _ in range(2))
    mask = torch.rand(4, 5, generator=draw) < 0.8
    kept = correct(trainer, engine, mask, correction(rejection={option: (low, high)})).remaining
    for row in range(4):
        ratios = [float(torch.exp(engine[row, t] - trainer[row, t])) for t in range(5) if mask[row, t]]
        product = math.prod(ratios)
        of_row = product ** (1 / max(len(ratios), 1)) if option.startswith("seq_mean") else product
        of_row = max(ratios, default=1.0) if option.startswith("seq_max") else of_row
        judged = ratios if option.startswith("token") else [of_row] * len(ratios)
        assert kept[row][mask[row]].tolist() == [low <= ratio <= high for ratio in judged]
    weights = correct(trainer, engine, mask, correction(weights="token", threshold=(low, high), outside="mask")).weights
    assert weights is not None
    expected = torch.exp(trainer - engine)
    assert weights.eq(0).equal(~(mask & (expected >= low) & (expected <= high)))


def test_a_token_must_pass_every_option() -> None:
    one, two = {"token_k1": 1.3}, {"seq_max_k2": 0.1}
    kept = [correct(TRAINER, ENGINE, MASK, correction(rejection=said)).remaining for said in (one, two, {**one, **two})]
    assert kept[2].equal(kept[0] & kept[1])
    assert not kept[2].equal(kept[0])
    assert not kept[2].equal(kept[1])


def test_bounds_on_a_sum_refuse_long_sequences_and_the_log_shows_it() -> None:
    """The same gap at every token: no length is refused by the mean, the long ones are by the sum."""
    mask = torch.ones(4, 8).bool()
    mask[:2, 2:] = False
    engine = torch.zeros(4, 8)
    by_sum = correct(engine + 0.1, engine, mask, correction(rejection={"seq_sum_k1": 1.5}))
    by_mean = correct(engine + 0.1, engine, mask, correction(rejection={"seq_mean_k1": 1.5}))
    assert by_sum.remaining.any(-1).tolist() == [True, True, False, False]
    assert by_sum.metrics["mismatch/rejected_length"] == pytest.approx(8 / 5)
    assert by_mean.remaining.equal(mask)
    assert by_mean.metrics["mismatch/rejected_length"] == 1.0


# --------------------------------------------------------------------------- metrics


def test_the_effective_sample_size_of_two_kinds_of_token() -> None:
    """Half of the tokens with ratio 1/2, half with 3/2: 1^2 / (0.25 + 2.25) * 2 = 0.8. Sequences: 1/4, 3/4, 9/4."""
    engine, mask = torch.zeros(4, 2), torch.ones(4, 2).bool()
    trainer = torch.tensor([[0.5, 0.5], [0.5, 1.5], [1.5, 0.5], [1.5, 1.5]]).log()
    found = checked(mismatch(trainer, engine, mask))
    assert found["mismatch/ess"] == pytest.approx(0.8)
    assert found["mismatch/ratio"] == pytest.approx(1.0)
    assert found["mismatch/chi2"] == pytest.approx(0.25)
    assert found["mismatch/sequence_ess"] == pytest.approx(1 / ((1 / 16 + 9 / 16 + 9 / 16 + 81 / 16) / 4))
    said = checked(correct(trainer, engine, mask, correction(weights="token", threshold=None)).metrics)
    assert said["mismatch/weight/ess"] == pytest.approx(0.8)
    assert said["mismatch/weight/outside"] == 0.0


def test_mismatch_metrics_are_their_definitions() -> None:
    found = checked(mismatch(TRAINER, ENGINE, MASK))
    tokens = flat(LOG_RATIOS)
    pairs = [(t, e) for t, e in zip(rows_of(TRAINER), rows_of(ENGINE), strict=True) if t]
    gaps = [np.mean(e) - np.mean(t) for t, e in pairs]
    assert found["mismatch/kl"] == pytest.approx(np.mean([math.exp(x) - 1 - x for x in tokens]))
    assert found["mismatch/kl_k1"] == pytest.approx(-np.mean(tokens))
    assert found["mismatch/log_prob_max"] == pytest.approx(max(map(abs, tokens)))
    assert found["mismatch/perplexity"] == pytest.approx(np.mean([math.exp(-np.mean(t)) for t, _ in pairs]))
    assert found["mismatch/perplexity_engine"] == pytest.approx(np.mean([math.exp(-np.mean(e)) for _, e in pairs]))
    assert found["mismatch/perplexity_ratio"] == pytest.approx(np.mean([math.exp(gap) for gap in gaps]))
    assert found["mismatch/log_perplexity_gap_above"] == pytest.approx(max(gaps))
    assert found["mismatch/log_perplexity_gap_below"] == pytest.approx(-min(gaps))
    assert found["mismatch/sequence_chi2"] == pytest.approx(
        np.mean([math.exp(2 * sum(r)) - 1 for r in LOG_RATIOS if r])
    )


EVERYTHING = {
    "weights": "sequence",
    "threshold": 1.3,
    "normalise": True,
    "rejection": {"token_k1": 1.4, "seq_mean_k3": 0.1},
}


def test_padding_and_row_order_change_neither_weights_nor_metrics() -> None:
    whole = correct(TRAINER, ENGINE, MASK, correction(**EVERYTHING))
    order = [3, 0, 4, 2, 1]
    wide = [
        torch.nn.functional.pad(t[order], (0, 3), value=v) for t, v in ((TRAINER, math.nan), (ENGINE, 7.0), (MASK, 0))
    ]
    again = correct(*wide, correction(**EVERYTHING))  # pyright: ignore[reportArgumentType]
    assert whole.weights is not None
    assert again.weights is not None
    torch.testing.assert_close(again.weights[:, :5], whole.weights[order], rtol=1e-12, atol=0)
    assert again.weights[:, 5:].eq(0).all()
    assert again.remaining[:, :5].equal(whole.remaining[order])
    assert checked(again.metrics) == pytest.approx(checked(whole.metrics), rel=1e-12)
    assert mismatch(*wide) == pytest.approx(mismatch(TRAINER, ENGINE, MASK), rel=1e-12)


@pytest.mark.parametrize("outside", ["truncate", "mask", "mask_sequence"])
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_extreme_ratios_stay_finite(gap: float, outside: str) -> None:
    for level in ("token", "sequence"):
        said = {**EVERYTHING, "weights": level, "outside": outside, "rejection": dict.fromkeys(OPTIONS, 2.0)}
        done = correct((ENGINE + gap).float(), ENGINE.float(), MASK, correction(**said))
        assert done.weights is not None
        assert torch.isfinite(done.weights).all()
        assert not done.remaining.any()
        assert all(map(math.isfinite, checked(done.metrics).values()))
    assert all(map(math.isfinite, mismatch((ENGINE + gap).float(), ENGINE.float(), MASK).values()))


def test_nothing_to_compare_is_nothing_to_report() -> None:
    nothing = torch.zeros_like(MASK)
    done = correct(TRAINER, ENGINE, nothing, correction(**EVERYTHING))
    assert done.weights is not None
    assert done.weights.eq(0).all()
    assert (done.remaining.any(), done.metrics, mismatch(TRAINER, ENGINE, nothing)) == (False, {}, {})


# --------------------------------------------------------------------------- on a batch, and in a loss


def batch_of(engine: Tensor = ENGINE, mask: Tensor = MASK, experts: Sequence[int] = (), reward: Any = None) -> Batch:
    """The rows as experiences of one task; `experts` were written by somebody else."""
    experiences = [
        Experience(
            np.zeros(mask.shape[1]),
            mask[row].numpy(),
            torch.where(mask, engine, 0.0)[row].float().numpy(),
            np.full(mask.shape[1], EXPERT_VERSION if row in experts else 0),
            "task",
            row,
            {"exact": float(row if reward is None else reward[row])},
        )
        for row in range(len(mask))
    ]
    return Batch(tuple(experiences))


def as_rows(values: Tensor, mask: Tensor = MASK) -> list[np.ndarray]:
    return [row.float().numpy() for row in torch.where(mask, values, 0.0)]


def grid(arrays: Sequence[Any]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(row)) for row in arrays])


def test_an_expert_s_tokens_weigh_one_and_are_never_rejected() -> None:
    batch, kept = corrected(batch_of(experts=(0, 4)), TRAINER, correction(**EVERYTHING))
    weights, own = grid(batch.columns["rollout_is_weights"]), MASK.clone()
    own[[0, 4]] = False
    alone = correct(TRAINER, ENGINE.float(), own, correction(**EVERYTHING))
    assert alone.weights is not None
    assert weights[[0, 4]][MASK[[0, 4]]].eq(1).all()
    assert weights[~MASK].eq(0).all()
    torch.testing.assert_close(weights[own], alone.weights[own])
    assert grid(kept).equal(alone.remaining | (MASK & ~own))
    assert batch.metrics == pytest.approx(alone.metrics)


def parts_of(
    objective: Any, batch: Batch, current: Tensor, cuts: Sequence[Sequence[int]]
) -> tuple[Tensor, dict[str, float]]:
    """(gradient by the current log-probabilities, metrics as a learner adds them up) of micro-batches."""
    batch = objective.select(batch.with_columns(log_prob=as_rows(current)), 0)
    mask = grid([e.response_mask for e in batch.experiences])
    version = grid([e.policy_version for e in batch.experiences])
    experts = mask & (version == EXPERT_VERSION)
    totals = LossDenominators(
        int(mask.sum()),
        int(mask.any(-1).sum()),
        5,
        expert_tokens=int(experts.sum()),
        expert_sequences=int(experts.any(-1).sum()),
    )
    columns = {name: grid(batch.columns[name]) for name in objective.needs}
    columns["rollout_log_prob"] = grid([e.rollout_log_prob for e in batch.experiences])
    at = torch.where(mask, current, 0.0).requires_grad_()
    outputs: list[LossOutputs] = []
    for cut in map(list, cuts):
        inputs = LossInputs(mask[cut], version[cut], {n: c[cut] for n, c in columns.items()}, at[cut])
        outputs.append(objective.loss(inputs, totals))
    (gradient,) = torch.autograd.grad(sum((done.loss for done in outputs), torch.zeros(())), at)
    means = {key: sum(float(done.sums[key]) for done in outputs) / totals.tokens for key in outputs[0].sums}
    maxima = {key: max(float(done.maxima[key]) for done in outputs) for key in outputs[0].maxima}
    return gradient, {**objective.derived(means | maxima), **batch.metrics}


ADVANTAGE_COLUMN = {"advantages": as_rows(ADVANTAGES)}


@pytest.mark.parametrize("experts", [(), (1, 4)])
def test_what_micro_batches_report_is_what_the_whole_batch_says(experts: tuple[int, ...]) -> None:
    batch = batch_of(experts=experts).with_columns(**ADVANTAGE_COLUMN)
    own = MASK.clone()
    own[list(experts)] = False
    expected = mismatch(TRAINER, ENGINE.float(), own)
    for cuts in ([range(5)], [[2], [4, 0], [1], [3]]):
        _, found = parts_of(policy_objective("reinforce"), batch, TRAINER, cuts)
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("outside", ["truncate", "mask", "mask_sequence"])
def test_weights_made_in_the_loss_are_those_made_ahead(level: str, outside: str) -> None:
    said = correction(weights=level, threshold=1.3, outside=outside, against="current")
    objective = policy_objective("reinforce", terms={"correction": said})
    assert objective.looks_at == frozenset()
    batch = batch_of(experts=(1,)).with_columns(**ADVANTAGE_COLUMN)
    gradient, found = parts_of(objective, batch, TRAINER, [[0, 1], [4, 2, 3]])
    ahead, _ = corrected(batch, TRAINER, said)
    weights = grid(ahead.columns["rollout_is_weights"])
    expected = torch.where(MASK, -ADVANTAGES * weights / MASK.sum(), 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    for key in ("mismatch/weight/mean", "mismatch/weight/outside"):
        assert found[key] == pytest.approx(ahead.metrics[key], rel=1e-5)


def test_rejected_tokens_leave_the_counts_and_masked_ones_stay_in_them() -> None:
    """Trap: whether survivors are up-weighted. Same tokens left out, two means."""
    batch = batch_of().with_columns(**ADVANTAGE_COLUMN)
    out = correction(rejection={"token_k1": 1.3}, against="current")
    zero = correction(weights="token", threshold=1.3, outside="mask", against="current")
    kept = correct(TRAINER, ENGINE.float(), MASK, out).remaining
    gone, _ = parts_of(policy_objective("reinforce", terms={"correction": out}), batch, TRAINER, [range(5)])
    weighed, _ = parts_of(policy_objective("reinforce", terms={"correction": zero}), batch, TRAINER, [range(5)])
    assert 0 < int(kept.sum()) < int(MASK.sum())
    torch.testing.assert_close(gone, torch.where(kept, -ADVANTAGES / kept.sum(), 0.0), rtol=1e-5, atol=1e-8)
    ratio = torch.where(MASK, TRAINER - ENGINE, 0.0).exp()
    expected = torch.where(kept, -ADVANTAGES * ratio / MASK.sum(), 0.0)
    torch.testing.assert_close(weighed, expected, rtol=1e-5, atol=1e-8)


def test_what_is_rejected_ahead_of_an_update_is_measured_before_it_goes() -> None:
    said = correction(rejection={"token_k1": 1.2}, against="current")
    objective = policy_objective("ppo", terms={"correction": said})
    assert objective.looks_at == {"log_prob"}
    batch = batch_of().with_columns(**ADVANTAGE_COLUMN, old_log_prob=as_rows(ENGINE))
    _, found = parts_of(objective, batch, TRAINER, [range(5)])
    expected = mismatch(TRAINER.float(), ENGINE.float(), MASK)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    kept = correct(TRAINER.float(), ENGINE.float(), MASK, said).remaining
    assert found["mismatch/rejected_tokens"] == pytest.approx(1 - int(kept.sum()) / int(MASK.sum()))
    everything = objective.select(batch.with_columns(log_prob=as_rows(ENGINE + 3)), 0)
    assert everything.num_response_tokens == 0
    assert everything.metrics["mismatch/rejected_tokens"] == 1.0


# --------------------------------------------------------------------------- an algorithm's step


def algorithm(preset: Any = GRPO, **said: Any) -> GroupAlgorithm:
    return build_algorithm(preset.configure({"kind": "reinforce" if preset is REINFORCE else "grpo", **said}))


def test_a_rejected_member_still_counts_as_what_others_are_compared_with() -> None:
    batch = batch_of(reward=[1.0, 0.0, 0.0, 0.0, 0.0])
    old = ENGINE.clone()
    old[0] += 2.0  # the only one with a reward
    grpo = algorithm(correction={"rejection": {"seq_mean_k1": 1.5}}, advantage={"norm_by_std": False})
    assert grpo.needs == {"old"}
    done, metrics = grpo.advantages(batch.with_columns(old_log_prob=as_rows(old)))
    assert [e.response_mask.any() for e in done.experiences] == [False, True, False, True, True]
    for row in (1, 3, 4):
        np.testing.assert_allclose(done.columns["advantages"][row][MASK[row]], -0.2, rtol=1e-6)
    assert checked(metrics)["mismatch/rejected_sequences"] == pytest.approx(1 / 4)
    assert metrics["mismatch/log_prob_max"] == pytest.approx(2.0)


def test_recomputed_log_probs_are_measured_over_the_whole_step_without_a_correction() -> None:
    plain = algorithm(old_log_prob="recompute")
    done, metrics = plain.advantages(batch_of().with_columns(old_log_prob=as_rows(TRAINER)))
    said = {key: value for key, value in metrics.items() if key.startswith("mismatch/")}
    assert said == pytest.approx(mismatch(TRAINER.float(), ENGINE.float(), MASK))
    assert "rollout_is_weights" not in done.columns


def test_fresh_tokens_weigh_exactly_one_and_stale_ones_do_not() -> None:
    """Trap: a ratio that is one by construction hides that the batch is stale."""
    for name in ("decoupled_token_is", "decoupled_seq_is"):
        which = algorithm(correction=name)
        for trainer, is_fresh in ((ENGINE, True), (TRAINER, False)):
            done, metrics = which.advantages(batch_of().with_columns(old_log_prob=as_rows(trainer)))
            weights = grid(done.columns["rollout_is_weights"])[MASK]
            assert bool(weights.eq(1).all()) == is_fresh
            assert (metrics["mismatch/ess"] == 1) == is_fresh
    bypass = algorithm()
    done, _ = bypass.advantages(batch_of())
    old = grid(done.columns["old_log_prob"])
    assert not torch.allclose(old[MASK], TRAINER[MASK].float())  # the ratio itself tells


# --------------------------------------------------------------------------- three policies


REWARD = {0: -0.5, 1: 1.0}
"""A bandit with two arms: the advantage of each. A policy is its probability of arm 1, the sigmoid of one logit."""


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def bandit_gradient(behaviour: float, proximal: float, current: float, pulls: int = 20, **said: Any) -> float:
    """The gradient of the loss by the current logit, over pulls in the proportions of the behaviour policy."""
    which = algorithm(aggregate="token-mean", **said)
    arms = [1] * round(pulls * behaviour) + [0] * round(pulls * (1 - behaviour))
    mask = torch.tensor([[False, True]] * pulls)

    def column(p: float) -> Tensor:
        return torch.tensor([[0.0, math.log(p if arm else 1 - p)] for arm in arms], dtype=torch.float64)

    batch = batch_of(column(behaviour), mask).with_columns(old_log_prob=as_rows(column(proximal), mask))
    batch, _ = which.advantages(batch)
    batch = batch.with_columns(advantages=[np.array([0.0, REWARD[arm]]) for arm in arms])
    (objective,) = which.objectives
    theta = torch.tensor(logit(current), dtype=torch.float64, requires_grad=True)
    sign = torch.tensor([[0.0, 1.0 if arm else -1.0] for arm in arms], dtype=torch.float64)
    log_prob = torch.where(mask, torch.nn.functional.logsigmoid(sign * theta), 0.0)
    columns = {name: grid(batch.columns[name]).double() for name in objective.needs}
    columns["rollout_log_prob"] = grid([e.rollout_log_prob for e in batch.experiences]).double()
    done = objective.loss(
        LossInputs(mask, torch.zeros(mask.shape), columns, log_prob), LossDenominators(pulls, pulls, 1)
    )
    return float(torch.autograd.grad(done.loss, theta)[0])


def score(current: float) -> dict[int, float]:
    """The derivative of the log-probability of each arm by the logit."""
    return {0: -current, 1: 1 - current}


def test_decoupled_ppo_has_the_gradient_of_the_current_policy() -> None:
    """Within all bounds the weights turn pulls of the behaviour policy into pulls of the current one."""
    b, p, c = 0.35, 0.5, 0.55
    on_policy = -sum((c if arm else 1 - c) * REWARD[arm] * score(c)[arm] for arm in (0, 1))
    assert bandit_gradient(b, p, c, correction="decoupled_token_is") == pytest.approx(on_policy, rel=1e-6)
    # Without the weights the two policies behind the ratio are not the one that pulled.
    no_weights = -sum(
        (b if a else 1 - b) * (c / p if a else (1 - c) / (1 - p)) * REWARD[a] * score(c)[a] for a in (0, 1)
    )
    assert bandit_gradient(b, p, c, old_log_prob="recompute") == pytest.approx(no_weights, rel=1e-6)
    assert abs(on_policy - no_weights) > 0.01
    # Clipping around the behaviour policy: both arms are more than a fifth away from it already.
    assert bandit_gradient(b, p, c, old_log_prob="rollout") == 0.0


def test_decoupled_ppo_clips_around_the_proximal_policy() -> None:
    """Near the behaviour policy and far from the proximal one: nothing moves on; the other way round: it does."""
    assert bandit_gradient(0.6, 0.45, 0.65, correction="decoupled_token_is") == 0.0
    assert bandit_gradient(0.35, 0.6, 0.65, correction="decoupled_token_is") != 0.0


def test_decoupled_weights_are_those_of_the_proximal_policy_truncated() -> None:
    b, p, c = 0.2, 0.5, 0.5
    weight = {1: min(p / b, 2.0), 0: min((1 - p) / (1 - b), 2.0)}
    assert weight[1] == 2.0
    expected = -sum((b if arm else 1 - b) * weight[arm] * REWARD[arm] * score(c)[arm] for arm in (0, 1))
    assert bandit_gradient(b, p, c, correction="decoupled_token_is") == pytest.approx(expected, rel=1e-6)


def test_reinforce_with_weights_of_the_current_policy_has_its_gradient() -> None:
    b, c = 0.35, 0.55
    on_policy = -sum((c if arm else 1 - c) * REWARD[arm] * score(c)[arm] for arm in (0, 1))
    said = {"policy_loss": {"kind": "reinforce"}, "correction": "bypass_token_is"}
    assert bandit_gradient(b, 0.9, c, **said) == pytest.approx(on_policy, rel=1e-6)
    plain = {"policy_loss": {"kind": "reinforce"}}
    assert abs(bandit_gradient(b, 0.9, c, **plain) - on_policy) > 0.01
