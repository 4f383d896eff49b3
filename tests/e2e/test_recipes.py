"""Every recipe runs, a few steps of each stage, and what it plays is what it says it plays."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Forked, fork_train_processes
from trivium.algorithms.batches import batch_of
from trivium.buffers.journal import Journal
from trivium.config import RunConfig, config_from_mapping, merged, read_yaml
from trivium.foundation.metrics import declared
from trivium.runtime.build import build_buffer, build_schedule, shares_buffer
from trivium.runtime.export import export
from trivium.runtime.launch import run
from trivium.runtime.stage import Stage
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.types import Group

RECIPES = Path(__file__).parents[2] / "recipes"
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k"
STEPS = 2
SMALLER: dict[str, dict[str, Any]] = {
    "apart.yaml": {"tasks": {"test": {"count": 20}}, "schedule": {"max_staleness": 0}},  # in one process, for once
    "arithmetic.yaml": {"tasks": {"test": {"count": 20}}},
    "gsm8k.yaml": {
        "tasks": {name: {"path": str(GSM8K / f"{name}.jsonl"), "limit": 8} for name in ("train", "test")},
        "engine": {"sampling": {"max_new_tokens": 16}},
        "evaluation": {"sampling": {"max_new_tokens": 16}},
    },
    "guess.yaml": {},
    "lora.yaml": {},
    "own_reward/run.yaml": {},
    "reasoning_gym.yaml": {"tasks": {"train": {"size": 32}, "test": {"size": 16}}},
    "tools.yaml": {"tasks": {"train": {"args": {"count": 40}}, "test": {"args": {"count": 20}}}},
    "vision.yaml": {"tasks": {"test": {"count": 20}}},
}
"""Every recipe of supervised steps and then RL, and what keeps it within a second or two."""
FOR_GPUS = {"gpu_24gb.yaml", "lora_vllm.yaml"}
"""Those that name a model of the user's: tests/unit/planning/test_memory_plan.py plans them."""
OVER_ROWS = {"sft.yaml": 15, "dpo.yaml": 12, "reward_model.yaml": 12, "distill.yaml": 15}
"""The others, and how many steps of a stage show that it learns."""
OF_THE_DEMO = "short.yaml"
"""The one for a pretrained model: tests/real/test_real_demo.py runs it."""


def test_no_recipe_is_left_out() -> None:
    assert {str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.yaml")} == {
        *SMALLER,
        *OVER_ROWS,
        *FOR_GPUS,
        OF_THE_DEMO,
    }


def smaller(recipe: str, run_dir: Path) -> RunConfig:
    """The recipe with short stages of few groups, on one thread."""
    data = merged(read_yaml(RECIPES / recipe), SMALLER[recipe])
    data = merged(data, {"run": {"dir": str(run_dir)}, "cluster": {"threads": 1}, "monitors": [{"kind": "jsonl"}]})
    if data.get("buffer", {}).get("kind") == "sql":
        data["buffer"]["url"] = f"sqlite:///{run_dir.with_name('buffer.db')}"
    for stage in data["stages"]:
        schedule = stage["schedule"]
        schedule |= {"steps": STEPS, "groups_per_step": min(4, schedule["groups_per_step"])}
    return config_from_mapping(data, (RECIPES / recipe).parent)


def journaled(config: RunConfig, run_dir: Path) -> list[Group]:
    """The groups that were played, wherever they are kept."""
    if shares_buffer(config.buffers):
        last = config.stage_configs()[-1]
        stage = Stage(last, len(config.stages) - 1, 0, True, run_dir, run_dir / "model")
        slots = range(last.schedule.steps * last.schedule.groups_per_step)
        return asyncio.run(build_buffer(stage, build_schedule(stage)).taken_groups(slots))
    folders = {path.parent for path in (run_dir / "rollouts").rglob("*.msgpack")}
    return [group for folder in sorted(folders) for group in Journal(folder).read(after_step=0)]


@pytest.fixture(scope="module", params=SMALLER)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunConfig, Path]:
    if request.param == "reasoning_gym.yaml":
        pytest.importorskip("reasoning_gym")
    run_dir = tmp_path_factory.mktemp("recipe") / "run"
    config = smaller(request.param, run_dir)
    command = Forked("recipe", run_dir.with_name("out"), play, request.param, run_dir)
    try:
        command.ended()
    finally:
        command.kill()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == STEPS * len(config.stages)
    return request.param, config, run_dir


def play(recipe: str, run_dir: Path) -> None:
    """Runs the recipe in this process, which was forked for it."""
    fork_train_processes(1)
    run(smaller(recipe, run_dir))


def test_every_stage_trains_and_both_ends_are_evaluated(played: tuple[str, RunConfig, Path]) -> None:
    _, config, run_dir = played
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss/policy" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS * len(config.stages) + 1))
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert all(declared(key) for key in row if key != "step")
        assert (
            row.get("mismatch/log_prob_max", 0.0) < 1e-4 or row["rollout/staleness_max"]
        )  # other weights sampled them
        assert row.get("rollout/failed", 0) == 0
    assert sum("mismatch/log_prob_max" in row for row in trained) == STEPS
    accuracy = f"eval/{config.evaluation.taskset}/accuracy"
    assert [row["step"] for row in rows if accuracy in row] == [STEPS, STEPS * 2]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {"reward_before", "reward_after"} <= set(summary)
    graded = any(row.get(f"eval/{config.evaluation.taskset}/partial") for row in rows)
    assert ("accuracy_before" in summary) == ("accuracy_after" in summary) == (not graded)


def test_the_journal_holds_every_group_of_the_second_stage(played: tuple[str, RunConfig, Path]) -> None:
    _, config, run_dir = played
    schedule = config.stage_configs()[-1].schedule
    groups = journaled(config, run_dir)
    assert sorted(group.slot for group in groups) == list(range(STEPS * schedule.groups_per_step))
    assert {len(group.trajectories) for group in groups} == {schedule.group_size}
    names = {reward.label for reward in config.rewards}
    for trajectory in (t for group in groups for t in group.trajectories):
        assert names <= set(trajectory.rewards)


def test_several_turns_and_no_token_of_the_world_is_trained_on(tmp_path: Path) -> None:
    config = smaller("guess.yaml", tmp_path / "run")
    run(config)
    groups = journaled(config, tmp_path / "run")
    assert max(len(t.turns) for group in groups for t in group.trajectories) > 1
    renderer = ChatRenderer(hf_tokenizer(str(tmp_path / "run" / "model")))
    batch = batch_of(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    assert len(batch.experiences) == len(trajectories)  # each turn extends the one before
    for experience, trajectory in zip(batch.experiences, trajectories, strict=True):
        sampled = [int(token) for turn in trajectory.turns for token in turn.tokens]
        assert experience.tokens[experience.response_mask].tolist() == sampled
        world = renderer.decode(experience.tokens[~experience.response_mask].tolist())
        assert world.count("digit?") + world.count("up") + world.count("down") == len(trajectory.turns)
        assert (experience.rollout_log_prob[~experience.response_mask] == 0).all()
        assert (experience.rollout_log_prob[experience.response_mask] < 0).all()


def test_recipes_over_rows_learn_what_they_do_not_train_on(tmp_path: Path) -> None:
    """Each as its comment says, the teacher exported from the first; distillation comes closer to it."""
    summaries: dict[str, dict[str, Any]] = {}
    for recipe, steps in OVER_ROWS.items():
        data = read_yaml(RECIPES / recipe)
        assert Path(data["run"]["dir"]).name == Path(recipe).stem
        data = merged(data, {"run": {"dir": str(tmp_path / recipe)}, "monitors": [{"kind": "jsonl"}]})
        for part in data.get("stages", [data]):
            part["schedule"]["steps"] = steps
        if recipe == "distill.yaml":
            assert data["algorithm"]["teacher"]["path"] == "../runs/sft-model"
            data["algorithm"]["teacher"]["path"] = str(export(tmp_path / "sft.yaml", None, tmp_path / "teacher"))
        summaries[recipe] = run(config_from_mapping(data, RECIPES))
    rows = [json.loads(line) for line in (tmp_path / "distill.yaml" / "metrics.jsonl").read_text().splitlines()]
    distance = [row["train/teacher_kl"] for row in rows if "train/teacher_kl" in row]
    assert sum(distance[-3:]) < sum(distance[:3]) / 2
    for recipe in ("sft.yaml", "dpo.yaml", "reward_model.yaml"):
        before, after = summaries[recipe]["held_out_before"], summaries[recipe]["held_out_after"]
        assert after["eval/test/loss"] < before["eval/test/loss"]
        assert recipe == "sft.yaml" or after["eval/test/preference_accuracy"] > 0.8
