"""A backbone with a head: a policy (log-probability, entropy, ... of tokens), a critic (values) or a reward model
(scores).

Policy and critic compute token t from the hidden state of token t - 1; only `_before` makes that shift. A reward model
computes its score from the hidden state of token t itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack, cast

import torch
from torch import nn

from trivium.foundation.errors import TriviumError
from trivium.models.backbone.load import load_backbone, load_lm
from trivium.models.backbone.packed import Backbone, Pack, probe_pack
from trivium.models.backbone.rounding import explained_by_rounding
from trivium.models.backbone.routing import Routers, routers_of
from trivium.models.backbone.sequence_parallel import LocalStates, SequenceGroup
from trivium.models.cpu.fused import fuse, fuse_adapters
from trivium.models.cpu.linear import use_onednn
from trivium.models.heads.kept import KeptSets
from trivium.models.heads.log_prob_head import log_prob_and_entropy, mean_discriminant, sum_pi_squared, top_k_log_probs
from trivium.models.heads.value_head import ScaledLinear, folded_head, saved_head, value_head
from trivium.models.heads.vocabulary_part import OutputLayer
from trivium.models.vision.encoder import decoder_of
from trivium.models.weights.filling import fill
from trivium.models.weights.lora import base_state, inject
from trivium.models.weights.quantized import quantize
from trivium.models.weights.section import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXACT, _ROUNDED = 1e-3, 0.05
"""Tolerances between two implementations: in float32, absolute; with layers in bfloat16, which rounds each number by up
to 0.4 %, as a part of the largest number."""


def _before(batch: Pack, rows: torch.Tensor) -> torch.Tensor:
    """(N,): the tokens before the tokens `rows`, whose states predict them."""
    return batch.before[rows]


class ModelOptions(TypedDict, total=False):
    """The keyword arguments that all models of this module have."""

    dtype: Required[torch.dtype]
    device: Required[torch.device]
    autocast: bool
    sequence: SequenceGroup | None
    empty: bool
    weights: torch.dtype | None


class LanguageOptions(ModelOptions, total=False):
    """The keyword arguments of `LanguageModel`."""

    temperature: Required[float]
    quantized: str


class ValueOptions(ModelOptions, total=False):
    """The keyword arguments of `ValueModel`."""

    seed: Required[int]
    head: Mapping[str, torch.Tensor] | None


class NumberOptions(TypedDict, total=False):
    """The options of the numbers that `LanguageModel.forward` computes."""

    entropy_grad: bool
    """Whether the entropy has a gradient; by default not."""
    candidates: torch.Tensor | None
    """(N, K) further token ids for `log_prob`."""
    top_k: int
    """The number of tokens of `top`."""
    kept: KeptSets | None
    """The candidate set that the distribution of each token is restricted to."""


@dataclass(slots=True)
class _Loading:
    """The remaining steps for a model that was built without its weights."""

    directory: Path
    start_adapter: Callable[[torch.device], object] | None = None


class FilledModel(nn.Module):
    """A model that can be built empty, then sharded, filled and verified, in this order."""

    module: PreTrainedModel
    backbone: Backbone
    device: torch.device
    dtype: torch.dtype
    autocast: bool
    reads_before = True
    """Whether it computes the number of a token from the state before the token."""
    _loading: _Loading | None = None

    def fill(self, weights_on: torch.device | None = None) -> None:
        """Reads the weights of an empty model; of sharded ones, this rank's part. All ranks of the model call it
        together. Parameters are on `weights_on` (default: the model's device).

        Raises DataError if the files do not fit the model.
        """
        if self._loading is not None:
            fill(self.module, self._loading.directory, self.device, weights_on)
            if self._loading.start_adapter is not None:
                self._loading.start_adapter(weights_on or self.device)

    def verify(self) -> None:
        """Verifies a model that was built empty, once, as the constructor verifies other models. All ranks of the model
        call it together. It gathers layers, so it needs more memory than `fill`."""
        if self._loading is not None:
            self._loading, probe = None, probe_pack(self.module)
            with torch.no_grad():
                self(probe, probe.positions.nonzero().squeeze(1), "verify")

    def _choose_arithmetic(self, autocast: bool) -> None:
        """Replaces layers by faster ones. The choice does not depend on weights: ranks that share a model choose as a
        single process does."""
        decoder = decoder_of(self.module)
        if self.module.dtype == torch.float64:
            self.module.set_experts_implementation("eager")  # torch has no grouped product in float64
        if not autocast:
            use_onednn(decoder, self.device)
        fuse(decoder, self.device)

    @property
    def _tolerance(self) -> float:
        """The tolerance between two implementations of this model."""
        return _ROUNDED if self.autocast or self.module.dtype == torch.bfloat16 else _EXACT


class LanguageModel(FilledModel):
    """A causal language model, always in eval mode: log-probabilities without logits.

    Only `forward` computes with the weights: sharded parameters are whole only inside it.
    """

    routers: Routers | None = None
    """The routers that replay the experts of packs; None: no replay."""
    head_precision = "float32"
    """The precision of the products of its output layer (`trivium.models.precision`)."""

    def __init__(
        self,
        source: Path | PreTrainedModel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        temperature: float,
        autocast: bool = False,
        sequence: SequenceGroup | None = None,
        empty: bool = False,
        weights: torch.dtype | None = None,
        quantized: str = "",
    ) -> None:
        """`source` is a Hugging Face directory, or a model of this dtype on this device, whose attention is replaced in
        place. `sequence`: the ranks that share every pack; all open the model, and call it with the same arguments.
        `empty`: weights are read later, by `fill`. `weights`: the type of weights that are not trained; `quantized`:
        the format of those of linear layers instead (`models.weights.quantized`). Log-probabilities are computed in
        `dtype`.
        """
        super().__init__()
        if isinstance(source, nn.Module):
            self.module = source
        else:
            # The device may have room for the quantised model only.
            to = "cpu" if quantized else device
            self.module = load_lm(source, dtype=weights or dtype, device=to, attention=None, empty=empty)
        if quantized:
            quantize(self.module, quantized, device)
        if empty and not isinstance(source, nn.Module):
            self._loading = _Loading(Path(source))
        output = self.module.get_output_embeddings()
        if not isinstance(output, nn.Linear):
            raise _refusal(self.module, f"its output layer is {type(output).__name__}")
        self.device, self.dtype, self.vocabulary = device, dtype, output.out_features
        self.set_temperature(temperature)
        self._choose_arithmetic(autocast)
        self.backbone = Backbone(cast("PreTrainedModel", self.module.base_model), sequence)
        self.names = tensor_names(self.module)
        # Verified without autocast, whose rounding would need the wide tolerance and could hide a wrong layer.
        self.autocast = False
        if self._loading is None:
            self._verify(self._tolerance)
        self.autocast = autocast
        self.eval()

    def replay_routing(self) -> None:
        """Makes the routers choose the experts that packs record. Raises ConfigError for a model whose routers do not
        support it."""
        self.routers = routers_of(self.backbone.module)
        self.routers.replay()

    def set_temperature(self, temperature: float) -> None:
        """Sets the number that logits are divided by."""
        # The head multiplies states by the output layer alone, so the model's own factor is a part of the temperature.
        self.temperature = temperature / logit_scale(self.module)

    def adapt(self, section: LoraConfig, *, seed: int, adapter: Path | None = None) -> None:
        """Adds a LoRA adapter and freezes all other parameters; see `lora.attach`. `names` remain those of the model
        without the adapter."""
        start = inject(self.module, section, seed=seed, adapter=adapter)
        if not self.autocast:
            use_onednn(decoder_of(self.module), self.device)
        fuse_adapters(self.module, self.device)
        if self._loading is not None:
            self._loading.start_adapter = start
        else:
            start(self.device)

    def forward(
        self,
        batch: Pack,
        rows: torch.Tensor,
        what: str = "log_prob",
        **options: Unpack[NumberOptions],
    ) -> tuple[torch.Tensor, ...]:
        """Two numbers about each of the N tokens at `rows` of the pack, never the first of a sequence:

        `log_prob`: (log_prob, entropy), each (N,), with gradient. With `candidates`, (N, K) further token ids for each,
        `log_prob` is (N, 1 + K).
        `sum_pi_squared`: the sum over the vocabulary of p^2, twice, without gradient.
        `mean_discriminant`: the expectation of p (H + log p), twice, without gradient.
        `top`: (ids, log_prob), each (N, top_k), of the most probable tokens, without gradient.
        `kept` restricts the distribution of each token to its candidate set, except for `top`.
        """
        if what == "verify":  # here, because sharded parameters are whole only inside `forward`
            self._verify(self._tolerance)
            return ()
        return self._numbers(self._states(batch, rows), batch, rows, what, **options)

    def _numbers(
        self,
        states: LocalStates,
        batch: Pack,
        rows: torch.Tensor,
        what: str,
        *,
        entropy_grad: bool = False,
        candidates: torch.Tensor | None = None,
        top_k: int = 0,
        kept: KeptSets | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = cast(nn.Linear, self.module.get_output_embeddings())
        layer = OutputLayer.of(output, self.dtype, self.temperature, self.head_precision)
        kept = None if kept is None else kept.select(states.mine)
        match what:
            case "log_prob":
                targets = batch.tokens[rows]
                if candidates is not None:
                    targets = torch.cat([targets[:, None], candidates], 1)
                targets = targets[states.mine]
                first, second = log_prob_and_entropy(
                    states.values, layer, targets, entropy_grad=entropy_grad, kept=kept
                )
            case "top":
                first, second = top_k_log_probs(states.values, layer, top_k)
            case "sum_pi_squared" | "mean_discriminant":
                statistic = sum_pi_squared if what == "sum_pi_squared" else mean_discriminant
                first = second = statistic(states.values, layer, kept=kept)
            case _:
                raise TriviumError(f"{what!r} of a language model", "no such number", "see LanguageModel.forward")
        return states.gather(first), states.gather(second)

    def _states(self, batch: Pack, rows: torch.Tensor) -> LocalStates:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return self.backbone.states(batch, _before(batch, rows))

    @torch.no_grad()
    def _by_logits(self, batch: Pack, temperature: float) -> torch.Tensor:
        """(N,) log-probabilities of all but first tokens, by the model's own forward pass."""
        log_probs: list[torch.Tensor] = []
        # One after another: the model's own attention would mix the sequences of a pack.
        for tokens in batch.tokens.split(list(batch.lengths)):
            logits = self.module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            log_probs.append((logits / temperature).log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1))
        return torch.cat(log_probs)

    @torch.no_grad()
    def _verify(self, tolerance: float) -> None:
        """Enables packing if it gives the same states. Raises TriviumError if the logits are more than one linear layer
        of the hidden states."""
        batch = probe_pack(self.module)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            expected = self._by_logits(batch, self.temperature * logit_scale(self.module))
            self.backbone.settle(tolerance)
        rows = batch.positions.nonzero().squeeze(1)

        def chunked() -> torch.Tensor:
            return self._numbers(self._states(batch, rows), batch, rows, "log_prob")[0]

        log_prob = chunked()
        difference = float((log_prob - expected).abs().max())
        # In float32 the tolerance is absolute, otherwise a part of the largest number (`_EXACT`, `_ROUNDED`).
        largest = tolerance * max(1.0, float(expected.abs().max()) * (tolerance > _EXACT))
        if difference > largest and not explained_by_rounding(self.module, chunked, expected, log_prob):
            raise _refusal(self.module, f"its own log-probabilities differ by {difference:.3g} from the chunked head's")


def tensor_names(module: nn.Module) -> tuple[str, ...]:
    """The names of parameters and persistent buffers, in the module's order: tied ones once, an adapter's left out."""
    places: set[tuple[object, ...]] = set()
    names: list[str] = []
    for name, tensor in base_state(module).items():
        # An empty buffer has no memory, and a view of another one may begin where that one begins: neither is tied.
        place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
        if not tensor.numel() or place not in places:
            places.add(place)
            names.append(name)
    return tuple(names)


def logit_scale(module: PreTrainedModel) -> float:
    """The constant that Granite divides and Cohere multiplies its logits by; soft-capping is refused.

    The probe alone would not detect soft-capping of small logits.
    """
    config = module.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        raise _refusal(module, f"final_logit_softcapping is {config.final_logit_softcapping}")
    return float(getattr(config, "logit_scale", 1.0) or 1.0) / float(getattr(config, "logits_scaling", 1.0) or 1.0)


def _refusal(module: PreTrainedModel, reason: str) -> TriviumError:
    return TriviumError(
        f"log-probabilities of {type(module).__name__}",
        reason,
        "use a model whose logits are one linear layer of the last hidden state (no soft-capping)",
    )


class ActorCritic(LanguageModel):
    """A policy with a value head on its own hidden states: one forward pass gives log-probabilities and values.

    Its `names` are those of the policy. The head is saved separately.
    """

    def __init__(
        self,
        source: Path | PreTrainedModel,
        *,
        seed: int,
        head: Mapping[str, torch.Tensor] | None = None,
        **options: Unpack[LanguageOptions],
    ) -> None:
        """`head` is the state of its value head; without one, the head is drawn as in `ValueModel`. The others are the
        arguments of `LanguageModel`."""
        super().__init__(source, **options)
        width = cast(nn.Linear, self.module.get_output_embeddings()).in_features
        drawn = value_head(folded_head(head or {}), width, seed, self.dtype, biased=ValueModel.biased)
        self.value_head = drawn.to(self.device)

    def forward(
        self,
        batch: Pack,
        rows: torch.Tensor,
        what: str = "log_prob",
        **options: Unpack[NumberOptions],
    ) -> tuple[torch.Tensor, ...]:
        """As `LanguageModel.forward`. In addition, `log_prob_and_values` gives (log_prob, entropy, values), and
        `values` gives the values of the states before the tokens, twice."""
        if what not in ("values", "log_prob_and_values"):
            return super().forward(batch, rows, what, **options)
        states = self._states(batch, rows)
        # A copy, because FSDP registers hooks on outputs, which must not be views.
        values = states.gather(self.value_head(states.values.to(self.dtype)).squeeze(1).clone())
        if what == "values":
            return values, values
        return *self._numbers(states, batch, rows, "log_prob", **options), values


class ValueModel(FilledModel):
    """A backbone with one number for each token: the value of the state before it.

    A new head is drawn from N(0, (0.01 / sqrt(width))^2): the first values are near zero, and the backbone learns from
    the first step.
    """

    biased = True
    """Whether a new head has a bias. A saved head keeps its bias."""

    def __init__(
        self,
        source: Path | PreTrainedModel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        autocast: bool = False,
        sequence: SequenceGroup | None = None,
        head: Mapping[str, torch.Tensor] | None = None,
        empty: bool = False,
        weights: torch.dtype | None = None,
    ) -> None:
        """`source` is a Hugging Face directory, or a backbone of this dtype on this device, whose attention is replaced
        in place. `sequence`: the ranks that share every pack. `head`: the state of its head; if None, that of the
        directory, else a new one. `empty`: weights are read later, by `fill`. `weights`: the type of a frozen backbone.
        Values are computed in `dtype`. Raises TriviumError for a head with several outputs."""
        super().__init__()
        if isinstance(source, nn.Module):
            self.module = source
        else:
            self.module = load_backbone(source, dtype=weights or dtype, device=device, empty=empty)
        self.device, self.dtype, self.autocast = device, dtype, False
        self._choose_arithmetic(autocast)
        self.backbone = Backbone(self.module, sequence)
        width: int = self.module.config.get_text_config().hidden_size
        if empty and not isinstance(source, nn.Module):
            self._loading = _Loading(Path(source))
        else:
            self.backbone.settle(self._tolerance)
            with torch.no_grad():
                width = self.backbone(probe_pack(self.module)).shape[1]
        self.autocast = autocast
        saved = dict(head) if head else {} if isinstance(source, nn.Module) else saved_head(source)
        self.value_head = self._head(saved, width, seed).to(device)
        self.names = tensor_names(self)
        self.eval()

    def _head(self, saved: Mapping[str, torch.Tensor], width: int, seed: int) -> nn.Linear:
        """A head with this state; a new head if the state is empty."""
        return value_head(folded_head(saved), width, seed, self.dtype, biased=self.biased)

    def forward(self, batch: Pack, rows: torch.Tensor, what: str = "values") -> torch.Tensor:
        """(N,) values of the states before the tokens at `rows` of the pack."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            if what == "verify":
                self.backbone.settle(self._tolerance)
            states = self.backbone.states(batch, self._sources(batch, rows))
        values: torch.Tensor = self.value_head(states.values.to(self.dtype)).squeeze(1)
        return states.gather(values.clone())  # FSDP registers hooks on outputs, which must not be views

    def _sources(self, batch: Pack, rows: torch.Tensor) -> torch.Tensor:
        return _before(batch, rows)


class ScoreModel(ValueModel):
    """A reward model: a backbone with one number for each token, the score of the sequence up to and including it.

    It is saved like a value model, so that a critic can start from it. Its head has no bias: preferences determine
    scores up to a constant, so only rounding errors would train one.
    """

    biased = False
    reads_before = False

    def __init__(
        self, source: Path | PreTrainedModel, *, scale: float | None = None, **options: Unpack[ValueOptions]
    ) -> None:
        """`scale`: the initial value of a learned factor of all scores; None for no factor, or the fixed one of a saved
        head. The others are the arguments of `ValueModel`."""
        self._scale = scale
        super().__init__(source, **options)

    def _head(self, saved: Mapping[str, torch.Tensor], width: int, seed: int) -> nn.Linear:
        if self._scale is None:
            return super()._head(saved, width, seed)
        linear: Any = value_head(saved, width, seed, self.dtype, biased=False)
        log_scale = saved.get("log_scale", torch.tensor([math.log(self._scale)]))
        return ScaledLinear(linear.weight, log_scale.to(self.dtype))

    def _sources(self, batch: Pack, rows: torch.Tensor) -> torch.Tensor:
        return rows
