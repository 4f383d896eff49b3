"""What this version answers to a golden case: (family, function) -> a call of what a config would call.

The answers live in `golden_<part>.py`, one file for each part of the algebra.
"""

from collections.abc import Callable
from typing import Any

import torch
from algebra import policy_objective, section
from deviations import LATER
from golden_cases import DATA, Case

from trivium.algorithms.objective import PolicyObjective
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.types import EXPERT_VERSION, Batch, Experience

__all__ = [
    "RUNNERS",
    "Arguments",
    "Runner",
    "answer_to",
    "answers",
    "family",
    "minimised",
    "policy_objective",
    "section",
]

Arguments = dict[str, Any]
Runner = Callable[[Arguments, Arguments], Arguments]
RUNNERS: dict[tuple[str, str], Runner] = {}


def answers(file: str, *functions: str) -> Callable[[Runner], Runner]:
    def register(runner: Runner) -> Runner:
        RUNNERS.update({(file, function): runner for function in functions})
        return runner

    return register


def family(file: str, function: str) -> str:
    """The family that a fixture file belongs to: its own name, the longest family in its name, or the only family that
    knows the function; else its own name."""
    families = {family for family, _ in RUNNERS} | {path.stem for path in DATA.glob("*.json")} | set(LATER)
    if file in families:
        return file
    named = [family for family in families if family in file]
    if named:
        return max(named, key=len)
    knowing = [family for family in families if (family, function) in RUNNERS]
    return knowing[0] if len(knowing) == 1 else file


def answer_to(case: Case) -> Runner | None:
    """What answers the case; None where nothing does."""
    return RUNNERS.get((family(case.file, case.function), case.function))


def minimised(
    objective: PolicyObjective,
    log_prob: torch.Tensor,
    mask: torch.Tensor,
    columns: Arguments,
    *,
    entropy: torch.Tensor | None = None,
    expert: torch.Tensor | None = None,
    step: int = 0,
    **counts: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(loss, metrics) of an objective on a whole mini-batch, selections included.

    `counts` (tokens, sequences, max_response_length, dp_size) replace what the mask says; `expert` (B,) marks rows.
    """
    mask = mask.bool()
    expert = torch.zeros(len(mask)).bool() if expert is None else expert.bool()
    version = torch.where(expert[:, None], EXPERT_VERSION, 0).expand(mask.shape)
    columns = {"rollout_log_prob": columns.get("old_log_prob", log_prob.detach()), **columns}
    # A first column of context: a sequence's first token is never trained on.
    shifted = {name: torch.nn.functional.pad(column, (1, 0)) for name, column in columns.items()}
    log_prob, mask, version = (torch.nn.functional.pad(t, (1, 0)) for t in (log_prob, mask, version))
    entropy = None if entropy is None else torch.nn.functional.pad(entropy, (1, 0))
    batch = Batch(
        tuple(
            Experience(
                torch.zeros(mask.shape[1]).numpy(),
                row.numpy(),
                shifted["rollout_log_prob"][i].numpy(),
                version[i].numpy(),
                "group",
                i,
            )
            for i, row in enumerate(mask)
        )
    )
    scores = {"log_prob": log_prob.detach(), **({} if entropy is None else {"entropy": entropy.detach()})}
    known = {name: column for name, column in {**shifted, **scores}.items() if name != "rollout_log_prob"}
    batch = objective.select(batch.with_columns(**{n: [row.numpy() for row in c] for n, c in known.items()}), 0)
    for name in ("selected", "token_weight", "counted", "rollout_is_weights"):
        if name in batch.columns and name not in columns:
            shifted[name] = torch.stack([torch.from_numpy(row.copy()) for row in batch.columns[name]]).to(
                log_prob.dtype
            )
    mask = torch.stack([torch.from_numpy(e.response_mask.copy()) for e in batch.experiences])
    experts = mask & (version == EXPERT_VERSION)
    counted = mask & (shifted["counted"] != 0) if "counted" in shifted else mask
    totals = {
        "tokens": int(mask.sum()),
        "sequences": int(mask.any(-1).sum()),
        "max_response_length": mask.shape[1] - 1,
        "expert_tokens": int(experts.sum()),
        "expert_sequences": int(experts.any(-1).sum()),
        "counted_tokens": int(counted.sum()),
        "counted_sequences": int(counted.any(-1).sum()),
        **counts,
    }
    if "counted" not in shifted:
        totals |= {"counted_tokens": None, "counted_sequences": None}
    done = objective.loss(LossInputs(mask, version, shifted, log_prob, entropy, step=step), LossDenominators(**totals))
    means = {key: float(value / max(int(mask.sum()), 1)) for key, value in done.sums.items()}
    maxima = {key: float(value) for key, value in done.maxima.items()}
    return done.loss, {**objective.derived(means), **maxima, **batch.metrics}
