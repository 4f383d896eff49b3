"""The config section of distillation, and the algorithm built from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.metadata import PolicyLossMetadata
from trivium.algorithms.sections.parts import (
    UpdateConfig,
    candidate_problems,
    is_explored,
    metadata_or_problem,
    sampled_problems,
)
from trivium.algorithms.sections.policy_gradient import supervised
from trivium.algorithms.sections.teacher import TeacherConfig, teacher_problems
from trivium.config import RunConfig
from trivium.foundation.errors import Problem


class DistillConfig(UpdateConfig):
    """Distillation: a policy loss that reads a teacher's log-probabilities, and no reward."""

    teacher: TeacherConfig = TeacherConfig()

    @property
    def reads_rewards(self) -> bool:
        return self.teacher.reads_rewards

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if not is_explored(run) and run.schedule.group_size != 1:
            yield Problem(
                "schedule.group_size",
                f"{run.schedule.group_size} trajectories per task",
                f"buffer.kind {run.buffer.kind!r} has one completion per task, so it would have no effect",
                "set it to 1",
            )
        loss = metadata_or_problem(self.policy_loss, "policy_losses", PolicyLossMetadata, where)
        if isinstance(loss, Problem):
            return  # reported already
        yield from teacher_problems(self.teacher, loss.needs, f"{where}.teacher", run)
        yield from candidate_problems(loss, self.policy_loss.kind, run)
        if "advantages" in loss.needs:
            yield Problem(
                f"{where}.policy_loss",
                f"the loss {self.policy_loss.kind!r} without an advantage estimator",
                "it needs advantages, and no advantages are estimated here",
                "use kind: distill or distill_top_k, or algorithm.kind grpo",
            )
        yield from sampled_problems(loss, self.policy_loss.kind, self.updates, run, f"{where}.policy_loss")


def distillation(config: DistillConfig, seed: int) -> GroupAlgorithm:
    """Builds the algorithm of a distillation section."""
    algorithm = supervised(config, seed)
    objectives = tuple(replace(objective, taught=bool(config.teacher.context)) for objective in algorithm.objectives)
    return replace(algorithm, objectives=objectives, teacher=config.teacher.teacher())
