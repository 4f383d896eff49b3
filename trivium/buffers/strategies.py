"""Sample strategies: which groups a step is trained on. `replay` has a file of its own.

A step asks once for all its groups; if the algorithm refuses some, it asks again for as many, and those are fresh ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from trivium.buffers.files import FileBuffer
from trivium.checks import SETTLED
from trivium.config import RunConfig, StrategyConfig
from trivium.errors import Problem
from trivium.protocols import Buffer, Renderer, TaskSource
from trivium.registry import resolve, suggest
from trivium.schedule import Schedule
from trivium.types import Group, Sample


class DefaultStrategy:
    """The groups the buffer has ready, in its order."""

    mixed = False

    class Config(StrategyConfig):
        kind: str = "default"

    def __init__(self, config: StrategyConfig, *, buffer: Buffer, **beside: Any) -> None:
        del config, beside
        self._buffer = buffer

    async def sample(self, count: int, version: int) -> Sample:
        return Sample(tuple(await self._buffer.take(count, version)))

    async def refuse(self, count: int) -> None:
        await self._buffer.refuse(count)

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: Mapping[str, Any]) -> None: ...


class StalenessControl(DefaultStrategy):
    """Groups of at most `max_staleness`, where the schedule lets explorers run further ahead.

    What is older is left out and counted, and another group is played in its place.
    """

    class Config(DefaultStrategy.Config):
        kind: str = "staleness_control"
        max_staleness: int = Field(ge=0)
        """How many versions old a group may be that is trained on: less than `schedule.max_staleness`."""

        def oldest(self, max_staleness: int) -> int:
            return min(self.max_staleness, max_staleness)

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from played_problems(self, run, where)
            yield from replacing_problems(self, run, where)
            if self.max_staleness >= run.max_staleness:
                yield Problem(
                    f"{where}.max_staleness", f"groups at most {self.max_staleness} version(s) old",
                    f"the schedule admits none older than {run.max_staleness}, so nothing would be left out",
                    f"set it below {run.max_staleness}, or use kind: default",
                )  # fmt: skip
            if self.max_staleness < run.sync.interval - 1:
                yield Problem(
                    f"{where}.max_staleness", f"{self.max_staleness} with sync.interval {run.sync.interval}",
                    "before weights are published, even a group that has just been played is older",
                    f"set it to at least {run.sync.interval - 1}",
                )  # fmt: skip

    def __init__(self, config: Config, *, buffer: Buffer, **beside: Any) -> None:
        super().__init__(config, buffer=buffer, **beside)
        self._bound = config.max_staleness

    async def sample(self, count: int, version: int) -> Sample:
        groups: list[Group] = []
        left_out = 0
        while len(groups) < count:
            taken = await self._buffer.take(count - len(groups), version)
            fresh = [group for group in taken if version - group.oldest_version <= self._bound]
            groups += fresh
            if len(fresh) < len(taken):
                left_out += len(taken) - len(fresh)
                await self._buffer.refuse(len(taken) - len(fresh))
        return Sample(tuple(groups), {"left_out": left_out})


class Mix(DefaultStrategy):
    """Fresh groups beside replies of an expert, from a taskset whose rows hold them.

    An expert's rows come in the schedule's manner, every epoch in an order of its own. Which ones a step gets follows
    from its number, so there is no cursor to lose. They carry no reward; the policy loss tells them from the policy's
    own (`mix`, `mix_chord`). Replacements for refused groups are always fresh.
    """

    mixed = True

    class Config(DefaultStrategy.Config):
        kind: str = "mix"
        expert_data_ratio: float = Field(default=0.5, gt=0, lt=1)
        """The part of a step's groups that an expert wrote, rounded up to whole groups; each is one reply."""
        taskset: str
        """The taskset with the expert's replies: a name under `tasks`, also that of the tasks that are played."""
        completion: str = "completion"
        """The column that holds the reply."""

        def others(self, count: int) -> int:
            return math.ceil(round(self.expert_data_ratio * count, 9))  # 0.1 * 30 is a little more than 3

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from played_problems(self, run, where)
            if self.taskset not in run.tasks:
                yield Problem(
                    f"{where}.taskset", f"the taskset {self.taskset!r}", "no such taskset",
                    suggest(self.taskset, run.tasks),
                )  # fmt: skip
            count = run.schedule.groups_per_step
            if self.others(count) >= count:
                yield Problem(
                    f"{where}.expert_data_ratio", f"a ratio of {self.expert_data_ratio}",
                    f"rounded up, all {count} group(s) of a step would be an expert's",
                    "lower it, raise schedule.groups_per_step, or use algorithm.kind sft on buffer.kind files",
                )  # fmt: skip

    def __init__(
        self, config: Config, *, buffer: Buffer, schedule: Schedule, renderer: Renderer,
        tasks: Callable[[str], TaskSource], **beside: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, buffer=buffer, **beside)
        self._schedule, self._taskset = schedule, config.taskset
        # `seed` spelled otherwise: an expert's rows must not come in step with the tasks that are being played.
        experts = replace(
            schedule, tasks=tasks(config.taskset), seed=-1 - schedule.seed, groups_per_step=schedule.others, others=0,
            group_size=1, curriculum=None,
        )  # fmt: skip
        self._experts = FileBuffer(
            FileBuffer.Config(completion=config.completion), schedule=experts, rollouts=Path(), renderer=renderer,
            deadline_s=0,
        )  # fmt: skip
        self._mixed_at: int | None = None
        """The version whose step has its expert's groups already."""

    async def sample(self, count: int, version: int) -> Sample:
        others = 0 if version == self._mixed_at else self._schedule.others
        fresh = await self._buffer.take(count - others, version)
        written = [self._apart(group) for group in await self._experts.take(others, version)]
        self._mixed_at = version
        slots = frozenset(group.slot for group in written)
        return Sample(interleaved(fresh, written), {"expert": len(written)}, slots)

    def _apart(self, group: Group) -> Group:
        """With a slot and an id that no played group has, even of the same task."""
        return replace(group, slot=-1 - group.slot, task=replace(group.task, taskset=f"expert/{group.task.taskset}"))


def interleaved(some: Sequence[Group], others: Sequence[Group]) -> tuple[Group, ...]:
    """Both in their order, evenly spread: consecutive parts of a step hold as much of either as they can."""
    placed = [((2 * i + 1) / (2 * len(part)), group) for part in (some, others) for i, group in enumerate(part)]
    return tuple(group for _, group in sorted(placed, key=lambda item: item[0]))


def played_problems(config: StrategyConfig, run: RunConfig, where: str) -> Iterator[Problem]:
    """A strategy that chooses among groups that explorers play, where nobody plays."""
    if not resolve("buffers", run.buffer.kind).explored:
        yield Problem(
            f"{where}.kind", f"the sample strategy {config.kind!r} on buffer.kind {run.buffer.kind!r}",
            "nothing is played here: each step has the rows that are meant for it",
            "leave it out, or use buffer.kind memory",
        )  # fmt: skip


def replacing_problems(config: StrategyConfig, run: RunConfig, where: str) -> Iterator[Problem]:
    """A strategy that asks for more groups than the schedule foresaw."""
    if run.slots_are_settled:
        yield Problem(
            f"{where}.kind", f"the sample strategy {config.kind!r} {SETTLED}",
            "it has further groups played when it needs them, so which version plays a slot would depend on when",
            "use another strategy, or set schedule.max_staleness or schedule.deterministic back",
        )  # fmt: skip
