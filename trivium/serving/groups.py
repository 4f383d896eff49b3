"""The open groups of a server: sessions join them, end in them, and a complete group goes to the buffer.

A group is complete with `group_size` trajectories, with a commit, or when no session of it is active any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from trivium.explorer import Explorer
from trivium.protocols import Buffer
from trivium.serving.admission import Admission
from trivium.serving.bodies import RequestError
from trivium.serving.sessions import IdleLimits, OpenGroup, Session, SessionStore, conflicting_column
from trivium.types import SERVED, Failure, Group, Lease, Task


class OpenGroups:
    """Groups that agents have opened and that the buffer does not have yet."""

    def __init__(
        self, explorer: Explorer, buffer: Buffer, admission: Admission, sessions: SessionStore, group_size: int
    ) -> None:
        self.counts = {"trajectories": 0, "failed": 0, "forgotten": 0, "called_off": 0, "groups": 0}
        """Sessions by how they ended, and the groups that were put."""
        self.submitting: dict[Lease, asyncio.Task[None]] = {}
        """Complete groups that are being judged and put."""
        self._explorer, self._buffer, self._group_size = explorer, buffer, group_size
        self._admission, self._sessions = admission, sessions
        self._open: dict[OpenGroup, None] = {}
        """Groups that are not complete, oldest first."""
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._open)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Groups are submitted in tasks of this group from now on."""
        self._tasks = tasks

    def of_task(self, task_id: str, now: float) -> OpenGroup:
        """An open group of the task that has space, or a new one that waits for a slot."""
        group = next((g for g in self._open if g.task_id == task_id and g.size < self._group_size), None)
        if group is None:
            group = self._admission.open_group(task_id, now)
            self._open[group] = None
        return group

    def finished(self, task_id: str | None) -> list[OpenGroup]:
        """The open groups of a task (None: of all) that have a finished trajectory."""
        return [group for group in self._open if group.done and task_id in (None, group.task_id)]

    def add_columns(self, group: OpenGroup, columns: Mapping[str, Any]) -> None:
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

    # ------------------------------------------------------------------ how sessions end

    def finish(self, session: Session, status: int, reason: str) -> None:
        """Ends a session with feedback or a failure; the last one of a group completes the group."""
        self.end(session, status, reason)
        self.counts["trajectories" if session.failure is None else "failed"] += 1
        group = session.group
        if group is None:
            return
        group.done.append(session)
        group.touched = time.monotonic()
        if len(group.done) == self._group_size:
            self.submit(group)

    def drop(self, session: Session, reason: str) -> None:
        """Ends a session without feedback; another may take its place in the group."""
        self.end(session, 410, reason)
        self.counts["forgotten"] += session.group is not None
        if session.group is not None:
            session.group.touched = time.monotonic()
        session.clear()

    def end(self, session: Session, status: int, reason: str) -> None:
        """Ends a session, whatever becomes of it; later calls of it get `status` and `reason`."""
        self._sessions.end(session, status, reason, time.monotonic())
        if session.group is not None:
            session.group.active.remove(session)

    def remove_empty(self, session: Session) -> None:
        """A session without completions leaves no trace."""
        self._sessions.remove(session)
        group = session.group
        if group is None or session not in group.active:
            return
        group.active.remove(session)
        if not group.size and group in self._open:
            del self._open[group]
            self._admission.remove(group)

    # ------------------------------------------------------------------ how groups end

    def submit(self, group: OpenGroup) -> asyncio.Task[None]:
        """Computes the rewards of the group and puts it, while agents go on."""
        assert self._tasks is not None
        del self._open[group]
        lease = group.slot.result().lease
        task = self.submitting[lease] = self._tasks.create_task(self._put(group))
        task.add_done_callback(lambda _: self.submitting.pop(lease, None))
        return task

    async def _put(self, group: OpenGroup) -> None:
        slot, sessions, explorer = group.slot.result(), group.done, self._explorer
        prompt = sessions[0].prompt if sessions else ()
        task = Task(group.task_id, prompt, group.columns, SERVED)
        rollouts = [session.trajectory(index) for index, session in enumerate(sessions)]
        scored = await explorer.judge_rollouts(task, rollouts)
        # Slots are never issued twice at once, so the slot tells this group from others of its task.
        result = Group(slot.lease.slot, task, tuple(scored), slot.lease.slot, slot.lease.attempt, slot.version)
        succeeded, needed = len(result.alive), explorer.min_members
        if not rollouts or (needed > 1 and succeeded < needed):
            result = result.refused(f"{succeeded} trajectories, and workflow.min_members is {needed}")
        await self._buffer.put(explorer.name, explorer.refined(result))
        self.counts["groups"] += 1
        for session in sessions:
            session.clear()

    async def cancel_stale(self) -> None:
        """Ends the sessions of groups that can no longer be trained on, until it is cancelled."""
        while True:
            leases = set(await self._buffer.cancelled_leases(self._explorer.name))
            self._admission.discard(leases)
            for group in [g for g in self._open if g.slot.done() and g.slot.result().lease in leases]:
                del self._open[group]
                self.counts["called_off"] += group.size
                self._end_stale(group)
            for lease in leases & self.submitting.keys():
                self.submitting[lease].cancel()

    def _end_stale(self, group: OpenGroup) -> None:
        reason = "its rollouts became too stale to train on"
        for session in list(group.active):
            self.end(session, 410, reason)
            session.clear()
        for session in group.done:
            session.ended = (410, reason)
            session.clear()

    async def expire(self, limits: IdleLimits, deadline_s: float) -> None:
        """Ends sessions beyond their deadline and drops idle ones, until it is cancelled."""
        period_s = min(5.0, max(0.05, min(*limits, deadline_s) / 10))
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            for session in list(self._sessions.active):
                started = session.started if session.group is not None else None
                limit_s, key = limits.of(session)
                if started is not None and now - started > deadline_s:
                    reason = f"no feedback within {deadline_s:.0f} s (workflow.deadline_s)"
                    session.failure = Failure("deadline", "DeadlineExceeded", reason)
                    self.finish(session, 410, reason)
                elif not session.calls and now - session.touched > limit_s:
                    self.drop(session, f"no call for {limit_s:.0f} s ({key})")
            for group in [g for g in self._open if not g.active and now - g.touched > limits.idle_s]:
                self.submit(group)
            self._sessions.expire(now - limits.idle_s)
