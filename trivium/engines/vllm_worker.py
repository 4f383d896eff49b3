"""What runs in vLLM's worker processes: they adopt weights from a file, so nothing is pickled on the way, and end with
the process that they work for."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from trivium.concurrency import ProcessLife

_WATCH_S = 1.0
"""How often a worker looks whether it is still needed."""


class TriviumWorker:
    """Mixed into vLLM's worker class (its `worker_extension_cls`)."""

    reload_weights: Any
    """Of vLLM's worker: copies (Hugging Face name, tensor) pairs into the model, packed as its kernels want them."""
    model_runner: Any
    """Of vLLM's worker."""

    def end_with(self, host: str, pid: int, started: str, directory: str) -> None:
        """Ends this process, and with it vLLM's engine, when that process (a `ProcessLife`) has died; removes the
        directory of its weights. vLLM by itself goes on for ever, with all its memory."""
        owner_lives = ProcessLife(host, pid, started)

        def watch() -> None:
            while owner_lives():
                time.sleep(_WATCH_S)
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(1)

        threading.Thread(target=watch, name="trivium-owner", daemon=True).start()

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
