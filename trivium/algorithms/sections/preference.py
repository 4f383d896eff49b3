"""The config section of learning from preferences, and the algorithm built from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.metadata import PairLossMetadata, ScoreLossMetadata, resolve_function
from trivium.algorithms.preference_objective import PreferenceObjective, ScoreObjective
from trivium.algorithms.sections.parts import PassesConfig, is_explored, is_mixed, section_problems
from trivium.config import Plugin, RunConfig, plugin
from trivium.errors import Problem

PairLossPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("pair_losses"))]
ScoreLossPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("score_losses"))]


class PairsConfig(PassesConfig):
    """What algorithms have that learn from pairs: a file's rows, or the best and the worst member of each group."""

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
        if not is_explored(run) and size != 2:
            yield Problem(
                "schedule.group_size",
                f"groups of {size} from buffer.kind {run.buffer.kind!r}",
                f"the algorithm {self.kind!r} learns from pairs: a chosen and a rejected completion in each row",
                "set it to 2, or use algorithm.kind sft for rows with one completion",
            )


class PreferenceConfig(PairsConfig):
    """Preferences that teach the policy itself."""

    pair_loss: PairLossPlugin
    """The loss of a pair: `{kind: dpo, ...}`, or a function of yours."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        yield from section_problems(self.pair_loss, "pair_losses", PairLossMetadata, f"{where}.pair_loss")


class RewardModelConfig(PairsConfig):
    """Preferences that teach a reward model, which starts as the policy with a new head; the policy stays as it is."""

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
                "leave it out and watch train/preference_accuracy",
            )


def preference(config: PreferenceConfig, seed: int) -> GroupAlgorithm:
    """The algorithm a preference section describes; nothing in it is random."""
    del seed
    return _over_pairs(
        config, PreferenceObjective(*resolve_function("pair_losses", config.pair_loss, PairLossMetadata))
    )


def reward_model(config: RewardModelConfig, seed: int) -> GroupAlgorithm:
    """The algorithm a reward-model section describes; nothing in it is random."""
    del seed
    return _over_pairs(config, ScoreObjective(*resolve_function("score_losses", config.score_loss, ScoreLossMetadata)))


def _over_pairs(config: PairsConfig, objective: PreferenceObjective | ScoreObjective) -> GroupAlgorithm:
    return GroupAlgorithm(config.kind, (objective,), epochs=config.epochs, mini_batches=config.mini_batches, pairs=True)
