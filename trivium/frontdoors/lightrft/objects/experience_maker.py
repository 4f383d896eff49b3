"""Makes experiences from prompts: completions, rewards, model scores, and advantages over the rollout of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from trivium.algorithms import GroupAlgorithm
from trivium.frontdoors.lightrft.objects.loaded_prompts import PromptBatch, read_batch
from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL
from trivium.frontdoors.lightrft.objects.models.rollout_engine import Rollouts
from trivium.frontdoors.lightrft.objects.ppo_objective import approximate_kl
from trivium.frontdoors.lightrft.rewards.reward_scoring import RewardScorer, Sample
from trivium.loops import add_scores
from trivium.training.batching import joined
from trivium.training.distributed.ranks import Ranks
from trivium.training.learner import Learner
from trivium.types import AnyArray, Batch, Group, Metrics, Sampling, StopReason, Trajectory

SCORERS = {
    "old": ("actor", "log_prob"),
    "entropy": ("actor", "entropy"),
    "ref": ("reference", "log_prob"),
    "values": ("critic", "values"),
}
"""Score -> (the model that computes it, its name in `Learner.score`)."""

_PARTS = ("format_reward", "accuracy_reward")
"""Parts of a reward that an evaluation reports."""


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

    def evaluated(self, loader: Any, version: int, samples: int, sampling: Sampling) -> dict[str, float]:
        """Returns means over the completions of all prompts of all ranks.

        A prompt is sampled with the same random numbers in every evaluation, independent of training.
        """
        self.rollouts().adopt(version)
        purpose, groups = f"eval-{self.ranks.data_rank}", list[Group]()
        with torch.random.fork_rng(devices=[]):  # a loader may draw from the global generator
            for loaded in loader:
                groups += self.generate(
                    loaded, len(groups), purpose=purpose, version=version, samples=samples, sampling=sampling
                )
        members = [member for group in groups for member in group.alive]
        rows = [
            (each.reward, *(each.metrics.get(name, 0.0) for name in _PARTS), float(each.num_tokens)) for each in members
        ]
        everyone = [row for part in self.ranks.all_gather(rows) for row in part]
        names = ("reward", *_PARTS, "response_length")
        totals = np.asarray(everyone, np.float64).reshape(-1, len(names)).sum(0) / max(len(everyone), 1)
        means = {f"{name}_mean": float(mean) for name, mean in zip(names, totals, strict=True)}
        return {**means, "num_samples": float(len(everyone))}

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
        columns = {group.group_id: group.task.columns for group in groups}
        metrics = {(group.group_id, member.index): member.metrics for group in groups for member in group.alive}
        names = dict.fromkeys(name for each in metrics.values() for name in each)
        made: list[ExperienceVL] = []
        for start in range(0, len(batch), micro_rollout_batch_size):
            rows = range(start, min(start + micro_rollout_batch_size, len(batch)))
            experience = ExperienceVL.from_batch(batch.select(rows), processor=images)
            shown = [(e.group_id, e.index) for e in (batch.experiences[row] for row in rows)]
            experience.info["reward_metrics"] = {
                name: torch.tensor([metrics[each].get(name, 0.0) for each in shown], dtype=torch.float64)
                for name in names
            }
            experience.labels = [columns[group].get("label") for group, _ in shown]
            experience.references = [columns[group].get("reference") for group, _ in shown]
            made.append(experience)
        return made

    def judged(self, groups: Sequence[Group]) -> tuple[Batch, Metrics]:
        """Returns (the experiences with scores, advantages and returns as columns, the metrics of all ranks)."""
        algorithm = self.algorithm()
        needs = set(algorithm.needs) | ({"entropy"} if self.with_entropy else set())
        if "reference" in self.models.learners:
            needs |= {"ref"}
        batch = add_scores(cast(Any, self.models), algorithm.batch(groups), needs)
        everyone = self.ranks.all_gather(_light(batch))
        whole, metrics = algorithm.advantages(joined(everyone) or batch)
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


def _light(batch: Batch) -> Batch:
    """Returns the batch without image bytes and `extra` data, to gather less data."""
    return replace(batch, experiences=tuple(replace(e, media=(), extra={}) for e in batch.experiences), metrics={})
