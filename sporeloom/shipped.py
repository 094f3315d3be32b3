# SPDX-License-Identifier: Apache-2.0
"""Strategies, rules and clusters that come with the package, found by their names from any working folder."""

from __future__ import annotations

from pathlib import Path

from sporeloom.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).resolve().parents[1] / "parallel_configs"
"""Beside the package, in the repository and where it is installed."""
RULES, CLUSTERS = "rules", "clusters"
DECODER, EXPERTS = "decoder", "experts"
"""The rules of our own models, and of those with experts."""


def shipped_or_file(path: str | Path, kind: str = "") -> Path:
    """What `path` names: a file, or by a bare name (no folder, no .yaml) one of ours.

    `kind`: RULES or CLUSTERS; strategies without.

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
        f"{path}: there is no such file, and no {what} of that name is shipped; "
        + ("`sporeloom plan list` lists them" if not kind else f"there are {', '.join(names)}")
        + did_you_mean(path.name, names)
    )


def name_of(path: Path, kind: str) -> str | None:
    """The name of a file that is shipped; None of others."""
    return path.stem if path.resolve().parent == FOLDER / kind else None


def shipped_names(kind: str = "") -> list[str]:
    """Names of all strategies, or of the files of a kind."""
    return sorted(path.stem for path in (FOLDER / kind).glob("*.yaml"))
