"""Worker groups on Ray: dispatch of arguments, collection of results, futures, failures and pools."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.doors.e2e.ray_workers import Broken, Counting, Talking, Traced
from tests.failing import refused
from tests.processes import survivors
from trivium.cluster.actors import ActorDied
from trivium.cluster.pools import Placement, ResourcePool, _placements
from trivium.errors import ConfigError, DataError, RoleFailed, TriviumError
from trivium.frontdoors.verl.objects.resource_pools import (
    ResourcePoolManager,
    Role,
    merge_resource_pool,
    split_resource_pool,
)
from trivium.frontdoors.verl.objects.workers.dispatch import Dispatch, Execute, register, registered_methods
from trivium.frontdoors.verl.objects.workers.row_splitting import gathered, split
from trivium.frontdoors.verl.objects.workers.worker import Worker
from trivium.frontdoors.verl.objects.workers.worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
    parallel_put,
)
from trivium.types import Batch, Experience

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("connected")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


@pytest.fixture(scope="module")
def three(connected: None, run_dir: Path) -> Iterator[Any]:
    """Three ranks, each with its own share."""
    with RayWorkerGroup(
        ResourcePool([3], cpus=0.1), RayClassWithInitArgs(Counting, 5), name="actor", run_dir=run_dir, threads=2
    ) as group:
        yield group


@pytest.fixture(scope="module")
def four(connected: None, run_dir: Path) -> Iterator[Any]:
    """Two roles in each of four processes; two of the critic's ranks share each share of the data."""
    both = create_colocated_worker_cls(
        {Role.Critic: RayClassWithInitArgs(ray.remote(Counting), 7, peers=2), "rollout": RayClassWithInitArgs(Talking)}
    )
    with RayWorkerGroup(ResourcePool([4], cpus=0.1), both, run_dir=run_dir) as group:
        yield group


def batch(rows: int) -> Batch:
    made = [
        Experience(np.arange(length), np.arange(length) > 0, np.zeros(length), np.zeros(length), "group", row)
        for row, length in enumerate(range(2, 2 + rows))
    ]
    columns = {"advantages": tuple(np.full(len(e), float(row)) for row, e in enumerate(made))}
    return Batch(tuple(made), columns, {"reward/mean": 0.5})


def same(a: Any, b: Any) -> bool:
    """Whether two values with rows are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, Batch):
        return (
            [e.index for e in a.experiences] == [e.index for e in b.experiences]
            and all(same(e.tokens, f.tokens) for e, f in zip(a.experiences, b.experiences, strict=True))
            and all(map(same, a.columns["advantages"], b.columns["advantages"]))
            and a.metrics == b.metrics
        )
    if isinstance(a, np.ndarray | torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b


# --------------------------------------------------------------------------- rows


def kinds(rows: int) -> list[Any]:
    numbers = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    return [
        [f"row {row}" for row in range(rows)],
        tuple(range(rows)),
        numbers,
        torch.from_numpy(numbers),
        batch(rows),
        {"array": numbers, "more": {"list": list(range(rows))}, "temperature": 0.7},
    ]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 10])
def test_what_is_split_is_gathered_exactly(rows: int, parts: int) -> None:
    for value in kinds(rows):
        pieces = split(value, parts)
        assert len({piece.rows for piece in pieces}) == 1
        assert len(pieces) == parts
        assert same(gathered([piece.made(piece.value) for piece in pieces]), value)


def test_padding_that_cannot_be_found_again_is_an_error() -> None:
    pieces = split(list(range(5)), 2)
    assert gathered([piece.made(piece.value * 2) for piece in split([1, 2, 3, 4], 2)]) == [1, 2, 1, 2, 3, 4, 3, 4]
    with refused(DataError, "1 rows", "2 rows", 3):
        gathered([piece.made(piece.value[:2]) for piece in pieces])
    with refused(DataError, "[1, 2] rows"):
        gathered([pieces[0].made(pieces[0].value), pieces[1].made(pieces[1].value * 2)])
    with refused(DataError, "float", "Dispatch.DP_COMPUTE_METRIC"):
        gathered([piece.made(1.0) for piece in pieces])
    assert gathered([piece.made(None) for piece in pieces]) is None


def test_only_rules_that_can_be_followed_are_registered() -> None:
    with refused(ConfigError, "Dispatch.ONE_TO_ALL", "'dispatch_fn'", "'collect_fn'"):
        register({"dispatch_fn": len})
    with refused(ConfigError, "DP_COMPUTE_PROTO", "Execute.RANK_ZERO"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)

    class Louder(Counting):
        def who(self) -> dict[str, Any]:
            return {}

    assert registered_methods(Louder)["who"] == registered_methods(Counting)["who"]
    assert "set_data_rank" not in registered_methods(Louder)


# --------------------------------------------------------------------------- calls


def test_ranks_know_their_places_and_run_in_one_thread(three: Any, run_dir: Path) -> None:
    known = three.who()
    assert [(each["rank"], each["size"], each["local"]) for each in known] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert len({each["pid"] for each in known}) == 3
    assert len({each["port"] for each in known}) == 1
    assert {each["threads"] for each in known} == {"2"}
    assert [each["thread"] for each in three.who()] == [each["thread"] for each in known]
    assert f"actor-rank-1: process {known[1]['pid']} on" in (run_dir / "log.txt").read_text()
    assert three.summed(2.0) == [12.0] * 3


def test_every_rule_gives_and_collects_what_it_says(three: Any) -> None:
    assert three.same([1, 2, 3]) == [[1, 2, 3]] * 3
    assert three.dealt(["a", "b", "c"]) == ["a", "b", "c"]
    assert three.dealt("abc") == ["abc"] * 3
    assert three.own([10, 20, 30]) == [10, 21, 32]
    with refused(DataError, "own", "3 ranks", "[2]"):
        three.own([1, 2])
    assert three.total([1, 2, 3, 4, 5, 6]) == [3.0, 7.0, 11.0]
    assert three.alone(4) == (0, 4)
    assert three.first() == 0
    assert three.hear("you") == "YOU 0 OF 3, YOU 1 OF 3, YOU 2 OF 3"
    assert three.execute_all_sync("first") == [0, 1, 2]
    assert three.execute_all_async("dealt", [1, 2, 3]).get() == [1, 2, 3]
    assert three.execute_rank_zero_sync("alone", 5) == (0, 5)
    assert three.execute_rank_async(2, "first").get() == 2
    with pytest.raises(AttributeError, match=r"actor .*'nothing'.*who"):
        three.nothing()
    with pytest.raises(AttributeError, match=r"actor .*'nothing'"):
        three.execute_all_sync("nothing")


def test_rows_go_to_ranks_and_come_back_in_order(three: Any) -> None:
    three.sizes()
    for rows in (0, 1, 2, 3, 7):
        for value in kinds(rows):
            assert same(three.through(value, offset=3), value)
        assert three.sizes() == [[-(-rows // 3)] * 6] * 3, "every rank has as many rows, or its peers would wait for it"
    assert three.twice([1, 2, 3, 4]) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert three.even(list(range(9))) == [0, 2, 4, 6, 8]
    assert same(three.through(batch(4), more=torch.arange(4)), torch.arange(4))
    with refused(DataError, "2 rows", "more has 3 rows"):
        three.through([1, 2], more=[1, 2, 3])
    with refused(DataError, "1 rows"):
        three.even([0, 2, 3, 4, 5])
    with refused(DataError, "int", "Dispatch.DP_COMPUTE_METRIC"):
        three.through([1, 2, 3], more=4)


def test_calls_reach_all_ranks_in_the_order_they_were_made_in(three: Any) -> None:
    futures = [three.remember(str(number)) for number in range(50)]
    assert all(future.get() == [None] * 3 for future in futures)
    assert three.words() == [[str(number) for number in range(50)]] * 3


def test_a_future_goes_from_rank_to_rank(three: Any, four: Any, tmp_path: Path) -> None:
    critic = four.spawn([Role.Critic])["critic"]
    path = tmp_path / "seen"
    traced = Traced(path, np.arange(100_000.0))  # too long to travel inside of an answer
    made = three.added(traced)
    passed = three.added(three.added(made))
    assert three.length(passed) == [100_000] * 3
    assert critic.length(made) == [100_000] * 4
    resplit = critic.added(passed)
    assert critic.length(resplit) == [100_000] * 4
    read = set(map(int, path.read_text().split()))
    assert read >= {each["pid"] for each in three.who()}
    assert os.getpid() not in read, "it never came to the driver"
    assert same(resplit.get().values, traced.values)
    assert os.getpid() in set(map(int, path.read_text().split()))


def test_a_future_is_what_it_stands_for(three: Any, four: Any, tmp_path: Path) -> None:
    critic = four.spawn([Role.Critic])["critic"]
    slow = three.until(tmp_path / "end")
    assert not slow.done()
    (tmp_path / "end").touch()
    rows = np.arange(7)
    future = three.added(rows)
    assert same(three.through(future), rows + 1)
    assert same(three.through(rows, more=future), rows + 1)
    assert same(critic.through(rows, more=future), rows + 1)
    assert same(critic.added(three.added(future, 10), number=100).get(), rows + 1 + 10 + 100)
    assert three.same(future)[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert three.unasked(future) == ["Pending of [1 2 3 4 5 6 7]"] * 3
    assert three.same([future, 1])[1][0].get(60.0).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert slow.get() == [0, 1, 2]
    assert slow.done()
    with refused(RoleFailed, "actor-rank-0", "actor-rank-1", "actor-rank-2", "0 s"):
        three.slow(0.5).get(timeout_s=0.1)
    assert asyncio.run(awaited(three)) == [0, 1, 2]


async def awaited(group: Any) -> list[int]:
    return await group.slow(0.1)


def test_ranks_that_share_a_share_are_given_the_same_and_one_answers(four: Any) -> None:
    critic = four.spawn([Role.Critic])["critic"]
    critic.sizes()
    assert critic.through(list(range(5))) == list(range(5))
    assert critic.sizes() == [[3]] * 4
    assert critic.total([1, 2, 4, 8]) == [3.0, 12.0]
    with refused(TriviumError, "rank 0", "data rank 0"):
        critic.execute_all_sync("set_data_rank", 0, 1)


def test_roles_share_a_process_and_its_process_group(four: Any) -> None:
    views = four.spawn({"critic", "rollout"})
    critic, rollout = views["critic"], views["rollout"]
    assert critic.summed(1.0) == [10.0] * 4
    assert rollout.group_of() == [4] * 4
    assert [pid for _, pid in rollout.at_once()] == [each["pid"] for each in critic.who()]
    with pytest.raises(AttributeError, match=r"critic\+rollout .*'generate'"):
        critic.generate([])
    with pytest.raises(AttributeError, match=r"spawn\(\)"):
        four.who()
    with refused(ConfigError, "'ref'", "critic", "rollout"):
        four.spawn(["ref"])
    with refused(ConfigError, "'ref'", "create_colocated_worker_raw_cls"):
        four.fuse(["ref"])


def test_a_rollout_engine_answers_while_its_process_trains(four: Any, tmp_path: Path) -> None:
    views = four.spawn({"critic", "rollout"})
    assert views["rollout"].generate(["hello"]).get() == ["hello!"]
    training = views["critic"].until(tmp_path / "end")

    async def talk() -> list[list[str]]:
        return await asyncio.gather(*(views["rollout"].generate([f"{n}"] * 4) for n in range(20)))

    assert asyncio.run(talk()) == [[f"{n}!"] * 4 for n in range(20)]
    assert not training.done()
    (tmp_path / "end").touch()
    assert training.get() == [0, 1, 2, 3]
    assert all(most > 5 for most, _ in views["rollout"].at_once())


# --------------------------------------------------------------------------- failures


def test_an_error_comes_home_whole_and_names_the_rank(three: Any, run_dir: Path) -> None:
    with refused(DataError, "asked: a\nfound: b\ndo: c"):
        three.fail(DataError("a", "b", "c"))
    with refused(RoleFailed, "actor-rank-1", "ValueError: mine"):
        three.fail(ValueError("mine"))
    assert "in fail" in (run_dir / "log.txt").read_text(), "the traceback"
    failing = three.added(["no", "numbers", "here"])
    with refused(RoleFailed, "TypeError"):
        three.through(failing)
    assert three.first() == 0, "the group works on"


def test_a_worker_that_cannot_be_built_says_why_and_leaves_nothing(run_dir: Path) -> None:
    with refused(RoleFailed, "broken-rank-1", "ValueError"):
        RayWorkerGroup(ResourcePool([2], cpus=0.1), RayClassWithInitArgs(Broken), run_dir=run_dir)
    pids = [
        int(line.split()[5])
        for line in (run_dir / "log.txt").read_text().splitlines()
        if "broken-rank-" in line and ": process" in line
    ]
    assert len(pids) == 2
    assert not survivors(pids)
    with refused(ConfigError, "Worker"):
        RayClassWithInitArgs(dict)


def test_the_death_of_a_rank_ends_every_call_at_once_and_leaves_nothing(three: Any, run_dir: Path) -> None:
    pool = ResourcePool([3], cpus=0.5)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Counting, 0), name="ref", run_dir=run_dir) as group:
        reserved, pids = pool.placements[0].group, [each["pid"] for each in group.who()]
        stuck = [group.execute_all_async("stuck"), group.slow(0.0), group.execute_rank_zero_async("first")]
        with refused(RoleFailed, "2 s"):
            stuck[0].get(timeout_s=2.0)  # by then they are in the middle of it
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        for future in stuck:
            with refused(ActorDied, "ref-rank-1"):
                future.get()
        with refused(ActorDied, "ref-rank-1"):
            asyncio.run(awaited(group))
        with refused(ActorDied, "ref-rank-1"):
            group.first()
        with refused(ActorDied, "ref-rank-1"):
            three.length(stuck[1])
        with refused(ActorDied, "ref-rank-1"):
            asyncio.run(group.watch())
        group.shutdown()
        assert time.monotonic() - killed < 100
        assert not survivors(pids)
        with refused(TriviumError, "ref-rank-0"):
            group.first()
        group.shutdown()  # once more changes nothing
        assert pool.placements == ()
        assert eventually(lambda: ray.util.placement_group_table(reserved)["state"] == "REMOVED")


def eventually(happened: Any) -> bool:
    end = time.monotonic() + 120
    while not happened() and time.monotonic() < end:
        time.sleep(0.05)
    return happened()


# --------------------------------------------------------------------------- pools


def test_roles_have_the_names_of_the_original() -> None:
    assert [f"{role.name} {role.value} {role}" for role in Role] == [
        "Actor 0 actor",
        "Rollout 1 rollout",
        "ActorRollout 2 actor_rollout",
        "Critic 3 critic",
        "RefPolicy 4 ref",
        "RewardModel 5 rm",
        "ActorRolloutRef 6 actor_rollout_ref",
        "Env 7 env",
    ]


def test_what_a_cluster_lacks_is_said_before_anybody_waits() -> None:
    started = time.monotonic()
    manager = ResourcePoolManager({"a": [3], "b": [1, 2]}, {Role.Actor: "a", Role.Critic: "b"})
    assert manager.get_n_gpus() == 6
    with refused(TriviumError, "create_resource_pool()"):
        manager.get_resource_pool(Role.Actor)
    with refused(ConfigError, "'b'", "[1, 2]", "2 CPUs", 4):
        manager.create_resource_pool()
    with refused(ConfigError, "3 GPUs", 0):
        ResourcePoolManager({"a": [3]}, {Role.Actor: "a"}, device_name="cuda").create_resource_pool()
    with refused(ConfigError, "RefPolicy", "Actor, Critic"):
        manager.get_resource_pool(Role.RefPolicy)
    with refused(ConfigError, "Critic", "resource_pool_spec"):
        ResourcePoolManager({"a": [1]}, {Role.Critic: "b"})
    with refused(ConfigError, "'pool'", "[0]"):
        ResourcePool([0])
    assert time.monotonic() - started < 20


def test_pools_are_shared_waited_for_and_given_back(run_dir: Path) -> None:
    spec = {"all": [1, 1]}
    manager = ResourcePoolManager(spec, {Role.Actor: "all", Role.Critic: "all"}, max_colocate_count=2)
    manager.create_resource_pool()
    pool = manager.get_resource_pool(Role.Critic)
    assert pool is manager.get_resource_pool(Role.Actor)
    assert [placement.bundle for placement in pool.placements] == [0, 0]
    late = ResourcePoolManager({"late": [3]}, {Role.Actor: "late"}, deadline_s=0.5)
    with refused(ConfigError, "'late'", "CPUs"):
        late.create_resource_pool()
    assert pool.admit() == (0.5, 0.0)
    assert pool.admit() == (0.5, 0.0)
    with refused(ConfigError, 2):
        pool.admit()
    manager.release()
    roomy = ResourcePoolManager({"late": [3]}, {Role.Actor: "late"}, deadline_s=30)
    roomy.create_resource_pool()
    roomy.release()


def test_a_pool_is_split_and_merged_and_a_fused_worker_has_a_view_of_each_role(run_dir: Path) -> None:
    class Adding(Worker):
        def __init__(self, start: int) -> None:
            self.start = start

        @register(Dispatch.ONE_TO_ALL)
        def add(self, number: int) -> int:
            return number + self.start + self.rank

    roles = {"a": RayClassWithInitArgs(Adding, 5), "b": RayClassWithInitArgs(Adding, 70)}
    fused: Any = create_colocated_worker_raw_cls(roles)

    class Both(fused):
        @register(Dispatch.ONE_TO_ALL)
        def both(self, number: int) -> int:
            return self.b.add(self.a.add(number))

    whole = ResourcePool([3], cpus=0.1, max_colocate_count=2)
    first, rest = split_resource_pool(whole, [1, 2])
    assert [place.local_size for place in rest.placements] == [2, 2]
    again = merge_resource_pool(rest, first)
    assert [place.bundle for place in again.placements] == [1, 2, 0]
    with refused(ConfigError, "'pool'", 3):
        split_resource_pool(whole, 2)
    try:
        with RayWorkerGroup(rest, RayClassWithInitArgs(ray.remote(Both)), name="fused", run_dir=run_dir) as group:
            group.fuse(["a", "b"])
            assert (group.a.add(0), group.b.add(0), group.both(0)) == ([5, 6], [70, 71], [75, 77])
        assert [ray.get(ref) for ref in parallel_put([1, "two"])] == [1, "two"]
    finally:
        whole.release()


def test_ranks_find_their_machines_again() -> None:
    class Group:
        def __init__(self, name: str, bundle_count: int) -> None:
            self.name, self.bundle_count = name, bundle_count

    two, four = Group("two", 2), Group("four", 4)
    placed = [("10.0.0.9", two), ("10.0.0.2", four)]
    placements = _placements(placed)
    assert [(placement.address, placement.bundle, placement.local_size) for placement in placements] == [
        *(("10.0.0.2", bundle, 4) for bundle in range(4)),
        *(("10.0.0.9", bundle, 2) for bundle in range(2)),
    ]
    assert _placements(placed[::-1]) == placements
    assert isinstance(placements[0], Placement)


def test_methods_of_a_group_are_not_hidden_by_those_of_a_worker(run_dir: Path) -> None:
    class Clashing(Worker):
        @register()
        def shutdown(self) -> None: ...

    pool = ResourcePool([1], cpus=0.1)
    with refused(ConfigError, "shutdown", "Clashing"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Clashing), run_dir=run_dir)
    assert pool.placements == (), "nothing was started"
