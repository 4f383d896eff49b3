"""A broadcast that goes wrong: whom it names, and what it does not wait for. Both ends in one process here; e2e has
processes of their own."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from failing import refused
from sync_parts import Reading

from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import RoleFailed, SyncError, VersionGone
from trivium.models.weights.stream import Described
from trivium.protocols import DescribedWeights, TensorSpec, WeightOffer
from trivium.publisher import Publisher
from trivium.sync import collective, process_group
from trivium.sync.collective import CollectiveChannel
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER

NINE = tuple(TensorSpec(f"layer.{number}", "float32", (64,)) for number in range(9))
WEIGHTS = [("embed", torch.randn(5, 3)), ("norm", torch.randn(3))]


class Run:
    """A trainer's end and the ends of explorers that have joined, over one board."""

    def __init__(self, deadline_s: float = 120.0) -> None:
        self._board, self._deadline_s = MemoryBoard(), deadline_s
        self.synchronizer, self.trainer = self._end(TRAINER)
        self.synchronizer.open()

    def _end(self, role: str) -> tuple[Synchronizer, CollectiveChannel]:
        synchronizer = Synchronizer(self._board, deadline_s=self._deadline_s, collective=True)
        return synchronizer, CollectiveChannel(keep=1, directory=Path(), synchronizer=synchronizer, role=role)

    async def explorer(self, name: str) -> tuple[Synchronizer, CollectiveChannel]:
        end = self._end(name)
        await end[0].wait_for_trainer(name)
        await end[0].join(name)
        return end

    def offer(self, version: int, make: Callable[[], Any] = lambda: WEIGHTS) -> asyncio.Task[bool]:
        """Offers a version as a trainer does: again after an aborted exchange, with weights that are read anew."""
        engine = Offering(lambda: WeightOffer(self.trainer.offer(version, make())))
        nobody: Any = None  # neither rollouts nor the schedule take part
        publisher = Publisher(engine, nobody, self.trainer, self.synchronizer, nobody)  # type: ignore[arg-type]
        return asyncio.create_task(asyncio.to_thread(publisher.offer, version))


class Offering(NamedTuple):
    """What a publisher uses of an engine."""

    offer_weights: Callable[[], WeightOffer]


async def collected(channel: CollectiveChannel, version: int) -> dict[str, torch.Tensor]:
    return await asyncio.to_thread(lambda: dict(channel.collect(version)))


async def test_a_version_that_nobody_lacks_is_delivered_to_nobody() -> None:
    run = Run()
    synchronizer, _ = await run.explorer("ann")
    synchronizer.adopted("ann", 4)
    assert await run.offer(4) is False


async def test_an_explorer_that_comes_late_gets_the_version_by_itself() -> None:
    run = Run()
    for name in ("ann", "bob"):
        synchronizer, channel = await run.explorer(name)
        offering = run.offer(3)
        assert await synchronizer.next_version(name, None, newest=True) == 3
        found = await collected(channel, 3)
        assert all(torch.equal(found[key], tensor) for key, tensor in WEIGHTS)
        assert await offering is True
        synchronizer.adopted(name, 3)


async def test_damage_is_refused_as_often_as_it_happens_and_the_trainer_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = collective._received_bytes

    def damaged(group: Any, size: int) -> torch.Tensor:
        flat = original(group, size)
        flat[1] ^= 1
        return flat

    monkeypatch.setattr(collective, "_received_bytes", damaged)
    run = Run()
    synchronizer, channel = await run.explorer("ann")
    offering = run.offer(0)
    for _ in range(collective.MAX_EXCHANGES):
        await synchronizer.next_version("ann", None, newest=True)
        with refused(SyncError, "'embed'", "version 0"):
            await collected(channel, 0)
    with refused(SyncError, "version 0", f"{collective.MAX_EXCHANGES} exchanges", "ann", "bytes changed"):
        await offering


async def test_an_exchange_is_entered_once() -> None:
    run = Run()
    synchronizer, channel = await run.explorer("ann")
    offering = run.offer(0)
    await synchronizer.next_version("ann", None, newest=True)
    await collected(channel, 0)
    assert await offering
    with refused(VersionGone, "'ann'", "version 0", "exchange 1"):
        await collected(channel, 0)


async def test_one_that_the_trainer_took_for_dead_is_told_so() -> None:
    run = Run()
    synchronizer, channel = await run.explorer("ann")
    await run.explorer("bob")
    synchronizer.mark_dead("ann", "no heartbeat for 10 s")
    with refused(SyncError, "'ann'", "version 0", "no heartbeat", "sync.heartbeat_s"):
        await collected(channel, 0)


async def test_a_member_that_goes_while_others_wait_for_it_ends_the_exchange() -> None:
    """It stood ready and never came: nobody connects to it, and nobody waits for the deadline."""
    run = Run()
    (ann, channel), (bob, _) = await run.explorer("ann"), await run.explorer("bob")
    offering = run.offer(0)
    await ann.next_version("ann", None, newest=True)
    entering = asyncio.create_task(collected(channel, 0))
    exchange = await bob.ready_to_nccl_sync("bob", 0)
    assert exchange is not None
    assert exchange.members == ("ann", "bob")
    checked, reason = threading.Event(), ann.abort_reason
    ann.abort_reason = lambda *of: (reason(*of), checked.set())[0]
    assert await asyncio.to_thread(checked.wait, 60)
    assert not entering.done()
    run.synchronizer.mark_dead("bob", "killed")
    async with asyncio.timeout(60):
        with refused(VersionGone, "exchange 1", "ann", "'bob'", "killed"):
            await entering
        await ann.next_version("ann", None, newest=True)
        assert dict(await collected(channel, 0)).keys() == dict(WEIGHTS).keys()
        assert await offering is True


async def test_an_address_that_somebody_cannot_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "RENDEZVOUS_S", 0.5)
    run = Run()
    ann, _ = await run.explorer("ann")
    offering = run.offer(0)
    for _ in range(collective.MAX_EXCHANGES):
        await ann.next_version("ann", None, newest=True)
        assert await ann.ready_to_nccl_sync("ann", 0) is not None  # and never comes
    with refused(SyncError, "version 0", "ann", "GLOO_SOCKET_IFNAME"):
        await offering


async def test_a_run_that_is_over_keeps_nobody_in_an_exchange() -> None:
    run = Run()
    synchronizer, channel = await run.explorer("ann")
    offering = run.offer(0)
    await synchronizer.next_version("ann", None, newest=True)
    exchange = await synchronizer.ready_to_nccl_sync("ann", 0)
    assert exchange is not None
    synchronizer.mark_dead(TRAINER, "killed")
    async with asyncio.timeout(60):
        with refused(RoleFailed, "trainer failed", "killed"):
            await offering
        with refused(RoleFailed, "trainer failed", "killed"):
            await collected(channel, 0)


def test_addresses_are_those_of_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert process_group.own_address() == "127.0.0.1"
    assert process_group.endpoint("127.0.0.1:80") == ("127.0.0.1", 80)
    assert process_group.endpoint("node-7:80") == ("node-7", 80)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with refused(SyncError, "GLOO_SOCKET_IFNAME=nowhere"):
        process_group.own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    own = process_group.own_address()
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")  # the master's own host name, as Debian resolves it
    assert process_group.own_address() == own
    assert process_group.endpoint(f"{own}:80") == ("127.0.0.1", 80)


def test_only_a_port_that_nobody_listens_on_proves_a_death() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not process_group.refuses_connections(address)
    assert process_group.refuses_connections(address)
    assert not process_group.refuses_connections("no-such-host.invalid:80")


def test_it_keeps_nothing(tmp_path: Path) -> None:
    channel = Run().trainer
    channel.save(tmp_path, [])
    channel.restore(tmp_path)
    assert channel.versions == ()
    assert os.listdir(tmp_path) == []


async def test_weights_are_read_a_tensor_at_a_time_and_buckets_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 600)  # two tensors of 256 bytes
    buckets: list[weakref.ref[torch.Tensor]] = []
    original = process_group.ExchangeGroup.broadcast_async

    def start(self: Any, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().nbytes() == 600 and self._rank == 0:
            buckets.append(weakref.ref(tensor))
            assert sum(ref() is not None for ref in buckets) == 1, "the bucket before it is gone"
        return original(self, tensor)

    monkeypatch.setattr(process_group.ExchangeGroup, "broadcast_async", start)
    run, reading = Run(), Reading(21)
    synchronizer, channel = await run.explorer("ann")
    offering = asyncio.create_task(asyncio.to_thread(run.trainer.offer, 0, reading))
    await synchronizer.next_version("ann", None, newest=True)
    found = await collected(channel, 0)
    assert await offering is True
    assert [float(found[f"layer.{number}"].mean()) for number in range(21)] == list(range(21))
    assert len(buckets) == 11
    assert reading.most <= 2, "the one that is packed, and the one that is being made"


def kill_at_bucket(
    number: int, run: Run, bob: Synchronizer, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Bob dies before he receives a bucket: the first event says he is at it, the second lets him."""
    original, there, go_on = process_group.ExchangeGroup.receive_object, threading.Event(), threading.Event()
    calls = iter(range(-1, 1000))  # the specs come first, and with each bucket its entries and its hashes

    def receive(self: Any) -> Any:
        if self._synchronizer is bob and next(calls) == 2 * number:
            there.set()
            assert go_on.wait(120)
            run.synchronizer.mark_dead("bob", "killed")
            raise process_group.ExchangeAborted("killed")
        return original(self)

    monkeypatch.setattr(process_group.ExchangeGroup, "receive_object", receive)
    return there, go_on


async def test_where_all_who_had_begun_are_gone_the_version_is_offered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 600)
    run = Run()
    bob, channel = await run.explorer("bob")
    there, go_on = kill_at_bucket(1, run, bob, monkeypatch)
    offering = run.offer(0, lambda: Reading(9))
    await bob.next_version("bob", None, newest=True)
    entering = asyncio.create_task(collected(channel, 0))
    assert await asyncio.to_thread(there.wait, 60)
    late, late_channel = await run.explorer("cy")
    go_on.set()
    with refused(SyncError, "dead: killed"):
        await entering
    await late.next_version("cy", None, newest=True)
    assert len(await collected(late_channel, 0)) == 9
    assert await offering is True
    late.adopted("cy", 0)
    assert await run.offer(0) is True


async def test_an_exchange_that_breaks_off_in_the_middle_is_repeated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explorer that was there before yields the rest, in order; one that came meanwhile everything."""
    monkeypatch.setattr(collective, "BUCKET_BYTES", 600)
    sent: list[int] = []
    original = process_group.ExchangeGroup.broadcast_object

    def tell(self: Any, message: Any) -> None:
        if isinstance(message, dict) and "tensors" in message:
            sent.append(int(message["tensors"][0]["name"].removeprefix("layer.")))
        original(self, message)

    monkeypatch.setattr(process_group.ExchangeGroup, "broadcast_object", tell)
    run = Run()
    (ann, channel), (bob, other) = await run.explorer("ann"), await run.explorer("bob")
    offering = run.offer(0, lambda: Reading(9))
    await ann.next_version("ann", None, newest=True)
    there, go_on = kill_at_bucket(2, run, bob, monkeypatch)
    first = asyncio.create_task(asyncio.to_thread(lambda: [(key, float(t[0])) for key, t in channel.collect(0)]))
    lost = asyncio.create_task(collected(other, 0))
    assert await asyncio.to_thread(there.wait, 60)
    late, late_channel = await run.explorer("cy")
    go_on.set()
    with refused(SyncError, "dead: killed"):
        await lost
    await late.next_version("cy", None, newest=True)
    assert len(await collected(late_channel, 0)) == 9
    assert await first == [(f"layer.{number}", number) for number in range(9)]
    assert await offering is True
    assert sent[-5:] == [0, 2, 4, 6, 8]
    assert sent[:-5] == [0, 2, 4, 6][: len(sent) - 5]


async def test_weights_that_cannot_be_read_to_their_end_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 600)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from Reading(5)
        raise FloatingPointError("a rank died")

    run = Run()
    synchronizer, channel = await run.explorer("ann")
    offering = asyncio.create_task(asyncio.to_thread(run.trainer.offer, 0, broken()))
    await synchronizer.next_version("ann", None, newest=True)
    async with asyncio.timeout(60):
        entering = asyncio.create_task(collected(channel, 0))
        with pytest.raises(FloatingPointError, match="a rank died"):
            await offering
        run.synchronizer.mark_dead(TRAINER, "a rank died")
        with refused(RoleFailed, "trainer failed", "a rank"):
            await entering


async def test_only_the_bucket_that_came_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 600)
    original, came = collective._received_bytes, list[weakref.ref[torch.Tensor]]()

    def received(group: Any, size: int) -> torch.Tensor:
        assert not any(ref() is not None for ref in came), "the bucket before it is gone"
        flat = original(group, size)
        came.append(weakref.ref(flat))
        return flat

    monkeypatch.setattr(collective, "_received_bytes", received)
    run = Run()
    synchronizer, channel = await run.explorer("ann")
    offering = asyncio.create_task(asyncio.to_thread(run.trainer.offer, 0, Described(NINE, Reading(9))))
    await synchronizer.next_version("ann", None, newest=True)

    def read() -> None:
        weights = channel.collect(0)
        assert isinstance(weights, DescribedWeights)
        assert tuple(weights.tensors) == NINE
        for number, (name, tensor) in enumerate(weights):
            assert (name, float(tensor.sum())) == (f"layer.{number}", 64.0 * number)
            del tensor

    await asyncio.to_thread(read)
    assert await offering is True
    assert len(came) == 5


async def test_a_trainer_that_offers_another_version_says_what_became_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 600)
    run = Run()
    synchronizer, channel = await run.explorer("ann")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from Reading(5)
        raise FloatingPointError("a rank died")

    offering = asyncio.create_task(asyncio.to_thread(run.trainer.offer, 0, broken()))
    await synchronizer.next_version("ann", None, newest=True)
    entering = asyncio.create_task(collected(channel, 0))
    with pytest.raises(FloatingPointError):
        await offering
    again = asyncio.create_task(asyncio.to_thread(run.trainer.offer, 1, Reading(5)))
    with refused(VersionGone, "version 0", "4 tensor(s)"):
        await entering
    assert len(await collected(channel, 1)) == 5
    assert await again is True


@pytest.mark.parametrize(
    ("gpus", "backend", "reason"),
    [
        ({"trainer": "a", "ann": "b", "bob": "c"}, "nccl", ""),
        ({"trainer": "", "ann": ""}, "gloo", ""),
        ({"trainer": "a", "ann": "a", "bob": "b"}, "gloo", "trainer and ann share a GPU"),
        ({"trainer": "a", "ann": "b", "bob": ""}, "gloo", "bob have no GPU, or no nccl"),
        ({"trainer": "a", "ann": "a", "bob": ""}, "gloo", "trainer and ann share a GPU; bob have no GPU"),
    ],
)
def test_nccl_needs_a_gpu_for_each_process(gpus: dict[str, str], backend: str, reason: str) -> None:
    chosen, found = process_group.backend_of(gpus)
    assert chosen == backend
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


async def test_a_group_of_nccl_transfers_as_one_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the library: the group is formed as nccl's is, and gloo carries what it broadcasts."""
    formed: list[str] = []

    def form(self: Any, store: Any) -> Any:
        formed.append(self.backend)
        return self._gloo(store, "127.0.0.1")

    monkeypatch.setattr(process_group, "_gpu_name", lambda _: uuid.uuid4().hex)
    monkeypatch.setattr(process_group.ExchangeGroup, "_nccl", form)
    run = Run()
    ends = [await run.explorer(name) for name in ("ann", "bob")]
    offering = run.offer(0)
    for synchronizer, _ in ends:
        assert await synchronizer.next_version("ann", None, newest=True) == 0
    for found in await asyncio.gather(*(collected(channel, 0) for _, channel in ends)):
        assert all(torch.equal(found[key], tensor) for key, tensor in WEIGHTS)
    assert await offering is True
    assert formed == ["nccl"] * 3


async def test_gpus_that_cannot_use_nccl_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_group, "_gpu_name", lambda _: "gpu-0")
    run = Run()
    synchronizer, channel = await run.explorer("ann")
    for version in (0, 1):
        offering = run.offer(version)
        await synchronizer.next_version("ann", version - 1, newest=True)
        assert await collected(channel, version)
        assert await offering
        synchronizer.adopted("ann", version)
    assert [each.getMessage() for each in caplog.records if "share a GPU" in each.getMessage()] == [
        "weights go through host memory (gloo), not from GPU to GPU (nccl): trainer and ann share a GPU"
    ]


async def test_a_member_that_goes_while_the_group_connects_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl waits for it without end, in a call that nothing interrupts."""
    connecting, over = threading.Event(), threading.Event()

    def form(self: Any, *_: Any) -> Any:
        connecting.set()
        assert over.wait(120)
        raise RuntimeError("no answer")

    monkeypatch.setattr(process_group.ExchangeGroup, "_gloo", form)
    run = Run()
    ann, channel = await run.explorer("ann")
    offering = run.offer(0)
    await ann.next_version("ann", None, newest=True)
    entering = asyncio.create_task(collected(channel, 0))
    try:
        assert await asyncio.to_thread(connecting.wait, 60)
        run.synchronizer.mark_dead("ann", "killed")
        async with asyncio.timeout(60):  # `over` is not set: the connecting thread is not waited for
            for waiting in (entering, offering):
                with refused(RoleFailed, "ann failed", "killed"):
                    await waiting
    finally:
        over.set()
