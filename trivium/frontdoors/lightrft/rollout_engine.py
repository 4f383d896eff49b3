"""Samples completions with the core's engine and explorer from the trainer's current weights."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trivium.concurrency import run_here
from trivium.config.sections import SamplingConfig
from trivium.engines.torch import TorchEngine
from trivium.errors import ConfigError
from trivium.explorer import Explorer, check_failures
from trivium.frontdoors.lightrft.arguments import MAX_NEW_TOKENS
from trivium.frontdoors.lightrft.loaded_prompts import PromptBatch, PromptRenderer, task_of
from trivium.models.placement import narrowed
from trivium.models.vision.images import Images, images_of
from trivium.randomness import SampleKey
from trivium.types import Group, Sampling, Task, Trajectory
from trivium.workflows.single_turn import SingleTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def sampling_of(given: Mapping[str, Any], prompt_max_len: int) -> Sampling:
    """Returns the sampling settings of training completions. Raises ConfigError for invalid values.

    If sampling is restricted to a part of the vocabulary (top_p, top_k, ...), the engine records the candidate tokens,
    and log-probabilities are computed over them.
    """
    limit = given.get("max_new_tokens")
    if limit is None and given.get("max_length") is not None:
        limit = int(given["max_length"]) - prompt_max_len
    limit = MAX_NEW_TOKENS if limit is None else int(limit)
    temperature = float(given.get("temperature", 1.0)) if given.get("do_sample", True) else 0.0
    top_p, top_k = float(given.get("top_p", 1.0)), max(0, int(given.get("top_k") or 0))
    least, stop = int(given.get("min_new_tokens") or 0), given.get("stop") or ()
    if limit < 1 or temperature < 0 or not 0 < top_p <= 1 or not 0 <= least <= limit:
        raise ConfigError(
            "how completions are sampled",
            f"max_new_tokens {limit}, min_new_tokens {least}, temperature {temperature}, top_p {top_p}",
            "use at least 1 token, min_new_tokens of at most that, a temperature of at least 0, and top_p above 0 and "
            "at most 1",
        )
    config = SamplingConfig(
        max_new_tokens=limit,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_new_tokens=least,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
    return replace(config.sampling(), extra=("kept",) if config.changes_distribution() else ())


class _NoJudge:
    """Gives no rewards. The experience maker computes them for the whole rollout."""

    async def score(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        return {}

    async def compare(self, task: Task, trajectories: Sequence[Trajectory]) -> Sequence[Mapping[str, float]]:
        return [{}] * len(trajectories)


class Rollouts:
    """Samples from the actor with an engine in this process."""

    def __init__(
        self,
        model_dir: Path | None,
        save_model: Callable[[Path], None],
        weights: Weights,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_max_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        device: torch.device,
        bfloat16: bool,
        deadline_s: float,
        max_failed_fraction: float,
        max_concurrent: int,
    ) -> None:
        """`model_dir` is the actor's model directory. If it is None, `save_model` writes the actor to a temporary
        directory. `weights` yields the current weights, gathered by all ranks. At most `max_concurrent` completions
        are sampled at a time."""
        self._own_dir = Path(tempfile.mkdtemp(prefix="trivium-actor-")) if model_dir is None else None
        if self._own_dir is not None:
            save_model(self._own_dir)
        self._model_dir = model_dir or self._own_dir
        assert self._model_dir is not None
        self.images: Images | None = images_of(self._model_dir)
        self._weights, self._seed = weights, seed
        self._deadline_s, self._max_failed_fraction = deadline_s, max_failed_fraction
        self._max_concurrent = max_concurrent
        self._renderer = PromptRenderer(tokenizer, self.images, prompt_max_len)
        self._eos = self._renderer.eos_token_ids | eos_token_ids
        cuda = device.type == "cuda"
        self._config = TorchEngine.Config(
            device="cuda" if cuda else "cpu", dtype="bfloat16" if bfloat16 and cuda else "float32"
        )
        self._engine: TorchEngine | None = None

    def decode(self, tokens: Any) -> str:
        """Decodes tokens to text without special tokens."""
        return self._renderer.decode(tokens)

    def groups(
        self, batch: PromptBatch, names: Sequence[str], *, purpose: str, version: int, samples: int, sampling: Sampling
    ) -> list[Group]:
        """Samples `samples` completions of each prompt with the weights of `version`.

        A prompt's name seeds its sampling. Raises RolloutsFailing if too many rollouts fail. All ranks must call it,
        because it gathers weights.
        """
        return run_here(self._groups(batch, names, purpose, version, samples, sampling))

    async def _groups(
        self, batch: PromptBatch, names: Sequence[str], purpose: str, version: int, samples: int, sampling: Sampling
    ) -> list[Group]:
        engine = await self._loaded(version)
        explorer = Explorer(
            engine,
            self._renderer,
            SingleTurn(SingleTurn.Config()),
            _NoJudge(),
            sampling,
            engine.max_context,
            self._deadline_s,
            self._max_concurrent,
            must_judge=False,
        )
        tasks = [task_of(batch, row, name, self.images) for row, name in enumerate(names)]
        groups = await asyncio.gather(
            *(
                explorer.rollout(
                    task,
                    [SampleKey(self._seed, purpose, task.taskset, task.task_id, 0, index) for index in range(samples)],
                    slot=number,
                )
                for number, task in enumerate(tasks)
            )
        )
        check_failures(groups, self._max_failed_fraction, "a rollout")
        return list(groups)

    def adopt(self, version: int) -> None:
        """Loads the weights of this version into the engine. All ranks must call it."""
        run_here(self._loaded(version))

    async def _loaded(self, version: int) -> TorchEngine:
        """Returns the engine with the weights of this version."""
        if self._engine is None:
            assert self._model_dir is not None
            self._engine = TorchEngine(
                self._config,
                model_dir=self._model_dir,
                eos_token_ids=self._eos,
                decode=self._renderer.decode,
                threads=torch.get_num_threads(),
            )
        elif self._engine.version == version:
            return self._engine
        # Gathers the tensors one by one and narrows each to the engine's dtype, because the engine loads them together.
        weights = [(name, narrowed(tensor, self._engine.config.dtype)) for name, tensor in self._weights()]
        await self._engine.load(version, weights)
        return self._engine

    def close(self) -> None:
        """Closes the engine and deletes its temporary directory."""
        engine, self._engine = self._engine, None
        if engine is not None:
            run_here(engine.close())
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)
