"""The view of groups: positions of tokens and columns, and a manager written for verl."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.failing import refused
from trivium.foundation.errors import DataError
from trivium.frontdoors.verl import BatchView, living, score_groups, scored_rows
from trivium.frontdoors.verl.objects.batches.protocol import RowsError
from trivium.types import Failure, Group, Message, StopReason, Task, Trajectory, Turn

PAD = 0


def turn(prompt: list[int], tokens: list[int], text: str = "", **fields: Any) -> Turn:
    log_prob = -0.1 * np.arange(1, len(tokens) + 1)
    return Turn(np.array(prompt), np.array(tokens), log_prob, np.zeros(len(tokens)), StopReason.EOS, text, **fields)


def groups() -> list[Group]:
    """A single turn, a failure and two turns with a tool between them; then a trajectory that rewrote its history."""
    first = Task(
        "a",
        (Message("user", "7+5?"),),
        {
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "12"},
            "extra_info": {"index": 3},
            "ability": "math",
        },
    )
    second = Task("b", (Message("user", "hm"),), {"answer": "9"}, "held_out")
    return [
        Group(
            0,
            first,
            (
                Trajectory(0, (turn([5, 6], [7, 8, 9]),)),
                Trajectory(1, failure=Failure("engine", "E", "")),
                Trajectory(2, (turn([5, 6], [7, 8]), turn([5, 6, 7, 8, 50, 51], [9])), {"tool": 0.25}),
            ),
        ),
        Group(1, second, (Trajectory(0, (turn([1], [2]), turn([3, 4, 5], [6, 7]))),)),
    ]


def test_every_token_lands_where_the_seeds_expect_it() -> None:
    view = BatchView.of(groups(), PAD)
    assert len(view) == 3
    assert view.batch.batch_size == torch.Size([3])
    assert view.batch["prompts"].tolist() == [[0, 5, 6], [0, 5, 6], [3, 4, 5]]
    assert view.batch["responses"].tolist() == [[7, 8, 9, 0, 0], [7, 8, 50, 51, 9], [6, 7, 0, 0, 0]]
    assert view.batch["response_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]
    assert view.batch["attention_mask"].tolist() == [
        [0, 1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0],
    ]
    assert view.batch["position_ids"][0].tolist() == [0, 0, 1, 2, 3, 4, 4, 4]
    assert torch.equal(view.batch["input_ids"], torch.cat([view.batch["prompts"], view.batch["responses"]], 1))
    torch.testing.assert_close(view.batch["rollout_log_probs"][1], torch.tensor([-0.1, -0.2, 0.0, 0.0, -0.1]))
    assert view.response_lengths.tolist() == [3, 5, 2]
    assert [(group.slot, member.index) for group, member in living(groups())] == [(0, 0), (0, 2), (1, 0)]


def test_columns() -> None:
    columns = BatchView.of(groups(), PAD, meta_info={"global_steps": 7}).non_tensor_batch
    assert columns["data_source"].tolist() == ["openai/gsm8k", "openai/gsm8k", "held_out"]
    assert [each["ground_truth"] for each in columns["reward_model"]] == ["12", "12", "9"]
    assert columns["extra_info"].tolist() == [{"index": 3}, {"index": 3}, None]
    assert columns["ability"].tolist() == ["math", "math", None]
    assert columns["uid"].tolist() == ["train/a/0", "train/a/0", "held_out/b/0"]
    assert columns["__num_turns__"].tolist() == [2, 4, 4]
    assert columns["reward_scores"].tolist() == [{}, {"tool": 0.25}, {}]
    assert columns["raw_prompt"][2] == [{"role": "user", "content": "hm"}]
    assert all(column.dtype == object and column.shape == (3,) for column in columns.values())


def test_items_slices_and_masks() -> None:
    view = BatchView.of(groups(), PAD, meta_info={"global_steps": 7})
    item = view[1]
    assert item.batch["attention_mask"].shape == (8,)
    assert item.batch.batch_size == torch.Size([])
    assert item.non_tensor_batch["reward_model"]["ground_truth"] == "12"
    assert item.non_tensor_batch.get("nothing", {}) == {}
    assert item.meta_info == {"global_steps": 7}
    assert view[-1].non_tensor_batch["data_source"] == "held_out"
    for chosen in ([2, 0], np.array([2, 0]), torch.tensor([2, 0])):
        part = view[chosen]
        assert part.batch["responses"].tolist() == view.batch["responses"][[2, 0]].tolist()
        assert part.non_tensor_batch["uid"].tolist() == ["held_out/b/0", "train/a/0"]
        assert len(part) == 2
    assert view[1:].batch["prompts"].tolist() == view.batch["prompts"][1:].tolist()
    assert len(view[np.array([True, False, True])]) == 2
    assert [each.non_tensor_batch["uid"] for each in view] == view.non_tensor_batch["uid"].tolist()
    with pytest.raises(IndexError):
        view[3]


def test_widths_can_be_asked_for_and_tensors_added() -> None:
    view = BatchView.of(groups(), 99, prompt_length=6, response_length=7)
    assert view.batch["prompts"].shape == (3, 6)
    assert view.batch["responses"].shape == (3, 7)
    assert view.batch["prompts"][0].tolist() == [99, 99, 99, 99, 5, 6]
    view.batch["rm_scores"] = torch.ones(3, 7)
    assert "rm_scores" in view.batch
    assert view[0].batch["rm_scores"].sum() == 7
    assert set(view.batch.keys()) >= {"rm_scores", "responses"}


def test_nobody_played_and_nothing_said() -> None:
    assert len(BatchView.of([], PAD)) == 0
    silent = replace(groups()[1], trajectories=(Trajectory(0), Trajectory(1, (turn([5, 6], []),))))
    view = BatchView.of([silent], PAD)
    assert view.batch["prompts"].tolist() == [[0, 0], [5, 6]]
    assert view.response_lengths.tolist() == [0, 0]


def test_rows_of_different_number_are_refused() -> None:
    with refused(RowsError, "uid"):
        BatchView.from_dict({"responses": torch.zeros(2, 3)}, {"uid": ["a"]})
    assert BatchView.from_dict({"responses": torch.zeros(2, 3)}, {"x": [[1], [2, 3]]}).non_tensor_batch["x"][1] == [
        2,
        3,
    ]


# --------------------------------------------------------------------------- rewards, row by row


def test_rewards_become_scores() -> None:
    view = BatchView.of(groups(), PAD)
    rewards = torch.zeros(3, 5)
    rewards[0, 2], rewards[1, 0], rewards[1, 4] = 1.5, 0.25, -1.0
    rows = scored_rows(rewards, view, {"acc": [True, False, None]})
    assert [(row.score, row.at) for row in rows] == [(1.5, 2), (-0.75, 4), (0.0, 1)]
    assert [row.extra for row in rows] == [{"acc": True}, {"acc": False}, {"acc": None}]


@pytest.mark.parametrize(
    ("rewards", "name"),
    [
        ({(0, 3): 1.0}, "sample 0"),
        ({(2, -1): 1.0}, "sample 2"),
        ({(1, 4): np.nan}, "sample 1"),
        ({(1, 1): np.inf}, "sample 1"),
    ],
)
def test_rewards_that_cannot_be(rewards: dict[tuple[int, int], float], name: str) -> None:
    tensor = torch.zeros(3, 5)
    for place, reward in rewards.items():
        tensor[place] = reward
    with refused(DataError, name):
        scored_rows(tensor, BatchView.of(groups(), PAD))


def test_shapes_and_extras_that_do_not_fit() -> None:
    view = BatchView.of(groups(), PAD)
    with refused(DataError, "(3, 5)", "(3, 4)"):
        scored_rows(torch.zeros(3, 4), view)
    with refused(DataError, "'acc'"):
        scored_rows(torch.zeros(3, 5), view, {"acc": [1]})


def by_length(data: BatchView, return_dict: bool = False) -> Any:
    """A manager that writes into the rows that it is given."""
    rewards = torch.zeros(data.batch["responses"].shape)
    rewards[torch.arange(len(data)), data.response_lengths - 1] = data.response_lengths.float()
    for extra_info in data.non_tensor_batch["extra_info"]:
        (extra_info or {}).update(num_turns=1)
    return {"reward_tensor": rewards, "reward_extra_info": {"kind": ["one", "two", "new"]}}


def test_groups_are_scored_by_a_manager() -> None:
    rolled_out = groups()
    rows = score_groups(rolled_out, by_length, PAD)
    assert [(row.score, row.at, row.extra["kind"]) for row in rows] == [
        (3, 2, "one"),
        (5, 4, "two"),
        (2, 1, "new"),
    ]
    assert rolled_out[0].task.columns["extra_info"] == {"index": 3}  # what a manager adds is its own
    assert score_groups([], by_length, PAD) == []
