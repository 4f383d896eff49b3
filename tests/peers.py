"""Configurations of other trainers that are not part of the project: tests read them where they lie, or skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PEERS = Path(os.environ.get("TRIVIUM_PEERS", Path(__file__).parents[2] / "shared" / "peers"))
"""A folder for each trainer."""


def peer_file(trainer: str, name: str) -> Path:
    """A file of a trainer; skips the test where it is not on this machine."""
    path = PEERS / trainer / name
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine (TRIVIUM_PEERS names the folder of such files)")
    return path
