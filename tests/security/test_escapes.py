# SPDX-License-Identifier: Apache-2.0
"""Every way out of the sandbox that was tried against it: what a program gets, and what the host notices."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sporeloom.errors import ConfigError
from sporeloom.evaluation import jail, sandbox
from sporeloom.evaluation.sandbox import Limits, Step

LIMITS = Limits(memory_bytes=256 << 20, processes=40, output_bytes=1 << 16, disk_bytes=32 << 20)
SYSCALL = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\ndef call(*a):\n"
SYSCALL += "    r = libc.syscall(*a); print('ALLOWED' if r >= 0 else os.strerror(ctypes.get_errno())); return r\n"

try:
    sandbox.check_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)


def run(code, time_s=10.0, **limits):
    (result,) = sandbox.run(
        {"untrusted.py": code},
        [Step((sys.executable, "-I", "untrusted.py"), time_s)],
        Limits(**{**LIMITS.__dict__, **limits}),
        needed=(sys.prefix, sys.base_prefix),
    )
    return result


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
}


@pytest.mark.parametrize("code", HOARDS.values(), ids=HOARDS)
def test_what_hoards_memory_fails_within_its_limit(code):
    before = available()
    result = run(code)
    assert not result.ok
    assert before - available() < 512 << 20  # nothing of it is kept


def available():
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10


@pytest.mark.parametrize("name", jail.REFUSED)
def test_a_refused_system_call_is_refused(name):
    numbers = jail.REFUSED[name]
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
    assert set(seen["/dev"].split()) == {*jail.DEVICES, "fd", "stdin", "stdout", "stderr"}
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
    groups = [Path(base) for base, *_ in jail.memory_groups() if os.access(base, os.W_OK)]
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
