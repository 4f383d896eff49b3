"""Reads requests for rewards and writes the responses, in every form of `trivium.rewards.remote_forms`. An unknown key,
a list of another length and a query without its prompt are errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivium.errors import DataError, described
from trivium.registry import suggest
from trivium.rewards.remote_forms import Protocol, RemoteScore, Scored
from trivium.serving.bodies import bad_request
from trivium.tasks.pictures import Reader, image_reader, read_content, row_images, with_leading
from trivium.types import Media, Message, Task

_KEYS: Mapping[Protocol, str] = {"trivium": "samples", "lightrft": "queries", "openrlhf": "query"}
"""The key that identifies a form."""
_OF_QUERIES = frozenset({"prompts", "labels", "references", "images"})
_OF_SAMPLES = frozenset({"messages", "completion", "columns", "images"})
_READ: Reader = image_reader(None)


@dataclass(frozen=True, slots=True)
class WantedReward:
    """One completion to score."""

    task: Task
    completion: str
    query: str | None = None
    """The whole text, in the forms that send one."""


def read_request(body: Mapping[str, Any], *, whole: bool = False) -> tuple[Protocol, list[WantedReward]]:
    """The form of a request, and its samples. `whole`: queries are scored as they are, so prompts may be left out.

    Raises RequestError.
    """
    protocols: list[Protocol] = [protocol for protocol, key in _KEYS.items() if key in body]
    if len(protocols) != 1:
        keys = ", ".join(map(repr, body)) or "none"
        wanted = "samples (trivium), queries (lightrft) or query (openrlhf)"
        raise bad_request("", f"one of {wanted}", f"the keys {keys:.200}", "send one of these forms")
    protocol = protocols[0]
    key = _KEYS[protocol]
    _refuse_unknown(body, {key} if protocol == "trivium" else {key, *_OF_QUERIES}, "")
    entries = _list(body, key)
    if not entries:
        raise bad_request(key, f"{key} to score", "an empty list", "send at least one")
    try:
        if protocol == "trivium":
            return protocol, [_sample(entry, f"samples[{n}]") for n, entry in enumerate(entries)]
        return protocol, _queries(body, key, entries, whole)
    except DataError as error:  # of an image
        raise bad_request(key, error.asked, error.found, error.do) from error


def _sample(entry: object, where: str) -> WantedReward:
    if not isinstance(entry, dict):
        raise bad_request(where, "a sample", described(entry), "send {messages, completion, columns, images}")
    _refuse_unknown(entry, _OF_SAMPLES, where)
    completion, columns = entry.get("completion"), entry.get("columns") or {}
    if not isinstance(completion, str):
        raise bad_request(f"{where}.completion", "a completion", described(completion), "send text")
    if not isinstance(columns, dict):
        raise bad_request(f"{where}.columns", "columns by name", described(columns), "send an object")
    messages = entry.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"{where}.messages", "messages", described(messages), "send a list of {role, content}")
    images = row_images(entry.get("images"), f"{where}.images", _READ)
    read = tuple(_message(message, f"{where}.messages[{n}]", images) for n, message in enumerate(messages))
    return WantedReward(Task(where, with_leading(read, images, where), columns), completion)


def _message(entry: object, where: str, images: list[Media]) -> Message:
    """A message; each `<image>` in its text takes the next of the images."""
    role = entry.get("role") if isinstance(entry, dict) else None
    content = entry.get("content") if isinstance(entry, dict) else None
    read = read_content(content, f"{where}.content", _READ, images or None)
    if not isinstance(role, str) or read is None:
        raise bad_request(where, "a message", described(entry), "send {role, content}, both text")
    return Message(role, read.content, read.media)


def _queries(body: Mapping[str, Any], key: str, queries: Sequence[object], whole: bool) -> list[WantedReward]:
    """The samples of the forms that send lists. `labels` become the column `label`, and `references` the column
    `reference`. The column `answer` is the label in OpenRLHF's form and the reference in LightRFT's, or the other one
    if that is null or missing."""
    columns = {n: _list(body, n, len(queries)) for n in _OF_QUERIES if body.get(n) is not None}
    prompts, images = columns.get("prompts"), columns.get("images", [None] * len(queries))
    if prompts is None and not whole:
        do = f"send the prompt of each query: rewards read the text after it in {key}"
        raise bad_request("prompts", f"prompts of {len(queries)} {key}", "none", do)
    wanted: list[WantedReward] = []
    for place, query in enumerate(queries):
        where, prompt = f"{key}[{place}]", "" if prompts is None else prompts[place]
        if not isinstance(query, str) or not isinstance(prompt, str):
            wrong = query if isinstance(prompt, str) else prompt
            raise bad_request(where, f"{key} and prompts of text", described(wrong), "send text")
        padding, holds, completion = query.partition(prompt) if prompt else ("", "all of it", query)
        if not holds and not whole:
            do = "send the query with its whole prompt in it"
            raise bad_request(where, "a query that contains its prompt", described(query), do)
        del padding
        media = tuple(row_images(images[place], f"images[{place}]", _READ))
        label, reference = (columns[name][place] if name in columns else None for name in ("labels", "references"))
        answers = (label, reference) if key == "query" else (reference, label)
        answer = next((value for value in answers if value is not None), None)
        own = {"answer": answer, "label": label, "reference": reference}
        own = {name: value for name, value in own.items() if value is not None}
        task = Task(where, (Message("user", prompt, media),), own)
        wanted.append(WantedReward(task, completion, query))
    return wanted


def _list(body: Mapping[str, Any], key: str, count: int | None = None) -> list[Any]:
    value = body[key]
    if not isinstance(value, list):
        raise bad_request(key, f"a list under {key}", described(value), "send a list with one entry per sample")
    if count is not None and len(value) != count:
        raise bad_request(key, f"{count} {key}", f"{len(value)} of them", "send lists of one length, in the same order")
    return value


def _refuse_unknown(body: Mapping[str, Any], known: frozenset[str] | set[str], where: str) -> None:
    for name in body.keys() - known:
        raise bad_request(f"{where}.{name}".lstrip("."), f"the key {name!r:.80}", "no such key", suggest(name, known))


def response(protocol: Protocol, results: Sequence[Scored]) -> dict[str, Any]:
    """The JSON body with the results of the samples. In the other trainers' forms, a sample without a reward has null,
    and its entry in `errors` says why."""
    if protocol == "trivium":
        return {"results": [_entry(result) for result in results]}
    rewards = [result.reward if isinstance(result, RemoteScore) else None for result in results]
    body: dict[str, Any] = {"rewards": rewards}
    if protocol == "openrlhf":
        names = sorted({name for result in results if isinstance(result, RemoteScore) for name in result.metrics})
        logs = {n: [r.metrics.get(n, 0.0) if isinstance(r, RemoteScore) else 0.0 for r in results] for n in names}
        body |= {"scores": rewards, "extra_logs": logs}
    if any(reward is None for reward in rewards):
        body["errors"] = [result if isinstance(result, str) else None for result in results]
    return body


def _entry(result: Scored) -> dict[str, Any]:
    if isinstance(result, RemoteScore):
        return {"reward": result.reward, "metrics": dict(result.metrics)}
    return {"error": result}
