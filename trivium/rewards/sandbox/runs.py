"""Runs untrusted Python code in a child process without network, other processes or files of this machine.

The kernel enforces the limits (`confine.py` sets them: resource limits, Landlock, a seccomp filter, another user); this
side enforces the deadline and the disk quota. A machine that cannot enforce one of them runs no program, unless
`without` names it.
"""

from __future__ import annotations

import base64
import json
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
from typing import IO, Any

from trivium.foundation.errors import ConfigError, RewardError
from trivium.processes.isolated.child import Child, spawn
from trivium.rewards.sandbox.seccomp import confinement, known

_START_S = 60.0
"""How long a process may take to start and to confine itself; a run's time begins afterwards."""
_LOOK_S = 0.02
"""How often the deadline and the disk are checked."""
_SHOWN = 1 << 20
"""Bytes that are read of a program's errors and of its answer."""
_ENTRIES = 1000
"""Files and folders that a program may make."""
_MAX_IDS = 1 << 31
_RUNNING = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Limits concurrent runs to the number of processors. A run's time does not include the wait for its turn."""
_LONG_INTEGERS = threading.RLock()
_numbers = count()
_CONFINE = ("-s", "-P", "-S", "-B", str(Path(__file__).with_name("confine.py")))
_ASSERTS = Path(__file__).with_name("asserts.py").read_text(encoding="utf-8")
_SERVE = "exec(_asserts, _asserts := {'__name__': 'asserts'})\n_asserts['serve'](_end, globals())"
"""Runs after the program, in its process, under names that no program uses."""
LIMITS = ("memory", "files", "network", "processes")
"""What a machine may be unable to enforce."""


@contextmanager
def long_integers() -> Iterator[None]:
    """Inside, this process reads and writes integers of any length: CPython refuses more than 4300 digits."""
    with _LONG_INTEGERS:  # the limit is that of the process, and a block that ends must not end another one
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(limit)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use."""

    cpu_s: int = 10
    wall_s: float = 30.0
    """Seconds from the moment when the process has confined itself and its code begins."""
    memory: int = 1 << 30
    """Bytes of address space, the interpreter included."""
    file_size: int = 16 << 20
    """Bytes of one file, and of the output."""
    disk: int = 64 << 20
    """Bytes of all files together, checked every 20 ms."""
    open_files: int = 32
    threads: int = 32


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a run."""

    end: str
    """`done`, or why not: `error` (it raised, or left with another code than 0), `cpu`, `wall`, `disk`, `killed`."""
    stdout: str
    stderr: str
    answer: str | None
    """The answer to the check: the value's `repr`, if the program is honest. None if the program did not reach it."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds of the run, without the wait for its turn and for its process to start."""


@dataclass(frozen=True, slots=True)
class Check:
    """What is evaluated after the code: statements, then an expression over its names."""

    expression: str = "None"
    statements: str = ""
    names: Mapping[str, Any] | None = None
    """JSON values that the expression may use."""


@dataclass
class _Program:
    """A process of the sandbox, its folder and its files."""

    child: Child
    order: Mapping[str, Any]
    folder: str
    answer: IO[bytes]
    out: IO[bytes]
    err: IO[bytes]
    report: Mapping[str, Any] | None = None
    """What it reported of its limits. None if it ended before."""
    began: float = 0.0

    def begin(self) -> None:
        """Has the process confine itself. It reports just before its code begins."""
        with long_integers():
            order = json.dumps(self.order)
        self.child.send(order.encode())
        report = self.child.receive()
        self.report, self.began = None if report is None else json.loads(report), time.monotonic()


class Sandbox:
    """Runs code under limits. Any number of threads may call it at the same time; each run is a process of its own.

    Raises ConfigError if this machine cannot enforce a limit that is not among `without`.
    """

    def __init__(self, limits: Limits | None = None, without: Collection[str] = ()) -> None:
        if unknown := sorted(set(without) - set(LIMITS)):
            raise ConfigError("limits that may be missing", ", ".join(unknown), f"there are: {', '.join(LIMITS)}")
        self.limits, self._without = limits or Limits(), sorted(without)
        self._folders = _readable()
        self._filters = [base64.b64encode(confinement(t)).decode() for t in (False, True)] if known() else []
        ran = self.run("", check=Check("6 * 7"))
        if ran.answer != "42":
            raise ConfigError("a sandbox that runs code", f"{ran.end}: {ran.stderr[-500:]}", "raise its limits")

    def run(self, code: str, stdin: str = "", check: Check | None = None) -> Ran:
        """Runs the code as a script, then evaluates `check` in it.

        Raises ConfigError if a limit is not enforced, RewardError if the sandbox itself failed.
        """
        with _RUNNING, self._started(code, check, stdin) as program:
            program.begin()
            return self._outcome(program, self._watched(program))

    def judge(self, code: str, statement: str) -> Ran:
        """Evaluates an `assert` about the code; `answer` is "True" if it holds. Raises like `run`.

        The assert runs in a second process, which calls what the code defines in the first (`asserts.py`). Both are
        under the limits.
        """
        ours, theirs = socket.socketpair()
        with _RUNNING, ours, theirs, ExitStack() as processes:
            serves = Check("None", _SERVE, {"_asserts": _ASSERTS, "_end": theirs.fileno()})
            judges = Check("holds(_statement, _end)", names={"_statement": statement, "_end": ours.fileno()})
            program = processes.enter_context(self._started(code, serves, descriptor=theirs.fileno()))
            judge = processes.enter_context(self._started(_ASSERTS, judges, descriptor=ours.fileno()))
            ours.close()
            theirs.close()  # each process has its own end, and notices when the other one ends
            judge.begin()
            program.begin()  # last: it is watched from its first line on
            judge.began = program.began
            ran = self._outcome(judge, self._watched(judge, program))
            self._outcome(program, "done")
            return ran

    @contextmanager
    def _started(
        self, code: str, check: Check | None, stdin: str = "", descriptor: int | None = None
    ) -> Iterator[_Program]:
        """A process for the code and the check, which inherits `descriptor`. It ends with the block."""
        with _folder() as folder, ExitStack() as files:
            answer, source, out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
            source.write(stdin.encode("utf-8", "surrogatepass"))
            source.seek(0)
            child = spawn(
                _CONFINE,
                str(answer.fileno()),
                env=_environment(folder),
                cwd="/",
                stdin=source,
                stdout=out,
                stderr=err,
                pass_fds=(answer.fileno(), *(() if descriptor is None else (descriptor,))),
                timeout_s=_START_S,
            )
            try:
                yield _Program(child, self._order(code, check, folder), folder, answer, out, err)
            finally:
                child.end()

    def _outcome(self, program: _Program, end: str) -> Ran:
        """The outcome of a process that ended in this way, or is ended now. Raises unless it had confined itself."""
        took = time.monotonic() - program.began
        program.child.end()
        out, err = _text(program.out, self.limits.file_size), _text(program.err, _SHOWN)
        ran = Ran(end, out, err, _text(program.answer, _SHOWN) or None, took)
        self._check_confined(program.report, ran)
        return ran

    def _order(self, code: str, check: Check | None, folder: str) -> dict[str, Any]:
        """What the process reads before it confines itself: its limits, its rights, the code and the check."""
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

    def _watched(self, program: _Program, *others: _Program) -> str:
        """Waits for the end of a process, and returns how it ended (`Ran.end`). Kills it at its deadline, or if its
        files or those of the others take too much."""
        deadline = program.began + self.limits.wall_s
        while (code := program.child.wait(_LOOK_S)) is None:
            full = any(self._is_full(process.folder) for process in (program, *others))
            stopped = "wall" if time.monotonic() > deadline else "disk" if full else ""
            if stopped:
                program.child.kill()
                return stopped
        return {0: "done", -signal.SIGXCPU: "cpu", -signal.SIGKILL: "killed"}.get(code, "error")

    def _is_full(self, folder: str) -> bool:
        """Whether the files in a folder take too much. A folder that cannot be read (closed, or too deep for a path)
        counts as full."""
        size = 0
        try:
            for entries, num_bytes in enumerate(_sizes(folder), 1):
                size += num_bytes
                if entries > _ENTRIES or size > self.limits.disk:
                    return True
        except OSError:
            return True
        return False

    def _check_confined(self, report: Mapping[str, Any] | None, ran: Ran) -> None:
        """Raises unless the process reported that the limits hold."""
        if report is None:
            raise RewardError(
                "a process that can confine itself",
                f"it ended before that ({ran.end}): {ran.stderr[-500:]}",
                "check that the machine has memory and processes to spare",
            )
        missing = {name: why for name, why in report["missing"].items() if name not in self._without}
        if missing:
            raise ConfigError(
                "a sandbox for untrusted code",
                "this machine does not limit " + "; ".join(f"{name}: {why}" for name, why in missing.items()),
                "run on Linux 5.13 or later, with Landlock and seccomp; or, at your own risk, allow these limits to "
                f"be missing: {sorted(missing)}",
            )


def _environment(folder: str) -> dict[str, str]:
    """The environment of a program. Of this process it holds the path of the interpreter's libraries alone: no keys.
    Arithmetic uses one thread, and hashes do not differ between runs."""
    path = os.environ.get("LD_LIBRARY_PATH")
    libraries = {"LD_LIBRARY_PATH": ":".join(map(os.path.abspath, path.split(":")))} if path else {}
    return libraries | {
        "PATH": "/nonexistent",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONINTMAXSTRDIGITS": "0",  # else print(10**5000) raises; a run's time is limited anyway
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }


def _packages() -> list[str]:
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _readable() -> list[str]:
    """The folders of the interpreter, its libraries and the installed packages. Not LD_LIBRARY_PATH, which may name any
    folder: the interpreter's own library is loaded before the limits hold."""
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/dev/zero"]
    return sorted({sys.prefix, sys.base_prefix, sys.base_exec_prefix, *_packages(), *system})


def _unused_uid() -> int:
    """A user id that no account of this machine and no other run uses."""
    number = next(_numbers) % 64
    try:
        ids = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    except OSError:
        ids = _MAX_IDS  # a kernel without user namespaces
    if ids > _MAX_IDS:
        # A process number has 22 bits and a run 6: ids from 0x70000000 to 2^31, where no machine has accounts.
        return 0x70000000 + os.getpid() % (1 << 22) * 64 + number
    # In a container, only the ids that are mapped exist: of these the highest, since accounts have low ones.
    return max(1, ids - 2 - (os.getpid() * 64 + number) % 4096)


@contextmanager
def _folder() -> Iterator[str]:
    """An empty folder, which is removed afterwards whatever a program did to it."""
    folder = tempfile.mkdtemp(prefix="trivium-sandbox-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Removes a folder of any depth and any mode. Each folder in it is moved to the top before its content is listed,
    so that no path grows long."""
    folders = [folder]
    for emptied in folders:  # the loop appends to it
        os.chmod(emptied, 0o700)
        with os.scandir(emptied) as iterator:
            entries = list(iterator)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(os.path.join(folder, uuid.uuid4().hex))
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, folders[-1])
            else:
                os.unlink(entry.path)
    for emptied in reversed(folders):
        os.rmdir(emptied)


def _sizes(folder: str) -> Iterator[int]:
    """The bytes on the disk of each file and folder below a folder. Raises OSError for one that cannot be read."""
    folders = [folder]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as iterator:  # the program removes files meanwhile
            for entry in iterator:
                with suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)


def _text(file: IO[bytes], limit: int) -> str:
    """The first `limit` bytes of a file as text."""
    file.seek(0)
    return file.read(limit).decode("utf-8", "replace")
