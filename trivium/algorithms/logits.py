"""What whole logits say about tokens: for small vocabularies, for models that hand logits out, and for comparison.

Training never holds logits whole; it asks `trivium.models.log_prob_head`.

Legend: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, L): log-probability in nats of each label, int64 (B, L), under softmax(logits), logits (B, L, V)."""
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """(B, L): the sum over the vocabulary of the squared probabilities of softmax(logits), logits (B, L, V)."""
    return logits.softmax(-1).square().sum(-1)
