"""Scripted completions trained in several ways (one process, two, ranks of torchrun, ranks on Ray) after a stage that
samples: equal losses, gradient norms and weights; a checkpoint of one way goes on in another."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_torchrun import assert_ranks_end
from tests.processes import Forked, trivium
from trivium.buffers.journal import Journal
from trivium.cli import main
from trivium.foundation.metrics import depends_on_machine

CONFIG = Path(__file__).parent / "three_ways.yaml"
STEPS = {"sampled": (1, 2), "scripted": (3, 4, 5, 6, 7)}
WAYS = ("torchrun", "ray", "two processes")


def arguments(directory: Path, way: str) -> list[str]:
    return ["run", str(CONFIG), f"run.dir={directory / way}"]


def here(directory: Path, way: str) -> None:
    """The command, in this process."""
    before, sys.argv = sys.argv, ["trivium", *arguments(directory, way)]
    try:
        main()
    except SystemExit as done:
        if done.code:
            raise AssertionError(f"exit code {done.code}") from done
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def directory(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in all three ways, and the one of torchrun gone on with in one process."""
    directory = tmp_path_factory.mktemp("ways")
    here(directory, "alone")
    # Forked as well: a process that is started would round to float32 (`tests.float64`).
    apart = (*arguments(directory, "two processes"), "train.own_process=true")
    Forked("apart", directory / "apart.out", trivium, *apart).ended(seconds=200)
    assert_ranks_end(0, directory / "torchrun", *arguments(directory, "torchrun")[2:], config=CONFIG)
    on_ray = ["cluster.kind=ray", f"cluster.address={ray_address}", "cluster.ranks=2"]
    Forked("ray", directory / "ray.out", trivium, *arguments(directory, "ray"), *on_ray).ended(seconds=200)
    shutil.copytree(directory / "torchrun", directory / "resumed")
    for step in (6, 7):
        shutil.rmtree(directory / "resumed" / "checkpoints" / f"step-{step:06d}")
    here(directory, "resumed")
    return directory


def rows(run_dir: Path) -> dict[int, dict[str, float]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row.pop("step"): {key: value for key, value in row.items() if not depends_on_machine(key)} for row in found}


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights of policy and critic and the state of both optimizers."""
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    files = {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}
    return {f"{file}:{name}": tensor for file, named in files.items() for name, tensor in named.items()}


@pytest.mark.parametrize("way", [*WAYS, "resumed"])
def test_every_way_trains_the_same(way: str, directory: Path) -> None:
    mine, theirs = rows(directory / way), rows(directory / "alone")
    if (
        way == "resumed"
    ):  # versions 5 and 6 differ in their last bits from those of the ranks, whose rollouts are discarded
        mine[6].pop("rollout/discarded", None)
    assert [*mine] == [*theirs] == [*STEPS["sampled"], *STEPS["scripted"]]
    for step, row in theirs.items():
        assert {"train/loss/policy", "train/loss/value", "train/grad_norm/policy", "train/grad_norm/value"} <= {*row}
        assert mine[step] == pytest.approx(row, rel=1e-9, abs=1e-9), step
    assert len({row["train/kl_coef"] for row in theirs.values()}) > 3
    assert len({row["train/grad_norm/policy"] for row in theirs.values()}) == 7
    for step in (2, 4, 6, 7):  # the stage's end, and the last three: the list of what is kept goes on after a resume
        found, expected = tensors(directory / way, step), tensors(directory / "alone", step)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            scale = float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9 * scale, msg=f"{name} of step {step}")
    assert {path.name for path in (directory / way / "checkpoints").iterdir()} == {
        path.name for path in (directory / "alone" / "checkpoints").iterdir()
    }


def test_a_process_of_its_own_trains_the_same_bits(directory: Path) -> None:
    mine, theirs = directory / "two processes", directory / "alone"
    assert rows(mine) == rows(theirs)
    for step in (2, 4, 6, 7):
        expected = tensors(theirs, step)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(mine, step).items())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_samples_the_same_tokens(way: str, directory: Path) -> None:
    played = [*Journal(directory / "alone" / "rollouts" / "stage-0").read_step(1)]
    mine = [*Journal(directory / way / "rollouts" / "stage-0").read_step(1)]
    assert len(played) == 4
    by_slot = {group.slot: group for group in mine}
    for group in played:
        for one, other in zip(by_slot[group.slot].trajectories, group.trajectories, strict=True):
            assert [turn.tokens.tolist() for turn in one.turns] == [turn.tokens.tolist() for turn in other.turns]
            assert [turn.log_prob.tolist() for turn in one.turns] == [turn.log_prob.tolist() for turn in other.turns]


def test_training_moves_the_weights(directory: Path) -> None:
    first, last = tensors(directory / "alone", 2), tensors(directory / "alone", 7)
    assert all(not torch.equal(tensor, last[name]) for name, tensor in first.items() if name.startswith("policy/"))
