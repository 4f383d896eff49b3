"""Sections that the prompt opened: what a reward sees of the end of the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes import turn
from reward_parts import task

from trivium.config import RewardConfig, plugin
from trivium.foundation.registry import resolve
from trivium.rewards import make_judge
from trivium.rewards.by_source import default_compute_score
from trivium.rewards.functions import Format
from trivium.types import Message, Task, Trajectory

ANSWERED = "two and two</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("prompt_end", "completion", "score"),
    [
        ("<|assistant|><think>\n", ANSWERED, 1.0),
        ("<|assistant|><think>", f"<think>{ANSWERED}", 1.0),  # it opens the section once more
        ("<|assistant|>", ANSWERED, 0.0),
        ("<|assistant|>", f"<think>{ANSWERED}", 1.0),
        ("", f"<think>{ANSWERED}", 1.0),
        ("<|assistant|><think>\n\n</think>\n\n", "<answer>4</answer>", 1.0),
        ("<|assistant|><think></think>\n<answer>", "4</answer>", 1.0),
        ("<|assistant|><answer>", "4</answer>", 0.0),
        ("<|assistant|><think>\n", "<answer>4</answer>", 0.0),
        ("<|assistant|><think>\n", "two and two</think>", 0.0),
        ("<|assistant|><think>\n", f"{ANSWERED}{ANSWERED}", 0.0),
        ("Write <think> first.<|end|><|assistant|>", ANSWERED, 0.0),
        ("<|assistant|><thinking>\n", ANSWERED, 0.0),
    ],
)
def test_format_counts_what_the_prompt_opened(prompt_end: str, completion: str, score: float) -> None:
    assert Format(Format.Config())("", completion, prompt_end) == score


def test_any_section_may_be_opened() -> None:
    planned = Format(Format.Config(sections=("plan", "answer")))
    assert planned("", "a</plan><answer>b</answer>", "<plan>\n") == 1.0
    assert planned("", "a</plan><answer>b</answer>", "<think>\n") == 0.0


def test_the_format_of_geometry_counts_it() -> None:
    text = "by Thales</think> \\boxed{7}"
    assert default_compute_score("hiyouga/geometry3k", text, "7") == pytest.approx(0.9)
    assert default_compute_score("hiyouga/geometry3k", text, "7", prompt_end="<think>\n") == pytest.approx(1.0)


def decode(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def ended(*texts: tuple[str, str]) -> Trajectory:
    """A trajectory with these (prompt, completion)."""
    turns = [turn([*map(ord, prompt)], [1], text=completion) for prompt, completion in texts]
    return Trajectory(0, tuple(turns))


async def test_the_judge_gives_the_end_of_the_last_prompt_to_rewards_that_read_it(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "ends = []\n"
        "def reads(completion, prompt_end):\n    ends.append(prompt_end)\n    return 1.0\n"
        "def compares(prompt, completions, prompt_end):\n    ends.append(prompt_end)\n"
        "    return [1.0] * len(completions)\n"
        "def ignores(completion, **columns):\n    assert columns.keys() == {'prompt'}\n    return 1.0\n"
    )
    kinds = [f"{tmp_path}/ends.py:{name}" for name in ("reads", "compares", "ignores")]
    sections = [plugin("rewards", RewardConfig)({"kind": kind}) for kind in kinds]
    judge = make_judge([*sections, plugin("rewards", RewardConfig)({"kind": "format"})], decode=decode)
    first, second = ended(("one", "a"), ("x" * 100 + "<think>\n", ANSWERED)), ended(("<think>", "b"), ("two", ANSWERED))
    assert [(await judge.score(task(), each))["format"] for each in (first, second)] == [1.0, 0.0]
    await judge.compare(task(), [first, second])
    ends = resolve("rewards", kinds[0]).__globals__["ends"]
    assert [each[-9:] for each in ends[:2]] == ["x<think>\n", "two"]
    assert [[end[-9:] for end in each] for each in ends[2:]] == [["x<think>\n", "two"]]


async def test_without_tokens_the_end_is_that_of_the_prompt() -> None:
    """As for an endpoint that returns text alone."""
    judge = make_judge([plugin("rewards", RewardConfig)({"kind": "format"})])
    rendered = Task("t", (Message("user", "<|user|>2+2<|end|><|assistant|><think>\n"),), {})
    none = np.zeros(0, np.int32)
    bare = Trajectory(0, (turn(none, [1], text=ANSWERED),))
    assert await judge.score(rendered, bare) == {"format": 1.0}
    assert await judge.score(task(), bare) == {"format": 0.0}
