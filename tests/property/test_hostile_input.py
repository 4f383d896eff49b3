"""Whatever bytes come in, only errors of Trivium come out. `TRIVIUM_FUZZ` sets how many mutations are tried."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from PIL import Image

from trivium.foundation.errors import TriviumError
from trivium.models.vision.images import check_image, decoded
from trivium.rewards.remote_forms import FormError, Protocol, RemoteSample, RemoteScore, request, scores
from trivium.tasks.pictures import read_image
from trivium.types import Media

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MUTATIONS = int(os.environ.get("TRIVIUM_FUZZ", "3000"))
LONGEST_S = 10.0
"""Of the processor's time: decoders do not wait."""


def originals(format_: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "described"
    if format_ != "TIFF":  # Pillow cannot write it there
        exif[0x8769] = {0x9003: "2026:11:24 00:00:00"}
    image, file = Image.effect_mandelbrot((24, 16), (-2, -1, 1, 1), 50).convert("RGB"), io.BytesIO()
    image.save(file, format_, **({"exif": exif} if format_ in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
    return file.getvalue()


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut off, doubled or inserted; most often near the beginning, where the headers are."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        place = dice.randrange(max(1, len(changed) if dice.random() < 0.5 else min(96, len(changed))))
        match dice.randrange(5):
            case 0 | 1:
                changed[place : place + 1] = bytes([dice.choice((0, 1, 127, 255, dice.randrange(256)))])
            case 2:
                del changed[place : place + dice.choice((1, 4, 64, len(changed)))]
            case 3:
                changed[place:place] = changed[place : place + dice.choice((1, 4, 16))]
            case _:
                changed[place:place] = dice.randbytes(dice.choice((1, 2, 8)))
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")  # of decoders
@pytest.mark.parametrize("format_", FORMATS)
def test_a_damaged_image_is_an_error_of_trivium(format_: str) -> None:
    dice, data = random.Random(f"2026 {format_}"), originals(format_)
    assert decoded(read_image(data, "here")).size == (
        (16, 24) if format_ in ("JPEG", "WEBP", "TIFF", "PNG") else (24, 16)
    )
    refused = 0
    for _ in range(MUTATIONS // len(FORMATS)):
        broken, began = mutated(dice, data), time.process_time()
        for use in (check_image, decoded):
            try:
                use(read_image(broken, "here"))
            except TriviumError:
                refused += 1
        try:
            request("lightrft", [RemoteSample("p", "c", images=(Media(f"image/{format_.lower()}", broken),))])
        except TriviumError:
            refused += 1
        assert time.process_time() - began < LONGEST_S
    assert refused > MUTATIONS // len(FORMATS) // 10


@pytest.mark.parametrize("text", ["file://%ff", "file://%00", "%ff", "file:///", "data:image/png;base64,", "data:,%ff"])
def test_a_text_that_names_no_image_is_an_error_of_trivium(text: str, tmp_path: Any) -> None:
    with pytest.raises(TriviumError):
        read_image(text, "here", tmp_path)


def values(dice: random.Random, depth: int = 0) -> Any:
    """A JSON value, more often than not with the keys of a response."""
    if depth > 3 or dice.random() < 0.35:
        return dice.choice((None, True, False, 0, -1, 1e300, 0.5, 10**400, float("nan"), "", "x", "1.0", [], {}))
    if dice.random() < 0.4:
        return [values(dice, depth + 1) for _ in range(dice.randrange(4))]
    keys = ("rewards", "results", "reward", "error", "errors", "metrics", "scores", "extra_logs", "a")
    return {dice.choice(keys): values(dice, depth + 1) for _ in range(dice.randrange(4))}


def bodies() -> Iterator[tuple[Protocol, Any, int]]:
    dice = random.Random(24)
    for _ in range(max(500, MUTATIONS // 10)):
        body, count = values(dice), dice.choice((1, 2, 3))
        if dice.random() < 0.5:
            body = {key: [values(dice, 2) for _ in range(count)] for key in ("rewards", "results")}
        for protocol in get_args(Protocol):
            yield protocol, body, count


def test_a_response_of_any_form_is_a_score_a_reason_or_a_form_error() -> None:
    given = 0
    for protocol, body, count in bodies():
        try:
            results = scores(protocol, body, count)
        except FormError:
            continue
        assert len(results) == count
        assert all(isinstance(result, RemoteScore | str) for result in results)
        given += 1
    assert given > 20


@pytest.mark.parametrize("count", [1, 2])
def test_true_is_no_reward(count: int) -> None:
    for protocol, body in {
        "trivium": {"results": [{"reward": True}] * count},
        "lightrft": {"rewards": [True] * count},
        "openrlhf": {"rewards": True if count == 1 else [True] * count},
    }.items():
        assert scores(protocol, body, count) == ["True of type bool, expected a number"] * count  # pyright: ignore[reportArgumentType]
