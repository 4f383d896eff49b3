"""Selects the form of weight hashes, for runs that an earlier version of Trivium began."""

from __future__ import annotations

from pathlib import Path

from trivium.buffers.step_log import recorded_hash
from trivium.sync.hashes import continue_form


def continue_recorded_form(run_dir: Path) -> None:
    """Makes this process hash weights in the form that the run recorded last, so that its trainer can compare
    hashes."""
    continue_form(recorded_hash(run_dir))
