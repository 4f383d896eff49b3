"""Every workflow that ships keeps the contract; broken ones are told which promise they break."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trivium.config import build, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.randomness import SampleKey
from trivium.policy import Policy
from trivium.testing import check_workflow
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Sampling, Task

RECIPES = Path(__file__).parents[2] / "recipes"
RENDERER = ChatRenderer(tiny_tokenizer())
TASK = Task("t", (Message("user", "digit?"),), {"secret": 6})


def make_policy() -> Policy:
    """A policy that says a digit which follows from the request's key."""
    engine = ScriptedEngine(
        ScriptedEngine.Config(replies=tuple("0123456789")),
        eos_token_ids=RENDERER.eos_token_ids,
        decode=RENDERER.decode,
        encode=lambda text: tiny_tokenizer().encode(text),
    )
    return Policy(engine, RENDERER, Sampling(4), SampleKey(0, "train", "train", "t"), 200)


@pytest.mark.parametrize(
    "section",
    [{"kind": "single_turn"}, {"kind": "multi_turn", "environment": f"{RECIPES / 'guess.py'}:Guess"}],
    ids=lambda section: section["kind"],
)
async def test_what_ships_keeps_the_contract(section: dict[str, Any]) -> None:
    await check_workflow(build("workflows", plugin("workflows")(section)), TASK, make_policy)


class Silent:
    async def run(self, task: Task, policy: Policy) -> None:
        return None


class Infinite:
    async def run(self, task: Task, policy: Policy) -> dict[str, float]:
        await policy.generate(task.prompt)
        return {"environment": float("inf")}


class Numbered:
    """A bare number instead of a mapping."""

    async def run(self, task: Task, policy: Policy) -> Any:
        await policy.generate(task.prompt)
        return 1.0


class Forgetful:
    """Keeps the conversation on self."""

    messages: tuple[Message, ...] = ()

    async def run(self, task: Task, policy: Policy) -> None:
        self.messages = (*self.messages, *task.prompt)
        await policy.generate(self.messages)


class Stubborn:
    """Takes a cancellation for a failed reply."""

    async def run(self, task: Task, policy: Policy) -> None:
        try:
            await policy.generate(task.prompt)
        except asyncio.CancelledError:
            return


class Measures:
    async def run(self, task: Task, policy: Policy) -> None:
        await policy.generate(task.prompt)
        policy.metrics["ratio"] = float("nan")


@pytest.mark.parametrize(
    ("workflow", "promise"),
    [
        (Silent(), "at least one turn"),
        (Infinite(), "finite numbers by name"),
        (Numbered(), "finite numbers by name, not 1.0"),
        (Forgetful(), "keep no state on self"),
        (Stubborn(), "ends when it is cancelled"),
        (Measures(), r"policy\.metrics"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
async def test_a_broken_promise_is_named(workflow: Any, promise: str) -> None:
    with pytest.raises(AssertionError, match=promise):
        await check_workflow(workflow, TASK, make_policy)
