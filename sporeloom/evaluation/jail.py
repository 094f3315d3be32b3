# SPDX-License-Identifier: Apache-2.0
"""Runs commands that nobody vouches for. A script of its own, started by `sandbox`, with the standard library alone.

It reads a job as JSON from standard input and writes what became of each step to standard output. The commands live in
namespaces of Linux, with a root of their own: the system's programs and libraries, their toolchain, both read-only, and
one empty folder in memory that is theirs. They see no other process, no network, no other file of the host. A filter of
system calls keeps them from namespaces, mounts, keys and memory that nobody counts. When the first process of the
namespace ends, the kernel ends all others.
"""

import contextlib
import ctypes
import errno
import itertools
import json
import os
import platform
import resource
import select
import signal
import stat
import sys
import time
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEW = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | 0x2000080
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 2, 4, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 442, -100, 0x8000, 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
LOOK_EVERY_S = 0.02
THREADS_PER_PROCESS = 8  # RLIMIT_NPROC counts threads, of which Java and Node start a dozen
OPEN_FILES = 512  # what waits in pipes and sockets is memory too
PAGE = resource.getpagesize()

SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/libexec", "/usr/include", "/usr/share/nodejs", "/etc/ld.so.cache", "/etc/alternatives"),
)
"""What of the host every command sees, besides its toolchain."""
DEVICES = ("null", "zero", "full", "random", "urandom")

# name: (x86-64, aarch64). From 424 on the numbers are the same everywhere.
REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
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
CLONE, CLONE3, SOCKET, IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32_BIT, TIOCSTI = 0x40000000, 0x5412
SOCKET_FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6; not those that no namespace holds back
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x50000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24  # places in what the filter is shown

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


def _filter() -> list[tuple[int, int, int, int]]:
    """The program that decides on each system call: (code, instructions to skip if true, if false, value)."""
    column, architecture = ARCHITECTURES[platform.machine()]

    def answer(result: int) -> tuple[int, int, int, int]:
        return (RETURN, 0, 0, result)

    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        answer(KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32_BIT),
        answer(ERROR | errno.EPERM),
    ]
    for numbers in REFUSED.values():
        program += [(EQUAL, 0, 1, numbers[column]), answer(ERROR | errno.EPERM)]
    program += [(EQUAL, 0, 1, CLONE3[column]), answer(ERROR | errno.ENOSYS)]  # its flags lie in memory: use clone
    program += [
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, CLONE_NEW),
        answer(ERROR | errno.EPERM),
        answer(ALLOW),
    ]
    program += [
        (EQUAL, 0, len(SOCKET_FAMILIES) + 3, SOCKET[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((EQUAL, len(SOCKET_FAMILIES) - i, 0, family) for i, family in enumerate(SOCKET_FAMILIES)),
        answer(ERROR | errno.EAFNOSUPPORT),
        answer(ALLOW),
    ]
    program += [
        (EQUAL, 0, 3, IOCTL[column]),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (EQUAL, 0, 1, TIOCSTI),
        answer(ERROR | errno.EPERM),
        answer(ALLOW),
    ]
    return program


def refuse_system_calls() -> None:
    """From here on this process and its children cannot ask the kernel for what `REFUSED` names."""
    instructions = [_Instruction(*instruction) for instruction in _filter()]
    array = (_Instruction * len(instructions))(*instructions)
    program = _Program(len(instructions), array)
    _check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(libc.mount(*texts, flags, data.encode()), f"mount {kind or source} on {target}")


def _set_tree_read_only(path: str) -> None:
    attributes = _MountAttributes(set=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    size = ctypes.sizeof(attributes)
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(attributes), size)
    _check(result, f"mount_setattr {path}")


def enter_namespaces() -> None:
    """From here on the next child is process 1 of a world of its own."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    _check(libc.unshare(flags if uid == 0 else flags | CLONE_NEWUSER), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build_root(needed: list[str], uid: int | None, disk_bytes: int, folder: str) -> None:
    """Make a root that holds what is allowed and nothing else, and leave the host's.

    `needed`: files and folders of the toolchain. `folder`: made empty, of the user `uid`.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)  # in which our open files have names
    opened = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in _outermost([*SYSTEM, *needed])}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    root = "/tmp"  # any folder will do: what is under it was opened before
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=16m")
    for path, handle in opened.items():
        _show(handle, path, root + path)
    for name in ("etc", "dev", "proc", folder.strip("/")):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    with open(f"{root}/etc/passwd", "w") as file:
        user = os.getuid() if uid is None else uid
        file.write(f"user:x:{user}:{user}::{folder}:/bin/sh\n")
    _set_tree_read_only(root)
    _mount("tmpfs", f"{root}/dev", "tmpfs", MS_NOSUID, "mode=0755,size=1m")
    for name, handle in devices.items():
        _show(handle, "", f"{root}/dev/{name}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    owner = "" if uid is None else f",uid={uid},gid={uid}"
    _mount("tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},mode=0700{owner}")
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_RDONLY)
    for handle in (*opened.values(), *devices.values()):
        os.close(handle)
    os.chdir(root)
    _check(libc.syscall(REFUSED["pivot_root"][ARCHITECTURES[platform.machine()][0]], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def _outermost(paths: list[str]) -> list[str]:
    """Those that are there and lie in no other one."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.lexists(path)}):
        if path != "/usr" and not any(path.startswith(f"{other}/") and not os.path.islink(other) for other in found):
            found.append(path)
    return found


def _show(handle: int, path: str, target: str) -> None:
    """Let something of the host, opened before, stand at `target`: a link as a link."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    mode = os.fstat(handle).st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink("", dir_fd=handle), target)
        return
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{handle}", target, None, MS_BIND | MS_REC)


def overlay(folder: str, overlays: dict[str, str]) -> None:
    """In `folder`, by name: folders whose content may be written over, to no effect."""
    for name, source in overlays.items():
        parts = [os.path.join(folder, name + end) for end in ("", ".upper", ".work")]
        for part in parts:
            os.mkdir(part)
        target, upper, work = parts
        _mount("overlay", target, "overlay", 0, f"lowerdir={source},upperdir={upper},workdir={work}")


class MemoryGroup:
    """A control group that counts everything, shared memory and the kernel's own for these processes, where there is one.

    Where nobody may make one, resident pages are counted; `REFUSED`, the absence of /dev/shm and the size of the folder leave
    nothing else to hoard in.
    """

    def __init__(self, limit: int):
        self.events: int | None = None
        self.name = f"sporeloom-{os.getpid()}"
        for path, maximum, events in memory_groups():
            self.base = os.open(path, os.O_RDONLY)  # by its handle: the path leads nowhere once the root is another
            try:
                self._remove_left()
                os.mkdir(self.name, dir_fd=self.base)
                self._write(f"{self.name}/{maximum}", str(limit))
                with contextlib.suppress(OSError):
                    self._write(f"{self.name}/memory.swap.max", "0")
                self._write(f"{self.name}/cgroup.procs", "0")
                self.events = os.open(f"{self.name}/{events}", os.O_RDONLY, dir_fd=self.base)
                return
            except OSError:
                self._remove(self.name)
                os.close(self.base)

    def _write(self, path: str, text: str) -> None:
        handle = os.open(path, os.O_WRONLY, dir_fd=self.base)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.base)

    def _remove_left(self) -> None:
        """Of jails that were killed."""
        for name in os.listdir(self.base):
            if name.startswith("sporeloom-") and not os.path.exists(f"/proc/{name.partition('-')[2]}"):
                self._remove(name)

    def is_exceeded(self) -> bool:
        """Whether the kernel had to end a process for want of memory."""
        if self.events is None:
            return False
        words = os.pread(self.events, 4096, 0).decode().split()
        return any(key == "oom_kill" and int(count) > 0 for key, count in itertools.pairwise(words))

    def leave(self) -> None:
        """Once its other processes have ended."""
        if self.events is not None:
            self._write("cgroup.procs", "0")
            self._remove(self.name)


def memory_groups() -> list[tuple[str, str, str]]:
    """(folder of this process's group, file of the limit, file of what happened) of each hierarchy that counts memory."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "memory":
                found.append((f"/sys/fs/cgroup/memory{path}", "memory.limit_in_bytes", "memory.oom_control"))
            elif not controllers:
                found.append((f"/sys/fs/cgroup{path}".rstrip("/"), "memory.max", "memory.events"))
    return [entry for entry in found if os.path.exists(f"{entry[0]}/cgroup.procs")]


def _processes() -> tuple[int, int]:
    """(number, resident bytes) of all but process 1."""
    count = resident = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    resident += int(file.read().split()[1]) * PAGE
                count += 1
            except (OSError, IndexError):
                pass  # it ended meanwhile
    return count, resident


def _become(command: dict[str, Any], job: dict[str, Any], output: int, uid: int | None) -> NoReturn:
    """In the child: give up every right, take the limits, become the command."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, 4096)
    limits = job["limits"]
    threads = limits["processes"] * THREADS_PER_PROCESS
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, int(command["time_s"]) + 1),
        (resource.RLIMIT_NPROC, threads),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    refuse_system_calls()
    os.chdir(job["folder"])
    os.execve(command["argv"][0], command["argv"], job["environment"])


def run_step(command: dict[str, Any], job: dict[str, Any], uid: int | None, group: MemoryGroup) -> dict[str, Any]:
    """Run one command to its end, or to the first limit it hits; nothing it started is left."""
    reader, writer = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _become(command, job, writer, uid)
        except BaseException as error:
            os.write(2, f"cannot start {command['argv'][0]}: {error}\n".encode())
        os._exit(127)
    os.close(writer)
    output, broken, code = b"", None, None
    limits, open_ends = job["limits"], [reader]
    while code is None:
        if select.select(open_ends, [], [], LOOK_EVERY_S)[0]:
            chunk = os.read(reader, 1 << 16)
            output, open_ends = output + chunk, [reader] if chunk else []
        count, resident = _processes()
        if len(output) > limits["output_bytes"]:
            broken = "output"
        elif resident > limits["memory_bytes"] or group.is_exceeded():
            broken = "memory"
        elif count > limits["processes"]:
            broken = "processes"
        elif time.monotonic() - start > command["time_s"]:
            broken = "time"
        if broken:
            os.kill(child, signal.SIGKILL)
        pid, status = os.waitpid(child if broken else -1, 0 if broken else os.WNOHANG)  # -1: also orphans
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
    broken = broken or ("memory" if group.is_exceeded() else None)
    _end_all()
    while chunk := os.read(reader, 1 << 16):
        output += chunk
    os.close(reader)
    text = output[: limits["output_bytes"]].decode(errors="replace")
    return {"code": code, "broken_limit": broken, "seconds": time.monotonic() - start, "output": text}


def _end_all() -> None:
    """Kill and reap every process of this namespace but the first, also those born while that goes on."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def be_first_process(job: dict[str, Any], group: MemoryGroup, parent: int) -> None:
    """Process 1: build the root, run the steps, report. `parent`: a pipe whose other end the parent holds."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_blocking(parent, False)
    with contextlib.suppress(BlockingIOError):  # nothing to read: it is alive
        os.read(parent, 1)
        os._exit(1)  # it was killed before the line above
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Root's processes are not counted against RLIMIT_NPROC, and root may do too much: a user that nobody else is.
    uid = 1_000_000 + job["number"] if os.getuid() == 0 else None
    build_root(job["needed"], uid, job["limits"]["disk_bytes"], job["folder"])
    overlay(job["folder"], job["overlays"])
    for name, text in job["files"].items():
        with open(os.path.join(job["folder"], name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    results = []
    for command in job["steps"]:
        results.append(run_step(command, job, uid, group))
        if results[-1]["code"] != 0:
            break
    json.dump(results, sys.stdout)
    sys.stdout.flush()


def main() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job = json.load(sys.stdin)
    if os.getppid() != job["caller"]:  # it was killed before the line above
        os._exit(1)
    limits = job["limits"]
    group = MemoryGroup(limits["memory_bytes"] + limits["disk_bytes"])
    try:
        if platform.machine() not in ARCHITECTURES:
            raise OSError(0, f"no filter of system calls for {platform.machine()}")
        enter_namespaces()
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            be_first_process(job, group, theirs)
            os._exit(0)
    except OSError as error:
        json.dump({"refused": str(error)}, sys.stdout)
        sys.stdout.flush()
        os._exit(1)
    os.waitpid(child, 0)
    group.leave()


if __name__ == "__main__":
    main()
