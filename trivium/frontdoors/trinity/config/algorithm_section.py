"""The `algorithm` section of Trinity-RFT's config: the translation of its names and their options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trivium.foundation.registry import suggest
from trivium.frontdoors.trinity.config.named_workflows import judged_in_training
from trivium.frontdoors.trinity.config.trinity_config import TrinityConfig

_NONE = "none"
_TEXTS = "buffer.trainer_input.experience_buffer"


@dataclass(frozen=True)
class Defaults:
    """The defaults of an algorithm_type, in Trinity-RFT's names."""

    advantage: str = "grpo"
    loss: str = "ppo"
    kl: str = "k2"
    entropy: str = "default"
    sample: str = "default"
    offline: bool = False
    """Whether the algorithm learns from rows, without generating rollouts."""


ALGORITHMS: Mapping[str, Defaults] = {
    "sft": Defaults("", "sft", _NONE, _NONE, offline=True),
    "dpo": Defaults("", "dpo", offline=True),
    "ppo": Defaults("ppo"),
    "grpo": Defaults(),
    "grpo_verl": Defaults(),
    "dapo": Defaults(kl=_NONE),
    "reinforceplusplus": Defaults("reinforceplusplus"),
    "rloo": Defaults("rloo"),
    "remax": Defaults("remax"),
    "opmd": Defaults("opmd", "opmd"),
    "asymre": Defaults("asymre", "opmd", _NONE, _NONE),
    "topr": Defaults("reinforce", "topr"),
    "cispo": Defaults(loss="cispo"),
    "gspo": Defaults(loss="gspo"),
    "sapo": Defaults(loss="sapo"),
    "m2po": Defaults(loss="m2po", kl=_NONE),
    "mix": Defaults(loss="mix", entropy="mix", sample="mix"),
    "mix_chord": Defaults(loss="mix_chord", entropy="mix", sample="mix"),
    "raft": Defaults("accept", "reinforce", _NONE, _NONE),
    "sppo": Defaults("opmd", "sppo", _NONE, _NONE),
    "rec": Defaults("rec", "rec"),
    "multi_step_grpo": Defaults("step_wise_grpo"),
    "gigpo": Defaults("gigpo"),
    "on_policy_distill": Defaults("on_policy_distill", "ppo", _NONE, _NONE),
    "jsd": Defaults("jsd", "ppo", _NONE, _NONE),
}

_STD = {"epsilon": "epsilon", "std_cal_level": "std_level"}
_ADVANTAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ppo": ("gae", {"gamma": "gamma", "lam": "lam"}),
    "grpo": ("grpo", _STD),
    "grpo_verl": ("grpo", {"epsilon": "epsilon"}),
    "step_wise_grpo": ("step_wise_grpo", {**_STD, "enable_step_norm": "norm_by_steps"}),
    "gigpo": ("gigpo", {name: name for name in ("omega", "gamma", "fnorm", "epsilon")}),
    "reinforceplusplus": ("reinforce_plus_plus", {"gamma": "gamma"}),
    "reinforce": ("reinforce", {}),
    "remax": ("remax", {}),
    "rloo": ("rloo", {}),
    "opmd": ("opmd", {"opmd_baseline": "baseline", "tau": "tau"}),
    "opmd_verl": ("opmd", {"opmd_baseline": "baseline", "tau": "tau"}),
    "asymre": ("asymre", {"baseline_shift": "baseline_shift"}),
    "asymre_verl": ("asymre", {"baseline_shift": "baseline_shift"}),
    "rec": ("rec", {"epsilon": "epsilon", "std_normalize": "norm_by_std", "drop": "drop"}),
    "on_policy_distill": ("on_policy_distill", {"kl_coef": "kl_coef"}),
    "jsd": ("jsd", {name: name for name in ("lambda_coef", "kl_coef", "temperature")}),
    "clipb": ("grpo", {"epsilon": "epsilon"}),
    "clipv": ("grpo", {"epsilon": "epsilon"}),
    "accept": ("accept", {}),
}
"""advantage_fn -> (kind in Trivium, option in Trinity-RFT -> option in Trivium)."""
_GATES = {"clipb": ("clip_b", {"mu": "mu"}), "clipv": ("clip_v", {"mu": "mu", "max_frac": "max_fraction"})}
"""Each advantage_fn that Trivium also has as a gate -> (kind, options)."""
_WITHOUT_EFFECT = {
    "opmd": ("tau", "baseline", "mean"),
    "rec": ("epsilon", "norm_by_std", False),
    "gigpo": ("epsilon", "fnorm", _NONE),
}
"""Kind -> (option, second option, value of the second option that disables the first)."""
_ADVANTAGE_REST = ("std_threshold", "duplicate_experiences", "rank_penalty", "chunk_size")
_GIGPO_KEYS = {"step_reward_key": "step_reward", "env_state_hash_key": "env_state_hash"}

_MASKS = {f"mask_clip_range_{side}": f"mask_clip_{side}" for side in ("low", "high")}
_LOSSES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ppo": ("ppo", {"clip_ratio_c": "dual_clip"}),
    "opmd": ("opmd", {"tau": "tau"}),
    "gspo": ("gspo", {}),
    "topr": ("topr", {"advantage_threshold": "threshold"}),
    "cispo": ("cispo", {}),
    "sapo": ("sapo", {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}),
    "sppo": ("sppo", {"epsilon": "epsilon"}),
    # The name of the option differs between versions.
    "m2po": ("m2po", {"m2_threshold": "m2", "m2": "m2"}),
    "importance_sampling": ("importance_sampling", {}),
    "rec": ("rec", {}),
    "mix": ("mix", {"mu": "mu"}),
    "mix_chord": (
        "mix_chord",
        {name: name for name in ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")}
        | {"enable_phi_function": "phi"},
    ),
    "sft": ("sft", {}),
    "sft_is": ("sft_is", {}),
    "sft_phi": ("sft_phi", {"cutoff_prob": "cutoff"}),
    "reinforce": ("reinforce", {}),
}
"""policy_loss_fn -> (kind in Trivium, option in Trinity-RFT -> option in Trivium)."""
_ANY_LOSS = ("loss_agg_mode", "use_token_level_loss", "backend")
_BANDS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28), "mix": (0.2, 0.2), "mix_chord": (0.2, 0.2)}
"""Losses with a range of ratios -> Trinity-RFT's default range, (low, high)."""
_BAND_KEYS = ("clip_range", "clip_range_low", "clip_range_high")
_COUNTED = (
    "use_dynamic_bsz",
    "ppo_mini_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ngpus_trainer",
    "train_batch_size_expert",
    "train_batch_size_usual",
    "use_token_level_loss_in_sft",
)
"""Options by which Trinity-RFT's mixed losses split a batch. Trivium counts the experiences of the step instead."""
_WITHOUT_RATIO = ("opmd", "sft", "sft_is", "sft_phi", "reinforce")


def defaults_of(trinity: TrinityConfig) -> Defaults:
    """Returns the defaults of the algorithm_type. For an unknown name, notes a problem and returns those of grpo."""
    name = trinity.algorithm_type
    if name == "cpt":
        if not trinity.offline:
            do = f"set {_TEXTS}: {{storage_type: file, path: ...}}; or use sft, on rows with a prompt and a completion"
            trinity.problem("algorithm.algorithm_type", repr(name), "it learns texts, and no file has them", do)
        return ALGORITHMS["sft"]
    if name not in ALGORITHMS:
        trinity.problem("algorithm.algorithm_type", repr(name), "no such algorithm", suggest(name, ALGORITHMS))
    return ALGORITHMS.get(name, Defaults())


def algorithm_of(trinity: TrinityConfig) -> dict[str, Any]:
    """Returns the `algorithm` section."""
    defaults = defaults_of(trinity)
    loss = trinity.text("algorithm.policy_loss_fn") or defaults.loss
    if defaults.offline:
        return _dpo(trinity) if loss == "dpo" else _supervised(trinity, loss)
    function = "add_strategy" if trinity.has("algorithm.add_strategy") else "advantage_fn"
    advantage = trinity.text(f"algorithm.{function}") or defaults.advantage
    section = _advantage(trinity, advantage, f"algorithm.{function}")
    section = {"kind": "ppo" if advantage == "ppo" else "grpo", **section, **_loss(trinity, loss)}
    section["correction"] = _NONE  # in both, the ratio is against the policy that sampled
    if not trinity["algorithm.bypass_old_logprobs"] and loss not in _WITHOUT_RATIO:
        section["old_log_prob"] = "recompute"
    section |= _entropy(trinity, defaults) | _kl(trinity, defaults) | _critic(trinity, advantage)
    return _with_operators(trinity, section) | _teacher(trinity, advantage)


def _supervised(trinity: TrinityConfig, loss: str) -> dict[str, Any]:
    return {"kind": "sft", **_loss(trinity, loss)}


def _dpo(trinity: TrinityConfig) -> dict[str, Any]:
    """Translates DPO. Trinity-RFT's examples write its strength as the coefficient of a KL."""
    # The table of losses does not fit: the pair loss is a section of its own.
    args, kl = trinity["algorithm.policy_loss_fn_args"], trinity["algorithm.kl_loss_fn_args"]
    _unknown(trinity, "algorithm.policy_loss_fn_args", args, ("beta", "label_smoothing", "loss_agg_mode"))
    beta, coef = args.get("beta"), kl.get("kl_coef")
    if beta is not None and coef is not None and beta != coef:
        trinity.problem(
            "algorithm.kl_loss_fn_args.kl_coef",
            repr(coef),
            f"the beta of the pair loss is {beta!r} (policy_loss_fn_args), and there is no second KL beside it",
            "leave one of the two out",
        )
    pair = {"kind": "dpo", "beta": coef if beta is None else beta, "label_smoothing": args.get("label_smoothing")}
    return {"kind": "dpo", "pair_loss": {name: value for name, value in pair.items() if value is not None}}


def _options(
    trinity: TrinityConfig, where: str, names: Mapping[str, str], others: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns the options of a function that are set, under their names in Trivium. `others` are read elsewhere."""
    args = trinity[where]
    _unknown(trinity, where, args, (*names, *others))
    return {to: args[name] for name, to in names.items() if args.get(name) is not None}


def _unknown(trinity: TrinityConfig, where: str, args: Mapping[str, Any], names: Iterable[str]) -> None:
    for name, value in args.items():
        if name not in names:
            trinity.problem(f"{where}.{name}", f"{value!r:.80}", "no such option", suggest(name, names))


def _of(trinity: TrinityConfig, where: str, name: str, table: Mapping[str, Any]) -> Any:
    """Looks a name up in a table; notes a problem for an unknown name. Returns None for a path to a user's function."""
    if name not in table and ":" not in name:
        trinity.problem(where, repr(name), "no such function", suggest(name, table) + "; or file.py:name")
    return table.get(name)


def _advantage(trinity: TrinityConfig, name: str, key: str) -> dict[str, Any]:
    where = f"{key}_args"
    row = _of(trinity, key, name, _ADVANTAGES)
    if row is None:
        return {"advantage": {"kind": name, **trinity[where]}}
    kind, names = row
    gate = _GATES.get(name)
    others = (*_ADVANTAGE_REST, *_GIGPO_KEYS, *(gate[1] if gate else ()))
    options, args = _options(trinity, where, names, others), trinity[where]
    for key, default in _GIGPO_KEYS.items():
        if args.get(key, default) != default:
            trinity.problem(f"{where}.{key}", repr(args[key]), "turns report these by fixed names", "leave it out")
    if args.get("duplicate_experiences"):
        trinity.problem(
            f"{where}.duplicate_experiences", "true", "groups are not repeated", "set algorithm.refill in the result"
        )
    if (switch := _WITHOUT_EFFECT.get(kind)) and options.get(switch[1], switch[2]) == switch[2]:
        options.pop(switch[0], None)
    section: dict[str, Any] = {"advantage": {"kind": kind, **options}}
    if args.get("rank_penalty") is not None:
        section["advantage"] |= {"kind": "grpo_rank_penalty", "rank_penalty": args["rank_penalty"]}
    if args.get("std_threshold") is not None:
        section["filters"] = [{"kind": "low_std", "threshold": args["std_threshold"]}]
    if gate:
        section["gates"] = [{"kind": gate[0], **{to: args[key] for key, to in gate[1].items() if key in args}}]
    return section


def _loss(trinity: TrinityConfig, name: str) -> dict[str, Any]:
    """Returns the policy loss with its aggregation and the settings that its options require."""
    where = "algorithm.policy_loss_fn_args"
    row, args = _of(trinity, "algorithm.policy_loss_fn", name, _LOSSES), trinity[where]
    aggregate = trinity.text("algorithm.loss_agg_mode") or args.get("loss_agg_mode")
    if aggregate is None:
        per_token = args.get("use_token_level_loss", trinity["algorithm.use_token_level_loss"])
        # Trinity's default of loss_agg_mode overwrites the one that belongs to gspo, whose ratio is that of a sequence.
        per_sequence = name == "gspo" or not per_token
        aggregate = "seq-mean-token-mean" if per_sequence else "token-mean"
    if row is None:
        return {"policy_loss": {"kind": name, **args}, "aggregate": aggregate}
    kind, names = row
    special = {
        "ppo": (*_BAND_KEYS, "enable_sequence_masking", "delta_sequence_masking", "fallback_to_policy_gradient"),
        "gspo": _BAND_KEYS,
        "cispo": (*_BAND_KEYS[1:], *_MASKS, "enable_mask_clip"),
        "mix": (*_BAND_KEYS, *_COUNTED, "sft_loss_agg_mode", "grpo_loss_agg_mode"),
        "mix_chord": (*_BAND_KEYS, *_COUNTED, "sft_loss_agg_mode", "grpo_loss_agg_mode", "cutoff_prob"),
        "rec": tuple(_REC),
    }.get(name, ())
    loss = {"kind": kind, **_options(trinity, where, names, (*_ANY_LOSS, *special))}
    if name in _BANDS:
        loss |= _band(args, *_BANDS[name])
    if name == "cispo" and args.get("enable_mask_clip"):
        loss |= {to: args.get(key, default) for (key, to), default in zip(_MASKS.items(), (1.0, 0.28), strict=True)}
    if name == "topr":
        # The ratio of a sequence is the paper's, that of a token Trinity's.
        loss["level"] = "token"
    if name == "rec":
        loss, aggregate = _rec(trinity, args, aggregate)
    for key in ("sft_loss_agg_mode", "grpo_loss_agg_mode"):
        if args.get(key) not in (None, aggregate):
            trinity.problem(f"{where}.{key}", repr(args[key]), f"both parts are aggregated by {aggregate}", "set both")
    section: dict[str, Any] = {"policy_loss": loss, "aggregate": aggregate}
    if args.get("enable_sequence_masking"):
        section["gates"] = [{"kind": "sequence_drift", "delta": args.get("delta_sequence_masking", 0.1)}]
    if args.get("fallback_to_policy_gradient"):
        section["old_log_prob"] = "recompute"
    return section


def _band(args: Mapping[str, Any], low: float, high: float) -> dict[str, float]:
    """Returns the range of ratios, which one option or two give."""
    both = args.get("clip_range")
    values = {"clip_low": args.get("clip_range_low"), "clip_high": args.get("clip_range_high")}
    defaults = {"clip_low": low if both is None else both, "clip_high": high if both is None else both}
    return {name: defaults[name] if value is None else value for name, value in values.items()}


_REC = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "epsilon_low_prime": 0.6,
    "epsilon_high_prime": 2.0,
    "clip_mode": "none",
    "weight": "none",
    "regularizer": "none",
    "regularizer_coef": 0.0,
    "temp": 1.0,
}
"""The options of the loss rec, and their defaults."""


def _rec(trinity: TrinityConfig, args: Mapping[str, Any], aggregate: str) -> tuple[dict[str, Any], str]:
    """Translates the loss `rec`, one function in Trinity-RFT and three in Trivium, whose sequence mode is an option.
    Returns (the loss, the aggregation)."""
    options = {name: default if args.get(name) is None else args[name] for name, default in _REC.items()}
    mode, where = options["clip_mode"], "algorithm.policy_loss_fn_args"
    sequence = mode == "gspo-one-side"
    clip = "one_side" if sequence else str(mode).replace("-", "_")
    band = {"clip_low": options["epsilon_low"], "clip_high": options["epsilon_high"]}
    if options["weight"] == "advantage":
        if clip != _NONE or options["regularizer"] != _NONE:
            trinity.problem(
                where, "weight: advantage", "it goes with no clip_mode and no regularizer", "leave them out"
            )
        return {"kind": "red_weight", "temperature": options["temp"]}, aggregate
    if options["regularizer"] != _NONE and options["regularizer_coef"]:
        if options["weight"] != _NONE or clip == "ring" or sequence:
            do = "use clip_mode none, one-side or two-side and weight none"
            trinity.problem(where, f"a regularizer with clip_mode {mode!r}", "these are not combined here", do)
        regularizer = str(options["regularizer"]).replace("-", "_")
        loss = {"kind": "rec_regularized", "regularizer": regularizer, "strength": options["regularizer_coef"]}
        return {**loss, "clip": clip, **({} if clip == _NONE else band)}, aggregate
    loss = {"kind": "rec", "clip": clip, "weight": _NONE if options["weight"] == _NONE else "importance"}
    loss |= {} if clip == _NONE else band
    if clip == "ring":
        loss |= {"ring_low": options["epsilon_low_prime"], "ring_high": options["epsilon_high_prime"]}
    if sequence:
        # This mode ignores loss_agg_mode in Trinity.
        return loss | {"level": "sequence"}, "seq-mean-token-mean"
    return loss, aggregate


def _entropy(trinity: TrinityConfig, defaults: Defaults) -> dict[str, Any]:
    terms = {"default": "exact", "mix": "sampled", _NONE: None}
    name = trinity.text("algorithm.entropy_loss_fn") or defaults.entropy
    coef = _options(trinity, "algorithm.entropy_loss_fn_args", {"entropy_coef": "coef"}).get("coef", 0.0)
    term = _of(trinity, "algorithm.entropy_loss_fn", name, terms)
    return {"entropy": {"coef": coef, "term": term}} if coef and term else {}


_ESTIMATORS: Mapping[str, Any] = {
    _NONE: None,
    "k1": {"kind": "k1"},
    "k2": {"kind": "k2"},
    "k3": {"kind": "k3", "cap": None},
    "low_var_kl": {"kind": "low_var_kl"},
    "abs": {"kind": "abs"},
    "corrected_k3": {"kind": "corrected_k3"},
}


def _kl(trinity: TrinityConfig, defaults: Defaults) -> dict[str, Any]:
    """Returns the KL penalty to the reference: part of the loss, or of the reward."""
    penalties: dict[str, dict[str, Any]] = {}
    for place, key, default in (("loss", "kl_loss_fn", defaults.kl), ("reward", "kl_penalty_fn", _NONE)):
        where = f"algorithm.{key}"
        estimator = _of(trinity, where, trinity.text(where) or default, _ESTIMATORS)
        names = {"kl_coef": "coef", "target_kl": "target", "horizon": "horizon"}
        options = {"coef": 0.001} | _options(trinity, f"{where}_args", names, ("adaptive",))
        if estimator is None or not options["coef"]:
            continue
        if not trinity[f"{where}_args"].get("adaptive"):
            options = {"coef": options["coef"]}
        elif place == "loss":
            do = "use kl_penalty_fn, or leave it out"
            trinity.problem(f"{where}_args.adaptive", "true", "a coefficient in the loss stays as it is", do)
        else:
            options["controller"] = "adaptive"
        penalties[place] = {**options, "place": place, "estimator": estimator}
    if len(penalties) > 1:
        trinity.problem(
            "algorithm.kl_penalty_fn",
            "a KL penalty in the reward",
            f"kl_loss_fn ({trinity.text('algorithm.kl_loss_fn') or defaults.kl}) puts another one into the loss",
            "set algorithm.kl_loss_fn: none, or kl_penalty_fn: none",
        )
    return {"kl": next(iter(penalties.values()))} if penalties else {}


def _critic(trinity: TrinityConfig, advantage: str) -> dict[str, Any]:
    warmup = trinity["trainer.critic_warmup"] or trinity.trainer["trainer.critic_warmup"]
    if advantage == "ppo":
        critic = {"critic": {"clip": trinity.trainer["critic.cliprange_value"] or None}}
        return critic | ({"critic_warmup": warmup} if warmup else {})
    if warmup:
        do = "leave it out, or use advantage_fn ppo"
        trinity.problem("trainer.critic_warmup", str(warmup), f"advantage_fn {advantage!r} has no critic", do)
    return {}


def _with_operators(trinity: TrinityConfig, section: dict[str, Any]) -> dict[str, Any]:
    """Adds the settings that belong to a workflow or an operator in Trinity-RFT and to the algorithm in Trivium."""
    names = [operator.get("name") for operator in trinity["data_processor.experience_pipeline.operators"]]
    judge = judged_in_training(trinity)
    if "mask_response_truncated" in names or judge.masks_truncated:
        section["mask_truncated"] = True
    if judge.shaping:
        section["shaping"] = [*judge.shaping]
    return section


def _teacher(trinity: TrinityConfig, advantage: str) -> dict[str, Any]:
    """Returns the teacher, which is the first auxiliary model."""
    distils = advantage in ("on_policy_distill", "jsd")
    models = trinity.auxiliary_models
    if distils and models and models[0].has("model_path"):
        return {"teacher": {"path": models[0]["model_path"]}}
    if distils:
        do = "name it: explorer.auxiliary_models: [{model_path: ...}]"
        trinity.problem("explorer.auxiliary_models", "a teacher", f"advantage_fn {advantage!r} reads one", do)
    elif models and not judged_in_training(trinity).asks_models:
        trinity.note("explorer.auxiliary_models: no effect: neither the workflow nor the advantage asks them")
    return {}
