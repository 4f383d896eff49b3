"""The explorer of a stage with several sources: each judges by its own rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs import configured

from tests.sessions import RENDERER
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer
from trivium.runtime.build import build_explorer
from trivium.runtime.stage import Stage

ARITHMETIC = {"kind": "arithmetic"}
TAUGHT = {"kind": "opsd", "teacher": {"context": ["Hint: {answer}"]}}


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
