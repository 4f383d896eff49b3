"""`python -m trivium.frontdoors.lightrft`: LightRFT's launcher on tiny models, alone and on two ranks."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.processes import Forked
from tests.rank_processes import run_ranks
from trivium.frontdoors.lightrft.__main__ import main
from trivium.text.tiny import TinyModel
from trivium.text.tiny_vision import TinyVisionModel

SMALL = (
    *("--rollout_batch_size", "2", "--train_batch_size", "2", "--n_samples_per_prompt", "2", "--num_episodes", "1"),
    *("--prompt_max_len", "64", "--generate_max_len", "3", "--actor_learning_rate", "1e-2", "--init_kl_coef", "0.1"),
    *("--input_key", "prompt", "--apply_chat_template", "--micro_train_batch_size", "1", "--save_steps", "1"),
)
REWARD = """
def reward_func(queries, prompts, **columns):
    return [float(len(query) % 3) for query in queries]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models, prompts, supervised text and a reward; the working directory."""
    sizes: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "mlp": 16, "max_position": 128}
    TinyModel(TinyModel.Config(**sizes), seed=0).materialize(tmp_path / "reading")
    seeing = TinyVisionModel.Config(**sizes, vision_layers=1, vision_hidden=8, vision_heads=1, image_size=28)
    TinyVisionModel(seeing, seed=0).materialize(tmp_path / "seeing")
    rows = [{"prompt": f"{n}+1", "label": "gsm8k_rule", "reference": str(n + 1), "output": "2"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*flags: str) -> None:
    """The command."""
    sys.argv = ["trivium.frontdoors.lightrft", *flags]
    runpy.run_module("trivium.frontdoors.lightrft", run_name="__main__")


def launch_rank(rank: int, size: int, *flags: str) -> None:
    """The command, as one of the ranks that torchrun starts."""
    del rank, size
    from trivium.frontdoors.lightrft.launcher import train

    train(list(flags))


def test_the_launcher_trains_and_continues(folder: Path) -> None:
    paths = ("--pretrain", "reading", "--prompt_data", "rows.jsonl", "--save_path", "out", "--ckpt_path", "ckpt")
    grpo = ("--advantage_estimator", "group_norm", "--use_kl_loss", "--kl_estimator", "k3", "--text_only")
    rewarded = ("--remote_rm_url", "reward.py")
    first = Forked("first", folder / "first.out", launch, *paths, *grpo, *rewarded, *SMALL)
    assert first.wait(240) == 0, first.text
    assert {path.name for path in (folder / "ckpt" / "_actor").iterdir()} == {"global_step1", "global_step2"}
    AutoModelForCausalLM.from_pretrained(folder / "out")
    longer = ("--load_checkpoint", "--num_episodes", "2", "--save_hf_ckpt")
    again = Forked("again", folder / "again.out", launch, *paths, *grpo, *rewarded, *SMALL, *longer)
    assert again.wait(240) == 0, again.text
    assert sorted(path.name for path in (folder / "ckpt").glob("*_hf")) == ["global_step3_hf", "global_step4_hf"]


def test_flags_that_cannot_be_had_end_it_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--pretrain",
        "reading",
        "--prompt_data",
        "rows.jsonl",
        *SMALL,
        "--sp_size",
        "2",
        "--train_batch_size",
        "9",
    )
    monkeypatch.setattr(sys, "argv", ["trivium.frontdoors.lightrft", *flags])
    assert main() == 2
    errors = capsys.readouterr().err
    assert all(flag in errors for flag in ("sp_size", "train_batch_size"))


def test_two_ranks_train_actor_critic_and_average_beside_supervised_text(folder: Path) -> None:
    paths = ["--pretrain", "seeing", "--prompt_data", "rows.jsonl", "--save_path", "out", "--ckpt_path", "ckpt"]
    ppo = ["--fsdp", "--advantage_estimator", "gae", "--enable_ema", "--freeze_prefix", "--ptx_coef", "0.1"]
    data = [
        "--pretrain_data",
        "rows.jsonl",
        "--eval_data",
        "rows.jsonl",
        "--max_eval_samples",
        "2",
        "--eval_steps",
        "1",
    ]
    run_ranks([2], launch_rank, folder / "ranks", *paths, *ppo, *data, *SMALL)
    assert (folder / "ckpt" / "_critic" / "global_step2").is_dir()
    AutoModelForImageTextToText.from_pretrained(folder / "out")
