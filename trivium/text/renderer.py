"""Converts conversations to tokens and back. Sampled completions are never encoded again.

The template writes one placeholder for each image, which expands to the number of tokens that the model needs.

A second turn is a *bridge*: the template renders the conversation with a marker in place of the completion, and only
the text after the marker is encoded and appended to the sampled tokens. Therefore

- a completion whose text does not encode back to its tokens (broken UTF-8, unusual merges, special tokens) keeps its
  tokens;
- a template that drops earlier reasoning from the history has no effect: the policy continues to see its own tokens;
- a template that rewrites other roles' messages when the conversation grows (moves the system prompt, for example)
  raises an error that shows where the two texts differ.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, cast

import numpy as np

from trivium.errors import DataError
from trivium.models.vision.images import MAX_PIXELS, Images, images_of
from trivium.text.fast_tokenizer import FastTokenizer
from trivium.text.tokenizer import hf_tokenizer
from trivium.text.tool_formats import format_of
from trivium.text.tools import described, split_tools
from trivium.types import IMAGE, IntArray, Media, Message, Prompt, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyTokenizer = Union["PreTrainedTokenizerBase", FastTokenizer]

_SHORT, _LONG = 512, 16_384
"""Limits of a conversation in characters, for the cache of prompts. 16,384 prompts of short conversations are cached,
since tasks return in every epoch. 4,096 longer ones, or ones with images, are cached for the members of their groups.
Conversations beyond both limits are not cached, to save memory."""

_EARLIER_COMPLETION = "reply"
"""Replaces earlier completions in the comparison of two renderings."""


class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer.

    `chat_template` (Jinja text) replaces the tokenizer's own. The template defines roles and default system prompts; a
    conversation that it refuses raises DataError. It receives tools (`trivium.text.tools`) as `tools`. Special tokens
    in a message's text become special tokens, as in every engine that renders chat templates; those of media are
    refused.

    `images` describes how the model reads images; None: it reads only text. `tool_calls` names the format of calls of
    tools (`trivium.text.tool_formats`).
    """

    eos_token_ids: frozenset[int]
    """Tokens that end a turn: the tokenizer's end of sequence, the template's end of turn, and what the
    generation_config.json beside the tokenizer lists."""

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        *,
        chat_template: str | None = None,
        images: Images | None = None,
        tool_calls: str = "auto",
    ) -> None:
        if chat_template is None and images is not None:
            chat_template = images.chat_template
        if chat_template is None and tokenizer.chat_template is None:
            raise DataError(
                f"a chat template for {tokenizer.name_or_path or 'the tokenizer'}",
                "the tokenizer has none (a base model?)",
                "save chat_template.jinja in the model directory, or set model.chat_template "
                "(for texts without roles: plain)",
            )
        self._tokenizer, self._template, self._images = tokenizer, chat_template, images
        self._decode, self._ids_of = _decode_of(tokenizer), _encode_of(tokenizer)
        self._by_parts = images is not None and self._takes_parts()
        self._knows_tools = "tools" in str(chat_template or tokenizer.chat_template)
        self.tool_format = format_of(str(chat_template or tokenizer.chat_template), tool_calls)
        self._end_of_turn = self._find_end_of_turn()
        eos = _eos(tokenizer)
        own = {self._end_of_turn} if eos is None else {self._end_of_turn, eos}
        marks = {
            int(tokenizer.convert_tokens_to_ids(mark)): mark  # pyright: ignore[reportArgumentType]
            for mark in self.tool_format.marks
            if mark in tokenizer.all_special_tokens
        }
        ends = own | _generation_eos(tokenizer.name_or_path)
        # GPT-OSS ends each message of a turn with the token that ends a completion in a history.
        self.eos_token_ids = frozenset(ends - marks.keys() or ends)
        self._marks = {token: mark for token, mark in marks.items() if token not in self.eos_token_ids}
        """The special tokens that mark calls of tools."""
        # The members of a group share a conversation, and rendering it costs more than sampling a token.
        self._rendered_short = lru_cache(maxsize=16_384)(self._render)
        self._rendered_long = lru_cache(maxsize=4096)(self._render)
        self._known_bridge = lru_cache(maxsize=4096)(self._bridge)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The number of each token of the tokenizer."""
        return self._tokenizer.get_vocab()

    def render(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a conversation, up to the opening of the assistant's next turn.

        Raises DataError if the template refuses the conversation, and for an image that cannot be read.
        """
        conversation = tuple(messages)
        size = sum(len(message.content) for message in conversation)
        if size <= _SHORT and not any(message.media for message in conversation):
            return self._rendered_short(conversation)
        return self._rendered_long(conversation) if size <= _LONG else self._render(conversation)

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, ending at the assistant's next turn: one placeholder for each image.

        Raises DataError if the template refuses the conversation.
        """
        return self._text(messages, generation=True)

    def _render(self, messages: tuple[Message, ...]) -> Prompt:
        prompt = self._expanded(self._encode(self.text(messages)), _media_of(messages))
        if not len(prompt):
            raise DataError(
                "a prompt of at least one token",
                "an empty text",
                "give the task a prompt, or a template that starts with a token (BOS)",
            )
        return prompt

    def extend(
        self, history: Sequence[Message], seen: Prompt, stop_reason: StopReason, new: Sequence[Message]
    ) -> Prompt:
        """Returns `seen` unchanged, then the end of the completion (unless it was sampled), `new`, and the next
        opening.

        Raises DataError if the template rewrites the earlier conversation, and for an image that cannot be read.
        """
        if not history or history[-1].role != "assistant":
            raise DataError(
                "extend a conversation",
                "its last message is not the assistant's",
                "pass the history up to and including the sampled completion",
            )
        earlier = tuple(_with_content(m, _EARLIER_COMPLETION) if m.role == "assistant" else m for m in history[:-1])
        messages = (*earlier, *new)
        known = sum(len(m.content) for m in messages) <= _LONG and not any(m.media for m in messages)
        bridge = (self._known_bridge if known else self._bridge)(earlier, tuple(new))
        if stop_reason is StopReason.EOS:
            bridge = self._without_sampled_end(bridge, int(seen.tokens[-1]))
        return seen.then(self._expanded(bridge, _media_of(new)))

    def decode(self, tokens: Sequence[int] | IntArray) -> str:
        """Text without special tokens, apart from those that mark calls of tools; invalid UTF-8 becomes U+FFFD."""
        ids = np.asarray(tokens, np.int64).tolist()
        marks = [at for at, token in enumerate(ids) if token in self._marks] if self._marks else []
        parts = [
            self._decoded(ids[start + 1 : end]) + (self._marks[ids[end]] if end < len(ids) else "")
            for start, end in pairwise([-1, *marks, len(ids)])
        ]
        return "".join(parts)

    def _decoded(self, ids: list[int]) -> str:
        text = self._decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def read(self, text: str, media: Sequence[Media] = ()) -> Prompt:
        """The prompt of a rendered text, special tokens included. An image may have one placeholder or one for each of
        its tokens. Raises DataError if the number of images differs from that of `media`."""
        if self._images is not None:
            placeholder = re.escape(self._images.token)
            text = re.sub(f"(?:{placeholder})+", lambda match: self._images.token if self._images else "", text)
        prompt = self._expanded(self._encode(text), media)
        if not media:
            self.check_placeholders(prompt.tokens)
        return prompt

    def check_placeholders(self, tokens: IntArray) -> None:
        """Raises DataError if the tokens of a text without images contain a placeholder of an image."""
        if self._images is not None and (tokens == self._images.token_id).any():
            found = f"{self._images.token!r} is in the text, and there is no image"
            raise DataError("a rendered text with its images", found, "send the images with the text")

    def expert(self, messages: Sequence[Message], completion: str) -> tuple[Prompt, IntArray]:
        """Encodes a completion that the policy did not sample. Returns (prompt, completion tokens with end of turn)."""
        self._check_media([Message("assistant", completion)])
        return self.render(messages), np.append(self._encode(completion), np.int32(self._end_of_turn))

    def _bridge(self, earlier: tuple[Message, ...], new: tuple[Message, ...]) -> IntArray:
        """The tokens between a completion and the next one. They depend on no completion: `earlier` are the messages
        before it, with others in their places."""
        marker = _unused_marker([*earlier, *new])
        seen = self._text(earlier, generation=True)
        now = self._text([*earlier, Message("assistant", marker), *new], generation=True)
        before, _, bridge = now.partition(marker)
        if now.count(marker) != 1:
            raise DataError(
                "a chat template that renders each completion once",
                f"it renders the last completion {now.count(marker)} times when the conversation continues",
                "use another template for multi-turn tasks",
            )
        # Either may be longer: a template may open a block before a completion, or write one only into the history.
        if not (seen.startswith(before) or before.startswith(seen)):
            raise DataError(*_divergence(seen, before))
        return self._encode(bridge)

    def _without_sampled_end(self, bridge: IntArray, sampled: int) -> IntArray:
        """The bridge without the end of turn that the policy sampled itself (and white space before it)."""
        at = np.flatnonzero(bridge == sampled)
        if len(at) and not str(self._tokenizer.decode(bridge[: at[0]].tolist())).strip():
            return bridge[at[0] + 1 :]
        return bridge

    def _text(self, messages: Sequence[Message], *, generation: bool) -> str:
        """Renders the conversation with the template; `generation` opens the assistant's next turn."""
        self._check_media(messages)
        tools, messages = split_tools(messages)
        if tools and not self._knows_tools:
            instructions = self.tool_format.instructions()
            tools, messages = [], described(tools, messages, instructions, self._default_system)
        from jinja2 import TemplateError

        conversation = [{"role": message.role, "content": self._content(message)} for message in messages]
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

    @cached_property
    def _default_system(self) -> str:
        """The system message that the template writes into a conversation without one; empty if it writes none.

        Raises DataError if it writes no system message at all: what is described there would not reach the policy.
        """
        marker, question = _unused_marker(()), Message("user", "question")
        before, shown, after = self._text([Message("system", marker), question], generation=False).partition(marker)
        if not shown:
            raise DataError(
                "tools described in the system message, since the chat template does not name them",
                "the template drops the system message",
                "set model.chat_template to one that writes tools or system messages",
            )
        text = self._text([question], generation=False)
        is_default = text.startswith(before) and text.endswith(after)
        return text[len(before) : len(text) - len(after)] if is_default else ""

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        """The content of a message for the template: a list of parts if the template supports it and the model reads
        images."""
        if not self._by_parts:
            return message.content
        texts = parts_of(message)
        content: list[dict[str, str]] = []
        for number, text in enumerate(texts):
            content += [{"type": "image"}] if number else []
            content += [{"type": "text", "text": text}] if text else []
        return content or [{"type": "text", "text": ""}]

    def _takes_parts(self) -> bool:
        """Whether the template supports content that is a list of parts; a template for text prints the list."""
        from jinja2 import TemplateError

        marker = _unused_marker(())
        conversation = [{"role": "user", "content": [{"type": "text", "text": marker}]}]
        try:
            text = self._tokenizer.apply_chat_template(conversation, chat_template=self._template, tokenize=False)
        except (TemplateError, TypeError):  # the template joins text and a list
            return False
        return marker in str(text) and "'text'" not in str(text)

    def _check_media(self, messages: Sequence[Message]) -> None:
        """Refuses media that the model cannot read, and texts that contain placeholders of media."""
        if not self._by_parts and any(message.media for message in messages):
            raise DataError(
                "render a message with images or sound",
                "this model reads text only" if self._images is None else "the chat template writes text only",
                "leave `media` out of the task, or choose a vision-language model and its own chat template",
            )
        if self._images is None:
            return
        for message in messages:
            texts = parts_of(message)
            for placeholder in self._images.placeholders:
                if any(placeholder in text for text in texts):
                    raise DataError(
                        f"a message of the role {message.role!r} whose text names no media",
                        f"{placeholder!r} is in the text, and this model reads it as media",
                        "remove it from the text (an image is in `media`, and `<image>` marks its place)",
                    )

    def _expanded(self, tokens: IntArray, media: Sequence[Media]) -> Prompt:
        """Expands the placeholders in `tokens`, one for each of `media`, to a prompt."""
        if self._images is None or not media:
            return Prompt(tokens)
        places = np.flatnonzero(tokens == self._images.token_id)
        if len(places) != len(media):
            raise DataError(
                f"a chat template that writes {self._images.token} once for each image",
                f"it does so {len(places)} times for {len(media)} image(s)",
                "use the chat template of the model's processor",
            )
        pieces: list[IntArray] = []
        spans: list[Media] = []
        length = done = 0
        for place, item in zip(places.tolist(), media, strict=True):
            image = self._images.read(item).tokens
            pieces += [tokens[done:place], image]
            length += place - done + len(image)
            spans.append(item.at(length - len(image), length))
            done = place + 1
        return Prompt(np.concatenate([*pieces, tokens[done:]]), tuple(spans), tokens)

    def _encode(self, text: str) -> IntArray:
        """The tokens of a text, without added special tokens. Warns about characters that the model cannot read."""
        tokens = np.asarray(self._ids_of(text), np.int32)
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and (count := int((tokens == unknown).sum())):
            warnings.warn(
                f"{count} token(s) of a prompt are {self._tokenizer.unk_token}: the policy cannot read these "
                f"characters (a tiny model with `alphabet: bytes` can read any text)",
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
                f"the end of a turn of {self._tokenizer.name_or_path or 'the tokenizer'}",
                "its template writes no special token after a completion, and it has no end-of-sequence token",
                "set tokenizer.eos_token",
            )
        return token


def renderer_of(model_dir: str | Path, *, max_image_pixels: int = MAX_PIXELS, tool_calls: str = "auto") -> ChatRenderer:
    """The renderer of the model in a directory, with images if the model reads them."""
    images = images_of(model_dir, max_pixels=max_image_pixels)
    return ChatRenderer(hf_tokenizer(model_dir, correct_pad_token=False), images=images, tool_calls=tool_calls)


def parts_of(message: Message) -> list[str]:
    """The texts before, between and after the media of a message: one more than the number of media.

    Raises DataError if its text marks a different number of images.
    """
    if not message.media:
        return [message.content]
    texts = message.content.split(IMAGE)
    if len(texts) == 1:
        return [*[""] * len(message.media), message.content]
    if len(texts) != len(message.media) + 1:
        raise DataError(
            f"a message with one {IMAGE} for each image",
            f"{len(texts) - 1} in {message.content!r:.80}, and {len(message.media)} image(s)",
            f"mark the place of each image with {IMAGE}, or of none (they precede the text)",
        )
    return texts


def _media_of(messages: Sequence[Message]) -> list[Media]:
    return [item for message in messages for item in message.media]


def _with_content(message: Message, content: str) -> Message:
    return Message(message.role, content)


def _unused_marker(messages: Sequence[Message]) -> str:
    """A word that no message contains and that no template changes."""
    number = 0
    while any(f"sampledreply{number}" in message.content for message in messages):
        number += 1
    return f"sampledreply{number}"


def _divergence(seen: str, now: str) -> tuple[str, str, str]:
    """The parts of the error about the first place where two renderings differ."""
    at = next(i for i, (a, b) in enumerate(zip(seen, now, strict=False)) if a != b)
    return (
        "a chat template that only appends text when the conversation continues",
        f"from character {at} it reads {now[at : at + 40]!r} but the policy has seen {seen[at : at + 40]!r}",
        "use a template that does not change earlier messages, or make the task single-turn",
    )


def _eos(tokenizer: AnyTokenizer) -> int | None:
    token = tokenizer.eos_token_id
    assert token is None or isinstance(token, int)
    return token


def _decode_of(tokenizer: AnyTokenizer) -> Callable[..., object]:
    """Returns a function that decodes one sequence. Skips `decode` of the base class, which first checks every token to
    see whether it got a batch: that takes longer than decoding."""
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.decode
    from transformers import PreTrainedTokenizerBase

    plain = type(tokenizer).decode is PreTrainedTokenizerBase.decode
    return getattr(tokenizer, "_decode", tokenizer.decode) if plain else tokenizer.decode


def _encode_of(tokenizer: AnyTokenizer) -> Callable[[str], Sequence[int]]:
    """Returns a function that encodes one text without adding special tokens. Skips `__call__` of the base class, which
    prepares batches and takes five times as long for a short prompt."""
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.encode
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    def called(text: str) -> Sequence[int]:
        ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return cast(list[int], ids)

    def encoded(text: str) -> Sequence[int]:
        backend = fast.backend_tokenizer  # other callers may have changed its settings
        if backend.truncation or backend.padding or backend.encode_special_tokens:
            return called(text)
        return backend.encode(text, add_special_tokens=False).ids

    fast: Any = tokenizer
    own_call = type(tokenizer).__call__ is not PreTrainedTokenizerBase.__call__
    if own_call or getattr(type(tokenizer), "_encode_plus", None) is not PreTrainedTokenizerFast._encode_plus:
        return called
    return called if fast.split_special_tokens else encoded


def _generation_eos(name_or_path: str) -> set[int]:
    """The end-of-sequence tokens in generation_config.json of the tokenizer's directory."""
    path = Path(name_or_path) / "generation_config.json"
    if not name_or_path or not path.is_file():
        return set()
    tokens = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return set() if tokens is None else {tokens} if isinstance(tokens, int) else set(tokens)
