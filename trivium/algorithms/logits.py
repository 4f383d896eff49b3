"""Statistics and losses of whole logits: for small vocabularies, for models that return logits, and for comparison.

Training never materialises logits; it uses `trivium.models.heads.log_prob_head`.

Legend: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.algorithms.stats import masked_sum
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, L): log-probability in nats of each label, int64 (B, L), under softmax(logits), logits (B, L, V)."""
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """(B, L): the sum over the vocabulary of the squared probabilities of softmax(logits), logits (B, L, V)."""
    return logits.softmax(-1).square().sum(-1)


def gpt_lm_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean cross-entropy in nats of the next token, a scalar; 0 if every label is ignored.

    `logits` (B, L, V) at a position predict the next label of `labels` (B, L); this function shifts them.
    """
    labelled = labels[:, 1:] != ignore_index
    log_prob = logprobs_from_logits(logits[:, :-1], labels[:, 1:].masked_fill(~labelled, 0))
    return -masked_sum(log_prob, labelled) / labelled.sum().clamp(min=1)


def kd_loss(logits: Tensor, teacher_logits: Tensor, label: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean cross-entropy in nats of the student under the teacher's whole distribution (Hinton et al. 2015).

    `logits` and `teacher_logits` (B, L, V), averaged where `label` (B, L) is not `ignore_index`; nothing is shifted. A
    scalar; 0 if every label is ignored. A token whose student logit is -inf contributes 0.
    """
    labelled = label != ignore_index
    log_prob = logits.log_softmax(-1)
    cross = (log_prob.masked_fill(log_prob == -torch.inf, 0.0) * teacher_logits.softmax(-1)).sum(-1)
    return -masked_sum(cross, labelled) / labelled.sum().clamp(min=1)
