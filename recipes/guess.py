"""Higher or lower: the policy searches for a hidden digit, and each completion is one guess."""

from collections.abc import Sequence
from typing import Any

from trivium.api import Message, Task


class Guess:
    """A hit earns 1, less `cost` for each guess before it; a completion that is no digit costs a guess too."""

    def __init__(self, cost: float = 0.1) -> None:
        self.cost = cost

    def reset(self, task: Task) -> Sequence[Message]:
        """The question; the digit stays hidden in the task's columns."""
        self.secret: int = task.columns["secret"]
        return task.prompt

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """`up`, `down` or `digit?` until the digit is found."""
        guess = completion.strip()
        if guess == str(self.secret):
            return (), 1.0, True
        if len(guess) != 1 or guess not in "0123456789":
            return (Message("user", "digit?"),), -self.cost, False
        return (Message("user", "up" if int(guess) < self.secret else "down"),), -self.cost, False


def tasks() -> list[dict[str, Any]]:
    """One task for each digit; `completion` is a first guess, for supervised steps that teach the format."""
    return [{"id": str(digit), "prompt": "digit?", "secret": digit, "completion": str(digit)} for digit in range(10)]
