"""Strategy methods that the original's example scripts call and that have little or no effect in Trivium."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from trivium.config.machine import peak_memory

_log = logging.getLogger("trivium")
_SWITCHES = {
    **dict.fromkeys(("packing_samples", "fsdp", "use_mp_opt", "fsdp_cpu_offload", "rm_engine_cudagraph"), False),
    **dict.fromkeys(("mixed_mm_data", "fused_linear_logprob"), False),
    **dict.fromkeys(("enable_engine_sleep", "rm_use_engine"), True),
}
_NUMBERS = {"engine_tp_size": 1, "engine_mem_util": 0.5, "sp_size": 1, "plot_every": 10, "chunk_size": 4096}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags about the engine, the ranks and the logs that the original's function of this name adds."""
    for name, default in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", default=default)
    for name, default in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--disable_engine_sleep", action="store_false", dest="enable_engine_sleep")
    parser.add_argument("--log_dir", default=None)


def ensure_video_input_available() -> None:
    """Does nothing: processors are not patched, and videos are refused."""


def get_current_device() -> torch.device:
    """Returns the GPU of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


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
        gigabytes = peak_memory() / 2**30
        on_gpu = (
            f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the GPU" if torch.cuda.is_available() else ""
        )
        _log.info("memory %s: at most %.2f GiB%s", prefix, gigabytes, on_gpu)
