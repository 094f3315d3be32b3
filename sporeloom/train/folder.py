# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: a new one by default, an earlier one with --resume, never another run's without
--overwrite."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import TypeVar

from sporeloom.core.errors import ConfigError
from sporeloom.core.log import milestone
from sporeloom.runtime.environment import is_first_process
from sporeloom.train.flags import DEFAULT_FOLDER, RunFlags

Config = TypeVar("Config", bound=RunFlags)

LATEST = DEFAULT_FOLDER.parent / "latest"
"""Symbolic link to the newest default folder."""
OWN = (
    "checkpoints",
    "checkpoint",
    "best_checkpoint",
    "ema_checkpoint",
    "config.json",
    "metrics.jsonl",
    "summary.json",
    "history.json",
    "audit.jsonl",
    "tensorboard",
    "samples.jsonl",
    "profile.json",
    "profile",
    ".profile_parts",
    "reference.npy",
    "reference-*.npy",
)
"""Patterns of the files that a run writes to its folder, except logs and data that it can generate again."""
BY_DEFAULT = re.compile(r"\d{8}-\d{6}-.+")


def settled(config: Config, name: str, resume: bool | Path) -> Config:
    """`config` with the folder it stands for. Of a job that others have launched the first process finds a new one; the
    others keep the placeholder and ask it (`start`).

    Args:
        name: of the run, for a new folder.
        resume: as the command line says it.

    Raises:
        ConfigError: there is no run to resume, or two are named.
    """
    given = config.output_dir
    if isinstance(resume, Path):
        folder = resume.resolve() if resume.is_symlink() else resume
        if given not in (DEFAULT_FOLDER, resume):
            raise ConfigError(f"--resume {resume} and --output-dir {given} name two folders; leave one out")
        return dataclasses.replace(config, output_dir=folder)
    if given != DEFAULT_FOLDER:
        return config
    if resume:
        if not LATEST.is_dir():
            raise ConfigError(f"--resume: {LATEST} is not there; name the run's folder: --resume PATH")
        return dataclasses.replace(config, output_dir=_followed(LATEST))
    return dataclasses.replace(config, output_dir=_new(name)) if is_first_process() else config


def _followed(link: Path) -> Path:
    target = Path(os.readlink(link)) if link.is_symlink() else link
    return target if target.is_absolute() or not link.is_symlink() else link.parent / target


def _new(name: str) -> Path:
    """Create a folder that no run has."""
    words = re.sub(r"[^\w.]+", "-", name).strip("-.").lower() or "run"
    path = DEFAULT_FOLDER.parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{words}"
    number = 2
    while path.exists():
        path = path.with_name(f"{path.name.removesuffix(f'-{number - 1}')}-{number}")
        number += 1
    return path


def earlier_run(folder: Path) -> list[str]:
    """List the files that an earlier run left in the folder."""
    if not os.path.isdir(folder):  # False where Path.is_dir would raise
        return []
    return [name for pattern in OWN for name in sorted(glob(pattern, root_dir=folder))]


def folder_problems(config: RunFlags, reads: Iterator[Path]) -> Iterator[str]:
    """Refuse a folder whose earlier run would be lost. `reads`: the inputs of the run."""
    folder = config.output_dir
    if not (held := earlier_run(folder)):
        return
    if not config.overwrite:
        yield (
            f"--output-dir {folder}: contains {held[0]} of an earlier run; continue it with --resume, or give "
            "another --output-dir, or replace it with --overwrite"
        )
        return
    for path in reads:
        for name in held:
            if path.resolve().is_relative_to((folder / name).resolve()):
                yield f"--output-dir {folder}: --overwrite would remove {path}, which the run reads"


def clear(folder: Path) -> None:
    """Remove an earlier run that is replaced; other files stay."""
    for name in earlier_run(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def point_to(folder: Path) -> None:
    """Let `out/latest` point to `folder`, if that is a default folder."""
    if folder.parent != DEFAULT_FOLDER.parent or not BY_DEFAULT.fullmatch(folder.name):
        return
    if LATEST.exists() and not LATEST.is_symlink():
        milestone(f"{LATEST} is there and no link: it stays; this run is in {folder}")
        return
    link = LATEST.with_name(f".{LATEST.name}.{os.getpid()}")
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(LATEST)
    except OSError as error:  # a file system without links
        milestone(f"{LATEST} cannot be made: {error.strerror}; this run is in {folder}")
