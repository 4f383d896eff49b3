"""Parses and checks requests. An unknown or unsupported parameter is refused, never ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from trivium.errors import TriviumError
from trivium.registry import suggest
from trivium.types import Message, Sampling

T = TypeVar("T")
D = TypeVar("D")

_LABELS = ("task_id", "session", "reply_to", "evaluation")
"""Parameters that assign a call to a task and a session: in the body, or in `metadata`."""
_HEADERS = {"x-task-id": "task_id", "x-session": "session"}
"""The labels that a client may send with every request."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "seed": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
}
"""OpenAI's parameters that this endpoint does not support, and their values without effect (null is always one)."""
_WHY = {
    "tools": "the renderer writes no tools into the prompt: describe them in the system message and read calls from "
    "the text",
    "seed": "a sample is a function of the run's seed, the task, the session and the call: name those",
    "response_format": "constrained output changes the sampled distribution, and the trainer does not replay it",
    "top_logprobs": "the engine keeps the log-probability of the sampled token only",
}
_KNOWN = frozenset(
    {
        "model",
        "messages",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "user",
        "metadata",
        "columns",
        "return_token_ids",
        *_LABELS,
        *_NEUTRAL,
    }
)


class RequestError(TriviumError):
    """A request that gets an error response; the run continues."""

    def __init__(
        self,
        status: int,
        asked: str,
        found: str,
        do: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(asked, found, do)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 410: "gone_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_request(param: str, asked: str, found: str, do: str, code: str | None = None) -> RequestError:
    """An error with status 400 about one parameter."""
    return RequestError(400, asked, found, do, param=param, code=code)


@dataclass(frozen=True, slots=True)
class Labels:
    """The task and the session of a call."""

    task_id: str = ""
    """Trajectories of one task form a group; empty: the hash of the first messages."""
    session: str = ""
    """The trajectory; empty: that of the conversation that the messages continue, else a new one."""
    reply_to: str = ""
    """Id of the completion that the messages continue from, where equal texts are ambiguous."""
    evaluation: bool = False
    """Whether to sample only: no slot, no experience, any temperature."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call of `/v1/chat/completions`."""

    messages: tuple[Message, ...]
    labels: Labels
    sampling: Sampling
    n: int = 1
    columns: Mapping[str, Any] | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request."""

    def no_number(name: str) -> NoReturn:
        raise bad_request("", "numbers that JSON knows", name, "send finite numbers")

    try:
        body = json.loads(raw, parse_constant=no_number)
    except ValueError as error:
        raise bad_request("", "a JSON body", f"not JSON: {error}", "send one JSON object") from error
    if not isinstance(body, dict):
        raise bad_request("", "a JSON object", type(body).__name__, "send one JSON object")
    return body


def read_chat(body: Mapping[str, Any], headers: Mapping[str, str], model: str, trained: Sampling) -> ChatRequest:
    """The chat request in a body, for the policy `model` that is trained with `trained`. Raises RequestError."""
    body = {name: value for name, value in body.items() if value is not None}
    for name in body.keys() - _KNOWN:
        raise bad_request(
            name, f"the parameter {name!r}", "no such parameter here", suggest(name, _KNOWN - _NEUTRAL.keys())
        )
    for name in body.keys() & _NEUTRAL.keys():
        if body[name] not in _NEUTRAL[name]:
            raise bad_request(
                name,
                f"{name} = {body[name]!r:.60}",
                "this endpoint does not support it",
                _WHY.get(name, "leave it out"),
            )
    if body.get("model") != model:
        raise RequestError(
            404,
            f"the model {body.get('model')!r}",
            f"this endpoint serves {model!r}",
            f"ask for model={model!r}",
            param="model",
            code="model_not_found",
        )
    labels = _labels(body, headers)
    stream = _typed(body, "stream", bool, False)
    options = _typed(body, "stream_options", dict, {})
    if options.keys() - {"include_usage"} or (options and not stream):
        raise bad_request(
            "stream_options", f"stream_options = {options!r}", "only include_usage, with stream", "leave it out"
        )
    return ChatRequest(
        messages=_messages(body.get("messages")),
        labels=labels,
        sampling=_sampling(body, labels.evaluation, trained),
        n=_count(body, "n", 1, 128),
        columns=_typed(body, "columns", dict, None),
        stream=stream,
        include_usage=_typed(options, "include_usage", bool, False),
        logprobs=_typed(body, "logprobs", bool, False),
        token_ids=_typed(body, "return_token_ids", bool, False),
    )


def _typed(body: Mapping[str, Any], name: str, kind: type[T], default: D) -> T | D:
    value = body.get(name, default)
    if name in body and not isinstance(value, kind):
        raise bad_request(name, f"{name} as {kind.__name__}", f"{value!r:.60}", "fix the value")
    return value


def _count(body: Mapping[str, Any], name: str, default: int, maximum: int) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise bad_request(name, f"{name} from 1 to {maximum}", f"{value!r:.60}", "fix the value")
    return value


def _labels(body: Mapping[str, Any], headers: Mapping[str, str]) -> Labels:
    """Labels from the body, from `metadata`, from headers and, for the session, from `user`; all must agree."""
    metadata = _typed(body, "metadata", dict, {})
    for name in metadata.keys() - set(_LABELS):
        raise bad_request("metadata", f"the metadata {name!r}", "no such label here", suggest(name, _LABELS))
    sources: list[Mapping[str, Any]] = [{name: body[name] for name in _LABELS if name in body}, metadata]
    sources += [{label: headers[name] for name, label in _HEADERS.items() if headers.get(name)}]
    labels: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            if name == "evaluation":
                value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
            if not isinstance(value, bool if name == "evaluation" else str) or value == "":
                raise bad_request(
                    name, f"the label {name}", f"{value!r:.60}", "send text; true or false for `evaluation`"
                )
            if labels.setdefault(name, value) != value:
                raise bad_request(name, f"one {name}", f"{labels[name]!r} and {value!r}", "send it once")
    user = _typed(body, "user", str, "")
    if user and "session" not in labels:
        labels["session"] = user
    return Labels(**labels)


def _sampling(body: Mapping[str, Any], evaluation: bool, trained: Sampling) -> Sampling:
    """How to sample: for training exactly as the config says, but for length and stop strings."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    if len(names) == 2 and body[names[0]] != body[names[1]]:
        raise bad_request(names[0], "one limit", f"{names[0]} and {names[1]} differ", "send max_completion_tokens")
    limit = trained.max_new_tokens if not names else _count(body, names[0], 1, 10**9)
    stop = body.get("stop", trained.stop)
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else ()
    if "stop" in body and not (stop and all(isinstance(text, str) and text for text in stop)):
        raise bad_request("stop", "stop strings", f"{body['stop']!r:.60}", "send a text, or a list of texts")
    temperature = _number(body, "temperature", trained.temperature, 0.0, 100.0)
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if evaluation:
        if top_p == 0:
            raise bad_request("top_p", "top_p above 0", "0", "use temperature=0 for greedy sampling")
        return replace(trained, max_new_tokens=limit, stop=stop, temperature=temperature, top_p=top_p)
    if temperature != trained.temperature:
        raise bad_request(
            "temperature",
            f"temperature {temperature} in training",
            f"this run samples at {trained.temperature}, and the trainer computes with that",
            "leave it out, set engine.sampling.temperature, or mark the request `evaluation: true`",
        )
    if top_p != 1:
        raise bad_request(
            "top_p",
            f"top_p {top_p} in training",
            "it changes the sampled distribution, and the trainer does not replay it",
            "leave it out, or mark the request `evaluation: true`",
        )
    if limit > trained.max_new_tokens:
        raise bad_request(
            names[0],
            f"{names[0]} {limit} in training",
            f"this run trains completions of {trained.max_new_tokens}",
            "ask for fewer, or raise engine.sampling.max_new_tokens",
        )
    return replace(trained, max_new_tokens=limit, stop=stop)


def _number(body: Mapping[str, Any], name: str, default: float, minimum: float, maximum: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise bad_request(name, f"{name} from {minimum} to {maximum}", f"{value!r:.60}", "fix the value")
    return float(value)


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise bad_request("messages", "a list of messages", f"{value!r:.60}", "send at least one {role, content}")
    messages = tuple(_message(entry, number) for number, entry in enumerate(value))
    if messages[-1].role == "assistant":
        raise bad_request(
            "messages",
            "messages that end before the assistant's turn",
            "the last message is the assistant's",
            "end with another role: a completion cannot be continued",
        )
    return messages


def _message(entry: object, number: int) -> Message:
    where = f"messages[{number}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise bad_request(where, "a message {role, content}", f"{entry!r:.60}", "send a role and a content")
    for name, value in entry.items():
        if name not in ("role", "content") and value not in (None, [], {}):
            raise bad_request(
                f"{where}.{name}", f"a message with {name}", f"{value!r:.60}", "send role and content only"
            )
    return Message(entry["role"], _text(entry.get("content"), where))


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise bad_request(
            f"{where}.content", "text", f"{content!r:.60}", "send text: this policy supports nothing else"
        )
    return "".join(str(part.get("text", "")) for part in parts)


@dataclass(frozen=True, slots=True)
class Feedback:
    """One call of `/feedback`: it ends one or more trajectories."""

    ids: tuple[str, ...]
    """Completions whose trajectories end."""
    session: str
    task_id: str
    rewards: Mapping[str, float]
    """Empty: only the config's reward functions compute rewards."""
    failure: str
    """Why the rollout failed; recorded and counted, never scored."""
    columns: Mapping[str, Any]


_FEEDBACK = frozenset({"id", "ids", "session", "task_id", "reward", "rewards", "failure", "columns"})


def read_feedback(body: Mapping[str, Any]) -> Feedback:
    """The feedback in a body. Raises RequestError."""
    body = {name: value for name, value in body.items() if value is not None}
    for name in body.keys() - _FEEDBACK:
        raise bad_request(name, f"the parameter {name!r}", "no such parameter here", suggest(name, _FEEDBACK))
    ids = [body["id"]] if "id" in body else _typed(body, "ids", list, [])
    session = _typed(body, "session", str, "")
    if not all(isinstance(completion, str) for completion in ids) or bool(ids) == bool(session):
        raise bad_request(
            "ids",
            "feedback for completions or for a session",
            f"ids {ids!r:.60}, session {session!r}",
            "send `ids` (of completions) or `session`, one of the two",
        )
    if len(body.keys() & {"reward", "rewards", "failure"}) > 1:
        raise bad_request("reward", "one of reward, rewards and failure", "more of them", "send one")
    rewards = {"reward": body["reward"]} if "reward" in body else _typed(body, "rewards", dict, {})
    for name, value in rewards.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad_request("rewards", f"a finite number for {name!r}", f"{value!r:.60}", "send a number")
    return Feedback(
        tuple(ids),
        session,
        _typed(body, "task_id", str, ""),
        {name: float(value) for name, value in rewards.items()},
        _typed(body, "failure", str, ""),
        _typed(body, "columns", dict, {}),
    )
