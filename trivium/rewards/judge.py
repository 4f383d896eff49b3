"""How rewards are called. A reward is a function or an object with

    f(prompt: str, completion: str, **columns) -> float                     # or `async def`
    f(prompt: str, completions: list[str], **columns) -> list[float]        # compares the members of a group

`prompt` is the last user message of the task, and `completion` the text of the last turn. The columns of the task are
passed by the names in the signature (all of them if it has `**columns`). A parameter `prompt_messages` receives the
whole prompt, a list of {role, content}; `prompt_media` receives its images and other media, and `prompt_end` the end
of the last turn's prompt as the policy saw it, which may open `<think>`. `kind: my_rewards.py:mine` in the config is
enough to use a reward. A result that is not a finite number is an error of that trajectory, never a score of 0.

A reward of the first kind starts as soon as its trajectory is finished. One of the second kind waits for the whole
group, and receives the members that have not failed, in order.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from trivium.config import RewardConfig, build
from trivium.foundation.concurrency import Threads, usable_cores
from trivium.foundation.errors import ConfigError, DataError, RewardError, TriviumError, described, text_of
from trivium.foundation.registry import resolve
from trivium.policy import finite_number
from trivium.processes.isolated import isolated_reward
from trivium.processes.user_calls import UserCall
from trivium.rewards.recipe import WeightedReward, parts_of
from trivium.types import IntArray, Task, Trajectory

_THREADS = 32
"""Plain rewards that may run at the same time."""
_MESSAGES = "prompt_messages"
"""The parameter that receives the task's whole prompt."""
_MEDIA = "prompt_media"
"""The parameter that receives the media of the prompt, in order."""
_END = "prompt_end"
"""The parameter that receives the text of the last tokens of the prompt; a list of them beside `completions`."""
_END_TOKENS = 64
Decode = Callable[[IntArray], str]

_FOREIGN_SIGNATURES = {
    "prompts": "TRL's (prompts, completions, **columns) is here (prompt, completions, **columns), called for one group "
    "at a time, or (prompt, completion, **columns); ",
    "completions": "TRL's (completions, **columns) is here (prompt, completions, **columns); ",
    "solution_str": "verl's compute_score(data_source, solution_str, ground_truth) is here (prompt, completion, "
    "answer), or rewards: [by_source]; ",
}
"""A parameter of another trainer's rewards -> how such a reward is written here."""

Scores = dict[str, float] | RewardError
"""Each component by label, times its weight, or why there is no score."""


@dataclass(frozen=True, slots=True)
class _Component:
    """One reward and the parameters of its signature."""

    part: WeightedReward
    label: str
    call: UserCall
    required: frozenset[str]
    optional: frozenset[str]
    text: frozenset[str]
    """Columns that it declares as `str`, or compares with the completion."""
    takes_all: bool
    takes_prompt: bool
    takes_messages: bool
    takes_media: bool
    takes_end: bool
    compares: bool
    """Whether it compares the members of a group."""
    check: Callable[[Mapping[str, Any]], object] | None
    """`check_columns` of the reward: raises DataError for columns that it cannot compare with a completion."""
    form: Callable[[str, Mapping[str, Any]], object] | None
    """`normal_form` of the reward: what a completion answers to a task with these columns."""

    def missing(self, columns: Collection[str]) -> list[str]:
        """The required columns that are not among these."""
        return [] if self.required.issubset(columns) else sorted(self.required - set(columns))

    def misfits(self, columns: Mapping[str, Any]) -> str:
        """In words, the columns that the reward takes as text and that hold something else."""
        other = [name for name in sorted(self.text) if not isinstance(columns.get(name, ""), str)]
        listed = ", ".join(f"{name} is {described(columns[name])}" for name in other)
        return f"{listed}, but reward {self.label!r} takes text" if listed else ""

    def unfit(self, columns: Mapping[str, Any]) -> str:
        """In words, what the reward cannot compare in its columns."""
        if self.check is None or self.missing(columns) or self.misfits(columns):
            return ""
        try:
            self.check(columns)
        except DataError as error:
            return f"reward {self.label!r} wants {error.asked}: {error.found}"
        return ""

    async def outcome(self, task: Task, completion: Mapping[str, str | list[str]]) -> object:
        """The reward's result, or the exception it ended with."""
        if missing := self.missing(task.columns):
            return _missing_columns([(self.label, missing)], task.columns)
        completion = completion if self.takes_end else {n: text for n, text in completion.items() if n != _END}
        arguments: dict[str, Any] = {**completion, **({"prompt": _prompt(task)} if self.takes_prompt else {})}
        if self.takes_messages:
            arguments[_MESSAGES] = [message.entry() for message in task.prompt]
        if self.takes_media:
            arguments[_MEDIA] = [media for message in task.prompt for media in message.media]
        wanted = task.columns.keys() if self.takes_all else self.required | self.optional
        columns = {name: task.columns[name] for name in wanted if name in task.columns and name not in arguments}
        return await self.call(**arguments, **columns)

    def weighted(self, task: Task, result: object) -> float | RewardError:
        """The result times the weight, or a RewardError if that is not a finite number."""
        if isinstance(result, Exception):
            return self.raised(task, result)
        try:
            number = finite_number(result)
        except ValueError as error:
            return self.error(task, str(error))
        weight = self.part.weight(task.columns)
        assert weight is not None, "the reward was not called"
        try:
            return finite_number(number * weight)
        except ValueError as error:
            return self.error(task, f"{number:g} with weight {weight:g}: {error}")

    def one_each(self, task: Task, result: object, count: int) -> Sequence[Any] | RewardError:
        """The results of a reward for the members of a group, or a RewardError for all of them."""
        if isinstance(result, Exception):
            return self.raised(task, result)
        if isinstance(result, np.ndarray):
            result = result.tolist()
        if isinstance(result, Sequence) and not isinstance(result, str | bytes) and len(result) == count:
            return result
        received = f"{len(result)} of them" if isinstance(result, Sequence) else described(result)
        return self.error(task, f"{received} for {count} completions", "one number per completion")

    def raised(self, task: Task, cause: Exception) -> RewardError:
        error = self.error(task, f"{type(cause).__name__}: {text_of(cause)}")
        error.__cause__ = cause
        return error

    def error(self, task: Task, found: str, wanted: str = "a finite number") -> RewardError:
        return RewardError(
            f"{wanted} from reward {self.label!r} for task {task.task_id!r}",
            found,
            "fix the reward: this trajectory is left out, not scored 0",
        )


class Judge:
    """Calls every reward of a run. Any number of trajectories and groups may be judged at the same time.

    The judge sets no deadline. A cancelled call ends after the plain reward in progress; a reward in a process of its
    own is killed.
    """

    def __init__(self, components: Sequence[_Component], decode: Decode | None = None) -> None:
        """`decode` decodes prompts; None: the end of a prompt is that of its last message."""
        self._components, self._decode = tuple(components), decode
        self._comparing = [component for component in components if component.compares]
        self.is_brief = all(component.call.is_brief for component in components)
        """Whether every reward is declared `brief` (`trivium.processes.user_calls`), so that none needs a deadline."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the components, in the config's order."""
        return tuple(component.label for component in self._components)

    @property
    def comparing(self) -> tuple[str, ...]:
        """The names of the components that compare the members of a group."""
        return tuple(component.label for component in self._components if component.compares)

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raises DataError if these columns, such as those of a first task, lack one that a reward reads, or hold a
        label that a recipe does not know. The error names every such reward."""
        try:
            missing = self._missing(columns)
        except RewardError as error:
            raise DataError(error.asked, error.found, error.do) from error
        if missing:
            raise _missing_columns(missing, columns)

    def lacking(self, columns: Mapping[str, Any]) -> str:
        """In words, what the rewards lack to judge a task with these columns; empty if nothing."""
        try:
            self.check_columns(columns)
        except DataError as error:
            return error.found
        return ""

    def misfits(self, columns: Mapping[str, Any]) -> str:
        """In words, which columns have another type than the rewards take; empty if none."""
        return next(filter(None, (component.misfits(columns) for component in self._components)), "")

    def unfit(self, columns: Mapping[str, Any]) -> str:
        """In words, what the rewards of a task cannot compare in its columns; empty if nothing."""
        return next(
            (text for component in _called(self._components, columns) if (text := component.unfit(columns))), ""
        )

    def answer(self, task: Task, completion: str) -> object:
        """What the completion answers: equal for equal answers, by the rewards that compare answers (`normal_form`).
        The whole text, if there are none."""
        try:
            called = _called(self._components, task.columns)
            forms = [component.form(completion, task.columns) for component in called if component.form is not None]
        except TriviumError:  # the reward cannot read this completion or the task either
            forms = []
        return tuple(forms) or completion.strip()

    def reads(self, column: str) -> bool:
        """Whether a reward reads the column."""
        return any(column in c.required | c.optional or c.takes_all for c in self._components)

    def _missing(self, columns: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
        """(label, missing columns) of each reward that judges a task with these columns and lacks some."""
        return [(c.label, names) for c in _called(self._components, columns) if (names := c.missing(columns))]

    async def score(self, task: Task, trajectory: Trajectory) -> Scores:
        """The scores of a trajectory by the rewards that judge one trajectory."""
        try:
            called = _called(self._components, task.columns)
        except RewardError as error:
            return error
        components = [component for component in called if not component.compares]
        completion = {"completion": trajectory.completion, _END: self._prompt_end(components, task, trajectory)}
        results = await _outcomes(components, task, completion)
        scores: dict[str, float] = {}
        for component, result in zip(components, results, strict=True):
            score = component.weighted(task, result)
            if isinstance(score, RewardError):
                return score
            scores[component.label] = score
        return scores

    async def compare(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Scores]:
        """The scores of each trajectory of a group, in order, by the rewards that compare them."""
        completions = [trajectory.completion for trajectory in trajectories]
        comparing = _called(self._comparing, task.columns)  # cannot raise: `score` has accepted the task's label
        ends = [self._prompt_end(comparing, task, trajectory) for trajectory in trajectories]
        results = await _outcomes(comparing, task, {"completions": completions, _END: ends})
        scores: list[Scores] = [{} for _ in trajectories]
        for component, result in zip(comparing, results, strict=True):
            results_by_member = component.one_each(task, result, len(trajectories))
            for i, member_scores in enumerate(scores):
                score = (
                    results_by_member
                    if isinstance(results_by_member, RewardError)
                    else component.weighted(task, results_by_member[i])
                )
                if isinstance(member_scores, RewardError):
                    continue
                if isinstance(score, RewardError):
                    scores[i] = score
                else:
                    member_scores[component.label] = score
        return scores

    def _prompt_end(self, components: Sequence[_Component], task: Task, trajectory: Trajectory) -> str:
        """The end of the prompt of the last turn; empty if no component reads it."""
        if not any(component.takes_end for component in components):
            return ""
        turn = trajectory.turns[-1] if trajectory.turns else None
        if self._decode is None or turn is None or not len(turn.prompt_tokens):
            return task.prompt[-1].content if task.prompt else ""
        return self._decode(turn.prompt_tokens[-_END_TOKENS:])


def _called(components: Sequence[_Component], columns: Mapping[str, Any]) -> list[_Component]:
    """The components that judge a task with these columns. Raises RewardError for a label that no recipe has."""
    return [component for component in components if component.part.weight(columns) is not None]


async def _outcomes(
    components: Sequence[_Component], task: Task, completion: Mapping[str, str | list[str]]
) -> list[Any]:
    """The result of each reward, or the exception it ended with. Plain rewards run one after the other, then `async`
    ones concurrently."""
    outcomes = [
        None if component.call.is_async else await component.outcome(task, completion) for component in components
    ]
    if waiting := [place for place, component in enumerate(components) if component.call.is_async]:
        results = await asyncio.gather(*(components[place].outcome(task, completion) for place in waiting))
        for place, result in zip(waiting, results, strict=True):
            outcomes[place] = result
    return outcomes


def make_judge(configs: Sequence[RewardConfig], deadline_s: float = 3600.0, decode: Decode | None = None) -> Judge:
    """Builds the rewards of a config. Raises ConfigError for one that cannot be called, MissingPackage for one whose
    package is not installed. The kernel ends a worker process whose call takes more than `deadline_s`. `decode` is the
    renderer's, for rewards that read the end of the prompt."""
    threads = Threads(_THREADS, "a reward")
    components = [_component(part, threads, deadline_s) for part in parts_of(configs)]
    labels = [component.label for component in components]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ConfigError("rewards with different names", f"{', '.join(twice)} twice", "give each its own `name`")
    return Judge(components, decode)


def _component(part: WeightedReward, threads: Threads, deadline_s: float) -> _Component:
    """Builds a reward and reads its signature. Raises ConfigError if the signature is not that of a reward."""
    config = part.reward
    function, parameters = _callable(config, deadline_s)
    by_name = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    judged = {"completion", "completions"} & by_name.keys()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if len(judged) != 1 or ("completions" in judged and "prompt" not in by_name):
        lacking = "neither completion nor completions" if not judged else "both" if len(judged) == 2 else "no prompt"
        raise ConfigError(
            f"the reward {config.kind}",
            f"it takes ({', '.join(parameters)}): {lacking}",
            _FOREIGN_SIGNATURES.get(next((n for n in parameters if n in _FOREIGN_SIGNATURES), ""), "")
            + "give it the parameter `completion`, or `prompt` and `completions` for a whole group; others, by name: "
            "`prompt` and the columns it reads",
        )
    columns = {name: p for name, p in by_name.items() if name not in ("prompt", _MESSAGES, _MEDIA, _END, *judged)}
    required = frozenset(name for name, p in columns.items() if p.default is p.empty)
    target = resolve("rewards", config.kind)
    check = inspect.getattr_static(target, "check_columns", None)
    # A reward with workers is built here as well when its normal form is first needed.
    in_process: Any = lru_cache(1)(lambda: build("rewards", config) if config.workers else function)
    return _Component(
        part,
        config.label,
        UserCall(function, threads, label=f"reward {config.label!r}", limit=usable_cores()),
        required,
        frozenset(columns) - required,
        text=frozenset(_text_columns(config, columns)),
        takes_all=takes_all,
        takes_prompt=takes_all or "prompt" in by_name,
        takes_messages=_MESSAGES in by_name,
        takes_media=_MEDIA in by_name,
        takes_end=_END in by_name,
        compares="completions" in judged,
        check=check.__func__ if isinstance(check, staticmethod) else None,
        form=(lambda *args: in_process().normal_form(*args)) if hasattr(target, "normal_form") else None,
    )


def _text_columns(config: RewardConfig, columns: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """The columns that the reward declares as `str`, and those that its source compares with the completion by `==`."""
    yield from (name for name, p in columns.items() if p.annotation in (str, "str"))
    yield from _compared_names(resolve("rewards", config.kind)) & columns.keys()


@lru_cache(64)
def _compared_names(reward: object) -> frozenset[str]:
    """The names that the source of a reward compares with the completion by `==`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(reward)))  # pyright: ignore[reportArgumentType]
    except (OSError, TypeError, SyntaxError):  # no source, or only a part of a line
        return frozenset()
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            sides = {_name_in(node.left), _name_in(node.comparators[0])}
            names |= sides - {"completion"} if "completion" in sides else set()
    return frozenset(names)


def _name_in(side: ast.expr) -> str:
    """The name that an expression like `name` or `name.strip().lower()` begins with."""
    while isinstance(side, ast.Call) and isinstance(side.func, ast.Attribute):
        side = side.func.value
    return side.id if isinstance(side, ast.Name) else ""


def _callable(config: RewardConfig, deadline_s: float) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    """The callable of a reward, and its parameters. A class with workers is built in the workers alone: here, only the
    signature of its `__call__` is read."""
    target = resolve("rewards", config.kind)
    described_by = target if isinstance(target, type) and config.workers else build("rewards", config)
    if described_by is target and isinstance(target, type):
        method = inspect.getattr_static(target, "__call__", None)
        # The first parameter is `self`.
        parameters = dict([*inspect.signature(method).parameters.items()][1:]) if inspect.isfunction(method) else None
    else:
        parameters = inspect.signature(described_by).parameters if callable(described_by) else None
    if parameters is None:
        raise ConfigError(f"the reward {config.kind}", f"a {type(target).__name__}", "name a function or a class")
    return isolated_reward(config, deadline_s) if config.workers else described_by, parameters


def _missing_columns(missing: Sequence[tuple[str, list[str]]], columns: Collection[str]) -> DataError:
    return DataError(
        "tasks with the columns that the rewards read",
        "; ".join(f"reward {label!r} lacks {', '.join(names)}" for label, names in missing)
        + f"; columns: {', '.join(sorted(columns)) or 'none'}",
        "map a column to this name in the task source, or give the reward's parameter a default",
    )


def _prompt(task: Task) -> str:
    """The text of the last user message, or of the last message if none is from a user."""
    texts = [message.content for message in task.prompt if message.role == "user"]
    return (texts or [message.content for message in task.prompt])[-1] if task.prompt else ""
