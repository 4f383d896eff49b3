"""One trained or frozen model: scores a batch without gradient, and updates on a mini-batch.

The sequence of calls of an update: `Passes.parts` cuts the mini-batch, `loss_inputs` computes the model's outputs of a
micro-batch, the objective turns them into a loss, and `Optimizer.step` applies the gradient that they accumulate.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from trivium.foundation.errors import DataError, TriviumError
from trivium.foundation.phases import progress
from trivium.models.backbone.load import max_positions
from trivium.models.cpu.worker_threads import one_thread
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.models.heads.trained_models import ActorCritic, LanguageModel, ValueModel
from trivium.models.weights.lora import has_adapter
from trivium.protocols import Objective, StepSettings
from trivium.training.batching import MicroBatch, count, stretched, units
from trivium.training.distributed.fsdp import reshard, shard_like
from trivium.training.distributed.ranks import ALONE, Ranks
from trivium.training.optim import Optimizer
from trivium.training.passes import MicroBatching, Part, Passes, work_done
from trivium.training.snapshot import full_weights
from trivium.training.tally import Tally
from trivium.types import CANDIDATES, AnyArray, Batch, Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrainableObjective(Objective, Protocol):
    """An objective with its loss."""

    def loss(self, inputs: LossInputs, totals: LossDenominators) -> LossOutputs: ...


@dataclass(frozen=True, slots=True)
class RoleModel:
    """The model of a role, and what trains it."""

    name: str
    """The role's name in metrics."""
    model: LanguageModel | ValueModel
    optimizer: Optimizer | None = None
    """None: the model is frozen."""
    top_k: int = 0
    """The number of tokens in the score `top`."""
    rate: float = 0.0
    """The share of the policy's weights in this model after each of the policy's updates; 0: it stays as it is."""
    score_context: Callable[[], AbstractContextManager[None]] = nullcontext
    """Scores are computed in it. It may change the model (`adapter_off`)."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer step minimises."""

    batch: Batch
    """This rank's share of the mini-batch."""
    objective: TrainableObjective
    totals: LossDenominators
    """The counts of the whole mini-batch, which normalise the loss and every metric."""
    step: int
    """The number of train steps of the stage so far."""


class Learner:
    """Scores with a model, and updates it if it has an optimizer.

    The model stays in eval mode: with dropout, two passes over the same tokens, and so all policy ratios, would differ.

    If several ranks train together, each rank gets its share of a batch, and all ranks must call every method.
    """

    def __init__(
        self, role: RoleModel, batching: MicroBatching, *, max_response_length: int, ranks: Ranks = ALONE
    ) -> None:
        """`max_response_length` is the limit of one completion, in tokens: `seq-mean-token-sum-norm` divides by it."""
        self.role, self.batching, self.ranks = role, batching, ranks
        self.model, self.optimizer, self.name = role.model, role.optimizer, role.name
        self.max_response_length = max_response_length
        self.passes = Passes(role.model, batching, ranks)
        self._is_untried = self.model.device.type == "cuda"
        """Whether to try the largest micro-batch after the next update."""
        self._lacks_data = False
        """Whether the accumulated gradient lacks data that the caller gave."""
        self._loss_lock = threading.Lock()
        self.keeps_tokens = False
        """Whether `loss_columns` is kept."""
        self.loss_columns: dict[str, list[AnyArray]] = {}
        """Per-token columns of the last update's loss, leading axis L; NaN for tokens without a value."""
        self.work = np.zeros((2, 4), np.int64)
        """The work that the last score or update computed, and the work of all sequences of its batch (`work_done`)."""

    def score(self, batch: Batch, what: str, top_k: int | None = None) -> list[AnyArray]:
        """A score of a language model (`log_prob`, `entropy`, `sum_pi_squared`, `mean_discriminant`, `top`,
        `candidates`) or a value model (`values`), or both of a policy with a value head.

        Leading axis L, 0 outside the mask. `top` is (L, K, 2): the top-k token ids, and their log-probability.
        `candidates` is the same for the ids in the column `student_top`. `top_k` replaces that of the role.
        Raises DataError for a sequence that is longer than the model's context.
        """

        k = self.role.top_k if top_k is None else top_k

        def compute(part: Part) -> tuple[Part, AnyArray]:
            with torch.no_grad():  # thread-local in torch
                micro = self.passes.collate(batch, part, ("student_top",) if what == "candidates" else ())
                return part, micro.grid(token_scores(self.model, micro, what, k)).cpu().numpy()

        self._check(batch)
        trailing = (k, 2) if what in ("top", "candidates") else ()
        scores: list[AnyArray] = [np.zeros((len(e), *trailing), np.float32) for e in batch.experiences]
        with torch.no_grad(), self.role.score_context():
            for part, grid in self.passes.map(compute, parts := self._parts(batch, "sequence")):
                progress(total=len(parts))
                for row, scored in zip(part.rows, grid, strict=True):
                    scores[row] = scored[: len(batch.experiences[row])]
        reshard(self.model)
        return scores

    def update(
        self,
        batch: Batch,
        objective: TrainableObjective,
        lr: float | None,
        max_grad_norm: float,
        *,
        step: int,
        who: str,
        totals: LossDenominators | None = None,
    ) -> Metrics:
        """One optimizer step; the loss and every metric are normalised over the whole mini-batch.

        `lr` is the learning rate; None keeps what the optimizer and its scheduler have. `batch` is this rank's share of
        the mini-batch, and `totals` the counts of the whole; None if the share is the whole. A mini-batch without a
        trained token takes no step and reports no loss. A critic does not report `train/tokens`, since the policy
        counts the same tokens. `step` is the number of train steps of the stage so far. The error for a gradient that
        is not finite names `who`. Raises DataError for a sequence that is longer than the model's context.
        """
        optimizer = self._trained()
        self._check(batch)
        mini = MiniBatch(batch, objective, totals or count(batch, self.max_response_length), step)
        tokens = {"train/tokens": float(mini.totals.tokens)} if self.name != "value" else {}
        if mini.totals.tokens == 0:
            return tokens
        tally = self._backward(mini)
        self.loss_columns = tally.tokens(batch) if self.keeps_tokens else {}
        rate = optimizer.lr if lr is None else lr
        norm = self._step(lr, max_grad_norm, who, partial(_not_finite, batch, tally))
        if self._is_untried:
            self._try_longest(mini)
        return {
            **objective.derived(tally.metrics(self.name, mini.totals, self.ranks)),
            f"train/grad_norm/{self.name}": norm,
            f"train/lr/{self.name}": rate,
            **tokens,
        }

    def accumulate(
        self, batch: Batch, objective: TrainableObjective, *, step: int, gradient: bool
    ) -> tuple[Metrics, dict[str, list[AnyArray]]]:
        """Returns the metrics of the loss over a batch, and its per-token columns. With `gradient`, adds the gradient
        to the accumulated one; an error loses it (`lose_data`)."""
        try:
            self._check(batch)
            mini = MiniBatch(batch, objective, count(batch, self.max_response_length), step)
            self.keeps_tokens = True
            tally = self._backward(mini, add=True) if gradient else self._forward(mini)
        except BaseException:
            if gradient:
                self.lose_data()
            raise
        return objective.derived(tally.metrics(self.name, mini.totals, self.ranks)), tally.tokens(batch)

    def lose_data(self) -> None:
        """Notes that the gradient since the last step lacks data: the next step drops it and raises DataError."""
        self._lacks_data = True

    def take_step(self, settings: StepSettings, who: str) -> Metrics:
        """One optimizer step on the accumulated gradient, which it drops."""
        optimizer = self._trained()
        if self._lacks_data:
            self._lacks_data = False
            optimizer.zero_grad()
            found = "the gradient since the last step lacks data: a request for it failed"
            raise DataError(f"a step of {who}", found, "send all data of the step again, then the step")
        optimizer.configure(betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        try:
            norm = self._step(settings.lr, settings.max_grad_norm, who)
        finally:
            optimizer.zero_grad()
        return {f"train/grad_norm/{self.name}": norm, f"train/lr/{self.name}": settings.lr}

    def _step(self, lr: float | None, max_grad_norm: float, who: str, origin: Callable[[], str] | None = None) -> float:
        """Takes a step on the accumulated gradient, which it drops, and returns the norm."""
        optimizer = self._trained()
        # A model that has workers is small: two threads of its step waited for each other, up to 25 ms beside other
        # work.
        with nullcontext() if self.passes.workers is None else one_thread():
            norm = optimizer.step(lr, max_grad_norm, who, origin)
        optimizer.zero_grad()
        return norm

    def follow(self, policy: Learner) -> None:
        """Moves the weights towards those of the policy, by the role's rate."""
        follow(self.model.module, policy.model, self.role.rate)

    def measure(
        self,
        batch: Batch,
        objective: TrainableObjective,
        *,
        step: int,
        totals: LossDenominators | None = None,
        gradient: bool = False,
    ) -> Metrics:
        """Returns the loss and the metrics of an update without making it, and with `gradient` also the gradient norm.
        Returns nothing for a batch without a trained token."""
        self._check(batch)
        mini = MiniBatch(batch, objective, totals or count(batch, self.max_response_length), step)
        if mini.totals.tokens == 0:
            return {}
        if gradient and self.optimizer is not None:
            tally = self._backward(mini)
            norm = {f"train/grad_norm/{self.name}": self.optimizer.norm()}
            self.optimizer.zero_grad()
            return {**objective.derived(tally.metrics(self.name, mini.totals, self.ranks)), **norm}
        return objective.derived(self._forward(mini).metrics(self.name, mini.totals, self.ranks))

    def _forward(self, mini: MiniBatch) -> Tally:
        """Computes the loss over the whole batch without gradient."""
        tally = Tally(self.keeps_tokens)

        @torch.no_grad()
        def compute(part: Part) -> tuple[Part, LossOutputs, torch.Tensor | None]:
            return part, *self._loss(mini, part)

        with torch.no_grad():
            for part, outputs, entropy in self.passes.map(compute, self._parts(mini.batch, mini.objective.unit)):
                tally.add(outputs, entropy, part.rows)
        reshard(self.model)
        return tally

    def _trained(self) -> Optimizer:
        assert self.optimizer is not None, f"{self.name} is frozen"
        return self.optimizer

    def _check(self, batch: Batch) -> None:
        self.work = np.zeros((2, 4), np.int64)
        self.passes.check(batch)

    def _parts(self, batch: Batch, unit: str, *, share_prefixes: bool = True) -> list[Part]:
        parts = self.passes.parts(batch, unit, share_prefixes=share_prefixes)
        self.work = work_done(batch, parts)
        return parts

    def _loss(self, mini: MiniBatch, part: Part) -> tuple[LossOutputs, torch.Tensor | None]:
        """The outputs of the objective on one micro-batch, and the entropy of its tokens if the model has one."""
        needs = mini.objective.needs
        micro = self.passes.collate(mini.batch, part, sorted(needs - {"entropy"}))
        inputs = loss_inputs(self.model, micro, mini.step, entropy_grad="entropy" in needs)
        entropy = inputs.entropy
        if entropy is not None and "observed" in needs:
            entropy = entropy.masked_fill(~inputs.response_mask, 0.0)
        with self._loss_lock:  # a user's loss may keep a reference to the graph
            return mini.objective.loss(inputs, mini.totals), entropy

    def _backward(self, mini: MiniBatch, *, share_prefixes: bool = True, add: bool = False) -> Tally:
        """Computes the gradient of the loss over the whole batch. `add`: adds it to that of the parameters."""
        optimizer, tally = self._trained(), Tally(self.keeps_tokens)

        def compute(part: Part) -> tuple[Part, LossOutputs, torch.Tensor | None, Sequence[torch.Tensor | None]]:
            outputs, entropy = self._loss(mini, part)
            if not part.parallel:
                outputs.loss.backward()
                return part, outputs, entropy, ()
            # Workers share the parameters: their gradients are added in order, by this thread.
            parameters = [*optimizer.parameters.values()]
            return part, outputs, entropy, torch.autograd.grad(outputs.loss, parameters, allow_unused=True)

        if not add:
            optimizer.zero_grad()
        parts = self._parts(mini.batch, mini.objective.unit, share_prefixes=share_prefixes)
        for part, outputs, entropy, gradients in self.passes.map(compute, parts):
            progress(total=len(parts))
            if gradients:
                optimizer.add_gradients(gradients)
            tally.add(outputs, entropy, part.rows)
        return tally

    def _try_longest(self, mini: MiniBatch) -> None:
        """Computes and drops the gradient of the largest possible micro-batch of this run, with the optimizer state in
        memory, so that a device with too little memory fails in the first step."""
        batch, optimizer, work = mini.batch, self._trained(), self.work
        self._is_untried = False
        unit = next(iter(units(batch, mini.objective.unit)), [])
        prompts = [int(e.response_mask.argmax()) + self.max_response_length for e in batch.experiences]
        longest_here = max([*batch.lengths, *prompts], default=self.max_response_length)
        length = min(self.ranks.all_reduce_max(longest_here), max_positions(self.model.module) or math.inf)
        budget = self.batching.max_tokens * self.ranks.sequence_size
        copies = max(1, int(min(budget // length, self.batching.max_sequences or math.inf)) // max(1, len(unit)))
        longest = stretched(batch.select(unit * copies), int(length))
        totals = count(longest, self.max_response_length)
        try:
            self._backward(MiniBatch(longest, mini.objective, totals, mini.step), share_prefixes=False)
        except torch.OutOfMemoryError as error:
            raise TriviumError(
                f"a micro-batch of {sum(longest.lengths)} tokens for {self.name}, the largest possible in this run",
                f"{self.model.device}: {str(error).partition('. ')[0]}",
                "lower train.max_tokens_per_micro_batch or engine.sampling.max_new_tokens, or use more ranks",
            ) from error
        finally:
            optimizer.zero_grad()
            self.work = work


@torch.no_grad()
def follow(average: PreTrainedModel, policy: LanguageModel | ValueModel, rate: float) -> None:
    """Moves the weights of `average` towards those of the policy: by 1, they are the same. An adapter of the policy
    that `average` lacks is merged. All ranks must call it."""
    parameters = dict(average.named_parameters())
    if isinstance(policy, LanguageModel) and has_adapter(policy.module) and not has_adapter(average):
        merged = ((name, tensor) for name, tensor in full_weights(policy) if name in parameters)
        pairs = ((parameters[name], shard_like(tensor, parameters[name])) for name, tensor in merged)
    else:
        pairs = zip(parameters.values(), policy.module.parameters(), strict=True)
    for parameter, current in pairs:
        parameter.mul_(1 - rate).add_(current.detach(), alpha=rate)


def token_scores(model: LanguageModel | ValueModel, micro: MicroBatch, what: str, top_k: int) -> torch.Tensor:
    """One score of the trained tokens, (N, ...); see `Learner.score`."""
    if isinstance(model, ValueModel):
        return model(micro.pack, micro.rows)
    if what == "entropy":
        return model(micro.pack, micro.rows, kept=micro.kept)[1]
    if what == "candidates":
        ids = micro.trained(micro.columns["student_top"])[..., 0]
        log_prob = model(micro.pack, micro.rows, candidates=ids.long())[0]
        return torch.stack([ids.to(log_prob.dtype), log_prob[:, 1:]], -1)
    numbers = model(micro.pack, micro.rows, what, top_k=top_k, kept=micro.kept)
    return torch.stack([numbers[0].to(numbers[1].dtype), numbers[1]], -1) if what == "top" else numbers[0]


def loss_inputs(
    model: LanguageModel | ValueModel, micro: MicroBatch, step: int, *, entropy_grad: bool = False
) -> LossInputs:
    """The model's outputs for the trained tokens, on the loss's grid (B, L)."""
    outputs: dict[str, torch.Tensor] = {}
    if isinstance(model, ValueModel):
        outputs["values"] = micro.grid(model(micro.pack, micro.rows))
    else:
        tops = [micro.columns[name][..., 0] for name in CANDIDATES if name in micro.columns]
        candidates = micro.trained(torch.cat(tops, -1)).long() if tops else None
        if candidates is not None and micro.kept is not None:
            raise DataError(
                "the policy's log-probabilities of the teacher's top tokens",
                "sampling left some of them out (top_p, top_k, min_p or min_new_tokens)",
                "sample from the whole distribution, or use policy_loss.kind distill",
            )
        what = "log_prob_and_values" if isinstance(model, ActorCritic) else "log_prob"
        log_prob, entropy, *values = model(
            micro.pack, micro.rows, what, entropy_grad=entropy_grad, candidates=candidates, kept=micro.kept
        )
        if values:
            outputs["values"] = micro.grid(values[0])
        if candidates is not None:
            log_prob, outputs["candidate_log_prob"] = log_prob[:, 0], micro.grid(log_prob[:, 1:])
        outputs["log_prob"], outputs["entropy"] = micro.grid(log_prob), micro.grid(entropy)
    return LossInputs(micro.response_mask, micro.policy_version, micro.columns, step=step, **outputs)


def _not_finite(batch: Batch, tally: Tally) -> str:
    """Names the inputs, else the losses, that are not finite; empty if all are finite."""
    for name, arrays in batch.columns.items():
        trained = zip(batch.experiences, arrays, strict=True)
        wrong = sum(not np.isfinite(array[experience.response_mask]).all() for experience, array in trained)
        if wrong:
            return f"{name} of {wrong} of {len(batch)} sequences are not finite"
    return tally.not_finite()
