"""Trinity-RFT's CheckpointMonitor: a save is complete once it is announced and all its savers have finished, in any
order; savers take turns."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from example_counts import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.failing import refused
from trivium.checkpoint.store import CheckpointStore
from trivium.foundation.atomic import MANIFEST
from trivium.foundation.errors import DataError, RunDirError, SyncError
from trivium.frontdoors.trinity import CheckpointMonitor
from trivium.types import SaveStrategy


def monitor(directory: Path, strategy: SaveStrategy = SaveStrategy.UNRESTRICTED, **more: Any) -> CheckpointMonitor:
    return CheckpointMonitor(strategy, str(directory), **more)


def noted(directory: Path) -> int:
    """The newest step whose state dict is recorded as complete."""
    path = directory / CheckpointMonitor.LATEST["state_dict"]
    return int(path.read_text()) if path.exists() else 0


# --------------------------------------------------------------------------- what is complete

Event = tuple[str, bool]
"""(what a saver or the announcer says, whether of the state dict)."""


@st.composite
def save_of_a_step(draw: st.DrawFn) -> list[Event]:
    """Everything that is said of one step, in any order in which nothing is announced before it is registered."""
    counts = {kind: draw(st.integers(0, 3)) for kind in (False, True)}
    said: list[Event] = [("register", kind) for kind, count in counts.items() for _ in range(count)]
    said += [("finish", kind) for kind, count in counts.items() for _ in range(count)]
    said = draw(st.permutations(said))
    last = max((i for i, (what, _) in enumerate(said) if what == "register"), default=-1)
    said.insert(draw(st.integers(last + 1, len(said))), ("announce", False))
    return said


async def say(target: CheckpointMonitor, step: int, what: str, is_state_dict: bool) -> None:
    if what == "register":
        count = "state_dict_thread_count" if is_state_dict else "checkpoint_thread_count"
        await target.register_thread_count(step, **{count: 1})
    elif what == "announce":
        await target.monitor_step(step, is_state_dict)
    else:
        await target.notify_started("node", "job")
        await target.notify_finished(step, is_state_dict)


@settings(max_examples=number_of(60))
@given(saves=st.lists(save_of_a_step(), min_size=1, max_size=4), data=st.data())
def test_complete_is_announced_and_everybody_done_in_any_order(
    saves: list[list[Event]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Steps interleave at will; `latest` is the newest whose every registered saver finished after the announcement, or
    before it."""
    order = data.draw(st.permutations([step for step, said in enumerate(saves, 1) for _ in said]))

    async def play() -> None:
        target = monitor(tmp_path_factory.mktemp("saves"))
        left = {step: iter(said) for step, said in enumerate(saves, 1)}
        open_savers = {step: [0, 0] for step in left}
        announced: set[int] = set()
        complete = 0
        for step in order:
            what, kind = next(left[step])
            await say(target, step, what, kind)
            open_savers[step][kind] += {"register": 1, "finish": -1, "announce": 0}[what]
            announced |= {step} if what == "announce" else set()
            if step in announced and open_savers[step] == [0, 0]:
                complete = max(complete, step)
            assert target.latest_checkpoint_step == complete
        assert complete == len(saves)
        assert target._state.steps == {}  # counters of finished steps are forgotten
        assert target._state.savers == {}

    asyncio.run(play())


async def test_a_state_dict_may_be_complete_long_before_its_checkpoint(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    await target.register_thread_count(5, state_dict_thread_count=1, checkpoint_thread_count=2)
    await target.monitor_step(5)
    await target.notify_finished(5)
    assert (noted(tmp_path), target.latest_checkpoint_step) == (0, 0)
    await target.notify_finished(5, is_state_dict=True)
    assert (noted(tmp_path), target.latest_checkpoint_step) == (5, 0)
    await target.notify_finished(5)
    assert (noted(tmp_path), target.latest_checkpoint_step) == (5, 5)
    await target.monitor_step(6, is_state_dict=True)  # nobody was registered
    assert (noted(tmp_path), target.latest_checkpoint_step) == (6, 5)


async def test_latest_is_the_newest_checkpoint_of_a_run_in_the_same_directory(tmp_path: Path) -> None:
    store, target = CheckpointStore(tmp_path, keep=1), monitor(tmp_path)
    assert target.latest_checkpoint_step == 0
    for step in (3, 1, 7):  # 1 again after a resume from somewhere else
        await store.save(step, lambda directory: (directory / "weights").touch(), {})
        assert target.latest_checkpoint_step == store.steps()[-1]
    (tmp_path / "step-000007" / MANIFEST).unlink()  # somebody removes it by hand: it is gone for both
    assert store.latest() is None
    assert target.latest_checkpoint_step == 0


async def test_checkpoints_of_a_run_are_copied_when_a_save_is_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await CheckpointStore(tmp_path / "here").save(3, lambda directory: (directory / "weights").touch(), {})
    elsewhere = tmp_path / "elsewhere"
    target = CheckpointMonitor(SaveStrategy.UNRESTRICTED, str(tmp_path / "here"), elsewhere.as_uri())
    await target.monitor_step(3)
    copied = {path.name for path in (elsewhere / "step-000003").iterdir()}
    assert copied == {"weights", "state.json", MANIFEST}
    (tmp_path / "here" / "step-000003" / MANIFEST).write_text("{}")  # nothing can be copied by it
    await target.monitor_step(4)
    assert target.latest_checkpoint_step == 4
    assert "copy checkpoints to" in caplog.text


async def test_threads_with_event_loops_of_their_own_save_through_one_monitor(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    inside: list[int] = []
    most: list[int] = []

    async def save(step: int) -> None:
        await target.register_thread_count(step, checkpoint_thread_count=1)
        await target.monitor_step(step)
        await target.notify_started("node", "job")
        inside.append(1)
        most.append(len(inside))
        await asyncio.sleep(0.02)
        inside.pop()
        await target.notify_finished(step)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(asyncio.run, save(step)) for step in range(1, 7)]:
            done.result(timeout=120)
    assert max(most) == 1
    assert target.latest_checkpoint_step == 6


# --------------------------------------------------------------------------- who may save when

SAVERS = [(node, job) for node in ("n0", "n1") for job in ("a", "b") for _ in range(2)]


@pytest.mark.parametrize(
    ("strategy", "together"),
    [
        (SaveStrategy.SINGLE_THREAD, lambda one, other: False),
        (SaveStrategy.SINGLE_PROCESS, lambda one, other: one == other),
        (SaveStrategy.SINGLE_NODE, lambda one, other: one[0] == other[0]),
        (SaveStrategy.UNRESTRICTED, lambda one, other: True),
    ],
)
async def test_who_saves_at_the_same_time(strategy: SaveStrategy, together: object, tmp_path: Path) -> None:
    """All that may save together do, and no others."""
    target = monitor(tmp_path, strategy)
    assert callable(together)
    inside: list[tuple[int, tuple[str, str]]] = []
    met: set[tuple[int, int]] = set()

    async def saver(number: int, place: tuple[str, str]) -> None:
        await target.notify_started(*place)
        for other, theirs in inside:
            assert together(place, theirs), (place, theirs)
            met.add((other, number))
        inside.append((number, place))
        await asyncio.sleep(0.02)
        inside.remove((number, place))
        await target.notify_finished(1)

    async with asyncio.timeout(60):
        await asyncio.gather(*(saver(number, place) for number, place in enumerate(SAVERS)))
    pairs = {(i, j) for j, one in enumerate(SAVERS) for i, other in enumerate(SAVERS[:j]) if together(one, other)}
    assert {tuple(sorted(pair)) for pair in met} == pairs


async def test_turns_are_given_first_come_first_served(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_NODE)
    await target.notify_started("n0", "a")
    order: list[str] = []

    async def saver(node: str) -> None:
        await target.notify_started(node, "a")
        order.append(node)
        await target.notify_finished(1)

    waiting = []
    names = [f"n{number * 7 % 20}" for number in range(20)]
    for node in names:
        waiting.append(asyncio.ensure_future(saver(node)))
        await asyncio.sleep(0)
    await target.notify_finished(1)
    await asyncio.gather(*waiting)
    assert order == names


async def test_whoever_waits_is_woken_and_does_not_look_now_and_then(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    await target.notify_started("n", "a")
    async with asyncio.timeout(40):  # looking alone would take 60 s
        for _ in range(120):
            waiting = asyncio.ensure_future(target.notify_started("n", "a"))
            await asyncio.sleep(0.001)
            await target.notify_finished(1)
            await waiting


async def test_a_saver_that_stops_waiting_leaves_the_queue(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    await target.notify_started("n", "a")
    gone = asyncio.ensure_future(target.notify_started("n", "b"))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(target.notify_started("n", "c"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    await target.notify_finished(1)
    async with asyncio.timeout(60):
        await waiting


async def test_no_wait_is_without_a_deadline_and_it_names_both_sides(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD, deadline_s=0.1)
    await target.notify_started("n0", "writer")
    await target.register_thread_count(8, checkpoint_thread_count=2)
    with refused(SyncError, "waiting on n1", "writer on n0", "8: {", "'checkpoint': 2"):
        await target.notify_started("n1", "waiting")


# --------------------------------------------------------------------------- what is refused


async def test_a_step_that_cannot_be_written_down_is_not_complete(tmp_path: Path) -> None:
    class Full(CheckpointMonitor):
        def update_latest_checkpoint_step(self, step: int) -> None:
            raise OSError("disk full")

    target = Full(SaveStrategy.UNRESTRICTED, str(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        await target.monitor_step(1)
    await target.monitor_step(1)  # it is given up, so nothing is written again
    assert target.latest_checkpoint_step == 0


async def test_a_complete_step_survives_the_monitor(tmp_path: Path) -> None:
    for step in (12, 4):
        monitor(tmp_path).update_latest_checkpoint_step(step)
    target = monitor(tmp_path)
    assert (target.latest_checkpoint_step, noted(tmp_path)) == (12, 0)
    target.update_latest_state_dict_step(14)
    assert (target.latest_checkpoint_step, noted(tmp_path)) == (12, 14)
    (tmp_path / "latest_state_dict_iteration.txt").write_text("fourteen")
    with refused(RunDirError, "latest_state_dict_iteration.txt", "fourteen"):
        target.update_latest_state_dict_step(15)


@pytest.mark.parametrize("step", [-1, 2.0, True, "3", None])
async def test_steps_are_integers_from_0(step: Any, tmp_path: Path) -> None:
    target = monitor(tmp_path)
    for update in (target.update_latest_checkpoint_step, target.update_latest_state_dict_step):
        with refused(DataError, "step", repr(step)):
            update(step)
    for call in (target.register_thread_count, target.monitor_step, target.notify_finished):
        with refused(DataError, "step", repr(step)):
            await call(step)
    with refused(DataError, "checkpoint_thread_count", repr(step)):
        await target.register_thread_count(1, checkpoint_thread_count=step)
    assert noted(tmp_path) == 0
