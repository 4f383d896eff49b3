"""The train engine of one process: CPU or one GPU, weights in float32, micro-batches packed.

The process may be one of several ranks. Parameters are sharded over the ranks, each rank gets its share of every batch,
and all ranks must call every method.

Precision: weights, gradients, optimizer state and the head are float32 (float64 for tests); `bfloat16` runs the
backbone's matrix products, on GPUs attention too, under autocast, which casts from the float32 master weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from trivium.config.model_shape import ModelShape, read_shape
from trivium.errors import ConfigError, DataError, RunDirError, TriviumError
from trivium.models.heads.loss import LossDenominators, ScoreHead
from trivium.models.heads.trained_models import (
    ActorCritic,
    LanguageModel,
    LanguageOptions,
    ModelOptions,
    ScoreModel,
    ValueModel,
)
from trivium.models.heads.value_head import VALUE_HEAD, saved_head
from trivium.models.placement import device_of, narrowed, use_deterministic_kernels
from trivium.models.precision import precision_of, set_matmul_precision
from trivium.models.vision.encoder import freeze_vision
from trivium.models.weights.lora import (
    ADAPTER_STEM,
    adapter_off,
    adapter_parameters,
    describe_adapter,
    pushed_adapter,
)
from trivium.models.weights.quantized import is_quantized, original
from trivium.models.weights.stream import Described
from trivium.phases import Phase, announce
from trivium.protocols import Algorithm, Objective, TrainEngine, WeightOffer, offer_on
from trivium.training.batching import first_pass
from trivium.training.device import precision_note
from trivium.training.flops import WorkDone, measured_peak, utilisation
from trivium.training.fsdp import shard
from trivium.training.gradient_checkpointing import checkpoint_gradients
from trivium.training.learner import Learner, RoleModel, TrainableObjective
from trivium.training.optim import Optimizer, OptimizerConfig, learning_rate
from trivium.training.passes import MicroBatching
from trivium.training.ranks import ALONE, Ranks
from trivium.training.section import TorchTrainConfig
from trivium.training.snapshot import (
    Snapshot,
    TensorFile,
    copy_companions,
    full_specs,
    full_weights,
    read_tensors,
    take_snapshot,
    weight_files,
)
from trivium.types import AnyArray, Batch, Capabilities, Metrics

SCORED_BY = {
    "old": ("policy", "log_prob"),
    "log_prob": ("policy", "log_prob"),
    "entropy": ("policy", "entropy"),
    "sum_pi_squared": ("policy", "sum_pi_squared"),
    "mean_discriminant": ("policy", "mean_discriminant"),
    "ref": ("reference", "log_prob"),
    "teacher": ("teacher", "log_prob"),
    "teacher_top": ("teacher", "top"),
    "values": ("critic", "values"),
}
"""Score -> (role whose model computes it, name of the score in `Learner.score`)."""
_METRIC_NAME = {
    "policy": "policy",
    "reference": "reference",
    "teacher": "teacher",
    "critic": "value",
    "reward": "reward",
}
_EXACT_IDS = 2**24
"""Token ids below this are exact in float32, the dtype of columns."""
_ADAPTER = "policy-adapter"


class TorchTrainEngine(TrainEngine):
    """Trains in this process: the policy and, if the algorithm needs them, a critic, a reward model, a frozen reference
    and a frozen teacher."""

    capabilities = Capabilities(multiple_ranks=True)

    Config = TorchTrainConfig

    def __init__(
        self,
        config: TorchTrainConfig,
        *,
        model_dir: Path,
        algorithm: Algorithm,
        temperature: float,
        max_response_length: int,
        total_steps: int,
        first_version: int = 0,
        seed: int,
        threads: int,
        ranks: Ranks = ALONE,
        roles: Collection[str] | None = None,
    ) -> None:
        """`temperature` is the sampling temperature and `max_response_length` the limit of one completion, in tokens:
        `seq-mean-token-sum-norm` divides by it. The schedule of the learning rate begins at `first_version` (where
        earlier stages left off) and has `total_steps` train steps.

        `seed` draws the head of a critic or reward model; every method sets torch's number of `threads` for the calling
        thread. `ranks` are the processes that train together. `roles` are the models of this process; by default all
        that the algorithm needs.
        """
        self.config, self.algorithm = config.on_this_machine(), algorithm
        self._model_dir, self._temperature = model_dir, temperature
        self._max_response_length = max_response_length
        self._first_version, self._total_steps, self._seed = first_version, total_steps, seed
        self._threads, self.version = threads, first_version
        self._moved_from: int | None = None
        """The version before the last optimizer step."""
        self.ranks, self._roles = ranks, roles
        self._device = ranks.device if ranks.size > 1 else device_of(config.device)
        self._dtype = torch.float64 if config.dtype == "float64" else torch.float32
        frozen = "bfloat16" if is_quantized(config.frozen_dtype) else config.frozen_dtype
        self._frozen = torch.float64 if config.dtype == "float64" else getattr(torch, frozen)
        self._few_bits = config.frozen_dtype if is_quantized(config.frozen_dtype) else ""
        if config.deterministic_kernels and self._device.type == "cuda":
            use_deterministic_kernels("train.deterministic_kernels")
        key = "train.head_precision"
        self._head_precision = precision_of(config.head_precision, self._device, self.config.dtype, key)
        set_matmul_precision(self._head_precision)
        self._learners: dict[str, Learner] = {}
        self._shapes: dict[str, ModelShape] | None = None
        self._work = WorkDone()
        self._updates: list[Batch] = []
        """The mini-batches of the policy's updates with their per-token columns, until `take_updates`."""

    def prepare(self) -> None:
        """Loads models and optimizers from the initial model directory."""
        self._open(self._model_dir, self._model_dir, self._model_dir)

    def _description(self) -> str:
        """A line for the log: the trained models, device and dtype."""
        models = []
        for role, learner in self._learners.items():
            if role == "critic" and self._shares_trunk:
                models.append("critic, a head of the policy")
                continue
            parameters = [(each.numel(), each.requires_grad) for each in learner.model.module.parameters()]
            number, trained = sum(size for size, _ in parameters), sum(size for size, grad in parameters if grad)
            packed = (layer for layer in learner.model.module.modules() if original(layer) is layer)
            number += sum(layer.in_features * layer.out_features for layer in packed if isinstance(layer, nn.Linear))
            frozen = learner.optimizer is None
            some = "frozen" if frozen else f"{trained:,} of them trained" if trained < number else "all trained"
            models.append(f"{role} of {number:,} parameters, {some}")
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else f"{self._threads} threads"
        ranks = f", {self.ranks.size} ranks" if self.ranks.size > 1 else ""
        if self.config.share_prefix and not all(each.passes.share_prefixes for each in self._learners.values()):
            models.append("prefixes are not shared by a model that does not pack")
        precision = precision_note(self._device, self.config.dtype)
        return f"trains on {self._device.type} ({name}{ranks}) in {precision}: {'; '.join(models)}"

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        """Per-token numbers without gradient: leading axis L, 0 outside the response mask.

        Raises DataError for a sequence that is longer than the model's context.
        """
        torch.set_num_threads(self._threads)
        if what not in SCORED_BY:
            raise TriviumError(f"the score {what!r}", "no such score", f"known: {', '.join(SCORED_BY)}")
        role, kind = SCORED_BY[what]
        scores = (learner := self._learner(role)).score(batch, kind)
        self._work.add(self.version, f"score/{what}", learner.work)
        return scores

    def update(self, role: str, batch: Batch, objective: Objective, totals: LossDenominators | None = None) -> Metrics:
        """One optimizer step of one role, at the learning rate that belongs to the current train step. `batch` is this
        rank's share of the mini-batch, and `totals` the counts of the whole mini-batch; None if the share is the whole.

        Raises, weights untouched, TriviumError when the gradient is not finite, and DataError for a sequence that is
        longer than the model's context.
        """
        torch.set_num_threads(self._threads)
        learner = self._learner(role)
        learner.keeps_tokens = self.settings.keeps_updates and role == "policy"
        taken = self.version - self._first_version
        lr = learning_rate(self._optimizer_config(role), taken, self._total_steps)
        optimizer = cast(Optimizer, learner.optimizer)
        before = optimizer.steps_started
        try:
            metrics = learner.update(
                batch,
                cast(TrainableObjective, objective),
                lr,
                self.config.max_grad_norm,
                step=taken,
                who=f"the {role} in train step {self.version + 1}",
                totals=totals,
            )
            self._work.add(self.version, f"update/{role}", learner.work)
            if learner.seen:
                self._updates.append(Batch(batch.experiences).with_columns(**learner.seen))
            return metrics
        finally:
            if optimizer.steps_started > before:
                self._moved_from = self.version
            self.holds_version = self._moved_from != self.version

    def take_updates(self) -> Batch | None:
        updates, self._updates = self._updates, []
        return first_pass(updates)

    def measure(
        self,
        role: str,
        batch: Batch,
        objective: Objective,
        totals: LossDenominators | None = None,
        *,
        gradient: bool = False,
    ) -> Metrics:
        """Returns what `update` would report, without the learning rate and, unless `gradient` is set, without the
        gradient norm. Does not change the weights."""
        torch.set_num_threads(self._threads)
        taken = self.version - self._first_version
        return self._learner(role).measure(
            batch, cast(TrainableObjective, objective), step=taken, totals=totals, gradient=gradient
        )

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        """Model FLOPs over the peak of all ranks. Critic, reward model and reference are assumed to have the policy's
        shape."""
        if self._shapes is None:
            self._shapes = self._read_shapes()
        if not self._shapes:
            return {}
        torch.set_num_threads(self._threads)
        dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else self._dtype
        peak = self.config.peak_flops or measured_peak(self._device, dtype, self._threads)
        role_of = {what: role for what, (role, _) in SCORED_BY.items()}
        return utilisation(
            self._work.part_of(phases, self.ranks),
            self._shapes,
            role_of,
            peak * self.ranks.size,
            adapter=self.config.lora is not None,
            vision_tower=self.config.vision_tower,
        )

    def _read_shapes(self) -> dict[str, ModelShape]:
        """The shapes by role; empty if a config.json lacks the sizes."""
        teacher = {} if self.algorithm.teacher is None else {"teacher": self.algorithm.teacher.path}
        try:
            own = read_shape(self._model_dir)
            roles = dict.fromkeys(("policy", "critic", "reward", "reference"), own)
            return {**roles, **{role: read_shape(path) for role, path in teacher.items()}}
        except DataError:
            return {}

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's parameters and persistent buffers by Hugging Face name, in the model's order; tied ones once.

        Each is unsharded, and gathered when it is iterated over: all ranks must iterate over all of them.
        """
        return full_weights(self._policy)

    def offer_weights(self) -> WeightOffer:
        """Offers the current weights to the explorers from the first rank; the other ranks take part in the gathers.
        Only the first rank's result says whether they were delivered."""
        weights = self.offered_weights()
        is_first = self.ranks.rank == 0
        offer = offer_on(self.settings.channel, self.version, weights) if is_first else WeightOffer(delivered=False)
        for _ in weights:  # every rank takes part in every gather, even if the channel refused the weights
            pass
        return offer

    def offered_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights that `offer_weights` offers: only the adapter if explorers add it themselves, else all weights,
        in the dtype of the engines. All ranks must iterate over all of them."""
        lora = self.config.lora
        if lora is not None and lora.push == "adapter":
            return pushed_adapter(self._policy.module)
        dtype = self.settings.engine_dtype
        narrow = ((name, narrowed(tensor, dtype)) for name, tensor in self.export_weights())
        return Described(full_specs(self._policy, dtype), narrow)

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        """`policy/`, `critic/`, `reward/` (Hugging Face directories), `<role>-optimizer.safetensors`, `engine.json`;
        large ones are split into numbered files. For a critic on the policy's trunk, `critic/` has only the head. With
        LoRA, `policy/` has the merged weights, and `policy-adapter/` has the adapter in peft's format.

        The files are the same on any number of ranks. Each rank writes some of them, in the turn that
        `checkpoint.save_strategy` gives it.
        """
        snapshot = self.snapshot(copy=on_copied is not None)
        if on_copied is not None:
            on_copied()
        snapshot.write(directory)

    def load(self, directory: Path) -> None:
        """Loads a checkpoint of `save`, on any number of ranks. The reference still comes from the initial model
        directory. Other models are read only from the checkpoint, unless a user's class prepares more than models."""
        if not self._learners and type(self).prepare is not TorchTrainEngine.prepare:
            self.prepare()
        counters = directory / "engine.json"
        if not counters.is_file():
            raise RunDirError(f"load the train engine from {directory}", "no engine.json there", "choose a checkpoint")
        self._open(directory / "policy", directory / "critic", directory / "reward", directory / _ADAPTER)
        for role, learner in self._learners.items():
            if learner.optimizer is not None:
                learner.optimizer.restore(read_tensors(directory, f"{role}-optimizer"))
        self.version = json.loads(counters.read_text(encoding="utf-8"))["version"]

    def save_weights(self, directory: Path) -> None:
        """A directory that transformers loads by itself: weights, config, and the other files of the initial model."""
        files, finish = weight_files(self._policy, ""), partial(copy_companions, self._model_dir)
        take_snapshot(files, self.ranks, self.settings.save_strategy, finish, copy=False).write(directory)

    def snapshot(self, *, copy: bool) -> Snapshot:
        """What `save` writes. Without `copy`, it reads the state when it writes."""
        files: list[TensorFile] = []
        for role, learner in self._learners.items():
            if role == "policy" or learner.optimizer is not None:
                files += weight_files(learner.model, f"{role}/")
            if learner.optimizer is not None:
                files.append(TensorFile(f"{role}-optimizer", learner.optimizer.state()))
        if "policy" in self._learners and isinstance(self._policy, ActorCritic):
            files.append(TensorFile(f"critic/{VALUE_HEAD}", self._policy.value_head.state_dict()))
        adapted = self.config.lora is not None and "policy" in self._learners
        if adapted:
            files.append(TensorFile(f"{_ADAPTER}/{ADAPTER_STEM}", adapter_parameters(self._policy.module), single=True))
        version = self.version

        def finish(directory: Path) -> None:
            if "policy" in self._learners:
                copy_companions(self._model_dir, directory / "policy")
            if adapted:
                describe_adapter(self._policy.module, directory / _ADAPTER)
            (directory / "engine.json").write_text(json.dumps({"version": version}) + "\n", encoding="utf-8")

        return take_snapshot(files, self.ranks, self.settings.save_strategy, finish, copy=copy)

    def close(self) -> None:
        """Frees the models."""
        self._learners = {}

    @property
    def _policy(self) -> LanguageModel:
        return cast(LanguageModel, self._learner("policy").model)

    def _learner(self, role: str) -> Learner:
        if role not in self._learners:
            raise TriviumError(
                f"the {role} of the train engine",
                f"it holds {', '.join(self._learners) or 'nothing yet'}",
                "declare the score or objective in the algorithm, and call prepare() first",
            )
        return self._learners[role]

    def _optimizer_config(self, role: str) -> OptimizerConfig:
        critic = self.config.critic_optimizer if role == "critic" else None
        return critic or self.config.optimizer

    def _open(self, policy: Path, critic: Path, reward: Path, adapter: Path | None = None) -> None:
        """Loads the models of the roles that the algorithm needs. With LoRA, the policy is the initial model plus
        `adapter`; None: a new adapter, or that of `train.lora.path`."""
        trained = {objective.role for objective in self.algorithm.objectives}
        roles = trained | {"policy"} | {SCORED_BY[what][0] for what in self.algorithm.needs}
        if self._roles is not None:
            roles &= set(self._roles)
        lora = self.config.lora
        if lora is not None and "policy" not in trained:
            raise ConfigError(
                "train.lora: an adapter of the policy",
                f"the algorithm {self.algorithm.name!r} trains " + (", ".join(sorted(trained)) or "nothing"),
                "leave the section out",
            )
        if self._few_bits and (why := self.config.refuses_few_bits(self._device.type, self.ranks.size)):
            raise ConfigError(f"train.frozen_dtype: {self._few_bits}", why.reason, why.do)
        torch.set_num_threads(self._threads)
        is_first, self._learners = not self._learners, {}
        if "policy" in roles:
            options = self._language_options
            options["weights"] = self._frozen if lora is not None or "policy" not in trained else None
            options["quantized"] = self._few_bits if lora is not None else ""
            source = policy if lora is None else self._model_dir
            if self._shares_trunk:
                model = ActorCritic(source, seed=self._seed, head=saved_head(critic), **options)
            else:
                model = LanguageModel(source, **options)
            if lora is not None:
                model.adapt(lora, seed=self._seed, adapter=adapter)
            if self.config.router_replay != "off":
                model.replay_routing()
            self._add("policy", model, trained="policy" in trained)
        if "critic" in roles and self._shares_trunk:
            self._add_learner("critic", self._policy)
        elif "critic" in roles:
            self._add("critic", ValueModel(critic, seed=self._seed, **self._model_options), trained=True)
        if "reward" in roles:
            objective = next(each for each in self.algorithm.objectives if each.role == "reward")
            head: ScoreHead = getattr(objective, "score_head", ScoreHead())
            self._add("reward", ScoreModel(reward, outputs=head, seed=self._seed, **self._model_options), trained=True)
        if "reference" in roles:
            self._add_reference()
        if "teacher" in roles:
            self._add_teacher()
        if is_first:
            announce(self._description())

    @property
    def _model_options(self) -> ModelOptions:
        return {
            "dtype": self._dtype,
            "device": self._device,
            "autocast": self.config.dtype == "bfloat16",
            "sequence": self.ranks.sequence,
            "empty": self.ranks.mesh is not None,  # a sharded model reads its weights after sharding
        }

    @property
    def _language_options(self) -> LanguageOptions:
        """The options of a frozen language model."""
        return {
            **self._model_options,
            "temperature": self._temperature,
            "weights": self._frozen,
            "quantized": self._few_bits,
        }

    @property
    def _shares_trunk(self) -> bool:
        """Whether the critic is a value head on the policy's hidden states."""
        return any(objective.head == "lm+value" for objective in self.algorithm.objectives)

    def _add_reference(self) -> None:
        """Adds the initial policy of the stage. With LoRA, this is the policy with its adapter disabled, if this
        process holds the policy and the adapter started at zero."""
        lora = self.config.lora
        if lora is not None and lora.path is None and "policy" in self._learners:
            self._add_learner("reference", self._policy, score_context=partial(adapter_off, self._policy.module))
            return
        reference = LanguageModel(self._model_dir, **self._language_options)
        if lora is not None:
            reference.adapt(lora, seed=self._seed)
        self._add("reference", reference, trained=False)

    def _add_teacher(self) -> None:
        """Adds the teacher. Its distribution has the same temperature and the same vocabulary as the policy's."""
        teacher = self.algorithm.teacher
        if teacher is None:
            raise TriviumError(
                f"the teacher of the algorithm {self.algorithm.name!r}",
                "it needs one and names none",
                "set algorithm.teacher.path",
            )
        model = LanguageModel(Path(teacher.path), **self._language_options)
        if model.vocabulary != self._policy.vocabulary:
            raise TriviumError(
                f"distill {teacher.path} into {self._model_dir}",
                f"the teacher has {model.vocabulary} tokens, the policy {self._policy.vocabulary}",
                "use a teacher with the policy's tokenizer and an output layer of the same size",
            )
        if "teacher_top" in self.algorithm.needs and model.vocabulary > _EXACT_IDS:
            raise TriviumError(
                f"the top-k tokens of the teacher {teacher.path}",
                f"its vocabulary has {model.vocabulary} tokens",
                f"use a loss that reads the teacher's log-probabilities alone: columns hold ids below {_EXACT_IDS}",
            )
        self._add("teacher", model, trained=False, top_k=min(teacher.top_k, model.vocabulary))

    def _add(self, role: str, model: LanguageModel | ValueModel, *, trained: bool, top_k: int = 0) -> None:
        optimizer = None
        if isinstance(model, LanguageModel):
            model.head_precision = self._head_precision
        if not trained:
            model.requires_grad_(False)
        elif self.config.lora is None or role != "policy":
            freeze_vision(model.module, self.config.vision_tower)
        if trained and self.config.gradient_checkpointing:
            checkpoint_gradients(model.module)
        shard(
            model,
            self.ranks,
            trained=trained,
            bfloat16=self.config.dtype == "bfloat16",
            cpu_offload=self.config.cpu_offload,
        )
        model.fill(torch.device("cpu") if self.config.cpu_offload else None)
        if trained:
            network = model if isinstance(model, ValueModel | ActorCritic) else model.module
            optimizer = Optimizer(network, self._optimizer_config(role))
        self._add_learner(role, model, optimizer=optimizer, top_k=top_k)

    def _add_learner(
        self,
        role: str,
        model: LanguageModel | ValueModel,
        *,
        optimizer: Optimizer | None = None,
        top_k: int = 0,
        score_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        batching = MicroBatching(
            self.config.max_tokens_per_micro_batch,
            share_prefix=self.config.share_prefix,
            threads=self._threads,
            replay_routing=role == "policy" or (role == "critic" and self._shares_trunk),
            model_dir=self._model_dir,
        )
        self._learners[role] = Learner(
            RoleModel(_METRIC_NAME[role], model, optimizer, top_k, score_context),
            batching,
            max_response_length=self._max_response_length,
            ranks=self.ranks,
        )
