# SPDX-License-Identifier: Apache-2.0
"""A custom pipeline schedule: a CSV file as `torch.distributed.pipelining` reads and writes it, computation only.

A row for each stage, a cell for each pass in the order of time: the part of the model; `F` (forward), `B` (backward), `I`
(the gradients of inputs alone) or `W` (the gradients of weights, after an `I`); the microbatch. An empty cell is idle time.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from sporeloom.core.document import read_text
from sporeloom.core.errors import ConfigError

KINDS: dict[str, Literal["forward", "backward", "weights"]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weights",
}
CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
MAX_PROBLEMS = 20
MAX_PASSES = 1_000_000


class Pass(NamedTuple):
    """One pass of a microbatch through a part of the model."""

    kind: Literal["forward", "backward", "weights"]
    """weights: the gradients of weights, where the backward pass computed those of its inputs alone."""
    part: int
    """Number of the part among those of its stage."""
    microbatch: int


@dataclass(frozen=True)
class ListedSchedule:
    """The ordered passes of each stage, and the parts of the model that it holds."""

    orders: tuple[tuple[Pass, ...], ...]
    """Passes of each stage."""
    parts: tuple[tuple[int, ...], ...]
    """Model parts of each stage, in the order of the layers."""

    @property
    def virtual_stages(self) -> int:
        return len(self.parts[0])

    @property
    def num_microbatches(self) -> int:
        return 1 + max(one.microbatch for one in self.orders[0])

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed in passes of their own."""
        return any(one.kind == "weights" for order in self.orders for one in order)

    def __str__(self) -> str:
        return "a custom schedule"

    def stage_of(self, part: int) -> int:
        """Stage that holds a part of the model."""
        return next(stage for stage, held in enumerate(self.parts) if part in held)


def needed(one: Pass, last: int) -> Pass | None:
    """The pass whose result another needs; parts are counted over all stages, up to `last`."""
    if one.kind == "forward":
        return one._replace(part=one.part - 1) if one.part else None
    if one.kind == "weights":
        return one._replace(kind="backward")
    return one._replace(kind="forward") if one.part == last else one._replace(part=one.part + 1)


def read_schedule(path: Path) -> ListedSchedule:
    """Read a schedule from a file.

    Raises:
        ConfigError: unreadable, or all that is wrong with it: cells, passes missing or doubled, stages that wait for each
            other for ever.
    """
    rows, problems = _rows(path)
    for check in (_incomplete, _blocked):
        problems = problems or list(itertools.islice(check(rows), MAX_PROBLEMS + 1))
    if problems:
        more = [f"{path}: and more"] if len(problems) > MAX_PROBLEMS else []
        raise ConfigError([*(f"{path}: {problem}" for problem in problems[:MAX_PROBLEMS]), *more])
    parts = [tuple(sorted({cell.one.part for cell in row})) for row in rows]
    orders = (
        tuple(cell.one._replace(part=held.index(cell.one.part)) for cell in row)
        for row, held in zip(rows, parts, strict=True)
    )
    return ListedSchedule(tuple(orders), tuple(parts))


class _Cell(NamedTuple):
    text: str
    one: Pass
    """A cell of the table; its part is counted over all stages."""


def _rows(path: Path) -> tuple[list[list[_Cell]], list[str]]:
    rows, problems, text = [], list[str](), read_text(path)
    lines = [line.split(",") for line in text.split("\n") if line.strip(", \t\r")]
    for number, line in enumerate(lines, 1):
        cells = []
        for column, written in enumerate(line, 1):
            if not (cell := written.strip()):
                continue
            if found := CELL.fullmatch(cell):
                cells.append(_Cell(cell, Pass(KINDS[found[2]], int(found[1]), int(found[3]))))
            else:
                problems.append(
                    f"row {number}, column {column}: {cell[:20]!r} is not a pass; write the part of the model, one of F, B, "
                    "I and W, and the microbatch, as in 0F0"
                )
        rows.append(cells)
    if not rows:
        problems.append("no passes; a row for each stage is expected, as in 0F0,0F1,0B0,0B1")
    if sum(map(len, rows)) > MAX_PASSES:
        problems.append(f"more than {MAX_PASSES:,} passes")
    return rows, problems


def _incomplete(rows: Sequence[Sequence[_Cell]]) -> Iterator[str]:
    """List parts that two stages hold or none, and passes that are missing or duplicated."""
    held = [{cell.one.part for cell in row} for row in rows]
    counts = Counter(part for parts in held for part in parts)
    for part, count in sorted(counts.items()):
        if count > 1:
            yield f"part {part} is on {count} rows; a part of the model belongs to one stage"
    every = range(len(counts))
    if absent := [part for part in every if part not in counts]:
        yield f"part {absent[0]} is missing: {len(counts)} parts are numbered from 0"
    if len({len(parts) for parts in held}) > 1:
        yield f"the rows hold {', '.join(str(len(parts)) for parts in held)} parts; each stage holds as many as the others"
    num_microbatches = 1 + max(cell.one.microbatch for row in rows for cell in row)
    for stage, row in enumerate(rows):
        found = Counter(cell.text for cell in row)
        twice = [text for text, count in found.items() if count > 1]
        if twice:
            yield f"row {stage + 1}: {twice[0]} is there {found[twice[0]]} times"
        for part in sorted(held[stage]):
            for i in range(num_microbatches):
                if not found[f"{part}F{i}"]:
                    yield f"row {stage + 1}: {part}F{i} is missing"
                whole, taken_apart = found[f"{part}B{i}"], (found[f"{part}I{i}"], found[f"{part}W{i}"])
                if (bool(whole), *map(bool, taken_apart)) not in ((True, False, False), (False, True, True)):
                    yield f"row {stage + 1}: microbatch {i} of part {part} needs {part}B{i}, or {part}I{i} and {part}W{i}"


def _blocked(rows: Sequence[Sequence[_Cell]]) -> Iterator[str]:
    """List the passes at which stages would wait for ever."""
    last = max(cell.one.part for row in rows for cell in row)
    done, places, advances = set[Pass](), [0] * len(rows), True
    while advances:
        advances = False
        for stage, row in enumerate(rows):
            while places[stage] < len(row):
                one = row[places[stage]].one
                if (before := needed(one, last)) is not None and before not in done:
                    break
                done.add(one)
                places[stage], advances = places[stage] + 1, True
    texts = {cell.one: cell.text for row in rows for cell in row}
    for stage, row in enumerate(rows):
        if places[stage] < len(row):
            cell = row[places[stage]]
            before = needed(cell.one, last)
            assert before is not None
            yield f"row {stage + 1} waits for ever at {cell.text}, which needs {texts[before]} first"
