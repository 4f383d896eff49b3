"""The bases of samplers that verl's users write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Any

from torch.utils.data import Sampler


class AbstractSampler(Sampler[int], ABC):
    """A sampler that `data.sampler` can name."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None:
        """`data_config` is the section `data` of the config."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from every batch. `state_dict()` and `load_state_dict(state)` allow resuming: after
    loading, `__iter__` continues at the position of the state."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Called after the advantages of each train step are known, with its batch (`BatchView`)."""
