"""Contract tests for plugin authors. What ships passes the same ones.

Call one from a test of your own; a broken promise is an AssertionError that names it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from trivium.policy import Policy
from trivium.randomness import SampleKey
from trivium.types import Request, Sampling, StopReason

if TYPE_CHECKING:
    from trivium.protocols import RolloutEngine, Weights, Workflow
    from trivium.types import Completion, IntArray, Message, Task, Turn


async def check_workflow(
    workflow: Workflow, task: Task, policy_factory: Callable[[], Policy], *, patience_s: float = 10.0
) -> None:
    """A workflow records turns, returns finite rewards, repeats itself in company, and ends when cancelled.

    `policy_factory` makes a fresh policy, the same one each time: same weights, same SampleKey.
    """
    alone = policy_factory()
    earned = await workflow.run(task, alone)
    _promise(len(alone.turns) > 0, "run records at least one turn: await policy.reply(...)")
    _promise(earned is None or _all_finite(earned), f"run returns None or finite numbers by name, not {earned!r}")
    _promise(_all_finite(alone.metrics), f"policy.metrics holds finite numbers by name, not {alone.metrics!r}")

    company = [policy_factory(), policy_factory()]
    results = await asyncio.gather(*(workflow.run(task, policy) for policy in company))
    for policy, result in zip(company, results, strict=True):
        same = result == earned and [*map(_said, policy.turns)] == [*map(_said, alone.turns)]
        _promise(same, "a trajectory does not depend on those played beside it, or before: keep no state on self")

    silent = _SilentPolicy()
    playing = asyncio.ensure_future(workflow.run(task, silent))
    await asyncio.wait_for(silent.asked.wait(), patience_s)
    playing.cancel()
    await asyncio.wait({playing}, timeout=patience_s)
    _promise(playing.done() and playing.cancelled(), "run ends when it is cancelled: let CancelledError through")


async def check_engine(
    make: Callable[[], RolloutEngine],
    prompts: Sequence[IntArray],
    *,
    eos_token_ids: frozenset[int],
    weights: Callable[[], Weights],
    max_new_tokens: int = 12,
    patience_s: float = 30.0,
) -> None:
    """An engine samples what it says it samples, repeats itself, switches weights between replies, and never hangs.

    `make` builds a fresh engine, the same one each time. `prompts` are at least two prompts it can read; `weights`
    yields weights that `load` accepts. What an engine does not promise (`exact_sampling`, `batch_invariant`,
    `updates_in_flight`) is not asked of it.
    """
    _promise(len(prompts) >= 2, "check_engine is given at least two prompts")
    engine = make()
    try:
        async with asyncio.timeout(patience_s):
            await _check_replies(engine, prompts, eos_token_ids, max_new_tokens)
        async with asyncio.timeout(patience_s):
            await _check_cancelling(engine, prompts, max_new_tokens)
        async with asyncio.timeout(patience_s):
            await _check_loading(engine, prompts, weights, max_new_tokens)
        if getattr(engine, "updates_in_flight", False):
            async with asyncio.timeout(patience_s):
                await _check_updating(engine, prompts, weights, max_new_tokens)
    finally:
        async with asyncio.timeout(patience_s):
            await engine.close()
    async with asyncio.timeout(patience_s):
        await engine.close()
        closed = await asyncio.gather(engine.generate(_request(prompts[0], 0, max_new_tokens)), return_exceptions=True)
        _promise(isinstance(closed[0], Exception), "generate raises once the engine is closed")
        engine = make()
        long = [asyncio.ensure_future(engine.generate(_request(prompt, 0, max_new_tokens))) for prompt in prompts]
        await asyncio.sleep(0)
        await engine.close()
        await asyncio.wait(long)


async def _check_replies(
    engine: RolloutEngine, prompts: Sequence[IntArray], eos: frozenset[int], max_new_tokens: int
) -> None:
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    requests += [_request(prompt, 0, 1) for prompt in prompts]
    requests += [_request(prompt, 0, max_new_tokens, temperature=0.0) for prompt in prompts]
    together = await asyncio.gather(*map(engine.generate, requests))
    for request, done in zip(requests, together, strict=True):
        _check_completion(request, done, engine.version, eos)
    if not engine.exact_sampling:
        return
    for request, done in [*zip(requests, together, strict=True)][:: max(1, len(requests) // 8)]:
        alone = await engine.generate(request)
        same = np.array_equal(alone.tokens, done.tokens) and alone.stop_reason is done.stop_reason
        _promise(same, "exact_sampling: the same key gives the same tokens, in whatever company")
        if getattr(engine, "batch_invariant", False):
            bits = alone.log_prob.tobytes() == done.log_prob.tobytes()
            _promise(bits, "batch_invariant: log-probabilities do not depend on the company, bit for bit")


def _check_completion(request: Request, done: Completion, version: int, eos: frozenset[int]) -> None:
    tokens, limit = done.tokens, request.sampling.max_new_tokens
    _promise(1 <= len(tokens) <= limit, f"a reply has 1 to max_new_tokens = {limit} tokens, not {len(tokens)}")
    _promise(len(tokens) == len(done.log_prob) == len(done.policy_version), "one log_prob and version per token")
    _promise(bool(np.isfinite(done.log_prob).all() and (done.log_prob <= 0).all()), "log_prob is finite and at most 0")
    _promise(bool((done.policy_version == version).all()), f"policy_version is the loaded version {version}")
    _promise(request.sampling.temperature > 0 or not done.log_prob.any(), "log_prob is 0 at temperature 0")
    ends = [int(token) in eos for token in tokens]
    _promise(not any(ends[:-1]), "a reply ends with its first end-of-sequence token")
    expected = StopReason.EOS if ends[-1] else StopReason.LENGTH
    _promise(done.stop_reason is expected, f"stop_reason is {expected}, not {done.stop_reason}")
    _promise(ends[-1] or len(tokens) == limit, "a reply without end of sequence has max_new_tokens tokens")


async def _check_cancelling(engine: RolloutEngine, prompts: Sequence[IntArray], max_new_tokens: int) -> None:
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(8)]
    calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    for call in calls[1:]:
        call.cancel()
    await asyncio.wait(calls)
    _promise(
        all(call.cancelled() for call in calls[1:]), "generate ends when it is cancelled: let CancelledError through"
    )
    _promise(calls[0].exception() is None, "cancelling one call leaves the others alone")
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
    _promise(engine.version == new, "version is the one that was loaded, once load returns")
    early, late = await asyncio.gather(*before), await asyncio.gather(*after)
    kept = all((done.policy_version == old).all() for done in early)
    _promise(kept, "load waits for the replies in flight: they belong to the old version, whole")
    _promise(all((done.policy_version == new).all() for done in late), "requests after load wait for the new version")


async def _check_updating(
    engine: RolloutEngine, prompts: Sequence[IntArray], weights: Callable[[], Weights], max_new_tokens: int
) -> None:
    old, new, given = engine.version, engine.version + 1, list(weights())
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    before = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.load(new, given, in_flight="update")
    _promise(engine.version == new, "version is the one that was loaded, once load returns")
    after = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    early, late = await asyncio.gather(*before), await asyncio.gather(*after)
    spans = [done.policy_version for done in early]
    in_order = all((np.diff(span) >= 0).all() and {*span.tolist()} <= {old, new} for span in spans)
    _promise(in_order, "updates_in_flight: tokens before it are the old version's, others the new one's")
    _promise(any((span == new).any() for span in spans), "updates_in_flight: replies in flight go on with new weights")
    _promise(all((done.policy_version == new).all() for done in late), "later requests are the new version's, whole")


def _request(prompt: IntArray, index: int, max_new_tokens: int, temperature: float = 1.0) -> Request:
    key = SampleKey(0, "check", "check", str(prompt.tolist()), index=index)
    return Request(prompt, Sampling(max_new_tokens, temperature), key)


class _SilentPolicy(Policy):
    """A policy that never answers, to be cancelled while it is waited for."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.metrics = {}

    async def reply(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> NoReturn:
        self.asked.set()
        while True:
            await asyncio.sleep(3600)

    def fork(self, name: str) -> _SilentPolicy:
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        return ()


def _promise(kept: bool, promise: str) -> None:
    if not kept:
        raise AssertionError(promise)


def _all_finite(numbers: Any) -> bool:
    """Whether it is a mapping from text to finite numbers."""
    if not isinstance(numbers, Mapping):
        return False
    named = cast("Mapping[Any, Any]", numbers).items()
    return all(isinstance(n, str) and isinstance(v, int | float) and math.isfinite(v) for n, v in named)


def _said(turn: Turn) -> tuple[list[int], list[int]]:
    return turn.prompt_tokens.tolist(), turn.tokens.tolist()
