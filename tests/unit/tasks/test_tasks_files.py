"""Sources of rows: what becomes prompt, answer, completion and id, and how loudly bad rows are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failing import refused

from trivium.config import build, plugin
from trivium.foundation.errors import DataError, MissingPackage
from trivium.tasks.files import JsonlTasks
from trivium.types import Message

GSM8K = Path(__file__).parents[2] / "data" / "gsm8k" / "train.jsonl"


def source(kind: str, path: Path | str, name: str = "train", **fields: Any) -> Any:
    """A source made the way a run makes it: from a mapping with `kind`."""
    return build("tasks", plugin("tasks")({"kind": kind, "path": str(path), **fields}), name=name, seed=0)


def jsonl(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return jsonl(
        tmp_path / "rows.jsonl",
        {"question": "1+1?", "solution": "so 2 #### 2", "level": 1},
        {"question": "2+2?", "solution": "so 4 #### 4", "level": 2},
        {"question": "3+3?", "solution": "so 6 #### 6", "level": 3},
    )


def test_text_prompt_system_and_columns(rows: Path) -> None:
    tasks = source("jsonl", rows, prompt="question", system="Be brief.")
    assert len(tasks) == 3
    task = tasks[1]
    assert task.prompt == (Message("system", "Be brief."), Message("user", "2+2?"))
    assert task.columns == {"solution": "so 4 #### 4", "level": 2}
    assert task.taskset == "train"


def test_template_fills_columns_and_nested_ones(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"question": "x?", "more": {"unit": "cm"}})
    tasks = source("jsonl", path, template="{question} In {more[unit]}, in \\boxed{{}}.")
    assert tasks[0].prompt == (Message("user", "x? In cm, in \\boxed{}."),)
    assert tasks[0].columns["question"] == "x?"


def test_message_prompt_keeps_its_own_system_message(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    tasks = source("jsonl", jsonl(tmp_path / "a.jsonl", {"prompt": prompt}), system="other")
    assert tasks[0].prompt == (Message("system", "s"), Message("user", "u"))
    assert tasks[0].columns == {}


def test_answer_regex_extracts_and_keeps_the_original(rows: Path) -> None:
    tasks = source("jsonl", rows, prompt="question", answer="solution", answer_regex=r"#### (.*)$")
    assert [task.columns["answer"] for task in (tasks[0], tasks[2])] == ["2", "6"]
    assert tasks[0].columns["solution"] == "so 2 #### 2"


def test_gsm8k_rows() -> None:
    tasks = source("jsonl", GSM8K, prompt="question", answer_regex=r"#### (.*)$", completion="answer")
    assert len(tasks) == 40
    first = tasks[0]
    assert first.prompt[0].content.startswith("Natalia sold clips")
    assert first.columns["answer"] == "72"
    assert first.columns["answer_column"] == first.columns["completion"]
    assert first.columns["completion"].endswith("#### 72")


def test_answer_regex_that_misses_names_the_row(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "p", "answer": "#### 1"}, {"prompt": "q", "answer": "none"})
    with refused(DataError, "a.jsonl:2", "'none'", "####"):
        source("jsonl", path, answer_regex="#### (.*)$")


def test_ground_truth_is_offered_as_answer_only_where_there_is_no_answer(tmp_path: Path) -> None:
    judged = {"style": "rule", "ground_truth": "7"}
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "p", "reward_model": judged, "answer": "8"})
    assert source("jsonl", path)[0].columns["answer"] == "8"
    path = jsonl(tmp_path / "b.jsonl", {"prompt": "p", "reward_model": judged})
    assert source("jsonl", path)[0].columns == {"reward_model": judged, "answer": "7"}


def test_rlhf_parquet_schema(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 5, "split": "train"},
        "seen": date(2024, 1, 2),
    }
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row, row]), path)
    tasks = source("parquet", path)
    assert tasks[0].prompt == (Message("user", "1+1?"),)
    expected = {key: value for key, value in row.items() if key != "prompt"}
    assert tasks[0].columns == {**expected, "seen": "2024-01-02", "answer": "2"}
    assert (len(tasks), tasks.num_duplicates) == (2, 1)


def test_completion_from_text_messages_and_the_prompts_own_column(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "p", "completion": "text"})
    assert source("jsonl", path)[0].columns == {"completion": "text"}
    path = jsonl(tmp_path / "b.jsonl", {"prompt": "p", "reply": chat})
    assert source("jsonl", path, completion="reply")[0].columns == {"reply": chat, "completion": "hello"}
    path = jsonl(tmp_path / "c.jsonl", {"messages": chat})
    task = source("jsonl", path, prompt="messages", completion="messages")[0]
    assert task.prompt == (Message("user", "hi"),)
    assert task.columns == {"completion": "hello"}


def test_ids_follow_content_not_order_prompt_or_taskset(tmp_path: Path) -> None:
    one, two = {"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}
    first = source("jsonl", jsonl(tmp_path / "a.jsonl", one, two))
    second = source("jsonl", jsonl(tmp_path / "b.jsonl", dict(reversed(two.items())), one), name="test", system="s")
    assert [first[0].task_id, first[1].task_id] == [second[1].task_id, second[0].task_id]
    assert first[0].task_id != first[1].task_id


def test_duplicate_ids_are_made_unique_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": str(n), "key": key} for n, key in enumerate(["a", "a", "a-2", 7])))
    tasks = source("jsonl", path, id="key")
    assert [task.task_id for task in tasks] == ["a", "a-2", "a-2-2", "7"]
    assert tasks.num_duplicates == 2


def test_skip_and_limit(rows: Path) -> None:
    tasks = source("jsonl", rows, prompt="question", skip=1, limit=1)
    assert [task.prompt[0].content for task in tasks] == ["2+2?"]
    with refused(DataError, "'train'", "skipping 9"):
        source("jsonl", rows, prompt="question", skip=9)


def test_bom_blank_lines_and_line_separators_inside_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n{"prompt": "c"}')
    assert [task.prompt[0].content for task in source("jsonl", path)] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("content", "fields", "names"),
    [
        (b"", {}, ("no rows",)),
        (b'{"prompt": "a"}\n{"prompt": \n', {}, ("JSON", "a.jsonl:2")),
        (b'{"prompt": "\xff"}\n', {}, ("JSON", "a.jsonl:1")),
        (b"[1, 2]\n", {}, ("a.jsonl:1", "a list", "jq")),
        (b'[\n{"prompt": "1"}\n]\n', {}, ("a.jsonl:1", "a list")),
        ('{"prompt": "caf\u00e9"}\n'.encode("latin-1"), {}, ("'\\xe9'", "UTF-8", "iconv")),
        (b'{"promt": "a"}\n', {}, ("'prompt'", "a.jsonl:1", "'promt'")),
        (b'{"prompt": "a"}\n', {"id": "key"}, ("'key'",)),
        (b'{"prompt": "a", "key": 1.5}\n', {"id": "key"}, ("'key'", "1.5")),
        (b'{"prompt": "a"}\n', {"answer": "solution"}, ("'solution'", "the answer")),
        (b'{"prompt": "a"}\n', {"answer_regex": "x"}, ("'answer'", "the answer")),
        (b'{"prompt": "a"}\n', {"completion": "reply"}, ("'reply'", "expert's")),
        (b'{"prompt": "a"}\n', {"template": "{question}"}, ("KeyError", "'question'")),
        (b'{"prompt": 3}\n', {}, ("'prompt'", "a list")),
        (b'{"prompt": []}\n', {}, ("'prompt'", "a list")),
        (b'{"prompt": [{"role": "user", "content": "a", "name": "n"}]}\n', {}, ("message 0", "name")),
        (b'{"prompt": [{"role": "bot", "content": "a"}]}\n', {}, ("role", "bot")),
        (b'{"prompt": [{"role": "assistant", "content": "a"}]}\n', {}, ("completion: prompt",)),
        (b'{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}\n', {}, ("'completion'", "'user'")),
        (b'{"prompt": "a", "x": NaN}\n', {}, ("a.jsonl:1", "'x'", "nan")),
        (b'{"prompt": "a", "answer": "1", "answer_column": 0, "s": "2"}\n', {"answer": "s"}, ("'answer_column'",)),
    ],
)
def test_bad_rows_are_refused_by_name(
    tmp_path: Path, content: bytes, fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with refused(DataError, *names):
        source("jsonl", path, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "{}"}, "a template names columns"),
        ({"template": "no column"}, "a template names columns"),
        ({"template": "{open"}, "expected '}'"),
        ({"template": "{q}", "prompt": "q"}, "not both"),
        ({"answer_regex": "("}, "not a regular expression"),
        ({"limit": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_read(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonlTasks.Config(kind="jsonl", path="nowhere.jsonl", **fields)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_a_missing_path_is_named(tmp_path: Path, kind: str) -> None:
    with refused(DataError, "tasks.train.path", tmp_path / "nowhere"):
        source(kind, tmp_path / "nowhere")


def test_parquet_names_row_and_column_of_a_value_without_json_form(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "raw": [None, b"bytes"]}), path)
    with refused(DataError, "row 1", "'raw'", "bytes"):
        source("parquet", path)


def test_a_file_that_is_not_parquet(rows: Path) -> None:
    with refused(DataError, rows):
        source("parquet", rows)


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("datasets", "datasets")])
def test_a_missing_package_says_what_to_install(
    rows: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with refused(MissingPackage, package, "trivium[data]"):
        source(kind, rows)


def test_datasets_saved_to_disk_with_and_without_splits(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}])
    two = datasets.Dataset.from_list([{"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": "3"}])
    one.save_to_disk(tmp_path / "one")
    assert source("datasets", tmp_path / "one")[0].columns == {"answer": "1"}
    with refused(DataError, "`split`", tmp_path / "one"):
        source("datasets", tmp_path / "one", split="train")
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(tmp_path / "both")
    assert len(source("datasets", tmp_path / "both", split="test")) == 2
    with refused(DataError, "test, train"):
        source("datasets", tmp_path / "both")
    with refused(DataError, "'tst'", "'test'"):
        source("datasets", tmp_path / "both", split="tst")


def test_datasets_reads_a_folder_of_files_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "train.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})
    tasks = source("datasets", folder)
    assert [task.prompt[0].content for task in tasks] == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with refused(DataError, tmp_path / "empty"):
        source("datasets", tmp_path / "empty")


def test_a_folder_of_files_may_have_several_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    parts = [f"  - config_name: {name}\n    data_files: {name}.jsonl\n" for name in ("main", "other")]
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(parts)}---\n")
    for name in ("main", "other"):
        (folder / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n')
    assert source("datasets", folder, subset="other")[0].prompt[0].content == "other"
    with refused(DataError, "main"):
        source("datasets", folder)
