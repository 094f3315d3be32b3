# SPDX-License-Identifier: Apache-2.0
"""Paths of documents: files and folders, or objects of a store that fsspec knows, as s3://bucket/texts.

Objects are paths, too (universal_pathlib): readers of documents treat them as files.
"""

from __future__ import annotations

import io
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import open_regular
from sporeloom.core.lines import first_line

BUFFER_BYTES = 1 << 20


if TYPE_CHECKING:
    DocumentPath = Path
else:

    class DocumentPath:
        """A file or folder by its name, an object or a folder of objects by its URL."""

        def __new__(cls, text: str) -> Path:
            """Raises:
            ConfigError: what reads that store is not installed, or there is no such kind of store.
            """
            return open_url(text) if "://" in text else Path(text)


def open_url(text: str) -> Any:
    """Open the path of a URL.

    Raises:
        ConfigError: what reads that store is not installed, or there is no such kind of store.
    """
    try:
        open_path = import_module("upath").UPath
    except ModuleNotFoundError:
        raise ConfigError(f"{text}: object storage needs universal_pathlib: pip install -e '.[data]'") from None
    try:
        path = open_path(text)
        path.fs  # noqa: B018  # opens the store
    except (ImportError, ValueError) as error:  # a package of its own, as s3fs; a scheme that nobody knows
        raise ConfigError(f"{text}: {first_line(error)}") from None
    except Exception as error:  # errors of stores about wrong settings
        raise ConfigError(f"{text}: cannot be opened: {type(error).__name__}: {error}") from None
    return path


def open_document(path: Path) -> IO[bytes]:
    """Open a file or object to read from; objects support all that files do.

    Raises:
        OSError: as `open_regular`.
    """
    if isinstance(path, Path):
        return open_regular(path)
    return io.BufferedReader(path.open("rb"), BUFFER_BYTES)


def stamp(path: Path) -> tuple[str, int, str | int]:
    """Name, size, and a value that changes with the content of a file, or of an object."""
    size, store = path.stat().st_size, getattr(path, "fs", None)
    return str(path), size, path.stat().st_mtime_ns if store is None else store.ukey(path.path)  # type: ignore[attr-defined]
