"""Steps that are not fresh groups alone, through whole runs on the CPU: an expert's replies beside the policy's own,
replayed groups, and operators before the buffer. Each kind resumes from a kill to the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import tiny_model

from tests.e2e.killing import launches
from tests.e2e.test_kill import outcome_of
from trivium.config import RunConfig, config_from_mapping, merged
from trivium.runtime.launch import run

STEPS = 6
BASE: dict[str, Any] = {
    "cluster": {"threads": 1},
    "model": tiny_model(),
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    # What a model that knows nothing earns now and then, so that the members of a group differ.
    "rewards": [{"kind": "regex", "pattern": "^[0-4]"}],
    "engine": {"sampling": {"max_new_tokens": 3}},
    "train": {"optimizer": {"lr": 1e-2}},
    "schedule": {"steps": STEPS, "groups_per_step": 6, "group_size": 4},
    "checkpoint": {"save_every": 2, "keep": 2},
    "monitors": [{"kind": "jsonl"}],
}
MIX = {"buffer": {"strategy": {"kind": "mix", "taskset": "experts", "expert_data_ratio": 0.4}}}
LOSS = {"algorithm": {"kind": "grpo", "policy_loss": {"kind": "mix", "mu": 0.5}, "mini_batches": 2}}
REPLAY = {
    "buffer": {
        "strategy": {
            "kind": "replay",
            "fraction": 0.5,
            "max_age": 3,
            "priority": "decay_limit_randomization",
            "sigma": 1.0,
        },
        "operators": ["reward_std_filter", {"kind": "metrics", "numbers": ["pass_rate"]}],
    }
}


def config_of(folder: Path, *said: dict[str, Any], wrong: bool = False) -> RunConfig:
    """A run in `folder`; its expert adds one to a digit, or two where it is `wrong`."""
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1 + wrong), "answer": str(n + 1)} for n in range(8)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experts = {"kind": "jsonl", "path": str(folder / "experts.jsonl"), "id": "prompt"}
    everything = merged(BASE, {"run": {"dir": str(folder / "run")}, "tasks": {"experts": experts}})
    for part in said:
        everything = merged(everything, part)
    return config_from_mapping(everything)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/version" in row]


def weights_of(folder: Path) -> bytes:
    return (folder / "run" / "checkpoints" / f"step-{STEPS:06d}" / "policy" / "model.safetensors").read_bytes()


def test_an_experts_replies_are_learnt_beside_what_is_played(tmp_path: Path) -> None:
    learning = {
        "schedule": {"steps": 60},
        "rewards": ["exact"],
        "checkpoint": {"save_every": 0},
        "evaluation": {"taskset": "experts", "sampling": {"max_new_tokens": 3}},
    }
    summary = run(config_of(tmp_path, MIX, LOSS, learning))
    assert summary["accuracy_before"] <= 0.25
    assert summary["accuracy_after"] >= 0.625
    rows = rows_of(tmp_path)
    for row in rows:
        assert row["sample/expert"] == 3  # 0.4 of 6, rounded up
        assert row["rollout/groups"] == 6
        assert row["rollout/trajectories"] == 3 * 4 + 3
        assert 0 < row["train/expert_fraction"] < 1
        assert row["train/expert_share"] == 0.5
        assert row["rollout/staleness_max"] == 0
        assert row["sample/model_version/min"] == row["sample/model_version/max"] == row["train/version"] - 1
        assert row["mismatch/log_prob_max"] < 1e-4


def test_each_part_of_the_loss_has_its_say(tmp_path: Path) -> None:
    """Without weight on the expert its replies change nothing, without weight on the rest rewards change nothing."""

    def weights(name: str, mu: float, *said: dict[str, Any], wrong: bool = False) -> bytes:
        loss = {"algorithm": {"policy_loss": {"mu": mu}}}
        run(config_of(tmp_path / name, MIX, LOSS, {"checkpoint": {"save_every": 0}}, loss, *said, wrong=wrong))
        return weights_of(tmp_path / name)

    other_rewards = {"rewards": [{"kind": "regex", "pattern": "^[5-9]"}]}
    both = weights("both", 0.5)
    assert weights("other-expert", 0.5, wrong=True) != both
    assert weights("other-rewards", 0.5, other_rewards) != both
    assert weights("a", 0.0) == weights("b", 0.0, wrong=True) != weights("c", 0.0, other_rewards)
    assert weights("d", 1.0) == weights("e", 1.0, other_rewards) != weights("f", 1.0, wrong=True)


def test_replay_trains_on_groups_again_and_says_how_old_they_are(tmp_path: Path) -> None:
    config = config_of(tmp_path, REPLAY)
    run(config)
    rows = rows_of(tmp_path)
    assert [row["sample/replayed"] for row in rows] == [0, 3, 3, 3, 3, 3]
    assert [row["rollout/groups"] for row in rows] == [6] * STEPS
    assert [row["rollout/staleness_max"] for row in rows] == [0] * STEPS  # of what was played for the step
    assert min(row["train/version"] - 1 - row["sample/model_version/min"] for row in rows[1:]) >= 1
    assert max(row["train/version"] - 1 - row["sample/model_version/min"] for row in rows) <= 3
    assert all("mismatch/weight/mean" in row for row in rows)  # older weights sampled them: they are corrected
    assert sum(row["rollout/dropped"] for row in rows) > 0
    assert all(0 < row["workflow/pass_rate"] < 1 and row["reward/equal_groups"] == 0 for row in rows)
    assert rows[0]["sample/fresh_reward"] == pytest.approx(rows[0]["reward/mean"])
    assert any(row["sample/fresh_reward"] != pytest.approx(row["reward/mean"]) for row in rows[1:])


@pytest.mark.parametrize(
    "said",
    [(MIX, LOSS, {"schedule": {"deterministic": True, "max_staleness": 2}}), (REPLAY,)],
    ids=["mix, ahead of its trainer", "replay"],
)
def test_a_killed_run_ends_with_the_same_bytes(said: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    run(config_of(tmp_path / "whole", *said))
    killed = config_of(tmp_path / "killed", *said)
    (tmp_path / "killed" / "config.yaml").write_text(yaml.safe_dump(killed.model_dump(mode="json", exclude_unset=True)))
    kills = [
        ("put: half a record", 5),
        ("put: journaled, not counted", 2),
        ("update: step taken, no version", 5),
        ("update: gradient there, no step", 2),
    ]
    outcomes = launches(tmp_path / "killed" / "config.yaml", tmp_path / "killed" / "run", kills)
    assert outcomes[:-1] == [moment for moment, _ in kills]
    assert outcome_of(tmp_path / "killed" / "run") == outcome_of(tmp_path / "whole" / "run")
