"""From logits to tokens: temperature, truncation, and the inverse of the cumulative distribution.

Legend: R rows, V vocabulary. Every function processes each row separately, so the result of a row does not depend on
other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.models.placement import sent
from trivium.planning.choices import SAMPLED_TOGETHER

_BLOCK = 128
"""The cumulative sum runs over blocks of this many tokens first, then inside one block."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of R rows: numpy arrays of length R, except `eos`."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    min_p: npt.NDArray[np.float32]
    eos_blocked: npt.NDArray[np.bool_]
    """Rows that are still shorter than `min_new_tokens`."""
    eos: Tensor
    """The end-of-sequence ids, int64."""

    def __getitem__(self, part: slice) -> RowSampling:
        cut = self.top_p[part], self.top_k[part], self.min_p[part]
        return RowSampling(self.temperature[part], *cut, self.eos_blocked[part], self.eos)


@dataclass(frozen=True, slots=True)
class Kept:
    """The candidates that the tokens of R rows were sampled from, in the format of `EXTRAS`."""

    counts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int64]

    @classmethod
    def of(cls, logits: Tensor) -> Kept:
        """The tokens with finite logits [R, V]."""
        is_candidate = logits > -torch.inf
        # Of the kept and the excluded ids, the shorter list is recorded; a negative count says that it is the latter.
        number = is_candidate.sum(1, keepdim=True)
        few = 2 * number <= is_candidate.shape[1]
        ids = (is_candidate == few).nonzero()[:, 1]
        counts = torch.where(few, number, number - is_candidate.shape[1])[:, 0]
        return cls(counts.to(torch.int32).cpu().numpy(), ids.cpu().numpy())

    def rows(self) -> list[npt.NDArray[np.int64]]:
        """The ids of each row."""
        return np.split(self.ids, np.abs(self.counts).cumsum()[:-1])


def sample(
    logits: Tensor, uniforms: npt.NDArray[np.float64], how: RowSampling, candidates: list[Kept] | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens int64, log-probabilities float32), each of length R, for logits [R, V] in float32.

    The log-probability is that of the sampling distribution: softmax(logits / temperature), truncated and renormalised.
    Temperature 0 takes the most probable token with log-probability 0. A row with NaN logits gets NaN, which the caller
    must refuse. The tokens that each row was sampled among are added to `candidates`; for greedy rows, the whole
    vocabulary. Overwrites the logits, and needs memory for a few times `SAMPLED_TOGETHER` numbers.
    """
    rows = max(1, SAMPLED_TOGETHER // logits.shape[-1])
    parts = [slice(start, start + rows) for start in range(0, len(logits), rows)]
    draws = [_sample(logits[part], sent(uniforms[part], logits.device), how[part], candidates) for part in parts]
    if len(draws) == 1:
        return draws[0]
    tokens, log_probs = zip(*draws, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def on_host(tokens: Tensor, log_probs: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Copies tokens and log-probabilities to arrays, with a single copy from a GPU."""
    if not tokens.is_cuda:
        return tokens.numpy(), log_probs.numpy()
    both = torch.stack([tokens.double(), log_probs.double()]).cpu().numpy()  # float64 represents both exactly
    return both[0].astype(np.int64), both[1].astype(np.float32)


def _sample(logits: Tensor, uniforms: Tensor, how: RowSampling, candidates: list[Kept] | None) -> tuple[Tensor, Tensor]:
    device = logits.device
    if how.eos_blocked.any():
        blocked = sent(how.eos_blocked, device)[:, None]
        logits.index_copy_(1, how.eos, logits.index_select(1, how.eos).masked_fill_(blocked, -torch.inf))
    greedy = how.temperature == 0
    if greedy.all():
        if candidates is not None:
            candidates.append(Kept(np.zeros(len(logits), np.int32), np.zeros(0, np.int64)))
        return _greedy(logits)
    if (how.temperature != 1).any():
        temperature = sent(np.where(greedy, np.float32(1), how.temperature), device)
        logits.div_(temperature[:, None])
    cut = truncated(logits, how)
    if candidates is not None:
        candidates.append(Kept.of(cut))
    tokens, chosen = _draw(cut, uniforms)
    if greedy.any():
        mask = sent(greedy, device)
        best, zero = _greedy(logits)
        tokens, chosen = torch.where(mask, best, tokens), torch.where(mask, zero, chosen)
    return tokens, chosen


def _draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of softmax(logits), and their log-probabilities."""
    rows, size = logits.shape
    best = logits.amax(-1, keepdim=True)
    weights = logits.new_empty(rows, -(-size // _BLOCK) * _BLOCK)
    weights[:, size:] = 0
    torch.sub(logits, best, out=weights[:, :size]).exp_()
    tokens, total = invert(weights, uniforms)
    tokens.clamp_(max=size - 1)  # for NaN logits
    chosen = (logits.gather(1, tokens[:, None]) - best)[:, 0]
    return tokens, (chosen.double() - total.log()).float()


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, tokens = logits.max(-1)
    return tokens, torch.where(best.isfinite(), 0.0, torch.nan)


def truncated(logits: Tensor, how: RowSampling) -> Tensor:
    """The logits with -inf outside the k most probable tokens and below `min_p` of the most probable one, then outside
    the nucleus of mass `top_p` of the rest.

    Tokens as likely as the k-th are kept; the token that crosses `top_p` belongs to the nucleus (Holtzman et al. 2020).
    """
    size, top_p, top_k, min_p = logits.shape[-1], how.top_p, how.top_k, how.min_p
    rows = np.flatnonzero((top_p < 1) | ((top_k > 0) & (top_k < size)) | (min_p > 0))
    if not len(rows):
        return logits
    index, device = sent(rows, logits.device), logits.device
    part = logits[index]
    # Only a stable sort promises the order of equal logits, on which the nucleus depends.
    ordered, order = torch.sort(part, dim=-1, descending=True, stable=True)
    k = sent(np.where(top_k[rows] > 0, np.minimum(top_k[rows], size), size), device)
    least = ordered[:, :1] + sent(min_p[rows], device)[:, None].log()
    ordered = ordered.masked_fill((ordered < ordered.gather(1, k[:, None] - 1)) | (ordered < least), -torch.inf)
    probs = ordered.softmax(-1)
    p = sent(top_p[rows], device)
    outside = (_cumulative(probs) - probs >= p[:, None]) & (p < 1)[:, None]
    outside[:, 0] = False
    remaining = torch.full_like(part, -torch.inf).scatter(1, order, ordered.masked_fill(outside, -torch.inf))
    return logits.index_copy(0, index, remaining)


def invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative distribution. Returns the first token whose cumulative weight exceeds the row's uniform
    number times the sum, and the sum [R] in float64. `weights` [R, W] are zero-padded to a multiple of `_BLOCK`;
    `uniforms` [R] are float64."""
    blocks = weights.view(len(weights), -1, _BLOCK)
    mass = _cumulative(blocks.sum(-1), torch.float64)
    total = mass[:, -1]
    target = uniforms * total
    # For NaN weights no block is found.
    block = torch.searchsorted(mass, target[:, None], right=True).clamp_(max=blocks.shape[1] - 1)
    until = mass.gather(1, block)[:, 0]
    before = torch.where(block[:, 0] > 0, mass.gather(1, (block - 1).clamp_(min=0))[:, 0], 0.0)
    inside = _cumulative(blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0], torch.float64)
    # The block's mass was summed in float32, so the rest is scaled to the sum of the block: otherwise a number could
    # fall into a gap between both levels. A rest below that sum always finds a token with positive probability.
    end = inside[:, -1]
    rest = torch.minimum((target - before) * (end / (until - before)), torch.nextafter(end, torch.zeros_like(end)))
    offset = torch.searchsorted(inside, rest[:, None], right=True).clamp_(max=_BLOCK - 1)
    return (block * _BLOCK + offset)[:, 0], total


def _cumulative(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative sums along the last axis. On a GPU, torch's cumsum is not available within `deterministic_kernels`."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1, dtype=dtype)
    sums, step = x.to(dtype or x.dtype), 1
    while step < x.shape[-1]:
        sums = torch.cat([sums[..., :step], sums[..., step:] + sums[..., :-step]], -1)
        step *= 2
    return sums
