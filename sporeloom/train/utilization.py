# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a training step, and the fraction of a device's peak that they are (MFU and HFU).

The counts are the planner's. Where it does not count all that a step computes there are none.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from sporeloom.planner.closed_forms import job_of
from sporeloom.planner.cluster import chips
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.step_time import flops_per_device
from sporeloom.train.config import Run

COUNTED_TASKS = ("pretraining", "sft", "reward", "simpo", "orpo")
"""Tasks whose steps are a forward and a backward pass of one model; the others sample or run a second model."""
DROPPING_TASKS = ("pretraining", "sft")
"""Tasks whose experts drop what is beyond their capacity."""


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step on a device, mean over all devices."""

    model: float
    """Forward and backward pass, without recomputation; attention to all positions."""
    hardware: float
    """The same with recomputation."""

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(self.model + other.model, self.hardware + other.hardware)


def uncounted(run: Run) -> str | None:
    """The first part of a run's steps that the planner does not count; None: it counts all."""
    model = run.model
    parts = {
        f"task {run.config.task}": run.config.task not in COUNTED_TASKS,
        "random layerwise token dropping": run.random_ltd is not None,
        "frozen parameter groups": bool(run.groups and run.groups.frozen_names),
        "multi-token prediction": model.num_mtp_layers > 0,
        "sliding windows": any(model.windows),
        "sparse attention": model.indexer is not None,
        "residual streams": model.streams is not None,
    }
    return next((what for what, is_there in parts.items() if is_there), None)


class Utilization:
    """Converts steps and their times to FLOP/s, MFU and HFU."""

    def __init__(self, run: Run, target: str):
        self._run, self._is_counted, self._target = run, uncounted(run) is None, target
        self.num_devices = run.strategy.mesh.size
        chip = run.config.chip
        self.peak: float | None = chips()[chip]["peak_tflops"] * 1e12 if chip else None
        """FLOP/s of one device at its peak; None: unknown."""
        self._of_shape = functools.cache(self._count)

    def of_step(self, num_sequences: int, seq_len: int) -> StepFlops | None:
        """FLOPs of a step; None where not all of them are counted."""
        return self._of_shape(num_sequences, seq_len) if self._is_counted else None

    def _count(self, num_sequences: int, seq_len: int) -> StepFlops:
        run = self._run
        dims = of_decoder(run.model, seq_len, run.config.task in DROPPING_TASKS)
        job = job_of(run.strategy, run.model, num_sequences, run.config.accumulate)
        if self._target != "Ascend" and run.strategy.recompute:  # the planner assumes the kernels of Ascend
            job = dataclasses.replace(job, recompute=run.strategy.recompute.kind)
        return StepFlops(*flops_per_device(dims, job, frozen=run.lora is not None))

    def rates(self, tokens: int, flops: StepFlops | None, seconds: float) -> dict[str, float]:
        """Metrics of `tokens`, those of all devices together, computed in `seconds`; `flops` of one device."""
        found = {"tokens_per_s_per_device": tokens / seconds / self.num_devices}
        if flops:
            found["flops_per_s_per_device"] = flops.model / seconds
            if self.peak:
                found["mfu"] = flops.model / seconds / self.peak
                found["hfu"] = flops.hardware / seconds / self.peak
        return found
