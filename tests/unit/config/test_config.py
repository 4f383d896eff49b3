"""The config language: every problem at once, the nearest name, extends, overrides, stages, and what follows."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from failing import refused

from trivium.config import (
    RunConfig,
    check,
    config_from_mapping,
    load_config,
    merged,
    parse_override,
    read_yaml,
)
from trivium.config.hints import keys_of_other_trainers
from trivium.config.resume import as_begun, fingerprint, resume_changes, resume_differences, to_yaml
from trivium.foundation.errors import ConfigError
from trivium.planning.plan import plan_run
from trivium.runtime.stage import Stage
from trivium.text.tiny import TinyModel
from trivium.types import Sampling

PARTS = """
from pydantic import Field
from trivium.config import (
    AlgorithmConfig, BufferConfig, Config, ConfigPath, EngineConfig, Plugin, RewardConfig, TrainConfig, WorkflowConfig,
    free,
)

class Model:
    class Config(Plugin):
        path: ConfigPath

class Tasks:
    class Config(Plugin):
        size: int = Field(default=4, ge=1)

class Optimizer(Config):
    lr: float = Field(default=0.1, gt=0)

class Train:
    class Config(TrainConfig):
        optimizer: Optimizer = Optimizer()
        tokens_per_micro_batch: int = free(1024)
        rows: int | None = free(None, chosen=True)

class Play:
    class Config(WorkflowConfig):
        max_turns: int = 1

class Engine:
    class Config(EngineConfig):
        slots: int = 8

class Learn:
    class Config(AlgorithmConfig):
        clip: float = 0.2

class Supervise:
    class Config(AlgorithmConfig):
        epochs: int = 1

class Buffer:
    class Config(BufferConfig):
        pass

class Exact:
    class Config(RewardConfig):
        column: str = "answer"

def constant(prompt, completion, **columns):
    return 1.0
"""

RUN = """
model: {kind: parts.py:Model, path: weights}
tasks: {train: {kind: parts.py:Tasks}, test: {kind: parts.py:Tasks, size: 2}}
workflow: {kind: parts.py:Play}
rewards: [{kind: parts.py:Exact, weight: 0.5}, parts.py:constant]
engine: {kind: parts.py:Engine, sampling: {max_new_tokens: 16}}
algorithm: {kind: parts.py:Learn}
train: {kind: parts.py:Train}
buffer: {kind: parts.py:Buffer}
schedule: {steps: 10, groups_per_step: 4, group_size: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def problems_of(folder: Path, change: str = "", overrides: tuple[str, ...] = ()) -> dict[str, str]:
    """Where -> full text of every problem of the run with this change."""
    (folder / "changed.yaml").write_text("extends: run.yaml\n" + textwrap.dedent(change))
    with refused(ConfigError) as caught:
        load_config(folder / "changed.yaml", overrides)
    assert str(caught.value).count("  - ") == len(caught.value.problems)
    return {problem[0]: str(problem) for problem in caught.value.problems}


def load(folder: Path, change: str = "", overrides: tuple[str, ...] = ()) -> RunConfig:
    (folder / "changed.yaml").write_text("extends: run.yaml\n" + textwrap.dedent(change))
    return load_config(folder / "changed.yaml", overrides)


# --------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("change", "where", "name"),
    [
        ("schedule: {group_sise: 4}", "schedule.group_sise", "'group_size'"),
        ("shedule: {steps: 1}", "shedule", "'schedule'"),
        *((f"{name}: {{kind: nonesuch}}", name, "known: ") for name in ("engine", "algorithm", "buffer", "workflow")),
        ("rewards: [{kind: parts.py:constant, column: x}]", "rewards[0].column", "known: kind, name, weight"),
        ("engine: {kind: nowhere.py:Engine}", "engine", "nowhere.py"),
        ("engine: {sampling: {temperature: 0}}", "engine.sampling.temperature", ""),
        ("sync: {offset: 1}\nschedule: {max_staleness: 0}", "sync.offset", ""),
        ("sync: {offset: 1}\nschedule: {max_staleness: 2}", "sync.offset", ""),
        ("sync: {method: memry}", "sync.method", "memory"),
        ("evaluation: {taskset: tset}", "evaluation.taskset", "'test'"),
        ("evaluation: {every: 2}", "evaluation.every", ""),
        ("evaluation: {taskset: test, k: [1, 4]}", "evaluation.k", ""),
        *(
            (f"schedule: {{until: {{metric: {metric}, above: 1}}}}", "schedule.until.metric", words)
            for metric, words in (
                ("train/nothing", "docs/metrics.md"),
                ("time/step", "machine"),
                ("eval/test/reward", "evaluation.taskset"),
            )
        ),
        ("schedule: {until: {metric: reward/mean}}", "schedule.until", "above"),
        ("evaluation: {taskset: test, observations: true}", "evaluation.observations", "engine.kind torch"),
        (
            "evaluation: {taskset: test, observations: true}\nengine: {kind: torch}\nworkflow: {kind: single_turn}",
            "evaluation.observations",
            "'single_turn'",
        ),
        ("evaluation: {taskset: test, samples: 4, sampling: {temperature: 0}}", "evaluation.samples", ""),
        ("evaluation: {taskset: test, every: 3}\nsync: {interval: 2, offset: 0}", "evaluation.every", ""),
        ("tasks: {test: {kind: jsonl, path: nowhere.jsonl}}", "tasks.test.path", "nowhere.jsonl"),
        ("tasks: {test: {kind: parquet, path: nowhere.parquet}}", "tasks.test.path", "nowhere.parquet"),
        ("tasks: {test: {kind: datasets, path: nowhere}}", "tasks.test.path", "nowhere"),
        ("tasks: {test: {kind: python, source: nowhere.py:rows}}", "tasks.test.source", "nowhere.py"),
        ("tasks: {test: {kind: python, source: parts.py:rows}}", "tasks.test.source", "'rows'"),
        ("model: {kind: hf, path: nowhere}", "model.path", "nowhere"),
        ("model: {kind: hf, path: .}", "model.path", ""),
        *((f"run: {{explorer: {name}}}", "run.explorer", name) for name in ("trainer", "a/b", "a b")),
    ],
)
def test_what_cannot_be_read_or_meant_is_named(folder: Path, change: str, where: str, name: str) -> None:
    found = problems_of(folder, change)
    assert list(found) == [where]
    assert name in found[where]


def test_all_problems_are_reported_at_once_also_those_inside_plugins(folder: Path) -> None:
    found = problems_of(
        folder,
        """
        schedule: {groups_per_step: 0, typo: 1}
        engine: {slotz: 4, sampling: {temperature: -1}}
        train: {optimizer: {lr: 0, betas: 1}}
        tasks: {train: {size: none}}
        rewards: [{kind: parts.py:Exact, colum: x}, {kind: grpo}]
        """,
    )
    assert set(found) == {
        "schedule.groups_per_step",
        "schedule.typo",
        "engine.slotz",
        "engine.sampling.temperature",
        "train.optimizer.lr",
        "train.optimizer.betas",
        "tasks.train.size",
        "rewards[0].colum",
        "rewards[1]",
    }
    assert "did you mean 'slots'?" in found["engine.slotz"]
    assert "did you mean 'column'?" in found["rewards[0].colum"]
    assert "known: lr" in found["train.optimizer.betas"]


def test_missing_sections_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("run: {seed: 1}\n")
    with refused(ConfigError) as caught:
        load_config(tmp_path / "empty.yaml")
    assert [problem[0] for problem in caught.value.problems] == ["model", "tasks"]


def test_problems_of_every_stage_are_reported_before_the_first_runs(folder: Path) -> None:
    found = problems_of(
        folder,
        """
        stages:
          - {schedule: {steps: 1}}
          - {schedule: {stepz: 1}}
          - {engine: {sampling: {temperature: 0}}}
          - {model: {path: elsewhere}}
        """,
    )
    assert set(found) == {"stages[1].schedule.stepz", "stages[2].engine.sampling.temperature", "stages[3].model"}


@pytest.mark.parametrize(
    ("text", "says"),
    [("[1, 2]", "mapping"), ("a: [", "line 1"), ("extends: bad.yaml", "itself")],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with refused(ConfigError, "bad.yaml", says):
        load_config(tmp_path / "bad.yaml")


def test_an_error_in_the_file_of_a_plugin_is_reported_with_its_place(folder: Path) -> None:
    (folder / "broken.py").write_text("from trivium.config.schema import RunSection\nRunSection(seed='x')\n")
    problem = problems_of(folder, "engine: {kind: broken.py:Engine}")["engine"]
    assert "ValidationError" in problem
    assert "seed" in problem
    assert "broken.py:2)" in problem
    (folder / "broken.py").write_text("def f(x y): pass\n")
    (folder / "broken2.py").write_text("import no_such_package_at_all\n")
    problems = problems_of(folder, "rewards: [broken2.py:f]\nengine: broken.py:f")
    assert "SyntaxError" in problems["engine"]
    assert "no_such_package_at_all" in problems["rewards[0]"]
    assert "broken2.py:1)" in problems["rewards[0]"]


def test_sections_that_do_not_read_hide_what_is_wrong_with_their_company_and_say_so(folder: Path) -> None:
    with refused(ConfigError, "schedule.stepz", "further checks"):
        load(folder, "schedule: {stepz: 1}\nsync: {method: memry}")
    with refused(ConfigError) as caught:
        load(folder, "sync: {method: memry}")
    assert "further checks" not in str(caught.value)


# --------------------------------------------------------------------------- the sections' company


@pytest.mark.parametrize("setting", ["top_p: 0.9", "top_k: 5", "min_p: 0.1", "min_new_tokens: 2"])
def test_training_refuses_sampling_of_which_the_engine_does_not_record_what_it_keeps(
    folder: Path, setting: str
) -> None:
    name = setting.partition(":")[0]
    assert set(problems_of(folder, f"engine: {{sampling: {{{setting}}}}}")) == {f"engine.sampling.{name}"}
    kept = plan_run(load(folder, f"engine: {{kind: torch, sampling: {{{setting}}}}}"), cores=1).text.stages[0].recorded
    assert kept is not None
    assert name in kept
    load(folder, f"evaluation: {{taskset: test, sampling: {{{setting}}}}}")  # evaluation has nothing to replay


@pytest.mark.parametrize(
    ("change", "staleness"),
    [
        ("", 0),
        ("schedule: {max_staleness: 2}", 2),
        ("sync: {interval: 3, offset: 0}", 2),
        ("sync: {interval: 3, offset: 1}", 3),
        ("{schedule: {max_staleness: 3}, sync: {interval: 3, offset: 1}}", 3),
    ],
)
def test_offset_is_another_way_to_say_max_staleness(folder: Path, change: str, staleness: int) -> None:
    (folder / "changed.yaml").write_text(yaml.safe_dump({"extends": "run.yaml", **(yaml.safe_load(change) or {})}))
    assert load_config(folder / "changed.yaml").max_staleness == staleness


def test_an_interval_that_would_deadlock_is_refused(folder: Path) -> None:
    found = problems_of(folder, "sync: {interval: 3}", ("schedule.max_staleness=1",))
    assert "at least 2" in found["schedule.max_staleness"]
    assert load(folder, "sync: {interval: 3}", ("schedule.max_staleness=2",)).max_staleness == 2


def test_a_run_without_a_training_taskset_is_refused(folder: Path) -> None:
    text = RUN.replace("train: {kind: parts.py:Tasks}, test", "trian: {kind: parts.py:Tasks}, test")
    (folder / "run.yaml").write_text(text)
    assert "did you mean 'trian'?" in problems_of(folder)["tasks"]


def test_somebody_must_judge_what_is_explored(folder: Path) -> None:
    nobody = "rewards: []\nworkflow: {kind: single_turn}\n"
    assert set(problems_of(folder, nobody + "buffer: {kind: memory}")) == {"rewards"}
    load(folder, nobody + "buffer: {kind: files}")  # nothing is explored
    load(folder, "rewards: []\nbuffer: {kind: memory}")  # the workflow may earn


def test_cores_are_divided_where_engine_and_trainer_compute_at_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivium.runtime.stage.usable_cores", lambda: 8)

    def threads(change: str) -> int:
        return Stage(load(folder, change), 0, 0, True, folder, folder).threads

    ahead, apart = "schedule: {max_staleness: 1}\n", "train: {kind: torch, own_process: true}\n"
    assert (threads(""), threads(ahead), threads(apart)) == (8, 8, 8)
    assert threads(ahead + apart) == 4
    assert threads(ahead + apart + "cluster: {threads: 3}\n") == 3
    assert threads(ahead + apart + "cluster: {kind: ray}\n") == 8


def test_a_users_buffer_that_declares_nothing_has_explorers_everywhere(folder: Path) -> None:
    """The checks, a run in one process and a run on Ray read one declaration with one default."""
    (folder / "mine.py").write_text(
        "from trivium.config import BufferConfig\nfrom trivium.types import Capabilities\n\n\n"
        "class Mine:\n    class Config(BufferConfig):\n        pass\n\n\n"
        "class Filled(Mine):\n    capabilities = Capabilities(explored=False)\n"
    )

    def explorers(change: str) -> int:
        return Stage(load(folder, change), 0, 0, True, folder, folder).num_explorers

    ray = "cluster: {kind: ray, explorers: 3}\n"
    mine, filled = "buffer: {kind: mine.py:Mine}\n", "buffer: {kind: mine.py:Filled}\n"
    assert (explorers(mine), explorers(mine + ray)) == (1, 3)
    assert (explorers(filled), explorers(filled + ray)) == (0, 0)
    unrewarded = "rewards: []\nworkflow: {kind: single_turn}\n"
    assert set(problems_of(folder, unrewarded + mine)) == {"rewards"}
    load(folder, unrewarded + filled)
    apart = "run: {mode: train}\nsync: {method: checkpoint}\n"
    assert "only one process can use it" in problems_of(folder, apart + mine)["buffer.kind"]
    load(folder, apart + filled)


@pytest.mark.parametrize(
    ("module", "section"),
    [
        ("pyarrow", "{kind: parquet, path: parts.py}"),
        ("datasets", "{kind: datasets, path: .}"),
        ("reasoning_gym", "{kind: reasoning_gym, environments: {gcd: {}}}"),
    ],
)
def test_a_package_that_is_not_there_is_noticed_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, section: str
) -> None:
    load(folder, f"tasks: {{test: {section}}}")
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install" in problems_of(folder, f"tasks: {{test: {section}}}")["tasks.test"]


def test_a_good_config_has_no_problems(folder: Path) -> None:
    assert check(load(folder)) == []


# --------------------------------------------------------------------------- the language


def test_extends_and_overrides_are_laid_over_one_another(folder: Path) -> None:
    config = load(folder, "schedule: {steps: 20}\nrewards: [parts.py:constant]", ("schedule.steps=30", "run.seed=7"))
    assert (config.schedule.steps, config.schedule.groups_per_step, config.run.seed) == (30, 4, 7)
    assert [reward.label for reward in config.rewards] == ["constant"]  # lists are replaced, not joined


def test_a_section_that_changes_its_kind_starts_afresh(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN.replace("{kind: parts.py:Learn}", "{kind: parts.py:Learn, clip: 0.1}"))
    config = load(folder, "algorithm: {kind: parts.py:Supervise, epochs: 2}")
    assert config.algorithm.model_dump(exclude={"kind"}) == {"epochs": 2}


@pytest.mark.parametrize(
    ("between", "epochs"),
    [("run.seed=1", 2), ("algorithm.kind=parts.py:Learn", 2), ("algorithm={kind: parts.py:Learn}", 1)],
)
def test_a_kind_on_the_command_line_drops_no_key_given_with_it(folder: Path, between: str, epochs: int) -> None:
    overrides = ("algorithm.epochs=2", between, "algorithm.kind=parts.py:Supervise")
    section = load(folder, "algorithm: {kind: parts.py:Learn}", overrides).algorithm.model_dump()
    assert (section["kind"].rpartition(":")[2], section["epochs"]) == ("Supervise", epochs)


def test_naming_the_kind_of_a_section_that_had_not_drops_none_of_its_keys() -> None:
    assert merged({"engine": {"sampling": 1}}, {"engine": {"kind": "torch"}}) == {
        "engine": {"kind": "torch", "sampling": 1}
    }


def test_merging_does_not_touch_its_inputs() -> None:
    base: dict[str, Any] = {"a": {"b": [1]}}
    merged(base, {"a": {"c": 2}})["a"]["b"].append(2)
    assert base == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("a.b=c", {"a": {"b": "c"}}),
        ("a=1e-3", {"a": "1e-3"}),  # YAML 1.1 reads this as text; pydantic makes it the number
        ("a.b.c=[1, two]", {"a": {"b": {"c": [1, "two"]}}}),
        ("a=", {"a": None}),
        ("a=x=y", {"a": "x=y"}),
    ],
)
def test_overrides_are_read_as_yaml(text: str, meaning: dict[str, Any]) -> None:
    assert parse_override(text) == meaning


@pytest.mark.parametrize("text", ["a.b", "=1", "a=[1"])
def test_an_override_that_is_none(text: str) -> None:
    with refused(ConfigError, repr(text)):
        parse_override(text)


def test_scientific_notation_is_a_number(folder: Path) -> None:
    assert load(folder, overrides=("train.optimizer.lr=1e-5",)).train.model_dump()["optimizer"]["lr"] == 1e-5


def test_extends_follows_folders(folder: Path) -> None:
    (folder / "more").mkdir()
    (folder / "more" / "long.yaml").write_text("extends: ../run.yaml\nschedule: {steps: 99}\n")
    assert read_yaml(folder / "more" / "long.yaml")["schedule"] == {"steps": 99, "groups_per_step": 4, "group_size": 2}


def test_relative_paths_start_at_the_config_and_not_at_the_caller(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    config = load(
        folder,
        """
        stages:
          - {rewards: [{kind: parts.py:constant}], tasks: {train: {size: 3}}}
          - {algorithm: {kind: parts.py:Supervise}}
        """,
    )
    assert config.model.model_dump()["path"] == str(folder / "weights")
    first, second = config.stage_configs()
    assert first.rewards[0].kind == f"{folder}/parts.py:constant"
    assert first.tasks["train"].model_dump()["size"] == 3
    assert [second.tasks["train"].model_dump()["size"], second.algorithm.kind] == [4, f"{folder}/parts.py:Supervise"]


def test_a_config_cannot_be_written_to(folder: Path) -> None:
    config = load(folder)
    with pytest.raises(ValueError, match="frozen"):
        config.schedule.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


# --------------------------------------------------------------------------- what follows


def test_the_plan_counts_steps_across_stages(folder: Path) -> None:
    stages = "stages: [{schedule: {steps: 5, group_size: 1}}, {schedule: {steps: 2}}]"
    plan = plan_run(load(folder, stages), cores=6)
    text = plan.text
    assert [(stage.first_step, stage.last_step) for stage in text.stages] == [(1, 5), (6, 7)]
    assert [stage.trajectories_per_step for stage in text.stages] == [4, 8]
    assert [stage.slots for stage in text.stages] == [20, 8]
    assert text.stages[1].max_response_tokens_per_step == 8 * 16
    assert (text.total_steps, text.threads) == (7, 6)
    assert yaml.safe_load(plan.to_yaml())["total_steps"] == 7


@pytest.mark.parametrize(
    "change",
    [
        "",
        "sync: {interval: 2, offset: 1}",
        "stages: [{schedule: {steps: 3}}, {}]",
        "evaluation: {taskset: train, every: 3}\nstages: [{schedule: {steps: 3}}, {evaluation: null}]",
    ],
)
def test_a_saved_config_reads_back_as_the_same_config(folder: Path, change: str) -> None:
    config = load(folder, change)
    again = config_from_mapping(yaml.safe_load(to_yaml(config)), folder / "somewhere")
    assert [stage.model_dump() for stage in again.stage_configs()] == [c.model_dump() for c in config.stage_configs()]


def test_a_resumed_run_may_change_length_and_budgets_and_nothing_else(folder: Path) -> None:
    saved = yaml.safe_load(to_yaml(load(folder)))
    free = ("schedule.steps=50", "train.tokens_per_micro_batch=9", "checkpoint.save_every=1", "monitors=[]")
    assert resume_differences(saved, load(folder, overrides=(*free, "run.dir=elsewhere"))) == []
    same = ("run.seed=1", "train.optimizer.lr=0.2", "tasks.train.size=9", "engine.sampling.temperature=0.5")
    assert {problem[0] for problem in resume_differences(saved, load(folder, overrides=same))} == {
        change.partition("=")[0] for change in same
    }


def test_an_evaluation_that_samples_as_the_engine_is_no_second_difference(folder: Path) -> None:
    evaluated = "evaluation: {taskset: train}"
    saved = yaml.safe_load(to_yaml(load(folder, evaluated)))
    (problem,) = resume_differences(saved, load(folder, evaluated, ("engine.sampling.temperature=0.5",)))
    assert problem.where == "engine.sampling.temperature"


def test_a_resumed_run_keeps_what_it_chose(folder: Path) -> None:
    stages = "stages: [{schedule: {steps: 1}}, {train: {rows: 5}}, {train: {optimizer: {lr: 0.5}}}]"
    saved = yaml.safe_load(to_yaml(load(folder, stages)))
    saved["train"]["rows"] = 7

    def rows(*overrides: str) -> list[int | None]:
        config = as_begun(saved, load(folder, stages, overrides))
        return [cast(Any, stage.train).rows for stage in config.stage_configs()]

    assert rows() == [7, 5, 7]
    assert rows("train.rows=9") == [9, 5, 9]
    again = load(folder, stages, ("train.rows=9",))
    assert as_begun(saved, again) is again


def test_what_a_resumed_run_may_change_only_if_told_to(folder: Path) -> None:
    stages = "stages: [{{schedule: {{steps: 1}}}}, {{rewards: [{{kind: parts.py:Exact, weight: {0}, column: {1}}}]}}]"
    saved = yaml.safe_load(to_yaml(load(folder, stages.format(0.5, "answer"))))
    (problem,) = resume_differences(saved, load(folder, stages.format(2.0, "answer")))
    assert (problem.where, problem.found) == ("rewards[0].weight", "the run began with 0.5")
    assert "pass --change" in problem.do
    change = ("run.change=true",)
    told = load(folder, stages.format(2.0, "answer"), change)
    assert resume_differences(saved, told) == []
    assert [d[:3] for d in resume_changes(saved, told)] == [("stages[1].rewards[0].weight", 0.5, 2.0)]
    (problem,) = resume_differences(saved, load(folder, stages.format(2.0, "other"), change))
    assert problem.where == "rewards[0].column"
    assert resume_changes(saved, load(folder, stages.format(0.5, "answer"), change)) == []


def test_separate_commands_agree_on_what_a_resumed_run_may_not_change_and_on_its_length(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("machine") / "another"
    shutil.copytree(folder, elsewhere)
    here = fingerprint(load_config(folder / "run.yaml", ["cluster.threads=1"]))
    assert fingerprint(load_config(elsewhere / "run.yaml", ["run.dir=there", "run.explorer=a"])) == here
    for change in ("train.optimizer.lr=0.5", "train.tokens_per_micro_batch=9"):  # the trainer's alone
        assert fingerprint(load_config(folder / "run.yaml", [change])) == here, change
    for change in ("run.seed=7", "schedule.steps=999", "schedule.max_staleness=6", "engine.sampling.temperature=2.0"):
        other = fingerprint(load_config(folder / "run.yaml", [change]))
        where = change if change.startswith("schedule.steps") else change.partition(".")[0]
        assert {name for name in here if other[name] != here[name]} == {where.partition("=")[0]}


def test_commands_of_one_run_may_reach_its_buffer_by_other_addresses(folder: Path) -> None:
    one, other = (
        fingerprint(load_config(folder / "run.yaml", ["buffer.kind=sql", f"buffer.url=postgresql://{server}/runs"]))
        for server in ("trainer", "10.0.0.7:5433")
    )
    assert one == other
    assert one["buffer"] != fingerprint(load_config(folder / "run.yaml"))["buffer"]


def test_a_resumed_run_notices_another_taskset_reward_or_kind(folder: Path) -> None:
    saved = yaml.safe_load(to_yaml(load(folder)))
    changed = load(
        folder,
        """
        tasks: {extra: {kind: parts.py:Tasks}}
        rewards: [parts.py:constant]
        algorithm: {kind: parts.py:Supervise}
        """,
    )
    assert {problem[0] for problem in resume_differences(saved, changed)} == {
        "tasks",
        "rewards",
        "algorithm.kind",
        "algorithm.epochs",
    }


def test_a_saved_config_that_no_longer_reads_is_a_problem_and_not_a_crash(folder: Path) -> None:
    saved = yaml.safe_load(to_yaml(load(folder)))
    saved["schedule"]["grop_size"] = 3
    (problem,) = resume_differences(saved, load(folder))
    assert problem.where == "the saved config.schedule.grop_size"


def test_a_stage_may_grow_when_a_run_resumes_but_not_change(folder: Path) -> None:
    saved = yaml.safe_load(to_yaml(load(folder, "stages: [{schedule: {steps: 1}}, {schedule: {steps: 2}}]")))
    longer = load(folder, "stages: [{schedule: {steps: 1}}, {schedule: {steps: 9}}]")
    assert resume_differences(saved, longer) == []
    other = load(folder, "stages: [{schedule: {steps: 1}}, {schedule: {steps: 2, group_size: 8}}]")
    assert [problem[0] for problem in resume_differences(saved, other)] == ["schedule.group_size"]
    fewer = load(folder, "stages: [{schedule: {steps: 1}}]")
    assert [problem[0] for problem in resume_differences(saved, fewer)] == ["stages"]


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "binary": (b"\x7fELF\x00\xff", "not valid YAML"),
    "a date that there is not": (b"run: {name: 2024-13-45}", "month must be in 1..12"),
    "a number of 5,000 digits": (b"run: {seed: 1" + b"0" * 5000 + b"}", "not valid YAML"),
    "extends a number": (b"extends: 5\n", "extends: 5"),
    "extends a list": (b"extends: [a, b]\n", "name one file"),
    "extends a directory": (b"extends: .\n", "Is a directory"),
    "extends a NUL": (b'extends: "a\\0b"\n', "embedded null"),
    "nested lists": (b"model: " + b"[" * 700 + b"]" * 700, "nested hundreds of levels deep"),
    "nested mappings": (b"model: " + b"{a: " * 600 + b"1" + b"}" * 600, "nested hundreds of levels deep"),
    "a value within itself": (b"model: &a {b: *a}\n", "nested hundreds of levels deep"),
}


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_file_that_cannot_be_read_is_a_problem_of_the_config(tmp_path: Path, content: str) -> None:
    text, problem = UNREADABLE[content]
    (tmp_path / "config.yaml").write_bytes(text)
    with refused(ConfigError, problem):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("override", ["a=" + "[" * 700, ".".join("a" * 2000) + "=1", "a=2024-13-45"])
def test_an_override_that_cannot_be_read_is_one_too(tmp_path: Path, override: str) -> None:
    (tmp_path / "config.yaml").write_text("run: {seed: 1}")
    with refused(ConfigError):
        load_config(tmp_path / "config.yaml", [override])


def test_what_no_file_and_no_array_could_hold_is_refused_by_key() -> None:
    data = {
        "serve": {"model": "half \ud800"},
        "schedule": {"steps": 10**400},
        "stages": [{"run": {"seed": -(2**63) - 1}}],
    }
    with refused(ConfigError) as caught:
        config_from_mapping(data)
    assert [problem.where for problem in caught.value.problems] == [
        "serve.model",
        "schedule.steps",
        "stages[0].run.seed",
    ]
    assert "one of about 400 digits" in str(caught.value)


# --------------------------------------------------------------------------- what other trainers' users write


def test_every_key_that_a_hint_names_exists() -> None:
    pages = [(Path(__file__).parents[3] / "docs" / page).read_text() for page in ("config.md", "algorithms.md")]
    for theirs, ours in keys_of_other_trainers().items():
        for path in re.findall(r"\b[a-z_]+(?:\[\])?(?:\.[a-z_]+)+", ours):
            last = path.rpartition(".")[2]
            assert any(f"`{path}`" in page or f"`{last}`" in page for page in pages), f"{theirs} -> {path}"
        top = re.match(r"[a-z]+", ours)
        assert top is not None
        assert top[0] in RunConfig.model_fields, ours


def test_keys_of_other_trainers_are_met_with_ours(folder: Path) -> None:
    problems = problems_of(folder, "schedule: {num_generations: 8}\nactor_rollout_ref: {rollout: {n: 8}}")
    assert "num_generations is schedule.group_size here" in problems["schedule.num_generations"]
    assert "rollout.n is schedule.group_size here" in problems["actor_rollout_ref"]
    assert "did you mean 'actor" not in problems["actor_rollout_ref"]


def test_the_keys_of_an_optional_section_are_known(folder: Path) -> None:
    problem = problems_of(folder, "schedule: {curriculum: {columm: x}}")["schedule.curriculum.columm"]
    assert "did you mean 'column'? known: column, easy_first, kind, spread" in problem
    assert "success_rate" in problems_of(folder, "schedule: {curriculum: x}")["schedule.curriculum"]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--steps", "3"), "write schedule.steps=3"),
        (("--group-size=8",), "write schedule.group_size=8"),
        (("--steps",), "write schedule.steps=..."),
        (("--learning_rate", "1e-5"), "learning_rate is train.optimizer.lr here"),
        (("--nonsense", "run.seed=1"), "section.field=..."),
    ],
)
def test_an_option_that_is_a_config_value(folder: Path, options: tuple[str, ...], hint: str) -> None:
    with refused(ConfigError, "no such", hint):
        load(folder, overrides=options)


# --------------------------------------------------------------------------- places in lists, and no effect


def test_overrides_reach_into_lists(folder: Path) -> None:
    stages = "stages: [{schedule: {steps: 2}}, {schedule: {steps: 3}}]"
    config = load(folder, stages, ("stages.1.schedule.steps=7", "rewards.1.weight=3"))
    assert [stage.schedule.steps for stage in config.stage_configs()] == [2, 7]
    assert [(reward.label, reward.weight) for reward in config.rewards] == [("Exact", 0.5), ("constant", 3.0)]
    for wrong in ("stages.2", "rewards.first"):
        with refused(ConfigError, wrong, "0 to 1"):
            load(folder, stages, (f"{wrong}.weight=1",))


def test_keys_laid_over_a_kind_keep_the_kind(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN.replace("{kind: parts.py:Learn}", "parts.py:Learn"))
    assert load(folder, "algorithm: {clip: 0.3}").algorithm.model_dump()["clip"] == 0.3


def test_null_switches_evaluation_off_and_an_empty_section_does_not(folder: Path) -> None:
    evaluated = "evaluation: {taskset: test, every: 2}"
    off = load(folder, evaluated, ("evaluation=null",))
    assert off.evaluation.taskset is None
    assert off.stage_configs()[0].evaluation.taskset is None
    staged = load(folder, f"{evaluated}\nstages: [{{evaluation: null}}, {{schedule: {{steps: 3}}}}]")
    assert [stage.evaluation.taskset for stage in staged.stage_configs()] == [None, "test"]
    with refused(ConfigError, "evaluation=null"):
        load(folder, evaluated, ("evaluation={}",))
    with refused(ConfigError, "engine.sampling=null"):
        load(folder, "engine: {sampling: {}}")
    assert "no effect" in problems_of(folder, "evaluation: {}")["evaluation"]
    stage = problems_of(folder, f"{evaluated}\nstages: [{{evaluation: {{}}}}]")
    assert "changes no key" in stage["stages[0]"]
    best = problems_of(folder, "checkpoint: {keep_best: eval/test/reward}")["checkpoint.keep_best"]
    assert "checkpoint.keep_best=null" in best


def test_evaluation_samples_as_the_engine_does_unless_set(folder: Path) -> None:
    def sampling(section: str) -> Sampling:
        config = load(folder, f"engine: {{sampling: {{stop: [x], temperature: 0.7}}}}\nevaluation: {section}")
        return config.evaluation.sampling.sampling(config.engine.sampling, config.evaluation.samples)

    assert sampling("{taskset: test}") == Sampling(max_new_tokens=16, temperature=0.0, stop=("x",))
    assert sampling("{taskset: test, samples: 4}").temperature == 0.7
    own = sampling("{taskset: test, sampling: {max_new_tokens: 5, temperature: 0.3, top_p: 0.9, stop: []}}")
    assert own == Sampling(max_new_tokens=5, temperature=0.3, top_p=0.9, stop=())


def test_an_unset_learning_rate_follows_from_what_a_stage_trains(tmp_path: Path) -> None:
    """An adapter of a pretrained model learns nothing with the rate of all weights, nor do random weights."""

    def rates(model: dict[str, Any], **sections: Any) -> list[float]:
        run = {"run": {"dir": str(tmp_path)}, "tasks": {"train": {"kind": "arithmetic"}}, "rewards": ["exact"]}
        config = config_from_mapping({**run, "model": model, "schedule": {"steps": 1}, **sections})
        again = config_from_mapping(config.model_dump(mode="json", exclude_unset=True))
        stages = [stage.train.model_dump()["optimizer"]["lr"] for stage in config.stage_configs()]
        assert stages == [stage.train.model_dump()["optimizer"]["lr"] for stage in again.stage_configs()]
        assert "1e-" not in str(config.model_dump(exclude_unset=True).get("train"))
        return stages

    random = {"kind": "tiny", "alphabet": "0123456789+="}
    made = TinyModel(TinyModel.Config.model_validate(random), seed=0).materialize(tmp_path / "model")
    pretrained = {"kind": "hf", "path": str(made)}
    adapter = {"train": {"lora": {"rank": 2}, "optimizer": {"warmup_steps": 2}}}
    assert rates(pretrained) == [1e-6]
    assert rates(pretrained, **adapter) == [1e-4]
    assert rates(random) == rates(random, **adapter) == [1e-3]
    assert rates(pretrained, **adapter, stages=[{}, {"train": {"lora": None}}]) == [1e-4, 1e-6]
    assert rates(random, train={"optimizer": {"lr": 0.0005}}) == [0.0005]
