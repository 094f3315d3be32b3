# SPDX-License-Identifier: Apache-2.0
"""Validation while training: losses of other texts by the present weights, the best of them, and when to stop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

from sporeloom.data.batch import Batch
from sporeloom.models.family import family_module
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.loss import BatchTokenLosses
from sporeloom.nn.replace import share_parameters
from sporeloom.parallel.parallelize import parallelize
from sporeloom.runtime.engine import Engine
from sporeloom.train.config import Run


@dataclass
class BestLoss:
    """The lowest validation loss of a run, and how many validations since then had none as low."""

    patience: int = 0
    """Number of these after which the run is over; 0: never."""
    value: float | None = None
    step: int = 0
    num_worse: int = 0

    def follow(self, step: int, loss: float) -> bool:
        """Record the validation loss after `step`. Returns whether it is the lowest so far."""
        if math.isfinite(loss) and (self.value is None or loss < self.value):
            self.value, self.step, self.num_worse = loss, step, 0
            return True
        self.num_worse += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether the run should stop."""
        return 0 < self.patience <= self.num_worse

    def describe(self) -> str:
        """The lowest loss in words."""
        if self.value is None:
            return "no validation loss was finite"
        return f"the lowest validation loss is {self.value:.4f}, of step {self.step}"

    def state(self) -> dict[str, Any]:
        """State that a resumed run needs."""
        return {"value": self.value, "step": self.step, "num_worse": self.num_worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.value = None if state["value"] is None else float(state["value"])
        self.step, self.num_worse = int(state["step"]), int(state["num_worse"])


class HeldOut(Protocol):
    """A validation set, ready to be compared with the present weights."""

    @property
    def content(self) -> str:
        """Identity of its content."""
        ...

    def metrics(self) -> dict[str, float]:
        """`loss`, and further numbers, by the present weights; the same on all ranks, which all call it."""
        ...


class Validation:
    """Computes the losses of validation sets. All ranks make the same calls.

    They are those of the parameters that are trained, on their mesh, without dropout, dropped tokens, losses of routers and
    multi-token prediction.
    """

    def __init__(self, engine: Engine, net: nn.Cell, sets: Mapping[str, HeldOut], every: int, patience: int):
        self.engine, self.net, self.sets, self.every = engine, net, sets, every
        self.best = BestLoss(patience)

    def is_due(self, step: int, last: int) -> bool:
        """Whether to validate after `step`."""
        return step == last or (self.every > 0 and step % self.every == 0)

    def metrics(self, kind: str = "") -> dict[str, float]:
        """Metrics of each set, and the mean of the losses; the same on all ranks. `kind`: prefix of their last names."""
        self.engine.refresh(self.net, self.net.parallel_report)
        found, losses = dict[str, float](), list[float]()
        for name, held_out in self.sets.items():
            metrics = held_out.metrics()
            losses.append(metrics["loss"])
            found |= {f"validation/{name}/{kind}{metric}": value for metric, value in metrics.items()}
        return {**found, f"validation/{kind}loss": math.fsum(losses) / len(losses)}

    def state(self) -> dict[str, Any]:
        """State that a resumed run needs: the best loss, and of which sets it is."""
        return {**self.best.state(), "sets": {name: held_out.content for name, held_out in self.sets.items()}}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Continue from a saved state. Returns whether its best loss is of the same sets; if not, it counts no more."""
        is_same = dict(state["sets"]) == self.state()["sets"]
        self.best.restore(state if is_same else dataclasses.asdict(BestLoss()))
        return is_same


class TokenLosses:
    """Mean losses of tokens by a network with the parameters of the trained one, as `sporeloom score` computes them."""

    def __init__(self, run: Run, engine: Engine, trained: nn.Cell):
        self.engine, self.net = engine, _network(run, trained)
        self.source = run.strategy.mesh.first_rank_of_last_stage

    def mean(self, batches: Iterable[Batch]) -> float:
        """Total loss of all tokens that count, those whose loss weight is above 0, divided by their number, in float64."""
        total, num_tokens = 0.0, 0
        for batch in batches:
            counted = batch.loss_weights > 0
            output = self.engine.run(self.net, *map(Tensor, batch))
            if self.engine.is_log_rank:
                losses = output.asnumpy().reshape(counted.shape)
                total += float(losses[counted].sum(dtype="float64"))
            num_tokens += int(counted.sum())
        mean: float = self.engine.broadcast_value(total / num_tokens, self.source)
        return mean


@dataclass(frozen=True)
class TokenSet:
    """A validation set whose loss is the mean over its tokens."""

    losses: TokenLosses
    batches: Callable[[], Iterable[Batch]]
    content: str

    def metrics(self) -> dict[str, float]:
        return {"loss": self.losses.mean(self.batches())}


def _network(run: Run, trained: nn.Cell) -> nn.Cell:
    """Network of a batch's token losses with the parameters of the trained one.

    Raises:
        RuntimeError: it has a parameter that the trained one has not.
    """
    with no_init_parameters():
        net: nn.Cell = family_module(run.family, "model").ModelWithLoss(run.model, BatchTokenLosses())
        if run.lora:
            attach_adapters(net.model, run.lora)
    share_parameters(net.model, trained.model)
    known = {id(parameter) for parameter in trained.get_parameters()}
    if missing := [parameter.name for parameter in net.get_parameters() if id(parameter) not in known]:
        raise RuntimeError(f"validation: {missing[0]} is not a parameter of the trained network")
    parallelize(net, run.strategy, whole=False)
    return net.set_train(False)
