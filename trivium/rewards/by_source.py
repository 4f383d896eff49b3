"""The grader of a task by its `data_source`, under the names that published datasets use."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field

from trivium.config import RewardConfig
from trivium.foundation.errors import DataError
from trivium.processes.isolated import Isolated, require
from trivium.rewards.accepted import AcceptedAnswer, accepted, plain_number
from trivium.rewards.functions import GSM8K_TAIL, gsm8k_answers, gsm8k_form, gsm8k_score, last_tag, with_opened
from trivium.rewards.graders.mathematics import last_boxed, math_boxed, math_dapo, math_form, same_math, stated_answer
from trivium.rewards.graders.programs import program_score, read_tests
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


# A sandbox runs a program when it is built, to see that this machine can confine one.
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
    prompt_end: str = "",
) -> Score:
    """The score of a completion by the grader of its `data_source` (docs/extend-rewards.md lists them).

    A number or `{"score": number, ...}`. Raises DataError for a data source without a grader and for a ground truth
    that its grader cannot read; MissingPackage if math-verify is needed and not installed; RewardError if grading takes
    too long. `memory_limit_mb` and `limits` bound programs. `prompt_end` is the end of the prompt's text, which may
    open `<think>`.
    """
    del extra_info
    limits = limits or GraderLimits()
    if memory_limit_mb is not None:
        limits = GraderLimits(limits.cpu_s, memory_limit_mb, limits.without)
    grader = grader_of(data_source)
    grader.truths(ground_truth)
    text = with_opened(solution_str, prompt_end, ["think"]) if grader.reads_tags else solution_str
    return grader.score(text, ground_truth, limits)


class Grader(NamedTuple):
    """How completions of a data source are graded."""

    score: Callable[[str, object, GraderLimits], Score]
    form: Callable[[str], object] = str
    """The final answer of a completion, equal for equal answers. That of a program is its text."""
    truths: Callable[[object], object] = accepted
    """Raises DataError for a ground truth that the grader cannot compare."""
    reads_tags: bool = False
    """Whether the score depends on `<think>` tags."""


def grader_of(data_source: str) -> Grader:
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


def _boxed_or_verified(text: str, truth: object, limits: GraderLimits) -> float:
    """Compares the last box, or the last statement of a completion without one, as it is written, then by computing."""
    boxed = last_boxed(text)
    answer = _final(text)
    if same_math(answer, truth):
        return 1.0
    return _math_verify(text, truth, limits) or float(
        boxed is None and _math_verify(f"\\boxed{{{answer}}}", truth, limits)
    )


def _final(text: str) -> str:
    boxed = last_boxed(text)
    return stated_answer(text) if boxed is None else boxed


def _math_verify(text: str, truth: object, limits: GraderLimits) -> float:
    require("math_verify", "math-verify", "math", "score mathematics written in another form")
    return max(_verifier(limits.cpu_s)(completion=text, answer=answer.text) for answer in accepted(truth))


@functools.cache
def _verifier(cpu_s: int, function: str = "math_verify") -> Isolated:
    return Isolated(f"trivium.rewards.graders.packages:{function}", cpu_s)


_ACCURACY, _FORMAT = 0.9, 0.1


def _geometry(text: str, truth: object, limits: GraderLimits) -> float:
    """0.9 for the boxed answer, 0.1 for `<think>` tags before it."""
    boxed = last_boxed(text)
    is_correct = boxed is not None and (
        same_math(boxed, truth) or _math_verify(f"\\boxed{{{boxed}}}", truth, limits) == 1
    )
    return _ACCURACY * is_correct + _FORMAT * _thought(text)


def _thought(text: str) -> bool:
    """Whether the text is `<think>...</think>...\\boxed{...}...`, from its first character."""
    _, closing, rest = text.partition("</think>")
    _, box, rest = rest.partition("\\boxed{")
    return text.startswith("<think>") and bool(closing and box) and "}" in rest


def _program(text: str, truth: object, limits: GraderLimits) -> float:
    return program_score(text, truth, limits.sandbox())


def _exact_answer(text: str, truth: object, limits: GraderLimits) -> float:
    """1 if the content of the last `<answer>` is one of the accepted answers."""
    answers, answered = _targets(truth), last_tag(text, "answer")
    if answered is None:
        return 0.0
    number, words = plain_number(answered), _words(answered)
    return float(
        any(
            number == accepted_answer.text if accepted_answer.is_number else words == _words(accepted_answer.text)
            for accepted_answer in answers
        )
    )


def _targets(truth: object) -> list[AcceptedAnswer]:
    """The accepted answers of a ground truth. Raises DataError."""
    return accepted(truth.get("target") if isinstance(truth, Mapping) else truth)


def _words(text: str) -> str:
    """The words in lower case, without punctuation and articles (SQuAD, Rajpurkar et al. 2016)."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


_MATH = Grader(lambda text, truth, _: float(math_boxed(text, truth)), lambda text: math_form(last_boxed(text) or ""))
_MATH_DAPO = Grader(lambda text, truth, _: math_dapo(text, truth), lambda text: math_dapo(text, "")["pred"])
_PROGRAM = Grader(_program, truths=read_tests)

GRADERS: Mapping[str, Grader] = {
    "openai/gsm8k": Grader(
        lambda text, truth, _: gsm8k_score(text, truth),
        lambda text: gsm8k_form(text, "strict", GSM8K_TAIL),
        gsm8k_answers,
    ),
    "lighteval/MATH": _MATH,
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "math_dapo": _MATH_DAPO,
    "math": _MATH_DAPO,
    "math_dapo_reasoning": _MATH_DAPO,
    "aime*": _MATH_DAPO,
    "math_verify": Grader(_math_verify, lambda text: _verifier(_CPU_S, "math_form")(completion=text)),
    "numina_*": Grader(_boxed_or_verified, lambda text: math_form(_final(text))),
    "hiyouga/geometry3k": Grader(_geometry, _MATH.form, reads_tags=True),
    "codecontests": _PROGRAM,
    "apps": _PROGRAM,
    "codeforces": _PROGRAM,
    "taco": _PROGRAM,
    "searchR1_*": Grader(_exact_answer, lambda text: _words(last_tag(text, "answer") or ""), truths=_targets),
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
        self,
        prompt: str,
        completion: str,
        data_source: str,
        reward_model: object = None,
        answer: object = None,
        prompt_end: str = "",
    ) -> float:
        truth = _truth(data_source, reward_model, answer)
        score = default_compute_score(data_source, completion, truth, limits=self._limits, prompt_end=prompt_end)
        return score["score"] if isinstance(score, dict) else score

    @staticmethod
    def check_columns(columns: Mapping[str, Any]) -> None:
        """Raises DataError for columns that no grader can compare with a completion."""
        source = columns["data_source"]
        grader_of(source).truths(_truth(source, columns.get("reward_model"), columns.get("answer")))

    def normal_form(self, completion: str, columns: Mapping[str, Any]) -> object:
        """The final answer, as the grader of the data source reads it."""
        return grader_of(columns["data_source"]).form(completion)


def _truth(data_source: str, reward_model: object, answer: object) -> object:
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else answer
    if truth is None:
        raise DataError(
            f"a ground truth of a task from {data_source!r}",
            "neither `reward_model.ground_truth` nor `answer`",
            "map a column to one of these names in the task source",
        )
    return truth
