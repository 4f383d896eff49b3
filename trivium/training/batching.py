"""Cuts a mini-batch into micro-batches and turns each into tensors.

The cut never changes the gradient: the learner divides by counts of the whole mini-batch. It only decides how much
memory a forward and backward pass takes, and which sequences can share a common prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from trivium.foundation.errors import DataError
from trivium.models.backbone.packed import Pack, pack
from trivium.models.backbone.prefixes import Prefixes, Tree, separate
from trivium.models.backbone.routing import Routers
from trivium.models.backbone.sight import Sight
from trivium.models.heads.kept import KeptSets, kept_sets
from trivium.models.heads.loss import LossDenominators
from trivium.models.placement import sent
from trivium.training.balance import partition
from trivium.types import AnyArray, Batch, Experience

_MIN_TOKENS = 512
"""Minimum number of tokens of a parallel micro-batch: smaller ones run the same number of operations."""


def count(batch: Batch, max_response_length: int) -> LossDenominators:
    """The counts that a whole mini-batch is normalised by; the limit of one completion is a constant of the run."""
    counts, experts = batch.response_lengths, batch.experts
    # Two consecutive rows are a pair: the chosen and the rejected sequence.
    chosen, rejected = counts[: len(counts) // 2 * 2].reshape(-1, 2).T
    counted = [
        int(row[e.response_mask].sum())
        for row, e in zip(batch.columns.get("counted", ()), batch.experiences, strict=False)
    ]
    observed = [
        int(row.sum()) if number else 0 for row, number in zip(batch.columns.get("observed", ()), counts, strict=False)
    ]
    return LossDenominators(
        int(counts.sum()),
        int((counts > 0).sum()),
        max_response_length,
        expert_tokens=int(counts[experts].sum()),
        expert_sequences=int(experts.sum()),
        counted_tokens=sum(counted) if counted else None,
        counted_sequences=sum(n > 0 for n in counted) if counted else None,
        observed_tokens=sum(observed),
        observed_sequences=sum(n > 0 for n in observed),
        pairs=int(((chosen > 0) & (rejected > 0)).sum()),
    )


def stretched(batch: Batch, length: int) -> Batch:
    """Extends every shorter sequence to `length` tokens by repeating its last token and its columns, to measure the
    memory of the longest batch. The added tokens are trained. Omits the `kept` columns."""

    def longer(array: AnyArray) -> AnyArray:
        return np.concatenate([array, np.repeat(array[-1:], max(0, length - len(array)), axis=0)])

    rows = [
        replace(
            e,
            tokens=longer(e.tokens),
            response_mask=np.concatenate([e.response_mask, np.ones(max(0, length - len(e)), np.bool_)]),
            rollout_log_prob=longer(e.rollout_log_prob),
            policy_version=longer(e.policy_version),
            extra={name: longer(a) for name, a in e.extra.items() if not name.startswith("kept")},
        )
        for e in batch.experiences
    ]
    columns = {name: [longer(array) for array in arrays] for name, arrays in batch.columns.items()}
    return Batch(tuple(rows)).with_columns(**columns)


def check_lengths(batch: Batch, limit: int | None) -> None:
    """Raises DataError for a sequence that is longer than the model's context: models fail or extrapolate there."""
    longest = max(batch.experiences, key=len, default=None)
    if longest is not None and limit is not None and len(longest) > limit:
        raise DataError(
            "sequences within the context of the model",
            f"one of group {longest.group_id!r} has {len(longest)} tokens, and the model was built for {limit} "
            "(max_position_embeddings)",
            "leave out or shorten the longest rows, lower engine.sampling.max_new_tokens, or use a model with a longer "
            "context",
        )


def units(batch: Batch, unit: str) -> list[list[int]]:
    """Rows that a micro-batch must keep whole: `sequence`, `pair` (two consecutive rows) or `group`.

    Units without a trained token are left out.
    """
    units_of_rows: dict[object, list[int]] = {}
    trained = (batch.response_lengths > 0).tolist()
    for row, experience in enumerate(batch.experiences):
        keys = {"sequence": row, "pair": row // 2, "group": experience.group_id}
        if unit not in keys:
            raise DataError(f"an objective over units of {unit!r}", "no such unit", f"known: {', '.join(keys)}")
        units_of_rows.setdefault(keys[unit], []).append(row)
    return [rows for rows in units_of_rows.values() if any(trained[row] for row in rows)]


def cut(
    row_units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    max_tokens: int,
    *,
    padded: bool = False,
    max_sequences: int | None = None,
    workers: int = 1,
) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens, and `max_sequences` sequences, made of whole units. A unit that
    exceeds either limit has its own micro-batch.

    Units of similar length share a micro-batch, which reduces padding. With `padded`, padding counts as tokens. Several
    `workers` compute micro-batches in parallel: then the micro-batches have nearly equal sizes, `max_tokens` is
    approximate, and `max_sequences` must be None.
    """
    if workers > 1:
        return _even(row_units, [sum(lengths[row] for row in rows) for rows in row_units], max_tokens, workers)

    def fits(rows: Sequence[int]) -> bool:
        sizes = [lengths[row] for row in rows]
        tokens = len(sizes) * max(sizes) if padded else sum(sizes)
        return tokens <= max_tokens and (max_sequences is None or len(rows) <= max_sequences)

    return _filled(sorted(row_units, key=lambda rows: -max(lengths[row] for row in rows)), fits)


def cut_sharing(
    row_units: Sequence[Sequence[int]],
    families: Sequence[object],
    prefixes: Prefixes,
    max_tokens: int,
    *,
    max_sequences: int | None = None,
    workers: int = 1,
) -> list[list[int]]:
    """Like `cut`, but counts a token that sequences share once.

    Rows of one family (`families`, by row) probably share a prefix. They stay together if they fit into one
    micro-batch.
    """

    def cost(rows: Sequence[int]) -> int:
        return prefixes.tree(rows).num_tokens

    def fits(rows: Sequence[int]) -> bool:
        return (max_sequences is None or len(rows) <= max_sequences) and cost(rows) <= max_tokens

    costs: dict[int, int] = {}  # first row of a parcel -> tokens of the parcel
    by_family: dict[object, list[Sequence[int]]] = {}
    first = {rows[0]: rows for rows in row_units}
    for row in prefixes.ordered([*first]):  # neighbours share the longest prefixes
        by_family.setdefault(families[row], []).append(first[row])
    parcels: list[list[int]] = []
    for family in by_family.values():
        whole = [row for rows in family for row in rows]
        tokens = cost(whole)
        if tokens <= max_tokens and (max_sequences is None or len(whole) <= max_sequences):
            parcels.append(whole)
            costs[whole[0]] = tokens
        else:
            parts = _filled(family, fits)
            parcels += parts
            costs |= {rows[0]: cost(rows) for rows in parts}
    if workers > 1:
        return _even(parcels, [costs[rows[0]] for rows in parcels], max_tokens, workers)

    def fit(rows: Sequence[int]) -> bool:
        # Only first rows have a cost, so the sum is that of the parcels in `rows`.
        few = max_sequences is None or len(rows) <= max_sequences
        return few and sum(costs.get(row, 0) for row in rows) <= max_tokens

    return _filled(sorted(parcels, key=lambda rows: -costs[rows[0]]), fit)


def _filled(row_units: Iterable[Sequence[int]], fits: Callable[[Sequence[int]], bool]) -> list[list[int]]:
    """Puts each unit, in order, into the last micro-batch, or into a new one if it does not fit."""
    micro_batches: list[list[int]] = []
    for unit in row_units:
        if micro_batches and fits([*micro_batches[-1], *unit]):
            micro_batches[-1].extend(unit)
        else:
            micro_batches.append(list(unit))
    return micro_batches


def _even(row_units: Sequence[Sequence[int]], costs: Sequence[int], max_tokens: int, workers: int) -> list[list[int]]:
    """Splits the units into micro-batches of nearly equal cost, largest first. Their number is a multiple of `workers`,
    unless they would be too small."""
    number = workers * -(-sum(costs) // (workers * max_tokens))
    number = max(1, min(number, sum(costs) // _MIN_TOKENS))
    parts = partition(costs, number)
    return [[row for unit in part for row in row_units[unit]] for part in parts if part]


def prefixes_of(batch: Batch, *, routed: bool = False) -> Prefixes:
    """The common prefixes of the experiences of a batch. An image is shared only as a whole, if its content and its
    tokens are equal. With `routed`, tokens are shared only if they go through the same experts."""
    keys = [experience.tokens for experience in batch.experiences]
    if any(experience.media for experience in batch.experiences):
        keys = [_keys_with_images(experience) for experience in batch.experiences]
    if routed:
        keys = _with_routing(keys, [experience.extra.get("routing") for experience in batch.experiences])
    return Prefixes(keys)


def _with_routing(keys: Sequence[AnyArray], arrays: Sequence[AnyArray | None]) -> list[AnyArray]:
    """(L,) each: bytes that are equal if both the keys and the experts of two tokens are equal."""
    one = next((array for array in arrays if array is not None), None)
    if one is None:
        return list(keys)
    joined: list[AnyArray] = []
    for key, array in zip(keys, arrays, strict=True):
        array = np.zeros((len(key), *one.shape[1:]), one.dtype) if array is None else array
        both = np.concatenate([part.reshape(len(key), -1).view(np.uint8) for part in (key, array)], 1)
        joined.append(both.view(f"V{both.shape[1]}")[:, 0])
    return joined


def _keys_with_images(experience: Experience) -> AnyArray:
    """(L,) int64: the tokens. Those of an image are replaced by a negative hash of the image and its tokens."""
    tokens = experience.tokens.astype(np.int64)
    for item in experience.media:
        start, stop = item.span or (0, 0)
        digest = blake2b(item.sha256.encode() + experience.tokens[start:stop].tobytes(), digest_size=8).digest()
        # 63 bits of the hash, so that the negative number fits into int64.
        tokens[start:stop] = -1 - (int.from_bytes(digest, "little") >> 1)
    return tokens


def work_of(batch: Batch, rows: Sequence[int], tree: Tree | None) -> npt.NDArray[np.int64]:
    """(4,): tokens, squares, image tokens and image squares, as in `trivium.foundation.phases.Phase`, of the
    experiences at `rows`. Prefixes that `tree` shares count once; None: nothing is shared."""
    chosen = [batch.experiences[row] for row in rows]
    tree = tree or separate([len(e) for e in chosen])
    places = ((part, item.span) for part in tree.segments for item in chosen[part.sequence].media if item.span)
    images = np.array([stop - first for part, (first, stop) in places if part.first <= first < part.stop], np.int64)
    return np.array([tree.num_tokens, tree.num_squares, images.sum(), (images**2).sum()])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole sequences on the device: packed for the model, as a (B, L) grid for the loss."""

    pack: Pack
    rows: torch.Tensor
    """(N,) int64: the rows of the pack that hold the trained tokens and those of the column `observed`. A shared token
    has an entry for each sequence."""
    cells: torch.Tensor
    """(N,) int64: the cells of the row-major grid that hold these tokens."""
    response_mask: torch.Tensor
    """(B, L) bool."""
    policy_version: torch.Tensor
    """(B, L) int32."""
    columns: dict[str, torch.Tensor]
    """(B, L) each, or (B, L, ...)."""
    kept: KeptSets | None = None
    """The candidates that each of these tokens was sampled from; None: the whole vocabulary."""

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """Scatters values of these tokens, (N, ...), to the grid (B, L, ...), zero elsewhere. Differentiable."""
        flat = values.new_zeros(self.response_mask.numel(), *values.shape[1:])
        whole = flat.index_copy(0, self.cells, values)
        return whole.view(*self.response_mask.shape, *values.shape[1:])

    def trained(self, grid: torch.Tensor) -> torch.Tensor:
        """The inverse of `grid`: gathers the values of these tokens, (N, ...), from (B, L, ...)."""
        return grid.flatten(0, 1)[self.cells]


def first_pass(updates: Sequence[Batch]) -> Batch | None:
    """Joins the mini-batches of the first pass of a train step's updates. Returns None if there are none."""
    first: list[Batch] = []
    earlier = set[tuple[str, int]]()
    for batch in updates:
        members = _members(batch)
        if members.isdisjoint(earlier):  # else the mini-batch belongs to a later pass
            first.append(batch)
            earlier |= members
    return joined(first)


def joined_shares(shares: Sequence[Batch]) -> Batch | None:
    """Joins the shares of all data ranks. Omits members whose sequences are spread over several ranks, since their
    order is unknown. Returns None without shares."""
    ranks = Counter(member for share in shares for member in _members(share))
    whole = [[row for row, e in enumerate(s.experiences) if ranks[e.group_id, e.index] == 1] for s in shares]
    return joined([share.select(rows) for share, rows in zip(shares, whole, strict=True)])


def _members(batch: Batch) -> set[tuple[str, int]]:
    """The members of groups that a batch has sequences of. A member may have several."""
    return {(e.group_id, e.index) for e in batch.experiences}


def joined(parts: Sequence[Batch]) -> Batch | None:
    """Joins batches, with the columns that all non-empty ones have. Returns None without rows."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return None
    names = set[str].intersection(*(set(part.columns) for part in parts))
    columns = {name: [array for part in parts for array in part.columns[name]] for name in sorted(names)}
    return Batch(tuple(e for part in parts for e in part.experiences)).with_columns(**columns)


def collate(
    batch: Batch,
    rows: Sequence[int],
    columns: Iterable[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    sight: Sight | None = None,
    blank: bool = False,
    tree: Tree | None = None,
    routers: Routers | None = None,
    skip_ends: bool = False,
) -> MicroBatch:
    """Collates the experiences at `rows` with the named columns and `rollout_log_prob`. `sight` reads their images;
    without it there must be none. `blank` adds an image without tokens to a micro-batch without images. `tree` holds
    the shared prefixes; None: none. With `routers`, tokens go through the recorded experts. `skip_ends` as in `pack`;
    ignored with images.

    Raises DataError for a missing column and for incomplete images.
    """
    chosen = [batch.experiences[row] for row in rows]
    wanted = sorted(set(columns))
    missing = [name for name in wanted if name not in batch.columns]
    if missing:
        raise DataError(
            f"columns {', '.join(missing)} for the update",
            f"the batch holds {', '.join(sorted(batch.columns)) or 'none'}",
            "list the score in the algorithm's `needs`, or compute the column in its `advantages`",
        )
    lengths = np.array([len(e.tokens) for e in chosen])
    within = np.arange(lengths.max()) < lengths[:, None]

    def grid(arrays: Sequence[AnyArray], dtype: torch.dtype) -> torch.Tensor:
        # torch.zeros converts the type of torch to that of numpy.
        padded = torch.zeros((*within.shape, *arrays[0].shape[1:]), dtype=dtype).numpy()
        padded[within] = np.concatenate(arrays)
        return sent(padded, device)

    skip_ends = skip_ends and not blank and not any(e.media for e in chosen)
    packed = pack([e.tokens for e in chosen], device, tree, skip_ends=skip_ends)
    if routers is not None:
        routing = routers.packed([e.extra.get("routing") for e in chosen], packed.segments)
        packed = replace(packed, routing=None if routing is None else sent(routing, device))
    masks = [e.response_mask for e in chosen]
    if "observed" in wanted:
        masks = [mask | (batch.columns["observed"][row] != 0) for mask, row in zip(masks, rows, strict=True)]
    trained = sent(np.flatnonzero(np.concatenate(masks)), device)
    return MicroBatch(
        pack=packed if sight is None else sight.shown(packed, chosen, blank=blank),
        rows=packed.rows[trained],
        cells=packed.cells[trained],
        response_mask=grid([e.response_mask for e in chosen], torch.bool),
        policy_version=grid([e.policy_version for e in chosen], torch.int32),
        columns={
            "rollout_log_prob": grid([e.rollout_log_prob for e in chosen], dtype),
            **{name: grid([batch.columns[name][row] for row in rows], dtype) for name in wanted},
        },
        kept=kept_sets(chosen, device, masks),
    )
