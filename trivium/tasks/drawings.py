"""Generated pictures with a question each: name a color, count shapes, read digits."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trivium.config import Plugin
from trivium.foundation.randomness import permutation, stream, uniforms
from trivium.types import IMAGE, Media, Message, Task

Pixels = npt.NDArray[np.uint8]
"""(size, size, 3)."""
Draw = Callable[[float], int]
"""The next random integer from 0 to a number, exclusive."""

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
    "white": (245, 245, 245),
    "black": (10, 10, 10),
}
_GLYPHS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001010010",
    "111101111101111",
    "111101111001111",
)
"""The digits, 5 rows of 3 cells each."""
_QUESTIONS = {"color": "color?", "count": "how many?", "digits": "read:"}


class DrawnTasks:
    """Small pictures with `answer` (and the expert's `completion`): a color's name, a number of shapes, digits.

    Needs no package and no file; a picture is a function of the seed, the part and its number, byte for byte the same
    on every machine. `train` and `holdout` have different pictures.
    """

    class Config(Plugin):
        """Which pictures."""

        questions: tuple[Literal["color", "count", "digits"], ...] = Field(default=("color",), min_length=1)
        """The questions, in turn: the color of a shape, the number of shapes, the digits in the picture."""
        size: int = Field(default=28, ge=14, le=1024)
        """Side of a picture, in pixels."""
        count: int = Field(default=1000, ge=1, le=10_000_000)
        """How many pictures."""
        part: Literal["train", "holdout"] = "train"
        """Which pictures this taskset draws."""
        max_shapes: int = Field(default=4, ge=1, le=9)
        """The most shapes in a picture."""
        num_digits: int = Field(default=1, ge=1, le=4)
        """How many digits are in a picture."""
        shuffled: bool = False
        """Gives every task the picture of another one: a control, from which nothing can be learned."""

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        self.config, self.name, self.seed = config, name, seed
        self._pictures = permutation(config.count, "drawings shuffled", seed, name) if config.shuffled else None

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, index: int) -> Task:
        index = range(self.config.count)[index]
        question = self.config.questions[index % len(self.config.questions)]
        pixels, answer = self._drawn(index)
        if self._pictures is not None:
            pixels, _ = self._drawn(int(self._pictures[index]))
        message = Message("user", f"{IMAGE}{_QUESTIONS[question]}", (Media("image/png", png(pixels)),))
        columns = {"answer": answer, "completion": answer, "data_source": question}
        return Task(f"{question}-{index}", (message,), columns, self.name)

    def _drawn(self, index: int) -> tuple[Pixels, str]:
        """(the picture, the answer) of a task."""
        config, key = self.config, np.uint64(stream("drawings", self.config.part, self.seed, index))
        # No picture draws more: nine shapes take 38.
        numbers = iter(uniforms(key, np.arange(64)).tolist())

        def draw(below: float) -> int:
            return int(next(numbers) * below)

        noise = uniforms(np.uint64(stream("drawings", "noise", int(key))), np.arange(config.size**2))
        pixels = np.repeat((90 + 50 * noise).astype(np.uint8).reshape(config.size, config.size, 1), 3, axis=2)
        match config.questions[index % len(config.questions)]:
            case "color":
                return pixels, _draw_color(pixels, draw)
            case "count":
                return pixels, _draw_shapes(pixels, 1 + draw(config.max_shapes), config.max_shapes, draw)
            case "digits":
                return pixels, _draw_digits(pixels, config.num_digits, draw)


def _draw_color(pixels: Pixels, draw: Draw) -> str:
    """Draws one shape and returns its color."""
    size, name = len(pixels), list(COLORS)[draw(len(COLORS))]
    side = size // 2 + draw(size // 3)
    _fill(pixels, draw(size - side + 1), draw(size - side + 1), side, COLORS[name], round_off=draw(2) == 1)
    return name


def _draw_shapes(pixels: Pixels, number: int, most: int, draw: Draw) -> str:
    """Draws shapes of one color, each in its own cell, and returns their number."""
    cells = 1
    while cells * cells < most:
        cells += 1
    width = len(pixels) // cells
    side = max(2, 2 * width // 3)
    color = list(COLORS.values())[draw(len(COLORS))]
    free = list(range(cells * cells))
    for _ in range(number):
        row, column = divmod(free.pop(draw(len(free))), cells)
        top, left = row * width + draw(width - side + 1), column * width + draw(width - side + 1)
        _fill(pixels, top, left, side, color, round_off=draw(2) == 1)
    return str(number)


def _draw_digits(pixels: Pixels, number: int, draw: Draw) -> str:
    """Draws digits from left to right and returns their text."""
    size = len(pixels)
    cell = max(1, min(size // (4 * number), size // 6))
    top, left = draw(size - 5 * cell + 1), draw(size - (4 * number - 1) * cell + 1)
    color = COLORS["white"] if draw(2) else COLORS["black"]
    text = ""
    for place in range(number):
        digit = draw(10)
        glyph = np.array([bit == "1" for bit in _GLYPHS[digit]]).reshape(5, 3)
        mask = np.kron(glyph, np.ones((cell, cell), bool))
        column = left + 4 * cell * place
        pixels[top : top + 5 * cell, column : column + 3 * cell][mask] = color
        text += str(digit)
    return text


def _fill(
    pixels: Pixels, top: int, left: int, side: int, color: tuple[int, int, int], *, round_off: bool = False
) -> None:
    """Fills a square, or the circle inside it."""
    mask = np.ones((side, side), bool)
    if round_off:
        away = np.arange(side) - (side - 1) / 2
        mask = away[:, None] ** 2 + away**2 <= (side / 2) ** 2
    pixels[top : top + side, left : left + side][mask] = color


def png(pixels: Pixels) -> bytes:
    """Pixels as an uncompressed PNG file, whose bytes do not depend on the version of a library."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
