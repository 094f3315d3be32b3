# SPDX-License-Identifier: Apache-2.0
"""Runs commands that nobody vouches for. A script of its own, started by `sandbox`, with the standard library alone.

It reads a job as JSON from standard input and writes what became of each step to standard output. The commands live in
namespaces of Linux: they see no process but their own, no network, a file system they cannot write to, and one empty
folder in memory that is theirs. When the first process of the namespace ends, the kernel ends all others.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x40000, 2, 4
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
LOOK_EVERY_S = 0.02
THREADS_PER_PROCESS = 8  # RLIMIT_NPROC counts threads, of which Java and Node start a dozen
PAGE = resource.getpagesize()

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
    attributes = _MountAttributes(set=MOUNT_ATTR_RDONLY)
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


def _first_private_folder(path: str) -> str | None:
    """The topmost folder above `path` that only its owner may enter."""
    parts = path.strip("/").split("/")
    for i in range(1, len(parts)):
        folder = "/" + "/".join(parts[:i])
        if not stat.S_IMODE(os.stat(folder).st_mode) & stat.S_IXOTH:
            return folder
    return None


def build_view(folder: str, needed: list[str], overlays: dict[str, str], disk_bytes: int, uid: int | None) -> None:
    """Make everything read-only but `folder`, which is made empty.

    `needed`: folders the commands read. Those in a home that is closed to others are shown without the rest of it.
    `overlays`: name in `folder` -> a folder whose content stands there and may be written over, to no effect.
    """
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    if uid is not None:
        private = {path: _first_private_folder(path) for path in needed}
        opened = {path: os.open(path, os.O_PATH) for path, folder in private.items() if folder}
        for covered in {folder for folder in private.values() if folder}:
            _mount("tmpfs", covered, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
        for path, handle in opened.items():
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{handle}", path, None, MS_BIND | MS_REC)
            os.close(handle)
    owner = "" if uid is None else f",uid={uid},gid={uid}"
    os.makedirs(folder, exist_ok=True)
    _set_tree_read_only("/")
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},mode=0700{owner}")
    for name, source in overlays.items():
        parts = [os.path.join(folder, name + end) for end in ("", ".upper", ".work")]
        for part in parts:
            os.mkdir(part)
        target, upper, work = parts
        _mount("overlay", target, "overlay", 0, f"lowerdir={source},upperdir={upper},workdir={work}")


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
    ):
        resource.setrlimit(kind, (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    os.chdir(job["folder"])
    os.execve(command["argv"][0], command["argv"], job["environment"])


def run_step(command: dict[str, Any], job: dict[str, Any], uid: int | None) -> dict[str, Any]:
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
        elif resident > limits["memory_bytes"]:
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


def be_first_process(job: dict[str, Any]) -> None:
    """Process 1: build the view, run the steps, report."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Root's processes are not counted against RLIMIT_NPROC, and root may do too much: a user that nobody else is.
    uid = 1_000_000 + job["number"] if os.getuid() == 0 else None
    build_view(job["folder"], job["needed"], job["overlays"], job["limits"]["disk_bytes"], uid)
    for name, text in job["files"].items():
        with open(os.path.join(job["folder"], name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    results = []
    for command in job["steps"]:
        results.append(run_step(command, job, uid))
        if results[-1]["code"] != 0:
            break
    json.dump(results, sys.stdout)
    sys.stdout.flush()


def main() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job = json.load(sys.stdin)
    try:
        enter_namespaces()
        child = os.fork()
        if child == 0:
            be_first_process(job)
            os._exit(0)
    except OSError as error:
        json.dump({"refused": str(error)}, sys.stdout)
        sys.stdout.flush()
        os._exit(1)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
