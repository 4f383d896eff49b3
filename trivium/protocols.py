"""The interfaces of all parts, as structural types: a user's class needs no base class of Trivium.

`TrainEngine` alone is a base class: some of its methods are derived from the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from trivium.errors import ConfigError
from trivium.types import SaveStrategy

if TYPE_CHECKING:
    from trivium.phases import Phase
    from trivium.synchronizer import Synchronizer
    from trivium.types import (
        Batch,
        Completion,
        FloatArray,
        Group,
        IntArray,
        Lease,
        Message,
        Metrics,
        Prompt,
        Request,
        Sample,
        StopReason,
        Task,
        Teacher,
    )

    Step = tuple[Sequence[Message], float, bool]


Weights = Iterable[tuple[str, Any]]
"""(Hugging Face parameter or buffer name, tensor), in a fixed order."""


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a tensor that is not read yet."""

    name: str
    """Its Hugging Face name."""
    dtype: str
    """`float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]


@runtime_checkable
class DescribedWeights(Protocol):
    """Weights that are streamed, from files or a connection, in parts of bounded size.

    Iterating over it gives the tensors in this order, every one verified against its hash; they must not be written
    to, and a tensor that is kept holds its part in memory. It blocks, and it can be done once.
    """

    @property
    def tensors(self) -> Sequence[TensorSpec]: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


@runtime_checkable
class WeightHandle(DescribedWeights, Protocol):
    """A reference to the weights of one version: small enough to be sent to other processes, which read the weights
    through it, any number of times."""

    @property
    def version(self) -> int: ...


class TaskSource(Protocol):
    """A named, finite, ordered collection of tasks with stable ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


class Renderer(Protocol):
    """Messages to tokens and back, without ever encoding a sampled completion again."""

    eos_token_ids: frozenset[int]
    """Tokens that end a turn."""

    def render(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a conversation, up to the beginning of the assistant's message."""
        ...

    def extend(
        self, history: Sequence[Message], seen: Prompt, stop_reason: StopReason, new: Sequence[Message]
    ) -> Prompt:
        """The next prompt: `seen` (prompt and sampled completion as they were) plus the new messages.

        `history` is the conversation up to and including the sampled completion. The result begins with `seen`, its
        media included.
        """
        ...

    def decode(self, tokens: Sequence[int] | IntArray) -> str:
        """Text without special tokens."""
        ...

    def expert(self, messages: Sequence[Message], completion: str) -> tuple[Prompt, IntArray]:
        """(prompt, completion tokens with end of turn) of text that the policy did not sample."""
        ...


class RolloutEngine(Protocol):
    """Samples completions from the current policy."""

    @property
    def version(self) -> int:
        """The policy version that is loaded."""
        ...

    @property
    def max_context(self) -> int:
        """Longest prompt and completion together, in tokens."""
        ...

    async def generate(self, request: Request) -> Completion:
        """One completion. Concurrent calls are batched by the engine; cancelling the call frees its row."""
        ...

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Adopts new weights: a list, or what the channel has (`DescribedWeights`), read once their turn has come. With
        `finish`, after the completions in flight; later requests wait for them.

        With `update`, between two tokens of the completions in flight, which continue with the new weights and the
        keys and values they have; each token records which version sampled it. Only an engine with the capability
        `updates_in_flight` is asked for that, and only one with `adopts_adapters` is given a LoRA adapter instead of
        all weights. An engine that holds a part of a version, because the rest could not be read, completes nothing
        until it holds a whole one: it raises EngineFailure.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class ReadableEngine(Protocol):
    """A rollout engine whose weights can be read, for tests. Optional."""

    async def weights(self) -> Weights:
        """Copies of every parameter and persistent buffer as they are held now, after the loads asked for so far."""
        ...


@runtime_checkable
class RestingEngine(Protocol):
    """A rollout engine that can free the device that it shares with the trainer. Optional."""

    async def rest(self) -> None:
        """Frees memory of the device until the next completion or the next weights."""
        ...


class Environment(Protocol):
    """The environment of a multi-turn workflow; one instance per trajectory.

    Both methods may be plain or `async`.
    """

    def reset(self, task: Task) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The first messages the policy sees."""
        ...

    def step(self, completion: str) -> Step | Awaitable[Step]:
        """`(messages, reward, done)`: the observation, the reward of the completion, whether the episode is over."""
        ...


class Reward(Protocol):
    """Judges one trajectory; may be `async`. Columns of the task arrive by name."""

    def __call__(self, prompt: str, completion: str, **columns: Any) -> float | Awaitable[float]: ...


class Objective(Protocol):
    """A loss for one model role, and what batching must know about it."""

    @property
    def role(self) -> str:
        """Which model it updates: `policy`, `critic` or `reward`."""
        ...

    @property
    def unit(self) -> str:
        """`sequence`, `pair` or `group`: batching never splits one."""
        ...

    @property
    def head(self) -> str:
        """`lm`, `value`, `score`, or `lm+value`: a value head on the policy's own hidden states."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Columns it reads beside the mask: `advantages`, `returns`, `rollout_is_weights`, and scores of the engine."""
        ...

    @property
    def looks_at(self) -> frozenset[str]:
        """Scores (`log_prob`, `entropy`) of a whole mini-batch that `select` wants to see before it is cut."""
        ...

    def select(self, batch: Batch, *address: int) -> Batch:
        """The mini-batch after selections over all of it. `address` identifies the update, for random numbers of its
        own."""
        ...

    def derived(self, means: Metrics) -> Metrics:
        """The metrics of an update from the means over its tokens (a ratio of two of them, say)."""
        ...

    @property
    def on_policy(self) -> str:
        """`plain`, `factor: ...` or `none: reason`: its gradient at ratio one, against the plain policy gradient."""
        ...


class CutAnywhere:
    """Base of an objective without selections over a whole mini-batch, whose metrics are plain means."""

    @property
    def looks_at(self) -> frozenset[str]:
        return frozenset()

    def select(self, batch: Batch, *address: int) -> Batch:
        del address
        return batch

    def derived(self, means: Metrics) -> Metrics:
        return means


class Algorithm(Protocol):
    """Filters groups, computes advantages, and names the objectives to minimise. A frozen value."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]:
        """Scores wanted from the train engine before the first update: names of `types.SCORES`."""
        ...

    @property
    def objectives(self) -> Sequence[Objective]:
        """In the order they are minimised."""
        ...

    def objectives_at(self, version: int) -> Sequence[Objective]:
        """The objectives of the train step from `version`: all, unless some begin later (critic warm-up)."""
        ...

    @property
    def teacher(self) -> Teacher | None:
        """The frozen model behind the scores `teacher` and `teacher_top`; None where neither is needed."""
        ...

    @property
    def epochs(self) -> int: ...

    @property
    def mini_batches(self) -> int: ...

    @property
    def refill(self) -> int:
        """How often a step has its refused groups replaced by fresh ones before it goes on with fewer."""
        ...

    def filter(self, groups: Sequence[Group]) -> tuple[list[Group], Metrics]:
        """The groups worth training on, and what was refused. Each is decided by itself, and the answer is always the
        same: the trainer asks before a step whether to refill, and the step asks again."""
        ...

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The experiences of the groups' successful members, in order."""
        ...

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with the columns its objectives need."""
        ...

    def state(self) -> dict[str, Any]:
        """State for a checkpoint (an adaptive KL coefficient); JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class TrainEngine(ABC):
    """Holds the trained models. Verbs: `score`, `update`, `save`, `load`, `export_weights`; the rest is derived."""

    algorithm: Algorithm
    channel: WeightChannel
    """Where `sync_weight` offers weights; set by `runtime.build`."""
    save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED
    """Which of the processes that write a checkpoint may write at the same time."""
    engine_dtype: str = ""
    """The type that the explorers' engines keep weights in, as far as it is known: wider ones need not be offered."""
    version: int = 0
    """The policy version: the number of train steps taken."""
    keeps_updates: bool = False
    """Whether updates of the policy record their per-token columns for `take_updates`."""
    updating: bool = False
    """Whether the updates of a train step have begun and not finished."""

    @abstractmethod
    def prepare(self) -> None:
        """Loads models and optimizers. Called once, before anything else."""

    @abstractmethod
    def score(self, batch: Batch, what: str) -> Sequence[FloatArray]:
        """Numbers per token without gradient, leading axis L, one array per experience; `what`: see `types.SCORES`."""

    @abstractmethod
    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step of one role on a mini-batch; normalised over all of it, however it is cut."""

    def measure(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        """The loss and the metrics that `update` would report for a mini-batch, without an update."""
        raise ConfigError(
            f"the loss of the {role} over held-out rows",
            f"{type(self).__name__} has no method `measure`",
            "leave evaluation.held_out out, or write the method",
        )

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, tensor) of every parameter and persistent buffer of the policy, in a fixed order."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Writes models (each a plain Hugging Face directory), optimizers and counters. Blocks until they are on
        disk."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """The inverse of `save`: training continues bit for bit."""

    def resume(self, directory: Path) -> None:
        """`prepare`, and `load` of a checkpoint. An engine that need not read the initial weights overrides it."""
        self.prepare()
        self.load(directory)

    @abstractmethod
    def save_weights(self, directory: Path) -> None:
        """Writes the policy alone as a plain Hugging Face directory."""

    def begin_saving(self, directory: Path) -> Callable[[], None] | None:
        """`save` in the background: copies the state, so that training can continue. Returns a function that blocks, in
        another thread, until the files are on disk; None if the engine can only save in the foreground."""
        return None

    def holds_version(self) -> bool:
        """Whether the weights are those of `version`, also after a failed train step. False if a failed update may have
        changed them."""
        return not self.updating

    def close(self) -> None:  # noqa: B027  (most engines hold nothing that needs closing)
        """Frees what `prepare` took."""

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        """Utilisation of the machine in a step of these phases, as metrics of the area `perf/`; empty: not known."""
        del phases
        return {}

    def take_updates(self) -> Batch | None:
        """The experiences of the policy's updates since the last call, with the columns `types.AT_UPDATE` of the first
        update, if `keeps_updates` is set; None if the engine records none."""
        return None

    def offered_hash(self) -> str:
        """The hash of the weights that `sync_weight` offered last; empty where the channel makes none."""
        return getattr(self.channel, "offered", "")

    def sync_weight(self) -> bool:
        """Offers the current weights to the explorers. Returns whether they were delivered or can be fetched.
        Blocks."""
        return self.channel.offer(self.version, self.export_weights())


class Buffer(Protocol):
    """Issues slots, keeps finished groups, gives them to the trainer. Journals before it counts.

    Any number of explorers lease and put, one trainer takes; they may be in other processes. A buffer that several
    processes reach (`shared`) loses no group and gives none out twice when one of them dies at any moment.
    """

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """The right to roll out a slot with the version that `owner` has loaded. Waits for one; without `wait`, returns
        None where none is free.

        Raises StopAsyncIteration once the buffer is closed.
        """
        ...

    async def put(self, owner: str, group: Group) -> None:
        """A finished group, failures included. Journaled before it counts. One that was `dropped` is counted and its
        slot given up: another is issued for it. One of an attempt that was cancelled is forgotten.

        Raises DataError where `owner` never held that slot and attempt, or put it before."""
        ...

    async def release(self, owner: str) -> int:
        """Reissues the leases of an owner that died or left; returns their number."""
        ...

    async def cancelled_leases(self, owner: str) -> Sequence[Lease]:
        """Waits until leases of `owner` are cancelled (their groups would be too stale); returns them. The slot may
        have been leased again, with a higher `attempt`, even to the same owner."""
        ...

    async def take(self, count: int, version: int) -> list[Group]:
        """Waits for `count` groups to train version `version` on; evicts groups that became too stale, and cancels
        leases whose groups would be too stale.

        Raises StopAsyncIteration once the buffer is closed.
        """
        ...

    async def refuse(self, count: int) -> None:
        """So many of the groups taken last will not be trained on, or the step needs so many more than the schedule
        says: that many further slots are issued for the same version. Called between two `take` of one step."""
        ...

    async def retry_on_resume(self, slots: Sequence[int]) -> None:
        """The failures of these slots' groups end the run. The next `restore` frees the slots from the lowest of these,
        or of those not trained on, whose groups hold failures that a retry may avert (`buffers.slots`); where only
        rewards failed, with the group as `Lease.recorded`."""
        ...

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        """Groups that were taken before, by slot, as they were."""
        ...

    async def drain(self, version: int) -> None:
        """Waits until every slot that `version` admits is rolled out, by any explorer, or its groups would be too stale
        for the current train step."""
        ...

    async def advance(self, owner: str, version: int) -> None:
        """The explorer `owner` adopted `version`: more slots may be admitted."""
        ...

    async def counts(self) -> Mapping[str, int]:
        """Groups so far that were `evicted` as too stale, `called_off` (cancelled) during their rollout, `given_up`
        after `max_attempts`, or `dropped` by the experience pipeline."""
        ...

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint; JSON values."""
        ...

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version`, or from the start of the stage where there is none."""
        ...

    async def close(self) -> None:
        """Wakes every waiter; `lease` and `take` raise StopAsyncIteration from now on."""
        ...


class SampleStrategy(Protocol):
    """Chooses the groups of a train step: from the buffer, from replayed groups, from experts' completions."""

    async def sample(self, count: int, version: int) -> Sample:
        """`count` groups to train version `version` on. Raises StopAsyncIteration at the end of the data."""
        ...

    async def refuse(self, count: int) -> None:
        """See `Buffer.refuse`."""
        ...

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; JSON values."""
        ...

    async def restore(self, state: Mapping[str, Any]) -> None: ...


class Operator(Protocol):
    """One step of the experience pipeline: returns the group as it is, changed or dropped. Without side effects."""

    def __call__(self, group: Group) -> Group:
        """`group.refused("why")` drops it."""
        ...


class WeightChannel(Protocol):
    """Carries weights from the trainer to the explorers."""

    def offer(self, version: int, weights: Weights) -> bool:
        """The trainer's side: keeps or sends version `version`. False where it reached no explorer. Blocks.

        Reads `weights` once, in order, one tensor at a time, and holds no more of them than a bounded part: with
        sharded training each one is gathered when it is asked for, by all ranks. It may not ask for all of them, where
        no explorer wants them or an error ends it; the caller then tells the other ranks that gather. A channel that
        hashes what it sends keeps the hash of all of it as `offered`, for the record of the run.
        """
        ...

    def collect(self, version: int) -> Weights:
        """The explorer's side: the weights of `version`, every tensor verified against its hash. May block.

        `DescribedWeights` go to the explorer's engine as they are: the engine reads them, or its processes do, the
        explorer does not. Of other weights the explorer collects a list, and of those of a `collective` channel where
        completions in flight have to finish first: the trainer waits until they are read.
        """
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions it can still deliver, oldest first."""
        ...

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Writes versions that explorers of a resumed run may still need."""
        ...

    def restore(self, directory: Path) -> None:
        """Takes back what `save` wrote."""
        ...


class Monitor(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def state(self) -> dict[str, Any]:
        """State from which `restore` can remove everything logged later; JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Removes what was logged after `state` was taken, if the destination allows it."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class FileMonitor(Protocol):
    """A monitor that keeps tables and files beside metrics."""

    def keep_file(self, path: Path) -> None:
        """Keeps a copy of a file of the run directory: the report of a run that is finished."""
        ...


class TrainerProtocol(Protocol):
    """The methods of a trainer that `loops.train_loop` calls; see `trivium.trainer.Trainer`."""

    name: str
    buffer: Buffer
    synchronizer: Synchronizer
    train_continue: bool
    """Whether there is another step to take."""

    async def start(self) -> None: ...

    async def take_step(self) -> None: ...

    def need_sync(self) -> bool: ...

    def sync_weight(self) -> None: ...

    async def end_step(self) -> None: ...

    async def finish(self) -> None: ...

    async def wait_for_save(self) -> None: ...

    async def save_after_failure(self) -> None: ...
