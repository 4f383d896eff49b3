"""One trained or frozen model: scores a batch without gradient, and updates on a mini-batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from trivium.errors import DataError, TriviumError
from trivium.models.backbone.load import max_positions
from trivium.models.backbone.packed import pack
from trivium.models.backbone.prefixes import Tree
from trivium.models.backbone.routing import check_routed
from trivium.models.backbone.sight import Sight
from trivium.models.cpu.worker_threads import WorkerThreads, one_thread, size_of
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.models.heads.trained_models import ActorCritic, LanguageModel, ValueModel
from trivium.models.vision.encoder import pixel_reader, refuse_images
from trivium.protocols import Objective
from trivium.training.batching import (
    MicroBatch,
    check_lengths,
    collate,
    count,
    cut,
    cut_sharing,
    prefixes_of,
    stretched,
    units,
    work_of,
)
from trivium.training.fsdp import reshard
from trivium.training.optim import Optimizer
from trivium.training.ranks import ALONE, Ranks
from trivium.training.tally import Tally
from trivium.types import AnyArray, Batch, Metrics

if TYPE_CHECKING:
    pass


Result = TypeVar("Result")

_PARALLEL_TOKENS = 2048
"""Approximate number of tokens of a parallel micro-batch. The activations of a larger one do not stay in the cache."""
_PARALLEL_BYTES = 256 * 2**20
"""Largest size of the weights, in bytes, for parallel micro-batches: each worker holds gradients of that size. The
matrix products of larger models already use all threads."""


class TrainableObjective(Objective, Protocol):
    """An objective with its loss."""

    def loss(self, inputs: LossInputs, totals: LossDenominators) -> LossOutputs: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """One micro-batch of a batch."""

    rows: list[int]
    tree: Tree | None = None
    """The common prefixes; None: nothing is shared."""
    parallel: bool = False
    """Whether a worker thread computes it in parallel with others."""


_Computed = tuple[LossOutputs, torch.Tensor | None]
"""The outputs of an objective on a micro-batch, and the entropy of its tokens."""


class Learner:
    """A model, with an optimizer if it is trained.

    The model stays in eval mode: with dropout, two passes over the same tokens, and so all policy ratios, would differ.

    If several ranks train together, each rank gets its share of a batch, and all ranks must call every method. A pass
    through a sharded model is a collective operation, so a rank with fewer micro-batches than another makes empty
    passes.
    """

    def __init__(
        self,
        model: LanguageModel | ValueModel,
        name: str,
        *,
        max_tokens: int,
        max_response_length: int,
        max_sequences: int | None = None,
        optimizer: Optimizer | None = None,
        top_k: int = 0,
        ranks: Ranks = ALONE,
        score_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        model_dir: Path | None = None,
        share_prefix: bool = False,
        threads: int = 1,
        replay_routing: bool = False,
    ) -> None:
        """A micro-batch has at most `max_tokens` tokens, and `max_sequences` sequences if set. `top_k` is the number of
        tokens in the score `top`. Scores are computed in a `score_context`, which may change the model (`adapter_off`).
        `model_dir` holds the image processor; None: sequences are text only. `share_prefix` computes common prefixes
        once, if the model supports it. `threads` workers compute the micro-batches of a small model in parallel
        (`trivium.models.cpu.worker_threads`). `replay_routing` sends tokens through the recorded experts, if the model
        supports it."""
        self._score_context = score_context
        vision = model.backbone.vision
        self._sight = None if vision is None or model_dir is None else Sight(vision, pixel_reader(model_dir))
        self._blank = False
        """Whether any rank has images in the current batch: then every rank runs the vision tower in every pass."""
        self.model, self.name, self.optimizer, self.top_k, self.ranks = model, name, optimizer, top_k, ranks
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.max_response_length = max_response_length
        self._share_prefix = share_prefix
        routers = model.routers if isinstance(model, LanguageModel) else None
        self._routers = routers if replay_routing else None
        workers = self._max_workers(threads)
        self._workers = WorkerThreads(workers, threads) if workers > 1 else None
        self._is_untried = model.device.type == "cuda"
        """Whether to try the largest micro-batch after the next update."""
        self._asking = threading.Lock()
        self.keeps_tokens = False
        """Whether `seen` is kept."""
        self.seen: dict[str, list[AnyArray]] = {}
        """Per-token columns of the last update's loss, leading axis L; NaN for tokens without a value."""
        self.work = np.zeros((2, 4), np.int64)
        """The work that the last score or update computed, and the work of all sequences of its batch (`work_of`)."""

    def _max_workers(self, threads: int) -> int:
        """Maximum number of micro-batches computed at once; above 1 only for a text model on the CPU in a single
        process."""
        backbone = self.model.backbone
        alone = self.ranks.size == 1 and self.model.device.type == "cpu" and self.max_sequences is None
        if not (alone and backbone.packs and backbone.vision is None):
            return 1
        return min(threads, self.max_tokens // (2 * _PARALLEL_TOKENS), _PARALLEL_BYTES // max(1, size_of(self.model)))

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes are computed once; unknown before the first pass."""
        return self._share_prefix and self.model.backbone.packs

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        """A score of a language model (`log_prob`, `entropy`, `sum_pi_squared`, `mean_discriminant`, `top`) or a value
        model (`values`), or both of a policy with a value head.

        Leading axis L, 0 outside the mask. `top` is (L, K, 2): the top-k token ids, and their log-probability.
        Raises DataError for a sequence that is longer than the model's context.
        """
        self._check(batch)
        trailing = (self.top_k, 2) if what == "top" else ()
        scores: list[AnyArray] = [np.zeros((len(e), *trailing), np.float32) for e in batch.experiences]
        with torch.no_grad(), self._score_context():
            for part, grid in self._map(partial(self._scored, batch, what), self._passes(batch, "sequence")):
                for row, scored in zip(part.rows, grid, strict=True):
                    scores[row] = scored[: len(batch.experiences[row])]
        reshard(self.model)
        return scores

    def _scored(self, batch: Batch, what: str, part: _Part) -> tuple[_Part, AnyArray]:
        """One score of a micro-batch, (B, L, ...)."""
        with torch.no_grad():  # thread-local in torch
            micro = self._collate(batch, part, ())
            return part, micro.grid(self._numbers(micro, what)).cpu().numpy()

    def _numbers(self, micro: MicroBatch, what: str) -> torch.Tensor:
        """One score of the trained tokens, (N, ...)."""
        if isinstance(self.model, ValueModel):
            return self.model(micro.pack, micro.rows)
        if what == "entropy":
            return self.model(micro.pack, micro.rows, kept=micro.kept)[1]
        numbers = self.model(micro.pack, micro.rows, what, top_k=self.top_k, kept=micro.kept)
        return torch.stack([numbers[0].to(numbers[1].dtype), numbers[1]], -1) if what == "top" else numbers[0]

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
        assert self.optimizer is not None, f"{self.name} is frozen"
        self._check(batch)
        totals = totals or count(batch, self.max_response_length)
        tokens = {"train/tokens": float(totals.tokens)} if self.name != "value" else {}
        if totals.tokens == 0:
            return tokens
        tally = self._backward(batch, objective, totals, step)
        self.seen = tally.tokens(batch) if self.keeps_tokens else {}
        rate = self.optimizer.lr if lr is None else lr
        with nullcontext() if self._workers is None else one_thread():
            norm = self.optimizer.step(lr, max_grad_norm, who, partial(_not_finite, batch, tally))
        self.optimizer.zero_grad()
        if self._is_untried:
            self._try_longest(batch, objective, step)
        return {
            **objective.derived(tally.metrics(self.name, totals, self.ranks)),
            f"train/grad_norm/{self.name}": norm,
            f"train/lr/{self.name}": rate,
            **tokens,
        }

    def _try_longest(self, batch: Batch, objective: TrainableObjective, step: int) -> None:
        """Computes and drops the gradient of the largest possible micro-batch of this run, with the optimizer state in
        memory, so that a device with too little memory fails in the first step."""
        assert self.optimizer is not None
        unit = next(iter(units(batch, objective.unit)), [])
        prompts = [int(e.response_mask.argmax()) + self.max_response_length for e in batch.experiences]
        longest_here = max([*batch.lengths, *prompts], default=self.max_response_length)
        length = min(self.ranks.all_reduce_max(longest_here), max_positions(self.model.module) or math.inf)
        budget = self.max_tokens * self.ranks.sequence_size
        copies = max(1, int(min(budget // length, self.max_sequences or math.inf)) // max(1, len(unit)))
        longest = stretched(batch.select(unit * copies), int(length))
        work, shares = self.work, self._share_prefix
        self._is_untried = self._share_prefix = False
        try:
            self._backward(longest, objective, count(longest, self.max_response_length), step)
        except torch.OutOfMemoryError as error:
            raise TriviumError(
                f"a micro-batch of {sum(longest.lengths)} tokens for {self.name}, the largest that this run can meet",
                f"{self.model.device}: {str(error).partition('. ')[0]}",
                "lower train.max_tokens_per_micro_batch or engine.sampling.max_new_tokens, or use more ranks",
            ) from error
        finally:
            self.optimizer.zero_grad()
            self.work, self._share_prefix = work, shares

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
        totals = totals or count(batch, self.max_response_length)
        if totals.tokens == 0:
            return {}
        if gradient and self.optimizer is not None:
            tally = self._backward(batch, objective, totals, step)
            norm = {f"train/grad_norm/{self.name}": self.optimizer.norm()}
            self.optimizer.zero_grad()
            return {**objective.derived(tally.metrics(self.name, totals, self.ranks)), **norm}
        tally = Tally()
        compute = partial(self._outputs, batch, objective, totals, step)
        with torch.no_grad():
            for outputs, entropy in self._map(torch.no_grad()(compute), self._passes(batch, objective.unit)):
                tally.add(outputs, entropy)
        reshard(self.model)
        return objective.derived(tally.metrics(self.name, totals, self.ranks))

    def _backward(self, batch: Batch, objective: TrainableObjective, totals: LossDenominators, step: int) -> Tally:
        """Clears the gradient of the parameters and computes that of the loss over the whole batch."""
        assert self.optimizer is not None, f"{self.name} is frozen"
        tally = Tally(self.keeps_tokens)
        self.optimizer.zero_grad()
        compute = partial(self._outputs, batch, objective, totals, step)
        parts = [*self._passes(batch, objective.unit)]
        if self._workers is not None and any(part.parallel for part in parts):
            results = self._workers.map(partial(self._differentiated, compute), parts)
            for part, (outputs, entropy, gradients) in zip(parts, results, strict=True):
                self.optimizer.add_gradients(gradients)
                tally.add(outputs, entropy, part.rows)
            return tally
        for part in parts:
            if not part.rows:
                self._empty_pass()
                continue
            outputs, entropy = compute(part)
            outputs.loss.backward()
            tally.add(outputs, entropy, part.rows)
        return tally

    def _differentiated(
        self, compute: Callable[[_Part], _Computed], part: _Part
    ) -> tuple[LossOutputs, torch.Tensor | None, Sequence[torch.Tensor | None]]:
        """The outputs of a micro-batch, and the gradient of its loss, not yet accumulated on the parameters."""
        assert self.optimizer is not None
        outputs, entropy = compute(part)
        parameters = [*self.optimizer.parameters.values()]
        return outputs, entropy, torch.autograd.grad(outputs.loss, parameters, allow_unused=True)

    def _outputs(
        self, batch: Batch, objective: TrainableObjective, totals: LossDenominators, step: int, part: _Part
    ) -> _Computed:
        """The outputs of the objective on one micro-batch, and the entropy of its tokens if the model has one."""
        micro = self._collate(batch, part, sorted(objective.needs - {"entropy"}))
        inputs = self._forward(micro, step, entropy_grad="entropy" in objective.needs)
        with self._asking:  # a user's loss may keep a reference to the graph
            return objective.loss(inputs, totals), inputs.entropy

    def _map(self, compute: Callable[[_Part], Result], parts: Iterable[_Part]) -> Iterator[Result]:
        """Applies `compute` to each micro-batch, by the workers if any is parallel. Yields the results in order."""
        if self._workers is None:
            return map(compute, parts)
        parts = [*parts]
        return self._workers.map(compute, parts) if any(part.parallel for part in parts) else map(compute, parts)

    def _check(self, batch: Batch) -> None:
        """Raises on all ranks if any rank has a sequence that is too long or an incomplete image, so that no rank waits
        in a pass that another skips. Verifies a model that was built empty first."""
        self.model.verify()
        self.work = np.zeros((2, 4), np.int64)
        self._check_images(batch)
        if self._routers is not None:
            check_routed(batch.experiences, self.ranks.all_reduce_max)
        limit = max_positions(self.model.module)
        longest = self.ranks.all_reduce_max(max(batch.lengths, default=0))
        check_lengths(batch, limit)
        if limit is not None and longest > limit:
            raise DataError("sequences that fit the model", f"one of {longest} tokens on another rank", "see its error")

    def _check_images(self, batch: Batch) -> None:
        seen = any(experience.media for experience in batch.experiences)
        trouble: DataError | None = None
        try:
            if self._sight is not None:
                self._sight.check(batch.experiences)
            elif seen:
                raise refuse_images(self.model.module)
        except DataError as error:
            trouble = error
        worst = self.ranks.all_reduce_max(2 if trouble else int(seen))
        if worst == 2:
            raise trouble or DataError("images that are whole", "one on another rank is not", "see its error")
        self._blank = worst == 1 and self.ranks.size > 1

    def _passes(self, batch: Batch, unit: str) -> Iterator[_Part]:
        """Each micro-batch. A rank with fewer than another makes empty passes: without gradient here; with gradient the
        caller does, for each one without rows."""
        mine = self._parts(batch, units(batch, unit))
        missing = self.ranks.all_reduce_max(len(mine)) - len(mine)  # agreed on before the first of them
        yield from mine
        for _ in range(missing):
            if torch.is_grad_enabled():
                yield _Part([])
            else:
                self._empty_pass()

    def _parts(self, batch: Batch, row_units: list[list[int]]) -> list[_Part]:
        parts = self._cut(batch, row_units)
        computed = [work_of(batch, part.rows, part.tree) for part in parts]
        self.work = np.stack([np.sum([np.zeros(4, np.int64), *computed], 0), work_of(batch, range(len(batch)), None)])
        return parts

    def _cut(self, batch: Batch, row_units: list[list[int]]) -> list[_Part]:
        limit = self.max_tokens * self.ranks.sequence_size  # every rank holds a part of the tokens
        how: dict[str, Any] = {"max_sequences": self.max_sequences}
        prefixes = prefixes_of(batch, routed=self._routers is not None) if self.shares_prefixes and row_units else None
        rows = [row for unit in row_units for row in unit]
        tree = None if prefixes is None else prefixes.tree(rows)
        if prefixes is None or tree is None or not tree.shares:
            prefixes, lengths = None, batch.lengths
            cutting = partial(cut, row_units, lengths, padded=not self.model.backbone.packs, **how)
        else:
            families = [e.group_id for e in batch.experiences]
            cutting = partial(cut_sharing, row_units, families, prefixes, **how)
            if self._workers is None and self.max_sequences is None and tree.num_tokens <= limit:
                return [_Part(rows, tree)]

        def parts(limit: int, **how: int) -> list[_Part]:
            cuts = cutting(limit, **how)
            return [_Part(rows, None if prefixes is None else prefixes.tree(rows), bool(how)) for rows in cuts]

        return self._side_by_side(batch, parts) or parts(limit)

    def _side_by_side(self, batch: Batch, parts: Callable[..., list[_Part]]) -> list[_Part]:
        """Micro-batches for the workers; none if there are too few or if they would be too large together."""
        if self._workers is None:
            return []
        workers = self._workers.number
        even = parts(_PARALLEL_TOKENS, workers=workers)
        largest = max((work_of(batch, part.rows, part.tree)[0] for part in even), default=0)
        return even if len(even) > 1 and 2 * len(even) >= workers and workers * largest <= self.max_tokens else []

    def _empty_pass(self) -> None:
        """Takes part in a collective pass with two tokens of weight 0."""
        two = pack([np.zeros(2, np.int32)], self.model.device)
        if self._blank and self._sight is not None:
            two = self._sight.shown(two, (), blank=True)
        row = torch.ones(1, dtype=torch.int64, device=self.model.device)
        both = isinstance(self.model, ActorCritic) and torch.is_grad_enabled()
        numbers = self.model(two, row, "log_prob_and_values") if both else self.model(two, row)
        if torch.is_grad_enabled():
            parts: Sequence[torch.Tensor] = [numbers] if isinstance(numbers, torch.Tensor) else numbers
            torch.stack([part.sum() for part in parts if part.requires_grad]).sum().mul(0.0).backward()

    def _collate(self, batch: Batch, part: _Part, columns: Iterable[str]) -> MicroBatch:
        return collate(
            batch,
            part.rows,
            columns,
            device=self.model.device,
            dtype=self.model.dtype,
            sight=self._sight,
            blank=self._blank,
            tree=part.tree,
            routers=self._routers,
            skip_ends=self.model.backbone.packs and self.model.reads_before,
        )

    def _forward(self, micro: MicroBatch, step: int, entropy_grad: bool) -> LossInputs:
        """The model's outputs for the trained tokens, on the loss's grid."""
        outputs: dict[str, torch.Tensor] = {}
        if isinstance(self.model, ValueModel):
            outputs["values"] = micro.grid(self.model(micro.pack, micro.rows))
        else:
            top = micro.columns.get("teacher_top")
            candidates = None if top is None else micro.trained(top[..., 0]).long()
            if candidates is not None and micro.kept is not None:
                raise DataError(
                    "the policy's log-probabilities of the teacher's top tokens",
                    "sampling left some of them out (top_p, top_k, min_p or min_new_tokens)",
                    "sample from the whole distribution, or use policy_loss.kind distill",
                )
            what = "log_prob_and_values" if isinstance(self.model, ActorCritic) else "log_prob"
            log_prob, entropy, *values = self.model(
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
        wrong = sum(not np.isfinite(array[each.response_mask]).all() for each, array in trained)
        if wrong:
            return f"{name} of {wrong} of {len(batch)} sequences are not finite"
    return tally.not_finite()
