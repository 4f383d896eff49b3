"""An export has the types of the model before training, unless another one is named, and says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trivium.foundation.atomic import commit, staging_directory
from trivium.runtime.export import dtype_in, export

FLOATS = ("model.embed.weight", "model.layers.0.mlp.weight", "model.router.bias")


def write_model(folder: Path, types: dict[str, torch.dtype], named: str | None) -> None:
    folder.mkdir(parents=True)
    tensors = {name: torch.arange(8).to(dtype) / 3 for name, dtype in types.items()}
    save_file({**tensors, "model.steps": torch.arange(3)}, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama"} | ({} if named is None else {"dtype": named, "text_config": {"dtype": named}})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose base is of bfloat16 with a bias in float32, and whose checkpoint is of float32."""
    types = dict.fromkeys(FLOATS, torch.bfloat16) | {FLOATS[2]: torch.float32}
    write_model(tmp_path / "base", types, "bfloat16")
    run_dir = tmp_path / "run"
    final = run_dir / "checkpoints" / "step-000001"
    staging = staging_directory(final)
    write_model(staging / "policy", dict.fromkeys(FLOATS, torch.float32), "float32")
    (staging / "state.json").write_text("{}")
    commit(staging, final, 1)
    (run_dir / "config.yaml").write_text(f"model: {{kind: hf, path: {tmp_path / 'base'}}}\n")
    return run_dir


def exported(run_dir: Path, dtype: str | None = None) -> tuple[dict[str, torch.dtype], str | None, str | None]:
    """(types of the tensors, type that is said, type in config.json)."""
    out = export(run_dir, None, run_dir / f"out-{dtype}", dtype=dtype)
    tensors = load_file(out / "model.safetensors")
    assert tensors.pop("model.steps").tolist() == [0, 1, 2]
    for tensor in tensors.values():
        assert torch.equal(tensor, (torch.arange(8).float() / 3).to(tensor.dtype))
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["dtype"] == config["dtype"]
    return {name: tensor.dtype for name, tensor in tensors.items()}, dtype_in(out), config["dtype"]


def test_the_types_are_those_of_the_base_by_default(run_dir: Path) -> None:
    types, shown, named = exported(run_dir)
    assert [types[name] for name in FLOATS] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert shown == named == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_named_type_is_that_of_every_weight(dtype: str, run_dir: Path) -> None:
    types, shown, named = exported(run_dir, dtype)
    assert set(types.values()) == {getattr(torch, dtype)}
    assert shown == named == dtype


def test_without_the_base_the_weights_stay_as_they_were_trained(run_dir: Path) -> None:
    (run_dir.parent / "base" / "config.json").unlink()
    types, shown, _ = exported(run_dir)
    assert set(types.values()) == {torch.float32}
    assert shown == "float32"
