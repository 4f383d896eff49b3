"""Replies in flight: weights that change under them, deadlines and call-offs that end them, rows that come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configs import tiny_model
from failing import check_error, refused
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tests.sessions import Plays
from tests.waiting import until
from trivium.buffers.memory import MemoryBuffer
from trivium.config import RunConfig, config_from_mapping
from trivium.engines.scripted import ScriptedEngine
from trivium.engines.torch.engine import TorchEngine
from trivium.engines.torch.sampling import RowSampling, sample
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import ConfigError, RolloutsFailing, SyncError, first_cause
from trivium.foundation.randomness import SampleKey, uniforms
from trivium.loops import explore_loop, follow_weights
from trivium.policy import Policy
from trivium.rewards.judge import make_judge
from trivium.runtime.launch import run
from trivium.schedule import Schedule
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel, tiny_tokenizer
from trivium.types import Capabilities, Completion, Group, Message, Request, Sampling, Task

RENDERER = ChatRenderer(tiny_tokenizer("0123456789"))
LONG = 120
"""Tokens of a reply that is still going on when something happens to it."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape, far from each other and from uniform."""
    found = []
    for seed in (1, 2):
        path = tmp_path_factory.mktemp(f"policy-{seed}")
        config = TinyModel.Config(alphabet="0123456789", layers=2, hidden=32, heads=2, kv_heads=1, max_position=256)
        found.append(TinyModel(config, seed=seed).materialize(path))
        model = model_at(found[-1])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        model.save_pretrained(found[-1])
    return found[0], found[1]


def model_at(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def weights_at(path: Path) -> list[tuple[str, torch.Tensor]]:
    return [*model_at(path).state_dict().items()]


@asynccontextmanager
async def engine_at(path: Path, eos: frozenset[int] = frozenset(), **config: Any) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(
        TorchEngine.Config(**config), model_dir=path, eos_token_ids=eos, decode=RENDERER.decode, threads=1
    )
    try:
        yield engine
    finally:
        await engine.close()


def request(index: int = 0, length: int = 9, tokens: int = LONG) -> Request:
    prompt = np.random.default_rng(length).integers(3, 12, length).astype(np.int32)
    return Request(prompt, Sampling(tokens), SampleKey(0, "test", "t", str(length), 0, index))


# --------------------------------------------------------------------------- weights that change in mid-reply


def by_hand(asked: Request, versions: list[int], models: dict[int, PreTrainedModel]) -> tuple[list[int], list[float]]:
    """What transformers samples when token i is computed with the weights of `versions[i]`, its cache kept as it is."""
    cache, tokens, log_probs = DynamicCache(), list[int](), list[float]()
    fed = torch.from_numpy(asked.prompt_tokens.astype(np.int64))[None]
    one = np.ones(1, np.float32)
    none = torch.empty(0, dtype=torch.int64)
    how = RowSampling(one, one, np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(1, np.bool_), none)
    with torch.no_grad():
        for position, version in enumerate(versions):
            logits = models[version](fed, past_key_values=cache, use_cache=True).logits[:, -1].float()
            drawn = uniforms(np.array([asked.key.digest()], np.uint64), np.array([position]))
            sampled, log_prob = sample(logits.clone(), drawn, how)
            tokens.append(int(sampled[0]))
            log_probs.append(float(log_prob[0]))
            fed = sampled[None].to(torch.int64)
    return tokens, log_probs


async def swapped(engine: TorchEngine, asked: list[Request], new: Path, after: int = 5) -> list[Completion]:
    """Replies that begin with version 0 and get version 7 once `after` tokens of them are there."""
    weights = weights_at(new)
    running = [asyncio.ensure_future(engine.generate(each)) for each in asked]
    await until(lambda: engine.counters["steps"] >= after)
    await engine.load(7, weights, in_flight="update")
    assert not any(reply.done() for reply in running), "the load waited for the replies, or they were too short"
    return await asyncio.gather(*running)


async def test_an_update_is_between_two_tokens_and_keeps_what_was_read(policies: tuple[Path, Path]) -> None:
    old, new = policies
    asked = [request(index, length) for index, length in ((0, 9), (1, 9), (0, 40))]
    async with engine_at(old) as engine:
        before = [await engine.generate(each) for each in asked]
    async with engine_at(old) as engine:
        done = await swapped(engine, asked, new)
    models = {0: model_at(old), 7: model_at(new)}
    for each, reply, alone in zip(asked, done, before, strict=True):
        versions = reply.policy_version.tolist()
        at = versions.count(0)
        assert 5 <= at < LONG
        assert versions == [0] * at + [7] * (LONG - at)
        assert reply.tokens[:at].tolist() == alone.tokens[:at].tolist()
        assert reply.log_prob[:at].tobytes() == alone.log_prob[:at].tobytes()
        tokens, log_probs = by_hand(each, versions, models)
        assert reply.tokens.tolist() == tokens
        np.testing.assert_allclose(reply.log_prob, log_probs, atol=1e-4)
        # Neither the old weights nor new ones that had read everything themselves would have said that.
        whole = torch.tensor([[*each.prompt_tokens.tolist(), *tokens]])
        for model in models.values():
            with torch.no_grad():
                logits = model(whole).logits[0, len(each.prompt_tokens) - 1 : -1]
            other = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[at:, 0].numpy()
            assert np.abs(other - reply.log_prob[at:]).max() > 0.05


async def test_what_waits_for_a_row_begins_with_the_new_weights(policies: tuple[Path, Path]) -> None:
    """Its prompt had been read under the old ones already: the first of the group needed it."""
    old, new = policies
    async with engine_at(new) as engine:
        expected = await engine.generate(request(1, tokens=30))
    async with engine_at(old, max_rows=1) as engine:
        first, second = await swapped(engine, [request(0), request(1, tokens=30)], new)
        assert engine.counters["prompts_read"] == 2
        assert {*first.policy_version.tolist()} == {0, 7}
        assert {*second.policy_version.tolist()} == {7}
        assert second.tokens.tolist() == expected.tokens.tolist()
        assert second.log_prob.tobytes() == expected.log_prob.tobytes()


async def test_an_update_that_does_not_fit_changes_nothing(policies: tuple[Path, Path]) -> None:
    old, new = policies
    async with engine_at(old, max_rows=1) as engine:
        expected = [await engine.generate(request(index)) for index in range(2)]
        read = engine.counters["prompts_read"]
        running = [asyncio.ensure_future(engine.generate(request(index))) for index in range(2)]
        await until(lambda: engine.counters["prompts_read"] > read)
        with refused(SyncError, "missing"):
            await engine.load(7, weights_at(new)[:-2], in_flight="update")
        done = await asyncio.gather(*running)
        assert engine.version == 0
        assert engine.counters["prompts_read"] == read + 1, "what was read is still good"
        for reply, known in zip(done, expected, strict=True):
            assert reply.log_prob.tobytes() == known.log_prob.tobytes()
            assert not reply.policy_version.any()


async def test_a_row_that_moves_keeps_the_versions_of_its_tokens(policies: tuple[Path, Path]) -> None:
    """Short replies end around a long one, which moves into the holes they leave and outgrows its arrays."""
    old, new = policies
    async with engine_at(old) as engine:
        asked = [request(index, tokens=20 + index) for index in range(16)] + [request(99, tokens=220)]
        weights = weights_at(new)
        running = [asyncio.ensure_future(engine.generate(each)) for each in asked]
        for version in (7, 8):
            steps = engine.counters["steps"]
            await until(lambda steps=steps: engine.counters["steps"] >= steps + 30)
            await engine.load(version, weights, in_flight="update")
        done = await asyncio.gather(*running)
    seen = done[-1].policy_version
    assert (np.diff(seen) >= 0).all()
    counts = Counter(seen.tolist())
    assert counts[0] >= 30
    assert counts[7] >= 30
    assert counts[8] >= 30


async def test_a_script_says_the_rest_in_the_words_of_the_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(step=0.05)  # read at the begin and at the load: half of the delay lies between
    monkeypatch.setattr("trivium.engines.scripted.time", SimpleNamespace(monotonic=lambda: next(clock)))
    engine = ScriptedEngine(
        ScriptedEngine.Config(script=f"{__name__}:by_version", delay_s=0.1),
        eos_token_ids=frozenset({1}),
        decode=lambda tokens: "",
    )
    running = asyncio.ensure_future(engine.generate(request(tokens=50)))
    while not engine._pausing:  # a turn of the loop at a time: nothing is over before the load
        await asyncio.sleep(0)
    await engine.load(4, [], in_flight="update")
    done = await running
    assert done.tokens.tolist() == [10] * 10 + [14] * 10 + [1]
    assert done.policy_version.tolist() == [0] * 10 + [4] * 11


def by_version(request: Request, version: int) -> list[int]:
    return [10 + version] * 20


# --------------------------------------------------------------------------- rows that come back


async def talks_on(task: Task, policy: Policy) -> dict[str, float]:
    """Two speakers that never stop; one of them in a task that nobody cancels."""
    aside = asyncio.ensure_future(talk(task, policy.fork("aside")))
    await talk(task, policy)
    await aside
    return {"played": 1.0}


async def talk(task: Task, policy: Policy) -> None:
    while True:
        await policy.generate(task.prompt)


def explorer_with(engine: TorchEngine, function: Any, deadline_s: float = 60.0, new_tokens: int = LONG) -> Explorer:
    return Explorer(
        engine, RENDERER, Plays(function), make_judge(()), Sampling(new_tokens), RolloutLimits(deadline_s, 64)
    )


TASK = Task("1", (Message("user", "1"),))


def idle(engine: TorchEngine) -> bool:
    return not (engine._batch.live or engine._waiting or engine._backlog or engine._inbox)


async def test_a_deadline_frees_every_row_and_nothing_later_joins_the_record(policies: tuple[Path, Path]) -> None:
    async with engine_at(policies[0], max_rows=3) as engine:
        explorer = explorer_with(engine, talks_on, deadline_s=0.3)
        keys = [SampleKey(0, "test", "train", "1", 0, index) for index in range(4)]
        group = await explorer.rollout(TASK, keys)
        assert [t.failure.side for t in group.trajectories if t.failure] == ["deadline"] * 4
        turns = [t.turns for t in group.trajectories]
        await until(lambda: idle(engine))
        read, steps = engine.counters["prompts_read"], engine.counters["steps"]
        await engine.generate(request(tokens=9))
        now = engine.counters["prompts_read"], engine.counters["steps"]
        assert now == (read + 1, steps + 8), "nobody samples for playings that are over"
        assert [t.turns for t in group.trajectories] == turns


async def test_cancelling_a_playing_frees_every_row(policies: tuple[Path, Path]) -> None:
    async with engine_at(policies[0], max_rows=3) as engine:
        explorer = explorer_with(engine, talks_on)
        playing = asyncio.ensure_future(
            explorer.rollout(TASK, [SampleKey(0, "t", "train", "1", 0, i) for i in range(4)])
        )
        await until(lambda: engine.counters["steps"] > 3)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await until(lambda: idle(engine))


# --------------------------------------------------------------------------- whole loops


class World:
    """The real loops around a trainer that only counts."""

    def __init__(self, schedule: Schedule, explorer: Explorer, rollouts: Path, weights: Any) -> None:
        self.schedule, self.explorer, self.weights = schedule, explorer, weights
        self.buffer = MemoryBuffer(
            MemoryBuffer.Config(), schedule=schedule, rollouts=rollouts, renderer=RENDERER, deadline_s=60
        )
        self.channel, self.synchronizer = MemoryChannel(keep=8), Synchronizer(MemoryBoard(), deadline_s=60)
        self.steps: list[list[Group]] = []

    def publish(self, version: int) -> None:
        self.channel.offer(version, self.weights(version))
        self.synchronizer.publish(version)

    async def train(self, trained: Callable[[int], Any] = lambda version: None) -> None:
        """Every step of the stage; `trained` is awaited after each, where it is a coroutine."""
        await self.buffer.restore(None, 0)
        parts = (self.explorer, self.buffer, self.schedule, self.synchronizer)
        async with asyncio.TaskGroup() as roles:
            helpers = [roles.create_task(explore_loop(*parts)), roles.create_task(follow_weights(*parts, self.channel))]
            self.publish(0)
            for version in range(self.schedule.steps):
                self.steps.append(await self.buffer.take(self.schedule.groups_per_step, version))
                if asyncio.iscoroutine(waiting := trained(version + 1)):
                    await waiting
                self.publish(version + 1)
            for helper in helpers:
                helper.cancel()


async def test_a_step_takes_what_is_finished_first_and_calls_off_the_rest(
    policies: tuple[Path, Path], tmp_path: Path
) -> None:
    """Every fifth task talks on the first time it is played. What the step does not need is called off at once, its
    rows are free, and its slot is played again with newer weights."""
    tasks = [Task(str(i), (Message("user", str(i % 10)),)) for i in range(40)]
    schedule = Schedule(tasks, 0, groups_per_step=4, group_size=2, over_rollout=2, steps=6, shuffle=False)
    seen: Counter[str] = Counter()
    stragglers = set[str]()

    async def plays(task: Task, policy: Policy) -> dict[str, float]:
        seen[task.task_id] += 1
        if int(task.task_id) % 5 == 0 and seen[task.task_id] <= schedule.group_size:
            stragglers.add(task.task_id)
            await talk(task, policy)
        await policy.generate(task.prompt, max_new_tokens=4)
        return {"played": 1.0}

    async with engine_at(policies[0]) as engine:
        world = World(schedule, explorer_with(engine, plays), tmp_path, lambda version: weights_at(policies[0]))

        async def rows_are_free(version: int) -> None:
            await until(lambda: idle(engine))

        async with asyncio.timeout(60):
            await world.train(rows_are_free)
    counts = await world.buffer.counts()
    taken = Counter(group.slot for step in world.steps for group in step)
    assert [len(step) for step in world.steps] == [4] * 6
    assert max(taken.values()) == 1
    assert counts["called_off"] >= len(stragglers) >= 4
    assert counts["given_up"] == 0
    again = {group.slot: group for step in world.steps for group in step if group.attempt}
    assert {0, 5, 10} <= again.keys(), "what was called off was played again, and trained on"
    for version, step in enumerate(world.steps):
        for group in step:
            assert group.oldest_version == version, "max_staleness 0 holds, whatever was called off"
            assert len(group.alive) == 2
            assert all(len(t.turns) == 1 for t in group.trajectories), "nothing of a playing that was called off"


async def test_staleness_is_bounded_by_the_oldest_token(policies: tuple[Path, Path], tmp_path: Path) -> None:
    """Long replies live through several versions; no step trains on a token that is older than the bound."""
    tasks = [Task(str(i), (Message("user", str(i % 10)),)) for i in range(40)]
    schedule = Schedule(tasks, 0, groups_per_step=2, group_size=2, max_staleness=2, steps=10, shuffle=False)

    async def plays(task: Task, policy: Policy) -> dict[str, float]:
        await policy.generate(task.prompt, max_new_tokens=40 if int(task.task_id) % 4 else LONG)
        return {"played": 1.0}

    async with engine_at(policies[0]) as engine:
        explorer = explorer_with(engine, plays)
        explorer.in_flight = "update"
        world = World(schedule, explorer, tmp_path, lambda version: weights_at(policies[version % 2]))
        async with asyncio.timeout(60):
            await world.train()
    spans = [t.policy_version for step in world.steps for group in step for t in group.turns()]
    assert all((np.diff(span) >= 0).all() for span in spans)
    assert any(len({*span.tolist()}) > 1 for span in spans), "no reply lived through an update"
    for version, step in enumerate(world.steps):
        for group in step:
            oldest = min(int(turn.policy_version.min()) for turn in group.turns())
            assert oldest == group.oldest_version >= version - 2
            assert group.newest_version <= version


# --------------------------------------------------------------------------- configs and a whole run

BASE: dict[str, Any] = {
    "model": tiny_model(hidden=16, heads=1, mlp=32),
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "rewards": [{"kind": "exact"}],
    "engine": {"kind": "torch", "sampling": {"max_new_tokens": 4}},
    "cluster": {"threads": 1},
    "monitors": [],
    "schedule": {"steps": 3, "groups_per_step": 2, "group_size": 4},
}


def said(**changes: dict[str, Any]) -> RunConfig:
    return config_from_mapping({**BASE, **{name: {**BASE.get(name, {}), **v} for name, v in changes.items()}})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"workflow": {"min_members": 5}}, ("workflow.min_members", "schedule.group_size is 4")),
        ({"workflow": {"min_members": 2, "max_failed_fraction": 1.0}}, ("workflow.max_failed_fraction",)),
        (
            {"workflow": {"min_members": 2}, "schedule": {"deterministic": True, "max_staleness": 1}},
            ("workflow.min_members", "schedule.max_staleness"),
        ),
        ({"schedule": {"deterministic": True, "over_rollout": 0.5}}, ("schedule.over_rollout",)),
        ({"sync": {"in_flight": "update"}, "schedule": {"deterministic": True}}, ("sync.in_flight", "deterministic")),
        (
            {"sync": {"in_flight": "update"}, "engine": {"kind": f"{__name__}:Plain"}},
            ("sync.in_flight", "Plain"),
        ),
    ],
)
def test_configs_in_which_timing_would_decide(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    with refused(ConfigError, *names):
        said(**changes)


class Plain(ScriptedEngine):
    """An engine that cannot change weights in mid-reply."""

    capabilities = Capabilities(exact_sampling=True)


def test_the_same_keys_are_fine_where_nothing_depends_on_timing() -> None:
    said(workflow={"min_members": 2}, schedule={"deterministic": True})
    said(sync={"in_flight": "update"}, schedule={"max_staleness": 2, "over_rollout": 0.5})


def test_a_run_whose_groups_are_all_dropped_ends(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def never(prompt, completion):\n"
        "    if completion != 'I do not know.':  # of the check before the run\n"
        "        raise ValueError('no judge today')\n"
        "    return 0.0\n"
    )
    config = {
        **BASE,
        "run": {"dir": str(tmp_path / "run")},
        "workflow": {"min_members": 2},
        "rewards": [{"kind": f"{tmp_path}/broken.py:never"}],
    }
    with pytest.raises((RolloutsFailing, ExceptionGroup)) as raised:
        run(config_from_mapping(config))
    check_error(first_cause(raised.value), RolloutsFailing, "RewardError")


@pytest.mark.parametrize("in_flight", ["finish", "update"])
def test_a_whole_run_with_everything_on(tmp_path: Path, in_flight: str) -> None:
    config = said(
        run={"dir": str(tmp_path / "run")},
        sync={"in_flight": in_flight},
        workflow={"max_retries": 1, "min_members": 2},
        schedule={"max_staleness": 1, "over_rollout": 0.5},
    )
    assert run(config)["steps"] == 3
