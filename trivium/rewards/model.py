"""The reward that a reward model gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trivium.config import RewardConfig, RunConfig
from trivium.errors import DataError, Problem
from trivium.models.hub import ModelPath


class ModelReward:
    """The score of a reward model for the conversation: the task's prompt and the text of the last turn.

    The completion ends with the tokenizer's end of sequence, whose score counts. One sequence is scored at a time, so a
    score does not depend on what else is scored.
    """

    class Config(RewardConfig):
        kind: str = "model"
        path: ModelPath
        """Directory of a model that `AutoModelForSequenceClassification` loads, and its tokenizer: what `trivium export
        --role reward` writes."""
        heads: dict[str, float] | None = None
        """Which heads of a reward model with several are the reward, and the weight of each: `{preference: 1.0}`."""
        device: str = "auto"
        """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""
        dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        """Type of the weights; `auto` is the one they were saved in."""
        threads: int = Field(default=1, ge=1)
        """CPU threads of a call."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            reason = _not_a_classifier(Path(self.path))
            if reason:
                yield Problem(
                    f"{where}.path",
                    f"the reward model {self.path}",
                    reason,
                    "name what `trivium export RUN OUT --role reward` wrote, or another directory that transformers' "
                    "AutoModelForSequenceClassification loads",
                )

    def __init__(self, config: Config) -> None:
        """Raises DataError for a directory without a reward model or without a chat template."""
        import torch  # here: reading a config must not wait for it
        from transformers import AutoTokenizer

        from trivium.models.classifier import head_names_of, head_weights, load_classifier

        path = Path(config.path)
        if reason := _not_a_classifier(path):
            raise DataError(f"the reward model {path}", reason, "name what `trivium export --role reward` wrote")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if self._tokenizer.chat_template is None or self._tokenizer.eos_token_id is None:
            raise DataError(
                f"conversations for the reward model {path}",
                "its tokenizer has no chat template, or no end of sequence",
                "save chat_template.jinja and eos_token in the directory",
            )
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_classifier(path, dtype=config.dtype, device=device)
        self._weights = head_weights(head_names_of(self._model), config.heads, path)
        self._threads, self._label = config.threads, config.label
        self._lock = threading.Lock()

    def __call__(self, prompt: str, completion: str, prompt_messages: Sequence[Mapping[str, str]]) -> float:
        import torch

        tokens = self.tokens(prompt_messages, completion)
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(tokens) > limit:
            raise DataError(
                f"a score of {self._label!r} for a conversation of {len(tokens)} tokens",
                f"the reward model was built for {limit} (max_position_embeddings)",
                "lower engine.sampling.max_new_tokens, leave out the longest tasks, or use another reward model",
            )
        with self._lock, torch.no_grad():  # calls in several threads would compete for the same cores
            torch.set_num_threads(self._threads)
            batch = torch.tensor([tokens], device=self._model.device)
            logits = self._model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits[0]
            return float(logits @ logits.new_tensor(self._weights))

    def tokens(self, messages: Sequence[Mapping[str, str]], completion: str) -> list[int]:
        """The conversation as the reward model was trained on it: prompt, completion, end of sequence."""
        prompt = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        encoded = self._tokenizer([prompt, completion], add_special_tokens=False)["input_ids"]
        return [*encoded[0], *encoded[1], self._tokenizer.eos_token_id]


def _not_a_classifier(path: Path) -> str:
    """What is wrong with a directory, by its config.json alone; empty where it says that it is a classifier."""
    if not (path / "config.json").is_file():
        return "no config.json there" if path.is_dir() else "no such directory"
    architectures = json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures") or ["none"]
    if architectures[0].endswith("ForSequenceClassification"):
        return ""
    return f"a model of the class {architectures[0]}, not one for sequence classification"
