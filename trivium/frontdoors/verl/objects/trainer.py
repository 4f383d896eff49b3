"""RayPPOTrainer: verl's trainer API on Trivium's components. `loops.run` runs the training loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trivium.algorithms import GroupAlgorithm
from trivium.algorithms.kl import KlController
from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.cluster.session import connect
from trivium.config import build
from trivium.config.resume import fingerprint
from trivium.evaluate import Evaluator
from trivium.explorer import Explorer
from trivium.foundation.atomic import atomic_write, made_directory
from trivium.foundation.board import MemoryBoard
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.errors import ConfigError, TriviumError, first_cause
from trivium.foundation.randomness import permutation
from trivium.frontdoors.verl.config.sourced_sections import reward_model_dtype
from trivium.frontdoors.verl.data import RowDataset
from trivium.frontdoors.verl.group_rewards import Hooks
from trivium.frontdoors.verl.objects.adoption import adopt_checkpoint
from trivium.frontdoors.verl.objects.attributes import Attributes, refuse_unused
from trivium.frontdoors.verl.objects.batches.batch_view import BatchView, living, trained_view
from trivium.frontdoors.verl.objects.datasets.user_data import DataSources, RowLoader
from trivium.frontdoors.verl.objects.overridable import (
    OverridableMonitor,
    OverridableTrainer,
    OverridableValidator,
    TrainerStage,
    numbers,
)
from trivium.frontdoors.verl.objects.resource_pools import ResourcePoolManager, Role
from trivium.frontdoors.verl.objects.roles import by_model, chosen_roles, start_groups
from trivium.frontdoors.verl.objects.run_setup import RunSetup
from trivium.frontdoors.verl.objects.validation import Validator, sample
from trivium.frontdoors.verl.objects.workers.model_workers import (
    RoleTrainEngine,
    WorkerChannel,
    WorkerConfig,
    WorkerRolloutEngine,
    rm_scores,
)
from trivium.frontdoors.verl.objects.workers.worker_group import RayWorkerGroup
from trivium.frontdoors.verl.registered import functions_here
from trivium.frontdoors.verl.rewards.reward_loading import compute_reward as call_manager
from trivium.frontdoors.verl.translation import settings_of
from trivium.loops import Parts
from trivium.loops import run as run_parts
from trivium.planning.plan import Plan
from trivium.protocols import Algorithm, Monitor, TrainEngine, WeightChannel
from trivium.runtime.build import (
    Endpoints,
    algorithm_of,
    build_buffer,
    build_explorer,
    build_monitor,
    build_parts,
    build_schedule,
    build_synchronizer,
    build_trainer,
)
from trivium.runtime.launch import run
from trivium.runtime.logs import logging_to
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.stage import Stage, StageSpec, TrainStage
from trivium.runtime.train_engines import attached, shares_prefixes
from trivium.trainer import StepKeeper, Trainer
from trivium.types import Batch, Group, Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Noted:
    """Keeps train steps as the run does, and passes each on."""

    keeper: StepKeeper | None
    note: Callable[[int, Sequence[Group], Batch], None]

    @property
    def keeps_updates(self) -> bool:
        return self.keeper is not None and self.keeper.keeps_updates

    def step(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        if self.keeper is not None:
            self.keeper.step(step, groups, batch)
        self.note(step, groups, batch)

    def updates(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        if self.keeper is not None:
            self.keeper.updates(step, groups, batch)


class RayPPOTrainer(Attributes):
    """Trains with PPO and related algorithms on Ray worker groups.

    `init_workers()` starts the processes. `fit()` trains and returns the run summary. A subclass may override the
    methods below "what users override". An override of a method that is never called raises ConfigError.
    """

    def __init__(
        self,
        config: object,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: ResourcePoolManager | None,
        ray_worker_group_cls: Callable[..., RayWorkerGroup] = RayWorkerGroup,
        processor: object = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
        train_dataset: RowDataset | None = None,
        val_dataset: RowDataset | None = None,
        collate_fn: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        train_sampler: Iterable[int] | None = None,
        device_name: str | None = None,
    ) -> None:
        """`config` is a RunConfig, or a config in verl's layout (`config_table.TABLE` maps its keys).

        A dataset is a sized, indexable object whose rows have the RLHF schema. Without one, the trainer reads
        `data.train_files` and `data.val_files`. A reward function is a reward manager, `compute_score(data_source,
        solution_str, ground_truth, extra_info)` or `f(prompt, completion, **columns)`. Without one, the config names
        it. Validation uses `reward_fn` unless `val_reward_fn` is passed. Raises ConfigError and DataError for invalid
        arguments before any process starts.
        """
        refuse_unused(type(self), RayPPOTrainer)
        self.config: Any = config  # user code reads verl's keys from it
        self.tokenizer, self.processor = tokenizer, processor
        self.role_worker_mapping, self.ray_worker_group_cls = dict(role_worker_mapping), ray_worker_group_cls
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.device_name: str | None = device_name
        self.train_dataloader = self.val_dataloader = None
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self._follow_dataloaders()
        self.run_config, self.device_name, self._verl = self._setup.run_config, self._setup.device, self._setup.verl
        self._needs = self._setup.needs
        self.use_critic, self.use_reference_policy = self._needs.critic, self._needs.reference
        self.use_rm, self.ref_in_actor = self._needs.reward_model, self._needs.reference_in_actor
        # Overrides that were written for verl's trainer read these.
        self.hybrid_engine, self.async_rollout_mode = True, False
        self._roles = chosen_roles(self.role_worker_mapping, self._needs)
        self.resource_pool_manager = resource_pool_manager or self._default_pools()
        self._validate_config()
        self._kl_controller: KlController | None = None
        self._monitor: OverridableMonitor | None = None
        self._views: dict[Role, RayWorkerGroup] = {}
        self._groups: list[RayWorkerGroup] = []
        self._trainer: OverridableTrainer | None = None
        self._step: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._validating: tuple[asyncio.AbstractEventLoop, OverridableValidator, int] | None = None
        self._last: Metrics = {}

    # ------------------------------------------------------------------ what users call

    def init_workers(self) -> None:
        """Reserves the pools, starts the worker groups and loads their models: critic, reference, reward model, actor
        and its rollout engine. Raises ConfigError if the cluster has too few CPUs or GPUs, or if a monitor or engine
        cannot run on this machine."""
        if self._groups:
            raise TriviumError("init_workers()", "the workers are already running", "call it once, or shutdown() first")
        self._setup.check_machine()
        run_dir = Path(self.run_config.run.dir).resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        connect(self._verl["ray_kwargs"] or {}, self._verl["ray_init"] or {})
        if not self.resource_pool_manager.resource_pool_dict:
            self.resource_pool_manager.create_resource_pool()
        # The processes of all pools run on the same cores.
        threads = self.run_config.cluster.threads or max(1, usable_cores() // self.resource_pool_manager.get_n_gpus())
        reward_model = self._verl["reward_model.model.path"]
        reward_model = None if reward_model is None else Path(reward_model).expanduser().resolve()
        spec, dtype = StageSpec.of(self._stage(run_dir, threads)), reward_model_dtype(self._verl) or "auto"
        worker_config = WorkerConfig(spec, reward_model, dtype, functions_here())
        with logging_to(run_dir, "log.txt"):
            self._views, self._groups = start_groups(
                self._roles,
                self.resource_pool_manager,
                self.ray_worker_group_cls,
                worker_config,
                self._needs,
                run_dir=run_dir,
                threads=threads,
                deadline_s=self.run_config.sync.deadline_s,
            )
            models = by_model(self._views, self._needs)
            self._engine = RoleTrainEngine(
                models,
                algorithm_of(self.run_config),
                longest=self.run_config.engine.sampling.max_new_tokens,
                sequence=getattr(self.run_config.train, "sequence_parallel", 1),
                share_prefix=shares_prefixes(self.run_config.train),
                measures_use=self.device_name == "cuda"
                or getattr(self.run_config.train, "peak_flops", None) is not None,
            )
            if Role.RewardModel in self._views:
                self._views[Role.RewardModel].run("init_model")
            self._engine.prepare()
            self._actor = models["policy"]
            self._rollout = WorkerRolloutEngine(self._actor)

    def fit(self) -> dict[str, Any]:
        """Trains to the end, starting from the latest checkpoint in `trainer.default_local_dir` if one exists. Returns
        the summary, with the metrics of the last validation under `validation`.

        Raises the first cause if training fails.
        """
        if not self._groups:
            raise TriviumError("fit()", "there are no workers", "call init_workers() first")
        if self._verl["trainer.val_only"]:
            return {"validation": self._validate_alone()}
        self._adopt_checkpoint()
        try:
            summary = run(self.run_config, self._session)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        return summary | ({"validation": self._last} if self._last else {})

    def shutdown(self) -> None:
        """Stops the workers and releases the pools."""
        for group in self._groups:
            group.shutdown()
        self._groups, self._views = [], {}
        self.resource_pool_manager.release()

    # ------------------------------------------------------------------ what users override

    def _validate_config(self) -> None:
        """Called after the config is read and checked. An override may add checks."""

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        """Reads the data and sets `train_dataset`, `val_dataset`, `train_dataloader` and `val_dataloader`. An override
        may pass other arguments, or set its own DataLoaders; the trainer uses their dataset, sampler and collate_fn."""
        self._set_up(DataSources(train_dataset, val_dataset, collate_fn, train_sampler))

    def _balance_batch(
        self,
        batch: BatchView,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> None:
        """Called with the rollouts of a step before rewards are computed, if `trainer.balance_batch` is set. `metrics`
        are logged. An override may call `batch.reorder`: mini-batches follow the order of the prompts.

        This method does nothing: every mini-batch is balanced over the ranks in any order."""

    def _compute_reward(self, batch: BatchView, reward_fn: Callable[..., Any] | None = None) -> Any:
        """Returns the rewards (B, R) of rollouts and the extra information by name. Training and validation call it;
        `batch.meta_info["validate"]` is true in validation."""
        return self.compute_reward(batch, reward_fn)

    def compute_reward(self, batch: BatchView, reward_fn: Callable[..., Any] | None = None) -> Any:
        """Returns the result of a reward manager: `reward_fn` if passed, else the manager of the run."""
        setup = self._setup
        if reward_fn is not None and reward_fn not in (self.reward_fn, self.val_reward_fn):
            return call_manager(batch, reward_fn)
        validates = batch.meta_info.get("validate") if reward_fn is None else reward_fn is not self.reward_fn
        rewards = setup.val_rewards if validates else setup.rewards
        assert rewards is not None, "called where the RunConfig's own rewards are not used"
        return rewards.call_manager(batch)

    def _maybe_log_val_generations(self, inputs: list[str], outputs: list[str], scores: list[float]) -> None:
        """Logs `trainer.log_val_generations` samples of a validation; every validation logs the same choice."""
        del inputs, outputs, scores  # for overrides: the logged table has more columns
        assert self._validating is not None, "validation calls it"
        _, validator, version = self._validating
        self._show_generations(version, validator.samples_seen)

    def _validate(self) -> Metrics:
        """Samples and scores the validation set with the current policy, and returns the metrics. Additional metrics
        that an override returns are logged too."""
        assert self._validating is not None, "the training calls it"
        loop, validator, version = self._validating
        return asyncio.run_coroutine_threadsafe(validator.validate(version), loop).result()

    def _save_checkpoint(self) -> None:
        """Saves models, optimizers, data order, KL controller and counters of this step."""
        assert self._trainer is not None, "the training calls it"
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._trainer.save_now(), self._loop).result()

    def _load_checkpoint(self) -> int:
        """Restores the workers from the latest checkpoint, or initializes them. Returns the number of train steps."""
        assert self._trainer is not None, "the training calls it"
        self._trainer.prepare()
        return self._trainer.train_step_num

    # ------------------------------------------------------------------ running stages

    @contextmanager
    def _session(
        self, plan: Plan, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None
    ) -> Generator[TrainStage]:
        """Yields the function that trains a stage. The loops run here, models and rollout engines in the workers."""
        monitor = self._monitor = OverridableMonitor(build_monitor(plan.config, run_dir, latest))
        try:
            yield partial(self._train_stage, store=store, monitor=monitor, board=MemoryBoard())
        finally:
            self._monitor = None
            monitor.close()

    def _train_stage(
        self,
        stage: Stage,
        resume: Checkpoint | None,
        record: dict[str, Any],
        *,
        store: CheckpointStore,
        monitor: Monitor,
        board: MemoryBoard,
    ) -> dict[str, Any]:
        stage = self._rendered(stage)
        endpoints = self._endpoints(stage, board, fingerprint(stage.config))
        trainer_class = partial(OverridableTrainer, owner=self)
        built = build_trainer(stage, endpoints, store, resume, monitor, record, self._attached_engine, trainer_class)
        trainer = self._trainer = cast(OverridableTrainer, built)
        # As verl: before training by val_before_train, at the end only if test_freq asks for validations at all.
        if not self._setup.from_run_config:
            skip_start, skip_end = not self._verl["trainer.val_before_train"], self._verl["trainer.test_freq"] <= 0
            measurements = trainer.measurements
            measurements.cadence = replace(measurements.cadence, skip_start=skip_start, skip_end=skip_end)
        trainer.keep = _Noted(trainer.keep, self._note)
        # The engine shares the GPUs of its ranks: while they train, its memory is theirs.
        if getattr(stage.config.engine, "sleep_level", 0):
            trainer.before_learning = partial(asyncio.to_thread, self._actor.run, "rest")
        parts = self._build_parts(stage, endpoints, trainer)
        self._load_checkpoint()
        run_in_loop(self._run(parts), stage.config.workflow.deadline_s)
        self._last = parts.evaluator.results if isinstance(parts.evaluator, Validator) else {}
        return trainer.run_record

    def _note(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Passes a step's groups and batch to the dump and a learning sampler."""
        self._dump("trainer.rollout_data_dir", step, [sample(g, m, m.metrics) for g, m in living(groups)])
        if self._setup.train is not None and self._setup.train.orders.learns:
            assert self._setup.rewards is not None
            with self._within(step):
                self._setup.train.orders.update(trained_view(groups, batch, self._setup.rewards.pad_token_id, step))

    @contextmanager
    def _within(self, step: int | None) -> Generator[None]:
        """Sets `global_steps` for user methods that are called inside a train step."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def _rewarded(self, view: BatchView) -> object:
        """Returns the result of `_compute_reward` for rollouts."""
        validates = bool(view.meta_info.get("validate"))
        with self._within(None if validates else view.meta_info.get("global_steps")):
            return self._compute_reward(view)

    def _balanced(self, view: BatchView) -> None:
        metrics: dict[str, Any] = {}
        if self._verl["trainer.balance_batch"]:
            with self._within(view.meta_info["global_steps"]):
                self._balance_batch(view, metrics)
        if self._monitor is not None:
            self._monitor.measured |= numbers(metrics, "_balance_batch")

    async def _run(self, parts: Parts) -> None:
        self._loop = asyncio.get_running_loop()
        await run_parts(parts)

    def _validate_alone(self) -> Metrics:
        """Validates the latest checkpoint, or the initial model without one, and does not train."""
        run_dir = Path(self.run_config.run.dir).resolve()
        stage, latest = self._rendered(self._stage(run_dir)), CheckpointStore(run_dir / "checkpoints").latest()
        endpoints = self._endpoints(stage, MemoryBoard())
        engine = self._attached_engine(stage, algorithm_of(stage.config), endpoints.channel)
        engine.prepare()
        if latest is not None:
            engine.load(latest.path)
        parts = self._build_parts(stage, endpoints)
        explorer, validator = parts.explorer, parts.evaluator
        assert explorer is not None
        assert validator is not None, "translation refuses val_only without validation data"

        async def validated() -> Metrics:
            await asyncio.to_thread(engine.offer_weights)
            await explorer.adopt(engine.version, endpoints.channel)
            return await validator.run(engine.version)

        return run_in_loop(validated(), stage.config.workflow.deadline_s)

    def _rendered(self, stage: Stage) -> Stage:
        """Returns the stage with the renderer of the user's tokenizer."""
        return TrainerStage(**vars(stage), user_renderer=self._setup.renderer)

    def _endpoints(self, stage: Stage, board: MemoryBoard, *fingerprints: Mapping[str, str]) -> Endpoints:
        synchronizer = build_synchronizer(stage.config.sync, board, *fingerprints)
        return Endpoints(build_buffer(stage, build_schedule(stage)), synchronizer, WorkerChannel(self._actor))

    def _build_parts(self, stage: Stage, endpoints: Endpoints, trainer: Trainer | None = None) -> Parts:
        """Builds the parts of a run. The validator scores rollouts as one batch and reports per data source."""
        explorer: Explorer = build_explorer(stage, engine=self._rollout)
        explorer.must_judge = explorer.must_judge and self._setup.rewards is None
        parts = build_parts(stage, endpoints, trainer, explorer)
        if not isinstance(parts.evaluator, Evaluator):
            return parts
        source_key = self._verl["data.reward_fn_key"]
        rewards = self._setup.val_rewards
        validator = OverridableValidator(**vars(parts.evaluator), rewards=rewards, source_key=source_key, owner=self)
        return replace(parts, evaluator=validator)

    def _attached_engine(self, stage: Stage, algorithm: Algorithm, channel: WeightChannel) -> TrainEngine:
        """Returns the engine over the workers, attached to the stage and the weight channel."""
        estimator = cast(GroupAlgorithm, algorithm).estimator
        if self._kl_controller is not None and estimator is not None:
            estimator = replace(estimator, kl_controller=self._kl_controller)
            algorithm = replace(cast(GroupAlgorithm, algorithm), estimator=estimator)
        self._engine.algorithm = algorithm
        self._engine.version = stage.first_version
        return attached(self._engine, stage, channel)

    def _show_generations(self, version: int, samples: list[dict[str, Any]]) -> None:
        """Logs a table of validation samples; every validation logs the same choice."""
        count = self._verl["trainer.log_val_generations"]
        if count and self._monitor is not None:
            # Rollouts finish in any order: sorted, the same choice is the same samples.
            ordered = sorted(samples, key=lambda sample: (sample["input"], sample["output"]))
            chosen = permutation(len(ordered), "val_generations")[:count]
            self._monitor.table(version, "val_generations", [ordered[int(place)] for place in chosen])

    def _dump(self, key: str, step: int, samples: list[dict[str, Any]]) -> None:
        """Writes the samples into the folder that the config names under `key`, if any."""
        if (folder := self._verl[key]) is not None:
            path = made_directory(Path(folder), key) / f"{step}.jsonl"
            lines = (json.dumps({**row, "step": step}, ensure_ascii=False, default=str) for row in samples)
            atomic_write(path, "".join(f"{line}\n" for line in lines))

    def _adopt_checkpoint(self) -> None:
        """With `resume_path`, makes that checkpoint the latest one of the run directory."""
        path = self._verl["trainer.resume_from_path"]
        if self._verl["trainer.resume_mode"] == "resume_path" and path is not None:
            store = CheckpointStore(Path(self.run_config.run.dir).resolve() / "checkpoints")
            adopt_checkpoint(Path(path).resolve(), store)

    # ------------------------------------------------------------------ data

    def _set_up(self, sources: DataSources) -> None:
        """Reads the config and the data."""
        setup = self._setup = RunSetup(
            self.config,
            self.tokenizer,
            reward_fn=self.reward_fn,
            val_reward_fn=self.val_reward_fn,
            sources=sources,
            device_name=self.device_name,
            processor=self.processor,
            reward_model=self._model_scores if Role.RewardModel in self.role_worker_mapping else None,
            hooks=Hooks(self._rewarded, self._balanced),
        )
        self.train_dataset, self.val_dataset = setup.train_dataset, setup.val_dataset
        self.collate_fn, self.train_sampler = setup.collate_fn, setup.train_sampler
        self.train_dataloader = None if setup.train is None else RowLoader(setup.train_dataset, setup.train)
        self.val_dataloader = None if setup.val is None else RowLoader(setup.val_dataset, setup.val)

    def _follow_dataloaders(self) -> None:
        """Reads the data of the DataLoaders that an override of `_create_dataloader` has set."""
        train, val = self.train_dataloader, self.val_dataloader
        if not all(loader is None or isinstance(loader, RowLoader) for loader in (train, val)):
            batch = settings_of(self.config)["data.train_batch_size"]
            self._set_up(DataSources.of_loaders(train, val, batch))
        elif "_setup" not in vars(self):
            raise ConfigError(
                "an override of _create_dataloader",
                "it set no train_dataloader",
                "call super()._create_dataloader, or set train_dataloader to a DataLoader",
            )

    # ------------------------------------------------------------------ workers

    def _model_scores(self, batch: Batch) -> list[float]:
        return rm_scores(self._views[Role.RewardModel], batch)

    def _default_pools(self) -> ResourcePoolManager:
        counts = [self._verl["trainer.n_gpus_per_node"]] * self._verl["trainer.nnodes"]
        return ResourcePoolManager(
            {"global_pool": counts}, dict.fromkeys(self._roles, "global_pool"), device_name=self.device_name
        )

    def _stage(self, run_dir: Path, threads: int = 0) -> Stage:
        config = self.run_config
        model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
        if threads:
            config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"threads": threads})})
        return Stage(config, 0, 0, True, run_dir, model_dir)
