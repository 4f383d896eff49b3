"""The rules of `trivium doctor` by figures, which provoke one at a time, and what the command prints. Runs that provoke
them are in test_doctor_runs.py."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import refused

from tests.processes import Forked, trivium
from trivium.config import config_from_mapping
from trivium.foundation.errors import RunDirError
from trivium.inspection.doctor import diagnose, examine_engine, examine_machine
from trivium.monitors.health import RULES, Row, earlier_problems, evidence_of
from trivium.runtime.launch import run
from trivium.types import Group, Message, StopReason, Task, Trajectory, Turn

HEALTHY = Path(__file__).parents[2] / "data" / "healthy" / "metrics.jsonl"
CONFIG: dict[str, Any] = {
    "model": {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 16, "heads": 2, "max_position": 32},
    "cluster": {"threads": 1},
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "engine": {"sampling": {"max_new_tokens": 2}},
    "schedule": {"steps": 12, "groups_per_step": 3, "group_size": 4},
    "monitors": [{"kind": "jsonl"}],
}


def found_in(run_dir: Path) -> dict[str, str]:
    return {finding.where: finding.found for finding in diagnose(run_dir).findings}


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No completion is ever right, and none has room to end."""
    path = tmp_path_factory.mktemp("doctor") / "stuck"
    rewards = [{"kind": "regex", "pattern": "x", "name": "never"}]
    run(config_from_mapping({**CONFIG, "run": {"dir": str(path)}, "rewards": rewards}))
    return path


def test_a_run_that_learns_nothing_is_told_so_once_while_it_runs_and_afterwards(stuck: Path) -> None:
    assert set(found_in(stuck)) == {"equal rewards", "truncation"}
    log = (stuck / "log.txt").read_text()
    assert log.count("equal rewards: ") == log.count("truncation: ") == 1
    report = diagnose(stuck)
    assert report.facts[1].startswith("bound by ")
    steps = len((stuck / "metrics.jsonl").read_text().splitlines())
    assert f": {steps} steps, " in report.facts[0]
    unfinished = stuck.parent / "unfinished"
    shutil.copytree(stuck, unfinished)
    (unfinished / "summary.json").unlink()
    metrics = unfinished / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row | {"time/sync": 3 * row["time/step"]}) + "\n" for row in rows))
    bound = diagnose(unfinished).facts[1]
    assert "bound by weight sync: 7" in bound  # of the time of the steps and of what lies between them
    evaluated = stuck.parent / "evaluated"
    shutil.copytree(stuck, evaluated)
    with (evaluated / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "eval/train/reward": 0.5}\n')
    assert report.facts[0].endswith(f"{steps * 3 * 4} rollouts of {steps} steps")
    assert f": {steps} steps, " in diagnose(evaluated).facts[0], "step 0 is the evaluation before training"
    assert "engine.sampling.max_new_tokens" in str(report.findings[1])


def test_the_command_ends_with_1_and_says_what_to_change(stuck: Path, tmp_path: Path) -> None:
    command = Forked("doctor", tmp_path / "out", trivium, "doctor", str(stuck)).ended(1)
    assert "do: easier tasks" in command.text
    with refused(RunDirError, tmp_path):
        diagnose(tmp_path)


# --------------------------------------------------------------------------- in figures


def healthy() -> list[Row]:
    return [json.loads(line) for line in HEALTHY.read_text().splitlines()]


def test_the_arithmetic_recipe_is_healthy_at_every_step() -> None:
    rows = healthy()
    for end in range(10, len(rows), 7):
        assert RULES.problems(evidence_of(rows[:end])) == []
    assert RULES.problems(evidence_of(rows)) == []


def changed(**late: float) -> list[Row]:
    """The healthy run with other values in its last ten train steps."""
    rows = healthy()
    trained = [number for number, row in enumerate(rows) if "reward/mean" in row]
    return [{**row, **late} if number in trained[-10:] else row for number, row in enumerate(rows)]


PROVOKED: dict[str, Sequence[Row]] = {
    "not finite": changed(**{"train/loss/policy": float("nan"), "mismatch/kl": float("inf")}),
    "entropy collapse": changed(**{"train/entropy": 0.001, "reward/mean": 0.85}),
    "equal rewards": changed(**{"reward/equal_groups": 1.0, "reward/mean": 0.85}),
    "saturated rewards": changed(**{"reward/equal_groups": 1.0, "reward/mean": 1.0}),
    "falling reward": [
        *({key: value for key, value in row.items() if not key.startswith("eval/")} for row in changed()[:-10]),
        *({**row, "reward/mean": 0.1} for row in changed()[-10:] if "reward/mean" in row),
    ],
    "rising loss": [
        {"step": step, "train/version": step, "train/loss/policy": 0.3 * step, "rollout/trajectories": 8.0}
        for step in range(1, 10)
    ],
    "learning rate too low": [
        {**row, "train/lr/policy": 1e-9, "reward/mean": 0.4} if "reward/mean" in row else row for row in healthy()
    ],
    "clip fraction": changed(**{"train/clip_fraction": 0.4}),
    "kl drift": changed(**{"train/ref_kl": 2.0}),
    "length explosion": changed(**{"rollout/response_tokens": 30.0}),
    "length collapse": changed(**{"rollout/response_tokens": 0.5, "reward/mean": 0.85}),
    "empty completions": changed(**{"rollout/empty": 0.9}),
    "one answer": changed(**{"rollout/most_common": 0.9}),
    "truncation": changed(**{"rollout/truncated": 0.9}),
    "engine mismatch": changed(**{"mismatch/kl": 0.1}),
    "staleness": changed(**{"mismatch/ess": 0.2, "rollout/staleness": 3.0}),
    "dead component": changed(**{"reward/component/format": 1.0}),
    "failures": changed(**{"rollout/failed": 300.0}),
    "refused groups": changed(**{"rollout/refused": 200.0}),
    "generalization gap": [*changed(**{"reward/mean": 0.95}), {"step": 218.0, "eval/test/reward": 0.34}],
    "reward hacking": [*changed(**{"reward/mean": 1.4}), {"step": 218.0, "eval/test/accuracy": 0.3}],
    "waiting": changed(**{"perf/idle": 0.95, "time/step": 100.0}),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_rule_finds_what_provokes_it_and_no_other_does(name: str) -> None:
    (finding,) = RULES.problems(evidence_of(PROVOKED[name], usual_lr=1e-3))
    assert finding.where == name
    assert finding.do


def test_a_problem_that_the_run_has_overcome_is_listed_with_its_steps() -> None:
    rows = healthy()
    trained = [row for row in rows if "reward/mean" in row]
    bad = {row["step"] for row in trained[len(trained) // 2 : len(trained) // 2 + 15]}
    rows = [{**row, "rollout/truncated": 0.9} if row["step"] in bad and "reward/mean" in row else row for row in rows]
    assert RULES.problems(evidence_of(rows)) == []
    (earlier,) = earlier_problems(rows, [])
    assert earlier.where == "truncation"
    last, first = (int(number) for number in re.findall(r"step (\d+)", earlier.found))
    assert {first, last} <= bad
    assert first < last
    assert earlier_problems(rows, [earlier]) == []  # one that still holds is listed once


def test_an_evaluation_is_compared_with_the_steps_around_it() -> None:
    """Not with later ones, by which the policy has learned more."""

    def rows(last: int, evaluated: dict[int, float]) -> list[Row]:
        trained: list[Row] = [
            {"step": step, "train/version": step, "reward/mean": step / 10, "reward/min": 0.0, "reward/max": 1.0}
            for step in range(1, last + 1)
        ]
        return sorted([*trained, *({"step": s, "eval/test/reward": r} for s, r in evaluated.items())], key=_step)

    assert RULES.problems(evidence_of(rows(10, {0: 0.07}))) == []
    assert RULES.problems(evidence_of(rows(10, {0: 0.07, 10: 0.68}))) == []
    late = rows(10, {0: 0.07, 5: 0.05})
    (finding,) = RULES.problems(evidence_of(late))
    assert finding.found == "reward/mean is 0.55 around step 5, and eval/test/reward 0.05 after it"
    assert earlier_problems([*late, {"step": 10, "eval/test/reward": 0.9}], []) == [], "a later evaluation refutes it"


def test_a_policy_that_learns_quickly_has_no_gap_to_an_evaluation_before_training() -> None:
    rows: list[Row] = [{"step": 0.0, "eval/test/reward": 0.0}]
    for step in range(1, 6):
        reward = {"reward/mean": min(1.0, 0.3 * step), "reward/min": 0.0, "reward/max": 1.0}
        rows.append({"step": step, "train/version": step, **reward})
    assert RULES.problems(evidence_of(rows)) == []


def test_five_steps_show_that_nearly_all_completions_are_truncated() -> None:
    def rows(truncated: float) -> Sequence[Row]:
        return [{**row, "rollout/truncated": truncated} for row in healthy() if "reward/mean" in row][:5]

    (finding,) = RULES.problems(evidence_of(rows(0.98)))
    assert finding.where == "truncation"
    assert RULES.problems(evidence_of(rows(0.9))) == []


def test_stages_of_different_tasks_are_not_compared() -> None:
    """A stage with harder tasks, and longer completions, follows one that ends well."""
    trained = [row for row in healthy() if "reward/mean" in row]
    lengths = {"rollout/response_tokens": 40.0, "rollout/truncated": 0.0}
    easy = [{**row, "reward/mean": 0.9, "step": step} for step, row in enumerate(trained[-20:], 1)]
    hard = [{**row, **lengths, "reward/mean": 0.3, "step": step} for step, row in enumerate(trained[-20:], 21)]
    rows: list[Row] = [*easy, *hard]
    assert {problem.where for problem in RULES.problems(evidence_of(rows))} == {"falling reward", "length explosion"}
    bounds = [0, 20, 40]
    assert RULES.problems(evidence_of(rows, bounds)) == []
    assert earlier_problems(rows, [], stage_bounds=bounds) == []
    fallen = [{**row, "reward/mean": 0.0} if row["step"] > 30 else row for row in rows]
    assert {problem.where for problem in RULES.problems(evidence_of(fallen, bounds))} == {"falling reward"}


def _step(row: Row) -> float:
    return row["step"]


def test_a_run_of_few_steps_is_not_called_healthy(stuck: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    shutil.copytree(stuck, few)
    lines = (few / "metrics.jsonl").read_text().splitlines(keepends=True)
    (few / "metrics.jsonl").write_text("".join(lines[:3]))
    assert diagnose(few).no_findings == "too few steps to find what is wrong: most rules need 5"
    assert diagnose(stuck).no_findings == "nothing wrong was found"


def test_the_first_cause_of_what_is_not_a_number_is_named() -> None:
    (finding,) = RULES.problems(evidence_of(PROVOKED["not finite"]))
    assert finding.found.startswith("mismatch/kl is inf")


def test_groups_that_are_refused_for_equal_rewards_are_no_finding_of_their_own() -> None:
    rows = changed(**{"rollout/refused": 200.0, "rollout/refused/zero_variance": 190.0})
    assert RULES.problems(evidence_of(rows)) == []
    # A step without groups of equal rewards does not log how many it refused for that.
    newest = next(number for number in reversed(range(len(rows))) if "reward/mean" in rows[number])
    others = {key: value for key, value in rows[newest].items() if not key.startswith("rollout/refused/")}
    rows[newest] = {**others, "rollout/refused": 0.0}
    assert RULES.problems(evidence_of(rows)) == []


def test_every_rule_is_provoked() -> None:
    assert set(RULES.by_name) == {*PROVOKED, "duplicated rollouts", "ended by an error"}


def test_completions_that_repeat_each_other() -> None:
    def rollout(index: int, start: int) -> Trajectory:
        tokens = np.arange(start, start + 9, dtype=np.int32)
        log_prob = -np.ones(9, np.float32)
        turn = Turn(tokens[:1], tokens, log_prob, np.zeros(9, np.int32), StopReason.EOS, "")
        return Trajectory(index, (turn,), {"r": 1.0})

    task = Task("a", (Message("user", "?"),))
    same = [Group(slot, task, tuple(rollout(i, slot) for i in range(4))) for slot in range(8)]
    (finding,) = RULES.problems(replace(evidence_of(healthy()), groups=[same]))
    assert finding.where == "duplicated rollouts"
    different = [Group(slot, task, tuple(rollout(i, slot + 9 * i) for i in range(4))) for slot in range(8)]
    assert RULES.problems(replace(evidence_of(healthy()), groups=[different])) == []
    early = [same] * 3 + [different] * 3  # the whole run is looked at, not its newest steps alone
    (finding,) = RULES.problems(replace(evidence_of(healthy()), groups=early))
    assert finding.found.endswith(", in earlier steps")


def test_the_tokens_of_the_worst_mismatch_are_named() -> None:
    evidence = replace(
        evidence_of(PROVOKED["engine mismatch"]), mismatched=["token 3 of task a: engine -1, trainer -9"]
    )
    assert "worst at token 3 of task a" in RULES.problems(evidence)[0].found


def test_the_engine_of_a_run_is_compared_in_every_layer(stuck: Path, tmp_path: Path) -> None:
    report = examine_engine(stuck)
    assert not report.findings
    assert str(stuck / "model") in report.facts[0]
    assert "no run" in Forked("doctor", tmp_path / "out", trivium, "doctor", "--engine").ended(2).text


def test_a_machine_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    report = examine_machine(tmp_path)
    areas = [fact.partition(":")[0] for fact in report.facts]
    assert areas[:5] == ["processor", "memory", "disk", "/dev/shm", "GPU"]
    assert any(fact.startswith("packages, base: torch") for fact in report.facts)
    assert "ports: 8010 (serve.port) " in "".join(report.facts)
    assert "4096" in next(finding.found for finding in report.findings if finding.where == "threads")
