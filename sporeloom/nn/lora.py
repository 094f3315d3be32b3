# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of frozen matrices."""

from mindspore import nn, ops

from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.dropout import Dropout, number_dropouts
from sporeloom.nn.linear import Linear
from sporeloom.nn.parameter import declared_parameter
from sporeloom.nn.replace import replace_cell
from sporeloom.nn.routing import freeze_balance_biases


class LoRALinear(nn.Cell):
    """y = x W^T + scale * (x A^T) B^T + b, with A (r, in) and B (out, r) in float32; W and b are those of the
    given part.
    """

    has_kernel = False
    """There is no kernel of it."""

    def __init__(self, base: Linear, specs: ParameterSpecs, scale: float, dropout_rate: float = 0.0):
        super().__init__()
        self.weight, self.dtype, self.has_bias = base.weight, base.dtype, base.has_bias
        self.matmul, self.cast = ops.MatMul(transpose_b=True), ops.Cast()
        if self.has_bias:
            self.bias, self.bias_add = base.bias, ops.Add()
        self.lora_a, self.lora_b = declared_parameter(specs["lora_a"]), declared_parameter(specs["lora_b"])
        self.lora_dropout = Dropout(dropout_rate)
        self.lora_down, self.lora_up = ops.MatMul(transpose_b=True), ops.MatMul(transpose_b=True)
        self.lora_scale, self.lora_add, self.scale = ops.Mul(), ops.Add(), scale

    def construct(self, x, dropout_keys=None):  # (N, in) -> (N, out)
        y = self.matmul(x, self.cast(self.weight, self.dtype))
        narrow = self.lora_down(self.lora_dropout(x, dropout_keys), self.cast(self.lora_a, self.dtype))  # (N, r)
        narrow = self.lora_scale(narrow, self.scale)
        y = self.lora_add(y, self.lora_up(narrow, self.cast(self.lora_b, self.dtype)))
        return self.bias_add(y, self.cast(self.bias, self.dtype)) if self.has_bias else y


def attach_adapters(model: nn.Cell, lora: LoRAConfig) -> None:
    """Add adapters to a decoder, and freeze everything else but the head of a reward model: also the balance biases of
    routers, which are not saved with adapters."""
    freeze_balance_biases(model)
    for parameter in model.get_parameters():
        parameter.requires_grad = False
    if model.config.value_head:
        model.head.weight.requires_grad = True
    cells, specs = dict(model.cells_and_names()), ParameterSpecs.of(lora.specs(model.config))
    for path in lora.targets(model.config):
        replace_cell(model, path, LoRALinear(cells[path], specs.within(path), lora.scale(path), lora.lora_dropout))
    number_dropouts(model)
