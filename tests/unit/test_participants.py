"""Participants of one rollout: each is trained on its own turns with its own rewards, compared with its own role."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import episodes
import numpy as np
import pytest
from workflow_parts import policy

from trivium.algorithms import GroupAlgorithm, build_algorithm
from trivium.buffers.journal import decode_group, encode_group
from trivium.config import AlgorithmConfig, plugin
from trivium.types import Group, Message, Trajectory, experiences_of

ASK = (Message("user", "?"),)


def algorithm(kind: str, **fields: Any) -> GroupAlgorithm:
    return build_algorithm(plugin("algorithms", AlgorithmConfig)({"kind": kind, **fields}), 0, 20)


def both(index: int, proposer: float, solver: float, shared: float = 0.0) -> Trajectory:
    """A trajectory of two participants, whose turns alternate."""
    turns = [
        episodes.turn([1], [5, 6], participant="proposer"),
        episodes.turn([1], [7], participant="solver"),
        episodes.turn([1, 5, 6, 2], [8], participant="proposer"),
    ]
    rewards = {"proposer": proposer, "solver/exact": solver, "style": shared}
    return Trajectory(index, (turns[0], turns[2], turns[1]), rewards)


def game(slot: int, *pairs: tuple[float, float]) -> Group:
    return episodes.group(slot, *(both(index, *pair) for index, pair in enumerate(pairs)))


def advantages(which: GroupAlgorithm, *groups: Group) -> list[tuple[str, float]]:
    """(participant, advantage of its last token) of each row."""
    batch, _ = which.advantages(which.batch(groups))
    rows = zip(which.batch(groups).experiences, batch.columns["advantages"], strict=True)
    return [(e.participant, float(row[np.flatnonzero(e.response_mask)[-1]])) for e, row in rows]


async def test_turns_of_a_fork_belong_to_its_participant_and_survive_the_journal() -> None:
    player = policy("a", "b", "c", "d")
    await player.generate(ASK)
    solver = player.fork("solver")
    await solver.generate(ASK)
    await solver.fork("again").generate(ASK)
    await solver.branch("other").generate((*solver.history, *ASK))
    await player.branch("own").generate((*player.history, *ASK))
    named = [turn.participant for turn in player.turns]
    assert sorted(named) == ["", "", "solver", "solver", "solver"]
    played = episodes.group(0, Trajectory(0, player.turns, {"solver": 1.0}))
    (trajectory,) = decode_group(encode_group(played)).trajectories
    assert [turn.participant for turn in trajectory.turns] == named


def test_each_participant_has_its_own_sequences_and_rewards() -> None:
    played = game(0, (1.0, 0.25))
    first, second = experiences_of(played, played.trajectories[0])
    assert (first.participant, second.participant) == ("proposer", "solver")
    assert (len(first.turns), len(second.turns)) == (2, 1)
    assert (first.rewards, second.rewards) == (
        {"proposer": 1.0, "style": 0.0},
        {"solver/exact": 0.25, "style": 0.0},
    )
    alone = Trajectory(0, played.trajectories[0].turns, {"exact": 1.0})
    assert [each.participant for each in experiences_of(played, alone)] == ["", ""]


def test_a_participant_has_the_greedy_reward_of_its_own_role_and_a_draw_of_its_own() -> None:
    group = replace(game(0, (1.0, -1.0), (-1.0, 1.0)), greedy=both(-1, 0.75, -0.75))
    greedy = {e.participant: e.greedy_reward for t in group.trajectories for e in experiences_of(group, t)}
    assert greedy == {"proposer": 0.75, "solver": -0.75}
    which, games = algorithm("reinforce", resample={}), [game(n, (1.0, -1.0), (-1.0, 1.0)) for n in range(20)]
    drawn, _ = which.advantages(which.batch(games))
    times = Counter((e.group_id, e.index, e.participant) for e in drawn.experiences)
    assert not all(times[slot, index, "proposer"] == times[slot, index, "solver"] for slot, index, _ in times)


def test_a_participant_is_compared_with_its_own_role() -> None:
    played = game(0, (1.0, 10.0), (3.0, 10.0), (2.0, 40.0))
    found = advantages(algorithm("grpo", advantage={"kind": "grpo", "norm_by_std": False}), played)
    assert found == [
        ("proposer", pytest.approx(-1.0)),
        ("solver", pytest.approx(-10.0)),
        ("proposer", pytest.approx(1.0)),
        ("solver", pytest.approx(-10.0)),
        ("proposer", pytest.approx(0.0)),
        ("solver", pytest.approx(20.0)),
    ]


def test_the_baselines_of_roles_survive_a_resume() -> None:
    which, other = (algorithm("reinforce", shaping=["role_baseline"]) for _ in range(2))
    advantages(which, game(0, (1.0, -1.0)))
    other.restore(json.loads(json.dumps(which.state())))
    played = game(1, (0.0, 1.0), (0.5, -0.25))
    assert advantages(other, played) == advantages(which, played)
    assert other.state() == which.state()
