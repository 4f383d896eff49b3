"""Checks of a request that all engines share."""

from __future__ import annotations

from trivium.foundation.errors import RolloutError
from trivium.types import Request


def check_request(request: Request, max_context: int, vocab_size: int) -> int:
    """Returns the maximum number of tokens of the completion. Raises RolloutError for an invalid request."""
    prompt, sampling = request.prompt_tokens, request.sampling
    if not len(prompt) or prompt.min() < 0 or prompt.max() >= vocab_size:
        raise RolloutError(
            "a prompt of token ids below the vocabulary's size",
            f"{len(prompt)} tokens, ids up to {prompt.max(initial=-1)}, vocabulary {vocab_size}",
            "use the model's own tokenizer",
        )
    if len(prompt) >= max_context:
        raise RolloutError(
            "a prompt that leaves context for a completion",
            f"{len(prompt)} tokens, and the context holds {max_context}",
            "shorten the prompt, or raise engine.max_context",
        )
    cut = 0 < sampling.top_p <= 1 and sampling.top_k >= 0 and 0 <= sampling.min_p <= 1
    if sampling.max_new_tokens < 1 or sampling.temperature < 0 or not cut:
        raise RolloutError(
            "sampling that yields tokens",
            str(sampling),
            "max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0, 0 <= min_p <= 1",
        )
    return min(sampling.max_new_tokens, max_context - len(prompt))
