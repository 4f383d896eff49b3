"""The memory of a model of a given shape: on a training rank, and in a rollout engine.

What is held (weights, gradients, optimizer state, caches) is counted. What a pass needs besides (activations) is an
estimate that measured training steps agree with (tests/unit/planning/test_memory_plan.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from trivium.planning.choices import PACKED_BYTES, PROMPT_CHUNK, SAMPLED_TOGETHER, logits_rows
from trivium.planning.model_shape import BYTES, FEW_BITS, FewBits, ModelShape, VisionShape
from trivium.planning.parallel import WHOLE_ATTENTION, WHOLE_EXPERTS, ParallelConfig, computed_block, whole_in_a_block

_SAMPLING = 32
"""Bytes for each of them beside itself: copies, sums and, for `top_p`, sorted values."""


# --------------------------------------------------------------------------- a training rank


@dataclass(frozen=True)
class Adapter:
    """The low-rank adapters that a policy trains."""

    rank: int
    layers: int | None = None
    """The last layers that have them; None for all."""


@dataclass(frozen=True)
class TrainedModels:
    """The models of a stage and what it trains of them."""

    shape: ModelShape
    """The policy's; a critic has the same."""
    trained: Collection[str] = ("policy",)
    """Roles."""
    frozen: Mapping[str, ModelShape] = field(default_factory=dict[str, ModelShape])
    """Models that only score, by role."""
    averaged: Collection[str] = ()
    """The roles among `frozen` whose weights average the policy's and are kept as these are."""
    adapter: Adapter | None = None
    """Trained in place of the policy's weights. The layers below it keep nothing for the backward pass."""
    vision_tower: str | None = None
    """The trained parts of the vision side."""
    dtype: str = "float32"
    """In which layers compute. `bfloat16` halves what layers other than norms keep for the backward pass. Weights,
    gradients and the two moments of the optimizer are float32, or float64 for that dtype."""
    frozen_dtype: str = "float32"
    """In which frozen weights are kept; their head is computed in float32."""
    gradient_checkpointing: bool = False

    @property
    def wide(self) -> int:
        """Bytes of a number that is trained."""
        return 8 if self.dtype == "float64" else 4

    @property
    def few(self) -> FewBits | None:
        """How frozen weights are kept in 8 or 4 bits; None if they are not."""
        return FEW_BITS.get(self.frozen_dtype)

    @property
    def frozen_width(self) -> int:
        """Bytes of a frozen number that is not kept in few bits."""
        few = 2 if self.few else min(self.wide, BYTES[self.frozen_dtype])
        return self.wide if self.dtype == "float64" else few

    @property
    def adapted(self) -> Adapter | None:
        """The adapter, if the policy is trained."""
        return self.adapter if "policy" in self.trained else None

    @property
    def learning_layers(self) -> int:
        """The layers of the policy that keep what the backward pass needs."""
        layers = self.adapted.layers if self.adapted and [*self.trained] == ["policy"] else None
        return self.shape.layers if layers is None else layers


@dataclass(frozen=True)
class SplitModels:
    """How models are divided among training ranks."""

    shards: int = 1
    """The ranks that each hold a part of the parameters."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The ranks that split each layer, and its experts."""
    gpu: int = 0
    """The memory of the rank's GPU; 0 without one."""

    def copied(self, shape: ModelShape) -> int:
        """Parameters that all ranks together hold in addition, since splitting the layers leaves them whole."""
        tensor, expert = self.parallel.tensor, self.parallel.expert
        return (tensor - 1) * shape.layers * sum(whole_in_a_block(shape, tensor, expert))

    def fuses(self, models: TrainedModels) -> bool:
        """Whether the layers are those of `trivium.models.cpu.fused`."""
        alone = self.gpu == 0 and self.parallel.tensor == 1
        return alone and models.dtype != "bfloat16" and models.shape.gated and models.shape.experts == 1


_WHOLE = SplitModels()


def memory_plan(
    models: TrainedModels, tokens: int, split: SplitModels = _WHOLE, image_tokens: int = 0
) -> dict[str, int]:
    """Bytes by item on one rank. One pass computes `tokens`, of which `image_tokens` stand for images."""
    shape, wide, frozen_width, few = models.shape, models.wide, models.frozen_width, models.few
    tensor, shards = split.parallel.tensor, split.shards
    items: dict[str, int] = {}
    for role in models.trained:
        adapter = models.adapter if role == "policy" else None
        number = shape.parameters if role == "policy" else shape.backbone + shape.hidden
        number += split.copied(shape)
        frozen_vision = (
            0 if shape.vision is None else shape.vision.parameters - shape.vision.trained(models.vision_tower)
        )
        moving = number - frozen_vision if adapter is None else shape.adapter(adapter.rank, adapter.layers)
        held = number * wide if adapter is None else shape.num_bytes(frozen_width, few) + moving * wide
        items[f"{role} weights"] = held // shards
        items[f"{role} gradients"] = moving * wide // shards
        items[f"{role} optimizer"] = 2 * moving * wide // shards
    for role, its in models.frozen.items():
        averaged = role in models.averaged
        # A policy that is neither trained nor the base of an adapter is saved as it is held: not in few bits.
        size = its.parameters * wide if averaged else its.num_bytes(frozen_width, None if role == "policy" else few)
        items[f"{role} weights"] = (size + split.copied(its) * (wide if averaged else frozen_width)) // shards
    narrowed = [its for role, its in models.frozen.items() if role not in models.averaged]
    narrowed += [shape] * (models.adapted is not None)
    if frozen_width < wide and narrowed:
        items["float32 head"] = max(its.embedding for its in narrowed) * wide // tensor
    if shards > 1:  # the root with its embeddings, and two layers: one computes while the next is gathered
        narrow = BYTES[models.dtype]
        block = sum(computed_block(shape, tensor, split.parallel.expert))
        items["gathered"] = (2 * block * narrow + shape.embedding * (1 if shape.tied else 2) * wide // tensor) * 2
    elif models.dtype == "bfloat16" and not (models.adapted and frozen_width == BYTES[models.dtype]):
        # autocast keeps the matrices it cast until the pass is over
        items["gathered"] = shape.matrices * 2
    if few and narrowed:  # each matrix is dequantized for its product, forward and backward
        items["dequantized"] = 2 * max(its.hidden * its.mlp for its in narrowed) * BYTES[models.dtype]
    items["activations"] = _activations(models, split, tokens)
    if shape.vision is not None:
        items["vision activations"] = _vision_activations(models, shape.vision, image_tokens)
    return items


def _vision_activations(models: TrainedModels, vision: VisionShape, image_tokens: int) -> int:
    """Bytes that a pass of the vision tower over `image_tokens` needs. A patch leaves the input of each layer, and
    about one and a half numbers for each output of its matrices, in all layers or only in those at work."""
    learns = models.vision_tower in (None, "trained") and models.adapter is None
    all_layers = learns and not models.gradient_checkpointing
    layer = 3 * vision.block // (2 * vision.hidden)
    patch = layer * (vision.layers + 1 if all_layers else min(3, vision.layers + 1)) + vision.layers * vision.hidden
    return image_tokens * vision.patches_per_token * patch * BYTES[models.dtype]


def _activations(models: TrainedModels, split: SplitModels, tokens: int) -> int:
    """Bytes that one forward and backward pass over `tokens` needs at its peak on one rank.

    With the fused layers of a CPU, and adapters at each matrix, as measured for SmolLM2-135M (docs/memory.md). If ranks
    exchange tokens for experts, a rank gets as many as it sends, and keeps both and their outputs. Attention, recurrent
    layers and experts that the plan of the model does not split are not divided."""
    shape, tensor, exchanges = models.shape, split.parallel.tensor, split.parallel.expert > 1
    narrow, wide, fused = BYTES[models.dtype], models.wide, split.fuses(models)
    if fused:
        # Each layer saves its inputs. Adding the outputs of adapters leaves holes in the heap.
        saved = 5 * shape.mlp // 2 if models.adapted else 2 * shape.mlp
        layer = (saved + 4 * shape.hidden + 3 * shape.query + 2 * shape.key) * wide
    else:
        attention = 4 * shape.query + 8 * shape.key
        experts = (4 if shape.gated else 3) * shape.mlp * shape.active_experts
        experts += 4 * shape.hidden * shape.active_experts * exchanges
        whole = shape.layers if shape.kind in WHOLE_ATTENTION else shape.layers - shape.keys
        through = attention * (whole * tensor + shape.layers - whole) // (shape.layers * tensor)
        through += experts if shape.kind in WHOLE_EXPERTS and not exchanges else experts // tensor
        through += (4 if shape.gated else 3) * shape.shared // tensor
        layer = through * narrow + 4 * shape.hidden * (narrow + wide)  # norms compute in float32 whatever the dtype
    learning = models.learning_layers
    # One layer more than are kept: its gradients. With checkpoints a CPU's heap keeps what several of them freed.
    layers = layer * ((5 if fused else 3) if models.gradient_checkpointing else learning + 1)
    checkpoints = learning * shape.hidden * wide * models.gradient_checkpointing
    row = shape.vocabulary * wide // tensor
    logits = min(logits_rows(row, split.gpu), tokens) * row
    return tokens * (layers + checkpoints + 3 * shape.hidden * wide) + 3 * logits


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
    again = weights if weights <= PACKED_BYTES else shape.embedding * width
    packed = again if device == "cpu" and again <= PACKED_BYTES else 0
    items = {"engine": weights + packed, "engine cache": rows * tokens * shape.kv_per_token * width}
    if states := rows * shape.state_bytes(width):
        items["engine states"] = states
    if prefill:
        num_read = min(rows * prompt, max(prompt, prefill))
        prompts = num_read // prompt * shape.state_bytes(width)
        items["engine prompts"] = num_read * shape.kv_per_token * width + prompts
        items["engine pass"] = max(
            _prompt_pass(shape, num_read, prompt, width, device), _decode_step(shape, rows, tokens, width)
        )
    return items


def _prompt_pass(shape: ModelShape, num_read: int, prompt: int, width: int, device: str) -> int:
    """Bytes that reading `num_read` tokens, in prompts of `prompt` tokens, needs at its peak: in a feed-forward layer,
    with the states sorted by expert, or in attention, whose scores are kept on a CPU only."""
    at_once = num_read if device != "cpu" else num_read // prompt * min(prompt, PROMPT_CHUNK)
    sorted_states = 2 * shape.active_experts if shape.experts > 1 else 0
    inner = max(shape.mlp * shape.active_experts, shape.shared)  # the shared experts compute before or after the others
    feed_forward = (3 * inner + (3 + sorted_states) * shape.hidden) * width
    scored = device == "cpu" and shape.kv_per_token > 0
    scores = 2 * 4 * shape.heads * prompt if scored else 0  # float32, before the softmax and after it
    attention = scores + (3 * shape.query + 2 * shape.key) * width
    return at_once * max(feed_forward, attention) + num_read // prompt * shape.vocabulary * (4 + width)


def _decode_step(shape: ModelShape, rows: int, tokens: int, width: int) -> int:
    """Bytes that one token of every row needs at its peak: scores of all heads, or logits and the copies that sampling
    makes of them."""
    logits = rows * shape.vocabulary
    scores = rows * shape.heads * tokens * (2 * 4 + width) if shape.kv_per_token else 0
    return max(scores, logits * (4 + width), logits * 4 + min(logits, SAMPLED_TOGETHER) * _SAMPLING)
