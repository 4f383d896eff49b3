"""Trinity-RFT's Synchronizer: a Ray actor for all processes of a namespace, an object beside a Trainer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import ray
import torch

from tests.failing import refused
from tests.processes import ROOT
from tests.waiting import eventually
from trivium.config import RunConfig, config_from_mapping, load_config
from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import ConfigError, MissingPackage, SyncError, UnknownName
from trivium.frontdoors.trinity import Experiences, RunningStatus, Synchronizer, TrainEngineWrapper, Trainer
from trivium.frontdoors.trinity.objects.boards.run_synchronizer import options_of

RUNNING, REQUIRE, WAITING, STOPPED = (
    RunningStatus.RUNNING,
    RunningStatus.REQUIRE_SYNC,
    RunningStatus.WAITING_SYNC,
    RunningStatus.STOPPED,
)


def config_in(directory: Path, *changes: str) -> RunConfig:
    overrides = [f"run.dir={directory / 'run'}", f"run.name={directory}", *changes]
    return load_config(ROOT / "tests" / "e2e" / "tiny.yaml", overrides)


def object_in(directory: Path, deadline_s: float) -> Synchronizer:
    return Synchronizer(MemoryBoard(), **options_of(config_in(directory, f"sync.deadline_s={deadline_s}")))


def counts(synchronizer: Synchronizer) -> dict[RunningStatus, int]:
    return {status: n for status, n in synchronizer.get_explorer_status_counts().items() if n}


# --------------------------------------------------------------------------- one for all processes


def explore(directory: str) -> None:
    """An explorer of another process: by the namespace alone."""
    synchronizer: Any = Synchronizer.get_actor(namespace=directory)
    ray.get(synchronizer.set_explorer_status.remote(RUNNING))
    assert ray.get(synchronizer.wait_new_model_state_dict.remote(0)) == 4
    weights, version = ray.get(synchronizer.get_model_state_dict.remote())
    assert version == 4
    assert torch.equal(weights["a"], torch.arange(6.0).reshape(2, 3))
    described = ray.get(synchronizer.get_state_dict_meta.remote())
    assert described == [("a", "torch.float32", (2, 3)), ("b", "torch.bfloat16", (1,))]
    assert ray.get(synchronizer.ready_to_nccl_sync.remote("explorer", 4)) == 5
    ray.get(synchronizer.set_explorer_status.remote(STOPPED, old_status=RUNNING))


def test_processes_share_statuses_weights_and_exchanges(connected: None, directory: Path) -> None:
    config = config_in(directory, "sync.style=dynamic_by_explorer", "sync.deadline_s=120")
    with refused(UnknownName, "synchronizer"):
        Synchronizer.get_actor(namespace=str(directory))
    synchronizer: Any = Synchronizer.get_actor(config)
    assert ray.get(synchronizer.get_trainer_status.remote()) is STOPPED
    assert Synchronizer.get_actor(namespace=str(directory))._actor_id == synchronizer._actor_id
    with refused(ConfigError, "style", "'fixed'"):
        Synchronizer.get_actor(config_in(directory))
    ray.get(synchronizer.set_trainer_status.remote(RUNNING))
    exploring = ray.remote(num_cpus=0)(explore).remote(str(directory))
    eventually(lambda: ray.get(synchronizer.explorer_requires_sync.remote()), 120, lambda: "none requires")
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1).bfloat16()}

    async def exchanged() -> None:
        await synchronizer.set_model_state_dict.remote(weights, 4)
        assert await synchronizer.ready_to_nccl_sync.remote("trainer", 5) == 5
        assert await synchronizer.get_latest_model_version.remote() == 5
        assert await synchronizer.get_trainer_status.remote() is RUNNING

    asyncio.run(exchanged())
    ray.get(exploring, timeout=60)
    assert ray.get(synchronizer.get_explorer_status_counts.remote())[STOPPED] == 1
    assert ray.get(synchronizer.ready_to_nccl_sync.remote("trainer", 6)) is None  # its only explorer has stopped
    assert ray.get(synchronizer.get_latest_model_version.remote()) == 5  # and nothing was delivered


def test_an_actor_needs_the_extra_for_ray(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(MissingPackage, "synchronizer", "trivium[ray]"):
        Synchronizer.get_actor(config_in(directory))
    with refused(ConfigError, "namespace"):
        Synchronizer.get_actor()


# --------------------------------------------------------------------------- what happens when (reference 1.11)


@pytest.fixture
def alone(directory: Path) -> Any:
    return object_in(directory, 120)


async def test_waiting_in_vain_leaves_the_statuses_as_they_were(directory: Path) -> None:
    hasty = object_in(directory, 0.2)
    hasty.set_trainer_status(RUNNING)
    for _ in range(2):
        assert await hasty.ready_to_nccl_sync("trainer", 1) is None  # there is no explorer
    hasty.set_explorer_status(RUNNING)
    for _ in range(2):
        with refused(SyncError, "newer than 0", "trainer"):
            await hasty.wait_new_model_state_dict(0)
        assert await hasty.ready_to_nccl_sync("explorer", 0) is None
        assert await hasty.ready_to_nccl_sync("trainer", 1) is None
        assert (counts(hasty), hasty.get_trainer_status()) == ({RUNNING: 1}, RUNNING)
        assert hasty.get_latest_model_version() == 0


async def test_waiting_for_a_version(alone: Synchronizer) -> None:
    assert await alone.wait_new_model_state_dict(-1) == 0
    assert await alone.wait_new_model_state_dict(0) == 0  # no trainer: there will be none
    alone.set_trainer_status(RUNNING)
    alone.set_explorer_status(RUNNING)
    assert await alone.wait_new_model_state_dict(0, no_wait=True) == 0
    with refused(SyncError, "newest is 0"):
        await alone.wait_new_model_state_dict(1)
    for change, version in (
        (alone.notify_no_new_model_state_dict, 0),
        (lambda: alone.set_model_state_dict(None, 2), 2),
        (lambda: alone.set_trainer_status(STOPPED), 2),
    ):
        waiting = asyncio.ensure_future(alone.wait_new_model_state_dict(alone.get_latest_model_version()))
        while counts(alone) != {REQUIRE: 1}:
            await asyncio.sleep(0.01)
        change()
        assert await waiting == version
        assert counts(alone) == {RUNNING: 1}


async def test_an_exchange_and_its_sides_that_stop(alone: Synchronizer) -> None:
    alone.set_trainer_status(RUNNING)
    with refused(SyncError, "set_explorer_status(RunningStatus.RUNNING)"):
        await alone.ready_to_nccl_sync("explorer", 0)
    alone.set_explorer_status(REQUIRE)
    trainer = asyncio.ensure_future(alone.ready_to_nccl_sync("trainer", 1))
    while alone.get_trainer_status() is not WAITING:
        await asyncio.sleep(0.01)
    assert await alone.ready_to_nccl_sync("explorer", 0) == 1 == await trainer
    assert (counts(alone), alone.get_trainer_status(), alone.get_latest_model_version()) == ({RUNNING: 1}, RUNNING, 1)
    trainer = asyncio.ensure_future(alone.ready_to_nccl_sync("trainer", 2))
    await asyncio.sleep(0)
    alone.set_explorer_status(STOPPED, RUNNING)
    assert await trainer is None
    assert (alone.get_trainer_status(), alone.get_latest_model_version()) == (RUNNING, 1)
    alone.set_explorer_status(RUNNING)
    explorer = asyncio.ensure_future(alone.ready_to_nccl_sync("explorer", 1))
    await asyncio.sleep(0)
    alone.set_trainer_status(STOPPED)
    assert await explorer is None
    assert counts(alone) == {RUNNING: 1, STOPPED: 1}


def test_statuses_are_counted_and_what_is_not_there_says_why(alone: Synchronizer) -> None:
    alone.set_explorer_status(REQUIRE)
    alone.set_explorer_status(REQUIRE)
    alone.set_explorer_status(RUNNING, old_status=REQUIRE)
    assert alone.get_explorer_status_counts() == {RUNNING: 1, REQUIRE: 1, WAITING: 0, STOPPED: 0}
    with refused(SyncError, "waiting_sync"):
        alone.set_explorer_status(RUNNING, WAITING)
    assert alone.trainer_requires_weight_sync() is None
    alone.set_trainer_status(REQUIRE)
    assert alone.trainer_requires_weight_sync() is True
    for _ in range(2):
        assert alone.set_model_state_dict_with_step_num(7, world_size=3) == 7
        assert alone.get_latest_model_version() == 0
    assert alone.set_model_state_dict_with_step_num(7, world_size=3) == 7
    assert alone.set_model_state_dict_with_step_num() == 7 == alone.get_latest_model_version()
    with refused(SyncError, "publish version"):
        alone.set_model_state_dict(None, 6)
    assert alone.get_model_state_dict() == (None, 7)
    with refused(SyncError, "step 8", "get_actor"):
        alone.set_model_state_dict({"a": torch.zeros(1)}, 8)
    alone.open()  # a trainer begins: explorers that are there already stay
    assert alone.get_explorer_status_counts()[RUNNING] == 1


# --------------------------------------------------------------------------- beside a Trainer

SMALL = {
    "model": {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1},
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "rewards": [{"kind": "exact"}],
    "engine": {"sampling": {"max_new_tokens": 4}},
    "checkpoint": {"save_every": 0},
    "monitors": [],
    "cluster": {"threads": 1},
}


class Counting(TrainEngineWrapper):
    """A user's engine that trains nothing."""

    def __init__(self, config: RunConfig) -> None:
        self.step, self.uploaded = 0, list[int]()

    def prepare(self) -> None: ...

    @property
    def train_step_num(self) -> int:
        return self.step

    def train_step(self, batch: Experiences) -> tuple[bool, dict[str, float]]:
        self.step += 1
        return True, {}

    def save_checkpoint(self, block_until_saved: bool = False) -> None: ...

    def sync_weight(self) -> None: ...

    def upload_state_dict(self) -> None:
        self.uploaded.append(self.step)
        self.synchronizer.set_model_state_dict({"step": torch.tensor([self.step])}, self.step)

    def save_state_dict(self) -> None: ...


def trainer_in(directory: Path, **sections: Any) -> Trainer:
    kind = f"{Path(__file__)}:Counting"
    return Trainer(config_from_mapping({**SMALL, "run": {"dir": str(directory)}, "train": {"kind": kind}, **sections}))


async def test_a_trainer_that_reads_files_offers_its_weights_at_every_interval(tmp_path: Path) -> None:
    trainer = trainer_in(
        tmp_path,
        algorithm={"kind": "sft"},
        buffer={"kind": "files"},
        schedule={"steps": 5, "groups_per_step": 2, "group_size": 1, "max_staleness": 1},
        sync={"interval": 2},
    )
    assert trainer.synchronizer is trainer.engine.synchronizer
    await trainer.train()
    assert cast(Any, trainer.engine).uploaded == [0, 2, 4]
    assert trainer.synchronizer.get_latest_model_version() == 4
    weights, _ = trainer.synchronizer.get_model_state_dict()
    assert weights is not None
    assert weights["step"].tolist() == [4]
    await trainer.shutdown()


@pytest.mark.parametrize("style", ["dynamic_by_trainer", "dynamic_by_explorer"])
async def test_a_trainer_answers_an_explorer_before_its_interval_is_over(style: str, tmp_path: Path) -> None:
    trainer = trainer_in(
        tmp_path,
        algorithm={"kind": "sft"},
        buffer={"kind": "files"},
        schedule={"steps": 9, "groups_per_step": 2, "group_size": 1, "max_staleness": 4},
        sync={"interval": 5, "style": style},
    )
    trainer.prepare()
    await trainer.train_step()
    assert not trainer.need_sync()
    synchronizer = trainer.synchronizer
    synchronizer.set_explorer_status(REQUIRE)
    assert trainer.need_sync()
    trainer.sync_weight()
    assert (trainer.need_sync(), trainer.last_sync_step) == (False, 1)
    synchronizer.set_explorer_status(RUNNING, old_status=REQUIRE)
    for _ in range(5):
        await trainer.train_step()
        assert not trainer.need_sync()
    requires = synchronizer.get_trainer_status() is REQUIRE
    assert requires is (style == "dynamic_by_trainer")  # the interval is over
    await trainer.shutdown()
