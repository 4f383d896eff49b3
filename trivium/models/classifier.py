"""Reward models in the format of transformers: `AutoModelForSequenceClassification` with one output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

from trivium.errors import DataError
from trivium.models.heads import VALUE_HEAD, ScoreModel
from trivium.models.load import load_backbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def classifier_of(directory: Path, *, pad_token_id: int | None) -> PreTrainedModel:
    """The reward model in a checkpoint's `reward/` as transformers' sequence classifier of its architecture.

    transformers scores the last token that is not `pad_token_id`; None refuses batches of several sequences. A bias of
    the head is left out: it adds the same constant to every score. Raises DataError where transformers has no such
    class for the architecture.
    """
    from transformers import AutoModelForSequenceClassification

    head = safetensors.torch.load_file(directory / f"{VALUE_HEAD}.safetensors")
    backbone = load_backbone(directory, dtype=head["weight"].dtype)
    config: Any = backbone.config
    config.num_labels, config.get_text_config().pad_token_id = 1, pad_token_id
    try:
        with torch.device("meta"):  # every parameter is replaced
            model: Any = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise _refusal(directory, f"transformers has none for {type(backbone).__name__}") from error
    if not isinstance(getattr(model, "score", None), nn.Linear) or model.score.bias is not None:
        raise _refusal(directory, f"the head of {type(model).__name__} is not one linear layer without bias, `score`")
    setattr(model, model.base_model_prefix, backbone)
    model.score.weight = nn.Parameter(head["weight"])
    return model.eval()


def load_classifier(path: Path, *, dtype: torch.dtype | str, device: torch.device | str) -> PreTrainedModel:
    """A sequence classifier with one output, in eval mode. Raises DataError where the directory holds something else.

    The type `auto` is the one it was saved in.
    """
    from transformers import AutoModelForSequenceClassification

    model, report = AutoModelForSequenceClassification.from_pretrained(
        str(path), dtype=dtype, local_files_only=True, output_loading_info=True
    )
    if report["missing_keys"] or model.config.num_labels != 1:
        missing = f"no weights for {', '.join(sorted(report['missing_keys'])[:3])}"
        raise DataError(
            f"a reward model in {path}",
            missing if report["missing_keys"] else f"a classifier with {model.config.num_labels} outputs",
            "name a directory of AutoModelForSequenceClassification with one output, "
            "for example what `trivium export --role reward` writes",
        )
    return model.to(device).eval()


def load_score_model(path: Path, *, dtype: torch.dtype, device: torch.device) -> ScoreModel:
    """The reward model in a directory of either kind: a checkpoint's `reward/`, or a classifier with one output.

    Raises DataError where it is neither, or where the classifier's head is not one linear layer.
    """
    saved = path / f"{VALUE_HEAD}.safetensors"
    if not saved.is_file() and not (path / "config.json").is_file():
        do = "name what `algorithm.kind: reward_model` trained (`reward/` of its checkpoint), or a sequence classifier"
        raise DataError(f"the reward model {path}", f"no config.json and no {saved.name} there", do)
    head = None if saved.is_file() else getattr(load_classifier(path, dtype=dtype, device=device), "score", None)
    model = ScoreModel(path, dtype=dtype, device=device, seed=0)
    if saved.is_file():
        return model
    if not isinstance(head, nn.Linear):
        raise _refusal(path, "its head is not one linear layer, `score`")
    model.value_head.load_state_dict({"weight": head.weight})  # a bias adds the same constant to every score
    return model


def _refusal(directory: Path, found: str) -> DataError:
    return DataError(
        f"a sequence classifier from {directory}",
        found,
        f"load the directory with trivium.models.heads.ScoreModel, or the backbone and {VALUE_HEAD}.safetensors",
    )
