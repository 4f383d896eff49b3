"""A Ray instance whose workers are forked from a process that has everything imported: each starts within a fraction of
a second, where Ray imports itself twice and what the actor needs once more."""

from __future__ import annotations

import ast
import gc
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = Path(__file__).with_name("ray_worker.py")
"""What Ray runs to start a worker: a request to `serve`."""


def instance(test: Connection) -> None:
    """Sends the instance's address to the test; the instance ends when the test closes the connection, or dies. The
    preloaded process forks this one."""
    with tempfile.TemporaryDirectory() as directory, forked_workers(f"{directory}/socket"):
        import ray

        context = ray.init("local", include_dashboard=False, num_cpus=4, logging_level="ERROR")
        test.send(context.address_info["address"])
        with suppress(EOFError):
            test.recv()
        ray.shutdown()


def node(socket_path: str, *arguments: str) -> None:
    """`ray start`, as one of the nodes of an instance."""
    with forked_workers(socket_path):
        from ray.scripts.scripts import main

        sys.argv = ["ray", "start", *arguments]
        main()


@contextmanager
def forked_workers(socket_path: str) -> Generator[None]:
    """The Ray node that this process starts asks a fork of this process for its workers, at the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        os.environ["TRIVIUM_RAY_WORKERS"] = socket_path
        listening.bind(socket_path)
        listening.listen(64)
        server = os.fork()
        if server == 0:
            serve(listening)
        from ray._private import ray_constants
        from ray._private.node import Node

        ray_constants.SETUP_WORKER_FILENAME = str(START)
        # It reads all logs all the time. What a role logs is in its run directory.
        Node.start_log_monitor = lambda self: None
        # Nothing asks for more nodes or for the dashboard, which are a process each.
        Node.start_monitor = lambda self: None
        Node.start_api_server = lambda self, **_: None
        try:
            yield
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def serve(listening: socket.socket) -> None:
    """Forks a worker for each request, and never returns."""
    # Ray reads these while it is imported: workers of no job take those of any, and end when that process has.
    os.environ |= {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getppid())}
    from ray._private.workers import default_worker, setup_worker

    import trivium.cluster.roles  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "what is forked would miss a thread"
    gc.freeze()
    of_tests = (ROOT, ROOT / "tests", ROOT / "tools")  # a worker learns from its driver where modules are
    sys.path[:] = [path for path in sys.path if Path(path) not in of_tests]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listening.accept()
        with connection:
            request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if os.fork() == 0:
            break
        for stream in streams:
            os.close(stream)
    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    directory, arguments, environment = ast.literal_eval(request.decode())
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    _, sys.argv = setup_worker.parser.parse_known_args(arguments)
    status = 0
    try:
        runpy.run_path(default_worker.__file__, run_name="__main__")
    except Exception:
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)
