# SPDX-License-Identifier: Apache-2.0
"""One process of a proof. `worker.py SUBJECT.json one_device` trains on one device, `worker.py SUBJECT.json 0,1,2` under
msrun the scaled-down strategies of these numbers. `worker.py SUBJECT.json ranks 0,37` partitions ranks of the full mesh."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

sys.path[0] = ""  # not this folder: its modules have common names

from sporeloom.certification.shrink import FULL_MESH, IN_PROOF, SUBJECT  # noqa: E402
from sporeloom.core.errors import run_tool  # noqa: E402
from sporeloom.core.reader import read_json  # noqa: E402
from sporeloom.runtime.environment import prepare_environment  # noqa: E402


def main(argv: Sequence[str]) -> int:
    prepare_environment()
    os.environ[IN_PROOF] = "1"
    subject = Path(argv[0])
    module, values = import_module(SUBJECT), read_json(subject).mapping
    if argv[1] == FULL_MESH:
        module.compile_ranks(values, list(map(int, argv[2].split(","))), subject.parent)
    else:
        module.train(values, argv[1], subject.parent)
    return 0


if __name__ == "__main__":
    run_tool(main)
