"""Which channel goes with which way of running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import configured

from trivium.foundation.errors import ConfigError


def problems(tmp_path: Path, **sections: dict[str, Any]) -> dict[str, str]:
    """Where something is wrong, and what was found there."""
    try:
        configured(tmp_path, **sections)
    except ConfigError as error:
        return {problem.where: problem.found for problem in error.problems}
    return {}


SQL = {"kind": "sql", "url": "sqlite:///run.db"}


@pytest.mark.parametrize("mode", ["explore", "train"])
def test_halves_in_two_commands_need_a_buffer_and_a_channel_that_both_reach(mode: str, tmp_path: Path) -> None:
    run = {"mode": mode}
    assert "could not exchange groups" in problems(tmp_path, run=run)["buffer.kind"]
    assert "within one process" in problems(tmp_path, run=run, buffer=SQL)["sync.method"]
    for method in ("checkpoint", "nccl"):
        assert problems(tmp_path, run=run, buffer=SQL, sync={"method": method}) == {}


def test_one_process_may_use_any_channel_but_a_broadcast(tmp_path: Path) -> None:
    for method in ("memory", "checkpoint"):
        assert problems(tmp_path, sync={"method": method}) == {}
        assert problems(tmp_path, sync={"method": method}, buffer=SQL) == {}
    assert "both ends" in problems(tmp_path, sync={"method": "nccl"}, buffer=SQL)["sync.method"]
    assert problems(tmp_path, sync={"method": "nccl"}, cluster={"kind": "ray"}) == {}


def test_what_was_broadcast_cannot_be_had_again(tmp_path: Path) -> None:
    ahead = {"deterministic": True, "max_staleness": 2}
    apart = {"run": {"mode": "train"}, "buffer": SQL, "sync": {"method": "nccl"}}
    assert "keeps no version" in problems(tmp_path, **apart, schedule=ahead)["sync.method"]
    assert problems(tmp_path, **apart, schedule={"deterministic": True}) == {}
    assert problems(tmp_path, **apart, schedule={"max_staleness": 2}) == {}
    for method in ("memory", "checkpoint"):
        assert problems(tmp_path, sync={"method": method}, schedule=ahead) == {}


def test_earlier_versions_are_not_saved_if_the_first_rank_writes_them(tmp_path: Path) -> None:
    ahead = {"deterministic": True, "max_staleness": 2}
    for method, ranks, schedule, is_refused in (
        ("checkpoint", 2, ahead, True),
        ("memory", 2, ahead, False),
        ("checkpoint", 1, ahead, False),
        ("checkpoint", 2, {"max_staleness": 2}, False),
    ):
        cluster = {"kind": "ray", "ranks": ranks}
        found = problems(tmp_path, sync={"method": method}, cluster=cluster, schedule=schedule)
        assert [*found] == ["sync.method"] * is_refused


def test_a_directory_is_for_a_channel_that_has_files(tmp_path: Path) -> None:
    assert problems(tmp_path, sync={"method": "checkpoint", "dir": "weights"}) == {}
    for method in ("memory", "nccl"):
        assert "no effect" in problems(tmp_path, sync={"method": method, "dir": "weights"})["sync.dir"]


def test_an_unknown_method_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    assert "sync.method" in problems(tmp_path, sync={"method": "memry"})
    assert "sync.method" in problems(tmp_path, sync={"method": "trivium.sync.memory:Nothing"})


def test_differences_need_a_channel_that_sends_them(tmp_path: Path) -> None:
    assert problems(tmp_path, sync={"method": "checkpoint", "full_every": 5}) == {}
    assert "whole" in problems(tmp_path, sync={"method": "memory", "full_every": 5})["sync.full_every"]
