"""What each rank's memory rises by while it opens a model, beside what it keeps: parts read from the files.

    python benchmarks/loading.py [--ranks 4] [--gigabytes 1.0]

Writes a Qwen3 of this size in float32 and opens it as the policy of a train engine on gloo ranks of this machine, each
a process of its own. What counts is how far the peak of a rank's resident set rises above what it was once it had
opened a tiny model. The limit is 1.2 times what the rank keeps, and one tensor. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import SFT
from trivium.models.weights.filling import local_part
from trivium.training.distributed.ranks import join_ranks
from trivium.training.engine import TorchTrainEngine

_SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
_LAYER_BYTES = 4 * (2 * 1024 * 128 * (8 + 2) + 3 * 1024 * 3072)
_VOCABULARY = 32000


def write_model(directory: Path, layers: int, hidden: int = 1024) -> Path:
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        vocab_size=_VOCABULARY if hidden > 64 else 64,
        tie_word_embeddings=False,
        **_SIZES,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def open_policy(directory: Path) -> TorchTrainEngine:
    engine = TorchTrainEngine(
        TorchTrainEngine.Config(device="cpu"),
        model_dir=directory,
        algorithm=build_algorithm(SFT.configure({"kind": "sft"})),
        temperature=1.0,
        max_response_length=32,
        total_steps=1,
        seed=0,
        threads=1,
        ranks=join_ranks(),
    )
    engine.prepare()
    return engine


def on_rank(small: Path, large: Path) -> dict[str, float]:
    """Seconds and bytes of one rank."""
    open_policy(small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before, start = status("VmRSS"), time.perf_counter()
    parameters = [*open_policy(large)._learners["policy"].model.parameters()]
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "peak": status("VmHWM") - before,
        "kept": sum(local_part(each).nbytes for each in parameters),
        "tensor": max(each.numel() * each.itemsize for each in parameters),
    }


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--of-rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of_rank:
        print(json.dumps(on_rank(*options.of_rank)))
        return
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        layers = max(1, round((options.gigabytes * 1e9 - 8 * 1024 * _VOCABULARY) / _LAYER_BYTES))
        paths = write_model(Path(folder, "small"), 1, 64), write_model(Path(folder, "large"), layers)
        port = free.getsockname()[1]
        free.close()
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks)}
        command = [sys.executable, __file__, "--of-rank", *map(str, paths)]
        ranks = [
            subprocess.Popen(
                command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE
            )
            for rank in range(options.ranks)
        ]
        rows = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    for rank, row in enumerate(rows):
        limit = 1.2 * row["kept"] + row["tensor"]
        print(
            f"rank {rank}: keeps {row['kept'] / 1e6:.0f} MB, peak +{row['peak'] / 1e6:.0f} MB "
            f"({row['peak'] / limit:.2f} of the limit), {row['seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
