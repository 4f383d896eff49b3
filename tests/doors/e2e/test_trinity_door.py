"""Trinity-RFT's Trainer and engines as its users call them, over runs of the tiny model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.failing import refused
from tests.processes import commands
from trivium.config import RunConfig, build, config_from_mapping
from trivium.foundation.errors import ConfigError, DataError, RunDirError, TriviumError
from trivium.frontdoors.trinity import (
    Experiences,
    RunningStatus,
    Trainer,
    VerlPPOTrainerWrapper,
    get_trainer_wrapper,
)
from trivium.runtime.launch import run
from trivium.sync.files import FileChannel
from trivium.types import Experience, Group

ENGINE = f"{Path(__file__).with_name('seven_members.py')}:Seven"
MODEL = {
    "kind": "tiny",
    "alphabet": "0123456789+=",
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "mlp": 64,
    "max_position": 24,
}
TASK = {"kind": "arithmetic", "max_operand": 9}
COMMON: dict[str, Any] = {
    "model": MODEL,
    "tasks": {"train": TASK, "test": TASK},
    "rewards": [{"kind": "exact"}],
    "engine": {"sampling": {"max_new_tokens": 4}},
    "checkpoint": {"save_every": 0},
    "monitors": [{"kind": "jsonl"}],
    "cluster": {"threads": 1},
}
SUPERVISED = {
    **COMMON,
    "algorithm": {"kind": "sft"},
    "buffer": {"kind": "files"},
    "schedule": {"steps": 3, "groups_per_step": 16, "group_size": 1},
}
EXPLORED = {
    **COMMON,
    "algorithm": {"kind": "grpo"},
    "schedule": {"steps": 3, "groups_per_step": 2, "group_size": 2},
}


def config(run_dir: Path, base: dict[str, Any], **changes: Any) -> RunConfig:
    return config_from_mapping({**base, "run": {"dir": str(run_dir)}, **changes})


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


# --------------------------------------------------------------------------- the trainer


async def trained(trainer: Trainer) -> str:
    async with asyncio.timeout(120):
        return await trainer.train()


async def test_the_run_of_a_trainer_is_that_of_trivium_run(tmp_path: Path) -> None:
    door, plain = tmp_path / "door", tmp_path / "plain"
    trainer = Trainer(config(door, SUPERVISED))
    trainer.prepare()
    await trained(trainer)
    await trainer.shutdown()
    await asyncio.to_thread(run, config(plain, SUPERVISED))
    assert weights_at(door, 3).keys() == weights_at(plain, 3).keys()
    for name, tensor in weights_at(door, 3).items():
        assert torch.equal(tensor, weights_at(plain, 3)[name])
    longer = {"schedule": {**SUPERVISED["schedule"], "steps": 4}}
    assert (await asyncio.to_thread(run, config(door, SUPERVISED, **longer)))["steps"] == 4  # either continues it


async def test_steps_are_taken_one_by_one(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, SUPERVISED))
    trainer.prepare()
    assert [await trainer.train_step() for _ in range(3)] == [True, True, False]
    assert trainer.need_sync()  # as in the original, though nobody explores
    trainer.save_checkpoint(block_until_saved=True)
    assert steps(tmp_path) == [3]
    await trainer.shutdown()
    assert trainer.synchronizer.trainer_status is RunningStatus.STOPPED
    again = Trainer(config(tmp_path, SUPERVISED, schedule={**SUPERVISED["schedule"], "steps": 5}))
    again.prepare()
    assert again.last_trainer_sync_step == again.train_step_num == 3
    await trained(again)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    await again.shutdown()


async def test_overrides_of_a_subclass_take_effect(tmp_path: Path) -> None:
    called: Counter[str] = Counter()

    class Mine(Trainer):
        def need_sync(self) -> bool:
            called["need_sync"] += 1
            return super().need_sync()

        def sync_weight(self) -> None:
            called["sync_weight"] += 1
            super().sync_weight()

        async def train_step(self) -> bool:
            called["train_step"] += 1
            return await super().train_step()

        def _log_experiences(self, samples: list[dict[str, Any]]) -> None:
            called["samples"] += len(samples)
            super()._log_experiences(samples)

        def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> Any:
            called["save_checkpoint"] += 1
            return super().save_checkpoint(block_until_saved, save_as_hf)

    run_section = {"dir": str(tmp_path), "enable_preview": True, "keep": "tokens"}
    trainer = Mine(config_from_mapping({**EXPLORED, "run": run_section, "checkpoint": {"save_every": 2}}))
    trainer.prepare()
    await trained(trainer)
    await trainer.shutdown()
    assert called["need_sync"] >= 3
    assert called["samples"] >= 3
    assert (called["sync_weight"], called["train_step"], called["save_checkpoint"]) == (4, 3, 2)
    kept = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert kept == {f"{kind}-{step:06d}.safetensors" for kind in ("step", "update") for step in (1, 2, 3)}


class Failing(Trainer):
    """Fails when its third step is taken."""

    async def train_step(self) -> bool:
        if self.train_step_num == 2:
            raise LookupError("no such row")
        return await super().train_step()


@pytest.mark.parametrize(("kind", "code", "found"), [(Trainer, 0, ""), (Failing, 1, "LookupError: no such row")])
async def test_an_explorer_of_another_process_ends_with_the_trainer(
    kind: type[Trainer], code: int, found: str, tmp_path: Path
) -> None:
    meeting = {
        "buffer": {"kind": "sql", "url": f"sqlite:///{tmp_path / 'buffer.db'}"},
        "sync": {"method": "checkpoint"},
    }
    said = {**EXPLORED, **meeting, "run": {"dir": str(tmp_path / "run"), "name": tmp_path.name}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    with commands(tmp_path) as start:
        explorer = start("explore", "run", str(tmp_path / "run.yaml"), "run.mode=explore")
        trainer = kind(config_from_mapping({**said, "run": {**said["run"], "mode": "train"}}))
        trainer.name = "polaris"
        trainer.prepare()
        with pytest.raises(LookupError) if code else nullcontext():
            assert await trained(trainer) == "polaris"
        assert await asyncio.to_thread(explorer.wait, 120) == code
        assert found in explorer.text
        await trainer.shutdown()


def test_what_a_trainer_does_not_do_is_refused(tmp_path: Path) -> None:
    stages = {"stages": [{"schedule": SUPERVISED["schedule"]}] * 2}
    with refused(ConfigError, "2 stages"):
        Trainer(config(tmp_path, SUPERVISED, **stages))
    with refused(ConfigError, "bench"):
        Trainer(config_from_mapping({**SUPERVISED, "run": {"dir": str(tmp_path), "mode": "bench"}}))
    with refused(ConfigError, "cluster.explorers 2"):
        Trainer(config(tmp_path, EXPLORED, cluster={"kind": "ray", "explorers": 2, "threads": 1}))


# --------------------------------------------------------------------------- a user's engine


def weights_at(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step-{step:06d}" / "policy"
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


async def test_an_engine_of_seven_members_trains_the_demo_task(tmp_path: Path) -> None:
    """Supervised, as the demo begins. An explorer measures it, so its weights are what the explorer has."""
    changes = {
        "train": {"kind": ENGINE},
        "schedule": {"steps": 60, "groups_per_step": 64, "group_size": 1},
        "evaluation": {"taskset": "test", "sampling": {"max_new_tokens": 4, "temperature": 0.0}},
    }
    trainer = Trainer(config(tmp_path, SUPERVISED, **changes))
    trainer.prepare()
    await trained(trainer)
    await trainer.shutdown()
    measured = [row["eval/test/accuracy"] for row in rows(tmp_path) if "eval/test/accuracy" in row]
    assert len(measured) == 2
    assert measured[0] < 0.1 < 0.3 < measured[1]
    losses = [row["train/loss"] for row in rows(tmp_path) if "train/loss" in row]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("name", "method", "verb"), [("Seven", "memory", "upload"), ("Modern", "checkpoint", "save weights")]
)
async def test_an_explorer_samples_with_the_weights_of_a_users_engine(
    name: str, method: str, verb: str, tmp_path: Path
) -> None:
    """The log-probabilities that it sampled with are those of the engine's own model, at every step."""
    kind = ENGINE.replace(":Seven", f":{name}")
    changes = {"train": {"kind": kind}, "sync": {"method": method}, "checkpoint": {"save_every": 2}}
    trainer = Trainer(config(tmp_path, EXPLORED, **changes))
    engine: Any = trainer.engine
    assert type(engine).__name__ == name
    trainer.prepare()
    await trained(trainer)
    await trainer.shutdown()
    assert len(engine.differences) == 3
    assert max(engine.differences) < 1e-4
    assert engine.calls == ["prepare", *(f"{verb} {step}" for step in (0, 1, 2)), "save 2", f"{verb} 3", "save 3"]
    again = Trainer(config(tmp_path, EXPLORED, **changes, schedule={**EXPLORED["schedule"], "steps": 4}))
    await trained(again)
    await again.shutdown()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


async def test_an_engine_that_forgets_what_it_owes_is_told(tmp_path: Path) -> None:
    class Forgetful(Trainer):
        def __init__(self, said: RunConfig, **forgets: Any) -> None:
            super().__init__(said)
            vars(self.engine).update(forgets)

    said = {"train": {"kind": ENGINE}}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (EXPLORED, {"upload_state_dict": lambda: None}, r"weights of step 0 from Seven.*\n.*\n.*set_model_state_dict"),
        (SUPERVISED, {"train_step": lambda batch: {}}, r"train_step_num was 0 before it and is 0 now"),
        (SUPERVISED, {"train_step": lambda batch: None}, r"it returned a NoneType"),
        (SUPERVISED, {"train_step": lambda batch: {"note": "x"}}, r"'note' is 'x'"),
    ]
    for number, (base, forgets, message) in enumerate(cases):
        trainer = Forgetful(config(tmp_path / str(number), base, **said), **forgets)
        with pytest.raises(TriviumError, match=message):
            await trained(trainer)
        await trainer.shutdown()
    trainer = Trainer(config(tmp_path / "saved", SUPERVISED, **said))
    vars(trainer.engine)["save_checkpoint"] = lambda block_until_saved=False: None
    await trained(trainer)
    await trainer.shutdown()
    again = Trainer(config(tmp_path / "saved", SUPERVISED, **said))
    with refused(RunDirError, "Seven", "step 0", "prepare()"):
        again.prepare()
    await again.shutdown()


async def test_the_last_step_of_an_engine_that_fails_is_saved(tmp_path: Path) -> None:
    said = config(tmp_path, SUPERVISED, train={"kind": ENGINE})
    trainer = Trainer(said)
    engine: Any = trainer.engine
    whole = engine.train_step

    def train_step(batch: Experiences) -> Any:
        if engine.steps == 2:
            raise ZeroDivisionError("of a loss")
        return whole(batch)

    engine.train_step = train_step
    with pytest.raises(ZeroDivisionError, match="of a loss"):
        await trained(trainer)
    await trainer.shutdown()
    assert engine.calls[-1] == "save 2"
    again = Trainer(said)
    await trained(again)
    await again.shutdown()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_an_engine_of_seven_members_is_driven_by_its_trainer_alone(tmp_path: Path) -> None:
    with refused(ConfigError, "Seven", "trivium.protocols.TrainEngine"):
        run(config(tmp_path, SUPERVISED, train={"kind": ENGINE}))


# --------------------------------------------------------------------------- the built-in engine


def experiences(rows: int = 4) -> list[Experience]:
    made = []
    for row in range(rows):
        prompt, response = [3, 4, 12 - row % 2][: 2 + row % 2], [5, 6, 7][: 1 + row % 3]
        length = len(prompt) + len(response)
        mask = [False] * len(prompt) + [True] * len(response)
        made.append(
            Experience(
                tokens=torch.tensor(prompt + response).numpy(),
                response_mask=torch.tensor(mask).numpy(),
                rollout_log_prob=torch.where(torch.tensor(mask), -1.0, 0.0).numpy(),
                policy_version=torch.zeros(length, dtype=torch.int32).numpy(),
                group_id=f"train/{row // 2}/0",
                index=row % 2,
                rewards={"exact": float(row % 2)},
            )
        )
    return made


def test_experiences_are_padded_as_the_seeds_are() -> None:
    batch = Experiences.gather_experiences(experiences(), pad_token_id=9)
    assert (batch.batch_size, batch.prompt_length, len(batch)) == (4, 3, 4)
    assert batch.tokens.tolist() == [
        [9, 3, 4, 5, 9, 9],
        [3, 4, 11, 5, 6, 9],
        [9, 3, 4, 5, 6, 7],
        [3, 4, 11, 5, 9, 9],
    ]
    assert batch.attention_masks.int().tolist()[0] == [0, 1, 1, 1, 0, 0]
    assert batch.action_masks.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert batch.logprobs.tolist()[1] == [-1.0, -1.0, 0.0]
    assert batch.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert batch.advantages is None
    assert batch.group_ids == ["train/0/0", "train/0/0", "train/1/0", "train/1/0"]
    assert [eid.rid for eid in batch.eids][:2] == ["train/0/0/0", "train/0/0/1"]
    assert batch[1:3].rewards.tolist() == [1.0, 0.0]


async def test_the_built_in_engine_takes_experiences_or_a_list_of_them(tmp_path: Path) -> None:
    engine = get_trainer_wrapper(config(tmp_path, EXPLORED))
    assert isinstance(engine, VerlPPOTrainerWrapper)
    assert engine.train_step_num == 0
    await engine.prepare()
    metrics = await engine.train_step(Experiences.gather_experiences(experiences()))
    assert (metrics["train/version"], engine.train_step_num) == (1, 1)
    assert (await engine.train_step(experiences()))["train/version"] == 2
    for wrong in ([1, 2], "text", {"tokens": []}, [Group.__new__(Group)]):
        with refused(DataError, "Experiences", "gather_experiences"):
            await engine.train_step(wrong)
    assert engine.processor is None
    assert engine.post_process_batch(batch := object()) is batch
    engine.shutdown()


async def test_saves_are_the_runs_and_do_not_block_unless_told_to(tmp_path: Path) -> None:
    engine = VerlPPOTrainerWrapper(config(tmp_path, EXPLORED, checkpoint={"keep": 2}))
    await engine.prepare()
    inner, allowed = engine.engine, threading.Event()
    assert inner is not None
    save = inner.save

    def slow(directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        save(directory, None if on_copied is None else lambda: (on_copied(), allowed.wait(120)))

    inner.save = slow
    for step in (1, 2, 3):
        await engine.train_step(experiences())
        engine.save_checkpoint()
        assert step not in steps(tmp_path)  # training may go on, and the files are yet to be written
        allowed.set()
        engine.wait_for_save()
        allowed.clear()
    assert steps(tmp_path) == [2, 3]  # `keep`
    written = (tmp_path / "checkpoints" / "step-000003" / "manifest.json").stat().st_mtime_ns
    engine.save_checkpoint()  # nothing waits for `allowed`
    engine.save_checkpoint(block_until_saved=True, save_as_hf=True)
    assert (tmp_path / "checkpoints" / "step-000003" / "manifest.json").stat().st_mtime_ns == written
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface" / "step-000003").num_parameters() > 0
    engine.shutdown()
    again = VerlPPOTrainerWrapper(config(tmp_path, EXPLORED))
    await again.prepare()
    assert again.train_step_num == 3
    again.shutdown()
    trainer = Trainer(config(tmp_path, EXPLORED, schedule={**EXPLORED["schedule"], "steps": 4}))
    await trained(trainer)  # it goes on where the engine was left
    assert trainer.train_step_num == 4
    await trainer.shutdown()


async def test_weights_are_offered_and_the_board_is_told(tmp_path: Path) -> None:
    engine = VerlPPOTrainerWrapper(config(tmp_path / "memory", EXPLORED))
    await engine.prepare()
    engine.upload_state_dict()
    assert engine.run is not None
    assert engine.run.synchronizer.published == engine.run.channel.versions == (0,)
    assert engine.run.synchronizer.trainer_status is RunningStatus.RUNNING
    engine.save_state_dict()  # no explorer looks for it, and it is there
    assert [path.name for path in (tmp_path / "memory" / "sync").iterdir()] == ["version-000000"]
    engine.shutdown()

    engine = VerlPPOTrainerWrapper(config(tmp_path / "files", EXPLORED, sync={"method": "checkpoint"}))
    await engine.prepare()
    await engine.train_step(experiences())
    engine.save_state_dict()
    assert engine.run is not None
    assert engine.run.synchronizer.published == (1,)
    reader = FileChannel(
        keep=1, directory=tmp_path / "files" / "sync", synchronizer=engine.run.synchronizer, role="explorer-0"
    )
    assert engine.engine is not None
    held = dict(engine.engine.export_weights())
    assert all(torch.equal(tensor, held[name]) for name, tensor in reader.collect(1))
    engine.shutdown()


# --------------------------------------------------------------------------- configs of Trinity's shape

OWN = """
from trivium.frontdoors.trinity import TrainEngineWrapper

class Own(TrainEngineWrapper):
    def __init__(self, config):
        self.root, self.batches, self.saved = config["checkpoint_root_dir"], [], []

    def prepare(self): ...

    @property
    def train_step_num(self):
        return len(self.batches)

    async def train_step(self, batch):
        self.batches.append(batch)
        return {"rows": batch.batch_size}

    def save_checkpoint(self, block_until_saved=False):
        self.saved.append(len(self.batches))

    def sync_weight(self): ...
    def upload_state_dict(self): ...
    def save_state_dict(self): ...
"""


async def test_a_config_of_trinitys_shape_names_trainer_and_engine(tmp_path: Path) -> None:
    model = build("models", config(tmp_path, COMMON).model, seed=0).materialize(tmp_path / "model")
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"q": f"{a}+{a}=", "a": str(2 * a)}) + "\n" for a in range(10)))
    (tmp_path / "own.py").write_text(OWN)
    said = {
        "mode": "train",
        "project": "sums",
        "name": "first",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
        "model": {"model_path": str(model), "max_model_len": 24, "max_response_tokens": 4},
        "buffer": {
            "total_steps": 3,
            "train_batch_size": 4,
            "trainer_input": {
                "experience_buffer": {
                    "storage_type": "file",
                    "path": str(data),
                    "format": {"prompt_type": "plaintext", "prompt_key": "q", "response_key": "a"},
                }
            },
        },
        "trainer": {
            "name": "polaris",
            "trainer_type": f"{tmp_path / 'own.py'}:Own",
            "save_interval": 2,
        },
    }
    trainer = Trainer(said)
    trainer.prepare()
    assert await trained(trainer) == "polaris"
    assert trainer.train_step_num == 3
    assert steps(tmp_path / "runs" / "sums" / "first") == [2, 3]
    engine: Any = trainer.engine
    assert engine.saved == [2, 3]
    assert [batch.batch_size for batch in engine.batches] == [4, 4, 4]
    assert engine.batches[0].tokens.shape == engine.batches[0].attention_masks.shape
    await trainer.shutdown()


# --------------------------------------------------------------------------- several ranks


@pytest.fixture
def address(ray_address: str) -> Iterator[str]:
    """A Ray instance that this process leaves again."""
    yield ray_address
    ray.shutdown()


async def test_the_ranks_that_the_config_asks_for_train(address: str, tmp_path: Path) -> None:
    cluster = {"kind": "ray", "address": address, "ranks": 2, "threads": 1}
    engine = get_trainer_wrapper(config(tmp_path / "engine", EXPLORED, cluster=cluster))
    assert isinstance(engine, VerlPPOTrainerWrapper)
    engine.init_workers()
    assert engine.run is not None
    assert engine.run.ranks is not None
    assert len(engine.run.ranks.actors.names) == 2
    await engine.prepare()
    await engine.train_step(experiences())
    engine.upload_state_dict()
    assert engine.run.synchronizer.published == (1,)
    engine.save_checkpoint(block_until_saved=True)
    assert steps(tmp_path / "engine") == [1]
    engine.shutdown()

    trainer = Trainer(config(tmp_path / "run", EXPLORED, cluster=cluster))
    await trained(trainer)
    await trainer.shutdown()
    assert steps(tmp_path / "run") == [3]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


async def test_a_users_engine_on_ray_passes_its_weights_to_the_actor(address: str, tmp_path: Path) -> None:
    cluster = {"kind": "ray", "address": address, "threads": 1}
    kind = ENGINE.replace(":Seven", ":OnRay")
    for steps in (2, 3):  # the second trainer continues the run with an actor of its own
        schedule = {**EXPLORED["schedule"], "steps": steps}
        trainer = Trainer(config(tmp_path, EXPLORED, cluster=cluster, train={"kind": kind}, schedule=schedule))
        engine: Any = trainer.engine
        await trained(trainer)
        assert ray.get(trainer.synchronizer.get_latest_model_version.remote()) == steps
        assert ray.get(trainer.synchronizer.get_trainer_status.remote()) is RunningStatus.STOPPED
        await trainer.shutdown()
        assert max(engine.differences) < 1e-4
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


async def test_an_engine_on_ray_that_forgets_its_weights_is_told_the_call_of_an_actor(
    address: str, tmp_path: Path
) -> None:
    cluster = {"kind": "ray", "address": address, "threads": 1}
    trainer = Trainer(config(tmp_path, EXPLORED, cluster=cluster, train={"kind": ENGINE}))
    vars(trainer.engine)["upload_state_dict"] = lambda: None
    with refused(TriviumError, "Seven", "step 0", "ray.get(", "set_model_state_dict.remote("):
        await trained(trainer)
    await trainer.shutdown()


@pytest.mark.parametrize("method", ["checkpoint", "nccl"])
def test_a_users_engine_on_ray_needs_a_channel_of_the_object_store(method: str, tmp_path: Path) -> None:
    said = config(tmp_path, EXPLORED, cluster={"kind": "ray"}, train={"kind": ENGINE}, sync={"method": method})
    with refused(ConfigError, "Seven", "sync.method", method, "memory"):
        Trainer(said)
