"""GGUF files: converted once into a directory that holds their model, and refused if transformers cannot read them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trivium.config import config_from_mapping
from trivium.foundation.errors import ConfigError, DataError, MissingPackage
from trivium.models.weights.gguf import converted

gguf = pytest.importorskip("gguf")

WIDTH, INNER, LAYERS, HEADS = 64, 96, 2, 4
TOKENS = ["<s>", "</s>", "<|user|>", *(chr(code) for code in range(ord("!"), ord("~"))), "Ġ", "ab"]
TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"


def write(file: Path, quantization: Any) -> LlamaForCausalLM:
    """Writes a Llama with random weights as a GGUF file, its matrices in `quantization`; returns the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=len(TOKENS),
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    state = model.state_dict()
    for name in [name for name in state if name != "lm_head.weight"]:
        array = state[name].numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF stores rotated pairs side by side
            array = array.reshape(HEADS, 2, WIDTH // HEADS // 2, WIDTH).swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else quantization
        packed = gguf.quants.quantize(array.astype(np.float32), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trivium" / "models"


def test_a_file_becomes_a_plain_directory_once(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "small.gguf", gguf.GGMLQuantizationType.F32)
    directory = converted(tmp_path / "small.gguf")
    assert directory.parent == cache
    assert "it/s" not in capfd.readouterr().err
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    plain = AutoModelForCausalLM.from_pretrained(directory)
    assert plain.dtype == torch.float32
    expected = model.state_dict()
    assert plain.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(plain(input_ids=tokens).logits, model(input_ids=tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, "</s>")
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert converted(tmp_path / "small.gguf") == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_another_file_of_the_same_name_is_another_model(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "small.gguf", gguf.GGMLQuantizationType.F32)
    first = converted(tmp_path / "small.gguf")
    write(tmp_path / "small.gguf", gguf.GGMLQuantizationType.Q8_0)
    second = converted(tmp_path / "small.gguf")
    assert sorted(path.name for path in cache.glob("[!.]*")) == sorted([first.name, second.name])
    one, other = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (first, second))
    close = [torch.allclose(tensor, other[name], atol=1e-3) for name, tensor in one.items()]
    assert all(close)
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_config_may_name_the_file_or_a_package_that_holds_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "small.gguf", gguf.GGMLQuantizationType.F32)
    mapping = {
        "model": {"path": str(tmp_path / "small.gguf")},
        "tasks": {"train": {"kind": "arithmetic"}},
        "rewards": ["exact"],
    }
    model: Any = config_from_mapping(mapping).model
    assert Path(model.path).parent == cache
    assert model.shape().layers == LAYERS
    (tmp_path / "package_of_a_model").mkdir()
    (tmp_path / "small.gguf").rename(tmp_path / "package_of_a_model" / "small.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))
    again: Any = config_from_mapping({**mapping, "model": {"path": "package_of_a_model:small.gguf"}}).model
    assert again.path == model.path
    with refused(ConfigError, "no_such_package:small.gguf", "package no_such_package"):
        config_from_mapping({**mapping, "model": {"path": "no_such_package:small.gguf"}})
    (tmp_path / "broken.gguf").write_bytes(b"nothing")
    with refused(ConfigError, tmp_path / "broken.gguf"):
        config_from_mapping({**mapping, "model": {"path": str(tmp_path / "broken.gguf")}})


@pytest.mark.parametrize(("number", "name"), [(gguf.GGMLQuantizationType.I8, "I8"), (99, "99")])
def test_a_quantization_that_cannot_be_read_is_named(tmp_path: Path, cache: Path, number: int, name: str) -> None:
    file, tensor = tmp_path / "small.gguf", b"blk.0.ffn_up.weight"
    write(file, gguf.GGMLQuantizationType.F32)
    data = bytearray(file.read_bytes())
    kind = data.index(tensor) + len(tensor) + 4 + 2 * 8  # after the number of dimensions and two sizes
    data[kind : kind + 4] = int(number).to_bytes(4, "little")
    file.write_bytes(data)
    with refused(DataError, file, name, "Q8_0"):
        converted(file)


def test_what_cannot_be_read_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(DataError, tmp_path / "none.gguf"):
        converted(tmp_path / "none.gguf")
    file = tmp_path / "small.gguf"
    write(file, gguf.GGMLQuantizationType.F32)
    (tmp_path / "odd.gguf").write_bytes(file.read_bytes().replace(b"llama", b"lxxma"))
    with refused(DataError, tmp_path / "odd.gguf", "lxxma"):
        converted(tmp_path / "odd.gguf")
    for size in (10, 2000, file.stat().st_size // 2):
        (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:size])
        with refused(DataError, tmp_path / "cut.gguf"):
            converted(tmp_path / "cut.gguf")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "gguf" else found(name))
    with refused(MissingPackage, file, "'gguf'", "pip install 'trivium[gguf]'"):
        converted(file)
    assert not [path for path in cache.glob("*") if path.is_dir() and any(path.iterdir())]
