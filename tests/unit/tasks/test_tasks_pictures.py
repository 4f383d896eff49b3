"""Images in rows: paths, bytes, PIL, base64 and data URIs, in a column or in the parts of messages."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from failing import refused
from PIL import Image

from trivium.foundation.errors import DataError
from trivium.tasks.files import JsonlTasks, ParquetTasks
from trivium.tasks.given import as_lines
from trivium.tasks.hf import DatasetsTasks
from trivium.tasks.pictures import read_image
from trivium.tasks.rows import RowTasks, task_of_row
from trivium.types import Media, Message, Task


def encoded(seed: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(file, kind)
    return file.getvalue()


PNG, OTHER = encoded(0), encoded(1)
BASE64 = base64.b64encode(PNG).decode()
URI = f"data:image/png;base64,{BASE64}"
IMAGE = Media("image/png", PNG)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "a.png").write_bytes(PNG)
    (folder / "pictures" / "b b.png").write_bytes(OTHER)
    (tmp_path / "secret.png").write_bytes(PNG)
    return folder


def task(row: dict[str, Any], root: Path | None = None, **config: Any) -> Task:
    section = RowTasks.Config(kind="rows", image_root=None if root is None else str(root), **config)
    return task_of_row("rows, row 0", row, section, "train")


def test_every_form_of_an_image_is_the_same_image(root: Path) -> None:
    forms: list[Any] = [
        PNG,
        bytearray(PNG),
        "pictures/a.png",
        Path("pictures/a.png"),
        str(root / "pictures" / "a.png"),
        f"file://{root}/pictures/a.png",
        BASE64,
        URI,
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": "pictures/a.png"},
        {"image": URI},
        {"type": "image", "image": PNG},
        {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
        {"type": "image_url", "image_url": URI},
        IMAGE,
    ]
    assert {read_image(form, "here", root) for form in forms} == {IMAGE}
    drawn = read_image(Image.open(io.BytesIO(PNG)), "here")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(drawn.data))), np.asarray(Image.open(io.BytesIO(PNG))))
    kinds = {"JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp", "BMP": "image/bmp", "TIFF": "image/tiff"}
    assert {read_image(encoded(0, kind), "").mime for kind in kinds} == set(kinds.values())
    assert read_image("pictures/b%20b.png".replace("%20", " "), "here", root).data == OTHER


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("http://example.org/a.png", "example.org/a.png"),
        ("https://example.org/a.png", "example.org/a.png"),
        ({"type": "image_url", "image_url": {"url": "HTTPS://example.org/a.png"}}, "example.org/a.png"),
        ("../secret.png", "tasks"),
        ("pictures/../../secret.png", "tasks"),
        ("file:///etc/passwd", "tasks"),
        ("/etc/passwd", "tasks"),
        ("link.png", "tasks"),
        ("pictures/c.png", "no such"),
        ("pictures", "no such"),
        ("a\0b", "here"),
        ("data:image/png;base64,@@", "data URI"),
        ("data:image/png;base64", "data URI"),
        ("data:video/mp4;base64,AAAA", "video/mp4"),
        ({"video": "a.mp4"}, "with video"),
        ({"type": "input_audio", "input_audio": {}}, "with audio"),
        (b"no picture", "PNG, JPEG"),
        (b"", "PNG, JPEG"),
        (7, "int 7"),
        (None, "NoneType"),
        ({}, "dict"),
    ],
)
def test_what_is_no_image_or_leads_elsewhere_is_refused(root: Path, value: object, message: str) -> None:
    (root / "link.png").symlink_to(root.parent / "secret.png")
    with refused(DataError, message):
        read_image(value, "here", root)


def test_a_path_needs_a_folder() -> None:
    with refused(DataError, "'a.png'", "image_root"):
        read_image("a.png", "here")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"prompt": "what?", "images": [PNG]}, "what?"),
        ({"prompt": "what?", "images": PNG}, "what?"),
        ({"prompt": "a <image> b", "images": [PNG]}, "a <image> b"),
        ({"prompt": user("<image>\nwhat?"), "images": [{"bytes": PNG, "path": None}]}, "<image>\nwhat?"),
        ({"prompt": user([{"type": "image"}, {"type": "text", "text": "b"}]), "images": [URI]}, "<image>b"),
        ({"prompt": user([{"type": "text", "text": "a<image>"}]), "images": [BASE64]}, "a<image>"),
        ({"prompt": user([{"type": "image_url", "image_url": {"url": URI}, "text": None}])}, "<image>"),
        ({"prompt": user([{"type": "text", "text": "a", "image": None}, {"type": "image", "image": PNG}])}, "a<image>"),
        ({"prompt": user(({"type": "image", "image": Image.open(io.BytesIO(PNG))},))}, "<image>"),
    ],
)
def test_the_images_of_a_row_are_in_its_messages(row: dict[str, Any], content: str) -> None:
    made = task(row)
    assert [(m.role, m.content, len(m.media)) for m in made.prompt] == [("user", content, 1)]
    json.dumps(made.columns)


def test_images_are_taken_in_the_order_of_their_marks_across_messages() -> None:
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "<image>one"},
        {"role": "assistant", "content": "ok"},
        {"role": "tool", "content": [{"type": "text", "text": "and"}, {"type": "image"}]},
    ]
    made = task({"prompt": talk, "images": [PNG, OTHER], "answer": "2"})
    assert [[item.data for item in message.media] for message in made.prompt] == [[], [PNG], [], [OTHER]]
    assert made.columns["images"] == [
        {"mime": "image/png", "sha256": item.sha256} for m in made.prompt for item in m.media
    ]
    assert made.columns["answer"] == "2"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>", "images": []}, "each <image>"),
        ({"prompt": "<image>", "images": None}, "each <image>"),
        ({"prompt": "<image><image>", "images": [PNG]}, "each <image>"),
        ({"prompt": "<image>", "images": [PNG, OTHER]}, "1 image(s)"),
        ({"prompt": user([{"type": "image"}])}, "each <image>"),
        ({"prompt": [{"role": "tool", "content": "x"}], "images": [PNG]}, "a mark"),
        ({"prompt": user([{"type": "text", "text": "<image>"}, {"type": "image", "image": PNG}])}, "'<image>'"),
        ({"prompt": user([{"type": "video", "video": "a.mp4"}])}, "with video"),
        ({"prompt": user([{"type": "input_audio", "input_audio": {"data": "x"}}])}, "with audio"),
        ({"prompt": user([{"type": "refusal", "refusal": "x"}])}, "refusal"),
        ({"prompt": "x", "images": ["a.png"]}, "image_root"),
    ],
)
def test_marks_and_images_that_disagree_are_refused(row: dict[str, Any], message: str) -> None:
    with refused(DataError, message):
        task(row)


def test_without_a_column_of_images_the_mark_is_text() -> None:
    made = task({"prompt": "an <image> tag"})
    assert made.prompt == (Message("user", "an <image> tag"),)
    assert task({"prompt": "an <image> tag", "images": ["not ours"]}, images="").columns == {"images": ["not ours"]}
    with refused(DataError, "'picture'"):
        task({"prompt": "x"}, images="picture")


def test_identity_follows_the_picture_not_its_form(root: Path) -> None:
    forms = [PNG, URI, BASE64, {"bytes": PNG, "path": "x"}, "pictures/a.png"]
    ids = {task({"prompt": "what?", "images": [form]}, root).task_id for form in forms}
    assert len(ids) == 1
    parts = {task({"prompt": user([{"type": "image", "image": data}])}).task_id for data in (PNG, OTHER)}
    assert len(parts | ids) == 3
    assert task({"prompt": "1+1="}).task_id == "fd2b29a88a298636"  # ids of rows of text are what they always were


def test_a_template_has_the_images_of_its_row() -> None:
    made = task({"question": "what?", "images": [PNG]}, template="<image>{question} Answer.")
    assert made.prompt == (Message("user", "<image>what? Answer.", (IMAGE,)),)


def test_jsonl_parquet_and_datasets_give_the_same_images(root: Path) -> None:
    rows = [{"prompt": "<image>?", "images": ["pictures/a.png"]}, {"prompt": "text", "images": []}]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    stored = [{"prompt": "<image>?", "images": [{"bytes": PNG, "path": None}]}, {"prompt": "text", "images": []}]
    made = datasets.Dataset.from_list(stored, features=features)
    made.to_parquet(str(root / "rows.parquet"))
    made.save_to_disk(str(root / "saved"))
    sources = (
        JsonlTasks(JsonlTasks.Config(kind="jsonl", path=str(root / "rows.jsonl")), name="train", seed=0),
        ParquetTasks(ParquetTasks.Config(kind="parquet", path=str(root / "rows.parquet")), name="train", seed=0),
        DatasetsTasks(DatasetsTasks.Config(kind="hf", path=str(root / "saved")), name="train", seed=0),
    )
    for tasks in sources:
        assert [m.media for m in tasks[0].prompt] == [(IMAGE,)]
        assert tasks[0].prompt[0].media[0].data == PNG
        assert [m.media for m in tasks[1].prompt] == [()]
    assert len({tasks[0].task_id for tasks in sources}) == 1


def test_rows_of_a_script_may_hold_pictures() -> None:
    rows = [{"prompt": "<image>?", "images": [Image.open(io.BytesIO(PNG))]}, {"prompt": "<image>?", "images": [PNG]}]
    first, second = (task(json.loads(line)) for line in as_lines(rows, "tasks").splitlines())
    assert second.prompt[0].media == (IMAGE,)
    assert first.prompt[0].media[0].mime == "image/png"


def test_several_files_share_the_folder_that_holds_them(root: Path) -> None:
    row = json.dumps({"prompt": "<image>?", "images": ["pictures/a.png"], "n": 1})
    (root / "one.jsonl").write_text(row)
    (root / "pictures" / "two.jsonl").write_text(row.replace('"n": 1', '"n": 2'))
    paths = (str(root / "one.jsonl"), str(root / "pictures" / "two.jsonl"))
    tasks = JsonlTasks(JsonlTasks.Config(kind="jsonl", path=paths), name="train", seed=0)
    assert [tasks[number].prompt[0].media for number in range(2)] == [(IMAGE,)] * 2
