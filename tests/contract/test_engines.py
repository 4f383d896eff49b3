"""Every engine that ships keeps the contract; broken ones are told which promise they break."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from transformers import Qwen3ForCausalLM

from tests.processes import Forked
from tests.waiting import until
from trivium.engines.process_pool import EngineHost, ProcessPool
from trivium.engines.scripted import ScriptedEngine
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import SampleKey
from trivium.policy import EngineFailure
from trivium.protocols import RolloutEngine, StreamingEngine
from trivium.testing import ReferencePolicy, Tolerance, check_engine, reference_policy
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel, tiny_tokenizer
from trivium.types import Capabilities, Completion, Request, Sampling, StopReason

PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 6, 20)]
REPLIES = ((5, 6, 7, 1), (9,), tuple(range(3, 30)), (4, 2))
RENDERER = ChatRenderer(tiny_tokenizer("bytes"))
EOS = frozenset({1, 2, *range(40, 60), *RENDERER.eos_token_ids})


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def scripted(**config: Any) -> ScriptedEngine:
    said = ScriptedEngine.Config(replies=REPLIES, **config)
    return ScriptedEngine(said, eos_token_ids=EOS, decode=decode)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies that know what they want: their distributions depend on the temperature, and differ."""
    paths: list[Path] = []
    for seed in range(2):
        path = tmp_path_factory.mktemp("model") / "built"
        config = TinyModel.Config(alphabet="bytes", tied=False, hidden=32, mlp=48, kv_heads=2, max_position=256)
        TinyModel(config, seed=seed).materialize(path)
        model = Qwen3ForCausalLM.from_pretrained(path)
        with torch.no_grad():
            model.lm_head.weight *= 6
        sharp = path.with_name("sharp")
        model.save_pretrained(sharp)
        paths.append(sharp)
    return paths


@pytest.fixture(scope="module")
def policies(model_dirs: list[Path]) -> list[ReferencePolicy]:
    return [*map(reference_policy, model_dirs)]


def torch_engine(model_dir: Path, **config: Any) -> TorchEngine:
    return TorchEngine(TorchEngine.Config(**config), model_dir=model_dir, eos_token_ids=EOS, decode=decode, threads=1)


def pooled(make: Callable[[], RolloutEngine]) -> ProcessPool:
    """An engine here, and one behind a connection."""
    return ProcessPool(make(), [("rank 1", EngineHost(make(), "127.0.0.1", b"secret").address)], b"secret", 60.0)


async def check_torch_engine(
    model_dirs: list[Path],
    policies: list[ReferencePolicy],
    *,
    wrapped: Callable[[Callable[[], RolloutEngine]], RolloutEngine] = lambda make: make(),
    **config: Any,
) -> None:
    def make() -> RolloutEngine:
        return torch_engine(model_dirs[0], **config)

    await check_engine(
        lambda: wrapped(make),
        PROMPTS,
        eos_token_ids=EOS,
        policies=policies,
        # A large output layer on a small model makes rounding large.
        tolerance=Tolerance(0.05, 0.8) if "dtype" in config else "float32",
        decode=decode,
        renderer=RENDERER,
        # One row at a time takes a step for each token.
        max_new_tokens=6 if "max_rows" in config else 12,
        crowd=12 if "max_rows" in config else 500,
        patience_s=300,
    )


@pytest.mark.parametrize("wrapped", [lambda make: make(), pooled], ids=["alone", "on-ranks"])
async def test_the_torch_engine(
    wrapped: Callable[[Callable[[], RolloutEngine]], RolloutEngine],
    model_dirs: list[Path],
    policies: list[ReferencePolicy],
) -> None:
    await check_torch_engine(model_dirs, policies, wrapped=wrapped)


@pytest.mark.parametrize(
    "config",
    [{"max_rows": 1}, {"batch_invariant": False}, {"dtype": "bfloat16"}],
    ids=lambda config: next(iter(config)),
)
async def test_the_torch_engine_as_configured(
    config: dict[str, Any], model_dirs: list[Path], policies: list[ReferencePolicy]
) -> None:
    await check_torch_engine(model_dirs, policies, **config)


@pytest.mark.parametrize("name", ["scripted", "scripted-slow"])
async def test_the_scripted_engine(name: str) -> None:
    delay_s = 0.01 if name == "scripted-slow" else 0.0
    weights = [("w", torch.ones(2))]
    await check_engine(
        lambda: scripted(delay_s=delay_s),
        PROMPTS,
        eos_token_ids=EOS,
        weights=lambda: weights,
        decode=decode,
        patience_s=300,
    )


class Whole:
    """A scripted engine that reports no tokens while it samples."""

    max_context, capabilities = 4096, ScriptedEngine.capabilities

    def __init__(self) -> None:
        engine = scripted()
        self.generate, self.load, self.close = engine.generate, engine.load, engine.close
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version


async def test_a_pool_of_engines_that_do_not_stream_does_not_stream() -> None:
    async def check(make: Callable[[], RolloutEngine]) -> None:
        weights = [("w", torch.ones(2))]
        await check_engine(make, PROMPTS, eos_token_ids=EOS, weights=lambda: weights, crowd=20, patience_s=300)

    await check(lambda: pooled(Whole))
    for make, streams in ((Whole, False), (scripted, True)):
        pool = pooled(make)
        assert isinstance(pool, StreamingEngine) is streams
        await pool.close()


class Wrong(ScriptedEngine):
    """A scripted engine with one fault."""

    fault = ""

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        match self.fault:
            case "too long":
                arrays = {name: np.tile(getattr(done, name), 30) for name in ("tokens", "log_prob", "policy_version")}
                return replace(done, **arrays)
            case "positive":
                return replace(done, log_prob=done.log_prob + 1)
            case "version":
                return replace(done, policy_version=done.policy_version + 1)
            case "reason":
                return replace(done, stop_reason=StopReason.STOP)
            case "company":
                crowded = len(self._in_flight) > 0
                return replace(done, log_prob=done.log_prob * (2 if crowded else 1))
        return done

    async def load(self, version: int, weights: Any, *, in_flight: str = "finish") -> None:
        always = {"no wait": "update", "wait": "finish"}
        await super().load(version, weights, in_flight=always.get(self.fault, in_flight))


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("too long", "max_new_tokens"),
        ("positive", "at most 0"),
        ("version", "loaded version"),
        ("reason", "stop_reason"),
        ("company", "batch_invariant"),
        ("no wait", "load waits"),
        ("wait", "completions in flight continue with new weights"),
    ],
)
async def test_a_broken_engine_is_told_which_promise_it_breaks(fault: str, promise: str) -> None:
    def make() -> RolloutEngine:
        engine = Wrong(ScriptedEngine.Config(replies=REPLIES, delay_s=0.005), eos_token_ids=EOS, decode=decode)
        engine.fault = fault
        return engine

    with pytest.raises(AssertionError, match=promise):
        await check_engine(make, PROMPTS, eos_token_ids=EOS, weights=lambda: [("w", np.zeros(1))])


class Faulty:
    """A torch engine behind one fault. It promises less than the engine, so that what remains is what finds the
    fault."""

    def __init__(self, engine: TorchEngine, fault: str) -> None:
        self._engine, self._fault = engine, fault
        exact, adopts = fault == "seed", fault != "ignores load"
        self.capabilities = Capabilities(exact_sampling=exact, adopts_weights=adopts)
        self.version, self.max_context = engine.version, engine.max_context
        self._calls, self._loads, self._running = 0, 0, 0
        self._cached: dict[bytes, Completion] = {}

    async def generate(self, request: Request) -> Completion:
        self._calls += 1
        self._running += 1
        try:
            done = await self._generate(self._altered(request))
        finally:
            self._running -= 1
        return replace(done, policy_version=np.full(len(done.tokens), self.version))

    def _altered(self, request: Request) -> Request:
        sampling, prompt = request.sampling, request.prompt_tokens
        match self._fault:
            case "seed":
                return replace(request, key=request.key.child(self._calls))
            case "temperature" if sampling.temperature == 0.5:
                return replace(request, sampling=replace(sampling, temperature=0.55))
            case "greedy" if sampling.temperature == 0:
                return replace(request, sampling=replace(sampling, temperature=1.0))
            case "top_k":
                return replace(request, sampling=replace(sampling, top_k=0))
            case "prompt" if len(prompt) > 1:
                return replace(request, prompt_tokens=prompt[:-1])
            case "turns" if len(prompt) > 40:  # reads a long prompt without its beginning
                return replace(request, prompt_tokens=prompt[8:])
            case "min":
                return replace(request, sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens + 1))
        return request

    async def _generate(self, request: Request) -> Completion:
        match self._fault:
            case "deaf":
                try:
                    return await self._engine.generate(request)
                except asyncio.CancelledError:
                    return await self._engine.generate(request)
            case "crowd" if self._running > 100:
                done = await self._engine.generate(request)
                return replace(done, stop_reason=StopReason.ABORT)
            case "cache":  # what was sampled for a prompt before is given again
                kept = self._cached.get(key := request.prompt_tokens.tobytes() + repr(request.sampling).encode())
                if kept is None or request.key.path != ("sentinel",):
                    kept = self._cached[key] = await self._engine.generate(request)
                return kept
        done = await self._engine.generate(request)
        ends, stops = done.stop_reason is StopReason.EOS, done.stop_reason is StopReason.STOP
        if (ends and self._fault == "eos") or (stops and self._fault == "stop"):
            cut = {name: getattr(done, name)[:-1] for name in ("tokens", "log_prob", "policy_version")}
            return replace(done, **cut)
        if stops and self._fault == "stop reason":
            return replace(done, stop_reason=StopReason.LENGTH)
        if self._fault == "log_prob":
            return replace(done, log_prob=done.log_prob * 1.002)
        if self._fault == "greedy" and request.key.path == ("greedy",):
            return replace(done, log_prob=np.zeros(len(done.tokens)))
        return done

    async def load(self, version: int, weights: Any, *, in_flight: str = "finish") -> None:
        self._loads += 1
        if self._fault == "ignores load":
            return
        if self._fault != "stale" or self._loads == 1:
            await self._engine.load(version, weights, in_flight=in_flight)
        self.version = version

    async def close(self) -> None:
        await self._engine.close()


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("seed", "exact_sampling"),
        ("min", "1 to max_new_tokens"),
        ("eos", "not eos|without end of sequence|1 to max_new_tokens"),
        ("crowd", "stop_reason is"),
        ("stop", "the tokens of a stop string are kept"),
        ("stop reason", "stop_reason is stop, not length"),
        ("log_prob", "log_prob is the training engine's"),
        ("temperature", "at temperature 0.5 log_prob"),
        ("prompt", "log_prob is the training engine's"),
        ("greedy", "log_prob is 0 at temperature 0"),
        ("top_k", "top_k 1 take the most probable token"),
        ("turns", "log_prob of every turn"),
        ("deaf", "generate ends when it is cancelled"),
        ("ignores load", "raises an error that says so"),
        ("stale", "after load, log_prob is that of the new weights"),
        ("cache", "after load, log_prob is that of the new weights"),
    ],
)
async def test_every_fault_of_a_real_engine_is_found(
    fault: str, promise: str, model_dirs: list[Path], policies: list[ReferencePolicy]
) -> None:
    with pytest.raises(AssertionError, match=promise):
        await check_engine(
            lambda: Faulty(torch_engine(model_dirs[0], batch_invariant=False), fault),
            PROMPTS,
            eos_token_ids=EOS,
            policies=policies,
            decode=decode,
            renderer=RENDERER,
            crowd=150,
            patience_s=300,
        )


def hosted(folder: Path) -> None:
    """Another process with an engine that takes its time."""
    (folder / "new").write_text(json.dumps(EngineHost(scripted(delay_s=600.0), "127.0.0.1", b"secret").address))
    (folder / "new").rename(folder / "address")
    signal.pause()


async def test_an_engine_whose_process_dies_is_named(tmp_path: Path) -> None:
    process = Forked("host", tmp_path / "host.out", hosted, tmp_path)
    try:
        await until((tmp_path / "address").exists, why=lambda: process.text)
        host, port = json.loads((tmp_path / "address").read_text())
        pool = ProcessPool(scripted(delay_s=600.0), [("rank 1", (host, port))], b"secret", 60.0)
        requests = (Request(PROMPTS[0], Sampling(4), SampleKey(0, "test", "train", "t", 0, n)) for n in range(2))
        calls = [asyncio.ensure_future(pool.generate(request)) for request in requests]  # one for each engine
        await asyncio.sleep(0)  # both are sent, or find the process dead
        process.kill()
        with refused(EngineFailure, "rank 1"):
            await asyncio.wait_for(calls[1], 60)
        with refused(EngineFailure, "its log"):
            await pool.load(1, [])
        calls[0].cancel()
        await pool.close()
    finally:
        process.kill()
