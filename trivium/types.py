"""The data types that travel between the roles: frozen values over read-only numpy arrays.

Legend: L tokens of one experience. Index t of every per-token array belongs to `tokens[t]`:
`log_prob[t] = log p(tokens[t] | tokens[:t])`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trivium.errors import ConfigError, DataError
from trivium.randomness import SampleKey

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]
Metrics = dict[str, float]
Columns = Mapping[str, Any]

EXPERT_VERSION = -1
"""The policy version of tokens that the policy did not sample: expert and supervised data."""

TRAINER = "trainer"
"""The role name of the trainer; any other name on a board is an explorer's."""
SERVED = "served"
"""The taskset of tasks that agents send over HTTP (`run.mode: serve`), which are not in the schedule."""


SCORES: Mapping[str, str] = {
    "old": "old_log_prob",
    "log_prob": "log_prob",
    "entropy": "entropy",
    "sum_pi_squared": "sum_pi_squared",
    "mean_discriminant": "mean_discriminant",
    "ref": "ref_log_prob",
    "teacher": "teacher_log_prob",
    "teacher_top": "teacher_top",
    "values": "values",
}
"""What a train engine can score -> the column it becomes. `old` and `log_prob` are the policy's log-probability before
a train step, and before one of its updates. `mean_discriminant` is the policy's expectation of
p (H + log p), the change of its entropy with a token's logit. `teacher_top` is (L, K, 2): the teacher's
K most probable tokens and their log-probabilities."""
EXTRAS = ("routing", "kept")
"""What an engine can record of a token beside its log-probability. `routing`, (layers, K) unsigned integers: one plus
the index of each of the K experts that the router of each layer chose for the token; 0: not known. `kept`: the token
ids that the token was sampled from, concatenated over tokens. `kept_count` has their number per token; a negative
number counts ids that were left out instead, and 0 stands for the whole vocabulary."""
AT_UPDATE = ("update_log_prob", "update_entropy", "clipped")
"""Columns of the first pass of a train step's updates: log-probability and entropy by the weights of that moment, and
1 where the loss clips the ratio."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model that the policy is distilled from."""

    path: Path
    """A plain Hugging Face directory."""
    top_k: int
    """How many of its most probable tokens the score `teacher_top` holds."""


def _frozen(array: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> AnyArray:
    """A read-only array of the dtype; copies only where the caller could still write to it."""
    result = np.asarray(array, dtype=dtype)
    if result.flags.writeable:
        result = result.copy()
        result.flags.writeable = False
    return result


def _frozen_column(array: npt.ArrayLike) -> AnyArray:
    """The same in float32, or in float64 where that is what it is."""
    if type(array) is np.ndarray and array.dtype is _FLOAT32 and not array.flags.writeable:
        return array
    given = np.asarray(array)
    return _frozen(given, None if given.dtype == np.float64 else np.float32)


_FLOAT32 = np.dtype(np.float32)


class _Column(tuple[AnyArray, ...]):
    """The arrays of a column, frozen."""

    __slots__ = ()

    @classmethod
    def of(cls, arrays: Iterable[npt.ArrayLike]) -> _Column:
        return arrays if isinstance(arrays, cls) else cls(map(_frozen_column, arrays))


class RunningStatus(StrEnum):
    """The status of a role, as the other roles see it."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    """It requests a weight sync: an explorer without a free slot, or a trainer whose interval is over."""
    WAITING_SYNC = "waiting_sync"
    """It has entered a collective exchange and waits for the other side."""
    STOPPED = "stopped"


class SyncMethod(StrEnum):
    """How weights travel."""

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(StrEnum):
    """Who decides when weights travel."""

    FIXED = "fixed"
    DYNAMIC_BY_TRAINER = "dynamic_by_trainer"
    DYNAMIC_BY_EXPLORER = "dynamic_by_explorer"


class SaveStrategy(StrEnum):
    """Who may write at the same time."""

    SINGLE_THREAD = "single_thread"
    """One saver in the whole cluster."""
    SINGLE_PROCESS = "single_process"
    """The savers of one job on one node."""
    SINGLE_NODE = "single_node"
    """The savers of one node."""
    UNRESTRICTED = "unrestricted"
    """Every saver."""


class StopReason(StrEnum):
    """Why a turn ended."""

    EOS = "eos"
    """The policy sampled an end-of-sequence token (which is part of the turn and is trained)."""
    LENGTH = "length"
    """`max_new_tokens` or the context limit was reached."""
    STOP = "stop"
    """A stop string appeared."""
    ABORT = "abort"
    """The engine was closed before the turn ended."""
    ENV_DONE = "env_done"
    """The environment declared the episode finished."""


IMAGE = "<image>"
"""Marks the place of an image in the text of a message that has some."""


@dataclass(frozen=True, slots=True)
class Media:
    """One image, clip or sound as encoded bytes; pixels are derived on each side."""

    mime: str
    data: bytes = field(repr=False, compare=False)
    span: tuple[int, int] | None = None
    """Its tokens, [start, end), once rendered: placeholders, and what some models write between them."""
    sha256: str = ""
    """The hash of `data`; computed where it is not given."""

    def __post_init__(self) -> None:
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.data).hexdigest())

    def at(self, start: int, end: int) -> Media:
        """The same media with this span."""
        return replace(self, span=(start, end))


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    """Text. In a message with media, each `<image>` is the place of one; without any, the media precede the text."""
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """One problem with a stable identity."""

    task_id: str
    prompt: tuple[Message, ...]
    columns: Columns = field(default_factory=dict[str, Any])
    """All other columns of the row (JSON values): `answer`, `data_source`, ... Rewards receive it by name."""
    taskset: str = "train"


MIN_TEMPERATURE = 1e-6
"""The lowest temperature above 0: logits divided by a lower one overflow."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy is sampled. `temperature` 0 means greedy, whose log-probabilities are 0 by definition."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep the tokens with at least this part of the most probable one's probability; 0 keeps all."""
    min_new_tokens: int = 0
    """End-of-sequence is impossible before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn; the tokens up to and including the one that completes the string are kept."""
    extra: tuple[str, ...] = ()
    """Further data to record of each completion: names of `EXTRAS`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. Read-only."""

    tokens: IntArray
    media: tuple[Media, ...] = ()
    """The media of all messages, in order, each with its span in `tokens`."""
    unexpanded: IntArray = field(default=None, repr=False)  # type: ignore[assignment]  # `tokens` without media
    """The tokens with one placeholder for each of the media: the input of an engine with a processor of its own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _frozen(self.tokens, np.int32))
        given = cast("IntArray | None", self.unexpanded)
        object.__setattr__(self, "unexpanded", self.tokens if given is None else _frozen(given, np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def then(self, other: Prompt) -> Prompt:
        """Both, one after the other."""
        by = len(self.tokens)
        moved = (m if m.span is None else m.at(m.span[0] + by, m.span[1] + by) for m in other.media)
        tokens = np.concatenate([self.tokens, other.tokens])
        plain = self.unexpanded is self.tokens and other.unexpanded is other.tokens
        unexpanded = tokens if plain else np.concatenate([self.unexpanded, other.unexpanded])
        return Prompt(tokens, (*self.media, *moved), unexpanded)


@dataclass(frozen=True, slots=True)
class Request:
    """The input of a rollout engine for one completion."""

    prompt_tokens: IntArray
    sampling: Sampling
    key: SampleKey
    media: tuple[Media, ...] = ()
    """In order, each with its span in `prompt_tokens`."""
    unexpanded: IntArray | None = None
    """`Prompt.unexpanded`; None: the prompt has no media."""
    messages: tuple[Message, ...] = field(default=(), repr=False)
    """The conversation that the prompt was rendered from, for engines that render it themselves."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The output of an engine for a request. All arrays have one entry per sampled token."""

    tokens: IntArray
    log_prob: FloatArray
    """Log-probability under the distribution actually sampled from (temperature and truncation applied)."""
    policy_version: IntArray
    """The weights that sampled each token."""
    stop_reason: StopReason
    text: str | None = None
    """The text, from an engine that returns text; None: decode the tokens."""
    extra: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray], repr=False)
    """The arrays that `Sampling.extra` names. Their rows belong to the last tokens of prompt and completion
    together."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _frozen(self.tokens, np.int32))
        object.__setattr__(self, "log_prob", _frozen(self.log_prob, np.float32))
        object.__setattr__(self, "policy_version", _frozen(self.policy_version, np.int32))
        object.__setattr__(self, "extra", {name: _frozen(array) for name, array in self.extra.items()})


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of the policy with the exact context it was sampled in."""

    prompt_tokens: IntArray
    tokens: IntArray
    log_prob: FloatArray
    policy_version: IntArray
    stop_reason: StopReason
    text: str
    """The completion decoded, without special tokens: for logs, rewards and environments; never encoded again."""
    media: tuple[Media, ...] = ()
    """Of the prompt, in order, each with its span in `prompt_tokens`."""
    reward: float = 0.0
    """The environment's reward for this turn alone; part of the trajectory's reward, for step-wise estimators."""
    state: str = ""
    """Identifies the environment's state before the turn: equal where the state was equal. Empty: unknown."""
    extra: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray], repr=False)
    """As `Completion.extra`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", _frozen(self.prompt_tokens, np.int32))
        object.__setattr__(self, "tokens", _frozen(self.tokens, np.int32))
        object.__setattr__(self, "log_prob", _frozen(self.log_prob, np.float32))
        object.__setattr__(self, "policy_version", _frozen(self.policy_version, np.int32))
        object.__setattr__(self, "extra", {name: _frozen(array) for name, array in self.extra.items()})
        if not len(self.tokens) == len(self.log_prob) == len(self.policy_version):
            raise DataError(
                "a turn with one log-probability and one policy version per token",
                f"{len(self.tokens)} tokens, {len(self.log_prob)} log-probabilities, "
                f"{len(self.policy_version)} versions",
                "return arrays of equal length from the engine",
            )


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trajectory failed. Failed trajectories are recorded and counted, and not trained on."""

    side: str
    """What failed: `workflow`, `reward`, `engine`, `prompt`, `deadline`, or an `operator` of the pipeline."""
    kind: str
    """The error's class name."""
    message: str
    cause: str = ""
    """The exception of user code with function, file and line; empty if it raised none."""

    @property
    def of_rewards(self) -> bool:
        """Whether the rollout succeeded and only its rewards failed."""
        return self.side == "reward" or self.kind == "DeadlineExceeded"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of one task, recorded."""

    index: int
    """Position in the group."""
    turns: tuple[Turn, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Each reward component by name, weights already applied."""
    failure: Failure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the workflow; their means are logged under `workflow/`."""

    @property
    def reward(self) -> float:
        """The sum of the components."""
        return float(sum(self.rewards.values()))

    @property
    def stop_reason(self) -> StopReason:
        """How the last turn ended."""
        return self.turns[-1].stop_reason if self.turns else StopReason.ABORT

    @property
    def num_tokens(self) -> int:
        """Tokens the policy sampled."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def completion(self) -> str:
        """The text of the last turn, which reward functions get."""
        return self.turns[-1].text if self.turns else ""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to roll out one slot."""

    slot: int
    attempt: int = 0
    """Earlier attempts at the slot."""
    recorded: Group | None = field(default=None, compare=False, repr=False)
    """The group of an earlier session, if only its rewards failed: they are computed again."""


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task, rolled out for one slot."""

    slot: int
    """Negative for replayed and expert groups, which have no slot of the schedule."""
    task: Task
    trajectories: tuple[Trajectory, ...]
    epoch: int = 0
    attempt: int = 0
    """Earlier attempts at the slot."""
    version: int = 0
    """The policy version loaded when the lease was granted; no token was sampled by an older one."""
    greedy: Trajectory | None = None
    """A further rollout at temperature 0: a baseline for estimators that need one, never trained on."""
    dropped: str = ""
    """Why the experience pipeline dropped it; empty if it did not. A dropped group is journaled and never trained
    on."""
    _versions: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    """Cached (`oldest_version`, `newest_version`)."""

    def refused(self, why: str) -> Group:
        """The same group, dropped for this reason."""
        return replace(self, dropped=why)

    @property
    def group_id(self) -> str:
        return f"{self.task.taskset}/{self.task.task_id}/{self.epoch}"

    @property
    def expert(self) -> bool:
        """Whether its completions are from an expert: no reward is computed for them."""
        return self.oldest_version == EXPERT_VERSION

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any token: what staleness is measured from."""
        return self._sampled_by()[0]

    @property
    def newest_version(self) -> int:
        """The newest version that sampled any token."""
        return self._sampled_by()[1]

    def _sampled_by(self) -> tuple[int, int]:
        if self._versions is None:
            arrays = [turn.policy_version for turn in self.turns() if len(turn.policy_version)]
            versions = np.concatenate(arrays) if arrays else np.array([self.version])
            object.__setattr__(self, "_versions", (int(versions.min()), int(versions.max())))
        assert self._versions is not None
        return self._versions

    @property
    def rollouts(self) -> tuple[Trajectory, ...]:
        """The members, and the greedy rollout where there is one."""
        return self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)

    def turns(self) -> Iterator[Turn]:
        for trajectory in self.rollouts:
            yield from trajectory.turns

    @property
    def alive(self) -> tuple[Trajectory, ...]:
        """The members that did not fail."""
        return tuple(t for t in self.trajectories if t.failure is None)

    def member_rewards(self, component: str = "") -> list[float]:
        """The reward of each successful member: the total, or one component. Raises DataError if a member lacks it."""
        for member in self.alive if component else ():
            if component not in member.rewards:
                raise DataError(
                    f"the reward component {component!r}",
                    f"a trajectory of task {self.task.task_id!r} has {sorted(member.rewards) or 'none'}",
                    "name one of these components, or leave `component` out",
                )
        return [member.rewards[component] if component else member.reward for member in self.alive]


@dataclass(frozen=True, slots=True)
class Sample:
    """The groups of one train step, from a sample strategy."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Logged under `sample/`."""
    stored_slots: frozenset[int] = frozenset()
    """Slots of groups that are replayed or an expert's; metrics of the explorers leave them out."""


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
"""The per-token arrays of an experience."""


@dataclass(frozen=True, slots=True)
class Experience:
    """One trainable token sequence of length L."""

    tokens: IntArray
    response_mask: BoolArray
    """True where the token is trained on: sampled by the policy itself, or written by the expert."""
    rollout_log_prob: FloatArray
    """Log-probability under the distribution sampled from; 0 outside the mask."""
    policy_version: IntArray
    """Which weights sampled each token; `EXPERT_VERSION` elsewhere."""
    group_id: str
    index: int
    """The trajectory's position in its group. Several experiences may share it (history was rewritten)."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    stop_reason: StopReason = StopReason.EOS
    media: tuple[Media, ...] = ()
    """In order, each with its span in `tokens`."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns it is made of, in order; empty for an expert's sequence."""
    extra: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray])
    """Further arrays with leading axis L: teacher log-probabilities, routing, ..."""
    greedy_reward: float | None = None
    """The reward of the task's greedy rollout, where there is one."""

    def __post_init__(self) -> None:
        for name, dtype in _TOKEN_ARRAYS.items():
            object.__setattr__(self, name, _frozen(getattr(self, name), dtype))
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
                "response_mask[0] is true, but nothing precedes the first token to predict it from",
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

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """Experiences and per-token columns that were computed for them; ragged, never padded on the driver."""

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

    @property
    def lengths(self) -> list[int]:
        """(B,): the tokens of each experience, context included."""
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
        """(B,): the trained tokens of each experience."""
        return self._counted(self.flat("response_mask"))

    @property
    def experts(self) -> BoolArray:
        """(B,): whether an expert wrote any trained token of each experience."""
        return self._counted(self.flat("response_mask") & (self.flat("policy_version") == EXPERT_VERSION)) > 0

    def flat(self, name: str) -> AnyArray:
        """One of the arrays of all experiences, one after the other."""
        return np.concatenate([getattr(e, name) for e in self.experiences] or [np.empty(0, _TOKEN_ARRAYS[name])])

    def _counted(self, flags: BoolArray) -> npt.NDArray[np.int64]:
        """(B,): how many tokens of each experience have the flag."""
        before, ends = np.concatenate([[0], np.cumsum(flags)]), np.cumsum(self.lengths, dtype=np.int64)
        return np.diff(before[np.concatenate([[0], ends])])

    def with_columns(self, **columns: Sequence[npt.ArrayLike]) -> Batch:
        """The same experiences with further (or replaced) columns."""
        return replace(self, columns={**self.columns, **{name: _Column.of(a) for name, a in columns.items()}})

    def masked(self, masks: Sequence[BoolArray]) -> Batch:
        """The same experiences, trained only where these masks (one of length L each) are true as well."""
        kept = tuple(
            replace(e, response_mask=e.response_mask & mask) for e, mask in zip(self.experiences, masks, strict=True)
        )
        return replace(self, experiences=kept)

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """The experiences at these rows, in this order, with their columns."""
        chosen = [int(row) for row in rows]
        return Batch(
            tuple(self.experiences[row] for row in chosen),
            {name: _Column([arrays[row] for row in chosen]) for name, arrays in self.columns.items()},
        )


def experiences_of(group: Group, trajectory: Trajectory) -> tuple[Experience, ...]:
    """The trainable sequences of a trajectory: turns that extend one another are one experience.

    A turn whose context is exactly what came before, plus new tokens, continues the sequence (the new context tokens
    are masked out); a turn that rewrites history starts another. Nothing is re-encoded.
    """
    runs: list[list[tuple[int, Turn]]] = []
    for number, turn in enumerate(trajectory.turns):
        if runs and continues(turn, runs[-1][-1][1]):
            runs[-1].append((number, turn))
        else:
            runs.append([(number, turn)])
    return tuple(_join(turns, group, trajectory) for turns in runs)


def continues(turn: Turn, earlier: Turn) -> bool:
    """Whether a turn's context begins with an earlier turn: its prompt with the same media, and its completion."""
    known = len(earlier.prompt_tokens)
    both = known + len(earlier.tokens)
    return (
        both <= len(turn.prompt_tokens)
        and np.array_equal(turn.prompt_tokens[:known], earlier.prompt_tokens)
        and np.array_equal(turn.prompt_tokens[known:both], earlier.tokens)
        and turn.media[: len(earlier.media)] == earlier.media
        and all(item.span is None or item.span[0] >= both for item in turn.media[len(earlier.media) :])
    )


def _join(turns: Sequence[tuple[int, Turn]], group: Group, trajectory: Trajectory) -> Experience:
    """One experience from (number, turn) pairs of which each turn extends the one before."""
    last = turns[-1][1]
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
    return Experience(
        tokens=tokens,
        response_mask=mask,
        rollout_log_prob=log_prob,
        policy_version=version,
        group_id=group.group_id,
        index=trajectory.index,
        rewards=trajectory.rewards,
        stop_reason=last.stop_reason,
        media=last.media,
        turns=tuple(spans),
        extra=_joined_extra([turn for _, turn in turns], length),
        greedy_reward=group.greedy.reward if group.greedy is not None and group.greedy.failure is None else None,
    )


def _joined_extra(turns: Sequence[Turn], length: int) -> dict[str, AnyArray]:
    """The turns' extra arrays for a sequence of `length` tokens: per token the value recorded first, else 0."""
    joined: dict[str, AnyArray] = {}
    for turn in reversed(turns):
        stop = len(turn.prompt_tokens) + len(turn.tokens)
        for name, array in turn.extra.items():
            if f"{name}_count" in turn.extra:
                joined[name] = np.concatenate([array, joined.get(name, array[:0])])
                continue
            known = array.any(axis=tuple(range(1, array.ndim)))
            whole = joined.setdefault(name, np.zeros((length, *array.shape[1:]), array.dtype))
            whole[stop - len(array) : stop][known] = array[known]
    return joined


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a plugin can do. Its class, instance or function declares `capabilities = Capabilities(...)`; one that does
    not has the defaults. Each field concerns one kind of plugin."""

    # buffers
    explored: bool = True
    """Explorers fill it: it issues slots. False: it reads existing data."""
    recorded: bool = False
    """It replays groups that the policy of another run sampled, with log-probabilities and rewards."""
    shared: bool = False
    """Several processes can use it. Its class has `open_board(config, *, name)`, which opens the run's board in the
    same place, and `claim(config, *, name, run_dir)`, which reserves the name of a run or raises ConfigError."""
    # rewards
    remote: bool = False
    """It calls a server, so that its value for the same completion may change with time."""
    # sample strategies
    mixed: bool = False
    """A batch may mix experts' completions with the policy's."""
    judges: bool = False
    """It scores the groups of a step itself, so explorers need not."""
    # operators
    drops: bool = True
    """It may refuse groups."""
    # workflows
    gives_rewards: bool = True
    """It may return rewards itself. False: reward functions are required."""
    # weight channels
    local: bool = False
    """Both ends are in one process."""
    collective: bool = False
    """It sends a version to all explorers at once and keeps none."""
    uses_directory: bool = True
    """It keeps versions as files in `sync.dir`."""
    # rollout engines
    exact_sampling: bool = False
    """It samples with the per-position uniforms of a request's key."""
    batch_invariant: bool = False
    """Log-probabilities are independent of the rest of the batch, bit for bit."""
    exact_log_prob: bool = True
    """Its log-probabilities are the trainer's for the same weights, up to rounding. Where they are not, the correction
    `auto` weighs tokens even where groups are fresh."""
    updates_in_flight: bool = False
    """`load` can change the weights in the middle of completions."""
    adopts_adapters: bool = False
    """`load` takes a LoRA adapter in place of all weights."""
    extra: frozenset[str] = frozenset()
    """Further data that it can record of completions: names of `EXTRAS`."""
    adopts_weights: bool = True
    """It can load weights. False: its policy never changes, and `load` is an error."""
    # train engines
    multiple_ranks: bool = False
    """Several processes can train one model; its Config has `sequence_parallel` and `shard`."""

    @property
    def sampled(self) -> bool:
        """Whether a policy sampled the groups of the buffer, as opposed to expert data."""
        return self.explored or self.recorded


def capabilities_of(plugin: object) -> Capabilities:
    """What a plugin (class, instance or function) can do. Raises ConfigError for one that declares a field of
    Capabilities as an attribute of its own: it would have no effect."""
    declared = getattr(plugin, "capabilities", None)
    if declared is not None:
        return declared
    names = [field.name for field in fields(Capabilities) if isinstance(getattr(plugin, field.name, None), bool)]
    if names:
        values = ", ".join(f"{name}={getattr(plugin, name)}" for name in names)
        owner = plugin if isinstance(plugin, type | FunctionType) else type(plugin)
        raise ConfigError(
            f"what {owner.__name__} can do",
            f"the attribute {', '.join(names)}, which is not read",
            f"declare `capabilities = Capabilities({values})` (trivium.types)",
        )
    return Capabilities()
