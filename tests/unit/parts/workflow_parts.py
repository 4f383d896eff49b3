"""Policies that write given texts, and workflows by their config."""

from __future__ import annotations

from typing import Any

from trivium.config import build, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.randomness import SampleKey
from trivium.policy import Policy
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Request, Sampling

TOKENIZER = tiny_tokenizer("bytes")
RENDERER = ChatRenderer(TOKENIZER)


def writes(request: Request, version: int) -> str:
    """The script of the engine: the task id holds the completions, one for each call."""
    return request.key.task_id.split("|")[int(request.key.path[-1])]


def policy(*texts: str, max_context: int = 20_000, renderer: ChatRenderer = RENDERER) -> Policy:
    """A policy that writes these texts, one for each call."""
    engine = ScriptedEngine(
        ScriptedEngine.Config(script=f"{__file__}:writes"),
        eos_token_ids=RENDERER.eos_token_ids,
        decode=RENDERER.decode,
        encode=lambda text: TOKENIZER.encode(text),
    )
    return Policy(engine, renderer, Sampling(2000), SampleKey(0, "train", "train", "|".join(texts)), max_context)


def workflow(kind: str, **fields: Any) -> Any:
    return build("workflows", plugin("workflows")({"kind": kind, **fields}))


def shown(player: Policy) -> list[str]:
    """Every turn as text with its special tokens: the prompt, a bar, the completion."""
    return [f"{TOKENIZER.decode(t.prompt_tokens.tolist())}|{TOKENIZER.decode(t.tokens.tolist())}" for t in player.turns]
