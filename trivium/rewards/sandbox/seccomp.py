"""The seccomp filter of untrusted code: it allows the system calls that are listed here and refuses all others.

The list has no call that reaches the network, starts another process or sends it a signal, changes limits, identities,
modes or mounts, or makes kernel objects that outlive the process or escape its memory limit.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column in the tables below, and its number in linux/audit.h."""

_CLONE_THREAD = 0x00010000
_RLIMIT_STACK = 3
_PR_SET_NAME = 15
_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

_DESCRIPTOR_QUESTIONS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, locks (F_GETLK, F_SETLK, F_SETLKW; the same as F_OFD_), F_DUPFD_CLOEXEC. Not
F_SETOWN, F_SETSIG, F_SETLEASE and F_NOTIFY: they send signals."""
_F_SETFL, _O_ASYNC = 4, 0x2000

_FREE = """
read 0 63; write 1 64; open 2 -; close 3 57; stat 4 -; fstat 5 80; lstat 6 -; poll 7 -; lseek 8 62; mmap 9 222;
mprotect 10 226; munmap 11 215; brk 12 214; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139;
pread64 17 67; pwrite64 18 68; readv 19 65; writev 20 66; access 21 -; pipe 22 -; select 23 -; sched_yield 24 124;
mremap 25 216; msync 26 227; madvise 28 233; dup 32 23; dup2 33 -; pause 34 -; nanosleep 35 101; getitimer 36 102;
alarm 37 -; setitimer 38 103; getpid 39 172; recvfrom 45 207; exit 60 93; uname 63 160; flock 73 32;
fsync 74 82; fdatasync 75 83; ftruncate 77 46; getcwd 79 17; chdir 80 49; fchdir 81 50; rename 82 -; mkdir 83 -;
rmdir 84 -; creat 85 -; unlink 87 -; readlink 89 -; umask 95 166; gettimeofday 96 169; getrlimit 97 163;
getrusage 98 165; sysinfo 99 179; times 100 153; getuid 102 174; getgid 104 176; geteuid 107 175; getegid 108 177;
getppid 110 173; getpgrp 111 -; getgroups 115 158; getpgid 121 155; getsid 124 156; sigaltstack 131 132;
statfs 137 43; fstatfs 138 44; arch_prctl 158 -; gettid 186 178; futex 202 98; sched_getaffinity 204 123;
epoll_create 213 -; getdents64 217 61; set_tid_address 218 96; restart_syscall 219 128; fadvise64 221 223;
clock_gettime 228 113; clock_getres 229 114; clock_nanosleep 230 115; exit_group 231 94; epoll_wait 232 -;
epoll_ctl 233 21; openat 257 56; mkdirat 258 34; newfstatat 262 79; unlinkat 263 35; renameat 264 38;
readlinkat 267 78; faccessat 269 48; pselect6 270 72; ppoll 271 73; set_robust_list 273 99; epoll_pwait 281 22;
eventfd2 290 19; epoll_create1 291 20; dup3 292 24; pipe2 293 59; renameat2 316 276; getrandom 318 278;
membarrier 324 283; statx 332 291; rseq 334 293; close_range 436 436; faccessat2 439 439
"""
"""Name, number on x86_64, number on aarch64. Landlock limits which files these reach, resource limits how much they
use."""

_CLONE, _CLONE3, _IOCTL, _PRCTL, _PRLIMIT64 = (56, 220), (435, 435), (16, 29), (157, 167), (302, 261)
_FCNTL, _SOCKETPAIR, _SENDTO = (72, 25), (53, 199), (44, 206)

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data."""
_X32 = 0x40000000
"""x86_64 has every call a second time, from this number on."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Holds if half of an argument of a system call (0: the low 32 bits, 1: the high ones), masked, equals `value`."""

    number: int
    value: int
    mask: int = 0xFFFFFFFF
    half: int = 0


Condition = Sequence[Argument]
"""Holds if all its arguments hold."""


def known(machine: str = "") -> bool:
    """Whether there is a table of system calls for this machine."""
    return (machine or platform.machine()) in _ARCHITECTURES


def confinement(threads: bool, machine: str = "") -> bytes:
    """The filter, as an array of struct sock_filter. `threads` allows the code to start threads."""
    column, architecture = _ARCHITECTURES[machine or platform.machine()]
    rules: dict[int, Sequence[Condition]] = {}
    for line in _FREE.replace("\n", " ").split(";"):
        number = line.split()[1 + column]
        if number != "-":
            rules[int(number)] = [()]
    rules[_IOCTL[column]] = [(Argument(1, request),) for request in _TERMINAL_QUESTIONS]
    rules[_FCNTL[column]] = [
        *((Argument(1, question),) for question in _DESCRIPTOR_QUESTIONS),
        (Argument(1, _F_SETFL), Argument(2, 0, mask=_O_ASYNC)),
    ]
    rules[_PRCTL[column]] = [(Argument(0, _PR_SET_NAME),)]
    own_process = Argument(0, 0)
    rules[_PRLIMIT64[column]] = [
        (own_process, Argument(2, 0), Argument(2, 0, half=1)),  # reads a limit, sets none
        (own_process, Argument(1, _RLIMIT_STACK)),
    ]
    # asyncio wakes itself up with a socket pair. No other call makes a socket, and none sends data to an address.
    rules[_SOCKETPAIR[column]] = [(Argument(0, socket.AF_UNIX), Argument(1, socket.SOCK_STREAM, mask=0xF))]
    rules[_SENDTO[column]] = [(Argument(4, 0), Argument(4, 0, half=1))]
    if threads:
        rules[_CLONE[column]] = [(Argument(0, _CLONE_THREAD, mask=_CLONE_THREAD),)]
    # clone3 has its flags behind a pointer, which no filter can read: without it, libc calls clone.
    return program(architecture, rules, {_CLONE3[column]: errno.ENOSYS}, _error(errno.EPERM))


def program(
    architecture: int, rules: Mapping[int, Sequence[Condition]], errors: Mapping[int, int], otherwise: int
) -> bytes:
    """A filter that allows a call if a condition of its rule holds, and answers EPERM if none does.

    Calls in `errors` answer with that errno, calls without a rule with `otherwise`. Calls of another architecture kill
    the process.
    """
    body = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL),
    ]
    for number, error in errors.items():
        body += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _error(error))]
    for number, conditions in rules.items():
        answer = _alternatives(conditions)
        body += [_instruction(_EQUAL, number, 0, len(answer)), *answer]
    return b"".join([*body, _instruction(_RETURN, otherwise)])


def _alternatives(conditions: Sequence[Condition]) -> list[bytes]:
    """Allows a call if all arguments of one condition hold, and refuses it if no condition does."""
    instructions: list[bytes] = []
    for condition in conditions:
        checks = 3 * len(condition)
        for place, argument in enumerate(condition):
            offset = _ARGUMENTS + 8 * argument.number + 4 * argument.half
            instructions += [
                _instruction(_LOAD, offset),
                _instruction(_AND, argument.mask),
                # Else on to the next condition, behind the other checks of this one and its RETURN.
                _instruction(_EQUAL, argument.value, 0, checks - 3 * place - 2),
            ]
        instructions.append(_instruction(_RETURN, _ALLOW))
        if not condition:
            return instructions
    return [*instructions, _instruction(_RETURN, _error(errno.EPERM))]


def _error(number: int) -> int:
    return 0x00050000 | number


def _instruction(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)
