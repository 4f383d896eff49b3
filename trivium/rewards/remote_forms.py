"""The forms of requests to a reward service and of its responses, as JSON values.

`trivium` is documented in docs/remote-rewards.md; `lightrft` and `openrlhf` are the forms of those trainers' reward
servers. No reward is guessed: a response of another form is an error of all samples of the request, and a value that is
not a finite number is an error of its sample.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trivium.foundation.errors import described, text_of
from trivium.models.vision.images import as_seen, decoded, opened
from trivium.policy import finite_number
from trivium.processes.isolated import require
from trivium.types import Media

Protocol = Literal["trivium", "lightrft", "openrlhf"]
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class RemoteSample:
    """One completion to score, with all that a protocol may send."""

    prompt: str
    """The prompt as text: the last user message, or all messages in a chat template."""
    completion: str
    query: str = ""
    """Prompt and completion as one text; if empty, `prompt + completion`."""
    messages: Sequence[Mapping[str, str]] = ()
    """The prompt as {role, content}; if empty, one user message with `prompt`."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's other columns (JSON values)."""
    label: Any = None
    reference: Any = None
    images: Sequence[Media] = ()
    """The images of the prompt, in order."""


@dataclass(frozen=True, slots=True)
class RemoteScore:
    """The score of one sample."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers: OpenRLHF's `scores` (as `score`) and `extra_logs`, the `metrics` of `trivium`."""


class FormError(ValueError):
    """A response that does not have the protocol's form."""

    def __init__(self, received: str, wanted: str) -> None:
        super().__init__(f"{received}, where {wanted} is wanted")


Scored = RemoteScore | str
"""The score of a sample, or why it has none."""


def request(protocol: Protocol, samples: Sequence[RemoteSample]) -> dict[str, Any]:
    """The JSON body that asks for the rewards of samples. Raises MissingPackage for images without pillow."""
    return _FORMS[protocol][0](samples)


def scores(protocol: Protocol, value: object, count: int) -> list[Scored]:
    """The scores of `count` samples in a response. Raises FormError."""
    if not isinstance(value, dict):
        raise FormError(described(value), "a JSON object")
    return _FORMS[protocol][1](value, count)


# --------------------------------------------------------------------------- requests


def _request_trivium(samples: Sequence[RemoteSample]) -> dict[str, Any]:
    return {
        "samples": [
            {
                "messages": [dict(m) for m in sample.messages] or [{"role": "user", "content": sample.prompt}],
                "completion": sample.completion,
                "columns": dict(sample.columns),
                "images": [f"data:{image.mime};base64,{_base64(image.data)}" for image in map(seen, sample.images)],
            }
            for sample in samples
        ]
    }


def _request_lightrft(samples: Sequence[RemoteSample]) -> dict[str, Any]:
    body: dict[str, Any] = {"queries": _queries(samples), "prompts": [sample.prompt for sample in samples]}
    if any(sample.reference is not None for sample in samples):
        body["references"] = [sample.reference for sample in samples]
    if any(sample.images for sample in samples):
        body["images"] = [[_base64(jpeg(image)) for image in s.images] or None for s in samples]
    return body


def _request_openrlhf(samples: Sequence[RemoteSample]) -> dict[str, Any]:
    prompts, labels = [sample.prompt for sample in samples], [sample.label for sample in samples]
    return {"query": _queries(samples), "prompts": prompts, "labels": labels}


def _queries(samples: Sequence[RemoteSample]) -> list[str]:
    return [sample.query or sample.prompt + sample.completion for sample in samples]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@functools.lru_cache(maxsize=32)  # the members of a group have the same images
def jpeg(image: Media) -> bytes:
    """The image as JPEG, as the policy sees it; the bytes of an upright JPEG are unchanged."""
    image = seen(image)
    if image.mime == "image/jpeg":
        return image.data
    written = io.BytesIO()
    with opened(image):  # errors of the encoder become DataErrors: JPEG holds at most 65,500 columns
        decoded(image).save(written, format="JPEG", quality=95)
    return written.getvalue()


def seen(image: Media) -> Media:
    """An image as the policy sees it (`as_seen`). Raises MissingPackage without pillow."""
    require("PIL", "pillow", "vision", "send images to a reward")
    return as_seen(image)


# --------------------------------------------------------------------------- responses


def _scores_trivium(value: Mapping[str, Any], count: int) -> list[Scored]:
    return [_entry(entry) for entry in _one_each(value, "results", count)]


def _entry(entry: object) -> Scored:
    if not isinstance(entry, dict) or not ({"reward", "error"} & entry.keys()):
        return f"{described(entry)} where {{reward}} or {{error}} is wanted"
    if "error" in entry:
        return f"the service answered: {text_of(entry['error'], _SHOWN)}"
    metrics = entry.get("metrics", {})
    if not isinstance(metrics, dict):
        return f"metrics: {described(metrics)}, expected a mapping"
    return _score(entry["reward"], metrics)


def _scores_lightrft(value: Mapping[str, Any], count: int) -> list[Scored]:
    return [_score(reward, {}) for reward in _one_each(value, "rewards", count)]


def _scores_openrlhf(value: Mapping[str, Any], count: int) -> list[Scored]:
    rewards, columns = _one_each(value, "rewards", count), dict[str, Sequence[Any]]()
    if value.get("scores") is not None:
        columns["score"] = _one_each(value, "scores", count)
    logs = value.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise FormError(f"extra_logs: {described(logs)}", "a mapping from name to one number per sample")
    columns |= {name: _one_each(logs, name, count) for name in logs}
    return [_score(reward, {n: column[i] for n, column in columns.items()}) for i, reward in enumerate(rewards)]


def _one_each(value: Mapping[str, Any], key: str, count: int) -> Sequence[Any]:
    """The list under a key, with one entry for each sample. For a single sample, a number alone is accepted."""
    if key not in value:
        raise FormError(f"the keys {', '.join(map(repr, value)) or 'none'}", f"{key!r}")
    entries = value[key]
    if count == 1 and isinstance(entries, int | float):
        return [entries]
    if not isinstance(entries, list):
        raise FormError(f"{key}: {described(entries)}", "a list")
    if len(entries) != count:
        raise FormError(f"{len(entries)} {key} for {count} samples", "one for each, in their order")
    return entries


def _score(reward: object, metrics: Mapping[str, Any]) -> Scored:
    if isinstance(reward, bool):
        return f"{described(reward)}, expected a number"
    try:
        return RemoteScore(finite_number(reward), {name: finite_number(number) for name, number in metrics.items()})
    except ValueError as error:
        return str(error)


_FORMS: dict[
    Protocol,
    tuple[Callable[[Sequence[RemoteSample]], dict[str, Any]], Callable[[Mapping[str, Any], int], list[Scored]]],
] = {
    "trivium": (_request_trivium, _scores_trivium),
    "lightrft": (_request_lightrft, _scores_lightrft),
    "openrlhf": (_request_openrlhf, _scores_openrlhf),
}
