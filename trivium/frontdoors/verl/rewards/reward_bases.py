"""The base classes of verl's reward managers, and their registry.

There are two kinds. Up to verl 0.6, a manager scores a whole batch (`AbstractRewardManager`). From 0.7 on, it scores
one sample in a coroutine (`RewardManagerBase.run_single`), and the coroutines run concurrently.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.foundation.concurrency import gather_or_cancel
from trivium.foundation.errors import ConfigError, RewardError
from trivium.foundation.registry import add_names, resolve
from trivium.frontdoors.verl.objects.batches.batch_view import BatchView, on_last_tokens
from trivium.frontdoors.verl.objects.batches.protocol import as_columns

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

RawRewardFn = Callable[..., Any]
"""A scorer `f(data_source=, solution_str=, ground_truth=, extra_info=)`; returns a number or a dict with `score`."""

C = TypeVar("C", bound=type)

# --------------------------------------------------------------------------- by name

add_names(
    "reward_managers",
    {
        "naive": "trivium.frontdoors.verl.reward_managers:NaiveRewardManager",
        "dapo": "trivium.frontdoors.verl.reward_managers:DAPORewardManager",
        "batch": "trivium.frontdoors.verl.reward_managers:BatchRewardManager",
        "prime": "trivium.frontdoors.verl.reward_managers:PrimeRewardManager",
    },
)
_registered: dict[str, type] = {}


def register(name: str) -> Callable[[C], C]:
    """Registers the decorated reward manager class as a value of `reward_manager.name`.

    Raises ConfigError if another class has the name.
    """

    def decorated(manager: C) -> C:
        earlier = _registered.get(name)
        # Reloading a file creates the class again.
        if earlier is not None and _place(earlier) != _place(manager):
            raise ConfigError(
                f"the reward manager {name!r}",
                f"{_place(earlier)} and {_place(manager)}",
                "give each a name of its own",
            )
        _registered[name] = manager
        return manager

    return decorated


def get_reward_manager_cls(name: str) -> Any:
    """Returns the registered or built-in class of a name. Raises UnknownName."""
    return _registered.get(name) or resolve("reward_managers", name)


def _place(manager: type) -> str:
    return f"{inspect.getsourcefile(manager) or manager.__module__}:{manager.__qualname__}"


# --------------------------------------------------------------------------- a batch at a time


class AbstractRewardManager(ABC):
    """The interface of reward managers that score a batch."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawRewardFn | None,
        reward_fn_key: str = "data_source",
        **kwargs: object,
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: BatchView, return_dict: bool = False) -> Tensor | dict[str, Any]: ...

    def _extract_reward_from_rm_scores(
        self, data: BatchView, return_dict: bool = False
    ) -> Tensor | dict[str, Any] | None:
        """Returns the `rm_scores` (B, R) of a batch as its rewards, or None without them. With `return_dict`, the
        result includes the columns that `meta_info["reward_extra_keys"]` names."""
        return _rm_scores(data, return_dict)


def _rm_scores(data: BatchView, return_dict: bool) -> Tensor | dict[str, Any] | None:
    if "rm_scores" not in data.batch:
        return None
    extra = {key: data.non_tensor_batch[key] for key in data.meta_info.get("reward_extra_keys", [])}
    scores = data.batch["rm_scores"]
    return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores


# --------------------------------------------------------------------------- a sample at a time


class RewardManagerBase(ABC):
    """The interface of reward managers that score one sample in a coroutine. A call with a batch, as by the trainer,
    scores all samples concurrently."""

    _class_initialized = False

    def __init_subclass__(cls) -> None:
        cls._class_initialized = False  # even if a base class has been initialized

    def __init__(self, config: Any, tokenizer: PreTrainedTokenizerBase, compute_score: RawRewardFn | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Initializes the state that all managers of the class share."""
        cls._class_initialized = True

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that `run_single` runs in."""
        return get_event_loop()

    @abstractmethod
    async def run_single(self, data: BatchView) -> dict[str, Any]:
        """Returns `{"reward_score": number, "reward_extra_info": {name: value}}` for the last sample of the batch."""

    @classmethod
    def assemble_rm_scores(cls, data: BatchView, scores: Sequence[float]) -> Tensor:
        """Returns rewards (B, R) with each score on the last token of its response. An empty response has no reward."""
        return on_last_tokens(data, scores)

    def __call__(self, data: BatchView, return_dict: bool = False) -> Tensor | dict[str, Any]:
        return each_single(self, data, return_dict)


def each_single(manager: Any, data: BatchView, return_dict: bool = False) -> Tensor | dict[str, Any]:
    """Calls a manager's `run_single` for each row, and returns the results as a manager of whole batches. Raises
    RewardError for a row without a `reward_score`."""
    model_scores = _rm_scores(data, return_dict)
    if model_scores is not None:
        return model_scores
    results = _run([functools.partial(manager.run_single, data[row : row + 1]) for row in range(len(data))])
    for row, result in enumerate(results):
        if not isinstance(result, Mapping) or "reward_score" not in result:
            raise RewardError(
                f"a reward_score of sample {row} from {type(manager).__name__}.run_single",
                f"{result!r:.200}",
                "return {'reward_score': number, 'reward_extra_info': {name: value}}",
            )
    assemble = getattr(manager, "assemble_rm_scores", RewardManagerBase.assemble_rm_scores)
    rewards = assemble(data, [result["reward_score"] for result in results])
    extra = as_columns([result.get("reward_extra_info") or {} for result in results])
    return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


# --------------------------------------------------------------------------- the loop of coroutines

_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Lock]] = {}
"""Process id -> its event loop, and the lock to run it. All managers use one loop, because shared objects (such as a
semaphore of the class) belong to one loop. A forked process has its own loop."""


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Returns the running loop of this thread, else the loop of the managers."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _loop()[0]


def _loop() -> tuple[asyncio.AbstractEventLoop, threading.Lock]:
    if os.getpid() not in _loops:
        loop = asyncio.new_event_loop()
        # Coroutines of verl call scorers by `run_in_executor`, and a scorer may need the main thread (signals).
        loop.set_default_executor(_Threads(thread_name_prefix="rewards"))
        _loops[os.getpid()] = loop, threading.Lock()
    return _loops[os.getpid()]


class _Threads(ThreadPoolExecutor):
    """An executor whose threads run a function in its caller's context. The main thread runs its own submissions,
    because a function may need the main thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.current_thread() is not threading.main_thread():
            return super().submit(contextvars.copy_context().run, fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # the future raises any exception
            future.set_exception(error)
        return future


def _run(coroutines: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs coroutines concurrently, and returns their results in order."""

    async def together() -> list[Any]:
        return await gather_or_cancel([coroutine() for coroutine in coroutines])

    def here() -> list[Any]:
        loop, alone = _loop()
        with alone:
            return loop.run_until_complete(together())

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return here()
    # An event loop cannot be run inside another one that runs in this thread.
    with ThreadPoolExecutor(1, "rewards") as other:
        return other.submit(contextvars.copy_context().run, here).result()
