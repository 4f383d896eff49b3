"""Conversations to tokens and back. What the policy sampled is never encoded again.

A second turn is a *bridge*: the template renders the conversation with a marker in place of the completion, and only
the text after the marker is encoded and appended to the tokens as they were sampled. So

- a completion whose text does not encode back to its tokens (broken UTF-8, unusual merges, special tokens) is kept;
- a template that drops earlier reasoning from the history has no effect: the policy goes on seeing what it sampled;
- a template that rewrites other roles' messages when the conversation grows (moves the system prompt, for example) is
  an error that shows where the two texts differ.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from trivium.errors import DataError
from trivium.text.tools import described, split_tools
from trivium.types import IntArray, Message, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHED_CHARACTERS = 16_384
"""Longer conversations are rendered anew each time: thousands of them would take up too much memory."""

_EARLIER_COMPLETION = "reply"
"""Replaces earlier completions when two renderings are compared: only the other text is compared."""


class ChatRenderer:
    """Renderer over a tokenizer's chat template (`trivium.protocols.Renderer`).

    `chat_template` (Jinja text) replaces the tokenizer's own. The template decides on roles and default system
    prompts; what it refuses is a DataError. Tools (`trivium.text.tools`) reach it as its `tools`. Special tokens
    written out in a message's text become special tokens, as in every engine that renders chat templates.
    """

    eos_token_ids: frozenset[int]
    """Tokens that end a turn: the tokenizer's end of sequence, the template's end of turn, and what the
    generation_config.json beside the tokenizer lists."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        if chat_template is None and tokenizer.chat_template is None:
            raise DataError(
                f"a chat template for {tokenizer.name_or_path or 'the tokenizer'}",
                "the tokenizer has none (a base model?)",
                "save chat_template.jinja in the model directory, or set model.chat_template "
                "(for texts without roles: plain)",
            )
        self._tokenizer, self._template = tokenizer, chat_template
        self._knows_tools = "tools" in str(chat_template or tokenizer.chat_template)
        self._end_of_turn = self._find_end_of_turn()
        eos = _eos(tokenizer)
        own = {self._end_of_turn} if eos is None else {self._end_of_turn, eos}
        self.eos_token_ids = frozenset(own | _generation_eos(tokenizer.name_or_path))
        # The members of a group start from one conversation; rendering it costs more than sampling a token of it.
        self._rendered = lru_cache(maxsize=4096)(self._render)

    def render(self, messages: Sequence[Message]) -> IntArray:
        """The prompt tokens of a conversation, ending at the assistant's next turn. Read-only."""
        conversation = tuple(messages)
        short = sum(len(message.content) for message in conversation) <= _CACHED_CHARACTERS
        return self._rendered(conversation) if short else self._render(conversation)

    def _render(self, messages: tuple[Message, ...]) -> IntArray:
        tokens = self._encode(self._text(messages, generation=True))
        if not len(tokens):
            raise DataError(
                "a prompt of at least one token",
                "an empty text",
                "give the task a prompt, or a template that starts with a token (BOS)",
            )
        tokens.flags.writeable = False
        return tokens

    def extend(
        self, history: Sequence[Message], tokens: IntArray, stop_reason: StopReason, new: Sequence[Message]
    ) -> IntArray:
        """`tokens` as they were, then what closes the completion (unless it was sampled), `new`, and the next opening.

        Raises DataError where the template rewrites the earlier conversation.
        """
        bridge = self._encode(self._bridge(history, new))
        if stop_reason is StopReason.EOS:
            bridge = self._without_sampled_end(bridge, int(tokens[-1]))
        return np.concatenate([np.asarray(tokens, np.int32), bridge])

    def decode(self, tokens: Sequence[int] | IntArray) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text = self._tokenizer.decode(
            np.asarray(tokens, np.int64).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def expert(self, messages: Sequence[Message], completion: str) -> tuple[IntArray, IntArray]:
        """(prompt tokens, completion tokens with end of turn) of text that the policy did not sample."""
        return self.render(messages), np.append(self._encode(completion), np.int32(self._end_of_turn))

    def _bridge(self, history: Sequence[Message], new: Sequence[Message]) -> str:
        """The text between the last completion of `history` and the next one."""
        if not history or history[-1].role != "assistant":
            raise DataError(
                "extend a conversation",
                "its last message is not the assistant's",
                "pass the history up to and including the sampled completion",
            )
        marker = _unused_marker([*history, *new])
        earlier = [_with_content(m, _EARLIER_COMPLETION) if m.role == "assistant" else m for m in history[:-1]]
        seen = self._text(earlier, generation=True)
        now = self._text([*earlier, Message("assistant", marker), *new], generation=True)
        before, _, bridge = now.partition(marker)
        if now.count(marker) != 1:
            raise DataError(
                "a chat template that renders each completion once",
                f"it renders the last one {now.count(marker)} times when the conversation goes on",
                "use another template for multi-turn tasks",
            )
        if not (seen.startswith(before) or before.startswith(seen)):
            raise DataError(*_divergence(seen, before))
        return bridge

    def _without_sampled_end(self, bridge: IntArray, sampled: int) -> IntArray:
        """The bridge without the end of turn that the policy sampled itself (and white space before it)."""
        at = np.flatnonzero(bridge == sampled)
        if len(at) and not str(self._tokenizer.decode(bridge[: at[0]].tolist())).strip():
            return bridge[at[0] + 1 :]
        return bridge

    def _text(self, messages: Sequence[Message], *, generation: bool) -> str:
        """The conversation as the template writes it; `generation` opens the assistant's next turn."""
        if any(message.media for message in messages):
            raise DataError(
                "render a message with images or sound",
                "this renderer knows text only",
                "leave `media` out of the task, or choose a renderer for the model's modality",
            )
        tools, messages = split_tools(messages)
        if tools and not self._knows_tools:
            tools, messages = [], described(tools, messages)
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=tools or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except TemplateError as error:
            raise DataError(
                f"render a conversation of roles {[message.role for message in messages]}",
                f"the chat template refuses it: {error}",
                "give tasks and environments the roles, in the order, that the model was trained on",
            ) from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> IntArray:
        ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        tokens = np.asarray(ids, np.int32)
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and (count := int((tokens == unknown).sum())):
            warnings.warn(
                f"{count} token(s) of a prompt are {self._tokenizer.unk_token}: the policy cannot see what stands "
                "there (a tiny model with `alphabet: bytes` can read any text)",
                stacklevel=3,
            )
        return tokens

    def _find_end_of_turn(self) -> int:
        """The special token that the template writes after a completion; else the tokenizer's end of sequence."""
        marker = _unused_marker(())
        text = self._text([Message("user", "question"), Message("assistant", marker)], generation=False)
        closing = self._encode(text.partition(marker)[2])
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        token = next((int(i) for i in closing if int(i) in special), _eos(self._tokenizer))
        if token is None:
            raise DataError(
                f"know what ends a turn of {self._tokenizer.name_or_path or 'the tokenizer'}",
                "its template writes no special token after a completion, and it has no end-of-sequence token",
                "set tokenizer.eos_token",
            )
        return token


def _with_content(message: Message, content: str) -> Message:
    return Message(message.role, content, message.media)


def _unused_marker(messages: Sequence[Message]) -> str:
    """A word that no message contains and no template alters."""
    number = 0
    while any(f"sampledreply{number}" in message.content for message in messages):
        number += 1
    return f"sampledreply{number}"


def _divergence(seen: str, now: str) -> tuple[str, str, str]:
    at = next(i for i, (a, b) in enumerate(zip(seen, now, strict=False)) if a != b)
    return (
        "a chat template whose text only grows when the conversation goes on",
        f"from character {at} it reads {now[at : at + 40]!r} where the policy had seen {seen[at : at + 40]!r}",
        "use a template that leaves earlier messages alone, or make the task single-turn",
    )


def _eos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    token = tokenizer.eos_token_id
    assert token is None or isinstance(token, int)
    return token


def _generation_eos(name_or_path: str) -> set[int]:
    """What generation_config.json in the tokenizer's own directory calls end of sequence."""
    path = Path(name_or_path) / "generation_config.json"
    if not name_or_path or not path.is_file():
        return set()
    tokens = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return set() if tokens is None else {tokens} if isinstance(tokens, int) else set(tokens)
