"""One trained (or frozen) model behind two verbs: score a batch without gradient, update on a mini-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trivium.errors import TriviumError
from trivium.models.heads import LanguageModel, ValueModel
from trivium.models.load import max_positions
from trivium.models.loss import LossInputs, LossOutputs, Totals
from trivium.protocols import Objective
from trivium.training.batching import MicroBatch, check_lengths, collate, count, cut, units
from trivium.training.optim import Optimizer
from trivium.types import AnyArray, Batch, Metrics


class TrainableObjective(Objective, Protocol):
    """An objective with its loss."""

    def loss(self, inputs: LossInputs, totals: Totals) -> LossOutputs: ...


class Learner:
    """A model, and an optimizer where it is trained.

    The model stays in eval mode throughout: dropout would make two passes over the same tokens disagree, and with it
    every ratio of two policies.
    """

    def __init__(
        self,
        model: LanguageModel | ValueModel,
        name: str,
        *,
        max_tokens: int,
        max_response_length: int,
        optimizer: Optimizer | None = None,
        top_k: int = 0,
    ) -> None:
        """`top_k` is how many tokens the score `top` names."""
        self.model, self.name, self.optimizer, self.top_k = model, name, optimizer, top_k
        self.max_tokens, self.max_response_length = max_tokens, max_response_length

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        """What a language model (`log_prob`, `entropy`, `sum_pi_squared`, `mean_discriminant`, `top`) or a value model
        (`values`) says.

        Leading axis L, 0 outside the mask. `top` is (L, K, 2): the K likeliest token ids, and their log-probability.
        Raises DataError for a sequence that is longer than the model's context.
        """
        check_lengths(batch, max_positions(self.model.module))
        trailing = (self.top_k, 2) if what == "top" else ()
        scores: list[AnyArray] = [np.zeros((len(e), *trailing), np.float32) for e in batch.experiences]
        with torch.no_grad():
            for rows in self._cut(batch, "sequence"):
                micro = self._collate(batch, rows, ())
                numbers = self._numbers(micro, what)
                for row, scored in zip(rows, micro.grid(numbers).cpu().numpy(), strict=True):
                    scores[row] = scored[: len(batch.experiences[row])]
        return scores

    def _numbers(self, micro: MicroBatch, what: str) -> torch.Tensor:
        """(N, ...): one score of the trained tokens."""
        if isinstance(self.model, ValueModel):
            return self.model(micro.pack, micro.rows)
        if what == "sum_pi_squared":
            return self.model.sum_pi_squared(micro.pack, micro.rows)
        if what == "mean_discriminant":
            return self.model.mean_discriminant(micro.pack, micro.rows)
        if what == "top":
            ids, top = self.model.likeliest(micro.pack, micro.rows, self.top_k)
            return torch.stack([ids.to(top.dtype), top], -1)
        log_prob, entropy = self.model(micro.pack, micro.rows)
        return entropy if what == "entropy" else log_prob

    def update(
        self, batch: Batch, objective: TrainableObjective, lr: float, max_grad_norm: float, *, step: int, who: str
    ) -> Metrics:
        """One optimizer step; the loss and every metric are normalised over the whole mini-batch.

        A mini-batch without a trained token takes no step and reports no loss. A critic does not report
        `train/tokens`: the policy counts the same ones. `step` counts the stage's train steps so far. `who` is named
        when the gradient is not finite. Raises DataError for a sequence that is longer than the model's context.
        """
        assert self.optimizer is not None, f"{self.name} is frozen"
        check_lengths(batch, max_positions(self.model.module))
        totals = count(batch, self.max_response_length)
        tokens = {"train/tokens": float(totals.tokens)} if self.name != "value" else {}
        if totals.tokens == 0:
            return tokens
        tally = _Tally(totals)
        self.optimizer.zero_grad()
        for rows in self._cut(batch, objective.unit):
            micro = self._collate(batch, rows, sorted(objective.needs - {"entropy"}))
            inputs = self._forward(micro, step, entropy_grad="entropy" in objective.needs)
            outputs = objective.loss(inputs, totals)
            outputs.loss.backward()
            tally.add(outputs, inputs.entropy)
        norm = self.optimizer.step(lr, max_grad_norm, who)
        self.optimizer.zero_grad()
        return {
            **objective.derived(tally.metrics(self.name)),
            f"train/grad_norm/{self.name}": norm,
            f"train/lr/{self.name}": lr,
            **tokens,
        }

    def _cut(self, batch: Batch, unit: str) -> list[list[int]]:
        lengths = [len(e) for e in batch.experiences]
        return cut(units(batch, unit), lengths, self.max_tokens, padded=not self.model.backbone.packs)

    def _collate(self, batch: Batch, rows: Sequence[int], columns: Iterable[str]) -> MicroBatch:
        parameter = next(self.model.module.parameters())
        return collate(batch, rows, columns, device=parameter.device, dtype=parameter.dtype)

    def _forward(self, micro: MicroBatch, step: int, entropy_grad: bool) -> LossInputs:
        """What the model says about the trained tokens, on the loss's grid."""
        said: dict[str, torch.Tensor] = {}
        if isinstance(self.model, ValueModel):
            said["values"] = micro.grid(self.model(micro.pack, micro.rows))
        else:
            top = micro.columns.get("teacher_top")
            candidates = None if top is None else micro.trained(top[..., 0]).long()
            log_prob, entropy = self.model(micro.pack, micro.rows, entropy_grad=entropy_grad, candidates=candidates)
            if candidates is not None:
                log_prob, said["candidate_log_prob"] = log_prob[:, 0], micro.grid(log_prob[:, 1:])
            said["log_prob"], said["entropy"] = micro.grid(log_prob), micro.grid(entropy)
        return LossInputs(micro.response_mask, micro.policy_version, micro.columns, step=step, **said)


class _Tally:
    """Adds up what the micro-batches report; nothing leaves the device before the last of them."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._loss: list[torch.Tensor] = []
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._maxima: dict[str, list[torch.Tensor]] = {}

    def add(self, outputs: LossOutputs, entropy: torch.Tensor | None) -> None:
        self._loss.append(outputs.loss.detach())
        if entropy is not None:
            self._sums.setdefault("train/entropy", []).append(entropy.detach().sum())
        for mine, theirs in ((self._sums, outputs.sums), (self._maxima, outputs.maxima)):
            for key, value in theirs.items():
                mine.setdefault(key, []).append(value.detach())

    def metrics(self, name: str) -> Metrics:
        return {
            f"train/loss/{name}": float(torch.stack(self._loss).sum()),
            **{key: float(torch.stack(values).sum()) / self._totals.tokens for key, values in self._sums.items()},
            **{key: float(torch.stack(values).max()) for key, values in self._maxima.items()},
        }


def checkpoint_gradients(module: PreTrainedModel) -> None:
    """Keeps one activation per layer and computes the others again in the backward pass.

    transformers would do so in train mode only, which would also turn dropout on; so the layers are wrapped here.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise TriviumError(
            "train.gradient_checkpointing",
            f"{type(module).__name__} has no layers that transformers knows how to checkpoint",
            "turn it off and lower train.max_tokens_per_micro_batch instead",
        )
    for layer in layers:
        forward: Any = layer.forward
        layer.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
