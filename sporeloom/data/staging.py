# SPDX-License-Identifier: Apache-2.0
"""Outputs in object storage: made in a local folder first, and uploaded when they are complete."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.core.log import counted, milestone

Config = TypeVar("Config")
OUTPUTS = ("removed", "samples", "report", "out")
"""Fields of a configuration that name outputs; the last one marks completeness."""


@contextmanager
def staged(config: Config, scratch: Path) -> Iterator[Config]:
    """The configuration with a name in `scratch` for each output in a store; outputs made there are moved to the
    store when the block ends without an error.

    Raises:
        ConfigError: an output is there already, or cannot be written; then what was made stays in `scratch`.
    """
    moves, local = dict[str, tuple[Path, Any]](), dict[str, Path]()
    for name in OUTPUTS:
        target: Any = getattr(config, name, None)
        if target is None or isinstance(target, Path):
            continue
        protocols = target.fs.protocol
        if "file" in ((protocols,) if isinstance(protocols, str) else protocols):
            local[name] = Path(target.path)
            continue
        try:
            is_there = target.exists()
        except Exception as error:  # each store has its own kinds
            raise ConfigError(f"{target}: cannot be opened: {_told(error)}") from None
        if is_there and not config.overwrite:  # type: ignore[attr-defined]
            raise ConfigError(
                f"{target}: is there already; remove it or give another name, or replace it with --overwrite"
            )
        local[name] = scratch / f"{hashlib.sha256(str(target).encode()).hexdigest()[:8]}-{target.name}"
        moves[name] = local[name], target
    yield dataclasses.replace(cast("Any", config), **local)
    for path, target in moves.values():
        try:
            if target.exists():
                target.fs.rm(target.path, recursive=True)
            _move(path, target)
        except Exception as error:  # likewise
            left = ", ".join(str(path) for path, _ in moves.values() if path.exists())
            raise ConfigError(f"{target}: cannot be written: {_told(error)}; the output stays in {left}") from None


def _move(path: Path, target: Any) -> None:
    """Upload a file, or all files of a folder, the last one made at the end; then remove it here."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file)):
        place = target if file == path else target / file.relative_to(path).as_posix()
        place.fs.put_file(str(file), place.path)
    milestone(f"{target}: {counted(len(files), 'object', 'objects')} written")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error)) if str(error) else ''}"
