# SPDX-License-Identifier: Apache-2.0
"""Trains with an evaluation that fails, for test_evaluate_while_training."""

from importlib import import_module

from sporeloom.core.errors import ConfigError
from sporeloom.tasks.benchmarks import TaskEvaluator


def run(arguments):
    """Train by these arguments. Returns the problem that ended the run."""

    def fail(self):
        raise ConfigError("the benchmark has no answer")

    metrics, TaskEvaluator.metrics = TaskEvaluator.metrics, fail
    try:
        import_module("sporeloom.cli.train").main(arguments)
    except ConfigError as error:
        return error.problems[0]
    finally:
        TaskEvaluator.metrics = metrics
    return None
