"""The sampler against slow definitions in float64."""

import numpy as np
import pytest
import torch
from example_counts import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.engines.torch.sampling import RowSampling, invert, sample

SIZES = st.sampled_from([1, 2, 3, 30, 127, 128, 129, 300, 5000])


def how(rows: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, blocked=False, eos=(0,)) -> RowSampling:
    return RowSampling(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, top_k, np.int64),
        np.full(rows, min_p, np.float32),
        np.full(rows, blocked),
        torch.tensor(eos),
    )


def random_logits(rows: int, size: int, seed: int, scale: float) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=number_of(100))
@given(
    SIZES,
    st.integers(0, 999),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)),
)
def test_the_uniform_falls_into_the_tokens_interval(
    size: int, seed: int, scale: float, temperature: float, uniform: float
) -> None:
    logits = random_logits(1, size, seed, scale)
    tokens, log_prob = sample(logits.clone(), np.array([uniform]), how(1, temperature))
    probs = (logits[0].double() / temperature).softmax(-1)
    edges = probs.cumsum(-1)
    token = int(tokens[0])
    assert edges[token] - probs[token] - 1e-5 <= uniform <= edges[token] + 1e-5
    assert probs[token] > 0
    assert log_prob[0] == pytest.approx(float(probs[token].log()), abs=1e-4)


@settings(max_examples=number_of(100))
@given(
    SIZES,
    st.integers(0, 999),
    st.floats(0.05, 1),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.floats(0, 1, exclude_max=True),
    st.booleans(),
)
def test_truncation_renormalises(
    size: int, seed: int, top_p: float, top_k: int, min_p: float, uniform: float, blocked: bool
) -> None:
    if size == 1 and blocked:
        return  # nothing could be said at all
    logits = random_logits(1, size, seed, 3.0)
    tokens, log_prob = sample(logits.clone(), np.array([uniform]), how(1, 0.7, top_p, top_k, min_p, blocked))
    allowed = [t for t in range(size) if not (blocked and t == 0)]
    weight = {t: float((logits[0, t].double() / 0.7).exp()) for t in allowed}
    ranked = sorted(allowed, key=lambda t: -weight[t])[: top_k or None]
    ranked = [t for t in ranked if weight[t] >= min_p * weight[ranked[0]]]
    total, kept, mass = sum(weight[t] for t in ranked), [], 0.0
    for t in ranked:
        if mass / total >= np.float32(top_p) < 1:
            break
        kept.append(t)
        mass += weight[t]
    # A cumulative sum that meets top_p within rounding may include one token more or less.
    near = [sum(weight[t] for t in ranked[: len(kept) + d]) for d in (-1, 0, 1)]
    token = int(tokens[0])
    assert token in ranked[: len(kept) + 1]
    assert any(abs(float(log_prob[0]) - np.log(weight[token] / m)) < 1e-3 for m in near if m > 0)
    if not any(abs(m / total - top_p) < 1e-5 for m in near):
        assert token in kept
        assert float(log_prob[0]) == pytest.approx(np.log(weight[token] / mass), abs=1e-3)


@settings(max_examples=number_of(30))
@given(SIZES, st.integers(1, 70), st.integers(0, 999), st.booleans(), st.booleans())
def test_a_row_does_not_depend_on_the_others(size: int, rows: int, seed: int, cut: bool, mixed: bool) -> None:
    rng = np.random.default_rng(seed)
    logits, uniforms = random_logits(rows, size, seed, 2.0), rng.random(rows)
    every = RowSampling(
        rng.choice([0.0, 0.5, 1.0] if mixed else [1.0], rows).astype(np.float32),
        rng.choice([0.5, 1.0] if cut else [1.0], rows).astype(np.float32),
        rng.choice([0, 3] if cut else [0], rows).astype(np.int64),
        rng.choice([0.0, 0.1] if cut else [0.0], rows).astype(np.float32),
        rng.random(rows) < (0.5 if size > 1 and mixed else 0),
        torch.tensor([0]),
    )
    tokens, log_prob = sample(logits.clone(), uniforms, every)
    for row in range(rows):
        one = slice(row, row + 1)
        token, value = sample(logits[one], uniforms[one], every[one])
        assert (int(token[0]), float(value[0])) == (int(tokens[row]), float(log_prob[row]))


def test_impossible_tokens_are_never_sampled() -> None:
    weights = torch.zeros(3, 384)
    weights[:, 131] = 1.0
    tokens, total = invert(weights, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert (tokens.tolist(), total.tolist()) == ([131] * 3, [1.0] * 3)


def test_the_largest_uniform_finds_a_possible_token() -> None:
    """The sum of a block is rounded to float32, so a number just below it may lie above the sum of its tokens."""
    weights = torch.zeros(500, 256)
    weights[:, 3:13] = torch.rand(500, 10, generator=torch.Generator().manual_seed(0))
    tokens, _ = invert(weights, torch.full((500,), 1 - 2**-53, dtype=torch.float64))
    assert tokens.tolist() == [12] * 500


def test_frequencies_are_the_probabilities() -> None:
    logits = random_logits(1, 200, 1, 1.5).expand(20_000, -1)
    tokens, _ = sample(logits.clone(), (np.arange(20_000) + 0.5) / 20_000, how(20_000))
    counted = torch.bincount(tokens, minlength=200) / 20_000
    assert (counted - logits[0].softmax(-1)).abs().max() < 1e-4


def test_rows_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniforms = random_logits(7, 300, 5, 2.0), np.linspace(0, 0.99, 7)
    whole = sample(logits.clone(), uniforms, how(7, 0.7))
    monkeypatch.setattr("trivium.engines.torch.sampling.SAMPLED_TOGETHER", 900)
    assert all(map(torch.equal, sample(logits.clone(), uniforms, how(7, 0.7)), whole))


def test_logits_that_are_not_numbers_show() -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = torch.nan
    for temperature in (0.0, 1.0):
        assert sample(logits.clone(), np.array([0.5, 0.5]), how(2, temperature))[1].isnan().tolist() == [False, True]
