"""Warnings of the Tinker SDK, which are not those of this project."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # The SDK closes the connections of a client in a thread of its own, at any later time, after the last test as well.
    config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")
