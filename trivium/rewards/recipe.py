"""Rewards by label: a column of the task selects the components that judge it, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from trivium.config import CHANGEABLE, RewardConfig, RunConfig
from trivium.config.schema import RewardPlugin
from trivium.foundation.errors import Problem, RewardError
from trivium.foundation.registry import suggest


class Recipe:
    """Rewards selected by the label of the task. The judge calls the components to which the label gives a weight, and
    records each under its own name.
    """

    class Config(RewardConfig):
        kind: str = "recipe"
        column: str = "label"
        """The task's column that holds the label."""
        components: tuple[RewardPlugin, ...] = Field(min_length=1)
        """Rewards of any kind, each with a unique name. A component that several labels share is built once."""
        labels: dict[str, dict[str, float]] = Field(min_length=1, json_schema_extra=CHANGEABLE)
        """Label -> the weight of each component by name: `{math: {exact: 0.9, format: 0.1}, chat: {model: 1.0}}`. A
        component without a weight, or with the weight 0, is not called."""
        default: str | None = None
        """The label whose weights apply to tasks without a label, or with a label that is not listed. Unset: such a
        task is an error."""

        @model_validator(mode="after")
        def _fits(self) -> Self:
            names = [component.label for component in self.components]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"components of different names: {', '.join(twice)} twice; give each its own `name`")
            for label, weights in self.labels.items():
                if unknown := [name for name in weights if name not in names]:
                    raise ValueError(f"labels.{label}: no component {unknown[0]!r}; {suggest(unknown[0], names)}")
            if self.default is not None and self.default not in self.labels:
                raise ValueError(f"default: no label {self.default!r}; {suggest(self.default, self.labels)}")
            return self

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            for name in ("name", "workers"):
                if getattr(self, name):
                    yield Problem(
                        f"{where}.{name}", f"{name} of a recipe", "it belongs to each component", "set it there"
                    )
            used = {name for weights in self.labels.values() for name, weight in weights.items() if weight}
            for number, component in enumerate(self.components):
                place = f"{where}.components[{number}]"
                if isinstance(component, Recipe.Config):
                    yield Problem(place, "a recipe in a recipe", "a task has one label", "list its components here")
                if component.weight != 1:
                    found = f"{component.weight:g}, beside the weights of labels"
                    yield Problem(f"{place}.weight", "the weight of a component", found, "set it under labels alone")
                if component.label not in used:
                    found = "no label gives it a weight, so it has no effect"
                    yield Problem(
                        place, f"the component {component.label!r}", found, "give it a weight, or leave it out"
                    )
                yield from component.problems(run, place)

        def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            for number, component in enumerate(self.components):
                yield from component.machine_problems(run, f"{where}.components[{number}]")

        def warnings(self, run: RunConfig, where: str) -> Iterator[Problem]:
            for number, component in enumerate(self.components):
                yield from component.warnings(run, f"{where}.components[{number}]")

        def weights_of(self, columns: Mapping[str, Any]) -> Mapping[str, float]:
            """The weight of each component for a task with these columns. Raises RewardError for a label without
            weights."""
            label = columns.get(self.column)
            weights = None if label is None else self.labels.get(str(label))
            weights = self.labels[self.default] if weights is None and self.default is not None else weights
            if weights is None:
                found = f"no column {self.column!r}" if label is None else f"the label {label!r} in {self.column!r}"
                found += f"; the recipe has {', '.join(self.labels)}"
                raise RewardError("a label of the recipe", found, "add it there, correct the column, or set `default`")
            return weights


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One reward, and the recipe that it belongs to, if any."""

    reward: RewardConfig
    recipe: Recipe.Config | None = None

    def weight(self, columns: Mapping[str, Any]) -> float | None:
        """The weight for a task with these columns, or None if the reward is not called. Raises RewardError for a label
        without weights."""
        if self.recipe is None:
            return self.reward.weight
        weight = self.recipe.weights_of(columns).get(self.reward.label)
        return weight * self.recipe.weight if weight else None


def parts_of(rewards: Iterable[RewardConfig]) -> list[WeightedReward]:
    """The rewards of a config, with each recipe replaced by its components."""
    parts: list[WeightedReward] = []
    for reward in rewards:
        if isinstance(reward, Recipe.Config):
            parts += [WeightedReward(component, reward) for component in reward.components]
        else:
            parts.append(WeightedReward(reward))
    return parts


def changed(
    rewards: Iterable[RewardConfig], change: Callable[[RewardConfig], RewardConfig]
) -> tuple[RewardConfig, ...]:
    """The rewards of a config, each changed by `change`, the components of recipes included."""
    return tuple(
        reward.model_copy(update={"components": tuple(map(change, reward.components))})
        if isinstance(reward, Recipe.Config)
        else change(reward)
        for reward in rewards
    )
