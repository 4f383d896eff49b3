"""Validation statistics, which are exact; verl estimates them by bootstrap."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from tests.failing import refused
from trivium.foundation.errors import ConfigError, DataError, RewardError
from trivium.foundation.metrics import checked
from trivium.frontdoors.verl.group_rewards import GroupRewards, as_manager
from trivium.frontdoors.verl.objects.validation import _table, of_task, statistics
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Group, Message, StopReason, Task, Trajectory, Turn

TOKENIZER = tiny_tokenizer("0123456789+=")


@pytest.mark.parametrize("n", [2, 4, 5])
def test_best_and_worst_are_means_over_all_choices(n: int) -> None:
    values = [0.3, 1.0, 0.0, 0.0, 0.7]
    found = of_task(values, None)
    choices = list(combinations(values, n))
    for name, pick in (("best", max), ("worst", min)):
        picked = [pick(choice) for choice in choices]
        assert found[f"{name}@{n}/mean"] == pytest.approx(np.mean(picked))
        assert found[f"{name}@{n}/std"] == pytest.approx(np.std(picked))


def test_the_reference_case_is_exact_here() -> None:
    """Four samples, two of them right: verl's bootstrap gives 0.926 and 0.738."""
    found = of_task([1, 0, 0, 1], ["a", "b", "b", "a"])
    assert (found["mean@4"], found["std@4"], found["best@4/mean"]) == (0.5, 0.5, 1.0)
    assert found["best@2/mean"] == pytest.approx(5 / 6)
    assert found["maj@4/mean"] == 0.5
    assert of_task([1.0], None) == {"mean@1": 1.0}


def test_a_majority_is_worth_what_its_samples_are() -> None:
    found = of_task([1, 1, 1, 0], ["x", "x", "x", "y"])
    assert found["maj@4/mean"] == 1.0
    assert found["maj@2/mean"] == pytest.approx(0.75)  # of six pairs three hold y, and there it wins half the time


def test_names_are_those_of_the_original_and_declared() -> None:
    tables = [
        ("sums", {"reward": [1.0, 0.0], "acc": [1.0, 0.0], "pred": ["a", "b"]}),
        ("words", {"reward": [0.5, 0.5]}),
    ]
    found = statistics(tables)
    assert found["val-core/sums/acc/mean@2"] == 0.5
    assert found["val-core/sums/acc/best@2/mean"] == 1.0
    assert found["val-core/sums/acc/maj@2/mean"] == 0.5
    assert found["val-aux/sums/reward/mean@2"] == 0.5
    assert found["val-aux/sums/acc/worst@2/mean"] == 0.0
    assert found["val-core/words/reward/mean@2"] == 0.5
    assert not any("/pred/" in name for name in found)
    assert checked(found) == {name: found[name] for name in sorted(found)}


@pytest.mark.parametrize("values", [({"a": 1}, {"a": 2}), (["x"], []), ("12", 7.5), (10**400, 1), (np.ones(2), None)])
def test_what_is_no_number_is_no_statistic(values: tuple[Any, Any]) -> None:
    found = statistics([("d", {"reward": [1.0, 0.0], "said": values}), ("d", {"reward": [0.0, 0.0], "said": ["x", 1]})])
    assert found == statistics([("d", {"reward": [1.0, 0.0]}), ("d", {"reward": [0.0, 0.0]})])


def test_arrays_among_the_extras_make_no_table_fail() -> None:
    played = group(1, "2", "3")
    table = _table(played, {(played.group_id, index): {"vector": np.ones(2)} for index in range(2)})
    assert [len(column) for column in table.values()] == [2, 2]


# --------------------------------------------------------------------------- rewards over a whole step


def member(index: int, text: str) -> Trajectory:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    zeros = np.zeros(len(tokens), np.float32)
    turn = Turn(np.array([1, 2], np.int32), np.array(tokens), zeros, np.zeros(len(tokens)), StopReason.EOS, text)  # pyright: ignore[reportArgumentType]
    return Trajectory(index, (turn,))


def group(number: int, *texts: str, greedy: str | None = None) -> Group:
    task = Task(str(number), (Message("user", f"{number}+1="),), {"answer": str(number + 1), "data_source": "sums"})
    members = tuple(member(index, text) for index, text in enumerate(texts))
    return Group(number, task, members, greedy=None if greedy is None else member(len(texts), greedy))


class Manager:
    """Returns the length as the reward, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        self.calls.append(data)
        rewards = torch.zeros(data.batch["responses"].shape)
        rewards[torch.arange(len(data)), data.response_lengths - 1] = data.response_lengths.float()
        extra = {"acc": [float(length > 1) for length in data.response_lengths], "pred": ["p"] * len(data)}
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


def test_a_manager_sees_a_step_at_once() -> None:
    manager = Manager()
    judged, extras = GroupRewards(manager, 0)([group(1, "12", "3"), group(2, "4", greedy="56")], validate=False)
    assert len(manager.calls) == 1
    assert manager.calls[0].meta_info == {"validate": False}
    assert [[t.reward for t in g.trajectories] for g in judged] == [[2.0, 1.0], [1.0]]
    assert judged[1].greedy is not None
    assert judged[1].greedy.reward == 2.0
    assert judged[0].trajectories[0].metrics == {"acc": 1.0}
    assert [extra["pred"] for extra in extras] == ["p"] * 3


def test_a_reward_models_scores_lie_where_managers_look() -> None:
    manager = Manager()
    GroupRewards(manager, 0, lambda batch: [float(len(e)) for e in batch.experiences])([group(1, "12", "3")])
    assert manager.calls[0].batch["rm_scores"].tolist() == [[0.0, 4.0], [3.0, 0.0]]


def test_a_trajectory_that_said_nothing_has_no_score_of_a_model() -> None:
    silent = replace(group(1, "12"), trajectories=(Trajectory(0, ()), member(1, "12")))
    judge = GroupRewards(lambda data: data.batch["rm_scores"], 0, lambda batch: [7.0] * len(batch))
    judged, _ = judge([silent])
    assert [t.reward for t in judged[0].trajectories] == [0.0, 7.0]
    alone = replace(silent, trajectories=(Trajectory(0, ()),))
    judged, _ = judge([alone])
    assert judged[0].trajectories[0].reward == 0.0


def test_plain_functions_are_managers_too() -> None:
    def score(prompt: str, completion: str, answer: str) -> float:
        assert prompt == "1+1="
        return float(completion == answer)

    judged, _ = GroupRewards(as_manager(score, TOKENIZER), 0)([group(1, "2", "3")])
    assert [t.reward for t in judged[0].trajectories] == [1.0, 0.0]

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        return {"score": float(solution_str == ground_truth), "source": data_source}

    judged, extras = GroupRewards(as_manager(compute_score, TOKENIZER), 0)([group(1, "2", "3")])
    assert [t.reward for t in judged[0].trajectories] == [1.0, 0.0]
    assert [extra["source"] for extra in extras] == ["sums", "sums"]
    manager = Manager()
    assert as_manager(manager, TOKENIZER) is manager
    with refused(ConfigError, "reward_fn", "str"):
        as_manager("naive", TOKENIZER)


def test_nothing_is_scored_in_silence() -> None:
    def broken(prompt: str, completion: str) -> float:
        raise ValueError("no idea")

    with refused(RewardError, "sample 0", "'sums'", "no idea"):
        GroupRewards(as_manager(broken, TOKENIZER), 0)([group(1, "2")])
    with refused(RewardError, "nan"):
        GroupRewards(as_manager(lambda prompt, completion: float("nan"), TOKENIZER), 0)([group(1, "2")])
    with refused(RewardError, "1 samples", "absent"):
        GroupRewards(lambda data, return_dict: {}["absent"], 0)([group(1, "2")])
    with refused(RewardError, "(B, R)", "list"):
        GroupRewards(lambda data: [1.0], 0)([group(1, "2")])
    with refused(DataError, "(3, 3)"):
        GroupRewards(lambda data, return_dict: torch.zeros(3, 3), 0)([group(1, "2")])
