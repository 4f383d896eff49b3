"""What stands between the roles on Ray: calls, errors, cancellations, the board, the weights, replicas of an engine."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused

from tests.contract.buffer_contract import check_buffer
from tests.e2e.ray_hosted import (
    EOS,
    Anything,
    Buffers,
    CountingHost,
    raise_in_a_group,
    scripted,
    scripted_that_arrives_late,
    scripted_that_begins_at_once,
    scripted_that_does_not_stream,
    scripted_that_fails,
    scripted_that_never_loads,
)
from tests.processes import survivors
from trivium.cluster.actors import ActorDied, Proxy, build_hosted, result_of, start_host, start_role
from trivium.cluster.engines import EngineSpec, ReplicatedEngine
from trivium.cluster.session import ray_session
from trivium.cluster.weight_store import BoardAndWeights
from trivium.cluster.weights import ObjectStoreChannel, Stored, store
from trivium.config import load_config
from trivium.foundation import errors
from trivium.foundation.board import SharedBoard
from trivium.foundation.errors import (
    ConfigError,
    MissingPackage,
    Problem,
    ProcessDied,
    RoleFailed,
    SyncError,
    TriviumError,
)
from trivium.foundation.randomness import SampleKey
from trivium.planning.plan import plan_run
from trivium.policy import EngineFailure, PromptTooLong, sampled
from trivium.protocols import StreamingEngine
from trivium.schedule import Schedule
from trivium.synchronizer import Synchronizer
from trivium.testing import check_channel, check_engine
from trivium.types import Capabilities, Request, Sampling

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("connected")
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 6, 20)]


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


async def hosted(tmp_path: Path, namespace: str, caller: str = "me") -> tuple[Any, Any]:
    actor = start_host("thing", tmp_path, 3, namespace=namespace)
    return actor, await build_hosted(actor, "thing", caller, Anything)


async def eventually(happened: Any) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


EVERY_ERROR = [
    *(
        kind("asked", "found", "do")
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, TriviumError) and not issubclass(kind, (MissingPackage, RoleFailed))
    ),
    MissingPackage("ray", "ray", "this"),
    RoleFailed("trainer", "why"),
    ProcessDied("trainer", "why"),
    ActorDied("buffer", "why"),
    EngineFailure("a", "b"),
    PromptTooLong("a", "b", "c"),
    ConfigError("a", "b", "c", [Problem("w", "x", "y", "z")]),
]


async def test_calls_and_their_errors_cross_whole(tmp_path: Path, namespace: str) -> None:
    _, thing = await hosted(tmp_path, namespace)
    assert thing.doubled(21) == 42
    assert thing.colour == "red"
    assert thing.threads() == "3"
    with pytest.raises(AttributeError, match="thing has no 'nothing'"):
        thing.nothing()
    assert len(EVERY_ERROR) > 15
    for error in EVERY_ERROR:
        with pytest.raises(type(error)) as caught:
            await thing.fail(error)
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)
        assert vars(caught.value) == vars(error)
    with pytest.raises(StopAsyncIteration):
        await thing.fail(StopAsyncIteration())
    with refused(RoleFailed, "thing failed", "Unheard"):
        await thing.fail_alone()
    assert "in fail_alone" in (tmp_path / "log.txt").read_text()


async def test_a_call_that_is_cancelled_is_cancelled_where_it_runs(tmp_path: Path, namespace: str) -> None:
    actor, thing = await hosted(tmp_path, namespace)
    sleeping = asyncio.create_task(thing.sleep("a"))
    await eventually(lambda: thing.all() == ["a began"])
    sleeping.cancel()
    await eventually(lambda: thing.all() == ["a began", "a ended"])
    # A cancellation that overtakes its call.
    await actor.cancel.remote("other", 7)
    await actor.call.remote("other", 7, "sleep", ("b",), {})
    assert thing.all() == ["a began", "a ended"]


async def test_a_cancellation_that_arrives_after_the_end_of_its_call_leaves_nothing(
    tmp_path: Path, namespace: str
) -> None:
    actor: Any = start_host("thing", tmp_path, 1, namespace=namespace, kind=CountingHost)
    await build_hosted(actor, "thing", "me", Anything)
    await actor.call.remote("other", 1, "doubled", (21,), {})
    await actor.cancel.remote("other", 1)
    assert await actor.num_cancelled.remote() == 0
    await actor.cancel.remote("other", 2)
    assert await actor.num_cancelled.remote() == 1
    await actor.call.remote("other", 2, "doubled", (21,), {})
    assert await actor.num_cancelled.remote() == 0


async def test_the_dead_ask_for_nothing_any_more(tmp_path: Path, namespace: str) -> None:
    actor, thing = await hosted(tmp_path, namespace)
    actor.call.remote("explorer-0", 0, "sleep", ("a",), {})
    await eventually(lambda: thing.all() == ["a began"])
    await actor.forget.remote("explorer-0")
    assert thing.all() == ["a began", "a ended"]
    await actor.call.remote("explorer-0", 1, "sleep", ("late",), {})
    assert thing.all() == ["a began", "a ended"]


async def test_a_death_is_noticed_at_once_by_everybody_who_waits(tmp_path: Path, namespace: str) -> None:
    actor, thing = await hosted(tmp_path, namespace)
    waiting = [asyncio.ensure_future(thing.sleep(name)) for name in ("a", "b")]
    living = actor.live.remote()
    await eventually(lambda: len(thing.all()) == 2)
    os.kill(thing.pid(), signal.SIGKILL)
    started = time.monotonic()
    for wait in waiting:
        with refused(ActorDied, "thing failed"):
            await wait
    with refused(ActorDied, "thing failed"):
        result_of(living, "thing")
    with refused(ActorDied, "thing failed"):
        thing.doubled(1)
    assert time.monotonic() - started < 60


def test_a_role_that_raises_says_what_it_was(tmp_path: Path, namespace: str) -> None:
    worker = start_role("trainer", tmp_path, 1, namespace=namespace)
    with refused(SyncError, "version 3", "its own"):
        result_of(worker.run.remote(raise_in_a_group, "trainer"), "trainer")
    assert result_of(worker.run.remote(lambda name, x: (name, x), "trainer", 5), "trainer") == ("trainer", 5)


async def test_a_board_over_an_actor_loses_no_write_and_wakes_who_waits(tmp_path: Path, namespace: str) -> None:
    actor = start_host("synchronizer", tmp_path, 1, namespace=namespace)
    boards = [SharedBoard(await build_hosted(actor, "synchronizer", f"role-{i}", BoardAndWeights)) for i in range(4)]

    def count(board: SharedBoard) -> None:
        for _ in range(10):
            board.write(lambda values: {**values, "count": values.get("count", 0) + 1})

    polling = asyncio.ensure_future(boards[0].poll(lambda values: values.get("count") == 40, 60.0))
    threads = [threading.Thread(target=count, args=(board,)) for board in boards]
    for thread in threads:
        thread.start()
    assert (await polling)["count"] == 40
    for thread in threads:
        thread.join()
    started = time.monotonic()
    await boards[1].poll(lambda values: False, 0.2)
    assert 0.2 <= time.monotonic() - started < 60


class OneOfThem:
    """One of the buffers, over a proxy."""

    capabilities = Capabilities()

    def __init__(self, buffers: Any, number: int) -> None:
        self._buffers, self._number = buffers, number

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **named: self._buffers.on(self._number, method, args, named)


async def test_a_buffer_in_an_actor_keeps_the_contract(tmp_path: Path, namespace: str) -> None:
    actor = start_host("buffer", tmp_path, 1, namespace=namespace)
    buffers = await build_hosted(actor, "buffer", "me", Buffers)

    def make(name: str, schedule: Schedule) -> Any:
        return OneOfThem(buffers, buffers.make(tmp_path / name, schedule))

    await check_buffer(make)


async def test_the_object_store_keeps_the_contract_of_channels(tmp_path: Path, namespace: str) -> None:
    hubs: dict[int, Any] = {}

    def make(role: str, synchronizer: Synchronizer) -> ObjectStoreChannel:
        board = id(synchronizer.board)
        if board not in hubs:
            actor = start_host(f"hub-{len(hubs)}", tmp_path, 1, namespace=namespace)
            result_of(actor.build.remote(BoardAndWeights), "hub")
            hubs[board] = (synchronizer.board, Proxy(actor, "hub", role))
        return ObjectStoreChannel(hubs[board][1], keep=2)

    (tmp_path / "saved").mkdir()
    await check_channel(make, tmp_path / "saved")


async def test_weights_whose_bytes_changed_are_refused() -> None:
    stored = store(3, [("matrix", torch.ones(2, 3)), ("bias", torch.zeros(3))])
    packed = [list(row) for row in ray.get(stored.refs[0])]
    packed[1][4] = packed[1][4] + np.uint8(1)
    with refused(SyncError, "'bias'", "version 3"):
        list(Stored(3, stored.tensors, (ray.put(packed),)))


# --------------------------------------------------------------------------- replicas


def requests(count: int) -> list[Request]:
    keys = [SampleKey(0, "test", "test", str(i)) for i in range(count)]
    return [Request(PROMPTS[0], Sampling(8), key) for key in keys]


def pids(tmp_path: Path) -> dict[str, int]:
    lines = [line.split() for line in (tmp_path / "log.txt").read_text().splitlines() if ": process " in line]
    return {words[3].rstrip(":"): int(words[5]) for words in lines}


async def replicated(
    tmp_path: Path, namespace: str, replicas: int, delay_s: float = 0.0, make: Any = scripted
) -> ReplicatedEngine:
    names = [f"engine-0-{replica}" for replica in range(replicas)]
    spec = EngineSpec(make, (delay_s,), tmp_path, 1, namespace, max_restarts=1, deadline_s=60)
    return await ReplicatedEngine.start(spec, names)


async def test_a_replicated_engine_keeps_the_contract_of_engines(tmp_path: Path, namespace: str) -> None:
    # `check_engine` makes engines outside of a coroutine; these are started in one.
    spare = [await replicated(tmp_path, f"{namespace}-{replicas}", replicas) for replicas in (1, 2)]
    await check_engine(
        spare.pop, PROMPTS, eos_token_ids=EOS, weights=lambda: iter([("weight", torch.ones(2))]), max_new_tokens=12
    )


async def test_a_load_that_overtakes_completions_does_not_change_their_version(tmp_path: Path, namespace: str) -> None:
    engine = await replicated(tmp_path, namespace, 2, make=scripted_that_arrives_late)
    early = [asyncio.ensure_future(engine.generate(request)) for request in requests(4)]
    await asyncio.sleep(0)
    await engine.load(3, [("weight", torch.ones(2))])
    late = await asyncio.gather(*map(engine.generate, requests(4)))
    assert {int(version) for done in await asyncio.gather(*early) for version in done.policy_version} == {0}
    assert {int(version) for done in late for version in done.policy_version} == {3}
    await engine.close()


async def test_replicas_stream_only_if_their_engine_does(tmp_path: Path, namespace: str) -> None:
    engine = await replicated(tmp_path, namespace, 1, make=scripted_that_does_not_stream)
    assert not isinstance(engine, StreamingEngine)
    reported: list[int] = []
    done = await sampled(engine, requests(1)[0], lambda tokens, _: reported.extend(tokens))
    assert reported == done.tokens.tolist() != []
    await engine.close()


async def test_a_replica_that_dies_is_replaced_with_its_weights_and_its_replies_are_the_same(
    tmp_path: Path, namespace: str
) -> None:
    alone, engine = scripted(0.0), await replicated(tmp_path, namespace, 2, 1.0, scripted_that_begins_at_once)
    weights = [("weight", torch.ones(2))]
    await alone.load(7, weights)
    await engine.load(7, weights)
    expected = await asyncio.gather(*map(alone.generate, requests(12)))
    streamed: list[int] = []
    replying = [asyncio.ensure_future(engine.generate(request)) for request in requests(11)]
    replying.append(asyncio.ensure_future(engine.stream(requests(12)[-1], lambda tokens, _: streamed.extend(tokens))))
    await eventually(lambda: streamed)
    assert len(streamed) == 1  # the completion is not over
    os.kill(pids(tmp_path)["engine-0-1"], signal.SIGKILL)
    found = await asyncio.gather(*replying)
    assert streamed == found[-1].tokens.tolist()
    assert [done.tokens.tolist() for done in found] == [done.tokens.tolist() for done in expected]
    assert {int(version) for done in found for version in done.policy_version} == {7}
    # An idle one is missed when new weights come, and gets them as well.
    os.kill(pids(tmp_path)["engine-0-0"], signal.SIGKILL)
    await engine.load(8, weights)
    assert engine.version == 8
    later = await asyncio.gather(*map(engine.generate, requests(4)))
    assert {int(version) for done in later for version in done.policy_version} == {8}
    # Once more than it may die.
    os.kill(pids(tmp_path)["engine-0-1~1"], signal.SIGKILL)
    with refused(EngineFailure, "engine-0-1", "2 time(s)"):
        await engine.load(9, weights)
    assert engine.version == 8
    await engine.close()


async def test_a_replica_that_hangs_while_weights_are_loaded_is_named_and_ended(tmp_path: Path, namespace: str) -> None:
    """Also one that hangs in the place of one that died."""
    engine = await replicated(tmp_path, namespace, 2)
    weights = [("weight", torch.ones(2))]
    await engine.load(7, weights)
    hangs, other = engine.replicas
    hangs._spec = replace(hangs._spec, deadline_s=0.5)  # once it has started
    pid = pids(tmp_path)["engine-0-0"]
    os.kill(pid, signal.SIGSTOP)
    found = r"found: it has not loaded it within 0.5 s, and its process has not ended"
    with refused(EngineFailure, "version 8", "engine-0-0", found):
        await engine.load(8, weights)
    assert engine.version == 7
    await eventually(lambda: not survivors([pid]))
    other._spec = replace(other._spec, make=scripted_that_never_loads)
    os.kill(pids(tmp_path)["engine-0-1"], signal.SIGKILL)
    waiting = asyncio.ensure_future(other.generate(requests(1)[0]))
    await eventually(lambda: "engine-0-1~1" in pids(tmp_path))
    other._spec = replace(other._spec, deadline_s=0.5)
    with refused(EngineFailure, "version 8", "engine-0-1"):
        await waiting
    await engine.close()


async def test_a_replica_that_is_closed_while_it_is_restarted_leaves_no_process(tmp_path: Path, namespace: str) -> None:
    engine = await replicated(tmp_path, namespace, 1)
    (replica,) = engine.replicas
    make: Any = time.sleep  # a build that does not end
    replica._spec = replace(replica._spec, make=make, args=(600.0,))
    os.kill(pids(tmp_path)["engine-0-0"], signal.SIGKILL)
    waiting = asyncio.ensure_future(engine.generate(requests(1)[0]))
    await eventually(lambda: "engine-0-0~1" in pids(tmp_path))
    async with asyncio.timeout(60):
        await engine.close()
        with refused(EngineFailure, "closed"):
            await waiting
    await eventually(lambda: not survivors([pids(tmp_path)["engine-0-0~1"]]))


async def test_a_replica_that_does_not_start_in_time_leaves_no_process(tmp_path: Path, namespace: str) -> None:
    make: Any = time.sleep  # a build that does not end
    spec = EngineSpec(make, (600.0,), tmp_path, 1, namespace, max_restarts=0, deadline_s=20)
    with refused(EngineFailure, "engine-0-4", "20 s", "sync.deadline_s"):
        await ReplicatedEngine.start(spec, ["engine-0-4"])
    await eventually(lambda: not survivors([pids(tmp_path)["engine-0-4"]]))


async def test_an_error_of_one_of_several_engines_names_it(tmp_path: Path, namespace: str) -> None:
    spec = EngineSpec(scripted_that_fails, (0.0,), tmp_path, 1, namespace, max_restarts=0, deadline_s=60)
    engine = await ReplicatedEngine.start(spec, ["engine-0-3"])
    with refused(EngineFailure, "vLLM (engine-0-3)", "process died"):
        await engine.generate(requests(1)[0])
    await engine.close()


def test_trivium_without_ray_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = load_config(Path(__file__).with_name("ray.yaml"), ["cluster.kind=ray"])
    with refused(MissingPackage, "pip install 'trivium[ray]'"), ray_session(plan_run(config, cores=1)):
        pass


def test_a_cluster_that_is_not_there_is_an_error_at_once() -> None:
    config = load_config(Path(__file__).with_name("ray.yaml"), ["cluster.kind=ray", "cluster.address=127.0.0.1:9"])
    with refused(ConfigError, "'127.0.0.1:9'", "refused"), ray_session(plan_run(config, cores=1)):
        pass
