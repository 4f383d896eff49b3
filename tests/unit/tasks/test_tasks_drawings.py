"""Drawn pictures: the answer is in the picture, and a picture is the same everywhere."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from trivium.tasks.drawings import COLORS, DrawnTasks
from trivium.types import Task


def tasks(seed: int = 0, name: str = "train", **config: object) -> DrawnTasks:
    return DrawnTasks(DrawnTasks.Config(kind="drawings", **config), name=name, seed=seed)  # pyright: ignore[reportArgumentType]


def pixels(task: Task) -> np.ndarray:
    (media,) = task.prompt[0].media
    return np.asarray(Image.open(io.BytesIO(media.data)))


def painted(picture: np.ndarray) -> np.ndarray:
    """Where something was drawn: the background is gray noise from 90 to 140."""
    colors = np.array(list(COLORS.values()))
    return (picture[:, :, None, :] == colors).all(-1).any(-1)


@pytest.mark.parametrize("size", [14, 28, 56])
def test_the_color_is_in_the_picture(size: int) -> None:
    seen = set()
    for task in tasks(size=size, count=60):
        picture = pixels(task)
        assert picture.shape == (size, size, 3)
        values, counts = np.unique(picture[painted(picture)], axis=0, return_counts=True)
        assert values.tolist() == [list(COLORS[task.columns["answer"]])]
        assert counts[0] >= size * size / 6
        seen.add(task.columns["answer"])
    assert seen == set(COLORS)


@pytest.mark.parametrize("most", [1, 4, 9])
def test_the_number_of_shapes_is_in_the_picture(most: int) -> None:
    for task in tasks(questions=("count",), size=42, count=40, max_shapes=most):
        mask = painted(pixels(task))
        cells = next(n for n in range(1, 4) if n * n >= most)
        width = 42 // cells
        starts = [(row * width, column * width) for row in range(cells) for column in range(cells)]
        shapes = sum(mask[top : top + width, left : left + width].any() for top, left in starts)
        assert shapes == int(task.columns["answer"]) <= most


def test_the_digits_are_in_the_picture() -> None:
    shapes: dict[str, set[bytes]] = {}
    for task in tasks(questions=("digits",), size=28, count=80):
        mask = painted(pixels(task))
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        glyph = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        shapes.setdefault(task.columns["answer"], set()).add(glyph.tobytes() + bytes(glyph.shape))
    assert sorted(shapes) == list("0123456789")
    assert all(len(glyphs) == 1 for glyphs in shapes.values())
    assert len(set.union(*shapes.values())) == 10
    assert {len(task.columns["answer"]) for task in tasks(questions=("digits",), num_digits=4, size=56, count=9)} == {4}


def test_a_picture_is_a_function_of_seed_part_and_number() -> None:
    def hashes(source: DrawnTasks) -> list[str]:
        return [task.prompt[0].media[0].sha256 for task in source]

    first = hashes(tasks(count=50))
    assert len(set(first)) == 50
    assert hashes(tasks(count=80))[:50] == first == hashes(tasks(count=50, name="other"))
    assert set(first).isdisjoint([*hashes(tasks(count=50, part="holdout")), *hashes(tasks(seed=1, count=50))])
    # On every machine and with every library: it is written without compression.
    assert hashlib.sha256("".join(first[:3]).encode()).hexdigest()[:12] == "bd99e6c6584f"


def test_questions_take_turns_and_shuffled_pictures_keep_their_questions() -> None:
    kinds = ("color", "count", "digits")
    plain = tasks(questions=kinds, count=30)
    assert [task.columns["data_source"] for task in plain] == [*kinds] * 10
    assert [task.prompt[0].content for task in plain][:3] == ["<image>color?", "<image>how many?", "<image>read:"]
    mixed = tasks(questions=kinds, count=30, shuffled=True)
    assert [task.columns["answer"] for task in mixed] == [task.columns["answer"] for task in plain]
    before, after = ([task.prompt[0].media[0].sha256 for task in source] for source in (plain, mixed))
    assert sorted(before) == sorted(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) > 20
    assert plain[-1] == plain[29]
    with pytest.raises(IndexError):
        plain[30]
