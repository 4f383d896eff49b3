"""A training script of a LightRFT user with the arguments of LightRFT's examples, cut to tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.doors.e2e import lightrft_user
from tests.doors.e2e.lightrft_folder import examples_in
from tests.peers import peer_file
from tests.rank_processes import run_ranks

EXAMPLES = ("run_grpo_geo3k_qwen2.5_vl_7b", "run_grpo_gsm8k_qwen2.5_0.5b", "run_ppo_geo3k_qwen2.5_vl_7b")
VARIATIONS: dict[str, tuple[str, ...]] = {
    "rloo": ("--advantage_estimator", "rloo", "--advantages_norm"),
    "reinforce": ("--advantage_estimator", "reinforce++", "--kl_target", "0.1", "--reward_clip", "2"),
    "cpgd": ("--advantage_estimator", "cpgd", "--use_cpg_loss", "--max_epochs", "2"),
    "gspo": ("--use_gspo", "--loss_agg_mode", "token-mean", "--enable_ema", "--save_hf_ckpt"),
    "dapo": (
        "--dynamic_sampling",
        "--overlong_buffer",
        "--overlong_buffer_len",
        "2",
        "--high_entropy_token_ratio",
        "0.5",
    ),
    "lora": ("--lora_rank", "2", "--lora_alpha", "4", "--reward_running_norm"),
    "cut": (
        "--top_p",
        "0.9",
        "--temperature",
        "0.8",
        "--micro_train_batch_size",
        "1",
        "--micro_rollout_batch_size",
        "1",
    ),
}
SMALL = (
    *("--rollout_batch_size", "2", "--train_batch_size", "4", "--n_samples_per_prompt", "2", "--num_episodes", "1"),
    *("--prompt_max_len", "900", "--generate_max_len", "4", "--max_eval_samples", "2", "--eval_steps", "2"),
    *("--save_steps", "2", "--actor_learning_rate", "1e-3", "--save_path", "out", "--ckpt_path", "ckpt"),
)


GRPO = (
    *("--advantage_estimator", "group_norm", "--use_kl_loss", "--kl_estimator", "k3", "--init_kl_coef", "0.01"),
    *("--text_only", "--input_key", "prompt", "--pretrain", "reading", "--prompt_data", "texts", *SMALL),
)
PPO = (
    *("--advantage_estimator", "gae", "--input_key", "prompt", "--images_key", "images", "--fsdp", "--enable_ema"),
    *("--freeze_prefix", "--ptx_coef", "0.1", "--pretrain", "seeing", "--prompt_data", "pictures", *SMALL),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    return examples_in(tmp_path, monkeypatch)


def words_of(folder: Path, name: str) -> list[str]:
    """The flags of an example on a tiny model, two steps long."""
    words = [str(word) for word in json.loads(peer_file("lightrft", f"{name}.json").read_text())]
    words = words[next(place for place, word in enumerate(words) if word.endswith(".py")) + 1 :]
    kinds = ("seeing", "pictures") if "geo3k" in name else ("reading", "texts")
    paths = {"--pretrain": kinds[0], "--critic_pretrain": kinds[0], "--prompt_data": kinds[1]}
    for flag in {*paths} & {*words}:
        words[words.index(flag) + 1] = str(folder / paths[flag])
    for flag in {"--use_wandb", "--wandb_project", "--wandb_run_name"} & {*words}:
        del words[words.index(flag) : words.index(flag) + 2]
    return [*words, *SMALL]


def _check(folder: Path, trainer: Any, words: Sequence[str]) -> None:
    assert trainer.engine.version == 2
    assert (folder / "ckpt" / "step-000002" / "manifest.json").is_file()
    assert (folder / "ckpt" / "step-000002" / "critic.safetensors").is_file() == ("gae" in words)
    sees = str(folder / "seeing") in words
    (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(folder / "out")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_script_with_other_import_lines_takes_two_steps(folder: Path, name: str) -> None:
    words = words_of(folder, name)
    _check(folder, lightrft_user.train(lightrft_user.arguments(words)), words)


def _supervised(folder: Path) -> list[str]:
    rows = [json.dumps({"prompt": "1+1?", "output": "2"}) + "\n"] * 8
    (folder / "supervised.jsonl").write_text("".join(rows))
    return ["--pretrain_data", "supervised.jsonl"]


def test_the_script_trains_on_supervised_text_and_continues(folder: Path) -> None:
    words = [*GRPO, *_supervised(folder)]
    trainer = lightrft_user.train(lightrft_user.arguments(words))
    assert trainer.pretrain_dataloader is not None
    assert trainer.pretrain_dataloader.consumed == 2  # pyright: ignore[reportAttributeAccessIssue]
    longer = [*words, "--num_episodes", "2", "--load_checkpoint"]
    assert lightrft_user.train(lightrft_user.arguments(longer)).engine.version == 4


@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_of_the_examples_take_two_steps(folder: Path, name: str) -> None:
    words = [*GRPO, *VARIATIONS[name]]
    if name in ("reinforce", "cpgd", "rloo"):
        words.remove("--use_kl_loss")
    _check(folder, lightrft_user.train(lightrft_user.arguments(words)), words)


def _on_rank(rank: int, size: int, words: list[str]) -> None:
    del rank, size
    lightrft_user.train(lightrft_user.arguments(words))


def test_two_ranks_train_actor_critic_and_average_beside_supervised_text(folder: Path) -> None:
    run_ranks([2], _on_rank, folder / "ranks", [*PPO, *_supervised(folder)])
    saved = {path.stem for path in (folder / "ckpt" / "step-000002").glob("*.safetensors")}
    assert {"policy", "critic", "average"} < saved
    AutoModelForImageTextToText.from_pretrained(folder / "out")
