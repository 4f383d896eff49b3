"""OpenAI's Responses API: reads its requests as chat requests, and writes completions in its formats."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trivium.foundation.registry import suggest
from trivium.protocols import Renderer
from trivium.serving.bodies import RequestError, bad_request
from trivium.serving.completion_parts import Answer, Recorded, answer_of, completion_id, part_id, written
from trivium.serving.requests import LABELS, ChatRequest, read_chat, supported, typed
from trivium.serving.session_records import CompletionNode, visible_text
from trivium.serving.streams import Events, Step, StreamedCompletion, event, identity, token_ids
from trivium.text.tools import TOOLS, ToolCall, json_object
from trivium.types import IntArray, Message, Sampling, StopReason

NodeOf = Callable[[str], CompletionNode]
"""Returns a completion by its id. Raises RequestError if the id is unknown."""

_KNOWN = frozenset(
    {"model", "input", "instructions", "tools", "max_output_tokens", "temperature", "top_p", "stream", "user"}
    | {"previous_response_id", "metadata", "columns", "return_token_ids", "prompt_cache_key", "safety_identifier"}
    | {"store", *LABELS}
)
"""Parameters that are accepted with any value."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "background": (False,),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Further parameter -> the values that have no effect here. Any other value is refused."""
_ITEMS = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments", "parsed_arguments"}),
    "function_call_output": frozenset({"type", "id", "status", "call_id", "output"}),
}
"""Type of an item -> its keys. OpenAI's client adds `parsed_arguments`."""
_PARTS = {
    **dict.fromkeys(("input_text", "output_text", "text"), frozenset({"type", "text", "annotations", "logprobs"})),
    "input_image": frozenset({"type", "image_url", "detail"}),
}
"""Type of a part of a message -> its keys."""
_PASSED = frozenset(
    {"model", "temperature", "top_p", "stream", "columns", "return_token_ids", "user", "metadata", *LABELS}
)
"""Parameters that have the same name and meaning in a chat request."""


# --------------------------------------------------------------------------- requests


def read_response(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    model: str,
    trained: Sampling,
    recorded: Recorded,
    node_of: NodeOf,
) -> ChatRequest:
    """The chat request in a body of `/v1/responses`. Raises RequestError.

    A `previous_response_id` stands for the conversation that ends with that completion, without its `instructions`.
    """
    body = supported(body, _KNOWN, _NEUTRAL, model)
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(typed(body, "tools", list, []))]
    chat: dict[str, Any] = {name: value for name, value in body.items() if name in _PASSED}
    chat |= {"tools": tools, "messages": _messages(body.get("input"), recorded)}
    if body.get("tool_choice") == "none":
        chat["tool_choice"] = "none"
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    previous = typed(body, "previous_response_id", str, "")
    instructions = typed(body, "instructions", str, "")
    request = read_chat(chat, headers, model, trained, recorded)
    # The tools of a chat request are its first message; the instructions come after it.
    of_tools = request.messages[: bool(request.tools.names)]
    new = request.messages[len(of_tools) :]
    system = (Message("system", instructions),) if instructions else ()
    request = replace(request, messages=(*of_tools, *system, *new), instructions=bool(instructions), reasoning=True)
    return _continued(request, node_of(previous), len(new)) if previous else request


def _continued(request: ChatRequest, node: CompletionNode, num_new: int) -> ChatRequest:
    """The request with the conversation up to a completion before its last `num_new` messages.

    The tools and the instructions of that conversation are left out: every request sends its own. If they are the same,
    the request continues from the completion's tokens.
    """
    earlier = node.conversation
    earlier = earlier[1:] if earlier[0].role == TOOLS else earlier
    earlier = earlier[1:] if node.instructions else earlier
    at = len(request.messages) - num_new
    messages = (*request.messages[:at], *earlier, *request.messages[at:])
    same = messages[: len(node.conversation)] == node.conversation
    # Other tools or instructions begin another sequence, of the same session.
    labels = replace(request.labels, reply_to=node.id if same else "", session_of=node.id)
    return replace(request, messages=messages, labels=labels)


def _tool(tool: object, where: str) -> dict[str, Any]:
    """A function as Chat Completions describe it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        found, do = f"{tool!r:.60}", "send functions that the agent runs itself: this server runs no tools"
        raise bad_request(where, "a function {type: function, name, parameters}", found, do)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def _messages(value: object, recorded: Recorded) -> list[Any]:
    """The messages of a chat request, from the items of `input`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad_request("input", "text or a list of items", f"{value!r:.60}", "send at least one item")
    messages: list[Any] = []
    turn = _Turn()
    for number, item in enumerate(value):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise bad_request(where, "an item", f"{item!r:.60}", "send items as they were received")
        _check_keys(item, _ITEMS.get(str(item.get("type", "message"))), where)
        if turn.takes(item, where):
            continue
        messages += turn.ended(recorded)
        turn = _Turn()
        if not turn.takes(item, where):
            messages.append(_message(item, where))
    return [*messages, *turn.ended(recorded)]


def _check_keys(entry: Mapping[str, Any], keys: frozenset[str] | None, where: str) -> None:
    """Raises RequestError for a key with a value that has no effect here. `keys` is None for an unknown type."""
    for name, value in entry.items():
        if keys is not None and name not in keys and value not in (None, [], {}):
            asked = f"a value {name} = {value!r:.60}"
            raise bad_request(f"{where}.{name}", asked, "no such key here", suggest(name, keys))


class _Turn:
    """The items of one completion: its reasoning, its text and its calls."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._ids: dict[str, None] = {}
        self._has_items = False

    def takes(self, item: Mapping[str, Any], where: str) -> bool:
        """Adds an item, and returns True, unless it belongs to another completion or is not the assistant's."""
        kind = item.get("type", "message")
        if kind not in ("message", "reasoning", "function_call") or (
            kind == "message" and item.get("role") != "assistant"
        ):
            return False
        part = item.get("call_id" if kind == "function_call" else "id")
        completion = "" if part is None else completion_id(str(part))  # some clients drop the ids of items
        is_other = bool(completion and self._ids) and completion not in self._ids
        if is_other or (kind == "reasoning" and (self._texts or self._calls)):
            return False
        self._has_items = True
        self._ids |= {completion: None} if completion else {}
        if kind == "function_call":
            self._calls.append(_call(item, where))
        elif kind == "message":
            self._texts.append(_text(item.get("content"), f"{where}.content"))
        else:
            self._reasoning.append(_text(item.get("content") or item.get("summary") or [], f"{where}.content"))
        return True

    def ended(self, recorded: Recorded) -> Iterator[dict[str, Any]]:
        """Yields the message of the turn, if it has items."""
        if self._has_items:
            reasoning = "\n".join(self._reasoning) if self._reasoning else None
            answer = Answer(reasoning, "".join(self._texts), tuple(self._calls))
            yield {"role": "assistant", "content": written(answer, self._ids, recorded)}


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    arguments = json_object(item["arguments"]) if isinstance(item.get("arguments"), str) else None
    if not isinstance(item.get("name"), str) or arguments is None:
        found, do = f"{item!r:.60}", "send calls as they were received; `arguments` is the text of a JSON object"
        raise bad_request(where, "a call {type: function_call, call_id, name, arguments}", found, do)
    return ToolCall(item["name"], arguments)


def _text(content: object, where: str) -> str:
    """The text of an assistant's item."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise bad_request(where, "text, or a list of parts with text", f"{content!r:.60}", "send items as received")
    return "".join(str(text) for text in texts)


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message of an item that is not the assistant's."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"), where)}
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": _content(item.get("content"), where)}
    raise bad_request(
        where,
        "an item of type message, reasoning, function_call or function_call_output",
        f"{item!r:.60}",
        "send only these: this server runs no tools and stores no files",
    )


def _content(content: object, where: str) -> object:
    """The content of a chat message."""
    if not isinstance(content, list):
        return content
    return [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]


def _part(part: object, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict):
        _check_keys(part, _PARTS.get(str(kind)), where)
    if isinstance(part, dict) and kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text")}
    if isinstance(part, dict) and kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    found, do = f"{part!r:.60}", "send only these: files and sound are not supported"
    raise bad_request(where, "a part of type input_text or input_image", found, do)


# --------------------------------------------------------------------------- responses


def response(
    model: str, chat: ChatRequest, completions: Sequence[CompletionNode], renderer: Renderer
) -> dict[str, Any]:
    """OpenAI's `response`, also with the task and the session."""
    (node,) = completions
    turn = node.turn
    cut = turn.stop_reason is StopReason.LENGTH
    answer = answer_of(visible_text(turn, chat.sampling.stop), chat.tools, opened=node.reasoning_open)
    has_ended = partial(_ends_reasoning, chat.tools.format.reasoning[1], renderer, turn.tokens)
    # A binary search for the token that completes the reasoning: decoding every prefix would be slow.
    last = bisect_left(range(len(turn.tokens)), True, key=has_ended) if answer.reasoning is not None else -1
    num_reasoning = min(last + 1, len(turn.tokens))  # all of them, if the reasoning has no end
    body = _response(model, chat, node) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_output(node, answer, "incomplete" if cut else "completed")),
        "usage": {
            "input_tokens": len(turn.prompt_tokens),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": len(turn.tokens),
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": len(turn.prompt_tokens) + len(turn.tokens),
        },
    }
    return body | token_ids(chat, turn)


def _response(model: str, chat: ChatRequest, completion: StreamedCompletion | CompletionNode) -> dict[str, Any]:
    """A response without output."""
    return {
        **identity(completion),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None if completion.parent is None else completion.parent.id,
        "temperature": chat.sampling.temperature,
        "tool_choice": "auto",
        "tools": [],
        "top_p": chat.sampling.top_p,
        "usage": None,
    }


def _ends_reasoning(end: str, renderer: Renderer, tokens: IntArray, last: int) -> bool:
    """Whether the reasoning has ended with the token at this index."""
    return end in renderer.decode(tokens[: last + 1])


def _output(node: CompletionNode, answer: Answer, status: str) -> Iterator[dict[str, Any]]:
    """Yields the items of a completion."""
    if answer.reasoning is not None:
        yield _item(node.id, "reasoning", 0, answer.reasoning, status)
    if answer.content or not answer.calls:
        yield _item(node.id, "content", 0, answer.content, status)
    for number, call in enumerate(answer.calls):
        yield _item(node.id, "call", number, call.arguments, status, call)


def _item(
    completion: str, kind: str, number: int, text: str, status: str, call: ToolCall | None = None
) -> dict[str, Any]:
    """The item of a part of a completion."""
    if call is not None:
        ids = {"id": part_id("fc", completion, number), "call_id": part_id("call", completion, number)}
        return {"type": "function_call", **ids, "name": call.name, "arguments": text, "status": status}
    if kind == "reasoning":
        content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": text}]
        return {
            "type": "reasoning",
            "id": part_id("rs", completion),
            "summary": [],
            "content": content,
            "status": status,
        }
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {
        "type": "message",
        "id": part_id("msg", completion),
        "role": "assistant",
        "content": content,
        "status": status,
    }


class ResponseEvents(Events):
    """The events of a response: each item begins, grows and ends."""

    def __init__(self, model: str, chat: ChatRequest, renderer: Renderer) -> None:
        super().__init__(model, chat, renderer)
        self._number = self._index = -1
        """The numbers of the newest event and of the newest item."""

    def begin(self, completion: StreamedCompletion) -> Iterator[str]:
        self._completion = completion
        started = _response(self.model, self.chat, completion)
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def step(self, completion: StreamedCompletion, step: Step) -> Iterator[str]:
        node = completion.node
        self._index += step.what == "begin"
        ends = step.what == "end"
        cut = node is not None and node.turn.stop_reason is StopReason.LENGTH
        status = ("incomplete" if cut else "completed") if ends else "in_progress"
        item = _item(completion.id, step.kind, step.number, step.text if ends else "", status, step.call)
        position: dict[str, Any] = {"item_id": item["id"], "output_index": self._index}
        kind = "response.function_call_arguments"
        part = item["content"][0] if step.call is None else {}
        if part:
            kind, position["content_index"] = f"response.{part['type']}", 0
        extra = {"logprobs": []} if step.kind == "content" else {}
        if step.what == "begin":
            empty = {**item, "content": []} if part else item
            yield self._event("response.output_item.added", output_index=self._index, item=empty)
            if part:
                yield self._event("response.content_part.added", **position, part=part)
        elif step.what == "text":
            yield self._event(f"{kind}.delta", **position, delta=step.text, **extra)
        else:
            whole = {"text": step.text} if step.call is None else {"arguments": step.text, "name": step.call.name}
            yield self._event(f"{kind}.done", **position, **whole, **extra)
            if part:
                yield self._event("response.content_part.done", **position, part=part)
            yield self._event("response.output_item.done", output_index=self._index, item=item)

    def end(self, body: Mapping[str, Any]) -> Iterator[str]:
        if len(body["output"]) > self._index + 1:  # a message without text
            for what in ("begin", "end"):
                yield from self.step(self._completion, Step(what, "content"))
        yield self._event(f"response.{body['status']}", response=body)

    def failed(self, error: RequestError) -> str:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _event(self, kind: str, **data: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **data}, kind)
