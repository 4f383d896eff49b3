"""What `train.parallel` refuses: numbers that do not divide, and models and features that are not split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from configs import configured, problems_of, tiny_model
from hybrid_parts import HYBRID_OF
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig

from trivium.models.backbone.shape import shape_of
from trivium.planning.machine import Machine
from trivium.planning.model_memory import SplitModels, TrainedModels, memory_plan
from trivium.planning.model_shape import ModelShape
from trivium.planning.parallel import (
    EXPERT_MODELS,
    TENSOR_MODELS,
    WHOLE_ATTENTION,
    WHOLE_EXPERTS,
    WHOLE_WEIGHTS,
    ParallelConfig,
    computed_block,
    mesh_problems,
    sent_in_a_pass,
    shape_problems,
)
from trivium.planning.plan import plan_run
from trivium.runtime.preflight import preflight

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
DENSE = shape_of(LlamaConfig(**SIZES, intermediate_size=96))
MIXTURE = shape_of(Qwen3MoeConfig(**SIZES, moe_intermediate_size=96, num_experts=6, num_experts_per_tok=2))


@pytest.mark.parametrize(
    ("ranks", "sizes", "where"),
    [
        (8, {"tensor": 2, "expert": 4, "sequence": 2}, ""),
        (8, {"tensor": 2, "shard": 4}, ""),
        (8, {"tensor": 3}, "train.parallel.tensor"),
        (8, {"expert": 3}, "train.parallel.expert"),
        (6, {"sequence": 4}, "train.sequence_parallel"),
        (8, {"tensor": 4, "sequence": 4}, "train.sequence_parallel"),
        (8, {"tensor": 4, "shard": 2}, "train.shard"),
        (8, {"expert": 2, "shard": 4}, ""),
        (8, {"expert": 4, "shard": 2}, "train.shard"),
        (8, {"tensor": 4, "expert": 2}, "train.parallel.expert"),
    ],
)
def test_numbers_of_ranks_that_do_not_divide(ranks: int, sizes: dict[str, int], where: str) -> None:
    alone = {"sequence": 1, "shard": 0, "tensor": 1, "expert": 1}
    assert [problem.where for problem in mesh_problems(ranks, **alone | sizes)] == [where] * bool(where)


@pytest.mark.parametrize(
    ("shape", "sizes", "named"),
    [
        (DENSE, {"tensor": 4}, ""),
        (MIXTURE, {"tensor": 2, "expert": 6}, ""),
        (replace(MIXTURE, mlp=97), {"tensor": 4, "expert": 2}, ""),  # experts are whole
        (DENSE, {"tensor": 3}, "4 key-value heads"),
        (replace(DENSE, heads=10), {"tensor": 4}, "10 attention heads"),
        (replace(DENSE, heads=6, kv_heads=2), {"tensor": 2, "sequence": 3}, ""),
        (replace(DENSE, heads=6, kv_heads=2), {"tensor": 2, "sequence": 2}, "3 attention heads"),
        (replace(DENSE, heads=6, kv_heads=2), {"sequence": 4}, "6 attention heads"),
        (replace(DENSE, vocabulary=1001), {"tensor": 4}, "1001 tokens"),
        (replace(DENSE, mlp=98), {"tensor": 4}, "98 rows"),
        (MIXTURE, {"expert": 4}, "6 experts"),
        (replace(DENSE, kind="qwen3_moe"), {"expert": 2}, "no experts"),
        (replace(DENSE, kind="lfm2"), {"tensor": 2}, "lfm2"),
        (replace(DENSE, convolved=3), {"sequence": 2}, "recurrent state"),
        (replace(MIXTURE, kind="deepseek_v3"), {"expert": 2}, "deepseek_v3"),
    ],
)
def test_models_that_cannot_be_split(shape: ModelShape, sizes: dict[str, int], named: str) -> None:
    sequence = sizes.get("sequence", 1)
    parallel = ParallelConfig.model_validate({name: size for name, size in sizes.items() if name != "sequence"})
    problems = [str(problem) for problem in shape_problems(shape, parallel, sequence)]
    assert any(named in problem for problem in problems) if named else not problems


def test_a_config_names_what_is_not_split() -> None:
    sections: dict[str, Any] = {"model": tiny_model(heads=4), "train": {"parallel": {"tensor": 2}}}
    assert "train.parallel.tensor" in problems_of(configured, **sections)  # one key-value head
    sections = {"model": tiny_model(heads=6, kv_heads=2, hidden=48), "train": {"parallel": {"tensor": 2}}}
    sections["train"]["sequence_parallel"] = 2
    assert "train.sequence_parallel" in problems_of(configured, **sections)
    adapted = {"lora": {"rank": 2}, "parallel": {"tensor": 2}}
    assert "train.lora" in problems_of(configured, train=adapted)["train.parallel.tensor"]


def test_a_run_on_one_rank_is_not_split() -> None:
    config = configured(model=tiny_model(kv_heads=2, alphabet="0123456789+"), train={"parallel": {"tensor": 2}})
    for ranks, found in ((1, ["train.parallel.tensor"]), (2, [])):
        problems = preflight(config, Machine(1 << 34), 1, ranks).problems
        assert [problem.where for problem in problems if "parallel" in problem.where] == found


def test_the_plan_divides_what_ranks_split() -> None:
    """The parts of a layer that a rank gathers and computes, and what it sends instead."""
    sections: dict[str, Any] = {
        "model": tiny_model(kv_heads=2, alphabet="0123456789+"),
        "schedule": {"group_size": 4, "groups_per_step": 2},
    }
    plans = [
        plan_run(configured(**sections, train={"parallel": split, "dtype": "float32"}), 1, Machine(), 4).text.stages[0]
        for split in ({}, {"tensor": 2})
    ]
    whole, half = (plan.memory["each rank"] for plan in plans if plan.memory is not None)
    assert half["gathered"] < whole["gathered"]
    assert half["policy weights"] == whole["policy weights"]  # sharded over all ranks in any case
    assert [plan.batch.data_ranks for plan in plans] == [4, 2]
    assert plans[0].communication is None
    assert plans[1].communication is not None
    assert "split layers" in plans[1].communication


@pytest.mark.parametrize("kind", sorted(TENSOR_MODELS))
def test_the_plan_divides_the_activations_that_transformers_splits(kind: str) -> None:
    splits = AutoConfig.for_model(HYBRID_OF.get(kind, kind)).base_model_tp_plan or {}
    assert (kind not in WHOLE_ATTENTION) == (splits.get("layers.*.self_attn.q_proj") == "colwise")
    assert (kind not in WHOLE_WEIGHTS) == ("layers.*.self_attn.q_proj" in splits)
    assert (kind not in WHOLE_EXPERTS) == any(name.endswith("down_proj") for name in splits)
    shape = replace(MIXTURE if kind in EXPERT_MODELS else DENSE, kind=kind, mlp=960)
    split = (SplitModels(parallel=ParallelConfig(tensor=tensor), gpu=2**30) for tensor in (1, 2))  # no fused layers
    whole, half = (memory_plan(TrainedModels(shape), 100, each)["activations"] for each in split)
    attention = (4 * shape.query + 8 * shape.key) * 4 * 100 * (shape.layers + 1)
    experts = 4 * shape.mlp * shape.active_experts * 4 * 100 * (shape.layers + 1)
    logits = 3 * 100 * shape.vocabulary * 4
    divided = attention * (kind not in WHOLE_ATTENTION) + experts * (kind not in WHOLE_EXPERTS) + logits
    assert whole - half == divided // 2


@pytest.mark.parametrize(
    ("kind", "sizes", "dense", "experts"),
    [
        ("qwen3_moe", {"tensor": 2}, 0.5, 0.5),
        ("granitemoe", {"tensor": 2}, 1.0, 0.5),
        ("gpt_oss", {"tensor": 2}, 1.0, 1.0),
        ("gpt_oss", {"tensor": 2, "expert": 6}, 1.0, 1 / 6),
        ("gpt_oss", {"expert": 2}, 1.0, 0.5),
    ],
)
def test_the_plan_holds_whole_what_transformers_leaves_whole(
    kind: str, sizes: dict[str, int], dense: float, experts: float
) -> None:
    shape, shards = replace(MIXTURE, kind=kind), 12
    split = {"tensor": 1, "expert": 1, **sizes}
    attention, all_experts = 2 * shape.hidden * (shape.query + shape.key), 6 * 3 * shape.hidden * 96
    own = computed_block(shape, **split)
    rest = shape.hidden * 6 + 2 * shape.hidden + 2 * shape.head_dim  # the router and the norms
    assert own == (rest // split["tensor"] + attention * dense, all_experts * experts)
    items = memory_plan(TrainedModels(shape), 1, SplitModels(shards, ParallelConfig(**split)))
    embedding = shape.embedding * 4 // split["tensor"] * 2
    assert items["gathered"] == 2 * 2 * sum(own) * 4 + embedding
    copies = (dense * split["tensor"] - 1) * attention * (split["tensor"] > 1) + all_experts * (own[1] == all_experts)
    assert items["policy weights"] == (shape.parameters + shape.layers * copies) * 4 // shards


def test_experts_that_stay_on_their_ranks_are_not_sent() -> None:
    sent = [sent_in_a_pass(MIXTURE, ParallelConfig(expert=expert), 6, 100, passes=2, width=4) for expert in (1, 2, 6)]
    experts = MIXTURE.sparse
    assert [each["sharded experts"] for each in sent] == [experts * 12 * 5 // 6, experts // 2 * 12 * 2 // 3, 0]
    tokens = 2 * 2 * MIXTURE.layers * 100 * MIXTURE.active_experts * MIXTURE.hidden * 4  # there and back, twice
    assert [each["tokens for experts"] for each in sent] == [0, tokens // 2, tokens * 5 // 6]
