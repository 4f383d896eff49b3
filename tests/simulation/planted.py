"""Faults planted in the product, each of which the simulation must find.

    python -m tests.simulation.planted NAME

runs worlds with the fault until one breaks a promise, and prints its seed: first the world of the fault's `seed`, then
those of all seeds. Exits 1 if none does within `MOST` seeds. A fault is a replacement in the source of one module.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import trivium
from tests.simulation.seeds import prepare, run_seeds
from tests.simulation.spec import Spec

MOST = 2000


class Fault(NamedTuple):
    module: str
    """Its file, below `trivium/`."""
    old: str
    new: str
    shared: bool | None = None
    """Where it can show: with a shared database, in one process, or (None) in both."""
    seed: int = 0
    """A world that breaks a promise with it. A change of the product or of the simulation may move it."""


PLANTED = {
    "admission is off by one": Fault(
        "schedule.py",
        "return min(self._ahead(version), self.steps) * self.fresh_per_step + self.over_rollout",
        "return min(self._ahead(version), self.steps) * self.fresh_per_step + self.over_rollout + 1",
        False,
    ),
    "eviction is one version late": Fault(
        "buffers/slot_machine.py",
        "return trains - self._schedule.max_staleness",
        "return trains - self._schedule.max_staleness - 1",
        False,
        67,
    ),
    "an evicted slot is not issued again": Fault(
        "buffers/slot_machine.py", "        self._insert(following)\n", "        del following\n", False, 5
    ),
    "a group wakes nothing": Fault(
        "buffers/memory.py", "if self._slots.changed and not isinstance(answer, Row):", "if False:", False
    ),
    "taken groups stay finished": Fault(
        "buffers/slot_machine.py",
        "        self._update(ready, state=SlotState.CONSUMED, consumed_at=version)\n",
        "",
        False,
        5,
    ),
    "ordered runs train in order of arrival": Fault(
        "buffers/slot_machine.py",
        "end = self._lowest_unfinished() if self._schedule.ordered else None",
        "end = None",
        False,
        2,
    ),
    "the end of the stage is not announced": Fault("loops.py", "            synchronizer.finish()\n", "", False),
    "heartbeats are not sent": Fault("foundation/concurrency.py", "                self._beat()\n", "", True, 15),
    "a role is declared dead too early": Fault(
        "foundation/run_role.py", "silence_s(beats) > heartbeat_s:", "silence_s(beats) > heartbeat_s / 50:", True, 177
    ),
    "a silent role is never declared dead": Fault(
        "foundation/run_role.py",
        'self.mark_dead(peer, f"no heartbeat for {heartbeat_s} s", replaced=True, beats=beats)',
        "pass",
        True,
        138,
    ),
    "the leases of a dead explorer stay": Fault(
        "buffers/slot_machine.py",
        "        self._update(leased, state=SlotState.FREE, owner=None)\n        # It will not",
        "        # It will not",
        True,
        138,
    ),
    "a repeated call takes effect twice": Fault(
        "buffers/sql/buffer.py", "if call.tried and (answered", "if not call.tried and (answered", True, 186
    ),
    "SQLite does not sync": Fault(
        "buffers/sql/database.py", "PRAGMA synchronous=NORMAL", "PRAGMA synchronous=OFF", True, 49
    ),
    "checkpoints are not synced": Fault(
        "foundation/atomic.py", "        os.fsync(descriptor)\n", "        pass\n", False, 28
    ),
    "the run directory is not locked": Fault(
        "runtime/run_dir.py",
        "    except BlockingIOError:\n        return False\n",
        "    except BlockingIOError:\n        return True\n",
        seed=3,
    ),
    "metrics are not cut at a resume": Fault(
        "monitors/jsonl.py", "        self._file.truncate(position)\n", "", False, 2
    ),
    "a resumed run skips a slot": Fault(
        "buffers/slot_machine.py",
        'self.head["begin"] = floor if schedule.ordered else first',
        'self.head["begin"] = floor + 1 if schedule.ordered else first',
        False,
    ),
    "an explorer counts as newer than it is": Fault(
        "loops.py",
        "await buffer.advance(explorer.name, version)",
        "await buffer.advance(explorer.name, version + 1)",
        False,
    ),
    "a step leaves a group out": Fault(
        "loops.py",
        "return algorithm.batch(filtered), metrics",
        "return algorithm.batch(filtered[1:] or filtered), metrics",
        False,
        10,
    ),
    "a resumed run has lost its weights": Fault(
        "trainer.py",
        "self.engine.load(self.resume.path)",
        "self.engine.prepare(); self.engine.version = self.resume.step",
        False,
        13,
    ),
    "the end does not wait for a checkpoint": Fault(
        "checkpoint/background.py", "await asyncio.wait({self.writing})", "await asyncio.sleep(0)", False, 25
    ),
    "a resumed deterministic run starts from newer weights": Fault(
        "schedule.py",
        "return min(version, self.version_for((version - self.first_version) * self.fresh_per_step))",
        "return version",
        False,
        33,
    ),
    "a version is published before its weights": Fault(
        "publisher.py",
        "while not (offer := self",
        "self.synchronizer.publish(version)\n        while not (offer := self",
        True,
        15,
    ),
    "a board forgets a concurrent write": Fault(
        "buffers/sql/database.py",
        ".where(mine, _boards.c.revision == revision)",
        ".where(mine)",
        True,
        105,
    ),
    "the id of a run is not synced": Fault(
        "buffers/sql/buffer.py",
        "            fsync(folder)\n",
        "            pass\n",
        True,
        46,
    ),
    "failed rollouts are trained": Fault(
        "types/trajectories.py",
        "return tuple(t for t in self.trajectories if t.failure is None)",
        "return tuple(t for t in self.trajectories if t.turns)",
        False,
        35,
    ),
    "a failed role ends well": Fault(
        "foundation/run_role.py",
        "replaced=stopped)\n            raise\n",
        "replaced=stopped)\n",
        True,
        108,
    ),
    "feedback counts twice": Fault(
        "serving/session_records.py",
        '        self.check_active("a trajectory has feedback once")\n',
        "        pass\n",
        None,
        67,
    ),
    "an ended session keeps its place": Fault(
        "serving/sessions.py", "            session.group.active.remove(session)\n", "            pass\n", None, 51
    ),
    # Defects that worlds have found.
    "servers write their addresses to one file": Fault(
        "serving/serve.py",
        'run_dir / (f"serve-{config.run.explorer}.json" if config.run.explorer else "serve.json")',
        'run_dir / "serve.json"',
        True,
        143,
    ),
    "a full disk at a sync of metrics.jsonl": Fault(
        "monitors/jsonl.py",
        "        with writing(self.path):\n            os.fsync",
        "        if True:\n            os.fsync",
        None,
        426,
    ),
    "a full disk at a sync of buffer.id": Fault(
        "buffers/sql/buffer.py",
        "    with writing(path):\n        for folder",
        "    if True:\n        for folder",
        True,
        1473,
    ),
    "a new run directory is not synced": Fault(
        "foundation/atomic.py", "            fsync(path.parent)  # another", "            pass  # another", True, 517
    ),
    "a complete run does not say so": Fault(
        "runtime/launch.py",
        "        build_synchronizer(config.sync, board, settings).finish_run(len(plan.stages) - 1)\n",
        "",
        True,
        104,
    ),
}


def plant(fault: Fault) -> None:
    """Gives the functions of the module the code of the changed source. Whoever imported them calls the new code."""
    name = "trivium." + fault.module.removesuffix(".py").replace("/", ".")
    path = Path(trivium.__file__).parent / fault.module
    source = path.read_text(encoding="utf-8")
    assert source.count(fault.old) == 1, fault
    changed = compile(source.replace(fault.old, fault.new), str(path), "exec")
    codes = {code.co_qualname: code for code in _codes(changed)}
    for function in _functions(vars(sys.modules[name]), name):
        function.__code__ = codes.get(function.__code__.co_qualname, function.__code__)  # a dataclass makes some itself


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions(names: Mapping[str, Any], module: str) -> Iterator[FunctionType]:
    """The functions that a module defines, in its classes as well."""
    for value in list(names.values()):
        for each in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            function = inspect.unwrap(each) if callable(each) else each
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield function
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module)


def find(name: str, model: Path, most: int = MOST) -> str:
    """Plants the fault in this process for good. Returns the first seed whose world breaks a promise, and the promise;
    empty if none of `most` does."""
    fault = PLANTED[name]
    plant(fault)
    seeds = (seed for seed in (fault.seed, *range(most)) if fault.shared in (None, Spec.of(seed).shared))
    broken = (outcome for outcome in run_seeds(seeds, 1, model) if outcome.problems)
    return next((f"seed {outcome.spec.seed}: {outcome.problems[0]}" for outcome in broken), "")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        found = find(sys.argv[1], prepare(Path(directory)))
    sys.stdout.write(f"{found or 'not found'}\n")
    sys.exit(not found)
