"""A tiny model learns sums from right and wrong alone; with the same rewards in the wrong places it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs import tiny_model

from trivium.config import RunConfig, config_from_mapping
from trivium.runtime.checkpoint_eval import evaluate
from trivium.runtime.launch import run

SUPERVISED, REINFORCED = 12, 80
SHUFFLED = f"{Path(__file__).with_name('shuffled.py')}:Shuffled"


def config(run_dir: Path, reward: str) -> RunConfig:
    """Sums up to 4+4: a moment of imitation, which leaves most of them wrong, then reinforcement."""
    stages: list[dict[str, Any]] = [
        {
            "algorithm": {"kind": "sft"},
            "buffer": {"kind": "files"},
            "train": {"optimizer": {"lr": 4e-3}},
            "schedule": {"steps": SUPERVISED, "groups_per_step": 32, "group_size": 1},
        },
        {
            "algorithm": {
                "kind": "grpo",
                "mini_batches": 2,
                "entropy": {"coef": 0.01},
                "policy_loss": {"kind": "ppo", "clip_high": 0.3},
            },
            "train": {"optimizer": {"lr": 2e-3, "betas": [0.9, 0.98], "warmup_steps": 5, "schedule": "cosine"}},
            "schedule": {"steps": REINFORCED, "groups_per_step": 16, "group_size": 8},
        },
    ]
    return config_from_mapping(
        {
            "run": {"dir": str(run_dir)},
            "cluster": {"threads": 1},
            "model": tiny_model(hidden=64, kv_heads=2, mlp=128),
            "tasks": {"train": {"kind": "arithmetic", "max_operand": 4}},
            "rewards": [{"kind": reward}],
            "engine": {"sampling": {"max_new_tokens": 3}},
            "evaluation": {"taskset": "train", "sampling": {"max_new_tokens": 3, "temperature": 0.0}},
            "monitors": [{"kind": "jsonl"}],
            "stages": stages,
        }
    )


def gains(run_dir: Path, reward: str) -> tuple[float, float]:
    """What reinforcement added to the true greedy accuracy, and to the reward it was given (means of five steps)."""
    run(config(run_dir, reward))
    judged = config(run_dir, "exact")  # whatever the policy was told, the truth is what it is measured by
    before, after = (evaluate(judged, step)["eval/train/accuracy"] for step in (SUPERVISED, SUPERVISED + REINFORCED))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if row["step"] > SUPERVISED and "reward/mean" in row]
    assert len(rewards) == REINFORCED
    return after - before, sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5


def test_a_tiny_model_learns(tmp_path: Path) -> None:
    accuracy, reward = gains(tmp_path / "run", "exact")
    assert accuracy >= 0.2
    assert reward >= 0.2


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    """Whatever made the model better there came through the rewards."""
    accuracy, reward = gains(tmp_path / "run", SHUFFLED)
    assert accuracy < 0.05
    assert reward < 0.05
