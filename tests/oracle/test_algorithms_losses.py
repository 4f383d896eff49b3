"""Laws that everything registered keeps which enters a loss, under every option."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from algebra import (
    STEP,
    Step,
    Variant,
    finite_differences,
    held_at,
    loss_of,
    objectives,
    policy_objective,
    run,
    section,
    selected,
    slope,
    step_for,
    variants,
    variants_of,
)
from torch import Tensor

from trivium.algorithms import catalogue
from trivium.algorithms.formulas import mentions_option
from trivium.algorithms.metadata import PolicyLossMetadata, options_of

LOSSES = catalogue("policy_losses")
OBJECTIVES = objectives()


def metadata_of(kind: str) -> PolicyLossMetadata:
    return LOSSES[kind].metadata


# --------------------------------------------------------------------------- on policy


def declared_factor(said: str, options: dict[str, Any]) -> float:
    """The number behind arithmetic in the names of options."""
    return float(eval(said, {"__builtins__": {}}, options))


def on_policy_gradient(variant: Variant, step: Step) -> tuple[Tensor, Tensor]:
    """(the gradient of an objective at ratio one, that of -A log_prob), summed over tokens."""
    objective = policy_objective(variant.kind, "token-sum", **variant.options)
    found = run(objective, step.on_policy()).gradients["log_prob"]
    return found, torch.where(step.mask, -step.columns["advantages"], 0.0)


ALIKE = replace(STEP, columns={**STEP.columns, "advantages": STEP.columns["advantages"][:, :1].expand(STEP.mask.shape)})
"""One advantage for all tokens of a sequence, as most estimators give."""


@pytest.mark.parametrize("variant", variants("policy_losses"), ids=str)
def test_on_policy_a_loss_has_the_gradient_it_declares(variant: Variant) -> None:
    kind, separator, declared = metadata_of(variant.kind).on_policy.partition(": ")
    found, plain = on_policy_gradient(variant, STEP)
    if kind == "none":
        assert declared, "say why"
        if not variant.options:
            assert not torch.allclose(found, plain), "its gradient is plain: say so"
        if "plain where" in declared:
            torch.testing.assert_close(*on_policy_gradient(variant, ALIKE), rtol=1e-9, atol=1e-12)
        return
    said = section("policy_losses", variant.kind, **variant.options)
    options = {name: getattr(said, name) for name in options_of(LOSSES[variant.kind])}
    assert (kind, separator) in (("plain", ""), ("factor", ": "))
    factor = 1.0 if kind == "plain" else declared_factor(declared, options)
    if kind == "factor" and not variant.options:
        assert factor != 1, "a factor of one is plain"
    torch.testing.assert_close(found, factor * plain, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    """Along random directions, stop-gradients held at the base point."""
    objective = OBJECTIVES[name]()
    step = selected(objective, step_for(objective))
    rows, totals = range(len(step.mask)), step.totals
    gradients = {answer: g for answer, g in run(objective, step, select=False).gradients.items() if g.ne(0).any()}
    assert gradients, "nothing has a gradient"
    for answer, exact in gradients.items():
        assert exact[~step.mask].eq(0).all()
        at = step.answers[answer]

        def loss(point: Tensor, answer: str = answer) -> Tensor:
            return loss_of(objective, step, {**step.answers, answer: point}, rows, totals).loss

        held = held_at(loss, at)
        rounding = 1e-8 + 1e-9 * abs(held(at))
        for seed in range(3):
            direction = torch.randn(at.shape, generator=torch.Generator().manual_seed(seed), dtype=at.dtype)
            found, expected = slope(held, at, direction), float((exact * direction).sum())
            assert found == pytest.approx(expected, rel=1e-6, abs=rounding)


def test_a_stop_gradient_that_is_forgotten_is_noticed() -> None:
    at = torch.tensor([0.3, -0.7], dtype=torch.float64)

    def stopped(x: Tensor) -> Tensor:
        return (x.detach().exp() * x).sum()

    found = finite_differences(stopped, at)
    torch.testing.assert_close(found, at.exp(), rtol=1e-8, atol=1e-8)
    assert not torch.allclose(found, at.exp() * (1 + at))


# --------------------------------------------------------------------------- nothing where nothing is


def with_rubbish(step: Step, rubbish: float) -> Step:
    """The step with this number wherever nothing is trained."""

    def dirty(values: Tensor) -> Tensor:
        mask = step.mask.view(*step.mask.shape, *[1] * (values.dim() - 2))
        return torch.where(mask, values, rubbish)

    return replace(
        step,
        columns={name: dirty(column) for name, column in step.columns.items()},
        answers={name: dirty(answer) for name, answer in step.answers.items()},
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_stands_outside_the_mask_cannot_reach_loss_gradient_or_metrics(name: str) -> None:
    objective = OBJECTIVES[name]()
    step = step_for(objective)
    clean = run(objective, with_rubbish(step, 0.0))
    for rubbish in (math.nan, math.inf):
        run(objective, with_rubbish(step, rubbish)).assert_same(clean, rtol=0, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_a_trained_token_everything_is_zero(name: str) -> None:
    objective = OBJECTIVES[name]()
    nothing = replace(STEP, mask=torch.zeros_like(STEP.mask))
    done = run(objective, nothing)
    assert float(done.loss) == 0
    assert all(gradient.eq(0).all() for gradient in done.gradients.values())
    done.assert_finite()


# --------------------------------------------------------------------------- extremes


def single(step: Step, columns: Mapping[str, Tensor]) -> Step:
    """The step in float32, with these columns."""
    return replace(
        step,
        columns={name: values.float() for name, values in {**step.columns, **columns}.items()},
        answers={name: values.float() for name, values in step.answers.items()},
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_extreme_log_ratios_stay_finite(name: str) -> None:
    """Every token far off policy, or a single one; every model that is compared with."""
    objective = OBJECTIVES[name]()
    step = step_for(objective)
    others = [other for other, values in step.columns.items() if other.endswith("log_prob") and values.dim() == 2]
    for log_ratio in (-1000.0, 1000.0):
        far = step.answers["log_prob"] - log_ratio
        run(objective, single(step, dict.fromkeys(others, far))).assert_finite()
        one = torch.zeros_like(step.mask).index_fill_(1, torch.tensor([1]), True)
        mixed = {other: torch.where(one, far, step.columns[other]) for other in ("old_log_prob", "rollout_log_prob")}
        run(objective, single(step, mixed)).assert_finite()


# --------------------------------------------------------------------------- no advantage, no gradient


@pytest.mark.parametrize("kind", [kind for kind, loss in LOSSES.items() if "advantages" in loss.metadata.needs])
def test_advantages_of_zero_give_a_gradient_of_exactly_zero(kind: str) -> None:
    """On policy where the gradient is the advantage's; off policy where nothing holds the policy to the old one."""
    metadata = metadata_of(kind)
    step = single(STEP, {"advantages": torch.zeros(STEP.mask.shape)})
    moved = False
    for variant in variants_of("policy_losses", kind):
        objective = policy_objective(kind, **variant.options)
        if not metadata.on_policy.startswith("none"):
            assert run(objective, step.on_policy()).gradients["log_prob"].eq(0).all(), variant
        moved |= bool(run(objective, step).gradients["log_prob"].ne(0).any())
    assert moved == metadata.anchored


# --------------------------------------------------------------------------- what is said about them


def check_words(function: Callable[..., Any]) -> None:
    metadata = vars(function)["metadata"]
    functions = [function, *([metadata.select] if getattr(metadata, "select", None) else [])]
    assert metadata.formula
    assert metadata.source
    assert function.__doc__
    for option in (name for f in functions for name in options_of(f)):
        assert vars(function)["Config"].model_fields[option].description, f"no help for {option}"
        assert mentions_option(metadata.formula, option), f"the formula does not mention {option}"


REGISTERED = [
    (room, kind)
    for room in (
        "advantages",
        "policy_losses",
        "gates",
        "kl_estimators",
        "entropies",
        "aggregations",
        "pair_losses",
        "score_losses",
        "filters",
        "shapings",
    )
    for kind in catalogue(room)
]


@pytest.mark.parametrize(("room", "kind"), REGISTERED)
def test_everything_registered_says_what_it_is(room: str, kind: str) -> None:
    check_words(catalogue(room)[kind])
