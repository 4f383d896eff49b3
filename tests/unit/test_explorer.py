"""The rollout boundary: what goes wrong in playing is data, what goes wrong in the engine ends the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trivium.config import RewardConfig
from trivium.engines.scripted import ScriptedEngine
from trivium.errors import RolloutError, RolloutsFailing
from trivium.evaluate import Evaluator
from trivium.explorer import Explorer
from trivium.policy import EngineFailure, Policy
from trivium.randomness import SampleKey
from trivium.rewards.calling import make_judge
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Group, Message, Sampling, Task

RENDERER = ChatRenderer(tiny_tokenizer("0123456789"))
TASK = Task("t", (Message("user", "1"),), {"answer": "12"})


class Plays:
    """A workflow made of a function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float] | None:
        return await self.function(task, policy)


async def one_reply(task: Task, policy: Policy) -> dict[str, float]:
    await policy.reply(task.prompt)
    return {"played": 1.0}


def explorer(function: Any = one_reply, deadline_s: float = 5.0, room: int = 64, **engine: Any) -> Explorer:
    scripted = ScriptedEngine(
        ScriptedEngine.Config(replies=((1, 2),), **engine), eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode
    )
    return Explorer(
        scripted, RENDERER, Plays(function), make_judge(()), Sampling(8), scripted.max_context, deadline_s, room
    )


def keys(number: int = 4) -> list[SampleKey]:
    return [SampleKey(0, "test", "train", "t", 0, index) for index in range(number)]


async def play(playing: Explorer, number: int = 4) -> Group:
    return await playing.play(TASK, keys(number))


async def test_every_member_is_played_and_rewarded() -> None:
    group = await play(explorer())
    assert [t.index for t in group.trajectories] == [0, 1, 2, 3]
    assert all(t.failure is None and t.reward == 1.0 and t.completion == "12" for t in group.trajectories)


@pytest.mark.parametrize(
    ("raised", "side"),
    [(ValueError("x"), "workflow"), (RolloutError("a", "b", "c"), "workflow"), (TimeoutError(), "deadline")],
)
async def test_a_workflow_that_raises_fails_its_own_trajectory_only(raised: Exception, side: str) -> None:
    calls = iter(range(4))

    async def sometimes(task: Task, policy: Policy) -> dict[str, float]:
        if next(calls) == 2:
            raise raised
        return await one_reply(task, policy)

    group = await play(explorer(sometimes))
    assert len(group.alive) == 3
    (failed,) = [t.failure for t in group.trajectories if t.failure is not None]
    assert (failed.side, failed.kind) == (side, type(raised).__name__)


async def test_a_cancellation_that_escapes_a_workflow_is_its_failure() -> None:
    async def leaks(task: Task, policy: Policy) -> None:
        raise asyncio.CancelledError

    group = await asyncio.wait_for(play(explorer(leaks)), 5)
    assert [t.failure.kind for t in group.trajectories if t.failure] == ["CancellationEscaped"] * 4


async def test_a_cancellation_from_outside_ends_the_playing() -> None:
    playing = asyncio.create_task(play(explorer(delay_s=60)))
    await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_a_broken_engine_is_nobodys_bad_rollout() -> None:
    with pytest.raises(EngineFailure):
        await play(explorer(break_after=2))


@pytest.mark.parametrize("number", [float("nan"), "one", None])
@pytest.mark.parametrize("where", ["reward", "metric"])
async def test_what_is_no_finite_number_fails_the_rollout(number: Any, where: str) -> None:
    async def gives(task: Task, policy: Policy) -> dict[str, Any]:
        await policy.reply(task.prompt)
        if where == "metric":
            policy.metrics["n"] = number
            return {"played": 1.0}
        return {"played": number}

    group = await play(explorer(gives), 1)
    assert group.trajectories[0].failure is not None
    assert group.trajectories[0].failure.side == "reward"


async def test_numpy_numbers_are_numbers() -> None:
    async def gives(task: Task, policy: Policy) -> dict[str, Any]:
        await policy.reply(task.prompt)
        return {"played": np.float32(0.5)}

    assert (await play(explorer(gives), 1)).trajectories[0].reward == 0.5


async def test_waiting_for_room_is_not_charged_to_the_deadline() -> None:
    group = await play(explorer(delay_s=0.05, room=1, deadline_s=0.15), 8)
    assert len(group.alive) == 8


async def test_two_judges_of_one_name_are_an_error_not_a_loss(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def played(prompt, completion):\n    return 2.0\n")
    playing = explorer()
    playing.judge = make_judge([RewardConfig(kind=f"{tmp_path}/mine.py:played")])
    group = await play(playing, 1)
    assert group.trajectories[0].failure is not None
    assert "rewards of different names" in group.trajectories[0].failure.message


@pytest.mark.parametrize("must_judge", [True, False])
async def test_what_nobody_rewarded_failed_unless_nobody_has_to(must_judge: bool) -> None:
    async def plays(task: Task, policy: Policy) -> None:
        await policy.reply(task.prompt)

    playing = explorer(plays)
    playing.must_judge = must_judge
    (trajectory,) = (await play(playing, 1)).trajectories
    assert (trajectory.failure is not None) == must_judge
    assert not trajectory.rewards


async def test_forks_have_names_of_their_own() -> None:
    async def forks(task: Task, policy: Policy) -> dict[str, float]:
        for name in ("a", "b"):
            await policy.fork(name).reply(task.prompt)
        with pytest.raises(RolloutError, match="a fork of that name exists"):
            policy.fork("a")
        return {"turns": float(len(policy.turns))}

    assert (await play(explorer(forks), 1)).trajectories[0].reward == 2.0


async def test_an_evaluation_that_fails_is_no_accuracy_of_zero() -> None:
    async def fails(task: Task, policy: Policy) -> None:
        raise ValueError("broken")

    evaluator = Evaluator(explorer(fails), [TASK], "test", 0, 1, (1,), Sampling(8), 1.0, max_failed_fraction=0.5)
    with pytest.raises(RolloutsFailing, match="the evaluation on 'test'"):
        await evaluator.run(0)


def test_an_environment_that_never_answers_does_not_keep_the_process() -> None:
    program = textwrap.dedent("""
        import asyncio, threading
        from trivium.workflows.multi_turn import MultiTurn
        from trivium.types import Message, Task
        import sys, types
        module = types.ModuleType("worlds")
        class World:
            def reset(self, task): threading.Event().wait()
            def step(self, reply): return [], 0.0, True
        module.World = World
        sys.modules["worlds"] = module
        workflow = MultiTurn(MultiTurn.Config(environment="worlds:World"))
        async def main():
            try:
                async with asyncio.timeout(0.2):
                    await workflow.run(Task("t", (Message("user", "1"),)), None)
            except TimeoutError:
                print("deadline")
        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.stdout.strip(), done.returncode) == ("deadline", 0), done.stderr
