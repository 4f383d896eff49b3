"""Compares recorded with recomputed values, stage by stage, exactly or within a tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trivium.foundation.metrics import same
from trivium.types import AnyArray, Group, Trajectory, Turn

StageName = Literal["weights", "tokens", "log-probs", "reward", "advantage", "loss", "update"]
STAGES: tuple[StageName, ...] = ("weights", "tokens", "log-probs", "reward", "advantage", "loss", "update")
"""Each stage depends on those before it."""
LOG_PROB_TOLERANCE = 2e-3
"""Largest allowed difference, in nats, between a recorded and a recomputed log-probability if bits may differ."""
TOLERANCE = 1e-2
"""Largest allowed difference of any other number, relative to the larger of the two, or to 1 if both are below 1."""


@dataclass
class StageComparison:
    """One stage of a replay."""

    name: StageName
    number: int = 0
    """Number of values compared."""
    equal: int = 0
    """Number of values that are equal bit for bit."""
    worst: float = 0.0
    """The largest difference of the other values, in units of the tolerance."""
    differences: list[str] = field(default_factory=list[str])
    """Descriptions of the differences."""
    notes: list[str] = field(default_factory=list[str])
    """Descriptions of the values that were not compared, with the reason."""

    @property
    def status(self) -> str:
        if self.differences:
            return "differs"
        if not self.number:
            return "not compared"
        return "equal" if self.equal == self.number else "within tolerance"


@dataclass
class Comparison:
    """The stages of a replay. If the replay need not be exact (`inexact` is the reason), values within the tolerance
    count as equal."""

    inexact: Sequence[str] = ()
    stages: dict[StageName, StageComparison] = field(
        default_factory=lambda: {name: StageComparison(name) for name in STAGES}
    )

    def note(self, stage: StageName, text: str) -> None:
        if text not in self.stages[stage].notes:
            self.stages[stage].notes.append(text)

    def values(self, stage: StageName, what: str, recorded: object, replayed: object) -> bool:
        """Compares values without a tolerance; returns whether they are equal."""
        compared = self.stages[stage]
        compared.number += 1
        if recorded == replayed:
            compared.equal += 1
            return True
        compared.differences.append(f"{what}: recorded {_shown(recorded)}, replayed {_shown(replayed)}")
        return False

    def number(self, stage: StageName, what: str, recorded: float, replayed: float) -> None:
        self.arrays(stage, what, np.float64(recorded).reshape(1), np.float64(replayed).reshape(1))

    def arrays(self, stage: StageName, what: str, recorded: AnyArray, replayed: AnyArray) -> None:
        """Compares arrays element by element; reports the index of the first difference."""
        compared = self.stages[stage]
        compared.number += 1
        if recorded.shape != replayed.shape:
            compared.differences.append(f"{what}: recorded {recorded.shape} numbers, replayed {replayed.shape}")
            return
        if recorded.tobytes() == replayed.astype(recorded.dtype).tobytes() or np.array_equal(
            recorded, replayed, equal_nan=True
        ):
            compared.equal += 1
            return
        far = _distances(stage, recorded.astype(np.float64), replayed.astype(np.float64))
        compared.worst = max(compared.worst, float(np.nan_to_num(far, nan=np.inf).max()))
        beyond = ~(far <= (1.0 if self.inexact else 0.0))
        if not beyond.any():
            return
        place = tuple(int(axis[0]) for axis in np.nonzero(beyond))
        where = f" at {', '.join(map(str, place))}" if recorded.size > 1 else ""
        number = f"; {int(beyond.sum())} of {recorded.size} differ" if recorded.size > 1 else ""
        compared.differences.append(
            f"{what}{where}: recorded {recorded[place]:.9g}, replayed {replayed[place]:.9g}{number}"
        )

    @property
    def first(self) -> StageComparison | None:
        """The first stage with a difference."""
        return next((stage for stage in self.stages.values() if stage.differences), None)


def _distances(stage: StageName, a: AnyArray, b: AnyArray) -> AnyArray:
    """Elementwise distances in units of the tolerance."""
    if stage == "log-probs":
        return np.abs(a - b) / LOG_PROB_TOLERANCE
    return np.abs(a - b) / (TOLERANCE * np.maximum(1.0, np.maximum(np.abs(a), np.abs(b))))


def _shown(value: object) -> str:
    return str(value) if len(str(value)) <= 200 else f"{str(value)[:197]}..."


# --------------------------------------------------------------------------- rollouts


def title_of(group: Group, rollout: Trajectory) -> str:
    """Returns the name of the rollout in messages."""
    member = "the greedy rollout" if rollout is group.greedy else f"rollout {rollout.index + 1}"
    return f"{member} of task {group.task.task_id}"


def compare_rollout(
    comparison: Comparison, title: str, recorded: Trajectory, replayed: Trajectory, left_out: Sequence[str]
) -> bool:
    """Compares a recorded rollout with the one sampled again: tokens, log-probabilities, rewards (except `left_out`,
    which were not computed). Returns whether the tokens are equal."""
    if any("DeadlineExceeded" in str(rollout.failure) for rollout in (recorded, replayed)):
        comparison.note("tokens", f"{title} exceeded its deadline: time is not replayed")
        return False
    if not _same_tokens(comparison, title, recorded, replayed):
        return False
    for number, (old, new) in enumerate(zip(recorded.turns, replayed.turns, strict=True)):
        comparison.arrays("log-probs", f"{title}, turn {number + 1}, token", old.log_prob, new.log_prob)
    compare_rewards(comparison, title, recorded, replayed, left_out)
    return True


def compare_rewards(
    comparison: Comparison, title: str, recorded: Trajectory, replayed: Trajectory, left_out: Sequence[str]
) -> None:
    """Compares the rewards of a rollout with the recomputed ones."""
    old, new = (_failed(rollout) for rollout in (recorded, replayed))
    if not comparison.values("reward", f"{title}, its failure", old, new) or recorded.failure is not None:
        return
    names = [name for name in {**recorded.rewards, **replayed.rewards} if name not in left_out]
    for name in names:
        if name in recorded.rewards and name in replayed.rewards:
            comparison.number("reward", f"{title}, {name}", recorded.rewards[name], replayed.rewards[name])
        else:
            comparison.values("reward", f"{title}, {name}", recorded.rewards.get(name), replayed.rewards.get(name))


def _failed(rollout: Trajectory) -> str:
    return "none" if rollout.failure is None else f"{rollout.failure.side}: {rollout.failure.kind}"


def _same_tokens(comparison: Comparison, title: str, recorded: Trajectory, replayed: Trajectory) -> bool:
    compared = comparison.stages["tokens"]
    compared.number += 1
    difference = next(_differing_tokens(recorded.turns, replayed.turns), "")
    if not difference:
        compared.equal += 1
    elif comparison.inexact:
        compared.worst = 1.0
        comparison.note("tokens", f"{title} differs at {difference}; sampling may differ if bits differ")
    else:
        compared.differences.append(f"{title}, {difference}")
    return not difference


def _differing_tokens(recorded: Sequence[Turn], replayed: Sequence[Turn]) -> Iterator[str]:
    """Yields what differs between two rollouts: for each turn the first token and the stop reason, then the number of
    turns."""
    for number, (old, new) in enumerate(zip(recorded, replayed, strict=False), start=1):
        for name, a, b in (("prompt token", old.prompt_tokens, new.prompt_tokens), ("token", old.tokens, new.tokens)):
            if not np.array_equal(a, b):
                shared = min(len(a), len(b))
                place = next((at for at in range(shared) if a[at] != b[at]), shared)
                differing = [str(int(tokens[place])) if place < len(tokens) else "none" for tokens in (a, b)]
                yield f"turn {number}, {name} {place}: recorded {differing[0]}, replayed {differing[1]}"
        if old.stop_reason != new.stop_reason:
            yield f"turn {number}, stop reason: recorded {old.stop_reason.value}, replayed {new.stop_reason.value}"
    if len(recorded) != len(replayed):
        yield f"turns: recorded {len(recorded)}, replayed {len(replayed)}"


# --------------------------------------------------------------------------- train steps


def compare_metrics(comparison: Comparison, recorded: Mapping[str, float], replayed: Mapping[str, float]) -> None:
    """Compares the logged metrics of the update with the recomputed ones; statistics of advantages belong to the stage
    of the advantages."""
    for key in sorted(recorded.keys() & replayed.keys()):
        if key.startswith(("train/", "mismatch/")) and not key.startswith("train/changed"):
            stage: StageName = "advantage" if key.startswith(("train/advantage_", "train/return_")) else "loss"
            if same(recorded[key], replayed[key]):
                comparison.stages[stage].number += 1
                comparison.stages[stage].equal += 1
            else:
                comparison.number(stage, key, recorded[key], replayed[key])


def lines_of(comparison: Comparison) -> Iterable[str]:
    """One line per stage, followed by its differences and notes."""
    for stage in comparison.stages.values():
        counts = f"{stage.equal} of {stage.number} values are equal bit for bit" if stage.number else ""
        if stage.worst and not stage.differences and stage.name != "tokens":
            counts += f", the others at most {stage.worst:.2g} of the tolerance apart"
        yield f"  {stage.name:<10} {stage.status:<17} {counts}".rstrip()
        yield from (f"             {note}" for note in stage.notes[:5])
        if len(stage.notes) > 5:
            yield f"             and {len(stage.notes) - 5} more like these"
        yield from (f"             {difference}" for difference in stage.differences[:3])
        if len(stage.differences) > 3:
            yield f"             and {len(stage.differences) - 3} more differences"
