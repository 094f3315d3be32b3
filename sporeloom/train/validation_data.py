# SPDX-License-Identifier: Apache-2.0
"""The validation sets that a run names: found before MindSpore is loaded, tokenized with the run's tokenizer later."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import made_once
from sporeloom.data.blend import BLENDS
from sporeloom.data.documents import read_documents
from sporeloom.data.sources import DocumentSource
from sporeloom.data.token_file import TokenFile, is_token_file
from sporeloom.data.tokenize import TokenizeJob, tokenize
from sporeloom.data.tokenizer import content_hash
from sporeloom.data.windows import Windows
from sporeloom.train.config import Run
from sporeloom.train.flags import ValidationFlags

NAME = re.compile(r"[A-Za-z0-9_.-]+")
FLAG = "--validation-data"


def named_paths(entries: Sequence[str]) -> dict[str, Path]:
    """Names and paths of validation sets.

    Raises:
        ConfigError: entries that are not NAME=PATH, or name a set twice.
    """
    found, problems = dict[str, Path](), []
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals or not path or not NAME.fullmatch(name):
            problems.append(
                f"{FLAG} {entry}: give NAME=PATH, as in town=town.txt, with letters, digits, _ . - in the name"
            )
        elif name in found:
            problems.append(f"{FLAG} {entry}: the name {name} is given twice; rename one")
        else:
            found[name] = Path(path)
    if problems:
        raise ConfigError(problems)
    return found


def check_text(path: Path) -> None:
    """Raises:
    ConfigError: it is neither a text nor a folder of token files.
    """
    if path.suffix in BLENDS:
        raise ConfigError(f"{FLAG} {path}: one dataset a set, not a blend; give each dataset a name of its own")
    if is_token_file(path):
        TokenFile(path)
    else:
        read_documents(path)


def validation_problems(config: ValidationFlags, check: Callable[[Path], object]) -> Iterator[str]:
    """Problems of the flags, and of the sets that they name, by a function that raises those of one."""
    problems = Problems()
    sets = problems.of(named_paths, config.validation_data) or {}
    for path in sets.values():
        problems.of(check, path)
    yield from problems
    needs = {
        "--validate-every": config.validate_every,
        "--early-stopping-patience": config.early_stopping_patience,
        "--keep-best": config.keep_best,
    }
    if not config.validation_data:
        yield from (f"{flag} needs validation sets: give {FLAG} NAME=PATH" for flag, value in needs.items() if value)
    if config.early_stopping_patience and not config.validate_every:
        yield "--early-stopping-patience counts validations while training: give --validate-every"


def open_sets(run: Run, config: ValidationFlags, tokenizer: Path, rank: int) -> Mapping[str, Windows]:
    """Open the validation sets; texts are tokenized first, by one process.

    Raises:
        ConfigError: tokens of another tokenizer or too few to predict one.
    """
    opened, problems = {}, Problems()
    for name, path in named_paths(config.validation_data).items():
        tokens = problems.of(_tokens, run, path, tokenizer, rank)
        if tokens is None:
            continue
        windows = Windows(tokens, run.seq_len, run.model.eod_id, run.model.loss_ignore_id)
        if not any((batch.loss_weights > 0).any() for batch in windows.batches(1)):
            problems.append(
                f"{FLAG} {name}={path}: holds no token to predict at --seq-len {run.seq_len}; give more text"
            )
        opened[name] = windows
    problems.raise_if_any()
    return opened


def _tokens(run: Run, path: Path, tokenizer: Path, rank: int) -> TokenFile:
    """Raises:
    ConfigError: token files that another tokenizer made.
    """
    if is_token_file(path):
        tokens = TokenFile(path)
        if tokens.info.tokenizer != content_hash(tokenizer):
            raise ConfigError(
                f"{FLAG} {path}: made with another tokenizer than the run's, {tokenizer}; tokenize it with that, or give text"
            )
        return tokens
    content = hashlib.sha256("\x00".join(read_documents(path)).encode())
    content.update(content_hash(tokenizer).encode())
    job = TokenizeJob(DocumentSource((path,)), run.family, tokenizer)
    folder = run.config.output_dir / "data" / f"tokens-{content.hexdigest()[:16]}"
    if rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
    return TokenFile(made_once(folder, rank == 0, lambda out: tokenize(job, out, workers=0, show_progress=False)))
