"""RayPPOTrainer from a script, over real worker groups: what users map, override, resume, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

from tests.doors.e2e import verl_user
from tests.doors.e2e.ppo_workers import NotingActor, NotingCritic
from tests.failing import refused
from trivium.buffers.step_log import read_steps
from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError, DataError, RunDirError, TriviumError
from trivium.foundation.metrics import depends_on_machine
from trivium.models.heads.trained_models import ScoreModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.types import Group, StopReason, Trajectory, Turn

ray = pytest.importorskip("ray")

from trivium.frontdoors.verl import (  # noqa: E402
    ActorRolloutRefWorker,
    CriticWorker,
    NaiveRewardManager,
    RayPPOTrainer,
    ResourcePoolManager,
    RewardModelWorker,
    Role,
    agg_loss,
    register_policy_loss,
)

SCRIPT = Path(__file__).parents[3] / "examples" / "ray_ppo_trainer.py"


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


def example_row(number: int) -> dict[str, Any]:
    return {
        "data_source": "larger_digit",
        "prompt": [{"role": "user", "content": f"{number % 10},{number // 10}"}],
        "reward_model": {"style": "rule", "ground_truth": str(max(number % 10, number // 10))},
        "extra_info": {"index": number},
    }


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
    """A trainer that counts the calls of overridden methods."""

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


def within_a_minute(score: Any) -> Any:
    """A scorer that limits its time by a signal, which needs the main thread."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    def limited(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(60)
        try:
            return score(data_source, solution_str, ground_truth, extra_info)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return limited


def test_ppo_on_two_ranks_calls_the_users_classes_and_goes_on_with_one(
    example: Any, connected: None, tmp_path: Path
) -> None:
    """PPO with critic, reference and an adaptive KL in the reward. Another trainer resumes from the checkpoint."""
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.5, "horizon": 20}}

    def trainer(steps: int, workers: int) -> Overriding:
        return example.make_trainer(
            "ppo",
            tmp_path,
            steps=steps,
            kind=Overriding,
            reward_fn=within_a_minute(example.compute_score),
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
    assert len({step.weights for step in read_steps(tmp_path / "run").values()} - {""}) == 4  # of versions 0 to 3
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
        assert f"published {rank == '0'}" in actor  # once, and no copy for each rank
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
    resume = {"resume_mode": "resume_path", "resume_from_path": str(begun)}
    resume |= {f"{what}_data_dir": str(tmp_path / what) for what in ("rollout", "validation")}
    trainer = example.make_trainer(
        "grpo", taken_up, steps=3, config=small(example, "grpo", taken_up, 3, trainer=resume)
    )
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
    dumped = {
        f"{file.parent.name} {file.stem}": [json.loads(line) for line in file.read_text().splitlines()]
        for file in tmp_path.glob("*/*.jsonl")
        if file.parent.name in ("rollout", "validation")
    }
    assert {"rollout 2", "rollout 3", "validation 2", "validation 3"} <= dumped.keys()
    assert all(row["step"] == 3 and {"input", "output", "gts", "score"} <= row.keys() for row in dumped["rollout 3"])
    assert len(dumped["rollout 3"]) == 16
    (taken_up / "run" / "taken_up.txt").unlink()
    with refused(RunDirError, "step 3"):
        trainer._adopt_checkpoint()


def test_there_is_no_second_loop(
    example: Any, connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit` fails without `loops.train_step`. The manager passes on the scores of the reward model's workers."""
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
    with refused(TriviumError, "fit()", "init_workers()"):
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


def test_a_driver_as_of_main_ppo_trains_and_resumes(
    example: Any, connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config names dataset, sampler and manager; two ranks train; then the run is resumed."""
    example.write_data(tmp_path)
    kl = {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.5, "horizon": 20}}
    monkeypatch.setattr("tests.doors.e2e.verl_user.Hardest.seen", [])

    def run(folder: Path, steps: int) -> Any:
        config = small(
            example,
            "ppo",
            tmp_path,
            steps,
            algorithm=kl,
            data={
                "train_files": "pairs-16",
                "val_files": "pairs-4",
                "custom_cls": {"path": "pkg://tests.doors.e2e.verl_user", "name": "Pairs"},
                "sampler": {"class_path": "pkg://tests.doors.e2e.verl_user", "class_name": "Hardest"},
                "dataloader_num_workers": 0,
            },
            trainer={"default_local_dir": str(folder / "run"), "val_before_train": False, "test_freq": -1},
        )
        trainer = example.make_trainer(
            "ppo",
            tmp_path,
            steps=steps,
            config=config,
            **roles(ActorRolloutRef=ActorRolloutRefWorker, Critic=CriticWorker),
            **pools(2, "ActorRolloutRef", "Critic"),
        )
        assert (len(trainer.train_dataloader), trainer.total_training_steps) == (2, steps)
        fitted(trainer)
        return [row for row in rows(folder) if "train/version" in row]

    whole = run(tmp_path / "whole", 3)
    views = list(verl_user.Hardest.seen)
    for row, view in zip(whole, views, strict=True):
        mask = view.batch["response_mask"].bool()
        assert row["step"] == view.meta_info["global_steps"]
        assert row["reward/mean"] == pytest.approx(float(view.batch["token_level_scores"].sum(-1).mean()), abs=1e-6)
        for name, column in (("advantage", "advantages"), ("return", "returns"), ("value", "values")):
            assert row[f"train/{name}_max"] == pytest.approx(float(view.batch[column][mask].max()), abs=1e-6)
        assert row["mismatch/kl"] == pytest.approx(0, abs=1e-6)
    shutil.copytree(tmp_path / "whole" / "run", tmp_path / "begun" / "run")
    shutil.rmtree(tmp_path / "begun" / "run" / "checkpoints" / "step-000003")
    order = json.loads((tmp_path / "begun" / "run" / "order" / "epoch-000001.json").read_text())
    again = run(tmp_path / "begun", 3)  # step 3 is taken anew: the sampler goes on from what it had learned
    assert json.loads((tmp_path / "begun" / "run" / "order" / "epoch-000001.json").read_text()) == order != [*range(8)]
    told = [{key: value for key, value in row.items() if not depends_on_machine(key)} for row in (whole[2], again[2])]
    assert told[0] == told[1]


class Recipe(RayPPOTrainer):
    """A trainer as verl's recipes derive it."""

    def __init__(self, *arguments: Any, weight: float, **named: Any) -> None:
        self.seen: list[str] = []
        super().__init__(*arguments, **named)
        self.weight = weight

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        chosen = [row for row in self.train_dataset if row["extra_info"]["index"] < 8]
        self.train_dataloader = DataLoader(Rows(chosen), batch_size=8, collate_fn=as_columns)  # pyright: ignore[reportAttributeAccessIssue]

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *arguments: Any, **named: Any) -> None:
        super()._balance_batch(batch, metrics=metrics)
        batch.reorder(torch.arange(len(batch)).flip(0))
        metrics["mine/balanced"] = 1.0
        self.order = list(dict.fromkeys(batch.non_tensor_batch["uid"]))

    def _compute_reward(self, batch: Any, reward_fn: Any = None) -> Any:
        rewards, extra = super()._compute_reward(batch, reward_fn)
        if batch.meta_info["validate"]:
            return rewards, extra
        self.seen.append(f"reward {self.global_steps} {'reversed' if self.in_order(batch) else 'as they came'}")
        rewards[batch.batch["response_mask"].bool()] = 0.0
        last = batch.batch["response_mask"].sum(-1) - 1
        rewards[torch.arange(len(batch)), last] = torch.arange(len(batch)) * self.weight
        return rewards, extra

    def in_order(self, batch: Any) -> bool:
        return list(dict.fromkeys(batch.non_tensor_batch["uid"])) == self.order == sorted(self.order, reverse=True)

    def _validate(self) -> dict[str, float]:
        self.seen.append(f"validate {self.global_steps}")
        return {"val-core/mine/acc/mean@1": 0.5, "mine/validated": float(self.global_steps)}

    def fit(self) -> dict[str, Any]:
        self.seen.append("fit")
        return super().fit()


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def as_columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.array([row[name] for row in rows], dtype=object) for name in rows[0]}


def test_what_a_recipe_overrides_changes_the_run(example: Any, connected: None, tmp_path: Path) -> None:
    example.write_data(tmp_path)
    trainer = example.make_trainer(
        "grpo",
        tmp_path,
        steps=2,
        kind=Recipe,
        weight=0.5,
        config=small(example, "grpo", tmp_path, 2),
        train_dataset=[example_row(number) for number in range(16)],
    )
    assert len(trainer.train_dataloader) == 1
    assert (trainer.use_critic, trainer.use_rm, trainer.use_reference_policy) == (False, False, False)
    with pytest.raises(AttributeError, match="after init_workers"):
        trainer.actor_rollout_wg  # noqa: B018
    trainer.init_workers()
    try:
        assert trainer.actor_rollout_wg.world_size == 1
        trainer.fit()
    finally:
        trainer.shutdown()
    assert trainer.seen == ["fit", "validate 0", "reward 1 reversed", "reward 2 reversed", "validate 2"]
    trained = [row for row in rows(tmp_path) if "train/version" in row]
    assert [row["reward/mean"] for row in trained] == [3.75, 3.75]
    assert [row["mine/balanced"] for row in trained] == [1.0, 1.0]
    validated = [row for row in rows(tmp_path) if "mine/validated" in row]
    assert [row["mine/validated"] for row in validated] == [0.0, 2.0]
    assert [row["val-core/mine/acc/mean@1"] for row in validated] == [0.5, 0.5]
    assert "eval/val/accuracy" not in validated[0]  # nothing was generated


def test_registered_functions_train_as_those_that_ship(example: Any, connected: None, tmp_path: Path) -> None:
    """The user's copies of GRPO and of PPO's loss on two ranks; another loss exists only in this process."""

    @register_policy_loss("inner")
    def inner(log_prob: Any, advantages: Any, response_mask: Any, loss_agg_mode: str, config: Any, **_: Any) -> Any:
        return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)

    def trained(name: str, estimator: str, loss: str) -> list[dict[str, float]]:
        folder = tmp_path / name
        folder.mkdir()
        policy_loss = {"policy_loss": {"loss_mode": loss}}
        config = small(
            example,
            "grpo",
            folder,
            2,
            algorithm={"adv_estimator": estimator},
            actor_rollout_ref={"actor": policy_loss},
            trainer={"val_before_train": False, "test_freq": -1, "save_freq": -1},
        )
        fitted(example.make_trainer("grpo", folder, steps=2, config=config, **pools(2, "ActorRollout")))
        return [row for row in rows(folder) if "train/version" in row]

    shipped, mine = trained("shipped", "grpo", "vanilla"), trained("mine", "mine", "mine")
    for one, other in zip(shipped, mine, strict=True):
        for key in ("train/loss/policy", "train/grad_norm/policy", "train/kl", "train/advantage_max", "reward/mean"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
        assert other["mine/ratio_max"] > 0
    assert shipped[0]["train/grad_norm/policy"] > 0
    assert trained("inner", "grpo", "inner")[1]["train/grad_norm/policy"] > 0


def test_a_run_config_of_its_own_trains(example: Any, connected: None, tmp_path: Path) -> None:
    made = example.make_trainer("grpo", tmp_path, steps=2)
    config = config_from_mapping(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"kind": "hf", "path": str(tmp_path / "model")},
            "tasks": {"train": {"kind": "parquet", "path": str(tmp_path / "train.parquet")}},
            "rewards": ["exact"],
            "engine": {"sampling": {"max_new_tokens": 3}},
            "train": {"peak_flops": 1e12},
            "schedule": {"steps": 2, "groups_per_step": 4, "group_size": 2},
            "monitors": [{"kind": "jsonl"}],
        }
    )
    fitted(
        RayPPOTrainer(config, made.tokenizer, made.role_worker_mapping, device_name="cpu", **pools(1, "ActorRollout"))
    )
    (_, row) = [row for row in rows(tmp_path) if "train/version" in row]
    assert 0 < row["perf/mfu"] < 1


def test_an_engine_over_two_gpus_is_that_of_every_second_worker(example: Any, connected: None, tmp_path: Path) -> None:
    made = example.make_trainer("grpo", tmp_path, steps=1)
    config = config_from_mapping(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"kind": "hf", "path": str(tmp_path / "model")},
            "tasks": {"train": {"kind": "parquet", "path": str(tmp_path / "train.parquet")}},
            "rewards": ["exact"],
            "engine": {"kind": "tests.doors.e2e.ppo_workers:Wide", "sampling": {"max_new_tokens": 3}},
            "schedule": {"steps": 1, "groups_per_step": 4, "group_size": 2},
            "monitors": [{"kind": "jsonl"}],
        }
    )

    def trainer(ranks: int) -> RayPPOTrainer:
        on = pools(ranks, "ActorRollout")
        return RayPPOTrainer(config, made.tokenizer, made.role_worker_mapping, device_name="cpu", **on)

    alone = trainer(1)
    with refused(ConfigError, "over 2 GPUs", "1 ranks"):
        fitted(alone)
    both = trainer(2)
    both.init_workers()
    try:
        (context, _), other = both.actor_rollout_wg.run("rollout_facts")
        assert context > 3
        assert other is None
        both.fit()
    finally:
        both.shutdown()
    assert [row for row in rows(tmp_path) if "train/version" in row]


class Unheard(RayPPOTrainer):
    def _update_actor(self, batch: Any) -> Any: ...


def test_what_nothing_calls_or_has_says_what_to_use(example: Any, tmp_path: Path) -> None:
    with refused(ConfigError, "Unheard._update_actor", "ActorRolloutRefWorker"):
        example.make_trainer("grpo", tmp_path, steps=1, kind=Unheard)
    trainer = example.make_trainer("grpo", tmp_path, steps=1)
    for name, message in (
        ("critic_wg", "the advantage estimator reads values"),
        ("kl_ctrl_in_reward", "use_kl_in_reward"),
        ("async_rollout_manager", "generate_sequences"),
        ("_dump_generations", "rollouts/"),
        ("reward_function", "has no attribute"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(trainer, name)
    assert not hasattr(trainer, "ref_policy_wg")
    assert trainer.global_steps == 0


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[TriviumError], str]] = [
    ({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}, {}, ConfigError, "actor_rollout_ref.actor.strategy"),
    ({"data": {"train_batch_size": 99}}, {}, DataError, "99"),
    ({"data": {"max_prompt_length": 3}}, {}, DataError, "data.max_prompt_length"),
    ({}, {"device_name": "npu"}, ConfigError, "'npu'"),
]


@pytest.mark.parametrize(("config", "beside", "kind", "name"), REFUSED)
def test_what_is_unsupported_is_refused_before_anything_starts(
    example: Any, tmp_path: Path, config: dict[str, Any], beside: dict[str, Any], kind: type[TriviumError], name: str
) -> None:
    with refused(kind, name):
        example.make_trainer(
            "ppo", tmp_path, steps=1, config=merged(example.config("ppo", tmp_path, 1), config), **beside
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
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
    config = merged(
        example.config("grpo", tmp_path, 1),
        {
            "custom_reward_function": {"path": str(tmp_path / "mine.py"), "name": "score"},
            "reward_model": {"reward_manager": "naive", "reward_kwargs": {}},
        },
    )
    trainer = example.make_trainer("grpo", tmp_path, steps=1, config=config, reward_fn=None)
    task = trainer.run_config.tasks["train"].data.visit(0, 0)
    turn = Turn(np.array([1, 2]), np.array([3]), np.zeros(1), np.zeros(1), StopReason.EOS, "3")  # pyright: ignore[reportArgumentType]
    assert trainer._setup.rewards is not None
    judged, _ = trainer._setup.rewards([Group(0, task, (Trajectory(0, (turn,)),))])
    assert judged[0].trajectories[0].reward == 3.0
