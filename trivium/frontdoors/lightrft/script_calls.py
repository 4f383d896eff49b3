"""Strategy methods that the original's example scripts call and that have little or no effect in Trivium."""

from __future__ import annotations

import logging
import resource
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_log = logging.getLogger("trivium")


class ScriptCalls:
    """Methods that exist so that scripts run unchanged. Each docstring describes what happens instead."""

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Generator[None]:
        """Has no effect. Every rank opens whole models, for any `meta_init`."""
        if meta_init:
            _log.info("meta_init: models are opened whole on every rank, then sharded")
        yield

    def get_ds_train_config(self, is_actor: bool = True) -> None:
        """Returns None: DeepSpeed is not supported."""

    def get_ds_eval_config(self, offload: bool = False) -> None:
        """Returns None: DeepSpeed is not supported."""

    def setup_inference_engine(self, args: Any = None, engine_type: str = "", actor: Any = None) -> None:
        """Has no effect. The trainer opens its own engine and loads the weights into it."""
        if engine_type not in ("", "torch", "hf"):
            _log.info("engine_type %s: the trainer samples with its own torch engine", engine_type)

    def offload_model(self, model: Any) -> Any:
        """Returns the model unchanged. Frozen models are not offloaded."""
        return model

    reload_model = offload_model

    @staticmethod
    def sync_and_clear_cache() -> None:
        """Frees the GPU memory in torch's cache."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    @staticmethod
    def report_memory(prefix: str = "") -> None:
        """Logs the peak memory of this process."""
        gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        on_gpu = (
            f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the GPU" if torch.cuda.is_available() else ""
        )
        _log.info("memory %s: at most %.2f GiB%s", prefix, gigabytes, on_gpu)
