"""The train engine of one process: CPU or one GPU, weights in float32, micro-batches packed.

The process may be one of several ranks. Parameters are sharded over the ranks, each rank gets its share of every batch,
and all ranks must call every method.

Precision: weights, gradients, optimizer state and the head are float32 (float64 for tests); `bfloat16` runs the
backbone's matrix products, on GPUs attention too, under autocast, which casts from the float32 master weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from trivium.foundation.errors import DataError, RunDirError, TriviumError
from trivium.foundation.phases import Phase, announce
from trivium.models.backbone.shape import read_shape
from trivium.models.heads.loss import LossDenominators
from trivium.models.heads.trained_models import ActorCritic, LanguageModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.models.placement import device_of, narrowed, use_deterministic_kernels
from trivium.models.precision import precision_of, set_matmul_precision
from trivium.models.weights.lora import adapter_parameters, describe_adapter, pushed_adapter, save_adapter
from trivium.models.weights.section import ADAPTER_STEM
from trivium.models.weights.stream import Described
from trivium.planning.model_shape import ModelShape
from trivium.protocols import Algorithm, Objective, SteppedEngine, StepSettings, WeightOffer, offer_on
from trivium.training.batching import first_pass
from trivium.training.distributed.ranks import ALONE, Ranks
from trivium.training.flops import WorkDone, measured_peak, utilisation
from trivium.training.learner import Learner, TrainableObjective
from trivium.training.optim import Optimizer, learning_rate
from trivium.training.role_models import SCORED_BY, ModelSources, RoleModels, model_dtype
from trivium.training.section import DescribedTorchTrainEngine, TorchTrainConfig
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
from trivium.types import AnyArray, Batch, Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "policy-adapter"


class TorchTrainEngine(DescribedTorchTrainEngine, SteppedEngine):
    """Trains in this process: the policy and, if the algorithm needs them, a critic, a reward model, a frozen reference
    and a frozen teacher."""

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
        base: PreTrainedModel | None = None,
    ) -> None:
        """`temperature` is the sampling temperature and `max_response_length` the limit of one completion, in tokens:
        `seq-mean-token-sum-norm` divides by it. The schedule of the learning rate begins at `first_version` (where
        earlier stages left off) and has `total_steps` train steps.

        `seed` draws the head of a critic or reward model; every method sets torch's number of `threads` for the calling
        thread. `ranks` are the processes that train together. `roles` are the models of this process; by default all
        that the algorithm needs. `base` is the model in `model_dir`: adapters of several engines share its weights.
        """
        self.config, self.algorithm = config.on_this_machine(), algorithm
        self._first_version, self._total_steps = first_version, total_steps
        self.ranks, self.version = ranks, first_version
        self._moved_from: int | None = None
        """The version before the last optimizer step."""
        device = ranks.device if ranks.size > 1 else device_of(config.device)
        if config.deterministic_kernels and device.type == "cuda":
            use_deterministic_kernels("train.deterministic_kernels")
        head_precision = precision_of(config.head_precision, device.type, self.config.dtype, "train.head_precision")
        set_matmul_precision(head_precision)
        self._models = RoleModels(
            self.config,
            model_dir=model_dir,
            temperature=temperature,
            max_response_length=max_response_length,
            head_precision=head_precision,
            seed=seed,
            threads=threads,
            ranks=ranks,
            device=device,
            roles=roles,
            base=base,
        )
        self._learners: dict[str, Learner] = {}
        self._shapes: dict[str, ModelShape] | None = None
        self._work = WorkDone()
        self._updates: list[Batch] = []
        """The mini-batches of the policy's updates with their per-token columns, until `take_updates`."""

    def prepare(self) -> None:
        """Loads models and optimizers from the initial model directory."""
        self._open(self._models.initial())

    def score(self, batch: Batch, what: str) -> list[AnyArray]:
        """Per-token numbers without gradient: leading axis L, 0 outside the response mask.

        Raises DataError for a sequence that is longer than the model's context.
        """
        torch.set_num_threads(self._models.threads)
        if what not in SCORED_BY:
            raise TriviumError(f"the score {what!r}", "no such score", f"known: {', '.join(SCORED_BY)}")
        role, kind = SCORED_BY[what]
        if what == "student_top":
            batch = batch.with_columns(student_top=self._learner("policy").score(batch, "top"))
        prompted = batch.under_teacher() if role == "teacher" else batch
        scores = (learner := self._learner(role)).score(prompted, kind)
        self._work.add(self.version, f"score/{what}", learner.work)
        return batch.from_teacher(scores) if role == "teacher" else scores

    def update(self, role: str, batch: Batch, objective: Objective, totals: LossDenominators | None = None) -> Metrics:
        """One optimizer step of one role, at the learning rate that belongs to the current train step. `batch` is this
        rank's share of the mini-batch, and `totals` the counts of the whole mini-batch; None if the share is the whole.

        Raises, weights untouched, TriviumError when the gradient is not finite, and DataError for a sequence that is
        longer than the model's context.
        """
        torch.set_num_threads(self._models.threads)
        learner = self._learner(role)
        learner.keeps_tokens = self.settings.keeps_updates and role == "policy"
        step = self.version - self._first_version
        lr = learning_rate(self._models.optimizer_config(role), step, self._total_steps)
        optimizer = cast(Optimizer, learner.optimizer)
        before = optimizer.steps_started
        try:
            metrics = learner.update(
                batch,
                cast(TrainableObjective, objective),
                lr,
                self._models.max_grad_norm(role),
                step=step,
                who=f"the {role} in train step {self.version + 1}",
                totals=totals,
            )
            self._work.add(self.version, f"update/{role}", learner.work)
            if role == "policy" and (teacher := self._learners.get("teacher")) is not None and teacher.role.rate:
                teacher.follow(learner)
            if learner.loss_columns:
                self._updates.append(Batch(batch.experiences).with_columns(**learner.loss_columns))
            return metrics
        finally:
            if optimizer.steps_started > before:
                self._moved_from = self.version
            # After an error before the optimizer step these are still the weights of the version, and the run can save
            # them.
            self.holds_version = self._moved_from != self.version
            self.free_cache()

    def accumulate(
        self, batch: Batch, objective: Objective, *, gradient: bool = True
    ) -> tuple[Metrics, dict[str, list[AnyArray]]]:
        torch.set_num_threads(self._models.threads)
        objective, step = cast(TrainableObjective, objective), self.version - self._first_version
        return self._learner("policy").accumulate(batch, objective, step=step, gradient=gradient)

    def lose_data(self) -> None:
        self._learner("policy").lose_data()

    def step(self, settings: StepSettings) -> Metrics:
        torch.set_num_threads(self._models.threads)
        learner = self._learner("policy")
        self.holds_version = False
        try:
            metrics = learner.take_step(settings, f"the policy in step {self.version + 1}")
        except TriviumError:
            self.holds_version = True
            raise
        self.version, self.holds_version = self.version + 1, True
        return metrics

    def save_adapter(self, directory: Path) -> None:
        save_adapter(self._policy.module, directory)

    def top(self, batch: Batch, k: int) -> list[AnyArray]:
        torch.set_num_threads(self._models.threads)
        return self._learner("policy").score(batch, "top", k)

    def free_cache(self) -> None:
        """Returns the memory that this process has cached to its GPU, if a rollout engine wakes there
        (`EngineSettings.shares_gpu`). An engine over several GPUs takes the memory of several ranks."""
        if self.settings.shares_gpu:
            torch.cuda.empty_cache()

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
        torch.set_num_threads(self._models.threads)
        step = self.version - self._first_version
        return self._learner(role).measure(
            batch, cast(TrainableObjective, objective), step=step, totals=totals, gradient=gradient
        )

    def utilisation(self, phases: Mapping[str, Phase]) -> Metrics:
        """Model FLOPs over the peak of all ranks. Critic, reward model and reference are assumed to have the policy's
        shape."""
        if self._shapes is None:
            self._shapes = self._read_shapes()
        if not self._shapes:
            return {}
        torch.set_num_threads(self._models.threads)
        dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else model_dtype(self.config)
        peak = self.config.peak_flops or measured_peak(self._models.device, dtype, self._models.threads)
        role_of = {what: role for what, (role, _) in SCORED_BY.items()}
        lora = self.config.lora
        return utilisation(
            self._work.part_of(phases, self.ranks),
            self._shapes,
            role_of,
            peak * self.ranks.size,
            adapted=0 if lora is None else lora.adapted(self._shapes["policy"].layers),
            vision_tower=self.config.vision_tower,
        )

    def _read_shapes(self) -> dict[str, ModelShape]:
        """The shapes by role; empty if a config.json lacks the sizes."""
        teacher = None if self.algorithm.teacher is None else self.algorithm.teacher.path
        others = {} if teacher is None else {"teacher": teacher}
        if self.config.critic_path is not None:
            others["critic"] = Path(self.config.critic_path)
        try:
            shape = read_shape(self._models.model_dir)
            roles = dict.fromkeys(("policy", "critic", "reward", "reference", "teacher"), shape)
            return {**roles, **{role: read_shape(path) for role, path in others.items()}}
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
        for gathered in weights:  # every rank takes part in every gather, even if the channel refused the weights
            del gathered
        self.free_cache()
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
        """`policy/`, `critic/`, `reward/`, `teacher/` (Hugging Face directories), `<role>-optimizer.safetensors`,
        `engine.json`; large ones are split into numbered files. For a critic on the policy's trunk, `critic/` has only
        the head. With LoRA, `policy/` has the merged weights, and `policy-adapter/` has the adapter in peft's format.

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
        folders = (directory / name for name in ("policy", "critic", "reward", _ADAPTER, "teacher"))
        self._open(ModelSources(*folders))
        for role, learner in self._learners.items():
            if learner.optimizer is not None:
                learner.optimizer.restore(read_tensors(directory, f"{role}-optimizer"))
        self.version = json.loads(counters.read_text(encoding="utf-8"))["version"]

    def save_weights(self, directory: Path) -> None:
        """A directory that transformers loads by itself: weights, config, and the other files of the initial model."""
        files, finish = weight_files(self._policy, ""), partial(copy_companions, self._models.model_dir)
        take_snapshot(files, self.ranks, self.settings.save_strategy, finish, copy=False).write(directory)

    def snapshot(self, *, copy: bool) -> Snapshot:
        """What `save` writes. Without `copy`, it reads the state when it writes."""
        files: list[TensorFile] = []
        adapted = self.config.lora is not None and "policy" in self._learners
        merges = self.settings.saves_merged or not adapted
        for role, learner in self._learners.items():
            if merges if role == "policy" else learner.optimizer is not None or learner.role.rate:
                files += weight_files(learner.model, f"{role}/")
            if learner.optimizer is not None:
                files.append(TensorFile(f"{role}-optimizer", learner.optimizer.state()))
        if "policy" in self._learners and isinstance(self._policy, ActorCritic):
            files.append(TensorFile(f"critic/{VALUE_HEAD}", self._policy.value_head.state_dict()))
        if adapted:
            files.append(TensorFile(f"{_ADAPTER}/{ADAPTER_STEM}", adapter_parameters(self._policy.module), single=True))
        version = self.version

        def finish(directory: Path) -> None:
            if "policy" in self._learners and merges:
                copy_companions(self._models.model_dir, directory / "policy")
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

    def _open(self, sources: ModelSources) -> None:
        torch.set_num_threads(self._models.threads)
        is_first, self._learners = not self._learners, {}  # frees the models before others are loaded
        self._learners = self._models.open(self.algorithm, sources)
        if is_first:
            announce(self._models.description(self._learners))
