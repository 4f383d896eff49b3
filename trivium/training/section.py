"""The section `train` of the torch train engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from trivium.clients.hub import ModelPath
from trivium.config import Config, ModelConfig, Plugin, RunConfig, TrainConfig, changeable, free
from trivium.config.recording import shape_in
from trivium.foundation.errors import MissingPackage, Problem, TriviumError
from trivium.foundation.registry import describe, suggest
from trivium.models.backbone.huggingface import missing_model_error
from trivium.models.placement import head_precision_problems, resolve_auto
from trivium.models.precision import HeadPrecision
from trivium.models.weights.section import LoraConfig, Push, Refusal, has_library, is_quantized, refusal
from trivium.planning.memory_estimate import vision_problems
from trivium.planning.parallel import ParallelConfig, shape_problems
from trivium.types import Capabilities, capabilities_of

DecayRate = Annotated[float, Field(ge=0, lt=1)]


_USUAL_RANK = 32
"""The rank of an adapter of `run.mode: tinker` whose client names none, in the SDK as well."""
PRETRAINED_LR, ADAPTER_LR, RANDOM_LR = 1e-6, 1e-4, 1e-3
"""The default learning rates for all weights of a pretrained model, for an adapter of one, and for random weights. An
adapter learns nothing in a run of usual length with the rate of all weights: it begins as no change at all."""


class OptimizerConfig(Config):
    """AdamW and its learning rate."""

    lr: float | None = changeable(None, ge=0)
    """Peak learning rate. Unset: 1e-6 for all weights of a pretrained model, 1e-4 for an adapter of one (`train.lora`),
    1e-3 for a model of random weights (`model.kind: tiny`)."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; norms, biases and embeddings have none."""
    warmup_steps: int = Field(default=0, ge=0)
    """Train steps of linear warm-up, at the start of each stage; the first one has `lr / warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up, until the stage's last train step."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The learning rate at the end of `linear` and `cosine`, as a fraction of `lr`."""

    @property
    def peak(self) -> float:
        """`lr`; outside a run, where no model has filled it in, the rate for all weights of a pretrained model."""
        return PRETRAINED_LR if self.lr is None else self.lr

    def at(self, rate: float) -> OptimizerConfig:
        """The section with `rate` as `lr`, if that is unset."""
        return self if self.lr is not None else self.with_usual(lr=rate)


class TorchTrainConfig(TrainConfig):
    """How the models are trained."""

    kind: str = "torch"
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Arithmetic of the backbone; trained weights, optimizer and head are at least float32. `auto` is bfloat16 on a GPU
    that supports it, else float32."""
    frozen_dtype: Literal["float32", "bfloat16", "int8", "nf4"] = "float32"
    """Type of frozen weights: the base model under `lora`, a frozen reference and teacher. bfloat16 halves their
    memory, and most models are saved in it. `int8` and `nf4` keep the weights of linear layers in 8 or 4 bits, the
    others in bfloat16: bitsandbytes (`pip install 'trivium[quantized]'`), on one rank."""
    head_precision: HeadPrecision = "auto"
    """Precision of the matrix products of the output layer on a GPU; logits are float32 in any case. `float32`: full
    precision. `tf32`: both factors rounded to 11 bits, for all float32 products of the process. `bfloat16`: both
    factors rounded to bfloat16, as in the other layers of a bfloat16 model. `bfloat16x3`: the sum of three bfloat16
    products, with an error of at most 3 * 2^-16 of the sum of absolute products. `auto` is `bfloat16` for
    `dtype: bfloat16`, else `bfloat16x3`, on a GPU that supports bfloat16; `float32` otherwise, and always on a CPU.
    `engine.head_precision` must be the same."""
    deterministic_kernels: bool = False
    """On a GPU, scores and updates of equal inputs have equal bits in every run on the same kind of GPU with the same
    number of ranks: torch's deterministic algorithms, cuDNN without its search, cuBLAS with a fixed workspace, for the
    whole process. An operation without such a kernel is an error. Slower; does not cover sampling by engines on a GPU;
    no effect on a CPU, where results repeat bit for bit."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` uses a GPU if there is one."""
    max_tokens_per_micro_batch: int | None = free(None, chosen=True, ge=1)
    """Tokens of one forward and backward pass on one rank, context included; a longer sequence is a micro-batch of its
    own. Unset: chosen from the model, the longest sequence and the memory of the machine, printed by `trivium check`,
    and kept when the run is resumed. Each of the ranks that share sequences (`sequence_parallel`) takes this number. On
    a CPU, the micro-batches of a small model that are computed at the same time have this number together. Affects
    memory and speed, never the gradient beyond the last bits of its sums."""
    own_process: bool = free(False)
    """Runs the trained models in a separate process on the same machine. Python runs one thread of a process at a time,
    so rollouts and updates of small models overlap (`schedule.max_staleness`) only in two processes. Weights are copied
    once more, and the second process needs 0.4 GB for its imports. No effect with Ray, where each role is a process,
    nor on ranks that torchrun starts. Affects speed, never the result."""
    share_prefix: bool = free(True)
    """Computes the common beginning of sequences (the prompt of a group) once, if that saves time and the model
    supports packing. Affects speed, never the gradient."""
    router_replay: Literal["off", "rollout"] = "off"
    """For a mixture of experts: `rollout` trains each token through the experts that it was sampled with (R3), which
    the engine records. If engine and trainer compute differently, their routers choose different experts for some
    tokens, and log-probabilities differ by far more than rounding. The trainer computes the weights of the chosen
    experts itself."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory for a second forward pass."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks that split the layers of text models by experts and tensors, for models whose class has a plan for that in
    transformers. FSDP shards what a rank has over the others."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that share each sequence (Ulysses). With 1, every rank holds whole sequences."""
    shard: int = Field(default=0, ge=0)
    """Ranks over which parameters are sharded; each group of this size holds a replica (HSDP). 0: all ranks."""
    cpu_offload: bool = False
    """Keeps parameters, gradients and optimizer state of sharded models in host memory between their uses."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest norm of a mini-batch's gradient; a larger gradient is scaled down to it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The policy's optimizer, or the reward model's where that is what is trained."""
    critic_optimizer: OptimizerConfig | None = None
    """The critic's optimizer; unset: the policy's settings."""
    critic_path: ModelPath | None = None
    """Hugging Face directory (or an id in the local cache) of the model that the critic starts from, with the policy's
    tokenizer; unset: the policy's own. The head of a reward model or classifier with one output is the critic's."""
    critic_max_grad_norm: float | None = Field(default=None, gt=0)
    """The critic's gradient is scaled down to this norm; unset: `max_grad_norm`."""
    peak_flops: float | None = free(None, gt=0)
    """Operations per second that one rank could reach, for `perf/mfu`; unset: measured by a matrix product."""
    vision_tower: Literal["trained", "projector", "frozen"] | None = None
    """The part of a vision-language model's image side that is trained: all of it (`trained`), only the `projector`
    from the vision tower to the language model, or none (`frozen`). Unset: all of it; with `lora`, none."""
    lora: LoraConfig | None = None
    """Trains an adapter of the policy, which is its own reference with the adapter off; unset: all its weights. With
    `run.mode: tinker` clients describe their adapters, and memory is planned for this one; unset: of rank 32."""

    def for_run(self, run: RunConfig) -> TorchTrainConfig:
        critic, lora = self.critic_optimizer, self.lora
        if critic is not None:
            critic = critic.at(self.model_copy(update={"lora": None}).usual_lr(run.model))
        if lora is None and run.run.mode == "tinker":  # clients bring adapters: what memory is planned for
            lora = LoraConfig(rank=_USUAL_RANK)
        if lora is not None:
            lora = lora.pushed_as(self._usual_push(run))
        optimizer = self.optimizer.at(self.usual_lr(run.model))
        return self.with_usual(optimizer=optimizer, critic_optimizer=critic, lora=lora)

    def _usual_push(self, run: RunConfig) -> Push:
        if run.run.mode == "tinker":
            return "adapter"  # of the client whose turn it is
        # Explorers that run as separate commands have only the first stage's model, and a base in fewer bits than its
        # files differs from the one that engines read there.
        has_same_base = run.run.mode in ("both", "serve") and self.frozen_dtype == "float32"
        engine = capabilities_of(describe("engines", run.engine.kind))
        return "adapter" if has_same_base and engine.merges_adapters else "merged"

    def usual_lr(self, model: Plugin) -> float:
        is_random = isinstance(model, ModelConfig) and model.has_random_weights
        return RANDOM_LR if is_random else PRETRAINED_LR if self.lora is None else ADAPTER_LR

    def on_this_machine(self) -> Self:
        return resolve_auto(self)

    def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from head_precision_problems(self, where)
        path = getattr(run.model, "path", None)
        if self.frozen_dtype == "bfloat16" and self.lora is not None and self.lora.push == "adapter":
            yield from _rounded_base_problems(run, path, f"{where}.frozen_dtype")
        if self.lora is not None and self.lora.path is None and self.lora.names_layers and path is not None:
            yield from _adapter_problems(self.lora, path, f"{where}.lora")

    def refuses_few_bits(self, device: str, ranks: int = 1) -> Refusal | None:
        """Returns why frozen weights cannot be kept in 8 or 4 bits on this device type, or None if they can."""
        pushes = self.lora is not None and self.lora.push == "adapter"
        return refusal(installed=has_library(), device=device, dtype=self.dtype, ranks=ranks, pushes_adapter=pushes)

    def _critic_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        names = {
            "critic_optimizer": "an optimizer for a critic",
            "critic_path": "a model for a critic",
            "critic_max_grad_norm": "a gradient norm for a critic",
        }
        for name, part in names.items():
            if getattr(self, name) is None:
                continue
            if not run.algorithm.has_critic:
                found = f"the algorithm {run.algorithm.kind!r} trains none"
                yield Problem(f"{where}.{name}", part, found, "leave the key out, or use algorithm.kind ppo")
            elif getattr(run.algorithm, "shares_trunk", False):
                found = "its trunk is the policy's (algorithm.critic.trunk shared), and both take one step"
                do = "leave the key out; algorithm.critic.value_coef weighs the critic's loss"
                yield Problem(f"{where}.{name}", part, found, do)
        if self.critic_path is not None and (missing := missing_model_error(Path(self.critic_path))) is not None:
            do = "name a Hugging Face model directory here"
            yield Problem(f"{where}.critic_path", missing.asked, missing.found, do)

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        other = getattr(run.engine, "head_precision", self.head_precision)
        if other != self.head_precision:
            yield Problem(
                f"{where}.head_precision",
                f"{self.head_precision!r}",
                f"engine.head_precision is {other!r}: log-probabilities would differ between engine and trainer",
                "set both to the same",
            )
        device = "cpu" if self.device == "auto" else self.device.partition(":")[0]  # auto is either, and both will do
        if run.run.mode == "tinker":
            yield from self._served_problems(where)
        elif is_quantized(self.frozen_dtype) and (why := self.refuses_few_bits(device)):
            yield Problem(f"{where}.frozen_dtype", f"weights in {self.frozen_dtype}", why.reason, why.do)
        yield from self._critic_problems(run, where)
        if self.parallel.tensor > 1 and self.lora is not None:
            found, do = "an adapter's matrices are not split", "leave one of the two keys out"
            yield Problem(f"{where}.parallel.tensor", f"{self.parallel.tensor} with train.lora", found, do)
        elif (self.parallel.is_set or self.sequence_parallel > 1) and (shape := shape_in(run)) is not None:
            yield from shape_problems(shape, self.parallel, self.sequence_parallel)
        yield from vision_problems(run, self.vision_tower, f"{where}.vision_tower", adapted=self.lora is not None)
        if self.lora is not None:
            shape = shape_in(run)
            yield from self.lora.own_problems(f"{where}.lora", None if shape is None else shape.layers)
            adopts = capabilities_of(describe("engines", run.engine.kind)).adopts_adapters
            if self.lora.push == "adapter" and not adopts and run.run.mode != "tinker":  # which names engine.kind
                yield Problem(
                    f"{where}.lora.push",
                    "adapters that explorers add themselves",
                    f"engine.kind {run.engine.kind!r} cannot",
                    "set it to merged",
                )

    def _served_problems(self, where: str) -> Iterator[Problem]:
        """What does not fit adapters of clients (`run.mode: tinker`), which the engine adds to the model's weights."""
        if is_quantized(self.frozen_dtype):
            reason = "the engine adds adapters to the weights of the files, and these are trained beside others"
            do = "leave it out, or set it to bfloat16 for a model that was saved in it"
            yield Problem(f"{where}.frozen_dtype", f"{self.frozen_dtype} with run.mode tinker", reason, do)
        if self.lora is not None and self.lora.push == "merged":
            reason = "the engine takes the adapters of several clients in turn"
            yield Problem(f"{where}.lora.push", "all weights with run.mode tinker", reason, "leave it out")

    def warnings(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().warnings(run, where)
        if self.lora is not None:
            yield from self.lora.own_warnings(f"{where}.lora")


class DescribedTorchTrainEngine:
    """The section and the capabilities of `trivium.training.engine.TorchTrainEngine`."""

    Config = TorchTrainConfig
    capabilities = Capabilities(multiple_ranks=True)


def _rounded_base_problems(run: RunConfig, path: str | None, where: str) -> Iterator[Problem]:
    """Why engines could not add an adapter that is trained beside weights in bfloat16: those of the files differ."""
    from trivium.models.weights.saved_tensors import is_exact_in_bfloat16

    is_random = isinstance(run.model, ModelConfig) and run.model.has_random_weights
    with suppress(TriviumError):  # of files that another rule reports
        if is_random or (path is not None and not is_exact_in_bfloat16(Path(path))):
            found = "the model's weights have more bits, and engines add the adapter to these"
            do = "set it to float32, or save the model in bfloat16"
            do += "" if run.run.mode == "tinker" else ", or set train.lora.push: merged"
            yield Problem(where, "a base in bfloat16, for an adapter that engines add themselves", found, do)


def _adapter_problems(lora: LoraConfig, model: str, where: str) -> Iterator[Problem]:
    """Why the model has no layers of the section's names: an adapter is made for it without its weights."""
    import torch

    from trivium.models.backbone.load import load_lm
    from trivium.models.weights.lora import inject, linear_layers

    try:
        module = load_lm(model, dtype=torch.float32, empty=True)
        names = [f".{name}" for name, _ in module.named_modules()]
        # peft ignores a name that no layer has beside one that some have.
        absent = [target for target in lora.targets or () if not any(name.endswith(f".{target}") for name in names)]
        for target in absent:
            do = suggest(target, linear_layers(module, module))
            yield Problem(f"{where}.targets", f"an adapter for layers named {target!r}", "the model has none", do)
        if not absent:
            inject(module, lora, seed=0)
    except MissingPackage:  # another rule reports it
        return
    except TriviumError as error:
        yield Problem(where, error.asked, error.found, error.do)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises for unknown models
        found = f"transformers cannot build it: {type(error).__name__}: {error}"
        yield Problem(where, f"the layers of the model in {model}", found, "name a model of transformers in model.path")
