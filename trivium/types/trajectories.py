"""The explorers' data: tasks, requests, completions, turns, trajectories and groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from trivium.foundation.errors import DataError
from trivium.foundation.randomness import SampleKey
from trivium.types.arrays import AnyArray, Columns, FloatArray, IntArray, frozen
from trivium.types.enums import StopReason

EXPERT_VERSION = -1
"""The policy version of tokens that the policy did not sample: expert and supervised data."""
SERVED = "served"
"""The taskset of tasks that agents send over HTTP (`run.mode: serve`), which are not in the schedule."""
EXTRAS = ("routing", "kept", "prompt_log_prob")
"""Data that an engine can record for a token beside its log-probability. `routing`, (layers, K) unsigned integers: one
plus the index of each of the K experts that the router of each layer chose for the token; 0: not known. `kept`: the
token ids that the token was sampled from, concatenated over tokens. The array `kept_count` comes with it: the number of
these ids for each token. If it is negative, the ids are those left out instead; 0 stands for the whole vocabulary.
`prompt_log_prob`, float32: the log-probability of a token of the prompt at temperature 1, without truncation; 0 for the
first token and for those of the completion."""
IMAGE = "<image>"
"""Marks the place of an image in the text of a message with images."""


@dataclass(frozen=True, slots=True)
class Media:
    """One image, clip or sound as encoded bytes; pixels are derived on each side.

    The sides are the rollout engine and the trainer: each decodes the bytes itself, so records hold no pixels.
    """

    mime: str
    data: bytes = field(repr=False, compare=False)
    span: tuple[int, int] | None = None
    """The range [start, end) of its tokens in the prompt: placeholders, and separators that some models add between
    them. None before the prompt is rendered."""
    sha256: str = ""
    """The hash of `data`; computed if it is not given."""

    def __post_init__(self) -> None:
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.data).hexdigest())

    def at(self, start: int, end: int) -> Media:
        """The same media with this span."""
        return replace(self, span=(start, end))


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: str
    """`system`, `developer`, `user`, `assistant`, `tool`, or `tools` for the first one, whose content is a JSON list of
    tools."""
    content: str
    """Text. In a message with media, each `<image>` is the place of one; without any, the media precede the text. The
    content of a completion that the policy wrote is its whole text, reasoning and calls included."""
    media: tuple[Media, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of an assistant's message in a row. The chat template writes them after the content."""
    reasoning: str | None = None
    """The reasoning of an assistant's message in a row. The chat template writes it before the content."""
    name: str = ""
    """The tool that a `tool` message is the result of; empty: the one of its call."""
    call: int | None = None
    """The number of the call that a `tool` message answers, in the assistant's message before it; None: in order."""

    def entry(self) -> dict[str, Any]:
        """Role and content, and of the other fields those that are set, as JSON values; not the media."""
        more: dict[str, Any] = {
            "tool_calls": [call._asdict() for call in self.tool_calls],
            "reasoning": self.reasoning,
            "name": self.name,
            "call": self.call,
        }
        return {"role": self.role, "content": self.content} | {k: v for k, v in more.items() if v not in (None, "", [])}

    @classmethod
    def of(cls, entry: Mapping[str, Any], media: tuple[Media, ...] = ()) -> Message:
        """The inverse of `entry`."""
        calls = tuple(ToolCall(**call) for call in entry.get("tool_calls", ()))
        more = {name: entry[name] for name in ("reasoning", "name", "call") if name in entry}
        return cls(entry["role"], entry["content"], media, calls, **more)


def openai_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What each message has beside role and content, as OpenAI's Chat Completions writes it. The n-th call of a
    conversation has the id `call0000n`: nine characters, as Mistral's templates ask for."""
    parts: list[dict[str, Any]] = []
    calls: list[tuple[str, str]] = []
    number = answered = 0
    for message in messages:
        more: dict[str, Any] = {}
        if message.role == "assistant":
            calls = [(f"call{number + n:05d}", call.name) for n, call in enumerate(message.tool_calls)]
            number, answered = number + len(calls), 0
            if calls:
                functions = [call._asdict() for call in message.tool_calls]
                more["tool_calls"] = [
                    {"id": label, "type": "function", "function": function}
                    for (label, _), function in zip(calls, functions, strict=True)
                ]
            if message.reasoning is not None:
                more["reasoning_content"] = message.reasoning
        elif message.role == "tool":
            place = answered if message.call is None else message.call
            label, name = calls[place] if place < len(calls) else (f"call{number:05d}", "")
            number, answered = number + (place >= len(calls)), answered + 1
            more = {"tool_call_id": label} | ({"name": message.name or name} if message.name or name else {})
        parts.append(more)
    return parts


def with_system(messages: tuple[Message, ...], system: str) -> tuple[Message, ...]:
    """Adds a system message to the conversation unless it has one. A `tools` message stays first."""
    if messages[0].role == "tools":
        return (messages[0], *with_system(messages[1:], system)) if messages[1:] else messages
    return messages if messages[0].role == "system" else (Message("system", system), *messages)


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
    """Sampling parameters. `temperature` 0 samples greedily, with log-probabilities of 0 by definition."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep the tokens with at least this fraction of the highest token probability; 0 keeps all."""
    min_new_tokens: int = 0
    """End-of-sequence is impossible before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn. The turn includes the token that completes the string."""
    extra: tuple[str, ...] = ()
    """Further data to record for each completion: names in `EXTRAS`."""
    stop_tokens: tuple[int, ...] | None = None
    """Tokens that end a turn; None: the model's ends of turn."""

    def ends(self, eos: frozenset[int]) -> frozenset[int]:
        """The tokens that end a turn of a model whose ends of turn are `eos`."""
        return eos if self.stop_tokens is None else frozenset(self.stop_tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. Read-only."""

    tokens: IntArray
    media: tuple[Media, ...] = ()
    """The media of all messages, in order, each with its span in `tokens`."""
    unexpanded: IntArray = field(default=None, repr=False)  # type: ignore[assignment]  # `tokens` without media
    """The tokens with one placeholder for each of the media: the input of an engine that has its own processor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", frozen(self.tokens, np.int32))
        plain = cast("IntArray | None", self.unexpanded)
        object.__setattr__(self, "unexpanded", self.tokens if plain is None else frozen(plain, np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def then(self, other: Prompt) -> Prompt:
        """This prompt followed by `other`."""
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
    """`Prompt.unexpanded`; None if the prompt has no media."""
    messages: tuple[Message, ...] = field(default=(), repr=False)
    """The conversation that the prompt was rendered from, for engines that render it themselves."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The output of an engine for a request. All arrays have one entry per sampled token."""

    tokens: IntArray
    log_prob: FloatArray
    """Log-probability under the sampling distribution, with temperature and truncation applied."""
    policy_version: IntArray
    """The version of the weights that sampled each token."""
    stop_reason: StopReason
    text: str | None = None
    """The text, if the engine returns text. None means that the tokens must be decoded."""
    extra: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray], repr=False)
    """The arrays named by `Sampling.extra`. Their rows belong to the last tokens of the prompt followed by the
    completion."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", frozen(self.tokens, np.int32))
        object.__setattr__(self, "log_prob", frozen(self.log_prob, np.float32))
        object.__setattr__(self, "policy_version", frozen(self.policy_version, np.int32))
        object.__setattr__(self, "extra", {name: frozen(array) for name, array in self.extra.items()})


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of the policy with its exact context."""

    prompt_tokens: IntArray
    tokens: IntArray
    log_prob: FloatArray
    policy_version: IntArray
    stop_reason: StopReason
    text: str
    """The decoded completion without ends of turn and padding, for logs, rewards and environments. It is never encoded
    again."""
    media: tuple[Media, ...] = ()
    """The media of the prompt, in order, each with its span in `prompt_tokens`."""
    reward: float = 0.0
    """The environment's reward for this turn, for step-wise estimators. It is part of the trajectory's reward."""
    state: str = ""
    """Identifies the environment's state before the turn: equal states have equal strings. Empty if unknown."""
    participant: str = ""
    """The fork of the policy that sampled it (`Policy.fork`); empty for the policy itself."""
    extra: Mapping[str, AnyArray] = field(default_factory=dict[str, AnyArray], repr=False)
    """See `Completion.extra`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", frozen(self.prompt_tokens, np.int32))
        object.__setattr__(self, "tokens", frozen(self.tokens, np.int32))
        object.__setattr__(self, "log_prob", frozen(self.log_prob, np.float32))
        object.__setattr__(self, "policy_version", frozen(self.policy_version, np.int32))
        object.__setattr__(self, "extra", {name: frozen(array) for name, array in self.extra.items()})
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
    """The failed part: `workflow`, `reward`, `engine`, `prompt`, `deadline`, or an `operator` of the pipeline."""
    kind: str
    """The error's class name."""
    message: str
    cause: str = ""
    """The exception from user code with function, file and line; empty if user code raised none."""

    @property
    def of_rewards(self) -> bool:
        """Whether the rollout succeeded and only its rewards failed."""
        # In an explorer, `DeadlineExceeded` is the deadline of a reward. That of a workflow is a `TimeoutError`.
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
    """Metrics of the workflow; their means are logged under `workflow/`, except those that
    Trivium measures itself, such as `perf/engine_s`."""
    feedback: str = ""
    """What the environment reports after the end of the rollout (`Policy.feedback`), which the policy has not read."""

    @property
    def reward(self) -> float:
        """The sum of the components."""
        return float(sum(self.rewards.values()))

    @property
    def participants(self) -> frozenset[str]:
        """The participants that have rewards of their own: a component has the participant's name, or begins with this
        name and a slash (`proposer/novelty`). The other components belong to every participant."""
        owners = {name.partition("/")[0] for name in self.rewards}
        return frozenset(turn.participant for turn in self.turns if turn.participant in owners)

    def rewards_of(self, participant: str) -> Mapping[str, float]:
        """The components of a participant's reward: its own, and those that belong to every participant."""
        others = self.participants - {participant}
        return {name: reward for name, reward in self.rewards.items() if name.partition("/")[0] not in others}

    @property
    def stop_reason(self) -> StopReason:
        """How the last turn ended."""
        return self.turns[-1].stop_reason if self.turns else StopReason.ABORT

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
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
    """The number of earlier attempts at the slot."""
    recorded: Group | None = field(default=None, compare=False, repr=False)
    """The group of an earlier session if only its rewards failed. The rewards are computed again."""


Draws = Sequence[tuple[int, Sequence[int]]]
"""What a curriculum drew: (first slot, places of the tasks of the slots from there on), in order; JSON values."""


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task, rolled out for one slot."""

    slot: int
    """Negative for replayed and expert groups, which have no slot of the schedule."""
    task: Task
    trajectories: tuple[Trajectory, ...]
    epoch: int = 0
    attempt: int = 0
    """The number of earlier attempts at the slot."""
    version: int = 0
    """The policy version loaded when the lease was granted. No older version sampled a token."""
    greedy: Trajectory | None = None
    """An additional rollout at temperature 0: a baseline for estimators that need one, never trained on."""
    dropped: str = ""
    """The reason why the experience pipeline dropped it; empty otherwise. A dropped group is journaled and never
    trained on."""
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
        """Whether its completions are from an expert. They have no rewards."""
        return self.oldest_version == EXPERT_VERSION

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any token. Staleness is measured from it."""
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
        """The members, and the greedy rollout if there is one."""
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
    """Slots of replayed groups and expert groups, which the explorers' metrics leave out."""
