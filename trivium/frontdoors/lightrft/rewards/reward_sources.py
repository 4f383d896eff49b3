"""The sources of a reward function's `model_reward_list`: modules, functions, directories, files and services."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel

from trivium.clients.http import EndpointError
from trivium.foundation.concurrency import run_here
from trivium.foundation.errors import ConfigError, DataError, RewardError, described, text_of
from trivium.foundation.registry import resolve
from trivium.frontdoors.padding import side_by_side
from trivium.models.heads.classifier import load_score_model
from trivium.models.heads.scoring import Conversation, SequenceScorer
from trivium.models.heads.trained_models import ScoreModel
from trivium.models.placement import device_of
from trivium.models.vision.images import decoded
from trivium.rewards.remote import RemoteReward
from trivium.rewards.remote_forms import RemoteSample, RemoteScore
from trivium.text import hf_tokenizer
from trivium.types import AnyArray, IntArray, Media


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """The input of a reward: one rollout."""

    prompt: str
    """The rendered text of the prompt."""
    completion: str
    """Text of the response, without special tokens."""
    query: str
    """Text of the whole sequence, special tokens included."""
    tokens: IntArray
    """(L,) prompt and response."""
    response_tokens: IntArray
    label: Any = None
    """The label that selects the recipe."""
    reference: Any = None
    """The right answer."""
    images: tuple[Media, ...] = ()
    """The images in order, each with its span in `tokens`."""
    truncated: bool = False
    """Whether the response ended at its length limit."""


class RewardSource(Protocol):
    """Scores samples."""

    label: str

    def score(self, samples: Sequence[RolloutSample]) -> AnyArray:
        """Returns (B,) finite scores, or raises RewardError."""
        ...


def sources_of(reward_model: object, remote_rm_url: object, *, tokenizer: Any, batch_size: int) -> list[RewardSource]:
    """Returns one source per reward model, then one per address, in order."""
    models = _listed(list(reward_model.values()) if isinstance(reward_model, Mapping) else reward_model)
    addresses = _listed(remote_rm_url)
    sources = [_model_source(model, i, tokenizer, batch_size) for i, model in enumerate(models)]
    return sources + [_address_source(address, i) for i, address in enumerate(addresses)]


def _listed(value: object) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple | nn.ModuleList) else [value]


def _model_source(model: object, number: int, tokenizer: Any, batch_size: int) -> RewardSource:
    label = f"reward_model[{number}]"
    if isinstance(model, str | Path):
        return DirectorySource(label, Path(model), tokenizer)
    if isinstance(model, ScoreModel):
        return DirectorySource(label, model, tokenizer)
    if callable(model):
        return CallSource(label, model, tokenizer, batch_size)
    raise ConfigError(label, described(model), "give a module, a function or the directory of a reward model")


def _address_source(address: object, number: int) -> RewardSource:
    label = f"remote_rm_url[{number}]"
    if isinstance(address, str) and address.endswith(".py"):
        return CallSource(label, resolve("rewards", f"{Path(address).resolve()}:reward_func"), None, 0)
    section = {"urls": address} if isinstance(address, str) else address
    if not isinstance(section, Mapping):
        raise ConfigError(label, described(address), "give a URL, or a .py file with a function `reward_func`")
    try:
        config = RemoteReward.Config.model_validate({"protocol": "lightrft", **section})
    except ValidationError as error:
        cause = "; ".join(f"{problem['msg']} ({problem['input']!r:.60})" for problem in error.errors())
        raise ConfigError(
            label, cause, "give a URL, a .py file with a function `reward_func`, or the keys of a reward `kind: remote`"
        ) from error
    return RemoteSource(label, RemoteReward(config))


# --------------------------------------------------------------------------- modules and functions

_OF_LIGHTRFT = ("sequences", "attention_mask", "prompt_and_output", "raw_images", "img_num", "extra")
"""The arguments that the original passes to a reward model."""


class CallSource:
    """Calls a module or a function with the tensors and texts that its parameters name.

    Prompts are padded on the left and responses on the right, as in the original. A transformers model gets only tokens
    and mask, padded on the right.
    """

    def __init__(self, label: str, function: Callable[..., Any], tokenizer: Any, batch_size: int) -> None:
        """`batch_size` is the number of samples per call; 0 means all."""
        self.label, self._function, self._batch_size = label, function, batch_size
        module: Any = function  # a module or a function
        self._is_huggingface = isinstance(function, PreTrainedModel)
        self._device, self._pad = torch.device("cpu"), getattr(tokenizer, "pad_token_id", None) or 0
        if isinstance(function, nn.Module):
            module.eval()
            self._device = next((p.device for p in module.parameters()), self._device)
        if self._is_huggingface:
            pad = module.config.get_text_config().pad_token_id
            # transformers' classifiers refuse a batch without a pad token: they find the last token by it.
            self._pad, self._batch_size = pad or 0, batch_size if pad is not None else 1
        self._names = _parameters(function, label)

    @torch.no_grad()
    def score(self, samples: Sequence[RolloutSample]) -> AnyArray:
        """Returns (B,) finite scores, or raises RewardError."""
        step = self._batch_size or max(1, len(samples))
        parts = [self._scored(samples[at : at + step]) for at in range(0, len(samples), step)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _scored(self, samples: Sequence[RolloutSample]) -> AnyArray:
        try:
            result = self._function(**self._arguments(samples))
        except Exception as error:
            cause = f"{type(error).__name__}: {text_of(error)}"
            raise RewardError(f"scores from {self.label}", cause, "fix the reward: nothing is scored 0") from error
        return numbers_in(result, len(samples), self.label)

    def _arguments(self, samples: Sequence[RolloutSample]) -> dict[str, Any]:
        if self._is_huggingface and any(sample.images for sample in samples):
            raise DataError(
                "scores of samples with images",
                f"{type(self._function).__name__} is called with tokens alone",
                "give the directory of the model, whose processor prepares images, or a module that takes raw_images",
            )
        arguments = _arguments_of(samples, self._pad, self._device, aligned=not self._is_huggingface)
        return {name: arguments[name]() for name in self._names}


def _parameters(function: Callable[..., Any], label: str) -> tuple[str, ...]:
    """Returns the names of the arguments to pass. A function with `**kwargs` also gets the original's arguments."""
    target = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(target).parameters.values()
    arguments = _arguments_of((), 0, torch.device("cpu"))
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    missing = [name for name in required if name not in arguments]
    if missing or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ConfigError(
            f"call {label}, {getattr(target, '__qualname__', type(function).__name__)}",
            f"it takes ({', '.join(p.name for p in parameters)})",
            f"name its parameters from: {', '.join(arguments)}",
        )
    if isinstance(function, PreTrainedModel):
        return "input_ids", "attention_mask"
    # An optional parameter of a module may have another meaning, such as `labels` for a loss.
    optional = {*_OF_LIGHTRFT, "input_ids"} if isinstance(function, nn.Module) else arguments.keys()
    chosen = [p.name for p in parameters if p.name in arguments and (p.default is p.empty or p.name in optional)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(dict.fromkeys((*chosen, *_OF_LIGHTRFT)))
    if not chosen:
        raise ConfigError(f"call {label}", "it has no parameters", f"let it take some of: {', '.join(arguments)}")
    return tuple(chosen)


def _arguments_of(
    samples: Sequence[RolloutSample], pad: int, device: torch.device, *, aligned: bool = True
) -> dict[str, Callable[[], Any]]:
    """Returns argument name -> function that computes it, for the names in LightRFT, OpenRLHF and Trivium."""

    def tokens() -> torch.Tensor:
        return _padded(samples, pad, aligned)[0].to(device)

    def texts(name: str) -> Callable[[], list[Any]]:
        return lambda: [getattr(sample, name) for sample in samples]

    def images() -> list[list[Any]]:
        return [[decoded(item) for item in sample.images] for sample in samples]

    return {
        "sequences": tokens,
        "input_ids": tokens,
        "attention_mask": lambda: _padded(samples, pad, aligned)[1].to(device),
        "prompt_and_output": texts("query"),
        "raw_images": images,
        "images": images,
        "img_num": lambda: [len(sample.images) for sample in samples],
        "extra": lambda: {"references": texts("reference")(), "labels": texts("label")()},
        "queries": texts("query"),
        "prompts": texts("prompt"),
        "completions": texts("completion"),
        "labels": texts("label"),
        "references": texts("reference"),
        "refs": texts("reference"),
    }


def _padded(samples: Sequence[RolloutSample], pad: int, aligned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ((B, S) tokens, (B, S) mask), padded on the right. `aligned` also pads on the left, so that all responses
    begin in one column."""
    prompts = [len(sample.tokens) - len(sample.response_tokens) if aligned else 0 for sample in samples]
    tokens = [np.asarray(sample.tokens, np.int64) for sample in samples]
    return side_by_side(tokens, prompts, pad), side_by_side([np.ones_like(row) for row in tokens], prompts, 0)


# --------------------------------------------------------------------------- directories


class DirectorySource:
    """Scores the rollout's tokens with a reward model from a directory: its backbone, head and processor."""

    def __init__(self, label: str, model: Path | ScoreModel, tokenizer: Any) -> None:
        """Raises DataError for a directory without a reward model, and ConfigError if its tokenizer differs."""
        self.label, self._eos = label, getattr(tokenizer, "eos_token_id", None)
        if isinstance(model, Path) and tokenizer is not None:
            reward_tokenizer = hf_tokenizer(model, correct_pad_token=False)
            if reward_tokenizer.get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"{label}: {model}",
                    "its tokenizer is not the policy's, so the tokens of a rollout mean something else to it",
                    "use a reward model with the policy's tokenizer, or serve it and name it in remote_rm_url",
                )
        if isinstance(model, Path):
            loaded = load_score_model(model, dtype=torch.float32, device=device_of("auto"))
            self._scorer = SequenceScorer(loaded, model_dir=model)
        else:
            self._scorer = SequenceScorer(model)

    def score(self, samples: Sequence[RolloutSample]) -> AnyArray:
        """Returns (B,) scores of the last tokens. Appends an end-of-sequence token to truncated responses first."""
        scores = self._scorer.scores([self._ended(sample) for sample in samples])
        return numbers_in(scores, len(samples), self.label)

    def _ended(self, sample: RolloutSample) -> Conversation:
        tokens = np.asarray(sample.tokens, np.int32)
        # The head reads the last token, and reward models learn to find the end of the sequence there.
        if sample.truncated and self._eos is not None:
            tokens = np.append(tokens, np.int32(self._eos))
        return Conversation(tokens, tuple(sample.images))


# --------------------------------------------------------------------------- services


class RemoteSource:
    """Scores samples by concurrent requests to a reward service."""

    def __init__(self, label: str, reward: RemoteReward) -> None:
        self.label, self._reward = label, reward

    def score(self, samples: Sequence[RolloutSample]) -> AnyArray:
        """Returns (B,) finite scores. Raises RewardError if the service fails for a sample."""
        results = run_here(self._reward.score_batch([_remote_sample(sample) for sample in samples]))
        for row, result in enumerate(results):
            if isinstance(result, EndpointError):
                raise RewardError(
                    f"{result.asked}, sample {row} of {len(results)}", result.found, result.do
                ) from result
        scores = [result.reward for result in results if isinstance(result, RemoteScore)]
        return numbers_in(scores, len(samples), self.label)


def _remote_sample(sample: RolloutSample) -> RemoteSample:
    return RemoteSample(
        sample.prompt,
        sample.completion,
        query=sample.query,
        label=sample.reference,  # OpenRLHF's labels are the right answers
        reference=sample.reference,
        images=sample.images,
        columns={"label": sample.label, "reference": sample.reference},
    )


# --------------------------------------------------------------------------- results


def numbers_in(result: object, count: int, label: str) -> AnyArray:
    """Converts a reward's result to (B,) float64.

    Accepts a tensor, an array, a list, a mapping with one under `score`, `scores`, `rewards` or `logits`, or an object
    with the attribute `logits`. Raises RewardError unless it has one finite number for each of `count` samples.
    """
    values = _held(result)
    if isinstance(values, torch.Tensor):
        values = values.detach().float().cpu().numpy()
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise _refusal(label, count, described(result)) from error
    if array.shape == (count, 1):
        array = array[:, 0]
    if array.shape != (count,):
        raise _refusal(label, count, f"an array of shape {array.shape}")
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array))[0])
        raise _refusal(label, count, f"{array[row]} for sample {row}")
    return array


def _held(result: Any) -> Any:
    for name in ("score", "scores", "rewards", "logits"):
        if isinstance(result, Mapping) and name in result:
            return result[name]
    return getattr(result, "logits", result)


def _refusal(label: str, count: int, cause: str) -> RewardError:
    return RewardError(
        f"{count} finite numbers from {label}, one for each sample", cause, "fix the reward: nothing is scored 0"
    )
