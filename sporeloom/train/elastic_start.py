# SPDX-License-Identifier: Apache-2.0
"""The information that the launcher of an elastic run gives its processes, in an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sporeloom.core.json_text import json_text

VARIABLE = "SPORELOOM_ELASTIC"


@dataclass(frozen=True)
class ElasticStart:
    """One start of an elastic run."""

    memory: str | None = None
    """Folder in memory for the newest state; None: there is none."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Starts that ended before there was a state, as in `History.starts`."""

    @property
    def memory_dir(self) -> Path | None:
        return Path(self.memory) if self.memory else None

    @classmethod
    def of_environment(cls) -> ElasticStart | None:
        """The start that this process belongs to; None: its run is not elastic."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def environment(self) -> dict[str, str]:
        """The variables of the processes."""
        return {VARIABLE: json_text(asdict(self))}


def memory_dir() -> Path | None:
    """Folder in memory for the newest state of an elastic run; None: there is none."""
    start = ElasticStart.of_environment()
    return start.memory_dir if start else None
