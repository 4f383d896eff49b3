"""Slots, the journal, order, eviction and resume of the memory buffer; the file buffer."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import sys
import zlib
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import torch

from trivium.board import MemoryBoard
from trivium.buffers.files import FileBuffer
from trivium.buffers.journal import Journal, decode_group, encode_group, read_record, read_recorded
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.slots import retried
from trivium.engines.scripted import ScriptedEngine
from trivium.errors import DataError, RunDirError, SyncError
from trivium.explorer import Explorer
from trivium.loops import follow_weights
from trivium.schedule import Schedule
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Failure, Group, Lease, Media, Message, Sampling, StopReason, Task, Trajectory, Turn

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
    lease = await asyncio.wait_for(buf.lease("e"), 60)
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


def with_media(slot: int, *media: Media) -> Group:
    """A group whose task and turns have these media."""
    plain = group(slot)
    turns = (dataclasses.replace(turn, media=tuple(m.at(0, 1) for m in media)) for turn in plain.trajectories[0].turns)
    members = (dataclasses.replace(plain.trajectories[0], turns=tuple(turns)), *plain.trajectories[1:])
    return dataclasses.replace(plain, task=Task("t", (Message("user", "x", media),)), trajectories=members)


def test_media_are_stored_once_and_records_hold_their_hashes(tmp_path: Path) -> None:
    first, second = Media("image/png", b"one picture" * 50), Media("image/png", b"another picture" * 50)
    folder = tmp_path / "rollouts" / "media"
    for stage in (0, 1):
        journal = Journal(tmp_path / "rollouts" / f"stage-{stage}")
        journal.append(1, with_media(0, first))
        journal.append(1, with_media(1, first, second))
        (file,) = journal.directory.glob("*.msgpack")
        assert b"picture" not in file.read_bytes()
        read = list(journal.read(after_step=0))
        assert all(same(a, b) for a, b in zip(read, [with_media(0, first), with_media(1, first, second)], strict=True))
        assert [[m.data for m in t.media] for g in read for t in g.trajectories[0].turns[:1]] == [
            [first.data],
            [first.data, second.data],
        ]
        (_, handles), _ = read_recorded(file)
        assert handles.task.prompt[0].media == (first,)
        assert handles.task.prompt[0].media[0].data == b""
        assert read_record(file, 0).task.prompt[0].media[0].data == first.data
        journal.strike(0, lambda each: each.slot == 0)
        assert [m.data for m in next(journal.read(0)).task.prompt[0].media] == [first.data, second.data]
    assert sorted(path.name for path in folder.iterdir()) == sorted([first.sha256, second.sha256])


def test_media_that_are_gone_or_damaged_are_named(tmp_path: Path) -> None:
    media, journal = Media("image/png", b"one picture"), Journal(tmp_path / "stage-0")
    journal.append(1, with_media(0, media))
    path = tmp_path / "media" / media.sha256
    path.write_bytes(b"two pictures")
    with pytest.raises(DataError, match=r"bytes are not the ones of its hash(.|\n)*restore the file"):
        list(Journal(tmp_path / "stage-0").read(0))
    path.unlink()
    with pytest.raises(DataError, match=f"{media.sha256}(.|\n)*no such file"):
        list(Journal(tmp_path / "stage-0").read(0))
    with pytest.raises(DataError, match="store the media"):  # known by its hash alone
        journal.append(1, with_media(1, Media("image/png", b"", None, media.sha256)))


def test_a_journal_with_the_bytes_in_its_records_is_still_read(tmp_path: Path) -> None:
    media = Media("image/png", b"one picture", (3, 4))
    record = msgpack.unpackb(encode_group(with_media(0, media)))
    for turn in record["trajectories"][0]["turns"]:
        turn[6] = [{"mime": "image/png", "data": b"one picture", "span": [3, 4]}]
    assert next(iter(decode_group(msgpack.packb(record) or b"").turns())).media == (media,)


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


def test_what_is_cut_off_a_journal_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, file = Journal(tmp_path), tmp_path / "step-000001.msgpack"
    journal.append(1, group(0))
    size = file.stat().st_size
    journal.append(1, group(1))
    damaged = bytearray(file.read_bytes())
    damaged[size + 20] ^= 1
    file.write_bytes(damaged)
    assert len(list(journal.read(0))) == 1
    assert f"after byte {size}: the rest, {len(damaged) - size} bytes, is removed" in caplog.text
    assert file.stat().st_size == size


@pytest.mark.parametrize("payload", [b"", b"\xc0", b"\x90", b"\x81\xa4slot\x00", b"\xff" * 9])
def test_a_record_that_holds_no_group_is_named(tmp_path: Path, payload: bytes) -> None:
    journal, file = Journal(tmp_path), tmp_path / "step-000003.msgpack"
    (tmp_path / "step-abc.msgpack").write_text("of somebody else")
    file.write_bytes(struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)
    with pytest.raises(DataError, match="it holds no group") as caught:
        list(journal.read(0))
    assert f"remove {file}" in str(caught.value)


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
    with pytest.raises(SyncError, match="2 in progress"):
        await buf.drain(0)


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


# --------------------------------------------------------------------------- several explorers


async def adopt(buf: MemoryBuffer, owner: str, version: int, slots: int) -> list[Lease]:
    """An explorer that has loaded a version, and so many leases of it."""
    await buf.advance(owner, version)
    leases = [await asyncio.wait_for(buf.lease(owner), 60) for _ in range(slots)]
    return [lease for lease in leases if lease is not None]


async def test_without_waiting_nothing_is_leased_where_nothing_is_free(tmp_path: Path) -> None:
    buf = await buffer(tmp_path)
    assert await buf.lease("a", wait=False) is None
    assert await adopt(buf, "a", 0, 2) == [Lease(0), Lease(1)]
    assert await buf.lease("a", wait=False) is None
    await buf.close()
    with pytest.raises(StopAsyncIteration):
        await buf.lease("a", wait=False)


async def test_the_slots_of_the_dead_are_issued_again_and_what_they_finished_stays(tmp_path: Path) -> None:
    buf = await buffer(tmp_path)
    assert await adopt(buf, "a", 0, 2) == [Lease(0), Lease(1)]
    await buf.put("a", group(0))
    assert await buf.release("a") == 1
    assert await buf.release("a") == 0
    assert await buf.lease("a", wait=False) is None  # the dead get nothing
    assert await adopt(buf, "b", 0, 1) == [Lease(1)]
    with pytest.raises(DataError, match="'a' holds no lease of it"):
        await buf.put("a", group(1))
    await buf.put("b", group(1))
    assert [g.slot for g in await buf.take(2, 0)] == [0, 1]


async def test_what_could_only_become_too_stale_is_called_off_and_leased_again(tmp_path: Path) -> None:
    """The same explorer may hold the slot again while its first attempt still runs."""
    buf = await buffer(tmp_path, max_staleness=1)
    await adopt(buf, "a", 0, 4)
    for slot in (2, 3):
        await buf.put("a", group(slot))
    hearing = await blocked(buf.cancelled_leases("a"))
    await buf.take(2, 0)
    await asyncio.sleep(0.01)
    assert not hearing.done()  # version 0 is good enough for the next step
    await adopt(buf, "a", 1, 2)
    for slot in (4, 5):
        await buf.put("a", group(slot, version=1))
    await buf.take(2, 1)
    assert await hearing == [Lease(0), Lease(1)]
    assert (await buf.counts())["called_off"] == 2
    assert await adopt(buf, "a", 2, 2) == [Lease(0, attempt=1), Lease(1, attempt=1)]
    await buf.put("a", group(0))  # the first attempt: it did not hear in time, and nobody wants it
    await buf.put("a", group(0, version=2, attempt=1))
    await buf.put("a", group(1))  # and one that comes when the second is being generated by another
    await buf.release("a")
    assert await adopt(buf, "b", 2, 1) == [Lease(1, attempt=1)]
    await buf.put("a", group(1))
    await buf.put("b", group(1, version=2, attempt=1))
    assert [(g.slot, g.attempt) for g in await buf.take(2, 2)] == [(0, 1), (1, 1)]
    await buf.put("a", group(1))  # even after it was trained on
    with pytest.raises(DataError, match="slot 6"):
        await buf.put("a", group(6, version=2))


async def test_an_explorer_too_far_behind_gets_nothing_to_play_in_vain(tmp_path: Path) -> None:
    buf = await buffer(tmp_path, max_staleness=1)
    await adopt(buf, "slow", 0, 0)
    await adopt(buf, "fast", 0, 4)
    for slot in range(4):
        await buf.put("fast", group(slot))
    await buf.take(2, 0)
    await buf.take(2, 1)
    assert await buf.lease("slow", wait=False) is None
    assert await adopt(buf, "slow", 1, 1) == [Lease(4)]


async def test_a_step_with_over_rollout_takes_what_is_finished_first(tmp_path: Path) -> None:
    """Nothing trained on is stale, and the slow are called off once per step, not issued again to be stale again."""
    buf = await buffer(tmp_path, over_rollout=1, max_attempts=2)
    trained = []
    for version in range(3):
        leases = await adopt(buf, "a", version, 3)
        for lease in leases[1:]:
            await buf.put("a", group(lease.slot, version, lease.attempt))
        trained += await buf.take(2, version)
        assert await buf.cancelled_leases("a") == leases[:1]
        assert await buf.lease("a", wait=False) is None
    assert [(g.slot, g.version) for g in trained] == [(1, 0), (2, 0), (3, 1), (4, 1), (6, 2), (7, 2)]
    assert await buf.counts() == {"evicted": 0, "called_off": 3, "given_up": 1, "dropped": 0}


async def test_refused_groups_of_a_step_are_replaced_by_slots_of_its_own_version(tmp_path: Path) -> None:
    """However many: an explorer that has not followed yet would play them for the step before."""
    buf = await buffer(tmp_path)
    await adopt(buf, "late", 0, 2)
    for slot in (0, 1):
        await buf.put("late", group(slot))
    await buf.take(2, 0)
    await adopt(buf, "quick", 1, 2)
    for slot in (2, 3):
        await buf.put("quick", group(slot, version=1))
    await buf.take(2, 1)
    for _ in range(2):
        await buf.refuse(2)
        assert await buf.lease("late", wait=False) is None
        for lease in await adopt(buf, "quick", 1, 2):
            await buf.put("quick", group(lease.slot, version=1))
        assert {g.version for g in await buf.take(2, 1)} == {1}
    assert await buf.lease("late", wait=False) is None


async def test_a_stage_that_ends_while_an_explorer_waits_for_its_slots_is_no_failure(tmp_path: Path) -> None:
    """Its trainer closes the buffer a moment before it says that it is done."""
    buf, nobody = await buffer(tmp_path, max_staleness=1, deterministic=True), cast("Any", None)
    engine = ScriptedEngine(ScriptedEngine.Config(replies=((3,),)), eos_token_ids=frozenset({1}), decode=str)
    explorer = Explorer(engine, nobody, nobody, nobody, Sampling(4), 64, 1.0, 1, name="e")
    synchronizer, channel = Synchronizer(MemoryBoard(), deadline_s=5.0), MemoryChannel(keep=2)
    synchronizer.open()
    await synchronizer.join("e")
    for version in (0, 1):
        channel.offer(version, [("weight", torch.full((2,), float(version)))])
        synchronizer.publish(version)
    following = await blocked(follow_weights(explorer, buf, buf.schedule, synchronizer, channel))
    assert engine.version == 0  # nobody has played its slots
    await buf.close()
    await asyncio.wait_for(following, 60)
    assert engine.version == 0


async def test_a_version_is_drained_by_whoever_plays_it(tmp_path: Path) -> None:
    buf = await buffer(tmp_path, max_staleness=1, deterministic=True)
    await adopt(buf, "a", 0, 3)
    await adopt(buf, "b", 0, 1)
    for slot in (0, 1, 2):
        await buf.put("a", group(slot))
    leaving = await blocked(buf.drain(0))
    await buf.release("b")  # it died over slot 3
    await adopt(buf, "a", 0, 1)
    await asyncio.sleep(0.01)
    assert not leaving.done()
    await buf.put("a", group(3))
    await leaving
    await buf.take(2, 0)
    assert await adopt(buf, "a", 1, 2) == [Lease(4), Lease(5)]
    await buf.drain(0)  # what "a" plays with version 1 holds nobody at version 0
    await buf.advance("c", 0)
    assert await buf.lease("c", wait=False) is None


# --------------------------------------------------------------------------- counting over resumes


def dropped(slot: int, version: int = 0) -> Group:
    return group(slot, version).refused("not worth it")


async def test_what_the_pipeline_dropped_is_counted_once_however_often_the_run_resumes(tmp_path: Path) -> None:
    buf = await buffer(tmp_path)
    start = await buf.state()
    await adopt(buf, "a", 0, 2)
    await buf.put("a", dropped(0))
    await buf.put("a", group(1))
    assert await adopt(buf, "a", 0, 1) == [Lease(2)]  # in its place
    await buf.put("a", group(2))
    assert [g.slot for g in await buf.take(2, 0)] == [1, 2]
    later = await buf.state()
    await adopt(buf, "a", 1, 1)
    await buf.put("a", dropped(3, 1))
    # From the start, what version 1 drops is still to come: it must not make room for version 0 to play more.
    for state, version, count, free in ((start, 0, 1, 3), (later, 1, 2, 4), (start, 0, 1, 3)):
        again = await buffer(tmp_path / "fresh")
        again._journal = buf._journal
        await again.restore(state, version)
        assert await again.counts() == {"evicted": 0, "called_off": 0, "given_up": 0, "dropped": count}
        assert await adopt(again, "b", 1, 1) == [Lease(free)]


async def test_what_was_dropped_in_a_lost_future_was_not_dropped(tmp_path: Path) -> None:
    buf = await buffer(tmp_path, max_staleness=1)
    start = await buf.state()
    await adopt(buf, "a", 0, 2)
    await buf.put("a", dropped(0))
    await buf.advance("a", 1)
    await buf.put("a", dropped(1, version=1))
    again = await buffer(tmp_path, max_staleness=1)
    await again.restore(start, 0)
    assert (await again.counts())["dropped"] == 1
    assert await adopt(again, "b", 0, 1) == [Lease(1)]


async def test_rollouts_of_a_lost_future_stay_lost(tmp_path: Path) -> None:
    """Killed at version 2, resumed at 0, killed at 2 again: what the first life's version 1 played is no group of the
    second life's version 1."""
    first = await buffer(tmp_path, max_staleness=2)
    start = await first.state()
    await adopt(first, "a", 0, 1)
    await adopt(first, "a", 1, 1)
    await first.put("a", group(0))
    await first.put("a", group(1, version=1))
    second = await buffer(tmp_path, max_staleness=2)
    await second.restore(start, 0)
    assert await adopt(second, "b", 0, 1) == [Lease(1)]
    later = await second.state()
    third = await buffer(tmp_path, max_staleness=2)
    await third.restore(later, 2)
    assert await adopt(third, "c", 2, 1) == [Lease(1)]
    assert [g.slot for g in await third.take(1, 2)] == [0]


async def test_the_last_attempt_counts_where_several_were_journaled_after_the_checkpoint(tmp_path: Path) -> None:
    buf = await buffer(tmp_path, max_staleness=1, max_attempts=3)
    start = await buf.state()
    await adopt(buf, "a", 0, 4)
    for slot in range(4):
        await buf.put("a", group(slot))
    await buf.take(2, 0)
    taking = await blocked(buf.take(2, 2))
    assert await adopt(buf, "a", 2, 2) == [Lease(2, attempt=1), Lease(3, attempt=1)]
    await buf.put("a", dataclasses.replace(group(2, attempt=1), version=0))
    taking.cancel()
    again = await buffer(tmp_path, max_staleness=1)
    await again.restore(start, 0)
    assert (await again.state())["attempts"] == {"2": 1}
    assert [(g.slot, g.attempt) for g in await again.take(4, 1)] == [(0, 0), (1, 0), (3, 0), (2, 1)]
    assert (await again.state())["attempts"] == {}


@pytest.mark.parametrize("deterministic", [False, True])
async def test_no_operation_looks_at_every_finished_group(tmp_path: Path, deterministic: bool) -> None:
    """The lines of the buffer that a lease, a put and a take run do not grow with what lies finished or was taken."""

    async def work(buf: MemoryBuffer, version: int) -> int:
        lines = 0

        def trace(frame: FrameType, event: str, arg: object) -> object:
            nonlocal lines
            lines += event == "line"
            return trace if frame.f_code.co_filename.endswith("buffers/memory.py") else None

        sys.settrace(trace)
        try:
            await buf.advance("a", version)
            lease = await buf.lease("a")
            assert lease is not None
            await buf.put("a", group(lease.slot, version, lease.attempt))
            await buf.take(2, version)
        finally:
            sys.settrace(None)
        return lines

    buf = await buffer(tmp_path, max_staleness=2000, steps=5000, deterministic=deterministic)
    lines: dict[int, int] = {}
    await buf.advance("a", 0)
    for finished in (10, 3000):
        while len(buf._groups) < finished:
            lease = await buf.lease("a")
            assert lease is not None
            await buf.put("a", group(lease.slot))
        await work(buf, 0)
        lines[finished] = await work(buf, 0)
    for _ in range(1000):
        await buf.take(2, 0)
    lines[0] = await work(buf, 0)
    assert max(lines.values()) <= min(lines.values()) + 10
    assert (len(buf._consumed), len(buf._attempts)) == (0, 0)
    assert (await buf.state())["consumed_below"] == 2010


# --------------------------------------------------------------------------- failures that ended the run


def failing(slot: int, *failures: Failure | None, refused: str = "") -> Group:
    made = group(slot)
    members = tuple(Trajectory(i, made.trajectories[0].turns, {}, failure) for i, failure in enumerate(failures))
    return dataclasses.replace(made, trajectories=members, dropped=refused)


REWARD, WORLD = Failure("reward", "RewardError", "down"), Failure("workflow", "ConnectionError", "down")
JUDGING, PLAYING = Failure("deadline", "DeadlineExceeded", "slow"), Failure("deadline", "TimeoutError", "slow")
PROMPT, OPERATOR = Failure("prompt", "PromptTooLong", "long"), Failure("operator", "Duplicate", "twice")


@pytest.mark.parametrize(
    ("failures", "synchronous", "deterministic"),
    [
        ((None, REWARD), "judged", "judged"),
        ((None, JUDGING), "judged", "judged"),
        ((PROMPT, REWARD), "judged", "judged"),
        ((WORLD, REWARD), "rolled out", "rolled out"),
        ((None, PLAYING), "rolled out", "kept"),
        ((PLAYING, REWARD), "rolled out", "judged"),
        ((None, PROMPT), "kept", "kept"),
        ((OPERATOR, None), "kept", "kept"),
        ((None, None), "kept", "kept"),
    ],
)
def test_what_a_retry_may_avert(failures: tuple[Failure | None, ...], synchronous: str, deterministic: str) -> None:
    for expected, change in ((synchronous, {}), (deterministic, {"deterministic": True, "max_staleness": 1})):
        fates = retried(schedule(**change), [failing(1, REWARD), failing(2, *failures)], from_slot=2)
        assert [("rolled out", "judged")[judged] for _, judged in fates] == [expected] * (expected != "kept")


async def test_after_an_outage_every_group_that_was_not_trained_on_is_retried(tmp_path: Path) -> None:
    """Those of later steps too, whenever they were put; and not those that were."""
    change: dict[str, Any] = {"max_staleness": 2}
    buf = await buffer(tmp_path, **change)
    start = await buf.state()
    await adopt(buf, "a", 0, 4)
    for slot in range(3):
        await buf.put("a", failing(slot, None, REWARD))
    await buf.take(2, 0)
    await adopt(buf, "a", 1, 2)
    await buf.put("a", failing(4, REWARD))
    await buf.retry_on_resume([g.slot for g in await buf.take(2, 1)])
    await buf.put("a", failing(3, WORLD))  # it comes before its explorer is stopped
    again = await buffer(tmp_path / "fresh", **change)
    again._journal = buf._journal
    await again.restore(start, 0)
    leases = await adopt(again, "b", 1, 4)
    recorded = [(lease.slot, lease.recorded is not None) for lease in leases]
    assert recorded == [(2, True), (3, False), (4, True), (5, False)]
    assert [g.slot for g in await again.take(2, 0)] == [0, 1]


async def test_what_was_issued_in_place_of_a_dropped_group_is_rolled_out_again_with_it(tmp_path: Path) -> None:
    buf = await buffer(tmp_path)
    await adopt(buf, "a", 0, 2)
    await buf.put("a", failing(0, None))
    await buf.put("a", failing(1, WORLD, WORLD, refused="0 members succeeded"))
    assert await adopt(buf, "a", 0, 1) == [Lease(2)]
    await buf.put("a", failing(2, None, REWARD))  # for the first step, by version 0: in the second it were too stale
    await buf.retry_on_resume([1])
    again = await buffer(tmp_path)
    assert await adopt(again, "b", 0, 1) == [Lease(1)]
    assert (await again.counts())["dropped"] == 0
    await again.put("b", failing(1, None))
    assert [g.slot for g in await again.take(2, 0)] == [0, 1]
    (lease,) = await adopt(again, "b", 1, 1)
    assert (lease, lease.recorded) == (Lease(2), None)
