"""Reads and checks the parameters of requests. Unknown and unsupported parameters are errors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from trivium.foundation.errors import DataError, RewardError
from trivium.foundation.registry import suggest
from trivium.policy import named_numbers
from trivium.serving.bodies import RequestError, bad_request, read_body
from trivium.serving.completion_parts import Answer, Recorded, completion_id, written
from trivium.tasks.pictures import read_content, read_image
from trivium.text.messages import with_calls
from trivium.text.tool_formats import CallableTools
from trivium.text.tools import TOOLS, ToolCall, json_object, schemas_of
from trivium.types import MIN_TEMPERATURE, IntArray, Message, Sampling

T = TypeVar("T")
D = TypeVar("D")
_MAX_LABEL = 512
"""Characters of a label, which records and log lines repeat."""
_MAX_MESSAGES = 1024
"""Messages of a request. To find the session, the server hashes each beginning that ends with a completion, which takes
time quadratic in their number."""
_MAX_STOP = 16
"""Stop strings of a request."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

LABELS = ("task_id", "session", "secret", "reply_to", "evaluation", "row")
"""Parameters that assign a call to a task and a session, in the body or in `metadata`."""
_HEADERS = {"x-task-id": "task_id", "x-session": "session", "x-session-secret": "secret"}
"""The labels that a client may send with every request."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "seed": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
}
"""OpenAI's parameters that this endpoint does not support, with the values that have no effect (null never has one)."""
_WHY = {
    "tool_choice": "the policy decides which tool it calls: forcing a call changes the sampled distribution",
    "parallel_tool_calls": "the policy decides how many calls it makes",
    "seed": "a sample is a function of the run's seed, the task, the session and the call: set those",
    **dict.fromkeys(
        ("response_format", "output_config", "text"),
        "constrained output changes the sampled distribution, and the trainer does not replay it",
    ),
    **dict.fromkeys(("logprobs", "top_logprobs"), "the engine keeps the log-probability of the sampled token only"),
    "top_k": "set engine.sampling.top_k: the trainer computes with the same distribution",
    "mcp_servers": "let the agent call its servers",
    "context_management": "let the agent edit its messages",
    "conversation": "send previous_response_id, or the items of the conversation",
    "reasoning": "the policy decides how long it thinks",
    "truncation": "raise engine.max_context, or send fewer items",
    **dict.fromkeys(
        ("features", "content_parts"),
        "send conversations with images to /v1/chat/completions: the server renders them",
    ),
    "output_mode": "decode the token ids, or use /v1/chat/completions",
}
"""Parameter of a protocol that is not supported -> what its refusal says."""
_KNOWN = frozenset(
    {
        "model",
        "messages",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "user",
        "metadata",
        "columns",
        "return_token_ids",
        "tools",
        *LABELS,
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """A rollout of a row of a taskset. Its session samples with the random numbers of a run that reads this row."""

    taskset: str
    epoch: int
    index: int
    """The member of the group."""

    @property
    def group(self) -> tuple[str, int]:
        """(taskset, epoch), which the rows of one group share."""
        return self.taskset, self.epoch


@dataclass(frozen=True, slots=True)
class Labels:
    """The task and the session of a call."""

    task_id: str = ""
    """Trajectories of one task form a group. Empty: the hash of the first messages."""
    session: str = ""
    """The trajectory. Empty: that of the conversation that the messages continue, else a new one."""
    secret: str = ""
    """A text that later requests about the session must present as well. Empty: none."""
    reply_to: str = ""
    """The id of the completion that the messages continue from, if several have the same text."""
    session_of: str = ""
    """The id of a completion whose session the call belongs to, if it names no session."""
    evaluation: bool = False
    """Whether the completion is only sampled: without a slot and an experience, at any temperature."""
    row: Row | None = None
    """The row that `task_id` names, if the task is one of a taskset."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call for completions of a conversation, in the form that all protocols are read into."""

    messages: tuple[Message, ...]
    labels: Labels
    sampling: Sampling
    tokens: IntArray | None = None
    """The prompt, if the client has rendered it itself; `messages` is then its text."""
    n: int = 1
    columns: Mapping[str, Any] | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    tools: CallableTools = field(default_factory=CallableTools)
    """The functions that the completion may call."""
    reasoning: bool = False
    """Whether the `<think>` block of a completion is a part of its own, and not of the text."""
    request_id: str = ""
    """The client's own name for the call, if it is returned."""
    instructions: bool = False
    """Whether the system message holds for this call only: a call that names it as its previous response begins
    without it."""


def read_chat(
    body: Mapping[str, Any], headers: Mapping[str, str], model: str, trained: Sampling, recorded: Recorded
) -> ChatRequest:
    """The chat request in a body, for the policy `model` that is trained with `trained`. Raises RequestError."""
    body = supported(body, _KNOWN, _NEUTRAL, model)
    labels = read_labels(body, headers)
    stream, include_usage = read_stream(body)
    tools = [] if body.get("tool_choice") == "none" else typed(body, "tools", list, [])
    names = frozenset(_tool_name(tool, f"tools[{number}]") for number, tool in enumerate(tools))
    recorded = recorded._replace(format=recorded.format.typed(schemas_of(tools)))
    messages = _messages(body.get("messages"), recorded)
    return ChatRequest(
        messages=(Message(TOOLS, json.dumps(tools)), *messages) if tools else messages,
        labels=labels,
        sampling=read_sampling(body, trained, evaluation=labels.evaluation),
        # OpenAI's limit.
        n=read_count(body, "n", 1, 128),
        columns=typed(body, "columns", dict, None),
        stream=stream,
        include_usage=include_usage,
        logprobs=typed(body, "logprobs", bool, False),
        token_ids=typed(body, "return_token_ids", bool, False),
        tools=CallableTools(names, recorded.format),
    )


def supported(
    body: Mapping[str, Any],
    parameters: frozenset[str],
    neutral: Mapping[str, tuple[Any, ...]],
    model: str,
) -> dict[str, Any]:
    """The parameters of a body that are not null. Raises RequestError for an unknown parameter, a `neutral` one with a
    value that would have an effect, and another model."""
    body = {name: value for name, value in body.items() if value is not None}
    for name in body.keys() - parameters - neutral.keys():
        raise bad_request(name, f"the parameter {name!r}", "no such parameter here", suggest(name, parameters))
    for name in body.keys() & neutral.keys():
        if body[name] not in neutral[name]:
            do = _WHY.get(name, "leave it out")
            raise bad_request(name, f"{name} = {body[name]!r:.60}", "this endpoint does not support it", do)
    if body.get("model") != model:
        raise RequestError(
            404,
            f"the model {body.get('model')!r}",
            f"this endpoint serves {model!r}",
            f"set model={model!r}",
            param="model",
            code="model_not_found",
        )
    return body


def typed(body: Mapping[str, Any], name: str, kind: type[T], default: D) -> T | D:
    value = body.get(name, default)
    if name in body and not isinstance(value, kind):
        raise bad_request(name, f"{name} as {kind.__name__}", f"{value!r:.60}", "fix the value")
    return value


def read_stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """(whether the response is a stream, whether the stream ends with the usage). Raises RequestError."""
    stream, options = typed(body, "stream", bool, False), typed(body, "stream_options", dict, {})
    if options.keys() - {"include_usage"} or (options and not stream):
        raise bad_request(
            "stream_options", f"stream_options = {options!r:.60}", "only include_usage, with stream", "leave it out"
        )
    return stream, typed(options, "include_usage", bool, False)


def read_count(body: Mapping[str, Any], name: str, default: int, maximum: int) -> int:
    """A whole number from 1 to `maximum`. Raises RequestError."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise bad_request(name, f"{name} from 1 to {maximum}", f"{value!r:.60}", "fix the value")
    return value


def read_labels(body: Mapping[str, Any], headers: Mapping[str, str]) -> Labels:
    """The labels in the body, in `metadata`, in headers and, for the session, in `user`. All must agree."""
    metadata = typed(body, "metadata", dict, {})
    for name in metadata.keys() - set(LABELS):
        raise bad_request("metadata", f"the metadata {name!r}", "no such label here", suggest(name, LABELS))
    sources: list[Mapping[str, Any]] = [{name: body[name] for name in LABELS if name in body}, metadata]
    sources += [{label: headers[name] for name, label in _HEADERS.items() if headers.get(name)}]
    labels: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            value = {"evaluation": _flag, "row": _row}.get(name, _label)(name, value)
            if labels.setdefault(name, value) != value:
                raise bad_request(name, f"one {name}", f"{labels[name]!r} and {value!r}", "send it once")
    if body.get("user", "") != "" and "session" not in labels:
        labels["session"] = _label("user", body["user"])
    if "row" in labels and ("task_id" not in labels or labels.get("evaluation")):
        found = "the request is an evaluation" if labels.get("evaluation") else "the request has no task_id"
        raise bad_request("row", "a row for training", found, "send row with the task_id of the row, or leave it out")
    return Labels(**labels)


def read_secret(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """The secret in a body or in its header; empty: none."""
    secret = body.get("secret", headers.get("x-session-secret"))
    return "" if secret is None else _label("secret", secret)


def _label(name: str, value: object) -> str:
    """A text that every database and log can hold. Raises RequestError."""
    if not isinstance(value, str) or not value or len(value) > _MAX_LABEL or "\0" in value:
        raise bad_request(
            name, f"{name} as text of 1 to {_MAX_LABEL} characters, none of them NUL", f"{value!r:.60}", "fix the value"
        )
    return value


def _flag(name: str, value: object) -> bool:
    value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise bad_request(name, f"the label {name}", f"{value!r:.60}", "send true or false")
    return value


def _row(name: str, value: object) -> Row:
    """A row as an object or as its JSON text: values of OpenAI's `metadata` are texts. Raises RequestError."""
    row = value
    if isinstance(value, str):
        with suppress(RequestError):  # the error below names the form of a row
            row = read_body(value.encode())
    fields: dict[Any, Any] = {"epoch": 0, **row} if isinstance(row, dict) else {}
    numbers = [fields.get("epoch"), fields.get("index")]
    # Not `isinstance`: true and false are ints in Python.
    if fields.keys() != {"taskset", "epoch", "index"} or not all(
        type(number) is int and 0 <= number < 2**31 for number in numbers
    ):
        asked = "row as {taskset, epoch, index}, a text and two whole numbers from 0"
        raise bad_request(name, asked, f"{value!r:.60}", "name the taskset, and the member of the group as index")
    return Row(_label("row.taskset", fields["taskset"]), fields["epoch"], fields["index"])


_TRAINED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
}
"""Parameters that change the sampled distribution, with their fields of `Sampling`."""


def read_sampling(body: Mapping[str, Any], trained: Sampling, *, evaluation: bool) -> Sampling:
    """How to sample. For training, only the length and the stop strings may differ from the config. Raises
    RequestError."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    if len(names) == 2 and body[names[0]] != body[names[1]]:
        raise bad_request(names[0], "one limit", f"{names[0]} and {names[1]} differ", "send max_completion_tokens")
    sampling = replace(
        trained,
        max_new_tokens=trained.max_new_tokens if not names else read_count(body, names[0], 1, 10**9),
        temperature=read_number(body, "temperature", trained.temperature, 0.0, 100.0),
        top_p=read_number(body, "top_p", 1.0 if evaluation else trained.top_p, 0.0, 1.0),
        top_k=max(0, int(read_number(body, "top_k", trained.top_k, -1, 10**9))),
        min_p=read_number(body, "min_p", trained.min_p, 0.0, 1.0),
        min_new_tokens=int(read_number(body, "min_tokens", trained.min_new_tokens, 0, 10**9)),
        stop=read_stop(body, trained.stop),
        extra=(),
    )
    if not evaluation:
        return _for_training(sampling, trained, names)
    if sampling.top_p == 0:
        raise bad_request("top_p", "top_p above 0", "0", "use temperature=0 for greedy sampling")
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        minimum = f"temperature 0, or at least {MIN_TEMPERATURE}"
        raise bad_request("temperature", minimum, f"{sampling.temperature}", "use 0 for greedy sampling")
    return sampling


def _for_training(sampling: Sampling, trained: Sampling, names: Sequence[str]) -> Sampling:
    """The sampling parameters of the config with the length and the stop strings of a request; `names` has the
    parameter that sets the length. Raises RequestError if others differ."""
    for name, attribute in _TRAINED.items():
        value, trained_value = getattr(sampling, attribute), getattr(trained, attribute)
        if value != trained_value:
            found = f"this run samples at {trained_value}, and the trainer computes with that"
            do = f"leave it out, set engine.sampling.{attribute}, or mark the request `evaluation: true`"
            raise bad_request(name, f"{name} {value} in training", found, do)
    if sampling.max_new_tokens > trained.max_new_tokens:
        found = f"this run trains completions of {trained.max_new_tokens}"
        do = "ask for fewer, or raise engine.sampling.max_new_tokens"
        raise bad_request(names[0], f"{names[0]} {sampling.max_new_tokens} in training", found, do)
    return replace(trained, max_new_tokens=sampling.max_new_tokens, stop=sampling.stop)


def read_stop(body: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """The stop strings of a body. Raises RequestError."""
    stop = body.get("stop", default)
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else ()
    if "stop" in body and not (0 < len(stop) <= _MAX_STOP and all(isinstance(text, str) and text for text in stop)):
        raise bad_request(
            "stop", f"at most {_MAX_STOP} stop strings", f"{body['stop']!r:.60}", "send a text, or a list of texts"
        )
    return stop


def read_number(body: Mapping[str, Any], name: str, default: float, minimum: float, maximum: float) -> float:
    """A number from `minimum` to `maximum`. Raises RequestError."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise bad_request(name, f"{name} from {minimum} to {maximum}", f"{value!r:.60}", "fix the value")
    return float(value)


def _tool_name(tool: object, where: str) -> str:
    """The name of a function that OpenAI's `tools` describe."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise bad_request(
            where, "a function {type: function, function: {name, ...}}", f"{tool!r:.60}", "send functions only"
        )
    if not _TOOL_NAME.fullmatch(name):
        allowed = f"a name of a function that matches {_TOOL_NAME.pattern}"
        raise bad_request(where, allowed, f"{name!r:.60}", "rename it: formats of calls cannot write every name")
    return name


def _messages(value: object, recorded: Recorded) -> tuple[Message, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_MESSAGES:
        found = f"{len(value)} messages" if isinstance(value, list) else f"{value!r:.60}"
        raise bad_request(
            "messages", f"a list of 1 to {_MAX_MESSAGES} messages", found, "send at least one {role, content}"
        )
    messages = _with_names(
        value, [_message(entry, f"messages[{number}]", recorded) for number, entry in enumerate(value)]
    )
    if messages[-1].role == "assistant":
        raise bad_request(
            "messages",
            "messages that end before the assistant's turn",
            "the last message is the assistant's",
            "end with another role: a completion cannot be continued",
        )
    return messages


def _with_names(entries: Sequence[Any], messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, of which a result of a tool has the number of its call, and the name of the tool."""
    named: list[Message] = []
    calls: list[Any] = []
    for entry, message in zip(entries, with_calls(messages, entries), strict=True):
        if message.role == "assistant":
            calls = entry.get("tool_calls") or []
        if message.role == "tool":
            name = "" if message.call is None else calls[message.call]["function"]["name"]
            message = replace(message, name=str(entry.get("name") or name))
        named.append(message)
    return tuple(named)


def _message(entry: object, where: str, recorded: Recorded) -> Message:
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str) or entry["role"] == TOOLS:
        raise bad_request(where, "a message {role, content}", f"{entry!r:.60}", "send a role and a content")
    role = entry["role"]
    keys = {
        "assistant": ("role", "content", "tool_calls", "reasoning_content"),
        "tool": ("role", "content", "tool_call_id", "name"),
    }
    for name, value in entry.items():
        if name not in keys.get(role, ("role", "content")) and value not in (None, [], {}):
            raise bad_request(
                f"{where}.{name}", f"a message with {name}", f"{value!r:.60}", "send role and content only"
            )
    if entry.get("tool_calls") or entry.get("reasoning_content"):
        return Message(role, _called(entry, where, recorded))
    return replace(_content(entry.get("content"), where), role=role)


def _called(entry: Mapping[str, Any], where: str, recorded: Recorded) -> str:
    """The text of an assistant's message with `tool_calls` or `reasoning_content`. If the policy wrote the calls,
    exactly its text."""
    content = "" if entry.get("content") is None else _text(entry["content"], where)
    tool_calls, reasoning = entry.get("tool_calls") or [], entry.get("reasoning_content")
    entries: list[Any] = tool_calls if isinstance(tool_calls, list) else [None]  # None is refused below
    if not isinstance(reasoning, str | None):
        raise bad_request(f"{where}.reasoning_content", "text", f"{reasoning!r:.60}", "send it as it was received")
    calls = tuple(_sent_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(entries))
    # All calls of a message are of one completion.
    ids = [completion_id(str(entries[0].get("id")))] if entries else []
    if reasoning:
        return written(Answer(reasoning.strip(), content, calls), ids, recorded)
    return written(Answer(None, content, calls), ids, recorded, reasoning=False)


def _sent_call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    normalized = json_object(arguments) if isinstance(arguments, str) else None
    if not isinstance(name, str) or normalized is None:
        raise bad_request(
            where,
            "a call {id, type: function, function: {name, arguments}}",
            f"{call!r:.60}",
            "send calls as they were received; `arguments` is the text of a JSON object",
        )
    return ToolCall(name, normalized)


def _text(content: object, where: str) -> str:
    message = _content(content, where)
    if message.media:
        raise bad_request(f"{where}.content", "text", "an image beside tool_calls", "send it in a message of its own")
    return message.content


def _content(content: object, where: str) -> Message:
    """Text and images as a message without a role. Images are data URIs only: the server fetches no URL and reads no
    file."""
    try:
        message = read_content(content, f"{where}.content", read_image)
    except DataError as error:
        raise bad_request(f"{where}.content", error.asked, error.found, error.do) from error
    if message is None:
        raise bad_request(
            f"{where}.content",
            "text, or a list of parts of the types text and image_url",
            f"{content!r:.60}",
            "send only these: videos, sound and files are not supported",
        )
    return message


@dataclass(frozen=True, slots=True)
class Feedback:
    """One call of `/feedback`, which ends one or more trajectories."""

    ids: tuple[str, ...]
    """Completions whose trajectories end."""
    session: str
    secret: str
    task_id: str
    rewards: Mapping[str, float]
    """Empty: only the config's reward functions compute rewards."""
    failure: str
    """Why the rollout failed; recorded and counted, never scored."""
    columns: Mapping[str, Any]
    row: Row | None
    """The row of the session; None: any."""


_FEEDBACK = frozenset({"id", "ids", "session", "secret", "task_id", "reward", "rewards", "failure", "columns", "row"})


def read_feedback(body: Mapping[str, Any], headers: Mapping[str, str]) -> Feedback:
    """The feedback in a body. Raises RequestError."""
    body = {name: value for name, value in body.items() if value is not None}
    for name in body.keys() - _FEEDBACK:
        raise bad_request(name, f"the parameter {name!r}", "no such parameter here", suggest(name, _FEEDBACK))
    ids = [body["id"]] if "id" in body else typed(body, "ids", list, [])
    session = typed(body, "session", str, "")
    if not all(isinstance(completion, str) for completion in ids) or bool(ids) == bool(session):
        raise bad_request(
            "ids",
            "feedback for completions or for a session",
            f"ids {ids!r:.60}, session {session!r}",
            "send `ids` (of completions) or `session`, one of the two",
        )
    if len(body.keys() & {"reward", "rewards", "failure"}) > 1:
        raise bad_request("reward", "one of reward, rewards and failure", "several of them", "send one")
    rewards = {"reward": body["reward"]} if "reward" in body else typed(body, "rewards", dict, {})
    try:
        rewards = named_numbers("reward", rewards, source="the request")
    except RewardError as error:
        raise bad_request("rewards", error.asked, error.found, error.do) from error
    return Feedback(
        tuple(ids),
        session,
        read_secret(body, headers),
        typed(body, "task_id", str, ""),
        rewards,
        typed(body, "failure", str, ""),
        typed(body, "columns", dict, {}),
        _row("row", body["row"]) if "row" in body else None,
    )
