"""One training step of a Qwen shape, or of a hybrid, on one GPU, beside transformers' own.

    python benchmarks/gpu_train.py [--tokens 2048 8192] [--batch 16384] [--shape qwen-1.5b] [--device cuda]
    python benchmarks/gpu_train.py --shape qwen-8b --lora 16
    python benchmarks/gpu_train.py --shape hybrid-2b       three layers of the gated delta rule to one of attention

Random weights in float32, arithmetic in bfloat16, gradient checkpointing on both sides, the same sequences, AdamW. The
engine packs and never holds a [tokens, vocabulary] matrix; transformers' step is its model's own loss (`labels=`) under
autocast, micro-batches of as many tokens. With `--lora` the frozen weights are in bfloat16 on both sides, and the other
side is peft's. Each side is warmed up, then they take turns; medians are printed, and MFU is
against the bfloat16 matmul peak that is measured in the same run. A side that runs out of memory says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import SFT
from trivium.training.engine import TorchTrainEngine
from trivium.types import EXPERT_VERSION, Batch, Experience

SHAPES: dict[str, dict[str, Any]] = {
    "qwen-1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen-8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "hybrid-2b": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "tiny-hybrid": {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
RATE = 1e-6

Update = Callable[[Batch], float]


def config_of(shape: str, longest: int) -> PreTrainedConfig:
    kind = "qwen3_5_text" if "hybrid" in shape else "qwen2"
    return AutoConfig.for_model(kind, **SHAPES[shape], max_position_embeddings=longest, tie_word_embeddings=True)


def write_model(directory: Path, shape: str, longest: int, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_of(shape, longest), dtype=dtype)
    model.save_pretrained(directory)


def num_parameters(shape: str) -> int:
    """A tied embedding counts once."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(shape, 1)).num_parameters()


def make_batch(tokens: int, sequences: int, vocabulary: int) -> Batch:
    """Every token but the first is trained on."""
    rng = np.random.default_rng(tokens)
    mask, log_prob = np.arange(tokens) > 0, np.zeros(tokens, np.float32)
    version = np.full(tokens, EXPERT_VERSION, np.int32)
    rows = [rng.integers(0, vocabulary, tokens, np.int32) for _ in range(sequences)]
    return Batch(tuple(Experience(row, mask, log_prob, version, str(i), 0) for i, row in enumerate(rows)))


def trivium_step(model_dir: Path, said: argparse.Namespace) -> Update:
    algorithm = build_algorithm(SFT.configure({"kind": "sft"}))
    config: dict[str, Any] = {
        "device": said.device,
        "dtype": "bfloat16",
        "optimizer": {"lr": RATE},
        "gradient_checkpointing": True,
        "max_tokens_per_micro_batch": said.micro_batch,
    }
    if said.lora:
        config |= {"lora": {"rank": said.lora}, "frozen_dtype": "bfloat16"}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate(config),
        model_dir=model_dir,
        algorithm=algorithm,
        temperature=1.0,
        max_response_length=max(said.tokens),
        total_steps=1,
        seed=0,
        threads=torch.get_num_threads(),
    )
    engine.prepare()
    (objective,) = algorithm.objectives
    return lambda batch: engine.update("policy", batch, objective)["train/loss/policy"]


def transformers_step(model_dir: Path, said: argparse.Namespace) -> Update:
    dtype = torch.bfloat16 if said.lora else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(said.device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if said.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=said.lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)

    def update(batch: Batch) -> float:
        rows = torch.from_numpy(np.stack([e.tokens for e in batch.experiences]).astype(np.int64)).to(said.device)
        micro_batches = rows.split(max(1, said.micro_batch // rows.shape[1]))
        loss = 0.0
        for micro in micro_batches:
            with torch.autocast(said.device, torch.bfloat16):
                part = model(input_ids=micro, labels=micro, use_cache=False).loss * len(micro) / len(rows)
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return update


SIDES = {"trivium": trivium_step, "transformers": transformers_step}


def matmul_peak(device: str) -> float:
    """bfloat16 FLOP/s of a large matrix product."""
    size = 8192 if device == "cuda" else 256  # a CPU without instructions for bfloat16 would take minutes for 1,024
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(10):
        start = clock(device)
        for _ in range(10):
            a @ b
        best = max(best, 10 * 2 * size**3 / (clock(device) - start))
    return best


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def flops_per_token(shape: str, tokens: int, frozen: bool) -> float:
    """Forward and backward, without what gradient checkpointing computes twice: 6 per weight (4 if it is frozen), and
    causal attention over half the sequence on average. Scans of recurrent layers count as none."""
    config: Any = config_of(shape, tokens)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    return (4 if frozen else 6) * num_parameters(shape) + 6 * kinds.count("full_attention") * width * tokens


def measure(said: argparse.Namespace, model_dir: Path, tokens: int, peak: float) -> dict[str, float]:
    """tokens/s of each side, medians over turns; a side that does not fit is left out."""
    batch = make_batch(tokens, max(1, said.batch // tokens), SHAPES[said.shape]["vocab_size"])
    seconds: dict[str, list[float]] = {}
    found: dict[str, float] = {}
    for turn in range(said.turns):
        for side, build in SIDES.items():
            if turn and side not in seconds:
                continue
            gc.collect()
            if said.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                update = build(model_dir, said)
                loss = update(batch)
                for _ in range(said.steps):
                    start = clock(said.device)
                    update(batch)
                    seconds.setdefault(side, []).append(clock(said.device) - start)
            except torch.OutOfMemoryError:
                print(f"{side:12} {tokens:6d} tokens  out of memory")
                seconds.pop(side, None)
                continue
            memory = torch.cuda.max_memory_allocated() / 2**30 if said.device == "cuda" else 0.0
            if turn == said.turns - 1:
                found[side] = batch.num_tokens / statistics.median(seconds[side])
                used = found[side] * flops_per_token(said.shape, tokens, said.lora > 0) / peak
                print(
                    f"{side:12} {tokens:6d} tokens  {found[side]:9.0f} tokens/s  MFU {100 * used:5.1f} %  "
                    f"peak {memory:6.1f} GiB  loss {loss:.4f}",
                    flush=True,
                )
                figure = {"side": side, "tokens": tokens, "tokens_per_s": found[side], "mfu": used, "peak_gib": memory}
                print(json.dumps({"figure": figure | {"loss": loss}}), flush=True)
            del update
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="One training step on one GPU, next to transformers' own.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=65_536, help="tokens per step")
    parser.add_argument("--micro-batch", type=int, default=16_384, help="tokens per forward and backward pass")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen-1.5b")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank; 0: all weights"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each turn, after one that is not")
    said = parser.parse_args()
    peak = matmul_peak(said.device)
    print(f"bfloat16 matmul peak {peak / 1e12:.1f} TFLOP/s")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), said.shape, max(said.tokens), torch.bfloat16 if said.lora else torch.float32)
        for tokens in said.tokens:
            found = measure(said, Path(folder), tokens, peak)
            if len(found) == 2:
                print(f"ratio        {tokens:6d} tokens  {found['trivium'] / found['transformers']:.2f} x transformers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
