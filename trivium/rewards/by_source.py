"""The grader of a task by its `data_source`, under the names that published datasets use."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from trivium.config import RewardConfig
from trivium.errors import DataError
from trivium.processes.isolated import Isolated, require
from trivium.rewards.functions import gsm8k_score, last_tag
from trivium.rewards.graders.mathematics import last_boxed, math_boxed, math_dapo, same_math, stated_answer
from trivium.rewards.graders.programs import program_score
from trivium.rewards.sandbox import Limits, Sandbox

Score = float | dict[str, Any]
"""A number, or a dict whose `score` is the number and whose other entries are details."""

_CPU_S = 10


@dataclass(frozen=True, slots=True)
class GraderLimits:
    """Resource limits of the graders that run or evaluate something."""

    cpu_s: int = _CPU_S
    memory_mb: int = 1024
    without: tuple[str, ...] = ()

    def sandbox(self) -> Sandbox:
        return _sandbox(self)


@functools.lru_cache(maxsize=8)
def _sandbox(limits: GraderLimits) -> Sandbox:
    return Sandbox(Limits(limits.cpu_s, 3.0 * limits.cpu_s, limits.memory_mb << 20), limits.without)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    *,
    memory_limit_mb: int | None = None,
    limits: GraderLimits | None = None,
) -> Score:
    """The score of a completion by the grader of its `data_source` (docs/extend-rewards.md lists them).

    A number or `{"score": number, ...}`. Raises DataError for a data source without a grader and for a ground truth
    that its grader cannot read; MissingPackage if math-verify is needed and not installed; RewardError if grading takes
    too long. `memory_limit_mb` and `limits` bound programs.
    """
    del extra_info
    limits = limits or GraderLimits()
    if memory_limit_mb is not None:
        limits = GraderLimits(limits.cpu_s, memory_limit_mb, limits.without)
    return grader_of(data_source)(solution_str, ground_truth, limits)


def grader_of(data_source: str) -> Callable[[str, object, GraderLimits], Score]:
    """The grader of a data source. Raises DataError, which lists the data sources that have one."""
    for name, grader in GRADERS.items():
        if data_source == name or (name.endswith("*") and data_source.startswith(name[:-1])):
            return grader
    raise DataError(
        f"a scorer for the data source {data_source!r}",
        f"there are scorers for {', '.join(GRADERS)}",
        "write one of these in `data_source`, or give your own function (`custom_reward_function`, a reward by path)",
    )


# --------------------------------------------------------------------------- graders


def _gsm8k(text: str, truth: object, limits: GraderLimits) -> float:
    return gsm8k_score(text, str(truth))


def _math(text: str, truth: object, limits: GraderLimits) -> float:
    return float(math_boxed(text, str(truth)))


def _math_dapo(text: str, truth: object, limits: GraderLimits) -> Score:
    return math_dapo(text, str(truth))


def _boxed_or_verified(text: str, truth: object, limits: GraderLimits) -> float:
    """Compares the last box, or the last statement of a completion without one, as it is written, then by computing."""
    boxed = last_boxed(text)
    answer = stated_answer(text) if boxed is None else boxed
    if same_math(answer, str(truth)):
        return 1.0
    return _math_verify(text, truth, limits) or float(
        boxed is None and _math_verify(f"\\boxed{{{answer}}}", truth, limits)
    )


def _math_verify(text: str, truth: object, limits: GraderLimits) -> float:
    require("math_verify", "math-verify", "math", "score mathematics written in another form")
    return _verifier(limits.cpu_s)(completion=text, answer=str(truth))


@functools.cache
def _verifier(cpu_s: int) -> Isolated:
    return Isolated("trivium.rewards.graders.packages:math_verify", cpu_s)


_ACCURACY, _FORMAT = 0.9, 0.1


def _geometry(text: str, truth: object, limits: GraderLimits) -> float:
    """0.9 for the boxed answer, 0.1 for `<think>` tags before it."""
    boxed = last_boxed(text)
    right = boxed is not None and (
        same_math(boxed, str(truth)) or _math_verify(f"\\boxed{{{boxed}}}", truth, limits) == 1
    )
    return _ACCURACY * right + _FORMAT * _thought(text)


def _thought(text: str) -> bool:
    """Whether the text is `<think>...</think>...\\boxed{...}...`, from its first character."""
    _, closing, rest = text.partition("</think>")
    _, box, rest = rest.partition("\\boxed{")
    return text.startswith("<think>") and bool(closing and box) and "}" in rest


def _program(text: str, truth: object, limits: GraderLimits) -> float:
    return program_score(text, truth, limits.sandbox())


def _exact_answer(text: str, truth: object, limits: GraderLimits) -> float:
    """1 if the content of the last `<answer>` is one of the accepted answers."""
    accepted = truth.get("target") if isinstance(truth, Mapping) else truth
    tolist = getattr(accepted, "tolist", None)
    accepted = accepted if tolist is None else tolist()
    accepted = [accepted] if isinstance(accepted, str) else accepted
    if not isinstance(accepted, list | tuple) or not accepted:
        raise DataError("a ground truth with accepted answers", repr(truth)[:80], "give {target: [text, ...]}")
    answered = last_tag(text, "answer")
    return float(answered is not None and _words(answered) in [_words(str(answer)) for answer in accepted])


def _words(text: str) -> list[str]:
    """The words without case, punctuation and articles (SQuAD, Rajpurkar et al. 2016)."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


GRADERS: Mapping[str, Callable[[str, object, GraderLimits], Score]] = {
    "openai/gsm8k": _gsm8k,
    "lighteval/MATH": _math,
    "DigitalLearningGmbH/MATH-lighteval": _math,
    "HuggingFaceH4/MATH-500": _math,
    "math_dapo": _math_dapo,
    "math": _math_dapo,
    "math_dapo_reasoning": _math_dapo,
    "aime*": _math_dapo,
    "math_verify": _math_verify,
    "numina_*": _boxed_or_verified,
    "hiyouga/geometry3k": _geometry,
    "codecontests": _program,
    "apps": _program,
    "codeforces": _program,
    "taco": _program,
    "searchR1_*": _exact_answer,
}
"""Data source -> grader. A name that ends in `*` stands for all names with that beginning."""


class BySource:
    """The score by the grader of the task's column `data_source`, against `reward_model.ground_truth` (or `answer`)."""

    class Config(RewardConfig):
        kind: str = "by_source"
        cpu_limit_s: int = Field(default=_CPU_S, ge=1)
        """CPU seconds of one test of a program, or of one expression that is verified."""
        memory_limit_mb: int = Field(default=1024, ge=64)
        """Memory of a program, in MiB."""
        sandbox_without: tuple[str, ...] = ()
        """Limits that programs may run without, if this machine cannot enforce them: `memory`, `files`, `network`,
        `processes`. If any other limit cannot be enforced, no program runs."""

    def __init__(self, config: Config) -> None:
        self._limits = GraderLimits(config.cpu_limit_s, config.memory_limit_mb, config.sandbox_without)
        if config.sandbox_without:
            self._limits.sandbox()  # reports an unknown name now

    def __call__(
        self, prompt: str, completion: str, data_source: str, reward_model: object = None, answer: object = None
    ) -> float:
        truth = reward_model["ground_truth"] if isinstance(reward_model, Mapping) else answer
        if truth is None:
            raise DataError(
                f"a ground truth of a task from {data_source!r}",
                "neither `reward_model.ground_truth` nor `answer`",
                "map a column to one of these names in the task source",
            )
        score = default_compute_score(data_source, completion, truth, limits=self._limits)
        return score["score"] if isinstance(score, dict) else score
