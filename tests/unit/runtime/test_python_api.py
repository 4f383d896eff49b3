"""What a Python caller gives a run: functions by name, rows as a file, ids of the Hugging Face cache."""

from __future__ import annotations

import functools
import signal
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from configs import minimal
from failing import refused

from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError, DataError
from trivium.foundation.registry import is_only_here, is_unnamed, name_of, resolve
from trivium.runtime.python_api import beside_a_loop, configured

CONFIG: dict[str, Any] = minimal()


def close(prompt: str, completion: str) -> float:
    return 1.0


class Fixed:
    def __call__(self, prompt: str, completion: str) -> float:
        return 0.5


def test_a_function_of_a_module_is_known_by_its_name() -> None:
    name = name_of(close)
    assert name == f"{__name__}:close"
    assert resolve("rewards", name) is close
    assert not is_only_here(name)


@pytest.mark.parametrize("thing", [lambda prompt, completion: 1.0, functools.partial(close), Fixed()])
def test_what_no_module_has_is_known_to_this_process_alone(thing: Any) -> None:
    name = name_of(thing)
    assert resolve("rewards", name) is thing
    assert is_unnamed(name)
    assert is_only_here(name)


def test_a_name_of_another_script_says_where_it_came_from() -> None:
    with refused(ConfigError, "'__main__:is_of_another_script'"):
        resolve("rewards", "__main__:is_of_another_script")


def test_what_other_processes_cannot_have_is_refused() -> None:
    inner = [{"kind": lambda prompt, completion: 1.0, "workers": 1}]
    with refused(ConfigError, "rewards[0]", "other processes"):
        configured(CONFIG, inner, None)
    with refused(ConfigError, "rewards[0]", "other processes"):
        configured({**CONFIG, "cluster": {"kind": "ray"}}, [lambda prompt, completion: 1.0], None)
    with refused(ConfigError, "rewards[0]", "other processes"):
        configured({**CONFIG, "train": {"own_process": True}}, [lambda prompt, completion: 1.0], None)


def test_classes_functions_and_paths_in_a_config(tmp_path: Path) -> None:
    config, _ = configured({**CONFIG, "run": {"dir": tmp_path}, "rewards": [{"kind": close, "weight": 2}]}, None, None)
    assert config.run.dir == str(tmp_path)
    assert (config.rewards[0].label, config.rewards[0].weight) == ("close", 2)


def test_rows_by_name_beside_sections_and_functions(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "a", "n": 1}, {"question": "b", "n": 2}]
    own = {"template": "{question}?", "answer": "n"}
    base = {**CONFIG, "run": {"dir": str(tmp_path)}, "tasks": {"train": own}}
    given = {"train": datasets.Dataset.from_list(rows), "test": {"kind": "arithmetic"}, "made": list_of_rows}
    config, files = configured(base, None, given)
    assert [section.kind for section in config.tasks.values()] == ["given", "arithmetic", "python"]
    same, (path, *_) = configured(base, None, rows)[0].tasks["train"], files
    assert same == config.tasks["train"], "the same rows have the same hash"
    path.parent.mkdir()
    path.write_text(files[path])
    source = resolve("tasks", "given")(config.tasks["train"], name="train", seed=0)
    assert [(task.prompt[0].content, task.columns["answer"]) for task in (source[0], source[1])] == [
        ("a?", 1),
        ("b?", 2),
    ]
    path.write_text(files[path] + files[path])
    with refused(DataError, "tasks.train", "trivium.run"):
        resolve("tasks", "given")(config.tasks["train"], name="train", seed=0)


def list_of_rows() -> list[dict[str, str]]:
    return [{"prompt": "a"}]


def test_rows_that_are_none(tmp_path: Path) -> None:
    with refused(DataError, "row 1", "int"):
        configured(CONFIG, None, [{"prompt": "a"}, 3])


def test_a_config_as_an_object_is_changed_like_a_mapping() -> None:
    whole = config_from_mapping(CONFIG)
    config, _ = configured(whole, [close], None)
    assert isinstance(config, RunConfig)
    assert (config.rewards[0].label, config.tasks) == ("close", whole.tasks)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with `owner/model` in it, and `owner/torn`, which lacks its weights."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    files = {"models--owner--model": ["config.json", "model.safetensors"], "models--owner--torn": ["config.json"]}
    for name, contents in {**files, "datasets--owner--rows": ["data.jsonl"]}.items():
        snapshot = tmp_path / name / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (tmp_path / name / "refs").mkdir()
        (tmp_path / name / "refs" / "main").write_text("abc")
        for file in contents:
            (snapshot / file).write_text("{}")
    return tmp_path


def test_an_id_of_the_cache_is_the_directory_of_its_version(cache: Path) -> None:
    config = config_from_mapping({**CONFIG, "model": {"path": "owner/model"}})
    assert config.model.model_dump()["path"] == str(cache / "models--owner--model" / "snapshots" / "abc")
    tasks = config_from_mapping({**CONFIG, "tasks": {"train": {"kind": "datasets", "path": "owner/rows"}}}).tasks
    assert tasks["train"].model_dump()["path"] == str(cache / "datasets--owner--rows" / "snapshots" / "abc")


@pytest.mark.parametrize("name", ["owner/missing", "owner/torn"])
def test_an_id_that_the_cache_lacks_names_the_download(cache: Path, name: str) -> None:
    with refused(ConfigError, f"hf download {name}"):
        config_from_mapping({**CONFIG, "model": {"path": name}})
    with refused(ConfigError, "hf download --repo-type dataset owner/none"):
        config_from_mapping({**CONFIG, "tasks": {"train": {"kind": "datasets", "path": "owner/none"}}})


def test_a_path_is_no_id(cache: Path) -> None:
    with refused(ConfigError, "model.path", Path("owner/model").absolute()):
        config_from_mapping({**CONFIG, "model": {"path": "./owner/model"}})


async def test_an_interrupt_beside_a_loop_ends_the_run_in_its_thread() -> None:
    ended, main = threading.Event(), threading.get_ident()

    def work() -> None:
        try:
            signal.pthread_kill(main, signal.SIGINT)
            for _ in range(10_000):  # until the interrupt
                time.sleep(0.001)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        beside_a_loop(work)
    assert ended.is_set()
