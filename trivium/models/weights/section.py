"""What a config says of an adapter and of weights in few bits. Imports no torch: a check of a config needs none."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trivium.clients.hub import ModelPath, absence
from trivium.config import Config, free
from trivium.foundation.errors import Problem
from trivium.planning.model_shape import FEW_BITS

ADAPTER_STEM = "adapter_model"
"""The name of peft's file of tensors, without the suffix."""
ADAPTER_WEIGHTS, ADAPTER_CONFIG = f"{ADAPTER_STEM}.safetensors", "adapter_config.json"
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
    "lora_bias": False,
}
"""The config of an adapter that has only A, B and a scale for each layer. Others are refused. Its `lora_dropout` is no
weight: the run trains without dropout."""


Push = Literal["merged", "adapter"]


def _unless_all(targets: object) -> object:
    return None if targets in ("all-linear", ["all-linear"]) else targets


class LoraConfig(Config):
    """Trains a low-rank adapter of the policy instead of its weights."""

    rank: int = Field(default=16, ge=1)
    """Width of the adapter of each layer."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapter's product is scaled by `alpha / rank`."""
    targets: Annotated[tuple[str, ...] | None, BeforeValidator(_unless_all)] = None
    """Last parts of the names of the layers that get an adapter (`q_proj`, `v_proj`). Unset, or peft's `all-linear`:
    every linear layer except the output layer and layers that share one weight; in a mixture of experts, those of
    attention. In a vision model, names mean layers of the language part; a name with a dot
    (`visual.blocks.0.attn.qkv`) means any layer whose name ends with it."""
    exclude: tuple[str, ...] | str | None = None
    """Layers among them that get no adapter: last parts of their names, or a pattern for whole names (`.*visual.*`)."""
    layers: int | None = Field(default=None, ge=1)
    """Only this number of the last layers of the language part get an adapter. The backward pass ends at the first of
    them, and the layers below keep no activations. Unset: all layers."""
    path: ModelPath | None = None
    """Directory of a peft adapter to start from (or an id in the local cache), with its own rank, alpha and targets.
    One that was trained with dropout is trained on without it. Unset: a new adapter, which does not change outputs at
    first."""
    push: Push | None = free(None)
    """What explorers receive: all weights with the adapter added, or only the adapter, which they add themselves.
    Unset: the adapter, if one command explores and trains, `engine.kind` is `torch` and `frozen_dtype` is `float32`,
    and always with `run.mode: tinker`; else all weights."""

    def pushed_as(self, usual: Push) -> LoraConfig:
        """The section with `usual` as `push`, if that is unset."""
        return self if self.push is not None else self.with_usual(push=usual)

    @property
    def names_layers(self) -> bool:
        """Whether layers are named, which the model may lack."""
        return self.targets is not None or self.exclude is not None

    def adapted(self, layers: int) -> int:
        """The number of layers with an adapter in a model of so many. The layers of `path` are not known here: it
        counts as an adapter of all."""
        return layers if self.layers is None else min(self.layers, layers)

    def own_problems(self, where: str, layers: int | None) -> Iterator[Problem]:
        """The problems of the section for a model of so many layers, if that is known."""
        if layers is not None and self.layers is not None and self.layers > layers:
            reason = f"the model has {layers}"
            yield Problem(f"{where}.layers", f"adapters in {self.layers} layers", reason, f"set at most {layers}")
        if self.path is None:
            return
        changed = sorted({"rank", "alpha", "targets", "exclude", "layers"} & self.model_fields_set)
        if changed:
            yield Problem(
                f"{where}.{changed[0]}",
                f"{', '.join(changed)} beside an adapter to start from",
                f"{self.path} has its own",
                "leave one of the two out",
            )
        if trouble := unusable_adapter(Path(self.path)):
            yield Problem(f"{where}.path", *trouble)

    def own_warnings(self, where: str) -> Iterator[Problem]:
        """Says that an adapter to start from was trained with dropout, which the run does not use."""
        file = Path(self.path or "") / ADAPTER_CONFIG
        dropout = json.loads(file.read_text(encoding="utf-8")).get("lora_dropout") if file.is_file() else None
        if self.path is not None and dropout:
            reason = f"lora_dropout {dropout:g}: it is trained on without dropout"
            yield Problem(f"{where}.path", f"the adapter {self.path}", reason, "nothing: dropout is no weight")


def largest_rank(section: LoraConfig) -> int:
    """The largest rank of any layer. An adapter to start from has its own ranks."""
    if section.path is None or not (file := Path(section.path) / ADAPTER_CONFIG).is_file():
        return section.rank
    saved = json.loads(file.read_text(encoding="utf-8"))
    return max([saved["r"], *(saved.get("rank_pattern") or {}).values()])


def unusable_adapter(directory: Path) -> tuple[str, str, str] | None:
    """Why a directory has no supported adapter: asked, found, do. None if it has one."""
    adapter = f"the adapter {directory}"
    do = "name a directory that peft's save_pretrained wrote, with plain LoRA in it"
    if not directory.is_dir():
        return adapter, *absence(directory)
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (directory / name).is_file()]
    if missing:
        return adapter, f"no {missing[0]} there", do
    config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    odd = [name for name, plain in _PLAIN.items() if config.get(name) not in (plain, None, [])]
    return (adapter, f"its {odd[0]} is {config[odd[0]]!r}", do) if odd else None


# --------------------------------------------------------------------------- weights in 8 or 4 bits

LIBRARY, EXTRA = "bitsandbytes", "quantized"
_DEVICES = ("cpu", "cuda")


def is_quantized(frozen_dtype: str) -> bool:
    """Whether this value of `train.frozen_dtype` quantises weights."""
    return frozen_dtype in FEW_BITS


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why weights cannot be quantised, and what to do."""

    reason: str
    do: str


def refusal(*, installed: bool, device: str, dtype: str, ranks: int, pushes_adapter: bool) -> Refusal | None:
    """Returns None if a frozen base can be quantised, else the reason. `installed`: the library is installed; `device`:
    the type of the device; `dtype`: that of the trained models; `ranks`: how many share one model."""
    if not installed:
        return Refusal(
            f"the package {LIBRARY!r} is not installed",
            f"pip install 'trivium[{EXTRA}]', or set it to bfloat16: with train.lora, 1.5B parameters train in 24 GB "
            "and 7B in 80 GB",
        )
    if device not in _DEVICES:
        return Refusal(f"{LIBRARY} is used on {' and '.join(_DEVICES)}, not on {device}", "set it to bfloat16")
    if dtype == "float64":
        return Refusal("train.dtype: float64 keeps all weights in it", "leave one of the two out")
    if ranks > 1:
        return Refusal(f"{ranks} ranks share the model, and weights in few bits are not sharded", "train on one rank")
    if pushes_adapter:
        return Refusal(
            "train.lora.push: adapter: engines would add it to another base than it is trained beside",
            "set train.lora.push: merged",
        )
    return None


def has_library() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec(LIBRARY) is not None
