"""The trainer and its components: objectives, the algorithm, the train engine, monitors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from trivium.protocols.weight_channel import WeightChannel, WeightOffer, offer_on
from trivium.types import SaveStrategy

if TYPE_CHECKING:
    from trivium.foundation.phases import Phase
    from trivium.protocols.storage import Buffer
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
        """The scores (`log_prob`, `entropy`) that `select` reads. They are computed over the whole mini-batch, before
        the engine cuts it into micro-batches."""
        ...

    def select(self, batch: Batch, *address: int) -> Batch:
        """Applies the selections that must see the whole mini-batch, for example the tokens of highest entropy, and
        returns the batch with their columns. `address` identifies the update and seeds its random numbers."""
        ...

    def derived(self, means: Metrics) -> Metrics:
        """The metrics of an update from the means over its tokens, for example a ratio of two means."""
        ...

    @property
    def on_policy(self) -> str:
        """`plain`, `factor: ...` or `none: reason`: its gradient at ratio one relative to the plain policy gradient."""
        ...


class CutAnywhere:
    """Base class of objectives whose mini-batch may be cut into micro-batches at any place: they select nothing over
    the whole mini-batch, and their metrics are plain means."""

    @property
    def looks_at(self) -> frozenset[str]:
        return frozenset()

    def select(self, batch: Batch, *address: int) -> Batch:
        del address
        return batch

    def derived(self, means: Metrics) -> Metrics:
        return means


@runtime_checkable
class PacedObjective(Protocol):
    """An objective with its own number of passes over a step's data. Optional."""

    @property
    def epochs(self) -> int | None:
        """Passes; None: those of the algorithm."""
        ...

    @property
    def mini_batches(self) -> int | None:
        """Optimizer steps of a pass; None: those of the algorithm."""
        ...


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
        """How many times a step replaces the groups that `filter` refused by fresh ones. After that it continues with
        fewer groups."""
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


@dataclass(frozen=True)
class EngineSettings:
    """The settings that a stage gives to its train engine."""

    channel: WeightChannel | None = None
    """The channel on which `offer_weights` offers the weights; None on all ranks but the first."""
    engine_dtype: str = ""
    """The dtype of weights in the explorers' engines, empty if unknown. Wider dtypes need not be offered."""
    save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED
    """Which processes may write a checkpoint at the same time."""
    keeps_updates: bool = False
    """Whether updates of the policy record their per-token columns (`RecordingEngine`)."""
    saves_merged: bool = True
    """Whether a checkpoint holds the policy with its adapter merged, beside the adapter."""
    shares_gpu: bool = False
    """Whether a rollout engine that sleeps during updates (`engine.sleep_level`) takes the GPU's memory after them."""


class TrainEngine(ABC):
    """Holds the trained models: scores and updates a batch, exports the policy's weights, saves and loads its state.

    An engine may also be a `MeasuringEngine`, a `RecordingEngine` or a `MeteredEngine`.
    """

    algorithm: Algorithm
    version: int = 0
    """The policy version: the number of train steps taken."""
    holds_version: bool = True
    """Whether the weights are exactly those of `version`. False from the first update of a train step to its end. An
    engine may set it to True again after an update that failed before it changed a weight."""
    settings: EngineSettings = EngineSettings()
    """`runtime.build` sets them."""

    @abstractmethod
    def prepare(self) -> None:
        """Loads models and optimizers. Called once, before anything else but `load`."""

    @abstractmethod
    def score(self, batch: Batch, what: str) -> Sequence[FloatArray]:
        """Per-token values without gradient: for each experience one array whose first axis is its tokens. `what` is in
        `types.SCORES`."""

    @abstractmethod
    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step of one role on a mini-batch. The loss is normalised over the whole mini-batch, so the
        gradient does not depend on how it is cut into micro-batches."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, tensor) of every parameter and persistent buffer of the policy, in a fixed order."""

    def offer_weights(self) -> WeightOffer:
        """Offers the current weights to the explorers on the channel of the settings. Blocks."""
        return offer_on(self.settings.channel, self.version, self.export_weights())

    @abstractmethod
    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        """Writes models (each a plain Hugging Face directory), optimizers and counters. Blocks until they are on disk.

        An engine that can copy its state calls `on_copied` after the copy and writes from the copy, so that training
        may continue meanwhile. Other engines ignore `on_copied`.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """The inverse of `save`: training continues bit for bit as before. Called after `prepare` or in place of it."""

    def close(self) -> None:  # noqa: B027  (most engines hold nothing that needs closing)
        """Releases the resources of `prepare`."""


@runtime_checkable
class MeasuringEngine(Protocol):
    """A train engine that can compute a loss without an update, which `evaluation.held_out` needs."""

    def measure(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        """The loss and the metrics that `update` would report for a mini-batch, without an update."""
        ...


@dataclass(frozen=True)
class StepSettings:
    """What one optimizer step of AdamW takes."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = math.inf
    """The gradient is scaled down to this norm."""


class SteppedEngine(TrainEngine):
    """A train engine whose caller composes the policy's updates: gradients of some batches, then a step."""

    @abstractmethod
    def accumulate(
        self, batch: Batch, objective: Objective, *, gradient: bool = True
    ) -> tuple[Metrics, Mapping[str, Sequence[FloatArray]]]:
        """The metrics of the loss over a batch, and its columns for each token (`LossOutputs.tokens`). With `gradient`,
        adds its gradient to the accumulated one; an error loses it (`lose_data`)."""

    @abstractmethod
    def lose_data(self) -> None:
        """Notes that the gradient since the last step lacks data: the next step, and only this one, fails."""

    @abstractmethod
    def step(self, settings: StepSettings) -> Metrics:
        """One optimizer step on the accumulated gradient, which it drops. It makes the next version of the policy.
        Raises TriviumError, weights untouched, when the gradient is not finite or lacks data."""

    @abstractmethod
    def top(self, batch: Batch, k: int) -> Sequence[FloatArray]:
        """(L, K, 2) for each experience: ids and log-probabilities of the most probable tokens at each trained one."""

    @abstractmethod
    def offered_weights(self) -> Iterable[tuple[str, Any]]:
        """The weights that `offer_weights` offers."""

    @abstractmethod
    def save_adapter(self, directory: Path) -> None:
        """Writes the policy's adapter alone, as peft loads it. Not for several ranks."""


@runtime_checkable
class RecordingEngine(Protocol):
    """A train engine that records the per-token columns of the policy's updates, if `EngineSettings.keeps_updates`."""

    def take_updates(self) -> Batch | None:
        """The experiences of the policy's updates since the last call, with the columns `types.AT_UPDATE` of the first
        update; None if nothing was recorded."""
        ...


@runtime_checkable
class MeteredEngine(Protocol):
    """A train engine that knows how well it uses the machine."""

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        """Utilisation of the machine in a step of these phases, as metrics of the area `perf/`; empty if unknown."""
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
        """Keeps a copy of a file of the run directory, such as the report of a finished run."""
        ...


class TrainerProtocol(Protocol):
    """The methods of a trainer that `loops.train_loop` calls; see `trivium.trainer.Trainer`."""

    name: ClassVar[str]
    train_continue: bool
    """Whether there is another step to take."""

    @property
    def buffer(self) -> Buffer: ...

    @property
    def synchronizer(self) -> Synchronizer: ...

    async def start(self) -> None: ...

    def step_in_progress(self) -> AbstractAsyncContextManager[None]: ...

    async def train_step(self) -> bool: ...

    def need_sync(self) -> bool: ...

    def sync_weight(self) -> None: ...

    async def end_step(self) -> None: ...

    async def finish(self) -> None: ...

    async def wait_for_save(self) -> None: ...

    async def save_before_end(self) -> None: ...
