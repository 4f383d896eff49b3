"""Scores that a language model writes: a generative judge behind any endpoint that OpenAI's clients can call."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from trivium.clients.chat import image_part, read_text
from trivium.clients.http import EndpointClient, EndpointError
from trivium.config import RunConfig
from trivium.config.fields import changeable
from trivium.foundation.concurrency import gather_or_cancel
from trivium.foundation.errors import Problem
from trivium.policy import finite_number
from trivium.rewards.batcher import Batcher
from trivium.rewards.functions import RegularExpression
from trivium.rewards.remote import HttpRewardConfig
from trivium.rewards.remote_forms import seen
from trivium.types import Capabilities, Media

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN_FIELDS = ("prompt", "completion", "conversation")
"""Fields of a template that are not columns of the task."""
_THINKING = re.compile(r"(?s)^.*</think>")
_BEFORE = re.compile(r"(?:\d[.,'’_/]?|[\d.]e[-+]?|(?<!\w)[-+−.])$", re.IGNORECASE)
"""What makes the digits after it a part of another number: `8,` or a sign."""
_AFTER = re.compile(r"[*_`]*(?:[^\W_]|[.,'’]\d|[ \t]*[-–—+−×^:~/*]+[ \t]*\d|[ \t]+(?:(?:to|or|and)[ \t]+)?\d)")
"""What follows the beginning of a number or of a range: `,5`, ` to 8`."""
_OUT_OF = re.compile(r"[*_`]*[ \t]*(?:(?:/|out of|of)[ \t*_`]*(\d+(?:\.\d+)?)(?![\d.,]*\d)|%)", re.IGNORECASE)
"""The largest score after a score: `/ 10`, `out of 10`, `%`."""


class UnreadableVerdict(EndpointError):
    """A judge wrote no score, or one out of its range."""


class GenerativeJudge:
    """The score in a language model's verdict on the completion; for several verdicts, their mean or majority.

    A verdict without a readable number is an error of the trajectory, never a score. Requests have the retries and
    bounds of `kind: remote`.
    """

    capabilities = Capabilities(remote=True)

    class Config(HttpRewardConfig):
        kind: str = "generative_judge"
        model: str
        """The name of the model at the endpoint. `urls` are its base URLs (http://host:8000/v1): `/chat/completions` is
        appended."""
        template: str = changeable(
            "Judge the answer to the question.\n\nQuestion:\n{prompt}\n\nAnswer:\n{completion}\n\n"
            "Explain in a few words, then end with a line `Score: n`, n a whole number from 0 (wrong) to 10 (right)."
        )
        """The user message. `{prompt}` is the last user message, `{completion}` the completion, `{conversation}` the
        whole prompt, a line for each message, `{answer}` or another name the task's column. Other braces are kept."""
        system: str = changeable("")
        """The system message; empty sends none."""
        pattern: RegularExpression = changeable(
            r"(?i)\b(?:max(?:imum)?|min(?:imum)?|perfect|full|possible|best|top|highest|lowest)[ -]score\b"
            r"|(?:^|(?<=[\W_]))score[*_\s]*[:=]\s*[*_]*\s*([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)"
        )
        """A Python regular expression: the score is the first group (without one, the match) of its matches, behind the
        last `</think>`. The last line with a score counts, matches without the group do not. A number that is only
        read in part (`8` of `8,5`), two scores in that line, and `7/5` with another `max_score` are errors."""
        json_key: str | None = changeable(None)
        """The key of the score in the last JSON object that has it, in place of `pattern`. Of nested objects, the
        outermost one with the key counts."""
        choices: dict[str, float] = changeable({})
        """The score for each verdict text (`{yes: 1, no: 0}`), regardless of case; empty reads numbers."""
        min_score: float = changeable(0.0)
        """The lowest score, which becomes 0; a lower one is an error."""
        max_score: float = changeable(10.0)
        """The highest score, which becomes 1; a higher one is an error."""
        samples: int = changeable(1, ge=1)
        """Verdicts per completion. Each one is a separate request."""
        aggregate: Literal["mean", "majority"] = changeable("mean")
        """The score of several verdicts: their mean, or the most frequent one (the lowest of equally frequent ones)."""
        temperature: float = changeable(0.0, ge=0)
        """Temperature of the judge; 0 is greedy."""
        max_tokens: int = changeable(512, ge=1)
        """Largest length of a verdict, in tokens; a verdict that is cut off is an error."""
        seed: int = changeable(0)
        """Seed of the first sample's request; the next requests get the numbers that follow."""
        images: bool = changeable(False)
        """Sends the prompt's images before the text."""
        extra_body: dict[str, Any] = changeable({})
        """Further keys of the request, for example `{chat_template_kwargs: {enable_thinking: false}}` for vLLM; null
        leaves a key out (`{seed: null}`, for an endpoint that refuses it)."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            if "completion" not in _FIELD.findall(self.template):
                do = "write {completion} in the template"
                yield Problem(f"{where}.template", "a template with the completion", "no {completion}", do)
            if self.samples > 1 and not self.temperature:
                found, do = f"{self.samples} samples at temperature 0", "set temperature, or leave samples out"
                yield Problem(f"{where}.samples", "several verdicts", found, do)
            if not self.min_score < self.max_score:
                found, do = f"{self.min_score:g} to {self.max_score:g}", "set min_score below max_score"
                yield Problem(f"{where}.max_score", "a range of scores", found, do)

    def __init__(self, config: Config) -> None:
        """Raises ConfigError without a token."""
        self._config, self._pattern = config, re.compile(config.pattern)
        self._client = EndpointClient(config, "/chat/completions", what="rewards")
        self._choices = {text.casefold(): number for text, number in config.choices.items()}
        self._ask = Batcher(self._verdicts, 1, 0.0, config.max_concurrent)  # batches of one: limits the concurrency
        fields = (*_FIELD.findall(config.template), *_FIELD.findall(config.system))
        columns = [name for name in dict.fromkeys(fields) if name not in _OWN_FIELDS]
        names = ("prompt", "completion", "prompt_messages", "prompt_media", *columns)
        # `trivium.rewards.judge` reads the signature, and passes the columns that the template names.
        self.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_messages: Sequence[Mapping[str, str]],
        prompt_media: Sequence[Media],
        **columns: Any,
    ) -> float:
        """Raises EndpointError."""
        config = self._config
        conversation = "\n".join(f"{message['role']}: {message['content']}" for message in prompt_messages)
        fields = {**columns, "prompt": prompt, "completion": completion, "conversation": conversation}
        messages = await asyncio.to_thread(self._messages, fields, prompt_media)  # it may encode images
        bodies = [self._body(messages, config.seed + number) for number in range(config.samples)]
        return self._aggregated(await gather_or_cancel(self._ask(body) for body in bodies))

    def _messages(self, fields: Mapping[str, Any], media: Sequence[Media]) -> list[dict[str, Any]]:
        text: Any = _filled(self._config.template, fields)
        if self._config.images and media:
            text = [*map(image_part, map(seen, media)), {"type": "text", "text": text}]
        system = _filled(self._config.system, fields)
        return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]

    def _body(self, messages: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
        config = self._config
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens, "seed": seed}
        body = {"model": config.model, "messages": [*messages], **sampling, **config.extra_body}
        return {name: value for name, value in body.items() if value is not None}

    async def _verdicts(self, bodies: list[dict[str, Any]]) -> list[float]:
        return [self._verdict(*await self._client.post(body)) for body in bodies]

    def _verdict(self, url: str, value: Any) -> float:
        """The score in a response, from 0 to 1."""
        choice, text = read_text(self._client, url, value)
        if choice.get("finish_reason") == "length":
            do = "raise max_tokens, or ask for a shorter verdict"
            raise self.unreadable(url, f"a verdict cut off at {self._config.max_tokens} tokens", do)
        try:
            return self._scaled(self._score(_THINKING.sub("", text)))
        except ValueError as error:
            do = "tell the judge how to write the score, in the form that pattern, json_key and choices read"
            raise self.unreadable(url, f"{error}: {text[-160:]!r}", do) from None

    def unreadable(self, url: str, found: str, do: str) -> EndpointError:
        """The error of a verdict without a score."""
        return self._client.error(UnreadableVerdict, url, found, do)

    def _score(self, text: str) -> object:
        """The score as a verdict writes it. Raises ValueError."""
        if self._config.json_key is not None:
            return _last_under(self._config.json_key, text)
        group = 1 if self._pattern.groups else 0
        matches = [match for match in self._pattern.finditer(text) if match[group] is not None]
        if not matches:
            raise ValueError("no match of the pattern")
        if self._choices:
            return matches[-1][group]
        line = text.rfind("\n", 0, matches[-1].start(group))
        numbers = {self._number(text, match, group) for match in matches if match.start(group) > line}
        if len(numbers) > 1:
            raise ValueError("several scores in one line")
        return numbers.pop()

    def _number(self, text: str, match: re.Match[str], group: int) -> float:
        """The number of a match, if it is a whole number of the text. Raises ValueError."""
        number, (start, end) = float(match[group]), match.span(group)
        if largest := _OUT_OF.match(text, end):
            end = largest.end()
            if float(largest[1] or 100) != self._config.max_score:
                raise ValueError(f"{match[group]}{largest[0]}, and max_score is {self._config.max_score:g}")
        if _BEFORE.search(text[:start]) or _AFTER.match(text, end):
            raise ValueError(f"{match[group]!r} is a part of what is written")
        return number

    def _scaled(self, score: object) -> float:
        if self._choices:
            text = str(score).strip().casefold()
            if text not in self._choices:
                raise ValueError(f"{text[:40]!r} is none of the choices {', '.join(self._config.choices)}")
            return finite_number(self._choices[text])
        if isinstance(score, bool):
            raise ValueError(f"{score}, which is no number")
        low, high, number = self._config.min_score, self._config.max_score, finite_number(score)
        if not low <= number <= high:
            raise ValueError(f"{number:g} is not from {low:g} to {high:g}")
        return (number - low) / (high - low)

    def _aggregated(self, scores: Sequence[float]) -> float:
        if self._config.aggregate == "mean":
            return statistics.fmean(scores)
        counts = Counter(scores)
        return min(score for score in counts if counts[score] == max(counts.values()))


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """The template with its fields, replaced in one pass: braces in a completion are text."""

    def text(match: re.Match[str]) -> str:
        value = fields.get(match[1], match[0])
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _FIELD.sub(text, template)


def _last_under(key: str, text: str) -> object:
    """The value of a key in the last JSON object of a text that has it. Raises ValueError."""
    decoder, end, unclosed = json.JSONDecoder(), 0, 0
    values: list[object] = []
    for brace in re.finditer(r"[{}]", text):
        if brace.start() < end:
            continue  # inside the last object
        if brace[0] == "}":
            unclosed = max(0, unclosed - 1)
            continue
        try:
            value, end = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            unclosed += 1
            continue
        if inside := _outermost(key, value):
            if unclosed:
                raise ValueError(f"the object with {key!r} is a part of one that is no JSON")
            values = inside
    if len(values) != 1:
        raise ValueError(f"{len(values) or 'no'} JSON object(s) with {key!r} on one level")
    return values[0]


def _outermost(key: str, value: object) -> list[object]:
    """The values of a key in the outermost objects that have it: those of one level."""
    level: list[Any] = [value]
    while level:
        objects = [part for part in level if isinstance(part, dict)]
        if values := [entry[key] for entry in objects if key in entry]:
            return values
        level = [element for part in level if isinstance(part, list) for element in part]
        level += [value for entry in objects for value in entry.values()]
    return []
