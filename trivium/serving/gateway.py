"""Agents play over HTTP what `explore_loop` plays itself: slots are leased, replies recorded, groups put.

A group takes its slot when its first call arrives, so admission holds agents back and staleness stays bounded; it is
over with `group_size` trajectories, a commit, or nothing more to wait for.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivium.deadlines import together
from trivium.explorer import Explorer
from trivium.loops import next_lease
from trivium.policy import EngineFailure, Policy
from trivium.protocols import Buffer
from trivium.randomness import SampleKey
from trivium.schedule import Schedule
from trivium.serving.asks import Ask, Feedback, Refused
from trivium.serving.groups import OpenGroup, Slot
from trivium.serving.sessions import Index, Reply, Session, agreed, digest, shown
from trivium.synchronizer import Synchronizer
from trivium.types import SERVED, Failure, Group, Lease, Message, StopReason, Task

_log = logging.getLogger("trivium")


@dataclass(frozen=True)
class Terms:
    """What the config says about playing."""

    idle_s: float
    """A session that was not heard of for so long is forgotten."""
    deadline_s: float
    """A session that takes longer fails; also the longest wait of a call for a slot."""
    reward_names: frozenset[str]
    """The names of the config's own reward functions."""
    check_columns: Callable[[Collection[str]], None]
    """Raises DataError for columns that those do not get along with."""


class Gateway:
    """The policy as agents reach it, whatever the transport."""

    def __init__(
        self, explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer, terms: Terms
    ) -> None:
        self.explorer, self.terms = explorer, terms
        self._buffer, self._schedule, self._synchronizer = buffer, schedule, synchronizer
        self.loaded = False
        """Whether the trainer's weights have arrived."""
        self.closed = ""
        """Why nothing is served any more."""
        self.counts = {"trajectories": 0, "failed": 0, "forgotten": 0, "called_off": 0, "groups": 0}
        """What became of sessions, and how many groups were put."""
        self._named: dict[tuple[bool, str, str], Session] = {}
        """Sessions by label, ended ones too for a while: whoever still asks is told why."""
        self._by_text = {False: Index(), True: Index()}
        """Sessions without a label, training and evaluation."""
        self._of_reply: dict[str, Session] = {}
        self._live: dict[Session, None] = {}
        self._ended: deque[tuple[float, Session, tuple[str, ...]]] = deque()
        """Sessions that are over, since when, with the ids of their replies."""
        self._open: dict[OpenGroup, None] = {}
        """Groups that still have something to wait for, oldest first."""
        self._waiting: deque[OpenGroup] = deque()
        """Groups without a slot."""
        self._spare: deque[Slot] = deque()
        """Slots whose group came to nothing before anything was said in it."""
        self._wanted = asyncio.Event()
        self._concluding: dict[Lease, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(explorer.max_concurrent)
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = 0
        """Counts evaluation sessions without a label."""

    # ------------------------------------------------------------------ the run's side

    async def run(self) -> None:
        """Serves until the buffer is closed; what breaks the run is raised."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            helpers = [tasks.create_task(role) for role in (self._watch(), self._call_off(), self._sweep())]
            try:
                await self._lease_slots()
            except StopAsyncIteration:
                self.close("the training is over")
            finally:
                self.close("the run is being stopped")
            for helper in (*helpers, *self._concluding.values()):  # nobody trains on what is still being played
                helper.cancel()

    def close(self, why: str) -> None:
        """Refuses every call from now on, those in progress as well."""
        self.closed = self.closed or why
        for session in list(self._live):
            self._end(session, 503, why)
        while self._waiting:
            self._waiting.popleft().slot.cancel()

    async def _watch(self) -> None:
        """Says when weights are there; raises what broke the engine."""
        name = self.explorer.name

        def there(values: Mapping[str, Any]) -> bool:
            return values.get("explorers", {}).get(name, {}).get("version") is not None

        while not self.loaded:
            self.loaded = there(await self._synchronizer.board.poll(there, 60.0))
        await self._broken

    async def _lease_slots(self) -> None:
        """Leases a slot whenever a group needs one."""
        while True:
            while not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
            lease = await next_lease(self.explorer, self._buffer, self._schedule, self._synchronizer)
            self._spare.append(Slot(lease, self.explorer.version))
            self._hand_out()

    def _hand_out(self) -> None:
        while self._spare and self._waiting:
            self._waiting.popleft().slot.set_result(self._spare.popleft())

    async def _call_off(self) -> None:
        """Ends the sessions of groups that can no longer be trained on."""
        while True:
            leases = set(await self._buffer.called_off(self.explorer.name))
            self._spare = deque(spare for spare in self._spare if spare.lease not in leases)
            for group in [g for g in self._open if g.slot.done() and g.slot.result().lease in leases]:
                del self._open[group]
                self.counts["called_off"] += group.taken
                for session in list(group.live):
                    self._end(session, 410, "its rollouts became too stale to train on")
                    session.forget()
                for session in group.done:
                    session.over = (410, "its rollouts became too stale to train on")
                    session.forget()
            for lease in leases & self._concluding.keys():
                self._concluding[lease].cancel()

    async def _sweep(self) -> None:
        """Ends what takes too long, forgets what is not heard of any more."""
        terms = self.terms
        period_s = min(5.0, max(0.05, min(terms.idle_s, terms.deadline_s) / 10))
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            for session in list(self._live):
                began = session.started if session.group is not None else None
                if began is not None and now - began > terms.deadline_s:
                    why = f"no feedback within {terms.deadline_s:.0f} s (workflow.deadline_s)"
                    session.failure = Failure("deadline", "DeadlineExceeded", why)
                    self._finish(session, 410, why)
                elif not session.calls and now - session.touched > terms.idle_s:
                    self._drop(session, f"nothing was heard of it for {terms.idle_s:.0f} s (serve.idle_s)")
            for group in [g for g in self._open if not g.live and now - g.touched > terms.idle_s]:
                self._conclude(group)
            while self._ended and now - self._ended[0][0] > terms.idle_s:
                _, session, replies = self._ended.popleft()
                for reply in replies:
                    del self._of_reply[reply]
                if session.label is not None:
                    del self._named[session.label]

    # ------------------------------------------------------------------ replies

    async def reply(self, ask: Ask) -> list[Reply]:
        """`n` replies of the current policy. Raises Refused; whatever the engine raises ends the run too."""
        self._refuse_closed()
        if not self.loaded:
            raise Refused(
                503, "a reply of the policy", "its weights have not arrived yet", "ask again", code="not_loaded",
                retry_after_s=1,
            )  # fmt: skip
        try:
            return await together([self._call(session, parent, ask) for session, parent in self._seats(ask)])
        except EngineFailure as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise

    def _seats(self, ask: Ask) -> list[tuple[Session, Reply | None]]:
        """The session of each choice, and the reply it goes on from. Calls are counted from here on."""
        labels = ask.labels
        seats: list[tuple[Session, Reply | None]]
        if labels.session or labels.reply_to:
            session = self._labelled(ask)
            seats = [(session, self._parent(session, ask))] * ask.n
        elif found := self._by_text[labels.evaluation].find(ask.messages, _of_task(labels.task_id)):
            seats = [(found.session, found)] * ask.n
        else:
            seats = [(self._begin(None, ask), None) for _ in range(ask.n)]
        for session, _ in seats:
            session.calls += 1
            session.touched = time.monotonic()
        return seats

    def _labelled(self, ask: Ask) -> Session:
        labels = ask.labels
        label = (labels.evaluation, labels.task_id, labels.session)
        session = self._named.get(label) if labels.session else self._of_reply.get(labels.reply_to)
        if session is None and labels.reply_to:
            raise _unknown(f"the reply {labels.reply_to!r}")
        if session is None:
            return self._begin(label, ask)
        if session.over is not None:
            raise _over(session, "choose a new name for a new playing")
        if labels.evaluation is not (session.group is None):
            raise Refused(
                400, f"evaluation {labels.evaluation} in session {session.name!r}", "it began with the opposite",
                "say the same in every call of a session", param="evaluation",
            )  # fmt: skip
        return session

    def _parent(self, session: Session, ask: Ask) -> Reply | None:
        wanted = ask.labels.reply_to
        if not wanted:
            return session.index.find(ask.messages, lambda reply: reply.session is session)
        reply = next((reply for reply in session.replies if reply.id == wanted), None)
        if reply is None or ask.messages[: len(reply.said)] != reply.said:
            raise Refused(
                400, f"messages that go on from the reply {wanted!r}", "they do not begin with its conversation",
                "send what was said before as it was, or leave reply_to out", param="reply_to",
            )  # fmt: skip
        return reply

    def _begin(self, label: tuple[bool, str, str] | None, ask: Ask) -> Session:
        """A new session: in a group of its task that has a seat, or in a new one that waits for a slot."""
        labels, now = ask.labels, time.monotonic()
        task_id = labels.task_id or digest(ask.messages)
        group = None if labels.evaluation else self._group(task_id, now)
        session = Session(
            label, task_id, self._by_text[labels.evaluation] if label is None else Index(), group, now,
            first=ask.messages,
        )  # fmt: skip
        if group is not None:
            group.live.append(session)
            group.seats += 1
            session.name = labels.session or str(group.seats - 1)
        else:
            self._number += 1
            session.name = labels.session or str(self._number - 1)
        if label is not None:
            self._named[label] = session
        self._live[session] = None
        return session

    def _group(self, task_id: str, now: float) -> OpenGroup:
        room = self._schedule.group_size
        group = next((g for g in self._open if g.task_id == task_id and g.taken < room), None)
        if group is None:
            group = OpenGroup(task_id, asyncio.get_running_loop().create_future(), now)
            self._open[group] = None
            self._waiting.append(group)
            self._hand_out()
            self._wanted.set()
        return group

    async def _call(self, session: Session, parent: Reply | None, ask: Ask) -> Reply:
        """One reply in a session that has counted the call."""
        try:
            if session.group is not None:
                self._describe(session.group, ask.columns or {})
                await self._slot(session.group)
            if session.over is not None:
                raise _over(session, "play the task again")
            if session.policy is None:
                session.policy, session.started = self._policy(session, ask), time.monotonic()
            return await self._speak(session, parent, ask)
        finally:
            session.calls -= 1
            session.touched = time.monotonic()
            if not (session.calls or session.replies or session.over):
                self._vacate(session)

    async def _slot(self, group: OpenGroup) -> Slot:
        """Waits for the buffer's admission."""
        deadline_s = self.terms.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(group.slot)
        except TimeoutError as error:
            raise Refused(
                503, f"a slot for task {group.task_id!r}", f"none within {deadline_s:.0f} s: agents are ahead of the "
                "trainer", "ask again, with fewer tasks at once; or raise schedule.max_staleness", code="no_slot",
                retry_after_s=1,
            ) from error  # fmt: skip
        except asyncio.CancelledError:
            if self.closed and not _asked_to_stop():
                self._refuse_closed()
            raise

    def _policy(self, session: Session, ask: Ask) -> Policy:
        """The policy of a session: the same playing of the same task draws the same numbers."""
        explorer, stage = self.explorer, self._schedule.stage
        group, name = session.group, session.name
        if group is not None and session.label is None:  # slot and seat tell the playings of a run apart
            lease = group.slot.result().lease
            name = f"{lease.slot}.{lease.attempt}.{name}"
            session.name = name
        purpose = f"served-{stage}" if group is not None else "served-evaluation"
        key = SampleKey(self._schedule.seed, purpose, SERVED, session.task_id, path=(name,))
        return Policy(explorer.engine, explorer.renderer, ask.sampling, key, explorer.max_context)

    async def _speak(self, session: Session, parent: Reply | None, ask: Ask) -> Reply:
        new = ask.messages[len(parent.said) :] if parent is not None else ask.messages
        policy = session.speaker(parent, new, ask.sampling)
        speaking = asyncio.ensure_future(self._within_room(policy, (*policy.history, *new)))
        session.speaking.add(speaking)
        try:
            turn = await speaking
        except asyncio.CancelledError:
            if session.over is not None and not _asked_to_stop():
                raise _over(session, "play the task again") from None
            raise
        finally:
            speaking.cancel()
            session.speaking.discard(speaking)
        if turn.stop_reason is StopReason.ABORT:
            raise Refused(503, "a reply of the policy", "the engine is being closed", "start the run again")
        beginning = parent.said if parent is not None else ()  # the client's copies are not kept twice
        said = (*beginning, *new, Message("assistant", shown(turn, ask.sampling.stop)))
        reply = Reply(f"chatcmpl-{uuid.uuid4().hex}", session, policy, turn, said, len(session.replies))
        session.record(reply, parent)
        self._of_reply[reply.id] = session
        return reply

    async def _within_room(self, policy: Policy, conversation: Sequence[Message]) -> Any:
        async with self._room:
            return await policy.reply(conversation)

    def _vacate(self, session: Session) -> None:
        """A session in which nothing was said leaves no trace."""
        del self._live[session]
        if session.label is not None:
            del self._named[session.label]
        group = session.group
        if group is None or session not in group.live:
            return
        group.live.remove(session)
        if not group.taken and group in self._open:
            del self._open[group]
            if group in self._waiting:
                self._waiting.remove(group)
            else:
                self._spare.append(group.slot.result())
                self._hand_out()

    # ------------------------------------------------------------------ feedback

    def feedback(self, said: Feedback) -> dict[str, Any]:
        """Ends the trajectories that are meant: all of them, or none where one cannot be."""
        self._refuse_closed()
        sessions = self._meant(said)
        for session in sessions:
            self._refuse_feedback(session, said)
        groups = {session.group: None for session in sessions if session.group is not None}
        self._check_columns(list(groups), said)
        for session in sessions:
            if said.failure:
                session.failure = Failure("workflow", "AgentFailure", said.failure)
            session.rewards = said.rewards
            self._finish(session, 409, "it had its feedback")
        return {
            "trajectories": len(sessions),
            "groups": [
                {"task_id": group.task_id, "done": len(group.done), "of": self._schedule.group_size} for group in groups
            ],
        }  # fmt: skip

    def _meant(self, said: Feedback) -> list[Session]:
        if said.session:
            session = self._named.get((False, said.task_id, said.session))
            if session is None:
                raise _unknown(f"the session {said.session!r} of task {said.task_id!r}")
            return [session]
        for reply in said.ids:
            if reply not in self._of_reply:
                raise _unknown(f"the reply {reply!r}")
        return list(dict.fromkeys(self._of_reply[reply] for reply in said.ids))

    def _refuse_feedback(self, session: Session, said: Feedback) -> None:
        if session.over is not None:
            raise _over(session, "one trajectory is judged once")
        if session.group is None:
            raise Refused(400, "feedback for an evaluation", "nothing is trained on it", "leave `evaluation` out")
        if session.calls or not session.replies:
            raise Refused(
                409, f"feedback for session {session.name!r}", f"{session.calls} call(s) are still in progress",
                "wait for the replies first", code="in_progress",
            )  # fmt: skip
        if not (said.rewards or said.failure or self.terms.reward_names) and self.explorer.must_judge:
            raise Refused(
                400, "a reward", "feedback without one, and the config names no reward function",
                "send `reward`, or add an entry under `rewards`", param="reward",
            )  # fmt: skip
        if both := sorted(said.rewards.keys() & self.terms.reward_names):
            raise Refused(
                400, f"rewards {both}", "the config's own reward functions have these names", "rename them",
                param="rewards",
            )  # fmt: skip

    def _check_columns(self, groups: Sequence[OpenGroup], said: Feedback) -> None:
        for group in groups:
            if not said.failure:
                self.terms.check_columns({**group.columns, **said.columns})
        for group in groups:
            self._describe(group, said.columns)

    def _describe(self, group: OpenGroup, columns: Mapping[str, Any]) -> None:
        """Adds what an agent says about the task; all sessions of a group play one task."""
        if (name := agreed(group.columns, columns)) is not None:
            raise Refused(
                400, f"column {name!r} of task {group.task_id!r}", f"{columns[name]!r:.60}, and another session said "
                f"{group.columns[name]!r:.60}", "give different tasks different task_ids", param="columns",
            )  # fmt: skip
        group.columns = {**group.columns, **columns}

    async def commit(self, task_id: str | None) -> dict[str, int]:
        """Closes the open groups of a task (None: of all) that have a finished trajectory; journaled when this
        returns. Sessions of theirs without feedback are dropped."""
        self._refuse_closed()
        groups = [g for g in self._open if g.done and task_id in (None, g.task_id)]
        if task_id is not None and not groups:
            raise Refused(
                404, f"commit task {task_id!r}", "no open group of it has a trajectory", "send feedback first"
            )
        result = {"groups": len(groups), "trajectories": sum(len(g.done) for g in groups), "dropped": 0}
        concluding: list[asyncio.Task[None]] = []
        for group in groups:
            for session in list(group.live):
                result["dropped"] += 1
                self._drop(session, "its group was committed")
            concluding.append(self._conclude(group))
        if concluding:
            await asyncio.wait(concluding)
        self._refuse_closed()
        if any(task.cancelled() for task in concluding):
            raise Refused(410, "commit", "a group became too stale to train on meanwhile", "play the task again")
        return result

    # ------------------------------------------------------------------ endings

    def _finish(self, session: Session, status: int, why: str) -> None:
        """A trajectory with feedback or a failure; with the last one of a group the group is over."""
        self._end(session, status, why)
        self.counts["trajectories" if session.failure is None else "failed"] += 1
        group = session.group
        if group is None:
            return
        group.done.append(session)
        group.touched = time.monotonic()
        if len(group.done) == self._schedule.group_size:
            self._conclude(group)

    def _drop(self, session: Session, why: str) -> None:
        """A session without feedback: its seat is free again."""
        self._end(session, 410, why)
        self.counts["forgotten"] += session.group is not None
        if session.group is not None:
            session.group.touched = time.monotonic()
        session.forget()

    def _end(self, session: Session, status: int, why: str) -> None:
        replies = tuple(reply.id for reply in session.replies)
        session.end(status, why)
        del self._live[session]
        self._ended.append((time.monotonic(), session, replies))
        if session.group is not None:
            session.group.live.remove(session)

    def _conclude(self, group: OpenGroup) -> asyncio.Task[None]:
        """The group is over: judged and put, while agents go on."""
        del self._open[group]
        lease = group.slot.result().lease
        task = self._concluding[lease] = self._tasks.create_task(self._put(group))
        task.add_done_callback(lambda _: self._concluding.pop(lease, None))
        return task

    async def _put(self, group: OpenGroup) -> None:
        slot, sessions = group.slot.result(), group.done
        prompt = sessions[0].first if sessions else ()
        task = Task(group.task_id, prompt, group.columns, SERVED)
        played = [session.trajectory(index) for index, session in enumerate(sessions)]
        judged = await self.explorer.judged(task, played)
        # Slots are never issued twice at once, so the slot tells this group from others of its task.
        made = Group(slot.lease.slot, task, tuple(judged), slot.lease.slot, slot.lease.attempt, slot.version)
        living, needed = len(made.alive), self.explorer.min_members
        if not played or (needed > 1 and living < needed):
            made = made.refused(f"{living} trajectories, and workflow.min_members is {needed}")
        await self._buffer.put(self.explorer.name, self.explorer.refined(made))
        self.counts["groups"] += 1
        for session in sessions:
            session.forget()

    def health(self) -> dict[str, Any]:
        """How the server fares."""
        return {
            "status": "closed" if self.closed else "ok" if self.loaded else "loading",
            "version": self.explorer.version, "loaded": self.loaded,
            "in_flight": sum(session.calls for session in self._live), "sessions": len(self._live),
            "open_groups": len(self._open), "waiting_groups": len(self._waiting), **self.counts,
        }  # fmt: skip

    def _refuse_closed(self) -> None:
        if self.closed:
            raise Refused(503, "this endpoint", self.closed, "start another run, or go on later", code="closed")


def _of_task(task_id: str) -> Callable[[Reply], bool]:
    return lambda reply: not task_id or reply.session.task_id == task_id


def _unknown(what: str) -> Refused:
    return Refused(
        404, what, "nothing is known of it: never said, forgotten, or said before this server was started",
        "play the task again", code="unknown",
    )  # fmt: skip


def _over(session: Session, do: str) -> Refused:
    assert session.over is not None
    status, why = session.over
    return Refused(status, f"session {session.name!r}", f"it is over: {why}", do, code="session_over")


def _asked_to_stop() -> bool:
    """Whether somebody wants the current task itself to stop, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
