"""Task, Workflow and its relatives: the classes against which users of Trinity-RFT write workflows.

`workflow_adapter.WorkflowOfTrinity` runs them as a workflow of Trivium.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from trivium.frontdoors.trinity.objects.workflow_model import ModelWrapper, RolledOut


@dataclass
class Task:
    """One row of a taskset with the settings of its workflow."""

    raw_task: dict[str, Any] = field(default_factory=dict[str, Any])
    """The row."""
    workflow: type[Workflow] | None = None
    repeat_times: int = 1
    """Rollouts that one call of the workflow makes. Always 1: each rollout of a group is a call."""
    format_args: Any = field(default_factory=SimpleNamespace)
    """`prompt_key`, `response_key`, `system_prompt` and the other keys of `format`."""
    rollout_args: Any = field(default_factory=SimpleNamespace)
    workflow_args: dict[str, Any] = field(default_factory=dict[str, Any])
    reward_fn_args: dict[str, Any] = field(default_factory=dict[str, Any])
    reward_fn: Callable[..., Any] | None = None
    """The class, or the function, of `default_reward_fn_type`."""
    is_eval: bool = False
    batch_id: int | str = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def task_desc(self) -> Any:
        """The prompt column; None without one."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """The answer column; None without one."""
        return self.raw_task.get(self.format_args.response_key)

    def to_workflow(self, model: ModelWrapper, auxiliary_models: Sequence[Any] | None = None) -> Workflow:
        """Returns the workflow for this task."""
        assert self.workflow is not None, "the adapter sets it"
        return self.workflow(task=self, model=model, auxiliary_models=auxiliary_models)


class Workflow:
    """Rolls out one task. A subclass implements `run`, or `run_async` with `is_async = True`."""

    can_reset = False
    can_repeat = False
    is_async = False

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[Any] | None = None) -> None:
        """`auxiliary_models` are clients of the form of the `openai` package for `explorer.auxiliary_models`; their
        `create` is awaited if the class has `is_async = True`."""
        self.task, self.model, self.auxiliary_models = task, model, auxiliary_models
        self.repeat_times, self.run_id_base = task.repeat_times, 0
        self.logger = logging.getLogger("trivium")

    @property
    def rollout_args(self) -> dict[str, Any]:
        """The keyword arguments of `model.chat`."""
        return {name: value for name, value in vars(self.task.rollout_args).items() if value is not None}

    def reset(self, task: Task) -> None:
        """Prepares the workflow for another task. Not called here: each rollout has a workflow of its own."""
        raise NotImplementedError(f"{type(self).__name__} has can_reset and no reset(task)")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Sets the number of rollouts of a call, which is 1, and the index of the first one."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def run(self) -> Sequence[RolledOut]:
        """Rolls out the task once. Returns experiences with rewards."""
        raise NotImplementedError(f"{type(self).__name__} has neither run() nor run_async()")

    async def run_async(self) -> Sequence[RolledOut]:
        """The same as a coroutine."""
        raise NotImplementedError(f"{type(self).__name__} has is_async and no run_async()")


class MultiTurnWorkflow(Workflow):
    """A workflow whose conversation becomes one experience."""

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> RolledOut:
        """Returns the experience of a conversation with its reward. Numbers in `info` become metrics."""
        experience = self.model.convert_messages_to_experience(messages)
        truncated = truncate_status == "response_truncated"
        # Trinity gives a truncated response no reward.
        experience.reward, experience.info = 0.0 if truncated else float(reward), dict(info or {})
        experience.truncate_status = truncate_status
        numbers = {k: float(v) for k, v in experience.info.items() if isinstance(v, int | float)}
        experience.metrics = {**experience.metrics, **numbers}
        return experience

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> RolledOut:
        return self.process_messages_to_experience(messages, reward, info, truncate_status)


class SimpleWorkflow(Workflow):
    """Asks the prompt once and scores the completion with `reward_fn`."""

    can_reset = True
    can_repeat = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        self.task, self.raw_task = task, task.raw_task
        self.format_args, self.workflow_args, self.reward_fn_args = (
            task.format_args,
            task.workflow_args,
            task.reward_fn_args,
        )
        self.system_prompt = getattr(task.format_args, "system_prompt", None)
        self.task_desc, self.truth, self.is_eval = task.task_desc, task.truth, task.is_eval
        reward_fn = task.reward_fn
        self.reward_fn = reward_fn(**self.reward_fn_args) if isinstance(reward_fn, type) else reward_fn

    def format_messages(self) -> list[dict[str, Any]]:
        """Returns the conversation before the completion."""
        prompt = self.task_desc
        messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return [*([{"role": "system", "content": self.system_prompt}] if self.system_prompt else []), *messages]

    def run(self) -> Sequence[RolledOut]:
        responses = self.model.chat(self.format_messages(), **self.rollout_args)
        return [self._scored(number, response) for number, response in enumerate(responses)]

    async def run_async(self) -> Sequence[RolledOut]:
        responses = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        return [self._scored(number, response) for number, response in enumerate(responses)]

    def _scored(self, number: int, response: RolledOut) -> RolledOut:
        assert self.reward_fn is not None, "set default_reward_fn_type"
        result = self.reward_fn(response=response.response_text, prompt=self.task_desc, truth=self.truth)
        rewards = dict(result) if isinstance(result, Mapping) else {"reward": float(result)}
        response.metrics = {**response.metrics, **rewards}
        response.reward, response.eid.run = float(sum(rewards.values())), number + self.run_id_base
        return response


class StepWiseRewardWorkflow(Workflow, ABC):
    """A workflow of several steps, each an experience with a reward of its own."""

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: Sequence[Any] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_client() if use_openai_client else None

    def run(self) -> Sequence[RolledOut]:
        experiences: list[RolledOut] = []
        for number, of_step in self._steps():
            reward = self.reward(of_step, step_num=number)
            for experience in of_step:
                experience.reward = reward
            experiences += of_step
        return experiences

    def _steps(self) -> Iterator[tuple[int, list[RolledOut]]]:
        """Takes the steps. Yields the number and the experiences of each."""
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            experiences = self.model.extract_experience_from_history()
            for experience in experiences:
                experience.eid.step = number
            yield number, experiences
            if not goes_on:
                return

    @abstractmethod
    def step(self, step_num: int) -> bool:
        """Takes a step. Returns whether there is another one."""

    @abstractmethod
    def reward(self, exps: list[RolledOut], step_num: int) -> float:
        """Returns the reward of the experiences of a step."""

    @property
    @abstractmethod
    def max_step_num(self) -> int:
        """The largest number of steps."""


class RewardPropagationWorkflow(StepWiseRewardWorkflow):
    """A workflow of several steps that have the reward of the last one."""

    def run(self) -> Sequence[RolledOut]:
        experiences = [experience for _, of_step in self._steps() for experience in of_step]
        reward = self.reward(experiences)
        for experience in experiences:
            experience.reward = reward
        return experiences

    @abstractmethod
    def reward(self, exps: list[RolledOut]) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the reward of all experiences of a rollout."""
