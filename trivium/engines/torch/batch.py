"""The rows that decode together: the request of each, its tokens so far, and how it is sampled.

Per-row state is in columns of numpy arrays, so the Python overhead of a step does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.engines.stopping import StopScan
from trivium.engines.torch.decoder import Decoder, Prefix
from trivium.engines.torch.image_prompts import PromptImages
from trivium.engines.torch.row_table import RowTable
from trivium.engines.torch.sampling import Kept, RowSampling, on_host, sample
from trivium.foundation.errors import DataError
from trivium.foundation.randomness import uniforms
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
    on_tokens: Any = None
    """What the caller's event loop calls with each token, if the caller asks for a stream."""

    def asks(self, what: str) -> bool:
        """Whether the request asks for this quantity to be recorded."""
        return what in self.request.sampling.extra


_Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], list[Kept]]


def bucket(rows: int) -> int:
    """The padded number of rows of a step: few distinct shapes, since each new shape compiles a kernel."""
    step = 2 if rows <= 4 else 4 if rows <= 16 else 8 if rows <= 64 else 32 if rows <= 256 else 64
    return -(-rows // step) * step


class Batch:
    """Up to `max_rows` completions in progress. Rows of finished ones are free until a request takes them."""

    def __init__(
        self, decoder: Decoder, max_rows: int, eos: frozenset[int], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._decoder, self._decode = decoder, decode
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
        """Samples one more token for every row. Returns (ticket, completion) of finished ones."""
        self._compact()
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

    def _sampling(self, rows: npt.NDArray[np.int64] | slice) -> tuple[npt.NDArray[np.float64], RowSampling]:
        """The random number of each row's next token, and how it is sampled."""
        count = self._rows.count[rows]
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
