# SPDX-License-Identifier: Apache-2.0
"""What strangers and broken peers can do to a job through its sockets: nothing."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from conftest import ROOT

from sporeloom.core import scratch
from sporeloom.core.errors import ConfigError
from sporeloom.runtime.cpu import transport
from sporeloom.runtime.cpu.transport import Transport

PICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


@pytest.fixture
def place(monkeypatch):
    """The folder of sockets, the test's own; the path of a socket is short."""
    folder = tempfile.mkdtemp(prefix="test-")
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: folder)
    yield Path(folder, f"sporeloom-{os.getuid()}")
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "path", [p for f in ("sporeloom", "tools", "pangu", "codegeex") for p in (ROOT / f).rglob("*.py")], ids=str
)
def test_nothing_is_pickled(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {n.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
    named |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not named & PICKLERS
    assert "allow_pickle=True" not in path.read_text(encoding="utf-8")


def test_sockets_lie_in_a_folder_nobody_else_may_enter(place):
    first = Transport(0, 2, "job")  # the other one does not come: the names stay
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "job" / "0").is_socket()
    assert not [line for line in Path("/proc/net/unix").read_text().splitlines() if "@sporeloom" in line]
    first.close()
    assert list(place.iterdir()) == []


def test_everybody_names_the_rank_that_was_lost_first(place, monkeypatch):
    """And not the one that ends because of it."""
    ended, told = threading.Semaphore(0), []
    monkeypatch.setattr(transport.os, "_exit", lambda code: ended.release())
    ranks = [Transport(rank, 3, "job") for rank in range(3)]
    for rank in (0, 2):
        ranks[rank].on_lost = told.append
    ranks[0]._lose(1)  # as when its connection breaks; rank 2 has noticed nothing
    assert ended.acquire(timeout=20) and ended.acquire(timeout=20)
    assert told == ["rank 1 is gone (before its first step); ending this job"] * 2
    for each in ranks:
        each.close()


def test_who_ends_in_good_order_is_not_disturbed_by_a_loss(place):
    first, second, third = (Transport(rank, 3, "job") for rank in range(3))
    second.close()
    deadline = time.monotonic() + 20
    while 1 not in first._left or 1 not in third._left:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first._lose(1)  # it has said goodbye; else this process would end here
    first.close()
    first._lose(2)  # this one is at its own end
    third.close()


def test_a_goodbye_that_is_read_after_the_connection_broke_counts(place, monkeypatch):
    """As where this process had no turn while the other one ended."""
    lost = []
    first, second = (Transport(rank, 2, "job") for rank in range(2))
    monkeypatch.setattr(transport, "recv_monitor_message", lambda monitor: None)  # it broke
    monkeypatch.setattr(first, "_lose", lost.append)
    late = threading.Timer(0.1, first._left.add, [1])
    late.start()
    first._watch(1, SimpleNamespace(close=lambda: None))
    late.join()
    assert lost == []
    first._left.clear()
    first._watch(1, SimpleNamespace(close=lambda: None))  # no goodbye
    assert lost == [1]
    monkeypatch.undo()
    for each in (first, second):
        each.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_another_user_cannot_connect(place):
    first = Transport(0, 2, "job")
    for folder in (place.parent, *place.parent.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(0o755)
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1]); print('CONNECTED')\n"
        "except PermissionError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", code, place / "job" / "0"], capture_output=True, text=True, timeout=30)
    assert done.stdout == "refused\n", done.stderr
    first.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_others_may_enter_is_refused(place, mode):
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(ConfigError, match=r"nobody else may enter \(mode 0700\)"):
        Transport(0, 2, "job")


def test_a_link_in_place_of_the_folder_is_refused(place, tmp_path):
    tmp_path.chmod(0o700)
    place.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder of user"):
        Transport(0, 2, "job")


def test_nothing_is_left_once_all_ranks_are_connected(place):
    ranks = [Transport(rank, 3, "job") for rank in range(3)]
    deadline = time.monotonic() + 10
    while list(place.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks[2].send(0, "still", np.arange(3))
    assert ranks[0].receive(2, "still", 5.0).tolist() == [0, 1, 2]
    for rank in ranks:
        rank.close()


def test_two_jobs_of_one_name_that_start_at_once_are_told_apart(place):
    first = Transport(0, 2, "job")
    with pytest.raises(ConfigError, match="give msrun another --master_port"):
        Transport(0, 2, "job")
    first.close()
    Transport(0, 2, "job").close()


def test_what_a_killed_job_left_is_removed_by_the_next(place, monkeypatch):
    code = "import os; from sporeloom.runtime.cpu.transport import *; Transport(0, 2, 'dead'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(place.parent)}, timeout=60)
    assert sorted(p.name for p in (place / "dead").iterdir()) == ["0", "0.lock"]
    monkeypatch.setattr(scratch, "STALE_S", -1.0)
    living = Transport(0, 2, "living")
    Transport(1, 2, "other").close()
    assert [p.name for p in place.iterdir()] == ["living"]
    living.close()


def header(*parts):
    return json.dumps(parts).encode()


class Bomb:
    def __reduce__(self):
        return (os._exit, (99,))


def pickled():
    import pickle  # noqa: PLC0415 (what a stranger would send)

    return pickle.dumps(Bomb())


GOOD = np.arange(4, dtype=np.float32)
JUNK = {
    "a pickle": [pickled(), pickled()],
    "a pickle in the body": [header("value", 1, '"t"', "", []), pickled()],
    "no JSON": [b"\xff\x00\xfe", b""],
    "nothing": [b"", b""],
    "one frame": [header("array", 1, '"t"', "<f4", [4])],
    "three frames": [header("array", 1, '"t"', "<f4", [4]), GOOD.tobytes(), b""],
    "deep JSON": [b"[" * 100_000, b""],
    "a mapping": [b"{}", b""],
    "too few fields": [header("array", 1), b""],
    "unknown kind": [header("eval", 1, '"t"', "", []), b"1"],
    "a rank that is none": [header("array", 7, '"t"', "<f4", [4]), GOOD.tobytes()],
    "a negative rank": [header("array", -1, '"t"', "<f4", [4]), GOOD.tobytes()],
    "itself": [header("array", 0, '"t"', "<f4", [4]), GOOD.tobytes()],
    "true as a rank": [header("array", True, '"t"', "<f4", [4]), GOOD.tobytes()],
    "a tag that is no text": [header("array", 1, ["t"], "<f4", [4]), GOOD.tobytes()],
    "a dtype of objects": [header("array", 1, '"t"', "|O", [1]), b"12345678"],
    "a dtype that is none": [header("array", 1, '"t"', "<f3", [4]), GOOD.tobytes()],
    "a structured dtype": [header("array", 1, '"t"', "i4,f4", [2]), GOOD.tobytes()],
    "another number of bytes": [header("array", 1, '"t"', "<f4", [5]), GOOD.tobytes()],
    "an endless shape": [header("array", 1, '"t"', "<f4", [2**62, 4]), GOOD.tobytes()],
    "a negative shape": [header("array", 1, '"t"', "<f4", [-2, -2]), GOOD.tobytes()],
    "a shape of texts": [header("array", 1, '"t"', "<f4", ["4"]), GOOD.tobytes()],
    "a step that is none": [header("step", 1, "ten", "", []), b""],
}


@pytest.mark.parametrize("frames", JUNK.values(), ids=JUNK)
def test_a_message_that_does_not_parse_is_dropped_with_one_line(place, frames, capfd):
    ours = Transport(0, 2, "job")
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(f"ipc://{place / 'job' / '0'}")
    stranger.send_multipart(frames)
    stranger.send_multipart([header("array", 1, '"t"', "<f4", [4]), GOOD.tobytes()])
    np.testing.assert_array_equal(ours.receive(1, "t", 5.0), GOOD)  # the next one is taken, and nothing before it
    ours.close()
    stranger.close()
    context.term()
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("rank 0: dropped an invalid message (")
