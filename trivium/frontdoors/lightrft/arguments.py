"""The trainer's arguments: attributes of `args`, and the constructor's additional keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.errors import ConfigError, Problem
from trivium.frontdoors.lightrft.config.config_table import TABLE
from trivium.frontdoors.tables import Restricted, announce, refuse
from trivium.registry import suggest

REQUIRED: Mapping[str, str] = {
    "num_episodes": "passes over the prompts",
    "rollout_batch_size": "prompts of a rollout, over all ranks",
    "n_samples_per_prompt": "completions of each",
    "train_batch_size": "sequences of an optimizer step, over all ranks",
    "advantage_estimator": "gae, reinforce, reinforce++, rloo, reinforce_baseline, group_norm, grpo or cpgd",
    "logging_steps": "rollouts from one logged row to the next",
    "eval_steps": "rollouts from one evaluation to the next; -1: once per episode",
    "save_steps": "rollouts from one checkpoint to the next; -1: none",
    "ckpt_path": "the folder of the checkpoints",
}
"""Attributes of `args` that `fit` requires, with descriptions."""
_OPTIONAL = (
    *("seed", "freezing_actor_steps", "use_kl_loss", "kl_estimator", "use_cpg_loss", "use_gspo", "loss_agg_mode"),
    *("high_entropy_token_ratio", "aux_loss_coef", "advantages_norm", "no_advantage_std_norm", "advantage_clip"),
    *("reward_running_norm", "reward_running_norm_minus_mean", "reward_clip", "overlong_buffer", "gamma", "lambd"),
    *("overlong_buffer_len", "overlong_buffer_penalty_factor", "dynamic_sampling", "dynamic_sampling_refills"),
    *(
        "eval_temperature",
        "eval_n_samples",
        "rollout_deadline_s",
        "max_failed_fraction",
        "max_ckpt_num",
        "max_ckpt_mem",
    ),
    *("use_wandb", "wandb_org", "wandb_group", "wandb_project", "wandb_run_name", "use_tensorboard"),
)
OPTIONAL: Mapping[str, Any] = {name: TABLE.default_of(name) for name in _OPTIONAL}
"""Optional attributes of `args`, with their defaults: those of the flags of the same names."""
GENERATE = frozenset(
    (
        *("do_sample", "max_new_tokens", "min_new_tokens", "max_length", "temperature", "top_p", "top_k", "stop"),
        *("pad_token_id", "eos_token_id", "gamma", "lambd"),
    )
)
"""Keyword arguments of the constructor for sampling and discounting."""
_AS_ARGS = frozenset(OPTIONAL) - {"gamma", "lambd", "seed", "max_ckpt_num", "max_ckpt_mem"}
"""Options that the original's scripts also pass to the constructor. They override `args`."""
_OF_SCRIPTS = (
    *("normalize_advantages", "use_sequence_rewards", "packing_samples", "print_replay_buffer_stats"),
    "reward_tokenizers",
)
"""Arguments without effect that the original's scripts pass to the constructor."""
MAX_NEW_TOKENS = 1024


def option(args: object, name: str) -> Any:
    """Returns an attribute of `args`, or the default of the flag of this name if it is missing or None."""
    value = getattr(args, name, None)
    return TABLE.default_of(name) if value is None else value


def check_args(args: object) -> None:
    """Raises a ConfigError that lists all missing attributes of `args`, or else all counts that are not positive."""
    missing = [name for name in REQUIRED if getattr(args, name, None) is None]
    if missing:
        problems = [Problem(f"args.{name}", REQUIRED[name], "no such attribute", "set it") for name in missing]
        raise ConfigError(
            "the attributes of `args` that `fit` reads",
            f"{len(missing)} are missing: {', '.join(missing)}",
            "set them on the namespace that is given to `fit`",
            problems,
        )
    counts = ("num_episodes", "rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "logging_steps")
    wrong = [name for name in counts if int(getattr(args, name)) < 1]
    wrong += [name for name in ("eval_steps", "save_steps") if not _is_cadence(getattr(args, name))]
    if wrong:
        values = ", ".join(f"{name} {getattr(args, name)}" for name in wrong)
        raise ConfigError(
            "counts of at least 1 in `args`", values, "correct them (-1: eval_steps and save_steps alone)"
        )


def check_values(args: object) -> None:
    """Logs attributes of `args` without effect. Raises ConfigError for unsupported values."""
    given = TABLE.read({name: value for name, value in vars(args).items() if name in TABLE.entries})
    refuse(p for p in given.problems if isinstance(TABLE.entries[p.where], Restricted))
    announce(given.notes())


def check_numbers(**given: float | None) -> None:
    """Raises a ConfigError that lists all numbers of the constructor that are out of range. None is always valid."""
    counts = ("micro_train_batch_size", "micro_rollout_batch_size", "max_epochs", "prompt_max_len")
    wrong = [
        name
        for name, value in given.items()
        if value is not None and (not value >= int(name in counts) or (name == "ema_beta" and value > 1))
    ]
    if wrong:
        values = ", ".join(f"{name} {given[name]}" for name in wrong)
        raise ConfigError(
            "counts of at least 1, ema_beta in [0, 1], other numbers of at least 0", values, "correct them"
        )


def _is_cadence(value: Any) -> bool:
    return value == -1 or value >= 1


def sorted_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (those of GENERATE, those of OPTIONAL, which override the attributes of `args`).

    Raises a ConfigError that lists all unknown keywords with suggestions.
    """
    known = GENERATE | _AS_ARGS
    unknown = sorted(set(given) - known - {*_OF_SCRIPTS})
    if unknown:
        problems = [Problem(name, "a keyword argument", "no such argument", suggest(name, known)) for name in unknown]
        raise ConfigError(
            "the keyword arguments of PPOTrainerVL",
            f"unknown: {', '.join(unknown)}",
            "correct them, or leave them out",
            problems,
        )
    announce(TABLE.read({name: given[name] for name in _OF_SCRIPTS if name in given and name in TABLE.entries}).notes())
    if given.get("reward_tokenizers"):
        announce(["reward_tokenizers: no effect: reward models get the tokens of the rollouts, and texts"])
    sampling, overrides = (
        {name: value for name, value in given.items() if name in names} for names in (GENERATE, _AS_ARGS)
    )
    return sampling, overrides
