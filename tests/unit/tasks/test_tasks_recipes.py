"""The recipes beside the library: each is a valid config whose tasks fit its model, its rewards and its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from failing import refused

from trivium.config import RunConfig, build, load_config
from trivium.foundation.errors import ConfigError
from trivium.rewards import make_judge
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import StopReason, Task, Trajectory, Turn

RECIPES = Path(__file__).parents[3] / "recipes"
GSM8K = Path(__file__).parents[2] / "data" / "gsm8k"
PATHS = [f"tasks.{name}.path={GSM8K / name}.jsonl" for name in ("train", "test")]
RUNS = {"gsm8k.yaml": PATHS, "reasoning_gym.yaml": [], "own_reward/run.yaml": [], "guess.yaml": []}


@pytest.fixture(params=RUNS)
def config(request: pytest.FixtureRequest) -> RunConfig:
    return load_config(RECIPES / request.param, RUNS[request.param])


def tasks_of(config: RunConfig, name: str) -> list[Task]:
    return list(build("tasks", config.tasks[name], name=name, seed=0))


def said(text: str) -> Trajectory:
    return Trajectory(0, (Turn([0], [1], [0.0], [0], StopReason.EOS, text),))  # pyright: ignore[reportArgumentType]


def test_tasks_fit_the_model_with_room_for_a_reply(config: RunConfig) -> None:
    model: Any = config.model
    renderer = ChatRenderer(tiny_tokenizer(model.alphabet, model.max_position))  # an unknown character is a warning
    for name in config.tasks:
        for task in tasks_of(config, name):
            longest = len(renderer.render(task.prompt)) + config.engine.sampling.max_new_tokens
            assert longest <= model.max_position


def test_supervised_stages_find_their_replies(config: RunConfig) -> None:
    for stage in config.stage_configs():
        if stage.buffer.kind == "files":
            column = stage.buffer.completion  # pyright: ignore[reportAttributeAccessIssue]
            assert all(isinstance(task.columns[column], str) for task in tasks_of(stage, "train"))


async def test_rewards_tell_right_from_wrong(config: RunConfig) -> None:
    judge = make_judge(config.rewards)
    for task in tasks_of(config, "train")[:8]:
        judge.check_columns(task.columns)
        if config.rewards:
            right = task.columns.get("completion", task.columns["answer"])
            high, low = [await judge.score(task, said(text)) for text in (right, "#### -77")]
            assert isinstance(high, dict)
            assert isinstance(low, dict)
            assert sum(high.values()) == 1.0 > sum(low.values())


def test_workflows_are_made(config: RunConfig) -> None:
    assert callable(build("workflows", config.workflow).run)


def test_gsm8k_asks_for_its_rows() -> None:
    with refused(ConfigError) as caught:
        load_config(RECIPES / "gsm8k.yaml")
    assert [problem[0] for problem in caught.value.problems] == ["tasks.train.path", "tasks.test.path"]
