"""verl's `rollout_corr_helper`: importance weights, rejection and metrics for tokens that another policy sampled.

Every function converts its arguments and calls `trivium.algorithms.importance_weights` or `.mismatch`. Tensors are
(B, R); a metric is a float. The log-ratio of a token is log(trainer / rollout engine).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from trivium.algorithms.correction import Correction
from trivium.algorithms.importance_weights import correct
from trivium.algorithms.mismatch import mismatch
from trivium.config import plugin
from trivium.errors import ConfigError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trivium.frontdoors.verl.objects.batches.protocol import DataProto

_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Rejection in verl 0.6 and 0.7, by the bounds of a ratio -> its name since."""
_SPREAD = {
    "mean": "mean",
    "std": "std",
    "max": "max",
    "min": "min",
    "seq_mean": "sequence_mean",
    "seq_std": "sequence_std",
    "seq_max": "sequence_max",
    "seq_min": "sequence_min",
    "seq_max_deviation": "sequence_deviation",
    "seq_fraction_high": "sequence_above",
    "seq_fraction_low": "sequence_below",
}
OFF_POLICY = {
    "training_ppl": "perplexity",
    "training_log_ppl": "log_perplexity",
    "rollout_ppl": "perplexity_engine",
    "rollout_log_ppl": "log_perplexity_engine",
    "kl": "kl_k1",
    "k3_kl": "kl",
    "log_ppl_diff": "log_perplexity_gap",
    "log_ppl_abs_diff": "log_perplexity_gap_abs",
    "log_ppl_diff_max": "log_perplexity_gap_above",
    "ppl_ratio": "perplexity_ratio",
    "chi2_token": "chi2",
    "chi2_seq": "sequence_chi2",
}
"""verl's name of a metric -> its name below `mismatch/`."""
WEIGHTS = {
    **_SPREAD,
    "ratio_fraction_high": "above",
    "ratio_fraction_low": "below",
    "eff_sample_size": "ess",
}
"""verl's name below `rollout_is_` -> its name below `mismatch/weight/`."""
REJECTION = {
    **_SPREAD,
    "fraction_high": "above",
    "fraction_low": "below",
    "masked_fraction": "tokens",
    "seq_masked_fraction": "sequences",
}
"""verl's name below `rollout_rs_<option>_` -> its name below `mismatch/rejection/<option>/`."""


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """Returns (a DataProto with `rollout_is_weights`, or None without `rollout_is`; the mask of the kept tokens;
    metrics with the prefix `rollout_corr/`).

    `rollout_rs` lists options such as `token_k1,seq_mean_k3`, and `rollout_rs_threshold` their bounds (`0.5_2.0` is an
    interval). The names of verl 0.6 and 0.7 (`token`, `sequence`, `geometric`, with `rollout_rs_threshold_lower`) are
    accepted. `rollout_token_veto_threshold` rejects the sequences with a token of a lower ratio. Raises DataError for
    tensors of different shapes and for an empty mask.
    """
    from trivium.frontdoors.verl.objects.batches.protocol import DataProto, RowsError  # imports torch

    mask = _checked(old_log_prob, rollout_log_prob, response_mask)
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    options: dict[str, Any] = {}
    if rollout_is and rollout_is_threshold is not None:
        options = {"weights": rollout_is, **weight_bounds(rollout_is_threshold)}
        options["normalise"] = rollout_is_batch_normalize
    if rollout_rs:
        options["rejection"] = rejection(rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower)
    weights, kept = None, response_mask
    if options:
        correction = _custom(**options)
        done = correct(old_log_prob, rollout_log_prob, mask, correction)
        metrics |= correction_metrics(done.metrics, correction)
        kept = done.kept.to(response_mask.dtype)
        weights = None if done.weights is None else DataProto.from_dict({"rollout_is_weights": done.weights})
    metrics["rollout_is_veto_fraction"] = 0.0
    if rollout_token_veto_threshold is not None:
        if not 0 < rollout_token_veto_threshold < 1:
            asked = "rollout_token_veto_threshold between 0 and 1"
            raise RowsError(asked, str(rollout_token_veto_threshold), "use 1e-4, for example")
        vetoed = correct(old_log_prob, rollout_log_prob, mask, _custom(rejection=veto(rollout_token_veto_threshold)))
        kept = kept * vetoed.kept.to(kept.dtype)
        metrics["rollout_is_veto_fraction"] = vetoed.metrics["mismatch/rejection/seq_max_k1/sequences"]
    return weights, kept, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
    rollout_rs_threshold_lower: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Returns (the mask of the kept tokens, metrics without a prefix) for log-ratios (B, R)."""
    _, kept, metrics = compute_rollout_correction_and_rejection_mask(
        log_ratio,
        torch.zeros_like(log_ratio),
        response_mask,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_rs_threshold_lower=rollout_rs_threshold_lower,
    )
    return kept, _without_prefix(metrics, "rollout_rs_")


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Returns (importance weights (B, R), metrics without a prefix) for log-ratios (B, R)."""
    weights, _, metrics = compute_rollout_correction_and_rejection_mask(
        log_ratio,
        torch.zeros_like(log_ratio),
        response_mask,
        rollout_is,
        rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
    )
    assert weights is not None, "rollout_is is set"
    return weights.batch["rollout_is_weights"], _without_prefix(metrics, "rollout_is_")


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Returns metrics of the distance of trainer and engine. Without `rollout_log_prob`: the trainer's perplexity."""
    engine = old_log_prob if rollout_log_prob is None else rollout_log_prob
    mask = _checked(old_log_prob, engine, response_mask)
    measured = mismatch(old_log_prob.detach(), engine.detach(), mask)
    metrics = off_policy_metrics(measured)
    if rollout_log_prob is None:
        return {name: metrics[name] for name in ("training_ppl", "training_log_ppl")}
    return metrics


def off_policy_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of `trivium.algorithms.mismatch` under verl's names."""
    metrics = {theirs: measured[f"mismatch/{ours}"] for theirs, ours in OFF_POLICY.items()}
    return metrics | {"log_ppl_diff_min": -measured["mismatch/log_perplexity_gap_below"]}


def correction_metrics(measured: Mapping[str, float], correction: Correction) -> dict[str, float]:
    """Returns the metrics of a correction's weights and rejection under verl's names."""
    metrics = _weight_metrics(measured, correction) if correction.weights != "none" else {}
    return metrics | (_rejection_metrics(measured, correction) if correction.rejection else {})


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Returns the metrics of `compute_offpolicy_metrics` with the prefix `rollout_corr/`."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


# --------------------------------------------------------------------------- bounds and names


def weight_bounds(threshold: object) -> dict[str, Any]:
    """Returns the options of a threshold: `0.5_5.0` zeroes weights outside, one number truncates them from above."""
    low, is_interval, high = str(threshold).partition("_")
    return {"threshold": [low, high], "outside": "mask"} if is_interval else {"threshold": threshold}


def veto(threshold: float) -> dict[str, float | tuple[float, float]]:
    """Returns the rejection of sequences with a token whose ratio is below the threshold."""
    return {"seq_max_k1": (1e-9, 1 / threshold)}  # as engine / trainer; the first bound is below any clamped ratio


def _custom(**options: Any) -> Correction:
    return cast(Correction, plugin("corrections")({"kind": "custom", **options}))


def rejection(options: str, thresholds: object, lower: float | None = None) -> dict[str, float | tuple[float, float]]:
    """Returns {option: bound or (low, high)} of verl's comma lists. Raises ConfigError unless there is one bound for
    all options, or one for each."""
    names = [_LEVELS.get(option.strip(), option.strip()) for option in options.split(",")]
    bounds = [bound.strip() for bound in str("" if thresholds is None else thresholds).split(",") if bound.strip()]
    try:
        numbers = [tuple(float(part) for part in bound.split("_")) for bound in bounds]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= len(names)
    if len(numbers) != len(names):
        raise ConfigError(
            f"rollout_rs_threshold {thresholds!r}",
            f"rollout_rs has {len(names)} option(s)",
            "give one number, or low_high, for each (or one for all)",
        )
    if lower is not None:  # bounds of trainer / engine; those of k1 are of its inverse
        numbers = [(1 / pair[-1], 1 / lower) for pair in numbers]
    return {name: (pair[0], pair[1]) if len(pair) == 2 else pair[0] for name, pair in zip(names, numbers, strict=True)}


def _checked(trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    """Returns the mask as bool. Raises RowsError for different shapes and for an empty mask."""
    from trivium.frontdoors.verl.objects.batches.protocol import RowsError

    if not trainer.shape == engine.shape == mask.shape:
        found = f"{tuple(trainer.shape)}, {tuple(engine.shape)} and a mask {tuple(mask.shape)}"
        raise RowsError("two log-probabilities and a mask of one shape", found, "cut them to the responses")
    if not mask.any():
        raise RowsError("a response_mask with at least one token", "it is empty", "leave such batches out")
    return mask.bool()


def _weight_metrics(measured: Mapping[str, float], correction: Correction) -> dict[str, float]:
    metrics = {f"rollout_is_{theirs}": measured[f"mismatch/weight/{ours}"] for theirs, ours in WEIGHTS.items()}
    if correction.weights == "sequence":  # verl's extremes are then those of the ratios
        metrics["rollout_is_max"] = measured["mismatch/weight/ratio_max"]
        metrics["rollout_is_min"] = measured["mismatch/weight/ratio_min"]
    if correction.outside == "mask":
        metrics["rollout_is_oob_ratio"] = measured["mismatch/weight/outside"]
    if correction.normalise:
        mean = "mean" if correction.weights == "token" else "sequence_mean"
        metrics["rollout_is_batch_norm_factor"] = measured[f"mismatch/weight/{mean}"]
    return metrics


def _rejection_metrics(measured: Mapping[str, float], correction: Correction) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for option in correction.rejection:
        for theirs, ours in REJECTION.items():
            if option.endswith("k1") or theirs != "seq_fraction_low":  # the other statistics have no lower bound
                metrics[f"rollout_rs_{option}_{theirs}"] = measured[f"mismatch/rejection/{option}/{ours}"]
    return metrics | {
        "rollout_rs_masked_fraction": measured["mismatch/rejected_tokens"],
        "rollout_rs_seq_masked_fraction": measured["mismatch/rejected_sequences"],
    }


def _without_prefix(metrics: Mapping[str, float], kind: str) -> dict[str, float]:
    names = {name: name.removeprefix("rollout_corr/") for name in metrics}
    return {short: metrics[name] for name, short in names.items() if short.startswith(kind)}
