"""RayPPOTrainer from a script: makes its own data and model, trains, prints validation before and after.

    python examples/ray_ppo_trainer.py           # PPO with a critic
    python examples/ray_ppo_trainer.py grpo      # GRPO: the completions of one prompt are the baseline of each other

Two CPU cores and a few minutes are enough. The task: which of two digits is the larger one?
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trivium.api import TinyModel
from trivium.frontdoors.verl import ActorRolloutRefWorker, CriticWorker, RayPPOTrainer, ResourcePoolManager, Role
from trivium.text import hf_tokenizer

VALIDATION = 20
"""Pairs of digits that training never sees."""


def write_data(folder: Path) -> None:
    """train.parquet and val.parquet, in the RLHF schema."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    pairs = sorted(pairs, key=lambda pair: (pair[0] * 37 + pair[1] * 61) % 101)  # a shuffle that is always the same
    for split, chosen in (("val", pairs[:VALIDATION]), ("train", pairs[VALIDATION:])):
        rows = [
            {
                "data_source": "larger_digit",
                "prompt": [{"role": "user", "content": f"{a},{b}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(max(a, b))},
                "extra_info": {"split": split, "index": index},
            }
            for index, (a, b) in enumerate(chosen)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """1 for the right digit and nothing else."""
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}


def config(algorithm: str, folder: Path, steps: int) -> dict[str, Any]:
    """A config of verl's shape."""
    optimizer = {"lr": 2e-3, "weight_decay": 0.0}
    return {
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "val.parquet"),
            "train_batch_size": 32,
            "max_prompt_length": 16,
            "max_response_length": 3,
            "seed": 1,
        },
        "algorithm": {"adv_estimator": "gae" if algorithm == "ppo" else "grpo"},
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model"), "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 16, "entropy_coeff": 0.01, "optim": optimizer},
            "rollout": {"name": "torch", "n": 8},
        },
        "critic": {"optim": optimizer},
        "trainer": {
            "total_training_steps": steps,
            "test_freq": max(1, steps // 5),
            "save_freq": max(1, steps // 2),
            "logger": ["console"],
            "default_local_dir": str(folder / "run"),
        },
    }


def make_trainer(
    algorithm: str, folder: Path, *, steps: int, workers: int = 1, kind: Any = RayPPOTrainer, **overrides: Any
) -> RayPPOTrainer:
    """A trainer over `workers` processes; `overrides` replace its arguments."""
    if not (folder / "train.parquet").is_file():
        write_data(folder)
    tiny = TinyModel.Config(alphabet="0123456789,", layers=2, hidden=64, heads=4, mlp=128, max_position=32)
    model = TinyModel(tiny, seed=0).materialize(folder / "model")
    roles: dict[Role, Any] = {Role.ActorRollout: ActorRolloutRefWorker}
    if algorithm == "ppo":
        roles[Role.Critic] = CriticWorker
    arguments: dict[str, Any] = {
        "config": config(algorithm, folder, steps),
        "tokenizer": hf_tokenizer(str(model)),
        "role_worker_mapping": roles,
        "resource_pool_manager": ResourcePoolManager(
            {"global_pool": [workers]}, dict.fromkeys(roles, "global_pool"), device_name="cpu"
        ),
        "reward_fn": compute_score,
        "device_name": "cpu",
    }
    return kind(**(arguments | overrides))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", nargs="?", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--dir", type=Path, help="where data, model and run go; an existing run is continued")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="ray_ppo_trainer-"))
    folder.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(arguments.algorithm, folder, steps=arguments.steps, workers=arguments.workers)
    trainer.init_workers()
    try:
        summary = trainer.fit()
    finally:
        trainer.shutdown()
    print(f"accuracy before {summary['accuracy_before']:.2f}, after {summary['accuracy_after']:.2f}; {folder / 'run'}")
    for name, value in sorted(summary["validation"].items()):
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
