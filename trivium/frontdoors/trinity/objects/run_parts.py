"""RunParts: the parts that the objects of one run share: its stage, checkpoints, board, weights and ranks on Ray."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trivium.algorithms import GroupAlgorithm
from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.config import RunConfig, build, config_from_mapping
from trivium.config.fields import plugin_path
from trivium.foundation.board import SharedBoard
from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import resolve
from trivium.frontdoors.tables import announce
from trivium.frontdoors.trinity.config.trinity_config import TrinityConfig
from trivium.frontdoors.trinity.objects.boards.named_actors import end_actor
from trivium.frontdoors.trinity.objects.boards.run_synchronizer import options_of
from trivium.frontdoors.trinity.objects.boards.synchronizer import ROLE, Synchronizer, namespace_of
from trivium.frontdoors.trinity.objects.train_engine import TrainEngineWrapper
from trivium.frontdoors.trinity.translation import translate
from trivium.protocols import TrainEngine, WeightChannel
from trivium.runtime.build import algorithm_of, build_channel, claim_name, open_board, open_store, run_name
from trivium.runtime.run_dir import as_saved, open_run_dir
from trivium.runtime.stage import Stage, StageSpec
from trivium.runtime.train_engines import build_train_engine, distributed_engine
from trivium.text import hf_tokenizer
from trivium.training.engine import TorchTrainEngine
from trivium.types import TRAINER

if TYPE_CHECKING:
    from trivium.cluster.ranks import RayRanks
    from trivium.cluster.shared_actors import SharedActors


def run_config_of(config: object) -> RunConfig:
    """Translates a config of Trinity's shape to a RunConfig; returns a RunConfig unchanged.

    Raises ConfigError for a config that cannot be translated or has several stages.
    """
    if not isinstance(config, RunConfig):
        translation = translate(config)
        announce(translation.notes)
        config = config_from_mapping(translation.config)
    stages = config.stage_configs()
    if len(stages) > 1:
        raise ConfigError(
            f"a Trainer of {len(stages)} stages",
            "it trains one",
            "use `trivium.run` for all of them, or give each Trainer the config of its stage",
        )
    return config


def name_of_trainer(config: object) -> str:
    """Returns `trainer.name` of a config of Trinity's shape; the default name for a RunConfig."""
    return TRAINER if isinstance(config, RunConfig) else TrinityConfig(config).text("trainer.name")


def engine_kind(config: object, run_config: RunConfig) -> str:
    """Returns the engine that `trainer.trainer_type` of a config of Trinity's shape names, or `train.kind` of a
    RunConfig.

    Raises ConfigError for a short name other than `verl`.
    """
    named = "verl" if isinstance(config, RunConfig) else TrinityConfig(config).text("trainer.trainer_type")
    return run_config.stage_configs()[0].train.kind if named == "verl" else plugin_path(named)


def sync_method_of(config: object, run_config: RunConfig) -> str:
    """Returns the method that a config asks for. Of one process, `nccl` becomes a channel in memory, and the engine's
    method stays that of `nccl`."""
    method = str(run_config.sync.method)
    if isinstance(config, RunConfig) or method != "memory":
        return method
    asked_for = TrinityConfig(config).text("synchronizer.sync_method").lower()
    return "nccl" if asked_for in ("nccl", "online") else method


@dataclass
class RunParts:
    """A run that is open in this process."""

    config: RunConfig
    stage: Stage
    store: CheckpointStore
    latest: Checkpoint | None
    """The checkpoint that the run continues from."""
    closing: ExitStack
    is_open: bool = False
    """Whether the stage has begun on the board."""

    @cached_property
    def algorithm(self) -> GroupAlgorithm:
        """The algorithm that engine and trainer share."""
        return algorithm_of(self.stage.config)

    @cached_property
    def actor(self) -> Any:
        """With `cluster.kind: ray`, the actor of the synchronizer, which ends with `closing`; else None."""
        if self.config.cluster.kind != "ray":
            return None
        actor = Synchronizer.get_actor(self.config)
        self.closing.callback(end_actor, actor, ROLE, namespace_of(self.config))
        return actor

    @cached_property
    def synchronizer(self) -> Synchronizer:
        """The trainer's end of the board."""
        if self.actor is None:
            board = open_board(self.config.buffers, run_name(self.config.run))
            return Synchronizer(board, **options_of(self.config))
        from trivium.cluster.actors import Proxy

        table: Any = Proxy(self.actor, ROLE, "driver")
        return Synchronizer(SharedBoard(table), **options_of(self.config))

    @cached_property
    def channel(self) -> WeightChannel:
        """The trainer's end of the weight channel."""
        if self.shared is not None:
            return self.shared.endpoints(self.stage, TRAINER, "driver").channel
        self.synchronizer.channel = build_channel(self.stage, self.synchronizer, TRAINER)
        return self.synchronizer.channel

    @cached_property
    def shared(self) -> SharedActors | None:
        """The actors that the processes of the run share on Ray; None without Ray."""
        if self.config.cluster.kind != "ray":
            return None
        from trivium.cluster.shared_actors import SharedActors

        # A run that starts again must not find the actors of the one before.
        namespace = f"{run_name(self.config.run)}-{uuid.uuid4().hex[:8]}"
        return SharedActors(self.actor, None, namespace)  # the trainer has a buffer in its own process

    @cached_property
    def ranks(self) -> RayRanks | None:
        """The processes that train together; None if this process alone trains."""
        if self.shared is None or self.config.cluster.ranks == 1:
            return None
        from trivium.cluster.ranks import RayRanks
        from trivium.cluster.roles import trains_on_gpus

        return RayRanks(self.stage, StageSpec.of(self.stage), self.shared, on_gpus=trains_on_gpus(self.stage.config))

    def train_engine(self) -> TrainEngine:
        """Returns the engine over all ranks, without loading weights. Raises ConfigError if the cluster is too
        small."""
        if self.ranks is not None:
            return distributed_engine(self.ranks, self.stage, self.algorithm, self.channel)
        return build_train_engine(self.stage, self.algorithm, self.channel)

    @property
    def pad_token_id(self) -> int:
        """The token id that padding uses."""
        tokenizer = hf_tokenizer(str(self.stage.model_dir))
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return cast(int, pad or 0)

    def open_board(self) -> None:
        """Begins the stage on the board, once."""
        if not self.is_open:
            self.synchronizer.open(self.stage.number, last=True)
            self.is_open = True


def parts_in(run_dir: Path, config: RunConfig, closing: ExitStack) -> RunParts:
    """Opens the run of a config in a directory that this process holds. Actors that it starts on Ray end with
    `closing`."""
    claim_name(config.buffers, run_name(config.run), run_dir)
    store = open_store(config.checkpoint, run_dir, config.sync.deadline_s)
    latest = store.recover()
    model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
    first = config.stage_configs()[0]
    kind = resolve("train", first.train.kind)
    if issubclass(kind, TrainEngineWrapper) and isinstance(first.train, TorchTrainEngine.Config):
        # The wrapper is the user's class; the engine inside is Trivium's.
        first = first.model_copy(update={"train": first.train.model_copy(update={"kind": "torch"})})
    return RunParts(config, Stage(first, 0, 0, True, run_dir, model_dir), store, latest, closing)


@contextmanager
def opened(config: RunConfig, directory: ExitStack) -> Generator[RunParts]:
    """Opens the run of a config. This process holds its directory until the stack `directory` is closed. Raises
    RunDirError if another process holds it, ConfigError if the directory belongs to another run."""
    with ExitStack() as closing:
        config = as_saved(config)
        run_dir = directory.enter_context(open_run_dir(config))
        yield parts_in(run_dir, config, closing)
