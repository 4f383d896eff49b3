"""hf_tokenizer and hf_processor: two corrections, and nothing that goes wrong is swallowed."""

import json
from pathlib import Path

import pytest
from failing import refused
from transformers import PreTrainedTokenizerBase

from trivium.foundation.errors import DataError
from trivium.text import hf_processor, hf_tokenizer
from trivium.text.tiny import TinyModel, tiny_tokenizer


def saved(directory: Path, template: str | None = None, **tokens: str | None) -> Path:
    """A tokenizer directory with these special tokens."""
    tokenizer = tiny_tokenizer("bytes")
    tokenizer.add_tokens(["<end_of_turn>", "<eos>"], special_tokens=True)
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def test_a_complete_tokenizer_is_left_alone(tmp_path):
    tokenizer = hf_tokenizer(saved(tmp_path, eos_token="<eos>"))
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<|pad|>")
    assert tokenizer("aé", add_special_tokens=False)["input_ids"] == [97, 0xC3, 0xA9]


def test_a_missing_pad_token_becomes_end_of_sequence(tmp_path):
    saved(tmp_path, eos_token="<eos>", pad_token=None)
    with pytest.warns(UserWarning, match="padding is now the end of sequence <eos>"):
        tokenizer = hf_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<eos>")
    assert hf_tokenizer(tmp_path, correct_pad_token=False).pad_token is None


def test_neither_pad_nor_end_is_an_error(tmp_path):
    saved(tmp_path, eos_token=None, pad_token=None)
    with refused(DataError, "pad"):
        hf_tokenizer(tmp_path)
    assert hf_tokenizer(tmp_path, pad_token="<eos>").pad_token == "<eos>"


def test_gemma2_ends_its_turns(tmp_path):
    by_name = saved(tmp_path / "gemma-2-2b-it", eos_token="<eos>")
    with pytest.warns(UserWarning, match="end of sequence is now <end_of_turn>"):
        tokenizer = hf_tokenizer(by_name)
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert hf_tokenizer(by_name, correct_gemma2=False).eos_token == "<eos>"


def test_gemma2_is_known_by_its_config_too(tmp_path):
    by_config = saved(tmp_path / "copy", "{{ '<end_of_turn>' }}", eos_token="<eos>")
    (by_config / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    with pytest.warns(UserWarning, match="<end_of_turn>"):
        assert hf_tokenizer(by_config).eos_token == "<end_of_turn>"
    base = saved(tmp_path / "base", None, eos_token="<eos>")
    (base / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    assert hf_tokenizer(base).eos_token == "<eos>"
    other = saved(tmp_path / "other", "{{ '<end_of_turn>' }}", eos_token="<eos>")
    assert hf_tokenizer(other).eos_token == "<eos>"


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "a/b/c", Path("nothing")])
def test_a_directory_that_is_not_there_is_never_asked_of_a_hub(name):
    for load in (hf_tokenizer, hf_processor):
        with refused(DataError, name, "no such"):
            load(name)


def test_a_text_model_has_no_processor(tmp_path):
    model = TinyModel(TinyModel.Config(layers=1, hidden=8, heads=2, mlp=8), seed=0).materialize(tmp_path / "model")
    assert hf_processor(model) is None
    assert hf_processor(saved(tmp_path / "tokenizer only")) is None


def test_a_processor_that_cannot_be_loaded_is_an_error(tmp_path):
    model = TinyModel(TinyModel.Config(layers=1, hidden=8, heads=2, mlp=8), seed=0).materialize(tmp_path / "model")
    (model / "preprocessor_config.json").write_text("{not json")
    with refused(DataError, model):
        hf_processor(model)
    (model / "preprocessor_config.json").write_text("{}")
    with refused(DataError, "preprocessor_config.json"):
        hf_processor(model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    (model / "preprocessor_config.json").unlink()
    with refused(DataError, model):
        hf_processor(model)
