"""The loop under random durations and failures: bounds hold for every group, nothing is lost, trained twice or late."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.board import MemoryBoard
from trivium.buffers.memory import MemoryBuffer
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer
from trivium.loops import explore_loop, follow_weights
from trivium.policy import Policy
from trivium.rewards.calling import make_judge
from trivium.schedule import Schedule
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Group, Lease, Message, Sampling, Task

TASKS = [Task(f"t{i}", (Message("user", str(i)),)) for i in range(7)]
RENDERER = ChatRenderer(tiny_tokenizer("0123456789"))


class Dawdling:
    """A workflow of random length: some rollouts are stragglers, some fail."""

    def __init__(self, dice: random.Random, failing: float) -> None:
        self.dice, self.failing = dice, failing

    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        await asyncio.sleep(self.dice.choice([0, 0, 0.001, 0.002, 0.012]))
        if self.dice.random() < self.failing:
            raise ValueError("the world broke")
        turn = await policy.reply(task.prompt)
        if self.dice.random() < 0.3:
            await asyncio.sleep(self.dice.choice([0.001, 0.006]))
            await policy.reply((*task.prompt, Message("assistant", turn.text), Message("user", "1")))
        return {"length": float(len(turn.tokens))}


@dataclass
class Outcome:
    """What the loops did to the slots of a stage."""

    steps: list[list[Group]]
    """The groups of each train step."""
    evicted: int
    leases: Counter[int]
    """How often each slot was issued."""
    puts: Counter[int]
    """How often each slot came back."""
    waiting: set[int]
    """Finished, not taken."""
    in_flight: set[int]
    next_slot: int
    """What the buffer would issue next."""
    attempts: Counter[int]
    """How often each slot was evicted."""


class Watched(MemoryBuffer):
    """The buffer, with a note of every slot that goes out and comes back."""

    def watch(self) -> None:
        self.leases, self.puts = Counter[int](), Counter[int]()

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        lease = await super().lease(owner, wait=wait)
        if lease is not None:
            self.leases[lease.slot] += 1
        return lease

    async def put(self, owner: str, group: Group) -> None:
        called_off = group.slot in self._off.get(owner, ())
        await super().put(owner, group)
        self.puts[group.slot] += not called_off


async def simulate(schedule: Schedule, rollouts: Path, seed: int, failing: float) -> Outcome:
    """The real loops around a trainer that only counts."""
    dice = random.Random(seed)
    engine = ScriptedEngine(
        ScriptedEngine.Config(replies=((1, 2), (3,), (4, 5, 6))), eos_token_ids=RENDERER.eos_token_ids,
        decode=RENDERER.decode,
    )  # fmt: skip
    explorer = Explorer(
        engine, RENDERER, Dawdling(dice, failing), make_judge(()), Sampling(8), engine.max_context, 5.0, 64
    )
    buffer = Watched(MemoryBuffer.Config(), schedule=schedule, rollouts=rollouts, renderer=RENDERER, deadline_s=10)
    buffer.watch()
    await buffer.restore(None, schedule.first_version)
    channel = MemoryChannel(keep=schedule.max_staleness // schedule.sync_interval + 2)
    synchronizer = Synchronizer(MemoryBoard(), deadline_s=10)

    def publish(version: int) -> None:
        channel.offer(version, [("weight", torch.full((2,), float(version)))])
        synchronizer.publish(version)

    steps: list[list[Group]] = []
    async with asyncio.TaskGroup() as roles:
        helpers = [
            roles.create_task(follow_weights(explorer, buffer, schedule, synchronizer, channel)),
            roles.create_task(explore_loop(explorer, buffer, schedule, synchronizer)),
        ]
        first = schedule.first_version
        publish(first)
        for version in range(first, first + schedule.steps):
            steps.append(await buffer.take(schedule.groups_per_step, version))
            await asyncio.sleep(dice.choice([0, 0.001, 0.004]))
            if schedule.published(version + 1):
                publish(version + 1)
        # The account at one moment, before anybody is cancelled.
        slots = buffer.leases.keys()
        outcome = Outcome(
            steps, buffer._evicted + buffer._called_off, buffer.leases.copy(), buffer.puts.copy(), set(buffer._groups), set(buffer._leases),
            buffer._free_slot, Counter({slot: buffer._attempts.get(slot, 0) for slot in slots}),
        )  # fmt: skip
        for helper in helpers:
            helper.cancel()
    return outcome


def run(schedule: Schedule, seed: int, failing: float) -> Outcome:
    with TemporaryDirectory() as directory:
        return asyncio.run(simulate(schedule, Path(directory), seed, failing))


@settings(max_examples=40, deadline=None)
@given(
    ahead=st.integers(0, 3), interval=st.integers(1, 3), groups=st.integers(1, 4), deterministic=st.booleans(),
    first=st.sampled_from([0, 5]), failing=st.sampled_from([0.0, 0.2]), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_no_group_is_staler_than_the_bound_or_trained_twice(
    ahead: int, interval: int, groups: int, deterministic: bool, first: int, failing: float, seed: int
) -> None:
    schedule = Schedule(
        TASKS, seed=seed, first_version=first, groups_per_step=groups, group_size=2, sync_interval=interval,
        max_staleness=interval - 1 + ahead, deterministic=deterministic, steps=8,
    )  # fmt: skip
    done = run(schedule, seed, failing)
    steps, evicted = done.steps, done.evicted
    assert [len(step) for step in steps] == [groups] * 8
    taken = Counter(group.slot for step in steps for group in step)
    assert max(taken.values()) == 1
    for version, step in enumerate(steps, start=first):
        for group in step:
            assert 0 <= version - group.oldest_version <= schedule.max_staleness
            assert len(group.trajectories) == 2
            assert group.task.task_id == schedule.at(group.slot).task.task_id
            for turn in group.turns():
                assert (np.diff(turn.policy_version) == 0).all()
    if schedule.ordered:
        assert evicted == 0
        assert [g.slot for step in steps for g in step] == list(range(8 * groups))
        versions = {g.slot: {int(v) for t in g.turns() for v in t.policy_version} for step in steps for g in step}
        assert all(seen <= {schedule.version_for(slot)} for slot, seen in versions.items())
    assert_every_slot_is_accounted_for(schedule, done, set(taken))


def assert_every_slot_is_accounted_for(schedule: Schedule, done: Outcome, taken: set[int]) -> None:
    """Each slot issued was taken, waits, is being played, is to be issued again, or was given up: one of these."""
    issued = set(done.leases)
    given_up = {slot for slot in issued if done.attempts[slot] == schedule.max_attempts}
    to_be_issued = issued - taken - done.waiting - done.in_flight - given_up
    assert issued == set(range(len(issued)))
    assert len(issued) <= schedule.admitted(schedule.first_version + schedule.steps) + len(given_up)
    assert min(to_be_issued, default=len(issued)) == done.next_slot
    assert sum(map(len, (taken, done.waiting, done.in_flight, given_up, to_be_issued))) == len(issued)
    assert done.attempts.total() == done.evicted
    assert max(done.attempts.values()) <= schedule.max_attempts
    for slot in issued:
        attempts = done.attempts[slot]
        # Every playing that came back was taken, evicted, or still waits; every other one is being played.
        assert done.leases[slot] == attempts + (slot in taken or slot in done.waiting or slot in done.in_flight)
        assert done.puts[slot] <= attempts + (slot in taken or slot in done.waiting)
        assert slot not in to_be_issued or 0 < attempts < schedule.max_attempts


def test_zero_staleness_is_the_synchronous_run_group_for_group() -> None:
    """The same groups, whatever the durations were."""
    schedule = Schedule(TASKS, seed=1, groups_per_step=3, group_size=2, steps=5)

    def tokens(seed: int) -> list[tuple[int, int, tuple[int, ...]]]:
        return [
            (group.slot, group.version, tuple(token for turn in group.turns() for token in turn.tokens[:1].tolist()))
            for step in run(schedule, seed, 0.0).steps
            for group in step
        ]

    first = [(slot, version) for slot, version, _ in tokens(1)]
    assert first == [(slot, version) for slot, version, _ in tokens(2)]
    assert [version for _, version in first] == [v for v in range(5) for _ in range(3)]
