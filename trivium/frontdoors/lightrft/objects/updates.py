"""Helpers for the trainer's updates: batches of experiences for the core's learner, and statuses from its metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from trivium.foundation.errors import DataError
from trivium.frontdoors.lightrft.objects.models.experience import COLUMNS, ExperienceVL
from trivium.frontdoors.lightrft.objects.ppo_objective import ADVANTAGE_BOUND, with_mask
from trivium.training.distributed.ranks import Ranks
from trivium.training.learner import Learner
from trivium.types import AnyArray, Batch, Metrics

ACTOR_NAMES = {
    "train/loss_term/policy_gradient": "policy_loss",
    "train/loss_term/kl": "kl_loss",
    "train/lr/policy": "actor_lr",
    "train/grad_norm/policy": "actor_grad_norm",
    "train/loss/policy": "actor_loss",
    "train/kl": "ppo_kl",  # against the old policy; `kl` is against the reference
}
"""Metric of the core -> its name in a status. Other metrics lose the prefix `train/`."""
CRITIC_NAMES = {
    "train/loss/value": "critic_loss",
    "train/lr/value": "critic_lr",
    "train/grad_norm/value": "critic_grad_norm",
    "train/value_predicted": "values",
}


def renamed(metrics: Metrics, names: Mapping[str, str]) -> dict[str, float]:
    """Renames metrics for a status, with the original's names where they exist.

    Drops `mismatch/` metrics, which the trainer measures once, before the first update.
    """
    return {
        names.get(key, key.removeprefix("train/").replace("/", "_")): value
        for key, value in metrics.items()
        if not key.startswith("mismatch/")
    }


def bounded(batch: Batch) -> Batch:
    """Clips the advantages to [-ADVANTAGE_BOUND, ADVANTAGE_BOUND]."""
    clipped = [np.clip(row, -ADVANTAGE_BOUND, ADVANTAGE_BOUND) for row in batch.columns["advantages"]]
    return batch.with_columns(advantages=clipped)


def narrowed(batch: Batch, experience: ExperienceVL, entropy_mask: torch.Tensor) -> Batch:
    """Restricts the policy loss to the tokens of `entropy_mask`, (B, A) like the experience's action mask."""
    actions = experience.action_mask
    # A subclass may compute the mask by itself.
    if actions is None or entropy_mask.shape != actions.shape:
        shape = f"{tuple(entropy_mask.shape)}"
        raise DataError("an entropy mask of the shape of action_mask", shape, "give one number for each action")
    rows: list[AnyArray] = []
    for e, mask, chosen in zip(batch.experiences, actions.bool().cpu(), entropy_mask.bool().cpu(), strict=True):
        row = np.zeros(len(e), np.bool_)
        # Padded or not, a row has the same trained tokens in the same order.
        row[e.response_mask] = chosen[mask].numpy()
        rows.append(row)
    return with_mask(batch, rows)


def rollout_status(experience: ExperienceVL) -> dict[str, float]:
    """Returns the means of an experience's `info` over its sequences: `reward`, `kl`, `return`, `response_length`, ...

    The mean `kl` is weighted by the response lengths.
    """
    status: dict[str, float] = {}
    for name, value in _flat(experience.info):
        numbers = value.float()
        if name == "kl" and "response_length" in experience.info:
            weights = torch.as_tensor(experience.info["response_length"]).float().to(numbers.device)
            status[name] = float((numbers * weights).sum() / weights.sum().clamp(min=1))
        else:
            status[name] = float(numbers.mean())
    if "kl" not in status and experience.kl is not None and experience.action_mask is not None:
        mask = experience.action_mask.bool()
        status["kl"] = float(torch.where(mask, experience.kl, 0.0).sum() / mask.sum().clamp(min=1))
    return status


def _flat(info: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, tensor) of all per-row tensors. The names of nested entries are `mapping/name`."""
    flat: list[tuple[str, torch.Tensor]] = []
    for name, value in info.items():
        if isinstance(value, Mapping):
            flat += [(f"{name}/{inner}", tensor) for inner, tensor in _flat(cast("Mapping[str, Any]", value))]
        elif isinstance(value, torch.Tensor) and value.numel() and name != "num_actions":
            flat.append((name, value))
    return flat


def mean_status(ranks: Ranks, statuses: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Returns the weighted mean of each name over the (weight, status) pairs of all ranks."""
    everyone = [pair for part in ranks.all_gather(list(statuses)) for pair in part]
    names = dict.fromkeys(name for _, status in everyone for name in status)
    return {name: _weighted(everyone, name) for name in names}


def _weighted(statuses: Sequence[tuple[float, Mapping[str, float]]], name: str) -> float:
    having = [(weight, status[name]) for weight, status in statuses if name in status]
    total = sum(weight for weight, _ in having)
    # A mean of equal numbers is that number: a learning rate keeps all its digits.
    if not total or len({value for _, value in having}) == 1:
        return float(having[-1][1])
    return sum(weight * value for weight, value in having) / total


def columns_of(experience: ExperienceVL, learner: Learner, needs: Collection[str]) -> Batch:
    """Converts an experience to a core batch. Raises a DataError that lists all missing fields of `needs`."""
    batch = experience.to_batch(learner.model.backbone.vision)
    names = {column: field for field, column in COLUMNS.items()}
    missing = sorted(names.get(name, name) for name in needs if name not in batch.columns and name != "entropy")
    if missing:
        raise DataError(
            "an experience to train on",
            f"it has no {', '.join(missing)}",
            "let the experience maker make it, or set them",
        )
    return batch


def blank_experience() -> ExperienceVL:
    """Returns an experience of one sequence without trained tokens, for a rank without sequences."""
    numbers: dict[str, Any] = {name: torch.zeros(1, 1) for name in COLUMNS}
    return ExperienceVL(
        torch.zeros(1, 2, dtype=torch.int64),
        action_mask=torch.zeros(1, 1, dtype=torch.bool),
        attention_mask=torch.ones(1, 2, dtype=torch.int64),
        **numbers,
    )


def rollout_summary(ranks: Ranks, items: Sequence[ExperienceVL]) -> dict[str, float]:
    """Returns `rollout_*`: means, and the reward's standard deviation, over the sequences of all ranks."""
    numbers = _numbers_of(ranks, items)
    if not len(numbers["reward"]):
        return {"rollout_samples": 0.0}
    summary = {
        "rollout_reward": float(numbers["reward"].mean()),
        "rollout_reward_std": float(numbers["reward"].std()),
        "rollout_samples": float(len(numbers["reward"])),
    }
    names = ("response_length", "return", *(name for name in numbers if name.startswith("reward_metrics/")))
    for name in names:
        summary[f"rollout_{name.removeprefix('reward_metrics/')}"] = float(numbers[name].mean())
    return summary


def buffer_status(ranks: Ranks, items: Sequence[ExperienceVL]) -> dict[str, float]:
    """Returns `step_reward_*` over all ranks' sequences, and `advantages_*` and `returns_*` over their trained
    tokens."""
    status: dict[str, float] = {}
    numbers = _numbers_of(ranks, items)
    for name in ("advantages", "returns"):
        rows = [getattr(item, name)[item.action_mask] for item in items if getattr(item, name) is not None]
        mine = torch.cat(rows).double().cpu().numpy() if rows else np.zeros(0)
        numbers[name] = np.concatenate(ranks.all_gather(mine))
    for name, label in (("reward", "step_reward"), ("advantages", "advantages"), ("returns", "returns")):
        values = numbers[name]
        if len(values):
            measures = {"mean": values.mean(), "std": values.std(), "max": values.max(), "min": values.min()}
            status |= {f"{label}_{measure}": float(value) for measure, value in measures.items()}
    return status


def _numbers_of(ranks: Ranks, items: Sequence[ExperienceVL]) -> dict[str, AnyArray]:
    """Returns the per-sequence values of all ranks, by their name in `info`."""
    mine: dict[str, list[float]] = {"reward": []}
    for item in items:
        for name, value in _flat(item.info):
            mine.setdefault(name, []).append(float(value[0]) if value.ndim else float(value))
    everyone = ranks.all_gather(mine)
    names = dict.fromkeys(name for numbers in everyone for name in numbers)
    return {name: np.asarray([x for numbers in everyone for x in numbers.get(name, [])], np.float64) for name in names}
