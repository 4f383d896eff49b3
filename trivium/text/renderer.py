"""Converts conversations to tokens and back. Sampled completions are never encoded again.

The template writes one placeholder for each image, which expands to the number of tokens that the model needs.

A second turn is a *bridge*: the template renders the conversation with a marker in place of the completion, and only
the text after the marker is encoded and appended to the sampled tokens. Therefore

- a completion whose text does not encode back to its tokens (broken UTF-8, unusual merges, special tokens) keeps its
  tokens;
- a template that drops earlier reasoning from the history has no effect: the policy continues to see its own tokens;
- a template that writes a past completion differently from the opening of the next one (an empty block of reasoning,
  for example) has no effect either: only the text before the completion is compared;
- a template that rewrites other roles' messages when the conversation grows (moves the system prompt, for example)
  raises an error that shows where the two texts differ.
"""

from __future__ import annotations

import json
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trivium.foundation.errors import DataError, TemplateRefusal
from trivium.models.vision.images import MAX_PIXELS, Images, images_of
from trivium.text.templates import ChatTemplate, parts_of
from trivium.text.tokenizer import hf_tokenizer
from trivium.text.tool_formats import UnknownFormat
from trivium.text.tools import TOOLS, ToolCall
from trivium.types import BoolArray, IntArray, Media, Message, Prompt, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHORT, _LONG = 512, 16_384
"""Limits of a conversation in characters, for the cache of prompts. 16,384 prompts of short conversations are cached,
since tasks return in every epoch. 4,096 longer ones, or ones with images, are cached for the members of their groups.
Conversations beyond both limits are not cached, to save memory."""

_EARLIER_COMPLETION = "earliercompletion"
"""Replaces earlier completions in the comparison of two renderings."""
_BEFORE = "\n"
"""A text before another one, of whose characters no token is made together with it."""


class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer.

    `chat_template` (Jinja text) replaces the tokenizer's own. The template defines roles and default system prompts; a
    conversation that it refuses, or of which it drops a message, raises DataError. It receives tools
    (`trivium.text.tools`) as `tools`. Special tokens in a message's text become special tokens, as in every engine that
    renders chat templates; those of media are refused.

    `images` describes how the model reads images; None: it reads only text. `tool_calls`, `roles` and `today` are those
    of `trivium.text.templates.ChatTemplate`.
    `strip_special_tokens` leaves special tokens out of decoded texts; so does a tokenizer_config.json with that entry.
    """

    eos_token_ids: frozenset[int]
    """Tokens that end a turn: the tokenizer's end of sequence, the template's end of turn, and what the
    generation_config.json beside the tokenizer lists."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        images: Images | None = None,
        tool_calls: str = "auto",
        roles: Mapping[str, str] | None = None,
        today: date | None = None,
        strip_special_tokens: bool = False,
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
        self._tokenizer, self._images = tokenizer, images
        self._decode, self._ids_of = _decode_of(tokenizer), _encode_of(tokenizer)
        self.template = ChatTemplate(
            tokenizer,
            chat_template,
            takes_images=images is not None,
            tool_calls=tool_calls,
            roles=roles,
            today=today,
        )
        self.tool_format = self.template.tool_format
        self._end_of_turn = self._find_end_of_turn()
        eos = _eos(tokenizer)
        turn_ends = {self._end_of_turn, *self._ends_of_calls(), *({eos} if eos is not None else ())}
        # `all_special_tokens` may list fewer tokens than `decode` leaves out: GPT-OSS's tokenizer lists four.
        added = {number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items()}
        marks = {token: added[token] for token in self._special if added[token] in self.tool_format.marks}
        ends = turn_ends | _generation_eos(tokenizer.name_or_path)
        # GPT-OSS ends each message of a turn with the token that ends a completion in a history.
        self.eos_token_ids = frozenset(ends - marks.keys() or ends)
        strip = strip_special_tokens or bool(tokenizer.init_kwargs.get("strip_special_tokens"))
        self._not_text = self._special_without_text(marks.keys(), strip=strip)
        """The special tokens that are no part of a completion's text."""
        # The members of a group share a conversation, and rendering it costs more than sampling a token.
        self._rendered_short = lru_cache(maxsize=16_384)(self._render)
        self._rendered_long = lru_cache(maxsize=4096)(self._render)
        self._known_bridge = lru_cache(maxsize=4096)(self._bridge)
        self._opened = lru_cache(maxsize=64)(self.text)  # both sides of a pair have one prompt

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
        self._check_media(messages)
        return self.template.text(messages, generation=True)

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
        earlier = tuple(self._in_place_of(history, place) for place in range(len(history) - 1))
        messages = (*earlier, *new)
        is_cached = sum(len(m.content) for m in messages) <= _LONG and not any(m.media for m in messages)
        bridge = (self._known_bridge if is_cached else self._bridge)(earlier, tuple(new))
        if stop_reason is StopReason.EOS:
            bridge = self._without_sampled_end(bridge, int(seen.tokens[-1]))
        return seen.then(self._expanded(bridge, _media_of(new)))

    def decode(self, tokens: Sequence[int] | IntArray) -> str:
        """Text without ends of turn, padding, the beginning of a sequence and placeholders of media. Other special
        tokens (`<think>`, marks of calls) are text, apart from those that mark no calls with `strip_special_tokens`.
        Invalid UTF-8 becomes U+FFFD."""
        ids = [token for token in np.asarray(tokens, np.int64).tolist() if token not in self._not_text]
        text = self._decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _special_without_text(self, marks: Collection[int], *, strip: bool) -> frozenset[int]:
        """The special tokens that `decode` leaves out; `marks` are those that mark calls of tools."""
        texts = {str(self._tokenizer.pad_token), str(self._tokenizer.bos_token)}
        texts |= self._images.placeholders if self._images is not None else set()
        special = ((int(n), token) for n, token in self._tokenizer.added_tokens_decoder.items() if token.special)
        without = {number for number, token in special if strip or token.content in texts}
        return self.eos_token_ids | (without - set(marks))

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

    def expert(self, messages: Sequence[Message], completion: str | Message) -> tuple[Prompt, IntArray]:
        """Encodes a completion that the policy did not sample. Returns (prompt, completion tokens with end of turn)."""
        last = Message("assistant", completion) if isinstance(completion, str) else completion
        return self._turns([*messages, last], since=len(messages))[-1]

    def supervised(self, messages: Sequence[Message]) -> list[tuple[Prompt, IntArray]]:
        """(prompt, tokens with end of turn) of each turn of the assistant in a conversation that the policy did not
        write, the last message being one. Each prompt begins with the earlier ones and their turns.

        The conversation is encoded as a whole, for a tokenizer may write the beginning of a text differently from its
        middle. A turn is what the template writes after its opening, or what `{% generation %}` encloses in the
        template. Raises DataError if the template rewrites earlier messages, or drops a part of the last turn.
        """
        return self._turns(messages)

    def _turns(self, messages: Sequence[Message], since: int = 0) -> list[tuple[Prompt, IntArray]]:
        """`supervised`, of the turns from the message `since` on."""
        self._check_media(messages)
        places = [place for place, message in enumerate(messages) if message.role == "assistant"]
        if not places or places[-1] != len(messages) - 1 or places[0] == 0:
            found = f"roles {[message.role for message in messages]}"
            raise DataError("a conversation that ends with the assistant's turn", found, "add a prompt and the turn")
        places = [place for place in places if place >= since]
        text = self.template.text(messages, generation=False)
        self._check_reasoning(messages[-1], text)
        tokens, ends = self._encode_with_ends(text)
        first = [bisect_right(ends, self._opening(messages[:place], text)) for place in places]
        marked = self.template.generated(messages, len(tokens))
        if marked is not None:
            spans = _enclosed(marked, first)
        else:
            spans = list[tuple[int, int]]()
            for place, start, limit in zip(places, first, first[1:], strict=False):
                alike = _num_shared(self.template.text(messages[: place + 1], generation=False), text)
                spans.append((start, self._end_of(tokens, start, limit, bisect_right(ends, alike))))
            spans.append((first[-1], self._end_of_last(tokens, first[-1])))
        media = _media_of(messages)
        turns = [(self._expanded(tokens[:start], media, partly=True), tokens[start:end]) for start, end in spans]
        prompt, last = turns[-1]
        if marked is None and not (len(last) and int(last[-1]) in self.eos_token_ids):
            content_end = len(text) - len(self._closing) if text.endswith(self._closing) else len(text)
            written = tokens[len(tokens) - len(last) : bisect_right(ends, content_end)]
            turns[-1] = prompt, np.append(written, np.int32(self._end_of_turn))
        return turns

    def check_turn(self, role: str) -> None:
        """Raises what `extend` would for a turn that begins with a message of this role, `user` or `tool`."""
        # GPT-OSS's template fails for a tool without a description.
        function = {"name": "tool", "description": "A tool.", "parameters": {"type": "object", "properties": {}}}
        tool = {"type": "function", "function": function}
        tools = [Message(TOOLS, json.dumps([tool]))] if role == "tool" else []
        new = [Message(role, text, name="tool" if tools else "") for text in (("one", "two") if tools else ("one",))]
        try:
            self._bridge((*tools, Message("user", "question")), tuple(new))
        except TemplateRefusal:
            if not tools:
                raise
            self._bridge((*tools, Message("user", "question")), tuple(new[:1]))  # a model of one call at a time

    def _opening(self, before: Sequence[Message], text: str) -> int:
        """The place in the text of a whole conversation where a turn of the assistant begins."""
        opened = self._opened(tuple(before))
        start = _num_shared(opened, text)
        if start < len(opened) and start < _num_shared(opened, self.template.text(before, generation=False)):
            raise TemplateRefusal(*_divergence(opened, text))
        return start

    def _end_of(self, tokens: IntArray, start: int, limit: int, changed: int) -> int:
        """The end of an earlier turn in the tokens of a conversation: after its first end of turn, or after what the
        template writes for it once the conversation continues, at `changed`."""
        end = next((place + 1 for place in range(start, limit) if int(tokens[place]) in self.eos_token_ids), None)
        if end is None and changed < limit and int(tokens[changed]) == self._end_in_history:
            end = changed + 1
        if end is None:
            raise DataError(
                "the end of an earlier turn of the assistant",
                "the chat template writes no token there that ends a turn",
                "learn from the last turn alone, or use a template that ends its turns",
            )
        return end

    def _end_of_last(self, tokens: IntArray, start: int) -> int:
        """The end of the last turn in the tokens of a conversation: after the first end of turn that nothing but white
        space follows."""
        end = len(tokens)
        while end > start and (int(tokens[end - 1]) in self._special or not self._shown(tokens[end - 1 : end])):
            end -= 1
        ends = (place + 1 for place in range(end, len(tokens)) if int(tokens[place]) in self.eos_token_ids)
        return next(ends, len(tokens))

    def _shown(self, tokens: IntArray) -> str:
        return str(self._tokenizer.decode(tokens.tolist())).strip()

    def _check_reasoning(self, turn: Message, text: str) -> None:
        if turn.reasoning is not None and turn.reasoning.strip() not in text:
            raise TemplateRefusal(
                "a row whose last turn has reasoning",
                "the chat template leaves the reasoning out",
                "write it into the content, or use a template that writes `reasoning_content`",
            )

    def _in_place_of(self, history: Sequence[Message], place: int) -> Message:
        """A message of a history, for a rendering that is only compared: a fixed text stands for what the policy wrote,
        whose tokens are known."""
        message = history[place]
        if message.role != "assistant":
            return message
        if self.template.results_need_calls and (results := _results(history[place + 1 :])):
            return self.template.calling(results, _EARLIER_COMPLETION)
        return Message("assistant", _EARLIER_COMPLETION)

    def _bridge(self, earlier: tuple[Message, ...], new: tuple[Message, ...]) -> IntArray:
        """The tokens between a completion and the next one. They depend on no completion: `earlier` are the messages
        before it, with others in their places."""
        marker, results = _unused_marker([*earlier, *new]), _results(new)
        calls = bool(results) and self.template.results_need_calls
        turn = self.template.calling(results, marker) if calls else Message("assistant", marker)
        prompt = self.template.text(earlier, generation=True, checked=False)  # of which `now` has all messages
        now = self.text([*earlier, turn, *new])
        before, _, bridge = now.rpartition(marker)
        if not calls and now.count(marker) != 1:
            raise TemplateRefusal(
                "a chat template that renders each completion once",
                f"it renders the last completion {now.count(marker)} times when the conversation continues",
                "use another template for multi-turn tasks",
            )
        # Either may be longer: a template may open a block before a completion, or write one only into the history.
        if not (prompt.startswith(before) or before.startswith(prompt)):
            self._check_same(earlier, prompt, before)
        tokens = self._encode_inside(bridge)
        if not calls:
            return tokens
        ends = np.flatnonzero(np.isin(tokens, list(self.eos_token_ids)))
        if not len(ends):
            raise TemplateRefusal(
                "a chat template that ends a turn with calls",
                "it writes no token there that ends a turn",
                "map the role of results with model.roles: {tool: user}",
            )
        return tokens[ends[0] :]

    def _check_same(self, earlier: Sequence[Message], prompt: str, now: str) -> None:
        """Raises TemplateRefusal if two renderings of a conversation differ outside of the assistant's turns, whose
        tokens are known."""
        for place in (*(n for n, message in enumerate(earlier) if message.role == "assistant"), len(earlier)):
            opened, closed = (self.template.text(earlier[:place], generation=opens) for opens in (True, False))
            texts = (prompt, now, closed[: _num_shared(opened, closed)])
            turns = closed.count(_EARLIER_COMPLETION)
            before, after, same = ("".join(text.split(_EARLIER_COMPLETION, turns)[turns:]) for text in texts)
            if _num_shared(before, after) < len(same):
                raise TemplateRefusal(*_divergence(prompt, now))

    def _without_sampled_end(self, bridge: IntArray, sampled: int) -> IntArray:
        """The bridge without the end of turn that the policy sampled itself (and white space before it), or what the
        template writes for it once the conversation continues."""
        for end in (sampled, *([self._end_in_history] if sampled == self._end_of_turn else [])):
            at = np.flatnonzero(bridge == end)
            if len(at) and not str(self._tokenizer.decode(bridge[: at[0]].tolist())).strip():
                return bridge[at[0] + 1 :]
        return bridge

    def _check_media(self, messages: Sequence[Message]) -> None:
        """Refuses media that the model cannot read, and texts that contain placeholders of media."""
        if not self.template.by_parts and any(message.media for message in messages):
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

    def _expanded(self, tokens: IntArray, media: Sequence[Media], *, partly: bool = False) -> Prompt:
        """Expands the placeholders in `tokens`, one for each of `media`, to a prompt; `partly`: for the first of
        them."""
        if self._images is None or not media:
            return Prompt(tokens)
        places = np.flatnonzero(tokens == self._images.token_id)
        media = media[: len(places)] if partly else media
        if len(places) != len(media):
            raise DataError(
                f"a chat template that writes {self._images.token} once for each image",
                f"it does so {len(places)} times for {len(media)} image(s)",
                "use the chat template of the model's processor",
            )
        pieces: list[IntArray] = []
        spans: list[Media] = []
        length = copied = 0
        for place, item in zip(places.tolist(), media, strict=True):
            image = self._images.read(item).tokens
            pieces += [tokens[copied:place], image]
            length += place - copied + len(image)
            spans.append(item.at(length - len(image), length))
            copied = place + 1
        return Prompt(np.concatenate([*pieces, tokens[copied:]]), tuple(spans), tokens)

    def _encode(self, text: str) -> IntArray:
        """The tokens of a text, without added special tokens. Warns about characters that the model cannot read."""
        return self._checked(self._ids_of(text))

    def _checked(self, ids: Sequence[int]) -> IntArray:
        tokens = np.asarray(ids, np.int32)
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and (count := int((tokens == unknown).sum())):
            warnings.warn(
                f"{count} token(s) of a prompt are {self._tokenizer.unk_token}: the policy cannot read these "
                f"characters (a tiny model with `alphabet: bytes` can read any text)",
                stacklevel=4,
            )
        return tokens

    def _encode_inside(self, text: str) -> IntArray:
        """The tokens of a text that others precede. SentencePiece writes a space before the first text."""
        if not self._prefixes:
            return self._encode(text)
        tokens, ends = self._encode_with_ends(_BEFORE + text)
        return tokens[bisect_right(ends, len(_BEFORE)) :]

    @cached_property
    def _prefixes(self) -> bool:
        """Whether the tokenizer writes the beginning of a text differently from its middle."""
        alone, inside = ([*self._ids_of(text)] for text in ("a", _BEFORE + "a"))
        return alone[:1] != inside[-1:]

    def _encode_with_ends(self, text: str) -> tuple[IntArray, list[int]]:
        """(the tokens of a text, the place after the last character of each)."""
        backend: Any = _backend_of(self._tokenizer)
        if backend is None:  # a tokenizer in Python: the ends of the texts of its tokens
            tokens = self._encode(text)
            return tokens, [len(str(self._tokenizer.decode(tokens[: n + 1].tolist()))) for n in range(len(tokens))]
        if _is_set(backend):
            encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)  # pyright: ignore
            return self._checked(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]
        encoded = backend.encode(text, add_special_tokens=False)
        return self._checked(encoded.ids), [end for _, end in encoded.offsets]

    def _find_end_of_turn(self) -> int:
        """The special token that the template writes after a completion; else the tokenizer's end of sequence."""
        closing = self._encode(self._closing)
        token = next((int(i) for i in closing if int(i) in self._special), _eos(self._tokenizer))
        if token is None:
            raise DataError(
                f"the end of a turn of {self._tokenizer.name_or_path or 'the tokenizer'}",
                "its template writes no special token after a completion, and it has no end-of-sequence token",
                "set tokenizer.eos_token",
            )
        return token

    @cached_property
    def _closing(self) -> str:
        """What the template writes after the last completion of a conversation."""
        marker = _unused_marker(())
        return _after(marker, self.template.tried([Message("user", "question"), Message("assistant", marker)]))

    @cached_property
    def _end_in_history(self) -> int | None:
        """The special token that the template writes after messages of other roles. GPT-OSS's ends earlier turns of the
        assistant with it, and the last one with another."""
        marker = _unused_marker(())
        closing = _after(marker, self.template.tried([Message("user", marker)]))
        return next((int(token) for token in self._encode(closing) if int(token) in self._special), None)

    def _ends_of_calls(self) -> set[int]:
        """The special token that the template writes after the calls of a turn, and that is no part of the calls."""
        if self.template.call_style is None or isinstance(self.tool_format, UnknownFormat):
            return set()
        marker, result = _unused_marker(()), Message("tool", "result")
        conversation = [Message("user", "question"), self.template.calling([result], marker), result]
        text = self.template.tried(conversation)
        text = text if marker in text else self.template.tried(conversation[:2])
        written = [*self.tool_format.marks, self.tool_format.write([ToolCall("f", "{}"), ToolCall("f", "{}")])]
        call_tokens = {token for part in written for token in self._ids_of(part)}
        closing = [int(token) for token in self._encode(_after(marker, text))]
        return {*[token for token in closing if token in self._special and token not in call_tokens][:1]}

    @cached_property
    def _special(self) -> set[int]:
        return {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}


def renderer_of(model_dir: str | Path, *, max_image_pixels: int = MAX_PIXELS, **options: Any) -> ChatRenderer:
    """The renderer of the model in a directory, with images if the model reads them, and further `options` of it."""
    images = images_of(model_dir, max_pixels=max_image_pixels)
    return ChatRenderer(hf_tokenizer(model_dir, correct_pad_token=False), images=images, **options)


def _media_of(messages: Sequence[Message]) -> list[Media]:
    return [item for message in messages for item in message.media]


def _enclosed(marked: BoolArray, first: Sequence[int]) -> list[tuple[int, int]]:
    """The span that `{% generation %}` encloses for each turn, with the openings of turns in `first`. The tag may
    enclose the opening as well: what it encloses belongs to the turn in which it ends."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False)).reshape(-1, 2)
    turns = np.searchsorted(first, edges[:, 1], "left") - 1
    owned = [(start, edges[turns == number]) for number, start in enumerate(first)]
    return [
        (int(turn_edges[0, 0]), int(turn_edges[-1, 1])) if len(turn_edges) else (start, start)
        for start, turn_edges in owned
    ]


def _results(messages: Sequence[Message]) -> Sequence[Message]:
    """The results of tools that the messages begin with."""
    return list(takewhile(lambda message: message.role == "tool", messages))


def _unused_marker(messages: Sequence[Message]) -> str:
    """A word that no message contains and that no template changes."""
    number = 0
    while any(f"sampledreply{number}" in message.content for message in messages):
        number += 1
    return f"sampledreply{number}"


def _after(marker: str, text: str) -> str:
    """The text after the last marker; empty without one."""
    return text.rpartition(marker)[2] if marker in text else ""


def _num_shared(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    shared, beyond = 0, min(len(one), len(other)) + 1
    while beyond - shared > 1:  # comparing slices takes a hundredth of the time of comparing characters in Python
        middle = (shared + beyond) // 2
        shared, beyond = (middle, beyond) if one[shared:middle] == other[shared:middle] else (shared, middle)
    return shared


def _divergence(prompt: str, now: str) -> tuple[str, str, str]:
    """The parts of the error about the first place where two renderings differ."""
    at = _num_shared(prompt, now)
    return (
        "a chat template that only appends text when the conversation continues",
        f"from character {at} it reads {now[at : at + 40]!r} but the policy has seen {prompt[at : at + 40]!r}",
        "use a template that does not change earlier messages, or make the task single-turn",
    )


def _eos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    token = tokenizer.eos_token_id
    assert token is None or isinstance(token, int)
    return token


def _decode_of(tokenizer: PreTrainedTokenizerBase) -> Callable[..., object]:
    """Returns a function that decodes one sequence. Skips `decode` of the base class, which first checks every token to
    see whether it got a batch: that takes longer than decoding."""
    from transformers import PreTrainedTokenizerBase

    plain = type(tokenizer).decode is PreTrainedTokenizerBase.decode
    return getattr(tokenizer, "_decode", tokenizer.decode) if plain else tokenizer.decode


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer of the `tokenizers` library, which knows the place of each token in a text; None without one."""
    return getattr(tokenizer, "backend_tokenizer", None)


def _is_set(backend: Any) -> bool:
    """Whether other callers have changed the settings of a tokenizer, so it cuts, pads or splits texts."""
    return bool(backend.truncation or backend.padding or backend.encode_special_tokens)


def _encode_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], Sequence[int]]:
    """Returns a function that encodes one text without adding special tokens. Skips `__call__` of the base class, which
    prepares batches and takes five times as long for a short prompt."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    def called(text: str) -> Sequence[int]:
        ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return cast(list[int], ids)

    def encoded(text: str) -> Sequence[int]:
        backend = fast.backend_tokenizer
        return called(text) if _is_set(backend) else backend.encode(text, add_special_tokens=False).ids

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
