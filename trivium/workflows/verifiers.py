"""Rollouts in environments of verifiers."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, takewhile
from typing import Any

from trivium.config import RunConfig, WorkflowConfig, free
from trivium.foundation.concurrency import Turns
from trivium.foundation.errors import ConfigError, DataError, Problem, TriviumError, text_of
from trivium.policy import EngineFailure, Policy, PromptTooLong
from trivium.processes.isolated import require
from trivium.text.tool_formats import HERMES, REASONING_TAIL
from trivium.text.tools import TOOLS, ToolCall, read_tool_calls, schemas_of
from trivium.types import Message, StopReason, Task
from trivium.workflows.adapters import mapping_of
from trivium.workflows.episodes import EnvironmentFailure

_REFUSED = {
    "model": "leave it out, since this agent is the policy; or set its client as well",
    "sampling": "set engine.sampling: the trainer computes with that",
    "retries": "set workflow.max_retries",
    "interception": "leave its type out: an episode has one server",
}
"""Settings that training cannot follow, and what to do instead."""


class Verifiers:
    """Runs one episode of an environment of verifiers for each trajectory. The policy answers its agents' requests.

    The row's column `verifiers` holds the data of the task, as `verifiers_rows` writes it. Agents without a `client`
    are the policy. If the environment is not a single agent's, each run of an agent is a participant (`agent`,
    `agent-2`), whose name precedes those of its rewards and metrics. An episode that verifiers records as failed, or
    whose scoring does not finish, fails the trajectory. Its servers and runtimes are closed on every path.
    """

    class Config(WorkflowConfig):
        """Which environment, and limits on time and number."""

        kind: str = "verifiers"
        env: dict[str, Any]
        """The section `env` of verifiers' configs: `taskset`, agents with `harness`, `runtime`, `max_turns` and
        `timeout`, and the `id` of an environment other than the taskset's own."""
        connect_deadline_s: float = free(60.0, gt=0)
        """How long starting the servers that the agents of an episode share may take. Otherwise its rollout fails."""
        max_environments: int = free(32, ge=1)
        """Episodes at the same time. Further rollouts wait, within their own deadline."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            try:
                _env_config(self)
            except TriviumError as error:
                yield Problem(f"{where}.env", error.asked, error.found, error.do)

    def __init__(self, config: Config) -> None:
        env_config = _env_config(config)
        self.config, self._places = config, Turns(config.max_environments)
        self._name = f"the environment {env_config.env_id} of verifiers"
        self._env = _made(lambda: _verifiers().load_environment(env_config))

    async def run(self, task: Task, policy: Policy) -> dict[str, float] | None:
        """Runs one episode. Raises EnvironmentFailure if it fails."""
        vf, own_task = _verifiers(), self._task(task)
        # No completion comes from this address. A program that asks for its models gets none.
        context = vf.ModelContext("policy", vf.TrainClientConfig(base_url="http://127.0.0.1:9"))
        async with self._places, AsyncExitStack() as stack:
            env = copy.copy(self._env)  # the servers of an episode are attributes of its environment
            try:
                async with asyncio.timeout(self.config.connect_deadline_s):
                    await stack.enter_async_context(env.serving())
            except Exception as error:
                raise self._failed(task, f"{type(error).__name__} while its servers start: {text_of(error)}") from error
            client = _Client(context.client, policy, isinstance(env, vf.SingleAgentEnv))
            # verifiers can only make clients of its own from configs; its server looks this one up first.
            env._interception.clients[context.client.model_dump_json()] = client
            episode = await env.run_episode(own_task, context, on_trace=client.begin)
        for error in client.errors:
            if isinstance(error, EngineFailure) or (isinstance(error, PromptTooLong) and not policy.turns):
                raise error
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if not episode.ok or not policy.turns:
            found = f"{errors[-1].type}: {text_of(errors[-1].message)}" if errors else "no completion of the policy"
            raise self._failed(task, found)
        traces = [(client.runs[t.id].prefix, t) for t in episode.traces if t.id in client.runs]
        scores = {f"{name}{key}": reward for name, trace in traces for key, reward in trace.rewards.items()}
        if unscored := [key for key, reward in scores.items() if reward is None]:
            raise self._failed(task, f"no value of the reward {unscored[0]!r}: scoring did not end in time")
        metrics = {f"{name}{key}": value for name, trace in traces for key, value in trace.metrics.items()}
        policy.metrics |= {key: value for key, value in metrics.items() if value is not None}
        return {key: reward.value for key, reward in scores.items()} or None

    def _failed(self, task: Task, found: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"an episode of {self._name} for task {task.task_id!r}", found, "fix the environment")

    def _task(self, task: Task) -> Any:
        """The task of verifiers in a row."""
        kind = type(self._env.taskset).task_type()
        try:
            data = kind.data_type().model_validate(mapping_of(task, "verifiers"))
        except ValueError as error:
            asked = f"the column 'verifiers' of task {task.task_id!r} as {kind.data_type().__name__}"
            raise DataError(asked, text_of(error), "make the rows with verifiers_rows, of the same taskset") from error
        return kind(data, self._env.taskset.config.task)


def verifiers_rows(limit: int | None = None, **taskset: Any) -> Iterator[dict[str, Any]]:
    """Rows for `workflow.kind: verifiers`: the first `limit` tasks of a taskset of verifiers, in its order.

    `taskset` is the section of that name in verifiers' configs: its `id`, and the fields of its config. A row has the
    data of a task, its `key`, and a prompt that describes it: the environment decides which messages the policy reads.
    """
    if not taskset.get("id"):
        raise ConfigError("the rows of a taskset of verifiers", "no `id`", "set `id` in their args to its package")
    vf = _verifiers()
    tasks = _made(lambda: vf.load_taskset(vf.resolve_env_config({"taskset": taskset}).taskset))
    tasks = tasks if limit is None else tasks.take(limit)
    if not tasks.bounded:
        raise DataError(f"the rows of the taskset {taskset['id']!r}", "it has no end", "set `limit` in their args")
    for task in tasks:
        prompt = task.data.prompt_text or task.data.description or task.data.name or task.key
        yield {"key": task.key, "prompt": prompt, "verifiers": task.data.model_dump(mode="json")}


def _verifiers() -> Any:
    """The package. Raises MissingPackage."""
    require("verifiers", "verifiers", "verifiers", "use environments of verifiers")
    return import_module("verifiers.v1")


def _env_config(config: Verifiers.Config) -> Any:
    """The config of verifiers. Raises ConfigError for settings that training cannot follow."""
    vf = _verifiers()
    env_config = _made(lambda: vf.resolve_env_config({"interception": {"type": "server"}, **config.env}))
    pool = None if env_config.interception.type == "server" else env_config.interception
    settings = [("env", "retries", env_config.retries), ("env", "interception", pool)]
    for name, agent in env_config:
        if isinstance(agent, vf.AgentConfig) and agent.client is None:
            settings += [(f"env.{name}", key, getattr(agent, key)) for key in ("model", "sampling", "retries")]
    for where, key, value in settings:
        if value not in (None, vf.RetryConfig()):
            raise ConfigError(f"{where}.{key} of an environment that trains", f"{value!r:.80}", _REFUSED[key])
    return env_config


def _made(make: Callable[[], Any]) -> Any:
    """The result of `make`. Raises ConfigError for any error, since it runs code of the environment's author."""
    try:
        return make()
    except Exception as error:
        found, do = f"{type(error).__name__}: {text_of(error)}", "install its package, or correct its config"
        raise ConfigError("an environment of verifiers", found, do) from error


@dataclass
class _AgentRun:
    """A run of an agent, which may have several conversations with the policy."""

    prefix: str
    """What precedes the names of its rewards."""
    policy: Policy
    conversations: dict[tuple[Message, ...], Policy] = field(default_factory=dict[tuple[Message, ...], Policy])
    """The policy of each conversation, by the messages before the first completion."""

    def policy_of(self, messages: Sequence[Message]) -> Policy:
        """The policy of this conversation. A sequence consists of adjacent turns, so each conversation has its own."""
        opening = tuple(takewhile(lambda message: message.role != "assistant", messages))
        if opening not in self.conversations:
            number = len(self.conversations) + 1
            policy = self.policy if number == 1 else self.policy.branch(f"conversation-{number:04}")
            self.conversations[opening] = policy
        return self.conversations[opening]


class _Client:
    """The policy as a client of verifiers, for the agents of one episode."""

    def __init__(self, config: Any, policy: Policy, alone: bool) -> None:
        """Agents whose client is `config` are the policy. `alone` is whether the environment is a single agent's."""
        self._config, self._policy, self._alone = config, policy, alone
        self._ids, self._num_runs = count(), Counter[str]()
        self.runs: dict[str, _AgentRun] = {}
        """The runs of agents, by the ids of their traces."""
        self.errors: list[TriviumError] = []
        """The errors of completions."""
        self._texts: dict[str, str] = {}
        """The sampled texts of completions with reasoning or calls, by the messages that the agents received."""

    def begin(self, trace: Any) -> None:
        """Begins a run of an agent."""
        name = trace.agent.name
        if trace.agent.config.client != self._config:
            return
        if not trace.agent.trainable:
            do = f"set env.{name}.model and env.{name}.client"
            raise EnvironmentFailure(f"the policy as the agent {name!r}", "the environment does not train it", do)
        self._num_runs[name] += 1
        name = name if self._num_runs[name] == 1 else f"{name}-{self._num_runs[name]}"
        agent_run = _AgentRun("", self._policy) if self._alone else _AgentRun(f"{name}/", self._policy.fork(name))
        self.runs[trace.id] = agent_run

    async def get_response(self, dialect: Any, body: Any, sampling: Any, *, turn: Any, **_: Any) -> Any:
        """The completion of a conversation. Its sampling parameters have no effect, as in verifiers' training."""
        vf, tools, run = _verifiers(), turn.tools or [], self.runs[turn.trace.id]
        if not isinstance(dialect, vf.dialects.ChatDialect):
            raise vf.ProviderError(f"{type(dialect).__name__}: the policy answers Chat Completions", status_code=400)
        described = [vf.clients.train.tool_to_wire(tool) for tool in tools]
        messages = [Message(TOOLS, json.dumps(described))] if tools else []
        try:
            messages += [Message(message.role, self._text(message)) for message in turn.prompt]
            policy = run.policy_of(messages)
            if tools and policy.tool_format is not None:
                policy.tool_format.check()
            completion = await policy.generate(messages)
        except TriviumError as error:
            self.errors.append(error)
            # At these words, programs of verifiers end their run without an error.
            words = "maximum context length: " if isinstance(error, PromptTooLong) else ""
            raise vf.ProviderError(f"{words}{text_of(error)}", status_code=400) from error
        tool_format, prompt_end = policy.tool_format or HERMES, policy.prompt_end(REASONING_TAIL)
        text, calls = read_tool_calls(completion.text, schemas_of(described), policy.tool_format, prompt_end)
        thought, content = tool_format.split(text, opened=tool_format.opens(prompt_end))
        if thought is not None:
            thought, content = thought.strip(), content.strip()
        sent = [vf.ToolCall(id=f"call_{next(self._ids)}", name=name, arguments=arguments) for name, arguments in calls]
        message = vf.AssistantMessage(
            content=content or None, reasoning_content=thought or None, tool_calls=sent or None
        )
        if calls or content != completion.text:
            self._texts[message.model_dump_json()] = completion.text
        finish = "tool_calls" if calls else "length" if completion.stop_reason is StopReason.LENGTH else "stop"
        usage = vf.Usage(prompt_tokens=len(completion.prompt_tokens), completion_tokens=len(completion.tokens))
        response = vf.Response(id="", created=0, model="policy", message=message, finish_reason=finish, usage=usage)
        response.raw = vf.clients.train.serialize_completion(response, "policy")
        return response

    def _text(self, message: Any) -> str:
        """The text of a message. That of a completion is the sampled one, unless the agent changed its parts."""
        content: Any = message.content or ""
        if isinstance(content, list):
            if any(part.type != "text" for part in content):
                raise DataError("text in messages of an environment", "an image", "use an environment without images")
            content = "\n".join(part.text for part in content)
        if message.role != "assistant":
            return content
        if (sampled := self._texts.get(message.model_dump_json())) is not None:
            return sampled
        tool_format = self._policy.tool_format or HERMES
        begin, end = tool_format.reasoning
        thought = f"{begin}\n{message.reasoning_content}\n{end}\n\n" if message.reasoning_content else ""
        calls = (
            tool_format.write([ToolCall(c.name, c.arguments) for c in message.tool_calls]) if message.tool_calls else ""
        )
        return thought + "\n".join(part for part in (content, calls) if part)
