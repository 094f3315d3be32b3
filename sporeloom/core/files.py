# SPDX-License-Identifier: Apache-2.0
"""Files that one process of a job writes and all of them read, and safe opening of files that a user names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gzip
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

from sporeloom.core.processes import is_alive

WAIT_S = 3600.0
_OTHER_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def check_regular(path: str | Path) -> None:
    """Check that a file has an end: a device may give bytes for ever, and a pipe may block its reader as long.

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
    """Open a file to read bytes from.

    Raises:
        OSError: as `check_regular`, or it cannot be read.
    """
    check_regular(path)
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Read the content of a file.

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
    """Read the content of a gzip file, a small one of which can unpack to very much.

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
    """Read the content of a UTF-8 file, like `read_bytes`.

    Raises:
        OSError: as there.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


_AT_WORKING_FOLDER, _EXCHANGE = -100, 2
_rename_at = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file with `write` under a temporary name next to `path`, then rename it: it is complete or absent,
    also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_name(path)
    try:
        write(partial)
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Like `write_atomically`, for UTF-8 text."""

    def write(partial: Path) -> None:
        partial.write_text(text, encoding="utf-8")

    write_atomically(path, write)


PARTIAL, REPLACED = ".partial", ".replaced"


def own_name(path: Path, suffix: str) -> Path:
    """A hidden name next to `path` for this process alone, which says whose it was if that process is killed."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}{suffix}")


def partial_name(path: Path) -> Path:
    """A temporary name for what becomes `path`; what killed processes have left of it is removed."""
    for found in (*left(path, PARTIAL), own_name(path, PARTIAL)):
        remove(found)
    return own_name(path, PARTIAL)


def left(path: Path, suffix: str) -> list[Path]:
    """List the `own_name`s left by processes of this machine that have ended, the newest first."""
    form = re.compile(rf"\.{re.escape(path.name)}\.{_machine()}-(\d+){re.escape(suffix)}")
    with contextlib.suppress(OSError):  # no such folder
        found = [(form.fullmatch(name), path.with_name(name)) for name in os.listdir(path.parent)]
        ended = [each for match, each in found if match and not is_alive(int(match[1]))]
        return sorted(ended, key=lambda each: each.lstat().st_mtime, reverse=True)
    return []


@cache
def _machine() -> str:
    """Short name of this machine or container, within which process numbers are unique."""
    name = platform.node()
    with contextlib.suppress(OSError):
        name += os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(name.encode()):08x}"


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which then gets the name of `folder`; an older one is removed only when this one is
    complete."""
    recover_folder(folder)
    if folder.is_symlink():
        folder = folder.resolve()  # what it leads to is replaced, on that disk
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file, which no folder replaces; choose another name", str(folder))
    partial = partial_name(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a complete folder its final name; an older one of that name is removed last.

    Whenever the process is killed or fails, the older or the new one is whole under the name. Where a file system cannot
    exchange two names, the older one may be complete under another name in the same folder, until `recover_folder`.
    """
    flush_all(partial)
    if _exchange(partial, folder):
        replaced = partial
    else:
        replaced = _name_of_replaced(folder)
        _put_in_place(partial, folder, replaced)
    flush(folder.parent)
    remove(replaced)


def recover_folder(folder: Path) -> None:
    """Restore a folder whose replacement was killed between the removal of the old name and the new one's."""
    if folder.exists() or not folder.name:  # `.`, which has no name to lose
        return
    if own_name(folder, REPLACED).exists():  # it is about to be replaced here
        return
    for replaced in (_name_of_replaced(folder), *left(folder, REPLACED)):
        if replaced.exists():
            with contextlib.suppress(OSError):  # another process was faster, or may not
                replaced.rename(folder)
            return


def remove(path: Path) -> None:
    """Remove a file, a link or a folder if it exists; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder that others look for by its name: it is complete or absent at any time."""
    removed = folder.with_name(f".{folder.name}.removed")
    remove(removed)
    folder.rename(removed)
    remove(removed)


def flush_all(folder: Path) -> None:
    """`flush` a folder and everything in it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def flush(path: Path) -> None:
    """Make sure that a power cut cannot lose a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # folders of some file systems
            raise
    finally:
        os.close(handle)


def _name_of_replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{REPLACED}")


def _put_in_place(partial: Path, folder: Path, replaced: Path) -> None:
    """Give one folder the name of another, which is renamed to `replaced`."""
    for is_last in (False, True):
        if folder.exists():
            remove(replaced)  # older than what has the name
            folder.rename(replaced)
        try:
            partial.rename(folder)
            return
        except BaseException as error:
            recover_folder(folder)
            if is_last or not isinstance(error, OSError):  # once more where a reader has just recovered the older one
                raise


def _exchange(one: Path, other: Path) -> bool:
    """Whether two folders could be given each other's names, in one step."""
    if _rename_at is None or not other.is_dir():
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(_rename_at(_AT_WORKING_FOLDER, names[0], _AT_WORKING_FOLDER, names[1], _EXCHANGE) == 0)


def cache_folder() -> Path:
    """Folder of this user's files that can be generated again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sporeloom"


def private_cache(name: str) -> Path:
    """Open a folder of this user's cache that nobody else may enter: its contents are executed or trusted.

    One of this user's that others could write to is emptied, as they may have.

    Raises:
        OSError: it cannot be made, or is somebody else's.
    """
    folder = cache_folder() / name
    make_private(folder)
    return folder


def make_private(folder: Path) -> None:
    """`private_cache` for a folder at any path."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        whose = f"of user {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "not a folder"
        raise OSError(errno.EPERM, f"{whose}, must be a folder of user {os.getuid()} alone; remove it", str(folder))
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
        if stat.S_IMODE(found.st_mode) & 0o022:
            for path in folder.iterdir():
                remove(path)


def read_private(path: Path) -> bytes:
    """Read a file that only this user can have written.

    Raises:
        OSError: there is none; it is somebody else's, a link, or one that others may write to.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise OSError(errno.EPERM, f"not a file that user {os.getuid()} alone may write to", str(path))
        return file.read()


def unwritable(folder: Path) -> str | None:
    """Describe why no file can be created in `folder`, which need not exist yet; None if one can. The attempt
    leaves nothing."""
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
    """Let one process of the job make `path` while the others wait. Its name must identify its contents.

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
