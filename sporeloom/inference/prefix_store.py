# SPDX-License-Identifier: Apache-2.0
"""Blocks of the prefix cache on disk, which outlive the process.

A file holds one block. Its name is the hash of everything that determines the block's bits: the computation, the requests
that may use it, and all tokens up to its end. So blocks of other models or versions are never found, and a file that is
damaged, or that other users could have written, is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from sporeloom import __version__
from sporeloom.core.files import read_private
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import split_lines
from sporeloom.core.log import LogBudget, counted, milestone
from sporeloom.inference.kernels import kernel_library, num_threads
from sporeloom.inference.model import CACHE
from sporeloom.models.family import sources_hash

FORMAT = b"sporeloom-prefix-block 1\n"
NAME = re.compile(r"([0-9a-f]{64})\.block")
PARTIAL = re.compile(r"\.[0-9a-f]{64}\.partial")
MAX_WAITING = 64
"""Number of blocks that wait to be written; further ones that leave the memory are lost."""

Numbers = Sequence[NDArray[Any]]


class BlockStore:
    """A folder of blocks, the ones that were used last. One process at a time may have it.

    `load`, `save` and `use` are called by one thread; another one writes.

    Args:
        max_bytes: of all files.
        computation: hash of what all blocks depend on (`computation_hash`).
        owner_key: identity of requests that may use a block, the same in each process; None: their blocks are not stored.
        like: a block, for the shapes and number types.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        computation: str,
        owner_key: Callable[[Hashable], str | None],
        like: Numbers,
    ):
        self.folder, self.max_bytes = folder, max_bytes
        self._computation, self._owner_key = computation, owner_key
        self._like = [(each.shape, each.dtype) for each in like]
        self._log, self._lock = LogBudget(), threading.Lock()
        self._roots: dict[Hashable, bytes | None] = {}
        self._sizes, self._total = OrderedDict[bytes, int](), 0  # the one that was used longest ago first
        self._queue: queue.Queue[tuple[bytes, Numbers] | None] = queue.Queue(MAX_WAITING)
        self._can_write = True
        self.num_loaded = 0
        """Number of blocks that were read."""
        self._scan()
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()

    @property
    def num_blocks(self) -> int:
        """Number of blocks that can be read."""
        with self._lock:
            return len(self._sizes)

    def root(self, owner: Hashable) -> bytes | None:
        """The hash that those of an owner's first blocks continue; None: they are not stored."""
        if owner not in self._roots:
            key = self._owner_key(owner)
            text = json_text([self._computation, key])
            self._roots[owner] = None if key is None else hashlib.sha256(text.encode()).digest()
        return self._roots[owner]

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The name of a block, from that of the block before it or the owner's root."""
        return hashlib.sha256(parent + np.asarray(tokens, "<i8").tobytes()).digest()

    def load(self, name: bytes) -> Numbers | None:
        """Read a block; None: it is not there, or cannot be used."""
        with self._lock:
            if name not in self._sizes:
                return None
        path, problem = self._path(name), ""
        try:
            numbers = self._parse(name, read_private(path))
            self.use(name)
            self.num_loaded += 1
            return numbers
        except FileNotFoundError:
            problem = "it was removed"
        except OSError as error:
            problem = error.strerror or str(error)
        except ValueError as error:
            problem = str(error)
        with self._lock:
            self._total -= self._sizes.pop(name, 0)
        self._log.log("unusable", f"{path}: not used, but recomputed: {problem}")
        return None

    def save(self, name: bytes, numbers: Numbers) -> None:
        """Write a block soon, unless it is there."""
        with self._lock:
            if name in self._sizes or not self._can_write:
                return
        try:
            self._queue.put_nowait((name, numbers))
        except queue.Full:
            self._log.log(
                "full", f"{self.folder}: blocks leave the memory faster than they can be written; some are lost"
            )

    def use(self, name: bytes) -> None:
        """Note that a block was used."""
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)

    def close(self, blocks: Iterable[tuple[bytes, Numbers]]) -> None:
        """Write these blocks, too, the one that was used longest ago first, and end."""
        for name, numbers in blocks:
            with self._lock:
                is_there = name in self._sizes
            if is_there:
                self.use(name)
            elif self._can_write:
                self._queue.put((name, numbers))
        self._queue.put(None)
        self._writer.join()
        now = time.time_ns() - len(self._sizes)
        for place, name in enumerate(self._sizes):  # the order of use for the next process
            try:
                os.utime(self._path(name), ns=(now + place, now + place))
            except OSError:
                continue
        milestone(f"{self.folder}: {self._summary()} kept")

    def _summary(self) -> str:
        return f"{counted(len(self._sizes), 'block', 'blocks')} of prompts, {self._total / 1e6:,.1f} MB,"

    def _path(self, name: bytes) -> Path:
        return self.folder / f"{name.hex()}.block"

    def _scan(self) -> None:
        """Find the blocks of earlier processes."""
        found, others = [], 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    is_file = entry.is_file(follow_symlinks=False)
                    if is_file and (match := NAME.fullmatch(entry.name)):
                        about = entry.stat(follow_symlinks=False)
                        found.append((about.st_mtime_ns, bytes.fromhex(match[1]), about.st_size))
                    elif is_file and PARTIAL.fullmatch(entry.name):  # of a process that was killed
                        os.unlink(entry.path)
                    elif NAME.fullmatch(entry.name):
                        self._log.log("irregular", f"{entry.path}: not used, but recomputed: not a regular file")
                    elif not entry.name.startswith("."):
                        others += 1
                except OSError as error:
                    self._log.log("unreadable", f"{entry.path}: ignored: {error.strerror}")
        self._sizes.update((name, size) for _, name, size in sorted(found))
        self._total = sum(self._sizes.values())
        self._remove_oldest()
        milestone(f"{self.folder}: {self._summary()} found")
        if others:
            milestone(f"{self.folder}: {counted(others, 'file', 'files')} of other kinds ignored")

    def _remove_oldest(self) -> None:
        while self._total > self.max_bytes:
            name, size = self._sizes.popitem(last=False)
            self._total -= size
            try:
                self._path(name).unlink(missing_ok=True)
            except OSError as error:
                self._log.log("unremovable", f"{self._path(name)}: cannot be removed: {error.strerror}")

    def _write_all(self) -> None:
        while item := self._queue.get():
            if not self._can_write:
                continue
            try:
                self._write(*item)
            except OSError as error:
                self._can_write = False
                milestone(f"{self.folder}: no more blocks are written: {error.strerror}")

    def _write(self, name: bytes, numbers: Numbers) -> None:
        head = {"name": name.hex(), "arrays": [[list(each.shape), each.dtype.str] for each in numbers]}
        body = json_text(head).encode() + b"\n" + b"".join(each.tobytes() for each in numbers)
        content = FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        if len(content) > self.max_bytes:
            return
        partial = self.folder / f".{name.hex()}.partial"
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(content)
            partial.replace(self._path(name))  # not flushed: after a power cut its hash may differ
        finally:
            partial.unlink(missing_ok=True)
        with self._lock:
            self._total += len(content) - self._sizes.pop(name, 0)
            self._sizes[name] = len(content)
            self._remove_oldest()

    def _parse(self, name: bytes, content: bytes) -> Numbers:
        """Raises:
        ValueError: not the block of this name, as it was written.
        """
        if not content.startswith(FORMAT):
            raise ValueError("not a block of this version")
        digest, _, body = content[len(FORMAT) :].partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("its checksum differs")
        line, _, raw = body.partition(b"\n")
        head = json.loads(line)
        arrays = [[list(shape), dtype.str] for shape, dtype in self._like]
        if head.get("name") != name.hex() or head.get("arrays") != arrays:
            raise ValueError("it is another block")
        found, start = [], 0
        for shape, dtype in self._like:
            stop = start + int(np.prod(shape)) * dtype.itemsize
            found.append(np.frombuffer(raw[start:stop], dtype).reshape(shape))
            start = stop
        return found


def computation_hash(net: nn.Cell, more: Mapping[str, Any]) -> str:
    """Hash what the numbers of a network on one CPU depend on besides tokens and adapters: its weights, kernels, machine and
    versions, and `more`. To be called before a graph is compiled."""
    digest = hashlib.sha256()
    for parameter in net.get_parameters():
        if CACHE not in parameter.name:
            value = np.ascontiguousarray(parameter.asnumpy())
            digest.update(f"{parameter.name} {value.dtype} {value.shape}\n".encode())
            digest.update(value.reshape(-1).view(np.uint8).data)
    library = kernel_library() if net.num_kernels else None
    about = {
        "flags": sorted(more.items()),
        "weights": digest.hexdigest(),
        "kernels": [net.num_kernels, library.stem if library else ""],
        "threads": num_threads(),
        "cpu": _cpu(),
        "versions": [__version__, ms.__version__, np.__version__, sources_hash()],
    }
    return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()


def _cpu() -> str:
    """Kind and instruction sets of this machine's processor."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in split_lines(text) if line.startswith(kinds)}))
