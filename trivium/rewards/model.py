"""Rewards from a reward model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from trivium.clients.hub import ModelPath
from trivium.config import RewardConfig, RunConfig
from trivium.foundation.errors import DataError, Problem
from trivium.foundation.registry import resolve
from trivium.types import IMAGE, Media, Message

if TYPE_CHECKING:
    from trivium.models.heads.scoring import Conversation


class ModelReward:
    """The score of a reward model for the conversation: the task's prompt and the text of the last turn.

    The score is read at the token that ends the turn. One sequence is scored at a time, so a score does not depend on
    other sequences.
    """

    class Config(RewardConfig):
        kind: str = "model"
        path: ModelPath | None = None
        """Directory of a model that `AutoModelForSequenceClassification` loads, and its tokenizer: what `trivium export
        --role reward` writes; or the `reward/` of a checkpoint, which may read images."""
        stage: str | None = None
        """In place of a path: the name of the earlier stage of the same run that trains the reward model."""
        device: str = "auto"
        """`cpu`, `cuda`, `cuda:1`, ...; `auto` uses a GPU if there is one."""
        dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        """Type of the weights; `auto` is the type they were saved in."""
        threads: int = Field(default=1, ge=1)
        """CPU threads per call."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            if (self.path is None) == (self.stage is None):
                found = "neither path nor stage" if self.path is None else "both path and stage"
                yield Problem(f"{where}.path", "a reward model", found, "set one of the two")
            if self.path is not None and (reason := _no_reward_model(Path(self.path))):
                yield Problem(
                    f"{where}.path",
                    f"the reward model {self.path}",
                    reason,
                    "name a directory that `trivium export RUN OUT --role reward` wrote, `reward/` of a checkpoint, "
                    "or another "
                    "directory that transformers' AutoModelForSequenceClassification loads",
                )

    def __init__(self, config: Config) -> None:
        """Raises DataError for a directory without a reward model or without a chat template."""
        if config.path is None:
            raise DataError(
                f"the reward model of the stage {config.stage!r}",
                "this config trains no such stage",
                "use it in that run, or a path",
            )
        path = Path(config.path)
        if reason := _no_reward_model(path):
            raise DataError(
                f"the reward model {path}", reason, "name a directory that `trivium export --role reward` wrote"
            )
        self._model: _Model = _Trained(config, path) if _is_trained_here(path) else _Classifier(config, path)
        self._threads, self._lock = config.threads, threading.Lock()

    def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_messages: Sequence[Mapping[str, str]],
        prompt_media: Sequence[Media] = (),
    ) -> float:
        """Raises DataError for a conversation that the model does not support."""
        import torch

        sequence = self._model.sequence(prompt_messages, prompt_media, completion)
        with self._lock, torch.no_grad():  # calls in several threads would compete for the same cores
            torch.set_num_threads(self._threads)
            return self._model.score(sequence)


class _Model(Protocol):
    """A reward model of one of the two formats."""

    def sequence(self, messages: Sequence[Mapping[str, str]], media: Sequence[Media], completion: str) -> Any:
        """The conversation in the form of the model's training: prompt, completion, end of the turn."""
        ...

    def score(self, sequence: Any) -> float: ...


class _Classifier:
    """A sequence classifier of transformers."""

    def __init__(self, config: ModelReward.Config, path: Path) -> None:
        import torch
        from transformers import AutoTokenizer

        from trivium.models.heads.classifier import load_classifier

        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if self._tokenizer.chat_template is None or self._tokenizer.eos_token_id is None:
            raise DataError(
                f"conversations for the reward model {path}",
                "its tokenizer has no chat template, or no end of sequence",
                "save chat_template.jinja and eos_token in the directory",
            )
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        self._model = load_classifier(path, dtype=dtype, device=_device(config))
        self._label = config.label

    def sequence(self, messages: Sequence[Mapping[str, str]], media: Sequence[Media], completion: str) -> list[int]:
        if media:
            raise DataError(
                f"a score of {self._label!r} for a conversation with images",
                "sequence classifiers read text only",
                "name the `reward/` of a checkpoint whose model reads images, or its stage",
            )
        prompt = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        encoded = self._tokenizer([prompt, completion], add_special_tokens=False)["input_ids"]
        return [*encoded[0], *encoded[1], self._tokenizer.eos_token_id]

    def score(self, sequence: list[int]) -> float:
        import torch

        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(sequence) > limit:
            raise DataError(
                f"a score of {self._label!r} for a conversation of {len(sequence)} tokens",
                f"the reward model was built for {limit} (max_position_embeddings)",
                "lower engine.sampling.max_new_tokens, leave out the longest tasks, or use another reward model",
            )
        batch = torch.tensor([sequence], device=self._model.device)
        return float(self._model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits[0, 0])


class _Trained:
    """The `reward/` of a checkpoint, with text and images rendered as in its training."""

    def __init__(self, config: ModelReward.Config, path: Path) -> None:
        import torch

        from trivium.models.heads.classifier import load_score_model
        from trivium.models.heads.scoring import SequenceScorer

        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        model = load_score_model(path, dtype=dtype, device=torch.device(_device(config)))
        # A checkpoint has one tokenizer and processor for all its models.
        model_dir = path if (path / "tokenizer_config.json").is_file() else path.parent / "policy"
        self._scorer = SequenceScorer(model, model_dir=model_dir)
        self._renderer: Any = resolve("renderers", "chat")(model_dir)

    def sequence(self, messages: Sequence[Mapping[str, str]], media: Sequence[Media], completion: str) -> Conversation:
        from trivium.models.heads.scoring import Conversation

        prompt, tokens = self._renderer.expert(_with_media(messages, media), completion)
        return Conversation(np.concatenate([prompt.tokens, tokens]), tuple(prompt.media))

    def score(self, sequence: Conversation) -> float:
        return self._scorer.scores([sequence])[0]


def _with_media(messages: Sequence[Mapping[str, str]], media: Sequence[Media]) -> list[Message]:
    """The messages with the media that they mark. Media that no message marks belong to the last user message."""
    marked = [message["content"].count(IMAGE) if media else 0 for message in messages]
    if media and not any(marked):
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        marked[users[-1] if users else -1] = len(media)
    if sum(marked) != len(media):
        raise DataError(
            f"a conversation with {len(media)} images", f"its text marks {sum(marked)}", f"mark each with {IMAGE}"
        )
    remaining = iter(media)
    return [
        Message.of(message, tuple(islice(remaining, number))) for message, number in zip(messages, marked, strict=True)
    ]


def _device(config: ModelReward.Config) -> str:
    import torch  # here: reading a config must not wait for it

    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_trained_here(path: Path) -> bool:
    return (path / "value_head.safetensors").is_file()


def _no_reward_model(path: Path) -> str:
    """Why a directory is no reward model; empty if it is one."""
    return "" if _is_trained_here(path) and (path / "config.json").is_file() else _not_a_classifier(path)


def _not_a_classifier(path: Path) -> str:
    """Why a directory is no classifier, by its config.json alone; empty if it is one."""
    if not (path / "config.json").is_file():
        return "no config.json there" if path.is_dir() else "no such directory"
    architectures = json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures") or ["none"]
    if architectures[0].endswith("ForSequenceClassification"):
        return ""
    return f"a model of the class {architectures[0]}, not one for sequence classification"
