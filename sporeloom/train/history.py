# SPDX-License-Identifier: Apache-2.0
"""The starts of a run, in history.json of its folder, and its goodput: productive time over all time since the first."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.core.lines import file_lines

FILE, METRICS = "history.json", "metrics.jsonl"
LATEST = 1e11
"""Seconds since 1970 that dates can still be made of."""


@dataclass
class History:
    """Starts and losses of a run, over its restarts."""

    id: str
    """Random name of the run, the same after a restart."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """`time`: seconds since 1970; `steps_done`: steps that were done then. Empty first entry: not known."""
    rewinds: list[dict[str, int]] = field(default_factory=list)
    """Steps `first` to `last`, whose updates were taken back after a spike of the loss."""

    @classmethod
    def read(cls, folder: Path) -> History | None:
        """The history of a run's folder; None: it has none that can be read."""
        try:
            found = cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))
            for start in found.starts:
                if not 0 <= start.get("time", 0.0) <= LATEST:
                    return None
            for each in found.rewinds:
                range(each["first"], each["last"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return found

    @classmethod
    def begin(
        cls, folder: Path, began: float, steps_done: int, is_resumed: bool, earlier: Sequence[dict[str, Any]] = ()
    ) -> History:
        """Record a start. `began`: seconds since 1970. `earlier`: starts of this run that ended before they could be
        recorded."""
        history = cls.read(folder) if is_resumed else None
        if history is None:
            history = cls(secrets.token_hex(4), [{}] if is_resumed else [*earlier])
        # Steps after the resumed state are done anew, and then count.
        history.rewinds = [each for each in history.rewinds if each["last"] <= steps_done]
        history.starts.append({"time": round(began, 3), "steps_done": steps_done})
        history.write(folder)
        return history

    def rewind(self, folder: Path, first: int, last: int) -> None:
        """Record that the steps `first` to `last` were lost."""
        self.rewinds.append({"first": first, "last": last})
        self.write(folder)

    def write(self, folder: Path) -> None:
        write_text_atomically(folder / FILE, json_text(asdict(self), indent=2) + "\n")

    @property
    def first_start(self) -> float | None:
        """Seconds since 1970; None: an earlier release began the run."""
        return self.starts[0].get("time") if self.starts else None

    def productive_seconds(self, folder: Path) -> float:
        """Time of the steps whose updates the weights still have. A resumed run has removed the lines of the others; a step
        that updated nothing has no gradient norm."""
        lost = [range(each["first"], each["last"] + 1) for each in self.rewinds]
        lines = [json.loads(line) for line in file_lines(folder / METRICS)]
        updates = [line for line in lines if line.get("grad_norm") is not None]
        return sum(line["step_time_s"] for line in updates if not any(line["step"] in steps for steps in lost))

    def goodput(self, folder: Path, now: float | None = None) -> float | None:
        """Productive time over the time since the first start, with all restarts and the time between them."""
        if self.first_start is None:
            return None
        elapsed = (time.time() if now is None else now) - self.first_start
        return self.productive_seconds(folder) / elapsed if elapsed > 0 else None
