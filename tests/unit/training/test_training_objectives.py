"""Every registered objective through the learner: cut, packed or padded, a step leads to the same model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algebra import column_names, number, objectives
from training_parts import VOCABULARY, write_model

from trivium.foundation.metrics import checked
from trivium.models.heads.trained_models import LanguageModel, ScoreModel, ValueModel
from trivium.training.learner import Learner, RoleModel
from trivium.training.optim import Optimizer
from trivium.training.passes import MicroBatching
from trivium.training.section import OptimizerConfig
from trivium.types import EXPERT_VERSION, Batch, Experience, Metrics

CPU = torch.device("cpu")
OBJECTIVES = {name: make for name, make in objectives().items() if "," not in name}
"""Everything registered, under its defaults."""
LENGTHS = (9, 6, 5, 8, 3, 10)
HEADS = {"lm": LanguageModel, "value": ValueModel, "score": ScoreModel}


@dataclass(frozen=True)
class Models:
    """One model with each head: as its backbone packs sequences, and as it pads them."""

    packed: dict[str, Any]
    padded: dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}  # in which sequences would already meet
    directory = write_model(tmp_path_factory.mktemp("model"), **one_layer)
    packed, padded = ({head: build(head, directory) for head in HEADS} for _ in range(2))
    for model in padded.values():
        assert model.backbone.packs
        model.backbone.packs = False
        model.module.set_attn_implementation("sdpa")
    return Models(packed, padded)


def build(head: str, directory: Path) -> Any:
    if head == "lm":
        return LanguageModel(directory, dtype=torch.float64, device=CPU, temperature=0.8)
    return HEADS[head](directory, dtype=torch.float64, device=CPU, seed=0)


def make_batch(objective: Any) -> Batch:
    """Rows with holes, one of them empty; two of an expert where the objective tells them apart."""
    rng = np.random.default_rng(0)
    experts = (1, 4) if getattr(getattr(objective, "metadata", None), "split", False) else ()
    experiences = []
    for row, length in enumerate(LENGTHS):
        mask = rng.random(length) < 0.7
        mask[0], mask[-1] = False, True
        mask &= row != 2
        version = np.where(mask & (row not in experts), 0, EXPERT_VERSION)
        experiences.append(
            Experience(rng.integers(3, VOCABULARY, length), mask, np.zeros(length), version, f"g{row // 2}", row)
        )
    batch = Batch(tuple(experiences))
    names = sorted(column_names() - {"uniform", "log_prob", "entropy"})
    noise = {name: [number(name, (1, n), 7 * row)[0].numpy() for row, n in enumerate(LENGTHS)] for name in names}
    return batch.with_columns(**noise)


def near(batch: Batch, log_prob: list[np.ndarray]) -> Batch:
    """The batch with an old policy around the current one, and an engine that nearly agrees with it."""

    def moved(distance: float, by: str) -> list[np.ndarray]:
        rows = zip(batch.experiences, log_prob, batch.columns[by], strict=True)
        return [np.where(e.response_mask, row + distance * noise, 0) for e, row, noise in rows]

    engine = moved(1e-3, "returns")
    played = tuple(replace(e, rollout_log_prob=row) for e, row in zip(batch.experiences, engine, strict=True))
    return replace(batch, experiences=played).with_columns(old_log_prob=moved(0.2, "advantages"))


def updated(model: Any, objective: Any, max_tokens: int) -> tuple[Metrics, dict[str, torch.Tensor]]:
    """(metrics, how far every weight moved) of one update, after which the model is what it was."""
    module = model if isinstance(model, torch.nn.Module) else model.module
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    # With an epsilon this large a first step of AdamW follows the gradient, not its sign.
    optimizer = Optimizer(module, OptimizerConfig(lr=0.1, eps=1.0))
    learner = Learner(RoleModel(objective.role, model, optimizer), MicroBatching(max_tokens), max_response_length=16)
    batch = make_batch(objective)
    if objective.head == "lm":
        batch = near(batch, learner.score(batch, "log_prob"))
    for what in sorted(objective.looks_at):
        batch = batch.with_columns(**{what: learner.score(batch, what)})
    batch = objective.select(batch, 0)
    metrics = learner.update(batch, objective, 0.1, 1e9, step=0, who="a test")
    moved = {name: parameter.detach() - before[name] for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(before[name])
    return {**metrics, **batch.metrics}, moved


def ways(models: Models, head: str) -> Iterator[tuple[Any, int]]:
    """(model, tokens in a micro-batch): all at once; one sequence, or pair, at a time; a few of them, padded."""
    yield models.packed[head], 1000
    yield models.packed[head], 1
    yield models.padded[head], 20


@pytest.mark.parametrize("name", OBJECTIVES)
def test_cut_packing_and_padding_change_nothing(name: str, models: Models) -> None:
    objective = OBJECTIVES[name]()
    (metrics, moved), *others = (updated(model, objective, size) for model, size in ways(models, objective.head))
    assert checked(metrics)
    assert max(float(change.abs().max()) for change in moved.values()) > 0
    for other_metrics, other in others:
        assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)
        torch.testing.assert_close(other, moved, rtol=1e-6, atol=1e-9)
