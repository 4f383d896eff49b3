"""Makes experiences: completions of prompts, their rewards, and the tensors that a trainer's methods are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trivium.frontdoors.lightrft.objects.loaded_prompts import PromptBatch, read_batch
from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL
from trivium.frontdoors.lightrft.objects.models.rollout_engine import Rollouts
from trivium.frontdoors.lightrft.objects.step_algorithm import BLANK
from trivium.frontdoors.lightrft.rewards.reward_scoring import RewardScorer, RolloutSample
from trivium.training.distributed.ranks import Ranks
from trivium.types import Batch, Group, Sampling, StopReason, Trajectory

_PARTS = ("format_reward", "accuracy_reward")
"""Parts of a reward that an evaluation reports."""


@dataclass
class ExperienceMaker:
    """Samples and rewards the completions of one rank, and makes experiences of them."""

    rollouts: Callable[[], Rollouts]
    """Returns the rollout engine, created on first use."""
    scorer: RewardScorer
    tokenizer: Any
    ranks: Ranks

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
        # Every rank numbers its prompts from 0, so the rank is a part of their address.
        purpose, groups = f"eval-{self.ranks.data_rank}", list[Group]()
        with torch.random.fork_rng(devices=[]):  # a loader may draw from the global generator
            for loaded in loader:
                groups += self.generate(
                    loaded, len(groups), purpose=purpose, version=version, samples=samples, sampling=sampling
                )
        rows = [
            (member.reward, *(member.metrics.get(name, 0.0) for name in _PARTS), float(member.num_tokens))
            for group in groups
            for member in group.alive
        ]
        everyone = [row for part in self.ranks.all_gather(rows) for row in part]
        names = ("reward", *_PARTS, "response_length")
        # Sums over the completions of all ranks. LightRFT reports the mean of the first rank alone.
        totals = np.asarray(everyone, np.float64).reshape(-1, len(names)).sum(0) / max(len(everyone), 1)
        means = {f"{name}_mean": float(mean) for name, mean in zip(names, totals, strict=True)}
        return {**means, "num_samples": float(len(everyone))}

    def _rewarded(self, batch: PromptBatch, groups: Sequence[Group]) -> list[Group]:
        living = [(row, member) for row, group in enumerate(groups) for member in group.alive]
        samples = [self._sample(batch, row, member) for row, member in living]
        scored = self.scorer.score(samples)
        rewarded = {
            (row, member.index): replace(
                member,
                rewards={"reward": float(scored.rewards[number])},
                metrics={name: float(values[number]) for name, values in scored.metrics.items()},
            )
            for number, (row, member) in enumerate(living)
        }
        return [
            replace(group, trajectories=tuple(rewarded.get((row, t.index), t) for t in group.trajectories))
            for row, group in enumerate(groups)
        ]

    def _sample(self, batch: PromptBatch, row: int, member: Trajectory) -> RolloutSample:
        (turn,) = member.turns
        tokens = np.concatenate([turn.prompt_tokens, turn.tokens])
        prompt = str(batch.prompts[row])
        return RolloutSample(
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

    def experiences(self, batch: Batch, groups: Sequence[Group], size: int) -> list[ExperienceVL]:
        """Converts the batch of these groups, with its columns, to experiences of `size` sequences each."""
        # A rank without experiences was given a row so that it takes part in every update.
        batch = batch.select([row for row, e in enumerate(batch.experiences) if e.group_id != BLANK])
        images = self.rollouts().images if any(e.media for e in batch.experiences) else None
        columns = {group.group_id: group.task.columns for group in groups}
        metrics = {(group.group_id, member.index): member.metrics for group in groups for member in group.alive}
        names = dict.fromkeys(name for numbers in metrics.values() for name in numbers)
        experiences: list[ExperienceVL] = []
        for start in range(0, len(batch), size):
            rows = range(start, min(start + size, len(batch)))
            experience = ExperienceVL.from_batch(batch.select(rows), processor=images)
            members = [(e.group_id, e.index) for e in (batch.experiences[row] for row in rows)]
            experience.info["reward_metrics"] = {
                name: torch.tensor([metrics[member].get(name, 0.0) for member in members], dtype=torch.float64)
                for name in names
            }
            experience.labels = [columns[group].get("label") for group, _ in members]
            experience.references = [columns[group].get("reference") for group, _ in members]
            experiences.append(experience)
        return experiences
