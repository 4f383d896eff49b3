"""LoRA through the command line: what is sent, and when the run is killed, makes no difference to what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.e2e.killing import launches
from tests.e2e.test_kill import outcome_of
from trivium.config import load_config
from trivium.runtime.launch import run

HERE = Path(__file__).parent
SUPERVISED, REINFORCED = 8, 6


def write_config(directory: Path, push: str) -> Path:
    stages: list[dict[str, Any]] = [
        {
            "algorithm": {"kind": "sft"},
            "buffer": {"kind": "files"},
            "train": {"optimizer": {"lr": 5e-3}},
            "schedule": {"steps": SUPERVISED, "groups_per_step": 16, "group_size": 1},
        },
        {
            "algorithm": {"kind": "grpo", "entropy": {"coef": 0.01}, "kl": {"estimator": "low_var_kl", "coef": 0.01}},
            "train": {"optimizer": {"lr": 5e-3}, "lora": {"rank": 4, "alpha": 8, "push": push}},
            "schedule": {"steps": REINFORCED, "groups_per_step": 4, "group_size": 4},
        },
    ]
    path = directory / f"{push}.yaml"
    path.write_text(yaml.safe_dump({"extends": str(HERE / "tiny.yaml"), "stages": stages}))
    return path


def test_an_adapter_learns_the_same_however_it_is_sent_and_wherever_the_run_is_killed(tmp_path: Path) -> None:
    merged, alone = tmp_path / "merged-run", tmp_path / "adapter-run"
    run(load_config(write_config(tmp_path, "merged"), [f"run.dir={merged}"]))
    kills = [
        ("update: step taken, no version", SUPERVISED + 2),
        ("save: models written, no manifest", 2),
        ("log: half a row", 2),
    ]
    assert launches(write_config(tmp_path, "adapter"), alone, kills)[:-1] == [moment for moment, _ in kills]
    one, other = outcome_of(merged), outcome_of(alone)
    for outcome in (one, other):
        outcome["tensors"] = {name: held for name, held in outcome["tensors"].items() if "versions" not in name}
        assert any("policy-adapter" in name for name in outcome["tensors"])
    assert one == other

    first, last = (merged / "checkpoints" / f"step-{step:06d}" for step in (SUPERVISED, SUPERVISED + REINFORCED))
    before, after = (load_file(step / "policy" / "model.safetensors") for step in (first, last))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    rows = [json.loads(line) for line in (merged / "metrics.jsonl").read_text().splitlines()]
    kl = [row["train/ref_kl"] for row in rows if "train/ref_kl" in row]
    assert kl[0] == 0
    assert kl[-1] > 0, "the reference is the policy without its adapter, and stays where it was"
