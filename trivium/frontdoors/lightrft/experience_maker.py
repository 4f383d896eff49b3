"""Makes experiences from prompts: completions, rewards, model scores, and advantages over the rollout of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from trivium.algorithms import GroupAlgorithm
from trivium.frontdoors.lightrft.experience import ExperienceVL
from trivium.frontdoors.lightrft.loaded_prompts import PromptBatch, read_batch
from trivium.frontdoors.lightrft.ppo_objective import approximate_kl
from trivium.frontdoors.lightrft.reward_scoring import RewardScorer, Sample
from trivium.frontdoors.lightrft.rollout_engine import Rollouts
from trivium.loops import add_scores
from trivium.training.learner import Learner
from trivium.training.ranks import Ranks
from trivium.types import AnyArray, Batch, Experience, Group, Metrics, Sampling, StopReason, Trajectory

SCORERS = {
    "old": ("actor", "log_prob"),
    "entropy": ("actor", "entropy"),
    "ref": ("reference", "log_prob"),
    "values": ("critic", "values"),
}
"""Score -> (the model that computes it, its name in `Learner.score`)."""


@dataclass(frozen=True)
class Models:
    """The models that score experiences, with the interface that `loops.add_scores` needs."""

    learners: dict[str, Learner]

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        role, kind = SCORERS[what]
        return self.learners[role].score(batch, kind)


@dataclass
class ExperienceMaker:
    """Makes the experiences of one rank. Statistics of advantages and rewards are computed over all ranks."""

    rollouts: Callable[[], Rollouts]
    """Returns the rollout engine, created on first use."""
    models: Models
    scorer: RewardScorer
    tokenizer: Any
    ranks: Ranks
    algorithm: Callable[[], GroupAlgorithm]
    """Returns the algorithm with the current KL coefficient."""
    with_entropy: bool
    """Whether to compute the entropy of each token."""
    metrics: Metrics = field(default_factory=dict[str, float])
    """Metrics of the last rollout over all ranks, by the core's names, such as the engine-trainer mismatch."""

    def generate(
        self, loaded: Any, first: int, *, purpose: str, version: int, samples: int, sampling: Sampling
    ) -> list[Group]:
        """Returns the rewarded groups of this rank's batch of prompts.

        `first` is the number of the batch's first prompt in the run. It seeds the sampling.
        """
        batch = read_batch(loaded)
        names = [str(first + row) for row in range(len(batch.prompts))]
        groups = self.rollouts().groups(
            batch, names, purpose=purpose, version=version, samples=samples, sampling=sampling
        )
        return self._rewarded(batch, groups)

    def _rewarded(self, batch: PromptBatch, groups: Sequence[Group]) -> list[Group]:
        living = [(row, member) for row, group in enumerate(groups) for member in group.alive]
        samples = [self._sample(batch, row, member) for row, member in living]
        scored = self.scorer.score(samples)
        given = {
            (row, member.index): replace(
                member,
                rewards={"reward": float(scored.rewards[number])},
                metrics={name: float(values[number]) for name, values in scored.metrics.items()},
            )
            for number, (row, member) in enumerate(living)
        }
        return [
            replace(group, trajectories=tuple(given.get((row, member.index), member) for member in group.trajectories))
            for row, group in enumerate(groups)
        ]

    def _sample(self, batch: PromptBatch, row: int, member: Trajectory) -> Sample:
        (turn,) = member.turns
        tokens = np.concatenate([turn.prompt_tokens, turn.tokens])
        prompt = str(batch.prompts[row])
        return Sample(
            prompt=prompt,
            completion=turn.text,
            query=self.tokenizer.decode(tokens.tolist()),
            tokens=tokens,
            response_tokens=turn.tokens,
            label=batch.labels[row],
            reference=batch.references[row],
            images=turn.media,
            truncated=turn.stop_reason is StopReason.LENGTH,
        )

    def make_experience_list(self, groups: Sequence[Group], micro_rollout_batch_size: int) -> list[ExperienceVL]:
        """Returns the experiences of these groups in order, `micro_rollout_batch_size` sequences each.

        The current models score them. Advantages are computed over the rollout of all ranks. All ranks must call it; a
        rank may have no groups.
        """
        batch, self.metrics = self.judged(groups)
        images = self.rollouts().images if any(e.media for e in batch.experiences) else None
        info, tasks = _info(batch, groups), {group.group_id: group.task.columns for group in groups}
        made: list[ExperienceVL] = []
        for start in range(0, len(batch), micro_rollout_batch_size):
            rows = range(start, min(start + micro_rollout_batch_size, len(batch)))
            experience = ExperienceVL.from_batch(batch.select(rows), processor=images)
            experience.info.update(_rows(info, rows))
            columns = [tasks[batch.experiences[row].group_id] for row in rows]
            experience.labels = [each.get("label") for each in columns]
            experience.references = [each.get("reference") for each in columns]
            made.append(experience)
        return made

    def judged(self, groups: Sequence[Group]) -> tuple[Batch, Metrics]:
        """Returns (the experiences with scores, advantages and returns as columns, the metrics of all ranks)."""
        algorithm = self.algorithm()
        needs = set(algorithm.needs) | ({"entropy"} if self.with_entropy else set())
        if "reference" in self.models.learners:
            needs |= {"ref"}
        batch = add_scores(cast(Any, self.models), algorithm.batch(groups), needs)
        everyone = gathered(self.ranks, _light(batch))
        whole, metrics = algorithm.advantages(together(everyone))
        first = sum(map(len, everyone[: self.ranks.data_rank]))
        mine = whole.select(range(first, first + len(batch)))
        seen = (
            replace(e, media=own.media, extra=own.extra)
            for e, own in zip(mine.experiences, batch.experiences, strict=True)
        )
        done = replace(mine, experiences=tuple(seen), metrics={})
        if "ref_log_prob" in done.columns:
            done = done.with_columns(kl=approximate_kl(algorithm, done))
        return done, metrics


def gathered(ranks: Ranks, value: Any) -> list[Any]:
    """Returns the values of all data ranks, in order."""
    return list(cast("list[Any]", ranks.all_gather(value)))


def _light(batch: Batch) -> Batch:
    """Returns the batch without image bytes and `extra` data, to gather less data."""
    return replace(batch, experiences=tuple(replace(e, media=(), extra={}) for e in batch.experiences), metrics={})


def together(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches. Keeps the columns that all non-empty batches have."""
    filled = [batch for batch in batches if len(batch)]
    if not filled:
        return batches[0]
    names = set.intersection(*(set(batch.columns) for batch in filled))
    experiences = tuple(e for batch in filled for e in batch.experiences)
    return Batch(experiences, {name: tuple(a for batch in filled for a in batch.columns[name]) for name in names})


def _info(batch: Batch, groups: Sequence[Group]) -> dict[str, Any]:
    """Returns the statistics of each sequence, (B,), that the trainer reports for a rollout."""
    experiences, kl = batch.experiences, batch.columns.get("kl")
    of = {(group.group_id, member.index): member.metrics for group in groups for member in group.alive}
    names = dict.fromkeys(name for each in of.values() for name in each)
    return {
        "reward": _numbers(e.reward for e in experiences),
        "response_length": _numbers(e.num_response_tokens for e in experiences),
        "total_length": _numbers(len(e) for e in experiences),
        "return": _numbers(_first(e, row) for e, row in zip(experiences, batch.columns["returns"], strict=True)),
        "kl": _numbers(0.0 if kl is None else _mean(e, kl[row]) for row, e in enumerate(experiences)),
        "reward_metrics": {
            name: _numbers(of[e.group_id, e.index].get(name, 0.0) for e in experiences) for name in names
        },
    }


def _rows(info: dict[str, Any], rows: range) -> dict[str, Any]:
    """Returns the statistics of these rows as tensors."""
    return {
        name: _rows(values, rows) if isinstance(values, dict) else torch.as_tensor(values[rows.start : rows.stop])
        for name, values in info.items()
    }


def _mean(e: Experience, row: AnyArray) -> float:
    return float(row[e.response_mask].mean()) if e.response_mask.any() else 0.0


def _first(e: Experience, row: AnyArray) -> float:
    """Returns the return at the first action."""
    trained = np.flatnonzero(e.response_mask)
    return float(row[trained[0]]) if len(trained) else 0.0


def _numbers(values: Any) -> AnyArray:
    return np.fromiter(values, np.float64)
