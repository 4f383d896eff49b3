"""Runs advantage estimators and policy losses of users, which verl's decorators register (`core_algos`).

An estimator is called with `token_level_rewards, response_mask, config, index` and returns (advantages, returns). A
loss is called with `old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights`. It
returns the loss of these sequences, averaged by `loss_agg_mode`, alone or with metrics. Tensors are (B, R): B
sequences, R tokens from the first sampled token on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from trivium.algorithms import advantage, policy_loss
from trivium.algorithms.estimators.base import AdvantageInputs, Advantages
from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.foundation.errors import ConfigError, DataError
from trivium.foundation.registry import is_only_here, name_of, resolve
from trivium.frontdoors.keywords import accepted
from trivium.frontdoors.plain_values import Section
from trivium.frontdoors.verl.objects import core_algos
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]

_METRICS = ("train/clip_fraction", "train/kl", "train/clip_fraction_lower")
"""Names of the numbers that follow the loss if a function returns four values."""


def advantage_address(name: str) -> str | None:
    """Returns the address `module:function` of a user's estimator, or None for a name that is not the user's."""
    return _address(core_algos.ADV_ESTIMATOR_REGISTRY, "advantages", "register_adv_est", name)


def loss_address(name: str) -> str | None:
    """Returns the address `module:function` of a user's policy loss, or None for a name that is not the user's."""
    return _address(core_algos.POLICY_LOSS_REGISTRY, "policy_losses", "register_policy_loss", name)


def functions_here() -> dict[str, Function]:
    """Returns the registered functions that other processes cannot import, by address: those of the main script, and
    nested functions."""
    functions = (*core_algos.ADV_ESTIMATOR_REGISTRY.values(), *core_algos.POLICY_LOSS_REGISTRY.values())
    named = {name_of(function): function for function in functions}
    return {name: function for name, function in named.items() if is_only_here(name)}


def _address(functions: Mapping[str, Function], kind: str, decorator: str, name: str) -> str | None:
    if name in functions:
        return name_of(functions[name])
    if ":" not in name:
        return None
    function = resolve(kind, name)
    if hasattr(function, "metadata"):
        return None  # a function with the signature and the decorator of trivium.algorithms
    if function not in functions.values():
        raise ConfigError(f"use {name!r} here", "it is not decorated", f"decorate it with @{decorator}('a_name')")
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{attribute}" if file.endswith(".py") else name


Address = Annotated[str, Field(description="The function, as `module:function` or `file.py:function`.")]
Values = Annotated[dict[str, Any], Field(description="The section of verl's config that it is called with.")]


@advantage(
    formula="the user's function",
    source="the user's script",
    needs=set(),
)
def estimated(x: AdvantageInputs, *, function: Address, config: Values = {}) -> Advantages:  # noqa: B006
    """The advantages of a function with verl's signature."""
    shape, cut = _cutting(x.response_mask)
    arguments = {
        "token_level_rewards": cut(x.token_level_rewards),
        "response_mask": cut(x.response_mask),
        "config": Section.of(config),
        # verl's index holds texts, the uids of the prompts.
        "index": np.array([str(number) for number in x.group.tolist()], dtype=object),
    }
    with torch.no_grad():
        result = called(resolve("advantages", function), function, arguments)
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, torch.Tensor) for part in result)):
        raise DataError(f"(advantages, returns) from {function}", f"a {type(result).__name__}", "return two tensors")
    return Advantages(*(shape(part, x.token_level_rewards, function) for part in result))


@policy_loss(
    formula="the user's function",
    source="the user's script",
    needs={"advantages", "old_log_prob"},
    on_policy="none: the user's function defines it",
    weighs=True,
)
def computed(
    x: PolicyInputs,
    *,
    function: Address,
    loss_agg_mode: str = "token-mean",
    config: Values = {},  # noqa: B006
) -> PerToken:
    """The loss of a function with verl's signature, spread over the tokens that it is the average of.

    The step's loss is then averaged over the whole mini-batch, however it was cut.
    """
    mask = x.response_mask
    if not mask.any():
        return PerToken(x.log_prob * 0.0)
    _, cut = _cutting(mask)
    weights = x.columns.get("rollout_is_weights")
    arguments = {
        "old_log_prob": cut(x.old_log_prob),
        "log_prob": cut(x.log_prob),
        "advantages": cut(x.advantages),
        "response_mask": cut(mask),
        "loss_agg_mode": loss_agg_mode,
        # Without the counts of the whole step: the function averages over these sequences, and the core over the step.
        "config": Section.of({**config, "global_batch_info": {}}),
        "rollout_is_weights": None if weights is None else cut(weights),
    }
    loss, metrics = _loss_of(called(resolve("policy_losses", function), function, arguments), function)
    values = {name: torch.as_tensor(value).detach().to(loss).expand(mask.shape) for name, value in metrics.items()}
    return PerToken(loss * _share(mask, arguments["log_prob"].shape[1], loss_agg_mode).to(loss), values)


def _share(mask: Tensor, width: int, mode: str) -> Tensor:
    """Returns per-token losses (B, L) whose aggregation over these sequences is 1. `width` is the divisor of the
    function's `agg_loss` in the mode that divides by a length."""
    if mode == "seq-mean-token-sum":
        return mask / mask.sum(-1, keepdim=True).clamp(min=1)
    return mask * (width * mask.any(-1).sum() / mask.sum() if mode == "seq-mean-token-sum-norm" else 1.0)


def _loss_of(result: Any, function: str) -> tuple[Tensor, Mapping[str, Any]]:
    """Converts the return value of a function to (loss, metrics)."""
    loss, *rest = result if isinstance(result, tuple) else (result,)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        cause = f"a tensor {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise DataError(f"one number as the loss from {function}", cause, "average it with agg_loss")
    if len(rest) == 1 and isinstance(rest[0], Mapping):
        return loss, rest[0]
    return loss, dict(zip(_METRICS, rest, strict=False))


def called(fn: Function, address: str, arguments: Mapping[str, Any]) -> Any:
    """Calls a function with the arguments that it has parameters for."""
    named = [p for p in inspect.signature(fn).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p.name for p in named if p.default is p.empty and p.name not in arguments]
    if required:
        raise ConfigError(
            f"call {address}",
            f"it needs {', '.join(required)}",
            f"give them defaults: it is called with {', '.join(arguments)}",
        )
    return fn(**accepted(fn, arguments))


def _cutting(mask: Tensor) -> tuple[Callable[[Tensor, Tensor, str], Tensor], Callable[[Tensor], Tensor]]:
    """Returns (uncut, cut): `cut` keeps the columns of (B, L) from each row's first trained token on, `uncut` is its
    inverse."""
    length = mask.shape[1]
    starts = torch.where(mask.any(-1), mask.int().argmax(-1), length)
    place = torch.arange(length, device=mask.device)
    ends = torch.where(mask, place + 1, 0).amax(-1)
    width = int((ends - starts).clamp(min=0).amax()) if len(mask) else 0
    columns = starts.unsqueeze(-1) + torch.arange(width, device=mask.device)
    inside = columns < length

    def cut(values: Tensor) -> Tensor:
        gathered = values.gather(1, columns.clamp(max=length - 1))
        return torch.where(inside, gathered, torch.zeros_like(gathered))

    def placed(values: Tensor, like: Tensor, function: str) -> Tensor:
        if values.shape != columns.shape:
            raise DataError(
                f"a tensor {tuple(columns.shape)} from {function}",
                f"a tensor {tuple(values.shape)}",
                "return a number for each response token",
            )
        result = torch.zeros(like.shape, dtype=values.dtype, device=values.device)
        rows, at = torch.nonzero(inside & mask.gather(1, columns.clamp(max=length - 1)), as_tuple=True)
        result[rows, columns[rows, at]] = values[rows, at]
        return result.to(like.dtype)

    return placed, cut
