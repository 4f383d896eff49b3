"""The components of a rollout: tasks, renderer, engine, environment, reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from trivium.protocols.weight_channel import Weights
    from trivium.types import Completion, IntArray, Message, Prompt, Request, StopReason, Task

    Finish = tuple[float | None, Mapping[str, float]]
    Step = tuple[Sequence[Message], float | None, bool]
    OnTokens = Callable[[Sequence[int], Sequence[float]], None]
    """Takes the next tokens of a completion and their log-probabilities."""


class TaskSource(Protocol):
    """A named, finite, ordered collection of tasks with stable ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


class Renderer(Protocol):
    """Converts messages to tokens and back, without ever encoding a sampled completion again."""

    eos_token_ids: frozenset[int]
    """Tokens that end a turn."""

    def render(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a conversation, up to the beginning of the assistant's message."""
        ...

    def extend(
        self, history: Sequence[Message], seen: Prompt, stop_reason: StopReason, new: Sequence[Message]
    ) -> Prompt:
        """The next prompt: `seen` (the unchanged tokens of prompt and sampled completion) plus the new messages.

        `history` is the conversation up to and including the sampled completion. The result begins with `seen`, its
        media included.
        """
        ...

    def decode(self, tokens: Sequence[int] | IntArray) -> str:
        """Text without ends of turn, padding, the beginning of a sequence and placeholders of media."""
        ...

    def expert(self, messages: Sequence[Message], completion: str | Message) -> tuple[Prompt, IntArray]:
        """(prompt, completion tokens with end of turn) for a completion that the policy did not sample."""
        ...

    def supervised(self, messages: Sequence[Message]) -> list[tuple[Prompt, IntArray]]:
        """`expert` for each turn of the assistant in a conversation. Each prompt begins with the earlier ones and their
        turns."""
        ...


class RolloutEngine(Protocol):
    """Samples completions from the current policy."""

    @property
    def version(self) -> int:
        """The loaded policy version."""
        ...

    @property
    def max_context(self) -> int:
        """The largest total length of prompt and completion, in tokens."""
        ...

    async def generate(self, request: Request) -> Completion:
        """One completion. The engine batches concurrent calls; cancelling a call frees its row."""
        ...

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Adopts new weights: a list, or the channel's `DescribedWeights`, which it reads when it adopts them. With
        `finish`, it adopts them after the completions in flight, and later requests wait for that.

        With `update`, it adopts them between two tokens of the completions in flight, which continue with the new
        weights and their existing keys and values; each token records the version that sampled it. Only an engine with
        the capability `updates_in_flight` receives `update`, and only one with `adopts_adapters` receives a LoRA
        adapter instead of all weights. An engine that could read only a part of a version raises EngineFailure for
        every completion until it holds a whole version.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class ReadableEngine(Protocol):
    """A rollout engine whose weights can be read, for tests. Optional."""

    async def weights(self) -> Weights:
        """Copies of every parameter and persistent buffer, after all loads requested before this call."""
        ...


@runtime_checkable
class StreamingEngine(RolloutEngine, Protocol):
    """A rollout engine that reports tokens while it samples them. Optional: the endpoint of agents sends a stream at
    the end of the completion if the engine cannot."""

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        """One completion, as `generate` returns it. Calls `on_tokens` on the caller's event loop, in order, with parts
        that together are the tokens of the completion."""
        ...


class Progress(Protocol):
    """Follows one completion of a `Policy` while it is sampled."""

    def begin(self, prompt: Prompt) -> None:
        """The prompt is rendered, and the engine gets the request next."""
        ...

    def add(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """The next tokens. They are all tokens of the completion if the engine is not a `StreamingEngine`."""
        ...


@runtime_checkable
class RestingEngine(Protocol):
    """A rollout engine that can free memory of a device shared with the trainer. Optional."""

    async def rest(self) -> None:
        """Frees memory of the device until the next completion or the next weights."""
        ...


class Environment(Protocol):
    """The environment of a multi-turn workflow; one instance per trajectory.

    Both methods may be plain or `async`.
    """

    def reset(self, task: Task) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The first messages for the policy."""
        ...

    def step(self, completion: str) -> Step | Awaitable[Step]:
        """`(messages, reward, done)`: the observation, the reward of the completion, whether the episode has ended.

        A reward of None is no reward: reward functions score the trajectory if no step has one.
        """
        ...


@runtime_checkable
class ClosedEnvironment(Protocol):
    """An environment that holds something until its trajectory ends. Optional."""

    def close(self) -> Awaitable[None] | None:
        """Ends the environment, after its last step or a failure."""
        ...


@runtime_checkable
class FinishedEnvironment(Protocol):
    """An environment with a reward for the whole trajectory, or with metrics. Optional."""

    def finish(self) -> Finish | Awaitable[Finish]:
        """`(reward, metrics)`, called once after the last step, however the trajectory ended.

        The reward is added to those of the steps; None is none. The metrics are logged under `workflow/`.
        """
        ...


class Reward(Protocol):
    """Computes the reward of one trajectory; may be `async`. Receives the task's columns by name."""

    def __call__(self, prompt: str, completion: str, **columns: Any) -> float | Awaitable[float]: ...
