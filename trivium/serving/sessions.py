"""Sessions of agents: one owner of what a session is, from its first call to the group that the buffer gets.

A session begins with a call, waits with its group for a slot, records completions, and ends: with feedback, or at its
deadline, without a call for a while, with a commit of its group, when its rollouts are too stale, or with the run. A
group is complete with `group_size` trajectories, with a commit, or when none of its sessions is active any more. Its
rewards are computed then, and the buffer gets it.

Only `Sessions` changes sessions and groups, on the event loop of the run. No method awaits between two changes that
belong together, so the event loop is the lock: no call sees a session that has half ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trivium.explorer import Explorer
from trivium.foundation.randomness import SampleKey
from trivium.policy import Policy
from trivium.protocols import Buffer
from trivium.schedule import Assignment, Schedule
from trivium.serving.bodies import RequestError, bad_request
from trivium.serving.group_slots import Slots
from trivium.serving.requests import ChatRequest, Feedback, Row
from trivium.serving.session_records import (
    CompletionNode,
    GroupKey,
    Label,
    OpenGroup,
    Session,
    SessionIndex,
    digest,
    is_cancelled,
    unknown_error,
)
from trivium.synchronizer import Synchronizer
from trivium.types import SERVED, Failure, Lease, Sampling, Task

Call = tuple[Session, CompletionNode | None]
"""The session of a call, and the completion that it continues from."""
_STOPPED = "the run is being stopped"


@dataclass(frozen=True)
class ServingOptions:
    """What serving takes from the config."""

    idle_s: float
    """Seconds without a call after which a session is dropped."""
    unstarted_idle_s: float
    """The same for a session with one call, which may not have been an agent's."""
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

    def idle_limit(self, session: Session) -> tuple[float, str]:
        """The seconds that a session may be without a call, and the config key that sets them."""
        if len(session.completions) > 1 or self.idle_s <= self.unstarted_idle_s:
            return self.idle_s, "serve.idle_s"
        return self.unstarted_idle_s, "serve.unstarted_idle_s"


class Sessions:
    """The sessions of a stage, and the groups that the buffer does not have yet."""

    def __init__(
        self,
        explorer: Explorer,
        buffer: Buffer,
        schedule: Schedule,
        synchronizer: Synchronizer,
        options: ServingOptions,
        policy: Callable[[SampleKey, Sampling], Policy],
    ) -> None:
        """`policy` returns the policy of a session, which samples with this key."""
        self.active: dict[Session, None] = {}
        self.index = SessionIndex()
        self.counts = {"trajectories": 0, "failed": 0, "forgotten": 0, "called_off": 0, "groups": 0}
        """Sessions by how they ended, and the groups that were put."""
        self.closed = ""
        """Why no rollout is recorded any more; empty as long as rollouts are."""
        self.final = False
        """Whether every session is an evaluation of the final policy, after the training."""
        self._explorer, self._schedule, self._synchronizer = explorer, schedule, synchronizer
        self._options, self._policy = options, policy
        self._slots = Slots(explorer, buffer, schedule, synchronizer)
        self._ended: deque[tuple[float, list[Label | str]]] = deque()
        """(when it ended, its names) of each session that later calls learn the end of, oldest first."""
        self._open: dict[OpenGroup, None] = {}
        """Groups that are not complete, oldest first."""
        self._submitting: dict[Lease, asyncio.Task[None]] = {}
        """Complete groups that are being judged and put."""
        self._rows: dict[GroupKey, set[int]] = {}
        """The members of row groups that have a session, or had one that is trained on in this stage."""
        self._num_evaluations = 0
        """Evaluation sessions that have begun. Numbers those without a label."""
        self._tasks: asyncio.TaskGroup | None = None

    # ------------------------------------------------------------------ the stage

    async def run(self, watch: Coroutine[Any, Any, None]) -> None:
        """Records rollouts until the stage is over. Raises the errors that end it, also that of `watch`, which runs
        beside it."""
        async with asyncio.TaskGroup() as self._tasks:
            helpers = [self._create_task(role) for role in (watch, self._cancel_stale(), self._expire())]
            try:
                await self._admit_groups()
                self.close("the training is over")
            finally:
                self.close(_STOPPED)  # keeps the first reason
            for helper in (*helpers, *self._submitting.values()):  # no step trains on the groups in progress
                helper.cancel()

    def _create_task(self, role: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        task = self._tasks.create_task(role)
        task.add_done_callback(self._close_if_failed)  # the task group takes no more tasks from then on
        return task

    def _close_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.close(_STOPPED)

    async def _admit_groups(self) -> None:
        """Leases slots until the buffer is closed or the trainer has finished the stage."""
        waits = (self._slots.lease(), self._synchronizer.wait_finished(self._explorer.name))
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    def close(self, reason: str) -> None:
        """Refuses all calls from now on, those in progress as well."""
        self.closed = self.closed or reason
        for session in list(self.active):
            self._end(session, 503, reason)
        self._slots.close()

    def check_open(self) -> None:
        """Raises RequestError once no rollout is recorded any more."""
        if not self.closed:
            return
        lingers = self._options.linger_s and not self.final
        raise RequestError(
            503,
            "this endpoint",
            self.closed,
            "retry: the final policy is served soon" if lingers else "start another run, or continue later",
            code="closed",
            retry_after_s=1,
        )

    def health(self) -> dict[str, int]:
        """Counts of calls, sessions and groups."""
        return {
            "in_flight": sum(session.calls for session in self.active),
            "sessions": len(self.active),
            "open_groups": len(self._open),
            "waiting_groups": self._slots.num_waiting,
            **self.counts,
        }

    # ------------------------------------------------------------------ how sessions begin

    @contextmanager
    def calls(self, request: ChatRequest) -> Iterator[list[Call]]:
        """The call of each choice, which is in progress while the block runs. A session that has recorded nothing by
        then is forgotten."""
        calls = self._route(request)
        for session, _ in calls:
            session.calls += 1
            session.touched = time.monotonic()
        try:
            yield calls
        finally:
            for session, _ in calls:
                session.calls -= 1
                session.touched = time.monotonic()
                if not (session.calls or session.completions or session.ended):
                    self._forget(session)

    def _route(self, request: ChatRequest) -> list[Call]:
        """The session of each choice: by its labels, by the conversation that it continues, or a new one."""
        labels = request.labels
        if labels.row is not None and request.n > 1:
            raise bad_request(
                "n",
                f"{request.n} completions of {labels.row}",
                "a row names one member of a group",
                "send a request for each member",
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

        if labels.session or labels.reply_to or labels.session_of:
            session = self._named(request)
            return [(session, self._parent(session, request))] * request.n
        if node := self.index.find(request, belongs):
            return [(node.session, node)] * request.n
        return [(self._begin(None, request), None) for _ in range(request.n)]

    def _named(self, request: ChatRequest) -> Session:
        """The session that the request names, or whose completion it names. Begins a session with a new name."""
        labels = request.labels
        label = (labels.evaluation, labels.task_id, labels.session)
        completion = labels.reply_to or labels.session_of
        session = self.index.labelled(label) if labels.session else self.index.of_completion(completion)
        if session is None and labels.reply_to:
            raise unknown_error(f"the completion {labels.reply_to!r}")
        if session is None:
            return self._begin(label, request)
        session.check_secret(labels.secret)
        session.check_active("choose a new name for a new rollout")
        session.check_row(labels.row)
        if labels.evaluation is not (session.group is None):
            raise bad_request(
                "evaluation",
                f"evaluation {labels.evaluation} in session {session.name!r}",
                "it began with the opposite value",
                "send the same value in every call of a session",
            )
        return session

    def _parent(self, session: Session, request: ChatRequest) -> CompletionNode | None:
        """The completion of the session that the messages continue from; None if they begin a new tree."""
        completion_id = request.labels.reply_to
        if not completion_id:
            return self.index.find(request, lambda other: other is session)
        node = session.node(completion_id)
        if node is None or not node.begins(request):
            raise bad_request(
                "reply_to",
                f"messages that continue from the completion {completion_id!r}",
                "they do not begin with its conversation",
                "send the earlier messages unchanged, or leave reply_to out",
            )
        return node

    def _begin(self, label: Label | None, request: ChatRequest) -> Session:
        """A new session: an evaluation, or in a group of its task."""
        labels, now = request.labels, time.monotonic()
        if self._options.require_secret and not labels.secret:
            raise bad_request(
                "secret",
                "a session with a secret",
                "this request has none, and serve.require_secret is set",
                "send `secret`, a text of your own that no other agent can guess, with every request",
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
            if labels.row is not None:
                self._rows.setdefault(group.key, set()).add(labels.row.index)
        else:
            number = self._num_evaluations
            self._num_evaluations += 1
        session.name = labels.session or str(number)
        self.active[session] = None
        self.index.add(session)
        return session

    def _check_new(self, task_id: str, row: Row) -> None:
        """Raises RequestError if a group has no such member, or another session has the row."""
        size = self._schedule.group_size
        if row.index >= size:
            raise bad_request(
                "row",
                f"member {row.index} of a group",
                f"schedule.group_size is {size}, and members are counted from 0",
                f"send an index from 0 to {size - 1}",
            )
        if row.index in self._rows.get((task_id, row.group), ()):
            raise bad_request(
                "row",
                f"a new rollout of {row}, task {task_id!r}",
                "another session has this row, and both would train on the same tokens",
                "give each member of a group its own index, each pass over the taskset its own epoch, and send the "
                "session in every call",
            )

    def _of_task(self, task_id: str, row: Row | None, now: float) -> OpenGroup:
        """An open group of the task (and of the row's epoch) that has space, or a new one that waits for a slot."""
        key = (task_id, None if row is None else row.group)
        group = next((g for g in self._open if g.key == key and len(g.sessions) < self._schedule.group_size), None)
        if group is None:
            group = OpenGroup(key, self._slots.request(), now)
            self._open[group] = None
        return group

    # ------------------------------------------------------------------ completions

    async def admit(self, session: Session, request: ChatRequest) -> None:
        """Waits until the buffer admits the group of the session, which has its policy from then on."""
        if session.group is not None:
            _add_columns(session.group, request.columns or {})
            await self._wait_for_slot(session.group)
        session.check_active("roll the task out again")
        if session.policy is None:
            session.policy = self._policy(self._key(session), request.sampling)
            session.started = time.monotonic()

    async def _wait_for_slot(self, group: OpenGroup) -> None:
        deadline_s = self._options.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(group.slot)
        except TimeoutError as error:
            raise RequestError(
                503,
                f"a slot for task {group.task_id!r}",
                f"none within {deadline_s:.0f} s: agents are ahead of the trainer",
                "retry with fewer tasks at once; or raise schedule.max_staleness",
                code="no_slot",
                retry_after_s=1,
            ) from error
        except asyncio.CancelledError:
            if not is_cancelled():
                self.check_open()
            raise

    def _key(self, session: Session) -> SampleKey:
        """The address of a session's random numbers. Equal sessions of equal tasks sample with equal ones. A row of a
        taskset has those of a run that reads it."""
        schedule, row, group = self._schedule, session.row, session.group
        if group is None:
            return SampleKey(schedule.seed, "served-evaluation", SERVED, session.task_id, path=(session.name,))
        lease = group.slot.result().lease
        if session.label is None:  # without the slot, sessions of other groups of the task would have equal numbers
            session.name = f"{lease.slot}.{lease.attempt}.{session.name}"
        if row is not None:
            task = Task(session.task_id, (), {}, row.taskset)
            return schedule.key(Assignment(lease.slot, task, row.epoch), row.index)
        return SampleKey(schedule.seed, f"served-{schedule.stage}", SERVED, session.task_id, path=(session.name,))

    def record(self, nodes: Sequence[CompletionNode]) -> None:
        """Records all of these completions. Raises RequestError if one of their sessions has ended, and records
        none."""
        for node in nodes:
            node.session.check_active("roll the task out again")
        for node in nodes:
            node.session.record(node)
            self.index.record(node)

    # ------------------------------------------------------------------ feedback

    def feedback(self, feedback: Feedback) -> dict[str, Any]:
        """Ends all trajectories that the feedback names, or none of them if one cannot end."""
        self.check_open()
        sessions = self._targets(feedback)
        for session in sessions:
            session.check_feedback(feedback)
            self._check_rewards(feedback)
        groups = {session.group: None for session in sessions if session.group is not None}
        for group in groups:
            if not feedback.failure:
                self._options.check_columns({**group.columns, **feedback.columns})
        for group in groups:
            _add_columns(group, feedback.columns)
        for session in sessions:
            if feedback.failure:
                session.failure = Failure("workflow", "AgentFailure", feedback.failure)
            session.rewards = feedback.rewards
            self._finish(session, 409, "it had its feedback")
        return {
            "trajectories": len(sessions),
            "groups": [
                {"task_id": group.task_id, "done": len(group.finished), "of": self._schedule.group_size}
                for group in groups
            ],
        }

    def _targets(self, feedback: Feedback) -> list[Session]:
        if feedback.session:
            session = self.index.labelled((False, feedback.task_id, feedback.session))
            if session is None:
                raise unknown_error(f"the session {feedback.session!r} of task {feedback.task_id!r}")
            return [session]
        return list(dict.fromkeys(map(self.index.of_completion, feedback.ids)))

    def _check_rewards(self, feedback: Feedback) -> None:
        """Raises RequestError unless the rewards of the request and of the config make a reward together."""
        if not (feedback.rewards or feedback.failure or self._options.reward_names) and self._explorer.must_judge:
            raise bad_request(
                "reward",
                "a reward",
                "feedback without a reward, and the config names no reward function",
                "send `reward`, or add an entry under `rewards`",
            )
        if both := sorted(feedback.rewards.keys() & self._options.reward_names):
            raise bad_request(
                "rewards",
                f"rewards {both}",
                "the config's own reward functions have these names",
                "rename them",
            )

    async def commit(self, task_id: str | None, secret: str) -> dict[str, int]:
        """Closes the open groups of a task (None: of all tasks) that have a finished trajectory, and drops their
        sessions without feedback. All sessions of these groups must have begun with this secret. The groups are
        journaled when this returns."""
        self.check_open()
        groups = [group for group in self._open if group.finished and task_id in (None, group.task_id)]
        if task_id is None:
            groups = [group for group in groups if all(session.has_secret(secret) for session in group.sessions)]
        elif not groups:
            found, do = "no open group of it has a trajectory", "send feedback first"
            raise RequestError(404, f"commit task {task_id!r}", found, do)
        else:
            for session in (session for group in groups for session in group.sessions):
                session.check_secret(secret)
        result = {"groups": len(groups), "trajectories": sum(len(g.finished) for g in groups), "dropped": 0}
        submitting: list[asyncio.Task[None]] = []
        for group in groups:
            for session in list(group.active):
                result["dropped"] += 1
                self._drop(session, "its group was committed")
            submitting.append(self._submit(group))
        if submitting:
            await asyncio.wait(submitting)
        self.check_open()
        if any(task.cancelled() for task in submitting):
            raise RequestError(
                410, "commit", "a group became too stale to train on meanwhile", "roll the task out again"
            )
        return result

    # ------------------------------------------------------------------ how sessions end

    def _end(self, session: Session, status: int, reason: str) -> None:
        """Ends an active session: cancels its completions in progress; later calls get `status` and `reason` until the
        session expires."""
        session.ended = (status, reason)
        self.index.end(session)
        for task in session.generating:
            task.cancel()
        del self.active[session]
        self._ended.append((time.monotonic(), session.names))  # now: `clear` frees the completions that have the ids
        if session.group is not None:
            session.group.active.remove(session)

    def _finish(self, session: Session, status: int, reason: str) -> None:
        """Ends a session with feedback or a failure; the last one of a group completes the group."""
        self._end(session, status, reason)
        self.counts["trajectories" if session.failure is None else "failed"] += 1
        group = session.group
        if group is None:
            return
        group.finished.append(session)
        group.touched = time.monotonic()
        if len(group.finished) == self._schedule.group_size:
            self._submit(group)

    def _drop(self, session: Session, reason: str) -> None:
        """Ends a session without feedback; another may take its place in the group."""
        self._end(session, 410, reason)
        if session.group is not None:
            self.counts["forgotten"] += 1
            session.group.touched = time.monotonic()
            self._release_rows(session.group, [session])
        session.clear()

    def _forget(self, session: Session) -> None:
        """Removes a session without completions, and its group if that has no other. The next group takes its slot."""
        del self.active[session]
        self.index.forget(session.names)
        group = session.group
        if group is None:
            return
        group.active.remove(session)
        self._release_rows(group, [session])
        if not group.sessions:
            del self._open[group]
            self._slots.give_back(group.slot)

    async def _cancel_stale(self) -> None:
        """Ends the sessions of groups that can no longer be trained on, until it is cancelled."""
        reason = "its rollouts became too stale to train on"
        while True:
            leases = await self._slots.cancelled()
            for group in [g for g in self._open if g.slot.done() and g.slot.result().lease in leases]:
                del self._open[group]
                self.counts["called_off"] += len(group.sessions)
                self._release_rows(group, group.sessions)
                for session in list(group.active):
                    self._end(session, 410, reason)
                    session.clear()
                for session in group.finished:  # their feedback has no effect, which later calls must learn
                    session.ended = (410, reason)
                    session.clear()
            for lease in leases & self._submitting.keys():
                self._submitting[lease].cancel()

    async def _expire(self) -> None:
        """Ends sessions after their deadline and drops idle ones, until it is cancelled."""
        options, deadline_s = self._options, self._options.deadline_s
        # A session ends late by a tenth of the shortest limit at most. Scans are 50 ms apart, since each reads all
        # sessions.
        period_s = min(5.0, max(0.05, min(options.idle_s, options.unstarted_idle_s, deadline_s) / 10))
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            for session in list(self.active):
                started = session.started if session.group is not None else None
                limit_s, key = options.idle_limit(session)
                if started is not None and now - started > deadline_s:
                    reason = f"no feedback within {deadline_s:.0f} s (workflow.deadline_s)"
                    session.failure = Failure("deadline", "TimeoutError", reason)
                    self._finish(session, 410, reason)
                elif not session.calls and now - session.touched > limit_s:
                    self._drop(session, f"no call for {limit_s:.0f} s ({key})")
            for group in [g for g in self._open if not g.active and now - g.touched > options.idle_s]:
                self._submit(group)
            while self._ended and self._ended[0][0] < now - options.idle_s:
                self.index.forget(self._ended.popleft()[1])

    # ------------------------------------------------------------------ how groups end

    def _submit(self, group: OpenGroup) -> asyncio.Task[None]:
        """Computes the rewards of the group and puts it, in a task of its own."""
        del self._open[group]
        lease = group.slot.result().lease
        task = self._submitting[lease] = self._create_task(self._put(group))

        def ended(task: asyncio.Task[None]) -> None:
            self._submitting.pop(lease, None)
            if task.cancelled():
                self._release_rows(group, group.finished)

        task.add_done_callback(ended)
        return task

    def _release_rows(self, group: OpenGroup, sessions: Iterable[Session]) -> None:
        """Lets other sessions have the rows of sessions that are not trained on."""
        members = self._rows.get(group.key, set())
        members.difference_update(session.row.index for session in sessions if session.row is not None)
        if not members:
            self._rows.pop(group.key, None)

    async def _put(self, group: OpenGroup) -> None:
        # Members of a taskset's group are in the order of their indices, whichever ended first.
        sessions = sorted(group.finished, key=lambda session: -1 if session.row is None else session.row.index)
        task = Task(group.task_id, sessions[0].prompt if sessions else (), group.columns, SERVED)
        rollouts = [
            session.trajectory(place if session.row is None else session.row.index)
            for place, session in enumerate(sessions)
        ]
        if not await self._slots.fill(group.slot.result(), task, rollouts):
            self._release_rows(group, sessions)
        self.counts["groups"] += 1
        for session in sessions:
            session.clear()


def _add_columns(group: OpenGroup, columns: Mapping[str, Any]) -> None:
    """Adds columns that an agent sent. Raises RequestError if another session of the group sent other values."""
    for name, value in columns.items():
        if name in group.columns and group.columns[name] != value:
            raise bad_request(
                "columns",
                f"column {name!r} of task {group.task_id!r}",
                f"{value!r:.60}, but another session sent {group.columns[name]!r:.60}",
                "give different tasks different task_ids",
            )
    group.columns = {**group.columns, **columns}
