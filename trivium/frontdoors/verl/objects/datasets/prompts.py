"""Rendering of prompts: the chat template of the config, and truncation to a maximum length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.padding import Truncation, cut_prompt
from trivium.frontdoors.tables import Settings
from trivium.models.backbone.huggingface import with_variables
from trivium.protocols import Renderer
from trivium.types import IntArray, Message, Prompt, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        prompt, do = self.renderer.render(messages), "set data.filter_overlong_prompts"
        return cut_prompt(prompt, self.longest, self.truncation, "data.max_prompt_length", do)

    def extend(
        self, history: Sequence[Message], seen: Prompt, stop_reason: StopReason, new: Sequence[Message]
    ) -> Prompt:
        # Uncut: it continues tokens that the policy has read.
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
