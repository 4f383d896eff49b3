"""TrainEngineWrapper: what Trinity-RFT's Trainer asks of an engine. Users write their own."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

from trivium.errors import TriviumError
from trivium.frontdoors.trinity.experiences import Experiences
from trivium.metrics import declare_missing
from trivium.types import Metrics


class TrainEngineWrapper(ABC):
    """An engine that trains by itself: the Trainer calls these members, and no others. Its constructor is given the
    config that the Trainer was given.

    `prepare` and `train_step` may be `async`; all coroutines of an engine run on one event loop, which is its own.
    """

    @abstractmethod
    def prepare(self) -> Any:
        """Loads what training needs, from the engine's last checkpoint where it has one. Called once, first."""

    @property
    @abstractmethod
    def train_step_num(self) -> int:
        """How many train steps the weights have behind them. As long as it stands, they are those of that step: a
        `train_step` that fails half-way must not leave it behind changed weights."""

    @abstractmethod
    def train_step(self, batch: Experiences) -> Any:
        """One train step, after which `train_step_num` is one more: (whether to go on, metrics), or metrics alone.

        A parameter annotated as a list (`List[Experience]`) gets a list of Experience, any other Experiences.
        """

    @abstractmethod
    def save_checkpoint(self, block_until_saved: bool = False) -> None:
        """Saves everything that `prepare` needs to go on from this step. Called every `checkpoint.save_every` steps, at
        the end, and after a failure; twice for one step is one save."""

    @abstractmethod
    def sync_weight(self) -> None:
        """Method `nccl`: sends the weights to the explorers, through `Synchronizer.set_model_state_dict`."""

    @abstractmethod
    def upload_state_dict(self) -> None:
        """Method `memory`: hands the weights to `Synchronizer.set_model_state_dict`."""

    @abstractmethod
    def save_state_dict(self) -> None:
        """Method `checkpoint`: the same, with the weights or with the directory that they were saved in."""


class EngineCalls:
    """Calls of an engine's methods from threads, plain ones and coroutines."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where coroutines run; None before the first."""

    def __call__(self, method: Callable[..., Any], *args: object, **options: object) -> Any:
        """What the method returns. Blocks."""
        answer = method(*args, **options)
        if not inspect.iscoroutine(answer):
            return answer
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="train-engine", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    def close(self) -> None:
        """Ends the event loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None


def takes_list(method: Callable[..., Any]) -> bool:
    """Whether the first parameter of an engine's `train_step` is annotated as a list."""
    first = next(iter(inspect.signature(method).parameters.values()), None)
    annotation = "" if first is None or first.annotation is first.empty else first.annotation
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return annotation is list or re.match(r"(\w+\.)*(list|List|Sequence)\b", text) is not None


def step_result(engine: object, answer: object) -> tuple[bool, Metrics]:
    """(whether to go on, metrics) of what a `train_step` returned. Metrics that nothing declares are declared; names
    without an area are of `train/`. Raises TriviumError for anything else."""
    going_on, metrics = answer if isinstance(answer, tuple) and len(cast(Any, answer)) == 2 else (True, answer)
    if not isinstance(metrics, Mapping):
        raise TriviumError(
            f"metrics of {type(engine).__name__}.train_step",
            f"it returned a {type(answer).__name__}",
            "return a dict of numbers, or (whether to go on, that dict)",
        )
    named: Metrics = {}
    for name, value in cast("Mapping[str, Any]", metrics).items():
        try:
            named[name if "/" in name else f"train/{name}"] = float(value)
        except (TypeError, ValueError) as error:
            raise TriviumError(
                f"metrics of {type(engine).__name__}.train_step",
                f"{name!r} is {value!r:.80}",
                "return numbers; log texts and tables yourself",
            ) from error
    declare_missing(named, "a number that the train engine reported")
    return bool(going_on), named
