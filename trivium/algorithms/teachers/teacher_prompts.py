"""What a teacher reads in place of the policy's prompt: the task with privileged context.

The completion keeps its token ids: only the tokens before it are others (`Experience.under`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter

import numpy as np

from trivium.foundation.errors import DataError
from trivium.protocols import Renderer
from trivium.types import Batch, Experience, Group, Message, Task, Trajectory, with_system

FIELDS = ("prompt", "feedback", "success")
"""What a template may name beside the task's columns: the text of the last message of the prompt, the environment's
feedback on the rollout, and the completion of another member of the group that succeeded."""
SUCCESS = 1.0
"""The least reward of a completion that is shown as `{success}`."""


def fields_of(template: str) -> list[str]:
    """The names in a template. Raises ValueError for a template that `str.format` cannot fill with texts by name."""
    names: list[str] = []
    for _, name, spec, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or name.isdigit():
            raise ValueError(f"the field {{{name}}} has no name")
        format(Formatter().convert_field("", conversion), spec or "")  # raises ValueError
        names.append(name)
    return names


@dataclass(frozen=True)
class TeacherPrompts:
    """Renders the prompts of a teacher."""

    renderer: Renderer
    templates: Sequence[str]
    """A rollout uses the first template whose fields are all known and whose text leaves room for the completion. A
    rollout without such a template is not taught."""
    system: str | None = None
    """The system message that the workflow puts before a task's prompt."""
    limit: int | None = None
    """The longest sequence that the teacher reads, in tokens; None for no limit."""

    def added(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """The batch with `teacher_prompt` of every sequence, and the column `taught`: 0 for those without one."""
        group_by_id = {group.group_id: group for group in groups}
        rows = tuple(self._with_prompt(e, group_by_id[e.group_id]) for e in batch.experiences)
        taught = [np.full(len(e), e.teacher_prompt is not None, np.float32) for e in rows]
        return replace(batch, experiences=rows).with_columns(taught=taught)

    def _with_prompt(self, e: Experience, group: Group) -> Experience:
        """The experience with the first prompt that can be filled and that leaves room for the completion. Unchanged
        without one, or if a later turn rewrote the history."""
        member = next(trajectory for trajectory in group.trajectories if trajectory.index == e.index)
        *earlier, last = self._prompt(group.task)
        prompt_tokens = self.renderer.render([*earlier, last]).tokens
        read_tokens = member.turns[0].prompt_tokens if member.turns else e.tokens[: e.first]
        # The context replaces the prompt's last message, so the policy must have read the prompt that the task has.
        if not np.array_equal(prompt_tokens, read_tokens):
            raise DataError(
                f"the prompt of task {group.task.task_id!r}, which the teacher's context replaces",
                f"the policy began with {len(read_tokens)} tokens, not with the {len(prompt_tokens)} of the prompt",
                "use a workflow that shows the task's prompt as it is",
            )
        if not np.array_equal(prompt_tokens, e.tokens[: e.first]):  # a later turn rewrote the history
            return e
        fields, completion = dict(_known(group, member)), len(e) - e.first
        for text in (_filled(template, fields, group.task) for template in self.templates):
            if not text:
                continue
            prompt = self.renderer.render([*earlier, replace(last, content=text)])
            if self.limit is None or len(prompt) + completion <= self.limit:
                return replace(e, teacher_prompt=prompt)
        return e

    def _prompt(self, task: Task) -> Sequence[Message]:
        """The messages that the policy reads. Raises DataError if there is none."""
        prompt = task.prompt if self.system is None else with_system(task.prompt, self.system)
        if not task.prompt:
            raise DataError(
                f"the last message of task {task.task_id!r}, which the teacher's context replaces",
                "its prompt is empty",
                "give the task a prompt, or leave algorithm.teacher.context out",
            )
        return prompt


def _known(group: Group, member: Trajectory) -> Iterator[tuple[str, str]]:
    """The fields of a rollout that are not empty."""
    for name, value in group.task.columns.items():
        if value is not None and (text := str(value)):
            yield name, text
    others = (t for t in group.alive if t.index != member.index and t.rewards and t.reward >= SUCCESS)
    success = next((t.completion for t in others), "")
    prompt = group.task.prompt[-1].content
    yield from ((name, text) for name, text in zip(FIELDS, (prompt, member.feedback, success), strict=True) if text)


def _filled(template: str, fields: Mapping[str, str], task: Task) -> str | None:
    """The text of a template; None if a field is empty for this rollout. Raises DataError for a field that no rollout
    of the task can have."""
    names = fields_of(template)
    unknown = [name for name in names if name not in fields and name not in (*FIELDS, *task.columns)]
    if unknown:
        raise DataError(
            f"the field {unknown[0]!r} of the teacher's context for task {task.task_id!r}",
            f"its columns are {sorted(task.columns)}",
            f"name one of these, or {', '.join(FIELDS)}",
        )
    return template.format(**fields) if all(name in fields for name in names) else None
