"""What engine.kind vllm takes from the rest of a run's config, and what it refuses beside it; and an engine that leaves
its device to the trainer. Nothing here needs vLLM."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import configs
import pytest
from failing import refused
from training_parts import write_model

from tests.processes import Forked
from tests.waiting import eventually
from trivium.config import RunConfig
from trivium.engines.torch.engine import TorchEngine
from trivium.engines.vllm.engine import VllmEngine
from trivium.engines.vllm.process import OWNER, end_with_owner, gpus_of_rank, owned
from trivium.foundation.errors import ConfigError
from trivium.models.backbone.load import load_lm
from trivium.models.weights.lora import attach, save_adapter
from trivium.models.weights.section import LoraConfig
from trivium.planning.memory_estimate import RUNTIME, MemoryPlan, hosts_engine
from trivium.protocols import Weights
from trivium.runtime.launch import run
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Completion, Request


def configured(
    engine: Mapping[str, Any] | None = None, lora: Mapping[str, Any] | None = None, **more: Any
) -> RunConfig:
    section = {"kind": "vllm", "device": "cpu", **(engine or {})}
    return configs.configured(algorithm="grpo", engine=section, train={"lora": lora} if lora else {}, **more)


SERVED: dict[str, Any] = {"run": {"mode": "tinker"}, "tasks": {"train": {"kind": "served"}}, "rewards": []}


def test_vllm_takes_adapters_of_the_rank_that_the_run_sends(tmp_path: Path) -> None:
    def rank(config: RunConfig) -> int | None:
        engine = config.engine.for_run(config)
        assert isinstance(engine, VllmEngine.Config)
        return engine.adapter_rank

    assert rank(configured()) is None
    assert rank(configured(lora={"rank": 4})) is None, "merged weights are sent"
    assert rank(configured(lora={"rank": 4, "push": "adapter"})) == 4
    assert rank(configured(**SERVED)) == 32, "the SDK's own"
    assert rank(configured(lora={"rank": 4}, **SERVED)) == 4
    assert rank(configured({"adapter_rank": 8}, **SERVED)) == 8
    base = load_lm(write_model(tmp_path / "model"), dtype="auto")
    save_adapter(attach(base, LoraConfig(rank=20), seed=0), tmp_path / "start")
    config = configured(lora={"path": str(tmp_path / "start"), "push": "adapter"})
    assert rank(config) == 20
    arguments = config.engine.for_run(config).arguments(Path("model"))  # pyright: ignore[reportAttributeAccessIssue]
    assert arguments["max_lora_rank"] == 32


@pytest.mark.parametrize(
    ("engine", "key", "found"),
    [
        ({"tensor_parallel_size": 3}, "engine.tensor_parallel_size", "4 attention heads"),
        ({"tensor_parallel_size": 4}, "engine.tensor_parallel_size", "90 rows of a feed-forward layer"),
        ({"tensor_parallel_size": 2, "expert_parallel": True}, "engine.expert_parallel", "no experts"),
        ({"device": "cpu", "data_parallel_size": 2}, "engine.data_parallel_size", "cpu"),
    ],
)
def test_what_vllm_cannot_split_is_named(engine: dict[str, Any], key: str, found: str) -> None:
    model = {"kind": "tiny", "alphabet": "bytes", "hidden": 128, "heads": 4, "kv_heads": 2, "mlp": 90}
    configured({"device": "cuda", "tensor_parallel_size": 2}, model=model)
    with refused(ConfigError, key, found):
        configured({"device": "cuda", **engine}, model=model)


def test_a_rank_of_torchrun_shows_vllm_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of a machine, with engines over two GPUs: ranks 0 and 2 host one each."""
    config = configured({"device": "cuda", "tensor_parallel_size": 2})
    assert [rank for rank in range(1, 5) if hosts_engine(config, rank, 5)] == [2]
    endpoint = configs.configured(engine={"kind": "endpoint", "urls": "http://127.0.0.1:1/v1", "model": "policy"})
    assert not any(hosts_engine(endpoint, rank, 4) for rank in range(4))
    for rank, visible, expected in (("2", None, "2,3"), ("2", "4,5,6,7", "6,7"), ("0", "4,5,6,7", None)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus_of_rank(2).get("CUDA_VISIBLE_DEVICES") == expected
    monkeypatch.setenv("LOCAL_RANK", "2")
    for visible in ("GPU-a,GPU-b", "0,1,2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with refused(ConfigError, "CUDA_VISIBLE_DEVICES", visible, "LOCAL_RANK 2"):
            gpus_of_rank(2)


def test_an_engine_knows_how_many_share_the_memory_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def engines(*config: Mapping[str, Any], **more: Any) -> int:
        section = configured(*config, **more).engine
        made = section.for_run(configured(*config, **more))
        assert isinstance(made, VllmEngine.Config)
        return made.on_this_machine().engines_here

    assert engines() == 1
    assert engines(cluster={"kind": "ray", "explorers": 2, "engines": 3}) == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (engines(), engines({"tensor_parallel_size": 2})) == (4, 2)


@pytest.mark.parametrize("split", ["tensor_parallel_size", "data_parallel_size"])
def test_vllm_starts_the_workers_of_several_gpus_itself(split: str) -> None:
    """Also in an actor of a placement group, where it would otherwise start actors of Ray."""
    backends = {"distributed_executor_backend": "mp", "data_parallel_backend": "mp"}
    assert backends.items() <= VllmEngine.Config.model_validate({split: 2}).arguments(Path("model")).items()
    assert not backends.keys() & VllmEngine.Config().arguments(Path("model")).keys()


@pytest.mark.parametrize(
    ("engine", "lora", "found"),
    [
        ({}, {"rank": 600, "push": "adapter"}, "up to 512"),
        ({"adapter_rank": 4}, {"rank": 8, "push": "adapter"}, "up to 4"),
        ({"adapter_rank": 4}, {"rank": 4}, "all weights"),
    ],
)
def test_a_rank_that_vllm_cannot_have_is_named(engine: dict[str, Any], lora: dict[str, Any], found: str) -> None:
    with refused(ConfigError, "engine.adapter_rank", found):
        configured(engine, lora)


@pytest.mark.parametrize("how", [{"top_p": 0.9}, {"min_p": 0.1}, {"min_new_tokens": 2}])
def test_training_leaves_tokens_out_where_vllm_lists_all_that_it_kept(how: dict[str, Any]) -> None:
    (name,) = how
    with refused(ConfigError, f"engine.sampling.{name}", "top_k is 0"):
        configured({"sampling": how})
    configured(evaluation={"taskset": "train", "sampling": how})
    configured({"sampling": {**how, "top_k": 5}})


@pytest.mark.parametrize(
    ("engine", "more", "found"),
    [
        ({}, {}, "GPUs"),
        ({"device": "cuda"}, {"cluster": {"kind": "ray"}}, "trainer's"),
        ({"device": "cuda"}, {"schedule": {"max_staleness": 1}}, "max_staleness 1"),
        ({"device": "cuda"}, SERVED, "clients"),
    ],
)
def test_vllm_does_not_sleep_where_it_shares_no_gpu_in_turns(
    engine: dict[str, Any], more: dict[str, Any], found: str
) -> None:
    with refused(ConfigError, "engine.sleep_level", found):
        configured({"sleep_level": 2, **engine}, **more)


def test_vllm_sleeps_on_a_gpu_of_the_trainers_process() -> None:
    config = configured({"sleep_level": 1, "device": "cuda"})
    assert config.engine.arguments(Path("model"))["enable_sleep_mode"]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("sleeps", "most"), [(False, 2 + 4 + 1 + 3), (True, 2 + 4 + 3)])
def test_of_an_engine_that_sleeps_a_gpu_holds_nothing_while_the_trainer_learns(sleeps: bool, most: int) -> None:
    rank = {"policy weights": 2, "policy optimizer": 4, "activations": 1}
    plan = MemoryPlan("cuda", rank, {}, {"engine weights": 3}, "cuda", 1, 1, together=True, sleeps=sleeps)
    assert sum(plan.gpu.values()) == most + RUNTIME


def test_vllm_changes_no_pixels_that_training_has_read(tmp_path: Path) -> None:
    """By default it expects raw ones of some families, and normalizes them itself."""
    config = VllmEngine.Config()
    sees = config.arguments(TinyVisionModel(TinyVisionModel.Config(), seed=0).materialize(tmp_path / "sees"))
    assert (sees["mm_device_do_normalize"], sees["skip_tokenizer_init"]) == (False, False)
    assert config.arguments(write_model(tmp_path / "reads"))["skip_tokenizer_init"]


def test_processes_of_vllm_end_with_the_one_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "weights"
    directory.mkdir()
    owner = Forked("owner", tmp_path / "owner.txt", owning, directory)
    eventually(lambda: owner.text != "", 60, lambda: owner.text, owner)
    monkeypatch.setenv(OWNER, owner.text)
    worker = Forked("worker", tmp_path / "worker.txt", working)
    eventually(lambda: worker.text == "it works", 60, lambda: worker.text, worker)
    owner.kill()
    assert worker.wait(120) == 1
    assert not directory.exists()


def owning(directory: Path) -> None:
    os.write(1, owned(directory).encode())
    threading.Event().wait()


def working() -> None:
    end_with_owner()
    os.write(1, b"it works")
    threading.Event().wait()


class Rested(TorchEngine):
    """Records what it is asked for, in order."""

    asked: list[str] = []  # noqa: RUF012
    in_flight = 0

    async def generate(self, request: Request) -> Completion:
        self.in_flight += 1
        try:
            await asyncio.sleep(0)
            return await super().generate(request)
        finally:
            self.in_flight -= 1
            self.asked.append("completion")

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        self.asked.append(f"load {version}")
        await super().load(version, weights, in_flight=in_flight)

    async def rest(self) -> None:
        assert not self.in_flight
        self.asked.append("rest")


def test_an_engine_rests_between_the_completions_of_a_step_and_the_next_weights(tmp_path: Path) -> None:
    sections = {
        "run": {"dir": str(tmp_path)},
        "cluster": {"threads": 1},
        "engine": {"kind": f"{__name__}:Rested", "sampling": {"max_new_tokens": 2}},
        "schedule": {"steps": 2, "groups_per_step": 2, "group_size": 2},
    }
    run(configs.configured(model=configs.tiny_model(), **sections))
    step = [*["completion"] * 4, "rest"]
    assert Rested.asked[:12] == ["load 0", *step, "load 1", *step]
