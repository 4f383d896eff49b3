"""Trinity-RFT's config as a RunConfig."""

from __future__ import annotations

import asyncio
import json
import uuid
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.failing import refused
from trivium.config import RunConfig, build, config_from_mapping
from trivium.config.resume import fingerprint
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.tables import KeyTable, Mapped, Restricted
from trivium.frontdoors.trinity import Trainer
from trivium.frontdoors.trinity.config.algorithm_section import ALGORITHMS
from trivium.frontdoors.trinity.config.config_table import TABLE, TRAINER_CONFIG
from trivium.frontdoors.trinity.config.keys_of_data import EXPERIENCE_BUFFER, TASKSET
from trivium.frontdoors.trinity.translation import translate
from trivium.text.tiny import TinyModel
from trivium.types import Group, Message, StopReason, Task, Trajectory, Turn

ROWS = 40
WHERE = "buffer.explorer_input.taskset"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
Overrides = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trinity")
    TinyModel(TinyModel.Config(layers=1, hidden=8, heads=1, mlp=8, max_position=256), seed=0).materialize(
        folder / "model"
    )
    rows = [{"question": f"{n}+1=", "answer": f"so\n#### {n + 1}", "rate": n / ROWS} for n in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [
        {
            "messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}],
            "prompt": row["question"],
            "chosen": row["answer"],
            "rejected": "no",
        }
        for row in rows
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return folder


def original_of(folder: Path, changes: Overrides) -> dict[str, Any]:
    """A config with these keys changed."""
    base: dict[str, Any] = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(folder),
        "model": {"model_path": str(folder / "model"), "max_model_len": 128, "max_response_tokens": 16},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer": {
            "batch_size": 8,
            "explorer_input": {
                "taskset": {
                    "path": str(folder / "rows.jsonl"),
                    "format": {"prompt_key": "question", "response_key": "answer"},
                },
                "default_workflow_type": "math_workflow",
            },
        },
    }
    for key, value in changes.items():
        section, *rest = reversed(key.split("."))
        above = base
        for part in reversed(rest):
            above = above.setdefault(part, {})
        above[section] = value
    return base


def mapping_of(folder: Path, changes: Overrides) -> dict[str, Any]:
    return translate(original_of(folder, changes), device="cpu").config


def config_of(folder: Path, changes: Overrides) -> RunConfig:
    return config_from_mapping(mapping_of(folder, changes))


def at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = (
            config[int(part)] if part.isdigit() else config[part] if isinstance(config, dict) else getattr(config, part)
        )
    return config


def rows_of(folder: Path, kind: str, **changes: Any) -> Overrides:
    """What learning from rows takes."""
    return {
        "mode": "train",
        "algorithm.algorithm_type": kind,
        "buffer.train_batch_size": 8,
        EXPERIENCES: {"storage_type": "file", "path": str(folder / "talks.jsonl"), **changes},
    }


BECOMES: list[tuple[Overrides, str, Any]] = [
    ({}, "schedule.groups_per_step", 8),
    ({}, "schedule.group_size", 4),
    ({}, "schedule.steps", 5),
    ({"buffer.total_epochs": 3}, "schedule.steps", 15),
    ({"buffer.total_steps": 7}, "schedule.steps", 7),
    ({"buffer.total_epochs": 3, "trainer.total_steps": 4}, "schedule.steps", 4),
    ({"trainer.total_steps": 400}, "schedule.steps", 5),
    ({"buffer.train_batch_size": 16}, "schedule.groups_per_step", 4),
    ({"buffer.train_batch_size": 16}, "schedule.steps", 10),
    ({"buffer.train_batch_size": 16, "synchronizer.explorer_sync_interval": 1}, "max_staleness", 1),
    ({}, "schedule.shuffle", False),
    ({f"{WHERE}.data_selector.selector_type": "shuffle"}, "schedule.shuffle", True),
    (
        {f"{WHERE}.data_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["rate"]}},
        "schedule.curriculum.easy_first",
        False,
    ),
    ({}, "run.name", "p/n"),
    ({"group": "g"}, "run.name", "p/g/n"),
    ({"ray_namespace": "space"}, "run.name", "space"),
    ({"mode": "colocate"}, "run.mode", "both"),
    ({}, "max_staleness", 0),
    ({"synchronizer.sync_interval": 10}, "max_staleness", 9),
    ({"synchronizer.sync_offset": 1}, "max_staleness", 1),
    ({"synchronizer.sync_interval": 10, "synchronizer.sync_offset": 2}, "sync.offset", 2),
    ({"synchronizer.sync_style": "explorer_driven"}, "sync.style", "dynamic_by_explorer"),
    ({"synchronizer.sync_style": "dynamic_by_trainer"}, "sync.style", "dynamic_by_trainer"),
    ({"synchronizer.sync_style": "fully_async"}, "sync.in_flight", "update"),
    ({"synchronizer.sync_style": "fully_async"}, "max_staleness", 2),
    ({"synchronizer.sync_method": "nccl"}, "sync.method", "memory"),
    ({"synchronizer.sync_method": "CHECKPOINT"}, "sync.method", "checkpoint"),
    (
        {
            "synchronizer.sync_interval": 2,
            "synchronizer.sync_offset": 3,
            "algorithm.sample_strategy": "staleness_control",
            "algorithm.sample_strategy_args": {"max_staleness": 2},
        },
        "buffer.strategy.max_staleness",
        2,
    ),
    (
        {"algorithm.sample_strategy": "staleness_control", "algorithm.sample_strategy_args": {"max_staleness": 2}},
        "max_staleness",
        0,
    ),
    ({"algorithm.optimizer.lr": "1e-5"}, "train.optimizer.lr", 1e-5),
    ({}, "train.optimizer.weight_decay", 0.01),
    ({"algorithm.optimizer.lr_warmup_steps_ratio": 0.5}, "train.optimizer.warmup_steps", 2),
    ({"algorithm.optimizer.warmup_style": "cosine"}, "train.optimizer.schedule", "cosine"),
    ({"trainer.trainer_config.actor_rollout_ref.actor.optim.lr": 3e-6}, "train.optimizer.lr", 3e-6),
    ({"trainer.actor_grad_clip": 0.5}, "train.max_grad_norm", 0.5),
    ({}, "train.max_tokens_per_micro_batch", 256),
    ({"model.lora_configs": [{"lora_rank": 8, "lora_alpha": 16}]}, "train.lora.rank", 8),
    (
        {"monitor.monitor_type": "mlflow", "monitor.monitor_args": {"uri": "sqlite:///a.db"}},
        "monitors.2.experiment",
        "p",
    ),
    ({}, "algorithm.kl.coef", 0.001),
    ({}, "algorithm.kl.estimator.kind", "k2"),
    ({"algorithm.kl_loss_fn": "k3", "algorithm.kl_loss_fn_args": {"kl_coef": 0.1}}, "algorithm.kl.estimator.cap", None),
    ({"algorithm.kl_loss_fn": "none"}, "algorithm.kl.coef", 0.0),
    (
        {
            "algorithm.kl_loss_fn": "none",
            "algorithm.kl_penalty_fn": "k1",
            "algorithm.kl_penalty_fn_args": {"kl_coef": 0.2, "adaptive": True, "target_kl": 0.3, "horizon": 50},
        },
        "algorithm.kl.horizon",
        50,
    ),
    ({"algorithm.entropy_loss_fn_args": {"entropy_coef": 0.01}}, "algorithm.entropy.coef", 0.01),
    ({"algorithm.advantage_fn_args": {"std_cal_level": "batch"}}, "algorithm.advantage.std_level", "batch"),
    ({"algorithm.advantage_fn_args": {"rank_penalty": 0.25}}, "algorithm.advantage.kind", "grpo_rank_penalty"),
    ({"algorithm.advantage_fn_args": {"std_threshold": 0.1}}, "algorithm.filters.0.threshold", 0.1),
    ({"algorithm.add_strategy": "opmd", "algorithm.add_strategy_args": {"tau": 2}}, "algorithm.advantage.kind", "opmd"),
    ({"algorithm.policy_loss_fn_args": {"clip_ratio_c": 5}}, "algorithm.policy_loss.clip_low", 0.2),
    (
        {"algorithm.policy_loss_fn_args": {"clip_range": 0.1, "clip_range_high": 0.3}},
        "algorithm.policy_loss.clip_high",
        0.3,
    ),
    ({"algorithm.policy_loss_fn_args": {"enable_sequence_masking": True}}, "algorithm.gates.0.delta", 0.1),
    ({"algorithm.policy_loss_fn_args": {"fallback_to_policy_gradient": True}}, "algorithm.old_log_prob", "recompute"),
    ({"algorithm.bypass_old_logprobs": False}, "algorithm.old_log_prob", "recompute"),
    ({"algorithm.loss_agg_mode": "seq-mean-token-sum"}, "algorithm.aggregate", "seq-mean-token-sum"),
    ({"algorithm.use_token_level_loss": False}, "algorithm.aggregate", "seq-mean-token-mean"),
    ({"algorithm.algorithm_type": "gspo"}, "algorithm.aggregate", "seq-mean-token-mean"),
    ({"algorithm.algorithm_type": "gspo"}, "algorithm.policy_loss.clip_high", 4e-4),
    ({"algorithm.algorithm_type": "cispo"}, "algorithm.policy_loss.clip_high", 0.28),
    ({"algorithm.algorithm_type": "topr"}, "algorithm.policy_loss.level", "token"),
    ({"algorithm.algorithm_type": "ppo"}, "train.critic_optimizer.lr", 1e-5),
    ({"algorithm.algorithm_type": "ppo", "trainer.critic_warmup": 3}, "algorithm.critic_warmup", 3),
    ({"algorithm.algorithm_type": "ppo"}, "algorithm.critic.clip", 0.5),
    (
        {"algorithm.algorithm_type": "rec", "algorithm.policy_loss_fn_args": {"clip_mode": "gspo-one-side"}},
        "algorithm.policy_loss.level",
        "sequence",
    ),
    (
        {
            "algorithm.algorithm_type": "rec",
            "algorithm.policy_loss_fn_args": {"regularizer": "forward-kl", "regularizer_coef": 0.1},
        },
        "algorithm.policy_loss.kind",
        "rec_regularized",
    ),
    (
        {"algorithm.algorithm_type": "rec", "algorithm.policy_loss_fn_args": {"weight": "advantage"}},
        "algorithm.policy_loss.kind",
        "red_weight",
    ),
    ({}, "engine.max_context", 128),
    ({"model.max_response_tokens": None, "model.max_prompt_tokens": 100}, "engine.sampling.max_new_tokens", 28),
    ({"model.max_response_tokens": None}, "engine.sampling.max_new_tokens", 64),
    ({f"{WHERE}.rollout_args.max_tokens": 5}, "engine.sampling.max_new_tokens", 5),
    ({f"{WHERE}.rollout_args.temperature": 0.7}, "engine.sampling.temperature", 0.7),
    ({"explorer.over_rollout.ratio": 0.2}, "schedule.over_rollout", 0.25),
    ({f"{WHERE}.format.system_prompt": "Say."}, "tasks.train.system", "Say."),
    ({f"{WHERE}.default_reward_fn_type": "countdown_reward"}, "rewards.0.name", "score"),
    ({f"{WHERE}.format.image_key": "pictures"}, "tasks.train.images", "pictures"),
    (
        {f"{WHERE}.default_reward_fn_type": "my_rewards.py:Mine", f"{WHERE}.reward_fn_args": {"a": 1}},
        "rewards.0.args",
        {"a": 1},
    ),
    ({f"{WHERE}.default_reward_fn_type": "my.rewards.Mine"}, "rewards.0.function", "my.rewards:Mine"),
    (
        {"trainer.trainer_config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 99},
        "train.max_tokens_per_micro_batch",
        99,
    ),
    ({f"{WHERE}.default_workflow_type": "math_boxed_workflow"}, "algorithm.mask_truncated", True),
    (
        {
            "data_processor.experience_pipeline.operators": [
                {"name": "mask_response_truncated"},
                {"name": "reward_std_filter", "args": {"threshold": 0.1}},
            ]
        },
        "buffer.operators.0.threshold",
        0.1,
    ),
    (
        {
            f"{EXPERIENCES}.replay_buffer": {
                "enable": True,
                "reuse_cooldown_time": 0.1,
                "priority_fn_args": {"decay": 1.5},
            }
        },
        "buffer.strategy.decay",
        1.5,
    ),
    ({f"{EXPERIENCES}.replay_buffer.enable": True}, "buffer.strategy.kind", "default"),
    ({"algorithm.algorithm_type": "m2po", "algorithm.policy_loss_fn_args": {"m2": 0.1}}, "algorithm.kl.coef", 0.0),
    (
        {f"{WHERE}.task_selector": {"selector_type": "difficulty_based", "feature_keys": ["weak", "rate"]}},
        "schedule.curriculum.references",
        ("weak", "rate"),
    ),
    (
        {
            f"{WHERE}.data_selector": {
                "selector_type": "difficulty_based",
                "feature_keys": ["weak", "rate"],
                "kwargs": {"m": 8, "tau": 0.0, "do_sample": True},
            }
        },
        "schedule.curriculum.trials",
        8,
    ),
    (
        {f"{WHERE}.default_workflow_type": "math_boxed_workflow", f"{WHERE}.workflow_args": {"use_base": True}},
        "model.chat_template",
        "plain",
    ),
    (
        {
            "model.enable_thinking": False,
            "model.custom_chat_template": "{{ enable_thinking }}{{ messages[0].content }}",
        },
        "model.template_variables",
        {"enable_thinking": False},
    ),
    ({"model.enable_thinking": False}, "model.template_variables", {}),
    ({"explorer.env_vars": {"A": "b"}, "explorer.dynamic_timeout": {"enable": True}}, "schedule.steps", 5),
    (
        {
            f"{WHERE}.default_workflow_type": "rubric_judge_workflow",
            "explorer.auxiliary_models": [{"model_path": "owner/judge", "base_port": 9000}],
        },
        "rewards.0.urls",
        ("http://127.0.0.1:9000/v1",),
    ),
    ({f"{WHERE}.default_workflow_type": "frozen_lake_workflow"}, "workflow.environment_args.env_max_steps", 8),
    (
        {
            f"{WHERE}.default_workflow_type": "trivium.frontdoors.trinity:SimpleWorkflow",
            f"{WHERE}.default_reward_fn_type": "math_boxed_reward",
        },
        "workflow.reward_fn",
        "math_boxed_reward",
    ),
]


@pytest.mark.parametrize(("changes", "path", "value"), BECOMES)
def test_a_key_becomes(folder: Path, changes: Overrides, path: str, value: Any) -> None:
    found = at(config_of(folder, changes), path)
    assert found == pytest.approx(value) if isinstance(value, float) else found == value


def changes_for(folder: Path, name: str) -> Overrides:
    """A config of this algorithm_type."""
    more: Overrides = {"algorithm.algorithm_type": name}
    if name in ("sft", "dpo"):
        more = rows_of(folder, name, format={"prompt_type": "messages", "messages_key": "messages"})
    if name == "dpo":
        more = rows_of(folder, name, format={"prompt_type": "plaintext"})
    if name in ("mix", "mix_chord"):
        more |= {
            "buffer.train_batch_size": 40,
            "algorithm.sample_strategy_args": {"expert_data_ratio": 0.2},
            "buffer.trainer_input.auxiliary_buffers.sft_dataset": {
                "storage_type": "file",
                "path": str(folder / "talks.jsonl"),
                "format": {"messages_key": "messages"},
            },
        }
    if name in ("on_policy_distill", "jsd"):
        more |= {
            f"{WHERE}.default_workflow_type": "on_policy_distill_math_workflow",
            "explorer.auxiliary_models": [{"model_path": str(folder / "model")}],
        }
    return more


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_is_one_here(folder: Path, name: str) -> None:
    config = config_of(folder, changes_for(folder, name))
    if name in ("mix", "mix_chord"):
        stored = config.buffer.strategy.num_stored(config.schedule.groups_per_step)
        assert (stored, config.schedule.groups_per_step) == (8, 16), "8 of 40 experiences are the expert's: 8 groups"
    kl = getattr(getattr(config.algorithm, "kl", None), "coef", 0.0)
    assert kl == (0.001 if ALGORITHMS[name].kl == "k2" and name != "dpo" else 0.0)


OWN_ENGINE = """
from trivium.frontdoors.trinity import TrainEngineWrapper

class Own(TrainEngineWrapper):
    train_step_num = 0

    def __init__(self, config): ...
    def prepare(self): ...
    def train_step(self, batch): ...
    def save_checkpoint(self, block_until_saved=False): ...
    def sync_weight(self): ...
    def upload_state_dict(self): ...
    def save_state_dict(self): ...
"""


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"sft", "dpo"}))
def test_a_users_engine_gets_advantages_unless_the_estimator_reads_a_model(
    folder: Path, name: str, tmp_path: Path
) -> None:
    """A KL in the loss needs a reference, which is the engine's: the advantages do not."""
    (tmp_path / "own.py").write_text(OWN_ENGINE)
    changes: Overrides = {"checkpoint_root_dir": str(tmp_path), "trainer.trainer_type": f"{tmp_path / 'own.py'}:Own"}
    reads_a_model = name in ("ppo", "on_policy_distill", "jsd")
    for further in ({}, {"algorithm.bypass_old_logprobs": False}):
        own = {**changes, **further, "name": uuid.uuid4().hex}  # runs of a Ray instance find each other by name
        trainer = Trainer(original_of(folder, {**changes_for(folder, name), **own}))
        batch, _ = trainer.core.wrapped.experiences(rolled_out())
        asyncio.run(trainer.shutdown())
        assert (batch.advantages is None, batch.returns is None) == (reads_a_model, reads_a_model)
        assert reads_a_model or (batch.advantages is not None and batch.advantages.shape == batch.action_masks.shape)
        assert reads_a_model or all(each.advantages is not None for each in batch)


ARRAYS = np.array([5, 6, 7]), np.array([8, 9]), np.array([-1.0, -2.0]), np.zeros(2)


def rolled_out() -> list[Group]:
    """Two groups of four completions, right and wrong ones, as an engine samples them."""
    groups: list[Group] = []
    for number in range(2):
        members = [
            Trajectory(
                index,
                (Turn(*ARRAYS, StopReason.EOS, "12", reward=index % 2, state="start"),),
                {"reward": float(index % 2)},
            )
            for index in range(5)
        ]
        task = Task(str(number), (Message("user", "1+1="),))
        groups.append(Group(number, task, tuple(members[:4]), greedy=members[4]))
    return groups


def test_the_strength_of_dpo_is_the_coefficient_that_its_examples_write(folder: Path) -> None:
    pairs = rows_of(folder, "dpo", format={"prompt_type": "plaintext"})
    config = config_of(folder, {**pairs, "algorithm.kl_loss_fn": "k1", "algorithm.kl_loss_fn_args": {"kl_coef": 0.3}})
    assert (at(config, "algorithm.pair_loss.beta"), config.schedule.group_size) == (0.3, 2)
    assert (config.run.mode, config.buffer.kind, config.schedule.groups_per_step) == ("both", "files", 8)
    both = {"algorithm.policy_loss_fn_args": {"beta": 0.2}, "algorithm.kl_loss_fn_args": {"kl_coef": 0.3}}
    assert "algorithm.kl_loss_fn_args.kl_coef" in problems_of(folder, {**pairs, **both})


def problems_of(folder: Path, changes: Overrides) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        mapping_of(folder, changes)
    return {problem.where: str(problem) for problem in error.value.problems}


REFUSED: list[tuple[Overrides, str, str]] = [
    ({"trainer.save_intervall": 3}, "trainer.save_intervall", "trainer.save_interval"),
    ({f"{WHERE}.format.promt_key": "q"}, f"{WHERE}.format.promt_key", "format.prompt_key"),
    ({"trainer.trainer_strategy": "megatron"}, "trainer.trainer_strategy", "Megatron"),
    ({"model.external_model.enable": True}, "model.external_model", "use mode bench"),
    ({"trainer.trainer_type": "tinker"}, "trainer.trainer_type", "my_engine.py:Mine"),
    ({"algorithm.algorithm_type": "grppo"}, "algorithm.algorithm_type", "did you mean 'grpo'"),
    ({"algorithm.algorithm_type": "cpt"}, "algorithm.algorithm_type", "use sft"),
    (
        {f"{WHERE}.default_workflow_type": "math_trainable_ruler_workflow"},
        f"{WHERE}.default_workflow_type",
        "rubric_judge_workflow",
    ),
    ({"algorithm.advantage_fn": "grpoo"}, "algorithm.advantage_fn", "did you mean 'grpo'"),
    ({"algorithm.policy_loss_fn_args": {"clip": 1}}, "algorithm.policy_loss_fn_args.clip", "clip_range"),
    ({"algorithm.kl_penalty_fn": "k1"}, "algorithm.kl_penalty_fn", "set algorithm.kl_loss_fn: none"),
    ({"trainer.critic_warmup": 2}, "trainer.critic_warmup", "has no critic"),
    ({"buffer.train_batch_size": 30}, "buffer.train_batch_size", "whole groups of 4"),
    ({"mode": "trian"}, "mode", "no such mode"),
    ({"monitor.monitor_type": "swanlab"}, "monitor.monitor_type", "wandb"),
    ({"monitor.monitor_args": {"api_key": "secret"}}, "monitor.monitor_args.api_key", "environment"),
    ({"synchronizer.sync_style": "later"}, "synchronizer.sync_style", "fully_async"),
    ({f"{WHERE}.default_workflow_type": "alfworld_workflow"}, f"{WHERE}.default_workflow_type", "multi_turn"),
    ({f"{WHERE}.default_workflow_type": "math_rm_workflow"}, f"{WHERE}.default_workflow_type", "kind: model"),
    ({f"{WHERE}.default_workflow_type": "rubric_judge_workflow"}, f"{WHERE}.default_workflow_type", "auxiliary_models"),
    ({f"{WHERE}.default_workflow_type": "as_react_workflow"}, f"{WHERE}.default_workflow_type", "run.mode serve"),
    ({f"{WHERE}.default_workflow_type": "sudoku_workflow"}, f"{WHERE}.default_workflow_type", "multi_turn"),
    ({f"{WHERE}.default_workflow_type": "simple_workflow"}, f"{WHERE}.default_workflow_type", "SimpleWorkflow"),
    ({f"{WHERE}.default_workflow_type": "math_workflw"}, f"{WHERE}.default_workflow_type", "'math_workflow'"),
    ({f"{WHERE}.default_reward_fn_type": "accuracy_reward"}, f"{WHERE}.default_reward_fn_type", "file.py:Name"),
    ({f"{WHERE}.default_reward_fn_type": "math_rewrd"}, f"{WHERE}.default_reward_fn_type", "'math_reward'"),
    (
        {f"{WHERE}.data_selector.selector_type": "difficulty_based"},
        f"{WHERE}.data_selector.selector_type",
        "shuffle",
    ),
    (
        {
            f"{WHERE}.data_selector": {
                "selector_type": "difficulty_based",
                "feature_keys": ["weak", "rate"],
                "kwargs": {"taw": 1},
            }
        },
        f"{WHERE}.data_selector.kwargs.taw",
        "did you mean 'tau'",
    ),
    ({"data_processor.task_pipeline": {"operators": [{"name": "x"}]}}, "data_processor.task_pipeline", "Data-Juicer"),
    (
        {"data_processor.experience_pipeline.operators": [{"name": "data_juicer"}]},
        "data_processor.experience_pipeline.operators[0]",
        "file.py:Name",
    ),
    ({f"{EXPERIENCES}.path": "mysql://host/db", "mode": "explore"}, f"{EXPERIENCES}.path", "PostgreSQL".lower()),
    ({"mode": "train"}, "buffer.train_batch_size", "in experiences"),
    ({"algorithm.algorithm_type": "jsd"}, "explorer.auxiliary_models", "name it"),
    (
        {"trainer.trainer_config.actor_rollout_ref.actor.nope": 1},
        "trainer.trainer_config.actor_rollout_ref.actor.nope",
        "no key",
    ),
    ({"explorer.over_rollout.ratio": 1.0}, "explorer.over_rollout.ratio", "below 1"),
    ({"explorer.over_rollout.ratio": -0.1}, "explorer.over_rollout.ratio", "-0.1"),
    ({"model.model_path": "${oc.env:NO_SUCH_VARIABLE}"}, "model.model_path", "leads to no value"),
]


@pytest.mark.parametrize(("changes", "where", "text"), REFUSED)
def test_what_cannot_be_had_is_refused_by_name(folder: Path, changes: Overrides, where: str, text: str) -> None:
    problems = problems_of(folder, changes)
    assert text in problems[where]
    assert len(problems) == 1


OWN_WORKFLOW = """
from trivium.frontdoors.trinity import Workflow

class Theirs(Workflow): ...

class Ours:
    from trivium.config import WorkflowConfig as Config
    async def run(self, task, policy): ...
"""


def test_workflows_of_users_are_adapted_by_their_form(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "flows.py").write_text(OWN_WORKFLOW)
    kinds = {
        f"{tmp_path / 'flows.py'}:Theirs": "trivium.frontdoors.trinity.workflow_adapter:WorkflowOfTrinity",
        f"{tmp_path / 'flows.py'}:Ours": f"{tmp_path / 'flows.py'}:Ours",
        "not_here.workflow.Theirs": "trivium.frontdoors.trinity.workflow_adapter:WorkflowOfTrinity",
        "my_math_boxed_workflow": "trivium.frontdoors.trinity.workflow_adapter:WorkflowOfTrinity",
    }
    for name, kind in kinds.items():
        judge = {"explorer.auxiliary_models": [{"model_path": "owner/judge"}]}
        args = {f"{WHERE}.workflow_args": {"a": 1}} if kind != name else {}
        workflow = mapping_of(folder, {f"{WHERE}.default_workflow_type": name, **judge, **args})["workflow"]
        assert workflow["kind"] == kind
        if kind != name:
            assert workflow["workflow_args"] == {"a": 1}
            assert workflow["auxiliary_models"] == [{"model": "owner/judge", "urls": ["http://127.0.0.1:8001/v1"]}]
    assert (
        "did you mean 'math_workflow'"
        in problems_of(folder, {f"{WHERE}.default_workflow_type": "math_workflw"})[f"{WHERE}.default_workflow_type"]
    )


def test_a_hosted_model_is_evaluated(folder: Path) -> None:
    taskset = original_of(folder, {})["buffer"]["explorer_input"]["taskset"]
    hosted = {"enable": True, "model_name": "big", "api_key_env": "SOME_KEY"}
    changes = {"mode": "bench", WHERE: None, "buffer.explorer_input.eval_tasksets": [taskset]}
    engine: Any = config_of(folder, {**changes, "model.external_model": hosted}).engine
    assert (engine.kind, engine.model, engine.protocol, engine.token_variable) == (
        "endpoint",
        "big",
        "chat",
        "SOME_KEY",
    )


def test_a_task_pipeline_is_run_before_if_the_run_reads_what_it_writes(folder: Path) -> None:
    pipeline = {"operators": [{"name": "x"}], "inputs": ["raw.jsonl"]}
    notes = translate(original_of(folder, {"data_processor.task_pipeline": pipeline}), device="cpu").notes
    assert any("run it with Data-Juicer before the run" in note for note in notes)
    read = {**pipeline, "inputs": [str(folder / "rows.jsonl")]}
    assert "data_processor.task_pipeline" in problems_of(folder, {"data_processor.task_pipeline": read})


def test_texts_are_learnt_as_a_whole(folder: Path) -> None:
    changes = rows_of(folder, "cpt", format={"prompt_type": "plaintext", "prompt_key": "prompt"})
    config = config_of(folder, changes)
    assert (config.algorithm.kind, at(config.model, "chat_template"), config.buffer.kind) == ("sft", "plain", "files")
    tasks = build("tasks", config.tasks["train"], name="train", seed=0)
    assert (tasks[0].prompt[0].content, tasks[0].columns["completion"]) == ("", "0+1=")


def test_everything_wrong_is_reported_at_once(folder: Path) -> None:
    problems = problems_of(folder, {"a": 1, "model.b": 2, "mode": "c", "monitor.monitor_type": "d"})
    assert set(problems) == {"a", "model.b", "mode", "monitor.monitor_type"}


def test_enums_dataclasses_and_references_are_read(folder: Path) -> None:
    class Method(Enum):
        NCCL = "nccl"

    config = original_of(
        folder, {"synchronizer.sync_method": Method.NCCL, "synchronizer.sync_interval": "${algorithm.repeat_times}"}
    )
    assert translate(config, device="cpu").config["sync"]["interval"] == 4


def test_both_files_of_an_asynchronous_pair_mean_one_run(folder: Path) -> None:
    shared = {f"{EXPERIENCES}.path": "sqlite:///pair.db", "synchronizer.sync_interval": 2}
    explorer = config_of(folder, {**shared, "mode": "explore"})
    trainer = original_of(
        folder, {**shared, "mode": "train", "algorithm.optimizer.lr": 1e-4, "algorithm.kl_loss_fn": "none"}
    )
    trainer["buffer"] |= {"train_batch_size": 32}
    del trainer["buffer"]["batch_size"]
    other = config_from_mapping(translate(trainer, device="cpu").config)
    assert fingerprint(explorer) == fingerprint(other), "what the trainer alone reads may differ"
    assert (explorer.buffer, explorer.run.name, explorer.run.dir) == (other.buffer, other.run.name, other.run.dir)
    assert (explorer.sync.method, other.sync.method) == ("checkpoint", "checkpoint")
    assert at(explorer.buffer, "url") == f"sqlite+pysqlite:///{Path('pair.db').resolve()}"


def test_stages_take_the_place_of_sections(folder: Path) -> None:
    rows = rows_of(folder, "sft", format={"messages_key": "messages"})
    warm = {
        "stage_name": "warm",
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"train_batch_size": 4, "total_steps": 3, "trainer_input": {"experience_buffer": rows[EXPERIENCES]}},
    }
    config = config_of(folder, {"stages": [warm, {"stage_name": "rft"}]})
    first, second = config.stage_configs()
    assert (first.algorithm.kind, first.buffer.kind, first.schedule.steps) == ("sft", "files", 3)
    assert (second.algorithm.kind, second.buffer.kind, second.schedule.steps) == ("grpo", "memory", 5)


def test_supervised_steps_before_the_others_are_a_stage(folder: Path) -> None:
    dataset = {"path": str(folder / "talks.jsonl"), "format": {"prompt_type": "messages", "messages_key": "messages"}}
    trainer_input = {"sft_warmup_dataset": dataset, "sft_warmup_steps": 2}
    config = config_of(folder, {"buffer.trainer_input": trainer_input})
    assert [(stage.algorithm.kind, stage.schedule.steps) for stage in config.stage_configs()] == [
        ("sft", 2),
        ("grpo", 5),
    ]


def test_several_tasksets_are_one(folder: Path) -> None:
    one = original_of(folder, {})["buffer"]["explorer_input"]["taskset"]
    evaluated = [{**one, "name": name, "repeat_times": 4} for name in ("a", "b")]
    more = {
        "buffer.explorer_input.eval_tasksets": evaluated,
        "explorer.eval_interval": 25,
        "synchronizer.sync_interval": 10,
    }
    config = config_of(folder, {WHERE: {}, "buffer.explorer_input.tasksets": [one, one], **more})
    assert (config.schedule.steps, config.schedule.shuffle) == (2 * ROWS // 8, True)
    assert (config.evaluation.taskset, config.evaluation.every, config.evaluation.k) == ("eval", 20, (1, 2, 4))


def test_the_penalty_of_training_is_not_one_of_evaluation(folder: Path) -> None:
    """As DAPO's users write it: only the taskset of training has the options."""
    taskset = original_of(folder, {})["buffer"]["explorer_input"]["taskset"]
    penalty = {"enable_overlong_penalty": True, "max_response_length": 4, "cache_length": 2}
    both = {"mode": "explore", "buffer.explorer_input.eval_tasksets": [taskset]}
    result = translate(original_of(folder, {**both, f"{WHERE}.reward_fn_args": penalty}), device="cpu")
    assert [shaping["kind"] for shaping in result.config["algorithm"]["shaping"]] == ["overlong_penalty"]
    assert result.config["evaluation"]["taskset"] == "eval"
    assert any("eval_tasksets: evaluated when the trainer says so" in note for note in result.notes)
    of_evaluation = {**both, "buffer.explorer_input.eval_tasksets": [{**taskset, "reward_fn_args": penalty}]}
    assert "buffer.explorer_input.eval_tasksets" in problems_of(folder, of_evaluation)


def test_evaluation_has_rewards_of_its_own(folder: Path) -> None:
    taskset = original_of(folder, {})["buffer"]["explorer_input"]["taskset"]
    where = "buffer.explorer_input.eval_tasksets"
    boxed = {**taskset, "name": "held", "default_eval_workflow_type": "math_boxed_workflow"}
    config = config_of(folder, {where: [boxed]})
    (recipe,) = config.rewards
    weights = {
        name: recipe.weights_of(build("tasks", config.tasks[name], name=name, seed=0)[0].columns)
        for name in ("train", "eval")
    }
    assert weights == {"train": {"accuracy": 1.0, "format_score": 1.0}, "eval": {"eval_accuracy": 1.0}}
    game = {**taskset, "default_eval_workflow_type": "frozen_lake_workflow"}
    assert where in problems_of(folder, {where: [game]})


def test_rows_that_are_elsewhere_are_counted_by_the_user(folder: Path) -> None:
    translation = translate(
        original_of(folder, {f"{WHERE}.path": "owner/elsewhere", "buffer.total_epochs": 3}), device="cpu"
    )
    assert translation.config["schedule"]["steps"] == 3
    assert any("3 x rows / 8" in note for note in translation.notes)


def test_on_gpus_the_roles_are_placed_on_a_cluster(folder: Path) -> None:
    cluster = {"cluster.node_num": 1, "cluster.gpu_per_node": 8, "explorer.rollout_model.engine_num": 2}
    config = translate(original_of(folder, cluster), device="cuda").config
    assert config["cluster"] == {"kind": "ray", "engines": 2, "ranks": 6}
    assert (config["sync"]["method"], config["engine"]["dtype"]) == ("nccl", "bfloat16")
    alone = translate(original_of(folder, {"cluster.gpu_per_node": 1}), device="cuda").config
    assert "cluster" not in alone
    assert alone["sync"]["method"] == "memory"
    with refused(ConfigError, "cluster.gpu_per_node"):
        translate(original_of(folder, {**cluster, "explorer.rollout_model.engine_num": 8}), device="cuda")


def test_vllm_on_gpus_takes_the_sizes_of_its_engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # vLLM, which is not installed here
    sizes = {"engine_num": 2, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.6, "enable_expert_parallel": True}
    rollout = {f"explorer.rollout_model.{name}": value for name, value in {**sizes, "engine_type": "vllm"}.items()}
    config = translate(original_of(folder, {"cluster.gpu_per_node": 8, **rollout}), device="cuda").config
    engine = {"kind": "vllm", "tensor_parallel_size": 2, "data_parallel_size": 1, "gpu_memory_utilization": 0.6}
    assert config["engine"].items() >= {**engine, "expert_parallel": True}.items()
    assert config["cluster"] == {"kind": "ray", "engines": 2, "ranks": 4}
    on_cpu = translate(original_of(folder, rollout), device="cpu").config
    assert "tensor_parallel_size" not in on_cpu["engine"]


def test_serving_and_benchmarks_need_no_taskset_of_training(folder: Path) -> None:
    taskset = original_of(folder, {})["buffer"]["explorer_input"]["taskset"]
    bench = config_of(folder, {"mode": "bench", WHERE: None, "buffer.explorer_input.eval_tasksets": [taskset]})
    assert (bench.run.mode, bench.evaluation.taskset, len(bench.tasks)) == ("bench", "eval", 2)
    serve = config_of(folder, {"mode": "serve", WHERE: None, "explorer.proxy_port": 9000, "trainer.total_steps": 3})
    trainer = {"mode": "train", WHERE: None, "buffer.train_batch_size": 32, "trainer.total_steps": 3}
    assert fingerprint(serve) == fingerprint(config_of(folder, trainer))
    assert (serve.tasks["train"].kind, serve.serve.port, serve.serve.host) == ("served", 9000, "127.0.0.1")


def test_overrides_reach_into_the_file(folder: Path) -> None:
    config = overridden(original_of(folder, {}), ["buffer.total_steps=2", "algorithm.optimizer.lr=1e-3"])
    translated = translate(config, device="cpu").config
    assert (translated["schedule"]["steps"], translated["train"]["optimizer"]["lr"]) == (2, 1e-3)


def defaults_of(table: KeyTable) -> dict[str, Any]:
    """A config with every default of a table written out; keys without one are null."""
    config: dict[str, Any] = {}
    for key, entry in table.entries.items():
        if key in table.sections:
            continue
        *above, last = key.split(".")
        section = config
        for part in above:
            section = section.setdefault(part, {})
        section[last] = entry.default if isinstance(entry, Mapped | Restricted) else None
    return config


def test_a_config_that_writes_out_every_default_is_what_it_was(folder: Path) -> None:
    config, named = defaults_of(TABLE), {"default_workflow_type": "math_workflow", "path": str(folder / "rows.jsonl")}
    columns = {"prompt_key": "question", "response_key": "answer"}
    taskset = defaults_of(TASKSET)
    config["buffer"]["explorer_input"]["taskset"] = {**taskset, **named, "format": {**taskset["format"], **columns}}
    config["buffer"]["trainer_input"]["experience_buffer"] = defaults_of(EXPERIENCE_BUFFER)
    config["trainer"]["trainer_config"] = trainer_config = defaults_of(TRAINER_CONFIG)
    del trainer_config["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"]  # verl's default, not Trinity-RFT's
    config["model"] |= {"model_path": str(folder / "model"), "max_model_len": 128}
    small = {
        "model": {"model_path": str(folder / "model"), "max_model_len": 128},
        "buffer": {"explorer_input": {"taskset": {**named, "format": columns}}},
    }
    written, unset = (config_from_mapping(translate(mapping, device="cpu").config) for mapping in (config, small))
    assert written == unset
