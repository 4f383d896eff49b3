"""Splits the layers of an empty model over ranks, by the plans that its class has in transformers.

Tensor parallelism (`ranks.tensor`): queries, keys, values and the inputs of a feed-forward layer are split by columns,
the outputs by rows, embedding and output layer by the vocabulary. Expert parallelism (`ranks.experts`): each rank has
some of the experts, and each token travels to the ranks of its experts and back.

Parameters become DTensors. All others are whole on each rank, and so are their gradients: the inputs of a split layer
get the sum of the gradients of all its ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from trivium.foundation.errors import ConfigError
from trivium.models.backbone.shape import shape_of
from trivium.models.heads.trained_models import FilledModel
from trivium.planning.parallel import ParallelConfig, shape_problems
from trivium.training.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def split_layers(model: FilledModel, ranks: Ranks) -> list[tuple[nn.Module, DeviceMesh]]:
    """Splits a model without weights, in place. Returns the modules whose experts are split over ranks, each with the
    mesh of the ranks that hold the same experts.

    Raises ConfigError for a model that cannot be split in this way, and for a transformers without such plans.
    """
    if ranks.tensor is None:
        return []
    module = model.module
    _check(model, ranks)
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise ConfigError(
            "train.parallel: layers split over ranks",
            "this release of transformers has no plans with DTensors",
            "install transformers 5.23 or later",
        ) from error
    # A warning for each mesh whose tensors are gathered or summed over two of its axes, one after the other.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    tied = _tied(module)
    experts = {} if ranks.experts is None else _expanded(module, module.ep_plan)
    layers = {} if ranks.tensor_size == 1 else _expanded(module, module.tp_plan)
    layers = {name: style for name, style in layers.items() if name not in experts}
    for name, layer in module.named_modules():
        if name in layers and isinstance(layer, nn.Linear):  # `models.cpu.linear.use_onednn` cannot multiply DTensors
            vars(layer).pop("forward", None)
    apply_tensor_parallelism(module, ranks.tensor, layers)
    if ranks.experts is None:
        sharded = []
    else:
        # One implementation for scores and updates: the policy ratio of unchanged weights stays 1.
        apply_expert_parallelism(module, ranks.experts["expert"], ranks.tensor, experts, ep_implementation="all_to_all")
        dispatching = (name for name, style in experts.items() if style == "ep_dispatch_experts")
        assert ranks.expert_shards is not None
        sharded = [(module.get_submodule(name), ranks.expert_shards) for name in dispatching]
    for (owner, name), *others in tied:
        for other, its_name in others:
            other._parameters[its_name] = owner._parameters[name]
    return sharded


def _check(model: FilledModel, ranks: Ranks) -> None:
    expert = 1 if ranks.experts is None else ranks.experts["expert"].size()
    parallel = ParallelConfig(expert=expert, tensor=ranks.tensor_size)
    for problem in shape_problems(shape_of(model.module.config), parallel, ranks.sequence_size):
        raise ConfigError(
            f"{problem.where} {problem.asked} for {type(model.module).__name__}", problem.found, problem.do
        )


def _expanded(module: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan with an entry for each parameter and module of this model."""
    # Of the places of a tied parameter, transformers' functions know one.
    names = {*dict(module.named_modules()), *dict(module.named_parameters())}
    return {name: style for name, style in module._expand_parallel_plan(dict(plan)).items() if name in names}


def _tied(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that several modules share."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return [shared for shared in places.values() if len(shared) > 1]
