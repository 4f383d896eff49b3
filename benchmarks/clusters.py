"""Two clusters on paper: writes the files that `trivium check` and `trivium simulate` plan them with.

    python benchmarks/clusters.py 30b-a3b runs/paper       Qwen3-30B-A3B on 8 GPUs of 80 GB
    python benchmarks/clusters.py 235b-a22b runs/paper     Qwen3-235B-A22B on 64

The folder gets `run.yaml`, `machine.yaml` (memory), `rates.yaml` (speed) and a model directory with a config.json.
Nothing is measured: rates follow from the assumptions below, and no transfer overlaps with arithmetic.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from trivium.config.model_shape import ModelShape, shape_of
from trivium.config.parallel import ParallelConfig, sent_in_a_pass
from trivium.simulation.rates import Rates

PEAK, USED = 989e12, 0.3
"""FLOP/s of a GPU in bfloat16, and the part of it that training and prompts reach."""
MEMORY, READ = 3.35e12, 0.6
"""Bytes a second of a GPU's memory, and the part of it that decoding reaches."""
NODE, NETWORK, HOST = 315e9, 40e9, 50e9
"""Bytes a second that a GPU sends to others of its node, to those of other nodes, and to host memory."""
HOST_MEMORY = 200e9
"""Bytes a second of a node's memory, through which the optimizer on the host goes."""
LATENCY = 10e-6
"""Seconds of a sum over the GPUs of an engine; each layer has two."""
UTILIZATION = 0.9
"""Part of a GPU's memory that an engine takes for weights and cache."""
PROMPT, RESPONSES = 512, (200.0, 1000.0, 2500.0, 5000.0, 16000.0)
"""Tokens of a prompt, and quantiles of the tokens of a response."""
PASS = 17_024
"""Tokens of one pass of a rank: of the longest sequence that `trivium check` plans with."""


@dataclass(frozen=True)
class Cluster:
    """A model, and how the GPUs are divided."""

    model: dict[str, int]
    nodes: int
    ranks: int
    tensor: int
    expert: int
    engines: int
    engine_gpus: int
    groups: int

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.config_json)

    @property
    def between(self) -> float:
        """Bytes a second between any two GPUs."""
        return NODE if self.nodes == 1 else NETWORK

    @property
    def config_json(self) -> dict[str, Any]:
        rest = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151_936}
        rest |= {"num_key_value_heads": 4, "max_position_embeddings": 40_960}
        return {"model_type": "qwen3_moe", "tie_word_embeddings": False, **rest, **self.model}


CLUSTERS = {
    "30b-a3b": Cluster(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
        },
        nodes=1,
        ranks=4,
        tensor=1,
        expert=4,
        engines=2,
        engine_gpus=2,
        groups=64,
    ),
    "235b-a22b": Cluster(
        {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
        },
        nodes=8,
        ranks=32,
        tensor=4,
        expert=32,
        engines=4,
        engine_gpus=8,
        groups=128,
    ),
}


def run_config(cluster: Cluster) -> dict[str, Any]:
    return {
        "run": {"dir": "run"},
        "model": {"kind": "hf", "path": "model", "chat_template": "plain"},
        "tasks": {"train": {"kind": "arithmetic"}},
        "rewards": [{"kind": "exact"}],
        "cluster": {"kind": "ray", "ranks": cluster.ranks, "explorers": cluster.engines},
        "engine": {
            "kind": "vllm",
            "device": "cuda",
            "tensor_parallel_size": cluster.engine_gpus,
            "gpu_memory_utilization": UTILIZATION,
            "sampling": {"max_new_tokens": int(RESPONSES[-1])},
        },
        "train": {
            "device": "cuda",
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
            "cpu_offload": True,
            "max_tokens_per_micro_batch": PASS,
            "parallel": {"tensor": cluster.tensor, "expert": cluster.expert},
        },
        "algorithm": {"kind": "grpo"},
        "schedule": {"groups_per_step": cluster.groups, "group_size": 8, "steps": 100},
    }


def sent_s(cluster: Cluster) -> float:
    """Seconds in which a rank sends what one pass exchanges."""
    parallel = ParallelConfig(tensor=cluster.tensor, expert=cluster.expert)
    sent = sent_in_a_pass(cluster.shape, parallel, cluster.ranks, PASS, passes=3, width=2)
    return sum(number / (NODE if name == "split layers" else cluster.between) for name, number in sent.items())


def rates_of(cluster: Cluster) -> Rates:
    """The rates that follow from the assumptions. Parameters and optimizer are in host memory: a pass copies the rank's
    part to its GPU twice, and its gradients back."""
    shape, gpus = cluster.shape, cluster.engine_gpus
    copied_s = 3 * 4 * shape.parameters / cluster.ranks / HOST
    flops = shape.flops(1, 0, 1, backward=True) * 4 / 3  # layers are computed again in the backward pass
    tokens = PROMPT + fmean((low + high) / 2 for low, high in pairwise(RESPONSES))
    flops += 4 * 2 * shape.layers * shape.query * tokens  # attention
    heads = max(shape.kv_heads, gpus)  # of keys and values: each GPU of an engine holds at least one
    context = 2 * shape.layers * heads * shape.head_dim * 2 * tokens
    room = gpus * 80e9 * UTILIZATION - shape.parameters * 2
    decoding = gpus * MEMORY * READ
    nodes = cluster.nodes * cluster.ranks / (cluster.ranks + cluster.engines * gpus)  # of the trainer
    pushed_s = shape.parameters * 2 / cluster.between
    return Rates(
        start_s=shape.flops(PROMPT, PROMPT**2, 1, backward=False) / (gpus * PEAK * USED),
        step_s=shape.parameters * 2 / decoding + 2 * shape.layers * LATENCY,
        row_s=context / decoding + 2 * (shape.multiplied + shape.embedding) / (gpus * PEAK * USED),
        max_rows=int(room / context),
        load_s=pushed_s,
        sync_s=pushed_s,
        save_s=0.0,
        update_s=28 * shape.parameters / nodes / HOST_MEMORY,
        update_token_s=flops / (PEAK * USED) + cluster.tensor * (sent_s(cluster) + copied_s) / PASS,
        prompt_tokens=(float(PROMPT),),
        response_tokens=RESPONSES,
        explorer_gpus=gpus,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", choices=list(CLUSTERS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    cluster, folder = CLUSTERS[args.cluster], args.folder
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(cluster.config_json, indent=1))
    (folder / "run.yaml").write_text(yaml.safe_dump(run_config(cluster), sort_keys=False))
    gpus = cluster.ranks + cluster.engines * cluster.engine_gpus
    machine = {"memory": cluster.nodes * 2 * 2**40, "gpus": gpus, "gpu_memory": 80 * 10**9}
    (folder / "machine.yaml").write_text(yaml.safe_dump(machine, sort_keys=False))
    (folder / "rates.yaml").write_text(rates_of(cluster).to_yaml())
    print(f"wrote {folder}: {cluster.shape.parameters / 1e9:.1f}e9 parameters, {gpus} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
