"""Samples completions with the core's engine and explorer from the trainer's current weights."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file

from trivium.config.sections import SamplingConfig
from trivium.engines.torch.engine import TorchEngine
from trivium.explorer import Explorer, RolloutLimits, check_failures
from trivium.foundation.concurrency import run_here
from trivium.foundation.errors import ConfigError
from trivium.foundation.randomness import SampleKey
from trivium.frontdoors.lightrft.arguments import MAX_NEW_TOKENS
from trivium.frontdoors.lightrft.objects.loaded_prompts import PromptBatch, PromptRenderer, task_of
from trivium.models.heads.trained_models import LanguageModel
from trivium.models.placement import narrowed
from trivium.models.vision.images import Images, images_of
from trivium.training.snapshot import TensorFile
from trivium.types import Group, Sampling, Task, Trajectory
from trivium.workflows.single_turn import SingleTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sampling_of(arguments: Mapping[str, Any], prompt_max_len: int) -> Sampling:
    """Returns the sampling settings of training completions. Raises ConfigError for invalid values.

    If sampling is restricted to a part of the vocabulary (top_p, top_k, ...), the engine records the candidate tokens,
    and log-probabilities are computed over them.
    """
    limit = arguments.get("max_new_tokens")
    if limit is None and arguments.get("max_length") is not None:
        limit = int(arguments["max_length"]) - prompt_max_len
    limit = MAX_NEW_TOKENS if limit is None else int(limit)
    temperature = float(arguments.get("temperature", 1.0)) if arguments.get("do_sample", True) else 0.0
    top_p, top_k = float(arguments.get("top_p", 1.0)), max(0, int(arguments.get("top_k") or 0))
    least, stop = int(arguments.get("min_new_tokens") or 0), arguments.get("stop") or ()
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


class SampledPolicy(Protocol):
    """A policy that an engine samples from."""

    @property
    def language_model(self) -> LanguageModel: ...

    model_dir: Path | None

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class ActorEngine:
    """A torch engine in this process with the weights of a policy. Every rank has its own."""

    def __init__(
        self,
        policy: SampledPolicy,
        eos_token_ids: frozenset[int],
        decode: Callable[[Any], str] = lambda tokens: "",
        files: Any = None,
    ) -> None:
        """A policy without a directory is saved to a temporary one, with `files`: its processor or tokenizer."""
        self._policy, self.eos_token_ids, self._decode = policy, eos_token_ids, decode
        self.model_dir = policy.model_dir or self._saved(files)
        self._engine: TorchEngine | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the policy opens an engine of its own."""

    def _saved(self, files: Any) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="trivium-actor-"))
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        core = self._policy.language_model
        weights = {name: tensor.cpu().contiguous() for name, tensor in self._policy.export_weights()}
        # Every rank writes its own copy; `save_pretrained` of a sharded model would not.
        save_file(TensorFile("model", weights, core.module).converted(weights), directory / "model.safetensors")
        core.module.config.save_pretrained(directory)
        if files is not None:
            files.save_pretrained(directory)
        return directory

    async def loaded(self, version: int | None = None) -> TorchEngine:
        """Returns the engine with the current weights, which it loads unless it holds them as this `version`. All ranks
        must call it, because it gathers weights."""
        if self._engine is None:
            core = self._policy.language_model
            cuda = core.device.type == "cuda"
            config = TorchEngine.Config(
                device="cuda" if cuda else "cpu", dtype="bfloat16" if core.autocast and cuda else "float32"
            )
            threads = torch.get_num_threads()
            where: dict[str, Any] = {"model_dir": self.model_dir, "eos_token_ids": self.eos_token_ids}
            self._engine = TorchEngine(config, **where, decode=self._decode, threads=threads)
        elif self._engine.version == version:
            return self._engine
        # Gathers the tensors one by one and narrows each to the engine's dtype, because the engine loads them together.
        dtype = self._engine.config.dtype
        weights = [(name, narrowed(tensor, dtype)) for name, tensor in self._policy.export_weights()]
        await self._engine.load(self._engine.version + 1 if version is None else version, weights)
        return self._engine

    def close(self) -> None:
        """Closes the engine. `loaded` opens it again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            run_here(engine.close())


class Rollouts:
    """Samples completions of prompts from the actor's weights."""

    def __init__(
        self,
        policy: SampledPolicy,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any,
        *,
        prompt_max_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        limits: RolloutLimits,
    ) -> None:
        self._seed, self._limits = seed, limits
        # The renderer needs the images of the engine's directory, and the engine decodes with the renderer: it reads
        # the attribute when it decodes.
        self._engine = ActorEngine(policy, eos_token_ids, lambda tokens: self._renderer.decode(tokens), processor)
        self.images: Images | None = images_of(self._engine.model_dir)
        self._renderer = PromptRenderer(tokenizer, self.images, prompt_max_len)
        self._engine.eos_token_ids |= self._renderer.eos_token_ids

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
        engine = await self._engine.loaded(version)
        explorer = Explorer(
            engine,
            self._renderer,
            SingleTurn(SingleTurn.Config()),
            _NoJudge(),
            sampling,
            self._limits,
            # Rewards follow for all completions of the rollout at once, so that a reward model is called with full
            # batches.
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
        check_failures(groups, self._limits.max_failed_fraction, "a rollout")
        return list(groups)

    def adopt(self, version: int) -> None:
        """Loads the weights of this version into the engine. All ranks must call it."""
        run_here(self._engine.loaded(version))

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()
