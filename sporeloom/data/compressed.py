# SPDX-License-Identifier: Apache-2.0
"""Read compressed files: gzip, zstd, bzip2 and xz, one frame (member, stream) or several.

The libraries' own readers take a frame that was cut off for the end of the file, or give nothing of what stands before a
damaged end, and make of little as much as it says at once.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from sporeloom.core.errors import ConfigError

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
READ_BYTES, FEED_BYTES = 1 << 17, 1 << 10
"""Number of bytes that are read and decompressed at once: the result is in memory, at most 32 MB of zstd."""
WINDOW_BYTES, MAX_WINDOW_BYTES = 1 << 27, 1 << 31
"""Window memory of zstd and xz, unless documents may be longer; and the maximum that zstd knows."""
XZ_OVERHEAD_BYTES = 1 << 22
"""Memory of the decoder, beyond the window."""


class Frames(io.RawIOBase):
    """The decompressed bytes of a file. They end where the file does, or at a damage that cannot be skipped:
    `problem` gives the reason.

    Args:
        make: makes a decompressor of one frame.
        failures: what that raises.
        has_padding: zeros may stand behind a frame.
    """

    def __init__(self, file: IO[bytes], make: Callable[[], Any], failures: type[Exception], has_padding: bool):
        self.file, self.make, self.failures, self.has_padding = file, make, failures, has_padding
        self.problem = ""
        self._frame: Any = None
        self._begin = 0  # of the frame in the file
        self._given = 0  # of it to the decompressor
        self._chunk = b""
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting and not self.problem and self._take_chunk():
            self._waiting = memoryview(self._decompressed())
        count = min(len(buffer), len(self._waiting))
        buffer[:count], self._waiting = self._waiting[:count], self._waiting[count:]
        return count

    def _take_chunk(self) -> bool:
        """Read more, and begin a frame where one ended; False at the end of the file."""
        while True:
            self._chunk = self._chunk or self.file.read(READ_BYTES)
            if self._frame is None and self.has_padding and self._begin:
                stripped = self._chunk.lstrip(b"\0")
                self._begin += len(self._chunk) - len(stripped)
                if self._chunk and not stripped:
                    self._chunk = b""
                    continue
                self._chunk = stripped
            break
        if not self._chunk:
            self.problem = "the file was cut off" if self._frame is not None else ""
            return False
        if self._frame is None:
            self._frame, self._given = self.make(), 0
        return True

    def _decompressed(self) -> bytes:
        """Decompress the next bytes of the chunk."""
        fed, self._chunk = self._chunk[:FEED_BYTES], self._chunk[FEED_BYTES:]
        try:
            made: bytes = self._frame.decompress(fed)
        except self.failures as error:
            self.problem = str(error)
            return self._before_the_damage(fed)
        self._given += len(fed)
        if self._frame.eof:
            rest = self._frame.unused_data
            self._begin += self._given - len(rest)
            self._chunk, self._frame = rest + self._chunk, None
        return made

    def _before_the_damage(self, fed: bytes) -> bytes:
        """Recover what precedes a damage: decompress the frame again, up to the damaged bytes, and then byte by
        byte."""
        again, given, made = self.make(), 0, b""
        self.file.seek(self._begin)
        while given < self._given:
            given += len(chunk := self.file.read(min(FEED_BYTES, self._given - given)))
            again.decompress(chunk)
        try:
            for place in range(len(fed)):
                made += again.decompress(fed[place : place + 1])
        except self.failures:
            pass
        return made


def open_frames(file: IO[bytes], path: Path, max_bytes: int) -> Frames | None:
    """Open a file, decompressed if its name says that it is compressed. `max_bytes`: of a document.

    Raises:
        ConfigError: zstandard is not installed.
    """
    window = min(max(WINDOW_BYTES, max_bytes), MAX_WINDOW_BYTES)
    if path.suffix == ".gz":
        return Frames(file, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error, has_padding=True)
    if path.suffix == ".bz2":
        return Frames(file, bz2.BZ2Decompressor, OSError, has_padding=False)
    if path.suffix == ".xz":
        memory = window + XZ_OVERHEAD_BYTES
        return Frames(file, lambda: lzma.LZMADecompressor(memlimit=memory), lzma.LZMAError, has_padding=True)
    if path.suffix == ".zst":
        zstandard = optional("zstandard", path)
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        return Frames(file, decompressor.decompressobj, zstandard.ZstdError, has_padding=False)
    return None


def optional(module: str, path: Path) -> Any:
    """Import a module that files of this kind need.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError:
        package = module.split(".")[0]
        raise ConfigError(f"{path}: {path.suffix} files need {package}: pip install -e '.[data]'") from None
