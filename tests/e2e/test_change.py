"""A killed run that continues with other weights trains on no rollout that its own weights did not sample."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.killing import launch, launches
from tests.e2e.test_kill import ASYNCHRONOUS, SYNCHRONOUS, TINY, outcome_of

KILLED = ("update: step taken, no version", 9)
"""In the fourth step of the second stage, which has no checkpoint."""
BEFORE = ("checkpoint.save_every=1000", "rewards=[{kind: exact, partial_credit: 0.5}]")
CHANGE = ("stages.1.train.optimizer.lr=5e-3", "--change")


def outcome_without_notes(run_dir: Path) -> dict[str, Any]:
    """The outcome, but for the notes that something was changed and discarded."""
    outcome = outcome_of(run_dir)
    for row in outcome["metrics"]:
        for key in ("train/changed_fields", "rollout/discarded"):
            row.pop(key, None)
    outcome["summary"].pop("changes", None)
    return outcome


def discarded(run_dir: Path) -> list[int]:
    """The numbers of groups that were discarded at a time, which log and metrics agree on."""
    logged = re.findall(r"(\d+) groups of an earlier session are discarded", (run_dir / "log.txt").read_text())
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    numbers = [int(row["rollout/discarded"]) for row in rows if "rollout/discarded" in row]
    assert numbers == [int(number) for number in logged]
    return numbers


@pytest.mark.parametrize("mode", ["synchronous", "deterministic", "sql"])
def test_a_changed_run_is_the_run_that_began_with_the_change(mode: str, tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "killed", tmp_path / "whole"
    overrides = (*BEFORE, *(ASYNCHRONOUS if mode == "deterministic" else SYNCHRONOUS))
    if mode == "sql":  # the first stage reads files
        overrides += (f"stages.1.buffer={{kind: sql, url: 'sqlite:///{tmp_path}/groups.db'}}",)
    moment, update = KILLED
    # One step later where its groups are of a version two steps older. How many others ran ahead depends on timing.
    assert launch(TINY, run_dir, (moment, update + (mode == "deterministic")), overrides) == moment
    assert launches(TINY, run_dir, overrides=(*overrides, *CHANGE)) == ["finished"]
    assert launches(TINY, whole, overrides=(*overrides, CHANGE[0])) == ["finished"]
    assert outcome_without_notes(run_dir) == outcome_without_notes(whole)
    # At least two steps had taken 4 groups each that no version before the change sampled.
    assert discarded(run_dir)[0] >= 8
    assert discarded(whole) == []


def test_a_later_stage_counts_only_over_the_weights_that_it_began_with(tmp_path: Path) -> None:
    run_dir, whole, lr = tmp_path / "killed", tmp_path / "whole", "stages.0.train.optimizer.lr=1e-3"
    assert launch(TINY, run_dir, KILLED, BEFORE) == KILLED[0]
    shutil.rmtree(run_dir / "checkpoints")
    assert launches(TINY, run_dir, overrides=(*BEFORE, lr, "--change")) == ["finished"]
    assert launches(TINY, whole, overrides=(*BEFORE, lr)) == ["finished"]
    assert outcome_without_notes(run_dir) == outcome_without_notes(whole)
    assert discarded(run_dir)[0] >= 12


@pytest.mark.parametrize("record", ["kept", "lost"])
def test_rollouts_count_where_the_hash_of_their_weights_is_known(record: str, tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "killed", tmp_path / "whole"
    assert launch(TINY, run_dir, KILLED, BEFORE) == KILLED[0]
    if record == "lost":
        (run_dir / "steps.jsonl").unlink()
    assert launches(TINY, run_dir, overrides=BEFORE) == ["finished"]
    assert launches(TINY, whole, overrides=BEFORE) == ["finished"]
    assert outcome_without_notes(run_dir) == outcome_without_notes(whole)
    assert (discarded(run_dir) == []) == (record == "kept")
