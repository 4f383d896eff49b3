"""What a run will want of memory: counts that are torch's own, an estimate that a real step agrees with, a refusal."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from configs import configured
from failing import refused
from sync_parts import memory_rise
from training_parts import Parts, Reinforce, make_batch, make_engine
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GraniteMoeSharedConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from tests.processes import Forked
from trivium.cli import app
from trivium.config import RunConfig, config_from_mapping, load_config
from trivium.config.resume import as_begun, to_yaml
from trivium.engines.torch.decoder import Decoder
from trivium.foundation.errors import ConfigError, DataError
from trivium.models.backbone.shape import read_shape
from trivium.models.backbone.shape import shape_of as counted
from trivium.planning.choices import MIB
from trivium.planning.machine import Machine, host_memory
from trivium.planning.machine_file import read_machine
from trivium.planning.memory_estimate import Lengths, TaskTokens
from trivium.planning.model_memory import Adapter, SplitModels, TrainedModels, engine_memory, memory_plan
from trivium.planning.model_shape import FEW_BITS, ModelShape
from trivium.planning.plan import plan_run
from trivium.text.tiny import TinyModel, tiny_tokenizer
from trivium.training.device import machine

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = [
    LlamaConfig(**SIZES),
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    MistralConfig(**SIZES),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    Qwen3Config(**SIZES, head_dim=32, attention_bias=True),
    Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    GraniteMoeSharedConfig(**SIZES, num_local_experts=4, shared_intermediate_size=48),
    Glm4MoeConfig(
        **SIZES,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=2,
        moe_intermediate_size=32,
        first_k_dense_replace=0,
    ),
    GemmaConfig(**SIZES),
    GPT2Config(**SMALL, n_embd=64, n_layer=2, n_head=4, n_positions=32, n_inner=80),
    BloomConfig(**SMALL, hidden_size=64, n_layer=2, n_head=4),
    Mamba2Config(**SMALL, hidden_size=64, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=32, n_groups=2),
    Mamba2Config(**SMALL, hidden_size=32, num_heads=4, head_dim=16, n_groups=1, use_bias=True, use_conv_bias=False),
]
QWEN_1B5 = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
MIXTURE = {
    **QWEN_1B5,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
ROOT = Path(__file__).parents[3]
QWEN_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 12, "num_experts": 4, "num_experts_per_tok": 2}
QWEN_7B = {
    **QWEN_1B5,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN_32B = {
    **QWEN_7B,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def shape_of(config: dict[str, Any]) -> ModelShape:
    return counted(AutoConfig.for_model(**config))


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class TestCounts:
    @pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
    def test_parameters_are_torch_s(self, config: Any, tmp_path: Path) -> None:
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert read_shape(tmp_path).parameters == count(model)

    def test_published_sizes(self) -> None:
        shape = shape_of(QWEN_1B5)
        assert (shape.parameters, shape.backbone) == (1_543_714_304, 1_543_714_304)
        assert shape_of(LLAMA_70B).parameters == 70_553_706_496
        assert shape.kv_per_token == 2 * 28 * 2 * 128
        latent = shape_of({"model_type": "deepseek_v3", "num_hidden_layers": 4})
        assert latent.kv_per_token == 4 * (512 + 64)  # the keys and values of all heads are made of one vector

    @pytest.mark.parametrize(
        ("config", "keys", "experts"),
        [
            (QWEN_NEXT, 3, True),
            ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "moe", "mamba"]}, 1, True),
            ({"model_type": "bamba", "num_hidden_layers": 12, "attn_layer_indices": [2, 5, 8]}, 3, False),
            ({"model_type": "falcon_h1", "num_hidden_layers": 12}, 12, False),
            ({"model_type": "lfm2", "num_hidden_layers": 12, "full_attn_idxs": [2, 5, 8, 10]}, 4, False),
        ],
        ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
    )
    def test_layers_without_keys_keep_a_state(self, config: dict[str, Any], keys: int, experts: bool) -> None:
        shape = shape_of(config)
        assert (shape.keys, shape.experts > 1) == (keys, experts)
        assert shape.state_bytes(2) == shape.convolved * 2 + shape.scanned * 4 > 0
        items = engine_memory(shape, dtype="bfloat16", rows=10, tokens=100, prefill=400, prompt=100)
        assert items["engine states"] == 10 * shape.state_bytes(2)
        assert items["engine prompts"] == 4 * (100 * shape.kv_per_token * 2 + shape.state_bytes(2))

    @pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_next", "mixtral", "gpt_oss"])
    def test_experts_have_a_gate(self, kind: str) -> None:
        assert shape_of({"model_type": kind, "num_hidden_layers": 4}).gated

    def test_queries_of_latent_attention_have_both_parts(self) -> None:
        assert shape_of({"model_type": "deepseek_v3", "num_hidden_layers": 4}).query == 128 * (128 + 64)

    def test_a_matrix_of_a_router_s_shape_is_no_router(self) -> None:
        wide = {"num_experts": 512, "shared_expert_intermediate_size": 512, "num_hidden_layers": 4}
        shape = shape_of({"model_type": "qwen3_next", "moe_intermediate_size": 8, **wide})
        assert shape.routers == 4 * 512 * shape.hidden

    def test_blocks_that_share_weights_hold_them_once(self) -> None:
        shape = shape_of({"model_type": "zamba2"})
        assert shape.dense > shape.parameters > shape.matrices
        assert shape.num_bytes(2, FEW_BITS["nf4"]) > 0

    def test_the_state_of_a_delta_rule_has_its_published_size(self) -> None:
        shape = shape_of(QWEN_NEXT)
        assert shape.state_bytes(2) == 9 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 4 * 2)

    @pytest.mark.parametrize(
        "config",
        [Mamba2Config(num_hidden_layers=8), BambaConfig(num_hidden_layers=8, attn_layer_indices=[3])],
        ids=lambda config: config.model_type,
    )
    def test_states_of_models_without_attention(self, config: Any, tmp_path: Path) -> None:
        config.save_pretrained(tmp_path)
        shape = read_shape(tmp_path)
        heads, width, groups, size = (128, 64, 8, 128) if config.model_type == "mamba2" else (128, 64, 1, 256)
        inner = heads * width
        states = (8 - shape.keys) * (inner * size * 4 + (inner + 2 * groups * size) * 4 * 2)
        assert shape.state_bytes(2) == states
        items, longer = (engine_memory(shape, dtype="bfloat16", rows=10, tokens=n, prefill=64) for n in (10**3, 10**6))
        assert items["engine states"] == longer["engine states"] == 10 * states
        assert (items == longer) == (shape.keys == 0)

    @pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
    @pytest.mark.parametrize("alphabet", ["ascii", "bytes", "0123456789+="])
    def test_a_tiny_model_knows_its_size_before_it_is_built(
        self, architecture: Any, alphabet: str, tmp_path: Path
    ) -> None:
        config = TinyModel.Config(
            architecture=architecture, alphabet=alphabet, hidden=16, heads=2, mlp=24, tied=architecture != "llama"
        )
        directory = TinyModel(config, seed=0).materialize(tmp_path / "model")
        assert config.shape() == read_shape(directory)
        built = AutoModelForCausalLM.from_pretrained(directory)
        assert config.shape().parameters == count(built)

    def test_the_decoder_of_another_model_is_the_one_that_computes(self) -> None:
        text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        inside = {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 300_000}
        shape = shape_of({"model_type": "gemma3", "text_config": {**text, **inside}, "vision_config": vision})
        assert (shape.hidden, shape.layers, shape.kv_per_token) == (64, 3, 2 * 3 * 2 * 16)

    def test_a_config_that_no_model_fits_is_told(self, tmp_path: Path) -> None:
        with refused(DataError, "'qwen2'", "RuntimeError"):
            shape_of({**QWEN_1B5, "num_hidden_layers": 1, "num_key_value_heads": 5})
        with refused(DataError, tmp_path / "config.json"):
            read_shape(tmp_path)
        for config in (
            {"model_type": "unknown"},
            {"model_type": "unknown", "auto_map": {"AutoConfig": "configuration.Config"}},  # whose code is not run
            {"model_type": "llama", "hidden_size": 130, "num_attention_heads": 4},
            {**QWEN_1B5, "hidden_size": "wide"},
        ):
            (tmp_path / "config.json").write_text(json.dumps(config))
            with refused(DataError, tmp_path / "config.json"):
                read_shape(tmp_path)


class TestEstimate:
    def test_what_is_held_is_four_times_the_weights(self) -> None:
        shape = shape_of(QWEN_1B5)
        items = memory_plan(TrainedModels(shape), 1024)
        held = sum(number for name, number in items.items() if name.startswith("policy"))
        assert held == 16 * shape.parameters
        wide = memory_plan(TrainedModels(shape, dtype="float64"), 1024)
        assert wide["policy optimizer"] == 2 * items["policy optimizer"]

    def test_ranks_share_what_is_held_and_gather_what_computes(self) -> None:
        shape = shape_of(QWEN_1B5)
        alone, four = (memory_plan(TrainedModels(shape), 1024, SplitModels(shards)) for shards in (1, 4))
        assert all(four[name] == alone[name] // 4 for name in alone if name.startswith("policy"))
        assert four["activations"] == alone["activations"]
        assert "gathered" not in alone
        assert 0 < four["gathered"] < alone["policy weights"]

    def test_a_critic_and_a_reference_come_on_top(self) -> None:
        shape = shape_of(QWEN_1B5)
        items = memory_plan(TrainedModels(shape, ("critic", "policy"), {"reference": shape}), 1024)
        assert items["critic weights"] == 4 * (shape.backbone + shape.hidden)
        assert items["reference weights"] == items["policy weights"]
        assert "reference gradients" not in items

    def test_an_adapter_trains_little(self) -> None:
        shape = shape_of(QWEN_1B5)
        full, adapted = (memory_plan(TrainedModels(shape, adapter=a), 1024) for a in (None, Adapter(16)))
        assert adapted["policy optimizer"] == 8 * shape.adapter(16) < full["policy optimizer"] / 50
        assert adapted["policy weights"] - full["policy weights"] == 4 * shape.adapter(16)
        upper = memory_plan(TrainedModels(shape, adapter=Adapter(16, 7)), 1024)
        assert upper["policy optimizer"] * 4 == adapted["policy optimizer"]
        assert 0.25 < upper["activations"] / adapted["activations"] < 0.4
        beside = memory_plan(TrainedModels(shape, ("policy", "critic"), adapter=Adapter(16, 7)), 1024)
        assert beside["activations"] == adapted["activations"]

    def test_a_base_in_bfloat16_takes_half(self) -> None:
        shape = shape_of(QWEN_1B5)
        models = TrainedModels(shape, adapter=Adapter(16), dtype="bfloat16")
        wide, narrow = (memory_plan(replace(models, frozen_dtype=name), 1024) for name in ("float32", "bfloat16"))
        assert wide["policy weights"] - narrow["policy weights"] == 2 * shape.parameters
        assert narrow["policy optimizer"] == wide["policy optimizer"]
        assert narrow["float32 head"] == 4 * shape.embedding
        assert "gathered" not in narrow  # autocast has nothing to cast
        assert "gathered" in wide
        full = memory_plan(TrainedModels(shape, frozen={"reference": shape}, frozen_dtype="bfloat16"), 1024)
        assert full["policy weights"] == 2 * full["reference weights"] == 4 * shape.parameters

    def test_activations_grow_with_tokens_and_shrink_with_checkpoints_and_bfloat16(self) -> None:
        shape = shape_of(QWEN_1B5)

        def of(tokens: int, **how: Any) -> int:
            return memory_plan(TrainedModels(shape, **how), tokens, SplitModels(gpu=2**36))["activations"]

        assert 1.8 < of(16384) / of(8192) < 2.1
        assert of(16384, gradient_checkpointing=True) < of(16384) / 4
        assert 0.5 < of(16384, dtype="bfloat16") / of(16384) < 0.8

    def test_a_cache_holds_every_reply_in_progress(self) -> None:
        shape = shape_of(QWEN_1B5)
        found = engine_memory(shape, dtype="bfloat16", rows=32, tokens=2048)
        assert found == {"engine": 2 * shape.parameters, "engine cache": 32 * 2048 * 28 * 2 * 2 * 128 * 2}

    def test_a_prompt_pass_is_bounded_by_its_budget(self) -> None:
        shape = shape_of(QWEN_32B)

        def items(**how: Any) -> tuple[float, float]:
            found = engine_memory(shape, dtype="bfloat16", rows=32, tokens=2048, device="cuda", **how)
            return found["engine prompts"] / 2**30, found["engine pass"] / 2**30

        assert items(prefill=16384, prompt=1024) == pytest.approx((4.0, 3.0), abs=0.05)
        assert items(prefill=4096, prompt=1024) == pytest.approx((1.0, 0.75), abs=0.05)
        assert items(prefill=16384, prompt=16) == pytest.approx((0.125, 0.15), abs=0.05)  # no more than there are
        assert items(prefill=1024, prompt=4096)[0] == pytest.approx(1.0, abs=0.05)  # one longer prompt is still read

    @pytest.mark.parametrize(
        ("sizes", "how", "rows", "length"),
        [
            ({"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}, {}, 12, 256),
            (
                {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6},
                {"gradient_checkpointing": True},
                12,
                256,
            ),
            # Narrow and short: much to keep for the backward pass, little to multiply. A CPU without bfloat16
            # instructions is a hundred times slower in it than in float32.
            ({"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}, {"dtype": "bfloat16"}, 24, 64),
        ],
    )
    def test_a_real_step_takes_about_as_much(
        self, sizes: dict[str, int], how: dict[str, Any], rows: int, length: int, tmp_path: Path
    ) -> None:
        config = Qwen3Config(**{**SIZES, **sizes, "vocab_size": 4000, "max_position_embeddings": 512}, head_dim=32)
        config.save_pretrained(tmp_path)
        Forked("step", tmp_path / "step.out", measured, tmp_path, how, rows, length).ended()
        grown = int((tmp_path / "grown").read_text())
        items = memory_plan(TrainedModels(read_shape(tmp_path), **how), rows * length)
        assert 0.6 < sum(items.values()) / grown < 1.7, (grown, items)

    @pytest.mark.parametrize(("device", "rows", "prompt"), [("cuda", 16, 256), ("cpu", 8, 1024)])
    def test_a_prompt_pass_takes_about_as_much(self, device: str, rows: int, prompt: int, tmp_path: Path) -> None:
        """Prompts in one piece, as on a GPU; and in pieces, with the scores of a CPU's exact attention."""
        sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 4000}
        Qwen3Config(**{**SIZES, **sizes, "max_position_embeddings": 1024}, head_dim=32).save_pretrained(tmp_path)
        Forked("pass", tmp_path / "pass.out", measured_pass, tmp_path, device, rows, prompt).ended()
        grown = int((tmp_path / "grown").read_text())
        how: dict[str, Any] = {"dtype": "float32", "rows": rows, "tokens": prompt, "device": device}
        items = engine_memory(read_shape(tmp_path), **how, prefill=rows * prompt, prompt=prompt)
        assert 0.7 < (items["engine prompts"] + items["engine pass"]) / grown < 1.5, (grown, items)


def measured_pass(model_dir: Path, device: str, rows: int, prompt: int) -> None:
    """Writes by how many bytes this process grows at most while an engine reads so many prompts."""
    AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(model_dir)).save_pretrained(model_dir)
    decoder = Decoder(model_dir, dtype=torch.float32, device="cpu", exact=device == "cpu")
    if device == "cuda":
        decoder.reads_whole, decoder.layers = True, None
    prompts = [np.full(prompt, 3 + row, np.int32) for row in range(rows)]
    with torch.inference_mode():
        decoder.read([each[:40] for each in prompts])
        rise = memory_rise()
        decoder.read(prompts)
    (model_dir / "grown").write_text(str(rise()))


def measured(model_dir: Path, how: dict[str, Any], rows: int, length: int) -> None:
    """Writes by how many bytes this process grows at most, over an engine, a small update, which fills the optimizer,
    and one of so many rows."""
    AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(model_dir)).save_pretrained(model_dir)
    small, large = (make_batch(lengths=lengths, advantages=0.3) for lengths in ((8,), (length,) * rows))
    rise = memory_rise()
    engine = make_engine(model_dir, Parts((Reinforce(),)), max_tokens_per_micro_batch=10**6, **how)
    for batch in (small, large):
        engine.update("policy", batch, engine.algorithm.objectives[0])
    (model_dir / "grown").write_text(str(rise()))


# --------------------------------------------------------------------------- plan and refusal


def config_of(tmp_path: Path, said: dict[str, Any] = QWEN_1B5, **changes: Any) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(said))
    return config_from_mapping(
        {
            "model": {"kind": "hf", "path": str(tmp_path)},
            "tasks": {"train": {"kind": "arithmetic"}},
            "rewards": ["exact"],
            "schedule": STEP,
            **({"engine": {"dtype": "bfloat16", "sampling": {"max_new_tokens": 1024}}} | changes),
        }
    )


def recipe(tmp_path: Path, name: str, shape: dict[str, Any], *overrides: str) -> RunConfig:
    """A recipe on a model of this shape, with rows of its own."""
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    (tmp_path / "model.safetensors").touch()
    rows = [f"tasks.{name}.path={tmp_path / 'rows.jsonl'}" for name in ("train", "test")]
    return load_config(ROOT / "recipes" / f"{name}.yaml", [f"model.path={tmp_path}", *rows, *overrides])


STEP = {"groups_per_step": 32, "group_size": 8}
HUGE = Machine(2**50, (2**50,))
ADAPTED = {"lora": {"rank": 16}, "frozen_dtype": "bfloat16", "gradient_checkpointing": True}


class TestPlan:
    def test_the_batch_is_cut_into_mini_batches_ranks_and_micro_batches(self, tmp_path: Path) -> None:
        train = {"sequence_parallel": 2, "max_tokens_per_micro_batch": 8192}
        config = config_of(tmp_path, algorithm={"kind": "grpo", "mini_batches": 4, "epochs": 2}, train=train)
        batch = plan_run(config, 1, HUGE, ranks=8).stages[0].batch
        assert (batch.sequences, batch.mini_batches, batch.epochs, batch.data_ranks) == (256, 4, 2, 4)
        assert (batch.sequences_per_data_rank, batch.tokens_per_sequence) == (16, 2048)
        assert batch.micro_batches == 2  # two ranks take 16384 tokens together, eight sequences

    def test_roles_follow_from_the_algorithm(self, tmp_path: Path) -> None:
        def roles(**algorithm: Any) -> set[str]:
            memory = plan_run(config_of(tmp_path, algorithm=algorithm), 1, HUGE).text.stages[0].memory
            assert memory is not None
            return {name.split()[0] for name in memory["each rank"] if name.endswith("weights")}

        assert roles(kind="grpo") == {"policy"}
        assert roles(kind="grpo", kl={"coef": 0.1}) == {"policy", "reference"}
        assert roles(kind="ppo") == {"policy", "critic"}

    def test_the_policys_own_weights_as_a_teacher_are_copies_where_they_differ(self, tmp_path: Path) -> None:
        """The current ones are the policy's model, and under a new adapter so are the initial ones. An average has the
        policy's dtype and is saved; initial weights have `frozen_dtype`."""

        def weights(kind: str, coef: float = 0.0, **train: Any) -> tuple[dict[str, float], float]:
            teacher = {"weights": kind, "context": "{prompt}{answer}"}
            config = config_of(
                tmp_path,
                algorithm={"kind": "sdpo", "teacher": teacher, "kl": {"coef": coef}},
                train={"frozen_dtype": "bfloat16", **train},
                checkpoint={"asynchronous": True},
            )
            memory = plan_run(config, 1, Machine(2**50)).text.stages[0].memory
            assert memory is not None
            items = memory["each rank"]
            held = {name.split()[0]: size for name, size in items.items() if name.endswith(" weights")}
            return held, items["checkpoint copy"]

        current, saved = weights("current")
        assert set(current) == {"policy"}
        initial, same = weights("initial")
        assert initial["teacher"] == pytest.approx(current["policy"] / 2, abs=0.1)
        assert same == saved
        average, more = weights("average")
        assert average["teacher"] == current["policy"]
        assert more == pytest.approx(saved + current["policy"], abs=0.2)
        adapter: dict[str, Any] = {"lora": {"rank": 16}}
        assert set(weights("initial", coef=0.1, **adapter)[0]) == {"policy"}

    def test_offload_moves_what_is_held_to_the_host(self, tmp_path: Path) -> None:
        def plan(offload: bool) -> dict[str, Any]:
            config = config_of(tmp_path, train={"cpu_offload": offload}, checkpoint={"asynchronous": True})
            memory = plan_run(config, 1, HUGE, ranks=4).text.stages[0].memory
            assert memory is not None
            return memory

        here, there = plan(False), plan(True)
        assert set(there["each rank"]) == {"gathered", "activations", "total", "device", "ranks"}
        assert there["each rank, host"]["policy optimizer"] == here["each rank"]["policy optimizer"]
        assert there["each rank, host"]["checkpoint copy"] == here["each rank, host"]["checkpoint copy"]
        assert there["needed"]["host"] > here["needed"]["host"]

    @pytest.mark.parametrize(("shape", "gpu"), [(QWEN_1B5, 24), (QWEN_7B, 80)])
    def test_the_preset_fits_its_gpu(self, shape: dict[str, Any], gpu: int, tmp_path: Path) -> None:
        config = recipe(tmp_path, "gpu_24gb", shape)
        machine = Machine(64 * 2**30, (gpu * 10**9,))
        plan_run(config, 1, machine).refuse_too_large()
        memory = plan_run(config, 1, machine).text.stages[0].memory
        assert memory is not None
        assert memory["each rank"]["device"] == memory["each engine"]["device"] == "cuda"  # auto, on this machine
        parts = memory["each rank"]["total"], memory["each engine"]["total"]
        assert memory["needed"]["gpu"] == pytest.approx(sum(parts) + 512, abs=1)
        assert memory["needed"]["gpu"] * MIB > 0.6 * gpu * 10**9
        with refused(ConfigError, "GPU"):
            plan_run(config, 1, Machine(64 * 2**30, (gpu * 10**9 // 2,))).refuse_too_large()

    def test_the_page_about_vllm_has_the_memory_of_its_recipe(self, tmp_path: Path) -> None:
        """docs/vllm.md, in GiB: each item of trainer and engine, and what is needed and available."""
        machine = Machine(64 * 2**30, (24 * 10**9,))
        config = recipe(tmp_path, "lora_vllm", QWEN_1B5)
        memory = plan_run(config, 1, machine).text.stages[0].memory
        assert memory is not None
        items = {**memory["each rank"], **memory["each engine"]}
        page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
        shown = {name: float(gib) for name, gib in re.findall(r"^\| `([a-z0-9 ]+)` \| ([\d.]+) \|", page, re.MULTILINE)}
        total = {"needed": memory["needed"]["gpu"], "available": memory["available"]["gpus"][0]}
        expected = {name: value for name, value in items.items() if isinstance(value, float) and name != "total"}
        assert shown == {name: round(value / 1024, 1) for name, value in {**expected, **total}.items()}
        plan_run(config, 1, machine).refuse_too_large()
        greedy = recipe(tmp_path, "lora_vllm", QWEN_1B5, "engine.cache_gib=14")
        with refused(ConfigError, "engine.gpu_memory_utilization", "engine.cache_gib"):
            plan_run(greedy, 1, machine).refuse_too_large()

    def test_an_engine_over_several_gpus_has_a_part_on_each(self, tmp_path: Path) -> None:
        def weights(*overrides: str) -> float:
            config = recipe(tmp_path, "lora_vllm", QWEN_1B5, *overrides)
            memory = plan_run(config, 1, Machine(64 * 2**30, 4 * (24 * 10**9,))).text.stages[0].memory
            assert memory is not None
            return memory["each engine"]["engine"]

        assert weights("engine.tensor_parallel_size=4") == pytest.approx(weights() / 4, abs=0.1)
        assert weights("engine.data_parallel_size=4") == pytest.approx(weights(), abs=0.1)

    def test_experts_over_gpus_are_held_once(self, tmp_path: Path) -> None:
        """Of a mixture with attention on each GPU: a quarter of the experts, or of the rows of each."""

        def weights(**engine: Any) -> float:
            section = {"kind": "vllm", "device": "cuda", **engine}
            plan = plan_run(config_of(tmp_path, MIXTURE, engine=section), 1, Machine(2**50, (80 * 2**30,) * 4))
            memory = plan.text.stages[0].memory
            assert memory is not None
            return memory["each engine"]["engine"]

        whole, split = weights(), weights(data_parallel_size=4)
        shape = shape_of(MIXTURE)
        experts = shape.sparse * 2 / MIB
        assert whole - split == pytest.approx(experts * 3 / 4, rel=1e-3)
        assert weights(data_parallel_size=4, expert_parallel=True) == split
        with refused(ConfigError, "engine.data_parallel_size", "768"):
            weights(tensor_parallel_size=2, data_parallel_size=5)

    def test_what_is_left_to_the_machine_follows_it(self, tmp_path: Path) -> None:
        on_cpu, on_gpu = (
            plan_run(config_of(tmp_path, engine={}), 1, machine).text.stages[0].memory or {}
            for machine in (Machine(2**50), HUGE)
        )
        assert on_cpu["each rank"]["device"] == on_cpu["each engine"]["device"] == "cpu"
        assert on_gpu["each rank"]["device"] == on_gpu["each engine"]["device"] == "cuda"
        assert on_gpu["each engine"]["engine"] == pytest.approx(on_cpu["each engine"]["engine"] / 2, abs=0.1)
        assert on_gpu["each rank, host"]["loading"] > 0

    def test_what_cannot_fit_is_refused_with_its_biggest_item(self, tmp_path: Path) -> None:
        config = config_of(tmp_path)
        plan_run(config, 1, HUGE).refuse_too_large()
        plan_run(config, 1, Machine()).refuse_too_large()  # nothing is known
        with refused(ConfigError) as caught:
            plan_run(config, 1, Machine(16 * 1024 * MIB)).refuse_too_large()
        assert "policy optimizer" in caught.value.found or "activations" in caught.value.found
        long = config_of(tmp_path, train={"max_tokens_per_micro_batch": 1_000_000}, stages=[{}, {}])
        with refused(ConfigError, "stage 0", "activations", "max_tokens_per_micro_batch"):
            plan_run(long, 1, Machine(2**50, (80 * 2**30,))).refuse_too_large()
        plan_run(config_of(tmp_path, cluster={"kind": "ray", "address": "auto"}), 1, Machine(1)).refuse_too_large()

    def test_check_prints_the_plan_and_refuses(self, tmp_path: Path) -> None:
        tiny_tokenizer("0123456789+=").save_pretrained(tmp_path)
        config = config_of(tmp_path, LLAMA_70B, train={"gradient_checkpointing": True})
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        done = CliRunner().invoke(app, ["check", str(file)])
        assert done.exit_code == 2
        assert yaml.safe_load(done.stdout)["stages"][0]["memory"]["needed"]["host"] > 10**6
        assert "the biggest item is policy optimizer" in done.stderr
        assert "train.lora" in done.stderr

    def test_an_engine_with_a_gpu_of_its_own_is_planned_for(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, QWEN_32B, cluster={"kind": "ray", "ranks": 6, "engines": 2}, train=ADAPTED)
        memory = plan_run(config, 1, Machine(2**42, (80 * 2**30,) * 8), ranks=6).text.stages[0].memory
        assert memory is not None
        rank, engine = memory["each rank"]["total"], memory["each engine"]["total"]
        assert memory["needed"]["gpu"] == pytest.approx(max(rank, engine) + 512, abs=1)
        few = plan_run(config, 1, Machine(2**42, (80 * 2**30,) * 7), ranks=6).text.stages[0].memory
        assert few is not None
        assert few["each engine"]["device"] == "cpu"  # a GPU for each rank, and none left for two engines

    def test_versions_that_travel_are_counted_in_the_engines_type(self, tmp_path: Path) -> None:
        plans = [plan_run(config_of(tmp_path, engine={"dtype": dtype}), 1, HUGE) for dtype in ("float32", "bfloat16")]
        wide, narrow = ((plan.text.stages[0].memory or {})["each rank, host"]["published versions"] for plan in plans)
        assert wide == pytest.approx(2 * 4 * shape_of(QWEN_1B5).parameters / MIB, abs=1)
        assert narrow == pytest.approx(wide / 2, abs=1)

    def test_files_of_weights_for_vllm_are_counted_for_each_engine(self, tmp_path: Path) -> None:
        """Two versions in bfloat16. On a disk if they do not fit into /dev/shm, and none if an adapter is sent."""

        def host(memory: int = 2**50, ranks: int = 1, **changes: Any) -> tuple[float, float]:
            engine = {"kind": "vllm", "device": "cuda", "dtype": "bfloat16"}
            plan = plan_run(config_of(tmp_path, engine=engine, **changes), 1, Machine(memory, HUGE.gpus), ranks=ranks)
            shown = plan.text.stages[0].memory
            assert shown is not None
            return shown.get("each engine, host", {}).get("weights for vLLM", 0), shown["needed"]["host"]

        files = 2 * 2 * shape_of(QWEN_1B5).parameters / MIB
        assert host(ranks=4)[0] == pytest.approx(files, abs=0.1)
        ray = {"kind": "ray", "explorers": 1, "engines": 4}
        one, four = host(cluster={**ray, "engines": 1}), host(cluster=ray)
        assert four[1] - one[1] == pytest.approx(3 * (files + 512), abs=2)
        assert host(memory=30 * 2**30, ranks=1)[0] == one[0]
        assert host(memory=30 * 2**30, ranks=4)[0] == 0
        assert host(train={"lora": {"rank": 4, "push": "adapter"}})[0] == 0

    def test_recorded_routing_is_counted_on_the_host(self, tmp_path: Path) -> None:
        """48 layers, 8 of 128 experts; a byte for each, in the turns and in the experiences."""

        def host(**changes: Any) -> dict[str, float]:
            config = config_of(tmp_path, MIXTURE, **changes)
            memory = plan_run(config, 1, HUGE).text.stages[0].memory or {}
            return {"needed": memory["needed"]["host"], **memory.get("rollouts, host", {})}

        off, on = host(), host(train={"router_replay": "rollout"})
        assert on["recorded routing"] * MIB == 2 * 256 * 2048 * 48 * 8
        assert on["needed"] - off["needed"] == pytest.approx(on["recorded routing"], abs=1)
        ahead = host(train={"router_replay": "rollout"}, schedule={**STEP, "max_staleness": 2})
        assert ahead["recorded routing"] == 3 * on["recorded routing"]
        assert shape_of({**MIXTURE, "num_experts": 256}).routing_per_token == 2 * 48 * 8  # and one for "none"
        config = config_of(
            tmp_path, MIXTURE, train={"router_replay": "rollout"}, schedule={**STEP, "max_staleness": 900}
        )
        with refused(ConfigError, "host memory"):
            plan_run(config, 1, Machine(500 * 2**30, (2**50,))).refuse_too_large()

    def test_this_machine_has_memory(self) -> None:
        assert 2**28 < host_memory() < 2**50
        assert machine().memory == host_memory()


SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class TestLimits:
    """`train.max_tokens_per_micro_batch` and `engine.max_rows`, where they are left out."""

    def limits(self, tmp_path: Path, gib: int, typed: dict[str, Any] = SMOLLM2_135M, **changes: Any) -> tuple[int, int]:
        config = config_of(tmp_path, typed, **{"engine": {}, **changes})
        tokens = [TaskTokens(Lengths(200, 100, "200 prompts"))] * len(config.stage_configs())
        chosen: Any = plan_run(config, 1, Machine(gib * 2**30), 1, tokens).config
        plan_run(chosen, 1, Machine(gib * 2**30), 1, tokens).refuse_too_large()
        return chosen.train.max_tokens_per_micro_batch, chosen.engine.max_rows

    def test_they_follow_from_the_memory_of_the_machine(self, tmp_path: Path) -> None:
        assert self.limits(tmp_path, 64) == (2048, 512)
        assert self.limits(tmp_path, 64, train={"lora": {}})[0] == 4096  # two threads compute a micro-batch each
        tokens, rows = self.limits(tmp_path, 8)
        assert 456 <= tokens <= 2048  # the longest sequence has 200 + 256 tokens
        assert 8 <= rows < 256
        assert self.limits(tmp_path, 24) == self.limits(tmp_path, 24) > (tokens, rows)
        assert self.limits(tmp_path, 64, engine={"max_rows": 3}, train={"max_tokens_per_micro_batch": 5}) == (5, 3)

    def test_a_micro_batch_holds_the_longest_sequence(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, SMOLLM2_135M, engine={})
        for gib in (64, 1):
            tasks = [TaskTokens(Lengths(6000, 100, "one prompt"))]
            chosen: Any = plan_run(config, 1, Machine(gib * 2**30), 1, tasks).config
            assert chosen.train.max_tokens_per_micro_batch == 6256

    def test_threads_of_a_small_model_share_a_micro_batch(self, tmp_path: Path) -> None:
        small = {**SMOLLM2_135M, "vocab_size": 100, "num_hidden_layers": 2}
        assert self.limits(tmp_path, 64, small)[0] == 16384

    def test_a_resumed_run_keeps_them_on_another_machine(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, SMOLLM2_135M, engine={})
        begun = plan_run(config, 1, Machine(8 * 2**30)).config
        saved = yaml.safe_load(to_yaml(begun))
        resumed = plan_run(as_begun(saved, config), 1, Machine(64 * 2**30)).config
        assert resumed.train == begun.train
        assert resumed.engine == begun.engine
        assert plan_run(config, 1, Machine(64 * 2**30)).config.train != begun.train

    def test_a_stage_that_learns_from_rows_has_no_engine_unless_it_evaluates(self, tmp_path: Path) -> None:
        def items(**changes: Any) -> set[str]:
            rows = {"buffer": {"kind": "files"}, "algorithm": {"kind": "sft"}, "rewards": []}
            schedule = {"groups_per_step": 8, "group_size": 1}
            config = config_of(tmp_path, SMOLLM2_135M, engine={}, **{**rows, "schedule": schedule, **changes})
            memory = plan_run(config, 1, Machine(2**36)).text.stages[0].memory
            assert memory is not None
            return {*memory["each rank"], *memory.get("each engine", {})}

        assert not {"published versions", "engine"} & items()
        evaluated = {"evaluation": {"taskset": "train"}, "rewards": ["exact"]}
        assert {"published versions", "engine"} <= items(**evaluated)


class TestAnotherMachine:
    """`check --machine FILE`."""

    def test_a_file_describes_it(self, tmp_path: Path) -> None:
        file = tmp_path / "machine.yaml"
        file.write_text("memory: 1 TiB\ngpus: 8\ngpu_memory: 80GB\nranks: 8\n")
        assert read_machine(file) == Machine(2**40, (80 * 10**9,) * 8, 8)
        file.write_text("memory: 1000000\n")
        assert read_machine(file) == Machine(10**6, (), 1)

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("memory: 3 GiB\ngpu: 8\n", "gpus"),  # the key that is meant
            ("memory: 3 bits\n", "no unit 'bits'"),
            ("gpus: 1\ngpu_memory: 80GB\n", "memory"),
            ("memory: 1GB\ngpus: 1\n", "give both"),
        ],
    )
    def test_a_file_that_does_not_is_refused(self, text: str, part: str, tmp_path: Path) -> None:
        (tmp_path / "machine.yaml").write_text(text)
        with refused(ConfigError, part):
            read_machine(tmp_path / "machine.yaml")

    def test_32b_on_eight_gpus(self, tmp_path: Path) -> None:
        """The plans of docs/memory.md, whose figures they are."""
        tiny_tokenizer("0123456789+=").save_pretrained(tmp_path)
        file, there = tmp_path / "run.yaml", tmp_path / "machine.yaml"
        there.write_text("memory: 1 TiB\ngpus: 8\ngpu_memory: 80 GiB\nranks: 8\n")

        def checked(**changes: Any) -> tuple[int, dict[str, Any], str]:
            changes["train"] = {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 8192} | changes["train"]
            engine = {"max_rows": 32, "max_context": 2048, "prefill_tokens": 4096, "sampling": {"max_new_tokens": 1024}}
            tasks = {"train": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}}
            config = config_of(tmp_path, QWEN_32B, engine=engine, tasks=tasks, **changes)
            file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
            done = CliRunner().invoke(app, ["check", str(file), "--machine", str(there)])
            return done.exit_code, yaml.safe_load(done.stdout)["stages"][0]["memory"], done.stderr

        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1" * 1020, "answer": "2"}) + "\n")
        number = shape_of(QWEN_32B).parameters
        code, memory, error = checked(train={})
        assert code == 2
        columns = [figures(memory)]
        rank = memory["each rank"]
        assert rank["ranks"] == 8
        assert rank["policy optimizer"] * MIB == pytest.approx(number, rel=1e-3)  # 8 N over 8 ranks
        assert memory["each engine"]["engine"] * MIB == pytest.approx(2 * number, rel=1e-3)
        assert memory["each engine"]["engines"] == 8
        assert memory["each rank, host"]["weights received"] * MIB == pytest.approx(2 * 2 * 152064 * 5120, rel=1e-3)
        assert "of the memory of a GPU" in error
        ray = {"kind": "ray", "ranks": 6, "engines": 2}
        code, memory, _ = checked(train={}, cluster=ray)
        assert code == 2
        columns.append(figures(memory))
        code, memory, _ = checked(train={"cpu_offload": True}, cluster=ray)
        assert code == 0
        offloaded = memory["each rank"]["total"] / 1024, memory["needed"]["host"] / 1024
        code, memory, error = checked(train=ADAPTED, cluster=ray)
        assert (code, error) == (0, "")
        columns.append(figures(memory))
        assert memory["each rank"]["policy weights"] * MIB == pytest.approx(2 * number / 6, rel=0.02)
        assert memory["needed"]["gpu"] == pytest.approx(memory["each engine"]["total"] + 512, abs=1)
        page = (ROOT / "docs/memory.md").read_text().partition("## Another machine")[2]
        rows = [line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| ")]
        written = [[re.findall(r"[0-9]+\.[0-9]", cell) for cell in row] for row in rows]
        for row, numbers in zip(written[1:], zip(*columns, strict=True), strict=True):
            assert [[f"{number:.1f}" for number in cell] for cell in numbers] == row
        assert f"{offloaded[0]:.1f}\non its GPU, and all processes together {offloaded[1]:.0f} GiB" in page


def figures(memory: dict[str, Any]) -> list[list[float]]:
    """GiB by row of the table in docs/memory.md."""
    rank, engine = ({name: memory[each].get(name, 0) / 1024 for name in names} for each, names in ITEMS.items())
    head = [rank["float32 head"]] if rank["float32 head"] else []
    return [
        [rank["policy weights"]],
        [rank["policy gradients"] + rank["policy optimizer"]],
        [rank["gathered"]],
        [rank["activations"], *head],
        [rank["total"]],
        [engine["engine"]],
        [engine["engine cache"]],
        [engine["engine prompts"], engine["engine pass"]],
        [engine["total"]],
        [memory["needed"]["gpu"] / 1024],
    ]


HELD = ("policy weights", "policy gradients", "policy optimizer", "float32 head", "gathered", "activations", "total")
ITEMS = {"each rank": HELD, "each engine": ("engine", "engine cache", "engine prompts", "engine pass", "total")}


def test_a_stage_with_an_engine_of_another_kind_leaves_the_limits_of_the_others() -> None:
    stages = [{"schedule": {"steps": 1}}, {"engine": {"kind": "scripted", "replies": [[1]]}}]
    chosen: Any = plan_run(configured(stages=stages), 1, Machine(1 << 34)).config
    assert chosen.engine.max_rows > 0


@pytest.mark.parametrize(
    "stage",
    [
        {"engine": {"kind": "torch"}},  # the run's has no such limit
        {"train": {"max_tokens_per_micro_batch": None}},
        {"engine": {"kind": "torch"}, "train": {"max_tokens_per_micro_batch": 777}},
    ],
)
def test_stages_train_with_the_limits_that_are_saved(stage: dict[str, Any]) -> None:
    """A resumed run and a replay read the saved ones."""
    scripted = {"kind": "scripted", "replies": [[1]]}
    for engine in (scripted, {"kind": "torch"}):
        plan = plan_run(configured(engine=engine, stages=[{"schedule": {"steps": 1}}, stage]), 1, Machine(1 << 33))
        assert [planned.config for planned in plan.stages] == [*plan.config.stage_configs()]
