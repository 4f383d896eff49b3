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
from trivium.errors import ConfigError
from trivium.frontdoors.trl.translation import translate
from trivium.text.tiny import TinyModel

HERE = {"tasks": {"train": {"kind": "arithmetic"}}, "rewards": ["exact"], "engine": {"kind": "torch"}}
GRPO = {"kind": "grpo", "advantage": {"kind": "grpo"}, "aggregate": "token-mean"}
PPO = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2}
K3 = {"coef": 0.04, "estimator": {"kind": "k3", "cap": None}}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.3}
CONTEXTS = ("S {success}\nF {feedback}", "S {success}\n", "\nF {feedback}")


def reprompted(**keys: Any) -> dict[str, Any]:
    return {
        "reprompt_template": "{solution}\n{feedback}",
        "solution_template": "S {successful_previous_attempt}",
        **keys,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"beta": 0.04}, {**GRPO, "policy_loss": PPO, "kl": K3}),
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
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "off_policy_mask_threshold": 0.5},
        {
            "policy_loss": {**PPO, "kind": "gspo_sequence"},
            "aggregate": "seq-mean-token-mean",
            "gates": [{"kind": "sequence_drift", "delta": 0.5}],
        },
    ),
    "grpo, vespo": ({"loss_type": "vespo", "vespo_k_pos": 1.5}, {"policy_loss": {"kind": "vespo", "k_pos": 1.5}}),
    "grpo, entropy": ({"top_entropy_quantile": 0.2}, {"gates": [{"kind": "top_entropy", "fraction": 0.2}]}),
    "gmpo": ({}, {"policy_loss": {"kind": "gmpo", "clip_low": 0.4, "clip_high": 0.4}}),
    "sdpo": (
        reprompted(),
        {
            "kind": "sdpo",
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
            "distill": {"coef": 0.3, "loss": {"kind": "distill_student_top_k", "direction": "jsd", "tail": "bucket"}},
            "teacher": {"weights": "current", "top_k": 20, "context": [*CONTEXTS]},
        },
    ),
    "sdft": (
        {"teacher_prompt_template": "{prompt} {privileged_context}"},
        {
            "kind": "sdft",
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


def test_batches_count_completions(model: str) -> None:
    keys = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 8}
    config = translate(given("grpo", model, num_generations=4, num_iterations=2, max_steps=30, **keys)).config
    assert config["schedule"] == {"steps": 30, "group_size": 4, "groups_per_step": 32}
    assert (config["algorithm"]["mini_batches"], config["algorithm"]["epochs"]) == (4, 2)
    assert config["train"]["optimizer"] == {"lr": 1e-6, "weight_decay": 0.0, "betas": [0.9, 0.999]}
    assert config["tasks"] == {"train": {"kind": "datasets", "path": "sums", "split": "train"}}


@pytest.mark.parametrize(
    ("trainer", "keys", "named"),
    [
        ("grop", {}, ("trainer", "grpo")),
        ("grpo", {"loss_typ": "dapo"}, ("loss_typ", "loss_type")),
        ("grpo", {"loss_type": "hinge"}, ("loss_type", "hinge")),
        ("grpo", {"sync_ref_model": True}, ("sync_ref_model",)),
        ("grpo", {"distillation_weight": 0.5}, ("distillation_weight",)),
        ("sdpo", {"teacher_sync_steps": 4}, ("teacher_sync_steps",)),
        ("sdpo", {"use_successful_as_teacher": False}, ("use_successful_as_teacher",)),
        ("sdft", {"distillation_mode": "full_logits"}, ("distillation_mode", "topk_logits")),
        ("gold", {"top_p": 1.0}, ("lmbda",)),
        ("gold", {"use_uld_loss": True, "lmbda": 1.0}, ("use_uld_loss",)),
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
    assert "report_to" in done.stderr
