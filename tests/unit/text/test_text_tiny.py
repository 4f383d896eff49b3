"""Tiny models: real Hugging Face directories, made offline, a pure function of the seed."""

import hashlib
from pathlib import Path

import pytest
import torch
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoConfig, AutoTokenizer

from trivium.config import build, plugin
from trivium.foundation.errors import DataError, RunDirError
from trivium.models.backbone.load import load_lm
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import ASCII, TinyModel, tiny_tokenizer
from trivium.types import Message

SMALL = {"layers": 1, "hidden": 16, "heads": 2, "mlp": 16, "max_position": 32}
BYTES = tiny_tokenizer("bytes")


def contents(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_it_loads_like_any_model(tmp_path, architecture, tied):
    config = TinyModel.Config(**SMALL, architecture=architecture, tied=tied, alphabet="0123456789+=")
    path = TinyModel(config, seed=0).materialize(tmp_path / "deep" / "model")
    model, tokenizer = load_lm(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    assert model.config.model_type == architecture
    assert model.config.vocab_size == len(tokenizer) == 12 + 7
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    ids = ChatRenderer(tokenizer).render([Message("user", "1+1=")]).tokens
    assert tokenizer.decode(ids) == "<|user|>1+1=<|end|><|assistant|>"
    logits = model(torch.tensor(ids[None].astype("int64"))).logits
    assert logits.shape == (1, len(ids), 19)
    assert torch.isfinite(logits).all()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert ChatRenderer(tokenizer).eos_token_ids == {tokenizer.eos_token_id}


def test_building_prints_no_progress_bar(tmp_path, capfd):
    TinyModel(TinyModel.Config(), seed=0).materialize(tmp_path)
    assert "".join(capfd.readouterr()) == ""


def test_weights_are_a_function_of_the_seed_and_leave_the_generator_alone(tmp_path):
    config = TinyModel.Config(**SMALL)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = contents(TinyModel(config, seed=7).materialize(tmp_path / "a"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert contents(TinyModel(config, seed=7).materialize(tmp_path / "b")) == first
    other = contents(TinyModel(config, seed=8).materialize(tmp_path / "c"))
    assert [name for name in first if first[name] != other[name]] == ["manifest.json", "model.safetensors"]


def test_what_is_there_is_used_and_what_was_cut_short_is_made_again(tmp_path):
    source = TinyModel(TinyModel.Config(**SMALL), seed=0)
    path = source.materialize(tmp_path / "model")
    written = (path / "config.json").stat().st_mtime_ns
    assert (source.materialize(path) / "config.json").stat().st_mtime_ns == written
    (tmp_path / ".again.0123abcd.writing").mkdir()
    (tmp_path / ".again.0123abcd.writing" / "config.json").write_text("half of a fi")
    assert contents(source.materialize(tmp_path / "again")).keys() == contents(path).keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "model"]


def test_what_was_changed_is_refused_unless_it_has_no_hashes(tmp_path, caplog):
    source = TinyModel(TinyModel.Config(**SMALL), seed=0)
    path = source.materialize(tmp_path / "model")
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    with refused(RunDirError, path, "model.safetensors"):
        source.materialize(path)
    (path / "manifest.json").unlink()
    assert source.materialize(path) == path  # of a run that began before there was a manifest
    assert "no manifest.json" in caplog.text


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with refused(DataError, tmp_path, "other files"):
        TinyModel(TinyModel.Config(**SMALL), seed=0).materialize(tmp_path)


def test_the_config_reaches_the_model(tmp_path):
    said = {
        "kind": "tiny",
        "architecture": "llama",
        "layers": 3,
        "hidden": 24,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "mlp": 40,
        "max_position": 99,
    }
    config = plugin("models")(said)
    path = build("models", config, seed=3).materialize(tmp_path / "m")
    found = AutoConfig.from_pretrained(path)
    assert (found.num_hidden_layers, found.hidden_size, found.num_attention_heads) == (3, 24, 6)
    assert (found.num_key_value_heads, found.head_dim, found.intermediate_size) == (2, 8, 40)
    assert found.max_position_embeddings == AutoTokenizer.from_pretrained(path).model_max_length == 99


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": 10, "heads": 4},
        {"heads": 4, "kv_heads": 3},
        {"hidden": 12, "heads": 4},
        {"architecture": "gpt2", "kv_heads": 2},
        {"architecture": "gpt2", "head_dim": 4},
        {"alphabet": ""},
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValidationError):
        TinyModel.Config(**wrong)


@settings(max_examples=number_of(60))
@given(st.text())
def test_bytes_encode_any_text_and_give_it_back(text):
    ids = BYTES(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_ascii_gives_back_what_it_knows_and_marks_what_it_does_not():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == len(ASCII) + 7
    assert tokenizer.decode(tokenizer(ASCII)["input_ids"]) == ASCII
    ids = tokenizer("aéé b")["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 2
    assert len(ids) == 5
