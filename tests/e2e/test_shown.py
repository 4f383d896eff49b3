"""Whole runs with pictures between the turns: killed anywhere and gone on with; scripted completions trained in one
process, by ranks of which some have no picture, and on Ray."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import torch
import yaml

from tests.e2e.killing import PICTURES, launches
from tests.e2e.shown import square, tasks
from tests.e2e.test_kill import outcome_of
from tests.e2e.test_three_ways import rows, tensors
from tests.e2e.test_torchrun import assert_ranks_end
from tests.processes import Forked, trivium
from tests.waiting import eventually
from trivium.buffers.journal import Journal
from trivium.inspection.replay_step import replay

CONFIG = Path(__file__).with_name("shown.yaml")
STEPS = (1, 2, 3)
SCRIPTED = "engine={kind: scripted, replies: [[1], [5, 2], [9, 9, 3], [0, 7, 4, 8]]}"
"""Completions that do not depend on the last bits of weights."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run in one process."""
    run_dir = tmp_path_factory.mktemp("shown") / "live"
    assert launches(CONFIG, run_dir, overrides=(SCRIPTED,)) == ["finished"]
    return run_dir


def assert_equal_training(run_dir: Path, live: Path, steps: Sequence[int]) -> None:
    """The metrics of training and the weights of both models and optimizers, to the rounding of double precision."""
    mine, expected = rows(run_dir), rows(live)
    assert [*mine] == [*expected] == [*steps]
    for step in steps:
        trained = {key: value for key, value in expected[step].items() if not key.startswith("rollout/")}
        assert {"train/loss/policy", "train/loss/value", "train/grad_norm/policy", "train/grad_norm/value"} <= {
            *trained
        }
        assert {key: mine[step][key] for key in trained} == pytest.approx(trained, rel=1e-9, abs=1e-9)
        found, tensors_of_live = tensors(run_dir, step), tensors(live, step)
        assert found.keys() == tensors_of_live.keys()
        for name, tensor in tensors_of_live.items():
            scale = float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9 * scale, msg=f"{name} of step {step}")


def test_a_rollout_sees_a_picture_in_each_of_its_turns(live: Path) -> None:
    records = Journal(live / "rollouts" / "stage-0")
    groups = [group for step in STEPS for group in records.read_step(step)]
    pictures = {row["id"]: [square(shade).sha256 for shade in row["shades"]] for row in tasks()}
    for group in groups:
        shown = pictures[group.task.task_id]
        turns = group.trajectories[0].turns
        assert len(turns) == 3
        assert [item.sha256 for item in turns[-1].media] == [*shown, *shown[:1]]
    stored = {path.name: path.read_bytes() for path in (live / "rollouts" / "media").iterdir()}
    assert {*stored} == {sha256 for group in groups for sha256 in pictures[group.task.task_id]}
    assert all(hashlib.sha256(data).hexdigest() == name for name, data in stored.items())


@pytest.mark.parametrize("way", ["ranks", "ray"])
def test_pictures_are_trained_in_every_way_as_in_one_process(
    way: str, live: Path, tmp_path: Path, ray_address: str
) -> None:
    """A mini-batch is a row for each of two ranks: where a step has an odd number of rollouts with pictures, a rank has
    none."""
    records = Journal(live / "rollouts" / "stage-0")
    assert any(sum(bool(g.trajectories[0].turns[-1].media) for g in records.read_step(step)) % 2 for step in STEPS)
    if way == "ranks":
        assert_ranks_end(0, tmp_path / "run", SCRIPTED, config=CONFIG)
    else:
        on_ray = ["cluster.kind=ray", f"cluster.address={ray_address}", "cluster.ranks=2"]
        run = Forked(
            "ray", tmp_path / "out", trivium, "run", str(CONFIG), f"run.dir={tmp_path / 'run'}", SCRIPTED, *on_ray
        )
        assert run.wait(200) == 0, run.text
    assert_equal_training(tmp_path / "run", live, STEPS)


def test_a_run_killed_where_pictures_are_stored_ends_with_the_same_bytes(tmp_path: Path) -> None:
    overrides = ("train.dtype=float32", "schedule.deterministic=true", "schedule.max_staleness=1")
    assert launches(CONFIG, tmp_path / "whole", overrides=overrides) == ["finished"]
    kills = [
        ("keep: half a picture", 1),
        ("keep: a picture, no record", 2),
        ("put: half a record", 3),
        ("update: step taken, no version", 2),
        ("save: manifest half written", 1),
    ]
    outcomes = launches(CONFIG, tmp_path / "killed", kills, overrides)
    assert outcomes[:-1] == [moment for moment, _ in kills]
    assert {moment for moment, _ in kills} >= {*PICTURES}
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
    kept = [
        {path.name: path.read_bytes() for path in (tmp_path / run / "rollouts" / "media").glob("[!.]*")}
        for run in ("killed", "whole")
    ]
    assert kept[0] == kept[1]


def test_pictures_of_agents_are_trained_on_and_replayed(tmp_path: Path) -> None:
    said = yaml.safe_load(CONFIG.read_text())
    del said["workflow"]
    said |= {"serve": {"port": 0}, "schedule": {"steps": 1, "groups_per_step": 2, "group_size": 1}}
    said["train"] |= {"vision_tower": "projector"}
    run_dir = tmp_path / "served"
    server = {"run": {"dir": str(run_dir), "mode": "serve"}, "tasks": {"train": {"kind": "served"}}}
    (tmp_path / "served.yaml").write_text(yaml.safe_dump(said | server))
    command = Forked("serve", tmp_path / "out", trivium, "run", str(tmp_path / "served.yaml"))
    try:
        path = run_dir / "serve.json"
        eventually(path.is_file, 120, lambda: command.text, command)
        with httpx.Client(base_url=json.loads(path.read_text())["url"], timeout=120) as client:
            for number, shade in enumerate((10, 200)):
                uri = f"data:image/png;base64,{base64.b64encode(square(shade).data).decode()}"
                parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "1"}]
                body = {"model": "policy", "messages": [{"role": "user", "content": parts}]}
                done = client.post("/v1/chat/completions", json=body).raise_for_status().json()
                client.post("/feedback", json={"id": done["id"], "reward": number}).raise_for_status()
        assert command.wait(120) == 0, command.text
    finally:
        command.kill()
    (records,) = (run_dir / "rollouts").glob("stage-*")
    media = [g.trajectories[0].turns[0].media for g in Journal(records).read_step(1)]
    assert [[item.sha256 for item in items] for items in media] == [[square(shade).sha256] for shade in (10, 200)]
    again = replay(run_dir, 1, update=True)
    assert again.ok, again.text
