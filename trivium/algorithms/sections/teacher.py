"""The config section of the teacher that a policy learns from."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

from pydantic import Field

from trivium.clients.hub import ModelPath
from trivium.config import Config
from trivium.errors import Problem
from trivium.models.backbone.huggingface import missing_model_error
from trivium.types import Teacher


class TeacherConfig(Config):
    """A model that the policy learns from. It stays as it is."""

    path: ModelPath
    """A plain Hugging Face directory (or an id in the local cache), with the policy's tokenizer."""
    top_k: int = Field(default=64, ge=1)
    """Number of the teacher's most probable tokens that are stored for each position, if the loss reads them; at most
    the size of its vocabulary."""

    def teacher(self) -> Teacher:
        """The section as a `Teacher`."""
        return Teacher(Path(self.path), self.top_k)


def teacher_problems(teacher: TeacherConfig | None, needs: AbstractSet[str], where: str) -> Iterator[Problem]:
    """Problems of a teacher that is missing, unused, or not on disk; `needs` are the columns that are read."""
    wanted = needs & {"teacher_log_prob", "teacher_top"}
    if teacher is None:
        if wanted:
            yield Problem(
                where, "a teacher", f"none, and the algorithm reads {', '.join(sorted(wanted))}", f"set {where}.path"
            )
        return
    if not wanted:
        yield Problem(
            where,
            "a teacher",
            "no function of this algorithm reads one",
            "leave the key out, or use a loss or an estimator that reads teacher_log_prob or teacher_top",
        )
    elif "teacher_top" not in wanted and teacher.top_k != TeacherConfig.model_fields["top_k"].default:
        yield Problem(
            f"{where}.top_k",
            f"the teacher's top {teacher.top_k} tokens",
            "only the teacher's log-probability of the sampled token is read",
            "leave the key out, or use policy_loss.kind distill_top_k",
        )
    missing = missing_model_error(Path(teacher.path))
    if missing is not None:
        yield Problem(f"{where}.path", missing.asked, missing.found, "name a Hugging Face model directory here")
