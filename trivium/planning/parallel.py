"""How the layers of a model are split over training ranks, and what cannot be split."""

from __future__ import annotations

from collections.abc import Iterator

from trivium.config.fields import free
from trivium.config.schema import Config
from trivium.foundation.errors import Problem
from trivium.planning.model_shape import ModelShape

_MIXTURES = {
    *("gpt_oss", "granitemoe", "granitemoehybrid", "lfm2_moe", "olmoe"),
    *("qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
}
EXPERT_MODELS = {"mixtral", *_MIXTURES}
"""The types of models whose experts ranks can split: those whose updates a test compares with one rank."""
TENSOR_MODELS = {"cohere2", "granite", "llama", "mistral", "qwen2", "qwen3", "qwen3_5", "smollm3", *_MIXTURES}
"""The types of models whose layers ranks can split. A plan in transformers is not enough: with that of Apertus, ranks
compute other gradients than one. Plans leave recurrent states whole: each rank computes those of all heads."""

WHOLE_ATTENTION = {"gpt_oss", "granitemoe", "granitemoehybrid", "lfm2_moe", "olmoe"}
"""Those of `TENSOR_MODELS` whose plan leaves the attention of all heads to each rank."""
WHOLE_WEIGHTS = WHOLE_ATTENTION - {"olmoe"}
"""Those whose plan also leaves the matrices of attention and of recurrent layers whole."""
WHOLE_EXPERTS = {"gpt_oss"}
"""Those of `TENSOR_MODELS` whose plan splits no expert."""


class ParallelConfig(Config):
    """Ranks that split the layers of the models, beside those that shard their parameters."""

    expert: int = free(1, ge=1)
    """Ranks that hold different experts of a mixture of experts. Each token travels to the ranks of its experts and
    back (two all-to-alls for each layer, forward and backward). It divides the number of experts."""
    tensor: int = free(1, ge=1)
    """Ranks that compute every layer together for the same tokens: each has some of the attention heads, a part of each
    feed-forward layer and a part of the vocabulary, by the plan of the model's class in transformers. It divides those
    numbers. Ranks with consecutive numbers split a layer, so that they share a machine."""

    @property
    def is_set(self) -> bool:
        return self.expert > 1 or self.tensor > 1


def mesh_problems(ranks: int, *, sequence: int, shard: int, tensor: int, expert: int) -> Iterator[Problem]:
    """The sizes that do not divide the number of ranks, or each other."""
    sizes = {"sequence_parallel": sequence, "shard": shard, "parallel.tensor": tensor, "parallel.expert": expert}
    for name, number in sizes.items():
        if number and ranks % number:
            found = "the one does not divide the other"
            do = f"choose a divisor of {ranks}, or start more ranks (torchrun --nproc-per-node; cluster.ranks on Ray)"
            yield Problem(f"train.{name}", f"{number} on {ranks} ranks", found, do)
            return
    if ranks % (sequence * tensor):
        found = f"with train.parallel.tensor {tensor}, {sequence * tensor} ranks share each sequence"
        yield Problem(
            "train.sequence_parallel", f"{sequence} on {ranks} ranks", found, "lower one, or use a multiple of ranks"
        )
    if shard and shard % tensor:
        found = f"the {tensor} ranks that split a layer (train.parallel.tensor) belong to one group"
        yield Problem("train.shard", str(shard), found, f"choose a multiple of {tensor}")
    if shard and shard % expert:
        found = f"the {expert} ranks with different experts (train.parallel.expert) belong to one group"
        yield Problem("train.shard", str(shard), found, f"choose a multiple of {expert}")
    if expert > 1 and expert % tensor:
        found = f"the {tensor} ranks that split a layer (train.parallel.tensor) send different tokens to the experts"
        yield Problem("train.parallel.expert", str(expert), found, f"choose a multiple of {tensor}, or 1")


def shape_problems(shape: ModelShape, parallel: ParallelConfig, sequence: int) -> Iterator[Problem]:
    """The parts of a model that cannot be split in this way, by ranks of which `sequence` share each sequence."""
    expert, tensor = parallel.expert, parallel.tensor
    if parallel.is_set and shape.vision is not None:
        found, do = "the model has a vision tower", "leave it out: parameters are sharded in any case"
        yield Problem("train.parallel", "layers split over ranks", found, do)
    for key, ranks, kinds in (("tensor", tensor, TENSOR_MODELS), ("expert", expert, EXPERT_MODELS)):
        if ranks > 1 and shape.kind and shape.kind not in kinds:
            found = f"models of type {shape.kind!r} are not split in this way"
            do = f"leave it out (parameters are sharded in any case), or train one of {', '.join(sorted(kinds))}"
            yield Problem(f"train.parallel.{key}", str(ranks), found, do)
            return
    if sequence > 1 and shape.convolved:
        found = "a recurrent state needs the part of its sequence before it"
        yield Problem("train.sequence_parallel", str(sequence), found, "leave it out")
    if expert > 1 and shape.experts == 1:
        yield Problem("train.parallel.expert", str(expert), "the model has no experts", "leave it out")
    counts = {"experts": (shape.experts, expert)} if shape.experts > 1 else {}
    counts |= {
        "attention heads": (shape.heads, tensor),
        "key-value heads": (shape.kv_heads, tensor),
        "tokens of the vocabulary": (shape.vocabulary, tensor),
    }
    if shape.experts == 1 or expert == 1:
        counts["rows of a feed-forward layer"] = (shape.mlp, tensor)
    for name, (number, ranks) in counts.items():
        if number % ranks:
            key, do = "expert" if name == "experts" else "tensor", f"choose a divisor of {number}"
            yield Problem(f"train.parallel.{key}", str(ranks), f"it does not divide the {number} {name}", do)
    if shape.heads % tensor == 0 and shape.heads // tensor % sequence:  # attention splits the heads of a rank further
        found = f"it does not divide the {shape.heads // tensor} attention heads"
        found += f" that train.parallel.tensor {tensor} leaves to a rank" if tensor > 1 else ""
        yield Problem("train.sequence_parallel", str(sequence), found, f"choose a divisor of {shape.heads // tensor}")


def whole_in_a_block(shape: ModelShape, tensor: int, expert: int) -> tuple[int, int]:
    """Parameters of one block that each of the ranks that split layers has a copy of: those of attention, and of
    experts."""
    attention = 2 * shape.hidden * (shape.query + shape.key) if shape.kind in WHOLE_WEIGHTS else 0
    experts = shape.sparse // shape.layers if shape.kind in WHOLE_EXPERTS and expert == 1 else 0
    return (attention, experts) if tensor > 1 else (0, 0)


def computed_block(shape: ModelShape, tensor: int, expert: int) -> tuple[int, int]:
    """Parameters of one block that a rank holds while the block computes: without its experts, and of these."""
    attention, experts = whole_in_a_block(shape, tensor, expert)
    dense = ((shape.blocks - shape.sparse) // shape.layers - attention) // tensor + attention
    return dense, experts or shape.sparse // shape.layers // max(expert, tensor)


def sent_in_a_pass(
    shape: ModelShape, parallel: ParallelConfig, shards: int, tokens: int, *, passes: int, width: int
) -> dict[str, int]:
    """Bytes that a rank sends by item, in one pass over `tokens` on `shards` ranks, forward and backward.

    The layers are computed `passes` times (3 with gradient checkpointing), in numbers of `width` bytes. Parameters are
    gathered twice, and their gradients are reduced in float32. An all-reduce sends each number twice.
    """
    expert, tensor = parallel.expert, parallel.tensor
    dense, experts = computed_block(shape, tensor, expert)
    outside = shape.parameters - shape.blocks
    held = {"sharded layers": shape.layers * dense + outside // tensor, "sharded experts": shape.layers * experts}
    ranks = {"sharded layers": shards // tensor, "sharded experts": shards // max(expert, tensor)}
    items = {name: _sent(number * (2 * width + 4), ranks[name]) for name, number in held.items()}
    states = shape.layers * tokens * shape.hidden * width * passes
    items["split layers"] = _sent(2 * 2 * states, tensor)  # of attention and the feed-forward layer
    items["tokens for experts"] = _sent(2 * states * shape.active_experts // tensor, expert)  # there and back
    return items


def _sent(number: int, ranks: int) -> int:
    """The part of `number` bytes that goes to other ranks."""
    return number * (ranks - 1) // max(1, ranks)
