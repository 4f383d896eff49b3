"""Builds the train engine of a stage: for one process, for one rank, or the driver's over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trivium.algorithms import GroupAlgorithm
from trivium.config import RunConfig, build
from trivium.config.schema import TrainConfig
from trivium.config.sections import SyncSection
from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import resolve
from trivium.protocols import EngineSettings, TrainEngine, WeightChannel
from trivium.runtime.stage import Stage, StageSpec
from trivium.text import hf_tokenizer
from trivium.training.launched import launched_ranks
from trivium.types import capabilities_of

if TYPE_CHECKING:
    from trivium.training.distributed.data_parallel import DistributedTrainEngine, RankGroup
    from trivium.training.distributed.ranks import Ranks


def build_train_engine(stage: Stage, algorithm: GroupAlgorithm, channel: WeightChannel) -> TrainEngine:
    """Builds the train engine that the trainer drives: in this process, in a separate one, or over all ranks of
    torchrun."""
    if stage.own_process:
        from trivium.training.distributed.train_process import TrainProcess

        deadline_s = stage.config.sync.deadline_s
        process = TrainProcess("trivium.runtime.train_process_main", StageSpec.of(stage), channel, deadline_s)
        return distributed_engine(process, stage, algorithm, channel)
    if launched_ranks() == 1:
        return build_rank_engine(stage, algorithm, channel)
    from trivium.training.distributed.torchrun import TorchrunRanks

    def make() -> tuple[Ranks, TrainEngine]:
        engine = build_rank_engine(stage, algorithm, channel)
        return cast(Any, engine).ranks, engine

    # The other ranks build their stage from it (`sampling_ranks`), with the limits that rank 0 chose by its own memory.
    stage_spec = {field.name: getattr(stage, field.name) for field in fields(stage) if field.name != "config"}
    stage_spec["limits"] = [
        getattr(stage.config.train, "max_tokens_per_micro_batch", None),
        getattr(stage.config.engine, "max_rows", None),
    ]
    group = TorchrunRanks(train_device(stage.config.train), stage_spec, make)
    engine = distributed_engine(group, stage, algorithm, channel)
    engine.samplers = group.samplers
    return engine


def distributed_engine(
    group: RankGroup, stage: Stage, algorithm: GroupAlgorithm, channel: WeightChannel
) -> DistributedTrainEngine:
    """Builds the driver's engine over ranks that each hold an engine from `build_rank_engine`."""
    from trivium.training.distributed.data_parallel import DistributedTrainEngine

    engine = DistributedTrainEngine(
        group,
        algorithm,
        max_response_length=stage.config.engine.sampling.max_new_tokens,
        first_version=stage.first_version,
        share_prefix=shares_prefixes(stage.config.train),
    )
    attached(engine, stage, channel)
    return engine


def shares_prefixes(train: TrainConfig) -> bool:
    """Whether the ranks of a stage compute common prefixes of sequences once."""
    return bool(getattr(train, "share_prefix", False))


def build_rank_engine(
    stage: Stage, algorithm: GroupAlgorithm, channel: WeightChannel | None, **further: object
) -> TrainEngine:
    """Builds the train engine of one process, which joins the other ranks if there are any. Only rank 0 needs a
    channel. `further`: see `TorchTrainEngine`."""
    config = stage.config
    if algorithm.teacher is not None and algorithm.teacher.path is not None:
        check_vocabulary(algorithm.teacher.path, stage.model_dir)
    if launched_ranks() > 1:
        if not capabilities_of(resolve("train", config.train.kind)).multiple_ranks:
            raise ConfigError(
                f"train.kind {config.train.kind!r} on {launched_ranks()} ranks",
                "it trains in one process",
                "use train.kind torch, or start one process",
            )
        from trivium.training.distributed.ranks import join_ranks

        train: Any = config.train
        further["ranks"] = join_ranks(
            sequence=train.sequence_parallel,
            shard=train.shard,
            tensor=train.parallel.tensor,
            expert=train.parallel.expert,
            device=train_device(config.train),
            deadline_s=collective_deadline([config.sync]),
        )
    kind = resolve("train", config.train.kind)
    if not (isinstance(kind, type) and issubclass(kind, TrainEngine)):
        raise ConfigError(
            f"train.kind {config.train.kind!r}",
            f"{getattr(kind, '__name__', kind)} is no trivium.protocols.TrainEngine",
            "derive it from that class; a front door drives engines of its own interface",
        )
    engine = build(
        "train",
        config.train,
        model_dir=stage.model_dir,
        algorithm=algorithm,
        # Expert data has no sampling temperature.
        temperature=config.engine.sampling.temperature if stage.explored else 1.0,
        max_response_length=config.engine.sampling.max_new_tokens,
        total_steps=config.schedule.steps,
        first_version=stage.first_version,
        seed=config.run.seed,
        threads=stage.threads,
        **further,
    )
    return attached(engine, stage, channel)


def attached(engine: TrainEngine, stage: Stage, channel: WeightChannel | None) -> TrainEngine:
    """Sets what the stage prescribes to the engine."""
    engine.settings = EngineSettings(
        channel,
        engine_dtype(stage.config),
        stage.config.checkpoint.save_strategy,
        keeps_updates=stage.config.run.keep == "tokens" and stage.config.run.mode != "explore",
        shares_gpu=getattr(stage.config.engine, "sleep_level", 0) > 0,
    )
    return engine


def engine_dtype(config: RunConfig) -> str:
    """Returns the dtype of the engines' weights; empty if engines on other machines choose it."""
    here = config.cluster.kind == "local" and config.run.mode in ("both", "serve", "tinker")
    named = str(getattr(config.engine.on_this_machine() if here else config.engine, "dtype", ""))
    return named if named in ("float32", "bfloat16") else ""


def collective_deadline(stages: Iterable[SyncSection]) -> float:
    """Returns the deadline of collective calls between ranks. It exceeds the longest wait of the first rank for
    explorers, in any stage."""
    return 60.0 + max(sync.deadline_s for sync in stages)


def train_device(train: TrainConfig) -> str:
    """Returns `cpu` or `cuda`: the device type of `train.device` on this machine."""
    from trivium.models.placement import device_of

    return device_of(getattr(train, "device", "cpu")).type


def check_vocabulary(teacher: Path, policy: Path, load: Callable[[Path], Any] = hf_tokenizer) -> None:
    """Raises ConfigError if the tokenizers that `load` returns for teacher and policy have different tokens for an
    id."""
    tokenizers = [load(path) for path in (teacher, policy)]
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise ConfigError(
            f"learn from the teacher {teacher}",
            f"its tokenizer differs from that of {policy}",
            "use a teacher with the policy's tokenizer",
        )
