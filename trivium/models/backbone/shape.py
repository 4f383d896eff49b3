"""Counts a model without its weights: transformers builds it on torch's `meta` device, and its modules are read.

A pass over a few tokens there shows what a layer keeps for the next token: keys and values, or a recurrent state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.foundation.errors import DataError
from trivium.models.vision.families import FAMILIES, Family
from trivium.planning.model_shape import ModelShape, VisionShape

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

_TOKENS = 2
"""Tokens of the pass. They are more than one: models compute one token alone in another way."""
_ROUTERS = {"gate", "router"}
"""Names of the modules that choose experts. Other matrices may have the shape of theirs."""
_INNER = ("intermediate_size", "n_inner", "ffn_dim")
"""Inner width of a feed-forward layer."""
_STATES = {"conv_states": "convolved", "recurrent_states": "scanned"}
"""Attribute of a layer of transformers' caches -> field of `ModelShape`."""
_SHAPES: dict[str, ModelShape] = {}
"""By the contents of a config.json, as the file has them or as transformers writes them: a plan asks several times for
the shape of each of its models."""


def read_shape(directory: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face directory. Raises DataError if transformers cannot build it."""
    try:
        written = (Path(directory) / "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        written = ""  # `_config_in` says what is wrong with it
    if written not in _SHAPES:
        _SHAPES[written] = shape_of(_config_in(directory))
    return _SHAPES[written]


def positions_in(directory: str | Path) -> int | None:
    """The longest sequence of the model in a Hugging Face directory, in tokens; None if its config has no limit."""
    return _first(_config_in(directory).get_text_config(), "max_position_embeddings")


def _config_in(directory: str | Path) -> PretrainedConfig:
    from transformers import AutoConfig

    path = Path(directory) / "config.json"
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    # Of what transformers raises for values that do not fit, some derives from `Exception` alone.
    except Exception as error:
        raise DataError(f"read {path}", str(error), "name a Hugging Face model directory") from error


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The shape of the model that transformers builds of a config. Raises DataError if it cannot."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn of missing kernels, which this pass does not need
    try:
        # A copy without the choices of a built model: of its attention, and of how it multiplies experts. Without those
        # keys, a new config has the contents of the one that its files have.
        config = type(config).from_dict({**config.to_dict(), "architectures": None, "dtype": None, "_name_or_path": ""})
        contents = config.to_json_string(use_diff=False)
        if contents not in _SHAPES:
            _SHAPES[contents] = _counted(config)
    # What modules raise for sizes that are missing or do not fit each other has no common class.
    except Exception as error:
        raise DataError(
            "the size of a model by its config.json",
            f"transformers cannot build this {config.model_type!r}: {type(error).__name__}: {error}",
            "correct config.json, or plan the memory by hand: this architecture is not supported",
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    return _SHAPES[contents]


def _counted(config: PretrainedConfig) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from trivium.models.weights.filling import built_empty
    from trivium.models.weights.lora import linear_layers

    family, text = FAMILIES.get(config.model_type), config.get_text_config()
    config.pad_token_id = text.pad_token_id = None  # models with one look for padding, which needs values
    kind = AutoModelForCausalLM if family is None else AutoModelForImageTextToText
    model = built_empty(partial(kind.from_config, config, dtype=torch.float32))
    base: Any = model.base_model
    decoder: Any = model.get_decoder() if family is None else base.get_submodule(family.decoder)
    blocks = _blocks(decoder)
    head = model.get_output_embeddings()
    experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts") or 1
    inputs: Any = model.get_input_embeddings().weight
    vocabulary, hidden = inputs.shape
    parts = [part for block in blocks for part in _parts(block, hidden, experts)]
    sums = {kind: sum(size for of, size in parts if of == kind) for kind in ("dense", "sparse", "routers")}
    cache = _kept(decoder, experts)
    experts = experts if sums["sparse"] else 1  # a config may name the experts of layers that this model does not have
    names = linear_layers(decoder, model)
    heads = _first(text, "num_attention_heads", "num_heads") or 1
    mlp = (_first(text, "moe_intermediate_size") if experts > 1 else 0) or _first(text, *_INNER) or 4 * hidden
    return ModelShape(
        kind=str(config.model_type).removesuffix("_text"),
        hidden=hidden,
        layers=len(blocks),
        heads=heads,
        kv_heads=(_first(text, "num_key_value_heads") or heads) if cache["keys"] else 0,
        head_dim=_head_dim(text) or hidden // heads,
        mlp=mlp,
        gated=_is_gated(blocks, hidden, mlp, experts),
        experts=experts,
        active_experts=(_first(text, "num_experts_per_tok") or 1) if experts > 1 else 1,
        shared=_shared(text, mlp) if experts > 1 else 0,
        vocabulary=vocabulary,
        tied=head is not None and head.weight is inputs,
        max_positions=_first(text, "max_position_embeddings"),
        parameters=_size(model),
        **sums,
        blocks=_size(blocks),
        adapted=tuple(_ends(block, names) for block in blocks),
        **cache,
        vision=None if family is None else _vision(config, base, family),
    )


def _blocks(decoder: PreTrainedModel) -> nn.ModuleList:
    """The layers of a decoder: the largest of its lists of modules."""
    from torch import nn

    return max((part for part in decoder.children() if isinstance(part, nn.ModuleList)), key=_size)


def _parts(block: nn.Module, hidden: int, experts: int) -> Iterator[tuple[str, int]]:
    """(what it belongs to, parameters) of each matrix of a block."""
    from torch import nn

    stacked = {id(p) for part in block.modules() if _is_list_of_experts(part, experts) for p in part.parameters()}
    for path, part in block.named_modules():
        routes = experts > 1 and not _ROUTERS.isdisjoint(path.split("."))
        for name, parameter in part.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            if len(shape) == 2 and "bias" in name and shape[0] == experts:
                yield "sparse", parameter.numel()
            elif len(shape) < 2 or "bias" in name or isinstance(part, nn.Conv1d) or min(shape) == 1:
                continue  # a norm, a convolution, or a gate of one number
            elif id(parameter) in stacked or _is_stacked(parameter, experts):
                yield "sparse", parameter.numel()
            else:
                yield "routers" if routes and shape == (experts, hidden) else "dense", parameter.numel()


def _is_list_of_experts(part: nn.Module, experts: int) -> bool:
    from torch import nn

    return experts > 1 and isinstance(part, nn.ModuleList) and len(part) == experts


def _is_stacked(parameter: torch.Tensor, experts: int) -> bool:
    """Whether a parameter holds the matrices of all experts."""
    return experts > 1 and parameter.ndim == 3 and parameter.shape[0] == experts


def _unchanged(hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return hidden


def _ends(block: nn.Module, names: list[str]) -> int:
    """The inputs and outputs of the matrices in the layers of a block with these names."""
    layers: list[Any] = [layer for name, layer in block.named_modules() if name.rpartition(".")[2] in names]
    return sum(sum(layer.weight.shape) for layer in layers)


def _is_gated(blocks: nn.ModuleList, hidden: int, mlp: int, experts: int) -> bool:
    """Whether a feed-forward layer, or each expert, makes two vectors of its inner width from its input: in one matrix,
    or in a second one."""
    shapes = [tuple(parameter.shape) for parameter in blocks.parameters()]
    if any(len(shape) == 3 and shape[0] == experts > 1 for shape in shapes):
        return any(sorted(shape[1:]) == sorted((hidden, 2 * mlp)) for shape in shapes if len(shape) == 3)
    widths = [sorted(shape) for shape in shapes if len(shape) == 2]
    matrices = widths.count(sorted((hidden, mlp)))
    return sorted((hidden, 2 * mlp)) in widths or matrices >= 3 * len(blocks) * experts


def _head_dim(text: PretrainedConfig) -> int | None:
    """Width of a head's queries. With latent attention it is the sum of a part with positions and one without."""
    parts = [_first(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    return _first(text, "head_dim") if None in parts else sum(part or 0 for part in parts)


def _kept(decoder: nn.Module, experts: int) -> dict[str, int]:
    """What the layers of a decoder keep of a sequence, by the field of `ModelShape`."""
    import torch

    for part in decoder.modules():
        if any(_is_stacked(parameter, experts) for parameter in part.parameters(recurse=False)):
            part.forward = _unchanged  # experts need to know which of them have tokens
    with torch.device("meta"), torch.no_grad():
        output: Any = decoder(torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=True)
    caches = (output.get("past_key_values") or output["cache_params"]).layers
    keyed = [layer for layer in caches if getattr(layer, "keys", None) is not None]
    states = {name: [_numbers(getattr(layer, name, None)) for layer in caches] for name in _STATES}
    return {
        "keys": len(keyed),
        "kv_per_token": sum(layer.keys.numel() + layer.values.numel() for layer in keyed) // _TOKENS,
        **{field: sum(states[name]) for name, field in _STATES.items()},
    }


def _numbers(state: Any) -> int:
    """Numbers in a state: a tensor, or several in a list or dict."""
    tensors = state.values() if isinstance(state, dict) else state if isinstance(state, list) else [state]
    return sum(tensor.numel() for tensor in tensors if tensor is not None)


def _vision(config: PretrainedConfig, base: nn.Module, family: Family) -> VisionShape:
    from torch import nn

    tower = base.get_submodule(family.tower)
    blocks = max((part for part in tower.modules() if isinstance(part, nn.ModuleList)), key=_size)
    projector = sum(_size(base.get_submodule(name)) for name in family.projector)
    inside = sum(_size(base.get_submodule(name)) for name in family.projector if name.startswith(f"{family.tower}."))
    merged = _first(config.vision_config, "spatial_merge_size") or _first(config, "scale_factor") or 1
    norm = next(parameter for parameter in blocks[0].parameters() if parameter.ndim == 1)
    return VisionShape(
        hidden=norm.numel(),
        layers=len(blocks),
        block=_size(blocks[0]),
        outside=_size(tower) - inside - _size(blocks),
        projector=projector,
        patches_per_token=merged**2,
    )


def _shared(text: PretrainedConfig, mlp: int) -> int:
    """Inner width of all shared experts of a block, whose key depends on the family."""
    width = _first(text, "shared_expert_intermediate_size", "shared_intermediate_size")
    return width or (_first(text, "n_shared_experts") or 0) * mlp


def _size(part: nn.Module) -> int:
    """Parameters; one that occurs twice counts once."""
    return sum(parameter.numel() for parameter in part.parameters())


def _first(config: PretrainedConfig, *names: str) -> int | None:
    """The first of these entries of a config that is a number. Reading an attribute raises for one that varies by
    layer."""
    values = config.to_dict()
    numbers = (values.get(name, values.get(config.attribute_map.get(name, ""))) for name in names)
    return next((number for number in numbers if isinstance(number, int)), None)
