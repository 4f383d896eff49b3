"""KTO's reference point from mismatched pairs: which sequences they are, and the loss of a step against the paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from preferences import preference
from training_parts import make_engine, write_model
from transformers import AutoModelForCausalLM

from trivium.algorithms import GroupAlgorithm
from trivium.algorithms.batches import batch_of_pairs
from trivium.foundation.metrics import checked
from trivium.loops import add_scores, mini_batches, prepare_mini_batch, train_step
from trivium.types import EXPERT_VERSION, Group, Media, StopReason, Task, Trajectory, Turn


def row(number: int, prompt: list[int], completion: list[int], label: bool, *media: Media) -> Group:
    zeros = np.zeros(len(completion), np.float32)
    version = np.full(len(completion), EXPERT_VERSION, np.int32)
    turn = Turn(np.int32(prompt), np.int32(completion), zeros, version, StopReason.EOS, "", media)
    return Group(number, Task(f"task-{number}", (), {"label": label}), (Trajectory(0, (turn,)),))


ROWS = [
    row(0, [1, 5, 6], [7, 8, 9], True),
    row(1, [1, 5, 6], [9, 2], False),  # the same prompt: not a partner of the first
    row(2, [1, 3], [4, 4, 4, 4], True),
    row(3, [1, 9, 9, 9, 2], [6], False),
]
PARTNER = {0: 2, 1: 2, 2: 3, 3: 0}


def test_each_prompt_gets_the_completion_of_the_next_other_one() -> None:
    batch = batch_of_pairs(ROWS, mismatched=True)
    rows = [e for e in batch.experiences if e.index < 0 and e.response_mask.any()]
    assert len(batch) == 4 * len(ROWS)
    assert [e.tokens.tolist() for e in rows] == [
        [1, 5, 6, 4, 4, 4],  # shortened: the longest sequence of the others has six tokens
        [1, 5, 6, 4, 4, 4],
        [1, 3, 6],
        [1, 9, 9, 9, 2, 7],
    ]
    assert [e.tokens[e.response_mask].tolist() for e in rows] == [[4, 4, 4], [4, 4, 4], [6], [7]]
    assert not any(e.response_mask.any() for e in batch_of_pairs(ROWS[:1], mismatched=True).experiences[2:])


def test_images_stay_with_their_prompt() -> None:
    image = Media("image/png", b"one", (1, 3))
    other = Media("image/png", b"two", (1, 4))
    rows = [row(0, [1, 5, 6], [7], True, image), row(1, [1, 8, 8, 8], [2, 2], False, other)]
    found = [e for e in batch_of_pairs(rows, mismatched=True).experiences if e.index < 0 and e.response_mask.any()]
    assert [e.media for e in found] == [(image,), (other,)]
    assert [e.tokens.tolist() for e in found] == [[1, 5, 6, 2, 2], [1, 8, 8, 8, 7]]


def log_prob(path: Path, prompt: np.ndarray, completion: np.ndarray) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    tokens = torch.tensor([[*prompt.tolist(), *completion.tolist()]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1] / 0.8  # the temperature of `make_engine`
    return float(logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None]).sum())


def parts(row: int) -> tuple[np.ndarray, np.ndarray]:
    (turn,) = ROWS[row].trajectories[0].turns
    return turn.prompt_tokens, turn.tokens


@pytest.mark.parametrize("cuts", [1, 2])
def test_the_loss_of_a_mini_batch_is_that_of_the_paper(cuts: int, tmp_path: Path) -> None:
    reference = write_model(tmp_path / "reference")
    loss = preference("kto_mismatched", beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)
    algorithm = GroupAlgorithm("kto", (loss,), pairs=True, mismatched=True, mini_batches=cuts)
    engine = make_engine(reference, algorithm, dtype="float64", max_tokens_per_micro_batch=1)
    batch = algorithm.batch(ROWS)
    train_step(engine, batch, algorithm)  # the policy leaves the reference
    engine.save_weights(tmp_path / "policy")

    batch = add_scores(engine, batch, algorithm.needs)
    points = []
    for number, part in enumerate(mini_batches(batch, cuts)):
        mine = list(range(4)) if cuts == 1 else [[0, 1], [2, 3]][number]
        both = [tmp_path / "policy", reference]
        ratio = [(lambda a, b: a - b)(*(log_prob(path, *parts(i)) for path in both)) for i in mine]
        crossed = []
        for i in mine:
            prompt, completion = parts(i)[0], parts(PARTNER[i])[1][: 6 - len(parts(i)[0])]
            crossed.append((lambda a, b: a - b)(*(log_prob(path, prompt, completion) for path in both)))
        z0 = max(0.0, sum(crossed) / len(crossed))
        points.append(z0)
        expected = 0.0
        for i, r in zip(mine, ratio, strict=True):
            desirable = ROWS[i].task.columns["label"]
            z = 0.5 * (r - z0) if desirable else 0.5 * (z0 - r)
            expected += (1.5 if desirable else 0.5) * (1 - 1 / (1 + np.exp(-z))) / len(mine)
        prepared = prepare_mini_batch(engine, part, loss, 0)
        assert len(prepared) == 2 * len(mine)
        assert prepared.metrics["train/reference_point"] == pytest.approx(z0, abs=1e-5)
        measured = checked(engine.measure("policy", prepared, loss))
        assert measured["train/loss/policy"] == pytest.approx(expected, abs=1e-5)  # columns are float32
    assert max(points) > 0.01  # not the floor
