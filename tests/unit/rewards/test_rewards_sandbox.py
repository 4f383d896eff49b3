"""The sandbox under attack: each attempt is made for real, and what it was after is looked at afterwards."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from failing import refused

from tests.waiting import eventually
from trivium.foundation.errors import ConfigError
from trivium.rewards.graders.programs import program_score
from trivium.rewards.sandbox import Check, Limits, Ran, Sandbox, runs
from trivium.rewards.sandbox.seccomp import confinement, known, program

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not known(), reason="the sandbox is for Linux")

SMALL = Limits(cpu_s=1, wall_s=20.0, memory=256 << 20, file_size=1 << 20, disk=4 << 20, threads=8)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A sandbox whose folders lie in a folder of this test, by which its processes can be found."""
    folder = tmp_path / "sandboxes"
    folder.mkdir(mode=0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return Sandbox(SMALL)


REFUSED = {"PermissionError", "FileNotFoundError"}
"""Where the machine allows a file system of its own, what is outside is not there; elsewhere it may not be opened."""
FOLDERS = ("private", "of the machine")


def without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox of a machine that allows no file system of its own: this one is told of a size that there is not."""
    order = Sandbox._order
    monkeypatch.setattr(Sandbox, "_order", lambda *given: {**order(*given), "disk": "none"})


@pytest.fixture(params=FOLDERS)
def confined(request: pytest.FixtureRequest, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The sandbox with a folder of its own in memory, and with one on the disk."""
    if request.param != "private":
        without_namespaces(monkeypatch)
    return sandbox


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path):
    yield
    assert survivors(tmp_path) == []
    assert [*tmp_path.glob("sandboxes/*")] == []


def survivors(marker: Path) -> list[str]:
    """Processes that were started with this path in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"={marker}/sandboxes/".encode() in (process / "environ").read_bytes():
                found.append((process / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def attempt(sandbox: Sandbox, *attempts: str) -> list[str]:
    """What each line of code came to in one sandbox: the error's name, or what it returned."""
    code = "import os, sys, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "def call(*a):\n    r = libc.syscall(*a)\n    return r if r >= 0 else -ctypes.get_errno()\n"
    for each in attempts:
        code += f"try:\n    print(eval({each!r}))\nexcept BaseException as error:\n    print(type(error).__name__)\n"
    ran = sandbox.run(code)
    assert ran.end == "done", ran
    return ran.stdout.splitlines()


def unconfined(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --------------------------------------------------------------------------- what works


def test_a_program_reads_computes_and_prints(sandbox: Sandbox) -> None:
    ran = sandbox.run("print(int(input()) + int(input()))", stdin="40\n2\n")
    assert ran == Ran("done", "42\n", "", None)
    ran = sandbox.run("import sys\nsys.stderr.write('why')\nsys.exit(3)")
    assert (ran.end, ran.stderr) == ("error", "why")
    assert "ZeroDivisionError" in sandbox.run("1 / 0").stderr


def test_a_value_and_statements_are_asked_for_afterwards(sandbox: Sandbox) -> None:
    code = "def twice(x):\n    return [x, x]"
    assert sandbox.run(code, check=Check("twice(_x)", names={"_x": "a"})).answer == "['a', 'a']"
    assert sandbox.run(code, check=Check("True", "assert twice(1) == [1, 1]")).answer == "True"
    assert sandbox.run(code, check=Check("True", "assert twice(1) == 2")).answer is None
    assert sandbox.run(code + "\nimport sys; sys.exit(0)", check=Check("1")).answer is None


def test_programs_may_do_what_programs_do(sandbox: Sandbox) -> None:
    code = """
import asyncio, os, resource, sys, tempfile, threading
async def main():
    await asyncio.sleep(0.001)
    return "async"
print(asyncio.run(main()))
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("mine"); file.seek(0); print(file.read())
os.mkdir("d"); open("f", "w").close(); os.rename("f", "d/f"); print(os.listdir("d"))
sys.setrecursionlimit(10**6); resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, -1)); threading.stack_size(1 << 26)
deep = lambda n: n and 1 + deep(n - 1)
thread = threading.Thread(target=lambda: print(deep(50_000))); thread.start(); thread.join()
print(sorted({str(i) for i in range(3)}, key=hash) == sorted({str(i) for i in range(3)}, key=hash))
"""
    ran = sandbox.run(code)
    assert (ran.end, ran.stdout.split("\n")) == ("done", ["async", "mine", "['f']", "50000", "True", ""]), ran.stderr
    hashes = {sandbox.run("print(hash('a'))").stdout for _ in range(2)}
    assert len(hashes) == 1  # a set's order does not differ between runs


def test_installed_packages_can_be_imported(sandbox: Sandbox) -> None:
    ran = sandbox.run("import numpy as np\nprint(int(np.arange(5).sum()))")
    assert ran.stdout == "10\n", ran.stderr


DESCRIPTORS = """
import os
found = []
for number in range(32):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(found)
"""


def test_nothing_of_the_caller_is_inherited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    with open(__file__) as held:
        os.set_inheritable(held.fileno(), True)
        assert attempt(sandbox, "os.environ.get('SECRET_KEY')", "'hunter2' in str(os.environ)") == ["None", "False"]
        assert sandbox.run(DESCRIPTORS).stdout == "[0, 1, 2]\n"


# --------------------------------------------------------------------------- what is contained


def test_a_fork_bomb(sandbox: Sandbox) -> None:
    clone, vfork = {"x86_64": (56, 58), "aarch64": (220, 220)}[platform.machine()]
    found = attempt(
        sandbox,
        "os.fork()",
        "os.forkpty()",
        "__import__('subprocess').run(['/bin/true'])",
        "__import__('multiprocessing').get_context('fork').Process(target=print).start()",
        "os.system('true')",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        f"call({clone}, 17, 0, 0, 0, 0)",
        f"call({vfork}, 17, 0, 0, 0, 0)",
        "call(435, 0, 0)",
    )
    assert {*found[:4], *found[5:7]} <= REFUSED
    assert int(found[4]) != 0
    assert found[7:9] == [str(-errno.EPERM)] * 2
    assert found[9] == str(-errno.ENOSYS)
    bomb = sandbox.run("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass")
    assert bomb.end == "cpu"


def test_a_bomb_of_threads(sandbox: Sandbox) -> None:
    code = """
import _thread, time
count = 0
try:
    for count in range(10_000):
        _thread.start_new_thread(time.sleep, (60,))
except RuntimeError:
    print(count, flush=True)
__import__("os")._exit(0)
"""
    assert int(sandbox.run(code).stdout) < SMALL.threads


def test_a_socket(sandbox: Sandbox, tmp_path: Path) -> None:
    number, ring = {"x86_64": 41, "aarch64": 198}[platform.machine()], 425
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        port, path = server.getsockname()[1], str(tmp_path / "local")
        local.bind(path)
        local.listen()
        server.settimeout(20)
        local.settimeout(20)
        unconfined(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        unconfined(f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); s.close()")
        for listening in (server, local):
            listening.accept()[0].close()  # so a connection would be noticed
        found = attempt(
            sandbox,
            f"__import__('socket').create_connection(('127.0.0.1', {port}))",
            f"__import__('socket').socket(1).connect({path!r})",
            "__import__('socket').socket(2, 2)",
            "__import__('socket').socket(2, 3, 1)",
            f"call({number}, 2, 1, 0)",
            f"call({ring}, 4, ctypes.create_string_buffer(200))",
            f"__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}')",
            f"__import__('socket').socketpair(1, 2)[0].sendto(b'x', {path!r})",
        )
        assert found == ["PermissionError"] * 4 + [str(-errno.EPERM)] * 2 + ["URLError", "PermissionError"]
        for listening in (server, local):
            listening.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listening.accept()


def test_ten_gigabytes(sandbox: Sandbox) -> None:
    found = attempt(
        sandbox,
        "bytearray(10 << 30)",
        "b'x' * (10 << 30)",
        "__import__('mmap').mmap(-1, 10 << 30)",
        "[bytearray(1 << 20) for _ in range(10 << 10)]",
        "[0] * (10 << 27)",
        "os.memfd_create('m')",
    )
    assert found == ["MemoryError", "MemoryError", "OSError", "MemoryError", "MemoryError", "PermissionError"]
    hoard = "held = []\ntry:\n    while True:\n        held.append(bytearray(1 << 20))\nexcept MemoryError:\n"
    most = int(sandbox.run(hoard + "    print(len(held))").stdout)  # each of them written to: what it really gets
    assert 100 < most < SMALL.memory >> 20


def test_an_endless_loop(sandbox: Sandbox) -> None:
    assert sandbox.run("while True:\n    pass").end == "cpu"
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass"
    assert sandbox.run(stubborn).end == "killed"


def test_a_loop_that_sleeps(sandbox: Sandbox) -> None:
    patient = Sandbox(Limits(wall_s=0.5))
    assert patient.run("import time\nwhile True:\n    time.sleep(1)").end == "wall"


def test_the_start_of_the_interpreter_is_no_time_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Sandbox(Limits(wall_s=3.0))
    (*options, main), late = runs._CONFINE, tmp_path / "late.py"
    late.write_text(f"import time\ntime.sleep(3.5)\nexec(open({main!r}).read())")
    monkeypatch.setattr(runs, "_CONFINE", (*options, str(late)))
    ran = patient.run("print(2)")
    assert (ran.end, ran.stdout) == ("done", "2\n")
    assert ran.wall_s < 3.5
    assert patient.judge("def f():\n    return 2", "assert f() == 2").answer == "True"


def test_a_write_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    theirs = outside / "theirs"
    theirs.write_text("as it was")
    theirs.chmod(0o666)
    before = theirs.stat()
    unconfined(f"open({str(outside / 'proof')!r}, 'w').close()")
    (outside / "proof").unlink()
    found = attempt(
        sandbox,
        f"open({str(outside / 'new')!r}, 'w')",
        f"open({str(theirs)!r}, 'a')",
        f"open({str(theirs)!r}).read()",
        f"os.unlink({str(theirs)!r})",
        f"os.truncate({str(theirs)!r}, 0)",
        f"os.chmod({str(theirs)!r}, 0)",
        f"os.utime({str(theirs)!r}, (0, 0))",
        f"os.rename({str(theirs)!r}, 'mine')",
        f"os.link({str(theirs)!r}, 'mine')",
        f"os.symlink({str(theirs)!r}, 'mine')",
        f"os.mkdir({str(outside / 'folder')!r})",
        "open('../beside', 'w')",
        "open('/tmp/trivium-was-here', 'w')",
        "open('/dev/shm/trivium-was-here', 'w')",
        "os.mkfifo('pipe')",
        f"os.listdir({str(outside)!r})",
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "os.listdir('/proc')",
        f"open({str(Path(__file__).parent / 'x')!r}, 'w')",
        "os.chroot('.')",
        "os.setuid(0)",
    )
    assert [each for each in found if each not in REFUSED | {"OSError"}] == []
    assert sorted(outside.iterdir()) == [theirs]
    assert theirs.read_text() == "as it was"
    after = theirs.stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (before.st_mode, before.st_mtime_ns, 1)
    for path in ("/tmp/trivium-was-here", "/dev/shm/trivium-was-here"):
        assert not os.path.exists(path)


@pytest.mark.parametrize("libraries", ["{outside}", ".", "", "/", "lib:/usr/lib"])
def test_a_path_of_libraries_opens_nothing(
    libraries: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    for key in (tmp_path / "key", tmp_path / "lib" / "key"):
        key.write_text("hunter2")
        key.chmod(0o666)
    monkeypatch.chdir(tmp_path)
    before = os.environ.get("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{libraries.format(outside=tmp_path)}:{before}")
    found = attempt(
        Sandbox(SMALL),
        f"open({str(tmp_path / 'key')!r}).read()",
        f"open({str(tmp_path / 'lib/key')!r}).read()",
        "os.listdir('/')",
        "__import__('numpy').arange(3).tolist()",
    )
    assert {*found[:3]} <= REFUSED
    assert found[3] == "[0, 1, 2]"


def test_a_flood_of_output_and_of_files(sandbox: Sandbox) -> None:
    assert "File too large" in sandbox.run("while True:\n    print('x' * 10_000)").stderr
    big = sandbox.run("open('big', 'wb').write(bytes(2 << 20))")
    assert "File too large" in big.stderr


def test_its_files_take_no_more_than_they_may(confined: Sandbox) -> None:
    """In a folder of the machine's that is what was seen when it was looked at, or the program is ended."""
    many = "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'wb').write(bytes(1 << 19))"
    written = """
import os, time
total = 0
try:
    while True:
        with open(str(total), "wb", 0) as file:
            total += file.write(bytes(1 << 19))
except OSError as error:
    print(total, error.errno)
"""
    ran = confined.run(written)
    assert ran.end == "disk" or ran.stdout == f"{SMALL.disk} {errno.ENOSPC}\n"
    ran = confined.run(many)
    assert ran.end == "disk" or "No space left" in ran.stderr
    ran = confined.run("i = 0\nwhile True:\n    i += 1\n    open(str(i), 'wb')")
    assert ran.end == "disk" or "No space left" in ran.stderr


def test_nothing_outside_can_be_asked_about(sandbox: Sandbox, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-Urm", "true"], timeout=120).returncode != 0:
        pytest.skip("this machine allows no namespaces")
    (tmp_path / "theirs").write_text("")
    paths = ["/etc/passwd", "/proc/1", __file__, str(tmp_path / "theirs"), "../../theirs", "/usr/../etc/passwd"]
    found = attempt(sandbox, *(f"os.{call}({path!r})" for path in paths for call in ("stat", "lstat")))
    assert set(found) == {"FileNotFoundError"}
    assert attempt(sandbox, "os.chdir('/proc/self')", "os.path.exists('/root/.ssh')") == ["FileNotFoundError", "False"]


def test_a_flood_of_descriptors(sandbox: Sandbox) -> None:
    assert "Too many open files" in sandbox.run("held = [open('f', 'w') for _ in range(99)]").stderr


def test_other_processes_and_its_own_limits(sandbox: Sandbox) -> None:
    me = os.getpid()
    found = attempt(
        sandbox,
        f"os.kill({me}, 0)",
        f"os.kill({me}, 9)",
        "os.kill(os.getppid(), 9)",
        "os.killpg(0, 9)",
        "os.kill(-1, 9)",
        f"__import__('resource').prlimit({me}, 7)",
        "__import__('resource').setrlimit(9, (1 << 40, 1 << 40))",
        "os.setpriority(0, 0, -20)",
        f"open('/proc/{me}/mem', 'rb')",
        "libc.ptrace(16, os.getppid(), 0, 0)",
        "libc.unshare(0x10000000)",
        "libc.mount(b'none', b'/', b'tmpfs', 0, 0)",
        "libc.prctl(1, 0, 0, 0, 0)",
    )
    assert found[:5] == ["PermissionError"] * 5
    assert [each for each in found[5:] if each not in REFUSED | {"ValueError", "-1"}] == []


def test_a_signal_from_a_descriptor(sandbox: Sandbox) -> None:
    fcntl, me = "__import__('fcntl')", os.getpid()
    found = attempt(
        sandbox,
        f"{fcntl}.fcntl(0, {fcntl}.F_SETOWN, {me})",
        f"{fcntl}.fcntl(0, 15, bytes(8))",
        f"{fcntl}.fcntl(0, 10, 9)",
        f"{fcntl}.fcntl(0, {fcntl}.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)",
        f"{fcntl}.fcntl(os.open('.', 0), {fcntl}.F_NOTIFY, 1)",
        f"{fcntl}.fcntl(0, {fcntl}.F_SETLEASE, 0)",
        f"{fcntl}.fcntl(0, {fcntl}.F_SETFL, os.O_NONBLOCK)",
        f"{fcntl}.fcntl(0, {fcntl}.F_GETFL) & os.O_NONBLOCK > 0",
        f"{fcntl}.lockf(open('l', 'w'), {fcntl}.LOCK_EX)",
        "os.dup(0) > 2",
    )
    assert found == ["PermissionError"] * 6 + ["0", "True", "None", "True"]


def test_a_program_has_its_time_for_all_tests_together(tmp_path: Path) -> None:
    sleeper, tests = "import time\ntime.sleep(0.7)\nprint(2)", {"inputs": [""] * 10, "outputs": ["2"] * 10}
    patient = Sandbox(Limits(wall_s=1.0))
    assert program_score(sleeper, tests, patient) <= 0.6  # 4 x 1 s are enough for six tests at the most
    assert program_score("print(2)", tests, Sandbox()) == 1.0


@pytest.mark.parametrize("given", ["9" * 400 + " + 1j", "{0x" + "f" * 5000 + ": 1}", "-" * 4000 + "1", "{[]: 1}"])
def test_a_value_that_cannot_be_compared_is_wrong(given: str) -> None:
    code = f"class R:\n    def __repr__(self):\n        return {given!r}\ndef f():\n    return R()"
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [{"1": "long" * 1000}]}
    assert program_score(code, tests, Sandbox(SMALL)) == 0.0


@pytest.mark.parametrize("written", [b"", b"garbage", b'{"missing": {"files": "a lie"}}\n', b"\xff\n[[["])
def test_what_a_program_writes_over_its_report_is_its_own_failure(sandbox: Sandbox, written: bytes) -> None:
    code = f"""
import os
for number in range(3, 1024):
    try:
        os.ftruncate(number, 0)
        os.pwrite(number, {written!r}, 0)
    except OSError:
        pass
os._exit(0)
"""
    ran = sandbox.run(code, check=Check("6 * 7"))
    assert (ran.end, ran.answer) == ("done", written.decode(errors="replace") or None)


def test_a_folder_that_was_closed_is_removed_all_the_same(sandbox: Sandbox) -> None:
    code = "import os\nos.mkdir('a')\nopen('a/f', 'w').close()\nos.mkdir('a/b', 0)\nos.umask(0o777)\nos.mkdir('c')"
    assert sandbox.run(code).end in ("done", "disk")  # nobody but root can look into them


@pytest.mark.parametrize(("name", "depth"), [("a" * 250, 30), ("a", 1500)])
def test_folders_too_deep_to_be_looked_into(
    sandbox: Sandbox, name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import os\nfor _ in range({depth}):\n    os.mkdir({name!r})\n    os.chdir({name!r})\n"
    assert sandbox.run(code).end in ("done", "disk", "error")
    without_namespaces(monkeypatch)
    assert sandbox.run(code + "import time\ntime.sleep(60)").end == "disk"
    assert sandbox.run(code).end in ("done", "disk")


def test_it_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "sandboxes").mkdir()
    code = "from trivium.rewards.sandbox import Sandbox\nSandbox().run('import time\\ntime.sleep(600)')"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path / "sandboxes")})
    try:
        eventually(lambda: any(" (python" in each and " S " in each for each in survivors(tmp_path)))
        time.sleep(0.2)  # past its confinement
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    eventually(lambda: not survivors(tmp_path))
    shutil.rmtree(tmp_path / "sandboxes")


# --------------------------------------------------------------------------- who runs it, and where

AS_SOMEBODY = """
import os, sys
from trivium.rewards.sandbox import Limits, Sandbox
sandbox = Sandbox(Limits(cpu_s=2, threads=8))
ran = sandbox.run('''
import os, _thread, time
def tried(what):
    try:
        return what()
    except OSError as error:
        return type(error).__name__
print(tried(os.fork), tried(lambda: open("/tmp/trivium-was-here", "w")), tried(lambda: open("own", "w").write("x")))
n = 0
try:
    for n in range(99):
        _thread.start_new_thread(time.sleep, (60,))
except RuntimeError:
    print(n, flush=True)
os._exit(0)
''')
hidden = "import os, time; os.mkdir('h', 0o300); open('h/f', 'wb').write(bytes(1 << 20)); time.sleep(1)"
print(Sandbox(Limits(disk=1 << 18)).run(hidden).end)
print(os.getuid(), ran.end, *ran.stdout.split(), ran.stderr)
"""

IDENTITIES = {
    # A reader of everything, so that an interpreter in root's own folder can be started.
    "somebody": (
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search",
    ),
    "root without capabilities": ("--bounding-set=-all", "--inh-caps=-all"),
    "root that cannot become another": ("--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"),
}


@pytest.mark.parametrize("identity", IDENTITIES)
def test_it_confines_whoever_runs_it(identity: str) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become others")
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o777)
    try:
        done = subprocess.run(
            ["setpriv", *IDENTITIES[identity], sys.executable, "-c", AS_SOMEBODY],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    hidden, uid, end, fork, outside, own, threads = done.stdout.split()
    assert hidden in ("disk", "error")
    assert (end, fork, own) == ("done", "PermissionError", "1")
    assert outside in REFUSED
    assert int(threads) < 8
    assert (uid == "0") == (identity != "somebody")


WITHOUT = """
import ctypes, os, struct, sys
instructions = bytes.fromhex(sys.argv[1])
held = ctypes.create_string_buffer(instructions, len(instructions))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held)), 0, 0) == 0
from trivium.foundation.errors import ConfigError
from trivium.rewards.sandbox import Sandbox
try:
    Sandbox()
except ConfigError as error:
    print(error)
print(Sandbox(without=sys.argv[2].split(",")).run("print(6 * 7)").stdout)
"""


def older_machine(missing: dict[int, int], without: str) -> str:
    """What a sandbox says on a kernel that answers these system calls with these errors."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
    instructions = program(architecture, {}, missing, otherwise=0x7FFF0000)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, instructions.hex(), without], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said, _, answer = done.stdout.rstrip().rpartition("\n")
    assert answer == "42"
    return said


def test_a_machine_that_cannot_enforce_a_limit_runs_nothing() -> None:
    said = older_machine({444: errno.ENOSYS}, "files")
    assert "does not limit files: Landlock is not available (Function not implemented)" in said
    assert "['files']" in said
    said = older_machine({{"x86_64": 157, "aarch64": 167}[platform.machine()]: errno.EINVAL}, "network,processes")
    for name in ("network: seccomp filters are not available", "processes: seccomp"):
        assert name in said


def test_a_limit_that_there_is_not() -> None:
    with refused(ConfigError, "nettwork", "memory, files, network, processes"):
        Sandbox(without=["nettwork"])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_well_formed_for_either_machine(machine: str) -> None:
    with_threads, alone = confinement(True, machine), confinement(False, machine)
    assert len(with_threads) % 8 == len(alone) % 8 == 0
    assert len(alone) < len(with_threads) < 8 * 4096
