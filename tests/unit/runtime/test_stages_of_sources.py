"""Stages with several sources: each is judged by its own rewards, which are found wherever rewards are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs import configured
from failing import refused

from tests.sessions import RENDERER
from trivium.checkpoint.store import CheckpointStore
from trivium.config.machine import Machine
from trivium.config.memory_estimate import plan_batch
from trivium.config.sources import algorithm_kinds, rewards_of
from trivium.engines.scripted import ScriptedEngine
from trivium.errors import RunDirError
from trivium.explorer import Explorer
from trivium.inspection.replay_stage import remote_rewards, without_rewards
from trivium.runtime.build import build_explorer
from trivium.runtime.preflight import preflight
from trivium.runtime.stage import Stage
from trivium.runtime.stage_models import stage_problems, with_reward_models

ARITHMETIC = {"kind": "arithmetic"}
TAUGHT = {"kind": "opsd", "teacher": {"context": ["Hint: {answer}"]}}

KINDS = ("dapo", "echo")


def explorer_of(tmp_path: Path, sources: list[dict[str, Any]], **sections: Any) -> Explorer:
    tasks = {"train": sources, "test": ARITHMETIC}
    stage = Stage(configured(tasks=tasks, **sections), 0, 0, True, tmp_path, tmp_path)
    stage.__dict__["renderer"] = RENDERER
    engine = ScriptedEngine(
        ScriptedEngine.Config(replies=((1,),)), eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode
    )
    return build_explorer(stage, engine=engine)


def test_an_evaluation_needs_no_rewards_of_a_source_that_reads_none(tmp_path: Path) -> None:
    taught = {"name": "taught", "tasks": ARITHMETIC, "rewards": [], "algorithm": TAUGHT}
    sources = [taught, {"name": "sums", "tasks": ARITHMETIC}]
    explorer = explorer_of(tmp_path, sources, evaluation={"taskset": "test"})
    assert [each.must_judge for each in explorer.sources.values()] == [False, True]
    assert explorer.must_judge


def test_sources_with_equal_rewards_share_a_judge(tmp_path: Path) -> None:
    sources: list[dict[str, Any]] = [
        {"name": "sums", "tasks": ARITHMETIC},
        {"name": "same", "tasks": ARITHMETIC, "rewards": ["exact"]},
        {"name": "other", "tasks": ARITHMETIC, "rewards": ["format"]},
        {"name": "rows", "tasks": ARITHMETIC, "completion": "completion", "algorithm": "sft"},
    ]
    for evaluation in ({"taskset": "test"}, None):
        explorer = explorer_of(tmp_path, sources, evaluation=evaluation)
        sums, same, other, rows = (each.judge for each in explorer.sources.values())
        assert sums is same
        assert len({id(each) for each in (sums, other, rows)}) == 3
        assert explorer.judge is (sums if evaluation else rows), "rows and a stage without evaluation judge nothing"


def test_a_reward_model_of_a_stage_may_reward_a_source(tmp_path: Path) -> None:
    judged = {"name": "judged", "tasks": ARITHMETIC, "rewards": [{"kind": "model", "stage": "judge"}]}
    train = {"train": [judged, {"name": "sums", "tasks": ARITHMETIC}]}
    config = configured(stages=[{"name": "jugde"}, {"tasks": train}])
    (problem,) = stage_problems(config)
    assert problem.where == "stages[1].tasks.train[0].rewards"
    assert "'jugde'" in problem.do
    with refused(RunDirError, "'judge'"):
        with_reward_models(config.stage_configs()[1], ["judge", ""], [], CheckpointStore(tmp_path))


def test_rewards_of_servers_are_found_in_sources() -> None:
    served = [{"kind": "remote", "urls": ["http://127.0.0.1:9/none"], "name": "served"}, "exact"]
    sources = [{"name": "x", "tasks": ARITHMETIC, "rewards": served}, {"name": "sums", "tasks": ARITHMETIC}]
    config = configured(tasks={"train": sources})
    assert remote_rewards(config) == ["served"]
    kept = rewards_of(without_rewards(config, ["served"]))
    assert [[each.label for each in rewards] for rewards in kept.values()] == [["exact"], ["exact"]]


def test_the_plan_reads_the_algorithms_of_sources() -> None:
    sources = [{"name": kind, "tasks": ARITHMETIC, "algorithm": {"kind": kind, "mini_batches": 2}} for kind in KINDS]
    config = configured(tasks={"train": sources}, algorithm={"kind": "gspo", "mini_batches": 4})
    assert plan_batch(config, 1).mini_batches == 2
    assert algorithm_kinds(config) == "dapo, echo"


def test_sections_of_sources_are_checked_on_this_machine(tmp_path: Path) -> None:
    token = {"kind": "remote", "urls": ["http://192.0.2.1/"], "token_variable": "TOKEN", "name": "served"}
    sources = [
        {"name": "x", "tasks": ARITHMETIC, "rewards": [token], "algorithm": "echo"},
        {"name": "y", "tasks": ARITHMETIC, "rewards": [token], "algorithm": "grpo"},
    ]
    run = {"run": {"dir": str(tmp_path / "run")}, "cluster": {"threads": 1}}
    found = preflight(configured(tasks={"train": sources}, algorithm="echo", **run), Machine(1 << 34), 1)
    expected = ["tasks.train/x.rewards[0].urls", "tasks.train/x.algorithm.observation_coef"]
    assert sorted(each.where for each in found.warnings if "tasks" in each.where) == sorted(expected)
    assert not [each for each in found.warnings if each.where.startswith("algorithm")]
