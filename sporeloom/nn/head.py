# SPDX-License-Identifier: Apache-2.0
"""Logits over the vocabulary, or a value."""

from mindspore import dtype as mstype
from mindspore import nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parts.spec import ParameterSpecs
from sporeloom.nn.linear import MAX_KERNEL_ROWS
from sporeloom.nn.parameter import declared_parameter


class TiedHead(nn.Cell):
    """Logits with the token embedding as weights (tied)."""

    has_kernel = False

    def __init__(self, config: ModelConfig, dtype: mstype.Type):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.pick, self.matmul, self.cast = ops.Gather(), ops.MatMul(transpose_b=True), ops.Cast()
        self.factor, self.scale_logits = config.logits_scale, ops.Mul()

    def construct(self, x, word_table, rows=None):  # (B*T, D), (V, D) -> (B*T or len(rows), V) float32
        if rows is not None:
            x = self.pick(x, rows, 0)
        return self.logits(x, word_table)

    def logits(self, x, table):
        if self.has_kernel and x.shape[0] <= MAX_KERNEL_ROWS:
            return self.scaled(self.kernel(x, table))
        return self.scaled(self.cast(self.matmul(x, self.cast(table, self.dtype)), mstype.float32))

    def scaled(self, logits):
        return logits if self.factor == 1.0 else self.scale_logits(logits, self.factor)


class Head(TiedHead):
    """Logits with a matrix of its own, (V, D)."""

    def __init__(self, config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type):
        super().__init__(config, dtype)
        self.weight = declared_parameter(specs["weight"])

    def construct(self, x, word_table, rows=None):  # (B*T, D), unused -> (B*T or len(rows), V) float32
        if rows is not None:
            x = self.pick(x, rows, 0)
        return self.logits(x, self.weight)


class HeadInput(nn.Cell):
    """Input of the head at some tokens: what a model knows of a text when it has read up to there."""

    def __init__(self):
        super().__init__()
        self.pick, self.cast = ops.Gather(), ops.Cast()

    def construct(self, x, rows):  # (B*T, D) -> (len(rows), D) float32
        return self.cast(self.pick(x, rows, 0), mstype.float32)


class ValueHead(nn.Cell):
    """One value in place of logits: the reward or value of a token."""

    def __init__(self, specs: ParameterSpecs, dtype: mstype.Type | None):
        super().__init__()
        self.weight = declared_parameter(specs["weight"])
        self.pick, self.project, self.dtype = ops.Gather(), ops.MatMul(transpose_b=True), dtype
        self.cast = ops.Cast()

    def construct(self, x, word_table, rows=None):  # (B*T, D), unused -> (B*T or len(rows), 1) float32
        if rows is not None:
            x = self.pick(x, rows, 0)
        return self.project(self.cast(x, mstype.float32), self.weight)


def build_head(config: ModelConfig, specs: ParameterSpecs, dtype: mstype.Type) -> nn.Cell:
    """The kind of head a model has."""
    if config.value_head:
        return ValueHead(specs, dtype)
    return TiedHead(config, dtype) if config.tied_embedding else Head(config, specs, dtype)
