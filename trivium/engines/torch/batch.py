"""The rows that decode together: the request of each, its tokens so far, and how it is sampled.

Per-row state is in columns of numpy arrays, so the Python overhead of a step does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.engines.stopping import StopScan
from trivium.engines.torch.decoder import Decoder, Prefix
from trivium.engines.torch.drafts import Drafts, Follower
from trivium.engines.torch.image_prompts import PromptImages
from trivium.engines.torch.row_table import RowTable
from trivium.engines.torch.sampling import Kept, RowSampling, on_host, sample
from trivium.foundation.errors import DataError
from trivium.foundation.randomness import uniforms
from trivium.planning.choices import DRAFTED_ROWS
from trivium.types import AnyArray, Completion, Request, StopReason

SCORED = "prompt_log_prob"
"""The extra of `EXTRAS` that needs the output layer for every token of the prompt."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the engine, queued or decoding."""

    request: Request
    limit: int
    """Maximum number of tokens: `max_new_tokens`, limited by the context."""
    future: Any
    """The caller's asyncio future."""
    digest: int = 0
    cancelled: bool = False
    scan: StopScan | None = None
    prompt: bytes = field(default=b"", repr=False)
    """Key of the prompt: its tokens and the hashes of its images."""
    images: Future[PromptImages | None] | None = None
    """Future of the images; None without images."""
    routing: list[AnyArray] = field(default_factory=list[AnyArray], repr=False)
    """(tokens, layers, K) parts of its `routing`, if requested."""
    kept: list[AnyArray] = field(default_factory=list[AnyArray], repr=False)
    """The tokens that each token was sampled among, if requested."""
    kept_count: list[int] = field(default_factory=list[int], repr=False)
    prompt_log_prob: AnyArray | None = field(default=None, repr=False)
    """The log-probabilities of the prompt's tokens, if requested."""
    follower: Follower | None = field(default=None, repr=False)
    """What its drafts come from, once any were looked for."""
    on_tokens: Any = None
    """What the caller's event loop calls with each token, if the caller asks for a stream."""

    def asks(self, what: str) -> bool:
        """Whether the request asks for this quantity to be recorded."""
        return what in self.request.sampling.extra

    @property
    def task(self) -> tuple[str, str]:
        """The task, whose earlier completions may be repeated."""
        return self.request.key.taskset, self.request.key.task_id


_LONGEST_WAIT = 3
"""The most steps between two searches for drafts."""
_Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], list[Kept]]


def bucket(rows: int) -> int:
    """The padded number of rows of a step: few distinct shapes, since each new shape compiles a kernel."""
    step = 2 if rows <= 4 else 4 if rows <= 16 else 8 if rows <= 64 else 32 if rows <= 256 else 64
    return -(-rows // step) * step


class Batch:
    """Up to `max_rows` completions in progress. Rows of finished ones are free until a request takes them."""

    def __init__(
        self,
        decoder: Decoder,
        max_rows: int,
        eos: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        drafts: Drafts | None = None,
    ) -> None:
        self._decoder, self._decode, self._drafts = decoder, decode, drafts
        self._is_eos = np.zeros(decoder.vocab_size, np.bool_)
        self._is_eos[sorted(eos)] = True
        self._id_type = np.uint16 if decoder.vocab_size <= 2**16 else np.int32
        self._eos = torch.tensor(sorted(eos), dtype=torch.int64, device=decoder.device)
        self.tickets: list[Ticket | None] = [None] * max_rows
        self._span = 0
        """Rows up to the last occupied one: those that a step computes."""
        self._live = 0
        self._rows = RowTable(bucket(max_rows))
        self._streamed: list[tuple[Ticket, int, float]] = []
        """The tokens of streams that `take_streamed` has not returned yet, with their log-probabilities."""
        self._wait = self._failed = 0
        """Steps until drafts are looked for again, and how many searches in a row gave none that pay."""

    @property
    def live(self) -> int:
        """Completions in progress."""
        return self._live

    @property
    def free(self) -> int:
        return len(self.tickets) - self._live

    def admit(self, tickets: Sequence[Ticket], prefixes: Sequence[Prefix], version: int) -> list[tuple[Ticket, Any]]:
        """Assigns rows to the tickets and samples their first tokens. Returns (ticket, completion) of finished ones."""
        rows = np.flatnonzero(~self._rows.occupied[: len(self.tickets)])[: len(tickets)]
        for row, ticket, prefix in zip(rows.tolist(), tickets, prefixes, strict=True):
            self._assign(row, ticket)
            if prefix.routing is not None and ticket.asks("routing"):
                ticket.routing.append(prefix.routing)
            if ticket.asks(SCORED):
                ticket.prompt_log_prob = prefix.log_prob
            self._rows.ahead[row] = prefix.ahead
        self._live += len(tickets)
        self._span = max(self._span, int(rows.max()) + 1)
        # No row can need more positions, so the cache, which grows ahead of need, stops there.
        longest = (self._rows.position + self._rows.limit - self._rows.count)[self._rows.occupied].max()
        self._decoder.place(prefixes, rows.tolist(), int(longest))
        sampled, log_prob, candidates = self._drawn(
            torch.stack([prefix.logits for prefix in prefixes]), self._sampling(rows)
        )
        self._keep(rows, _kept_by_row(candidates))
        return self._append(rows, sampled, log_prob, version)

    def step(self, version: int) -> list[tuple[Ticket, Any]]:
        """Samples one more token for every row, and further ones where drafts are right. Returns (ticket, completion)
        of finished ones."""
        self._compact()
        if self._drafts is not None and self._live <= DRAFTED_ROWS and self._decoder.recorder is None:
            self._wait -= 1
            drafts = self._chosen(self._drafts) if self._wait < 0 else None
            if drafts is not None:
                self._failed = 0
                return self._verify(drafts, self._drafts, version)
            if self._wait < 0:
                self._wait = self._failed = min(self._failed + 1, _LONGEST_WAIT)
        size = bucket(self._span)
        ahead = self._rows.ahead[:size] if self._rows.ahead[:size].any() else None
        how = self._sampling(slice(0, size))  # includes free rows: cheaper than selecting the others
        parts = self._decoder.step_parts(
            self._rows.next[:size],
            self._rows.position[:size],
            ahead,
            lambda logits, part: self._drawn(logits, (how[0][part], how[1][part])),
        )
        sampled, log_prob, candidates = self._joined(parts)
        rows = np.flatnonzero(self._rows.occupied)
        self._keep(np.arange(size), candidates)
        if self._decoder.recorder is not None:
            self._record(rows, self._decoder.recorder.take(size, 1))
        self._rows.position[rows] += 1
        return self._append(rows, sampled[rows], log_prob[rows], version)

    def _chosen(self, drafts: Drafts) -> dict[int, list[int]] | None:
        """The drafts of rows that have any; None if a step without them is better."""
        rows = np.flatnonzero(self._rows.occupied & (self._rows.count >= self._rows.due)).tolist()
        followers = dict[int, Follower]()
        for row in rows:
            ticket = self.tickets[row]
            assert ticket is not None
            follower = ticket.follower
            if follower is None:
                follower = ticket.follower = drafts.follower(ticket.task, ticket.request.prompt_tokens)
            drafts.advance(follower, self._rows.tokens[row, follower.count : self._rows.count[row]].tolist())
            self._rows.due[row] = follower.due
            if follower.follows:
                followers[row] = follower
        if not followers:
            return None
        rows = [*followers]
        remaining = (self._rows.limit[rows] - self._rows.count[rows] - 1).tolist()
        chosen = drafts.choose([*followers.values()], remaining, self._live, bucket)
        return None if chosen is None else dict(zip(rows, chosen, strict=True))

    def _verify(self, drafted: Mapping[int, Sequence[int]], counts: Drafts, version: int) -> list[tuple[Ticket, Any]]:
        """Samples the next tokens of all rows as several steps would, as long as the drafts are what is sampled.

        A draft is one more row of the step, at the next position. The keys and values of a wrong one stay in the cache
        until the token of that position replaces them, before any row sees them.
        """
        rows = np.flatnonzero(self._rows.occupied)
        drafts = [drafted.get(row, ()) for row in rows.tolist()]
        lengths = np.array([1 + len(draft) for draft in drafts])
        first = np.cumsum(lengths) - lengths
        number = int(lengths.sum())
        # The step is padded with copies of its last row, which write the same keys and values to the same place.
        which = np.minimum(np.arange(bucket(number)), number - 1)
        owners = np.repeat(rows, lengths)[which]
        depth = (np.arange(number) - np.repeat(first, lengths))[which]
        tokens = np.empty(number, np.int64)
        for start, row, draft in zip(first.tolist(), rows.tolist(), drafts, strict=True):
            tokens[start] = self._rows.next[row]
            tokens[start + 1 : start + 1 + len(draft)] = draft
        how = self._sampling(owners, depth)
        sampled, log_prob, candidates = self._joined(
            self._decoder.step_parts(
                tokens[which],
                self._rows.position[owners] + depth,
                self._rows.ahead[owners] if self._rows.ahead[owners].any() else None,
                lambda logits, part: self._drawn(logits, (how[0][part], how[1][part])),
                owners,
            )
        )
        # A row's tokens are valid up to the first one that differs from the draft at the next position: what comes
        # after it was computed from that draft.
        agreement = sampled[: number - 1] == tokens[1:]
        num_valid = [
            1 + (int(wrong[0]) if len(wrong := np.flatnonzero(~agreement[start : start + length - 1])) else length - 1)
            for start, length in zip(first.tolist(), lengths.tolist(), strict=True)
        ]
        counts.drafted += number - len(rows)
        tickets = [self.tickets[row] for row in rows.tolist()]
        finished = []
        for place in range(max(num_valid)):
            # A completion that ended at an earlier place has left its row.
            going = [
                i for i, row in enumerate(rows.tolist()) if place < num_valid[i] and self.tickets[row] is tickets[i]
            ]
            if not going:
                break
            counts.accepted += len(going) if place else 0
            chosen = first[going] + place
            self._keep(rows[going], [candidates[index] for index in chosen.tolist()] if candidates else [])
            self._rows.position[rows[going]] += 1
            finished += self._append(rows[going], sampled[chosen], log_prob[chosen], version)
        return finished

    def take_streamed(self) -> list[tuple[Ticket, int, float]]:
        """The tokens that rows with `on_tokens` were given since the last call, with their log-probabilities."""
        tokens, self._streamed = self._streamed, []
        return tokens

    def drop_cancelled(self) -> None:
        """Frees the rows whose calls were cancelled."""
        for row, ticket in enumerate(self.tickets):
            if ticket is not None and ticket.cancelled:
                self._free(row)

    def abort(self) -> list[tuple[Ticket, Any]]:
        """Ends every completion now, with `abort`."""
        return [self._finish(int(row), StopReason.ABORT) for row in np.flatnonzero(self._rows.occupied)]

    def _assign(self, row: int, ticket: Ticket) -> None:
        sampling = ticket.request.sampling
        self.tickets[row] = ticket
        self._rows.assign(
            row,
            sampling,
            scanned=bool(sampling.stop) or sampling.stop_tokens is not None,
            keeps=ticket.asks("kept"),
            streams=ticket.on_tokens is not None,
            position=len(ticket.request.prompt_tokens),  # where its first sampled token will be written
            limit=ticket.limit,
            digest=ticket.digest,
        )
        ticket.scan = StopScan(sampling.stop, self._decode) if sampling.stop else None

    def _sampling(
        self, rows: npt.NDArray[np.int64] | slice, later: npt.NDArray[np.int64] | int = 0
    ) -> tuple[npt.NDArray[np.float64], RowSampling]:
        """The random number of each row's next token, or of one that comes so much `later`, and how it is sampled."""
        count = self._rows.count[rows] + later
        parameters = (
            self._rows.temperature[rows],
            self._rows.top_p[rows],
            self._rows.top_k[rows],
            self._rows.min_p[rows],
        )
        how = RowSampling(*parameters, count < self._rows.min_new[rows], self._eos)
        return uniforms(self._rows.digest[rows], count), how

    def _drawn(self, logits: Tensor, how: tuple[npt.NDArray[np.float64], RowSampling]) -> _Drawn:
        """Tokens and log-probabilities of some rows, and the tokens they were sampled among if any row requests it."""
        candidates: list[Kept] | None = [] if self._rows.keeps.any() else None
        sampled, log_prob = on_host(*sample(logits, *how, candidates))
        return sampled, log_prob, candidates or []

    def _joined(
        self, parts: Sequence[_Drawn]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], list[tuple[int, npt.NDArray[np.int64]]]]:
        """What the parts of a step drew: tokens, log-probabilities, and the kept tokens of each row if requested."""
        sampled, log_prob, candidates = zip(*parts, strict=True)
        return (
            np.concatenate(sampled),
            np.concatenate(log_prob),
            [pair for part in candidates for pair in _kept_by_row(part)],
        )

    def _append(
        self,
        rows: npt.NDArray[np.int64],
        sampled: npt.NDArray[np.int64],
        log_prob: npt.NDArray[np.float32],
        version: int,
    ) -> list[tuple[Ticket, Any]]:
        if not np.isfinite(log_prob).all():
            raise DataError(
                f"log-probabilities of policy version {version}",
                "the model's logits are NaN or infinite",
                "look at the last update: a diverged loss, an overflow in bfloat16, or damaged weights",
            )
        self._rows.append(rows, sampled, log_prob, version)
        for i in np.flatnonzero(self._rows.streams[rows]).tolist():
            ticket = self.tickets[int(rows[i])]
            if ticket is not None:
                self._streamed.append((ticket, int(sampled[i]), float(log_prob[i])))
        return self._finished(rows, sampled)

    def _record(self, rows: npt.NDArray[np.int64], routing: AnyArray) -> None:
        """(rows, 1, layers, K): the experts of the token that each row has just been given."""
        for row in rows.tolist():
            ticket = self.tickets[row]
            if ticket is not None and ticket.routing:
                ticket.routing.append(routing[row])

    def _keep(self, rows: npt.NDArray[np.int64], candidates: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> None:
        """Records the tokens that each row was just sampled among, if requested."""
        # Not strict: without a row that asks for them there are no candidates.
        for row, (count, ids) in zip(rows.tolist(), candidates, strict=False):
            ticket = self.tickets[row] if self._rows.keeps[row] else None
            if ticket is not None:
                ticket.kept.append(ids.astype(self._id_type))
                ticket.kept_count.append(count)

    def _finished(self, rows: npt.NDArray[np.int64], sampled: npt.NDArray[np.int64]) -> list[tuple[Ticket, Any]]:
        eos, full = self._is_eos[sampled], self._rows.count[rows] >= self._rows.limit[rows]
        stopped = np.zeros(len(rows), np.bool_)
        for i in np.flatnonzero(self._rows.scanned[rows]).tolist():
            eos[i], stopped[i] = self._ends(int(rows[i]), int(sampled[i]), bool(eos[i]))
        finished = []
        for i in np.flatnonzero(eos | full | stopped).tolist():
            reason = StopReason.EOS if eos[i] else StopReason.STOP if stopped[i] else StopReason.LENGTH
            finished.append(self._finish(int(rows[i]), reason))
        return finished

    def _ends(self, row: int, token: int, eos: bool) -> tuple[bool, bool]:
        """Whether the row's last token ends its turn, and else whether it completes a stop string."""
        ticket = self.tickets[row]
        assert ticket is not None
        stop_tokens = ticket.request.sampling.stop_tokens
        if eos if stop_tokens is None else token in stop_tokens:
            return True, False
        tokens = self._rows.tokens[row, : self._rows.count[row]]
        return False, ticket.scan is not None and ticket.scan.hit(tokens.tolist())

    def _finish(self, row: int, reason: StopReason) -> tuple[Ticket, Completion]:
        ticket, count = self.tickets[row], int(self._rows.count[row])
        assert ticket is not None
        completion = Completion(
            self._rows.tokens[row, :count],
            self._rows.log_prob[row, :count],
            self._rows.version[row, :count],
            reason,
            extra=_extra(ticket, count),
        )
        if self._drafts is not None and reason is not StopReason.ABORT:
            self._drafts.keep(ticket.task, ticket.request.prompt_tokens, completion.tokens, completion.log_prob)
        self._free(row)
        return ticket, completion

    def _free(self, row: int) -> None:
        self.tickets[row] = None
        self._rows.free(row)
        self._live -= 1

    def _compact(self) -> None:
        """Moves the last rows into holes, when that makes the step smaller."""
        if bucket(self._live) >= bucket(self._span):
            return
        holes = np.flatnonzero(~self._rows.occupied[: self._live]).tolist()
        moved = (np.flatnonzero(self._rows.occupied[self._live : self._span]) + self._live).tolist()
        if moved:
            self._decoder.rows.move(moved, holes, int(self._rows.position[moved].max()))
            self._rows.move(moved, holes)
            for hole, row in zip(holes, moved, strict=True):
                self.tickets[hole], self.tickets[row] = self.tickets[row], None
        self._rows.free(slice(self._live, self._span))
        self._span = self._live


def _kept_by_row(candidates: Sequence[Kept]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    return [pair for part in candidates for pair in zip(part.counts.tolist(), part.rows(), strict=True)]


def _extra(ticket: Ticket, count: int) -> dict[str, AnyArray]:
    """The recorded extras of a completion of `count` tokens. Its last token did not go through the layers."""
    extra: dict[str, AnyArray] = {}
    if ticket.routing:
        extra["routing"] = np.concatenate([*ticket.routing, np.zeros_like(ticket.routing[-1][-1:])])
    if ticket.kept:
        extra |= {"kept": np.concatenate(ticket.kept), "kept_count": np.array(ticket.kept_count, np.int32)}
    if ticket.prompt_log_prob is not None:
        extra[SCORED] = np.concatenate([ticket.prompt_log_prob, np.zeros(count, np.float32)])
    return extra
