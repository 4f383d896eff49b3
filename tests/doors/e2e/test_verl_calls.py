"""Calls of verl's example scripts, translated to RunConfigs and cut to a tiny model: each trains two steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.peers import peer_file
from trivium.config import config_from_mapping
from trivium.frontdoors.verl.main_ppo import config_of
from trivium.frontdoors.verl.translation import translate
from trivium.runtime.launch import run
from trivium.text.tiny import TinyModel

CALLS = [
    "cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh",
    "gmpo_trainer/test_dapo_7b_math.sh",
    "gpg_trainer/run_qwen2-7b_math.sh",
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh",
    "grpo_trainer/run_qwen2-7b_seq_balance.sh",
    "gspo_trainer/test_gspo_3b_math.sh",
    "ppo_trainer/run_deepseek7b_llm_sandbox_fusion.sh",
    "reinforce_plus_plus_trainer/run_qwen2-7b_math_rf.sh",
    "remax_trainer/run_qwen2.5-3b_seq_balance.sh",
    "rloo_trainer/run_qwen2-7b.sh",
    "rollout_correction/run_with_rollout_corr.sh",
    "sglang_multiturn/run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction.sh",
    "sglang_multiturn/run_qwen3-4b_gsm8k_multiturn.sh",
]

OWN = """
from trivium.frontdoors.verl import BaseInteraction, BaseTool

class Tool(BaseTool):
    pass

class Again(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return len(messages) > 3, "1+1", 0.0, {}

def scored(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], list[str]]:
    """Appends overrides to the arguments of a call: a model, data, classes and sizes for a test."""
    folder = tmp_path_factory.mktemp("verl")
    model = str(
        TinyModel(TinyModel.Config(layers=1, hidden=8, heads=1, mlp=8, max_position=1024), seed=0).materialize(
            folder / "model"
        )
    )
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"interaction_kwargs": {"name": "again"}},
    }
    (folder / "rows.jsonl").write_text("\n".join(8 * [json.dumps(row)]), encoding="utf-8")
    own = folder / "own.py"
    own.write_text(OWN, encoding="utf-8")
    schema = {"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}
    tools = {"tools": [{"class_name": f"{own}:Tool", "config": {"type": "native"}, "tool_schema": schema}]}
    (folder / "tools.yaml").write_text(yaml.safe_dump(tools), encoding="utf-8")
    interactions = {"interaction": [{"name": "again", "class_name": f"{own}:Again", "config": {}}]}
    (folder / "interactions.yaml").write_text(yaml.safe_dump(interactions), encoding="utf-8")
    fixed: dict[str, Any] = {
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "data.train_files": folder / "rows.jsonl",
        "data.val_files": folder / "rows.jsonl",
        "custom_reward_function.path": own,
        "custom_reward_function.name": "scored",
        "data.prompt_key": "prompt",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 900,
        "data.max_response_length": 4,
        "actor_rollout_ref.rollout.name": "torch",
        "actor_rollout_ref.rollout.max_model_len": "null",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1,
        "critic.ulysses_sequence_parallel_size": 1,
        "trainer.logger": "console",
        "trainer.total_training_steps": 2,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
    }
    files = {"tool_config_path": folder / "tools.yaml", "interaction_config_path": folder / "interactions.yaml"}

    def cut(arguments: list[str]) -> list[str]:
        words = [word for word in arguments if not word.startswith("--config")]
        for name, file in files.items():
            if any(f"multi_turn.{name}=" in word for word in words):
                words.append(f"actor_rollout_ref.rollout.multi_turn.{name}={file}")
        if any("rollout.n=" in word and not word.endswith("=1") for word in words):
            words.append("actor_rollout_ref.rollout.n=2")
        return [*words, *(f"{key}={value}" for key, value in fixed.items())]

    return cut


@pytest.mark.parametrize("name", CALLS, ids=lambda name: name.rpartition("/")[2])
def test_a_call_trains_two_steps(name: str, small: Callable[[list[str]], list[str]], tmp_path: Path) -> None:
    calls = json.loads(peer_file("verl", "scripts-v0.7.0.json").read_text())
    translation = translate(config_of([*small(calls[name]), f"trainer.default_local_dir={tmp_path / 'run'}"]))
    config = config_from_mapping(yaml.safe_load(translation.to_yaml()))
    assert run(config)["steps"] == 2
    if "multiturn" in name:
        assert config.workflow.kind == "multi_turn"
