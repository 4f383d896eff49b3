"""`trivium export`: writes a checkpoint's policy or reward model as a plain Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.checkpoint.store import export as export_policy
from trivium.errors import RunDirError
from trivium.models.heads.classifier import classifier_of
from trivium.models.vision.families import family_in
from trivium.models.vision.images import images_of
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.types import Message


def export(run_dir: Path, step: int | None, out: Path, role: str = "policy") -> Path:
    """Writes a model of a checkpoint (None: the latest) as a plain Hugging Face directory.

    The `policy` is a causal language model. The `reward` model is a sequence classifier with an output for each head. A
    vision reward model, for which transformers has no such class, is its backbone and `value_head.safetensors`. Raises
    RunDirError if the run has not trained the model, or if `out` is not empty.
    """
    store = CheckpointStore(run_dir / "checkpoints")
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise RunDirError(f"export the latest checkpoint of {run_dir}", "it has none", "train first")
    _check_trained(checkpoint, role)
    return export_policy(checkpoint, out) if role == "policy" else _export_reward_model(checkpoint, out)


def _check_trained(checkpoint: Checkpoint, role: str) -> None:
    """Raises RunDirError if no stage up to this one has trained the role. A train engine without `<role>-optimizer`
    files counts as having trained the policy."""
    ends = [checkpoint.path.with_name(f"step-{step:06d}") for step in checkpoint.state.get("pinned", ())]
    current, earlier = _trained_roles(checkpoint.path), set[str]().union(*map(_trained_roles, ends))
    if role in current or (role == "policy" and (role in earlier or not current)):
        return
    known = ", ".join(sorted(current)) or "no model with its own optimizer"
    raise RunDirError(
        f"export the {role} of step {checkpoint.step}",
        f"the run trained: {known}" + ("; its policy is the initial model" if role == "policy" else ""),
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
    end_of_turn = int(ChatRenderer(tokenizer, images=images_of(out)).expert([Message("user", "")], "")[1][-1])
    pad = tokenizer.pad_token_id
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
