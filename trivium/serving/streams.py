"""Streams: the parts of completions that are certain while their tokens are sampled.

A protocol turns them into its events. What may still become a call of a tool, a stop string or the end of a reasoning
block is held back until it is decided. An engine that cannot report tokens gives the same events, at the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trivium.foundation.errors import DataError, RolloutError
from trivium.policy import EngineFailure
from trivium.protocols import Renderer
from trivium.serving.bodies import RequestError, as_request_error
from trivium.serving.completion_parts import Answer, answer_of, opens_reasoning, settled
from trivium.serving.requests import ChatRequest
from trivium.serving.session_records import CompletionNode, Session, visible_text
from trivium.text.tools import ToolCall
from trivium.types import Prompt, Turn

_WINDOW = 64
"""Tokens after which the text before an unfinished character is taken, although bytes in it may form no character."""
_CHARACTER = 4
"""The most tokens that one character may have: the bytes of UTF-8."""


class Step(NamedTuple):
    """A change of a streamed completion: one of its parts begins, grows or ends."""

    what: str
    """`begin`, `text` or `end`."""
    kind: str
    """`reasoning`, `content` or `call`."""
    number: int = 0
    """The place of a call among the calls of its completion."""
    call: ToolCall | None = None
    text: str = ""
    """With `text`, what is added to the part; with `end`, the whole part. The text of a call is its arguments."""


class StreamedCompletion:
    """One completion of a request, while it is sampled; the `Progress` that a policy reports to."""

    def __init__(self, index: int, chat: ChatRequest, renderer: Renderer, changed: asyncio.Event) -> None:
        self.index, self._chat, self._renderer, self._changed = index, chat, renderer, changed
        self.id, self.parent = "", None
        self.session: Session | None = None
        self.prompt: Prompt | None = None
        """None until the policy has rendered it."""
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.node: CompletionNode | None = None
        """The recorded completion, once it is complete."""
        self._reasoning_open = False
        self._text, self._window, self._read = "", 0, 0
        """The decoded text; the first token of the window that is decoded next, and the first one without text."""
        self._parts: dict[tuple[str, int], str] = {}
        """What was sent of each part that has begun, in order."""
        self._ended: set[tuple[str, int]] = set()
        self._num_sent = 0

    # ------------------------------------------------------------------ what the policy reports

    def open(self, completion_id: str, session: Session, parent: CompletionNode | None) -> None:
        """The completion has an id and a session."""
        self.id, self.session, self.parent = completion_id, session, parent

    def begin(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._reasoning_open = opens_reasoning(self._renderer, self._chat.tools, prompt.tokens)

    def add(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self._changed.set()

    def complete(self, node: CompletionNode) -> None:
        """The completion is recorded."""
        self.node = node
        self._changed.set()

    # ------------------------------------------------------------------ what a protocol sends

    def take_tokens(self) -> tuple[list[int], list[float]]:
        """The tokens, and their log-probabilities, since the last call."""
        start, self._num_sent = self._num_sent, len(self.tokens)
        return self.tokens[start:], self.log_probs[start:]

    def steps(self) -> Iterator[Step]:
        """Yields what is certain by now and was not yielded before."""
        chat = self._chat
        split = {"reasoning": chat.reasoning, "opened": self._reasoning_open}
        if self.node is None:
            self._decode()
            answer = settled(self._text, chat.tools, chat.sampling.stop, **split)
        else:
            answer = answer_of(visible_text(self.node.turn, chat.sampling.stop), chat.tools, **split)
        yield from self._grown(answer, final=self.node is not None)

    def _decode(self) -> None:
        """Appends the text of new tokens. Decodes a window of tokens: a token may complete the character before it."""
        decoded, num_read = self._renderer.decode(self.tokens[self._window :]), len(self.tokens)
        known_text = self._renderer.decode(self.tokens[self._window : self._read])
        if decoded.endswith("\ufffd"):
            if num_read - self._read < _WINDOW:
                return
            decoded = decoded[:-1]  # the next token may complete this character
            ends = (num_read - num_held for num_held in range(1, _CHARACTER))
            whole = (end for end in ends if self._renderer.decode(self.tokens[self._window : end]) == decoded)
            if (num_read := next(whole, 0)) <= self._read:
                return
        self._text += decoded[len(known_text) :]
        self._window, self._read = self._read, num_read

    def _grown(self, answer: Answer, *, final: bool) -> Iterator[Step]:
        if answer.reasoning is not None:
            ended = final or bool(answer.content)
            yield from self._part("reasoning", 0, answer.reasoning, ended=ended)
        if answer.content:
            yield from self._part("content", 0, answer.content, ended=final)
        for number, call in enumerate(answer.calls):
            yield from self._part("call", number, call.arguments, ended=True, call=call)

    def _part(self, kind: str, number: int, text: str, *, ended: bool, call: ToolCall | None = None) -> Iterator[Step]:
        key = (kind, number)
        sent_text = self._parts.get(key, "")
        if not text.startswith(sent_text):
            raise RequestError(
                500,
                "a stream that agrees with its completion",
                f"of the {kind}, {sent_text[-40:]!r} was sent, and the completion has {text[: len(sent_text)][-40:]!r}",
                "ask again without stream: its tokenizer or its format of calls changes earlier text",
                code="stream_differs",
            )
        if key in self._ended:
            return
        if key not in self._parts:
            self._parts[key] = ""
            yield Step("begin", kind, number, call)
        if len(text) > len(sent_text):
            self._parts[key] = sent_text + text[len(sent_text) :]
            yield Step("text", kind, number, call, text[len(sent_text) :])
        if ended:
            self._ended.add(key)
            yield Step("end", kind, number, call, self._parts[key])


class Events:
    """Writes the completions of one request as the server-sent events of a protocol."""

    def __init__(self, model: str, chat: ChatRequest, renderer: Renderer) -> None:
        self.model, self.chat, self.renderer = model, chat, renderer

    def begin(self, completion: StreamedCompletion) -> Iterator[str]:
        """Yields the events of a completion that the policy has begun."""
        del completion
        yield from ()

    def grow(self, completion: StreamedCompletion) -> Iterator[str]:
        """Yields the events of its new tokens."""
        for step in completion.steps():
            yield from self.step(completion, step)

    def step(self, completion: StreamedCompletion, step: Step) -> Iterator[str]:
        """Yields the events of one change of its parts."""
        del completion, step
        yield from ()

    def end(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Yields the last events, once all completions are complete; `body` is the response without a stream."""
        raise NotImplementedError

    def failed(self, error: RequestError) -> str:
        """The event of an error after the first token."""
        return event(error.body())


def identity(completion: StreamedCompletion | CompletionNode) -> dict[str, Any]:
    """What a client needs for feedback about a completion."""
    session = completion.session
    return {"id": completion.id, "session": session.name, "task_id": session.task_id} if session is not None else {}


def token_ids(chat: ChatRequest, turn: Turn) -> dict[str, list[int]]:
    """The token ids of a completion, if its request asks for them."""
    ids = {"prompt_token_ids": turn.prompt_tokens.tolist(), "token_ids": turn.tokens.tolist()}
    return ids if chat.token_ids else {}


def event(data: Mapping[str, Any], kind: str = "") -> str:
    """One server-sent event. With `kind`, also its name."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n"


class CompletionStream:
    """The completions of one request."""

    def __init__(self, chat: ChatRequest, renderer: Renderer) -> None:
        self._changed = asyncio.Event()
        self.completions = [StreamedCompletion(index, chat, renderer, self._changed) for index in range(chat.n)]

    async def started(self, work: asyncio.Task[list[CompletionNode]]) -> None:
        """Waits for the first token, or for the end of the work that samples the completions. Raises its error. If the
        wait is cancelled, cancels the work."""
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            waiting.cancel()

    async def events(
        self,
        work: asyncio.Task[list[CompletionNode]],
        events: Events,
        body: Callable[[Sequence[CompletionNode]], Mapping[str, Any]],
    ) -> AsyncGenerator[str]:
        """Yields the events of a protocol while the work samples the completions."""
        announced: set[int] = set()
        work.add_done_callback(lambda _: self._changed.set())
        while True:
            await self._changed.wait()
            self._changed.clear()
            is_last = work.done()  # before the steps below: the work may end while the client reads them
            for completion in self.completions:
                if completion.prompt is None:
                    continue
                if completion.index not in announced:
                    announced.add(completion.index)
                    for text in events.begin(completion):
                        yield text
                try:
                    for text in events.grow(completion):
                        yield text
                except RequestError as error:
                    work.cancel()
                    yield events.failed(error)
                    return
            if is_last:
                break
        try:
            nodes = work.result()
        except (RequestError, EngineFailure, DataError, RolloutError) as error:
            yield events.failed(as_request_error(error))
            return
        except asyncio.CancelledError:
            yield events.failed(RequestError(503, "the rest of a stream", "the server is closing", "ask again"))
            return
        for text in events.end(body(nodes)):
            yield text
