# SPDX-License-Identifier: Apache-2.0
"""One writer at a time: locks that end with the process that holds them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.processes import is_alive

WRITER = ".writer"
HELD = "SPORELOOM_WRITES"
"""Environment variable: the folder that this process, or the one that started it, has locked."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without flock, as Lustre is often mounted


@contextlib.contextmanager
def one_writer(target: Path, is_folder: bool = True) -> Iterator[None]:
    """Lock `target` against other writers, on this machine or another that shares it.

    `is_folder`: the lock lies in it; else next to it, for a folder that gets its name when it is complete.

    Raises:
        ConfigError: somebody does, and who; or nothing can be written there.
    """
    held = str(target.resolve())
    if os.environ.get(HELD) == held:
        yield  # by the process that launched this one
        return
    path = target / WRITER if is_folder else target.with_name(f".{target.name}{WRITER}")
    before = os.environ.get(HELD)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, path = _take(path)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from None
    if handle is None:
        raise ConfigError(f"{target}: {_holder(path)}; wait for it, or give another name")
    os.environ[HELD] = held
    try:
        yield
    finally:
        os.environ.pop(HELD)
        if before is not None:
            os.environ[HELD] = before
        path.unlink(missing_ok=True)
        os.close(handle)


def is_being_written(folder: Path) -> bool | None:
    """Whether a process has locked `folder` as its writer; never on file systems that know no locks. None: another user has
    or had it."""
    try:
        handle = os.open(folder / WRITER, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return None
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def try_lock(path: Path) -> int | None:
    """Open a file, created if it does not exist, that only this process has locked; None if another process has.

    Raises:
        OSError: it cannot be made, or its file system knows no locks.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == os.stat(path).st_ino:
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except FileNotFoundError:
            pass  # its holder removed it before we had the lock: try the next one
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


def _take(path: Path) -> tuple[int | None, Path]:
    """Lock an open file for this process, or return None; and say which file it is."""
    try:
        handle = try_lock(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        path.unlink(missing_ok=True)  # here it locks nothing
        path = path.with_name(f"{path.name}.pid")
        handle = _create_alone(path)
    if handle is not None:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time(), "command": " ".join(sys.argv)}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(who).encode(), 0)
    return handle, path


def _create_alone(path: Path) -> int | None:
    """Lock for file systems without locks: a file that only one process can create. One left behind by a process of this
    machine that has ended is taken over."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        try:
            who = json.loads(path.read_text(encoding="utf-8"))
            if who["host"] != socket.gethostname() or is_alive(int(who["pid"])):
                return None
        except (ValueError, KeyError, TypeError, OSError):
            return None  # being written just now
        path.unlink(missing_ok=True)
        return _create_alone(path)


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(who["since"]))
        gone = "" if who["host"] == socket.gethostname() else f" (if that process is gone, remove {path})"
        return f"process {who['pid']} on {who['host']} writes there since {since}{gone}: {who['command']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process writes there"
