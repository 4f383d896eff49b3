"""The algorithm of a step of `fit`: the core's, over the rollout of all ranks. Its one update is `ppo_train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trivium.algorithms import GroupAlgorithm
from trivium.frontdoors.lightrft.objects.ppo_objective import approximate_kl
from trivium.frontdoors.lightrft.objects.updates import blank_experience
from trivium.protocols import CutAnywhere
from trivium.training.batching import joined
from trivium.training.distributed.ranks import Ranks
from trivium.types import Batch, Group, Metrics

BLANK = "blank"
"""The group of the row of a rank whose share of a rollout is empty."""


@dataclass(frozen=True)
class RolloutUpdate(CutAnywhere):
    """The update over the whole rollout of a step: a call, which makes the optimizer steps."""

    train: Callable[[Batch], None]
    role = "rollout"
    unit = "group"
    head = "lm"
    needs = frozenset[str]()
    on_policy = "none: its optimizer steps have objectives of their own"


@dataclass(frozen=True)
class StepAlgorithm:
    """Implements `protocols.Algorithm` for one step. All ranks must call its methods; a rank may have no groups."""

    core: GroupAlgorithm
    ranks: Ranks
    needs: frozenset[str]
    train: Callable[[Batch], None]
    """Trains on this rank's experiences, which have their scores and advantages as columns."""
    teacher = None
    epochs = 1
    mini_batches = 1
    refill = 0

    @property
    def name(self) -> str:
        return self.core.name

    @property
    def objectives(self) -> tuple[RolloutUpdate, ...]:
        return (RolloutUpdate(self.train),)

    def objectives_at(self, version: int) -> tuple[RolloutUpdate, ...]:
        return self.objectives

    def filter(self, groups: Sequence[Group]) -> tuple[list[Group], Metrics]:
        """Keeps all groups: `fit` has filtered each batch of prompts, to replace what was refused."""
        return list(groups), {}

    def batch(self, groups: Sequence[Group]) -> Batch:
        return self.core.batch(groups)

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Returns (this rank's experiences with advantages and returns, the metrics of all ranks).

        A rank without experiences gets a row without trained tokens, because all ranks take part in every update.
        """
        # The estimator normalises over the rollout of all ranks. LightRFT's is local to a rank, so its advantages
        # depend on their number.
        everyone = self.ranks.all_gather(_light(batch))
        whole, metrics = self.core.advantages(joined(everyone) or batch)
        first = sum(map(len, everyone[: self.ranks.data_rank]))
        share = whole.select(range(first, first + len(batch)))
        if not len(share):
            (blank,) = blank_experience().to_batch().experiences
            return Batch((replace(blank, group_id=BLANK),)), metrics
        experiences = (
            replace(e, media=local.media, extra=local.extra)
            for e, local in zip(share.experiences, batch.experiences, strict=True)
        )
        share = replace(share, experiences=tuple(experiences), metrics={})
        if "ref_log_prob" in share.columns:
            share = share.with_columns(kl=approximate_kl(self.core, share))
        return share, metrics

    def state(self) -> dict[str, Any]:
        return self.core.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.core.restore(state)


def _light(batch: Batch) -> Batch:
    """Returns the batch without image bytes and `extra` data, to gather less data."""
    return replace(batch, experiences=tuple(replace(e, media=(), extra={}) for e in batch.experiences), metrics={})
