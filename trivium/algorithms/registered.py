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
from typing import Any, TypeVar, get_type_hints

from pydantic import create_model

from trivium.config import Plugin
from trivium.errors import ConfigError
from trivium.registry import CATALOGUE, resolve

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
LawT = TypeVar("LawT", bound="Law")


@dataclass(frozen=True, slots=True)
class Law:
    """What the tests hold a registered function to, and what a reader wants to know."""

    formula: str
    """One line, for one token (or one trajectory)."""
    source: str
    """The paper."""
    needs: frozenset[str]
    """The columns it reads beside the mask."""


@dataclass(frozen=True, slots=True)
class PolicyLossLaw(Law):
    """The law of a loss per token."""

    on_policy: str
    """Its gradient at ratio one: `plain` (that of -advantage * log_prob), `factor: ...`, or `none: reason`."""
    unit: str = "sequence"
    """What batching must not split: `sequence`, `pair` or `group`."""


@dataclass(frozen=True, slots=True)
class EstimatorLaw(Law):
    """The law of an advantage estimator."""

    min_group: int = 1
    """Fewest living members of a group it can judge; at least 2 where members are each other's baseline, and then equal
    rewards mean advantages of exactly zero."""


def policy_loss(
    *, formula: str, source: str, on_policy: str, needs: Collection[str] = (), unit: str = "sequence"
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(inputs: PolicyInputs, *, options...) -> PerToken` a policy loss that `policy_loss.kind` can name."""
    return _with_law(PolicyLossLaw(formula, source, frozenset(needs), on_policy, unit))


def advantage(
    *, formula: str, source: str, needs: Collection[str] = (), min_group: int = 1
) -> Callable[[FunctionT], FunctionT]:
    """Makes `f(inputs: AdvantageInputs, *, options...) -> Advantages` one that `advantage.kind` can name."""
    return _with_law(EstimatorLaw(formula, source, frozenset(needs), min_group))


def _with_law(law: Law) -> Callable[[FunctionT], FunctionT]:
    def decorate(function: FunctionT) -> FunctionT:
        vars(function).update(law=law, Config=_options_of(function))
        return function

    return decorate


def _options_of(function: Callable[..., Any]) -> type[Plugin]:
    """A section with one field for each keyword-only parameter."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return create_model(
        f"{function.__name__}_config", __base__=Plugin, __module__=function.__module__, __doc__=function.__doc__,
        **fields,
    )  # fmt: skip


def law_of(function: object, kind: type[LawT], name: str) -> LawT:
    """The law of a registered function.

    Raises ConfigError where the function has none of this kind: it was not decorated, or belongs to another room.
    """
    law = getattr(function, "law", None)
    if not isinstance(law, kind):
        decorator = "@policy_loss" if kind is PolicyLossLaw else "@advantage"
        raise ConfigError(
            f"use {name!r} here",
            f"it does not carry a {kind.__name__}",
            f"decorate it with {decorator} from trivium.algorithms, saying what it needs",
        )
    return law


def chosen(room: str, section: Plugin, kind: type[LawT]) -> tuple[Callable[[Any], Any], LawT]:
    """(the function a section names with its options bound, its law)."""
    function = resolve(room, section.kind)
    law = law_of(function, kind, section.kind)
    options = {name: getattr(section, name) for name in type(section).model_fields if name != "kind"}
    return partial(function, **options), law


def catalogue(room: str) -> dict[str, Any]:
    """Everything that ships in a room (`advantages`, `policy_losses`, `algorithms`), by short name."""
    return {name: resolve(room, name) for name in CATALOGUE[room]}
