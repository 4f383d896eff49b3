"""Explorers and trainer as separate commands that meet in a database and a directory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import tiny_model
from example_counts import FULL
from postgres import Server

from tests.e2e.test_curricula import CURRICULUM
from tests.e2e.test_kill import outcome_of
from tests.processes import Forked, commands
from tests.waiting import eventually

HERE = Path(__file__).parent
BEAT_S = 3.0


def written(path: Path, change: dict[str, Any]) -> Path:
    """tests/e2e/tiny.yaml with one stage of reinforcement and these changes, as a file."""
    data = yaml.safe_load((HERE / "tiny.yaml").read_text())
    del data["stages"]
    data |= {"algorithm": {"kind": "grpo"}, "train": {"optimizer": {"lr": 1e-3}}, "cluster": {"threads": 1}}
    for section, values in change.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    path.write_text(yaml.safe_dump(data))
    return path


def small(directory: Path, url: str | None, **schedule: Any) -> Path:
    """A run of a few seconds, over a database or, without a URL, in one process."""
    meeting = {
        "buffer": {"kind": "sql", "url": url},
        "sync": {"method": "checkpoint", "heartbeat_s": BEAT_S, "full_every": 3},
    }
    return written(
        directory / "run.yaml",
        {
            "run": {"dir": str(directory / "run"), "name": directory.name},
            "schedule": {"steps": 10, "groups_per_step": 4, "group_size": 4, **schedule},
            **(meeting if url else {}),
        },
    )


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def assert_ends_well(*ended: Forked) -> None:
    for command in ended:
        assert command.wait(240) == 0, command.text


def test_two_shells_learn_over_postgresql(postgres: Server, tmp_path: Path) -> None:
    """Supervised steps in the trainer's shell, then reinforcement with an explorer in another one."""
    path = written(
        tmp_path / "run.yaml",
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": tiny_model(hidden=64, kv_heads=2, mlp=128),
            "tasks": {name: {"kind": "arithmetic", "max_operand": 4} for name in ("train", "test")},
            "engine": {"sampling": {"max_new_tokens": 3}},
            "evaluation": {"taskset": "test", "every": 0, "sampling": {"max_new_tokens": 3, "temperature": 0.0}},
            "checkpoint": {"save_every": 40},
            "buffer": {"kind": "sql", "url": postgres.url},
            "sync": {"method": "checkpoint"},
            "stages": [
                {
                    "algorithm": {"kind": "sft"},
                    "buffer": {"kind": "files"},
                    "train": {"optimizer": {"lr": 4e-3}},
                    "schedule": {"steps": 12, "groups_per_step": 32, "group_size": 1},
                },
                {
                    "algorithm": {
                        "kind": "grpo",
                        "mini_batches": 2,
                        "entropy": {"coef": 0.01},
                        "policy_loss": {"kind": "ppo", "clip_high": 0.3},
                    },
                    "train": {"optimizer": {"lr": 2e-3, "betas": [0.9, 0.98], "warmup_steps": 5, "schedule": "cosine"}},
                    "schedule": {"steps": 32, "groups_per_step": 16, "group_size": 8, "max_staleness": 1},
                },
            ],
        },
    )
    with commands(tmp_path) as start:
        explorer = start("explore", "run", str(path), "run.mode=explore")
        trainer = start("train", "run", str(path), "run.mode=train")
        assert_ends_well(trainer, explorer)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("rollout/staleness_max", 0) for row in rows) <= 1


@pytest.mark.parametrize(
    ("staleness", "overrides"),
    [(2, ()), (1, (f"schedule.curriculum={json.dumps(CURRICULUM)}",))],
    ids=["in random order", "by a curriculum"],
)
def test_apart_or_together_the_weights_are_the_same(staleness: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Two explorers in two shells, deterministic and one or two versions behind, against one process. The explorers
    follow the draws of the trainer's curriculum."""
    schedule = {"steps": 6, "deterministic": True, "max_staleness": staleness}
    together, apart = tmp_path / "together", tmp_path / "apart"
    for directory in (together, apart):
        directory.mkdir()
    with commands(tmp_path) as start:
        path = small(apart, f"sqlite:///{apart / 'buffer.db'}", **schedule)
        explorers = [
            start(name, "run", str(path), "run.mode=explore", f"run.explorer={name}", *overrides) for name in "ab"
        ]
        assert_ends_well(start("train", "run", str(path), "run.mode=train", *overrides), *explorers)
        assert_ends_well(start("both", "run", str(small(together, None, **schedule)), *overrides))
    ended = [outcome_of(directory / "run") for directory in (apart, together)]
    for outcome in ended:  # how a channel keeps the versions that are still wanted is its own affair
        outcome["tensors"] = {name: data for name, data in outcome["tensors"].items() if "/versions/" not in name}
        assert outcome["tensors"]
    assert ended[0] == ended[1]
    assert any("curriculum/seen" in row for row in ended[0]["metrics"]) == bool(overrides)


@pytest.mark.parametrize(
    ("victim", "pause_s"),
    [("explore", 2 * BEAT_S), ("train", 0.0), *([("explore", 0.0), ("train", 2 * BEAT_S)] if FULL else [])],
)
def test_a_killed_side_is_waited_for_and_the_run_goes_on(victim: str, pause_s: float, tmp_path: Path) -> None:
    path = small(tmp_path, f"sqlite:///{tmp_path / 'buffer.db'}", steps=16)
    with commands(tmp_path) as start:
        both = {
            mode: start(mode, "run", str(path), f"run.mode={mode}", "run.explorer=a") for mode in ("train", "explore")
        }
        dying, other = both.pop(victim), next(iter(both.values()))
        eventually(lambda: steps(tmp_path / "run") >= 4, 200, lambda: dying.text + other.text)
        dying.kill()
        time.sleep(pause_s)  # at once, or after the others have missed its heartbeats
        again = start("again", "run", str(path), f"run.mode={victim}", "run.explorer=b")
        assert_ends_well(again, other)
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 16


def test_a_second_trainer_is_refused_at_once(tmp_path: Path) -> None:
    path = small(tmp_path, f"sqlite:///{tmp_path / 'buffer.db'}")
    with commands(tmp_path) as start:
        first = start("first", "run", str(path), "run.mode=train")
        eventually(lambda: (tmp_path / "run" / "plan.yaml").is_file(), 120, lambda: first.text, first)
        eventually(lambda: (tmp_path / "buffer.db").is_file(), 120, lambda: first.text, first)
        same = start("same", "run", str(path), "run.mode=train")
        other = start("other", "run", str(path), "run.mode=train", f"run.dir={tmp_path / 'other'}")
        assert same.wait(120) == 1
        assert f"found: process {first.pid} on host" in same.text
        assert other.wait(120) == 2
        assert "found: another run has this name in this database" in other.text
        assert max(len(same.text), len(other.text)) < 700


@pytest.mark.parametrize("victim", ["explore", "train"])
def test_a_side_that_does_not_come_back_is_named_and_the_run_goes_on_later(victim: str, tmp_path: Path) -> None:
    path, waits = small(tmp_path, f"sqlite:///{tmp_path / 'buffer.db'}", steps=16), "sync.deadline_s=20"
    with commands(tmp_path) as start:
        both = {
            mode: start(mode, "run", str(path), f"run.mode={mode}", "run.explorer=a", waits)
            for mode in ("train", "explore")
        }
        dying, other = both.pop(victim), next(iter(both.values()))
        eventually(lambda: steps(tmp_path / "run") >= 4, 200, lambda: dying.text + other.text)
        dying.kill()
        assert other.wait(120) == 1
        expected = (
            "explorer a has ended: no heartbeat for" if victim == "explore" else "trainer failed: no heartbeat for"
        )
        assert expected in other.text + (tmp_path / "run" / "log.txt").read_text()
        assert len(other.text) < 2500, "no dump of the board"
        again = [start(mode, "run", str(path), f"run.mode={mode}", "run.explorer=b") for mode in ("train", "explore")]
        assert_ends_well(*again)
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 16
        late = start("late", "run", str(path), "run.mode=explore")
        assert_ends_well(late)
        assert "is finished: no task is left to explore" in late.text


def test_what_a_dead_explorer_was_playing_another_one_plays(tmp_path: Path) -> None:
    path = small(tmp_path, f"sqlite:///{tmp_path / 'buffer.db'}", steps=24)
    with commands(tmp_path) as start:
        trainer = start("train", "run", str(path), "run.mode=train")
        first, second = (start(name, "run", str(path), "run.mode=explore", f"run.explorer={name}") for name in "ab")
        log = tmp_path / "run" / "log-b.txt"
        eventually(
            lambda: steps(tmp_path / "run") >= 4 and log.is_file() and "explorer b joins" in log.read_text(),
            200,
            lambda: trainer.text + second.text,
        )
        first.kill()
        assert_ends_well(trainer, second)


def test_a_cut_connection_to_the_database_is_made_again(postgres: Server, tmp_path: Path) -> None:
    """The same bytes come out as without the cuts."""
    with commands(tmp_path) as start:

        def outcome(cuts: int) -> dict[str, Any]:
            directory = tmp_path / f"cut-{cuts}"
            directory.mkdir()
            path = small(directory, postgres.url, steps=6)
            trainer, explorer = (start(mode, "run", str(path), f"run.mode={mode}") for mode in ("train", "explore"))
            while (done := steps(directory / "run")) < cuts:
                eventually(lambda: steps(directory / "run") > done, 200, lambda: trainer.text + explorer.text)
                postgres.drop_connections()
            assert_ends_well(trainer, explorer)
            return outcome_of(directory / "run")

        assert outcome(cuts=0) == outcome(cuts=4)
