# SPDX-License-Identifier: Apache-2.0
"""Graph nodes that call a Python function: `Custom` of kind pyfunc."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from sporeloom.mindspore_compat.names import add_pyfunc, mind_ir

_serial = itertools.count()
_keep: list[Callable[..., Any]] = []  # C++ refers to the functions by id only


def add_pyfunc_primitive(
    model: mind_ir.ModelProto,
    run: Callable[..., Any],
    num_inputs: int = 1,
    is_scalar: bool = False,
    name: str = "message",
) -> str:
    """Add a primitive that calls `run` with its inputs as arrays. Returns the reference to it for nodes.

    `name`: of the operator that it replaces.

    Its unique name prevents common-subexpression elimination.
    """

    def call(*inputs: Any) -> Any:
        result = run(*map(np.asarray, inputs))
        return result.item() if is_scalar else result  # MindSpore accepts a tensor without dims only as a Python number

    _keep.append(call)
    add_pyfunc(id(call), call)
    serial = next(_serial)
    primitive = model.primitives.add(name=f"sporeloom_pyfunc_{serial}", op_type="Custom")
    proto = mind_ir.AttributeProto
    values: dict[str, str | int] = {
        "func_type": "pyfunc",
        "fn_id": id(call),
        "uniq_name": f"sporeloom_{serial}",
        "func_name": name,
        "primitive_target": "CPU",
        "inputs_num": num_inputs,
        "multi_output": False,
        "single_scalar_output": False,
        "fake_output": False,
        "autodiff": False,
        "imply_path": "",
        "no_eliminate": True,
    }
    for name, value in values.items():
        attribute = primitive.attribute.add()
        attribute.name = name
        if isinstance(value, str):
            attribute.type, attribute.s = proto.STRING, value.encode()
        else:
            attribute.type, attribute.i = proto.BOOL if isinstance(value, bool) else proto.INT64, int(value)
    return f"REF::{primitive.name}"


def kinds_of(model: mind_ir.ModelProto) -> dict[str, str]:
    """References to primitives -> kinds of operators; of one that a Python function replaces, its own."""
    kinds = {f"REF::{p.name}": p.op_type for p in model.primitives}
    for p in model.primitives:
        if p.op_type == "Custom":
            kinds[f"REF::{p.name}"] = next((a.s.decode() for a in p.attribute if a.name == "func_name"), p.op_type)
    return kinds
