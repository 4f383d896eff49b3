"""Formulas that know their options: values in the place of names, clauses that come and go."""

import pytest

from trivium.algorithms.formulas import general, mentioned, out_of_order, silenced, written

GRPO = "(R - mean(R)){norm_by_std: / (std(R) + epsilon)}"
WEIGHT = "-A w log_prob{level=token:, w = r}{level=sequence:, w = the row's ratio}{bound:, at most bound}"


@pytest.mark.parametrize(
    ("formula", "options", "expected"),
    [
        (GRPO, {"norm_by_std": True, "epsilon": 1e-6}, "(R - mean(R)) / (std(R) + 1e-06)"),
        (GRPO, {"norm_by_std": False, "epsilon": 1e-6}, "(R - mean(R))"),
        (WEIGHT, {"level": "token", "bound": None}, "-A w log_prob, w = r"),
        (WEIGHT, {"level": "sequence", "bound": 2.5}, "-A w log_prob, w = the row's ratio, at most 2.5"),
        ("clip(r, 1 - low, 1 + low_too)", {"low": 0.2, "low_too": 0.3}, "clip(r, 1 - 0.2, 1 + 0.3)"),
        ("-log_prob", {}, "-log_prob"),
    ],
)
def test_values_stand_where_names_were(formula: str, options: dict, expected: str) -> None:
    assert written(formula, options) == expected


def test_an_option_whose_clause_is_off_is_silenced() -> None:
    assert silenced(GRPO, {"norm_by_std": False, "epsilon": 1e-6}) == ["epsilon"]
    assert silenced(GRPO, {"norm_by_std": True, "epsilon": 1e-6}) == []
    assert silenced(WEIGHT, {"level": "token", "bound": None}) == []
    assert silenced("-A log_prob", {"other": 1}) == []  # what a formula never mentions, it cannot switch off


def test_bounds_in_the_wrong_order_are_found_by_the_formula() -> None:
    formula = "keep if low < mean(R) < high"
    assert out_of_order(formula, {"low": 1.0, "high": 0.0}) == [("low", "high")]
    assert out_of_order(formula, {"low": 0.0, "high": 1.0}) == []
    assert out_of_order("clip(r, 1 - low, 1 + high)", {"low": 1.0, "high": 0.0}) == []


def test_the_general_formula_shows_every_clause() -> None:
    assert general(GRPO) == "(R - mean(R)) [norm_by_std: / (std(R) + epsilon)]"
    assert "[level = token: w = r] [level = sequence: w = the row's ratio]" in general(WEIGHT)
    assert mentioned(GRPO, "epsilon")
    assert not mentioned("epsilons", "epsilon")
