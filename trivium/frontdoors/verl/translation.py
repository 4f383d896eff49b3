"""verl's trainer config as a RunConfig, by the keys of `config_table.TABLE`.

Everything that cannot be translated is reported at once, by name, before anything is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trivium.errors import ConfigError, Problem
from trivium.frontdoors.verl.config_table import TABLE, Restricted, default_of, entry_of

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_KEEP_ALL = 1_000_000
_NAMES = {
    "verl_megatron": "Megatron",
    "megatron": "Megatron",
    "sglang": "SGLang",
    "vllm": "vLLM",
    "trtllm": "TensorRT-LLM",
}
"""Names of backends that are not built, for errors."""
_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Estimators that verl has twice."""
_LOSSES = {"vanilla": "ppo", "gpg": "reinforce", "geo_mean": "gmpo"}
"""Policy losses that have another name here."""
_PER_SEQUENCE = ("gspo", "sapo", "gmpo")
"""Losses that verl averages over sequences whatever loss_agg_mode is."""
_MONITORS = {"console": "console", "file": "jsonl", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp64": "float64",
    "float64": "float64",
}


class VerlConfig:
    """A config of verl's shape: values by dotted key, checked against the table."""

    def __init__(self, config: object) -> None:
        """`config` is a mapping, an OmegaConf container, or an object with attributes; values may nest.

        Raises ConfigError with everything in it that cannot be translated.
        """
        self.values = dict(_leaves(_plain(config), ""))
        problems = [problem for key, value in self.values.items() for problem in _problems(key, value)]
        if problems:
            raise ConfigError(
                "a config that can be translated", f"{len(problems)} problem(s)", "fix them all at once:", problems
            )

    def __getitem__(self, key: str) -> Any:
        """The value of a key of the table, or verl's default where it is not set."""
        value = self.values.get(key)
        return default_of(key) if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.values.get(key) is not None

    def first(self, *keys: str) -> object:
        """The value of the first of these keys that is set, else the first default that there is."""
        values = [self.values.get(key) for key in keys] + [default_of(key) for key in keys]
        return next((value for value in values if value is not None), None)


def _plain(value: object) -> object:
    """Mappings all the way down. OmegaConf's containers resolve their own references when they are read."""
    items = getattr(value, "items", None)
    if items is not None and hasattr(value, "keys"):
        return {str(key): _plain(part) for key, part in items()}
    if dataclasses.is_dataclass(value) or type(value).__name__ in ("SimpleNamespace", "Namespace"):
        return {key: _plain(part) for key, part in vars(value).items()}
    if isinstance(value, list | tuple) or (isinstance(value, Sequence) and type(value).__name__ == "ListConfig"):
        return [_plain(part) for part in value]
    return value


def _leaves(value: object, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what the table knows, or of the innermost values."""
    known_whole = key in TABLE and not any(other.startswith(f"{key}.") for other in TABLE)
    if isinstance(value, dict) and value and not known_whole:
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}" if key else name)
    elif known_whole or (key and value != {}):
        yield key, value


def _problems(key: str, value: object) -> Iterator[Problem]:
    entry = entry_of(key)
    if entry is None and value is None and any(other.startswith(f"{key}.") for other in TABLE):
        return  # an empty section
    if entry is None:
        near = difflib.get_close_matches(key, TABLE, n=1, cutoff=0.5)
        last = [k for k in TABLE if k.rpartition(".")[2] == key.rpartition(".")[2]]
        nearest = next(iter([*last[:1], *near]), None)
        do = "leave it out" + (f", or write {nearest!r} if you mean that" if nearest else "")
        yield Problem(key, f"{value!r:.80}", "no key of that name is translated", do)
    elif isinstance(entry, Restricted) and not _is_built(value, entry.values):
        name = next((name for mark, name in _NAMES.items() if mark in str(value).lower()), None)
        found = f"{name} is not built here" if name else "this value is not built here"
        yield Problem(key, f"{value!r:.80}", found, entry.instead)
    elif key == "trainer.logger":
        for name in _listed(value):
            if name not in _MONITORS:
                yield Problem(key, repr(name), "no monitor of that name", f"use some of {', '.join(_MONITORS)}")


def _is_built(value: object, values: tuple[Any, ...]) -> bool:
    off = None in values and True not in values and _off(value)
    return value is None or off or value in values


def _off(value: object) -> bool:
    """Whether a value is the same as unset: false, 0, empty, or a mapping of such."""
    if isinstance(value, dict):
        return all(_off(part) for part in value.values())
    return value is None or value is False or value in (0, "", "null", [])


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --------------------------------------------------------------------------- sections


def translated(verl: VerlConfig, *, rows: int, has_validation: bool, device: str) -> dict[str, Any]:
    """The RunConfig as a mapping, all but its tasks. `rows` is the size of the training set.

    Raises ConfigError with everything that does not fit together.
    """
    problems: list[Problem] = []
    steps = total_steps(verl, rows)
    run: dict[str, Any] = {
        "run": {
            "dir": run_dir_of(verl),
            "seed": verl["data.seed"] or 0,
            "resume": verl["trainer.resume_mode"] != "disable",
        },
        "model": {"kind": "hf", "path": verl["actor_rollout_ref.model.path"]},
        "engine": _engine(verl, device),
        "algorithm": _algorithm(verl, problems),
        "train": _train(verl, device, steps),
        "schedule": {
            "steps": steps,
            "groups_per_step": verl["data.train_batch_size"],
            "group_size": verl[f"{_ROLLOUT}.n"],
            "shuffle": bool(verl["data.shuffle"]),
        },
        "checkpoint": _checkpoint(verl),
        "monitors": _monitors(verl),
    }
    if has_validation:
        run["evaluation"] = _evaluation(verl)
    problems += _conflicts(verl, has_validation)
    if problems:
        raise ConfigError(
            "a config whose keys fit together", f"{len(problems)} problem(s)", "fix them all at once:", problems
        )
    return run


def run_dir_of(verl: VerlConfig) -> str:
    """Where the run keeps everything."""
    named = f"checkpoints/{verl['trainer.project_name']}/{verl['trainer.experiment_name']}"
    return verl["trainer.default_local_dir"] or named


def total_steps(verl: VerlConfig, rows: int) -> int:
    """The train steps that are set, else whole batches per epoch times epochs. What is left of an epoch is dropped.

    Raises ConfigError where there is no whole batch.
    """
    batch = verl["data.train_batch_size"]
    if rows < batch:
        raise ConfigError(
            f"a batch of {batch} prompts (data.train_batch_size)",
            f"the training set has {rows} (after filtering)",
            "lower data.train_batch_size, or give more rows",
        )
    return int(verl["trainer.total_training_steps"] or rows // batch * verl["trainer.total_epochs"])


def _conflicts(verl: VerlConfig, has_validation: bool) -> Iterator[Problem]:
    """Keys that contradict each other, and keys that ask for what the others leave out."""
    batch, mini = verl["data.train_batch_size"], verl[f"{_ACTOR}.ppo_mini_batch_size"]
    if verl.has(f"{_ACTOR}.ppo_mini_batch_size") and (mini > batch or batch % mini):
        yield Problem(
            f"{_ACTOR}.ppo_mini_batch_size",
            f"mini-batches of {mini} prompts",
            f"a step has {batch} (data.train_batch_size)",
            "make it a divisor of data.train_batch_size",
        )
    yield from _critic_follows(verl)
    yield from _model_conflicts(verl)
    yield from _reward_manager_conflicts(verl)
    yield from _trainer_conflicts(verl, has_validation)


def _model_conflicts(verl: VerlConfig) -> Iterator[Problem]:
    path, critic = verl["actor_rollout_ref.model.path"], verl.values.get("critic.model.path")
    has_critic = verl["algorithm.adv_estimator"] == "gae"
    if not path:
        yield Problem("actor_rollout_ref.model.path", "a model", "nothing", "name a Hugging Face directory")
    if critic is not None and critic != path and has_critic:
        yield Problem(
            "critic.model.path",
            repr(critic),
            f"the actor's model is {path!r}",
            "the critic is the actor's backbone with a value head: name the same, or leave it out",
        )
    if verl.has("critic.enable") and bool(verl["critic.enable"]) != has_critic:
        yield Problem(
            "critic.enable",
            repr(verl["critic.enable"]),
            f"adv_estimator is {verl['algorithm.adv_estimator']!r}",
            "a critic is trained where the estimator reads values (gae), and nowhere else: leave it out",
        )
    tokenizer = verl["reward_model.model.input_tokenizer"]
    if tokenizer not in (None, path):
        yield Problem(
            "reward_model.model.input_tokenizer",
            repr(tokenizer),
            f"the actor's model is {path!r}",
            "the reward model reads the policy's tokens: name the same, or leave it out",
        )


def _reward_manager_conflicts(verl: VerlConfig) -> Iterator[Problem]:
    keys = [f"{section}reward_manager{name}" for section in ("", "reward_model.") for name in ("", ".name")]
    managers = {repr(verl.values[key]) for key in keys if verl.has(key)}
    if len(managers) > 1:
        yield Problem(
            "reward_manager",
            " and ".join(sorted(managers)),
            "more than one reward manager is named",
            "set reward_model.reward_manager or reward_manager.name alone, or the same in both",
        )


def _trainer_conflicts(verl: VerlConfig, has_validation: bool) -> Iterator[Problem]:
    mode = verl["trainer.resume_mode"]
    if mode not in ("auto", "disable", "resume_path"):
        yield Problem("trainer.resume_mode", repr(mode), "no such mode", "use auto, disable or resume_path")
    elif (mode == "resume_path") != verl.has("trainer.resume_from_path"):
        yield Problem(
            "trainer.resume_from_path",
            repr(verl["trainer.resume_from_path"]),
            f"resume_mode is {mode!r}",
            "set both: resume_mode: resume_path, and the checkpoint's directory",
        )
    for key in () if has_validation else ("trainer.test_freq", "trainer.val_only"):
        if verl.has(key) and verl[key] not in (-1, False):
            do = "name data.val_files, or pass val_dataset"
            yield Problem(key, repr(verl[key]), "there is no validation set", do)
    keeps = {verl.values.get(f"trainer.max_{role}_ckpt_to_keep") for role in ("actor", "critic")} - {None}
    if len(keeps) > 1:
        yield Problem(
            "trainer.max_critic_ckpt_to_keep",
            "another number than the actor's",
            "a checkpoint holds both",
            "set max_actor_ckpt_to_keep alone",
        )


def _critic_follows(verl: VerlConfig) -> Iterator[Problem]:
    """Keys of a critic that is trained and that ask for something else than the actor's."""
    if verl["algorithm.adv_estimator"] != "gae":
        return
    clip = "grad_clip" if verl.has("critic.grad_clip") else "optim.clip_grad"
    actors = {
        "ppo_mini_batch_size": verl[f"{_ACTOR}.ppo_mini_batch_size"],
        "ppo_epochs": verl[f"{_ACTOR}.ppo_epochs"],
        clip: _max_grad_norm(verl),
        "ulysses_sequence_parallel_size": _sequence_parallel(verl),
    }
    for name, actor in actors.items():
        mine = verl.values.get(f"critic.{name}")
        if mine is not None and mine != actor:
            yield Problem(f"critic.{name}", repr(mine), f"the actor has {actor!r}", "the critic follows the actor")


def _max_grad_norm(verl: VerlConfig) -> object:
    return verl.first(f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad")


def _sequence_parallel(verl: VerlConfig) -> object:
    name = "ulysses_sequence_parallel_size"
    return verl.first(f"{_ACTOR}.{name}", f"{_ACTOR}.fsdp_config.{name}")


def _engine(verl: VerlConfig, device: str) -> dict[str, Any]:
    engine: dict[str, Any] = {"kind": "torch", "device": device, "sampling": _sampling(verl, _ROLLOUT)}
    for key, name in (("max_model_len", "max_context"), ("max_num_seqs", "max_rows")):
        if verl.has(f"{_ROLLOUT}.{key}"):
            engine[name] = verl[f"{_ROLLOUT}.{key}"]
    dtype = verl[f"{_ROLLOUT}.dtype"]
    engine["dtype"] = _DTYPES.get(str(dtype), dtype) if dtype else "float32" if device == "cpu" else "bfloat16"
    return engine


def _sampling(verl: VerlConfig, where: str) -> dict[str, Any]:
    return {
        "max_new_tokens": verl["data.max_response_length"],
        "temperature": verl[f"{where}.temperature"],
        "top_p": verl[f"{where}.top_p"],
        "top_k": max(0, verl[f"{where}.top_k"]),
    }


def _evaluation(verl: VerlConfig) -> dict[str, Any]:
    where = f"{_ROLLOUT}.val_kwargs"
    sampling, samples = _sampling(verl, where), verl[f"{where}.n"]
    if not verl[f"{where}.do_sample"]:
        sampling["temperature"] = 0.0
    powers = tuple(2**power for power in range(int(math.log2(samples)) + 1))
    return {
        "taskset": "val",
        "every": max(0, verl["trainer.test_freq"]),
        "samples": samples,
        "k": tuple(dict.fromkeys((*powers, samples))),
        "sampling": sampling,
    }


def _checkpoint(verl: VerlConfig) -> dict[str, Any]:
    keep = verl.first("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep")
    checkpoint: dict[str, Any] = {"save_every": max(0, verl["trainer.save_freq"]), "keep": keep or _KEEP_ALL}
    if verl.has("trainer.default_hdfs_dir"):
        checkpoint["remote"] = verl["trainer.default_hdfs_dir"]
    return checkpoint


def _monitors(verl: VerlConfig) -> list[dict[str, Any]]:
    project, experiment = verl["trainer.project_name"], verl["trainer.experiment_name"]
    about = {
        "wandb": {"project": project, "name": experiment},
        "mlflow": {"experiment": project, "name": experiment},
    }
    names = [_MONITORS[name] for name in _listed(verl["trainer.logger"])]
    return [{"kind": name, **about.get(name, {})} for name in dict.fromkeys([*names, "jsonl"])]


def _train(verl: VerlConfig, device: str, steps: int) -> dict[str, Any]:
    fsdp, model = f"{_ACTOR}.fsdp_config", "actor_rollout_ref.model"
    dtype = verl.first(f"{fsdp}.dtype", f"{fsdp}.mixed_precision.param_dtype")
    dtype = dtype or ("fp32" if device == "cpu" else "bf16")
    train: dict[str, Any] = {
        "kind": "torch",
        "device": device,
        "dtype": _DTYPES.get(str(dtype), dtype),
        "max_tokens_per_micro_batch": verl[f"{_ACTOR}.ppo_max_token_len_per_gpu"],
        "gradient_checkpointing": bool(verl[f"{model}.enable_gradient_checkpointing"]),
        "max_grad_norm": _max_grad_norm(verl),
        "optimizer": _optimizer(verl, f"{_ACTOR}.optim", steps),
    }
    if verl["algorithm.adv_estimator"] == "gae":
        train["critic_optimizer"] = _optimizer(verl, "critic.optim", steps)
    if (sequence := _sequence_parallel(verl)) != 1:
        train["sequence_parallel"] = sequence
    if any(verl[f"{fsdp}.{name}"] for name in ("param_offload", "optimizer_offload", "offload_policy")):
        train["cpu_offload"] = True
    if verl[f"{fsdp}.fsdp_size"] > 0:
        train["shard"] = verl[f"{fsdp}.fsdp_size"]
    if verl[f"{model}.lora_rank"]:
        targets = verl[f"{model}.target_modules"]
        train["lora"] = {"rank": verl[f"{model}.lora_rank"], "alpha": verl[f"{model}.lora_alpha"]}
        train["lora"] |= {} if targets == "all-linear" else {"targets": targets}
    return train


def _optimizer(verl: VerlConfig, where: str, steps: int) -> dict[str, Any]:
    optimizer = {name: verl[f"{where}.{name}"] for name in ("lr", "betas", "weight_decay", "min_lr_ratio")}
    optimizer["schedule"] = verl.first(f"{where}.lr_scheduler_type", f"{where}.warmup_style")
    warmup = verl[f"{where}.lr_warmup_steps"]
    optimizer["warmup_steps"] = warmup if warmup >= 0 else int(verl[f"{where}.lr_warmup_steps_ratio"] * steps)
    return optimizer


# --------------------------------------------------------------------------- the algorithm


def _algorithm(verl: VerlConfig, problems: list[Problem]) -> dict[str, Any]:
    estimator = str(verl["algorithm.adv_estimator"])
    kind, loss = _ESTIMATORS.get(estimator, estimator), _policy_loss(verl)
    algorithm: dict[str, Any] = {
        "kind": "ppo" if kind == "gae" else "grpo",
        "advantage": {"kind": kind, **_estimator_options(verl, kind, problems)},
        "policy_loss": loss,
        "aggregate": "seq-mean-token-mean" if loss["kind"] in _PER_SEQUENCE else verl[f"{_ACTOR}.loss_agg_mode"],
        "epochs": verl[f"{_ACTOR}.ppo_epochs"],
        "mini_batches": max(1, verl["data.train_batch_size"] // verl[f"{_ACTOR}.ppo_mini_batch_size"]),
    }
    if verl[f"{_ACTOR}.entropy_coeff"]:
        algorithm["entropy"] = {"coef": verl[f"{_ACTOR}.entropy_coeff"]}
    if kl := _kl(verl, problems):
        algorithm["kl"] = kl
    if kind == "gae":
        algorithm["critic"] = {
            "clip": verl["critic.cliprange_value"],
            "aggregate": verl.first("critic.loss_agg_mode", f"{_ACTOR}.loss_agg_mode"),
        }
        if verl["trainer.critic_warmup"]:
            algorithm["critic_warmup"] = verl["trainer.critic_warmup"]
    elif verl["trainer.critic_warmup"]:
        problems.append(
            Problem(
                "trainer.critic_warmup",
                str(verl["trainer.critic_warmup"]),
                f"adv_estimator {estimator!r} has no critic",
                "leave it out, or use gae",
            )
        )
    return algorithm | _correction(verl, loss, problems)


def _estimator_options(verl: VerlConfig, kind: str, problems: list[Problem]) -> dict[str, Any]:
    """gamma, lam and the normalisation where the estimator has them; elsewhere they must not be set."""
    has = {
        "gae": ("gamma", "lam"),
        "reinforce_plus_plus": ("gamma",),
        "grpo": ("norm_adv_by_std_in_grpo",),
        "grpo_passk": ("norm_adv_by_std_in_grpo",),
    }.get(kind, ())
    options: dict[str, Any] = {}
    for name, to in (("gamma", "gamma"), ("lam", "lam"), ("norm_adv_by_std_in_grpo", "norm_by_std")):
        value, default = verl[f"algorithm.{name}"], default_of(f"algorithm.{name}")
        if name in has:
            options[to] = value
        elif value != default and not (name == "lam" and kind == "reinforce_plus_plus"):
            problems.append(
                Problem(
                    f"algorithm.{name}",
                    repr(value),
                    f"adv_estimator {kind!r} does not read it",
                    "leave it out, or use another estimator",
                )
            )
    return options


def _policy_loss(verl: VerlConfig) -> dict[str, Any]:
    mode = str(verl[f"{_ACTOR}.policy_loss.loss_mode"])
    loss: dict[str, Any] = {"kind": _LOSSES.get(mode, mode)}
    clips = {
        "clip_low": verl.first(f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio"),
        "clip_high": verl.first(f"{_ACTOR}.clip_ratio_high", f"{_ACTOR}.clip_ratio"),
    }
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "ppo": lambda: clips | {"dual_clip": verl[f"{_ACTOR}.clip_ratio_c"]},
        "gspo": lambda: clips,
        "gmpo": lambda: clips,
        "cispo": lambda: clips,
        "clip_cov": lambda: (
            clips | _policy_loss_options(verl, clip_cov_ratio="ratio", clip_cov_lb="cov_low", clip_cov_ub="cov_high")
        ),
        "kl_cov": lambda: _policy_loss_options(verl, kl_cov_ratio="ratio", ppo_kl_coef="coef"),
        "sapo": lambda: {k: verl[f"{_ACTOR}.{k}"] for k in ("tau_pos", "tau_neg") if verl.has(f"{_ACTOR}.{k}")},
    }
    return loss | (own[loss["kind"]]() if loss["kind"] in own else {})


def _policy_loss_options(verl: VerlConfig, **names: str) -> dict[str, Any]:
    where = f"{_ACTOR}.policy_loss"
    return {to: verl[f"{where}.{name}"] for name, to in names.items() if verl.has(f"{where}.{name}")}


def _kl(verl: VerlConfig, problems: list[Problem]) -> dict[str, Any]:
    in_loss, in_reward = bool(verl[f"{_ACTOR}.use_kl_loss"]), bool(verl["algorithm.use_kl_in_reward"])
    if in_loss and in_reward:
        problems.append(
            Problem(
                f"{_ACTOR}.use_kl_loss",
                "a KL penalty in the loss",
                "algorithm.use_kl_in_reward asks for another one",
                "use one of the two: the same distance would be paid for twice",
            )
        )
    if in_loss:
        coef = verl[f"{_ACTOR}.kl_loss_coef"]
        return {"coef": coef, "place": "loss", "estimator": {"kind": verl[f"{_ACTOR}.kl_loss_type"]}} if coef else {}
    if not in_reward or not verl["algorithm.kl_ctrl.kl_coef"]:
        return {}
    kl = {
        "coef": verl["algorithm.kl_ctrl.kl_coef"],
        "place": "reward",
        "estimator": {"kind": verl["algorithm.kl_penalty"]},
    }
    if verl["algorithm.kl_ctrl.type"] == "adaptive":
        kl |= {
            "controller": "adaptive",
            "target": verl["algorithm.kl_ctrl.target_kl"],
            "horizon": verl["algorithm.kl_ctrl.horizon"],
        }
    return kl


def _correction(verl: VerlConfig, loss: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Where the old log-probabilities come from, and what is done about the engine's being others."""
    where = "algorithm.rollout_correction"
    weights, bounds = verl[f"{where}.rollout_is"], _rejection(verl, problems)
    bypass = verl[f"{where}.bypass_mode"] or verl[f"{_ACTOR}.use_rollout_log_probs"]
    correction: dict[str, Any] = {"against": "current" if bypass else "old"}
    if weights:
        correction |= {"weights": weights, **_weight_bounds(verl[f"{where}.rollout_is_threshold"])}
        correction["normalise"] = bool(verl[f"{where}.rollout_is_batch_normalize"])
    if bounds:
        correction["rejection"] = bounds
    active = {"correction": {"kind": "custom", **correction}} if weights or bounds else {"correction": "none"}
    if not bypass:
        # verl scores the old log-probabilities with the actor before every step, wherever a loss reads them.
        return active | ({} if loss["kind"] == "reinforce" else {"old_log_prob": "recompute"})
    if verl[f"{where}.loss_type"] == "reinforce":
        return active | {"policy_loss": {"kind": "reinforce"}}
    if weights:  # PPO's ratio against the engine is the importance weight
        active = {"correction": {"kind": "custom", "against": "current", "rejection": bounds} if bounds else "none"}
    return active | {"old_log_prob": "rollout"}


def _weight_bounds(threshold: object) -> dict[str, Any]:
    """`0.5_5.0` zeroes weights outside the interval, one number truncates them from above."""
    low, is_interval, high = str(threshold).partition("_")
    return {"threshold": [low, high], "outside": "mask"} if is_interval else {"threshold": threshold}


def _rejection(verl: VerlConfig, problems: list[Problem]) -> dict[str, Any]:
    """`{option: bound or (low, high)}` from verl's comma lists; `0.5_2.0` is an interval."""
    where = "algorithm.rollout_correction.rollout_rs"
    if not verl.has(where):
        return {}
    options = [option.strip() for option in str(verl[where]).split(",")]
    bounds = [bound.strip() for bound in str(verl[f"{where}_threshold"] or "").split(",") if bound.strip()]
    try:
        numbers = [tuple(float(part) for part in bound.split("_")) for bound in bounds]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= len(options)
    if len(numbers) != len(options):
        problems.append(
            Problem(
                f"{where}_threshold",
                repr(verl[f"{where}_threshold"]),
                f"rollout_rs has {len(options)} option(s)",
                "give one number, or low_high, for each (or one for all)",
            )
        )
        return {}
    return {o: pair if len(pair) == 2 else pair[0] for o, pair in zip(options, numbers, strict=True)}
