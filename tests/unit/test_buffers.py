"""Slots, the journal, order, eviction and resume of the memory buffer; the file buffer."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from trivium.buffers.files import FileBuffer
from trivium.buffers.journal import Journal, decode_group, encode_group
from trivium.buffers.memory import MemoryBuffer
from trivium.errors import DataError, RunDirError, SyncError
from trivium.schedule import Schedule
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Failure, Group, Lease, Media, Message, StopReason, Task, Trajectory, Turn

TASKS = [Task(f"t{i}", (Message("user", f"{i}="),), {"completion": str(i), "answer": i}) for i in range(4)]
RENDERER = ChatRenderer(tiny_tokenizer("0123456789="))


def schedule(**change: object) -> Schedule:
    return Schedule(TASKS, **{"seed": 0, "groups_per_step": 2, "steps": 6, "shuffle": False, **change})  # pyright: ignore[reportArgumentType]


async def buffer(path: Path, deadline_s: float = 5.0, **change: object) -> MemoryBuffer:
    made = MemoryBuffer(
        MemoryBuffer.Config(), schedule=schedule(**change), rollouts=path, renderer=RENDERER, deadline_s=deadline_s
    )
    await made.restore(None, made.schedule.first_version)
    return made


def group(slot: int, version: int = 0, attempt: int = 0, task: Task | None = None) -> Group:
    turn = Turn(np.arange(3), np.array([5, 6]), np.array([-0.5, -1.25]), np.full(2, version), StopReason.EOS, "hi")
    failed = Trajectory(1, (turn,), failure=Failure("reward", "RewardError", "nan"), metrics={"n": 1.0})
    return Group(
        slot, task or TASKS[slot % 4], (Trajectory(0, (turn,), {"exact": 1.0}), failed), slot // 4, attempt, version
    )


async def lease(buf: MemoryBuffer, version: int) -> Lease:
    await buf.advance("e", version)
    lease = await asyncio.wait_for(buf.lease("e"), 1)
    assert lease is not None
    return lease


async def leased(buf: MemoryBuffer, version: int) -> int:
    return (await lease(buf, version)).slot


async def blocked(awaitable: object) -> asyncio.Task[object]:
    task = asyncio.ensure_future(awaitable)  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0.01)
    assert not task.done()
    return task  # pyright: ignore[reportReturnType]


def same(a: Group, b: Group) -> bool:
    return encode_group(a) == encode_group(b)


def test_a_group_survives_the_journal_whole() -> None:
    media = Media("image/png", b"\x00\xff", (1, 2))
    task = Task("t", (Message("user", "x", (media,)),), {"a": [1, {"b": None}], "c": 1.5}, "train")
    before = dataclasses.replace(group(3), task=task)
    after = decode_group(encode_group(before))
    assert after.task == before.task
    assert after.trajectories[1] == dataclasses.replace(before.trajectories[1], turns=after.trajectories[1].turns)
    for x, y in zip(before.turns(), after.turns(), strict=True):
        assert (x.text, x.stop_reason, x.media) == (y.text, y.stop_reason, y.media)
        for name in ("prompt_tokens", "tokens", "log_prob", "policy_version"):
            assert getattr(x, name).dtype == getattr(y, name).dtype
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))


def test_a_column_that_is_no_json_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column or metric that is not a JSON value"):
        encode_group(group(0, task=Task("t", (), {"when": object()})))


def test_a_journal_torn_at_any_byte_gives_the_whole_records_and_can_go_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(1, group(0))
    first = (tmp_path / "step-000001.msgpack").stat().st_size
    journal.append(1, group(1))
    whole = (tmp_path / "step-000001.msgpack").read_bytes()
    for cut in range(first, len(whole)):
        (tmp_path / "step-000001.msgpack").write_bytes(whole[:cut])
        assert [g.slot for g in journal.read(after_step=0)] == [0]
        journal.append(1, group(2))
        assert [g.slot for g in journal.read(after_step=0)] == [0, 2]
    assert list(journal.read(after_step=1)) == []


def test_a_flipped_bit_ends_the_journal_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(1, group(0))
    journal.append(1, group(1))
    path = tmp_path / "step-000001.msgpack"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert [g.slot for g in journal.read(after_step=0)] == [0]


async def test_slots_are_admitted_by_version_and_trained_in_order(tmp_path: Path) -> None:
    buf = await buffer(tmp_path)
    assert [await leased(buf, 0), await leased(buf, 0)] == [0, 1]
    third = await blocked(buf.lease("e"))
    taking = await blocked(buf.take(2, 0))
    await buf.put("e", group(1))
    assert not taking.done()
    await buf.put("e", group(0))
    assert [g.slot for g in await taking] == [0, 1]  # pyright: ignore[reportGeneralTypeIssues]
    third.cancel()
    assert await leased(buf, 1) == 2


async def test_what_was_not_leased_cannot_be_put(tmp_path: Path) -> None:
    buf = await buffer(tmp_path)
    with pytest.raises(DataError, match="holds no lease"):
        await buf.put("e", group(0))
    await leased(buf, 0)
    await buf.put("e", group(0))
    with pytest.raises(DataError, match="holds no lease"):
        await buf.put("e", group(0))


async def test_a_straggler_is_evicted_played_again_and_at_last_given_up(tmp_path: Path) -> None:
    buf = await buffer(tmp_path, max_staleness=1, max_attempts=2)
    slots = [await leased(buf, 0) for _ in range(4)]
    assert slots == [0, 1, 2, 3]
    for slot in (1, 2, 3):
        await buf.put("e", group(slot, version=0))
    assert [g.slot for g in await buf.take(2, 0)] == [1, 2]
    taking = await blocked(buf.take(2, 2))  # slot 3 is two versions old by now
    assert (await buf.counts())["evicted"] == 1
    assert await lease(buf, 2) == Lease(3, attempt=1)
    await buf.put("e", group(3, version=0, attempt=1))  # stale again: given up, and another slot takes its place
    await asyncio.sleep(0.01)
    assert (await buf.counts())["evicted"] == 2
    await buf.put("e", group(0, version=1))
    fresh = [await leased(buf, 2) for _ in range(2)]
    assert fresh == [4, 5]
    await buf.put("e", group(4, version=2))
    assert [g.slot for g in await taking] == [0, 4]  # pyright: ignore[reportGeneralTypeIssues]
    assert (await buf.counts())["given_up"] == 1
    assert buf.schedule.admitted(2) == 8
    more = [await leased(buf, 2) for _ in range(3)]
    assert more == [6, 7, 8]  # one more than admission alone allows


@pytest.mark.parametrize("deterministic", [False, True])
async def test_resume_takes_back_what_was_journaled(tmp_path: Path, deterministic: bool) -> None:
    change = {"max_staleness": 1, "deterministic": deterministic}
    buf = await buffer(tmp_path, **change)
    for _ in range(4):
        slot = await leased(buf, 0)
        await buf.put("e", group(slot, version=0))
    await buf.take(2, 0)
    state = await buf.state()
    await leased(buf, 1)
    await buf.put("e", group(4, version=1))  # after the checkpoint, by a version the checkpoint does not know
    again = MemoryBuffer(
        MemoryBuffer.Config(), schedule=schedule(**change), rollouts=tmp_path, renderer=RENDERER, deadline_s=1
    )
    await again.restore(state, 1 if deterministic else 0)
    expected = 5 if deterministic else 4  # an unordered run cannot bring that version back
    assert await leased(again, 1) == expected
    assert [g.slot for g in await again.take(2, 1)] == [2, 3]


async def test_a_journal_of_other_tasks_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path).append(1, group(0, task=Task("another", ())))
    with pytest.raises(RunDirError, match="the taskset changed"):
        await buffer(tmp_path)


async def test_waits_have_deadlines_that_name_both_sides(tmp_path: Path) -> None:
    buf = await buffer(tmp_path, deadline_s=0.02)
    with pytest.raises(SyncError, match=r"the trainer .version 0. waits for 2 groups from the explorers"):
        await buf.take(2, 0)
    await leased(buf, 0)
    await leased(buf, 0)
    with pytest.raises(SyncError, match=r"explorer .e. .version 0. waits for the trainer to take groups"):
        await buf.lease("e")
    with pytest.raises(SyncError, match="2 being played"):
        await buf.drained(0)


async def test_close_wakes_everybody(tmp_path: Path) -> None:
    buf = await buffer(tmp_path)
    waiting = await blocked(buf.take(2, 0))
    await buf.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_the_file_buffer_gives_expert_rows_in_schedule_order(tmp_path: Path) -> None:
    files = FileBuffer(
        FileBuffer.Config(), schedule=schedule(first_version=10), rollouts=tmp_path, renderer=RENDERER, deadline_s=1
    )
    groups = await files.take(2, 11)
    assert [g.task.task_id for g in groups] == ["t2", "t3"]
    turn = groups[0].trajectories[0].turns[0]
    assert RENDERER.decode(turn.tokens) == "2"
    assert int(turn.tokens[-1]) in RENDERER.eos_token_ids
    assert set(turn.policy_version.tolist()) == {-1}


async def test_an_expert_row_without_a_reply_is_an_error(tmp_path: Path) -> None:
    files = FileBuffer(
        FileBuffer.Config(completion="solution"),
        schedule=schedule(),
        rollouts=tmp_path,
        renderer=RENDERER,
        deadline_s=1,
    )
    with pytest.raises(DataError, match=r"column 'solution' is None; the columns are \['answer', 'completion'\]"):
        await files.take(1, 0)
