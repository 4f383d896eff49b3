"""The first steps of a critic: the policy waits, byte for byte, and a resumed run knows how long."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import group, turn
from failing import refused
from safetensors.torch import load_file
from training_parts import MODELS, make_engine, write_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from trivium.algorithms import GroupAlgorithm, build_algorithm
from trivium.algorithms.explain import explain
from trivium.algorithms.presets import PPO
from trivium.foundation.errors import ConfigError
from trivium.loops import train_step
from trivium.training.engine import TorchTrainEngine
from trivium.types import Group, Trajectory


def played(slot: int) -> Group:
    turns = [turn([1, 2], range(5 + index, 9 + slot), -2.0) for index in (0, 1)]
    return group(slot, *(Trajectory(index, (turns[index],), {"exact": float(index)}) for index in (0, 1)))


GROUPS = [played(slot) for slot in range(3)]


def ppo(steps: int) -> GroupAlgorithm:
    return build_algorithm(PPO.configure({"kind": "ppo", "critic_warmup": steps, "epochs": 2, "mini_batches": 2}))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def both(engine: TorchTrainEngine, directory: Path) -> tuple[bytes, bytes]:
    """The files of policy and critic."""
    engine.save(directory)
    return tuple((directory / role / "model.safetensors").read_bytes() for role in ("policy", "critic"))  # pyright: ignore[reportReturnType]


def test_the_policy_waits_for_the_critic_and_a_resumed_run_knows_it(model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(model_dir, ppo(2))
    files = [both(engine, tmp_path / "0")]
    rows: list[dict[str, Any]] = []
    for step in range(1, 5):
        rows.append(train_step(engine, GROUPS, engine.algorithm))
        files.append(both(engine, tmp_path / str(step)))
    policies, critics = zip(*files, strict=True)
    assert policies[0] == policies[1] == policies[2]
    assert len(set(policies[2:])) == 3
    assert len(set(critics)) == 5
    assert [row["train/version"] for row in rows] == [1, 2, 3, 4]
    assert ["train/loss/policy" in row for row in rows] == [False, False, True, True]

    resumed = make_engine(model_dir, ppo(2))
    resumed.load(tmp_path / "1")
    for _ in range(3):
        train_step(resumed, GROUPS, resumed.algorithm)
    assert both(resumed, tmp_path / "resumed") == files[-1]


def test_a_stage_counts_its_own_steps(model_dir: Path) -> None:
    algorithm = replace(ppo(2), first_version=7)
    assert [len(algorithm.objectives_at(version)) for version in (7, 8, 9)] == [1, 1, 2]
    assert algorithm.objectives_at(8)[0].role == "critic"
    engine = make_engine(model_dir, algorithm, first_version=7)
    before = [tensor.clone() for _, tensor in engine.export_weights()]
    train_step(engine, GROUPS, engine.algorithm)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, engine.export_weights(), strict=True))


def test_the_warm_up_is_explained() -> None:
    assert "the first 2 train step(s) update the critic alone" in explain(ppo(2), "")
    assert "warm-up" not in explain(ppo(0), "")


def test_the_updates_of_a_critic_are_explained() -> None:
    own = PPO.configure({"kind": "ppo", "epochs": 2, "critic": {"mini_batches": 3}})
    assert "6 per train step: 2 pass(es) over 3 mini-batch(es)" in explain(build_algorithm(own), "")
    assert "critic updates" not in explain(ppo(0), "")


# --- a critic with its own passes, model and gradient norm


def updates_of(engine: TorchTrainEngine) -> list[tuple[str, int]]:
    """A list that gets (role, sequences) of each update."""
    taken: list[tuple[str, int]] = []
    update = engine.update

    def recorded(role: str, batch: Any, *args: Any) -> Any:
        taken.append((role, len(batch.experiences)))
        return update(role, batch, *args)

    engine.update = recorded  # pyright: ignore[reportAttributeAccessIssue]
    return taken


def paced(**critic: Any) -> GroupAlgorithm:
    return build_algorithm(PPO.configure({"kind": "ppo", "mini_batches": 3, "critic": critic}))


def test_a_critic_makes_its_own_passes(model_dir: Path) -> None:
    with_policy = make_engine(model_dir, paced())
    taken = updates_of(with_policy)
    train_step(with_policy, GROUPS, with_policy.algorithm)
    assert taken == 3 * [("critic", 2), ("policy", 2)], "by default the two take turns"
    apart = make_engine(model_dir, paced(epochs=2, mini_batches=1))
    taken = updates_of(apart)
    train_step(apart, GROUPS, apart.algorithm)
    assert taken == 2 * [("critic", 6)] + 3 * [("policy", 2)]
    policies = [dict(engine.export_weights()) for engine in (with_policy, apart)]
    assert all(torch.equal(tensor, policies[1][name]) for name, tensor in policies[0].items()), "it has no effect here"


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
def test_a_critic_starts_from_the_head_of_a_classifier(
    kind: Any, shard_size: str, model_dir: Path, tmp_path: Path
) -> None:
    config = MODELS["llama"].__class__(**{**MODELS["llama"].to_dict(), "num_labels": 1})
    classifier = kind.from_config(config)
    torch.nn.init.constant_(classifier.score.weight, 0.5)
    classifier.save_pretrained(tmp_path / "classifier", max_shard_size=shard_size)
    engine = make_engine(model_dir, paced(), critic_path=str(tmp_path / "classifier"))
    engine.save(tmp_path / "saved")
    head = load_file(tmp_path / "saved" / "critic" / "value_head.safetensors")
    assert torch.equal(head["weight"], classifier.score.weight)
    assert head["bias"].tolist() == [0.0]


def test_a_critic_starts_from_its_own_model(model_dir: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "llama")
    engine = make_engine(model_dir, paced(), critic_path=str(other), critic_max_grad_norm=1e-9)
    engine.save(tmp_path / "before")
    config = json.loads((tmp_path / "before" / "critic" / "config.json").read_text())
    assert config["model_type"] == "llama"
    metrics = train_step(engine, GROUPS, engine.algorithm)
    assert metrics["train/loss/value"] > 0
    resumed = make_engine(model_dir, paced(), critic_path=str(other), critic_max_grad_norm=1e-9)
    resumed.load(tmp_path / "before")
    train_step(resumed, GROUPS, resumed.algorithm)
    assert both(engine, tmp_path / "one") == both(resumed, tmp_path / "two")


def test_a_critic_whose_model_lacks_tokens_is_refused(model_dir: Path, tmp_path: Path) -> None:
    smaller = write_model(tmp_path / "smaller", vocab_size=MODELS["qwen3"].vocab_size - 1)
    with refused(ConfigError, "train.critic_path", smaller):
        make_engine(model_dir, ppo(0), critic_path=str(smaller))
