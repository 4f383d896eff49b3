"""Worker classes as a user writes them: what RayPPOTrainer's tests map to roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trivium.engines.torch.engine import TorchEngine
from trivium.frontdoors.verl import ActorRolloutRefWorker, CriticWorker


def note(worker: Any, what: str) -> None:
    """One line in the run directory for each call."""
    path = Path(worker.config.spec.run_dir) / f"calls-{worker.role}-{worker.rank}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


class NotingActor(ActorRolloutRefWorker):
    """Notes what it is asked for."""

    def compute_log_prob(self, data: Any) -> Any:
        note(self, f"compute_log_prob {data.what} {len(data.batch)}")
        return super().compute_log_prob(data)

    def compute_ref_log_prob(self, data: Any) -> Any:
        note(self, "compute_ref_log_prob")
        return super().compute_ref_log_prob(data)

    def update_actor(self, data: Any) -> Any:
        note(self, f"update_actor {data.version}")
        return super().update_actor(data)

    def update_weights(self, version: int) -> None:
        super().update_weights(version)
        note(self, f"published {self._published is not None}")

    async def generate_sequences(self, requests: Any) -> Any:
        note(self, f"generate_sequences {len(requests)}")
        return await super().generate_sequences(requests)


class NotingCritic(CriticWorker):
    """Notes what it is asked for."""

    def compute_values(self, data: Any) -> Any:
        note(self, "compute_values")
        return super().compute_values(data)

    def update_critic(self, data: Any) -> Any:
        note(self, f"update_critic {data.version}")
        return super().update_critic(data)


class Wide(TorchEngine):
    """Counts as an engine over two GPUs."""

    class Config(TorchEngine.Config):
        kind: str = "tests.doors.e2e.ppo_workers:Wide"

        @property
        def gpus(self) -> int:
            return 2
