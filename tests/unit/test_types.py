"""The nouns: read-only, checked at construction, and turned into experiences without touching a token."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from failing import refused

from trivium.foundation.errors import ConfigError, DataError
from trivium.types import (
    EXPERT_VERSION,
    Batch,
    Capabilities,
    Completion,
    Experience,
    Failure,
    Group,
    Media,
    Prompt,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnSpan,
    capabilities_of,
    experiences_of,
    forks_of,
)


def turn(prompt: list[int], reply: list[int], version: int = 0, stop: StopReason = StopReason.EOS) -> Turn:
    log_prob = [-(token / 10) for token in reply]
    return Turn(np.array(prompt), np.array(reply), np.array(log_prob), np.full(len(reply), version), stop, str(reply))


def group(*trajectories: Trajectory) -> Group:
    return Group(slot=3, task=Task("t1", ()), trajectories=trajectories, epoch=2, version=9)


def experience(length: int, **changes: object) -> Experience:
    mask = np.arange(length) > 0
    whole = Experience(np.arange(length), mask, np.zeros(length), np.zeros(length), "train/t/0", 0)
    return replace(whole, **changes) if changes else whole


def test_a_group_knows_the_versions_that_sampled_it_and_a_changed_one_its_own() -> None:
    mixed = group(Trajectory(0, (turn([1], [2, 3], 5), turn([1], [2], 4))), Trajectory(1, (turn([1], [], 1),)))
    assert (mixed.oldest_version, mixed.newest_version) == (4, 5)
    assert mixed == group(*mixed.trajectories)
    other = replace(mixed, trajectories=(Trajectory(0, (turn([1], [2], 7),)),))
    assert (other.oldest_version, other.newest_version) == (7, 7)
    assert (group().oldest_version, group().newest_version) == (9, 9)


def test_one_turn_is_one_experience() -> None:
    trajectory = Trajectory(1, (turn([5, 6], [7, 8], version=4),), {"exact": 1.0, "format": 0.5})
    (made,) = experiences_of(group(trajectory), trajectory)
    assert made.tokens.tolist() == [5, 6, 7, 8]
    assert made.response_mask.tolist() == [False, False, True, True]
    assert made.rollout_log_prob.tolist() == [0, 0, np.float32(-0.7), np.float32(-0.8)]
    assert made.policy_version.tolist() == [EXPERT_VERSION, EXPERT_VERSION, 4, 4]
    assert (made.group_id, made.index, made.reward, made.num_response_tokens) == ("train/t1/2", 1, 1.5, 2)


def test_turns_that_extend_one_another_are_one_experience_with_the_environment_masked_out() -> None:
    first = turn([1], [2, 3], version=0)
    second = turn([1, 2, 3, 40, 41], [4], version=1, stop=StopReason.LENGTH)
    trajectory = Trajectory(0, (first, second))
    (made,) = experiences_of(group(trajectory), trajectory)
    assert made.tokens.tolist() == [1, 2, 3, 40, 41, 4]
    assert made.response_mask.tolist() == [False, True, True, False, False, True]
    assert made.policy_version.tolist() == [-1, 0, 0, -1, -1, 1]
    assert made.rollout_log_prob[[0, 3, 4]].tolist() == [0, 0, 0]
    assert made.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    "rewritten", [[1, 2, 9, 40], [1, 2], [2], []], ids=["a changed token", "cut short", "cut in front", "empty"]
)
def test_a_turn_that_rewrites_history_starts_another_experience(rewritten: list[int]) -> None:
    second = turn(rewritten or [50], [4])
    trajectory = Trajectory(0, (turn([1], [2, 3]), second))
    made = experiences_of(group(trajectory), trajectory)
    assert [e.tokens.tolist() for e in made] == [[1, 2, 3], [*(rewritten or [50]), 4]]
    assert sum(e.num_response_tokens for e in made) == trajectory.num_tokens


def test_another_picture_at_the_same_tokens_rewrites_history() -> None:
    one, other = Media("image/png", b"one"), Media("image/png", b"other")
    first = replace(turn([1, 5], [2]), media=(one.at(1, 2),))
    second = replace(turn([1, 5, 2, 5], [3]), media=(one.at(1, 2), other.at(3, 4)))
    same = Trajectory(0, (first, second))
    (made,) = experiences_of(group(same), same)
    assert made.media == second.media
    for media in ((other.at(1, 2), other.at(3, 4)), (one.at(3, 4),), (one.at(1, 2), other.at(2, 3))):
        trajectory = Trajectory(0, (first, replace(second, media=media)))
        assert [e.tokens.tolist() for e in experiences_of(group(trajectory), trajectory)] == [
            [1, 5, 2],
            [1, 5, 2, 5, 3],
        ]


def test_prompts_are_joined_with_their_media() -> None:
    media = Media("image/png", b"one")
    first = Prompt(np.array([1, 7, 7, 2]), (media.at(1, 3),), np.array([1, 7, 2]))
    plain = Prompt(np.array([3]))
    assert plain.then(plain).unexpanded.tolist() == [3, 3]
    both = first.then(plain).then(first)
    assert both.tokens.tolist() == [1, 7, 7, 2, 3, 1, 7, 7, 2]
    assert both.unexpanded.tolist() == [1, 7, 2, 3, 1, 7, 2]
    assert [item.span for item in both.media] == [(1, 3), (6, 8)]


def test_a_third_turn_may_continue_the_rewritten_history() -> None:
    trajectory = Trajectory(0, (turn([1], [2]), turn([8], [9]), turn([8, 9, 10], [11])))
    assert [e.tokens.tolist() for e in experiences_of(group(trajectory), trajectory)] == [[1, 2], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("prompt", "earlier", "at", "reason"),
    [
        ([1, 2, 9, 40], 0, 2, "the completion of turn 1 was changed"),
        ([1, 2, 3, 4, 5, 9], 1, 5, "the completion of turn 2 was changed"),
        ([1, 2, 3, 9], 1, 3, "after turn 1, a message was changed"),
        ([9, 2, 3], 1, 0, "its first messages were changed"),
        ([1, 2, 3, 4], 1, 4, "its prompt ends there"),
        ([1, 2, 3, 4, 5, 6, 9], 1, 6, None),
        ([1, 2, 3], 1, 3, "its prompt ends there"),
    ],
)
def test_a_fork_has_its_first_other_token_and_the_reason(
    prompt: list[int], earlier: int, at: int, reason: str | None
) -> None:
    turns = (turn([1], [2, 3]), turn([1, 2, 3, 4], [5, 6]), turn(prompt, [7]))
    forks = forks_of(turns)
    if reason is None:
        assert forks == []
        return
    (fork,) = forks
    assert (fork.turn, fork.earlier, fork.at) == (2, earlier, at)
    assert fork.reason.startswith(reason)
    assert [*fork.sent] == prompt[at : at + 1]


def test_a_fork_whose_images_changed_says_that() -> None:
    one, two = (Media("image/png", data).at(0, 2) for data in (b"1", b"2"))
    first = replace(turn([9, 9, 1], [5]), media=(one,))
    for prompt in ([9, 9, 1], [9, 9, 1, 5, 7]):
        (fork,) = forks_of((first, replace(turn(prompt, [6]), media=(two,))))
        assert fork.reason == "its images were changed"
    (fork,) = forks_of((first, replace(first, tokens=first.tokens)))
    assert fork.reason.startswith("its prompt ends there")


def test_no_turns_are_no_experiences() -> None:
    trajectory = Trajectory(0, failure=Failure("engine", "OSError", "gone"))
    assert experiences_of(group(trajectory), trajectory) == ()
    assert trajectory.stop_reason is StopReason.ABORT


def test_an_empty_reply_trains_nothing() -> None:
    trajectory = Trajectory(0, (turn([1, 2], []),))
    (made,) = experiences_of(group(trajectory), trajectory)
    assert made.num_response_tokens == 0


def test_arrays_are_copied_once_and_read_only() -> None:
    tokens = np.array([1, 2], np.int32)
    done = Completion(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), StopReason.EOS)
    tokens[0] = 9
    assert done.tokens.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        done.tokens[0] = 9
    again = Completion(done.tokens, done.log_prob, done.policy_version, StopReason.EOS)
    assert again.tokens is done.tokens


def test_arrays_have_the_dtypes_of_the_contract() -> None:
    made = experience(3)
    assert [a.dtype.name for a in (made.tokens, made.response_mask, made.rollout_log_prob, made.policy_version)] == [
        "int32",
        "bool",
        "float32",
        "int32",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_log_prob": np.zeros(2)},
        {"policy_version": np.zeros(4)},
        {"response_mask": np.zeros(1, bool)},
        {"extra": {"teacher_log_prob": np.zeros(2)}},
    ],
)
def test_an_experience_of_unequal_lengths_is_refused(changes: dict[str, object]) -> None:
    with refused(DataError, "one length"):
        experience(3, **changes)


def test_the_first_token_cannot_be_trained_on() -> None:
    with refused(DataError, "response_mask[0]"):
        experience(3, response_mask=np.ones(3, bool))


def test_a_fully_masked_experience_is_legal() -> None:
    assert experience(3, response_mask=np.zeros(3, bool)).num_response_tokens == 0


def test_a_turn_of_unequal_lengths_is_refused() -> None:
    with refused(DataError, "2 tokens", "1 log-probabilities", "2 versions"):
        Turn(np.array([1]), np.array([2, 3]), np.zeros(1), np.zeros(2), StopReason.EOS, "")


def test_a_groups_staleness_counts_from_its_oldest_token() -> None:
    members = (Trajectory(0, (turn([1], [2], version=6),)), Trajectory(1, (turn([1], [2], 5), turn([1, 2], [3], 7))))
    assert group(*members).oldest_version == 5
    assert group(Trajectory(0)).oldest_version == 9  # nothing was sampled: the lease's version


def test_failed_members_are_kept_and_told_apart() -> None:
    failed = Trajectory(1, failure=Failure("reward", "ValueError", "no"))
    members = group(Trajectory(0, (turn([1], [2]),)), failed)
    assert [t.index for t in members.alive] == [0]
    assert len(members.trajectories) == 2


def test_columns_follow_their_experiences() -> None:
    batch = Batch((experience(2), experience(4))).with_columns(advantages=[[1, 2], [3, 4, 5, 6]])
    picked = batch.select([1, 0, 1])
    assert [c.tolist() for c in picked.columns["advantages"]] == [[3, 4, 5, 6], [1, 2], [3, 4, 5, 6]]
    assert (len(picked), picked.num_tokens, picked.num_response_tokens) == (3, 10, 7)


def test_a_pickled_batch_is_the_same_batch() -> None:
    media = (Media("image/png", b"pixels", span=(0, 1)),)
    first = experience(3, media=media, turns=(TurnSpan(0, 1, 3, 0.5, "start"),), rewards={"exact": 1.0})
    second = experience(5, extra={"routing": np.ones((5, 2, 1), np.uint8)}, greedy_reward=0.25, index=4)
    columns: Any = {"old": [[1, 2, 3], [4, 5, 6, 7, 8]], "top": [np.ones((n, 2, 2), np.float64) for n in (3, 5)]}
    for batch in (Batch((first, second), columns, {"seen": 1.0}), Batch((), {"old": ()})):
        copy = pickle.loads(pickle.dumps(batch))
        assert (len(copy), copy.metrics, [*copy.columns]) == (len(batch), batch.metrics, [*batch.columns])
        for mine, theirs in zip(copy.experiences, batch.experiences, strict=True):
            for each in fields(Experience):
                np.testing.assert_equal(getattr(mine, each.name), getattr(theirs, each.name))
            assert mine.tokens.dtype == theirs.tokens.dtype
            assert not mine.tokens.flags.writeable
        for name, arrays in batch.columns.items():
            for mine, theirs in zip(copy.columns[name], arrays, strict=True):
                np.testing.assert_array_equal(mine, theirs)
                assert mine.dtype == theirs.dtype
                assert not mine.flags.writeable


def test_columns_are_float32_unless_the_caller_works_in_float64() -> None:
    batch = Batch((experience(2),)).with_columns(a=[np.zeros(2, np.float64)], b=[np.zeros(2, np.int64)])
    assert (batch.columns["a"][0].dtype, batch.columns["b"][0].dtype) == (np.float64, np.float32)


@pytest.mark.parametrize("column", [[[1.0]], [[1.0, 2.0], [3.0]]], ids=["too short", "too many"])
def test_a_column_of_another_shape_is_refused(column: list[list[float]]) -> None:
    with refused(DataError, "'advantages'"):
        Batch((experience(2),)).with_columns(advantages=column)


def test_media_are_known_by_their_content() -> None:
    assert Media("image/png", b"abc").sha256 == Media("image/png", b"abc", span=(1, 2)).sha256
    assert Media("image/png", b"abc").sha256 != Media("image/png", b"abd").sha256


def test_what_a_plugin_can_do_is_declared_in_one_place() -> None:
    class Filled:
        explored = False

    class Declared:
        capabilities = Capabilities(explored=False)

    class Empty: ...

    def operator() -> None: ...

    assert capabilities_of(Declared) == capabilities_of(Declared()) == Capabilities(explored=False)
    assert capabilities_of(Empty()) == capabilities_of(operator) == Capabilities()
    operator.drops = False
    for plugin, says in ((Filled, "explored=False"), (Filled(), "explored=False"), (operator, "drops=False")):
        with refused(ConfigError, f"`capabilities = Capabilities({says})`"):
            capabilities_of(plugin)
