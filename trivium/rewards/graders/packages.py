"""Graders of other packages. They compute with what the policy wrote, so they run in `Isolated` processes alone."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from trivium.foundation.errors import DataError


def math_verify(completion: str, answer: str) -> float:
    """1.0 if math-verify finds the completion's expression equal to the answer, else 0.0.

    The answer is LaTeX or plain mathematics, boxed or not. The package's own time limits are off: the process has one.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    parsed = _expressions(completion)
    marked = answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"
    gold = parse(marked, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise DataError("an `answer` that math-verify can read", repr(answer), "write it as LaTeX or a number")
    return float(verify(gold, parsed, timeout_seconds=None))


def math_form(completion: str) -> str | None:
    """The completion's final expression: equal texts for equal numbers. None if it has none."""
    last = next(iter(_expressions(completion)), None)
    return str(last.evalf(12) if getattr(last, "is_number", False) else last) if last is not None else None


def _expressions(completion: str) -> Any:
    """What math-verify reads of a completion: the last expression, and its text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    return parse(completion, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def reasoning_gym(answer: str | None, dataset: str, config: dict[str, Any], entry: dict[str, Any]) -> float:
    """The dataset's own score of the answer to its entry."""
    return float(_dataset(dataset, json.dumps(config, sort_keys=True)).score_answer(answer=answer, entry=entry))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(config))
