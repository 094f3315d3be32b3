# SPDX-License-Identifier: Apache-2.0
"""Trains with a rank that computes wrongly once, for test_rerun."""

import unittest.mock

from mindspore import Tensor

from sporeloom.core.command_line import parse_args
from sporeloom.parallel.step import TrainStep
from sporeloom.runtime.engine import Engine
from sporeloom.runtime.environment import launched_processes
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.rerun import SilentCorruptionError
from sporeloom.train.trainer import train


def train_with_a_fault(*arguments):
    """What each rank says; the last bit of one weight of rank 3 flips in the second run of step 2."""
    *words, out = arguments
    run = check(parse_args(TrainConfig, "", [*words, "--output-dir", out]), launched_processes())
    plain, steps = Engine.run, []

    def faulty(engine, cell, *inputs):
        result = plain(engine, cell, *inputs)
        steps.append(cell)
        if engine.rank == 3 and isinstance(cell, TrainStep) and len(steps) == 3:
            name = next(name for name in engine.backend.layouts if name.startswith("model.") and ".weight" in name)
            weight = next(p for p in cell.get_parameters() if p.name == name)
            value = weight.asnumpy().copy()
            value.reshape(-1).view("uint32")[0] ^= 1
            weight.set_data(Tensor(value), slice_shape=weight.sliced)
        return result

    with unittest.mock.patch.object(Engine, "run", faulty):
        try:
            train(run)
        except SilentCorruptionError as error:
            return str(error)
    return "nothing"
