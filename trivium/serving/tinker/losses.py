"""The losses that a request names, as objectives of the train engine: the same functions that the algorithms use.

A loss is the sum over the tokens of its data, as the SDK's documentation defines it: weights and advantages of the
caller carry every normalisation. Legend: N tokens of a datum, K targets per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trivium.algorithms.losses.base import PolicyInputs, bounded_log_ratio, zero_outside
from trivium.algorithms.losses.clipped import ppo
from trivium.algorithms.losses.sequence import gspo
from trivium.algorithms.losses.trust import dppo_tv, dro
from trivium.algorithms.losses.weighted import cispo, importance_sampling
from trivium.foundation.errors import DataError
from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.protocols import CutAnywhere
from trivium.types import CANDIDATES, AnyArray, Batch, Experience

_TARGETS, _LOW, _HIGH, _MASK = CANDIDATES[0], "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"
_THRESHOLDS = {_LOW: 0.8, _HIGH: 1.2}
Options = Mapping[str, "float | torch.Tensor"]
Inputs = Mapping[str, AnyArray]


def _clips(options: Options) -> dict[str, float | torch.Tensor]:
    return {"clip_low": 1 - options[_LOW], "clip_high": options[_HIGH] - 1}


def _stable(x: PolicyInputs, options: Options) -> torch.Tensor:
    """The service publishes no formula (tinker-docs.thinkingmachines.ai/tinker/losses/stable-reinforce). This one has
    the properties that it names: REINFORCE that stays stable off-policy, since its gradient ends where a probability
    has moved too far from that of the sampler. `kl_coeff` pulls back towards the sampler."""
    known = (x.old_log_prob != 0) | (x.advantages != 0)  # prompts are padded with zeros
    drift = bounded_log_ratio(x.log_prob, x.old_log_prob).square() / 2
    return dppo_tv(x).loss + options["kl_coeff"] * torch.where(known, drift, 0.0)


@dataclass(frozen=True)
class Formula:
    """A loss of the service."""

    needs: tuple[str, ...]
    """The inputs of a datum beside `target_tokens`."""
    function: Callable[[PolicyInputs, Options], torch.Tensor] | None = None
    """The loss of each token; None: the weighted cross-entropy."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """The keys of `loss_fn_config`, with their defaults."""
    optional: tuple[str, ...] = ()


_POLICY = ("logprobs", "advantages")
FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": Formula((), optional=("weights",)),
    "importance_sampling": Formula(_POLICY, lambda x, _: importance_sampling(x).loss),
    "ppo": Formula(_POLICY, lambda x, o: ppo(x, **_clips(o), dual_clip=None).loss, _THRESHOLDS, (_LOW, _HIGH)),  # pyright: ignore[reportArgumentType]
    "cispo": Formula(_POLICY, lambda x, o: cispo(x, **_clips(o)).loss, _THRESHOLDS, (_LOW, _HIGH)),  # pyright: ignore[reportArgumentType]
    "dro": Formula(_POLICY, lambda x, o: dro(x, beta=o["beta"]).loss, {"beta": 0.05}),  # pyright: ignore[reportArgumentType]
    "gspo": Formula((*_POLICY, _MASK), lambda x, o: gspo(x, **_clips(o)).loss, _THRESHOLDS, (_LOW, _HIGH)),  # pyright: ignore[reportArgumentType]
    "stable_reinforce": Formula(_POLICY, _stable, {"kl_coeff": 0.0}),
}
_COLUMN = {"logprobs": "old_log_prob"}
"""Input of a datum -> name of its column."""


@dataclass(frozen=True)
class DatumLoss(CutAnywhere):
    """The sum of a loss over the tokens of all data."""

    name: str
    options: Mapping[str, float]
    needs: frozenset[str]
    """The columns of the data; `teacher_top` holds the target tokens if they are not the next tokens of the input."""
    several: bool = False
    """Whether a token may have several targets."""
    role: str = "policy"
    unit: str = "sequence"
    head: str = "lm"
    on_policy: str = "none: the caller's weights decide"

    def loss(self, inputs: LossInputs, totals: LossDenominators) -> LossOutputs:
        """This micro-batch's part of the sum, and the log-probability of each target, (B, L) or (B, L, K)."""
        mask, columns = inputs.response_mask.bool(), inputs.columns
        log_prob = inputs.log_prob if inputs.candidate_log_prob is None else inputs.candidate_log_prob
        assert log_prob is not None
        if log_prob.dim() == 3 and not self.several:
            log_prob = log_prob[..., 0]
        log_prob = zero_outside(log_prob, mask)
        function = FORMULAS[self.name].function
        if function is None:
            losses = -columns["weights"] * log_prob
        else:
            over = columns[_MASK] != 0 if _MASK in columns else mask
            x = PolicyInputs(log_prob, over, columns, torch.zeros_like(mask))
            losses = function(x, {name: columns.get(name, value) for name, value in self.options.items()})
        loss = zero_outside(losses, mask).sum() * totals.dp_size
        return LossOutputs(loss, tokens={"log_prob": log_prob.detach()})


def loss_batch(
    name: str, options: Mapping[str, float], data: Sequence[tuple[AnyArray, Inputs]]
) -> tuple[Batch, DatumLoss]:
    """The batch and the objective of data: (input tokens (N,), inputs) each, `target_tokens` among the inputs.

    Token t of a sequence is the target of input t - 1, and the last target its last token. Targets that are not the
    next tokens of the input, or several of them per token, are candidates. Without `weights`, each target counts one.
    """
    if FORMULAS[name].function is None and not any("weights" in inputs for _, inputs in data):
        data = [(tokens, {**inputs, "weights": _is_target(inputs["target_tokens"])}) for tokens, inputs in data]
    widths = [inputs["target_tokens"].shape[1] if inputs["target_tokens"].ndim == 2 else 0 for _, inputs in data]
    width = max(widths)
    is_next = width == 0 and all((inputs["target_tokens"][:-1] == tokens[1:]).all() for tokens, inputs in data)
    names = dict.fromkeys(each for _, inputs in data for each in inputs if each != "target_tokens")
    missing = [each for each in names if any(each not in inputs for _, inputs in data)]
    if missing:
        raise DataError(f"the input {missing[0]} of every datum", "some have it and some do not", "send it with all")
    experiences: list[Experience] = []
    columns: dict[str, list[AnyArray]] = {_COLUMN.get(each, each): [] for each in names}
    candidates: list[AnyArray] = []
    for number, (tokens, inputs) in enumerate(data):
        targets = inputs["target_tokens"]
        last = targets.reshape(len(tokens), -1)[-1, :1]
        whole, mask = np.concatenate([tokens, last]).astype(np.int32), np.ones(len(tokens) + 1, np.bool_)
        mask[0] = False
        zeros = np.zeros(len(whole), np.float32)
        experiences.append(Experience(whole, mask, zeros, np.zeros(len(whole), np.int32), "data", number))
        for each in names:
            columns[_COLUMN.get(each, each)].append(_shifted(inputs[each], width))
        ids = _shifted(targets, max(1, width)).reshape(len(whole), -1)
        candidates.append(np.stack([ids, np.zeros_like(ids)], -1))
    if not is_next:
        columns[_TARGETS] = candidates
    batch = Batch(tuple(experiences)).with_columns(**columns)
    return batch, DatumLoss(name, {**FORMULAS[name].options, **options}, frozenset(columns), width > 0)


def _is_target(targets: AnyArray) -> AnyArray:
    """One for each target, zero for padding. The SDK fills up several targets per token with 0, and it sends the same
    tensor with these zeros or without them, whichever is smaller."""
    several = targets.ndim == 2 and targets.shape[1] > 1
    return (targets != 0).astype(np.float32) if several else np.ones(targets.shape, np.float32)


def _shifted(values: AnyArray, width: int) -> AnyArray:
    """(1 + N,) or (1 + N, width) float32: the values after a zero, filled up with zeros."""
    values = values.astype(np.float32)
    if width and values.ndim == 1:
        values = values[:, None]
    padding = [(1, 0)] if values.ndim == 1 else [(1, 0), (0, width - values.shape[1])]
    return np.pad(values, padding)
