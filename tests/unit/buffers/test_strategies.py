"""Sample strategies over the real buffer: how many groups of which kind a step gets, and the same after a resume."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import configs
import episodes
import numpy as np
import pytest
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.algorithms import build_algorithm
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.replay import Replay, _StoredGroup
from trivium.buffers.slots import admitted
from trivium.buffers.strategies import Mix, StalenessControl, interleaved
from trivium.config import AlgorithmConfig, RunConfig, StrategyConfig, build, plugin
from trivium.foundation.errors import ConfigError
from trivium.planning.plan import plan_run
from trivium.schedule import Schedule
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import EXPERT_VERSION, Group, Message, Sample, Task, Trajectory, Turn

TASKS = [Task(f"t{i}", (Message("user", f"{i}="),), {"completion": str(i)}) for i in range(7)]
EXPERTS = [replace(task, taskset="experts") for task in TASKS[:5]]
RENDERER = ChatRenderer(tiny_tokenizer("0123456789="))
GRPO = build_algorithm(plugin("algorithms", AlgorithmConfig)({"kind": "grpo", "filters": ["zero_variance"]}), 0, 8)


def turn(version: int, tokens: Sequence[int] = (5, 6)) -> Turn:
    return episodes.turn(range(3), tokens, version=version, text="hi")


def played(schedule: Schedule, slot: int, version: int, attempt: int = 0, useless: bool = False) -> Group:
    """A group whose members differ, unless it is `useless`: then the filter refuses it."""
    assignment = schedule.at(slot)
    rewards = (1.0, 1.0 if useless else 0.0)
    members = tuple(Trajectory(i, (turn(version),), {"exact": reward}) for i, reward in enumerate(rewards))
    return Group(slot, assignment.task, members, assignment.epoch, attempt, version)


def schedule_of(section: StrategyConfig, groups: int, **change: Any) -> Schedule:
    return Schedule(
        TASKS,
        seed=3,
        groups_per_step=groups,
        stored_per_step=section.num_stored(groups),
        group_size=2,
        steps=40,
        **change,
    )


class Life:
    """One process's life: a strategy over a buffer that an explorer fills at once with what the newest version plays,
    or, with `lag`, with what an older one does."""

    def __init__(
        self, folder: Path, section: StrategyConfig, schedule: Schedule, *, useless: float = 0.0, lag: int = 0
    ) -> None:
        self.section, self.schedule, self.useless, self.lag = section, schedule, useless, lag
        self.buffer = MemoryBuffer(
            MemoryBuffer.Config(), schedule=schedule, rollouts=folder, renderer=RENDERER, deadline_s=60
        )
        self.strategy = build(
            "sample_strategies",
            section,
            buffer=self.buffer,
            schedule=schedule,
            renderer=RENDERER,
            tasks=lambda name: EXPERTS if name == "experts" else TASKS,
            algorithm=GRPO,
        )
        self.issued = 0
        """Slots that were leased."""

    async def live(self, first: int, last: int, resume: dict[str, Any] | None = None) -> list[Sample]:
        """The samples of the steps from version `first` to the one before `last`."""
        await self.buffer.restore(resume["buffer"] if resume else None, first)
        await self.strategy.restore(resume["strategy"] if resume else {})
        samples: list[Sample] = []
        exploring = asyncio.ensure_future(self._explore())
        try:
            for version in range(first, last):
                await self.buffer.advance("e", max(0, version - self.lag))
                async with asyncio.timeout(60):
                    samples.append(await self.strategy.sample(self.schedule.groups_per_step, version))
        finally:
            await self.buffer.close()
            await exploring
        return samples

    async def _explore(self) -> None:
        while True:
            try:
                lease = await self.buffer.lease("e")
            except StopAsyncIteration:
                return
            assert lease is not None
            self.issued += 1
            version = self.buffer.rows.explorer("e")[0] or 0
            useless = random.Random(lease.slot).random() < self.useless
            await self.buffer.put("e", played(self.schedule, lease.slot, version, lease.attempt, useless))

    async def state(self) -> dict[str, Any]:
        return {"buffer": await self.buffer.state(), "strategy": self.strategy.state()}


def slots(samples: Sequence[Sample]) -> list[list[int]]:
    return [[group.slot for group in sample.groups] for sample in samples]


# --------------------------------------------------------------------------- replay


async def test_replay_takes_the_newest_first_and_less_used_ones_before_others(tmp_path: Path) -> None:
    section = Replay.Config(fraction=0.5, decay=1.5, max_age=9)
    life = Life(tmp_path, section, schedule_of(section, 4))
    samples = await life.live(0, 4)
    # Step 0 has nothing to replay, so it plays four. After step 1 slots 0, 1 (version 0, used twice) have priority
    # 0 - 3, slots 2, 3 (used once) -1.5, slots 4, 5 (version 1, once) 1 - 1.5.
    assert slots(samples) == [[0, 1, 2, 3], [4, 0, 5, 1], [6, 4, 7, 5], [8, 6, 9, 7]]
    assert [sample.stored_slots for sample in samples] == [frozenset(), {0, 1}, {4, 5}, {6, 7}]
    assert [sample.metrics["replayed"] for sample in samples] == [0, 2, 2, 2]
    assert [sample.metrics["stored"] for sample in samples] == [4, 6, 8, 10]
    assert "use_count" not in samples[0].metrics
    assert [sample.metrics["use_count"] for sample in samples[1:]] == [1, 1, 1]
    assert [sample.metrics["fresh_reward"] for sample in samples] == [0.5] * 4


async def test_where_little_is_fresh_groups_come_back_again_and_again(tmp_path: Path) -> None:
    section = Replay.Config(fraction=0.75, decay=1.5, max_age=9)
    samples = await Life(tmp_path, section, schedule_of(section, 4)).live(0, 4)
    # Priorities before step 2: 4 has 1 - 1.5; 3, used once, -1.5; 0, 1, 2, used twice, -3.
    # Before step 3: 5 has 2 - 1.5, 4 has 1 - 3, 1, 2 and 3 have -3 and 0 has -4.5.
    assert slots(samples) == [[0, 1, 2, 3], [0, 4, 1, 2], [4, 5, 3, 0], [5, 6, 4, 1]]
    assert [sample.metrics["use_count"] for sample in samples[1:]] == pytest.approx([1, 4 / 3, 5 / 3])


async def test_without_decay_a_use_costs_nothing_and_capacity_lets_the_lowest_go(tmp_path: Path) -> None:
    section = Replay.Config(fraction=0.5, decay=0.0, max_age=9, capacity=3)
    life = Life(tmp_path, section, schedule_of(section, 4))
    # Equals go by arrival: of slots 0 to 3 the oldest, 0, is evicted; of 4, 5 (version 1) and the rest, those.
    samples = await life.live(0, 4)
    assert slots(samples) == [[0, 1, 2, 3], [4, 1, 5, 2], [6, 4, 7, 5], [8, 6, 9, 7]]
    assert [sample.metrics["stored"] for sample in samples] == [4 - 1, 3, 3, 3]
    assert [entry[0] for entry in life.strategy.state()["store"]] == [7, 8, 9]


async def test_a_limit_of_uses_counts_the_first_one_and_a_cooldown_lets_groups_rest(tmp_path: Path) -> None:
    section = Replay.Config(
        fraction=0.75, priority="decay_limit_randomization", use_count_limit=3, decay=0.0, cooldown=2, max_age=30
    )
    samples = await Life(tmp_path, section, schedule_of(section, 4)).live(0, 12)
    uses: dict[int, list[int]] = {}
    for version, step in enumerate(slots(samples)):
        for slot in step:
            uses.setdefault(slot, []).append(version)
    assert max(len(steps) for steps in uses.values()) == 3
    assert min(b - a for steps in uses.values() for a, b in pairwise(steps)) == 2


async def test_noise_changes_the_order_and_is_the_same_every_time(tmp_path: Path) -> None:
    def section(sigma: float) -> Replay.Config:
        return Replay.Config(
            fraction=0.5, priority="decay_limit_randomization", sigma=sigma, use_count_limit=0, max_age=30
        )

    async def orders(folder: str, sigma: float) -> list[list[int]]:
        said = section(sigma)
        return slots(await Life(tmp_path / folder, said, schedule_of(said, 6)).live(0, 8))

    quiet, loud, again = await orders("a", 0.0), await orders("b", 3.0), await orders("c", 3.0)
    assert loud == again != quiet
    linear = Replay.Config(fraction=0.5, max_age=30)
    assert slots(await Life(tmp_path / "d", linear, schedule_of(linear, 6)).live(0, 8)) == quiet


def test_the_noise_is_normal_and_drawn_anew_after_each_use(tmp_path: Path) -> None:
    section = Replay.Config(priority="decay_limit_randomization", sigma=2.0, decay=1.5)
    life = Life(tmp_path, section, schedule_of(section, 4))
    groups = [played(life.schedule, slot, 5) for slot in range(500)]
    noise = np.array(
        [
            [life.strategy._priority(_StoredGroup(group, uses, 5)) - (5 - 1.5 * uses) for uses in range(1, 5)]
            for group in groups
        ]
    )
    assert abs(noise.mean()) < 0.15
    assert abs(noise.std() - 2.0) < 0.15
    assert np.abs(np.corrcoef(noise.T) - np.eye(4)).max() < 0.2


@settings(max_examples=number_of(40))
@given(
    groups=st.integers(2, 6),
    fraction=st.floats(0.2, 0.9),
    max_age=st.integers(1, 5),
    cooldown=st.integers(1, 3),
    capacity=st.integers(1, 12),
    limit=st.integers(2, 4),
    sigma=st.sampled_from([0.0, 2.0]),
    useless=st.sampled_from([0.0, 0.4]),
    ahead=st.integers(0, 2),
    killed=st.integers(1, 9),
)
def test_every_step_is_full_and_a_resumed_run_repeats_it(
    groups: int,
    fraction: float,
    max_age: int,
    cooldown: int,
    capacity: int,
    limit: int,
    sigma: float,
    useless: float,
    ahead: int,
    killed: int,
) -> None:
    section = Replay.Config(
        fraction=fraction,
        max_age=max_age,
        cooldown=cooldown,
        capacity=capacity,
        sigma=sigma,
        use_count_limit=limit,
        priority="decay_limit_randomization",
    )
    schedule = schedule_of(section, groups, max_staleness=ahead)

    async def lives() -> tuple[list[Sample], list[Sample], int]:
        with TemporaryDirectory() as one, TemporaryDirectory() as two:
            whole = Life(Path(one), section, schedule, useless=useless, lag=ahead)
            samples = await whole.live(0, 10)
            before = Life(Path(two), section, schedule, useless=useless, lag=ahead)
            first = await before.live(0, killed)
            after = Life(Path(two), section, schedule, useless=useless, lag=ahead)
            return samples, first + await after.live(killed, 10, await before.state()), whole.issued

    samples, resumed, issued = asyncio.run(lives())
    trained = Counter[int]()
    last: dict[int, int] = {}
    for version, sample in enumerate(samples):
        step = [group.slot for group in sample.groups]
        assert len(step) == len(set(step)) == groups
        assert len(sample.stored_slots) <= schedule.stored_per_step
        by_slot = {group.slot: group for group in sample.groups}
        for slot in sample.stored_slots:
            assert trained[slot] < limit
            assert version - last[slot] >= cooldown
            assert version - by_slot[slot].oldest_version <= max_age
            assert GRPO.filter([by_slot[slot]])[0]
        for slot in set(step) - sample.stored_slots:
            assert slot not in trained
            assert version - by_slot[slot].oldest_version <= ahead
        trained.update(step)
        last |= dict.fromkeys(step, version)
        assert sample.metrics["stored"] <= capacity
    fresh = sum(groups - len(sample.stored_slots) for sample in samples)
    assert sorted(trained) == list(range(fresh)) or ahead
    assert len(trained) == fresh
    assert issued <= schedule.admitted(9) + fresh - 10 * schedule.fresh_per_step
    if not ahead:  # an asynchronous run goes by arrival
        assert slots(resumed) == slots(samples)
        assert [s.metrics for s in resumed] == [s.metrics for s in samples]


async def test_replaced_groups_are_fresh_and_counted_to_the_same_step(tmp_path: Path) -> None:
    section = Replay.Config(fraction=0.5, max_age=9)
    life = Life(tmp_path, section, schedule_of(section, 4))
    exploring = asyncio.ensure_future(life._explore())
    seen: list[list[int]] = []
    for version in range(3):
        await life.buffer.advance("e", version)
        first = await life.strategy.sample(4, version)
        await life.strategy.refuse(2)
        more = await life.strategy.sample(2, version)
        assert not more.stored_slots
        assert len({group.slot for group in (*first.groups, *more.groups)}) == 6
        seen += slots([first, more])
    await life.buffer.close()
    await exploring
    assert seen == [[0, 1, 2, 3], [4, 5], [6, 0, 7, 1], [8, 9], [10, 6, 11, 7], [12, 13]]


# --------------------------------------------------------------------------- staleness control


async def test_what_is_older_than_the_strategy_s_bound_is_left_out_and_replaced(tmp_path: Path) -> None:
    section = StalenessControl.Config(max_staleness=1)
    schedule = schedule_of(section, 2, max_staleness=3)
    life = Life(tmp_path, section, schedule)
    await life.buffer.restore(None, 0)
    for version in (0, 0, 1, 2):  # who plays slots 0 to 3
        await life.buffer.advance("e", version)
        lease = await life.buffer.lease("e")
        assert lease is not None
        await life.buffer.put("e", played(schedule, lease.slot, version))
    sample = await asyncio.wait_for(life.strategy.sample(2, 2), 60)  # slots 0 and 1 are two versions old
    assert [group.slot for group in sample.groups] == [2, 3]
    assert sample.metrics == {"left_out": 2}
    assert (await life.buffer.state())["refused"] == 2
    # Others are generated in their place.
    assert admitted(schedule, life.buffer.rows.head, 2) == schedule.admitted(2) + 2


async def test_whatever_lags_behind_no_group_is_older_than_the_bound(tmp_path: Path) -> None:
    section = StalenessControl.Config(max_staleness=1)
    schedule = schedule_of(section, 3, max_staleness=4)
    life = Life(tmp_path, section, schedule)
    samples = await life.live(0, 12)
    for version, sample in enumerate(samples):
        assert len(sample.groups) == 3
        assert all(version - group.oldest_version <= 1 for group in sample.groups)
    assert sum(sample.metrics["left_out"] for sample in samples) > 3  # version 0 played far ahead


# --------------------------------------------------------------------------- mix


@settings(max_examples=number_of(30))
@given(
    groups=st.integers(2, 7),
    ratio=st.floats(0.05, 0.8),
    ahead=st.integers(0, 2),
    ordered=st.booleans(),
    killed=st.integers(1, 7),
    taskset=st.sampled_from(["experts", "train"]),
    first=st.sampled_from([0, 6]),
)
def test_a_step_is_part_fresh_and_part_expert_and_a_resumed_run_repeats_it(
    groups: int, ratio: float, ahead: int, ordered: bool, killed: int, taskset: str, first: int
) -> None:
    section = Mix.Config(expert_data_ratio=ratio, taskset=taskset)
    experts = section.num_stored(groups)
    if experts >= groups:
        return  # the check refuses it
    schedule = schedule_of(section, groups, max_staleness=ahead, deterministic=ordered, first_version=first)

    async def lives() -> tuple[list[Sample], list[Sample], int]:
        with TemporaryDirectory() as one, TemporaryDirectory() as two:
            whole = Life(Path(one), section, schedule)
            samples = await whole.live(first, first + 8)
            before = Life(Path(two), section, schedule)
            early = await before.live(first, first + killed)
            after = Life(Path(two), section, schedule)
            return samples, early + await after.live(first + killed, first + 8, await before.state()), whole.issued

    samples, resumed, issued = asyncio.run(lives())
    epochs = Counter[tuple[str, int]]()
    for sample in samples:
        written = [group for group in sample.groups if group.expert]
        assert (len(sample.groups), len(written)) == (groups, experts)
        assert experts == sample.metrics["expert"] == math.ceil(round(ratio * groups, 9))
        assert len({group.group_id for group in sample.groups}) == groups
        assert sample.stored_slots == {group.slot for group in written}
        assert all(group.slot < 0 for group in written)
        for group in written:
            (member,) = group.trajectories
            assert not member.rewards
            assert set(member.turns[0].policy_version.tolist()) == {EXPERT_VERSION}
            assert RENDERER.decode(member.turns[0].tokens) == group.task.columns["completion"]
            epochs[group.task.task_id, group.epoch] += 1
        # Consecutive parts of the step hold about as much of either kind as the whole does.
        half = [group.expert for group in sample.groups][: groups // 2]
        assert abs(sum(half) - experts * len(half) / groups) <= 1
    assert max(epochs.values()) == 1
    assert issued <= schedule.admitted(first + 7) == min(8 + ahead, 40) * (groups - experts)
    fresh = [[group.slot for group in sample.groups if not group.expert] for sample in samples]
    assert sorted(slot for step in fresh for slot in step) == list(range(8 * (groups - experts)))
    assert slots(resumed) == slots(samples)


async def test_a_second_helping_of_a_mixed_step_is_fresh(tmp_path: Path) -> None:
    section = Mix.Config(expert_data_ratio=0.5, taskset="experts")
    life = Life(tmp_path, section, schedule_of(section, 4))
    await life.buffer.advance("e", 0)
    exploring = asyncio.ensure_future(life._explore())
    first = await life.strategy.sample(4, 0)
    await life.strategy.refuse(2)
    more = await life.strategy.sample(2, 0)
    await life.buffer.close()
    await exploring
    assert [group.slot for group in first.groups] == [0, -1, 1, -2]
    assert [group.slot for group in more.groups] == [2, 3]


def test_an_experts_rows_do_not_come_in_step_with_the_tasks_that_are_played(tmp_path: Path) -> None:
    section = Mix.Config(expert_data_ratio=0.5, taskset="train")
    life = Life(tmp_path, section, schedule_of(section, 4))
    samples = asyncio.run(life.live(0, 6))
    same = [len({g.task.task_id for g in sample.groups}) < 4 for sample in samples]
    assert not all(same)


def test_interleaving_keeps_both_orders() -> None:
    schedule = Schedule(TASKS, seed=0)
    some, others = ([played(schedule, base + i, 0) for i in range(n)] for base, n in ((0, 5), (100, 2)))
    assert [group.slot for group in interleaved(some, others)] == [0, 100, 1, 2, 3, 101, 4]
    assert interleaved(some, []) == tuple(some)


# --------------------------------------------------------------------------- what a config may say


def configured(strategy: object, algorithm: object = "grpo", **said: Any) -> RunConfig:
    tasks = {"train": {"kind": "arithmetic"}, "experts": {"kind": "arithmetic"}}
    schedule = {"groups_per_step": 4, "group_size": 2, **said.pop("schedule", {})}
    buffer = {"strategy": strategy, **said.pop("buffer", {})}
    return configs.configured(tasks=tasks, algorithm=algorithm, buffer=buffer, schedule=schedule, **said)


MIX = {"kind": "mix", "taskset": "experts"}
LOSS = {"kind": "grpo", "policy_loss": "mix"}
AHEAD = {"schedule": {"max_staleness": 2}}
ROWS = {"buffer": {"kind": "files"}, "schedule": {"group_size": 1}}
SETTLED = {"schedule": {"max_staleness": 2, "deterministic": True}}


def test_configs_that_run() -> None:
    assert configured("default").max_age == 0
    assert configured(MIX, LOSS).max_age == 0
    assert configured(MIX, LOSS, **SETTLED).max_age == 2
    assert configured({"kind": "replay", "max_age": 3}).max_age == 3
    assert configured({"kind": "replay", "max_age": 3}, schedule={"max_staleness": 5}).max_age == 5
    assert configured({"kind": "staleness_control", "max_staleness": 1}, **AHEAD).max_age == 1
    configured(MIX, {"kind": "grpo", "policy_loss": "mix_chord", "entropy": {"coef": 0.1, "term": "sampled"}})


@pytest.mark.parametrize(
    ("strategy", "algorithm", "said", "where", "found"),
    [
        ({"kind": "mixt"}, "grpo", {}, "buffer.strategy", "did you mean 'mix'"),
        ({"kind": "staleness_control", "max_staleness": 2}, "grpo", AHEAD, "strategy.max_staleness", "left out"),
        ({"kind": "staleness_control", "max_staleness": 3}, "grpo", AHEAD, "strategy.max_staleness", "no older group"),
        ({"kind": "staleness_control", "max_staleness": 1}, "grpo", SETTLED, "strategy.kind", "needs further groups"),
        (
            {"kind": "staleness_control", "max_staleness": 1},
            "grpo",
            {"schedule": {"max_staleness": 4}, "sync": {"interval": 3}},
            "strategy.max_staleness",
            "even a fresh group",
        ),
        ({"kind": "replay"}, "grpo", SETTLED, "strategy.kind", "needs further groups"),
        ({"kind": "replay", "fraction": 0.2}, "grpo", {}, "strategy.fraction", "none of 4 group"),
        ({"kind": "replay", "sigma": 1.0}, "grpo", {}, "strategy.sigma", "no effect"),
        ({"kind": "replay", "cooldown": 9}, "grpo", {}, "strategy.max_age", "too old before its second"),
        (
            {"kind": "replay", "priority": "decay_limit_randomization", "use_count_limit": 1},
            "grpo",
            {},
            "strategy.use_count_limit",
            "none is ever replayed",
        ),
        # Replayed groups are old ones: a loss without a ratio is as wrong for them as for stale ones.
        (
            {"kind": "replay"},
            {"kind": "grpo", "policy_loss": "reinforce", "correction": "none"},
            {},
            "policy_loss",
            "groups up to 4 version",
        ),
        ({"kind": "mix", "taskset": "other"}, LOSS, {}, "strategy.taskset", "no such taskset"),
        ({**MIX, "expert_data_ratio": 0.9}, LOSS, {}, "strategy.expert_data_ratio", "all 4 group"),
        (MIX, "grpo", {}, "algorithm.policy_loss", "treat an expert's tokens as the policy's own"),
        (MIX, {"kind": "ppo", "policy_loss": "mix"}, {}, "algorithm.advantage", "needs a critic"),
        (MIX, "dpo", {}, "algorithm.kind", "no pair"),
        ("default", LOSS, {}, "algorithm.policy_loss", "never gives a step both"),
        (
            "default",
            {"kind": "grpo", "entropy": {"coef": 0.1, "term": "sampled"}},
            {},
            "algorithm.entropy.term",
            "never gives a step both",
        ),
        (MIX, "sft", ROWS, "strategy.kind", "has no explorers"),
        ({"kind": "replay"}, "sft", ROWS, "strategy.kind", "has no explorers"),
    ],
)
def test_what_would_have_no_effect_or_a_wrong_one_is_refused(
    strategy: object, algorithm: object, said: dict[str, Any], where: str, found: str
) -> None:
    with refused(ConfigError) as caught:
        configured(strategy, algorithm, **said)
    problems = [problem for problem in caught.value.problems if problem.where.endswith(where)]
    assert problems, str(caught.value)
    assert any(found in " ".join(problem) for problem in problems), str(caught.value)


def test_replayed_groups_are_corrected_like_stale_ones_and_the_plan_says_what_is_played() -> None:
    config = configured({"kind": "replay", "fraction": 0.5})
    (plan,) = plan_run(config, 1).text.stages
    assert "up to" not in plan.algorithm["correction"]
    assert "groups may be 4 version(s) old" in plan.algorithm["correction"]
    assert config.algorithm.for_run(config).correction.kind == "decoupled_token_is"  # pyright: ignore[reportAttributeAccessIssue]
    assert (plan.groups_per_step, plan.rolled_out_groups_per_step, plan.trajectories_per_step) == (4, 2, 4)
    assert plan.slots == 200


# --------------------------------------------------------------------------- what an algorithm makes of a mixed step


def written(slot: int) -> Group:
    return Group(-1 - slot, EXPERTS[slot], (Trajectory(0, (turn(EXPERT_VERSION, (7, 8, 9)),)),))


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "grpo"},
        {"kind": "rloo", "normalise_advantages": "std"},
        {"kind": "reinforce_plus_plus"},
        {"kind": "gdpo"},
        {"kind": "grpo", "shaping": ["group_normalise", "running_normalise"]},
        {"kind": "grpo", "filters": ["zero_variance", "difficulty"]},
        {"kind": "opo", "clip_advantages": 0.3},
    ],
    ids=str,
)
def test_an_expert_s_groups_are_kept_worth_nothing_and_compared_with_nobody(said: dict[str, Any]) -> None:
    def algorithm() -> Any:
        return build_algorithm(plugin("algorithms", AlgorithmConfig)({"policy_loss": "mix", **said}), 0, 8)

    schedule = Schedule(TASKS, seed=0, group_size=2)
    own = [played(schedule, slot, 0) for slot in range(3)]
    mixed = [own[0], written(0), own[1], written(1), written(2), own[2]]
    kept, metrics = algorithm().filter(mixed)
    assert [group.slot for group in kept] == [group.slot for group in mixed]
    assert metrics["rollout/groups"] == 6
    alone = algorithm().filter(own)[1]
    for key in ("rollout/response_tokens", "reward/mean", "reward/trained_mean", "reward/std", "rollout/failed"):
        assert metrics[key] == alone[key], key

    batch, said_mixed = algorithm().advantages(algorithm().batch(mixed))
    expected, said_alone = algorithm().advantages(algorithm().batch(own))
    assert said_mixed == said_alone
    fresh = [row for row, e in enumerate(batch.experiences) if not e.expert]
    for name in ("advantages", "returns"):
        values = [batch.columns[name][row] for row in fresh]
        assert [v.tobytes() for v in values] == [v.tobytes() for v in expected.columns[name]]
        assert all(not batch.columns[name][row].any() for row in range(len(batch)) if row not in fresh)
    assert any(a.any() for a in expected.columns["advantages"])


def test_a_step_of_an_expert_s_groups_alone_still_has_columns() -> None:
    """Where every fresh group was refused."""
    mixed = [written(0), written(1)]
    batch, _ = GRPO.advantages(GRPO.batch(GRPO.filter(mixed)[0]))
    assert [a.tolist() for a in batch.columns["advantages"]] == [[0.0] * 6] * 2
