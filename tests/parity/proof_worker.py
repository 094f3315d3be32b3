# SPDX-License-Identifier: Apache-2.0
"""What the processes of a proof do, for test_certify; with a fault of the engine planted on request."""

import contextlib
import unittest.mock
from pathlib import Path

from sporeloom.certification.subject import train as train_subject
from sporeloom.core.reader import read_json
from sporeloom.runtime.cpu.transport import Collectives

UP_WEIGHT = (256, 64)
"""Of the small model."""


def all_reduce_all_but_one(group, x, reduce, all_reduce=Collectives.all_reduce):
    return x.copy() if x.shape == UP_WEIGHT else all_reduce(group, x, reduce)


FAULTS = {
    "an all-reduce is lost": (Collectives, "all_reduce", all_reduce_all_but_one),
}


def train(folder, which, fault=None):
    planted = unittest.mock.patch.object(*FAULTS[fault]) if fault else contextlib.nullcontext()
    with planted:
        train_subject(read_json(Path(folder) / "subject.json").mapping, which, Path(folder))
