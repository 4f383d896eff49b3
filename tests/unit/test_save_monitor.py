"""CheckpointMonitor: complete is announced and everybody done, in whatever order; savers take turns; the dead are
noticed, and what they were saving never counts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.checkpoint.atomic import MANIFEST, manifest_files
from trivium.checkpoint.save_monitor import CheckpointMonitor, run_now, save_step, saving
from trivium.concurrency import ProcessLife
from trivium.errors import RunDirError, SyncError
from trivium.frontdoors.trinity import CheckpointMonitor as TrinityMonitor
from trivium.types import SaveStrategy


def monitor(directory: Path, strategy: SaveStrategy = SaveStrategy.UNRESTRICTED, **more: float) -> CheckpointMonitor:
    return CheckpointMonitor(strategy, str(directory), **more)


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


@settings(max_examples=60)
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


async def test_steps_may_finish_in_any_order_and_latest_only_grows(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    for step in (6, 7):
        await target.register_thread_count(step, checkpoint_thread_count=1)
        await target.monitor_step(step)
    await target.notify_finished(7)
    assert target.latest_checkpoint_step == 7
    await target.notify_finished(6)
    assert target.latest_checkpoint_step == 7
    target.update_latest_checkpoint_step(3)
    assert target.latest_checkpoint_step == 7


async def test_a_step_of_which_nobody_was_registered_is_complete_once_it_is_announced(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    await target.monitor_step(4, is_state_dict=True)
    assert (target.latest_state_dict_step, target.latest_checkpoint_step) == (4, 0)
    await target.monitor_step(5)
    assert (target.latest_state_dict_step, target.latest_checkpoint_step) == (5, 5)


async def test_a_state_dict_may_be_complete_long_before_its_checkpoint(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    await target.register_thread_count(5, state_dict_thread_count=1, checkpoint_thread_count=2)
    await target.monitor_step(5)
    await target.notify_finished(5)
    assert (target.latest_state_dict_step, target.latest_checkpoint_step) == (0, 0)
    await target.notify_finished(5, is_state_dict=True)
    assert (target.latest_state_dict_step, target.latest_checkpoint_step) == (5, 0)
    await target.notify_finished(5)
    assert (target.latest_state_dict_step, target.latest_checkpoint_step) == (5, 5)


async def test_what_several_savers_wrote_is_sealed_when_the_last_is_done(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    directory = Path(await target.begin(9))
    await target.register_thread_count(9, checkpoint_thread_count=2)
    await target.monitor_step(9)
    final = tmp_path / "step-000009"
    for rank in range(2):
        assert not final.exists()
        async with saving(target, 9):
            (directory / f"rank-{rank}").write_text(str(rank))
    await target.completed(9)
    assert set(manifest_files(final)) == {"rank-0", "rank-1"}
    assert json.loads((final / MANIFEST).read_text())["step"] == 9
    assert monitor(tmp_path).latest_checkpoint_step == 9  # a fact on disk


async def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    await save_step(target, 3, lambda directory: None, is_state_dict=True)
    assert (target.latest_state_dict_step, target.latest_checkpoint_step) == (3, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-000003"]


async def test_threads_with_event_loops_of_their_own_save_through_one_monitor(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    inside: list[int] = []
    most: list[int] = []

    def write(directory: Path) -> None:
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.02)
        inside.pop()

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(run_now, save_step(target, step, write)) for step in range(1, 7)]:
            done.result(timeout=20)
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
        ticket = await target.notify_started(*place, step=1)
        for other, theirs in inside:
            assert together(place, theirs), (place, theirs)
            met.add((other, number))
        inside.append((number, place))
        await asyncio.sleep(0.02)
        inside.remove((number, place))
        await target.notify_finished(1, ticket=ticket)

    async with asyncio.timeout(20):
        await asyncio.gather(*(saver(number, place) for number, place in enumerate(SAVERS)))
    pairs = {(i, j) for j, one in enumerate(SAVERS) for i, other in enumerate(SAVERS[:j]) if together(one, other)}
    assert {tuple(sorted(pair)) for pair in met} == pairs


async def test_turns_are_given_first_come_first_served(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_NODE)
    first = await target.notify_started("n0", "a", step=1)
    order: list[str] = []

    async def saver(node: str) -> None:
        ticket = await target.notify_started(node, "a", step=1)
        order.append(node)
        await target.notify_finished(1, ticket=ticket)

    waiting = []
    names = [f"n{number * 7 % 20}" for number in range(20)]
    for node in names:
        waiting.append(asyncio.ensure_future(saver(node)))
        await asyncio.sleep(0)
    await target.notify_finished(1, ticket=first)
    await asyncio.gather(*waiting)
    assert order == names


async def test_whoever_waits_is_woken_and_does_not_look_now_and_then(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    ticket = await target.notify_started("n", "a", step=1)
    async with asyncio.timeout(40):  # looking alone would take 60 s
        for _ in range(120):
            waiting = asyncio.ensure_future(target.notify_started("n", "a", step=1))
            await asyncio.sleep(0.001)
            await target.notify_finished(1, ticket=ticket)
            ticket = await waiting


async def test_a_saver_that_stops_waiting_leaves_the_queue(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    first = await target.notify_started("n", "a", step=1)
    gone = asyncio.ensure_future(target.notify_started("n", "b", step=1))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(target.notify_started("n", "c", step=1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    await target.notify_finished(1, ticket=first)
    async with asyncio.timeout(60):
        await waiting


async def test_no_wait_is_without_a_deadline_and_it_names_both_sides(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD, deadline_s=0.1)
    await target.notify_started("n0", "writer")
    with pytest.raises(SyncError, match=r"(?s)waiting on n1 waits for its turn.*writing: writer on n0"):
        await target.notify_started("n1", "waiting")
    await target.register_thread_count(8, checkpoint_thread_count=2)
    await target.monitor_step(8)
    with pytest.raises(SyncError, match=r"(?s)save of step 8 waits for its savers.*8: .*'step': 2"):
        await target.completed(8)


# --------------------------------------------------------------------------- death


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A real process that saves for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


@pytest.mark.parametrize("strategy", SaveStrategy)
async def test_a_saver_killed_while_it_writes_gives_up_its_turn_and_its_step(
    strategy: SaveStrategy, process: subprocess.Popen[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = monitor(tmp_path, strategy)
    directory = Path(await target.begin(5))
    await target.register_thread_count(5, checkpoint_thread_count=2)
    await target.monitor_step(5)
    await target.notify_started("n0", "doomed", step=5, alive=ProcessLife.of(process.pid))
    (directory / "half").write_text("half")
    os.kill(process.pid, signal.SIGKILL)  # nobody waits for it: a zombie is dead, too

    async with asyncio.timeout(10):
        other = await target.notify_started("n1", "other", step=5)
        await target.notify_finished(5, ticket=other)
        with pytest.raises(RunDirError, match="doomed on n0 died: its process is gone"):
            await target.completed(5)
    await target.notify_finished(5)  # whatever anybody still says of it
    await target.register_thread_count(5, checkpoint_thread_count=1)
    await target.notify_finished(5)
    await target.monitor_step(5)
    assert target.latest_checkpoint_step == 0
    assert not (tmp_path / "step-000005").exists()
    assert target._state.steps == {}
    assert "doomed on n0 died" in caplog.text

    await save_step(target, 6, lambda directory: None)  # the run goes on
    assert target.latest_checkpoint_step == 6
    await save_step(target, 5, lambda directory: (directory / "whole").write_text("whole"))  # saved anew, it counts
    assert set(manifest_files(tmp_path / "step-000005")) == {"whole"}


async def test_a_dead_saver_in_the_queue_holds_nobody_up(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    first = await target.notify_started("n", "first", step=1)
    dead = asyncio.ensure_future(target.notify_started("n", "dead", step=2, alive=ProcessLife.of(process.pid)))
    await asyncio.sleep(0)
    last = asyncio.ensure_future(target.notify_started("n", "last", step=3))
    process.kill()
    await target.notify_finished(1, ticket=first)
    async with asyncio.timeout(10):
        await last
    await asyncio.wait({dead})  # whether it was removed from the queue or at its turn
    with pytest.raises(SyncError, match="counts as dead"):
        await target.notify_finished(2, ticket=dead.result() if dead.exception() is None else -1)


async def test_a_saver_without_a_heartbeat_is_dead_wherever_it_is(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)
    silent = await target.notify_started("far away", "silent", step=1, heartbeat_s=0.3)
    async with asyncio.timeout(10):
        beating = await target.notify_started("n", "beating", step=2, heartbeat_s=1.5)
    with pytest.raises(SyncError, match="counts as dead"):
        await target.notify_finished(1, ticket=silent)  # it was only slow; it is told
    waiting = asyncio.ensure_future(target.notify_started("n", "waiting", step=3))
    for _ in range(7):
        await asyncio.sleep(0.3)
        await target.notify_alive(beating)
    assert not waiting.done()
    await target.notify_finished(2, ticket=beating)
    async with asyncio.timeout(10):
        await waiting


async def test_a_long_save_beats_by_itself(tmp_path: Path) -> None:
    target = monitor(tmp_path, SaveStrategy.SINGLE_THREAD)

    async def long() -> None:
        async with saving(target, 1, heartbeat_s=0.4):
            await asyncio.sleep(1.2)

    saver = asyncio.ensure_future(long())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await target.notify_started("n", "next", step=2)
    await saver
    assert 1 not in target._state.broken


async def test_a_saver_that_fails_says_so_to_whoever_waits(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    await target.begin(1)
    await target.register_thread_count(1, checkpoint_thread_count=2)
    await target.monitor_step(1)
    with pytest.raises(OSError, match="disk full"):
        async with saving(target, 1):
            raise OSError("disk full")
    async with saving(target, 1):
        pass
    with pytest.raises(RunDirError, match="OSError: disk full"):
        await target.completed(1)
    assert target.latest_checkpoint_step == 0


async def test_a_straggler_of_an_earlier_attempt_does_not_complete_the_next(tmp_path: Path) -> None:
    target = monitor(tmp_path)
    await target.begin(1)
    await target.register_thread_count(1, checkpoint_thread_count=1)
    straggler = await target.notify_started("n", "old", step=1)
    await target.begin(1)
    await target.register_thread_count(1, checkpoint_thread_count=1)
    await target.monitor_step(1)
    with pytest.raises(SyncError, match="began anew without it"):
        await target.notify_finished(1, ticket=straggler)
    assert target.latest_checkpoint_step == 0
    ticket = await target.notify_started("n", "new", step=1)
    await target.notify_finished(1, ticket=ticket)
    assert target.latest_checkpoint_step == 1


async def test_a_step_that_cannot_be_committed_is_not_complete(tmp_path: Path) -> None:
    class Full(CheckpointMonitor):
        def update_latest_checkpoint_step(self, step: int) -> None:
            raise OSError("disk full")

    target = Full(SaveStrategy.UNRESTRICTED, str(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        await save_step(target, 1, lambda directory: None)
    with pytest.raises(RunDirError, match="it could not be committed"):
        await target.completed(1)
    assert target.latest_checkpoint_step == 0


def test_a_process_of_the_same_number_is_another_process(process: subprocess.Popen[bytes]) -> None:
    life = ProcessLife.of(process.pid)
    assert life()
    assert not ProcessLife(life.host, life.pid, "1")()
    assert ProcessLife("another machine", 2**22 + 1, "1")()  # nobody can tell from here
    process.kill()
    process.wait()
    assert not life()


# --------------------------------------------------------------------------- found by name


def test_all_threads_of_a_process_get_the_same_monitor(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(TrinityMonitor.get_actor, str(tmp_path), None, str(tmp_path)) for _ in "12345678"]
        monitors = [one.result() for one in asked]
    assert all(one is monitors[0] for one in monitors)
    assert monitors[0].save_strategy is SaveStrategy.UNRESTRICTED
    assert TrinityMonitor.get_actor(str(tmp_path)) is monitors[0]
    assert TrinityMonitor.get_actor(f"{tmp_path}/other", None, str(tmp_path)) is not monitors[0]
