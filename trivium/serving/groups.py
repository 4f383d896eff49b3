"""The groups that agents open: calls find or begin their sessions, a group waits for its slot, sessions end, and a
complete group goes to the buffer.

A group is complete with `group_size` trajectories, with a commit, or when none of its sessions is active any more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from trivium.explorer import Explorer
from trivium.loops import next_lease
from trivium.protocols import Buffer
from trivium.schedule import Schedule
from trivium.serving.bodies import RequestError
from trivium.serving.requests import ChatRequest, Row
from trivium.serving.sessions import (
    CompletionNode,
    GroupKey,
    IdleLimits,
    Label,
    OpenGroup,
    Session,
    SessionStore,
    Slot,
    digest,
    unknown_error,
)
from trivium.synchronizer import Synchronizer
from trivium.types import SERVED, Failure, Group, Lease, Task

Route = tuple[Session, CompletionNode | None]
"""The session of a call, and the completion that it continues from."""


class OpenGroups:
    """Groups that agents have opened and that the buffer does not have yet, with their sessions."""

    def __init__(
        self,
        explorer: Explorer,
        buffer: Buffer,
        schedule: Schedule,
        synchronizer: Synchronizer,
        *,
        require_secret: bool,
    ) -> None:
        """`require_secret`: every session begins with a secret."""
        self.sessions = SessionStore()
        self.counts = {"trajectories": 0, "failed": 0, "forgotten": 0, "called_off": 0, "groups": 0}
        """Sessions by how they ended, and the groups that were put."""
        self.submitting: dict[Lease, asyncio.Task[None]] = {}
        """Complete groups that are being judged and put."""
        self._explorer, self._buffer = explorer, buffer
        self._schedule, self._synchronizer = schedule, synchronizer
        self._require_secret = require_secret
        self._open: dict[OpenGroup, None] = {}
        """Groups that are not complete, oldest first."""
        self._waiting: deque[OpenGroup] = deque()
        """Groups without a slot."""
        self._spare: deque[Slot] = deque()
        """Slots of groups that were removed before their first completion."""
        self._wanted = asyncio.Event()
        self._submitted: dict[GroupKey, tuple[int, ...]] = {}
        """The members of rows that were submitted in this stage, without those that are not trained on."""
        self._num_evaluations = 0
        """Evaluation sessions that have begun. Numbers those without a label."""
        self._create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Groups without a slot."""
        return len(self._waiting)

    def start(self, create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """From now on, groups are submitted in tasks that `create_task` creates."""
        self._create_task = create_task

    # ------------------------------------------------------------------ how sessions begin

    def route(self, request: ChatRequest) -> list[Route]:
        """The session of each choice: by its labels, by the conversation that it continues, or a new one. Counts the
        calls as in progress."""
        labels = request.labels
        if labels.row is not None and request.n > 1:
            raise RequestError(
                400,
                f"{request.n} completions of {labels.row}",
                "a row names one member of a group",
                "send a request for each member",
                param="n",
            )

        def belongs(session: Session) -> bool:
            """A session of the same kind and secret, without a label, of the task if the request names one."""
            return (
                session.label is None
                and (session.group is None) is labels.evaluation
                and labels.task_id in ("", session.task_id)
                and labels.row in (None, session.row)
                and session.has_secret(labels.secret)
            )

        routes: list[Route]
        if labels.session or labels.reply_to or labels.session_of:
            session = self._labelled(request)
            routes = [(session, self._parent(session, request))] * request.n
        elif node := self.sessions.find(request, belongs):
            routes = [(node.session, node)] * request.n
        else:
            routes = [(self._begin(None, request), None) for _ in range(request.n)]
        for session, _ in routes:
            session.calls += 1
            session.touched = time.monotonic()
        return routes

    def _labelled(self, request: ChatRequest) -> Session:
        """The session that the request names, or whose completion it names. Begins a session with a new name."""
        labels = request.labels
        label = (labels.evaluation, labels.task_id, labels.session)
        completion = labels.reply_to or labels.session_of
        session = self.sessions.labelled(label) if labels.session else self.sessions.of_completion(completion)
        if session is None and labels.reply_to:
            raise unknown_error(f"the completion {labels.reply_to!r}")
        if session is None:
            return self._begin(label, request)
        session.check_secret(labels.secret)
        session.check_active("choose a new name for a new rollout")
        session.check_row(labels.row)
        if labels.evaluation is not (session.group is None):
            raise RequestError(
                400,
                f"evaluation {labels.evaluation} in session {session.name!r}",
                "it began with the opposite value",
                "send the same value in every call of a session",
                param="evaluation",
            )
        return session

    def _parent(self, session: Session, request: ChatRequest) -> CompletionNode | None:
        """The completion of the session that the messages continue from; None if they begin a new tree."""
        wanted = request.labels.reply_to
        if not wanted:
            return self.sessions.find(request, lambda other: other is session)
        node = next((node for node in session.completions if node.id == wanted), None)
        if node is None or not node.begins(request):
            raise RequestError(
                400,
                f"messages that continue from the completion {wanted!r}",
                "they do not begin with its conversation",
                "send the earlier messages unchanged, or leave reply_to out",
                param="reply_to",
            )
        return node

    def _begin(self, label: Label | None, request: ChatRequest) -> Session:
        """A new session: an evaluation, or in a group of its task."""
        labels, now = request.labels, time.monotonic()
        if self._require_secret and not labels.secret:
            raise RequestError(
                400,
                "a session with a secret",
                "this request has none, and serve.require_secret is set",
                "send `secret`, a text of your own that no other agent can guess, with every request",
                param="secret",
            )
        task_id = labels.task_id or digest(request.messages, request.tokens)
        if labels.row is not None and not labels.evaluation:
            self._check_new(task_id, labels.row)
        group = None if labels.evaluation else self._of_task(task_id, labels.row, now)
        session = Session(label, task_id, group, now, request.messages, labels.secret, row=labels.row)
        if group is not None:
            number = group.num_sessions
            group.active.append(session)
            group.num_sessions += 1
        else:
            number = self._num_evaluations
            self._num_evaluations += 1
        session.name = labels.session or str(number)
        self.sessions.add(session)
        return session

    def _check_new(self, task_id: str, row: Row) -> None:
        """Raises RequestError if a group has no such member, or another session has the row."""
        size = self._schedule.group_size
        if row.index >= size:
            raise RequestError(
                400,
                f"member {row.index} of a group",
                f"schedule.group_size is {size}, and members are counted from 0",
                f"send an index from 0 to {size - 1}",
                param="row",
            )
        key = (task_id, row.group)
        members = (index for group in self._open if group.key == key for index in group.members)
        if row.index in self._submitted.get(key, ()) or row.index in members:
            raise RequestError(
                400,
                f"a new rollout of {row}, task {task_id!r}",
                "another session has this row, and both would train on the same tokens",
                "give each member of a group its own index, each pass over the taskset its own epoch, and send the "
                "session in every call",
                param="row",
            )

    def _of_task(self, task_id: str, row: Row | None, now: float) -> OpenGroup:
        """An open group of the task (and of the row's epoch) that has space, or a new one that waits for a slot."""
        key = (task_id, None if row is None else row.group)
        group = next((g for g in self._open if g.key == key and g.size < self._schedule.group_size), None)
        if group is None:
            group = OpenGroup(key, asyncio.get_running_loop().create_future(), now)
            self._open[group] = None
            self._waiting.append(group)
            self._assign_slots()
            self._wanted.set()
        return group

    def add_columns(self, group: OpenGroup, columns: Mapping[str, Any]) -> None:
        """Adds columns that an agent sent. Raises RequestError if another session of the group sent other values."""
        for name, value in columns.items():
            if name in group.columns and group.columns[name] != value:
                raise RequestError(
                    400,
                    f"column {name!r} of task {group.task_id!r}",
                    f"{value!r:.60}, but another session sent {group.columns[name]!r:.60}",
                    "give different tasks different task_ids",
                    param="columns",
                )
        group.columns = {**group.columns, **columns}

    # ------------------------------------------------------------------ slots

    async def lease(self) -> None:
        """Leases a slot whenever a group needs one, in the order in which groups were opened, until the buffer is
        closed."""
        while True:
            while not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
            try:
                lease = await next_lease(self._explorer, self._buffer, self._schedule, self._synchronizer)
            except StopAsyncIteration:
                return
            self._spare.append(Slot(lease, self._explorer.version))
            self._assign_slots()

    def _assign_slots(self) -> None:
        while self._spare and self._waiting:
            self._waiting.popleft().slot.set_result(self._spare.popleft())

    def close(self, reason: str) -> None:
        """Ends all sessions, and every wait for a slot."""
        for session in list(self.sessions.active):
            self._end(session, 503, reason)
        while self._waiting:
            self._waiting.popleft().slot.cancel()

    # ------------------------------------------------------------------ how sessions end

    def finish(self, session: Session, status: int, reason: str) -> None:
        """Ends a session with feedback or a failure; the last one of a group completes the group."""
        self._end(session, status, reason)
        self.counts["trajectories" if session.failure is None else "failed"] += 1
        group = session.group
        if group is None:
            return
        group.done.append(session)
        group.touched = time.monotonic()
        if len(group.done) == self._schedule.group_size:
            self.submit(group)

    def drop(self, session: Session, reason: str) -> None:
        """Ends a session without feedback; another may take its place in the group."""
        self._end(session, 410, reason)
        self.counts["forgotten"] += session.group is not None
        if session.group is not None:
            session.group.touched = time.monotonic()
        session.clear()

    def _end(self, session: Session, status: int, reason: str) -> None:
        self.sessions.end(session, status, reason, time.monotonic())
        if session.group is not None:
            session.group.active.remove(session)

    def remove_empty(self, session: Session) -> None:
        """Removes a session without completions, and its group if that has no other. The next group takes its slot."""
        self.sessions.remove(session)
        group = session.group
        if group is None or session not in group.active:
            return
        group.active.remove(session)
        if group.size or group not in self._open:
            return
        del self._open[group]
        if group in self._waiting:
            self._waiting.remove(group)
        else:
            self._spare.append(group.slot.result())
            self._assign_slots()

    # ------------------------------------------------------------------ how groups end

    def finished(self, task_id: str | None) -> list[OpenGroup]:
        """The open groups of a task (None: of all) that have a finished trajectory."""
        return [group for group in self._open if group.done and task_id in (None, group.task_id)]

    def submit(self, group: OpenGroup) -> asyncio.Task[None]:
        """Computes the rewards of the group and puts it, in a task of its own."""
        assert self._create_task is not None
        del self._open[group]
        lease = group.slot.result().lease
        task = self.submitting[lease] = self._create_task(self._put(group))
        if group.members:
            self._submitted[group.key] = self._submitted.get(group.key, ()) + group.members

        def ended(task: asyncio.Task[None]) -> None:
            self.submitting.pop(lease, None)
            if task.cancelled():
                self._release_rows(group)

        task.add_done_callback(ended)
        return task

    def _release_rows(self, group: OpenGroup) -> None:
        """Lets other sessions have the rows of a submitted group that is not trained on."""
        if left := tuple(index for index in self._submitted.get(group.key, ()) if index not in group.members):
            self._submitted[group.key] = left
        else:
            self._submitted.pop(group.key, None)

    async def _put(self, group: OpenGroup) -> None:
        slot, explorer = group.slot.result(), self._explorer
        # Members of a taskset's group are in the order of their indices, whichever ended first.
        sessions = sorted(group.done, key=lambda session: -1 if session.row is None else session.row.index)
        prompt = sessions[0].prompt if sessions else ()
        task = Task(group.task_id, prompt, group.columns, SERVED)
        rollouts = [
            session.trajectory(place if session.row is None else session.row.index)
            for place, session in enumerate(sessions)
        ]
        scored = await explorer.judge_rollouts(task, rollouts)
        # No slot is issued twice at once, so the slot tells this group from others of its task.
        result = Group(slot.lease.slot, task, tuple(scored), slot.lease.slot, slot.lease.attempt, slot.version)
        succeeded, needed = len(result.alive), explorer.min_members
        if not rollouts or (needed > 1 and succeeded < needed):
            result = result.refused(f"{succeeded} trajectories, and workflow.min_members is {needed}")
        result = explorer.refined(result)
        await self._buffer.put(explorer.name, result)
        if result.dropped:
            self._release_rows(group)
        self.counts["groups"] += 1
        for session in sessions:
            session.clear()

    async def cancel_stale(self) -> None:
        """Ends the sessions of groups that can no longer be trained on, until it is cancelled."""
        reason = "its rollouts became too stale to train on"
        while True:
            leases = set(await self._buffer.cancelled_leases(self._explorer.name))
            self._spare = deque(spare for spare in self._spare if spare.lease not in leases)
            for group in [g for g in self._open if g.slot.done() and g.slot.result().lease in leases]:
                del self._open[group]
                self.counts["called_off"] += group.size
                for session in list(group.active):
                    self._end(session, 410, reason)
                    session.clear()
                for session in group.done:
                    session.ended = (410, reason)
                    session.clear()
            for lease in leases & self.submitting.keys():
                self.submitting[lease].cancel()

    async def expire(self, limits: IdleLimits, deadline_s: float) -> None:
        """Ends sessions after their deadline and drops idle ones, until it is cancelled."""
        period_s = min(5.0, max(0.05, min(*limits, deadline_s) / 10))
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            for session in list(self.sessions.active):
                started = session.started if session.group is not None else None
                limit_s, key = limits.of(session)
                if started is not None and now - started > deadline_s:
                    reason = f"no feedback within {deadline_s:.0f} s (workflow.deadline_s)"
                    session.failure = Failure("deadline", "TimeoutError", reason)
                    self.finish(session, 410, reason)
                elif not session.calls and now - session.touched > limit_s:
                    self.drop(session, f"no call for {limit_s:.0f} s ({key})")
            for group in [g for g in self._open if not g.active and now - g.touched > limits.idle_s]:
                self.submit(group)
            self.sessions.expire(now - limits.idle_s)
