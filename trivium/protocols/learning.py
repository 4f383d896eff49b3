"""The trainer and its components: objectives, the algorithm, the train engine, monitors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from trivium.errors import ConfigError
from trivium.types import SaveStrategy

if TYPE_CHECKING:
    from trivium.phases import Phase
    from trivium.protocols.storage import Buffer
    from trivium.protocols.weight_channel import WeightChannel
    from trivium.synchronizer import Synchronizer
    from trivium.types import Batch, FloatArray, Group, Metrics, Teacher


class Objective(Protocol):
    """A loss for one model role, with the properties that batching depends on."""

    @property
    def role(self) -> str:
        """The model that it updates: `policy`, `critic` or `reward`."""
        ...

    @property
    def unit(self) -> str:
        """`sequence`, `pair` or `group`: the unit that batching never splits."""
        ...

    @property
    def head(self) -> str:
        """`lm`, `value`, `score`, or `lm+value` for a value head on the policy's hidden states."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Columns it reads beside the mask: `advantages`, `returns`, `rollout_is_weights`, and scores of the engine."""
        ...

    @property
    def looks_at(self) -> frozenset[str]:
        """Scores (`log_prob`, `entropy`) of the whole mini-batch that `select` reads before it is cut."""
        ...

    def select(self, batch: Batch, *address: int) -> Batch:
        """The mini-batch after selections over all of it. `address` identifies the update and seeds its random
        numbers."""
        ...

    def derived(self, means: Metrics) -> Metrics:
        """The metrics of an update from the means over its tokens, for example a ratio of two means."""
        ...

    @property
    def on_policy(self) -> str:
        """`plain`, `factor: ...` or `none: reason`: its gradient at ratio one relative to the plain policy gradient."""
        ...


class CutAnywhere:
    """Base class of objectives without selections over a whole mini-batch and with plain means as metrics."""

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
        """Scores to compute with the train engine before the first update: names in `types.SCORES`."""
        ...

    @property
    def objectives(self) -> Sequence[Objective]:
        """In the order they are minimised."""
        ...

    def objectives_at(self, version: int) -> Sequence[Objective]:
        """The objectives of the train step from `version`: all of them, except during the critic's warm-up."""
        ...

    @property
    def teacher(self) -> Teacher | None:
        """The frozen model that computes the scores `teacher` and `teacher_top`; None if neither is needed."""
        ...

    @property
    def epochs(self) -> int: ...

    @property
    def mini_batches(self) -> int: ...

    @property
    def refill(self) -> int:
        """How often a step replaces its refused groups by fresh ones before it continues with fewer."""
        ...

    def filter(self, groups: Sequence[Group]) -> tuple[list[Group], Metrics]:
        """(the groups to train on, metrics of all groups). Each group is decided independently and deterministically:
        the trainer calls this before a step to decide whether to refill, and the step calls it again."""
        ...

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The experiences of the groups' successful members, in order."""
        ...

    def advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with the columns that its objectives need."""
        ...

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, for example an adaptive KL coefficient; JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class TrainEngine(ABC):
    """Holds the trained models. Subclasses implement the abstract methods; the others are derived or optional."""

    algorithm: Algorithm
    channel: WeightChannel
    """The channel on which `sync_weight` offers weights; `runtime.build` sets it."""
    save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED
    """Which processes may write a checkpoint at the same time."""
    engine_dtype: str = ""
    """The dtype of weights in the explorers' engines, empty if unknown. Wider dtypes need not be offered."""
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
        """Per-token values without gradient, leading axis L, one array per experience; `what` is in `types.SCORES`."""

    @abstractmethod
    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step of one role on a mini-batch, normalised over all of it, however it is cut."""

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
        """The inverse of `save`: training continues bit for bit as before."""

    def resume(self, directory: Path) -> None:
        """Calls `prepare` and `load`. An engine can override it to skip reading the initial weights."""
        self.prepare()
        self.load(directory)

    @abstractmethod
    def save_weights(self, directory: Path) -> None:
        """Writes only the policy, as a plain Hugging Face directory."""

    def begin_saving(self, directory: Path) -> Callable[[], None] | None:
        """Starts a `save` in the background: copies the state, so that training can continue. Returns a function to
        call in another thread, which blocks until the files are on disk. Returns None if the engine can only save in
        the foreground."""
        return None

    def holds_version(self) -> bool:
        """Whether the weights are exactly those of `version`. False if a failed update may have changed them."""
        return not self.updating

    def close(self) -> None:  # noqa: B027  (most engines hold nothing that needs closing)
        """Releases the resources of `prepare`."""

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        """Utilisation of the machine in a step of these phases, as metrics of the area `perf/`; empty if unknown."""
        del phases
        return {}

    def take_updates(self) -> Batch | None:
        """The experiences of the policy's updates since the last call, with the columns `types.AT_UPDATE` of the first
        update, if `keeps_updates` is set; None if the engine records none."""
        return None

    def offered_hash(self) -> str:
        """The hash of the weights that `sync_weight` offered last; empty if the channel computes none."""
        return getattr(self.channel, "offered", "")

    def sync_weight(self) -> bool:
        """Offers the current weights to the explorers and blocks. Returns whether they were delivered or can be
        fetched."""
        return self.channel.offer(self.version, self.export_weights())


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
        """Keeps a copy of a file of the run directory, such as the report of a finished run."""
        ...


class TrainerProtocol(Protocol):
    """The methods of a trainer that `loops.train_loop` calls; see `trivium.trainer.Trainer`."""

    name: str
    buffer: Buffer
    train_continue: bool
    """Whether there is another step to take."""

    @property
    def synchronizer(self) -> Synchronizer: ...

    async def start(self) -> None: ...

    async def take_step(self) -> None: ...

    def need_sync(self) -> bool: ...

    def sync_weight(self) -> None: ...

    async def end_step(self) -> None: ...

    async def finish(self) -> None: ...

    async def wait_for_save(self) -> None: ...

    async def save_before_end(self) -> None: ...
