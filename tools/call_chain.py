"""The functions of trivium between `trivium.cli.run` and `optimizer.step()`, measured in a real training of one step.

Every process of the training imports this module at its start (`sitecustomize`) and records the call chain of each
optimizer step. A stack ends where work is handed over; the chain goes on with the stack that handed it over: of the
code that created the asyncio task, submitted the function to a thread pool, started the thread, or called the method
of the Ray actor. Counted are functions with a name, defined in the package; lambdas, comprehensions, module bodies and
code of other packages (contextlib, asyncio, typer, Ray) are not.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS: dict[str, tuple[list[str], list[str]]] = {
    "one process": ([], []),
    "trainer on Ray": ([], ["cluster.kind=ray"]),
    "ranks of torchrun": (TORCHRUN, []),
    "ranks on Ray": ([], ["cluster.kind=ray", "cluster.ranks=2"]),
}
"""What stands before `-m trivium` on the command line, and the overrides at its end."""
FIRST = "trivium.cli.run"
CONFIG = """
model: {kind: tiny, alphabet: "0123456789+=", layers: 1, hidden: 32, heads: 2, kv_heads: 1, mlp: 64, max_position: 24}
tasks: {train: {kind: arithmetic, max_operand: 9}}
rewards: [{kind: exact}]
engine: {sampling: {max_new_tokens: 4}}
algorithm: {kind: grpo}
schedule: {steps: 1, groups_per_step: 2, group_size: 2}
monitors: [{kind: jsonl}]
cluster: {threads: 1}
"""
DEADLINE_S = 600
RECORDS = "TRIVIUM_CALL_CHAINS"
"""Environment variable: the directory that a process writes its records to."""

Chain = list[list[str]]
"""The names of functions, outermost first, by process."""


def measured_chain(tree: Path, way: str) -> Chain:
    """Trains one step in one of the `WAYS` with the code of `tree`; the longest chain of its optimizer steps.

    Raises RuntimeError if the training fails, TimeoutExpired if it does not end.
    """
    before, overrides = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "config.yaml").write_text(CONFIG)
        (here / "sitecustomize.py").write_text("import call_chain\n\ncall_chain.install()\n")
        (here / "records").mkdir()
        path = os.pathsep.join(map(str, [here, Path(__file__).parent, tree.resolve()]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", RECORDS: str(here / "records")}
        command = [sys.executable, *before, "-m", "trivium", "run", "config.yaml", "run.dir=run", *overrides]
        ran = subprocess.run(
            command,
            cwd=here,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        if ran.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {ran.returncode}:\n{ran.stdout}")
        lines = [line for file in (here / "records").iterdir() for line in file.read_text().splitlines()]
    return longest_chain([json.loads(line) for line in lines])


def longest_chain(records: list[dict[str, Any]]) -> Chain:
    """The longest chain that ends in an optimizer step, from the command on."""
    calls = [record for record in records if record["called"] is not None]

    def from_the_command(record: dict[str, Any]) -> Chain:
        names: list[str] = record["chain"]
        if record["actor"] is None:
            return [names[names.index(FIRST) :]]
        called = [record["actor"], names[0].rpartition(".")[2]]
        earlier = [call for call in calls if call["called"] == called and call["time"] <= record["time"]]
        if not earlier:
            raise LookupError(f"{names[0]} runs in the actor {called[0]}, and no recorded call started it")
        return [*from_the_command(max(earlier, key=lambda call: call["time"])), names]

    steps = [from_the_command(record) for record in records if record["called"] is None]
    return max(steps, key=lambda chain: sum(map(len, chain)))


# --------------------------------------------------------------------------- in the processes of the training

_parents: WeakKeyDictionary[asyncio.Task[Any], list[str]] = WeakKeyDictionary()
"""The chain that created each task."""
_thread = threading.local()
"""`parent`: the chain that handed over what this thread runs."""


def install() -> None:
    """Follows tasks, threads and actors of this process, and records its optimizer steps."""
    create_task, submit, start = asyncio.BaseEventLoop.create_task, ThreadPoolExecutor.submit, threading.Thread.start

    def create_task_and_note(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = create_task(loop, coroutine, **options)
        _parents[task] = current_chain()
        return task

    def submit_and_note(pool: Any, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        return submit(pool, _continuing(function), *args, **named)

    def start_and_note(thread: Any) -> None:
        thread.run = _continuing(thread.run)
        start(thread)

    asyncio.BaseEventLoop.create_task = create_task_and_note
    ThreadPoolExecutor.submit = submit_and_note
    threading.Thread.start = start_and_note
    sys.meta_path.insert(0, _AfterImport({"torch.optim.optimizer": _follow_steps, "ray.actor": _follow_actors}))


def current_chain() -> list[str]:
    """The package's functions that are being executed here, and those that handed the work over."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # this thread runs no event loop
        task = None
    names: list[str] = []
    frame = sys._getframe(1)
    # Below a task's step are the event loop and what started that; the task's parent is what created it.
    while frame is not None and not (task is not None and frame.f_code is asyncio.Handle._run.__code__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "trivium" and not frame.f_code.co_name.startswith("<"):
            names.append(f"{module}.{frame.f_code.co_qualname.replace('.<locals>', '')}")
        frame = frame.f_back
    parent = getattr(_thread, "parent", []) if task is None else _parents.get(task, [])
    return [*parent, *reversed(names)]


def _continuing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be run in another thread with the present chain as its parent."""
    parent = current_chain()

    def call(*args: Any, **named: Any) -> Any:
        before, _thread.parent = getattr(_thread, "parent", []), parent
        try:
            return function(*args, **named)
        finally:
            _thread.parent = before

    return call


class _AfterImport(MetaPathFinder):
    """Calls a function with a module right after its import, whenever that comes."""

    def __init__(self, then: dict[str, Callable[[Any], None]]) -> None:
        self._then = then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        then = self._then.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if then is not None else None
        if spec is None or spec.loader is None or then is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module
        return spec


def _follow_steps(optimizer: Any) -> None:
    optimizer.register_optimizer_step_pre_hook(lambda *_: _record(None))


def _follow_actors(actor: Any) -> None:
    call = actor.ActorHandle._actor_method_call

    def call_and_note(handle: Any, method_name: str, *args: Any, **options: Any) -> Any:
        _record((handle._actor_id.hex(), method_name))
        return call(handle, method_name, *args, **options)

    actor.ActorHandle._actor_method_call = call_and_note


def _record(called: tuple[str, str] | None) -> None:
    """Writes down the present chain: of a call of an actor's method, or of an optimizer step."""
    ray = sys.modules.get("ray")
    actor = ray.get_runtime_context().get_actor_id() if ray is not None and ray.is_initialized() else None
    record = {"called": called, "actor": actor, "time": time.time(), "chain": current_chain()}
    with open(Path(os.environ[RECORDS]) / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
