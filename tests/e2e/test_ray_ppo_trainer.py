"""RayPPOTrainer from a script, over real worker groups: what users map, override, resume, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.ppo_workers import NotingActor, NotingCritic
from trivium.config import config_from_mapping, merged
from trivium.errors import ConfigError, RunDirError, TriviumError
from trivium.metrics import depends_on_machine
from trivium.models.heads import VALUE_HEAD, ScoreModel
from trivium.types import Group, StopReason, Trajectory, Turn

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

from trivium.frontdoors.verl import (  # noqa: E402
    ActorRolloutRefWorker,
    CriticWorker,
    NaiveRewardManager,
    RayPPOTrainer,
    ResourcePoolManager,
    RewardModelWorker,
    Role,
)

SCRIPT = Path(__file__).parents[2] / "examples" / "ray_ppo_trainer.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("ray_ppo_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(example: Any, kind: str, folder: Path, steps: int, **more: Any) -> dict[str, Any]:
    """The example's config, a few short steps of it."""
    short = {
        "data": {"train_batch_size": 8},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}, "rollout": {"n": 2}},
        "trainer": {
            "test_freq": 2,
            "save_freq": 1,
            "logger": [],
            "max_actor_ckpt_to_keep": 2,
            "log_val_generations": 2,
        },
    }
    return merged(merged(example.config(kind, folder, steps), short), more)


def roles(**classes: Any) -> dict[str, Any]:
    mapping = {Role[name]: kind for name, kind in classes.items()}
    return {"role_worker_mapping": mapping}


def pools(number: int, *names: str) -> dict[str, Any]:
    mapping = dict.fromkeys([Role[name] for name in names], "global_pool")
    return {"resource_pool_manager": ResourcePoolManager({"global_pool": [number]}, mapping, device_name="cpu")}


def fitted(trainer: Any) -> dict[str, Any]:
    trainer.init_workers()
    try:
        return trainer.fit()
    finally:
        trainer.shutdown()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def calls(folder: Path, who: str) -> list[str]:
    return [json.loads(line) for line in (folder / "run" / f"calls-{who}.jsonl").read_text().splitlines()]


class Overriding(RayPPOTrainer):
    """Counts what users override."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[str] = []

    def _validate(self) -> dict[str, float]:
        self.seen.append(f"validate {self.global_steps}")
        return {**super()._validate(), "val-aux/mine": 7.0}

    def _save_checkpoint(self) -> None:
        self.seen.append(f"save {self.global_steps}")
        super()._save_checkpoint()

    def _load_checkpoint(self) -> int:
        steps = super()._load_checkpoint()
        self.seen.append(f"load {steps}")
        return steps


def test_ppo_on_two_ranks_calls_the_users_classes_and_goes_on_with_one(
    example: Any, connected: None, tmp_path: Path
) -> None:
    """PPO with critic, reference and an adaptive KL in the reward; another object goes on from the checkpoint."""
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.5, "horizon": 20}}

    def trainer(steps: int, workers: int) -> Overriding:
        return example.make_trainer(
            "ppo",
            tmp_path,
            steps=steps,
            kind=Overriding,
            config=small(example, "ppo", tmp_path, steps, algorithm=kl),
            train_sampler=torch.utils.data.RandomSampler(range(80)),  # pyright: ignore[reportArgumentType]
            **roles(ActorRolloutRef=NotingActor, Critic=NotingCritic),
            **pools(workers, "ActorRolloutRef", "Critic"),
        )

    example.write_data(tmp_path)
    first = trainer(2, workers=2)
    fitted(first)
    assert first.seen == ["load 0", "validate 0", "save 1", "validate 2", "save 2"]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").read_text())
    order = json.loads((tmp_path / "run" / "order" / "epoch-000000.json").read_text())

    second = trainer(3, workers=1)
    summary = fitted(second)
    assert second.seen == ["load 2", "validate 3", "save 3"]
    assert summary["steps"] == 3
    trained = [row for row in rows(tmp_path) if "train/version" in row]
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert trained[2]["train/kl_coef"] == state["algorithm"]["kl_coef"] != trained[0]["train/kl_coef"]
    assert json.loads((tmp_path / "run" / "order" / "epoch-000000.json").read_text()) == order
    assert [row["val-aux/mine"] for row in rows(tmp_path) if "val-aux/mine" in row] == [7.0] * 3
    assert "val-core/larger_digit/acc/mean@1" in summary["validation"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith("step"))
    assert kept == ["step-000002", "step-000003"]

    for rank, last in (("0", "2"), ("1", "1")):
        actor, critic = calls(tmp_path, f"actor_rollout_ref-{rank}"), calls(tmp_path, f"critic-{rank}")
        assert actor.count(f"update_actor {last}") == critic.count(f"update_critic {last}") == 2  # mini-batches
        assert "compute_log_prob old 8" in actor  # half of 8 prompts' 16 replies
        assert "compute_ref_log_prob" in actor
        assert "compute_values" in critic
        assert any(call.startswith("generate_sequences") for call in actor)
        assert not any("generate" in call for call in critic)


def test_a_run_goes_on_from_another_ones_checkpoint_bit_for_bit(example: Any, connected: None, tmp_path: Path) -> None:
    whole, taken_up = tmp_path / "whole", tmp_path / "taken_up"
    whole.mkdir()
    keep = {"max_actor_ckpt_to_keep": 3}
    fitted(example.make_trainer("grpo", whole, steps=3, config=small(example, "grpo", whole, 3, trainer=keep)))
    shutil.copytree(whole / "model", taken_up / "model")
    begun = whole / "run" / "checkpoints" / "step-000001"
    said = {"resume_mode": "resume_path", "resume_from_path": str(begun)}
    trainer = example.make_trainer("grpo", taken_up, steps=3, config=small(example, "grpo", taken_up, 3, trainer=said))
    trainer.init_workers()
    try:
        assert trainer.fit()["steps"] == 3
        assert trainer.fit()["steps"] == 3  # nothing is left to do
        validated = trainer._validate_alone()
    finally:
        trainer.shutdown()
    policies = [folder / "run" / "checkpoints" / "step-000003" / "policy" for folder in (whole, taken_up)]
    weights = [load_file(policy / "model.safetensors") for policy in policies]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert (policies[1] / "tokenizer.json").is_file()
    told, retold = (
        [{key: value for key, value in row.items() if not depends_on_machine(key)} for row in rows(folder)]
        for folder in (whole, taken_up)
    )
    assert told == retold
    (last,) = [row for row in told if row["step"] == 3 and "eval/val/accuracy" in row]
    assert {"step": 3, **validated} == last
    table = taken_up / "run" / "tables" / "val_generations.jsonl"
    shown = [json.loads(line) for line in table.read_text().splitlines()]
    assert [row["step"] for row in shown] == [0, 0, 2, 2, 3, 3]
    assert [row["input"] for row in shown[:2]] == [row["input"] for row in shown[4:]]
    (taken_up / "run" / "taken_up.txt").unlink()
    with pytest.raises(RunDirError, match="checkpoints up to step 3"):
        trainer._adopt_checkpoint()


def test_there_is_no_second_loop(
    example: Any, connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `loops.train_step` nothing trains. A reward model's workers score what the manager passes on."""
    example.write_data(tmp_path)
    made = example.make_trainer("grpo", tmp_path, steps=1)
    score_model = ScoreModel(tmp_path / "model", dtype=torch.float32, device=torch.device("cpu"), seed=0)
    score_model.module.save_pretrained(tmp_path / "judge")
    save_file(score_model.value_head.state_dict(), tmp_path / "judge" / f"{VALUE_HEAD}.safetensors")
    config = small(
        example,
        "grpo",
        tmp_path,
        1,
        reward_model={"enable": True, "model": {"path": str(tmp_path / "judge")}},
        trainer={"val_before_train": False, "test_freq": -1},
    )
    trainer = example.make_trainer(
        "grpo",
        tmp_path,
        steps=1,
        config=config,
        reward_fn=NaiveRewardManager(made.tokenizer, 0),
        **roles(ActorRollout=ActorRolloutRefWorker, RewardModel=RewardModelWorker),
        **pools(1, "ActorRollout", "RewardModel"),
    )
    with pytest.raises(TriviumError, match="there are no workers"):
        trainer.fit()
    trainer.init_workers()
    try:
        with monkeypatch.context() as patched:
            patched.delattr("trivium.trainer.train_step")
            with pytest.raises(NameError, match="train_step"):
                trainer.fit()
        assert trainer.fit()["steps"] == 1
    finally:
        trainer.shutdown()
    (row,) = [row for row in rows(tmp_path) if "train/version" in row]
    assert 0 < abs(row["reward/mean"]) < 0.1  # a head that was never trained
    assert row["reward/std"] > 0


def test_the_script_runs(
    example: Any, connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ray_ppo_trainer.py", "ppo", "--dir", str(tmp_path), "--steps", "2"])
    example.main()
    printed = capsys.readouterr().out
    assert "accuracy before 0.00, after" in printed
    assert "val-core/larger_digit/acc/mean@1: " in printed


REFUSED = [
    ({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}, {}, "Megatron is not built here"),
    ({"critic": {"strategy": "megatron"}}, {}, "Megatron is not built here"),
    ({"actor_rollout_ref": {"rollout": {"name": "sglang"}}}, {}, "SGLang is not built here"),
    ({}, {"role_worker_mapping": {Role.ActorRollout: ActorRolloutRefWorker}}, "a worker class for Critic"),
    ({}, {"role_worker_mapping": {Role.Critic: CriticWorker}}, "0 of ActorRollout and ActorRolloutRef"),
    ({}, {"role_worker_mapping": {Role.Actor: ActorRolloutRefWorker}}, "the role Actor"),
    ({"algorithm": {"use_kl_in_reward": True}}, {}, "a worker class for RefPolicy"),
    ({"reward_model": {"enable": True}}, {}, "a worker class for RewardModel"),
    ({"data": {"train_batch_size": 99}}, {}, "a batch of 99"),
    ({"data": {"max_prompt_length": 3}}, {}, "first row 0 with"),
    ({}, {"device_name": "npu"}, "built for cpu and cuda"),
]


@pytest.mark.parametrize(("config", "beside", "says"), REFUSED)
def test_what_is_not_built_is_refused_before_anything_starts(
    example: Any, tmp_path: Path, config: dict[str, Any], beside: dict[str, Any], says: str
) -> None:
    with pytest.raises(TriviumError, match=says):
        example.make_trainer(
            "ppo", tmp_path, steps=1, config=merged(example.config("ppo", tmp_path, 1), config), **beside
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error(example: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no GPU that torch can use"):
        example.make_trainer("ppo", tmp_path, steps=1, device_name="cuda")


def test_a_run_config_is_taken_as_it_is(example: Any, tmp_path: Path) -> None:
    made = example.make_trainer("grpo", tmp_path, steps=3)
    config = config_from_mapping(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"kind": "hf", "path": str(tmp_path / "model")},
            "tasks": {"train": {"kind": "parquet", "path": str(tmp_path / "train.parquet")}},
            "rewards": ["exact"],
            "schedule": {"steps": 2, "groups_per_step": 4, "group_size": 2},
        }
    )
    assert RayPPOTrainer(config, made.tokenizer, made.role_worker_mapping, None).run_config == config
    given = RayPPOTrainer(
        config,
        made.tokenizer,
        made.role_worker_mapping,
        None,
        reward_fn=lambda prompt, completion: 0.0,
        train_dataset=[{"prompt": "1,2"}] * 8,
    )
    assert given.run_config.rewards == ()
    assert given.run_config.tasks["train"].kind.endswith("DatasetTasks")


def test_rewards_come_from_the_config_where_none_are_passed(example: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 3\n"
    )
    said = merged(
        example.config("grpo", tmp_path, 1),
        {
            "custom_reward_function": {"path": str(tmp_path / "mine.py"), "name": "score"},
            "reward_model": {"reward_manager": "naive", "reward_kwargs": {}},
        },
    )
    trainer = example.make_trainer("grpo", tmp_path, steps=1, config=said, reward_fn=None)
    task = trainer.run_config.tasks["train"].data.visit(0, 0)
    turn = Turn(np.array([1, 2]), np.array([3]), np.zeros(1), np.zeros(1), StopReason.EOS, "3")  # pyright: ignore[reportArgumentType]
    assert trainer._setup.rewards is not None
    judged, _ = trainer._setup.rewards([Group(0, task, (Trajectory(0, (turn,)),))])
    assert judged[0].trajectories[0].reward == 3.0
