"""What RayPPOTrainer refuses in a RunConfig, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trivium.config import RunConfig, merged
from trivium.errors import ConfigError
from trivium.text import hf_tokenizer
from trivium.text.tiny import TinyModel

pytest.importorskip("ray")

from trivium.cluster import ActorRolloutRefWorker, Role
from trivium.frontdoors import RayPPOTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = TinyModel.Config(alphabet="0123456789+=", layers=1, hidden=8, heads=1, mlp=8, max_position=64)
    return str(TinyModel(config, seed=0).materialize(tmp_path_factory.mktemp("model") / "tiny"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"checkpoint": {"asynchronous": True}}, "checkpoint.asynchronous with RayPPOTrainer"),
    ({"schedule": {"max_staleness": 1, "deterministic": True}}, "schedule.deterministic ahead of the trainer"),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_what_its_workers_cannot_do_is_refused(model: str, tmp_path: Path, more: dict[str, Any], says: str) -> None:
    said = {
        "run": {"dir": str(tmp_path / "run")}, "model": {"kind": "hf", "path": model}, "rewards": ["exact"],
        "tasks": {"train": {"kind": "arithmetic"}}, "schedule": {"steps": 2, "groups_per_step": 4, "group_size": 2},
    }  # fmt: skip
    roles = {Role.ActorRollout: ActorRolloutRefWorker}
    assert RayPPOTrainer(RunConfig.from_mapping(said), hf_tokenizer(model), roles, None).run_config.schedule.steps == 2
    with pytest.raises(ConfigError, match=says):
        RayPPOTrainer(RunConfig.from_mapping(merged(said, more)), hf_tokenizer(model), roles, None)
    assert not (tmp_path / "run").exists()
