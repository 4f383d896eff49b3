"""verl's policy losses by `loss_mode`: the equivalent losses, as functions with verl's arguments and results.

Legend: B sequences, R tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivium.algorithms import PolicyObjective, kl_penalty
from trivium.algorithms.metadata import PolicyLossMetadata, bind_options, metadata_of
from trivium.algorithms.policy_losses.base import policy_inputs
from trivium.algorithms.stats import masked_mean
from trivium.config import plugin
from trivium.frontdoors.plain_values import read
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.models.late import torch
from trivium.registry import resolve

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Loss:
    """The loss of `trivium.algorithms` that a `loss_mode` of verl names."""

    kind: str
    """The name of the loss in `trivium.algorithms`."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Option -> the keys of the actor's config with its value, the first one that is set."""
    aggregate: str = ""
    """The aggregation, if `loss_agg_mode` does not determine it."""
    default: str = "token-mean"
    """The default of `loss_agg_mode`."""
    metrics: Mapping[str, str] = field(
        default_factory=lambda: {
            "actor/pg_clipfrac": "train/clip_fraction",
            "actor/ppo_kl": "train/kl",
            "actor/pg_clipfrac_lower": "train/clip_fraction_lower",
        }
    )
    """verl's name of a metric -> its name here. A metric that the loss does not have is 0."""

    @property
    def clips_ratio(self) -> bool:
        """Whether `clip_low` bounds a ratio, which is above 0, so that bounds of 1 and more are equal."""
        return "clip_low" in self.options and self.kind != "gmpo"


_CLIP = {"clip_low": ("clip_ratio_low", "clip_ratio"), "clip_high": ("clip_ratio_high", "clip_ratio")}
_LEFT_OUT = {
    "actor/pg_clipfrac": "train/left_out",
    "actor/ppo_kl": "train/kl",
    "actor/pg_clipfrac_lower": "train/clip_fraction",
}
"""The metrics of losses that leave tokens out instead of clipping their ratios."""
POLICY_LOSSES: Mapping[str, _Loss] = {
    "vanilla": _Loss("ppo", {**_CLIP, "dual_clip": ("clip_ratio_c",)}),
    "gspo": _Loss("gspo", _CLIP, default="seq-mean-token-mean"),
    "sapo": _Loss("sapo", {"tau_pos": ("tau_pos",), "tau_neg": ("tau_neg",)}, "seq-mean-token-mean"),
    "gpg": _Loss("reinforce", metrics={}),
    "clip_cov": _Loss(
        "clip_cov",
        {
            **_CLIP,
            "ratio": ("policy_loss.clip_cov_ratio",),
            "cov_low": ("policy_loss.clip_cov_lb",),
            "cov_high": ("policy_loss.clip_cov_ub",),
        },
        metrics={"actor/pg_clipfrac": "train/left_out", "actor/ppo_kl": "train/kl"},
    ),
    "kl_cov": _Loss(
        "kl_cov",
        {"ratio": ("policy_loss.kl_cov_ratio",), "coef": ("policy_loss.ppo_kl_coef",)},
        metrics={"actor/ppo_kl": "train/log_ratio_abs"},
    ),
    "geo_mean": _Loss(
        "gmpo",
        _CLIP,
        "seq-mean-token-mean",
        metrics={
            "actor/pg_clipfrac": "train/clip_fraction_up",
            "actor/ppo_kl": "train/kl",
            "actor/pg_clipfrac_lower": "train/clip_fraction_down",
        },
    ),
    "cispo": _Loss("cispo", _CLIP),
    "dppo_tv": _Loss(
        "dppo_tv",
        {"tv_low": _CLIP["clip_low"], "tv_high": _CLIP["clip_high"], "max_ratio": ("clip_ratio_c",)},
        metrics=_LEFT_OUT,
    ),
    "dppo_kl": _Loss(
        "dppo_kl",
        {"kl_low": _CLIP["clip_low"], "kl_high": _CLIP["clip_high"], "max_ratio": ("clip_ratio_c",)},
        metrics=_LEFT_OUT,
    ),
    "dro": _Loss("dro", {"beta": ("policy_loss.dro_beta", "dro_beta")}, metrics={"actor/ppo_kl": "train/kl"}),
}
"""Each `loss_mode` of verl."""
LOSSES: Mapping[str, _Loss] = {known.kind: known for known in POLICY_LOSSES.values()}
"""The same by the names of `trivium.algorithms`."""


def kind_of(mode: str) -> str:
    """Returns the name of a `loss_mode` in `trivium.algorithms`; another name stays as it is."""
    return POLICY_LOSSES[mode].kind if mode in POLICY_LOSSES else mode


def policy_loss_function(mode: str) -> Callable[..., Any]:
    """Returns the function of a `loss_mode`."""
    known = POLICY_LOSSES[mode]
    function = resolve("policy_losses", known.kind)
    metadata = metadata_of(function, PolicyLossMetadata, known.kind)

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = known.default,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        options = {name: first_value(config, keys) for name, keys in known.options.items()}
        options = {name: value for name, value in options.items() if value is not None}
        if known.clips_ratio and "clip_low" in options:
            options["clip_low"] = min(1.0, options["clip_low"])
        section = plugin("policy_losses")({"kind": known.kind, **options})
        objective = PolicyObjective(
            bind_options(function, section), metadata, aggregate=known.aggregate or loss_agg_mode
        )
        columns = {"advantages": advantages, "old_log_prob": old_log_prob, "rollout_log_prob": old_log_prob}
        if metadata.select is not None:  # verl's random choices come from torch's generator as well
            x = policy_inputs(log_prob.detach(), response_mask, **columns, uniform=torch.rand_like(log_prob.detach()))
            columns["selected"] = bind_options(metadata.select, section)(x).to(log_prob.dtype)
        if rollout_is_weights is not None:
            columns["rollout_is_weights"] = rollout_is_weights
        info: Mapping[str, Any] = read(config, "global_batch_info", {})
        if known.kind == "gmpo":  # verl averages over all rows, whatever the global counts
            info = {"global_batch_size": len(response_mask)}
        loss, metrics = _minimised(objective, log_prob, response_mask, columns, info, known.metrics)
        if known.kind == "dro":  # verl clamps the log-ratio in all other losses
            metrics["actor/ppo_kl"] = sampled_kl(old_log_prob, log_prob, response_mask)
        return loss, metrics

    name = f"compute_policy_loss_{mode}"
    compute.__name__ = compute.__qualname__ = name
    compute.__doc__ = (
        f"Returns (loss, metrics) of the policy loss `{known.kind}` of `trivium.algorithms`, averaged by "
        f"{known.aggregate or '`loss_agg_mode`'}."
    )
    return compute


def _minimised(
    objective: PolicyObjective,
    log_prob: Tensor,
    response_mask: Tensor,
    columns: Mapping[str, Tensor],
    info: Mapping[str, Any],
    metrics: Mapping[str, str],
) -> tuple[Tensor, dict[str, Any]]:
    """Returns (loss, metrics) of an objective. `info` holds the counts of the whole step, as in `agg_loss`."""
    mask = response_mask.bool()
    tokens, sequences = int(mask.sum()), int(mask.any(-1).sum())
    counts = LossDenominators(
        int(info.get("batch_num_tokens") or tokens),
        int(info.get("global_batch_size") or sequences),
        int(info.get("loss_scale_factor") or mask.shape[-1]),
        dp_size=int(info.get("dp_size") or 1),
    )
    done = objective.loss(LossInputs(mask, torch.zeros_like(log_prob), dict(columns), log_prob), counts)
    means = {key: float(value) / max(tokens, 1) for key, value in done.sums.items()}
    return done.loss, {theirs: means.get(ours, 0.0) for theirs, ours in metrics.items()}


def first_value(config: Any, keys: Sequence[str]) -> Any:
    """Returns the first of these dotted keys that has a value."""
    for key in keys:
        value = config
        for part in key.split("."):
            value = None if value is None else read(value, part)
        if value is not None:
            return value
    return None


def sampled_kl(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> float:
    """KL(old, current) from samples of the old policy."""
    return float(masked_mean(kl_penalty(old_log_prob, log_prob.detach(), "k1"), mask))
