"""A rank in a process of its own: commands, errors, weights, and the end of either process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from failing import refused

from tests.rank_on_trial import weights
from tests.waiting import eventually
from trivium.foundation.concurrency import ProcessLife
from trivium.foundation.errors import DataError, ProcessDied, RoleFailed, StorageError
from trivium.protocols import DescribedWeights, WeightChannel
from trivium.sync.memory import MemoryChannel
from trivium.training.distributed import train_process
from trivium.training.distributed.train_process import TrainProcess

MODULE = "tests.rank_on_trial"


class Switched:
    """The channel of this process, which a test may replace."""

    def __init__(self) -> None:
        self.to: Any = MemoryChannel(keep=2)

    @property
    def offered(self) -> str:
        return getattr(self.to, "offered", "")

    def offer(self, version: int, weights: Iterable[Any]) -> bool:
        return self.to.offer(version, weights)


CHANNEL = Switched()


def started(deadline_s: float = 60.0, **spec: str) -> TrainProcess:
    return TrainProcess(MODULE, spec, cast(WeightChannel, CHANNEL), deadline_s)


@pytest.fixture(scope="module")
def process() -> Generator[TrainProcess]:
    """It outlives the thread that starts it, whose end is a signal to its children with PR_SET_PDEATHSIG."""
    with ThreadPoolExecutor(1) as threads:
        process = threads.submit(started, name="one").result()
    yield process
    process.close()


def test_commands_are_answered_in_turn(process: TrainProcess) -> None:
    assert process.run_on_all_ranks("spec") == {"name": "one"}
    assert process.scatter("divide", [(4,)]) == [0.25]


def test_errors_are_raised_here_and_end_nothing(process: TrainProcess) -> None:
    with refused(DataError, "shorten it"):
        process.run_on_all_ranks("refuse")
    with refused(RoleFailed, "trainer's process", "ZeroDivisionError"):
        process.run_on_all_ranks("divide", 0)
    with refused(RoleFailed, "trainer's process", "ConnectionRefusedError: storage"):  # not the end of this connection
        process.run_on_all_ranks("reach", "storage")
    assert process.run_on_all_ranks("divide", 2) == 0.5


def test_weights_go_through_the_channel_of_this_process(process: TrainProcess) -> None:
    assert process.run_on_all_ranks("offer", 3) == (True, CHANNEL.offered)
    collected = CHANNEL.to.collect(3)
    assert [each.name for each in collected.tensors] == [name for name, _ in weights()]
    for (name, tensor), (expected_name, expected) in zip(collected, weights(), strict=True):
        assert name == expected_name
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


class Reluctant:
    """A channel that reads one tensor, and then refuses or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def offer(self, version: int, weights: Iterable[Any]) -> bool:
        assert isinstance(weights, DescribedWeights)
        next(iter(weights))
        if self._error is not None:
            raise self._error
        return False


def test_a_channel_need_not_read_all_weights(process: TrainProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHANNEL, "to", Reluctant())
    assert process.run_on_all_ranks("offer", 1) == (False, "")
    assert process.run_on_all_ranks("divide", 2) == 0.5


def test_any_failure_of_the_channel_is_raised_and_ends_nothing(
    process: TrainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHANNEL, "to", Reluctant(OSError("no route")))
    with refused(RoleFailed, "OSError"):
        process.run_on_all_ranks("offer", 1)
    assert process.run_on_all_ranks("divide", 2) == 0.5


def test_an_error_of_the_channel_is_raised(process: TrainProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHANNEL, "to", Reluctant(StorageError("write version 1", "the disk is full", "free some")))
    with refused(StorageError, "the disk"):
        process.run_on_all_ranks("offer", 1)
    assert process.run_on_all_ranks("divide", 2) == 0.5


def test_a_rank_that_cannot_be_built_is_an_error_of_the_first_command_and_ends_when_it_is_closed() -> None:
    process = started(refuses="none")
    life = ProcessLife.of(process.pid)
    with refused(DataError, "choose another"):
        process.run_on_all_ranks("spec")
    assert life()
    process.close()
    assert not life()


def test_its_death_is_named() -> None:
    process = started()
    process.run_on_all_ranks("spec")
    os.kill(process.pid, signal.SIGKILL)
    for _ in range(2):
        with refused(ProcessDied, "trainer's process", -9):
            process.run_on_all_ranks("spec")
    process.close()


def test_a_call_that_does_not_end_is_ended_when_it_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = started()
    process.run_on_all_ranks("spec")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(process.run_on_all_ranks, "rest", 600.0, str(tmp_path / "begun"))
        monkeypatch.setattr(train_process, "_CLOSE_S", 0.5)
        eventually((tmp_path / "begun").exists)
        process.close()
        assert isinstance(call.exception(120), RoleFailed | OSError)


@pytest.mark.parametrize("moment", ["before a call", "in a call", "in a message"])
def test_a_stopped_process_ends_the_call_that_waits_for_it_and_is_named(
    moment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train_process, "_STOPPED_S", 1.0)
    process = started()
    process.run_on_all_ranks("spec")
    argument = torch.zeros(10_000_000) if moment == "in a message" else 600.0
    with ThreadPoolExecutor(1) as threads:
        if moment == "in a call":
            call = threads.submit(process.run_on_all_ranks, "rest", argument, str(tmp_path / "begun"))
            eventually((tmp_path / "begun").exists)
            os.kill(process.pid, signal.SIGSTOP)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            call = threads.submit(process.run_on_all_ranks, "rest", argument)
        with refused(ProcessDied, f"process {process.pid}", "SIGSTOP", "'rest'"):
            call.result(120)
    process.close()


def test_a_process_that_hangs_is_ended_at_the_deadline_and_a_slow_one_is_not() -> None:
    process = started(deadline_s=1.0)
    assert process.run_on_all_ranks("compute", 1.5) == 1.5
    time.sleep(1.2)  # an idle process that no call waits for
    with refused(ProcessDied, "trainer's process", "'rest'"):
        process.run_on_all_ranks("rest", 600.0)
    process.close()


@pytest.mark.parametrize("in_call", [False, True])
def test_a_stopped_process_is_closed_in_seconds(in_call: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train_process, "_STOPPED_S", 1.0)
    monkeypatch.setattr(train_process, "_CLOSE_S", 600.0)
    process = started(deadline_s=600.0)
    process.run_on_all_ranks("spec")
    with ThreadPoolExecutor(1) as threads:
        call = None
        if in_call:
            call = threads.submit(process.run_on_all_ranks, "rest", 600.0, str(tmp_path / "begun"))
            eventually((tmp_path / "begun").exists)
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        process.close()
        assert time.monotonic() - began < 120
        assert call is None or isinstance(call.exception(120), RoleFailed | OSError)
