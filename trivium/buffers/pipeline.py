"""The experience pipeline: operators that change or drop a finished group before the buffer stores it.

Operators apply to members that did not fail. A group without such members passes unchanged: the trainer counts it, and
raises if too many fail (`workflow.max_failed_fraction`). Evaluations do not use the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from trivium.config import BufferConfig, Plugin, build
from trivium.foundation.errors import (
    ConfigError,
    DataError,
    RewardError,
    RolloutsFailing,
    TriviumError,
    described,
    text_of,
)
from trivium.policy import MAX_METRIC, MAX_REWARD, named_numbers
from trivium.protocols import Operator
from trivium.types import Group, Trajectory


class Pipeline:
    """Applies the operators of a config in order, and checks the group after each.

    Raises DataError if an operator raises or returns anything but the group, and RolloutsFailing if too many groups in
    a row are dropped.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._operators = [(section.short_name, _operator(section)) for section in config.operators]
        self._max_in_a_row, self._in_a_row = config.max_dropped_in_a_row, 0

    def __call__(self, group: Group) -> Group:
        for name, operator in self._operators:
            group = _checked(name, group, _applied(name, operator, group))
            if group.dropped:
                self._in_a_row += 1
                self._check_dropped(group)
                return replace(group, dropped=f"{name}: {group.dropped}")
        self._in_a_row = 0
        return group

    def _check_dropped(self, group: Group) -> None:
        if self._in_a_row >= self._max_in_a_row:
            raise RolloutsFailing(
                "groups to train on",
                f"the experience pipeline dropped the last {self._in_a_row}; task {group.task.task_id!r}, because "
                f"{group.dropped}",
                "let the operators under buffer.operators drop less, or raise buffer.max_dropped_in_a_row",
            )


def _operator(section: Plugin) -> Operator:
    operator = build("operators", section)
    if not callable(operator):
        raise ConfigError(
            f"the operator {section.kind}", f"a {type(operator).__name__}", "name a function of a Group, or a class"
        )
    return cast(Operator, operator)


def _applied(name: str, operator: Operator, group: Group) -> object:
    try:
        return operator(group)
    except TriviumError:
        raise  # the error already names the problem
    except Exception as error:
        raise DataError(
            f"the operator {name!r} on a group of task {group.task.task_id!r}",
            f"it raised {type(error).__name__}: {text_of(error)}",
            "fix the operator; a group that it cannot use is refused with group.refused('why')",
        ) from error


def _checked(name: str, before: Group, after: object) -> Group:
    """The group that an operator returned. Raises DataError if it is not the group that the operator received."""
    returned = ""
    if not isinstance(after, Group):
        returned = f"a {type(after).__name__}"
    elif _identity(after) != _identity(before):
        returned = f"a group of slot {after.slot} and task {after.task.task_id!r}"
        returned += ", or of another epoch, attempt or version"
    elif not _members(after.rollouts) <= _members(before.rollouts):
        returned = "members that it was not given, or whose turns were rewritten"
    elif problem := _not_numbers(after.rollouts):
        returned = problem
    if returned or not isinstance(after, Group):
        raise DataError(
            f"a group of task {before.task.task_id!r} from the operator {name!r}",
            returned,
            "return the group that was given: fewer members, other rewards (finite numbers), metrics or failures, or "
            "group.refused('why')",
        )
    return after


def _identity(group: Group) -> tuple[Any, ...]:
    return group.slot, group.task.taskset, group.task.task_id, group.epoch, group.attempt, group.version


def _members(members: Iterable[Trajectory]) -> set[tuple[int, ...]]:
    """Members by index and by the identity of their recorded arrays, which `replace` keeps."""
    return {
        (t.index, *(id(a) for turn in t.turns for a in (turn.prompt_tokens, turn.tokens, turn.log_prob)))
        for t in members
    }


def _not_numbers(members: Iterable[Trajectory]) -> str:
    """Describes the first reward or metric that is not a Python number or cannot be used; empty if there is none."""
    for member in members:
        for what, numbers, largest in (("reward", member.rewards, MAX_REWARD), ("metric", member.metrics, MAX_METRIC)):
            for name, value in numbers.items():
                try:
                    usable = isinstance(cast(object, value), int | float)
                    named_numbers(what, {name: value}, largest=largest)
                except RewardError:
                    usable = False
                if not usable:
                    return f"{described(value)} as the {what} {name!r} of member {member.index}"
    return ""
