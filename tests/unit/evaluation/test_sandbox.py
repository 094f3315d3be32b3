# SPDX-License-Identifier: Apache-2.0
"""What programs that nobody vouches for try, and that nothing of it is left."""

import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.evaluation import sandbox
from sporeloom.evaluation.sandbox import Limits, Step

LIMITS = Limits(memory_bytes=300 << 20, processes=40, output_bytes=1 << 16, disk_bytes=32 << 20)

try:
    sandbox.check_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process of the test's and no folder of the jail's."""
    yield
    assert not list(Path(tempfile.gettempdir()).glob("sporeloom-jail-*"))
    deadline = time.monotonic() + 20  # where the sandbox was killed, the kernel takes a moment to end what is in it
    while any(_is_the_programs(pid) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_the_programs(pid):
    try:
        return b"untrusted.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def run(code, time_s=10.0, **limits):
    (result,) = sandbox.run(
        {"untrusted.py": code},
        [Step((sys.executable, "-I", "untrusted.py"), time_s)],
        Limits(**{**LIMITS.__dict__, **limits}),
        needed=(sys.prefix, sys.base_prefix),
    )
    return result


def test_a_program_that_ends_well():
    result = run("print('said'); open('file', 'w').write('x')")
    assert (result.ok, result.output) == (True, "said\n")


def test_exit_codes_and_signals_are_reported():
    assert run("raise SystemExit(3)").code == 3
    assert run("import os; os.abort()").code == -6


def test_the_next_step_needs_the_one_before():
    true, false = Step(("/bin/true",), 5.0), Step(("/bin/false",), 5.0)
    assert [r.code for r in sandbox.run({}, [true, false, true], LIMITS)] == [0, 1]


def test_an_endless_loop_is_ended():
    start = time.monotonic()
    result = run("while True: pass", time_s=1.0)
    assert (result.broken_limit, result.ok) == ("time", False)
    assert time.monotonic() - start < 8


def test_a_program_that_sleeps_for_ever_is_ended():
    assert (
        run("import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(999)", time_s=1.0).broken_limit
        == "time"
    )


def test_one_process_that_hoards_memory_fails():
    assert not run("hoard = []\nwhile True: hoard.append(bytearray(10_000_000))").ok


def test_processes_that_hoard_memory_together_are_ended():
    result = run(
        "import os, time\nfor i in range(8):\n    if os.fork() == 0: hoard = bytearray(60_000_000); time.sleep(60)\n"
        "time.sleep(60)"
    )
    assert result.broken_limit == "memory"


def test_a_spawner_of_processes_is_ended():
    assert not run(
        "import os, time\nfor i in range(300):\n    if os.fork() == 0: time.sleep(60)", memory_bytes=4 << 30
    ).ok


def test_a_spawner_of_threads_fails():
    code = "import threading, time\nfor i in range(2000): threading.Thread(target=time.sleep, args=(60,)).start()"
    assert not run(code).ok


def test_a_process_that_hides_in_the_background_ends_with_the_program():
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)"
    )
    assert run(code).ok


def test_a_flood_of_output_is_ended():
    result = run("while True: print('x' * 1000)")
    assert result.broken_limit == "output"
    assert len(result.output) <= LIMITS.output_bytes


def test_a_full_disk_is_the_programs_own():
    assert not run("with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 20))").ok
    many = "import os\nfor i in range(100):\n    with open(str(i), 'wb') as f: f.write(bytes(1 << 20))"
    assert "No space left" in run(many).output


def test_nothing_outside_the_folder_can_be_written():
    name = f"sporeloom-test-{uuid.uuid4().hex}"
    places = [Path(p, name) for p in ("/tmp", "/var/tmp", "/dev/shm", Path.home(), Path.cwd(), "/")]
    code = f"for p in {[str(p) for p in places]}:\n    try: open(p, 'w'); print('WROTE', p)\n    except OSError: pass"
    assert "WROTE" not in run(code).output
    assert not any(place.exists() for place in places)


def test_a_file_outside_cannot_be_removed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")
    assert not run(f"import os; os.remove({str(precious)!r})").ok
    assert precious.exists()


def test_there_is_no_network():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)").ok


def test_other_processes_are_neither_seen_nor_killed():
    result = run(
        f"import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit())); os.kill({os.getpid()}, 9)"
    )
    assert "ProcessLookupError" in result.output or "PermissionError" in result.output
    assert result.output.startswith("[1, 2]")
    assert not run("import os; os.kill(1, 9); raise SystemExit(5)").ok


def test_no_right_is_left():
    code = "import os\nassert os.getuid() != 0\ntry: os.setuid(0); print('ROOT')\nexcept OSError: pass"
    assert run(code).ok
    assert "ROOT" not in run(code).output
    assert not run("import subprocess; subprocess.run(['mount', '-t', 'tmpfs', 'x', '/mnt'], check=True)").ok


def test_a_killed_caller_leaves_no_program(tmp_path):
    """As after kill -9 of tools/evaluate.py."""
    code = (
        "import sys; from sporeloom.evaluation.sandbox import *\n"
        "name = 'untrusted' + '.py'\n"  # the caller's own command line is not to look like the program's
        "run({name: 'import time; time.sleep(60)'}, [Step((sys.executable, '-I', name), 60.0)],"
        " Limits(), needed=(sys.prefix, sys.base_prefix))"
    )
    caller = os.posix_spawn(sys.executable, [sys.executable, "-c", code], {**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 20
    while not any(_is_the_programs(pid) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(caller, 9)
    os.waitpid(caller, 0)
    while any(_is_the_programs(pid) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_several_at_once_do_not_see_each_other():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(run("import os; print(os.listdir('.'))"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [r.output for r in results] == ["['untrusted.py']\n"] * 4


def children(pid):
    """Of a process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(name))
    return found


@pytest.mark.parametrize("depth", [1, 2], ids=["the process that reports", "the process that watches"])
def test_a_sandbox_whose_own_process_is_killed_is_reported(depth):
    """As by the kernel, where the machine has no memory left: a verdict, not an exception of the evaluation."""
    results = []
    caller = threading.Thread(target=lambda: results.append(run("import time; time.sleep(60)", time_s=60.0)))
    before = set(children(os.getpid()))
    caller.start()
    deadline = time.monotonic() + 30
    while not any(_is_the_programs(str(pid)) for pid in os.listdir("/proc") if str(pid).isdigit()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (victim,) = set(children(os.getpid())) - before
    if depth == 2:
        (victim,) = children(victim)
    os.kill(victim, 9)
    caller.join(30)
    assert [(r.code, r.broken_limit) for r in results] == [(-9, "memory" if depth == 1 else None)]


def test_a_sandbox_that_does_not_report_has_broken_the_limit_of_time(monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE_S", -59.0)
    result = run("import time; time.sleep(60)", time_s=60.0)
    assert (result.code, result.broken_limit) == (-9, "time")


def test_files_are_kept_by_name_or_pattern_and_links_are_not():
    code = "import os\nopen('a.class', 'w').write('x'); open('b', 'w'); os.mkdir('d.class')\n"
    code += "os.symlink('/etc/passwd', 'l.class'); os.mkfifo('f.class')"
    step = Step((sys.executable, "-I", "untrusted.py"), 10.0)
    job = sandbox.Job({"untrusted.py": code}, [step], LIMITS, needed=(sys.prefix, sys.base_prefix), keep=("*.class",))
    (result,), kept = sandbox.run_job(job)
    assert result.ok
    assert kept == {"a.class": b"x"}


@pytest.mark.parametrize("numbers", [(3, 4), (0, 1)])
def test_two_programs_talk_through_a_channel(numbers):
    """Whatever numbers the open files have, and the second starts when there is something to read."""
    there, back = os.pipe(), os.pipe()
    high = os.dup2(there[0], 900, inheritable=False)
    os.close(there[0])
    read, write = numbers
    asks = f"import os\nos.write({write}, b'asked'); assert os.read({read}, 9) == b'answered'"
    answers = f"import os\nassert os.read({read}, 9) == b'asked'; os.write({write}, b'answered'); os.write(2, b'done')"
    results = {}

    def job(name, code, channel):
        step = Step((sys.executable, "-I", "untrusted.py"), 10.0, numbers, 20.0 if name == "answers" else 0.0)
        needed = (sys.prefix, sys.base_prefix)
        results[name] = sandbox.run_job(
            sandbox.Job({"untrusted.py": code}, [step], LIMITS, needed=needed, channel=channel)
        )

    threads = [
        threading.Thread(target=job, args=("answers", answers, (high, back[1]))),
        threading.Thread(target=job, args=("asks", asks, (back[0], there[1]))),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    for thread in threads:
        thread.join(60)
    assert all(results[name][0][0].ok for name in ("asks", "answers")), results
    assert results["answers"][0][0].output == "done"


def test_a_toolchain_behind_links_has_its_name_inside_too(tmp_path):
    """As a virtual environment that is a link to another one's."""
    (tmp_path / "real" / "bin").mkdir(parents=True)
    (tmp_path / "real" / "bin" / "say").write_text("#!/bin/sh\necho said\n")
    (tmp_path / "real" / "bin" / "say").chmod(0o755)
    (tmp_path / "second").symlink_to("real")
    (tmp_path / "first").symlink_to(tmp_path / "second")
    (tmp_path / "circle").symlink_to("circle")
    needed = (str(tmp_path / "first"), str(tmp_path / "circle"))
    (result,) = sandbox.run({}, [Step((str(tmp_path / "first" / "bin" / "say"),), 10.0)], LIMITS, needed=needed)
    assert result.ok and result.output == "said\n"
