"""A backbone with a head: what a policy says about tokens (log-probability, entropy, ...), what a critic says (value),
what a reward model says (score).

Policy and critic speak about token t from the hidden state of token t - 1; that shift happens in `_before` and nowhere
else. A reward model judges what is there, token t included.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from trivium.errors import TriviumError
from trivium.models.linear import use_onednn
from trivium.models.load import load_backbone, load_lm
from trivium.models.log_prob_head import likeliest, log_prob_and_entropy, mean_discriminant, sum_pi_squared
from trivium.models.packed import Backbone, Pack, probe_pack
from trivium.randomness import stream

_VALUE_HEAD_FILE = "value_head.safetensors"


def _before(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(N, H): the state from which each of the tokens `rows` is predicted. The one shift there is."""
    return hidden.index_select(0, rows - 1)


class LanguageModel:
    """A causal language model from a Hugging Face directory, always in eval mode: log-probabilities without logits."""

    def __init__(
        self, path: Path, *, dtype: torch.dtype, device: torch.device, temperature: float, autocast: bool = False
    ) -> None:
        self.module: PreTrainedModel = load_lm(path, dtype=dtype, device=device, attention=None)
        output = self.module.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise _refusal(self.module, f"its output layer is {type(output).__name__}")
        self.weight, self.bias = output.weight, output.bias
        self.temperature = temperature / _logit_scale(self.module)
        self.autocast = False
        if not autocast:
            use_onednn(self.module)
        expected = self._by_logits(probe_pack(self.module), temperature)
        self.backbone = Backbone(cast(PreTrainedModel, self.module.base_model))
        self._check_head(expected)
        self.autocast = autocast

    @property
    def vocabulary(self) -> int:
        """How many tokens it tells apart."""
        return len(self.weight)

    def __call__(
        self, batch: Pack, rows: torch.Tensor, *, entropy_grad: bool = False, candidates: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_prob, entropy), each (N,), of the tokens at `rows` of the pack; never the first of a sequence.

        With `candidates`, (N, K) further token ids for each, `log_prob` is (N, 1 + K).
        """
        targets = batch.tokens[rows]
        if candidates is not None:
            targets = torch.cat([targets[:, None], candidates], 1)
        return log_prob_and_entropy(
            self._states(batch, rows), self.weight, self.bias, targets,
            temperature=self.temperature, entropy_grad=entropy_grad,
        )  # fmt: skip

    def sum_pi_squared(self, batch: Pack, rows: torch.Tensor) -> torch.Tensor:
        """(N,) without gradient: the sum over the vocabulary of p^2, of the distribution each token is drawn from."""
        return sum_pi_squared(self._states(batch, rows), self.weight, self.bias, temperature=self.temperature)

    def mean_discriminant(self, batch: Pack, rows: torch.Tensor) -> torch.Tensor:
        """(N,) without gradient: the expectation of p (H + log p) under the distribution each token is drawn from."""
        return mean_discriminant(self._states(batch, rows), self.weight, self.bias, temperature=self.temperature)

    def likeliest(self, batch: Pack, rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, log_prob), each (N, k), without gradient: what the model would rather have said at `rows`."""
        return likeliest(self._states(batch, rows), self.weight, self.bias, k, temperature=self.temperature)

    def _states(self, batch: Pack, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.weight.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.backbone(batch)
        return _before(hidden, rows)

    def save(self, directory: Path) -> None:
        """A plain Hugging Face model directory, in the precision the weights are held in."""
        self.module.save_pretrained(directory)

    @torch.no_grad()
    def _by_logits(self, batch: Pack, temperature: float) -> torch.Tensor:
        """(N,) log-probabilities of all but first tokens, by the model's own forward pass."""
        log_probs: list[torch.Tensor] = []
        for tokens in batch.tokens.split(list(batch.lengths)):
            logits = self.module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            log_probs.append((logits / temperature).log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1))
        return torch.cat(log_probs)

    @torch.no_grad()
    def _check_head(self, expected: torch.Tensor) -> None:
        """Models differ in what they do between hidden state and logits; one that does more is refused, not guessed."""
        batch = probe_pack(self.module)
        found, _ = self(batch, batch.positions.nonzero().squeeze(1))
        difference = float((found - expected).abs().max())
        if difference > 1e-3:
            raise _refusal(self.module, f"its own log-probabilities differ by {difference:.3g} from the chunked head's")


def _logit_scale(module: PreTrainedModel) -> float:
    """The constant that Granite divides and Cohere multiplies its logits by; soft-capping is refused.

    The probe alone would let soft-capping pass where the logits happen to be small.
    """
    config = module.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        raise _refusal(module, f"final_logit_softcapping is {config.final_logit_softcapping}")
    return float(getattr(config, "logit_scale", 1.0) or 1.0) / float(getattr(config, "logits_scaling", 1.0) or 1.0)


def _refusal(module: PreTrainedModel, found: str) -> TriviumError:
    return TriviumError(
        f"log-probabilities of {type(module).__name__}",
        found,
        "use a model whose logits are one linear layer of the last hidden state (no soft-capping)",
    )


class ValueModel(nn.Module):
    """A backbone with one number per token: the value of the state before it.

    Started from a policy's directory, its head is drawn from N(0, (0.01 / sqrt(width))^2), so that the first values
    are near zero and the backbone learns from the first step.
    """

    def __init__(
        self, path: Path, *, dtype: torch.dtype, device: torch.device, seed: int, autocast: bool = False
    ) -> None:
        super().__init__()
        self.module: PreTrainedModel = load_backbone(path, dtype=dtype, device=device)
        self.autocast = autocast
        if not autocast:
            use_onednn(self.module)
        self.backbone = Backbone(self.module)
        with torch.no_grad():
            width = self.backbone(probe_pack(self.module)).shape[1]
        self.value_head = nn.Linear(width, 1, dtype=dtype)
        saved = path / _VALUE_HEAD_FILE
        if saved.is_file():
            self.value_head.load_state_dict(safetensors.torch.load_file(saved))
        else:
            generator = torch.Generator().manual_seed(stream(seed, "value_head"))
            nn.init.normal_(self.value_head.weight, std=0.01 / width**0.5, generator=generator)
            nn.init.zeros_(self.value_head.bias)
        self.value_head.to(device)
        self.eval()

    def forward(self, batch: Pack, rows: torch.Tensor) -> torch.Tensor:
        """(N,) values of the states before the tokens at `rows` of the pack."""
        with torch.autocast(self.value_head.weight.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.backbone(batch)
        return self.value_head(self._judged(hidden, rows).to(self.value_head.weight.dtype)).squeeze(1)

    def _judged(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return _before(hidden, rows)

    def save(self, directory: Path) -> None:
        """A plain Hugging Face directory of the backbone, with the head in a file beside it."""
        self.module.save_pretrained(directory)
        safetensors.torch.save_file(self.value_head.state_dict(), directory / _VALUE_HEAD_FILE)


class ScoreModel(ValueModel):
    """A backbone with one number per token for all that was said up to and including it: a reward model.

    Saved as a value model is, so that a critic can start from it.
    """

    def _judged(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return hidden.index_select(0, rows)
