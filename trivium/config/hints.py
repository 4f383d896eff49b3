"""What a wrong key most likely means: the nearest key of a section, or the key for another trainer's word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from trivium.config.merging import is_mapping
from trivium.registry import suggest

FOREIGN: Mapping[str, str] = {
    # verl
    "actor_rollout_ref": "model, engine, algorithm and train",
    "adv_estimator": "algorithm.kind",
    "clip_ratio": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "custom_reward_function": "rewards",
    "default_local_dir": "run.dir",
    "entropy_coeff": "algorithm.entropy.coef",
    "experiment_name": "run.name",
    "kl_coef": "algorithm.kl.coef, with algorithm.kl.place",
    "kl_loss_coef": "algorithm.kl.coef",
    "logger": "monitors",
    "max_response_length": "engine.sampling.max_new_tokens",
    "n_gpus_per_node": "cluster.ranks",
    "ppo_epochs": "algorithm.epochs",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    "ppo_micro_batch_size_per_gpu": "train.max_tokens_per_micro_batch",
    "ppo_mini_batch_size": "algorithm.mini_batches (how many, not how large)",
    "response_length": "engine.sampling.max_new_tokens",
    "rollout.n": "schedule.group_size",
    "save_freq": "checkpoint.save_every",
    "test_freq": "evaluation.every",
    "total_epochs": "schedule.steps (train steps, not epochs)",
    "total_training_steps": "schedule.steps",
    "train_batch_size": "schedule.groups_per_step",
    "train_files": "tasks.train",
    "ulysses_sequence_parallel_size": "train.sequence_parallel",
    "use_kl_loss": "algorithm.kl.coef",
    "val_files": "evaluation.taskset, the name of a second entry of tasks",
    # TRL
    "beta": "algorithm.kl.coef",
    "bf16": "train.dtype: bfloat16",
    "epsilon": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "eval_dataset": "evaluation.taskset, the name of a second entry of tasks",
    "eval_steps": "evaluation.every",
    "gradient_accumulation_steps": "train.max_tokens_per_micro_batch (the gradient does not depend on it)",
    "learning_rate": "train.optimizer.lr",
    "logging_steps": "monitors (every step is logged)",
    "lora.r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_r": "train.lora.rank",
    "lora_rank": "train.lora.rank",
    "lr": "train.optimizer.lr",
    "lr_scheduler_type": "train.optimizer.schedule",
    "max_completion_length": "engine.sampling.max_new_tokens",
    "max_prompt_length": "engine.max_context (prompt and completion together)",
    "max_seq_length": "engine.max_context (prompt and completion together)",
    "max_steps": "schedule.steps",
    "micro_batch_size": "train.max_tokens_per_micro_batch",
    "model_name_or_path": "model.path",
    "num_generations": "schedule.group_size",
    "num_train_epochs": "schedule.steps (train steps, not epochs)",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "schedule.groups_per_step (groups, over all devices)",
    "report_to": "monitors",
    "reward_funcs": "rewards",
    "reward_weights": "rewards[].weight",
    "save_steps": "checkpoint.save_every",
    "target_modules": "train.lora.targets",
    "train_dataset": "tasks.train",
}
"""Common keys of verl's and TRL's configs (their last part, or last two) -> the key here, where the spelling is too
different for a suggestion by similarity."""

_SHOWN = 3
"""Number of another trainer's keys that one hint explains."""


def hint(where: str, value: object, known: Mapping[str, Any]) -> str:
    """What to write instead of the key at `where` (dotted), which holds `value` and is none of `known`."""
    foreign = list(_foreign(where, value))[:_SHOWN]
    if foreign:
        return "; ".join(f"{theirs} is {ours} here" for theirs, ours in foreign)
    return suggest(where.rpartition(".")[2], known) if known else "leave the key out: nothing can be set here"


def _foreign(where: str, value: object) -> Iterator[tuple[str, str]]:
    """(another trainer's key, ours) for the key, or for what it holds."""
    parts = where.split(".")
    for name in (".".join(parts[-2:]), parts[-1]):
        if name in FOREIGN and not (is_mapping(value) and any(True for _ in _inside(where, value))):
            yield name, FOREIGN[name]
            return
    if is_mapping(value):
        yield from _inside(where, value)


def _inside(where: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        yield from _foreign(f"{where}.{key}", value)


def hint_for_option(option: str, root: type[BaseModel]) -> str:
    """What to write for a command-line option that names a config value: `--steps 3` is `schedule.steps=3`."""
    name, _, value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or "..."
    if name in FOREIGN:
        return f"{name} is {FOREIGN[name]} here; values are written section.field={value}"
    matches = [path for path in _fields(root, "") if path == name or path.endswith(f".{name}")]
    if matches:
        return "write " + " or ".join(f"{path}={value}" for path in matches[:_SHOWN])
    return f"values are written section.field={value}, without dashes; --help lists the options"


def _fields(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Dotted paths of the fields of plain sections."""
    for name, field in section.model_fields.items():
        inner = _model_in(field.annotation)
        yield f"{prefix}{name}"
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def section_at(owner: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    """The section class that a location points into, through optional sections, lists and mappings."""
    annotation: Any = owner
    for part in loc:
        section = _model_in(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            annotation = None if field is None else field.annotation
        else:
            annotation = _item_of(annotation)
    return _model_in(annotation)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """A section class, or the one that is optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return next((model for part in parts if (model := _model_in(part)) is not None), None)


def _item_of(annotation: Any) -> Any:
    """What a list or a mapping holds."""
    parts = [part for part in get_args(annotation) if part not in (Ellipsis, type(None))]
    return parts[-1] if parts else None
