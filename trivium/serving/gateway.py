"""The gateway: agents roll out tasks over HTTP instead of `explore_loop`.

A group takes its slot when its first call arrives, so the buffer holds agents back and staleness stays bounded. After
the last stage, the gateway can serve the final policy for a while; it records nothing then.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

from trivium.explorer import Explorer
from trivium.foundation.concurrency import Threads, Turns, gather_or_cancel
from trivium.foundation.phases import announce
from trivium.foundation.randomness import SampleKey
from trivium.policy import EngineFailure, Policy, PromptTooLong
from trivium.protocols import Buffer
from trivium.schedule import Schedule
from trivium.serving.bodies import RequestError
from trivium.serving.completion_parts import Recorded, answer_of, opens_reasoning
from trivium.serving.requests import ChatRequest
from trivium.serving.session_records import CompletionNode, Session, visible_text
from trivium.serving.sessions import ServingOptions, Sessions
from trivium.serving.streams import StreamedCompletion
from trivium.synchronizer import Synchronizer
from trivium.text.tool_formats import HERMES
from trivium.types import Completion, IntArray, Message, Request, Sampling, StopReason, Turn

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
        self.explorer = explorer
        self._synchronizer, self._linger_s = synchronizer, options.linger_s
        self.loaded = False
        """Whether the trainer's weights have arrived."""
        self.sessions = Sessions(explorer, buffer, schedule, synchronizer, options, self._policy)
        # A renderer of a user may know no format and no images.
        self.recorded = Recorded(self.sessions.index.text_of, getattr(explorer.renderer, "tool_format", HERMES))
        self._check_placeholders: Callable[[IntArray], None] = getattr(
            explorer.renderer, "check_placeholders", lambda _: None
        )
        self._concurrency = Turns(explorer.limits.max_concurrent)
        self._encoders = Threads(_ENCODERS, "a prompt")
        self._warns = True
        """Whether the next call that rewrites the history of its session is a warning."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------------ the run's side

    async def run(self, on_loaded: Callable[[], None]) -> None:
        """Serves until the stage is over; calls `on_loaded` once calls are answered. Raises the errors that end it."""
        await self.sessions.run(self._watch(on_loaded))

    async def say_goodbye(self) -> None:
        """Serves the final policy for `linger_s`, once it is loaded. Then refuses calls for a moment before the server
        closes."""
        if self._linger_s:
            await self._synchronizer.board.poll(self._has_newest, _ADOPTION_S)
            self.sessions.final = True
            announce(f"serving the final policy, version {self.explorer.version}, for {self._linger_s:g} s")
            await asyncio.wait({self._broken}, timeout=self._linger_s)
            self.sessions.final = False
            if self._broken.done():
                self._broken.result()
        await asyncio.sleep(_GOODBYE_S)

    def _loaded_version(self, values: Mapping[str, Any]) -> int | None:
        """The version that the explorer has loaded, by the values of the board."""
        return values.get("explorers", {}).get(self.explorer.name, {}).get("version")

    def _has_newest(self, values: Mapping[str, Any]) -> bool:
        versions = values.get("versions") or (None,)
        return self._loaded_version(values) == versions[-1]

    async def _watch(self, on_loaded: Callable[[], None]) -> None:
        """Waits for the first weights. Then calls `on_loaded`, and raises the error of the engine, if it fails."""

        def has_version(values: Mapping[str, Any]) -> bool:
            return self._loaded_version(values) is not None

        while not self.loaded:  # `poll` also returns after 60 s
            self.loaded = has_version(await self._synchronizer.board.poll(has_version, 60.0))
        on_loaded()
        await asyncio.shield(self._broken)

    # ------------------------------------------------------------------ completions

    async def complete(self, request: ChatRequest, streamed: Sequence[StreamedCompletion] = ()) -> list[CompletionNode]:
        """`request.n` completions of the current policy, each followed by one of `streamed`. Records all of them, or
        none. Raises RequestError, and EngineFailure, which also ends the run."""
        if self.sessions.final:
            request = replace(request, labels=replace(request.labels, evaluation=True))
        self._check_ready()
        self._check_length(request)
        with self.sessions.calls(request) as calls:
            followed = zip_longest(calls, streamed)  # a request that is not a stream has none of `streamed`
            generations = [self._generate(session, parent, request, stream) for (session, parent), stream in followed]
            nodes = await self._breaking(gather_or_cancel(generations))
            # Nothing awaits from here on: a request that is cancelled has recorded nothing.
            self.sessions.record(nodes)
            for node, stream in zip(nodes, streamed, strict=False):
                stream.complete(node)
            return nodes

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
        if not self.sessions.final:
            self.sessions.check_open()
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
        if characters > _TOKEN_CHARACTERS * self.explorer.engine.max_context:
            raise PromptTooLong(
                "a prompt that leaves space for a completion",
                f"{characters:,} characters, and the context holds {self.explorer.engine.max_context:,} tokens",
                "send less, or raise engine.max_context",
            )

    def _policy(self, key: SampleKey, sampling: Sampling) -> Policy:
        explorer = self.explorer
        return Policy(
            explorer.engine, explorer.renderer, sampling, key, explorer.engine.max_context, threads=self._encoders
        )

    async def _generate(
        self,
        session: Session,
        parent: CompletionNode | None,
        request: ChatRequest,
        stream: StreamedCompletion | None,
    ) -> CompletionNode:
        """One completion in a session. It is not recorded yet."""
        await self.sessions.admit(session, request)
        completion_id = f"chatcmpl-{uuid.uuid4().hex}"
        if stream is not None:
            stream.open(completion_id, session, parent)
        earlier = parent.conversation if parent is not None else ()
        new, tokens = request.messages[len(earlier) :], request.tokens
        added = None
        if tokens is not None:
            added = tokens[0 if parent is None else len(parent.sequence) :]
            self._check_placeholders(added)
            # A prompt of tokens has no messages. The record has the text of the new ones, and the policy the tokens.
            new = (Message("user", self.explorer.renderer.decode(added)),)
        if edit := session.rewriting(request.messages, len(earlier), request.tools):
            self._note_rewriting(session, edit)
        policy = session.branch(parent, new, request.sampling, added)

        async def generate() -> Turn:
            async with self._concurrency:
                return await policy.generate((*policy.history, *new), tokens=tokens, progress=stream)

        turn = await session.until_end(generate())
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

    def _note_rewriting(self, session: Session, edit: str) -> None:
        """Logs a call that rewrites history. The first one of a stage is a warning, others go to log.txt."""
        log = _log.warning if self._warns else _log.info
        self._warns = False
        log(
            "session %r of task %r rewrites its history, so its tokens are trained on as another sequence: %s "
            "(rollout/forked counts such turns; `trivium rollouts` shows the first token that differs)",
            session.name,
            session.task_id,
            edit,
        )

    def health(self) -> dict[str, Any]:
        """Status, version and counts, as JSON values."""
        return {
            "status": self._status,
            "version": self.explorer.version,
            "loaded": self.loaded,
            **self.sessions.health(),
        }

    @property
    def _status(self) -> str:
        if self.sessions.final:
            return "final"
        return "closed" if self.sessions.closed else "ok" if self.loaded else "loading"


def _closing() -> RequestError:
    return RequestError(503, "a completion of the policy", "the engine is being closed", "start the run again")
