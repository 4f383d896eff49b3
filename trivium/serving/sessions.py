"""Sessions of agents and the completions in them.

A session is one rollout of one task. Clients send the whole conversation with every call, so a completion is found
again by the conversation that it ended. The completions of a session form trees: a call whose messages begin with a
known conversation continues from exactly its tokens; any other call starts a new tree. Two calls may continue from one
completion.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trivium.policy import Policy
from trivium.types import Failure, Lease, Message, Sampling, StopReason, Trajectory, Turn

Conversation = tuple[Message, ...]
Label = tuple[bool, str, str]
"""(evaluation, task id, session), as the client names them."""


def digest(messages: Sequence[Message]) -> str:
    """A short name for messages: equal for equal ones, on every machine."""
    text = json.dumps([[m.role, m.content, *(item.sha256 for item in m.media)] for m in messages])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Slot:
    """A lease and the version that was loaded when it was granted."""

    lease: Lease
    version: int


@dataclass(eq=False)
class OpenGroup:
    """The sessions of one task that become a Group once enough of them have had their feedback."""

    task_id: str
    slot: asyncio.Future[Slot]
    """Set once the buffer admits the group."""
    touched: float
    """When it last changed, by the monotonic clock."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Columns of the task that agents sent, for reward functions."""
    active: list[Session] = field(default_factory=list["Session"])
    """Sessions in progress."""
    done: list[Session] = field(default_factory=list["Session"])
    """Sessions that ended with feedback or a failure."""
    num_sessions: int = 0
    """Sessions that ever joined: numbers them."""

    @property
    def sessions(self) -> list[Session]:
        return [*self.active, *self.done]

    @property
    def size(self) -> int:
        return len(self.active) + len(self.done)


@dataclass(eq=False)
class CompletionNode:
    """One completion of the policy in the tree of its session."""

    id: str
    session: Session
    policy: Policy
    """The policy right after this completion: continuations branch off it."""
    turn: Turn
    conversation: Conversation
    """The conversation as the client knows it, this completion last."""
    order: int
    """Position among the completions of the session."""
    parent: CompletionNode | None = None
    """The completion that this one continues from."""
    children: list[CompletionNode] = field(default_factory=list["CompletionNode"])
    """Completions that continue from this one."""
    calls: Counter[str] = field(default_factory=Counter[str])
    """How often a call continued from here, by the digest of the messages it added."""

    newest: int = 0
    """The order of the newest completion in this subtree."""

    def turns(self) -> Iterator[Turn]:
        """The turns of this subtree, depth first, the branch with the newest completion last."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node.turn
            waiting += sorted(node.children, key=lambda child: -child.newest)


class ConversationIndex:
    """Finds the completion that messages continue from."""

    def __init__(self) -> None:
        self._nodes: dict[Conversation, list[CompletionNode]] = {}

    def add(self, node: CompletionNode) -> None:
        self._nodes.setdefault(node.conversation, []).append(node)

    def remove(self, node: CompletionNode) -> None:
        nodes = self._nodes[node.conversation]
        nodes.remove(node)
        if not nodes:
            del self._nodes[node.conversation]

    def find(self, messages: Conversation, matches: Callable[[CompletionNode], bool]) -> CompletionNode | None:
        """The completion at the end of the longest known beginning of `messages`.

        Of several with the same text, the newest that no call continued from yet, else the newest.
        """
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1].role != "assistant":
                continue
            nodes = [node for node in self._nodes.get(messages[:length], ()) if matches(node)]
            if nodes:
                return next((node for node in reversed(nodes) if not node.calls), nodes[-1])
        return None


@dataclass(eq=False)
class Session:
    """One rollout of one task by an agent."""

    label: Label | None
    """None for a session that is known by its conversation alone."""
    task_id: str
    index: ConversationIndex
    group: OpenGroup | None
    """None for an evaluation."""
    touched: float
    """When the last call began or ended, by the monotonic clock."""
    prompt: Conversation = ()
    """The messages of the first call."""
    secret: str = ""
    """What every later request about the session has to present, where its first call had it."""
    name: str = ""
    """Part of the address of its randomness; without a label it is made from the slot and the place in the group."""
    policy: Policy | None = None
    """The policy at the start of the session; set once the group has its slot."""
    started: float | None = None
    """When the first call was admitted, by the monotonic clock."""
    trees: list[CompletionNode] = field(default_factory=list[CompletionNode])
    completions: list[CompletionNode] = field(default_factory=list[CompletionNode])
    starts: Counter[str] = field(default_factory=Counter[str])
    """How often a conversation began, by the digest of its messages."""
    calls: int = 0
    """Calls in progress."""
    generating: set[asyncio.Task[Turn]] = field(default_factory=set[asyncio.Task[Turn]])
    ended: tuple[int, str] | None = None
    """(HTTP status, reason) for later calls, once the session has ended."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None

    def branch(self, parent: CompletionNode | None, new: Conversation, sampling: Sampling) -> Policy:
        """A policy for one completion. Its randomness is addressed by the messages, not by the order of arrival; equal
        calls are numbered."""
        counter = self.starts if parent is None else parent.calls
        name = digest(new)
        number, counter[name] = counter[name], counter[name] + 1
        start = self.policy if parent is None else parent.policy
        assert start is not None
        return start.branch(f"{name}.{number}", sampling)

    def record(self, node: CompletionNode) -> None:
        self.completions.append(node)
        (self.trees if node.parent is None else node.parent.children).append(node)
        self.index.add(node)
        above: CompletionNode | None = node
        while above is not None:
            above.newest, above = node.order, above.parent

    def end(self, status: int, reason: str) -> None:
        """Ends the session: completions in progress are cancelled, later calls get `status` and `reason`."""
        self.ended = (status, reason)
        for node in self.completions:
            self.index.remove(node)
        for task in self.generating:
            task.cancel()

    def trajectory(self, index: int) -> Trajectory:
        """The record: each conversation in one piece, the one with the newest completion last."""
        trees = sorted(self.trees, key=lambda tree: tree.newest)
        turns = tuple(turn for tree in trees for turn in tree.turns())
        return Trajectory(index, turns, self.rewards, self.failure)

    def clear(self) -> None:
        """Frees the completions, once they are recorded or dropped."""
        self.trees, self.completions, self.policy, self.group = [], [], None, None


class IdleLimits(NamedTuple):
    """How long a session may be without a call, in seconds."""

    idle_s: float
    unstarted_idle_s: float
    """The limit of a session that has had one call: it may have been no agent's."""

    def of(self, session: Session) -> tuple[float, str]:
        """The limit of a session, and the config key that sets it."""
        if len(session.completions) > 1 or self.idle_s <= self.unstarted_idle_s:
            return self.idle_s, "serve.idle_s"
        return self.unstarted_idle_s, "serve.unstarted_idle_s"


class SessionStore:
    """The sessions of a gateway, by label, by conversation and by the ids of their completions."""

    def __init__(self) -> None:
        self.active: dict[Session, None] = {}
        self._labelled: dict[Label, Session] = {}
        """Includes ended sessions for a while: later calls are told why they ended."""
        self._by_conversation = {False: ConversationIndex(), True: ConversationIndex()}
        """Sessions without a label, of training and of evaluation."""
        self._by_completion: dict[str, Session] = {}
        self._ended: deque[tuple[float, Session, tuple[str, ...]]] = deque()
        """(when it ended, session, ids of its completions), oldest first."""

    def index(self, label: Label | None, evaluation: bool) -> ConversationIndex:
        """The index for a new session: one of its own where it has a label, else the common one."""
        return self._by_conversation[evaluation] if label is None else ConversationIndex()

    def add(self, session: Session) -> None:
        if session.label is not None:
            self._labelled[session.label] = session
        self.active[session] = None

    def record(self, node: CompletionNode) -> None:
        node.session.record(node)
        self._by_completion[node.id] = node.session

    def labelled(self, label: Label) -> Session | None:
        return self._labelled.get(label)

    def of_completion(self, completion_id: str) -> Session | None:
        return self._by_completion.get(completion_id)

    def find(self, messages: Conversation, evaluation: bool, task_id: str, secret: str) -> CompletionNode | None:
        """The completion of a session without a label that `messages` continue from; `task_id` may be empty."""

        def matches(node: CompletionNode) -> bool:
            session = node.session
            return same_secret(session, secret) and (not task_id or session.task_id == task_id)

        return self._by_conversation[evaluation].find(messages, matches)

    def remove(self, session: Session) -> None:
        """Removes a session without completions, as if it had never been."""
        del self.active[session]
        if session.label is not None:
            del self._labelled[session.label]

    def end(self, session: Session, status: int, reason: str, now: float) -> None:
        """Ends an active session; it stays known until it expires."""
        ids = tuple(node.id for node in session.completions)
        session.end(status, reason)
        del self.active[session]
        self._ended.append((now, session, ids))

    def expire(self, before: float) -> None:
        """Forgets the sessions that ended before that time."""
        while self._ended and self._ended[0][0] < before:
            _, session, ids = self._ended.popleft()
            for completion_id in ids:
                del self._by_completion[completion_id]
            if session.label is not None:
                del self._labelled[session.label]


def same_secret(session: Session, secret: str) -> bool:
    """Whether this is the secret that the session began with."""
    return hmac.compare_digest(session.secret.encode(), secret.encode())


def visible_text(turn: Turn, stop: Sequence[str]) -> str:
    """The text of a turn up to the stop string that ended it: what the client reads."""
    ends = [at for text in stop if (at := turn.text.find(text)) >= 0]
    return turn.text[: min(ends)] if ends and turn.stop_reason is StopReason.STOP else turn.text


def conflicting_column(known: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first column on which the two disagree."""
    return next((name for name, value in new.items() if name in known and known[name] != value), None)
