"""Workflows that are written against Trinity-RFT's classes, on a policy of the core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reward_services import json_of, service

from tests.failing import refused
from trivium.config import build, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.errors import RolloutError, UnknownName
from trivium.foundation.randomness import SampleKey
from trivium.frontdoors.trinity.config.registries import PLUGIN_DIRS
from trivium.frontdoors.trinity.frozen_lake import FrozenLake
from trivium.frontdoors.trinity.workflow_adapter import WorkflowOfTrinity
from trivium.policy import Policy
from trivium.testing import check_workflow
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Request, Sampling, Task

RENDERER = ChatRenderer(tiny_tokenizer())
TASK = Task("sum", (Message("system", "Add."), Message("user", "1+1=")), {"answer": "2", "level": 3})
MINE = """
from trivium.frontdoors.trinity import (
    WORKFLOWS, MultiTurnWorkflow, RewardPropagationWorkflow, SimpleWorkflow, StepWiseRewardWorkflow, Workflow,
)


class Once(Workflow):
    can_reset, can_repeat = True, True

    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task):
        self.question, self.truth, self.bonus = task.task_desc, task.truth, task.workflow_args.get("bonus", 0.0)
        self.level = task.raw_task["level"]

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times
        self.task.rollout_args.n = repeat_times

    def run(self):
        responses = self.model.chat([{"role": "user", "content": self.question}], **self.rollout_args)
        for response in responses:
            response.reward = float(response.response_text == self.truth) + self.bonus
            response.metrics = {"level": self.level}
        return responses


class Turns(MultiTurnWorkflow):
    is_async = True

    async def run_async(self):
        memory = [{"role": "user", "content": self.task.task_desc}]
        for _ in range(2):
            (response,) = await self.model.chat_async(memory)
            memory += [{"role": "assistant", "content": response.response_text}, {"role": "user", "content": "again"}]
        return [self.process_messages_to_experience(memory, 0.5, {"turns": 2})]


class Steps(StepWiseRewardWorkflow):
    max_step_num = 3

    def step(self, step_num):
        asked = [{"role": "user", "content": f"step {step_num}"}]
        self.said = self.client.chat.completions.create(model="any", messages=asked).choices[0].message.content
        return self.said != "end"

    def reward(self, exps, step_num):
        return float(step_num)


class Late(RewardPropagationWorkflow):
    max_step_num = 2

    def step(self, step_num):
        self.model.chat([{"role": "user", "content": f"step {step_num}"}])
        return True

    def reward(self, exps):
        return 0.25 * len(exps)


class Judged(Workflow):
    def run(self):
        (response,) = self.model.chat([{"role": "user", "content": self.task.task_desc}])
        judge = self.auxiliary_models[0]
        asked = [{"role": "user", "content": response.response_text}]
        verdict = judge.chat.completions.create(model=judge.model_path, messages=asked, temperature=0.0)
        response.reward = float(verdict.choices[0].message.content)
        return [response]


class JudgedAsync(Workflow):
    is_async = True

    async def run_async(self):
        (response,) = await self.model.chat_async([{"role": "user", "content": self.task.task_desc}])
        judge = self.auxiliary_models[0]
        asked = [{"role": "user", "content": response.response_text}]
        verdict = await judge.chat.completions.create(model=judge.model_path, messages=asked)
        response.reward = float(verdict.choices[0].message.content)
        return [response]


class Blocking(Workflow):
    is_async = True

    async def run_async(self):
        return self.model.chat([{"role": "user", "content": self.task.task_desc}])


class BlockingClient(Workflow):
    is_async = True

    async def run_async(self):
        asked = [{"role": "user", "content": self.task.task_desc}]
        return self.model.get_openai_client().chat.completions.create(messages=asked)


class Forgetful(Workflow):
    def run(self):
        first = self.model.chat([{"role": "user", "content": "a"}])
        self.model.chat([{"role": "user", "content": "b"}])
        return first


class Hot(Once):
    def run(self):
        return self.model.chat([{"role": "user", "content": "a"}], temperature=0.5)


@WORKFLOWS.register_module("registered_by_me")
class Registered(SimpleWorkflow):
    pass
"""


def says(request: Request, version: int) -> str:
    """The task id of the key holds the completions, one per call."""
    return request.key.task_id.split("|")[int(request.key.path[-1])]


def policy(*texts: str) -> Policy:
    engine = ScriptedEngine(
        ScriptedEngine.Config(script=f"{__file__}:says"),
        eos_token_ids=RENDERER.eos_token_ids,
        decode=RENDERER.decode,
        encode=lambda text: tiny_tokenizer().encode(text),
    )
    return Policy(engine, RENDERER, Sampling(64), SampleKey(0, "train", "train", "|".join(texts)), 300)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., WorkflowOfTrinity]:
    file = tmp_path / "mine.py"
    file.write_text(MINE)

    def workflow(name: str, **fields: Any) -> WorkflowOfTrinity:
        section = {"kind": WorkflowOfTrinity.Config.model_fields["kind"].default, "workflow": f"{file}:{name}"}
        config: Any = plugin("workflows")({**section, "format": {"prompt_key": "q", "response_key": "a"}, **fields})
        return build("workflows", config)

    return workflow


async def test_a_plain_workflow_reads_its_row_and_keeps_the_contract(made: Callable[..., Any]) -> None:
    workflow, played = made("Once", workflow_args={"bonus": 0.5}), policy("2")
    assert await workflow.run(TASK, played) == {"reward": 1.5}
    assert played.metrics == {"level": 3.0}
    assert [turn.reward for turn in played.turns] == [1.5]
    await check_workflow(workflow, TASK, lambda: policy("2"))


@pytest.mark.parametrize(("taskset", "completion"), [("train", "12"), ("held_out", "1234")])
async def test_the_bound_of_training_does_not_cut_an_evaluation(
    made: Callable[..., Any], taskset: str, completion: str
) -> None:
    played = policy("1234")
    await made("Once", rollout_args={"max_tokens": 2}).run(replace(TASK, taskset=taskset), played)
    assert [turn.text for turn in played.turns] == [completion]


async def test_the_turns_of_a_conversation_are_one_experience(made: Callable[..., Any]) -> None:
    played = policy("one", "two")
    assert await made("Turns").run(TASK, played) == {"reward": 0.5}
    assert [turn.text for turn in played.turns] == ["one", "two"]
    assert played.metrics == {"turns": 2.0}


async def test_each_step_of_a_workflow_has_its_reward(made: Callable[..., Any]) -> None:
    played = policy("go", "go", "end")
    assert await made("Steps").run(TASK, played) == {"reward": 2.0}
    assert [turn.reward for turn in played.turns] == [0.0, 1.0, 2.0]
    played = policy("a", "b")
    assert await made("Late").run(TASK, played) == {"reward": 0.5}
    assert [turn.reward for turn in played.turns] == [0.5, 0.5]


@pytest.mark.parametrize("name", ["Judged", "JudgedAsync"])
async def test_an_auxiliary_model_is_asked_at_its_endpoint(made: Callable[..., Any], name: str) -> None:
    verdict = {"choices": [{"message": {"role": "assistant", "content": "0.75"}, "finish_reason": "stop"}]}
    async with service(json_of(verdict), path="/v1/chat/completions") as here:
        url = here.url.removesuffix("/chat/completions")
        workflow = made(name, auxiliary_models=[{"model": "judge", "urls": [url]}])
        assert await workflow.run(TASK, policy("good")) == {"reward": 0.75}
        assert (here.requests[0].body["model"], here.requests[0].body["messages"][0]["content"]) == ("judge", "good")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["Blocking", "BlockingClient"])
async def test_a_blocking_completion_on_the_event_loop_is_refused(made: Callable[..., Any], name: str) -> None:
    with refused(RolloutError, "model.chat_async"):
        await made(name).run(TASK, policy("x"))


async def test_what_would_not_be_trained_as_it_was_sampled_is_refused(made: Callable[..., Any]) -> None:
    with refused(RolloutError, "1 of 2"):
        await made("Forgetful").run(TASK, policy("x", "y"))
    with refused(RolloutError, "temperature=0.5"):
        await made("Hot").run(TASK, policy("x"))


async def test_a_registered_workflow_scores_with_a_reward_function(
    made: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PLUGIN_DIRS, raising=False)
    with refused(UnknownName, PLUGIN_DIRS):
        made("Once", workflow="nobody_registers_this")
    made("Once")
    monkeypatch.setenv(PLUGIN_DIRS, str(tmp_path))
    workflow = made("Once", workflow="registered_by_me", reward_fn="math_reward")
    scores = await workflow.run(TASK, policy("<think>so</think> <answer>2</answer>"))
    assert scores == {"reward": 1.1}
    simple = made("Once", workflow="trivium.frontdoors.trinity:SimpleWorkflow", reward_fn="math_boxed_reward")
    assert await simple.run(TASK, policy("so \\boxed{2}")) == {"reward": 1.0}


async def test_an_abandoned_workflow_leaves_no_thread_waiting(made: Callable[..., Any]) -> None:
    stuck = asyncio.Event()

    class Silent(Policy):
        def __init__(self) -> None:
            self.metrics = {}

        async def generate(self, messages: Any, *, max_new_tokens: int | None = None) -> Any:
            stuck.set()
            await asyncio.sleep(3600)

    running = asyncio.ensure_future(made("Once").run(TASK, Silent()))
    await asyncio.wait_for(stuck.wait(), 60)
    running.cancel()
    await asyncio.wait({running}, timeout=60)
    assert running.cancelled()


def test_a_walk_over_the_ice_ends_at_the_goal_or_in_a_hole() -> None:
    lake = FrozenLake(env_max_steps=5)
    lake.reset(Task("t", (), {"desc": ["SFH", "FFF", "HFG"]}))
    assert lake.step("I go ```Down```")[1:] == (0.0, False)
    assert lake.step("no move")[1:] == (0.0, False)
    lake.step("```right```")
    assert lake.step("```Right```")[1:] == (0.0, False)
    assert lake.step("```Down```")[1:] == (1.0, True)
    lake.reset(Task("t", (), {"desc": ["SFH", "FFF", "HFG"]}))
    lake.step("```Right```")
    assert lake.step("```Right```")[1:] == (0.0, True)
    row = {"seed": 3, "size": 5, "p": 0.8}
    first, again = FrozenLake().reset(Task("t", (), row)), FrozenLake().reset(Task("u", (), row))
    assert first == again
    assert "P" in first[1].content
    assert "G" in first[1].content
