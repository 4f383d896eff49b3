"""What the tests of all folders share: one thread for each test process, and their order."""

import gc
import os

# Read when torch is imported, here and in what tests start. A thread of a pool that waits for work sleeps: others need
# its core, where it would turn in a loop.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings
from postgres import postgres

__all__ = ["postgres"]

# No example has a deadline: how long one takes says how busy the machine is.
settings.register_profile("trivium", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trivium")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take long come first, so that the workers of pytest-xdist end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None or "e2e" in item.path.parts}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """No collection looks at all modules and tests again."""
    gc.freeze()
