"""engine.kind vllm. One engine serves most of the file: it samples a short run first, which sends it LoRA adapters, and
its last weights are what later tests expect of it. `make test-vllm` runs them, where vLLM is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from failing import refused
from vision_parts import by_transformers, picture, tiny, user

from tests.ports import port_below_ephemeral
from tests.waiting import eventually, until
from trivium.config import config_from_mapping
from trivium.engines.endpoint.engine import EndpointEngine
from trivium.engines.vllm.engine import VllmEngine
from trivium.engines.vllm.process import dead_error, unless_dead
from trivium.foundation.errors import RolloutError, SyncError
from trivium.foundation.randomness import SampleKey
from trivium.models.backbone.load import load_lm
from trivium.models.weights.lora import adapter_state, attach, merged_state, pushed_adapter
from trivium.models.weights.section import LoraConfig
from trivium.policy import EngineFailure
from trivium.runtime.launch import run
from trivium.testing import check_engine, reference_policy
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny import TinyModel, tiny_tokenizer
from trivium.types import Completion, Experience, Media, Request, Sampling, StopReason

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test-vllm` has it"
    ),
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports
    pytest.mark.timeout(600),
]
STEPS = 3


class Kept(VllmEngine):
    """An engine that outlives its run."""

    keep = True
    engines: list[Kept] = []  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engines.append(self)

    async def close(self) -> None:
        if not self.keep:
            await super().close()


def parity(prompt: str, completion: str) -> float:
    """A reward that some completions of any policy earn."""
    return float(len(completion) % 2)


class Ran(NamedTuple):
    engine: Kept
    run_dir: Path
    models: list[Path]
    """The model that the run began with, and another."""

    @property
    def rows(self) -> list[dict[str, float]]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "mismatch/kl" in row]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("vllm")
    models = [sharp_model(folder / f"model-{seed}", seed) for seed in range(2)]
    sampling = {"max_new_tokens": 6, "top_k": 20, "top_p": 0.9}
    config = {
        "run": {"dir": str(folder / "run")},
        "cluster": {"threads": 1},
        "model": {"kind": "hf", "path": str(models[0])},
        "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
        "rewards": [{"kind": "tests.e2e.test_vllm:parity"}],
        "engine": {"kind": "tests.e2e.test_vllm:Kept", "max_rows": 64, "sampling": sampling},
        "algorithm": "grpo",
        "train": {"optimizer": {"lr": 1e-2}, "lora": {"rank": 4, "alpha": 8, "push": "adapter"}},
        "schedule": {"steps": STEPS, "groups_per_step": 4, "group_size": 4},
        "monitors": [{"kind": "jsonl"}],
    }
    run(config_from_mapping(config))
    yield Ran(Kept.engines[0], folder / "run", models)
    for engine in Kept.engines:
        engine.keep = False
        asyncio.run(engine.close())


def sharp_model(path: Path, seed: int) -> Path:
    """A policy that knows what it wants. Its output layer is tied to its table: both are one tensor."""
    config = TinyModel.Config(alphabet="bytes", hidden=64, heads=2, kv_heads=1, mlp=96, max_position=256)
    TinyModel(config, seed=seed).materialize(path)
    model = load_lm(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4 if parameter.ndim > 1 else 1
    model.save_pretrained(path)
    return path


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_lm(directory, dtype=torch.float32).state_dict()


def asked(prompt: Sequence[int], index: int = 0, **sampling: Any) -> Request:
    how = Sampling(**{"max_new_tokens": 24, **sampling})
    return Request(np.array(prompt, np.int32), how, SampleKey(0, "test", "t", "x", index=index))


def check_log_probs(ran: Ran, model: Any, request: Request, done: Completion) -> None:
    """Against transformers' own forward pass, for sampling that may not end before `min_new_tokens`."""
    tokens = torch.tensor([[*request.prompt_tokens.tolist(), *done.tokens.tolist()]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(request.prompt_tokens) - 1 : -1]
    logits[: request.sampling.min_new_tokens, sorted(ran.engine._eos)] = -torch.inf
    expected = logits.log_softmax(-1)[range(len(done.tokens)), done.tokens.tolist()].numpy()
    np.testing.assert_allclose(done.log_prob, expected, atol=1e-4)


def test_a_run_learns_with_it_and_logs_how_far_apart_they_are(ran: Ran) -> None:
    assert [row["step"] for row in ran.rows] == [1, 2, 3]
    assert all(row["train/grad_norm/policy"] > 0 for row in ran.rows)
    assert all(abs(row["mismatch/kl"]) < 1e-6 for row in ran.rows), "it samples with weights that were replaced"
    assert all("mismatch/weight/mean" in row for row in ran.rows)
    assert "computes log-probabilities differently" in (ran.run_dir / "plan.yaml").read_text()
    assert ran.engine.version >= STEPS - 1


async def test_completions_end_where_they_are_told_with_exact_tokens(ran: Ran) -> None:
    engine, prompt = ran.engine, [5, 6, 7]
    whole = await engine.generate(asked(prompt, temperature=0.0, min_new_tokens=8))
    assert not whole.log_prob.any()
    text = engine._decode(whole.tokens[:5].tolist())
    stop = text[-2:]
    stopped = await engine.generate(asked(prompt, temperature=0.0, min_new_tokens=8, stop=(stop,)))
    first = next(n for n in range(1, 25) if stop in engine._decode(whole.tokens[:n].tolist()))
    assert (stopped.stop_reason, stopped.tokens.tolist()) == (StopReason.STOP, whole.tokens[:first].tolist())
    many = await asyncio.gather(*(engine.generate(asked(prompt, i, max_new_tokens=80)) for i in range(32)))
    ends = [done for done in many if done.stop_reason is StopReason.EOS]
    assert ends
    assert all(int(done.tokens[-1]) in engine._eos for done in ends)
    one = await engine.generate(asked(prompt, max_new_tokens=1, min_new_tokens=1))
    assert (one.stop_reason, len(one.tokens)) == (StopReason.LENGTH, 1)
    full = await engine.generate(asked([5] * (engine.max_context - 2), max_new_tokens=80, min_new_tokens=80))
    assert (full.stop_reason, len(full.tokens)) == (StopReason.LENGTH, 2)
    for bad in (asked([]), asked([5] * engine.max_context), asked([10**6]), asked([5], top_p=0.0)):
        with refused(RolloutError):
            await engine.generate(bad)


async def test_the_same_key_repeats_and_another_differs(ran: Ran) -> None:
    first, again, other = [await ran.engine.generate(asked([5], i, min_new_tokens=20)) for i in (1, 1, 2)]
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.tokens.tolist() != other.tokens.tolist()


@pytest.mark.parametrize(
    "cut",
    [{"top_k": 3}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "min_new_tokens": 8, "temperature": 0.7}, {"top_k": 999}],
    ids=str,
)
async def test_log_probs_are_over_the_tokens_that_it_says_it_kept(ran: Ran, cut: dict[str, Any]) -> None:
    await ran.engine.load(STEPS, weights_of(ran.models[0]).items())
    model: Any = load_lm(ran.models[0], dtype=torch.float32)
    requests = [asked([5, 6, 7], index, extra=("kept",), **cut) for index in range(6)]
    sizes = set[int]()
    for request, done in zip(requests, await asyncio.gather(*map(ran.engine.generate, requests)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6, 7, *done.tokens.tolist()]])).logits[0, 2:-1]
        logits /= request.sampling.temperature
        counts = done.extra["kept_count"]
        assert (counts > 0).all()
        kept = np.split(done.extra["kept"].astype(np.int64), counts.cumsum()[:-1])
        for at, (row, token, ids) in enumerate(zip(logits, done.tokens.tolist(), kept, strict=True)):
            assert token in ids
            assert at >= cut.get("min_new_tokens", 0) or not ran.engine._eos & {*ids.tolist()}
            expected = row[token] - row[torch.from_numpy(ids)].logsumexp(0)
            assert abs(float(expected) - float(done.log_prob[at])) < 1e-4
        sizes |= {*counts.tolist()}
    assert sizes == {3} if cut["top_k"] == 3 else min(sizes) >= 1
    assert "top_p" not in cut or len(sizes) > 1


async def test_kept_tokens_that_it_does_not_list_are_refused(ran: Ran) -> None:
    weights = weights_of(ran.models[0])
    with refused(RolloutError, "top_k"):
        await ran.engine.generate(asked([5], top_p=0.9, extra=("kept",)))
    await ran.engine.load(STEPS, uniform(weights).items())
    with refused(RolloutError, "top_k = 3", "engine.dtype: float32"):
        await ran.engine.generate(asked([5], top_k=3, extra=("kept",)))
    await ran.engine.load(STEPS, weights.items())


async def test_it_lists_the_log_probs_of_a_prompt(ran: Ran) -> None:
    await ran.engine.load(STEPS, weights_of(ran.models[0]).items())
    model: Any = load_lm(ran.models[0], dtype=torch.float32)
    how = {"temperature": 0.7, "max_new_tokens": 5, "min_new_tokens": 5}
    request = asked([5, 6, 7, 8, 9], extra=("prompt_log_prob",), **how)
    for _ in range(2):  # vLLM may have the keys and values of the first request
        done = await ran.engine.generate(request)
        tokens = torch.from_numpy(request.prompt_tokens.astype(np.int64))
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = log_probs.gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(done.extra["prompt_log_prob"], [0.0, *expected, *[0.0] * 5], atol=1e-4)


def uniform(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that a sample shows at once: every token is equally likely."""
    return {name: torch.zeros_like(value) if name == "model.norm.weight" else value for name, value in weights.items()}


async def test_an_update_in_flight_samples_with_the_new_weights_from_one_token_on(ran: Ran) -> None:
    old, new = STEPS, STEPS + 1
    weights = weights_of(ran.models[0])
    await ran.engine.load(old, weights.items())
    calls = [
        asyncio.ensure_future(ran.engine.generate(asked([5, 6], i, max_new_tokens=90, min_new_tokens=90)))
        for i in range(8)
    ]
    await asyncio.sleep(0.1)  # a part of their 90 tokens
    await ran.engine.load(new, uniform(weights).items(), in_flight="update")
    late = await ran.engine.generate(asked([5, 6], 9, min_new_tokens=24))
    done = await asyncio.gather(*calls)
    even = -np.log(len(weights["model.embed_tokens.weight"]) - len(ran.engine._eos))  # which may not end yet
    for each in (*done, late):
        np.testing.assert_allclose(each.log_prob[each.policy_version == new], even, atol=1e-5)
        assert (np.diff(each.policy_version) >= 0).all()
    assert (late.policy_version == new).all()
    assert any({*each.policy_version.tolist()} == {old, new} for each in done)
    assert all(np.abs(each.log_prob[each.policy_version == old] - even).max(initial=1) > 1e-3 for each in done)


def change(module: Any, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Another adapter, as it is sent."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in dict(adapter_state(module)).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return [*pushed_adapter(module)]


async def test_an_adapter_alone_is_what_merged_weights_are(ran: Ran) -> None:
    """After full weights, after another adapter, and in place of one that completions in flight began with."""
    old, new, prompt = STEPS - 1, STEPS, [5, 6, 7]
    module = attach(load_lm(ran.models[0], dtype=torch.float32), LoraConfig(rank=4, alpha=6), seed=0)
    for seed, version in ((1, old - 1), (2, old)):
        await ran.engine.load(version, change(module, seed))
        requests = [asked(prompt, index, min_new_tokens=20) for index in range(4)]
        completions = [await ran.engine.generate(request) for request in requests]
        for request, done in zip(requests, completions, strict=True):
            check_log_probs(ran, module, request, done)
            assert set(done.policy_version.tolist()) == {version}
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check_log_probs(ran, load_lm(ran.models[0], dtype=torch.float32), requests[-1], completions[-1])
    requests = [asked(prompt, index, max_new_tokens=90, min_new_tokens=90) for index in range(8)]
    calls = [asyncio.ensure_future(ran.engine.generate(request)) for request in requests]
    await asyncio.sleep(0.1)  # a part of their 90 tokens
    await ran.engine.load(new, change(module, 3), in_flight="update")
    late = await ran.engine.generate(asked(prompt, 9, min_new_tokens=24))
    check_log_probs(ran, module, asked(prompt, 9, min_new_tokens=24), late)
    versions = [done.policy_version.tolist() for done in await asyncio.gather(*calls)]
    assert all(each == sorted(each) for each in versions)
    assert any(set(each) == {old, new} for each in versions)
    wide = attach(load_lm(ran.models[0], dtype=torch.float32), LoraConfig(rank=8), seed=0)
    with refused(SyncError, "to 4"):
        await ran.engine.load(new, [*pushed_adapter(wide)])


async def test_it_sleeps_after_the_completions_in_flight_and_wakes_for_the_next_with_its_weights(ran: Ran) -> None:
    """The calls are those of a GPU; on the CPU vLLM frees nothing."""
    engine, awake = ran.engine, ran.engine.config

    async def asleep() -> bool:
        return await asyncio.wrap_future(engine._submit(engine._llm.is_sleeping()))

    await engine.rest()
    assert not await asleep(), "without a level it stays awake"
    engine.config = awake.model_copy(update={"sleep_level": 2})
    first = asyncio.ensure_future(engine.generate(asked([5, 6], 1, max_new_tokens=60, min_new_tokens=60)))
    await asyncio.sleep(0.05)
    await engine.rest()
    assert first.done()
    assert await asleep()
    again = await engine.generate(asked([5, 6], 1, max_new_tokens=60, min_new_tokens=60))
    assert not await asleep()
    assert again.tokens.tolist() == first.result().tokens.tolist()
    np.testing.assert_allclose(again.log_prob, first.result().log_prob, atol=1e-5)
    await engine.rest()
    weights = weights_of(ran.models[0])
    await engine.load(STEPS + 1, uniform(weights).items())
    assert not await asleep()
    even = -np.log(len(weights["model.embed_tokens.weight"]) - len(engine._eos))
    done = await engine.generate(asked([5, 6], 9, min_new_tokens=24))
    np.testing.assert_allclose(done.log_prob, even, atol=1e-5)
    engine.config = awake


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(ran: Ran) -> None:
    weights = weights_of(ran.models[0])
    short = {name: value for name, value in weights.items() if "layers.0" not in name}
    wide = weights | {"model.norm.weight": torch.zeros(3)}
    for wrong, named in ((short, "layers.0"), (wide, "model.norm"), (weights | {"other": torch.zeros(1)}, "other")):
        with refused(SyncError, named):
            await ran.engine.load(99, wrong.items())
    assert (await ran.engine.generate(asked([5]))).policy_version[0] == STEPS + 1


def pid_of(process: str) -> int:
    """`EngineCore`, which this process started, or `Worker`, which that one started."""
    [core] = [child.pid or 0 for child in multiprocessing.active_children() if "EngineCore" in child.name]
    if process == "EngineCore":
        return core
    children = (path.parent for path in Path("/proc").glob("[0-9]*/stat") if parent_of(path) == core)
    [worker] = [each for each in children if "VLLM::Worker" in (each / "cmdline").read_text()]
    return int(worker.name)


def parent_of(stat: Path) -> int:
    """0 where the process has ended meanwhile."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


@pytest.mark.parametrize("process", ["EngineCore", "Worker"])
async def test_vllm_that_is_killed_is_named_or_replaced_with_the_current_weights(ran: Ran, process: str) -> None:
    await ran.engine.load(STEPS + 2, weights_of(ran.models[1]).items())
    requests = [asked([5, 6, 7], i, max_new_tokens=90, min_new_tokens=90) for i in range(8)]
    allowed, ran.engine.config = ran.engine.config, ran.engine.config.model_copy(update={"max_restarts": 0})
    calls = [asyncio.ensure_future(ran.engine.generate(request)) for request in requests]
    await asyncio.wait(calls, timeout=0.05)
    victim = pid_of(process)
    os.kill(victim, signal.SIGSTOP)  # it dies before it has adopted anything
    adopting = asyncio.ensure_future(ran.engine.load(99, weights_of(ran.models[0]).items(), in_flight="update"))
    async with asyncio.timeout(120):
        await until(ran.engine._exclusive.locked, 120)
        assert not any(call.done() for call in calls)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        for asked_of_it in (adopting, *calls, ran.engine.generate(requests[0])):
            with refused(EngineFailure, "vLLM", "engine.max_restarts"):
                await asked_of_it
        assert time.monotonic() - killed < 100
    ran.engine.config = allowed
    calls = [asyncio.ensure_future(ran.engine.generate(request)) for request in requests]
    model = load_lm(ran.models[1], dtype=torch.float32)
    for request, done in zip(requests, await asyncio.gather(*calls), strict=True):
        assert set(done.policy_version.tolist()) == {STEPS + 2}
        check_log_probs(ran, model, request, done)


@pytest.mark.parametrize("dies", [True, False])
async def test_a_call_that_fails_since_a_worker_died_is_a_death(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM fails the call, and ends soon after."""
    monkeypatch.setattr("trivium.engines.vllm.process._DEATH_S", 0.5)

    async def failing() -> None:
        raise RuntimeError("Call to collective_rpc method failed: cancelled")

    llm: Any = SimpleNamespace(output_handler=asyncio.ensure_future(asyncio.sleep(0.05 if dies else 60)))
    with pytest.raises(dead_error() if dies else RuntimeError):
        await unless_dead(llm, failing())
    llm.output_handler.cancel()


async def test_the_contract(ran: Ran) -> None:
    first = ran.engine
    await first.load(STEPS + 3, weights_of(ran.models[0]).items())
    first.keep = False
    made: list[VllmEngine] = []

    def make() -> VllmEngine:
        how: dict[str, Any] = {"eos_token_ids": first._eos, "decode": first._decode, "threads": 1}
        plain = first.config.model_copy(update={"adapter_rank": None})
        made.append(VllmEngine(plain, model_dir=ran.models[0], **how) if made else first)
        return made[-1]

    await check_engine(
        make,
        [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 6, 20)],
        eos_token_ids=first._eos,
        policies=[*map(reference_policy, ran.models)],
        decode=first._decode,
        renderer=ChatRenderer(tiny_tokenizer("bytes")),
        max_new_tokens=12,
        patience_s=200,
    )


class Sees(NamedTuple):
    """An engine that reads images."""

    engine: VllmEngine
    model: Path
    renderer: ChatRenderer

    async def ask(self, *pictures: Media, index: int = 0, **sampling: Any) -> tuple[Request, Completion]:
        prompt = self.renderer.render([user("a?".join(["<image>"] * len(pictures)) + "b", *pictures)])
        how = Sampling(**{"max_new_tokens": 12, **sampling})
        request = Request(prompt.tokens, how, SampleKey(0, "test", "t", "x", index=index), prompt.media)
        return request, await self.engine.generate(request)

    def differs(self, weights: Mapping[str, torch.Tensor], request: Request, done: Completion) -> float:
        """How far the log-probabilities are from those of transformers' model with these weights, at most."""
        model: Any = load_lm(self.model, dtype=torch.float32)
        model.load_state_dict(weights)
        mask = np.arange(len(request.prompt_tokens) + len(done.tokens)) >= len(request.prompt_tokens)
        tokens = np.concatenate([request.prompt_tokens, done.tokens])
        zeros = np.zeros(len(tokens), np.float32)
        experience = Experience(tokens, mask, zeros, np.where(mask, 0, -1), "g", 0, media=request.media)
        return float(np.abs(by_transformers(self.model, experience, model=model)[mask] - done.log_prob).max())


needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="vLLM's models that see import torchvision, which PyPI has for GPUs alone",
)


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sees]:
    model = tiny(tmp_path_factory.mktemp("vision") / "model", heads=1, kv_heads=1)  # a head of 32 numbers
    renderer = renderer_of(model)
    config = VllmEngine.Config(max_rows=16, max_context=256, adapter_rank=2)
    how: dict[str, Any] = {"eos_token_ids": renderer.eos_token_ids, "decode": renderer.decode, "threads": 1}
    engine = VllmEngine(config, model_dir=model, **how)
    yield Sees(engine, model, renderer)
    asyncio.run(engine.close())


@needs_torchvision
async def test_it_reads_images_as_training_does_and_none_is_stale(sees: Sees) -> None:
    """The same picture before and after the tower changed."""
    weights = load_lm(sees.model, dtype=torch.float32).state_dict()
    tower = {name: value * (1.2 if "visual" in name else 1) for name, value in weights.items()}
    for version, held in enumerate((weights, tower)):
        if version:
            await sees.engine.load(version, held.items())
        for pictures in ((picture(1),), (picture(2), picture(3, 42, 28)), (picture(1),), ()):
            request, done = await sees.ask(*pictures)
            assert sees.differs(held, request, done) < 1e-4
            assert set(done.policy_version.tolist()) == {version}
    module = attach(load_lm(sees.model, dtype=torch.float32), LoraConfig(rank=2), seed=0)
    await sees.engine.load(2, change(module, 0))
    request, done = await sees.ask(picture(1))
    assert sees.differs(dict(merged_state(module)), request, done) < 1e-4
    await sees.engine.load(3, tower.items())
    request, done = await sees.ask(picture(1))
    assert sees.differs(weights, request, done) > 1e-3, "the tower makes no difference to this picture"
    text = replace(request, media=(replace(request.media[0], span=(0, 1)),))
    with refused(RolloutError, "placeholders"):
        await sees.engine.generate(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of vLLM's own server, and its model. The model's files ask for other sampling than any request does."""
    model = sharp_model(tmp_path_factory.mktemp("served") / "model", 0)
    asks = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 1.5, "eos_token_id": 7}
    (model / "generation_config.json").write_text(json.dumps(asks), encoding="utf-8")
    port = port_below_ephemeral()
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    quiet = {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    options = f"--host 127.0.0.1 --port {port} --enforce-eager --dtype float32 --logprobs-mode processed_logprobs"
    # `vllm serve` asks for the metadata of a package `vllm`, which that for the CPU lacks; this is what it calls.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options.split()]
    log = model.with_name("log.txt")
    with log.open("w") as out:
        served = subprocess.Popen(
            [*command, "--served-model-name", "policy", "--max-num-seqs", "16"],
            env={**os.environ, **small, **quiet},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: served.poll() is not None or answers(f"{url}/health"), 600, log.read_text)
        assert served.poll() is None, log.read_text()
        yield f"{url}/v1", model
    finally:
        with suppress(ProcessLookupError):
            os.killpg(served.pid, signal.SIGKILL)
        served.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


async def test_the_endpoint_engine_reads_what_vllm_serves(server: tuple[str, Path]) -> None:
    url, model = server
    renderer = ChatRenderer(tiny_tokenizer("bytes"))
    eos = renderer.eos_token_ids | {*range(40, 60)}
    config = EndpointEngine.Config(urls=url, model="policy")  # pyright: ignore[reportArgumentType]
    engine = EndpointEngine(config, model_dir=model, eos_token_ids=eos, decode=str, threads=1)
    policy = load_lm(model, dtype=torch.float32)
    await engine._check_for_training()
    for temperature in (0.5, 1.0, 1.7):
        requests = [asked([5, 6, 7], index, temperature=temperature, max_new_tokens=40) for index in range(8)]
        done = await asyncio.gather(*map(engine.generate, requests))
        for each in done:
            ends = np.flatnonzero(np.isin(each.tokens, [*eos])).tolist()
            assert (each.stop_reason, ends) in [(StopReason.EOS, [len(each.tokens) - 1]), (StopReason.LENGTH, [])]
            assert each.stop_reason is StopReason.EOS or len(each.tokens) == 40
            with torch.no_grad():
                logits = policy(torch.tensor([[5, 6, 7, *each.tokens.tolist()]])).logits[0, 2:-1]
            expected = (logits / temperature).log_softmax(-1)[range(len(each.tokens)), each.tokens.tolist()]
            np.testing.assert_allclose(each.log_prob, expected.numpy(), atol=1e-4)
    greedy = [asked([token], temperature=0.0, max_new_tokens=8) for token in range(5, 37)]
    done = await asyncio.gather(*map(engine.generate, greedy))
    assert not any(each.log_prob.any() for each in done)
    texts = [renderer.decode(each.tokens[1:]) for each in done]
    index, stop = next((i, char) for i, text in enumerate(texts) for char in text if "!" <= char <= "~")
    stopped = await engine.generate(asked([5 + index], temperature=0.0, max_new_tokens=8, stop=(stop,)))
    first = next(n for n in range(1, 9) if stop in renderer.decode(done[index].tokens[:n]))
    assert stopped.tokens.tolist() == done[index].tokens[:first].tolist()
    assert stopped.stop_reason is StopReason.STOP
    same = [await engine.generate(asked([5], 3, min_new_tokens=20)) for _ in range(2)]
    assert same[0].tokens.tolist() == same[1].tokens.tolist()
    await engine.close()
