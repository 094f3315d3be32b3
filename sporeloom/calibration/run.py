# SPDX-License-Identifier: Apache-2.0
"""Launches the processes that measure, one number of them after the other. Does not load MindSpore."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sporeloom.calibration.config import CalibrateConfig
from sporeloom.calibration.samples import Sample, read_samples
from sporeloom.core.log import milestone
from sporeloom.core.scratch import scratch_folder
from sporeloom.runtime.launch import launch

WORKER = str(Path(__file__).with_name("worker.py"))
MEASURE = "sporeloom.calibration.measure"


class WorkerError(Exception):
    """A process that measures failed, and has said why."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def levels(config: CalibrateConfig) -> Iterator[tuple[int, Sequence[Sample]]]:
    """Numbers of processes, and the samples of so many running at once.

    Raises:
        WorkerError: one failed; the logs that it has named are kept.
    """
    for processes in config.levels:
        milestone(f"measuring {processes} processes at once" if processes > 1 else "measuring one process")
        with scratch_folder() as folder:
            file = folder / "samples.json"
            arguments = [str(file), *(["quick"] if config.quick else [])]
            logs, code = Path(tempfile.mkdtemp(prefix="sporeloom-calibrate-")), 0
            try:
                code = launch(WORKER, arguments, processes, logs, 0, MEASURE)
            finally:
                if not code:  # interrupted, or all is well
                    shutil.rmtree(logs, ignore_errors=True)
            if code:
                raise WorkerError(code)
            yield processes, read_samples(json.loads(file.read_text(encoding="utf-8")))
