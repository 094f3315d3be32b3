# SPDX-License-Identifier: Apache-2.0
"""Short-lived files of running processes, in a folder nobody else may enter; the next process removes those of
killed ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.locks import try_lock

MAX_ROOT_BYTES = 60  # bytes: the kernel takes 107 for the path of a socket
STALE_S = 60.0
LOCK = ".lock"


def private_root(parent: Path | None = None) -> Path:
    """The private root folder of this user's processes, in the folder for temporary files or another.

    Raises:
        ConfigError: it is somebody else's, or others may enter it.
    """
    name = f"sporeloom-{os.getuid()}"
    root = Path(parent or tempfile.gettempdir(), name)
    if len(os.fsencode(root)) > MAX_ROOT_BYTES:
        root = Path("/tmp", name)
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{root}: must be a folder of user {os.getuid()} that nobody else may enter (mode 0700), because the processes "
            "of a job talk to each other there; remove it"
            + (", or set TMPDIR to another folder" if parent is None else "")
        )
    remove_stale(root)
    return root


def lock_in(folder: Path, name: str) -> int | None:
    """`try_lock` of a file in a folder of the private root, which is made."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the last of another job has just removed the folder
            return try_lock(folder / name)


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Create a folder of this process's own in `private_root`, removed in the end."""
    folder = private_root(parent) / f"{os.getpid()}-{time.monotonic_ns()}"
    handle = lock_in(folder, f"scratch{LOCK}")
    assert handle is not None, folder
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_stale(root: Path) -> None:
    """Remove the folders whose processes were all killed: nobody holds a lock in them any more."""
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < STALE_S:
                continue
            handles = [try_lock(lock) for lock in folder.glob(f"*{LOCK}")]
            if None not in handles:
                shutil.rmtree(folder)
            for handle in handles:
                if handle is not None:
                    os.close(handle)
