"""The memory of a model of a given shape: on a training rank, and in a rollout engine.

What is held (weights, gradients, optimizer state, caches) is counted. What a pass needs besides (activations) is an
estimate that measured training steps agree with (tests/unit/planning/test_memory_plan.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trivium.planning.choices import PACKED_BYTES, PROMPT_CHUNK, SAMPLED_TOGETHER, logits_rows
from trivium.planning.model_shape import BYTES, FEW_BITS, ModelShape, VisionShape
from trivium.planning.parallel import WHOLE_ATTENTION, WHOLE_EXPERTS, computed_block, whole_in_a_block

_SAMPLING = 32
"""Bytes for each of them beside itself: copies, sums and, for `top_p`, sorted values."""


# --------------------------------------------------------------------------- a training rank


def memory_plan(
    shape: ModelShape,
    *,
    trained: Collection[str] = ("policy",),
    frozen: Mapping[str, ModelShape] | None = None,
    averaged: Collection[str] = (),
    tokens: int,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    adapter_rank: int = 0,
    adapted_layers: int | None = None,
    shards: int = 1,
    tensor: int = 1,
    expert: int = 1,
    vision_tower: str | None = None,
    image_tokens: int = 0,
    frozen_dtype: str = "float32",
    gpu: int = 0,
) -> dict[str, int]:
    """Bytes by item on one rank that trains models of `shape` (a critic has the policy's) and holds frozen ones.

    One pass computes `tokens`; each of `shards` ranks holds a part. `tensor` ranks split each layer, and `expert`
    ranks the experts (`train.parallel`). Weights, gradients and the two moments of the optimizer are float32, or
    float64 for that dtype. `bfloat16` halves what layers other than norms keep for the backward pass. With
    `adapter_rank` the policy trains low-rank adapters only, in its last `adapted_layers` (None: all): the layers below
    keep nothing for the backward pass. Frozen weights are kept in `frozen_dtype`, and their head
    is computed in float32; those of `averaged` roles are kept as the policy's. `image_tokens` are those among the
    tokens that stand for images, and `vision_tower` names the trained parts of the vision side. `gpu` is the memory of
    the rank's GPU, 0 without one.
    """
    wide = 8 if dtype == "float64" else 4
    few = FEW_BITS.get(frozen_dtype)
    kept = wide if dtype == "float64" else 2 if few else min(wide, BYTES[frozen_dtype])
    copied = (tensor - 1) * shape.layers * sum(whole_in_a_block(shape, tensor, expert))
    items: dict[str, int] = {}
    for role in trained:
        adapted = role == "policy" and adapter_rank > 0
        own = shape.parameters if role == "policy" else shape.backbone + shape.hidden
        own += copied
        frozen_vision = 0 if shape.vision is None else shape.vision.parameters - shape.vision.trained(vision_tower)
        moving = shape.adapter(adapter_rank, adapted_layers) if adapted else own - frozen_vision
        held = shape.num_bytes(kept, few) + moving * wide if adapted else own * wide
        items[f"{role} weights"] = held // shards
        items[f"{role} gradients"] = moving * wide // shards
        items[f"{role} optimizer"] = 2 * moving * wide // shards
    for role, its in (frozen or {}).items():
        # A policy that is neither trained nor the base of an adapter is saved as it is held: not in few bits.
        size = its.parameters * wide if role in averaged else its.num_bytes(kept, None if role == "policy" else few)
        whole = (tensor - 1) * its.layers * sum(whole_in_a_block(its, tensor, expert))
        items[f"{role} weights"] = (size + whole * (wide if role in averaged else kept)) // shards
    adapts = adapter_rank > 0 and "policy" in trained
    narrowed = [*(its for role, its in (frozen or {}).items() if role not in averaged), *[shape] * adapts]
    if kept < wide and narrowed:
        items["float32 head"] = max(each.embedding for each in narrowed) * wide // tensor
    if shards > 1:  # the root with its embeddings, and two layers: one computes while the next is gathered
        narrow = BYTES[dtype]
        block = sum(computed_block(shape, tensor, expert))
        items["gathered"] = (2 * block * narrow + shape.embedding * (1 if shape.tied else 2) * wide // tensor) * 2
    elif dtype == "bfloat16" and not (adapts and kept == BYTES[dtype]):
        # autocast keeps the matrices it cast until the pass is over
        items["gathered"] = shape.matrices * 2
    if few and narrowed:  # each matrix is dequantized for its product, forward and backward
        items["dequantized"] = 2 * max(each.hidden * each.mlp for each in narrowed) * BYTES[dtype]
    fused = gpu == 0 and tensor == 1 and dtype != "bfloat16" and shape.gated and shape.experts == 1
    items["activations"] = activations(
        shape,
        tokens,
        dtype,
        gradient_checkpointing,
        gpu,
        fused=fused,
        adapted=adapts,
        tensor=tensor,
        exchanges=expert > 1,
        learning=adapted_layers if adapts and [*trained] == ["policy"] else None,
    )
    if shape.vision is not None:
        learns = vision_tower in (None, "trained") and not adapter_rank
        items["vision activations"] = _vision_activations(
            shape.vision, image_tokens, dtype, all_layers=learns and not gradient_checkpointing
        )
    return items


def _vision_activations(vision: VisionShape, image_tokens: int, dtype: str, *, all_layers: bool) -> int:
    """Bytes that a pass of the vision tower over `image_tokens` needs. A patch leaves the input of each layer, and
    about one and a half numbers for each output of its matrices, in all layers or only in those at work."""
    layer = 3 * vision.block // (2 * vision.hidden)
    patch = layer * (vision.layers + 1 if all_layers else min(3, vision.layers + 1)) + vision.layers * vision.hidden
    return image_tokens * vision.patches_per_token * patch * BYTES[dtype]


def activations(
    shape: ModelShape,
    tokens: int,
    dtype: str,
    gradient_checkpointing: bool,
    gpu: int = 0,
    *,
    fused: bool = False,
    adapted: bool = False,
    tensor: int = 1,
    exchanges: bool = False,
    learning: int | None = None,
) -> int:
    """Bytes that one forward and backward pass over `tokens` needs at its peak on one of `tensor` ranks that split each
    layer. `fused`: with the layers of `trivium.models.cpu.fused`, and with `adapted`, low-rank adapters at each matrix,
    as measured for SmolLM2-135M (docs/memory.md). If ranks exchange tokens for experts, a rank gets as many as it
    sends, and keeps both and their outputs. The last `learning` layers (None: all) keep what the backward pass needs.

    Attention, recurrent layers and experts that the plan of the model does not split are not divided."""
    narrow, wide = BYTES[dtype], 8 if dtype == "float64" else 4
    if fused:
        # Each layer saves its inputs. With an adapter, the product inside the feed-forward layer as well, and adding
        # its outputs leaves holes in the heap.
        layer = ((5 if adapted else 2) * shape.mlp + 4 * shape.hidden + 3 * shape.query + 2 * shape.key) * wide
    else:
        attention = 4 * shape.query + 8 * shape.key
        experts = (4 if shape.gated else 3) * shape.mlp * shape.active_experts
        experts += 4 * shape.hidden * shape.active_experts * exchanges
        whole = shape.layers if shape.kind in WHOLE_ATTENTION else shape.layers - shape.keys
        through = attention * (whole * tensor + shape.layers - whole) // (shape.layers * tensor)
        through += experts if shape.kind in WHOLE_EXPERTS and not exchanges else experts // tensor
        through += (4 if shape.gated else 3) * shape.shared // tensor
        layer = through * narrow + 4 * shape.hidden * (narrow + wide)  # norms compute in float32 whatever the dtype
    learning = shape.layers if learning is None else learning
    # One layer more than are kept: its gradients. With checkpoints a CPU's heap keeps what several of them freed.
    layers = layer * ((5 if fused else 3) if gradient_checkpointing else learning + 1)
    kept = learning * shape.hidden * wide * gradient_checkpointing
    row = shape.vocabulary * wide // tensor
    logits = min(logits_rows(row, gpu), tokens) * row
    return tokens * (layers + kept + 3 * shape.hidden * wide) + 3 * logits


# --------------------------------------------------------------------------- a rollout engine


def engine_memory(
    shape: ModelShape, *, dtype: str, rows: int, tokens: int, device: str = "cpu", prefill: int = 0, prompt: int = 1
) -> dict[str, int]:
    """Bytes by item of a rollout engine that holds `rows` completions of `tokens` tokens in progress.

    It reads prompts of `prompt` tokens, `prefill` tokens at a time (or one prompt, if that is longer), and keeps their
    keys, values and recurrent states until the rows have copied them. With `prefill` 0 the memory of a pass is not
    counted.
    """
    width = BYTES[dtype]
    weights = shape.parameters * width
    packed = weights if device == "cpu" and weights <= PACKED_BYTES else 0
    items = {"engine": weights + packed, "engine cache": rows * tokens * shape.kv_per_token * width}
    if states := rows * shape.state_bytes(width):
        items["engine states"] = states
    if prefill:
        read = min(rows * prompt, max(prompt, prefill))
        prompts = read // prompt * shape.state_bytes(width)
        items["engine prompts"] = read * shape.kv_per_token * width + prompts
        items["engine pass"] = max(
            _prompt_pass(shape, read, prompt, width, device), _decode_step(shape, rows, tokens, width)
        )
    return items


def _prompt_pass(shape: ModelShape, read: int, prompt: int, width: int, device: str) -> int:
    """Bytes that reading `read` tokens, in prompts of `prompt` tokens, needs at its peak: in a feed-forward layer, with
    the states sorted by expert, or in attention, whose scores are kept on a CPU only."""
    at_once = read if device != "cpu" else read // prompt * min(prompt, PROMPT_CHUNK)
    sorted_states = 2 * shape.active_experts if shape.experts > 1 else 0
    inner = max(shape.mlp * shape.active_experts, shape.shared)  # the shared experts compute before or after the others
    feed_forward = (3 * inner + (3 + sorted_states) * shape.hidden) * width
    scored = device == "cpu" and shape.kv_per_token > 0
    scores = 2 * 4 * shape.heads * prompt if scored else 0  # float32, before the softmax and after it
    attention = scores + (3 * shape.query + 2 * shape.key) * width
    return at_once * max(feed_forward, attention) + read // prompt * shape.vocabulary * (4 + width)


def _decode_step(shape: ModelShape, rows: int, tokens: int, width: int) -> int:
    """Bytes that one token of every row needs at its peak: scores of all heads, or logits and the copies that sampling
    makes of them."""
    logits = rows * shape.vocabulary
    scores = rows * shape.heads * tokens * (2 * 4 + width) if shape.kv_per_token else 0
    return max(scores, logits * (4 + width), logits * 4 + min(logits, SAMPLED_TOGETHER) * _SAMPLING)
