"""Sample strategies: they select the groups of a train step (see also `replay`).

A step samples all its groups at once. If the algorithm refuses some of them, the step samples the same number of fresh
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from trivium.buffers.files import FileBuffer
from trivium.config import RunConfig, StrategyConfig
from trivium.config.checks import WITH_FIXED_VERSIONS
from trivium.foundation.errors import Problem
from trivium.foundation.registry import resolve, suggest
from trivium.protocols import Buffer, Renderer, TaskSource
from trivium.schedule import Schedule
from trivium.types import Capabilities, Group, Sample, capabilities_of


class DefaultStrategy:
    """The groups of the buffer, in its order."""

    class Config(StrategyConfig):
        kind: str = "default"

    def __init__(self, config: StrategyConfig, *, buffer: Buffer, **beside: object) -> None:
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
    """Only groups of at most `max_staleness`. The schedule may let explorers run further ahead.

    Older ones are left out and counted, and other groups are generated in their place.
    """

    class Config(DefaultStrategy.Config):
        kind: str = "staleness_control"
        max_staleness: int = Field(ge=0)
        """How many versions old a group may be: less than `schedule.max_staleness`."""

        def oldest(self, max_staleness: int) -> int:
            return min(self.max_staleness, max_staleness)

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from explored_problems(self, run, where)
            yield from replacing_problems(self, run, where)
            if self.max_staleness >= run.max_staleness:
                yield Problem(
                    f"{where}.max_staleness",
                    f"groups at most {self.max_staleness} version(s) old",
                    f"the schedule admits no older group than {run.max_staleness}, so no group would be left out",
                    f"set it below {run.max_staleness}, or use kind: default",
                )
            if self.max_staleness < run.sync.interval - 1:
                yield Problem(
                    f"{where}.max_staleness",
                    f"{self.max_staleness} with sync.interval {run.sync.interval}",
                    "even a fresh group is older than this when it is trained on",
                    f"set it to at least {run.sync.interval - 1}",
                )

    def __init__(self, config: Config, *, buffer: Buffer, **beside: object) -> None:
        super().__init__(config, buffer=buffer, **beside)
        self._bound = config.max_staleness

    async def sample(self, count: int, version: int) -> Sample:
        groups: list[Group] = []
        left_out = 0
        while len(groups) < count:
            sampled = await self._buffer.take(count - len(groups), version)
            fresh = [group for group in sampled if version - group.oldest_version <= self._bound]
            groups += fresh
            if len(fresh) < len(sampled):
                left_out += len(sampled) - len(fresh)
                await self._buffer.refuse(len(sampled) - len(fresh))
        return Sample(tuple(groups), {"left_out": left_out})


class Mix(DefaultStrategy):
    """Fresh groups, and completions of an expert from a taskset.

    The expert's rows are ordered like a schedule's tasks, every epoch differently; which ones a step gets follows from
    its number. They have no reward; the policy loss treats them differently from the policy's own (`mix`,
    `mix_chord`). Replacements for refused groups are always fresh.
    """

    capabilities = Capabilities(mixed=True)

    class Config(DefaultStrategy.Config):
        kind: str = "mix"
        expert_data_ratio: float = Field(default=0.5, gt=0, lt=1)
        """The fraction of a step's groups that an expert wrote, rounded up to whole groups; each is one completion."""
        taskset: str
        """The taskset with the expert's completions: a name under `tasks`, possibly the one that explorers use."""
        completion: str = "completion"
        """The column of the completion."""

        def num_stored(self, count: int) -> int:
            return math.ceil(round(self.expert_data_ratio * count, 9))  # 0.1 * 30 is slightly more than 3

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from explored_problems(self, run, where)
            if self.taskset not in run.tasks:
                yield Problem(
                    f"{where}.taskset",
                    f"the taskset {self.taskset!r}",
                    "no such taskset",
                    suggest(self.taskset, run.tasks),
                )
            count = run.schedule.groups_per_step
            if self.num_stored(count) >= count:
                yield Problem(
                    f"{where}.expert_data_ratio",
                    f"a ratio of {self.expert_data_ratio}",
                    f"rounded up, all {count} group(s) of a step would be an expert's",
                    "lower it, raise schedule.groups_per_step, or use algorithm.kind sft on buffer.kind files",
                )

    def __init__(
        self,
        config: Config,
        *,
        buffer: Buffer,
        schedule: Schedule,
        renderer: Renderer,
        tasks: Callable[[str], TaskSource],
        **beside: object,
    ) -> None:
        super().__init__(config, buffer=buffer, **beside)
        self._schedule, self._taskset = schedule, config.taskset
        # A different seed, so that the expert's rows do not follow the order of the explorers' tasks.
        experts = replace(
            schedule,
            tasks=tasks(config.taskset),
            seed=-1 - schedule.seed,
            groups_per_step=schedule.stored_per_step,
            stored_per_step=0,
            group_size=1,
            curriculum=None,
        )
        self._experts = FileBuffer(
            FileBuffer.Config(completion=config.completion),
            schedule=experts,
            rollouts=Path(),
            renderer=renderer,
            deadline_s=0,
        )
        self._mixed_at: int | None = None
        """The version whose step already has its expert groups."""

    async def sample(self, count: int, version: int) -> Sample:
        others = 0 if version == self._mixed_at else self._schedule.stored_per_step
        fresh = await self._buffer.take(count - others, version)
        written = [self._distinct(group) for group in await self._experts.take(others, version)]
        self._mixed_at = version
        slots = frozenset(group.slot for group in written)
        return Sample(interleaved(fresh, written), {"expert": len(written)}, slots)

    def _distinct(self, group: Group) -> Group:
        """The group with a slot and an id that no explored group has, even if it has the same task."""
        return replace(group, slot=-1 - group.slot, task=replace(group.task, taskset=f"expert/{group.task.taskset}"))


def interleaved(some: Sequence[Group], others: Sequence[Group]) -> tuple[Group, ...]:
    """The groups of both, evenly interleaved, each in its own order."""
    placed = [((2 * i + 1) / (2 * len(part)), group) for part in (some, others) for i, group in enumerate(part)]
    return tuple(group for _, group in sorted(placed, key=lambda item: item[0]))


def explored_problems(config: StrategyConfig, run: RunConfig, where: str) -> Iterator[Problem]:
    """Problems of a strategy for explored groups in a run without explorers."""
    if not capabilities_of(resolve("buffers", run.buffer.kind)).explored:
        yield Problem(
            f"{where}.kind",
            f"the sample strategy {config.kind!r} on buffer.kind {run.buffer.kind!r}",
            "this buffer has no explorers: each step has its rows",
            "leave it out, or use buffer.kind memory",
        )


def replacing_problems(config: StrategyConfig, run: RunConfig, where: str) -> Iterator[Problem]:
    """Problems of a strategy that needs more groups than the schedule has."""
    if run.has_fixed_versions:
        yield Problem(
            f"{where}.kind",
            f"the sample strategy {config.kind!r} {WITH_FIXED_VERSIONS}",
            "it needs further groups at times, so the version that samples a slot would depend on timing",
            "use another strategy, or set schedule.max_staleness or schedule.deterministic back",
        )
