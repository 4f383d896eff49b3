"""The contract of a rollout engine.

Legend: L tokens of one sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trivium.foundation.errors import TriviumError
from trivium.foundation.randomness import SampleKey
from trivium.protocols import ReadableEngine, StreamingEngine
from trivium.testing.engine_numbers import (
    TOLERANCES,
    Tolerance,
    check_conversation,
    check_log_probs,
    check_sentinels,
    check_truncation,
)
from trivium.testing.promises import require, same_bits
from trivium.types import Request, Sampling, StopReason, capabilities_of

if TYPE_CHECKING:
    from trivium.protocols import Renderer, RolloutEngine, Weights
    from trivium.testing.reference import ReferencePolicy
    from trivium.types import Completion, IntArray

Decode = Callable[[Sequence[int]], str]


async def check_engine(
    make: Callable[[], RolloutEngine],
    prompts: Sequence[IntArray],
    *,
    eos_token_ids: frozenset[int],
    weights: Callable[[], Weights] | None = None,
    policies: Sequence[ReferencePolicy] = (),
    tolerance: str | Tolerance = "float32",
    decode: Decode | None = None,
    renderer: Renderer | None = None,
    max_new_tokens: int = 12,
    crowd: int = 500,
    patience_s: float = 30.0,
) -> None:
    """An engine samples from the declared distribution, is reproducible, switches weights between completions, and
    never hangs.

    `make` builds a new, identical engine on each call. `prompts` has at least two prompts that the engine can read;
    `weights` yields weights that `load` accepts (unset: those of the first policy). Capabilities that an engine does
    not declare (`exact_sampling`, `batch_invariant`, `updates_in_flight`, `adopts_weights`) are not tested.

    With `policies`, its log-probabilities must equal those of the training engine at several temperatures. A new engine
    holds the first policy. An engine that adopts weights then loads the second and the first again, which detects the
    use of old weights or of caches computed with them. `tolerance` is that of its type (a name of `TOLERANCES`), or
    another. With `decode` (tokens to text), stop strings must end completions at the exact token. With `renderer`, a
    conversation of three turns with a tool must keep its tokens. `crowd` is the number of concurrent requests.
    """
    require(len(prompts) >= 2, "check_engine is given at least two prompts")
    allowed = tolerance if isinstance(tolerance, Tolerance) else TOLERANCES[tolerance]
    new_weights = weights or (policies[0].weights if policies else None)
    engine = make()
    loads = capabilities_of(engine).adopts_weights

    async def run(check: Awaitable[None]) -> None:
        async with asyncio.timeout(patience_s):
            await check

    try:
        await run(_check_completions(engine, prompts, eos_token_ids, max_new_tokens))
        await run(_check_crowd(engine, prompts, eos_token_ids, max_new_tokens, crowd))
        if decode is not None:
            await run(_check_stop_strings(engine, prompts, eos_token_ids, max_new_tokens, decode))
        if policies:
            await run(check_log_probs(engine, prompts, policies[0], allowed, max_new_tokens))
            await run(check_truncation(engine, prompts, policies[0], allowed, max_new_tokens))
        if renderer is not None:
            await run(check_conversation(engine, renderer, policies[0] if policies else None, allowed, max_new_tokens))
        if isinstance(engine, StreamingEngine):
            await run(_check_streaming(engine, prompts, max_new_tokens))
        await run(_check_cancelling(engine, prompts, max_new_tokens))
        if not loads:
            await run(_check_refusal(engine))
        else:
            require(
                new_weights is not None, "check_engine is given weights, or policies, for an engine that adopts weights"
            )
            assert new_weights is not None
            await run(_check_loading(engine, prompts, new_weights, max_new_tokens))
            if len(policies) > 1:
                await run(check_sentinels(engine, prompts, policies, allowed, max_new_tokens))
            if capabilities_of(engine).updates_in_flight:
                await run(_check_updating(engine, prompts, new_weights, max_new_tokens))
    finally:
        await run(engine.close())
    await run(_check_closing(engine, make, prompts, max_new_tokens))


async def _check_closing(
    engine: RolloutEngine, make: Callable[[], RolloutEngine], prompts: Sequence[IntArray], max_new_tokens: int
) -> None:
    """A closed engine refuses requests. Closing ends those in progress."""
    await engine.close()
    closed = await asyncio.gather(engine.generate(_request(prompts[0], 0, max_new_tokens)), return_exceptions=True)
    require(isinstance(closed[0], Exception), "generate raises once the engine is closed")
    engine = make()
    long = [asyncio.ensure_future(engine.generate(_request(prompt, 0, max_new_tokens))) for prompt in prompts]
    await asyncio.sleep(0)
    await engine.close()
    await asyncio.wait(long)
    _ = [call.exception() for call in long if not call.cancelled()]  # an engine may refuse the request


async def _check_completions(
    engine: RolloutEngine, prompts: Sequence[IntArray], eos: frozenset[int], max_new_tokens: int
) -> None:
    """Completions have the declared form, and depend on their keys alone if the engine declares that."""
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    requests += [_request(prompt, 0, 1) for prompt in prompts]
    requests += [_request(prompt, 0, max_new_tokens, temperature=0.0) for prompt in prompts]
    together = await asyncio.gather(*map(engine.generate, requests))
    for request, completion in zip(requests, together, strict=True):
        _check_completion(request, completion, engine.version, eos)
    if not capabilities_of(engine).exact_sampling:
        return
    for request, completion in [*zip(requests, together, strict=True)][:: max(1, len(requests) // 8)]:
        alone = await engine.generate(request)
        same = np.array_equal(alone.tokens, completion.tokens) and alone.stop_reason is completion.stop_reason
        require(same, "exact_sampling: the same key gives the same tokens, in whatever company")
        if capabilities_of(engine).batch_invariant:
            bits = alone.log_prob.tobytes() == completion.log_prob.tobytes()
            require(bits, "batch_invariant: log-probabilities do not depend on the company, bit for bit")


def _check_completion(request: Request, completion: Completion, version: int, eos: frozenset[int]) -> None:
    tokens, limit = completion.tokens, request.sampling.max_new_tokens
    require(1 <= len(tokens) <= limit, f"a completion has 1 to max_new_tokens = {limit} tokens, not {len(tokens)}")
    require(
        len(tokens) == len(completion.log_prob) == len(completion.policy_version), "one log_prob and version per token"
    )
    require(
        bool(np.isfinite(completion.log_prob).all() and (completion.log_prob <= 0).all()),
        "log_prob is finite and at most 0",
    )
    require(bool((completion.policy_version == version).all()), f"policy_version is the loaded version {version}")
    require(request.sampling.temperature > 0 or not completion.log_prob.any(), "log_prob is 0 at temperature 0")
    ends = [int(token) in eos for token in tokens]
    require(not any(ends[:-1]), "a completion ends with its first end-of-sequence token")
    expected = StopReason.EOS if ends[-1] else StopReason.LENGTH
    require(completion.stop_reason is expected, f"stop_reason is {expected}, not {completion.stop_reason}")
    require(ends[-1] or len(tokens) == limit, "a completion without end of sequence has max_new_tokens tokens")


async def _check_crowd(
    engine: RolloutEngine, prompts: Sequence[IntArray], eos: frozenset[int], max_new_tokens: int, crowd: int
) -> None:
    """Many concurrent requests of every length, a third of which are cancelled."""
    requests = [
        _request(prompts[index % len(prompts)], index, 1 + index % max_new_tokens, (1.0, 0.7, 0.0)[index % 3])
        for index in range(crowd)
    ]
    calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    # Some requests are in progress by now, and others wait.
    await asyncio.sleep(0.005)
    for call in calls[1::3]:
        call.cancel()
    await asyncio.wait(calls)
    for number, (request, call) in enumerate(zip(requests, calls, strict=True)):
        if number % 3 == 1 and call.cancelled():
            continue
        require(not call.cancelled(), f"{crowd} requests at once: none ends as cancelled that its caller wants")
        _check_completion(request, call.result(), engine.version, eos)
    chosen = range(0, crowd, 3)[: max(2, crowd // 60)]
    if capabilities_of(engine).exact_sampling:
        again = await asyncio.gather(*(engine.generate(requests[number]) for number in chosen))
        same = all(
            np.array_equal(completion.tokens, calls[n].result().tokens)
            for n, completion in zip(chosen, again, strict=True)
        )
        require(same, "exact_sampling: the same key gives the same tokens among many requests")


async def _check_stop_strings(
    engine: RolloutEngine, prompts: Sequence[IntArray], eos: frozenset[int], max_new_tokens: int, decode: Decode
) -> None:
    """Tests stop strings of one and of two tokens from completions of the engine."""
    plain = [_request(prompt, index, max_new_tokens, min(index, 1.0)) for prompt in prompts for index in range(6)]
    before = await asyncio.gather(*map(engine.generate, plain))
    stopped: list[Request] = []
    for request, completion in zip(plain, before, strict=True):
        last = len(completion.tokens) - (completion.stop_reason is StopReason.EOS)
        texts = [decode(completion.tokens[:count].tolist()) for count in range(last + 1)]
        spans = [(at, at + width) for at in (0, 2) for width in (1, 2) if at + width < len(texts)]
        pieces = {texts[stop][len(texts[start]) :] for start, stop in spans}
        usable = sorted(piece for piece in pieces if piece and "\ufffd" not in piece)
        stopped += [replace(request, sampling=replace(request.sampling, stop=(piece,))) for piece in usable]
    require(len(stopped) > 0, "check_engine is given prompts after which the policy writes text, for stop strings")
    stopped += [replace(r, sampling=replace(r.sampling, stop=("\x00never", *r.sampling.stop))) for r in stopped[:2]]
    reasons: set[StopReason] = set()
    for request, completion in zip(stopped, await asyncio.gather(*map(engine.generate, stopped)), strict=True):
        reasons.add(completion.stop_reason)
        tokens, stop = completion.tokens.tolist(), request.sampling.stop
        counts = range(1, len(tokens) + 1)
        first = next((n for n in counts if any(text in decode(tokens[:n]) for text in stop)), None)
        if tokens and tokens[-1] in eos:
            require(completion.stop_reason is StopReason.EOS, f"stop_reason is eos, not {completion.stop_reason}")
            first = None if first == len(tokens) else first
            require(first is None, f"a completion ends with the token that completes a stop string of {stop!r}")
        elif first is None:
            ending = (
                f"stop_reason {completion.stop_reason} without a stop string of {stop!r} in its {len(tokens)} tokens"
            )
            whole = completion.stop_reason is StopReason.LENGTH and len(tokens) == request.sampling.max_new_tokens
            require(whole, f"the tokens of a stop string are kept: {ending}")
        else:
            require(first == len(tokens), f"a completion ends with the token that completes a stop string of {stop!r}")
            require(completion.stop_reason is StopReason.STOP, f"stop_reason is stop, not {completion.stop_reason}")
        require(
            len(tokens) == len(completion.log_prob) == len(completion.policy_version),
            "one log_prob and version per token",
        )
    require(StopReason.STOP in reasons, "a stop string that the policy samples ends a completion")


async def _check_refusal(engine: RolloutEngine) -> None:
    """An engine that adopts no weights refuses them and keeps its own."""
    version = engine.version
    (refusal,) = await asyncio.gather(engine.load(version + 1, []), return_exceptions=True)
    require(isinstance(refusal, TriviumError), "load of an engine that adopts no weights raises an error that says so")
    require(engine.version == version, "version does not change where load is refused")


async def _check_streaming(engine: StreamingEngine, prompts: Sequence[IntArray], max_new_tokens: int) -> None:
    """The parts of a stream are its completion, which is what `generate` returns; several are sampled at once."""
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    reported: list[list[tuple[int, float]]] = [[] for _ in requests]
    num_calls = [0] * len(requests)

    async def stream(number: int, request: Request) -> Completion:
        def on_tokens(tokens: Sequence[int], log_probs: Sequence[float]) -> None:
            reported[number] += zip(tokens, log_probs, strict=True)
            num_calls[number] += 1

        return await engine.stream(request, on_tokens)

    streams = await asyncio.gather(*(stream(number, request) for number, request in enumerate(requests)))
    for completion, parts in zip(streams, reported, strict=True):
        same = [*zip(completion.tokens.tolist(), completion.log_prob.tolist(), strict=True)] == parts
        require(same, "stream: on_tokens gets every token with its log-probability, in order, before stream returns")
    require(max(num_calls) > 1, "stream: on_tokens is called while tokens are sampled, not once at the end")
    if capabilities_of(engine).exact_sampling:
        whole = await asyncio.gather(*map(engine.generate, requests))
        same = all(np.array_equal(a.tokens, b.tokens) for a, b in zip(streams, whole, strict=True))
        require(same, "stream: the same key gives the same tokens as generate")

    def leave(tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        abandoned.cancel()

    abandoned = asyncio.ensure_future(engine.stream(requests[0], leave))
    await asyncio.wait([abandoned])
    require(abandoned.cancelled(), "stream ends when it is cancelled after its first token: let CancelledError through")


async def _check_cancelling(engine: RolloutEngine, prompts: Sequence[IntArray], max_new_tokens: int) -> None:
    """Cancelled requests end, and the others are not affected."""
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(8)]
    calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    for call in calls[1:]:
        call.cancel()
    await asyncio.wait(calls)
    require(
        all(call.cancelled() for call in calls[1:]), "generate ends when it is cancelled: let CancelledError through"
    )
    require(calls[0].exception() is None, "cancelling one call leaves the others alone")
    await asyncio.gather(*map(engine.generate, requests))


async def _check_loading(
    engine: RolloutEngine, prompts: Sequence[IntArray], weights: Callable[[], Weights], max_new_tokens: int
) -> None:
    """A load waits for the completions in flight, and later requests wait for the load."""
    old, new = engine.version, engine.version + 3
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    before = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    loading = asyncio.ensure_future(engine.load(new, weights()))
    await asyncio.sleep(0)
    after = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await loading
    require(engine.version == new, "version is the one that was loaded, once load returns")
    early, late = await asyncio.gather(*before), await asyncio.gather(*after)
    are_old = all((completion.policy_version == old).all() for completion in early)
    require(are_old, "load waits for the completions in flight: they belong to the old version, whole")
    require(
        all((completion.policy_version == new).all() for completion in late),
        "requests after load wait for the new version",
    )
    if isinstance(engine, ReadableEngine):
        held, loaded = dict(await engine.weights()), dict(weights())
        same = all(name in held and same_bits(held[name], value.to(held[name].dtype)) for name, value in loaded.items())
        require(same, "weights: what is held after load is what was given, in the engine's own type, to the bit")


async def _check_updating(
    engine: RolloutEngine, prompts: Sequence[IntArray], weights: Callable[[], Weights], max_new_tokens: int
) -> None:
    """Completions in flight continue with the new weights."""
    old, new, named = engine.version, engine.version + 1, list(weights())
    requests = [_request(prompt, index, max_new_tokens) for prompt in prompts for index in range(4)]
    before = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.load(new, named, in_flight="update")
    require(engine.version == new, "version is the one that was loaded, once load returns")
    after = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    early, late = await asyncio.gather(*before), await asyncio.gather(*after)
    spans = [completion.policy_version for completion in early]
    in_order = all((np.diff(span) >= 0).all() and {*span.tolist()} <= {old, new} for span in spans)
    require(in_order, "updates_in_flight: tokens before it are the old version's, others the new one's")
    require(
        any((span == new).any() for span in spans), "updates_in_flight: completions in flight continue with new weights"
    )
    require(
        all((completion.policy_version == new).all() for completion in late),
        "later requests are the new version's, whole",
    )


def _request(prompt: IntArray, index: int, max_new_tokens: int, temperature: float = 1.0) -> Request:
    key = SampleKey(0, "check", "check", str(prompt.tolist()), index=index)
    return Request(prompt, Sampling(max_new_tokens, temperature), key)
