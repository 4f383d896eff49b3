"""Peak memory of one update: the train engine's chunked head against logits and log-softmax held whole.

    python benchmarks/head_memory.py [--tokens 4096] [--vocabulary 151936] [--width 256] [--untied]

One supervised update of a small Qwen3 (`--layers`) with AdamW in float32, all tokens in one micro-batch: forward, loss,
backward, clipping, step. Each side runs in its own process, from the same weights on disk and with the same optimizer,
and has taken a step on few tokens before, so that libraries are loaded and optimizer state exists. What counts is how
far the peak of the resident set rises above what was resident then; the weights' gradients are part of it on both
sides. The plain side leaves out the entropy that the engine reports, which favours it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import SFT
from trivium.models.backbone.load import load_lm
from trivium.training.engine import TorchTrainEngine
from trivium.training.optim import Optimizer
from trivium.training.section import OptimizerConfig
from trivium.types import EXPERT_VERSION, Batch, Experience, Metrics

LIMIT = 0.2
"""The engine may need at most this part of the plain path's memory."""
REPLY = 512
"""Trained tokens of one sequence; one token of context stands before them."""
RATE, CLIP = 1e-3, 1.0

Update = Callable[[Batch], Metrics]


def write_model(directory: Path, said: argparse.Namespace) -> None:
    config = Qwen3Config(
        vocab_size=said.vocabulary,
        hidden_size=said.width,
        intermediate_size=2 * said.width,
        num_hidden_layers=said.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=said.width // 4,
        max_position_embeddings=REPLY + 1,
        tie_word_embeddings=not said.untied,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def make_batch(sequences: int, reply: int, vocabulary: int) -> Batch:
    rng = np.random.default_rng([sequences, reply])
    length = reply + 1
    mask, log_prob = np.arange(length) > 0, np.zeros(length, np.float32)
    version = np.full(length, EXPERT_VERSION, np.int32)
    rows = [rng.integers(0, vocabulary, length, np.int32) for _ in range(sequences)]
    return Batch(tuple(Experience(tokens, mask, log_prob, version, str(i), 0) for i, tokens in enumerate(rows)))


def chunked(model_dir: Path) -> Update:
    """The train engine as it is."""
    algorithm = build_algorithm(SFT.configure({"kind": "sft"}))
    config = {"device": "cpu", "optimizer": {"lr": RATE}, "max_grad_norm": CLIP, "max_tokens_per_micro_batch": 1 << 30}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate(config),
        model_dir=model_dir,
        algorithm=algorithm,
        temperature=1.0,
        max_response_length=REPLY,
        total_steps=2,
        seed=0,
        threads=torch.get_num_threads(),
    )
    engine.prepare()
    (objective,) = algorithm.objectives
    return lambda batch: engine.update("policy", batch, objective)


def plain(model_dir: Path) -> Update:
    """The usual way: all logits of the model's own forward pass, their log-softmax, autograd."""
    model = load_lm(model_dir, dtype=torch.float32)
    optimizer = Optimizer(model, OptimizerConfig(lr=RATE))

    def update(batch: Batch) -> Metrics:
        tokens = torch.from_numpy(np.stack([e.tokens for e in batch.experiences]).astype(np.int64))
        optimizer.zero_grad()
        log_p = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        loss = -log_p.gather(2, tokens[:, 1:, None]).mean()
        loss.backward()
        norm = optimizer.step(RATE, CLIP, "the plain path")
        optimizer.zero_grad()
        return {"train/loss/policy": float(loss.detach()), "train/grad_norm/policy": norm}

    return update


SIDES = {"plain": plain, "chunked": chunked}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(side: str, model_dir: Path, said: argparse.Namespace) -> dict[str, float]:
    update = SIDES[side](model_dir)
    update(make_batch(2, 4, said.vocabulary))
    batch = make_batch(said.tokens // REPLY, REPLY, said.vocabulary)
    before = resident_bytes()
    start = time.perf_counter()
    metrics = update(batch)
    seconds = time.perf_counter() - start
    return {
        "bytes": peak_bytes() - before,
        "before": before,
        "seconds": seconds,
        "loss": metrics["train/loss/policy"],
        "norm": metrics["train/grad_norm/policy"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak memory of one update: chunked head against plain logits.")
    parser.add_argument("--tokens", type=int, default=4096, help=f"trained tokens, a multiple of {REPLY}")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument("--side", choices=list(SIDES), help="measure one side in this process, print JSON")
    parser.add_argument("--model", type=Path, help="the model directory of --side")
    said = parser.parse_args()
    if said.tokens < REPLY or said.tokens % REPLY:
        parser.error(f"--tokens must be a multiple of {REPLY}")
    if said.side:
        print(json.dumps(measure(said.side, said.model, said)))
        return 0
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), said)
        for side in SIDES:
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--model", folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[side] = json.loads(done.stdout)
            at = found[side]
            print(
                f"{side:8} {at['bytes'] / 2**20:8.0f} MiB above {at['before'] / 2**20:.0f} MiB, {at['seconds']:.2f} s, "
                f"loss {at['loss']:.6f}, gradient norm {at['norm']:.6f}"
            )
    memory = found["chunked"]["bytes"] / found["plain"]["bytes"]
    print(f"memory   {memory:.3f} of the plain path (limit {LIMIT})")
    print(f"time     {found['chunked']['seconds'] / found['plain']['seconds']:.2f} of the plain path")
    return int(memory > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
