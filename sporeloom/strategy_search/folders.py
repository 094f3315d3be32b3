# SPDX-License-Identifier: Apache-2.0
"""Files of a search in its folder. Other files there belong to somebody else, and stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import remove

INPUTS = "inputs.json"
CANDIDATES, POINTS, REFUSED = "candidates", "points", "refused"
"""Folders of the simulated candidates, of the points of the front, and of those whose certificates are refused."""
STRATEGY, CERTIFICATE, RESULT, LOGS = "strategy.yaml", "certificate.json", "result.json", "logs"
OF_PROOF = (CERTIFICATE, "certificate.html", RESULT, ".proof-*")
"""Files of a proof, besides its logs."""


def check_folder(out: Path) -> None:
    """Check that a folder has a search, or nothing.

    Raises:
        ConfigError: it has other files.
    """
    names = sorted(path.name for path in out.glob("[!.]*")) if out.is_dir() else []
    if names and INPUTS not in names:
        shown = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
        raise ConfigError(f"--out {out}: has files ({shown}) but no search; name a new or an empty folder")


def _files(folder: Path, with_logs: bool, with_strategy: bool) -> Iterator[Path]:
    for pattern in (*OF_PROOF, *([LOGS] if with_logs else []), *([STRATEGY] if with_strategy else [])):
        yield from folder.glob(pattern)


def remove_proof(folder: Path, with_logs: bool) -> None:
    """Remove the files of a proof from the folder of a strategy."""
    for path in _files(folder, with_logs, with_strategy=False):
        remove(path)


def remove_strategy(folder: Path) -> None:
    """Remove the strategy and its proof, and the folder if nothing else is in it."""
    for path in _files(folder, with_logs=True, with_strategy=True):
        remove(path)
    with contextlib.suppress(OSError):
        folder.rmdir()


def move_strategy(folder: Path, target: Path) -> None:
    """Move the strategy and its proof to `target`, which has none; remove the folder if nothing else is in it."""
    target.mkdir(parents=True, exist_ok=True)
    for path in _files(folder, with_logs=True, with_strategy=True):
        path.rename(target / path.name)
    remove_strategy(folder)


def strategy_folders(out: Path, kind: str) -> list[Path]:
    """The folders of strategies that this search, or an earlier one with this folder, has written."""
    found = sorted(path.parent for path in (out / kind).glob(f"*/{STRATEGY}"))
    return [folder for folder in found if (out / CANDIDATES / f"{folder.name}.yaml").is_file()]
