"""Worker groups on Ray: calls of roles, the order of calls, failures and pools."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doors.e2e.ray_workers import Broken, Counting, Talking
from tests.failing import refused
from tests.processes import survivors
from tests.waiting import eventually
from trivium.cluster.actors import ActorDied
from trivium.cluster.pools import Placement, ResourcePool, _placements
from trivium.foundation.errors import ConfigError, DataError, RoleFailed, TriviumError, UnknownName
from trivium.frontdoors.verl.objects.resource_pools import ResourcePoolManager, Role
from trivium.frontdoors.verl.objects.workers.worker_group import RayWorkerGroup, RoleWorker

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("connected")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


@pytest.fixture(scope="module")
def three(connected: None, run_dir: Path) -> Iterator[RayWorkerGroup]:
    roles = {"actor": RoleWorker.of(Counting, 5, "actor")}
    with RayWorkerGroup(ResourcePool([3], cpus=0.1), roles, run_dir=run_dir, threads=2) as group:
        yield group


@pytest.fixture(scope="module")
def four(connected: None, run_dir: Path) -> Iterator[RayWorkerGroup]:
    """Two roles in each of four processes."""
    roles = {
        "critic": RoleWorker.of(ray.remote(Counting), 7, "critic"),
        "rollout": RoleWorker.of(Talking, 0, "rollout"),
    }
    with RayWorkerGroup(ResourcePool([4], cpus=0.1), roles, run_dir=run_dir) as group:
        yield group


# --------------------------------------------------------------------------- calls


def test_ranks_know_their_places_and_run_in_one_thread(three: RayWorkerGroup, run_dir: Path) -> None:
    known = three.run("who")
    assert [(each["rank"], each["size"], each["local"]) for each in known] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert len({each["pid"] for each in known}) == 3
    assert len({each["port"] for each in known}) == 1
    assert {each["threads"] for each in known} == {"2"}
    assert [each["thread"] for each in three.run("who")] == [each["thread"] for each in known]
    assert f"actor-rank-1: process {known[1]['pid']} on" in (run_dir / "log.txt").read_text()
    assert three.run("summed", 2.0) == [12.0] * 3


def test_ranks_receive_the_same_arguments_or_their_own(three: RayWorkerGroup) -> None:
    assert three.run("added", 10, 100) == [115, 116, 117]
    assert three.run_each("added", [10, 20, 30]) == [15, 26, 37]
    assert asyncio.run(three.run_on(2, "added", 10)) == 17
    with pytest.raises(AttributeError, match="nothing"):
        three.run("nothing")


def test_roles_share_a_process_and_its_process_group(four: RayWorkerGroup) -> None:
    critic, rollout = four.of_role("critic"), four.of_role("rollout")
    assert critic.run("summed", 1.0) == [10.0] * 4
    assert rollout.run("group_of") == [4] * 4
    assert [pid for _, pid in rollout.run("at_once")] == [each["pid"] for each in critic.run("who")]
    with pytest.raises(AttributeError, match="generate"):
        critic.run("generate", "")


def test_a_rollout_engine_answers_while_its_process_trains(four: RayWorkerGroup, tmp_path: Path) -> None:
    critic, rollout = four.of_role("critic"), four.of_role("rollout")
    assert asyncio.run(rollout.run_on(0, "generate", "hello")) == "hello!"

    async def talk() -> list[str]:
        training = asyncio.ensure_future(asyncio.to_thread(critic.run, "until", tmp_path / "end"))
        calls = (rollout.run_on(rank, "generate", f"{number}") for number in range(20) for rank in range(4))
        completions = await asyncio.gather(*calls)
        assert not training.done()
        (tmp_path / "end").touch()
        assert await training == [0, 1, 2, 3]
        return completions

    assert asyncio.run(talk()) == [f"{number}!" for number in range(20) for _ in range(4)]
    assert all(most > 5 for most, _ in rollout.run("at_once"))


# --------------------------------------------------------------------------- failures


def test_an_error_comes_home_whole_and_names_the_rank(three: RayWorkerGroup, run_dir: Path) -> None:
    with refused(DataError, "asked: a\nfound: b\ndo: c"):
        three.run("fail", DataError("a", "b", "c"))
    with refused(RoleFailed, "actor-rank-1", "ValueError: mine"):
        three.run("fail", ValueError("mine"))
    with refused(RoleFailed, "actor-rank-1", "ValueError: mine"):
        asyncio.run(three.run_on(1, "fail", ValueError("mine")))
    assert "in fail" in (run_dir / "log.txt").read_text(), "the traceback"
    assert three.run("added", 0) == [5, 6, 7], "the group works on"


def test_a_worker_that_cannot_be_built_says_why_and_leaves_nothing(run_dir: Path) -> None:
    with refused(RoleFailed, "broken-rank-1", "ValueError"):
        RayWorkerGroup(ResourcePool([2], cpus=0.1), {"broken": RoleWorker.of(Broken, 0, "broken")}, run_dir=run_dir)
    pids = [
        int(line.split()[5])
        for line in (run_dir / "log.txt").read_text().splitlines()
        if "broken-rank-" in line and ": process" in line
    ]
    assert len(pids) == 2
    assert not survivors(pids)
    with refused(ConfigError, "Worker"):
        RoleWorker.of(dict, 0, "actor")


def test_a_call_that_takes_longer_than_the_deadline_names_the_ranks(run_dir: Path, tmp_path: Path) -> None:
    roles = {"ref": RoleWorker.of(Counting, 0, "ref")}
    with RayWorkerGroup(ResourcePool([2], cpus=0.1), roles, run_dir=run_dir, deadline_s=60) as group:
        group._ranks._deadline_s = 0.1
        with refused(RoleFailed, "ref-rank-0", "ref-rank-1", "0 s"):
            group.run("until", tmp_path / "end")


def test_the_death_of_a_rank_ends_every_call_at_once_and_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    pool, errors = ResourcePool([3], cpus=0.5), list[BaseException]()
    with RayWorkerGroup(pool, {"ref": RoleWorker.of(Counting, 0, "ref")}, run_dir=run_dir) as group:
        reserved, pids = pool.placements[0].group, [each["pid"] for each in group.run("who")]

        def wait_for(method: str, *args: Any) -> None:
            try:
                group.run(method, *args)
            except ActorDied as error:
                errors.append(error)

        waiting = [threading.Thread(target=wait_for, args=("stuck", tmp_path))]
        waiting[0].start()
        eventually(lambda: len([*tmp_path.iterdir()]) == 3)  # all are in the middle of it
        waiting.append(threading.Thread(target=wait_for, args=("added", 0)))
        waiting[1].start()
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        for thread in waiting:
            thread.join()
        assert ["ref-rank-1" in str(error) for error in errors] == [True, True]
        with refused(ActorDied, "ref-rank-1"):
            asyncio.run(group.run_on(0, "added", 0))
        with refused(ActorDied, "ref-rank-1"):
            group.run("added", 0)
        group.shutdown()
        assert time.monotonic() - killed < 100
        assert not survivors(pids)
        with refused(TriviumError, "ref-rank-0"):
            group.run("added", 0)
        group.shutdown()  # once more changes nothing
        assert pool.placements == ()
        eventually(lambda: ray.util.placement_group_table(reserved)["state"] == "REMOVED")


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
    assert Role.from_string("actor_rollout") is Role.ActorRollout
    with refused(UnknownName, "director"):
        Role.from_string("director")


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
    assert time.monotonic() - started < 100  # a manager that waited would wait 120 s


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
    roomy = ResourcePoolManager({"late": [3]}, {Role.Actor: "late"}, deadline_s=120)
    roomy.create_resource_pool()
    roomy.release()


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
