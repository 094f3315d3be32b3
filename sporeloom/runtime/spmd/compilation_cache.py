# SPDX-License-Identifier: Apache-2.0
"""Compilation cache: graphs of one device on disk, which later runs with the same key load.

A file has a line that names the format, a line with the SHA-256 of the rest, a line of JSON (the key), and MindSpore's
MindIR. Files are written atomically. The least recently used are removed when the cache exceeds MAX_BYTES, damaged ones with
a message. Files that other users could have written are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore as ms

from sporeloom.core.files import cache_folder, read_private, write_atomically
from sporeloom.core.lines import first_line
from sporeloom.core.log import milestone
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.models.family import sources_hash
from sporeloom.strategy.config import Strategy

SWITCH = "SPORELOOM_CACHE"
"""Environment variable: 0 disables the cache; anything else is its folder."""
MAX_BYTES = 2 << 30
FORMAT = b"sporeloom-graph 1\n"
SUFFIX, LEFT_S = ".graph", 3600.0


def folder() -> Path:
    """The folder of the cache: in the user's cache directory unless `SPORELOOM_CACHE` names one."""
    if chosen := os.environ.get(SWITCH):
        return Path(chosen)
    return cache_folder() / "graphs"


def cached_model(key: Mapping[str, Any], make: Callable[[], mind_ir.ModelProto]) -> mind_ir.ModelProto:
    """The graph of one device for a key, from the cache; otherwise compiled by `make` and stored. It is equal for all ranks,
    meshes and strategies.

    `key`: everything that the graph depends on except for the versions of MindSpore and this package, which are added.
    """
    if os.environ.get(SWITCH) == "0":
        return make()
    text = json.dumps({**key, "mindspore": ms.__version__, "sources": sources_hash()}, sort_keys=True, default=str)
    path = folder() / (hashlib.sha256(text.encode()).hexdigest() + SUFFIX)
    if (found := _read(path)) is not None:
        return found
    model = make()
    body = json.dumps({"key": text}).encode() + b"\n" + model.SerializeToString()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, lambda partial: _write(partial, body))
        _remove_oldest()
    except OSError as error:
        milestone(f"the compiled graph is not kept: {error.filename or path}: {error.strerror}")
    return model


def strategy_key(strategy: Strategy) -> str:
    """A key of all settings of a strategy that a graph depends on, without its source file."""
    return repr(replace(strategy, source="", lines={}))


def clear() -> tuple[int, int]:
    """Remove all files. Returns their number and total size in bytes."""
    found = entries()
    for path, _, _ in found:
        path.unlink(missing_ok=True)
    return len(found), sum(size for _, _, size in found)


def entries() -> list[tuple[Path, float, int]]:
    """Files as (path, time of last use, bytes), oldest first."""
    found = []
    for path in folder().glob(f"*{SUFFIX}") if folder().is_dir() else ():
        try:
            status = path.stat()
        except OSError:
            continue  # another process has just removed it
        found.append((path, status.st_mtime, status.st_size))
    return sorted(found, key=lambda entry: entry[1])


def _write(path: Path, body: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def _read(path: Path) -> mind_ir.ModelProto | None:
    try:
        content = read_private(path)
        os.utime(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        milestone(f"the cached graph {path} is not used: {error.strerror}")
        return None
    try:
        name, digest, header, model = content.split(b"\n", 3)
        if name + b"\n" != FORMAT or hashlib.sha256(header + b"\n" + model).hexdigest().encode() != digest:
            raise ValueError("its content is not what was written")
        return mind_ir.ModelProto.FromString(model)
    except (ValueError, KeyError, TypeError) as error:
        milestone(f"dropped the cached graph {path}: {first_line(error)}")
        path.unlink(missing_ok=True)
        return None


def _remove_oldest() -> None:
    for path in folder().glob(f".*{SUFFIX}.*.partial"):  # left by processes that were killed while writing
        if time.time() - path.stat().st_mtime > LEFT_S:
            path.unlink(missing_ok=True)
    found = entries()
    total = sum(size for _, _, size in found)
    for path, _, size in found[:-1]:
        if total <= MAX_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
