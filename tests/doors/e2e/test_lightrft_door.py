"""examples/ppo_vl.py: LightRFT's objects, built by hand, train a vision-language model that is killed and goes on."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from statistics import fmean

from tests.processes import ROOT, Forked
from tests.waiting import eventually

_SIZES = {"--prompts": 128, "--rollout_batch_size": 16, "--train_batch_size": 32, "--held_out": 40, "--save_steps": 3}


def _example(directory: Path) -> None:
    """The script, as `python examples/ppo_vl.py` runs it."""
    sizes = [text for flag, number in _SIZES.items() for text in (flag, str(number))]
    sys.argv = ["ppo_vl.py", "--dir", str(directory), "--eval_steps", "-1", *sizes]
    runpy.run_path(str(ROOT / "examples" / "ppo_vl.py"), run_name="__main__")


def test_it_learns_is_killed_and_goes_on(tmp_path: Path) -> None:
    first = Forked("first", tmp_path / "first.out", _example, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "step-000003" / "manifest.json"
    eventually(saved.is_file, 240, lambda: first.text, first)
    first.kill()
    second = Forked("second", tmp_path / "second.out", _example, tmp_path / "run")
    assert second.wait(240) == 0, second.text
    continued = re.search(r"continuing behind (\d+) prompts", second.text)
    assert continued is not None, second.text
    step = int(continued[1]) // 16
    assert step >= 3
    rewards = [float(number) for number in re.findall(r"step_reward_mean (\S+)", second.text)]
    steps = [int(number) for number in re.findall(r"step +(\d+) +step_reward_mean", second.text)]
    assert steps == list(range(step + 1, 9))
    before = [float(number) for number in re.findall(r"step_reward_mean (\S+)", first.text)]
    assert fmean(rewards[-3:]) > 2 * fmean(before[:2]), first.text + second.text
    assert re.search(r"held out: right 0\.\d+ of 40", second.text), second.text
