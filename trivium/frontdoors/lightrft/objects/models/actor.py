"""ActorVL: LightRFT's policy class, over the core's language model and its torch engine.

Legend: B sequences of S tokens, padding included; P tokens of a prompt; A actions, the last A columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trivium.foundation.concurrency import gather_or_cancel, run_here
from trivium.foundation.errors import ConfigError
from trivium.foundation.randomness import SampleKey
from trivium.frontdoors.lightrft.objects.models.generation import Arguments, stops_of
from trivium.frontdoors.lightrft.objects.models.opening import OpenedModel, Options, refuse_videos, sharing
from trivium.frontdoors.lightrft.objects.models.placing import pieces_of
from trivium.frontdoors.lightrft.objects.models.rollout_engine import ActorEngine
from trivium.models.heads.trained_models import LanguageModel
from trivium.training.snapshot import full_weights
from trivium.types import Completion, Prompt, Request


class ActorVL(OpenedModel[LanguageModel]):
    """A policy that reads text and images, or text only.

    `model` is the transformers model. `language_model` is the core's model over the same parameters, which computes
    log-probabilities of packed sequences.
    """

    def __init__(
        self,
        pretrain_or_model: str | Path | nn.Module,
        use_flash_attention_2: bool = False,
        bf16: bool = False,
        load_in_4bit: bool = False,
        lora_rank: int = 0,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: Sequence[str] | str | None = None,
        ds_config: Any = None,
        device_map: Any = None,
        packing_samples: bool = False,
        *,
        temperature: float = 1.0,
        high_entropy_token_ratio: float = 0.0,
        seed: int = 0,
        **further: Any,
    ) -> None:
        """`pretrain_or_model` is a model directory (or an id in the local Hugging Face cache) or a transformers model.

        With `bf16` the backbone computes in bfloat16 from float32 weights. `temperature` divides the logits in
        `forward` and `generate`. `seed` initializes the LoRA adapter. `use_flash_attention_2`, `packing_samples` and
        the switches of log-probability kernels have no effect: sequences are always packed. Raises ConfigError for
        unsupported options (LoRA dropout, DeepSpeed) and unknown ones.
        """
        del use_flash_attention_2
        options = Options(
            bf16, load_in_4bit, lora_rank, lora_alpha, lora_dropout, target_modules, ds_config, device_map, seed
        )
        super().__init__(pretrain_or_model, options, further)
        self.pretrain_or_model = str(pretrain_or_model) if self.model_dir else self.model.config.model_type
        self.packing_samples, self.high_entropy_token_ratio = packing_samples, high_entropy_token_ratio
        self._temperature = temperature
        self._engine: ActorEngine | None = None  # of `generate`
        self._calls = 0

    def build(self) -> LanguageModel:
        """Builds the core's model."""
        return LanguageModel(sharing(self.model), temperature=self.temperature, **self.built_of)

    @property
    def language_model(self) -> LanguageModel:
        """The core's model over the same parameters."""
        return self.core

    @property
    def temperature(self) -> float:
        """The divisor of the logits."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if not value > 0:
            raise ConfigError(f"temperature {value}", "log-probabilities of a greedy policy are 0", "use one above 0")
        self._temperature = value
        for core in self._cores:
            core.set_temperature(value)

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | None = None,
        **pixel_inputs: Tensor,
    ) -> Any:
        """Returns (B, A) log-probabilities of the last A tokens, with gradient; 0 on padding.

        With `return_output`, also returns the output of the transformers model, whose logits are not divided by the
        temperature; without `num_actions`, returns only that output. With `packed_seq_lens`, takes (1, T) concatenated
        sequences and one `num_actions` per sequence, and returns (1, sum of A). `pixel_inputs` are further inputs of
        the vision tower (`pixel_attention_mask`).
        """
        refuse_videos("forward over videos", pixel_values_videos, video_grid_thw)
        pixels = {"pixel_values": pixel_values, "image_grid_thws": image_grid_thw, "pixel_inputs": pixel_inputs}
        if num_actions is None and return_output:
            return self._plain(sequences, attention_mask, pixels)
        if packed_seq_lens is not None:
            if num_actions is None or isinstance(num_actions, int):
                raise ConfigError("packed sequences", "one num_actions for all", "give a list, one for each sequence")
            # Padded on the left, because the last A columns are the actions.
            parts = sequences[0].split([int(length) for length in packed_seq_lens])
            sequences = nn.utils.rnn.pad_sequence([*parts], batch_first=True, padding_side="left")
            attention_mask = nn.utils.rnn.pad_sequence(
                [torch.ones_like(part) for part in parts], batch_first=True, padding_side="left"
            )
            widths = [int(number) for number in num_actions]
            log_probs = self.per_action(sequences, max(widths), attention_mask, pixels)
            whole = torch.cat([row[len(row) - width :] for row, width in zip(log_probs, widths, strict=True)])[None]
            return (whole, self._plain(sequences, attention_mask, pixels)) if return_output else whole
        actions = None if num_actions is None else int(num_actions)  # pyright: ignore[reportArgumentType]
        log_probs = self.per_action(sequences, actions, attention_mask, pixels)
        return (log_probs, self._plain(sequences, attention_mask, pixels)) if return_output else log_probs

    def _plain(self, sequences: Tensor, mask: Tensor | None, pixels: dict[str, Any]) -> Any:
        """Returns the output of the transformers model."""
        if self.ranks.size > 1:
            raise ConfigError("the output of a sharded model", f"{self.ranks.size} ranks", "leave return_output out")
        inputs: dict[str, Any] = {} if pixels["pixel_values"] is None else {"pixel_values": pixels["pixel_values"]}
        if inputs and pixels["image_grid_thws"] is not None:
            inputs["image_grid_thw"] = pixels["image_grid_thws"]
        if inputs and self.vision is not None and self.vision.family.mrope:
            # transformers 5 computes the positions of M-RoPE from it, and refuses images without it.
            inputs["mm_token_type_ids"] = (sequences == self.vision.placeholder).int()
        return self.model(input_ids=sequences, attention_mask=mask, **inputs, **pixels["pixel_inputs"])

    def generate(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples completions from the current weights with the core's torch engine.

        Returns `sequences` (B, P + A) int64, `attention_mask` of the same shape, and `action_mask` (B, A) bool. A
        sampled end-of-sequence token is a trained action; a completion without one keeps its last token.

        `kwargs`: attention_mask, max_new_tokens or max_length, do_sample, temperature, top_p, top_k, min_new_tokens,
        eos_token_id, pad_token_id, seed, and further pixel tensors. Raises ConfigError for others. If the model is
        sharded, all ranks must call it.
        """
        refuse_videos("generate from videos", pixel_values_videos, video_grid_thw)
        arguments = Arguments.of(kwargs, self.model, input_ids, self.temperature)
        pieces = [] if pixel_values is None else pieces_of(pixel_values, image_grid_thw, arguments.pixel_inputs)
        prompts = arguments.prompts(input_ids, pieces, self.vision)
        completions = run_here(self._completions(prompts, arguments))
        width = max(len(completion.tokens) for completion in completions)
        before, shape = input_ids.shape[1], (len(prompts), input_ids.shape[1] + width)
        sequences = input_ids.new_full(shape, arguments.pad_token_id)
        attention = torch.zeros_like(sequences)
        sequences[:, :before] = input_ids
        attention[:, :before] = arguments.attention_mask
        for row, completion in enumerate(completions):
            here = slice(before, before + len(completion.tokens))
            sequences[row, here] = torch.from_numpy(completion.tokens.astype(np.int64)).to(sequences.device)
            attention[row, here] = 1
        return sequences, attention, attention[:, before:].bool()

    async def _completions(self, prompts: list[Prompt], arguments: Arguments) -> list[Completion]:
        """Samples one completion per prompt. Every call uses new random numbers of the seed."""
        # An engine has the tokens that end a completion from its construction.
        if self._engine is None or self._engine.eos_token_ids != arguments.eos_token_ids:
            self.close()
            self._engine = ActorEngine(self, arguments.eos_token_ids)
        engine, self._calls = await self._engine.loaded(), self._calls + 1
        # torch's initial seed may have 64 bits, an address has signed integers.
        address = (arguments.seed % 2**63, "actor", "generate", str(self.ranks.rank), self._calls)
        requests = [
            Request(prompt.tokens, arguments.sampling, SampleKey(*address, row), prompt.media)
            for row, prompt in enumerate(prompts)
        ]
        return await gather_or_cancel([engine.generate(request) for request in requests])

    def process_sequences(
        self, sequences: Tensor, input_len: int, eos_token_id: int | Sequence[int], pad_token_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the (B, S) sequences, their attention mask, and the (B, S - P) mask of their actions.

        A completion ends with the first end-of-sequence token after its last other token. Without one, it keeps its
        last token.
        """
        ends = stops_of(eos_token_id, self.model)
        stop = torch.isin(sequences, torch.tensor(sorted(ends), device=sequences.device))
        real = ~stop & (sequences != pad_token_id)
        place = torch.arange(sequences.shape[1], device=sequences.device)
        # A completion that was cut keeps its last token; LightRFT overwrites it with the end of the sequence.
        response = place >= input_len
        last = torch.where(real & response, place, input_len - 1).amax(1, keepdim=True)
        ended = stop.gather(1, (last + 1).clamp(max=sequences.shape[1] - 1)) & (last + 1 < sequences.shape[1])
        first = torch.where(sequences != pad_token_id, place, sequences.shape[1]).amin(1, keepdim=True)
        attention = ((place >= first) & (place <= last + ended.long())).long()
        return sequences, attention, attention[:, input_len:].bool()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the unsharded parameters and persistent buffers by Hugging Face name, with the adapter merged. If the
        model is sharded, all ranks must iterate to the end."""
        return full_weights(self.language_model)

    def print_trainable_parameters(self) -> str:
        """Returns the number of trainable parameters and the total, as text."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self.model.parameters()]
        return f"{sum(n for n, trained in sizes if trained):,} of {sum(n for n, _ in sizes):,} parameters are trained"

    def close(self) -> None:
        """Closes the engine of `generate`."""
        if self._engine is not None:
            self._engine.close()


ActorLanguage = ActorVL
"""ActorVL also loads text-only models."""
