# SPDX-License-Identifier: Apache-2.0
"""The hash chain of a run, audit.jsonl: a record for each start and each step, with the hash of the record before it.
docs/how-to/audit.md lists the fields. Without MindSpore."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.checkpoint.content_hash import MASK, content_hash
from sporeloom.checkpoint.manifest import Manifest
from sporeloom.checkpoint.sharded import CheckpointReader, LocalTensor
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import file_lines
from sporeloom.strategy.tensor_slice import TensorSlice

FILE = "audit.jsonl"
HASH, PREVIOUS, START = "hash", "previous", "start"
FIRST = "0" * 64
"""Hash before the first record."""
LAYOUT_DIGITS = 8
"""Number of digits of the hash of a layout."""
Record = dict[str, Any]
State = dict[str, str]
"""Tensor -> hashes of its content: `content-layout-sha256`, see `_tensor_hash`."""


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    text = json_text(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def linked(record: Mapping[str, Any], previous: str) -> Record:
    """A record with the hash of the one before it, and its own."""
    values = {**record, PREVIOUS: previous}
    return {**values, HASH: digest(values)}


def part_digests(slices: Mapping[str, LocalTensor]) -> dict[str, list[Any]]:
    """Tensor -> what `_tensor_hash` needs of a rank's slice."""
    return {name: _part_digest(part.array, part.start) for name, part in slices.items()}


def _part_digest(array: np.ndarray[Any, Any], start: Sequence[int]) -> list[Any]:
    """Start, shape, dtype, SHA-256 and checksum of the content of a slice."""
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return [[*start], [*array.shape], array.dtype.name, content, f"{content_hash(array, start):016x}"]


def _tensor_hash(parts: Sequence[list[Any]]) -> str:
    """Hashes of a tensor: shape, dtype and checksum of its content, which are the same for every layout; a hash of the
    layout; SHA-256 of the content in this layout."""
    ordered = sorted(parts)
    content = sum(int(part[-1], 16) for part in ordered) & MASK
    layout = digest([part[:3] for part in ordered])[:LAYOUT_DIGITS]
    ends = ([a + n for a, n in zip(start, shape, strict=True)] for start, shape, *_ in ordered)
    whole = "x".join(str(max(each)) for each in zip(*ends, strict=True))
    return f"{whole}:{ordered[0][2]}:{content:016x}-{layout}-{digest([part[:4] for part in ordered])}"


def is_same_content(recorded: str | None, found: str | None) -> bool:
    """Compare two hashes of a tensor: by SHA-256 where the layout is the same, otherwise by the checksum."""
    if not isinstance(recorded, str) or not isinstance(found, str):
        return False
    first, second = recorded.split("-"), found.split("-")
    is_other_layout = len(first) == len(second) == 3 and first[1] != second[1]
    return first[0] == second[0] if is_other_layout else first == second


def has_same_layout(recorded: State, found: State) -> bool:
    """Whether all tensors of both states are compared by SHA-256."""
    return all(recorded[name].split("-")[1:2] == found[name].split("-")[1:2] for name in {*recorded} & {*found})


def state_of_parts(of_ranks: Sequence[Mapping[str, list[Any]]]) -> State:
    """Compute the hashes of tensors from the digests of all ranks' slices."""
    parts: dict[str, list[Any]] = {}
    for of_rank in of_ranks:
        for name, part in of_rank.items():
            parts.setdefault(name, []).append(part)
    return {name: _tensor_hash(parts[name]) for name in sorted(parts)}


def state_of_checkpoint(folder: Path, manifest: Manifest) -> State:
    """Hashes of the tensors of a checkpoint, from the content of its files.

    Raises:
        ConfigError: a file cannot be read.
    """
    reader = CheckpointReader(folder, manifest)
    return {
        name: state_of_slices((part.bounds for part in entry.parts), functools.partial(reader.read, name))
        for name, entry in sorted(manifest.tensors.items())
    }


def state_of_slices(slices: Iterable[TensorSlice], read: Callable[[TensorSlice], np.ndarray[Any, Any]]) -> str:
    """Hashes of a tensor in the layout of `slices`, which `read` reads."""
    return _tensor_hash([_part_digest(read(part), part.start) for part in slices])


def first_difference(recorded: State, found: State) -> str | None:
    """The first tensor by name that differs or that only one has; None: all are equal."""
    names = sorted({*recorded, *found})
    return next((name for name in names if not is_same_content(recorded.get(name), found.get(name))), None)


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
                fits = fits and all(isinstance(each, str) for each in record.get("state", {}).values())
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
        """Step -> hashes of the tensors after it; those that a start began with where the step has none."""
        ordered = [*self.starts(), *self.steps()]
        return {record["step"]: record["state"] for record in ordered if record.get("state")}

    def changed_starts(self) -> Iterator[str]:
        """List the starts that did not begin with the state that their run had saved."""
        saved: State | None = None
        for record in self.records:
            if START not in record:
                saved = record.get("state")
                continue
            if saved and (name := first_difference(saved, record.get("state", {}))):
                yield (
                    f"{self.path}: step {record['step']}, tensor {name}: the run was resumed with another content than it "
                    "had after that step"
                )
            saved = record.get("state")


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
