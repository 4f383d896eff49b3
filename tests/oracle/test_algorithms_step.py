"""From groups to columns: who is trained on, what is counted, where the reward lands, what the KL penalty does."""

import json
import statistics
from collections.abc import Mapping, Sequence

import episodes
import numpy as np
import pytest
import torch
from episodes import group
from failing import refused

from trivium.algorithms import GroupAlgorithm, build_algorithm
from trivium.algorithms.presets import GRPO, PPO, REINFORCE, RLOO, SFT
from trivium.foundation.errors import DataError
from trivium.foundation.metrics import checked
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.policy import ENGINE_S, REWARD_S, ROLLOUT_S
from trivium.types import EXPERT_VERSION, Batch, Failure, StopReason, Trajectory, Turn


def turn(prompt: Sequence[int], tokens: Sequence[int], stop: StopReason = StopReason.EOS, version: int = 3) -> Turn:
    return episodes.turn(prompt, tokens, -0.1 * np.arange(1, len(tokens) + 1), version, stop)


def trajectory(index: int, reward: float | None, *turns: Turn, failure: Failure | None = None) -> Trajectory:
    rewards: Mapping[str, float] = {} if reward is None else {"exact": reward}
    return Trajectory(index, turns or (turn([1, 2], [3, 4, 5]),), rewards, failure)


def algorithm(preset, **said: object) -> GroupAlgorithm:
    kinds = {id(GRPO): "grpo", id(PPO): "ppo", id(RLOO): "rloo", id(REINFORCE): "reinforce", id(SFT): "sft"}
    return build_algorithm(preset.configure({"kind": kinds[id(preset)], **said}))


FAILED = Failure("reward", "ValueError", "no number")


def test_groups_with_too_few_living_members_are_left_out_and_counted() -> None:
    groups = [
        group(0, trajectory(0, 1.0), trajectory(1, 0.0), trajectory(2, None, failure=FAILED)),
        group(1, trajectory(0, 1.0), trajectory(1, None, failure=FAILED)),
        group(2, trajectory(0, 0.7), trajectory(1, 0.7, turn([1], [2, 3, 4, 5, 6], StopReason.LENGTH))),
        group(3, trajectory(0, None, failure=Failure("deadline", "DeadlineExceeded", ""))),
    ]
    kept, metrics = algorithm(GRPO).filter(groups)
    assert [g.slot for g in kept] == [0, 2]
    rewards = [1.0, 0.0, 1.0, 0.7, 0.7]
    assert checked(metrics) == pytest.approx(
        {
            "rollout/groups": 4,
            "rollout/refused": 2,
            "rollout/refused/too_few_alive": 2,
            "rollout/trajectories": 4,
            "rollout/total": 8,
            "rollout/failed": 3,
            "rollout/failed/reward": 2,
            "rollout/failed/deadline": 1,
            "rollout/empty": 1.0,  # the turns have no text
            "rollout/most_common": 1.0,
            "rollout/response_tokens": 3.4,
            "rollout/response_tokens_max": 5,
            "rollout/response_tokens_min": 3,
            "rollout/prompt_tokens": 1.8,
            "rollout/prompt_tokens_max": 2,
            "rollout/prompt_tokens_min": 1,
            "rollout/truncated": 0.2,
            "rollout/aborted": 0,
            "rollout/turns": 1,
            "rollout/turns_max": 1,
            "rollout/turns_min": 1,
            "reward/mean": 0.68,
            "reward/trained_mean": 0.6,
            "reward/std": statistics.pstdev(rewards),
            "reward/min": 0,
            "reward/max": 1,
            "reward/equal_groups": 0.5,
            "reward/component/exact": 0.68,
        }
    )
    assert [g.slot for g in algorithm(REINFORCE).filter(groups)[0]] == [0, 1, 2]
    assert len(algorithm(GRPO).batch(kept)) == 4


def test_broken_off_and_empty_replies_are_counted_by_their_task_s_first_prompt() -> None:
    broken = trajectory(0, 0.0, turn([1, 2, 3], [4], StopReason.EOS), turn([1, 2, 3, 4, 5], [6], StopReason.ABORT))
    silent = trajectory(1, 0.0, turn([1], []))
    metrics = checked(algorithm(GRPO).filter([group(0, broken, silent, trajectory(2, 1.0), trajectory(3, 1.0))])[1])
    assert metrics["rollout/aborted"] == 0.5
    assert (metrics["rollout/prompt_tokens_max"], metrics["rollout/prompt_tokens_min"]) == (3, 1)
    assert (metrics["rollout/turns_max"], metrics["rollout/turns_min"], metrics["rollout/turns"]) == (2, 1, 1.25)
    assert metrics["rollout/forked"] == 0
    assert (metrics["rollout/response_tokens_min"], metrics["rollout/response_tokens_max"]) == (0, 3)


def test_a_step_in_which_everything_failed_is_described() -> None:
    for preset in (GRPO, PPO, SFT):
        kept, metrics = algorithm(preset).filter([group(0, trajectory(0, None, failure=FAILED))])
        assert (kept, checked(metrics)["rollout/failed"]) == ([], 1)
        batch = algorithm(preset).batch(kept)
        values = {"values": []} if preset is PPO else {}
        told = algorithm(preset).advantages(batch.with_columns(**values))[1]
        assert not any("advantage" in key or "return" in key for key in told)


def test_what_trained_tokens_are_worth_leaves_out_what_is_not_trained_on() -> None:
    ppo = algorithm(PPO, advantage={"whiten": False})
    batch = ppo.batch([group(0, trajectory(0, 1.0), trajectory(1, 0.0))])
    values = [np.array([9, 9, 0.9, 0.8, 0.7]), np.array([9, 9, 0.1, 0.1, 0.1])]
    done, metrics = ppo.advantages(batch.with_columns(values=values))
    told = checked(metrics)
    assert (told["train/value_max"], told["train/value_min"]) == (0.9, 0.1)
    assert told["train/value_mean"] == pytest.approx(0.45)
    for name, label in (("advantages", "advantage"), ("returns", "return")):
        numbers = np.concatenate(
            [row[e.response_mask] for row, e in zip(done.columns[name], done.experiences, strict=True)]
        )
        for kind in ("mean", "max", "min"):
            assert told[f"train/{label}_{kind}"] == pytest.approx(float(getattr(numbers, kind)()), abs=1e-7)


def test_nothing_left_is_a_batch_without_experiences() -> None:
    kept, metrics = algorithm(GRPO).filter([group(0, trajectory(0, 1.0))])
    assert (kept, metrics["rollout/trajectories"]) == ([], 0)
    for preset in (GRPO, RLOO, REINFORCE, SFT):
        batch, _ = algorithm(preset).advantages(Batch(()))
        assert len(batch) == 0


def test_workflow_numbers_are_averaged_over_those_who_reported_them() -> None:
    one = Trajectory(0, (turn([1], [2]),), {"exact": 1.0}, metrics={"tool_calls": 3.0})
    two = Trajectory(1, (turn([1], [2]),), {"exact": 0.0}, metrics={"tool_calls": 1.0, "depth": 7.0})
    metrics = algorithm(GRPO).filter([group(0, one, two)])[1]
    assert (metrics["workflow/tool_calls"], metrics["workflow/depth"]) == (2.0, 7.0)


def test_only_what_trivium_measures_of_rollouts_leaves_the_area_of_workflows() -> None:
    measured = {ENGINE_S: 1.0, ROLLOUT_S: 2.0, REWARD_S: 3.0}
    own = {"perf/idle": 9.0, "solver/perf/score": 1.0}
    reported = Trajectory(0, (turn([1], [2]),), {"exact": 1.0}, metrics={**measured, **own})
    metrics = algorithm(GRPO).filter([group(0, reported)])[1]
    found = {key: value for key, value in metrics.items() if "perf/" in key}
    assert found == {**measured, "workflow/perf/idle": 9.0, "workflow/solver/perf/score": 1.0}


def test_the_engine_log_probs_are_the_old_ones_unless_the_trainer_recomputes() -> None:
    groups = [group(0, trajectory(0, 1.0), trajectory(1, 0.0))]
    grpo = algorithm(GRPO)
    assert grpo.needs == frozenset()
    batch, _ = grpo.advantages(grpo.batch(groups))
    for e, old in zip(batch.experiences, batch.columns["old_log_prob"], strict=True):
        np.testing.assert_array_equal(old, e.rollout_log_prob)
    recomputing = algorithm(GRPO, old_log_prob="recompute")
    assert recomputing.needs == {"old"}
    scored = recomputing.batch(groups).with_columns(old_log_prob=[np.full(5, -9.0), np.full(5, -9.0)])
    assert float(recomputing.advantages(scored)[0].columns["old_log_prob"][0][0]) == -9.0


def test_a_rewritten_history_is_two_experiences_and_one_voice() -> None:
    rewritten = trajectory(0, 1.0, turn([1, 2], [3, 4]), turn([9], [5]))
    grpo = algorithm(GRPO, advantage={"norm_by_std": False})
    groups = [group(0, rewritten, trajectory(1, 0.0), trajectory(2, 0.0))]
    assert checked(grpo.filter(groups)[1])["rollout/forked"] == pytest.approx(1 / 3)
    batch = grpo.batch(groups)
    assert len(batch) == 4
    advantages = grpo.advantages(batch)[0].columns["advantages"]
    expected = [2 / 3, 2 / 3, -1 / 3, -1 / 3]
    for e, row, value in zip(batch.experiences, advantages, expected, strict=True):
        np.testing.assert_allclose(row, np.where(e.response_mask, value, 0), rtol=1e-6)


def test_ppo_wants_values_and_says_how_good_they_were() -> None:
    ppo = algorithm(PPO, advantage={"whiten": False})
    assert ppo.needs == {"values"}
    assert [objective.role for objective in ppo.objectives] == ["critic", "policy"]
    batch = ppo.batch([group(0, trajectory(0, 1.0), trajectory(1, 0.0))])
    with refused(DataError, "'values'"):
        ppo.advantages(batch)
    good = [np.array([0, 0, 0.9, 0.9, 0.9]), np.array([0, 0, 0.1, 0.1, 0.1])]
    done, metrics = ppo.advantages(batch.with_columns(values=good))
    np.testing.assert_allclose(done.columns["returns"][0], [0, 0, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(done.columns["advantages"][1], [0, 0, -0.1, -0.1, -0.1], rtol=1e-5)
    assert checked(metrics)["train/value_explained"] == pytest.approx(1 - 0.1**2 / 0.5**2)


def test_a_kl_penalty_in_the_reward_is_taken_off_each_token_and_steers_its_coefficient() -> None:
    said = {"coef": 0.5, "place": "reward", "estimator": "k1", "controller": "adaptive", "target": 0.1, "horizon": 10}
    reinforce = algorithm(REINFORCE, kl=said)
    assert reinforce.needs == {"ref"}
    batch = reinforce.batch([group(0, trajectory(0, 1.0))])
    ref = [batch.experiences[0].rollout_log_prob - np.array([0, 0, 0.2, 0.4, 0.6], np.float32)]
    done, metrics = reinforce.advantages(batch.with_columns(ref_log_prob=ref))
    expected = [0, 0, 1 - 0.5 * 1.2, 1 - 0.5 * 1.0, 1 - 0.5 * 0.6]
    np.testing.assert_allclose(done.columns["advantages"][0], expected, rtol=1e-5)
    assert [checked(metrics)[key] for key in ("train/kl_coef", "train/ref_kl")] == pytest.approx([0.5, 0.4])
    assert reinforce.state() == pytest.approx({"kl_coef": 0.5 * (1 + 0.2 / 10), "kl_coef_initial": 0.5})
    other = algorithm(REINFORCE, kl=said)
    other.restore(reinforce.state())
    assert other.state() == reinforce.state()
    other.restore({})
    assert other.state() == reinforce.state()
    other.restore({"kl_coef": 0.7})  # of a run that did not record where it began
    assert other.state() == {"kl_coef": 0.7, "kl_coef_initial": 0.5}
    changed = algorithm(REINFORCE, kl={**said, "coef": 0.2})
    changed.restore(reinforce.state())
    assert changed.state()["kl_coef"] == 0.2, "changed with `--change` since"
    fixed = algorithm(REINFORCE, kl={"coef": 0.2, "place": "reward", "estimator": "k1"})
    fixed.restore({"kl_coef": 0.5})
    assert fixed.estimator is not None
    assert fixed.estimator.kl_controller is not None
    assert fixed.estimator.kl_controller.value == 0.2


def test_a_restored_algorithm_goes_on_where_the_saved_one_stood() -> None:
    said = {"coef": 0.5, "place": "reward", "estimator": "k1", "controller": "adaptive", "target": 0.1, "horizon": 10}

    def play(algorithm: GroupAlgorithm, lag: float) -> tuple[list[np.ndarray], dict[str, float]]:
        batch = algorithm.batch([group(0, trajectory(0, 1.0), trajectory(1, 0.0))])
        ref = [np.where(e.response_mask, e.rollout_log_prob - lag, 0.0) for e in batch.experiences]
        done, metrics = algorithm.advantages(batch.with_columns(ref_log_prob=ref))
        return list(done.columns["advantages"]), metrics

    one = algorithm(REINFORCE, kl=said)
    for lag in (0.9, 0.0, 0.4):
        play(one, lag)
    saved = json.loads(json.dumps(one.state()))
    assert saved["kl_coef"] != 0.5
    other = algorithm(REINFORCE, kl=said)
    other.restore(saved)
    for lag in (0.3, 0.05):
        (mine, mine_said), (theirs, theirs_said) = play(one, lag), play(other, lag)
        assert mine_said == theirs_said
        assert all(map(np.array_equal, mine, theirs))
    assert one.state() == other.state() != saved
    without = algorithm(REINFORCE)
    without.restore(saved)  # a stage without a penalty, after one with it
    assert without.state() == {}


def test_a_kl_penalty_in_the_loss_is_the_objective_s() -> None:
    grpo = algorithm(GRPO, kl={"coef": 0.04})
    assert grpo.needs == {"ref"}
    assert "ref_log_prob" in grpo.objectives[0].needs
    assert grpo.state() == {}
    metrics = grpo.advantages(grpo.batch([group(0, trajectory(0, 1.0), trajectory(1, 0.0))]))[1]
    assert metrics["train/kl_coef"] == 0.04
    assert "train/ref_kl" not in metrics  # the loss measures it


def test_supervised_groups_take_the_same_path_without_rewards() -> None:
    sft = algorithm(SFT)
    groups = [group(0, trajectory(0, None, turn([1, 2], [3, 4], version=EXPERT_VERSION)))]
    kept, metrics = sft.filter(groups)
    assert not any(key.startswith("reward/") for key in metrics)
    batch, learned = sft.advantages(sft.batch(kept))
    assert (len(batch), batch.columns, learned, sft.needs) == (1, {}, {}, frozenset())


@pytest.mark.parametrize("preset", [GRPO, RLOO])
def test_equal_rewards_move_no_weight(preset) -> None:
    """Eight rewards of 0.7 through a softmax policy: the gradient of its logits is exactly zero."""
    which = algorithm(preset)
    members = [trajectory(index, 0.7, turn([1], [index % 3, 2, 1][: 1 + index % 3])) for index in range(8)]
    batch, _ = which.advantages(which.batch([group(0, *members)]))
    logits = torch.randn(4, requires_grad=True)
    for e, advantages in zip(batch.experiences, batch.columns["advantages"], strict=True):
        log_prob = logits.log_softmax(-1)[torch.tensor(e.tokens).long()].unsqueeze(0)
        old = log_prob.detach() + 0.05
        given = {"advantages": torch.tensor(advantages)[None], "old_log_prob": old, "rollout_log_prob": old}
        mask = torch.tensor(e.response_mask)[None]
        done = which.objectives[0].loss(
            LossInputs(mask, torch.zeros(mask.shape), given, log_prob), LossDenominators(16, 8, 3)
        )
        done.loss.backward()
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_the_step_does_not_depend_on_the_order_of_groups() -> None:
    grpo = algorithm(GRPO)
    groups = [group(slot, trajectory(0, slot * 0.3), trajectory(1, 1.0 - slot)) for slot in range(4)]
    forward = grpo.advantages(grpo.batch(groups))[0].columns["advantages"]
    backward = grpo.advantages(grpo.batch(groups[::-1]))[0].columns["advantages"]
    for slot in range(4):
        for member in range(2):
            np.testing.assert_array_equal(forward[2 * slot + member], backward[2 * (3 - slot) + member])


def test_a_row_without_a_trained_token_takes_nothing_from_its_group() -> None:
    members = [trajectory(0, 1.0), trajectory(1, 1.0), trajectory(2, 1.0, turn([1, 2], [3, 4]), turn([9, 9], [5]))]
    which = algorithm(GRPO)
    batch = which.batch([group(0, *members)])
    assert len(batch) == 4  # the third member rewrote its history
    masks = [np.ones(len(e), np.bool_) for e in batch.experiences]
    masks[1][:], masks[3][:] = False, False  # one member is masked whole, another one in part
    done, _ = which.advantages(batch.masked(masks))
    for row in done.columns["advantages"]:
        assert not row.any()


def test_a_member_that_never_spoke_is_nobody_to_compare_with() -> None:
    silent = Trajectory(1, (), {"exact": 0.0})
    kept, metrics = algorithm(GRPO).filter([group(0, trajectory(0, 1.0), silent)])
    assert kept == []
    assert metrics["rollout/refused/too_few_alive"] == 1
