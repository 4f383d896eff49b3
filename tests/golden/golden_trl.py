"""Golden answers: the GRPO-family losses of TRL, each a policy loss with a mean of its own."""

from typing import Any

from golden_runners import Arguments, answers, minimised, policy_objective, section
from torch import Tensor

from trivium.algorithms import policy_inputs
from trivium.algorithms.losses.base import row_mean
from trivium.algorithms.metadata import KlMetadata, PolicyLossMetadata, resolve_function
from trivium.algorithms.objective import Term
from trivium.algorithms.stats import masked_mean

MEAN = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "luspo": "seq-mean-token-sum",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "vespo": "token-mean",
}
"""The peer's loss type -> our mean."""


def given(inputs: Arguments) -> Arguments:
    """The peer's inputs under our names; its advantages are one number per row."""
    mask = inputs["completion_mask"]
    columns = {"advantages": inputs["advantages"].unsqueeze(-1) * mask, "old_log_prob": inputs["old_per_token_logps"]}
    if "ref_per_token_logps" in inputs:
        columns["ref_log_prob"] = inputs["ref_per_token_logps"]
    return columns


def loss_of(inputs: Arguments, kwargs: Arguments, kind: str, **options: Any) -> tuple[Tensor, dict[str, float]]:
    gates = []
    if "off_policy_mask_threshold" in kwargs:
        gates.append({"kind": "sequence_drift", "delta": kwargs["off_policy_mask_threshold"]})
    if "top_entropy_quantile" in kwargs:
        gates.append({"kind": "top_entropy", "fraction": kwargs["top_entropy_quantile"]})
    terms = {}
    if kwargs.get("beta"):
        estimator = {"kind": "k3", "cap": None}
        if kwargs.get("use_bias_correction_kl"):
            estimator = {"kind": "corrected_k3", "bound": None}
        terms["kl"] = Term(
            kwargs["beta"], *resolve_function("kl_estimators", section("kl_estimators", **estimator), KlMetadata)
        )
    objective = policy_objective(kind, MEAN[kwargs["loss_type"]], gates=gates, terms=terms, **options)
    names = {"max_completion_length": "max_response_length", "num_items_in_batch": "tokens"}
    counts = {ours: kwargs[theirs] for theirs, ours in names.items() if theirs in kwargs}
    return minimised(
        objective,
        inputs["per_token_logps"],
        inputs["completion_mask"],
        given(inputs),
        entropy=inputs.get("entropies"),
        **counts,
    )


def per_token(inputs: Arguments, kind: str, **options: Any) -> dict[str, Tensor]:
    """What the loss logs, token by token."""
    loss, _ = resolve_function("policy_losses", section("policy_losses", kind, **options), PolicyLossMetadata)
    return loss(policy_inputs(inputs["per_token_logps"].detach(), inputs["completion_mask"], **given(inputs))).metrics


@answers("trl", "grpo", "bnpo", "dr_grpo", "dapo", "luspo")
def _clipped(inputs: Arguments, kwargs: Arguments) -> Arguments:
    sequence = kwargs.get("importance_sampling_level") == "sequence"
    kind, low = "gspo" if sequence else "ppo", kwargs["epsilon"]
    options = {"clip_low": low, "clip_high": kwargs.get("epsilon_high", low), "dual_clip": kwargs.get("delta")}
    loss, metrics = loss_of(inputs, kwargs, kind, **options)
    clipped = per_token(inputs, kind, **options)["train/clip_fraction"]
    mask, advantages = inputs["completion_mask"].bool(), given(inputs)["advantages"]
    down, up = clipped * (advantages < 0), clipped * (advantages > 0)
    rows = {name: row_mean(side, mask) for name, side in (("low", down), ("high", up))}
    mean = (
        {"low": rows["low"].mean(), "high": rows["high"].mean()}
        if sequence
        else {"low": masked_mean(down, mask), "high": masked_mean(up, mask)}
    )
    found = {
        "clip_ratio/low_mean": mean["low"],
        "clip_ratio/high_mean": mean["high"],
        "clip_ratio/region_mean": mean["low"] + mean["high"],
        "clip_ratio/low_min": rows["low"].min(),
        "clip_ratio/high_max": rows["high"].max(),
    }
    if kwargs.get("beta"):
        found["kl"] = metrics["train/ref_kl"]
    return {"loss": loss, "metrics": found}


@answers("trl", "cispo")
def _cispo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, metrics = loss_of(inputs, kwargs, "cispo", clip_low=1.0, clip_high=kwargs["epsilon_high"] - 1)
    return {"loss": loss, "metrics": {"cispo_clip_ratio": metrics["train/clip_fraction_up"]}}


@answers("trl", "sapo")
def _sapo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    tau = {"tau_pos": kwargs["sapo_temperature_pos"], "tau_neg": kwargs["sapo_temperature_neg"]}
    return {"loss": loss_of(inputs, kwargs, "sapo", **tau)[0], "metrics": {}}


@answers("trl", "vespo")
def _vespo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    options = {name: kwargs[f"vespo_{name}"] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    loss, _ = loss_of(inputs, kwargs, "vespo", **options)
    weight = row_mean(per_token(inputs, "vespo", **options)["train/score_weight"], inputs["completion_mask"].bool())
    return {"loss": loss, "metrics": {"vespo/phi_seq_mean": weight.mean()}}
