"""Makes a plain function available to configs: its metadata, and the options that its parameters declare.

A registered function takes its inputs first and its options as keyword-only parameters with type, default and help
(`Annotated[float, Field(ge=0, description=...)]`). Its `Config` is derived from them, so each default is written
once, and an option that the function lacks is an unknown key. The decorators take the fields of their metadata class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar, get_type_hints

from pydantic import create_model

from trivium.config import Plugin
from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import CATALOGUE, resolve, suggest
from trivium.types import SCORES

COLUMNS = frozenset(SCORES.values()) | {
    "advantages",
    "returns",
    "rollout_log_prob",
    "rollout_is_weights",
    "selected",
    "turn",
    "turn_reward",
    "turn_state",
    "greedy_reward",
    "uniform",
    "group",
    "moments",
    "role_mean",
}
"""Columns that a function may need: scores of the train engine, and columns computed from a batch."""

P = ParamSpec("P")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
MetadataT = TypeVar("MetadataT", bound="FunctionMetadata")


class When(NamedTuple):
    """A condition on one option: that it has one of `values`, or, without values, that it is set."""

    option: str
    values: tuple[object, ...] = ()

    def holds(self, options: Mapping[str, object]) -> bool:
        """Whether these options satisfy the condition; an option is set unless it is null, false, 0 or empty."""
        value = options[self.option]
        return value in self.values if self.values else value not in (None, False, 0, "", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMetadata:
    """Facts about a registered function, for checks, documentation and tests."""

    decorator: ClassVar[str] = ""
    """The name of the decorator that takes these fields."""

    formula: str
    """The formula of one token (or trajectory, pair, group) in one line, for people only. Option names stand for their
    values; `{option: text}` appears only if the option is set (`formulas.py`)."""
    source: str
    """The paper."""
    needs: AbstractSet[str] = frozenset()
    """The columns it reads beside the mask; any collection of names is accepted."""
    # Without a hash, since a dict has none.
    effective: Mapping[str, When] = field(default_factory=dict[str, When], hash=False)
    """Option -> the condition under which it has an effect; an unlisted option always has one. A config that sets an
    option without effect is refused."""
    ordered: tuple[tuple[str, str], ...] = ()
    """Pairs (low, high) of options; a config in which low is not below high is refused."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionMetadata(FunctionMetadata):
    """Metadata of `f(x: PolicyInputs, *, options...) -> (B, L) bool`, a selection of tokens over a whole mini-batch.

    `needs` may name `log_prob` and `entropy`, computed with the weights before the update, `uniform`, a number in
    [0, 1) for each token that is independent of the rest of the batch, and `group`, the number of the row's group. The
    result may also be a number for each token.
    """

    decorator = "selection"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossMetadata(FunctionMetadata):
    """Metadata of `f(x: PolicyInputs, *, options...) -> PerToken`, a policy loss that `policy_loss.kind` can name."""

    decorator = "policy_loss"

    on_policy: str
    """Its gradient at ratio one: `plain` (that of -advantage * log_prob), `factor: f` (f times that; f is an expression
    of option names, for example `1 / (1 + tau)`), or `none: reason`."""
    select: Callable[..., Any] | None = None
    """A selection over the whole mini-batch, made before it is cut; its result is the column `selected`. Its options
    join those of the loss in one section."""
    split: bool = False
    """Whether tokens of an expert and tokens that were sampled are averaged separately, each over its own count."""
    anchored: bool = False
    """Whether a term pulls towards the old policy: off policy it has a gradient even if the advantage is 0."""
    off_policy: bool = False
    """Whether it is made for samples of older policies: it uses no ratio, or its ratio is against the policy that
    sampled. A run with stale groups then applies no correction by default."""
    per_sequence: bool = False
    """Whether the loss of a token is that of its whole sequence: single tokens cannot be weighted."""
    weighs: bool = False
    """Whether it applies importance weights (the column `rollout_is_weights`) itself."""

    @property
    def selection(self) -> SelectionMetadata | None:
        """The metadata of `select`."""
        return None if self.select is None else metadata_of(self.select, SelectionMetadata, self.select.__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorMetadata(FunctionMetadata):
    """Metadata of `f(x: AdvantageInputs, *, options...) -> Advantages`, an estimator that `advantage.kind` can name.

    `needs` may name columns of `AdvantageInputs` that no engine scores (`turn`, `uniform`, ...) beside scores.
    """

    decorator = "advantage"

    min_group: int = 1
    """The fewest successful members that it accepts; at least 2 if members are each other's baseline."""
    centred: bool = False
    """Whether equal rewards in a group give advantages of exactly zero."""
    baseline: bool = False
    """Whether it reads the reward of a greedy rollout (`greedy_reward`), which the explorer adds for every task."""
    judged: bool = True
    """Whether it reads rewards at all."""
    components: bool = False
    """Whether it reads the components of the reward one by one, not their total: a change to the total (shaping, a KL
    penalty) has no effect."""
    whitens: bool | When = False
    """Whether its advantages have mean 0 and variance 1 over the batch, or the condition under which they do."""
    nonnegative: bool = False
    """Whether it accepts only rewards of at least 0."""
    unshaped: bool = False
    """Whether it compares the total reward with recorded rewards, which have neither shaping nor a KL penalty."""

    @property
    def reads_total(self) -> bool:
        """Whether a change to a trajectory's total reward has an effect."""
        return self.judged and not self.components


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeightMetadata(FunctionMetadata):
    """Metadata of `f(x: PolicyInputs, *, options...) -> (B, L) weights`, a token weight that `gates` can name.

    `needs` as for a selection. No gradient flows through the weights.
    """

    decorator = "gate"

    scope: Literal["row", "batch"] = "row"
    """What it must see at once: one sequence, or the whole mini-batch."""
    off_policy: bool = False
    """Whether its ratio is against the policy that sampled."""
    per_sequence: bool = False
    """Whether all tokens of a sequence get the same weight."""


class TokenWeightSection(Plugin):
    """The keys of every entry of `gates`."""

    narrow: bool = False
    """Whether tokens of weight zero also leave the counts that the policy loss is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlMetadata(FunctionMetadata):
    """Metadata of `f(x: PolicyInputs, *, options...) -> (B, L) nats`, an estimator that `kl.estimator` can name.

    It reads `x.log_prob` and the column `ref_log_prob`; `needs` names further columns.
    """

    decorator = "kl_estimator"

    gradient: str
    """The mean of its gradient on policy: `unbiased` (the gradient of the KL), `zero`, or `biased: how`."""
    mean: str = "unbiased"
    """The mean of its value on policy: `unbiased` (the KL), or `biased: how`."""
    straight_through: bool = False
    """Whether it is another estimator with the gradient of `k2`."""

    def __post_init__(self) -> None:  # repeats the base's: `super()` fails in a dataclass with slots
        object.__setattr__(self, "needs", frozenset(self.needs) | {"ref_log_prob"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyMetadata(FunctionMetadata):
    """Metadata of `f(x: PolicyInputs, *, options...) -> (B, L) nats`, an entropy that `entropy.term` can name."""

    decorator = "entropy_term"

    sampled: bool = False
    """Whether it is a mean over sampled tokens only: expert tokens are left out of the sum and of the count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationMetadata(FunctionMetadata):
    """Metadata of `f(loss: (B, L), mask: (B, L), counts: Counts) -> scalar`, a mean that `aggregate` can name."""

    decorator = "aggregation"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLossMetadata(FunctionMetadata):
    """Metadata of `f(x: PairInputs, *, options...) -> PerPair`, a preference loss that `pair_loss.kind` can name."""

    decorator = "pair_loss"

    scope: Literal["pair", "batch"] = "pair"
    """What it must see at once: one pair, or every pair of the mini-batch, which costs another forward pass."""
    mean: Literal["pair", "completion"] = "pair"
    """The unit of the average: pairs, or their completions."""
    mismatched: bool = False
    """Whether it reads `kl`, estimated over the mini-batch from prompts with the completions of other prompts. This
    costs one further forward pass of the policy and one of the reference. Its scope is `batch`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs) | {"ref_log_prob"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLossMetadata(FunctionMetadata):
    """Metadata of `f(x: ScoreInputs, *, options...) -> (P,) loss`, a reward loss that `score_loss.kind` can name."""

    decorator = "score_loss"

    learned_scale: bool = False
    """Whether the option `learned` makes the option `scale` the initial value of a factor that the model learns. The
    scores then include that factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterMetadata(FunctionMetadata):
    """Metadata of `f(group: Group, *, options...) -> bool` (whether to keep it), a rule that `filters` can name.

    It sees one group at a time, with at least one successful member, and must be deterministic.
    """

    decorator = "group_filter"

    min_group: int = 1
    """The smallest group size at which it can refuse a group."""
    judged: bool = True
    """Whether it reads rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingMetadata(FunctionMetadata):
    """Metadata of `f(x: ShapingInputs, *, options...) -> (T,) rewards`, a shaping that an entry of `shaping` can name.

    `needs` may name `moments`: the mean and standard deviation of every reward seen so far, this step's included; and
    `role_mean`: the mean for each participant.
    """

    decorator = "reward_shaping"


def _decorator(metadata_type: Callable[P, FunctionMetadata]) -> Callable[P, Callable[[FunctionT], FunctionT]]:
    """A decorator with the fields of a metadata class as its keyword parameters."""

    def decorate(*args: P.args, **kwargs: P.kwargs) -> Callable[[FunctionT], FunctionT]:
        return with_metadata(metadata_type(*args, **kwargs))

    decorate.__doc__ = metadata_type.__doc__
    return decorate


policy_loss = _decorator(PolicyLossMetadata)
advantage = _decorator(EstimatorMetadata)
selection = _decorator(SelectionMetadata)
gate = _decorator(TokenWeightMetadata)
kl_estimator = _decorator(KlMetadata)
entropy_term = _decorator(EntropyMetadata)
aggregation = _decorator(AggregationMetadata)
group_filter = _decorator(FilterMetadata)
reward_shaping = _decorator(ShapingMetadata)
pair_loss = _decorator(PairLossMetadata)
score_loss = _decorator(ScoreLossMetadata)


def with_metadata(metadata: FunctionMetadata) -> Callable[[FunctionT], FunctionT]:
    """Attaches metadata and the Config of a function's options (and of those of its selection)."""

    def decorate(function: FunctionT) -> FunctionT:
        functions = _with_selection(function, metadata)
        _check(function, metadata, {name for f in functions for name in inspect.signature(f).parameters})
        base = TokenWeightSection if isinstance(metadata, TokenWeightMetadata) else Plugin
        vars(function).update(metadata=metadata, Config=_config_of(functions, base))
        return function

    return decorate


def _with_selection(function: Callable[..., Any], metadata: FunctionMetadata) -> list[Callable[..., Any]]:
    """The functions whose options share a section: the function itself and, for a policy loss, its selection."""
    select = metadata.select if isinstance(metadata, PolicyLossMetadata) else None
    return [function] if select is None else [function, select]


def _check(function: Callable[..., Any], metadata: FunctionMetadata, options: Collection[str]) -> None:
    """Raises ConfigError for positional or untyped options, unknown needs, and metadata about missing options."""
    decorated = f"@{metadata.decorator} on {function.__name__}"
    parameters = list(inspect.signature(function).parameters.values())
    inputs = 3 if isinstance(metadata, AggregationMetadata) else 1
    if any(p.kind is not p.KEYWORD_ONLY for p in parameters[inputs:]):
        raise ConfigError(
            decorated,
            f"it takes {', '.join(p.name for p in parameters)} by position",
            f"its options come after a star: f({', '.join(p.name for p in parameters[:inputs])}, *, option=...)",
        )
    for p in parameters[inputs:]:
        if p.annotation is p.empty:
            raise ConfigError(
                decorated,
                f"the option {p.name!r} has no type",
                f'annotate it: {p.name}: Annotated[float, Field(description="...")]',
            )
    for name in sorted(metadata.needs - COLUMNS):
        raise ConfigError(decorated, f"it needs {name!r}, which is never computed", suggest(name, COLUMNS))
    declared = {name for option, when in metadata.effective.items() for name in (option, when.option)}
    for name in sorted((declared | {name for pair in metadata.ordered for name in pair}) - set(options)):
        raise ConfigError(decorated, f"it declares the option {name!r}, which it does not have", suggest(name, options))


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Name -> (annotation, default) of each keyword-only parameter."""
    options = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    # The other annotations name tensors, and evaluating them would import torch.
    annotated = SimpleNamespace(__annotations__={name: option.annotation for name, option in options.items()})
    hints = get_type_hints(annotated, inspect.unwrap(function).__globals__, include_extras=True)
    return {
        name: (hints[name], ... if option.default is inspect.Parameter.empty else option.default)
        for name, option in options.items()
    }


def _config_of(functions: Collection[Callable[..., Any]], base: type[Plugin]) -> type[Plugin]:
    """A section with one field for each option."""
    first = next(iter(functions))
    fields: dict[str, Any] = {name: option for f in functions for name, option in options_of(f).items()}
    return create_model(
        f"{first.__name__}_config",
        __base__=base,
        __module__=first.__module__,
        __doc__=first.__doc__,
        **fields,
    )


class OptionProblem(NamedTuple):
    """Why a function refuses the value of an option."""

    option: str
    requested: str
    reason: str
    remedy: str


def option_problems(function: Callable[..., Any], section: Plugin) -> Iterator[OptionProblem]:
    """Yields pairs of bounds in the wrong order, and set options that the other options leave without effect, by the
    metadata's `ordered` and `effective`."""
    metadata: FunctionMetadata = vars(function)["metadata"]
    functions = _with_selection(function, metadata)
    defaults = {name: default for f in functions for name, (_, default) in options_of(f).items()}
    values = {name: getattr(section, name) for name in defaults}
    for low, high in metadata.ordered:
        if None not in (values[low], values[high]) and values[low] >= values[high]:
            between = f"{low} = {format_value(values[low])} and {high} = {format_value(values[high])}"
            yield OptionProblem(high, f"between {between}", "the interval is empty", f"make {low} the smaller one")
    for name, when in metadata.effective.items():
        if name in section.model_fields_set and values[name] != defaults[name] and not when.holds(values):
            yield OptionProblem(
                name,
                f"with {name} = {format_value(values[name])}",
                f"the other options of {section.kind!r} leave it without effect",
                "leave the key out",
            )


def format_value(value: object) -> str:
    """A value as texts show it: `true`, `false`, `none`, or a number with at most 6 digits."""
    if isinstance(value, bool) or value is None:
        return str({True: "true", False: "false", None: "none"}[value])
    return f"{value:g}" if isinstance(value, float) else str(value)


def metadata_of(function: object, metadata_type: type[MetadataT], name: str) -> MetadataT:
    """The metadata of a registered function.

    Raises ConfigError if the function has none of this type: it is not decorated, or belongs to another key.
    """
    metadata = getattr(function, "metadata", None)
    if not isinstance(metadata, metadata_type):
        raise ConfigError(
            f"use {name!r} here",
            f"it carries no {metadata_type.__name__}",
            f"decorate it with @{metadata_type.decorator} from trivium.algorithms, saying what it needs",
        )
    return metadata


def bind_options(function: Callable[..., Any], section: Plugin) -> Callable[..., Any]:
    """The function with its options bound to the values in a section; `.keywords` of the result holds them."""
    return partial(function, **{name: getattr(section, name) for name in options_of(function)})


def resolve_function(
    kind: str, section: Plugin, metadata_type: type[MetadataT]
) -> tuple[Callable[..., Any], MetadataT]:
    """(the function that a section names with its options bound, its metadata); `kind` as in the registry."""
    function = resolve(kind, section.kind)
    metadata = metadata_of(function, metadata_type, section.kind)
    return bind_options(function, section), metadata


def catalogue(kind: str) -> dict[str, Any]:
    """All built-in entries of one registry kind (`advantages`, `policy_losses`, `algorithms`), by short name."""
    return {name: resolve(kind, name) for name in CATALOGUE[kind]}
