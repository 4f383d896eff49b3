"""Runs that continue after the death of a process that they started."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from configs import configured
from failing import refused

from trivium.foundation.errors import ProcessDied
from trivium.runtime.launch import _train_with_restarts, run


class Models:
    """What an attempt holds, in a cycle as of modules and hooks."""

    def __init__(self) -> None:
        self.itself = self


def test_the_next_attempt_begins_without_the_parts_of_the_last_one() -> None:
    attempts: list[weakref.ref[Models]] = []

    def train() -> dict[str, Any]:
        assert [each() for each in attempts] == [None] * len(attempts)
        models = Models()
        attempts.append(weakref.ref(models))
        if len(attempts) < 3:
            raise ExceptionGroup("parts", [ProcessDied("trainer", "killed")]) from ProcessDied("rank 1", "killed")
        return {"models": models}

    assert _train_with_restarts(train, restarts=2)["models"] is attempts[2]()


def test_a_session_of_the_caller_is_not_opened_again(tmp_path: Path) -> None:
    opened = 0

    def session(*args: object) -> Any:
        nonlocal opened
        opened += 1
        raise ProcessDied("trainer", "killed")

    with refused(ProcessDied, "trainer", "killed"):
        run(configured(run={"dir": str(tmp_path)}, cluster={"max_restarts": 2}), session)
    assert opened == 1
