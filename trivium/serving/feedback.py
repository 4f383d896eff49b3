"""Feedback and commits: how agents end their sessions, and when a group counts as complete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from trivium.serving.bodies import RequestError
from trivium.serving.groups import OpenGroups
from trivium.serving.requests import Feedback
from trivium.serving.sessions import (
    OpenGroup,
    ServingOptions,
    Session,
    SessionStore,
    check_secret,
    ended_error,
    same_secret,
    unknown,
)
from trivium.types import Failure


class FeedbackReceiver:
    """Checks feedback and commits, and ends what they end."""

    def __init__(
        self,
        sessions: SessionStore,
        groups: OpenGroups,
        group_size: int,
        options: ServingOptions,
        must_judge: bool,
    ) -> None:
        self._sessions, self._groups, self._group_size = sessions, groups, group_size
        self._options, self._must_judge = options, must_judge

    def receive(self, feedback: Feedback) -> dict[str, Any]:
        """Ends all trajectories of the feedback, or none where one cannot be ended."""
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
            "groups": [{"task_id": group.task_id, "done": len(group.done), "of": self._group_size} for group in groups],
        }

    def _targets(self, feedback: Feedback) -> list[Session]:
        if feedback.session:
            session = self._sessions.labelled((False, feedback.task_id, feedback.session))
            if session is None:
                raise unknown(f"the session {feedback.session!r} of task {feedback.task_id!r}")
            return [session]
        sessions: dict[Session, None] = {}
        for completion_id in feedback.ids:
            session = self._sessions.of_completion(completion_id)
            if session is None:
                raise unknown(f"the completion {completion_id!r}")
            sessions[session] = None
        return list(sessions)

    def _check_feedback(self, session: Session, feedback: Feedback) -> None:
        check_secret(session, feedback.secret)
        if session.ended is not None:
            raise ended_error(session, "a trajectory has feedback once")
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
        if not (feedback.rewards or feedback.failure or self._options.reward_names) and self._must_judge:
            raise RequestError(
                400,
                "a reward",
                "feedback without one, and the config names no reward function",
                "send `reward`, or add an entry under `rewards`",
                param="reward",
            )
        if both := sorted(feedback.rewards.keys() & self._options.reward_names):
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
                self._options.check_columns({**group.columns, **feedback.columns})
        for group in groups:
            self._groups.add_columns(group, feedback.columns)

    async def commit(self, task_id: str | None, secret: str) -> dict[str, int]:
        """Closes the open groups of a task (None: of all) that have a finished trajectory; journaled when this
        returns. Sessions of theirs without feedback are dropped: all of them must have begun with this secret."""
        groups = self._groups.finished(task_id)
        if task_id is not None:
            for session in (session for group in groups for session in group.sessions):
                check_secret(session, secret)
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
        if any(task.cancelled() for task in submitting):
            raise RequestError(
                410, "commit", "a group became too stale to train on meanwhile", "roll the task out again"
            )
        return result
