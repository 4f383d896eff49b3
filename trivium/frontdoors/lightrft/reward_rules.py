"""The rules of LightRFT's reward recipes by name. The built-in rules score only the completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trivium.foundation.errors import ConfigError
from trivium.rewards.by_source import GraderLimits, grader_of
from trivium.rewards.functions import Format, last_tag
from trivium.rewards.graders.mathematics import last_boxed, same_math

RuleScore = float | Mapping[str, float]
"""A number, or a mapping whose `reward` is the number and whose other entries are metrics."""
Rule = Callable[..., Any]
"""Returns a RuleScore. Its parameters may be `prompt`, `completion`, `query`, `reference` (also `answer`), `label`,
`images` and `truncated`."""

# The weights of LightRFT's geo3k_rule and gsm8k_rule.
_ACCURACY, _FORMAT = 0.9, 0.1
_VERDICTS = {
    "A": ("Image 1 is better", "Video 1 is better"),
    "B": ("Image 2 is better", "Video 2 is better"),
    "C": ("Both are equally good",),
}
"""Preference -> the verdicts that match it."""
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_tagged = Format(Format.Config())


def boxed_rule(completion: str, reference: object) -> RuleScore:
    """Gives 0.9 for the right answer in the last `\\boxed{}`, and 0.1 for `<think>...</think>` before the first box."""
    accuracy, form = float(_boxed_is(completion, str(reference))), float(_thinks_before_box(completion))
    reward = _ACCURACY * accuracy + _FORMAT * form
    return {"reward": reward, "accuracy_reward": accuracy, "format_reward": form}


def format_rule(completion: str) -> RuleScore:
    """Gives 1 if the completion is `<think>...</think> <answer>...</answer>`, else 0."""
    score = _tagged("", completion)
    return {"reward": score, "format_reward": score}


def accuracy_rule(completion: str, reference: object) -> RuleScore:
    """Gives 1 if the last `<answer>` is the reference, or a verdict of the reference's preference A, B or C; else 0."""
    expected = str(reference).strip()
    score = float(last_tag(completion, "answer") in (expected, *_VERDICTS.get(expected, ())))
    return {"reward": score, "accuracy_reward": score}


RULES: dict[str, Rule] = {
    "geo3k_rule": boxed_rule,
    "gsm8k_rule": boxed_rule,
    "format_rule": format_rule,
    "accuracy_rule": accuracy_rule,
}
"""Component type -> rule."""


def register_rule(name: str) -> Callable[[Rule], Rule]:
    """Registers the decorated function as a rule for recipes. Raises ConfigError for a name that is taken."""

    def register(rule: Rule) -> Rule:
        if RULES.get(name, rule) is not rule or name == "model":
            raise ConfigError(f"a rule named {name!r}", "there is one", "choose another name")
        RULES[name] = rule
        return rule

    return register


def _boxed_is(completion: str, reference: str) -> bool:
    boxed, answer = last_boxed(completion), _final(reference)
    if boxed is None:
        return False
    numbers = _number(boxed), _number(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    # math-verify, in a separate process, compares expressions that differ in form.
    return (
        same_math(boxed, answer) or grader_of("math_verify").score(f"\\boxed{{{boxed}}}", answer, GraderLimits()) == 1
    )


def _final(reference: str) -> str:
    """Returns the final answer of a reference: its last box, its text after `####` (GSM8K), or all of it."""
    boxed = last_boxed(reference)
    return reference.rpartition("####")[2].strip() if boxed is None else boxed


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip().removeprefix("\\$").removeprefix("$"))
    except ValueError:
        return None


def _thinks_before_box(completion: str) -> bool:
    thought, box = _THOUGHT.search(completion), completion.find("\\boxed{")
    # In the completion alone: LightRFT searches the prompt too, whose instructions contain both marks, and gives every
    # response the format's reward.
    return thought is not None and thought.end() <= box
