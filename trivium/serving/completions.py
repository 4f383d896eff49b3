"""`/v1/completions` with token ids, for samplers on other machines that use the current policy.

These completions are neither recorded nor trained on, so a request may set any sampling parameter.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from trivium.protocols import Renderer
from trivium.randomness import SampleKey
from trivium.serving.bodies import bad_request
from trivium.serving.requests import read_count, read_number, read_stop, supported
from trivium.types import MIN_TEMPERATURE, SERVED, Completion, IntArray, Request, Sampling, StopReason

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stream": (False,),
    "suffix": ("",),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (True,),
    "logprobs": (0, 1, True, False),
    "return_token_ids": (True, False),
}
"""Parameters with one supported effect, and the values that select it."""
_KNOWN = frozenset(
    {"model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids"}
    | {"seed"}
)


def read_completion(
    body: Mapping[str, Any], model: str, trained: Sampling, eos_token_ids: frozenset[int], *, number: int
) -> Request:
    """The request in a body, for the policy `model` that is trained with `trained`. Without a seed, `number` (of the
    request) addresses its random numbers. Raises RequestError."""
    body = supported(body, _KNOWN, _NEUTRAL, {}, model)
    stops = body.get("stop_token_ids", [])
    if not isinstance(stops, list) or not {*map(str, stops)} <= {*map(str, eos_token_ids)}:
        found = f"this policy ends a turn with {sorted(eos_token_ids)[:8]}"
        raise bad_request("stop_token_ids", f"stop_token_ids = {stops!r:.60}", found, "leave it out")
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise bad_request("seed", "seed as a whole number", f"{seed!r:.60}", "fix the value")
    address = ("seed", seed) if seed is not None else ("number", number)
    return Request(
        _prompt(body.get("prompt")), _sampling(body, trained), SampleKey(0, "served", SERVED, "", path=address)
    )


def _prompt(value: object) -> IntArray:
    ids: list[Any] = value if isinstance(value, list) else []
    if not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise bad_request(
            "prompt", "a prompt of token ids", f"{value!r:.60}", "send a list of token ids, or use /v1/chat/completions"
        )
    return np.array(ids, np.int32)


def _sampling(body: Mapping[str, Any], trained: Sampling) -> Sampling:
    temperature = read_number(body, "temperature", trained.temperature, 0.0, 100.0)
    if 0 < temperature < MIN_TEMPERATURE:
        asked = f"temperature 0, or at least {MIN_TEMPERATURE}"
        raise bad_request("temperature", asked, f"{temperature}", "use 0 for greedy sampling")
    top_p = read_number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise bad_request("top_p", "top_p above 0", "0", "use temperature=0 for greedy sampling")
    return Sampling(
        max_new_tokens=read_count(body, "max_tokens", trained.max_new_tokens, 10**9),
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, int(read_number(body, "top_k", 0, -1, 10**9))),
        min_p=read_number(body, "min_p", 0.0, 0.0, 1.0),
        min_new_tokens=int(read_number(body, "min_tokens", 0, 0, 10**9)),
        stop=read_stop(body, ()),
    )


def text_completion(model: str, request: Request, completion: Completion, renderer: Renderer) -> dict[str, Any]:
    """OpenAI's `text_completion`, with vLLM's token ids."""
    tokens, prompt = completion.tokens.tolist(), request.prompt_tokens.tolist()
    texts = [renderer.decode([token]) for token in tokens]
    choice = {
        "index": 0,
        "text": renderer.decode(tokens),
        "finish_reason": "length" if completion.stop_reason is StopReason.LENGTH else "stop",
        "logprobs": {
            "tokens": texts,
            "token_logprobs": completion.log_prob.tolist(),
            "top_logprobs": None,
            "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
        },
        "token_ids": tokens,
        "prompt_token_ids": prompt,
    }
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"version-{int(completion.policy_version.max(initial=0))}",
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
        },
    }
