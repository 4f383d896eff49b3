"""The requests of the Tinker SDK: JSON bodies as values, and the protobuf message of `forward_backward`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trivium.protocols import StepSettings
from trivium.serving.bodies import RequestError, bad_request
from trivium.serving.tinker.losses import FORMULAS
from trivium.serving.tinker.wire import FORWARD_BACKWARD, read_array, read_message, read_tensor
from trivium.types import MIN_TEMPERATURE, AnyArray, IntArray, Sampling

_MAX_TARGETS = 128
Name = Annotated[str, Field(min_length=1, max_length=400)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Top = Annotated[int, Field(ge=0, le=256)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Metadata = dict[str, Any] | None


class Body(BaseModel):
    """A JSON body. What it does not name has no effect on results; other values than these are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


BodyT = TypeVar("BodyT", bound=Body)


def read_form(form: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    """The values of a body. Raises RequestError."""
    try:
        return form.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise bad_request(
            where, where or "the body", f"{first['input']!r:.60}: {first['msg'][:200]}", "fix it"
        ) from None


class Empty(Body):
    """A body without a value that matters here."""


class SessionOf(Body):
    session_id: Name


class ModelOf(Body):
    model_id: Name


class Lora(Body):
    rank: int = Field(ge=1, le=512)
    seed: int | None = Field(None, ge=0, lt=2**64)
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(Body):
    type: Literal["adamw"] = "adamw"


class ModelForm(SessionOf):
    """`create_model`. The service trains adapters with AdamW."""

    model_seq_id: Number
    base_model: Name
    lora_config: Lora
    optimizer_config: OptimizerKind = OptimizerKind()
    user_metadata: Metadata = None

    @property
    def info(self) -> dict[str, Any]:
        """What the SDK shows of the model."""
        lora = {"train_mlp": self.lora_config.train_mlp, "train_attn": self.lora_config.train_attn}
        shown = {"base_model": self.base_model, "is_lora": True, "lora_rank": self.lora_config.rank}
        return {**shown, **lora, "train_unembed": False, "user_metadata": self.user_metadata}


class Numbered(ModelOf):
    """A request of a model, which works on them in the order of their numbers."""

    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Adam(Body):
    learning_rate: float = Field(1e-4, ge=0)
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = 0.0

    @property
    def settings(self) -> StepSettings:
        bound = self.grad_clip_norm if self.grad_clip_norm > 0 else math.inf
        return StepSettings(self.learning_rate, (self.beta1, self.beta2), self.eps, self.weight_decay, bound)


class StepForm(Numbered):
    adam_params: Adam


class SaveForm(Numbered):
    path: Name | None = None
    overwrite: bool = False
    ttl_seconds: int | None = Field(None, ge=1, le=400_000_000)
    user_metadata: Metadata = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    age_encryption_recipients: None = None


class LoadForm(Body):
    path: Name
    optimizer: bool = False
    model_id: Name | None = None
    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: Name | None = None
    user_metadata: Metadata = None
    optimizer_config: OptimizerKind | None = None


class PageOf(Body):
    """A part of a list, by the query of its URL."""

    limit: Annotated[int, Field(ge=0, strict=False)] = 100
    offset: Annotated[int, Field(ge=0, strict=False)] = 0


class PathOf(Body):
    tinker_path: Name


class SamplerForm(SessionOf):
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Name | None = None


class SamplerOf(Body):
    sampling_session_id: Name


class ResultOf(Body):
    request_id: Name


class Clone(SamplerOf):
    cloned_sampler_id: Number = 0


class ResultsForm(Body):
    target: Clone
    prev_cursor: Number = 0
    timeout: float | None = None


class Chunk(Body):
    type: Literal["encoded_text"]
    tokens: list[Token]


class Prompt(Body):
    chunks: list[Chunk]


class Params(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | list[Token] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleForm(SamplerOf):
    """`asample`."""

    seq_id: Number | None = None
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: Params
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0

    @property
    def tokens(self) -> IntArray:
        """The prompt. Raises RequestError for an empty one."""
        tokens = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        if not tokens or (self.prompt_logprobs_last_n or 0) >= max(2, len(tokens)):
            asked = "a prompt of at least one token, longer than prompt_logprobs_last_n"
            raise bad_request("prompt", asked, f"{len(tokens)} tokens", "send a longer one")
        return np.array(tokens, np.int32)

    def within(self, vocabulary: int) -> SampleForm:
        """The request without more most probable tokens than there are."""
        names = ("topk_prompt_logprobs", "topk_sample_logprobs")
        return self.model_copy(update={name: min(getattr(self, name), vocabulary) for name in names})

    def sampling(self, remaining: int) -> Sampling:
        """Stop strings end a turn beside the model's ends of turn, stop tokens and an empty list in place of them."""
        params, stop = self.sampling_params, self.sampling_params.stop
        texts = (stop,) if isinstance(stop, str) else tuple(each for each in stop or () if isinstance(each, str))
        tokens = tuple(each for each in stop or () if isinstance(each, int))
        return Sampling(
            max_new_tokens=params.max_tokens or max(1, remaining),
            temperature=max(params.temperature, MIN_TEMPERATURE) if params.temperature else 0.0,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            stop=texts,
            extra=("prompt_log_prob",) if self.prompt_logprobs else (),
            stop_tokens=None if stop is None or texts else tokens,
        )


# --------------------------------------------------------------------------- forward_backward


@dataclass(frozen=True)
class LossRequest:
    """`forward_backward`."""

    loss_fn: str
    options: Mapping[str, float]
    data: list[tuple[IntArray, Mapping[str, AnyArray]]]
    """The input tokens (N,) and the inputs of the loss of each datum."""
    forward_only: bool

    @property
    def size(self) -> int:
        """Bytes of the arrays, which may be many more than those of sparse tensors."""
        return sum(array.nbytes for tokens, inputs in self.data for array in (tokens, *inputs.values()))


def number_in(raw: bytes) -> Numbered | None:
    """The model and number of a JSON body, of which other values may be wrong."""
    try:
        body = json.loads(raw)
        return Numbered(model_id=body["model_id"], seq_id=body["seq_id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def read_loss_head(raw: bytes | bytearray) -> tuple[Numbered, dict[str, Any]]:
    """(model and number, message) of `forward_backward`."""
    message = read_message(memoryview(raw), FORWARD_BACKWARD)
    return read_form(Numbered, {**message, "seq_id": message.get("seq_id") or None}), message


def loss_number(raw: bytes) -> Numbered | None:
    """The model and number of `forward_backward` whose bytes are cut or damaged: the SDK sends them first."""
    for end in range(4, min(len(raw), 500) + 1):  # a field that is cut is an error
        with suppress(RequestError, LookupError, ValidationError):
            head = read_message(memoryview(raw)[:end], FORWARD_BACKWARD)
            return Numbered(model_id=head["model_id"], seq_id=head["seq_id"])
    return None


def read_loss(message: Mapping[str, Any], vocabulary: int) -> LossRequest:
    """The request in the message of `forward_backward`. Raises RequestError."""
    name = message.get("loss_fn", "")
    formula = FORMULAS.get(name)
    if formula is None:
        do = f"use one of {', '.join(FORMULAS)}; forward_backward_custom runs your function in your process"
        raise bad_request("loss_fn", f"the loss {name[:40]!r}", "no such loss", do)
    given = {entry.get("key", ""): entry.get("value", {}).get("number") for entry in message.get("options", ())}
    options = {key: number for key, number in given.items() if number is not None and math.isfinite(number)}
    if options.keys() != given.keys() or not given.keys() <= formula.options.keys():
        found = f"{name} has {', '.join(formula.options) or 'none'}, and they are finite numbers"
        raise bad_request("loss_fn_config", f"the options {given!r:.80}", found, "leave others out")
    data = [_datum(datum, name, vocabulary) for datum in message.get("data", ())]
    if not data:
        raise bad_request("data", "at least one datum", "none", "send some")
    return LossRequest(name, options, data, bool(message.get("forward_only", 0)))


def _datum(message: Mapping[str, Any], name: str, vocabulary: int) -> tuple[IntArray, Mapping[str, AnyArray]]:
    chunks, formula = message.get("chunks", ()), FORMULAS[name]
    if not chunks or any("text" not in chunk for chunk in chunks):
        raise bad_request("model_input", "chunks of tokens", "none, or an image or sound", "send text as tokens")
    parts = [read_array("model_input", chunk["text"].get("tokens", b""), "<i4") for chunk in chunks]
    tokens = np.concatenate(parts)
    sent = {entry.get("key", ""): entry.get("value", {}) for entry in message.get("inputs", ())}
    wanted = {"target_tokens", *formula.needs}
    if wanted - sent.keys() or sent.keys() - wanted - {*formula.optional}:
        asked = f"{', '.join(sorted(wanted))}, and at most {', '.join(formula.optional) or 'these'}, for {name}"
        raise bad_request("loss_fn_inputs", asked, f"{', '.join(sorted(sent))[:120] or 'none'}", "send these")
    inputs = {key: read_tensor(key, tensor, len(tokens), _MAX_TARGETS) for key, tensor in sent.items()}
    targets = inputs["target_tokens"]
    for key, ids in (("model_input", tokens), ("target_tokens", targets)):
        if not ids.size or ids.dtype.kind != "i" or not 0 <= ids.min() <= ids.max() < vocabulary:
            found = f"ids from {ids.min()} to {ids.max()}" if ids.size else "none"
            raise bad_request(key, f"token ids below {vocabulary}", found, "use the tokenizer of the base model")
    odd = [key for key, each in inputs.items() if each.shape != targets.shape or not np.isfinite(each).all()]
    if odd or (targets.ndim > 1 and formula.function is not None):
        asked = f"finite numbers in {', '.join(odd or ['target_tokens'])}, one for each target"
        found = f"NaN, infinity or another shape than target_tokens, {list(targets.shape)}"
        raise bad_request("loss_fn_inputs", asked, found, "fix the inputs")
    return tokens, inputs
