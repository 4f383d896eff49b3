"""Slots, the journal, order, eviction and resume of the memory buffer; the file buffer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
import torch
from failing import refused

from trivium.buffers.files import FileBuffer, conversation_of
from trivium.buffers.journal import Journal, decode_group, encode_group, read_record, read_recorded, write_groups
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.slots import OPEN, SlotState, retried
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation import phases
from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import DataError, SyncError
from trivium.loops import follow_weights
from trivium.schedule import Schedule
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.tasks.rows import RowTasks, task_of_row
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import (
    Failure,
    Group,
    Lease,
    Media,
    Message,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    experiences_of,
)

TASKS = [Task(f"t{i}", (Message("user", f"{i}="),), {"completion": str(i), "answer": i}) for i in range(4)]
RENDERER = ChatRenderer(tiny_tokenizer("0123456789="))


def schedule(**change: object) -> Schedule:
    return Schedule(TASKS, **{"seed": 0, "groups_per_step": 2, "steps": 6, "shuffle": False, **change})  # pyright: ignore[reportArgumentType]


async def buffer(path: Path, deadline_s: float = 5.0, **change: object) -> MemoryBuffer:
    made = MemoryBuffer(
        MemoryBuffer.Config(), schedule=schedule(**change), rollouts=path, renderer=RENDERER, deadline_s=deadline_s
    )
    await made.restore(None, 0)
    return made


def group(slot: int, version: int = 0, attempt: int = 0, task: Task | None = None) -> Group:
    turn = Turn(np.arange(3), np.array([5, 6]), np.array([-0.5, -1.25]), np.full(2, version), StopReason.EOS, "hi")
    failed = Trajectory(1, (turn,), failure=Failure("reward", "RewardError", "nan"), metrics={"n": 1.0})
    return Group(
        slot, task or TASKS[slot % 4], (Trajectory(0, (turn,), {"exact": 1.0}), failed), slot // 4, attempt, version
    )


async def blocked(awaitable: object) -> asyncio.Task[object]:
    """The task of something that waits: 10 ms are enough for it to end, if it would."""
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


def test_a_torn_tail_of_a_file_that_is_only_read_is_left_alone_and_damage_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    write_groups(path, [group(0), group(1)])
    whole, (_, second) = path.read_bytes(), [offset for offset, _ in read_recorded(path)]
    for torn, left in ((whole[:-1], 1), (whole + b"\x01\x02", 2)):  # the run that writes it may be at it
        path.write_bytes(torn)
        found = [found for _, found in read_recorded(path)]
        assert len(found) == left
        assert all(same(one, other) for one, other in zip(found, [group(0), group(1)], strict=False))
        assert path.read_bytes() == torn
        assert "an incomplete record" in caplog.text
    for damaged, words in ((whole[:20] + b"?" + whole[21:], "bytes differ"), (b"\x00" * 8, "no group")):
        path.write_bytes(damaged)
        with refused(DataError, path, "byte 0", words):
            [*read_recorded(path)]
    write_groups(path, [group(7)])
    with refused(DataError, path, "has changed"):
        read_record(path, second)


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
    with refused(DataError, media.sha256, "its hash"):
        list(Journal(tmp_path / "stage-0").read(0))
    path.unlink()
    with refused(DataError, media.sha256, "no such"):
        list(Journal(tmp_path / "stage-0").read(0))
    with refused(DataError, media.sha256[:12], "its hash"):  # known by its hash alone
        journal.append(1, with_media(1, Media("image/png", b"", None, media.sha256)))


def test_a_column_that_is_no_json_value_is_named(tmp_path: Path) -> None:
    with refused(DataError, "'t'", "'when'"):
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


def test_a_journal_removes_the_file_that_a_killed_process_left_unfinished(tmp_path: Path) -> None:
    Journal(tmp_path).append(1, group(0))
    unfinished = tmp_path / ".step-000001.msgpack.writing"
    unfinished.write_bytes(b"a part")
    assert [g.slot for g in Journal(tmp_path).read(after_step=0)] == [0]
    assert not unfinished.exists()


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
    with refused(DataError, f"remove {file}", "no group"):
        list(journal.read(0))


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
    with refused(DataError, "'solution'", "['answer', 'completion']"):
        await files.take(1, 0)


async def test_a_pair_of_conversations_without_a_prompt_is_the_pair_that_continues_what_they_share(
    tmp_path: Path,
) -> None:
    user, good, bad = {"role": "user", "content": "11="}, *({"role": "assistant", "content": c} for c in "29")
    explicit = {"id": "a", "prompt": [user], "chosen": "2", "rejected": "9"}
    implicit = {"id": "a", "chosen": [user, good], "rejected": [user, bad]}

    async def turns(row: dict[str, Any]) -> list[list[int]]:
        tasks = [task_of_row("a row", row, RowTasks.Config(kind="rows"), "train")]
        plan = Schedule(tasks, seed=0, groups_per_step=1, steps=1, group_size=2)
        files = FileBuffer(FileBuffer.Config(), schedule=plan, rollouts=tmp_path, renderer=RENDERER, deadline_s=1)
        [group] = await files.take(1, 0)
        sequences = [(turn.prompt_tokens, turn.tokens) for member in group.trajectories for turn in member.turns]
        return [[*prompt.tolist(), *tokens.tolist()] for prompt, tokens in sequences]

    assert await turns(implicit) == await turns(explicit)
    with refused(DataError, "prompt"):
        task_of_row("a row", {"chosen": "2", "rejected": "9"}, RowTasks.Config(kind="rows"), "train")


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "2"},
]
TOOLS_COLUMN = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("turns", ["last", "all"])
async def test_a_row_of_messages_is_learned_from_by_its_last_turn_or_by_all(tmp_path: Path, turns: str) -> None:
    config = RowTasks.Config(kind="rows", prompt="messages", completion="messages")
    tasks = [task_of_row("a row", {"messages": TALK, "tools": json.dumps(TOOLS_COLUMN)}, config, "train")]
    plan = Schedule(tasks, seed=0, groups_per_step=1, steps=1, group_size=1)
    section = FileBuffer.Config.model_validate({"turns": turns})
    renderer = ChatRenderer(tiny_tokenizer("bytes"))
    files = FileBuffer(section, schedule=plan, rollouts=tmp_path, renderer=renderer, deadline_s=1)
    [group] = await files.take(1, 0)
    [experience] = experiences_of(group, group.trajectories[0])
    whole = tiny_tokenizer("bytes").decode(experience.tokens.tolist())
    learned = tiny_tokenizer("bytes").decode(experience.tokens[experience.response_mask].tolist())
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'
    assert learned == ("2<|end|>" if turns == "last" else f"{call}2<|end|>")
    assert whole.endswith(f"<|user|>1+1=<|end|><|assistant|>{call}<|tool|>2<|end|><|assistant|>2<|end|>")
    assert '"name": "add", "parameters"' in whole


def test_a_conversation_of_its_own_keeps_the_calls_of_its_last_message() -> None:
    config = RowTasks.Config(kind="rows", conversations=("chosen", "rejected"))
    row = {"prompt": "1+1=", "chosen": TALK[:2], "rejected": TALK}
    task = task_of_row("a row", row, config, "train")
    messages, last = conversation_of(task.columns["chosen"]) or ([], Message("", ""))
    assert (len(messages), last.tool_calls) == (1, (ToolCall("add", '{"a": 1}'),))


async def test_the_parts_of_a_message_survive_the_journal(tmp_path: Path) -> None:
    config = RowTasks.Config(kind="rows", prompt="messages", completion="messages")
    turn = {"role": "assistant", "content": "two", "reasoning_content": "one and one"}
    task = task_of_row("a row", {"messages": [*TALK[:3], {"role": "user", "content": "again"}, turn]}, config, "train")
    assert task.prompt[1].tool_calls == (ToolCall("add", '{"a": 1}'),)
    assert task.prompt[2].call == 0
    assert task.columns["completion"] == [{"role": "assistant", "content": "two", "reasoning": "one and one"}]
    group = Group(0, task, (), 0)
    assert decode_group(encode_group(group)) == group


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": [1]}}]},
        {"role": "assistant", "content": "", "reasoning_content": 3},
        {"role": "user", "content": "", "tool_calls": [CALL]},
        {"role": "tool"},
    ],
)
def test_a_message_with_broken_parts_is_refused(message: dict[str, Any]) -> None:
    row = {"prompt": [*TALK[:1], message, {"role": "user", "content": "?"}]}
    with refused(DataError, "message 1"):
        task_of_row("a row", row, RowTasks.Config(kind="rows"), "train")


# --------------------------------------------------------------------------- the buffer in memory


async def test_a_wait_has_a_deadline_that_names_both_sides(tmp_path: Path) -> None:
    buf = await buffer(tmp_path, deadline_s=0.02)
    with refused(SyncError, "trainer", "version 0", "2 groups", "0 finished"):
        await buf.take(2, 0)
    await buf.advance("e", 0)
    assert [await buf.lease("e"), await buf.lease("e")] == [Lease(0), Lease(1)]
    with refused(SyncError, "explorer 'e'", "version 0", "take groups"):
        await buf.lease("e")
    with refused(SyncError, "2 in progress"):
        await buf.drain(0)


async def test_the_deadline_of_a_wait_begins_at_the_last_change(tmp_path: Path) -> None:
    made = await buffer(tmp_path, deadline_s=3.0)
    await made.advance("e", 0)
    taking = await blocked(made.take(2, 0))
    await asyncio.sleep(0.3)  # a part of the deadline
    await made.put("e", group(cast(Lease, await made.lease("e")).slot))
    changed = time.monotonic()
    with refused(SyncError, "trainer", "1 finished"):
        await taking
    assert 2.8 < time.monotonic() - changed < 5.6  # a deadline that begins again when it expires ends after 5.7 s


async def test_a_wait_reports_every_group_to_the_activity_of_the_trainer(tmp_path: Path) -> None:
    class Shown:
        def show(self, activities: Sequence[phases.Activity]) -> None:
            shown.append([(activity.name, activity.completed) for activity in activities])

        def say(self, text: str) -> None: ...

    async def take() -> list[Group]:
        with phases.activity("rollouts", 3):
            return await made.take(3, 0)

    shown: list[list[tuple[str, int]]] = []
    made = await buffer(tmp_path, groups_per_step=3)
    await made.advance("e", 0)
    end = phases.watch(Shown())
    try:
        taking = await blocked(take())
        with phases.activity("an explorer"):
            for done in range(1, 4):
                await made.put("e", group(cast(Lease, await made.lease("e")).slot))
                assert shown[-1] == [("rollouts", done), ("an explorer", 0)]
        assert len(cast(list[Group], await taking)) == 3
    finally:
        end()


async def test_a_stage_that_ends_while_an_explorer_waits_for_its_slots_is_no_failure(tmp_path: Path) -> None:
    """Its trainer closes the buffer a moment before it says that it is done."""
    buf, nobody = await buffer(tmp_path, max_staleness=1, deterministic=True), cast("Any", None)
    engine = ScriptedEngine(ScriptedEngine.Config(replies=((3,),)), eos_token_ids=frozenset({1}), decode=str)
    explorer = Explorer(engine, nobody, nobody, nobody, Sampling(4), RolloutLimits(1.0, 1), name="e")
    synchronizer, channel = Synchronizer(MemoryBoard(), deadline_s=60), MemoryChannel(keep=2)
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


@pytest.mark.parametrize("deterministic", [False, True])
async def test_no_operation_looks_at_every_finished_group(tmp_path: Path, deterministic: bool) -> None:
    """The lines of the buffer that a lease, a put and a take run do not grow with what lies finished or was taken."""

    async def work(buf: MemoryBuffer, version: int) -> int:
        lines = 0

        def trace(frame: FrameType, event: str, arg: object) -> object:
            nonlocal lines
            lines += event == "line"
            return trace if frame.f_code.co_filename.endswith(("memory.py", "slot_machine.py")) else None

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
        while len(buf.rows.select(SlotState.FINISHED)) < finished:
            lease = await buf.lease("a")
            assert lease is not None
            await buf.put("a", group(lease.slot))
        await work(buf, 0)
        lines[finished] = await work(buf, 0)
    for _ in range(1000):
        await buf.take(2, 0)
    lines[0] = await work(buf, 0)
    assert max(lines.values()) <= min(lines.values()) + 10
    assert (await buf.state())["consumed_below"] == 2010
    assert len(buf.rows.select(*OPEN, SlotState.CANCELLED)) == buf.rows.head["next_slot"] - 2010


# --------------------------------------------------------------------------- failures that ended the run


def failing(slot: int, *failures: Failure | None) -> Group:
    made = group(slot)
    members = tuple(Trajectory(i, made.trajectories[0].turns, {}, failure) for i, failure in enumerate(failures))
    return dataclasses.replace(made, trajectories=members)


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
        fates = retried(schedule(**change), [failing(2, *failures)])
        assert [("rolled out", "judged")[judged] for _, judged in fates] == [expected] * (expected != "kept")
