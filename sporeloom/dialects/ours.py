# SPDX-License-Identifier: Apache-2.0
"""This package's strategy files, with the flags of tools/train.py in a comment."""

from __future__ import annotations

from pathlib import Path

from sporeloom.dialects.settings import Note, Settings
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.text import flags_comment, strategy_text


def read(path: Path, known: Settings) -> tuple[Settings, list[Note]]:
    """Read a strategy file; `known` has the settings that it does not."""
    strategy = load_strategy(path)
    notes = [Note(key, f"{path}:{line}", "same") for key, line in strategy.lines.items() if "." not in key]
    return Settings(strategy, known.train, known.num_layers), notes


def write(settings: Settings, rules: str) -> tuple[str, list[Note]]:
    """Format a strategy file that names the rules file `rules`."""
    return strategy_text(settings.strategy, rules, [flags_comment(settings.train)] if settings.train else []), []
