"""The models of an algorithm's roles: loads, freezes or shards each, and builds its learner."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from trivium.foundation.errors import ConfigError, TriviumError
from trivium.models.backbone.load import sharing
from trivium.models.backbone.shape import read_shape
from trivium.models.heads.trained_models import (
    ActorCritic,
    LanguageModel,
    LanguageOptions,
    ModelOptions,
    ScoreModel,
    ValueModel,
)
from trivium.models.heads.value_head import saved_head
from trivium.models.vision.encoder import freeze_vision
from trivium.models.weights.lora import adapter_off
from trivium.models.weights.quantized import original
from trivium.models.weights.section import is_quantized
from trivium.planning.choices import MICRO_BATCH_TOKENS
from trivium.protocols import Algorithm
from trivium.training.device import precision_note
from trivium.training.distributed.fsdp import shard
from trivium.training.distributed.ranks import Ranks
from trivium.training.gradient_checkpointing import checkpoint_gradients
from trivium.training.learner import Learner, RoleModel
from trivium.training.optim import Optimizer
from trivium.training.passes import MicroBatching
from trivium.training.section import OptimizerConfig, TorchTrainConfig
from trivium.types import Teacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORED_BY = {
    "old": ("policy", "log_prob"),
    "log_prob": ("policy", "log_prob"),
    "entropy": ("policy", "entropy"),
    "sum_pi_squared": ("policy", "sum_pi_squared"),
    "mean_discriminant": ("policy", "mean_discriminant"),
    "ref": ("reference", "log_prob"),
    "teacher": ("teacher", "log_prob"),
    "teacher_top": ("teacher", "top"),
    "student_top": ("teacher", "candidates"),
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
"""Role -> its name in metrics (`train/loss/value`)."""
_EXACT_IDS = 2**24
"""Token ids below this are exact in float32, the dtype of columns."""


@dataclass(frozen=True)
class ModelSources:
    """The directories that models are loaded from."""

    policy: Path
    critic: Path
    reward: Path
    adapter: Path | None = None
    """The policy's adapter; None: a new one, or that of `train.lora.path`."""
    average: Path | None = None
    """The average of the policy's weights that is its teacher; None: the initial model."""


@dataclass(frozen=True)
class RoleModels:
    """How the models of a process are loaded and trained."""

    config: TorchTrainConfig
    model_dir: Path
    """The initial model of the stage."""
    temperature: float
    max_response_length: int
    head_precision: str
    seed: int
    threads: int
    ranks: Ranks
    device: torch.device
    roles: Collection[str] | None = None
    """The roles of this process; None: all that the algorithm needs."""
    base: PreTrainedModel | None = None
    """The model in `model_dir`, whose weights the policy shares under its adapter; None: the policy loads its own."""

    def open(self, algorithm: Algorithm, sources: ModelSources) -> dict[str, Learner]:
        """Loads the models of the roles that the algorithm needs. With LoRA, the policy is the initial model plus the
        adapter. All ranks must call it together."""
        trained = {objective.role for objective in algorithm.objectives}
        roles = trained | {"policy"} | {SCORED_BY[what][0] for what in algorithm.needs}
        if self.roles is not None:
            roles &= set(self.roles)
        self._check(algorithm, trained)
        learners: dict[str, Learner] = {}
        if "policy" in roles:
            learners["policy"] = self._policy(algorithm, sources, trained="policy" in trained)
        if "critic" in roles and shares_trunk(algorithm):
            learners["critic"] = self._learner(RoleModel(_METRIC_NAME["critic"], learners["policy"].model), routed=True)
        elif "critic" in roles:
            critic = ValueModel(sources.critic, seed=self.seed, **self._model_options)
            learners["critic"] = self._prepared("critic", critic, trained=True)
        if "reward" in roles:
            objective = next(one for one in algorithm.objectives if one.role == "reward")
            scale: float | None = getattr(objective, "scale", None)
            reward = ScoreModel(sources.reward, scale=scale, seed=self.seed, **self._model_options)
            learners["reward"] = self._prepared("reward", reward, trained=True)
        if "reference" in roles:
            learners["reference"] = self._reference(learners.get("policy"))
        if "teacher" in roles:
            learners["teacher"] = self._teacher(algorithm, learners["policy"], sources)
        return learners

    def initial(self) -> ModelSources:
        """The directories at the start of a stage. Raises ConfigError if the critic's model has a smaller vocabulary
        than the policy's."""
        if self.config.critic_path is None:
            return ModelSources(self.model_dir, self.model_dir, self.model_dir)
        critic = Path(self.config.critic_path)
        of_critic, of_policy = read_shape(critic).vocabulary, read_shape(self.model_dir).vocabulary
        if of_critic < of_policy:
            raise ConfigError(
                f"train.critic_path: {critic}",
                f"its vocabulary has {of_critic} tokens, and the policy's {of_policy}",
                "name a model with the policy's tokenizer",
            )
        return ModelSources(self.model_dir, critic, self.model_dir)

    def max_grad_norm(self, role: str) -> float:
        """The largest gradient norm of a role. The critic may have a separate one."""
        limit = self.config.critic_max_grad_norm if role == "critic" else None
        return self.config.max_grad_norm if limit is None else limit

    def optimizer_config(self, role: str) -> OptimizerConfig:
        """The optimizer of a role. The critic may have a separate one."""
        critic = self.config.critic_optimizer if role == "critic" else None
        return critic or self.config.optimizer

    def _check(self, algorithm: Algorithm, trained: Collection[str]) -> None:
        """Raises ConfigError for a section `train` that does not fit the algorithm or this device."""
        if self.config.lora is not None and "policy" not in trained:
            raise ConfigError(
                "train.lora: an adapter of the policy",
                f"the algorithm {algorithm.name!r} trains " + (", ".join(sorted(trained)) or "nothing"),
                "leave the section out",
            )
        if self.config.lora is not None and (teacher := algorithm.teacher) is not None and teacher.is_average:
            raise ConfigError(*Teacher.NO_ADAPTER)
        if self.ranks.tensor_size > 1 and self.config.lora is not None:
            found, do = "an adapter's matrices are not split", "leave one of the two keys out"
            raise ConfigError("train.parallel.tensor with train.lora", found, do)
        if is_quantized(self.config.frozen_dtype) and (
            why := self.config.refuses_few_bits(self.device.type, self.ranks.size)
        ):
            raise ConfigError(f"train.frozen_dtype: {self.config.frozen_dtype}", why.reason, why.do)

    @property
    def _model_options(self) -> ModelOptions:
        return {
            "dtype": model_dtype(self.config),
            "device": self.device,
            "autocast": self.config.dtype == "bfloat16",
            "sequence": self.ranks.sequence,
            "empty": self.ranks.mesh is not None,  # a sharded model reads its weights after sharding
        }

    @property
    def _frozen_options(self) -> LanguageOptions:
        """The options of a frozen language model."""
        is_few_bits = is_quantized(self.config.frozen_dtype)
        frozen = "bfloat16" if is_few_bits else self.config.frozen_dtype
        return {
            **self._model_options,
            "temperature": self.temperature,
            "weights": torch.float64 if self.config.dtype == "float64" else getattr(torch, frozen),
            "quantized": self.config.frozen_dtype if is_few_bits else "",
        }

    def _policy(self, algorithm: Algorithm, sources: ModelSources, *, trained: bool) -> Learner:
        # The policy is quantized only under an adapter. Trained weights keep `dtype`.
        lora, options = self.config.lora, self._frozen_options
        if lora is None:
            options["quantized"] = ""
            if trained:
                options["weights"] = None
        source = sources.policy if lora is None else self.model_dir if self.base is None else sharing(self.base)
        if shares_trunk(algorithm):
            model = ActorCritic(source, seed=self.seed, head=saved_head(sources.critic), **options)
        else:
            model = LanguageModel(source, **options)
        if lora is not None:
            model.adapt(lora, seed=self.seed, adapter=sources.adapter)
        if self.config.router_replay != "off":
            model.replay_routing()
        top_k = algorithm.teacher.top_k if "student_top" in algorithm.needs and algorithm.teacher is not None else 0
        return self._prepared("policy", model, trained=trained, top_k=min(top_k, model.vocabulary))

    def _reference(self, policy: Learner | None, role: str = "reference", top_k: int = 0) -> Learner:
        """The initial policy of the stage. With LoRA, this is the policy with its adapter disabled, if this process
        holds the policy and the adapter started at zero."""
        lora = self.config.lora
        if lora is not None and lora.path is None and policy is not None:
            off = partial(adapter_off, policy.model.module)
            return self._learner(RoleModel(_METRIC_NAME[role], policy.model, top_k=top_k, score_context=off))
        reference = LanguageModel(self.model_dir, **self._frozen_options)
        if lora is not None:
            reference.adapt(lora, seed=self.seed)
        return self._prepared(role, reference, trained=False, top_k=top_k)

    def _teacher(self, algorithm: Algorithm, policy: Learner, sources: ModelSources) -> Learner:
        """The teacher. Its distribution has the same temperature and the same vocabulary as the policy's."""
        teacher: Teacher | None = algorithm.teacher
        if teacher is None:
            raise TriviumError(
                f"the teacher of the algorithm {algorithm.name!r}",
                "it needs one, and algorithm.teacher is not set",
                "set algorithm.teacher.path",
            )
        if teacher.path is None:
            return self._self_teacher(teacher, policy, sources)
        model = LanguageModel(Path(teacher.path), **self._frozen_options)
        assert isinstance(policy.model, LanguageModel)
        if model.vocabulary != policy.model.vocabulary:
            raise TriviumError(
                f"distill {teacher.path} into {self.model_dir}",
                f"the teacher has {model.vocabulary} tokens, the policy {policy.model.vocabulary}",
                "use a teacher with the policy's tokenizer and an output layer of the same size",
            )
        if {"teacher_top", "student_top"} & algorithm.needs and model.vocabulary > _EXACT_IDS:
            raise TriviumError(
                f"the top-k tokens of the teacher {teacher.path}",
                f"its vocabulary has {model.vocabulary} tokens",
                f"use a loss that reads the teacher's log-probabilities alone: columns hold ids below {_EXACT_IDS}",
            )
        return self._prepared("teacher", model, trained=False, top_k=min(teacher.top_k, model.vocabulary))

    def _self_teacher(self, teacher: Teacher, policy: Learner, sources: ModelSources) -> Learner:
        """The policy as its own teacher: the same model, the one that the stage began with, or an average."""
        assert isinstance(policy.model, LanguageModel)
        top_k = min(teacher.top_k, policy.model.vocabulary)
        if teacher.weights == "initial":
            return self._reference(policy, "teacher", top_k)
        if teacher.weights == "current":
            return self._learner(RoleModel(_METRIC_NAME["teacher"], policy.model, top_k=top_k))
        options = self._frozen_options | {"weights": None, "quantized": ""}  # it is averaged in the policy's dtype
        average = LanguageModel(sources.average or self.model_dir, **cast(LanguageOptions, options))
        return self._prepared("teacher", average, trained=False, top_k=top_k, rate=teacher.rate)

    def _prepared(
        self, role: str, model: LanguageModel | ValueModel, *, trained: bool, top_k: int = 0, rate: float = 0.0
    ) -> Learner:
        """Freezes or shards a loaded model, reads its weights if they are still missing, and adds its optimizer."""
        if isinstance(model, LanguageModel):
            model.head_precision = self.head_precision
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
        optimizer = None
        if trained:
            network = model if isinstance(model, ValueModel | ActorCritic) else model.module
            optimizer = Optimizer(network, self.optimizer_config(role))
        return self._learner(RoleModel(_METRIC_NAME[role], model, optimizer, top_k, rate), routed=role == "policy")

    def _learner(self, role: RoleModel, *, routed: bool = False) -> Learner:
        """`routed`: tokens go through the experts that were recorded for them."""
        batching = MicroBatching(
            self.config.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS,
            share_prefix=self.config.share_prefix,
            threads=self.threads,
            replay_routing=routed,
            model_dir=self.model_dir,
        )
        return Learner(role, batching, max_response_length=self.max_response_length, ranks=self.ranks)

    def description(self, learners: Mapping[str, Learner]) -> str:
        """A line for the log: the trained models, device and dtype."""
        models: list[str] = []
        for role, learner in learners.items():
            if role == "critic" and isinstance(learner.model, ActorCritic):
                models.append("critic, a head of the policy")
                continue
            parameters = [(weight.numel(), weight.requires_grad) for weight in learner.model.module.parameters()]
            number, trained = sum(size for size, _ in parameters), sum(size for size, grad in parameters if grad)
            # A quantized layer has no parameters: its elements are counted from its shape.
            packed = (layer for layer in learner.model.module.modules() if original(layer) is layer)
            number += sum(layer.in_features * layer.out_features for layer in packed if isinstance(layer, nn.Linear))
            frozen = learner.optimizer is None
            some = "frozen" if frozen else f"{trained:,} of them trained" if trained < number else "all trained"
            models.append(f"{role} of {number:,} parameters, {some}")
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{self.threads} threads"
        ranks = f", {self.ranks.size} ranks" if self.ranks.size > 1 else ""
        if self.config.share_prefix and not all(learner.passes.share_prefixes for learner in learners.values()):
            models.append("prefixes are not shared by a model that does not pack")
        precision = precision_note(self.device, self.config.dtype)
        return f"trains on {self.device.type} ({name}{ranks}) in {precision}: {'; '.join(models)}"


def model_dtype(config: TorchTrainConfig) -> torch.dtype:
    """The dtype of trained weights."""
    return torch.float64 if config.dtype == "float64" else torch.float32


def shares_trunk(algorithm: Algorithm) -> bool:
    """Whether the critic is a value head on the policy's hidden states."""
    return any(objective.head == "lm+value" for objective in algorithm.objectives)
