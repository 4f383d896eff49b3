"""A train engine's files: plain, of bounded size, the same from and for any number of ranks; what is written beside
training is what there was when it began."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from example_counts import FULL
from failing import refused
from rank_processes import run_ranks
from training_parts import Parts, Reinforce, SquaredError, make_batch, write_model
from transformers import AutoModel, AutoModelForCausalLM

from trivium.foundation.errors import RoleFailed, RunDirError
from trivium.loops import prepare_mini_batch
from trivium.protocols import EngineSettings, TrainEngine
from trivium.training import snapshot as saving
from trivium.training.distributed.data_parallel import DistributedTrainEngine, RankVerbs
from trivium.training.distributed.ranks import ALONE, Ranks, join_ranks
from trivium.training.distributed.torchrun import TorchrunRanks, serve_rank, stop_ranks
from trivium.training.engine import TorchTrainEngine
from trivium.training.snapshot import TensorFile
from trivium.types import SaveStrategy

LIMIT = 3000
"""Bytes of a file: every model and optimizer makes several."""
PPO = Parts((Reinforce(), SquaredError()), frozenset({"old"}))
BATCH = make_batch(advantages=0.5, returns=0.2)
TYPES = ("float64", "float32")
RESUMED = TYPES if FULL else TYPES[:1]
"""Types that another number of ranks resumes: float64 has the closest bound, and both take the same path."""
CLOSE = {"float64": 1e-9, "float32": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}  # as a second one adds no kind of tensor
    (write_model(folder / "model", **one_layer) / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SHARD_BYTES", LIMIT)


def make_engine(folder: Path, dtype: str, ranks: Ranks = ALONE) -> TorchTrainEngine:
    config = TorchTrainEngine.Config(
        device="cpu", dtype=dtype, optimizer={"lr": 0.1, "eps": 1.0, "schedule": "cosine", "warmup_steps": 2}
    )
    engine = TorchTrainEngine(
        config,
        model_dir=folder / "model",
        algorithm=PPO,
        temperature=0.8,
        max_response_length=32,
        total_steps=10,
        seed=0,
        threads=1,
        ranks=ranks,
    )
    engine.prepare()
    return engine


def train(engine: TrainEngine, steps: int) -> list[Mapping[str, float]]:
    rows: list[Mapping[str, float]] = []
    for _ in range(steps):
        for objective in PPO.objectives:
            prepared = prepare_mini_batch(engine, BATCH, objective, 0)
            rows.append({**engine.update(objective.role, prepared, objective), **prepared.metrics})
        engine.version += 1
    return rows


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def begun(engine: TrainEngine, directory: Path) -> Callable[[], None]:
    """Begins to save in a thread, and returns once training may continue. The result completes the save."""
    copied, trained = threading.Event(), threading.Event()

    def on_copied() -> None:
        copied.set()
        assert trained.wait(120)

    saving = ThreadPoolExecutor(1).submit(engine.save, directory, on_copied)
    assert copied.wait(120)

    def end() -> None:
        trained.set()
        saving.result(120)

    return end


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------- one process


def test_large_models_are_plain_directories_of_several_files(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, "float32")
    train(engine, 1)
    engine.save(tmp_path)
    written = files(tmp_path)
    assert {Path(name).suffix for name in written} == {".safetensors", ".json"}
    for stem in ("policy/model", "critic/model", "policy-optimizer", "critic-optimizer"):
        parts = [name for name in written if name.startswith(f"{stem}-0")]
        assert len(parts) > 2
        assert all(len(written[name]) < LIMIT + 2000 for name in parts)  # a header each
    assert "policy/tokenizer.json" in written
    assert "critic/value_head.safetensors" in written
    policy, info = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", output_loading_info=True)
    assert not any(info.values())
    expected = weights(engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in policy.state_dict().items() if name in expected)
    _, info = AutoModel.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(info.values())


def test_small_models_are_one_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SHARD_BYTES", 2**31)
    make_engine(folder, "float32").save(tmp_path)
    assert {name for name in files(tmp_path) if name.startswith("policy")} == {
        "policy/model.safetensors",
        "policy/config.json",
        "policy/generation_config.json",
        "policy/tokenizer.json",
        "policy-optimizer.safetensors",
    }


def test_what_is_written_beside_training_is_what_there_was(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, "float32")
    train(engine, 2)
    engine.save(tmp_path / "now")
    end = begun(engine, tmp_path / "later")
    rows = train(engine, 2)
    assert not (tmp_path / "later").exists()
    end()
    assert files(tmp_path / "later") == files(tmp_path / "now")
    again = make_engine(folder, "float32")
    again.load(tmp_path / "later")
    assert (again.version, train(again, 2)) == (2, rows)
    assert all(torch.equal(tensor, weights(engine)[name]) for name, tensor in weights(again).items())


def test_an_optimizer_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, "float32")
    engine.save(tmp_path)
    for path in tmp_path.glob("critic-optimizer*"):
        path.unlink()
    with refused(RunDirError, "critic-optimizer"):
        engine.load(tmp_path)


def test_a_silent_save_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_SILENT_S", 0.3)
    (tmp_path / "report").write_text('{"beats": 3}')
    with refused(RoleFailed, "rank 0"):
        saving.wait_until_written(tmp_path / "report")


# --------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Resumed:
    """What became of two further steps after a load."""

    rows: list[Mapping[str, float]]
    weights: dict[str, torch.Tensor]


def resumed(engine: TrainEngine, directory: Path) -> Resumed:
    engine.load(directory)
    assert engine.version == 2
    return Resumed(train(engine, 2), weights(engine))


def on_ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    saving.SHARD_BYTES = LIMIT
    strategies = dict(zip(TYPES, (SaveStrategy.SINGLE_PROCESS, SaveStrategy.SINGLE_NODE), strict=True))

    def build(dtype: str) -> tuple[Ranks, TorchTrainEngine]:
        ranks = join_ranks(device="cpu")
        engine = make_engine(folder, dtype, ranks)
        engine.settings = EngineSettings(save_strategy=strategies[dtype])
        return ranks, engine

    if rank > 0:
        serve_rank("cpu", lambda dtype: RankVerbs(build(dtype)[1]))
        return {}
    found: dict[str, Any] = {}
    for dtype in TYPES:
        make: Callable[[], tuple[Ranks, TorchTrainEngine]] = lambda dtype=dtype: build(dtype)  # noqa: E731
        engine = DistributedTrainEngine(TorchrunRanks("cpu", dtype, make), PPO, max_response_length=32)
        engine.prepare()
        train(engine, 2)
        engine.save(folder / f"{dtype}-{size}")
        end = begun(engine, folder / f"{dtype}-{size}-beside")
        found[dtype, "straight on"] = Resumed(train(engine, 2), weights(engine))
        end()
        for other in (1, 2, 4):
            if dtype in RESUMED and (folder / f"{dtype}-{other}").exists() and other != size:
                found[dtype, other] = resumed(engine, folder / f"{dtype}-{other}")
        engine.load(folder / f"{dtype}-1")
        engine.save(folder / f"{dtype}-1-by-{size}")
        second = next((folder / f"{dtype}-1" / "policy").glob("model-00002-of-*")).name
        (folder / f"bad-{size}" / dtype / "policy" / second).mkdir(parents=True)
        with refused(RunDirError) as caught:
            engine.save(folder / f"bad-{size}" / dtype, lambda: None)
        found[dtype, "failed"] = str(caught.value)
    stop_ranks("cpu")
    return found


@pytest.fixture(scope="module")
def played(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    """What became of runs on one, two and four ranks, by their number."""
    found: dict[int, dict[Any, Any]] = {1: {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "SHARD_BYTES", LIMIT)
        engines = {dtype: make_engine(folder, dtype) for dtype in TYPES}
        for dtype, engine in engines.items():
            train(engine, 2)
            engine.save(folder / f"{dtype}-1")
            found[1][dtype, "straight on"] = Resumed(train(engine, 2), weights(engine))
        said = run_ranks([2, 4], on_ranks, tmp_path_factory.mktemp("ranks") / "said", folder)
        for size, by_rank in said.items():
            found[size] = by_rank[0]
            for dtype in RESUMED:
                found[1][dtype, size] = resumed(engines[dtype], folder / f"{dtype}-{size}")
    return found


CASES = [(1, 2), (1, 4), (2, 1), (4, 1), (4, 2)]
"""(ranks that resume, ranks that had saved)."""


@pytest.mark.parametrize("dtype", RESUMED)
@pytest.mark.parametrize(("size", "saved"), CASES)
def test_resumed_on_another_number_of_ranks_it_goes_on_as_it_would_have(
    dtype: str, size: int, saved: int, played: dict[int, dict[Any, Any]]
) -> None:
    """Optimizer state included: moments, counts and the schedule of the learning rate."""
    found, expected = played[size][dtype, saved], played[saved][dtype, "straight on"]
    for mine, theirs in zip(found.rows, expected.rows, strict=True):
        assert mine == pytest.approx(theirs, rel=CLOSE[dtype], abs=CLOSE[dtype])
    for name, tensor in found.weights.items():
        scale = float(expected.weights[name].abs().max())
        torch.testing.assert_close(tensor, expected.weights[name], rtol=CLOSE[dtype], atol=CLOSE[dtype] * scale)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_files_do_not_tell_how_many_ranks_wrote_them(
    dtype: str, size: int, played: dict[int, dict[Any, Any]], folder: Path
) -> None:
    assert files(folder / f"{dtype}-1-by-{size}") == files(folder / f"{dtype}-1")
    assert files(folder / f"{dtype}-{size}-beside") == files(folder / f"{dtype}-{size}")
    assert "rank 1's part" in played[size][dtype, "failed"]  # file 1 is rank 1's, and its place was taken


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_turns_where_the_strategy_says_so(
    size: int, played: dict[int, dict[Any, Any]], folder: Path
) -> None:
    """In float64 one process writes at a time: nobody begins before the one before has written its last file."""
    assert played
    directory = folder / f"float64-{size}"
    stems = ("policy/model", "policy-optimizer", "critic/model", "critic/value_head", "critic-optimizer")
    in_order = [path for stem in stems for path in sorted(directory.glob(f"{stem}*.safetensors"))]
    written = [[path.stat().st_mtime_ns for path in in_order[rank::size]] for rank in range(size)]
    assert all(max(before) <= min(after) for before, after in pairwise(written))
    assert directory.joinpath("engine.json").stat().st_mtime_ns >= max(written[-1])


def test_what_is_read_as_one_file_is_written_as_one() -> None:
    tensors = {name: torch.zeros(4) for name in "abc"}
    assert len(TensorFile("model", tensors).files(20)) == 3
    assert TensorFile("adapter_model", tensors, single=True).files(20) == [
        ("adapter_model.safetensors", ["a", "b", "c"])
    ]
