"""How long a save holds up the trainer: blocking against asynchronous, and how long a resume takes.

    python benchmarks/checkpoint.py [--repeats 3] [--layers 12] [--hidden 768]

A Qwen3-shaped model of about 100 million float32 parameters (random weights) and its AdamW state, through
`CheckpointStore.save` as a run does: files, hashes, seal, rename. The two kinds of saves take turns in one process; an
asynchronous one holds up the trainer while it copies, and is then waited for, so that saves never overlap. What is
printed is the median of each, and their ratio; the first of each kind does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from trivium.algorithms import build_algorithm
from trivium.checkpoint.store import CheckpointStore
from trivium.config import AlgorithmConfig, plugin
from trivium.foundation.concurrency import usable_cores
from trivium.loops import prepare_mini_batch
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch, Experience


def engine_of(folder: Path, layers: int, hidden: int) -> TorchTrainEngine:
    """An engine that has taken one step: its optimizer has state."""
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        vocab_size=1000,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    engine = TorchTrainEngine(
        TorchTrainEngine.Config(device="cpu"),
        model_dir=folder / "model",
        algorithm=build_algorithm(plugin("algorithms", AlgorithmConfig)("grpo"), 0, 8),
        temperature=1.0,
        max_response_length=8,
        total_steps=100,
        seed=0,
        threads=usable_cores(),
    )
    engine.prepare()
    tokens, mask = np.arange(8, dtype=np.int32), np.arange(8) > 3
    experience = Experience(tokens, mask, np.where(mask, -7.0, 0.0), np.where(mask, 0, -1), "g", 0)
    batch = Batch((experience,)).with_columns(advantages=[mask * 1.0], old_log_prob=[mask * -7.0])
    objective = engine.algorithm.objectives[0]
    engine.update(objective.role, prepare_mini_batch(engine, batch, objective, 0), objective)
    return engine


async def saved(engine: TorchTrainEngine, store: CheckpointStore, step: int, *, beside: bool) -> tuple[float, float]:
    """(seconds the trainer is held up, seconds until the step counts): as `Trainer.save_checkpoint` does it."""
    loop, held, started = asyncio.get_running_loop(), asyncio.Event(), time.perf_counter()

    def write(directory: Path) -> None:
        engine.save(directory, partial(loop.call_soon_threadsafe, held.set) if beside else None)

    saving = asyncio.create_task(store.save(step, write, {}))
    waiting = asyncio.create_task(held.wait())
    await asyncio.wait({saving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    held_up = time.perf_counter() - started
    waiting.cancel()
    await saving
    return held_up, time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--repeats", 3), ("--layers", 12), ("--hidden", 768)):
        parser.add_argument(name, type=int, default=default)
    said = parser.parse_args()
    disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    try:
        measure(folder, said.repeats, said.layers, said.hidden)
    finally:
        shutil.rmtree(folder)
    return 0


def measure(folder: Path, repeats: int, layers: int, hidden: int) -> None:
    engine = engine_of(folder, layers, hidden)
    number = sum(tensor.numel() for _, tensor in engine.export_weights())
    print(
        f"{number / 1e6:.0f} M float32 parameters with AdamW state ({12 * number / 1e9:.2f} GB), {usable_cores()} cores"
    )

    store = CheckpointStore(folder / "checkpoints", keep=1)

    async def play() -> list[tuple[float, float]]:
        return [await saved(engine, store, step, beside=step % 2 == 0) for step in range(1, 2 * repeats + 3)]

    took = asyncio.run(play())
    blocking, beside = took[2::2], took[3::2]
    blocked, held = median(up for up, _ in blocking), median(up for up, _ in beside)
    latest = store.latest()
    assert latest is not None
    started = time.perf_counter()
    engine.load(latest.path)
    loaded = time.perf_counter() - started
    print(f"blocking save        holds up the trainer {blocked:6.2f} s")
    counts = median(until for _, until in beside)
    print(f"asynchronous save    holds up the trainer {held:6.2f} s, counts after {counts:.2f} s")
    print(f"ratio                {blocked / held:.1f}")
    print(f"resume               {loaded:.2f} s (models and optimizer, without the check of hashes)")


if __name__ == "__main__":
    sys.exit(main())
