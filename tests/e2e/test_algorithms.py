"""Every algorithm through a whole run: engine and trainer agree, and a run continued from its middle ends the same."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from configs import tiny_model
from safetensors.numpy import load_file

from trivium.config import config_from_mapping, merged
from trivium.foundation.metrics import depends_on_machine
from trivium.runtime.launch import run

STEPS = 4
BASE: dict[str, Any] = {
    "cluster": {"threads": 1},
    "model": tiny_model(layers=2),
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    # What a model that knows nothing earns now and then, so that groups differ and every step has a gradient.
    "rewards": [
        {"kind": "regex", "pattern": "^[0-9]", "name": "digit"},
        {"kind": "regex", "pattern": "[0-4]", "weight": 0.5, "name": "low"},
    ],
    "engine": {"sampling": {"max_new_tokens": 5, "temperature": 0.7}},
    "train": {"optimizer": {"lr": 1e-3}},
    "schedule": {"steps": STEPS, "groups_per_step": 4, "group_size": 4},
    "checkpoint": {"save_every": 2, "keep": 4},
    "monitors": [{"kind": "jsonl"}],
}

KL = {"place": "reward", "controller": "adaptive", "coef": 0.2, "target": 0.001, "horizon": 64, "estimator": "k1"}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": {"kind": "ppo"}, "schedule": {"groups_per_step": 16, "group_size": 1}},
    "rloo": {"algorithm": {"kind": "rloo"}},
    "reinforce": {"algorithm": {"kind": "reinforce"}},
    "sft": {
        "algorithm": {"kind": "sft"},
        "buffer": {"kind": "files"},
        "schedule": {"groups_per_step": 16, "group_size": 1},
    },
    "grpo, kl in the loss, old recomputed": {
        "algorithm": {
            "kind": "grpo",
            "kl": {"coef": 0.05, "estimator": "low_var_kl"},
            "old_log_prob": "recompute",
            "mini_batches": 2,
        }
    },
    "ppo, adaptive kl in the reward": {"algorithm": {"kind": "ppo", "kl": KL}},
    "grpo, refused groups replaced, rewards shaped": {
        "algorithm": {
            "kind": "grpo",
            "filters": ["zero_variance"],
            "refill": 3,
            "shaping": [{"kind": "overlong_penalty", "factor": 0.3, "buffer": 0.6}, "running_normalise"],
        }
    },
    "remax, against a greedy reply": {"algorithm": {"kind": "grpo", "advantage": "remax"}},
}


def train(case: str, run_dir: Path) -> dict[str, Any]:
    """Runs the case in `run_dir`, from whatever is there; the metric rows and the tensors of the last checkpoint."""
    run(config_from_mapping(merged(merged(BASE, CASES[case]), {"run": {"dir": str(run_dir)}})))
    last = run_dir / "checkpoints" / f"step-{STEPS:06d}"
    files = sorted(last.rglob("*.safetensors"))
    return {
        "rows": [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()],
        "tensors": {str(file.relative_to(last)): load_file(file) for file in files},
        "state": json.loads((last / "state.json").read_text()),
    }


@pytest.fixture(scope="module", params=CASES)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    return request.param, run_dir, train(request.param, run_dir)


def test_engine_and_trainer_agree_in_every_step(uninterrupted: tuple[str, Path, Any]) -> None:
    case, _, done = uninterrupted
    rows = done["rows"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert len({row["train/loss/policy"] for row in rows}) == STEPS
    for row in rows:
        assert row["train/grad_norm/policy"] > 0
        if case != "sft":
            assert row["mismatch/log_prob_max"] < 1e-4
            assert row["mismatch/kl"] < 1e-6
            assert row["rollout/staleness_max"] == 0
            assert row["reward/std"] > 0
    if case == "sft":
        assert not [key for row in rows for key in row if key.startswith("mismatch/")]


def test_updates_start_on_policy(uninterrupted: tuple[str, Path, Any]) -> None:
    case, _, done = uninterrupted
    if case in ("sft", "reinforce"):
        assert not [row for row in done["rows"] if "train/kl" in row]  # they read no older log-probabilities
    elif "mini_batches" in CASES[case].get("algorithm", {}):
        kls = [row["train/ref_kl"] for row in done["rows"]]
        assert 0 < kls[0] < 0.05  # the first half is the reference itself, the second one update away from it
        assert kls[0] < kls[-1]
        assert all(0 < abs(row["train/kl"]) < 0.05 for row in done["rows"])
    else:
        for row in done["rows"]:
            assert abs(row["train/kl"]) < 1e-5
            assert row["train/clip_fraction"] == 0


def test_a_critic_is_trained_where_there_is_one(uninterrupted: tuple[str, Path, Any]) -> None:
    case, _, done = uninterrupted
    has_critic = any(name.startswith("critic/") for name in done["tensors"])
    assert has_critic == case.startswith("ppo")
    assert all(("train/loss/value" in row) == has_critic for row in done["rows"])


def test_an_adaptive_coefficient_moves_and_is_saved(uninterrupted: tuple[str, Path, Any]) -> None:
    case, _, done = uninterrupted
    if "adaptive" not in case:
        assert "kl_coef" not in done["state"]["algorithm"]
        return
    coefs = [row["train/kl_coef"] for row in done["rows"]]
    assert coefs[0] == KL["coef"]
    assert len({*coefs, done["state"]["algorithm"]["kl_coef"]}) == STEPS + 1


def test_a_run_continued_from_its_middle_ends_with_the_same_bits(uninterrupted: tuple[str, Path, Any]) -> None:
    case, again, expected = uninterrupted
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:06d}")
    assert [path.name for path in (again / "checkpoints").glob("step-*")] == ["step-000002"]
    (again / "summary.json").unlink()
    (again / "log.txt").unlink()
    journals = {path: path.read_bytes() for path in (again / "rollouts").rglob("*.msgpack")}
    done = train(case, again)
    assert "continuing from step-000002" in (again / "log.txt").read_text()
    played = expected["state"]["buffer"].get("consumed_below", 0)  # slots; refused groups add to those of the steps
    per_step = CASES[case].get("schedule", BASE["schedule"])["groups_per_step"]
    assert len(journals) == math.ceil(played / per_step)
    assert len(journals) >= (0 if case == "sft" else STEPS)
    assert {path: path.read_bytes() for path in (again / "rollouts").rglob("*.msgpack")} == journals, "played again"
    assert {name: list(tensors) for name, tensors in done["tensors"].items()} == {
        name: list(tensors) for name, tensors in expected["tensors"].items()
    }
    for name, tensors in expected["tensors"].items():
        for key, tensor in tensors.items():
            assert done["tensors"][name][key].tobytes() == tensor.tobytes(), (name, key)
    assert done["state"]["algorithm"] == expected["state"]["algorithm"]
    stripped = [
        [{key: value for key, value in row.items() if not depends_on_machine(key)} for row in rows]
        for rows in (done["rows"], expected["rows"])
    ]
    assert stripped[0] == stripped[1]
    assert (again / "summary.json").is_file()
