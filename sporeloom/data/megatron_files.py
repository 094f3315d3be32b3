# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's indexed files to and from token files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush_all
from sporeloom.data.indexed_file import IndexedFile, bin_path, idx_path, token_dtype, write_indexed
from sporeloom.data.token_file import (
    ENDS,
    TOKENS,
    VERSION,
    TokenFile,
    TokenFileInfo,
    chained_hash,
    partial_folder,
    write_info,
)
from sporeloom.data.token_file import token_dtype as own_dtype
from sporeloom.data.tokenizer import Tokenizer, content_hash, open_tokenizer


def write_megatron_files(folder: Path, prefix: Path) -> dict[str, Any]:
    """Write each document of token files, with the token that ends it, as a document of one sequence. Returns a report.

    Raises:
        ConfigError: the folder holds fixed-length records; the files are there already; they cannot be written.
    """
    tokens = TokenFile(folder)
    if tokens.info.record_length:
        raise ConfigError(f"{folder}: contains fixed-length records, not documents; tokenize the text again")
    if there := [path for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]:
        raise ConfigError(f"{there[0]}: is there already; remove it or give another name")
    starts = (0, *tokens.ends[:-1])
    documents = ([tokens.tokens[start:end]] for start, end in zip(starts, tokens.ends, strict=True))
    dtype = token_dtype(tokens.info.vocab_size)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        count = write_indexed(prefix, documents, dtype)
    except OSError as error:
        raise ConfigError(f"{prefix}: cannot be written: {error.strerror or error}") from None
    return {"documents": count, "tokens": tokens.info.num_tokens, "dtype": dtype}


def read_megatron_files(prefix: Path, out: Path, family: str, tokenizer_path: Path) -> dict[str, Any]:
    """Write token files from Megatron-LM's; documents without the end-of-document token at the end get it.

    Returns a report.

    Raises:
        ConfigError: no such files or tokenizer, not a text's tokens, or tokens that the tokenizer does not have.
    """
    file = IndexedFile(prefix)
    problems = [problem for problem in [file.text_problem()] if problem]
    problems += [f"{path}: there is no such tokenizer" for path in [tokenizer_path] if not path.exists()]
    problems += [f"{path}: is there already; remove it or give another name" for path in [out] if path.exists()]
    if problems:
        raise ConfigError(problems)
    tokenizer: Tokenizer = open_tokenizer(family, tokenizer_path)
    folder = partial_folder(out)
    try:
        report = _fill(folder, file, family, tokenizer, tokenizer_path)
        flush_all(folder)
        folder.rename(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _fill(folder: Path, file: IndexedFile, family: str, tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """Write the token files into `folder`. Returns the report."""
    dtype, content, ends, num_closed = own_dtype(tokenizer.vocab_size), "", list[int](), 0
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    with (folder / TOKENS).open("wb") as tokens:
        for number in range(len(file.document_indices) - 1):
            document = file.document(number).astype(np.int64)
            if not len(document):
                continue
            if document.min() < 0 or document.max() >= tokenizer.vocab_size:
                wrong = document[(document < 0) | (document >= tokenizer.vocab_size)][0]
                raise ConfigError(
                    f"{file.prefix}: document {number} contains token {wrong}, {path} has {tokenizer.vocab_size}"
                )
            if document[-1] != tokenizer.eod_id:
                document, num_closed = np.append(document, tokenizer.eod_id), num_closed + 1
            data = document.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            tokens.write(data)
            content = chained_hash(content, data)
            ends += (np.flatnonzero(document == tokenizer.eod_id) + total + 1).tolist()
            total += len(document)
    if not total:
        raise ConfigError(f"{file.prefix}: contains no tokens")
    np.array(ends, "<i8").tofile(folder / ENDS)
    tokenizer.save(folder)
    report = {"documents": len(ends), "tokens": total, "ends_added": num_closed}
    info = TokenFileInfo(
        version=VERSION,
        dtype=dtype,
        num_tokens=total,
        num_documents=len(ends),
        content=content,
        family=family,
        tokenizer=content_hash(path),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        report={**report, "files": [str(file.prefix)]},
    )
    write_info(folder, info)
    return report
