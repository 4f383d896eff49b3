"""The tasks of the arena: their rows, environments and configs.

`sums`   sums of two digits; right digits of a wrong sum earn a part of the reward
`game`   find a hidden digit from 1 to 7 in three guesses, by `>` and `<`: a hit earns 1, less 0.1 for each guess before
         it. The start policy follows about half of the hints
`code`   write a word in a secret code. The start policy knows nothing of the code: it is right about once in four
         thousand rollouts. The environment answers with the solution, which the policy can read but not yet write
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from trivium.api import Message, Task

HERE = Path(__file__).resolve()
DIGITS, GUESSES = "1234567", 3
LETTERS, LENGTH = "abcdefgh", 4
CODE = dict(zip(LETTERS, "fdahbgec", strict=True))
"""No letter stands for itself."""


class Game:
    """Higher or lower: each completion is a guess."""

    async def reset(self, task: Task) -> Sequence[Message]:
        self.secret: str = task.columns["secret"]
        return task.prompt

    async def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        if completion == self.secret:
            return (), 1.0, True
        return (Message("user", hint(completion, self.secret)),), -0.1, False


def hint(guess: str, secret: str) -> str:
    """Whether the secret is higher or lower; `?` for a guess that is no digit."""
    if guess not in list(DIGITS):
        return "?"
    return ">" if guess < secret else "<"


class Code:
    """Rewards the first completion if it is the solution, shows the solution, and ends after a second completion."""

    async def reset(self, task: Task) -> Sequence[Message]:
        self.answer: str = task.columns["answer"]
        self.turns = 0
        return task.prompt

    async def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        self.turns += 1
        reward = float(self.turns == 1 and completion == self.answer)
        return (Message("user", self.answer),), reward, self.turns == 2


def encoded(word: str) -> str:
    return "".join(CODE[letter] for letter in word)


def words(part: str) -> list[dict[str, Any]]:
    """Words with their codes; those of `test` are not in `train`."""
    every = ["".join(letters) for letters in product(LETTERS, repeat=LENGTH)]
    random.Random(0).shuffle(every)
    chosen = every[:64] if part == "test" else every[64:]
    return [{"id": word, "prompt": f"{word}=", "answer": encoded(word), "completion": encoded(word)} for word in chosen]


def readers() -> list[dict[str, Any]]:
    """Rows that teach to repeat a word that follows the prompt, or that the environment has shown. If none was, the
    answer repeats half of the letters of the prompt, and the others are random."""
    rng = random.Random(1)

    def word() -> str:
        return "".join(rng.choices(LETTERS, k=LENGTH))

    rows: list[dict[str, Any]] = []
    for number in range(8000):
        asked, answer = word(), word()
        first, late = number % 2 == 0, number % 4 > 1
        if not (first or late):
            answer = "".join(rng.choice(letter + rng.choice(LETTERS)) for letter in asked)
        messages = [("user", f"{asked}={answer if first else ''}")]
        messages += [("assistant", word()), ("user", answer)] if late else []
        prompt = [{"role": role, "content": text} for role, text in messages]
        rows.append({"id": str(number), "prompt": prompt, "completion": answer})
    return rows


def secrets() -> list[dict[str, Any]]:
    """One task for each digit."""
    return [{"id": digit, "prompt": "?", "secret": digit} for digit in DIGITS]


def players() -> list[dict[str, Any]]:
    """Rows that teach to guess a digit, and in half of the cases one that agrees with all hints."""
    rng, rows = random.Random(2), list[dict[str, Any]]()
    for number in range(4000):
        secret, messages, open_digits = rng.choice(DIGITS), [("user", "?")], list(DIGITS)
        for _ in range(number % GUESSES):
            guess = rng.choice([digit for digit in DIGITS if digit != secret])
            said = hint(guess, secret)
            messages += [("assistant", guess), ("user", said)]
            open_digits = [digit for digit in open_digits if hint(guess, digit) == said and digit != guess]
        prompt = [{"role": role, "content": text} for role, text in messages]
        completion = rng.choice(open_digits if rng.random() < 0.5 else DIGITS)
        rows.append({"id": str(number), "prompt": prompt, "completion": completion})
    return rows


# --------------------------------------------------------------------------- configs


@dataclass(frozen=True)
class Arena:
    """A task with the config that all presets share on it."""

    title: str
    config: dict[str, Any]
    """Model, tasks, rewards, evaluation."""
    start: dict[str, Any]
    """What the supervised run that makes the start policy has beside it."""
    start_rows: Callable[[], list[dict[str, Any]]] | None = None
    """The rows of that run; None for the tasks themselves."""
    shows_solution: bool = False
    """Whether a teacher can read a solution, and rollouts have observations that are worth predicting."""
    expert: bool = True
    """Whether the tasks have a computed completion to imitate."""
    mini_batches: int = 4
    """Optimizer steps of a train step."""
    grid: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    """Learning rates."""


def _model(alphabet: str, max_position: int) -> dict[str, Any]:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 128}
    return {"kind": "tiny", "alphabet": alphabet, "max_position": max_position, **sizes}


def _rows(function: str, **args: Any) -> dict[str, Any]:
    return {"kind": "python", "source": f"{HERE}:{function}", "id": "id", **({"args": args} if args else {})}


def _turns(environment: str, turns: int) -> dict[str, Any]:
    return {"kind": "multi_turn", "environment": f"{HERE}:{environment}", "max_turns": turns}


def _sums(**more: Any) -> dict[str, Any]:
    return {"kind": "arithmetic", "max_operand": 9, "holdout_fraction": 0.0, **more}


ARENAS = {
    "sums": Arena(
        title="sums",
        config={
            "model": _model("0123456789+=", 24),
            "tasks": {"train": _sums(), "test": _sums()},
            "rewards": [{"kind": "exact", "partial_credit": 0.5}],
            "engine": {"sampling": {"max_new_tokens": 3}},
            "evaluation": {"taskset": "test", "threshold": 1.0, "samples": 4},
        },
        start={"steps": 300, "until": {"metric": "eval/test/accuracy", "above": 0.3}, "groups_per_step": 50},
    ),
    "game": Arena(
        title="higher or lower",
        config={
            "model": _model("1234567<>?", 64),
            "tasks": {"train": _rows("secrets"), "test": _rows("secrets")},
            "workflow": _turns("Game", GUESSES),
            "engine": {"sampling": {"max_new_tokens": 2}},
            "evaluation": {"taskset": "test", "threshold": 0.75, "samples": 32},
        },
        start={"steps": 120, "groups_per_step": 128},
        start_rows=players,
        expert=False,
    ),
    "code": Arena(
        title="secret code",
        config={
            "model": _model("abcdefgh=", 64),
            "tasks": {"train": _rows("words", part="train"), "test": _rows("words", part="test")},
            "workflow": _turns("Code", 2),
            "engine": {"sampling": {"max_new_tokens": 5}},
            "evaluation": {"taskset": "test", "threshold": 1.0, "samples": 2, "observations": True},
        },
        start={"steps": 250, "groups_per_step": 128},
        start_rows=readers,
        mini_batches=8,
        shows_solution=True,
    ),
}
