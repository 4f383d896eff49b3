"""Strategies: where models are trained. One process, or FSDP2 ranks that torchrun started; both over the core's parts.

Every rank runs the same script with its share of the data. What all must agree on is agreed on by all.
"""

from __future__ import annotations

import math
import random
import shutil
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import get_scheduler

from trivium.errors import ConfigError
from trivium.frontdoors.lightrft import checkpoints
from trivium.frontdoors.lightrft.actor import ActorVL
from trivium.frontdoors.lightrft.checkpoints import Role
from trivium.frontdoors.lightrft.critic import CriticVL
from trivium.frontdoors.lightrft.script_calls import ScriptCalls
from trivium.frontdoors.lightrft.sharded_sampler import ShardedSampler
from trivium.frontdoors.tables import announce
from trivium.models.heads.loss import LossDenominators
from trivium.models.heads.trained_models import LanguageModel, ValueModel
from trivium.training.batching import count
from trivium.training.fsdp import full_tensor, shard, shard_like
from trivium.training.learner import Learner
from trivium.training.optim import Optimizer, OptimizerConfig, Scheduler, adamw
from trivium.training.ranks import COLLECTIVE_S, Ranks, join_ranks, launched_ranks
from trivium.types import Batch

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_METRIC_NAME = {"policy": "policy", "reference": "reference", "critic": "value"}
Wrapped = ActorVL | CriticVL


class Strategy(ScriptCalls):
    """Trains in this process alone."""

    sharded = False
    """Whether parameters are sharded over the ranks that torchrun started."""

    def __init__(
        self,
        seed: int | Namespace | None = None,
        max_norm: float | None = None,
        micro_train_batch_size: int | None = None,
        train_batch_size: int | None = None,
        bf16: bool | None = None,
        args: Namespace | None = None,
    ) -> None:
        """What is None comes from `args`, or else has the defaults 42, 1.0, 1, 1 and False. `max_norm` 0 does not clip
        gradients. Joins the ranks and seeds torch, numpy and random. `Strategy(args)` is `Strategy(args=args)`."""
        if isinstance(seed, Namespace):
            seed, args = None, seed
        self.args = Namespace() if args is None else args

        def chosen(name: str, value: Any, default: Any) -> Any:
            return getattr(self.args, name, default) if value is None else value

        self.seed = int(chosen("seed", seed, 42))
        self.max_norm = float(chosen("max_norm", max_norm, 1.0))
        self.micro_train_batch_size = int(chosen("micro_train_batch_size", micro_train_batch_size, 1))
        self.train_batch_size = int(chosen("train_batch_size", train_batch_size, 1))
        self.bf16 = bool(chosen("bf16", bf16, False))
        self._roles: list[tuple[Wrapped, Role]] = []
        self._replaced: list[weakref.ReferenceType[Any]] = []
        self.ranks = Ranks()
        self.setup_distributed()

    def setup_distributed(self, timeout: timedelta | None = None) -> None:
        """Joins the ranks, once; `timeout` is how long they wait for one another. Raises ConfigError where torchrun
        started several and this strategy trains alone."""
        deadline = COLLECTIVE_S if timeout is None else timeout.total_seconds()
        if not self.sharded and launched_ranks() > 1:
            raise ConfigError(
                "a Strategy of one process", f"{launched_ranks()} ranks were started", "use FSDPV2Strategy (--fsdp)"
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

    @property
    def accumulated_gradient(self) -> int:
        """Micro-batches of one optimizer step on this rank."""
        return max(1, self.train_batch_size // self.micro_train_batch_size // self.world_size)

    def get_rank(self) -> int:
        return self.ranks.rank

    def is_rank_0(self) -> bool:
        return self.ranks.rank == 0

    def print(self, *message: object) -> None:
        """Prints on the first rank, with the time."""
        if self.is_rank_0():
            print(f"[{datetime.now().astimezone():%m-%d %H:%M:%S}]", *message, flush=True)

    def barrier(self) -> None:
        """Returns once all ranks are here."""
        self.ranks.all_reduce_max(0)

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """A number, a tensor, or each of a dict, reduced over the ranks (`mean`, `sum`, `max`, `min`), as what it was
        given. The tensor that is given stays as it is."""
        if op not in _OPS:
            raise ConfigError(f"all_reduce with op {op!r}", "no such operation", f"known: {', '.join(_OPS)}")
        if isinstance(data, Mapping):
            return {name: self.all_reduce(value, op) for name, value in cast("Mapping[str, Any]", data).items()}
        tensor = data.detach() if isinstance(data, Tensor) else torch.tensor(data, dtype=torch.float64)
        number = tensor.to(self.ranks.device, copy=True)
        if op == "mean" and not number.is_floating_point():
            number = number.float()
        if self.world_size > 1:
            dist.all_reduce(number, _OPS[op])
        number = number / self.world_size if op == "mean" else number
        return number.to(data.device) if isinstance(data, Tensor) else type(data)(number.item())

    def all_gather(self, data: Any) -> Any:
        """A tensor of every rank, end to end, or each of a dict; a number becomes a tensor with one for each rank."""
        if isinstance(data, Mapping):
            return {name: self.all_gather(value) for name, value in cast("Mapping[str, Any]", data).items()}
        tensor = data.detach() if isinstance(data, Tensor) else torch.tensor([data], dtype=torch.float64)
        if self.world_size == 1:
            return tensor
        here = (tensor if tensor.ndim else tensor[None]).to(self.ranks.device).contiguous()
        parts = [torch.empty_like(here) for _ in range(self.world_size)]
        dist.all_gather(parts, here)
        return torch.cat(parts).to(tensor.device)

    def totals(self, batch: Batch, max_response_length: int) -> LossDenominators:
        """What the losses of an optimizer step are divided by: the counts over all ranks, of which `batch` is one's
        share."""
        own = count(batch, max_response_length)
        if self.world_size == 1:
            return own
        names = [f.name for f in fields(own) if f.name not in ("max_response_length", "dp_size")]
        numbers = {name: getattr(own, name) for name in names}
        known = self.all_reduce({name: 0 if value is None else 1 for name, value in numbers.items()}, "max")
        sums = self.all_reduce({name: value or 0 for name, value in numbers.items()}, "sum")
        return replace(own, **{name: int(sums[name]) if known[name] else None for name in names})

    # ------------------------------------------------------------------ models and optimizers

    def prepare(self, *models_or_tuples: Any, is_rlhf: bool = False) -> Any:
        """Models, or tuples (model, optimizer) or (model, optimizer, scheduler), ready to be trained: on their device,
        sharded over the ranks. One alone is returned as such, several as a list; None stays None."""
        del is_rlhf
        prepared = [self._prepared(each) for each in models_or_tuples]
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, entry: Any) -> Any:
        if isinstance(entry, tuple):
            model, optimizer, *more = cast("tuple[Any, ...]", entry)
            if model is None:
                return entry
            ready = self.prepare_model(model, is_training=True, optimizer=optimizer)
            self._remember(ready, optimizer, more[0] if more else None)
            return (ready, optimizer, *more)
        if isinstance(entry, list):
            return [self._prepared(each) for each in cast("list[Any]", entry)]
        return self.prepare_model(entry)

    def prepare_model(
        self, model: Any, is_training: bool = False, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """One model on its device, sharded over the ranks; an `optimizer` that was built before keeps its parameters.
        What is neither ActorVL nor CriticVL (a reward model) is moved to the device, whole."""
        if not isinstance(model, Wrapped):
            return model.to(self.ranks.device).eval() if isinstance(model, nn.Module) else model
        if model.ranks.size > 1:
            return model
        model.to(self.ranks.device)
        if not is_training and optimizer is None:
            model.requires_grad_(False)
        core = core_of(model)
        if self.world_size > 1:
            before = dict(core.named_parameters())
            replaced = {id(parameter) for each in self._replaced if (parameter := each()) is not None}
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
        """AdamW over what is trained of a model; decay pulls on matrices only, not on embeddings."""
        core = core_of(model)
        network = core if isinstance(core, ValueModel) else core.module
        first, second = betas
        config = OptimizerConfig(lr=lr, betas=(first, second), weight_decay=weight_decay, eps=eps)
        return adamw(network, config)

    def prepare_models_and_optimizers(
        self, actor: Any, critic: Any, reward_models: Any, initial_model: Any, args: Namespace, max_steps: int
    ) -> tuple[Any, Any, Any, Any]:
        """((actor, optimizer, scheduler), (critic, optimizer, scheduler), reward models, reference), prepared: AdamW,
        and a cosine to a tenth of the rate after `lr_warmup_ratio` of `max_steps` optimizer steps. `args` may have
        `actor_learning_rate` (else 1e-6), `critic_learning_rate` (9e-6), `adam_betas` (0.9, 0.95), `l2` (0) and
        `lr_warmup_ratio` (0.03)."""
        trained: list[tuple[Any, Any, Any]] = []
        betas, decay = getattr(args, "adam_betas", (0.9, 0.95)), getattr(args, "l2", 0.0)
        warmup = math.ceil(max_steps * getattr(args, "lr_warmup_ratio", 0.03))
        for model, name, usual in ((actor, "actor_learning_rate", 1e-6), (critic, "critic_learning_rate", 9e-6)):
            if model is None:
                trained.append((None, None, None))
                continue
            ready, lr = self.prepare_model(model, is_training=True), float(getattr(args, name, usual))
            optimizer = self.create_optimizer(ready, lr=lr, betas=betas, weight_decay=decay)
            how: dict[str, Any] = {"num_warmup_steps": warmup, "num_training_steps": max_steps}
            scheduler = get_scheduler(
                "cosine_with_min_lr", optimizer, **how, scheduler_specific_kwargs={"min_lr": 0.1 * lr}
            )
            self._remember(ready, optimizer, scheduler)
            trained.append((ready, optimizer, scheduler))
        return trained[0], trained[1], self._prepared(reward_models), self._prepared(initial_model)

    def unwrap_model(self, model: Any) -> nn.Module:
        """The transformers model of an ActorVL or CriticVL."""
        return model.model if isinstance(model, Wrapped) else model

    def learner(
        self,
        role: str,
        model: Wrapped,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Scheduler | None = None,
        *,
        max_response_length: int,
        max_tokens: int = 1 << 30,
        max_sequences: int | None = None,
    ) -> Learner:
        """The core's learner of a role (`policy`, `critic`, `reference`), which scores and updates. The scheduler takes
        a step after each of the optimizer's. At most `max_sequences` sequences, and `max_tokens` tokens, go through the
        model at once; that never changes a gradient."""
        core = core_of(model)
        network = core if isinstance(core, ValueModel) else core.module
        if role not in _METRIC_NAME:
            raise ConfigError(f"a learner of the role {role!r}", "no such role", f"known: {', '.join(_METRIC_NAME)}")
        return Learner(
            core,
            _METRIC_NAME[role],
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_response_length=max_response_length,
            optimizer=None if optimizer is None else Optimizer(network, optimizer, scheduler),
            ranks=self.ranks,
            model_dir=model.model_dir or Path(),
            share_prefix=True,
        )

    def backward(self, loss: Tensor, model: Any, optimizer: Any = None) -> None:
        """Accumulates the gradient of a loss that is a mean over this rank's share: the gradients of the ranks are
        averaged."""
        (loss / self.world_size).backward()

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, model: Any, scheduler: Scheduler | None = None, name: str = "model"
    ) -> float:
        """One optimizer step with what was accumulated, clipped to `max_norm`; returns the norm before."""
        core = core_of(model)
        network = core if isinstance(core, ValueModel) else core.module
        stepper = Optimizer(network, optimizer, scheduler)
        norm = stepper.step(None, self.max_norm or math.inf, f"the {name}")
        stepper.zero_grad()
        return norm

    @torch.no_grad()
    def moving_average(self, model: Wrapped, ema_model: Wrapped, beta: float = 0.992, device: str = "cpu") -> None:
        """What is trained of a model into its average: `beta` of the average and `1 - beta` of the model. To be called
        once after each optimizer step; all ranks call it."""
        if device != "cpu":
            announce([f"device={device!r} of moving_average: the average stays where ema_model is"])
        average, current = dict(ema_model.model.named_parameters()), dict(model.model.named_parameters())
        if isinstance(model, CriticVL) and isinstance(ema_model, CriticVL):
            average |= dict(ema_model.value_head.named_parameters(prefix="value_head"))
            current |= dict(model.value_head.named_parameters(prefix="value_head"))
        if isinstance(model, ActorVL) and average.keys() != current.keys():  # the model has an adapter
            current = {name: tensor for name, tensor in model.export_weights() if name in average}
        elif average.keys() != current.keys():
            raise ConfigError("an average of a model", "the two are not alike", "build both from the same directory")
        else:
            current = {name: parameter for name, parameter in current.items() if parameter.requires_grad}
        for name, value in current.items():
            own = average[name]
            if not isinstance(own, DTensor):
                value = full_tensor(value)
            elif not isinstance(value, DTensor):
                value = shard_like(value, own)
            own.lerp_(value.to(own.dtype), 1 - beta)

    # ------------------------------------------------------------------ data

    def setup_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        sampler: Any = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """This rank's share of a dataset, in batches of `batch_size` on each rank. Its sampler continues an epoch:
        `loader.sampler.set_epoch(epoch, consumed_samples)`. Raises ConfigError where it would have no batch."""
        if sampler is None:
            sampler = ShardedSampler(
                dataset,
                rank=self.ranks.rank,
                size=self.world_size,
                shuffle=shuffle,
                seed=self.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        per_rank = len(dataset) // self.world_size
        if batch_size < 1 or not len(dataset) or (drop_last and per_rank < batch_size):
            raise ConfigError(
                f"batches of {batch_size} on each of {self.world_size} ranks",
                f"the dataset has {len(dataset)} samples",
                "give a batch at least one sample of each rank, and the dataset at least one batch",
            )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory and torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(self.seed),  # the seed of its workers, not ours to draw from
        )

    # ------------------------------------------------------------------ checkpoints

    def save_model(self, model: Any, tokenizer: Any, output_dir: str | Path) -> None:
        """A directory that transformers loads, with its tokenizer or processor: whole weights, an adapter added, on any
        number of ranks. Of a critic, the head lies beside them. Other files that are there stay."""
        owner = self._owner(model)

        def companions(directory: Path) -> None:
            source = owner.model_dir
            for file in sorted(source.iterdir()) if source is not None else ():
                if file.is_file() and file.suffix in _COMPANIONS and file.name not in _WRITTEN:
                    shutil.copyfile(file, directory / file.name)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)

        checkpoints.save_model(core_of(owner), Path(output_dir), self.ranks, companions)

    def save_ckpt(
        self,
        model: Any,
        save_dir: str | Path,
        tag: str | None = None,
        max_num: int | None = 3,
        max_mem: float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        ema_model: Wrapped | None = None,
    ) -> Path:
        """Writes `<save_dir>/<tag>`: weights, optimizer, scheduler, the average and `client_state` (JSON values); then
        removes all but the newest `max_num`, and the oldest beyond `max_mem` GiB in all (None: no limit). A checkpoint
        is complete or absent; the newest is the latest, whatever `save_latest` says.

        Optimizer and scheduler are those that were prepared with the model, unless given. All ranks call it. Save the
        actor last: `load_ckpt` of another role, by the actor's tag, then finds what belongs to it.
        """
        if not save_latest:
            announce(["save_latest=False: the newest checkpoint is the latest"])
        role = self._role(model, optimizer, scheduler, ema_model)
        role.client_state = dict(client_state or {})
        directory = Path(save_dir)
        tag = tag or f"global_step{1 + max(checkpoints.checkpoints(directory).values(), default=0)}"
        return checkpoints.save(role, directory, tag, self.ranks, max_num=max_num, max_mem=max_mem)

    def load_ckpt(
        self,
        model: Any,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        ema_model: Wrapped | None = None,
    ) -> tuple[Path, dict[str, Any]]:
        """Opens the checkpoint of `tag`, or the newest: its path (`path.name` is the tag) and its `client_state`.
        Raises RunDirError where there is none, or where it is not what was saved of such a model."""
        if not load_module_strict:
            announce(["load_module_strict=False: a checkpoint must hold every weight of the model"])
        role = self._role(model, optimizer, scheduler, ema_model)
        if load_module_only or not load_optimizer_states:
            role.optimizer = None
        if load_module_only or not load_lr_scheduler_states:
            role.scheduler = None
        return checkpoints.load(role, Path(load_dir), tag, self.ranks)

    def _remember(self, model: Any, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        if isinstance(model, Wrapped):
            self._roles = [(owner, role) for owner, role in self._roles if owner is not model]
            self._roles.append((model, Role(core_of(model), optimizer, scheduler)))

    def _owner(self, model: Any) -> Wrapped:
        """The ActorVL or CriticVL that was prepared with this transformers model, or that it is itself."""
        if isinstance(model, Wrapped):
            return model
        for owner, _ in self._roles:
            if owner.model is model or core_of(owner).module is model:
                return owner
        raise ConfigError(
            f"the weights of a {type(model).__name__}",
            "it was not prepared with an optimizer by this strategy",
            "give the ActorVL or CriticVL itself",
        )

    def _role(self, model: Any, optimizer: Any, scheduler: Any, ema_model: Wrapped | None) -> Role:
        owner = self._owner(model)
        known = next((role for other, role in self._roles if other is owner), Role(core_of(owner)))
        ema = None if ema_model is None else core_of(ema_model)
        return Role(core_of(owner), optimizer or known.optimizer, scheduler or known.scheduler, ema)


class FSDPV2Strategy(Strategy):
    """Trains on the ranks that torchrun started, parameters sharded over all of them (FSDP2); also on CPUs."""

    sharded = True


def get_strategy(args: Namespace) -> Strategy:
    """The strategy that `args` asks for: FSDPV2Strategy with `fsdp`, or where torchrun started several ranks."""
    sharded = bool(getattr(args, "fsdp", False)) or launched_ranks() > 1
    return (FSDPV2Strategy if sharded else Strategy)(args=args)


def core_of(model: Any) -> LanguageModel | ValueModel:
    """The core's model of an ActorVL or CriticVL."""
    if isinstance(model, ActorVL):
        return model.language_model
    if isinstance(model, CriticVL):
        return model.value_model
    raise ConfigError(f"train a {type(model).__name__}", "no ActorVL or CriticVL", "wrap the model in one of them")


def _follow(optimizer: torch.optim.Optimizer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Lets an optimizer that has not taken a step have the parameters that took the place of its own."""
    names = {id(parameter): name for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [after[names[id(p)]] if id(p) in names else p for p in group["params"]]


_COMPANIONS = (".json", ".jinja", ".txt", ".model", ".md")
_WRITTEN = ("config.json", "model.safetensors.index.json", "manifest.json")
