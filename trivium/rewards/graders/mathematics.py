"""Compares final answers in mathematics by how they are written. Nothing is computed.

There are two sets of rules, as published results use them: those of the MATH benchmark (Hendrycks et al. 2021), which
read a `\\boxed{}`, and those of Minerva (Lewkowycz et al. 2022, appendix D.1), which DAPO applies to the line after
`Answer:`.
"""

from __future__ import annotations

import re
from typing import Any

from trivium.rewards.accepted import accepted, matches

_ANSWER_TAIL, _BOX_TAIL = 300, 100
"""Characters at the end of a completion in which DAPO's graders look for the answer, and for the box alone."""
NO_ANSWER = "[INVALID]"
"""The prediction of DAPO's grader for a text without an answer."""


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\boxed x`, or else `\\fbox{...}`. None if no box is closed."""
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    if start < 0:
        return None
    if text.startswith("\\boxed ", start):
        return text[start + 7 :].split("$")[0]
    opening = text.find("{", start)
    depth = 0
    for at in range(opening, len(text)) if opening >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[opening + 1 : at]
    return None


def stated_answer(text: str) -> str:
    """The last answer that a completion without a box states: the text after its last `answer is`, `=` or the like, to
    the end of the sentence (PRIME, Cui et al. 2025)."""
    last = re.split(r"(?i)\banswers?\b\s*(?:is|are|:)|\b(?:be|is|are|get)\s|=|:\s", text.strip())[-1]
    return last.split(". ")[0].strip().rstrip(".").strip("$ ")


def math_boxed(text: str, answer: object) -> bool:
    """Whether the last box holds an accepted answer by the rules of MATH."""
    boxed = last_boxed(text)
    return boxed is not None and same_math(boxed, answer)


def same_math(text: str, answer: object) -> bool:
    """Whether a final answer is an accepted one by the rules of MATH."""
    return matches(math_form(text), accepted(answer), math_form)


def math_dapo(text: str, answer: object, *, strict_box: bool = False) -> dict[str, Any]:
    """`score` 1 or -1, `acc` whether the prediction is right, `pred` the last `Answer:` line, or else the last box.

    `strict_box` reads the last box alone and compares it as it is written; `pred` is None without a box.
    """
    pred = last_boxed(text[-_BOX_TAIL:]) if strict_box else _minerva(_answer_line(text[-_ANSWER_TAIL:]))
    is_correct = pred not in (None, NO_ANSWER) and matches(pred, accepted(answer), str if strict_box else _minerva)
    return {"score": 1.0 if is_correct else -1.0, "acc": is_correct, "pred": pred}


def _answer_line(text: str) -> str:
    lines = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text)
    if lines:
        return lines[-1]
    boxed = last_boxed(text)
    return NO_ANSWER if boxed is None else boxed


# --------------------------------------------------------------------------- MATH

_MARKUP = ("\n", "\\!"), ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
"""Markup without meaning. The first tuple is removed before all other steps."""


def math_form(text: str) -> str:
    """The normal form of an answer, by the rules of MATH in their order."""
    for removed in _MARKUP[0]:
        text = text.replace(removed, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in _MARKUP[1]:
        text = text.replace(removed, "")
    text = text.split("\\text{ ")[0].replace("\\%", "")  # units
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    variable, equals, value = text.partition("=")
    if equals and "=" not in value and len(variable) <= 2:  # x = 5
        text = value
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])(.)", _braced, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"\A(-?\d+)/(-?\d+)\Z", r"\\frac{\1}{\2}", text)


def _braced(short: re.Match[str]) -> str:
    above, below = short.groups()
    return f"\\frac{{{above}}}" + (below if below == "{" else f"{{{below}}}")


# --------------------------------------------------------------------------- Minerva

# As published, odd words included: with another list, scores would differ from those of other trainers.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)


def _minerva(text: str) -> str:
    """The normal form of an answer, by Minerva's rules in their order."""
    text = text.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    if text.count("$") >= 2:
        text = text.split("$")[1]
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    plain = text.replace(",", "")
    return (plain if plain.isdigit() else text).strip()
