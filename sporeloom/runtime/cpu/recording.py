# SPDX-License-Identifier: Apache-2.0
"""Recordings of the last steps of a rank, as files: programs, and for each step what it needs to run again alone.

RUN/record/rank-0/programs.json, 0.mindir, ...    the graphs of the rank
RUN/record/rank-0/0.shards.json, ...               which parts of which values and parameters a graph has
RUN/record/rank-0/step-00000012/step.json          calls of graphs, messages, hashes
RUN/record/rank-0/step-00000012/arrays.bin         values of parameters before the step, inputs, received messages
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sporeloom import __version__
from sporeloom.core.errors import ConfigError
from sporeloom.runtime.recorded_environment import FOLDER, PROGRAMS, THREADS
from sporeloom.runtime.spmd.value_shards import ValueShard
from sporeloom.strategy.layout import Shape

STEP, ARRAYS = "step.json", "arrays.bin"
FORMAT = 2

Array = NDArray[Any]


@dataclass(frozen=True)
class StoredArray:
    """An array in the file of arrays of its step."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    sha256: str


@dataclass
class RecordedMessage:
    """A collective of a graph: the hash of what the rank gave, and what it got."""

    tag: str
    """The same on all ranks of the group."""
    place: str
    """Kind and operator, for reports."""
    sent: str
    received: StoredArray


@dataclass
class RecordedCall:
    """One run of a graph."""

    program: str
    inputs: list[StoredArray] = field(default_factory=list)
    messages: dict[str, RecordedMessage] = field(default_factory=dict)
    """Name of the node -> its message."""
    outputs: list[str] = field(default_factory=list)
    """Hashes."""


@dataclass
class RecordedTransfer:
    """A value that this rank sent to another pipeline stage or received from one, outside of graphs."""

    call: int
    """Number of the run of a graph that came next."""
    is_received: bool
    tag: str
    """The same on both ranks, and at most once a step."""
    place: str
    """For reports."""
    sha256: str


@dataclass
class StepRecord:
    """One step of one rank."""

    rank: int
    step: int
    state: dict[str, StoredArray] = field(default_factory=dict)
    """Parameters, as they were before the step."""
    calls: list[RecordedCall] = field(default_factory=list)
    transfers: list[RecordedTransfer] = field(default_factory=list)
    after: dict[str, str] = field(default_factory=dict)
    """Hashes of the parameters after the step."""
    folder: Path = Path()

    def array(self, stored: StoredArray) -> Array:
        """Read an array.

        Raises:
            ConfigError: the file was changed or truncated.
        """
        dtype = np.dtype(ml_dtypes.bfloat16) if stored.dtype == "bfloat16" else np.dtype(stored.dtype)
        count = int(np.prod(stored.shape, dtype=np.int64))
        path = self.folder / ARRAYS
        with path.open("rb") as file:
            file.seek(stored.offset)
            content = file.read(count * dtype.itemsize)
        if hashlib.sha256(content).hexdigest() != stored.sha256:
            raise ConfigError(f"{path}: was changed or truncated after it was recorded")
        return np.frombuffer(content, dtype).reshape(stored.shape).copy()


def sha256_of(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def store(array: Array, file: BinaryIO) -> StoredArray:
    """Append an array to a file."""
    content, offset = np.ascontiguousarray(array).tobytes(), file.tell()
    file.write(content)
    return StoredArray(array.dtype.name, tuple(array.shape), offset, hashlib.sha256(content).hexdigest())


def write_step(root: Path, record: StepRecord, arrays: Path, keep: int) -> None:
    """Write the record of a step, whose arrays are in a file already, and remove records before the last `keep`."""
    partial = root / f".step-{record.step:08}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    arrays.replace(partial / ARRAYS)
    values = asdict(record)
    del values["folder"]
    (partial / STEP).write_text(json.dumps(values))
    target = root / f"step-{record.step:08}"
    shutil.rmtree(target, ignore_errors=True)
    partial.replace(target)
    for old in sorted(root.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def write_shards(
    root: Path, file: str, values: Mapping[str, ValueShard], parameters: Mapping[str, tuple[Shape, Shape]]
) -> None:
    """Write the parts of values that the nodes and inputs of a graph are, and those of its parameters: shape of the whole,
    and first entry of the part."""
    shards = {"values": {name: asdict(each) for name, each in values.items()}, "parameters": dict(parameters)}
    (root / _shards_file(file)).write_text(json.dumps(shards))


def _shards_file(program_file: str) -> str:
    return program_file.removesuffix(".mindir") + ".shards.json"


def write_programs(root: Path, files: Mapping[str, str]) -> None:
    """Write which file has which graph of a rank, and what else its results depend on."""
    environment = {name: os.environ[name] for name in THREADS if name in os.environ}
    about = {"format": FORMAT, "versions": _versions(), "environment": environment, "files": dict(files)}
    (root / PROGRAMS).write_text(json.dumps(about))


def _versions() -> dict[str, str]:
    return {"sporeloom": __version__, "mindspore": version("mindspore"), "numpy": np.__version__}


class Recording:
    """The records of a run.

    Raises:
        ConfigError: the run has none, or another version of this package wrote it in another form.
    """

    def __init__(self, run: Path):
        self.run = run
        self.roots = {int(p.name.partition("-")[2]): p for p in (run / FOLDER).glob("rank-*")}
        if not self.roots:
            raise ConfigError(f"{run}: has no recording; train with --record 2")
        for rank in self.roots:
            if (found := self._about(rank).get("format")) != FORMAT:
                raise ConfigError(
                    f"{self.roots[rank]}: was written in form {found}, this version reads form {FORMAT}; record the run again"
                )

    def steps(self, rank: int) -> list[int]:
        """Steps of which a rank has a record, in order.

        Raises:
            ConfigError: the run has no such rank.
        """
        if rank not in self.roots:
            raise ConfigError(f"--rank {rank}: the recording of {self.run} has ranks {_listed(sorted(self.roots))}")
        return sorted(int(p.name.partition("-")[2]) for p in self.roots[rank].glob("step-*"))

    def common_steps(self) -> list[int]:
        """Steps of which every rank has a record."""
        return sorted(set.intersection(*(set(self.steps(rank)) for rank in self.roots)))

    def read(self, rank: int, step: int) -> StepRecord:
        """Read the record of a step.

        Raises:
            ConfigError: there is none.
        """
        if step not in (steps := self.steps(rank)):
            raise ConfigError(f"--step {step}: the recording of {self.run} has steps {_listed(steps)} of rank {rank}")
        folder = self.roots[rank] / f"step-{step:08}"
        try:
            return _step_from(_read(folder / STEP), folder)
        except (KeyError, TypeError) as error:
            raise _unreadable(folder / STEP, error) from None

    def program(self, rank: int, name: str) -> bytes:
        """Read a graph of a rank, as MindIR."""
        return (self.roots[rank] / self._about(rank)["files"][name]).read_bytes()

    def shards(self, rank: int, name: str) -> tuple[dict[str, ValueShard], dict[str, tuple[Shape, Shape]]]:
        """Read which parts a graph of a rank has, as `write_shards` was given them."""
        path = self.roots[rank] / _shards_file(self._about(rank)["files"][name])
        found = _read(path)
        try:
            values = {
                node: ValueShard(**{**each, **{name: tuple(each[name]) for name in ("shape", "start", "size")}})
                for node, each in found["values"].items()
            }
            return values, {name: (tuple(a), tuple(b)) for name, (a, b) in found["parameters"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(path, error) from None

    def other_versions(self) -> list[str]:
        """Packages whose version is not that of the recording, with both versions."""
        recorded = self._about(min(self.roots))["versions"]
        return [
            f"{name} {recorded.get(name)}, now {now}" for name, now in _versions().items() if recorded.get(name) != now
        ]

    def _about(self, rank: int) -> Mapping[str, Any]:
        return _read(self.roots[rank] / PROGRAMS)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return values


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: cannot be read as a recording: {error!r}; record the run again")


def _step_from(values: Mapping[str, Any], folder: Path) -> StepRecord:
    calls = [
        RecordedCall(
            call["program"],
            [_stored(each) for each in call["inputs"]],
            {node: _message(each) for node, each in call["messages"].items()},
            call["outputs"],
        )
        for call in values["calls"]
    ]
    state = {name: _stored(each) for name, each in values["state"].items()}
    transfers = [RecordedTransfer(**each) for each in values["transfers"]]
    return StepRecord(values["rank"], values["step"], state, calls, transfers, values["after"], folder)


def _stored(values: Mapping[str, Any]) -> StoredArray:
    return StoredArray(values["dtype"], tuple(values["shape"]), values["offset"], values["sha256"])


def _message(values: Mapping[str, Any]) -> RecordedMessage:
    return RecordedMessage(values["tag"], values["place"], values["sent"], _stored(values["received"]))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
