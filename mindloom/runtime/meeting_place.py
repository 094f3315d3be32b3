# SPDX-License-Identifier: Apache-2.0
"""Where the CPU processes of one job find each other's sockets: a folder nobody else may enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path

from mindloom.errors import ConfigError

LONGEST_PATH = 100  # of a Unix socket, in bytes: the kernel takes 107
STALE_S = 60.0


class MeetingPlace:
    """The socket names of the ranks of `job`, and proof that this process alone is `rank` there.

    The names are needed until all ranks are connected; then each rank leaves and nothing is left, however a job ends
    later. What jobs that died earlier left behind is removed by the next one.

    Raises:
        ConfigError: the folder belongs to somebody else, or another process is this rank of such a job.
    """

    def __init__(self, job: str, rank: int):
        self.rank = rank
        root = _private_root()
        _remove_stale(root)
        self.folder = root / job
        self._lock = _lock_in(self.folder, f"{rank}.lock")
        if self._lock is None:
            raise ConfigError(
                f"rank {rank} of job {job} is starting on this machine already: two jobs at once need two ports; give msrun "
                "another --master_port"
            )
        self.socket(rank).unlink(missing_ok=True)  # of a job that was killed while it started

    def socket(self, rank: int) -> Path:
        return self.folder / str(rank)

    def leave(self) -> None:
        """Remove this rank's names, and the folder with the last of them. May be called again."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        self.socket(self.rank).unlink(missing_ok=True)
        (self.folder / f"{self.rank}.lock").unlink(missing_ok=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # others are still there
            self.folder.rmdir()


def _private_root() -> Path:
    """A folder that only this user may enter."""
    name = f"mindloom-{os.getuid()}"
    root = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(root)) > LONGEST_PATH - 50:
        root = Path("/tmp", name)
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{root}: must be a folder of user {os.getuid()} that nobody else may enter (mode 0700), because the processes "
            "of a job talk to each other there; remove it, or set TMPDIR to another folder"
        )
    return root


def _lock_in(folder: Path, name: str) -> int | None:
    """An open file that this process alone has locked; None if another one has."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the last rank of another job has just removed the folder
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == os.stat(folder / name).st_ino:
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except FileNotFoundError:
            pass  # it was removed before we had the lock
        os.close(handle)


def _remove_stale(root: Path) -> None:
    """Remove what jobs left that were killed before all their ranks were connected."""
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < STALE_S:
                continue
            for lock in folder.glob("*.lock"):
                handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                    (folder / lock.stem).unlink(missing_ok=True)
                    lock.unlink()
                finally:
                    os.close(handle)
            folder.rmdir()
