"""The contract tests of a train engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivium.loops import prepare_mini_batch
from trivium.protocols import MeasuringEngine, TrainEngine
from trivium.testing.promises import require, same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from trivium.types import Batch, Metrics

_Weights = Mapping[str, torch.Tensor]


def check_train_engine(make: Callable[[], TrainEngine], batch: Batch, directory: Path) -> None:
    """A train engine scores and updates the current weights, exports and offers them, and continues bit for bit from
    what it saved, also if it trains while the files are written.

    `make()` builds an engine on which `prepare` was not called; every one starts from the same models. `batch` has the
    columns that the objectives of its algorithm need. `directory` is an empty directory to save in.
    """
    engine, again = make(), make()
    try:
        engine.prepare()
        _check_scores(engine, batch)
        _check_update(engine, batch)
        _check_offer(engine)
        _check_saves(engine, again, batch, directory)
    finally:
        engine.close()
        again.close()


def _check_scores(engine: TrainEngine, batch: Batch) -> None:
    scores = [np.asarray(array) for array in engine.score(batch, "old")]
    lengths = [len(array) for array in scores]
    require(lengths == batch.lengths, f"score returns one number for each token of each experience, not {lengths}")
    for scored, experience in zip(scores, batch.experiences, strict=True):
        require(bool(np.isfinite(scored).all()), "scores are finite")
        require(not scored[~experience.response_mask].any(), "scores are 0 where no token is trained")


def _check_update(engine: TrainEngine, batch: Batch) -> None:
    version, before, measured = engine.version, _weights(engine), dict[str, float]()
    if isinstance(engine, MeasuringEngine):
        objective = engine.algorithm.objectives[0]
        measured = engine.measure(objective.role, prepare_mini_batch(engine, batch, objective, 0), objective)
        require(_same(_weights(engine), before), "measure does not change the weights")
    metrics = _updated(engine, batch)
    require(all(np.isfinite(value) for value in metrics.values()), "metrics of an update are finite")
    for name, value in measured.items():
        same = name in metrics and np.isclose(metrics[name], value, rtol=1e-6)
        require(bool(same), f"measure returns what update would report, also for {name}")
    after = _weights(engine)
    require([*after] == [*before], "export_weights yields the same names in the same order after an update")
    require(not _same(after, before), "update changes the weights")
    require(engine.version == version, "update leaves version to the train step")


def _check_offer(engine: TrainEngine) -> None:
    """The names of the weights on the channel, if the engine has one; their dtype may be narrower."""
    channel = engine.settings.channel
    if channel is None or not engine.offer_weights().delivered:
        return
    offered = {name: tuple(tensor.shape) for name, tensor in channel.collect(engine.version)}
    exported = {name: tuple(tensor.shape) for name, tensor in engine.export_weights()}
    require(offered == exported, "offer_weights offers under its version what export_weights yields")


def _check_saves(engine: TrainEngine, again: TrainEngine, batch: Batch, directory: Path) -> None:
    engine.version += 1
    before, copies = _weights(engine), list[int]()
    for name in ("first", "second"):
        (directory / name).mkdir()
    engine.save(directory / "first")

    def train_on() -> None:
        """Trains while the second checkpoint is written. `save` may leave the call out."""
        copies.append(engine.version)
        _updated(engine, batch)

    engine.save(directory / "second", train_on)
    require(len(copies) <= 1, "save calls on_copied at most once")
    again.load(directory / "first")
    require(again.version == engine.version, "load restores the version, also without prepare")
    require(_same(_weights(again), before), "load restores the weights to the bit")
    ahead = _weights(engine) if copies else _after_update(engine, batch)
    require(_same(_after_update(again, batch), ahead), "an update after load is the one that followed the save")
    engine.load(directory / "second")
    require(_same(_weights(engine), before), "save writes the state from before on_copied, whatever is trained later")
    require(_same(_after_update(engine, batch), ahead), "an update after load is the one that followed the save")


def _updated(engine: TrainEngine, batch: Batch) -> Metrics:
    """The metrics of one update of each objective."""
    metrics: dict[str, float] = {}
    for objective in engine.algorithm.objectives:
        metrics |= engine.update(objective.role, prepare_mini_batch(engine, batch, objective, 0), objective)
    return metrics


def _after_update(engine: TrainEngine, batch: Batch) -> _Weights:
    _updated(engine, batch)
    return _weights(engine)


def _weights(engine: TrainEngine) -> _Weights:
    exported: list[tuple[str, Any]] = [*engine.export_weights()]
    names = [name for name, _ in exported]
    require(len({*names}) == len(names), "export_weights yields each name once")
    return {name: tensor.detach().clone() for name, tensor in exported}


def _same(one: _Weights, other: _Weights) -> bool:
    return one.keys() == other.keys() and all(same_bits(tensor, other[name]) for name, tensor in one.items())
