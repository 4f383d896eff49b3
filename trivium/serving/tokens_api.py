"""Token ids in, token ids and log-probabilities out: for clients that render prompts themselves.

`/inference/v1/generate` has the format of vLLM, and is recorded like every protocol. `/v1/completions` is neither
recorded nor trained on, so a request may set any sampling parameter.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from trivium.foundation.randomness import SampleKey
from trivium.protocols import Renderer
from trivium.serving.bodies import bad_request
from trivium.serving.requests import (
    LABELS,
    ChatRequest,
    read_count,
    read_labels,
    read_number,
    read_sampling,
    read_stream,
    supported,
    typed,
)
from trivium.serving.session_records import CompletionNode
from trivium.serving.streams import Events, StreamedCompletion, event, identity
from trivium.types import SERVED, Completion, IntArray, Message, Request, Sampling, StopReason, Turn

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
_SAMPLING = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "seed"}
)
_GENERATE = frozenset(
    {"model", "token_ids", "sampling_params", "stream", "stream_options", "request_id", "cache_salt", *LABELS}
    | {"metadata", "columns"}
)
_GENERATE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "features": (),
    "content_parts": ([],),
    "kv_transfer_params": (),
    "output_mode": ("tokens",),
    "priority": (0,),
    "return_token_ids": (True, False),
}
_GENERATE_SAMPLING = _SAMPLING - {"seed"} | {"n", "routed_experts_prompt_start"}
_GENERATE_SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in _NEUTRAL.items() if name not in ("n", "echo", "stream", "suffix")},
    "detokenize": (True, False),
    "include_stop_str_in_output": (True, False),
    "logprobs": (0, 1),
    "prompt_logprobs": (0,),
    "seed": (),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
}


# --------------------------------------------------------------------------- requests


def read_generate(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    model: str,
    trained: Sampling,
    eos_token_ids: frozenset[int],
    decode: Callable[[IntArray], str],
) -> ChatRequest:
    """The request in a body of `/inference/v1/generate`. Raises RequestError.

    The header `X-Session-ID` also names the session. Special token ids are sampled and returned as they are.
    """
    body = supported({"model": model, **body}, _GENERATE, _GENERATE_NEUTRAL, model)
    params = supported(
        {**typed(body, "sampling_params", dict, {}), "model": model},
        _GENERATE_SAMPLING | {"model"},
        _GENERATE_SAMPLING_NEUTRAL,
        model,
    )
    _check_stop_tokens(params, eos_token_ids)
    # The client of verifiers sends it with every later turn. Responses have no routed experts, so it has no effect.
    read_number(params, "routed_experts_prompt_start", 0, 0, 2**31)
    session = headers.get("x-session-id")
    labels = read_labels({"session": session, **body} if session else body, headers)
    stream, include_usage = read_stream(body)
    tokens = _prompt(body, "token_ids")
    return ChatRequest(
        messages=(Message("user", decode(tokens)),),
        labels=labels,
        sampling=read_sampling(params, trained, evaluation=labels.evaluation),
        tokens=tokens,
        n=read_count(params, "n", 1, 128),
        columns=typed(body, "columns", dict, None),
        stream=stream,
        include_usage=include_usage,
        request_id=typed(body, "request_id", str, ""),
    )


def read_completion(
    body: Mapping[str, Any], model: str, trained: Sampling, eos_token_ids: frozenset[int], *, number: int
) -> Request:
    """The request in a body of `/v1/completions`, for the policy `model` that is trained with `trained`. Without a
    seed, `number` (of the request) addresses its random numbers. Raises RequestError."""
    body = supported(body, _SAMPLING | {"model", "prompt"}, _NEUTRAL, model)
    _check_stop_tokens(body, eos_token_ids)
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise bad_request("seed", "seed as a whole number", f"{seed!r:.60}", "fix the value")
    address = ("seed", seed) if seed is not None else ("number", number)
    sampling = read_sampling(body, Sampling(trained.max_new_tokens, trained.temperature), evaluation=True)
    return Request(_prompt(body, "prompt"), sampling, SampleKey(0, "served", SERVED, "", path=address))


def _check_stop_tokens(body: Mapping[str, Any], eos_token_ids: frozenset[int]) -> None:
    """Raises RequestError for stop tokens other than those that end a turn of this policy."""
    stops = body.get("stop_token_ids", [])
    if not isinstance(stops, list) or not {*map(str, stops)} <= {*map(str, eos_token_ids)}:
        found = f"this policy ends a turn with {sorted(eos_token_ids)[:8]}"
        raise bad_request("stop_token_ids", f"stop_token_ids = {stops!r:.60}", found, "leave it out")


def _prompt(body: Mapping[str, Any], name: str) -> IntArray:
    value = body.get(name)
    ids: list[Any] = value if isinstance(value, list) else []
    # Not `isinstance`: true and false are ints in Python.
    if not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        do = "send a list of token ids, or use /v1/chat/completions"
        raise bad_request(name, "a prompt of token ids", f"{value!r:.60}", do)
    return np.array(ids, np.int32)


# --------------------------------------------------------------------------- responses


def generated(
    model: str, chat: ChatRequest, completions: Sequence[CompletionNode], renderer: Renderer
) -> dict[str, Any]:
    """vLLM's `GenerateResponse`; each choice also has its own id and session, for feedback."""
    del model, renderer
    prompt, sampled = len(completions[0].turn.prompt_tokens), sum(len(node.turn.tokens) for node in completions)
    return {
        "request_id": chat.request_id or completions[0].id,
        "choices": [_generated_choice(index, node) for index, node in enumerate(completions)],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": _usage(prompt, sampled),
    }


def _generated_choice(index: int, node: CompletionNode) -> dict[str, Any]:
    turn = node.turn
    return {
        "index": index,
        **identity(node),
        "token_ids": turn.tokens.tolist(),
        "logprobs": _log_probs(turn.tokens.tolist(), turn.log_prob.tolist()),
        "finish_reason": _finish(turn),
    }


def _log_probs(tokens: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
    entries = [
        {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(tokens, log_probs, strict=True)
    ]
    return {"content": entries}


class GeneratedEvents(Events):
    """vLLM's chunks: the new tokens of a choice, and at its end the finish reason."""

    _id = ""

    def begin(self, completion: StreamedCompletion) -> Iterator[str]:
        self._id = self._id or self.chat.request_id or completion.id
        yield from ()

    def grow(self, completion: StreamedCompletion) -> Iterator[str]:
        tokens, log_probs = completion.take_tokens()
        if tokens:
            choice = {"token_ids": tokens, "logprobs": _log_probs(tokens, log_probs), "finish_reason": None}
            yield self._chunk([{"index": completion.index, **identity(completion), **choice}])

    def end(self, body: Mapping[str, Any]) -> Iterator[str]:
        for choice in body["choices"]:
            yield self._chunk([choice | {"token_ids": [], "logprobs": _log_probs([], [])}])
        if self.chat.include_usage:
            yield self._chunk([], usage=body["usage"])
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({"request_id": self._id, "choices": choices, **more})


def text_completion(model: str, request: Request, completion: Completion, renderer: Renderer) -> dict[str, Any]:
    """OpenAI's `text_completion`, with vLLM's token ids."""
    tokens, prompt = completion.tokens.tolist(), request.prompt_tokens.tolist()
    texts = [renderer.decode([token]) for token in tokens]
    choice = {
        "index": 0,
        "text": renderer.decode(tokens),
        "finish_reason": _finish(completion),
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
        "usage": _usage(len(prompt), len(tokens)),
    }


def _finish(sampled: Completion | Turn) -> str:
    return "length" if sampled.stop_reason is StopReason.LENGTH else "stop"


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
