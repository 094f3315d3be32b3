# SPDX-License-Identifier: Apache-2.0
"""Tokenize text to token files, in several processes; a killed run continues where it was, with the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush_all, write_text_atomically
from sporeloom.core.locks import one_writer
from sporeloom.core.log import milestone
from sporeloom.core.numbers import Amount
from sporeloom.core.reader import fields_from, read_json
from sporeloom.data.cluster import Workers, over_batches
from sporeloom.data.fim import FillInTheMiddle
from sporeloom.data.sources import Batch, DocumentSource
from sporeloom.data.stores import stamp
from sporeloom.data.token_file import (
    ENDS,
    TOKENS,
    VERSION,
    TokenFileInfo,
    chained_hash,
    partial_folder,
    token_dtype,
    write_info,
)
from sporeloom.data.tokenizer import Tokenizer, content_hash, open_tokenizer
from sporeloom.data.workers import WorkersLostError

PROGRESS = ".progress.json"
SAVE_SECONDS = 2.0
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class TokenizeJob:
    """Input and settings of a tokenization."""

    source: DocumentSource
    family: str
    tokenizer: Path
    fim: FillInTheMiddle | None = None


@dataclass(frozen=True)
class TokenBatch:
    """A batch of documents as tokens, end-of-document tokens included."""

    tokens: bytes
    lengths: bytes
    num_bytes: int
    """Number of bytes of text."""
    skipped: Counter[str]
    problems: list[str]


@dataclass
class Progress:
    """Progress of a run; all of it is on disk."""

    fingerprint: str
    batches: Amount = 0
    num_tokens: Amount = 0
    num_documents: Amount = 0
    num_bytes: Amount = 0
    content: str = ""
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, encoded: TokenBatch) -> None:
        self.content = chained_hash(self.content, encoded.tokens + encoded.lengths)
        self.batches += 1
        self.num_documents += len(encoded.lengths) // 8
        self.num_bytes += encoded.num_bytes
        self.skipped += encoded.skipped
        self.problems += encoded.problems[: SHOWN_PROBLEMS - len(self.problems)]

    def report(self) -> dict[str, Any]:
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "text_bytes": self.num_bytes,
            "skipped": dict(sorted(self.skipped.items())),
            "first_problems": self.problems,
        }


def tokenize(job: TokenizeJob, out: Path, workers: Workers, show_progress: bool = True) -> dict[str, Any]:
    """Write token files into `out`, which appears when they are complete. Returns the report.

    `workers`: processes; 0: this one alone.

    Raises:
        ConfigError: bad input, as the source's `on_error` says; `out` is there already; the disk is full. After the last,
            the finished part stays in a folder next to `out`, and the same command continues from there.
    """
    if out.exists():
        raise ConfigError(f"{out}: is there already; remove it or give another name")
    files = job.source.files()
    folder = partial_folder(out)
    with one_writer(out, is_folder=False):
        return _tokenize(job, out, folder, files, workers, show_progress)


def _tokenize(
    job: TokenizeJob, out: Path, folder: Path, files: list[Path], workers: Workers, show_progress: bool
) -> dict[str, Any]:
    tokenizer = open_tokenizer(job.family, job.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        progress = _started_before(folder, _fingerprint(job, files))
        begin = time.perf_counter()
        done_before = progress.num_tokens
        encoded = over_batches(
            workers, TokenBatch, partial(_make_encoder, job, dtype), job.source, skip=progress.batches
        )
        _write(folder, progress, encoded, np.dtype(dtype).itemsize, show_progress)
        if not progress.num_documents:
            why = "; ".join(f"{count} {reason}" for reason, count in progress.skipped.items()) or "no documents"
            raise ConfigError(
                [f"{', '.join(map(str, job.source.inputs))}: contains no text ({why})", *progress.problems[:5]]
            )
        _finish(folder, out, job, tokenizer, dtype, progress)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror or error}; the same command continues from there"
        ) from None
    except WorkersLostError:
        raise  # what was done is kept
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    seconds = time.perf_counter() - begin
    report = progress.report()
    report["tokens_per_s"] = round((progress.num_tokens - done_before) / seconds)
    return report


def _fingerprint(job: TokenizeJob, files: list[Path]) -> str:
    """Identity of the output bytes."""
    settings = (repr(job.source), job.family, content_hash(job.tokenizer), repr(job.fim))
    return hashlib.sha256(repr((VERSION, settings, [stamp(path) for path in files])).encode()).hexdigest()


def _started_before(folder: Path, fingerprint: str) -> Progress:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROGRESS
    if path.exists():
        progress = fields_from(Progress, read_json(path))
        progress.skipped = Counter(progress.skipped)
        if progress.fingerprint == fingerprint:
            milestone(f"continuing after {progress.num_documents:,} documents, {progress.num_tokens:,} tokens")
            return progress
        milestone(f"{folder}: begun with other files or settings; starting anew")
        path.unlink()
    return Progress(fingerprint)


def _make_encoder(job: TokenizeJob, dtype: str) -> Callable[[Batch], TokenBatch]:
    tokenizer = open_tokenizer(job.family, job.tokenizer)

    def encode(batch: Batch) -> TokenBatch:
        tokens, lengths = array("I"), array("q")
        num_bytes = 0
        parsed = job.source.parse(batch)
        for number, document in parsed.documents:
            text = document.text
            ids = job.fim.encode(text, number, tokenizer) if job.fim else tokenizer.encode_document(text)
            tokens.extend(ids)
            tokens.append(tokenizer.eod_id)
            lengths.append(len(ids) + 1)
            num_bytes += len(document.text.encode())
        return TokenBatch(
            np.asarray(tokens, dtype).tobytes(),
            lengths.tobytes(),
            num_bytes,
            parsed.skipped,
            parsed.remarks[:SHOWN_PROBLEMS],
        )

    return encode


def _write(folder: Path, progress: Progress, results: Iterator[TokenBatch], itemsize: int, show: bool) -> None:
    with (folder / TOKENS).open("ab") as tokens, (folder / ENDS).open("ab") as ends:
        tokens.truncate(progress.num_tokens * itemsize)
        ends.truncate(progress.num_documents * 8)
        saved = time.monotonic()
        with tqdm(unit="tok", unit_scale=True, initial=progress.num_tokens, disable=None if show else True) as bar:
            try:
                for encoded in results:
                    lengths = np.frombuffer(encoded.lengths, np.int64)
                    tokens.write(encoded.tokens)
                    ends.write((np.cumsum(lengths) + progress.num_tokens).astype("<i8").tobytes())
                    progress.add(encoded)
                    progress.num_tokens += int(lengths.sum())
                    bar.update(int(lengths.sum()))
                    if time.monotonic() > saved + SAVE_SECONDS:
                        _save(folder, progress, tokens, ends)
                        saved = time.monotonic()
            finally:
                results.close()  # type: ignore[attr-defined]
        _save(folder, progress, tokens, ends)


def _save(folder: Path, progress: Progress, *files: Any) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    write_text_atomically(folder / PROGRESS, json.dumps(vars(progress)))


def _finish(folder: Path, out: Path, job: TokenizeJob, tokenizer: Tokenizer, dtype: str, progress: Progress) -> None:
    tokenizer.save(folder)
    info = TokenFileInfo(
        version=VERSION,
        dtype=dtype,
        num_tokens=progress.num_tokens,
        num_documents=progress.num_documents,
        content=progress.content,
        family=job.family,
        tokenizer=content_hash(job.tokenizer),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        report=progress.report(),
    )
    write_info(folder, info)
    flush_all(folder)
    folder.rename(out)
    (out / PROGRESS).unlink()  # last: who is killed before that has not lost what was done
