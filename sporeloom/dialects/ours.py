# SPDX-License-Identifier: Apache-2.0
"""Our own strategy file, with the flags of tools/train.py in a comment."""

from __future__ import annotations

from pathlib import Path

from sporeloom.dialects.settings import Note, Settings
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.text import flags_comment, strategy_text


def read(path: Path, known: Settings) -> tuple[Settings, list[Note]]:
    """A strategy file; `known` has what it does not say."""
    strategy = load_strategy(path)
    notes = [Note(key, f"{path}:{line}", "same") for key, line in strategy.lines.items() if "." not in key]
    return Settings(strategy, known.train, known.num_layers), notes


def write(settings: Settings, rules: str) -> tuple[str, list[Note]]:
    """A strategy file that names the rules file `rules`."""
    return strategy_text(settings.strategy, rules, [flags_comment(settings.train)] if settings.train else []), []
