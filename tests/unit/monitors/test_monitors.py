"""Monitors: nothing lost, nothing twice after a resume, and never the cause of a failed run."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import configured
from failing import refused
from rich.console import Console

from tests.sessions import Kept
from tests.waiting import eventually
from trivium.config import RunConfig
from trivium.foundation.errors import DataError, MissingPackage, RunDirError, StorageError
from trivium.foundation.phases import Activity, activity, announce, group_in_progress, progress, watch
from trivium.foundation.registry import resolve
from trivium.monitors.console import ConsoleMonitor, _planned, _Remaining
from trivium.monitors.fanout import FanOut
from trivium.monitors.jsonl import JsonlMonitor
from trivium.monitors.tensorboard import TensorBoardMonitor
from trivium.planning.plan import plan_run


def jsonl(run_dir: Path, resume_step: int = 0) -> JsonlMonitor:
    return JsonlMonitor(JsonlMonitor.Config(kind="jsonl"), run_dir=run_dir, resume_step=resume_step)


def console(
    width: int = 100, terminal: bool = False, rows: int = 20, run_dir: Path = Path("runs/x")
) -> tuple[ConsoleMonitor, io.StringIO]:
    out = io.StringIO()
    screen = Console(file=out, force_terminal=terminal, width=width)
    config = ConsoleMonitor.Config(kind="console", rows=rows)
    return ConsoleMonitor(config, run_dir=run_dir, resume_step=0, console=screen), out


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------- jsonl


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    monitor = jsonl(tmp_path)
    monitor.log(0, {"eval/test/accuracy": 0.1})
    monitor.log(0, {"reward/mean": 1 / 3})
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/test/accuracy": 0.1},
        {"step": 0, "reward/mean": 1 / 3},
    ]
    monitor.close()


def test_after_a_resume_the_files_hold_what_the_checkpoint_had_seen(tmp_path: Path) -> None:
    first = jsonl(tmp_path)
    first.log(1, {"reward/mean": 1.0})
    first.table(1, "eval/test", [{"text": "ä"}])
    state = json.loads(json.dumps(first.state()))
    seen = {p: p.read_bytes() for p in tmp_path.rglob("*.jsonl")}
    first.log(2, {"reward/mean": 2.0})
    first.table(2, "eval/test", [{"text": "later"}])
    first.table(2, "worst", [{"text": "a table that began later"}])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')  # killed in the middle of a row

    second = jsonl(tmp_path, resume_step=1)
    second.restore(state)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.jsonl") if p.stat().st_size} == seen
    second.log(2, {"reward/mean": 2.5})
    assert [row["reward/mean"] for row in rows(tmp_path / "metrics.jsonl")] == [1.0, 2.5]
    assert rows(tmp_path / "tables" / "eval-test.jsonl") == [{"step": 1, "text": "ä"}]
    first.close()
    second.close()


def test_a_run_without_a_checkpoint_starts_its_files_afresh(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        monitor = jsonl(tmp_path)
        monitor.log(1, {"reward/mean": value})
        monitor.close()
    assert [row["reward/mean"] for row in rows(tmp_path / "metrics.jsonl")] == [2.0]


def test_a_resumed_run_keeps_its_rows_until_told_how_many(tmp_path: Path) -> None:
    monitor = jsonl(tmp_path)
    monitor.log(1, {"reward/mean": 1.0})
    monitor.close()
    jsonl(tmp_path, resume_step=1).close()
    assert len(rows(tmp_path / "metrics.jsonl")) == 1


def test_a_checkpoint_from_before_the_first_row_is_restored_too(tmp_path: Path) -> None:
    monitor = jsonl(tmp_path)
    state = monitor.state()
    monitor.log(1, {"reward/mean": 1.0})
    monitor.restore(state)
    assert rows(tmp_path / "metrics.jsonl") == []
    monitor.close()


def test_a_full_disk_at_a_sync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monitor = jsonl(tmp_path)
    monitor.log(1, {"reward/mean": 1.0})
    monkeypatch.setattr(os, "fsync", full)
    with refused(StorageError, tmp_path / "metrics.jsonl"):
        monitor.state()
    monitor.close()


def test_a_file_that_lost_rows_is_not_continued(tmp_path: Path) -> None:
    monitor = jsonl(tmp_path)
    monitor.log(1, {"reward/mean": 1.0})
    state = monitor.state()
    monitor.close()
    (tmp_path / "metrics.jsonl").write_text("")
    again = jsonl(tmp_path, resume_step=1)
    with refused(RunDirError, "checkpoint"):
        again.restore(state)
    again.close()


# --------------------------------------------------------------------------- console


def test_plain_lines_where_there_is_no_terminal() -> None:
    monitor, out = console()
    monitor.log(1, {"reward/mean": 0.25, "train/grad_norm/policy": 1.5, "time/step": 2.0})
    monitor.log(1, {"eval/test/accuracy": 0.5})
    monitor.log(1, {"eval/test/accuracy": 0.5, "eval/test/reward": 0.6, "eval/test/partial": 3.0})
    monitor.log(1, {"eval/test/loss": 0.7, "eval/test/preference_accuracy": 0.25})
    monitor.log(2, {})
    monitor.close()
    assert out.getvalue().splitlines() == [
        "step 1  reward 0.250  grad norm 1.500  seconds 2.00",
        "step 1  accuracy 50.0%",
        "step 1  eval reward 0.600",
        "step 1  held-out loss 0.7000  held-out preferred 25.0%",
        "step 2  ",
    ]


def planned(run_dir: Path, steps: int) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "plan.yaml").write_text(f"total_steps: {steps}\n")


def test_lines_say_how_far_the_run_is_how_fast_and_how_long_it_takes(tmp_path: Path) -> None:
    planned(tmp_path / "x", 3)
    monitor, out = console(run_dir=tmp_path / "x")
    monitor.log(1, {"time/step": 100.0, "perf/rollout_tokens_per_second": 12345.6, "train/preference_accuracy": 0.75})
    monitor.log(3, {"time/step": 0.0})
    monitor.close()
    assert out.getvalue().splitlines() == [
        f"{tmp_path / 'x'}: 3 steps",
        "step 1/3  preferred 75.0%  tokens/s 12,346  seconds 100.00  left 3:20",
        "step 3/3  seconds 0.00",
    ]


def test_pairs_have_a_margin_and_no_reward() -> None:
    monitor, out = console()
    monitor.log(1, {"reward/mean": 0.5, "train/preference_accuracy": 0.75, "train/preference_margin": 0.125})
    monitor.close()
    assert out.getvalue().splitlines() == ["step 1  preferred 75.0%  margin 0.125"]


def test_a_stage_after_one_that_ended_early_has_a_pace_of_its_own(tmp_path: Path) -> None:
    planned(tmp_path / "x", 900)
    monitor, out = console(run_dir=tmp_path / "x")
    for step, seconds in ((1, 1.0), (600, 100.0)):  # the first stage was planned for 599 steps
        monitor.log(step, {"time/step": seconds})
    monitor.close()
    assert out.getvalue().splitlines()[2] == "step 600/900  seconds 100.00  left 8:20:00"


def test_a_table_has_the_columns_that_have_numbers_and_says_what_is_left(tmp_path: Path) -> None:
    planned(tmp_path / "x", 7)
    monitor, out = console(terminal=True, run_dir=tmp_path / "x", width=200)
    monitor.log(5, {"time/step": 3600.0, "reward/mean": 0.5})
    monitor.close()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())
    final = text[text.rindex("step 5/7") :]
    assert "2:00:00 left" in final
    assert final.splitlines()[1].split() == ["step", "reward", "seconds"]


def test_what_goes_on_is_a_bar_in_a_terminal(tmp_path: Path) -> None:
    monitor, out = console(terminal=True)
    with activity("evaluating test", 4):
        progress()
        progress(3)
        with activity("loading"):
            monitor.close()
    assert re.search(r"evaluating test.*3 of 4", out.getvalue())
    assert "loading" in out.getvalue()
    with activity("later"):
        pass
    assert "later" not in out.getvalue(), "a closed monitor does not watch"


def test_what_takes_long_is_a_line_elsewhere_also_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.monitors.console._QUIET_S", 0.2)
    monitor, out = console()
    with activity("quick", 2):
        progress()
    with activity("evaluating test", 4, "rollouts"), activity("loading"):
        progress(3, 5)
        time.sleep(0.5)
        eventually(lambda: "evaluating test: 0 of" in out.getvalue() and "loading: 3 of" in out.getvalue())
    announce("already complete: [3] steps")
    monitor.close()
    *lines, last = out.getvalue().splitlines()
    assert {re.sub(r"\d:\d\d", "T", line) for line in lines} == {
        "evaluating test: 0 of 4 rollouts after T",
        "evaluating test: took T",
        "loading: 3 of 5 after T",
        "loading: took T",
    }
    assert lines.count("loading: 3 of 5 after 0:00") < 4, "each line waits for its interval"
    assert last == "already complete: [3] steps"


def test_one_evaluation_of_two_tasks_is_one_activity() -> None:
    """The trainer, which waits for it, and the explorer, which counts, may share a process."""
    monitor, out = console(terminal=True)
    with activity("evaluating test"):
        with activity("evaluating test", 4, "rollouts"):
            progress()
        monitor.close()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())
    assert "1 of 4 rollouts" in text
    assert not re.search(r"evaluating test.*\n.*evaluating test", text[text.rindex("evaluating test") - 200 :])


def test_groups_in_progress_count_their_rollouts() -> None:
    shown: list[int] = []

    class Reader:
        def show(self, activities: Sequence[Activity]) -> None:
            shown.extend(each.finished for each in activities)

        def say(self, text: str) -> None: ...

    end = watch(Reader())
    with activity("step 1: rollouts", 8, groups=2), group_in_progress():
        progress()
        with group_in_progress(), group_in_progress():
            progress()  # of a group of the next step
            progress()
        for _ in range(4):  # a greedy rollout is not one of the group
            progress()
    end()
    assert shown == [0, 1, 1, 1, 2, 3, 4, 4]


def test_what_is_left_counts_the_evaluations_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("trivium.monitors.console.time.monotonic", lambda: now)
    config = configured(
        tasks={name: {"kind": "arithmetic"} for name in ("train", "test")},
        evaluation={"taskset": "test", "every": 4},
        schedule={"steps": 10},
    )
    (tmp_path / "plan.yaml").write_text(plan_run(config, 1).to_yaml())
    remaining = _Remaining(*_planned(tmp_path))
    left: list[str] = []
    for step in range(1, 11):
        now += 10.0
        remaining.observe(step, {"time/step": 10.0})
        left.append(remaining.left())
        if step in (4, 8, 10):  # it takes longer and longer
            now += 100.0 * step
            remaining.observe(step, {"time/evaluate": 100.0 * step})
    assert left[:4] == ["1:30", "1:20", "1:10", "1:00"], "the first evaluation is not known yet"
    assert left[4:8] == [f"{m}:{s:02d}" for m, s in (divmod(10 * n + 800, 60) for n in (5, 4, 3, 2))]
    assert left[8:] == ["13:30", "13:20"], "one at step 10 comes"
    assert remaining.left() == ""


def test_a_live_table_where_there_is_one() -> None:
    monitor, out = console(terminal=True, rows=2)
    for step in range(4):
        monitor.log(step, {"reward/mean": step / 10})
        monitor.log(step, {"eval/test/accuracy": step / 4})
    monitor.close()
    final = out.getvalue()[out.getvalue().rindex("runs/x") :]
    assert "0.300" in final
    assert "75.0%" in final
    assert "0.100" not in final  # scrolled away
    assert len([line for line in final.splitlines() if "0.300" in line and "75.0%" in line]) == 1


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("metrics", [{}, {"reward/mean": float("nan")}, {"workflow/x": 1.0}, {"train/tokens": 1e12}])
def test_no_metrics_can_break_the_console(terminal: bool, metrics: dict[str, float]) -> None:
    monitor, out = console(width=20, terminal=terminal)
    monitor.log(1, metrics)
    monitor.table(1, "eval/[test]", [{"a": 1}])
    monitor.close()
    monitor.close()
    assert "1" in out.getvalue()


# --------------------------------------------------------------------------- fan-out


class Unclosable(Kept):
    def close(self) -> None:
        raise OSError("disk full")


def test_every_monitor_gets_every_row() -> None:
    one, two = Kept(), Kept()
    both = FanOut([one, two])
    both.log(1, {"reward/mean": 1})
    both.table(1, "samples", [{}, {}])
    assert one.rows == two.rows == [(1, {"reward/mean": 1.0})]
    assert one.tables == two.tables == [(1, "samples", [{}, {}])]


def test_an_undeclared_metric_reaches_nobody() -> None:
    one = Kept()
    with refused(DataError, "reward/maen"):
        FanOut([one]).log(1, {"reward/mean": 1.0, "reward/maen": 1.0})
    assert one.rows == []


def test_monitors_of_one_class_are_restored_apart() -> None:
    one, two = Kept(), Kept()
    both = FanOut([one, two])
    both.log(1, {})
    one.log(2, {})
    state = json.loads(json.dumps(both.state()))
    both.log(3, {})
    both.restore(state)
    assert ([step for step, _ in one.rows], [step for step, _ in two.rows]) == ([1, 2], [1])


def test_a_resumed_run_may_have_other_monitors(tmp_path: Path) -> None:
    before, one = FanOut([jsonl(tmp_path)]), Kept()
    state = before.state()
    before.close()
    one.log(1, {})
    FanOut([one]).restore(state)
    assert len(one.rows) == 1


def test_all_monitors_are_closed_also_when_one_cannot_be() -> None:
    one, two = Kept(), Kept()
    with pytest.raises(OSError, match="disk full"):
        FanOut([one, Unclosable(), two]).close()
    assert (one.closed, two.closed) == (True, True)


# --------------------------------------------------------------------------- optional packages


def test_tensorboard_forgets_what_came_after_the_resumed_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TensorBoardMonitor.Config(kind="tensorboard")
    first = TensorBoardMonitor(config, run_dir=tmp_path, resume_step=0)
    for step in (0, 1, 2, 3):
        first.log(step, {"reward/mean": float(step)})
    first.table(1, "samples", [{"a": 1}])
    first.close()
    second = TensorBoardMonitor(config, run_dir=tmp_path, resume_step=1)
    second.log(2, {"reward/mean": 20.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.0), (1, 1.0), (2, 20.0)]


ROWS: list[tuple[int, dict[str, float]]] = [
    (0, {"eval/test/accuracy": 1 / 3, "eval/test/pass@4": 0.1 + 0.2}),
    (1, {"reward/mean": 2 / 3, "train/loss/policy": 1e-30, "workflow/a+b": float("nan")}),
    (2, {"reward/mean": -1.0, "train/tokens": 12345678.0}),
    (2, {"eval/test/accuracy": 0.5, "eval/test/pass@4": 1.0}),
]
"""Steps may have several rows."""
EXAMPLES = [{"task": "t1", "reward": 1.0, "reply": "ä\n"}, {"task": "t2", "reward": None, "tokens": 7, "more": [1, 2]}]
CONFIG = {
    "schedule": {"steps": 7},
    "serve": {"api_key": "hidden"},
    "monitors": [{"kind": "wandb"}],
    "buffer": {"url": "postgresql://me:hidden@host/db"},
    "engine": {"sampling": {"max_new_tokens": 5}},
}
SETTINGS = {
    "schedule.steps": 7,
    "monitors.0.kind": "wandb",
    "buffer.url": "postgresql://me:***@host/db",
    "engine.sampling.max_new_tokens": 5,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with a config, some of which must not leave the machine."""
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path / "my-run"


def logged(run_dir: Path, monitor: Any) -> list[dict[str, Any]]:
    """Logs ROWS and a table beside metrics.jsonl; what metrics.jsonl holds then."""
    both = FanOut([jsonl(run_dir), monitor])
    for step, row in ROWS:
        both.log(step, row)
    both.table(2, "rollout_examples", EXAMPLES)
    both.close()
    return rows(run_dir / "metrics.jsonl")


def bits(row: dict[str, Any]) -> dict[str, bytes]:
    """Numbers by every bit, so that NaN equals itself; 1 and 1.0 are one number."""
    return {key: struct.pack("d", value) for key, value in row.items()}


@pytest.fixture(scope="module")
def wandb() -> Any:
    """A fixture, so that each test is charged for the import, which takes a second."""
    return pytest.importorskip("wandb")


def wandb_records(run_dir: Path, kind: str) -> list[Any]:
    """The records of a kind in every offline session that is over, in order. W&B's own process writes them a moment
    after `finish` returns."""
    sessions = len(list(run_dir.glob("wandb/offline-run-*")))
    eventually(lambda: len(_wandb_records(run_dir, "exit")) >= sessions)
    return _wandb_records(run_dir, kind)


def _wandb_records(run_dir: Path, kind: str) -> list[Any]:
    """As they are now: a log of blocks of 32 KiB, in LevelDB's format."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found: list[Any] = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, place, whole = path.read_bytes(), 7, b""
        while place < len(data):
            left = 32768 - place % 32768
            if left < 7:
                place += left
                continue
            _, length, part = struct.unpack("<IHB", data[place : place + 7])
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if part in (1, 4):  # whole, or the last part of it
                record = pb.Record.FromString(whole)
                found += [getattr(record, kind)] if record.WhichOneof("record_type") == kind else []
                whole = b""
    return found


def wandb_rows(run_dir: Path) -> list[dict[str, Any]]:
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.item}
        for record in wandb_records(run_dir, "history")
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in history]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing phones home."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.mark.usefixtures("offline", "wandb")
def test_wandb_gets_the_numbers_of_metrics_jsonl_at_the_same_steps(run_dir: Path) -> None:
    from trivium.monitors.wandb import WandbMonitor

    config = WandbMonitor.Config(mode="offline", project="p", group="g", entity="e", tags=("a", "b"))
    written = logged(run_dir, WandbMonitor(config, run_dir=run_dir, resume_step=0))
    *plain, table = wandb_rows(run_dir)
    assert [bits(row) for row in plain] == [bits(row) for row in written]
    assert (table["step"], table["rollout_examples/nrows"], table["rollout_examples/ncols"]) == (2, 2, 5)
    content = json.loads(next(run_dir.glob("wandb/**/*.table.json")).read_text())
    assert content["columns"] == ["task", "reward", "reply", "tokens", "more"]
    assert content["data"] == [["t1", 1.0, "ä\n", None, None], ["t2", None, None, 7, "[1, 2]"]]

    (run,) = wandb_records(run_dir, "run")
    assert (run.project, run.run_group, run.entity, list(run.tags), run.display_name) == (
        "p",
        "g",
        "e",
        ["a", "b"],
        "my-run",
    )
    said = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {key: value for key, value in said.items() if key != "_wandb"} == SETTINGS


@pytest.mark.usefixtures("offline", "wandb")
def test_wandb_goes_on_with_the_run_that_it_began(run_dir: Path) -> None:
    from trivium.monitors.wandb import WandbMonitor

    config = WandbMonitor.Config(mode="offline", name="n")
    ids: list[str] = []
    for resume_step in (0, 3, 0):  # begun, resumed, begun again from nothing
        monitor = WandbMonitor(config, run_dir=run_dir, resume_step=resume_step)
        ids.append(monitor._run.id)
        monitor.log(resume_step + 1, {"reward/mean": 0.5})
        monitor.close()
    assert ids[0] == ids[1] != ids[2]
    assert [row["step"] for row in wandb_rows(run_dir)] == [1, 4, 1]


@pytest.mark.usefixtures("offline", "wandb")
def test_wandb_does_what_the_environment_says(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is missing is found before anything is loaded; offline, none is needed."""
    from trivium.monitors.wandb import WandbMonitor

    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(run_dir / "netrc"))
    (problem,) = WandbMonitor.Config().machine_problems(RunConfig.model_construct(), "monitors[0]")
    assert "no API key" in problem.found
    assert not list(WandbMonitor.Config(mode="offline").machine_problems(RunConfig.model_construct(), "monitors[0]"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not list(WandbMonitor.Config().machine_problems(RunConfig.model_construct(), "monitors[0]"))
    monitor = WandbMonitor(WandbMonitor.Config(), run_dir=run_dir, resume_step=0)
    monitor.log(1, {"reward/mean": 0.5})
    monitor.close()
    assert [row["step"] for row in wandb_rows(run_dir)] == [1]


@pytest.mark.usefixtures("offline", "wandb")
def test_a_failed_run_does_not_look_finished_to_wandb(run_dir: Path) -> None:
    from trivium.monitors.wandb import WandbMonitor

    both = FanOut([WandbMonitor(WandbMonitor.Config(mode="offline"), run_dir=run_dir, resume_step=0)])

    def run() -> None:
        try:
            raise OSError("disk full")
        finally:
            both.close()

    with pytest.raises(OSError, match="disk full"):
        run()
    assert [record.exit_code for record in wandb_records(run_dir, "exit")] == [1]


# SQLAlchemy warns about a feature that MLflow's own queries use.
mlflow_warns = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")


@mlflow_warns
@pytest.mark.usefixtures("offline")
def test_mlflow_gets_the_numbers_of_metrics_jsonl_at_the_same_steps(run_dir: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from trivium.monitors.mlflow import MlflowMonitor, mlflow_name

    config = MlflowMonitor.Config(experiment="e", tags={"who": "me"})
    written = logged(run_dir, MlflowMonitor(config, run_dir=run_dir, resume_step=0))
    client = mlflow.MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    run = client.get_run((run_dir / "mlflow-run-id").read_text().strip())
    assert (run.info.status, run.info.run_name, run.data.tags["who"]) == ("FINISHED", "my-run", "me")
    assert run.data.params == {key: str(value) for key, value in SETTINGS.items()}
    ours = [
        (mlflow_name(key), row["step"], struct.pack("d", value))
        for row in written
        for key, value in row.items()
        if key != "step"
    ]
    theirs = [
        (key, value.step, struct.pack("d", value.value))
        for key in run.data.metrics
        for value in client.get_metric_history(run.info.run_id, key)
    ]
    assert sorted(theirs) == sorted(ours)
    assert {"eval/test/pass_at_4", "workflow/a_x2b_b"} <= set(run.data.metrics)
    table = json.loads(next(run_dir.glob("mlflow-artifacts/**/step-000002.json")).read_text())
    assert table["columns"] == ["task", "reward", "reply", "tokens", "more"]
    assert table["data"][1] == ["t2", None, None, 7, [1, 2]]


@mlflow_warns
@pytest.mark.usefixtures("offline")
def test_mlflow_goes_on_with_the_run_that_it_began(run_dir: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from trivium.monitors.mlflow import MlflowMonitor

    uri = f"sqlite:///{run_dir / 'shared.db'}"
    config = MlflowMonitor.Config(tracking_uri=uri)
    client = mlflow.MlflowClient(uri)
    ids: list[str] = []
    for resume_step in (0, 3, 0):
        monitor = MlflowMonitor(config, run_dir=run_dir, resume_step=resume_step)
        ids.append((run_dir / "mlflow-run-id").read_text().strip())
        assert client.get_run(ids[-1]).info.status == "RUNNING"
        monitor.log(resume_step + 1, {"reward/mean": 0.5})
        try:
            raise OSError("disk full")
        except OSError:
            monitor.close()
        assert client.get_run(ids[-1]).info.status == "FAILED"
    assert ids[0] == ids[1] != ids[2]
    assert [value.step for value in client.get_metric_history(ids[0], "reward/mean")] == [1, 4]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with refused(MissingPackage, "pip install 'trivium[tensorboard]'"):
        TensorBoardMonitor(TensorBoardMonitor.Config(kind="tensorboard"), run_dir=tmp_path, resume_step=0)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(MissingPackage, "pip install 'trivium[wandb]'"):
        resolve("monitors", "wandb")(resolve("monitors", "wandb").Config(), run_dir=tmp_path, resume_step=0)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with refused(MissingPackage, "pip install 'trivium[mlflow]'"):
        resolve("monitors", "mlflow")(resolve("monitors", "mlflow").Config(), run_dir=tmp_path, resume_step=0)
