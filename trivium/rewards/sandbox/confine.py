"""The child process of the sandbox: gives up every right that it has, then runs untrusted code.

python -s -P -S -B confine.py CHANNEL ANSWER      two descriptors: the parent's socket, a file for the check's value

This file runs by itself with nothing but the standard library. It reads its order from the channel, reports
`{"missing": {limit: why}}` there, both in the frames of `isolated/child.py`, and closes the channel before the code
begins. The code itself may have written what the file holds in the end.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 1 << 12, 1 << 14, 1 << 18, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_CAPABILITIES_3 = 0x20080522
_READ_ANYWHERE = 1 << 2
"""CAP_DAC_READ_SEARCH keeps an interpreter readable that is installed for root alone. Landlock limits what else is."""

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_HANDLED = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Landlock version -> all rights over files that it knows."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads the order, gives up all rights, reports the limits that are missing, and runs the code and its check."""
    channel, answer = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(channel, "rb", closefd=False) as requests:
        order = json.loads(requests.read(int.from_bytes(requests.read(8), "big")))
    missing = confine(order)
    report = json.dumps({"missing": missing}).encode()
    os.write(channel, len(report).to_bytes(8, "big") + report)
    os.close(channel)
    if set(missing) - set(order["without"]):
        return
    os.chdir(order["folder"])
    sys.argv = ["solution.py"]
    sys.path[:] = [*sys.path, *order["packages"]]
    sys.setrecursionlimit(10_000)
    names: dict[str, Any] = {"__name__": "__main__"}
    # Without a check, the program gets no file that an answer could be written to.
    if order["expression"] is None:
        os.close(answer)
    code, expression, statements = (order.pop(k) for k in ("code", "expression", "statements"))
    exec(compile(code, "solution.py", "exec"), names)
    if expression is not None:
        names.update(order["names"])
        exec(compile(statements, "check.py", "exec"), names)
        value = repr(eval(compile(expression, "check.py", "eval"), names))
        os.write(answer, value.encode())


def confine(order: dict[str, Any]) -> dict[str, str]:
    """Gives up every right that the order does not leave. Returns the limits that this machine does not enforce, and
    why."""
    missing: dict[str, str] = {}
    if sys.platform != "linux":
        return dict.fromkeys(
            ("memory", "files", "network", "processes"), f"{sys.platform} has no means to confine a process"
        )
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    alone = _private_root(order)
    counted = _change_user(order["uid"], order["folder"], alone)
    # After the change of user, with which the kernel clears it.
    _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    # The parent may have ended before the signal was set: then no signal comes.
    if os.getppid() != order["parent"]:
        sys.exit("the parent process has ended")
    for name, limits in order["limits"].items():
        if name != "NPROC" or counted:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limits)
    if error := _landlock(order["readable"], order["folder"]):
        missing["files"] = error
    if not order["filters"]:
        missing |= dict.fromkeys(("network", "processes"), "no table of system calls for this machine")
    elif error := _seccomp(base64.b64decode(order["filters"][counted])):
        missing |= dict.fromkeys(("network", "processes"), error)
    return missing


def _private_root(order: dict[str, Any]) -> bool:
    """Changes to a file system that holds the readable paths alone, so that `stat` tells nothing of others, and a
    folder in memory with the size and number of files that the code may use. Does nothing if the machine forbids it.

    Returns whether this process is now in a user namespace of its own.
    """
    uid, gid = os.geteuid(), os.getegid()
    alone = uid != 0
    if _libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if alone else 0)) != 0:
        return False
    folder, mounted = order["folder"], False
    try:
        if alone:
            # A user may map its group only once it can no longer drop groups (user_namespaces(7)).
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        # Private first: else the mounts that follow would appear in the machine's own file systems.
        _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", folder, "tmpfs", 0, "size=1m,mode=755")
        mounted = True
        bound: list[str] = []
        for path in (*order["readable"], "/dev/null"):
            if os.path.exists(path) and not any(path.startswith(f"{parent}/") for parent in bound):
                _bind(path, folder + path)
                bound.append(path)
        os.makedirs(folder + folder)
        owner = uid if alone else order["uid"]
        space = f"size={order['disk']},nr_inodes={order['entries']},mode=700,uid={owner},gid={gid if alone else owner}"
        _mount("tmpfs", folder + folder, "tmpfs", 0, space)
        os.chroot(folder)
        os.chdir("/")
    except OSError:  # the machine forbids it: Landlock limits what is read, and the parent watches the folder
        if mounted:
            _libc.umount2(folder.encode(), _MNT_DETACH)
    return alone


def _bind(path: str, target: str) -> None:
    """Makes a file or a folder visible at a second path."""
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, "", _MS_BIND | _MS_REC)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)
    if _libc.mount(*texts) != 0:
        raise OSError(ctypes.get_errno(), _error(), target)


def _change_user(uid: int, folder: str, alone: bool) -> bool:
    """Becomes a user that no other process has, and the owner of the folder.

    Returns whether the kernel counts the threads of this process apart from all others, as it does in a user namespace
    (`alone`). If it does not, the filter allows no threads.
    """
    if os.geteuid() != 0:
        alone = alone or _libc.unshare(_CLONE_NEWUSER) == 0  # the same user in a namespace of its own
        _keep_capabilities(0)
        return alone
    try:
        _libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.chown(folder, uid, uid)
        # The group before the user, who could not change it any more.
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:  # root without the right to become another user
        os.chown(folder, os.getuid(), -1)
        _keep_capabilities(_READ_ANYWHERE)
        return False
    _keep_capabilities(_READ_ANYWHERE)
    return True


def _keep_capabilities(capabilities: int) -> None:
    """Drops all capabilities but these, and those too if this process does not have them."""
    for mask in (capabilities, 0):
        if _libc.capset(struct.pack("=Ii", _CAPABILITIES_3, 0), struct.pack("=6I", mask, mask, 0, 0, 0, 0)) == 0:
            return


def _landlock(readable: list[str], folder: str) -> str:
    """Allows reading `readable`, and reading and writing `folder` and /dev/null, nothing else. Returns what failed."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return f"Landlock is not available ({_error()})"
    files = _HANDLED[max(v for v in _HANDLED if v <= version)]
    attributes = struct.pack("=QQQ", files, 0b11, 0b11)  # no TCP, no abstract sockets, no signals to processes outside
    # A kernel refuses fields of later versions.
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    if rules < 0:
        return f"Landlock gives no rule set ({_error()})"
    read, write = _READ_FILE | _READ_DIR, _WRITE_FILE | _TRUNCATE
    everything = read | write | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MOVE
    grants = [(path, read) for path in readable] + [("/dev/null", _READ_FILE | write), (folder, everything)]
    for path, rights in grants:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # a path that does not exist needs no grant
        if not os.path.isdir(path):
            rights &= _READ_FILE | write
        rule = struct.pack("=Qi", rights & files, descriptor)
        if _libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0) != 0:
            return f"Landlock refuses a rule for {path} ({_error()})"
        os.close(descriptor)
    if _libc.syscall(_LANDLOCK_RESTRICT, rules, 0) != 0:
        return f"Landlock does not take effect ({_error()})"
    os.close(rules)
    return ""


def _seccomp(instructions: bytes) -> str:
    """Installs the filter. Returns what failed."""
    held = ctypes.create_string_buffer(instructions, len(instructions))
    fprog = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held))
    if _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(fprog), 0, 0) != 0:
        return f"seccomp filters are not available ({_error()})"
    return ""


def _error() -> str:
    return os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    main()
