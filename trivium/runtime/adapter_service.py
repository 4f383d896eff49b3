"""`run.mode: tinker`: the verbs of the Tinker SDK over a train engine for each adapter and one rollout engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.buffers.journal import Journal
from trivium.config import RunConfig, build
from trivium.foundation.atomic import atomic_write
from trivium.foundation.errors import ConfigError, DataError, TriviumError
from trivium.foundation.phases import announce
from trivium.models.weights.section import LoraConfig, largest_rank
from trivium.monitors.fanout import FanOut
from trivium.protocols import SteppedEngine
from trivium.runtime.build import algorithm_of, build_engine
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.stage import Stage
from trivium.runtime.train_engines import build_rank_engine
from trivium.serving.serve import read_key
from trivium.types import Completion, Group, IntArray, Message, Metrics, Task, Trajectory, Turn

if TYPE_CHECKING:
    from trivium.serving.tinker.lora_models import Adapters
    from trivium.serving.tinker.service import TinkerService

_log = logging.getLogger("trivium")
_SAMPLES, _TOKENS, _STEPS = 32, 2**13, 200
"""What is kept of samples: requests before each step, tokens of a request beyond its first completion, steps."""


def serve_tinker(config: RunConfig, run_dir: Path) -> None:
    """Serves until the process is ended."""
    model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
    stage = Stage(_at_temperature(config, 1.0), 0, 0, True, run_dir, model_dir)
    log = ServiceLog(stage)
    try:
        run_in_loop(_serve(stage, log), config.sync.deadline_s)
    finally:
        log.monitor.close()


class ServiceLog:
    """Logs the optimizer steps of all models as the steps of one run, each under the name of its model, and keeps the
    samples before each step as its rollouts. A service that is started again continues it."""

    def __init__(self, stage: Stage) -> None:
        file = stage.run_dir / "metrics.jsonl"
        rows = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        self._step, self._losses = len(rows), dict[str, float]()
        options = {"run_dir": stage.run_dir, "resume_step": self._step}
        self.monitor = FanOut([build("monitors", section, **options) for section in stage.config.monitors])
        self._decode = stage.renderer.decode
        self._journal = Journal(stage.run_dir / "rollouts" / f"stage-{stage.number}")
        self._num_samples = sum(1 for _ in self._journal.read_step(self._step + 1))
        """Kept since the last step."""
        self._lock = threading.Lock()

    def metrics(self, model_id: str, metrics: Metrics) -> None:
        """Takes the loss of data, or the metrics of the step on the data since the last one; none: there is no step on
        these data."""
        if not metrics:
            self._losses.pop(model_id, None)
            return
        if "loss" in metrics:
            self._losses[model_id] = self._losses.get(model_id, 0.0) + metrics["loss"]
            return
        with self._lock:
            self._step, self._num_samples = self._step + 1, 0
        row = {"train/loss/policy": self._losses.pop(model_id, 0.0), **metrics}
        self.monitor.log(self._step, {key.replace("policy", model_name(model_id)): row[key] for key in row})
        self._journal.drop(self._step - _STEPS)

    def sample(self, model_id: str | None, prompt: IntArray, completions: Sequence[Completion]) -> None:
        """Takes the completions of a prompt by a model; None: the base model."""
        sizes = accumulate(len(prompt) + len(each.tokens) for each in completions)
        kept = [each for each, size in zip(completions, sizes, strict=True) if size <= _TOKENS] or completions[:1]
        with self._lock:
            if self._num_samples == _SAMPLES:
                return
            turns = (
                Turn(
                    prompt, each.tokens, each.log_prob, each.policy_version, each.stop_reason, self._decode(each.tokens)
                )
                for each in kept
            )
            id, message = blake2b(prompt.tobytes(), digest_size=6).hexdigest(), Message("user", self._decode(prompt))
            task = Task(id, (message,), taskset="base" if model_id is None else model_name(model_id))
            slot = self._step * _SAMPLES + self._num_samples
            trajectories = tuple(Trajectory(number, (turn,)) for number, turn in enumerate(turns))
            group = Group(slot, task, trajectories, version=int(kept[0].policy_version.max(initial=0)))
            self._num_samples += 1
            try:
                self._journal.append(self._step + 1, group)
            except TriviumError as error:  # the client has its samples
                _log.error("a sample is missing in the rollouts", exc_info=error)


def model_name(model_id: str) -> str:
    """The name of a model in metrics: the first letters of its session, and its number there."""
    return f"{model_id[:8]}-{model_id.rpartition(':')[2]}"


def _at_temperature(config: RunConfig, temperature: float) -> RunConfig:
    """The config with another sampling temperature, at which train engines score too."""
    sampling = config.engine.sampling.model_copy(update={"temperature": temperature})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"sampling": sampling})})


async def _serve(stage: Stage, log: ServiceLog) -> None:
    from trivium.serving.connections import serve_app
    from trivium.serving.tinker.routes import TinkerServer

    section, file = stage.config.serve, stage.run_dir / "serve.json"
    service = await asyncio.to_thread(open_service, stage, log)
    app = TinkerServer(service, read_key(section.key_variable), section.max_body_bytes).app
    try:
        async with serve_app(app, section.host, section.port, section.max_connections) as url:
            atomic_write(file, json.dumps({"url": url, "pid": os.getpid(), "model": section.model}) + "\n")
            announce(f"serving the Tinker SDK: export TINKER_BASE_URL={url}")
            await asyncio.Event().wait()
    finally:
        file.unlink(missing_ok=True)
        await service.close()


def open_service(stage: Stage, log: ServiceLog) -> TinkerService:
    """Loads the models and opens the saved states of a stage."""
    from trivium.serving.tinker.sampler import Sampler
    from trivium.serving.tinker.saved_states import SavedStates
    from trivium.serving.tinker.service import TinkerService

    section, adapters = stage.config.serve, adapters_of(stage)
    sampler = Sampler(build_engine(stage), adapters, stage.config.run.seed, log.sample)
    paths = (str(getattr(stage.config.model, "path", stage.model_dir)), str(stage.model_dir))
    names = tuple(dict.fromkeys((section.model, *section.names, *paths)))
    states = SavedStates(stage.run_dir / "tinker")
    return TinkerService(section, names, stage.model_dir, adapters, sampler, states, log.metrics)


def adapters_of(stage: Stage) -> Adapters:
    """Loads the base weights that all adapters share."""
    import torch

    from trivium.models.backbone.load import load_lm
    from trivium.models.placement import device_of
    from trivium.serving.tinker.lora_models import Adapters

    config, algorithm = stage.config, algorithm_of(stage.config)
    train: Any = config.train.on_this_machine()  # pyright: ignore[reportAttributeAccessIssue]
    dtype = torch.float64 if train.dtype == "float64" else getattr(torch, train.frozen_dtype)
    base = load_lm(stage.model_dir, dtype=dtype, device=device_of(train.device), attention=None)
    most: int | None = getattr(config.engine.for_run(config), "adapter_rank", None)

    def make(section: LoraConfig, seed: int, temperature: float) -> SteppedEngine:
        if most is not None and (rank := largest_rank(section)) > most:
            found = f"engine.kind {config.engine.kind} samples with those up to rank {most}"
            do = "choose a lower rank, or start the service with a larger engine.adapter_rank"
            raise DataError(f"an adapter of rank {rank}", found, do)
        train = config.train.model_copy(update={"lora": section})
        run = config.run.model_copy(update={"seed": seed})
        changed = config.model_copy(update={"train": train, "run": run})
        own = replace(stage, config=_at_temperature(changed, temperature))
        engine = build_rank_engine(own, algorithm, None, base=base)
        engine.settings = replace(engine.settings, saves_merged=False)
        if not isinstance(engine, SteppedEngine):
            found, do = f"train.kind {config.train.kind!r} takes whole updates", "use train.kind torch"
            raise ConfigError("run.mode: tinker, whose clients take the steps", found, do)
        return engine

    return Adapters(base, make)
