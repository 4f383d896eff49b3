"""The config section of resampling, which draws the trajectories of a step anew by their rewards.

Legend: B sequences, T trajectories.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trivium.algorithms.estimators.base import Members
from trivium.config import Config, RunConfig
from trivium.foundation.errors import Problem
from trivium.foundation.randomness import stream, uniforms
from trivium.types import Batch

_FLOOR = 1e-8
"""Added to each weight, so that a step whose rewards are all 0 draws uniformly."""
SOURCE = "PF-PPO, Shen and Zhang 2024"


class Resampling(Config):
    """Draws as many trajectories as the step has, with replacement."""

    weights: Literal["power", "extremes", "best"] = "power"
    """What the probability of a trajectory is proportional to: `power` a power of its absolute reward; `extremes` 1 if
    its reward is the highest or the lowest of the step, else 0; `best` 4 if its reward is the highest, else 1."""
    power: float = Field(default=2.0, gt=0)
    """The exponent of the weights `power`."""

    @property
    def formula(self) -> str:
        """What the probability of a trajectory is proportional to."""
        return {
            "power": f"|R|^{self.power:g}",
            "extremes": "1 if R is the highest or lowest reward of the step, else 0",
            "best": "4 if R is the highest reward of the step, else 1",
        }[self.weights]

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Yields the problem of an exponent without effect."""
        del run
        if self.weights != "power" and self.power != 2.0:
            yield Problem(
                f"{where}.power",
                f"the exponent {self.power:g} with weights {self.weights!r}",
                "these weights have no exponent",
                "leave it out, or set weights: power",
            )

    def rows(self, batch: Batch, trajectories: Members, seed: int) -> list[int]:
        """Returns the rows of the drawn trajectories, in the order of the batch. `seed` is the run's: the draws are a
        function of it and of the names of the batch's groups."""
        # In reverse, so that the first row of a trajectory is the one that stays in the dictionary.
        first = {int(trajectory): row for row, trajectory in reversed([*enumerate(trajectories.of_row)])}
        owners = [batch.experiences[first[trajectory]] for trajectory in range(len(trajectories.score))]
        names = [(e.group_id, e.index, *filter(None, [e.participant])) for e in owners]
        addresses = np.array([stream(seed, "resample", *name) for name in names], np.uint64)
        drawn = self.draws(trajectories.score.numpy(), uniforms(addresses, 0))
        times = np.bincount(drawn, minlength=len(owners))[trajectories.of_row.numpy()]
        return np.repeat(np.arange(len(batch)), times).tolist()

    def draws(self, score: npt.NDArray[np.float64], uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Returns the trajectory of each draw: `score` (T,) holds rewards, `uniform` a number in [0, 1) per draw."""
        ends = np.cumsum(self._weights_of(score) + _FLOOR)
        # A number just below 1 times the total may round to the total, whose position is one past the last.
        return np.minimum(np.searchsorted(ends, uniform * ends[-1:], side="right"), len(ends) - 1)

    def _weights_of(self, score: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if self.weights == "power":
            return np.abs(score) ** self.power
        best = score == score.max(initial=-np.inf)
        if self.weights == "best":
            return np.where(best, 4.0, 1.0)
        return np.where(best | (score == score.min(initial=np.inf)), 1.0, 0.0)
