"""The schedule, the decay groups and the state of the optimizer."""

import math

import pytest
import torch
from failing import refused
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from trivium.foundation.errors import RunDirError
from trivium.training.optim import Optimizer, learning_rate
from trivium.training.section import OptimizerConfig
from trivium.training.snapshot import read_tensors


def rates(total=10, **config):
    return [learning_rate(OptimizerConfig(lr=2.0, **config), version, total) for version in range(total)]


def test_constant():
    assert rates() == [2.0] * 10


def test_warm_up_reaches_the_peak_and_stays():
    assert rates(warmup_steps=4) == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6


def test_linear():
    assert rates(warmup_steps=2, schedule="linear", min_lr_ratio=0.5) == pytest.approx(
        [1.0, 2.0] + [2.0 - k / 8 for k in range(8)]
    )


def test_cosine_and_what_lies_beyond():
    found = rates(schedule="cosine", min_lr_ratio=0.1)
    assert found == pytest.approx([2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi * k / 10))) for k in range(10)])
    config = OptimizerConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(config, 99, 10) == pytest.approx(0.2)


def test_warm_up_longer_than_the_run():
    assert rates(total=3, warmup_steps=4, schedule="linear") == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("betas", [(1e30, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan"))])
def test_a_decay_rate_is_a_part(betas):
    with pytest.raises(ValidationError, match="betas"):
        OptimizerConfig(betas=betas)


def network():
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})


def test_decay_touches_matrices_only():
    module = network()
    module["head"] = nn.Linear(4, 5, bias=False)
    module["head"].weight = module["embed"].weight  # tied
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = Optimizer(module, OptimizerConfig(lr=0.5, weight_decay=0.2))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5, 1.0, "test")
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.9 if name == "linear.weight" else 1.0))


def test_clipping_scales_the_whole_gradient():
    module = network()
    optimizer = Optimizer(module, OptimizerConfig())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for p in module.parameters())
    assert optimizer.step(0.1, 0.5, "test") == pytest.approx(count**0.5)
    clipped = torch.cat([p.grad.flatten() for p in module.parameters()])
    assert float(clipped.norm()) == pytest.approx(0.5, rel=1e-4)
    optimizer.zero_grad()
    assert all(p.grad is None for p in module.parameters())


def test_state_of_another_model_is_refused(tmp_path):
    optimizer = Optimizer(network(), OptimizerConfig())
    save_file({"other.weight/exp_avg": torch.zeros(1)}, tmp_path / "state.safetensors")
    with refused(RunDirError, "other.weight"):
        optimizer.restore(read_tensors(tmp_path, "state"))
