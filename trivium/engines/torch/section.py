"""What a config says of the built-in engine, and what the engine can do. Imports no torch: a check needs none."""

from __future__ import annotations

from collections.abc import Iterator

from trivium.config import RunConfig, free
from trivium.config.recording import shape_in
from trivium.engines.section import LocalEngineConfig
from trivium.foundation.errors import ConfigError, Problem
from trivium.models.placement import has_gpu, head_precision_problems
from trivium.models.precision import HeadPrecision
from trivium.types import EXTRAS, Capabilities


class DescribedTorchEngine:
    """The section and the capabilities of `TorchEngine`."""

    class Config(LocalEngineConfig):
        kind: str = "torch"
        head_precision: HeadPrecision = "auto"
        """Precision of the matrix products of the output layer on a GPU. Must equal `train.head_precision`, which
        describes the values."""
        cuda_graphs: bool = True
        """Whether a GPU runs decode steps as CUDA graphs, which is several times faster."""
        batch_invariant: bool | None = None
        """Whether a completion's bits are independent of the rest of its batch; unset: true for float32 on the CPU."""
        max_rows: int | None = free(None, chosen=True, ge=1)
        """Completions that decode at once; each holds keys and values for its whole context. Unset: chosen like
        `train.max_tokens_per_micro_batch`, at most 512."""
        prefill_tokens: int = free(16384, ge=16)
        """Prompt tokens read in one forward pass (one longer prompt is still read); bounds memory."""

        def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from head_precision_problems(self, where)
            shape = shape_in(run)
            try:
                if self.batch_invariant and (self.device != "cuda" or has_gpu()):
                    resolve_invariance(self.on_this_machine())
                if shape is not None:
                    resolve_context(self.max_context, shape.max_positions)
            except ConfigError as error:
                yield Problem(where, error.asked, error.found, error.do)

    capabilities = Capabilities(
        exact_sampling=True, updates_in_flight=True, adopts_adapters=True, merges_adapters=True, extra=frozenset(EXTRAS)
    )


def resolve_invariance(config: DescribedTorchEngine.Config) -> bool:
    """Whether the engine is batch-invariant. Raises ConfigError if it must be and cannot, or if `cuda` has no GPU."""
    from trivium.models.cpu import linear

    possible = config.device == "cpu" and config.dtype == "float32" and linear.available()
    if config.batch_invariant and not possible:
        raise ConfigError(
            "engine.batch_invariant: true",
            f"{config.dtype} on {config.device}" + ("" if linear.available() else ", torch without oneDNN"),
            "only float32 on the CPU is batch-invariant; leave it unset, or set it to false",
        )
    if config.device == "cuda" and not has_gpu():
        raise ConfigError("engine.device: cuda", "torch finds no GPU here", "set engine.device to cpu")
    return possible if config.batch_invariant is None else config.batch_invariant


def resolve_context(configured: int | None, built_for: int | None) -> int:
    """The longest context: the configured one or, unset, that of the model. Raises ConfigError if it exceeds the
    latter, or if both are unknown."""
    if configured is None and built_for is None:
        raise ConfigError(
            "the longest context", "the model's config does not say (max_position_embeddings)", "set engine.max_context"
        )
    if configured is not None and built_for is not None and configured > built_for:
        raise ConfigError(
            f"engine.max_context: {configured}",
            f"the model was built for {built_for} positions",
            f"set at most {built_for}",
        )
    return configured or built_for or 0
