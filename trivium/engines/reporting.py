"""Reports the tokens of a completion while another thread or another process samples it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trivium.foundation.errors import RolloutError
from trivium.types import Completion

if TYPE_CHECKING:
    from trivium.protocols.rollout import OnTokens


class TokenReport:
    """Reports each token of a completion once, also if the completion is sampled again because its process died."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self.tokens: list[int] = []
        """The tokens that were reported."""

    def add(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Reports the tokens that follow `self.tokens`."""
        if tokens:
            self.tokens += tokens
            self._on_tokens(tokens, log_probs)

    def end(self, completion: Completion) -> Completion:
        """Reports the rest of the completion. Raises RolloutError if it differs from the tokens that were reported."""
        num_reported = len(self.tokens)
        if completion.tokens[:num_reported].tolist() != self.tokens:
            raise RolloutError(
                "a stream that agrees with its completion",
                f"the engine's process died after {num_reported} tokens, and the next one sampled others",
                "ask again",
            )
        self.add(completion.tokens[num_reported:].tolist(), completion.log_prob[num_reported:].tolist())
        return completion


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    """Calls the function on an event loop of another thread, if that loop is not closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():  # a closed loop has no waiting tasks
            raise
