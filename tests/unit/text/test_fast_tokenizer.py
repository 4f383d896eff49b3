"""Tokenizers without transformers give what those of transformers give: tokens, texts, templates, ends of turns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trivium.text import hf_tokenizer
from trivium.text.fast_tokenizer import FastTokenizer, saved_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TEMPLATE, fast_tiny_tokenizer, tiny_tokenizer
from trivium.types import Message, StopReason

FEATURES = """{%- set seen = namespace(n=0) -%}{{ bos_token }}{{ dict(a=1)['a'] }}{{ documents }}
{{- dict.fromkeys(['a'], 2)['a'] }}
{%- set mark = '.' -%}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif -%}
{%- for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set seen.n = seen.n + 1 %}
{{ message.role }}<{{ message.content | tojson }}> {{ seen.n }}{{ eos_token }}{{ unk_token }}
    {%- if message.role == 'assistant' %}{% generation %}
        {%- set mark = '!' %}{{ mark }}
    {%- endgeneration %}{{ mark }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}assistant{{ strftime_now('%Y') }}{% endif %}"""
"""What chat templates use beyond plain Jinja."""
UNLIKE: list[dict[str, Any]] = [
    {"tokenizer_class": "Qwen2Tokenizer"},
    {"auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}},
    {"split_special_tokens": True},
    {"pad_token": "<|absent|>"},
    {"eos_token": "<think>"},
    {"eos_token": {"content": "<|end|>"}},
    {"eos_token": None},
    {"image_token": "<|user|>"},
    {"extra_special_tokens": {"image_token": "<|user|>"}},
    {"chat_template": None, "extra_special_tokens": ["<|new|>"]},
    {"added_tokens_decoder": {"1": {"content": "<|end|>", "special": True}}},
]
"""What a tokenizer_config.json may hold that makes transformers load another tokenizer, or refuse it."""
PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
PADDING |= {"pad_type_id": 0, "pad_token": "<|user|>"}
TEXTS = ["1+1=", " two  spaces\n\ttabs ", "é漢字🙂 don't I'LL", "<|end|>a<|user|> <|unknown|>", "", "a" * 300]
CONVERSATIONS = [
    [Message("user", text)]
    if number % 2
    else [Message("system", "<&>"), Message("user", text), Message("assistant", "2"), Message("tool", "3")]
    for number, text in enumerate(TEXTS)
]


def byte_level_bpe(directory: Path, model_type: str | None = None) -> Path:
    """Saves a byte-level BPE with trained merges, as Llama 3's, and returns its directory."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"'(?i:[sdmt]|ll|ve|re)|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), *TEXTS], trainer)
    backend.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in ("begin", "end", "user")])
    backend.add_tokens(["<think>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>", chat_template=FEATURES
    )
    tokenizer.save_pretrained(directory)
    if model_type is not None:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def outcome(call: Any) -> object:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def assert_equal(fast: FastTokenizer, full: Any, templates: list[str | None]) -> None:
    rng = random.Random(0)
    assert fast.get_vocab() == full.get_vocab()
    for name in ("eos_token_id", "unk_token", "unk_token_id", "all_special_tokens", "chat_template"):
        assert getattr(fast, name) == getattr(full, name), name
    vocabulary = len(full)
    for tokens in [rng.choices(range(vocabulary), k=length) for length in range(40)]:
        for skip in (True, False):
            plain = full.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert fast.decode(tokens, skip_special_tokens=skip) == plain
    for text in TEXTS:
        assert fast.encode(text) == full(text, add_special_tokens=False)["input_ids"]
    for template in templates:
        one, two = ChatRenderer(fast, chat_template=template), ChatRenderer(full, chat_template=template)
        assert one.eos_token_ids == two.eos_token_ids
        for conversation in CONVERSATIONS:
            prompts = [outcome(lambda c=chat, m=conversation: c.render(m).tokens.tolist()) for chat in (one, two)]
            assert prompts[0] == prompts[1]
            if isinstance(prompts[0], str):
                continue
            seen, history = one.render(conversation), [*conversation, Message("assistant", "x")]
            new = [Message("user", "and now?")]
            longer = [
                outcome(lambda c=c, h=history, s=seen, n=new: c.extend(h, s, StopReason.LENGTH, n).tokens.tolist())
                for c in (one, two)
            ]
            assert longer[0] == longer[1]


@pytest.mark.filterwarnings("ignore:.*token.s. of a prompt are")
@pytest.mark.parametrize("alphabet", ["ascii", "bytes", "0123456789+= "])
def test_a_tiny_tokenizer(alphabet: str, tmp_path: Path) -> None:
    full = tiny_tokenizer(alphabet)
    assert_equal(fast_tiny_tokenizer(alphabet), full, [None, FEATURES])
    full.save_pretrained(tmp_path)
    saved = saved_tokenizer(tmp_path)
    assert saved is not None
    assert_equal(saved, full, [None, FEATURES])


@pytest.mark.filterwarnings("ignore:.*no pad token")
@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "gpt2"])
def test_a_directory_with_byte_level_bpe(model_type: str | None, tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path, model_type)
    saved = saved_tokenizer(directory)
    assert saved is not None
    assert_equal(saved, hf_tokenizer(directory), [None, TEMPLATE])


def test_tools_and_messages_reach_the_template(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "description": "<é>", "parameters": {}}}]
    fast, full = saved_tokenizer(directory), hf_tokenizer(directory, correct_pad_token=False)
    assert fast is not None
    messages = [{"role": "user", "content": "1+1", "name": None}]
    text = fast.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    assert text == full.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '"<é>"' in text
    for empty in (fast, full):
        with pytest.raises(ValueError, match="at least one message"):
            empty.apply_chat_template([], tokenize=False)


@pytest.mark.parametrize(
    ("model_type", "files"),
    [
        ("qwen2", {}),
        ("mistral", {}),
        *((None, {"tokenizer_config.json": config}) for config in UNLIKE),
        (None, {"added_tokens.json": {"<x>": 500}}),
        (None, {"special_tokens_map.json": {"eos_token": "<|user|>"}}),
        (None, {"tokenizer.json": {"padding": PADDING}}),
    ],
)
def test_what_only_transformers_loads(model_type: str | None, files: dict[str, Any], tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path, model_type)
    for name, content in files.items():
        path = directory / name
        saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps({**saved, **content}), encoding="utf-8")
    assert saved_tokenizer(directory) is None


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    fast = fast_tiny_tokenizer("bytes")
    for template, error in (
        ("{% set a = namespace(_x=1) %}", SecurityError),
        ("{% set a = namespace() %}{% set a._x = 1 %}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ dict.__class__.__mro__ }}", SecurityError),
        ("{{ raise_exception('no') }}", TemplateError),
    ):
        with pytest.raises(error):
            fast.apply_chat_template([{"role": "user", "content": ""}], chat_template=template)
