"""Runs workflows that are written against Trinity-RFT's classes (`workflow_api`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from pydantic import Field

from trivium.clients.http import EndpointClient, EndpointConfig
from trivium.config import RunConfig, WorkflowConfig, build, free
from trivium.config.schema import plugin
from trivium.foundation.concurrency import Threads
from trivium.foundation.errors import ConfigError, Problem, RolloutError, TriviumError, described
from trivium.frontdoors.trinity.config.registries import REWARD_FUNCTIONS, WORKFLOWS
from trivium.frontdoors.trinity.config.reward_names import REWARDS
from trivium.frontdoors.trinity.objects.workflow_api import Task, Workflow
from trivium.frontdoors.trinity.objects.workflow_model import ModelWrapper, RolledOut
from trivium.policy import Policy
from trivium.types import Task as CoreTask


class AuxiliaryModel(EndpointConfig):
    """A model behind an endpoint. `urls` are its base URLs (http://host:8000/v1)."""

    kind: str = "openai"
    model: str
    """The name of the model at the endpoint."""


class WorkflowOfTrinity:
    """Calls a workflow of Trinity-RFT's form once for each rollout, with `repeat_times` 1.

    The reward of the rollout is that of the last experience that the workflow returns. Each experience's reward is
    credited to its completions. Plain workflows run in threads.
    """

    class Config(WorkflowConfig):
        """Which workflow, and its arguments."""

        kind: str = "trivium.frontdoors.trinity.workflow_adapter:WorkflowOfTrinity"
        workflow: str
        """A path of a class, or a name that a module in `TRINITY_PLUGIN_DIRS` registers."""
        workflow_args: dict[str, Any] = Field(default_factory=dict)
        reward_fn: str = ""
        """The path or the name of a reward function in Trinity-RFT's form; empty: the workflow has its own."""
        reward_fn_args: dict[str, Any] = Field(default_factory=dict)
        rollout_args: dict[str, Any] = Field(default_factory=dict)
        """The sampling parameters of the taskset, which the engine samples with."""
        format: dict[str, Any] = Field(default_factory=dict)
        """The keys of `format`: names of columns, and the system message."""
        auxiliary_models: tuple[AuxiliaryModel, ...] = ()
        """Models that the workflow asks, behind endpoints of OpenAI's form."""
        threads: int = free(32, ge=1)
        """Workflows that are not `async` and may run at the same time."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            for key, find in (("workflow", _workflow_class), ("reward_fn", _reward_class)):
                try:
                    find(getattr(self, key))
                except TriviumError as error:
                    yield Problem(f"{where}.{key}", getattr(self, key), error.found, error.do)
                except ImportError as error:
                    do = "install what it imports; write trivium.frontdoors.trinity for trinity"
                    yield Problem(f"{where}.{key}", getattr(self, key), f"{type(error).__name__}: {error}", do)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._class, self._reward = _workflow_class(config.workflow), _reward_class(config.reward_fn)
        self._threads = Threads(config.threads, f"the workflow {config.workflow}")
        self._auxiliary = [
            (model.model, EndpointClient(model, "/chat/completions", what="completions"))
            for model in config.auxiliary_models
        ]

    async def run(self, task: CoreTask, policy: Policy) -> dict[str, float] | None:
        """Runs the workflow once. Returns the reward, or None if the workflow returns none."""
        trinity_task, rollout_args = self._task(task), {"n": 1, **self.config.rollout_args}
        model = ModelWrapper(policy, rollout_args, asyncio.get_running_loop())
        is_async = self._class.is_async
        judges = [model.client_of(name, client.post, is_async) for name, client in self._auxiliary] or None
        try:
            # In a thread, as `run`: the constructor is the user's, and may block.
            workflow = await self._threads.run(partial(self._workflow_for, trinity_task, model, judges))
            if workflow.is_async:
                experiences = await workflow.run_async()
            else:
                experiences = await self._threads.run(workflow.run)
        finally:
            model.end()
        return self._recorded(experiences, policy)

    def _workflow_for(self, task: Task, model: ModelWrapper, judges: Sequence[Any] | None) -> Workflow:
        workflow = self._class(task=task, model=model, auxiliary_models=judges)
        workflow.set_repeat_times(1, 0)
        return workflow

    def _task(self, task: CoreTask) -> Task:
        """Returns the row in Trinity-RFT's form: its columns under their own names."""
        config, columns = self.config, {"prompt_key": "prompt", "response_key": "response"} | self.config.format
        # The workflow adds the system message itself, from `format`.
        messages = [message for message in task.prompt if message.role != "system" or len(task.prompt) == 1]
        alone = len(messages) == 1 and messages[0].role == "user"
        prompt = messages[0].content if alone else [{"role": m.role, "content": m.content} for m in messages]
        is_eval, rollout_args = task.taskset != "train", {"n": 1, **config.rollout_args}
        if is_eval and "max_tokens" in rollout_args:
            rollout_args["max_tokens"] = None  # the bound of training; the policy has that of `evaluation.sampling`
        row = {columns["prompt_key"]: prompt, **task.columns}
        if "answer" in task.columns:
            row[columns["response_key"]] = task.columns["answer"]
        return Task(
            raw_task=row,
            workflow=self._class,
            format_args=SimpleNamespace(**columns),
            rollout_args=SimpleNamespace(**rollout_args),
            workflow_args=dict(config.workflow_args),
            reward_fn_args=dict(config.reward_fn_args),
            reward_fn=self._reward,
            is_eval=is_eval,
            task_id=task.task_id,
        )

    def _recorded(self, experiences: object, policy: Policy) -> dict[str, float] | None:
        """Credits the turns of the returned experiences. Raises RolloutError if the experiences are not the turns."""
        name = self._class.__name__
        if not isinstance(experiences, Sequence) or not all(isinstance(entry, RolledOut) for entry in experiences):
            raise RolloutError(
                f"the experiences of {name}", described(experiences), "return what model.chat returned, with rewards"
            )
        turns: dict[int, float | None] = {id(turn): entry.reward for entry in experiences for turn in entry.turns}
        missing = [turn for turn in policy.turns if id(turn) not in turns]
        if missing or not experiences:
            raise RolloutError(
                f"the experiences of {name}",
                f"{len(missing)} of {len(policy.turns)} completions are in none of them: "
                f"{[turn.text[:60] for turn in missing[:2]]}",
                "return them too: a rollout is trained on as a whole; a judge is an auxiliary model",
            )
        for experience in experiences:
            policy.metrics |= {key: float(value) for key, value in experience.metrics.items()}
        for turn in policy.turns:
            if (reward := turns[id(turn)]) is not None:
                policy.credit(turn, reward=reward)
        return None if experiences[-1].reward is None else {"reward": experiences[-1].reward}


def _workflow_class(name: str) -> type[Workflow]:
    target = WORKFLOWS.get(name)
    if isinstance(target, type) and issubclass(target, Workflow):
        return target
    raise ConfigError(
        f"the workflow {name!r}",
        f"{target!r} is not derived from Workflow",
        "derive it from trivium.frontdoors.trinity.Workflow; name a workflow of Trivium in workflow.kind",
    )


def _reward_class(name: str) -> Callable[..., Any] | None:
    """Returns what Task.reward_fn holds: the user's class or function, or one of Trinity-RFT's names."""
    if not name:
        return None
    return partial(_score, name) if name in REWARDS else REWARD_FUNCTIONS.get(name)


def _score(name: str, *, response: str, prompt: Any = None, truth: Any = None, **_: Any) -> dict[str, float]:
    """Calls the rewards of a name of Trinity-RFT."""
    scores: dict[str, float] = {}
    for section in REWARDS[name]:
        config: Any = plugin("rewards")(dict(section))
        reward = build("rewards", config)
        arguments = {"prompt": str(prompt), "completion": response}
        arguments |= {} if "Format" in config.kind else {"answer": truth}
        scores[config.label] = float(reward(**arguments))
    return scores
