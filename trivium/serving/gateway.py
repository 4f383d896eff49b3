"""The gateway: agents roll out tasks over HTTP instead of `explore_loop`.

A group takes its slot when its first call arrives, so the buffer holds agents back and staleness stays bounded. After
the last stage, the gateway can serve the final policy for a while; it records nothing then.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from trivium.explorer import Explorer
from trivium.foundation.concurrency import Threads, Turns, gather_or_cancel
from trivium.foundation.phases import announce
from trivium.foundation.randomness import SampleKey
from trivium.policy import EngineFailure, Policy, PromptTooLong
from trivium.protocols import Buffer, Progress
from trivium.schedule import Assignment, Schedule
from trivium.serving.bodies import RequestError
from trivium.serving.completion_parts import Recorded, answer_of, opens_reasoning
from trivium.serving.groups import OpenGroups
from trivium.serving.requests import ChatRequest, Feedback
from trivium.serving.sessions import CompletionNode, IdleLimits, OpenGroup, Session, unknown_error, visible_text
from trivium.serving.streams import StreamedCompletion
from trivium.synchronizer import Synchronizer
from trivium.text.tool_formats import HERMES
from trivium.types import SERVED, Completion, Failure, IntArray, Message, Request, StopReason, Task, Turn

T = TypeVar("T")

_log = logging.getLogger("trivium")
_ENCODERS = 2
"""Threads that encode prompts: a long prompt must not block the event loop."""
_TOKEN_CHARACTERS = 64
"""A prompt with more characters per token of the context is refused without being encoded."""
_ADOPTION_S = 60.0
"""Longest wait for the last published version after the training, in seconds."""
_GOODBYE_S = 1.0
"""How long the gateway still answers calls before the server closes, in seconds."""
_STOPPED = "the run is being stopped"


@dataclass(frozen=True)
class ServingOptions:
    """What a gateway takes from the config."""

    idle: IdleLimits
    """When idle sessions are dropped."""
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
    """The policy as agents call it, whatever the transport."""

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
        """Why no rollout is recorded any more; empty as long as rollouts are."""
        self.final = False
        """Whether the final policy is served, after the training."""
        self._groups = OpenGroups(explorer, buffer, schedule, synchronizer, require_secret=options.require_secret)
        self.sessions = self._groups.sessions
        # A renderer of a user may know no format and no images.
        self.recorded = Recorded(self.sessions.text_of, getattr(explorer.renderer, "tool_format", HERMES))
        self._check_placeholders: Callable[[IntArray], None] = getattr(
            explorer.renderer, "check_placeholders", lambda _: None
        )
        self._concurrency = Turns(explorer.max_concurrent)
        self._encoders = Threads(_ENCODERS, "a prompt")
        self._warns = True
        """Whether the next call that rewrites the history of its session is a warning."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------------ the run's side

    async def run(self, on_loaded: Callable[[], None]) -> None:
        """Serves until the stage is over; calls `on_loaded` once calls are answered. Raises the errors that end it."""
        groups, options = self._groups, self.options
        async with asyncio.TaskGroup() as tasks:

            def create_task(role: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                task = tasks.create_task(role)
                task.add_done_callback(self._close_if_failed)  # the group takes no more tasks from then on
                return task

            groups.start(create_task)
            roles = (self._watch(on_loaded), groups.cancel_stale(), groups.expire(options.idle, options.deadline_s))
            helpers = [create_task(role) for role in roles]
            try:
                await self._admit()
                self.close("the training is over")
            finally:
                self.close(_STOPPED)
            for helper in (*helpers, *groups.submitting.values()):  # no step trains on the groups in progress
                helper.cancel()

    async def _admit(self) -> None:
        """Leases slots until the buffer is closed or the trainer has finished the stage."""
        waits = (self._groups.lease(), self._synchronizer.wait_finished(self.explorer.name))
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    def close(self, reason: str) -> None:
        """Refuses all calls from now on, those in progress as well."""
        self.closed = self.closed or reason
        self._groups.close(reason)

    def _close_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.close(_STOPPED)

    async def say_goodbye(self) -> None:
        """Serves the final policy for `linger_s`, once it is loaded. Then refuses calls for a moment before the server
        closes."""
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

    async def _watch(self, on_loaded: Callable[[], None]) -> None:
        """Waits for the first weights. Then calls `on_loaded`, and raises the error of the engine, if it fails."""
        name = self.explorer.name

        def has_version(values: Mapping[str, Any]) -> bool:
            return values.get("explorers", {}).get(name, {}).get("version") is not None

        while not self.loaded:
            self.loaded = has_version(await self._synchronizer.board.poll(has_version, 60.0))
        on_loaded()
        await asyncio.shield(self._broken)

    # ------------------------------------------------------------------ completions

    async def complete(self, request: ChatRequest, streamed: Sequence[StreamedCompletion] = ()) -> list[CompletionNode]:
        """`request.n` completions of the current policy, each followed by one of `streamed`. Records all of them, or
        none. Raises RequestError, and EngineFailure, which also ends the run."""
        if self.final:
            request = replace(request, labels=replace(request.labels, evaluation=True))
        self._check_ready()
        self._check_length(request)
        routes = self._groups.route(request)
        followed = list(zip_longest(routes, streamed))
        try:
            calls = [self._call(session, parent, request, stream) for (session, parent), stream in followed]
            nodes = await self._breaking(gather_or_cancel(calls))
            # Nothing awaits from here on: a request that is cancelled has recorded nothing.
            for node in nodes:
                node.session.check_active("roll the task out again")
            for node, (_, stream) in zip(nodes, followed, strict=True):
                self.sessions.record(node)
                if stream is not None:
                    stream.complete(node)
            return nodes
        finally:
            for session, _ in routes:
                self._end_call(session)

    def _end_call(self, session: Session) -> None:
        session.calls -= 1
        session.touched = time.monotonic()
        if not (session.calls or session.completions or session.ended):
            self._groups.remove_empty(session)

    async def sample(self, request: Request) -> Completion:
        """A completion of token ids by the current policy, which is not recorded. Raises the errors of `complete`."""
        self._check_ready()
        self._check_placeholders(request.prompt_tokens)
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
        """Returns the result of the work. An EngineFailure in it also ends the run."""
        try:
            return await work
        except EngineFailure as error:
            if not self._broken.done():
                self._broken.set_exception(error)
            raise

    async def count_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of the conversation as a prompt."""
        self._check_length(request)
        prompt = await self._encoders.run(lambda: self.explorer.renderer.render(request.messages))
        return len(prompt)

    def _check_length(self, request: ChatRequest) -> None:
        characters = sum(len(message.content) for message in request.messages)
        if characters > _TOKEN_CHARACTERS * self.explorer.max_context:
            raise PromptTooLong(
                "a prompt that leaves space for a completion",
                f"{characters:,} characters, and the context holds {self.explorer.max_context:,} tokens",
                "send less, or raise engine.max_context",
            )

    async def _call(
        self,
        session: Session,
        parent: CompletionNode | None,
        request: ChatRequest,
        stream: StreamedCompletion | None,
    ) -> CompletionNode:
        """One completion in a session that counts the call as in progress. It is not recorded yet."""
        if session.group is not None:
            self._groups.add_columns(session.group, request.columns or {})
            await self._wait_for_slot(session.group)
        session.check_active("roll the task out again")
        if session.policy is None:
            session.policy, session.started = self._policy(session, request), time.monotonic()
        return await self._generate(session, parent, request, stream)

    async def _wait_for_slot(self, group: OpenGroup) -> None:
        """Waits until the buffer admits the group."""
        deadline_s = self.options.deadline_s
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
            if not _is_cancelled():
                self._check_open()
            raise

    def _policy(self, session: Session, request: ChatRequest) -> Policy:
        """The policy of a session. Equal sessions of equal tasks sample with equal random numbers. A row of a taskset
        has those of a run that reads it."""
        explorer, stage, row = self.explorer, self._schedule.stage, session.row
        group, name = session.group, session.name
        if group is not None and session.label is None:  # sessions of other groups have equal numbers
            lease = group.slot.result().lease
            name = f"{lease.slot}.{lease.attempt}.{name}"
            session.name = name
        purpose = f"served-{stage}" if group is not None else "served-evaluation"
        key = SampleKey(self._schedule.seed, purpose, SERVED, session.task_id, path=(name,))
        if row is not None and group is not None:
            task = Task(session.task_id, (), {}, row.taskset)
            key = self._schedule.key(Assignment(group.slot.result().lease.slot, task, row.epoch), row.index)
        return Policy(
            explorer.engine, explorer.renderer, request.sampling, key, explorer.max_context, threads=self._encoders
        )

    async def _generate(
        self,
        session: Session,
        parent: CompletionNode | None,
        request: ChatRequest,
        stream: StreamedCompletion | None,
    ) -> CompletionNode:
        completion_id = f"chatcmpl-{uuid.uuid4().hex}"
        if stream is not None:
            stream.open(completion_id, session, parent)
        earlier = parent.conversation if parent is not None else ()
        new, tokens = request.messages[len(earlier) :], request.tokens
        added = None
        if tokens is not None:
            added = tokens[0 if parent is None else len(parent.sequence) :]
            self._check_placeholders(added)
            new = (Message("user", self.explorer.renderer.decode(added)),)
        if how := session.rewriting(request.messages, len(earlier), request.tools):
            self._note_rewriting(session, how)
        policy = session.branch(parent, new, request.sampling, added)
        generating = asyncio.ensure_future(self._limited(policy, (*policy.history, *new), tokens, stream))
        session.generating.add(generating)
        try:
            turn = await generating
        except asyncio.CancelledError:
            if not _is_cancelled():
                session.check_active("roll the task out again")
            raise
        finally:
            generating.cancel()
            session.generating.discard(generating)
        if turn.stop_reason is StopReason.ABORT:
            raise _closing()
        reasoning_open = opens_reasoning(self.explorer.renderer, request.tools, turn.prompt_tokens)
        text = visible_text(turn, request.sampling.stop)
        parts = answer_of(text, request.tools, reasoning=request.reasoning, opened=reasoning_open)
        # A completion that comes back without an id is known by what its client has seen of it.
        answer = Message("assistant", text if parts.calls or request.reasoning else parts.content)
        # `earlier` is the parent's own tuple: the client's copies of old messages are not kept
        conversation = (*earlier, *new, answer)
        node = CompletionNode(completion_id, session, policy, turn, conversation, parent=parent)
        node.instructions = request.instructions
        node.reasoning_open = reasoning_open
        return node

    def _note_rewriting(self, session: Session, how: str) -> None:
        """Logs a call that rewrites history. The first one of a stage is a warning, others go to log.txt."""
        log = _log.warning if self._warns else _log.info
        self._warns = False
        log(
            "session %r of task %r rewrites its history, so its tokens are trained on as another sequence: %s "
            "(rollout/forked counts such turns; `trivium rollouts` shows the first token that differs)",
            session.name,
            session.task_id,
            how,
        )

    async def _limited(
        self,
        policy: Policy,
        conversation: Sequence[Message],
        tokens: IntArray | None,
        progress: Progress | None,
    ) -> Turn:
        """One turn, within the limit of concurrent generations."""
        async with self._concurrency:
            return await policy.generate(conversation, tokens=tokens, progress=progress)

    # ------------------------------------------------------------------ feedback

    def feedback(self, feedback: Feedback) -> dict[str, Any]:
        """Ends all trajectories that the feedback names, or none of them if one cannot end."""
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
            session = self.sessions.labelled((False, feedback.task_id, feedback.session))
            if session is None:
                raise unknown_error(f"the session {feedback.session!r} of task {feedback.task_id!r}")
            return [session]
        sessions: dict[Session, None] = {}
        for completion_id in feedback.ids:
            sessions[self.sessions.of_completion(completion_id)] = None
        return list(sessions)

    def _check_feedback(self, session: Session, feedback: Feedback) -> None:
        session.check_secret(feedback.secret)
        session.check_row(feedback.row)
        session.check_active("a trajectory has feedback once")
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
                "feedback without a reward, and the config names no reward function",
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
        """Closes the open groups of a task (None: of all tasks) that have a finished trajectory, and drops their
        sessions without feedback. All sessions of these groups must have begun with this secret. The groups are
        journaled when this returns."""
        self._check_open()
        groups = self._groups.finished(task_id)
        if task_id is not None:
            for session in (session for group in groups for session in group.sessions):
                session.check_secret(secret)
        groups = [g for g in groups if all(session.has_secret(secret) for session in g.sessions)]
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

    def health(self) -> dict[str, Any]:
        """Status, version and counts, as JSON values."""
        return {
            "status": self._status,
            "version": self.explorer.version,
            "loaded": self.loaded,
            "in_flight": sum(session.calls for session in self.sessions.active),
            "sessions": len(self.sessions.active),
            "open_groups": len(self._groups),
            "waiting_groups": self._groups.num_waiting,
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
            "retry: the final policy is served soon" if lingers else "start another run, or continue later",
            code="closed",
            retry_after_s=1,
        )


def _closing() -> RequestError:
    return RequestError(503, "a completion of the policy", "the engine is being closed", "start the run again")


def _is_cancelled() -> bool:
    """Whether the current task itself is cancelled, and not only the future that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
