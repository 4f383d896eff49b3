"""A run killed with SIGKILL anywhere ends with the bytes of a run that was not."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from example_counts import FULL

from tests.e2e.killing import BESIDE, MOMENTS, launches
from trivium.config import load_config
from trivium.foundation.metrics import depends_on_machine

TINY = Path(__file__).parent / "tiny.yaml"
DEMO = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
CLOCK = ("seconds", "time", "verdict", "memory")
"""What a summary says about the clock."""
SYNCHRONOUS: tuple[str, ...] = ()
ASYNCHRONOUS = ("schedule.deterministic=true", "schedule.max_staleness=2")
RANDOM_KILLS = 6 if FULL else 3


def sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def outcome_of(run_dir: Path) -> dict[str, Any]:
    """Everything that must not depend on the kills: a hash of the last checkpoints' models, and the metrics."""
    last = sorted((run_dir / "checkpoints").glob("step-*"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    tensors = [file for step in last for file in step.rglob("*.safetensors")]
    return {
        "checkpoints": [path.name for path in last],
        "tensors": {str(file.relative_to(run_dir)): sha256(file) for file in tensors},
        "metrics": [{k: v for k, v in row.items() if not depends_on_machine(k)} for row in rows],
        "summary": {k: v for k, v in json.loads((run_dir / "summary.json").read_text()).items() if k not in CLOCK},
    }


@pytest.fixture(scope="module", params=[SYNCHRONOUS, ASYNCHRONOUS], ids=["synchronous", "deterministic"])
def uninterrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], dict[str, Any], float]:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    assert launches(TINY, run_dir, overrides=request.param) == ["finished"]
    seconds = json.loads((run_dir / "summary.json").read_text())["seconds"]
    return request.param, outcome_of(run_dir), seconds


def test_killed_at_every_kind_of_moment(
    uninterrupted: tuple[tuple[str, ...], dict[str, Any], float], tmp_path: Path
) -> None:
    overrides, expected, _ = uninterrupted
    # Early moments first: each launch starts from where the last one died.
    kills = [
        ("model: built, not renamed", 1),
        ("config: half written", 1),
        ("update: gradient there, no step", 2),
        ("save: models written, no manifest", 1),
        ("save: manifest half written", 1),
        ("save: manifest written, not renamed", 1),
        ("save: renamed, not pruned", 1),
        ("log: half a row", 2),
        ("put: half a record", 3),
        ("put: journaled, not counted", 2),
        ("adopt: half the tensors", 2),
        ("update: step taken, no version", 1),
        ("prune: manifest gone, files not removed", 2),
        ("save: renamed, not pruned", 4),  # the last save: a start prunes, too, and then those of steps 8 and 10
    ]
    outcomes = launches(TINY, tmp_path / "run", kills, overrides)
    assert outcomes[:-1] == [moment for moment, _ in kills]
    assert {moment for moment, _ in kills} == set(MOMENTS)
    assert outcome_of(tmp_path / "run") == expected


@pytest.mark.parametrize("uninterrupted", [SYNCHRONOUS], indirect=True, ids=["synchronous"])
def test_killed_while_a_checkpoint_is_written_beside_training(
    uninterrupted: tuple[tuple[str, ...], dict[str, Any], float], tmp_path: Path
) -> None:
    _, expected, _ = uninterrupted
    half, whole = BESIDE
    kills = [(half, 1), (half, 2), (whole, 2), (half, 2)]  # the saves of steps 2, 4, 4 and 6; a start prunes first
    outcomes = launches(TINY, tmp_path / "run", kills, ("checkpoint.asynchronous=true",))
    assert outcomes[:-1] == [moment for moment, _ in kills]
    assert outcome_of(tmp_path / "run") == expected


def test_killed_at_random_times(uninterrupted: tuple[tuple[str, ...], dict[str, Any], float], tmp_path: Path) -> None:
    """New times are drawn until so many launches were really killed; a kill that came too late begins the run afresh,
    and the next ones come sooner. Simulated worlds kill the same commands at many more times."""
    overrides, expected, seconds = uninterrupted
    dice, killed = random.Random(20261120), 0
    for attempt in range(6):
        kills = [dice.uniform(0.05, seconds / (attempt + 1)) for _ in range(RANDOM_KILLS - killed)]
        outcomes = launches(TINY, tmp_path / f"run-{attempt}", kills, overrides)
        killed += outcomes.count("time")
        assert set(outcomes) <= {"time", "finished"}
        assert outcome_of(tmp_path / f"run-{attempt}") == expected
        if killed == RANDOM_KILLS:
            return
    pytest.fail(f"only {killed} kills hit")


def test_the_demo_generates_while_it_trains_and_keeps_its_bits(tmp_path: Path) -> None:
    """One step ahead, as the recipe says: twice the same bytes, killed or not."""
    stage = load_config(DEMO).stage_configs()[1]
    assert (stage.max_staleness, stage.schedule.deterministic) == (1, True)
    algorithm = stage.algorithm.model_dump(mode="json", exclude_unset=True)
    del algorithm["filters"]  # a model that knows nothing has groups of equal rewards only
    overrides = (
        f"stages.1.schedule.max_staleness={stage.max_staleness}",
        "stages.1.schedule.deterministic=true",
        f"stages.1.algorithm={json.dumps(algorithm)}",
    )
    assert launches(TINY, tmp_path / "whole", overrides=overrides) == ["finished"]
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/staleness_max"] for row in rows if "reward/mean" in row] == [0, 1, 1, 1, 1, 1]
    assert not any(key.startswith("time/score") for row in rows for key in row)  # no pass for the old log-probabilities
    kills = [("update: step taken, no version", 9), ("put: half a record", 3), ("adopt: half the tensors", 2)]
    outcomes = launches(TINY, tmp_path / "killed", kills, overrides)
    assert outcomes[:-1] == [moment for moment, _ in kills]
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")


def test_a_stage_that_ends_by_a_metric_stays_ended(tmp_path: Path) -> None:
    """Killed after the first stage's last save, it goes on with the next stage, as the whole run did."""
    overrides = ("stages.0.schedule.steps=50", "stages.0.schedule.until={metric: train/loss/policy, below: 2.2}")
    assert launches(TINY, tmp_path / "whole", overrides=overrides) == ["finished"]
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss/policy"] for row in rows if "train/loss/policy" in row and row["step"] <= 50]
    assert 1 < len(losses) < 50
    assert losses[-1] < 2.2 <= min(losses[:-1])
    kills = [("update: step taken, no version", len(losses) + 1)]  # the next stage's first step
    assert launches(TINY, tmp_path / "killed", kills, overrides)[:-1] == [kills[0][0]]
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
