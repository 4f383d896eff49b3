"""Anthropic's Messages API: reads its requests as chat requests, and writes completions in its formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivium.protocols import Renderer
from trivium.serving.bodies import RequestError, bad_request
from trivium.serving.completion_parts import Answer, Recorded, answer_of, completion_id, part_id, written
from trivium.serving.requests import LABELS, ChatRequest, read_chat, read_count, supported, typed
from trivium.serving.session_records import CompletionNode, visible_text
from trivium.serving.streams import Events, Step, StreamedCompletion, event, identity, token_ids
from trivium.text.tools import ToolCall
from trivium.types import Sampling, StopReason

_KNOWN = frozenset(
    {"model", "max_tokens", "messages", "system", "tools", "temperature", "top_p", "stop_sequences", "stream"}
    | {"metadata", "thinking", "columns", "return_token_ids", *LABELS}
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": (
        *({"type": kind} for kind in ("auto", "none")),
        *({"type": "auto", "disable_parallel_tool_use": False},),
    ),
    "top_k": (),
    "service_tier": ("auto", "standard_only"),
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
    "output_config": ({},),
}
_AT_END = {"stop_reason", "stop_sequence", "prompt_token_ids", "token_ids"}
"""What the last event of a stream has of a message."""
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ERROR = "error: "
"""Begins the text of a tool's result that is an error, as in workflows with tools."""
_PASSED = frozenset({"model", "temperature", "top_p", "stream", "columns", "return_token_ids", *LABELS})
"""Parameters that have the same name and meaning in a chat request."""


# --------------------------------------------------------------------------- requests


def read_message(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    model: str,
    trained: Sampling,
    recorded: Recorded,
    *,
    counts: bool = False,
) -> ChatRequest:
    """The chat request in a body of `/v1/messages`. With `counts`, the request is for the number of its tokens, and
    has no `max_tokens`. Raises RequestError.

    `max_tokens` is a required parameter here. In training, one above `engine.sampling.max_new_tokens` is reduced to
    that.
    """
    body = supported(body, _KNOWN, _NEUTRAL, model)
    if "max_tokens" not in body and not counts:
        raise bad_request("max_tokens", "max_tokens", "the request has none", "send it: this protocol requires it")
    thinks = _thinks(body)
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(typed(body, "tools", list, []))]
    chat: dict[str, Any] = {name: value for name, value in body.items() if name in _PASSED}
    chat |= {"messages": _messages(body, recorded, thinks), "tools": tools}
    if body.get("tool_choice", {}).get("type") == "none":
        chat["tool_choice"] = "none"
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    metadata = dict(typed(body, "metadata", dict, {}))
    if (user := metadata.pop("user_id", None)) is not None:
        chat["user"] = user
    chat["metadata"] = metadata
    request = read_chat(chat, headers, model, trained, recorded)
    limit = read_count(body, "max_tokens", trained.max_new_tokens, 10**9)
    limit = limit if request.labels.evaluation else min(limit, trained.max_new_tokens)
    return replace(request, sampling=replace(request.sampling, max_new_tokens=limit), reasoning=thinks)


def _thinks(body: Mapping[str, Any]) -> bool:
    """Whether the client asks for `thinking` blocks. The policy itself decides whether and how long it thinks."""
    kind = typed(body, "thinking", dict, {}).get("type", "disabled")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise bad_request("thinking", f"thinking of type {kind!r:.60}", "no such type", "send enabled or disabled")
    return kind != "disabled"


def _tool(tool: object, where: str) -> dict[str, Any]:
    """A tool as OpenAI's clients describe it."""
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise bad_request(
            where,
            "a tool {name, description, input_schema}",
            f"{tool!r:.80}",
            "send tools that the agent runs itself: this server runs no tools",
        )
    if tool.get("strict"):
        do = "leave it out: constrained calls change the sampled distribution, and the trainer does not replay that"
        raise bad_request(where, "a tool with strict = true", "this endpoint does not support it", do)
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {
        "type": "function",
        "function": {"name": tool.get("name"), **described, "parameters": tool["input_schema"]},
    }


def _messages(body: Mapping[str, Any], recorded: Recorded, thinks: bool) -> list[Any]:
    """The messages of a chat request."""
    messages: list[Any] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": _text_of_blocks(system, "system")})
    for number, message in enumerate(typed(body, "messages", list, [])):
        where = f"messages[{number}]"
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("user", "assistant", "system") or not isinstance(content, str | list):
            raise bad_request(where, "a message {role, content}", f"{message!r:.60}", "send role user or assistant")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append({"role": role, "content": _assistant(content, f"{where}.content", recorded, thinks)})
        else:
            messages += _user(role, content, f"{where}.content")
    return messages


def _user(role: str, blocks: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """The messages of one user message: each result of a tool, and the text and images between them."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        here = f"{where}[{number}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            content = block.get("content") or ""
            parts = content if isinstance(content, str) else [_part(part, here) for part in _listed(content, here)]
            if block.get("is_error"):  # a message of the role `tool` has no other place for it
                parts = _ERROR + parts if isinstance(parts, str) else [{"type": "text", "text": _ERROR}, *parts]
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(_part(block, here))
        else:
            messages.append({"role": role, "content": [_part(block, here)]})
    return messages


def _listed(value: object, where: str) -> list[Any]:
    """A list. Raises RequestError for another value."""
    if not isinstance(value, list):
        raise bad_request(where, "text or a list of blocks", f"{value!r:.60}", "fix the value")
    return value


def _part(block: object, where: str) -> dict[str, Any]:
    """A text or an image, as a part of a chat message."""
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if isinstance(block, dict) and block.get("type") == "image" else None
    if isinstance(source, dict) and source.get("type") == "base64":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
        }
    raise bad_request(
        where,
        "a block of type text, tool_result, or image with base64 data",
        f"{block!r:.60}",
        "send only these: documents, files and URLs are not supported",
    )


def _text_of_blocks(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    parts = [_part(block, f"{where}[{number}]") for number, block in enumerate(_listed(value, where))]
    if any(part["type"] != "text" for part in parts):
        raise bad_request(where, "text", "an image", "send images in a user message")
    return "".join(part["text"] for part in parts)


def _assistant(blocks: Sequence[Any], where: str, recorded: Recorded, thinks: bool) -> str:
    """The text of an earlier completion. If the policy wrote it, exactly its text."""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    ids: list[str] = []
    for number, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
            ids.append(completion_id(str(block.get("signature"))))
        elif kind == "tool_use" and isinstance(block.get("name"), str) and isinstance(block.get("input"), dict):
            calls.append(ToolCall(block["name"], json.dumps(block["input"])))
            ids.append(completion_id(str(block.get("id"))))
        else:
            found, do = f"{block!r:.60}", "send the blocks of a response unchanged"
            raise bad_request(f"{where}[{number}]", "a block of type text, thinking or tool_use", found, do)
    answer = Answer("\n".join(thoughts) if thoughts else None, "".join(texts), tuple(calls))
    return written(answer, dict.fromkeys(ids), recorded, reasoning=thinks)


# --------------------------------------------------------------------------- responses


def message(model: str, chat: ChatRequest, completions: Sequence[CompletionNode], renderer: Renderer) -> dict[str, Any]:
    """Anthropic's `message`, also with the task and the session."""
    del renderer
    (node,) = completions
    turn, stop = node.turn, chat.sampling.stop
    answer = answer_of(visible_text(turn, stop), chat.tools, reasoning=chat.reasoning, opened=node.reasoning_open)
    content: list[dict[str, Any]] = []
    if answer.reasoning is not None:  # an empty block, too: its signature names the completion
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": part_id("sig", node.id)})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    content += [
        _tool_use(node.id, number, name, json.loads(arguments)) for number, (name, arguments) in enumerate(answer.calls)
    ]
    ended = turn.stop_reason is StopReason.STOP
    # The sampling ended at the first of them in the text; of two at one place, the shorter one was complete first.
    stops = [text for text in stop if ended and text in turn.text]
    reason = "stop_sequence" if ended else "max_tokens" if turn.stop_reason is StopReason.LENGTH else "end_turn"
    body = _message(model, node) | {
        "content": content,
        "stop_reason": "tool_use" if answer.calls else reason,
        "stop_sequence": min(stops, key=lambda text: (turn.text.find(text), len(text)), default=None),
        "usage": {"input_tokens": len(turn.prompt_tokens), "output_tokens": len(turn.tokens)},
    }
    return body | token_ids(chat, turn)


class MessageEvents(Events):
    """The events of a message: each block begins, grows and ends."""

    def __init__(self, model: str, chat: ChatRequest, renderer: Renderer) -> None:
        super().__init__(model, chat, renderer)
        self._index = -1
        """The place of the newest block."""

    def begin(self, completion: StreamedCompletion) -> Iterator[str]:
        usage = {"input_tokens": len(completion.prompt or ()), "output_tokens": 0}
        started = _message(self.model, completion) | {"usage": usage}
        yield _event("message_start", message=started)

    def step(self, completion: StreamedCompletion, step: Step) -> Iterator[str]:
        self._index += step.what == "begin"
        name = {"reasoning": "thinking", "content": "text", "call": "partial_json"}[step.kind]
        if step.what == "begin":
            block: dict[str, Any] = {"type": name, name: ""}
            if step.kind == "reasoning":
                block["signature"] = ""
            elif step.call is not None:
                block = _tool_use(completion.id, step.number, step.call.name, {})
            yield _event("content_block_start", index=self._index, content_block=block)
        elif step.what == "text":
            kind = "input_json_delta" if step.kind == "call" else f"{name}_delta"
            yield _event("content_block_delta", index=self._index, delta={"type": kind, name: step.text})
        else:
            if step.kind == "reasoning":
                delta = {"type": "signature_delta", "signature": part_id("sig", completion.id)}
                yield _event("content_block_delta", index=self._index, delta=delta)
            yield _event("content_block_stop", index=self._index)

    def end(self, body: Mapping[str, Any]) -> Iterator[str]:
        end = {name: body[name] for name in body.keys() & _AT_END}
        yield _event("message_delta", delta=end, usage=body["usage"])
        yield _event("message_stop")

    def failed(self, error: RequestError) -> str:
        return event(message_error(error), "error")


def _event(kind: str, **data: Any) -> str:
    return event({"type": kind, **data}, kind)


def _message(model: str, completion: StreamedCompletion | CompletionNode) -> dict[str, Any]:
    """A message without content."""
    body = {"type": "message", "role": "assistant", "model": model, "content": [], "stop_reason": None}
    return {**identity(completion), **body, "stop_sequence": None}


def _tool_use(completion: str, number: int, name: str, arguments: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": part_id("toolu", completion, number), "name": name, "input": arguments}


def message_error(error: RequestError) -> dict[str, Any]:
    """The error as Anthropic's clients read it."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"type": kind, "message": str(error), "param": error.param, "code": error.code}
    return {"type": "error", "error": details}
