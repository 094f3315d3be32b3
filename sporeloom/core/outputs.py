# SPDX-License-Identifier: Apache-2.0
"""Outputs of commands: nothing that exists is replaced without --overwrite, and then only by its complete
successor."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sporeloom.core.errors import Problems
from sporeloom.core.files import REPLACED, left, own_name
from sporeloom.core.log import milestone
from sporeloom.core.numbers import as_flag

OUTPUT = "output"
"""Key of a field's metadata: it names a file or folder that the verb writes."""


def outputs(config: Any) -> Iterator[tuple[str, Path]]:
    """List (flag, path) of everything that a command of this configuration writes on this machine."""
    for field in dataclasses.fields(config):
        path = getattr(config, field.name)
        if OUTPUT not in field.metadata or path is None:
            continue
        if not isinstance(path, Path):  # of an object store, which `data.staging` asks
            if "file" not in path.fs.protocol:
                continue
            path = Path(path.path)
        name = field.name.rstrip("s").upper() if "positional" in field.metadata else as_flag(field.name)
        yield name, path


def is_taken(path: Path) -> bool:
    """Whether data would be lost if `path` were written; an empty folder is none."""
    if not os.path.lexists(path):  # False where Path.exists would raise: names that are too long
        return False
    return path.is_symlink() or not path.is_dir() or any(path.iterdir())


def output_problems(config: Any) -> Iterator[str]:
    """List outputs that exist and would be replaced without --overwrite, or cannot be replaced."""
    if (os.environ.get("RANK_ID") or "0") != "0":
        return  # the first process of a job looks; it may have begun to write
    found = list(outputs(config))
    for name, path in found:
        if not is_taken(path):
            continue
        if not config.overwrite:
            yield f"{name} {path}: is there already; remove it or give another name, or replace it with --overwrite"
        elif why := _holds_more(config, path):
            yield f"{name} {path}: --overwrite would remove {why}; give another name"


def _holds_more(config: Any, output: Path) -> str | None:
    """Name what else would be deleted with `output`: the working folder, or an input."""
    if Path.cwd().is_relative_to(output.resolve()):
        return "the working folder"
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for path in value if isinstance(value, tuple) else (value,):
            is_read = isinstance(path, Path) and OUTPUT not in field.metadata
            if is_read and path.exists() and path.resolve().is_relative_to(output.resolve()):
                return f"{path}, which is read"
    return None


@contextlib.contextmanager
def replacing(config: Any) -> Iterator[None]:
    """Move away what --overwrite replaces until its successor is complete; after an error, move it back.

    Raises:
        ConfigError: a call that was killed had set aside what is not to be replaced; it is back.
    """
    for _, path in outputs(config):
        if not is_taken(path):
            for aside in (path.with_name(f".{path.name}{REPLACED}"), *left(path, REPLACED)):
                if os.path.lexists(aside):
                    _remove(path)
                    aside.rename(path)
                    milestone(f"{path}: put back, after a call that was killed while it replaced it")
                    break
    Problems(output_problems(config)).raise_if_any()
    moved = []
    try:
        for _, path in outputs(config):
            if config.overwrite and is_taken(path):
                path.rename(aside := own_name(path, REPLACED))
                moved.append((path, aside))
        yield
    except BaseException:
        for path, aside in moved:
            _remove(path)
            aside.rename(path)
        raise
    for path, aside in moved:
        if not is_taken(path):  # the verb wrote nothing
            aside.rename(path)
            continue
        for each in (
            aside,
            *left(path, REPLACED),
        ):  # the last of calls that were killed before their new output was complete
            _remove(each)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
