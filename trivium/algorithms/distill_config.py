"""What a user can say about distillation, and the algorithm that follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.config import supervised
from trivium.algorithms.config_parts import UpdateConfig, is_explored, is_mixed, law_or_problem, ratio_problems
from trivium.algorithms.registered import PolicyLossLaw
from trivium.algorithms.teacher import TeacherConfig, teacher_problems
from trivium.config import RunConfig
from trivium.errors import Problem


class DistillConfig(UpdateConfig):
    """Distillation: a policy loss that reads what a teacher says, and no reward."""

    teacher: TeacherConfig

    @property
    def reads_rewards(self) -> bool:
        return False

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if not is_explored(run) and run.schedule.group_size != 1:
            yield Problem(
                "schedule.group_size", f"{run.schedule.group_size} trajectories per task",
                f"buffer.kind {run.buffer.kind!r} has one reply per task, so it would have no effect", "set it to 1",
            )  # fmt: skip
        loss = law_or_problem(self.policy_loss, "policy_losses", PolicyLossLaw, where)
        if isinstance(loss, Problem):
            return  # said already
        yield from teacher_problems(self.teacher, loss.needs, f"{where}.teacher")
        if "advantages" in loss.needs:
            yield Problem(
                f"{where}.policy_loss", f"the loss {self.policy_loss.kind!r} without an advantage estimator",
                "it needs advantages, and nothing is judged here",
                "use kind: distill or distill_top_k, or algorithm.kind grpo",
            )  # fmt: skip
        if "teacher_log_prob" in loss.needs and (is_mixed(run) or not is_explored(run)):
            where_from = f"strategy {run.buffer.strategy.kind!r}" if is_explored(run) else f"kind {run.buffer.kind!r}"
            yield Problem(
                f"{where}.policy_loss", f"the loss {self.policy_loss.kind!r} on buffer.{where_from}",
                "it takes each token for a sample of the policy, and an expert wrote these",
                "use kind: distill_top_k, or buffer.kind memory without such a strategy",
            )  # fmt: skip
        elif "teacher_log_prob" in loss.needs:
            yield from ratio_problems(self, loss, run, where, "policy_loss.kind distill_top_k")


def distillation(config: DistillConfig, seed: int) -> GroupAlgorithm:
    """The algorithm a distillation section describes."""
    return replace(supervised(config, seed), teacher=config.teacher.teacher())
