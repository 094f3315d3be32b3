# SPDX-License-Identifier: Apache-2.0
"""Every way out of the sandbox that was tried against it: what a program gets, and what the host notices."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.evaluation import sandbox
from sporeloom.evaluation.jail_root import DEVICES
from sporeloom.evaluation.memory_group import memory_groups
from sporeloom.evaluation.sandbox import Limits, Step
from sporeloom.evaluation.system_calls import REFUSED

LIMITS = Limits(memory_bytes=256 << 20, processes=40, output_bytes=1 << 16, disk_bytes=32 << 20)
SYSCALL = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\ndef call(*a):\n"
SYSCALL += "    r = libc.syscall(*a); print('ALLOWED' if r >= 0 else os.strerror(ctypes.get_errno())); return r\n"

try:
    sandbox.check_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)


NAME = f"untrusted-{os.getpid()}.py"


def run(code, time_s=10.0, **limits):
    (result,) = sandbox.run(
        {NAME: code},
        [Step((sys.executable, "-I", NAME), time_s)],
        Limits(**{**LIMITS.__dict__, **limits}),
        needed=(sys.prefix, sys.base_prefix),
    )
    return result


SOCKETS = (
    "import socket\ndef fill(s):\n    s.setblocking(False)\n    try:\n        while True: s.send(bytes(65536))\n"
    "    except BlockingIOError: pass\n"
    "def hoard():\n    k = []\n    try:\n        while True:\n            k.append(socket.socketpair())\n"
    "            for s in k[-1]: fill(s)\n    except OSError: return k\n"
)
MEMORY = {  # which only the sandbox notices
    "many processes",
    "inodes",
    "folders",
    "symbolic links",
    "bound sockets",
    "sockets of many processes",
}
KERNEL_MEMORY = ("extended attributes", "locks of ranges", "page tables", "shared memory in no process's pages")

HOARDS = {
    "private memory": "hoard = []\nwhile True: hoard.append(bytearray(10_000_000))",
    "memfd": "import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(1 << 20))",
    "SysV shared memory": SYSCALL
    + "import sys\nsys.exit(call(29 if os.uname().machine == 'x86_64' else 194, 0, 2 << 30, 0o1600))",
    "shared mappings": "import mmap\nhoard = []\nwhile True:\n    m = mmap.mmap(-1, 10 << 20); hoard.append(m)\n"
    "    for i in range(0, 10 << 20, 4096): m[i] = 1",
    "files in the folder": "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 20)); n += 1",
    "deleted files": "import os\nhoard = []\nwhile True:\n    f = open('x', 'wb'); f.write(bytes(1 << 20)); f.flush()\n"
    "    os.unlink('x'); hoard.append(f)",
    "/dev/shm": "n = 0\nwhile True:\n    open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20)); n += 1",
    "many processes": "import os, time\nfor i in range(30):\n"
    "    if os.fork() == 0: hoard = bytearray(30_000_000); time.sleep(60)\ntime.sleep(60)",
    "POSIX message queues": SYSCALL
    + "import sys\nsys.exit(call(240 if os.uname().machine == 'x86_64' else 180, b'/q', 0o102, 0o600, 0))",
    "files without end": "import os\nwhile True: os.open('/dev/null', 0)",
    "extended attributes": "import os\nopen('f', 'w')\nn = 0\n"
    "while True: os.setxattr('f', f'user.{n}', b'x' * 60000); n += 1",
    "inodes": "import os\nn = 0\nwhile True: os.close(os.open(f'i{n}', os.O_CREAT)); n += 1",
    "folders": "import os\nn = 0\nwhile True: os.mkdir(f'd{n}'); n += 1",
    "links": "import os\nopen('f', 'w')\nn = 0\nwhile True: os.link('f', f'l{n}'); n += 1",
    "symbolic links": "import os\nn = 0\nwhile True: os.symlink('x' * 100, f's{n}'); n += 1",
    "long symbolic links": "import os\nn = 0\nwhile True: os.symlink('x' * 4000, f's{n}'); n += 1",
    "bound sockets": "import socket\nn = 0\nwhile True:\n"
    "    with socket.socket(socket.AF_UNIX) as s: s.bind(f's{n}'); n += 1",
    "sockets": SOCKETS + "hoard()\nraise SystemExit(1)",
    "sockets of many processes": SOCKETS + "import os, time\nfor p in range(38):\n"
    "    if os.fork() == 0: hoard(); time.sleep(60)\ntime.sleep(60)",
    "sockets in sockets": SOCKETS + "import array\nwhile True:\n    a, b = socket.socketpair()\n"
    "    for _ in range(200):\n"
    "        c, d = socket.socketpair(); fill(c); a.sendmsg([b'x'], [(1, 1, array.array('i', [c.fileno(), d.fileno()]))])",
    "larger buffers of sockets": SOCKETS + "k = []\nwhile True:\n    a, b = socket.socketpair(); k.append((a, b))\n"
    "    a.setsockopt(1, 7, 1 << 30); fill(a); fill(b)",
    "pipes of many processes": "import fcntl, os, time\nfor p in range(38):\n    if os.fork() == 0:\n        try:\n"
    "            while True:\n                r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); os.set_blocking(w, False)\n"
    "                try:\n                    while True: os.write(w, bytes(65536))\n"
    "                except BlockingIOError: pass\n"
    "        except OSError: time.sleep(60)\ntime.sleep(60)",
    "locks of ranges": "import fcntl\nf = open('f', 'w')\nn = 0\nwhile True: fcntl.lockf(f, fcntl.LOCK_EX, 1, n); n += 2",
    "page tables": "import mmap\nk = []\nwhile True:\n"
    "    m = mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ); k.append(m)\n"
    "    m.madvise(15)\n    for i in range(0, 1 << 30, 1 << 21): m[i]",
    "shared memory in no process's pages": "import mmap\nk = []\nwhile True:\n    m = mmap.mmap(-1, 10 << 20); k.append(m)\n"
    "    m.write(bytes(10 << 20)); m.madvise(mmap.MADV_DONTNEED)",
    "shared memory of /dev/zero": "import mmap, os\nf = os.open('/dev/zero', os.O_RDWR)\nk = []\nwhile True:\n"
    "    m = mmap.mmap(f, 10 << 20); k.append(m); m.write(bytes(10 << 20)); m.madvise(mmap.MADV_DONTNEED)",
    "pages given to pipes": SYSCALL
    + "import mmap, sys\nsys.exit(call(278 if os.uname().machine == 'x86_64' else 75, 1, 0, 0, 0) < 0)",
    "watches of files": SYSCALL + "import sys\nsys.exit(call(294 if os.uname().machine == 'x86_64' else 26, 0) < 0)",
    "timers": SYSCALL + "t = ctypes.c_int()\nwhile call(222 if os.uname().machine == 'x86_64' else 107, 0, None, "
    "ctypes.byref(t)) >= 0: pass\nraise SystemExit(1)",
}


@pytest.mark.parametrize("what", HOARDS)
def test_what_hoards_memory_fails_within_its_limit(what):
    """And nothing of it is kept: what is in memory goes with the processes that it belongs to."""
    result = run(HOARDS[what])
    assert not result.ok
    assert result.broken_limit == "memory" or what not in MEMORY, result
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and runs_it(pid)]


def runs_it(pid):
    """Whether a process runs the program of this test process."""
    try:
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return NAME.encode() in words


ATTACKS = {
    "an interrupt": "import os, time\nos.kill(1, 2); time.sleep(0.3)",
    "every signal": "import os, time\nfor n in range(1, 65):\n    try: os.kill(1, n)\n"
    "    except OSError: pass\ntime.sleep(0.3)",
    "every signal to all": "import os, signal\nfor n in range(1, 65):\n    try:\n"
    "        if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    "for n in range(1, 65):\n    try: os.kill(-1, n)\n    except OSError: pass",
    "a limit of its time": "import resource, time\nresource.prlimit(1, resource.RLIMIT_CPU, (0, 0)); time.sleep(1)",
    "a limit of its memory": "import resource, time\nresource.prlimit(1, resource.RLIMIT_AS, (1, 1)); time.sleep(0.3)",
    "a limit of its files": "import resource, time\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)); time.sleep(0.3)",
    "its priority": "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)",
    "the priority of its user": "import os\nos.setpriority(os.PRIO_USER, 0, 19)",
    "its scheduling": "import os\nos.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "its processors": "import os\nos.sched_setaffinity(1, {0})",
    "its memory": "f = open('/proc/1/mem', 'r+b')",
    "its badness": "open('/proc/1/oom_score_adj', 'w').write('1000')",
    "its output": "import os\nopen('/proc/1/fd/1', 'w').write('[]')",
}


@pytest.mark.parametrize("what", ATTACKS)
def test_what_is_done_to_the_process_that_watches_has_no_effect(what):
    """The program fails, or what it asked for is not done: the sandbox reports it like any other."""
    result = run("import sys\n" + ATTACKS[what] + "\nprint('survived')")
    assert result.broken_limit is None
    assert result.output == "survived\n" or result.code == 1, result


UNPRIVILEGED = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from sporeloom.core.errors import ConfigError
from sporeloom.evaluation import sandbox
programs, limits = json.load(sys.stdin)
def run(code):
    steps = [sandbox.Step((sys.executable, "-I", "untrusted.py"), 10.0)]
    try:
        result, = sandbox.run({"untrusted.py": code}, steps, sandbox.Limits(**limits))
    except ConfigError as error:
        return str(error)
    return [result.code, result.broken_limit, result.output]
with ThreadPoolExecutor(2) as pool:
    print(json.dumps(dict(zip(programs, pool.map(run, programs.values())))))
"""


def test_without_any_right_it_is_the_same():
    """Another user, who may make no control group: the sandbox counts for itself, and process 1 has the program's user."""
    python = "/usr/bin/python3"
    if os.getuid() != 0 or not os.access(python, os.X_OK):
        pytest.skip("needs root, to become another user, and Python outside of root's folder")
    programs = {**{what: HOARDS[what] for what in (*MEMORY, *KERNEL_MEMORY)}, **ATTACKS}
    done = subprocess.run(
        [python, "-c", UNPRIVILEGED],
        input=json.dumps([programs, LIMITS.__dict__]),
        capture_output=True,
        text=True,
        user=54321,
        group=54321,
        extra_groups=[],
        cwd="/",
        env={"PYTHONPATH": str(Path(sandbox.__file__).parents[2]), "HOME": "/nonexistent"},
        timeout=300,
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("another user cannot read this folder")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    if isinstance(next(iter(results.values())), str):
        pytest.skip(next(iter(results.values())))
    assert list(results) == list(programs)
    survived = {what for what in programs if what in HOARDS and results[what][0] == 0 and not results[what][1]}
    assert not survived
    assert not {what: results[what] for what in MEMORY if results[what][1] != "memory"}
    assert not {w: results[w] for w in ATTACKS if results[w][1] or results[w][0] not in (0, 1)}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_system_call_is_refused(name):
    numbers = REFUSED[name]
    output = run(SYSCALL + f"call({numbers}[os.uname().machine != 'x86_64'], 0, 0, 0, 0, 0)").output
    assert output == "Operation not permitted\n"


CALLS = {
    "a user namespace": "libc.unshare(0x10000000)",
    "a mount namespace": "libc.unshare(0x20000)",
    "a child in a user namespace": "libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "libc.syscall(435, 0, 0)",
    "a tmpfs": "libc.mount(b'x', b'/box', b'tmpfs', 0, b'')",
    "a bind mount": "libc.mount(b'/usr', b'/box', b'', 4096, b'')",
    "32-bit numbers on x86-64": "libc.syscall(0x40000000 | 272, 0x10000000) if os.uname().machine == 'x86_64' else -1",
    "a socket to the hypervisor": "libc.socket(40, 1, 0)",
    "a socket of the kernel's crypto": "libc.socket(38, 5, 0)",
    "a netlink socket": "libc.socket(16, 3, 0)",
    "an IPv4 socket": "libc.socket(2, 1, 0)",
    "a pair of sockets of another family": "libc.socketpair(30, 1, 0, (ctypes.c_int * 2)())",
    "a filter in a socket": "libc.setsockopt(libc.socket(1, 1, 0), 1, 26, b'x' * 16, 16)",
    "a packet socket": "libc.socket(17, 3, 0)",
    "a terminal's input": "libc.ioctl(0, 0x5412, b'x')",
    "root": "libc.setuid(0)",
    "the host's name": "libc.sethostname(b'x', 1)",
    "a device": "libc.mknod(b'/box/disk', 0o60666, 0xfe00)",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_leads_out_fails(call):
    result = run(f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({call})")
    assert result.output.strip().startswith("-1"), result.output


TOPS = ["/", "/etc", "/dev", "/root", "/home", "/tmp", "/var", "/mnt", "/opt", "/srv", "/run", "/sys", "/usr"]


def test_the_root_holds_the_toolchain_and_nothing_else_of_the_host(tmp_path):
    (tmp_path / "solutions.jsonl").write_text("secret")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    code = (
        "import os\n"
        f"for top in {TOPS}:\n"
        "    print(top, *sorted(os.listdir(top)) if os.path.isdir(top) else ['absent'])\n"
        f"print('SECRET' if os.path.exists({str(tmp_path / 'solutions.jsonl')!r}) else 'unseen')\n"
        f"print(*[p for p in {[__file__, '/etc/shadow', '/etc/hostname']} if os.path.exists(p)])"
    )
    lines = run(code).output.splitlines()
    seen = dict(line.split(" ", 1) for line in lines[: len(TOPS)])
    allowed = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "box", "dev", "etc", "proc", "usr"}
    parents = {Path(p).parts[1] for p in (sys.prefix, sys.base_prefix)}
    assert set(seen["/"].split()) <= allowed | parents
    assert set(seen["/etc"].split()) <= {"alternatives", "ld.so.cache", "passwd"}
    assert set(seen["/dev"].split()) == {*DEVICES, "fd", "stdin", "stdout", "stderr"}
    for top in {"/root", "/home", "/tmp", "/var", "/mnt", "/opt", "/srv", "/run", "/sys"} - {f"/{p}" for p in parents}:
        assert seen[top] == "absent"
    assert lines[13] == "unseen"
    assert lines[14] == ""


def test_sockets_and_pipes_of_the_host_are_out_of_reach(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    path, fifo, abstract = tmp_path / "s", tmp_path / "fifo", f"\0sporeloom-test-{os.getpid()}"
    os.mkfifo(fifo, 0o666)
    servers = []
    for address in (str(path), abstract):
        servers.append(socket.socket(socket.AF_UNIX))
        servers[-1].bind(address)
        servers[-1].listen()
    path.chmod(0o777)
    code = (
        "import socket\n"
        f"for address in ({str(path)!r}, {abstract!r}):\n"
        "    try: socket.socket(socket.AF_UNIX).connect(address); print('REACHED')\n"
        "    except OSError: print('out of reach')\n"
        f"try: open({str(fifo)!r}, 'r+'); print('REACHED')\n"
        "except OSError: print('out of reach')"
    )
    assert run(code).output == "out of reach\n" * 3
    for server in servers:
        server.close()


def test_the_hosts_terminals_are_out_of_reach():
    assert run("import os\ntry: os.openpty(); print('OPENED')\nexcept OSError: print('none')").output == "none\n"


@pytest.mark.parametrize(
    "target", ["/usr/bin/x", "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj", "/dev/x", "/etc/passwd"]
)
def test_nothing_but_its_folder_can_be_written(target):
    assert (
        run(f"try: open({target!r}, 'a').write('x'); print('WROTE')\nexcept OSError: print('refused')").output
        == "refused\n"
    )


def test_ordinary_programs_are_not_hindered():
    code = (
        "import threading, subprocess, socket, asyncio, tempfile, os, sys\n"
        "t = threading.Thread(target=lambda: None); t.start(); t.join()\n"
        "a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'\n"
        "assert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout == b'1\\n'\n"
        "asyncio.run(asyncio.sleep(0)); tempfile.TemporaryFile().write(b'x'); os.urandom(1); os.getlogin if 0 else None\n"
        "if os.fork() == 0: os._exit(0)\n"
        "os.wait(); import pwd; print(pwd.getpwuid(os.getuid()).pw_dir)"
    )
    assert run(code).output == "/box\n"


def test_no_control_group_is_left_even_by_a_killed_caller():
    groups = [Path(base) for base, *_ in memory_groups() if os.access(base, os.W_OK)]
    code = (
        "import sys; from sporeloom.evaluation.sandbox import *\n"
        "run({'untrusted.py': 'import time; time.sleep(60)'}, [Step((sys.executable, '-I', 'untrusted.py'), 60.0)],"
        " Limits(), needed=(sys.prefix, sys.base_prefix))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(1.5)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    deadline = time.monotonic() + 20
    while True:  # what the killed one started takes a moment to end
        assert run("pass").ok
        left = [path for base in groups for path in base.glob("sporeloom-*")]
        if not [p for p in left if not Path("/proc", p.name.partition("-")[2]).exists() and p.exists()]:
            return
        assert time.monotonic() < deadline
