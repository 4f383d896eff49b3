"""The arguments of `ActorVL.generate`, and its sampler over the core's torch engine."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from trivium.concurrency import gather_or_cancel, run_here
from trivium.engines.torch import TorchEngine
from trivium.errors import ConfigError
from trivium.frontdoors.lightrft.placing import media_of_rows
from trivium.models.heads.trained_models import LanguageModel
from trivium.models.vision.encoder import Pixels, Vision
from trivium.randomness import SampleKey
from trivium.training.snapshot import TensorFile
from trivium.types import Completion, Prompt, Request, Sampling

_PIXEL_INPUTS = ("pixel_attention_mask", "image_sizes")
_NO_EFFECT = ("use_cache", "early_stopping", "return_dict_in_generate", "synced_gpus")
_KNOWN = (
    "attention_mask",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_new_tokens",
    "num_beams",
    "pad_token_id",
    "seed",
    "temperature",
    "top_k",
    "top_p",
)


class Policy(Protocol):
    """A policy that a Sampler can sample from."""

    @property
    def language_model(self) -> LanguageModel: ...

    model_dir: Path | None

    def export_weights(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of `generate`."""

    sampling: Sampling
    attention_mask: Tensor
    """(B, P)."""
    eos_token_ids: frozenset[int]
    pad_token_id: int
    seed: int
    pixel_inputs: dict[str, Tensor]

    @classmethod
    def of(cls, given: dict[str, Any], model: PreTrainedModel, input_ids: Tensor, temperature: float) -> Self:
        """Parses keyword arguments. Raises ConfigError for unknown or unsupported ones, and without a token limit."""
        values = {name: value for name, value in given.items() if value is not None}
        unknown = sorted(values.keys() - {*_KNOWN, *_PIXEL_INPUTS, *_NO_EFFECT})
        if unknown or values.get("num_beams", 1) != 1:
            raise ConfigError(
                "generate of ActorVL",
                f"unknown: {', '.join(unknown)}" if unknown else f"num_beams {values['num_beams']}",
                f"known: {', '.join(_KNOWN)}; num_beams 1",
            )
        longest = values.get("max_new_tokens", values.get("max_length", 0) - input_ids.shape[1])
        if longest < 1:
            raise ConfigError("generate of ActorVL", f"{longest} new tokens", "set max_new_tokens to at least 1")
        stops = stops_of(values.get("eos_token_id"), model)
        pad = int(values.get("pad_token_id", min(stops)))
        greedy = not values.get("do_sample", True)
        sampling = Sampling(
            max_new_tokens=longest,
            temperature=0.0 if greedy else float(values.get("temperature", temperature)),
            top_p=float(values.get("top_p", 1.0)),
            top_k=max(0, int(values.get("top_k", 0))),
            min_new_tokens=min(longest, int(values.get("min_new_tokens", 1))),
        )
        mask = values.get("attention_mask")
        if mask is None:  # masks the padding before the first token
            named = "pad_token_id" in values and pad not in stops
            mask = ((input_ids != pad).cumsum(1) > 0).to(input_ids) if named else torch.ones_like(input_ids)
        inputs = {name: values[name] for name in _PIXEL_INPUTS if name in values}
        return cls(sampling, mask, stops, pad, int(values.get("seed", torch.initial_seed())), inputs)

    def prompts(self, input_ids: Tensor, pieces: Sequence[Pixels], vision: Vision | None) -> list[Prompt]:
        """Returns each row without padding, with its images."""
        if pieces and vision is None:
            raise ConfigError("generate from images", "the model reads text only, here", "leave pixel_values out")
        rows = [
            row[mask != 0].cpu().numpy().astype(np.int32)
            for row, mask in zip(input_ids, self.attention_mask, strict=True)
        ]
        media = [()] * len(rows) if vision is None else media_of_rows(vision, rows, pieces)
        return [Prompt(tokens, own) for tokens, own in zip(rows, media, strict=True)]


class Sampler:
    """An engine that samples from the current weights of a policy."""

    def __init__(self) -> None:
        self._engine: TorchEngine | None = None
        self._eos: frozenset[int] = frozenset()
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Sampler:
        return Sampler()

    async def adopt(self, policy: Policy, eos_token_ids: frozenset[int]) -> None:
        """Loads the policy's current weights into the engine."""
        if self._engine is None or self._eos != eos_token_ids:
            await self._close()
            self._engine, self._eos = self._built(policy, eos_token_ids), eos_token_ids
        await self._engine.load(self._calls, list(policy.export_weights()))

    async def completions(self, prompts: Sequence[Prompt], arguments: Arguments, rank: int) -> list[Completion]:
        """Samples one completion per prompt. Every call uses new random numbers of the seed."""
        assert self._engine is not None
        engine = self._engine
        self._calls += 1
        keys = [
            SampleKey(arguments.seed % 2**63, "actor", "generate", str(rank), self._calls, row)
            for row in range(len(prompts))
        ]
        return await gather_or_cancel(
            [
                engine.generate(Request(prompt.tokens, arguments.sampling, key, prompt.media))
                for prompt, key in zip(prompts, keys, strict=True)
            ]
        )

    def close(self) -> None:
        run_here(self._close())

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def _built(self, policy: Policy, eos_token_ids: frozenset[int]) -> TorchEngine:
        core, directory = policy.language_model, policy.model_dir
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="trivium-actor-"))
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
            weights = {name: tensor.cpu().contiguous() for name, tensor in policy.export_weights()}
            # Every rank writes its own copy; `save_pretrained` of a sharded model would not.
            save_file(TensorFile("model", weights, core.module).converted(weights), directory / "model.safetensors")
            core.module.config.save_pretrained(directory)
        config = TorchEngine.Config(
            device="cuda" if core.device.type == "cuda" else "cpu", dtype="bfloat16" if core.autocast else "float32"
        )
        threads = torch.get_num_threads()
        return TorchEngine(
            config, model_dir=directory, eos_token_ids=eos_token_ids, decode=lambda tokens: "", threads=threads
        )


def stops_of(given: int | Sequence[int] | None, model: PreTrainedModel) -> frozenset[int]:
    """Returns the end-of-sequence tokens: those given, else the model's. Raises ConfigError if there are neither."""
    own: Any = getattr(model.generation_config, "eos_token_id", None)
    named: Any = next(
        (each for each in (given, own, model.config.get_text_config().eos_token_id) if each is not None), None
    )
    if named is None:
        raise ConfigError("the end of a completion", "the model names no end of sequence", "give eos_token_id")
    return frozenset([named] if isinstance(named, int) else (int(each) for each in named))
