# SPDX-License-Identifier: Apache-2.0
"""Compiles a Cell for one device with MindSpore's front end, whatever the mesh is."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import cell_graph_executor, mind_ir
from sporeloom.parallel.operators import operators
from sporeloom.runtime.compiler import faster_compilation
from sporeloom.runtime.spmd.branches import why_branching_fails
from sporeloom.runtime.spmd.inlining import BranchError, inline_functions
from sporeloom.runtime.spmd.rank_graph import refusal, remove_dump
from sporeloom.strategy.layout import Shape

_phases = itertools.count()

FAILURES = (AttributeError, RuntimeError, TypeError, ValueError)
LEFT_TO_PYTHON = ("PyExecute", "AbstractAny")
"""Words in MindSpore's error if a graph contains something that it would run in Python."""
SYNTAX_LEVEL, STRICT = "MS_DEV_JIT_SYNTAX_LEVEL", "0"
"""MindSpore's variable for whether its compiler may leave parts of a graph to Python."""
_LAXER = re.compile(r"\.? You can use os\.environ\[.*?current syntax\.")
NO_PYTHON = (
    "a graph computes with operators of MindSpore alone: take no Tensor to NumPy or Python inside construct (asnumpy, item, "
    "an f-string), but return it"
)


def compile_for_one_device(cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
    """Compile `cell` for one device, with every pass of MindSpore's front end. Operators have their paths as attributes.

    Args:
        inputs: shape and NumPy dtype of each input.

    Raises:
        ConfigError: MindSpore cannot compile it.
    """
    for operator in operators(cell):
        operator.primitive.add_prim_attr("path", operator.path)
    with faster_compilation():
        try:
            model = _compiled(cell, inputs)
        except FAILURES as error:
            raise ConfigError(_why_not(error, cell, inputs)) from None
    try:
        inline_functions(model)
    except BranchError as error:
        raise ConfigError(why_branching_fails(error, cell)) from None
    return model


def _compiled(cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> mind_ir.ModelProto:
    tensors = [
        Tensor.from_numpy(np.zeros(shape, dtype)) for shape, dtype in inputs
    ]  # never written, so they use no memory
    # A new phase: for an earlier one MindSpore would return its graph, even if the Cell has changed.
    name = f"export.mindir.one_device.{next(_phases)}"
    try:
        with _undrawn(cell):
            phase, _ = cell_graph_executor.compile(cell, *tensors, phase=name, do_convert=False)
        written = cell_graph_executor._graph_executor.get_func_graph_proto(phase, "mind_ir", False)
    except FAILURES:
        remove_dump(0)
        raise
    return mind_ir.ModelProto.FromString(written)


@contextlib.contextmanager
def _undrawn(cell: nn.Cell) -> Iterator[None]:
    """Keep MindSpore from initializing parameters when it compiles a network for one device: they would be those of the
    full model on one rank."""
    cell.__dict__["init_parameters_data"] = lambda **_: {}
    try:
        yield
    finally:
        del cell.__dict__["init_parameters_data"]


def _why_not(error: Exception, cell: nn.Cell, inputs: Sequence[tuple[Shape, Any]]) -> str:
    """The message for a failed compilation, with its position. For code that MindSpore would leave to Python, which it
    reports without a position, compile again in strict mode."""
    if any(word in str(error) for word in LEFT_TO_PYTHON):
        before = os.environ.get(SYNTAX_LEVEL)
        os.environ[SYNTAX_LEVEL] = STRICT
        try:
            _compiled(cell, inputs)
        except FAILURES as strict:
            error = strict
        finally:
            os.environ.pop(SYNTAX_LEVEL)
            os.environ |= {SYNTAX_LEVEL: before} if before is not None else {}
        said = _LAXER.sub("", refusal(error, "MindSpore would leave a part of the network to Python"))
        return f"{said}; {NO_PYTHON}"
    return refusal(error, "MindSpore cannot compile the network")


@contextlib.contextmanager
def with_global_shapes(parameters: Iterable[Parameter], shapes: Mapping[int, Shape]) -> Iterator[None]:
    """Give parameters that an earlier graph left as shards their global shapes within the block, then restore their values.

    Args:
        shapes: id of a parameter -> global shape; names are not unique across networks.
    """
    parts = []
    for parameter in parameters:
        if parameter.sliced and tuple(parameter.shape) != (whole := shapes[id(parameter)]):
            parts.append((parameter, part := parameter.asnumpy().copy()))
            nothing = np.zeros(whole, part.dtype)  # uses no memory until it is written
            parameter.set_data(Tensor.from_numpy(nothing), slice_shape=True)
    try:
        yield
    finally:
        for parameter, part in parts:
            parameter.set_data(Tensor(part, dtype=parameter.dtype), slice_shape=True)
