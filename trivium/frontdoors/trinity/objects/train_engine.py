"""TrainEngineWrapper: the interface of an engine of Trinity-RFT's Trainer. Users write their own."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from trivium.foundation.errors import TriviumError
from trivium.foundation.metrics import declare_missing
from trivium.frontdoors.trinity.objects.experiences import Experiences
from trivium.types import Metrics


class TrainEngineWrapper(ABC):
    """An engine that trains by itself. The Trainer calls only these members. The constructor gets the config of the
    Trainer.

    `prepare` and `train_step` may be `async`; all coroutines of an engine run on one event loop of its own.
    """

    synchronizer: Any = None
    """The run's synchronizer, which takes the weights: that of the Trainer, unless the engine's constructor has set
    one. With `cluster.kind: ray` it is an actor: `ray.get(self.synchronizer.set_model_state_dict.remote(...))`."""

    @abstractmethod
    def prepare(self) -> Any:
        """Loads the models, from the engine's last checkpoint if there is one. Called once, before any other method."""

    @property
    @abstractmethod
    def train_step_num(self) -> int:
        """The number of train steps that the weights have taken. While it is unchanged, so are the weights: a
        `train_step` that fails half-way must not leave changed weights behind it."""

    @abstractmethod
    def train_step(self, batch: Experiences) -> Any:
        """Takes one train step and increments `train_step_num`. Returns (whether to continue, metrics), or metrics
        alone.

        A parameter annotated as a list (`List[Experience]`) gets a list of Experience, any other Experiences.
        """

    @abstractmethod
    def save_checkpoint(self, block_until_saved: bool = False) -> None:
        """Saves everything that `prepare` needs to continue from this step. Called every `checkpoint.save_every` steps,
        at the end, and after a failure. A second call for one step has no effect."""

    @abstractmethod
    def sync_weight(self) -> None:
        """Method `nccl`: sends the weights to the explorers, through `Synchronizer.set_model_state_dict`."""

    @abstractmethod
    def upload_state_dict(self) -> None:
        """Method `memory`: hands the weights to `Synchronizer.set_model_state_dict`."""

    @abstractmethod
    def save_state_dict(self) -> None:
        """Method `checkpoint`: hands the weights, or the directory that they were saved in, to
        `Synchronizer.set_model_state_dict`."""


class EngineCalls:
    """Calls an engine's methods, plain or awaitable, from threads."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the coroutines; None before the first call."""

    def __call__(self, method: Callable[..., Any], *args: object, **options: object) -> Any:
        """Calls the method and returns its result. Blocks."""
        answer = method(*args, **options)
        if not inspect.isawaitable(answer):
            return answer
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="train-engine", daemon=True)
            self._thread.start()
        # It takes coroutines alone, and a user's engine may return any awaitable.
        return asyncio.run_coroutine_threadsafe(_awaited(answer), self._loop).result()

    def close(self) -> None:
        """Ends the event loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def takes_list(method: Callable[..., Any]) -> bool:
    """Whether the first parameter of an engine's `train_step` is annotated as a list."""
    first = next(iter(inspect.signature(method).parameters.values()), None)
    annotation = "" if first is None or first.annotation is first.empty else first.annotation
    # With `from __future__ import annotations`, an annotation is text.
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return annotation is list or re.match(r"(\w+\.)*(list|List|Sequence)\b", text) is not None


def step_result(engine: object, answer: object) -> tuple[bool, Metrics]:
    """Converts the result of a `train_step` to (whether to continue, metrics). Declares undeclared metrics; names
    without an area get the prefix `train/`. Raises TriviumError for anything else."""
    going_on, metrics = answer if isinstance(answer, tuple) and len(cast(Any, answer)) == 2 else (True, answer)
    if not isinstance(metrics, Mapping):
        raise TriviumError(
            f"metrics of {type(engine).__name__}.train_step",
            f"it returned a {type(answer).__name__}",
            "return a dict of numbers, or (whether to continue, that dict)",
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
