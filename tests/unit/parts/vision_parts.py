"""Tiny models that see, pictures, and conversations with them, for the tests of models, engines and training."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import SampleKey
from trivium.models.vision.images import Images, images_of
from trivium.text.renderer import renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Batch, Completion, Experience, Media, Message, Prompt, Request, Sampling

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "idefics3", "smolvlm")
_SIZE: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "mlp": 48,
    "max_position": 512,
    "alphabet": "abc? \n",
    "vision_hidden": 16,
    "vision_heads": 2,
    "image_size": 28,
}


def sizes(family: str, **changes: Any) -> dict[str, Any]:
    return {**_SIZE, "architecture": family, **changes}


def tiny(directory: Path, family: str = "qwen2_vl", scale: float = 3.0, **changes: Any) -> Path:
    """A random model whose weights are large enough for its predictions to differ from uniform, and from picture to
    picture."""
    config = TinyVisionModel.Config.model_validate(sizes(family, **changes))
    path = TinyVisionModel(config, seed=3).materialize(directory)
    model = AutoModelForImageTextToText.from_pretrained(path)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def picture(seed: int, width: int = 28, height: int = 28) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Media("image/png", file.getvalue())


def user(text: str, *pictures: Media) -> Message:
    return Message("user", text, pictures)


CONVERSATIONS = (
    (user("<image>a?<image>b", picture(1), picture(2, 14, 28)), user("c<image>", picture(3))),
    (user("abcabc"), user("bb?")),
    (user("a <image>", picture(4)), user("c")),
    (user("a <image>", picture(5)), user("c<image>a", picture(6, 28, 14))),
)
"""First and second message of the user; the third and fourth begin with equal tokens and different pictures."""


async def rolled_out(path: Path, conversations: Sequence[tuple[Message, ...]] = CONVERSATIONS, **config: Any) -> Batch:
    """What an engine says to each, all at once and every turn after the other: one experience a conversation."""
    renderer = renderer_of(path)
    engine = engine_of(path, **config)
    try:
        said = await asyncio.gather(
            *[_conversation(engine, renderer, messages, i) for i, messages in enumerate(conversations)]
        )
    finally:
        await engine.close()
    return Batch(tuple(said))


def engine_of(path: Path, **config: Any) -> TorchEngine:
    return TorchEngine(
        TorchEngine.Config.model_validate(config),
        model_dir=path,
        eos_token_ids=renderer_of(path).eos_token_ids,
        decode=lambda tokens: "",
        threads=1,
    )


def request_of(prompt: Prompt, index: int = 0, tokens: int = 6, **sampling: Any) -> Request:
    return Request(prompt.tokens, Sampling(tokens, **sampling), SampleKey(3, "train", "t", str(index)), prompt.media)


async def _conversation(engine: TorchEngine, renderer: Any, messages: Sequence[Message], index: int) -> Experience:
    seen, history, done = Prompt(np.empty(0, np.int32)), [], None
    parts: list[tuple[int, Completion]] = []
    for message in messages:
        if done is None:
            history = [message]
            prompt = renderer.render(history)
        else:
            prompt = renderer.extend(history, seen, done.stop_reason, [message])
            history = [*history, message]
        done = await engine.generate(request_of(prompt, index))
        parts.append((len(prompt), done))
        seen = prompt.then(Prompt(done.tokens))
        history = [*history, Message("assistant", renderer.decode(done.tokens))]
    mask, log_prob = np.zeros(len(seen), np.bool_), np.zeros(len(seen), np.float32)
    for start, turn in parts:
        mask[start : start + len(turn.tokens)] = True
        log_prob[start : start + len(turn.tokens)] = turn.log_prob
    version = np.where(mask, 0, -1)
    return Experience(seen.tokens, mask, log_prob, version, f"g{index // 2}", index % 2, media=seen.media)


def by_transformers(
    path: Path, experience: Experience, dtype: torch.dtype = torch.float32, model: Any = None
) -> np.ndarray:
    """Log-probabilities of the trained tokens by transformers' own forward pass, its own positions included. `model`:
    that in `path` with other weights."""
    model = model or AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()
    images = images_of(path)
    assert images is not None
    ids = torch.from_numpy(experience.tokens.astype(np.int64))[None]
    inputs: dict[str, Any] = dict(images.pixels(experience.media))
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = shown(images, experience)[None].int()
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs).logits[0, :-1].float()
    log_prob = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0], log_prob.numpy()]) * experience.response_mask


def shown(images: Images, experience: Experience) -> torch.Tensor:
    """(L,) bool: the tokens that are placeholders of images."""
    inside = np.zeros(len(experience), np.bool_)
    for start, end in (item.span for item in experience.media if item.span):
        inside[start:end] = True
    return torch.from_numpy(inside & (experience.tokens == images.token_id))


def with_plain_text(path: Path, batch: Batch) -> Batch:
    """The experiences with another token wherever the policy sampled a placeholder, which transformers would take for
    that of a further image."""
    images = images_of(path)
    assert images is not None
    plain = []
    for experience in batch.experiences:
        sampled = (experience.tokens == images.token_id) & ~shown(images, experience).numpy()
        plain.append(replace(experience, tokens=np.where(sampled, 3, experience.tokens)))
    return replace(batch, experiences=tuple(plain))
