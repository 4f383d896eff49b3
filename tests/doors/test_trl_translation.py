"""TRL's trainers by their keys, as sections of Trivium; each config that results is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from failing import refused
from typer.testing import CliRunner

from trivium.cli import app
from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.trl.translation import translate
from trivium.text.tiny import TinyModel

HERE = {"tasks": {"train": {"kind": "arithmetic"}}, "rewards": ["exact"], "engine": {"kind": "torch"}}
GRPO = {"kind": "grpo", "advantage": {"kind": "grpo", "epsilon": 1e-4}, "aggregate": "token-mean"}
PPO = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
CORRECTED = {"coef": 0.04, "estimator": {"kind": "corrected_k3", "bound": None}}
K3 = {"coef": 0.04, "estimator": {"kind": "k3", "cap": None}}
SEQUENCE = {"importance_sampling_level": "sequence"}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.3}
CONTEXTS = ("S {success}\nF {feedback}", "S {success}\n", "\nF {feedback}")


def reprompted(**keys: Any) -> dict[str, Any]:
    return {
        "reprompt_template": "{solution}\n{feedback}",
        "solution_template": "S {successful_previous_attempt}",
        **keys,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"beta": 0.04}, {**GRPO, "policy_loss": PPO, "kl": CORRECTED}),
    "grpo, k3": ({"beta": 0.04, "use_bias_correction_kl": False, "scale_rewards": True}, {**GRPO, "kl": K3}),
    "grpo, batch": (
        {"scale_rewards": "batch"},
        {"advantage": {"kind": "grpo", "std_level": "batch", "epsilon": 1e-4}},
    ),
    "grpo, gdpo": (
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"advantage": {"kind": "gdpo", "epsilon": 1e-4}},
    ),
    "grpo, cispo": (
        {"loss_type": "cispo", "epsilon_high": 5.0},  # the largest weight, here its distance from 1
        {"policy_loss": {"kind": "cispo", "clip_high": 4.0}, "aggregate": "token-mean"},
    ),
    "grpo, luspo of tokens": ({"loss_type": "luspo"}, {"policy_loss": PPO, "aggregate": "seq-mean-token-sum"}),
    "grpo, luspo": (
        {"loss_type": "luspo", **SEQUENCE},
        {"policy_loss": {**PPO, "kind": "gspo"}, "aggregate": "seq-mean-token-sum"},
    ),
    "grpo, dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.28, "delta": 4.0},
        {
            "advantage": {"kind": "grpo", "norm_by_std": False},
            "policy_loss": {**PPO, "clip_high": 0.28, "dual_clip": 4.0},
            "aggregate": "seq-mean-token-sum-norm",
        },
    ),
    "grpo, adaptive entropy": (ADAPTIVE, {"entropy": {"coef": 0.01, "target": 0.3, "step": 0.005}}),
    "grpo, sequences": (
        {**SEQUENCE, "loss_type": "grpo", "off_policy_mask_threshold": 0.5},
        {
            "policy_loss": {**PPO, "kind": "gspo_sequence"},
            "aggregate": "seq-mean-token-mean",
            "gates": [{"kind": "sequence_drift", "delta": 0.5}],
        },
    ),
    "grpo, vespo": ({"loss_type": "vespo", "vespo_k_pos": 1.5}, {"policy_loss": {"kind": "vespo", "k_pos": 1.5}}),
    "grpo, entropy": ({"top_entropy_quantile": 0.2}, {"gates": [{"kind": "top_entropy", "fraction": 0.2}]}),
    "gmpo": ({"beta": 0.04}, {"policy_loss": {"kind": "gmpo", "clip_low": 0.4, "clip_high": 0.4}, "kl": K3}),
    "sdpo": (
        reprompted(),
        {
            "kind": "sdpo",
            "aggregate": "seq-mean-token-mean",
            "distill": {"coef": 1.0, "loss": {"kind": "distill"}},
            "teacher": {"weights": "average", "rate": 0.05, "top_k": 64, "context": [CONTEXTS[1]]},
        },
    ),
    "sdpo, feedback": (
        reprompted(
            feedback_template="F {feedback_raw}",
            include_environment_feedback=True,
            distillation_mode="topk_logits",
            distillation_topk=20,
            distillation_alpha=0.5,
            distillation_add_tail=True,
            distillation_weight=0.3,
            teacher_model_kind="live",
        ),
        {
            "aggregate": "token-mean",
            "distill": {"coef": 0.3, "loss": {"kind": "distill_student_top_k", "direction": "jsd", "tail": "bucket"}},
            "teacher": {"weights": "current", "top_k": 20, "context": [*CONTEXTS]},
        },
    ),
    "sdft": (
        {"teacher_prompt_template": "{prompt} {privileged_context}"},
        {
            "kind": "sdft",
            "aggregate": "seq-mean-token-mean",
            "policy_loss": {"kind": "distill_student_top_k", "direction": "jsd", "tail": "left_out"},
            "teacher": {"weights": "initial", "top_k": 100, "context": ["{prompt} {privileged_context}"]},
        },
    ),
    "iw_opd": ({"iw_opd_gamma": 0.7}, {"advantage": {"kind": "on_policy_distill", "prefix_gamma": 0.7}}),
    "gold": (
        {"lmbda": 1.0, "beta": 0.0, "top_p": 1.0},
        {"policy_loss": {"kind": "distill_top_k", "direction": "forward"}},
    ),
    "gkd": ({"lmbda": 1.0, "beta": 1.0}, {"policy_loss": {"kind": "distill_top_k", "direction": "reverse"}}),
    "a2po": (
        {"beta1": 0.4, "beta2": 0.01},
        {
            "advantage": {"kind": "a_star_po", "beta": 0.4},
            "policy_loss": {"kind": "a_star_po", "beta": 0.01},
            "filters": ["reference_solved"],
        },
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel(TinyModel.Config(), seed=0).materialize(tmp_path_factory.mktemp("trl") / "model"))


def given(case: str, model: str, **keys: Any) -> dict[str, Any]:
    trainer = case.partition(",")[0]
    teacher = {"teacher_model_name_or_path": model} if trainer in ("iw_opd", "gold", "gkd") else {}
    return {"trainer": trainer, "model_name_or_path": model, "dataset_name": "sums", **teacher, **keys}


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_is_an_algorithm(case: str, model: str) -> None:
    keys, expected = CASES[case]
    translation = translate(given(case, model, **keys))
    section = translation.config["algorithm"]
    for name, value in expected.items():
        found = section[name]
        if name == "policy_loss" and "vespo" in case:
            found = {key: found[key] for key in value}
        assert found == value, name
    config_from_mapping(merged({**translation.config, "tasks": {}, "rewards": []}, HERE))


def test_batches_count_completions_and_steps_count_updates(model: str) -> None:
    keys = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 8}
    length = {"max_steps": 30, "save_steps": 20, "warmup_steps": 0.3, "lr_scheduler_type": "cosine"}
    config = translate(given("grpo", model, num_generations=4, num_iterations=2, **keys, **length)).config
    assert (config["algorithm"]["mini_batches"], config["algorithm"]["epochs"]) == (4, 2)  # eight updates a train step
    assert config["schedule"] == {"steps": 4, "group_size": 4, "groups_per_step": 32}
    assert config["checkpoint"] == {"save_every": 3}
    optimizer = {"lr": 1e-6, "weight_decay": 0.0, "betas": [0.9, 0.999], "schedule": "cosine", "warmup_steps": 2}
    assert config["train"]["optimizer"] == optimizer
    assert config["tasks"] == {"train": {"kind": "datasets", "path": "sums", "split": "train"}}


@pytest.mark.parametrize(
    ("trainer", "keys", "expected"),
    [
        ("grpo", {"generation_batch_size": 64, "gradient_accumulation_steps": 2}, (8, 8, 4)),
        ("gold", {"generation_batch_size": 4, "num_generations": 2, "lmbda": 1.0, "top_p": 1.0}, (2, 4, 1)),  # prompts
        ("sdft", {"num_generations": 4}, (4, 2, 1)),
    ],
)
def test_a_generation_is_a_train_step(
    trainer: str, keys: dict[str, Any], expected: tuple[int, int, int], model: str
) -> None:
    config = translate(given(trainer, model, **keys)).config
    schedule = config["schedule"]
    found = (schedule["group_size"], schedule["groups_per_step"], config["algorithm"]["mini_batches"])
    assert found == expected


STEPS = {"eval_strategy": "steps", "max_steps": 100}
SAMPLED = {"taskset": "test", "samples": 8, "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0}}


@pytest.mark.parametrize(
    ("trainer", "keys", "expected"),
    [
        ("grpo", {**STEPS, "eval_steps": 25, "num_iterations": 2}, {**SAMPLED, "every": 13}),
        (
            "grpo",
            {**STEPS, "eval_steps": 0.1, "num_generations_eval": 2, "top_p": 0.9},
            {"taskset": "test", "every": 10, "samples": 2, "sampling": {**SAMPLED["sampling"], "top_p": 0.9}},
        ),
        ("grpo", {"eval_strategy": "epoch", "max_steps": 9}, {**SAMPLED, "every": 0}),
        ("sft", STEPS, {"held_out": "test", "every": 10}),  # TRL's logging_steps
        ("dpo", {**STEPS, "logging_steps": 5}, {"held_out": "test", "every": 5}),
        ("grpo", {"eval_strategy": False, "eval_steps": 5, "max_steps": 9}, None),
    ],
)
def test_evaluations(trainer: str, keys: dict[str, Any], expected: dict[str, Any] | None, model: str) -> None:
    config = translate(given(trainer, model, **keys, dataset_test_split="dev")).config
    assert config.get("evaluation") == expected
    assert config["tasks"].get("test", {}).get("split") == (expected and "dev")
    tasks = {"train": {"kind": "arithmetic", "holdout_fraction": 0.1}}
    tasks["test"] = {**tasks["train"], "part": "holdout"}
    config_from_mapping(merged({**config, "tasks": {}, "rewards": []}, {**HERE, "tasks": tasks}))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(None, ("linear", 3)), ("constant_with_warmup", ("constant", 3)), ("constant", ("constant", 0))],
)
def test_the_schedule_of_the_learning_rate(kind: str | None, expected: tuple[str, int], model: str) -> None:
    keys = {"warmup_steps": 3} if kind is None else {"warmup_steps": 3, "lr_scheduler_type": kind}
    optimizer = translate(given("gkd", model, lmbda=1.0, **keys)).config["train"]["optimizer"]
    assert (optimizer["schedule"], optimizer["warmup_steps"]) == expected


@pytest.mark.parametrize(
    ("trainer", "keys", "expected"),
    [
        ("sft", {"max_length": 64}, "cut_right"),
        ("dpo", {"max_length": 64, "truncation_mode": "keep_end"}, "cut_left"),
        ("reward", {"max_length": 64}, "drop"),
        ("sft", {"max_length": None}, None),
        ("sft", {}, None),
    ],
)
def test_the_length_of_rows(trainer: str, keys: dict[str, Any], expected: str | None, model: str) -> None:
    tasks = translate(given(trainer, model, **keys, max_steps=8)).config["tasks"]["train"]
    assert (tasks.get("max_tokens"), tasks.get("on_overlong")) == (expected and 64, expected)


@pytest.mark.parametrize("trainer", ["grpo", "sft", "dpo"])
def test_variables_of_the_chat_template(trainer: str, model: str) -> None:
    keys = {"chat_template_kwargs": {"enable_thinking": False}, "max_steps": 8}
    assert translate(given(trainer, model, **keys)).config["model"]["template_variables"] == {"enable_thinking": False}
    for nothing in ({}, None):
        translated = translate(given(trainer, model, chat_template_kwargs=nothing, max_steps=8)).config
        assert "template_variables" not in translated["model"]


@pytest.mark.parametrize(
    ("trainer", "keys", "named"),
    [
        ("grpo", {"num_train_epochs": 2}, ("schedule.steps", "2 epochs", "2 * tasks / 1 ")),
        ("grpo", {"warmup_steps": 0.1}, ("train.optimizer.warmup_steps", "0.1", "max_steps")),
        ("sft", {"eval_strategy": "epoch", "max_steps": 9}, ("evaluation.every",)),
        ("sdft", {"eval_strategy": "steps", "max_steps": 9}, ("eval_strategy", "rewards")),
        ("sft", {"eval_strategy": "steps", "eval_steps": 0.1}, ("evaluation.every",)),
        ("sft", {"dataset_test_split": "dev", "max_steps": 9}, ("dataset_test_split", "eval_strategy")),
        ("grpo", {"warmup_ratio": 0.1}, ("train.optimizer.warmup_steps", "0.1", "max_steps")),
        ("grpo", {"use_vllm": True, "vllm_mode": "server"}, ("vllm_mode", "cluster")),
        ("grpo", {**ADAPTIVE, "max_steps": 3}, ("algorithm.entropy", "entropy_coef_max")),
        ("sdpo", {"distillation_weight": 0.5, "max_steps": 3}, ("algorithm.aggregate", "token-mean for both")),
    ],
)
def test_a_difference_is_a_note(trainer: str, keys: dict[str, Any], named: tuple[str, ...], model: str) -> None:
    notes = translate(given(trainer, model, **keys)).notes
    assert any(all(name in note for name in named) for note in notes), notes
    plain = translate(given(trainer, model, max_steps=3)).notes
    assert not any(named[0] in note for note in plain), plain


@pytest.mark.parametrize(
    ("trainer", "keys", "named"),
    [
        ("grop", {}, ("trainer", "grpo")),
        ("grpo", {"loss_typ": "dapo"}, ("loss_typ", "loss_type")),
        ("grpo", {"loss_type": "hinge"}, ("loss_type", "hinge")),
        ("grpo", {"loss_type": "cispo"}, ("epsilon_high", "0.2", "epsilon")),
        ("grpo", {"loss_type": "cispo", "epsilon_high": 0.28}, ("epsilon_high", "0.28")),
        ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0, **SEQUENCE}, ("importance_sampling_level", "cispo")),
        ("grpo", {"loss_type": "sapo", **SEQUENCE}, ("importance_sampling_level", "sapo")),
        ("grpo", {"importance_sampling_level": "sequence_token"}, ("importance_sampling_level", "sequence_token")),
        ("grpo", {"beta": 0.1, "loss_type": "grpo", **SEQUENCE}, ("use_bias_correction_kl",)),
        ("grpo", {"scale_rewards": "grup"}, ("scale_rewards", "group")),
        ("grpo", {"multi_objective_aggregation": "sum"}, ("multi_objective_aggregation", "sum_then_normalize")),
        (
            "grpo",
            {"generation_batch_size": 16, "steps_per_generation": 2},
            ("generation_batch_size", "steps_per_generation"),
        ),
        ("grpo", {"generation_batch_size": 12}, ("generation_batch_size", "per_device_train_batch_size")),
        ("grpo", {"num_generations": 3}, ("num_generations", 3, 8)),
        ("grpo", {"steps_per_generation": 3, "gradient_accumulation_steps": 2}, ("gradient_accumulation_steps", 3)),
        ("grpo", {"num_iterations": 0}, ("num_iterations",)),
        ("sft", {"eval_strategy": "stesp"}, ("eval_strategy", "steps")),
        ("grpo", {"lr_scheduler_type": "polynomial"}, ("lr_scheduler_type", "polynomial")),
        ("grpo", {"distillation_weight": 0.5}, ("distillation_weight",)),
        ("sdpo", {"use_successful_as_teacher": False}, ("use_successful_as_teacher",)),
        ("sdft", {"distillation_mode": "full_logits"}, ("distillation_mode", "topk_logits")),
        ("gold", {"top_p": 1.0}, ("lmbda",)),
        ("iw_opd", {"distillation_objective": "jsd"}, ("distillation_objective",)),
    ],
)
def test_what_is_not_translated_is_named(
    trainer: str, keys: dict[str, Any], named: tuple[str, ...], model: str
) -> None:
    with refused(ConfigError, *named):
        translate(given(trainer, model, **keys))


def test_the_command_reads_a_file_and_the_name_of_the_trainer(tmp_path: Path, model: str) -> None:
    file = tmp_path / "sdft.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": model, "dataset_name": "sums", "report_to": "wandb"}))
    done = CliRunner().invoke(app, ["translate", "--from", "trl", str(file), "trainer=sdft"])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout)["algorithm"]["kind"] == "sdft"
    assert yaml.safe_load(done.stdout)["monitors"][2]["kind"] == "wandb"
