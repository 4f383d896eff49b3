"""Arithmetic of a pass, time by phase, and utilisation."""

import asyncio
import math
from pathlib import Path

import pytest
import torch
from test_critic_warmup import GROUPS, ppo
from torch.utils.flop_counter import FlopCounterMode
from training_parts import make_engine, write_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from trivium.foundation.metrics import checked, depends_on_machine
from trivium.foundation.phases import Phase, collecting, measured, phase
from trivium.loops import train_step
from trivium.models.backbone.shape import shape_of
from trivium.training import flops
from trivium.training.flops import measured_peak, utilisation
from trivium.types import Batch

LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=131,
    max_position_embeddings=64,
    pad_token_id=0,
)


def test_a_pass_counts_what_torch_counts() -> None:
    """Torch counts attention in full; causal attention needs half of it."""
    shape, rows, length = shape_of(LLAMA), 3, 32
    model = AutoModelForCausalLM.from_config(LLAMA, attn_implementation="eager")
    tokens = torch.randint(0, 131, (rows, length))
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens, labels=tokens, use_cache=False).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    full = rows * length**2 * 2
    ours = shape.flops(rows * length, full, rows * length, backward=False)
    assert ours == pytest.approx(forward.get_total_flops(), rel=2e-3)  # but for the table of rotations
    both = forward.get_total_flops() + backward.get_total_flops()
    assert shape.flops(rows * length, full, rows * length, backward=True) == pytest.approx(both, rel=2e-3)


def test_an_adapter_s_backward_pass_skips_the_weights_it_does_not_train() -> None:
    shape = shape_of(LLAMA)
    forward, adapter, whole = (
        shape.flops(100, 5000, 40, backward=backward, adapted=adapted)
        for backward, adapted in ((False, shape.layers), (True, shape.layers), (True, 0))
    )
    assert (adapter, whole) == (2 * forward, 3 * forward)
    head = shape.flops(0, 0, 40, backward=False)
    upper = shape.flops(100, 5000, 40, backward=True, adapted=1)
    assert upper == pytest.approx(forward + head + (forward - head) / shape.layers)


def test_only_active_experts_and_the_head_s_own_tokens_count() -> None:
    attention = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
    mixture = Qwen3MoeConfig(**attention, **experts, num_hidden_layers=3, vocab_size=131)
    dense, sparse = shape_of(LLAMA), shape_of(mixture)
    expert = 3 * 64 * 96
    assert sparse.multiplied - dense.multiplied == 3 * (expert + 64 * 8)
    fewer = dense.flops(100, 0, 10, backward=False)
    assert dense.flops(100, 0, 30, backward=False) - fewer == 2 * 20 * 131 * 64


def test_utilisation_is_arithmetic_over_time_and_peak() -> None:
    shape = shape_of(LLAMA)
    phases = {
        "score/ref": Phase(2.0, 100, 5000, 40),
        "update/policy": Phase(4.0, 100, 5000, 40),
        "advantage": Phase(50.0),
    }
    found = utilisation(phases, {"policy": shape, "reference": shape}, {"ref": "reference"}, 1e6)
    once = shape.flops(100, 5000, 40, backward=False)
    assert found["perf/mfu/score"] == pytest.approx(once / 2 / 1e6)
    assert found["perf/mfu/update"] == pytest.approx(3 * once / 4 / 1e6)
    assert found["perf/mfu"] == pytest.approx(4 * once / 6 / 1e6)
    assert utilisation(phases, {}, {}, 1e6) == {}
    critic = utilisation({"score/values": Phase(2.0, 100, 5000, 40)}, {"critic": shape}, {"values": "critic"}, 1e6)
    assert critic["perf/mfu"] == pytest.approx(shape.flops(100, 5000, 0, backward=False) / 2 / 1e6)


def test_the_peak_is_measured_once() -> None:
    peak = measured_peak(torch.device("cpu"), torch.float32, 1)
    assert 1e8 < peak < 1e15
    assert measured_peak(torch.device("cpu"), torch.float32, 1) == peak


def test_a_slow_device_is_measured_by_fewer_products_and_the_first_one_alone_does_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = [3.0, 0.75, 0.5]
    monkeypatch.setattr(flops, "_seconds", lambda a: left.pop(0))
    assert measured_peak.__wrapped__(torch.device("cpu"), torch.float32, 1) == 2 * 768**3 / 0.75
    assert left == [0.5]


def test_a_step_says_where_its_time_went(tmp_path: Path) -> None:
    engine = make_engine(write_model(tmp_path / "model"), ppo(1), peak_flops=1e9)
    rows = [train_step(engine, GROUPS, engine.algorithm) for _ in range(2)]
    for row, updated in zip(rows, (["critic"], ["critic", "policy"]), strict=True):
        assert [key for key in row if key.startswith("time/update/")] == [f"time/update/{role}" for role in updated]
        assert {"time/score/values", "time/advantage", "perf/train_tokens_per_second"} <= row.keys()
        seconds = sum(row[key] for key in row if key.startswith(("time/score/", "time/update/")))
        assert row["perf/mfu"] * 1e9 * seconds == pytest.approx(row["perf/model_flops_per_second"] * seconds)
        assert row["perf/mfu/update"] > 0
        assert checked(row)
    assert all(depends_on_machine(key) for key in measured({"update/policy": Phase(1.0, 10)}))


def test_phases_are_collected_by_who_asks_and_across_threads() -> None:
    with phase("score/old", Batch(())):
        pass  # nobody asks
    with collecting() as outer:
        asyncio.run(in_a_thread())
        with collecting() as inner, phase("update/policy"):
            pass
    assert (list(outer), list(inner)) == (["score/old"], ["update/policy"])
    assert math.isfinite(outer["score/old"].seconds)


async def in_a_thread() -> None:
    def work() -> None:
        for _ in range(2):
            with phase("score/old", Batch(())):
                pass

    await asyncio.to_thread(work)
