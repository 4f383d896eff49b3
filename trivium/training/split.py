"""The train engine of a driver: cuts every batch into shares, one per data rank, and puts the answers together."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from trivium.models.loss import Totals
from trivium.phases import Phase
from trivium.protocols import Algorithm, Objective, TrainEngine
from trivium.training.balance import partition, workload
from trivium.training.batching import count, units
from trivium.training.saving import wait_for
from trivium.types import AnyArray, Batch, Metrics


class RankGroup(Protocol):
    """Processes that each hold a train engine (`TorchTrainEngine`), driven together. Raises RoleFailed where one
    dies."""

    @property
    def data_size(self) -> int:
        """How many shares a batch is cut into."""
        ...

    def everywhere(self, method: str, *args: Any) -> Any:
        """The same call on every rank; what the first one answers."""
        ...

    def shared_out(self, method: str, shares: Sequence[tuple[Any, ...]], *args: Any) -> list[Any]:
        """`method(*shares[i], *args)` on the ranks of data rank i; one answer per data rank."""
        ...

    def close(self) -> None:
        """Dismisses the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """What one data rank is given of a mini-batch."""

    version: int
    """Train steps behind the policy: where the schedule of the learning rate stands."""
    batch: Batch


class RankVerbs:
    """What a rank does when it is told to: the other side of `SplitTrainEngine`, around the rank's own engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def score(self, share: Share, what: str) -> Sequence[AnyArray]:
        self.engine.version = share.version
        return self.engine.score(share.batch, what)

    def update(self, share: Share, role: str, objective: Objective, totals: Totals) -> Metrics:
        self.engine.version = share.version
        return self.engine.update(role, share.batch, objective, totals)

    def sync_weight(self, version: int) -> bool:
        self.engine.version = version
        return self.engine.sync_weight()

    def save(self, version: int, directory: Path) -> None:
        self.engine.version = version
        self.engine.save(directory)

    def begin_saving(self, version: int, directory: Path, report: str) -> None:
        self.engine.version = version
        self.engine.begin_saving_apart(directory, report)

    def load(self, directory: Path) -> int:
        self.engine.load(directory)
        return self.engine.version

    def exported(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.cpu()) for name, tensor in self.engine.export_weights()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class SplitTrainEngine(TrainEngine):
    """Several ranks as one engine. The driver holds per-token arrays, never a weight."""

    def __init__(
        self, group: RankGroup, algorithm: Algorithm, *, max_response_length: int, first_version: int = 0
    ) -> None:
        """`max_response_length` as the ranks' engines have it."""
        self.group, self.algorithm, self.version = group, algorithm, first_version
        self._max_response_length = max_response_length

    def prepare(self) -> None:
        self.group.everywhere("prepare")

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        rows = shares_of([[row] for row in range(len(batch))], batch, self.group.data_size)
        answers = self.group.shared_out("score", [(Share(self.version, batch.select(mine)),) for mine in rows], what)
        scores: list[AnyArray] = [np.empty(0, np.float32)] * len(batch)
        for mine, answer in zip(rows, answers, strict=True):
            for row, scored in zip(mine, answer, strict=True):
                scores[row] = scored
        return scores

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        totals = count(batch, self._max_response_length)
        rows = shares_of(units(batch, objective.unit), batch, self.group.data_size)
        shares = [(Share(self.version, batch.select(mine)),) for mine in rows]
        return self.group.shared_out("update", shares, role, objective, totals)[0]

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        return self.group.everywhere("utilisation", dict(phases))

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole model in the driver's memory: for tools and tests. A run's weights travel from the ranks
        themselves (`sync_weight`)."""
        yield from self.group.everywhere("exported")

    def sync_weight(self) -> bool:
        return self.group.everywhere("sync_weight", self.version)

    def save(self, directory: Path) -> None:
        self.group.everywhere("save", self.version, directory)

    def begin_saving(self, directory: Path) -> Callable[[], None]:
        report = f".{uuid.uuid4().hex}.json"
        self.group.everywhere("begin_saving", self.version, directory, report)
        return partial(wait_for, directory / report)

    def load(self, directory: Path) -> None:
        self.version = self.group.everywhere("load", directory)

    def save_weights(self, directory: Path) -> None:
        self.group.everywhere("save_weights", directory)

    def close(self) -> None:
        """Dismisses the ranks."""
        self.group.close()


def shares_of(together: Sequence[Sequence[int]], batch: Batch, number: int) -> list[list[int]]:
    """The rows of each of `number` shares of nearly equal work, whole units each; a share may be empty.

    The rows keep their order within a share.
    """
    work = [sum(workload(len(batch.experiences[row])) for row in rows) for rows in together]
    return [[row for unit in sorted(chosen) for row in together[unit]] for chosen in partition(work, number)]
