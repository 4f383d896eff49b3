"""What the original's example scripts call of a strategy around training, and which is no step of its own here."""

from __future__ import annotations

import logging
import resource
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_log = logging.getLogger("trivium")


class ScriptCalls:
    """Calls that are accepted so that a script runs as it is; each says what happens instead."""

    @contextmanager
    def init_model_context(self, meta_init: bool = False) -> Generator[None]:
        """Models are built within it. They are opened whole on every rank, whatever `meta_init` says."""
        if meta_init:
            _log.info("meta_init: models are opened whole on every rank, then sharded")
        yield

    def get_ds_train_config(self, is_actor: bool = True) -> None:
        """No config of DeepSpeed: there is none here."""

    def get_ds_eval_config(self, offload: bool = False) -> None:
        """No config of DeepSpeed: there is none here."""

    def setup_inference_engine(self, args: Any = None, engine_type: str = "", actor: Any = None) -> None:
        """The trainer opens the engine that it samples with, and gives it the weights."""
        if engine_type not in ("", "torch", "hf"):
            _log.info("engine_type %s: the trainer samples with its own torch engine", engine_type)

    def offload_model(self, model: Any) -> Any:
        """The model: frozen models stay where they are."""
        return model

    reload_model = offload_model

    @staticmethod
    def sync_and_clear_cache() -> None:
        """Frees memory of the GPU that torch keeps for later."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    @staticmethod
    def report_memory(prefix: str = "") -> None:
        """Logs the memory of this process."""
        gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        on_gpu = (
            f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the GPU" if torch.cuda.is_available() else ""
        )
        _log.info("memory %s: at most %.2f GiB%s", prefix, gigabytes, on_gpu)
