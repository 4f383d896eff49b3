"""The trainer's data: experiences, and batches of them.

Legend: L tokens of one experience. Index t of every per-token array belongs to `tokens[t]`:
`log_prob[t] = log p(tokens[t] | tokens[:t])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, starmap
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trivium.foundation.errors import DataError
from trivium.types.arrays import AnyArray, BoolArray, FloatArray, IntArray, frozen
from trivium.types.enums import StopReason
from trivium.types.sequences import sequences_of
from trivium.types.trajectories import EXPERT_VERSION, Group, Media, Prompt, Trajectory, Turn

SCORES: Mapping[str, str] = {
    "old": "old_log_prob",
    "log_prob": "log_prob",
    "entropy": "entropy",
    "sum_pi_squared": "sum_pi_squared",
    "mean_discriminant": "mean_discriminant",
    "ref": "ref_log_prob",
    "teacher": "teacher_log_prob",
    "teacher_top": "teacher_top",
    "student_top": "student_top",
    "values": "values",
}
"""Score of a train engine -> the column that holds it. `old` and `log_prob` are the policy's log-probability before a
train step, and before one of its updates. `mean_discriminant` is the policy's expectation of p (H + log p), the change
of its entropy with a token's logit. `teacher_top` is (L, K, 2): the teacher's K most probable tokens and their
log-probabilities. `student_top` is the same for the policy's K most probable tokens, with the teacher's
log-probabilities."""
REFERENCE_REWARDS = "reference_rewards"
"""The task's column with the rewards of the reference policy's samples (A*-PO)."""
CANDIDATES = ("teacher_top", "student_top")
"""The columns with candidates for each token, in the order of the candidates' log-probabilities in a loss."""
AT_UPDATE = ("update_log_prob", "update_entropy", "clipped")
"""Columns of the first pass of a train step's updates: log-probability and entropy with the weights before each update,
and 1 where the loss clips the ratio."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The model that the policy is distilled from: a frozen one, or the policy itself."""

    NO_ADAPTER: ClassVar = (
        "an average of the policy's weights under train.lora",
        "the average is a model of its own, and only the adapter changes",
        "use current or initial, or leave train.lora out",
    )
    """Why the policy's average cannot teach under an adapter: what was asked, what was found, what to do."""

    path: Path | None
    """A plain Hugging Face directory; None: the policy itself."""
    top_k: int
    """The number of most probable tokens in the scores `teacher_top` and `student_top`."""
    weights: str = "current"
    """Without a path: the policy's `current` weights, its `initial` ones, or their moving `average`."""
    rate: float = 0.05
    """The share of the current weights in the average after each update."""
    context: tuple[str, ...] = ()
    """Templates of what the teacher reads in place of the task's last message
    (`trivium.algorithms.teachers.teacher_prompts`); empty: what the policy reads."""

    @property
    def is_average(self) -> bool:
        """Whether it is an average of the policy's weights."""
        return self.path is None and self.weights == "average"


def _frozen_column(array: npt.ArrayLike) -> AnyArray:
    """A read-only float32 array, or float64 if the array is float64."""
    if type(array) is np.ndarray and array.dtype is _FLOAT32 and not array.flags.writeable:
        return array
    values = np.asarray(array)
    return frozen(values, None if values.dtype == np.float64 else np.float32)


_FLOAT32 = np.dtype(np.float32)
_NO_COLUMN = np.empty(0, _FLOAT32)
"""The column of a batch without experiences."""


class _Column(tuple[AnyArray, ...]):
    """The arrays of a column, frozen."""

    __slots__ = ()

    @classmethod
    def of(cls, arrays: Iterable[npt.ArrayLike]) -> _Column:
        return arrays if isinstance(arrays, cls) else cls(map(_frozen_column, arrays))


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """The completion tokens of one turn in an experience: [start, stop)."""

    number: int
    """Index of the turn in its trajectory."""
    start: int
    stop: int
    reward: float = 0.0
    state: str = ""


_TOKEN_ARRAYS = {
    "tokens": np.int32,
    "response_mask": np.bool_,
    "rollout_log_prob": np.float32,
    "policy_version": np.int32,
}
"""The per-token arrays of an experience: its first fields."""


@dataclass(frozen=True, slots=True)
class Experience:
    """One trainable token sequence of length L."""

    tokens: IntArray
    response_mask: BoolArray
    """True for trained tokens: those that the policy sampled, or that the expert wrote."""
    rollout_log_prob: FloatArray
    """Log-probability under the distribution sampled from; 0 outside the mask."""
    policy_version: IntArray
    """The version of the weights that sampled each token; `EXPERT_VERSION` elsewhere."""
    group_id: str
    index: int
    """The trajectory's position in its group. Experiences share it if their trajectory rewrote history."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    stop_reason: StopReason = StopReason.EOS
    media: tuple[Media, ...] = ()
    """In order, each with its span in `tokens`."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns of the sequence, in order; empty for an expert's sequence."""
    extra: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray])
    """Further arrays with leading axis L: teacher log-probabilities, routing, ..."""
    greedy_reward: float | None = None
    """The reward of the task's greedy rollout, if there is one."""
    participant: str = ""
    """The participant that sampled it, if its trajectory has rewards for each participant (`Policy.fork`). Its rewards
    are then compared with those of the same participant in other trajectories."""
    teacher_prompt: Prompt | None = None
    """What a teacher reads in place of the tokens before the first completion; None: those tokens."""
    reference_rewards: tuple[float, ...] = ()
    """The rewards of the reference policy's samples, from the task's column of this name."""

    def __post_init__(self) -> None:
        for name, dtype in _TOKEN_ARRAYS.items():
            object.__setattr__(self, name, frozen(getattr(self, name), dtype))
        per_token = [name for name in self.extra if f"{name}_count" not in self.extra] if self.extra else []
        length = len(self.tokens)
        if not (length == len(self.response_mask) == len(self.rollout_log_prob) == len(self.policy_version)) or any(
            len(self.extra[name]) != length for name in per_token
        ):
            arrays = {name: getattr(self, name) for name in _TOKEN_ARRAYS}
            arrays |= {f"extra.{name}": self.extra[name] for name in per_token}
            raise DataError(
                "an experience whose arrays share one length",
                ", ".join(f"{name} has {len(array)}" for name, array in arrays.items()),
                "give every per-token array one entry per token",
            )
        if len(self.tokens) and self.response_mask[0]:
            raise DataError(
                "an experience whose first token is context",
                "response_mask[0] is true, but no token precedes the first one to predict it",
                "start the sequence with at least one prompt token (for example BOS)",
            )

    @property
    def reward(self) -> float:
        return float(sum(self.rewards.values()))

    @property
    def expert(self) -> bool:
        """Whether an expert wrote any of its trained tokens."""
        return bool((self.policy_version[self.response_mask] == EXPERT_VERSION).any())

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.response_mask))

    @property
    def observed(self) -> BoolArray:
        """(L,): the tokens between two turns: what the environment answered, with the template's tokens around it.
        Tokens of media are left out: their ids mean nothing."""
        mask = np.zeros(len(self), np.bool_)
        for before, after in pairwise(self.turns):
            mask[before.stop : after.start] = True
        for item in self.media:
            if item.span is not None:
                mask[slice(*item.span)] = False
        return mask

    @property
    def first(self) -> int:
        """The position of the first completion's first token; the length if there is no completion."""
        # The appended entry is the answer for an experience without a completion.
        return self.turns[0].start if self.turns else int(np.append(self.response_mask, True).argmax())

    def under(self, prompt: Prompt) -> Experience:
        """The same tokens from the first completion on, after another prompt."""
        first, longer = self.first, len(prompt) - self.first

        def moved(array: AnyArray, before: AnyArray | None = None) -> AnyArray:
            blank = np.zeros((len(prompt), *array.shape[1:]), array.dtype) if before is None else before
            return np.concatenate([blank, array[first:]])

        later = (item.at(item.span[0] + longer, item.span[1] + longer) for item in self.media if item.span)
        flat = {name for name in self.extra if f"{name}_count" in self.extra}
        return replace(
            self,
            tokens=moved(self.tokens, prompt.tokens),
            response_mask=moved(self.response_mask),
            rollout_log_prob=moved(self.rollout_log_prob),
            policy_version=moved(self.policy_version),
            media=(*prompt.media, *(item for item in later if item.span and item.span[0] >= len(prompt))),
            turns=tuple(replace(span, start=span.start + longer, stop=span.stop + longer) for span in self.turns),
            extra={name: array if name in flat else moved(array) for name, array in self.extra.items()},
            teacher_prompt=None,
        )

    def __len__(self) -> int:
        return len(self.tokens)


_OTHER_FIELDS = [field.name for field in fields(Experience) if field.name not in _TOKEN_ARRAYS]


@dataclass(frozen=True, slots=True)
class Batch:
    """Experiences and their computed per-token columns. Arrays are ragged, and never padded on the driver."""

    experiences: tuple[Experience, ...]
    columns: Mapping[str, tuple[FloatArray, ...]] = field(default_factory=dict[str, tuple[FloatArray, ...]])
    """Name -> one array per experience, with leading axis L: `advantages`, `returns`, `old_log_prob`, ..."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics from preparing the batch for an update; logged with the update."""

    def __post_init__(self) -> None:
        frozen = {name: _Column.of(arrays) for name, arrays in self.columns.items()}
        object.__setattr__(self, "columns", frozen)
        lengths = self.lengths
        for name, arrays in frozen.items():
            if [*map(len, arrays)] != lengths:
                raise DataError(
                    f"column {name!r} with one entry per token of each experience",
                    f"lengths {[len(a) for a in arrays][:8]}, experiences {lengths[:8]}",
                    "keep the columns in the order and length of the experiences",
                )

    def __len__(self) -> int:
        return len(self.experiences)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles one array for each kind of per-token array; pickling thousands of small arrays takes ten times as
        long."""
        tokens = {name: self.flat(name) for name in _TOKEN_ARRAYS}
        columns = {name: np.concatenate(arrays or [_NO_COLUMN]) for name, arrays in self.columns.items()}
        others = [tuple(getattr(experience, name) for name in _OTHER_FIELDS) for experience in self.experiences]
        return _unpickled, (self.lengths, tokens, others, columns, dict(self.metrics))

    @property
    def lengths(self) -> list[int]:
        """(B,): the number of tokens of each experience, context included."""
        return [len(e.tokens) for e in self.experiences]

    @property
    def num_tokens(self) -> int:
        """All tokens, context included."""
        return sum(self.lengths)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_lengths.sum())

    @property
    def response_lengths(self) -> npt.NDArray[np.int64]:
        """(B,): the number of trained tokens of each experience."""
        return self._counted(self.flat("response_mask"))

    @property
    def experts(self) -> BoolArray:
        """(B,): whether an expert wrote any trained token of each experience."""
        return self._counted(self.flat("response_mask") & (self.flat("policy_version") == EXPERT_VERSION)) > 0

    def flat(self, name: str) -> AnyArray:
        """One of the per-token arrays, concatenated over all experiences."""
        return np.concatenate([getattr(e, name) for e in self.experiences] or [np.empty(0, _TOKEN_ARRAYS[name])])

    def _counted(self, flags: BoolArray) -> npt.NDArray[np.int64]:
        """(B,): how many tokens of each experience have the flag."""
        before, ends = np.concatenate([[0], np.cumsum(flags)]), np.cumsum(self.lengths, dtype=np.int64)
        return np.diff(before[np.concatenate([[0], ends])])

    def with_columns(self, **columns: Sequence[npt.ArrayLike]) -> Batch:
        """The same experiences with further (or replaced) columns."""
        return replace(self, columns={**self.columns, **{name: _Column.of(a) for name, a in columns.items()}})

    def masked(self, masks: Sequence[BoolArray]) -> Batch:
        """The same experiences with their response masks restricted to these masks, one of length L each."""
        experiences = tuple(
            replace(e, response_mask=e.response_mask & mask) for e, mask in zip(self.experiences, masks, strict=True)
        )
        return replace(self, experiences=experiences)

    def under_teacher(self) -> Batch:
        """The same completions as a teacher reads them (`Experience.teacher_prompt`), with their columns."""
        rewritten = [e if e.teacher_prompt is None else e.under(e.teacher_prompt) for e in self.experiences]
        columns = {
            name: [
                _last(array, len(new), e.first)
                for array, e, new in zip(arrays, self.experiences, rewritten, strict=True)
            ]
            for name, arrays in self.columns.items()
        }
        return Batch(tuple(rewritten)).with_columns(**columns)

    def from_teacher(self, scores: Sequence[AnyArray]) -> list[AnyArray]:
        """The scores of `under_teacher` at the positions of this batch."""
        shifts = (0 if e.teacher_prompt is None else len(e.teacher_prompt) - e.first for e in self.experiences)
        return [
            _last(a, len(e), e.first + longer) for a, e, longer in zip(scores, self.experiences, shifts, strict=True)
        ]

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The experiences at these rows, in this order, with their columns."""
        chosen = [int(row) for row in rows]
        return Batch(
            tuple(self.experiences[row] for row in chosen),
            {name: _Column([arrays[row] for row in chosen]) for name, arrays in self.columns.items()},
        )


def _last(array: AnyArray, length: int, first: int) -> AnyArray:
    """The array from `first` on, at the end of one of this length that begins with zeros."""
    blank = length - (len(array) - first)
    return np.concatenate([np.zeros((blank, *array.shape[1:]), array.dtype), array[first:]])


def _unpickled(
    lengths: Sequence[int],
    tokens: Mapping[str, AnyArray],
    others: Sequence[tuple[Any, ...]],
    columns: Mapping[str, AnyArray],
    metrics: Mapping[str, float],
) -> Batch:
    """The inverse of `Batch.__reduce__`."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    for array in (*tokens.values(), *columns.values()):
        array.setflags(write=False)  # the slices below are read-only too, so they are not copied
    rows = [(*(array[place] for array in tokens.values()), *rest) for place, rest in zip(places, others, strict=True)]
    parts = {name: tuple(array[place] for place in places) for name, array in columns.items()}
    return Batch(tuple(starmap(Experience, rows)), parts, metrics)


def experiences_of(group: Group, trajectory: Trajectory) -> tuple[Experience, ...]:
    """The trainable sequences of a trajectory: turns that extend one another are one experience.

    A turn whose context is exactly the previous tokens plus new ones continues the sequence; the new context tokens are
    masked out. A turn that rewrites history starts another sequence. Nothing is re-encoded.
    """
    return tuple(_join(turns, group, trajectory) for turns in sequences_of(trajectory.turns))


def _join(turns: Sequence[tuple[int, Turn]], group: Group, trajectory: Trajectory) -> Experience:
    """One experience from (number, turn) pairs; each turn extends the previous one."""
    last = turns[-1][1]
    participant = last.participant if last.participant in trajectory.participants else ""
    length = len(last.prompt_tokens) + len(last.tokens)
    mask = np.zeros(length, np.bool_)
    log_prob = np.zeros(length, np.float32)
    version = np.full(length, EXPERT_VERSION, np.int32)
    spans: list[TurnSpan] = []
    for number, turn in turns:
        start, stop = len(turn.prompt_tokens), len(turn.prompt_tokens) + len(turn.tokens)
        span = slice(start, stop)
        mask[span], log_prob[span], version[span] = True, turn.log_prob, turn.policy_version
        spans.append(TurnSpan(number, start, stop, turn.reward, turn.state))
    tokens = np.concatenate([last.prompt_tokens, last.tokens])
    for array in (tokens, mask, log_prob, version):
        array.setflags(write=False)  # Experience does not copy read-only arrays
    greedy = None if group.greedy is None or group.greedy.failure is not None else group.greedy.rewards_of(participant)
    return Experience(
        tokens=tokens,
        response_mask=mask,
        rollout_log_prob=log_prob,
        policy_version=version,
        group_id=group.group_id,
        index=trajectory.index,
        rewards=trajectory.rewards_of(participant),
        stop_reason=last.stop_reason,
        media=last.media,
        turns=tuple(spans),
        extra=_joined_extra([turn for _, turn in turns], length),
        greedy_reward=None if greedy is None else float(sum(greedy.values())),
        participant=participant,
        reference_rewards=reference_rewards(group) if REFERENCE_REWARDS in group.task.columns else (),
    )


def reference_rewards(group: Group) -> tuple[float, ...]:
    """The rewards in the task's column: a list, or one number. Raises DataError for anything else."""
    value: Any = group.task.columns[REFERENCE_REWARDS]
    rewards: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
    if not all(isinstance(reward, int | float) and isfinite(reward) for reward in rewards):
        raise DataError(
            f"the column {REFERENCE_REWARDS} of task {group.task.task_id!r}",
            repr(rewards)[:80],
            "give the rewards of the reference policy's samples as a list of numbers",
        )
    return tuple(map(float, rewards))


def _joined_extra(turns: Sequence[Turn], length: int) -> dict[str, AnyArray]:
    """The turns' extra arrays for a sequence of `length` tokens. Each token has the value recorded first, or 0."""
    joined: dict[str, AnyArray] = {}
    # Backwards, so that the value that was recorded first is written last.
    for turn in reversed(turns):
        stop = len(turn.prompt_tokens) + len(turn.tokens)
        for name, array in turn.extra.items():
            if f"{name}_count" in turn.extra:
                joined[name] = np.concatenate([array, joined.get(name, array[:0])])
                continue
            recorded = array.any(axis=tuple(range(1, array.ndim)))
            whole = joined.setdefault(name, np.zeros((length, *array.shape[1:]), array.dtype))
            whole[stop - len(array) : stop][recorded] = array[recorded]
    return joined
