"""However a step is cut, ordered or padded, its loss, gradient and metrics are the same numbers."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivium.algorithms import PolicyObjective, ValueObjective, agg_loss, catalogue
from trivium.algorithms.objective import Term
from trivium.errors import UnknownName
from trivium.models.loss import LossInputs, Totals

LOSSES = catalogue("policy_losses")
MODES = catalogue("aggregations")
KL, ENTROPY = catalogue("kl_estimators")["k2"], catalogue("entropies")["exact"]
OBJECTIVES = {
    **{
        f"policy-{name}": lambda mode, loss=loss: PolicyObjective(
            loss, loss.law, mode, entropy=Term(0.1, ENTROPY, ENTROPY.law), kl=Term(0.2, KL, KL.law)
        )
        for name, loss in LOSSES.items()
    },
    "value": lambda mode: ValueObjective(0.3, mode),
}
NAMES = ("advantages", "old_log_prob", "ref_log_prob", "rollout_log_prob", "values", "returns")


@st.composite
def steps(draw: st.DrawFn) -> tuple[Tensor, int]:
    """(mask, seed); rows of every length, holes and empty rows included, at least one trained token."""
    rows = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
    mask = torch.zeros(len(rows), 1 + max(len(row) for row in rows), dtype=torch.bool)
    for row, trained in enumerate(rows):
        mask[row, 1 : 1 + len(trained)] = torch.tensor(trained)
    mask[0, 1] = True
    return mask, draw(st.integers(0, 2**31))


def run(objective, mask: Tensor, seed: int, parts: list[list[int]], padding: int = 0, dp_size: int = 1):
    """Loss, gradient by row, metric sums and maxima of a step that is done in `parts`."""
    generator = torch.Generator().manual_seed(seed)
    data = {
        name: torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        for name in (*NAMES, "log_prob", "entropy")
    }
    leaf = data["log_prob"].requires_grad_(True)
    totals = Totals(int(mask.sum()), int(mask.any(-1).sum()), int(mask.sum(-1).max()), dp_size=dp_size)

    def cut(tensor: Tensor, rows: list[int]) -> Tensor:
        return torch.nn.functional.pad(tensor[rows], (0, padding))

    losses, sums, maxima = [], {}, {}
    for rows in parts:
        inputs = LossInputs(
            cut(mask, rows),
            cut(torch.zeros(mask.shape, dtype=torch.int32), rows),
            {name: cut(data[name], rows) for name in NAMES},
            log_prob=cut(leaf, rows),
            entropy=cut(data["entropy"].abs(), rows),
            values=cut(leaf, rows),
        )
        done = objective.loss(inputs, totals)
        losses.append(done.loss)
        for key, value in done.sums.items():
            sums[key] = sums.get(key, 0.0) + float(value)
        for key, value in done.maxima.items():
            maxima[key] = max(maxima.get(key, 0.0), float(value))
    loss = torch.stack(losses).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], sums, maxima


def assert_same(one, other) -> None:
    torch.testing.assert_close(one[:2], other[:2], rtol=1e-9, atol=1e-12)
    assert one[2] == pytest.approx(other[2], rel=1e-9, abs=1e-12)
    assert one[3] == other[3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=12, deadline=None)
@given(step=steps(), data=st.data())
def test_cutting_ordering_and_padding_change_nothing(name: str, mode: str, step, data: st.DataObject) -> None:
    mask, seed = step
    objective = OBJECTIVES[name](mode)
    rows = list(range(len(mask)))
    whole = run(objective, mask, seed, [rows])
    order = data.draw(st.permutations(rows))
    at = sorted(data.draw(st.sets(st.integers(1, len(rows)))) | {0, len(rows)})
    parts = [order[a:b] for a, b in pairwise(at)]
    assert_same(whole, run(objective, mask, seed, parts, padding=data.draw(st.integers(0, 3))))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10, deadline=None)
@given(step=steps())
def test_ranks_that_average_gradients_get_the_gradient_of_one_process(mode: str, step) -> None:
    mask, seed = step
    objective = OBJECTIVES["policy-ppo"](mode)
    rows = list(range(len(mask)))
    alone = run(objective, mask, seed, [rows])
    ranks = run(objective, mask, seed, [rows[::2], rows[1::2]], dp_size=2)  # summed here, averaged by the ranks
    torch.testing.assert_close((ranks[0] / 2, ranks[1] / 2), alone[:2], rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_aggregation_is_the_mean_it_is_named_after(step) -> None:
    mask, seed = step
    loss = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = [row[trained].tolist() for row, trained in zip(loss, mask, strict=True) if trained.any()]
    expected = {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "token-sum": sum(map(sum, rows)),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(rows) / mask.shape[1],
    }
    for mode in MODES:
        assert float(agg_loss(loss, mask, mode)) == pytest.approx(expected[mode], rel=1e-9, abs=1e-12)


def test_another_mode_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="did you mean 'token-mean'"):
        agg_loss(torch.zeros(1, 1), torch.ones(1, 1), "token-men")
