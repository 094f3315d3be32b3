# SPDX-License-Identifier: Apache-2.0
"""Train the tokenizer of a model family on a corpus of any size; the same file on each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sporeloom.core.errors import ConfigError, Problems
from sporeloom.core.files import write_atomically
from sporeloom.core.log import milestone
from sporeloom.core.scratch import scratch_folder
from sporeloom.data.corpus import CorpusReader
from sporeloom.data.passages import MAX_PASSAGES, sample_passages
from sporeloom.data.sources import DocumentSource
from sporeloom.data.tokenizer import open_tokenizer
from sporeloom.models.family import family_module

Kind = Literal["unigram", "bpe", "byte-level-bpe"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BYTE_LEVEL: Kind = "byte-level-bpe"


@dataclass(frozen=True)
class TokenizerJob:
    """Input and settings of a training."""

    source: DocumentSource
    family: str
    vocab_size: int
    kind: Kind | None = None
    """None: the family's."""
    max_passages: int | None = None
    """None: MAX_PASSAGES where the trainer holds text, all of the corpus where it counts words."""
    seed: int = 1


def train_tokenizer(job: TokenizerJob, out: Path) -> dict[str, Any]:
    """Write a tokenizer, which appears when it is complete. Returns the report.

    Raises:
        ConfigError: a kind or vocabulary that the family has not, an unreadable corpus or one without text, or one whose
            text does not fill the vocabulary.
    """
    kind = _checked_kind(job, out)
    max_passages = job.max_passages or (None if kind == BYTE_LEVEL else MAX_PASSAGES)
    reader = CorpusReader(job.source)
    report: dict[str, Any] = {}
    if max_passages is None:
        first: Iterable[str] = reader

        def texts() -> Iterable[str]:
            return CorpusReader(job.source)

    else:
        sample = sample_passages(reader, max_passages, job.seed)
        milestone(f"training on {sample.num_chosen:,} of {sample.num_passages:,} passages")
        report = {"passages": sample.num_passages, "trained_passages": sample.num_chosen}
        first = sample.texts

        def texts() -> Iterable[str]:
            return sample.texts

    train = family_module(job.family, "tokenizer").train_tokenizer
    content: bytes = train(first, job.vocab_size, kind)
    if (size := vocab_size_of(job.family, content, out.suffix)) < job.vocab_size:

        def size_for(vocab_size: int) -> int:
            return vocab_size_of(job.family, train(texts(), vocab_size, kind), out.suffix)

        raise ConfigError(_too_large(job.vocab_size, size, size_for))
    write_atomically(out, lambda partial: partial.write_bytes(content))
    return {"kind": kind, "vocab_size": size, **reader.report(), **report}


def _checked_kind(job: TokenizerJob, out: Path) -> Kind:
    """Kind of the tokenizer.

    Raises:
        ConfigError: the family has no such kind, its smallest vocabulary is larger, or the file's name does not end as
            that kind's.
    """
    module, problems = family_module(job.family, "tokenizer"), Problems()
    kind: Kind = job.kind or module.TOKENIZER_KINDS[0]
    if kind not in module.TOKENIZER_KINDS:
        known = " or ".join(module.TOKENIZER_KINDS)
        problems.append(f"--kind {kind}: {job.family} takes {known}; choose one of them, or another --model")
        kind = module.TOKENIZER_KINDS[0]
    if job.vocab_size < module.MIN_VOCAB_SIZE:
        problems.append(
            f"--vocab-size {job.vocab_size}: too small for the special tokens, bytes and characters of {job.family}; give "
            f"{module.MIN_VOCAB_SIZE} or more"
        )
    suffix = ".json" if kind == BYTE_LEVEL else ".model"
    if out.suffix != suffix:
        problems.append(f"--out {out}: the name of a {kind} tokenizer of {job.family} ends in {suffix}")
    problems.raise_if_any()
    return kind


def vocab_size_of(family: str, content: bytes, suffix: str) -> int:
    """Number of tokens of a tokenizer file."""
    with scratch_folder() as folder:
        path = folder / f"tokenizer{suffix}"
        path.write_bytes(content)
        return open_tokenizer(family, path).vocab_size


def _too_large(vocab_size: int, size: int, size_for: Callable[[int], int]) -> str:
    """Message about a vocabulary of which the texts fill only `size`. The size it recommends has been tried."""
    text, fits = f"--vocab-size {vocab_size}: these texts make at most {size} tokens", size
    try:
        while (tried := size_for(fits)) < fits:
            fits = tried
    except ConfigError:
        return f"{text}; give more text"
    less = ", and fewer in a smaller vocabulary, which leaves rare characters out" if fits < size else ""
    return f"{text}{less}; give --vocab-size {fits}, or more text"
