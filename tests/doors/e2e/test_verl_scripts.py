"""verl's example scripts and default config, with a tiny model, small sizes, other data and the engine replaced."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.peers import peer_file
from tests.processes import Forked
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.tables import Ignored, Mapped, Restricted
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.text import hf_tokenizer
from trivium.text.tiny import TinyModel

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("connected")

from trivium.frontdoors.verl import (  # noqa: E402
    ActorRolloutRefWorker,
    CriticWorker,
    RayPPOTrainer,
    ResourcePoolManager,
    RewardModelWorker,
    Role,
)

ENGINE = ["actor_rollout_ref.rollout.name=torch"]


def rows(number: int) -> str:
    return "\n".join(
        json.dumps(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{n}+1"}],
                "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            }
        )
        for n in range(number)
    )


def same_length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(len(solution_str) == len(ground_truth))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides: a model, data and sizes for a test."""
    folder = tmp_path_factory.mktemp("verl")
    tiny = TinyModel.Config(alphabet="0123456789+", layers=1, hidden=8, heads=1, mlp=8, max_position=32)
    model = TinyModel(tiny, seed=0).materialize(folder / "model")
    (folder / "rows.jsonl").write_text(rows(8), encoding="utf-8")
    paths = {"actor_rollout_ref.model.path": model, "critic.model.path": model}
    paths |= dict.fromkeys(("data.train_files", "data.val_files"), folder / "rows.jsonl")
    sizes: dict[str, Any] = {"data.train_batch_size": 4, "data.max_prompt_length": 16, "data.max_response_length": 3}
    sizes |= {f"{role}.ulysses_sequence_parallel_size": 1 for role in ("actor_rollout_ref.actor", "critic")}
    sizes |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 2, "actor_rollout_ref.rollout.n": 2}
    sizes |= {"trainer.total_training_steps": 2, "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1}
    sizes |= {"trainer.test_freq": -1, "trainer.save_freq": -1, "trainer.val_before_train": False}
    return [f"{key}={value}" for key, value in (paths | sizes).items()]


def scripts() -> dict[str, list[str]]:
    return json.loads(peer_file("verl", "scripts-v0.5.0.json").read_text())


def default() -> dict[str, Any]:
    return yaml.safe_load(peer_file("verl", "default-v0.5.0.yaml").read_text())


def trainer(config: dict[str, Any], folder: Path) -> RayPPOTrainer:
    settings = TABLE.read(config)
    roles: dict[Role, Any] = dict.fromkeys((Role.ActorRollout, Role.RefPolicy), ActorRolloutRefWorker)
    roles |= {Role.Critic: CriticWorker} if settings["algorithm.adv_estimator"] == "gae" else {}
    roles |= {Role.RewardModel: RewardModelWorker} if settings["reward_model.enable"] else {}
    pools = ResourcePoolManager({"pool": [1]}, dict.fromkeys(roles, "pool"), device_name="cpu")
    config = overridden(config, [f"trainer.default_local_dir={folder}"])
    tokenizer = hf_tokenizer(settings["actor_rollout_ref.model.path"])
    return RayPPOTrainer(config, tokenizer, roles, pools, reward_fn=same_length, device_name="cpu")


def test_a_default_config_has_nothing_that_is_refused() -> None:
    assert TABLE.read(default()).problems == ()


def test_every_script_constructs_with_the_engine_replaced(small: list[str], tmp_path: Path) -> None:
    refused: dict[str, set[str]] = {}
    for name, overrides in scripts().items():
        try:
            trainer(overridden(default(), [*overrides, *ENGINE, *small]), tmp_path / "run")
        except ConfigError as error:
            refused[name] = {problem.where for problem in error.problems}
    assert refused == {}


def test_every_key_of_the_default_has_one_of_three_entries() -> None:
    entries = [TABLE.entry_of(key) for key in TABLE.read(overridden(default(), ENGINE)).values]
    counts = {kind: sum(isinstance(entry, kind) for entry in entries) for kind in (Mapped, Restricted, Ignored)}
    assert sum(counts.values()) == len(entries)
    assert counts[Mapped] > 100


@pytest.mark.parametrize(
    "name", ["gpg_trainer/run_qwen2-7b_math", "ppo_trainer/run_deepseek7b_llm_sp2", "0.5b_grpo-lora"]
)
def test_a_script_trains(small: list[str], tmp_path: Path, name: str) -> None:
    overrides = next(overrides for script, overrides in scripts().items() if name in script)
    made = trainer(overridden(default(), [*overrides, *ENGINE, *small, "trainer.logger=console"]), tmp_path / "run")
    made.init_workers()
    try:
        assert made.fit()["steps"] == 2
    finally:
        made.shutdown()


def main_ppo(*arguments: str) -> None:
    """`python -m trivium.frontdoors.verl`."""
    sys.argv = ["trivium.frontdoors.verl", *arguments]
    runpy.run_module("trivium.frontdoors.verl", run_name="__main__")


def test_the_command_line_trains_and_says_by_its_exit_code_how_it_ended(
    ray_address: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def scored(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / 0\n")
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=torch", "trainer.logger=['console']"]
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    calls = {
        "trains": [f"custom_reward_function.path={scorer}", "custom_reward_function.name=scored"],
        "fails": [f"custom_reward_function.path={wrong}"],
        "typo": ["++data.train_batchsize=4"],
    }
    processes = {
        name: Forked(
            name, tmp_path / name, main_ppo, *grpo, *small, f"trainer.default_local_dir={tmp_path}/run-{name}", *c
        )
        for name, c in calls.items()
    }
    assert {name: process.wait(300) for name, process in processes.items()} == {"trains": 0, "fails": 1, "typo": 2}
    assert '"steps": 2' in processes["trains"].text
    assert "ZeroDivisionError" in processes["fails"].text
    assert "data.train_batch_size" in processes["typo"].text
