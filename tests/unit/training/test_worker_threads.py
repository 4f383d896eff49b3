"""Parts of a batch side by side: the sums, the bits and the errors are those of one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from training_parts import Parts, Reinforce, make_batch, make_engine, weights, write_model

from trivium.engines.torch.decoder import Decoder
from trivium.engines.torch.selfcheck import check_decoder
from trivium.foundation.errors import TriviumError
from trivium.models.cpu.worker_threads import WorkerThreads
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Enough tokens for a micro-batch in each of two threads."""
    return make_batch([9 + 7 * row % 23 for row in range(80)], advantages=0.3)


class TestMap:
    def test_results_come_in_order_and_few_are_ahead(self) -> None:
        workers, begun, first = WorkerThreads(2, 2), [], threading.Event()

        def compute(item: int) -> int:
            begun.append(item)
            if item == 0:
                assert first.wait(120)  # until the other worker has done what it may
            elif item == 2:
                first.set()
            return item * item

        assert [*workers.map(compute, range(9))] == [item * item for item in range(9)]
        for taken, _ in enumerate(workers.map(begun.append, range(9, 18))):
            assert len(begun) <= 9 + taken + 3

    def test_the_caller_computes_a_single_item_with_one_torch_thread(self) -> None:
        torch.set_num_threads(2)
        found = [*WorkerThreads(2, 2).map(lambda _: (threading.get_ident(), torch.get_num_threads()), [0])]
        assert found == [(threading.get_ident(), 1)]
        assert torch.get_num_threads() == 2

    def test_an_error_ends_what_runs(self) -> None:
        workers, done = WorkerThreads(2, 2), []

        def compute(item: int) -> None:
            if item == 1:
                raise ValueError("of the second")
            done.append(item)

        with pytest.raises(ValueError, match="of the second"):
            [*workers.map(compute, range(100))]
        number = len(done)
        assert number < 10
        assert [*workers.map(lambda item: item, range(3))] == [0, 1, 2]
        assert len(done) == number

    def test_threads_are_shared_out(self) -> None:
        torch.set_num_threads(2)
        for _ in WorkerThreads(2, 2).map(lambda _: None, range(4)):
            assert torch.get_num_threads() == 1  # what is done with a result takes no core from the next ones
        for number, each in ((2, 1), (1, 2)):
            assert [*WorkerThreads(number, 2).map(lambda _: torch.get_num_threads(), range(4))] == [each] * 4
        assert torch.get_num_threads() == 2
        new: list[int] = []
        thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert new == [2]


def train(
    model_dir: Path, batch: Batch, algorithm: Any = None, **how: Any
) -> tuple[TorchTrainEngine, dict[str, float]]:
    engine = make_engine(model_dir, algorithm, **{"threads": 2, **how})
    metrics = engine.update("policy", batch, engine.algorithm.objectives[0])
    engine.version += 1
    return engine, metrics


def workers_of(engine: TorchTrainEngine) -> Any:
    return engine._learners["policy"].passes.workers


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
@pytest.mark.parametrize("how", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 2}}], ids=str)
def test_an_update_is_that_of_one_thread(name: str, how: dict[str, Any], batch: Batch, tmp_path: Path) -> None:
    model_dir = write_model(tmp_path, name)
    algorithm = Parts((Reinforce(entropy_coef=0.1, needs=frozenset({"advantages", "entropy"})),))
    how = {"dtype": "float64", "optimizer": {"lr": 0.1, "eps": 1.0}, **how}
    (one, expected), (two, metrics) = (train(model_dir, batch, algorithm, threads=n, **how) for n in (1, 2))
    assert workers_of(one) is None
    assert workers_of(two)._pool is not None
    assert metrics == pytest.approx(expected, rel=1e-12)
    before, after = weights(one), weights(two)
    for key in before:
        torch.testing.assert_close(after[key], before[key], rtol=1e-12, atol=1e-12)
    objective = algorithm.objectives[0]
    for ours, theirs in zip(two.score(batch, "old"), one.score(batch, "old"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)  # scores are float32
    measured = [engine.measure("policy", batch, objective, gradient=True) for engine in (one, two)]
    assert measured[1] == pytest.approx(measured[0], rel=1e-12)
    assert two.measure("policy", batch, objective) == pytest.approx(one.measure("policy", batch, objective), rel=1e-12)


def test_the_same_run_gives_the_same_bits_and_goes_on_with_them(model_dir: Path, batch: Batch, tmp_path: Path) -> None:
    whole, metrics = train(model_dir, batch)
    for trial in range(5):
        again, same = train(model_dir, batch)
        assert same == metrics, trial
        assert all(map(torch.equal, weights(again).values(), weights(whole).values())), trial
    again.save(tmp_path)
    resumed = make_engine(model_dir, threads=2)
    resumed.load(tmp_path)
    objective = whole.algorithm.objectives[0]
    assert resumed.update("policy", batch, objective) == whole.update("policy", batch, objective)
    assert all(map(torch.equal, weights(resumed).values(), weights(whole).values()))
    assert all(map(np.array_equal, resumed.score(batch, "old"), whole.score(batch, "old")))


@dataclass(frozen=True)
class Alone(Reinforce):
    """Fails where it is called while it runs, and in the call of that number."""

    fails_in: int = -1
    calls: list[int] = field(default_factory=list)
    running: threading.Lock = field(default_factory=threading.Lock)

    def loss(self, *args: Any) -> Any:
        assert self.running.acquire(blocking=False)
        try:
            self.calls.append(len(self.calls))
            if self.calls[-1] == self.fails_in:
                raise TriviumError("a loss", "an error", "none")
            return super().loss(*args)
        finally:
            self.running.release()


def test_a_loss_is_called_by_one_thread_at_a_time(model_dir: Path, batch: Batch) -> None:
    objective = Alone()
    train(model_dir, batch, Parts((objective,)))
    assert len(objective.calls) == 2


def test_an_error_in_a_worker_leaves_the_weights(model_dir: Path, batch: Batch) -> None:
    objective = Alone(fails_in=1)
    engine = make_engine(model_dir, Parts((objective,)), threads=2)
    before = weights(engine)
    with refused(TriviumError, "an error"):
        engine.update("policy", batch, objective)
    assert all(map(torch.equal, weights(engine).values(), before.values()))
    metrics = engine.update("policy", batch, objective)
    assert metrics == train(model_dir, batch)[1]


@pytest.mark.parametrize("how", [{"max_tokens_per_micro_batch": 2047}, {"threads": 1}], ids=str)
def test_what_memory_or_threads_do_not_allow_goes_one_after_the_other(
    how: dict[str, Any], model_dir: Path, batch: Batch
) -> None:
    assert workers_of(train(model_dir, batch, **how)[0]) is None


def test_few_tokens_and_one_group_stay_together(model_dir: Path) -> None:
    engine, _ = train(model_dir, make_batch(advantages=0.3))
    assert workers_of(engine)._pool is None


def test_rows_of_a_step_have_the_same_bits_on_several_threads(model_dir: Path) -> None:
    def decoder(threads: int) -> Decoder:
        torch.set_num_threads(threads)
        return Decoder(model_dir, dtype=torch.float32, device="cpu", exact=True)

    def logits(decoder: Decoder, rows: int) -> torch.Tensor:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, 31, 9).astype(np.int32) for _ in range(rows)]
        decoder.place(decoder.read(prompts), range(rows))
        taught = rng.integers(3, 31, (50, rows))
        ragged = rng.integers(0, 4, rows)  # rows end at different positions
        steps = [decoder.step(tokens, 9 + np.maximum(0, i - ragged)) for i, tokens in enumerate(taught)]
        return torch.stack(steps)

    one, two = decoder(1), decoder(2)
    assert one.workers is None
    assert two.workers is not None
    with torch.inference_mode():
        check_decoder(two, 64)
        for rows in (8, 72, 128):
            assert torch.equal(logits(one, rows), logits(two, rows)), rows


def test_micro_batches_that_are_too_large_together_go_one_after_the_other(tmp_path: Path) -> None:
    long = make_batch([750, 750, 750, 20], advantages=0.3)
    engine, metrics = train(write_model(tmp_path, max_position_embeddings=750), long, max_tokens_per_micro_batch=2048)
    assert workers_of(engine).number == 2
    assert workers_of(engine)._pool is not None
    longer = make_batch([1050, 1050, 20], advantages=0.3)
    engine, metrics = train(
        write_model(tmp_path / "longer", max_position_embeddings=1050), longer, max_tokens_per_micro_batch=2048
    )
    assert workers_of(engine).number == 2
    assert workers_of(engine)._pool is None
    assert metrics["train/grad_norm/policy"] > 0
