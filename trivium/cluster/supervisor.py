"""Starts, watches, restarts and ends the processes of one stage.

The first failure ends the stage with all its processes. A death is noticed at once: each process has a pending call
that ends with the process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from trivium.cluster.actors import (
    ActorDied,
    Host,
    call,
    causality,
    death_cause,
    result_of,
    start_host,
    start_role,
)
from trivium.cluster.roles import explore, make_buffer, train, trains_on_gpus
from trivium.cluster.shared_actors import BUFFER, SYNCHRONIZER, SharedActors
from trivium.cluster.weight_store import BoardAndWeights
from trivium.foundation.errors import RoleFailed
from trivium.processes.answers import Answer
from trivium.runtime.stage import Stage, StageSpec
from trivium.types import TRAINER

_log = logging.getLogger("trivium")
_POLL_S = 1.0
"""Interval at which a wait returns to Python, so that signals are handled."""
_GRACE_S = 1.0
"""How long to collect further failures before choosing the first cause."""
_BEAT_S = 1.0
"""Interval between two liveness answers of a host."""
_DRAIN_S = 20.0
"""How long explorers may take to leave once the trainer has finished."""
_ANSWER_S = 20.0
"""How long a living process may take to answer the driver when another has died."""


class Supervisor:
    """The processes of one stage. Call `run` once, and then `close`, also after an error."""

    def __init__(self, stage: Stage, namespace: str) -> None:
        self._stage, self._namespace = stage, f"{namespace}/stage-{stage.number}"
        self._spec = StageSpec.of(stage)
        self._actors: dict[str, ActorHandle[Any]] = {}
        self._watched: dict[ray.ObjectRef[Answer], tuple[str, str]] = {}
        """Pending reference -> (process, kind of call). `start` ends when the process is ready, `work` with the result
        of a role, `beat` after `_BEAT_S`, and `life` only with the death of the process."""
        self._deadlines: dict[str, tuple[float, str]] = {}
        """By process: (deadline, the missing action: `start` or `answer`)."""
        self._explorers: set[str] = set()
        """The running explorers."""
        self._record: dict[str, Any] | None = None
        """The result of the trainer; None until it has finished."""
        self._failing = False
        """Whether the stage is about to end with an error. Deaths of explorers then have no effect."""

    def run(self, record: dict[str, Any], resumes: bool) -> dict[str, Any]:
        """Runs the stage to its end and returns the record. Raises the first cause of a failure."""
        stage = self._stage
        synchronizer_host = self._start_host(SYNCHRONIZER, BoardAndWeights)
        buffer_host = self._start_host(BUFFER, make_buffer, self._spec)
        self._shared = SharedActors(synchronizer_host, buffer_host, self._namespace)
        self._synchronizer = self._shared.synchronizer(stage, "driver")
        self._start_role(TRAINER, train, record, resumes)
        for number in range(stage.num_explorers):
            self._start_explorer(f"explorer-{number}")
        while self._record is None:
            self._poll()
        self._drain()
        return self._record

    def close(self) -> None:
        """Kills every process. The engines of an explorer end with it."""
        for actor in self._actors.values():
            ray.kill(actor)

    def _drain(self) -> None:
        """Waits up to `_DRAIN_S` for the explorers to leave. Does not wait for explorers that never joined."""
        self._explorers &= self._synchronizer.board.read().get("explorers", {}).keys()
        end = time.monotonic() + _DRAIN_S
        while self._explorers and time.monotonic() < end:
            self._poll()
        if self._explorers:
            _log.warning("%s did not end within %.0f s", ", ".join(sorted(self._explorers)), _DRAIN_S)

    # ------------------------------------------------------------------ starting

    def _start_host(self, name: str, make: Callable[..., Any], *args: object) -> ActorHandle[Host]:
        actor = start_host(name, self._stage.run_dir.resolve(), self._stage.threads, namespace=self._namespace)
        self._watch(name, actor, start=actor.build.remote(make, *args), life=actor.live.remote())
        return actor

    def _start_role(self, name: str, body: Callable[..., Any], *args: object) -> None:
        config = self._stage.config
        # With several ranks, the models and their GPUs belong to the processes of the ranks.
        on_gpu = name == TRAINER and config.cluster.ranks == 1 and trains_on_gpus(config)
        actor = start_role(
            name, self._stage.run_dir.resolve(), self._stage.threads, namespace=self._namespace, num_gpus=float(on_gpu)
        )
        start = actor.ready.remote()  # submitted before the work, since the actor runs one call at a time
        work = actor.run.remote(body, name, self._spec, self._shared, *args)
        self._watch(name, actor, start=start, work=work)

    def _start_explorer(self, name: str) -> None:
        self._explorers.add(name)
        self._start_role(name, explore)

    def _watch(self, name: str, actor: ActorHandle[Any], **refs: ray.ObjectRef[Answer]) -> None:
        """Watches calls of a process, given by kind. The first to end must end before `sync.deadline_s`."""
        self._actors[name] = actor
        missing = "answer" if "beat" in refs else "start"
        self._deadlines[name] = time.monotonic() + self._stage.config.sync.deadline_s, missing
        self._watched |= {ref: (name, what) for what, ref in refs.items()}

    # ------------------------------------------------------------------ watching

    def _poll(self) -> None:
        """Waits for an event and handles it. Raises the most probable first cause of a failure."""
        ended, _ = ray.wait(list(self._watched), timeout=_POLL_S)
        failures = self._handle(ended) or self._late()
        if not failures:
            return
        self._failing = True
        ended, _ = ray.wait(list(self._watched), num_returns=len(self._watched), timeout=_GRACE_S)
        raise min([*failures, *self._handle(ended)], key=causality)

    def _handle(self, ended: list[ray.ObjectRef[Answer]]) -> list[Exception]:
        """Handles ended calls. Returns the failures that end the stage."""
        failures: list[Exception] = []
        for ref in ended:
            if ref not in self._watched:
                continue  # a call of an explorer whose death is handled
            name, what = self._watched.pop(ref)
            try:
                answer: Answer = ray.get(ref)
                value = answer.unwrap()
            except RayError as error:
                failures += self._handle_death(name, death_cause(error))
            except Exception as error:
                failures.append(error)
            else:
                self._handle_end(name, what, value)
        return failures

    def _handle_end(self, name: str, what: str, value: dict[str, Any] | None) -> None:
        self._deadlines.pop(name, None)
        # The driver asks the hosts for a heartbeat. Trainer and explorers send theirs to the board themselves.
        if what in ("start", "beat") and name in (BUFFER, SYNCHRONIZER):
            self._watch(name, self._actors[name], beat=self._actors[name].respond.remote(_BEAT_S))
        if what == "work":
            self._explorers.discard(name)
        if what == "work" and name == TRAINER:
            self._record = value

    def _late(self) -> list[Exception]:
        """A failure for each process that missed its deadline."""
        late = [(name, missing) for name, (end, missing) in self._deadlines.items() if end < time.monotonic()]
        within = f"within {self._stage.config.sync.deadline_s:.0f} s"
        return [
            RoleFailed(
                name, f"its process did not {missing} {within}; the cluster has {ray.available_resources()} left"
            )
            for name, missing in late
        ]

    def _handle_death(self, name: str, cause: str) -> list[Exception]:
        """Handles a death. Returns the failure that ends the stage. Returns none for an explorer if it is replaced or
        others remain."""
        if name not in self._explorers:
            return [ActorDied(name, cause)]
        self._explorers.discard(name)
        self._deadlines.pop(name, None)
        # An explorer that dies before its `start` returns has two pending calls, and both end with its death.
        self._watched = {ref: call for ref, call in self._watched.items() if call[0] != name}
        if self._failing or self._record is not None:
            return []
        first, _, restarts = name.partition("~")  # `explorer-0~2` is the second replacement of `explorer-0`
        again = int(restarts or 0) + 1
        is_restarted = again <= self._stage.config.cluster.max_restarts
        if not (is_restarted or self._explorers):
            return [RoleFailed(name, f"its process died for the {again}th time: {cause}")]
        try:
            num_released = self._reap(name, cause)
        except RoleFailed as failed:
            return [failed]
        others = f"{', '.join(sorted(self._explorers))} continue"
        remains = f"{first}~{again} replaces it" if is_restarted else others
        _log.warning("%s died (%s); %d of its slots return, %s", name, cause, num_released, remains)
        if is_restarted:
            self._start_explorer(f"{first}~{again}")
        return []

    def _reap(self, name: str, cause: str) -> int:
        """Cancels the calls of a dead explorer and releases its slots. Returns the number of slots."""
        for host in (SYNCHRONIZER, BUFFER):
            result_of(self._actors[host].forget.remote(name), host, _ANSWER_S)
        num_released = call(self._actors[BUFFER], BUFFER, "driver", "release", name)
        if name in self._synchronizer.board.read().get("explorers", {}):
            self._synchronizer.mark_dead(name, cause, replaced=True)  # the driver decides whether the death is fatal
        return num_released
