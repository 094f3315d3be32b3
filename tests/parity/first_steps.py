# SPDX-License-Identifier: Apache-2.0
"""The first step of training two small networks, by four ranks and by one device, compared as a certificate and `check=True`
compare it."""

import tempfile

import all_ranks
import mindspore as ms
import numpy as np
from planted_networks import BY_ROW, GRID, NETWORKS, FirstStep

from sporeloom.certification.proof import LIMITS
from sporeloom.partition.grid import DeviceGrid
from sporeloom.runtime.one_device import Comparison
from sporeloom.runtime.spmd.compile import compile_for_one_device


class FirstSteps:
    """Of both networks, by one device and by four ranks."""

    def __init__(self):
        ms.set_device("CPU")
        ms.set_context(mode=ms.GRAPH_MODE)
        self.folder = tempfile.TemporaryDirectory()
        self.of = {name: _Subject(name, self.folder.name) for name in NETWORKS}

    def differences(self):
        """What a certificate finds, and what `check=True` does; "" if nothing. By network."""
        return {name: subject.differences() for name, subject in self.of.items()}


class _Subject:
    def __init__(self, name, folder):
        step, self.inputs, self.folder = FirstStep(name).set_train(), NETWORKS[name].inputs, folder
        self.values = {p.name: p.asnumpy().copy() for p in step.get_parameters()}
        self.weights = [p.name for p in step.net.trainable_params()]
        self.model = compile_for_one_device(step, [(x.shape, x.dtype) for x in self.inputs])
        self.grid = DeviceGrid(GRID)
        decided = NETWORKS[name].layouts  # of weights, and of what the optimizer keeps of them
        self.layouts = {full: decided[n] for full in self.values if (n := full.rpartition(".")[2]) in decided}
        assert len(self.layouts) == 2 * len(decided)
        self.expected, self.after = all_ranks.run_whole(self.model, self.values, self.inputs, folder, True)

    def differences(self):
        by_row = [(BY_ROW, *((),) * (x.ndim - 1)) for x in self.inputs]
        try:
            merged, _ = all_ranks.sharded_model(self.model, self.grid, self.layouts, by_row)
            found = all_ranks.run(merged, self.grid, self.layouts, self.values, self.inputs, self.folder, True)
        except Exception as error:  # whatever a fault leads to
            words = (
                "MindSpore refuses the graph" if isinstance(error, RuntimeError) else f"{type(error).__name__} {error}"
            )
            words = " ".join(words.split())[:80]
            return {"certificate": words, "check": words}
        ranks = [self.compared(rank, *of_rank) for rank, of_rank in enumerate(found)]
        return {who: next((each[who] for each in ranks if each[who]), "") for who in ("certificate", "check")}

    def compared(self, rank, outputs, after):
        """Of one rank: what a certificate holds against its limits, then what `check=True` finds."""
        pairs = list(zip(("loss", "loss", "norm"), self.expected, outputs, strict=False))
        steepest = max(np.abs(each).max() for each in self.expected[3:])
        gradients = list(zip(self.weights, self.expected[3:], outputs[3:], strict=True))
        steps = [(name, *self.moved(rank, name, after)) for name in self.weights]
        off = [(f"{w} off", abs(b - a) / abs(a), LIMITS["norms" if w == "norm" else "losses"]) for w, a, b in pairs]
        off += [(f"gradient of {n}", np.abs(b - a).max() / steepest, LIMITS["gradients"]) for n, a, b in gradients]
        off += [(f"weight {name}", np.abs(b - a).max(), LIMITS["weights"]) for name, a, b in steps]
        certificate = next((f"{what} by {by:.1e}" for what, by, limit in off if not by <= limit), "")
        check = Comparison.__new__(Comparison)
        check.differences = []
        for what, one, other in pairs:
            check._compare(what, one, other)
        for name, one, other in gradients:
            check._compare(f"the gradient of {name}", one, other, 0.01 * steepest)
        largest = max(np.abs(one).max() for _, one, _ in steps)
        for name, one, other in steps:
            rounding = 4 * float(np.finfo(np.float32).eps) * np.abs(self.values[name]).max()
            check._compare(f"the step of {name}", one, other, 0.01 * largest, rounding)
        return {"certificate": certificate, "check": max(check.differences, default=(0, ""))[1]}

    def moved(self, rank, name, after):
        """How far a rank's part of a weight went, on one device and here."""
        slices = all_ranks.part_of(self.layouts, name, self.values[name].ndim, self.grid)(self.values[name].shape, rank)
        before = self.values[name][slices]
        return self.after[name][slices] - before, after[name] - before
