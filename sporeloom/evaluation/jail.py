# SPDX-License-Identifier: Apache-2.0
"""Runs untrusted commands. A program of its own, started by `sandbox`, with the standard library alone.

It reads a job as JSON from standard input and writes what became of each step to standard output. The commands live in
namespaces of Linux, with a root of their own: the system's programs and libraries, their toolchain, both read-only, and
one empty folder in memory of their own. They see no other process, no network, no other file of the host. A filter
(`system_calls`) keeps them from what leads out. Process 1 of the namespace watches them; when it ends, the kernel ends all
others, and this process, outside, reports it.
"""

import base64
import contextlib
import ctypes
import errno
import fcntl
import fnmatch
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

from sporeloom.evaluation.system_calls import ARCHITECTURES, REFUSED, refuse_system_calls

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 2, 4, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 442, -100, 0x8000, 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
LOOK_EVERY_S = 0.02
THREADS_PER_PROCESS = 8  # RLIMIT_NPROC counts threads, of which Java and Node start a dozen
OPEN_FILES = 256  # what waits in pipes and sockets is memory too
SIGNALS = 1024  # that wait, and timers
INODES = 32768  # of the folder: each takes memory of the kernel
SOCKET_BYTES = 212992  # that may wait in one, unless the system says otherwise
HIGH = 10  # numbers of open files from here on are out of the way
PAGE = resource.getpagesize()

SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/libexec", "/usr/include", "/usr/share/nodejs", "/etc/ld.so.cache", "/etc/alternatives"),
)
"""Files of the host that every command sees, besides its toolchain."""
DEVICES = ("null", "full", "random", "urandom")  # not zero: mapped, it is memory that nobody counts

libc = ctypes.CDLL(None, use_errno=True)


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
    """Create new namespaces: the next child is process 1 in them."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    _check(libc.unshare(flags if uid == 0 else flags | CLONE_NEWUSER), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build_root(needed: list[str], uid: int | None, disk_bytes: int, folder: str) -> int:
    """Make a root that contains only what is allowed, and leave the host's. Returns a handle of a /proc that may
    be written, which the new root does not have.

    `needed`: files and folders of the toolchain. `folder`: made empty, of the user `uid`.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)  # in which our open files have names
    proc = os.open("/proc", os.O_RDONLY)
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
    _set_tree_read_only(f"{root}/dev")
    owner = "" if uid is None else f",uid={uid},gid={uid}"
    _mount(
        "tmpfs", root + folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes={INODES},mode=0700{owner}"
    )
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_RDONLY)
    for handle in (*opened.values(), *devices.values()):
        os.close(handle)
    os.chdir(root)
    _check(libc.syscall(REFUSED["pivot_root"][ARCHITECTURES[platform.machine()][0]], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    return proc


def _outermost(paths: list[str]) -> list[str]:
    """The existing ones of these paths that are in no other one."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.lexists(path)}):
        if path != "/usr" and not any(path.startswith(f"{other}/") and not os.path.islink(other) for other in found):
            found.append(path)
    return found


def _show(handle: int, path: str, target: str) -> None:
    """Mount a file or folder of the host, opened before, at `target`: a link as a link."""
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
    """Mount, in `folder`, by name: folders whose content may be overwritten, without effect."""
    for name, source in overlays.items():
        parts = [os.path.join(folder, name + end) for end in ("", ".upper", ".work")]
        for part in parts:
            os.mkdir(part)
        target, upper, work = parts
        _mount("overlay", target, "overlay", 0, f"lowerdir={source},upperdir={upper},workdir={work}")


class MemoryGroup:
    """A control group that counts all memory of these processes, with shared memory and the kernel's own, where
    there is one.

    Where nobody may make one, pages, page tables and sockets are counted; the filter of system calls, the absence of
    /dev/shm and the size of the folder leave nothing else to hoard in.
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
        """Remove the groups of jails that were killed."""
        for name in os.listdir(self.base):
            if name.startswith("sporeloom-") and not os.path.exists(f"/proc/{name.partition('-')[2]}"):
                self._remove(name)

    def join(self) -> None:
        """Count this process and its children. Not the one that watches, which the kernel might end in their place."""
        if self.events is not None:
            self._write(f"{self.name}/cgroup.procs", "0")

    def is_exceeded(self) -> bool:
        """Whether the kernel had to end a process because memory ran out."""
        if self.events is None:
            return False
        words = os.pread(self.events, 4096, 0).decode().split()
        return any(key == "oom_kill" and int(count) > 0 for key, count in itertools.pairwise(words))

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        if self.events is not None:
            for _ in range(50):
                self._remove(self.name)
                if self.name not in os.listdir(self.base):
                    return
                time.sleep(LOOK_EVERY_S)  # the kernel has yet to let go of the last one


def memory_groups() -> list[tuple[str, str, str]]:
    """(folder of this process's group, file of the limit, file of events) of each hierarchy that counts memory."""
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
    """(number, bytes of pages and page tables) of all but process 1."""
    count = held = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/status") as file:
                    held += sum(int(line.split()[1]) << 10 for line in file if line.startswith(("VmRSS", "VmPTE")))
                count += 1
            except (OSError, IndexError):
                pass  # it ended meanwhile
    return count, held


def _sockets() -> int:
    """Limit the bytes that the sockets of this namespace may buffer, also those that no process has open."""
    with open("/proc/net/unix") as file:
        count = sum(1 for _ in file) - 1
    return count * SOCKET_BYTES


def _become(command: dict[str, Any], job: dict[str, Any], output: int, group: MemoryGroup) -> NoReturn:
    """In the child: drop all rights, set the limits, become the command."""
    os.setsid()
    group.join()
    with contextlib.suppress(OSError):  # where memory is short, the kernel ends these first
        handle = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=job["proc"])
        os.write(handle, b"1000")
    sources = {0: os.open(os.devnull, os.O_RDONLY), 1: output, 2: output}
    sources |= dict(zip(command["channel"], job["channel"] if command["channel"] else (), strict=True))
    copies = {target: fcntl.fcntl(source, fcntl.F_DUPFD, HIGH) for target, source in sources.items()}
    for target, copy in copies.items():
        os.dup2(copy, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in copies:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    limits = job["limits"]
    threads = limits["processes"] * THREADS_PER_PROCESS
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, int(command["time_s"]) + 1),
        (resource.RLIMIT_NPROC, threads),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_SIGPENDING, SIGNALS),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, as its children would
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    refuse_system_calls()
    os.chdir(job["folder"])
    os.execve(command["argv"][0], command["argv"], job["environment"])


def run_step(command: dict[str, Any], job: dict[str, Any], group: MemoryGroup) -> dict[str, Any]:
    """Run one command to its end, or to the first limit it exceeds; nothing it started is left."""
    if command["channel"]:  # the time counts from the first call
        calls = select.poll()  # not select: numbers of open files may be large
        calls.register(job["channel"][0], select.POLLIN)
        calls.poll(command["wait_s"] * 1000)
    reader, writer = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _become(command, job, writer, group)
        except BaseException as error:
            os.write(2, f"cannot start {command['argv'][0]}: {error}\n".encode())
        os._exit(127)
    for handle in (writer, *(job["channel"] if command["channel"] else ())):
        os.close(handle)
    output, broken, code = b"", None, None
    limits, open_ends = job["limits"], [reader]
    while code is None:
        if select.select(open_ends, [], [], LOOK_EVERY_S)[0]:
            chunk = os.read(reader, 1 << 16)
            output, open_ends = output + chunk, [reader] if chunk else []
        broken = _broken_limit(limits, len(output), job["folder"], group)
        if broken is None and time.monotonic() - start > command["time_s"]:
            broken = "time"
        if broken:
            os.kill(child, signal.SIGKILL)
        pid, status = os.waitpid(child if broken else -1, 0 if broken else os.WNOHANG)  # -1: also orphans
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
    broken = broken or _broken_limit(limits, 0, job["folder"], group) or ("time" if code == -signal.SIGXCPU else None)
    _end_all()
    while chunk := os.read(reader, 1 << 16):
        output += chunk
    os.close(reader)
    text = output[: limits["output_bytes"]].decode(errors="replace")
    return {"code": code, "broken_limit": broken, "seconds": time.monotonic() - start, "output": text}


def _broken_limit(limits: dict[str, int], output_bytes: int, folder: str, group: MemoryGroup) -> str | None:
    count, held = _processes()
    if group.events is None:
        held += _sockets()
    if output_bytes > limits["output_bytes"]:
        return "output"
    if held > limits["memory_bytes"] or group.is_exceeded() or os.statvfs(folder).f_ffree == 0:
        return "memory"
    return "processes" if count > limits["processes"] else None


def _end_all() -> None:
    """Kill and reap every process of this namespace but the first, also those created meanwhile."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def be_first_process(job: dict[str, Any], group: MemoryGroup, report: int) -> None:
    """Process 1: build the root, run the steps, report each as a line of JSON."""
    # What the kernel does by itself for process 1: signals of its children do nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Root's processes are not counted against RLIMIT_NPROC, and root may do too much: a user that nobody else is.
    job["uid"] = 1_000_000 + job["number"] if os.getuid() == 0 else None
    try:
        job["proc"] = build_root(job["needed"], job["uid"], job["limits"]["disk_bytes"], job["folder"])
        overlay(job["folder"], job["overlays"])
        for name, content in job["files"].items():
            handle = os.open(os.path.join(job["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
            with open(handle, "wb") as file:
                file.write(base64.b64decode(content))
    except OSError as error:
        os.write(report, json.dumps({"refused": str(error)}).encode() + b"\n")
        return
    with open(report, "wb", closefd=False) as file:
        for command in job["steps"]:
            result = run_step(command, job, group)
            file.write(json.dumps(result).encode() + b"\n")
            file.flush()
            if result["code"] != 0 or result["broken_limit"]:
                break
        file.write(json.dumps({"files": _kept(job["folder"], job["keep"])}).encode() + b"\n")


def _kept(folder: str, patterns: list[str]) -> dict[str, str]:
    """Read the files of these names that the steps left in the folder, regular files only."""
    found = {}
    for name in os.listdir(folder) if patterns else ():
        path = os.path.join(folder, name)  # nothing runs there any more
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) and stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "rb") as file:
                found[name] = base64.b64encode(file.read()).decode()
    return found


def watch(job: dict[str, Any], group: MemoryGroup) -> dict[str, Any]:
    """Fork process 1 and return the results of the steps, also where it was ended itself."""
    reader, writer = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.close(reader)
        if not _has_reader(writer):
            os._exit(1)  # its parent was killed before the line above
        try:
            be_first_process(job, group, writer)
        except BaseException as error:  # for example where the machine has no memory left
            broken = "memory" if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM else None
            output = f"the sandbox failed: {type(error).__name__}: {error}"
            result = {"code": -9, "broken_limit": broken, "seconds": time.monotonic() - start, "output": output}
            os.write(writer, json.dumps(result).encode() + b'\n{"files": {}}\n')
        os._exit(0)
    for handle in (writer, *job["channel"]):
        os.close(handle)
    with open(reader, "rb") as file:
        results = [json.loads(line) for line in file if line.endswith(b"\n")]
    os.waitpid(child, 0)
    if results and "refused" in results[-1]:
        return results[-1]
    if results and "files" in results[-1]:
        return {"steps": results[:-1], **results[-1]}
    broken = "memory" if group.is_exceeded() else None
    ended = {"code": -9, "broken_limit": broken, "seconds": time.monotonic() - start, "output": ""}
    return {"steps": [*results, ended], "files": {}}


def _has_reader(writer: int) -> bool:
    poll = select.poll()
    poll.register(writer, select.POLLERR)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


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
        report = watch(job, group)
    except OSError as error:
        report = {"refused": str(error)}
    json.dump(report, sys.stdout)
    sys.stdout.flush()
    group.remove()
