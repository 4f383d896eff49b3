"""Prefill and decode of a causal language model: `read` prompts, `step` many rows by one token. No scheduling, no
sampling.

Legend: B prompts, R rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trivium.engines.torch.attention import registered
from trivium.engines.torch.base_weights import BaseWeights
from trivium.engines.torch.image_prompts import PromptImages, SeenPrompts, look
from trivium.engines.torch.kv_cache import PromptCache, RowCache, StepRows, pages
from trivium.engines.torch.layers import Layers, changing_rotation, supports
from trivium.engines.torch.row_states import StatefulPromptCache, StatefulRowCache
from trivium.engines.torch.step_graphs import StepGraphs, graph_width
from trivium.foundation.errors import ConfigError, SyncError
from trivium.models.backbone.load import calls_attention, load_lm, max_positions
from trivium.models.backbone.recurrent import follow_sequences, unknown_layers
from trivium.models.backbone.routing import Recorder, routers_of
from trivium.models.cpu.invariance import InvariantFunctions, make_invariant
from trivium.models.cpu.worker_threads import WorkerThreads, size_of, with_threads
from trivium.models.heads.log_prob_head import log_prob_and_entropy
from trivium.models.heads.trained_models import logit_scale
from trivium.models.heads.vocabulary_part import OutputLayer
from trivium.models.placement import sent
from trivium.models.precision import use_in
from trivium.models.vision.encoder import pixel_reader, refuse_images, vision_of
from trivium.models.weights.lora import LowRank, check_base, is_adapter, merged, received_adapter
from trivium.models.weights.stream import described
from trivium.planning.choices import DECODE_ROWS, PROMPT_CHUNK, decoding_threads
from trivium.protocols import DescribedWeights, TensorSpec
from trivium.types import AnyArray, IntArray, Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The keys and values of a prompt: row `index` of a batch of equally padded prompts."""

    cache: PromptCache
    index: int
    logits: Tensor
    """[V], float32: the logits of the next token."""
    ahead: int = 0
    """Rotary position of the next token minus the number of prompt tokens (M-RoPE)."""
    routing: AnyArray | None = None
    """The experts of each token, if the decoder records them."""
    log_prob: AnyArray | None = None
    """The log-probability of each token, 0 for the first one; None if it was not asked for."""

    def alone(self) -> Prefix:
        """A copy without the rest of the batch, whose keys and values would stay in memory."""
        if self.cache.count == 1:
            return self
        return replace(self, cache=self.cache.row(self.index), index=0, logits=self.logits.clone())


def padded_length(length: int) -> int:
    """The padded length of a prompt: a function of its own length, coarse enough that prompts share batches."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // min(step, PROMPT_CHUNK)) * min(step, PROMPT_CHUNK)


def padded_count(prompts: int) -> int:
    """The padded number of prompts on a CPU, at most an eighth more than `prompts`. oneDNN caches compiled code for
    each number of tokens, so few distinct numbers keep its memory small."""
    step = 1 << max(0, prompts.bit_length() - 4)
    return -(-prompts // step) * step


class Decoder:
    """Holds the weights and the key-value rows. All calls come from one thread, inside inference mode."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: torch.dtype,
        device: str,
        exact: bool,
        head_precision: str = "float32",
        cuda_graphs: bool = False,
    ) -> None:
        model = load_lm(model_dir, dtype=dtype, device=device, attention=registered(exact=exact))
        self.recurrent = follow_sequences(model)
        """Whether layers have a recurrent state, which a step changes in place."""
        _refuse_unsupported(model, exact, self.recurrent)
        self.model, self.device, self.dtype, self.exact = model, torch.device(device), dtype, exact
        self.vision = vision_of(model)
        self.text = model if self.vision is None else self.vision.decoder
        """The part with our attention; a vision tower keeps its own attention and processes each image separately."""
        self._model_dir, self._pixels = model_dir, pixel_reader(model_dir)
        self.is_whole = True
        """Whether all weights are of one version. A partly failed load leaves weights of two versions."""
        self._is_base = True
        """Whether the weights without an adapter are those in `model_dir`."""
        self._base, self._adapted = BaseWeights(model_dir), set[str]()
        """The weights in `model_dir`, and the names of those that an adapter may have changed since."""
        self.rows = StatefulRowCache() if self.recurrent else RowCache()
        self._last: Tensor | None = None
        self._hidden: list[Tensor] | None = None
        """Collects the inputs of the output layer while prompts are read whose log-probabilities are asked for."""
        self.reads_whole = self.device.type == "cuda"
        """Whether prompts are computed in one chunk without a mask: GPU kernels have causal attention built in."""
        self._head = cast(nn.Linear, model.get_output_embeddings())
        self._head_precision = head_precision
        use_in(self._head, head_precision)
        self._embedding = cast(nn.Module, model.get_input_embeddings())
        if exact:
            make_invariant(self.text)
            make_invariant(self._head)
        self._head.register_forward_pre_hook(self._only_last)
        parameters = inspect.signature(self.text.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._arithmetic = InvariantFunctions if exact and self.recurrent else nullcontext
        """A context of the model's own forward pass."""
        self.layers = Layers(model, fast=not exact) if supports(model) else None
        """The optimized layers; None: the model's own forward pass."""
        threads = decoding_threads(size_of(model), torch.get_num_threads())
        side_by_side = self.layers is not None and not changing_rotation(model)
        self.workers = WorkerThreads(threads, threads) if side_by_side and threads > 1 else None
        """Threads that compute the rows of a step in parallel; None: every operation uses all threads."""
        self.few_rows_threads = threads
        """Threads in each operation of a step of too few rows for `workers`: all, or 1 if that changes bits
        (`check_decoder`). On two idle cores a step of 2, 8 and 24 rows takes 0.90, 0.86 and 0.72 of the time with both,
        since each core reads a part of the weights. Beside other work on the cores it takes up to twice as long: then
        `cluster.threads` is too high (docs/performance.md)."""
        graphs = cuda_graphs and not self.recurrent  # a capture computes the step twice
        self.graphs = StepGraphs(self._step, self.rows, self.vocab_size) if graphs else None
        """Runs decode steps as CUDA graphs; None: without."""
        self.recorder: Recorder | None = None
        """Records the experts of each token; None: not recorded."""

    @property
    def vocab_size(self) -> int:
        return len(self._head.weight)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model supports."""
        return max_positions(self.model)

    def record_routing(self) -> None:
        """Records experts of tokens from now on. Raises ConfigError for a model whose routers cannot be read."""
        if self.recorder is None:
            self.recorder = Recorder(routers_of(self.text))
            # The recorder's hooks run when modules of the model are called, and need one thread: optimized layers and
            # replayed graphs call none, and workers call them at the same time.
            self.layers = self.workers = self.graphs = None

    def read(
        self, prompts: Sequence[IntArray], images: Sequence[PromptImages | None] = (), *, scored: bool = False
    ) -> list[Prefix]:
        """Computes the keys and values of prompts and the logits after each; all have the same `padded_length`.
        `images` holds those of each prompt; empty if no prompt has any. With `scored`, also computes the
        log-probabilities of their tokens."""
        length = padded_length(max(map(len, prompts)))
        number = padded_count(len(prompts)) if self.device.type == "cpu" else len(prompts)
        ids = np.zeros((number, length), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        tokens = sent(ids, self.device)
        last = [len(prompt) - 1 for prompt in prompts] + [0] * (number - len(prompts))
        ends = sent(np.array(last), self.device)
        embedded = self._seen(tokens, images)
        cache = StatefulPromptCache(length, ends) if self.recurrent else PromptCache(length)
        logits, routing = None, list[AnyArray]()
        self._hidden = [] if scored else None
        if self.layers is not None:
            self.layers.prepare(length)
        chunk = length if self.reads_whole else PROMPT_CHUNK
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            cache.begin(start, end)
            positions = torch.arange(start, end, device=self.device)
            # Padding comes after the prompt, so the causal mask hides it.
            mask = None if self.reads_whole else self._mask(positions[:, None], pages(end))[None, None]
            # All prompts of one padded length end in the last chunk. The logits of earlier ones are not used.
            self._last = (ends - start).clamp_(0, end - start - 1)
            inputs = {"input_ids": tokens[:, start:end], "position_ids": positions[None]}
            logits = self._forward(inputs if embedded is None else embedded.chunk(start, end), mask, cache)
            if self.recorder is not None:
                routing.append(self.recorder.take(number, end - start))
        self._last = None
        assert logits is not None
        ahead = [0] * len(prompts) if embedded is None else embedded.ahead
        chosen = np.concatenate(routing, 1) if routing else None
        scores: Sequence[AnyArray | None] = [None] * len(prompts)
        if self._hidden is not None:
            scores, self._hidden = self._scores(torch.cat(self._hidden, 1), tokens, [*map(len, prompts)]), None
        return [
            Prefix(cache, row, logits[row], ahead[row], None if chosen is None else chosen[row, : len(prompt)], score)
            for row, (prompt, score) in enumerate(zip(prompts, scores, strict=True))
        ]

    def _scores(self, states: Tensor, tokens: Tensor, lengths: Sequence[int]) -> list[AnyArray]:
        """The log-probabilities of the tokens of prompts, from the inputs of the output layer."""
        wide = torch.promote_types(self.dtype, torch.float32)
        layer = OutputLayer.of(self._head, wide, 1 / logit_scale(self.model), self._head_precision)
        log_prob, _ = log_prob_and_entropy(
            torch.cat([states[row, : length - 1] for row, length in enumerate(lengths)]),
            layer,
            torch.cat([tokens[row, 1:length] for row, length in enumerate(lengths)]),
        )
        parts = log_prob.float().cpu().split([length - 1 for length in lengths])
        return [np.concatenate([np.zeros(1, np.float32), part.numpy()]) for part in parts]

    def look(self, prompt: IntArray, media: Sequence[Media]) -> PromptImages | None:
        """The images of a prompt; None if it has none. Thread-safe.

        Raises DataError for media that the model cannot read, or that are not whole in the prompt.
        """
        if not media:
            return None
        if self.vision is None:
            raise refuse_images(self.model)
        return look(self.vision, prompt, media, self._pixels)

    def _seen(self, tokens: Tensor, images: Sequence[PromptImages | None]) -> SeenPrompts | None:
        if self.vision is None or not any(images):
            return None
        return SeenPrompts.of(self.vision, tokens, images)

    def place(self, prefixes: Sequence[Prefix], rows: Sequence[int], longest: int = 0) -> None:
        """Copies the keys and values of the prompts into the rows. `longest`: the most positions that any row may
        reach; 0 if unknown."""
        self.rows.longest = longest if self.graphs is None else graph_width(longest)
        batches: dict[int, list[int]] = {}
        for i, prefix in enumerate(prefixes):
            batches.setdefault(id(prefix.cache), []).append(i)
        for members in batches.values():
            cache = prefixes[members[0]].cache
            self.rows.place(cache, [prefixes[i].index for i in members], [rows[i] for i in members])

    def step(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        ahead: npt.NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Logits [R, V] in float32 after each row's token, which is written at the row's position. `ahead` is added to
        the rotary position (`Prefix.ahead`); None adds nothing."""
        return torch.cat(self.step_parts(tokens, positions, ahead, lambda logits, _: logits))

    def step_parts(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        ahead: npt.NDArray[np.int64] | None,
        use: Callable[[Tensor, slice], Result],
    ) -> list[Result]:
        """As `step`, in parts: the results of `use(logits, rows)` for consecutive slices of the rows. `use` may be
        called from several threads at once."""
        width = pages(int(positions.max()) + 1)
        where = sent(positions, self.device)
        embedded = where if ahead is None else where + sent(ahead, self.device)
        ids = sent(tokens, self.device)
        if self.graphs is not None:
            return [use(self.graphs(ids, where, embedded, graph_width(width)), slice(0, len(ids)))]
        rows = self.rows.begin(where, width)
        if self.layers is not None:
            self.layers.prepare(width)
        if self.workers is None or self.layers is None:
            return [use(self._step(ids, embedded, rows, width), slice(0, len(ids)))]
        workers = max(1, min(self.workers.number, len(ids) // DECODE_ROWS))
        size = -(-len(ids) // workers)
        cuts = range(size, len(ids), size)
        parts = [slice(first, end) for first, end in pairwise([0, *cuts, len(ids)])]

        @torch.inference_mode()  # a setting of the thread, which workers do not inherit
        def step(part: slice) -> Result:
            return use(self._step(ids[part], embedded[part], rows.part(part), width), part)

        if len(parts) == 1:
            with with_threads(self.few_rows_threads):
                return [step(parts[0])]
        return [*self.workers.map(step, parts)]

    def _step(self, ids: Tensor, positions: Tensor, rows: StepRows, width: int) -> Tensor:
        if self.layers is not None and self.layers.supports_step and len(ids) > 1:
            return self.layers.step(self._embedding(ids), positions, rows)
        mask = self._mask(rows.positions[:, None], width)[:, None, None]
        return self._forward({"input_ids": ids[:, None], "position_ids": positions[:, None]}, mask, rows)

    def rest(self) -> None:
        """Frees the keys and values of the rows, none of which is in use, on a CPU: what computes meanwhile, such as an
        update in the same process, uses this memory."""
        if self.device.type == "cpu":
            self.rows = type(self.rows)()

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copies new weights over the old ones, by Hugging Face name; nothing is copied unless everything fits.

        `DescribedWeights` are read one tensor at a time and not kept. One name is enough for tied tensors. Every tensor
        is compared with the given one after the copy. A LoRA adapter (`trivium.models.weights.lora.pushed_adapter`) is
        added to the weights that the model was loaded with; tied layers need the same adapter.

        Raises SyncError for weights that do not fit, Unread if reading them fails (`is_whole` is false if some were
        loaded by then), RuntimeError if the model's weights differ from the given ones after the copy.
        """
        if not isinstance(weights, DescribedWeights):
            weights = described([(name, torch.as_tensor(value)) for name, value in _read(weights)])
        new_head = True
        if is_adapter((spec.name, spec) for spec in weights.tensors):
            new_head = self._add(received_adapter(dict(_read(weights)), self.model))
        else:
            self._replace(weights.tensors, _read(weights))
        if self.layers is not None:
            self.layers.refresh(head=new_head)
        self.is_whole = True

    def _add(self, adapter: Mapping[str, LowRank]) -> bool:
        """Sets the weights to the base model plus this adapter, independent of earlier loads. Returns whether the
        output layer may have changed."""
        new_head, written = not self._is_base, dict[int, list[_Region]]()
        state = self.model.state_dict(keep_vars=True)
        # In the engine's type: `auto` is that of config.json, and rounds files that are more precise.
        base = state if self._is_base else self._base.load(self.dtype)
        self._base.add({name: base[name].detach() for name in adapter.keys() - self._adapted})
        check_base(adapter, self._base.fingerprint)
        if not self._is_base:
            self._replace(described(base.items()).tensors, base.items())
            self._is_base, self._adapted = True, set()
        self.is_whole = False
        for name in sorted(self._adapted | adapter.keys()):
            added = adapter.get(name)
            if name not in self._adapted and added is not None and not added.up.any():
                continue  # a new adapter changes nothing yet
            weight = self._base.read(name)  # one at a time, so that only one merged layer is in memory
            value = weight if added is None else merged(weight.to(self.device), added)
            self._adapted.add(name)  # before the copy: a load that fails here leaves it to the next one
            target = state[name].data
            if earlier := _overwritten(name, target, written):
                _compare(name, value, target, earlier)
            target.copy_(value)
            new_head |= target.data_ptr() == self._head.weight.data_ptr()
        return new_head

    def _replace(self, specs: Sequence[TensorSpec], weights: Iterable[tuple[str, Tensor]]) -> None:
        state = self.model.state_dict(keep_vars=True)
        _check_fit(specs, state, type(self.model).__name__)
        missing, written = {spec.name for spec in specs}, dict[int, list[_Region]]()
        for name, value in weights:
            if name not in missing or value.shape != state[name].shape:
                raise Unread(f"{name} {tuple(value.shape)}, which the description of the version does not list")
            missing.remove(name)
            self.is_whole = self._is_base = False
            target = state[name].data
            value = value.to(target.device, target.dtype)
            if earlier := _overwritten(name, target, written):
                _compare(name, value, target, earlier)
            target.copy_(value)  # in place: optimized layers, graphs and tied parameters share this memory
            _compare(name, value, target, name)
            del value  # free it before the next one is read
        if missing:
            raise Unread(f"{len(missing)} tensors are missing, first {min(missing)}")

    def weights(self) -> list[tuple[str, Tensor]]:
        """Copies of every parameter and persistent buffer, as the model holds them, by Hugging Face name."""
        with torch.inference_mode(False):  # the caller may change the copies, which torch refuses for inference tensors
            held = self.model.state_dict().items()
            ordered = torch.contiguous_format  # `layers` store weights in another order
            return [(name, tensor.detach().to("cpu", copy=True, memory_format=ordered)) for name, tensor in held]

    def _forward(self, inputs: Mapping[str, Any], mask: Tensor | None, cache: PromptCache | StepRows) -> Tensor:
        if self.layers is not None:
            embedded = self._embedding(inputs["input_ids"])
            return self.layers(embedded, inputs["position_ids"], mask, cache, self._last, self._hidden)
        model = self.model if self.vision is None else self.text
        with self._arithmetic():
            output = model(**inputs, attention_mask=mask, use_cache=True, **{self._cache_name: cache})
        logits = output.logits if self.vision is None else self._head(output.last_hidden_state)
        return logits[:, -1].to(torch.promote_types(self.dtype, torch.float32))

    def _mask(self, last_seen: Tensor, width: int) -> Tensor:
        """0 for keys up to `last_seen`, -inf beyond; [..., width]."""
        hidden = torch.arange(width, device=self.device) > last_seen
        return torch.where(hidden, -torch.inf, 0.0).to(self.dtype)

    def _only_last(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Selects one position per prompt before the output layer: [B, L, hidden] to [B, 1, hidden]."""
        if self._last is None:
            return None
        hidden = inputs[0]
        if self._hidden is not None:
            self._hidden.append(hidden)
        return (hidden[torch.arange(len(hidden), device=hidden.device), self._last][:, None].contiguous(),)


class Unread(Exception):
    """The weights could not be read; `__cause__` is the error of their source, if it raised one."""


def _read(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Iterates over the weights; errors of their source are raised as Unread."""
    try:
        yield from weights
    except Exception as error:
        raise Unread(f"{type(error).__name__}: {error}") from error


def _check_fit(specs: Sequence[TensorSpec], state: Mapping[str, Tensor], model: str) -> None:
    """Raises SyncError unless the names and shapes are exactly those of the model."""
    names = {spec.name for spec in specs}
    covered = {_place(state[name]) for name in names if name in state}
    problems = {
        "missing": [name for name in state if name not in names and _place(state[name]) not in covered],
        "unexpected": [spec.name for spec in specs if spec.name not in state],
        "of another shape": [
            f"{spec.name} {spec.shape} instead of {tuple(state[spec.name].shape)}"
            for spec in specs
            if spec.name in state and spec.shape != tuple(state[spec.name].shape)
        ],
    }
    mismatches = [f"{what}: {', '.join(names[:8])} ({len(names)})" for what, names in problems.items() if names]
    if mismatches:
        raise SyncError(
            f"weights for a {model}",
            "; ".join(mismatches),
            "publish every parameter and buffer under its Hugging Face name, from the same model",
        )


class _Region(NamedTuple):
    """The bytes of a tensor in its storage: `width` from `first` on, once in each `pitch` up to `end`."""

    first: int
    end: int
    pitch: int
    width: int
    name: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Region:
        dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
        spans = [(n - 1) * step * tensor.itemsize for step, n in dims]
        first, pitch = tensor.data_ptr(), dims[0][0] * tensor.itemsize if dims else tensor.itemsize
        return cls(first, first + sum(spans) + tensor.itemsize, pitch, sum(spans[1:]) + tensor.itemsize, name)

    def overlaps(self, other: _Region) -> bool:
        if self.end <= other.first or other.end <= self.first:
            return False
        # The weights of a stack lie side by side in each row of memory (`layers._Linear.stacked`).
        distance = (other.first - self.first) % max(1, self.pitch)
        apart = self.width <= distance <= self.pitch - other.width
        return not (self.pitch == other.pitch and apart)


def _overwritten(name: str, tensor: Tensor, written: dict[int, list[_Region]]) -> str:
    """The name of an earlier tensor that shares memory with this one; empty if there is none. `written`: the regions of
    earlier ones, by storage."""
    if not tensor.numel():
        return ""
    storage, region = written.setdefault(tensor.untyped_storage().data_ptr(), []), _Region.of(name, tensor)
    earlier = next((other.name for other in storage if other.overlaps(region)), "")
    storage.append(region)
    return earlier


def _place(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for tied tensors: the same memory with the same layout. Empty tensors have no memory."""
    return tensor.data_ptr() if tensor.numel() else id(tensor), tensor.dtype, tensor.shape, tensor.stride()


def _compare(name: str, expected: Tensor, held: Tensor, loaded: str) -> None:
    """Raises RuntimeError unless the tensor equals the given one, converted to its dtype and device, bit for bit."""
    pair = [tensor.contiguous().reshape(-1) for tensor in (held, expected.to(held.device, held.dtype))]
    if held.numel() and not torch.equal(pair[0].view(torch.uint8), pair[1].view(torch.uint8)):
        raise RuntimeError(
            f"the model holds a {loaded} that differs from the loaded one (is {name} tied to a different tensor?)"
        )


def _refuse_unsupported(model: PreTrainedModel, exact: bool, recurrent: bool) -> None:
    name = type(model).__name__
    if not (recurrent or calls_attention(model)) or model.get_output_embeddings() is None:
        raise ConfigError(
            f"generate with {name}",
            "its attention cannot be replaced (no attention interface), or it has no output layer",
            "use another model, or another engine",
        )
    if odd := unknown_layers(model, recurrent):
        raise ConfigError(
            f"generate with {name}",
            f"it has layers of type {', '.join(sorted(odd))}",
            "use a model of full or sliding attention, or another engine",
        )
    if exact and changing_rotation(model):
        raise ConfigError(
            f"batch-invariant generation with {name}",
            "its rotary embedding depends on the longest sequence in the batch (rope_type dynamic or longrope)",
            "set engine.batch_invariant to false",
        )
