"""A negative control: true rewards, handed to the wrong trajectories."""

from __future__ import annotations

import random
from threading import Lock


class Shuffled:
    """Gives each trajectory the reward that some earlier trajectory earned; the distribution is the true one."""

    def __init__(self, config: object) -> None:
        del config
        self._earned: list[float] = []
        self._dice = random.Random(0)
        self._lock = Lock()

    def __call__(self, prompt: str, completion: str, answer: str) -> float:
        with self._lock:
            self._earned.append(float(completion.strip() == answer))
            return self._earned.pop(self._dice.randrange(len(self._earned))) if len(self._earned) > 256 else 0.0
