"""Reward models in the format of transformers: `AutoModelForSequenceClassification`, one output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from trivium.foundation.errors import DataError
from trivium.models.backbone.load import load_backbone, load_sequence_classifier
from trivium.models.heads.trained_models import ScoreModel, ValueOptions
from trivium.models.heads.value_head import VALUE_HEAD, folded_head, saved_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def classifier_of(directory: Path, *, pad_token_id: int | None) -> PreTrainedModel:
    """Converts the reward model in a checkpoint's `reward/` to transformers' sequence classifier of its architecture.

    transformers scores the last token that is not `pad_token_id`; with None it refuses batches of several sequences. A
    bias of the head is dropped, because it adds the same constant to every score. Raises DataError if transformers has
    no such class for the architecture.
    """
    from transformers import AutoModelForSequenceClassification

    weight = folded_head(saved_head(directory))["weight"]
    backbone = load_backbone(directory, dtype=weight.dtype)
    config: Any = backbone.config
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_token_id
    try:
        with torch.device("meta"):  # takes no memory: every parameter is replaced
            model: Any = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise _refusal(directory, f"transformers has no sequence classifier for {type(backbone).__name__}") from error
    if not isinstance(getattr(model, "score", None), nn.Linear) or model.score.bias is not None:
        raise _refusal(directory, f"the head of {type(model).__name__} is not one linear layer without bias, `score`")
    setattr(model, model.base_model_prefix, backbone)
    model.score.weight = nn.Parameter(weight)
    return model.eval()


def load_classifier(path: Path, *, dtype: torch.dtype | Literal["auto"], device: torch.device | str) -> PreTrainedModel:
    """Loads a sequence classifier in eval mode. `auto` keeps the type that it was saved in. Raises DataError if
    the directory holds something else, or a classifier with several outputs."""
    try:
        model = load_sequence_classifier(path, dtype=dtype, device=device)
    except DataError as error:
        raise DataError(
            f"a reward model in {path}: {error.asked}",
            error.found,
            "name a directory of AutoModelForSequenceClassification, "
            "for example what `trivium export --role reward` writes",
        ) from error
    if (number := model.config.num_labels or 1) > 1:
        do = "name a classifier with one output: its score"
        raise DataError(f"one score by the reward model {path}", f"it has {number} outputs", do)
    return model


def load_score_model(path: Path, *, dtype: torch.dtype, device: torch.device) -> ScoreModel:
    """Loads the reward model of a directory: a checkpoint's `reward/`, or a sequence classifier. Its weights are of the
    type `dtype`; scores are float32.

    Raises DataError if the directory holds neither, or if the head of the classifier is not one linear layer with one
    output.
    """
    saved = path / f"{VALUE_HEAD}.safetensors"
    if not saved.is_file() and not (path / "config.json").is_file():
        do = "name a model of `algorithm.kind: reward_model` (`reward/` of its checkpoint), or a sequence classifier"
        raise DataError(f"the reward model {path}", f"no config.json and no {saved.name} there", do)
    options = ValueOptions(dtype=torch.float32, weights=dtype, device=device, seed=0)
    if saved.is_file():
        return ScoreModel(path, **options)
    classifier = load_classifier(path, dtype=dtype, device=device)
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear):
        raise _refusal(path, "its head is not one linear layer, `score`")
    # The bias is dropped: it adds the same constant to every score.
    options["head"] = {"weight": head.weight.detach()}
    return ScoreModel(cast("PreTrainedModel", classifier.base_model), **options)


def _refusal(directory: Path, reason: str) -> DataError:
    return DataError(
        f"a sequence classifier from {directory}",
        reason,
        "load the directory with trivium.models.heads.trained_models.ScoreModel, or the backbone and "
        f"{VALUE_HEAD}.safetensors",
    )
