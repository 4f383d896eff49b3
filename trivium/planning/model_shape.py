"""The size of a model: parameters, bytes and arithmetic. `trivium.models.backbone.shape` counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Bytes of one number, by the name of its type."""


class FewBits(NamedTuple):
    """A quantised format of a matrix: a few bits for each number, and a float32 scale for each block of numbers."""

    bits: int
    """Bits of one number."""
    block: int
    """Numbers that share a scale."""


FEW_BITS = {"int8": FewBits(8, 256), "nf4": FewBits(4, 64)}
"""By value of `train.frozen_dtype`."""


@dataclass(frozen=True)
class VisionShape:
    """A tower of equal blocks over patches of an image, and a projector to the decoder's width."""

    hidden: int
    """Width of the tower."""
    layers: int
    block: int
    """Parameters of one block."""
    outside: int
    """Parameters of the tower outside its blocks."""
    projector: int
    """Parameters of the layers that map its outputs to the decoder's width."""
    patches_per_token: int
    """Number of patches of an image that one token stands for."""

    @property
    def tower(self) -> int:
        """Parameters without the projector."""
        return self.layers * self.block + self.outside

    @property
    def parameters(self) -> int:
        return self.tower + self.projector

    def trained(self, which: str | None) -> int:
        """Parameters that are trained if `train.vision_tower` is `which`."""
        return {"frozen": 0, "projector": self.projector}.get(which or "trained", self.parameters)

    def flops(self, image_tokens: int, squares: int) -> float:
        """Floating-point operations of a forward pass over images of `image_tokens` tokens; `squares` is the sum of the
        squared numbers of tokens of each image. Attention within an image is full."""
        patches = image_tokens * self.patches_per_token
        attended = squares * self.patches_per_token**2
        linear = self.layers * self.block * patches + self.projector * image_tokens
        return 2.0 * linear + 4.0 * self.layers * self.hidden * attended


@dataclass(frozen=True)
class ModelShape:
    """A decoder of blocks. Counts of its blocks are sums over all of them."""

    kind: str
    """`model_type`."""
    hidden: int
    """Width of the residual stream."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Inner width of a feed-forward layer; of one expert, if there are several."""
    gated: bool
    """Whether the feed-forward layer has a gate, and with it three matrices instead of two."""
    experts: int
    """1 for a model without experts."""
    active_experts: int
    """The number of experts that compute a token."""
    shared: int
    """Inner width of the feed-forward layer that computes every token beside the experts, of all shared experts."""
    vocabulary: int
    tied: bool
    """Whether input and output share one embedding."""
    max_positions: int | None
    parameters: int
    """Parameters; a tied embedding counts once."""
    dense: int
    """Parameters of the matrices of all blocks, without experts and routers."""
    sparse: int
    """Parameters of all experts; 0 without experts."""
    routers: int
    """Parameters of the matrices that score the experts for a token."""
    blocks: int
    """Parameters of all blocks: these matrices, norms, biases and convolutions."""
    adapted: tuple[int, ...]
    """Inputs and outputs of the linear layers of each block that an adapter changes by default."""
    keys: int
    """Layers with keys and values."""
    kv_per_token: int
    """Numbers that one token leaves in a cache of keys and values."""
    convolved: int = 0
    """Numbers of one sequence that convolutions of all layers keep: their last inputs."""
    scanned: int = 0
    """Numbers of one sequence in the states of all scans, which are float32 in models of any dtype."""
    vision: VisionShape | None = None
    """The vision tower and its projector; None for a model that reads text only."""

    @property
    def query(self) -> int:
        """Width of a token's queries, of all heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def backbone(self) -> int:
        """Parameters without the output layer; the vision tower and its projector are included."""
        return self.parameters - (0 if self.tied else self.embedding)

    @property
    def multiplied(self) -> int:
        """Parameters of the blocks that a token is multiplied with: all but those of inactive experts."""
        return self.dense + self.routers + self.sparse * self.active_experts // self.experts

    @property
    def matrices(self) -> int:
        """Parameters of the matrices of all blocks; one that several blocks share counts once."""
        return min(self.dense + self.sparse, self.blocks)

    def state_bytes(self, width: int) -> int:
        """Bytes of the recurrent states of one sequence, whose convolutions keep numbers of `width` bytes."""
        return self.convolved * width + self.scanned * max(4, width)

    @property
    def routing_per_token(self) -> int:
        """Most bytes of the recorded experts of one token. An id needs 1 byte up to 255 experts, since 0 stands for an
        unknown expert (`types.EXTRAS`)."""
        return self.layers * self.active_experts * (1 if self.experts <= 255 else 2)

    def adapter(self, rank: int, layers: int | None = None) -> int:
        """Parameters of low-rank adapters of that rank in the last `layers` blocks (unset: all)."""
        # A matrix of m inputs and n outputs gets rank * (m + n).
        return rank * sum(self.adapted[self.layers - (self.layers if layers is None else layers) :])

    def num_bytes(self, width: int, few: FewBits | None = None) -> int:
        """Bytes of the weights, with `width` bytes for a number. With `few`, the linear layers are in that format."""
        linear = self.matrices if few else 0
        return (self.parameters - linear) * width + (linear * few.bits // 8 + linear // few.block * 4 if few else 0)

    def flops(self, tokens: int, squares: int, head_tokens: int, *, backward: bool, adapted: int = 0) -> float:
        """Floating-point operations of one pass of the decoder over sequences with `tokens` tokens in total. `squares`
        is the sum of the squared lengths of the sequences. The head is applied to `head_tokens` of the tokens.

        The forward pass takes two operations per token and multiplied weight: embedding lookups take none, and of the
        experts only the active ones count. Causal attention takes 2 * heads * head_dim * length^2 per layer, half of
        the full square; recurrent states are neglected. The backward pass takes twice as many as the forward pass, for
        the gradients of activations and of weights. If only adapters in the last `adapted` layers are trained, it takes
        as many as the forward pass through these and the head, since frozen weights get no gradient; the arithmetic of
        the adapters is neglected.
        """
        head = 2.0 * self.embedding * head_tokens
        layers = 2.0 * self.multiplied * tokens
        layers += 2.0 * self.keys * self.query * squares
        if not backward:
            return layers + head
        return layers * (1 + adapted / self.layers) + 2 * head if adapted else 3 * (layers + head)
