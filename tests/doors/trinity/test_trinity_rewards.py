"""Reward functions by the names of Trinity-RFT, and those of its users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.failing import refused
from trivium.config import RewardConfig
from trivium.foundation.errors import DataError
from trivium.frontdoors.trinity.reward_functions import (
    Boxed,
    Countdown,
    Format,
    RewardOfTrinity,
    Thinks,
    arithmetic,
    final_answer,
)

TRUTH = json.dumps({"target": 24, "numbers": [4, 6, 1]})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4 * 6 * 1", 24.0),
        ("-(1 + 2) / 4", -0.75),
        ("1 / 0", None),
        ("9 ** 9 ** 9", None),
        ("__import__('os')", None),
        ("(" * 5000, None),
        ("1 +", None),
        ("True", None),
    ],
)
def test_arithmetic_and_nothing_else(text: str, value: float | None) -> None:
    assert arithmetic(text) == value


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("so\n<answer> 4 * 6 * 1 </answer>", 1.0),
        ("<answer>4 * 6</answer>", 0.1),
        ("<answer>4 + 6 + 1</answer>", 0.1),
        ("<answer>1 + 1</answer> <answer>(4 * 6) / 1</answer>", 1.0),
        ("<answer>4 * 6 * 1</answer>\nor so", 0.0),
        ("24", 0.0),
        ("<answer>4 ** 6 ** 1</answer>", 0.1),
    ],
)
def test_countdown(completion: str, score: float) -> None:
    countdown = Countdown(RewardConfig(kind="countdown"))
    assert countdown("", completion, TRUTH) == countdown("", completion, json.loads(TRUTH)) == score


def test_countdown_without_its_numbers_is_an_error() -> None:
    with refused(DataError, "target", "numbers", "answer"):
        Countdown(RewardConfig(kind="countdown"))("", "1", "24")


def test_formats() -> None:
    strict = Format(Format.Config())
    assert strict("", "<think>\na\n</think>\n<answer>\nb\n</answer>") == 0.1
    assert strict("", "<think>a</think><answer>b</answer>") == -0.1
    loose = Format(Format.Config(pattern=r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"))
    assert loose("", "well <think>a\n</think> <answer>b</answer>") == 0.1
    thinks = Thinks(Thinks.Config(coef=0.3))
    assert [thinks("", text) for text in ("<think>a</think>", "</think><think>", "a")] == [0.0, -0.3, -0.3]


def test_mathematics() -> None:
    boxed = Boxed(RewardConfig(kind="boxed"))
    assert [boxed("", f"so \\boxed{{{text}}}", "\\boxed{\\frac12}") for text in ("\\frac{1}{2}", "2")] == [1.0, 0.0]
    assert boxed("", "\\boxed{72}", "48+24\n#### 72") == 1.0
    assert (final_answer("a\n#### 7"), final_answer("7")) == ("7", "7")


def test_reward_functions_of_users_are_called_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, bonus=0.0):\n"
        "        self.bonus = bonus\n"
        "    def __call__(self, response, truth=None, **kwargs):\n"
        "        return {'right': float(response == truth), 'bonus': self.bonus}\n"
        "def short(response):\n"
        "    return -len(response)\n"
        "def ours(prompt, completion, level):\n"
        "    return level\n"
    )

    def reward(name: str, **args: Any) -> RewardOfTrinity:
        return RewardOfTrinity(RewardOfTrinity.Config(function=f"{tmp_path / 'mine.py'}:{name}", args=args))

    assert reward("Mine", bonus=0.5)("p", "4", answer="4", level=2) == 1.5
    assert reward("short")("p", "four", answer="4") == -4
    assert reward("ours")("p", "four", answer="4", level=2) == 2
