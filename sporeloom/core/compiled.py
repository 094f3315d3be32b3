# SPDX-License-Identifier: Apache-2.0
"""Libraries in C, built once for each machine and compiler and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sporeloom.core.files import flush, partial_name, private_cache, read_private, remove
from sporeloom.core.lines import first_line, split_lines
from sporeloom.core.log import milestone

BUILD_S = 120.0


def c_compiler() -> str | None:
    """Path of the C compiler, $CC or cc; None if there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


def kept_or_built(compiler: str, source: Path, flags: Sequence[str], libraries: Sequence[str] = ()) -> Path:
    """The shared library of a C file, kept in a private folder of the cache.

    Its name ends with the hash of its content: one with another content is not used, but built again.

    Args:
        source: the file; it may include those next to it.
        libraries: flags of libraries that it is linked with.

    Raises:
        OSError: the folder or the compiler cannot be used.
        subprocess.SubprocessError: the compiler failed, or took longer than BUILD_S.
    """
    folder, fingerprint = private_cache(source.stem), _fingerprint(compiler, source, flags)
    for path in sorted(folder.glob(f"{fingerprint}-*.so")):
        try:
            if path.stem == _named(fingerprint, read_private(path)):
                return path
            why = "its content is not what was built"
        except OSError as error:
            why = str(error.strerror)
        milestone(f"{path}: {why}; building {source.name} again")
        remove(path)
    partial = partial_name(folder / fingerprint)
    try:
        _build([compiler, *flags, str(source), "-o", str(partial), *libraries])
        partial.chmod(0o700)
        flush(partial)
        path = folder / f"{_named(fingerprint, read_private(partial))}.so"
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def why_unusable(error: OSError | subprocess.SubprocessError) -> str:
    """One line about what prevented the use of a library."""
    said = getattr(error, "stderr", None) or str(error)
    if isinstance(error, OSError) and error.filename:
        said = f"{error.filename}: {error.strerror}"
    return first_line(said)


def _build(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)


def _named(fingerprint: str, content: bytes) -> str:
    return f"{fingerprint}-{hashlib.sha256(content).hexdigest()}"


def _fingerprint(compiler: str, source: Path, flags: Sequence[str]) -> str:
    """Identify everything that the library depends on; a home folder may be shared by different machines."""
    found = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if Path("/proc/cpuinfo").exists() else ""
    )
    cpu = next((line for line in split_lines(found) if line.startswith(("flags", "Features"))), platform.machine())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [path.read_text() for path in sorted(source.parent.glob("*.[ch]"))]
    return hashlib.sha256("\0".join([*texts, *flags, version, cpu]).encode()).hexdigest()[:32]
