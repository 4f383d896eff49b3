"""Requests to an OpenAI-compatible endpoint, and its responses.

`tokens` sends token ids and returns token ids with log-probabilities, as vLLM's `/v1/completions` does. `chat` sends
messages and returns text. Both set every sampling parameter, so that no default of the server applies, such as the
`top_k` and the penalties of a model's `generation_config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trivium.clients.chat import chat_messages, read_choice, read_text
from trivium.clients.http import EndpointClient
from trivium.foundation.errors import described
from trivium.types import Completion, Request, Sampling, StopReason

_ROUNDING = 1e-3
"""How far rounding may move a log-probability above 0."""
_DO = "use an endpoint that returns token ids and log-probabilities, as vLLM does; to evaluate, use protocol chat"


def tokens_body(model: str, request: Request, eos: frozenset[int], seed: int | None) -> dict[str, Any]:
    """The request for token ids."""
    return {
        "model": model,
        "prompt": request.prompt_tokens.tolist(),
        **_sampling(request.sampling, seed),
        "stop_token_ids": sorted(request.sampling.ends(eos)),
        "include_stop_str_in_output": True,  # the policy sampled these tokens, too
        "logprobs": 0,  # that of the sampled token, without alternatives
        "return_token_ids": True,
    }


def chat_body(model: str, request: Request, seed: int | None) -> dict[str, Any]:
    """The request for text."""
    return {"model": model, "messages": chat_messages(request.messages), **_sampling(request.sampling, seed)}


def _sampling(sampling: Sampling, seed: int | None) -> dict[str, Any]:
    """How to sample, with the values of the parameters that have no effect."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # -1 is no limit in vLLM and SGLang
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_new_tokens,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return body | ({"stop": [*sampling.stop]} if sampling.stop else {}) | ({} if seed is None else {"seed": seed})


def read_tokens(
    client: EndpointClient, url: str, value: Any, request: Request, eos: frozenset[int], version: int
) -> Completion:
    """The completion in a response to `tokens_body`. Raises MalformedResponse."""
    choice = read_choice(client, url, value)
    tokens, log_probs = choice.get("token_ids"), choice.get("logprobs")
    numbers = log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise client.malformed(url, f"token_ids: {described(tokens)}, where a list of token ids is wanted", _DO)
    if not isinstance(numbers, list) or len(numbers) != len(tokens) or not all(map(_is_log_prob, numbers)):
        problem = f"logprobs.token_logprobs: {described(numbers)}, where {len(tokens)} numbers of at most 0 are wanted"
        raise client.malformed(url, problem, _DO)
    prompt_ids = choice.get("prompt_token_ids")
    if prompt_ids is not None and prompt_ids != request.prompt_tokens.tolist():
        problem = "prompt_token_ids that differ from the ids of the request"
        raise client.malformed(url, problem, "serve the model that model.path names, without adding special tokens")
    limit = request.sampling.max_new_tokens
    if not 1 <= len(tokens) <= limit:
        raise client.malformed(url, f"{len(tokens)} tokens, where 1 to {limit} are wanted", "see why the service ends")
    # Rounding may leave one above 0 (`_ROUNDING`); a greedy token is certain, whatever the service reports.
    log_prob = np.minimum(np.array(numbers, np.float32), 0) * np.float32(request.sampling.temperature > 0)
    reason = _stop_reason(
        client, url, choice, ends=tokens[-1] in request.sampling.ends(eos) or not request.sampling.stop
    )
    return Completion(np.array(tokens, np.int32), log_prob, np.full(len(tokens), version, np.int32), reason)


def read_chat(
    client: EndpointClient, url: str, value: Any, encode: Any, request: Request, eos: frozenset[int], version: int
) -> Completion:
    """The completion in a response to `chat_body`: the text, its tokens by `encode`, and log-probabilities of 0, since
    those of the endpoint are unknown. Raises MalformedResponse."""
    choice, text = read_text(client, url, value)
    reason = _stop_reason(client, url, choice, ends=True)
    tokens: Sequence[int] = [*encode(text), *([min(eos)] if reason is StopReason.EOS and eos else [])]
    zeros = np.zeros(len(tokens), np.float32)
    return Completion(np.array(tokens, np.int32), zeros, np.full(len(tokens), version, np.int32), reason, text)


def _is_log_prob(number: object) -> bool:
    return isinstance(number, int | float) and math.isfinite(number) and number <= _ROUNDING


def _stop_reason(client: EndpointClient, url: str, choice: dict[str, Any], *, ends: bool) -> StopReason:
    match choice.get("finish_reason"):
        case "length":
            return StopReason.LENGTH
        case "stop":
            return StopReason.EOS if ends else StopReason.STOP
        case other:
            do = "check the service: finish_reason must be `stop` or `length`"
            raise client.malformed(url, f"finish_reason {described(other)}", do)
