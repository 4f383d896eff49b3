"""verl's config as a RunConfig."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.failing import refused
from trivium.cli import app
from trivium.config import RunConfig, config_from_mapping, merged
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.tables import Mapped, Restricted
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.configured_tasks import ConfiguredTasks
from trivium.frontdoors.verl.main_ppo import with_defaults
from trivium.frontdoors.verl.objects.datasets.prompts import template_of
from trivium.frontdoors.verl.scored_reward import ScoredReward
from trivium.frontdoors.verl.translation import settings_of, translate, translated
from trivium.text import hf_tokenizer
from trivium.text.tiny import TinyModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = TinyModel.Config(alphabet="0123456789+=", layers=1, hidden=8, heads=1, mlp=8, max_position=64)
    return str(TinyModel(config, seed=0).materialize(tmp_path_factory.mktemp("model") / "tiny"))


def verl_config(model: str, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "data": {"train_batch_size": 8, "max_prompt_length": 16, "max_response_length": 4},
        "actor_rollout_ref": {
            "model": {"path": model},
            "actor": {"ppo_mini_batch_size": 4},
            "rollout": {"name": "torch", "n": 2},
        },
        "trainer": {"logger": ["console"]},
    }
    for dotted, value in more.items():
        for part in reversed(dotted.split("__")):
            value = {part: value}
        base = merged(base, value)
    return base


def config_of(config: Any, rows: int = 20, *, has_validation: bool = False) -> RunConfig:
    mapping = translated(settings_of(config), rows=rows, has_validation=has_validation, device="cpu")
    tasks = {"train": {"kind": "arithmetic"}, "val": {"kind": "arithmetic", "part": "holdout", "holdout_fraction": 0.5}}
    return config_from_mapping({**mapping, "tasks": tasks, "rewards": ["exact"]})


def test_vllm_on_a_gpu_takes_what_it_is_told_of_gpus(model: str) -> None:
    rollout = {"name": "vllm", "enforce_eager": True, "max_num_batched_tokens": 4096, "enable_chunked_prefill": True}
    settings = settings_of(verl_config(model, **GRPO, **{ROLLOUT + name: value for name, value in rollout.items()}))
    engine = translated(settings, rows=20, has_validation=False, device="cuda")["engine"]
    wanted = {"kind": "vllm", "gpu_memory_utilization": 0.5, "enforce_eager": True, "prefill_tokens": 4096}
    assert engine.items() >= {**wanted, "device": "cuda", "dtype": "bfloat16"}.items()
    assert engine["options"] == {"enable_chunked_prefill": True}
    assert engine["sleep_level"] == 2, "free_cache_engine is true by default"


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_engines_of_gpus_become_vllm_over_as_many_gpus(model: str, name: str) -> None:
    settings = settings_of(
        verl_config(model, **GRPO, **{ROLLOUT + "name": name, ROLLOUT + "tensor_model_parallel_size": 4})
    )
    engine = translated(settings, rows=20, has_validation=False, device="cuda")["engine"]
    assert (engine["kind"], engine["tensor_parallel_size"]) == ("vllm", 4)
    assert "tensor_parallel_size" not in translated(settings, rows=20, has_validation=False, device="cpu")["engine"]


def test_experts_over_the_gpus_of_an_engine(model: str) -> None:
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 4, "expert_parallel_size": 4}
    settings = settings_of(
        verl_config(model, **GRPO, **{ROLLOUT + name: n for name, n in {"name": "vllm", **sizes}.items()})
    )
    engine = translated(settings, rows=20, has_validation=False, device="cuda")["engine"]
    assert engine.items() >= {"tensor_parallel_size": 1, "data_parallel_size": 4, "expert_parallel": True}.items()
    assert not sizes.keys() & translated(settings, rows=20, has_validation=False, device="cpu")["engine"].keys()


@pytest.mark.parametrize("key", ["free_cache_engine", "enable_sleep_mode"])
def test_vllm_stays_awake_where_that_is_asked_for(model: str, key: str) -> None:
    settings = settings_of(verl_config(model, **GRPO, **{ROLLOUT + "name": "vllm", ROLLOUT + key: False}))
    assert translated(settings, rows=20, has_validation=False, device="cuda")["engine"]["sleep_level"] == 0
    assert "sleep_level" not in translated(settings, rows=20, has_validation=False, device="cpu")["engine"]


def problems_of(config: Any) -> dict[str, str]:
    with refused(ConfigError) as error:
        config_of(config)
    return {problem.where: str(problem) for problem in error.value.problems}


GAE = {"algorithm__adv_estimator": "gae"}
GRPO = {"algorithm__adv_estimator": "grpo"}
PF_PPO = {"algorithm__use_pf_ppo": True}
ACTOR, ROLLOUT = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
DPPO_TV, DPPO_KL = ({ACTOR + "policy_loss__loss_mode": mode} for mode in ("dppo_tv", "dppo_kl"))

BECOMES: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "schedule.steps", 60),  # 20 rows: 2 whole batches of 8, 30 epochs
    ({"trainer__total_epochs": 3}, "schedule.steps", 6),
    ({"trainer__total_epochs": 3, "trainer__total_training_steps": 5}, "schedule.steps", 5),
    ({}, "algorithm.mini_batches", 2),
    ({"actor_rollout_ref__actor__ppo_mini_batch_size": 8}, "algorithm.mini_batches", 1),
    ({}, "algorithm.kind", "ppo"),
    ({}, "algorithm.old_log_prob", "recompute"),
    ({ACTOR + "use_rollout_log_probs": True}, "algorithm.old_log_prob", "rollout"),
    (GRPO, "algorithm.kind", "grpo"),
    ({"algorithm__adv_estimator": "rloo_vectorized"}, "algorithm.advantage.kind", "rloo"),
    ({**DPPO_TV, ACTOR + "clip_ratio_low": 0.05, ACTOR + "clip_ratio": 0.3}, "algorithm.policy_loss.tv_low", 0.05),
    ({**DPPO_TV, ACTOR + "clip_ratio_low": 0.05, ACTOR + "clip_ratio": 0.3}, "algorithm.policy_loss.tv_high", 0.3),
    ({**DPPO_TV, ACTOR + "clip_ratio_c": 7}, "algorithm.policy_loss.max_ratio", 7.0),
    (DPPO_TV, "algorithm.policy_loss.max_ratio", 3.0),
    ({**DPPO_KL, ACTOR + "clip_ratio_high": 0.07}, "algorithm.policy_loss.kl_high", 0.07),
    (DPPO_KL, "algorithm.policy_loss.kl_low", 0.2),
    ({ACTOR + "policy_loss__loss_mode": "gspo"}, "algorithm.aggregate", "token-mean"),
    ({ACTOR + "policy_loss__loss_mode": "geo_mean"}, "algorithm.policy_loss.kind", "gmpo"),
    ({ACTOR + "policy_loss__loss_mode": "gpg", ACTOR + "ppo_mini_batch_size": 8}, "algorithm.old_log_prob", "auto"),
    ({ACTOR + "use_kl_loss": True}, "algorithm.kl.coef", 0.001),
    ({ACTOR + "use_kl_loss": True, ACTOR + "kl_loss_coef": 0}, "algorithm.kl.coef", 0.0),
    ({"algorithm__use_kl_in_reward": True}, "algorithm.kl.estimator.kind", "kl"),
    ({"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}}, "algorithm.kl.horizon", 10000),
    ({"critic__ppo_epochs": 2}, "algorithm.critic.epochs", 2),
    ({"critic__ppo_mini_batch_size": 2}, "algorithm.critic.mini_batches", 4),
    ({"critic__ppo_mini_batch_size": 4}, "algorithm.critic.mini_batches", None),
    ({"critic__optim__clip_grad": 0.01}, "train.critic_max_grad_norm", 0.01),
    ({ACTOR + "optim__clip_grad": 0.5, "critic__grad_clip": 1.0}, "train.critic_max_grad_norm", 1.0),
    ({ACTOR + "grad_clip": 0.5}, "train.critic_max_grad_norm", 1.0),
    ({ACTOR + "grad_clip": 0.5, "critic__optim__clip_grad": 0.2}, "train.critic_max_grad_norm", 0.2),
    ({ACTOR + "grad_clip": 0.5, "critic__grad_clip": 0.5}, "train.critic_max_grad_norm", None),
    ({}, "train.critic_max_grad_norm", None),
    ({**GRPO, "critic__grad_clip": 0.5, "critic__ppo_epochs": 2}, "train.critic_max_grad_norm", None),
    (GAE, "train.critic_optimizer.lr", 1e-5),
    (GRPO, "train.critic_optimizer", None),
    ({ACTOR + "optim__lr_warmup_steps_ratio": 0.1}, "train.optimizer.warmup_steps", 6),
    ({}, "train.share_prefix", True),
    ({ACTOR + "router_replay": {"mode": "disabled", "record_file": None}}, "train.router_replay", "off"),
    ({ACTOR + "fsdp_config__mixed_precision": {"param_dtype": "bf16"}}, "train.dtype", "bfloat16"),
    ({ACTOR + "policy_loss__loss_mode": "cispo", ACTOR + "clip_ratio_low": 10}, "algorithm.policy_loss.clip_low", 1.0),
    ({ACTOR + "policy_loss__loss_mode": "geo_mean", ACTOR + "clip_ratio_low": 2}, "algorithm.policy_loss.clip_low", 2),
    ({}, "algorithm.refill", 0),
    ({"algorithm__filter_groups": {"enable": False, "metric": "acc"}}, "algorithm.filters", ()),
    ({"actor_rollout_ref__model__override_config": {"max_position_embeddings": 64}}, "engine.max_context", None),
    (
        {
            "algorithm__filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 10},
            "data__gen_batch_size": 24,
        },
        "algorithm.refill",
        29,
    ),
    ({ROLLOUT + "name": "vllm"}, "engine.kind", "vllm"),
    ({ROLLOUT + "name": "vllm", ROLLOUT + "top_p": 0.9, ROLLOUT + "top_k": 20}, "engine.sampling.top_p", 0.9),
    (
        {
            ROLLOUT + "name": "vllm",
            ROLLOUT + "enable_prefix_caching": False,
            ROLLOUT + "enable_chunked_prefill": True,
            ROLLOUT + "gpu_memory_utilization": 0.4,
            ROLLOUT + "limit_images": 3,
            ROLLOUT + "engine_kwargs": {"vllm": {"swap_space": None, "block_size": 32}, "sglang": {"a": 1}},
        },
        "engine.options",
        {"enable_prefix_caching": False, "block_size": 32, "limit_mm_per_prompt": {"image": 3}},
    ),
    ({ROLLOUT + "name": "sglang"}, "engine.kind", "torch"),
    ({ROLLOUT + "over_sample_rate": 0.2}, "schedule.over_rollout", 0.25),
    ({ROLLOUT + "tensor_model_parallel_size": 2}, "engine.kind", "torch"),
    ({ACTOR + "fsdp_config__model_dtype": "bf16"}, "train.dtype", "float32"),
    ({**GRPO, ROLLOUT + "n": 1}, "algorithm.advantage.kind", "reinforce"),
    ({"trainer__max_actor_ckpt_to_keep": "None"}, "checkpoint.keep", 1_000_000),
    ({ACTOR + "use_kl_loss": ""}, "algorithm.kl.coef", 0.0),
    ({"trainer__resume_from_path": "/saved"}, "run.resume", True),
    ({"trainer__test_freq": 2}, "evaluation.taskset", None),
    ({"algorithm": {"rollout_is": True, "rollout_is_threshold": 3}}, "algorithm.correction.threshold", 3.0),
    (
        {"algorithm": {"rollout_is": True, "rollout_is_threshold": 2, "rollout_is_mode": "mask"}},
        "algorithm.correction.bounds",
        (0.5, 2.0),
    ),
    ({ACTOR + "tis_imp_ratio_cap": 4.0}, "algorithm.correction.threshold", 4.0),
    (
        {"algorithm__rollout_is_veto_threshold": 1e-4},
        "algorithm.correction.rejection",
        {"seq_max_k1": (1e-9, pytest.approx(1e4))},
    ),
    (
        {
            "algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        },
        "algorithm.advantage.weights",
        {"a": 1.0, "b": 0.5},
    ),
    ({ROLLOUT + "multi_turn": {"enable": False, "max_assistant_turns": 3}}, "workflow.kind", "single_turn"),
    ({"algorithm__rollout_correction": {"rollout_is": "token"}}, "algorithm.correction.threshold", 2.0),
    (
        {"algorithm__rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}},
        "algorithm.correction.bounds",
        (0.5, 5.0),
    ),
    (
        {"algorithm__rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}},
        "algorithm.correction.outside",
        "mask",
    ),
    (
        {"algorithm__rollout_correction": {"rollout_rs": "seq_mean_k1,token_k3", "rollout_rs_threshold": "0.5_2.0,3"}},
        "algorithm.correction.rejection",
        {"seq_mean_k1": (0.5, 2.0), "token_k3": 3.0},
    ),
    (
        {"algorithm__rollout_correction": {"bypass_mode": True, "rollout_is": "token", "loss_type": "reinforce"}},
        "algorithm.policy_loss.kind",
        "reinforce",
    ),
]


@pytest.mark.parametrize(("more", "key", "value"), BECOMES)
def test_a_key_decides_what_the_table_says(model: str, more: dict[str, Any], key: str, value: Any) -> None:
    found: Any = config_of(verl_config(model, **more))
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("optim__warmup_style", "cosine", "train.optimizer.schedule"),
        ("optim__clip_grad", 0.3, "train.max_grad_norm"),
        ("fsdp_config__ulysses_sequence_parallel_size", 2, "train.sequence_parallel"),
    ],
)
def test_the_defaults_of_a_composed_config_override_nothing(model: str, key: str, value: Any, path: str) -> None:
    composed = with_defaults(verl_config(model, **{ACTOR + key: value}))
    found: Any = translated(settings_of(composed), rows=20, has_validation=False, device="cpu")
    for part in path.split("."):
        found = found[part]
    assert found == value


def test_validation_is_evaluation(model: str) -> None:
    config = config_of(
        verl_config(
            model,
            actor_rollout_ref__rollout__val_kwargs={"n": 6, "temperature": 0.5, "do_sample": True},
            trainer__test_freq=3,
            actor_rollout_ref__rollout__top_k=-1,
        ),
        has_validation=True,
    )
    assert (config.evaluation.samples, config.evaluation.every, config.evaluation.k) == (6, 3, (1, 2, 4, 6))
    assert config.evaluation.sampling.temperature == 0.5
    greedy = config_of(verl_config(model), has_validation=True)
    assert (greedy.evaluation.sampling.temperature, greedy.evaluation.samples) == (0.0, 1)


def test_whatever_holds_the_keys(model: str) -> None:
    @dataclass
    class Algorithm:
        adv_estimator: str = "grpo"
        gamma: float = 1.0

    plain = verl_config(model, **GRPO)
    given = OrderedDict(plain, algorithm=Algorithm(), trainer=SimpleNamespace(logger=("console",)))
    assert config_of(given) == config_of(plain)


REFUSED_VALUES: dict[str, Any] = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "mine",
    "actor_rollout_ref.rollout.response_length": 9,
    "actor_rollout_ref.rollout.prompt_length": 9,
    "trainer.logger": ["nothing"],
    "actor_rollout_ref.model.lora": {"rank": 8},
    "trainer.resume_mode": "maybe",
    "trainer.val_only": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 3,
    "critic.enable": False,
    "critic.ppo_mini_batch_size": 3,
    "critic.ulysses_sequence_parallel_size": 2,
    "data.gen_batch_size": 16,
    "reward_model.model.input_tokenizer": "/elsewhere",
}
"""Key -> a value that is refused."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({ROLLOUT + "name": "vllm", ROLLOUT + "top_p": 0.9}, "actor_rollout_ref.rollout.top_p"),
    ({"distillation": {"enabled": True}}, "distillation.teacher_models"),
    (
        {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0]}},
        "algorithm.gdpo_reward_weights",
    ),
    ({ROLLOUT + "multi_turn": {"enable": True, "format": "xml"}}, "actor_rollout_ref.rollout.multi_turn.format"),
    ({**GRPO, **PF_PPO}, "algorithm.use_pf_ppo"),
    ({**PF_PPO, "algorithm__pf_ppo__reweight_method": "best"}, "algorithm.pf_ppo.reweight_method"),
    (
        {"algorithm": {"filter_groups": {"enable": True, "metric": "seq_final_reward"}, "use_kl_in_reward": True}},
        "algorithm.filter_groups.metric",
    ),
    ({"trainer__resume_mode": "resume_path"}, "trainer.resume_from_path"),
    ({**GRPO, "trainer__critic_warmup": 2}, "trainer.critic_warmup"),
    ({**GRPO, "algorithm__gamma": 0.9}, "algorithm.gamma"),
    ({ACTOR + "use_kl_loss": True, "algorithm__use_kl_in_reward": True}, "actor_rollout_ref.actor.use_kl_loss"),
    (
        {"algorithm__rollout_correction": {"rollout_rs": "token_k1"}},
        "algorithm.rollout_correction.rollout_rs_threshold",
    ),
    ({ACTOR + "router_replay": {"mode": "R3"}}, "train.router_replay"),
    (
        {"sandbox_fusion__memory_limit_mb": 9, "reward_model__sandbox_fusion__memory_limit_mb": 8},
        "sandbox_fusion.memory_limit_mb",
    ),
    ({"reward_model__reward_manager": "batch", "reward_manager__name": "dapo"}, "reward_model.reward_manager"),
    ({"trainer": {"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 2}}, "trainer.max_critic_ckpt_to_keep"),
    *(({key.replace(".", "__"): value}, key) for key, value in REFUSED_VALUES.items()),
]


def test_a_model_that_needs_code_of_its_own_is_refused(model: str, tmp_path: Path) -> None:
    with_code = tmp_path / "model"
    shutil.copytree(model, with_code)
    described = json.loads((with_code / "config.json").read_text())
    (with_code / "config.json").write_text(json.dumps({**described, "auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    trusted = {**GRPO, "actor_rollout_ref__model__trust_remote_code": True}
    assert config_of(verl_config(model, **trusted))
    with refused(ConfigError, "actor_rollout_ref.model.trust_remote_code", "auto_map"):
        config_of(verl_config(str(with_code), **trusted))


@pytest.mark.parametrize(("more", "where"), REFUSED)
def test_what_cannot_be_translated_is_refused_by_name(model: str, more: dict[str, Any], where: str) -> None:
    assert where in problems_of(verl_config(model, **more))


def test_a_section_that_says_nothing_asks_for_nothing(model: str) -> None:
    empty = dict.fromkeys(["reward_model", "sandbox_fusion", "custom_reward_function"], None)
    assert config_of(verl_config(model, **empty)) == config_of(verl_config(model))
    idle = verl_config(model, **GRPO, critic__optim__clip_grad=0.01, critic__ppo_epochs=3)
    assert config_of(idle) == config_of(verl_config(model, **GRPO)), "there is no critic to ask for anything"


def test_what_chooses_rewards_is_no_list_of_errors(model: str) -> None:
    """Sections as verl's launcher merges them, and a manager of the user."""
    more = {
        "reward_model": {
            "reward_manager": {"source": "importlib", "name": "Mine", "module": {"path": "m.py", "name": "custom"}},
            "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 4}, "anything": 1},
            "model": {
                "path": "/judge",
                "input_tokenizer": model,
                "fsdp_config": {"wrap_policy": {"min_num_params": 0}},
            },
            "sandbox_fusion": {"url": None, "max_concurrent": 64, "memory_limit_mb": 512},
        },
        "custom_reward_function": {"path": "f.py", "name": "score", "reward_kwargs": {"a": 1}},
        "sandbox_fusion": {"url": None, "max_concurrent": 64, "memory_limit_mb": 1024},
    }
    assert config_of(verl_config(model, **more)) == config_of(verl_config(model))


def test_less_than_a_batch_is_an_error(model: str) -> None:
    with refused(ConfigError, "data.train_batch_size", 7):
        config_of(verl_config(model), rows=7)


def test_a_whole_default_config_is_no_list_of_errors(model: str) -> None:
    """Every key with verl's default, as its launcher merges them."""
    whole: dict[str, Any] = verl_config(model)
    for key, entry in TABLE.entries.items():
        if f"{key}." in " ".join(TABLE.entries):
            continue
        value: Any = entry.default if isinstance(entry, Mapped) else None
        if isinstance(entry, Restricted):
            value = entry.default if entry.default is not None else entry.values[0]
        for part in reversed(key.split(".")):
            value = {part: value}
        whole = merged(value, whole)
    whole["critic"] |= {"ppo_mini_batch_size": 4}  # the launcher copies the actor's
    assert config_of(whole).schedule == config_of(verl_config(model)).schedule


def test_a_default_beside_a_choice_is_no_contradiction(model: str) -> None:
    given = {"reward": {"reward_manager": {"name": "dapo"}}, "reward_manager": {"name": "naive"}}
    assert settings_of(verl_config(model, **given))["reward_manager.name"] == "dapo"
    assert settings_of(verl_config(model, critic__model__path="~/models/deepseek-llm-7b-chat"))


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "data.val_files", "trainer.default_local_dir"])
def test_the_home_in_paths(key: str) -> None:
    config: Any = ["~/there"] if key.endswith("files") else "~/there"
    for part in reversed(key.split(".")):
        config = {part: config}
    assert settings_of(config)[key] in (str(Path.home() / "there"), [str(Path.home() / "there")])


def test_a_chat_template_with_variables(model: str) -> None:
    template = "{{ messages[0].content }}{% if thinking is defined and thinking is false %}!{% endif %}"
    variables = verl_config(model, data__apply_chat_template_kwargs={"thinking": False, "level": "a'b"})
    tokenizer = hf_tokenizer(model)
    assert template_of(settings_of(verl_config(model)), tokenizer) is None
    tokenizer.chat_template = template
    written = template_of(settings_of(variables), tokenizer)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], chat_template=written, tokenize=False
    )
    assert rendered == "1+1!"
    custom = verl_config(model, actor_rollout_ref__model__custom_chat_template="{{ messages[0].content }}?")
    assert template_of(settings_of(custom), tokenizer) == "{{ messages[0].content }}?"


def test_another_backend_is_one_problem(model: str) -> None:
    optim = {"lr_decay_style": "constant", "min_lr": 0.0}
    problems = problems_of(verl_config(model, actor_rollout_ref__actor={"strategy": "megatron", "optim": optim}))
    assert set(problems) == {"actor_rollout_ref.actor.strategy"}


def test_what_a_typo_is_told() -> None:
    assert problems_at({"critic": {"model": {"tiled_mlp": {"enabled": True}}}}) == {}, "no result depends on it"
    typo = problems_at({"critic": {"model": {"tiled_mpl": {"enabled": True}}}})["critic.model.tiled_mpl.enabled"]
    assert typo.endswith("write 'critic.model.tiled_mlp' if you mean that")
    switch = problems_at({"actor_rollout_ref": {"rollout": {"multi_turn": {"enabel": True, "format": "x"}}}})
    assert list(switch) == ["actor_rollout_ref.rollout.multi_turn.enabel"], "a section that is off has a switch"
    deeper = problems_at({"actor_rollout_ref": {"actor": {"lr": 1}}})["actor_rollout_ref.actor.lr"]
    assert "actor_rollout_ref.actor.optim.lr" in deeper
    wake = problems_at({"actor_rollout_ref": {"rollout": {"wake_up": True}}})["actor_rollout_ref.rollout.wake_up"]
    assert wake.endswith("leave it out")


def problems_at(config: Any) -> dict[str, str]:
    return {problem.where: str(problem) for problem in TABLE.read(config).problems}


def test_the_nearest_entry_above_speaks_for_a_key() -> None:
    assert TABLE.entry_of("actor_rollout_ref.ref.megatron.seed") is TABLE.entries["actor_rollout_ref.ref.megatron"]
    assert TABLE.entry_of("actor_rollout_ref.actor.optimiser") is None


def test_the_command_prints_a_config_that_can_be_read(tmp_path: Path, model: str) -> None:
    rows = [{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1"}]}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, 5 * rows)), encoding="utf-8")
    file = tmp_path / "verl.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"logger": "console"}, "data": {"train_batch_size": 2}}))
    overrides = [f"data.train_files={tmp_path}/train.jsonl", f"actor_rollout_ref.model.path={model}", "data.seed=3"]
    ran = CliRunner().invoke(app, ["translate", "--from", "verl", str(file), *overrides, "critic.profiler.x=1"])
    assert ran.exit_code == 0, ran.output
    assert "critic.profiler: no effect" in ran.stderr
    config = config_from_mapping(yaml.safe_load(ran.stdout))
    assert (config.run.seed, config.schedule.groups_per_step, config.schedule.steps) == (3, 2, 60)


def test_rewards_of_a_whole_config(model: str, tmp_path: Path) -> None:
    def rewards(**more: Any) -> Any:
        files = {"train_files": [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]}
        return translate(verl_config(model, data=files, trainer__total_training_steps=2, **more)).config

    assert rewards()["rewards"] == ["by_source"]
    buffer = {"enable": True, "len": 1, "penalty_factor": 0.5}
    of_manager = rewards(reward_model={"reward_manager": "dapo", "overlong_buffer": buffer})["algorithm"]["shaping"]
    assert of_manager == [{"kind": "overlong_penalty", "factor": 0.5, "buffer": 0.25, "limit": 4}]
    by_acc = {"enable": True, "metric": "acc"}
    assert rewards(algorithm__filter_groups=by_acc)["algorithm"]["filters"][0]["metric"] == "acc"
    with refused(ConfigError, "algorithm.filter_groups.metric", "'acc'"):
        rewards(algorithm__filter_groups=by_acc, custom_reward_function={"path": str(tmp_path / "f.py")})
    scorer = {"path": str(tmp_path / "f.py"), "name": "score", "reward_kwargs": {"a": 1}}
    (tmp_path / "f.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info, a):\n"
        "    return {'score': a + (solution_str == ground_truth), 'acc': 1}\n"
    )
    (custom,) = rewards(custom_reward_function=scorer)["rewards"]
    config = ScoredReward.Config.model_validate(custom)
    columns = {"data_source": "x", "reward_model": {"ground_truth": "2"}, "extra_info": {}}
    assert ScoredReward(config)(prompt="1+1", completion="2", **columns) == 2
    buffer = {"enable": True, "len": 2, "penalty_factor": 0.5}
    dapo = rewards(reward_model={"reward_manager": "dapo", "reward_kwargs": {"overlong_buffer_cfg": buffer}})
    assert dapo["algorithm"]["shaping"] == [{"kind": "overlong_penalty", "factor": 0.5, "buffer": 0.5, "limit": 4}]
    assert dapo["tasks"]["train"]["path"] == [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    with refused(ConfigError, "reward_manager.name", "'batch'"):
        rewards(reward_model__reward_manager="batch")
    (tmp_path / "all.py").write_text(
        "def score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths)]\n"
    )
    scorer = {"path": str(tmp_path / "all.py"), "name": "score"}
    (batched,) = rewards(reward_model__reward_manager="batch", custom_reward_function=scorer)["rewards"]
    assert ScoredReward(ScoredReward.Config.model_validate(batched))(prompt="1+1", completion="2", **columns) == 1
    gdpo = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score", "acc"]}
    parts = rewards(algorithm=gdpo, reward_manager__name="gdpo", custom_reward_function=custom_of(tmp_path))["rewards"]
    scores = [ScoredReward(ScoredReward.Config.model_validate(part)) for part in parts]
    assert [score(prompt="1+1", completion="2", **columns) for score in scores] == [2, 1]


def custom_of(folder: Path) -> dict[str, Any]:
    """A scorer that returns a dict."""
    return {"path": str(folder / "f.py"), "name": "score", "reward_kwargs": {"a": 1}}


def test_the_command_names_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(yaml.safe_dump({"data": {"train_batchsize": 2}, "critic": {"strategy": "megatron"}}))
    ran = CliRunner().invoke(app, ["translate", "--from", "verl", str(file)])
    assert ran.exit_code == 2
    assert "data.train_batch_size" in ran.stderr
    assert "critic.strategy" in ran.stderr


@pytest.mark.parametrize(
    ("loss", "average", "is_noted"),
    [
        ("gspo", "token-mean", True),
        ("gspo", "seq-mean-token-sum", True),
        ("gspo", "seq-mean-token-mean", False),
        ("vanilla", "token-mean", False),
    ],
)
def test_an_average_that_depends_on_the_version_is_noted(model: str, loss: str, average: str, is_noted: bool) -> None:
    keys = {ACTOR + "policy_loss__loss_mode": loss, ACTOR + "loss_agg_mode": average}
    config = verl_config(model, **keys)
    config["data"]["train_files"] = ["rows.parquet"]
    assert any("loss_agg_mode" in note for note in translate(config).notes) == is_noted


def test_distillation_has_the_teacher_alone(model: str) -> None:
    teacher = {"model_path": model, "inference": {"name": "vllm"}}
    loss = {"loss_mode": "forward_kl_topk", "topk": 8, "use_task_rewards": False}
    keys = {"enabled": True, "teacher_models": {"teacher_model": teacher}, "distillation_loss": loss}
    algorithm: Any = config_of(verl_config(model, distillation=keys)).algorithm
    assert (algorithm.kind, algorithm.teacher.path, algorithm.teacher.top_k) == ("distill", model, 8)
    assert (algorithm.policy_loss.kind, algorithm.policy_loss.direction) == ("distill_top_k", "forward")
    with refused(ConfigError, "distillation.teacher_models", 2):
        config_of(verl_config(model, distillation=keys | {"teacher_models": {"a": teacher, "b": teacher}}))


def test_a_critic_may_start_from_another_model(model: str, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "critic")
    assert config_of(verl_config(model, critic__model__path=str(other))).train.critic_path == str(other)  # pyright: ignore[reportAttributeAccessIssue]
    assert config_of(verl_config(model, critic__model__path=model)).train.critic_path is None  # pyright: ignore[reportAttributeAccessIssue]


def test_translate_reports_all_problems_at_once(model: str) -> None:
    wrong = verl_config(
        model, trainer__sav_freq=1, trainer__logger="nothing", critic__enable=False, algorithm__adv_estimator="nothing"
    )
    wrong["data"] |= {"train_files": ["a.parquet"], "max_response_length": 0}
    with refused(ConfigError) as error:
        translate(wrong)
    assert {problem.where for problem in error.value.problems} >= {
        "trainer.sav_freq",
        "trainer.logger",
        "algorithm.adv_estimator",
        "engine.sampling.max_new_tokens",
    }


DATASET = """
from torch.utils.data import Dataset
from trivium.frontdoors.verl import AbstractSampler

class Rows(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.count, self.key = config.train_batch_size * 3, config.get("prompt_key")
        assert tokenizer.encode("1") and list(data_files) == ["rows.jsonl"]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {self.key: [{"role": "user", "content": f"{index}+1"}], "data_source": "sums"}

class Backwards(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.length = len(data_source)

    def __iter__(self):
        return iter(reversed(range(self.length)))

    def __len__(self):
        return self.length
"""


def test_classes_of_data_are_translated(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DATASET, encoding="utf-8")
    config = verl_config(model, **GRPO)
    config["data"] |= {
        "train_files": ["rows.jsonl"],
        "custom_cls": {"path": str(tmp_path / "own.py"), "name": "Rows"},
        "sampler": {"class_path": str(tmp_path / "own.py"), "class_name": "Backwards"},
    }
    translation = translate(config)
    run = config_from_mapping(yaml.safe_load(translation.to_yaml()))
    source = ConfiguredTasks(run.tasks["train"], name="train", seed=0)  # pyright: ignore[reportArgumentType]
    assert len(source) == 24
    assert source[0].prompt[0].content == "23+1"
    assert any(note.startswith("schedule.steps: the number of rows is not known") for note in translation.notes)
