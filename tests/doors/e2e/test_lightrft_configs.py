"""Launch arguments of LightRFT, translated and run by the command line on tiny models: two steps each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.doors.e2e.lightrft_folder import examples_in
from tests.peers import peer_file
from tests.processes import Forked, commands

EXAMPLES = ("run_grpo_geo3k_qwen2.5_vl_7b", "run_grpo_gsm8k_qwen2.5_0.5b", "run_ppo_geo3k_qwen2.5_vl_7b")
SMALL = (
    *("--rollout_batch_size", "2", "--train_batch_size", "2", "--n_samples_per_prompt", "2"),
    *("--prompt_max_len", "900", "--generate_max_len", "3", "--num_episodes", "1", "--max_eval_samples", "1"),
)
SCRIPT = """#!/bin/bash
# PPO with pictures; don't run it on one GPU
DATA="{folder}/pictures"   # train and test
RUN=first-$(date +%m%d)
torchrun --nproc-per-node 1 examples/train_colocate.py \\
  --pretrain {folder}/seeing --critic_pretrain {folder}/seeing \\
  --prompt_data "$DATA" --input_key prompt --images_key images --apply_chat_template \\
  --advantage_estimator gae --init_kl_coef 0.01 --kl_target 0.1 --freezing_actor_steps 1 \\
  --overlong_buffer --overlong_buffer_len 2 --reward_clip 5 --reward_running_norm --advantage_clip 3 \\
  --ckpt_path {folder}/${{RUN}} --freeze_prefix --adam_betas 0.9 0.98 --bf16 2>&1 | tee log.txt
"""
WORDS = (
    *("--advantage_estimator", "group_norm", "--use_kl_loss", "--high_entropy_token_ratio", "0.5"),
    *("--use_gspo", "--max_epochs", "2", "--lora_rank", "2", "--text_only", "--input_key", "question"),
    *("--input_template", "Q: {} A:", "--prompt_data_probs", "0.5,0.5", "--eval_steps", "1"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return examples_in(tmp_path, monkeypatch)


def translated(start: Callable[..., Forked], *words: str) -> Path:
    """What `trivium translate` prints, as a file."""
    command = start("translate", "translate", "--from", "lightrft", *words)
    assert command.wait(120) == 0, command.text
    path = Path("translated.yaml")
    lines = [line for line in command.text.splitlines() if not line.startswith("note: ")]
    path.write_text("\n".join(lines[lines.index("run:") :]) + "\n")  # what comes before is from reading the data
    return path


def assert_trains(start: Callable[..., Forked], config: Path, *overrides: str) -> None:
    """`check` accepts it, and two steps of it end well."""
    monitors = "monitors=[{kind: jsonl}]"  # the examples' W&B is not there
    for name in ("check", "run"):
        command = start(name, name, str(config), "schedule.steps=2", monitors, *overrides)
        assert command.wait(240) == 0, command.text
    assert '"steps": 2' in command.text, command.text


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_steps_of_an_example(folder: Path, name: str) -> None:
    file = peer_file("lightrft", f"{name}.json")
    kind, data = ("seeing", "pictures") if "geo3k" in name else ("reading", "texts")
    paths = ["--pretrain", str(folder / kind), "--prompt_data", str(folder / data)]
    critic = ["--critic_pretrain", str(folder / kind)] if "ppo" in name else []
    with commands(folder) as start:
        assert_trains(start, translated(start, str(file), *paths, *critic, *SMALL))


def test_two_steps_of_a_shell_script(folder: Path) -> None:
    (folder / "launch.sh").write_text(SCRIPT.format(folder=folder))
    with commands(folder) as start:
        config = translated(start, "launch.sh", *SMALL)
        assert yaml.safe_load(config.read_text())["run"]["dir"] == f"{folder}/first"
        assert_trains(start, config, "run.dir=run")


def test_two_steps_of_flags_with_two_sets_of_prompts(folder: Path) -> None:
    sets = ",".join([f"{folder}/texts@", f"{folder}/texts/test.jsonl"])
    data = ["--pretrain", str(folder / "reading"), "--prompt_data", sets, "--eval_data", f"{folder}/texts"]
    with commands(folder) as start:
        assert_trains(start, translated(start, "--", *data, *WORDS, *SMALL))
