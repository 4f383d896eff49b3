"""The memory channel: what is collected is what was offered, to the bit, whatever happens to the trainer's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trivium.engines.torch.engine import TorchEngine
from trivium.errors import SyncError
from trivium.randomness import SampleKey
from trivium.sync.memory import MemoryChannel
from trivium.types import Completion, Request, Sampling

VOCABULARY = 23
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


class Odd(torch.nn.Module):
    """Every kind of tensor a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(3, 5))
        self.brain = torch.nn.Parameter(torch.randn(7).to(torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.randn(4, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("turned", torch.randn(4, 6).T)


def weights_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.state_dict().items()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b) if tensor.numel()]
    return a.dtype == b.dtype and a.shape == b.shape and (not raw or torch.equal(*raw))


def test_every_tensor_makes_the_round_trip() -> None:
    module, channel = Odd(), MemoryChannel()
    channel.offer(4, weights_of(module))
    collected = dict(channel.collect(4))
    assert list(collected) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert same_bits(tensor, collected[name]), name
        assert not collected[name].requires_grad


def test_not_a_number_and_minus_zero_make_the_round_trip() -> None:
    strange = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    channel = MemoryChannel()
    channel.offer(0, [("strange", strange)])
    assert same_bits(dict(channel.collect(0))["strange"], strange)


def test_what_the_trainer_does_after_the_offer_is_not_seen() -> None:
    module, channel = Odd(), MemoryChannel(keep=2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    channel.offer(1, weights_of(module))
    reading = iter(channel.collect(1))
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    channel.offer(2, weights_of(module))
    assert all(same_bits(before[name], tensor) for name, tensor in reading)
    assert all(not tensor.any() for _, tensor in channel.collect(2))


@pytest.mark.parametrize("name", ["matrix", "brain", "mean", "scalar", "seen"])
def test_a_tensor_that_was_written_to_is_refused_by_name(name: str) -> None:
    module, channel = Odd(), MemoryChannel()
    channel.offer(1, weights_of(module))
    tensor = dict(channel.collect(1))[name]
    tensor.reshape(-1).view(torch.uint8)[-1] ^= 1  # one bit
    with pytest.raises(SyncError, match=f"collect '{name}' of version 1"):
        list(channel.collect(1))


def test_the_newest_versions_are_kept() -> None:
    channel = MemoryChannel(keep=2)
    assert channel.versions == ()
    for version in (0, 2, 3, 7):
        channel.offer(version, [("weight", torch.full((2,), float(version)))])
    assert channel.versions == (3, 7)
    assert dict(channel.collect(3))["weight"].tolist() == [3.0, 3.0]
    with pytest.raises(SyncError, match=r"collect version 2") as caught:
        channel.collect(2)
    assert "(3, 7)" in caught.value.found


def test_a_version_pruned_while_it_is_read_is_read_to_its_end() -> None:
    channel = MemoryChannel()
    channel.offer(1, [("a", torch.ones(2)), ("b", torch.ones(3))])
    reading = iter(channel.collect(1))
    assert next(reading)[0] == "a"
    channel.offer(2, [("a", torch.zeros(2)), ("b", torch.zeros(3))])
    assert next(reading)[1].tolist() == [1.0, 1.0, 1.0]


def test_the_same_version_offered_again_replaces_it() -> None:
    channel = MemoryChannel(keep=2)
    for value in (1.0, 5.0):
        channel.offer(3, [("weight", torch.full((2,), value))])
    assert channel.versions == (3,)
    assert dict(channel.collect(3))["weight"].tolist() == [5.0, 5.0]


def test_saved_versions_come_back_to_the_bit(tmp_path: Path) -> None:
    first, second, channel = Odd(), Odd(), MemoryChannel(keep=3)
    for version, module in ((5, first), (6, second), (7, Odd())):
        channel.offer(version, weights_of(module))
    channel.save(tmp_path / "versions", [5, 6])
    again = MemoryChannel(keep=3)
    again.restore(tmp_path / "versions")
    assert again.versions == (5, 6)
    for version, module in ((5, first), (6, second)):
        collected = dict(again.collect(version))
        assert collected.keys() == module.state_dict().keys()
        assert all(same_bits(tensor, collected[name]) for name, tensor in module.state_dict().items())


def test_nothing_saved_is_nothing_restored(tmp_path: Path) -> None:
    channel = MemoryChannel()
    channel.offer(1, [("weight", torch.ones(1))])
    channel.save(tmp_path / "versions", [])
    assert not (tmp_path / "versions").exists()
    channel.restore(tmp_path / "versions")
    assert channel.versions == (1,)


# --------------------------------------------------------------------------- what the engine makes of it


def write_model(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZE, tie_word_embeddings=False, initializer_range=0.4))
    model.save_pretrained(directory)
    return directory


def engine_from(directory: Path) -> TorchEngine:
    config = TorchEngine.Config.model_validate({})
    return TorchEngine(config, model_dir=directory, eos_token_ids=frozenset(), decode=lambda _: "", threads=1)


async def replies(engine: TorchEngine) -> list[Completion]:
    """Two prompts, several samples each: a cache that outlives its weights would show in the second."""
    prompts = [np.arange(3, 9, dtype=np.int32), np.arange(3, 15, dtype=np.int32)]
    return [
        await engine.generate(Request(prompt, Sampling(8), SampleKey(0, "train", "t", str(len(prompt)), 0, index)))
        for prompt in prompts
        for index in range(3)
    ]


def said(completions: list[Completion]) -> list[tuple[list[int], bytes]]:
    return [(completion.tokens.tolist(), completion.log_prob.tobytes()) for completion in completions]


async def test_a_sentinel_arrives_in_every_tensor_that_matters(tmp_path: Path) -> None:
    """Weights of zero make every token as likely as any other: one that stayed behind would show."""
    model_dir = write_model(tmp_path / "model", 1)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    channel, engine = MemoryChannel(), engine_from(model_dir)
    try:
        before = await replies(engine)
        assert all(np.ptp(completion.log_prob) > 0.1 for completion in before)
        channel.offer(1, [(name, torch.zeros_like(tensor)) for name, tensor in model.state_dict().items()])
        await engine.load(1, channel.collect(1))
        for completion in await replies(engine):
            np.testing.assert_allclose(completion.log_prob, -np.log(VOCABULARY), rtol=1e-6)
            assert (completion.policy_version == 1).all()
    finally:
        await engine.close()


async def test_an_engine_that_loaded_weights_is_one_built_from_them(tmp_path: Path) -> None:
    """To the bit: nothing of the old weights, and nothing computed from them, is left."""
    old, new = write_model(tmp_path / "old", 1), write_model(tmp_path / "new", 2)
    trained = AutoModelForCausalLM.from_pretrained(new)
    channel, loaded, fresh = MemoryChannel(), engine_from(old), engine_from(new)
    try:
        before = said(await replies(loaded))
        channel.offer(1, weights_of(trained))
        await loaded.load(1, channel.collect(1))
        expected = said(await replies(fresh))
        assert said(await replies(loaded)) == expected
        assert before != expected
    finally:
        await loaded.close()
        await fresh.close()
