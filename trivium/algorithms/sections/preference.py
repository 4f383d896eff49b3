"""The config section of learning from preferences, and the algorithm built from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.metadata import PairLossMetadata, ScoreLossMetadata, resolve_function
from trivium.algorithms.preference.objective import PreferenceObjective, ScoreObjective
from trivium.algorithms.sections.parts import (
    PassesConfig,
    is_explored,
    is_mixed,
    metadata_or_problem,
    section_problems,
)
from trivium.config import Plugin, RunConfig, plugin
from trivium.foundation.errors import Problem

PairLossPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("pair_losses"))]
ScoreLossPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("score_losses"))]


class PairsConfig(PassesConfig):
    """Options of algorithms over preference pairs: rows of a file, or the best and the worst member of each group."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        size = run.schedule.group_size
        if is_mixed(run):
            yield Problem(
                f"{where}.kind",
                f"the algorithm {self.kind!r} with buffer.strategy {run.buffer.strategy.kind!r}",
                "an expert's single completion is no pair",
                "leave buffer.strategy out",
            )
        if is_explored(run) and size < 2:
            yield Problem(
                "schedule.group_size",
                f"{size} trajectory per task",
                f"the algorithm {self.kind!r} learns from the best and the worst of a group",
                "use at least 2, or pairs from buffer.kind files",
            )
        if not is_explored(run) and size != 2 and not (size == 1 and self.takes_labels):
            others = "rows of one completion: algorithm.kind kto with a label each, sft without"
            yield Problem(
                "schedule.group_size",
                f"groups of {size} from buffer.kind {run.buffer.kind!r}",
                f"the algorithm {self.kind!r} learns from pairs: a chosen and a rejected completion in each row",
                "set it to 2, or to 1 for rows of prompt, completion and label"
                if self.takes_labels
                else f"set it to 2; {others}",
            )

    @property
    def takes_labels(self) -> bool:
        """Whether a row may have one completion with a label (desirable or not)."""
        return False


class PreferenceConfig(PairsConfig):
    """Algorithms that train the policy on preferences directly."""

    pair_loss: PairLossPlugin
    """The loss of a pair: `{kind: dpo, ...}`, or a function of yours."""
    label: str = "label"
    """The column that says whether a completion is desirable (true or false), for rows with one completion each:
    `buffer.kind: files`, `schedule.group_size: 1`, and a loss over completions (`kto`)."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        yield from section_problems(self.pair_loss, "pair_losses", PairLossMetadata, f"{where}.pair_loss")
        loss = metadata_or_problem(self.pair_loss, "pair_losses", PairLossMetadata, "")
        if isinstance(loss, PairLossMetadata) and loss.mismatched and run.schedule.groups_per_step < 2:
            yield Problem(
                f"{where}.pair_loss",
                f"the loss {self.pair_loss.kind!r} on {run.schedule.groups_per_step} group per step",
                "its reference point is estimated from each prompt with the completion of another prompt of the step",
                "set schedule.groups_per_step to 2 at least, or use pair_loss.kind kto",
            )
        if self.label != type(self).model_fields["label"].default and (
            is_explored(run) or run.schedule.group_size != 1
        ):
            yield Problem(
                f"{where}.label",
                f"labels in column {self.label!r}",
                "the algorithm learns from pairs here",
                "leave the key out, or use buffer.kind files with schedule.group_size 1",
            )

    @property
    def takes_labels(self) -> bool:
        loss = metadata_or_problem(self.pair_loss, "pair_losses", PairLossMetadata, "")
        return isinstance(loss, PairLossMetadata) and loss.mean == "completion"


class RewardModelConfig(PairsConfig):
    """Trains a reward model on preferences. It starts as the policy with a new head; the policy is not updated."""

    score_loss: ScoreLossPlugin
    """The loss of a pair's scores: `{kind: sigmoid, ...}`, or a function of yours."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        yield from section_problems(self.score_loss, "score_losses", ScoreLossMetadata, f"{where}.score_loss")
        if run.evaluation.taskset is not None:
            yield Problem(
                "evaluation.taskset",
                "an evaluation of the policy",
                f"the algorithm {self.kind!r} does not change the policy",
                "use evaluation.held_out: its loss and its preference accuracy on rows that it does not train on",
            )

    @property
    def scores_sequences(self) -> bool:
        """Whether the two sides of a pair may be separate conversations: each side has its own score."""
        return True

    def objective(self) -> ScoreObjective:
        """The loss over the scores of pairs."""
        loss, metadata = resolve_function("score_losses", self.score_loss, ScoreLossMetadata)
        learned = metadata.learned_scale and getattr(self.score_loss, "learned", False)
        return ScoreObjective(loss, metadata, getattr(self.score_loss, "scale", None) if learned else None)


def preference(config: PreferenceConfig, seed: int) -> GroupAlgorithm:
    """Builds the algorithm of a preference section. It does not use the seed."""
    del seed
    objective = PreferenceObjective(*resolve_function("pair_losses", config.pair_loss, PairLossMetadata))
    return replace(_over_pairs(config, objective), label=config.label, mismatched=objective.metadata.mismatched)


def reward_model(config: RewardModelConfig, seed: int) -> GroupAlgorithm:
    """Builds the algorithm of a reward-model section. It does not use the seed."""
    del seed
    return _over_pairs(config, config.objective())


def _over_pairs(config: PairsConfig, objective: PreferenceObjective | ScoreObjective) -> GroupAlgorithm:
    return GroupAlgorithm(config.kind, (objective,), epochs=config.epochs, mini_batches=config.mini_batches, pairs=True)
