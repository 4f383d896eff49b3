"""Rows that no run can record are found when they are read, with their place; a key skips and counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failing import refused

from trivium.buffers.journal import decode_group, encode_group
from trivium.config import build, plugin
from trivium.foundation.errors import DataError
from trivium.tasks.given import as_lines
from trivium.types import Group, Task

GOOD = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(8)]
NESTED = "[" * 1500 + "]" * 1500


def source(kind: str, path: Path | str, **fields: Any) -> Any:
    return build("tasks", plugin("tasks")({"kind": kind, "path": str(path), **fields}), name="train", seed=0)


def with_line(path: Path, line: str | bytes) -> Path:
    """Eight rows, of which the sixth is this line."""
    lines = [each.encode() for each in GOOD]
    lines[5] = line.encode() if isinstance(line, str) else line
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


BAD = {
    "half a pair in a column": r'{"prompt": "5+1=", "source": "cut \ud83d"}',
    "half a pair in the prompt": r'{"prompt": "cut \ud83d"}',
    "its other half": r'{"prompt": "5+1=", "source": "\udc00 cut"}',
    "halves in the wrong order": r'{"prompt": "5+1=", "source": "\udc00\ud83d"}',
    "half a pair in a name": r'{"prompt": "5+1=", "cut \ud83d": 1}',
    "half a pair in a message": r'{"prompt": [{"role": "user", "content": "\ud800"}]}',
    "half a pair in a completion": r'{"prompt": "5+1=", "completion": [{"role": "assistant", "content": "\ud800"}]}',
    "half a pair deep inside": r'{"prompt": "5+1=", "a": [{"b": ["\ud800"]}]}',
    "65 bits": '{"prompt": "5+1=", "product": 18446744073709551616}',
    "65 bits below zero": '{"prompt": "5+1=", "product": [-9223372036854775809]}',
    "5000 digits": '{"prompt": "5+1=", "product": ' + "7" * 5000 + "}",
    "not a number": '{"prompt": "5+1=", "score": NaN}',
    "infinity": '{"prompt": "5+1=", "score": -Infinity}',
    "a float too large": '{"prompt": "5+1=", "score": 1e999}',
    "nested": '{"prompt": "5+1=", "tree": ' + "[" * 300 + "]" * 300 + "}",
    "nested beyond Python's limit": '{"prompt": "5+1=", "tree": ' + NESTED + "}",
    "cut short": '{"prompt": "5+1=", "ans',
    "a list": '["5+1="]',
    "a text": '"5+1="',
    "no prompt": '{"question": "5+1="}',
    "latin 1": '{"prompt": "caf\xe9"}'.encode("latin1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_with_its_line_or_skipped(name: str, tmp_path: Path) -> None:
    path = with_line(tmp_path / "rows.jsonl", BAD[name])
    with refused(DataError, f"{path}:6", "tasks.train.on_bad_row"):
        source("jsonl", path)
    tasks = source("jsonl", path, on_bad_row="skip")
    assert [tasks[place].prompt[0].content for place in range(len(tasks))] == [f"{n}+1=" for n in (0, 1, 2, 3, 4, 6, 7)]
    (error,) = tasks.bad_rows
    assert f"{path}:6" in error.asked
    again = source("jsonl", path, on_bad_row="skip")
    assert again.digest == tasks.digest


@pytest.mark.parametrize(
    "value",
    [r'"\ud83d\ude00 caf\u00e9 \u0000 \uffff"', "18446744073709551615", "-9223372036854775808", "1e308", "-0.0"],
)
def test_what_is_near_a_bad_value_is_kept_and_can_be_recorded(value: str, tmp_path: Path) -> None:
    tasks = source("jsonl", with_line(tmp_path / "rows.jsonl", f'{{"prompt": "5+1=", "x": {{"y": [{value}]}}}}'))
    group = Group(0, tasks[5], ())
    assert decode_group(encode_group(group)).task.columns["x"] == {"y": [json.loads(value)]}


def test_deep_values_can_be_recorded(tmp_path: Path) -> None:
    deep = "[" * 190 + "]" * 190
    tasks = source("jsonl", with_line(tmp_path / "rows.jsonl", f'{{"prompt": "5+1=", "x": {deep}}}'))
    assert decode_group(encode_group(Group(0, tasks[5], ()))).task.columns["x"] == json.loads(deep)


def test_several_bad_rows_are_counted_and_none_may_be_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD[0], r'{"prompt": "\ud800"}', "{", GOOD[1], '{"prompt": 2}']))
    with refused(DataError, f"{path}:2", 2):
        source("jsonl", path)
    assert len(source("jsonl", path, on_bad_row="skip").bad_rows) == 3
    path.write_text("{\n[\n")
    with refused(DataError, path, "tasks.train"):
        source("jsonl", path, on_bad_row="skip")


def test_tasks_keep_the_number_of_their_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["{", GOOD[0], r'{"prompt": "\ud800"}', "{", GOOD[1], '{"prompt": 2}', GOOD[2]]))
    assert numbers(source("jsonl", path, on_bad_row="skip")) == [2, 5, 7]
    path.write_text("\n".join(GOOD))
    assert numbers(source("jsonl", path, skip=2, limit=3)) == [3, 4, 5]


def numbers(tasks: Any) -> list[int]:
    return [tasks.number(place) for place in range(len(tasks))]


@pytest.mark.parametrize(
    "value",
    ["\ud800", {"\ud800": 1}, {1: 2}, 2**64, -(2**63) - 1, float("nan"), b"\xff\x00", {1, 2}, object()],
)
def test_a_bad_row_of_python_is_refused_or_counted(value: object, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "x": 1}, {"prompt": "2+1=", "x": value}, {"prompt": "3+1=", "x": 3}]
    with refused(DataError, "tasks['train'], row 1"):
        as_lines(rows, "tasks['train']")
    path = tmp_path / "rows.jsonl"
    path.write_text(as_lines(rows, "tasks['train']", skips=True), encoding="utf-8")
    tasks = source("jsonl", path, on_bad_row="skip")
    assert (len(tasks), len(tasks.bad_rows)) == (2, 1)


def test_a_row_that_contains_itself_is_refused() -> None:
    row: dict[str, Any] = {"prompt": "1+1="}
    row["x"] = [row]
    with refused(DataError, "tasks, row 0"):
        as_lines([row], "tasks")


FUNCTION = """
from trivium.api import Message, Task

def rows():
    yield {"prompt": "1+1="}
    yield {"prompt": "\\ud800"}
    yield Task("\\ud800", (Message("user", "x"),))
    yield Task("a", (Message("user", "cut \\udfff"),))
    yield Task("b", (Message("user", "x"),), {"n": 2**70})
    yield Task("c", (Message("user", "x"),), {"n": 2**63})
"""


def test_rows_and_tasks_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FUNCTION)
    section = plugin("tasks")({"kind": "python", "source": f"{tmp_path / 'made.py'}:rows", "on_bad_row": "skip"})
    tasks = build("tasks", section, name="train", seed=0)
    assert [task.task_id for task in tasks][1:] == ["c"]
    assert [error.asked.partition("row ")[2][:1] for error in tasks.bad_rows] == ["1", "2", "3", "4"]
    assert isinstance(tasks[1], Task)


def test_rows_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "2+1=", None], "score": [1.0, float("nan"), 2.0]}), path)
    with refused(DataError, path, "row 1", 1):
        source("parquet", path)
    assert len(source("parquet", path, on_bad_row="skip")) == 1
    path.write_bytes(path.read_bytes()[:-20])
    with refused(DataError, path):
        source("parquet", path, on_bad_row="skip")
