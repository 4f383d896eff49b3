"""A critic that is a head on the policy's trunk: one forward pass, one step, and the policy alone comes out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from failing import refused
from rank_parts_of_heads import (
    AGGREGATE,
    CLIP,
    COEF,
    COLUMNS,
    algorithm,
    batch_for,
    on_ranks,
    scored,
    scorer,
    trained,
)
from rank_processes import run_ranks
from safetensors.torch import load_file
from training_parts import make_batch, make_engine, write_model
from transformers import AutoModelForCausalLM
from vision_parts import rolled_out, tiny

from tests.float64 import differentiate_in_float64
from trivium.config import config_from_mapping
from trivium.foundation.errors import ConfigError, TriviumError
from trivium.models.heads.trained_models import ActorCritic
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.runtime.export import export
from trivium.runtime.launch import run
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def head_of(engine: TorchTrainEngine) -> torch.nn.Linear:
    model = engine._learners["policy"].model
    assert isinstance(model, ActorCritic)
    return model.value_head


def slow_step(model_dir: Path, head: torch.nn.Linear, batch: Batch) -> tuple[Any, torch.nn.Linear, dict[str, float]]:
    """One AdamW step of transformers' model and a linear layer, sequence by sequence, token by token."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    differentiate_in_float64(model)  # else its norms round gradients to float32
    linear = torch.nn.Linear(head.in_features, 1, dtype=torch.float64)
    linear.load_state_dict(head.state_dict())
    total = sum(int(e.response_mask.sum()) for e in batch.experiences)
    policy = value = torch.zeros((), dtype=torch.float64)
    for row, e in enumerate(batch.experiences):
        done = model(torch.tensor(e.tokens)[None].long(), output_hidden_states=True)
        states = done.hidden_states[-1][0]  # after the last norm
        for t in np.flatnonzero(e.response_mask):
            log_prob = (done.logits[0, t - 1] / 0.8).log_softmax(-1)[int(e.tokens[t])]
            old, advantage, before, target = (
                float(batch.columns[name][row][t]) for name in ("old_log_prob", "advantages", "values", "returns")
            )
            ratio = (log_prob - old).exp()
            policy = policy - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / total
            v = linear(states[t - 1])[0]
            held = before + (v - before).clamp(-CLIP, CLIP)
            value = value + torch.maximum((v - target) ** 2, (held - target) ** 2) / 2 / total
    parameters = [*model.parameters(), *linear.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, eps=1.0, weight_decay=0.0)
    (policy + COEF * value).backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    metrics = {"loss/policy": policy.item(), "loss/value": value.item(), "grad_norm/policy": norm.item()}
    return model, linear, {f"train/{key}": number for key, number in metrics.items()}


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_one_step_is_that_of_a_slow_loop(max_tokens: int, model_dir: Path) -> None:
    engine = make_engine(
        model_dir,
        algorithm(),
        dtype="float64",
        max_tokens_per_micro_batch=max_tokens,
        optimizer={"lr": 0.1, "eps": 1.0},  # AdamW follows the gradient, not its sign
    )
    batch = batch_for(engine)
    model, linear, expected = slow_step(model_dir, head_of(engine), batch)
    (objective,) = algorithm().objectives
    metrics = engine.update("policy", objective.select(batch, 0), objective)
    assert AGGREGATE == "token-mean"
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-9, rel=1e-9)
    for name, weight in engine.export_weights():
        torch.testing.assert_close(weight, model.state_dict()[name], atol=1e-9, rtol=1e-9)
    for name, weight in head_of(engine).state_dict().items():
        torch.testing.assert_close(weight, linear.state_dict()[name], atol=1e-9, rtol=1e-9)


def test_values_are_those_of_a_critic_that_has_the_same_weights(model_dir: Path) -> None:
    """Before any step the shared head is drawn as a critic's own is, and reads the same states."""
    apart = make_engine(model_dir, algorithm("own"), dtype="float64")
    shared = make_engine(model_dir, algorithm(), dtype="float64")
    batch = batch_for(apart)
    mine, theirs = (np.concatenate(engine.score(batch, "values")) for engine in (shared, apart))
    assert mine == pytest.approx(theirs, abs=1e-7)
    assert np.count_nonzero(mine) == batch.num_response_tokens


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_continues_with_the_same_bits_and_its_policy_has_no_head(
    lora: bool, model_dir: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"lora": {"rank": 2}} if lora else {}
    engine = make_engine(model_dir, algorithm(), **config)
    batch = batch_for(engine)
    (objective,) = algorithm().objectives
    engine.update("policy", batch, objective)
    engine.save(tmp_path / "saved")
    other = make_engine(model_dir, algorithm(), seed=9, **config)
    assert not torch.equal(head_of(other).weight, head_of(engine).weight)
    other.load(tmp_path / "saved")
    for each in (engine, other):
        each.update("policy", batch, objective)
    other.save(tmp_path / "again")
    engine.save(tmp_path / "whole")
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.safetensors"))
    assert Path(f"critic/{VALUE_HEAD}.safetensors") in files
    assert [file for file in files if file.parts[0] == "critic"] == [Path(f"critic/{VALUE_HEAD}.safetensors")]
    for file in files:
        mine, theirs = load_file(tmp_path / "again" / file), load_file(tmp_path / "whole" / file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items()), file
    engine.save_weights(tmp_path / "weights")
    for folder in (tmp_path / "whole" / "policy", tmp_path / "weights"):
        _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not report["unexpected_keys"]
        assert not report["missing_keys"]
        assert not list(folder.glob(f"{VALUE_HEAD}*"))


def test_ranks_that_share_a_batch_equal_one_process(model_dir: Path, tmp_path: Path) -> None:
    """The second rank has fewer micro-batches, so it makes empty passes; the same of a reward model."""
    engine, judge = (make_engine(model_dir, parts, dtype="float64") for parts in (algorithm(), scorer()))
    batch = batch_for(engine)
    expected = {"critic": trained(engine, batch), "reward model": scored(judge, make_batch())}
    (first, _) = run_ranks([2], on_ranks, tmp_path / "ranks", model_dir, batch)[2]
    assert "value_head.log_scale" in expected["reward model"]
    for what, tensors in expected.items():
        assert first[what].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(first[what][name], tensor, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
async def test_a_model_that_sees_has_values_by_either_kind_of_critic(family: str, tmp_path: Path) -> None:
    path = tiny(tmp_path / family, family)
    batch = await rolled_out(path)
    assert any(e.media for e in batch.experiences)
    apart, shared = (make_engine(path, algorithm(trunk), dtype="float64") for trunk in ("own", "shared"))
    mine, theirs = (np.concatenate(engine.score(batch, "values")) for engine in (shared, apart))
    assert mine == pytest.approx(theirs, abs=1e-7)
    assert np.count_nonzero(mine) == batch.num_response_tokens
    batch = batch.with_columns(**{name: [np.ones(len(e)) for e in batch.experiences] for name in COLUMNS})
    for engine in (apart, shared):
        for objective in engine.algorithm.objectives:
            metrics = engine.update(objective.role, batch, objective)
            assert next(value for key, value in metrics.items() if "grad_norm" in key) > 0.01


PPO: dict[str, Any] = {
    "cluster": {"threads": 1},
    "model": {"kind": "tiny", "alphabet": "0123456789+=", "hidden": 32, "heads": 2, "mlp": 32, "max_position": 24},
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "rewards": [{"kind": "regex", "pattern": "^[0-4]"}],
    "algorithm": {"kind": "ppo", "mini_batches": 2, "critic": {"trunk": "shared"}},
    "train": {"optimizer": {"lr": 1e-3}},
    "engine": {"sampling": {"max_new_tokens": 3}},
    "schedule": {"steps": 3, "groups_per_step": 4, "group_size": 2},
    "checkpoint": {"save_every": 2, "keep": 4},
}


def test_a_whole_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    data = {**PPO, "run": {"dir": str(tmp_path / "run")}}
    run(config_from_mapping(data))
    last = tmp_path / "run" / "checkpoints" / "step-000003"
    before = {file.relative_to(last): load_file(file) for file in sorted(last.rglob("*.safetensors"))}
    shutil.rmtree(last)
    run(config_from_mapping(data))
    for file, tensors in before.items():
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(last / file).items()), file
    memory = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())["stages"][0]["memory"]["each rank"]
    assert not [item for item in memory if "critic" in item]
    out = export(tmp_path / "run", None, tmp_path / "out")
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"algorithm": {**PPO["algorithm"], "critic_warmup": 2}}, "algorithm.critic.trunk"),
        ({"train": {"critic_optimizer": {"lr": 1e-3}}}, "train.critic_optimizer"),
        ({"algorithm": {"kind": "ppo", "critic": {"value_coef": 0.7}}}, "algorithm.critic.value_coef"),
        ({"algorithm": {"kind": "ppo", "critic": {"trunk": "shared", "epochs": 2}}}, "algorithm.critic.epochs"),
        ({"train": {"critic_max_grad_norm": 0.5}}, "train.critic_max_grad_norm"),
        ({"algorithm": {"kind": "grpo", "critic": {"trunk": "shared"}}}, "algorithm.critic.trunk"),
    ],
)
def test_what_cannot_be_shared_is_refused(change: dict[str, Any], where: str, tmp_path: Path) -> None:
    with refused(ConfigError, where):
        config_from_mapping({**PPO, "run": {"dir": str(tmp_path)}, **change})


def test_a_head_of_several_outputs_is_no_critic(model_dir: Path) -> None:
    with refused(TriviumError, "has 2"):
        ActorCritic(
            model_dir,
            dtype=torch.float32,
            device=torch.device("cpu"),
            temperature=1.0,
            seed=0,
            head={"weight": torch.zeros(2, 32)},
        )
