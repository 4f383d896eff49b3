"""What a request says, checked: an unknown or unsupported parameter is refused, never ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trivium.errors import TriviumError
from trivium.registry import suggest
from trivium.types import Message, Sampling

_LABELS = ("task_id", "session", "reply_to", "evaluation")
"""What says where a call belongs: in the body, or in `metadata`."""
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
"""OpenAI's parameters that this endpoint does not have, and the values that ask for nothing (null is always one)."""
_WHY = {
    "tools": "the renderer writes no tools into the prompt: describe them in the system message and read calls from "
    "the text",
    "seed": "a sample is a function of the run's seed, the task, the session and the call: name those",
    "response_format": "constrained output changes the sampled distribution, and the trainer does not replay it",
    "top_logprobs": "the engine keeps the log-probability of the sampled token only",
}
_KNOWN = frozenset({
    "model", "messages", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream",
    "stream_options", "logprobs", "user", "metadata", "columns", "return_token_ids", *_LABELS, *_NEUTRAL,
})  # fmt: skip


class Refused(TriviumError):
    """A request that is answered with an error; the run goes on."""

    def __init__(
        self, status: int, asked: str, found: str, do: str, *, param: str | None = None, code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(asked, found, do)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 410: "gone_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad(param: str, asked: str, found: str, do: str, code: str | None = None) -> Refused:
    """A request that cannot mean anything here."""
    return Refused(400, asked, found, do, param=param, code=code)


@dataclass(frozen=True, slots=True)
class Labels:
    """Where a call belongs."""

    task_id: str = ""
    """Trajectories of one task form a group; empty: the hash of the first messages."""
    session: str = ""
    """The trajectory; empty: whichever conversation the messages continue, else one of its own."""
    reply_to: str = ""
    """Id of the reply that the messages go on from, where texts alone would not tell."""
    evaluation: bool = False
    """Whether to sample only: no slot, no experience, any temperature."""


@dataclass(frozen=True, slots=True)
class Ask:
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

    def no_number(name: str) -> Any:
        raise bad("", "numbers that JSON knows", name, "send finite numbers")

    try:
        body = json.loads(raw, parse_constant=no_number)
    except ValueError as error:
        raise bad("", "a JSON body", f"not JSON: {error}", "send one JSON object") from error
    if not isinstance(body, dict):
        raise bad("", "a JSON object", type(body).__name__, "send one JSON object")
    return body


def read_ask(body: Mapping[str, Any], headers: Mapping[str, str], model: str, trained: Sampling) -> Ask:
    """The call that a request makes of a policy that is trained with `trained`. Raises Refused."""
    said = {name: value for name, value in body.items() if value is not None}
    for name in said.keys() - _KNOWN:
        raise bad(name, f"the parameter {name!r}", "no such parameter here", suggest(name, _KNOWN - _NEUTRAL.keys()))
    for name in said.keys() & _NEUTRAL.keys():
        if said[name] not in _NEUTRAL[name]:
            raise bad(name, f"{name} = {said[name]!r:.60}", "this endpoint has it not", _WHY.get(name, "leave it out"))
    if said.get("model") != model:
        raise Refused(
            404, f"the model {said.get('model')!r}", f"this endpoint serves {model!r}", f"ask for model={model!r}",
            param="model", code="model_not_found",
        )  # fmt: skip
    labels = _labels(said, headers)
    stream = _typed(said, "stream", bool, False)
    options = _typed(said, "stream_options", dict, {})
    if options.keys() - {"include_usage"} or (options and not stream):
        raise bad("stream_options", f"stream_options = {options!r}", "only include_usage, with stream", "leave it out")
    return Ask(
        messages=_messages(said.get("messages")), labels=labels, sampling=_sampling(said, labels.evaluation, trained),
        n=_count(said, "n", 1, 128), columns=_typed(said, "columns", dict, None), stream=stream,
        include_usage=_typed(options, "include_usage", bool, False), logprobs=_typed(said, "logprobs", bool, False),
        token_ids=_typed(said, "return_token_ids", bool, False),
    )  # fmt: skip


def _typed(said: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = said.get(name, default)
    if name in said and not isinstance(value, kind):
        raise bad(name, f"{name} as {kind.__name__}", f"{value!r:.60}", "correct the value")
    return value


def _count(said: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = said.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise bad(name, f"{name} from 1 to {most}", f"{value!r:.60}", "correct the value")
    return value


def _labels(said: Mapping[str, Any], headers: Mapping[str, str]) -> Labels:
    """Labels from the body, from `metadata`, from headers and, for the session, from `user`; all must agree."""
    metadata = _typed(said, "metadata", dict, {})
    for name in metadata.keys() - set(_LABELS):
        raise bad("metadata", f"the metadata {name!r}", "no such label here", suggest(name, _LABELS))
    sources: list[Mapping[str, Any]] = [{name: said[name] for name in _LABELS if name in said}, metadata]
    sources += [{label: headers[name] for name, label in _HEADERS.items() if headers.get(name)}]
    found: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            if name == "evaluation":
                value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
            if not isinstance(value, bool if name == "evaluation" else str) or value == "":
                raise bad(name, f"the label {name}", f"{value!r:.60}", "send text; true or false for `evaluation`")
            if found.setdefault(name, value) != value:
                raise bad(name, f"one {name}", f"{found[name]!r} and {value!r}", "say it in one place")
    user = _typed(said, "user", str, "")
    if user and "session" not in found:
        found["session"] = user
    return Labels(**found)


def _sampling(said: Mapping[str, Any], evaluation: bool, trained: Sampling) -> Sampling:
    """How to sample: for training exactly as the config says, but for length and stop strings."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in said]
    if len(names) == 2 and said[names[0]] != said[names[1]]:
        raise bad(names[0], "one limit", f"{names[0]} and {names[1]} differ", "send max_completion_tokens")
    limit = trained.max_new_tokens if not names else _count(said, names[0], 1, 10**9)
    stop = said.get("stop", trained.stop)
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else ()
    if "stop" in said and not (stop and all(isinstance(text, str) and text for text in stop)):
        raise bad("stop", "stop strings", f"{said['stop']!r:.60}", "send a text, or a list of texts")
    temperature = _number(said, "temperature", trained.temperature, 0.0, 100.0)
    top_p = _number(said, "top_p", 1.0, 0.0, 1.0)
    if evaluation:
        if top_p == 0:
            raise bad("top_p", "top_p above 0", "0", "use temperature=0 for the likeliest reply")
        return replace(trained, max_new_tokens=limit, stop=stop, temperature=temperature, top_p=top_p)
    if temperature != trained.temperature:
        raise bad(
            "temperature", f"temperature {temperature} in training",
            f"this run samples at {trained.temperature}, and the trainer computes with that",
            "leave it out, set engine.sampling.temperature, or mark the request `evaluation: true`",
        )  # fmt: skip
    if top_p != 1:
        raise bad(
            "top_p", f"top_p {top_p} in training", "it changes the sampled distribution, and the trainer does not "
            "replay it", "leave it out, or mark the request `evaluation: true`",
        )  # fmt: skip
    if limit > trained.max_new_tokens:
        raise bad(
            names[0], f"{names[0]} {limit} in training", f"this run trains replies of {trained.max_new_tokens}",
            "ask for fewer, or raise engine.sampling.max_new_tokens",
        )  # fmt: skip
    return replace(trained, max_new_tokens=limit, stop=stop)


def _number(said: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = said.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise bad(name, f"{name} from {least} to {most}", f"{value!r:.60}", "correct the value")
    return float(value)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise bad("messages", "a list of messages", f"{value!r:.60}", "send at least one {role, content}")
    messages = tuple(_message(entry, number) for number, entry in enumerate(value))
    if messages[-1].role == "assistant":
        raise bad("messages", "messages that end where the assistant is to speak", "the last is the assistant's",
                  "end with another role: a reply cannot be continued")  # fmt: skip
    return messages


def _message(entry: Any, number: int) -> Message:
    where = f"messages[{number}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise bad(where, "a message {role, content}", f"{entry!r:.60}", "send a role and a content")
    for name, value in entry.items():
        if name not in ("role", "content") and value not in (None, [], {}):
            raise bad(f"{where}.{name}", f"a message with {name}", f"{value!r:.60}", "send role and content only")
    return Message(entry["role"], _text(entry.get("content"), where))


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise bad(f"{where}.content", "text", f"{content!r:.60}", "send text: this policy reads nothing else yet")
    return "".join(str(part.get("text", "")) for part in parts)


@dataclass(frozen=True, slots=True)
class Feedback:
    """One call of `/feedback`: the end of one or more trajectories."""

    ids: tuple[str, ...]
    """Replies whose trajectories are meant."""
    session: str
    task_id: str
    rewards: Mapping[str, float]
    """Empty: the config's reward functions judge alone."""
    failure: str
    """Why the playing failed, where it did: recorded, counted, never scored."""
    columns: Mapping[str, Any]


_FEEDBACK = frozenset({"id", "ids", "session", "task_id", "reward", "rewards", "failure", "columns"})


def read_feedback(body: Mapping[str, Any]) -> Feedback:
    """What feedback says. Raises Refused."""
    said = {name: value for name, value in body.items() if value is not None}
    for name in said.keys() - _FEEDBACK:
        raise bad(name, f"the parameter {name!r}", "no such parameter here", suggest(name, _FEEDBACK))
    ids = [said["id"]] if "id" in said else _typed(said, "ids", list, [])
    session = _typed(said, "session", str, "")
    if not all(isinstance(reply, str) for reply in ids) or bool(ids) == bool(session):
        raise bad("ids", "feedback for replies or for a session", f"ids {ids!r:.60}, session {session!r}",
                  "send `ids` (of replies) or `session`, one of the two")  # fmt: skip
    if len(said.keys() & {"reward", "rewards", "failure"}) > 1:
        raise bad("reward", "one of reward, rewards and failure", "more of them", "send one")
    rewards = {"reward": said["reward"]} if "reward" in said else _typed(said, "rewards", dict, {})
    for name, value in rewards.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad("rewards", f"a finite number for {name!r}", f"{value!r:.60}", "send a number")
    return Feedback(
        tuple(ids), session, _typed(said, "task_id", str, ""), {name: float(value) for name, value in rewards.items()},
        _typed(said, "failure", str, ""), _typed(said, "columns", dict, {}),
    )  # fmt: skip
