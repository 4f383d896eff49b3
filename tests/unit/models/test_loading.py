"""Models are read from files as transformers reads them, by each rank its own part, in memory for that alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import refused
from rank_parts_of_loading import engine_of, on_rank
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from training_parts import MODELS, VOCABULARY, make_batch, write_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3MoeConfig
from vision_parts import FAMILIES, tiny

from trivium.foundation.errors import DataError
from trivium.models.backbone.load import load_backbone, load_lm
from trivium.models.weights.section import LoraConfig
from trivium.training.distributed.ranks import ALONE

MIXTURE = Qwen3MoeConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)


def write_mixture(directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURE).save_pretrained(directory)
    return directory


WRITERS: Mapping[str, Any] = {
    **{name: partial(write_model, name=name) for name in MODELS},
    "mixture": write_mixture,
    **{family: partial(tiny, family=family) for family in FAMILIES},
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_is_what_transformers_loads(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path)
    kind = AutoModelForImageTextToText if name in FAMILIES else AutoModelForCausalLM
    exact, halved = torch.float32, torch.bfloat16
    pairs = [
        (load_lm(path, dtype=exact, attention=None), kind.from_pretrained(path, dtype=exact)),
        (load_backbone(path, dtype=halved), AutoModel.from_pretrained(path, dtype=halved)),
    ]
    for ours, theirs in pairs:
        assert tensors(ours).keys() == tensors(theirs).keys()
        for key, tensor in tensors(theirs).items():
            torch.testing.assert_close(tensors(ours)[key], tensor, rtol=0, atol=0)
        assert [*dict(ours.named_parameters())] == [*dict(theirs.named_parameters())]  # tied ones are one
        assert ours.config.to_dict() == theirs.config.to_dict()
        assert repr(getattr(ours, "_weight_conversions", [])) == repr(theirs._weight_conversions)
    assert load_lm(path, dtype="auto", attention=None).dtype == torch.float32


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers."""
    return {**module.state_dict(), **dict(module.named_buffers())}


# --------------------------------------------------------------------------- ranks


ADAPTER = LoraConfig(rank=3, path=None)


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models, by what is special about them."""
    folder = tmp_path_factory.mktemp("fitting")
    paths = {name: WRITERS[name](folder / name) for name in ("gpt2", "mixture")}
    return {**paths, "pickled": pickled(write_model(folder / "pickled", "llama")), "adapter": write_model(folder / "a")}


@pytest.fixture(scope="module")
def on_ranks(fitting: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128, "vocab_size": 2000}
    large = write_model(folder / "large", "llama", **sizes)
    assert 90e6 < (large / "model.safetensors").stat().st_size < 120e6
    paths = {name: path for name, (path, _) in damaged(folder).items()}
    return run_ranks([3], on_rank, folder / "ranks", large, fitting, paths, ADAPTER)[3]


def test_ranks_read_their_parts(fitting: dict[str, Path], on_ranks: list[dict[str, Any]]) -> None:
    for name, path in fitting.items():
        engine = engine_of(path, ALONE, lora=ADAPTER if name == "adapter" else None)
        expected, scores = dict(engine.export_weights()), engine.score(make_batch(), "log_prob")
        for rank, results in enumerate(on_ranks):
            exported, own = results["models"][name]
            assert exported.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[key]) for key, tensor in exported.items()), name
            torch.testing.assert_close(torch.tensor(own[0]), torch.tensor(scores[rank]), rtol=1e-5, atol=1e-5)


def pickled(directory: Path) -> Path:
    """The same weights in a file that is no safetensors file."""
    file = directory / "model.safetensors"
    torch.save(load_file(file), directory / "pytorch_model.bin")
    file.unlink()
    return directory


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
def test_a_rank_needs_memory_for_its_part_alone(on_ranks: list[dict[str, Any]]) -> None:
    for peak in (each["peak"] for each in on_ranks):
        assert peak["kept"] < 45e6
        assert peak["peak"] <= 1.2 * peak["kept"] + peak["largest"], peak


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
def test_no_rank_holds_whole_weights_on_their_way_to_vllm(on_ranks: list[dict[str, Any]]) -> None:
    """The model has 110 MB, its largest tensor 4. Every rank gathers each tensor; the first one writes buckets of 8 MB.
    Freed memory may not have been returned yet."""
    for peak in (each["peak"] for each in on_ranks):
        assert peak["written"] < 70e6, peak
        assert peak["files"] > 5


# --------------------------------------------------------------------------- files that do not fit


def damaged(directory: Path) -> dict[str, tuple[Path, str]]:
    """Directories whose files are not those of their model, with a part of the error."""

    def copy(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        path = write_model(directory / name, "llama")
        return path, load_file(path / "model.safetensors")

    found = dict[str, tuple[Path, str]]()
    norm = "model.layers.1.input_layernorm.weight"
    path, weights = copy("lacking")
    del weights[norm]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    found["lacking"] = path, f"no {norm}"
    path, weights = copy("shape")
    save_file({**weights, norm: torch.ones(7)}, path / "model.safetensors", {"format": "pt"})
    found["shape"] = path, r"has the shape [7]"
    path, weights = copy("type")
    save_file({**weights, norm: torch.ones(16, dtype=torch.int8)}, path / "model.safetensors", {"format": "pt"})
    found["type"] = path, "saved as torch.int8"
    path, _ = copy("short")
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])
    found["short"] = path, "beyond"
    path, weights = copy("untied")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    found["untied"] = path, "different values"
    path, _ = copy("nothing")
    (path / "model.safetensors").unlink()
    found["nothing"] = path, "model.safetensors"
    path, _ = copy("index")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {norm: "model-1.safetensors"}}))
    found["index"] = path, "model-1.safetensors"
    return found


def test_files_that_do_not_fit_the_model_are_refused(tmp_path: Path, on_ranks: list[dict[str, Any]]) -> None:
    expected = damaged(tmp_path)
    for path, text in expected.values():
        with refused(DataError, text):
            load_lm(path, dtype=torch.float32)
    for errors in (each["refused"] for each in on_ranks):
        assert {name for name, (_, text) in expected.items() if text not in errors[name]} == set()


def test_a_config_of_another_size_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers, config.layer_types = 3, None
    config.save_pretrained(path)
    with refused(DataError, "model.layers.2.input_layernorm.weight"):
        load_lm(path, dtype=torch.float32)
