"""Conversations as clients send them: the whole history every time. Each reply is found again by the text it ended.

A session is one trajectory. Its replies form trees: a call whose messages begin with what the policy was told and said
goes on from those very tokens; anything else starts a new tree. Two calls may go on from one reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivium.types import Failure, Message, Trajectory, Turn

if TYPE_CHECKING:
    from trivium.policy import Policy
    from trivium.serving.groups import OpenGroup
    from trivium.types import Sampling

Conversation = tuple[Message, ...]


def digest(messages: Sequence[Message]) -> str:
    """A short name for messages: equal for equal ones, on every machine."""
    text = json.dumps([[message.role, message.content] for message in messages])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(eq=False)
class Reply:
    """One reply of the policy and what it was made of."""

    id: str
    session: Session
    policy: Policy
    """The policy as it was right after this reply: what goes on from here branches off it."""
    turn: Turn
    said: Conversation
    """The conversation as the client knows it, this reply last."""
    order: int
    """Counts the replies of a session."""
    later: list[Reply] = field(default_factory=list["Reply"])
    """Replies that go on from this one."""
    continued: Counter[str] = field(default_factory=Counter[str])
    """How often a call went on from here, by the digest of what it added."""

    @property
    def last(self) -> int:
        """The order of the newest reply from here on."""
        return max((reply.last for reply in self.later), default=self.order)

    def turns(self) -> Iterator[Turn]:
        """This turn and all that go on from it, depth first, where the newest reply is the last."""
        yield self.turn
        for reply in sorted(self.later, key=lambda reply: reply.last):
            yield from reply.turns()


class Index:
    """Finds the reply that messages go on from."""

    def __init__(self) -> None:
        self._found: dict[Conversation, list[Reply]] = {}

    def add(self, reply: Reply) -> None:
        self._found.setdefault(reply.said, []).append(reply)

    def remove(self, reply: Reply) -> None:
        found = self._found[reply.said]
        found.remove(reply)
        if not found:
            del self._found[reply.said]

    def find(self, messages: Conversation, fits: Callable[[Reply], bool]) -> Reply | None:
        """The reply at the end of the longest known beginning of `messages`.

        Of several with the same text, the newest that nobody went on from yet, else the newest.
        """
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1].role != "assistant":
                continue
            found = [reply for reply in self._found.get(messages[:length], ()) if fits(reply)]
            if found:
                return next((reply for reply in reversed(found) if not reply.continued), found[-1])
        return None


@dataclass(eq=False)
class Session:
    """One playing of one task by an agent."""

    label: tuple[bool, str, str] | None
    """(evaluation, task id, session) as the client says them; None for one that is known by its texts."""
    task_id: str
    index: Index
    group: OpenGroup | None
    """None for an evaluation."""
    touched: float
    """When it was last heard of, by the monotonic clock."""
    name: str = ""
    """Part of the address of its randomness; for a session without a label made from slot and seat."""
    policy: Policy | None = None
    """The policy before anything was said; there once the group has its slot."""
    first: Conversation = ()
    """What the policy was told first."""
    started: float | None = None
    """When its first call got through."""
    trees: list[Reply] = field(default_factory=list[Reply])
    replies: list[Reply] = field(default_factory=list[Reply])
    begun: Counter[str] = field(default_factory=Counter[str])
    """How often a conversation began, by the digest of its messages."""
    calls: int = 0
    """Calls that have not been answered yet."""
    speaking: set[asyncio.Task[Turn]] = field(default_factory=set[asyncio.Task[Turn]])
    over: tuple[int, str] | None = None
    """(HTTP status, why) for whoever still asks, once the trajectory is over."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None

    def speaker(self, parent: Reply | None, new: Conversation, sampling: Sampling) -> Policy:
        """A policy for one reply. Its randomness is addressed by what is said, not by the order of arrival: equal
        calls are told apart by their number."""
        counter = self.begun if parent is None else parent.continued
        name = digest(new)
        number, counter[name] = counter[name], counter[name] + 1
        start = self.policy if parent is None else parent.policy
        assert start is not None
        return start.branch(f"{name}.{number}", sampling)

    def record(self, reply: Reply, parent: Reply | None) -> None:
        self.replies.append(reply)
        (self.trees if parent is None else parent.later).append(reply)
        self.index.add(reply)

    def end(self, status: int, why: str) -> None:
        """The trajectory is over; replies in progress are called off, later calls are told why."""
        self.over = (status, why)
        for reply in self.replies:
            self.index.remove(reply)
        for speaking in self.speaking:
            speaking.cancel()

    def trajectory(self, index: int) -> Trajectory:
        """The record, every conversation in one piece, the one that spoke last at the end."""
        trees = sorted(self.trees, key=lambda tree: tree.last)
        turns = tuple(turn for tree in trees for turn in tree.turns())
        return Trajectory(index, turns, self.rewards, self.failure)

    def forget(self) -> None:
        """Frees what was said, once it is recorded or has no use."""
        self.trees, self.replies, self.policy, self.group = [], [], None, None


def shown(turn: Turn, stop: Sequence[str]) -> str:
    """What the client reads of a turn: its text up to the stop string that ended it."""
    ends = [at for text in stop if (at := turn.text.find(text)) >= 0]
    return turn.text[: min(ends)] if ends and turn.stop_reason.value == "stop" else turn.text


def agreed(known: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first column on which the two disagree."""
    return next((name for name, value in new.items() if name in known and known[name] != value), None)
