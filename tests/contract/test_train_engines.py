"""Every train engine that ships keeps the contract; broken ones are told which promise they break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_parts import Parts, Reinforce, SquaredError, make_batch, write_model

from trivium.protocols import EngineSettings, Objective, TrainEngine
from trivium.sync.memory import MemoryChannel
from trivium.testing import check_train_engine
from trivium.training.distributed.data_parallel import DistributedTrainEngine, RankVerbs
from trivium.training.engine import TorchTrainEngine
from trivium.training.role_models import ModelSources
from trivium.types import AnyArray, Batch, Metrics

PPO = Parts((Reinforce(), SquaredError()), frozenset({"old"}))
BATCH = make_batch(advantages=0.5, returns=0.2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def engine_of(model_dir: Path, kind: type[TorchTrainEngine] = TorchTrainEngine) -> TorchTrainEngine:
    engine = kind(
        TorchTrainEngine.Config(device="cpu", optimizer={"lr": 1e-2}),
        model_dir=model_dir,
        algorithm=PPO,
        temperature=0.8,
        max_response_length=32,
        total_steps=10,
        seed=0,
        threads=1,
    )
    engine.settings = EngineSettings(MemoryChannel(), "bfloat16")
    return engine


class OneRank:
    """A group of one rank in this process."""

    data_size = 1

    def __init__(self, engine: TorchTrainEngine) -> None:
        self._verbs = RankVerbs(engine)

    def run_on_all_ranks(self, method: str, *args: object) -> Any:
        return getattr(self._verbs, method)(*args)

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], *args: object) -> list[Any]:
        return [getattr(self._verbs, method)(*shares[0], *args)]

    def close(self) -> None:
        self._verbs.engine.close()


def distributed(model_dir: Path) -> DistributedTrainEngine:
    rank = engine_of(model_dir)
    engine = DistributedTrainEngine(OneRank(rank), PPO, max_response_length=32)
    engine.settings = rank.settings
    return engine


@pytest.mark.parametrize("make", [engine_of, distributed])
def test_shipped_engines(make: Callable[[Path], TrainEngine], model_dir: Path, tmp_path: Path) -> None:
    check_train_engine(lambda: make(model_dir), BATCH, tmp_path)


class ScoresPrompts(TorchTrainEngine):
    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        return [scored + np.float32(1) for scored in super().score(batch, what)]


class LearnsWhileMeasuring(TorchTrainEngine):
    def measure(self, role: str, batch: Batch, objective: Objective, *rest: Any, **options: Any) -> Metrics:
        return self.update(role, batch, objective)


class LearnsNothing(TorchTrainEngine):
    def update(self, role: str, batch: Batch, objective: Objective, *rest: Any) -> Metrics:
        return self.measure(role, batch, objective)


class CountsSteps(TorchTrainEngine):
    def update(self, role: str, batch: Batch, objective: Objective, *rest: Any) -> Metrics:
        metrics = super().update(role, batch, objective, *rest)
        self.version += 1
        return metrics


class ForgetsTheOptimizer(TorchTrainEngine):
    def load(self, directory: Path) -> None:
        super().load(directory)
        version, self._learners = self.version, {}
        self._open(ModelSources(*(directory / role for role in ("policy", "critic", "reward"))))
        self.version = version


class CopiesTooLate(TorchTrainEngine):
    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        if on_copied is not None:
            on_copied()
        super().save(directory)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (ScoresPrompts, "scores are 0 where no token is trained"),
        (LearnsWhileMeasuring, "measure does not change the weights"),
        (LearnsNothing, "update changes the weights"),
        (CountsSteps, "update leaves version to the train step"),
        (ForgetsTheOptimizer, "an update after load is the one that followed the save"),
        (CopiesTooLate, "save writes the state from before on_copied"),
    ],
)
def test_a_broken_engine_is_told_its_promise(
    kind: type[TorchTrainEngine], promise: str, model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=promise):
        check_train_engine(lambda: engine_of(model_dir, kind), BATCH, tmp_path)
