"""An environment of three turns that answers with pictures, for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trivium.tasks.drawings import png
from trivium.types import Media, Message, Task


def square(shade: int) -> Media:
    return Media("image/png", png(np.full((28, 28, 3), shade, np.uint8)))


class Shows:
    """Shows the task's pictures one after the other, the first one again at the end; text to a task that has none. A
    completion earns its digits."""

    def reset(self, task: Task) -> Sequence[Message]:
        self.pictures = [square(shade) for shade in task.columns["shades"]]
        self.turn = 0
        return [self._message()]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        self.turn += 1
        reward = sum(map(int, filter(str.isdigit, completion))) / 20
        return [self._message()], reward, self.turn == 3

    def _message(self) -> Message:
        shown = self.pictures and (self.pictures[self.turn % len(self.pictures)],)
        return Message("user", str(self.turn), tuple(shown))


def tasks() -> list[dict[str, Any]]:
    """Five of eight have pictures."""
    return [{"id": str(i), "prompt": str(i), "shades": [30 * i, 255 - i] if i % 3 else []} for i in range(8)]
