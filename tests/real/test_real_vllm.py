"""engine.kind vllm samples the real model, with an adapter that it is sent after the first step. `make test-vllm` runs
this, where vLLM is installed."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.test_vllm import pytestmark
from tests.real.sections import LORA, REWARD, assert_same_model_samples_and_trains, metrics_of, questions, written
from trivium.config import load_config
from trivium.runtime.launch import run

__all__ = ["pytestmark"]


def test_vllm_samples_the_real_model_that_is_trained(model: Path, tmp_path: Path) -> None:
    config = written(
        tmp_path / "run.yaml",
        model,
        tasks={"train": questions(tmp_path)},
        rewards=[REWARD],
        algorithm="grpo",
        engine={"kind": "vllm", "max_rows": 16, "max_context": 256, "sampling": {"max_new_tokens": 24}},
        train={**LORA, "lora": {**LORA["lora"], "push": "adapter"}},
        schedule={"steps": 2, "groups_per_step": 2, "group_size": 8},
    )
    run(load_config(config))
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 2
    assert_same_model_samples_and_trains([{**step, "mismatch/kl": abs(step["mismatch/kl"])} for step in steps])
    assert max(step["mismatch/log_prob_max"] for step in steps) < 1e-3
