"""Translates the config of a TRL trainer (the YAML that TrlParser reads, or a script) to a Trivium config.

TRL names the trainer by its command or class. In YAML the key `trainer` does: `trainer: sdpo` in the file, or
`trainer=sdpo` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from trivium.foundation.errors import Problem
from trivium.foundation.registry import suggest
from trivium.frontdoors.tables import Settings, TranslatedConfig, refuse
from trivium.frontdoors.trl.trainer_keys import OF_ROWS, SCHEDULES, table

_ONE_MODEL = "TRL's trainers differ in their keys: name the trainer that the config is for"
_STD_EPSILON = 1e-4
"""What TRL adds to a standard deviation of rewards."""
_BY_SEQUENCE = "seq-mean-token-mean"
"""How SDPO and SDFT average the distillation, whatever their loss_type."""
_WEIGHTS = {"ema": "average", "live": "current", "base": "initial"}
_TOP_K = 64
"""The default of algorithm.teacher.top_k: a loss at the sampled token reads no top tokens."""
_DIRECTIONS = {0.0: "forward", 0.5: "jsd", 1.0: "reverse"}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sdpo": {"distillation_mode": "sampled_token", "distillation_alpha": 1.0, "teacher_model_kind": "ema"},
    "sdft": {
        "distillation_mode": "topk_logits",
        "distillation_alpha": 0.5,
        "distillation_topk": 100,
        "teacher_model_kind": "base",
    },
}
_ROW_SIZES = {"sft": 1, "dpo": 2, "kto": 1, "reward": 2}
"""Trainer of rows -> the completions of a row."""
_EVALUATED = "test"
"""The taskset that evaluations read."""
_MONITORS = ("wandb", "tensorboard", "mlflow")
_SINGLE = ("iw_opd", "gold", "gkd", "a2po")
"""Trainers that sample one completion of each prompt unless `num_generations` says otherwise."""
_REWARDED = ("grpo", "gmpo", "sdpo", "a2po")
"""Trainers whose completions are rewarded."""


def translate(config: Mapping[str, Any]) -> TranslatedConfig:
    """Translates a TRL config. Raises a ConfigError that lists everything that cannot be translated."""
    name = str(config.get("trainer", "")).lower().removesuffix("trainer").removesuffix("config")
    if name not in _ALGORITHMS:
        do = f"{_ONE_MODEL}: trainer=grpo; {suggest(name, _ALGORITHMS)}"
        refuse([Problem("trainer", repr(name), "no such trainer", do)])
    trl = table(name).read(config)
    problems, notes = [*trl.problems], [*trl.notes()]
    if not trl["model_name_or_path"]:
        problems.append(Problem("model_name_or_path", "a model", "none", "name it: model_name_or_path=..."))
    mapping = trl.mapped()
    algorithm: dict[str, Any] = {**mapping.pop("algorithm", {}), **_ALGORITHMS[name](trl, name, problems, notes)}
    mapping["algorithm"] = algorithm
    mapping.setdefault("model", {})["kind"] = "hf"
    updates = _schedule(trl, name, mapping, problems, notes)
    evaluation = _evaluation(trl, name, mapping, updates, problems, notes)
    refuse(problems)
    mapping["train"]["optimizer"]["betas"] = [trl["adam_beta1"], trl["adam_beta2"]]
    mapping |= _monitors(trl, notes)
    tasks = mapping.setdefault("tasks", {}).get("train", {})
    if name == "reward" and "max_tokens" in tasks:
        tasks["on_overlong"] = "drop"
    mapping["tasks"]["train"] = {"kind": "datasets", **tasks}
    if evaluation:
        mapping["evaluation"] = evaluation
        mapping["tasks"][_EVALUATED] = {**mapping["tasks"]["train"], "split": trl["dataset_test_split"]}
    if "path" not in tasks:
        notes.append("tasks.train: name the rows (docs/extend-tasks.md), or dataset_name=... here")
    if not trl["use_peft"]:
        mapping["train"].pop("lora", None)
    elif not trl["lora_target_modules"]:
        notes.append("train.lora.targets: all linear layers; peft's choice depends on the model: name them to keep it")
    if name in OF_ROWS:
        mapping["buffer"] = {"kind": "files"}
    # TRL's server is a process of its own on other GPUs, which a run cannot join.
    elif trl["vllm_mode"] == "server":
        notes.append("vllm_mode: the run starts vLLM; cluster: {kind: ray, engines: 1} gives it a GPU of its own")
    if name in _REWARDED:
        notes.append("rewards: name your reward functions (docs/extend-rewards.md)")
    return TranslatedConfig(mapping, tuple(notes))


def _monitors(trl: Settings, notes: list[str]) -> dict[str, Any]:
    """The section `monitors`, if report_to names any. Notes those that have no counterpart."""
    report_to = trl["report_to"]
    names = [name for name in (report_to if isinstance(report_to, list) else [report_to]) if name not in (None, "none")]
    notes += [f"report_to: no monitor is named {name}" for name in names if name not in _MONITORS]
    monitors = [
        {"kind": name} | ({"name": trl["run_name"]} if trl["run_name"] and name != "tensorboard" else {})
        for name in names
        if name in _MONITORS
    ]
    return {"monitors": ["console", "jsonl", *monitors]} if monitors else {}


def _evaluation(
    trl: Settings, name: str, mapping: dict[str, Any], updates: int, problems: list[Problem], notes: list[str]
) -> dict[str, Any]:
    """The section `evaluation`; empty if TRL does not evaluate."""
    strategy, steps, strategies = trl["eval_strategy"], trl["eval_steps"] or trl["logging_steps"], ("steps", "epoch")
    if strategy in (False, "no"):
        if trl.has("dataset_test_split"):
            notes.append("dataset_test_split: no effect: eval_strategy is no")
        return {}
    if name not in (*_REWARDED, *OF_ROWS):
        notes.append("eval_strategy: no effect: an evaluation of completions needs rewards; set evaluation.taskset")
        return {}
    if strategy not in strategies:
        problems.append(Problem("eval_strategy", repr(strategy), "no such value", suggest(str(strategy), strategies)))
    if 0 < steps < 1:
        steps = ceil(steps * max(0, trl["max_steps"]))
    every = ceil(steps / updates) if strategy == "steps" else 0
    if not every:
        notes.append("evaluation.every: 0, the start and the end; set it to a number of train steps")
    if name in OF_ROWS:
        return {"held_out": _EVALUATED, "every": every}
    # TRL samples a group of each prompt, as in training.
    samples = trl["num_generations_eval"] or mapping["schedule"]["group_size"]
    sampling = {key: value for key in ("temperature", "top_p", "top_k", "min_p") if (value := trl[key]) is not None}
    return {"taskset": _EVALUATED, "every": every, "samples": samples, "sampling": sampling}


def _schedule(trl: Settings, name: str, mapping: dict[str, Any], problems: list[Problem], notes: list[str]) -> int:
    """Sets the batch, the length of the run, the checkpoints and the learning rate. Returns the optimizer steps of a
    train step.

    The completions of one generation are a train step here, with `mini_batches * epochs` of TRL's optimizer steps.
    """
    # 8 is TRL's default of num_generations.
    size = _ROW_SIZES.get(name) or trl["num_generations"] or (1 if name in _SINGLE else 8)
    counts = {key: trl[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    counts |= {"num_iterations": 1 if name in OF_ROWS else trl["num_iterations"], "num_generations": size}
    if wrong := {key: count for key, count in counts.items() if count < 1}:
        problems += [Problem(key, str(count), "it must be at least 1", "correct it") for key, count in wrong.items()]
        return 1
    completions, batches = _generation(trl, name, size, problems)
    groups, mini_batches = max(1, completions // size), max(1, batches // trl["gradient_accumulation_steps"])
    updates, steps, epochs = mini_batches * counts["num_iterations"], trl["max_steps"], trl["num_train_epochs"]
    schedule = mapping.setdefault("schedule", {})
    schedule |= {"group_size": size, "groups_per_step": groups}
    if steps > 0:
        schedule["steps"] = ceil(steps / updates)
    else:
        length = f"{epochs:g} * tasks / {groups} train steps"
        notes.append(f"schedule.steps: set it; the {epochs:g} epochs that TRL trains are {length}")
    mapping["algorithm"]["mini_batches"] = mini_batches
    saves = trl["save_strategy"] == "steps"
    mapping.setdefault("checkpoint", {})["save_every"] = ceil(trl["save_steps"] / updates) if saves else 0
    if trl["save_strategy"] == "epoch":
        notes.append("checkpoint.save_every: 0, the last step; save_strategy: epoch is a number of train steps here")
    mapping["train"]["optimizer"]["warmup_steps"] = ceil(_warmup(trl, problems, notes) / updates)
    return updates


def _generation(trl: Settings, name: str, size: int, problems: list[Problem]) -> tuple[int, int]:
    """(completions, micro-batches) of one generation. Reports what TRL refuses."""
    device, accumulated = trl["per_device_train_batch_size"], trl["gradient_accumulation_steps"]
    if name in OF_ROWS:
        return device * accumulated * size, accumulated
    batches, batch_size = trl["steps_per_generation"], trl["generation_batch_size"]
    setting = str(batch_size)
    if batch_size and name in _SINGLE:  # these trainers count prompts
        batch_size *= size
    if batch_size and batches:
        cause = f"steps_per_generation ({batches}) is set as well, and sets the same"
        problems.append(Problem("generation_batch_size", setting, cause, "leave one of them out"))
    elif batch_size and batch_size % device:
        cause = f"per_device_train_batch_size ({device}) does not divide the {batch_size} completions"
        problems.append(Problem("generation_batch_size", setting, cause, "set a multiple of it"))
    batches = batches or (batch_size // device if batch_size else accumulated)
    if batches % accumulated:
        cause = f"gradient_accumulation_steps ({accumulated}) does not divide the {batches} batches of a generation"
        do = "generate for whole optimizer steps"
        key = "generation_batch_size" if batch_size else "steps_per_generation"
        problems.append(Problem(key, f"{batches}", cause, do))
    completions = device * batches
    if completions % size:
        cause = f"it does not divide the {completions} completions of a generation"
        problems.append(Problem("num_generations", f"{size}", cause, "change it, or per_device_train_batch_size"))
    return completions, batches


def _warmup(trl: Settings, problems: list[Problem], notes: list[str]) -> int:
    """The optimizer steps of the warm-up. Reports schedules of the learning rate that are not translated."""
    kind, warmup, steps = trl["lr_scheduler_type"], trl["warmup_steps"] or trl["warmup_ratio"], trl["max_steps"]
    if kind not in SCHEDULES:
        do = suggest(kind, SCHEDULES)
        problems.append(Problem("lr_scheduler_type", repr(kind), "no such schedule is translated", do))
    if 0 < warmup < 1 and steps <= 0:
        notes.append(f"train.optimizer.warmup_steps: set it to {warmup:g} of schedule.steps; max_steps is not set")
        return 0
    return 0 if kind == "constant" else ceil(warmup * steps) if 0 < warmup < 1 else int(warmup)


def _sft(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del trl, problems
    notes.append("the loss: over the completion; TRL's is over all tokens of rows of `messages` or `text`")
    return {"kind": name}


def _preferences(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    if name != "dpo":
        return {"kind": "reward_model" if name == "reward" else name}
    loss_type = trl["loss_type"] or "sigmoid"
    loss = str(loss_type[0] if isinstance(loss_type, list) and len(loss_type) == 1 else loss_type)
    kinds = {"sigmoid": "dpo", "ipo": "ipo"}
    if loss not in kinds:
        problems.append(Problem("loss_type", loss, "no such loss is translated", f"use {' or '.join(kinds)}"))
    if loss == "ipo":
        notes.append("algorithm.pair_loss: the gap of ipo is a sum over tokens, as in its paper; TRL's is a mean")
    return {"kind": kinds.get(loss)}


def _grpo(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    loss_type = str(trl["loss_type"])
    aggregate = {
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "sapo": "seq-mean-token-mean",
        "luspo": "seq-mean-token-sum",
    }.get(loss_type, "token-mean")
    loss = _policy_loss(trl, name, loss_type, problems)
    section: dict[str, Any] = {
        "kind": "grpo",
        "advantage": _advantage(trl, problems),
        "policy_loss": loss,
        "aggregate": "seq-mean-token-mean" if loss["kind"] == "gmpo" else aggregate,
        "epochs": trl["num_iterations"],
    }
    if trl["beta"]:
        section["kl"] = {"coef": trl["beta"], "estimator": _kl_estimator(trl, name, problems)}
    if trl["use_adaptive_entropy"]:
        notes.append("algorithm.entropy: the steered weight has no upper bound; TRL's is entropy_coef_max, 1.0")
    gates: list[dict[str, Any]] = []
    if trl["top_entropy_quantile"] < 1:
        gates.append({"kind": "top_entropy", "fraction": trl["top_entropy_quantile"]})
    if trl["off_policy_mask_threshold"] is not None:
        gates.append({"kind": "sequence_drift", "delta": trl["off_policy_mask_threshold"]})
    return section | ({"gates": gates} if gates else {})


def _policy_loss(trl: Settings, name: str, loss_type: str, problems: list[Problem]) -> dict[str, Any]:
    level = str(trl["importance_sampling_level"])
    by_loss_type = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo"}
    by_level = {"token": "ppo", "sequence": "gspo" if loss_type == "luspo" else "gspo_sequence"}
    if loss_type not in (*by_loss_type, "grpo", "bnpo", "dapo", "dr_grpo", "luspo"):
        problems.append(Problem("loss_type", repr(loss_type), "no such loss is translated", "use dapo"))
    if level not in by_level:
        do = suggest(level, by_level)
        problems.append(Problem("importance_sampling_level", repr(level), "no such level", do))
    elif level == "sequence" and name != "gmpo" and loss_type in ("cispo", "sapo"):
        cause = f"the loss {loss_type} has the ratios of tokens here"
        problems.append(Problem("importance_sampling_level", repr(level), cause, "set it to token"))
    kind = "gmpo" if name == "gmpo" else by_loss_type.get(loss_type, by_level.get(level, "ppo"))
    low, high = trl["epsilon"], trl["epsilon_high"]
    if kind == "cispo":
        bound = low if high is None else high
        if bound < 1:
            unset = "; unset, TRL takes epsilon" if high is None else ""
            cause = f"it bounds the weight itself, which is 1 for the current policy{unset}"
            problems.append(Problem("epsilon_high", f"{bound:g}", cause, "set it to the largest weight, such as 5.0"))
        # TRL's epsilon_high of CISPO is the largest weight, clip_high what it may exceed 1 by.
        return {"kind": kind, "clip_high": bound - 1}
    if kind in ("sapo", "vespo"):
        return {"kind": kind, **_options(trl, kind)}
    loss = {"kind": kind, "clip_low": low, "clip_high": low if high is None else high}
    return loss if kind == "gmpo" else {**loss, "dual_clip": trl["delta"]}


def _kl_estimator(trl: Settings, name: str, problems: list[Problem]) -> dict[str, Any]:
    if name != "grpo" or not trl["use_bias_correction_kl"]:
        # TRL's KL has no bound.
        return {"kind": "k3", "cap": None}
    if trl["importance_sampling_level"] == "sequence":
        cause = "it weights the KL with the ratio of the whole sequence, here of each token"
        problems.append(Problem("use_bias_correction_kl", "true (TRL's default)", cause, "set it to false"))
    return {"kind": "corrected_k3", "bound": None}


def _options(trl: Settings, kind: str) -> dict[str, float]:
    """The options of the losses `sapo` and `vespo`."""
    if kind == "sapo":
        return {"tau_neg": trl["sapo_temperature_neg"], "tau_pos": trl["sapo_temperature_pos"]}
    return {f"{name}_{sign}": trl[f"vespo_{name}_{sign}"] for name in ("k", "lambda") for sign in ("pos", "neg")}


def _advantage(trl: Settings, problems: list[Problem]) -> dict[str, Any]:
    way, scale = trl["multi_objective_aggregation"], trl["scale_rewards"]
    # TRL also takes booleans: true is `group`, false `none`.
    scale = {"None": "group", "True": "group", "False": "none"}.get(str(scale), str(scale))
    ways = ("sum_then_normalize", "normalize_then_sum")
    options: dict[str, dict[str, Any]] = {
        "group": {"epsilon": _STD_EPSILON},
        "batch": {"std_level": "batch", "epsilon": _STD_EPSILON},
        "none": {"norm_by_std": False},
    }
    for key, value, choices in (("multi_objective_aggregation", way, ways), ("scale_rewards", scale, options)):
        if value not in choices:
            problems.append(Problem(key, repr(value), "no such value", suggest(value, choices)))
    if way == "normalize_then_sum":
        return {"kind": "gdpo", "epsilon": _STD_EPSILON}
    return {"kind": "grpo", **options.get(scale, {})}


def _of(trl: Settings, name: str, key: str) -> Any:
    """The value of a key whose default depends on the trainer."""
    return _DEFAULTS[name].get(key) if trl[key] is None else trl[key]


def _teacher(trl: Settings, name: str, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the teacher without its context, the loss that follows it)."""
    keys = ("teacher_model_kind", "distillation_mode", "distillation_alpha")
    kind, mode, alpha = (_of(trl, name, key) for key in keys)
    if kind not in _WEIGHTS:
        problems.append(Problem("teacher_model_kind", repr(kind), "no such teacher", suggest(str(kind), _WEIGHTS)))
    if mode == "full_logits":
        problems.append(Problem("distillation_mode", repr(mode), "top tokens are stored here", "use topk_logits"))
    if alpha not in _DIRECTIONS:
        problems.append(Problem("distillation_alpha", repr(alpha), "no such divergence", "use 0.0, 0.5 or 1.0"))
    teacher: dict[str, Any] = {"weights": _WEIGHTS.get(kind, "average")}
    if kind == "ema":
        teacher["rate"] = trl["teacher_update_rate"]
    if mode == "sampled_token":
        return {**teacher, "top_k": _TOP_K}, {"kind": "distill"}
    if top_k := _of(trl, name, "distillation_topk"):
        teacher["top_k"] = top_k
    tail = "bucket" if trl["distillation_add_tail"] else "left_out"
    return teacher, {"kind": "distill_student_top_k", "direction": _DIRECTIONS.get(alpha, "reverse"), "tail": tail}


def _sdpo(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    teacher, loss = _teacher(trl, name, problems)
    solution = trl["solution_template"].replace("{successful_previous_attempt}", "{success}")
    feedback = trl["feedback_template"].replace("{feedback_raw}", "{feedback}")
    succeeds, answers = trl["use_successful_as_teacher"], trl["include_environment_feedback"]
    both = succeeds and answers and not trl["environment_feedback_only_without_solution"]
    # The teacher reads the first context whose fields a rollout has, so the richest one comes first.
    parts = [(solution, feedback)] * both + [(solution, "")] * succeeds + [("", feedback)] * answers
    if not parts:
        cause, do = "the teacher would read what the policy reads", "set use_successful_as_teacher"
        problems.append(Problem("use_successful_as_teacher", "false", cause, do))
    frame = trl["reprompt_template"]
    context = [frame.replace("{solution}", first).replace("{feedback}", second) for first, second in parts]
    weight = trl["distillation_weight"]
    distill = {"coef": weight, "loss": loss}
    section = _grpo(trl, name, problems, notes)
    if weight == 1:
        section["aggregate"] = _BY_SEQUENCE
    elif weight and section["aggregate"] != _BY_SEQUENCE:
        used = section["aggregate"]
        notes.append(f"algorithm.aggregate: {used} for both losses; TRL averages the distillation by {_BY_SEQUENCE}")
    return {**section, "kind": "sdpo", "teacher": {**teacher, "context": context}, "distill": distill}


def _sdft(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del notes
    teacher, loss = _teacher(trl, name, problems)
    teacher["context"] = [trl["teacher_prompt_template"]]
    section = {"kind": "sdft", "teacher": teacher, "policy_loss": loss, "aggregate": _BY_SEQUENCE}
    return {**section, "epochs": trl["num_iterations"]}


def _iw_opd(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del notes
    if trl["distillation_objective"] != "iw_opd":
        cause, do = "only iw_opd is translated", "use trainer=gold for a divergence over tokens"
        problems.append(Problem("distillation_objective", repr(trl["distillation_objective"]), cause, do))
    advantage = {"kind": "on_policy_distill", "prefix_gamma": trl["iw_opd_gamma"]}
    return {"kind": name, "advantage": advantage, "teacher": _named(trl, problems)}


def _gold(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del name
    if trl["beta"] not in _DIRECTIONS:
        problems.append(Problem("beta", repr(trl["beta"]), "no such divergence", "use 0.0, 0.5 or 1.0"))
    if trl["lmbda"] != 1 or not trl.has("lmbda"):
        cause, do = "the policy samples every completion here", "set lmbda: 1.0"
        problems.append(Problem("lmbda", "completions of the data set, too (0.5 by default)", cause, do))
    if trl["top_p"] < 1 or trl["top_k"]:
        cause = "tokens that sampling leaves out have no log-probability"
        problems.append(Problem("top_p", f"{trl['top_p']:g}", cause, "set top_p: 1.0 and top_k: 0"))
    notes.append("the divergence: over the teacher's top_k tokens and a bucket for the rest; TRL sums over all tokens")
    loss = {"kind": "distill_top_k", "direction": _DIRECTIONS.get(trl["beta"], "jsd")}
    return {"kind": "distill_top_k", "policy_loss": loss, "teacher": _named(trl, problems)}


def _named(trl: Settings, problems: list[Problem]) -> dict[str, Any]:
    path = trl["teacher_model_name_or_path"]
    if not path:
        problems.append(Problem("teacher_model_name_or_path", "a teacher", "none", "name its directory"))
    return {"path": path}


def _a2po(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del name, problems
    notes.append(
        "tasks.train: estimate the values first, by `trivium eval CONFIG evaluation.taskset=train "
        f"evaluation.samples={trl['num_value_samples']} --step 0 --tasks tasks.jsonl`, and train on that file"
    )
    advantage, loss = ({"kind": "a_star_po", "beta": trl[key]} for key in ("beta1", "beta2"))
    return {"kind": "a_star_po", "advantage": advantage, "policy_loss": loss}


_Section = Callable[[Settings, str, list[Problem], list[str]], dict[str, Any]]
_ALGORITHMS: Mapping[str, _Section] = {
    "grpo": _grpo,
    "gmpo": _grpo,
    "sdpo": _sdpo,
    "sdft": _sdft,
    "iw_opd": _iw_opd,
    "gold": _gold,
    "gkd": _gold,
    "a2po": _a2po,
    "sft": _sft,
    **dict.fromkeys(("dpo", "kto", "reward"), _preferences),
}
