"""Golden answers: the distillation losses of TRL."""

from dataclasses import replace

import torch
from golden_runners import Arguments, answers

from trivium.algorithms import catalogue, policy_inputs
from trivium.algorithms.estimators.base import AdvantageInputs
from trivium.algorithms.losses.base import PolicyInputs

LOSSES = catalogue("policy_losses")
DIRECTION = {0.0: "forward", 0.5: "jsd", 1.0: "reverse"}
"""The peer's `distillation_alpha` -> our direction."""


def candidates(inputs: Arguments, top_k: int, column: str) -> PolicyInputs:
    """The inputs of a loss over the student's most probable tokens."""
    student, teacher = (inputs[name].log_softmax(-1) for name in ("student_logits", "teacher_logits"))
    ids = student.detach().topk(top_k).indices
    mask = torch.ones(student.shape[:2])
    values = torch.stack([ids.to(student.dtype), teacher.gather(-1, ids)], -1)
    x = policy_inputs(student[..., 0].detach(), mask, **{column: values})
    return replace(x, candidate_log_prob=student.gather(-1, ids))


@answers("trl_distillation", "self_distillation_topk")
def _top_k(inputs: Arguments, kwargs: Arguments) -> Arguments:
    x = candidates(inputs, kwargs["distillation_topk"], "student_top")
    tail = "bucket" if kwargs["distillation_add_tail"] else "left_out"
    loss = LOSSES["distill_student_top_k"](x, direction=DIRECTION[kwargs["distillation_alpha"]], tail=tail).loss
    return {"loss": loss.sum(), "per_token": loss}


@answers("trl_distillation", "self_distillation_full")
def _full(inputs: Arguments, kwargs: Arguments) -> Arguments:
    x = candidates(inputs, inputs["student_logits"].shape[-1], "teacher_top")
    loss = LOSSES["distill_top_k"](x, direction=DIRECTION[kwargs["distillation_alpha"]]).loss
    return {"loss": loss.sum(), "per_token": loss}


@answers("trl_distillation", "self_distillation_sampled")
def _sampled(inputs: Arguments, kwargs: Arguments) -> Arguments:
    del kwargs
    ids = inputs["completion_ids"].unsqueeze(-1)
    student, teacher = (
        inputs[name].log_softmax(-1).gather(-1, ids).squeeze(-1) for name in ("student_logits", "teacher_logits")
    )
    loss = LOSSES["distill"](policy_inputs(student, torch.ones_like(student), teacher_log_prob=teacher)).loss
    return {"loss": loss.sum(), "per_token": loss}


@answers("trl_distillation", "iw_opd")
def _iw_opd(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask = inputs["mask"].bool()
    rows = torch.arange(len(mask))
    columns = {name: inputs[name] for name in ("teacher_log_prob", "old_log_prob")}
    x = AdvantageInputs(torch.zeros(mask.shape), mask, rows, rows, columns)
    advantages = catalogue("advantages")["on_policy_distill"](x, prefix_gamma=kwargs["gamma"]).advantages
    return {"loss": -(advantages * inputs["log_prob"])[mask].sum() / mask.sum()}
