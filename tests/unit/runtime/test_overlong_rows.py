"""Rows that are too long are refused, dropped or cut, with a count in the plan: the same ones in every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from failing import refused

from trivium.buffers.files import FileBuffer
from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError, DataError
from trivium.planning.machine import Machine
from trivium.planning.plan import plan_run
from trivium.runtime.build import build_tasks
from trivium.runtime.preflight import preflight
from trivium.runtime.row_lengths import renderer_here
from trivium.schedule import Schedule
from trivium.types import Group, StopReason

CONTEXT = 96
LEARNING: dict[str, Any] = {"buffer": {"kind": "files"}, "algorithm": {"kind": "sft"}, "rewards": []}
PAIRS: dict[str, Any] = {**LEARNING, "algorithm": {"kind": "dpo"}}


def config_of(folder: Path, rows: list[dict[str, Any]], taskset: dict[str, Any], **changes: Any) -> RunConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return config_from_mapping(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"kind": "tiny", "alphabet": "bytes", "max_position": CONTEXT},
            "tasks": {"train": {"kind": "jsonl", "path": str(folder / "rows.jsonl"), **taskset}},
            "rewards": ["exact"],
            "engine": {"sampling": {"max_new_tokens": 16}},
            "train": {"optimizer": {"lr": 1e-3}},
            "schedule": {"groups_per_step": 1, "group_size": 2, "steps": 100, "shuffle": False},
            **changes,
        }
    )


def lengths(config: RunConfig) -> list[int]:
    renderer, tasks = renderer_here(config), build_tasks(config, "train")
    assert renderer is not None
    return [len(renderer.render(tasks[place].prompt)) for place in range(len(tasks))]


def learned(config: RunConfig) -> list[Group]:
    renderer, tasks = renderer_here(config), build_tasks(config, "train")
    assert renderer is not None
    assert isinstance(config.buffer, FileBuffer.Config)
    schedule = Schedule(tasks, 0, group_size=config.schedule.group_size, shuffle=False)
    buffer = FileBuffer(config.buffer, schedule=schedule, rollouts=Path(), renderer=renderer, deadline_s=1)
    return [buffer.group_of(schedule.at(slot)) for slot in range(len(tasks))]


def sizes(group: Group) -> list[tuple[int, int]]:
    return [(len(turn.prompt_tokens), len(turn.tokens)) for turn in group.turns()]


def left_out(config: RunConfig) -> dict[str, int]:
    """The counts that a check prints: as warnings, and in the plan."""
    findings = preflight(config, Machine(), 1)
    assert not findings.problems
    (counts,) = [dict(tasks.left_out) for tasks in findings.tasks]
    for key, count in counts.items():
        where, _, what = key.partition(": ")
        assert any(
            problem.where == where and f"{count} rows are {what}" in problem.found for problem in findings.warnings
        )
        assert f"'{key}': {count}" in plan_run(config, 1, tasks=findings.tasks).to_yaml()
    return counts


PROMPTS = [{"prompt": text, "answer": "1"} for text in ("a", "b" * 200, "c" * 30, "\u00e9" * 90, "d")]


def test_a_prompt_without_space_for_a_completion_is_refused_or_dropped(tmp_path: Path) -> None:
    with refused(ConfigError, "tasks.train.on_overlong", CONTEXT):
        preflight(config_of(tmp_path, PROMPTS[1:2] * 4, {}), Machine(), 1).refuse()
    config = config_of(tmp_path, PROMPTS, {"on_overlong": "drop"})
    tasks = build_tasks(config, "train")
    assert [task.prompt[0].content[0] for task in (tasks[place] for place in range(len(tasks)))] == ["a", "c", "d"]
    assert left_out(config) == {"tasks.train: dropped (on_overlong)": 2}
    assert preflight(config, Machine(), 1).rows["tasks.train"].startswith("3 rows")


@pytest.mark.parametrize("side", ["cut_left", "cut_right"])
def test_a_cut_prompt_keeps_its_template_and_leaves_space(side: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "".join(map(str, range(99)))}]
    config = config_of(tmp_path, [*PROMPTS, {"prompt": messages, "answer": "1"}], {"on_overlong": side})
    assert left_out(config) == {"tasks.train: cut (on_overlong)": 3}
    assert max(lengths(config)) == CONTEXT - 16
    last = build_tasks(config, "train")[5]
    assert [message.role for message in last.prompt] == ["system", "user"]
    text = last.prompt[1].content
    assert messages[1]["content"].startswith(text) if side == "cut_right" else messages[1]["content"].endswith(text)
    assert text


def test_a_limit_of_the_taskset_holds_for_every_choice(tmp_path: Path) -> None:
    shortest = min(lengths(config_of(tmp_path, PROMPTS[:1], {})))
    with refused(ConfigError, shortest, "max_tokens"):
        preflight(config_of(tmp_path, PROMPTS, {"max_tokens": shortest}), Machine(), 1).refuse()
    config = config_of(tmp_path, PROMPTS, {"max_tokens": shortest, "on_overlong": "drop"})
    assert lengths(config) == [shortest, shortest]
    config = config_of(tmp_path, PROMPTS, {"max_tokens": shortest + 4, "on_overlong": "cut_left"})
    assert max(lengths(config)) <= shortest + 4
    assert len(lengths(config)) == 5
    with refused(DataError, "tasks.train.max_tokens", "5 rows"):
        build_tasks(config_of(tmp_path, PROMPTS, {"max_tokens": 1, "on_overlong": "cut_left"}), "train")


ROWS = [
    {"prompt": "a", "completion": "1"},
    {"prompt": "b" * 99, "completion": "2" * 20},
    {"prompt": "c" * 20, "completion": "3" * 90},
    {"prompt": "d", "completion": "4" * 200},
]


def test_rows_to_learn_from_are_refused_or_dropped(tmp_path: Path) -> None:
    schedule = {"groups_per_step": 1, "group_size": 1, "steps": 4, "shuffle": False}
    with refused(ConfigError, "tasks.train.on_overlong", CONTEXT):
        preflight(config_of(tmp_path, ROWS, {}, **LEARNING, schedule=schedule), Machine(), 1).refuse()
    config = config_of(tmp_path, ROWS, {"on_overlong": "drop"}, **LEARNING, schedule=schedule)
    assert [group.task.columns["completion"] for group in learned(config)] == ["1"]
    assert left_out(config) == {"tasks.train: dropped (on_overlong)": 3}


def test_each_stage_leaves_out_the_rows_that_are_too_long_for_it(tmp_path: Path) -> None:
    """The sections of the tasks are equal: the first stage learns from the completions, the second rolls out."""
    steps = {"groups_per_step": 1, "group_size": 1, "steps": 1}
    stages = [{**LEARNING, "schedule": steps}, {"algorithm": {"kind": "grpo"}}]
    config = config_of(tmp_path, ROWS, {"on_overlong": "drop"}, stages=stages)
    found = [dict(tasks.left_out) for tasks in preflight(config, Machine(), 1).tasks]
    assert found == [{"tasks.train: dropped (on_overlong)": number} for number in (3, 1)]


@pytest.mark.parametrize("side", ["cut_left", "cut_right"])
def test_rows_to_learn_from_are_cut_to_the_length_of_the_model(side: str, tmp_path: Path) -> None:
    schedule = {"groups_per_step": 1, "group_size": 1, "steps": 4, "shuffle": False}
    whole = learned(config_of(tmp_path, ROWS, {}, **LEARNING, schedule=schedule))
    config = config_of(tmp_path, ROWS, {"on_overlong": side}, **LEARNING, schedule=schedule)
    cut = {group.task.columns["completion"][0]: group for group in learned(config)}
    by_name = {group.task.columns["completion"][0]: group for group in whole}
    # Of one row, the whole prompt is longer than the model; of the other, the completion: nothing would be left.
    dropped, expected = ("4", ["1", "2", "3"]) if side == "cut_left" else ("2", ["1", "3", "4"])
    assert sorted(cut) == expected
    assert left_out(config) == {"tasks.train: dropped (on_overlong)": 1, "tasks.train: cut (on_overlong)": 2}
    assert sum(sizes(by_name[dropped])[0]) > CONTEXT
    for name in expected[1:]:
        (turn,), (before,) = cut[name].turns(), by_name[name].turns()
        assert len(turn.prompt_tokens) + len(turn.tokens) == CONTEXT
        if side == "cut_left":
            assert turn.tokens.tolist() == before.tokens.tolist()
            assert turn.prompt_tokens.tolist() == before.prompt_tokens.tolist()[-len(turn.prompt_tokens) :]
        else:
            assert turn.prompt_tokens.tolist() == before.prompt_tokens.tolist()
            assert turn.tokens.tolist() == before.tokens.tolist()[: len(turn.tokens)]
            assert len(turn.log_prob) == len(turn.policy_version) == len(turn.tokens)
            assert turn.stop_reason is StopReason.LENGTH


def test_the_completions_of_a_pair_keep_one_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "q" * 80, "chosen": "y" * 30, "rejected": "n" * 10}]
    config = config_of(tmp_path, rows, {"on_overlong": "cut_left"}, **PAIRS)
    (group,) = learned(config)
    (chosen, more), (rejected, less) = sizes(group)
    assert chosen == rejected
    assert (chosen + more, more - less) == (CONTEXT, 20)
