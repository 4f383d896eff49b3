"""A model over ranks: layers split by tensor and expert parallelism, and FSDP2 around them, which shards every
parameter and gathers it while its layer computes.

Its imports from torch and transformers take a second, so modules that read a config do not import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trivium.models.heads.trained_models import FilledModel
from trivium.models.weights.filling import is_sharded, local_part
from trivium.training.distributed.ranks import Ranks
from trivium.training.distributed.split_layers import split_layers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


def shard(model: nn.Module, ranks: Ranks, *, trained: bool, bfloat16: bool, cpu_offload: bool) -> None:
    """Shards a model. Callers may use only its `forward`. Does nothing in a single process.

    Each layer is a unit. Embeddings, last norm and head form one unit, so that tied weights stay one tensor. With
    `bfloat16` the layers are gathered in bfloat16 and their gradients reduced in float32; the head stays float32.
    Gradients are summed over the ranks: losses are normalised by counts of the whole mini-batch. Experts that are split
    over ranks are a unit of their own, sharded over the ranks that hold the same ones.
    """
    if ranks.mesh is None:
        return
    experts = split_layers(cast(FilledModel, model), ranks)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy()
    halved = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = halved if bfloat16 else full
    for module, mesh in experts:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        # Layers around others (Zamba 2) may share weights, which only the unit of the whole model keeps one tensor.
        if isinstance(module, GradientCheckpointingLayer) and not any(
            isinstance(inner, GradientCheckpointingLayer) for inner in module.modules() if inner is not module
        ):
            fully_shard(module, mesh=ranks.mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(
        # By default FSDP keeps the whole model gathered for the backward pass, which a frozen model does not have.
        model,
        mesh=ranks.mesh,
        mp_policy=full,
        offload_policy=offload,
        reshard_after_forward=None if trained else True,
    )
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that are gathered separately; none in a single process."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Frees the parameters that a forward pass without a backward pass left gathered."""
    for unit in units(model):
        unit.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor, on every rank. All ranks must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor that is equal on all ranks, with the sharding of `like`."""
    if not is_sharded(like):
        return value.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    local = like.to_local()
    sharded = distribute_tensor(
        value.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    )
    return sharded if sharded.to_local().device == local.device else sharded.to(local.device)


def splitting_groups(tensor: torch.Tensor) -> tuple[ProcessGroup, ...]:
    """The groups whose ranks hold different parts of a parameter or of its gradient: one for each axis of the mesh that
    splits it, no group if each rank holds the whole."""
    if not is_sharded(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())


def norm_over(groups: Iterable[ProcessGroup], norm: torch.Tensor) -> torch.Tensor:
    """The norm of tensors from the norm of the parts that this rank holds; `groups` are their `splitting_groups`."""
    square = norm.square()
    for group in groups:
        torch.distributed.all_reduce(square, group=group)
    return square.sqrt()


class OnShards(TorchFunctionMode):
    """Makes torch's function of this name, which is in-place and element-wise, operate on this rank's shards while the
    block runs. DTensor would propagate the sharding of each argument, which takes seconds at the first step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = getattr(torch, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._function:
            args = [[*map(local_part, arg)] if isinstance(arg, list) else arg for arg in args]
        return func(*args, **(kwargs or {}))
