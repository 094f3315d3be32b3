# SPDX-License-Identifier: Apache-2.0
"""Built-in strategies, rules, clusters and faults, found by name from any working folder."""

from __future__ import annotations

from pathlib import Path

from sporeloom.core.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).resolve().parents[2] / "parallel_configs"
"""Their folder: next to the package, in the repository and where it is installed."""
RULES, CLUSTERS, FAULTS = "rules", "clusters", "faults"
DECODER, EXPERTS = "decoder", "experts"
"""The rules of the model families, and of those with experts."""


def shipped_or_file(path: str | Path, kind: str = "") -> Path:
    """Find the file of `path`: a file, or a built-in one by its bare name (no folder, no .yaml).

    `kind`: RULES, CLUSTERS or FAULTS; strategies without.

    Raises:
        ConfigError: there is no file of that name, here or with the package.
    """
    path, names = Path(path), shipped_names(kind)
    if path.suffix in (".yaml", ".yml") or len(path.parts) != 1 or (path.exists() and path.name not in names):
        return path
    if path.name in names:
        return FOLDER / kind / f"{path.name}.yaml"
    what = kind.removesuffix("s") or "strategy"
    raise ConfigError(
        f"{path}: there is no such file, and no built-in {what} of that name; "
        + ("`sporeloom plan list` lists them" if not kind else f"there are {', '.join(names)}")
        + did_you_mean(path.name, names)
    )


def name_of(path: Path, kind: str) -> str | None:
    """Name of a built-in file; None for others."""
    return path.stem if path.resolve().parent == FOLDER / kind else None


def shipped_names(kind: str = "") -> list[str]:
    """List the names of all strategies, or of the files of a kind."""
    return sorted(path.stem for path in (FOLDER / kind).glob("*.yaml"))
