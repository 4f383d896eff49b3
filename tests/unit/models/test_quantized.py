"""A frozen base in 8 or 4 bits under an adapter. Its arithmetic takes bitsandbytes (the extra `quantized`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from safetensors.torch import load_file, save_file
from training_parts import Parts, Reinforce, make_batch, make_engine, write_model
from transformers import LlamaConfig

from trivium.config import config_from_mapping
from trivium.foundation.errors import ConfigError
from trivium.models.backbone.shape import shape_of
from trivium.models.weights.quantized import QuantizedLinear
from trivium.models.weights.section import has_library, refusal
from trivium.planning.model_memory import Adapter, TrainedModels, memory_plan
from trivium.planning.model_shape import FEW_BITS
from trivium.training.engine import TorchTrainEngine

installed = pytest.mark.skipif(not has_library(), reason="bitsandbytes is not installed (the extra `quantized`)")
FINE: dict[str, Any] = {"installed": True, "device": "cuda", "dtype": "bfloat16", "ranks": 1, "pushes_adapter": False}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ""),
        ({"device": "cpu", "dtype": "float32"}, ""),
        ({"installed": False}, "'bitsandbytes' is not installed"),
        ({"device": "mps"}, "not on mps"),
        ({"dtype": "float64"}, "keeps all weights in it"),
        ({"ranks": 2}, "2 ranks share the model"),
        ({"pushes_adapter": True}, "another base than it is trained beside"),
    ],
)
def test_where_weights_may_be_kept_in_few_bits(change: dict[str, Any], found: str) -> None:
    why = refusal(**{**FINE, **change})
    assert (why is None) == (not found)
    assert why is None or found in why.reason


@pytest.mark.skipif(has_library(), reason="bitsandbytes is installed")
def test_without_the_library_it_is_refused_with_the_command(tmp_path: Path) -> None:
    config = {
        "model": {"kind": "hf", "path": str(tmp_path)},
        "tasks": {"train": {"kind": "arithmetic"}},
        "rewards": ["exact"],
        "train": {"frozen_dtype": "nf4", "lora": {}},
    }
    with refused(ConfigError) as caught:
        config_from_mapping(config)
    (problem,) = [each for each in caught.value.problems if each.where == "train.frozen_dtype"]
    assert "pip install 'trivium[quantized]'" in problem.do
    with refused(ConfigError, "train.frozen_dtype: nf4", "pip install 'trivium[quantized]'"):
        adapted(write_model(tmp_path, "llama"), "nf4")


def test_the_plan_counts_few_bits() -> None:
    attention = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape = shape_of(LlamaConfig(**attention, num_hidden_layers=2, intermediate_size=128, vocab_size=100))
    linear = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    rest = shape.parameters - linear
    assert shape.num_bytes(2, FEW_BITS["nf4"]) == linear // 2 + linear // 64 * 4 + rest * 2
    assert shape.num_bytes(2, FEW_BITS["int8"]) == linear + linear // 256 * 4 + rest * 2
    models = TrainedModels(shape, frozen={"teacher": shape}, adapter=Adapter(4), dtype="bfloat16")
    plans = {name: memory_plan(replace(models, frozen_dtype=name), 64) for name in ("bfloat16", "int8", "nf4")}
    for item in ("policy weights", "teacher weights"):
        assert plans["bfloat16"][item] > plans["int8"][item] > plans["nf4"][item]
    assert plans["nf4"]["dequantized"] == 2 * 64 * 128 * 2


def adapted(directory: Path, kind: str, **config: Any) -> TorchTrainEngine:
    parts = Parts((Reinforce(),), frozenset({"ref"}))
    return make_engine(directory, parts, lora={"rank": 2}, frozen_dtype=kind, **config)


def dequantized(directory: Path, into: Path, kind: str) -> Path:
    """The same model, with the values that its weights have in few bits."""
    into.mkdir()
    for file in directory.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name:
            layer = torch.nn.Linear(*reversed(tensor.shape), bias=False)
            layer.weight = torch.nn.Parameter(tensor.bfloat16())
            tensors[name] = QuantizedLinear(layer, kind, torch.device("cpu")).weight
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into


@installed
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_it_trains_as_over_the_same_values_in_bfloat16(kind: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llama", scale=4.0)
    few = adapted(directory, kind)
    wide = adapted(dequantized(directory, tmp_path / "wide", kind), "bfloat16")
    batch = make_batch(advantages=0.5)
    scores = [np.concatenate(each.score(batch, "old")) for each in (few, wide)]
    np.testing.assert_allclose(*scores, rtol=5e-3, atol=5e-3)  # rounding of activations to bfloat16
    np.testing.assert_array_equal(scores[0], np.concatenate(few.score(batch, "ref")))
    exact = np.concatenate(adapted(directory, "bfloat16").score(batch, "old"))
    assert 0 < np.abs(scores[0] - exact).max() < (1.0 if kind == "int8" else 8.0)
    rows = [[each.update("policy", batch, each.algorithm.objectives[0]) for _ in range(3)] for each in (few, wide)]
    for one, other in zip(*rows, strict=True):
        assert one["train/loss/policy"] == pytest.approx(other["train/loss/policy"], rel=2e-2, abs=5e-3)
    exported, expected = (dict(each.export_weights()) for each in (few, wide))
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        # Adam's first steps have the size of the learning rate, also where a gradient is little more than rounding.
        assert (tensor - expected[name]).abs().mean() < 5e-3, name
    few.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "policy" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in exported.items())
    again = adapted(directory, kind)
    again.load(tmp_path / "saved")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in again.export_weights())
    assert "0 of them" not in again._description()


@installed
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_it_takes_the_memory_that_the_plan_says(kind: str) -> None:
    layer = torch.nn.Linear(256, 512)
    few = QuantizedLinear(layer, kind, torch.device("cpu"))
    size = sum(buffer.nbytes for name, buffer in few.named_buffers() if name != "code")
    assert size == 256 * 512 * FEW_BITS[kind].bits // 8 + 256 * 512 // FEW_BITS[kind].block * 4
    assert [name for name, _ in few.named_parameters()] == ["bias"]
    x = torch.randn(3, 256, requires_grad=True)
    few(x).square().sum().backward()
    found = x.grad
    x.grad = None
    torch.nn.functional.linear(x, few.weight, layer.bias).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


@installed
def test_models_of_other_layers_are_refused_by_name(tmp_path: Path) -> None:
    with refused(ConfigError, "GPT2LMHeadModel", "train.frozen_dtype: nf4"):
        adapted(write_model(tmp_path, "gpt2"), "nf4")


@pytest.mark.gpu
@installed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_gpu_computes_the_same(kind: str) -> None:
    layer = torch.nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    here, there = (QuantizedLinear(layer, kind, torch.device(device)) for device in ("cpu", "cuda"))
    torch.testing.assert_close(here.weight, there.weight.cpu(), rtol=0.02, atol=1e-3)
