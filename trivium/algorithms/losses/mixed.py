"""Losses over two kinds of rows: completions that the policy sampled, and completions that an expert wrote.

Legend: B sequences, L tokens. The objective averages each kind over its own count (`split`).
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.algorithms.losses.clipped import ClipHigh, ClipLow, DualClip, ppo
from trivium.algorithms.losses.supervised import sft, sft_phi
from trivium.algorithms.metadata import policy_loss
from trivium.models.late import torch

_PPO = "max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)){dual_clip:, at most -A dual_clip where A < 0}"
_CHORD = "CHORD, Zhang et al. 2025, On-policy RL meets off-policy experts"

Share = Annotated[float, Field(ge=0, le=1, description="share of the expert's loss")]


@policy_loss(
    formula=f"(1 - mu) ({_PPO}) on sampled tokens, -mu log_prob on an expert's",
    source=f"{_CHORD}, eq. 5, with a constant mu",
    needs={"advantages", "old_log_prob"},
    on_policy="factor: 1 - mu",
    split=True,
)
def mix(
    x: PolicyInputs, *, mu: Share = 0.1, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, dual_clip: DualClip = 3.0
) -> PerToken:
    """The clipped surrogate on what the policy sampled, cross-entropy on what an expert wrote."""
    return _mixed(x, mu, ppo(x, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip), sft(x))


@policy_loss(
    formula=f"(1 - mu) ({_PPO}) on sampled tokens, -mu {{phi:p (1 - p) }}log_prob on an expert's; mu rises from 0 to "
    "mu_peak over mu_warmup_steps steps, then falls to mu_valley over mu_decay_steps (cosine)",
    source=f"{_CHORD}, eq. 5 to 8",
    needs={"advantages", "old_log_prob"},
    on_policy="factor: 1 - mu_valley",  # after the schedule, which has no steps by default
    split=True,
)
def mix_chord(
    x: PolicyInputs,
    *,
    mu_peak: Annotated[float, Field(ge=0, le=1, description="share of the expert's loss after the warm-up")] = 0.1,
    mu_valley: Annotated[float, Field(ge=0, le=1, description="share of the expert's loss in the end")] = 0.1,
    mu_warmup_steps: Annotated[int, Field(ge=0, description="train steps from 0 to mu_peak")] = 0,
    mu_decay_steps: Annotated[int, Field(ge=0, description="train steps from mu_peak to mu_valley")] = 0,
    phi: Annotated[
        bool, Field(description="whether expert tokens whose probability is near 0 or 1 get a small weight")
    ] = True,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip = 3.0,
) -> PerToken:
    """As `mix`, but the expert's share follows a schedule: imitate first, explore later."""
    mu = mu_schedule(x.step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    reinforcement = ppo(x, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return _mixed(x, mu, reinforcement, sft_phi(x) if phi else sft(x))


def mu_schedule(step: int, warmup_steps: int, decay_steps: int, peak: float, valley: float) -> float:
    """The expert's share at a train step: a linear rise to `peak`, half a cosine down to `valley`, then constant."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= warmup_steps + decay_steps:
        return valley
    return valley + (peak - valley) / 2 * (1 + math.cos(math.pi * (step - warmup_steps) / decay_steps))


def _mixed(x: PolicyInputs, mu: float, reinforcement: PerToken, imitation: PerToken) -> PerToken:
    """The weighted loss of each token: `imitation` on an expert's tokens, `reinforcement` on sampled ones. The
    metrics of `reinforcement` are 0 on an expert's tokens."""
    metrics = {key: torch.where(x.expert, 0.0, values) for key, values in reinforcement.metrics.items()}
    metrics["train/expert_fraction"] = x.expert.to(reinforcement.loss.dtype)
    metrics["train/expert_share"] = torch.full_like(reinforcement.loss, mu)
    return PerToken(torch.where(x.expert, mu * imitation.loss, (1 - mu) * reinforcement.loss), metrics)
