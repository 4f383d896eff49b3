"""What makes a plain function something that a config can name: its law, and the options its parameters declare.

A registered function takes its inputs first and its options as keyword-only parameters with type, default and help
(`Annotated[float, Field(ge=0, description=...)]`); its `Config` is derived from them, so a default has one home and an
option that the function does not have is an unknown key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import create_model

from trivium.config import Plugin
from trivium.errors import ConfigError
from trivium.registry import CATALOGUE, resolve, suggest
from trivium.types import SCORES

COLUMNS = frozenset(SCORES.values()) | {
    "advantages", "returns", "rollout_log_prob", "rollout_is_weights", "selected",
    "turn", "turn_reward", "turn_state", "greedy_reward", "uniform", "moments",
}  # fmt: skip
"""What a function may need: scores of the train engine, and what is made of a batch."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
LawT = TypeVar("LawT", bound="Law")


@dataclass(frozen=True, slots=True)
class Law:
    """What the tests hold a registered function to, and what a reader wants to know."""

    formula: str
    """One line, for one token (or one trajectory, pair, group). Option names stand for their values; `{option: text}`
    is there only if the option is set (`formulas.py`)."""
    source: str
    """The paper."""
    needs: frozenset[str]
    """The columns it reads beside the mask."""


@dataclass(frozen=True, slots=True)
class PolicyLossLaw(Law):
    """The law of a loss per token."""

    on_policy: str
    """Its gradient at ratio one: `plain` (that of -advantage * log_prob), `factor: f` (f times that, f being arithmetic
    in the names of its options, `1 / (1 + tau)` say), or `none: reason`."""
    select: Callable[..., Any] | None = None
    """A selection over the whole mini-batch, made before it is cut; its result is the column `selected`."""
    split: bool = False
    """Whether tokens of an expert and tokens that were sampled are averaged separately, each over its own count."""
    anchored: bool = False
    """Whether a term of it holds the policy to the old one: off policy it has a gradient where no advantage is."""
    off_policy: bool = False
    """Whether it is made for samples of older policies: it asks no ratio of them, or its ratio is against the policy
    that sampled. A run with stale groups then corrects nothing by itself."""
    per_sequence: bool = False
    """Whether the loss of a token is that of its whole sequence: there is no weighing one token by itself."""


@dataclass(frozen=True, slots=True)
class EstimatorLaw(Law):
    """The law of an advantage estimator."""

    min_group: int = 1
    """Fewest living members of a group it can judge; at least 2 where members are each other's baseline."""
    centred: bool = False
    """Whether equal rewards in a group mean advantages of exactly zero."""
    baseline: bool = False
    """Whether it reads the reward of a greedy reply (`greedy_reward`), which the explorer then plays for every task."""
    judged: bool = True
    """Whether it reads rewards at all."""
    components: bool = False
    """Whether it reads the components of the reward one by one, not their total: a change to the total (shaping, a KL
    penalty) has no effect."""
    whitens: bool = False
    """Whether its advantages have mean 0 and variance 1 over the batch, unless an option `whiten` says no."""
    nonnegative: bool = False
    """Whether it makes sense of rewards of at least 0 alone."""

    @property
    def reads_total(self) -> bool:
        """Whether a change to a trajectory's total reward has an effect."""
        return self.judged and not self.components


@dataclass(frozen=True, slots=True)
class SelectionLaw(Law):
    """The law of a choice of tokens over a whole mini-batch."""


@dataclass(frozen=True, slots=True)
class GateLaw(Law):
    """The law of a weight that decides how much of a token's policy loss counts."""

    scope: Literal["row", "batch"] = "row"
    """What it must see at once: one sequence, or the whole mini-batch."""
    off_policy: bool = False
    """Whether its ratio is against the policy that sampled."""
    per_sequence: bool = False
    """Whether all tokens of a sequence get the same weight."""


class GateSection(Plugin):
    """What the section of every gate has."""

    narrow: bool = False
    """Whether tokens of weight zero also leave the counts that the policy loss is divided by."""


@dataclass(frozen=True, slots=True)
class KlLaw(Law):
    """The law of a KL estimator."""

    gradient: str = "unbiased"
    """Its gradient's mean on policy: `unbiased` (that of the KL), `zero`, or `biased: how`."""
    mean: str = "unbiased"
    """Its own mean on policy: `unbiased` (the KL), or `biased: how`."""


@dataclass(frozen=True, slots=True)
class EntropyLaw(Law):
    """The law of an entropy term."""

    sampled: bool = False
    """Whether it is a mean over what the policy sampled alone, an expert's tokens left out of the count as well."""


@dataclass(frozen=True, slots=True)
class AggregationLaw(Law):
    """The law of a mean."""


@dataclass(frozen=True, slots=True)
class PairLossLaw(Law):
    """The law of a loss over preferences."""

    scope: Literal["pair", "batch"] = "pair"
    """What it must see at once: one pair, or every pair of the mini-batch."""
    mean: Literal["pair", "reply"] = "pair"
    """What is averaged over: pairs, or the replies they are made of."""


@dataclass(frozen=True, slots=True)
class ScoreLossLaw(Law):
    """The law of a reward model's loss over the scores of two replies."""


@dataclass(frozen=True, slots=True)
class FilterLaw(Law):
    """The law of a rule that refuses groups."""

    judged: bool = True
    """Whether it reads rewards."""

    min_group: int = 1
    """Fewest trajectories per task at which it can refuse anything."""


@dataclass(frozen=True, slots=True)
class ShapingLaw(Law):
    """The law of a change to the rewards."""


def policy_loss(
    *,
    formula: str,
    source: str,
    on_policy: str,
    needs: Collection[str] = (),
    select: Callable[..., Any] | None = None,
    split: bool = False,
    anchored: bool = False,
    off_policy: bool = False,
    per_sequence: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: PolicyInputs, *, options...) -> PerToken` a policy loss that `policy_loss.kind` can name.

    The options of `select` (a function decorated with `selection`) join those of the loss in one section.
    """
    return with_law(
        PolicyLossLaw(formula, source, frozenset(needs), on_policy, select, split, anchored, off_policy, per_sequence)
    )


def advantage(
    *,
    formula: str,
    source: str,
    needs: Collection[str] = (),
    min_group: int = 1,
    centred: bool = False,
    baseline: bool = False,
    judged: bool = True,
    components: bool = False,
    whitens: bool = False,
    nonnegative: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: AdvantageInputs, *, options...) -> Advantages` one that `advantage.kind` can name.

    `needs` may name columns of `AdvantageInputs` that no engine scores (`turn`, `uniform`, ...) beside scores.
    """
    return with_law(
        EstimatorLaw(
            formula, source, frozenset(needs), min_group, centred, baseline, judged, components, whitens, nonnegative
        )
    )


def selection(*, formula: str, source: str, needs: Collection[str] = ()) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: PolicyInputs, *, options...) -> (B, L) bool` a selection over a whole mini-batch.

    `needs` may name `log_prob` and `entropy` (under the weights before the update) and `uniform` (a number in [0, 1)
    for each token, which does not depend on what else is in the batch).
    """
    return with_law(SelectionLaw(formula, source, frozenset(needs)))


def gate(
    *,
    formula: str,
    source: str,
    needs: Collection[str] = (),
    scope: Literal["row", "batch"] = "row",
    off_policy: bool = False,
    per_sequence: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: PolicyInputs, *, options...) -> (B, L) weights` one that an entry of `gates` can name.

    `needs` as for `selection`. No gradient flows through a gate.
    """
    return with_law(GateLaw(formula, source, frozenset(needs), scope, off_policy, per_sequence))


def kl_estimator(
    *, formula: str, source: str, gradient: str, mean: str = "unbiased", needs: Collection[str] = ()
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: PolicyInputs, *, options...) -> (B, L) nats` one that `kl.estimator` can name.

    It reads `x.log_prob` and the column `ref_log_prob`; `needs` names further columns.
    """
    return with_law(KlLaw(formula, source, frozenset(needs) | {"ref_log_prob"}, gradient, mean))


def entropy_term(
    *, formula: str, source: str, needs: Collection[str] = (), sampled: bool = False
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: PolicyInputs, *, options...) -> (B, L) nats` one that `entropy.term` can name."""
    return with_law(EntropyLaw(formula, source, frozenset(needs), sampled))


def aggregation(*, formula: str, source: str) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(loss: (B, L), mask: (B, L), counts: Counts) -> scalar` one that `aggregate` can name."""
    return with_law(AggregationLaw(formula, source, frozenset()))


def group_filter(
    *, formula: str, source: str, min_group: int = 1, judged: bool = True
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(group: Group, *, options...) -> bool` (keep it?) a rule that an entry of `filters` can name.

    It sees one group at a time, with at least one living member, and answers the same whenever it is asked.
    """
    return with_law(FilterLaw(formula, source, frozenset(), judged, min_group))


def reward_shaping(*, formula: str, source: str, needs: Collection[str] = ()) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: ShapingInputs, *, options...) -> (T,) rewards` one that an entry of `shaping` can name.

    `needs` may name `moments`: the mean and standard deviation of every reward seen so far, this step's included.
    """
    return with_law(ShapingLaw(formula, source, frozenset(needs)))


def pair_loss(
    *,
    formula: str,
    source: str,
    scope: Literal["pair", "batch"] = "pair",
    mean: Literal["pair", "reply"] = "pair",
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: PairInputs, *, options...) -> PerPair` one that `pair_loss.kind` can name.

    With `scope="batch"` it is asked once, over the whole mini-batch, at the price of another forward pass.
    """
    return with_law(PairLossLaw(formula, source, frozenset({"ref_log_prob"}), scope, mean))


def score_loss(*, formula: str, source: str) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(x: ScoreInputs, *, options...) -> (P,) loss` one that `score_loss.kind` can name."""
    return with_law(ScoreLossLaw(formula, source, frozenset()))


def with_law(law: Law) -> Callable[[FunctionT], FunctionT]:
    """Attaches a law and the Config that a function's options (and those of its selection) amount to."""

    def decorate(function: FunctionT) -> FunctionT:
        _check(function, law)
        functions = [function, law.select] if isinstance(law, PolicyLossLaw) and law.select else [function]
        base = GateSection if isinstance(law, GateLaw) else Plugin
        vars(function).update(law=law, Config=_config_of(functions, base))
        return function

    return decorate


def _check(function: Callable[..., Any], law: Law) -> None:
    """Raises ConfigError for a function that no config could use as its author meant."""
    asked = f"@{_decorator_of(type(law))} on {function.__name__}"
    parameters = list(inspect.signature(function).parameters.values())
    inputs = 3 if isinstance(law, AggregationLaw) else 1
    if any(p.kind is not p.KEYWORD_ONLY for p in parameters[inputs:]):
        raise ConfigError(
            asked, f"it takes {', '.join(p.name for p in parameters)} by position",
            f"its options come after a star: f({', '.join(p.name for p in parameters[:inputs])}, *, option=...)",
        )  # fmt: skip
    for p in parameters[inputs:]:
        if p.annotation is p.empty:
            raise ConfigError(
                asked, f"the option {p.name!r} has no type",
                f'annotate it: {p.name}: Annotated[float, Field(description="...")]',
            )  # fmt: skip
    for name in sorted(law.needs - COLUMNS):
        raise ConfigError(asked, f"it needs {name!r}, which nobody computes", suggest(name, COLUMNS))


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Name -> (annotation, default) of each keyword-only parameter."""
    hints = get_type_hints(function, include_extras=True)
    return {
        name: (hints[name], ... if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _config_of(functions: Collection[Callable[..., Any]], base: type[Plugin]) -> type[Plugin]:
    """A section with one field for each option."""
    first = next(iter(functions))
    fields: dict[str, Any] = {name: option for f in functions for name, option in options_of(f).items()}
    return create_model(
        f"{first.__name__}_config", __base__=base, __module__=first.__module__, __doc__=first.__doc__, **fields,
    )  # fmt: skip


def law_of(function: object, kind: type[LawT], name: str) -> LawT:
    """The law of a registered function.

    Raises ConfigError where the function has none of this kind: it was not decorated, or belongs to another room.
    """
    law = getattr(function, "law", None)
    if not isinstance(law, kind):
        raise ConfigError(
            f"use {name!r} here",
            f"it carries no {kind.__name__}",
            f"decorate it with @{_decorator_of(kind)} from trivium.algorithms, saying what it needs",
        )
    return law


def _decorator_of(kind: type[Law]) -> str:
    decorators: dict[type[Law], Callable[..., Any]] = {
        PolicyLossLaw: policy_loss, EstimatorLaw: advantage, SelectionLaw: selection, GateLaw: gate,
        KlLaw: kl_estimator, EntropyLaw: entropy_term, AggregationLaw: aggregation, FilterLaw: group_filter,
        ShapingLaw: reward_shaping, PairLossLaw: pair_loss, ScoreLossLaw: score_loss,
    }  # fmt: skip
    return decorators[kind].__name__


def bound(function: Callable[..., Any], section: Plugin) -> Callable[..., Any]:
    """The function with the options that a section gives it; `.keywords` holds them."""
    return partial(function, **{name: getattr(section, name) for name in options_of(function)})


def chosen(room: str, section: Plugin, kind: type[LawT]) -> tuple[Callable[..., Any], LawT]:
    """(the function a section names with its options bound, its law)."""
    function = resolve(room, section.kind)
    law = law_of(function, kind, section.kind)
    return bound(function, section), law


def catalogue(room: str) -> dict[str, Any]:
    """Everything that ships in a room (`advantages`, `policy_losses`, `algorithms`), by short name."""
    return {name: resolve(room, name) for name in CATALOGUE[room]}
