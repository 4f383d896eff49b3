"""What the server records of agents: completions, the sessions that they are in, and the groups of these sessions.

Clients send the whole conversation with every call, so the server finds a completion again by the conversation that
ends with it. The completions of a session form trees: a call whose messages begin with a known conversation continues
from exactly its tokens; any other call starts a new tree. Two calls may continue from one completion.

These are values: `trivium.serving.sessions.Sessions` begins sessions and ends them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trivium.policy import Policy
from trivium.serving.bodies import RequestError, bad_request
from trivium.serving.completion_parts import Written, edit_of
from trivium.serving.group_slots import Slot
from trivium.serving.requests import ChatRequest, Feedback, Row
from trivium.text.tool_formats import CallableTools
from trivium.text.tools import TOOLS
from trivium.types import Failure, IntArray, Message, Sampling, StopReason, Trajectory, Turn

Conversation = tuple[Message, ...]
Label = tuple[bool, str, str]
"""(evaluation, task id, session), as the client names them."""

GroupKey = tuple[str, tuple[str, int] | None]
"""What the sessions of a group share: the task id and, if they have rows, (taskset, epoch)."""


def digest(messages: Sequence[Message], tokens: IntArray | None = None) -> str:
    """A short name for messages, or for the tokens that they are rendered to. Equal ones have equal names on every
    machine."""
    parts = [[m.role, m.content, *(item.sha256 for item in m.media)] for m in messages]
    text = json.dumps(parts if tokens is None else tokens.tolist())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(eq=False)
class OpenGroup:
    """The sessions of one task that become a Group once enough of them have feedback."""

    key: GroupKey
    slot: asyncio.Future[Slot]
    """Set once the buffer admits the group."""
    touched: float
    """When it last changed, by the monotonic clock."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Columns of the task that agents sent, for reward functions."""
    active: list[Session] = field(default_factory=list["Session"])
    """Sessions in progress."""
    finished: list[Session] = field(default_factory=list["Session"])
    """Sessions that ended with feedback or a failure."""
    num_sessions: int = 0
    """Sessions that have joined so far. Numbers them."""

    @property
    def task_id(self) -> str:
        return self.key[0]

    @property
    def sessions(self) -> list[Session]:
        return [*self.active, *self.finished]


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
    order: int = 0
    """Position among the completions of the session, once it is recorded."""
    parent: CompletionNode | None = None
    """The completion that this one continues from."""
    children: list[CompletionNode] = field(default_factory=list["CompletionNode"])
    """Completions that continue from this one."""
    reasoning_open: bool = False
    """Whether the prompt ends with an open `<think>` block."""
    instructions: bool = False
    """Whether the conversation's system message holds for this call only (`ChatRequest.instructions`)."""
    calls: Counter[str] = field(default_factory=Counter[str])
    """How often a call continued from here, by the digest of the messages it added."""

    newest: int = 0
    """The order of the newest completion in this subtree."""

    @property
    def sequence(self) -> IntArray:
        """The tokens of prompt and completion."""
        return np.concatenate([self.turn.prompt_tokens, self.turn.tokens])

    def begins(self, request: ChatRequest) -> bool:
        """Whether the request continues from this completion."""
        if request.tokens is not None:
            return np.array_equal(request.tokens[: len(self.sequence)], self.sequence)
        return request.messages[: len(self.conversation)] == self.conversation

    def turns(self) -> Iterator[Turn]:
        """The turns of this subtree, depth first, the branch with the newest completion last."""
        stack = [self]  # the branch with the newest completion is at its bottom
        while stack:
            node = stack.pop()
            yield node.turn
            stack += sorted(node.children, key=lambda child: -child.newest)


@dataclass(eq=False)
class Session:
    """One rollout of one task by an agent."""

    label: Label | None
    """None for a session that is known by its conversation alone."""
    task_id: str
    group: OpenGroup | None
    """None for an evaluation."""
    touched: float
    """When the last call began or ended, by the monotonic clock."""
    prompt: Conversation = ()
    """The messages of the first call."""
    secret: str = ""
    """The secret of the first call, which every later request about the session must present; empty: none."""
    name: str = ""
    """Part of the address of its randomness. Without a label, made from the slot and the place in the group."""
    row: Row | None = None
    """The row of a taskset that the session rolls out, with its random numbers."""
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

    def branch(
        self, parent: CompletionNode | None, new: Conversation, sampling: Sampling, tokens: IntArray | None = None
    ) -> Policy:
        """A policy for one completion. The address of its randomness contains the messages (or the new tokens of a
        prompt that the client has rendered), not the order of arrival; equal calls are numbered. The completions of a
        row are numbered in the order in which their prompts are accepted, as those of a workflow."""
        counter = self.starts if parent is None else parent.calls
        name = digest(new, tokens)
        number, counter[name] = counter[name], counter[name] + 1
        start = self.policy if parent is None else parent.policy
        assert start is not None
        return start.branch(f"{name}.{number}" if self.row is None else None, sampling)

    async def until_end(self, generation: Coroutine[Any, Any, Turn]) -> Turn:
        """The turn of a generation, which the end of the session cancels. Raises RequestError if the session ends."""
        task = asyncio.ensure_future(generation)
        self.generating.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if not is_cancelled():
                self.check_active("roll the task out again")
            raise
        finally:
            task.cancel()
            self.generating.discard(task)

    def rewriting(self, conversation: Conversation, num_known: int, tools: CallableTools) -> str:
        """Describes how a call rewrites the history of this session; empty if it does not. The call continues from the
        first `num_known` messages of its conversation.

        A call rewrites history if it sends a completion back changed, or unchanged after changed messages. The policy
        then continues from other tokens than it sampled, and training sees two sequences in place of one.
        """
        replies = {
            at: message for at, message in enumerate(conversation) if at >= num_known and message.role == "assistant"
        }
        if not replies or not self.completions:
            return ""
        hidden = int(conversation[0].role == TOOLS)  # agents send tools beside the messages
        for node in self.completions:
            *before, completion = node.conversation
            returned = replies.get(len(before))
            if returned is not None and returned != completion and conversation[: len(before)] == tuple(before):
                edit = edit_of(Written(completion.content, node.reasoning_open), returned.content, tools)
                return f"message {len(before) - hidden} is a completion of the policy, and {edit}"
        sent_back = {message.content for message in replies.values()}
        if not any(node.conversation[-1].content in sent_back for node in self.completions):
            return ""  # another conversation, with messages that the policy did not write
        at = max(_num_equal(conversation, node.conversation) for node in self.completions)
        if at == len(conversation):
            return ""  # an earlier prompt once more, with a message of another that the policy also wrote
        return (
            f"message {at - hidden} ({conversation[at].role}) was another or is gone; agents that summarise or "
            "drop turns, or put the time into a prompt, do this"
        )

    def record(self, node: CompletionNode) -> None:
        """Adds a completion to its tree."""
        node.order = len(self.completions)
        self.completions.append(node)
        (self.trees if node.parent is None else node.parent.children).append(node)
        ancestor: CompletionNode | None = node
        while ancestor is not None:
            ancestor.newest, ancestor = node.order, ancestor.parent

    def trajectory(self, index: int) -> Trajectory:
        """The record: each conversation in one piece, the one with the newest completion last."""
        trees = sorted(self.trees, key=lambda tree: tree.newest)
        turns = tuple(turn for tree in trees for turn in tree.turns())
        return Trajectory(index, turns, self.rewards, self.failure)

    @property
    def names(self) -> list[Label | str]:
        """What clients name it with: its label, and the ids of its completions."""
        labels: list[Label | str] = [] if self.label is None else [self.label]
        return labels + [node.id for node in self.completions]

    def node(self, completion_id: str) -> CompletionNode | None:
        """Its completion with this id; None if it has none, or if they were freed."""
        return next((node for node in self.completions if node.id == completion_id), None)

    def clear(self) -> None:
        """Frees the completions, once they are recorded or dropped."""
        self.trees, self.completions, self.policy, self.group = [], [], None, None

    def has_secret(self, secret: str) -> bool:
        """Whether the session began with this secret."""
        # In constant time: the time of an answer must not tell an agent how much of another's secret is right.
        return hmac.compare_digest(self.secret.encode(), secret.encode())

    def check_secret(self, secret: str) -> None:
        """Raises RequestError if the session began with another secret."""
        if not self.has_secret(secret):
            raise RequestError(
                403,
                f"session {self.name!r}",
                "the secret of this request differs from that of its first call",
                "send the `secret` of its first call",
                param="secret",
                code="wrong_secret",
            )

    def check_row(self, row: Row | None) -> None:
        """Raises RequestError if a request names a row that is not the session's."""
        if row not in (None, self.row):
            raise bad_request(
                "row",
                f"{row} in session {self.name!r}",
                f"it began with {self.row or 'no row'}",
                "send the row of the first call in every request about a session",
            )

    def check_active(self, do: str) -> None:
        """Raises RequestError if the session has ended; `do` says what the client can do."""
        if self.ended is not None:
            status, reason = self.ended
            raise RequestError(status, f"session {self.name!r}", f"it has ended: {reason}", do, code="session_over")

    def check_feedback(self, feedback: Feedback) -> None:
        """Raises RequestError if the feedback cannot end this session."""
        self.check_secret(feedback.secret)
        self.check_row(feedback.row)
        self.check_active("a trajectory has feedback once")
        if self.group is None:
            raise RequestError(400, "feedback for an evaluation", "nothing is trained on it", "leave `evaluation` out")
        if self.calls or not self.completions:
            raise RequestError(
                409,
                f"feedback for session {self.name!r}",
                f"{self.calls} call(s) are still in progress",
                "wait for the completions first",
                code="in_progress",
            )


class SessionIndex:
    """Sessions by label, and completions by id, by conversation and by tokens.

    A session that has ended keeps its label and the ids of its completions until `forget`: later calls learn why it
    ended. No conversation continues it.
    """

    def __init__(self) -> None:
        self._named: dict[Label | str, Session] = {}
        """By label and by the ids of completions."""
        self._nodes: dict[Conversation | bytes, list[CompletionNode]] = {}
        """The completions of active sessions, oldest first, by conversation and by the hash of prompt and
        completion."""
        self._lengths: Counter[int] = Counter()
        """The number of tokens of a prompt and its completion in active sessions -> how many have it."""

    def add(self, session: Session) -> None:
        """Adds a session that begins."""
        if session.label is not None:
            self._named[session.label] = session

    def record(self, node: CompletionNode) -> None:
        """Adds a completion of an active session."""
        self._named[node.id] = node.session
        for key in _keys(node):
            self._nodes.setdefault(key, []).append(node)
        self._lengths[len(node.sequence)] += 1

    def end(self, session: Session) -> None:
        """Removes the conversations of a session."""
        for node in session.completions:
            for key in _keys(node):
                self._nodes[key].remove(node)
                if not self._nodes[key]:
                    del self._nodes[key]
            length = len(node.sequence)
            self._lengths[length] -= 1
            if not self._lengths[length]:  # `find` hashes the prompt of each request at each of these lengths
                del self._lengths[length]

    def forget(self, names: Iterable[Label | str]) -> None:
        """Removes the names of a session (`Session.names`)."""
        for name in names:
            del self._named[name]

    def labelled(self, label: Label) -> Session | None:
        return self._named.get(label)

    def of_completion(self, completion_id: str) -> Session:
        """The session of a completion. Raises RequestError if the completion is unknown."""
        session = self._named.get(completion_id)
        if session is None:
            raise unknown_error(f"the completion {completion_id!r}")
        return session

    def node_of(self, completion_id: str) -> CompletionNode:
        """A completion of a session in progress. Raises RequestError if it is unknown."""
        node = self.of_completion(completion_id).node(completion_id)
        if node is None:
            raise unknown_error(f"the completion {completion_id!r}")
        return node

    def text_of(self, completion_id: str) -> Written | None:
        """A completion as its client knows it, or None if the completion is unknown."""
        session = self._named.get(completion_id)
        node = None if session is None else session.node(completion_id)
        return None if node is None else Written(node.conversation[-1].content, node.reasoning_open)

    def find(self, request: ChatRequest, belongs: Callable[[Session], bool]) -> CompletionNode | None:
        """The completion that ends the longest known beginning of the messages or of the prompt, among the sessions
        that `belongs` accepts; None without one.

        Of several with the same text, returns the newest that no call has continued from yet, else the newest. Raises
        RequestError if a prompt of tokens continues completions with different images.
        """
        messages, tokens = request.messages, request.tokens
        lengths = (n for n in range(len(messages) - 1, 0, -1) if messages[n - 1].role == "assistant")
        keys = (messages[:n] for n in lengths) if tokens is None else reversed(_hashes(tokens, sorted(self._lengths)))
        for key in keys:
            nodes = [node for node in self._nodes.get(key, ()) if belongs(node.session)]
            if tokens is not None and any(node.turn.media != nodes[0].turn.media for node in nodes):
                raise bad_request(
                    "reply_to",
                    "a prompt of token ids that continues one conversation",
                    f"{len(nodes)} completions end these tokens, after different images",
                    "send reply_to, the id of the completion",
                )
            if nodes:
                return next((node for node in reversed(nodes) if not node.calls), nodes[-1])
        return None


def _keys(node: CompletionNode) -> tuple[Conversation | bytes, ...]:
    return node.conversation, *_hashes(node.sequence, [len(node.sequence)])


def _hashes(tokens: IntArray, lengths: Iterable[int]) -> list[bytes]:
    """The hashes of the beginnings of these lengths, in order; of those that are not longer than the tokens."""
    # One pass for all lengths: hashing each beginning by itself would be quadratic in the number of completions.
    hasher, num_hashed, hashes = hashlib.blake2b(digest_size=16), 0, list[bytes]()
    for length in lengths:
        if length > len(tokens):
            break
        hasher.update(tokens[num_hashed:length].tobytes())
        num_hashed = length
        hashes.append(hasher.digest())
    return hashes


def _num_equal(one: Conversation, other: Conversation) -> int:
    """The number of equal messages at the beginning of two conversations."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def unknown_error(what: str) -> RequestError:
    """The answer to a request for a session or completion that the server does not have."""
    return RequestError(
        404,
        what,
        "it is unknown: it expired, or belongs to an earlier server",
        "roll the task out again",
        code="unknown",
    )


def visible_text(turn: Turn, stop: Sequence[str]) -> str:
    """The text of a turn up to the stop string that ended it: what the client reads."""
    ends = [at for text in stop if (at := turn.text.find(text)) >= 0]
    return turn.text[: min(ends)] if ends and turn.stop_reason is StopReason.STOP else turn.text


def is_cancelled() -> bool:
    """Whether the current task itself is cancelled, and not only the future that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
