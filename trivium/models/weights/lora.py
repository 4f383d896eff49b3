"""LoRA: a linear layer W (out, in) computes with W + scale * B A. Only A (rank, in) and B (out, rank) are trained.

peft adds the adapters to the model's layers, in place. `merged` is the only function that merges. It never changes the
model, so base weights keep the values that were loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from trivium.foundation.errors import MissingPackage, SyncError, TriviumError
from trivium.foundation.randomness import stream
from trivium.models.vision.encoder import vision_of
from trivium.models.weights.filling import CopyRows, allocated, base_name, local_part, read_part, rows_of
from trivium.models.weights.quantized import QuantizedLinear, original
from trivium.models.weights.saved_tensors import SafetensorsFiles
from trivium.models.weights.section import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, unusable_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "default"
"""The adapter's name inside peft."""
_PREFIX = "base_model.model."
"""The prefix of layer names in peft's files."""
_DOWN, _UP, _SCALE, _BASE = ".lora_A.weight", ".lora_B.weight", ".lora_scale", ".lora_base"
_FUSED_TYPES = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types of models for which peft refuses adapters at `out_proj`, because kernels multiply by its weight themselves."""
_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that peft takes for stacked experts, even if they name other layers."""
_LINEAR = (nn.Linear, Conv1D, QuantizedLinear)
"""The layer types that support an adapter."""


# --------------------------------------------------------------------------- in a model


def attach(module: PreTrainedModel, section: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Adds an adapter to a model, in place, and freezes all other parameters. Call it before parameters are sharded.

    The adapter is that of the directory `section.path`. If that is unset, A is drawn from `seed` and B is zero, which
    leaves the outputs of the model unchanged.

    Raises MissingPackage without peft, TriviumError for layers or adapters that are not supported.
    """
    inject(module, section, seed=seed)(module.device)
    return module


def inject(
    module: PreTrainedModel, section: LoraConfig, *, seed: int, adapter: Path | None = None
) -> Callable[[torch.device], None]:
    """As `attach`, without the values of A and B. Call the returned function once the model has its weights: it sets
    A and B, and allocates them on the given device if they are on `meta`. They are float32 or wider.

    `adapter` is a directory that `save_adapter` wrote. It replaces `section.path`.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingPackage("peft", "peft", "train a LoRA adapter") from error
    start = adapter or (Path(section.path) if section.path else None)
    if start is not None:
        if trouble := unusable_adapter(start):
            raise TriviumError(*trouble)
        config = cast(peft.LoraConfig, peft.LoraConfig.from_pretrained(str(start)))
        config.lora_dropout = 0.0  # with dropout, two passes over the same tokens, and their ratios, would differ
    else:
        layers = None if section.layers is None else _last_layers(module, section.layers)
        targets = _targets(module, section.targets, layers)
        exclude = [*section.exclude] if isinstance(section.exclude, tuple) else section.exclude
        config = peft.LoraConfig(
            r=section.rank,
            lora_alpha=cast(int, section.alpha),
            target_modules=targets,
            exclude_modules=exclude,
            layers_to_transform=None if isinstance(targets, str) else layers,
        )
    config.inference_mode, config.task_type = False, peft.TaskType.CAUSAL_LM
    config.base_model_name_or_path = module.config.name_or_path
    output = module.get_output_embeddings()
    try:
        with warnings.catch_warnings():  # both cases are handled: weights stored as (in, out), and ties
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            warnings.filterwarnings("ignore", message="You have passed exclude_modules")  # a pattern may match none
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            peft.inject_adapter_in_model(config, module, _NAME)
    except ValueError as error:
        raise TriviumError(
            f"an adapter for {type(module).__name__}", str(error), "name layers of this model in train.lora.targets"
        ) from error
    _check(module, output)
    for layer in _layers(module).values():
        for part in (layer.lora_A, layer.lora_B):  # in bfloat16, small steps of the optimizer would round to nothing
            part.to(torch.promote_types(part[_NAME].weight.dtype, torch.float32))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(_of_adapter(name))
    module.eval()
    return partial(_draw, module, seed) if start is None else partial(_fill, module, start)


@contextmanager
def adapter_off(module: nn.Module) -> Generator[None]:
    """Inside the block, the model computes the bits of its base."""
    layers = [*_layers(module).values()]
    for layer in layers:
        # peft's own switch would also change requires_grad, which sharded parameters do not allow.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def has_adapter(module: nn.Module) -> bool:
    """Whether the model has an adapter."""
    return bool(_layers(module))


def base_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The base's tensors, or this rank's parts of them, by their names in the model without the adapter."""
    state = module.state_dict()
    return {base: state[name] for name in state if (base := base_name(name)) is not None}


def merged_tensor(module: nn.Module, base: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor of `base` (`base_state`) with the adapter added. The model is not changed. If parameters are sharded,
    every rank must call it, and gets the whole tensor."""
    layer, _, part = name.rpartition(".")
    owner = module.get_submodule(layer)
    packed = original(owner) if part == "weight" else None
    tensor = _whole(base[name]) if packed is None else packed.weight
    return merged(tensor, _low_rank(owner)) if part == "weight" and hasattr(owner, "lora_A") else tensor


def merged_dtype(module: nn.Module, base: Mapping[str, torch.Tensor], name: str) -> torch.dtype:
    """The type of `merged_tensor`."""
    layer, _, part = name.rpartition(".")
    owner: Any = module.get_submodule(layer)
    return owner.lora_A[_NAME].weight.dtype if part == "weight" and hasattr(owner, "lora_A") else base[name].dtype


def merged_state(module: nn.Module, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the model with its adapter added, each computed when it is read (`merged_tensor`).

    `names` are names of the model without the adapter, in order; unset: all.
    """
    base = base_state(module)
    for name in base if names is None else names:
        yield name, merged_tensor(module, base, name)


def adapter_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's parameters, or this rank's parts of them, under peft's names."""
    return {
        f"{_PREFIX}{name}{what}": part[_NAME].weight
        for name, layer in _layers(module).items()
        for what, part in ((_DOWN, layer.lora_A), (_UP, layer.lora_B))
    }


def adapter_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's whole tensors under peft's names. If they are sharded, every rank must read all of them."""
    return ((name, _whole(tensor)) for name, tensor in adapter_parameters(module).items())


def save_adapter(module: nn.Module, directory: Path) -> None:
    """Writes a directory that peft loads. Not for sharded parameters: `training.snapshot` writes those, and
    `describe_adapter` the rest."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in adapter_state(module)}, directory / ADAPTER_WEIGHTS)
    describe_adapter(module, directory)


def describe_adapter(module: nn.Module, directory: Path) -> None:
    """Writes peft's config of the adapter."""
    config: Any = getattr(module, "peft_config")[_NAME]  # noqa: B009  (peft puts it there; torch knows no such name)
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)  # sorts its sets
    (directory / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


# --------------------------------------------------------------------------- from trainer to engine


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one layer."""

    down: torch.Tensor
    """A (rank, in)."""
    up: torch.Tensor
    """B (out, rank)."""
    scale: float
    transposed: bool = False
    """The layer stores its weight as (in, out)."""
    base: int = 0
    """The `fingerprint` of the base weight."""


def merged(base: torch.Tensor, added: LowRank) -> torch.Tensor:
    """W + scale * B A, in the adapter's precision and on the base's device. Trainers and engines merge by this function
    alone, so they get the same bits on the same kind of device."""
    product = (added.up.to(base.device) @ added.down.to(base.device)).mul_(added.scale)
    return base.to(product.dtype) + (product.T if added.transposed else product)


def fingerprint(weight: torch.Tensor) -> int:
    """A hash of some thousand elements of a base weight. It does not depend on the type of the weight."""
    some = weight.detach().reshape(-1)[:: max(1, weight.numel() // 4096)].to("cpu", torch.float32).contiguous()
    # 7 bytes, because `pushed_adapter` sends the number as a signed one of 64 bits.
    return int.from_bytes(hashlib.blake2b(some.numpy().data, digest_size=7).digest(), "little")


def pushed_adapter(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter for an engine that has the base model: `adapter_state`, and each layer's scale and fingerprint."""
    yield from adapter_state(module)
    for name, layer in _layers(module).items():
        yield f"{_PREFIX}{name}{_SCALE}", torch.tensor(layer.scaling[_NAME], dtype=torch.float64)
        if not hasattr(layer, "trivium_base"):  # once: the base is frozen
            layer.trivium_base = fingerprint(_whole(layer.base_layer.weight))
        yield f"{_PREFIX}{name}{_BASE}", torch.tensor(layer.trivium_base)


def base_adapter(base: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """An adapter for the same engine that changes nothing: it sets the weights to those of the base model."""
    wanted = linear_layers(base, base)
    name, layer = next((n, m) for n, m in base.named_modules() if type(m) in _LINEAR and n.rpartition(".")[2] in wanted)
    weight = cast(torch.Tensor, layer.weight)
    out, wide = weight.shape[::-1] if isinstance(layer, Conv1D) else weight.shape
    parts = torch.zeros(1, wide), torch.zeros(out, 1), torch.tensor(1.0, dtype=torch.float64)
    for what, tensor in zip((_DOWN, _UP, _SCALE), parts, strict=True):
        yield f"{_PREFIX}{name}{what}", tensor
    yield f"{_PREFIX}{name}{_BASE}", torch.tensor(fingerprint(weight))


def is_adapter(weights: Iterable[tuple[str, Any]]) -> bool:
    """Whether weights come from `pushed_adapter`."""
    names = [name for name, _ in weights]
    return bool(names) and all(name.startswith(_PREFIX) for name in names)


def received_adapter(weights: Mapping[str, torch.Tensor], base: nn.Module) -> dict[str, LowRank]:
    """The adapter in weights from `pushed_adapter`, by the name of the changed weight in the model `base`.

    Raises SyncError if a part of it is missing, or does not fit the model.
    """
    layers = sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in weights})
    modules, adapter = dict(base.named_modules()), dict[str, LowRank]()
    for layer in layers:
        parts = [weights.get(f"{_PREFIX}{layer}{part}") for part in (_DOWN, _UP, _SCALE, _BASE)]
        if layer not in modules or any(part is None for part in parts):
            raise SyncError(
                f"an adapter of {type(base).__name__}",
                f"the model has no layer {layer!r}"
                if layer not in modules
                else f"the adapter of {layer!r} is not complete",
                "train and sample with the same base model",
            )
        down, up, scale, its_base = cast(list[torch.Tensor], parts)
        transposed = isinstance(modules[layer], Conv1D)
        shape, fits = (up.shape[0], down.shape[1]), tuple(cast(torch.Tensor, modules[layer].weight).shape)
        if up.shape[1] != down.shape[0] or (shape[::-1] if transposed else shape) != fits:
            raise SyncError(
                f"an adapter of {type(base).__name__}",
                f"the adapter of {layer!r} is for {shape}, the layer is {fits}",
                "train and sample with the same base model",
            )
        adapter[f"{layer}.weight"] = LowRank(down, up, float(scale), transposed, int(its_base))
    return adapter


def check_base(adapter: Mapping[str, LowRank], fingerprint_of: Callable[[str], int]) -> None:
    """Raises SyncError if the fingerprints of an adapter's base weights differ from `fingerprint_of` their names."""
    wrong = [name for name, added in adapter.items() if fingerprint_of(name) != added.base]
    if wrong:
        raise SyncError(
            f"add an adapter to {wrong[0]}",
            "the base weight differs from the one that the adapter was trained with",
            "give explorers the model that the stage began with, or set train.lora.push to merged (explorers that "
            "run as separate commands have only the first stage's model)",
        )


# --------------------------------------------------------------------------- inside


def _layers(module: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by their names in the model without it."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}


def _last_layers(module: PreTrainedModel, number: int) -> list[int]:
    """The numbers of the last layers of a model's decoder. Raises TriviumError if it has fewer."""
    total = int(module.config.get_text_config().num_hidden_layers)
    if number > total:
        raise TriviumError(
            f"adapters in {number} layers of {type(module).__name__}",
            f"the model has {total}",
            f"set train.lora.layers to at most {total}",
        )
    return [*range(total - number, total)]


def _targets(module: PreTrainedModel, named: tuple[str, ...] | None, layers: list[int] | None) -> list[str] | str:
    """The linear layers that get an adapter, in the form of peft's `target_modules`: last parts of names, or a pattern,
    which includes the numbers of the decoder's `layers` (peft takes them separately, but not with a pattern)."""
    vision = vision_of(module)
    if vision is None:
        return linear_layers(module, module) if named is None else [*named]
    inside = next(name for name, part in module.named_modules() if part is vision.decoder)
    last = linear_layers(vision.decoder, module) if named is None else named
    if layers is not None:
        inside += rf"\.\w+\.({'|'.join(map(str, layers))})"
    patterns = (rf".*\b{re.escape(name)}" if "." in name else rf"{inside}\.(.*\.)?{re.escape(name)}" for name in last)
    return "|".join(patterns)


def linear_layers(part: PreTrainedModel, module: PreTrainedModel) -> list[str]:
    """The last parts of the names of all linear layers in a part of a model, without the output layer and layers of
    which several have one weight (Zamba 2): it cannot hold the adapters of all."""
    output = module.get_output_embeddings()
    linear = {name: layer for name, layer in part.named_modules() if type(layer) in _LINEAR and layer is not output}
    owners = Counter(id(layer.weight) for layer in linear.values())
    tied = {name.rpartition(".")[2] for name, layer in linear.items() if owners[id(layer.weight)] > 1}
    # peft would take the number of a layer in a list for the number of a block.
    names = {last for last in (name.rpartition(".")[2] for name in linear) if not last.isdecimal()} - tied
    if module.config.model_type in _FUSED_TYPES:
        names.discard("out_proj")
    layers = (layer for layer in part.modules() if not isinstance(layer, nn.Conv1d))
    stacked = any(parameter.ndim == 3 for layer in layers for parameter in layer.parameters(recurse=False))
    return sorted(names - _EXPERTS if stacked else names)


def _low_rank(layer: Any) -> LowRank:
    down, up = (_whole(part[_NAME].weight) for part in (layer.lora_A, layer.lora_B))
    return LowRank(down, up, layer.scaling[_NAME], isinstance(layer.base_layer, Conv1D))


def _of_adapter(name: str) -> bool:
    return base_name(name) is None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank if it is sharded."""
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach() if full is None else full().detach()


def _check(module: PreTrainedModel, output: nn.Module | None) -> None:
    """Raises TriviumError for layers that `merged` does not support."""
    problem = "the output layer is among its targets" if module.get_output_embeddings() is not output else None
    owners = dict[int, str]()
    for name, layer in _layers(module).items():
        if type(layer.base_layer) not in _LINEAR:
            problem = f"{name} is not a linear layer"
        owner = owners.setdefault(id(layer.base_layer.weight), name)
        if owner != name:
            problem = f"{name} has the weight of {owner}, and its own adapter"
    if problem is not None:
        asked, do = f"an adapter for {type(module).__name__}", "name other layers in train.lora.targets"
        raise TriviumError(asked, problem, do)


def _draw(module: nn.Module, seed: int, device: torch.device) -> None:
    """Sets A to uniform numbers within sqrt(1 / in), drawn on the CPU whatever the device, and B to zero."""
    generator = torch.Generator().manual_seed(stream(seed, "lora"))
    for layer in _layers(module).values():
        bound = math.sqrt(1 / layer.lora_A[_NAME].weight.shape[1])
        drawn = torch.empty(layer.lora_A[_NAME].weight.shape).uniform_(-bound, bound, generator=generator)
        _set(layer.lora_A, device, rows_of(drawn))
        _set(layer.lora_B, device, lambda _, into: into.zero_())


@torch.no_grad()
def _set(part: nn.ModuleDict, device: torch.device, copy_rows: CopyRows) -> None:
    """Sets A or B of a layer; if it is sharded, this rank's part."""
    linear: Any = part[_NAME]
    if linear.weight.is_meta:
        linear._parameters["weight"] = allocated(linear.weight, device, copy_rows)
    else:
        read_part(linear.weight, copy_rows, local_part(linear.weight))


def _fill(module: nn.Module, directory: Path, device: torch.device) -> None:
    source, parameters = SafetensorsFiles([directory / ADAPTER_WEIGHTS]), adapter_parameters(module)
    saved = {name: entry.shape for name, entry in source.entries.items()}
    wrong = sorted(parameters.keys() ^ saved.keys()) or [
        name for name in parameters if tuple(parameters[name].shape) != saved[name]
    ]
    if wrong:
        raise TriviumError(
            f"start from the adapter {directory}",
            f"{wrong[0]} is missing, unknown, or of another shape ({len(wrong)} tensors)",
            "use an adapter of this model",
        )
    for name, layer in _layers(module).items():
        for what, part in ((_DOWN, layer.lora_A), (_UP, layer.lora_B)):
            _set(part, device, partial(source.copy_rows, f"{_PREFIX}{name}{what}"))
