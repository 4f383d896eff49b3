"""Completions in the formats of OpenAI's Chat Completions: whole, and as a stream of chunks."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from trivium.protocols import Renderer
from trivium.serving.completion_parts import answer_of, part_id
from trivium.serving.requests import ChatRequest
from trivium.serving.sessions import CompletionNode, visible_text
from trivium.types import StopReason, Turn

_FINISH = {StopReason.LENGTH: "length"}
"""OpenAI's finish reason of a stop reason; `stop` for every other one."""


def chat_completion(
    model: str, chat: ChatRequest, completions: Sequence[CompletionNode], renderer: Renderer
) -> dict[str, Any]:
    """OpenAI's `chat.completion`; each choice also has its own id and session."""
    prompt = len(completions[0].turn.prompt_tokens)
    sampled = sum(len(node.turn.tokens) for node in completions)
    newest = max((int(node.turn.policy_version.max(initial=0)) for node in completions), default=0)
    return {
        "id": completions[0].id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"version-{newest}",
        "choices": [_choice(index, node, chat, renderer) for index, node in enumerate(completions)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _choice(index: int, node: CompletionNode, chat: ChatRequest, renderer: Renderer) -> dict[str, Any]:
    turn = node.turn
    message = _message(node, chat)
    choice: dict[str, Any] = {
        "index": index,
        "id": node.id,
        "session": node.session.name,
        "task_id": node.session.task_id,
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else _FINISH.get(turn.stop_reason, "stop"),
        "logprobs": _log_probs(turn, renderer) if chat.logprobs else None,
    }
    if chat.token_ids:
        choice |= {"prompt_token_ids": turn.prompt_tokens.tolist(), "token_ids": turn.tokens.tolist()}
    return choice


def _message(node: CompletionNode, chat: ChatRequest) -> dict[str, Any]:
    """The assistant's message, with the calls of tools that its text contains."""
    text = visible_text(node.turn, chat.sampling.stop)
    _, content, calls = answer_of(text, chat.tools, reasoning=False)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": part_id("call", node.id, number), "type": "function", "function": call._asdict()}
            for number, call in enumerate(calls)
        ]
    return message


def _log_probs(turn: Turn, renderer: Renderer) -> dict[str, Any]:
    """One entry per sampled token, including the end of the turn. The text of a token that decodes to nothing is
    empty."""
    texts = [renderer.decode([token]) for token in turn.tokens.tolist()]
    entries = [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(texts, turn.log_prob.tolist(), strict=True)
    ]
    return {"content": entries, "refusal": None}


async def chunks(body: dict[str, Any], chat: ChatRequest) -> AsyncGenerator[str]:
    """A complete chat completion as server-sent events: role, text, calls and finish reason of each choice."""
    head = {**{name: body[name] for name in body.keys() - {"choices", "usage"}}, "object": "chat.completion.chunk"}

    def event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        chunk = {**head, "choices": choices, **({"usage": usage} if chat.include_usage else {})}
        return f"data: {json.dumps(chunk)}\n\n"

    for choice in body["choices"]:
        extra = {name: choice[name] for name in choice.keys() - {"message", "finish_reason", "logprobs"}}
        delta = {name: value for name, value in choice["message"].items() if name != "refusal"}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        yield event([{**extra, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}])
        yield event([{**extra, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}])
    if chat.include_usage:
        yield event([], body["usage"])
    yield "data: [DONE]\n\n"
