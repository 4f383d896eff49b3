"""Components of a run that call methods of RayPPOTrainer, which users override."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trivium.foundation.errors import DataError
from trivium.foundation.metrics import declare_missing
from trivium.frontdoors.verl.objects.validation import Validator
from trivium.protocols import Monitor, Renderer
from trivium.runtime.stage import Stage
from trivium.trainer import Trainer
from trivium.types import Metrics

_SHOWN = {"inputs": "input", "outputs": "output", "scores": "score"}
"""Argument of `_maybe_log_val_generations` -> the key of a sample whose values it lists."""


def numbers(metrics: object, method: str) -> Metrics:
    """Converts the metrics of an overridden method to floats. Raises DataError unless they are numbers by name."""
    if not isinstance(metrics, Mapping):
        raise DataError(f"metrics from {method}", f"a {type(metrics).__name__}", "return a mapping from name to number")
    measured: Metrics = {}
    for name, value in metrics.items():
        try:
            measured[str(name)] = float(value)
        except (TypeError, ValueError):
            raise DataError(
                f"the number {name!r} from {method}", f"{value!r:.60}", "leave it out, or measure it"
            ) from None
    declare_missing(measured, f"what an override of RayPPOTrainer.{method} measures")
    return measured


@dataclass(frozen=True)
class TrainerStage(Stage):
    """A stage that renders messages with the user's tokenizer."""

    user_renderer: Renderer

    @cached_property
    def renderer(self) -> Renderer:
        return self.user_renderer


@dataclass
class OverridableMonitor:
    """A monitor that adds to the row of a step what overridden methods measured before it."""

    monitor: Monitor
    measured: Metrics = field(default_factory=dict[str, float], init=False)
    """The metrics of the step in progress."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "train/version" in metrics:  # the row of a step, not of a validation
            metrics, self.measured = {**self.measured, **metrics}, {}
        self.monitor.log(step, metrics)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.monitor.table(step, name, rows)

    def state(self) -> dict[str, Any]:
        return self.monitor.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.monitor.restore(state)

    def close(self) -> None:
        self.monitor.close()


@dataclass
class OverridableTrainer(Trainer):
    """A Trainer that saves through a method that users override."""

    owner: Any = None

    async def save_checkpoint(self) -> None:
        await asyncio.to_thread(self.owner._save_checkpoint)

    async def save_now(self) -> None:
        """Saves a checkpoint. `RayPPOTrainer._save_checkpoint` calls it."""
        await super().save_checkpoint()


@dataclass
class OverridableValidator(Validator):
    """A validator that is called through a method that users override."""

    owner: Any = None

    async def run(self, version: int) -> Metrics:
        # An override runs in a thread, and its `super()._validate()` samples on this loop.
        self.owner._validating = asyncio.get_running_loop(), self, version
        self.results, self.samples_seen = {}, []
        metrics = numbers(await asyncio.to_thread(self.owner._validate), "_validate")
        if self.samples_seen:
            arguments = {name: [sample[key] for sample in self.samples_seen] for name, key in _SHOWN.items()}
            await asyncio.to_thread(self.owner._maybe_log_val_generations, **arguments)
            self.owner._dump("trainer.validation_data_dir", version, self.samples_seen)
        return {**self.results, **metrics}

    async def validate(self, version: int) -> Metrics:
        """Validates. `RayPPOTrainer._validate` calls it."""
        return await super().run(version)
