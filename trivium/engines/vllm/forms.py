"""Requests to vLLM, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivium.foundation.errors import DataError, RolloutError
from trivium.models.backbone.load import load_lm
from trivium.models.vision.encoder import Pixels, Vision, pixel_reader, vision_of
from trivium.models.vision.families import family_in
from trivium.policy import EngineFailure
from trivium.types import AnyArray, Completion, FloatArray, IntArray, Media, Request, Sampling, StopReason

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]

PromptOf = Callable[[Request, int], Any]

_TIES = 16
"""Maximum number of additional tokens that are as likely as the `top_k`-th."""


def listed_tokens(sampling: Sampling, vocab_size: int) -> int:
    """The number of most probable tokens that vLLM must list at each position. To record `kept`, this is more than
    `top_k`: a listed token with probability 0 shows that the list is complete.

    Raises RolloutError for truncated sampling without `top_k`, since vLLM lists a fixed number of tokens.
    """
    if "kept" not in sampling.extra or sampling.temperature == 0:
        return 0
    if sampling.top_k:
        return min(sampling.top_k + _TIES, vocab_size)
    if sampling.top_p < 1 or sampling.min_p or sampling.min_new_tokens:
        raise RolloutError("the tokens that sampling keeps", f"{sampling}, of which vLLM lists top_k", "set top_k, too")
    return 0


def sampling_params(
    request: Request, limit: int, eos: frozenset[int], *, seeded: bool, listed: int = 0, partial: bool = False
) -> SamplingParams:
    """Sets every parameter that affects the distribution or the end, so that no default of the model applies. `listed`
    is the result of `listed_tokens`. With `partial`, vLLM returns outputs while it samples."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = request.sampling
    return SamplingParams(
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=request.key.digest() >> 1 if seeded else None,
        stop=None,  # the engine scans the tokens, since vLLM would cut the text
        stop_token_ids=sorted(eos),
        ignore_eos=True,  # what the model's files call the end; `stop_token_ids` are the renderer's
        max_tokens=limit,
        min_tokens=min(sampling.min_new_tokens, limit),
        logprobs=listed,
        prompt_logprobs=0 if "prompt_log_prob" in sampling.extra else None,
        flat_logprobs=True,
        detokenize=False,
        logit_bias=None,
        allowed_token_ids=None,
        bad_words=None,
        output_kind=RequestOutputKind.CUMULATIVE if partial else RequestOutputKind.FINAL_ONLY,
    )


def read_output(
    output: Any, version: int, stopped_at: int | None, eos: frozenset[int], *, greedy: bool, listed: int = 0
) -> Completion:
    """Converts vLLM's output, up to the token that completed a stop string. Tokens without a version get `version`."""
    tokens, log_prob = read_tokens(output, version, 0, stopped_at, greedy=greedy, listed=listed)
    versions = np.full(len(tokens), version, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    ended = len(tokens) > 0 and int(tokens[-1]) in eos
    reason = StopReason.EOS if ended else StopReason.STOP if stopped_at is not None else StopReason.LENGTH
    if output.finish_reason not in ("stop", "length") and stopped_at is None:
        reason = StopReason.ABORT
    return Completion(tokens, log_prob, versions, reason)


def read_tokens(
    output: Any, version: int, start: int, stop: int | None, *, greedy: bool, listed: int
) -> tuple[IntArray, FloatArray]:
    """The tokens of vLLM's output from `start` to `stop`, and their log-probabilities."""
    tokens, width = np.array(output.token_ids[start:stop], np.int32), 1 + listed
    # At each position the sampled token comes first.
    log_prob = np.array(output.logprobs.logprobs[start * width :: width] if len(tokens) else [], np.float32)
    log_prob = log_prob if stop is None else log_prob[: stop - start]
    if len(log_prob) != len(tokens) or not np.isfinite(log_prob).all():
        raise EngineFailure(
            f"log-probabilities of policy version {version}",
            f"{len(log_prob)} for {len(tokens)} tokens, lowest {log_prob.min(initial=0.0)}",
            "look at the last update: a diverged loss, an overflow in bfloat16, or damaged weights",
        )
    return tokens, np.zeros_like(log_prob) if greedy else log_prob


def kept_tokens(output: Any, length: int, listed: int, sampling: Sampling, vocab_size: int) -> dict[str, AnyArray]:
    """The recorded `kept` (`EXTRAS`) of the first `length` tokens: the listed tokens with a positive probability.

    Raises RolloutError if the list may be incomplete.
    """
    id_type = np.uint16 if vocab_size <= 2**16 else np.int32
    if not listed or not length:
        return {"kept": np.empty(0, id_type), "kept_count": np.zeros(length, np.int32)}
    shape = (-1, 1 + listed)
    ids = np.array(output.logprobs.token_ids, np.int64).reshape(shape)[:length, 1:]
    is_candidate = np.array(output.logprobs.logprobs, np.float32).reshape(shape)[:length, 1:] > -np.inf
    if listed < vocab_size and is_candidate[:, -1].any():
        position = int(is_candidate[:, -1].argmax())
        raise RolloutError(
            f"at most {listed - 1} tokens that top_k = {sampling.top_k} keeps",
            f"more than {listed - 1} at position {position}: many are as likely as the last of them",
            "set another top_k, or engine.dtype: float32",
        )
    return {"kept": ids[is_candidate].astype(id_type), "kept_count": is_candidate.sum(1, dtype=np.int32)}


def prompt_log_probs(result: Any, length: int) -> FloatArray:
    """The recorded `prompt_log_prob` (`EXTRAS`) of a result whose completion has `length` tokens."""
    listed = np.array(result.prompt_logprobs.logprobs, np.float32)  # without the first token
    if len(listed) != len(result.prompt_token_ids) - 1:
        raise EngineFailure(
            "the log-probability of every token of a prompt",
            f"vLLM lists {len(listed)} for {len(result.prompt_token_ids)} tokens",
            "set evaluation.observations: false",
        )
    return np.concatenate([np.zeros(1, np.float32), listed, np.zeros(length, np.float32)])


def empty_completion() -> Completion:
    """The completion of a request that ended before its first token."""
    none = np.empty(0)
    return Completion(none.astype(np.int32), none.astype(np.float32), none.astype(np.int32), StopReason.ABORT)


def prompt_reader(model_dir: Path) -> PromptOf:
    """Returns a function that converts a request and a version to vLLM's input, in the format of vLLM's own processors:
    the tokens of the prompt, and the same pixels as in training. For a text model, images raise RolloutError.

    The cache keys contain the version, so that requests share keys, values and image features only within a version.
    """
    if family_in(model_dir) is None:
        return _text
    vision = vision_of(load_lm(model_dir, dtype="auto", attention=None, empty=True))
    assert vision is not None
    reader = pixel_reader(model_dir)

    def prompt(request: Request, version: int) -> Any:
        if not request.media:
            return _text(request, version)
        try:
            return _with_images(vision, request.prompt_tokens, request.media, [*map(reader, request.media)], version)
        except DataError as error:
            raise RolloutError(error.asked, error.found, error.do) from error

    return prompt


def _text(request: Request, version: int) -> Any:
    from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

    if request.media:
        raise RolloutError("images in a prompt", "the model reads text alone", "use a model that reads images")
    return tokens_input(request.prompt_tokens.tolist(), cache_salt=str(version))


def _with_images(
    vision: Vision, tokens: IntArray, media: Sequence[Media], pixels: Sequence[Pixels], version: int
) -> Any:
    from vllm.inputs import mm_input  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    places, ranges, items = vision.places(tokens, media), list[Any](), list[Any]()
    for place, image in zip(places, pixels, strict=True):
        vision.check_count(place, image)
        start, end = int(place[0]), int(place[-1]) + 1
        is_placeholder = np.isin(np.arange(start, end), place)
        ranges.append(
            PlaceholderRange(start, end - start, None if is_placeholder.all() else torch.from_numpy(is_placeholder))
        )
        inputs, fields = _fields(image)
        items += MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
    return mm_input(
        tokens.tolist(),
        MultiModalKwargsItems({"image": items}),
        {"image": [f"{version}-{item.sha256}" for item in media]},
        {"image": ranges},
        cache_salt=str(version),
    )


def _fields(pixels: Pixels) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The inputs of one image by their names in vLLM, and how vLLM joins those of several images."""
    from vllm.multimodal.inputs import MultiModalFieldConfig  # pyright: ignore[reportMissingImports]

    grid = pixels.get("image_grid_thw")
    if grid is not None:
        rows = MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1))
        return pixels, {
            "pixel_values": rows,
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
    if pixels["pixel_values"].ndim == 4:
        return pixels, {"pixel_values": MultiModalFieldConfig.batched("image")}
    tiles = torch.from_numpy(np.array([pixels["pixel_values"].shape[1]]))
    inputs = {name: tensor.squeeze(0) for name, tensor in pixels.items()}
    joined = MultiModalFieldConfig.flat_from_sizes("image", tiles)
    one_each = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    return {**inputs, "num_patches": tiles}, {**dict.fromkeys(inputs, joined), "num_patches": one_each}
