"""Reward models in the format of transformers: `AutoModelForSequenceClassification`, one output for each head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from trivium.errors import DataError
from trivium.models.backbone.load import load_backbone, load_sequence_classifier
from trivium.models.heads.loss import ONE_OUTPUT, head_weights
from trivium.models.heads.trained_models import ScoreModel, ValueOptions, output_names
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
    if len(weight) == 1:
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
    the directory holds something else."""
    try:
        return load_sequence_classifier(path, dtype=dtype, device=device)
    except DataError as error:
        raise DataError(
            f"a reward model in {path}: {error.asked}",
            error.found,
            "name a directory of AutoModelForSequenceClassification, "
            "for example what `trivium export --role reward` writes",
        ) from error


def head_names_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of a sequence classifier's outputs. A single output is `score`."""
    number = model.config.num_labels or 1
    return output_names(model, number) if number > 1 else ONE_OUTPUT


def load_score_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, heads: Mapping[str, float] | None = None
) -> ScoreModel:
    """Loads the reward model of a directory: a checkpoint's `reward/`, or a sequence classifier. Its weights are of the
    type `dtype`; scores are float32.

    The model has one output: the sum of its heads with the weights `heads`. Raises DataError if the directory holds
    neither, if the classifier's head is not one linear layer, if `heads` has an unknown name, or if `heads` is missing
    for a model with several heads.
    """
    saved = path / f"{VALUE_HEAD}.safetensors"
    if not saved.is_file() and not (path / "config.json").is_file():
        do = "name a model of `algorithm.kind: reward_model` (`reward/` of its checkpoint), or a sequence classifier"
        raise DataError(f"the reward model {path}", f"no config.json and no {saved.name} there", do)
    options = ValueOptions(dtype=torch.float32, weights=dtype, device=device, seed=0)
    if saved.is_file():
        model = ScoreModel(path, **options)
    else:
        classifier = load_classifier(path, dtype=dtype, device=device)
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear):
            raise _refusal(path, "its head is not one linear layer, `score`")
        # The bias is dropped: it adds the same constant to every score.
        options["head"] = {"weight": head.weight.detach()}
        model = ScoreModel(cast("PreTrainedModel", classifier.base_model), **options)
    _combine(model, heads, path)
    return model


def _combine(model: ScoreModel, heads: Mapping[str, float] | None, path: Path) -> None:
    """Replaces the head by the weighted sum of its outputs, if it has several or a weight is given."""
    if model.value_head.out_features > 1 or heads is not None:
        weights = head_weights(model.head_names or ONE_OUTPUT, heads, f"the reward model {path}")
        weight = model.value_head.weight.detach()
        model.value_head = head_of_weight(weight.new_tensor([weights]) @ weight)


def head_of_weight(weight: torch.Tensor) -> nn.Linear:
    """A linear layer with this weight (K, width) and no bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device)
    layer.load_state_dict({"weight": weight})
    return layer


def _refusal(directory: Path, found: str) -> DataError:
    return DataError(
        f"a sequence classifier from {directory}",
        found,
        "load the directory with trivium.models.heads.trained_models.ScoreModel, or the backbone and "
        f"{VALUE_HEAD}.safetensors",
    )
