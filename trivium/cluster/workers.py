"""The worker classes that `RayPPOTrainer` maps roles to, and what the driver makes of their groups.

A user may derive from them: the driver calls their methods, and whatever overrides one is what is called. A method that
is given `Work` gets its rank's share of a batch; what it returns is put together by the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trivium.assemble import algorithm_of, build_engine, build_rank_engine, train_device
from trivium.cluster.dispatch import Dispatch, register
from trivium.cluster.orders import Order
from trivium.cluster.worker import Worker
from trivium.errors import ConfigError, RolloutError, TriviumError, VersionGone
from trivium.models.heads import VALUE_HEAD, ScoreModel
from trivium.models.loss import Totals
from trivium.protocols import Algorithm, Objective, RolloutEngine, TrainEngine, Weights
from trivium.training.learner import Learner
from trivium.training.split import SplitTrainEngine
from trivium.training.torch import SCORED_BY
from trivium.types import AnyArray, Batch, Completion, Metrics, Request

HELD = {
    "actor_rollout_ref": ("policy", "reference"), "actor_rollout": ("policy",), "critic": ("critic",),
    "ref": ("reference",),
}  # fmt: skip
"""Role of a worker -> the models that its train engine holds."""
_SCORING = {"policy": "compute_log_prob", "reference": "compute_ref_log_prob", "critic": "compute_values"}
_UPDATING = {"policy": "update_actor", "critic": "update_critic"}
"""Model -> the worker method that scores it, or trains it."""
_GATHER_S = 0.002
"""How long the first request of a batch waits for others to go with it."""


@dataclass(frozen=True)
class WorkerConfig:
    """What every worker is built with, beside the name of its role."""

    order: Order
    """The stage it works for."""
    reward_model: Path | None = None
    """The directory of the reward model, where there is one."""


@dataclass(frozen=True)
class Work:
    """What one rank is given: its share of a batch, and what is to be done with it."""

    version: int
    """Train steps behind the policy."""
    batch: Batch
    what: str = ""
    """The score that is wanted: a name of `types.SCORES`."""
    objective: Objective | None = None
    """What an update minimises."""
    totals: Totals | None = None
    """Counts over the whole mini-batch, by which an update is normalised."""


# --------------------------------------------------------------------------- in the processes of the ranks


class ModelWorker(Worker):
    """One rank's part of the models of a role: a train engine for them alone."""

    engine: Any = None
    """The rank's `TorchTrainEngine`, once `init_model` was called."""

    def __init__(self, config: WorkerConfig, role: str) -> None:
        """`role` is a name of `HELD`."""
        self.config, self.role = config, role

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the models as they were before training. All ranks together."""
        stage = self.config.order.stage()
        if self.engine is None:
            self.engine = build_rank_engine(stage, algorithm_of(stage.config), None, roles=HELD[self.role])
        self.engine.version = stage.first_version
        self.engine.prepare()

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: Path, version: int) -> None:
        """Writes models and optimizers of this role. All ranks together."""
        self.engine.version = version
        self.engine.save(directory)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> int:
        """Opens what `save_checkpoint` wrote, on whatever number of ranks; its version."""
        self.engine.load(directory)
        return self.engine.version

    def scored(self, data: Work) -> list[AnyArray]:
        """What a model of this role says about each experience, one array of its length."""
        self.engine.version = data.version
        return self.engine.score(data.batch, data.what)

    def updated(self, role: str, data: Work) -> Metrics:
        """One optimizer step of a model of this role."""
        self.engine.version = data.version
        return self.engine.update(role, data.batch, data.objective, data.totals)


class ActorRolloutRefWorker(ModelWorker):
    """The policy, an engine that samples from it, and, where its role says so, the frozen reference."""

    rollout: RolloutEngine | None = None
    _staged: tuple[int, list[tuple[str, torch.Tensor]]] | None = None
    """The weights that were pushed last, until the engine adopts them."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if "rollout" in self.role and self.rollout is None:
            self.rollout = build_engine(self.config.order.stage())

    @register(Dispatch.DP_COMPUTE)
    def compute_log_prob(self, data: Work) -> list[AnyArray]:
        """What the current policy says (`data.what`: `old`, `log_prob`, `entropy`, ...), per token."""
        return self.scored(data)

    @register(Dispatch.DP_COMPUTE)
    def compute_ref_log_prob(self, data: Work) -> list[AnyArray]:
        """The reference's log-probabilities, per token."""
        return self.scored(data)

    @register(Dispatch.DP_COMPUTE)
    def update_actor(self, data: Work) -> Metrics:
        """One optimizer step of the policy on a mini-batch."""
        return self.updated("policy", data)

    @register(Dispatch.ONE_TO_ALL)
    def save_weights(self, directory: Path) -> None:
        """Writes the policy alone, as a plain Hugging Face directory. All ranks together."""
        self.engine.save_weights(directory)

    @register(Dispatch.ONE_TO_ALL)
    def exported_weights(self) -> list[tuple[str, torch.Tensor]]:
        """The policy's tensors by name; of the first rank alone. All ranks together."""
        exported = [(name, tensor.cpu()) for name, tensor in self.engine.export_weights()]
        return exported if self.rank == 0 else []

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> None:
        """Puts the policy's weights, whole, beside this rank's rollout engine. All ranks together."""
        # Copies: training may go on before the engine has adopted them.
        self._staged = version, [(n, t.detach().clone()) for n, t in self.engine.export_weights()]

    @register(Dispatch.ONE_TO_ALL)
    async def adopt_weights(self, version: int, in_flight: str = "finish") -> None:
        """Has this rank's engine load the weights that `update_weights` put there."""
        if self._staged is None or self._staged[0] != version:
            raise VersionGone(
                f"adopt version {version}", f"the weights here are of {self._staged[0] if self._staged else 'none'}",
                "push the version again",
            )  # fmt: skip
        await self._engine().load(version, self._staged[1], in_flight=in_flight)
        if self._staged is not None and self._staged[0] == version:
            self._staged = None

    @register(Dispatch.DP_COMPUTE)
    async def generate_sequences(self, requests: Sequence[Request]) -> list[Completion | RolloutError]:
        """A reply to each request, or why there is none. Any number of calls at a time."""
        replies = await asyncio.gather(*map(self._engine().generate, requests), return_exceptions=True)
        said = [reply for reply in replies if isinstance(reply, Completion | RolloutError)]
        if len(said) < len(replies):
            raise next(reply for reply in replies if isinstance(reply, BaseException) and reply not in said)
        return said

    @register(Dispatch.ONE_TO_ALL)
    def rollout_facts(self) -> tuple[int, bool, bool]:
        """(longest context, whether it samples exactly, whether batches leave bits alone) of the engine."""
        engine = self._engine()
        return engine.max_context, engine.exact_sampling, getattr(engine, "batch_invariant", False)

    def _engine(self) -> RolloutEngine:
        if self.rollout is None:
            raise TriviumError(
                f"replies of the role {self.role!r}", "it has no rollout engine", "map ActorRollout, and init_model()"
            )
        return self.rollout


class CriticWorker(ModelWorker):
    """The critic."""

    @register(Dispatch.DP_COMPUTE)
    def compute_values(self, data: Work) -> list[AnyArray]:
        """The value of the state before each trained token."""
        return self.scored(data)

    @register(Dispatch.DP_COMPUTE)
    def update_critic(self, data: Work) -> Metrics:
        """One optimizer step of the critic on a mini-batch."""
        return self.updated("critic", data)


class RewardModelWorker(Worker):
    """A frozen reward model, whole on every rank."""

    def __init__(self, config: WorkerConfig, role: str) -> None:
        self.config, self.role = config, role
        self._learner: Learner | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the reward model."""
        stage, path = self.config.order.stage(), self.config.reward_model
        if path is None or not (path / f"{VALUE_HEAD}.safetensors").is_file():
            raise ConfigError(
                f"the reward model {path}", f"no directory with a model and {VALUE_HEAD}.safetensors",
                "name what `algorithm.kind: reward_model` trained (`reward/` of its checkpoint) in "
                "reward_model.model.path",
            )  # fmt: skip
        device = torch.device(train_device(stage.config))
        model = ScoreModel(path, dtype=torch.float32, device=device, seed=0)
        model.requires_grad_(False)
        budget = getattr(stage.config.train, "max_tokens_per_micro_batch", 16384)
        longest = stage.config.engine.sampling.max_new_tokens
        self._learner = Learner(model, "reward", max_tokens=budget, max_response_length=longest)

    @register(Dispatch.DP_COMPUTE)
    def compute_rm_score(self, data: Work) -> list[float]:
        """What each experience is worth: the score at its last trained token, 0 where it has none."""
        assert self._learner is not None, "init_model() comes first"
        scores = self._learner.score(data.batch, "values")
        return [
            float(score[np.flatnonzero(e.response_mask)[-1]]) if e.response_mask.any() else 0.0
            for score, e in zip(scores, data.batch.experiences, strict=True)
        ]


# --------------------------------------------------------------------------- on the driver


class RoleRanks:
    """The `RankGroup` of one role: the verbs of train engines in the words of its workers."""

    def __init__(self, group: Any, sequence: int) -> None:
        """`sequence` ranks share each sequence."""
        self.group, self._sequence = group, sequence

    @property
    def data_size(self) -> int:
        return self.group.world_size // self._sequence

    def everywhere(self, method: str, *args: Any) -> Any:
        match method:
            case "prepare":
                answers = self.group.init_model()
            case "save":
                answers = self.group.save_checkpoint(args[1], args[0])
            case "load":
                answers = self.group.load_checkpoint(*args)
            case "exported":
                answers = self.group.exported_weights()
            case _:
                answers = getattr(self.group, method)(*args)
        return answers[0]

    def shared_out(self, method: str, shares: Sequence[tuple[Any, ...]], *args: Any) -> list[Any]:
        given = [Work(share.version, share.batch) for (share,) in shares]
        if method == "score":
            (what,) = args
            name, given = _SCORING[SCORED_BY[what][0]], [replace(work, what=what) for work in given]
        else:
            role, objective, totals = args
            name = _UPDATING[role]
            given = [replace(work, objective=objective, totals=totals) for work in given]
        each = [given[rank // self._sequence] for rank in range(self.group.world_size)]
        return getattr(self.group, name)(each)[:: self._sequence]

    def close(self) -> None:
        """Nothing: the workers belong to who built their group."""


class RoleTrainEngine(TrainEngine):
    """The train engine over worker groups: each verb goes to the group that holds the model."""

    def __init__(self, groups: Mapping[str, Any], algorithm: Algorithm, *, sequence: int, longest: int) -> None:
        """`groups` is by model: `policy`, and `critic` and `reference` where the algorithm has them; one group may hold
        two. `longest` is the limit of one reply, in tokens."""
        self.algorithm = algorithm
        engines: dict[int, SplitTrainEngine] = {}
        for group in groups.values():
            engines.setdefault(
                id(group), SplitTrainEngine(RoleRanks(group, sequence), algorithm, max_response_length=longest)
            )
        self._by_model = {model: engines[id(group)] for model, group in groups.items()}
        self.parts = list(engines.values())
        """The engine over each group."""
        self._untouched = False
        """Whether the workers hold the models as they were before training."""

    def prepare(self) -> None:
        if not self._untouched:
            for engine in self.parts:
                engine.prepare()
        self._untouched = True

    def score(self, batch: Batch, what: str) -> Sequence[AnyArray]:
        return self._of(SCORED_BY[what][0]).score(batch, what)

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        self._untouched = False
        return self._of(role).update(role, batch, objective)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of("policy").export_weights()

    def sync_weight(self) -> bool:
        """Each worker hands its rollout engine the weights: none of them passes through here."""
        return self.channel.offer(self.version, ())

    def save(self, directory: Path) -> None:
        for engine in self.parts:
            engine.version = self.version
            engine.save(directory)

    def load(self, directory: Path) -> None:
        self._untouched = False
        for engine in self.parts:
            engine.load(directory)
        self.version = self.parts[0].version

    def save_weights(self, directory: Path) -> None:
        self._of("policy").save_weights(directory)

    def _of(self, model: str) -> SplitTrainEngine:
        engine = self._by_model[model]
        engine.version = self.version
        return engine


class WorkerChannel:
    """Carries weights from the policy to the rollout engine in the same process, on every rank; one version at a time.

    What travels through the driver is the number of the version.
    """

    local = True
    in_directory = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._version: int | None = None

    def offer(self, version: int, weights: Weights) -> bool:
        del weights  # they are where they are needed
        self._group.update_weights(version)
        self._version = version
        return True

    def collect(self, version: int) -> Weights:
        if version != self._version:
            raise VersionGone(f"collect version {version}", f"the workers hold {self.versions}", "adopt the newest")
        return []

    @property
    def versions(self) -> tuple[int, ...]:
        return () if self._version is None else (self._version,)

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        if versions:
            raise TriviumError(
                f"save the published versions {list(versions)}", "workers keep the newest one alone",
                "train with schedule.max_staleness 0, or without schedule.deterministic",
            )  # fmt: skip

    def restore(self, directory: Path) -> None:
        """Nothing was saved: the current weights are offered when training goes on."""


class WorkerRolloutEngine:
    """The rollout engines of a group's workers as one. Requests that come together go out together."""

    updates_in_flight = True

    def __init__(self, group: Any) -> None:
        self._group = group
        self.max_context, self.exact_sampling, self.batch_invariant = group.rollout_facts()[0]
        self._version = 0
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._busy = [0] * group.world_size
        """Requests at each rank."""
        self._calls: set[asyncio.Task[None]] = set()
        self._open: asyncio.Event | None = None

    @property
    def version(self) -> int:
        """The version that every rank's engine has loaded."""
        return self._version

    async def generate(self, request: Request) -> Completion:
        """One reply. A request that is no longer waited for is answered all the same, and the answer forgotten."""
        if self._open is not None:
            await self._open.wait()
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, reply))
        if len(self._waiting) == 1:
            loop.call_later(_GATHER_S, self._send)
        return await reply

    def _send(self) -> None:
        """Sends what waits to the ranks, the least busy first."""
        shares: dict[int, list[tuple[Request, asyncio.Future[Completion]]]] = {}
        for request, reply in self._waiting:
            if not reply.done():
                rank = min(range(len(self._busy)), key=self._busy.__getitem__)
                self._busy[rank] += 1
                shares.setdefault(rank, []).append((request, reply))
        self._waiting = []
        for rank, share in shares.items():
            call = asyncio.ensure_future(self._ask(rank, share))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _ask(self, rank: int, share: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        requests = [request for request, _ in share]
        try:
            replies = await self._group.execute_rank_async(rank, "generate_sequences", requests)
        except Exception as error:  # handed to everybody who waits for it
            for _, reply in share:
                if not reply.done():
                    reply.set_exception(error)
            return
        finally:
            self._busy[rank] -= len(share)
        for (_, reply), said in zip(share, replies, strict=True):
            if reply.done():
                continue
            if isinstance(said, RolloutError):
                reply.set_exception(said)
            else:
                reply.set_result(said)

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Has every rank's engine adopt the weights beside it; later requests wait for that."""
        del weights
        self._open = asyncio.Event()
        try:
            await asyncio.to_thread(self._group.adopt_weights, version, in_flight)
        finally:
            self._open.set()
            self._open = None
        self._version = version

    async def close(self) -> None:
        """Ends the calls in progress; the workers belong to who built their group."""
        for call in self._calls:
            call.cancel()


def rm_scores(group: Any, batch: Batch) -> list[float]:
    """What a group of reward model workers gives each experience of a batch, in order."""
    size, count = group.world_size, len(batch)
    cuts = [count * part // size for part in range(size + 1)]
    works = [Work(0, batch.select(range(cuts[rank], cuts[rank + 1]))) for rank in range(size)]
    return [score for part in group.compute_rm_score(works) for score in part]
