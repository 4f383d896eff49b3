"""Every engine that ships keeps the contract; broken ones are told which promise they break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trivium.engines.scripted import ScriptedEngine
from trivium.engines.torch import TorchEngine
from trivium.protocols import RolloutEngine
from trivium.testing import check_engine
from trivium.types import Completion, Request, StopReason

EOS = frozenset({1, 2})
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 6, 20)]
REPLIES = ((5, 6, 7, 1), (9,), tuple(range(3, 30)), (4, 2))


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def scripted(**config: Any) -> ScriptedEngine:
    said = ScriptedEngine.Config(replies=REPLIES, **config)
    return ScriptedEngine(said, eos_token_ids=EOS, decode=decode)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["torch", "torch-one-row", "torch-no-promise", "scripted", "scripted-slow"])
async def test_shipped_engines(name: str, model_dir: Path) -> None:
    def torch_engine(**config: Any) -> TorchEngine:
        return TorchEngine(
            TorchEngine.Config(**config), model_dir=model_dir, eos_token_ids=EOS, decode=decode, threads=1
        )

    makers: dict[str, Callable[[], RolloutEngine]] = {
        "torch": torch_engine,
        "torch-one-row": lambda: torch_engine(max_rows=1),
        "torch-no-promise": lambda: torch_engine(batch_invariant=False),
        "scripted": scripted,
        "scripted-slow": lambda: scripted(delay_s=0.01),
    }

    def weights() -> list[tuple[str, torch.Tensor]]:
        return [*Qwen3ForCausalLM.from_pretrained(model_dir).state_dict().items()]

    await check_engine(makers[name], PROMPTS, eos_token_ids=EOS, weights=weights)


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
        ("wait", "completions in flight go on with new weights"),
    ],
)
async def test_a_broken_engine_is_told_which_promise_it_breaks(fault: str, promise: str) -> None:
    def make() -> RolloutEngine:
        engine = Wrong(ScriptedEngine.Config(replies=REPLIES, delay_s=0.005), eos_token_ids=EOS, decode=decode)
        engine.fault = fault
        return engine

    with pytest.raises(AssertionError, match=promise):
        await check_engine(make, PROMPTS, eos_token_ids=EOS, weights=lambda: [("w", np.zeros(1))])
