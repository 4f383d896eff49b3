"""Special tokens in completions: which are text, and the switch that strips them."""

from __future__ import annotations

import numpy as np
import pytest

from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny import tiny_tokenizer
from trivium.text.tiny_vision import TinyVisionModel

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


def renderer(*more: str, **options) -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer("bytes", 512, more=[*TAGS, *more]), **options)


def ids(chat: ChatRenderer, text: str) -> list[int]:
    return chat.read(text).tokens.tolist()


WRITTEN = "<think>2 and 2 är 4.</think>\n<answer>4</answer>"


def test_special_tokens_are_text_apart_from_ends_padding_and_beginnings():
    chat = renderer()
    sampled = ids(chat, WRITTEN)
    assert len(sampled) < len(WRITTEN)  # the tags are tokens
    end, pad = ids(chat, "<|end|>"), ids(chat, "<|pad|>")
    assert chat.decode(sampled) == WRITTEN
    assert chat.decode([*sampled, *end]) == chat.decode([*sampled, *end, *pad, *pad]) == WRITTEN
    assert chat.decode(np.array([*sampled, *end])) == WRITTEN
    assert chat.decode(end) == chat.decode([]) == ""
    assert chat.decode(ids(chat, "a<|user|>b")) == "a<|user|>b"  # a role that the policy wrote itself
    assert chat.decode([0xC3, *ids(chat, "<think>")]) == "\ufffd<think>"


def test_stripped_special_tokens_are_no_text_apart_from_marks_of_calls():
    chat = renderer("[TOOL_CALLS]", strip_special_tokens=True, tool_calls="mistral")
    call = '[TOOL_CALLS][{"name": "add", "arguments": {}}]'
    assert chat.decode(ids(chat, f"{WRITTEN}{call}<|end|>")) == f"2 and 2 är 4.\n4{call}"
    kept = renderer("[TOOL_CALLS]", tool_calls="mistral")
    assert kept.decode(ids(kept, f"{WRITTEN}{call}<|end|>")) == WRITTEN + call


def test_a_beginning_of_sequence_is_no_text():
    tokenizer = tiny_tokenizer("bytes", 512, more=[*TAGS, "<|bos|>"])
    tokenizer.bos_token = "<|bos|>"
    chat = ChatRenderer(tokenizer)
    assert chat.decode(ids(chat, f"<|bos|>{WRITTEN}")) == WRITTEN


def test_placeholders_of_images_are_no_text(tmp_path):
    chat = renderer_of(TinyVisionModel(TinyVisionModel.Config(), seed=0).materialize(tmp_path / "model"))
    placeholder = next(iter(chat._images.placeholders))
    number = chat.vocabulary[placeholder]
    written = [*ids(chat, "a "), number, *ids(chat, "b")]
    assert chat.decode(written) == "a b"


@pytest.mark.parametrize("strip", [True, False])
def test_a_prompt_that_opens_a_block_with_a_special_token_is_seen_to_do_it(strip):
    chat = renderer(strip_special_tokens=strip)
    prompt_end = chat.decode(ids(chat, "<|user|>2+2<|end|><|assistant|><think>\n"))
    assert chat.tool_format.opens(prompt_end) is not strip
