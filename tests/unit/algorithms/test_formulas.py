"""Formulas that know their options: values in the place of names, clauses that come and go."""

import pytest

from trivium.algorithms.formulas import mentions_option, with_all_clauses, with_values

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
    assert with_values(formula, options) == expected


def test_the_general_formula_shows_every_clause() -> None:
    assert with_all_clauses(GRPO) == "(R - mean(R)) [norm_by_std: / (std(R) + epsilon)]"
    assert "[level = token: w = r] [level = sequence: w = the row's ratio]" in with_all_clauses(WEIGHT)
    assert mentions_option(GRPO, "epsilon")
    assert not mentions_option("epsilons", "epsilon")
