"""Weights between processes: what the explorer's engine holds is what the trainer had, whoever dies in between."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3Config

from tests.e2e.exchanging import take_part
from tests.processes import Forked
from trivium.types import TRAINER

SIZE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS = {
    "tied": Qwen3Config(**SIZE, tie_word_embeddings=True),
    # Its router keeps a persistent buffer, in float32 whatever the model is in.
    "buffer": Glm4MoeConfig(
        **SIZE,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        tie_word_embeddings=True,
    ),
}


@pytest.fixture
def start(tmp_path: Path) -> Generator[Callable[..., Forked]]:
    """Starts roles over one board; none is left at the end."""
    started: list[Forked] = []

    def begin(name: str, *, model: str = "tied", dtype: str = "float32", **order: Any) -> Forked:
        path = tmp_path / "model"
        if not path.exists():
            torch.manual_seed(3)
            AutoModelForCausalLM.from_config(MODELS[model]).save_pretrained(path)
        role = TRAINER if name == TRAINER else "explorer"
        about = {"role": role, "name": name, "directory": str(tmp_path), "model": str(path), "dtype": dtype, **order}
        started.append(Forked(name, tmp_path / f"{name}-{len(started)}.log", take_part, about))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def assert_held(directory: Path, name: str, version: int) -> None:
    """What an explorer's engine held after adopting a version is what the trainer had, in the engine's types."""
    sent, held = (
        load_file(directory / f"sent-{version}.safetensors"),
        load_file(directory / f"{name}-{version}.safetensors"),
    )
    assert sent.keys() == held.keys()
    for key, tensor in sent.items():
        bits: Mapping[str, torch.Tensor] = {"sent": tensor.to(held[key].dtype), "held": held[key]}
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in bits.values())), key


@pytest.mark.parametrize(("model", "dtype"), [("tied", "float32"), ("buffer", "bfloat16")])
def test_two_explorers_hold_what_the_trainer_had(
    model: str, dtype: str, start: Callable[..., Forked], tmp_path: Path
) -> None:
    trainer = start("trainer", model=model, versions=3, explorers=2)
    explorers = [start(name, model=model, dtype=dtype) for name in ("ann", "bob")]
    assert trainer.wait(120) == 0, trainer.text
    for name, explorer in zip(("ann", "bob"), explorers, strict=True):
        assert explorer.wait(120) == 0, explorer.text
        for version in range(3):
            assert_held(tmp_path, name, version)
    names = load_file(tmp_path / "ann-2.safetensors").keys()
    assert "lm_head.weight" in names
    assert ("e_score_correction_bias" in "".join(names)) == (model == "buffer")
    before, after = (load_file(tmp_path / f"ann-{version}.safetensors") for version in (1, 2))
    assert not any(torch.equal(before[name], after[name]) for name in names), "every tensor and buffer changed"


@pytest.mark.parametrize(
    ("at", "nth", "deed"), [("broadcast", 40, "kill"), ("acknowledge", 2, "kill"), ("broadcast", 40, "stop")]
)
def test_an_explorer_that_dies_in_an_exchange_keeps_nobody_else_from_the_version(
    at: str, nth: int, deed: str, start: Callable[..., Forked], tmp_path: Path
) -> None:
    """In the middle of the tensors, and after everything has arrived; gone, or merely silent."""
    trainer = start("trainer", versions=4, explorers=2)
    victim = start("ann", at=at, nth=nth, deed=deed)
    other = start("bob")
    assert trainer.wait(120) == 0, trainer.text
    assert other.wait(120) == 0, other.text
    for version in range(4):
        assert_held(tmp_path, "bob", version)
        assert f"delivered {version}" in trainer.text
    assert "reaped ann" in trainer.text
    if deed == "kill":
        assert victim.wait(120) == -signal.SIGKILL
    assert "adopted 3" not in victim.text


def test_a_trainer_that_dies_in_an_exchange_is_named_by_the_explorers(start: Callable[..., Forked]) -> None:
    trainer = start("trainer", versions=2, explorers=2, at="broadcast_async", nth=40, deed="kill")
    explorers = [start(name) for name in ("ann", "bob")]
    assert trainer.wait(120) == -signal.SIGKILL, trainer.text
    died = time.monotonic()
    for explorer in explorers:
        assert explorer.wait(120) == 1
        assert "RoleFailed" in explorer.text
        assert "found: trainer failed: " in explorer.text
    assert time.monotonic() - died < 150


def test_a_bit_that_changed_on_the_way_is_found_and_named(start: Callable[..., Forked], tmp_path: Path) -> None:
    trainer = start("trainer", versions=2, explorers=2)
    victim, other = start("ann", deed="flip"), start("bob")
    assert victim.wait(120) == 1
    assert "SyncError" in victim.text
    assert "of version 0" in victim.text
    assert "its bytes changed between the trainer and here" in victim.text
    assert not (tmp_path / "ann-0.safetensors").exists()
    assert trainer.wait(120) == 0, trainer.text
    assert other.wait(120) == 0, other.text
    assert_held(tmp_path, "bob", 1)
