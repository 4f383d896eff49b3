"""Sampling masks: what each token was sampled among is recorded, and log-probabilities are over the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from moe_parts import batch_of, group_of, sampled, turn_of
from training_parts import VOCABULARY, Parts, Reinforce, make_engine, write_model
from transformers import AutoModelForCausalLM

from trivium.buffers.journal import decode_group, encode_group
from trivium.engines.torch.sampling import Kept
from trivium.foundation.errors import DataError
from trivium.models.heads.kept import KeptSets
from trivium.models.heads.log_prob_head import log_prob_and_entropy, mean_discriminant, sum_pi_squared
from trivium.models.heads.vocabulary_part import OutputLayer
from trivium.types import Batch, Experience, Group, StopReason, Turn, experiences_of

PROMPT = np.arange(5, 20, dtype=np.int32)
WAYS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.5},
    "min_new_tokens": {"min_new_tokens": 9},
    "all": {"top_p": 0.9, "top_k": 12, "min_p": 0.05, "min_new_tokens": 9, "temperature": 0.7},
}


def rolled_out(model_dir: Path, **how: Any) -> Group:
    sampling = {"extra": ("kept",), "temperature": 0.8, **how}
    return group_of(*[[turn_of(PROMPT, done)] for done in sampled(model_dir, [PROMPT] * 3, **sampling)])


def sets_of(experience: Experience) -> list[set[int]]:
    """What each token was sampled among."""
    every, ids, start = set(range(VOCABULARY)), experience.extra["kept"].astype(int).tolist(), 0
    sets: list[set[int]] = []
    for count in experience.extra["kept_count"].tolist():
        own = set(ids[start : start + abs(count)])
        sets.append(own if count > 0 else every - own)
        start += abs(count)
    assert start == len(ids)
    return sets


def slow_log_probs(model: Any, experience: Experience, temperature: float) -> torch.Tensor:
    """(L - 1,): each token's among its own set."""
    tokens = torch.from_numpy(experience.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1] / temperature
    numbers: list[torch.Tensor] = []
    for row, token, kept in zip(logits, tokens[1:], sets_of(experience)[1:], strict=True):
        among = torch.tensor(sorted(kept))
        numbers.append(row[token] - torch.logsumexp(row[among], 0))
    return torch.stack(numbers)


@pytest.mark.parametrize("way", WAYS)
def test_the_ratio_is_one_at_staleness_zero(way: str, tmp_path: Path) -> None:
    how = WAYS[way]
    model_dir = write_model(tmp_path)
    group = rolled_out(model_dir, **how)
    batch = batch_of(decode_group(encode_group(group)))
    engine = make_engine(model_dir, temperature=how.get("temperature", 0.8))
    for experience, scored in zip(batch.experiences, engine.score(batch, "old"), strict=True):
        mask = experience.response_mask
        assert np.abs(scored - experience.rollout_log_prob)[mask].max() < 2e-5
        kept = sets_of(experience)
        sizes = {len(each) for each, own in zip(kept, mask, strict=True) if own}
        assert max(sizes) < VOCABULARY or way == "min_new_tokens"
        assert way != "top_k" or sizes == {3}
        if how.get("min_new_tokens"):
            assert all(1 not in each for each in kept[len(PROMPT) : len(PROMPT) + 9])
    bare = Batch(tuple(replace(e, extra={}) for e in batch.experiences))
    gaps = zip(engine.score(bare, "old"), batch.experiences, strict=True)
    assert max(np.abs(s - e.rollout_log_prob)[e.response_mask].max() for s, e in gaps) > 1e-3


def test_the_gradient_is_that_of_a_slow_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = write_model(tmp_path, "llama")
    batch = batch_of(rolled_out(model_dir, top_p=0.6))
    masks = [np.arange(len(e)) % 5 > 0 for e in batch.experiences]  # some tokens are not trained on
    batch = batch.masked(masks)
    engine = make_engine(model_dir, Parts((Reinforce(),)), dtype="float64")
    optimizer, gradients = engine._learner("policy").optimizer, {}

    def step(self: Any, *_: object) -> float:
        gradients.update({name: each.grad.clone() for name, each in self.parameters.items()})
        return 0.0

    monkeypatch.setattr(type(optimizer), "step", step)
    engine.update("policy", batch.with_columns(advantages=[np.ones(len(e)) for e in batch.experiences]), Reinforce())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    total = batch.num_response_tokens
    for e in batch.experiences:
        mask = torch.from_numpy(e.response_mask[1:].copy())
        (-slow_log_probs(model, e, 0.8)[mask].sum() / total).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_head_over_sets_is_the_softmax_over_them(entropy_grad: bool) -> None:
    """Every number and every gradient, in several chunks, against logits that are whole."""
    generator = torch.Generator().manual_seed(0)
    many, width, size = 600, 7, 53
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((many, width), (size, width), (size,))
    )
    kept = torch.rand(many, size, generator=generator) < torch.rand(many, 1, generator=generator)
    targets = torch.randint(0, size, (many,), generator=generator)
    kept[torch.arange(many), targets] = True
    kept[5] = True
    recorded = Kept.of(torch.where(kept, 0.0, -torch.inf))
    assert (recorded.counts < 0).any()
    assert (recorded.counts > 0).any()
    counts = torch.from_numpy(recorded.counts.astype(np.int64))
    sets = KeptSets(counts, torch.from_numpy(recorded.ids), counts.abs().cumsum(0))
    assert torch.equal(sets.left_out(slice(100, 400), size), ~kept[100:400])
    chosen = torch.tensor([7, 5, 300, 0])
    assert torch.equal(sets.select(chosen).left_out(slice(0, 4), size), ~kept[chosen])

    log_prob, entropy = log_prob_and_entropy(
        hidden, OutputLayer(weight, bias, 0.7), targets, entropy_grad=entropy_grad, kept=sets
    )
    log_p = ((hidden @ weight.T + bias) / 0.7).masked_fill(~kept, -torch.inf).log_softmax(1)
    p, finite = log_p.exp(), log_p.masked_fill(~kept, 0.0)
    expected = finite[torch.arange(many), targets], -(p * finite).sum(1)
    torch.testing.assert_close((log_prob, entropy), expected)
    factors = torch.randn(2, many, generator=generator, dtype=torch.float64)
    factors[1] *= entropy_grad
    gradients, slow = (
        torch.autograd.grad((factors * torch.stack(pair)).sum(), (hidden, weight, bias), retain_graph=True)
        for pair in ((log_prob, entropy if entropy_grad else entropy.detach()), expected)
    )
    torch.testing.assert_close(gradients, slow)
    squares = sum_pi_squared(hidden, OutputLayer(weight, bias, 0.7), kept=sets)
    torch.testing.assert_close(squares, (p * p).sum(1))
    mean = mean_discriminant(hidden, OutputLayer(weight, bias, 0.7), kept=sets)
    torch.testing.assert_close(mean, (p * p * (expected[1][:, None] + finite)).sum(1))


def test_turns_put_their_sets_one_after_another() -> None:
    one = {"kept": np.array([7, 9, 8], np.uint16), "kept_count": np.array([2, -1], np.int32)}
    two = {"kept": np.array([3], np.uint16), "kept_count": np.array([0, 1], np.int32)}
    first = Turn([5, 6], [7, 4], [-1.0, -1.0], [0, 0], StopReason.EOS, "", extra=one)
    second = Turn([5, 6, 7, 4, 9], [10, 3], [-1.0, -1.0], [0, 0], StopReason.EOS, "", extra=two)
    group = group_of([first, second])
    (experience,) = experiences_of(group, group.trajectories[0])
    assert experience.extra["kept_count"].tolist() == [0, 0, 2, -1, 0, 0, 1]
    assert experience.extra["kept"].tolist() == [7, 9, 8, 3]


def test_a_token_outside_its_own_set_is_refused(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path)
    (first, *rest) = batch_of(rolled_out(model_dir, top_k=2)).experiences
    shifted = replace(first, extra={**first.extra, "kept": (first.extra["kept"] + 1) % VOCABULARY})
    with refused(DataError, "kept"):
        make_engine(model_dir).score(Batch((shifted, *rest)), "old")
