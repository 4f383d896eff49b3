"""Rendering of prompts: the chat template of the config, and truncation to a maximum length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.tables import Settings
from trivium.models.backbone.huggingface import with_variables
from trivium.policy import PromptTooLong
from trivium.protocols import Renderer
from trivium.types import IntArray, Message, Prompt, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["left", "right", "middle"]


def cut(tokens: IntArray, longest: int, truncation: Truncation) -> IntArray:
    """Returns at most `longest` tokens. Drops the first ones (`left`), the last ones (`right`) or those in between."""
    if len(tokens) <= longest:
        return tokens
    match truncation:
        case "left":
            return tokens[-longest:]
        case "right":
            return tokens[:longest]
        case "middle":
            return np.concatenate([tokens[: longest // 2], tokens[len(tokens) - (longest - longest // 2) :]])


@dataclass
class CutRenderer:
    """Wraps a renderer, and cuts initial prompts that are longer than `longest` tokens."""

    renderer: Renderer
    longest: int
    truncation: Truncation
    eos_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.eos_token_ids = self.renderer.eos_token_ids

    def render(self, messages: Sequence[Message]) -> Prompt:
        """Returns the cut prompt. Raises PromptTooLong for a longer prompt with images, which cannot be cut."""
        prompt = self.renderer.render(messages)
        if prompt.media and len(prompt) > self.longest:
            raise PromptTooLong(
                f"a prompt of at most {self.longest} tokens (data.max_prompt_length)",
                f"{len(prompt)} tokens with {len(prompt.media)} image(s), which are not cut",
                "raise data.max_prompt_length, or set data.filter_overlong_prompts",
            )
        return prompt if prompt.media else Prompt(cut(prompt.tokens, self.longest, self.truncation))

    def extend(
        self, history: Sequence[Message], seen: Prompt, stop_reason: StopReason, new: Sequence[Message]
    ) -> Prompt:
        return self.renderer.extend(history, seen, stop_reason, new)

    def decode(self, tokens: Sequence[int] | IntArray) -> str:
        return self.renderer.decode(tokens)

    def expert(self, messages: Sequence[Message], completion: str | Message) -> tuple[Prompt, IntArray]:
        return self.renderer.expert(messages, completion)

    def supervised(self, messages: Sequence[Message]) -> list[tuple[Prompt, IntArray]]:
        return self.renderer.supervised(messages)


def template_of(verl: Settings, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the chat template of the config as Jinja text, or None to use the tokenizer's template unchanged.

    Variables (`data.apply_chat_template_kwargs`) are set at the start of the template.
    """
    template, variables = verl["actor_rollout_ref.model.custom_chat_template"], verl["data.apply_chat_template_kwargs"]
    if not variables:
        return template
    base = template or tokenizer.chat_template
    if not isinstance(base, str):
        raise ConfigError(
            "data.apply_chat_template_kwargs", "the tokenizer has no chat template", "leave it out, or give it one"
        )
    return with_variables(base, variables)
