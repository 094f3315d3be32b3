# SPDX-License-Identifier: Apache-2.0
"""One of the processes that are measured at once: worker.py FILE [quick]. Rank 0 writes the samples of all."""

import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":  # Python looks in this folder first
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from sporeloom.calibration.measure import measure
from sporeloom.core.files import write_text_atomically
from sporeloom.core.json_text import json_text
from sporeloom.runtime.environment import launched_rank, prepare_environment


def main(file: Path, quick: bool) -> None:
    prepare_environment()
    samples = measure(quick)
    if launched_rank() == 0:
        write_text_atomically(file, json_text([dataclasses.asdict(sample) for sample in samples]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["quick"])
