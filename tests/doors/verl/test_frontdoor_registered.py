"""Advantage estimators and policy losses with verl's signatures and decorators."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algebra import policy_objective
from tests.doors.e2e import verl_user
from tests.failing import refused
from trivium.algorithms import AdvantageInputs, PolicyObjective, policy_inputs
from trivium.config import merged
from trivium.foundation.errors import ConfigError, DataError
from trivium.foundation.registry import name_of
from trivium.frontdoors.verl import get_adv_estimator_fn, get_policy_loss_fn, register_adv_est, register_policy_loss
from trivium.frontdoors.verl.objects.core_algos import RegistryError
from trivium.frontdoors.verl.registered import computed, estimated
from trivium.frontdoors.verl.translation import settings_of, translated
from trivium.models.heads.loss import LossDenominators, LossInputs

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CONFIG = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "policy_loss": {"my_clip_high": 0.28}}
MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
"""Prompts of several lengths, a hole, a row without a trained token."""


def objectives(mode: str, weighted: bool) -> tuple[PolicyObjective, PolicyObjective]:
    """Returns (objective with the user's loss, objective with the shipped loss)."""
    options = {"function": "tests.doors.e2e.verl_user:my_loss", "loss_agg_mode": mode, "config": CONFIG}
    mine = policy_objective("trivium.frontdoors.verl.registered:computed", mode, weighted=weighted, **options)
    ships = policy_objective("ppo", mode, weighted=weighted, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    return mine, ships


def step() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    names = ("log_prob", "old_log_prob", "advantages", "rollout_is_weights")
    tensors = {name: torch.randn(MASK.shape, generator=draw, dtype=torch.float64) for name in names}
    tensors["rollout_is_weights"] = tensors["rollout_is_weights"].abs()
    return {name: torch.where(MASK, values, 0.0) for name, values in tensors.items()}


def loss_of(objective: PolicyObjective, log_prob: torch.Tensor, parts: list[slice]) -> torch.Tensor:
    """The loss of the step, cut into micro-batches."""
    tensors, counts = step(), LossDenominators(int(MASK.sum()), int(MASK.any(-1).sum()), 9)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        columns = {name: values[part] for name, values in tensors.items() if name in objective.needs}
        columns["rollout_log_prob"] = tensors["old_log_prob"][part]
        version = torch.zeros(MASK[part].shape, dtype=torch.int32)
        inputs = LossInputs(MASK[part], version, columns, log_prob=log_prob[part])
        total = total + objective.loss(inputs, counts).loss
    return total


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_users_loss_is_averaged_over_the_step_however_it_is_cut(mode: str, weighted: bool) -> None:
    """Compares with the shipped loss, which golden values check, and with finite differences."""
    mine, ships = objectives(mode, weighted)
    log_prob = step()["log_prob"].requires_grad_()
    expected = loss_of(ships, log_prob, [slice(0, 4)])
    (wanted,) = torch.autograd.grad(expected, log_prob)
    for parts in ([slice(0, 4)], [slice(0, 1), slice(1, 4)], [slice(row, row + 1) for row in range(4)]):
        loss = loss_of(mine, log_prob, parts)
        torch.testing.assert_close(loss, expected)
        (gradient,) = torch.autograd.grad(loss, log_prob)
        torch.testing.assert_close(gradient, wanted)
    for row, at in ((0, 2), (1, 4), (2, 4)):
        moved = torch.zeros_like(log_prob)
        moved[row, at] = 1e-6
        with torch.no_grad():
            up, down = (loss_of(mine, log_prob + sign * moved, [slice(0, 2), slice(2, 4)]) for sign in (1, -1))
        assert float(up - down) / 2e-6 == pytest.approx(float(wanted[row, at]), rel=1e-5, abs=1e-9)


def test_a_users_metrics_are_means_over_tokens() -> None:
    mine, _ = objectives("token-mean", False)
    tensors, counts = step(), LossDenominators(int(MASK.sum()), 3, 9)
    columns = {name: tensors[name] for name in ("old_log_prob", "advantages")}
    columns["rollout_log_prob"] = tensors["old_log_prob"]
    inputs = LossInputs(MASK, torch.zeros(MASK.shape, dtype=torch.int32), columns, log_prob=tensors["log_prob"])
    largest = (tensors["log_prob"] - tensors["old_log_prob"]).exp()[MASK].max()
    assert float(mine.loss(inputs, counts).sums["mine/ratio_max"]) / counts.tokens == pytest.approx(float(largest))


def test_a_users_estimator_sees_responses_from_their_first_token_on() -> None:
    rewards = torch.zeros(4, 6, dtype=torch.float64)
    rewards[0, 4], rewards[1, 5], rewards[2, 4] = 1.0, 0.25, 0.5
    x = AdvantageInputs(rewards, MASK, torch.tensor([0, 0, 0, 0]), torch.arange(4))
    mine = estimated(x, function="tests.doors.e2e.verl_user:my_advantages")
    scores = torch.tensor([1.0, 0.25, 0.5, 0.0], dtype=torch.float64)
    wanted = ((scores - scores.mean()) / (scores.std() + 1e-6)).unsqueeze(-1) * MASK
    torch.testing.assert_close(mine.advantages, wanted)
    torch.testing.assert_close(mine.returns, wanted)
    seen: dict[str, Any] = {}

    @register_adv_est("looks")
    def looks(token_level_rewards: Any, response_mask: Any, config: Any, **more: Any) -> Any:
        seen.update(rewards=token_level_rewards, mask=response_mask, config=config, **more)
        return token_level_rewards, token_level_rewards.float()

    estimated(x, function=name_of(looks), config={"gamma": 0.5, "inner": {"a": 1}})
    assert seen["mask"].int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert seen["rewards"][1].tolist() == [0, 0, 0, 0, 0.25]
    assert (seen["config"].gamma, seen["config"].inner.a, seen["config"].get("lam", 1)) == (0.5, 1, 1)
    assert list(seen["index"]) == ["0"] * 4
    with pytest.raises(AttributeError, match="no 'lam'"):
        _ = seen["config"].lam


class Names(Enum):
    MINE = "by_enum"


def test_names_are_given_once_and_found_again() -> None:
    @register_adv_est(Names.MINE)
    def one(token_level_rewards: Any, response_mask: Any, config: Any = None) -> Any: ...

    assert get_adv_estimator_fn("by_enum") is get_adv_estimator_fn(Names.MINE) is one
    assert get_policy_loss_fn("mine") is verl_user.my_loss
    for decorator, name in ((register_adv_est, "grpo"), (register_policy_loss, "vanilla"), (register_adv_est, "mine")):
        with refused(RegistryError, f"'{name}'"):
            decorator(name)(lambda: None)
    with refused(RegistryError, "'yours'", "@register_policy_loss"):
        get_policy_loss_fn("yours")


def test_functions_that_return_something_else_are_named() -> None:
    @register_policy_loss("per_token")
    def per_token(log_prob: Any, advantages: Any) -> Any:
        return log_prob * advantages

    x = policy_inputs(step()["log_prob"], MASK, old_log_prob=step()["old_log_prob"], advantages=step()["advantages"])
    with refused(DataError, name_of(per_token), "agg_loss"):
        computed(x, function=name_of(per_token))

    @register_policy_loss("greedy")
    def greedy(log_prob: Any, values: Any) -> Any: ...

    with refused(ConfigError, name_of(greedy), "values"):
        computed(x, function=name_of(greedy))


def config(**more: Any) -> dict[str, Any]:
    base = {
        "data": {"train_files": "train.parquet", "train_batch_size": 4},
        "actor_rollout_ref": {
            "model": {"path": "model"},
            "actor": {"ppo_mini_batch_size": 4, "policy_loss": {"loss_mode": "mine", "my_clip_high": 0.28}},
            "rollout": {"name": "torch"},
        },
        "algorithm": {"adv_estimator": "mine", "gamma": 0.9, "my_epsilon": 0.1},
    }
    return merged(base, more)


def test_a_config_names_them_and_gives_them_keys_of_their_own() -> None:
    section = translated(settings_of(config()), rows=8, has_validation=False, device="cpu")["algorithm"]
    assert section["advantage"]["config"]["my_epsilon"] == 0.1
    assert section["advantage"]["config"]["gamma"] == 0.9  # verl refuses none of its own keys to a user's function
    assert section["policy_loss"]["config"]["policy_loss"]["my_clip_high"] == 0.28
    assert section["policy_loss"]["config"]["clip_ratio"] == 0.2
    assert section["policy_loss"]["function"] == "tests.doors.e2e.verl_user:my_loss"
    with refused(ConfigError, "algorithm.my_epsilon"):
        settings_of(config(algorithm={"adv_estimator": "grpo"}))
    peer_config = config(actor_rollout_ref={"actor": {"policy_loss": {"loss_mode": "yours", "my_clip_high": None}}})
    del peer_config["actor_rollout_ref"]["actor"]["policy_loss"]["my_clip_high"]
    with refused(ConfigError, "actor_rollout_ref.actor.policy_loss.loss_mode", "@register_policy_loss('yours')"):
        translated(settings_of(peer_config), rows=8, has_validation=False, device="cpu")


def test_a_file_without_the_decorator_is_told_which_one(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def loss(log_prob): ...\n")
    with refused(ConfigError, "@register_policy_loss"):
        settings_of(config(actor_rollout_ref={"actor": {"policy_loss": {"loss_mode": f"{tmp_path}/plain.py:loss"}}}))
    with refused(ConfigError, "@register_adv_est"):
        settings_of(config(algorithm={"adv_estimator": f"{tmp_path}/plain.py:loss"}))
    text = "from trivium.frontdoors.verl import register_policy_loss\n"
    (tmp_path / "mine.py").write_text(text + "@register_policy_loss('in_a_file')\ndef loss(log_prob): ...\n")
    peer_config = config(actor_rollout_ref={"actor": {"policy_loss": {"loss_mode": f"{tmp_path}/mine.py:loss"}}})
    section = translated(settings_of(peer_config), rows=8, has_validation=False, device="cpu")["algorithm"]
    assert section["policy_loss"]["function"] == f"{tmp_path}/mine.py:loss"
