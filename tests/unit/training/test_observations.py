"""The cross-entropy of observations (ECHO): tokens, loss and gradient against a dense softmax, cut in any way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episodes import group, turn
from training_parts import VOCABULARY, Parts, make_engine, write_model
from transformers import AutoModelForCausalLM

from trivium.algorithms import PolicyObjective, catalogue
from trivium.loops import prepare_mini_batch
from trivium.training.batching import count
from trivium.types import Batch, Media, Trajectory, experiences_of

TEMPERATURE, COEF = 0.8, 0.3
PPO = catalogue("policy_losses")["ppo"]


def trajectory(index: int, *lengths: tuple[int, int]) -> Trajectory:
    """Turns of (tokens that the environment adds, tokens sampled); the members share their first prompt."""
    rng = np.random.default_rng(index + 1)
    seen, turns = [5, 6, 7], []
    for added, sampled in lengths:
        prompt = [*seen, *rng.integers(3, VOCABULARY, added).tolist()]
        tokens = rng.integers(3, VOCABULARY, sampled).tolist()
        turns.append(turn(prompt, tokens))
        seen = [*prompt, *tokens]
    return Trajectory(index, tuple(turns), {"environment": 0.0})


MEMBERS = (trajectory(0, (0, 3), (4, 2), (2, 3)), trajectory(1, (0, 5)), trajectory(2, (0, 2), (6, 1)))


def batch_of(advantage: float = 0.0) -> Batch:
    episode = group(0, *MEMBERS)
    batch = Batch(tuple(e for member in MEMBERS for e in experiences_of(episode, member)))
    return batch.with_columns(
        advantages=[np.full(len(e), advantage) for e in batch.experiences],
        old_log_prob=[e.rollout_log_prob for e in batch.experiences],
    )


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def updated(model_dir: Path, batch: Batch, coef: float, **config: Any) -> dict[str, float]:
    objective = PolicyObjective(PPO, PPO.metadata, observation_coef=coef)
    engine = make_engine(model_dir, Parts((objective,)), dtype="float64", temperature=TEMPERATURE, **config)
    return engine.update("policy", prepare_mini_batch(engine, batch, objective, 0), objective)


def test_observations_are_the_tokens_between_turns() -> None:
    batch = batch_of()
    assert [np.flatnonzero(e.observed).tolist() for e in batch.experiences] == [
        [6, 7, 8, 9, 12, 13],
        [],
        [5, 6, 7, 8, 9, 10],
    ]
    for e in batch.experiences:
        assert not (e.observed & e.response_mask).any()
        assert not e.observed[: e.response_mask.argmax()].any(), "the prompt of the task is no observation"


def test_an_image_between_turns_is_no_observation() -> None:
    after = turn([5, 6, 1, 2, 30, 30, 30, 7], [3], media=(Media("image/png", b"x", (4, 7)),))
    member = Trajectory(0, (turn([5, 6], [1, 2]), after), {"exact": 0.0})
    (e,) = experiences_of(group(0, member), member)
    assert np.flatnonzero(e.observed).tolist() == [7]


@pytest.mark.parametrize("config", [{}, {"max_tokens_per_micro_batch": 8}, {"share_prefix": True}])
def test_loss_and_gradient_are_the_papers(model_dir: Path, config: dict[str, Any]) -> None:
    """All advantages are 0, so the whole gradient is that of observations: eq. 3, sequence by sequence."""
    batch = batch_of()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    total, tokens, sequences = torch.zeros((), dtype=torch.float64), 0.0, 0
    for e in batch.experiences:
        places = [t for t in range(len(e)) if e.observed[t]]
        if not places:
            continue
        logits = model(input_ids=torch.tensor(e.tokens)[None].long()).logits[0] / TEMPERATURE
        surprise = [-logits[t - 1].log_softmax(-1)[int(e.tokens[t])] for t in places]
        total, sequences = total + sum(surprise) / len(places), sequences + 1
        tokens += float(sum(surprise).detach())
    (COEF * total / sequences).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    found = updated(model_dir, batch, COEF, **config)
    assert found["train/grad_norm/policy"] == pytest.approx(float(norm), rel=1e-6)  # transformers normalises in float32
    assert found["train/loss/policy"] == pytest.approx(COEF * float(total.detach()) / sequences, rel=1e-6)
    assert found["train/loss_term/observation"] == pytest.approx(float(total.detach()) / sequences, rel=1e-6)
    assert found["train/observation_loss"] == pytest.approx(tokens / 12, rel=1e-6)


def test_without_the_term_equal_rewards_teach_nothing(model_dir: Path) -> None:
    assert updated(model_dir, batch_of(), 0.0)["train/grad_norm/policy"] == 0


def test_the_policys_part_and_its_metrics_stay_as_they_are(model_dir: Path) -> None:
    plain, echo = (updated(model_dir, batch_of(0.7), coef) for coef in (0.0, COEF))
    assert echo["train/loss_term/policy_gradient"] == pytest.approx(plain["train/loss/policy"], rel=1e-12)
    for name in ("train/entropy", "train/tokens", "train/kl", "mismatch/log_prob_max"):
        assert echo[name] == pytest.approx(plain[name], rel=1e-12), name


def test_a_row_that_trains_no_token_is_not_counted() -> None:
    batch = batch_of().with_columns(observed=[e.observed for e in batch_of().experiences])
    masked = batch.masked([np.full(len(e), row != 0) for row, e in enumerate(batch.experiences)])
    totals = count(masked, 8)
    assert (totals.observed_tokens, totals.observed_sequences) == (6, 1)


def test_observations_are_read_from_the_whole_vocabulary(model_dir: Path) -> None:
    """The sets that sampling kept restrict the policy's own tokens only."""
    whole = batch_of()
    kept = []
    for e in whole.experiences:
        others = (e.tokens + 1) % VOCABULARY
        extra = {
            "kept": np.stack([e.tokens, others], 1)[e.response_mask].reshape(-1),
            "kept_count": np.where(e.response_mask, 2, 0),
        }
        kept.append(replace(e, extra=extra))
    narrow = replace(whole, experiences=tuple(kept))
    expected, found = (updated(model_dir, batch, COEF) for batch in (whole, narrow))
    assert found["train/observation_loss"] == pytest.approx(expected["train/observation_loss"], rel=1e-12)
    assert found["train/entropy"] < expected["train/entropy"]
