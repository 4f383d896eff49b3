"""Layers with a recurrent state: each sequence of a pack has states of its own, and shared prefixes hand theirs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from hybrid_parts import HYBRIDS, write_hybrid
from prefix_parts import make_batch, sequences
from training_parts import VOCABULARY, Reinforce, make_engine, weights
from transformers import AutoModelForCausalLM

from trivium.foundation.errors import ConfigError
from trivium.models.backbone.load import load_lm
from trivium.models.backbone.packed import Backbone, pack
from trivium.models.backbone.prefixes import Prefixes, Tree
from trivium.models.backbone.sequence_parallel import SequenceGroup
from trivium.models.heads.trained_models import LanguageModel
from trivium.models.weights.lora import LoraConfig, attach, merged_state
from trivium.types import IntArray

CPU = torch.device("cpu")
Many = list[IntArray]


def log_probs(model: LanguageModel, many: Many, tree: Tree | None = None) -> torch.Tensor:
    batch = pack(many, tree=tree)
    inner = torch.cat([torch.arange(len(each)) for each in many]) > 0
    return model(batch, batch.rows[inner])[0]


@pytest.mark.parametrize("name", HYBRIDS)
def test_alone_packed_and_shared_are_equal_and_so_are_their_gradients(name: str, tmp_path: Path) -> None:
    model = LanguageModel(write_hybrid(tmp_path, name), dtype=torch.float64, device=CPU, temperature=0.7)
    assert model.backbone.packs
    assert model.backbone.recurrent
    many = sequences()
    tree = Prefixes(many).tree(range(len(many)))
    assert max(len(path_of(tree, leaf)) for leaf in tree.leaves) == 3
    passes = {"alone": [([each], None) for each in many], "packed": [(many, None)], "shared": [(many, tree)]}
    found: dict[str, list[torch.Tensor]] = {}
    for how, parts in passes.items():
        model.zero_grad()
        numbers = [log_probs(model, *part) for part in parts]
        torch.cat(numbers).sin().sum().backward()
        found[how] = [torch.cat(numbers).detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for how in ("packed", "shared"):
        for one, other in zip(found[how], found["alone"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()))
    assert found["alone"][0].std() > 0.1


def path_of(tree: Tree, leaf: int) -> list[int]:
    return [leaf, *(path_of(tree, tree.segments[leaf].parent) if tree.segments[leaf].parent >= 0 else [])]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_pack_computes_what_transformers_computes_and_a_neighbour_changes_no_bit(name: str, tmp_path: Path) -> None:
    model = LanguageModel(write_hybrid(tmp_path, name), dtype=torch.float32, device=CPU, temperature=1.0)
    many, plain = sequences(), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected: list[torch.Tensor] = []
    with torch.no_grad():
        for tokens in many:
            ids = torch.from_numpy(tokens.astype(np.int64))
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
            expected.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
        found = log_probs(model, many)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)
    other = [many[0], (many[1] + 5) % VOCABULARY, *many[2:]]
    with torch.no_grad():
        changed = log_probs(model, other)
    place = torch.arange(len(found))
    own = (place < len(many[0]) - 1) | (place >= len(many[0]) + len(many[1]) - 2)  # all but those of the second one
    assert torch.equal(found[own], changed[own])
    assert not torch.isclose(found[~own], changed[~own]).all()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_an_update_does_not_depend_on_how_it_is_computed(name: str, tmp_path: Path) -> None:
    write_hybrid(tmp_path, name)
    batch = make_batch(advantages=0.3).select(range(12))
    found: list[Any] = []
    ways: list[dict[str, Any]] = [
        {"share_prefix": False, "max_tokens_per_micro_batch": 1},
        {"share_prefix": True},
        {"share_prefix": True, "max_tokens_per_micro_batch": 70},
        {"share_prefix": True, "gradient_checkpointing": True},
    ]
    for way in ways:
        engine = make_engine(tmp_path, dtype="float64", optimizer={"lr": 0.1, "eps": 1.0}, **way)
        metrics = engine.update("policy", batch, Reinforce())
        found.append((metrics, weights(engine)))
    for metrics, after in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-9, abs=1e-12)
        torch.testing.assert_close(after, found[0][1], rtol=1e-9, atol=1e-9)
    assert max(value for key, value in found[0][0].items() if "grad_norm" in key) > 1e-3


@pytest.mark.parametrize(
    ("name", "projections"),
    [
        ("lfm2", {"in_proj", "out_proj", "q_proj", "w1"}),
        ("qwen3_next", {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"}),
        ("mamba2", {"in_proj"}),
        ("zamba2", {"in_proj", "out_proj"}),
    ],
)
def test_adapters_are_added_to_the_projections_of_recurrent_layers(
    name: str, projections: set[str], tmp_path: Path
) -> None:
    base = load_lm(write_hybrid(tmp_path, name), dtype=torch.float32, attention=None)
    model = attach(load_lm(tmp_path, dtype=torch.float32, attention=None), LoraConfig(rank=2), seed=0)
    adapted = {key.split(".lora_A.")[0].rpartition(".")[2] for key, _ in model.named_parameters() if ".lora_A." in key}
    assert projections <= adapted
    assert name != "zamba2" or "q_proj" not in adapted, "its layers of attention have one weight"
    merged = dict(merged_state(model))
    assert merged.keys() == base.state_dict().keys()


def test_ranks_cannot_share_a_sequence(tmp_path: Path) -> None:
    module: Any = load_lm(write_hybrid(tmp_path, "lfm2"), dtype=torch.float32).base_model
    group: Any = SequenceGroup.__new__(SequenceGroup)
    object.__setattr__(group, "size", 2)
    with refused(ConfigError, "train.sequence_parallel", "2"):
        Backbone(module, group)
