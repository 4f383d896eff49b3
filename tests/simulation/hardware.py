"""The engines of a simulated computer: a rollout engine that takes time, and a train engine without a model.

The weights of the train engine are a digest of everything that it has trained on. Two runs with equal weights have
trained on the same tokens in the same order.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from trivium.config import TrainConfig
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.errors import TriviumError
from trivium.foundation.randomness import uniforms
from trivium.protocols import Algorithm, Objective, TrainEngine, Weights
from trivium.rewards.functions import Exact
from trivium.types import Batch, Completion, FloatArray, Metrics, Request

_SECONDS = 2**40 + 3
"""The position of the key's uniform number that a completion's duration follows from."""

UNTRAINED = hashlib.sha256(b"untrained").digest()
"""The digest of the weights that a run starts with."""
UNGRADED, UNGRADED_TEXT = 9, "9"
"""The token, and its text, of completions that `Grade` cannot grade: their rollouts fail."""
VERSION, DIGEST = "version", "digest"
"""The names of the weights."""


class Grade(Exact):
    """A reward that fails for some completions."""

    class Config(Exact.Config):
        kind: str = "tests.simulation.hardware:Grade"

    def __call__(self, prompt: str, completion: str, answer: object) -> float:
        if UNGRADED_TEXT in completion:
            raise ValueError(f"cannot grade {completion!r}")
        return super().__call__(prompt, completion, answer)


class SimulatedEngine(ScriptedEngine):
    """A scripted engine whose completions take a time with a long tail."""

    class Config(ScriptedEngine.Config):
        kind: str = "tests.simulation.hardware:SimulatedEngine"
        replies: tuple[str | tuple[int, ...], ...] = ((5,), (6,), (7, 8))
        mean_s: float = Field(default=1.0, gt=0)
        """Mean duration of a completion, log-normally distributed."""
        spread: float = Field(default=0.0, ge=0)
        """Standard deviation of the logarithm of the duration."""

    config: Config

    async def generate(self, request: Request) -> Completion:
        normal = statistics.NormalDist().inv_cdf(float(uniforms(np.uint64(request.key.digest()), _SECONDS)) or 0.5)
        spread = self.config.spread
        seconds = self.config.mean_s * math.exp(spread * normal - spread**2 / 2)
        self.config = self.config.model_copy(update={"delay_s": seconds})
        return await super().generate(request)

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        held = {name: torch.as_tensor(tensor) for name, tensor in weights}
        if int(held[VERSION]) != version:
            found = f"the weights of version {int(held[VERSION])}"
            raise TriviumError(f"the weights of version {version}", found, "find which side mixes them up")
        if version < self.version:
            raise TriviumError(f"a version after {self.version}", f"version {version}", "find who offers an older one")
        await super().load(version, list(held.items()), in_flight=in_flight)


Trained = Callable[[int, tuple[bytes, bytes], Batch], object]
"""Called with the version that an update starts from, the digests before and after it, and its batch."""


class SimulatedTrainEngine(TrainEngine):
    """A train engine whose policy is a digest of what it has trained on."""

    class Config(TrainConfig):
        kind: str = "tests.simulation.hardware:SimulatedTrainEngine"
        token_s: float = Field(default=1e-4, ge=0)
        """Seconds for each token of an update."""
        save_s: float = Field(default=0.0, ge=0)
        """Seconds to write a checkpoint."""

    on_update: Trained | None = None
    """The observer of a simulation, set for all engines."""

    def __init__(self, config: Config, *, algorithm: Algorithm, first_version: int = 0, **_: object) -> None:
        self.config, self.algorithm, self.version = config, algorithm, first_version
        self.digest = UNTRAINED

    def prepare(self) -> None:
        pass

    def score(self, batch: Batch, what: str) -> Sequence[FloatArray]:
        del what
        return [np.where(e.response_mask, e.rollout_log_prob, 0).astype(np.float32) for e in batch.experiences]

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        del role, objective
        time.sleep(self.config.token_s * batch.num_tokens)
        state = hashlib.sha256(self.digest)
        for each in batch.experiences:
            state.update(each.tokens.tobytes() + each.policy_version.tobytes())
        before, self.digest = self.digest, state.digest()
        if SimulatedTrainEngine.on_update is not None:
            SimulatedTrainEngine.on_update(self.version, (before, self.digest), batch)
        return {"train/loss/policy": 0.0}

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        yield VERSION, torch.tensor([self.version])
        yield DIGEST, torch.tensor(list(self.digest), dtype=torch.uint8)

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        text = json.dumps({"version": self.version, "digest": self.digest.hex()})
        if on_copied is not None:
            on_copied()
        time.sleep(self.config.save_s)
        (directory / "policy").mkdir()
        (directory / "policy" / "model.json").write_text(text, encoding="utf-8")

    def load(self, directory: Path) -> None:
        state = json.loads((directory / "policy" / "model.json").read_text(encoding="utf-8"))
        self.version, self.digest = state["version"], bytes.fromhex(state["digest"])
