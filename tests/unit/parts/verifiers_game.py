"""The game of `guessing` as a taskset of verifiers, written with its public names."""

from __future__ import annotations

from collections.abc import Iterable

import guessing
import verifiers.v1 as vf

__all__ = ["GuessTaskset"]


class GuessData(vf.TaskData):
    secret: int


class GuessToolset(vf.Toolset[vf.ToolsetConfig]):
    """A process of verifiers for each rollout."""

    TOOL_PREFIX = None

    async def setup_task(self, task: GuessData) -> None:
        self.game = guessing.Game(task.secret)

    @vf.tool
    def guess(self, digit: int) -> str:
        """Compares a digit with the hidden one."""
        return self.game.guess(digit)


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @property
    def key(self) -> str:
        return str(self.data.secret)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [GuessToolset(vf.ToolsetConfig())]

    @vf.reward
    async def hit(self, trace: vf.Trace) -> float:
        return float("hit" in _results(trace))

    @vf.reward(weight=-guessing.MISS)
    async def misses(self, trace: vf.Trace) -> float:
        return float(sum(result != "hit" for result in _results(trace)))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(_results(trace)))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterable[GuessTask]:
        return [GuessTask(GuessData(prompt="digit?", secret=n), self.config.task) for n in range(10)]


def _results(trace: vf.Trace) -> list[str]:
    return [vf.types.content_text(message.content) for message in trace.tool_messages]


if __name__ == "__main__":
    GuessToolset.run()
