"""Every preset by its name in a config, through a whole run on the CPU: it learns from what it plays, and says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from configs import tiny_model
from safetensors.numpy import load_file

from trivium.config import RunConfig, config_from_mapping, merged
from trivium.foundation.registry import CATALOGUE
from trivium.runtime.checkpoint_eval import evaluate
from trivium.runtime.launch import run
from trivium.text.tiny import TinyModel

ROOT = Path(__file__).parents[2]
STEPS = 2
MODEL = tiny_model(alphabet="0123456789+=?abcdefghijklmnopqrstuvwxyz", max_position=96)
BASE: dict[str, Any] = {
    "cluster": {"threads": 1},
    "model": MODEL,
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    # What a model that knows nothing earns now and then, so that the members of a group differ.
    "rewards": [
        {"kind": "regex", "pattern": "^[0-9]", "name": "digit"},
        {"kind": "regex", "pattern": "[a-m]", "weight": 0.5, "name": "letter"},
    ],
    "engine": {"sampling": {"max_new_tokens": 5}},
    "train": {"optimizer": {"lr": 1e-2}},
    "schedule": {"steps": STEPS, "groups_per_step": 8, "group_size": 4},
    "monitors": [{"kind": "jsonl"}],
}
TURNS = {
    "tasks": {"train": {"kind": "python", "source": str(ROOT / "recipes/guess.py:tasks"), "id": "id"}},
    "workflow": {
        "kind": "multi_turn",
        "environment": str(ROOT / "recipes/guess.py:Guess"),
        "max_turns": 4,
    },
    "engine": {"sampling": {"max_new_tokens": 2}},
}
EXPERT = {"buffer": {"kind": "files"}, "schedule": {"group_size": 1}}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {"schedule": {"groups_per_step": 32, "group_size": 1}},
    "reinforce": {"schedule": {"groups_per_step": 32, "group_size": 1}},
    "gigpo": TURNS,
    "step_wise_grpo": TURNS,
    "echo": TURNS,
    "sft": EXPERT,
    # Ten tokens of a hundred have to be many enough for a choice among the few of a test.
    "clip_cov": {"algorithm": {"policy_loss": {"ratio": 0.1, "cov_low": 0.0}, "mini_batches": 2}},
    "kl_cov": {"algorithm": {"policy_loss": {"ratio": 0.1}, "mini_batches": 2}},
    "m2po": {"algorithm": {"epochs": 2}},
    "decoupled_ppo": {"schedule": {"max_staleness": 1}},
    # The alphabet has no capitals.
    "sdpo": {"algorithm": {"teacher": {"context": "{prompt}{answer}"}}},
    "opsd": {"algorithm": {"teacher": {"context": "{prompt}{answer}"}}},
    "a_star_po": {"schedule": {"groups_per_step": 32, "group_size": 1}},
    "sdft": {"algorithm": {"teacher": {"context": "{prompt}{answer}"}}},
}
REFERENCE = {"evaluation": {"taskset": "train", "samples": 4}}
UNJUDGED = (
    "distill",
    "distill_top_k",
    "distill_student_top_k",
    "iw_opd",
    "opsd",
    "sdft",
    "sft",
    "reward_model",
)
PAIRS = ("dpo", "ipo", "kto")  # whole sequences against a reference: nothing is compared with the engine


def config_of(preset: str, folder: Path) -> RunConfig:
    said = merged(merged(BASE, {"algorithm": {"kind": preset}}), CASES.get(preset, {}))
    if preset.startswith(("distill", "iw_opd")):
        teacher = TinyModel(TinyModel.Config(**MODEL), seed=7).materialize(folder / "teacher")
        said = merged(said, {"algorithm": {"teacher": {"path": str(teacher)}}})
    if preset in UNJUDGED:
        del said["rewards"]
    if preset == "a_star_po":  # the rewards of the reference policy, as `trivium eval --tasks` writes them
        reference = config_from_mapping(merged(said, {"run": {"dir": str(folder / "run")}, **REFERENCE}))
        evaluate(reference, 0, tasks=folder / "tasks.jsonl")
        said |= {"tasks": {"train": {"kind": "jsonl", "path": str(folder / "tasks.jsonl"), "id": "id"}}}
    if preset == "reward_model":
        pairs = [{"prompt": f"{a}+{a}=", "chosen": str(a), "rejected": "a"} for a in range(10)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        said |= {"tasks": {"train": {"kind": "jsonl", "path": str(folder / "pairs.jsonl"), "id": "prompt"}}}
        said = merged(said, {"buffer": {"kind": "files"}, "schedule": {"group_size": 2}})
    return config_from_mapping(merged(said, {"run": {"dir": str(folder / "run")}}))


@pytest.mark.parametrize("preset", CATALOGUE["algorithms"])
def test_a_preset_trains_by_its_name(preset: str, tmp_path: Path) -> None:
    config = config_of(preset, tmp_path)
    run(config)
    run_dir = tmp_path / "run"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    role = "reward" if preset == "reward_model" else "policy"
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row[f"train/grad_norm/{role}"] > 0
        assert row["train/tokens"] > 0
        if preset not in UNJUDGED:
            assert row["reward/std"] > 0
            if preset not in PAIRS:
                assert row["mismatch/log_prob_max"] < 1e-4 or config.max_staleness > 0
    before, after = (
        {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (run_dir / "model", run_dir / "checkpoints" / f"step-{STEPS:06d}" / role)
    )
    assert before.keys() & after.keys()
    assert any(before[name].tobytes() != after[name].tobytes() for name in before.keys() & after.keys())
