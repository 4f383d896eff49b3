"""Reward models trained in one stage and used in a later one: `rewards: [{kind: model, stage: NAME}]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trivium.algorithms import build_algorithm
from trivium.checkpoint.store import CheckpointStore
from trivium.config import RewardConfig, RunConfig
from trivium.foundation.errors import Problem, RunDirError
from trivium.foundation.registry import suggest
from trivium.rewards.model import ModelReward
from trivium.rewards.recipe import changed, parts_of

_ROLE = "reward"
"""The role of a reward model in a train engine, and its directory in a checkpoint."""


def stage_problems(config: RunConfig) -> Iterator[Problem]:
    """Finds rewards that name a stage which trains no reward model before them."""
    stages, names = config.stage_configs(), config.stage_names
    for number, stage in enumerate(stages):
        where = f"stages[{number}].rewards" if config.stages else "rewards"
        for reward in _of_stages(stage.rewards):
            name = str(reward.stage)
            model, earlier = f"the reward model of the stage {name!r}", list(filter(None, names[:number]))
            if name not in earlier:
                found = "that is no earlier stage" if name in names else "no stage has this name"
                do = suggest(name, earlier) if earlier else "give an earlier stage, which trains it, this `name`"
                yield Problem(where, model, found, do)
                continue
            if not _trains_reward_model(stages[names.index(name)]):
                found = f"stages[{names.index(name)}] has algorithm.kind {stages[names.index(name)].algorithm.kind!r}"
                yield Problem(where, model, found, "name a stage with algorithm.kind: reward_model")


def located_rewards(
    rewards: Sequence[RewardConfig], names: Sequence[str], ends: Sequence[int], store: CheckpointStore
) -> tuple[RewardConfig, ...]:
    """Returns the rewards of a stage with the directories of the reward models that they name by stage. `ends` are the
    last steps of the stages before it. Raises RunDirError if there is no such checkpoint."""

    def located(reward: RewardConfig) -> RewardConfig:
        if not isinstance(reward, ModelReward.Config) or reward.stage is None:
            return reward
        number = names.index(reward.stage)
        if number >= len(ends):
            raise RunDirError(
                f"the reward model of the stage {reward.stage!r}",
                f"{store.directory} has no checkpoint of the end of the stage",
                "train that stage first, in this run directory",
            )
        path = store.open(ends[number]).path / _ROLE
        return reward.model_copy(update={"path": str(path.resolve()), "stage": None})

    return changed(rewards, located)


def stage_ends(store: CheckpointStore) -> list[int]:
    """Returns the last step of each stage, as recorded by the checkpoints; the last stage may not have ended yet."""
    latest = store.latest()
    return [] if latest is None else [*latest.state["pinned"], latest.step]


def _of_stages(rewards: Sequence[RewardConfig]) -> list[ModelReward.Config]:
    """Returns the reward models that name a stage."""
    configs = [part.reward for part in parts_of(rewards)]
    return [reward for reward in configs if isinstance(reward, ModelReward.Config) and reward.stage is not None]


def _trains_reward_model(stage: RunConfig) -> bool:
    section = stage.algorithm.for_run(stage)
    algorithm = build_algorithm(section, stage.run.seed, stage.engine.sampling.max_new_tokens)
    return any(objective.role == _ROLE for objective in algorithm.objectives)
