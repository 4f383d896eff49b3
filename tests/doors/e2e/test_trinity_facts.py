"""Facts of Trinity-RFT's API documents about the Trainer and its engine, by what a call does."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.doors.e2e.test_trinity_door import EXPLORED, config, experiences, rows, steps, trained
from trivium.config import build
from trivium.frontdoors.trinity import (
    MONITOR,
    SAMPLE_STRATEGY,
    Config,
    SampleStrategy,
    SyncMethod,
    SyncStyle,
    Trainer,
    VerlPPOTrainerWrapper,
    get_logger,
    load_config,
    prefix_metrics,
)
from trivium.loops import train_step
from trivium.types import Metrics

OWN_PARTS = """
from trivium.frontdoors.trinity import VerlPPOTrainerWrapper


class Sender(VerlPPOTrainerWrapper):
    calls = []

    def sync_weight(self):
        self.calls.append("sync_weight")
        super().sync_weight()

    def upload_state_dict(self):
        self.calls.append("upload_state_dict")
        super().upload_state_dict()
"""


@pytest.fixture
def shaped(tmp_path: Path) -> Config:
    return shaped_in(tmp_path)


def shaped_in(tmp_path: Path) -> Config:
    """A config of Trinity's shape, from a file."""
    model = build("models", config(tmp_path, EXPLORED).model, seed=0).materialize(tmp_path / "model")
    lines = [f'{{"question": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(3) for b in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    (tmp_path / "parts.py").write_text(OWN_PARTS)
    (tmp_path / "config.yaml").write_text(f"""
project: facts
name: first
checkpoint_root_dir: {tmp_path / "runs"}
algorithm: {{algorithm_type: grpo, repeat_times: 2, kl_loss_fn: none}}
model: {{model_path: {model}, max_model_len: 24, max_response_tokens: 4}}
buffer:
  batch_size: 2
  total_steps: 3
  explorer_input:
    taskset: {{path: {tmp_path / "rows.jsonl"}, format: {{prompt_key: question, response_key: answer}}}}
    default_workflow_type: math_workflow
    default_reward_fn_type: math_boxed_reward
trainer: {{save_interval: 0}}
""")
    return load_config(tmp_path / "config.yaml")


async def test_a_train_step_does_not_block_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, began, allowed = VerlPPOTrainerWrapper(config(tmp_path, EXPLORED)), threading.Event(), threading.Event()
    await engine.prepare()

    def slow(*args: Any) -> Metrics:
        began.set()
        assert allowed.wait(120)
        return train_step(*args)

    monkeypatch.setattr("trivium.frontdoors.trinity.objects.verl_wrapper.train_step", slow)
    task = asyncio.create_task(engine.train_step(experiences()))
    while not began.is_set():
        await asyncio.sleep(0.01)
    assert engine.train_step_num == 0, "the loop goes on while the step is taken"
    allowed.set()
    assert (await task)["train/version"] == 1
    monkeypatch.setattr("trivium.frontdoors.trinity.objects.verl_wrapper.train_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await engine.train_step(experiences())
    engine.shutdown()


async def test_nccl_of_one_process_calls_sync_weight(shaped: Config, tmp_path: Path) -> None:
    shaped.trainer.trainer_type = f"{tmp_path / 'parts.py'}:Sender"
    shaped.synchronizer.sync_method = SyncMethod.NCCL
    trainer = Trainer(shaped)
    await trained(trainer)
    engine: Any = trainer.engine
    assert engine.calls
    assert set(engine.calls) == {"sync_weight"}
    await trainer.shutdown()


async def test_a_step_that_fails_after_it_moved_on_is_saved(tmp_path: Path) -> None:
    class Failing(Trainer):
        async def train_step(self) -> bool:
            going_on = await super().train_step()
            if self.train_step_num == 2:
                raise RuntimeError("after the step")
            return going_on

    trainer = Failing(config(tmp_path, EXPLORED))
    with pytest.raises(RuntimeError, match="after the step"):
        await trained(trainer)
    assert not trainer.train_continue
    assert steps(tmp_path) == [2]
    await trainer.shutdown()
    again = Trainer(config(tmp_path, EXPLORED))
    assert (await trained(again), again.train_step_num) == ("trainer", 3)
    await again.shutdown()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


async def test_the_documents_own_methods_run_as_they_are_written(shaped: Config, tmp_path: Path) -> None:
    class AsWritten(Trainer):
        async def train_step(self) -> bool:
            asked = self.train_step_num + 1
            experiences, about_sample, examples = await self.sample_strategy.sample(asked)
            sizes.append(experiences.batch_size)
            about_step = await self.engine.train_step(experiences)
            assert self.train_step_num == asked
            about_mine = {"mine/examples": float(len(examples))}
            self.monitor.log(about_step | prefix_metrics(about_sample, "sample") | about_mine, asked)
            self.logger.info("step %d", asked)
            if examples and self.config.trainer.enable_preview:
                self._log_experiences(examples)
            return True

        def need_sync(self) -> bool:
            settings = self.config.synchronizer
            assert settings.sync_style == SyncStyle.FIXED
            is_due = not self.train_step_num % settings.sync_interval
            return is_due and self.train_step_num != self.last_sync_step

        def _log_experiences(self, samples: list[dict[str, Any]]) -> None:
            self._sample_exps_to_log.extend(samples)
            shown.append(len(self._sample_exps_to_log))
            if self.train_step_num % self.config.synchronizer.sync_interval == 0:
                table = pd.DataFrame(self._sample_exps_to_log)
                self.monitor.log_table("rollout_examples", table, self.train_step_num)
                self._sample_exps_to_log.clear()

    shown, sizes = list[int](), list[int]()
    shaped.trainer.enable_preview = True
    trainer = AsWritten(shaped)
    assert trainer._sample_exps_to_log == []
    assert (await trained(trainer), trainer.train_step_num) == ("trainer", 3)
    assert len(shown) == 3
    assert all(shown)
    await trainer.shutdown()
    run_dir = tmp_path / "runs" / "facts" / "first"
    assert (sizes, steps(run_dir)) == ([4, 4, 4], [3])
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3]
    assert {"mine/examples", "train/loss/policy", "sample/task_count"} <= rows(run_dir)[0].keys()


def test_the_names_of_the_documents_exist(shaped: Config, tmp_path: Path) -> None:
    assert shaped.trainer.name == "trainer"
    assert shaped.synchronizer.sync_interval == 1
    assert shaped.algorithm.sample_strategy_args == {}
    with pytest.raises(AttributeError):
        _ = shaped.trainer.nothing_of_that_name
    assert Config(mode="train", trainer={"total_steps": 3}).trainer.total_steps == 3
    assert shaped.check_and_update() is shaped
    assert prefix_metrics({"a": 1.0}, "sample", {"b": 2.0}) == {"sample/a": 1.0, "b": 2.0}
    assert isinstance(get_logger(__name__), logging.Logger)
    monitor = MONITOR.get("tensorboard")(project="p", group="g", name="n", role="trainer", config=shaped)
    monitor.log(data={"a": 1.0}, step=1)
    monitor.close()
    strategy = SAMPLE_STRATEGY.get("default")(buffer_config=shaped.buffer)
    assert isinstance(strategy, SampleStrategy)
    assert rows(tmp_path / "runs" / "p" / "g" / "n")[0]["a"] == 1.0
