"""Environments of verifiers with scripted policies. `make test-verifiers` runs them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from failing import refused
from workflow_parts import policy, shown, workflow

from trivium.api import verifiers_rows
from trivium.config import RunConfig, plugin
from trivium.foundation.errors import ConfigError, DataError
from trivium.policy import EngineFailure, PromptTooLong
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TEMPLATE, tiny_tokenizer
from trivium.types import Message, Task, sequences_of
from trivium.workflows.episodes import EnvironmentFailure

pytest.importorskip("verifiers", reason="verifiers is not installed here; `make test-verifiers` has it")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of verifiers and what it imports
RUN = RunConfig.model_validate({"model": {"kind": "tiny"}, "tasks": {"train": {"kind": "arithmetic"}}})
RUNTIME = {"runtime": {"type": "subprocess"}}
ENV: dict[str, Any] = {"taskset": {"id": "verifiers_words"}, "agent": RUNTIME}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def words(env: dict[str, Any] = ENV, **fields: Any) -> Any:
    return workflow("verifiers", env=env, **fields)


def task(how: str = "") -> Task:
    data = {"prompt": "well?", "system_prompt": "be brief", "how": how}
    return Task("t", (Message("user", "well?"),), {"verifiers": data})


async def test_rewards_are_components_and_the_history_keeps_its_tokens() -> None:
    player = policy(f"let me see {CALL}", "yes")
    assert await words().run(task(), player) == {"right": 1.0, "short": 0.5}
    assert player.metrics == {"turns": 2.0}
    first, second = player.turns
    sampled = [*first.prompt_tokens.tolist(), *first.tokens.tolist()]
    assert second.prompt_tokens.tolist()[: len(sampled)] == sampled
    assert "<|system|>be brief" in shown(player)[0]
    assert "<|tool|>seen<|end|>" in shown(player)[1]


async def test_a_history_that_the_program_edits_is_rendered_anew() -> None:
    player = policy(f"let me see {CALL}", "yes")
    await words().run(task("edit"), player)
    assert "<|assistant|>edited" in shown(player)[1]
    assert "let me see" not in shown(player)[1]
    assert "look" in shown(player)[1].partition("edited")[2]


async def test_scores_read_the_answer_and_the_history_keeps_the_reasoning() -> None:
    player = policy(f"<think>a {CALL}</think>\n\n{CALL}", "<think>so</think>\n\nyes")
    assert await words().run(task(), player) == SCORES
    first, second = player.turns
    sampled = [*first.prompt_tokens.tolist(), *first.tokens.tolist()]
    assert second.prompt_tokens.tolist()[: len(sampled)] == sampled

    player = policy(f"<think>hm</think>let me see {CALL}", "yes")
    await words().run(task("edit"), player)
    assert "<think>\nhm\n</think>\n\nedited\n" in shown(player)[1]


async def test_reasoning_that_the_prompt_opens_is_neither_a_call_nor_the_answer() -> None:
    template = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
    renderer = ChatRenderer(tiny_tokenizer("bytes", template=template))
    player = policy(f"maybe {CALL}</think>{CALL}", f"no {CALL}</think>yes", renderer=renderer)
    assert await words().run(task(), player) == SCORES
    assert len(player.turns) == 2
    assert shown(player)[1].count("<|tool|>seen") == 1


async def test_conversations_of_one_agent_each_keep_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers.v1 as vf
    import verifiers_words

    async def launch(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *_: Any) -> Any:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
            conversations: list[list[Any]] = [[{"role": "user", "content": name}] for name in "AB"]
            for messages in conversations * 3:
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        return vf.ProgramResult(0, "", "")

    monkeypatch.setattr(verifiers_words.AskingHarness, "launch", launch)
    player = policy("a", "b", "c")  # to each conversation
    await words().run(task(), player)
    assert len(player.turns) == 6
    assert len(sequences_of(player.turns)) == 2


async def test_every_attempt_of_an_environment_with_several_is_a_participant() -> None:
    env = {**ENV, "id": "best-of-n", "n": 2}
    player = policy("yes")
    rewards = await words(env).run(task(), player)
    assert rewards == {f"{name}/{key}": value for name in ("agent", "agent-2") for key, value in SCORES.items()}
    assert {turn.participant for turn in player.turns} == {"agent", "agent-2"}
    assert player.metrics["agent-2/pass_at_n"] == 1


SCORES = {"right": 1.0, "short": 0.5}


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("raise", ("TaskError", "no score today")),
        ("harness", ("HarnessError", "out of memory")),
        ("silent", ("no completion",)),
        ("late", ("right", "scoring")),
    ],
)
async def test_an_episode_that_fails_has_no_rewards(how: str, names: tuple[str, ...]) -> None:
    env = {**ENV, "agent": {**RUNTIME, "timeout": {"scoring": 0.2}}}
    with refused(EnvironmentFailure, "verifiers_words", *names):
        await words(env).run(task(how), policy("yes"))


async def test_errors_of_the_policy_keep_their_type() -> None:
    with refused(PromptTooLong):
        await words().run(task(), policy("yes", max_context=4))
    with pytest.raises(EngineFailure):
        await words().run(task(), policy(CALL))  # the script has one completion, and the program asks for a second one


async def test_a_rollout_that_is_cancelled_leaves_no_server_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import verifiers_words

    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)
    episodes, program = words(max_environments=1), verifiers_words.AskingHarness
    hanging = asyncio.create_task(episodes.run(task("hang"), policy("yes")))
    await asyncio.wait_for(program.hanging.wait(), 30)
    waiting = asyncio.create_task(episodes.run(task(), policy("yes")))
    assert list((tmp_path / "runtimes" / "subprocess").iterdir())
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{program.endpoint}/models")).status_code == 401
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{program.endpoint}/models")
    assert await waiting == SCORES  # its turn came when the first one ended
    assert not list((tmp_path / "runtimes" / "subprocess").iterdir())


async def test_an_agent_that_is_not_trained_is_not_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def setup(self: Any, agents: Any) -> None:
        agents.agent.trainable = False

    monkeypatch.setattr("verifiers.v1.SingleAgentEnv.setup", setup)
    with refused(EnvironmentFailure, "env.agent.model", "env.agent.client"):
        await words().run(task(), policy("yes"))


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"agent": {"sampling": {"temperature": 0.5}}}, ("env.agent.sampling", "engine.sampling")),
        ({"agent": {"model": "other"}}, ("env.agent.model", "client")),
        ({"agent": {"retries": {"max_retries": 1}}}, ("env.agent.retries", "workflow.max_retries")),
        ({"retries": {"max_retries": 1}}, ("env.retries", "workflow.max_retries")),
        ({"interception": {"type": "elastic"}}, ("env.interception",)),
        ({"agent": {"harness": {"id": "nowhere"}}}, ("nowhere",)),
        ({"taskset": {"id": "nowhere"}}, ("nowhere",)),
    ],
)
def test_settings_that_training_cannot_follow_are_refused(changed: dict[str, Any], names: tuple[str, ...]) -> None:
    env = {**ENV, **changed}
    with refused(ConfigError, *names):
        words(env)
    section = plugin("workflows")({"kind": "verifiers", "env": env})
    assert [problem.where for problem in section.problems(RUN, "workflow")] == ["workflow.env"]


async def test_a_row_of_another_taskset_is_refused() -> None:
    for columns in ({}, {"verifiers": {"how": 3}}):
        with refused(DataError, "verifiers"):
            await words().run(Task("t", (), columns), policy("yes"))


def test_a_taskset_gives_rows_with_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers_words

    rows = list(verifiers_rows(2, id="verifiers_words"))
    assert [(row["prompt"], row["verifiers"]["how"]) for row in rows] == [("well?", ""), ("well?", "edit")]
    assert verifiers_words.WordData.model_validate(rows[0]["verifiers"]).hint is None  # which is not its default
    assert rows[0]["key"] != rows[1]["key"]
    monkeypatch.setattr(verifiers_words.WordTaskset, "INFINITE", True)
    assert list(verifiers_rows(2, id="verifiers_words")) == rows
    with refused(DataError, "verifiers_words", "limit"):
        next(verifiers_rows(id="verifiers_words"))
    with refused(ConfigError, "taskset", "`id`"):
        next(verifiers_rows(2))
