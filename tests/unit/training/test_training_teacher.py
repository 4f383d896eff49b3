"""The frozen teacher beside the policy: what it is asked, what is refused, and that agreement changes nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from training_parts import VOCABULARY, Parts, make_batch, make_engine, weights, write_model
from transformers import AutoModelForCausalLM

from trivium.algorithms import PolicyObjective, catalogue
from trivium.foundation.errors import TriviumError
from trivium.types import Batch, Teacher

LOSSES = catalogue("policy_losses")
TEMPERATURE = 0.8


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def teacher_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "teacher", "llama", seed=1)


@pytest.fixture
def batch() -> Batch:
    return make_batch(masked=(4,))


def learning(loss: str, teacher: Path, top_k: int = 5, **options: Any) -> Parts:
    objective = PolicyObjective(LOSSES[loss], LOSSES[loss].metadata)
    if options:
        objective = replace(objective, policy_loss=lambda x: LOSSES[loss](x, **options))
    needs = {"teacher_log_prob": "teacher", "teacher_top": "teacher_top"}
    return Parts((objective,), frozenset(needs[name] for name in objective.needs), teacher=Teacher(teacher, top_k))


def dense(directory: Path, tokens: np.ndarray) -> torch.Tensor:
    """(L, V) log-probabilities of each token from what precedes it, by transformers itself; nothing for the first."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens)[None].long()).logits[0, :-1] / TEMPERATURE
    return torch.cat([torch.zeros(1, logits.shape[1]), logits.log_softmax(-1)])


def test_scores_are_those_of_a_dense_softmax(model_dir: Path, teacher_dir: Path, batch: Batch) -> None:
    algorithm = learning("distill_top_k", teacher_dir)
    engine = make_engine(model_dir, algorithm, max_tokens_per_micro_batch=40)
    teacher, top = engine.score(batch, "teacher"), engine.score(batch, "teacher_top")
    squares, discriminant = engine.score(batch, "sum_pi_squared"), engine.score(batch, "mean_discriminant")
    for row, e in enumerate(batch.experiences):
        trained = torch.tensor(e.response_mask)
        theirs, own = dense(teacher_dir, e.tokens), dense(model_dir, e.tokens)
        chosen = theirs.gather(1, torch.tensor(e.tokens)[:, None].long()).squeeze(1)
        expected = {
            "teacher": (teacher[row], chosen),
            "top": (top[row][..., 1], theirs.topk(5).values),
            "squares": (squares[row], own.exp().square().sum(-1)),
            "discriminant": (
                discriminant[row],
                (own.exp().square() * (own - (own.exp() * own).sum(-1, keepdim=True))).sum(-1),
            ),
        }
        for name, (found, values) in expected.items():
            kept = trained if values.dim() == 1 else trained[:, None]
            torch.testing.assert_close(
                torch.tensor(found).double(), torch.where(kept, values, 0.0), rtol=1e-4, atol=1e-5, msg=name
            )
        assert np.array_equal(top[row][e.response_mask, :, 0], theirs.topk(5).indices[trained].numpy())
    assert top[4].shape == (len(batch.experiences[4]), 5, 2)  # a row without a trained token


def test_a_teacher_names_no_more_tokens_than_it_knows(model_dir: Path, teacher_dir: Path, batch: Batch) -> None:
    engine = make_engine(model_dir, learning("distill_top_k", teacher_dir, top_k=1000))
    (first, *_) = engine.score(batch, "teacher_top")
    assert first.shape == (len(batch.experiences[0]), VOCABULARY, 2)
    assert np.exp(first[batch.experiences[0].response_mask, :, 1]).sum(-1) == pytest.approx(1, rel=1e-5)


def test_the_gradient_over_candidates_is_that_of_the_dense_kl(model_dir: Path, teacher_dir: Path, batch: Batch) -> None:
    """One plain SGD-like look: the gradient norm of an update against that of the KL written out."""
    algorithm = learning("distill_top_k", teacher_dir, VOCABULARY)
    engine = make_engine(model_dir, algorithm, dtype="float64", max_tokens_per_micro_batch=30)
    found = engine.update(
        "policy", batch.with_columns(teacher_top=engine.score(batch, "teacher_top")), algorithm.objectives[0]
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    total = torch.zeros((), dtype=torch.float64)
    for e in batch.experiences:
        logits = model(input_ids=torch.tensor(e.tokens)[None].long()).logits[0, :-1] / TEMPERATURE
        policy, teacher = logits.log_softmax(-1), dense(teacher_dir, e.tokens)[1:]
        total = total + ((policy.exp() * (policy - teacher)).sum(-1))[torch.tensor(e.response_mask[1:])].sum()
    loss = total / batch.num_response_tokens
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert found["train/loss/policy"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert found["train/teacher_kl"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert found["train/teacher_mass"] == pytest.approx(1, rel=1e-6)
    assert found["train/grad_norm/policy"] == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "options"),
    [("distill", {}), ("distill_top_k", {"direction": "forward"}), ("distill_top_k", {"direction": "reverse"})],
)
def test_a_policy_that_is_its_own_teacher_stays_where_it_is(
    model_dir: Path, batch: Batch, loss: str, options: dict[str, str]
) -> None:
    algorithm = learning(loss, model_dir, **options)
    engine = make_engine(model_dir, algorithm, max_tokens_per_micro_batch=40)
    before = weights(engine)
    columns = {"teacher": "teacher_log_prob", "teacher_top": "teacher_top"}
    scored = batch.with_columns(**{columns[what]: engine.score(batch, what) for what in algorithm.needs})
    metrics = engine.update("policy", scored, algorithm.objectives[0])
    assert metrics["train/grad_norm/policy"] == 0
    assert metrics["train/teacher_kl"] == pytest.approx(0, abs=1e-7)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())


def test_a_teacher_of_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=VOCABULARY + 1)
    with refused(TriviumError, other, "32 tokens", "policy 31"):
        make_engine(model_dir, learning("distill", other))


def test_a_teacher_that_is_asked_and_not_named_is_refused(model_dir: Path) -> None:
    with refused(TriviumError, "algorithm.teacher.path"):
        make_engine(model_dir, Parts(needs=frozenset({"teacher"})))


def test_a_teacher_that_nobody_asks_is_not_opened(model_dir: Path, tmp_path: Path) -> None:
    make_engine(model_dir, Parts(teacher=Teacher(tmp_path / "nowhere", 4)))


def test_a_saved_engine_finds_its_teacher_again(
    model_dir: Path, teacher_dir: Path, batch: Batch, tmp_path: Path
) -> None:
    algorithm = learning("distill", teacher_dir)
    engine = make_engine(model_dir, algorithm)
    expected = engine.score(batch, "teacher")
    engine.update("policy", batch.with_columns(teacher_log_prob=expected), algorithm.objectives[0])
    engine.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "teacher").exists()
    again = make_engine(model_dir, algorithm)
    again.load(tmp_path / "saved")
    for a, b in zip(again.score(batch, "teacher"), expected, strict=True):
        assert np.array_equal(a, b)
