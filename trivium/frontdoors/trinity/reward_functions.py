"""Trinity-RFT's reward functions as rewards of Trivium, and an adapter for its users' reward functions.

Each returns the part of the reward that has the same name in Trinity-RFT's metrics.
"""

from __future__ import annotations

import ast
import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from trivium.config import RewardConfig
from trivium.config.fields import plugin_path
from trivium.foundation.errors import DataError
from trivium.frontdoors.keywords import accepted
from trivium.frontdoors.trinity.config.registries import REWARD_FUNCTIONS
from trivium.rewards.functions import MathVerify
from trivium.rewards.graders.mathematics import last_boxed, math_boxed

_ANSWER = re.compile(r"<answer>(.*?)</answer>")
"""The pattern of Trinity-RFT. It finds no answer that contains line ends, although `Format` demands them by default:
such a completion is compared as a whole."""


class Accuracy(MathVerify):
    """1 if the text between the answer tags (without tags, the whole completion) equals the column `answer`.

    If the answer is a whole solution of GSM8K, the text after `####` counts.
    """

    class Config(MathVerify.Config):
        kind: str = "trivium.frontdoors.trinity.reward_functions:Accuracy"

    def __call__(self, prompt: str, completion: str, answer: object) -> float:
        tagged = _ANSWER.search(completion)
        return super().__call__(prompt, tagged.group(1) if tagged else completion, final_answer(str(answer)))


class Format:
    """0.1 if the completion matches from its start, else -0.1. `.` matches line ends, `$` the end of any line."""

    class Config(RewardConfig):
        kind: str = "trivium.frontdoors.trinity.reward_functions:Format"
        pattern: str = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
        """A Python regular expression."""

    def __init__(self, config: Config) -> None:
        self._match = re.compile(config.pattern, re.DOTALL | re.MULTILINE).match

    def __call__(self, prompt: str, completion: str) -> float:
        return 0.1 if self._match(completion) else -0.1


class Thinks:
    """0 if the completion has one `<think>...</think>`, else minus `coef`."""

    class Config(RewardConfig):
        kind: str = "trivium.frontdoors.trinity.reward_functions:Thinks"
        coef: float = Field(default=0.1, ge=0)
        """What a completion without it loses."""

    def __init__(self, config: Config) -> None:
        self._coef = config.coef

    def __call__(self, prompt: str, completion: str) -> float:
        once = completion.count("<think>") == 1 == completion.count("</think>")
        return 0.0 if once and completion.index("<think>") < completion.index("</think>") else -self._coef


class Boxed:
    """1 if the last box holds the column `answer` (itself boxed or not), by the rules of MATH, else 0."""

    Config = RewardConfig

    def __init__(self, config: RewardConfig) -> None:
        del config

    def __call__(self, prompt: str, completion: str, answer: object) -> float:
        boxed = last_boxed(str(answer))
        return float(math_boxed(completion, final_answer(str(answer)) if boxed is None else boxed))


class Countdown:
    """1 for an equation that uses each of the given numbers once and has the target's value; 0.1 for another equation,
    0 without one.

    The equation is between the last answer tags of the last line. The column `answer` is `{target, numbers}`, or its
    JSON text.
    """

    Config = RewardConfig

    def __init__(self, config: RewardConfig) -> None:
        del config

    def __call__(self, prompt: str, completion: str, answer: object) -> float:
        truth = json.loads(answer) if isinstance(answer, str) else answer
        if not isinstance(truth, Mapping) or not {"target", "numbers"} <= truth.keys():
            raise DataError("a column `answer` of {target, numbers}", f"{answer!r:.80}", "correct response_key")
        equations = _ANSWER.findall(completion.rpartition("\n")[2])
        if not equations:
            return 0.0
        equation = equations[-1].strip()
        # Python converts at most 4,300 digits, and the numbers of the task have few.
        used = sorted(int(number) for number in re.findall(r"\d{1,18}", equation))
        value = arithmetic(equation) if used == sorted(truth["numbers"]) else None
        return 1.0 if value is not None and abs(value - truth["target"]) < 1e-5 else 0.1


class RewardOfTrinity:
    """Adapts a reward function in Trinity-RFT's form: a class whose instances are called with (response, prompt,
    truth), or some of them, and return a number, or numbers by name, whose sum is the reward. `truth` is the column
    `answer`.

    A function in Trivium's form gets (prompt, completion, columns by name).
    """

    class Config(RewardConfig):
        kind: str = "trivium.frontdoors.trinity.reward_functions:RewardOfTrinity"
        function: Annotated[str, AfterValidator(plugin_path)]
        """`file.py:Name`, `package.module:Name`, or a name that a module in `TRINITY_PLUGIN_DIRS` registers."""
        args: dict[str, Any] = Field(default_factory=dict)
        """Keyword arguments of the class."""

        @property
        def short_name(self) -> str:
            return self.function.rpartition(":")[2]

    def __init__(self, config: Config) -> None:
        target = REWARD_FUNCTIONS.get(config.function)
        self._function: Callable[..., Any] = target(**config.args) if isinstance(target, type) else target
        self._takes_columns = "completion" in inspect.signature(self._function).parameters

    def __call__(self, prompt: str, completion: str, **columns: Any) -> float:
        if self._takes_columns:
            arguments = {"prompt": prompt, "completion": completion, **columns}
        else:
            arguments = {"response": completion, "prompt": prompt, "truth": columns.get("answer")}
        result = self._function(**accepted(self._function, arguments))
        return float(sum(result.values()) if isinstance(result, Mapping) else result)


def final_answer(answer: str) -> str:
    """Returns the text after the last `####` of a solution; the whole answer if it has no `####`."""
    return answer.rpartition("####")[2].strip()


# Without `**`, which Trinity's own evaluation allows: a completion of ten characters could fill the memory.
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(text: str) -> float | None:
    """Evaluates a sum, difference, product or quotient of numbers; returns None for anything else."""
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> float:
    """Evaluates a node. Raises ValueError if it is not arithmetic."""
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
    raise ValueError(type(node).__name__)
