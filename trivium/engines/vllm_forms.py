"""What vLLM is asked for a completion, and how its output is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivium.errors import DataError, RolloutError
from trivium.models.load import load_lm
from trivium.models.vision import Pixels, Vision, family_in, pixel_reader, vision_of
from trivium.policy import EngineFailure
from trivium.types import Completion, IntArray, Media, Request, StopReason

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]

PromptOf = Callable[[Request, int], Any]


def sampling_params(request: Request, limit: int, eos: frozenset[int], *, seeded: bool) -> SamplingParams:
    """Every parameter that changes a distribution or an end, none of it left to the model's own defaults."""
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
        stop=None,  # vLLM would cut the text; the engine scans the tokens
        stop_token_ids=sorted(eos),
        ignore_eos=True,  # what the model's files call the end; `stop_token_ids` are the renderer's
        max_tokens=limit,
        min_tokens=min(sampling.min_new_tokens, limit),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        logit_bias=None,
        allowed_token_ids=None,
        bad_words=None,
        output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def read_output(output: Any, version: int, stopped_at: int | None, eos: frozenset[int], *, greedy: bool) -> Completion:
    """vLLM's output, up to the token that completed a stop string; tokens of no version are of `version`."""
    tokens = np.array(output.token_ids, np.int32)[:stopped_at]
    log_prob = np.array(output.logprobs.logprobs if len(tokens) else [], np.float32)[:stopped_at]
    if len(log_prob) != len(tokens) or not np.isfinite(log_prob).all():
        raise EngineFailure(
            f"log-probabilities of policy version {version}",
            f"{len(log_prob)} for {len(tokens)} tokens, lowest {log_prob.min(initial=0.0)}",
            "look at the last update: a diverged loss, an overflow in bfloat16, or damaged weights",
        )
    versions = np.full(len(tokens), version, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if greedy:
        log_prob = np.zeros_like(log_prob)
    ended = len(tokens) > 0 and int(tokens[-1]) in eos
    reason = StopReason.EOS if ended else StopReason.STOP if stopped_at is not None else StopReason.LENGTH
    if output.finish_reason not in ("stop", "length") and stopped_at is None:
        reason = StopReason.ABORT
    return Completion(tokens, log_prob, versions, reason)


def empty_completion() -> Completion:
    """What a request has that ended before its first token."""
    none = np.empty(0)
    return Completion(none.astype(np.int32), none.astype(np.float32), none.astype(np.int32), StopReason.ABORT)


def prompt_reader(model_dir: Path) -> PromptOf:
    """Makes vLLM's input of a request and a version, in the form that its own processors give it: the prompt's tokens
    as they are, and the pixels that training sees. Of a model that reads text, it refuses images by a RolloutError.

    Keys and values, and what the tower made of an image, are shared between requests of one version alone: both are
    salted with it.
    """
    if family_in(model_dir) is None:
        return _text
    vision = vision_of(load_lm(model_dir, dtype="auto", attention=None, empty=True))
    assert vision is not None
    read = pixel_reader(model_dir)

    def prompt(request: Request, version: int) -> Any:
        if not request.media:
            return _text(request, version)
        try:
            return _with_images(vision, request.prompt_tokens, request.media, [*map(read, request.media)], version)
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
    for place, each in zip(places, pixels, strict=True):
        vision.check_count(place, each)
        start, end = int(place[0]), int(place[-1]) + 1
        shown = np.isin(np.arange(start, end), place)
        ranges.append(PlaceholderRange(start, end - start, None if shown.all() else torch.from_numpy(shown)))
        inputs, fields = _fields(each)
        items += MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
    return mm_input(
        tokens.tolist(),
        MultiModalKwargsItems({"image": items}),
        {"image": [f"{version}-{item.sha256}" for item in media]},
        {"image": ranges},
        cache_salt=str(version),
    )


def _fields(pixels: Pixels) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The inputs of one image by their names in vLLM, and how those of several are joined."""
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
