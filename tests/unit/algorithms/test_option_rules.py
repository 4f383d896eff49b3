"""Which options have an effect is declared beside a function: in its metadata, never in the words of its formula."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from algebra import other_values, section
from failing import refused

from trivium.algorithms import catalogue, policy_loss
from trivium.algorithms.metadata import FunctionMetadata, When, metadata_of, option_problems
from trivium.config import Plugin
from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import CATALOGUE

KINDS = [kind for kind, names in CATALOGUE.items() if kind != "algorithms" and "trivium.algorithms" in str(names)]
FUNCTIONS = {
    (kind, name): function
    for kind in KINDS
    for name, function in catalogue(kind).items()
    if isinstance(getattr(function, "metadata", None), FunctionMetadata)
}


def others(annotation: Any, bounds: Any, default: Any) -> list[Any]:
    """Every other word of an option that takes words, one other value of any other option."""
    values = other_values(annotation, bounds, default)
    return values if isinstance(default, str) else values[-1:]


def sections(kind: str, name: str) -> Iterator[Plugin]:
    """The section of a function under every combination of a few values for each of its options."""
    fields = type(section(kind, name)).model_fields
    options = {key: field for key, field in fields.items() if key not in Plugin.model_fields}
    values = [[field.default, *others(field.annotation, field.metadata, field.default)] for field in options.values()]
    for combination in product(*values):
        changed = {k: v for (k, f), v in zip(options.items(), combination, strict=True) if v != f.default}
        try:
            yield section(kind, name, **changed)
        except ValueError:
            continue  # a value that the option's own bounds exclude


def refusals(kind: str, name: str, function: Callable[..., Any]) -> list[tuple[dict[str, Any], list[Any]]]:
    return [(each.model_dump(), list(option_problems(function, each))) for each in sections(kind, name)]


def functions_of(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    select = getattr(metadata_of(function, FunctionMetadata, ""), "select", None)
    return [function, *([select] if select is not None else [])]


def test_rewording_every_formula_changes_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {key: refusals(*key, function) for key, function in FUNCTIONS.items()}
    for function in FUNCTIONS.values():
        for each in functions_of(function):
            reworded = replace(each.metadata, formula="low < high {clip:other words}")
            monkeypatch.setattr(each, "metadata", reworded)
    assert {key: refusals(*key, function) for key, function in FUNCTIONS.items()} == before
    assert {key for key, cases in before.items() if any(problems for _, problems in cases)} == {
        *(("advantages", name) for name in ("cpgd", "gdpo", "gigpo", "grpo", "grpo_passk", "grpo_rank_penalty")),
        *(("advantages", name) for name in ("opmd", "rec", "step_wise_grpo")),
        *(("policy_losses", name) for name in ("rec", "rec_regularized")),
        ("shapings", "group_normalise"),
    }


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        (("policy_losses", "rec"), {"clip": "two_side", "ring_low": 0.5}, ["ring_low"]),
        (("policy_losses", "rec"), {"clip": "none", "clip_low": 0.1, "ring_high": 3.0}, ["clip_low", "ring_high"]),
        (("policy_losses", "rec"), {"clip": "ring", "clip_low": 0.1, "ring_high": 3.0}, []),
        (("policy_losses", "clip_cov"), {"cov_low": 2.0, "cov_high": 2.0}, ["cov_high"]),
        (("filters", "difficulty"), {"low": 1.0, "high": 0.0}, ["high"]),
        (
            ("advantages", "grpo"),
            {"norm_by_std": False, "std_level": "batch", "epsilon": 0.1},
            ["std_level", "epsilon"],
        ),
        (("advantages", "opmd"), {"tau": 0.5}, ["tau"]),
        (("advantages", "opmd"), {"tau": 0.5, "baseline": "logavgexp"}, []),
        (("advantages", "gigpo"), {"epsilon": 0.5}, ["epsilon"]),
    ],
)
def test_options_without_effect_and_empty_intervals_are_refused(
    kind: tuple[str, str], options: dict[str, Any], refused: list[str]
) -> None:
    problems = option_problems(FUNCTIONS[kind], section(*kind, **options))
    assert [problem.option for problem in problems] == refused


def test_a_rule_about_an_option_that_is_not_there_is_an_error() -> None:
    for rule in ({"effective": {"bund": When("bound")}}, {"effective": {"bound": When("bund")}}):
        with refused(ConfigError, "'bound'"):

            @policy_loss(formula="-A", source="here", on_policy="plain", **rule)
            def loss(x, *, bound: float = 1.0):
                """A loss."""


def test_a_condition_holds_where_its_option_is_set_or_has_a_value() -> None:
    assert When("clip", ("ring",)).holds({"clip": "ring"})
    assert not When("clip", ("ring",)).holds({"clip": "none"})
    assert [When("n").holds({"n": value}) for value in (True, 0.1, "a", False, None, 0, "", ())] == [True] * 3 + [
        False
    ] * 5
