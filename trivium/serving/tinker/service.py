"""The verbs of the Tinker SDK over the train engines of adapters and one rollout engine."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trivium.config.sections import ServeSection
from trivium.foundation.concurrency import Turns
from trivium.foundation.errors import DataError
from trivium.protocols import SteppedEngine, StepSettings
from trivium.serving.bodies import RequestError, bad_request
from trivium.serving.tinker.futures import Futures, OrderedWork, PendingResult, QueuedRequest
from trivium.serving.tinker.lora_models import Adapters, compute_loss, save_state
from trivium.serving.tinker.sampler import Sampler, SamplingSession
from trivium.serving.tinker.saved_states import SNAPSHOT, SavedState, SavedStates
from trivium.serving.tinker.verbs import LoadForm, LossRequest, ModelForm, SampleForm, SaveForm
from trivium.serving.tinker.wire import write_loss_output
from trivium.types import Metrics

_log = logging.getLogger("trivium")
_SILENT_S = 120.0
"""Seconds without a heartbeat after which a session gives its place to another client's model; the SDK sends one every
10 s."""
_SNAPSHOTS = 16
"""How many unnamed sampler weights of a model are kept, the newest ones."""
_CLONE_STRIDE = 10**9
"""The SDK numbers the requests of a clone of a SamplingClient from the clone's number times this."""
Make = Callable[[], SteppedEngine]


@dataclass(eq=False)
class Model:
    """A model of a session."""

    id: str
    session_id: str
    number: int
    info: Mapping[str, Any]
    work: OrderedWork
    engine: SteppedEngine | None = None
    snapshots: int = 0


class TinkerService:
    """Sessions, models and samplers. Its methods run on one event loop."""

    def __init__(
        self,
        limits: ServeSection,
        names: tuple[str, ...],
        model_dir: Path,
        adapters: Adapters,
        sampler: Sampler,
        states: SavedStates,
        record: Callable[[str, Metrics], object] = lambda *_: None,
    ) -> None:
        """`names` are those of the base model in `model_dir`. `record` takes the `loss` of data, and the metrics of
        each step, with the id of the model."""
        self.limits, self.names, self.model_dir = limits, names, model_dir
        self.adapters, self.sampler, self.states = adapters, sampler, states
        self._record, self._turns = record, Turns(1)
        self.futures = Futures(partial(self._drop_silent, _SILENT_S))
        self._sessions: dict[str, float] = {}
        """By id of a session, which is a client: when it gave the last sign of life."""
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle_check: asyncio.TimerHandle | None = None

    # ----------------------------------------------------------------------- sessions

    def create_session(self) -> str:
        """The id of a new session."""
        id = uuid.uuid4().hex
        self._sessions[id] = time.monotonic()
        if self._idle_check is None:
            self._drop_idle()
        return id

    def _drop_idle(self) -> None:
        """Drops idle sessions, now and regularly while there are sessions."""
        self._drop_silent(self.limits.idle_s)
        period = min(60.0, self.limits.idle_s)
        loop = asyncio.get_running_loop()
        self._idle_check = loop.call_later(period, self._drop_idle) if self._sessions else None

    def _drop_silent(self, seconds: float) -> None:
        """Drops the sessions without a heartbeat for so long."""
        limit = time.monotonic() - seconds
        for id in [id for id, alive in self._sessions.items() if alive < limit]:
            _log.warning("the session %s is dropped: no heartbeat for %.0f s", id, seconds)
            self.finish(id)

    def heartbeat(self, id: str) -> None:
        """Notes that a session is alive. Raises RequestError (410) for one that is finished or unknown."""
        if id not in self._sessions:
            found = "it is finished, or the service was started again since"
            raise RequestError(410, f"the session {id[:64]!r}", found, "create a new ServiceClient")
        self._sessions[id] = time.monotonic()

    def finish(self, id: str) -> None:
        """Drops a session with its models and its requests. Saved states that have a name stay. Raises RequestError
        (410) as `heartbeat`."""
        self.heartbeat(id)
        del self._sessions[id]
        self.futures.finish(id)
        for model in [each for each in self._models.values() if each.session_id == id]:
            del self._models[model.id]
            model.work.fail("its session is finished")
            self._spawn(self._close(model))
        for sampler in [each for each in self._samplers.values() if each.session_id == id]:
            del self._samplers[sampler.id]

    async def _close(self, model: Model) -> None:
        async with self._turns:
            self._record(model.id, {})
            engine, model.engine = model.engine, None
            if engine is not None:
                engine.close()
            await asyncio.to_thread(self.states.delete_unnamed, model.id)

    # ----------------------------------------------------------------------- models

    def model(self, id: str) -> Model:
        """A model in memory. Raises RequestError (404) for others: a restart drops what was not saved."""
        if (model := self._models.get(id)) is None:
            self.states.model(id)
            found, do = "it is no longer in memory", "create a client from its last saved state"
            raise RequestError(404, f"the model {id[:64]}", found, do, code="unloaded_model")
        self.heartbeat(model.session_id)
        return model

    def create_model(self, form: ModelForm) -> PendingResult:
        """A new adapter. Its seed is its number if the request has none."""
        number, lora = form.model_seq_id, form.lora_config
        make = partial(self.adapters.new, lora, number if lora.seed is None else lora.seed)
        return self._create(form.session_id, number, form.info, make, {"type": "create_model"})

    def create_from_state(self, session_id: str, number: int, saved: SavedState, form: LoadForm) -> PendingResult:
        """A new model that begins with a saved state. It has the metadata of the saved model and its own."""
        make = partial(self.adapters.saved, saved.directory, optimizer=form.optimizer)
        answer = {"type": "load_weights", "path": saved.path}
        info = self.states.model(saved.model_id)
        metadata = {**(info["user_metadata"] or {}), **(form.user_metadata or {})}
        info |= {"base_model": form.base_model or info["base_model"], "user_metadata": metadata or None}
        return self._create(session_id, number, info, make, answer)

    def _create(self, session_id: str, number: int, info: Any, make: Make, answer: Mapping[str, Any]) -> PendingResult:
        self.heartbeat(session_id)
        self._check_base(info["base_model"])
        if (future := self.futures.known(session_id, number, answer["type"])) is not None:
            return future
        if f"{session_id}:train:{number}" in self._models:
            found = "this session has it already, and its result was fetched long ago"
            raise bad_request("model_seq_id", f"a new model {number}", found, "use a new number")
        if len(self._models) >= self.limits.max_models:
            self._drop_silent(_SILENT_S)
        if len(self._models) >= self.limits.max_models:
            found = f"{len(self._models)} are in memory, and serve.max_models is {self.limits.max_models}"
            do = "close the ServiceClient of one, or raise the key"
            raise bad_request("model_seq_id", "one more model", found, do, code="too_many_models")
        # The SDK makes the id of a loaded model itself.
        model = Model(f"{session_id}:train:{number}", session_id, number, info, OrderedWork(self._turns, self._spawn))

        async def work() -> Mapping[str, Any]:
            try:
                self.states.describe(model.id, {**info, "created": time.time()})
                async with self._turns:
                    model.engine = await asyncio.to_thread(make)
            except BaseException:
                self._models.pop(model.id, None)
                raise
            return {**answer, "model_id": model.id}

        future = self.futures.add(session_id, session_id, number, answer["type"])
        self._models[model.id] = model
        self._spawn(future.run(work))  # to its end: nothing else closes the engine
        return future

    def _check_base(self, name: str) -> str:
        if name not in self.names:
            found, do = "the service has another one", f"use {self.names[0]!r}, or add to serve.names"
            raise bad_request("base_model", f"the base model {name[:80]!r}", found, do)
        return name

    # ----------------------------------------------------------------------- training

    def forward_backward(self, model: Model, number: int | None, request: LossRequest) -> PendingResult:
        """The loss of data, and unless it is only the forward pass, its gradient."""

        def work(engine: SteppedEngine) -> bytes:
            metrics, log_probs = compute_loss(engine, request)
            if not request.forward_only:
                self._record(model.id, {"loss": metrics["loss:sum"]})
            return write_loss_output(metrics, log_probs)

        failed = None if request.forward_only else partial(_lose_data, model)
        return self._train(model, number, "forward_backward", work, size=request.size, failed=failed)

    def optim_step(self, model: Model, number: int | None, settings: StepSettings) -> PendingResult:
        """One step on the gradient of the data since the last one."""

        def work(engine: SteppedEngine) -> Mapping[str, Any]:
            try:
                metrics = engine.step(settings)
            except BaseException:
                self._record(model.id, {})
                raise
            try:
                self._record(model.id, metrics)
            except Exception as error:  # the weights have moved: the client must not repeat the step
                _log.error("a step of the model %s is missing in the metrics", model.id, exc_info=error)
            return {"metrics": {"grad_norm:mean": metrics["train/grad_norm/policy"], "step:max": float(engine.version)}}

        return self._train(model, number, "optim_step", work)

    def refuse(self, model: Model, number: int, error: RequestError, *, loses_data: bool) -> None:
        """Lets a refused request take its turn, so that later ones do not wait for it. `loses_data`: its data are
        missing in the gradient."""
        refused = PendingResult(model.session_id, "")
        refused.fail(error)
        failed = partial(_lose_data, model) if loses_data else None
        model.work.put(number, QueuedRequest(refused, _no_work, failed))

    def save(self, model: Model, form: SaveForm, kind: str) -> PendingResult:
        """Saves a model under a name, or without one as a new sampling session."""
        number, is_named = form.sampling_session_seq_id, form.path is not None
        if not is_named and (kind != "sampler_weights" or number is None):
            raise bad_request("path", "a name, or the number of a sampling session", "neither", "send one")
        name, kind = (form.path, kind) if form.path else (f"{model.snapshots + 1:06d}", SNAPSHOT)
        self.states.place(model.id, kind, name, overwrite=True)  # refuses a bad name at once, a taken one in its turn
        model.snapshots += not is_named

        def work(engine: SteppedEngine) -> Mapping[str, Any]:
            saved = self.states.place(model.id, kind, name, overwrite=form.overwrite)
            write = partial(save_state, engine, optimizer=kind == "weights")
            self.states.save(saved, write, form.ttl_seconds, form.user_metadata)
            return {"path": saved.path}

        def after(result: Mapping[str, Any]) -> Mapping[str, Any]:
            if is_named or number is None:
                return result
            for old in self.states.of(model.id, (SNAPSHOT,))[:-_SNAPSHOTS]:
                self.states.delete(old)
            session = self._add_sampler(model.session_id, (model.number, number), result["path"], None)
            return {"sampling_session_id": session.id}

        return self._train(model, form.seq_id, f"save {kind}", work, after)

    def load(self, model: Model, number: int | None, saved: SavedState, *, optimizer: bool) -> PendingResult:
        """Replaces the weights of a model by a saved state."""

        def work(engine: SteppedEngine) -> Mapping[str, Any]:
            model.engine = self.adapters.saved(saved.directory, optimizer=optimizer)
            engine.close()
            self._record(model.id, {})
            return {"path": saved.path, "model_id": model.id, "type": "load_weights"}

        return self._train(model, number, "load_weights", work)

    def _train(
        self,
        model: Model,
        number: int | None,
        verb: str,
        work: Callable[[SteppedEngine], Mapping[str, Any] | bytes],
        after: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        size: int = 0,
        failed: Callable[[], object] | None = None,
    ) -> PendingResult:
        """Works in a thread when the request's turn comes, and then on the event loop."""
        if (future := self.futures.known(model.id, number, verb)) is not None:
            return future

        async def in_thread() -> Mapping[str, Any] | bytes:
            if model.engine is None:
                raise DataError(f"the model {model.id}", "it was unloaded", "create a client from a saved state")
            result = await asyncio.to_thread(work, model.engine)
            return result if after is None else after(result)

        future = self.futures.add(model.session_id, model.id, number, verb, size)
        try:
            model.work.put(number, QueuedRequest(future, in_thread, failed))
        except RequestError:
            self.futures.forget(future)
            raise
        return future

    # ----------------------------------------------------------------------- sampling

    def create_sampler(self, session_id: str, number: int, base: str | None, path: str | None) -> SamplingSession:
        """A sampling session of the base model, or of saved weights."""
        self.heartbeat(session_id)
        return self._add_sampler(session_id, ("created", number), path, base)

    def _add_sampler(
        self, session_id: str, address: tuple[int | str, ...], path: str | None, base: str | None
    ) -> SamplingSession:
        weights = None if path is None else self.states.open(path)
        if weights is not None:
            base = self.states.model(weights.model_id)["base_model"]
        base = self._check_base(base or "")
        sampler = SamplingSession(uuid.uuid4().hex, session_id, base, address, weights, path)
        self._samplers[sampler.id] = sampler
        return sampler

    def sampling_session(self, id: str) -> SamplingSession:
        """A sampling session. Raises RequestError (404) for others."""
        if (sampler := self._samplers.get(id)) is None:
            found = "it is finished, or the service was started again since"
            raise RequestError(404, f"the sampling session {id[:64]!r}", found, "create a new SamplingClient")
        self.heartbeat(sampler.session_id)
        return sampler

    def sample(self, form: SampleForm, size: int) -> PendingResult:
        """Completions of a prompt, which a body of `size` bytes asks for."""
        sampler, number = self.sampling_session(form.sampling_session_id), form.seq_id or 0
        if (future := self.futures.known(sampler.id, form.seq_id, "asample")) is not None:
            return future
        _ = form.tokens  # raises for an empty prompt before its work is queued
        form = form.within(self.adapters.vocabulary)

        async def work() -> bytes:
            return await self.sampler.sample(sampler.weights, form, (*sampler.address, number), self._turns)

        future = self.futures.add(sampler.session_id, sampler.id, form.seq_id, "asample", size, work)
        future.outcome.add_done_callback(lambda _: sampler.finish(number // _CLONE_STRIDE, future))
        return future

    # ----------------------------------------------------------------------- end

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all work. Saved states stay."""
        if self._idle_check is not None:
            self._idle_check.cancel()
        for model in self._models.values():
            model.work.fail("the service ends")
        await self.futures.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.sampler.engine.close()


async def _no_work() -> Mapping[str, Any]:
    return {}


def _lose_data(model: Model) -> None:
    if model.engine is not None:
        model.engine.lose_data()
