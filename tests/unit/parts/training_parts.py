"""Small models, batches and objectives that the tests of models and training share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from trivium.models.heads.loss import LossDenominators, LossInputs, LossOutputs
from trivium.protocols import CutAnywhere
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch, Experience, Teacher

torch.set_num_threads(1)  # models this small are slower on more

VOCABULARY = 31
SIZE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3": Qwen3Config(**SIZE, head_dim=4, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZE),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64),
    "mistral": MistralConfig(**SIZE, sliding_window=5),
    "bloom": BloomConfig(hidden_size=16, n_layer=2, n_head=4, vocab_size=VOCABULARY),
}


def write_model(directory: Path, name: str = "qwen3", seed: int = 0, scale: float = 8.0, **changes: Any) -> Path:
    """A random model whose weights are large enough for its predictions to differ from uniform."""
    config = MODELS[name].__class__(**{**MODELS[name].to_dict(), **changes})
    random_model(config, seed=seed, scale=scale).save_pretrained(directory)
    return directory


def random_model(config: PreTrainedConfig, *, seed: int, scale: float) -> PreTrainedModel:
    """A language model whose random matrices are multiplied by `scale`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def make_batch(lengths=(9, 21, 5, 14, 7, 18), seed=0, masked=(), **columns: float) -> Batch:
    """Random sequences in groups of two; `columns` are filled with noise around the value given."""
    rng = np.random.default_rng(seed)
    experiences = []
    for row, length in enumerate(lengths):
        mask = rng.random(length) < 0.6
        mask[: min(2, length)] = False
        mask[-1] = length > 1
        mask &= row not in masked
        experiences.append(
            Experience(
                tokens=rng.integers(3, VOCABULARY, length),
                response_mask=mask,
                rollout_log_prob=np.where(mask, -1.0, 0.0),
                policy_version=np.where(mask, 0, -1),
                group_id=f"g{row // 2}",
                index=row % 2,
            )
        )
    noise = {name: [mean + rng.normal(size=n) for n in lengths] for name, mean in columns.items()}
    return Batch(tuple(experiences)).with_columns(**noise)


@dataclass(frozen=True)
class Reinforce(CutAnywhere):
    """Advantage-weighted log-probability, averaged over tokens, with an entropy bonus."""

    role: str = "policy"
    unit: str = "sequence"
    head: str = "lm"
    needs: frozenset[str] = frozenset({"advantages"})
    on_policy: str = "plain"
    entropy_coef: float = 0.0
    factor: float = 1.0

    def loss(self, inputs: LossInputs, totals: LossDenominators) -> LossOutputs:
        assert inputs.log_prob is not None
        assert inputs.entropy is not None
        gain = inputs.columns["advantages"] * inputs.log_prob + self.entropy_coef * inputs.entropy
        lag = inputs.log_prob.detach() - inputs.columns["rollout_log_prob"]
        return LossOutputs(
            -self.factor * (gain * inputs.response_mask).sum() / totals.tokens,
            sums={"train/advantage_mean": (inputs.columns["advantages"] * inputs.response_mask).sum()},
            maxima={"mismatch/log_prob_max": (lag * inputs.response_mask).abs().max()},
        )


@dataclass(frozen=True)
class SquaredError(CutAnywhere):
    """Squared error of the values, averaged over sequences."""

    role: str = "critic"
    unit: str = "group"
    head: str = "value"
    needs: frozenset[str] = frozenset({"returns"})
    on_policy: str = "none: a regression"

    def loss(self, inputs: LossInputs, totals: LossDenominators) -> LossOutputs:
        assert inputs.values is not None
        error = (inputs.values - inputs.columns["returns"]) ** 2 * inputs.response_mask
        return LossOutputs((error.sum(1) / inputs.response_mask.sum(1).clamp(min=1)).sum() / totals.sequences)


@dataclass(frozen=True)
class Parts:
    """What an engine asks of an algorithm."""

    objectives: tuple[Any, ...] = (Reinforce(),)
    needs: frozenset[str] = field(default_factory=frozenset[str])
    name: str = "parts"
    teacher: Teacher | None = None

    def objectives_at(self, version: int) -> tuple[Any, ...]:
        return self.objectives


def make_engine(
    model_dir: Path,
    algorithm: Any = None,
    *,
    total_steps=10,
    seed=0,
    threads=1,
    temperature=0.8,
    max_response_length=32,
    first_version=0,
    **config,
):
    config = {"device": "cpu", "optimizer": {"lr": 1e-2}, **config}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config(**config),
        model_dir=model_dir,
        algorithm=algorithm or Parts(),
        temperature=temperature,
        max_response_length=max_response_length,
        total_steps=total_steps,
        first_version=first_version,
        seed=seed,
        threads=threads,
    )
    engine.prepare()
    return engine


def weights(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}
