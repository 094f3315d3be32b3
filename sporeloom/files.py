# SPDX-License-Identifier: Apache-2.0
"""Files one process of a job makes and all of them read."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WAIT_S = 3600.0


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file beside `path`, then give it its name: it is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """As `write_atomically`, for UTF-8 text."""

    def write(partial: Path) -> None:
        partial.write_text(text, encoding="utf-8")

    write_atomically(path, write)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the name of `folder`; an older one goes only when this one is complete."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cache_folder() -> Path:
    """Where this user's things lie that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sporeloom"


def unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, which need not exist yet; None if one can. Nothing of the attempt stays."""
    made: list[Path] = []
    try:
        for part in [*reversed(folder.parents), folder]:
            if not part.exists():
                part.mkdir(exist_ok=True)  # another process may have been faster
                made.append(part)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except (OSError, ValueError) as error:
        return f"{folder}: no file can be written there: {getattr(error, 'strerror', None) or error}"
    finally:
        for part in reversed(made):
            with contextlib.suppress(OSError):  # somebody has begun to use it
                part.rmdir()


def made_once(path: Path, is_maker: bool, make: Callable[[Path], object], timeout_s: float = WAIT_S) -> Path:
    """`path`, made by one process of the job while the others wait. Its name must say what is in it.

    `make` lets `path` appear when it is complete.

    Raises:
        TimeoutError: it did not appear in time.
    """
    if is_maker and not path.exists():
        make(path)
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not made within {timeout_s:.0f} s")
        time.sleep(0.1)
    return path
