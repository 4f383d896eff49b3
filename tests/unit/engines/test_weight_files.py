"""Weights on their way to an engine in other processes: files of all of them, or an adapter that peft itself loads."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from failing import refused
from training_parts import write_model
from vision_parts import tiny

from tests.processes import Forked
from tests.waiting import eventually
from trivium.engines.vllm.weight_files import WeightFiles, fast_directory, own_directory
from trivium.foundation.errors import SyncError
from trivium.models.backbone.load import load_lm
from trivium.models.weights.lora import adapter_state, attach, pushed_adapter
from trivium.models.weights.saved_tensors import SafetensorsFiles
from trivium.models.weights.section import LoraConfig
from trivium.models.weights.stream import described

TOKENS = torch.arange(3, 14)[None]


def load(directory: Path) -> Any:
    return load_lm(directory, dtype=torch.float32)


def adapted(directory: Path, seed: int = 0, **section: Any) -> Any:
    """A model with an adapter that changes what it says."""
    module = attach(load(directory), LoraConfig(**{"rank": 3, "alpha": 5, **section}), seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in dict(adapter_state(module)).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return module


def test_directories_of_processes_that_were_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    killed = Forked("killed", tmp_path / "killed.txt", waiting_in, tmp_path)
    eventually(lambda: len([*tmp_path.glob("trivium-vllm-*/version")]) == 1, 60, lambda: killed.text, killed)
    [theirs] = tmp_path.glob("trivium-vllm-*")
    mine = own_directory(tmp_path)
    assert theirs.is_dir(), "its process lives"
    killed.kill()
    elsewhere = theirs.with_name(theirs.name.replace(socket.gethostname(), "another-host"))
    elsewhere.mkdir()
    unknown = tmp_path / "trivium-vllm-of_another"
    unknown.mkdir()
    also_mine = own_directory(tmp_path)
    assert {*tmp_path.glob("trivium-vllm-*")} == {mine, also_mine, elsewhere, unknown}


@pytest.mark.parametrize(("engines", "is_in_memory"), [(1, True), (2, False)])
def test_engines_of_a_machine_share_the_free_memory(
    engines: int, is_in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0123456789")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40))  # pyright: ignore[reportUnknownLambdaType]
    assert (fast_directory(tmp_path, engines) == Path("/dev/shm")) == is_in_memory


def waiting_in(parent: Path) -> None:
    (own_directory(parent) / "version").touch()
    threading.Event().wait()


@torch.no_grad()
def test_a_pushed_adapter_lies_as_peft_reads_it_with_its_scale(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", scale=2.0)
    module = adapted(directory)
    files = WeightFiles(directory, 3)
    path = files.write(described(pushed_adapter(module)), tmp_path / "adapter")
    assert files.adapted_layers() == sorted({name.split(".")[-3] for name, _ in adapter_state(module)})
    read = attach(load(directory), LoraConfig(path=str(path)), seed=0)
    said, expected = (each(input_ids=TOKENS, use_cache=False).logits for each in (read, module))
    assert (said - expected).abs().max() < 1e-5
    assert (said - load(directory)(input_ids=TOKENS, use_cache=False).logits).abs().max() > 0.1


def test_what_is_no_adapter_of_the_model_is_refused_and_nothing_written(tmp_path: Path) -> None:
    directory, strange = write_model(tmp_path / "model"), write_model(tmp_path / "strange", seed=1)
    files, pushed = WeightFiles(directory, 3), [*pushed_adapter(adapted(directory))]
    for taken, weights, found in (
        (WeightFiles(directory), pushed, "engine.adapter_rank"),
        (files, [*pushed_adapter(adapted(directory, rank=4))], "up to 3"),
        (files, [*pushed_adapter(adapted(strange))], "differs from"),
        (files, pushed[1:], "not complete"),
    ):
        with refused(SyncError, found):
            taken.write(described(weights), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_weights_are_known_by_the_names_of_the_files_and_by_those_in_the_model(family: str, tmp_path: Path) -> None:
    """Files of some families have older names than the model that transformers makes of them."""
    directory = tiny(tmp_path / "model", family)
    files, module = WeightFiles(directory), load(directory)
    named = [*module.state_dict().items()]
    saved = {name for name, _ in named} & files._saved.keys()
    assert len(saved) < len(named) - 5
    written = SafetensorsFiles([*map(Path, files.files(files.write(described(named), tmp_path / "weights")))])
    assert {name: entry.shape for name, entry in written.entries.items()} == {n: tuple(t.shape) for n, t in named}
    with refused(SyncError, "first model."):
        files.write(described(named[1:]), tmp_path / "short")
    assert not (tmp_path / "short").exists()
