"""The policy as its own teacher: the same ids under another prompt, with current, initial and averaged weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episodes import group, turn
from failing import refused
from training_parts import VOCABULARY, Parts, make_engine, weights, write_model
from transformers import AutoModelForCausalLM

from trivium.algorithms import PolicyObjective, catalogue
from trivium.algorithms.objective import Term
from trivium.foundation.errors import ConfigError
from trivium.types import SCORES, Batch, Prompt, Teacher, Trajectory, experiences_of

TEMPERATURE = 0.8
LOSSES = catalogue("policy_losses")
PPO = LOSSES["ppo"]
PROMPTS = (Prompt(np.array([9, 8, 7, 6, 5, 4])), Prompt(np.array([11])), None)
"""A longer prompt, a shorter one, and none: that row is not taught."""


def batch_of() -> Batch:
    """Three rows with two turns, the observation between them and different prompts for the teacher."""
    rows = []
    for index, prompt in enumerate(PROMPTS):
        rng = np.random.default_rng(index)
        first, observed, second = (rng.integers(3, VOCABULARY, n).tolist() for n in (2 + index, 3, 4))
        turns = (turn([5, 6, 7], first), turn([5, 6, 7, *first, *observed], second))
        member = Trajectory(index, turns, {"exact": 0.0})
        (e,) = experiences_of(group(0, member), member)
        rows.append(replace(e, teacher_prompt=prompt))
    batch = Batch(tuple(rows))
    return batch.with_columns(
        taught=[np.full(len(e), e.teacher_prompt is not None) for e in rows],
        advantages=[np.full(len(e), 0.7) for e in rows],
        old_log_prob=[e.rollout_log_prob for e in rows],
    )


def learning(loss: str = "distill_student_top_k", coef: float = 1.0, top_k: int = VOCABULARY, **teacher: Any) -> Parts:
    function = LOSSES[loss]
    objective = PolicyObjective(PPO, PPO.metadata, distill=Term(coef, function, function.metadata), taught=True)
    score = {column: what for what, column in SCORES.items()}
    needs = frozenset(score[name] for name in function.metadata.needs)
    return Parts((objective,), needs, teacher=Teacher(None, top_k, context=("{answer}",), **teacher))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def dense(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """(L, V) log-probabilities of each token from what precedes it; nothing for the first."""
    logits = model(input_ids=torch.tensor(tokens.copy())[None].long()).logits[0, :-1] / TEMPERATURE
    return torch.cat([torch.zeros(1, logits.shape[1]), logits.log_softmax(-1)])


def test_scores_are_those_of_the_same_ids_under_the_teachers_prompt(model_dir: Path) -> None:
    batch = batch_of()
    engine = make_engine(model_dir, learning(top_k=5), temperature=TEMPERATURE, max_tokens_per_micro_batch=20)
    scored = {what: engine.score(batch, what) for what in ("teacher", "teacher_top", "student_top", "old")}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    for row, (e, prompt) in enumerate(zip(batch.experiences, PROMPTS, strict=True)):
        completion = e.tokens[e.first :]
        read = e.tokens if prompt is None else np.concatenate([prompt.tokens, completion])
        with torch.no_grad():
            theirs, own = (dense(model, tokens)[-len(completion) :] for tokens in (read, e.tokens))
        trained, ids = e.response_mask[e.first :].copy(), torch.tensor(completion.copy()).long()
        expected = {
            "teacher": theirs.gather(1, ids[:, None])[:, 0],
            "old": own.gather(1, ids[:, None])[:, 0],
            "teacher_top": theirs.topk(5).values,
            "student_top": theirs.gather(1, own.topk(5).indices),
        }
        for what, values in expected.items():
            found = scored[what][row]
            assert len(found) == len(e)
            assert not found[~e.response_mask].any()
            found = found[e.first :][trained]
            np.testing.assert_allclose(found[..., 1] if found.ndim > 1 else found, values[trained].numpy(), atol=1e-5)
        assert np.array_equal(scored["student_top"][row][e.first :][trained][..., 0], own.topk(5).indices[trained])


@pytest.mark.parametrize("coef", [1.0, 0.4])
def test_loss_and_gradient_are_the_enumerated_divergence(model_dir: Path, coef: float) -> None:
    """(1 - w) times the policy gradient and w times KL(policy, policy with context), over the whole vocabulary."""
    algorithm, batch = learning(coef=coef), batch_of()
    engine = make_engine(model_dir, algorithm, dtype="float64", temperature=TEMPERATURE, max_tokens_per_micro_batch=20)
    own = engine.score(batch, "old")
    sampled = tuple(replace(e, rollout_log_prob=row) for e, row in zip(batch.experiences, own, strict=True))
    batch = replace(batch, experiences=sampled).with_columns(
        old_log_prob=own, student_top=engine.score(batch, "student_top")
    )
    found = engine.update("policy", batch, algorithm.objectives[0])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    total = torch.zeros((), dtype=torch.float64)
    for e, prompt in zip(batch.experiences, PROMPTS, strict=True):
        policy = dense(model, e.tokens)[e.first :]
        trained, ids = torch.tensor(e.response_mask[e.first :].copy()), torch.tensor(e.tokens[e.first :].copy()).long()
        log_prob = policy.gather(1, ids[:, None])[:, 0]
        total = total - (1 - coef) * 0.7 * (log_prob - log_prob.detach()).exp()[trained].sum()
        if prompt is not None:
            teacher = dense(model, np.concatenate([prompt.tokens, e.tokens[e.first :]]))[-len(policy) :].detach()
            total = total + coef * (policy.exp() * (policy - teacher)).sum(-1)[trained].sum()
    loss = total / batch.num_response_tokens
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert found["train/loss/policy"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found["train/grad_norm/policy"] == pytest.approx(float(norm), rel=1e-5)


def test_without_another_prompt_the_current_policy_teaches_nothing(model_dir: Path) -> None:
    alike = tuple(replace(e, teacher_prompt=Prompt(e.tokens[: e.first])) for e in batch_of().experiences)
    batch = replace(batch_of(), experiences=alike)
    for loss in ("distill", "distill_top_k", "distill_student_top_k"):
        algorithm = learning(loss, top_k=5)
        engine = make_engine(model_dir, algorithm, temperature=TEMPERATURE)
        (what,) = algorithm.needs
        scored = batch.with_columns(**{SCORES[what]: engine.score(batch, what)})
        assert engine.update("policy", scored, algorithm.objectives[0])["train/grad_norm/policy"] == 0, loss


def test_candidates_of_teacher_and_policy_in_one_objective_are_kept_apart(model_dir: Path) -> None:
    """The loss of both is the mixture of the two losses alone, for sets of unequal size too."""
    coef, batch, found = 0.4, batch_of(), {}
    scores = make_engine(model_dir, learning(top_k=4), temperature=TEMPERATURE)
    columns = {"teacher_top": scores.score(batch, "teacher_top"), "student_top": scores.score(batch, "student_top")}
    columns["student_top"] = [each[:, :3] for each in columns["student_top"]]
    assert any((a[:, :3, 0] != b[..., 0]).any() for a, b in zip(*columns.values(), strict=True))
    batch = batch.with_columns(**columns)
    student, teacher = LOSSES["distill_student_top_k"], LOSSES["distill_top_k"]
    for name, loss, share in (("student", teacher, 1.0), ("teacher", teacher, 0.0), ("both", teacher, coef)):
        objective = PolicyObjective(loss, loss.metadata, distill=Term(share, student, student.metadata), taught=True)
        engine = make_engine(model_dir, Parts((objective,)), dtype="float64", temperature=TEMPERATURE)
        found[name] = engine.measure("policy", batch, objective)["train/loss/policy"]
    alone = {}
    for name, loss in (("student", student), ("teacher", teacher)):
        objective = PolicyObjective(loss, loss.metadata, taught=True)
        engine = make_engine(model_dir, Parts((objective,)), dtype="float64", temperature=TEMPERATURE)
        alone[name] = engine.measure("policy", batch, objective)["train/loss/policy"]
        assert found[name] == pytest.approx(alone[name], rel=1e-12)
    assert found["both"] == pytest.approx(coef * alone["student"] + (1 - coef) * alone["teacher"], rel=1e-12)


def test_an_average_under_an_adapter_is_refused(model_dir: Path) -> None:
    with refused(ConfigError, "train.lora", "average"):
        make_engine(model_dir, learning(weights="average"), lora={"rank": 2})


def test_a_row_that_is_not_taught_has_no_gradient(model_dir: Path) -> None:
    algorithm, batch = learning(top_k=5), batch_of()
    engine = make_engine(model_dir, algorithm, temperature=TEMPERATURE)
    strange = [np.tile([4.0, -3.0], (len(e), 5, 1)) for e in batch.experiences]
    only = batch.with_columns(student_top=strange, taught=[np.zeros(len(e)) for e in batch.experiences])
    assert engine.update("policy", only, algorithm.objectives[0])["train/grad_norm/policy"] == 0


def test_initial_and_averaged_weights(model_dir: Path, tmp_path: Path) -> None:
    """After two updates: those of the start, and w <- 0.75 w + 0.25 policy; the average returns from a checkpoint."""
    batch, rate = batch_of(), 0.25
    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    for kind in ("initial", "average"):
        algorithm = learning(top_k=5, weights=kind, rate=rate)
        engine = make_engine(model_dir, algorithm, temperature=TEMPERATURE)
        expected = {name: start[name].clone() for name in weights(engine)}
        for _ in range(2):
            scored = batch.with_columns(student_top=engine.score(batch, "student_top"))
            engine.update("policy", scored, algorithm.objectives[0])
            if kind == "average":
                expected = {name: (1 - rate) * expected[name] + rate * w for name, w in weights(engine).items()}
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        model.load_state_dict(expected, strict=False)
        read = batch.experiences[0].under(PROMPTS[0])
        with torch.no_grad():
            theirs = dense(model.eval(), read.tokens).gather(1, torch.tensor(read.tokens.copy())[:, None].long())[:, 0]
        found = engine.score(batch, "teacher")
        kept = batch.experiences[0].response_mask
        np.testing.assert_allclose(found[0][kept], theirs.numpy()[read.response_mask], atol=1e-5)
        engine.save(tmp_path / kind)
        assert (tmp_path / kind / "teacher").is_dir() == (kind == "average")
        again = make_engine(model_dir, algorithm, temperature=TEMPERATURE)
        again.load(tmp_path / kind)
        for a, b in zip(again.score(batch, "teacher"), found, strict=True):
            assert np.array_equal(a, b)
