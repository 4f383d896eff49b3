"""The trainer over a real buffer, explorer and store: when it saves, what it shows, and that it never saves a lie."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from configs import tiny_model
from failing import refused

from tests.sessions import RENDERER, TASKS, Counting, Kept, Lengths, memory_buffer
from tests.waiting import until
from trivium.algorithms import build_algorithm
from trivium.buffers.strategies import DefaultStrategy
from trivium.checkpoint.background import BackgroundSaver
from trivium.checkpoint.store import CheckpointStore
from trivium.config import AlgorithmConfig, RunConfig, config_from_mapping, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.evaluate import Evaluator, Measurements, RemoteEvaluator
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import RunDirError, StorageError, TriviumError
from trivium.foundation.registry import CATALOGUE, resolve
from trivium.loops import Parts, run
from trivium.protocols import EngineSettings, Objective
from trivium.publisher import Publisher
from trivium.rewards.judge import make_judge
from trivium.runtime.launch import run as launch
from trivium.schedule import Cadence, Schedule
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.trainer import GroupSource, Keep, Learn, Preview, Trainer
from trivium.types import TRAINER, Batch, Group, Metrics, RunningStatus, Sample, Sampling


class CountingStore(CheckpointStore):
    """A store that notes every save."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, keep=100)
        self.saves: list[int] = []

    async def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        self.saves.append(step)
        return await super().save(step, write, state)


class Limited(DefaultStrategy):
    """Data for so many steps, and a number about each of them."""

    def __init__(self, buffer: Any, steps: int) -> None:
        super().__init__(DefaultStrategy.Config(), buffer=buffer)
        self.steps = steps

    async def sample(self, count: int, version: int) -> Sample:
        if version >= self.steps:
            raise StopAsyncIteration
        sample = await super().sample(count, version)
        return Sample(sample.groups, {"task_count": float(len(sample.groups))})


@dataclass
class Run:
    """A run in one process."""

    directory: Path
    steps: int = 5
    data: int = 100
    """Steps for which there is data."""
    save_every: int = 2
    cadence: Cadence = field(default_factory=Cadence)
    evaluated: bool = False
    interval: int = 1
    until: tuple[str, float, float] | None = None
    rollout_s: float = 0.0
    preview: bool = False
    asynchronous: bool = False
    make: Callable[..., Trainer] = Trainer
    engine_of: Callable[..., Counting] = Counting
    monitor: Kept = field(default_factory=Kept)
    made: Trainer = field(init=False)

    def trainer(self) -> Trainer:
        schedule = Schedule(
            TASKS,
            seed=0,
            groups_per_step=2,
            group_size=3,
            steps=self.steps,
            sync_interval=self.interval,
            max_staleness=self.interval - 1,
            until=self.until,
        )
        buffer = memory_buffer(schedule, self.directory)
        engine = self.engine_of(build_algorithm(plugin("algorithms", AlgorithmConfig)("grpo"), 0, 8), lambda: 0.0)
        channel = MemoryChannel(keep=3)
        engine.settings = EngineSettings(channel)
        synchronizer = Synchronizer(MemoryBoard(), deadline_s=60, interval=self.interval)
        self.store = CountingStore(self.directory / "checkpoints")
        return self.make(
            engine,
            GroupSource(buffer, Limited(buffer, self.data)),
            Publisher(engine, buffer, channel, synchronizer, schedule),
            schedule,
            self.monitor,
            BackgroundSaver(self.store, engine, asynchronous=self.asynchronous, every=self.save_every),
            Measurements(RemoteEvaluator(synchronizer, "test") if self.evaluated else None, cadence=self.cadence),
            resume=self.store.latest(),
            preview=Preview(self.preview),
        )

    def explorer(self) -> Explorer:
        engine = ScriptedEngine(
            ScriptedEngine.Config(replies=((1, 2), (3,), (4, 5, 6))),
            eos_token_ids=RENDERER.eos_token_ids,
            decode=RENDERER.decode,
        )
        workflow = Lengths(random.Random(0), (self.rollout_s,))
        return Explorer(engine, RENDERER, workflow, make_judge(()), Sampling(8), RolloutLimits(5.0, 64))

    async def play(self) -> Trainer:
        trainer, explorer = self.trainer(), self.explorer()
        self.made = trainer
        evaluator = Evaluator(explorer, TASKS[:2], "test", 0, 1, (1,), Sampling(8, temperature=0.0), 3.0)
        trainer.prepare()
        shared = (trainer.buffer, trainer.schedule, trainer.synchronizer, trainer.publisher.channel)
        async with asyncio.timeout(60):
            await run(Parts(*shared, trainer, explorer, evaluator if self.evaluated else None))
        return trainer

    async def play_beside(self, other: Coroutine[Any, Any, None]) -> None:
        async with asyncio.TaskGroup() as roles:
            roles.create_task(self.play())
            roles.create_task(other)


# --------------------------------------------------------------------------- where time goes


async def test_where_the_time_of_a_run_goes_is_summed_over_its_steps_and_evaluations(tmp_path: Path) -> None:
    cadence = Cadence(2, ends=True)
    played = Run(tmp_path, steps=3, cadence=cadence, evaluated=True)
    trainer = await played.play()
    rows = [row for _, row in played.monitor.rows]
    spent = trainer.run_record["time"]
    for name in ("wait", "train", "advantage", "update/policy", "evaluate"):
        assert spent[name] == pytest.approx(sum(row.get(f"time/{name}", 0.0) for row in rows))
    assert spent["checkpoint"] > sum(row.get("time/checkpoint", 0.0) for row in rows)  # one came after the last row
    assert all(0 <= row["perf/idle"] <= 1 for row in rows if "time/step" in row)
    assert spent["wait"] + spent["train"] <= trainer.record.seconds
    resumed = Run(tmp_path, steps=5, cadence=cadence).trainer().resume
    assert resumed is not None
    assert resumed.state["time"].keys() >= {"wait", "train", "update/policy"}


async def test_rollouts_of_the_next_step_under_an_evaluation_are_time_of_that_step(tmp_path: Path) -> None:
    """Two rollouts of the evaluation and six of the next step run at the same time."""
    cadence = Cadence(ends=True)
    played = Run(tmp_path, steps=1, save_every=0, cadence=cadence, evaluated=True, rollout_s=1.0)
    trainer = await played.play()
    first, step, last = (row for _, row in played.monitor.rows)
    assert step["time/wait"] > max(0.5, first["time/evaluate"]), "three quarters of a second, and one"
    assert step["time/step"] > step["time/wait"]
    assert last["time/evaluate"] > 1.0, "nothing else was rolled out"
    assert step["time/wait"] <= trainer.run_record["time"]["wait"] < 1.5 * step["time/wait"]
    assert "time/rollouts_for_training" not in first


# --------------------------------------------------------------------------- when it saves


@pytest.mark.parametrize(
    ("steps", "save_every", "saves"), [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 0, [3]), (2, 7, [2]), (2, 1, [1, 2])]
)
async def test_the_end_of_a_stage_is_saved_once_wherever_in_the_interval_it_falls(
    steps: int, save_every: int, saves: list[int], tmp_path: Path
) -> None:
    played = Run(tmp_path, steps=steps, save_every=save_every)
    trainer = await played.play()
    assert played.store.saves == played.store.steps() == saves
    assert trainer.train_step_num == steps
    assert trainer.saver.store.steps()[-1] == steps


@pytest.mark.parametrize(("data", "saves"), [(3, [2, 3]), (4, [2, 4])])
async def test_the_end_of_the_data_is_saved_and_evaluated_once(data: int, saves: list[int], tmp_path: Path) -> None:
    cadence = Cadence(2, ends=True)
    played = Run(tmp_path, steps=50, data=data, cadence=cadence, evaluated=True)
    trainer = await played.play()
    assert trainer.train_step_num == data
    assert not trainer.train_continue
    assert played.store.saves == played.store.steps() == saves
    assert played.monitor.steps_with("eval/test/accuracy") == sorted({0, 2, data})
    assert trainer.run_record["accuracy_after"] == played.monitor.rows[-1][1]["eval/test/accuracy"]

    again = Run(tmp_path, steps=50, data=data, cadence=cadence, evaluated=True)  # the same command once more
    await again.play()
    assert (again.store.saves, again.monitor.rows) == ([], [])

    more = Run(tmp_path, steps=50, data=data + 1, cadence=cadence, evaluated=True)  # there is data again
    await more.play()
    assert more.store.saves == [data + 1]
    assert more.monitor.steps_with("eval/test/accuracy") == [data + 1]


async def test_an_evaluation_after_a_step_may_end_the_stage(tmp_path: Path) -> None:
    """Not the one at its start; and a run that is resumed stays ended."""
    until = ("eval/test/version", -math.inf, 3.0)
    cadence = Cadence(2, ends=True)
    for _ in range(2):
        one = Run(tmp_path, steps=50, save_every=0, cadence=cadence, evaluated=True, until=until)
        trainer = await one.play()
        assert (trainer.train_step_num, trainer.train_continue, one.store.steps()) == (4, False, [4])
    until = ("eval/test/version", 9.0, math.inf)
    at_start = Run(tmp_path / "other", steps=50, save_every=0, cadence=cadence, evaluated=True, until=until)
    assert (await at_start.play()).train_step_num == 2


class Broken(Counting):
    """Breaks in its third step, half of the step's update made."""

    def update(self, *of: Any) -> Metrics:
        super().update(*of)
        if self.version == 2:
            raise FloatingPointError("the gradient is not finite")
        return {}


async def test_an_error_in_training_ends_the_run_and_saves_nothing(tmp_path: Path) -> None:
    broken = Run(tmp_path, save_every=1, engine_of=Broken)
    with pytest.raises(ExceptionGroup) as caught:
        await broken.play()
    assert caught.group_contains(FloatingPointError, match="not finite")
    assert broken.store.saves == broken.store.steps() == [1, 2]
    assert broken.monitor.steps_with("train/version") == [1, 2]

    mended = Run(tmp_path, save_every=1)
    trainer = await mended.play()
    assert mended.store.saves == [3, 4, 5]
    assert trainer.engine.version == 5


class Untouched(Counting):
    """Refuses the update of its third step before it changes anything, and says so."""

    def update(self, *of: Any) -> Metrics:
        if self.version == 2:
            self.holds_version = True
            raise TriviumError("an update", "no number", "look at the losses")
        return super().update(*of)


class Starved(Limited):
    """Breaks when it is asked for its third step, two groups of which were taken."""

    async def sample(self, count: int, version: int) -> Sample:
        sample = await super().sample(count, version)
        if version == 2:
            raise LookupError("no such row")
        return sample


class Breaking(Trainer):
    """Samples as `Starved`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups.strategy = Starved(self.buffer, 100)


@pytest.mark.parametrize(
    ("how", "message"),
    [({"engine_of": Untouched}, "no number"), ({"make": Breaking}, "no such row")],
    ids=["the engine still holds the step before", "outside the engine"],
)
async def test_the_last_good_step_is_saved_before_a_failure_is_raised(
    how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "whole", save_every=0)
    await whole.play()
    broken = Run(tmp_path / "run", save_every=0, **how)
    with pytest.raises(ExceptionGroup) as caught:
        await broken.play()
    assert caught.group_contains((TriviumError, LookupError), match=message)
    assert broken.store.steps() == [2]
    mended = Run(tmp_path / "run", save_every=0)
    trainer = await mended.play()  # on the groups of the third step, which had been taken
    assert mended.store.steps() == [2, 5]
    assert cast(Counting, trainer.engine).updates == cast(Counting, whole.made.engine).updates[2:]


class Overtaken(Trainer):
    """Another role fails while the thread of its third step is about to update, or has made the update."""

    late = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stepping, self.failed, self.ended = threading.Event(), threading.Event(), threading.Event()

    def _wait(self, step: int) -> None:
        if step == 3:
            self.stepping.set()
            assert self.failed.wait(120)

    def _learn(self, groups: Sequence[Group]) -> Learn:
        learn, step = super()._learn(groups), self.train_step_num + 1

        def waiting(keep: Keep) -> Metrics:
            def wait_and_keep(batch: Batch) -> None:
                self._wait(0 if self.late else step)  # the failure comes before it looks
                keep(batch)

            self.ended.clear()
            try:
                metrics = learn(wait_and_keep)
                if self.late:
                    self._wait(self.train_step_num)
                return metrics
            finally:
                self.ended.set()

        return waiting


class OvertakenLate(Overtaken):
    late = True


@pytest.mark.parametrize(("make", "saved"), [(Overtaken, [2]), (OvertakenLate, [3])])
async def test_a_failure_elsewhere_waits_for_the_thread_of_the_step_and_saves_no_step_twice(
    make: Callable[..., Overtaken], saved: list[int], tmp_path: Path
) -> None:
    broken = Run(tmp_path, save_every=0, make=make)

    async def fail_in_the_third_step() -> None:
        await until(lambda: hasattr(broken, "made") and cast(Overtaken, broken.made).stepping.is_set())
        broken.made.synchronizer.mark_dead("judge", "it failed")
        threading.Timer(0.2, cast(Overtaken, broken.made).failed.set).start()
        raise LookupError("no such row")

    with pytest.raises(ExceptionGroup):
        await broken.play_beside(fail_in_the_third_step())
    assert await asyncio.to_thread(cast(Overtaken, broken.made).ended.wait, 60)
    updates = [version for version, *_ in cast(Counting, broken.made.engine).updates]
    assert (broken.store.steps(), updates) == (saved, [*range(saved[0])])
    resumed = await Run(tmp_path, save_every=0).play()
    assert [version for version, *_ in cast(Counting, resumed.engine).updates] == [*range(saved[0], 5)]


class Lingering(Counting):
    """The thread of its third step updates the weights after the end of the run has stopped waiting for it."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.stepping, self.going_on = threading.Event(), threading.Event()

    def update(self, *of: Any) -> Metrics:
        if self.version == 2:
            self.stepping.set()
            assert self.going_on.wait(120)
        return super().update(*of)


async def test_a_version_made_while_the_end_waits_for_a_save_is_not_saved_with_the_state_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(Trainer):
        async def wait_for_save(self) -> None:
            engine = cast(Lingering, self.engine)
            if engine.stepping.is_set():
                engine.going_on.set()
                await until(lambda: not self._thread.is_computing)
            await super().wait_for_save()

    monkeypatch.setattr("trivium.trainer._STEP_ENDS_S", 0.05)
    broken = Run(tmp_path, save_every=0, engine_of=Lingering, make=Waiting)

    async def fail_in_the_third_step() -> None:
        await until(lambda: hasattr(broken, "made") and cast(Lingering, broken.made.engine).stepping.is_set())
        raise LookupError("no such row")

    with pytest.raises(ExceptionGroup) as caught:
        await broken.play_beside(fail_in_the_third_step())
    assert caught.group_contains(LookupError)
    assert (broken.made.train_step_num, broken.store.steps()) == (3, [])


async def test_ctrl_c_waits_for_a_long_step_and_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.trainer._STEP_ENDS_S", 0.05)
    monkeypatch.setattr("trivium.trainer.interrupted", pressed := threading.Event())
    run = Run(tmp_path, save_every=0, engine_of=Lingering)
    playing = asyncio.ensure_future(run.play())
    await until(lambda: hasattr(run, "made") and cast(Lingering, run.made.engine).stepping.is_set())
    pressed.set()
    playing.cancel()
    threading.Timer(0.5, cast(Lingering, run.made.engine).going_on.set).start()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert run.store.steps() == [3]


async def test_weights_between_two_steps_are_not_saved(tmp_path: Path) -> None:
    broken = Run(tmp_path, save_every=0, engine_of=Broken)
    with pytest.raises(ExceptionGroup):
        await broken.play()
    assert broken.store.steps() == []


async def test_a_save_that_fails_after_a_failure_does_not_hide_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Untouched):
        def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
            raise OSError("disk full")

    broken = Run(tmp_path, save_every=0, engine_of=Full)
    with pytest.raises(ExceptionGroup) as caught:
        await broken.play()
    assert caught.group_contains(TriviumError, match="no number")
    assert not caught.group_contains(OSError)
    assert "disk full" in caplog.text


async def test_what_a_failure_left_undone_at_a_step_is_done_when_the_run_goes_on(tmp_path: Path) -> None:
    class Blind(Trainer):
        async def end_step(self) -> None:
            if self.train_step_num == 3:
                raise LookupError("no grader")
            await super().end_step()

    cadence = Cadence(3)
    broken = Run(tmp_path, save_every=0, cadence=cadence, evaluated=True, make=Blind)
    with pytest.raises(ExceptionGroup):
        await broken.play()
    assert broken.store.steps() == [3]
    mended = Run(tmp_path, save_every=0, cadence=cadence, evaluated=True)
    await mended.play()
    assert mended.monitor.steps_with("eval/test/accuracy") == [3]


@pytest.mark.parametrize(("name", "fails"), [("trainer", False), ("polaris", False), ("polaris", True)])
async def test_a_trainer_of_any_name_stops_on_the_board_however_it_ends(name: str, fails: bool, tmp_path: Path) -> None:
    class Named(Trainer):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.name, self.synchronizer.heartbeat_s = name, 60.0

        async def end_step(self) -> None:
            status.append(self.synchronizer.trainer_status)
            if fails:
                raise LookupError("no grader")

    status: list[RunningStatus] = []
    played = Run(tmp_path, steps=2, make=Named)
    with pytest.raises(ExceptionGroup) if fails else nullcontext():
        await played.play()
    assert set(status) == {RunningStatus.RUNNING}
    assert played.made.synchronizer.trainer_status is RunningStatus.STOPPED
    assert set(played.made.synchronizer.board.read()["beats"]) == {TRAINER, "explorer-0"}


async def test_what_the_sample_strategy_reports_needs_no_declaration(tmp_path: Path) -> None:
    class Talking(Limited):
        async def sample(self, count: int, version: int) -> Sample:
            sample = await super().sample(count, version)
            return Sample(sample.groups, {"a_number_of_mine": 0.25})

    class Listening(Trainer):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.groups.strategy = Talking(self.buffer, 100)

    played = Run(tmp_path, steps=2, make=Listening)
    await played.play()
    assert [row["sample/a_number_of_mine"] for _, row in played.monitor.rows] == [0.25, 0.25]


async def test_an_error_outside_the_model_is_as_loud(tmp_path: Path) -> None:
    class Full(Kept):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 2:
                raise OSError("disk full")

    broken = Run(tmp_path, save_every=1, monitor=Full())
    with pytest.raises(ExceptionGroup) as caught:
        await broken.play()
    assert caught.group_contains(OSError, match="disk full")
    assert broken.store.steps() == [1]


async def test_a_best_step_is_known_by_its_score_also_where_the_data_ended(tmp_path: Path) -> None:
    class Best(Run):
        def trainer(self) -> Trainer:
            trainer = super().trainer()
            self.store.keep, self.store.keep_best = 1, "eval/test/accuracy"
            return trainer

    played = Best(tmp_path, steps=9, data=3, save_every=0, cadence=Cadence(3), evaluated=True)
    await played.play()
    latest = played.store.latest()
    assert latest is not None
    assert (latest.step, latest.state["score"]) == (3, played.monitor.rows[-1][1]["eval/test/accuracy"])


# --------------------------------------------------------------------------- what it shows


@pytest.mark.parametrize(("interval", "at"), [(1, {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}), (2, {2: 2, 4: 2, 5: 1})])
async def test_previews_are_shown_at_sync_steps_and_none_is_lost(
    interval: int, at: dict[int, int], tmp_path: Path
) -> None:
    """The best and the worst playing of every step, as soon as weights are published; the last ones at the end."""
    played = Run(tmp_path, interval=interval, preview=True)
    await played.play()
    assert {name for _, name, _ in played.monitor.tables} == {"rollout_examples"}
    rows = {step: rows for step, _, rows in played.monitor.tables}
    assert {step: len(found) for step, found in rows.items()} == {step: 2 * steps for step, steps in at.items()}
    for best, worst in [(found[i], found[i + 1]) for found in rows.values() for i in range(0, len(found), 2)]:
        assert best["reward"] >= worst["reward"]
        assert best["length"] == best["reward"] == best["tokens"]
        assert {"task", "prompt", "reply", "reward", "version", "tokens"} <= set(best)


async def test_nothing_is_previewed_unasked(tmp_path: Path) -> None:
    played = Run(tmp_path)
    await played.play()
    assert played.monitor.tables == []


@pytest.mark.parametrize("name", CATALOGUE["monitors"])
def test_every_monitor_that_ships_takes_tables(name: str) -> None:
    monitor = resolve("monitors", name)
    assert all(callable(getattr(monitor, verb)) for verb in ("log", "table", "state", "restore", "close"))


async def test_what_the_sample_strategy_says_is_logged_under_sample(tmp_path: Path) -> None:
    played = Run(tmp_path, steps=2)
    await played.play()
    assert [row["sample/task_count"] for _, row in played.monitor.rows] == [2.0, 2.0]


# --------------------------------------------------------------------------- what may be overridden


async def test_every_method_of_the_seeds_is_reached_through_self(tmp_path: Path) -> None:
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

        async def save_checkpoint(self) -> None:
            called["save_checkpoint"] += 1
            await super().save_checkpoint()

    trainer = await Run(tmp_path, make=Mine).play()
    assert called["need_sync"] >= 5
    assert (called["sync_weight"], called["train_step"], called["save_checkpoint"]) == (6, 5, 3)
    assert trainer.is_alive()
    await trainer.shutdown()
    assert isinstance(trainer.monitor, Kept)
    assert trainer.monitor.closed


async def test_a_need_sync_of_ones_own_is_asked_while_data_is_awaited(tmp_path: Path) -> None:
    """Here it is the only one to know that the data waits for weights."""
    synced = asyncio.Event()

    class Late(Limited):
        async def sample(self, count: int, version: int) -> Sample:
            if version == 1:
                await synced.wait()
            return await super().sample(count, version)

    class Knowing(Trainer):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.groups.strategy = Late(self.buffer, 100)
            self.asked = 0

        def need_sync(self) -> bool:
            self.asked += self.train_step_num == 1
            return super().need_sync() or self.asked == 2

        def sync_weight(self) -> None:
            super().sync_weight()
            if self.asked == 2:
                loop.call_soon_threadsafe(synced.set)

    loop = asyncio.get_running_loop()
    trainer = await Run(tmp_path, steps=2, make=Knowing).play()
    assert trainer.train_step_num == 2


# --------------------------------------------------------------------------- saves that training does not wait for


class Slow(Counting):
    """Writes what it has copied once it is allowed to; `write` says what becomes of it."""

    def __init__(self, *said: Any) -> None:
        super().__init__(*said)
        self.allowed, self.writing = threading.Event(), 0

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        version = self.version
        assert on_copied is not None
        on_copied()
        self.writing += 1
        assert self.writing == 1, "one save at a time"
        assert self.allowed.wait(120)
        self.write(directory, version)
        self.writing -= 1

    def write(self, directory: Path, version: int) -> None:
        (directory / "version").write_text(str(version), encoding="utf-8")


class SlowTrainer(Trainer):
    """Lets its engine write when training can do nothing more without: in the wait for the save before."""

    async def wait_for_save(self) -> None:
        engine = cast(Slow, self.engine)
        if self.saver.writing is not None:
            assert not self.saver.writing.done()
            assert self.train_step_num not in self.saver.store.steps()
            steps.append((self.saver.step, self.train_step_num))
        engine.allowed.set()
        await super().wait_for_save()
        engine.allowed.clear()


steps: list[tuple[int | None, int]] = []
"""(the step being saved, the step at which training waited for that)."""


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits(tmp_path: Path) -> None:
    steps.clear()
    played = Run(tmp_path, asynchronous=True, engine_of=Slow, make=SlowTrainer)
    await played.play()
    assert steps == [(2, 4), (4, 5), (5, 5)]  # the end of the stage waits as well
    assert played.store.saves == played.store.steps() == [2, 4, 5]
    for step in (2, 4, 5):  # of the moment the save was asked for, whatever was trained meanwhile
        saved = played.store.open(step)
        assert (saved.path / "version").read_text() == str(saved.state["version"]) == str(step)
        assert saved.state["buffer"]["consumed_below"] == 2 * step
        assert saved.state["monitor"]["rows"] == step
    more = Run(tmp_path, steps=6, asynchronous=True, engine_of=Slow, make=SlowTrainer)
    assert (await more.play()).train_step_num == 6
    assert more.store.saves == [6]


async def test_an_engine_that_cannot_save_beside_training_is_waited_for(tmp_path: Path) -> None:
    class Waiting(Trainer):
        async def save_checkpoint(self) -> None:
            await super().save_checkpoint()
            assert self.saver.store.steps()[-1] == self.train_step_num
            assert self.saver.writing is None

    played = Run(tmp_path, asynchronous=True, make=Waiting)
    await played.play()
    assert played.store.steps() == [2, 4, 5]


class Failing(Slow):
    def write(self, directory: Path, version: int) -> None:
        if version == 4:
            raise OSError("disk full")
        super().write(directory, version)


async def test_a_background_save_that_fails_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """While it waits for groups that nobody brings any more, while it trains, or at the end of the stage."""

    class Hungry(Limited):
        async def sample(self, count: int, version: int) -> Sample:
            if version == 5:
                cast(Slow, self.trainer.engine).allowed.set()
                await asyncio.Event().wait()
            return await super().sample(count, version)

        trainer: Trainer

    class Starving(Trainer):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.groups.strategy = Hungry(self.buffer, 100)
            self.groups.strategy.trainer = self

        async def wait_for_save(self) -> None:
            cast(Slow, self.engine).allowed.set()
            await super().wait_for_save()
            cast(Slow, self.engine).allowed.clear()

    for name, how in (("waiting", {"steps": 9, "make": Starving}), ("at the end", {"steps": 5, "make": SlowTrainer})):
        broken = Run(tmp_path / name, asynchronous=True, engine_of=Failing, **how)
        with pytest.raises(ExceptionGroup) as caught:
            await broken.play()
        assert caught.group_contains(StorageError, match=r"step-000004.*\n.*disk full")
        assert broken.store.steps() == [2]


async def test_a_run_that_fails_still_completes_the_save_that_is_being_written(tmp_path: Path) -> None:
    class Broken(Slow):
        def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
            if self.version == 3:
                raise ValueError("cosmic ray")
            return super().update(role, batch, objective)

    broken = Run(tmp_path, asynchronous=True, engine_of=Broken, make=SlowTrainer)
    with pytest.raises(ExceptionGroup) as caught:
        await broken.play()
    assert caught.group_contains(ValueError, match="cosmic ray")
    assert broken.store.steps() == [2]
    assert broken.store.open(2).state["version"] == 2


# --------------------------------------------------------------------------- whole runs

SUPERVISED = {
    "model": tiny_model(hidden=16, mlp=16),
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "algorithm": {"kind": "sft"},
    "buffer": {"kind": "files", "completion": "answer"},
    "schedule": {"steps": 2, "groups_per_step": 4, "group_size": 1},
    "monitors": [{"kind": "jsonl"}],
    "checkpoint": {"save_every": 1},
    "cluster": {"threads": 1},
}


def supervised(run_dir: Path, **changes: Any) -> RunConfig:
    return config_from_mapping({**SUPERVISED, "run": {"dir": str(run_dir)}, **changes})


SHORT = """
from pydantic import Field
from trivium.buffers.strategies import DefaultStrategy

class Short(DefaultStrategy):
    class Config(DefaultStrategy.Config):
        steps: int = Field(ge=1)

    def __init__(self, config, *, schedule, **beside):
        super().__init__(config, **beside)
        self.end = schedule.first_version + config.steps

    async def sample(self, count, version):
        if version >= self.end:
            raise StopAsyncIteration
        return await super().sample(count, version)
"""


def test_a_stage_whose_data_ends_early_hands_on_what_it_learned(tmp_path: Path) -> None:
    """Planned: steps 1 to 4 and 5 to 8. The data of the first stage ends after step 2, that of the second after 6."""
    (tmp_path / "short.py").write_text(SHORT)
    data = {"buffer": {"kind": "files", "completion": "answer", "strategy": {"kind": "short.py:Short", "steps": 2}}}
    stage = {"schedule": {**SUPERVISED["schedule"], "steps": 4}, **data}
    said = {**SUPERVISED, "run": {"dir": str(tmp_path / "run")}, "stages": [stage, stage], "checkpoint": {"keep": 9}}
    config = config_from_mapping(said, tmp_path)
    summary = launch(config)
    assert summary["steps"] == 6
    assert summary["verdict"].startswith("bound by ")
    assert {"train", "update/policy", "checkpoint"} <= summary["time"].keys()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == [2, 6]
    assert store.open(6).state["pinned"] == [2]
    logged = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert launch(config)["steps"] == 6  # the same command once more
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == logged


def test_a_run_copies_its_checkpoints_and_fails_when_it_could_not(tmp_path: Path) -> None:
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    said = {"checkpoint": {"save_every": 1, "remote": elsewhere.as_uri(), "save_strategy": "single_node"}}
    elsewhere.write_text("a file where a directory is wanted")
    with refused(RunDirError, elsewhere.as_uri()):
        launch(supervised(run_dir, **said))
    assert CheckpointStore(run_dir / "checkpoints").steps() == [1, 2]  # trained to the end, and safe here
    assert "copy checkpoints to" in (run_dir / "log.txt").read_text()
    logged = (run_dir / "metrics.jsonl").read_bytes()

    elsewhere.unlink()
    launch(supervised(run_dir, **said))
    there = {path.relative_to(elsewhere): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    checkpoints = run_dir / "checkpoints"
    assert there == {p.relative_to(checkpoints): p.read_bytes() for p in checkpoints.rglob("*") if p.is_file()}
    assert (run_dir / "metrics.jsonl").read_bytes() == logged  # nothing was trained again
