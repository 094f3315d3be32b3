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
import errno
import fcntl
import fnmatch
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

from sporeloom.evaluation.jail_root import build_root, check, enter_namespaces, libc, overlay
from sporeloom.evaluation.memory_group import LOOK_EVERY_S, MemoryGroup
from sporeloom.evaluation.system_calls import ARCHITECTURES, refuse_system_calls

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
THREADS_PER_PROCESS = 8  # RLIMIT_NPROC counts threads, of which Java and Node start a dozen
OPEN_FILES = 256  # what waits in pipes and sockets is memory too
SIGNALS = 1024  # that wait, and timers
SOCKET_BYTES = 212992  # that may wait in one, unless the system says otherwise
HIGH = 10  # numbers of open files from here on are out of the way
PAGE = resource.getpagesize()


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
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
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
