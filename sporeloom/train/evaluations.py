# SPDX-License-Identifier: Apache-2.0
"""Scores on benchmarks by the weights of some steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mindspore import nn

from sporeloom.runtime.engine import Engine


class Evaluator(Protocol):
    """Benchmarks, ready to be run with the present weights of the trained network."""

    def metrics(self) -> dict[str, float]:
        """Scores by name, on the logging rank; all ranks call it."""
        ...


class Evaluations:
    """Evaluates a model while it is trained. All ranks make the same calls.

    Args:
        net: the trained network.
        evaluators: of all benchmarks.
        every: interval in steps; 0: after the last step only.
    """

    def __init__(self, engine: Engine, net: nn.Cell, evaluators: Sequence[Evaluator], every: int):
        self.engine, self.net, self.evaluators, self.every = engine, net, evaluators, every

    def is_due(self, step: int, last: int) -> bool:
        """Whether to evaluate after `step`."""
        return step == last or (self.every > 0 and step % self.every == 0)

    def metrics(self) -> dict[str, float]:
        """Scores as metrics of a step: `evaluation/TASK/METRIC`, and their standard errors."""
        self.engine.refresh(self.net, self.net.parallel_report)
        scores = [evaluator.metrics() for evaluator in self.evaluators]
        return {f"evaluation/{name}": value for found in scores for name, value in found.items()}
