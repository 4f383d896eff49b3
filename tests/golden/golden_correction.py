"""Golden answers: off-policy correction and the mismatch of engine and trainer."""

from typing import Any

from golden_runners import Arguments, answers, minimised, policy_objective, section
from verl_metric_names import correction_metrics, off_policy_metrics

from trivium.algorithms import kl_penalty
from trivium.algorithms.correction import Correction
from trivium.algorithms.importance_weights import Corrected, correct
from trivium.algorithms.mismatch import mismatch
from trivium.algorithms.stats import masked_mean

# --------------------------------------------------------------------------- verl's words


def _bound(threshold: Any) -> Any:
    """`0.5_2.0` is an interval, anything else one number."""
    low, is_interval, high = str(threshold).partition("_")
    return (float(low), float(high)) if is_interval else float(low)


def _correction(kwargs: Arguments, **further: Any) -> Correction | None:
    """What a config would hold; None where the peer is told to do nothing."""
    keys: dict[str, Any] = dict(further)
    if kwargs.get("rollout_is"):
        bound = _bound(kwargs["rollout_is_threshold"])
        keys |= {"weights": kwargs["rollout_is"], "threshold": bound}
        keys |= {"outside": "mask" if isinstance(bound, tuple) else "truncate"}
        keys |= {"normalise": kwargs.get("rollout_is_batch_normalize", False)}
    if kwargs.get("rollout_rs"):
        options, bounds = kwargs["rollout_rs"].split(","), str(kwargs["rollout_rs_threshold"]).split(",")
        bounds = bounds * len(options) if len(bounds) == 1 else bounds
        keys["rejection"] = {option: _bound(bound) for option, bound in zip(options, bounds, strict=True)}
    if keys == further:
        return None
    correction = section("corrections", "custom", **keys)
    assert isinstance(correction, Correction)
    return correction


def _corrected(inputs: Arguments, correction: Correction, trainer: str = "old_log_prob") -> Corrected:
    engine = inputs["rollout_log_prob"] if trainer == "old_log_prob" else inputs["old_log_prob"]
    return correct(inputs[trainer], engine, inputs["response_mask"], correction)


def _metrics(found: dict[str, float], correction: Correction | None) -> dict[str, float]:
    """Those of a correction under the peer's names."""
    return {} if correction is None else correction_metrics(found, correction)


# --------------------------------------------------------------------------- verl


@answers("rollout_correction", "is_weights", "is_weights_empty_row", "rejection", "rejection_empty_row")
def _one_part(inputs: Arguments, kwargs: Arguments) -> Arguments:
    correction = _correction(kwargs)
    assert correction is not None
    done = _corrected(inputs, correction)
    return {"weights": done.weights, "response_mask": done.remaining, "metrics": _metrics(done.metrics, correction)}


@answers("rollout_correction", "offpolicy_metrics")
def _off_policy(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask = inputs["response_mask"].bool()
    return {"metrics": off_policy_metrics(mismatch(inputs["old_log_prob"], inputs["rollout_log_prob"], mask))}


@answers("rollout_correction", "full")
def _full(inputs: Arguments, kwargs: Arguments) -> Arguments:
    correction, mask = _correction(kwargs), inputs["response_mask"].bool()
    found = mismatch(inputs["old_log_prob"], inputs["rollout_log_prob"], mask)
    weights, kept = None, mask
    if correction is not None:
        weights, kept, statistics = _corrected(inputs, correction)
        found |= statistics
    metrics = off_policy_metrics(found) | _metrics(found, correction)
    return {
        "weights": weights,
        "response_mask": kept,
        "metrics": {f"rollout_corr/{name}": value for name, value in metrics.items()},
    }


@answers("rollout_correction", "bypass_mode")
def _bypass_mode(inputs: Arguments, kwargs: Arguments) -> Arguments:
    """The engine's log-probabilities as the old ones; the correction compares them with the current policy's."""
    correction, mask = _correction(kwargs, against="current"), inputs["response_mask"].bool()
    clipped = kwargs["loss_type"] == "ppo_clip"
    options: Arguments = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0} if clipped else {}
    kind = "ppo" if clipped else "reinforce"
    objective = policy_objective(kind, kwargs["loss_agg_mode"], terms={"correction": correction}, **options)
    columns = {"advantages": inputs["advantages"], "old_log_prob": inputs["old_log_prob"]}
    loss, found = minimised(objective, inputs["log_prob"], mask, columns)
    done = None if correction is None else _corrected(inputs, correction, "log_prob")
    kept = mask if done is None else done.remaining
    corrections = off_policy_metrics(found) | ({} if done is None else _metrics(done.metrics, correction))
    kl = masked_mean(kl_penalty(inputs["old_log_prob"], inputs["log_prob"].detach(), "k1"), kept)
    metrics = {"actor/ppo_kl": kl, **{f"rollout_corr/{name}": value for name, value in corrections.items()}}
    if clipped:
        metrics["actor/pg_clipfrac"] = found["train/clip_fraction"]
        metrics["actor/pg_clipfrac_lower"] = found["train/clip_fraction_lower"]
    return {"loss": loss, "metrics": metrics}


# --------------------------------------------------------------------------- OpenRLHF


_OUTSIDE = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "mask_sequence"}


@answers("lightrft", "openrlhf_is_correction")
def _openrlhf(inputs: Arguments, kwargs: Arguments) -> Arguments:
    outside = _OUTSIDE[kwargs["vllm_is_correction_type"]]
    bounds = tuple(kwargs["vllm_is_truncated_threshold"])
    correction = section("corrections", "custom", weights="token", threshold=bounds, outside=outside)
    assert isinstance(correction, Correction)
    old, engine, mask = inputs["old_log_probs"], inputs["rollout_log_probs"], inputs["action_mask"].bool()
    mode = "token-mean" if kwargs["token_level_loss"] else "seq-mean-token-mean"
    objective = policy_objective("ppo", mode, weighted=True, dual_clip=None)
    weights = correct(old, engine, mask, correction).weights
    assert weights is not None
    columns = {"advantages": inputs["advantages"], "old_log_prob": old, "rollout_is_weights": weights}
    loss, found = minimised(objective, inputs["log_probs"], mask, columns)
    return {
        "loss": loss,
        "clip_ratio": found["train/clip_fraction"],
        "ppo_kl": found["train/kl"],
        "rollout_kl": mismatch(old, engine, mask)["mismatch/kl_k1"],
    }


@answers("lightrft", "openrlhf_gspo_rollout_ratio")
def _openrlhf_gspo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    """The ratio against the engine: `old_log_prob: rollout`."""
    options = {"clip_low": kwargs["clip_eps_low"], "clip_high": kwargs["clip_eps_high"]}
    objective = policy_objective("gspo", "seq-mean-token-mean", **options)
    mask = inputs["action_mask"].bool()
    columns = {"advantages": inputs["advantages"], "old_log_prob": inputs["rollout_log_probs"]}
    loss, found = minimised(objective, inputs["log_probs"], mask, columns)
    kl = masked_mean(kl_penalty(inputs["old_log_probs"], inputs["log_probs"].detach(), "k1"), mask)
    return {"loss": loss, "clip_ratio": found["train/clip_fraction"], "ppo_kl": kl, "rollout_kl": None}
