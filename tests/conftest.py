"""Fixtures that tests of several folders share, and what becomes of a slow test that fails."""

import pytest
from postgres import postgres

__all__ = ["postgres"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests, and those that go end to end, kill real processes at real moments, on machines that do other things
    too: one that fails is run once more. The summary counts it as a rerun; it wants looking at all the same."""
    for item in items:
        if item.get_closest_marker("slow") is not None or "e2e" in item.path.parts:
            item.add_marker(pytest.mark.flaky(reruns=1))
