"""Router replay: the engine records the experts of each token, and training chooses the same experts (R3; Ma et al.
2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers").

Only the choice is replayed. The trainer's router computes the weights of the chosen experts, and learns through them.

Legend: T tokens, K experts of one token, E experts of a layer.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trivium.foundation.errors import ConfigError, DataError, TriviumError
from trivium.models.backbone.prefixes import Segment
from trivium.types import Experience, Request

ROUTER = "Router"
"""The suffix of the class names of routers in transformers."""


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a decoder, in the order of the layers."""

    layers: tuple[nn.Module, ...]
    """The layers with a router; `modules` are the routers."""
    modules: tuple[nn.Module, ...]
    chosen: int
    """K."""
    experts: int
    """E."""
    numbers: tuple[int, ...]
    """The indices of these layers among all layers of the decoder."""
    depth: int
    """The number of all layers of the decoder."""

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The type of recorded numbers: 0, or the number of an expert plus one."""
        return np.uint8 if self.experts <= 255 else np.uint16

    def replay(self) -> None:
        """Makes layers choose the experts of a pack with routing."""
        for number, (layer, router) in enumerate(zip(self.layers, self.modules, strict=True)):
            layer.forward = partial(_in_layer, layer.forward, number, self.experts)
            router.forward = partial(_route, router.forward)

    def packed(self, arrays: Sequence[npt.NDArray[Any] | None], segments: Sequence[Segment]) -> torch.Tensor | None:
        """(layers, K, T) int16 of the tokens of segments, from one (tokens, layers, K) array for each sequence; 0 if a
        sequence has no array. Returns None if no sequence has one. Raises DataError for arrays of another model."""
        shape = (len(self.layers), self.chosen)
        dense = [array is not None and array.shape[1] == self.depth > shape[0] for array in arrays]
        arrays = [
            a[:, list(self.numbers)] if has and a is not None else a for a, has in zip(arrays, dense, strict=True)
        ]
        if all(array is None for array in arrays):
            return None
        for array in arrays:
            highest = 0 if array is None else int(array.max(initial=0))
            if array is not None and (array.shape[1:] != shape or highest > self.experts):
                raise DataError(
                    "the experts that tokens were sampled with",
                    f"{array.shape[1:]} numbers for each token, up to {highest}; the model has {shape} (layers, "
                    f"experts for each token) of {self.experts} experts",
                    "train on rollouts of this model, or set train.router_replay to off",
                )
        parts: list[npt.NDArray[np.int16]] = []
        for segment in segments:
            array = arrays[segment.sequence]
            length = segment.stop - segment.first
            choices = np.zeros((length, *shape)) if array is None else array[segment.first : segment.stop]
            parts.append(choices.astype(np.int16))
        return torch.from_numpy(np.concatenate(parts)).permute(1, 2, 0).contiguous()


def routers_of(decoder: nn.Module) -> Routers:
    """The routers of a model. Raises ConfigError if it has none, or if they do not choose experts by one top-k."""
    by_layer: dict[nn.Module, nn.Module] = {}
    numbers: list[int] = []
    for name, module in decoder.named_modules():
        if type(module).__name__.endswith(ROUTER):
            parts = name.split(".")
            number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
            layer = decoder.get_submodule(".".join(parts[: number + 1]))
            if layer in by_layer or layer is module:
                raise _refusal(decoder, f"{type(module).__name__} is not the only router of one layer")
            by_layer[layer] = module
            numbers.append(int(parts[number]) if parts[number].isdecimal() else 0)
    if not by_layer:
        raise _refusal(decoder, "it has no experts, or routers that transformers does not expose")
    sizes = {kind: _tried(decoder, router) for kind, router in {type(r): r for r in by_layer.values()}.items()}
    if len(set(sizes.values())) > 1:
        raise _refusal(decoder, "its layers choose among different numbers of experts")
    chosen, experts = next(iter(sizes.values()))
    depth = int(cast(Any, decoder).config.get_text_config().num_hidden_layers)
    return Routers(tuple(by_layer), tuple(by_layer.values()), chosen, experts, tuple(numbers), depth)


def _refusal(decoder: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"the experts that {type(decoder).__name__} chooses for each token",
        reason,
        "set train.router_replay to off, or use a mixture of experts such as Qwen3-MoE, Mixtral or OLMoE",
    )


def _tried(decoder: nn.Module, router: nn.Module) -> tuple[int, int]:
    """(K, E) of a router. Tests on a copy with random weights that it can be told which experts to choose, and that it
    weighs them as its own choice."""
    trial: Any = copy.deepcopy(router).to_empty(device="cpu").float()  # the model's weights may not be loaded yet
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in trial.state_dict().values():
            tensor.normal_(generator=generator)
        states = torch.randn(5, trial.weight.shape[-1], generator=generator)

        def outputs(selection: Selection | None) -> tuple[torch.Tensor, ...]:
            with replaying(selection):
                return type(trial).forward(trial, states.clone())

        try:
            free = outputs(None)
            ids, experts = _choice(free), int(trial.weight.shape[0])
            # The router's own choice in another order: its outputs must follow the numbers, not their places.
            turned = (ids + 1).flip(1)
            replayed = outputs(Selection(turned, experts))
        except (TypeError, RuntimeError, ValueError, AttributeError, TriviumError) as error:
            raise _refusal(decoder, f"{type(router).__name__}: {error}") from error
        expected = [output.flip(1) if output.shape == ids.shape else output for output in free]
        if not all(torch.allclose(*pair) for pair in zip(replayed, expected, strict=True)):
            raise _refusal(decoder, f"{type(router).__name__} does not weigh experts by their numbers alone")
    return ids.shape[1], experts


def _choice(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output of a router with the numbers of experts, (T, K)."""
    numbers = [output for output in outputs if not output.is_floating_point()]
    if len(numbers) != 1 or numbers[0].dim() != 2:
        raise TriviumError("the numbers of experts", f"{len(numbers)} outputs of integers", "use another model")
    return numbers[0]


def check_routed(experiences: Sequence[Experience], on_all_ranks: Callable[[int], int]) -> None:
    """Raises DataError on every rank if one of them has a sampled sequence without routing."""
    sampled = [e for e in experiences if e.response_mask.any() and not e.expert]
    missing = sum("routing" not in e.extra for e in sampled)
    if on_all_ranks(missing):
        raise DataError(
            "the experts that tokens were sampled with (train.router_replay)",
            f"{missing} of {len(sampled)} sequences have none",
            "use an engine that records them (engine.kind torch or vllm), or set train.router_replay to off",
        )


# --------------------------------------------------------------------------- recorded


class Recorder:
    """Records what the routers choose in each pass of a model."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self._chosen: list[torch.Tensor] = []
        for router in routers.modules:
            router.register_forward_hook(self._keep)

    def take(self, rows: int, length: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """(rows, length, layers, K): the record of the last pass, in the form of `EXTRAS`."""
        chosen, self._chosen = self._chosen, []
        numbers = torch.stack(chosen, 1).add(1).to(torch.int16).cpu().numpy()
        return numbers.astype(self.routers.dtype).reshape(rows, length, *numbers.shape[1:])

    def _keep(self, router: nn.Module, inputs: object, outputs: Sequence[torch.Tensor]) -> None:
        self._chosen.append(_choice(outputs))


def routed(experts: npt.NDArray[Any] | None, request: Request, count: int) -> npt.NDArray[np.uint16]:
    """(tokens, layers, K): the routing of a prompt and a completion of `count` tokens in the form of `EXTRAS`, from the
    experts of all tokens that went through the model. Raises TriviumError if the engine returned none."""
    if experts is None:
        raise TriviumError(
            "the experts that a completion was sampled with",
            "the engine returned none",
            "set engine.options.enable_return_routed_experts to true, or train.router_replay to off",
        )
    numbers = np.zeros((len(request.prompt_tokens) + count, *experts.shape[1:]), np.uint16)
    records = experts[: len(numbers) - 1]  # the last token went through no layer
    numbers[: len(records)] = records.astype(np.uint16) + 1
    return numbers


# --------------------------------------------------------------------------- replayed


@dataclass(frozen=True, slots=True)
class Selection:
    """The experts of the tokens of one pass through one layer."""

    chosen: torch.Tensor
    """(T, K): the number of an expert plus one, or 0 to let the router choose."""
    experts: int
    """E."""


class _Now(threading.local):  # threads compute micro-batches of one model at the same time
    selection: Selection | None = None
    """The selection of the layer that this thread computes."""


_now = _Now()


def current_selection() -> Selection | None:
    """The selection for the router of the current layer; None lets the router choose."""
    return _now.selection


def _in_layer(forward: Callable[..., Any], number: int, experts: int, *args: Any, **kwargs: Any) -> Any:
    routing: torch.Tensor | None = getattr(kwargs.get("trivium_pack"), "routing", None)
    before = _now.selection
    _now.selection = None if routing is None else Selection(routing[number].T.long(), experts)
    try:
        return forward(*args, **kwargs)
    finally:
        _now.selection = before


def _route(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with replaying(_now.selection):
        return forward(*args, **kwargs)


@contextmanager
def replaying(selection: Selection | None) -> Generator[None]:
    """Inside the block, a router chooses this selection. Raises TriviumError if it did not choose by one top-k."""
    if selection is None:
        yield
        return
    with _Chosen(selection) as mode:
        yield
    if mode.times != 1:
        raise TriviumError(
            "experts chosen as they were recorded",
            f"the router took the top {selection.chosen.shape[1]} of {selection.experts} {mode.times} times",
            "set train.router_replay to off for this model",
        )


class _Chosen(TorchFunctionMode):
    """Inside the block, `topk` of the scores of E experts returns the recorded ones."""

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self._selection, self.times = selection, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        chosen, scores = self._selection.chosen, cast(torch.Tensor, args[0] if args else kwargs["input"])
        if scores.shape != (len(chosen), self._selection.experts) or result[1].shape != chosen.shape:
            return result
        self.times += 1
        ids = torch.where(chosen > 0, chosen - 1, result[1])
        return torch.return_types.topk((scores.gather(1, ids), ids))
