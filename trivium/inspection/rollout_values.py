"""The JSON values that pages and reports show of recorded groups, and of a rollout token by token: NaN is None.

    run = RecordedRun(run_dir)
    for place in run.groups.of_step(12):
        group = run.groups.group(place)
        row = group_row(place, group, run.advantages(12))
        members = [rollout_values(run.rollout(place, group, member, 12), pieces) for member in group.rollouts]

Legend: L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trivium.inspection.rollout_view import fork_values, media_values
from trivium.inspection.rollouts import Member, Place, Rollout, TokenSequence
from trivium.types import EXPERT_VERSION, AnyArray, Group, IntArray, Trajectory, forks_of

_PROMPT = 400
"""Characters of a prompt in a row."""
Means = Mapping[Member, float]
"""A number of each rollout."""
TITLES = {
    "advantages": "advantage",
    "log_prob": "log-prob, engine",
    "old_log_prob": "log-prob, trainer",
    "ref_log_prob": "log-prob, reference",
    "mismatch": "trainer / engine",
    "update_log_prob": "log-prob at the update",
    "ratio": "ratio",
    "clipped": "clipped",
    "update_entropy": "entropy",
    "returns": "return",
    "values": "value",
    "response_mask": "mask",
    "policy_version": "policy version",
}
"""The values of a token, in the order in which pages offer them; the other columns of a sequence follow by name."""


# --------------------------------------------------------------------------- a group


def group_row(place: Place, group: Group, advantages: Means) -> dict[str, Any]:
    """Returns the row of a group in a list."""
    task = group.task
    return {
        "stage": place.stage,
        "slot": group.slot,
        "attempt": group.attempt,
        "planned": place.planned_step,
        "steps": list(place.takers),
        "task": task.task_id,
        "taskset": task.taskset,
        "epoch": group.epoch,
        "dropped": group.dropped,
        "prompt": (task.prompt[-1].content if task.prompt else "")[:_PROMPT],
        "size": len(group.rollouts),
        "members": [member_row(group, rollout, advantages) for rollout in group.rollouts],
    }


def member_row(group: Group, trajectory: Trajectory, advantages: Means) -> dict[str, Any]:
    """Returns the row of a rollout in a list."""
    failure, greedy = trajectory.failure, trajectory is group.greedy
    versions = [turn.policy_version for turn in trajectory.turns if len(turn.policy_version)]
    advantage = None if greedy else advantages.get((group.slot, group.attempt, trajectory.index))
    return {
        "index": trajectory.index,
        "greedy": greedy,
        "reward": number(trajectory.reward) if failure is None else None,
        "rewards": {name: number(value) for name, value in trajectory.rewards.items()},
        "metrics": {name: number(value) for name, value in trajectory.metrics.items()},
        "advantage": None if advantage is None else number(advantage),
        "tokens": trajectory.num_tokens,
        "turns": len(trajectory.turns),
        "stop": trajectory.stop_reason.value,
        "versions": [
            int(min(turn_versions.min() for turn_versions in versions)),
            int(max(turn_versions.max() for turn_versions in versions)),
        ]
        if versions
        else [],
        "failure": None if failure is None else f"{failure.side}: {failure.kind}: {failure.message}",
    }


def number(value: float) -> float | None:
    """Replaces NaN and infinities, which JSON lacks, by None."""
    return float(value) if np.isfinite(value) else None


# --------------------------------------------------------------------------- a rollout


def rollout_values(rollout: Rollout, pieces: Callable[[Sequence[int]], list[str]]) -> dict[str, Any]:
    """Returns a rollout token by token. `pieces` returns the text of each token of a sequence.

    Each sequence has `tokens` and `text` (L), `values` by name (L numbers or None each), and `turns`: the range [start,
    stop) of each turn's own tokens, its stop reason, its reward and its participant. `fork` says why a sequence starts.
    """
    group = rollout.group

    def text(tokens: Sequence[int] | IntArray) -> str:
        return "".join(pieces(np.asarray(tokens).tolist()))

    forks = {fork.turn: fork_values(fork, text) for fork in forks_of(rollout.trajectory.turns)}
    return {
        "messages": [{**message.entry(), "media": media_values(message.media)} for message in group.task.prompt],
        "columns": dict(group.task.columns),
        "sequences": [_sequence(rollout, sequence, pieces, forks) for sequence in rollout.sequences],
        "kept": any("returns" in columns for sequences in rollout.values_by_step.values() for columns in sequences),
    }


def _sequence(
    rollout: Rollout,
    sequence: TokenSequence,
    pieces: Callable[[Sequence[int]], list[str]],
    forks: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    """A sequence as `rollout_values` describes it."""
    turns = rollout.trajectory.turns
    spans = [
        {
            "number": span.number,
            "start": span.start,
            "stop": span.stop,
            "stop_reason": turns[span.number].stop_reason.value,
            "reward": number(span.reward),
            "participant": turns[span.number].participant,
            "text": turns[span.number].text,
            "media": media_values(turns[span.number].media),
        }
        for span in sequence.turns
    ]
    ids = sequence.tokens.tolist()
    fork = forks.get(spans[0]["number"]) if spans else None
    return {"tokens": ids, "text": pieces(ids), "turns": spans, "fork": fork, "values": token_values(sequence)}


def token_values(sequence: TokenSequence) -> dict[str, list[float | None]]:
    """Returns every value of the sequence's tokens by name; None for a token without the value."""
    sampled, trained = sequence.policy_version != EXPERT_VERSION, sequence.response_mask
    columns = {name: array for name, array in sequence.columns.items() if array.ndim == 1}
    old = columns.get("old_log_prob")
    if old is not None:
        columns["mismatch"] = np.exp(old - sequence.log_prob)
    current, before = columns.get("update_log_prob"), sequence.log_prob if old is None else old
    if current is not None:
        columns["ratio"] = np.exp(current - before)
    written = {"log_prob": _numbers(sequence.log_prob, sampled), "response_mask": [int(flag) for flag in trained]}
    written["policy_version"] = _numbers(sequence.policy_version, sampled)
    written |= {name: _numbers(array, trained) for name, array in columns.items()}
    order = [*TITLES]
    return dict(sorted(written.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _numbers(array: AnyArray, where: Any) -> list[float | None]:
    """Converts to JSON values, with the fewest digits that distinguish 32-bit numbers; None outside `where`, and for
    NaN."""
    if array.dtype.kind in "iub":
        return [value if here else None for value, here in zip(array.tolist(), where, strict=True)]
    there = where & np.isfinite(array)
    return [float(text) if here else None for text, here in zip(array.astype(str), there, strict=True)]
