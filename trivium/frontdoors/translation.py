"""The original trainer's config as a RunConfig: what each key of `keys.TABLE` becomes.

Everything that cannot be translated is reported at once, by name, before anything is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trivium.errors import ConfigError, Problem
from trivium.frontdoors.keys import TABLE, Only, default_of, entry_of

_ACTOR = "actor_rollout_ref.actor"
_KEEP_ALL = 1_000_000
_NAMES = {
    "verl_megatron": "Megatron", "megatron": "Megatron", "sglang": "SGLang", "vllm": "vLLM", "trtllm": "TensorRT-LLM",
}  # fmt: skip
"""How what is not built is called."""
_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Estimators that the original has twice."""
_LOSSES = {"vanilla": "ppo", "gpg": "reinforce", "geo_mean": "gmpo"}
"""Policy losses that have another name here."""
_PER_SEQUENCE = ("gspo", "sapo", "gmpo")
"""Losses that the original averages over sequences whatever is said."""
_MONITORS = {"console": "console", "file": "jsonl", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_DTYPES = {
    "fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp64": "float64",
    "float64": "float64",
}  # fmt: skip


class Said:
    """What a config of the original's shape says: values by dotted key, checked against the table."""

    def __init__(self, config: Any) -> None:
        """`config` is a mapping, an OmegaConf container, or an object with attributes; values may nest.

        Raises ConfigError with everything in it that cannot be translated.
        """
        self.values = dict(_leaves(_plain(config), ""))
        problems = [problem for key, value in self.values.items() for problem in _problems(key, value)]
        if problems:
            raise ConfigError(
                "a config that can be translated", f"{len(problems)} problem(s)", "mend them all at once:", problems
            )

    def __getitem__(self, key: str) -> Any:
        """The value of a key of the table, or what the original takes where it is not said."""
        value = self.values.get(key)
        return default_of(key) if value is None else value

    def says(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.values.get(key) is not None

    def first(self, *keys: str) -> Any:
        """The value of the first of these keys that is said, else the first default that there is."""
        said = [self.values[key] for key in keys if self.says(key)]
        return next(iter([*said, *(default for key in keys if (default := default_of(key)) is not None)]), None)


def _plain(value: Any) -> Any:
    """Mappings all the way down. OmegaConf's containers resolve their own references when they are read."""
    if isinstance(value, Mapping) or (hasattr(value, "items") and hasattr(value, "keys")):
        return {str(key): _plain(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) or type(value).__name__ in ("SimpleNamespace", "Namespace"):
        return {key: _plain(part) for key, part in vars(value).items()}
    if isinstance(value, list | tuple) or type(value).__name__ == "ListConfig":
        return [_plain(part) for part in value]
    return value


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what the table knows, or of the innermost values."""
    known_whole = key in TABLE and not any(other.startswith(f"{key}.") for other in TABLE)
    if isinstance(value, dict) and value and not known_whole:
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}" if key else name)
    elif known_whole or (key and value != {}):
        yield key, value


def _problems(key: str, value: Any) -> Iterator[Problem]:
    entry = entry_of(key)
    if entry is None and value is None and any(other.startswith(f"{key}.") for other in TABLE):
        return  # a section that says nothing
    if entry is None:
        near = difflib.get_close_matches(key, TABLE, n=1, cutoff=0.5)
        last = [k for k in TABLE if k.rpartition(".")[2] == key.rpartition(".")[2]]
        nearest = next(iter([*last[:1], *near]), None)
        do = "leave it out" + (f", or say {nearest!r} if you mean that" if nearest else "")
        yield Problem(key, f"{value!r:.80}", "no key of that name is translated", do)
    elif isinstance(entry, Only) and not _is_built(value, entry.values):
        name = next((name for mark, name in _NAMES.items() if mark in str(value).lower()), None)
        found = f"{name} is not built here" if name else "this value is not built here"
        yield Problem(key, f"{value!r:.80}", found, entry.instead)
    elif key == "trainer.logger":
        for name in _listed(value):
            if name not in _MONITORS:
                yield Problem(key, repr(name), "no monitor of that name", f"use some of {', '.join(_MONITORS)}")


def _is_built(value: Any, values: tuple[Any, ...]) -> bool:
    off = None in values and True not in values and _off(value)
    return value is None or off or value in values


def _off(value: Any) -> bool:
    """Whether a value says nothing: false, 0, empty, or a mapping of such."""
    if isinstance(value, dict):
        return all(_off(part) for part in value.values())
    return value is None or value is False or value in (0, "", "null", [])


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --------------------------------------------------------------------------- sections


def translated(said: Said, *, rows: int, has_validation: bool, device: str) -> dict[str, Any]:
    """The RunConfig as a mapping, all but its tasks. `rows` is the size of the training set.

    Raises ConfigError with everything that does not fit together.
    """
    problems: list[Problem] = []
    steps = total_steps(said, rows)
    run: dict[str, Any] = {
        "run": {
            "dir": run_dir_of(said), "seed": said["data.seed"] or 0,
            "resume": said["trainer.resume_mode"] != "disable",
        },
        "model": {"kind": "hf", "path": said["actor_rollout_ref.model.path"]},
        "engine": _engine(said, device),
        "algorithm": _algorithm(said, problems),
        "train": _train(said, device, steps),
        "schedule": {
            "steps": steps, "groups_per_step": said["data.train_batch_size"],
            "group_size": said["actor_rollout_ref.rollout.n"], "shuffle": bool(said["data.shuffle"]),
        },
        "checkpoint": _checkpoint(said),
        "monitors": _monitors(said),
    }  # fmt: skip
    if has_validation:
        run["evaluation"] = _evaluation(said)
    problems += _company(said, has_validation)
    if problems:
        raise ConfigError(
            "a config whose keys fit together", f"{len(problems)} problem(s)", "mend them all at once:", problems
        )
    return run


def run_dir_of(said: Said) -> str:
    """Where the run keeps everything."""
    named = f"checkpoints/{said['trainer.project_name']}/{said['trainer.experiment_name']}"
    return said["trainer.default_local_dir"] or named


def total_steps(said: Said, rows: int) -> int:
    """The train steps that are said, else whole batches per epoch times epochs. What is left of an epoch is dropped.

    Raises ConfigError where there is no whole batch.
    """
    batch = said["data.train_batch_size"]
    if rows < batch:
        raise ConfigError(
            f"a batch of {batch} prompts (data.train_batch_size)", f"the training set has {rows} (after filtering)",
            "lower data.train_batch_size, or give more rows",
        )  # fmt: skip
    return int(said["trainer.total_training_steps"] or rows // batch * said["trainer.total_epochs"])


def _company(said: Said, has_validation: bool) -> Iterator[Problem]:
    """Keys that contradict each other, and keys that ask for what the others leave out."""
    batch, mini = said["data.train_batch_size"], said["actor_rollout_ref.actor.ppo_mini_batch_size"]
    if said.says("actor_rollout_ref.actor.ppo_mini_batch_size") and (mini > batch or batch % mini):
        yield Problem(
            "actor_rollout_ref.actor.ppo_mini_batch_size", f"mini-batches of {mini} prompts",
            f"a step has {batch} (data.train_batch_size)", "make it a divisor of data.train_batch_size",
        )  # fmt: skip
    yield from _critic_follows(said)
    path, critic = said["actor_rollout_ref.model.path"], said.values.get("critic.model.path")
    if not path:
        yield Problem("actor_rollout_ref.model.path", "a model", "nothing", "name a Hugging Face directory")
    if critic is not None and critic != path and said["algorithm.adv_estimator"] == "gae":
        yield Problem(
            "critic.model.path", repr(critic), f"the actor's model is {path!r}",
            "the critic is the actor's backbone with a value head: name the same, or leave it out",
        )  # fmt: skip
    if said.says("critic.enable") and bool(said["critic.enable"]) != (said["algorithm.adv_estimator"] == "gae"):
        yield Problem(
            "critic.enable", repr(said["critic.enable"]), f"adv_estimator is {said['algorithm.adv_estimator']!r}",
            "a critic is trained where the estimator reads values (gae), and nowhere else: leave it out",
        )  # fmt: skip
    tokenizer = said["reward_model.model.input_tokenizer"]
    if tokenizer not in (None, path):
        yield Problem(
            "reward_model.model.input_tokenizer", repr(tokenizer), f"the actor's model is {path!r}",
            "the reward model reads the policy's tokens: name the same, or leave it out",
        )  # fmt: skip
    named = [f"{where}reward_manager{name}" for where in ("", "reward_model.") for name in ("", ".name")]
    managers = {repr(said.values[key]) for key in named if said.says(key)}
    if len(managers) > 1:
        yield Problem(
            "reward_manager", " and ".join(sorted(managers)), "more than one reward manager is named",
            "say reward_model.reward_manager or reward_manager.name alone, or the same in both",
        )  # fmt: skip
    mode = said["trainer.resume_mode"]
    if mode not in ("auto", "disable", "resume_path"):
        yield Problem("trainer.resume_mode", repr(mode), "no such mode", "use auto, disable or resume_path")
    elif (mode == "resume_path") != said.says("trainer.resume_from_path"):
        yield Problem(
            "trainer.resume_from_path", repr(said["trainer.resume_from_path"]), f"resume_mode is {mode!r}",
            "say both: resume_mode: resume_path, and the checkpoint's directory",
        )  # fmt: skip
    if not has_validation:
        for name in ("test_freq", "val_only"):
            if said.says(f"trainer.{name}") and said[f"trainer.{name}"] not in (-1, False):
                yield Problem(
                    f"trainer.{name}", repr(said[f"trainer.{name}"]), "there is no validation set",
                    "name data.val_files, or pass val_dataset",
                )  # fmt: skip
    keeps = {said.values.get(f"trainer.max_{role}_ckpt_to_keep") for role in ("actor", "critic")} - {None}
    if len(keeps) > 1:
        yield Problem(
            "trainer.max_critic_ckpt_to_keep", "another number than the actor's", "a checkpoint holds both",
            "say max_actor_ckpt_to_keep alone",
        )  # fmt: skip


def _critic_follows(said: Said) -> Iterator[Problem]:
    """Keys of a critic that is trained and that ask for something else than the actor's."""
    if said["algorithm.adv_estimator"] != "gae":
        return
    clip = "grad_clip" if said.says("critic.grad_clip") else "optim.clip_grad"
    actors = {
        "ppo_mini_batch_size": said[f"{_ACTOR}.ppo_mini_batch_size"], "ppo_epochs": said[f"{_ACTOR}.ppo_epochs"],
        clip: _max_grad_norm(said), "ulysses_sequence_parallel_size": _sequence_parallel(said),
    }  # fmt: skip
    for name, actor in actors.items():
        mine = said.values.get(f"critic.{name}")
        if mine is not None and mine != actor:
            yield Problem(f"critic.{name}", repr(mine), f"the actor has {actor!r}", "the critic follows the actor")


def _max_grad_norm(said: Said) -> Any:
    return said.first(f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad")


def _sequence_parallel(said: Said) -> Any:
    name = "ulysses_sequence_parallel_size"
    return said.first(f"{_ACTOR}.{name}", f"{_ACTOR}.fsdp_config.{name}")


def _engine(said: Said, device: str) -> dict[str, Any]:
    rollout = "actor_rollout_ref.rollout"
    engine: dict[str, Any] = {"kind": "torch", "device": device, "sampling": _sampling(said, rollout)}
    for key, name in (("max_model_len", "max_context"), ("max_num_seqs", "max_rows")):
        if said.says(f"{rollout}.{key}"):
            engine[name] = said[f"{rollout}.{key}"]
    dtype = said[f"{rollout}.dtype"]
    engine["dtype"] = _DTYPES.get(str(dtype), dtype) if dtype else "float32" if device == "cpu" else "bfloat16"
    return engine


def _sampling(said: Said, where: str) -> dict[str, Any]:
    return {
        "max_new_tokens": said["data.max_response_length"], "temperature": said[f"{where}.temperature"],
        "top_p": said[f"{where}.top_p"], "top_k": max(0, said[f"{where}.top_k"]),
    }  # fmt: skip


def _evaluation(said: Said) -> dict[str, Any]:
    where = "actor_rollout_ref.rollout.val_kwargs"
    sampling, samples = _sampling(said, where), said[f"{where}.n"]
    if not said[f"{where}.do_sample"]:
        sampling["temperature"] = 0.0
    powers = tuple(2**power for power in range(int(math.log2(samples)) + 1))
    return {
        "taskset": "val", "every": max(0, said["trainer.test_freq"]), "samples": samples,
        "k": tuple(dict.fromkeys((*powers, samples))), "sampling": sampling,
    }  # fmt: skip


def _checkpoint(said: Said) -> dict[str, Any]:
    keep = said.first("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep")
    checkpoint: dict[str, Any] = {"save_every": max(0, said["trainer.save_freq"]), "keep": keep or _KEEP_ALL}
    if said.says("trainer.default_hdfs_dir"):
        checkpoint["remote"] = said["trainer.default_hdfs_dir"]
    return checkpoint


def _monitors(said: Said) -> list[dict[str, Any]]:
    project, experiment = said["trainer.project_name"], said["trainer.experiment_name"]
    about = {
        "wandb": {"project": project, "name": experiment},
        "mlflow": {"experiment": project, "name": experiment},
    }
    names = [_MONITORS[name] for name in _listed(said["trainer.logger"])]
    return [{"kind": name, **about.get(name, {})} for name in dict.fromkeys([*names, "jsonl"])]


def _train(said: Said, device: str, steps: int) -> dict[str, Any]:
    fsdp, model = f"{_ACTOR}.fsdp_config", "actor_rollout_ref.model"
    dtype = said.first(f"{fsdp}.dtype", f"{fsdp}.mixed_precision.param_dtype")
    dtype = dtype or ("fp32" if device == "cpu" else "bf16")
    train: dict[str, Any] = {
        "kind": "torch", "device": device, "dtype": _DTYPES.get(str(dtype), dtype),
        "max_tokens_per_micro_batch": said[f"{_ACTOR}.ppo_max_token_len_per_gpu"],
        "gradient_checkpointing": bool(said[f"{model}.enable_gradient_checkpointing"]),
        "max_grad_norm": _max_grad_norm(said),
        "optimizer": _optimizer(said, f"{_ACTOR}.optim", steps),
    }  # fmt: skip
    if said["algorithm.adv_estimator"] == "gae":
        train["critic_optimizer"] = _optimizer(said, "critic.optim", steps)
    if (sequence := _sequence_parallel(said)) != 1:
        train["sequence_parallel"] = sequence
    if any(said[f"{fsdp}.{name}"] for name in ("param_offload", "optimizer_offload", "offload_policy")):
        train["cpu_offload"] = True
    if said[f"{fsdp}.fsdp_size"] > 0:
        train["shard"] = said[f"{fsdp}.fsdp_size"]
    if said[f"{model}.lora_rank"]:
        targets = said[f"{model}.target_modules"]
        train["lora"] = {"rank": said[f"{model}.lora_rank"], "alpha": said[f"{model}.lora_alpha"]}
        train["lora"] |= {} if targets == "all-linear" else {"targets": targets}
    return train


def _optimizer(said: Said, where: str, steps: int) -> dict[str, Any]:
    optimizer = {name: said[f"{where}.{name}"] for name in ("lr", "betas", "weight_decay", "min_lr_ratio")}
    optimizer["schedule"] = said.first(f"{where}.lr_scheduler_type", f"{where}.warmup_style")
    warmup = said[f"{where}.lr_warmup_steps"]
    optimizer["warmup_steps"] = warmup if warmup >= 0 else int(said[f"{where}.lr_warmup_steps_ratio"] * steps)
    return optimizer


# --------------------------------------------------------------------------- the algorithm


def _algorithm(said: Said, problems: list[Problem]) -> dict[str, Any]:
    actor, estimator = "actor_rollout_ref.actor", str(said["algorithm.adv_estimator"])
    kind, loss = _ESTIMATORS.get(estimator, estimator), _policy_loss(said)
    algorithm: dict[str, Any] = {
        "kind": "ppo" if kind == "gae" else "grpo",
        "advantage": {"kind": kind, **_estimator_options(said, kind, problems)},
        "policy_loss": loss,
        "aggregate": "seq-mean-token-mean" if loss["kind"] in _PER_SEQUENCE else said[f"{actor}.loss_agg_mode"],
        "epochs": said[f"{actor}.ppo_epochs"],
        "mini_batches": max(1, said["data.train_batch_size"] // said[f"{actor}.ppo_mini_batch_size"]),
    }
    if said[f"{actor}.entropy_coeff"]:
        algorithm["entropy"] = {"coef": said[f"{actor}.entropy_coeff"]}
    if kl := _kl(said, problems):
        algorithm["kl"] = kl
    if kind == "gae":
        algorithm["critic"] = {
            "clip": said["critic.cliprange_value"],
            "aggregate": said.first("critic.loss_agg_mode", f"{actor}.loss_agg_mode"),
        }
        if said["trainer.critic_warmup"]:
            algorithm["critic_warmup"] = said["trainer.critic_warmup"]
    elif said["trainer.critic_warmup"]:
        problems.append(
            Problem(
                "trainer.critic_warmup",
                str(said["trainer.critic_warmup"]),
                f"adv_estimator {estimator!r} has no critic",
                "leave it out, or use gae",
            )
        )
    return algorithm | _correction(said, loss, problems)


def _estimator_options(said: Said, kind: str, problems: list[Problem]) -> dict[str, Any]:
    """gamma, lam and the normalisation where the estimator has them; elsewhere they must not be said."""
    has = {
        "gae": ("gamma", "lam"), "reinforce_plus_plus": ("gamma",), "grpo": ("norm_adv_by_std_in_grpo",),
        "grpo_passk": ("norm_adv_by_std_in_grpo",),
    }.get(kind, ())  # fmt: skip
    options: dict[str, Any] = {}
    for name, to in (("gamma", "gamma"), ("lam", "lam"), ("norm_adv_by_std_in_grpo", "norm_by_std")):
        value, default = said[f"algorithm.{name}"], default_of(f"algorithm.{name}")
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


def _policy_loss(said: Said) -> dict[str, Any]:
    actor = "actor_rollout_ref.actor"
    mode = str(said[f"{actor}.policy_loss.loss_mode"])
    loss: dict[str, Any] = {"kind": _LOSSES.get(mode, mode)}
    clips = {
        "clip_low": said.first(f"{actor}.clip_ratio_low", f"{actor}.clip_ratio"),
        "clip_high": said.first(f"{actor}.clip_ratio_high", f"{actor}.clip_ratio"),
    }
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "ppo": lambda: clips | {"dual_clip": said[f"{actor}.clip_ratio_c"]},
        "gspo": lambda: clips,
        "gmpo": lambda: clips,
        "cispo": lambda: clips,
        "clip_cov": lambda: clips | _said_as(said, actor, clip_cov_ratio="ratio", clip_cov_lb="cov_low", clip_cov_ub="cov_high"),  # noqa: E501
        "kl_cov": lambda: _said_as(said, actor, kl_cov_ratio="ratio", ppo_kl_coef="coef"),
        "sapo": lambda: {k: said[f"{actor}.{k}"] for k in ("tau_pos", "tau_neg") if said.says(f"{actor}.{k}")},
    }  # fmt: skip
    return loss | (own[loss["kind"]]() if loss["kind"] in own else {})


def _said_as(said: Said, actor: str, **names: str) -> dict[str, Any]:
    where = f"{actor}.policy_loss"
    return {to: said[f"{where}.{name}"] for name, to in names.items() if said.says(f"{where}.{name}")}


def _kl(said: Said, problems: list[Problem]) -> dict[str, Any]:
    actor = "actor_rollout_ref.actor"
    in_loss, in_reward = bool(said[f"{actor}.use_kl_loss"]), bool(said["algorithm.use_kl_in_reward"])
    if in_loss and in_reward:
        problems.append(
            Problem(
                f"{actor}.use_kl_loss",
                "a KL penalty in the loss",
                "algorithm.use_kl_in_reward asks for another one",
                "use one of the two: the same distance would be paid for twice",
            )
        )
    if in_loss:
        coef = said[f"{actor}.kl_loss_coef"]
        return {"coef": coef, "place": "loss", "estimator": {"kind": said[f"{actor}.kl_loss_type"]}} if coef else {}
    if not in_reward or not said["algorithm.kl_ctrl.kl_coef"]:
        return {}
    kl = {
        "coef": said["algorithm.kl_ctrl.kl_coef"], "place": "reward",
        "estimator": {"kind": said["algorithm.kl_penalty"]},
    }  # fmt: skip
    if said["algorithm.kl_ctrl.type"] == "adaptive":
        kl |= {
            "controller": "adaptive", "target": said["algorithm.kl_ctrl.target_kl"],
            "horizon": said["algorithm.kl_ctrl.horizon"],
        }  # fmt: skip
    return kl


def _correction(said: Said, loss: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Where the old log-probabilities come from, and what is done about the engine's being others."""
    where = "algorithm.rollout_correction"
    weights, bounds = said[f"{where}.rollout_is"], _rejection(said, problems)
    bypass = said[f"{where}.bypass_mode"] or said["actor_rollout_ref.actor.use_rollout_log_probs"]
    correction: dict[str, Any] = {"against": "current" if bypass else "old"}
    if weights:
        correction |= {"weights": weights, "threshold": said[f"{where}.rollout_is_threshold"]}
        correction["normalise"] = bool(said[f"{where}.rollout_is_batch_normalize"])
    if bounds:
        correction["rejection"] = bounds
    active = {"correction": {"kind": "custom", **correction}} if weights or bounds else {"correction": "none"}
    if not bypass:
        # The original scores the old log-probabilities with the actor before every step, wherever a loss reads them.
        return active | ({} if loss["kind"] == "reinforce" else {"old_log_prob": "recompute"})
    if said[f"{where}.loss_type"] == "reinforce":
        return active | {"policy_loss": {"kind": "reinforce"}}
    if weights:  # PPO's ratio against the engine is the importance weight
        active = {"correction": {"kind": "custom", "against": "current", "rejection": bounds} if bounds else "none"}
    return active | {"old_log_prob": "rollout"}


def _rejection(said: Said, problems: list[Problem]) -> dict[str, Any]:
    """`{option: bound or (low, high)}` from the original's comma lists; `0.5_2.0` is an interval."""
    where = "algorithm.rollout_correction.rollout_rs"
    if not said.says(where):
        return {}
    options = [option.strip() for option in str(said[where]).split(",")]
    bounds = [bound.strip() for bound in str(said[f"{where}_threshold"] or "").split(",") if bound.strip()]
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
                repr(said[f"{where}_threshold"]),
                f"rollout_rs has {len(options)} option(s)",
                "give one number, or low_high, for each (or one for all)",
            )
        )
        return {}
    return {o: pair if len(pair) == 2 else pair[0] for o, pair in zip(options, numbers, strict=True)}
