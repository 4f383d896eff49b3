"""Contract tests for plugin authors. What ships passes the same ones.

Call one from a test of your own; a broken promise is an AssertionError that names it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch

from trivium.board import MemoryBoard
from trivium.errors import DataError, SyncError
from trivium.policy import Policy
from trivium.protocols import ReadableEngine
from trivium.randomness import SampleKey
from trivium.schedule import Schedule
from trivium.synchronizer import Synchronizer
from trivium.types import (
    TRAINER,
    Failure,
    Group,
    Lease,
    Message,
    Request,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    capabilities_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from trivium.policy import Workflow
    from trivium.protocols import Buffer, RolloutEngine, WeightChannel, Weights
    from trivium.types import Completion, IntArray


async def check_workflow(
    workflow: Workflow, task: Task, policy_factory: Callable[[], Policy], *, patience_s: float = 10.0
) -> None:
    """A workflow records turns, returns finite rewards, repeats itself in company, and ends when cancelled.

    `policy_factory` makes a fresh policy, the same one each time: same weights, same SampleKey.
    """
    alone = policy_factory()
    earned = await workflow.run(task, alone)
    _require(len(alone.turns) > 0, "run records at least one turn: await policy.generate(...)")
    _require(earned is None or _all_finite(earned), f"run returns None or finite numbers by name, not {earned!r}")
    _require(_all_finite(alone.metrics), f"policy.metrics holds finite numbers by name, not {alone.metrics!r}")

    company = [policy_factory(), policy_factory()]
    results = await asyncio.gather(*(workflow.run(task, policy) for policy in company))
    for policy, result in zip(company, results, strict=True):
        same = result == earned and [*map(_contents, policy.turns)] == [*map(_contents, alone.turns)]
        _require(same, "a trajectory does not depend on those rolled out beside it, or before: keep no state on self")

    silent = _SilentPolicy()
    running = asyncio.ensure_future(workflow.run(task, silent))
    await asyncio.wait_for(silent.requested.wait(), patience_s)
    running.cancel()
    await asyncio.wait({running}, timeout=patience_s)
    _require(running.done() and running.cancelled(), "run ends when it is cancelled: let CancelledError through")


async def check_engine(
    make: Callable[[], RolloutEngine],
    prompts: Sequence[IntArray],
    *,
    eos_token_ids: frozenset[int],
    weights: Callable[[], Weights],
    max_new_tokens: int = 12,
    patience_s: float = 30.0,
) -> None:
    """An engine samples what it says it samples, repeats itself, switches weights between completions, and never hangs.

    `make` builds a fresh engine, the same one each time. `prompts` are at least two prompts it can read; `weights`
    yields weights that `load` accepts. What an engine does not promise (`exact_sampling`, `batch_invariant`,
    `updates_in_flight`) is not asked of it.
    """
    _require(len(prompts) >= 2, "check_engine is given at least two prompts")
    engine = make()
    try:
        async with asyncio.timeout(patience_s):
            await _check_completions(engine, prompts, eos_token_ids, max_new_tokens)
        async with asyncio.timeout(patience_s):
            await _check_cancelling(engine, prompts, max_new_tokens)
        async with asyncio.timeout(patience_s):
            await _check_loading(engine, prompts, weights, max_new_tokens)
        if capabilities_of(engine).updates_in_flight:
            async with asyncio.timeout(patience_s):
                await _check_updating(engine, prompts, weights, max_new_tokens)
    finally:
        async with asyncio.timeout(patience_s):
            await engine.close()
    async with asyncio.timeout(patience_s):
        await engine.close()
        closed = await asyncio.gather(engine.generate(_request(prompts[0], 0, max_new_tokens)), return_exceptions=True)
        _require(isinstance(closed[0], Exception), "generate raises once the engine is closed")
        engine = make()
        long = [asyncio.ensure_future(engine.generate(_request(prompt, 0, max_new_tokens))) for prompt in prompts]
        await asyncio.sleep(0)
        await engine.close()
        await asyncio.wait(long)


async def _check_completions(
    engine: RolloutEngine, prompts: Sequence[IntArray], eos: frozenset[int], max_new_tokens: int
) -> None:
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    requests += [_request(prompt, 0, 1) for prompt in prompts]
    requests += [_request(prompt, 0, max_new_tokens, temperature=0.0) for prompt in prompts]
    together = await asyncio.gather(*map(engine.generate, requests))
    for request, done in zip(requests, together, strict=True):
        _check_completion(request, done, engine.version, eos)
    if not capabilities_of(engine).exact_sampling:
        return
    for request, done in [*zip(requests, together, strict=True)][:: max(1, len(requests) // 8)]:
        alone = await engine.generate(request)
        same = np.array_equal(alone.tokens, done.tokens) and alone.stop_reason is done.stop_reason
        _require(same, "exact_sampling: the same key gives the same tokens, in whatever company")
        if capabilities_of(engine).batch_invariant:
            bits = alone.log_prob.tobytes() == done.log_prob.tobytes()
            _require(bits, "batch_invariant: log-probabilities do not depend on the company, bit for bit")


def _check_completion(request: Request, done: Completion, version: int, eos: frozenset[int]) -> None:
    tokens, limit = done.tokens, request.sampling.max_new_tokens
    _require(1 <= len(tokens) <= limit, f"a completion has 1 to max_new_tokens = {limit} tokens, not {len(tokens)}")
    _require(len(tokens) == len(done.log_prob) == len(done.policy_version), "one log_prob and version per token")
    _require(bool(np.isfinite(done.log_prob).all() and (done.log_prob <= 0).all()), "log_prob is finite and at most 0")
    _require(bool((done.policy_version == version).all()), f"policy_version is the loaded version {version}")
    _require(request.sampling.temperature > 0 or not done.log_prob.any(), "log_prob is 0 at temperature 0")
    ends = [int(token) in eos for token in tokens]
    _require(not any(ends[:-1]), "a completion ends with its first end-of-sequence token")
    expected = StopReason.EOS if ends[-1] else StopReason.LENGTH
    _require(done.stop_reason is expected, f"stop_reason is {expected}, not {done.stop_reason}")
    _require(ends[-1] or len(tokens) == limit, "a completion without end of sequence has max_new_tokens tokens")


async def _check_cancelling(engine: RolloutEngine, prompts: Sequence[IntArray], max_new_tokens: int) -> None:
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(8)]
    calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    for call in calls[1:]:
        call.cancel()
    await asyncio.wait(calls)
    _require(
        all(call.cancelled() for call in calls[1:]), "generate ends when it is cancelled: let CancelledError through"
    )
    _require(calls[0].exception() is None, "cancelling one call leaves the others alone")
    await asyncio.gather(*map(engine.generate, requests))


async def _check_loading(
    engine: RolloutEngine, prompts: Sequence[IntArray], weights: Callable[[], Weights], max_new_tokens: int
) -> None:
    old, new = engine.version, engine.version + 3
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    before = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    loading = asyncio.ensure_future(engine.load(new, weights()))
    await asyncio.sleep(0)
    after = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await loading
    _require(engine.version == new, "version is the one that was loaded, once load returns")
    early, late = await asyncio.gather(*before), await asyncio.gather(*after)
    kept = all((done.policy_version == old).all() for done in early)
    _require(kept, "load waits for the completions in flight: they belong to the old version, whole")
    _require(all((done.policy_version == new).all() for done in late), "requests after load wait for the new version")
    if isinstance(engine, ReadableEngine):
        held, given = dict(await engine.weights()), dict(weights())
        same = all(name in held and _same_bits(held[name], value.to(held[name].dtype)) for name, value in given.items())
        _require(same, "weights: what is held after load is what was given, in the engine's own type, to the bit")


async def _check_updating(
    engine: RolloutEngine, prompts: Sequence[IntArray], weights: Callable[[], Weights], max_new_tokens: int
) -> None:
    old, new, given = engine.version, engine.version + 1, list(weights())
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    before = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.load(new, given, in_flight="update")
    _require(engine.version == new, "version is the one that was loaded, once load returns")
    after = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    early, late = await asyncio.gather(*before), await asyncio.gather(*after)
    spans = [done.policy_version for done in early]
    in_order = all((np.diff(span) >= 0).all() and {*span.tolist()} <= {old, new} for span in spans)
    _require(in_order, "updates_in_flight: tokens before it are the old version's, others the new one's")
    _require(
        any((span == new).any() for span in spans), "updates_in_flight: completions in flight go on with new weights"
    )
    _require(all((done.policy_version == new).all() for done in late), "later requests are the new version's, whole")


MakeBuffer = Callable[[str, Schedule], "Buffer"]


async def check_buffer(make: MakeBuffer, *, shared: bool = False, patience_s: float = 60.0) -> None:
    """A buffer admits, orders, evicts, calls off and replaces as the schedule says, and loses and repeats nothing.

    `make(name, schedule)` builds an end of the buffer `name`, empty the first time; the next end of the same name finds
    what the one before it left. `shared`: several ends of one name work at the same time. Its own deadline must not be
    shorter than `patience_s`.
    """
    checks = (
        _check_order,
        _check_admission,
        _check_eviction,
        _check_release,
        _check_calling_off,
        _check_dropped,
        _check_refused,
        _check_cancelled_waits,
        _check_restored,
        _check_lost_future,
        _check_retries,
        _check_close,
    )
    for check in checks:
        async with asyncio.timeout(patience_s):
            await check(make)
    async with asyncio.timeout(patience_s):
        await _check_company(make, shared)


async def check_read_buffer(make: Callable[[], Buffer], *, patience_s: float = 60.0) -> None:
    """A buffer over data that exists already gives it in one order, to every caller, and needs no explorer.

    `make()` builds an end of it before version 0 of a stage, over data for at least three steps of two groups.
    """
    async with asyncio.timeout(patience_s):
        buffer, again = make(), make()
        await buffer.restore(None, 0)
        await again.restore(None, 0)
        unfilled = not capabilities_of(buffer).explored
        _require(unfilled, "a buffer that no explorer fills declares Capabilities(explored=False)")
        first, second = await buffer.take(2, 0), await buffer.take(2, 1)
        state = json.loads(json.dumps(await buffer.state()))
        third = await buffer.take(2, 2)
        slots = _slots([*first, *second, *third])
        _require(len(set(slots)) == 6, "no group is given twice")
        _require(repr(await again.take(2, 0)) == repr(first), "the data and its order are the same for every caller")
        _require(
            repr(await again.taken_groups(slots[1::-1])) == repr(first[::-1]),
            "taken_groups returns groups that were taken",
        )
        resumed = make()
        await resumed.restore(state, 2)
        _require(repr(await resumed.take(2, 2)) == repr(third), "what was taken after the checkpoint is taken again")
        await _refused(buffer.lease("e", wait=False), "there are no slots to explore")
        await _refused(buffer.put("e", first[0]), "nothing is put")
        _require(await buffer.release("e") == 0, "there are no leases to release")
        await buffer.drain(0)
        await buffer.close()


async def _check_order(make: MakeBuffer) -> None:
    buffer = await _opened(make, "order", _schedule())
    held = [await _lease(buffer) for _ in range(2)]
    _require([lease.slot for lease in held] == [0, 1], "slots are issued from 0, in order")
    await buffer.put("e", _group(held[1]))
    taking = asyncio.ensure_future(buffer.take(2, 0))
    await asyncio.sleep(0.1)
    _require(not taking.done(), "take waits for as many groups as were asked for")
    await _refused(buffer.put("e", _group(held[1])), "a group is put once")
    await buffer.put("e", _group(held[0]))
    taken = await taking
    _require(_slots(taken) == [0, 1], "with max_staleness 0 groups are taken in slot order")
    again = await buffer.taken_groups([1, 0])
    _require(_slots(again) == [1, 0], "taken_groups returns groups that were taken, as asked for")
    _require(repr(again[1]) == repr(taken[0]), "a group comes out as it went in")

    buffer = await _opened(make, "arrival", _schedule(max_staleness=4))
    held = [await _lease(buffer) for _ in range(3)]
    for lease in (held[2], held[0], held[1]):
        await buffer.put("e", _group(lease))
    taken = await buffer.take(2, 0) + await buffer.take(1, 0)
    _require(_slots(taken) == [2, 0, 1], "with staleness groups are taken in order of arrival")


async def _check_admission(make: MakeBuffer) -> None:
    buffer = await _opened(make, "admission", _schedule(max_staleness=1))
    _require(await buffer.lease("late", wait=False) is None, "who has adopted no version gets no slot")
    slots = [(await _lease(buffer)).slot for _ in range(4)]
    _require(slots == [0, 1, 2, 3], "version v admits (v + max_staleness + 1) * groups_per_step slots")
    _require(await buffer.lease("e", wait=False) is None, "without wait, lease returns None where nothing is free")
    waiting = asyncio.ensure_future(buffer.lease("e"))
    draining = asyncio.ensure_future(buffer.drain(0))
    await asyncio.sleep(0.1)
    _require(not waiting.done(), "lease waits for a slot")
    for slot in slots[:3]:
        await buffer.put("e", _group(Lease(slot)))
    await asyncio.sleep(0.1)
    _require(not draining.done(), "drain waits for every slot that the version admits")
    await buffer.put("e", _group(Lease(3)))
    await draining
    await buffer.advance("e", 1)
    _require(await waiting == Lease(4), "a newer version admits more slots, and wakes who waits for one")
    await _refused(buffer.put("other", _group(Lease(4))), "only who leased a slot puts its group")
    await _refused(buffer.put("e", _group(Lease(77))), "only what was leased is put")


async def _check_eviction(make: MakeBuffer) -> None:
    buffer = await _opened(make, "eviction", _schedule(max_staleness=1, max_attempts=2))
    for lease in [await _lease(buffer) for _ in range(4)]:
        await buffer.put("e", _group(lease))
    await buffer.take(1, 0)
    taking = asyncio.ensure_future(buffer.take(1, 2))
    await asyncio.sleep(0.1)
    await buffer.advance("e", 2)
    first = await _lease(buffer)
    _require(first == Lease(1, attempt=1), "what became too stale is issued again, as another attempt")
    await buffer.put("e", _group(first, version=0))
    await _until(buffer, evicted=4, given_up=1)  # after max_attempts another slot takes its place
    rest = [await _lease(buffer) for _ in range(6)]
    promised = [Lease(2, 1), Lease(3, 1), *map(Lease, range(4, 8))]
    _require(rest == promised, "evicted slots come first, then new ones")
    last = await buffer.lease("e", wait=False)
    _require(last == Lease(8), "a slot that is given up for good is replaced by another one")
    await buffer.put("e", _group(rest[3], version=2))
    _require(_slots(await taking) == [5], "take never returns what is staler than max_staleness")


async def _check_release(make: MakeBuffer) -> None:
    buffer = await _opened(make, "release", _schedule())
    await buffer.advance("heir", 0)
    held = [await _lease(buffer) for _ in range(2)]
    await buffer.put("e", _group(held[0]))
    _require(await buffer.release("e") == 1, "release says how many leases came back")
    _require(await buffer.lease("e", wait=False) is None, "who was released gets nothing before it adopts a version")
    _require(await buffer.lease("heir") == held[1], "a released lease is issued again, as the same attempt")
    await _refused(buffer.put("e", _group(held[1])), "the lease of who was released is no longer its own")
    await buffer.put("heir", _group(held[1]))
    _require(_slots(await buffer.take(2, 0)) == [0, 1], "what was put before a release stays")


async def _check_calling_off(make: MakeBuffer) -> None:
    buffer = await _opened(make, "calling-off", _schedule(max_staleness=1))
    hearing = asyncio.ensure_future(buffer.cancelled_leases("e"))
    held = [await _lease(buffer) for _ in range(4)]
    for lease in held[:2]:
        await buffer.put("e", _group(lease))
    await buffer.take(1, 0)
    await asyncio.sleep(0.1)
    _require(not hearing.done(), "what can still be trained on is not cancelled")
    await buffer.take(1, 1)
    _require(
        sorted(await hearing, key=lambda lease: lease.slot) == held[2:], "what could only be too stale is called off"
    )
    await buffer.put("e", _group(held[2]))
    _require((await buffer.counts())["called_off"] == 2, "what was cancelled is counted")
    await buffer.advance("e", 1)
    _require(await _lease(buffer) == Lease(2, attempt=1), "a slot that was cancelled is issued again")
    await buffer.put("e", _group(Lease(2, 1), version=1))
    _require([g.attempt for g in await buffer.take(1, 2)] == [1], "a group that was cancelled is never taken")


async def _check_dropped(make: MakeBuffer) -> None:
    buffer = await _opened(make, "dropped", _schedule())
    held = [await _lease(buffer) for _ in range(2)]
    await buffer.put("e", _group(held[0]).refused("unwanted"))
    third = await _lease(buffer)
    _require(third == Lease(2), "another slot is issued for a group that was dropped")
    for lease in (held[1], third):
        await buffer.put("e", _group(lease))
    _require(_slots(await buffer.take(2, 0)) == [1, 2], "a group that was dropped is never taken")
    counts = await buffer.counts()
    _require((counts["dropped"], counts["given_up"]) == (1, 0), "what was dropped is counted as that")


async def _check_refused(make: MakeBuffer) -> None:
    buffer = await _opened(make, "refused", _schedule())
    for _ in range(2):
        await buffer.put("e", _group(await _lease(buffer)))
    await buffer.take(2, 0)
    _require(await buffer.lease("e", wait=False) is None, "a version admits no slot of the next step")
    await buffer.refuse(1)
    await buffer.put("e", _group(await _lease(buffer)))
    _require(_slots(await buffer.take(1, 0)) == [2], "a slot is issued for a group that the trainer refused")


async def _check_cancelled_waits(make: MakeBuffer) -> None:
    buffer = await _opened(make, "cancelled", _schedule())
    waits: list[asyncio.Future[Any]] = []
    for number in range(4):
        waits += [asyncio.ensure_future(buffer.take(2, 0)), asyncio.ensure_future(buffer.lease(f"w{number}"))]
        await asyncio.sleep(0.01 * number)
        for wait in waits[-2:]:
            wait.cancel()
    await asyncio.wait(waits)
    for number in range(20):  # at whatever moment they are cancelled
        await buffer.advance("gone", 0)
        leasing = asyncio.ensure_future(buffer.lease("gone"))
        await asyncio.sleep(0.0005 * number)
        leasing.cancel()
        await asyncio.wait({leasing})
        if not leasing.cancelled():
            await buffer.release("gone")
    held = [await _lease(buffer) for _ in range(2)]
    _require(held == [Lease(0), Lease(1)], "a lease that was cancelled holds no slot")
    for lease in held:
        await buffer.put("e", _group(lease))
    _require(_slots(await buffer.take(2, 0)) == [0, 1], "a take that was cancelled keeps no group")


async def _check_restored(make: MakeBuffer) -> None:
    schedule = _schedule(max_staleness=1, deterministic=True)
    buffer = await _opened(make, "restored", schedule)
    held = [await _lease(buffer) for _ in range(4)]
    for lease in held[:3]:
        await buffer.put("e", _group(lease))
    await buffer.take(2, 0)
    state = json.loads(json.dumps(await buffer.state()))
    await buffer.put("e", _group(held[3]))
    await buffer.take(2, 1)
    again = await _opened(make, "restored", schedule, state, version=1)
    _require(_slots(await again.take(2, 1)) == [2, 3], "what was taken after the checkpoint is taken again")
    await again.advance("e", 1)
    _require(await _lease(again) == Lease(4), "what was put after the checkpoint is not issued again")
    first = await _opened(make, "restored", schedule)
    _require(_slots(await first.take(4, 0)) == [0, 1, 2, 3], "without a checkpoint the stage begins with what was put")


async def _check_lost_future(make: MakeBuffer) -> None:
    schedule = _schedule(max_staleness=1)
    buffer = await _opened(make, "lost-future", schedule)
    for lease in [await _lease(buffer) for _ in range(4)]:
        await buffer.put("e", _group(lease))
    await buffer.take(2, 0)
    state = json.loads(json.dumps(await buffer.state()))
    await buffer.advance("e", 1)
    await buffer.put("e", _group(await _lease(buffer), version=1))
    again = await _opened(make, "lost-future", schedule, state, version=0)
    await again.advance("e", 1)
    _require(await _lease(again) == Lease(4), "in an unordered run nothing is left of versions that are lost")
    _require(_slots(await again.take(2, 0)) == [2, 3], "what older versions sampled stays")


async def _check_retries(make: MakeBuffer) -> None:
    sides = {2: "reward", 3: "workflow", 4: "prompt", 5: "reward"}
    schedule = _schedule(groups_per_step=6)

    def failed(lease: Lease) -> Group:
        group = _group(lease)
        if lease.slot not in sides:
            return group
        failure = Failure(sides[lease.slot], "Error", "an outage")
        return replace(group, trajectories=tuple(replace(t, failure=failure) for t in group.trajectories))

    buffer = await _opened(make, "retries", schedule)
    for lease in [await _lease(buffer) for _ in range(6)]:
        await buffer.put("e", failed(lease))
    kept = await _opened(make, "retries", schedule)
    _require(_slots(await kept.take(6, 0)) == [*range(6)], "failures are outcomes where they did not end the run")
    await kept.retry_on_resume(range(6))
    held = await _retried(await _opened(make, "retries", schedule))
    again = await _opened(make, "retries", schedule)
    _require(await _retried(again) == held, "what is not finished in one session is left to the next")
    for lease in held:
        await again.put("e", _group(lease))
    taken = await again.take(6, 0)
    _require([bool(group.alive) for group in taken] == [True] * 4 + [False, True], "retried groups replace others")
    last = await _opened(make, "retries", schedule)
    _require(repr(await last.take(6, 0)) == repr(taken), "a retry ends once its group was put")


async def _retried(buffer: Buffer) -> list[Lease]:
    """The slots of `_check_retries` that are issued again."""
    held = [await _lease(buffer) for _ in range(3)]
    _require(held == [Lease(2), Lease(3), Lease(5)], "what a retry may avert is issued again, as the same attempt")
    recorded = [lease.recorded and lease.recorded.slot for lease in held]
    _require(recorded == [2, None, 5], "a group of which only rewards failed comes with its slot")
    return held


async def _check_close(make: MakeBuffer) -> None:
    buffer = await _opened(make, "close", _schedule())
    taking, leasing = asyncio.ensure_future(buffer.take(2, 0)), asyncio.ensure_future(buffer.lease("waiting"))
    await asyncio.sleep(0.05)
    await buffer.close()
    ends = await asyncio.gather(taking, leasing, buffer.lease("e", wait=False), return_exceptions=True)
    closed = all(isinstance(end, StopAsyncIteration) for end in ends)
    _require(closed, f"close wakes every waiter, with StopAsyncIteration from then on, not {ends!r}")


async def _check_company(make: MakeBuffer, shared: bool) -> None:
    """Four writers and two readers at once; one explorer dies and its leases go to the others."""
    number = 96
    schedule = _schedule(groups_per_step=number, max_staleness=8)
    trainer = await _opened(make, "company", schedule)
    ends = [make("company", schedule) if shared else trainer for _ in range(6)]
    await trainer.advance("dead", 0)
    for _ in range(5):
        await trainer.lease("dead")
    await trainer.release("dead")

    async def write(buffer: Buffer, name: str) -> list[int]:
        await buffer.advance(name, 0)
        slots: list[int] = []
        while len(slots) < number // 4:
            lease = await buffer.lease(name)
            assert lease is not None
            await buffer.put(name, _group(lease))
            slots.append(lease.slot)
        return slots

    async def read(buffer: Buffer) -> list[int]:
        return [group.slot for _ in range(number // 6) for group in await buffer.take(3, 0)]

    writing = [write(end, f"writer-{place}") for place, end in enumerate(ends[:4])]
    *written, first, second = await asyncio.gather(*writing, *map(read, ends[4:]))
    everything = list(range(number))
    _require(sorted(slot for slots in written for slot in slots) == everything, "every slot is issued once")
    _require(sorted(first + second) == everything, "every group is delivered once, to one reader")


def _schedule(**change: object) -> Schedule:
    tasks: Any = [Task(f"t{place}", (Message("user", f"{place}="),), {"answer": place}) for place in range(8)]
    options: dict[str, Any] = {"groups_per_step": 2, "steps": 50, "shuffle": False, **change}
    return Schedule(tasks, 0, **options)


async def _opened(
    make: MakeBuffer, name: str, schedule: Schedule, state: Mapping[str, Any] | None = None, version: int = 0
) -> Buffer:
    """An end of the buffer as a trainer opens it, and an explorer `e` that has loaded version 0."""
    buffer = make(name, schedule)
    await buffer.restore(state, version)
    await buffer.advance("e", 0)
    return buffer


async def _lease(buffer: Buffer) -> Lease:
    lease = await buffer.lease("e")
    assert lease is not None
    return lease


def _group(lease: Lease, version: int = 0) -> Group:
    """A group of an explorer that has loaded `version`."""
    turn = Turn(
        np.arange(3, dtype=np.int32),
        np.array([5, 6 + lease.slot], np.int32),
        np.array([-0.5, -1.25], np.float32),
        np.full(2, version, np.int32),
        StopReason.EOS,
        "six",
    )
    task = Task(f"t{lease.slot % 8}", (Message("user", f"{lease.slot % 8}="),), {"answer": lease.slot % 8})
    rollouts = (Trajectory(0, (turn,), {"exact": 1.0}), Trajectory(1, (turn,), {"exact": 0.0}, metrics={"n": 2.0}))
    return Group(lease.slot, task, rollouts, lease.slot // 8, lease.attempt, version)


def _slots(groups: Sequence[Group]) -> list[int]:
    return [group.slot for group in groups]


async def _until(buffer: Buffer, **counts: int) -> None:
    """Waits until the buffer counts so many."""
    while counts.items() - (await buffer.counts()).items():
        await asyncio.sleep(0.01)


async def _refused(putting: Awaitable[object], promise: str) -> None:
    try:
        await putting
    except DataError:
        return
    _require(False, promise + ": DataError for anything else")


async def check_channel(
    make: Callable[[str, Synchronizer], WeightChannel], directory: Path, *, patience_s: float = 30.0
) -> None:
    """A channel carries every kind of tensor to the bit, however the trainer goes on with its own; what it says it can
    deliver it delivers, and nothing else; what it saved comes back, and nothing else.

    `make(role, synchronizer)` opens the end of the trainer, or of an explorer, of a channel that keeps two versions.
    Ends over the same `synchronizer.board` belong together, and each pair takes the place of the one before.
    `directory` is an empty one to save in.
    """
    async with asyncio.timeout(patience_s):
        pair = await _ChannelEnds.open(make, patience_s)
        sent = [_odd_tensors(seed) for seed in range(3)]
        for version, tensors in enumerate(sent):
            mine = {name: tensor.clone() for name, tensor in tensors.items()}
            _require(_same(await pair.deliver(version, mine), tensors), "collect yields what was offered, to the bit")
            for tensor in mine.values():
                tensor.zero_()
        kept = pair.trainer.versions
        _require(list(kept) == sorted({*kept} & {1, 2}), f"versions: the newest two at most, oldest first, not {kept}")
        for version in kept:
            same = _same(await pair.collect(version), sent[version])
            _require(same, "what versions promises can be collected again, whatever the trainer did to its tensors")
        for version in {0, 1, 2, 99} - {*kept}:
            _require(await pair.refuses(version), f"collect({version}) is a SyncError: versions does not promise it")
        twice = [("weight", torch.ones(2)), ("weight", torch.zeros(2))]
        offered = await asyncio.gather(asyncio.to_thread(pair.trainer.offer, 3, twice), return_exceptions=True)
        _require(isinstance(offered[0], SyncError), "offer refuses, with a SyncError, a name that comes twice")
        await asyncio.to_thread(pair.trainer.save, directory, kept[:1])
        again = await _ChannelEnds.open(make, patience_s)
        await asyncio.to_thread(again.trainer.restore, directory)
        _require(again.trainer.versions == kept[:1], "restore takes back what was saved, and nothing that lies about")
        for version in kept[:1]:
            _require(_same(await again.collect(version), sent[version]), "what was saved comes back, to the bit")
        for version in kept[1:]:
            _require(await again.refuses(version), "a version that was not saved is gone: a trainer will make it anew")


class _ChannelEnds:
    """Both ends of a channel, and the handshake around it that the loops make in a run."""

    def __init__(self, make: Callable[[str, Synchronizer], WeightChannel], patience_s: float) -> None:
        board = MemoryBoard()
        self.trainer_side, self.explorer_side = (Synchronizer(board, deadline_s=patience_s) for _ in range(2))
        self.trainer = make(TRAINER, self.trainer_side)
        self.explorer = make("explorer-0", self.explorer_side)
        for side in (self.trainer_side, self.explorer_side):
            side.collective = capabilities_of(self.trainer).collective

    @classmethod
    async def open(cls, make: Callable[[str, Synchronizer], WeightChannel], patience_s: float) -> _ChannelEnds:
        ends = cls(make, patience_s)
        ends.trainer_side.open()
        await ends.explorer_side.wait_for_trainer("explorer-0")
        await ends.explorer_side.join("explorer-0")
        return ends

    async def deliver(self, version: int, weights: Mapping[str, Any]) -> Weights:
        """One version, all the way."""
        offering = asyncio.ensure_future(asyncio.to_thread(self.trainer.offer, version, iter(weights.items())))
        if not self.trainer_side.collective:
            _require(await offering, "offer returns True: the version can be had")
            self.trainer_side.publish(version)
        seen = await self.explorer_side.next_version("explorer-0", None, newest=True)
        _require(seen == version, f"the version on offer is {version}, not {seen}")
        collected = await self.collect(version)
        _require(await offering, "offer returns True: an explorer has the version")
        self.explorer_side.adopted("explorer-0", version)
        return collected

    async def collect(self, version: int) -> Weights:
        return await asyncio.to_thread(lambda: list(self.explorer.collect(version)))

    async def refuses(self, version: int) -> bool:
        try:
            await self.collect(version)
        except SyncError:
            return True
        return False


def _odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every kind of tensor a model may hold: types, shapes, strides, and numbers that do not equal themselves."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "matrix": drawn(3, 5),
        "bfloat16": drawn(7).to(torch.bfloat16),
        "half": drawn(3).half(),
        "double": drawn(4).double(),
        "scalar": drawn(),
        "whole": torch.tensor([seed, 2**40]),
        "small": torch.arange(5, dtype=torch.int8) - seed,
        "truth": drawn(3) > 0,
        "empty": torch.empty(0, 4),
        "transposed": drawn(4, 6).T,
        "part": drawn(6, 4)[1:5, ::2],
        "strange": torch.tensor([torch.nan, torch.inf, -0.0, 1e-45, float(seed)]),
    }


def _same(actual: Weights, expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether names, order, types, shapes and bits are the same."""
    pairs = list(actual)
    in_order = [name for name, _ in pairs] == [*expected]
    return in_order and all(_same_bits(tensor, expected[name]) for name, tensor in pairs)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b) if tensor.numel()]
    return not raw or torch.equal(*raw)


def _request(prompt: IntArray, index: int, max_new_tokens: int, temperature: float = 1.0) -> Request:
    key = SampleKey(0, "check", "check", str(prompt.tolist()), index=index)
    return Request(prompt, Sampling(max_new_tokens, temperature), key)


class _SilentPolicy(Policy):
    """A policy that never answers, to be cancelled while it is waited for."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.metrics = {}

    async def generate(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> NoReturn:
        self.requested.set()
        while True:
            await asyncio.sleep(3600)

    def fork(self, name: str) -> _SilentPolicy:
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        return ()


def _require(kept: bool, promise: str) -> None:
    if not kept:
        raise AssertionError(promise)


def _all_finite(numbers: object) -> bool:
    """Whether it is a mapping from text to finite numbers."""
    if not isinstance(numbers, Mapping):
        return False
    named = cast("Mapping[Any, Any]", numbers).items()
    return all(isinstance(n, str) and isinstance(v, int | float) and math.isfinite(v) for n, v in named)


def _contents(turn: Turn) -> tuple[list[int], list[int]]:
    return turn.prompt_tokens.tolist(), turn.tokens.tolist()
