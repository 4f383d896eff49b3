"""Python processes that a forked process will start, forked before it needs them: a start costs milliseconds instead of
the imports of torch."""

from __future__ import annotations

import ast
import atexit
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trivium.processes.isolated.child import ForkedProcess


class Ahead:
    """Starts `number` commands of Python in children of this process that are forked now, and further ones as usual.
    This process has imported everything, and started no thread yet."""

    def __init__(self, number: int) -> None:
        assert threading.active_count() == 1
        self._waiting: list[Waiting] = []
        for _ in range(number):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for channel in (ours, *(other.channel for other in self._waiting)):
                    channel.close()  # so that the end of the parent closes them
                _wait(theirs)
            theirs.close()
            self._waiting.append(Waiting(pid, ours))

    def start(self, command: Sequence[str], **how: Any) -> Waiting | subprocess.Popen[Any]:
        """The arguments are those of `subprocess.Popen`."""
        return self._waiting.pop(0).begin(command, **how) if self._waiting else subprocess.Popen(command, **how)


class Waiting(ForkedProcess):
    """A child that becomes what it is asked for. It has the methods of `subprocess.Popen` that are used."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        super().__init__(pid)
        self.pid, self.channel = pid, channel

    def begin(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
        process_group: int | None = None,
        start_new_session: bool = False,
    ) -> Waiting:
        assert (command[0], stdin or subprocess.DEVNULL, process_group or 0) == (sys.executable, subprocess.DEVNULL, 0)
        request = [*command[1:]], dict(env), [*pass_fds], start_new_session
        with self.channel:
            socket.send_fds(self.channel, [repr(request).encode()], [*pass_fds])
            self.channel.recv(1)
        return self

    def poll(self) -> int | None:
        return self._poll()


def _wait(channel: socket.socket) -> NoReturn:
    """Runs the command that the parent names; ends with the parent until then."""
    request, received, _, _ = socket.recv_fds(channel, 1 << 20, 8)
    if not request:
        os._exit(0)
    command, environment, descriptors, is_session = ast.literal_eval(request.decode())
    os.setsid() if is_session else os.setpgid(0, 0)
    channel.send(b".")
    channel.close()
    for mine, descriptor in zip(received, descriptors, strict=True):
        os.dup2(mine, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    while command[0] in ("-P", "-u"):
        del command[0]
    module = command.pop(1) if command[0] == "-m" else None
    sys.argv = command
    rank = environment.get("RANK")
    Path("/proc/self/comm").write_text(module.rpartition(".")[2] if module and rank is None else f"rank {rank}")
    code = 1
    try:
        if module is None:
            runpy.run_path(command[0], run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def children(pid: int, name: str) -> list[int]:
    """The children of a process that run a command: a module, or `rank 0`."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    pids = map(int, found.read_text().split() if found.exists() else ())
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name[:15]]
