"""Distillation against the KL of an enumerated vocabulary, slow loops, and what must be exactly zero."""

import math

import pytest
import torch
from failing import refused
from torch import Tensor

from trivium.algorithms import gpt_lm_loss, kd_loss, logprobs_from_logits, policy_inputs, sum_pi_squared_from_logits
from trivium.algorithms.losses.base import PolicyInputs
from trivium.algorithms.losses.distillation import distill, distill_student_top_k, distill_top_k
from trivium.foundation.errors import DataError
from trivium.models.heads.log_prob_head import log_prob_and_entropy, top_k_log_probs
from trivium.models.heads.vocabulary_part import OutputLayer

V = 7
DIRECTIONS = ("forward", "reverse", "jsd")


def logits(seed: int, *shape: int, scale: float = 1.5) -> Tensor:
    return torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def top_k(policy: Tensor, teacher: Tensor, k: int) -> PolicyInputs:
    """Inputs of a loss over the teacher's k likeliest tokens, from log-probabilities (B, L, V)."""
    top = teacher.topk(k)
    mask = torch.ones(policy.shape[:2], dtype=torch.bool)
    column = torch.stack([top.indices.to(policy.dtype), top.values], -1)
    x = policy_inputs(policy[..., 0].detach(), mask, teacher_top=column)
    candidates = policy.gather(-1, top.indices)
    return PolicyInputs(x.log_prob, mask, x.columns, x.expert, candidate_log_prob=candidates)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def divergence(policy: Tensor, teacher: Tensor, direction: str) -> Tensor:
    if direction == "jsd":
        mixture = ((policy.exp() + teacher.exp()) / 2).log()
        return (kl(policy, mixture) + kl(teacher, mixture)) / 2
    return kl(teacher, policy) if direction == "forward" else kl(policy, teacher)


def slow_divergence(p: list[float], q: list[float], direction: str, clip: float = math.inf) -> float:
    """Bucket by bucket, from the probabilities of the policy and of the teacher."""

    def terms(a: list[float], b: list[float]) -> float:
        return sum(min(x * math.log(x / y), clip) for x, y in zip(a, b, strict=True))

    if direction == "jsd":
        mixture = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
        return (terms(p, mixture) + terms(q, mixture)) / 2
    return terms(q, p) if direction == "forward" else terms(p, q)


# --------------------------------------------------------------------------- from the sampled token


def test_distill_over_every_token_is_the_kl_in_mean_and_gradient() -> None:
    at, teacher = logits(0).requires_grad_(True), logits(1).log_softmax(-1)
    policy = at.log_softmax(-1)
    everything = torch.ones(1, V)
    done = distill(policy_inputs(policy[None], everything, teacher_log_prob=teacher[None]))
    probability = policy.exp().detach()
    exact = kl(policy, teacher)
    torch.testing.assert_close((done.metrics["train/teacher_kl"][0] * probability).sum(), exact.detach())
    found = torch.autograd.grad((done.loss[0] * probability).sum(), at, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(exact, at), rtol=1e-12, atol=1e-14)


def test_distill_is_the_gap_times_the_score() -> None:
    log_prob = torch.tensor([[-0.5, -2.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[-1.5, -0.5, -1.0]])
    done = distill(policy_inputs(log_prob, torch.ones(1, 3), teacher_log_prob=teacher))
    assert done.loss.tolist() == [[1.0 * -0.5, -1.5 * -2.0, 0.0]]
    assert torch.autograd.grad(done.loss.sum(), log_prob)[0].tolist() == [[1.0, -1.5, 0.0]]


# --------------------------------------------------------------------------- over the likeliest tokens


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_with_all_tokens_it_is_the_kl_in_value_and_gradient(direction: str) -> None:
    at, teacher = logits(0, 2, 3).requires_grad_(True), logits(1, 2, 3).log_softmax(-1)
    policy = at.log_softmax(-1)
    done = distill_top_k(top_k(policy, teacher, V), direction=direction)
    exact = divergence(policy, teacher, direction)
    torch.testing.assert_close(done.loss, exact, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(done.loss.sum(), at, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(exact.sum(), at), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(done.metrics["train/teacher_kl"], kl(policy, teacher).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, V - 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_with_some_tokens_it_is_the_kl_of_these_and_a_bucket_for_the_others(direction: str, k: int) -> None:
    policy, teacher = logits(2, 2, 3).log_softmax(-1), logits(3, 2, 3).log_softmax(-1)
    done = distill_top_k(top_k(policy, teacher, k), direction=direction)
    for row in range(2):
        for column in range(3):
            p, q = (t[row, column].exp().tolist() for t in (policy, teacher))
            likely = sorted(range(V), key=lambda token, q=q: -q[token])[:k]
            buckets = [([p[i] for i in likely] + [1 - sum(p[i] for i in likely)])]
            buckets.append([q[i] for i in likely] + [1 - sum(q[i] for i in likely)])
            slow = slow_divergence(*buckets, direction)
            assert float(done.loss[row, column]) == pytest.approx(slow, rel=1e-10)
            assert float(done.metrics["train/teacher_mass"][row, column]) == pytest.approx(sum(q[i] for i in likely))
    exact = divergence(policy, teacher, direction)
    assert (done.loss <= exact + 1e-12).all(), "buckets can only hide differences"
    assert (done.loss >= 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tail", ["bucket", "left_out"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_policys_own_tokens_with_and_without_the_rest(direction: str, tail: str, clip: float | None) -> None:
    """Loss and gradient of every token against an enumeration of its vocabulary."""
    k, at, teacher = 3, logits(4, 2, 3).requires_grad_(True), logits(5, 2, 3).log_softmax(-1)
    policy = at.log_softmax(-1)
    own = policy.detach().topk(k).indices
    column = torch.stack([own.double(), teacher.gather(-1, own)], -1)
    x = policy_inputs(policy[..., 0].detach(), torch.ones(2, 3), student_top=column)
    x = PolicyInputs(x.log_prob, x.response_mask, x.columns, x.expert, candidate_log_prob=policy.gather(-1, own))
    done = distill_student_top_k(x, direction=direction, tail=tail, clip=clip)
    found = torch.autograd.grad(done.loss.sum(), at)[0]

    def slow(row: int, column: int, values: Tensor) -> float:
        p, q = values.softmax(-1).tolist(), teacher[row, column].exp().tolist()
        chosen = own[row, column].tolist()
        kept = [[side[i] for i in chosen] for side in (p, q)]
        rest = [1 - sum(side) for side in kept]
        if tail == "bucket":
            kept = [[*side, left] for side, left in zip(kept, rest, strict=True)]
        else:
            kept = [[value / sum(side) for value in side] for side in kept]
        return slow_divergence(*kept, direction, math.inf if clip is None else clip)

    for row in range(2):
        for place in range(3):
            values = at[row, place].detach()
            assert float(done.loss[row, place].detach()) == pytest.approx(slow(row, place, values), rel=1e-10)
            for token in range(V):
                nudge = 1e-6 * torch.eye(V, dtype=torch.float64)[token]
                slope = (slow(row, place, values + nudge) - slow(row, place, values - nudge)) / 2e-6
                assert float(found[row, place, token]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("k", [3, V])
@pytest.mark.parametrize("direction", [*DIRECTIONS, "sampled"])
def test_who_agrees_with_the_teacher_stays_exactly_where_it_is(direction: str, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 4, generator=generator), torch.randn(V, 4, generator=generator)
    targets = torch.randint(0, V, (9,), generator=generator)
    inputs = (hidden.requires_grad_(True), weight.requires_grad_(True))
    ids, top = top_k_log_probs(hidden, OutputLayer(weight), k)
    log_prob, _ = log_prob_and_entropy(hidden, OutputLayer(weight), torch.cat([targets[:, None], ids], 1))
    mask = torch.ones(1, 9, dtype=torch.bool)
    x = policy_inputs(
        log_prob[None, :, 0],
        mask,
        teacher_log_prob=log_prob[None, :, 0].detach(),
        teacher_top=torch.stack([ids.float(), top], -1)[None],
    )
    if direction == "sampled":
        loss = distill(x).loss
    else:
        x = PolicyInputs(x.log_prob, mask, x.columns, x.expert, candidate_log_prob=log_prob[None, :, 1:])
        loss = distill_top_k(x, direction=direction).loss
        assert loss.abs().max() < 1e-6
    for gradient in torch.autograd.grad((loss * 0.37).sum(), inputs):
        assert gradient.eq(0).all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_policy_that_is_sure_of_the_teachers_tokens_can_still_learn_that_others_are_likely(direction: str) -> None:
    teacher = torch.tensor([[[0.1, 0.1, 0.1, 0, 0, 0, 0]]]).log_softmax(-1)
    sure = torch.tensor([[[30.0, 30.0, 30.0, 0, 0, 0, 0]]]).log_softmax(-1)  # in float32, 1 - sum is rounding
    x = top_k(sure, teacher, 3)
    at = x.candidate_log_prob.clone().requires_grad_(True)
    done = distill_top_k(
        PolicyInputs(x.log_prob, x.response_mask, x.columns, x.expert, candidate_log_prob=at), direction=direction
    )
    assert float(done.loss.detach()) > 0.5
    gradient = torch.autograd.grad(done.loss.sum(), at)[0]
    assert (gradient > 1).all(), "not held: the teacher's tokens must become less likely together"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("k", [1, 200])
def test_extremes_and_padding_stay_finite(direction: str, k: int) -> None:
    nothing = torch.zeros(1, 1, k)  # what padding holds
    far = torch.full((1, 1, k), -1000.0)
    near = torch.zeros(1, 1, k).log_softmax(-1)
    for policy in (nothing, far, near):
        for teacher in (nothing, far, near):
            at = policy.clone().requires_grad_(True)
            column = torch.stack([torch.zeros_like(teacher), teacher], -1)
            mask = torch.ones(1, 1, dtype=torch.bool)
            x = policy_inputs(torch.zeros(1, 1), mask, teacher_top=column)
            done = distill_top_k(
                PolicyInputs(x.log_prob, mask, x.columns, x.expert, candidate_log_prob=at), direction=direction
            )
            assert torch.isfinite(done.loss).all()
            assert torch.isfinite(torch.autograd.grad(done.loss.sum(), at)[0]).all()
            assert all(torch.isfinite(value).all() for value in done.metrics.values())


def test_a_head_that_was_not_asked_is_an_error() -> None:
    column = torch.zeros(1, 1, 2, 2)
    with refused(DataError, "teacher_top"):
        distill_top_k(policy_inputs(torch.zeros(1, 1), torch.ones(1, 1), teacher_top=column))


# --------------------------------------------------------------------------- whole logits


def test_log_probabilities_and_their_squares_are_the_loop() -> None:
    given, labels = logits(4, 2, 3), torch.tensor([[0, 6, 3], [2, 2, 5]])
    log_prob, squares = logprobs_from_logits(given, labels), sum_pi_squared_from_logits(given)
    for row in range(2):
        for column in range(3):
            weights = [math.exp(v) for v in given[row, column].tolist()]
            p = [w / sum(weights) for w in weights]
            assert float(log_prob[row, column]) == pytest.approx(math.log(p[int(labels[row, column])]), rel=1e-12)
            assert float(squares[row, column]) == pytest.approx(sum(q * q for q in p), rel=1e-12)


def test_imitation_from_logits_is_the_loop() -> None:
    given, teacher = logits(5, 2, 3), logits(6, 2, 3)
    labels = torch.tensor([[-100, 6, 3], [2, -100, -100]])
    log_p, q = given.log_softmax(-1), teacher.softmax(-1)
    text = -(log_p[0, 0, 6] + log_p[0, 1, 3]) / 2  # the first label of a row is predicted by nobody
    torch.testing.assert_close(gpt_lm_loss(given, labels), text)
    kept = [(0, 1), (0, 2), (1, 0)]
    taught = -sum((q[at] * log_p[at]).sum() for at in kept) / len(kept)
    torch.testing.assert_close(kd_loss(given, teacher, labels), taught)


def test_nothing_to_imitate_is_zero_and_not_nan() -> None:
    at = logits(7, 1, 3).requires_grad_(True)
    nothing = torch.full((1, 3), -100)
    for loss in (gpt_lm_loss(at, nothing), kd_loss(at, logits(8, 1, 3), nothing)):
        assert float(loss.detach()) == 0
        assert torch.autograd.grad(loss, at, retain_graph=True)[0].eq(0).all()


def test_forbidden_tokens_leave_the_distilled_gradient_finite() -> None:
    forbidden = torch.arange(V) >= V - 2
    at = logits(9, 1, 3).masked_fill(forbidden, -torch.inf).requires_grad_(True)
    teacher = logits(10, 1, 3).masked_fill(forbidden, -torch.inf)
    loss = kd_loss(at, teacher, torch.zeros(1, 3, dtype=torch.int64))
    allowed = V - 2
    expected = kd_loss(at[..., :allowed], teacher[..., :allowed], torch.zeros(1, 3, dtype=torch.int64))
    torch.testing.assert_close(loss, expected)
    assert torch.isfinite(torch.autograd.grad(loss, at)[0]).all()
