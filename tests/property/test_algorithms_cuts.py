"""However a step is cut, ordered or padded, its loss, gradient and metrics are the same numbers: everything registered,
selections, gates, corrections and rows of an expert included."""

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from algebra import STEP, Outcome, Step, make_step, objectives, policy_objective, run, selected
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.algorithms import PerToken, PolicyInputs, agg_loss, catalogue
from trivium.foundation.errors import UnknownName

MODES = catalogue("aggregations")
BY_MODE = {mode: objectives(mode) for mode in MODES}
OBJECTIVES = BY_MODE["token-mean"]
ROWS = 6


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Rows of every length, holes, empty rows and rows of an expert included, at least one trained token."""
    lengths = st.lists(st.booleans(), min_size=1, max_size=6)
    rows = [draw(lengths) for _ in range(draw(st.sampled_from([2, 4, ROWS])))]
    mask = torch.zeros(len(rows), 1 + max(len(row) for row in rows), dtype=torch.bool)
    for row, trained in enumerate(rows):
        mask[row, 1 : 1 + len(trained)] = torch.tensor(trained)
    mask[0, 1] = True
    experts = draw(st.sets(st.integers(0, len(rows) - 1)))
    return make_step(mask, draw(st.integers(0, 2**31)), sorted(experts))


def orders(objective: Any, rows: int, data: st.DataObject) -> list[list[int]]:
    """The rows in any order, cut anywhere; pairs stay together."""
    size = 2 if objective.unit == "pair" else 1
    units = data.draw(st.permutations(range(rows // size)))
    order = [size * unit + place for unit in units for place in range(size)]
    cuts = data.draw(st.sets(st.integers(1, rows // size)))
    return [order[size * a : size * b] for a, b in pairwise(sorted({0, rows // size} | cuts))]


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=number_of(3))
@given(step=steps(), data=st.data())
def test_cutting_ordering_and_padding_change_nothing(name: str, step: Step, data: st.DataObject) -> None:
    check_cut(OBJECTIVES[name](), step, data)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-mean"])
@pytest.mark.parametrize("name", ["value", "loss:ppo", "loss:mix", "loss:clip_cov", "kl:mse", "entropy:sampled"])
@settings(max_examples=number_of(3))
@given(step=steps(), data=st.data())
def test_nor_do_they_with_another_mean(name: str, mode: str, step: Step, data: st.DataObject) -> None:
    check_cut(BY_MODE[mode][name](), step, data)


def check_cut(objective: Any, step: Step, data: st.DataObject) -> None:
    step = selected(objective, step)
    parts, padding = orders(objective, len(step.mask), data), data.draw(st.integers(0, 3))
    run(objective, step, parts, padding=padding, select=False).assert_same(run(objective, step, select=False))


AHEAD = [name for name, make in OBJECTIVES.items() if make().looks_at or {"selected", "token_weight"} & make().needs]
"""Those that decide something over the whole step."""


@pytest.mark.parametrize("name", AHEAD)
@settings(max_examples=number_of(3))
@given(step=steps(), data=st.data())
def test_what_is_selected_does_not_depend_on_the_order_of_rows(name: str, step: Step, data: st.DataObject) -> None:
    objective = OBJECTIVES[name]()
    order = list(chain.from_iterable(orders(objective, len(step.mask), data)))
    straight, shuffled = selected(objective, step).rows(order), selected(objective, step.rows(order))
    assert torch.equal(straight.mask, shuffled.mask)
    assert straight.columns.keys() == shuffled.columns.keys()
    for column, values in straight.columns.items():
        torch.testing.assert_close(values, shuffled.columns[column], rtol=1e-9, atol=1e-12)


def test_a_loss_that_looks_at_its_micro_batch_is_noticed() -> None:
    def centred(x: PolicyInputs) -> PerToken:
        return PerToken(-(x.advantages - x.advantages.mean()) * x.log_prob)

    objective = replace(policy_objective("reinforce"), policy_loss=centred)
    whole = run(objective, STEP)
    for changed in (run(objective, STEP, [[0, 1, 2], [3, 4, 5]]), run(objective, STEP, padding=1)):
        with pytest.raises(AssertionError):
            changed.assert_same(whole)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=number_of(3))
@given(step=steps())
def test_ranks_that_average_gradients_get_the_gradient_of_one_process(mode: str, step: Step) -> None:
    pairs = [name for name in BY_MODE[mode] if name.startswith(("pair:", "score:"))]
    for name in ("loss:ppo", "loss:mix", "value", *pairs):
        objective = BY_MODE[mode][name]()
        size, rows = 2 if name in pairs else 1, range(len(step.mask))
        shares = [[row for row in rows if row // size % 2 == rank] for rank in range(2)]
        alone = run(objective, step)
        ranks = run(
            objective, step, [share for share in shares if share], dp_size=2
        )  # summed here, averaged by the ranks
        halved = {answer: gradient / 2 for answer, gradient in ranks.gradients.items()}
        Outcome(ranks.loss / 2, halved, {}, {}).assert_same(Outcome(alone.loss, alone.gradients, {}, {}))


@settings(max_examples=number_of(40))
@given(step=steps())
def test_aggregation_is_the_mean_it_is_named_after(step: Step) -> None:
    mask, loss = step.mask, step.columns["advantages"]
    rows = [row[trained].tolist() for row, trained in zip(loss, mask, strict=True) if trained.any()]
    expected = {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "token-sum": sum(map(sum, rows)),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(rows) / mask.shape[1],
    }
    for mode in expected:
        assert float(agg_loss(loss, mask, mode)) == pytest.approx(expected[mode], rel=1e-9, abs=1e-12)


def test_another_mode_is_an_error_with_a_suggestion() -> None:
    with refused(UnknownName, "'token-men'", "'token-mean'"):
        agg_loss(torch.zeros(1, 1), torch.ones(1, 1), "token-men")
