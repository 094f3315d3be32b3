# SPDX-License-Identifier: Apache-2.0
"""The hash chain of a run, audit.jsonl: a record for each start and each step, with the hash of the record before it.
docs/how-to/audit.md lists the fields. Without MindSpore."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.checkpoint.manifest import Manifest
from sporeloom.checkpoint.sharded import CheckpointReader, LocalTensor
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import file_lines

FILE = "audit.jsonl"
HASH, PREVIOUS, START = "hash", "previous", "start"
FIRST = "0" * 64
"""Hash before the first record."""
SHOWN = 16
"""Number of digits of a hash in messages."""
Record = dict[str, Any]
State = dict[str, str]
"""Tensor -> SHA-256 of its content."""


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    text = json_text(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def linked(record: Mapping[str, Any], previous: str) -> Record:
    """A record with the hash of the one before it, and its own."""
    values = {**record, PREVIOUS: previous}
    return {**values, HASH: digest(values)}


def part_digests(slices: Mapping[str, LocalTensor]) -> dict[str, list[Any]]:
    """Tensor -> start, shape, dtype and SHA-256 of the content of a rank's slice."""
    return {
        name: [[*part.start], [*part.bounds.shape], part.array.dtype.name, _content(part.array)]
        for name, part in slices.items()
    }


def state_of_parts(of_ranks: Sequence[Mapping[str, list[Any]]]) -> State:
    """Compute the hashes of tensors from the digests of all ranks' slices."""
    parts: dict[str, list[Any]] = {}
    for of_rank in of_ranks:
        for name, part in of_rank.items():
            parts.setdefault(name, []).append(part)
    return {name: digest(sorted(parts[name])) for name in sorted(parts)}


def state_of_checkpoint(folder: Path, manifest: Manifest) -> State:
    """Hashes of the tensors of a checkpoint, from the content of its files.

    Raises:
        ConfigError: a file cannot be read.
    """
    reader, found = CheckpointReader(folder, manifest), {}
    for name, entry in sorted(manifest.tensors.items()):
        parts = [
            [[*p.bounds.start], [*p.bounds.shape], entry.dtype, _content(reader.read(name, p.bounds))]
            for p in entry.parts
        ]
        found[name] = digest(sorted(parts))
    return found


def _content(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def first_difference(recorded: State, found: State) -> str | None:
    """The first tensor by name that differs or that only one has; None: all are equal."""
    names = sorted({*recorded, *found})
    return next((name for name in names if recorded.get(name) != found.get(name)), None)


class ChainFile:
    """Appends to the chain of a run. `steps_done`: later records of an earlier start are taken back."""

    def __init__(self, folder: Path, steps_done: int):
        self.path = folder / FILE
        self.previous = FIRST
        self.take_back(steps_done)

    def take_back(self, steps_done: int) -> None:
        """Remove the records of later steps."""
        kept: list[Record] = []
        for record in _complete_records(self.path) if steps_done and self.path.exists() else ():
            if record["step"] > steps_done:
                break
            kept.append(record)
        self.previous = kept[-1][HASH] if kept else FIRST
        write_text_atomically(self.path, "".join(json_text(record) + "\n" for record in kept))

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises:
        ConfigError: it cannot be written.
        """
        values = linked(record, self.previous)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_text(values) + "\n")
        except OSError as error:
            raise ConfigError(f"{self.path}: step {record['step']} cannot be written: {error.strerror}") from None
        self.previous = values[HASH]


def _complete_records(path: Path) -> Iterator[Record]:
    """Records up to a line that is cut off."""
    for line in file_lines(path):
        try:
            record = json.loads(line)
            record["step"], record[HASH]
        except (ValueError, TypeError, KeyError):
            return
        yield record


@dataclass
class Chain:
    """The records of a chain that was read, and what is wrong with it."""

    path: Path
    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Chain:
        """Read and verify the chain of a run.

        Raises:
            ConfigError: the run has none.
        """
        path = folder / FILE
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file; a run writes its hash chain with --audit-every N")
        chain = cls(path)
        for number, line in enumerate(file_lines(path), 1):
            try:
                record = json.loads(line)
                fits = type(record["step"]) is int and isinstance(record[HASH], str)
                fits = fits and all(isinstance(record.get(name, {}), dict) for name in (START, "state"))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                fits = False
            if not fits:
                chain.problems.append(f"{path}:{number}: not a record; it was cut off or edited")
                return chain
            chain._add(record, number)
        if not chain.records:
            chain.problems.append(f"{path}: empty")
        elif START not in chain.records[0]:
            chain.problems.append(f"{path}:1: the first record is not that of a start; records before it are missing")
        return chain

    def _add(self, record: Record, number: int) -> None:
        """Verify one record against its content and the record before it."""
        before = self.records[-1] if self.records else None
        where, expected = f"{self.path}:{number}: step {record['step']}", before[HASH] if before else FIRST
        if digest({name: value for name, value in record.items() if name != HASH}) != record[HASH]:
            self.problems.append(f"{where}: the record was changed: its hash is not that of its content")
        is_next = not before or record["step"] == before["step"] + (START not in record)
        if record.get(PREVIOUS) != expected or not is_next:
            self.problems.append(f"{where}: does not follow the record before it: {_gap(record, before)}")
        elif START not in record and record.get("configuration") != self._configuration():
            self.problems.append(f"{where}: its configuration is not that of the start before it")
        self.records.append(record)

    def _configuration(self) -> str:
        return next((digest(record[START]) for record in reversed(self.records) if START in record), "")

    @property
    def head(self) -> str:
        """Hash of the last record, which stands for the entire chain."""
        return str(self.records[-1][HASH]) if self.records else FIRST

    def starts(self) -> list[Record]:
        return [record for record in self.records if START in record]

    def steps(self) -> list[Record]:
        return [record for record in self.records if START not in record]

    def states(self) -> dict[int, State]:
        """Step -> hashes of the tensors after it."""
        return {record["step"]: record["state"] for record in self.records if record.get("state")}


def _gap(record: Record, before: Record | None) -> str:
    """Describe what is between two records that do not follow each other."""
    if before is None:
        return "records before it are missing"
    first, last = before["step"], record["step"]
    if last > first + 1:
        missing = f"step {first + 1} is" if last == first + 2 else f"steps {first + 1} to {last - 1} are"
        return f"{missing} missing"
    if START not in record and last <= first:
        return f"it comes after step {first}: records were reordered or repeated"
    return "a record was changed, removed or put in another place"
