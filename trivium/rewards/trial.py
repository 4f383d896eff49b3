"""Calls a reward function before a run, with tasks of the run and completions that it may get.

Only plain functions are called. A class, an `async` function or a reward of the catalogue may use a model or a service.
The calls happen in a fork of this process: a deadline ends it, and the run does not see what they change.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import cycle, islice
from typing import cast

import numpy as np

from trivium.config import RewardConfig
from trivium.foundation.concurrency import Threads
from trivium.foundation.errors import RewardError, TriviumError, one_line, user_place
from trivium.foundation.registry import resolve
from trivium.processes.isolated import forked
from trivium.processes.user_calls import UserCall
from trivium.rewards.judge import Judge, make_judge
from trivium.types import StopReason, Task, Trajectory, Turn

_DEADLINE_S = 10.0
_ANSWERS = ("answer", "solution", "ground_truth", "reward_model", "target", "completion", "response", "chosen")
"""Columns whose texts are tried before those of others."""
_FORMS = ("ANSWER", "The answer is ANSWER", "The answer is \\boxed{ANSWER}.", "#### ANSWER", '{"answer": "ANSWER"}')
_FORMS += ("<think>\nI work it out.\n</think>\n<answer>ANSWER</answer>", "```python\nANSWER\n```")
"""The forms in which rewards often read an answer."""
Trial = tuple[TriviumError, bool] | None
"""Why a reward function gave no number, and whether it gave none for any of the completions."""


def is_plain(reward: RewardConfig) -> bool:
    """Whether the reward is a function of the user that is not `async`."""
    function = resolve("rewards", reward.kind)
    return inspect.isfunction(function) and not inspect.iscoroutinefunction(function)


def trial(reward: RewardConfig, tasks: Sequence[Task], group_size: int) -> Trial:
    """Calls a plain reward function with the first task and, while it gives no number, with further completions and
    tasks. Returns None if a completion gets a number and none gets another value: an exception for a completion that
    cannot be read is an error of that rollout only."""
    judge = make_judge([reward.model_copy(update={"workers": 0, "weight": 1.0})])
    call = forked(partial(_trial, judge, tasks, group_size), f"reward {reward.label!r}", 1)
    result = asyncio.run(UserCall(call, Threads(1, "a reward"), _DEADLINE_S)())
    if isinstance(result, TimeoutError):
        do = "nothing if it is that slow or loads something first; else give its requests a shorter deadline"
        return RewardError(f"a number from reward {reward.label!r}, to check it", one_line(result), do), False
    if isinstance(result, Exception) and not isinstance(result, TriviumError):
        raise result
    return (result, True) if isinstance(result, TriviumError) else cast("Trial", result)


async def _trial(judge: Judge, tasks: Sequence[Task], group_size: int) -> Trial:
    """`trial`, within the fork."""
    failures: list[RewardError] = []
    with redirect_stdout(sys.stderr):  # the output of the command is a plan
        for task in tasks:
            texts = ["I do not know.", *_plausible(task)]
            for members in [[*islice(cycle(texts), group_size)]] if judge.comparing else [[text] for text in texts]:
                error = await _error(judge, task, members)
                if error is None:
                    return next(((failure, False) for failure in failures if failure.__cause__ is None), None)
                failures.append(error)
                if isinstance(error.__cause__, OSError):  # a service or a file, which may return
                    return error, False
    text = failures[0].found + f"; {len(failures) - 1} further calls gave none either" * (len(failures) > 1)
    return RewardError(failures[0].asked, text, failures[0].do), True


async def _error(judge: Judge, task: Task, texts: Sequence[str]) -> RewardError | None:
    """The first error of the reward for completions of one task, with the place that raised it."""
    none = np.zeros(0, np.int32)
    turns = [Turn(none, none, np.zeros(0, np.float32), none, StopReason.EOS, text) for text in texts]
    members = [Trajectory(number, (turn,)) for number, turn in enumerate(turns)]
    scores = await judge.compare(task, members) if judge.comparing else [await judge.score(task, members[0])]
    for text, score in zip(texts, scores, strict=True):
        if isinstance(score, RewardError):
            frames = traceback.walk_tb(score.__cause__.__traceback__ if score.__cause__ else None)
            place = user_place([(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames])
            found = f"{score.found}{f' in {place}' if place else ''}, for the completion {text!r:.80}"
            unread = "correct it; for a completion that it cannot read, let it return a number, such as 0"
            error = RewardError(score.asked, found, unread if place else "let each of its branches return a number")
            error.__cause__ = score.__cause__
            return error
    return None


def _plausible(task: Task) -> Iterator[str]:
    """The texts of a task's columns, in forms that rewards read."""
    columns = [task.columns[name] for name in sorted(task.columns, key=lambda name: name not in _ANSWERS)]
    values = (v for column in columns for v in (column.values() if isinstance(column, Mapping) else [column]))
    for value in islice((value for value in values if isinstance(value, str | int | float)), 3):
        yield from (form.replace("ANSWER", str(value)) for form in _FORMS)
