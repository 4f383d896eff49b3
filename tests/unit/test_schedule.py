"""The schedule never repeats or drops a task, and the versions it names keep the staleness bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.schedule import Schedule
from trivium.types import Task


def tasks(number: int) -> Sequence[Task]:
    return [Task(f"task-{i}", ()) for i in range(number)]


@given(st.integers(1, 40), st.integers(0, 5), st.booleans())
def test_every_epoch_visits_every_task_once(number: int, seed: int, shuffle: bool) -> None:
    schedule = Schedule(tasks(number), seed=seed, shuffle=shuffle)
    for epoch in range(3):
        seen = [schedule.at(slot) for slot in range(epoch * number, (epoch + 1) * number)]
        assert sorted(a.task.task_id for a in seen) == sorted(t.task_id for t in tasks(number))
        assert {a.epoch for a in seen} == {epoch}


def test_orders_differ_between_epochs_seeds_and_stages() -> None:
    def order(**change: int) -> list[str]:
        epoch = change.pop("epoch", 0)
        schedule = Schedule(tasks(30), **{"seed": 0, "stage": 0, **change})
        return [schedule.at(slot).task.task_id for slot in range(epoch * 30, epoch * 30 + 30)]

    orders = [order(), order(epoch=1), order(seed=1), order(stage=1)]
    assert len({tuple(o) for o in orders}) == 4
    assert order() == orders[0]


def test_members_of_a_group_have_randomness_of_their_own() -> None:
    schedule = Schedule(tasks(8), seed=3, group_size=4)
    digests = {schedule.key(schedule.at(slot), index).digest() for slot in range(24) for index in range(4)}
    assert len(digests) == 24 * 4


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.sampled_from([0, 7, 350]))
def test_a_slot_is_played_with_a_published_version_within_the_bound(
    ahead: int, interval: int, groups: int, steps: int, first: int
) -> None:
    schedule = Schedule(
        tasks(5),
        seed=0,
        first_version=first,
        groups_per_step=groups,
        max_staleness=interval - 1 + ahead,
        sync_interval=interval,
        deterministic=True,
        steps=steps,
    )
    for slot in range(steps * groups):
        version = schedule.version_for(slot)
        trained_at = schedule.step_of(slot) - 1
        assert schedule.published(version)
        assert first <= version <= trained_at
        assert trained_at - version <= schedule.max_staleness
        assert slot < schedule.admitted(version)
        older = [v for v in range(first, version) if schedule.published(v)]
        assert all(slot >= schedule.admitted(v) for v in older)


@pytest.mark.parametrize(("ordered", "expected"), [(True, 8), (False, 10)])
def test_resume_goes_back_to_the_oldest_version_a_pending_slot_needs(ordered: bool, expected: int) -> None:
    schedule = Schedule(tasks(5), seed=0, groups_per_step=2, max_staleness=2, deterministic=ordered, steps=40)
    assert schedule.resume_version(10) == expected


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 9), st.sampled_from([0, 7]))
def test_over_rollout_admits_so_many_groups_more_and_gives_up_the_order(
    staleness: int, groups: int, over: int, steps: int, first: int
) -> None:
    said = {"seed": 0, "first_version": first, "groups_per_step": groups, "max_staleness": staleness, "steps": steps}
    plain, more = Schedule(tasks(5), **said), Schedule(tasks(5), over_rollout=over, **said)  # pyright: ignore[reportArgumentType]
    for version in range(first, first + steps + 1):
        assert more.admitted(version) == plain.admitted(version) + over
    assert plain.admitted(first) == min(staleness + 1, steps) * groups
    assert more.ordered == (staleness == 0 and over == 0)


def test_slots_are_counted_by_what_a_step_takes_from_the_buffer() -> None:
    """Groups that the sample strategy brings from elsewhere have none."""
    schedule = Schedule(tasks(5), seed=0, groups_per_step=4, stored_per_step=1, max_staleness=1, steps=10)
    assert (schedule.fresh_per_step, schedule.admitted(0), schedule.step_of(2), schedule.step_of(3)) == (3, 6, 1, 2)
