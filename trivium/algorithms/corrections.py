"""Off-policy corrections by name, and a correction laid over a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trivium.algorithms.correction import Correction, correct
from trivium.algorithms.groups import padded, ragged
from trivium.algorithms.inputs import expert_rows
from trivium.algorithms.mismatch import mismatch
from trivium.config import merged
from trivium.types import AnyArray, Batch, Metrics


@dataclass(frozen=True)
class NamedCorrection:
    """A correction that a config can name; keys that the user adds are laid over what it says."""

    says: Mapping[str, Any]
    """A partial section."""
    source: str
    """Where it comes from."""

    def configure(self, data: Mapping[str, Any]) -> Correction:
        """The section that follows from what the user said; raises pydantic's ValidationError."""
        return Correction.model_validate(merged(self.says, data))


_TOKEN = {"weights": "token", "threshold": 2.0}
_SEQUENCE = {"weights": "sequence", "threshold": 2.0}
_GEOMETRIC = {"rejection": {"seq_mean_k1": [0.999, 1.001]}}
_K3 = {"rejection": {"seq_mean_k3": 0.01}}
_CURRENT = {"against": "current"}

_AREAL = "decoupled PPO, Hilton et al. 2021; AReaL, Fu et al. 2025"
_TIS = "truncated importance sampling between an engine and its trainer, Yao et al. 2025"
_COLLAPSE = "Liu et al. 2025, When Speed Kills Stability"
_PRODUCT = f"the product of the ratios of a sequence, {_COLLAPSE}"
_GEO = f"rejection by the geometric mean of the ratios of a sequence, {_COLLAPSE}"
_ESTIMATE = "rejection by an estimate of the KL, Schulman 2020"

AUTO = NamedCorrection({}, "none for fresh groups, token weights where groups may be stale")
NONE = NamedCorrection({}, "nothing is corrected")
CUSTOM = NamedCorrection({}, "what its keys say")

DECOUPLED_TOKEN_IS = NamedCorrection(_TOKEN, _AREAL)
DECOUPLED_SEQ_IS = NamedCorrection(_SEQUENCE, _PRODUCT)
DECOUPLED_SEQ_IS_RS = NamedCorrection({**_SEQUENCE, "rejection": {"seq_sum_k1": [0.5, 2.0]}}, _PRODUCT)
DECOUPLED_GEO_RS = NamedCorrection(_GEOMETRIC, _GEO)
DECOUPLED_GEO_RS_SEQ_TIS = NamedCorrection({**_SEQUENCE, **_GEOMETRIC}, _GEO)
DECOUPLED_GEO_RS_TOKEN_TIS = NamedCorrection({**_TOKEN, **_GEOMETRIC}, _GEO)
DECOUPLED_K3_RS = NamedCorrection(_K3, _ESTIMATE)
DECOUPLED_K3_RS_SEQ_TIS = NamedCorrection({**_SEQUENCE, **_K3}, _ESTIMATE)
DECOUPLED_K3_RS_TOKEN_TIS = NamedCorrection({**_TOKEN, **_K3}, _ESTIMATE)

# The ratio of the loss, or the weights where it has none, are taken against the engine itself.
BYPASS_TOKEN_IS = NamedCorrection({**_TOKEN, **_CURRENT}, _TIS)
BYPASS_SEQ_IS = NamedCorrection({**_SEQUENCE, **_CURRENT}, _PRODUCT)
BYPASS_GEO_RS = NamedCorrection({**_GEOMETRIC, **_CURRENT}, _GEO)
BYPASS_GEO_RS_SEQ_TIS = NamedCorrection({**_SEQUENCE, **_GEOMETRIC, **_CURRENT}, _GEO)
BYPASS_GEO_RS_TOKEN_TIS = NamedCorrection({**_TOKEN, **_GEOMETRIC, **_CURRENT}, _GEO)
BYPASS_K3_RS = NamedCorrection({**_K3, **_CURRENT}, _ESTIMATE)


def corrected(batch: Batch, trainer: Tensor, correction: Correction) -> tuple[Batch, list[AnyArray]]:
    """(the batch with the column `rollout_is_weights` where there are weights, the masks of what is kept).

    `trainer` (B, L) holds the trainer's log-probabilities. What was measured is added to the batch's metrics. An
    expert's tokens have no engine to be compared with: they weigh 1 and are kept.
    """
    mask, engine, sampled = _grids(batch)
    done = correct(trainer, engine, sampled, correction)
    if done.weights is not None:
        weights = torch.where(sampled, done.weights, mask.to(done.weights.dtype))
        batch = batch.with_columns(rollout_is_weights=ragged(weights, batch))
    kept = ragged(done.kept | (mask & ~sampled), batch)
    return replace(batch, metrics={**batch.metrics, **done.metrics}), kept


def measured(batch: Batch, trainer: Tensor) -> Metrics:
    """How far apart engine and trainer are on what the policy sampled; `trainer` (B, L) as in `corrected`."""
    _, engine, sampled = _grids(batch)
    return mismatch(trainer, engine, sampled)


def _grids(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(response mask, the engine's log-probabilities, trained tokens that the policy sampled), (B, L) each."""
    mask = padded([e.response_mask for e in batch.experiences]).bool()
    engine = padded([e.rollout_log_prob for e in batch.experiences])
    return mask, engine, mask & ~expert_rows(padded([e.policy_version for e in batch.experiences]), mask)
