"""A train engine whose caller takes the steps: gradients of several batches, then one step, on a shared base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from tinker_client import stage_in

from trivium.foundation.errors import DataError, TriviumError
from trivium.models.weights.section import LoraConfig
from trivium.protocols import StepSettings
from trivium.runtime.adapter_service import adapters_of
from trivium.serving.tinker.lora_models import Adapters
from trivium.serving.tinker.losses import loss_batch

LORA = LoraConfig(rank=3, alpha=32, push="adapter")
RNG = np.random.default_rng(0)


def sequence(length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    tokens = RNG.integers(1, 12, length + 1)
    weights = RNG.normal(size=length).astype(np.float32)
    return tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:], "weights": weights}


DATA = [sequence(length) for length in (5, 9, 3, 12)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return adapters_of(stage_in(tmp_path_factory.mktemp("stepped")))


def engine_of(adapters: Adapters, seed: int = 1) -> Any:
    engine = adapters.make(LORA, seed, 1.0)
    engine.prepare()
    return engine


def state(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.offered_weights() if name.endswith(".weight")}


def test_a_gradient_and_a_step_are_an_update(adapters: Adapters) -> None:
    one, other = engine_of(adapters), engine_of(adapters)
    config = one.config.optimizer
    for _ in range(3):
        batch, objective = loss_batch("cross_entropy", {}, DATA)
        expected = one.update("policy", batch, objective)
        found, columns = other.accumulate(batch, objective)
        assert found["train/loss/policy"] == expected["train/loss/policy"]
        assert [len(each) for each in columns["log_prob"]] == batch.lengths
        norm = other.step(StepSettings(config.peak, config.betas, config.eps, max_grad_norm=one.config.max_grad_norm))
        assert norm["train/grad_norm/policy"] == expected["train/grad_norm/policy"]
    assert other.version == 3
    mine, theirs = state(other), state(one)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_engines_share_the_base_and_nothing_else(adapters: Adapters) -> None:
    before = {name: tensor.clone() for name, tensor in adapters.base.state_dict().items()}
    one, other = engine_of(adapters), engine_of(adapters)
    untouched = state(other)
    held = dict(one._policy.module.named_parameters())
    assert held["model.embed_tokens.weight"].data_ptr() == adapters.base.get_input_embeddings().weight.data_ptr()
    batch, objective = loss_batch("cross_entropy", {}, DATA)
    one.accumulate(batch, objective)
    one.step(StepSettings(1e-2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapters.base.state_dict().items())
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in state(other).items())
    assert any(not torch.equal(tensor, untouched[name]) for name, tensor in state(one).items())


def test_a_step_with_a_broken_gradient_leaves_the_weights(adapters: Adapters) -> None:
    engine = engine_of(adapters)
    before = state(engine)
    tokens, inputs = DATA[0]
    broken = {**inputs, "weights": np.full(len(tokens), np.inf, np.float32)}
    batch, objective = loss_batch("cross_entropy", {}, [(tokens, broken)])
    engine.accumulate(batch, objective)
    with refused(TriviumError, "gradient"):
        engine.step(StepSettings(1e-2))
    assert engine.holds_version
    assert engine.version == 0
    engine.step(StepSettings(1e-2))  # the gradient was dropped
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(engine).items())


def test_the_settings_of_a_step_are_those_of_adamw(adapters: Adapters) -> None:
    """Two steps, by hand."""
    engine = engine_of(adapters)
    parameters = dict(engine._policy.module.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    settings = StepSettings(3e-2, (0.8, 0.9), 1e-6, 0.1, max_grad_norm=0.5)
    values = {name: p.detach().double().clone() for name, p in trained.items()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in (1, 2):
        batch, objective = loss_batch("cross_entropy", {}, DATA)
        engine.accumulate(batch, objective)
        gradients = {name: p.grad.double().clone() for name, p in trained.items() if p.grad is not None}
        norm = torch.stack([each.square().sum() for each in gradients.values()]).sum().sqrt()
        engine.step(settings)
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, float(0.5 / (norm + 1e-6)))
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient.square()
            mean, root = first[name] / (1 - 0.8**step), (second[name] / (1 - 0.9**step)).sqrt()
            values[name] = values[name] * (1 - 3e-2 * 0.1) - 3e-2 * mean / (root + 1e-6)
        for name, value in values.items():
            assert torch.allclose(trained[name].double(), value, atol=2e-5), name


def test_a_checkpoint_without_merged_weights(adapters: Adapters, tmp_path: Path) -> None:
    engine = engine_of(adapters)
    batch, objective = loss_batch("cross_entropy", {}, DATA)
    engine.accumulate(batch, objective)
    engine.step(StepSettings(1e-2))
    engine.save(tmp_path / "state")
    files = {path.name for path in (tmp_path / "state").iterdir()}
    assert files == {"policy-adapter", "policy-optimizer.safetensors", "engine.json"}
    again = adapters.make(LORA, 0, 1.0)
    again.load(tmp_path / "state")
    found, expected = dict(again.offered_weights()), dict(engine.offered_weights())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_step_after_a_lost_gradient_fails_once(adapters: Adapters) -> None:
    """A batch between two others fails: the step is not one on a part of the data."""
    engine = engine_of(adapters)
    before = state(engine)
    batch, objective = loss_batch("cross_entropy", {}, DATA)
    engine.accumulate(batch, objective)

    class Failing(type(objective)):
        def loss(self, inputs: Any, totals: Any) -> Any:
            raise RuntimeError("out of memory")

    broken = object.__new__(Failing)
    broken.__dict__.update(vars(objective))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.accumulate(batch, broken)
    engine.accumulate(batch, objective)
    with refused(DataError, "lacks data"):
        engine.step(StepSettings(1e-2))
    assert engine.holds_version
    assert engine.step(StepSettings(1e-2))["train/grad_norm/policy"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(engine).items())
    norms: list[float] = []
    for fails in (False, True):
        engine.accumulate(batch, objective)
        if fails:  # a forward pass loses nothing
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.accumulate(batch, broken, gradient=False)
        norms.append(engine.step(StepSettings(0.0))["train/grad_norm/policy"])
    assert norms[0] == norms[1] > 0
