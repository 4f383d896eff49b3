"""The scorers of `trivium serve-reward`: the rewards of a config, or one reward model, which scores in batches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trivium.concurrency import Threads, gather_or_cancel
from trivium.config import RewardConfig
from trivium.errors import ConfigError, DataError, RewardError, RolloutError
from trivium.rewards.judge import Judge, make_judge
from trivium.rewards.model import ModelReward
from trivium.rewards.recipe import Recipe
from trivium.rewards.remote_forms import RemoteScore, Scored
from trivium.serving.reward_requests import WantedReward
from trivium.types import Message, StopReason, Trajectory, Turn

_QUESTION = (Message("user", ""),)
_NO_TOKENS, _NO_NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class JudgeScorer:
    """The weighted sum of a config's rewards, as in a run. The components are metrics."""

    whole = False

    def __init__(self, configs: Sequence[RewardConfig], deadline_s: float) -> None:
        """Raises ConfigError for rewards that compare the members of a group: a request contains no groups."""
        self._judge: Judge = make_judge(configs, deadline_s)
        self.name = " + ".join(self._judge.labels)
        if comparing := self._judge.comparing:
            raise ConfigError(
                "rewards of single completions",
                f"{', '.join(comparing)} compares the completions of a group",
                "use it in the run's own config",
            )

    def lacking(self, columns: Mapping[str, Any]) -> str:
        """A text about the columns that the rewards need beside these; empty: none."""
        return self._judge.lacking(columns)

    async def __call__(self, batch: list[WantedReward]) -> list[Scored]:
        return await gather_or_cancel(self._one(wanted) for wanted in batch)

    async def _one(self, wanted: WantedReward) -> Scored:
        turn = Turn(_NO_TOKENS, _NO_TOKENS, _NO_NUMBERS, _NO_TOKENS, StopReason.EOS, wanted.completion)
        try:
            scores = await self._judge.score(wanted.task, Trajectory(0, (turn,)))
        except RolloutError as error:  # too many abandoned calls: there is no thread for this one
            return str(error)
        return str(scores) if isinstance(scores, RewardError) else RemoteScore(sum(scores.values()), scores)


class ModelScorer:
    """The score of a reward model at the last token. A batch has up to `batch_tokens` tokens.

    A query must be in the model's own chat template; its padding is removed. Messages are rendered. Both get the end of
    turn of the completions that the model was trained on.
    """

    whole = True

    def __init__(self, config: ModelReward.Config, batch_tokens: int) -> None:
        """Raises DataError for a directory without a reward model, or without a chat template."""
        import torch

        from trivium.models.heads.classifier import load_score_model
        from trivium.models.heads.scoring import SequenceScorer
        from trivium.models.heads.value_head import VALUE_HEAD
        from trivium.text import hf_tokenizer
        from trivium.text.renderer import renderer_of

        if config.path is None:
            do = "name the directory that the stage has written"
            raise DataError(
                f"serve the reward model of the stage {config.stage!r}", "only the run of the stage can use it", do
            )
        path, has_gpu = Path(config.path), torch.cuda.is_available()
        trained = (path / f"{VALUE_HEAD}.safetensors").is_file()  # else a classifier of transformers
        device = config.device if config.device != "auto" else "cuda" if has_gpu else "cpu"
        dtype = _dtype(path, config.dtype, trained=trained)
        model = load_score_model(path, dtype=dtype, device=torch.device(device), heads=config.heads)
        # A checkpoint has one tokenizer and processor for all its models.
        model_dir = path if (path / "tokenizer_config.json").is_file() else path.parent / "policy"
        self.name, self._weight = config.label, config.weight
        self._scorer = SequenceScorer(model.eval(), model_dir=model_dir, max_tokens=batch_tokens)
        self._renderer = renderer_of(str(model_dir))
        tokenizer: Any = hf_tokenizer(model_dir)
        # A model of ours was trained with the renderer's end of turn, another one with its tokenizer's.
        self._end = int(self._renderer.expert(_QUESTION, "")[1][-1]) if trained else tokenizer.eos_token_id
        if self._end is None:
            raise DataError(
                f"the reward model {path}", "its tokenizer has no end-of-sequence token", "save an eos_token"
            )
        end = str(tokenizer.convert_ids_to_tokens(self._end))
        pad = re.escape(str(tokenizer.pad_token or end))
        self._padding = re.compile(f"^(?:{pad})+|(?:{pad}|{re.escape(end)})+$")
        self._threads = Threads(1, "a reward model")

    def lacking(self, columns: Mapping[str, Any]) -> str:
        """Empty: a reward model needs no columns."""
        del columns
        return ""

    async def __call__(self, batch: list[WantedReward]) -> list[Scored]:
        return await self._threads.run(lambda: self._scored(batch))

    def _scored(self, batch: Sequence[WantedReward]) -> list[Scored]:
        """The score of each sample, or a text why it has none (too long, an image that cannot be read)."""
        results: list[Scored] = []
        try:
            sequences = [self._conversation(wanted) for wanted in batch]
            for score in self._scorer.scores(sequences):
                results.append(RemoteScore(score * self._weight))
        except DataError as error:
            if len(batch) == 1:
                return [str(error)]
            return [result for wanted in batch for result in self._scored([wanted])]
        return results

    def _conversation(self, wanted: WantedReward) -> Any:
        from trivium.models.heads.scoring import Conversation

        if wanted.query is None:
            prompt = self._renderer.render(wanted.task.prompt)
            completion = self._renderer.read(wanted.completion)
            whole = prompt.then(completion)
        else:
            media = [item for message in wanted.task.prompt for item in message.media]
            whole = self._renderer.read(self._padding.sub("", wanted.query), media)
        return Conversation(np.append(whole.tokens, np.int32(self._end)), whole.media)


def _dtype(path: Path, name: str, *, trained: bool) -> Any:
    import torch
    from transformers import AutoConfig

    if name == "auto" and trained:
        return torch.float32
    if name == "auto":
        return AutoConfig.from_pretrained(path, local_files_only=True).dtype or torch.float32
    return getattr(torch, name)


Scorer = JudgeScorer | ModelScorer


def scorer_of(configs: Sequence[RewardConfig], deadline_s: float, batch_tokens: int) -> Scorer:
    """The scorer of these rewards. Raises ConfigError for a reward model beside other rewards: a reward model reads
    whole queries, and the others read what follows the prompt."""
    if len(configs) == 1 and isinstance(configs[0], ModelReward.Config):
        return ModelScorer(configs[0], batch_tokens)
    inner = [each for config in configs if isinstance(config, Recipe.Config) for each in config.components]
    if models := [config for config in (*configs, *inner) if isinstance(config, ModelReward.Config)]:
        found = f"{models[0].label} beside others"
        raise ConfigError("one reward model, or rewards without any", found, "serve the reward model alone")
    return JudgeScorer(configs, deadline_s)
