# SPDX-License-Identifier: Apache-2.0
"""hashes.json records a folder as it was written: a hash of every other file and of itself.
docs/reference/checkpoint_format.md

Of safetensors files it has the hash of the header; of their tensors the hashes that `sporeloom.checkpoint.content_hash`
makes, here or in the manifest of a training checkpoint, which may be checked in shares. Folders that others publish have no
such file and are read without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.reader import read_json

HASHES = "hashes.json"
FORMAT, VERSION = "sporeloom-hashes", 1
SELF = "sha256"
"""Key of the hash of the text before its line."""
TENSORS = ".safetensors"
BLOCK_BYTES = 1 << 20
SHOWN = 8
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors file's header, by its format."""
Entries = Mapping[str, Mapping[str, Any]]


def write_hashes(folder: Path, tensors: Callable[[Path], Mapping[str, str]] | None = None) -> None:
    """Record every file of a complete folder. `tensors`: gives the hashes of a safetensors file's tensors, where nothing
    else in the folder has them."""
    files: dict[str, dict[str, Any]] = {}
    for name in _names(folder):
        files[name] = {"bytes": (folder / name).stat().st_size, **_hash(folder / name)}
        if tensors and name.endswith(TENSORS):
            files[name]["tensors"] = dict(tensors(folder / name))
    content = _bytes({"format": FORMAT, "version": VERSION, "files": files})
    write_atomically(folder / HASHES, lambda path: path.write_bytes(content))


def read_hashes(folder: Path) -> Entries | None:
    """Read the hashes.json of a folder; None: it has none.

    Raises:
        ConfigError: it is not as it was written.
    """
    path = folder / HASHES
    if not path.is_file():
        return None
    try:
        values = read_json(path).mapping
        files, version = values.get("files"), values.get("version")
        if values.get("format") == FORMAT and isinstance(version, int) and version > VERSION:
            raise ConfigError(f"{path}: version {version}; this release reads version {VERSION}; use a newer one")
        values.pop(SELF, None)
        is_same = _bytes(values) == path.read_bytes()
    except ConfigError as error:
        raise ConfigError([*error.problems, f"{path}: {_advice(folder)}"]) from None
    if not is_same:
        raise ConfigError(f"{path}: not as it was written (its own hash differs): {_advice(folder)}")
    if not isinstance(files, dict) or not all(_is_entry(*item) for item in files.items()):
        raise ConfigError(f"{path}: not a list of hashes of the files of this folder: {_advice(folder)}")
    return files


def check_hashes(
    folder: Path, is_required: bool = False, unread: Collection[str] = (), but: str | None = None
) -> Entries | None:
    """Check everything in a folder that has hashes but the contents of tensors, and of the files `unread`, which are large.
    Returns the hashes.

    `but`: how the names end of files that are left out.

    Raises:
        ConfigError: every file that is missing or not as it was written, and what to do; no hashes where they are required.
    """
    files = read_hashes(folder)
    if files is None:
        if is_required:
            raise ConfigError(
                f"{folder / HASHES}: missing, so nothing says whether the other files are as they were written; restore it, "
                f"or if you trust them as they are: {command(folder)}"
            )
        return None
    checked = {name: entry for name, entry in files.items() if but is None or not name.endswith(but)}
    if problems := list(_problems(folder, checked, unread)):
        raise ConfigError([*problems[:SHOWN], f"{folder}: {_advice(folder)}"])
    return files


def without_hash(folder: Path) -> list[str]:
    """Files that were added to a folder later and have no hash."""
    files = read_hashes(folder)
    return [] if files is None else [name for name in _names(folder) if name not in files]


def check_file(path: Path) -> None:
    """`check_hashes` for one file that is named by itself, or for a folder.

    Raises:
        ConfigError: it lies in a folder whose hashes.json has another hash of it.
    """
    folder = path if path.is_dir() else path.parent
    if (folder / HASHES).is_file() and (files := read_hashes(folder)) is not None:
        wanted = files if path == folder else {name: entry for name, entry in files.items() if name == path.name}
        if problems := list(_problems(folder, wanted, ())):
            raise ConfigError([*problems, f"{folder}: {_advice(folder)}"])


def command(folder: Path) -> str:
    """The command that accepts a folder's files as they are now."""
    return f"sporeloom checkpoint-info {folder} --accept-changes"


def _advice(folder: Path) -> str:
    return f"restore it from a copy if it was damaged; if it was edited on purpose: {command(folder)}"


def _problems(folder: Path, files: Entries, unread: Collection[str]) -> Iterator[str]:
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if not path.is_file():
                yield f"{path}: not a file"
            elif size != entry["bytes"]:
                yield f"{path}: {size:,} bytes, written were {entry['bytes']:,}; it was cut off, overwritten or edited"
            elif name not in unread and any(entry[kind] != digest for kind, digest in _hash(path).items()):
                yield f"{path}: not as it was written (its hash differs)"
        except FileNotFoundError:
            yield f"{path}: missing"
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}"


def _hash(path: Path) -> dict[str, str]:
    """Hash a file, or the header of a safetensors file."""
    with path.open("rb") as file:
        if not path.name.endswith(TENSORS):
            digest = hashlib.sha256()
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
            return {SELF: digest.hexdigest()}
        start = file.read(8)
        length = min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)
        return {"header": hashlib.sha256(start + file.read(length)).hexdigest()}


def _is_entry(name: str, entry: Any) -> bool:
    """Whether an entry belongs to a file of the folder, or of a folder in it, and has a size and a hash."""
    parts = name.split("/")
    if any(part.startswith(".") or part == "" for part in parts) or "\0" in name or not isinstance(entry, dict):
        return False
    kinds, tensors = {name for name in entry if name != "tensors"}, entry.get("tensors", {})
    return (
        kinds in ({"bytes", SELF}, {"bytes", "header"})
        and type(entry["bytes"]) is int
        and isinstance(tensors, dict)
        and all(isinstance(value, str) for value in (*tensors.values(), *(entry[kind] for kind in kinds - {"bytes"})))
    )


def _names(folder: Path) -> list[str]:
    """List the files of a folder and its subfolders, without hidden ones."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(name.as_posix() for name in found if str(name) != HASHES and not name.name.startswith("."))


def _bytes(values: Mapping[str, Any]) -> bytes:
    """The text of the file: JSON with the hash of all that precedes it as the last value."""
    before = json_text(values, indent=1, ensure_ascii=False).removesuffix("\n}").encode("utf-8", "surrogatepass")
    return before + f',\n "{SELF}": "{hashlib.sha256(before).hexdigest()}"\n}}\n'.encode()
