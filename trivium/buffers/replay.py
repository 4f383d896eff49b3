"""The sample strategy that replays groups by priority."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field

from trivium.buffers.strategies import DefaultStrategy, explored_problems, interleaved, replacing_problems
from trivium.config import RunConfig
from trivium.foundation.errors import Problem
from trivium.foundation.randomness import stream, uniforms
from trivium.protocols import Algorithm, Buffer
from trivium.schedule import Schedule
from trivium.types import Group, Sample

_LIMIT_KEYS = ("sigma", "use_count_limit")
"""Config keys that only the priority `decay_limit_randomization` reads."""


@dataclass
class _StoredGroup:
    """A group in the store."""

    group: Group
    uses: int
    """The number of steps that have trained on it."""
    used_at: int
    """The version that the last of these steps trained."""


class Replay(DefaultStrategy):
    """Fresh groups, and groups that were trained on before.

    Every group that the algorithm trains on enters the store. A step gets those of highest priority whose cooldown is
    over and that are young enough; of equals, those stored or last used first. Fresh groups replace what the store
    lacks. Replayed groups may be older than `schedule.max_staleness`: up to `max_age`.
    """

    class Config(DefaultStrategy.Config):
        kind: str = "replay"
        fraction: float = Field(default=0.5, gt=0, lt=1)
        """The fraction of a step's groups that are replayed, rounded down to whole groups."""
        max_age: int = Field(default=4, ge=1)
        """How many versions old a replayed group may be, in place of `schedule.max_staleness`."""
        capacity: int = Field(default=1024, ge=1)
        """Groups kept for replay. If there are more, those of lowest priority are removed, among equal ones the oldest
        in the store."""
        cooldown: int = Field(default=1, ge=1)
        """Train steps from one use of a group to the next; 1 allows consecutive steps."""
        priority: Literal["linear_decay", "decay_limit_randomization"] = "linear_decay"
        """`linear_decay`: the version that sampled the group, minus `decay` for each use. `decay_limit_randomization`:
        the same with noise and a limit of uses."""
        decay: float = Field(default=2.0, ge=0)
        """How much a use lowers the priority, in versions."""
        sigma: float = Field(default=0.0, ge=0)
        """The standard deviation of the noise, in versions; drawn anew after each use."""
        use_count_limit: int = Field(default=3, ge=0)
        """How often a group is trained on, the first time included; 0 for no limit."""

        def num_stored(self, count: int) -> int:
            return math.floor(round(self.fraction * count, 9))  # 0.29 * 100 is slightly less than 29

        def oldest(self, max_staleness: int) -> int:
            return max(self.max_age, max_staleness)

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from explored_problems(self, run, where)
            yield from replacing_problems(self, run, where)
            if not self.num_stored(run.schedule.groups_per_step):
                yield Problem(
                    f"{where}.fraction",
                    f"a fraction of {self.fraction}",
                    f"rounded down, it is none of {run.schedule.groups_per_step} group(s) (schedule.groups_per_step)",
                    "raise one of the two, or use kind: default",
                )
            if self.max_age < self.cooldown:
                yield Problem(
                    f"{where}.max_age",
                    f"groups at most {self.max_age} version(s) old, {self.cooldown} step(s) apart",
                    "every group would be too old before its second use",
                    f"set it to at least {self.cooldown}, or lower the cooldown",
                )
            if self.use_count_limit == 1:
                yield Problem(
                    f"{where}.use_count_limit",
                    "groups that are trained on once",
                    "then none is ever replayed",
                    "use at least 2 (0 for any number), or kind: default",
                )
            for name in _LIMIT_KEYS if self.priority == "linear_decay" else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield Problem(
                        f"{where}.{name}",
                        f"{name} with the priority linear_decay",
                        "it has no effect there",
                        "leave it out, or set priority: decay_limit_randomization",
                    )

    def __init__(
        self, config: Config, *, buffer: Buffer, schedule: Schedule, algorithm: Algorithm, **beside: object
    ) -> None:
        super().__init__(config, buffer=buffer, **beside)
        self.config, self._schedule, self._algorithm = config, schedule, algorithm
        self._store: list[_StoredGroup] = []
        """In order of arrival. A use counts as a new arrival."""
        self._sampled_at: int | None = None
        """The version whose step already has its replayed groups."""

    async def sample(self, count: int, version: int) -> Sample:
        self._store = [stored for stored in self._store if self._young(stored, version)]
        others = 0 if version == self._sampled_at else self._schedule.stored_per_step
        rested = [stored for stored in self._store if version - stored.used_at >= self.config.cooldown]
        chosen = sorted(rested, key=self._priority, reverse=True)[:others]
        fresh = await self._buffer.take(count - others, version)
        if lacking := others - len(chosen):  # the schedule has no slots for the missing groups
            await self._buffer.refuse(lacking)
            fresh += await self._buffer.take(lacking, version)
        self._sampled_at = version
        uses = [stored.uses for stored in chosen]
        self._remember(chosen, fresh, version)
        replayed = [stored.group for stored in chosen]
        metrics = {"replayed": len(chosen), "stored": len(self._store), **_reward(fresh)}
        metrics |= {"use_count": fmean(uses)} if uses else {}
        return Sample(interleaved(fresh, replayed), metrics, frozenset(group.slot for group in replayed))

    def _remember(self, chosen: Sequence[_StoredGroup], fresh: Sequence[Group], version: int) -> None:
        """Counts the uses, adds the fresh groups that the step trains on, and evicts groups beyond the capacity."""
        used = {stored.group.slot for stored in chosen}
        resting = [stored for stored in self._store if stored.group.slot not in used]
        back = [
            _StoredGroup(stored.group, stored.uses + 1, version)
            for stored in chosen
            if self._may_return(stored.uses + 1)
        ]
        new = [_StoredGroup(group, 1, version) for group in self._algorithm.filter(fresh)[0] if self._may_return(1)]
        store = [*resting, *back, *new]
        excess = max(0, len(store) - self.config.capacity)
        evicted = {stored.group.slot for stored in sorted(store, key=self._priority)[:excess]}
        self._store = [stored for stored in store if stored.group.slot not in evicted]

    def _young(self, stored: _StoredGroup, version: int) -> bool:
        return version - stored.group.oldest_version <= self.config.max_age

    def _may_return(self, uses: int) -> bool:
        config = self.config
        return config.priority == "linear_decay" or not config.use_count_limit or uses < config.use_count_limit

    def _priority(self, stored: _StoredGroup) -> float:
        config = self.config
        priority = stored.group.oldest_version - config.decay * stored.uses
        if config.priority == "linear_decay" or not config.sigma:
            return priority
        schedule = self._schedule
        address = stream(schedule.seed, "replay", schedule.stage, stored.group.slot, stored.uses)
        uniform = float(uniforms(np.uint64(address), 0))
        return priority + config.sigma * NormalDist().inv_cdf(uniform + 2.0**-54)  # inv_cdf is undefined at 0

    def state(self) -> dict[str, Any]:
        return {"store": [[stored.group.slot, stored.uses, stored.used_at] for stored in self._store]}

    async def restore(self, state: Mapping[str, Any]) -> None:
        stored = state.get("store", [])
        groups = await self._buffer.taken_groups([slot for slot, _, _ in stored]) if stored else []
        self._store = [
            _StoredGroup(group, uses, used_at) for group, (_, uses, used_at) in zip(groups, stored, strict=True)
        ]


def _reward(groups: Sequence[Group]) -> dict[str, float]:
    """The mean reward of the fresh groups; `reward/mean` includes the replayed groups."""
    rewards = [member.reward for group in groups for member in group.alive if member.rewards]
    return {"fresh_reward": fmean(rewards)} if rewards else {}
