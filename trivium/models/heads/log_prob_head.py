"""Log-probabilities and entropy from hidden states in chunks of tokens. No `[tokens, vocabulary]` matrix is allocated.

The forward pass saves the entropy of each token. The backward pass computes the logits of a chunk again and turns them
into their gradient, in place. The cost is one more matrix product with the output layer. It is saved where the output
layer is frozen (an adapter is trained): the forward pass then computes the derivative of each log-probability by its
hidden state, (N, H).

Legend: N tokens, H width, V vocabulary, M targets of one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from trivium.models.cpu.linear import AutogradContext
from trivium.models.heads.kept import KeptSets
from trivium.models.heads.vocabulary_part import OutputLayer, VocabularyPart
from trivium.models.precision import Parts, parts_of, product, product_of
from trivium.planning.choices import logits_rows


def log_prob_and_entropy(
    hidden: torch.Tensor,
    layer: OutputLayer,
    targets: torch.Tensor,
    *,
    entropy_grad: bool = False,
    kept: KeptSets | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_prob, entropy) in the dtype of the layer, of the softmax of its logits.

    `hidden` (N, H), `targets` int64: (N,) one token id each, or (N, M) several, which may repeat. `log_prob` has the
    shape of `targets`, `entropy` is (N,) and has a gradient only with `entropy_grad`. `kept` restricts the distribution
    of each token to its candidate set. With a part of the vocabulary, the results are those of the whole, on every
    rank, and so is the gradient of `hidden`.
    """
    several = targets if targets.dim() == 2 else targets[:, None]
    log_prob, entropy = cast(
        tuple[torch.Tensor, torch.Tensor],
        # Autograd follows the tensors among the arguments only.
        _Head.apply(hidden.to(layer.weight.dtype), layer.weight, layer.bias, several, layer, entropy_grad, kept),
    )
    return log_prob.view(targets.shape).clone(), entropy  # FSDP registers hooks on outputs, which must not be views


@torch.no_grad()
def sum_pi_squared(hidden: torch.Tensor, layer: OutputLayer, *, kept: KeptSets | None = None) -> torch.Tensor:
    """(N,) without gradient: the sum over the vocabulary of the squared probabilities; arguments as above."""
    hidden, part = hidden.to(layer.weight.dtype), layer.part
    squares = hidden.new_empty(len(hidden))
    for rows, logits, _ in _chunked_logits(hidden, layer, kept):
        _, p = part.softmax(logits)
        squares[rows] = torch.linalg.vecdot(p, p)
    return part.sum(squares)


@torch.no_grad()
def mean_discriminant(hidden: torch.Tensor, layer: OutputLayer, *, kept: KeptSets | None = None) -> torch.Tensor:
    """(N,) without gradient: the sum over the vocabulary of p^2 (entropy + log p); arguments as above.

    This is the mean of p (entropy + log p) under the policy: how strongly a token's logit changes the entropy.
    """
    hidden, part = hidden.to(layer.weight.dtype), layer.part
    squares, cubic, entropy = hidden.new_empty(3, len(hidden))
    for rows, logits, left_out in _chunked_logits(hidden, layer, kept):
        log_p, p = part.softmax(logits)
        _zero(log_p, left_out)
        entropy[rows] = -torch.linalg.vecdot(p, log_p)
        cubic[rows], squares[rows] = torch.linalg.vecdot(p * p, log_p), torch.linalg.vecdot(p, p)
    return part.sum(cubic) + part.sum(entropy) * part.sum(squares)


@torch.no_grad()
def top_k_log_probs(hidden: torch.Tensor, layer: OutputLayer, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64, log_prob), each (N, k), without gradient: the k most probable tokens, in descending order."""
    hidden, part = hidden.to(layer.weight.dtype), layer.part
    ids, log_prob = hidden.new_empty(len(hidden), k, dtype=torch.int64), hidden.new_empty(len(hidden), k)
    for rows, logits, _ in _chunked_logits(hidden, layer, None):
        # A rank's part of the vocabulary may have fewer than k tokens.
        local_top = logits.topk(min(k, logits.shape[1]), dim=1).indices  # first: rounding makes equal what was not
        values = part.gather(part.softmax(logits)[0].gather(1, local_top))
        tokens = part.gather(local_top + part.first)
        top = values.topk(k, dim=1)
        ids[rows], log_prob[rows] = tokens.gather(1, top.indices), top.values
    return ids, log_prob


def _chunks(rows: int, weight: torch.Tensor) -> Iterator[slice]:
    row_bytes = weight.shape[0] * weight.element_size()
    gpu = torch.cuda.get_device_properties(weight.device).total_memory if weight.is_cuda else 0
    size = logits_rows(row_bytes, gpu)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _chunked_logits(
    hidden: torch.Tensor, layer: OutputLayer, kept: KeptSets | None, parts: Parts | None = None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """Yields (rows, logits of these rows, mask of the tokens that were not kept) for each chunk. The logits of masked
    tokens are -inf. The caller may overwrite the logits. `parts` are those of the layer's weight
    (`parts_of`)."""
    parts = parts_of(layer.weight, layer.precision) if parts is None else parts
    for rows in _chunks(len(hidden), layer.weight):
        logits = product(hidden[rows], parts, layer.precision)
        if layer.bias is not None:
            logits += layer.bias
        if layer.temperature != 1.0:
            logits.div_(layer.temperature)
        left_out = None if kept is None else kept.left_out(rows, logits.shape[1], layer.part)
        if left_out is not None:
            logits.masked_fill_(left_out, -torch.inf)
        yield rows, logits, left_out


def _zero(log_p: torch.Tensor, left_out: torch.Tensor | None) -> None:
    """Sets the log-probabilities of masked tokens to 0, in place, because 0 times -inf is not a number."""
    if left_out is not None:
        log_p.masked_fill_(left_out, 0.0)


class _HeadContext(AutogradContext, Protocol):
    temperature: float
    entropy_grad: bool
    kept: KeptSets | None
    precision: str
    part: VocabularyPart
    slope: torch.Tensor | None
    """(N, H) d log_prob / d hidden, if the forward pass computed it."""


class _Head(torch.autograd.Function):
    """`log_prob_and_entropy` for (N, M) targets."""

    @staticmethod
    def forward(
        ctx: _HeadContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        layer: OutputLayer,
        entropy_grad: bool,
        kept: KeptSets | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        temperature, precision, part = layer.temperature, layer.precision, layer.part
        log_prob, entropy = hidden.new_empty(targets.shape), hidden.new_empty(len(hidden))
        places, inside = part.own(targets, len(weight))
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # One derivative for each token suffices for one target without the entropy. Ranks that split the vocabulary
        # train all weights.
        is_linear = targets.shape[1] == 1 and not entropy_grad and inside is None
        only_hidden = wants_hidden and not (wants_weight or wants_bias)
        slope = torch.empty_like(hidden) if is_linear and only_hidden else None
        parts = parts_of(weight, precision)
        transposed = tuple(matrix.T for matrix in parts)
        for rows, logits, left_out in _chunked_logits(hidden, layer, kept, parts):
            its_log_prob, its_entropy, its_places = log_prob[rows], entropy[rows], places[rows]
            for block in part.blocks(logits):
                log_p, p = part.softmax(logits[block])
                its_log_prob[block] = log_p.gather(1, its_places[block])
                _zero(log_p, None if left_out is None else left_out[block])
                its_entropy[block] = -torch.linalg.vecdot(p, log_p)
                if slope is not None:
                    torch.neg(p, out=logits[block])
            if slope is not None:  # d log_prob / d logit = [target] - p
                grad = logits.scatter_add_(1, its_places, torch.ones_like(logits[:, :1]))
                slope[rows] = product_of(parts_of(grad, precision), transposed, precision).div_(temperature)
        if inside is not None:  # the sum over the ranks adds what the rank with the target computes
            log_prob.masked_fill_(~inside, 0.0)
        log_prob, entropy = part.sum(log_prob), part.sum(entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.entropy_grad, ctx.kept = temperature, entropy_grad, kept
        ctx.precision, ctx.part, ctx.slope = precision, part, slope
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: _HeadContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad_log_prob, grad_entropy = grad_outputs
        if ctx.slope is not None:
            return ctx.slope * grad_log_prob, *[None] * 6
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        parts, precision = parts_of(weight, ctx.precision), ctx.precision
        places, inside = ctx.part.own(targets, len(weight))
        transposed = tuple(part.T for part in parts)
        layer = OutputLayer(weight, bias, ctx.temperature, precision, ctx.part)
        for rows, logits, left_out in _chunked_logits(hidden, layer, ctx.kept, parts):
            g, its_entropy, its_grad_entropy = grad_log_prob[rows], entropy[rows, None], grad_entropy[rows, None]
            total, grad = g.sum(1, keepdim=True), logits
            for block in ctx.part.blocks(logits):
                log_p, p = ctx.part.softmax(logits[block])
                if ctx.entropy_grad:  # d entropy / d logit = -p (log p + entropy)
                    _zero(log_p, None if left_out is None else left_out[block])
                    log_p.add_(its_entropy[block]).mul_(-its_grad_entropy[block]).sub_(total[block])
                    torch.mul(log_p, p, out=grad[block])
                else:  # d log_prob / d logit = [target] - p, summed over the targets
                    torch.mul(p, -total[block], out=grad[block])
            # Targets may repeat: their gradients add up, where a plain scatter would keep one of them.
            grad.scatter_add_(1, places[rows], g if inside is None else g * inside[rows])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grads = parts_of(grad, precision)
            if grad_hidden is not None:
                grad_hidden[rows] = product_of(grads, transposed, precision)
            if grad_weight is not None:
                states = parts_of(hidden[rows], precision)
                product_of(tuple(x.T for x in grads), tuple(x.T for x in states), precision, grad_weight)
        if grad_hidden is not None:
            ctx.part.sum(grad_hidden)
        return grad_hidden, grad_weight, grad_bias, *[None] * 4
