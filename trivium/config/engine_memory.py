"""How much memory a rollout engine takes: what it holds, and what a pass needs on the way."""

from __future__ import annotations

from trivium.config.model_shape import ModelShape

MIB = 2**20
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Of one number, by type."""
PACKED_BYTES = 256 * MIB
"""An engine on a CPU keeps weights of up to so many bytes a second time, in the order in which products read them."""
_PIECE = 512
"""Tokens of a prompt that an engine on a CPU reads at once."""
_SAMPLED = 2**22
"""Logits that are sampled from together, at most."""
_SAMPLING = 32
"""Bytes for each of them beside itself: copies, sums and, for `top_p`, what sorts them."""


def engine_memory(
    shape: ModelShape, *, dtype: str, rows: int, tokens: int, device: str = "cpu", prefill: int = 0, prompt: int = 1
) -> dict[str, int]:
    """Bytes by item of a rollout engine that holds `rows` completions of `tokens` tokens in progress.

    It reads prompts of `prompt` tokens, `prefill` tokens of them at a time (or one prompt, if that is longer), and
    keeps their keys and values beside those of the rows until these have copied them; 0: what a pass takes is not
    counted.
    """
    width = BYTES[dtype]
    weights = shape.parameters * width
    packed = weights if device == "cpu" and weights <= PACKED_BYTES else 0
    items = {"engine": weights + packed, "engine cache": rows * tokens * shape.kv_per_token * width}
    if prefill:
        read = min(rows * prompt, max(prompt, prefill))
        items["engine prompts"] = read * shape.kv_per_token * width
        items["engine pass"] = max(
            _prompt_pass(shape, read, prompt, width, device), _decode_step(shape, rows, tokens, width)
        )
    return items


def _prompt_pass(shape: ModelShape, read: int, prompt: int, width: int, device: str) -> int:
    """Bytes that reading so many tokens of prompts of one length needs at its peak: in a feed-forward layer, with what
    is sorted by expert, or in attention, whose scores a GPU's kernels do not keep."""
    at_once = read if device != "cpu" else read // prompt * min(prompt, _PIECE)
    sorted_states = 2 * shape.active_experts if shape.experts > 1 else 0
    feed_forward = (3 * shape.mlp * shape.active_experts + (3 + sorted_states) * shape.hidden) * width
    scores = 2 * 4 * shape.heads * prompt if device == "cpu" else 0  # float32, before the softmax and after it
    attention = scores + (3 * shape.heads + 2 * shape.kv_heads) * shape.head_dim * width
    return at_once * max(feed_forward, attention) + read // prompt * shape.vocabulary * (4 + width)


def _decode_step(shape: ModelShape, rows: int, tokens: int, width: int) -> int:
    """Bytes that one token of every row needs at its peak: scores of all heads, or logits and what samples from
    them."""
    logits = rows * shape.vocabulary
    scores = rows * shape.heads * tokens * (2 * 4 + width)
    return max(scores, logits * (4 + width), logits * 4 + min(logits, _SAMPLED) * _SAMPLING)
