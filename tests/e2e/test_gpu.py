"""A run on a GPU that is killed with SIGKILL ends with the bytes of a run that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.killing import launches
from tests.e2e.test_kill import TINY, outcome_of

ON_GPU = ("engine.device=cuda", "train.device=cuda", "train.deterministic_kernels=true")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    assert launches(TINY, tmp_path / "whole", overrides=ON_GPU) == ["finished"]
    kills = [
        ("update: gradient there, no step", 2),
        ("save: models written, no manifest", 1),
        ("update: step taken, no version", 2),
    ]
    assert launches(TINY, tmp_path / "killed", kills, ON_GPU) == [*(moment for moment, _ in kills), "finished"]
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
