# SPDX-License-Identifier: Apache-2.0
"""Files one process of a job makes and all of them read, and how a file that somebody names is opened."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

WAIT_S = 3600.0
_OTHER_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def check_regular(path: str | Path) -> None:
    """Make sure that a file has an end: a device may give bytes for ever, and a pipe keep its reader waiting as long.

    Raises:
        OSError: it is not there, or not a regular file.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        what = _OTHER_KINDS.get(kind, "something else")
        raise OSError(
            errno.EINVAL, f"it is {what}; a regular file is expected, so copy the content into one", str(path)
        )


def open_regular(path: Path) -> BinaryIO:
    """A file to read bytes from.

    Raises:
        OSError: as `check_regular`, or it cannot be read.
    """
    check_regular(path)
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a file.

    Raises:
        OSError: as `open_regular`, or more than `max_bytes`.
    """
    with open_regular(path) as file:
        try:
            content: bytes | None = file.read(-1 if max_bytes is None else max_bytes + 1)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    if content is None:  # of a log of the kernel's, which gives lines when there are any
        raise BlockingIOError(errno.EAGAIN, "it has nothing to read yet", str(path))
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than the {max_bytes:,} bytes that such a file may have", str(path))
    return content


def read_gzip(path: Path, max_bytes: int) -> bytes:
    """The content of a gzip file, of which little can make very much.

    Raises:
        OSError: as `read_bytes`, or not gzip.
        EOFError: it was cut off.
        zlib.error: it is damaged.
    """
    with open_regular(path) as file:
        content = gzip.GzipFile(fileobj=file).read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(
            errno.EFBIG, f"it unpacks to more than the {max_bytes:,} bytes that such a file may have", str(path)
        )
    return content


def read_utf8(path: Path, max_bytes: int | None = None) -> str:
    """The content of a UTF-8 file, as `read_bytes`.

    Raises:
        OSError: as there.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


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
