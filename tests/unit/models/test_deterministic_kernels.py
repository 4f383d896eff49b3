"""`train.deterministic_kernels`: equal bits on a GPU, or an error; nothing on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from failing import refused
from training_parts import Reinforce, make_batch, make_engine, weights, write_model

from trivium.foundation.errors import ConfigError
from trivium.models.placement import use_deterministic_kernels

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(WORKSPACE, os.environ.get(WORKSPACE, ":4096:8"))
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def test_every_setting_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE)
    use_deterministic_kernels("train.deterministic_kernels")
    assert os.environ[WORKSPACE] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


def test_a_process_that_began_without_the_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda gpu: {"allocation.all.allocated": gpu})
    with refused(ConfigError, "train.deterministic_kernels", WORKSPACE):
        use_deterministic_kernels("train.deterministic_kernels")
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_cpu_is_left_as_it_is(tmp_path: Path) -> None:
    make_engine(write_model(tmp_path), device="cpu", deterministic_kernels=True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_updates_on_a_gpu_have_equal_bits(tmp_path: Path) -> None:
    model_dir, batch = write_model(tmp_path), make_batch([9 + 7 * row % 23 for row in range(40)], advantages=0.3)
    results: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        engine = make_engine(model_dir, device="cuda", deterministic_kernels=True)
        engine.update("policy", batch, Reinforce())
        results.append({name: tensor.cpu() for name, tensor in weights(engine).items()})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
