# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose hyperparameters of each step come from the host, so that one graph serves every schedule.

The numbers are parameters, not inputs: MindSpore's pipeline pass takes every input for a part of the batch.
"""

from __future__ import annotations

import math

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.train.groups import Scales

_sgd = ops.MultitypeFuncGraph("sgd")


def _updates(adam):
    """Function that updates one parameter by the operator `adam`."""
    update = ops.MultitypeFuncGraph("adam")

    @update.register("Tensor", "Tensor", "Tensor", "Float", "Float", "Bool", "Tensor", "Tensor", "Tensor", "Tensor")
    def _update(rate, epsilon, decay, beta1, beta2, decayed, weight, moment1, moment2, gradient):
        weight_decay = decay if decayed else ops.zeros_like(decay)
        return adam(weight, moment1, moment2, rate, beta1, beta2, epsilon, weight_decay, gradient)

    @update.register("Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Bool", "Tensor", "Tensor", "Tensor", "Tensor")
    def _update_or_not(rate, epsilon, decay, beta1, beta2, decayed, weight, moment1, moment2, gradient):
        weight_decay = decay if decayed else ops.zeros_like(decay)
        return adam(weight, moment1, moment2, rate, beta1, beta2, epsilon, weight_decay, gradient)

    @update.register(
        *("Tensor", "Tensor", "Tensor", "Float", "Float"),
        *("Float", "Float", "Tensor", "Tensor", "Tensor", "Tensor"),
    )
    def _grouped(rate, epsilon, decay, beta1, beta2, factor, own_decay, weight, moment1, moment2, gradient):
        return adam(weight, moment1, moment2, rate * factor, beta1, beta2, epsilon, decay * own_decay, gradient)

    @update.register(
        *("Tensor", "Tensor", "Tensor", "Tensor", "Tensor"),
        *("Float", "Float", "Tensor", "Tensor", "Tensor", "Tensor"),
    )
    def _grouped_or_not(rate, epsilon, decay, beta1, beta2, factor, own_decay, weight, moment1, moment2, gradient):
        return adam(weight, moment1, moment2, rate * factor, beta1, beta2, epsilon, decay * own_decay, gradient)

    return update


_adam, _adam_on_host = _updates(ops.AdamWeightDecay()), _updates(ops.AdamWeightDecay().set_device("CPU"))


@_sgd.register("Tensor", "Tensor", "Tensor")
def _sgd_update(rate, weight, gradient):
    return ops.assign_sub(weight, rate * gradient)


def is_decayed(name: str) -> bool:
    """PanGu's rule: decay all parameters but biases and LayerNorms (embeddings ARE decayed). Source: MODEL names
    in src/utils.py."""
    return not name.endswith("bias") and "norm" not in name


def optimizer_number(name: str) -> Parameter:
    return Parameter(Tensor(0.0, mstype.float32), name=f"optimizer_{name}", requires_grad=False)


def set_number(parameter: Parameter, value: float) -> None:
    parameter.set_data(Tensor(value, mstype.float32))


class AdamW(nn.Cell):
    """Adam with decoupled weight decay; the moments are float32.

    `bias_correction=False` is the reference implementation's (AdamWeightDecay): p -= lr (m / (sqrt(v) + eps) + wd p).
    With it, the standard one: m and v are divided by 1 - beta^t first. Both are the same fused operator, given other
    numbers by `prepare`. `on_host`: the moments lie in the host's memory, whose processors update the parameters. `scales`:
    learning rate factor and weight decay of each parameter, where groups of them have their own.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        bias_correction=False,
        on_host=False,
        scales: Scales | None = None,
    ):
        super().__init__(auto_prefix=False)
        self.update = _adam_on_host if on_host else _adam
        self.parameters = ParameterTuple(parameters)
        self.moments1, self.moments2 = self.states("adam_m"), self.states("adam_v")
        self.beta1, self.beta2 = beta1, beta2
        self.epsilon, self.weight_decay, self.bias_correction = epsilon, weight_decay, bias_correction
        self.rate, self.adapted_epsilon, self.decay = (
            optimizer_number("rate"),
            optimizer_number("epsilon"),
            optimizer_number("decay"),
        )
        self.decayed = tuple(is_decayed(parameter.name) for parameter in parameters)
        self.is_grouped = scales is not None
        if scales is not None:
            own = [weight_decay if is_it else 0.0 for is_it in self.decayed]
            self.factors, self.decays = scales.factors, scales.decays_or(own)
        self.map = ops.HyperMap()

    def states(self, prefix: str) -> ParameterTuple:
        """Create a state of zeros for each parameter."""
        return self.parameters.clone(prefix=prefix, init="zeros")

    def prepare(self, update: int, learning_rate: float) -> None:
        """Set the numbers of an update, counted from 1; steps that update nothing are not counted."""
        scale1, scale2 = 1.0, 1.0
        if self.bias_correction:
            scale1, scale2 = 1 - self.beta1**update, math.sqrt(1 - self.beta2**update)
        set_number(self.rate, learning_rate * scale2 / scale1)
        set_number(self.adapted_epsilon, self.epsilon * scale2)
        set_number(self.decay, (1.0 if self.is_grouped else self.weight_decay) * scale1 / scale2)

    def construct(self, gradients, overflow=None):
        """With `overflow`, a bool that the gradients, then all 0, were not finite, nothing changes where it is true."""
        rate, beta1, beta2 = self.rate, self.beta1, self.beta2
        if overflow is not None:
            rate = ops.masked_fill(rate, overflow, 0.0)
            beta1 = ops.masked_fill(Tensor(beta1, mstype.float32), overflow, 1.0)
            beta2 = ops.masked_fill(Tensor(beta2, mstype.float32), overflow, 1.0)
        update = ops.partial(self.update, rate, self.adapted_epsilon, self.decay, beta1, beta2)
        if self.is_grouped:
            states = (self.parameters, self.moments1, self.moments2)
            return self.map(update, self.factors, self.decays, *states, gradients)
        return self.map(update, self.decayed, self.parameters, self.moments1, self.moments2, gradients)


class SGD(nn.Cell):
    """p -= lr g."""

    def __init__(self, parameters: list[Parameter]):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.rate = optimizer_number("rate")
        self.map = ops.HyperMap()

    def prepare(self, update: int, learning_rate: float) -> None:
        """Set the numbers of an update, counted from 1; steps that update nothing are not counted."""
        set_number(self.rate, learning_rate)

    def construct(self, gradients, overflow=None):
        """Gradients that were not finite are 0."""
        return self.map(ops.partial(_sgd, self.rate), self.parameters, gradients)


class BothOptimizers(nn.Cell):
    """AdamW and SGD in one graph, to compile a comparison once; the one with learning rate 0 changes nothing."""

    def __init__(self, parameters, on_host=False):
        super().__init__(auto_prefix=False)
        self.adam, self.sgd = AdamW(parameters, on_host=on_host), SGD(parameters)
        self.sgd.rate.name = "sgd_rate"
        self.parameters = self.adam.parameters

    def construct(self, gradients, overflow=None):
        return self.sgd(ops.depend(gradients, self.adam(gradients, overflow)))
