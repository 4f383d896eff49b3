"""A reward model with several heads: its loss against slow formulas, known numbers, and any cut of the mini-batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from algebra import section
from failing import refused
from preferences import interleaved, on_rows, scoring
from torch import Tensor

from trivium.algorithms.batches import labels_of
from trivium.algorithms.metadata import ScoreLossMetadata, resolve_function
from trivium.algorithms.preference_objective import HeadsObjective
from trivium.errors import DataError
from trivium.models.heads.loss import LossDenominators, LossInputs, ScoreHead
from trivium.training.batching import count
from trivium.types import Batch, Experience, Group, Task, Trajectory

HEADS = ("preference", "alignment", "style")
CODES = {"A": 1.0, "B": -1.0, "tie": 2.0, None: 0.0}
LABELS = [  # of five pairs, by head; nothing is labelled by style
    ("A", "B", None),
    ("B", None, None),
    ("tie", "A", None),
    ("A", "tie", None),
    (None, "tie", None),
]


def objective(kind: str = "sigmoid", tie_coef: float = 0.3, **options: Any) -> HeadsObjective:
    loss, metadata = resolve_function("score_losses", section("score_losses", kind, **options), ScoreLossMetadata)
    return HeadsObjective(loss, metadata, ScoreHead(HEADS), tie_coef)


def logistic(z: float) -> float:
    return math.log1p(math.exp(-z))


SLOW = {
    "sigmoid": (lambda c, r: logistic(c - r - 0.1), {"margin": 0.1}),
    "logexp": (lambda c, r: math.log(1 + math.exp(r - c)), {}),
    "hps": (lambda c, r: -math.log(math.exp(14 * c) / (math.exp(14 * c) + math.exp(14 * r))), {"scale": 14.0}),
}


def minibatch() -> tuple[Batch, Tensor]:
    """(rows of ten completions of one to three tokens, scores (B, L, K)); the fourth pair has only one completion."""
    generator = torch.Generator().manual_seed(4)
    mask = np.zeros((10, 5), bool)
    for row in range(10):
        mask[row, 1 : 2 + row % 3] = row != 7
    zeros = np.zeros(5, np.float32)
    rows = tuple(Experience(zeros, m, zeros, zeros, f"pair-{n // 2}", n % 2) for n, m in enumerate(mask))
    labels = [np.tile(np.float32([CODES[label] for label in LABELS[n // 2]]), (5, 1)) for n in range(10)]
    scores = torch.randn(10, 5, 3, generator=generator, dtype=torch.float64)
    return Batch(rows).with_columns(labels=labels), scores


def total(
    done: HeadsObjective, batch: Batch, scores: Tensor, parts: list[list[int]] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of the mini-batch, done in parts."""
    batch = done.select(batch, 0)
    totals = count(batch, 5)
    loss, sums = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for rows in parts or [list(range(10))]:
        mask = torch.tensor(np.stack([batch.experiences[row].response_mask for row in rows]))
        columns = {
            name: torch.tensor(np.stack([batch.columns[name][row] for row in rows])).double() for name in done.needs
        }
        inputs = LossInputs(mask, torch.zeros(mask.shape), columns, values=scores[rows])
        outputs = done.loss(inputs, LossDenominators(totals.tokens, totals.sequences, 5, pairs=totals.pairs))
        loss = loss + outputs.loss
        for key, value in outputs.sums.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    return loss, done.derived({key: value / totals.tokens for key, value in sums.items()})


@pytest.mark.parametrize("kind", SLOW)
def test_the_loss_is_the_sum_over_heads_of_the_mean_over_their_labels(kind: str) -> None:
    slow, options = SLOW[kind]
    batch, scores = minibatch()
    scores.requires_grad_(True)
    expected, right, number = 0.0, dict.fromkeys(HEADS, 0), dict.fromkeys(HEADS, 0)
    for head, name in enumerate(HEADS):
        decided, ties = [], []
        for pair, labels in enumerate(LABELS):
            if pair == 3 or labels[head] is None:  # one of its completions is missing
                continue
            last = [float(scores[row, 1 + row % 3, head].detach()) for row in (2 * pair, 2 * pair + 1)]
            if labels[head] == "tie":
                ties.append(abs(last[0] - last[1]))
                continue
            chosen, rejected = last if labels[head] == "A" else last[::-1]
            decided.append(slow(chosen, rejected))
            right[name], number[name] = right[name] + (chosen > rejected), number[name] + 1
        expected += sum(decided) / max(len(decided), 1) + 0.3 * sum(ties) / max(len(ties), 1)
    loss, metrics = total(objective(kind, **options), batch, scores)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert number == {"preference": 2, "alignment": 2, "style": 0}
    for name in HEADS[:2]:
        assert metrics[f"train/preference_accuracy/{name}"] == pytest.approx(right[name] / number[name])
    assert "train/preference_accuracy/style" not in metrics
    assert metrics["train/preference_accuracy"] == pytest.approx(sum(right.values()) / sum(number.values()))
    (gradient,) = torch.autograd.grad(loss, scores)
    assert not gradient[..., 2].any()  # nothing is labelled
    assert not gradient[6:8].any()

    for parts in ([[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]], [[8, 9, 0, 1], [6, 7, 2, 3, 4, 5]]):
        cut, cut_metrics = total(objective(kind, **options), batch, scores, parts)
        assert cut.item() == pytest.approx(expected, abs=1e-12)
        assert cut_metrics == pytest.approx(metrics)
        torch.testing.assert_close(torch.autograd.grad(cut, scores)[0], gradient, atol=1e-12, rtol=0)


def test_known_numbers() -> None:
    """LightRFT's losses of c = [.8, .4] and j = [.3, .6], and the same with the scale that its head multiplies by."""
    scores = interleaved(torch.tensor([0.8, 0.4]), torch.tensor([0.3, 0.6]))
    expected = {
        ("sigmoid", ()): 0.636108,
        ("sigmoid", (("margin", 0.1),)): 0.683685,
        ("logexp", ()): 0.636108,
        ("hps", ()): 0.636108,
        ("hps", (("scale", 1 / 0.07),)): 1.4569,
        ("hps", (("scale", 1 / 0.07), ("learned", True))): 0.636108,  # the scores have the factor already
    }
    for (kind, options), value in expected.items():
        loss, _ = on_rows(scoring(kind, **dict(options)), scores, torch.ones_like(scores))
        assert float(loss) == pytest.approx(value, abs=2e-5), (kind, options)


def group(**columns: Any) -> Group:
    return Group(0, Task("t", (), columns), (Trajectory(0, (), {}), Trajectory(1, (), {})), 0)


@pytest.mark.parametrize(
    "columns",
    [
        {"labels": {"preference": "A", "alignment": "tie", "more": "B"}},
        {"preference": "A", "alignment": "C", "style": None},
        {"labels": {"preference": "B"}, "preference": "A", "alignment": "tie"},
    ],
)
def test_labels_are_read_from_columns_or_from_a_mapping(columns: dict[str, Any]) -> None:
    assert labels_of(group(**columns), HEADS).tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("columns", [{}, {"labels": {"prefernce": "A"}}, {"preference": "a"}, {"preference": 1}])
def test_a_row_without_labels_or_with_others_is_refused(columns: dict[str, Any]) -> None:
    with refused(DataError, "preference", "tie"):
        labels_of(group(**columns), HEADS)
