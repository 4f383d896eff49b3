"""An engine of another process: its errors arrive as errors that any process can read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.sessions import RENDERER
from trivium.engines.processes import EngineHost, ProcessPool
from trivium.engines.scripted import ScriptedEngine
from trivium.errors import RolloutError
from trivium.policy import EngineFailure


def scripted() -> ScriptedEngine:
    config = ScriptedEngine.Config(replies=((1, 2),))
    return ScriptedEngine(config, eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode)


class _Unreadable(Exception):
    """What cannot be made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (_Unreadable("heat", "dust"), (EngineFailure, "_Unreadable: heat and dust")),
        (RolloutError("a completion", "a limit of 0", "raise it"), (RolloutError, "a limit of 0")),
    ],
)
async def test_an_error_of_any_class_reaches_the_caller(raised: Exception, expected: tuple[Any, str]) -> None:
    broken = scripted()

    async def generate(request: object) -> None:
        raise raised

    broken.generate = generate  # pyright: ignore[reportAttributeAccessIssue]
    host = EngineHost(broken, "127.0.0.1", b"key")
    pool = ProcessPool(scripted(), [("rank 1", host.address)], b"key")
    _, other = pool.replicas
    request: Any = None  # the broken engine does not look at it
    with pytest.raises(expected[0], match=expected[1]):
        await asyncio.wait_for(other.generate(request), 60)
    await pool.close()
