"""The gateway: agents roll out tasks over HTTP in the place of `explore_loop`.

A group takes its slot when its first call arrives, so admission holds agents back and staleness stays bounded. It is
complete with `group_size` trajectories, with a commit, or when no session of it is active any more.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivium.concurrency import gather_or_cancel
from trivium.explorer import Explorer
from trivium.policy import EngineFailure, Policy
from trivium.protocols import Buffer
from trivium.randomness import SampleKey
from trivium.schedule import Schedule
from trivium.serving.admission import Admission
from trivium.serving.requests import ChatRequest, Feedback, RequestError
from trivium.serving.sessions import (
    CompletionNode,
    Label,
    OpenGroup,
    Session,
    SessionStore,
    Slot,
    conflicting_column,
    digest,
    visible_text,
)
from trivium.synchronizer import Synchronizer
from trivium.types import SERVED, Failure, Group, Lease, Message, StopReason, Task, Turn


@dataclass(frozen=True)
class ServingOptions:
    """What a gateway takes from the config."""

    idle_s: float
    """Seconds without a call after which a session is dropped."""
    deadline_s: float
    """Seconds after which a session without feedback fails; also the longest wait of a call for a slot."""
    reward_names: frozenset[str]
    """The names of the config's reward functions."""
    check_columns: Callable[[Collection[str]], None]
    """Raises DataError for columns that the reward functions cannot be called with."""


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
        self._buffer, self._schedule, self._synchronizer = buffer, schedule, synchronizer
        self.loaded = False
        """Whether the trainer's weights have arrived."""
        self.closed = ""
        """Why the gateway serves no longer; empty while it does."""
        self.counts = {"trajectories": 0, "failed": 0, "forgotten": 0, "called_off": 0, "groups": 0}
        """Sessions by how they ended, and the groups that were put."""
        self._sessions = SessionStore()
        self._admission = Admission(explorer, buffer, schedule, synchronizer)
        self._open: dict[OpenGroup, None] = {}
        """Groups that are not complete, oldest first."""
        self._submitting: dict[Lease, asyncio.Task[None]] = {}
        self._concurrency = asyncio.Semaphore(explorer.max_concurrent)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_evaluations = 0
        """Evaluation sessions that ever began: numbers those without a label."""

    # ------------------------------------------------------------------ the run's side

    async def run(self) -> None:
        """Serves until the buffer is closed; what breaks the run is raised."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            helpers = [tasks.create_task(role) for role in (self._watch(), self._cancel_stale(), self._expire())]
            try:
                await self._admission.run()
            except StopAsyncIteration:
                self.close("the training is over")
            finally:
                self.close("the run is being stopped")
            for helper in (*helpers, *self._submitting.values()):  # no step trains on what is still in progress
                helper.cancel()

    def close(self, reason: str) -> None:
        """Refuses every call from now on, those in progress as well."""
        self.closed = self.closed or reason
        for session in list(self._sessions.active):
            self._end(session, 503, reason)
        self._admission.close()

    async def _watch(self) -> None:
        """Waits for the first weights; then raises what broke the engine."""
        name = self.explorer.name

        def has_version(values: Mapping[str, Any]) -> bool:
            return values.get("explorers", {}).get(name, {}).get("version") is not None

        while not self.loaded:
            self.loaded = has_version(await self._synchronizer.board.poll(has_version, 60.0))
        await self._broken

    async def _cancel_stale(self) -> None:
        """Ends the sessions of groups that can no longer be trained on."""
        reason = "its rollouts became too stale to train on"
        while True:
            leases = set(await self._buffer.cancelled_leases(self.explorer.name))
            self._admission.discard(leases)
            for group in [g for g in self._open if g.slot.done() and g.slot.result().lease in leases]:
                del self._open[group]
                self.counts["called_off"] += group.size
                for session in list(group.active):
                    self._end(session, 410, reason)
                    session.clear()
                for session in group.done:
                    session.ended = (410, reason)
                    session.clear()
            for lease in leases & self._submitting.keys():
                self._submitting[lease].cancel()

    async def _expire(self) -> None:
        """Ends sessions beyond their deadline, and drops idle ones."""
        idle_s, deadline_s = self.options.idle_s, self.options.deadline_s
        period_s = min(5.0, max(0.05, min(idle_s, deadline_s) / 10))
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            for session in list(self._sessions.active):
                started = session.started if session.group is not None else None
                if started is not None and now - started > deadline_s:
                    reason = f"no feedback within {deadline_s:.0f} s (workflow.deadline_s)"
                    session.failure = Failure("deadline", "DeadlineExceeded", reason)
                    self._finish(session, 410, reason)
                elif not session.calls and now - session.touched > idle_s:
                    self._drop(session, f"no call for {idle_s:.0f} s (serve.idle_s)")
            for group in [g for g in self._open if not g.active and now - g.touched > idle_s]:
                self._submit(group)
            self._sessions.expire(now - idle_s)

    # ------------------------------------------------------------------ completions

    async def complete(self, request: ChatRequest) -> list[CompletionNode]:
        """`request.n` completions of the current policy. Raises RequestError; an EngineFailure ends the run too."""
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
        try:
            return await gather_or_cancel(
                [self._call(session, parent, request) for session, parent in self._route(request)]
            )
        except EngineFailure as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise

    def _route(self, request: ChatRequest) -> list[tuple[Session, CompletionNode | None]]:
        """The session of each choice, and the completion it continues from. Calls are counted from here on."""
        labels = request.labels
        routes: list[tuple[Session, CompletionNode | None]]
        if labels.session or labels.reply_to:
            session = self._labelled(request)
            routes = [(session, self._parent(session, request))] * request.n
        elif node := self._sessions.find(request.messages, labels.evaluation, labels.task_id):
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
        task_id = labels.task_id or digest(request.messages)
        group = None if labels.evaluation else self._group(task_id, now)
        index = self._sessions.index(label, labels.evaluation)
        session = Session(label, task_id, index, group, now, prompt=request.messages)
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

    def _group(self, task_id: str, now: float) -> OpenGroup:
        group_size = self._schedule.group_size
        group = next((g for g in self._open if g.task_id == task_id and g.size < group_size), None)
        if group is None:
            group = self._admission.open_group(task_id, now)
            self._open[group] = None
        return group

    async def _call(self, session: Session, parent: CompletionNode | None, request: ChatRequest) -> CompletionNode:
        """One completion in a session that has counted the call."""
        try:
            if session.group is not None:
                self._add_columns(session.group, request.columns or {})
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
                self._remove_empty(session)

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
            if self.closed and not _is_cancelled():
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
        return Policy(explorer.engine, explorer.renderer, request.sampling, key, explorer.max_context)

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
            raise RequestError(503, "a completion of the policy", "the engine is being closed", "start the run again")
        answer = Message("assistant", visible_text(turn, request.sampling.stop))
        # `earlier` is the parent's own tuple: the client's copies of old messages are not kept
        conversation = (*earlier, *new, answer)
        node = CompletionNode(
            f"chatcmpl-{uuid.uuid4().hex}", session, policy, turn, conversation, len(session.completions)
        )
        self._sessions.record(node, parent)
        return node

    async def _limited(self, policy: Policy, conversation: Sequence[Message]) -> Turn:
        """A turn, within the limit of concurrent generations."""
        async with self._concurrency:
            return await policy.generate(conversation)

    def _remove_empty(self, session: Session) -> None:
        """A session without completions leaves no trace."""
        self._sessions.remove(session)
        group = session.group
        if group is None or session not in group.active:
            return
        group.active.remove(session)
        if not group.size and group in self._open:
            del self._open[group]
            self._admission.remove(group)

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
            self._finish(session, 409, "it had its feedback")
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
            self._add_columns(group, feedback.columns)

    def _add_columns(self, group: OpenGroup, columns: Mapping[str, Any]) -> None:
        """Adds columns that an agent sent; the sessions of a group must agree on them."""
        if (name := conflicting_column(group.columns, columns)) is not None:
            raise RequestError(
                400,
                f"column {name!r} of task {group.task_id!r}",
                f"{columns[name]!r:.60}, and another session sent {group.columns[name]!r:.60}",
                "give different tasks different task_ids",
                param="columns",
            )
        group.columns = {**group.columns, **columns}

    async def commit(self, task_id: str | None) -> dict[str, int]:
        """Closes the open groups of a task (None: of all) that have a finished trajectory; journaled when this
        returns. Sessions of theirs without feedback are dropped."""
        self._check_open()
        groups = [g for g in self._open if g.done and task_id in (None, g.task_id)]
        if task_id is not None and not groups:
            raise RequestError(
                404, f"commit task {task_id!r}", "no open group of it has a trajectory", "send feedback first"
            )
        result = {"groups": len(groups), "trajectories": sum(len(g.done) for g in groups), "dropped": 0}
        submitting: list[asyncio.Task[None]] = []
        for group in groups:
            for session in list(group.active):
                result["dropped"] += 1
                self._drop(session, "its group was committed")
            submitting.append(self._submit(group))
        if submitting:
            await asyncio.wait(submitting)
        self._check_open()
        if any(task.cancelled() for task in submitting):
            raise RequestError(
                410, "commit", "a group became too stale to train on meanwhile", "roll the task out again"
            )
        return result

    # ------------------------------------------------------------------ endings

    def _finish(self, session: Session, status: int, reason: str) -> None:
        """Ends a session with feedback or a failure; the last one of a group completes the group."""
        self._end(session, status, reason)
        self.counts["trajectories" if session.failure is None else "failed"] += 1
        group = session.group
        if group is None:
            return
        group.done.append(session)
        group.touched = time.monotonic()
        if len(group.done) == self._schedule.group_size:
            self._submit(group)

    def _drop(self, session: Session, reason: str) -> None:
        """Ends a session without feedback; another may take its place in the group."""
        self._end(session, 410, reason)
        self.counts["forgotten"] += session.group is not None
        if session.group is not None:
            session.group.touched = time.monotonic()
        session.clear()

    def _end(self, session: Session, status: int, reason: str) -> None:
        self._sessions.end(session, status, reason, time.monotonic())
        if session.group is not None:
            session.group.active.remove(session)

    def _submit(self, group: OpenGroup) -> asyncio.Task[None]:
        """Computes the rewards of the group and puts it, while agents go on."""
        del self._open[group]
        lease = group.slot.result().lease
        task = self._submitting[lease] = self._tasks.create_task(self._put(group))
        task.add_done_callback(lambda _: self._submitting.pop(lease, None))
        return task

    async def _put(self, group: OpenGroup) -> None:
        slot, sessions = group.slot.result(), group.done
        prompt = sessions[0].prompt if sessions else ()
        task = Task(group.task_id, prompt, group.columns, SERVED)
        rollouts = [session.trajectory(index) for index, session in enumerate(sessions)]
        scored = await self.explorer.judge_rollouts(task, rollouts)
        # Slots are never issued twice at once, so the slot tells this group from others of its task.
        result = Group(slot.lease.slot, task, tuple(scored), slot.lease.slot, slot.lease.attempt, slot.version)
        succeeded, needed = len(result.alive), self.explorer.min_members
        if not rollouts or (needed > 1 and succeeded < needed):
            result = result.refused(f"{succeeded} trajectories, and workflow.min_members is {needed}")
        await self._buffer.put(self.explorer.name, self.explorer.refined(result))
        self.counts["groups"] += 1
        for session in sessions:
            session.clear()

    def health(self) -> dict[str, Any]:
        """Status, version and counts, as JSON values."""
        return {
            "status": "closed" if self.closed else "ok" if self.loaded else "loading",
            "version": self.explorer.version,
            "loaded": self.loaded,
            "in_flight": sum(session.calls for session in self._sessions.active),
            "sessions": len(self._sessions.active),
            "open_groups": len(self._open),
            "waiting_groups": self._admission.num_waiting,
            **self.counts,
        }

    def _check_open(self) -> None:
        if self.closed:
            raise RequestError(503, "this endpoint", self.closed, "start another run, or go on later", code="closed")


def _unknown(what: str) -> RequestError:
    return RequestError(
        404,
        what,
        "it is unknown: it expired, or belongs to an earlier server",
        "roll the task out again",
        code="unknown",
    )


def _ended(session: Session, do: str) -> RequestError:
    assert session.ended is not None
    status, reason = session.ended
    return RequestError(status, f"session {session.name!r}", f"it has ended: {reason}", do, code="session_over")


def _is_cancelled() -> bool:
    """Whether the current task itself is being cancelled, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
