"""A run whose models are trained in a process of their own: either process is killed, and the command goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from example_counts import FULL

from tests.ahead import children
from tests.e2e.killing import launches
from tests.e2e.test_kill import TINY, outcome_of
from tests.processes import Forked, commands, survivors
from tests.waiting import eventually

STEPS = 5 + 40
KILLS = int(os.environ.get("TRIVIUM_KILLS", "6" if FULL else "3"))
"""How often the run is killed at a random call, and begun again at once."""


def arguments(run_dir: Path, own_process: bool = True, restarts: int = 2) -> list[str]:
    how = f"stages.1.train.own_process={str(own_process).lower()}"
    return [
        "run",
        str(TINY),
        f"run.dir={run_dir}",
        how,
        f"stages.1.schedule.steps={max(STEPS - 5, 2 * KILLS)}",
        "evaluation.every=0",
        f"cluster.max_restarts={restarts}",
    ]


def text_of(command: Forked) -> str:
    return command.text


def has_trained(run_dir: Path, step: int) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.is_file() and len(path.read_text().splitlines()) > step


def trainers_of(command: Forked) -> list[int]:
    """The train processes that a command started."""
    return children(command.pid, "train_process_main")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a run that is not killed."""
    directory = tmp_path_factory.mktemp("whole")
    with commands(directory) as start:
        start("whole", *arguments(directory / "run", own_process=False)).ended(seconds=600)
    return outcome_of(directory / "run")


def test_either_process_may_be_killed_and_the_run_goes_on_to_the_same_bits(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        killed = tmp_path / "killed"
        command = start("without restarts", *arguments(killed, restarts=0))
        eventually(partial(has_trained, killed, 12), 120, partial(text_of, command), command)
        (trainer,) = trainers_of(command)
        os.kill(trainer, signal.SIGKILL)
        assert command.wait(120) == 1, command.text
        assert "trainer's process failed: it ended with exit code -9" in command.text
        assert not survivors([trainer])

        command = start("with one restart", *arguments(killed, restarts=1))
        eventually(partial(has_trained, killed, 20), 120, partial(text_of, command), command)
        os.kill(trainers_of(command)[0], signal.SIGKILL)
        eventually(partial(has_trained, killed, 30), 120, partial(text_of, command), command)
        assert "continues from the last checkpoint (0 restarts left)" in command.text
        (trainer,) = trainers_of(command)
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait(120) == -9, command.text
        assert not survivors([trainer])

        start("last", *arguments(tmp_path / "killed")).ended()
        start("replay", "replay", str(tmp_path / "killed"), "--step", "30").ended()
    assert outcome_of(tmp_path / "killed") == whole


def test_killed_at_random_calls_and_begun_again_at_once(whole: dict[str, Any], tmp_path: Path) -> None:
    """The train process computes or writes when the run's process dies, and the next attempt does not wait."""
    dice = random.Random(20261124)
    kills = [("call: not answered", dice.randrange(1, 40)) for _ in range(KILLS)]
    outcomes = launches(TINY, tmp_path / "run", kills, arguments(tmp_path / "run")[3:])
    assert outcomes[:-1].count("call: not answered") >= KILLS // 2, outcomes
    assert set(outcomes) <= {"call: not answered", "finished"}
    assert outcome_of(tmp_path / "run") == whole


def test_no_attempt_begins_while_a_process_of_the_last_one_may_write(whole: dict[str, Any], tmp_path: Path) -> None:
    """The train process is stopped when the run's process is killed: the kernel ends it. A process that ends later (of
    Ray, or of another parent) holds the directory for so long."""
    run_dir = tmp_path / "run"
    with commands(tmp_path) as start:
        command = start("first", *arguments(run_dir))
        eventually(partial(has_trained, run_dir, 12), 120, partial(text_of, command), command)
        (trainer,) = trainers_of(command)
        member = Forked("member", tmp_path / "member.out", hold, run_dir, command.pid)
        eventually(lambda: "held" in member.text, 120, lambda: member.text, member)
        for pid in (member.pid, trainer):  # nothing of this process can end it but a signal
            os.kill(pid, signal.SIGSTOP)
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait(120) == -9
        assert not survivors([trainer])
        last = start("last", *arguments(run_dir))
        assert last.poll() is None
        threading.Timer(3.0, os.kill, (member.pid, signal.SIGCONT)).start()
        assert last.wait(240) == 0, last.text
        assert member.wait(120) == 1, "it ends with the run's process"
    assert outcome_of(run_dir) == whole


def hold(run_dir: Path, owner: int) -> None:
    from trivium.foundation.concurrency import ProcessLife
    from trivium.runtime.run_dir import hold_with

    hold_with(ProcessLife.of(owner), run_dir)
    os.write(1, b"held")
    threading.Event().wait(300)


def interrupted_with_a_stopped_trainer(command: Forked, trainer: int) -> None:
    os.kill(trainer, signal.SIGSTOP)
    os.kill(command.pid, signal.SIGINT)


def only_stopped(command: Forked, trainer: int) -> None:
    os.kill(trainer, signal.SIGSTOP)


@pytest.mark.parametrize("act", [interrupted_with_a_stopped_trainer, only_stopped])
def test_a_stopped_train_process_holds_no_run(act: Callable[[Forked, int], None], tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        command = start("run", *arguments(tmp_path / "run", restarts=0))
        eventually(partial(has_trained, tmp_path / "run", 12), 120, partial(text_of, command), command)
        (trainer,) = trainers_of(command)
        act(command, trainer)
        code = command.wait(120)
        assert code == (1 if act is only_stopped else 130), command.text
        assert f"process {trainer} was stopped (SIGSTOP)" in command.text or code == 130
        assert not survivors([trainer])
