"""Golden answers: losses, KL and entropy of Trinity-RFT, and the token gates and KL of LightRFT and OpenRLHF."""

from typing import Any

import torch
from algebra import shut
from golden_runners import Arguments, answers, minimised, policy_objective, section
from torch import Tensor

from trivium.algorithms import PolicyInputs, policy_inputs
from trivium.algorithms.losses.base import row_mean
from trivium.algorithms.losses.mixed import mu_schedule
from trivium.algorithms.metadata import EntropyMetadata, KlMetadata, resolve_function
from trivium.algorithms.objective import PolicyObjective, Term
from trivium.algorithms.stats import masked_mean

CLIPPED = {"pg_clipfrac": "train/clip_fraction", "pg_clipfrac_lower": "train/clip_fraction_lower", "ppo_kl": "train/kl"}


def columns_of(inputs: Arguments) -> Arguments:
    """The peer's inputs under our names."""
    names = {"old_logprob": "old_log_prob", "ref_logprob": "ref_log_prob", "advantages": "advantages"}
    return {ours: inputs[theirs] for theirs, ours in names.items() if theirs in inputs}


def judged(inputs: Arguments) -> PolicyInputs:
    """What a loss reads, without gradient."""
    return policy_inputs(inputs["logprob"].detach(), inputs["action_mask"], **columns_of(inputs))


def loss_of(
    inputs: Arguments,
    kind: str,
    kwargs: Arguments,
    *,
    gates: tuple[dict, ...] = (),
    counts: Arguments | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    objective = policy_objective(kind, kwargs.get("loss_agg_mode", "token-mean"), gates=gates, **options)
    return minimised(objective, inputs["logprob"], inputs["action_mask"], columns_of(inputs), **(counts or {}))


def band(kwargs: Arguments, low: float = 0.2, high: float = 0.2) -> dict[str, float]:
    """The clip range, said in one number or in two."""
    both = kwargs.get("clip_range")
    return {
        "clip_low": kwargs.get("clip_range_low", low if both is None else both),
        "clip_high": kwargs.get("clip_range_high", high if both is None else both),
    }


# --------------------------------------------------------------------------- the policy's own replies


@answers("trinity", "opmd")
def _opmd(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, _ = loss_of(inputs, "opmd", kwargs, tau=kwargs["tau"])
    return {"loss": loss, "metrics": {"opmd_loss": loss}}


@answers("trinity", "topr")
def _topr(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, metrics = loss_of(inputs, "topr", kwargs, level="token", threshold=kwargs["advantage_threshold"])
    ratio = masked_mean(judged(inputs).log_ratio.exp(), inputs["action_mask"])
    return {
        "loss": loss,
        "metrics": {"topr_loss": loss, "avg_alpha": metrics["train/score_weight"], "avg_ratio": ratio},
    }


@answers("trinity", "cispo")
def _cispo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    options = band(kwargs, 1.0, 0.28)
    if kwargs.get("enable_mask_clip"):
        options |= {
            side: kwargs[f"mask_clip_range_{side.rpartition('_')[2]}"] for side in ("mask_clip_low", "mask_clip_high")
        }
    loss, metrics = loss_of(inputs, "cispo", kwargs, **options)
    kept = 1 - metrics["train/left_out"]
    return {"loss": loss, "metrics": {"cispo_loss": loss, "ppo_kl": metrics["train/kl"], "unmasked_frac": kept}}


@answers("trinity", "gspo")
def _gspo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, metrics = loss_of(inputs, "gspo", kwargs, **band(kwargs))
    x = judged(inputs)
    return {
        "loss": loss,
        "metrics": {
            "pg_loss": loss,
            "pg_clipfrac": metrics["train/clip_fraction"],
            "ppo_kl": metrics["train/kl"],
            "ppo_kl_seq": row_mean(-x.log_ratio, x.response_mask).mean(),
        },
    }


@answers("trinity", "ppo_sequence_masking")
def _ppo_sequence_masking(inputs: Arguments, kwargs: Arguments) -> Arguments:
    gate = {"kind": "sequence_drift", "delta": kwargs["delta_sequence_masking"]}
    loss, metrics = loss_of(inputs, "ppo", kwargs, gates=(gate,), **band(kwargs))
    x = judged(inputs)
    drift = row_mean(-x.log_ratio, x.response_mask).mean()
    named = {theirs: metrics[ours] for theirs, ours in CLIPPED.items()}
    return {"loss": loss, "metrics": {**named, "pg_loss": loss, "seq_mask/mean_sequence_kl": drift}}


@answers("trinity", "ppo_policy_gradient_fallback")
def _ppo_fallback(inputs: Arguments, kwargs: Arguments) -> Arguments:
    current = {**inputs, "old_logprob": inputs["logprob"].detach()}  # as `old_log_prob: recompute` before one update
    loss, metrics = loss_of(current, "ppo", kwargs, **band(kwargs))
    return {"loss": loss, "metrics": {**{theirs: metrics[ours] for theirs, ours in CLIPPED.items()}, "pg_loss": loss}}


@answers("trinity", "sppo")
def _sppo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, metrics = loss_of(inputs, "sppo", kwargs, epsilon=kwargs["epsilon"])
    return {"loss": loss, "metrics": {"pg_clipfrac": metrics["train/clip_fraction"], "pg_loss": loss}}


@answers("trinity", "importance_sampling")
def _importance_sampling(inputs: Arguments, kwargs: Arguments) -> Arguments:
    counts = {"sequences": 1} if kwargs["loss_agg_mode"] == "seq-mean-token-sum-norm" else {}  # the peer's is a sum
    loss, metrics = loss_of(inputs, "importance_sampling", kwargs, counts=counts)
    return {
        "loss": loss,
        "metrics": {"pg_loss": loss, "ratio/mean": metrics["train/ratio"], "approx_kl": metrics["train/kl"]},
    }


@answers("trinity", "rec")
def _rec(inputs: Arguments, kwargs: Arguments) -> Arguments:
    """The peer's one function is three of ours, and its sequence modes are an option."""
    sequence = kwargs["clip_mode"] == "gspo-one-side"
    clip = {"gspo-one-side": "one_side"}.get(kwargs["clip_mode"], kwargs["clip_mode"].replace("-", "_"))
    edges = {"clip_low": kwargs.get("epsilon_low", 0.2), "clip_high": kwargs.get("epsilon_high", 0.2)}
    if kwargs["weight"] == "advantage":
        assert clip == "none"
        kind, options = "red_weight", {"temperature": kwargs.get("temp", 1.0)}
    elif kwargs.get("regularizer", "none") != "none":
        named = {"regularizer": kwargs["regularizer"].replace("-", "_"), "strength": kwargs["regularizer_coef"]}
        kind, options = "rec_regularized", {**edges, **named, "clip": clip}
    else:
        weight = {"gspo_importance_sampling": "importance", "importance_sampling": "importance", "none": "none"}
        ring = {"ring_low": kwargs["epsilon_low_prime"], "ring_high": kwargs["epsilon_high_prime"]}
        level = "sequence" if sequence else "token"
        kind, options = "rec", {**edges, **ring, "clip": clip, "level": level, "weight": weight[kwargs["weight"]]}
    mean = {"loss_agg_mode": "seq-mean-token-mean"} if sequence else {}
    loss, metrics = loss_of(inputs, kind, mean, **options)
    return {"loss": loss, "metrics": {"pg_clipfrac": metrics.get("train/clip_fraction", 0.0), "pg_loss": loss}}


# --------------------------------------------------------------------------- an expert's replies


def imitated(inputs: Arguments, kwargs: Arguments, kind: str, **options: Any) -> Arguments:
    mask = inputs["action_mask"]
    objective = policy_objective(kind, kwargs["loss_agg_mode"], **options)
    loss, _ = minimised(objective, inputs["logprob"], mask, {}, expert=mask.new_ones(len(mask)))
    return {"loss": loss, "metrics": {f"{kind}_loss": loss}}


@answers("trinity", "sft")
def _sft(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return imitated(inputs, kwargs, "sft")


@answers("trinity", "sft_is")
def _sft_is(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return imitated(inputs, kwargs, "sft_is")


@answers("trinity", "sft_phi")
def _sft_phi(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return imitated(inputs, kwargs, "sft_phi", cutoff=kwargs["cutoff_prob"])


@answers("trinity", "mu_schedule")
def _mu_schedule(inputs: Arguments, kwargs: Arguments) -> Arguments:
    known = (kwargs["mu_warmup_steps"], kwargs["mu_decay_steps"], kwargs["mu_peak"], kwargs["mu_valley"])
    return {"mu": torch.tensor([mu_schedule(int(step), *known) for step in inputs["steps"]])}


def _parts(inputs: Arguments, kwargs: Arguments) -> tuple[float, float]:
    """What the peer multiplies the mean of its own rows and of the expert's with, in a micro-batch like this one."""
    workers, mini, micro = (kwargs[n] for n in ("ngpus_trainer", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"))
    rows = inputs["expert_mask"].bool()
    share = mini // workers / len(rows) if kwargs["use_dynamic_bsz"] else mini // workers // micro
    own, expert = (kwargs[f"train_batch_size_{which}"] // workers for which in ("usual", "expert"))
    return float((~rows).sum()) * share / own, float(rows.sum()) * share / expert


def _mixed(inputs: Arguments, kwargs: Arguments, kind: str, imitation: str, **options: Any) -> Arguments:
    own_part, expert_part = _parts(inputs, kwargs)
    mask, expert = inputs["action_mask"].bool(), inputs["expert_mask"].bool()
    own_tokens, expert_tokens = float(mask[~expert].sum()) / own_part, float(mask[expert].sum()) / expert_part
    own_rows, expert_rows = float((~expert).sum()) / own_part, float(expert.sum()) / expert_part
    mode = kwargs.get("loss_agg_mode", "token-mean")
    loss, metrics = minimised(
        policy_objective(kind, mode, **band(kwargs), **options),
        inputs["logprob"],
        mask,
        columns_of(inputs),
        expert=expert,
        step=kwargs.get("step", 0),
        tokens=own_tokens + expert_tokens,
        expert_tokens=expert_tokens,
        sequences=own_rows + expert_rows,
        expert_sequences=expert_rows,
    )
    own, others = ({name: tensor[which] for name, tensor in inputs.items()} for which in (~expert, expert))
    per_own_token = float(mask.sum()) / float(mask[~expert].sum()) * own_part  # ours are means over all tokens
    return {
        "loss": loss,
        "metrics": {
            **{f"usual/{theirs}": metrics[ours] * per_own_token for theirs, ours in CLIPPED.items()},
            "usual/pg_loss": loss_of(own, "ppo", kwargs, **band(kwargs))[0] * own_part,
            f"expert/{imitation}_loss": loss_of(others, imitation, kwargs)[0] * expert_part,
            "loss": loss,
            **({"mu": metrics["train/expert_share"]} if kind == "mix_chord" else {}),
        },
    }


@answers("trinity", "mix")
def _mix(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _mixed(inputs, kwargs, "mix", "sft", mu=kwargs["mu"])


@answers("trinity", "mix_chord")
def _mix_chord(inputs: Arguments, kwargs: Arguments) -> Arguments:
    schedule = {name: kwargs[name] for name in ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")}
    phi = kwargs["enable_phi_function"]
    return _mixed(inputs, kwargs, "mix_chord", "sft_phi" if phi else "sft", phi=phi, **schedule)


# --------------------------------------------------------------------------- KL and entropy


def only(aggregate: str, **terms: Term) -> PolicyObjective:
    """An objective that is its terms alone: with advantages of zero there is nothing else to minimise."""
    return policy_objective("reinforce", aggregate, terms=terms)


@answers("trinity", "kl_loss")
def _kl_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    corrected = kwargs["kl_fn"] == "corrected_k3" and "old_logprob" in inputs
    kind = "corrected_k3" if corrected else kwargs["kl_fn"].removeprefix("corrected_")
    estimator, metadata = resolve_function("kl_estimators", section("kl_estimators", kind), KlMetadata)
    objective = only(kwargs["loss_agg_mode"], kl=Term(kwargs["kl_coef"], estimator, metadata))
    nothing = {"advantages": torch.zeros_like(inputs["logprob"])}
    loss, _ = minimised(objective, inputs["logprob"], inputs["action_mask"], {**columns_of(inputs), **nothing})
    everywhere = torch.ones_like(inputs["logprob"])
    return {
        "loss": loss,
        "kl": estimator(policy_inputs(inputs["logprob"], everywhere, **columns_of(inputs))),
        "metrics": {"kl_loss": loss / kwargs["kl_coef"], "kl_coef": kwargs["kl_coef"]},
    }


@answers("trinity", "entropy_loss")
def _entropy_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    kind = "sampled" if "expert_mask" in inputs else "exact"
    term = Term(kwargs["entropy_coef"], *resolve_function("entropies", section("entropies", kind), EntropyMetadata))
    nothing = torch.zeros_like(inputs["entropy"])
    loss, _ = minimised(
        only(kwargs["loss_agg_mode"], entropy=term),
        nothing,
        inputs["action_mask"],
        {"advantages": nothing},
        entropy=inputs["entropy"],
        expert=inputs.get("expert_mask"),
    )
    return {"loss": -loss, "metrics": {"entropy_loss": -loss / kwargs["entropy_coef"]}}  # ours is taken off the loss


def _kl(inputs: Arguments, kind: str, mask: Tensor, cap: float | None) -> Arguments:
    estimator, _ = resolve_function("kl_estimators", section("kl_estimators", kind, cap=cap), KlMetadata)
    kl = estimator(policy_inputs(inputs["log_probs"], mask, ref_log_prob=inputs["log_probs_base"]))
    return {"loss": kl.sum(), "kl": kl}


@answers("lightrft", "lightrft_kl")
def _lightrft_kl(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _kl(inputs, kwargs["kl_estimator"], inputs["action_mask"], None)


@answers("lightrft", "openrlhf_kl")
def _openrlhf_kl(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _kl(inputs, kwargs["kl_estimator"], torch.ones_like(inputs["log_probs"]), 10.0)


# --------------------------------------------------------------------------- the tokens with the highest entropy


def _high_entropy(ratio: float) -> tuple[dict, ...]:
    """The gates of LightRFT's ratio, of which 0 or less says that there is none."""
    return (
        ({"kind": "top_entropy", "fraction": min(ratio, 1.0), "per": "sequence", "narrow": True},) if ratio > 0 else ()
    )


@answers("lightrft", "lightrft_high_entropy_mask")
def _high_entropy_mask(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask = inputs["action_mask"].bool()
    x = PolicyInputs(torch.zeros_like(inputs["entropy"]), mask, {}, mask & ~mask, inputs["entropy"])
    for gate in shut(_high_entropy(kwargs["high_entropy_ratio"])):
        mask = mask & gate.function(x).bool()
    return {"mask": mask.float()}


@answers("lightrft", "lightrft_ppo_high_entropy")
def _ppo_high_entropy(inputs: Arguments, kwargs: Arguments) -> Arguments:
    gates, clip = _high_entropy(kwargs["high_entropy_ratio"]), kwargs["clip_eps"]
    objective = policy_objective(
        "ppo", "seq-mean-token-mean", gates=gates, clip_low=clip, clip_high=clip, dual_clip=None
    )
    given = {"advantages": inputs["advantages"], "old_log_prob": inputs["old_log_probs"]}
    loss, _ = minimised(objective, inputs["log_probs"], inputs["action_mask"], given, entropy=inputs["entropy"])
    return {"loss": loss}
