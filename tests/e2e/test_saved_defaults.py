"""A run directory that was saved before a default changed: resumed, the run does what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.processes import Forked, trivium
from trivium.inspection.run import RecordedRun

TINY = Path(__file__).parent / "tiny.yaml"
SHORT = ("stages.0.schedule.steps=1", "stages.1.schedule.group_size=16", "evaluation.every=0")


def train(run_dir: Path, *overrides: str) -> dict[str, bytes]:
    """What the run's last checkpoint holds."""
    name = f"run-{len([*run_dir.parent.iterdir()])}"
    command = ("run", str(TINY), f"run.dir={run_dir}", *SHORT, *overrides)
    Forked(name, run_dir.parent / f"{name}.txt", trivium, *command).ended(seconds=240)
    last = max((run_dir / "checkpoints").glob("step-*"))
    return {str(file.relative_to(last)): file.read_bytes() for file in last.rglob("*.safetensors")}


def saved_train(run_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((run_dir / "config.yaml").read_text())["train"]


def test_a_run_from_before_prefixes_were_shared_goes_on_without(tmp_path: Path) -> None:
    old, resumed, new = (tmp_path / name for name in ("old", "resumed", "new"))
    expected = train(old, "train.share_prefix=false", "stages.1.schedule.steps=3")
    train(resumed, "train.share_prefix=false", "stages.1.schedule.steps=1")
    config = yaml.safe_load((resumed / "config.yaml").read_text())
    del config["train"]["share_prefix"]  # as it was saved when there was no such field
    (resumed / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    assert RecordedRun.open(resumed).config.train.share_prefix is False
    train(resumed, "stages.1.schedule.steps=2")
    assert saved_train(resumed)["share_prefix"] is False
    assert train(resumed, "stages.1.schedule.steps=3") == expected
    shared = train(new, "stages.1.schedule.steps=3")
    assert saved_train(new)["share_prefix"] is True
    assert shared.keys() == expected.keys()
    assert shared != expected, "the test cannot tell"
