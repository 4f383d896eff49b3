"""Computes the reward of each rollout sample by a user's function, a recipe for its label, or one reward model."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from trivium.foundation.errors import ConfigError, RewardError, TriviumError, described, text_of
from trivium.foundation.registry import resolve
from trivium.frontdoors.lightrft.reward_rules import RULES, Rule
from trivium.frontdoors.lightrft.rewards.reward_sources import RolloutSample, numbers_in, sources_of
from trivium.frontdoors.reward_calls import Scorer
from trivium.policy import finite_number
from trivium.types import AnyArray

__all__ = ["RewardScorer", "RolloutSample", "SampleScores"]

_MODEL = "model"
"""The type of a recipe's component that refers to a score in `model_reward_list`."""
_DO = "fix the rule: no sample is scored 0 in its place"


@dataclass(frozen=True, slots=True)
class SampleScores:
    """The rewards and metrics of B samples."""

    rewards: AnyArray
    """(B,) float64."""
    metrics: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray])
    """Name -> (B,). The value is 0 if the sample's recipe lacks the component."""


class _Rule(NamedTuple):
    """A rule on the completion."""

    scorer: Scorer
    parameters: Collection[str]
    """The names of its arguments."""

    def scores(self, kind: str, samples: Sequence[RolloutSample]) -> Iterator[tuple[float, Mapping[str, float]]]:
        """Yields (the reward of a sample, the other numbers of the rule's mapping)."""
        calls: list[_RuleCall] = []
        for sample in samples:
            columns = _columns(sample)
            calls.append(
                _RuleCall(f"{kind}: {sample.completion:.80}", {name: columns[name] for name in self.parameters})
            )
        for call, result in zip(calls, self.scorer.each(calls), strict=True):
            parts = {str(name): part for name, part in result.extra.items() if name != "reward"}
            yield result.score, {name: _part(name, part, call) for name, part in parts.items()}


class _RuleCall(NamedTuple):
    """One call of a rule."""

    name: str
    arguments: Mapping[str, Any]


def _number(value: object) -> float:
    """Converts a number of a rule, or a tensor, an array or a list that holds one, to float. Raises ValueError for
    other values."""
    if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) == 1:
        value = value.reshape(-1).tolist()
    if isinstance(value, list | tuple) and len(cast("list[object]", value)) == 1:
        value = cast("list[object]", value)[0]
    return finite_number(value)


def _part(name: str, value: object, call: _RuleCall) -> float:
    """Returns another number of a rule's mapping."""
    try:
        return _number(value)
    except ValueError as error:
        raise RewardError(f"the number {name!r} of {call.name}", str(error), _DO) from error


class _Component(NamedTuple):
    """One entry of a label's recipe."""

    type: str
    rule: _Rule | None
    source: int
    """Index of the model in `model_reward_list`; -1 for a rule."""
    weight: float


class RewardScorer:
    """Computes rewards from LightRFT's reward arguments.

    `reward_fn(model_reward_list, labels, queries, refs, label_map)` takes precedence; a function of one parameter gets
    `model_reward_list` alone. `queries` are the whole sequences with prompt and special tokens. Otherwise
    `reward_recipe` applies: {label: [(type, key, weight), ...]}. The type `model` refers to
    `model_reward_list[label_map[key]]`. Any other type is a rule on the completion: a name in `reward_rules.RULES`, a
    function, or `package.module:name`. Without both, the only reward model is used.

    `model_reward_list` holds the scores of the reward models in order, then those of `remote_rm_url`. A model scores
    the samples whose recipe gives it a nonzero weight, and all samples whose label has no recipe.
    """

    def __init__(
        self,
        reward_model: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        reward_fn_label_map: Mapping[Any, int] | None = None,
        reward_recipe: Mapping[Any, Sequence[Any]] | None = None,
        remote_rm_url: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
        *,
        tokenizer: Any = None,
        batch_size: int = 8,
    ) -> None:
        """`batch_size` is the number of samples in a call of a reward model. Raises ConfigError for an invalid recipe
        or signature, and for several models without a function or recipe."""
        self._sources = sources_of(reward_model, remote_rm_url, tokenizer=tokenizer, batch_size=batch_size)
        self._reward_fn, self._label_map = reward_fn, reward_fn_label_map
        self._reads_models_only = reward_fn is not None and _reads_models_only(reward_fn)
        parsed = _components if reward_fn is None else _models_of  # reward_fn interprets the other components
        self._recipes = {
            label: parsed(f"the recipe of {label!r}", entries, self._label_map or {}, len(self._sources))
            for label, entries in (reward_recipe or {}).items()
        }
        if reward_fn is None and not self._recipes and len(self._sources) > 1:
            raise ConfigError(
                f"one reward from {len(self._sources)} reward models",
                "neither `reward_fn` nor `reward_recipe` combines them",
                "give reward_fn(model_reward_list, labels, queries, refs, label_map), or a recipe for each label",
            )

    def score(self, samples: Sequence[RolloutSample]) -> SampleScores:
        """Returns the reward of each sample.

        Raises RewardError for a label without a recipe, a missing or non-finite score, and a reward that raises. A
        failed reward is never replaced by 0.
        """
        if self._reward_fn is None and not self._recipes and not self._sources:
            raise ConfigError(
                "rewards of a rollout",
                "no reward_model, reward_fn, reward_recipe or remote_rm_url",
                "give the trainer one of them",
            )
        if not samples:
            return SampleScores(np.zeros(0))
        if self._reward_fn is None and self._recipes:
            self._check_labels(samples)
        numbers = [self._source_scores(place, samples) for place in range(len(self._sources))]
        if self._reward_fn is not None:
            return self._combined(self._reward_fn, samples, numbers)
        return (
            self._mixed(samples, numbers) if self._recipes else SampleScores(numbers[0], {"model_reward": numbers[0]})
        )

    def _check_labels(self, samples: Sequence[RolloutSample]) -> None:
        unknown = [sample.label for sample in samples if not _has(self._recipes, sample.label)]
        # LightRFT gives an unknown label the reward 0, which looks like a wrong answer.
        if unknown:
            raise RewardError(
                "a recipe for each sample's label",
                f"{len(unknown)} of {len(samples)} samples have none, one with the label {unknown[0]!r}",
                f"there are recipes for {', '.join(map(repr, self._recipes))}: add one, or correct the label column",
            )

    def _source_scores(self, place: int, samples: Sequence[RolloutSample]) -> AnyArray:
        """Returns the (B,) scores of a source, 0 for samples whose recipe does not use it."""
        # A reward model may be slow or paid: it sees the samples whose recipe weights it, and no others.
        wanted = [row for row, sample in enumerate(samples) if self._uses(sample.label, place)]
        scores = np.zeros(len(samples))
        if wanted:
            scores[wanted] = self._sources[place].score([samples[row] for row in wanted])
        return scores

    def _uses(self, label: object, place: int) -> bool:
        """Whether a source scores samples of a label: its recipe uses the source, or it has no recipe."""
        if not _has(self._recipes, label):
            return True
        return any(component.rule is None and component.source == place for component in self._recipes[label])

    def _combined(
        self, reward_fn: Callable[..., Any], samples: Sequence[RolloutSample], numbers: list[AnyArray]
    ) -> SampleScores:
        columns = {name: [getattr(sample, name) for sample in samples] for name in ("label", "query", "reference")}
        models = [torch.from_numpy(scores).float() for scores in numbers]
        further = () if self._reads_models_only else (*columns.values(), self._label_map)
        try:
            result = reward_fn(models, *further)
        except TriviumError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {text_of(error)}"
            raise RewardError("a result of reward_fn", cause, "fix the reward: nothing is scored 0") from error
        rewards, metrics = result, dict[str, Any]()
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping | NoneType):
            rewards, metrics = result[0], dict(result[1] or {})
        by_name = {
            str(name): numbers_in(values, len(samples), f"reward_fn, metric {name!r}")
            for name, values in metrics.items()
        }
        return SampleScores(numbers_in(rewards, len(samples), "reward_fn"), by_name)

    def _mixed(self, samples: Sequence[RolloutSample], numbers: list[AnyArray]) -> SampleScores:
        """Returns the weighted sum of the components of each sample's recipe."""
        rewards, metrics = np.zeros(len(samples)), dict[str, AnyArray]()

        def add(name: str, row: int, value: float) -> None:
            metrics.setdefault(name, np.zeros(len(samples)))[row] += value

        rows_of = defaultdict[Any, list[int]](list)
        for row, sample in enumerate(samples):
            rows_of[sample.label].append(row)
        recipes = [(self._recipes[label], rows) for label, rows in rows_of.items()]
        for component, rows in [(component, rows) for recipe, rows in recipes for component in recipe]:
            if component.rule is None:
                scores = [(float(numbers[component.source][row]), dict[str, float]()) for row in rows]
            else:
                scores = component.rule.scores(component.type, [samples[row] for row in rows])
            for row, (value, parts) in zip(rows, scores, strict=True):
                weighted = component.weight * value
                rewards[row] += weighted
                add("model_reward" if component.rule is None else "rule_reward", row, weighted)
                for name, part in parts.items():
                    add(name, row, part)
        return SampleScores(rewards, metrics)


def _has(recipes: Mapping[Any, object], label: object) -> bool:
    """Whether a label has a recipe. The label may be unhashable."""
    try:
        return label in recipes
    except TypeError:
        return False


# --------------------------------------------------------------------------- recipes


def _components(where: str, entries: Any, label_map: Mapping[Any, int], num_sources: int) -> list[_Component]:
    """Parses a label's recipe and drops components of weight 0. Raises ConfigError for an invalid entry."""
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(where, described(entries), "give a list of (type, key or None, weight), at least one")
    components: list[_Component] = []
    for entry in entries:
        if not _is_component(entry):
            raise ConfigError(where, repr(entry)[:80], "write each component as (type, key or None, weight)")
        kind, key, weight = entry
        rule, place = None, -1
        if kind == _MODEL:
            place = _place(where, key, label_map, num_sources)
        else:
            rule = _rule(where, kind)
        components.append(_Component(str(kind), rule, place, float(weight)))
    # After the checks, so that an invalid component of weight 0 is refused as well.
    return [component for component in components if component.weight]


def _models_of(where: str, entries: Any, label_map: Mapping[Any, int], num_sources: int) -> list[_Component]:
    """Parses only the reward models of a label's recipe, for use with `reward_fn`."""
    models = [entry for entry in entries if _is_component(entry) and entry[0] == _MODEL]
    return _components(where, models, label_map, num_sources) if models else []


def _is_component(entry: Any) -> bool:
    """Whether an entry has the form (type, key, finite weight)."""
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        return False
    weight = entry[2]
    return isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)


def _place(where: str, key: Any, label_map: Mapping[Any, int], count: int) -> int:
    """Returns the index of a key in `model_reward_list`; 0 if the key is None and the list has one model."""
    if key is None and count == 1:
        return 0
    place = key if isinstance(key, int) and not isinstance(key, bool) else label_map.get(key)
    if not isinstance(place, int) or not 0 <= place < count:
        places = ", ".join(f"{name!r}: {index}" for name, index in label_map.items()) or "nothing"
        raise ConfigError(
            f"{where}: the model {key!r}",
            f"reward_fn_label_map holds {places}, and there are {count} reward models (remote ones included)",
            "map the key to a place in the list of reward models",
        )
    return place


def _rule(where: str, kind: Any) -> _Rule:
    rule: Any = RULES.get(kind) if isinstance(kind, str) else kind
    if isinstance(kind, str) and rule is None and ":" in kind:
        rule = resolve("rewards", kind)
    if not callable(rule):
        raise ConfigError(
            f"{where}: a component of the type {kind!r}",
            f"there are: {_MODEL}, {', '.join(RULES)}",
            "use one of them, a function, or its path (package.module:name, file.py:name), or register it with "
            "@register_rule",
        )
    return _Rule(Scorer(rule, key="reward", number=_number, do=_DO), _parameters_of(where, rule))


def _parameters_of(where: str, rule: Rule) -> Collection[str]:
    """Returns the names of a rule's arguments. Raises ConfigError for an unknown required parameter."""
    columns = _columns(RolloutSample("", "", "", np.zeros(0, np.int32), np.zeros(0, np.int32)))
    parameters = inspect.signature(rule).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return columns.keys()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.name not in columns and p.default is p.empty]
    if missing or len(named) < len(parameters):
        raise ConfigError(
            f"{where}: the rule {getattr(rule, '__name__', rule)}",
            f"it takes ({', '.join(p.name for p in parameters)})",
            f"name its parameters from: {', '.join(columns)}",
        )
    return [p.name for p in named if p.name in columns]


def _columns(sample: RolloutSample) -> dict[str, Any]:
    """Returns the possible arguments of a rule, by the name of the parameter."""
    return {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "query": sample.query,
        "reference": sample.reference,
        "answer": sample.reference,
        "label": sample.label,
        "images": sample.images,
        "truncated": sample.truncated,
    }


def _reads_models_only(reward_fn: Callable[..., Any]) -> bool:
    """Whether a reward function takes the scores of the models alone. Raises ConfigError for a signature that takes
    neither one argument nor five."""
    signature = inspect.signature(reward_fn)
    # Five first: a function of `*args` takes both.
    for count in (5, 1):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 1
    raise ConfigError(
        "reward_fn(model_reward_list, labels, queries, refs, label_map), or reward_fn(model_reward_list)",
        f"{getattr(reward_fn, '__name__', type(reward_fn).__name__)}{signature}",
        "let it take five positional arguments, or one",
    )
