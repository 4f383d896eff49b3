"""The config section of the teacher that a policy learns from."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from trivium.algorithms.objective import TEACHER_COLUMNS
from trivium.algorithms.teachers.teacher_prompts import fields_of
from trivium.clients.hub import ModelPath
from trivium.config import Config, RunConfig
from trivium.foundation.errors import Problem
from trivium.models.backbone.huggingface import missing_model_error
from trivium.types import Teacher


class TeacherConfig(Config):
    """The model that the policy learns from: one that stays as it is, or the policy itself, with more to read
    (`context`) or with other `weights`."""

    path: ModelPath | None = None
    """A plain Hugging Face directory (or an id in the local cache), with the policy's tokenizer; null for the policy
    itself."""
    top_k: int = Field(default=64, ge=1)
    """Number of the teacher's (or the policy's) most probable tokens that are stored for each position, if the loss
    reads them; at most the size of its vocabulary."""
    weights: Literal["current", "initial", "average"] = "current"
    """Without a path: the policy's weights before the step, those that the stage began with, or their exponential
    moving average over updates."""
    rate: float = Field(default=0.05, gt=0, le=1)
    """The share of the current weights in the average after each update."""
    context: str | tuple[str, ...] = ()
    """What the teacher reads in place of the last message of the prompt: a template, or several. A rollout uses the
    first template whose fields are all known and whose text leaves room for the completion. The fields are `{prompt}`
    (that message), the columns of the task, `{feedback}` (what the environment wrote at the end) and `{success}` (a
    completion of the group with a reward of at least 1). A rollout with no such template learns nothing from the
    teacher."""

    @field_validator("context")
    @classmethod
    def _readable(cls, context: str | tuple[str, ...]) -> tuple[str, ...]:
        templates = (context,) if isinstance(context, str) else context
        for template in templates:
            fields_of(template)  # raises ValueError
        return templates

    @property
    def reads_rewards(self) -> bool:
        """Whether the context shows which completions succeeded."""
        return any("success" in fields_of(template) for template in self.context)

    @property
    def is_policy(self) -> bool:
        """Whether it is the policy with the same weights and the same prompt, which teaches nothing."""
        return self.path is None and self.weights == "current" and not self.context

    def teacher(self) -> Teacher:
        """The section as a `Teacher`."""
        path = None if self.path is None else Path(self.path)
        return Teacher(path, self.top_k, self.weights, self.rate, tuple(self.context))


def teacher_problems(
    teacher: TeacherConfig | None, needs: AbstractSet[str], where: str, run: RunConfig
) -> Iterator[Problem]:
    """Problems of a teacher that is missing, unused, or not on disk; `needs` are the columns that are read."""
    wanted = needs & TEACHER_COLUMNS
    if teacher is None or teacher.is_policy:
        if wanted:
            yield Problem(
                where,
                "a teacher",
                f"{'none' if teacher is None else 'the policy itself'}, and the algorithm reads "
                f"{', '.join(sorted(wanted))}",
                f"set {where}.path, or {where}.context",
            )
        return
    if not wanted:
        yield Problem(
            where,
            "a teacher",
            "no function of this algorithm reads one",
            "leave the key out, or use a loss or an estimator that reads teacher_log_prob, teacher_top or student_top",
        )
    elif wanted == {"teacher_log_prob"} and teacher.top_k != TeacherConfig.model_fields["top_k"].default:
        yield Problem(
            f"{where}.top_k",
            f"the teacher's top {teacher.top_k} tokens",
            "only the teacher's log-probability of the sampled token is read",
            "leave the key out, or use policy_loss.kind distill_top_k",
        )
    if teacher.path is not None:
        if teacher.weights != "current":
            yield Problem(
                f"{where}.weights",
                f"the policy's {teacher.weights} weights",
                "the teacher is the model at path",
                "leave one of the two keys out",
            )
        missing = missing_model_error(Path(teacher.path))
        if missing is not None:
            yield Problem(f"{where}.path", missing.asked, missing.found, "name a Hugging Face model directory here")
    if teacher.weights == "average" and getattr(run.train, "lora", None) is not None:
        yield Problem(f"{where}.weights", *Teacher.NO_ADAPTER)
    if teacher.weights != "average" and teacher.rate != TeacherConfig.model_fields["rate"].default:
        yield Problem(
            f"{where}.rate", f"a rate of {teacher.rate:g}", "nothing is averaged", f"set {where}.weights: average"
        )
    needs_success = bool(teacher.context) and all("success" in fields_of(template) for template in teacher.context)
    if needs_success and run.schedule.group_size == 1:
        yield Problem(
            f"{where}.context",
            "another completion of the group that succeeded",
            "schedule.group_size is 1",
            "use larger groups, or a template with other fields",
        )
