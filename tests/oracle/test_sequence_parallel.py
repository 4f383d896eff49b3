"""Ranks that share every sequence say what one process outputs_of, and their gradients add up to its gradient."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from failing import refused
from rank_processes import run_ranks
from training_parts import VOCABULARY, write_model

from trivium.foundation.errors import ConfigError
from trivium.models.backbone.packed import pack
from trivium.models.backbone.sequence_parallel import SequenceGroup
from trivium.models.heads.trained_models import LanguageModel, ScoreModel, ValueModel

CPU = torch.device("cpu")
MODELS = {
    "qwen3": {},
    "llama": {"num_key_value_heads": 1},
    "gpt2": {},
    "mistral": {},  # a sliding window
}
PACKS = {
    "many": (9, 21, 20, 3, 1, 12, 12),  # 78 tokens divide by neither 4 nor 128
    "one": (37,),
    "single tokens": (1, 1, 1, 2),
    "fewer tokens than ranks": (3,),
    "long": (300, 2, 290),
}
HEADS = {"lm": LanguageModel, "value": ValueModel, "score": ScoreModel}
CASES = [
    *((model, "many", "lm", torch.float64) for model in MODELS),
    *(("mistral", lengths, "lm", torch.float64) for lengths in PACKS if lengths != "many"),
    *(("llama", "many", head, torch.float64) for head in ("value", "score")),
    ("mistral", "many", "lm", torch.float32),
    ("qwen3", "long", "lm", torch.float32),
    ("qwen3", "many", "lm", torch.bfloat16),
]
SIZES = (1, 2, 4)
TRIED = [(case, size) for case in CASES for size in SIZES if size > 1 or case == CASES[0]]
"""A group of one rank does what a model without one does."""


def sequences(lengths):
    rng = np.random.default_rng(1)
    return [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in lengths]


@cache
def opened(directory: Path, head: str, dtype: torch.dtype, sequence: SequenceGroup | None):
    how = {"temperature": 0.7} if head == "lm" else {"seed": 3}
    if dtype == torch.bfloat16:
        how, dtype = {**how, "autocast": True}, torch.float32
    return HEADS[head](directory, dtype=dtype, device=CPU, sequence=sequence, **how)


def outputs_of(directory: Path, case, sequence: SequenceGroup | None) -> dict[str, torch.Tensor]:
    """Everything a model outputs_of about some tokens of a pack, and the gradients of a loss over it."""
    name, lengths, head, dtype = case
    model = opened(directory / name, head, dtype, sequence)
    batch = pack(sequences(PACKS[lengths]))
    rows = (batch.positions > 0).nonzero().squeeze(1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
    rows = rows[order[: -(-len(rows) * 4 // 5)]]
    model.zero_grad()
    if head != "lm":
        result = {"values": model(batch, rows)}
        (result["values"] * torch.arange(len(rows))).sin().sum().backward()
    else:
        candidates = torch.arange(len(rows) * 3).view(-1, 3) % VOCABULARY
        log_prob, entropy = model(batch, rows, entropy_grad=True, candidates=candidates)
        result = {"log_prob": log_prob, "entropy": entropy}
        ((log_prob * torch.arange(len(rows) * 4).view(-1, 4)).sin().sum() + (entropy**2).sum()).backward()
        result["sum_pi_squared"] = model(batch, rows, "sum_pi_squared")[0]
        result["mean_discriminant"] = model(batch, rows, "mean_discriminant")[0]
        result["ids"], result["top"] = model(batch, rows, "top", top_k=3)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {**{name: value.detach() for name, value in result.items()}, **gradients}


def of_rank(rank: int, world: int, directory: Path) -> dict[tuple, dict[str, torch.Tensor]]:
    dist.init_process_group("gloo")
    found: dict[tuple, dict[str, torch.Tensor]] = {}
    for size in SIZES:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        sequence = SequenceGroup(rank % size, size, groups[rank // size])
        for case in [case for case, tried in TRIED if tried == size]:
            result = outputs_of(directory, case, sequence)
            for name, value in result.items():
                if "." in name:
                    dist.all_reduce(value, group=sequence.group)
            found[case, size] = result
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        write_model(directory / name, name, **changes)
    return directory


@pytest.fixture(scope="module")
def found(directory, tmp_path_factory):
    return run_ranks([4], of_rank, tmp_path_factory.mktemp("ranks") / "result", directory)[4]


@pytest.mark.parametrize(
    ("case", "size"), TRIED, ids=lambda each: "-".join(map(str, each)) if isinstance(each, tuple) else None
)
def test_equals_one_process(case, size, directory, found):
    expected = outputs_of(directory, case, None)
    close = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02}[case[3]]
    for rank in range(4):
        result = found[rank][case, size]
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            tolerance = {"rtol": close, "atol": close * float(value.abs().max() if len(value) else 0)}
            torch.testing.assert_close(result[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    assert any(float(value.abs().max()) > 0.01 for name, value in expected.items() if "." in name)


def test_models_that_do_not_pack_are_refused(tmp_path):
    write_model(tmp_path, "bloom")
    with refused(ConfigError, "train.sequence_parallel 2", "BloomModel"):
        opened(tmp_path, "lm", torch.float32, SequenceGroup(0, 2, None))


def test_heads_that_do_not_divide_are_refused(tmp_path):
    write_model(tmp_path, "llama")
    with refused(ConfigError, "train.sequence_parallel 3", "4 attention heads", "1, 2, 4"):
        opened(tmp_path, "lm", torch.float32, SequenceGroup(0, 3, None))
