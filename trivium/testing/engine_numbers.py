"""The contract of a rollout engine's log-probabilities: they equal those of the training engine with the same weights.

Each comparison first checks that it can fail: the compared alternatives differ by more than the tolerance.

Legend: L tokens of one sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trivium.foundation.randomness import SampleKey
from trivium.policy import Policy
from trivium.testing.promises import require
from trivium.types import Group, Message, Request, Sampling, Task, Trajectory, experiences_of

if TYPE_CHECKING:
    from trivium.protocols import Renderer, RolloutEngine
    from trivium.testing.reference import ReferencePolicy
    from trivium.types import Completion, FloatArray, IntArray

_TEMPERATURES = (0.5, 1.0, 1.7)
_SAMPLES = 6
"""Completions of each prompt that are compared."""


@dataclass(frozen=True)
class Tolerance:
    """How far log-probabilities may differ from the training engine's, in nats."""

    mean: float
    """On average over tokens."""
    largest: float
    """For any token."""


TOLERANCES = {
    "float32": Tolerance(1e-4, 2e-3),
    "float16": Tolerance(5e-3, 0.1),
    "bfloat16": Tolerance(0.03, 0.5),
}
"""By the dtype of the engine, if the training engine computes in float32."""


async def check_log_probs(
    engine: RolloutEngine,
    prompts: Sequence[IntArray],
    policy: ReferencePolicy,
    tolerance: Tolerance,
    max_new_tokens: int,
) -> None:
    """Compares at temperatures below, at and above 1, all requested concurrently."""
    requests = [
        _request(prompt, ("temperature", index), Sampling(max_new_tokens, temperature))
        for temperature in _TEMPERATURES
        for prompt in prompts
        for index in range(_SAMPLES)
    ]
    completions = await asyncio.gather(*map(engine.generate, requests))
    for temperature in _TEMPERATURES:
        rows = [row for row, request in enumerate(requests) if request.sampling.temperature == temperature]
        pairs = [(requests[row], completions[row]) for row in rows]
        reference = _reference(pairs, policy, temperature)
        for other in _TEMPERATURES:
            apart = _difference(reference, _reference(pairs, policy, other))
            distinct = other == temperature or apart[0] > 4 * tolerance.mean
            require(distinct, "check_engine is given a policy whose distribution depends on the temperature")
        _compare(pairs, reference, tolerance, f"at temperature {temperature} log_prob is the training engine's")


async def check_truncation(
    engine: RolloutEngine,
    prompts: Sequence[IntArray],
    policy: ReferencePolicy,
    tolerance: Tolerance,
    max_new_tokens: int,
) -> None:
    """Greedy sampling and `top_k=1` take the token that is most probable in the training engine."""
    greedy = [_request(prompt, ("greedy",), Sampling(max_new_tokens, 0.0)) for prompt in prompts]
    first = [_request(prompt, ("first",), Sampling(max_new_tokens, 1.0, top_k=1)) for prompt in prompts]
    completions = await asyncio.gather(*map(engine.generate, [*greedy, *first]))
    sharp = max(tolerance.largest, 1e-3)
    pairs = [*zip([*greedy, *first], completions, strict=True)]
    for numbers in _reference(pairs, policy, sharp):
        # At this temperature tokens within the tolerance of the best one share all of the probability.
        require(bool((numbers > -5).all()), "temperature 0 and top_k 1 take the most probable token")
    later = completions[len(greedy) :]
    exact = all(np.abs(completion.log_prob).max(initial=0) <= tolerance.largest for completion in later)
    require(exact, "log_prob is that of the distribution sampled from: 0 where top_k leaves one token")


async def check_sentinels(
    engine: RolloutEngine,
    prompts: Sequence[IntArray],
    policies: Sequence[ReferencePolicy],
    tolerance: Tolerance,
    max_new_tokens: int,
) -> None:
    """Completions use the loaded weights and nothing cached under others. Completes the same prompts with one policy,
    another and the first again, and also prompts that begin with earlier completions."""
    requests: list[Request] = [_request(prompt, ("sentinel",), Sampling(max_new_tokens)) for prompt in prompts]
    before = await asyncio.gather(*map(engine.generate, requests))
    requests += [
        _request(
            np.concatenate([request.prompt_tokens, completion.tokens, request.prompt_tokens[:1]]),
            ("longer",),
            Sampling(max_new_tokens),
        )
        for request, completion in zip(requests, before, strict=True)
    ]
    requests = [request for request in requests if len(request.prompt_tokens) + max_new_tokens <= engine.max_context]
    for policy, other in ((policies[1], policies[0]), (policies[0], policies[1])):
        await asyncio.gather(*map(engine.generate, requests))  # fills the engine's cache of prompts
        await engine.load(engine.version + 1, policy.weights())
        pairs = [*zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True)]
        reference = _reference(pairs, policy, 1.0)
        apart = _difference(reference, _reference(pairs, other, 1.0))
        require(apart[0] > 4 * tolerance.mean, "check_engine is given two policies that differ")
        _compare(
            pairs, reference, tolerance, "after load, log_prob is that of the new weights, with nothing cached before"
        )


async def check_conversation(
    engine: RolloutEngine,
    renderer: Renderer,
    policy: ReferencePolicy | None,
    tolerance: Tolerance,
    max_new_tokens: int,
) -> None:
    """Three turns with a tool: the next turn and training continue from the sampled tokens."""
    key = SampleKey(0, "check", "check", "conversation")
    speaker = Policy(engine, renderer, Sampling(max_new_tokens), key, engine.max_context)
    conversation: list[Message] = [Message("user", "Use the tool, twice.")]
    for number in range(3):
        turn = await speaker.generate(conversation)
        conversation += [Message("assistant", turn.text), Message("tool", f"result {number}")]
    trajectory = Trajectory(0, speaker.turns)
    experiences = experiences_of(Group(0, Task("conversation", ()), (trajectory,)), trajectory)
    require(len(experiences) == 1, "turns that extend one another are one sequence: their tokens are kept as sampled")
    (experience,) = experiences
    sampled = np.concatenate([turn.tokens for turn in speaker.turns])
    require(np.array_equal(experience.tokens[experience.response_mask], sampled), "what was sampled is what is trained")
    if policy is not None:
        (numbers,) = policy.log_probs([experience.tokens], 1.0)
        mask = experience.response_mask
        apart = _difference([numbers[mask]], [experience.rollout_log_prob[mask]])
        is_close = apart[0] <= tolerance.mean and apart[1] <= tolerance.largest
        require(is_close, f"log_prob of every turn is the training engine's of the whole conversation{_off(apart)}")


def _request(prompt: IntArray, path: tuple[int | str, ...], sampling: Sampling) -> Request:
    return Request(prompt, sampling, SampleKey(0, "check", "check", str(prompt.tolist()), path=path))


def _reference(
    pairs: Sequence[tuple[Request, Completion]], policy: ReferencePolicy, temperature: float
) -> list[FloatArray]:
    """The training engine's log-probabilities of the tokens of each completion."""
    sequences = [np.concatenate([request.prompt_tokens, completion.tokens]) for request, completion in pairs]
    numbers = policy.log_probs(sequences, temperature)
    return [values[len(request.prompt_tokens) :] for values, (request, _) in zip(numbers, pairs, strict=True)]


def _compare(
    pairs: Sequence[tuple[Request, Completion]], reference: Sequence[FloatArray], tolerance: Tolerance, promise: str
) -> None:
    apart = _difference([completion.log_prob for _, completion in pairs], reference)
    require(apart[0] <= tolerance.mean and apart[1] <= tolerance.largest, promise + _off(apart))


def _difference(a: Sequence[FloatArray], b: Sequence[FloatArray]) -> tuple[float, float]:
    """(mean, largest) difference over all tokens."""
    apart = np.abs(np.concatenate(a) - np.concatenate(b))
    return float(apart.mean()), float(apart.max())


def _off(apart: tuple[float, float]) -> str:
    return f" (they differ by {apart[0]:.3g} nats on average, {apart[1]:.3g} at most)"
