"""Layers that are split over ranks: what a rank holds, checkpoints that continue in another layout, and that the
comparison with one process would detect a gradient that is reduced over the wrong ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_counts import FULL
from hybrid_parts import HYBRID_OF, random_hybrid
from moe_parts import mixture
from rank_parts_of_splitting import (
    ADAPTER,
    FAULTS,
    KEPT,
    LAYOUTS,
    RESUMED,
    SPLIT_LIKE,
    SPLIT_MODELS,
    TOKENS,
    Step,
    engine_of,
    head_numbers,
    layouts_of,
    on_ranks,
    planned_part,
    step,
)
from rank_processes import run_ranks
from training_parts import SIZE, random_model
from transformers import AutoConfig, PreTrainedModel, Qwen3MoeConfig

from trivium.models.heads.vocabulary_part import WHOLE
from trivium.planning.parallel import EXPERT_MODELS
from trivium.training.engine import TorchTrainEngine

pytestmark = pytest.mark.timeout(1200)  # the ranks of all tests run in the first one
SIZES = (2, 4)
TRIED_MODELS = [kind for kind in SPLIT_MODELS if layouts_of(kind)]
EXPERT_SIZES = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 4}
"""Of all types, so that config.json has the size of experts whichever key the type reads. The memory plan counts no
shared expert."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("split")
    sizes: dict[str, Any] = {**SIZE, "vocab_size": 34, "head_dim": 4, "moe_intermediate_size": 14, "num_experts": 6}
    random_model(Qwen3MoeConfig(**sizes, num_experts_per_tok=2), seed=0, scale=8.0).save_pretrained(directory / "model")
    for kind in TRIED_MODELS:
        small_model(kind).save_pretrained(directory / kind)
    return directory


def small_model(kind: str) -> PreTrainedModel:
    """A random model of a type without recurrent layers."""
    if kind in EXPERT_MODELS:
        return mixture(kind, **EXPERT_SIZES)
    config: Any = AutoConfig.for_model(kind, **{**SIZE, "vocab_size": 40, "head_dim": 4, "pad_token_id": 0})
    return random_model(config, seed=0, scale=6.0)


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[Step]:
    engine = engine_of(directory, average=True)
    first = step(engine)
    engine.save(directory / "alone")
    return [first, step(engine)]


@pytest.fixture(scope="module")
def engine(directory: Path) -> TorchTrainEngine:
    """Of one process, to load checkpoints."""
    return engine_of(directory, average=True)


@pytest.fixture(scope="module")
def found(directory: Path, alone: list[Step], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return run_ranks(SIZES, on_ranks, tmp_path_factory.mktemp("ranks") / "split", directory, deadline_s=960.0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_exact(size: int, layout: str, found: dict[int, list[Any]], alone: list[Step]) -> None:
    assert found[size][0][layout].is_whole()
    assert found[size][0][layout].distance(alone[0]) < 1e-9


@pytest.mark.parametrize(("size", "layout"), RESUMED)
def test_a_checkpoint_continues_in_another_layout(
    size: int, layout: str, found: dict[int, list[Any]], alone: list[Step], engine: TorchTrainEngine, directory: Path
) -> None:
    resumed = found[size][0][f"{layout} resumed"]
    assert resumed.is_whole()
    assert resumed.distance(alone[1]) < 1e-9
    engine.load(directory / f"{size} {layout}")
    assert step(engine).distance(alone[1]) < 1e-9


@pytest.mark.parametrize("kind", TRIED_MODELS)
def test_each_type_of_models_is_split_exactly(kind: str, found: dict[int, list[Any]], directory: Path) -> None:
    alone = step(engine_of(directory, model=kind))
    layouts = layouts_of(kind)
    distances = {name: found[2][0][f"{kind} {name}"].distance(alone) for name in layouts}
    assert max(distances.values()) < 1e-9, distances
    assert found[2][0][f"{kind} {layouts[0]}"].norms.keys() == alone.norms.keys()  # the critic
    for name in layouts:
        assert found[2][0][f"{kind} {name} part"] == pytest.approx(
            planned_part(directory / kind, 2, **LAYOUTS[name]), abs=0.02
        )


def test_an_adapter_learns_beside_experts_on_other_ranks(found: dict[int, list[Any]], directory: Path) -> None:
    alone = step(engine_of(directory, lora=ADAPTER))
    assert all(ranks[0]["adapter"].distance(alone) < 1e-9 for size, ranks in found.items() if FULL or size == 4)


def test_process_groups_have_one_thread(found: dict[int, list[Any]]) -> None:
    """Two threads of a group of torch write the same string without a lock, and free its memory twice."""
    assert all(rank["threads"] == {1} for ranks in found.values() for rank in ranks)


def test_each_rank_holds_its_part(found: dict[int, list[Any]]) -> None:
    for size, ranks in found.items():
        for layout in LAYOUTS:
            parts = [rank[f"{layout} part"] for rank in ranks]
            assert 1 <= sum(parts) < 1.03, "norms and routers alone are whole on several ranks"
            assert max(parts) < 1.35 / size  # experts and rows do not divide evenly


def test_a_split_output_layer_gives_the_numbers_of_the_whole(found: dict[int, list[Any]]) -> None:
    for expected, number in ((head_numbers(WHOLE, TOKENS, kept), number) for number, kept in enumerate((None, KEPT))):
        for rank in (rank for ranks in found.values() for rank in ranks):
            for name, value in rank["head"][number].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_gradient_is_detected(fault: str, found: dict[int, list[Any]], alone: list[Step]) -> None:
    assert found[2][0][fault].distance(alone[0]) > 1e-3


@pytest.mark.parametrize(("layout", "kind"), [(name, kind) for name, kinds in SPLIT_LIKE.items() for kind in kinds])
def test_a_type_that_is_not_tried_is_split_like_one_that_is(layout: str, kind: str) -> None:
    """Its modules have the plans and the parameters of that one's."""
    tried = [modules_of(other, layout) for other in SPLIT_LIKE[layout][kind]]
    assert not any(other in SPLIT_LIKE[layout] for other in SPLIT_LIKE[layout][kind])
    modules = modules_of(kind, layout)
    assert modules
    for name, module in modules.items():
        assert module in [others.get(name) for others in tried], name


def modules_of(kind: str, layout: str) -> dict[str, tuple[set[tuple[str, str]], set[str]]]:
    """The plan and the names of the parameters of each module of a layer that ranks split; sharded, of each recurrent
    module."""
    model = random_hybrid(HYBRID_OF[kind]) if kind in HYBRID_OF else small_model(kind)
    plans = {"tensor": model.config.base_model_tp_plan, "expert": model.config.base_model_ep_plan}
    plan = {name.removeprefix("layers.*."): style for name, style in (plans.get(layout) or {}).items()}
    names = {name.partition(".")[0] for name in plan} if layout in plans else {"mamba", "conv"}
    held = {name.split(".", 3)[3] for name, _ in model.named_parameters() if name.startswith("model.layers.")}
    used = {(each, style) for each, style in plan.items() if any(f"{one}.".startswith(f"{each}.") for one in held)}
    modules = {
        name: (
            {(each, style) for each, style in used if each.startswith(f"{name}.")},
            {each for each in held if each.startswith(f"{name}.")},
        )
        for name in names
    }
    return {name: (styles, parameters) for name, (styles, parameters) in modules.items() if parameters}
