"""The chunked head against softmax written out: values and gradients."""

import pytest
import torch

from trivium.models.heads import log_prob_head
from trivium.models.heads.log_prob_head import log_prob_and_entropy, mean_discriminant, sum_pi_squared, top_k_log_probs
from trivium.models.heads.vocabulary_part import OutputLayer
from trivium.models.precision import product
from trivium.planning import choices

N, H, V = 13, 5, 11


@pytest.fixture(autouse=True, params=[1, 4, 100], ids=lambda rows: f"chunk{rows}")
def rows_per_chunk(request, monkeypatch):
    """Chunks of one row, of several with a remainder, and one chunk for all."""
    monkeypatch.setattr(choices, "LOGITS_ROWS", 1)
    monkeypatch.setattr(choices, "LOGITS_CACHE_BYTES", request.param * V * 8)
    monkeypatch.setattr(choices, "LOGITS_BYTES", request.param * V * 8)


def tensors(bias=True):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)  # noqa: E731
    targets = torch.randint(0, V, (N,), generator=generator)
    return draw(N, H), draw(V, H), draw(V) if bias else None, targets


def plain(hidden, weight, bias, targets, temperature):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_values_and_gradients(temperature, bias, entropy_grad):
    hidden, weight, b, targets = tensors(bias)
    inputs = [t for t in (hidden, weight, b) if t is not None]
    scale = torch.linspace(-2, 3, N, dtype=torch.float64)

    def gradients(function):
        log_prob, entropy = function()
        loss = (log_prob * scale).sum() + ((entropy * scale.flip(0)).sum() if entropy_grad else 0)
        return log_prob, entropy, torch.autograd.grad(loss, inputs)

    found = gradients(
        lambda: log_prob_and_entropy(hidden, OutputLayer(weight, b, temperature), targets, entropy_grad=entropy_grad)
    )
    expected = gradients(lambda: plain(hidden, weight, b, targets, temperature))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found[1].requires_grad == entropy_grad


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [True, False])
def test_a_frozen_output_layer_computes_its_logits_once(temperature, bias, monkeypatch):
    hidden, weight, b, targets = (t if t is None or t.dtype == torch.int64 else t.detach() for t in tensors(bias))
    hidden.requires_grad_()
    scale = torch.linspace(-2, 3, N, dtype=torch.float64)
    rows = []
    monkeypatch.setattr(log_prob_head, "product", lambda a, *given: rows.append(len(a)) or product(a, *given))
    log_prob, entropy = log_prob_and_entropy(hidden, OutputLayer(weight, b, temperature), targets)
    found = log_prob, entropy, *torch.autograd.grad(log_prob @ scale, hidden)
    assert sum(rows) == N
    log_prob, entropy = plain(hidden, weight, b, targets, temperature)
    expected = log_prob, entropy, *torch.autograd.grad(log_prob @ scale, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_finite_differences():
    hidden, weight, bias, targets = tensors()
    assert torch.autograd.gradcheck(
        lambda h, w, b: log_prob_and_entropy(h, OutputLayer(w, b, 0.7), targets, entropy_grad=True),
        (hidden, weight, bias),
    )


def test_tied_weight_collects_both_gradients():
    _, weight, _, targets = tensors()
    tokens = targets.flip(0)

    def gradient(head):
        log_prob, entropy = head(weight[tokens].tanh())
        return torch.autograd.grad((log_prob * 2 - entropy).sum(), weight)

    found = gradient(lambda h: log_prob_and_entropy(h, OutputLayer(weight), targets, entropy_grad=True))
    torch.testing.assert_close(found, gradient(lambda h: plain(h, weight, None, targets, 1.0)), rtol=1e-12, atol=1e-12)


def test_low_precision_hidden_states_meet_a_full_precision_head():
    hidden, weight, bias, targets = (t.detach() if t.is_floating_point() else t for t in tensors())
    low = hidden.to(torch.bfloat16).requires_grad_()
    log_prob, _ = log_prob_and_entropy(low, OutputLayer(weight.float(), bias.float()), targets)
    expected, _ = plain(low.detach().double(), weight, bias, targets, 1.0)
    torch.testing.assert_close(log_prob.double(), expected, rtol=1e-6, atol=1e-6)
    log_prob.sum().backward()
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16


def test_frozen_weight_gets_no_gradient():
    hidden, weight, bias, targets = tensors()
    log_prob, _ = log_prob_and_entropy(hidden, OutputLayer(weight.detach(), bias.detach()), targets)
    log_prob.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_tokens():
    hidden, weight, bias, _ = tensors()
    log_prob, entropy = log_prob_and_entropy(hidden[:0], OutputLayer(weight, bias), torch.empty(0, dtype=torch.int64))
    log_prob.sum().backward()
    assert log_prob.shape == entropy.shape == (0,)
    assert not weight.grad.any()


def test_large_logits_do_not_overflow():
    hidden, weight, bias, targets = tensors()
    found = log_prob_and_entropy(hidden * 1e4, OutputLayer(weight, bias), targets)
    torch.testing.assert_close(found, plain(hidden * 1e4, weight, bias, targets, 1.0))


# --------------------------------------------------------------------------- further candidates, further scores


def candidates(k=3):
    """(N, 1 + K): each token's own target first; the second row repeats it among its candidates."""
    *_, targets = tensors()
    several = torch.randint(0, V, (N, 1 + k), generator=torch.Generator().manual_seed(1))
    several[:, 0] = targets
    several[1] = targets[1]
    return several


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_candidates_have_the_values_and_gradients_of_a_dense_softmax(temperature, bias, entropy_grad):
    hidden, weight, b, _ = tensors(bias)
    inputs = [t for t in (hidden, weight, b) if t is not None]
    several = candidates()
    scale = torch.randn(several.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def dense():
        log_p = ((hidden @ weight.T + (0 if b is None else b)) / temperature).log_softmax(-1)
        return log_p.gather(1, several), -(log_p.exp() * log_p).sum(-1)

    def gradients(log_prob, entropy):
        loss = (log_prob * scale).sum() + (entropy.square().sum() if entropy_grad else 0)
        return log_prob, entropy, torch.autograd.grad(loss, inputs)

    found = log_prob_and_entropy(hidden, OutputLayer(weight, b, temperature), several, entropy_grad=entropy_grad)
    torch.testing.assert_close(gradients(*found), gradients(*dense()), rtol=1e-12, atol=1e-12)


def test_candidates_agree_with_finite_differences():
    hidden, weight, bias, _ = tensors()
    assert torch.autograd.gradcheck(
        lambda h, w, b: log_prob_and_entropy(h, OutputLayer(w, b, 0.7), candidates(), entropy_grad=True),
        (hidden, weight, bias),
    )


def test_one_target_in_a_column_has_the_bits_of_one_target():
    hidden, weight, bias, targets = (t.detach() for t in tensors())
    hidden, weight, bias = (t.float().requires_grad_() for t in (hidden, weight, bias))
    scale = torch.linspace(-2, 3, N)

    def bits(shape):
        log_prob, entropy = log_prob_and_entropy(hidden, OutputLayer(weight, bias, 0.9), targets.view(shape))
        return log_prob.flatten(), entropy, *torch.autograd.grad((log_prob.flatten() * scale).sum(), (hidden, weight))

    assert all(torch.equal(a, b) for a, b in zip(bits((N,)), bits((N, 1)), strict=True))


def test_sum_pi_squared_and_the_likeliest_tokens():
    hidden, weight, bias, _ = tensors()
    log_p = ((hidden @ weight.T + bias) / 0.6).log_softmax(-1).detach()
    found = sum_pi_squared(hidden, OutputLayer(weight, bias, 0.6))
    torch.testing.assert_close(found, log_p.exp().square().sum(-1), rtol=1e-12, atol=1e-12)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    expected = (log_p.exp() * (log_p.exp() * (entropy + log_p))).sum(-1)
    torch.testing.assert_close(
        mean_discriminant(hidden, OutputLayer(weight, bias, 0.6)), expected, rtol=1e-9, atol=1e-12
    )
    for k in (1, 4, V):
        ids, values = top_k_log_probs(hidden, OutputLayer(weight, bias, 0.6), k)
        torch.testing.assert_close(values, log_p.topk(k).values, rtol=1e-12, atol=1e-12)
        assert torch.equal(ids, log_p.topk(k).indices)
        assert not values.requires_grad
    assert not found.requires_grad
    nothing = top_k_log_probs(hidden[:0], OutputLayer(weight, bias), 4)
    assert [t.shape for t in nothing] == [(0, 4), (0, 4)]
    assert sum_pi_squared(hidden[:0], OutputLayer(weight, bias)).shape == (0,)


def test_log_probabilities_of_a_peaked_distribution_over_many_tokens_have_no_bias() -> None:
    """Small exponentials are lost when they are added to a large sum."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = 2 * torch.randn(64, 32, generator=generator), 0.4 * torch.randn(49_152, 32, generator=generator)
    bias, targets = torch.zeros(len(weight)), torch.full((len(hidden),), 7)
    bias[7] = 12.0
    found, _ = log_prob_and_entropy(hidden, OutputLayer(weight, bias), targets)
    exact = (hidden.double() @ weight.double().T + bias.double()).log_softmax(1)[:, 7]
    assert abs(float((found.double() - exact).mean())) < 1e-6  # torch.log_softmax: 4e-6
