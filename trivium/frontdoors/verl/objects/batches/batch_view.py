"""verl's view of rollouts: padded tensors and columns of objects, as reward managers expect them.

Legend: B trajectories, P the longest prompt, R the longest response. A response starts at the first sampled token. It
includes the messages of tools and environments in between, with a `response_mask` of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trivium.foundation.errors import DataError
from trivium.frontdoors.padding import response_start, side_by_side
from trivium.frontdoors.verl.objects.batches.protocol import DataProto, as_columns, objects
from trivium.models.late import torch
from trivium.policy import finite_number
from trivium.types import Batch, Experience, Group, Trajectory, experiences_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class BatchView(DataProto):
    """A DataProto that can be built from groups. `.batch["responses"]` is (B, R)."""

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        pad_token_id: int,
        *,
        meta_info: Mapping[str, Any] | None = None,
        prompt_length: int = 0,
        response_length: int = 0,
    ) -> BatchView:
        """Builds a view with one row per trajectory that did not fail, in order (`living`).

        Tensors: `prompts` (B, P) padded on the left, `responses` (B, R) padded on the right, both side by side in
        `input_ids`, `attention_mask`, `position_ids` (B, P + R); `response_mask` and `rollout_log_probs` (B, R).
        Columns: those of the tasks (None if a task lacks the column), `uid` (equal within a group), `raw_prompt`,
        `__num_turns__` (messages, the prompt counted as one), `reward_scores` (rewards given during the rollout). If a
        task lacks them, `data_source` is the taskset and `reward_model` holds the column `answer`. P and R are at least
        `prompt_length` and `response_length`.

        If a trajectory rewrote its history, its row is the last of its sequences.
        """
        rows = [(group, member, _last(group, member)) for group, member in living(groups)]
        starts = [response_start(e) for _, _, e in rows]
        return cls.from_dict(
            _padded([e for _, _, e in rows], starts, (prompt_length, response_length), pad_token_id),
            as_columns([_columns(group, member) for group, member, _ in rows]),
            meta_info,
        )


def living(groups: Sequence[Group]) -> list[tuple[Group, Trajectory]]:
    """Returns every trajectory that did not fail, with its group: the rows of `BatchView.of`."""
    return [(group, member) for group in groups for member in group.alive]


def row_lengths(groups: Sequence[Group]) -> tuple[list[int], list[int]]:
    """Returns (prompt lengths, response lengths) in tokens of the rows of `BatchView.of`."""
    rows = [_last(group, member) for group, member in living(groups)]
    prompts = [response_start(row) for row in rows]
    return prompts, [len(row) - start for row, start in zip(rows, prompts, strict=True)]


_TRAINED = {
    "advantages": "advantages",
    "returns": "returns",
    "old_log_prob": "old_log_probs",
    "ref_log_prob": "ref_log_prob",
    "values": "values",
}
"""Column of a batch -> its name in verl."""


def trained_view(groups: Sequence[Group], batch: Batch, pad_token_id: int, step: int) -> BatchView:
    """Builds the view of a step's trained groups with `token_level_scores`, `advantages`, `returns` and the scores of
    models (B, R). The metrics of the rewards are columns."""
    last = {(e.group_id, e.index): row for row, e in enumerate(batch.experiences)}
    trained = [group for group in groups if any((group.group_id, member.index) in last for member in group.alive)]
    view = BatchView.of(trained, pad_token_id, meta_info={"global_steps": step})
    members = living(trained)
    rows = [last.get((group.group_id, member.index)) for group, member in members]
    starts, _ = row_lengths(trained)
    for name in _TRAINED.keys() & batch.columns.keys():
        table = view.batch[_TRAINED[name]] = torch.zeros(view.batch["responses"].shape)
        for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
            if row is not None:
                values = torch.from_numpy(np.array(batch.columns[name][row][start:], np.float32))
                table[place, : len(values)] = values
    view.batch["token_level_scores"] = on_last_tokens(view, [member.reward for _, member in members])
    for name in dict.fromkeys(name for _, member in members for name in member.metrics):
        view.non_tensor_batch.setdefault(name, objects([member.metrics.get(name) for _, member in members]))
    return view


def on_last_tokens(view: DataProto, scores: Sequence[float]) -> Tensor:
    """Returns rewards (B, R) with each score on the last token of its response. An empty response has no reward."""
    rewards, lengths = torch.zeros(view.batch["responses"].shape), view.response_lengths
    # verl writes to index -1 of an empty response, which is padding.
    rows = lengths.nonzero().flatten()
    rewards[rows, lengths[rows] - 1] = torch.tensor([float(score) for score in scores])[rows]
    return rewards


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward manager's result for one row."""

    score: float
    """Sum of the rewards of the response."""
    at: int
    """Index of the last response token with a reward; the last token if no token has a reward; -1 if the response is
    empty."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The manager's extra information about the row."""


def scored_rows(reward: Tensor, view: BatchView, extra: Mapping[str, Sequence[Any]] | None = None) -> list[Scored]:
    """Converts rewards (B, R) of a view to one result per row. Raises DataError if a reward is not finite or is on
    padding, or if an entry of `extra` does not have one value per row."""
    extra = extra or {}
    if reward.shape != view.batch["responses"].shape:
        raise DataError(
            f"a reward tensor of shape {tuple(view.batch['responses'].shape)}",
            f"shape {tuple(reward.shape)}",
            "give one number per response token",
        )
    for name, values in extra.items():
        if len(values) != len(view):
            raise DataError(
                f"extra information {name!r} about {len(view)} samples",
                f"{len(values)} entries",
                "give one entry per sample, None for those without a value",
            )
    return [
        # float64, because a row may have thousands of float32 rewards.
        _scored(row, tokens.double(), length, {name: values[row] for name, values in extra.items()})
        for row, (tokens, length) in enumerate(zip(reward, view.response_lengths.tolist(), strict=True))
    ]


def _scored(row: int, tokens: Tensor, length: int, extra: dict[str, Any]) -> Scored:
    try:
        total = finite_number(tokens.sum())
    except ValueError as error:
        raise DataError(f"a finite reward of sample {row}", str(error), "fix the reward manager") from None
    places = tokens.nonzero().flatten().tolist()
    if length and places and places[-1] >= length:
        raise DataError(
            f"a reward of sample {row} on its {length} response tokens",
            f"{float(tokens[places[-1]])} at {places[-1]}",
            "put it on token `valid_response_length - 1`",
        )
    return Scored(total, places[-1] if places and length else length - 1, extra)


# --------------------------------------------------------------------------- rows


def _last(group: Group, member: Trajectory) -> Experience:
    experiences = experiences_of(group, member)
    if experiences:
        return experiences[-1]
    tokens, numbers = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Experience(tokens, np.zeros(0, np.bool_), numbers, tokens, group.group_id, member.index)


def _padded(
    rows: Sequence[Experience], starts: Sequence[int], widths: tuple[int, int], pad_token_id: int
) -> dict[str, Tensor]:
    before = max([widths[0], *starts])
    tokens = side_by_side([e.tokens for e in rows], starts, pad_token_id, torch.long, widths)
    attention = side_by_side([np.ones(len(e), np.int64) for e in rows], starts, 0, torch.long, widths)
    sampled = side_by_side([e.response_mask for e in rows], starts, 0, torch.long, widths)
    log_probs = side_by_side([e.rollout_log_prob for e in rows], starts, 0, torch.float32, widths)
    return {
        "prompts": tokens[:, :before].clone(),
        "responses": tokens[:, before:].clone(),
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": sampled[:, before:].clone(),
        "rollout_log_probs": log_probs[:, before:].clone(),
    }


def _columns(group: Group, member: Trajectory) -> dict[str, Any]:
    task = group.task
    # Copies: managers add to `extra_info`, and the members of a group share a task.
    columns = {name: dict(value) if isinstance(value, dict) else value for name, value in task.columns.items()}
    if "answer" in columns:
        columns.setdefault("reward_model", {"style": "rule", "ground_truth": columns["answer"]})
    columns.setdefault("data_source", task.taskset)
    return columns | {
        "uid": group.group_id,
        "raw_prompt": [{"role": message.role, "content": message.content} for message in task.prompt],
        # One for the prompt or the answer before a completion, one for the completion.
        "__num_turns__": 2 * len(member.turns),
        "reward_scores": dict(member.rewards),
    }
