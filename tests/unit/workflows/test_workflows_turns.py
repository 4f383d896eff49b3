"""Whole episodes: what the policy sees, what is trained on, what a failing environment becomes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import refused

from tests.waiting import until
from trivium.config import RunConfig, build, plugin
from trivium.engines.scripted import ScriptedEngine, log_probs_of
from trivium.foundation.errors import ConfigError, RolloutError, UnknownName
from trivium.foundation.randomness import SampleKey
from trivium.foundation.registry import resolve
from trivium.policy import Policy, PromptTooLong
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import (
    Group,
    Message,
    Request,
    Sampling,
    Task,
    Trajectory,
    experiences_of,
)
from trivium.workflows.episodes import EnvironmentFailure
from trivium.workflows.multi_turn import MultiTurn

GUESS = Path(__file__).parents[3] / "recipes" / "guess.py"
RENDERER = ChatRenderer(tiny_tokenizer())
TASK = Task("t", (Message("user", "digit?"),), {"secret": 6})
LOCK, TWO, RELEASE = threading.Lock(), threading.Barrier(2), threading.Event()


def says(request: Request, version: int) -> str:
    """The script of the engine: the task id holds the replies, one per call."""
    return request.key.task_id.split("|")[int(request.key.path[-1])]


def policy(*texts: str, max_context: int = 200) -> Policy:
    """A policy that says these texts, one per call, each closed by end of turn."""
    engine = ScriptedEngine(
        ScriptedEngine.Config(script=f"{__file__}:says"),
        eos_token_ids=RENDERER.eos_token_ids,
        decode=RENDERER.decode,
        encode=lambda text: tiny_tokenizer().encode(text),
    )
    return Policy(engine, RENDERER, Sampling(16), SampleKey(0, "train", "train", "|".join(texts)), max_context)


def workflow(kind: str = "multi_turn", **fields: Any) -> Any:
    return build("workflows", plugin("workflows")({"kind": kind, **fields}))


def here(name: str, **fields: Any) -> MultiTurn:
    """A multi-turn workflow over an environment of this file."""
    return workflow(environment=f"{__file__}:{name}", **fields)


def shown(player: Policy) -> list[str]:
    """Every turn as text with its special tokens: the prompt, a bar, the reply."""
    tokenizer = tiny_tokenizer()
    return [f"{tokenizer.decode(t.prompt_tokens.tolist())}|{tokenizer.decode(t.tokens.tolist())}" for t in player.turns]


# --- single turn


async def test_single_turn_asks_once_and_leaves_judging_to_rewards() -> None:
    player = policy("6")
    assert await workflow("single_turn").run(TASK, player) is None
    assert shown(player) == ["<|user|>digit?<|end|><|assistant|>|6<|end|>"]


async def test_single_turn_puts_its_system_message_first_unless_the_task_has_one() -> None:
    player = policy("6")
    await workflow("single_turn", system="be brief").run(TASK, player)
    assert shown(player)[0].startswith("<|system|>be brief<|end|><|user|>digit?")
    player = policy("6")
    own = Task("t", (Message("system", "own"), *TASK.prompt))
    await workflow("single_turn", system="be brief").run(own, player)
    assert shown(player)[0].startswith("<|system|>own<|end|><|user|>")


# --- multi turn


async def test_an_episode_trains_on_the_replies_and_on_nothing_the_world_said() -> None:
    player = policy("3", "x", "8", "6")
    earned = await workflow(environment=f"{GUESS}:Guess").run(TASK, player)
    assert earned == {"environment": pytest.approx(1 - 3 * 0.1)}
    assert player.metrics == {"env_done": 1.0}
    whole = (
        "<|user|>digit?<|end|><|assistant|>3<|end|><|user|>up<|end|><|assistant|>x<|end|>"
        "<|user|>digit?<|end|><|assistant|>8<|end|><|user|>down<|end|><|assistant|>|6<|end|>"
    )
    assert shown(player)[-1] == whole

    trajectory = Trajectory(0, player.turns, earned)
    (experience,) = experiences_of(Group(0, TASK, (trajectory,)), trajectory)
    tokenizer = tiny_tokenizer()
    text = [tokenizer.decode([token]) for token in experience.tokens.tolist()]
    trained = [piece for piece, mask in zip(text, experience.response_mask, strict=True) if mask]
    assert "".join(text) == whole.replace("|6<", "6<")
    assert trained == ["3", "<|end|>", "x", "<|end|>", "8", "<|end|>", "6", "<|end|>"]
    sampled = [log_prob for turn in player.turns for log_prob in log_probs_of(turn.tokens).tolist()]
    assert experience.rollout_log_prob[experience.response_mask].tolist() == sampled
    assert not experience.rollout_log_prob[~experience.response_mask].any()
    assert set(experience.policy_version[experience.response_mask].tolist()) == {0}
    assert experience.reward == pytest.approx(0.7)


class Halves:
    """Answers with half of a surrogate pair."""

    def reset(self, task: Task) -> Sequence[Message]:
        return [Message("user", "first \ud83d")]

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        return [Message("user", "then \udc00 &")], 1.0, False


async def test_half_of_a_surrogate_pair_is_shown_escaped() -> None:
    player = policy("1", "2")
    assert await here("Halves", max_turns=2).run(TASK, player) == {"environment": 2.0}
    renderer_text = RENDERER.decode(player.turns[1].prompt_tokens.tolist())
    assert "first \\ud83d" in renderer_text
    assert "then \\udc00 " in renderer_text


async def test_max_turns_ends_an_episode_that_the_world_would_go_on_with() -> None:
    player = policy("1", "2", "3")
    earned = await workflow(environment=f"{GUESS}:Guess", environment_args={"cost": 1}, max_turns=2).run(TASK, player)
    assert earned == {"environment": -2.0}
    assert len(player.turns) == 2
    assert player.metrics == {"env_done": 0.0}


async def test_a_full_context_ends_the_episode_but_a_task_that_is_too_long_fails() -> None:
    player = policy("1", "2", "3", max_context=18)
    await workflow(environment=f"{GUESS}:Guess").run(TASK, player)
    assert len(player.turns) == 2
    assert player.metrics == {"env_done": 0.0}
    with refused(PromptTooLong):
        await workflow(environment=f"{GUESS}:Guess").run(TASK, policy("1", max_context=7))


class Asynchronous:
    """Counts; every method a coroutine."""

    async def reset(self, task: Task) -> Sequence[Message]:
        self.steps = 0
        return [Message("user", "go")]

    async def step(self, completion: str) -> tuple[list[Message], float, bool]:
        await asyncio.sleep(0)
        self.steps += 1
        return [Message("tool", str(self.steps))], np.float32(0.5), np.bool_(self.steps == 3)  # pyright: ignore[reportReturnType]


async def test_an_asynchronous_environment_with_numpy_numbers() -> None:
    player = policy("a", "b", "c", "d")
    assert await here("Asynchronous").run(TASK, player) == {"environment": 1.5}
    assert shown(player)[1] == "<|user|>go<|end|><|assistant|>a<|end|><|tool|>1<|end|><|assistant|>|b<|end|>"


class Remembers:
    """Finishes after two steps of its own instance."""

    inside = 0
    most = 0
    """Of all instances: how many were in a step at the same time."""

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, task: Task) -> Sequence[Message]:
        return task.prompt

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        self.steps += 1
        with LOCK:
            Remembers.inside += 1
            Remembers.most = max(Remembers.most, Remembers.inside)
        TWO.wait(60)
        with LOCK:
            Remembers.inside -= 1
        return [Message("user", "on")], 0.0, self.steps == 2


async def test_each_trajectory_has_its_own_world_and_slow_worlds_do_not_queue() -> None:
    played, players = here("Remembers"), [policy("a", "b", "c") for _ in range(16)]
    await asyncio.gather(*(played.run(TASK, player) for player in players))
    assert [len(player.turns) for player in players] == [2] * 16
    assert resolve("environments", f"{__file__}:Remembers").most > 1


class Stuck(Remembers):
    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        RELEASE.wait(120)
        return [], 0.0, True


async def test_a_deadline_fires_while_the_world_computes() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await here("Stuck").run(TASK, policy("a"))
    release = resolve("environments", f"{__file__}:RELEASE")
    assert not release.is_set()
    release.set()


class Answers(Remembers):
    """Answers a step with whatever it was made with."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def step(self, completion: str) -> Any:
        return tuple(self.answer) if isinstance(self.answer, list) else self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "None of type NoneType instead of (messages, reward, done)"),
        ([[], 1.0], "instead of (messages, reward, done)"),
        (["text", 1.0, True], "'text' of type str instead of a sequence of trivium.types.Message"),
        ([[{"role": "user"}], 1.0, True], "instead of a sequence"),
        ([[], float("nan"), True], "as the reward nan, which is not a finite number"),
        ([[], "1", True], "as the reward '1' of type str"),
        ([[], 1e39, True], "as the reward 1e+39, and 1e+09 is the largest that can be used"),
        ([[], True, True], "as the reward True of type bool"),
        ([[], 1.0, 1], "done 1 of type int instead of true or false"),
        ([[], 1.0, False], "no message to answer"),
    ],
)
async def test_a_malformed_step_is_a_rollout_error_with_three_parts(answer: Any, message: str) -> None:
    with refused(EnvironmentFailure, "'t'", message):
        await here("Answers", environment_args={"answer": answer}).run(TASK, policy("a", "b"))


class Finishes(Answers):
    """Answers `finish` with whatever it was made with."""

    def step(self, completion: str) -> Any:
        return [], 1.0, True

    def finish(self) -> Any:
        return tuple(self.answer) if isinstance(self.answer, list) else self.answer


@pytest.mark.parametrize(
    ("answer", "named"),
    [(None, "NoneType"), ([1.0, None], "(1.0, None)"), ([True, {}], "bool"), ([1.0, {"kills": "2"}], "'kills'")],
)
async def test_a_malformed_finish_fails_the_rollout(answer: Any, named: str) -> None:
    with refused(EnvironmentFailure, "Finishes.finish", "'t'", named):
        await here("Finishes", environment_args={"answer": answer}).run(TASK, policy("a"))


class Breaks:
    """Raises the named error in the named method."""

    def __init__(self, where: str, error: str) -> None:
        self.where, self.error = where, {"key": KeyError("k"), "stop": StopIteration(), "os": OSError("disk")}[error]
        self._raise("init")

    def _raise(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def reset(self, task: Task) -> Sequence[Message]:
        self._raise("reset")
        return task.prompt

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        self._raise("step")
        return [], 0.0, True


@pytest.mark.parametrize("where", ["init", "reset", "step"])
@pytest.mark.parametrize(("error", "named"), [("key", "KeyError: 'k'"), ("stop", "StopIteration"), ("os", "OSError")])
async def test_an_environment_that_raises_is_a_rollout_error_with_its_cause(where: str, error: str, named: str) -> None:
    player = policy("a")
    async with asyncio.timeout(60):
        with refused(EnvironmentFailure, "'t'") as caught:
            await here("Breaks", environment_args={"where": where, "error": error}).run(TASK, player)
    assert named in caught.value.found
    assert caught.value.__cause__ is not None
    assert len(player.turns) == (where == "step")


@pytest.mark.parametrize(
    ("fields", "kind", "name"),
    [
        ({"environment": f"{__file__}:TASK"}, ConfigError, "reset and"),
        ({"environment": f"{__file__}:Gues"}, UnknownName, "'Gues'"),
        ({"environment": "nowhere.at_all:World"}, ConfigError, "'nowhere'"),
        ({"environment": f"{GUESS}:Guess", "environment_args": {"costs": 1}}, ConfigError, "'costs'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_found_before_the_run(
    fields: dict[str, Any], kind: type[ConfigError], name: str
) -> None:
    with refused(kind, name):
        workflow(**fields)
    config = plugin("workflows")({"kind": "multi_turn", **fields})
    (problem,) = config.problems(RunConfig.model_construct(), "workflow")
    assert problem[0] == "workflow.environment"
    assert name in str(problem)


class Slow(Asynchronous):
    """Waits in the named method."""

    closed = 0

    def __init__(self, where: str) -> None:
        self.where = where

    async def reset(self, task: Task) -> Sequence[Message]:
        if self.where == "reset":
            await asyncio.Event().wait()
        return await super().reset(task)

    async def step(self, completion: str) -> tuple[list[Message], float, bool]:
        if self.where == "step":
            await asyncio.Event().wait()
        return await super().step(completion)

    async def close(self) -> None:
        type(self).closed += 1
        if self.where == "close":
            raise OSError("the server is gone")


@pytest.mark.parametrize("where", ["reset", "step", "close", "never"])
async def test_a_slow_environment_fails_its_rollout_and_an_error_of_close_does_not(where: str) -> None:
    deadlines = {"connect_deadline_s": 60.0, "call_deadline_s": 60.0}
    deadlines |= {"reset": {"connect_deadline_s": 0.3}, "step": {"call_deadline_s": 0.3}}.get(where, {})
    episodes = here("Slow", environment_args={"where": where}, max_environments=1, **deadlines)
    slow = resolve("environments", f"{__file__}:Slow")
    before = slow.closed
    for _ in range(2):  # a failed episode leaves its place to the next
        if where in ("reset", "step"):
            with pytest.raises(EnvironmentFailure) as caught:
                await episodes.run(TASK, policy("a", "b", "c"))
            assert caught.value.asked.startswith(f"Slow.{where}")
            assert "0.3 s" in caught.value.found
        else:
            assert await episodes.run(TASK, policy("a", "b", "c")) == {"environment": 1.5}
    assert slow.closed == before + 2


# --- the example world


def test_guess_scores_a_game() -> None:
    world = resolve("environments", f"{GUESS}:Guess")()
    assert world.reset(TASK) == TASK.prompt
    for reply, answer in (("9", "down"), ("0", "up"), ("66", "digit?"), ("", "digit?"), ("²", "digit?")):
        assert world.step(reply) == ((Message("user", answer),), -0.1, False)
    assert world.step(" 6 ") == ((), 1.0, True)


def test_guess_tasks_are_rows_with_a_secret_each() -> None:
    tasks = build(
        "tasks", plugin("tasks")({"kind": "python", "source": f"{GUESS}:tasks", "id": "id"}), name="t", seed=0
    )
    assert [task.columns["secret"] for task in tasks] == list(range(10))
    assert [task.task_id for task in tasks] == [task.columns["completion"] for task in tasks]


# --- credit


class Corridor:
    """Two rooms that look the same from the second visit on; the first step is free, the others cost."""

    def reset(self, task: Task) -> list[Message]:
        self.steps = 0
        return [Message("user", "room")]

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        self.steps += 1
        return [Message("user", "hall" if completion == "on" else "room")], -0.5 * (self.steps > 1), self.steps == 4


async def test_each_turn_is_credited_with_its_step_and_named_by_what_the_world_showed() -> None:
    player = policy("on", "back", "on", "on")
    earned = await here("Corridor").run(TASK, player)
    assert earned == {"environment": -1.5}
    assert [turn.reward for turn in player.turns] == [0.0, -0.5, -0.5, -0.5]
    room, hall, again, other = (turn.state for turn in player.turns)
    assert room == again != hall == other
    trajectory = Trajectory(0, player.turns, earned)
    (experience,) = experiences_of(Group(0, TASK, (trajectory,)), trajectory)
    assert [(span.number, span.reward, span.state) for span in experience.turns] == [
        (0, 0.0, room),
        (1, -0.5, hall),
        (2, -0.5, room),
        (3, -0.5, hall),
    ]


async def test_only_what_was_replied_can_be_credited_and_only_once() -> None:
    player = policy("a")
    turn = await player.generate(TASK.prompt)
    credited = player.credit(turn, reward=2.0, state="here")
    assert player.turns == (credited,)
    assert (credited.reward, credited.state) == (2.0, "here")
    with refused(RolloutError, "record"):
        player.credit(turn, reward=1.0)


# --- the end of an environment


class Held:
    """An environment that counts its ends."""

    ended = 0
    making, going_on = threading.Event(), threading.Event()

    def __init__(self, late: bool = False) -> None:
        if late:
            Held.making.set()
            assert Held.going_on.wait(120)

    def reset(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, completion: str) -> tuple[list[Message], float, bool]:
        if completion == "9":
            raise ValueError("broken")
        return [Message("user", "on")], 0.0, completion == "6"

    async def close(self) -> None:
        Held.ended += 1


@pytest.mark.parametrize(("text", "max_turns"), [("6", 8), ("3", 1), ("9", 8)])
async def test_an_environment_is_closed_however_its_trajectory_ends(text: str, max_turns: int) -> None:
    resolved = resolve("environments", f"{__file__}:Held")
    before, failed = resolved.ended, text == "9"
    try:
        await here("Held", max_turns=max_turns).run(TASK, policy(text))
        assert not failed
    except EnvironmentFailure:
        assert failed
    assert resolved.ended == before + 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_environment_that_is_made_after_its_rollout_ended_is_closed(cancelled: bool) -> None:
    held = resolve("environments", f"{__file__}:Held")
    held.making.clear()
    held.going_on.clear()
    before = held.ended
    episodes = here("Held", environment_args={"late": True}, connect_deadline_s=60 if cancelled else 0.5)
    rollout = asyncio.ensure_future(episodes.run(TASK, policy("6")))
    assert await asyncio.to_thread(held.making.wait, 60)
    if cancelled:
        rollout.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else EnvironmentFailure):
        await rollout
    assert held.ended == before
    held.going_on.set()
    await until(lambda: held.ended != before)
    assert held.ended == before + 1
