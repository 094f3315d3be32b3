# SPDX-License-Identifier: Apache-2.0
"""What a case of `user_networks` is, and the usual ways to write one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mindspore import Tensor, nn

STEPS = 4


@dataclass(frozen=True)
class Case:
    """A script of a user."""

    script: Callable[..., Any]
    """Of `parallel`: what it prints, and the Cells that it trains."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Where the mesh has tp; without any the case is for dp alone."""
    settings: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    """What it is told instead."""


def normal(*shape, seed=1):
    return Tensor(np.random.RandomState(seed).randn(*shape).astype(np.float32))


def uniform(*shape, seed=1):
    return Tensor(np.random.RandomState(seed).rand(*shape).astype(np.float32))


def ids(most, *shape, seed=2, first=0):
    return Tensor(np.random.RandomState(seed).randint(first, most, shape).astype(np.int32))


def bits(*shape, seed=6):
    return Tensor(np.random.RandomState(seed).randint(0, 2, shape).astype(np.float32))


def columns(*names):
    """Rules for layers whose weights are sharded by output over tp."""
    return {f"{name}.matmul": [["dp", None], ["tp", None]] for name in names}


def rows(*names):
    """For those that follow them, whose inputs are sharded so."""
    return {f"{name}.matmul": [["dp", "tp"], [None, "tp"]] for name in names}


def channels(*names, kind="conv2d", dims=4):
    return {f"{name}.{kind}": [["dp", *[None] * (dims - 1)], ["tp", *[None] * (dims - 1)]] for name in names}


def momentum(parameters):
    """Nothing hides how large a gradient is."""
    return nn.Momentum(parameters, 0.05, 0.9, weight_decay=0.01)


def by_step(net, batch, optimizer=momentum):
    step = nn.TrainOneStepCell(net, optimizer(net.trainable_params())).set_train()
    return [step(*batch) for _ in range(STEPS)]


def trained(make, *batch, rules=None, settings=None, style=by_step, refused="", **options):
    """A case: a network, trained in the usual way, or in that of `style`."""

    def script(parallel):
        net = make()
        return style(parallel(net), batch, **options), [net]

    return Case(script, rules or {}, settings or {}, refused)
