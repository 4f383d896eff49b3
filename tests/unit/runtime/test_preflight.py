"""What is found before a run begins: rows, completions, rewards, tokenizers, devices, packages."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from failing import refused
from PIL import Image

from trivium.config import config_from_mapping, merged
from trivium.config.resume import resume_differences, to_yaml
from trivium.foundation.errors import ConfigError
from trivium.planning.machine import Machine
from trivium.runtime import launch
from trivium.runtime.preflight import Findings, preflight
from trivium.runtime.train_engines import check_vocabulary
from trivium.tasks.drawings import png
from trivium.text.renderer import renderer_of
from trivium.text.tiny import TinyModel
from trivium.types import Message

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}, {"prompt": "4+4=", "answer": "8"}]
TINY = {
    "kind": "tiny",
    "alphabet": "0123456789+=",
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "mlp": 16,
    "max_position": 24,
}


def look(
    folder: Path, rows: list[dict[str, Any]], change: Mapping[str, Any], gpus: int = 0, ranks: int | None = None
) -> Findings:
    """What is found out about a run on these rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "run": {"dir": str(folder / "run")},
        "model": TINY,
        "tasks": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
        "rewards": ["exact"],
        "engine": {"sampling": {"max_new_tokens": 4}},
        "train": {"optimizer": {"lr": 1e-3}},
        "cluster": {"threads": 1},
        "schedule": {"steps": 1, "groups_per_step": 1, "group_size": 2},
    }
    config = config_from_mapping(merged(base, change), folder)
    findings = preflight(config, Machine(1 << 34, (1 << 34,) * gpus), ranks or config.cluster.ranks)
    written = {path.name for path in folder.iterdir()} - {"__pycache__"}  # of mine.py, unless Python writes none
    assert written == {"rows.jsonl"} | {path.name for path in folder.glob("m*")}
    return findings


def test_a_good_run_has_nothing_to_report(tmp_path: Path) -> None:
    findings = look(tmp_path, ROWS, {})
    assert (findings.problems, findings.warnings) == ([], [])


def test_rows_without_the_column_of_a_reward_are_counted(tmp_path: Path) -> None:
    lacking = [*ROWS, {"prompt": "5+5="}]
    findings = look(tmp_path, lacking, {})
    assert findings.problems == []
    assert [w.where for w in findings.warnings] == ["tasks.train"]
    assert "1 of 4 do not: reward 'exact' lacks answer" in findings.warnings[0].found
    assert look(tmp_path, lacking, {"workflow": {"max_failed_fraction": 0.1}}).warnings == []
    (problem,) = look(tmp_path, lacking, {"workflow": {"max_failed_fraction": 0.1}}).problems
    assert "1 of 4" in problem.found


SHARED: dict[str, Any] = {"buffer": {"kind": "sql", "url": "sqlite:///m.db"}, "sync": {"method": "checkpoint"}}
EXPERT = {"algorithm": "sft", "buffer": "files", "schedule": {"group_size": 1, "steps": 2}, "rewards": []}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1="}, "column 'completion' is None"),
        ({"prompt": "1+1=", "completion": "1" * 20}, "1 of 2 do not: task"),
    ],
)
def test_completions_of_an_expert_are_looked_at(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    good = {"prompt": "2+3=", "completion": "5"}
    assert look(tmp_path, [good], EXPERT).problems == []
    (problem,) = look(tmp_path, [good, row], EXPERT).problems
    assert words in problem.found
    assert problem.where == "tasks.train"


def pictured(level: int, size: int = 28) -> dict[str, Any]:
    data = png(np.full((size, size, 3), level, np.uint8))
    return {"prompt": "<image>1+1=", "answer": "2", "images": [base64.b64encode(data).decode()]}


def damaged(level: int) -> dict[str, Any]:
    row = pictured(level)
    return {**row, "images": [base64.b64encode(base64.b64decode(row["images"][0])[:-200]).decode()]}


VISION = {"model": {**TINY, "kind": "tiny_vision", "hidden": 32, "heads": 4, "vision_layers": 1}}


def test_images_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = merged(VISION, {"workflow": {"max_image_pixels": 900}})
    good = look(tmp_path, [pictured(n) for n in range(4)], change)
    assert (good.problems, good.warnings) == ([], [])
    for first in (256, 1):
        monkeypatch.setattr("trivium.runtime.preflight._FIRST_IMAGES", first)
        bad = look(tmp_path, [*(pictured(n) for n in range(4)), damaged(5), pictured(6, 31)], change)
        (found,) = {w.found for w in bad.warnings}
        assert "2 of 6 do not" in found
        assert "missing or damaged image" in found
    fatal = look(tmp_path, [damaged(5)], change)
    assert ["1 of 1 do not" in p.found for p in fatal.problems] == [True]


def test_a_damaged_image_in_a_late_row_is_found_or_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JPEG that is cut off has whole headers, and no checksum."""
    file = io.BytesIO()
    Image.effect_noise((28, 28), 80).save(file, "JPEG")
    late = {**pictured(9), "images": [base64.b64encode(file.getvalue()[:-300]).decode()]}
    rows = [*(pictured(n % 200) for n in range(399)), late]
    (found,) = (w.found for w in look(tmp_path, rows, VISION).warnings)
    assert "1 of 400 do not" in found
    monkeypatch.setattr("trivium.runtime.preflight._DECODING_S", 0.0)
    (found,) = (w.found for w in look(tmp_path, rows, VISION).warnings)
    assert "400 tasks have images of which only headers and checksums were checked" in found


def test_images_for_a_model_that_reads_text_are_a_problem(tmp_path: Path) -> None:
    findings = look(tmp_path, [pictured(1)], {})
    assert "this model reads text only" in findings.problems[0].found


def test_rows_that_no_step_takes_and_the_engines_context_do_not_count(tmp_path: Path) -> None:
    good = [{"prompt": f"{n}+1=", "completion": "5"} for n in range(3)]
    assert look(tmp_path, good, {**EXPERT, "engine": {"max_context": 4}}).problems == []  # nothing is sampled
    in_order = {**EXPERT, "schedule": {"group_size": 1, "steps": 3, "shuffle": False}}
    rows = [*good, {"prompt": "1+1=", "completion": "1" * 20}]
    assert look(tmp_path, rows, in_order).problems == []
    (problem,) = look(tmp_path, rows, merged(in_order, {"schedule": {"steps": 4}})).problems
    assert "1 of 4 do not: task" in problem.found


MADE = """
from trivium.config import Plugin
from trivium.types import Message, Task

class Endless:
    Config = Plugin
    def __init__(self, config, *, name, seed):
        self.name = name
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        assert index < 10_000, "a task that no step takes was made"
        return Task(str(index), (Message("user", "1+1="),), {"answer": "2"}, self.name)

class NeedsGpu:
    def __init__(self, config):
        raise RuntimeError("this machine has none")
    def __call__(self, prompt, completion, answer):
        return 0.0
"""


def test_held_out_rows_are_looked_at_like_those_that_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2="}\n')
    rows = [{"prompt": "2+3=", "completion": "5"}]
    tasks: dict[str, dict[str, Any]] = {"later": {"kind": "jsonl", "path": "m.jsonl"}}
    (problem,) = look(tmp_path, rows, {**EXPERT, "tasks": tasks, "evaluation": {"held_out": "later"}}).problems
    assert problem.where == "tasks.later"
    assert "column 'completion' is None" in problem.found
    tasks["later"]["limit"] = 1
    assert look(tmp_path, rows, {**EXPERT, "tasks": tasks, "evaluation": {"held_out": "later"}}).problems == []


def test_a_source_that_makes_its_tasks_is_not_read_to_its_end(tmp_path: Path) -> None:
    made = tmp_path / "made.py"
    made.write_text(MADE)
    (tmp_path / "m").mkdir()
    tasks = {"tasks": {"train": {"kind": f"{made.rename(tmp_path / 'm' / 'made.py')}:Endless"}}}
    findings = look(tmp_path, ROWS, tasks)
    assert (findings.problems, findings.warnings) == ([], [])
    (problem,) = look(tmp_path, ROWS, {**tasks, "engine": {"max_context": 4}}).problems
    assert "1000 of 1000 do not" in problem.found


@pytest.mark.parametrize("elsewhere", [{"cluster": {"kind": "ray"}}, SHARED | {"run": {"mode": "train"}}])
def test_a_reward_is_not_built_where_it_is_not_called(tmp_path: Path, elsewhere: dict[str, Any]) -> None:
    (tmp_path / "m").mkdir()
    made = tmp_path / "m" / "made.py"
    made.write_text(MADE)
    rewards = {"rewards": [{"kind": f"{made}:NeedsGpu"}]}
    assert look(tmp_path, ROWS, {**rewards, **elsewhere}).problems == []
    with pytest.raises(RuntimeError, match="has none"):
        look(tmp_path, ROWS, rewards)
    (problem,) = look(tmp_path, [{"prompt": "1+1="}], {**rewards, **elsewhere}).problems
    assert "lacks answer" in problem.found


def test_a_curriculum_needs_its_column(tmp_path: Path) -> None:
    (problem,) = look(tmp_path, ROWS, {"schedule": {"curriculum": {"column": "difficulty"}}}).problems
    assert "'difficulty'" in problem.found


def test_a_model_directory_without_a_tokenizer(tmp_path: Path) -> None:
    model = config_from_mapping({"model": TINY, "tasks": {"train": "arithmetic"}, "rewards": ["exact"]}).model
    assert isinstance(model, TinyModel.Config)
    directory = TinyModel(model, seed=0).materialize(tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    (problem,) = look(tmp_path, ROWS, {"model": {"kind": "hf", "path": str(directory)}}).problems
    assert problem.where == "model"
    assert "tokenizer" in problem.asked


def test_model_directories_without_what_is_usual(tmp_path: Path) -> None:
    base = TinyModel(TinyModel.Config.model_validate(TINY), seed=0).materialize(tmp_path / "model")

    def found_in(file: str, without: str = "", **values: Any) -> Findings:
        """With this change of a file of the directory; it is restored afterwards."""
        text = (base / file).read_text()
        kept = {key: value for key, value in json.loads(text).items() if key != without}
        (base / file).write_text(json.dumps({**kept, **values}))
        findings = look(tmp_path, ROWS, {"model": {"kind": "hf", "path": str(base)}})
        (base / file).write_text(text)
        return findings

    size = json.loads((base / "config.json").read_text())["vocab_size"]
    fine = [found_in("tokenizer_config.json", without="pad_token"), found_in("config.json", without="pad_token_id")]
    fine.append(found_in("config.json", vocab_size=size + 64))
    assert [each.problems + each.warnings for each in fine] == [[], [], []]
    assert renderer_of(base).render([Message("user", "1+1=")]).tokens.max() < size
    for change in ({"vocab_size": size - 3}, {"pad_token_id": size}):
        (problem,) = found_in("config.json", **change).problems
        assert problem.where == "model"
        assert str(change.get("vocab_size", size)) in problem.found.replace(",", "").split()
    (warning,) = found_in("config.json", vocab_size=size - 1, pad_token_id=0).warnings
    assert "'<|unk|>'" in warning.found, "a token that no text needs"
    (base / "generation_config.json").unlink()
    assert found_in("config.json").problems == []
    (base / "chat_template.jinja").unlink()
    (problem,) = found_in("config.json").problems
    assert (problem.where, "model.chat_template" in problem.do) == ("model", True)


def test_a_teacher_with_another_token_is_refused_by_a_check_and_by_training(tmp_path: Path) -> None:
    config = config_from_mapping({"model": TINY, "tasks": {"train": "arithmetic"}, "rewards": ["exact"]}).model
    assert isinstance(config, TinyModel.Config)
    policy, teacher = (TinyModel(config, seed=0).materialize(tmp_path / name) for name in ("model", "mentor"))
    check_vocabulary(teacher, policy)
    (teacher / "added_tokens.json").write_text(json.dumps({"<x>": 100}))
    with refused(ConfigError, teacher, policy):
        check_vocabulary(teacher, policy)
    change = {
        "model": {"kind": "hf", "path": str(policy)},
        "algorithm": {"kind": "distill", "teacher": {"path": str(teacher)}},
    }
    assert "algorithm.teacher" in [problem.where for problem in look(tmp_path, ROWS, change).problems]


def test_prompts_that_the_chat_template_refuses_are_counted(tmp_path: Path) -> None:
    model = config_from_mapping({"model": TINY, "tasks": {"train": "arithmetic"}, "rewards": ["exact"]}).model
    assert isinstance(model, TinyModel.Config)
    directory = TinyModel(model, seed=0).materialize(tmp_path / "model")
    template = (
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no such role') }}"
        "{% endif %}{{ message.content }}{% endfor %}"
    )
    change = {"model": {"kind": "hf", "path": str(directory), "chat_template": template}}
    user = {"role": "user", "content": "1+1="}
    rows = [*ROWS, {"prompt": [{"role": "system", "content": "+"}, user], "answer": "2"}]
    findings = look(tmp_path, rows, change)
    assert findings.problems == []
    (warning,) = findings.warnings
    assert "1 of 4 do not: task" in warning.found
    assert "no such role" in warning.found
    (problem,) = look(tmp_path, rows[3:], change).problems
    assert "1 of 1 do not: task" in problem.found


def test_processes_beyond_the_gpus_there_are(tmp_path: Path) -> None:
    ray = {"cluster": {"kind": "ray", "ranks": 4}}
    (problem,) = look(tmp_path, ROWS, ray, gpus=2).problems
    assert (problem.where, problem.found) == ("cluster.ranks", "there are 2")
    assert look(tmp_path, ROWS, ray, gpus=4).problems == []
    assert look(tmp_path, ROWS, ray).problems == []  # train.device auto is the CPU
    (problem,) = look(tmp_path, ROWS, {"train": {"device": "cuda"}}).problems
    assert problem.where == "train.device"
    elsewhere = {"cluster": {"kind": "ray", "ranks": 4, "address": "auto"}, "train": {"device": "cuda"}}
    assert look(tmp_path, ROWS, elsewhere).problems == []


def test_devices_of_the_other_half_of_a_run_are_not_looked_for_here(tmp_path: Path) -> None:
    cuda = SHARED | {"engine": {"device": "cuda"}, "train": {"device": "cuda"}}
    for mode, where in (("train", "train.device"), ("explore", "engine.device")):
        (problem,) = look(tmp_path, ROWS, cuda | {"run": {"mode": mode}}).problems
        assert problem.where == where


def test_an_engine_on_the_cpu_beside_a_trainer_on_a_gpu_is_told(tmp_path: Path) -> None:
    cuda = SHARED | {"engine": {"device": "cpu"}, "train": {"device": "cuda"}, "run": {"mode": "explore"}}
    (warning,) = look(tmp_path, ROWS, cuda).warnings
    assert warning.where == "engine.device"
    assert "GPU" in warning.asked
    assert look(tmp_path, ROWS, cuda | {"train": {"device": "cpu"}}).warnings == []


def test_engines_and_ranks_on_ray_have_a_gpu_each(tmp_path: Path) -> None:
    ray = {"cluster": {"kind": "ray", "ranks": 2, "engines": 2}, "train": {"device": "cuda"}}
    (problem,) = look(tmp_path, ROWS, ray | {"engine": {"device": "cuda"}}, gpus=3).problems
    assert (problem.where, problem.found) == ("cluster.engines", "there are 3")
    assert look(tmp_path, ROWS, ray | {"engine": {"device": "cuda"}}, gpus=4).problems == []
    wide = ray | {"engine": {"kind": "vllm", "device": "cuda", "tensor_parallel_size": 2}}
    assert "engine.tensor_parallel_size" in {each.where for each in look(tmp_path, ROWS, wide, gpus=1).problems}
    asked = {each.where: each.asked for each in look(tmp_path, ROWS, wide, gpus=5).problems}
    assert asked["cluster.engines"] == "6 GPUs for engines and ranks"
    assert "cluster.engines" not in {each.where for each in look(tmp_path, ROWS, wide, gpus=6).problems}
    auto = look(tmp_path, ROWS, ray | {"engine": {"device": "auto"}}, gpus=3)
    (warning,) = auto.warnings
    assert (auto.problems, warning.where) == ([], "engine.device")
    assert "the engines sample on the CPU" in warning.found


def test_ranks_whose_gpus_no_engine_uses_are_told(tmp_path: Path) -> None:
    wide = {"engine": {"kind": "vllm", "device": "cpu", "tensor_parallel_size": 2}}
    told = [{warning.where for warning in look(tmp_path, ROWS, wide, ranks=ranks).warnings} for ranks in (1, 2, 3, 4)]
    assert ["engine.tensor_parallel_size" in each for each in told] == [False, False, True, False]


def test_a_run_that_named_what_is_left_to_the_machine_now_continues(tmp_path: Path) -> None:
    tasks = {"train": {"kind": "arithmetic", "max_operand": 9}}
    mapping = {"run": {"dir": str(tmp_path / "run")}, "model": TINY, "tasks": tasks, "rewards": ["exact"]}
    config = config_from_mapping(mapping)
    saved = yaml.safe_load(to_yaml(config))
    assert (saved["engine"]["device"], saved["train"]["dtype"]) == ("auto", "auto")
    for section in ("engine", "train"):
        saved[section] |= {"device": "cpu", "dtype": "float32"}  # as they were saved when these were the defaults
    del saved["train"]["frozen_dtype"]
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert bool(resume_differences(saved, config)) == (here == "cuda")
    saved["engine"]["dtype"] = "bfloat16"
    (problem,) = resume_differences(saved, config_from_mapping({**mapping, "engine": {"device": "cpu"}}))
    assert problem.where == "engine.dtype"


def test_ranks_on_other_machines_need_no_gpu_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"train": {"kind": "arithmetic", "max_operand": 9}}
    mapping = {"run": {"dir": str(tmp_path / "run")}, "model": TINY, "tasks": tasks, "rewards": ["exact"]}
    config = config_from_mapping({**mapping, "train": {"device": "cuda", "optimizer": {"lr": 1e-3}}})
    monkeypatch.setattr(launch, "machine", lambda: Machine(1 << 34, (1 << 34,) * 2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launch.ready(config).warnings == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with refused(ConfigError, "2"):
        launch.ready(config)


def test_what_every_stage_shares_is_reported_once(tmp_path: Path) -> None:
    stages = {"stages": [{"schedule": {"steps": 1}}, {"schedule": {"steps": 2}}], "engine": {"max_context": 5}}
    findings = look(tmp_path, ROWS, stages)
    assert [problem.where for problem in findings.problems] == ["stages[0].tasks.train"]


REWARDS = """
def declared(prompt: str, completion: str, answer: str) -> float:
    return float(answer in completion)

def compared(prompt, completion, answer):
    return float(answer == completion.strip().lower())

def converts(prompt, completion, answer, tools=None):
    return float(int(completion or 0) == answer)
"""


@pytest.mark.parametrize("reward", ["declared", "compared"])
def test_rows_that_cannot_earn_a_reward_by_type_are_counted(reward: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [*ROWS, {"prompt": "4+4=", "answer": 8}]
    (warning,) = look(tmp_path, rows, {"rewards": [f"mine.py:{reward}"]}).warnings
    assert "1 of 4 have others: answer is 8 of type int, but reward" in warning.found
    assert look(tmp_path, rows, {"rewards": ["mine.py:converts"]}).warnings == []
    assert look(tmp_path, rows, {}).warnings == [], "`exact` compares the text of the answer"


TRIED = """
import os, time

def nothing(prompt, completion, answer): ...
def listed(prompt, completion): return [1.0]
def nan(prompt, completion): return float("nan")
def raises(prompt, completion, answer): return answer / 2
def shared(prompt, completions): return 1.0
def exits(prompt, completion): os._exit(3)

def branch(prompt, completion, answer):
    if completion == answer: return 1.0
def slow(prompt, completion): time.sleep(60)
def unreachable(prompt, completion): raise ConnectionError("refused")

def boxed(prompt, completion, answer): return float(completion.split("boxed{")[1].rstrip("}.") == answer)
def second(prompt, completion, answer): return 1.0 / (int(answer) - 2)
def each(prompt, completions, answer): return [float(text == answer) for text in completions]
def prints(prompt, completion): print("graded"); return 0.0
async def remote(prompt, completion): raise AssertionError("a call that may cost something")
class Built:
    def __init__(self, config): ...
    def __call__(self, prompt, completion): raise AssertionError("a call that may cost something")
"""


@pytest.mark.parametrize(
    ("reward", "problems", "words"),
    [
        ("nothing", 1, "None"),
        ("listed", 1, "[1.0]"),
        ("nan", 1, "nan"),
        ("raises", 1, "mine.py:7"),
        ("shared", 1, "1.0"),
        ("exits", 1, "code 3"),
        ("branch", 0, "None"),
        ("slow", 0, "0.5 s"),
        ("unreachable", 0, "ConnectionError"),
        *((reward, 0, "") for reward in ("boxed", "second", "each", "remote", "Built")),
    ],
)
def test_a_reward_function_is_called_before_a_run(
    reward: str, problems: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivium.rewards.trial._DEADLINE_S", 0.5 if reward == "slow" else 60.0)
    (tmp_path / "mine.py").write_text(TRIED)
    findings = look(tmp_path, ROWS, {"rewards": [f"mine.py:{reward}"]})
    told = findings.problems + findings.warnings
    assert (len(findings.problems), [each.where for each in told]) == (problems, ["rewards"] if words else [])
    for each in told:
        assert reward in each.asked
        assert words in each.found
        assert each.do


def test_a_reward_is_called_where_and_as_the_run_calls_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(TRIED)
    broken = {"rewards": ["mine.py:nothing"]}
    allowed = look(tmp_path, ROWS, broken | {"workflow": {"max_failed_fraction": 1}})
    assert (len(allowed.problems), len(allowed.warnings)) == (0, 1), "the run would go on"
    assert look(tmp_path, ROWS, broken | {"cluster": {"kind": "ray"}}).problems == []
    in_process = {"rewards": [{"kind": "mine.py:nothing", "workers": 1}]}
    assert [each.where for each in look(tmp_path, ROWS, in_process).problems] == ["rewards"]
    labels = {"kind": "recipe", "components": broken["rewards"] + ["exact"], "labels": {"b": {"nothing": 1.0}}}
    labels["labels"] |= {"a": {"exact": 1.0}}
    rows = [{**row, "label": "a"} for row in ROWS]
    assert look(tmp_path, rows, {"rewards": [labels]}).problems == []
    (problem,) = look(tmp_path, [*rows, {**ROWS[0], "label": "b"}], {"rewards": [labels]}).problems
    assert problem.where == "rewards"
    capfd.readouterr()
    assert look(tmp_path, ROWS, {"rewards": ["mine.py:prints"]}).problems == []
    assert capfd.readouterr() == ("", "graded\n"), "the output of check is a plan"


def test_names_of_tools_that_the_workflow_lacks_are_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    rows = [{**row, "tools": [name]} for row, name in zip(ROWS, ("add", "ad", "add"), strict=True)]
    tools = {"workflow": {"kind": "tools", "tools": ["mine.py:add"]}}
    (warning,) = look(tmp_path, rows, tools).warnings
    assert "1 of 3" in warning.found
    assert "'ad'" in warning.found
    assert "add" in warning.do.split()
    assert look(tmp_path, rows[:1], tools).warnings == []


def test_an_adapter_of_layers_that_the_model_lacks_is_a_problem_of_the_config(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    TinyModel(TinyModel.Config.model_validate(TINY), seed=0).materialize(directory)

    def problems(**lora: Any) -> list[str]:
        change = {"model": {"kind": "hf", "path": str(directory)}, "train": {"lora": lora}}
        return [problem.where for problem in look(tmp_path, ROWS, change).problems]

    assert problems(targets=["q_proj"]) == problems(targets="all-linear") == problems(exclude=["q_proj"]) == []
    assert problems(targets=["lm_head"]) == ["train.lora"]
    assert problems(targets=["c_attn"]) == problems(targets=["q_proj", "k_porj"]) == ["train.lora.targets"]
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    assert "train.lora" in problems(targets=["q_proj"]), "no traceback"


def test_what_has_no_effect_is_announced(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    tools = [{**row, "tools": [{"name": "add"}]} for row in ROWS]
    (warning,) = look(tmp_path, tools, {}).warnings
    assert "3 of 3 have others: a column `tools`, which neither the workflow nor a reward reads" in warning.found
    assert look(tmp_path, tools, {"rewards": ["mine.py:converts"]}).warnings[:1] != [warning]
    named = {"tasks": {"train": {"kind": "jsonl", "path": "rows.jsonl", "id": "answer"}}}
    (warning,) = look(tmp_path, [*ROWS, ROWS[0]], named).warnings
    assert "1 of 4 have others: an id of column 'answer' that occurred before" in warning.found
    (warning,) = look(tmp_path, ROWS, {"engine": {"sampling": {"max_new_tokens": 24}}}).warnings
    assert (warning.where, warning.found) == (
        "engine.sampling.max_new_tokens",
        "the context has 24 tokens, prompts included",
    )
    assert look(tmp_path, ROWS, {"engine": {"sampling": {"max_new_tokens": 16}}}).warnings == []


def test_a_context_that_leaves_fewer_tokens_than_completions_may_have_is_announced(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "1+1+1+1+1=", "answer": "5"}]
    roomy = {"max_new_tokens": 11}
    assert look(tmp_path, rows, {"engine": {"sampling": roomy}}).warnings == []
    (warning,) = look(tmp_path, rows, {"engine": {"sampling": {"max_new_tokens": 12}}}).warnings
    assert warning.where == "engine.sampling.max_new_tokens"
    assert "1 of 4" in warning.found
    assert "11 after the longest, of 13 tokens" in warning.found
    (warning,) = look(tmp_path, rows, {"engine": {"max_context": 15}}).warnings
    assert "2 after the longest" in warning.found
    tasks = {"tasks": {"test": {"kind": "jsonl", "path": "rows.jsonl"}}}
    own = {"evaluation": {"taskset": "test", "sampling": {"max_new_tokens": 12}}}
    (warning,) = look(tmp_path, rows, merged(tasks, own)).warnings
    assert warning.where == "evaluation.sampling.max_new_tokens"


def test_an_empty_prompt_is_named_by_its_row(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": " ", "answer": "8"}, {"prompt": [{"role": "user", "content": ""}], "answer": "8"}]
    findings = look(tmp_path, rows, {"tasks": {"train": {"kind": "jsonl", "path": "rows.jsonl", "skip": 1}}})
    (warning,) = (each for each in findings.warnings if "row" in each.found)
    assert (findings.problems, warning.where) == ([], "tasks.train")
    assert "2 of 4" in warning.found
    assert "row 4 " in warning.found
    rows = [{"prompt": prompt, "completion": "5"} for prompt in ("", "2+3=")]
    (warning,) = look(tmp_path, rows, EXPERT).warnings
    assert "row 1 " in warning.found
    assert look(tmp_path, rows[:1], EXPERT).warnings == [], "texts without prompts"
    directory = TinyModel(TinyModel.Config.model_validate(TINY), seed=0).materialize(tmp_path / "model")
    plain = {"model": {"kind": "hf", "path": str(directory), "chat_template": "plain"}}
    many = [{"prompt": f"{n}+{n}=", "answer": "2"} for n in range(300)]
    findings = look(tmp_path, [*many[:140], {"prompt": "", "answer": "2"}, *many[140:]], plain)
    assert ["row 141" in warning.found for warning in findings.warnings] == [True, True]


def test_the_row_of_the_file_is_named_after_others_are_left_out(tmp_path: Path) -> None:
    bad, long = {"question": "no prompt"}, {"prompt": "1+" * 60, "answer": "2"}
    rows: list[Any] = [ROWS[0], bad, long, ROWS[1], {"prompt": "", "answer": "8"}, bad, {**ROWS[2], "answer": None}]

    def numbers(lines: list[Any], **keys: Any) -> list[str]:
        section = {"kind": "jsonl", "path": "rows.jsonl", "on_bad_row": "skip", **keys}
        changes = {"tasks": {"train": section}, "workflow": {"max_failed_fraction": 0.9}}
        found = [each.found for each in look(tmp_path, lines, changes).warnings]
        return sorted(re.findall(r"row (\d+)(?:: reward| is empty)", " ".join(found)))

    dropped = {"max_tokens": 40, "on_overlong": "drop"}
    for keys in ({}, dropped, {"skip": 1}, {"skip": 3, **dropped}):
        assert numbers(rows, **keys) == ["5", "7"], keys
    assert numbers([row for row in rows if row != bad], **dropped) == ["4", "5"]


def test_random_weights_with_a_rate_for_fine_tuning_are_reported(tmp_path: Path) -> None:
    (warning,) = look(tmp_path, ROWS, {"train": {"optimizer": {"lr": 1e-6}}}).warnings
    assert (warning.where, warning.do) == ("train.optimizer.lr", "set train.optimizer.lr to about 1e-3")
    directory = TinyModel(TinyModel.Config.model_validate(TINY), seed=0).materialize(tmp_path / "model")
    trained = {"model": {"kind": "hf", "path": str(directory)}, "train": {"optimizer": {"lr": 1e-6}}}
    assert look(tmp_path, ROWS, trained).warnings == []


def test_threads_asked_for_in_another_way_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (warning,) = look(tmp_path, ROWS, {"cluster": {"threads": 2}}).warnings
    assert (warning.where, warning.do) == ("cluster.threads", "set cluster.threads: 1 for that")
    assert look(tmp_path, ROWS, {"cluster": {"threads": 1}}).warnings == []
