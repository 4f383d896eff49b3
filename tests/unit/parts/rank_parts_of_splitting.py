"""What each rank of a test of split layers does; forked processes import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from example_counts import FULL
from hybrid_parts import HYBRID_OF
from training_parts import Parts, Reinforce, SquaredError, make_batch
from transformers.distributed import tensor_parallel

from trivium.models.backbone.shape import read_shape
from trivium.models.heads.kept import KeptSets
from trivium.models.heads.log_prob_head import log_prob_and_entropy, mean_discriminant, sum_pi_squared, top_k_log_probs
from trivium.models.heads.trained_models import LanguageModel
from trivium.models.heads.vocabulary_part import OutputLayer, VocabularyPart
from trivium.models.weights.filling import local_part
from trivium.planning.model_memory import SplitModels, TrainedModels, memory_plan
from trivium.planning.parallel import EXPERT_MODELS, TENSOR_MODELS, ParallelConfig
from trivium.training import optim
from trivium.training.batching import count
from trivium.training.distributed.ranks import ALONE, Ranks, join_ranks
from trivium.training.engine import TorchTrainEngine
from trivium.training.snapshot import full_weights
from trivium.types import Teacher

BATCH = make_batch(advantages=0.5, returns=0.2)
joined = cache(join_ranks)
"""To join again makes process groups again, whose threads wake a hundred times a second until the process ends."""
ADAPTER = {"rank": 2}
TOKENS = 8
_COUNTS = torch.tensor([2, 1, 0, -2, 3, 2])
KEPT = KeptSets(_COUNTS, torch.tensor([0, 1, 5, 0, 3, 2, 6, 1, 1, 4]), _COUNTS.abs().cumsum(0))
"""Of the fourth state, two tokens are excluded; of others, some parts of the vocabulary have no candidate."""
LAYOUTS = {"tensor": {"tensor": 2}, "expert": {"expert": 2}, "both": {"tensor": 2, "expert": 2}}
SPLIT_LIKE: dict[str, dict[str, tuple[str, ...]]] = {
    "tensor": {
        **dict.fromkeys(("granite", "mistral", "smollm3"), ("llama",)),
        "granitemoe": ("granitemoehybrid",),
        "qwen3": ("qwen3_moe", "llama"),
        "qwen3_5_moe": ("qwen3_5", "qwen3_next"),
    },
    "expert": {
        **dict.fromkeys(("mixtral", "olmoe"), ("qwen3_moe",)),
        "granitemoe": ("granitemoehybrid",),
        **dict.fromkeys(("qwen2_moe", "qwen3_5_moe"), ("qwen3_next",)),
    },
    "sharded": {"bamba": ("granitemoehybrid",), "lfm2": ("lfm2_moe",)},
}
"""By layout, the types that only HYPOTHESIS=full tries. Each module that ranks split (`sharded`: each recurrent layer)
has the plan and the parameters of that of another type, which is tried."""
SHARDED = [kind for kind in HYBRID_OF if kind not in TENSOR_MODELS]
"""Those whose layers no rank splits."""
SPLIT_MODELS = sorted((TENSOR_MODELS | EXPERT_MODELS) - HYBRID_OF.keys() - {"qwen3_moe"})
"""Those beside `model`, which is a Qwen 3 mixture in every layout."""
HYBRIDS_BY_LAYOUT = {
    "sharded": SHARDED,
    "tensor": [kind for kind in HYBRID_OF if kind in TENSOR_MODELS],
    "expert": [kind for kind in HYBRID_OF if kind in EXPERT_MODELS],
}
HYBRID_CASES = {
    2: [
        (kind, name)
        for name, kinds in HYBRIDS_BY_LAYOUT.items()
        for kind in kinds
        if FULL or kind not in SPLIT_LIKE[name]
    ],
    4: [("zamba2", "replicas"), ("qwen3_next", "replicas of experts"), ("qwen3_next", "both")],
}
CONTINUED = "qwen3_next"
"""The hybrid whose checkpoints are tried."""
CONTINUED_CASES = [
    (size, name)
    for size, cases in HYBRID_CASES.items()
    for kind, name in cases
    if kind == CONTINUED and (FULL or size == 4)
]
"""Each of the layouts on four ranks has what one on two ranks has, and shards or replicates it."""
RESUMED = [(size, name) for size in (2, 4) for name in LAYOUTS if FULL or size == 4 or name == "both"]
"""The sizes and layouts of the checkpoints of `model`."""
HYBRID_LAYOUTS: dict[str, dict[str, int]] = {
    **LAYOUTS,
    "sharded": {},
    "replicas": {"shard": 2},
    "replicas of experts": {"shard": 2, "expert": 2},
}
_TRAINED = Reinforce(entropy_coef=0.2), SquaredError()
_AVERAGE: dict[str, Any] = {
    "needs": frozenset({"teacher"}),
    "teacher": Teacher(None, 1, weights="average", rate=0.3),
}


@dataclass(frozen=True)
class Step:
    """One update of the policy, and of the critic if there is one."""

    norms: dict[str, float]
    weights: dict[str, torch.Tensor]
    """Of the policy, and of the average of its versions if the engine has one."""

    def distance(self, other: Step) -> float:
        """The largest relative difference of gradient norms and weights. `other` may have more of them."""
        assert self.norms.keys() <= other.norms.keys()
        assert self.weights.keys() <= other.weights.keys()
        norms = [abs(value / other.norms[key] - 1) for key, value in self.norms.items()]
        pairs = [(value, other.weights[name]) for name, value in self.weights.items()]
        return max(norms + [float((mine - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs])

    def is_whole(self) -> bool:
        """Whether it has the critic and the average."""
        return len(self.norms) == len(_TRAINED) and any(name.startswith("average ") for name in self.weights)


def gloo_threads() -> set[int]:
    """The numbers of threads of all process groups."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return {group._get_backend(torch.device("cpu")).options._threads for group in groups}


def engine_of(
    directory: Path,
    ranks: Ranks = ALONE,
    *,
    model: str = "model",
    lora: dict[str, int] | None = None,
    shard: int = 0,
    critic: bool = True,
    average: bool = False,
    **parallel: int,
) -> TorchTrainEngine:
    config: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_tokens_per_micro_batch": 40, "lora": lora}
    config["shard"] = shard
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate({**config, "parallel": parallel, "optimizer": {"lr": 0.1, "eps": 1.0}}),
        model_dir=directory / model,
        algorithm=Parts(_TRAINED if critic else _TRAINED[:1], **(_AVERAGE if average else {})),
        temperature=0.8,
        max_response_length=32,
        total_steps=10,
        seed=0,
        threads=1,
        ranks=ranks,
    )
    engine.prepare()
    return engine


def step(engine: TorchTrainEngine) -> Step:
    rows = range(engine.ranks.data_rank, len(BATCH), engine.ranks.data_size)
    norms: dict[str, float] = {}
    for objective in (objective for objective in _TRAINED if objective.role in engine._learners):
        metrics = engine.update(objective.role, BATCH.select([*rows]), objective, count(BATCH, 32))
        norms |= {key: value for key, value in metrics.items() if "grad_norm" in key}
    engine.version += 1
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    if (teacher := engine._learners.get("teacher")) is not None:
        average = full_weights(cast(LanguageModel, teacher.model))
        weights |= {f"average {name}": tensor.clone() for name, tensor in average}
    return Step(norms, weights)


def on_ranks(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """Steps by layout, `resumed` ones from the checkpoint of one process, faulty ones by fault, the part of the
    parameters that this rank holds, and the numbers of a split output layer."""
    joined(tensor=2)
    own = VocabularyPart(rank * TOKENS // size, torch.distributed.group.WORLD)
    done: dict[str, Any] = {"head": [head_numbers(own, TOKENS // size, kept) for kept in (None, KEPT)]}
    for name, parallel in LAYOUTS.items():
        engine = engine_of(directory, joined(**parallel), average=True, **parallel)
        done[f"{name} part"] = part_of(engine)
        done[name] = step(engine)
        if (size, name) in RESUMED:
            engine.save(directory / f"{size} {name}")
            engine.load(directory / "alone")
            done[f"{name} resumed"] = step(engine)
    if FULL or size == 4:  # where FSDP shards the experts, too
        done["adapter"] = step(engine_of(directory, joined(expert=2), lora=ADAPTER, expert=2))
    for kind in SPLIT_MODELS if size == 2 else ():
        for number, name in enumerate(layouts_of(kind)):
            layout = LAYOUTS[name]
            engine = engine_of(directory, joined(**layout), model=kind, critic=number == 0, **layout)
            done[f"{kind} {name} part"] = part_of(engine)
            done[f"{kind} {name}"] = step(engine)
    for name, (owner, attribute, faulty) in FAULTS.items() if size == 2 else ():
        right = vars(owner)[attribute]
        setattr(owner, attribute, faulty)
        try:
            done[name] = step(engine_of(directory, joined(tensor=2), critic=False, tensor=2))
        finally:
            setattr(owner, attribute, right)
    return {**done, "threads": gloo_threads()}


def part_of(engine: TorchTrainEngine) -> float:
    """The part of the policy's parameters that this rank holds."""
    parameters = [*engine._learners["policy"].model.parameters()]
    return sum(local_part(p).numel() for p in parameters) / sum(p.numel() for p in parameters)


def planned_part(model_dir: Path, size: int, *, shard: int = 0, **parallel: int) -> float:
    """The part of the policy's parameters that the memory plan expects on each of `size` ranks."""
    shape = read_shape(model_dir)
    split = SplitModels(shard or size, ParallelConfig(**parallel))
    return memory_plan(TrainedModels(shape), 1, split)["policy weights"] / 4 / shape.parameters


def hybrids_on_ranks(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """Steps of each case, with the critic in a model's first one; `resumed` ones from the checkpoint of one process;
    and the part of the parameters that this rank holds."""
    done: dict[str, Any] = {}
    for number, (kind, name) in enumerate(HYBRID_CASES[size]):
        layout, continued = HYBRID_LAYOUTS[name], kind == CONTINUED and (size, name) in CONTINUED_CASES
        is_first = size == 2 and all(kind != other for other, _ in HYBRID_CASES[size][:number])
        what = {"critic": continued or is_first, "average": continued}
        engine = engine_of(directory, joined(**layout), model=kind, **what, **layout)
        done[f"{kind} {name} part"] = part_of(engine)
        done[f"{kind} {name}"] = step(engine)
        if continued:
            engine.save(directory / f"{size} {kind} {name}")
            engine.load(directory / f"{kind} alone")
            done[f"{kind} {name} resumed"] = step(engine)
    return done


def layouts_of(kind: str) -> list[str]:
    """The layouts in which ranks split models of a type. Of those that can be split in two ways, `model` has both at
    once; HYPOTHESIS=full tries the other types as well, and those of `SPLIT_LIKE`."""
    kinds = {"tensor": TENSOR_MODELS, "expert": EXPERT_MODELS}
    possible = [name for name, layout in LAYOUTS.items() if all(kind in kinds[split] for split in layout)]
    return possible if FULL else [name for name in possible if name != "both" and kind not in SPLIT_LIKE[name]]


def head_numbers(part: VocabularyPart, size: int, kept: KeptSets | None) -> dict[str, torch.Tensor]:
    """What the output layer with `size` tokens of a part computes of six states, and the gradient of the states."""
    draw = torch.Generator().manual_seed(0)
    states, weight, bias = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((6, 4), (TOKENS, 4), TOKENS))
    states.requires_grad_()
    weight, bias = weight[part.first :][:size], bias[part.first :][:size]
    layer = OutputLayer(weight, bias, 0.7, part=part)
    targets = torch.tensor([[0, 1], [5, 5], [3, 0], [6, 7], [2, 6], [1, 4]])
    log_prob, entropy = log_prob_and_entropy(states, layer, targets, entropy_grad=True, kept=kept)
    chosen = log_prob[:, :1] if kept is not None else log_prob  # the second target may be excluded
    (chosen.sum(1) * torch.arange(6) + 2 * entropy).sum().backward()
    ids, top = top_k_log_probs(states, replace(layer, temperature=1.0), 5)
    assert states.grad is not None
    return {
        "log_prob": chosen.detach(),
        "entropy": entropy.detach(),
        "gradient": states.grad,
        "sum_pi_squared": sum_pi_squared(states, layer, kept=kept),
        "mean_discriminant": mean_discriminant(states, layer, kept=kept),
        "ids": ids,
        "top": top,
    }


def _unless_wide(part: VocabularyPart, values: torch.Tensor, right: Callable[..., Any] = VocabularyPart.sum) -> Any:
    return values if values.dim() == 2 and values.shape[1] > 1 else right(part, values)


class _NotReduced:
    @staticmethod
    def apply(values: torch.Tensor, group: object) -> torch.Tensor:
        return values


def _norm_of_ranks(optimizer: optim.Optimizer) -> torch.Tensor:
    squares = [local_part(p.grad).square().sum() for p in optimizer.parameters.values() if p.grad is not None]
    total = torch.stack(squares).sum()
    torch.distributed.all_reduce(total)
    return total.sqrt()


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "norms of heads get the gradient of a rank's own heads": (
        tensor_parallel.ReplicatedWithGradAllReduce,
        "install_forward",
        lambda style, module, mesh: module,
    ),
    "the head passes on the gradient of a rank's own tokens": (VocabularyPart, "sum", _unless_wide),
    "experts pass on the gradient of a rank's own columns": (tensor_parallel, "_AllReduceBackward", _NotReduced),
    "the gradient norm counts what ranks hold in common once for each": (optim.Optimizer, "_norm", _norm_of_ranks),
}
