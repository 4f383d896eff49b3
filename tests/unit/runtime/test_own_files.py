"""Nothing that the product did not write is replaced: in a run directory, and where an option names a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from failing import refused

from trivium.checkpoint.store import Checkpoint, export
from trivium.config import RunConfig, load_config
from trivium.config.saved import config_file
from trivium.foundation.atomic import refuse_existing
from trivium.foundation.errors import ConfigError, RunDirError
from trivium.inspection.report import write_report
from trivium.inspection.run import RecordedRun
from trivium.runtime.run_dir import open_run_dir

THEIRS = """# my comments, three days of tuning
run: {dir: .}
model: {kind: tiny, alphabet: "0123456789+="}
tasks: {train: {kind: arithmetic}}
rewards: [exact]
train: {optimizer: {lr: 1e-3, eps: 1E-8}}
"""
PLAIN = THEIRS.partition("\n")[2].replace("{dir: .}", "\n  dir: .")


def started(path: Path, *overrides: str) -> RunConfig:
    config = load_config(path, [f"run.dir={path.parent}", *overrides])
    with open_run_dir(config):
        return config


@pytest.mark.parametrize("text", [THEIRS, PLAIN])
def test_a_config_in_the_run_directory_keeps_its_bytes(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    for changes in ((), (), ("schedule.steps=7",), ("train.optimizer.lr=2e-3",)):
        config = started(path, *changes)
        assert path.read_text() == text
        assert load_config(config_file(tmp_path)).train == config.train
    assert config_file(tmp_path) != path
    assert RecordedRun.open(tmp_path).config.model == config.model


def test_the_config_of_a_run_stays_where_it_is_and_an_edited_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(THEIRS)
    run_dir = tmp_path / "run"
    for _ in range(2):
        with open_run_dir(load_config(tmp_path / "mine.yaml", [f"run.dir={run_dir}"])):
            pass
    saved = run_dir / "config.yaml"
    assert config_file(run_dir) == saved
    saved.write_text("# why\n" + saved.read_text())
    edited = saved.read_text()
    started(saved)
    assert saved.read_text() == edited


@pytest.mark.parametrize(
    "name",
    ["plan.yaml", "summary.json", "metrics.jsonl", "checkpoints/step-1000/weights", "model/config.json", "sync/x"],
)
@pytest.mark.parametrize("with_config", [False, True])
def test_files_that_no_run_wrote_are_neither_replaced_nor_removed(name: str, with_config: bool, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    file = run_dir / name
    file.parent.mkdir(parents=True)
    file.write_text('{"step": 1}\n')
    path = (run_dir if with_config else tmp_path) / "config.yaml"
    path.write_text(THEIRS)
    for _ in range(2):
        config = load_config(path, [f"run.dir={run_dir}"])
        with refused(RunDirError, run_dir, name.partition("/")[0]), open_run_dir(config):
            pass
        assert file.read_text() == '{"step": 1}\n'
    shutil.rmtree(run_dir / name.partition("/")[0], ignore_errors=True)
    file.unlink(missing_ok=True)
    with open_run_dir(load_config(path, [f"run.dir={run_dir}"])):
        pass


def test_a_lock_of_another_program_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(THEIRS)
    (tmp_path / ".lock").write_text("4711\n")
    with refused(RunDirError, tmp_path, ".lock"):
        started(tmp_path / "config.yaml")
    assert (tmp_path / ".lock").read_text() == "4711\n"


def test_an_output_that_exists_is_refused_unless_the_command_wrote_it(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    refuse_existing(notes, "--save")
    notes.write_text("mine")
    for path in (notes, tmp_path):
        with refused(ConfigError, "--save", path):
            refuse_existing(path, "--save")
    refuse_existing(notes, "--save", is_own=lambda content: content == b"mine")
    with refused(ConfigError, "--out", notes):
        write_report(tmp_path, notes)
    assert notes.read_text() == "mine"


def test_an_export_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with refused(RunDirError, tmp_path / "out"):
        export(Checkpoint(1, tmp_path, {}), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
