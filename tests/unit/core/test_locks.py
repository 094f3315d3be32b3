# SPDX-License-Identifier: Apache-2.0
import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from sporeloom.core import locks
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import unwritable
from sporeloom.core.locks import HELD, one_writer

HOLD = "import sys, time; from pathlib import Path; from sporeloom.core.locks import one_writer\n"
HOLD += "with one_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv(HELD, raising=False)


@pytest.fixture(params=["flock", "no flock"])
def kind(request, monkeypatch):
    """Both kinds of file systems."""
    if request.param == "no flock":

        def refuse(*_):
            raise OSError(errno.ENOLCK, "no locks here")

        monkeypatch.setattr(locks.fcntl, "flock", refuse)
    return request.param


def test_the_second_is_told_who_holds_it(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "out"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"out: process {holder.pid} on .* writes there since .*; wait for it"):
            one_writer(tmp_path / "out").__enter__()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with one_writer(tmp_path / "out"):  # a lock ends with its holder
        assert (tmp_path / "out" / ".writer").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_one_after_the_other_and_what_one_launches(tmp_path, kind):
    for _ in range(2):
        with one_writer(tmp_path):
            with one_writer(tmp_path):  # as a process that this one launched
                pass
            assert os.environ[HELD] == str(tmp_path)
            with one_writer(tmp_path / "another"):
                pass
            assert os.environ[HELD] == str(tmp_path)
        assert HELD not in os.environ


def test_without_flock_a_dead_holder_is_followed_and_another_machine_is_named(tmp_path, monkeypatch, kind):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    lock = tmp_path / (".writer" if kind == "flock" else ".writer.pid")
    lock.write_text(f'{{"pid": {gone.pid}, "host": "{locks.socket.gethostname()}", "since": 0, "command": "x"}}')
    with one_writer(tmp_path):
        pass
    if kind == "no flock":
        lock.write_text('{"pid": 1, "host": "elsewhere", "since": 0, "command": "x"}')
        with pytest.raises(
            ConfigError, match=r"process 1 on elsewhere .*if that process is gone, remove .*\.writer\.pid"
        ):
            one_writer(tmp_path).__enter__()


def test_a_lock_beside_what_appears_when_it_is_complete(tmp_path):
    with one_writer(tmp_path / "tokens", is_folder=False):
        assert not (tmp_path / "tokens").exists()
        assert [p.name for p in tmp_path.iterdir()] == [".tokens.writer"]
    assert list(tmp_path.iterdir()) == []


PLACES = ["/proc/none/out", "/dev/null/out", "/sys/out", "x" * 300, "a\0b", "/" + "x/" * 3000]


@pytest.mark.parametrize("place", PLACES, ids=range(len(PLACES)))
def test_a_place_where_nothing_can_be_written_is_told(tmp_path, place):
    assert "no file can be written there" in unwritable(tmp_path / place)


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path):
    assert unwritable(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []
    assert fcntl.LOCK_EX  # the module under test is the real one
