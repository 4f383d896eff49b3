"""The sample strategy that trains on groups again, the most promising first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field

from trivium.buffers.strategies import DefaultStrategy, interleaved, played_problems, replacing_problems
from trivium.config import RunConfig
from trivium.errors import Problem
from trivium.protocols import Algorithm, Buffer
from trivium.randomness import stream, uniforms
from trivium.schedule import Schedule
from trivium.types import Group, Sample

_OF_LIMIT = ("sigma", "use_count_limit")
"""Keys of the priority `decay_limit_randomization` alone."""


@dataclass
class _Kept:
    """A group in the store."""

    group: Group
    uses: int
    """How many steps were trained on it."""
    used_at: int
    """The version that the last of them began with."""


class Replay(DefaultStrategy):
    """Fresh groups beside groups that were trained on before.

    Every group that the algorithm trains on enters the store. Of those that are rested and young enough a step gets the
    ones of highest priority, of equals the one that has been in the store, or back in it, for longest. What the store
    lacks, fresh groups make up for. Replayed groups may be older than `schedule.max_staleness`: up to `max_age`.
    """

    class Config(DefaultStrategy.Config):
        kind: str = "replay"
        fraction: float = Field(default=0.5, gt=0, lt=1)
        """The part of a step's groups that are replayed, rounded down to whole groups."""
        max_age: int = Field(default=4, ge=1)
        """How many versions old a replayed group may be. `schedule.max_staleness` does not hold for it."""
        capacity: int = Field(default=1024, ge=1)
        """Groups kept for replay; beyond it those of lowest priority go, of equals the one kept for longest."""
        cooldown: int = Field(default=1, ge=1)
        """Train steps from one use of a group to the next; 1 lets it be used in consecutive steps."""
        priority: Literal["linear_decay", "decay_limit_randomization"] = "linear_decay"
        """`linear_decay`: the version that sampled the group, less `decay` for each use. `decay_limit_randomization`:
        the same with noise, and a limit of uses."""
        decay: float = Field(default=2.0, ge=0)
        """What a use takes off the priority, in versions."""
        sigma: float = Field(default=0.0, ge=0)
        """Standard deviation of the noise, in versions; drawn anew after each use."""
        use_count_limit: int = Field(default=3, ge=0)
        """How often a group is trained on in all, the first time included; 0 for any number of times."""

        def others(self, count: int) -> int:
            return math.floor(round(self.fraction * count, 9))  # 0.29 * 100 is a little less than 29

        def oldest(self, max_staleness: int) -> int:
            return max(self.max_age, max_staleness)

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from played_problems(self, run, where)
            yield from replacing_problems(self, run, where)
            if not self.others(run.schedule.groups_per_step):
                yield Problem(
                    f"{where}.fraction", f"a fraction of {self.fraction}",
                    f"rounded down, it is none of {run.schedule.groups_per_step} group(s) (schedule.groups_per_step)",
                    "raise one of the two, or use kind: default",
                )  # fmt: skip
            if self.max_age < self.cooldown:
                yield Problem(
                    f"{where}.max_age", f"groups at most {self.max_age} version(s) old, {self.cooldown} step(s) apart",
                    "every group would be too old before its second use",
                    f"set it to at least {self.cooldown}, or lower the cooldown",
                )  # fmt: skip
            if self.use_count_limit == 1:
                yield Problem(
                    f"{where}.use_count_limit", "groups that are trained on once", "then none is ever replayed",
                    "use at least 2 (0 for any number), or kind: default",
                )  # fmt: skip
            for name in _OF_LIMIT if self.priority == "linear_decay" else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield Problem(
                        f"{where}.{name}", f"{name} with the priority linear_decay", "it has no effect there",
                        "leave it out, or set priority: decay_limit_randomization",
                    )  # fmt: skip

    def __init__(
        self, config: Config, *, buffer: Buffer, schedule: Schedule, algorithm: Algorithm, **beside: Any
    ) -> None:
        super().__init__(config, buffer=buffer, **beside)
        self.config, self._schedule, self._algorithm = config, schedule, algorithm
        self._store: list[_Kept] = []
        """In order of arrival; a use is a new arrival."""
        self._sampled_at: int | None = None
        """The version whose step has its replayed groups already."""

    async def sample(self, count: int, version: int) -> Sample:
        self._store = [kept for kept in self._store if self._young(kept, version)]
        others = 0 if version == self._sampled_at else self._schedule.others
        rested = [kept for kept in self._store if version - kept.used_at >= self.config.cooldown]
        chosen = sorted(rested, key=self._priority, reverse=True)[:others]
        fresh = await self._buffer.take(count - others, version)
        if lacking := others - len(chosen):  # the schedule has no slots for these: they are played now, by this version
            await self._buffer.refuse(lacking)
            fresh += await self._buffer.take(lacking, version)
        self._sampled_at = version
        uses = [kept.uses for kept in chosen]
        self._remember(chosen, fresh, version)
        replayed = [kept.group for kept in chosen]
        metrics = {"replayed": len(chosen), "stored": len(self._store), **_reward(fresh)}
        metrics |= {"use_count": fmean(uses)} if uses else {}
        return Sample(interleaved(fresh, replayed), metrics, frozenset(group.slot for group in replayed))

    def _remember(self, chosen: Sequence[_Kept], fresh: Sequence[Group], version: int) -> None:
        """Counts the uses, takes in what is trained on for the first time, and keeps to the capacity."""
        used = {kept.group.slot for kept in chosen}
        resting = [kept for kept in self._store if kept.group.slot not in used]
        back = [_Kept(kept.group, kept.uses + 1, version) for kept in chosen if self._may_return(kept.uses + 1)]
        new = [_Kept(group, 1, version) for group in self._algorithm.filter(fresh)[0] if self._may_return(1)]
        store = [*resting, *back, *new]
        excess = max(0, len(store) - self.config.capacity)
        evicted = {kept.group.slot for kept in sorted(store, key=self._priority)[:excess]}
        self._store = [kept for kept in store if kept.group.slot not in evicted]

    def _young(self, kept: _Kept, version: int) -> bool:
        return version - kept.group.oldest_version <= self.config.max_age

    def _may_return(self, uses: int) -> bool:
        config = self.config
        return config.priority == "linear_decay" or not config.use_count_limit or uses < config.use_count_limit

    def _priority(self, kept: _Kept) -> float:
        config = self.config
        priority = kept.group.oldest_version - config.decay * kept.uses
        if config.priority == "linear_decay" or not config.sigma:
            return priority
        schedule = self._schedule
        address = stream(schedule.seed, "replay", schedule.stage, kept.group.slot, kept.uses)
        uniform = float(uniforms(np.uint64(address), 0))
        return priority + config.sigma * NormalDist().inv_cdf(uniform + 2.0**-54)  # never 0, where there is none

    def state(self) -> dict[str, Any]:
        return {"store": [[kept.group.slot, kept.uses, kept.used_at] for kept in self._store]}

    async def restore(self, state: Mapping[str, Any]) -> None:
        stored = state.get("store", [])
        groups = await self._buffer.past([slot for slot, _, _ in stored]) if stored else []
        self._store = [
            _Kept(group, uses, used_at) for group, (_, uses, used_at) in zip(groups, stored, strict=True)
        ]  # fmt: skip


def _reward(groups: Sequence[Group]) -> dict[str, float]:
    """What was played for this step earned: replayed groups count in `reward/mean` too."""
    rewards = [member.reward for group in groups for member in group.alive if member.rewards]
    return {"fresh_reward": fmean(rewards)} if rewards else {}
