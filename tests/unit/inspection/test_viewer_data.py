"""What the pages of a run show: its curves and marks, the groups of a step, and every token with its numbers."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from failing import refused

from tests.unit.inspection.test_rollouts import CONFIG, GROUPS, SIZE, STEPS
from trivium.buffers.journal import read_recorded, write_groups
from trivium.config import config_from_mapping
from trivium.foundation.errors import RunDirError
from trivium.foundation.phases import SPANS, Busy, span, spans_to
from trivium.inspection.charts import CHARTS, Mark, curves, keys_of, marks, matching
from trivium.inspection.rollout_values import group_row, rollout_values, token_values
from trivium.inspection.rollout_view import decoder, piecewise
from trivium.inspection.rollouts import Rollout, read_rollouts
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.group_list import GroupList, Query
from trivium.inspection.viewer.task_table import TaskTable
from trivium.inspection.viewer.timeline import chrome_trace, lanes, read_spans
from trivium.runtime.launch import run
from trivium.types import Group, StopReason, Task, Trajectory, Turn


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept its tokens, ended after its second step and resumed."""
    path = tmp_path_factory.mktemp("viewer") / "run"
    config = {**CONFIG, "run": {"dir": str(path), "keep": "tokens"}, "checkpoint": {"save_every": 1}}
    run(config_from_mapping({**config, "schedule": {**CONFIG["schedule"], "steps": STEPS - 1}}))
    run(config_from_mapping(config))
    return path


def test_the_groups_of_a_step_and_their_tokens_are_those_that_the_reader_reads(run_dir: Path) -> None:
    recorded, pieces = RecordedRun(run_dir), piecewise(decoder(run_dir))
    assert recorded.groups.steps() == [1, 2, 3]
    expected = {identity(each): each for each in read_rollouts(run_dir, step=2)}
    places, means = recorded.groups.of_step(2), recorded.advantages(2)
    assert len(places) == GROUPS
    for place in places:
        group = recorded.groups.group(place)
        row = group_row(place, group, means)
        assert (row["size"], row["steps"], row["planned"]) == (SIZE, [2], 2)
        for trajectory, member in zip(group.trajectories, row["members"], strict=True):
            rollout = recorded.rollout(place, group, trajectory, 2)
            (known,) = expected[identity(rollout)].sequences
            (sequence,) = rollout_values(rollout, pieces)["sequences"]
            assert "".join(sequence["text"]) == decoder(run_dir)(known.tokens)
            assert sequence["tokens"] == known.tokens.tolist()
            mask = known.response_mask
            advantages = np.array(sequence["values"]["advantages"], np.float64)[mask].astype(np.float32)
            assert (advantages == known.columns["advantages"][mask]).all()  # every bit of them
            assert member["advantage"] == pytest.approx(advantages.mean(), rel=1e-6)
            assert member["reward"] == rollout.trajectory.reward
            assert [each is None for each in sequence["values"]["log_prob"]] == (~mask).tolist()
    json.dumps([group_row(place, recorded.groups.group(place), means) for place in places], allow_nan=False)
    with refused(RunDirError, "step 9"):
        recorded.groups.of_step(9)


def without_tokens(run_dir: Path, path: Path, **changes: Any) -> Path:
    """The run without what its steps computed, with a changed config."""
    shutil.copytree(run_dir, path, ignore=shutil.ignore_patterns("tokens"))
    config = yaml.safe_load((path / "config.yaml").read_text())
    for section, values in changes.items():
        config[section] |= values
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def test_advantages_that_follow_from_the_rewards_are_those_that_the_step_kept(run_dir: Path, tmp_path: Path) -> None:
    recorded, kept = RecordedRun(without_tokens(run_dir, tmp_path / "run")), RecordedRun(run_dir)
    pieces = piecewise(decoder(run_dir))
    for step in (1, 2, 3):
        assert recorded.advantages(step) == pytest.approx(kept.advantages(step), abs=1e-6)
        for place, original in zip(recorded.groups.of_step(step), kept.groups.of_step(step), strict=True):
            group = recorded.groups.group(place)
            for trajectory in group.trajectories:
                values, expected = (
                    rollout_values(source.rollout(at, group, trajectory, step), pieces)
                    for source, at in ((recorded, place), (kept, original))
                )
                (sequence,), (known,) = values["sequences"], expected["sequences"]
                assert sequence["values"]["advantages"] == known["values"]["advantages"]  # every bit of them
                assert sequence["values"].keys() < known["values"].keys()
                assert (values["kept"], expected["kept"]) == (False, True)


def test_advantages_that_need_a_model_are_not_guessed(run_dir: Path, tmp_path: Path) -> None:
    penalised = {"algorithm": {"kl": {"coef": 0.01, "place": "reward"}}}
    recorded = RecordedRun(without_tokens(run_dir, tmp_path / "penalised", **penalised))
    assert recorded.advantages(1) == {}
    lost = without_tokens(run_dir, tmp_path / "lost")  # a group of the step is not recorded
    journal = lost / "rollouts" / "stage-0" / "step-000001.msgpack"
    groups = [group for _, group in read_recorded(journal)]
    journal.unlink()
    write_groups(journal, groups[:-1])
    assert RecordedRun(lost).advantages(1) == {}
    assert RecordedRun(lost).advantages(2) != {}


def test_every_task_has_its_success_rate_at_each_step(run_dir: Path, tmp_path: Path) -> None:
    graded = without_tokens(run_dir, tmp_path / "graded")
    journal = graded / "rollouts" / "stage-0" / "step-000002.msgpack"
    groups = [group for _, group in read_recorded(journal)]
    journal.unlink()
    partly = [
        tuple(replace(each, rewards={"exact": 0.1 * each.index}) for each in group.trajectories) for group in groups
    ]
    write_groups(journal, [replace(group, trajectories=each) for group, each in zip(groups, partly, strict=True)])
    changes = {
        "evaluation": {"taskset": "test", "threshold": 0.2},
        "tasks": {"test": {"kind": "arithmetic", "max_operand": 9, "count": 4}},
    }
    threshold = without_tokens(graded, tmp_path / "threshold", **changes)
    for path, least in ((run_dir, 1.0), (graded, None), (threshold, 0.2)):
        rewards: dict[str, dict[int, list[float]]] = {}
        for rollout in read_rollouts(path):
            by_step = rewards.setdefault(rollout.group.task.task_id, {})
            by_step.setdefault(rollout.steps[0], []).append(rollout.trajectory.reward)
        table = TaskTable(RecordedRun(path))
        page = table.page("change", True, "", 0, 100)
        assert (page["total"], page["graded"]) == (len(rewards), least is None)
        for row in page["rows"]:
            expected = {
                step: np.mean(each if least is None else [reward >= least for reward in each])
                for step, each in sorted(rewards[row["task"]].items())
            }
            assert {point["step"]: point["value"] for point in row["points"]} == pytest.approx(expected)
            assert row["rollouts"] == sum(map(len, rewards[row["task"]].values()))
        differences = [row["points"][-1]["value"] - row["points"][0]["value"] for row in page["rows"]]
        assert differences == sorted(differences, reverse=True)
        second = table.page("task", False, "", 1, 2)["rows"]
        assert [row["task"] for row in second] == sorted(rewards)[1:3]
        assert table.page("", True, "no such task", 0, 100)["matching"] == 0


def test_ten_thousand_rollouts_of_a_step_are_listed_without_delay(tmp_path: Path) -> None:
    groups = [
        replace(made(slot), trajectories=tuple(member(slot, index) for index in range(8))) for slot in range(1250)
    ]
    write_groups(tmp_path / "rollouts" / "stage-0" / "step-000001.msgpack", groups)
    listed = GroupList(RecordedRun(tmp_path))
    began = time.process_time()
    page = listed.page(1, Query(sort="reward"))
    assert time.process_time() - began < 5
    assert (page["total"], len(page["rows"])) == (1250, 50)
    began = time.process_time()
    for first in range(0, 500, 50):  # the pages after it read nothing again
        assert len(listed.page(1, Query(sort="reward", first=first))["rows"]) == 50
    assert time.process_time() - began < 2.5


def member(slot: int, index: int) -> Trajectory:
    return replace(made(slot).trajectories[0], index=index, rewards={"exact": float(slot % 9 > index)})


def identity(rollout: Rollout) -> tuple[int, int, int]:
    return rollout.group.slot, rollout.group.attempt, rollout.trajectory.index


def test_ratios_follow_from_recorded_log_probs_and_unknown_numbers_are_none(run_dir: Path) -> None:
    sequence = next(iter(read_rollouts(run_dir, step=1))).sequences[0]
    mask = sequence.response_mask
    old = np.where(mask, sequence.log_prob + 0.5, 0.0).astype(np.float32)
    current = np.where(mask, np.nan, 0.0).astype(np.float32)
    values = token_values(replace(sequence, columns={"old_log_prob": old, "update_log_prob": current}))
    assert [each for each, here in zip(values["mismatch"], mask, strict=True) if here] == pytest.approx(
        [np.exp(0.5)] * mask.sum(), rel=1e-5
    )
    assert set(values["ratio"]) == {None}
    assert "advantages" not in values


def test_what_the_loss_saw_of_each_token_adds_up_to_what_the_step_logged(tmp_path: Path) -> None:
    algorithm = {"kind": "grpo", "mini_batches": 2, "epochs": 2, "policy_loss": {"kind": "ppo", "clip_low": 0.0}}
    train = {"optimizer": {"lr": 0.05}, "max_tokens_per_micro_batch": 32}
    run(config_from_mapping({**CONFIG, "algorithm": algorithm, "train": train, "run": run_section(tmp_path)}))
    rollouts = sorted(read_rollouts(tmp_path / "run", step=2), key=identity)  # as the step took them
    sequences = [each.sequences[0] for each in rollouts]
    first = sequences[: GROUPS * SIZE // 2]  # of the first mini-batch: the weights are still those of the old policy
    for sequence in first:
        seen, old = sequence.columns["update_log_prob"], sequence.columns["old_log_prob"]
        np.testing.assert_allclose(seen[sequence.response_mask], old[sequence.response_mask], atol=1e-6)
    second = sequences[GROUPS * SIZE // 2 :]
    gaps = [np.abs(s.columns["update_log_prob"] - s.columns["old_log_prob"])[s.response_mask].max() for s in second]
    assert max(gaps) > 1e-3
    for sequence in sequences:
        values = token_values(sequence)
        clipped, ratio, advantage = (values[name] for name in ("clipped", "ratio", "advantages"))
        for mask, each, r, a in zip(sequence.response_mask, clipped, ratio, advantage, strict=True):
            if mask:
                assert r is not None
                assert a is not None
                decided = -a * min(max(r, 1.0), 1.2) > -a * r
                assert each == decided or abs(r - 1) < 1e-5  # as the loss defines it: its low clip is 0 here
        assert all(each is None or 0 <= each <= np.log(20) for each in values["update_entropy"])


def run_section(path: Path) -> dict[str, Any]:
    return {"dir": str(path / "run"), "keep": "tokens"}


def test_curves_and_where_stages_begin_and_sessions_resume(run_dir: Path) -> None:
    recorded = RecordedRun.open(run_dir)
    rows = recorded.rows()
    curve = curves(rows, keys_of(rows))["reward/mean"]
    assert curve.steps == [1, 2, 3]
    assert curve.values == [row["reward/mean"] for row in rows]
    assert "mean total reward" in curve.help
    chart = next(chart for chart in CHARTS if chart.title == "Gradient norm")
    assert matching(keys_of(rows), chart) == ["train/grad_norm/policy"]
    assert marks(recorded) == [Mark(2, "resume", "resumed after step 2")]
    assert recorded.verdict.startswith("bound by ")


def test_rows_are_complete_lines_and_each_is_read_once_until_a_resumed_run_cuts_the_file(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    assert (run.rows(), run.last_step, run.metrics.written_s) == ([], 0, None)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert run.rows() == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert run.rows() == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert (run.last_step, run.metrics.generation) == (3, 0)
    path.write_text('{"step": 1}\n{"step": 2, "train/version": 2.0}\n')
    assert run.rows() == [{"step": 1}, {"step": 2, "train/version": 2.0}]
    assert (run.last_step, run.metrics.generation) == (2, 1)
    assert run.metrics_of(2) == {"train/version": 2.0}


def test_a_changed_config_and_record_are_read_again(run_dir: Path, tmp_path: Path) -> None:
    run = RecordedRun.open(without_tokens(run_dir, tmp_path / "run"))
    assert (run.stage_bounds, run.stage_at(3), [*run.steps]) == ([0, 3], (0, 0), [0, 1, 2, 3])
    with refused(RunDirError, "1 to 3"):
        run.stage_at(4)
    config = yaml.safe_load(run.config_file.read_text())
    config["schedule"]["steps"] = 12
    run.config_file.write_text(yaml.safe_dump(config))
    assert run.stage_bounds == [0, 12]
    (run.path / "steps.jsonl").unlink()
    assert [*run.steps] == []
    assert [each.takers for each in run.groups.of_step(3)] == [()] * GROUPS
    (run.path / "config.yaml").unlink()
    with refused(RunDirError, "config.yaml"):
        RecordedRun.open(run.path)


def test_what_is_not_a_number_is_no_point_of_a_curve() -> None:
    rows = [{"step": 1.0, "a/b": float("nan")}, {"step": 2.0, "a/b": 1.0}, {"step": 2.0, "a/b": 3.0}]
    assert curves(rows, ["a/b", "a/c"]).keys() == {"a/b"}
    assert curves(rows, ["a/b"])["a/b"].values == [3.0]


def test_a_list_of_groups_reads_no_record_and_skips_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "stage-0" / "step-000001.msgpack"
    write_groups(path, [made(slot) for slot in range(3)])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 6])
    recorded = RecordedRun(tmp_path)
    assert [place.slot for place in recorded.groups.of_step(1)] == [0, 1, 2]
    path.write_bytes(whole + whole)  # appended, as by a run in progress
    assert len(recorded.groups.of_step(1)) == 3  # an attempt that is recorded twice is one
    assert recorded.advantages(1) == {}


def made(slot: int) -> Group:
    turn = Turn(
        np.array([1, 2], np.int32),
        np.array([3], np.int32),
        np.zeros(1, np.float32),
        np.zeros(1, np.int32),
        StopReason.EOS,
        "3",
    )
    return Group(slot, Task(f"task-{slot}", ()), (Trajectory(0, (turn,), {"exact": 1.0}),))


def test_tokens_that_make_one_character_together_have_it_at_the_first() -> None:
    parts: dict[int, bytes] = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"\xff"}

    def decode(tokens: Any) -> str:
        return b"".join(parts[token] for token in tokens).decode(errors="replace")

    pieces = piecewise(decode)
    assert pieces([1, 2, 3, 1]) == ["a", "é", "", "a"]
    assert pieces([4, 1]) == ["\ufffd", "a"]


def test_spans_of_two_sessions_are_lanes_and_what_goes_on_at_once_is_one_span(tmp_path: Path) -> None:
    path = tmp_path / SPANS / "main.jsonl"
    earlier = Busy("server", "reward")
    with earlier:  # before there is a file
        pass
    with spans_to(path):
        busy = Busy("explorer-0", "generate")
        with busy, busy, span("trainer", "wait", step=1):
            pass
    path.write_bytes(path.read_bytes() + b'["trainer", "upd')  # killed while it wrote
    with spans_to(path), span("trainer", "train", step=1), span("trainer", "update/policy"):
        pass
    spans = read_spans(tmp_path)
    assert [(each.lane, each.name, each.about) for each in spans] == [
        ("explorer-0", "generate", {"count": 2}),
        ("trainer", "wait", {"step": 1}),
        ("trainer", "train", {"step": 1}),
        ("trainer", "update/policy", {}),
    ]
    drawn = lanes(tmp_path, None, None)
    assert [lane["name"] for lane in drawn["lanes"]] == ["trainer", "explorer-0"]
    events = [event for event in chrome_trace(tmp_path)["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["wait", "train", "update/policy", "generate"]
    with spans_to(tmp_path / SPANS / "other.jsonl"):
        pass
    assert not (tmp_path / SPANS / "other.jsonl").exists()  # a process that did nothing of note leaves no file
