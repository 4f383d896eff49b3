"""The gateway: agents roll out tasks over HTTP in the place of `explore_loop`.

A group takes its slot when its first call arrives, so admission holds agents back and staleness stays bounded. Once the
stage is over the gateway may go on for a while: it samples from the final policy and records nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from trivium.concurrency import Threads, Turns, gather_or_cancel
from trivium.explorer import Explorer
from trivium.phases import announce
from trivium.policy import EngineFailure, Policy, PromptTooLong
from trivium.protocols import Buffer
from trivium.randomness import SampleKey
from trivium.schedule import Schedule
from trivium.serving.admission import Admission
from trivium.serving.bodies import RequestError
from trivium.serving.groups import OpenGroups
from trivium.serving.requests import ChatRequest, Feedback
from trivium.serving.sessions import (
    CompletionNode,
    IdleLimits,
    Label,
    OpenGroup,
    Session,
    SessionStore,
    Slot,
    digest,
    same_secret,
    visible_text,
)
from trivium.synchronizer import Synchronizer
from trivium.types import SERVED, Completion, Failure, Message, Request, StopReason, Turn

T = TypeVar("T")

_ENCODERS = 2
"""Threads that encode prompts: a long one must not hold up the event loop."""
_TOKEN_CHARACTERS = 64
"""A prompt with more characters than so many for each token of the context is refused without being encoded."""
_ADOPTION_S = 60.0
"""Longest wait for the last published version when the training is over, in seconds."""
_GOODBYE_S = 1.0
"""How long later calls are answered before the server closes, in seconds."""


@dataclass(frozen=True)
class ServingOptions:
    """What a gateway takes from the config."""

    idle: IdleLimits
    """When a session is dropped."""
    deadline_s: float
    """Seconds after which a session without feedback fails; also the longest wait of a call for a slot."""
    reward_names: frozenset[str]
    """The names of the config's reward functions."""
    check_columns: Callable[[Mapping[str, Any]], None]
    """Raises DataError for columns that the reward functions cannot be called with."""
    require_secret: bool = False
    """Whether every session begins with a secret."""
    linger_s: float = 0.0
    """Seconds that the final policy is served after the training."""


class Gateway:
    """The policy as agents reach it, whatever the transport."""

    def __init__(
        self,
        explorer: Explorer,
        buffer: Buffer,
        schedule: Schedule,
        synchronizer: Synchronizer,
        options: ServingOptions,
    ) -> None:
        self.explorer, self.options = explorer, options
        self._schedule, self._synchronizer = schedule, synchronizer
        self.loaded = False
        """Whether the trainer's weights have arrived."""
        self.closed = ""
        """Why nothing is recorded any longer; empty while it is."""
        self.final = False
        """Whether the final policy is served, after the training."""
        self._sessions = SessionStore()
        self._admission = Admission(explorer, buffer, schedule, synchronizer)
        self._groups = OpenGroups(explorer, buffer, self._admission, self._sessions, schedule.group_size)
        self._concurrency = Turns(explorer.max_concurrent)
        self._encoders = Threads(_ENCODERS, "a prompt")
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_evaluations = 0
        """Evaluation sessions that ever began: numbers those without a label."""

    # ------------------------------------------------------------------ the run's side

    async def run(self) -> None:
        """Serves until the stage is over; what breaks the run is raised."""
        groups, options = self._groups, self.options
        async with asyncio.TaskGroup() as tasks:
            groups.start(tasks)
            roles = (self._watch(), groups.cancel_stale(), groups.expire(options.idle, options.deadline_s))
            helpers = [tasks.create_task(role) for role in roles]
            try:
                await self._admit()
                self.close("the training is over")
            finally:
                self.close("the run is being stopped")
            for helper in (*helpers, *groups.submitting.values()):  # no step trains on what is still in progress
                helper.cancel()

    async def _admit(self) -> None:
        """Leases slots until the buffer is closed or the trainer has finished the stage."""
        waits = (self._admission.run(), self._synchronizer.wait_finished(self.explorer.name))
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    def close(self, reason: str) -> None:
        """Refuses every call from now on, those in progress as well."""
        self.closed = self.closed or reason
        for session in list(self._sessions.active):
            self._groups.end(session, 503, reason)
        self._admission.close()

    async def say_goodbye(self) -> None:
        """Serves the final policy for `linger_s`, once it is loaded; then refuses calls for a moment."""
        if self.options.linger_s:
            await self._synchronizer.board.poll(self._has_newest, _ADOPTION_S)
            self.final = True
            announce(f"serving the final policy, version {self.explorer.version}, for {self.options.linger_s:g} s")
            await asyncio.wait({self._broken}, timeout=self.options.linger_s)
            self.final = False
            if self._broken.done():
                self._broken.result()
        await asyncio.sleep(_GOODBYE_S)

    def _has_newest(self, values: Mapping[str, Any]) -> bool:
        """Whether the explorer has loaded the newest version on the board."""
        versions = values.get("versions") or (None,)
        return values.get("explorers", {}).get(self.explorer.name, {}).get("version") == versions[-1]

    async def _watch(self) -> None:
        """Waits for the first weights; then raises what broke the engine."""
        name = self.explorer.name

        def has_version(values: Mapping[str, Any]) -> bool:
            return values.get("explorers", {}).get(name, {}).get("version") is not None

        while not self.loaded:
            self.loaded = has_version(await self._synchronizer.board.poll(has_version, 60.0))
        await asyncio.shield(self._broken)

    # ------------------------------------------------------------------ completions

    async def complete(self, request: ChatRequest) -> list[CompletionNode]:
        """`request.n` completions of the current policy. Raises RequestError; an EngineFailure ends the run too."""
        if self.final:
            request = replace(request, labels=replace(request.labels, evaluation=True))
        self._check_ready()
        self._check_length(request)
        routes = [self._call(session, parent, request) for session, parent in self._route(request)]
        return await self._breaking(gather_or_cancel(routes))

    async def sample(self, request: Request) -> Completion:
        """A completion of token ids by the current policy; nothing is recorded. Raises as `complete` does."""
        self._check_ready()
        async with self._concurrency:
            completion = await self._breaking(self.explorer.engine.generate(request))
        if completion.stop_reason is StopReason.ABORT:
            raise _closing()
        return completion

    def _check_ready(self) -> None:
        if not self.final:
            self._check_open()
        if not self.loaded:
            raise RequestError(
                503,
                "a completion of the policy",
                "its weights have not arrived yet",
                "ask again",
                code="not_loaded",
                retry_after_s=1,
            )

    async def _breaking(self, work: Awaitable[T]) -> T:
        """The result of the work, whose EngineFailure ends the run as well."""
        try:
            return await work
        except EngineFailure as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise

    def _check_length(self, request: ChatRequest) -> None:
        characters = sum(len(message.content) for message in request.messages)
        if characters > _TOKEN_CHARACTERS * self.explorer.max_context:
            raise PromptTooLong(
                "a prompt that leaves space for a completion",
                f"{characters:,} characters, and the context holds {self.explorer.max_context:,} tokens",
                "send less, or raise engine.max_context",
            )

    def _route(self, request: ChatRequest) -> list[tuple[Session, CompletionNode | None]]:
        """The session of each choice, and the completion it continues from. Calls are counted from here on."""
        labels = request.labels
        routes: list[tuple[Session, CompletionNode | None]]
        if labels.session or labels.reply_to:
            session = self._labelled(request)
            routes = [(session, self._parent(session, request))] * request.n
        elif node := self._sessions.find(request.messages, labels.evaluation, labels.task_id, labels.secret):
            routes = [(node.session, node)] * request.n
        else:
            routes = [(self._begin(None, request), None) for _ in range(request.n)]
        for session, _ in routes:
            session.calls += 1
            session.touched = time.monotonic()
        return routes

    def _labelled(self, request: ChatRequest) -> Session:
        labels = request.labels
        label = (labels.evaluation, labels.task_id, labels.session)
        session = self._sessions.labelled(label) if labels.session else self._sessions.of_completion(labels.reply_to)
        if session is None and labels.reply_to:
            raise _unknown(f"the completion {labels.reply_to!r}")
        if session is None:
            return self._begin(label, request)
        _check_secret(session, labels.secret)
        if session.ended is not None:
            raise _ended(session, "choose a new name for a new rollout")
        if labels.evaluation is not (session.group is None):
            raise RequestError(
                400,
                f"evaluation {labels.evaluation} in session {session.name!r}",
                "it began with the opposite",
                "send the same value in every call of a session",
                param="evaluation",
            )
        return session

    def _parent(self, session: Session, request: ChatRequest) -> CompletionNode | None:
        wanted = request.labels.reply_to
        if not wanted:
            return session.index.find(request.messages, lambda node: node.session is session)
        node = next((node for node in session.completions if node.id == wanted), None)
        if node is None or request.messages[: len(node.conversation)] != node.conversation:
            raise RequestError(
                400,
                f"messages that continue from the completion {wanted!r}",
                "they do not begin with its conversation",
                "send the earlier messages unchanged, or leave reply_to out",
                param="reply_to",
            )
        return node

    def _begin(self, label: Label | None, request: ChatRequest) -> Session:
        """A new session: in an open group of its task, or in a new one that waits for a slot."""
        labels, now = request.labels, time.monotonic()
        if self.options.require_secret and not labels.secret:
            raise RequestError(
                400,
                "a session with a secret",
                "this request has none, and serve.require_secret is set",
                "send `secret`, a text of your own that no other agent can guess, with every request",
                param="secret",
            )
        task_id = labels.task_id or digest(request.messages)
        group = None if labels.evaluation else self._groups.of_task(task_id, now)
        index = self._sessions.index(label, labels.evaluation)
        session = Session(label, task_id, index, group, now, request.messages, labels.secret)
        if group is not None:
            number = group.num_sessions
            group.active.append(session)
            group.num_sessions += 1
        else:
            number = self._num_evaluations
            self._num_evaluations += 1
        session.name = labels.session or str(number)
        self._sessions.add(session)
        return session

    async def _call(self, session: Session, parent: CompletionNode | None, request: ChatRequest) -> CompletionNode:
        """One completion in a session that has counted the call."""
        try:
            if session.group is not None:
                self._groups.add_columns(session.group, request.columns or {})
                await self._slot(session.group)
            if session.ended is not None:
                raise _ended(session, "roll the task out again")
            if session.policy is None:
                session.policy, session.started = self._policy(session, request), time.monotonic()
            return await self._generate(session, parent, request)
        finally:
            session.calls -= 1
            session.touched = time.monotonic()
            if not (session.calls or session.completions or session.ended):
                self._groups.remove_empty(session)

    async def _slot(self, group: OpenGroup) -> Slot:
        """Waits until the buffer admits the group."""
        deadline_s = self.options.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(group.slot)
        except TimeoutError as error:
            raise RequestError(
                503,
                f"a slot for task {group.task_id!r}",
                f"none within {deadline_s:.0f} s: agents are ahead of the trainer",
                "ask again, with fewer tasks at once; or raise schedule.max_staleness",
                code="no_slot",
                retry_after_s=1,
            ) from error
        except asyncio.CancelledError:
            if not _is_cancelled():
                self._check_open()
            raise

    def _policy(self, session: Session, request: ChatRequest) -> Policy:
        """The policy of a session: equal sessions of equal tasks sample with equal random numbers."""
        explorer, stage = self.explorer, self._schedule.stage
        group, name = session.group, session.name
        if group is not None and session.label is None:  # the slot tells the sessions of a run apart
            lease = group.slot.result().lease
            name = f"{lease.slot}.{lease.attempt}.{name}"
            session.name = name
        purpose = f"served-{stage}" if group is not None else "served-evaluation"
        key = SampleKey(self._schedule.seed, purpose, SERVED, session.task_id, path=(name,))
        return Policy(
            explorer.engine, explorer.renderer, request.sampling, key, explorer.max_context, threads=self._encoders
        )

    async def _generate(self, session: Session, parent: CompletionNode | None, request: ChatRequest) -> CompletionNode:
        earlier = parent.conversation if parent is not None else ()
        new = request.messages[len(earlier) :]
        policy = session.branch(parent, new, request.sampling)
        generating = asyncio.ensure_future(self._limited(policy, (*policy.history, *new)))
        session.generating.add(generating)
        try:
            turn = await generating
        except asyncio.CancelledError:
            if session.ended is not None and not _is_cancelled():
                raise _ended(session, "roll the task out again") from None
            raise
        finally:
            generating.cancel()
            session.generating.discard(generating)
        if turn.stop_reason is StopReason.ABORT:
            raise _closing()
        answer = Message("assistant", visible_text(turn, request.sampling.stop))
        # `earlier` is the parent's own tuple: the client's copies of old messages are not kept
        conversation = (*earlier, *new, answer)
        completion_id, order = f"chatcmpl-{uuid.uuid4().hex}", len(session.completions)
        node = CompletionNode(completion_id, session, policy, turn, conversation, order, parent)
        self._sessions.record(node)
        return node

    async def _limited(self, policy: Policy, conversation: Sequence[Message]) -> Turn:
        """A turn, within the limit of concurrent generations."""
        async with self._concurrency:
            return await policy.generate(conversation)

    # ------------------------------------------------------------------ feedback

    def feedback(self, feedback: Feedback) -> dict[str, Any]:
        """Ends all trajectories of the feedback, or none where one cannot be ended."""
        self._check_open()
        sessions = self._targets(feedback)
        for session in sessions:
            self._check_feedback(session, feedback)
        groups = {session.group: None for session in sessions if session.group is not None}
        self._check_columns(list(groups), feedback)
        for session in sessions:
            if feedback.failure:
                session.failure = Failure("workflow", "AgentFailure", feedback.failure)
            session.rewards = feedback.rewards
            self._groups.finish(session, 409, "it had its feedback")
        return {
            "trajectories": len(sessions),
            "groups": [
                {"task_id": group.task_id, "done": len(group.done), "of": self._schedule.group_size} for group in groups
            ],
        }

    def _targets(self, feedback: Feedback) -> list[Session]:
        if feedback.session:
            session = self._sessions.labelled((False, feedback.task_id, feedback.session))
            if session is None:
                raise _unknown(f"the session {feedback.session!r} of task {feedback.task_id!r}")
            return [session]
        sessions: dict[Session, None] = {}
        for completion_id in feedback.ids:
            session = self._sessions.of_completion(completion_id)
            if session is None:
                raise _unknown(f"the completion {completion_id!r}")
            sessions[session] = None
        return list(sessions)

    def _check_feedback(self, session: Session, feedback: Feedback) -> None:
        _check_secret(session, feedback.secret)
        if session.ended is not None:
            raise _ended(session, "a trajectory has feedback once")
        if session.group is None:
            raise RequestError(400, "feedback for an evaluation", "nothing is trained on it", "leave `evaluation` out")
        if session.calls or not session.completions:
            raise RequestError(
                409,
                f"feedback for session {session.name!r}",
                f"{session.calls} call(s) are still in progress",
                "wait for the completions first",
                code="in_progress",
            )
        if not (feedback.rewards or feedback.failure or self.options.reward_names) and self.explorer.must_judge:
            raise RequestError(
                400,
                "a reward",
                "feedback without one, and the config names no reward function",
                "send `reward`, or add an entry under `rewards`",
                param="reward",
            )
        if both := sorted(feedback.rewards.keys() & self.options.reward_names):
            raise RequestError(
                400,
                f"rewards {both}",
                "the config's own reward functions have these names",
                "rename them",
                param="rewards",
            )

    def _check_columns(self, groups: Sequence[OpenGroup], feedback: Feedback) -> None:
        for group in groups:
            if not feedback.failure:
                self.options.check_columns({**group.columns, **feedback.columns})
        for group in groups:
            self._groups.add_columns(group, feedback.columns)

    async def commit(self, task_id: str | None, secret: str) -> dict[str, int]:
        """Closes the open groups of a task (None: of all) that have a finished trajectory; journaled when this
        returns. Sessions of theirs without feedback are dropped: all of them must have begun with this secret."""
        self._check_open()
        groups = self._groups.finished(task_id)
        if task_id is not None:
            for session in (session for group in groups for session in group.sessions):
                _check_secret(session, secret)
        groups = [g for g in groups if all(same_secret(session, secret) for session in g.sessions)]
        if task_id is not None and not groups:
            raise RequestError(
                404, f"commit task {task_id!r}", "no open group of it has a trajectory", "send feedback first"
            )
        result = {"groups": len(groups), "trajectories": sum(len(g.done) for g in groups), "dropped": 0}
        submitting: list[asyncio.Task[None]] = []
        for group in groups:
            for session in list(group.active):
                result["dropped"] += 1
                self._groups.drop(session, "its group was committed")
            submitting.append(self._groups.submit(group))
        if submitting:
            await asyncio.wait(submitting)
        self._check_open()
        if any(task.cancelled() for task in submitting):
            raise RequestError(
                410, "commit", "a group became too stale to train on meanwhile", "roll the task out again"
            )
        return result

    def text_of(self, completion_id: str) -> str | None:
        """The text of a completion as its client knows it; None where the completion is unknown."""
        session = self._sessions.of_completion(completion_id)
        nodes = session.completions if session is not None else ()
        return next((node.conversation[-1].content for node in nodes if node.id == completion_id), None)

    def health(self) -> dict[str, Any]:
        """Status, version and counts, as JSON values."""
        return {
            "status": self._status,
            "version": self.explorer.version,
            "loaded": self.loaded,
            "in_flight": sum(session.calls for session in self._sessions.active),
            "sessions": len(self._sessions.active),
            "open_groups": len(self._groups),
            "waiting_groups": self._admission.num_waiting,
            **self._groups.counts,
        }

    @property
    def _status(self) -> str:
        if self.final:
            return "final"
        return "closed" if self.closed else "ok" if self.loaded else "loading"

    def _check_open(self) -> None:
        if not self.closed:
            return
        lingers = self.options.linger_s and not self.final
        raise RequestError(
            503,
            "this endpoint",
            self.closed,
            "ask again: the final policy is served soon" if lingers else "start another run, or go on later",
            code="closed",
            retry_after_s=1,
        )


def _closing() -> RequestError:
    return RequestError(503, "a completion of the policy", "the engine is being closed", "start the run again")


def _unknown(what: str) -> RequestError:
    return RequestError(
        404,
        what,
        "it is unknown: it expired, or belongs to an earlier server",
        "roll the task out again",
        code="unknown",
    )


def _check_secret(session: Session, secret: str) -> None:
    if not same_secret(session, secret):
        raise RequestError(
            403,
            f"session {session.name!r}",
            "it began with a secret that this request does not have, or without the one that it has",
            "send the `secret` of its first call",
            param="secret",
            code="wrong_secret",
        )


def _ended(session: Session, do: str) -> RequestError:
    assert session.ended is not None
    status, reason = session.ended
    return RequestError(status, f"session {session.name!r}", f"it has ended: {reason}", do, code="session_over")


def _is_cancelled() -> bool:
    """Whether the current task itself is being cancelled, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
