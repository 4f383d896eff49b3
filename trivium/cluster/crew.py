"""The roles of one stage: started, watched, replaced where that is possible, dismissed at the end.

The first failure ends the stage, and everything that belongs to it. Death is noticed at once: each process has a call
that only its death ends.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from trivium.assemble import Stage
from trivium.cluster.hub import Hub
from trivium.cluster.orders import BUFFER, SYNCHRONIZER, Ends, Order
from trivium.cluster.remote import Answer, Gone, ask, blame, reason, start_host, start_worker, wait_for
from trivium.cluster.roles import explore, make_buffer, train, trains_on_gpus
from trivium.errors import RoleFailed
from trivium.registry import resolve
from trivium.synchronizer import TRAINER

_log = logging.getLogger("trivium")
_LOOK_S = 1.0
"""How often the driver looks up from waiting, so that signals reach it."""
_GRACE_S = 1.0
"""Others fail because of the first: how long to listen to them before saying which that was."""
_FAREWELL_S = 20.0
"""How long explorers may take to leave once the trainer is done."""
_ANSWER_S = 20.0
"""How long a living process may take to answer what the driver asks when another has died."""


class Crew:
    """The processes of one stage. `work` to the end of it, then `dismiss`, whatever happened."""

    def __init__(self, stage: Stage, namespace: str) -> None:
        self._stage, self._namespace = stage, f"{namespace}/stage-{stage.number}"
        self._order = Order.of(stage)
        self._actors: dict[str, Any] = {}
        self._watched: dict[Any, tuple[str, str]] = {}
        """What the driver waits for -> (whose it is, what: `start`, `work` or `life`)."""
        self._starting: dict[str, float] = {}
        """Until when each process is to have started that has not yet."""
        self._explorers: set[str] = set()
        """Those at work."""
        self._record: dict[str, Any] | None = None
        """What the trainer returned."""
        self._failing = False

    def work(self, record: dict[str, Any], resumes: bool) -> dict[str, Any]:
        """Plays the stage to its end; returns the record. Raises the first cause of whatever stopped it."""
        stage, cluster = self._stage, self._stage.config.cluster
        hub = self._host(SYNCHRONIZER, Hub)
        buffer = self._host(BUFFER, make_buffer, self._order)
        self._ends = Ends(hub, buffer, self._namespace)
        self._synchronizer = self._ends.synchronizer(stage, "driver")
        self._begin(TRAINER, train, record, resumes)
        explored = getattr(resolve("buffers", stage.config.buffer.kind), "explored", False)
        for number in range(cluster.explorers if explored else int(stage.evaluated)):
            self._explorer(f"explorer-{number}")
        while self._record is None:
            self._look(_LOOK_S)
        self._see_off()
        return self._record

    def dismiss(self) -> None:
        """Ends every process that still lives; an explorer's engines end with it."""
        for actor in self._actors.values():
            ray.kill(actor)

    def _see_off(self) -> None:
        """Waits for the explorers to leave; one that does not is left behind, as is one that never came to play."""
        self._explorers &= self._synchronizer.board.read().get("explorers", {}).keys()
        end = time.monotonic() + _FAREWELL_S
        while self._explorers and time.monotonic() < end:
            self._look(_LOOK_S)
        if self._explorers:
            _log.warning("%s did not leave within %.0f s", ", ".join(sorted(self._explorers)), _FAREWELL_S)

    # ------------------------------------------------------------------ starting

    def _host(self, name: str, make: Any, *args: Any) -> Any:
        actor = start_host(name, self._stage.run_dir.resolve(), self._stage.threads, namespace=self._namespace)
        self._watch(name, actor, start=actor.build.remote(make, *args), life=actor.live.remote())
        return actor

    def _begin(self, name: str, body: Any, *args: Any) -> None:
        config = self._stage.config  # a trainer of several ranks has its models in their processes
        on_gpu = name == TRAINER and config.cluster.ranks == 1 and trains_on_gpus(config)
        actor = start_worker(
            name, self._stage.run_dir.resolve(), self._stage.threads, namespace=self._namespace, num_gpus=float(on_gpu)
        )
        self._watch(
            name, actor, start=actor.begun.remote(), work=actor.run.remote(body, self._order, self._ends, *args)
        )

    def _watch(self, name: str, actor: Any, **refs: Any) -> None:
        self._actors[name] = actor
        self._starting[name] = time.monotonic() + self._stage.config.sync.deadline_s
        self._watched |= {ref: (name, what) for what, ref in refs.items()}

    def _explorer(self, name: str) -> None:
        self._explorers.add(name)
        self._begin(name, explore)

    # ------------------------------------------------------------------ watching

    def _look(self, patience_s: float) -> None:
        """Waits for something to happen and heeds it. Raises the likeliest first cause, where it was a failure."""
        done, _ = ray.wait(list(self._watched), timeout=patience_s)
        failures = self._heed(done) or self._late()
        if not failures:
            return
        self._failing = True
        done, _ = ray.wait(list(self._watched), num_returns=len(self._watched), timeout=_GRACE_S)
        raise min([*failures, *self._heed(done)], key=blame)

    def _heed(self, done: list[Any]) -> list[Exception]:
        failures: list[Exception] = []
        for ref in done:
            name, what = self._watched.pop(ref)
            try:
                answer: Answer = ray.get(ref)
                value = answer.unwrap()
            except RayError as error:
                failures += self._died(name, reason(error))
            except Exception as error:
                failures.append(error)
            else:
                self._ended(name, what, value)
        return failures

    def _ended(self, name: str, what: str, value: Any) -> None:
        self._starting.pop(name, None)
        if what == "work":
            self._explorers.discard(name)
        if what == "work" and name == TRAINER:
            self._record = value

    def _late(self) -> list[Exception]:
        late = [name for name, end in self._starting.items() if end < time.monotonic()]
        waited = f"its process did not start within {self._stage.config.sync.deadline_s:.0f} s"
        return [RoleFailed(name, f"{waited}; the cluster has {ray.available_resources()} left") for name in late]

    def _died(self, name: str, cause: str) -> list[Exception]:
        """What follows from a death: nothing more to fear where it is borne, else the failure of the run."""
        if name not in self._explorers:
            return [Gone(name, cause)]
        self._explorers.discard(name)
        self._starting.pop(name, None)
        if self._failing or self._record is not None:
            return []
        first, _, restarts = name.partition("~")
        again = int(restarts or 0) + 1
        replaced = again <= self._stage.config.cluster.max_restarts
        if not (replaced or self._explorers):
            return [Gone(name, cause)]
        try:
            returned = self._bury(name, cause)
        except RoleFailed as failed:
            return [failed]
        fate = f"{first}~{again} takes its place" if replaced else f"{', '.join(sorted(self._explorers))} go on"
        _log.warning("%s died (%s); %d of its slots return, %s", name, cause, returned, fate)
        if replaced:
            self._explorer(f"{first}~{again}")
        return []

    def _bury(self, name: str, cause: str) -> int:
        """Nothing that the dead asked for happens any more, and what it held returns. How many slots that were."""
        for host in (SYNCHRONIZER, BUFFER):
            wait_for(self._actors[host].forget.remote(name), host, _ANSWER_S)
        returned = ask(self._actors[BUFFER], BUFFER, "driver", "release", name)
        if name in self._synchronizer.board.read().get("explorers", {}):
            self._synchronizer.report_death(name, cause, replaced=True)  # whether it is to be borne is decided here
        return returned
