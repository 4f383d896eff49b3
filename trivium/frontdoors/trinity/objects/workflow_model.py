"""ModelWrapper: the policy of a rollout with the methods that Trinity-RFT's workflows call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trivium.foundation.errors import RolloutError
from trivium.policy import Policy
from trivium.types import Message, StopReason, Turn

T = TypeVar("T")
_IGNORED = ("logprobs", "model", "stream", "timeout", "tool_choice")
"""Arguments of a request that change nothing: the log-probabilities of all tokens are recorded."""


@dataclass
class RolledOut:
    """The experience of a workflow: completions of the policy, and what the workflow says about them."""

    turns: tuple[Turn, ...]
    """The completions, in order."""
    messages: tuple[Message, ...] = ()
    """The conversation before the last completion."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers that are logged under `workflow/`."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    truncate_status: str | None = None
    eid: Any = field(default_factory=lambda: SimpleNamespace(batch="", task="", run=0, step=0, suffix=""))
    """For the workflow's own use: a group knows its rollouts by itself."""

    @property
    def response_text(self) -> str:
        """The text of the last completion."""
        return self.turns[-1].text

    @property
    def prompt_text(self) -> str:
        """The text of the messages before the last completion."""
        return "\n".join(message.content for message in self.messages)

    @property
    def tokens(self) -> Tensor:
        """(S,) int64: the prompt and the completion of the last turn."""
        last = self.turns[-1]
        return torch.from_numpy(np.concatenate([last.prompt_tokens, last.tokens]).astype(np.int64))

    @property
    def prompt_length(self) -> int:
        return len(self.turns[-1].prompt_tokens)

    @property
    def logprobs(self) -> Tensor:
        """(R,) float32: log-probabilities of the last completion under the sampling distribution."""
        return torch.from_numpy(self.turns[-1].log_prob.copy())


class ModelWrapper:
    """The policy of one rollout. Plain methods are called from the thread of `run`, coroutines from `run_async`."""

    def __init__(self, policy: Policy, rollout_args: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        """`rollout_args` are those of the config, which the policy samples with."""
        self._policy, self._sampled_with, self._loop = policy, dict(rollout_args), loop
        self._waiting: set[Future[Any]] = set()
        self.history: list[RolledOut] = []
        """The completions since `extract_experience_from_history`."""

    # ------------------------------------------------------------------ completions

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[RolledOut]:
        """Completes a conversation. Returns a list of one experience.

        Raises RolloutError for sampling parameters that differ from those of the config: rollouts are trained on with
        the distribution that they were sampled from.
        """
        conversation = conversation_of(messages, kwargs.pop("tools", None))
        longest = kwargs.pop("max_tokens", None) or kwargs.pop("max_completion_tokens", None)
        for name, value in kwargs.items():
            configured = self._sampled_with.get(name, 1 if name == "n" else value if name in _IGNORED else None)
            if value is not None and value != configured:
                raise RolloutError(
                    f"a completion with {name}={value!r:.80}",
                    f"the config samples with {name}={configured!r}, one completion for each call",
                    f"leave it out, or set {name} in rollout_args of the taskset",
                )
        turn = await self._policy.generate(conversation, max_new_tokens=longest)
        status = "response_truncated" if turn.stop_reason is StopReason.LENGTH else None
        experience = RolledOut((turn,), conversation, truncate_status=status)
        self.history.append(experience)
        return [experience]

    def chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[RolledOut]:
        """`chat_async` for a plain workflow. Blocks."""
        return self._block(self.chat_async(messages, **kwargs))

    def generate(self, prompts: Sequence[str], **kwargs: Any) -> list[RolledOut]:
        """Refused: a policy reads conversations, which its chat template renders."""
        del kwargs
        raise RolloutError(
            f"a completion of the text {prompts[0]!r:.80}" if prompts else "completions of texts",
            "the policy reads conversations",
            "call model.chat, with model.chat_template: plain for a base model",
        )

    generate_async = generate

    # ------------------------------------------------------------------ experiences

    def convert_messages_to_experience(self, messages: Sequence[Mapping[str, Any]]) -> RolledOut:
        """Returns the experience of a conversation: the completions of the policy in it.

        Raises RolloutError for a message of the assistant that the policy did not write.
        """
        conversation = conversation_of(messages)
        written = [message.content for message in conversation if message.role == "assistant"]
        turns, remaining = list[Turn](), list(self._policy.turns)
        for text in written:
            turn = next((turn for turn in remaining if turn.text == text), None)
            if turn is None:
                raise RolloutError(
                    "an experience of a conversation",
                    f"the policy did not write {text!r:.80}",
                    "pass the completions as they are, or let examples be messages of the user",
                )
            turns.append(turn)
            # A text that the policy wrote twice is the next turn with it.
            remaining = remaining[remaining.index(turn) + 1 :]
        if not turns:
            raise RolloutError("an experience of a conversation", "it has no completion", "call model.chat first")
        return RolledOut(tuple(turns), conversation)

    def extract_experience_from_history(self, clear_history: bool = True) -> list[RolledOut]:
        """Returns the experiences of all completions since the last call."""
        experiences = list(self.history)
        if clear_history:
            self.history.clear()
        return experiences

    # ------------------------------------------------------------------ OpenAI's client

    def get_openai_client(self) -> Any:
        """Returns an object with `chat.completions.create(messages=...)`, for plain workflows."""
        return _client(lambda **request: self._block(self._created(**request)))

    def get_openai_async_client(self) -> Any:
        """Returns an object with `await chat.completions.create(messages=...)`."""
        return _client(self._created)

    def client_of(
        self, model: str, post: Callable[[dict[str, Any]], Awaitable[tuple[str, Any]]], is_async: bool
    ) -> Any:
        """Returns a client of another model, whose endpoint `post` asks. Its `create` is a coroutine if `is_async`, and
        blocks otherwise; `model_path` is the name of the model."""

        async def created(**request: Any) -> Any:
            _, response = await post({"model": model, **request})
            return json.loads(json.dumps(response), object_hook=lambda fields: SimpleNamespace(**fields))

        return _client(created if is_async else lambda **request: self._block(created(**request)), model)

    async def _created(self, *, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        (experience,) = await self.chat_async(messages, **kwargs)
        turn, reason = experience.turns[0], "length" if experience.truncate_status else "stop"
        message = SimpleNamespace(role="assistant", content=experience.response_text, tool_calls=None)
        usage = SimpleNamespace(prompt_tokens=len(turn.prompt_tokens), completion_tokens=len(turn.tokens))
        choice = SimpleNamespace(index=0, message=message, finish_reason=reason)
        return SimpleNamespace(choices=[choice], usage=usage, model="policy", object="chat.completion")

    # ------------------------------------------------------------------ threads

    def _block(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the event loop and waits for it in a thread. Raises RolloutError on the event loop, which
        would wait for itself."""
        if self._is_on_loop():
            call.close()
            raise RolloutError(
                "a completion from a blocking call",
                "run_async makes it, and the event loop that would answer waits for it",
                "await model.chat_async, or the client of get_openai_async_client; or implement run",
            )
        waiting = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._waiting.add(waiting)
        try:
            return waiting.result()
        finally:
            self._waiting.discard(waiting)

    def _is_on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # a thread without an event loop
            return False

    def end(self) -> None:
        """Cancels the completions in progress, so that the thread of an abandoned workflow ends."""
        for waiting in [*self._waiting]:
            waiting.cancel()


def conversation_of(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[Message, ...]:
    """Converts OpenAI's messages. `tools` become a first message that the chat template reads."""
    rest = tuple(Message(str(message["role"]), str(message.get("content") or "")) for message in messages)
    return (Message("tools", json.dumps(list(tools))), *rest) if tools else rest


def _client(create: Any, model: str = "policy") -> Any:
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), model_path=model)
