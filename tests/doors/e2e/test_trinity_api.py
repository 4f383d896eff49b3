"""Each fact of Trinity-RFT's two API documents (`trainer` and `verl_trainer`) is one line: an id, the fact, its check.

A fact that is refused has the reason and the check of the refusal under `REFUSED`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_documents import check_parameters, shown_by

from tests.doors.e2e.test_trinity_door import EXPLORED, config, experiences, steps
from tests.doors.e2e.test_trinity_facts import shaped_in
from trivium.foundation.errors import ConfigError
from trivium.frontdoors import trinity
from trivium.frontdoors.trinity import (
    CheckpointMonitor,
    RunningStatus,
    SyncMethod,
    SyncStyle,
    TrainEngineWrapper,
    Trainer,
    VerlPPOTrainerWrapper,
    get_trainer_wrapper,
)
from trivium.types import SaveStrategy

SIGNATURES: dict[Callable[..., Any], str] = {
    Trainer: "config",
    Trainer.train: "",
    Trainer.train_step: "",
    Trainer.need_sync: "",
    Trainer.sync_weight: "",
    Trainer.shutdown: "",
    Trainer.is_alive: "",
    Trainer.prepare: "",
    TrainEngineWrapper.prepare: "",
    TrainEngineWrapper.train_step: "batch",
    TrainEngineWrapper.save_checkpoint: "block_until_saved=False",
    TrainEngineWrapper.sync_weight: "",
    TrainEngineWrapper.upload_state_dict: "",
    TrainEngineWrapper.save_state_dict: "",
    get_trainer_wrapper: "config",
    CheckpointMonitor: "save_strategy, default_local_dir, default_hdfs_dir=None",
    CheckpointMonitor.update_latest_checkpoint_step: "step",
    CheckpointMonitor.update_latest_state_dict_step: "step",
    CheckpointMonitor.register_thread_count: "step, *, state_dict_thread_count=0, checkpoint_thread_count=0",
    CheckpointMonitor.monitor_step: "step, is_state_dict=False",
    CheckpointMonitor.notify_started: "node_id, job_id",
    CheckpointMonitor.notify_finished: "step, is_state_dict=False",
    CheckpointMonitor.get_actor: "namespace, save_strategy=None, default_local_dir=None, default_hdfs_dir=None",
    VerlPPOTrainerWrapper: "global_config",
    VerlPPOTrainerWrapper.init_workers: "",
    VerlPPOTrainerWrapper.prepare: "",
    VerlPPOTrainerWrapper.save_state_dict: "",
    VerlPPOTrainerWrapper.upload_state_dict: "",
    VerlPPOTrainerWrapper.train_step: "batch_exps",
    VerlPPOTrainerWrapper.save_checkpoint: "block_until_saved=False, save_as_hf=False",
    VerlPPOTrainerWrapper.sync_weight: "",
    VerlPPOTrainerWrapper.post_process_batch: "batch",
}
"""Each function of the documents."""

PARTS = """
from trivium.frontdoors.trinity import SampleStrategy, VerlPPOTrainerWrapper


class Notes:
    made, rows, tables, closed = [], [], [], []

    def __init__(self, project, group, name, role, config):
        self.made.append(dict(project=project, group=group, name=name, role=role, config=config))

    def log(self, data, step):
        self.rows.append((step, data))

    def log_table(self, table_name, experiences_table, step):
        self.tables.append((step, table_name, len(experiences_table)))

    def close(self):
        self.closed.append(True)


class Given(SampleStrategy):
    made, asked = [], []

    def __init__(self, buffer_config, **kwargs):
        super().__init__(buffer_config, **kwargs)
        self.made.append((buffer_config.batch_size, kwargs))

    async def sample(self, step, **kwargs):
        self.asked.append(step)
        experiences = await self.exp_buffer.read_async()
        return experiences[::2], {"mine": len(experiences)}, self.exp_buffer.samples


class Verbs(VerlPPOTrainerWrapper):
    calls = []

    def save_checkpoint(self, block_until_saved=False, save_as_hf=False):
        self.calls.append(("save_checkpoint", self.train_step_num))
        super().save_checkpoint(block_until_saved, save_as_hf)

    def upload_state_dict(self):
        self.calls.append(("upload_state_dict", self.train_step_num))
        super().upload_state_dict()

    async def train_step(self, batch_exps: list):
        assert isinstance(batch_exps, list)
        return {**await super().train_step(batch_exps), "mine": 1}
"""


@dataclass
class World:
    """One run of a Trainer over a user's monitor, strategy and engine, an engine without a Trainer, and a monitor."""

    directory: Path
    trainer: Any
    before: dict[str, Any]
    """Attributes after the constructor and after `prepare`."""
    returned: dict[str, Any]
    parts: dict[str, Any]
    wrapper: Any
    saves: Any


class Broken(Trainer):
    async def train_step(self) -> bool:
        raise LookupError("no rows")


class Watched(Trainer):
    continued: list[bool]
    shown: list[int]

    async def train_step(self) -> bool:
        self.continued = [*getattr(self, "continued", []), await super().train_step()]
        return self.continued[-1]

    def _log_experiences(self, samples: list[dict[str, Any]]) -> None:
        super()._log_experiences(samples)
        self.shown = [*getattr(self, "shown", []), len(samples)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp("facts")
    shaped, file = shaped_in(directory), directory / "named.py"
    file.write_text(PARTS)
    shaped.trainer.trainer_type, shaped.trainer.enable_preview, shaped.trainer.save_interval = f"{file}:Verbs", True, 2
    shaped.monitor.monitor_type, shaped.algorithm.sample_strategy = f"{file}:Notes", f"{file}:Given"
    shaped.monitor.monitor_args, shaped.algorithm.sample_strategy_args = {"colour": "red"}, {"a": 1}
    shaped.synchronizer.sync_method = SyncMethod.MEMORY
    names = (
        "config",
        "train_continue",
        "last_sync_step",
        "last_trainer_sync_step",
        "train_step_num",
    )

    async def rolled_out() -> World:
        trainer = Watched(shaped)
        before = {name: getattr(trainer, name) for name in names}
        before["samples"] = list(trainer._sample_exps_to_log)
        before["status"] = trainer.synchronizer.get_trainer_status()
        trainer.prepare()
        before["prepared_sync"] = trainer.last_trainer_sync_step
        before["prepared"] = trainer.synchronizer.get_trainer_status()
        before["need_sync"] = trainer.need_sync()
        async with asyncio.timeout(300):
            returned = {"train": await trainer.train()}
        returned["status"], returned["need_sync"] = trainer.synchronizer.get_trainer_status(), trainer.need_sync()
        returned["shutdown"] = await trainer.shutdown()
        broken = Broken(config(directory / "broken", EXPLORED, sync={"style": "dynamic_by_explorer"}))
        broken.prepare()
        broken.last_sync_step = -1
        returned["no_demand"] = broken.need_sync()
        broken.synchronizer.set_explorer_status(RunningStatus.REQUIRE_SYNC)
        returned["demand"] = broken.need_sync()
        with pytest.raises(LookupError):
            await broken.train()
        returned["failed"] = (broken.train_continue, broken.synchronizer.get_trainer_status())
        await broken.shutdown()
        wrapper = VerlPPOTrainerWrapper(config(directory / "alone", EXPLORED))
        wrapper.init_workers()
        returned["wrapper_before"] = wrapper.train_step_num
        returned["prepare"] = await wrapper.prepare()
        returned["train_step"] = await wrapper.train_step(experiences())
        returned["batch"] = batch = experiences()
        returned["post_process_batch"] = wrapper.post_process_batch(batch)
        returned["save_checkpoint"] = wrapper.save_checkpoint(block_until_saved=True, save_as_hf=True)
        wrapper.upload_state_dict()
        returned["uploaded"] = wrapper.run.synchronizer.get_latest_model_version()
        wrapper.save_state_dict()
        wrapper.shutdown()
        saves = CheckpointMonitor(SaveStrategy.SINGLE_THREAD, str(directory / "saves"))
        return World(directory, trainer, before, returned, parts_of(file), wrapper, saves)

    return asyncio.run(rolled_out())


def parts_of(file: Path) -> dict[str, Any]:
    """The names of the module that a path of the config was imported as."""
    return next(vars(module) for module in sys.modules.values() if getattr(module, "__file__", None) == str(file))


Check = Callable[[World], bool]
SAVES = "doors/trinity/test_save_monitor.py"
NAMES = """
SAMPLE_STRATEGY MONITOR prefix_metrics get_logger Config RunningStatus SyncMethod SyncStyle Experiences Synchronizer
Trainer TrainEngineWrapper get_trainer_wrapper CheckpointMonitor VerlPPOTrainerWrapper
"""
SEVEN = "prepare train_step_num train_step save_checkpoint sync_weight upload_state_dict save_state_dict"
FACTS: list[tuple[str, str, Check]] = [
    *[(f"name-{name}", f"users import {name}", lambda w, name=name: name in dir(trinity)) for name in NAMES.split()],
    ("init-config", "the trainer keeps its config", lambda w: w.before["config"].project == "facts"),
    ("init-logger", "it has a logger", lambda w: callable(w.trainer.logger.info)),
    (
        "init-synchronizer",
        "it has the synchronizer of the run",
        lambda w: isinstance(w.trainer.synchronizer, trinity.Synchronizer),
    ),
    ("init-engine", "its engine is that of the config", lambda w: type(w.trainer.engine) is w.parts["Verbs"]),
    (
        "init-synced",
        "the step of the last sync of the interval begins at 0",
        lambda w: w.before["last_trainer_sync_step"] == 0,
    ),
    ("init-monitor", "the registry of monitors makes its monitor", lambda w: len(w.parts["Notes"].made) == 1),
    *[
        (
            f"init-monitor-{name}",
            f"the monitor gets {name}",
            lambda w, name=name, value=value: w.parts["Notes"].made[0][name] == value,
        )
        for name, value in (("project", "facts"), ("group", ""), ("name", "first"), ("role", "trainer"))
    ],
    (
        "init-monitor-config",
        "the monitor gets the config",
        lambda w: w.parts["Notes"].made[0]["config"].monitor.monitor_type.endswith("Notes"),
    ),
    (
        "init-monitor-args",
        "the config has the monitor's own arguments",
        lambda w: w.parts["Notes"].made[0]["config"].monitor.monitor_args["colour"] == "red",
    ),
    ("init-samples", "no rollouts wait to be shown", lambda w: w.before["samples"] == []),
    ("init-strategy", "the strategy gets the buffer section", lambda w: w.parts["Given"].made[0][0] == 2),
    ("init-strategy-args", "the strategy gets sample_strategy_args", lambda w: w.parts["Given"].made[0][1] == {"a": 1}),
    ("init-continue", "there is a step to take", lambda w: w.before["train_continue"] is True),
    ("init-offered", "no step was offered", lambda w: w.before["last_sync_step"] is None),
    ("prepare-before", "no trainer runs before prepare", lambda w: w.before["status"] is RunningStatus.STOPPED),
    ("prepare-status", "prepare sets the status RUNNING", lambda w: w.before["prepared"] is RunningStatus.RUNNING),
    (
        "prepare-synced",
        "prepare counts the interval from the step of the engine",
        lambda w: w.before["prepared_sync"] == w.before["train_step_num"] == 0,
    ),
    ("train-coroutine", "train is a coroutine", lambda w: inspect.iscoroutinefunction(Trainer.train)),
    ("train-name", "train returns the trainer's name", lambda w: w.returned["train"] == "trainer"),
    ("train-loop", "train takes steps while there is one to take", lambda w: len(w.trainer.continued) == 3),
    ("train-end", "nothing is left to train at the end", lambda w: not w.trainer.train_continue),
    ("train-stopped", "train ends with the status STOPPED", lambda w: w.returned["status"] is RunningStatus.STOPPED),
    (
        "train-saved",
        "train saves its last step",
        lambda w: w.parts["Verbs"].calls[-1][1] == 3 and 3 in steps(run_dir(w)),
    ),
    ("step-coroutine", "train_step is a coroutine", lambda w: inspect.iscoroutinefunction(Trainer.train_step)),
    ("step-bool", "it returns whether the engine continues", lambda w: w.trainer.continued == [True, True, True]),
    ("step-sample", "it samples the number of the step", lambda w: w.parts["Given"].asked == [1, 2, 3]),
    ("step-engine", "the engine trains the sample", lambda w: w.trainer.engine.train_step_num == 3),
    (
        "step-metrics",
        "metrics of the sample are under sample/",
        lambda w: [row["sample/mine"] for row in rows_of(w)] == [4, 4, 4],
    ),
    (
        "step-log",
        "the monitor gets the metrics of each step",
        lambda w: {step for step, _ in w.parts["Notes"].rows} == {1, 2, 3},
    ),
    ("step-preview", "with enable_preview rollouts are shown", lambda w: len(w.trainer.shown) == 3),
    ("step-interval", "save_interval saves between", lambda w: ("save_checkpoint", 2) in w.parts["Verbs"].calls),
    (
        "sync-needed",
        "fixed: a step of the interval that was not offered needs it",
        lambda w: w.before["need_sync"] is True,
    ),
    ("sync-done", "fixed: a step that was offered does not need it", lambda w: w.returned["need_sync"] is False),
    ("sync-quiet", "dynamic: without an explorer that asks there is none", lambda w: w.returned["no_demand"] is False),
    ("sync-demand", "dynamic: an explorer's REQUIRE_SYNC needs it", lambda w: w.returned["demand"] is True),
    (
        "sync-memory",
        "memory: the engine uploads its weights",
        lambda w: {n for n, _ in w.parts["Verbs"].calls} >= {"upload_state_dict"},
    ),
    ("sync-last", "the offered step is remembered", lambda w: w.trainer.last_sync_step == 3),
    (
        "log-table",
        "rollouts are shown as rollout_examples",
        lambda w: {name for _, name, _ in w.parts["Notes"].tables} == {"rollout_examples"},
    ),
    (
        "log-rows",
        "a table has the rollouts of its steps",
        lambda w: all(count for *_, count in w.parts["Notes"].tables),
    ),
    ("log-cleared", "shown rollouts are forgotten", lambda w: w.trainer._sample_exps_to_log == []),
    ("shutdown-coroutine", "shutdown is a coroutine", lambda w: inspect.iscoroutinefunction(Trainer.shutdown)),
    ("shutdown-monitor", "shutdown closes the monitor", lambda w: w.parts["Notes"].closed == [True]),
    ("shutdown-none", "shutdown returns nothing", lambda w: w.returned["shutdown"] is None),
    ("num-property", "train_step_num is a property", lambda w: isinstance(Trainer.train_step_num, property)),
    ("num-engine", "it is the engine's", lambda w: w.trainer.train_step_num == w.trainer.engine.train_step_num),
    ("alive", "a trainer that answers is alive", lambda w: w.trainer.is_alive() is True),
    (
        "styles",
        "styles of a sync have their names",
        lambda w: {"fixed", "dynamic_by_trainer", "dynamic_by_explorer"} == {*SyncStyle},
    ),
    ("methods", "methods of a sync have their names", lambda w: {"nccl", "checkpoint", "memory"} == {*SyncMethod}),
    ("wrapper-abc", "the interface of an engine is abstract", lambda w: issubclass(TrainEngineWrapper, ABC)),
    *[
        (
            f"wrapper-{name}",
            f"an engine implements {name}",
            lambda w, name=name: name in TrainEngineWrapper.__abstractmethods__,
        )
        for name in SEVEN.split()
    ],
    ("wrapper-seven", "and nothing else", lambda w: len(TrainEngineWrapper.__abstractmethods__) == 7),
    (
        "get-verl",
        "verl is the built-in engine",
        lambda w: type(get_trainer_wrapper(of_type(w, "verl"))) is VerlPPOTrainerWrapper,
    ),
    (
        "get-other",
        "another name is not implemented",
        lambda w: raises(NotImplementedError, lambda: get_trainer_wrapper(of_type(w, "x"))),
    ),
    (
        "verl-wrapper",
        "the built-in engine is an engine",
        lambda w: issubclass(VerlPPOTrainerWrapper, TrainEngineWrapper),
    ),
    ("verl-init-light", "its constructor starts nothing", lambda w: VerlPPOTrainerWrapper({}).engine is None),
    ("verl-workers", "init_workers makes the models' workers", lambda w: w.wrapper.engine is not None),
    (
        "verl-num-property",
        "its step is a property",
        lambda w: isinstance(VerlPPOTrainerWrapper.train_step_num, property),
    ),
    (
        "verl-num",
        "its step counts train steps",
        lambda w: (w.returned["wrapper_before"], w.wrapper.train_step_num) == (0, 1),
    ),
    (
        "verl-prepare",
        "prepare is a coroutine",
        lambda w: inspect.iscoroutinefunction(VerlPPOTrainerWrapper.prepare) and w.returned["prepare"] is None,
    ),
    (
        "verl-step",
        "train_step is a coroutine, and of a subclass if that has one",
        lambda w: (
            inspect.iscoroutinefunction(VerlPPOTrainerWrapper.train_step)
            and [row["train/mine"] for row in rows_of(w)] == [1, 1, 1]
        ),
    ),
    ("verl-metrics", "train_step returns metrics", lambda w: w.returned["train_step"]["train/version"] == 1),
    ("verl-save", "save_checkpoint saves the step", lambda w: steps(w.directory / "alone") == [1]),
    ("verl-save-none", "save_checkpoint returns nothing", lambda w: w.returned["save_checkpoint"] is None),
    (
        "verl-save-hf",
        "save_as_hf writes a Hugging Face directory",
        lambda w: (w.directory / "alone/huggingface/step-000001/config.json").is_file(),
    ),
    ("verl-upload", "upload_state_dict gives the step to the synchronizer", lambda w: w.returned["uploaded"] == 1),
    (
        "verl-state-dict",
        "save_state_dict writes the model alone",
        lambda w: any((w.directory / "alone/sync").rglob("*.safetensors")),
    ),
    (
        "verl-post",
        "post_process_batch returns the batch",
        lambda w: w.returned["post_process_batch"] is w.returned["batch"],
    ),
    ("saves-strategy", "the strategy is kept", lambda w: w.saves.save_strategy is SaveStrategy.SINGLE_THREAD),
    ("saves-local", "the local directory is kept", lambda w: w.saves.default_local_dir == str(w.directory / "saves")),
    ("saves-remote", "no remote directory is the default", lambda w: w.saves.default_hdfs_dir is None),
    (
        "saves-counted",
        "a step waits for its registered savers",
        shown_by(SAVES, "test_complete_is_announced_and_everybody_done_in_any_order"),
    ),
    (
        "saves-complete",
        "a step is complete after its savers",
        shown_by(SAVES, "test_complete_is_announced_and_everybody_done_in_any_order"),
    ),
    ("saves-update", "a newer state dict is recorded", shown_by(SAVES, "test_a_complete_step_survives_the_monitor")),
    *[
        (
            f"saves-{name}",
            f"{name} is a coroutine",
            lambda w, name=name: inspect.iscoroutinefunction(getattr(CheckpointMonitor, name)),
        )
        for name in ("register_thread_count", "monitor_step", "notify_started", "notify_finished")
    ],
    ("saves-actor", "get_actor is a class method", lambda w: inspect.ismethod(CheckpointMonitor.get_actor)),
]

REFUSED: list[tuple[str, str, Check]] = [
    (
        "train-swallows",
        "train logs an error and returns its name: the error is raised, and the status is STOPPED",
        lambda w: w.returned["failed"] == (False, RunningStatus.STOPPED),
    ),
    (
        "verl-base",
        "the built-in engine derives from verl's trainer: it has the core's engine instead, and no fit()",
        lambda w: not hasattr(VerlPPOTrainerWrapper, "fit"),
    ),
    (
        "verl-ray",
        "it starts Ray, resource pools and a group for each role: one group of ranks on Ray holds all roles, and none "
        "is started for one process",
        lambda w: w.wrapper.run.ranks is None,
    ),
    (
        "verl-parameters",
        "the constructor documents the parameters of verl's trainer: it takes the config alone, as its signature says",
        lambda w: raises(TypeError, lambda: VerlPPOTrainerWrapper({}, tokenizer=None)),  # pyright: ignore[reportCallIssue]
    ),
]


def run_dir(w: World) -> Path:
    return w.trainer._run.stage.run_dir


def rows_of(w: World) -> list[dict[str, float]]:
    return [row for _, row in w.parts["Notes"].rows if any(name.startswith("sample/") for name in row)]


def of_type(w: World, name: str) -> Any:
    return {**w.before["config"], "trainer": {"trainer_type": name}, "name": name}


def raises(kind: type[BaseException], call: Callable[[], object]) -> bool:
    with pytest.raises(kind) as error:
        call()
    return kind is not NotImplementedError or isinstance(error.value, ConfigError)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_the_parameters_of(function: Callable[..., Any]) -> None:
    check_parameters(function, SIGNATURES[function])


def test_every_fact_of_the_documents(world: World) -> None:
    ids = [name for name, *_ in FACTS + REFUSED]
    assert len({*ids}) == len(ids)
    wrong = [f"{name}: {fact}" for name, fact, check in FACTS + REFUSED if not check(world)]
    assert not wrong, "\n".join(wrong)
