"""RayPPOTrainer: the original's trainer object over Trivium's parts. It has no loop: `loops.run` trains."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from trivium.assemble import (
    Meeting,
    Stage,
    algorithm_of,
    attached,
    build_buffer,
    build_explorer,
    build_monitor,
    build_schedule,
    build_synchronizer,
    build_trainer,
    explorer_parts,
    trainer_parts,
)
from trivium.board import MemoryBoard
from trivium.checkpoint import Checkpoint, CheckpointStore, write_aside
from trivium.cluster.instance import connect
from trivium.cluster.orders import Order
from trivium.cluster.pools import ResourcePoolManager, Role
from trivium.cluster.worker_group import RayWorkerGroup
from trivium.cluster.workers import RoleTrainEngine, WorkerChannel, WorkerConfig, WorkerRolloutEngine, rm_scores
from trivium.config import RunConfig, build, usable_cores
from trivium.errors import ConfigError, RunDirError, TriviumError, first_cause
from trivium.evaluate import Evaluator
from trivium.explorer import Explorer
from trivium.frontdoors.data import Data, DatasetTasks, fitting, read_files, rows_of, some_rows
from trivium.frontdoors.keys import default_of
from trivium.frontdoors.prompts import CutRenderer
from trivium.frontdoors.roles import Needs, by_model, chosen_roles, start_groups
from trivium.frontdoors.scoring import Judged, Scoring, as_manager
from trivium.frontdoors.translation import Said, run_dir_of, translated
from trivium.frontdoors.validation import Validator
from trivium.launch import PlayStage, both_halves, play, train
from trivium.logs import logging_to
from trivium.loops import Parts
from trivium.protocols import Monitor, Renderer, TrainEngine, WeightChannel
from trivium.randomness import permutation
from trivium.sameness import fingerprint
from trivium.sealing import MANIFEST
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.trainer import Cadence, Trainer
from trivium.types import Batch, Metrics

_VALIDATION = "val"
_TAKEN_UP = "taken_up.txt"
"""Says which checkpoint of another run this one began with."""
_HISTORY = ("metrics.jsonl", "tables", "rollouts", "order")
"""What a run directory holds that a checkpoint speaks of."""


@dataclass(frozen=True)
class _DoorStage(Stage):
    """A stage whose messages are rendered as the user's tokenizer does it."""

    own_renderer: Any = None

    @property
    def renderer(self) -> Any:
        return self.own_renderer


@dataclass
class _DoorTrainer(Trainer):
    """A Trainer that saves and loads through methods that users override."""

    door: Any = None

    async def save_checkpoint(self) -> None:
        await asyncio.to_thread(self.door._save_checkpoint)

    async def save_now(self) -> None:
        """Saves, whatever the user makes of it."""
        await super().save_checkpoint()


@dataclass
class _Asked:
    """The evaluator of an explorer: validation through a method that users override."""

    door: Any
    validator: Validator

    async def run(self, version: int) -> Metrics:
        self.door._validating = asyncio.get_running_loop(), self.validator, version
        said = await asyncio.to_thread(self.door._validate)
        self.door._show_generations(version, self.validator.samples_seen)
        return {**self.validator.results, **said}


class RayPPOTrainer:
    """Trains with PPO and its relatives: the driver's end of worker groups on Ray.

    `init_workers()` starts the processes, `fit()` trains and returns what `summary.json` says. `_validate`,
    `_save_checkpoint` and `_load_checkpoint` may be overridden.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: ResourcePoolManager | None,
        ray_worker_group_cls: Any = RayWorkerGroup,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        """`config` has the original's shape (`keys.TABLE` says what each key becomes), or is a RunConfig.

        A dataset is anything sized and indexable whose rows have the RLHF schema; unsaid, `data.train_files` and
        `data.val_files` are read. A reward function is a reward manager, `compute_score(data_source, solution_str,
        ground_truth, extra_info)` or `f(prompt, completion, **columns)`; unsaid, the config names one, and validation
        uses that of training. Raises ConfigError and DataError for everything that cannot work, before anything starts.
        """
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.role_worker_mapping, self.ray_worker_group_cls = dict(role_worker_mapping), ray_worker_group_cls
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.collate_fn, self.train_sampler = collate_fn, train_sampler
        self._said = None if isinstance(config, RunConfig) else Said(config)
        self.device_name = _device(device_name or self._get("trainer.device"), config)
        self._views: dict[Role, Any] = {}
        self._groups: list[Any] = []
        self._trainer: _DoorTrainer | None = None
        self._monitor: Monitor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._validating: tuple[asyncio.AbstractEventLoop, Validator, int] | None = None
        self._build_renderer()
        self.run_config = self._run_config()
        self._check_run_config()
        self._roles = chosen_roles(self.role_worker_mapping, self._needs)
        self.resource_pool_manager = resource_pool_manager or self._default_pools()

    # ------------------------------------------------------------------ what users call

    def init_workers(self) -> None:
        """Reserves the pools, starts the worker groups and loads their models: critic, reference, reward model, actor
        and its rollout engine. Raises ConfigError where the cluster has too few CPUs or GPUs."""
        if self._groups:
            raise TriviumError("init_workers()", "the workers are there already", "call it once, or shutdown() first")
        run_dir = Path(self.run_config.run.dir).resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        connect(self._get("ray_kwargs") or {}, self._get("ray_init") or {})
        if not self.resource_pool_manager.resource_pool_dict:
            self.resource_pool_manager.create_resource_pool()
        threads = self.run_config.cluster.threads or max(1, usable_cores() // self.resource_pool_manager.get_n_gpus())
        worker_config = WorkerConfig(Order.of(self._stage(run_dir, threads)), self._reward_model)
        with logging_to(run_dir, "log.txt"):
            self._views, self._groups = start_groups(
                self._roles, self.resource_pool_manager, self.ray_worker_group_cls, worker_config, self._needs,
                run_dir=run_dir, threads=threads, deadline_s=self.run_config.sync.deadline_s,
            )  # fmt: skip
            models = by_model(self._views, self._needs)
            self._engine = RoleTrainEngine(
                models, algorithm_of(self.run_config), longest=self.run_config.engine.sampling.max_new_tokens,
                sequence=getattr(self.run_config.train, "sequence_parallel", 1),
            )  # fmt: skip
            if Role.RewardModel in self._views:
                self._views[Role.RewardModel].init_model()
            self._engine.prepare()
            self._actor = models["policy"]
            self._rollout = WorkerRolloutEngine(self._actor)

    def fit(self) -> dict[str, Any]:
        """Trains to the end, from the latest checkpoint of `trainer.default_local_dir` where there is one. Returns the
        summary, with the last validation's metrics under `validation`.

        Raises the first cause of whatever stopped it.
        """
        if not self._groups:
            raise TriviumError("fit()", "there are no workers", "call init_workers() first")
        if self._get("trainer.val_only"):
            return {"validation": self._validate_alone()}
        self._take_up()
        try:
            summary = train(self.run_config, self._place)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        return summary | ({"validation": self._last} if self._last else {})

    def shutdown(self) -> None:
        """Ends the workers and gives the pools back."""
        for group in self._groups:
            group.shutdown()
        self._groups, self._views = [], {}
        self.resource_pool_manager.release()

    @property
    def global_steps(self) -> int:
        """Train steps behind the policy."""
        return self._trainer.train_step_num if self._trainer is not None else 0

    # ------------------------------------------------------------------ what users override

    def _validate(self) -> Metrics:
        """Plays and scores the validation set with the current policy; its metrics. Further ones that an override
        returns are logged where they are declared: `val-aux/...` is."""
        assert self._validating is not None, "the training calls it"
        loop, validator, version = self._validating
        return asyncio.run_coroutine_threadsafe(validator.run(version), loop).result()

    def _save_checkpoint(self) -> None:
        """Saves models, optimizers, data order, KL controller and counters of this step."""
        assert self._trainer is not None, "the training calls it"
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._trainer.save_now(), self._loop).result()

    def _load_checkpoint(self) -> int:
        """Puts the workers where the run left off, or at its start; how many train steps that is."""
        assert self._trainer is not None, "the training calls it"
        self._trainer.prepare()
        return self._trainer.train_step_num

    # ------------------------------------------------------------------ playing the run

    @contextmanager
    def _place(
        self, config: RunConfig, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None
    ) -> Generator[PlayStage]:
        """Where the stage is played: the loops here, models and rollouts in the workers."""
        monitor, board = build_monitor(config, run_dir, latest), MemoryBoard()

        def played(stage: Stage, resume: Checkpoint | None, record: dict[str, Any]) -> dict[str, Any]:
            return self._play(stage, store, resume, monitor, record, board)

        self._monitor = monitor
        try:
            yield played
        finally:
            self._monitor = None
            monitor.close()

    def _play(
        self, stage: Stage, store: CheckpointStore, resume: Checkpoint | None, monitor: Monitor,
        record: dict[str, Any], board: MemoryBoard,
    ) -> dict[str, Any]:  # fmt: skip
        stage = self._own(stage)
        synchronizer = build_synchronizer(stage.config, board, fingerprint(stage.config))
        meeting = Meeting(build_buffer(stage, build_schedule(stage)), synchronizer, WorkerChannel(self._actor))
        made = build_trainer(
            stage, meeting, store, resume, monitor, record, self._train_engine, partial(_DoorTrainer, door=self)
        )
        trainer = self._trainer = cast(_DoorTrainer, made)
        trainer.cadence = self._cadence(trainer.cadence)
        explorer = self._explorer(stage)
        parts = both_halves(trainer_parts(stage, meeting, trainer), explorer_parts(stage, meeting, explorer))
        validator = self._validator(parts.evaluator)
        if validator is not None:
            parts = replace(parts, evaluator=cast(Evaluator, _Asked(self, validator)))
        self._load_checkpoint()
        asyncio.run(self._run(parts))
        self._last = validator.results if validator is not None else {}
        return {**trainer.record, "seconds": trainer.seconds}

    async def _run(self, parts: Parts) -> None:
        self._loop = asyncio.get_running_loop()
        await play(parts)

    def _validate_alone(self) -> Metrics:
        """Validates the latest checkpoint, or the model as it is, and trains nothing."""
        run_dir = Path(self.run_config.run.dir).resolve()
        stage, latest = self._own(self._stage(run_dir)), CheckpointStore(run_dir / "checkpoints").latest()
        channel = WorkerChannel(self._actor)
        engine = self._train_engine(stage, algorithm_of(stage.config), channel)
        engine.prepare()
        if latest is not None:
            engine.load(latest.path)
        explorer = self._explorer(stage)
        schedule = build_schedule(stage)
        nowhere = Meeting(build_buffer(stage, schedule), build_synchronizer(stage.config, MemoryBoard()), channel)
        validator = self._validator(explorer_parts(stage, nowhere, explorer).evaluator)
        assert validator is not None, "translation refuses val_only without validation data"

        async def validated() -> Metrics:
            await asyncio.to_thread(engine.sync_weight)
            await explorer.adopt(engine.version, channel)
            return await _Asked(self, validator).run(engine.version)

        return asyncio.run(validated())

    def _own(self, stage: Stage) -> Stage:
        """The stage, rendering as the user's tokenizer does."""
        said = {field.name: getattr(stage, field.name) for field in fields(stage) if field.name != "own_renderer"}
        return _DoorStage(**said, own_renderer=self._renderer)

    def _explorer(self, stage: Stage) -> Explorer:
        explorer = build_explorer(stage, engine=self._rollout)
        explorer.must_judge = explorer.must_judge and self._scoring is None
        return explorer

    def _show_generations(self, version: int, samples: list[dict[str, Any]]) -> None:
        """A table of some samples of a validation, the same ones every time."""
        most = self._get("trainer.log_val_generations")
        if most and self._monitor is not None:
            ordered = sorted(samples, key=lambda sample: (sample["input"], sample["output"]))
            chosen = permutation(len(ordered), "val_generations")[:most]
            self._monitor.table(version, "val_generations", [ordered[int(place)] for place in chosen])

    def _train_engine(self, stage: Stage, algorithm: Any, channel: WeightChannel) -> TrainEngine:
        """The engine over the workers, as far as it had come."""
        self._engine.algorithm = algorithm
        for engine in self._engine.parts:
            engine.algorithm = algorithm
        self._engine.version = stage.first_version
        return attached(self._engine, stage, channel)

    def _validator(self, evaluator: Evaluator | None) -> Validator | None:
        """The evaluator as the original validates: judged as one batch, reported per data source."""
        if evaluator is None:
            return None
        said = {field.name: getattr(evaluator, field.name) for field in fields(evaluator)}
        return Validator(**said, scoring=self._val_scoring, source_key=self._get("data.reward_fn_key"))

    def _cadence(self, cadence: Cadence) -> Cadence:
        if self._said is None:
            return cadence
        return replace(
            cadence,
            skip_start=not self._said["trainer.val_before_train"],
            skip_end=self._said["trainer.test_freq"] <= 0,
        )

    def _take_up(self) -> None:
        """With `resume_path`, makes that checkpoint the latest one of the run directory, and the history of its run the
        history of this one: what came after the checkpoint is cut off when the run goes on."""
        path = self._get("trainer.resume_from_path")
        if self._get("trainer.resume_mode") != "resume_path" or path is None:
            return
        source, store = Path(path).resolve(), CheckpointStore(Path(self.run_config.run.dir).resolve() / "checkpoints")
        if not (source / MANIFEST).is_file():
            raise RunDirError(f"resume from {source}", "no complete checkpoint there", "name a step-... directory")
        newest, mark = store.steps()[-1:], store.directory.parent / _TAKEN_UP
        if newest and (mark.is_file() and mark.read_text(encoding="utf-8") == str(source)):
            return  # an earlier session took it up: this one goes on from the latest
        if newest and source == (store.directory / f"step-{newest[0]:06d}").resolve():
            return
        if newest:
            raise RunDirError(
                f"resume from {source}", f"{store.directory} has checkpoints up to step {newest[0]}",
                "choose another default_local_dir, or resume_mode: auto to go on from the latest",
            )  # fmt: skip
        store.directory.mkdir(parents=True, exist_ok=True)
        aside = store.directory / f".{source.name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(source, aside)
        began = source.parent.parent
        for name in _HISTORY:
            if (began / name).is_dir():
                shutil.copytree(began / name, store.directory.parent / name, dirs_exist_ok=True)
            elif (began / name).is_file():
                shutil.copyfile(began / name, store.directory.parent / name)
        write_aside(mark, str(source))
        aside.rename(store.directory / source.name)

    # ------------------------------------------------------------------ what the arguments say

    def _get(self, key: str) -> Any:
        """What the original's config says of a key; its default for a RunConfig."""
        return default_of(key) if self._said is None else self._said[key]

    def _build_renderer(self) -> None:
        truncation, longest = self._get("data.truncation"), self._get("data.max_prompt_length")
        renderer = ChatRenderer(self.tokenizer)
        self._renderer: Renderer = (
            renderer if self._said is None or truncation == "error" else CutRenderer(renderer, longest, truncation)
        )
        self._plain_renderer = renderer

    def _run_config(self) -> RunConfig:
        """The RunConfig, with the rows and the reward functions of this process in it."""
        if self._said is None:
            return self._of_run_config(self.config)
        validation, data = self._rows(self.val_dataset, "val"), self._train_data(Path(run_dir_of(self._said)) / "order")
        mapping = translated(
            self._said, rows=data.epoch_length, has_validation=bool(validation), device=self.device_name
        )
        tasks = {"train": DatasetTasks.Config.of(data)}
        if validation:
            tasks[_VALIDATION] = DatasetTasks.Config.of(self._val_data(validation))
        self._scoring = self._scores(self.reward_fn)
        self._val_scoring = self._scores(self.val_reward_fn) if self.val_reward_fn is not None else self._scoring
        strategy = {"buffer": {"kind": "memory", "strategy": Judged.Config.by(self._scoring)}}
        return RunConfig.from_mapping({**mapping, **strategy, "tasks": tasks})

    def _of_run_config(self, config: RunConfig) -> RunConfig:
        """The RunConfig with what was passed beside it laid over."""
        schedule, said = config.schedule, config.model_dump(exclude_unset=True)
        tasks: dict[str, Any] = dict(config.tasks)
        orders = Path(config.run.dir) / "order"
        if self.train_dataset is not None:
            rows = rows_of(self.train_dataset, "train_dataset")
            tasks["train"] = DatasetTasks.Config.of(
                self._data(rows, "train", schedule.groups_per_step, schedule.shuffle, config.run.seed, orders)
            )
        elif self.train_sampler is not None or self.collate_fn is not None:
            raise ConfigError(
                "a train_sampler or collate_fn with a RunConfig", "its tasks are read by the config's own source",
                "pass train_dataset too, or say schedule.curriculum",
            )  # fmt: skip
        if self.val_dataset is not None:
            tasks[_VALIDATION] = DatasetTasks.Config.of(self._val_data(rows_of(self.val_dataset, "val_dataset")))
            said["evaluation"] = {"taskset": _VALIDATION, **said.get("evaluation", {})}
        judges = self.reward_fn is not None or not config.rewards
        self._scoring = self._scores(self.reward_fn) if judges else None
        self._val_scoring = self._scores(self.val_reward_fn) if self.val_reward_fn is not None else self._scoring
        if self._scoring is not None:
            said["buffer"] = {**said.get("buffer", {}), "strategy": Judged.Config.by(self._scoring)}
            said["rewards"] = []
        return RunConfig.from_mapping({**said, "tasks": tasks})

    def _check_run_config(self) -> None:
        config = self.run_config
        if config.stages or config.run.mode != "both":
            raise ConfigError(
                "RayPPOTrainer over a RunConfig", "it has `stages`, or another run.mode than both",
                "use `trivium.run` for such a run",
            )  # fmt: skip
        if config.slots_are_settled:
            raise ConfigError(
                "schedule.deterministic ahead of the trainer", "the workers' engines keep the newest weights alone",
                "set schedule.max_staleness or schedule.deterministic back",
            )  # fmt: skip
        if config.checkpoint.asynchronous:
            # Roles that share processes would meet in one process group from several threads, in no order.
            raise ConfigError(
                "checkpoint.asynchronous with RayPPOTrainer", "its workers save while training waits",
                "set checkpoint.asynchronous: false, or use `trivium.run` for such a run",
            )  # fmt: skip
        needed = algorithm_of(config).needs
        enabled = bool(self._get("reward_model.enable")) or Role.RewardModel in self.role_worker_mapping
        self._needs = Needs(
            critic=config.algorithm.has_critic, reference="ref" in needed,
            reference_in_actor=getattr(config.train, "lora", None) is not None, reward_model=enabled,
        )  # fmt: skip
        if "teacher" in needed or "teacher_top" in needed:
            raise ConfigError(
                f"algorithm.kind {config.algorithm.kind!r}", "no role of RayPPOTrainer holds a teacher",
                "use `trivium.run` for distillation",
            )  # fmt: skip
        self._check_tokenizer()
        self._last: Metrics = {}

    def _check_tokenizer(self) -> None:
        """The rollout engines know the model directory's tokenizer alone."""
        model = getattr(self.run_config.model, "path", None)
        if model is None:
            return
        there = hf_tokenizer(model)
        own = (
            ChatRenderer(there).eos_token_ids if there.chat_template is not None else self._plain_renderer.eos_token_ids
        )
        if there.get_vocab() != self.tokenizer.get_vocab() or own != self._plain_renderer.eos_token_ids:
            raise ConfigError(
                f"the tokenizer of the model {model}", "the one passed has other tokens, or ends turns otherwise",
                "pass the model's own: hf_tokenizer(model path)",
            )  # fmt: skip

    def _rows(self, dataset: Any, split: str) -> list[Any]:
        """The rows of a dataset, or of the files that the config names."""
        name = f"_{split}_rows"
        if not hasattr(self, name):
            setattr(self, name, self._read_rows(dataset, split))
        return getattr(self, name)

    def _read_rows(self, dataset: Any, split: str) -> list[Any]:
        if dataset is not None:
            return rows_of(dataset, f"{split}_dataset")
        files = self._get(f"data.{split}_files")
        if not files:
            if split == "val":
                return []
            raise ConfigError("training data", "neither train_dataset nor data.train_files", "pass one of the two")
        rows = read_files(files, f"data.{split}_files")
        shuffle = split == "train" and bool(self._get("data.shuffle"))
        return some_rows(
            rows, self._get(f"data.{split}_max_samples"), shuffle=shuffle, seed=self._get("data.seed") or 0
        )

    def _train_data(self, orders: Path) -> Data:
        said = self._said
        assert said is not None
        make = partial(
            self._data, taskset="train", batch=said["data.train_batch_size"], shuffle=bool(said["data.shuffle"]),
            seed=said["data.seed"] or 0, orders=orders,
        )  # fmt: skip
        return self._fitting(make, self._rows(self.train_dataset, "train"), sampled=self.train_sampler is not None)

    def _val_data(self, rows: Sequence[Any]) -> Data:
        def make(rows: Sequence[Any]) -> Data:
            return Data(
                rows, taskset=_VALIDATION, origin="the validation set", batch=len(rows),
                prompt_key=self._get("data.prompt_key"), collate_fn=self.collate_fn,
            )  # fmt: skip

        return make(rows) if self._said is None else self._fitting(make, rows, sampled=False)

    def _data(self, rows: Sequence[Any], taskset: str, batch: int, shuffle: bool, seed: int, orders: Path) -> Data:
        return Data(
            rows, taskset=taskset, origin="the training set", batch=batch, prompt_key=self._get("data.prompt_key"),
            collate_fn=self.collate_fn, sampler=self.train_sampler, shuffle=shuffle, seed=seed, orders=orders,
        )  # fmt: skip

    def _fitting(self, make: Callable[[Sequence[Any]], Data], rows: Sequence[Any], *, sampled: bool) -> Data:
        return fitting(
            make, rows, self._plain_renderer, longest=self._get("data.max_prompt_length"),
            truncation=self._get("data.truncation"), leave_out=bool(self._get("data.filter_overlong_prompts")),
            sampled=sampled,
        )  # fmt: skip

    def _scores(self, reward_fn: Any) -> Scoring:
        """Scoring by a reward function, or by what the config names."""
        if reward_fn is None:
            from trivium.rewards import load_reward_manager

            if self._said is None:
                raise ConfigError(
                    "rewards", "neither `rewards` in the RunConfig nor a reward_fn", "give one of the two"
                )
            kwargs = self._get("reward_model.reward_kwargs") or {}
            reward_fn = load_reward_manager(self.config, self.tokenizer, num_examine=0, **kwargs)
        manager = as_manager(reward_fn, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        model = self._model_scores if Role.RewardModel in self.role_worker_mapping else None
        return Scoring(manager, self.tokenizer.eos_token_id if pad is None else pad, model)

    def _model_scores(self, batch: Batch) -> list[float]:
        return rm_scores(self._views[Role.RewardModel], batch)

    @property
    def _reward_model(self) -> Path | None:
        path = self._get("reward_model.model.path")
        return None if path is None else Path(path).expanduser().resolve()

    def _default_pools(self) -> ResourcePoolManager:
        counts = [self._get("trainer.n_gpus_per_node")] * self._get("trainer.nnodes")
        return ResourcePoolManager(
            {"global_pool": counts}, dict.fromkeys(self._roles, "global_pool"), device_name=self.device_name
        )

    def _stage(self, run_dir: Path, threads: int = 0) -> Stage:
        config = self.run_config
        model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
        if threads:
            config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"threads": threads})})
        return Stage(config, 0, 0, True, run_dir, model_dir)


def _device(name: str | None, config: Any) -> str:
    """`cpu` or `cuda`. Raises ConfigError for a GPU that is not there, and for other devices."""
    if name is None and isinstance(config, RunConfig):
        name = getattr(config.train, "device", "auto")
    if name in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    name = name.partition(":")[0]  # a worker finds its own among those that Ray gives it
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device_name {name!r}", "training is built for cpu and cuda", "say one of the two")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device_name {name!r}", "no GPU that torch can use", "say device_name='cpu'")
    return name
