"""A real PostgreSQL for tests: Debian's server in a directory of its own, on a port of its own, for as long as needed.

`tests/conftest.py` has its fixture, one server for all tests of a session, or a skip that says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest

from tests.ports import port_below_ephemeral

MISSING = "PostgreSQL's binaries are missing: apt-get install postgresql"


def binaries() -> Path | None:
    """Where initdb and postgres lie: on the path, or where Debian puts them; the newest version."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    places = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").is_file()]
    return max(places, key=lambda path: int(path.parent.name), default=None)


class Server:
    """A server in `directory`; refused to root by PostgreSQL itself, it then runs as the user postgres."""

    def __init__(self, directory: Path) -> None:
        found = binaries()
        assert found is not None, MISSING
        self._binaries, self._data = found, directory / "data"
        if os.getuid() == 0:
            shutil.chown(directory, "postgres", "postgres")
        self.port = port_below_ephemeral()
        self._run("initdb", "-D", str(self._data), "-U", "trivium", "--auth=trust", "--no-sync", "-E", "UTF8")
        with open(self._data / "postgresql.conf", "a", encoding="utf-8") as settings:
            settings.write(
                f"port={self.port}\nlisten_addresses='127.0.0.1'\nunix_socket_directories=''\nfsync=off\n"
                "shared_buffers=32MB\nmax_connections=200\n"
            )
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://trivium@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-t", "60", "-D", str(self._data), "-l", str(self._data / "log"))

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(self._data))

    def drop_connections(self) -> int:
        """Ends every session of the server but this one; how many there were."""
        others = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND application_name = 'trivium'"
        )
        with psycopg.connect(self.url, autocommit=True) as connection:
            row = connection.execute(others).fetchone()
        assert row is not None
        return row[0]

    def processes(self) -> list[int]:
        """The server and its children."""
        main = int((self._data / "postmaster.pid").read_text().splitlines()[0])
        found = subprocess.run(["pgrep", "-P", str(main)], capture_output=True, text=True, check=True, timeout=120)
        return [main, *map(int, found.stdout.split())]

    def create_database(self, name: str) -> str:
        """The URL of an empty database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url.rpartition("/")[0] + "/" + name

    def _run(self, program: str, *arguments: str) -> None:
        # The server outlives pg_ctl: it must not hold a pipe of ours.
        user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
        with tempfile.TemporaryFile() as log:
            done = subprocess.run(
                [str(self._binaries / program), *arguments],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=120,
                **user,
            )
            log.seek(0)
            assert done.returncode == 0, f"{program} failed: {log.read().decode(errors='replace')}"


@pytest.fixture(scope="session")
def postgres() -> Generator[Server]:
    """A running server, shared by the tests of the session."""
    if binaries() is None:
        pytest.skip(MISSING)
    # Not under pytest's own directory, which only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="trivium-postgres-") as directory:
        Path(directory).chmod(0o755)
        server = Server(Path(directory))
        try:
            yield server
        finally:
            server.stop()
