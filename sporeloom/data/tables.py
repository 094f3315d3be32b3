# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet and Arrow files as JSON, some at a time."""

from __future__ import annotations

import datetime
import itertools
import uuid
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from sporeloom.core.errors import ConfigError
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import first_line
from sporeloom.data.compressed import optional
from sporeloom.data.stores import open_document

ROWS, FEW_ROWS = 1000, 16
"""Number of rows decoded at once, and of groups with more than GROUP_BYTES or nested columns, where a few may be
very long."""
GROUP_BYTES = 1 << 27
ARROW_MAGIC = b"ARROW1"
"""First bytes of an Arrow file with random access."""


class Row(NamedTuple):
    """A row of a table, or the reason why it cannot be read."""

    number: int
    """Row number, counted from 1; 0: the problem is of the full file."""
    content: bytes
    problem: str = ""


def column_names(path: Path) -> list[str]:
    """Names of the columns of a table.

    Raises:
        ConfigError: not a table, or pyarrow is not installed.
    """
    arrow = optional("pyarrow", path)
    try:
        if path.suffix == ".parquet":
            names = optional("pyarrow.parquet", path).ParquetFile(open_document(path)).schema_arrow.names
        else:
            names = _arrow_schema(arrow, optional("pyarrow.ipc", path), path).names
    except (arrow.ArrowException, OSError) as error:
        kind = "a Parquet" if path.suffix == ".parquet" else "an Arrow"
        raise ConfigError(f"{path}: not {kind} file: {first_line(error)}") from None
    return [*names]


def _arrow_schema(arrow: Any, ipc: Any, path: Path) -> Any:
    try:
        return ipc.open_stream(open_document(path)).schema
    except arrow.ArrowInvalid:
        return ipc.open_file(open_document(path)).schema


def read_arrow_rows(path: Path, key: str, all_columns: bool, first: int = 0) -> Iterator[Row]:
    """Rows of an Arrow file, as Hugging Face datasets saves them, as JSON objects of the columns `key`, or all.

    Args:
        first: number of rows to leave out.

    Raises:
        ConfigError: no such column, or pyarrow is not installed.
    """
    arrow, ipc = optional("pyarrow", path), optional("pyarrow.ipc", path)
    number = 1
    try:
        batches = _arrow_batches(arrow, ipc, path)
        found = next(batches, None)
        if found is None:
            yield Row(0, b"", "no rows")
            return
        columns = _columns(path, found.schema.names, key, all_columns)
        for batch in itertools.chain([found], batches):
            left_out = min(max(0, first - number + 1), batch.num_rows)
            yield from _rows_of_batch(arrow, batch.slice(left_out), columns, number + left_out)
            number += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        problem = "not an Arrow file" if number == 1 else "damaged from here on"
        yield Row(0 if number == 1 else number, b"", f"{problem}: {first_line(error)}")


def _arrow_batches(arrow: Any, ipc: Any, path: Path) -> Iterator[Any]:
    """Record batches of a stream, which datasets writes, or of a file with random access."""
    try:
        with ipc.open_stream(open_document(path)) as stream:
            yield from stream
            return
    except arrow.ArrowInvalid:
        with open_document(path) as file:
            if file.read(len(ARROW_MAGIC)) != ARROW_MAGIC:
                raise
    with ipc.open_file(open_document(path)) as table:
        for place in range(table.num_record_batches):
            yield table.get_batch(place)


def read_rows(
    path: Path, start: int, end: int | None, key: str, all_columns: bool, first_row: int = 0
) -> Iterator[Row]:
    """Rows as JSON objects, of the groups that begin from byte `start` up to byte `end`; of their columns `key`,
    or all.

    Binary columns hold text, in UTF-8. Times, dates, decimals and UUIDs become text.

    Args:
        first_row: number of rows of the file to leave out.

    Raises:
        ConfigError: no such column, or pyarrow is not installed.
    """
    arrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
    try:
        table = parquet.ParquetFile(open_document(path))
        # A value that many rows share stays one in memory: little of a file can stand for very much.
        shared = [field.name for field in table.schema_arrow if _is_text(arrow.types, field.type)]
        table = parquet.ParquetFile(open_document(path), metadata=table.metadata, read_dictionary=shared)
    except (arrow.ArrowException, OSError) as error:
        yield Row(0, b"", f"not a Parquet file: {first_line(error)}")
        return
    columns, number = _columns(path, table.schema_arrow.names, key, all_columns), 1
    for index in range(table.num_row_groups):
        group = table.metadata.row_group(index)
        first = _first_byte(group)
        if not (first < start or (end is not None and first >= end)):
            left_out = max(0, first_row - number + 1)
            if left_out < group.num_rows:
                yield from _rows_of_group(arrow, table, index, columns, number, left_out)
        number += group.num_rows


def _columns(path: Path, names: Sequence[str], key: str, all_columns: bool) -> list[str]:
    if key not in names:
        raise ConfigError(f"{path}: no column `{key}`; it has: {', '.join(names)}; choose one with --key")
    columns = [*names] if all_columns else [key]
    if twice := [name for name in columns if names.count(name) > 1]:
        raise ConfigError(f"{path}: several columns are named `{twice[0]}`; give each a name of its own")
    return columns


def _rows_of_group(
    arrow: Any, table: Any, index: int, columns: list[str], number: int, left_out: int = 0
) -> Iterator[Row]:
    """Rows of a group, whose first one has this number, without the first `left_out`."""
    group, schema = table.metadata.row_group(index), table.schema_arrow
    is_nested = any(arrow.types.is_nested(schema.field(name).type) for name in columns)
    size = sum(group.column(place).total_uncompressed_size for place in range(group.num_columns))
    end = number + group.num_rows
    try:
        rows = FEW_ROWS if is_nested or size > GROUP_BYTES else ROWS
        for batch in table.iter_batches(batch_size=rows, row_groups=[index], columns=columns):
            skipped = min(left_out, batch.num_rows)
            yield from _rows_of_batch(arrow, batch.slice(skipped), columns, number + skipped)
            left_out, number = left_out - skipped, number + batch.num_rows
    except (OSError, arrow.ArrowException) as error:
        where = "from here on" if index + 1 == table.num_row_groups else f"up to row {end - 1}"
        yield Row(number, b"", f"damaged {where}: {first_line(error)}")


def _rows_of_batch(arrow: Any, batch: Any, columns: Sequence[str], number: int) -> Iterator[Row]:
    """Rows of a record batch, whose first one has this number."""
    arrays = {name: _without_times(arrow, batch.column(name)) for name in columns}
    for place in range(batch.num_rows):
        yield _row(number + place, {name: array[place] for name, array in arrays.items()})


def _row(number: int, scalars: dict[str, Any]) -> Row:
    values, problem = {}, ""
    for name, scalar in scalars.items():
        try:
            values[name] = _plain(scalar.as_py())
        except UnicodeDecodeError as error:
            problem = f"column `{name}`: bytes that are not UTF-8 text ({error.reason}); leave such a column out"
        except (ValueError, OverflowError, TypeError) as error:
            problem = f"column `{name}`: cannot be written as JSON: {first_line(error)}"
    if problem:
        return Row(number, b"", problem)
    return Row(number, json_text(values, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _plain(value: Any) -> Any:
    """Convert a value to JSON types.

    Raises:
        UnicodeDecodeError: bytes that are not text.
        TypeError: a value that JSON has no words for.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | Decimal | uuid.UUID):
        return str(value)
    return value


def _is_text(types: Any, kind: Any) -> bool:
    """Whether Arrow reads a column as a dictionary with indices."""
    return bool(types.is_string(kind) or types.is_binary(kind))


def _without_times(arrow: Any, array: Any) -> Any:
    """A column with times as text: Python's have no nanoseconds, and no year 10,000."""
    kinds = arrow.types
    is_time = kinds.is_timestamp(array.type) or kinds.is_date(array.type) or kinds.is_time(array.type)
    return array.cast(arrow.string()) if is_time else array


def _first_byte(group: Any) -> int:
    """Byte position where a group of rows begins in its file."""
    column = group.column(0)
    return int(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)
