"""What a run shows while it works, and what it returns without an evaluation: real runs of a tiny model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import tiny_model

import trivium
from tests.processes import commands
from trivium.config import load_config
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.phases import Activity, watch

CONFIG: dict[str, Any] = {
    "model": tiny_model(),
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}, "test": {"kind": "arithmetic", "max_operand": 3}},
    "engine": {"sampling": {"max_new_tokens": 4}},
    "train": {"max_tokens_per_micro_batch": 24},
    "schedule": {"steps": 1, "groups_per_step": 3, "group_size": 4},
    "workflow": {"max_concurrent": 1},
}

pytestmark = pytest.mark.slow


def length(prompt: str, completion: str) -> float:
    time.sleep(0.01)
    return float(len(completion))


class SlowEngine(TorchEngine):
    """Loads its model slowly."""

    def __init__(self, *given: Any, **named: Any) -> None:
        time.sleep(0.5)
        super().__init__(*given, **named)


class Reader:
    """Keeps what is shown of each activity: its phases, unit, total and finished parts."""

    def __init__(self) -> None:
        self.shown: dict[str, set[tuple[str, str, int | None, int]]] = {}

    def show(self, activities: Sequence[Activity]) -> None:
        for each in activities:
            self.shown.setdefault(each.name, set()).add((each.phase, each.unit, each.total, each.finished))

    def say(self, text: str) -> None: ...


def test_each_phase_of_a_run_says_what_is_done_of_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trivium.monitors.console._QUIET_S", 0.1)
    reader = Reader()
    end = watch(reader)
    engine = {**CONFIG["engine"], "kind": f"{__name__}:SlowEngine"}
    evaluation = {"taskset": "test", "samples": 2}
    config = {**CONFIG, "run": {"dir": tmp_path}, "engine": engine, "evaluation": evaluation, "monitors": ["console"]}
    config["schedule"] = {**CONFIG["schedule"], "steps": 2}
    try:
        trivium.run(config, rewards=[length])
    finally:
        end()
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"loading the engine's model: \d:\d\d", line) for line in lines), "it reports no progress"
    assert any(re.fullmatch(r"evaluating test: \d+ of 32 rollouts after \d:\d\d", line) for line in lines)
    assert {(unit, total) for _, unit, total, _ in reader.shown["evaluating test"] if total} == {("rollouts", 32)}
    assert {done for *_, done in reader.shown["evaluating test"]} == {*range(33)}
    done = {each for *_, total, each in reader.shown["step 2: rollouts"] if total == 12}
    assert 12 in done
    assert done - {0, 4, 8, 12}, "rollouts of unfinished groups count"
    training = reader.shown["step 1: training"]
    (total,) = {total for phase, _, total, _ in training if phase == "update/policy" and total}
    assert total > 1
    assert {done for phase, *_, done in training if phase == "update/policy"} >= {*range(1, total + 1)}


def test_a_process_that_explores_alone_logs_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.monitors.console._QUIET_S", 0.1)
    shared = {"buffer": {"kind": "sql", "url": f"sqlite:///{tmp_path / 'buffer.db'}"}, "sync": {"method": "checkpoint"}}
    engine = {**CONFIG["engine"], "kind": f"{__file__}:SlowEngine"}
    config = {
        **CONFIG,
        **shared,
        "engine": engine,
        "run": {"dir": str(tmp_path / "run")},
        "rewards": [f"{__file__}:length"],
    }
    config["schedule"] = {**CONFIG["schedule"], "steps": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with commands(tmp_path) as start:
        trainer = start("train", "run", str(tmp_path / "run.yaml"), "run.mode=train")
        trivium.run(load_config(tmp_path / "run.yaml", ["run.mode=explore", "run.explorer=a"]))
        trainer.ended(0)
    log = (tmp_path / "run" / "log-a.txt").read_text()
    assert re.search(r"waiting for the trainer: (took )?\d:\d\d", log)
    assert re.search(r"loading the engine's model: \d:\d\d", log)
    counts = [
        (int(done), int(begun)) for done, begun in re.findall(r"rollouts: (\d+) of (\d+) groups after \d:\d\d", log)
    ]
    assert counts == sorted(counts)
    assert any(done > 0 for done, _ in counts)
    assert all(done <= begun <= 6 for done, begun in counts)


def test_a_run_without_evaluation_returns_its_rewards_and_no_time_falls_when_it_is_continued(tmp_path: Path) -> None:
    config = {**CONFIG, "run": {"dir": tmp_path}, "monitors": ["jsonl"]}
    results = []
    for steps in (2, 2, 3):
        config["schedule"] = {**CONFIG["schedule"], "steps": steps}
        results.append(trivium.run(config, rewards=[length]))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert [result["rewards"] for result in results] == [rewards[:2], rewards[:2], rewards]
    times = [{**result["time"], "whole": result["seconds"]} for result in results]
    assert times[0]["checkpoint"] > 0
    for before, after in pairwise(times):
        assert all(after[name] >= before[name] for name in before)
