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
from trivium.foundation.errors import RunDirError
from trivium.foundation.metrics import graded_accuracies
from trivium.inspection.charts import Curve, keys_of, thinned
from trivium.inspection.report import report_of, send_report
from trivium.inspection.viewer.watched_run import WatchedRun
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


def values_of(text: str) -> dict[str, Any]:
    """The values inside a report."""
    (values,) = re.findall(r'<script id="values" type="application/json">(.*?)</script>', text, re.S)
    return json.loads(values)


def test_the_file_shows_the_run_and_nothing_of_it_can_run_or_be_fetched(run_dir: Path) -> None:
    text = report_of(run_dir)
    page, values = Elements(text), values_of(text)
    assert "run <b>&" in "".join(page.text)
    assert values["facts"]["steps"] == "3 of 3"
    assert values["verdict"]["verdict"].startswith("bound by ")
    assert "minimise" in values["verdict"]["objective"]
    assert "schedule.groups_per_step" in values["settings"]
    assert "processor" in values["machine"]
    assert values["curves"]["curves"]["reward/mean"]["steps"] == [1, 2, 3]
    assert {"Reward", "Loss"} <= {chart["title"] for chart in values["runs"][0]["charts"] if chart["keys"]}
    assert {each["kind"] for each in values["examples"]} == {"best", "worst", "failed"}
    failures = [each["failure"] for each in values["examples"] if each["failure"]]
    assert failures[0].startswith(f"reward: RewardError: asked: a finite number from reward 'graded' for task '{EVIL}")
    best = next(each for each in values["examples"] if each["kind"] == "best")
    (sequence,) = best["sequences"]
    assert sequence["values"].keys() > {"advantages", "log_prob"}
    assert len(sequence["text"]) == len(sequence["values"]["advantages"]) == len(sequence["tokens"])
    # The values and two scripts, which the policy names by their hashes; no address anywhere.
    assert len(list(page.named("script"))) == 3
    assert not list(page.named("img"))
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not [each for _, each in page.tags if {"src", "href"} & each.keys()]
    policy = next(each["content"] or "" for each in page.named("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none'")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy.endswith("script-src " + " ".join(f"'sha256-{digest}'" for digest in digests))
    assert not re.findall(r"^(import|export) ", scripts[1], re.M)


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
    long = thinned(Curve("reward/mean", "", "", list(range(100_000)), [0.5] * 100_000))
    assert len(long.steps) == len(long.values) <= 300
    assert (long.steps[-1], {*long.values}) == (99_999, {0.5})


def test_a_long_rollout_is_cut_with_all_its_numbers(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(values: dict[str, Any]) -> list[int]:
        return [sum(len(sequence["tokens"]) for sequence in each["sequences"]) for each in values["examples"]]

    whole = tokens(values_of(report_of(run_dir)))
    for most in (50, 3):  # within a completion, and within a prompt
        most = min(most, min(whole) - 1)
        monkeypatch.setattr("trivium.inspection.report._TOKENS", most)
        values = values_of(report_of(run_dir))
        assert tokens(values) == [most] * len(whole)
        assert [each["omitted"] for each in values["examples"]] == [number - most for number in whole]
        for sequence in (sequence for each in values["examples"] for sequence in each["sequences"]):
            assert {len(sequence["text"]), *map(len, sequence["values"].values())} == {most}
            assert max(turn["stop"] for turn in sequence["turns"]) == most


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
    facts = values_of(report_of(path))["facts"]
    assert "accuracy" not in facts
    assert facts["reward"].startswith("0.")  # the held-out reward, before and after
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
    assert values_of(report)["facts"]["steps"] == "3 of 3"
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
