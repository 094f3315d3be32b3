# SPDX-License-Identifier: Apache-2.0
"""MindRecord files of token records, as PanGu-alpha's pre_process.py writes them, to and from token files.

A record holds seq_len+1 token ids in one int32 column.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush, flush_all
from sporeloom.core.lines import first_line
from sporeloom.data.token_file import (
    ENDS,
    TOKENS,
    VERSION,
    TokenFile,
    TokenFileInfo,
    chained_hash,
    partial_folder,
    token_dtype,
    write_info,
)
from sporeloom.data.tokenizer import Tokenizer, content_hash, open_tokenizer

COLUMN = "input_ids"
BATCH = 1000


def write_mindrecord(folder: Path, out: Path, seq_len: int, column: str = COLUMN) -> int:
    """Write every sample of token files as a record. Returns the number of records.

    Raises:
        ConfigError: no samples of this length; `out` is there already; it cannot be written.
    """
    tokens = TokenFile(folder)
    count = tokens.num_samples(seq_len)
    if not count:
        raise ConfigError(
            f"{folder}: {tokens.info.num_tokens} tokens are fewer than one record of {seq_len} + 1 tokens"
        )
    if out.exists():
        raise ConfigError(f"{out}: is there already; remove it or give another name")
    mindrecord = import_module("mindspore.mindrecord")  # loads MindSpore
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(
            prefix=".mindrecord-", dir=out.parent
        ) as temporary:  # a file contains its own name
            writer = mindrecord.FileWriter(str(Path(temporary) / out.name), shard_num=1)
            writer.add_schema({column: {"type": "int32", "shape": [-1]}}, f"{seq_len + 1} tokens")
            for first in range(0, count, BATCH):
                starts = [tokens.start(i, seq_len) for i in range(first, min(count, first + BATCH))]
                records = [np.array(tokens.tokens[start : start + seq_len + 1], np.int32) for start in starts]
                writer.write_raw_data([{column: record} for record in records])
            writer.commit()
            made = sorted(Path(temporary).iterdir(), key=lambda file: file.name == out.name)
            for file in made:  # the records last: a file of their name has its index
                flush(file)
                file.replace(out.parent / file.name)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{out}: cannot be written: {first_line(error)}") from None
    return count


def read_mindrecord(files: tuple[Path, ...], out: Path, family: str, tokenizer_path: Path, column: str = COLUMN) -> int:
    """Write token files from the records of MindRecord files; each record stays one sample. Returns the number of
    records.

    Raises:
        ConfigError: no such files or column, records of several lengths, tokens the tokenizer does not have.
    """
    problems = [f"{path}: there is no such file" for path in files if not path.is_file()]
    problems += [f"{path}: there is no such tokenizer" for path in [tokenizer_path] if not path.exists()]
    problems += [f"{path}: is there already; remove it or give another name" for path in [out] if path.exists()]
    if problems:
        raise ConfigError(problems)
    tokenizer: Tokenizer = open_tokenizer(family, tokenizer_path)
    folder = partial_folder(out)
    try:
        count = _fill(folder, files, family, tokenizer, tokenizer_path, column)
        flush_all(folder)
        folder.rename(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return count


def _fill(
    folder: Path, files: tuple[Path, ...], family: str, tokenizer: Tokenizer, tokenizer_path: Path, column: str
) -> int:
    """Identity of all inputs of the token files."""
    dtype = token_dtype(tokenizer.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    length, count, content, ends = 0, 0, "", list[NDArray[np.int64]]()
    with (folder / TOKENS).open("wb") as tokens:
        for path in files:
            for record in _records(path, column):
                length = length or len(record)
                if len(record) != length:
                    raise ConfigError(f"{path}: record {count + 1} has {len(record)} tokens, others have {length}")
                if record.min() < 0 or record.max() >= tokenizer.vocab_size:
                    raise ConfigError(
                        f"{path}: record {count + 1} contains token {record.max()}, {tokenizer_path} has "
                        f"{tokenizer.vocab_size}"
                    )
                data = record.astype(dtype).tobytes()
                tokens.write(data)
                content = chained_hash(content, data)
                ends.append(np.flatnonzero(record == tokenizer.eod_id) + count * length + 1)
                count += 1
    if not count:
        raise ConfigError(f"{', '.join(map(str, files))}: contain no records")
    all_ends = np.concatenate(ends).astype("<i8")
    all_ends.tofile(folder / ENDS)
    tokenizer.save(folder)
    info = TokenFileInfo(
        version=VERSION,
        dtype=dtype,
        num_tokens=count * length,
        num_documents=len(all_ends),
        content=content,
        family=family,
        tokenizer=content_hash(tokenizer_path),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        record_length=length,
        report={"records": count, "files": [str(path) for path in files]},
    )
    write_info(folder, info)
    return count


def _records(path: Path, column: str) -> Iterator[NDArray[Any]]:
    mindrecord = import_module("mindspore.mindrecord")
    try:
        reader = mindrecord.FileReader(str(path))
    except RuntimeError as error:
        raise ConfigError(f"{path}: not a MindRecord file that can be read: {first_line(error)}") from None
    try:
        for record in reader.get_next():
            if column not in record:
                raise ConfigError(
                    f"{path}: no column `{column}`; it has: {', '.join(record)}; choose one with --column"
                )
            yield np.asarray(record[column]).reshape(-1)
    finally:
        reader.close()
