"""Optimizers, their schedule and their state on disk.

Weight decay applies to matrices only: not to norms and biases (one dimension), nor to embeddings, including a tied
output layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from trivium.foundation.errors import RunDirError, TriviumError
from trivium.models.weights.filling import local_part, read_like
from trivium.models.weights.saved_tensors import SavedTensors
from trivium.training.distributed.fsdp import OnShards, norm_over, splitting_groups
from trivium.training.section import OptimizerConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def learning_rate(config: OptimizerConfig, num_steps: int, total_steps: int) -> float:
    """The learning rate of the train step that follows `num_steps` others of its stage, for all its mini-batches."""
    if num_steps < config.warmup_steps:
        return config.peak * (num_steps + 1) / config.warmup_steps
    progress = min(1.0, (num_steps - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    return config.peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


def adamw(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters of a module, with float32 (or float64) state."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.peak,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


class Scheduler(Protocol):
    """The scheduler of an optimizer that a user built, such as one of torch's."""

    def step(self) -> None: ...


class Optimizer:
    """An optimizer over the named parameters of a module."""

    steps_started = 0
    """How many times it has started to change parameters."""

    def __init__(
        self,
        module: nn.Module,
        source: OptimizerConfig | torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
    ) -> None:
        """`source` describes AdamW, or is an optimizer over parameters of the module. `scheduler` takes a step after
        each step of that optimizer. Raises TriviumError for an optimizer with other parameters."""
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._scheduler = scheduler
        if isinstance(source, OptimizerConfig):
            self._optimizer: torch.optim.Optimizer = adamw(module, source)
            return
        self._optimizer = source
        held = {id(p) for group in source.param_groups for p in group["params"] if p.requires_grad}
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) in held}
        if len(self.parameters) < len(held):
            raise TriviumError(
                f"train a {type(module).__name__} with {type(source).__name__}",
                f"{len(held) - len(self.parameters)} of its {len(held)} parameters are not the model's",
                "build the optimizer over the parameters of this model, after it was prepared",
            )

    @property
    def lr(self) -> float:
        """The learning rate of the first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self, lr: float | None, max_grad_norm: float, who: str, origin: Callable[[], str] | None = None) -> float:
        """Clips the accumulated gradient, takes one step and returns the norm before clipping. `lr=None` keeps the
        rates of the optimizer and its scheduler. `origin` names an earlier quantity that is not finite.

        Raises TriviumError, weights untouched, when the norm is not finite.
        """
        norm = self._norm()
        if not torch.isfinite(norm):
            raise TriviumError(
                f"an optimizer step of {who}",
                f"the gradient norm is {float(norm)}{self._origin(origin)}; the weights were not changed",
                "look at the losses and log-probabilities of the last steps; lower the learning rate or max_grad_norm",
            )
        with OnShards("_foreach_mul_"):
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_grad_norm, norm)
        for group in self._optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        # Counted before the step: after an error within it, some weights may have changed.
        self.steps_started += 1
        with OnShards("_fused_adamw_"):
            self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return float(norm)

    def configure(self, *, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Sets what the next steps of an AdamW take beside the learning rate."""
        for group, decay in zip(self._optimizer.param_groups, (weight_decay, 0.0), strict=True):
            group.update(betas=betas, eps=eps, weight_decay=decay)

    def add_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adds to the accumulated gradient: a tensor or None for each of `parameters`."""
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
            elif gradient is not None:  # a copy, since two parameters may share the tensor
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)

    def norm(self) -> float:
        """The norm of the accumulated gradient."""
        return float(self._norm())

    def _norm(self) -> torch.Tensor:
        # Of local parts: DTensor would propagate the sharding of each argument, which takes seconds at the first step.
        by_groups: dict[tuple[ProcessGroup, ...], list[torch.Tensor]] = {}
        for gradient in (p.grad for p in self.parameters.values() if p.grad is not None):
            by_groups.setdefault(splitting_groups(gradient), []).append(local_part(gradient))
        # What ranks hold in common counts once: only ranks with different parts of the same tensors add their squares.
        norms = [norm_over(groups, torch.nn.utils.get_total_norm(parts)) for groups, parts in by_groups.items()]
        return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)

    def _origin(self, origin: Callable[[], str] | None) -> str:
        """Names the first non-finite quantity of this rank: the inputs or losses, else the gradient."""
        if before := origin() if origin is not None else "":
            return f", because {before}"
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        wrong = [name for name, grad in gradients.items() if not local_part(grad).isfinite().all()]
        return f" ({len(wrong)} of {len(gradients)} gradients, the backward pass from {wrong[-1]} on)" if wrong else ""

    def zero_grad(self) -> None:
        """Drops the accumulated gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """`<parameter>/<moment or step>` -> tensor, sharded as the parameter is; empty before the first step. Omits
        unused moments, which have no tensor."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def restore(self, state: SavedTensors) -> None:
        """Loads what `state` returned from whole tensors. Each process reads its own shards."""
        for key, entry in state.entries.items():
            name, _, moment = key.rpartition("/")
            if name not in self.parameters:
                raise RunDirError("restore the optimizer", f"no parameter {name!r}", "resume with the same model")
            parameter = self.parameters[name]
            like = moment != "step" and entry.shape == tuple(parameter.shape)
            self._optimizer.state[parameter][moment] = read_like(state, key, parameter, whole=not like)
