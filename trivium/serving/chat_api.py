"""Completions in the formats of OpenAI's Chat Completions: whole, and as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trivium.protocols import Renderer
from trivium.serving.completion_parts import answer_of, part_id
from trivium.serving.requests import ChatRequest
from trivium.serving.session_records import CompletionNode, visible_text
from trivium.serving.streams import Events, Step, StreamedCompletion, event, identity, token_ids
from trivium.types import StopReason

_FINISH = {StopReason.LENGTH: "length"}
"""OpenAI's finish reason of a stop reason; `stop` for every other one."""
_UNFINISHED: Mapping[str, Any] = {"finish_reason": None}


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
        **identity(node),
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else _FINISH.get(turn.stop_reason, "stop"),
        "logprobs": _log_probs(turn.tokens.tolist(), turn.log_prob.tolist(), renderer) if chat.logprobs else None,
    }
    return choice | token_ids(chat, turn)


def _message(node: CompletionNode, chat: ChatRequest) -> dict[str, Any]:
    """The assistant's message, with the calls of tools that its text contains."""
    text = visible_text(node.turn, chat.sampling.stop)
    _, content, calls = answer_of(text, chat.tools, reasoning=False, opened=node.reasoning_open)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        # Clients of OpenAI get null, and no empty text, beside calls.
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": part_id("call", node.id, number), "type": "function", "function": call._asdict()}
            for number, call in enumerate(calls)
        ]
    return message


def _log_probs(tokens: Sequence[int], log_probs: Sequence[float], renderer: Renderer) -> dict[str, Any]:
    """One entry per sampled token, including the end of the turn. The text of a token that decodes to nothing is
    empty."""
    texts = [renderer.decode([token]) for token in tokens]
    entries = [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(texts, log_probs, strict=True)
    ]
    return {"content": entries, "refusal": None}


class ChatEvents(Events):
    """Chunks of a chat completion. Each choice begins with its role and ends with its finish reason."""

    def __init__(self, model: str, chat: ChatRequest, renderer: Renderer) -> None:
        super().__init__(model, chat, renderer)
        self._head: dict[str, Any] = {"object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._streamed: dict[int, StreamedCompletion] = {}
        self._has_parts: set[int] = set()
        """The choices with text or calls."""

    def begin(self, completion: StreamedCompletion) -> Iterator[str]:
        self._head.setdefault("id", completion.id)
        self._streamed[completion.index] = completion
        yield self._chunk(completion, {"role": "assistant"})

    def step(self, completion: StreamedCompletion, step: Step) -> Iterator[str]:
        self._has_parts.add(completion.index)
        if step.kind == "content" and step.what == "text":
            yield self._chunk(completion, {"content": step.text})
        elif step.call is not None and step.what != "end":
            call: dict[str, Any] = {"index": step.number, "function": {"arguments": step.text}}
            if step.what == "begin":
                call |= {"id": part_id("call", completion.id, step.number), "type": "function"}
                call["function"]["name"] = step.call.name
            yield self._chunk(completion, {"tool_calls": [call]})

    def end(self, body: Mapping[str, Any]) -> Iterator[str]:
        for choice in body["choices"]:
            completion = self._streamed[choice["index"]]
            delta = {} if completion.index in self._has_parts else {"content": ""}
            more = {name: choice[name] for name in choice.keys() - {"message", "logprobs"}}
            yield self._chunk(completion, delta, more)
        if self.chat.include_usage:
            yield event({**self._head, "choices": [], "usage": body["usage"]})
        yield "data: [DONE]\n\n"

    def _chunk(
        self, completion: StreamedCompletion, delta: dict[str, Any], more: Mapping[str, Any] = _UNFINISHED
    ) -> str:
        tokens, log_probs = completion.take_tokens()
        logprobs = _log_probs(tokens, log_probs, self.renderer) if tokens and self.chat.logprobs else None
        choice = {**identity(completion), "index": completion.index, "delta": delta, "logprobs": logprobs, **more}
        usage = {"usage": None} if self.chat.include_usage else {}
        return event({**self._head, "choices": [choice], **usage})
