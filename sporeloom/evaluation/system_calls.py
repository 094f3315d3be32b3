# SPDX-License-Identifier: Apache-2.0
"""A filter that keeps isolated programs from namespaces, mounts, keys, memory that nobody counts, and the process that
watches them. Imported by `jail`, so it needs the standard library alone."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

CLONE_NEW = 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x2000080
"""Every kind of namespace."""
PR_SET_SECCOMP = 22

# name: (x86-64, aarch64). From 424 on the numbers are the same everywhere.
REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "inotify_init1": (294, 26),
    "landlock_create_ruleset": (444, 444),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "ioprio_set": (251, 30),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32_BIT = 0x40000000
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x50000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the data that the filter gets

Instruction = tuple[int, int, int, int]
"""(code, instructions to skip if true, if false, value)"""


def _answer(error: int) -> Instruction:
    return (RETURN, 0, 0, ERROR | error)


def _load(argument: int) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS + 8 * argument)


def _if(argument: int, values: tuple[int, ...], error: int) -> list[Instruction]:
    """Refuse one of these values; with error 0 the call does nothing and reports success."""
    return [_load(argument), *((i) for value in values for i in ((EQUAL, 0, 1, value), _answer(error)))]


def _unless(argument: int, values: tuple[int, ...], error: int) -> list[Instruction]:
    """Refuse any other value."""
    return [_load(argument), *((EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)), _answer(error)]


def _if_any_bit(argument: int, bits: int, error: int) -> list[Instruction]:
    return [_load(argument), (ANY_BIT, 0, 1, bits), _answer(error)]


def _if_all_bits(argument: int, bits: int, error: int) -> list[Instruction]:
    return [_load(argument), (AND, 0, 0, bits), (EQUAL, 0, 1, bits), _answer(error)]


SOCKET_FAMILIES = (1,)  # Unix: there is no network, and others are not all held back by a namespace
SOL_SOCKET, SO_SNDBUF, SO_RCVBUF, SO_ATTACH_FILTER, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 1, 7, 8, 26, 32, 33
SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF = 50, 51, 52
MAP_SHARED, MAP_ANONYMOUS, TIOCSTI = 1, 0x20, 0x5412
LOCKS, DNOTIFY = (6, 7, 37, 38), (1026,)  # of ranges of a file, of which each takes memory of the kernel

RESTRICTED: dict[str, tuple[tuple[int, int], list[Instruction]]] = {
    "clone": ((56, 220), _if_any_bit(0, CLONE_NEW, errno.EPERM)),
    "clone3": ((435, 435), [_answer(errno.ENOSYS)]),  # its flags lie in memory: use clone
    "socket": ((41, 198), _unless(0, SOCKET_FAMILIES, errno.EAFNOSUPPORT)),
    "socketpair": ((53, 199), _unless(0, SOCKET_FAMILIES, errno.EAFNOSUPPORT)),
    # Buffers keep their size, so that the number of sockets says how much they may hold.
    "setsockopt": (
        (54, 208),
        [
            _load(1),
            (EQUAL, 1, 0, SOL_SOCKET),
            (RETURN, 0, 0, ALLOW),
            *_if(2, (SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE), 0),
            *_if(2, (SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF), errno.EPERM),
        ],
    ),
    "ioctl": ((16, 29), _if(1, (TIOCSTI,), errno.EPERM)),
    "fcntl": ((72, 25), [*_if(1, LOCKS, errno.ENOLCK), *_if(1, DNOTIFY, errno.EPERM)]),
    # Shared memory without a file stays when no process has it in its pages.
    "mmap": ((9, 222), _if_all_bits(3, MAP_SHARED | MAP_ANONYMOUS, errno.ENOMEM)),
    # Limits and priorities of other processes: the one that watches has the same user where nobody is root.
    "prlimit64": ((302, 261), _unless(0, (0,), errno.EPERM)),
    "setpriority": ((141, 140), [*_unless(0, (0,), errno.EPERM), *_unless(1, (0,), errno.EPERM)]),
    "sched_setparam": ((142, 118), _unless(0, (0,), errno.EPERM)),
    "sched_setscheduler": ((144, 119), _unless(0, (0,), errno.EPERM)),
    "sched_setaffinity": ((203, 122), _unless(0, (0,), errno.EPERM)),
    "sched_setattr": ((314, 274), _unless(0, (0,), errno.EPERM)),
}
"""System calls that some arguments make dangerous."""

libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def _filter() -> list[Instruction]:
    """The program that decides on each system call."""
    column, architecture = ARCHITECTURES[platform.machine()]
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32_BIT),
        _answer(errno.EPERM),
    ]
    for numbers in REFUSED.values():
        program += [(EQUAL, 0, 1, numbers[column]), _answer(errno.EPERM)]
    for numbers, body in RESTRICTED.values():
        program += [(EQUAL, 0, len(body) + 1, numbers[column]), *body, (RETURN, 0, 0, ALLOW)]
    return [*program, (RETURN, 0, 0, ALLOW)]


def refuse_system_calls() -> None:
    """Forbid the refused system calls for this process and its children, for ever."""
    instructions = [_Instruction(*instruction) for instruction in _filter()]
    array = (_Instruction * len(instructions))(*instructions)
    program = _Program(len(instructions), array)
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
