"""One prompt, one completion; reward functions score it."""

from __future__ import annotations

from trivium.config import WorkflowConfig
from trivium.policy import Policy
from trivium.types import Capabilities, Message, Task, with_system


class SingleTurn:
    """The policy completes the task's prompt once."""

    capabilities = Capabilities(gives_rewards=False, observes=False)

    class Config(WorkflowConfig):
        """How a task is asked."""

        system: str | None = None
        """System message put first, unless the task brings its own."""

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, task: Task, policy: Policy) -> None:
        """One turn."""
        await policy.generate(self.prompt(task))

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """The messages for the policy."""
        return task.prompt if self.config.system is None else with_system(task.prompt, self.config.system)
