"""The page that teaches: examples/rl_loop.py trains with the library's own verbs, and its policy learns."""

import asyncio
from pathlib import Path
from runpy import run_path
from statistics import fmean

import trivium.loops

EXAMPLE = run_path(str(Path(__file__).parents[2] / "examples" / "rl_loop.py"))


def test_the_policy_learns_within_a_few_steps(tmp_path: Path) -> None:
    assert EXAMPLE["train_step"] is trivium.loops.train_step
    rewards = asyncio.run(EXAMPLE["train"](steps=20, directory=tmp_path))
    assert len(rewards) == 20
    assert fmean(rewards[:3]) < 0.2
    assert fmean(rewards[-3:]) > 0.4


def test_it_is_one_page() -> None:
    assert len(Path(EXAMPLE["__file__"]).read_text(encoding="utf-8").splitlines()) <= 110
