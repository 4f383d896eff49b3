"""verl's names of the metrics of a rollout correction, which its golden answers have."""

from __future__ import annotations

from collections.abc import Mapping

from trivium.algorithms.correction import Correction

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


def off_policy_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of `trivium.algorithms.mismatch` under verl's names."""
    metrics = {theirs: measured[f"mismatch/{ours}"] for theirs, ours in OFF_POLICY.items()}
    return metrics | {"log_ppl_diff_min": -measured["mismatch/log_perplexity_gap_below"]}


def correction_metrics(measured: Mapping[str, float], correction: Correction) -> dict[str, float]:
    """Returns the metrics of a correction's weights and rejection under verl's names."""
    metrics = _weight_metrics(measured, correction) if correction.weights != "none" else {}
    return metrics | (_rejection_metrics(measured, correction) if correction.rejection else {})


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
