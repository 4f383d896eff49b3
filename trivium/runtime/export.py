"""`trivium export`: writes a checkpoint's policy or reward model as a plain Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.checkpoint.store import export as export_policy
from trivium.config.saved import config_file, from_yaml
from trivium.foundation.errors import RunDirError
from trivium.models.heads.classifier import classifier_of
from trivium.models.vision.families import family_in
from trivium.models.vision.images import images_of
from trivium.models.vision.processor import read_json
from trivium.models.weights.saved_tensors import SafetensorsFiles
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.types import Message

_DTYPES = ("float32", "bfloat16", "float16")


def export(run_dir: Path, step: int | None, out: Path, role: str = "policy", dtype: str | None = None) -> Path:
    """Writes a model of a checkpoint (None: the latest) as a plain Hugging Face directory, with weights of the type
    `dtype`; None: each of the type that it has in the model before training, if that model is still there.

    The `policy` is a causal language model. The `reward` model is a sequence classifier with an output for each head. A
    vision reward model, for which transformers has no such class, is its backbone and `value_head.safetensors`. Raises
    RunDirError if the run has not trained the model, or if `out` is not empty.
    """
    store = CheckpointStore(run_dir / "checkpoints")
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise RunDirError(f"export the latest checkpoint of {run_dir}", "it has none", "train first")
    _check_trained(checkpoint, role)
    base = _base_of(run_dir)
    (export_policy if role == "policy" else _export_reward_model)(checkpoint, out)
    _convert(out, dtype or (None if base is None else dtype_in(base)), {} if dtype or base is None else _types(base))
    return out


def dtype_in(model: Path) -> str | None:
    """The type of most weights of a model directory, or that of its config.json if it has no safetensors; None if it
    says none."""
    if types := Counter(_types(model).values()):
        return str(types.most_common(1)[0][0]).removeprefix("torch.")
    config = read_json(model / "config.json")
    return config.get("dtype") or config.get("torch_dtype")


def _base_of(run_dir: Path) -> Path | None:
    """The directory of the model before training; None if it is gone."""
    file = config_file(run_dir)
    path = from_yaml(file.read_text(encoding="utf-8"))["model"].get("path") if file.is_file() else None
    model = run_dir / "model" if path is None else Path(path)
    return model if (model / "config.json").is_file() else None


def _types(model: Path) -> dict[str, torch.dtype]:
    """The floating-point type of each tensor of a model directory."""
    entries = SafetensorsFiles(sorted(model.glob("*.safetensors"))).entries
    types = {name: entry.dtype for name, entry in entries.items()}
    return {name: kind for name, kind in types.items() if isinstance(kind, torch.dtype) and kind.is_floating_point}


def _convert(out: Path, dtype: str | None, types: Mapping[str, torch.dtype]) -> None:
    """Converts the weights of a model directory, a file at a time: to those of `types` by name, others to `dtype`. A
    type that training does not write, such as one of 8 bits, leaves them as they are."""
    if dtype not in _DTYPES:
        return
    for file in out.glob("*.safetensors"):
        tensors = {
            name: tensor.to(types.get(name, getattr(torch, dtype))) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    config = read_json(out / "config.json")
    for part in filter(None, (config, config.get("text_config"), config.get("vision_config"))):
        part |= {key: dtype for key in ("dtype", "torch_dtype") if key in part}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_trained(checkpoint: Checkpoint, role: str) -> None:
    """Raises RunDirError if no stage up to this one has trained the role. A train engine without `<role>-optimizer`
    files counts as having trained the policy."""
    ends = [checkpoint.path.with_name(f"step-{step:06d}") for step in checkpoint.state.get("pinned", ())]
    current, earlier = _trained_roles(checkpoint.path), set[str]().union(*map(_trained_roles, ends))
    if role in current or (role == "policy" and (role in earlier or not current)):
        return
    roles = ", ".join(sorted(current)) or "no model with its own optimizer"
    raise RunDirError(
        f"export the {role} of step {checkpoint.step}",
        f"the run trained: {roles}" + ("; its policy is the initial model" if role == "policy" else ""),
        "use --role reward" if "reward" in current else "train one with algorithm.kind reward_model",
    )


def _trained_roles(checkpoint: Path) -> set[str]:
    return {path.name.partition("-optimizer")[0] for path in checkpoint.glob("*-optimizer*.safetensors")}


def _export_reward_model(checkpoint: Checkpoint, out: Path) -> Path:
    """Writes `reward/` as a sequence classifier, with the tokenizer that the run trained it with.

    Training reads the score at the token that ends the completion's turn. The exported model uses this token as its end
    of sequence, and never as padding.
    """
    export_policy(checkpoint, out, leave_out=("*.safetensors*", "config.json", "generation_config.json"))
    tokenizer = hf_tokenizer(out, correct_pad_token=False)
    # An empty completion is the token that ends the turn, alone.
    end_of_turn = int(ChatRenderer(tokenizer, images=images_of(out)).expert([Message("user", "")], "")[1][-1])
    pad = tokenizer.pad_token_id
    # transformers' classifiers read the score at the last token that is not padding.
    pad_token_id = pad if isinstance(pad, int) and pad != end_of_turn else None
    if family_in(checkpoint.path / "reward") is None:
        classifier_of(checkpoint.path / "reward", pad_token_id=pad_token_id).save_pretrained(out)
    else:
        for file in (checkpoint.path / "reward").iterdir():
            shutil.copyfile(file, out / file.name)
    if tokenizer.eos_token_id != end_of_turn:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_turn)
        tokenizer.save_pretrained(out)
    return out
