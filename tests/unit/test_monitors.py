"""Monitors: nothing lost, nothing twice after a resume, and never the cause of a failed run."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trivium.errors import DataError, MissingPackage, RunDirError
from trivium.monitors.console import ConsoleMonitor
from trivium.monitors.fanout import FanOut
from trivium.monitors.jsonl import JsonlMonitor
from trivium.monitors.plot import learning_curve
from trivium.monitors.tensorboard import TensorBoardMonitor


def jsonl(run_dir: Path, resume_step: int = 0) -> JsonlMonitor:
    return JsonlMonitor(JsonlMonitor.Config(kind="jsonl"), run_dir=run_dir, resume_step=resume_step)


def console(width: int = 100, terminal: bool = False, rows: int = 20) -> tuple[ConsoleMonitor, io.StringIO]:
    out = io.StringIO()
    screen = Console(file=out, force_terminal=terminal, width=width)
    config = ConsoleMonitor.Config(kind="console", rows=rows)
    return ConsoleMonitor(config, run_dir=Path("runs/x"), resume_step=0, console=screen), out


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------- jsonl


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    monitor = jsonl(tmp_path)
    monitor.log(0, {"eval/test/accuracy": 0.1})
    monitor.log(0, {"reward/mean": 1 / 3})
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/test/accuracy": 0.1}, {"step": 0, "reward/mean": 1 / 3},
    ]  # fmt: skip
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


def test_a_file_that_lost_rows_is_not_continued(tmp_path: Path) -> None:
    monitor = jsonl(tmp_path)
    monitor.log(1, {"reward/mean": 1.0})
    state = monitor.state()
    monitor.close()
    (tmp_path / "metrics.jsonl").write_text("")
    again = jsonl(tmp_path, resume_step=1)
    with pytest.raises(RunDirError, match="the checkpoint had seen"):
        again.restore(state)
    again.close()


# --------------------------------------------------------------------------- console


def test_plain_lines_where_there_is_no_terminal() -> None:
    monitor, out = console()
    monitor.log(1, {"reward/mean": 0.25, "train/grad_norm/policy": 1.5, "time/step": 2.0})
    monitor.log(1, {"eval/test/accuracy": 0.5})
    monitor.log(2, {})
    monitor.close()
    assert out.getvalue().splitlines() == [
        "step 1  reward 0.250  grad norm 1.500  seconds 2.00", "step 1  accuracy 50.0%", "step 2  ",
    ]  # fmt: skip


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


class Recorder:
    """A monitor that keeps what it was told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += [(step, {name: float(len(rows))})]

    def state(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def restore(self, state: Mapping[str, Any]) -> None:
        del self.rows[state["rows"] :]

    def close(self) -> None:
        self.closed = True


class Unclosable(Recorder):
    def close(self) -> None:
        raise OSError("disk full")


def test_every_monitor_gets_every_row() -> None:
    one, two = Recorder(), Recorder()
    both = FanOut([one, two])
    both.log(1, {"reward/mean": 1})
    both.table(1, "samples", [{}, {}])
    assert one.rows == two.rows == [(1, {"reward/mean": 1.0}), (1, {"samples": 2.0})]


def test_an_undeclared_metric_reaches_nobody() -> None:
    one = Recorder()
    with pytest.raises(DataError, match="reward/maen"):
        FanOut([one]).log(1, {"reward/mean": 1.0, "reward/maen": 1.0})
    assert one.rows == []


def test_monitors_of_one_class_are_restored_apart() -> None:
    one, two = Recorder(), Recorder()
    both = FanOut([one, two])
    both.log(1, {})
    one.log(2, {})
    state = json.loads(json.dumps(both.state()))
    both.log(3, {})
    both.restore(state)
    assert ([step for step, _ in one.rows], [step for step, _ in two.rows]) == ([1, 2], [1])


def test_a_resumed_run_may_have_other_monitors(tmp_path: Path) -> None:
    before, one = FanOut([jsonl(tmp_path)]), Recorder()
    state = before.state()
    before.close()
    one.log(1, {})
    FanOut([one]).restore(state)
    assert len(one.rows) == 1


def test_all_monitors_are_closed_also_when_one_cannot_be() -> None:
    one, two = Recorder(), Recorder()
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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"pip install 'trivium\[tensorboard\]'"):
        TensorBoardMonitor(TensorBoardMonitor.Config(kind="tensorboard"), run_dir=tmp_path, resume_step=0)
    with pytest.raises(MissingPackage, match=r"pip install 'trivium\[plot\]'"):
        learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")


def test_a_learning_curve_is_drawn_from_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monitor = jsonl(tmp_path)
    for step in range(30):
        monitor.log(step, {"reward/mean": step / 40} if step > 10 else {"train/loss/policy": 1.0})
        if step % 5 == 0:
            monitor.log(step, {"eval/test/accuracy": step / 30})
    monitor.close()
    learning_curve(tmp_path / "metrics.jsonl", tmp_path / "plain.png")
    (tmp_path / "plan.yaml").write_text("stages: [{first_step: 1}, {first_step: 11}]\n")
    learning_curve(tmp_path / "metrics.jsonl", tmp_path / "plots" / "curve.png")
    drawn = (tmp_path / "plots" / "curve.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert drawn != (tmp_path / "plain.png").read_bytes()  # the stage boundary is visible


def test_a_learning_curve_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/lr/policy": 0.1}\n')
    with pytest.raises(DataError, match=r"no reward/mean"):
        learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
