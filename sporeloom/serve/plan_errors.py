# SPDX-License-Identifier: Apache-2.0
"""Intervals of planned latency and throughput, from the errors on published figures of servers. The figures:
benchmarks/plan_serve.py."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sporeloom.core.reader import read_yaml
from sporeloom.models.config import ModelConfig
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.errors import NoInterval
from sporeloom.serve.plan import ServingLoad

ERRORS = Path(__file__).with_name("plan_errors.yaml")
CHIP = "a100_80gb"
"""The chip of all published figures."""
FIGURES = {"first_token_s": "time to first token", "decode_s": "time per output token", "tokens_per_s": "throughput"}


@dataclass(frozen=True)
class ServingIntervals:
    """Intervals of measured figures, as multiples of the predicted ones."""

    coverage: float
    """Minimum fraction of the published figures inside."""
    is_full: bool
    """Whether the plan is at a full cache; those of the published figures are at the mean context."""
    figures: dict[str, dict[str, Any]]
    """Name of `FIGURES` -> `low`, `high`, `count`, `median_error` and `bias` of what is predicted."""

    def of(self, name: str, value: float) -> tuple[float, float]:
        return self.figures[name]["low"] * value, self.figures[name]["high"] * value

    def explain(self) -> str:
        """Explain the bounds."""
        errors = ", ".join(
            f"{FIGURES[name]} {one['median_error']:.0%} of {one['count']}" for name, one in self.figures.items()
        )
        how = (
            "planned at the mean context, which these engines read; sporeloom serve, and this plan, read a full cache "
            "in each step"
            if self.is_full
            else "planned at the mean context like this; sporeloom serve reads a full cache in each step, which takes longer"
        )
        return (
            f"at least {self.coverage:.0%} of the figures that TensorRT-LLM and lmdeploy publish for dense models in half "
            f"precision on {CHIP} lie inside (median errors: {errors}), {how}; none is of MindSpore, whose kernels may be "
            "slower"
        )


@functools.cache
def _published() -> Mapping[str, Any]:
    return read_yaml(ERRORS).mapping


def serving_intervals(model: ModelConfig, cluster: Cluster, load: ServingLoad) -> ServingIntervals | NoInterval:
    """The intervals of a plan, or the reason why there are none."""
    if cluster.efficiency or cluster.measured:
        return NoInterval("the cluster file gives efficiencies in place of those fitted on published runs")
    if cluster.chip != CHIP or cluster.unpublished:
        return NoInterval(f"no figure of a server on {cluster.device_name} was compared, only on {CHIP}")
    if model.experts:
        return NoInterval("no figure of a model with experts was compared")
    if load.weights != "float32" or load.kv_cache == "int8" or model.compute_dtype == "float32":
        return NoInterval("all figures that were compared are of weights and a KV cache in half precision")
    found = _published()
    return ServingIntervals(found["coverage"], load.mean_context is None, found["figures"])
