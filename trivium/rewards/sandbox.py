"""Runs untrusted Python code in a process of its own that has no network, no other processes, and no files.

The kernel enforces the limits (`sandbox_main.py` says how: resource limits, Landlock, a seccomp filter, another user);
this side enforces the deadline and the disk quota. On a machine that cannot enforce one of them nothing runs at all,
unless `without` names it.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

from trivium.errors import ConfigError, RewardError
from trivium.rewards.child import Child
from trivium.rewards.seccomp import confinement, known

_START_S = 60.0
"""Longest wait for a process to start and to confine itself, which does not count as time of a run."""
_LOOK_S = 0.02
"""How often the deadline and the disk are checked."""
_SHOWN = 1 << 20
"""Bytes of its errors and of its answer that are read."""
_ENTRIES = 1000
"""Files and folders that it may make."""
_MOST_IDS = 1 << 31
_RUNNING = threading.BoundedSemaphore(os.cpu_count() or 1)
"""As many runs at a time as there are processors; waiting for one to end does not count as time of a run."""
_numbers = count()
_PROGRAM = ("-s", "-P", "-S", "-B", str(Path(__file__).with_name("sandbox_main.py")))
_JUDGE = Path(__file__).with_name("sandbox_judge.py").read_text(encoding="utf-8")
_SERVES = "exec(_judge, _judge := {'__name__': 'judge'})\n_judge['Channel'](_end).serve(globals())"
"""What the program's process does for the judge, by names that no program has."""
LIMITS = ("memory", "files", "network", "processes")
"""What a machine may be unable to enforce."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use."""

    cpu_s: int = 10
    wall_s: float = 30.0
    """From the moment when the process has confined itself and its code begins."""
    memory: int = 1 << 30
    """Bytes of address space, the interpreter's own included."""
    file_size: int = 16 << 20
    """Bytes of one file; of what it prints, too."""
    disk: int = 64 << 20
    """Bytes of all its files; looked at every 20 ms."""
    open_files: int = 32
    threads: int = 32


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a run."""

    end: str
    """`done`, or why not: `error` (it raised, or left with another code than 0), `cpu`, `wall`, `disk`, `killed`."""
    stdout: str
    stderr: str
    given: str | None
    """Its answer to the check: the value's `repr`, if the program is honest; None where it did not get that far."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds that it took, without those that it waited for other runs and for its process to start."""


class _Process(NamedTuple):
    """A process of the sandbox."""

    child: Child
    order: bytes
    """What it is sent to begin."""
    folder: str
    given: IO[bytes]
    out: IO[bytes]
    err: IO[bytes]


class _Running(NamedTuple):
    """A process whose code runs, or that ended before."""

    process: _Process
    report: Mapping[str, Any] | None
    """What it reported of its limits; None: it ended before."""
    at: float
    """When its code began."""


@dataclass(frozen=True, slots=True)
class Check:
    """What is evaluated once the code has run: statements, then an expression over its names."""

    expression: str = "None"
    statements: str = ""
    names: Mapping[str, Any] | None = None
    """JSON values that the expression may use."""


class Sandbox:
    """Runs code under limits. Any number of threads may call it at the same time; each run is a process of its own.

    Raises ConfigError where this machine cannot enforce a limit that is not among `without`.
    """

    def __init__(self, limits: Limits | None = None, without: Collection[str] = ()) -> None:
        if unknown := sorted(set(without) - set(LIMITS)):
            raise ConfigError("limits to do without", ", ".join(unknown), f"there are: {', '.join(LIMITS)}")
        self.limits, self._without = limits or Limits(), sorted(without)
        self._folders = _readable()
        self._filters = [base64.b64encode(confinement(t)).decode() for t in (False, True)] if known() else []
        ran = self.run("", check=Check("6 * 7"))
        if ran.given != "42":
            raise ConfigError("a sandbox that runs code", f"{ran.end}: {ran.stderr[-500:]}", "raise its limits")

    def run(self, code: str, stdin: str = "", check: Check | None = None) -> Ran:
        """Runs the code as a script, then evaluates `check` in it.

        Raises ConfigError where a limit is not enforced, RewardError where the sandbox itself failed.
        """
        with _RUNNING, self._started(code, check, stdin) as process:
            running = _begin(process)
            return self._outcome(running, self._watched(running))

    def judge(self, code: str, statement: str) -> Ran:
        """Whether an `assert` about the code holds: `given` is "True". It is evaluated in a process of its own, which
        only calls what the code defines (`sandbox_judge.py`); both are under the limits. Raises like `run`."""
        ours, theirs = socket.socketpair()
        with _RUNNING, ours, theirs, ExitStack() as processes:
            serves = Check("None", _SERVES, {"_judge": _JUDGE, "_end": theirs.fileno()})
            judges = Check("judge(_statement, _end)", names={"_statement": statement, "_end": ours.fileno()})
            program = processes.enter_context(self._started(code, serves, descriptor=theirs.fileno()))
            judging = processes.enter_context(self._started(_JUDGE, judges, descriptor=ours.fileno()))
            ours.close()
            theirs.close()  # each has its own end: it sees when the other one is gone
            waits = _begin(judging)
            serving = _begin(program)  # last: from here on it is watched
            running = waits._replace(at=serving.at)
            ran = self._outcome(running, self._watched(running, program))
            self._outcome(serving, "done")
            return ran

    @contextmanager
    def _started(
        self, code: str, check: Check | None, stdin: str = "", descriptor: int | None = None
    ) -> Iterator[_Process]:
        """A process that is to run the code and then the check, gone after the block. It inherits `descriptor` too."""
        with _folder() as folder, ExitStack() as files:
            given, source, out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
            source.write(stdin.encode("utf-8", "surrogatepass"))
            source.seek(0)
            child = Child(
                _PROGRAM,
                str(given.fileno()),
                env=_environment(folder),
                cwd="/",
                stdin=source,
                stdout=out,
                stderr=err,
                pass_fds=(given.fileno(), *(() if descriptor is None else (descriptor,))),
                timeout_s=_START_S,
            )
            try:
                yield _Process(child, child.encode(self._order(code, check, folder)), folder, given, out, err)
            finally:
                child.end()

    def _outcome(self, running: _Running, end: str) -> Ran:
        """What came of a process that ended so, or is ended now. Raises unless it had confined itself."""
        took, process = time.monotonic() - running.at, running.process
        process.child.end()
        out, err = _text(process.out, self.limits.file_size), _text(process.err, _SHOWN)
        ran = Ran(end, out, err, _text(process.given, _SHOWN) or None, took)
        self._confined(running.report, ran)
        return ran

    def _order(self, code: str, check: Check | None, folder: str) -> dict[str, Any]:
        limits = self.limits
        return {
            "parent": os.getpid(),
            "folder": folder,
            "disk": limits.disk,
            "entries": _ENTRIES,
            "uid": _unused_uid(),
            "without": self._without,
            "readable": self._folders,
            "packages": _packages(),
            "filters": self._filters,
            "code": code,
            "expression": None if check is None else check.expression,
            "statements": "" if check is None else check.statements,
            "names": dict(check.names or {}) if check else {},
            "limits": {
                "CORE": (0, 0),
                "CPU": (limits.cpu_s, limits.cpu_s + 1),
                "AS": (limits.memory, limits.memory),
                "FSIZE": (limits.file_size, limits.file_size),
                "NOFILE": (limits.open_files, limits.open_files),
                "NPROC": (limits.threads, limits.threads),
                "MEMLOCK": (0, 0),
            },
        }

    def _watched(self, running: _Running, *others: _Process) -> str:
        """Waits for the end of a process, or kills it when it, or one of the others, is at a limit that this side
        enforces; returns how it ended (`Ran.end`)."""
        process, deadline = running.process, running.at + self.limits.wall_s
        while (code := process.child.wait(_LOOK_S)) is None:
            full = any(self._full(each.folder) for each in (process, *others))
            stopped = "wall" if time.monotonic() > deadline else "disk" if full else ""
            if stopped:
                process.child.kill()
                return stopped
        return {0: "done", -signal.SIGXCPU: "cpu", -signal.SIGKILL: "killed"}.get(code, "error")

    def _full(self, folder: str) -> bool:
        """Whether its files take too much; also where that cannot be seen: a folder closed, or too deep for a path."""
        size = 0
        try:
            for entries, each in enumerate(_entries(folder), 1):
                size += each
                if entries > _ENTRIES or size > self.limits.disk:
                    return True
        except OSError:
            return True
        return False

    def _confined(self, report: Mapping[str, Any] | None, ran: Ran) -> None:
        """Raises unless the process reported that the limits hold."""
        if report is None:
            raise RewardError(
                "a process that confines itself",
                f"it ended before ({ran.end}): {ran.stderr[-500:]}",
                "check that the machine has memory and processes to spare",
            )
        missing = {name: why for name, why in report["missing"].items() if name not in self._without}
        if missing:
            raise ConfigError(
                "a sandbox for untrusted code",
                "this machine does not limit " + "; ".join(f"{name}: {why}" for name, why in missing.items()),
                "run on Linux 5.13 or later, where Landlock and seccomp work; or, at your own risk, name what to do "
                f"without: {sorted(missing)}",
            )


def _begin(process: _Process) -> _Running:
    """Has a process begin, and returns when its code does: it reports just before."""
    process.child.send(process.order)
    return _Running(process, process.child.receive(), time.monotonic())


def _environment(folder: str) -> dict[str, str]:
    """Nothing of this process but where the interpreter's libraries are found when it starts: no keys. One thread for
    arithmetic, and hashes that do not differ between runs."""
    path = os.environ.get("LD_LIBRARY_PATH")
    libraries = {"LD_LIBRARY_PATH": ":".join(map(os.path.abspath, path.split(":")))} if path else {}
    return libraries | {
        "PATH": "/nonexistent",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }


def _packages() -> list[str]:
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _readable() -> list[str]:
    """Where the interpreter, its libraries and the installed packages lie. LD_LIBRARY_PATH is none of it: what it names
    may be anything, and the interpreter's own library is loaded before the limits hold."""
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/dev/zero"]
    return sorted({sys.prefix, sys.base_prefix, sys.base_exec_prefix, *_packages(), *system})


def _unused_uid() -> int:
    """A user id that is in use by no account of this machine and no other run."""
    number = next(_numbers) % 64
    try:
        ids = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    except OSError:
        ids = _MOST_IDS  # no namespaces of users here
    if ids > _MOST_IDS:
        return 0x70000000 + os.getpid() % (1 << 22) * 64 + number
    return max(1, ids - 2 - (os.getpid() * 64 + number) % 4096)


@contextmanager
def _folder() -> Iterator[str]:
    """An empty folder, gone afterwards whatever was done to it."""
    folder = tempfile.mkdtemp(prefix="trivium-sandbox-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Removes a folder, however deep and however closed: each folder in it is moved up to its top before it is looked
    into, so that no path grows long."""
    folders = [folder]
    for each in folders:  # which grows meanwhile
        os.chmod(each, 0o700)
        with os.scandir(each) as iterator:
            entries = list(iterator)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(os.path.join(folder, uuid.uuid4().hex))
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, folders[-1])
            else:
                os.unlink(entry.path)
    for each in reversed(folders):
        os.rmdir(each)


def _entries(folder: str) -> Iterator[int]:
    """The bytes that each file or folder takes on the disk. Raises OSError where one cannot be looked into."""
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as iterator:
                for entry in iterator:
                    with suppress(FileNotFoundError):  # it was there a moment ago
                        yield entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except FileNotFoundError:
            continue


def _text(file: IO[bytes], limit: int) -> str:
    """What was written to it, up to so many bytes."""
    file.seek(0)
    return file.read(limit).decode("utf-8", "replace")
