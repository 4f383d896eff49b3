"""The worker classes that `RayPPOTrainer` maps roles to, and the driver's engines over groups of them.

Users may derive from these classes: the driver calls the methods and their overrides. A method that takes `Work`
receives its rank's share of a batch. The driver joins the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trivium.cluster.weights import Stored, store
from trivium.engines.pool import EnginePool, Replica
from trivium.foundation.errors import ConfigError, RolloutError, TriviumError, VersionGone
from trivium.foundation.metrics import declare_missing
from trivium.foundation.phases import Phase
from trivium.foundation.registry import give
from trivium.frontdoors.verl.objects.workers.worker import Worker, takes_gpus_of_ranks
from trivium.frontdoors.verl.objects.workers.worker_group import RayWorkerGroup
from trivium.models.heads.classifier import load_score_model
from trivium.models.heads.loss import LossDenominators
from trivium.models.placement import dtype_of
from trivium.planning.choices import MICRO_BATCH_TOKENS
from trivium.planning.memory_estimate import gpus_of
from trivium.protocols import (
    Algorithm,
    Objective,
    RestingEngine,
    RolloutEngine,
    WeightHandle,
    WeightOffer,
    Weights,
    offer_on,
)
from trivium.runtime.build import algorithm_of, build_engine
from trivium.runtime.stage import StageSpec
from trivium.runtime.train_engines import build_rank_engine, shares_prefixes, train_device
from trivium.training.distributed.data_parallel import DistributedTrainEngine
from trivium.training.learner import Learner, RoleModel
from trivium.training.passes import MicroBatching
from trivium.training.role_models import SCORED_BY
from trivium.types import AnyArray, Batch, Capabilities, Completion, Metrics, Request, capabilities_of

HELD = {
    "actor_rollout_ref": ("policy", "reference"),
    "actor_rollout": ("policy",),
    "critic": ("critic",),
    "ref": ("reference",),
}
"""Role of a worker -> the models that its train engine holds."""
_SCORING = {"policy": "compute_log_prob", "reference": "compute_ref_log_prob", "critic": "compute_values"}
_UPDATING = {"policy": "update_actor", "critic": "update_critic"}
"""Model -> the worker method that scores it, or trains it."""
_POLICY_PHASES = ("update/policy", "score/old")
"""The phases in which the policy's group computes."""
_GATHER_S = 0.002
"""Seconds that the first request of a batch waits for further requests."""


@dataclass(frozen=True)
class WorkerConfig:
    """The settings of every worker, apart from the name of its role."""

    spec: StageSpec
    """The stage of the run."""
    reward_model: Path | None = None
    """Directory of the reward model, if the run has one."""
    reward_model_dtype: str = "auto"
    """Dtype of the reward model; `auto` is bfloat16 on a GPU that computes in it, else float32."""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    """Result of `registered.functions_here` on the driver."""


@dataclass(frozen=True)
class Work:
    """One rank's share of a batch, and the operation on it."""

    version: int
    """Number of train steps that the policy has taken."""
    batch: Batch
    what: str = ""
    """Name of the score to compute, from `types.SCORES`."""
    objective: Objective | None = None
    """Objective that an update minimises."""
    denominators: LossDenominators | None = None
    """Counts over the whole mini-batch that normalise an update."""


# --------------------------------------------------------------------------- in the processes of the ranks


class ModelWorker(Worker):
    """One rank of a role, with a train engine for the role's models."""

    engine: Any = None
    """The rank's `TorchTrainEngine`; `init_model` sets it."""

    def __init__(self, config: WorkerConfig, role: str) -> None:
        """`role` is a key of `HELD`."""
        # The main module of this process is Ray's, which lacks the functions of the user's script.
        for name, function in config.functions.items():
            give(name, function)
        self.config, self.role = config, role

    def init_model(self) -> None:
        """Loads the initial models. All ranks must call it together."""
        stage = self.config.spec.stage()
        if self.engine is None:
            self.engine = build_rank_engine(stage, algorithm_of(stage.config), None, roles=HELD[self.role])
        self.engine.version = stage.first_version
        self.engine.prepare()

    def save_checkpoint(self, directory: Path, version: int) -> None:
        """Writes models and optimizers of this role. All ranks must call it together."""
        self.engine.version = version
        self.engine.save(directory)

    def load_checkpoint(self, directory: Path) -> int:
        """Loads a checkpoint that any number of ranks saved, and returns its version."""
        self.engine.load(directory)
        return self.engine.version

    def scored(self, data: Work) -> list[AnyArray]:
        """Returns a score of a model of this role: for each experience, an array of its length."""
        self.engine.version = data.version
        return self.engine.score(data.batch, data.what)

    def updated(self, role: str, data: Work) -> Metrics:
        """Takes one optimizer step with a model of this role."""
        self.engine.version = data.version
        return self.engine.update(role, data.batch, data.objective, data.denominators)


class ActorRolloutRefWorker(ModelWorker):
    """Holds the policy, a rollout engine, and, for `actor_rollout_ref`, the frozen reference."""

    rollout: RolloutEngine | None = None
    _hosts_engine = True
    """Whether this rank has a rollout engine: one over several GPUs is that of the rank of its first GPU."""
    _published: Stored | None = None
    """The last published weights; None except on the first rank."""

    def init_model(self) -> None:
        super().init_model()
        if "rollout" in self.role and self.rollout is None and self._hosts_engine:
            stage = self.config.spec.stage()
            self._hosts_engine = takes_gpus_of_ranks(gpus_of(stage.config.engine))
            self.rollout = build_engine(stage) if self._hosts_engine else None

    def compute_log_prob(self, data: Work) -> list[AnyArray]:
        """Returns a score of the current policy (`data.what`: `old`, `log_prob`, `entropy`, ...) per token."""
        return self.scored(data)

    def compute_ref_log_prob(self, data: Work) -> list[AnyArray]:
        """Returns the reference's log-probabilities per token."""
        return self.scored(data)

    def update_actor(self, data: Work) -> Metrics:
        """Takes one optimizer step with the policy on a mini-batch."""
        return self.updated("policy", data)

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        """Returns the model FLOPs of these phases over the peak of all ranks."""
        return self.engine.utilisation(phases)

    def save_weights(self, directory: Path) -> None:
        """Writes only the policy, as a plain Hugging Face directory. All ranks must call it together."""
        self.engine.save_weights(directory)

    def exported_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the policy's tensors by name, on the first rank only. All ranks must call it together."""
        exported = [(name, tensor.cpu()) for name, tensor in self.engine.export_weights()]
        return exported if self.rank == 0 else []

    def update_weights(self, version: int) -> None:
        """Publishes the policy's weights for the rollout engines. The first rank puts them into Ray's object store in
        parts; each machine holds one copy. All ranks must call it together."""
        self._published = None  # frees the old weights before new ones are stored
        weights = self.engine.offered_weights()
        if self.rank == 0:
            self._published = store(version, weights)
        for gathered in weights:  # every rank takes part in every gather
            del gathered
        self.engine.free_cache()

    def published_weights(self) -> Stored | None:
        """Returns a reference to the weights that `update_weights` published last, on the first rank only."""
        return self._published

    async def adopt_weights(self, weights: WeightHandle, in_flight: str = "finish") -> None:
        """Loads published weights into this rank's rollout engine, if it has one."""
        if self._hosts_engine:
            await self._engine().load(weights.version, weights, in_flight=in_flight)

    async def rest(self) -> None:
        """Frees the device of this rank's rollout engine until the next request or weights, if the engine can."""
        if isinstance(self.rollout, RestingEngine):
            await self.rollout.rest()

    async def generate_sequences(self, requests: Sequence[Request]) -> list[Completion | RolloutError]:
        """Returns a completion or an error for each request. Calls may run concurrently."""
        results: list[Completion | RolloutError] = []
        for result in await asyncio.gather(*map(self._engine().generate, requests), return_exceptions=True):
            # The error of one rollout is its answer; any other one is the engine's, and ends the run.
            if isinstance(result, BaseException) and not isinstance(result, RolloutError):
                raise result
            results.append(result)
        return results

    def rollout_facts(self) -> tuple[int, Capabilities] | None:
        """Returns (longest context, capabilities) of the rollout engine; None if the engine of another rank uses this
        rank's GPU."""
        return (self._engine().max_context, capabilities_of(self._engine())) if self._hosts_engine else None

    def _engine(self) -> RolloutEngine:
        if self.rollout is None:
            raise TriviumError(
                f"completions of the role {self.role!r}",
                f"rank {self.rank} has no rollout engine",
                "map ActorRollout, and init_model(); engines over several GPUs are those of every such number of ranks",
            )
        return self.rollout


AsyncActorRolloutRefWorker = ActorRolloutRefWorker
"""verl's name for workers whose rollout engine answers requests one by one, as every engine does here."""


class CriticWorker(ModelWorker):
    """Holds the critic."""

    def compute_values(self, data: Work) -> list[AnyArray]:
        """Returns the value of the state before each trained token."""
        return self.scored(data)

    def update_critic(self, data: Work) -> Metrics:
        """Takes one optimizer step with the critic on a mini-batch."""
        return self.updated("critic", data)


class RewardModelWorker(Worker):
    """Holds a frozen reward model. Every rank has the whole model."""

    def __init__(self, config: WorkerConfig, role: str) -> None:
        self.config, self.role = config, role
        self._learner: Learner | None = None

    def init_model(self) -> None:
        """Loads the reward model."""
        stage, path = self.config.spec.stage(), self.config.reward_model
        if path is None:
            raise ConfigError("reward_model.model.path", "nothing", "name the reward model of Role.RewardModel")
        device = torch.device(train_device(stage.config.train))
        dtype: torch.dtype = getattr(torch, dtype_of(self.config.reward_model_dtype, device.type))
        model = load_score_model(path, dtype=dtype, device=device).requires_grad_(False)
        max_tokens = getattr(stage.config.train, "max_tokens_per_micro_batch", None) or MICRO_BATCH_TOKENS
        self._learner = Learner(
            RoleModel("reward", model),
            MicroBatching(max_tokens, share_prefix=shares_prefixes(stage.config.train)),
            max_response_length=stage.config.engine.sampling.max_new_tokens,
        )

    def compute_rm_score(self, data: Work) -> list[float]:
        """Returns the score at the last trained token of each experience, or 0 without trained tokens."""
        assert self._learner is not None, "init_model() is called before"
        scores = self._learner.score(data.batch, "values")
        return [
            float(score[np.flatnonzero(e.response_mask)[-1]]) if e.response_mask.any() else 0.0
            for score, e in zip(scores, data.batch.experiences, strict=True)
        ]


# --------------------------------------------------------------------------- on the driver


class RoleRanks:
    """The `RankGroup` of one role. It maps the methods of train engines to methods of the workers."""

    def __init__(self, group: RayWorkerGroup, sequence: int) -> None:
        """`sequence` ranks share each sequence."""
        self.group, self._sequence = group, sequence

    @property
    def data_size(self) -> int:
        return self.group.world_size // self._sequence

    def run_on_all_ranks(self, method: str, *args: object) -> Any:
        match method:
            case "prepare":
                results = self.group.run("init_model")
            case "save":
                version, directory = args
                results = self.group.run("save_checkpoint", directory, version)
            case "load":
                results = self.group.run("load_checkpoint", *args)
            case _:
                results = self.group.run(method, *args)
        return results[0]

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], *args: Any) -> list[Any]:
        works = [Work(share.version, share.batch) for (share,) in shares]
        if method == "score":
            (what,) = args
            name, works = _SCORING[SCORED_BY[what][0]], [replace(work, what=what) for work in works]
        elif method != "update":
            raise TriviumError(
                f"the call {method!r} of the train engine", "verl's workers have no such method", "use `trivium.run`"
            )
        else:
            role, objective, denominators = args
            name = _UPDATING[role]
            works = [replace(work, objective=objective, denominators=denominators) for work in works]
        by_rank = [works[rank // self._sequence] for rank in range(self.group.world_size)]
        # Ranks that share a sequence return the same result.
        return self.group.run_each(name, by_rank)[:: self._sequence]

    def close(self) -> None:
        """Does nothing: the trainer that started the workers stops them."""


class RoleTrainEngine(DistributedTrainEngine):
    """A train engine over worker groups. Each method runs on the group that holds the model."""

    def __init__(
        self,
        groups: Mapping[str, RayWorkerGroup],
        algorithm: Algorithm,
        *,
        sequence: int,
        longest: int,
        share_prefix: bool = False,
        measures_use: bool = False,
    ) -> None:
        """`groups` maps `policy`, and `critic` and `reference` if the algorithm has them, to groups; a group may hold
        two models. `longest` is the maximum length of a completion in tokens. `share_prefix` equals the setting of the
        ranks. `measures_use` enables `utilisation`."""
        self._measures_use = measures_use
        ranks = {id(group): RoleRanks(group, sequence) for group in groups.values()}
        by_role = {role: ranks[id(group)] for role, group in groups.items()}
        super().__init__(
            by_role["policy"], algorithm, max_response_length=longest, groups=by_role, share_prefix=share_prefix
        )
        self._is_initial = False
        """Whether the workers hold the initial models."""

    def prepare(self) -> None:
        # `init_workers` has loaded the models, and the run prepares its engine once more.
        if not self._is_initial:
            super().prepare()
        self._is_initial = True

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        self._is_initial = False
        metrics = super().update(role, batch, objective)
        declare_missing(metrics, "a number that user code on a worker reported")
        return metrics

    def load(self, directory: Path) -> None:
        self._is_initial = False
        super().load(directory)

    def offer_weights(self) -> WeightOffer:
        """Has the workers publish the weights. No weights pass through the driver."""
        return offer_on(self.settings.channel, self.version, ())

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        """Saves while training waits: workers do not copy their state."""
        del on_copied
        super().save(directory)

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        """Returns the utilisation of the policy's group. Returns an empty mapping without `measures_use`, since
        processes that share a CPU have no peak of their own."""
        if not self._measures_use:
            return {}
        return super().utilisation({name: phase for name, phase in phases.items() if name in _POLICY_PHASES})


class WorkerChannel:
    """Transfers weights from the policy to the rollout engine of every rank, and holds one version at a time.

    Only references to the weights pass through the driver.
    """

    capabilities = Capabilities(local=True, uses_directory=False)

    def __init__(self, group: RayWorkerGroup) -> None:
        self._group, self.offered = group, ""
        self._weights: Stored | None = None

    def offer(self, version: int, weights: Weights) -> bool:
        del weights  # the workers hold them
        self._weights = None
        # The old weights leave Ray's object store before the new ones enter it.
        self._group.run("update_weights", version)
        self._weights = self._group.run("published_weights")[0]
        if self._weights is None or self._weights.version != version:
            raise TriviumError(
                f"the weights of version {version} from the workers",
                "update_weights was overridden, and published none" if self._weights is None else "they are older",
                "call super().update_weights(version) there",
            )
        self.offered = self._weights.hash
        return True

    def collect(self, version: int) -> Stored:
        if self._weights is None or self._weights.version != version:
            raise VersionGone(f"collect version {version}", f"the workers hold {self.versions}", "adopt the newest")
        return self._weights

    @property
    def versions(self) -> tuple[int, ...]:
        return () if self._weights is None else (self._weights.version,)

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        if versions:
            raise TriviumError(
                f"save the published versions {list(versions)}",
                "workers keep only the newest version",
                "train with schedule.max_staleness 0, or without schedule.deterministic",
            )

    def restore(self, directory: Path) -> None:
        """Does nothing: training offers the current weights when it resumes."""


class _WorkerReplica(Replica):
    """The rollout engine of one rank's worker. Requests that arrive within `_GATHER_S` share a call."""

    def __init__(self, group: RayWorkerGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Completion:
        """Returns one completion. If the caller is cancelled after the request is sent, the result is dropped."""
        loop = asyncio.get_running_loop()
        completion: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, completion))
        if len(self._waiting) == 1:
            loop.call_later(_GATHER_S, self._send)
        return await completion

    def cancel(self) -> None:
        """Cancels the calls in progress."""
        for call in self._calls:
            call.cancel()

    def _send(self) -> None:
        waiting = [(request, completion) for request, completion in self._waiting if not completion.done()]
        self._waiting = []
        if waiting:
            call = asyncio.ensure_future(self._call(waiting))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, waiting: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        requests = [request for request, _ in waiting]
        try:
            results = await self._group.run_on(self._rank, "generate_sequences", requests)
        except Exception as error:
            for _, completion in waiting:
                if not completion.done():
                    completion.set_exception(error)
            return
        for (_, completion), result in zip(waiting, results, strict=True):
            if completion.done():
                continue
            if isinstance(result, RolloutError):
                completion.set_exception(result)
            else:
                completion.set_result(result)


class WorkerRolloutEngine(EnginePool[_WorkerReplica]):
    """Combines the rollout engines of a group's workers into one engine."""

    def __init__(self, group: RayWorkerGroup) -> None:
        facts = group.run("rollout_facts")
        super().__init__([_WorkerReplica(group, rank) for rank, fact in enumerate(facts) if fact is not None])
        self._group = group
        # The first rank always has an engine: it is the first of those that share one.
        self.max_context, self.capabilities = facts[0]

    async def _load(self, version: int, weights: Weights, in_flight: str) -> None:
        await asyncio.to_thread(self._group.run, "adopt_weights", weights, in_flight)

    async def close(self) -> None:
        """Cancels the calls in progress. The trainer that started the workers stops them."""
        for replica in self.replicas:
            replica.cancel()


def rm_scores(group: RayWorkerGroup, batch: Batch) -> list[float]:
    """Returns the score of each experience of a batch from a group of reward model workers, in order."""
    size, count = group.world_size, len(batch)
    cuts = [count * part // size for part in range(size + 1)]
    works = [Work(0, batch.select(range(cuts[rank], cuts[rank + 1]))) for rank in range(size)]
    return [score for part in group.run_each("compute_rm_score", works) for score in part]
