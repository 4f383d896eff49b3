"""The passes of a model over a batch: which sequences share a micro-batch, its tensors, the threads that compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from trivium.foundation.errors import DataError
from trivium.models.backbone.load import max_positions
from trivium.models.backbone.packed import pack
from trivium.models.backbone.prefixes import Tree
from trivium.models.backbone.routing import check_routed
from trivium.models.backbone.sight import Sight
from trivium.models.cpu.worker_threads import WorkerThreads
from trivium.models.heads.trained_models import ActorCritic, LanguageModel, ValueModel
from trivium.models.vision.encoder import pixel_reader, refuse_images
from trivium.planning.choices import UPDATE_TOKENS, updating_threads
from trivium.training.batching import (
    MicroBatch,
    check_lengths,
    collate,
    cut,
    cut_sharing,
    prefixes_of,
    units,
    work_of,
)
from trivium.training.distributed.ranks import Ranks
from trivium.types import AnyArray, Batch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How the sequences of a batch become micro-batches. The gradient does not depend on the limits."""

    max_tokens: int
    """The largest number of tokens of a micro-batch, for each rank of a sequence."""
    max_sequences: int | None = None
    """The largest number of sequences of a micro-batch; None: no limit."""
    share_prefix: bool = False
    """Whether common prefixes are computed once, if the model supports it."""
    threads: int = 1
    """How many threads may compute micro-batches of a small model in parallel (`trivium.models.cpu.worker_threads`)."""
    replay_routing: bool = False
    """Whether tokens go through their recorded experts, if the model supports it."""
    model_dir: Path | None = None
    """The directory of the image processor; None: sequences are text only."""


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch of a batch."""

    rows: list[int]
    """Empty for a pass in which this rank only takes part."""
    tree: Tree | None = None
    """The common prefixes; None: nothing is shared."""
    parallel: bool = False
    """Whether a worker thread computes it in parallel with others."""


class Passes:
    """Cuts batches into micro-batches and computes them.

    A pass through a sharded model is a collective operation, so all ranks call every method, and a rank with fewer
    micro-batches than another makes empty passes.
    """

    def __init__(self, model: LanguageModel | ValueModel, batching: MicroBatching, ranks: Ranks) -> None:
        self._model, self._batching, self._ranks = model, batching, ranks
        vision, directory = model.backbone.vision, batching.model_dir
        self._sight = None if vision is None or directory is None else Sight(vision, pixel_reader(directory))
        self._blank = False
        """Whether any rank has images in the current batch: then every rank runs the vision tower in every pass."""
        routers = model.routers if isinstance(model, LanguageModel) else None
        self._routers = routers if batching.replay_routing else None
        workers = self._max_workers()
        self.workers = WorkerThreads(workers, batching.threads) if workers > 1 else None

    def _max_workers(self) -> int:
        """Maximum number of micro-batches computed at once; above 1 only for a text model on the CPU in a single
        process."""
        backbone, batching = self._model.backbone, self._batching
        alone = self._ranks.size == 1 and self._model.device.type == "cpu" and batching.max_sequences is None
        if not (alone and backbone.packs and backbone.vision is None):
            return 1
        trained = sum(weight.nbytes for weight in self._model.parameters() if weight.requires_grad)
        return updating_threads(trained, batching.threads, batching.max_tokens)

    @property
    def share_prefixes(self) -> bool:
        """Whether common prefixes are computed once; unknown before the first pass."""
        return self._batching.share_prefix and self._model.backbone.packs

    # ------------------------------------------------------------------ before a pass

    def check(self, batch: Batch) -> None:
        """Raises on all ranks if any rank has a sequence that is too long or an incomplete image, so that no rank waits
        in a pass that another skips. Verifies a model that was built empty first."""
        self._model.verify()
        self._check_images(batch)
        if self._routers is not None:
            check_routed(batch.experiences, self._ranks.all_reduce_max)
        limit = max_positions(self._model.module)
        longest = self._ranks.all_reduce_max(max(batch.lengths, default=0))
        check_lengths(batch, limit)
        if limit is not None and longest > limit:
            raise DataError(
                "sequences within the context of the model", f"one of {longest} tokens on another rank", "see its error"
            )

    def _check_images(self, batch: Batch) -> None:
        has_images = any(experience.media for experience in batch.experiences)
        problem: DataError | None = None
        try:
            if self._sight is not None:
                self._sight.check(batch.experiences)
            elif has_images:
                raise refuse_images(self._model.module)
        except DataError as error:
            problem = error
        worst = self._ranks.all_reduce_max(2 if problem else int(has_images))
        if worst == 2:
            raise problem or DataError("images that are not cut", "an image on another rank is cut", "see its error")
        self._blank = worst == 1 and self._ranks.size > 1

    # ------------------------------------------------------------------ micro-batches

    def parts(self, batch: Batch, unit: str, *, share_prefixes: bool = True) -> list[Part]:
        """The micro-batches of this rank, of whole units (`batching.units`), then the empty ones that other ranks wait
        for."""
        parts = self._cut(batch, units(batch, unit), share_prefixes=share_prefixes and self.share_prefixes)
        missing = self._ranks.all_reduce_max(len(parts)) - len(parts)  # agreed on before the first pass
        return parts + [Part([])] * missing

    def _cut(self, batch: Batch, row_units: list[list[int]], *, share_prefixes: bool) -> list[Part]:
        limit = self._batching.max_tokens * self._ranks.sequence_size  # each of them holds a part of the tokens
        max_sequences = self._batching.max_sequences
        prefixes = prefixes_of(batch, routed=self._routers is not None) if share_prefixes and row_units else None
        rows = [row for unit in row_units for row in unit]
        tree = None if prefixes is None else prefixes.tree(rows)
        if prefixes is None or tree is None or not tree.shares:
            padded = not self._model.backbone.packs
            cutting = partial(cut, row_units, batch.lengths, padded=padded, max_sequences=max_sequences)
            tree_of = _no_tree
        else:
            families = [e.group_id for e in batch.experiences]
            cutting = partial(cut_sharing, row_units, families, prefixes, max_sequences=max_sequences)
            tree_of = prefixes.tree
            if self.workers is None and max_sequences is None and tree.num_tokens <= limit:
                return [Part(rows, tree)]
        if self.workers is not None:
            even = cutting(min(UPDATE_TOKENS, limit // self.workers.number), workers=self.workers.number)
            parallel = [Part(rows, tree_of(rows), parallel=True) for rows in even]
            if self._fits(batch, parallel, self.workers.number):
                return parallel
        return [Part(rows, tree_of(rows)) for rows in cutting(limit)]

    def _fits(self, batch: Batch, parts: Sequence[Part], workers: int) -> bool:
        """Whether there are enough parts for the workers, and they are not too large together."""
        largest = max((work_of(batch, part.rows, part.tree)[0] for part in parts), default=0)
        return len(parts) > 1 and 2 * len(parts) >= workers and workers * largest <= self._batching.max_tokens

    def collate(self, batch: Batch, part: Part, columns: Iterable[str]) -> MicroBatch:
        """The tensors of a micro-batch on the model's device."""
        return collate(
            batch,
            part.rows,
            columns,
            device=self._model.device,
            dtype=self._model.dtype,
            sight=self._sight,
            blank=self._blank,
            tree=part.tree,
            routers=self._routers,
            skip_ends=self._model.backbone.packs and self._model.reads_before,
        )

    # ------------------------------------------------------------------ computing

    def map(self, compute: Callable[[Part], Result], parts: Sequence[Part]) -> Iterator[Result]:
        """Applies `compute` to each micro-batch that has rows, on the workers if they are parallel. Yields the results
        in order. Makes the empty passes."""
        if self.workers is not None and any(part.parallel for part in parts):
            yield from self.workers.map(compute, parts)
            return
        for part in parts:
            if part.rows:
                yield compute(part)
            else:
                self._empty_pass()

    def _empty_pass(self) -> None:
        """Takes part in a collective pass with two tokens of weight 0."""
        model = self._model
        two = pack([np.zeros(2, np.int32)], model.device)
        if self._blank and self._sight is not None:
            two = self._sight.shown(two, (), blank=True)
        row = torch.ones(1, dtype=torch.int64, device=model.device)
        both = isinstance(model, ActorCritic) and torch.is_grad_enabled()
        numbers = model(two, row, "log_prob_and_values") if both else model(two, row)
        if torch.is_grad_enabled():
            outputs: Sequence[torch.Tensor] = [numbers] if isinstance(numbers, torch.Tensor) else numbers
            # With weight 0 instead of no pass: the ranks reduce the gradients of their parts in the backward pass.
            torch.stack([output.sum() for output in outputs if output.requires_grad]).sum().mul(0.0).backward()


def _no_tree(rows: Sequence[int]) -> None:
    del rows


def work_done(batch: Batch, parts: Sequence[Part]) -> AnyArray:
    """(2, 4): the work of these micro-batches, and the work of all whole sequences of the batch (`work_of`)."""
    computed = [work_of(batch, part.rows, part.tree) for part in parts if part.rows]
    return np.stack([np.sum([np.zeros(4, np.int64), *computed], 0), work_of(batch, range(len(batch)), None)])
