"""Which session a call belongs to: by its labels, by the conversation that it continues, or a new one."""

from __future__ import annotations

import time

from trivium.serving.bodies import RequestError
from trivium.serving.groups import OpenGroups
from trivium.serving.requests import ChatRequest
from trivium.serving.sessions import CompletionNode, Label, Session, SessionStore, digest, same_secret


class CallRoutes:
    """Finds the session of each call among the `sessions` of a server, or begins one."""

    def __init__(self, sessions: SessionStore, groups: OpenGroups, *, require_secret: bool) -> None:
        self._sessions, self._groups = sessions, groups
        self._require_secret = require_secret
        """Whether every session begins with a secret."""
        self._num_evaluations = 0
        """Evaluation sessions that ever began: numbers those without a label."""

    def route(self, request: ChatRequest) -> list[tuple[Session, CompletionNode | None]]:
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
        """The session that the request names, or whose completion it names; a new one if the name is new."""
        labels = request.labels
        label = (labels.evaluation, labels.task_id, labels.session)
        session = self._sessions.labelled(label) if labels.session else self._sessions.of_completion(labels.reply_to)
        if session is None and labels.reply_to:
            raise unknown_error(f"the completion {labels.reply_to!r}")
        if session is None:
            return self._begin(label, request)
        check_secret(session, labels.secret)
        if session.ended is not None:
            raise ended_error(session, "choose a new name for a new rollout")
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
        """The completion of the session that the messages continue from; None if they begin a new tree."""
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
        if self._require_secret and not labels.secret:
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


def unknown_error(what: str) -> RequestError:
    """The answer to a request for a session or completion that the server does not have."""
    return RequestError(
        404,
        what,
        "it is unknown: it expired, or belongs to an earlier server",
        "roll the task out again",
        code="unknown",
    )


def check_secret(session: Session, secret: str) -> None:
    """Raises RequestError if the session began with another secret."""
    if not same_secret(session, secret):
        raise RequestError(
            403,
            f"session {session.name!r}",
            "it began with a secret that this request does not have, or without the one that it has",
            "send the `secret` of its first call",
            param="secret",
            code="wrong_secret",
        )


def ended_error(session: Session, do: str) -> RequestError:
    """The answer to a request for a session that has ended; `do`: what its client can do."""
    assert session.ended is not None
    status, reason = session.ended
    return RequestError(status, f"session {session.name!r}", f"it has ended: {reason}", do, code="session_over")
