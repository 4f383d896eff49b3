"""Weights go into an engine as they arrive: what a process needs beside them, and what a transfer leaves that ends
half-way."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from failing import refused
from sync_parts import adopt, channel_end, engine_of, explore, holds_shifted, host, shifted, train
from training_parts import write_model

from tests.processes import Forked
from tests.waiting import until
from trivium.engines.process_pool import ProcessPool
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import RoleFailed, SyncError
from trivium.foundation.randomness import SampleKey
from trivium.models.weights.stream import Described
from trivium.policy import EngineFailure
from trivium.types import Completion, Request, Sampling

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128, "vocab_size": 4000}
BUCKET = 8 * 2**20


def asked(tokens: int = 4) -> Request:
    return Request(np.array([3, 4, 5], np.int32), Sampling(tokens), SampleKey(0, "test", "test", "1"))


def board_at(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'board.db'}"


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncGenerator[TorchEngine]:
    engine = engine_of(write_model(tmp_path / "model", max_position_embeddings=8192))
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
def test_an_engine_in_another_process_needs_one_bucket_beside_its_weights(tmp_path: Path) -> None:
    """The weights have several times as many bytes: no second copy of them is in the engine's process."""
    model_dir, url = write_model(tmp_path / "large", "llama", **LARGE), board_at(tmp_path)
    size = (model_dir / "model.safetensors").stat().st_size
    tensor = LARGE["vocab_size"] * LARGE["hidden_size"] * 4
    assert size > 6 * BUCKET > 6 * tensor
    channel_end(url, "nobody")  # makes the database, once
    trainer = Forked("trainer", tmp_path / "trainer.out", train, url, model_dir, None, BUCKET)
    explorer = Forked("explorer", tmp_path / "explorer.out", explore, url, model_dir, tmp_path / "report.json")
    try:
        assert (trainer.wait(120), explorer.wait(120)) == (0, 0), trainer.text + explorer.text
    finally:
        trainer.kill()
        explorer.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["whole"]
    assert report["rise"] < BUCKET + 2 * tensor + size / 8, report


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
async def test_an_engine_that_another_process_hosts_needs_two_tensors_beside_its_weights(tmp_path: Path) -> None:
    """As on a rank of torchrun that samples: the first one sends a tensor when all have the one before."""
    model_dir = write_model(tmp_path / "large", "llama", **LARGE)
    size, tensor = (model_dir / "model.safetensors").stat().st_size, LARGE["vocab_size"] * LARGE["hidden_size"] * 4
    other = Forked("host", tmp_path / "host.out", host, model_dir, tmp_path)
    try:
        await until((tmp_path / "address").exists, 120, lambda: other.text)
        address = tuple(json.loads((tmp_path / "address").read_text()))
        own = engine_of(model_dir)
        pool = ProcessPool(own, [("rank 1", address)], b"key", 120.0)
        await asyncio.wait_for(pool.load(1, shifted(model_dir)), 120)
        assert await holds_shifted(own, model_dir)
        await until((tmp_path / "report.json").exists, 120, lambda: other.text)
        await pool.close()
        assert await asyncio.to_thread(other.wait, 120) == 0, other.text
    finally:
        other.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["whole"]
    # One is loaded while the next one arrives, in parts, and a busy machine frees them later.
    assert report["rise"] < 5 * tensor + size / 8 < size, report


async def test_a_trainer_that_dies_half_way_is_named_and_its_half_answers_nothing(
    tmp_path: Path, engine: TorchEngine
) -> None:
    model_dir, url = tmp_path / "model", board_at(tmp_path)
    channel_end(url, "nobody")
    before = await engine.generate(asked())
    trainer = Forked("trainer", tmp_path / "trainer.out", train, url, model_dir, 9, 2000)
    try:
        with refused(RoleFailed, "trainer failed", "version 1"):
            await asyncio.wait_for(adopt(url, engine), 120)
    finally:
        trainer.kill()
    assert engine.version == 0
    for ask in (engine.generate(asked()), engine.weights()):
        with refused(EngineFailure, "version 1"):
            await ask
    await engine.load(1, shifted(model_dir))
    after = await engine.generate(asked())
    assert engine.version == 1
    fresh = engine_of(model_dir)
    await fresh.load(1, [*shifted(model_dir)])
    assert same(after, await fresh.generate(asked()))
    await fresh.close()
    assert not same(after, before)


def same(one: Completion, other: Completion) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and one.log_prob.tolist() == other.log_prob.tolist()


def ending(weights: Described, after: int) -> Described:
    def some() -> Iterator[tuple[str, torch.Tensor]]:
        for number, named in enumerate(weights):
            if number == after:
                raise ConnectionResetError("the network is gone")
            yield named

    return Described(weights.tensors, some())


async def test_before_the_first_tensor_the_old_version_still_answers(tmp_path: Path, engine: TorchEngine) -> None:
    before = await engine.generate(asked())
    with pytest.raises(ConnectionResetError, match="the network is gone"):
        await engine.load(1, ending(shifted(tmp_path / "model"), 0))
    assert same(await engine.generate(asked()), before)
    wrong = shifted(tmp_path / "model")
    with refused(SyncError, "missing"):
        await engine.load(1, Described(tuple(each for each in wrong.tensors if "norm" not in each.name), wrong))
    with refused(SyncError, "version 1"):
        await engine.load(1, Described(wrong.tensors, ((f"{name}s", tensor) for name, tensor in wrong)))
    assert same(await engine.generate(asked()), before)
    assert engine.version == 0


async def test_an_update_in_flight_that_fails_ends_what_is_in_flight(tmp_path: Path, engine: TorchEngine) -> None:
    going = asyncio.ensure_future(engine.generate(asked(tokens=8000)))
    await until(lambda: engine.counters["steps"] or going.done())
    with pytest.raises(ConnectionResetError):
        await engine.load(1, ending(shifted(tmp_path / "model"), 2), in_flight="update")
    with refused(EngineFailure, "ConnectionResetError"):
        await going
    never = shifted(tmp_path / "model")
    with refused(SyncError, "missing"):
        await engine.load(2, Described(never.tensors, list(never)[:3]))
    with refused(EngineFailure, "version 2"):
        await engine.generate(asked())
    await engine.load(3, shifted(tmp_path / "model"), in_flight="update")
    assert len((await engine.generate(asked())).tokens) == 4
