"""Chat templates and tokenizers of public models: the table of docs/chat-templates.md, and random conversations."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import chat_matrix
import fetch_chats
import numpy as np
import pytest
from chat_matrix import SCHEMAS, TOLD, UNICODE, Subject, check_shown

from trivium.foundation.errors import DataError, TemplateRefusal
from trivium.text.renderer import ChatRenderer
from trivium.text.tools import attempted_calls
from trivium.types import IMAGE, Media, Message, Prompt, StopReason, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("chats")]

COMMITTED: dict[str, Any] = json.loads(chat_matrix.OUTCOMES.read_text(encoding="utf-8"))
NUM_CONVERSATIONS = 200
PICTURE = Media("image/png", b"no picture")
WORDS = [*UNICODE.split(), "plain", "two words", "a\nline", '"quoted"', "<b>", "{{ braces }}", "\\", "ﷺ", "Å"]


@pytest.fixture(scope="module")
def subjects(chats: None) -> dict[str, Subject]:
    return {subject.name: subject for subject in chat_matrix.subjects()}


def test_the_table_has_every_template(subjects: dict[str, Subject]) -> None:
    assert [*COMMITTED] == [*subjects]


@pytest.mark.parametrize("name", COMMITTED)
def test_each_cell_is_what_the_page_says(name: str, subjects: dict[str, Subject]) -> None:
    """Measuring raises `Silent` for a message that is lost without an error, and for a sampled token that changes."""
    row = json.loads(json.dumps(chat_matrix.row(subjects[name])))
    assert row == COMMITTED[name], "run `python tools/chat_matrix.py` and `make docs`"
    assert {cell[0] for cell in row["cells"].values()} <= {"exact", "kept", "mapped", "refused", "none"}


@pytest.mark.parametrize("name", fetch_chats.TOKENIZERS)
def test_random_conversations_keep_what_the_policy_wrote(name: str, subjects: dict[str, Subject]) -> None:
    renderer = subjects[f"{name} (tokenizer)"].renderer()
    mapped = subjects[f"{name} (tokenizer)"].renderer({"tool": "user"})
    size = len(renderer.vocabulary)
    outcomes: Counter[str] = Counter()
    for number in range(NUM_CONVERSATIONS):
        rng = np.random.default_rng([number, len(name)])
        outcomes[converse(mapped if number % 2 else renderer, size, rng)] += 1
    assert outcomes["rendered"] >= NUM_CONVERSATIONS // 4, outcomes
    assert outcomes["refused"] > 0, outcomes


def converse(renderer: ChatRenderer, size: int, rng: np.random.Generator) -> str:
    """A conversation of random roles and texts, with sampled completions of a vocabulary of `size` tokens. Any refusal
    ends it."""
    history = opening(rng)
    try:
        prompt = renderer.render(history)
    except (DataError, TemplateRefusal):
        return "refused"
    check_shown(renderer, prompt.tokens, history)
    for _ in range(int(rng.integers(1, 5))):
        tokens, stop = completion(renderer, size, rng)
        seen = prompt.then(Prompt(np.asarray(tokens, np.int32)))
        text = renderer.decode(tokens)
        calls, _ = attempted_calls(text, SCHEMAS if history[0].role == "tools" else {}, renderer.tool_format)
        history.append(Message("assistant", text))
        new = following(rng, len(calls))
        try:
            prompt = renderer.extend(history, seen, stop, new)
        except (DataError, TemplateRefusal):
            return "refused later"
        assert prompt.tokens[: len(seen)].tolist() == seen.tokens.tolist()
        check_shown(renderer, prompt.tokens[len(seen) :], new)
        history += new
    return "rendered"


def opening(rng: np.random.Generator) -> list[Message]:
    messages = [TOLD] if rng.random() < 0.5 else []
    if rng.random() < 0.4:
        messages.append(Message(str(rng.choice(["system", "developer"])), text_of(rng)))
    for _ in range(1 + (rng.random() < 0.1)):
        messages.append(Message("user", text_of(rng)))
    if rng.random() < 0.05:
        messages.append(Message("user", f"{IMAGE} {text_of(rng)}", (PICTURE,)))  # these renderers read text alone
    return messages


def completion(renderer: ChatRenderer, size: int, rng: np.random.Generator) -> tuple[list[int], StopReason]:
    """Text, reasoning, calls, or any tokens of the vocabulary, with or without an end."""
    begin, end = renderer.tool_format.reasoning
    kind = rng.choice(["text", "reasoning", "calls", "tokens"])
    texts = {"text": text_of(rng), "reasoning": f"{begin}{text_of(rng)}{end}{text_of(rng)}"}
    if kind == "calls":
        calls = [ToolCall("weather", json.dumps({"city": text_of(rng)})) for _ in range(int(rng.integers(1, 3)))]
        texts["calls"] = renderer.tool_format.write(calls)
    tokens = rng.integers(0, size, 8).tolist() if kind == "tokens" else renderer.read(texts[str(kind)]).tokens.tolist()
    if rng.random() < 0.2:
        return tokens, StopReason.LENGTH
    return [*tokens, int(rng.choice(sorted(renderer.eos_token_ids)))], StopReason.EOS


def following(rng: np.random.Generator, num_calls: int) -> list[Message]:
    """Results of the calls, or another turn of the user; sometimes a role that does not fit here."""
    if rng.random() < 0.1:
        return [Message(str(rng.choice(["tool", "system", "developer", "critic"])), text_of(rng))]
    results = [Message("tool", text_of(rng), name="weather") for _ in range(num_calls)]
    return results if results and rng.random() < 0.8 else [*results, Message("user", text_of(rng))]


def text_of(rng: np.random.Generator) -> str:
    """Words of several scripts with a number, which no other text has."""
    return " ".join([*map(str, rng.choice(WORDS, 3)), str(rng.integers(10**9, 10**10))])
