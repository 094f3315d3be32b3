# SPDX-License-Identifier: Apache-2.0
"""Record a few steps of several processes, with one bit flipped in one rank on request."""

import contextlib
import dataclasses
import io
import itertools
import json
import shutil
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from sporeloom.certification.training import decoder_batches
from sporeloom.cli.bisect import main
from sporeloom.models.family import size_config
from sporeloom.parallel.parallelize import parallelize, wrap
from sporeloom.parallel.step import TrainStep
from sporeloom.planner.task import PLAIN_TEXT
from sporeloom.runtime.cpu.transport import Transport
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.loader import load_strategy
from sporeloom.tasks.example import task_network
from sporeloom.train.ema import Averages
from sporeloom.train.optim import BothOptimizers

STEPS, FAULTY_STEP, KEEP = 3, 2, 2


@dataclasses.dataclass(frozen=True)
class Fault:
    """A flipped bit. Positions are fractions: of the messages or weights of the rank, and of the numbers of that one."""

    rank: int
    kind: str
    """message or weight"""
    which: float
    at: float
    bit: int


def flipped(array, at, bit):
    """A copy with one bit of one float32 flipped."""
    bits = np.array(array).reshape(-1).view(np.uint32)
    bits[int(at * bits.size)] ^= np.uint32(1 << bit)
    return bits.view(np.float32).reshape(np.shape(array))


@contextlib.contextmanager
def receiving(change):
    """Let `change` (number, peer, tag, array) -> array have every array of float32 that this rank receives in this block."""
    receive, serial = Transport.receive, itertools.count()

    def changed(transport, peer, tag):
        found = receive(transport, peer, tag)
        is_float = isinstance(found, np.ndarray) and found.dtype == np.float32
        return change(next(serial), peer, tag, found) if is_float else found

    Transport.receive = changed
    try:
        yield
    finally:
        Transport.receive = receive


class Training:
    """A small network, whose runs begin from the same state each time."""

    def __init__(self, strategy, folder, rows):
        self.engine = Engine.start(strategy, in_graphs=True)
        self.engine.backend.record(folder, KEEP)
        self.recorder = self.engine.backend._recorder
        ms.set_seed(3)
        config = dataclasses.replace(size_config("pangu", "tiny").with_layers(2), dropout_rate=0.0, seq_len=16)
        net = task_network("pangu", config, PLAIN_TEXT)
        report = parallelize(net, strategy)
        self.optimizer = BothOptimizers(net.trainable_params(), None)
        network = wrap(net, strategy, 1)
        averages, rank = Averages(self.optimizer.parameters, 0.5), self.engine.rank
        sums = self.engine.all_reduce()
        self.step = TrainStep(network, self.optimizer, report, rank, sums, averages=averages).set_train()
        self.batches = list(itertools.islice(decoder_batches(config, rows), STEPS))
        self.num_messages = 0
        self._perform(1)  # compiles
        self.programs = self.recorder.root
        self.start = {p.name: p.asnumpy().copy() for p in self.step.get_parameters()}

    def _perform(self, number):
        self.optimizer.adam.prepare(number, 1e-3)
        self.optimizer.sgd.prepare(number, 0.0)
        self.step.averages.prepare()
        self.engine.run(self.step, *self.batches[number - 1])

    def run(self, folder, fault):
        """Record a run. Returns what was flipped, if it is of this rank: a weight, or the tag and sender of a message."""
        self.recorder.root = folder / "record" / self.programs.name
        if self.recorder.root != self.programs:
            shutil.copytree(self.programs, self.recorder.root, ignore=shutil.ignore_patterns("step-*"))
        for parameter in self.step.get_parameters():
            parameter.set_data(Tensor(self.start[parameter.name]))
        answers = []
        for number in range(1, STEPS + 1):
            here = fault if number == FAULTY_STEP and fault and fault.rank == self.engine.rank else None
            if here and here.kind == "weight":
                answers.append(self._flip_weight(here))
            self.engine.backend.begin_step(number)
            with receiving(lambda *given, here=here: self._look(here, answers, *given)):
                self._perform(number)
        return answers[0] if answers else None

    def _look(self, fault, answers, number, peer, tag, array):
        if self.recorder.root == self.programs:  # the run without a fault
            self.num_messages = max(self.num_messages, number + 1)
        if not fault or fault.kind != "message" or number != int(fault.which * self.num_messages):
            return array
        answers.append([str(tag), peer])
        return flipped(array, fault.at, fault.bit)

    def _flip_weight(self, fault):
        held = self._state()
        name = held[int(fault.which * len(held))]
        (parameter,) = (p for p in self.step.get_parameters() if p.name == name)
        parameter.set_data(Tensor(flipped(parameter.asnumpy(), fault.at, fault.bit)))
        return name

    def _state(self):
        """Weights and optimizer state in float32 that this rank's graphs have, by the run without a fault."""
        path = self.programs / f"step-{FAULTY_STEP:08}" / "step.json"
        return [name for name, each in json.loads(path.read_text())["state"].items() if each["dtype"] == "float32"]


def train(strategy, folders, faults, rows=4):
    """Record a run for each fault; None, which is first: without a fault. Returns what was flipped, for each run."""
    ms.set_device("CPU")
    training = Training(load_strategy(strategy), Path(folders[0]), rows)
    done = [training.run(Path(folder), fault and Fault(**fault)) for folder, fault in zip(folders, faults, strict=True)]
    training.engine.close()
    return done


def bisect(a, b):
    """Exit code and output of `sporeloom bisect`, which has no tools/bisect.py: that would hide the standard library's."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main([a, b])
    return [code, said.getvalue()]
