"""The losses of the Tinker SDK: slow loops from the formulas of its documentation, and finite differences.

https://tinker-docs.thinkingmachines.ai/losses, and /tinker/losses/gspo: every loss is a sum over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from failing import refused

from trivium.foundation.errors import DataError
from trivium.models.heads.loss import LossInputs
from trivium.serving.tinker.losses import FORMULAS, DatumLoss, loss_batch
from trivium.training.batching import count

Datum = tuple[np.ndarray, dict[str, np.ndarray]]
RNG = np.random.default_rng(3)


def datum(length: int, prompt: int) -> Datum:
    """Tokens with a prompt, which has no advantages and log-probabilities of 0, as the cookbook pads it."""
    tokens = RNG.integers(0, 50, length + 1)
    sampled = np.arange(length) >= prompt
    log_prob = np.where(sampled, RNG.normal(-1.5, 1.0, length), 0.0).astype(np.float32)
    advantages = np.where(sampled, RNG.normal(0, 2, length), 0.0).astype(np.float32)
    inputs = {"target_tokens": tokens[1:], "logprobs": log_prob, "advantages": advantages}
    return tokens[:-1].astype(np.int32), inputs


DATA = [datum(7, 3), datum(4, 1), datum(9, 0)]
CURRENT = [np.clip(each["logprobs"] + RNG.normal(0, 0.4, len(each["logprobs"])), -9, -0.01) for _, each in DATA]


def evaluated(
    name: str, options: Mapping[str, float], data: Sequence[Datum], current: Sequence[np.ndarray]
) -> tuple[float, list[np.ndarray]]:
    """The loss of the product in float64, and its gradient by the log-probability of each target."""
    batch, objective = loss_batch(name, options, data)
    length = max(batch.lengths)
    grid = torch.zeros(len(data), length, *np.shape(current[0])[1:], dtype=torch.float64)
    mask = torch.zeros(len(data), length, dtype=torch.bool)
    for row, values in enumerate(current):
        grid[row, 1 : 1 + len(values)] = torch.from_numpy(np.asarray(values, np.float64))
        mask[row, 1 : 1 + len(values)] = True
    grid.requires_grad_()
    columns = {}
    for key, arrays in batch.columns.items():
        columns[key] = torch.zeros(len(data), length, *arrays[0].shape[1:], dtype=torch.float64)
        for row, array in enumerate(arrays):
            columns[key][row, : len(array)] = torch.from_numpy(array.astype(np.float64))
    several = {"candidate_log_prob": grid} if objective.several else {"log_prob": grid}
    inputs = LossInputs(mask, torch.zeros_like(mask, dtype=torch.int32), columns, **several)
    outputs = objective.loss(inputs, count(batch, 1))
    outputs.loss.backward()
    assert grid.grad is not None
    return outputs.loss.item(), [grid.grad[row, 1 : 1 + len(values)].numpy() for row, values in enumerate(current)]


def by_tokens(term: Callable[..., float]) -> Callable[..., float]:
    """The sum of a term over all tokens: (current, sampling log-probability, advantage, options, frozen)."""

    def loss(
        data: Sequence[Datum], current: Sequence[np.ndarray], options: Mapping[str, float], frozen: Sequence[np.ndarray]
    ) -> float:
        total = 0.0
        for (_, inputs), now, held in zip(data, current, frozen, strict=True):
            for t in range(len(now)):
                total += term(
                    float(now[t]), float(inputs["logprobs"][t]), float(inputs["advantages"][t]), options, float(held[t])
                )
        return total

    return loss


def clipped(ratio: float, options: Mapping[str, float]) -> float:
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    return min(max(ratio, low), high)


def gspo(
    data: Sequence[Datum], current: Sequence[np.ndarray], options: Mapping[str, float], frozen: Sequence[np.ndarray]
) -> float:
    total = 0.0
    for (_, inputs), now, held in zip(data, current, frozen, strict=True):
        inside = [t for t in range(len(now)) if inputs["sequence_ratio_mask"][t]]
        mean = sum(float(held[t]) - float(inputs["logprobs"][t]) for t in inside) / len(inside)
        for t in range(len(now)):
            ratio, advantage = math.exp(mean + float(now[t]) - float(held[t])), float(inputs["advantages"][t])
            total -= min(ratio * advantage, clipped(ratio, options) * advantage)
    return total


ORACLES: dict[str, Callable[..., float]] = {
    "importance_sampling": by_tokens(lambda now, q, a, o, held: -math.exp(now - q) * a),
    "ppo": by_tokens(lambda now, q, a, o, held: -min(math.exp(now - q) * a, clipped(math.exp(now - q), o) * a)),
    "cispo": by_tokens(lambda now, q, a, o, held: -clipped(math.exp(held - q), o) * now * a),
    "dro": by_tokens(lambda now, q, a, o, held: -(now * a - 0.5 * o.get("beta", 0.05) * (now - q) ** 2)),
    "gspo": gspo,
}


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("changed", [False, True])
def test_a_policy_loss_is_the_formula_of_the_documentation(name: str, changed: bool) -> None:
    own = {"dro": {"beta": 0.3}, "importance_sampling": {}}
    options = own.get(name, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}) if changed else {}
    data = DATA
    if name == "gspo":
        data = [(tokens, {**each, "sequence_ratio_mask": (each["advantages"] != 0) * 1.0}) for tokens, each in DATA]
    loss, gradient = evaluated(name, options, data, CURRENT)
    assert loss == pytest.approx(ORACLES[name](data, CURRENT, options, CURRENT), rel=1e-6)
    for row, column in ((0, 4), (1, 2), (2, 0), (2, 8)):
        moved = [[each.astype(np.float64) for each in CURRENT] for _ in range(2)]
        for sign, each in zip((1, -1), moved, strict=True):
            each[row][column] += sign * 1e-6
        higher, lower = (ORACLES[name](data, each, options, CURRENT) for each in moved)
        assert gradient[row][column] == pytest.approx((higher - lower) / 2e-6, rel=1e-4, abs=1e-6)


def test_cross_entropy_is_weighted_by_the_caller_alone() -> None:
    data = [(tokens, {"target_tokens": each["target_tokens"], "weights": each["advantages"]}) for tokens, each in DATA]
    loss, gradient = evaluated("cross_entropy", {}, data, CURRENT)
    slow = sum(
        -float(w) * float(p)
        for (_, each), now in zip(data, CURRENT, strict=True)
        for w, p in zip(each["weights"], now, strict=True)
    )
    assert loss == pytest.approx(slow, rel=1e-6)
    assert all(np.allclose(row, -each["weights"]) for row, (_, each) in zip(gradient, data, strict=True))


def test_several_targets_of_a_token_have_a_weight_each() -> None:
    tokens, targets = np.arange(5, dtype=np.int32), RNG.integers(0, 50, (5, 3))
    weights, current = RNG.random((5, 3)).astype(np.float32), RNG.normal(-2, 1, (5, 3))
    loss, gradient = evaluated(
        "cross_entropy", {}, [(tokens, {"target_tokens": targets, "weights": weights})], [current]
    )
    assert loss == pytest.approx(-float((weights * current).sum()), rel=1e-6)
    assert np.allclose(gradient[0], -weights)


def test_stable_reinforce_is_reinforce_on_policy_and_stops_far_from_it() -> None:
    """The service does not publish its formula."""
    on_policy = [each["logprobs"] for _, each in DATA]
    _, gradient = evaluated("stable_reinforce", {}, DATA, on_policy)
    assert all(np.allclose(row, -each["advantages"]) for row, (_, each) in zip(gradient, DATA, strict=True))
    far = [np.where(each["advantages"] > 0, -1e-4, each["logprobs"]) for _, each in DATA]
    _, gradient = evaluated("stable_reinforce", {}, DATA, far)
    likely = [np.exp(each["logprobs"]) < 0.8 for _, each in DATA]
    for row, (_, each), moves in zip(gradient, DATA, likely, strict=True):
        assert not row[(each["advantages"] > 0) & moves].any()
    _, pulled = evaluated("stable_reinforce", {"kl_coeff": 0.5}, DATA, CURRENT)
    _, plain = evaluated("stable_reinforce", {}, DATA, CURRENT)
    for row, other, now, (_, each) in zip(pulled, plain, CURRENT, DATA, strict=True):
        assert np.allclose(row - other, 0.5 * (now - each["logprobs"]) * (each["advantages"] != 0), atol=1e-5)


def test_thresholds_may_differ_from_token_to_token() -> None:
    low, high = (np.full(len(now), value, np.float32) for now in CURRENT[:1] for value in (0.5, 1.0))
    tokens, inputs = DATA[0]
    own = [(tokens, {**inputs, "clip_low_threshold": low, "clip_high_threshold": high})]
    for name in ("ppo", "cispo"):
        one, _ = evaluated(name, {}, own, CURRENT[:1])
        other, _ = evaluated(name, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.0}, DATA[:1], CURRENT[:1])
        assert one == pytest.approx(other, rel=1e-9)


def test_data_have_the_same_inputs() -> None:
    tokens, inputs = DATA[0]
    with refused(DataError, "weights"):
        targets = {"target_tokens": inputs["target_tokens"]}
        loss_batch("cross_entropy", {}, [(tokens, targets), (tokens, {**targets, "weights": inputs["advantages"]})])


def test_targets_that_are_not_the_next_tokens_are_candidates() -> None:
    tokens, inputs = DATA[0]
    batch, objective = loss_batch("cross_entropy", {}, [(tokens, {"target_tokens": inputs["target_tokens"]})])
    assert "teacher_top" not in batch.columns
    other = inputs["target_tokens"].copy()
    other[0] = (other[0] + 1) % 50
    batch, objective = loss_batch("cross_entropy", {}, [(tokens, {"target_tokens": other})])
    assert batch.columns["teacher_top"][0][1:, 0, 0].tolist() == other.tolist()
    assert not objective.several
    assert isinstance(objective, DatumLoss)
    assert FORMULAS["cross_entropy"].function is None
