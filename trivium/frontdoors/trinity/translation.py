"""Translates Trinity-RFT's config to a RunConfig, by the keys of `config_table`.

Reports every key that cannot be translated at once, by name, before anything is built.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.config import merged
from trivium.foundation.errors import TriviumError
from trivium.foundation.registry import suggest
from trivium.frontdoors.tables import Settings, TranslatedConfig, refuse
from trivium.frontdoors.trinity.config.algorithm_section import algorithm_of
from trivium.frontdoors.trinity.config.data_section import (
    buffer_of,
    evaluation_of,
    max_context,
    num_rows,
    sampling_of,
    tasks_of,
    workflow_of,
)
from trivium.frontdoors.trinity.config.named_workflows import judged_in_training
from trivium.frontdoors.trinity.config.registries import path_of
from trivium.frontdoors.trinity.config.trinity_config import TrinityConfig
from trivium.models.late import torch
from trivium.models.placement import has_gpu
from trivium.text import hf_tokenizer

_OWN_MONITOR = "trivium.frontdoors.trinity.monitor_views:MonitorOfTrinity"
_MONITORS = ("tensorboard", "wandb", "mlflow")
_STYLES = {
    "fixed": "fixed",
    "trainer_driven": "dynamic_by_trainer",
    "explorer_driven": "dynamic_by_explorer",
    "dynamic_by_trainer": "dynamic_by_trainer",
    "dynamic_by_explorer": "dynamic_by_explorer",
    "fully_async": "fixed",
}
_METHODS = {"nccl": "nccl", "checkpoint": "checkpoint", "memory": "memory", "online": "nccl", "offline": "checkpoint"}
_OF_A_STAGE = (
    "algorithm",
    "tasks",
    "workflow",
    "rewards",
    "engine",
    "train",
    "schedule",
    "sync",
    "buffer",
    "evaluation",
)
"""The sections that differ between stages."""
_ACTOR = "actor_rollout_ref.actor"


def translate(config: object, device: str | None = None) -> TranslatedConfig:
    """Translates a config of Trinity-RFT's shape. `device` is `cpu` or `cuda`; by default, a device of this machine.

    Raises ConfigError with every key that cannot be translated.
    """
    device = device or _device()
    trinity = TrinityConfig(config)
    sections = _sections(trinity, device)
    warmup = _warmup(trinity)
    configs = [*warmup, *([("", trinity.without_warmup())] if warmup else []), *trinity.stage_configs()]
    stages = [(name, TrinityConfig(stage)) for name, stage in configs]
    if stages:
        translated = [_sections(stage, device) for _, stage in stages]
        shared = {name: value for name, value in sections.items() if name not in _OF_A_STAGE}
        shared["run"] = {**shared["run"], "mode": _mode_of_all(trinity, [stage.mode for _, stage in stages])}
        stage_sections = [{name: part.get(name) for name in _OF_A_STAGE if name in part} for part in translated]
        sections = {**shared, "tasks": {}, "stages": stage_sections}
        trinity.problems = []  # settings of the stages are optional outside the stages
    problems = [problem for reader in (trinity, *(stage for _, stage in stages)) for problem in reader.problems]
    # Stages share sections, whose problems each of them finds.
    refuse(dict.fromkeys(problems))
    notes = [note for reader in (trinity, *(stage for _, stage in stages)) for note in reader.all_notes()]
    return TranslatedConfig(sections, tuple(dict.fromkeys(notes)))


def _device() -> str:
    return "cuda" if has_gpu() else "cpu"


def _mode_of_all(trinity: TrinityConfig, modes: list[str]) -> str:
    """Returns the run.mode for stages with these modes. Stages that learn from rows fit any mode."""
    explored = {mode for mode in modes if mode != "train"} or {"both"}
    if explored != {"both"}:
        do = "give every stage mode both or train, or run the stages one after the other"
        trinity.problem("stages", f"the modes {', '.join(sorted(set(modes)))}", "one command runs every stage", do)
    return "both"


def _warmup(trinity: TrinityConfig) -> list[tuple[str, dict[str, Any]]]:
    """Returns the supervised steps before the others, as a stage."""
    steps = trinity["buffer.trainer_input.sft_warmup_steps"]
    return [("sft_warmup", trinity.warmup_config(steps))] if steps else []


def _sections(trinity: TrinityConfig, device: str) -> dict[str, Any]:
    """Returns the RunConfig of one stage as a mapping. Notes problems in `trinity`."""
    workflow = workflow_of(trinity)
    tasks = tasks_of(trinity)
    steps = _steps(trinity, tasks)
    sync = _sync(trinity, device)
    staleness = sync.pop("max_staleness", None)
    sections: dict[str, Any] = {
        "run": _run(trinity),
        "model": _model(trinity),
        "tasks": tasks,
        **workflow,
        "engine": _engine(trinity, device),
        "algorithm": algorithm_of(trinity),
        "train": _train(trinity, device, steps),
        "schedule": _schedule(trinity, steps, staleness),
        "sync": sync,
        "buffer": buffer_of(trinity),
        "evaluation": evaluation_of(trinity, sync.get("interval", 1)),
        "monitors": _monitors(trinity),
        "cluster": _cluster(trinity, device),
    }
    if trinity.mode == "serve" and not trinity.has("explorer.listen_address"):
        trinity.note("serve.host: 127.0.0.1; other machines are admitted with serve.key_variable alone")
    rules = {name: section for name, section in sections.items() if section not in (None, {})}
    return merged(trinity.mapped(), rules)


# --------------------------------------------------------------------------- sections


def _run(trinity: TrinityConfig) -> dict[str, Any]:
    return {
        "dir": trinity.run_dir,
        "name": trinity.run_name,
        # Learning from rows needs no explorer: one command performs the whole run.
        "mode": "both" if trinity.offline and trinity.mode == "train" else trinity.mode,
    }


def _model(trinity: TrinityConfig) -> dict[str, Any]:
    path, critic = trinity["model.model_path"], trinity["model.critic_model_path"]
    if not path and not trinity.is_wrong("model.model_path"):
        trinity.problem("model.model_path", "a model", "nothing", "name a Hugging Face directory")
    if critic not in ("", None, path) and trinity["algorithm.algorithm_type"] == "ppo":
        do = "the critic is the policy's backbone with a value head: name the same, or leave it out"
        trinity.problem("model.critic_model_path", repr(critic), f"the policy's model is {path!r}", do)
    # Absolute, because the run may start in another folder.
    here = Path(str(path)).expanduser()
    model: dict[str, Any] = {"kind": "hf", "path": str(here.resolve()) if here.exists() else path}
    template = trinity.first("explorer.rollout_model.chat_template", "model.custom_chat_template")
    if trinity.has("model.chat_template_path"):
        file = Path(str(trinity["model.chat_template_path"])).expanduser()
        if file.is_file():
            template = file.read_text()
        else:
            trinity.problem("model.chat_template_path", str(file), "no such file", "correct the path")
    if trinity.algorithm_type == "cpt" or judged_in_training(trinity).plain_template:
        template = "plain"
    return model | ({"chat_template": template} if template else {}) | _variables(trinity, here, template)


def _variables(trinity: TrinityConfig, model: Path, template: str | None) -> dict[str, Any]:
    """Returns model.template_variables. A template that does not read a variable is rendered without it, as there."""
    key = "explorer.rollout_model.enable_thinking"
    thinks = trinity[key] if trinity.has(key) else trinity["model.enable_thinking"]
    if trinity.offline and trinity.experiences.has("format.enable_thinking"):
        thinks = trinity.experiences["format.enable_thinking"]
    if thinks is None:
        return {}
    if template is None:
        path = str(model) if model.exists() else str(trinity["model.model_path"])
        try:
            template = str(hf_tokenizer(path).chat_template)
        except (OSError, ValueError, TriviumError):
            trinity.note(
                "model.enable_thinking: the chat template is not on this machine: set model.template_variables"
            )
            return {}
    if "enable_thinking" not in template:
        trinity.note("model.enable_thinking: no effect: the chat template does not read it")
        return {}
    return {"template_variables": {"enable_thinking": thinks}}


def _endpoint(trinity: TrinityConfig, external: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine of a model behind an endpoint, which is evaluated."""
    where = "model.external_model"
    if trinity.mode != "bench":
        do = "use mode bench, or leave it out"
        trinity.problem(where, "a hosted model", "a model behind an endpoint cannot be trained", do)
    variable = str(external.get("base_url_env") or "OPENAI_BASE_URL")
    url = os.environ.get(variable, "https://api.openai.com/v1")
    trinity.note(f"{where}: asked at {url} ({variable}); model.model_path names a folder with a tokenizer")
    return {
        "kind": "endpoint",
        "protocol": "chat",
        "model": external.get("model_name") or trinity["model.model_path"],
        "urls": [url],
        "token_variable": external.get("api_key_env") or "OPENAI_API_KEY",
        # Parameters that OpenAI's own endpoint refuses, and that Trinity leaves to the server.
        "extra_body": dict.fromkeys(("top_k", "min_p", "min_tokens", "repetition_penalty")),
        "max_context": max_context(trinity),
        "sampling": sampling_of(trinity, (trinity.tasksets + trinity.eval_tasksets or [None])[0]),
    }


def _engine(trinity: TrinityConfig, device: str) -> dict[str, Any]:
    external = trinity["model.external_model"] or {}
    if external.get("enable"):
        return _endpoint(trinity, external)
    dtype = str(trinity["explorer.rollout_model.dtype"])
    if dtype not in ("auto", "bfloat16", "float32"):
        do = "use bfloat16 or float32"
        trinity.problem("explorer.rollout_model.dtype", repr(dtype), "the engine computes in two types", do)
    engine: dict[str, Any] = {
        "kind": _engine_kind(trinity),
        "device": device,
        "dtype": "float32" if device == "cpu" or dtype == "float32" else "bfloat16",
    }
    if engine["kind"] == "vllm" and device == "cuda":
        sizes = ("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization")
        engine |= {name: trinity[f"explorer.rollout_model.{name}"] for name in sizes}
        engine["expert_parallel"] = trinity["explorer.rollout_model.enable_expert_parallel"]
    if engine["kind"] == "vllm" and trinity["algorithm.enable_router_replay"]:
        engine["options"] = {"enable_return_routed_experts": True}
    if trinity.offline:
        return engine
    evaluated = trinity.tasksets or trinity.eval_tasksets
    return engine | {
        "max_context": max_context(trinity),
        "sampling": sampling_of(trinity, evaluated[0] if evaluated else None),
    }


def _engine_kind(trinity: TrinityConfig) -> str:
    """Returns vLLM if the config requests it and it is installed. An unset value, the default in Trinity-RFT, requests
    nothing."""
    where = "explorer.rollout_model.engine_type"
    kind = str(trinity[where])
    if trinity.offline or trinity.mode == "train" or kind == "torch":
        return "torch"
    if trinity.has(where) and kind.startswith("vllm") and importlib.util.find_spec("vllm") is not None:
        return "vllm"
    cause = "engine.kind vllm needs vLLM installed" if kind.startswith("vllm") else f"{kind} is not supported"
    trinity.notes.append(f"{where}: {cause}: engine.kind torch samples")
    return "torch"


def _train(trinity: TrinityConfig, device: str, steps: int) -> dict[str, Any]:
    trainer = trinity.trainer
    kind = str(trinity["trainer.trainer_type"])
    if kind != "verl" and ":" not in kind:
        do = "use verl, or an engine of yours: my_engine.py:Mine"
        trinity.problem("trainer.trainer_type", repr(kind), "no such trainer", do)
    parallel = trinity["trainer.ulysses_sequence_parallel_size"]
    if not trinity.has("trainer.ulysses_sequence_parallel_size"):
        parallel = trainer[f"{_ACTOR}.ulysses_sequence_parallel_size"] or 1
    # Trinity's default of max_token_len_per_gpu.
    longest = math.ceil(2 * max_context(trinity) / max(1, parallel)) or 16384
    norms = [trinity["trainer.actor_grad_clip"]]
    norms += [trinity["trainer.grad_clip"]] if trinity.has("trainer.grad_clip") else [trainer[f"{_ACTOR}.grad_clip"]]
    dtype = "float32" if device == "cpu" else _DTYPES.get(str(trainer[f"{_ACTOR}.fsdp_config.dtype"]), "bfloat16")
    train: dict[str, Any] = {
        "kind": "torch",
        "device": device,
        "dtype": dtype,
        "max_tokens_per_micro_batch": trinity["trainer.max_token_len_per_gpu"]
        or trainer.values.get(f"{_ACTOR}.ppo_max_token_len_per_gpu")
        or longest,
        "max_grad_norm": next(norm for norm in norms if norm is not None),
        "optimizer": _optimizer(_actor_optimizer(trinity), steps),
    }
    if trinity["algorithm.algorithm_type"] == "ppo" or trinity["algorithm.advantage_fn"] == "ppo":
        train["critic_optimizer"] = _optimizer({name: trainer[f"critic.optim.{name}"] for name in _OPTIONS}, steps)
    if parallel > 1:
        train["sequence_parallel"] = parallel
    return train


_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_OPTIONS = (
    "lr",
    "betas",
    "weight_decay",
    "min_lr_ratio",
    "lr_scheduler_type",
    "warmup_style",
    "lr_warmup_steps",
    "lr_warmup_steps_ratio",
)


def _actor_optimizer(trinity: TrinityConfig) -> dict[str, Any]:
    """Returns the options of the policy's optimizer: from algorithm.optimizer, else from trainer_config, as in 0.2."""
    ours, theirs = "algorithm.optimizer", f"{_ACTOR}.optim"
    return {
        name: trinity[f"{ours}.{name}"]
        if trinity.has(f"{ours}.{name}") or not trinity.trainer.has(f"{theirs}.{name}")
        else trinity.trainer[f"{theirs}.{name}"]
        for name in _OPTIONS
    }


def _optimizer(options: Mapping[str, Any], steps: int) -> dict[str, Any]:
    schedule = options["warmup_style"] or options["lr_scheduler_type"]
    optimizer = {name: options[name] for name in ("lr", "betas", "weight_decay")} | {"schedule": schedule}
    if schedule != "constant":
        optimizer["min_lr_ratio"] = options["min_lr_ratio"]
    warmup = options["lr_warmup_steps"]
    warmup = warmup if warmup >= 0 else int(options["lr_warmup_steps_ratio"] * steps)
    return optimizer | ({"warmup_steps": warmup} if warmup else {})


def _steps(trinity: TrinityConfig, tasks: Mapping[str, Any]) -> int:
    """Returns schedule.steps: the steps for which the data suffice, or trainer.total_steps if that is less."""
    batches, limit = trinity.batches, trinity["trainer.total_steps"]
    total, epochs = trinity["buffer.total_steps"], trinity["buffer.total_epochs"]
    tasks_of_step = batches.explored
    rows = None if total else num_rows(tasks.get("train", {}))
    if not total and rows is None:
        if limit:
            return int(limit)
        trinity.notes.append(
            f"schedule.steps: one step per epoch ({epochs}), for the rows of tasks.train are not on this machine: "
            f"set it to {epochs} x rows / {tasks_of_step}, or buffer.total_steps before translating"
        )
        return int(epochs)
    tasks_of_run = total * tasks_of_step if total else (rows or 0) * epochs // tasks_of_step * tasks_of_step
    steps = tasks_of_run // batches.fresh
    if steps < 1:
        trinity.notes.append(
            f"schedule.steps: 1, with tasks again: a step has {batches.fresh}, there are {tasks_of_run}"
        )
    return max(1, min(steps, limit or steps))


def _schedule(trinity: TrinityConfig, steps: int, staleness: int | None) -> dict[str, Any]:
    batches = trinity.batches
    schedule: dict[str, Any] = {
        "steps": steps,
        "groups_per_step": batches.fresh + batches.expert,
        "group_size": batches.group_size,
        "shuffle": False,
    }
    if staleness is not None:
        schedule["max_staleness"] = staleness
    ratio = trinity["explorer.over_rollout.ratio"]
    if not 0 <= ratio < 1:
        cause = "it is the share of the rollouts that a step does not wait for"
        trinity.problem("explorer.over_rollout.ratio", str(ratio), cause, "use a number from 0 to below 1")
    elif ratio:
        schedule["over_rollout"] = ratio / (1 - ratio)
    return schedule | _order(trinity)


def _order(trinity: TrinityConfig) -> dict[str, Any]:
    """Returns the order of the tasks."""
    settings = [trinity.experiences] if trinity.offline else trinity.tasksets
    where = "buffer.explorer_input.taskset.data_selector"
    kinds = {
        str(s["task_selector.selector_type" if s.has("task_selector.selector_type") else _SELECTOR]) for s in settings
    }
    if len(settings) > 1 and kinds <= {"sequential", "shuffle", "random"}:
        return {"shuffle": True}
    kind = next(iter(kinds), "sequential")
    if kind in ("shuffle", "random"):
        return {"shuffle": True}
    if kind == "offline_easy2hard" and len(settings) == 1:
        keys = settings[0].first("data_selector.feature_keys", "task_selector.feature_keys")
        if len(keys) == 1:  # the feature is a pass rate, highest first
            return {"shuffle": True, "curriculum": {"column": keys[0], "easy_first": False, "spread": 0}}
        trinity.problem(f"{where}.feature_keys", repr(keys), "a curriculum has one column", "name one")
    elif kind == "difficulty_based" and (keys := settings[0].first(*(f"{name}.feature_keys" for name in _SELECTORS))):
        return {"shuffle": True, "curriculum": _by_success_rate(trinity, where, settings[0], keys)}
    elif kind != "sequential":
        do = suggest(kind, ("sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based"))
        trinity.problem(f"{where}.selector_type", repr(kind), "no such selector here", do)
    return {}


def _by_success_rate(trinity: TrinityConfig, where: str, settings: Settings, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the curriculum of the selector `difficulty_based`, which forgets and shares as it does."""
    if len(keys) != 2:
        do = "name two columns: the success rates of a weaker and of a stronger model"
        trinity.problem(f"{where}.feature_keys", repr(keys), "it predicts rates from two columns", do)
    args = {"m": 16, "lamb": 0.2, "rho": 0.2, "target_reward": 1.0, "tau": 1.0, "do_sample": False}
    args |= {"adaptive_rho": False, "cap_coef_update_discount": 0.9}
    kwargs = settings.first(*(f"{name}.kwargs" for name in _SELECTORS)) or {}
    for name in set(kwargs) - set(args):
        trinity.problem(f"{where}.kwargs.{name}", repr(kwargs[name]), "no such argument", suggest(name, args))
    args |= kwargs
    if args["cap_coef_update_discount"] != 0.9:
        cause = "the position between the two models is averaged by 0.9"
        trinity.problem(f"{where}.kwargs.cap_coef_update_discount", "another value", cause, "leave it out")
    return {
        "kind": "success_rate",
        "references": list(keys),
        "target": args["target_reward"],
        "temperature": args["tau"],
        "sampled": args["do_sample"],
        "trials": args["m"],
        "forget": args["lamb"],
        "sharing": args["rho"],
        "adaptive_sharing": args["adaptive_rho"],
    }


_SELECTOR = "data_selector.selector_type"
_SELECTORS = ("data_selector", "task_selector")


def _sync(trinity: TrinityConfig, device: str) -> dict[str, Any]:
    """Returns the `sync` section; max_staleness replaces an offset if it expresses it better."""
    where = "synchronizer"
    if trinity.offline:
        return {}
    style, method = (str(trinity[f"{where}.sync_{name}"]).lower() for name in ("style", "method"))
    for name, value, choices in (("style", style, _STYLES), ("method", method, _METHODS)):
        if value not in choices:
            trinity.problem(f"{where}.sync_{name}", repr(value), f"no such {name}", suggest(value, choices))
    interval, offset, ahead = trinity.sync_interval, trinity[f"{where}.sync_offset"], trinity.max_staleness
    sync = {
        "method": _method(trinity, _METHODS.get(method, "memory"), device),
        "style": _STYLES.get(style, "fixed"),
        "interval": interval,
        **({"in_flight": "update"} if style == "fully_async" else {}),
    }
    return sync | (
        {"offset": offset} if ahead == interval - 1 + offset else {"max_staleness": max(ahead, interval - 1)}
    )


def _method(trinity: TrinityConfig, method: str, device: str) -> str:
    """Returns the transport of weights: a broadcast needs processes on both ends, separate commands need a
    directory."""
    if trinity.mode in ("explore", "train", "bench", "serve"):
        return "checkpoint"
    # Trinity, too, replaces nccl by checkpoint for an adapter.
    if trinity.lora and method == "nccl":
        method = "checkpoint"
    return "memory" if method == "nccl" and not _cluster(trinity, device) else method


def _monitors(trinity: TrinityConfig) -> list[dict[str, Any]]:
    kind = str(trinity["monitor.monitor_type"]).lower()
    project, name = trinity["project"], trinity["name"]
    monitor: dict[str, Any] = {"kind": kind}
    if (path := path_of(trinity.text("monitor.monitor_type"))) is not None:
        names = {"project": project, "group": trinity["group"], "name": name, "role": trinity["trainer.name"]}
        args = trinity.section("monitor.monitor_args")
        monitor = {"kind": _OWN_MONITOR, "monitor": path, **names, **({"monitor_args": args} if args else {})}
    elif kind not in _MONITORS:
        trinity.problem("monitor.monitor_type", repr(kind), "no such monitor", f"use one of {', '.join(_MONITORS)}")
    elif kind == "wandb":
        monitor |= {"project": project, "name": name, "group": trinity["group"] or name}
        base_url = trinity["monitor.monitor_args.base_url"]
        monitor |= {} if base_url is None else {"base_url": base_url}
        monitor |= {"mode": "offline"} if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") else {}
    elif kind == "mlflow":
        monitor |= {"experiment": project, "name": name}
        uri = trinity["monitor.monitor_args.uri"]
        monitor |= {} if uri is None else {"tracking_uri": uri}
    return [{"kind": "console"}, {"kind": "jsonl"}, monitor]


def _cluster(trinity: TrinityConfig, device: str) -> dict[str, Any]:
    """Returns the cluster: Ray if one command uses more than one GPU, else one process."""
    # A trainer that meets its explorers in a database has no ranks on Ray (`objects.trainer`).
    if device == "cpu" or trinity.mode not in ("both", "train") or (trinity.mode == "train" and not trinity.offline):
        return {}
    nodes, per_node = trinity["cluster.node_num"] or 1, trinity["cluster.gpu_per_node"] or _gpus()
    if nodes * per_node <= 1 or str(trinity["mode"]).lower() == "colocate":
        return {}
    model = "explorer.rollout_model"
    per_engine = math.prod(trinity[f"{model}.{name}_parallel_size"] for name in ("tensor", "data", "pipeline"))
    engines = 0 if trinity.offline else trinity[f"{model}.engine_num"]
    used = engines * per_engine + (0 if trinity.offline else sum(m["engine_num"] for m in trinity.auxiliary_models))
    ranks = nodes * per_node - used
    if ranks < 1:
        do = "lower explorer.rollout_model.engine_num, or raise cluster.gpu_per_node"
        trinity.problem("cluster.gpu_per_node", f"{nodes * per_node} GPU(s)", f"explorers take {used} of them", do)
    address = str(trinity["cluster.ray_address"])
    cluster = {"kind": "ray", "engines": max(1, engines), "ranks": max(1, ranks)}
    return cluster | ({"address": address} if address != "auto" or nodes > 1 else {})


def _gpus() -> int:
    return torch.cuda.device_count() if has_gpu() else 0
