"""Frozen linear layers with weights in 8 or 4 bits, by bitsandbytes.

The forward and the backward pass dequantise a weight to the type of the inputs and release it after the product. Rows
of a weight are cut into blocks that share a scale: `int8` is 8-bit dynamic numbers in blocks of 256 (Dettmers et al.
2022), `nf4` is 4-bit NormalFloat in blocks of 64 (Dettmers et al. 2023). Quantisation depends on the weight alone, so a
model that is loaded again from the same files has the same bits.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from trivium.foundation.errors import MissingPackage, TriviumError
from trivium.models.vision.encoder import decoder_of
from trivium.models.weights.section import EXTRA, LIBRARY
from trivium.planning.model_shape import FEW_BITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantised weight that is never trained. Its state dict has an empty weight on torch's
    `meta` device; `dequantized` returns the values."""

    def __init__(self, layer: nn.Linear, kind: str, device: torch.device) -> None:
        """Quantises the weight (out, in) of a layer."""
        nn.Module.__init__(self)  # nn.Linear's own would allocate the weight in its full width
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        weight = layer.weight.detach().to(device)
        self.dtype = weight.dtype
        functional = _functional()
        if kind == "nf4":
            packed, state = functional.quantize_4bit(weight, blocksize=FEW_BITS[kind].block, quant_type=kind)
        else:
            packed, state = functional.quantize_blockwise(weight, blocksize=FEW_BITS[kind].block)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", state.absmax)
        self.register_buffer("code", state.code)
        self.register_parameter("bias", None)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().to(device), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight (out, in), dequantised."""
        return self.dequantized(self.dtype)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight (out, in) in this type."""
        functional = _functional()
        state = functional.QuantState(
            absmax=self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.code,
            blocksize=FEW_BITS[self.kind].block,
            quant_type=self.kind,
            dtype=dtype,
        )
        restore = functional.dequantize_4bit if self.kind == "nf4" else functional.dequantize_blockwise
        return restore(self.packed, state)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(input.device.type):  # autocast converts the inputs of torch's own functions only
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output = cast(torch.Tensor, _Product.apply(input, self))
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        del keep_vars
        shape = self.out_features, self.in_features
        destination[f"{prefix}weight"] = torch.empty(shape, dtype=self.dtype, device="meta")
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()


class _Product(torch.autograd.Function):
    """x (..., in) @ W.T. Only the layer is saved for the gradient of x, not the dequantised weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return linear(x, layer.dequantized(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0] @ ctx.layer.dequantized(grad_outputs[0].dtype), None


def quantize(module: PreTrainedModel, kind: str, device: torch.device) -> None:
    """Quantises the weights of a model's linear layers, except the output layer, on a device, and moves the rest there.
    The model may be on another device before: one layer at a time is moved in its full width.

    Raises MissingPackage without bitsandbytes, TriviumError for a model with layers of another kind.
    """
    decoder, output = decoder_of(module), module.get_output_embeddings()
    chosen = [name for name, layer in decoder.named_modules() if type(layer) is nn.Linear and layer is not output]
    stacked = any(parameter.ndim == 3 for parameter in decoder.parameters())
    if stacked or not chosen:
        raise TriviumError(
            f"{type(module).__name__} with train.frozen_dtype: {kind}",
            "its experts are stacked in one tensor" if stacked else "it has no layer of the kind torch.nn.Linear",
            "set train.frozen_dtype: bfloat16",
        )
    for name in chosen:
        decoder.set_submodule(name, QuantizedLinear(cast(nn.Linear, decoder.get_submodule(name)), kind, device))
    cast(nn.Module, module).to(device)


def original(owner: nn.Module) -> QuantizedLinear | None:
    """Returns the module, or the base layer of its adapter, if that is a quantised layer; else None."""
    layer = getattr(owner, "base_layer", owner)
    return layer if isinstance(layer, QuantizedLinear) else None


def _functional() -> Any:
    try:
        return importlib.import_module(f"{LIBRARY}.functional")
    except ImportError as error:
        raise MissingPackage(LIBRARY, EXTRA, "keep frozen weights in 8 or 4 bits") from error
