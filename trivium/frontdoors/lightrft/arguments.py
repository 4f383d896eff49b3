"""The trainer's arguments: attributes of `args`, and the constructor's additional keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trivium.foundation.errors import ConfigError, Problem
from trivium.foundation.registry import suggest
from trivium.frontdoors.tables import announce, refuse

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


class Option(NamedTuple):
    """An optional attribute of `args`."""

    default: Any
    what: str


OPTIONAL: Mapping[str, Option] = {
    "seed": Option(42, "seed of the rollouts, and of the order of the prompts"),
    "freezing_actor_steps": Option(-1, "steps at the start in which the critic trains alone"),
    "use_kl_loss": Option(False, "adds the KL penalty to the loss, otherwise it is in the rewards"),
    "kl_estimator": Option("k1", "k1, k2 or k3"),
    "use_cpg_loss": Option(False, "the policy loss of CPGD"),
    "use_gspo": Option(False, "the policy loss of GSPO"),
    "loss_agg_mode": Option("seq-mean-token-mean", "the average of the losses, also that of the critic"),
    "high_entropy_token_ratio": Option(0.0, "fraction of a sequence's tokens to train, by entropy; 0: all tokens"),
    "advantages_norm": Option(False, "normalises the advantages of rloo; gae and reinforce always do"),
    "no_advantage_std_norm": Option(False, "normalising subtracts the mean only"),
    "advantage_clip": Option(0.0, "largest absolute advantage; 0: no clipping"),
    "reward_running_norm": Option(False, "divides rewards by their running standard deviation"),
    "reward_running_norm_minus_mean": Option(False, "subtracts their running mean too"),
    "reward_clip": Option(0.0, "largest absolute reward; 0: no clipping"),
    "overlong_buffer": Option(False, "subtracts a penalty from the rewards of long completions"),
    "overlong_buffer_len": Option(1024, "last tokens of max_new_tokens, over which the penalty grows linearly"),
    "overlong_buffer_penalty_factor": Option(1.0, "the penalty at max_new_tokens, the largest one"),
    "gamma": Option(1.0, "discount of gae and reinforce"),
    "lambd": Option(0.95, "lambda of gae"),
    "dynamic_sampling": Option(False, "replaces prompts whose completions all have the same reward"),
    "dynamic_sampling_refills": Option(5, "further batches of prompts in a step for that"),
    "eval_temperature": Option(None, "temperature of evaluations; unset: as in training"),
    "eval_n_samples": Option(1, "completions of each prompt in an evaluation"),
    "rollout_deadline_s": Option(3600.0, "longest time of a completion"),
    "max_failed_fraction": Option(0.5, "fraction of completions that may fail"),
    "load_checkpoint": Option(False, "continues after the newest checkpoint in ckpt_path"),
    "max_ckpt_num": Option(3, "checkpoints to keep"),
    "use_wandb": Option(None, "logs to Weights & Biases; text is the API key"),
    "wandb_org": Option(None, "entity of the W&B run"),
    "wandb_group": Option(None, "group of the W&B run"),
    "wandb_project": Option("trivium", "project of the W&B run"),
    "wandb_run_name": Option("", "name of the W&B run"),
    "use_tensorboard": Option(None, "logs to TensorBoard in this folder; True: in ckpt_path"),
}
"""Optional attributes of `args`."""
_UNSUPPORTED: Mapping[str, str] = {
    "aux_loss_coef": "an auxiliary load-balancing loss is not supported: leave it out",
    "lora_dropout": "adapters are trained without dropout: leave it out",
    "max_len": "set prompt_max_len and max_new_tokens of PPOTrainerVL",
    "max_pixels": "set it in preprocessor_config.json of the model, which engine and trainer read",
    "normalize_reward_for_critic": "leave it out: the critic is trained on unnormalised returns",
    "use_fire": "FIRE sampling is not supported: leave it out",
}
"""Attributes of `args` that must be off -> what to do instead."""
_WITHOUT_EFFECT: Mapping[str, str] = {
    "normalize_advantages": "LightRFT does not read it either; see advantages_norm",
    "use_sequence_rewards": "LightRFT does not read it either; a completion has one reward",
    "packing_samples": "sequences are always packed",
    "print_replay_buffer_stats": "the metrics of every step contain lengths and rewards",
    "reward_tokenizers": "reward models get the tokens of the rollouts, and texts",
}
"""Keyword arguments of the constructor in the original's scripts that change nothing -> why."""
GENERATE = frozenset(
    (
        *("do_sample", "max_new_tokens", "min_new_tokens", "max_length", "temperature", "top_p", "top_k", "stop"),
        *("pad_token_id", "eos_token_id", "gamma", "lambd"),
    )
)
"""Keyword arguments of the constructor for sampling and discounting."""
_AS_ARGS = frozenset(OPTIONAL) - {"gamma", "lambd", "seed", "max_ckpt_num", "load_checkpoint"}
"""Options that the original's scripts also pass to the constructor. They override `args`."""
MAX_NEW_TOKENS = 1024


def option(args: object, name: str) -> Any:
    """Returns an optional attribute of `args`, or its default if it is missing or None."""
    value = getattr(args, name, None)
    return OPTIONAL[name].default if value is None else value


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
    """Raises a ConfigError that lists all attributes of `args` whose values are not supported."""
    unsupported = ((name, getattr(args, name, None), do) for name, do in _UNSUPPORTED.items())
    refuse(Problem(name, repr(value), "this value is not supported", do) for name, value, do in unsupported if value)


def check_numbers(**numbers: float | None) -> None:
    """Raises a ConfigError that lists all numbers of the constructor that are out of range. None is always valid."""
    counts = ("micro_train_batch_size", "micro_rollout_batch_size", "max_epochs", "prompt_max_len")
    wrong = [
        name
        for name, value in numbers.items()
        # `not >=` also refuses NaN, which no comparison holds for.
        if value is not None and (not value >= int(name in counts) or (name == "ema_beta" and value > 1))
    ]
    if wrong:
        values = ", ".join(f"{name} {numbers[name]}" for name in wrong)
        raise ConfigError(
            "counts of at least 1, ema_beta in [0, 1], other numbers of at least 0", values, "correct them"
        )


def _is_cadence(value: Any) -> bool:
    # -1: an evaluation once per episode, no checkpoint; the values are those of LightRFT's flags.
    return value == -1 or value >= 1


def sorted_arguments(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (those of GENERATE, those of OPTIONAL, which override the attributes of `args`).

    Raises a ConfigError that lists all unknown keywords with suggestions.
    """
    known_names = GENERATE | _AS_ARGS
    unknown = sorted(set(keywords) - known_names - {*_WITHOUT_EFFECT})
    if unknown:
        problems = [
            Problem(name, "a keyword argument", "no such argument", suggest(name, known_names)) for name in unknown
        ]
        raise ConfigError(
            "the keyword arguments of PPOTrainerVL",
            f"unknown: {', '.join(unknown)}",
            "correct them, or leave them out",
            problems,
        )
    announce(f"{name}: no effect: {why}" for name, why in _WITHOUT_EFFECT.items() if keywords.get(name))
    sampling, overrides = (
        {name: value for name, value in keywords.items() if name in names} for names in (GENERATE, _AS_ARGS)
    )
    return sampling, overrides
