"""The rewards that ship. Each is called as f(prompt, completion, columns by name) and returns a number in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from trivium.config import RewardConfig
from trivium.foundation.errors import DataError, described
from trivium.processes.isolated import Isolated, require
from trivium.rewards.accepted import AcceptedAnswer, accepted, matches, plain_number


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]
"""A key of a config that holds a Python regular expression."""


class Exact:
    """1 if the completion is the column `answer`, else 0, or partial credit."""

    brief = True

    class Config(RewardConfig):
        kind: str = "exact"
        strip: bool = True
        """Ignores white space around either text."""
        casefold: bool = False
        """Ignores upper and lower case."""
        partial_credit: float = Field(default=0.0, ge=0, lt=1)
        """The most that a wrong completion earns: this value is multiplied by the fraction of positions, up to the end
        of the longer text, at which it has the answer's character. For an evaluation that counts only correct answers,
        set `evaluation.threshold: 1`."""

    def __init__(self, config: Config) -> None:
        self.config = config

    check_columns = staticmethod(lambda columns: accepted(columns.get("answer"), booleans=True))

    def __call__(self, prompt: str, completion: str, answer: object) -> float:
        text, best = self._normal(completion), 0.0
        for accepted_answer in accepted(answer, booleans=True):
            expected = self._normal(accepted_answer.text)
            if text == expected or (accepted_answer.is_number and plain_number(text) == accepted_answer.text):
                return 1.0
            same = sum(a == b for a, b in zip(text, expected, strict=False)) if self.config.partial_credit else 0
            best = max(best, self.config.partial_credit * same / max(len(text), len(expected)))
        return best

    def normal_form(self, completion: str, columns: Mapping[str, Any]) -> str:
        """The completion as it is compared."""
        text = self._normal(completion)
        numbers = any(accepted_answer.is_number for accepted_answer in accepted(columns["answer"], booleans=True))
        return (plain_number(text) if numbers else None) or text

    def _normal(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.casefold else text


class Regex:
    """1 if the pattern matches the completion, else 0."""

    class Config(RewardConfig):
        kind: str = "regex"
        pattern: RegularExpression
        """A Python regular expression; flags as `(?s)`. It runs on whatever the policy writes: avoid nested repeats."""
        match: Literal["search", "full"] = "search"
        """`search` finds a match anywhere in the completion; `full` must match all of it."""

    def __init__(self, config: Config) -> None:
        pattern = re.compile(config.pattern)
        self._match = pattern.search if config.match == "search" else pattern.fullmatch

    def __call__(self, prompt: str, completion: str) -> float:
        return float(self._match(completion) is not None)


class Format:
    """1 if the completion is the sections in order, each tag once, with only white space around them; else 0. Tags at
    the end of the prompt count as the completion's beginning, as chat templates write `<think>`."""

    brief = True

    class Config(RewardConfig):
        kind: str = "format"
        sections: tuple[str, ...] = Field(default=("think", "answer"), min_length=1)
        """Tag names: `[think, answer]` requires `<think>...</think> <answer>...</answer>`."""

    def __init__(self, config: Config) -> None:
        self._names = config.sections
        self._tags = [tag for name in config.sections for tag in (f"<{name}>", f"</{name}>")]

    def __call__(self, prompt: str, completion: str, prompt_end: str = "") -> float:
        completion = with_opened(completion, prompt_end, self._names)
        if any(completion.count(tag) != 1 for tag in self._tags):
            return 0.0
        at = [completion.index(tag) for tag in self._tags]
        ends = [start + len(tag) for start, tag in zip(at, self._tags, strict=True)]
        outside = [completion[: at[0]], completion[ends[-1] :]]
        outside += [completion[ends[i] : at[i + 1]] for i in range(1, len(at) - 1, 2)]
        return float(at == sorted(at) and not "".join(outside).strip())


def with_opened(completion: str, prompt_end: str, names: Sequence[str]) -> str:
    """The completion after the tags of these names that its prompt ends with: sections that it opened, or wrote empty.
    A completion that writes the first of them itself is unchanged."""
    name = "|".join(map(re.escape, names))
    opened = re.search(rf"(<(?:{name})>)(?:\s*</?(?:{name})>)*\s*\Z", prompt_end)
    return completion if opened is None or completion.lstrip().startswith(opened[1]) else opened[0] + completion


GSM8K_TAIL = 300
"""Characters at the end of a completion that count in the graders of published GSM8K results."""
# Possessive: a run of commas without a digit is read once, where backtracking would read it from each of its places.
_NUMBER = r"-?[0-9.,]++"


def gsm8k_answer(
    text: str, method: Literal["strict", "flexible"] = "strict", tail: int | None = GSM8K_TAIL
) -> str | None:
    """The final number of a GSM8K solution, without thousands separators. Returns None if there is none.

    `strict` reads the number after the last `#### ` that has one, `flexible` the last number, both in the last `tail`
    characters; None: in the whole text.
    """
    numbers = re.findall(
        rf"#### ({_NUMBER})" if method == "strict" else _NUMBER, text if tail is None else text[-tail:]
    )
    number = next((number_text for number_text in reversed(numbers) if any(map(str.isdigit, number_text))), None)
    return None if number is None else _plain_number(number)


def gsm8k_score(
    text: str,
    answer: object,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    tail: int | None = GSM8K_TAIL,
) -> float:
    """1 for the answer's final number (`####` before it or not), `format_score` for another number, 0 for none."""
    answers, number = gsm8k_answers(answer), gsm8k_form(text, method, tail)
    if number is None:
        return 0.0
    return 1.0 if matches(number, answers, _final_number) else format_score


def gsm8k_answers(answer: object) -> list[AcceptedAnswer]:
    """The accepted answers. Raises DataError if no completion could end with one of them as its number."""
    answers = accepted(answer)
    forms = [_final_number(accepted_answer.text) for accepted_answer in answers]
    if not any(gsm8k_form(f"#### {form}", "strict", None) == form for form in forms):
        do = "write a number, or a solution that ends in `#### n`, and leave out rows without one"
        raise DataError("an answer that is a number", described(answer), do)
    return answers


def gsm8k_form(text: str, method: Literal["strict", "flexible"], tail: int | None) -> str | None:
    """The final number as it is compared."""
    number = gsm8k_answer(text, method, tail)
    return number and _as_number(number)


class Gsm8k:
    """1 if the final number is that of the column `answer` (a number, or a whole solution ending in `#### n`)."""

    brief = True

    class Config(RewardConfig):
        kind: str = "gsm8k"
        method: Literal["strict", "flexible"] = "strict"
        """`strict`: the number after the last `#### `; `flexible`: the last number."""
        format_score: float = 0.0
        """The reward of a wrong number. A completion without a number earns 0."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, prompt: str, completion: str, answer: object) -> float:
        return gsm8k_score(completion, answer, self.config.method, self.config.format_score, tail=None)

    check_columns = staticmethod(lambda columns: gsm8k_answers(columns.get("answer")))

    def normal_form(self, completion: str, columns: Mapping[str, Any]) -> str | None:
        """The final number."""
        return gsm8k_form(completion, self.config.method, None)


def _final_number(answer: str) -> str:
    """What follows the last `####` of an answer, as it is compared."""
    return _as_number(_plain_number(answer.rpartition("####")[2].strip()))


def _plain_number(text: str) -> str:
    return text.replace(",", "").rstrip(".")


def _as_number(text: str) -> str:
    return plain_number(text) or text


class MathVerify:
    """1 if the completion's final expression equals the column `answer` (math-verify), else 0."""

    class Config(RewardConfig):
        kind: str = "math_verify"
        cpu_limit_s: int = Field(default=10, ge=1)
        """CPU seconds per completion. A completion that takes longer fails its trajectory; its reward is not 0."""

    def __init__(self, config: Config) -> None:
        require("math_verify", "math-verify", "math", "score with kind: math_verify")
        self._score = Isolated("trivium.rewards.graders.packages:math_verify", config.cpu_limit_s)
        self._form = Isolated("trivium.rewards.graders.packages:math_form", config.cpu_limit_s)

    def __call__(self, prompt: str, completion: str, answer: object) -> float:
        return max(
            self._score(completion=completion, answer=accepted_answer.text) for accepted_answer in accepted(answer)
        )

    check_columns = staticmethod(lambda columns: accepted(columns.get("answer")))

    def normal_form(self, completion: str, columns: Mapping[str, Any]) -> str | None:
        """The final expression."""
        return self._form(completion=completion)


class ReasoningGym:
    """The score of the Reasoning Gym dataset itself, which the column `reasoning_gym` of its tasks describes:
    `{dataset: name, config: {...}, entry: {...}}`."""

    class Config(RewardConfig):
        kind: str = "reasoning_gym"
        extract: Literal["full", "tag"] = "full"
        """Where the answer is: the whole completion, or the last `<answer>...</answer>` (without one: no answer)."""
        cpu_limit_s: int = Field(default=10, ge=1)
        """CPU seconds per completion. A completion that takes longer fails its trajectory; its reward is not 0."""

    def __init__(self, config: Config) -> None:
        require("reasoning_gym", "reasoning-gym", "envs", "score with kind: reasoning_gym")
        self._tagged = config.extract == "tag"
        self._score = Isolated("trivium.rewards.graders.packages:reasoning_gym", config.cpu_limit_s)

    def __call__(self, prompt: str, completion: str, reasoning_gym: object) -> float:
        answer = last_tag(completion, "answer") if self._tagged else completion.strip()
        if not isinstance(reasoning_gym, dict) or not {"dataset", "config", "entry"} <= reasoning_gym.keys():
            raise DataError(
                "a column `reasoning_gym` with {dataset, config, entry}",
                repr(reasoning_gym)[:80],
                "use the task source `reasoning_gym`",
            )
        return self._score(
            answer=answer,
            dataset=reasoning_gym["dataset"],
            config=reasoning_gym["config"],
            entry=reasoning_gym["entry"],
        )


def last_tag(text: str, name: str) -> str | None:
    """The text in the last `<name>...</name>`. Returns None if there is none."""
    before, closing, _ = text.rpartition(f"</{name}>")
    _, opening, inside = before.rpartition(f"<{name}>")
    return inside.strip() if closing and opening else None
