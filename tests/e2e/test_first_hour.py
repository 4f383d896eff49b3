"""What a new user meets in the first hour, from the outside: through the command line or public Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Forked, commands
from trivium.metrics import depends_on_machine

BASE = """
run: {dir: run}
model: {kind: tiny, alphabet: "0123456789+=", layers: 1, hidden: 16, heads: 2, mlp: 16, max_position: 24}
tasks: {train: {kind: arithmetic, max_operand: 9}}
engine: {sampling: {max_new_tokens: 3}}
schedule: {steps: 3, groups_per_step: 2, group_size: 4}
checkpoint: {save_every: 1}
monitors: [{kind: jsonl}]
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Forked]]:
    """Starts `trivium` commands in an empty directory that holds base.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    with commands(tmp_path) as begin:
        yield begin


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what depends on the machine."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not depends_on_machine(k)} for line in lines]


def weights_of(run_dir: Path) -> dict[str, bytes]:
    """Every tensor file of the checkpoints."""
    return {str(f.relative_to(run_dir)): f.read_bytes() for f in sorted(run_dir.glob("checkpoints/**/*.safetensors"))}


# --------------------------------------------------------------------------- failures, and what a resumed run does

SERVICE = """
from pathlib import Path
from trivium.config import WorkflowConfig

def ask():
    with open("calls", "a") as calls:  # the service goes down in the second step
        calls.write(".")
    if Path("calls").stat().st_size > 8 and not Path("repaired").exists():
        raise ConnectionError("the service is down")

def reward(prompt, completion, answer):
    ask()
    return float(len(completion))

def plain(prompt, completion, answer):
    return float(len(completion))

class World:
    class Config(WorkflowConfig):
        pass

    def __init__(self, config):
        pass

    async def run(self, task, policy):
        ask()
        await policy.generate(task.prompt)
"""


@pytest.mark.parametrize(
    ("parts", "retried"),
    [
        ("rewards: [{kind: service.py:reward}]", "0 group(s) are rolled out again, the rewards of 2 computed again"),
        (
            "rewards: [{kind: service.py:plain}]\nworkflow: {kind: service.py:World}",
            "2 group(s) are rolled out again, the rewards of 0 computed again",
        ),
    ],
    ids=["reward", "environment"],
)
def test_a_run_that_an_outage_ended_continues_once_it_is_over(
    start: Callable[..., Forked], tmp_path: Path, parts: str, retried: str
) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "run.yaml").write_text(f"extends: base.yaml\n{parts}\n")
    for _ in range(2):  # the second time it is down from the start
        failed = start("down", "run", "run.yaml")
        assert failed.wait(120) == 1
        assert "ConnectionError: the service is down" in failed.text
        assert "run the same command again" in failed.text
        assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]
    (tmp_path / "repaired").touch()
    continued = start("up", "run", "run.yaml")
    assert continued.wait(120) == 0, continued.text
    assert retried in (tmp_path / "run" / "log.txt").read_text()
    never_down = start("never-down", "run", "run.yaml", "run.dir=other")
    assert never_down.wait(120) == 0, never_down.text
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "other")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "other")


# --------------------------------------------------------------------------- user code that misbehaves

# --------------------------------------------------------------------------- damaged files

# --------------------------------------------------------------------------- check and evaluation

# --------------------------------------------------------------------------- serving

# --------------------------------------------------------------------------- Python and console

# --------------------------------------------------------------------------- reward models, preferences, rollouts

# --------------------------------------------------------------------------- documents and examples
