"""Translates the config of a TRL trainer (the YAML that TrlParser reads) to a Trivium config.

TRL names the trainer by its command or class. Here the key `trainer` does: `trainer: sdpo` in the file, or
`trainer=sdpo` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trivium.errors import Problem
from trivium.frontdoors.tables import (
    Entry,
    Ignored,
    Mapped,
    Moved,
    Restricted,
    Settings,
    Table,
    Translation,
    if_on,
    ignored,
    refuse,
)
from trivium.registry import suggest

_ONE_MODEL = "TRL's trainers differ in their keys: name the trainer that the config is for"
_BASICS: Mapping[str, Entry] = {
    "trainer": Mapped("the algorithm", type=str),
    "model_name_or_path": Mapped("model.path", type=str),
    "dataset_name": Mapped("tasks.train.path", type=str),
    "dataset_config": Mapped("tasks.train.subset", type=str),
    "dataset_train_split": Mapped("tasks.train.split", default="train"),
    "reward_funcs": Ignored("Trivium's rewards are named under `rewards`"),
    "reward_weights": Ignored("each entry of `rewards` has its own weight"),
    "output_dir": Mapped("run.dir", type=str),
    "seed": Mapped("run.seed", default=42),
    "max_steps": Mapped("schedule.steps", default=-1, convert=lambda steps: steps if steps > 0 else None),
    "save_steps": Mapped("checkpoint.save_every", default=500, convert=int),
    "save_total_limit": Mapped("checkpoint.keep", type=int),
    "per_device_train_batch_size": Mapped("in schedule.groups_per_step", default=8),
    "gradient_accumulation_steps": Mapped("in schedule.groups_per_step", default=1),
    "steps_per_generation": Mapped("in algorithm.mini_batches, schedule.groups_per_step", type=int),
    "generation_batch_size": Mapped("in schedule.groups_per_step", type=int),
    "num_generations": Mapped("schedule.group_size", type=int),
    "num_iterations": Mapped("algorithm.epochs", default=1),
    "top_k": Mapped("engine.sampling.top_k", default=0),
    "min_p": Mapped("engine.sampling.min_p", type=float, convert=if_on),
    "use_vllm": Mapped("engine.kind", default=False, convert={True: "vllm"}),
    "weight_decay": Mapped("train.optimizer.weight_decay", default=0.0),
    "adam_beta1": Mapped("in train.optimizer.betas", default=0.9),
    "adam_beta2": Mapped("in train.optimizer.betas", default=0.999),
    "max_grad_norm": Mapped("train.max_grad_norm", default=1.0),
    "use_peft": Mapped("in train.lora", default=False),
    "lora_r": Mapped("train.lora.rank", default=16, when={"use_peft": True}),
    "lora_alpha": Mapped("train.lora.alpha", default=32, when={"use_peft": True}),
    "gradient_checkpointing": Mapped("train.gradient_checkpointing", default=True),
    **ignored("micro-batches are cut by train.max_tokens_per_micro_batch", "auto_find_batch_size"),
    **ignored("the run is logged by `monitors`", "report_to logging_steps log_completions run_name push_to_hub"),
    **ignored("chosen by the machine", "bf16 fp16 tf32 dtype torch_dtype attn_implementation"),
    **ignored("dropout is always off", "disable_dropout"),
    **ignored("prompts are not truncated", "max_prompt_length"),
}
_DEFAULTS_OF: Mapping[str, tuple[float, int, float, float]] = {
    "grpo": (1e-6, 512, 1.0, 1.0),
    "gmpo": (1e-6, 512, 1.0, 1.0),
    "sdpo": (5e-5, 256, 1.0, 1.0),
    "sdft": (5e-5, 256, 1.0, 1.0),
    "iw_opd": (1e-6, 512, 1.0, 0.95),
    "gold": (1e-7, 128, 0.9, 0.95),
    "gkd": (2e-5, 128, 0.9, 1.0),
    "a2po": (5e-5, 256, 1.0, 1.0),
}
"""Each trainer's defaults of learning_rate, max_completion_length (gkd: max_new_tokens), temperature and top_p."""
_POLICY_GRADIENT: Mapping[str, Entry] = {
    "beta": Mapped("in algorithm.kl", default=0.0),
    "epsilon": Mapped("in algorithm.policy_loss.clip_low", default=0.2),
    "epsilon_high": Mapped("in algorithm.policy_loss.clip_high", type=float),
    "delta": Mapped("in algorithm.policy_loss.dual_clip", type=float),
    "loss_type": Mapped("in algorithm.aggregate, algorithm.policy_loss", default="dapo"),
    "importance_sampling_level": Mapped("in algorithm.policy_loss", default="token"),
    "scale_rewards": Mapped("algorithm.advantage"),
    "multi_objective_aggregation": Mapped("in algorithm.advantage", default="sum_then_normalize"),
    "mask_truncated_completions": Mapped("algorithm.mask_truncated", default=False, convert=if_on),
    "top_entropy_quantile": Mapped("in algorithm.gates", default=1.0),
    "off_policy_mask_threshold": Mapped("in algorithm.gates", type=float),
    "entropy_coef": Mapped("algorithm.entropy.coef", default=0.0, convert=if_on),
    "use_adaptive_entropy": Mapped("whether algorithm.entropy.target is set", default=False),
    "entropy_target": Mapped("algorithm.entropy.target", default=0.2, when={"use_adaptive_entropy": True}),
    "entropy_coef_delta": Mapped("algorithm.entropy.step", default=0.005, when={"use_adaptive_entropy": True}),
    "entropy_coef_min": Restricted((0.0, None), "a steered weight is at least 0", 0.0),
    "entropy_coef_max": Restricted((1.0, None), "a steered weight has no upper bound here", 1.0),
    "sync_ref_model": Restricted((None,), "the reference is the model that the stage begins with"),
    "sapo_temperature_neg": Mapped("in algorithm.policy_loss.tau_neg", default=1.05, when={"loss_type": "sapo"}),
    "sapo_temperature_pos": Mapped("in algorithm.policy_loss.tau_pos", default=1.0, when={"loss_type": "sapo"}),
    **{
        f"vespo_{name}_{sign}": Mapped(
            f"algorithm.policy_loss.{name}_{sign}", default=value, when={"loss_type": "vespo"}
        )
        for name, sign, value in (("k", "pos", 2.0), ("lambda", "pos", 3.0), ("k", "neg", 3.0), ("lambda", "neg", 2.0))
    },
    **ignored(
        "algorithm.correction: auto weights tokens where the engine differs from the trainer",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap use_bias_correction_kl",
    ),
}
_TEACHES: Mapping[str, Entry] = {
    "teacher_model_kind": Mapped("in algorithm.teacher.weights", type=str),
    "teacher_update_rate": Mapped("in algorithm.teacher.rate", default=0.05),
    "teacher_sync_steps": Restricted((1, None), "the average follows every update", 1),
    "distillation_alpha": Mapped("the divergence of the loss", type=float),
    "distillation_mode": Mapped("the loss that follows the teacher", type=str),
    "distillation_topk": Mapped("in algorithm.teacher.top_k", type=int),
    "distillation_add_tail": Mapped("the tail of the loss", default=False),
    "distillation_is_clip": Ignored("a token's weight is 1 while its sampler is the current policy"),
}
_HELPER: Mapping[str, Entry] = {
    "teacher_model_name_or_path": Mapped("in algorithm.teacher.path", type=str),
    "lmbda": Mapped("1: the policy samples every completion", default=1.0),
    "use_teacher_server": Restricted((None,), "name the teacher's directory: teacher_model_name_or_path"),
    "seq_kd": Restricted((None,), "train on the teacher's texts by algorithm.kind sft"),
    "use_uld_loss": Restricted((None,), "teacher and policy need one tokenizer here"),
}
_OF_TRAINER: Mapping[str, Mapping[str, Entry]] = {
    "grpo": _POLICY_GRADIENT,
    "gmpo": {**_POLICY_GRADIENT, "epsilon": Mapped("in algorithm.policy_loss.clip_low", default=0.4)},
    "sdpo": {
        **_POLICY_GRADIENT,
        **_TEACHES,
        "distillation_weight": Mapped("in algorithm.distill.coef", default=1.0),
        "use_successful_as_teacher": Mapped("in algorithm.teacher.context", default=True),
        "include_environment_feedback": Mapped("in algorithm.teacher.context", default=False),
        "environment_feedback_only_without_solution": Mapped("in algorithm.teacher.context", default=False),
        "reprompt_template": Mapped(
            "in algorithm.teacher.context",
            default="{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        ),
        "solution_template": Mapped(
            "in algorithm.teacher.context", default="\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
        ),
        "feedback_template": Mapped(
            "in algorithm.teacher.context",
            default="\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        ),
        "success_reward_threshold": Restricted((1.0, None), "a success has a reward of at least 1", 1.0),
        "remove_thinking_from_demonstration": Restricted((None,), "completions are shown as they are"),
        "dont_reprompt_on_self_success": Ignored("rollouts that succeeded are taught by another one that did"),
        **ignored("a template that does not fit the context is left out", "max_reprompt_len"),
        **ignored("the doctor finds these", "diagnostics_warning_interval diagnostics_flat_tolerance"),
    },
    "sdft": {
        **_TEACHES,
        "teacher_prompt_template": Mapped("in algorithm.teacher.context", default="{prompt}\n\n{privileged_context}"),
        "generate_from_teacher": Restricted((None,), "the policy samples under its own prompt"),
        "num_loss_tokens_to_skip": Restricted((None,), "all tokens of a completion are learned from"),
    },
    "iw_opd": {
        **_HELPER,
        "distillation_objective": Mapped("in algorithm.advantage", default="iw_opd"),
        "iw_opd_gamma": Mapped("in algorithm.advantage.prefix_gamma", default=0.5),
        "beta": Restricted((1.0, None), "the estimator is the reverse KL at the sampled token", 1.0),
        **ignored("the sampled token alone is read", "loss_top_k loss_add_tail reverse_kl_top_1_mode iw_opd_epsilon"),
    },
    "gold": {**_HELPER, "beta": Mapped("in algorithm.policy_loss.direction", default=0.5)},
    "gkd": {
        **_HELPER,
        "beta": Mapped("in algorithm.policy_loss.direction", default=0.5),
        "max_new_tokens": Moved("max_completion_length"),
    },
    "a2po": {
        "beta1": Mapped("in algorithm.advantage.beta", default=0.5),
        "beta2": Mapped("in algorithm.policy_loss.beta", default=1e-3),
        "num_value_samples": Mapped("evaluation.samples of `trivium eval --tasks`", default=8),
        "filter_all_incorrect": Mapped("algorithm.filters", default=True, convert={True: ["reference_solved"]}),
    },
}
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
_SINGLE = ("iw_opd", "gold", "gkd", "a2po")
"""Trainers that sample one completion of each prompt unless `num_generations` says otherwise."""


def translate(config: Mapping[str, Any]) -> Translation:
    """Translates a TRL config. Raises a ConfigError that lists everything that cannot be translated."""
    name = str(config.get("trainer", "")).lower().removesuffix("trainer").removesuffix("config")
    if name not in _OF_TRAINER:
        do = f"{_ONE_MODEL}: trainer=grpo; {suggest(name, _OF_TRAINER)}"
        refuse([Problem("trainer", repr(name), "no such trainer", do)])
    trl = _table(name).read(config)
    problems, notes = [*trl.problems], [*trl.notes()]
    if not trl["model_name_or_path"]:
        problems.append(Problem("model_name_or_path", "a model", "none", "name it"))
    mapping = trl.mapped()
    algorithm: dict[str, Any] = {**mapping.pop("algorithm", {}), **_ALGORITHMS[name](trl, name, problems, notes)}
    refuse(problems)
    mapping["algorithm"] = algorithm
    mapping.setdefault("model", {})["kind"] = "hf"
    _schedule(trl, name, mapping)
    mapping["train"]["optimizer"]["betas"] = [trl["adam_beta1"], trl["adam_beta2"]]
    tasks = mapping.setdefault("tasks", {}).get("train", {})
    mapping["tasks"]["train"] = {"kind": "datasets", **tasks}
    if not trl["use_peft"]:
        mapping["train"].pop("lora", None)
    if name in ("grpo", "gmpo", "sdpo", "a2po"):
        notes.append("rewards: name your reward functions (docs/extend-rewards.md)")
    return Translation(mapping, tuple(notes))


def _table(name: str) -> Table:
    """The keys of a trainer."""
    lr, length, temperature, top_p = _DEFAULTS_OF[name]
    own = {
        "learning_rate": Mapped("train.optimizer.lr", default=lr),
        "max_completion_length": Mapped("engine.sampling.max_new_tokens", default=length),
        "temperature": Mapped("engine.sampling.temperature", default=temperature),
        "top_p": Mapped("engine.sampling.top_p", default=top_p),
    }
    return Table({**_BASICS, **own, **_OF_TRAINER[name]})


def _schedule(trl: Settings, name: str, mapping: dict[str, Any]) -> None:
    """Batches of TRL count completions, on all devices together; those of one generation are a step here."""
    accumulated = trl["gradient_accumulation_steps"]
    batches = trl["steps_per_generation"] or accumulated
    completions = trl["generation_batch_size"] or trl["per_device_train_batch_size"] * batches
    size = trl["num_generations"] or (1 if name in _SINGLE else 8)
    mapping.setdefault("schedule", {}).update(group_size=size, groups_per_step=max(1, completions // size))
    mapping["algorithm"]["mini_batches"] = max(1, batches // accumulated)


def _grpo(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del notes
    loss_type, level = str(trl["loss_type"]), trl["importance_sampling_level"]
    aggregate = {
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "sapo": "seq-mean-token-mean",
        "luspo": "seq-mean-token-sum",
    }.get(loss_type, "token-mean")
    kinds = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo", "luspo": "gspo"}
    by_level = {"token": "ppo", "sequence": "gspo_sequence", "sequence_token": "gspo"}
    if loss_type not in (*kinds, "grpo", "bnpo", "dapo", "dr_grpo"):
        problems.append(Problem("loss_type", repr(loss_type), "no such loss is translated", "use dapo"))
    if level not in by_level:
        problems.append(
            Problem("importance_sampling_level", repr(level), "no such level", suggest(str(level), by_level))
        )
    kind = "gmpo" if name == "gmpo" else kinds.get(loss_type, by_level.get(level, "ppo"))
    loss: dict[str, Any] = {"kind": kind}
    if kind not in ("sapo", "vespo"):
        high = trl["epsilon_high"]
        loss |= {"clip_low": trl["epsilon"], "clip_high": trl["epsilon"] if high is None else high}
    if kind == "cispo":
        loss.pop("clip_low")
    if trl["delta"] is not None and kind in ("ppo", "gspo", "gspo_sequence"):
        loss["dual_clip"] = trl["delta"]
    section: dict[str, Any] = {
        "kind": "grpo",
        "advantage": _advantage(trl),
        "policy_loss": loss | _options(trl, loss_type),
        "aggregate": "seq-mean-token-mean" if kind == "gmpo" else aggregate,
        "epochs": trl["num_iterations"],
    }
    if trl["beta"]:
        section["kl"] = {"coef": trl["beta"], "estimator": {"kind": "k3", "cap": None}}
    gates: list[dict[str, Any]] = []
    if trl["top_entropy_quantile"] < 1:
        gates.append({"kind": "top_entropy", "fraction": trl["top_entropy_quantile"]})
    if trl["off_policy_mask_threshold"] is not None:
        gates.append({"kind": "sequence_drift", "delta": trl["off_policy_mask_threshold"]})
    return section | ({"gates": gates} if gates else {})


def _options(trl: Settings, loss_type: str) -> dict[str, float]:
    """The options that only one `loss_type` reads."""
    if loss_type == "sapo":
        return {"tau_neg": trl["sapo_temperature_neg"], "tau_pos": trl["sapo_temperature_pos"]}
    if loss_type == "vespo":
        return {f"{name}_{sign}": trl[f"vespo_{name}_{sign}"] for name in ("k", "lambda") for sign in ("pos", "neg")}
    return {}


def _advantage(trl: Settings) -> dict[str, Any]:
    if trl["multi_objective_aggregation"] == "normalize_then_sum":
        return {"kind": "gdpo"}
    scale = {None: "group", True: "group", False: "none"}.get(trl["scale_rewards"], trl["scale_rewards"])
    options: dict[str, Any] = {"batch": {"std_level": "batch"}, "none": {"norm_by_std": False}}.get(str(scale), {})
    return {"kind": "grpo", **options}


def _of(trl: Settings, name: str, key: str) -> Any:
    """The value of a key whose default depends on the trainer."""
    return _DEFAULTS[name].get(key) if trl[key] is None else trl[key]


def _teacher(trl: Settings, name: str, problems: list[Problem]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the teacher without its context, the loss that follows it)."""
    kind, mode, alpha = (
        _of(trl, name, f"{key}") for key in ("teacher_model_kind", "distillation_mode", "distillation_alpha")
    )
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
    parts = [(solution, feedback)] * both + [(solution, "")] * succeeds + [("", feedback)] * answers
    if not parts:
        found, do = "the teacher would read what the policy reads", "set use_successful_as_teacher"
        problems.append(Problem("use_successful_as_teacher", "false", found, do))
    frame = trl["reprompt_template"]
    context = [frame.replace("{solution}", first).replace("{feedback}", second) for first, second in parts]
    distill = {"coef": trl["distillation_weight"], "loss": loss}
    section = _grpo(trl, name, problems, notes)
    return {**section, "kind": "sdpo", "teacher": {**teacher, "context": context}, "distill": distill}


def _sdft(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del notes
    teacher, loss = _teacher(trl, name, problems)
    teacher["context"] = [trl["teacher_prompt_template"]]
    return {"kind": "sdft", "teacher": teacher, "policy_loss": loss, "epochs": trl["num_iterations"]}


def _iw_opd(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del notes
    if trl["distillation_objective"] != "iw_opd":
        found, do = "only iw_opd is translated", "use trainer=gold for a divergence over tokens"
        problems.append(Problem("distillation_objective", repr(trl["distillation_objective"]), found, do))
    advantage = {"kind": "on_policy_distill", "prefix_gamma": trl["iw_opd_gamma"]}
    return {"kind": name, "advantage": advantage, "teacher": _named(trl, problems)}


def _gold(trl: Settings, name: str, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    del name
    if trl["beta"] not in _DIRECTIONS:
        problems.append(Problem("beta", repr(trl["beta"]), "no such divergence", "use 0.0, 0.5 or 1.0"))
    if trl["lmbda"] != 1 or not trl.has("lmbda"):
        found, do = "the policy samples every completion here", "set lmbda: 1.0"
        problems.append(Problem("lmbda", "completions of the data set, too (0.5 by default)", found, do))
    if trl["top_p"] < 1 or trl["top_k"]:
        found = "tokens that sampling leaves out have no log-probability"
        problems.append(Problem("top_p", f"{trl['top_p']:g}", found, "set top_p: 1.0 and top_k: 0"))
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
}
