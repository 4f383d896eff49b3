"""An evaluation reports the version that it ran on: the metrics of a run equal those of its checkpoints, evaluated
alone. Explorers that lag behind, or run ahead, may not change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_kill import TINY
from tests.processes import commands
from trivium.config import load_config
from trivium.runtime.checkpoint_eval import evaluate

EVAL = "eval/test/"


def evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        found = {name: value for name, value in row.items() if name.startswith(EVAL)}
        rows.setdefault(row["step"], {}).update(found)
    return {step: row for step, row in rows.items() if row}


@pytest.mark.parametrize(
    "loop",
    [
        {},
        {"schedule": {"max_staleness": 4}, "sync": {"interval": 3}, "evaluation": {"every": 3}},
        {"schedule": {"max_staleness": 2, "deterministic": True}},
        {"schedule": {"max_staleness": 4}, "sync": {"style": "dynamic_by_explorer"}},
        {"schedule": {"max_staleness": 2}, "sync": {"method": "checkpoint"}, "train": {"own_process": True}},
    ],
    ids=["on-policy", "lagging", "ahead", "driven", "processes"],
)
def test_the_metrics_of_a_step_are_those_of_its_weights(loop: dict[str, Any], tmp_path: Path) -> None:
    changes = [f"{section}.{key}={json.dumps(value)}" for section, keys in loop.items() for key, value in keys.items()]
    overrides = [
        *("rewards=[{kind: exact, partial_credit: 0.5}]", "stages.1.train.optimizer.lr=2e-2"),
        *("stages.1.schedule.steps=12", "evaluation.every=1", "checkpoint.save_every=1", "checkpoint.keep=20"),
        *(f"stages.1.{change}" for change in changes),
        f"run.dir={tmp_path / 'run'}",
    ]
    with commands(tmp_path) as start:
        start("run", "run", str(TINY), *overrides).ended()
    config = load_config(TINY, overrides)
    reported = evaluations(tmp_path / "run")
    assert len({row[EVAL + "reward"] for row in reported.values()}) > 4, "the weights of each step answer differently"
    for step, row in reported.items():
        if step > 5 and step % 2:  # an evaluation alone costs as much as a start
            alone = evaluate(config, step)
            same = row.keys() & alone.keys() - {name for name in row if "time" in name or "second" in name}
            assert {n: row[n] for n in same} == pytest.approx({n: alone[n] for n in same}), f"step {step}"
        assert step <= 5 or row[EVAL + "version"] == step
