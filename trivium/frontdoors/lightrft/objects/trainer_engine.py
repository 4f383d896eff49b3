"""The models of a trainer as the core's train engine, which `loops.train_step` drives."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from trivium.foundation.errors import RunDirError
from trivium.frontdoors.lightrft.objects.checkpoints import plain_json, read_into, trained_tensors
from trivium.frontdoors.lightrft.objects.models.actor import ActorVL
from trivium.frontdoors.lightrft.objects.models.critic import CriticVL
from trivium.frontdoors.lightrft.objects.step_algorithm import RolloutUpdate
from trivium.frontdoors.lightrft.objects.strategy import Strategy, core_of
from trivium.models.heads.loss import LossDenominators
from trivium.protocols import Objective, TrainEngine
from trivium.training.batching import count
from trivium.training.distributed.ranks import Ranks
from trivium.training.learner import Learner
from trivium.training.optim import Optimizer
from trivium.training.role_models import SCORED_BY
from trivium.training.snapshot import TensorFile, read_tensors, take_snapshot
from trivium.types import AnyArray, Batch, Metrics, SaveStrategy


@dataclass(frozen=True)
class Trained:
    """A model, its optimizer and its scheduler."""

    model: ActorVL | CriticVL
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    """One of torch's, or an object with its methods."""


class TrainerEngine(TrainEngine):
    """Scores with the models that a trainer was given, and trains policy and critic with its optimizers.

    Every rank has its share of each batch. All ranks must call every method.
    """

    def __init__(
        self,
        strategy: Strategy,
        trained: Mapping[str, Trained],
        reference: ActorVL | None = None,
        average: ActorVL | None = None,
        *,
        max_norm: float,
        max_response_length: int,
        train_sequences: int,
        score_sequences: int,
    ) -> None:
        """`trained` has the role `policy`, and perhaps `critic`. `average` is saved with them.

        A micro-batch has at most `train_sequences` sequences in updates, and `score_sequences` in scores. `max_norm` 0
        disables gradient clipping.
        """
        self._trained, self._average = trained, average
        self._max_norm, self.ranks = max_norm or math.inf, strategy.ranks
        models = {role: entry.model for role, entry in trained.items()}
        models |= {} if reference is None else {"reference": reference}

        def opened(role: str, sequences: int, *training: Any) -> Learner:
            limits = {"max_response_length": max_response_length, "max_sequences": sequences}
            return strategy.learner(role, models[role], *training, **limits)

        self.learners = {
            role: opened(role, train_sequences, entry.optimizer, entry.scheduler) for role, entry in trained.items()
        }
        # A second learner over the same model: a pass without gradients keeps no activations and may take more
        # sequences.
        self._scoring = {role: opened(role, score_sequences) for role in models}

    def prepare(self) -> None:
        """Does nothing: the models are open."""

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        role, kind = SCORED_BY[what]
        return self._scoring[role].score(batch, kind)

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        """Runs one optimizer step of a role at the learning rate of its scheduler, or the update of a whole rollout."""
        if isinstance(objective, RolloutUpdate):
            objective.train(batch)
            return {}
        learner: Any = self.learners[role]
        totals = _totals(self.ranks, batch, learner.max_response_length)
        who = f"the {role} in train step {self.version + 1}"
        return learner.update(batch, objective, None, self._max_norm, step=self.version, who=who, totals=totals)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._trained["policy"].model
        assert isinstance(model, ActorVL)
        return model.export_weights()

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        """Writes the weights and the optimizer of each trained role, and the moving average: `<role>.safetensors`,
        `<role>-optimizer.safetensors`, `average.safetensors`, and `engine.json` with the version, the settings of the
        optimizers and the schedulers."""
        files = [TensorFile(stem, tensors) for stem, tensors in self._tensors().items()]
        files += [TensorFile(f"{role}-optimizer", self._optimizer(role).state()) for role in self._trained]
        counters = plain_json(
            {"version": self.version, "schedules": {role: _schedule(entry) for role, entry in self._trained.items()}}
        )

        def finish(path: Path) -> None:
            (path / "engine.json").write_text(json.dumps(counters, indent=1) + "\n", encoding="utf-8")

        take_snapshot(files, self.ranks, SaveStrategy.UNRESTRICTED, finish, copy=False).write(directory)

    def load(self, directory: Path) -> None:
        """Loads a checkpoint of `save`, on any number of ranks. Raises RunDirError if it is of other models."""
        counters = json.loads((directory / "engine.json").read_text(encoding="utf-8"))
        for stem, tensors in self._tensors().items():
            read_into(tensors, directory, stem)
        for role, entry in self._trained.items():
            schedule = counters["schedules"][role]
            if len(entry.optimizer.param_groups) != len(schedule["groups"]):
                cause = "it had other groups of parameters"
                raise RunDirError(f"the optimizer of {directory}", cause, "build it as it was")
            self._optimizer(role).restore(read_tensors(directory, f"{role}-optimizer"))
            for group, saved in zip(entry.optimizer.param_groups, schedule["groups"], strict=True):
                group.update(saved)
            if entry.scheduler is not None and schedule["scheduler"] is not None:
                entry.scheduler.load_state_dict(schedule["scheduler"])
        self.version = int(counters["version"])

    def _optimizer(self, role: str) -> Optimizer:
        optimizer = self.learners[role].optimizer
        assert optimizer is not None
        return optimizer

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns what is trained, by the stem of its file."""
        tensors = {role: trained_tensors(learner.model) for role, learner in self.learners.items()}
        average = {} if self._average is None else {"average": trained_tensors(core_of(self._average))}
        return {**tensors, **average}


def _totals(ranks: Ranks, batch: Batch, max_response_length: int) -> LossDenominators:
    """Returns the loss denominators of an optimizer step: counts over the shares of all ranks."""
    counts = ranks.all_gather(count(batch, max_response_length))
    sums: dict[str, int | None] = {}
    # These are equal on all ranks, and a rollout has no sources.
    for name in {f.name for f in fields(LossDenominators)} - {"max_response_length", "sources", "dp_size"}:
        numbers = [number for denominators in counts if (number := getattr(denominators, name)) is not None]
        sums[name] = sum(numbers) if numbers else None
    return replace(counts[0], **sums)


def _schedule(trained: Trained) -> dict[str, Any]:
    """Returns the settings of an optimizer, such as its learning rates, and the state of its scheduler."""
    # Without `params`, whose tensors belong to this process.
    groups = [{k: v for k, v in g.items() if _is_plain(v)} for g in trained.optimizer.param_groups]
    return {"groups": groups, "scheduler": None if trained.scheduler is None else trained.scheduler.state_dict()}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast("list[object]", value)))
    return value is None or isinstance(value, bool | int | float | str)
