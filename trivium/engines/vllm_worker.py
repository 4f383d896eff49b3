"""What runs in vLLM's worker processes: they adopt weights from a file, so nothing is pickled on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open


class WeightReader:
    """Mixed into vLLM's worker class (its `worker_extension_cls`)."""

    reload_weights: Any
    """Of vLLM's worker: copies (Hugging Face name, tensor) pairs into the model, packed as its kernels want them."""
    model_runner: Any
    """Of vLLM's worker."""

    def adopt_weights(self, path: str) -> None:
        """Replaces the weights by those in a safetensors file, one tensor at a time in memory."""

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    yield name, file.get_tensor(name)

        self.reload_weights(weights_iterator=named())
        for module in self.model_runner.get_model().modules():
            # On the CPU an output layer multiplies with a packed copy of its weights. vLLM packs a layer again when its
            # own weights came; one that is tied to the table has none.
            if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings"):
                module.quant_method.process_weights_after_loading(module)
