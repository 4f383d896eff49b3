"""The contract of a workflow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from trivium.policy import Policy
from trivium.testing.promises import require

if TYPE_CHECKING:
    from trivium.policy import Workflow
    from trivium.types import Message, Task, Turn


async def check_workflow(
    workflow: Workflow, task: Task, policy_factory: Callable[[], Policy], *, patience_s: float = 10.0
) -> None:
    """A workflow records turns, returns finite rewards, is reproducible next to others, and ends when cancelled.

    `policy_factory` makes a new policy with the same weights and the same SampleKey on each call.
    """
    alone = policy_factory()
    earned = await workflow.run(task, alone)
    require(len(alone.turns) > 0, "run records at least one turn: await policy.generate(...)")
    require(earned is None or _all_finite(earned), f"run returns None or finite numbers by name, not {earned!r}")
    require(_all_finite(alone.metrics), f"policy.metrics holds finite numbers by name, not {alone.metrics!r}")

    company = [policy_factory(), policy_factory()]
    results = await asyncio.gather(*(workflow.run(task, policy) for policy in company))
    for policy, result in zip(company, results, strict=True):
        same = result == earned and [*map(_contents, policy.turns)] == [*map(_contents, alone.turns)]
        require(same, "a trajectory does not depend on those rolled out beside it, or before: keep no state on self")

    silent = _SilentPolicy()
    running = asyncio.ensure_future(workflow.run(task, silent))
    await asyncio.wait_for(silent.requested.wait(), patience_s)
    running.cancel()
    await asyncio.wait({running}, timeout=patience_s)
    require(running.done() and running.cancelled(), "run ends when it is cancelled: let CancelledError through")


class _SilentPolicy(Policy):
    """A policy that never answers, for cancelling a workflow that waits for it."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.metrics = {}

    async def generate(self, messages: Sequence[Message], **options: object) -> NoReturn:
        self.requested.set()
        while True:
            await asyncio.sleep(3600)

    def fork(self, name: str) -> _SilentPolicy:
        return self

    @property
    def tool_format(self) -> None:
        return None

    @property
    def turns(self) -> tuple[Turn, ...]:
        return ()


def _all_finite(numbers: object) -> bool:
    """Whether the value is a mapping from text to finite numbers."""
    if not isinstance(numbers, Mapping):
        return False
    named = cast("Mapping[Any, Any]", numbers).items()
    return all(isinstance(n, str) and isinstance(v, int | float) and math.isfinite(v) for n, v in named)


def _contents(turn: Turn) -> tuple[list[int], list[int]]:
    return turn.prompt_tokens.tolist(), turn.tokens.tolist()
