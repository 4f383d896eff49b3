"""Strategies train models in one process, or on FSDP2 ranks that torchrun started, with the core's components.

Every rank runs the same script with its share of the data.
"""

from __future__ import annotations

import math
import random
import weakref
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import get_scheduler

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft.objects.checkpoints import network_of, save_model
from trivium.frontdoors.lightrft.objects.models.actor import ActorVL
from trivium.frontdoors.lightrft.objects.models.critic import CriticVL
from trivium.frontdoors.tables import announce
from trivium.models.heads.trained_models import LanguageModel, ValueModel
from trivium.models.weights.lora import has_adapter
from trivium.models.weights.quantized import original
from trivium.training.distributed.fsdp import shard
from trivium.training.distributed.ranks import COLLECTIVE_S, Ranks, join_ranks
from trivium.training.launched import launched_ranks
from trivium.training.learner import Learner, RoleModel, follow
from trivium.training.optim import Optimizer, Scheduler, adamw
from trivium.training.passes import MicroBatching
from trivium.training.section import OptimizerConfig
from trivium.training.snapshot import copy_companions

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
"""A mean is a sum that is then divided, because gloo has no mean."""
_METRIC_NAME = {"policy": "policy", "reference": "reference", "critic": "value"}
_ANY_TOKENS = 1 << 30
"""The limit of a micro-batch in tokens, which LightRFT counts in sequences."""
Wrapped = ActorVL | CriticVL


class Strategy:
    """Trains in a single process."""

    sharded = False
    """Whether parameters are sharded over the ranks that torchrun started."""

    def __init__(
        self,
        seed: int | Namespace | None = None,
        max_norm: float | None = None,
        args: Namespace | None = None,
    ) -> None:
        """Joins the ranks and seeds torch, numpy and random.

        Arguments that are None come from `args`, else default to 42 and 1.0. `max_norm` 0 disables gradient clipping.
        `Strategy(args)` is the same as `Strategy(args=args)`.
        """
        if isinstance(seed, Namespace):
            seed, args = None, seed
        self.args = Namespace() if args is None else args

        def chosen(name: str, value: Any, default: Any) -> Any:
            return getattr(self.args, name, default) if value is None else value

        self.seed = int(chosen("seed", seed, 42))
        self.max_norm = float(chosen("max_norm", max_norm, 1.0))
        self._replaced: list[weakref.ReferenceType[Any]] = []
        """Parameters that sharding has replaced. A further model must not contain one."""
        self.ranks = Ranks()
        self.setup_distributed()

    def setup_distributed(self, timeout: timedelta | None = None) -> None:
        """Joins the ranks, once. `timeout` limits how long they wait for one another. Raises ConfigError if torchrun
        started several ranks and this strategy is not sharded."""
        deadline = COLLECTIVE_S if timeout is None else timeout.total_seconds()
        if not self.sharded and launched_ranks() > 1:
            raise ConfigError(
                "a Strategy of one process", f"{launched_ranks()} ranks were started", "use FSDPV2Strategy"
            )
        if self.ranks.size == 1:
            self.ranks = join_ranks(device="cuda" if torch.cuda.is_available() else "cpu", deadline_s=deadline)
        self.set_seed(self.seed)

    @staticmethod
    def set_seed(seed: int) -> None:
        """Seeds random, numpy and torch."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    # ------------------------------------------------------------------ ranks

    @property
    def world_size(self) -> int:
        return self.ranks.size

    def get_rank(self) -> int:
        return self.ranks.rank

    def is_rank_0(self) -> bool:
        return self.ranks.rank == 0

    def print(self, *message: object) -> None:
        """Prints on the first rank, with the time."""
        if self.is_rank_0():
            print(f"[{datetime.now().astimezone():%m-%d %H:%M:%S}]", *message, flush=True)

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self.ranks.all_reduce_max(0)

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduces a number, a tensor, or each value of a dict over the ranks (`mean`, `sum`, `max`, `min`).

        Returns the same type (the mean of whole numbers is a float) and does not modify its argument.
        """
        if op not in _OPS:
            raise ConfigError(f"all_reduce with op {op!r}", "no such operation", f"known: {', '.join(_OPS)}")
        if isinstance(data, Mapping):
            return {name: self.all_reduce(value, op) for name, value in cast("Mapping[str, Any]", data).items()}
        tensor = data.detach() if isinstance(data, Tensor) else torch.tensor(data, dtype=torch.float64)
        # A copy, because `dist.all_reduce` writes into its argument.
        number = tensor.to(self.ranks.device, copy=True)
        if op == "mean" and not number.is_floating_point():
            number = number.float()
        if self.world_size > 1:
            dist.all_reduce(number, _OPS[op])
        number = number / self.world_size if op == "mean" else number
        if isinstance(data, Tensor):
            return number.to(data.device)
        return number.item() if op == "mean" else type(data)(number.item())

    def all_gather(self, data: Any) -> Any:
        """Concatenates a tensor, or each value of a dict, over the ranks. A number becomes a tensor with one entry per
        rank."""
        if isinstance(data, Mapping):
            return {name: self.all_gather(value) for name, value in cast("Mapping[str, Any]", data).items()}
        tensor = data.detach() if isinstance(data, Tensor) else torch.tensor([data], dtype=torch.float64)
        if self.world_size == 1:
            return tensor
        here = (tensor if tensor.ndim else tensor[None]).to(self.ranks.device).contiguous()
        parts = [torch.empty_like(here) for _ in range(self.world_size)]
        dist.all_gather(parts, here)
        return torch.cat(parts).to(tensor.device)

    # ------------------------------------------------------------------ models and optimizers

    def prepare(self, *models_or_tuples: Any, is_rlhf: bool = False) -> Any:
        """Moves models to their device and shards them over the ranks.

        Accepts models and tuples (model, optimizer) or (model, optimizer, scheduler). Returns a single argument by
        itself, several as a list. None stays None.
        """
        del is_rlhf
        prepared = [self._prepared(entry) for entry in models_or_tuples]
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, entry: Any) -> Any:
        if isinstance(entry, tuple):
            model, optimizer, *more = cast("tuple[Any, ...]", entry)
            if model is None:
                return entry
            return (self.prepare_model(model, is_training=True, optimizer=optimizer), optimizer, *more)
        if isinstance(entry, list):
            return [self._prepared(model) for model in cast("list[Any]", entry)]
        return self.prepare_model(entry)

    def prepare_model(
        self,
        model: Any,
        is_training: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        shard_size: int | None = None,
    ) -> Any:
        """Moves one model to its device and shards it over all ranks, for any `shard_size`.

        An existing `optimizer` gets the sharded parameters. A model that is neither ActorVL nor CriticVL (a reward
        model) moves to the device unsharded.
        """
        # -1 is LightRFT's name for all ranks.
        if shard_size not in (None, -1, self.world_size) and self.world_size > 1:
            announce([f"shard_size={shard_size} of prepare_model: a model is sharded over all ranks"])
        if not isinstance(model, Wrapped):
            return model.to(self.ranks.device).eval() if isinstance(model, nn.Module) else model
        if model.ranks.size > 1:
            return model
        model.to(self.ranks.device)
        if not is_training and optimizer is None:
            model.requires_grad_(False)
        elif not has_adapter(model.model) and any(original(layer) is not None for layer in model.model.modules()):
            cause = "weights in 4 bits are frozen, and it has no adapter"
            raise ConfigError(f"train a {type(model).__name__} with load_in_4bit", cause, "set lora_rank")
        core = core_of(model)
        if self.world_size > 1:
            # FSDP replaces the parameters, and the user's optimizer holds the ones of before.
            before = dict(core.named_parameters())
            # Weak references, because the id of a parameter that is gone may be that of a new one.
            replaced = {id(parameter) for reference in self._replaced if (parameter := reference()) is not None}
            if not replaced.isdisjoint(map(id, before.values())):
                raise ConfigError(
                    f"a {type(model).__name__} that shares its trunk, on {self.world_size} ranks",
                    "the model that it shares it with was sharded before",
                    "give both a directory: each is sharded by itself",
                )
            self._replaced += [weakref.ref(parameter) for parameter in before.values()]
            offload = bool(getattr(self.args, "fsdp_cpu_offload", False))
            shard(core, self.ranks, trained=is_training, bfloat16=core.autocast, cpu_offload=offload)
            model.adopt(self.ranks)
            if optimizer is not None:
                _follow(optimizer, before, dict(core.named_parameters()))
        return model

    def create_optimizer(
        self,
        model: Any,
        lr: float = 1e-6,
        betas: Sequence[float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> torch.optim.AdamW:
        """Returns AdamW over the trainable parameters. Weight decay applies to matrices only, not to embeddings."""
        first, second = betas
        config = OptimizerConfig(lr=lr, betas=(first, second), weight_decay=weight_decay, eps=eps)
        return adamw(network_of(core_of(model)), config)

    def prepare_models_and_optimizers(
        self, actor: Any, critic: Any, reward_models: Any, initial_model: Any, args: Namespace, max_steps: int
    ) -> tuple[Any, Any, Any, Any]:
        """Prepares all models, optimizers and schedulers.

        Returns ((actor, optimizer, scheduler), (critic, optimizer, scheduler), reward models, reference). Uses AdamW, a
        warmup of `lr_warmup_ratio` of `max_steps` and a cosine schedule to a tenth of the learning rate. `args` may
        have `actor_learning_rate` (default 1e-6), `critic_learning_rate` (9e-6), `adam_betas` (0.9, 0.95), `l2` (0) and
        `lr_warmup_ratio` (0.03).
        """
        trained: list[tuple[Any, Any, Any]] = []
        # The defaults, also of warm-up and schedule, are those of LightRFT's flags.
        betas, decay = getattr(args, "adam_betas", (0.9, 0.95)), getattr(args, "l2", 0.0)
        warmup = math.ceil(max_steps * getattr(args, "lr_warmup_ratio", 0.03))
        for model, name, usual in ((actor, "actor_learning_rate", 1e-6), (critic, "critic_learning_rate", 9e-6)):
            if model is None:
                trained.append((None, None, None))
                continue
            ready, lr = self.prepare_model(model, is_training=True), float(getattr(args, name, usual))
            optimizer = self.create_optimizer(ready, lr=lr, betas=betas, weight_decay=decay)
            scheduler = get_scheduler(
                "cosine_with_min_lr",
                optimizer,
                num_warmup_steps=warmup,
                num_training_steps=max_steps,
                scheduler_specific_kwargs={"min_lr": 0.1 * lr},
            )
            trained.append((ready, optimizer, scheduler))
        return trained[0], trained[1], self._prepared(reward_models), self._prepared(initial_model)

    def unwrap_model(self, model: Any) -> nn.Module:
        """Returns the transformers model of an ActorVL or CriticVL."""
        return model.model if isinstance(model, ActorVL | CriticVL) else model

    def learner(
        self,
        role: str,
        model: Wrapped,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Scheduler | None = None,
        *,
        max_response_length: int,
        max_sequences: int | None = None,
    ) -> Learner:
        """Returns the core's learner of a role (`policy`, `critic`, `reference`), which scores and updates a model.

        The scheduler steps after each optimizer step. A micro-batch has at most `max_sequences` sequences; the
        gradients do not depend on this limit.
        """
        core = core_of(model)
        if role not in _METRIC_NAME:
            raise ConfigError(f"a learner of the role {role!r}", "no such role", f"known: {', '.join(_METRIC_NAME)}")
        trained_by = None if optimizer is None else Optimizer(network_of(core), optimizer, scheduler)
        return Learner(
            RoleModel(_METRIC_NAME[role], core, trained_by),
            MicroBatching(_ANY_TOKENS, max_sequences, share_prefix=True, model_dir=model.model_dir or Path()),
            max_response_length=max_response_length,
            ranks=self.ranks,
        )

    def backward(self, loss: Tensor, model: Any, optimizer: Any = None) -> None:
        """Accumulates the gradient of a mean loss over this rank's share. Gradients are averaged over the ranks."""
        (loss / self.world_size).backward()  # sharding sums the gradients (`training.distributed.fsdp.shard`)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, model: Any, scheduler: Scheduler | None = None, name: str = "model"
    ) -> float:
        """Runs one optimizer step with the gradient clipped to `max_norm`. Returns the norm before clipping."""
        stepper = Optimizer(network_of(core_of(model)), optimizer, scheduler)
        norm = stepper.step(None, self.max_norm or math.inf, f"the {name}")
        stepper.zero_grad()
        return norm

    def moving_average(self, model: ActorVL, ema_model: ActorVL, beta: float = 0.992) -> None:
        """Updates `ema_model` to `beta` times itself plus `1 - beta` times the parameters of `model`.

        All ranks must call it once after each optimizer step.
        """
        follow(core_of(ema_model).module, core_of(model), 1 - beta)

    def save_model(self, model: Any, tokenizer: Any, output_dir: str | Path) -> None:
        """Writes a directory that transformers can load, with the tokenizer or processor.

        The weights are unsharded, with the adapter merged. A critic's head goes into a separate file. Other files in
        the directory stay.
        """
        core = core_of(model)

        def companions(directory: Path) -> None:
            if model.model_dir is not None:
                copy_companions(model.model_dir, directory)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)

        save_model(core, Path(output_dir), self.ranks, companions)


class FSDPV2Strategy(Strategy):
    """Trains on the ranks that torchrun started, with parameters sharded over them by FSDP2. Also runs on CPUs."""

    sharded = True


def get_strategy(args: Namespace) -> Strategy:
    """Returns an FSDPV2Strategy with `args.fsdp` or if torchrun started several ranks, else a Strategy."""
    sharded = bool(getattr(args, "fsdp", False)) or launched_ranks() > 1
    return (FSDPV2Strategy if sharded else Strategy)(args=args)


def core_of(model: Any) -> LanguageModel | ValueModel:
    """Returns the core's model of an ActorVL or CriticVL."""
    if isinstance(model, ActorVL):
        return model.language_model
    if isinstance(model, CriticVL):
        return model.value_model
    raise ConfigError(f"train a {type(model).__name__}", "no ActorVL or CriticVL", "wrap the model in one of them")


def _follow(optimizer: torch.optim.Optimizer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Replaces an optimizer's parameters by their sharded versions. The optimizer must not have taken a step."""
    names = {id(parameter): name for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [after[names[id(p)]] if id(p) in names else p for p in group["params"]]
