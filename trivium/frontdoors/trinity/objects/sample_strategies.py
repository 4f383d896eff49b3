"""Sample strategies with Trinity-RFT's methods: that of a run, and those that users write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivium.config import RunConfig
from trivium.foundation.errors import TriviumError
from trivium.frontdoors.trinity.config.config_object import Config
from trivium.frontdoors.trinity.config.registries import SAMPLE_STRATEGY
from trivium.frontdoors.trinity.config.trinity_config import TrinityConfig
from trivium.frontdoors.trinity.objects.experiences import Experience, Experiences
from trivium.types import Metrics

if TYPE_CHECKING:
    from trivium.frontdoors.trinity.objects.core_trainer import CoreTrainer

Sampled = tuple["Experiences | list[Experience]", Metrics, list[dict[str, Any]]]
"""(experiences of a train step, metrics, rollouts to show)."""


class ExperienceReader:
    """Reads the experiences that explorers wrote."""

    def __init__(self, trainer: CoreTrainer) -> None:
        self._trainer = trainer
        self.metrics: Metrics = {}
        """Metrics of the last read."""
        self.samples: list[dict[str, Any]] = []
        """Rollouts of the last read, to show."""

    async def read_async(self, batch_size: int | None = None) -> list[Experience]:
        """Waits for the experiences of the next train step. Raises StopAsyncIteration at the end of the data."""
        batch, self.metrics, self.samples = await self._trainer.sample(self._trainer.train_step_num)
        if batch_size not in (None, len(batch)):
            raise TriviumError(
                f"{batch_size} experiences", f"a step has {len(batch)}", "set buffer.train_batch_size, and read without"
            )
        return list(batch)

    read = read_async


class SampleStrategy:
    """Selects the experiences of a train step. A subclass implements `sample`."""

    def __init__(self, buffer_config: Any, **kwargs: Any) -> None:
        """`kwargs` are `algorithm.sample_strategy_args`. A Trainer sets `exp_buffer`, the reader of experiences."""
        self.buffer_config, self.kwargs = buffer_config, kwargs
        self.exp_buffer: ExperienceReader | None = None

    async def sample(self, step: int, **kwargs: Any) -> Sampled:
        """Returns the experiences of a train step, metrics, and rollouts to show. Raises StopAsyncIteration at the end
        of the data."""
        raise NotImplementedError(f"{type(self).__name__}.sample")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of a user's strategy. Checkpoints do not contain it."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""


class DefaultSampleStrategy(SampleStrategy):
    """The experiences in the order of the run's `buffer.strategy`."""

    async def sample(self, step: int, **kwargs: Any) -> Sampled:
        if self.exp_buffer is None:
            raise TriviumError(f"the experiences of step {step}", "no Trainer has this strategy", "use it in a Trainer")
        return await self.exp_buffer.read_async(**kwargs), self.exp_buffer.metrics, self.exp_buffer.samples


@dataclass(frozen=True)
class SampleStrategyView:
    """The sample strategy of a run."""

    trainer: CoreTrainer

    async def sample(self, step: int) -> tuple[Experiences, Metrics, list[dict[str, Any]]]:
        """Waits for the groups of a train step. Returns (experiences, metrics, rollouts to show).

        Raises StopAsyncIteration at the end of the data.
        """
        return await self.trainer.sample(step - 1)  # Trinity-RFT counts from 1 the steps that the core counts from 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer.groups.strategy, name)


def strategy_of(config: object, trainer: CoreTrainer) -> Any:
    """Returns the user's strategy if the config has Trinity-RFT's form and names one, else the strategy of the run."""
    if isinstance(config, RunConfig):
        return SampleStrategyView(trainer)
    trinity = TrinityConfig(config)
    target = SAMPLE_STRATEGY.get(trinity.text("algorithm.sample_strategy") or "default")
    of_user = isinstance(target, type) and issubclass(target, SampleStrategy)
    if not of_user or target is DefaultSampleStrategy:
        return SampleStrategyView(trainer)
    strategy = target(buffer_config=Config.of(trinity.plain).buffer, **trinity["algorithm.sample_strategy_args"])
    strategy.exp_buffer = ExperienceReader(trainer)
    return strategy
