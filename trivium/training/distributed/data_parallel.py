"""The train engine of a driver: cuts every batch into shares, one per data rank, and joins the results."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from trivium.foundation.phases import TRAINER_LANE, Phase, span
from trivium.models.heads.loss import LossDenominators
from trivium.protocols import Algorithm, Objective, TrainEngine, WeightOffer
from trivium.training.balance import partition, workload
from trivium.training.batching import count, joined_shares, prefixes_of, units
from trivium.training.engine import TorchTrainEngine
from trivium.training.role_models import SCORED_BY
from trivium.training.snapshot import wait_until_written, write_in_background
from trivium.types import AnyArray, Batch, Metrics


class RankGroup(Protocol):
    """Processes that each hold a train engine (`TorchTrainEngine`), driven together. Raises RoleFailed if one dies."""

    @property
    def data_size(self) -> int:
        """The number of shares of a batch."""
        ...

    def run_on_all_ranks(self, method: str, *args: object) -> Any:
        """Calls `method(*args)` of `RankVerbs` on every rank; returns the first rank's result."""
        ...

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], *args: object) -> list[Any]:
        """Calls `method(*shares[i], *args)` on the ranks of data rank i; returns one result per data rank."""
        ...

    def close(self) -> None:
        """Frees the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """One data rank's part of a mini-batch."""

    version: int
    """Train steps taken: the position in the learning-rate schedule."""
    batch: Batch


class RankVerbs:
    """The methods that `DistributedTrainEngine` calls on a rank, over the rank's own engine."""

    def __init__(self, engine: TorchTrainEngine, sampler: tuple[str, int] | None = None) -> None:
        """`sampler` is the address of a rollout engine that this process hosts for the driver."""
        self.engine, self._sampler = engine, sampler

    def sampler(self) -> tuple[str, int] | None:
        return self._sampler

    def score(self, share: Share, what: str) -> Sequence[AnyArray]:
        self.engine.version = share.version
        with self._span(f"score/{what}"):
            return self.engine.score(share.batch, what)

    def update(self, share: Share, role: str, objective: Objective, totals: LossDenominators) -> Metrics:
        self.engine.version = share.version
        with self._span(f"update/{role}"):
            return self.engine.update(role, share.batch, objective, totals)

    def measure(self, share: Share, role: str, objective: Objective, totals: LossDenominators) -> Metrics:
        self.engine.version = share.version
        return self.engine.measure(role, share.batch, objective, totals)

    def offer_weights(self, version: int) -> WeightOffer:
        self.engine.version = version
        with self._span("sync"):
            return self.engine.offer_weights()

    def save(self, version: int, directory: Path) -> None:
        self.engine.version = version
        with self._span("checkpoint"):
            self.engine.save(directory)

    def begin_saving(self, version: int, directory: Path, report: str) -> None:
        """Returns before the files are written. Progress is in the file `report` (`snapshot.wait_until_written`)."""
        self.engine.version = version
        write_in_background(self.engine.snapshot(copy=True), directory, report)

    def load(self, directory: Path) -> int:
        self.engine.load(directory)
        return self.engine.version

    def exported_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.cpu()) for name, tensor in self.engine.export_weights()]

    def _span(self, name: str) -> AbstractContextManager[None]:
        """A span in this rank's own lane. Next to the trainer's lane, it shows which rank the others wait for."""
        return span(f"{TRAINER_LANE}-rank-{self.engine.ranks.rank}", name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class DistributedTrainEngine(TrainEngine):
    """Several ranks as one engine. The driver holds per-token arrays, never a weight."""

    def __init__(
        self,
        group: RankGroup,
        algorithm: Algorithm,
        *,
        max_response_length: int,
        first_version: int = 0,
        groups: Mapping[str, RankGroup] | None = None,
        share_prefix: bool = False,
    ) -> None:
        """`group` holds the models of all roles that `groups` does not name. `max_response_length` and `share_prefix`
        are those of the ranks' engines."""
        self.algorithm, self.version = algorithm, first_version
        self._group, self._by_role = group, dict(groups or {})
        self._groups = list(dict.fromkeys([group, *self._by_role.values()]))
        self.samplers: Mapping[int, tuple[str, int]] = {}
        """Addresses of the rollout engines that ranks host for this process, by rank."""
        self._max_response_length, self._share_prefix = max_response_length, share_prefix

    def prepare(self) -> None:
        for group in self._groups:
            group.run_on_all_ranks("prepare")

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        role, _ = SCORED_BY.get(what, ("policy", what))  # an unknown score is an error on the ranks
        group = self._group_of(role)
        rows = self._shares([[row] for row in range(len(batch))], batch, group)
        results = group.scatter("score", [(Share(self.version, batch.select(share)),) for share in rows], what)
        scores: list[AnyArray] = [np.empty(0, np.float32)] * len(batch)
        for share, result in zip(rows, results, strict=True):
            for row, scored in zip(share, result, strict=True):
                scores[row] = scored
        return scores

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        group, shares, totals = self._cut(role, batch, objective)
        # The ranks exchange their sums, so each returns the metrics of the whole mini-batch.
        return group.scatter("update", shares, role, objective, totals)[0]

    def measure(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        group, shares, totals = self._cut(role, batch, objective)
        return group.scatter("measure", shares, role, objective, totals)[0]

    def take_updates(self) -> Batch | None:
        group = self._group_of("policy")
        shares = group.scatter("take_updates", [()] * group.data_size) if self.settings.keeps_updates else []
        return joined_shares([share for share in shares if share is not None])

    def _cut(
        self, role: str, batch: Batch, objective: Objective
    ) -> tuple[RankGroup, list[tuple[Share]], LossDenominators]:
        """The ranks of a role, each data rank's share of a mini-batch, and the counts of the whole."""
        group = self._group_of(role)
        rows = self._shares(units(batch, objective.unit), batch, group)
        shares = [(Share(self.version, batch.select(share)),) for share in rows]
        return group, shares, count(batch, self._max_response_length)

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        return self._group.run_on_all_ranks("utilisation", dict(phases))

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole model in the driver's memory, for tools and tests. In a run, the ranks publish the weights
        themselves (`offer_weights`)."""
        yield from self._group_of("policy").run_on_all_ranks("exported_weights")

    def offer_weights(self) -> WeightOffer:
        return self._group_of("policy").run_on_all_ranks("offer_weights", self.version)

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        if on_copied is None:
            for group in self._groups:
                group.run_on_all_ranks("save", self.version, directory)
            return
        report = f".{uuid.uuid4().hex}.json"
        self._group.run_on_all_ranks("begin_saving", self.version, directory, report)
        on_copied()
        wait_until_written(directory / report)

    def load(self, directory: Path) -> None:
        for group in self._groups:
            self.version = group.run_on_all_ranks("load", directory)

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _group_of(self, role: str) -> RankGroup:
        return self._by_role.get(role, self._group)

    def _shares(self, units: list[list[int]], batch: Batch, group: RankGroup) -> list[list[int]]:
        if group.data_size == 1:
            return [[*range(len(batch))]]
        return (shares_of_groups if self._share_prefix else shares_of)(units, batch, group.data_size)


def shares_of(units: Sequence[Sequence[int]], batch: Batch, num_shares: int) -> list[list[int]]:
    """The rows of each of `num_shares` shares of nearly equal work, whole units each; a share may be empty.

    The rows keep their order within a share.
    """
    return _shares(units, [sum(workload(len(batch.experiences[row])) for row in rows) for rows in units], num_shares)


def shares_of_groups(units: Sequence[Sequence[int]], batch: Batch, num_shares: int) -> list[list[int]]:
    """Like `shares_of`, for sequences that share prefixes. Keeps the members of a group on one rank, unless that
    increases the work of the busiest rank."""
    prefixes = prefixes_of(batch)

    def work(rows: Sequence[int]) -> int:
        return sum(workload(segment.stop) - workload(segment.first) for segment in prefixes.tree(rows).segments)

    groups: dict[str, list[int]] = {}
    for rows in units:
        groups.setdefault(batch.experiences[rows[0]].group_id, []).extend(rows)
    together = _shares([*groups.values()], [work(rows) for rows in groups.values()], num_shares)
    return min(together, shares_of(units, batch, num_shares), key=lambda shares: max(map(work, shares)))


def _shares(units: Sequence[Sequence[int]], work: Sequence[int], num_shares: int) -> list[list[int]]:
    return [[row for unit in sorted(chosen) for row in units[unit]] for chosen in partition(work, num_shares)]
