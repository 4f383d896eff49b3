"""A run as one file: what it shows, that nothing of it can run or be fetched, and that its size is bounded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from failing import refused

from tests.processes import Forked, trivium
from trivium.buffers.journal import read_recorded, write_groups
from trivium.config import config_from_mapping
from trivium.errors import RunDirError
from trivium.inspection.charts import Curve, Mark, keys_of, line_chart
from trivium.inspection.report import report_of, send_report
from trivium.inspection.viewer.watched_run import WatchedRun
from trivium.metrics import graded_accuracies
from trivium.runtime.launch import run

EVIL = "</script><img src=x onerror=alert(1)>"


def tasks() -> list[dict[str, Any]]:
    return [{"id": f"{EVIL}{number}", "prompt": EVIL} for number in range(4)]


def graded(prompt: str, completion: str) -> float:
    if completion.startswith(("a", "e", "i", "o")):
        raise ValueError(EVIL)
    return sum(map(ord, completion)) % 7 / 7


def config_of(path: Path) -> dict[str, Any]:
    """Tasks and rewards that try to break out of the page."""
    return {
        "run": {"dir": str(path), "keep": "tokens"},
        "model": {
            "kind": "tiny",
            "alphabet": "".join(sorted(set(EVIL))),
            "layers": 1,
            "hidden": 16,
            "heads": 2,
            "max_position": 64,
        },
        "cluster": {"threads": 1},
        "tasks": {"train": {"kind": "python", "source": f"{__file__}:tasks", "id": "id"}},
        "rewards": [{"kind": f"{__file__}:graded"}],
        "engine": {"sampling": {"max_new_tokens": 3}},
        "schedule": {"steps": 3, "groups_per_step": 2, "group_size": 6},
        "monitors": [{"kind": "jsonl"}],
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run <b>&"
    run(config_from_mapping(config_of(path)))
    return path


class Elements(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.tags if name == tag)


def test_the_file_shows_the_run_and_nothing_of_it_can_run_or_be_fetched(run_dir: Path) -> None:
    text = report_of(run_dir)
    page = Elements(text)
    whole = "".join(page.text)
    assert "run <b>&" in whole
    for part in ("bound by ", "Reward", "reward/mean", "minimise", "schedule.groups_per_step", "processor", "3 of 3"):
        assert part in whole, part
    for kind in ("best", "worst", "failed"):
        assert any(each["class"] == kind for each in page.named("article")), kind
    assert f"reward: RewardError: asked: a finite number from reward 'graded' for task '{EVIL}" in whole
    assert any("advantage" in (each.get("title") or "") for each in page.named("i"))
    # One script, which the policy names by its hash; no address anywhere.
    assert len(list(page.named("script"))) == 1
    assert not list(page.named("img"))
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not [each for _, each in page.tags if {"src", "href"} & each.keys()]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(each["content"] or "" for each in page.named("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_command_writes_it_and_refuses_what_is_no_run(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.html"
    command = Forked("report", tmp_path / "out", trivium, "report", str(run_dir), "-o", str(out)).ended()
    assert f"wrote {out}" in command.text
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    with refused(RunDirError, tmp_path):
        report_of(tmp_path)


def test_its_size_does_not_grow_with_the_rollouts(run_dir: Path) -> None:
    before = len(report_of(run_dir))
    path = run_dir / "rollouts" / "stage-0" / "step-000003.msgpack"
    groups = [group for _, group in read_recorded(path)]
    content = path.read_bytes()
    many = [replace(groups[0], slot=100 + number) for number in range(300)]
    path.write_bytes(b"")
    write_groups(path, [*groups, *many])
    try:
        assert len(report_of(run_dir)) < before + 20_000
    finally:
        path.write_bytes(content)
    long = Curve("reward/mean", "", "", list(range(100_000)), [0.5] * 100_000)
    assert len(line_chart("Reward", [long], [])) < 40_000


def test_curves_are_broken_where_steps_are_missing() -> None:
    steps = [*range(10), *range(400, 410)]
    drawn = line_chart("Loss", [Curve("a", "", "", steps, [1.0] * 20)], [Mark(400, "stage", "<stage>")])
    assert drawn.count("<polyline") == 2
    assert "&lt;stage&gt;" in drawn
    assert line_chart("one", [Curve("a", "", "", [5], [2.0])], []).count("<circle") == 1


def test_rounding_errors_are_drawn_as_zero_and_a_constant_has_its_surroundings() -> None:
    def labels(*values: float, unit: str = "") -> list[str]:
        drawn = line_chart("a", [Curve("a", "", unit, [*range(len(values))], list(values))], [])
        return re.findall(r'text-anchor="end">([^<]*)<', drawn)

    assert labels(0.0, 0.0)[-1] == labels(3e-13, -1e-13)[-1] == "1"
    assert [float(label) for label in labels(0.25, 0.25)][-1] < 1
    assert float(labels(1e-7, 2e-7)[-1]) < 1e-6  # a learning rate
    assert labels(1e-7, 2e-7, unit="nats")[-1] == "1"  # the same as a divergence is a rounding error
    assert float(labels(1e-5, 2e-5, unit="nats")[-1]) < 1e-4
    assert float(labels(2.0, 2.0 + 1e-9, unit="s")[-1]) >= 3


def test_accuracies_of_graded_rewards_are_in_no_chart() -> None:
    graded = {"step": 1.0, "eval/a/accuracy": 0.0, "eval/a/partial": 3.0, "eval/b/accuracy": 0.5, "eval/b/partial": 0.0}
    assert graded_accuracies([graded]) == {"eval/a/accuracy"}
    assert "eval/a/accuracy" not in keys_of([graded])
    assert "eval/b/accuracy" in keys_of([graded])


def partly(prompt: str, completion: str) -> float:
    """Part of a point, never all of it."""
    return len(set(completion)) / 10


def test_report_and_page_of_a_run_with_graded_rewards_have_no_accuracy(tmp_path: Path) -> None:
    path, config = tmp_path / "graded", config_of(tmp_path / "graded")
    config |= {"evaluation": {"taskset": "train", "every": 1}, "rewards": [{"kind": f"{__file__}:partly"}]}
    run(config_from_mapping(config))
    facts = Elements(report_of(path).partition("<section>")[0])
    assert "accuracy" not in "".join(facts.text)
    assert "reward0." in "".join(facts.text)  # the held-out reward, before and after
    charts = {chart["title"]: chart["keys"] for chart in WatchedRun(path, "graded").about()["charts"]}
    assert (charts["Accuracy"], charts["Held-out reward"]) == ([], ["eval/train/reward"])


# SQLAlchemy warns about a feature that MLflow's own queries use.
@pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")
def test_wandb_and_mlflow_get_the_rollouts_of_each_step_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monitors = [{"kind": "jsonl"}, {"kind": "wandb", "mode": "offline"}, {"kind": "mlflow"}]
    path = tmp_path / "run"
    run(config_from_mapping({**config_of(path), "monitors": monitors}), report=send_report)
    report = (path / "report.html").read_text(encoding="utf-8")
    assert "3 of 3" in report
    (kept,) = path.glob("wandb/**/*.html")
    assert kept.read_text(encoding="utf-8") == report
    (kept,) = path.glob("mlflow-artifacts/**/*.html")
    assert kept.read_text(encoding="utf-8") == report
    theirs = [json.loads(each.read_text()) for each in path.glob("wandb/**/rollout_examples*.table.json")]
    ours = [json.loads(each.read_text()) for each in path.glob("mlflow-artifacts/**/step-00000*.json")]
    assert len(theirs) == len(ours) == 3
    for table in (*theirs, *ours):
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert {"task", "prompt", "reply", "reward", "tokens", "version"} <= set(rows[0])
        assert rows[0]["reward"] >= rows[1]["reward"]
    assert any("failure" in table["columns"] for table in theirs)
