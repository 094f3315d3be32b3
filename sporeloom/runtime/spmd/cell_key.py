# SPDX-License-Identifier: Apache-2.0
"""The identity of a Cell's graph, computed from the Cell: everything that compilation can read from it.

Cells and operators whose source is this package's, MindSpore's or a model family's are described; `cached_model` adds the
versions of these. A Cell of a user's is not: a change of its source would go unnoticed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.ops import Primitive

from sporeloom.models.family import FAMILIES
from sporeloom.parallel.report import Report

PACKAGES = ("sporeloom", "mindspore", "builtins", "numpy", *FAMILIES)
BARE = frozenset(vars(nn.Cell()))
"""Attributes of every Cell: counters, hooks and caches of MindSpore."""
OF_GRAPHS = frozenset(
    {
        *("training", "requires_grad", "_params", "_cells", "_primitives", "_buffers", "_has_config_recompute"),
        *("_jit_config_dict", "_amp_level", "mixed_precision_type", "_bprop_debug", "cell_type", "grad_ops_label"),
    }
)
"""The ones that change the graph, and hooks where there are any."""
LEFT_BY_COMPILATION = frozenset({"current_phase", "__parse_method__", "path"})
"""Attributes of Cells and operators that have been compiled; they may be compiled for other shapes afterwards."""
SIMPLE = (type(None), bool, int, float, complex, str, bytes)


class UnknownSourceError(Exception):
    """A Cell has an attribute whose meaning is not known here."""


def cell_key(cell: nn.Cell) -> str | None:
    """SHA-256 of a Cell with all its attributes, operators and constants, and the names and shapes of its parameters; None
    if something in it is a user's, or of a kind that is not known here."""
    parts = cell_parts(cell)
    return None if parts is None else hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cell_parts(cell: nn.Cell, ignored: frozenset[str] = frozenset()) -> list[str] | None:
    """The description of a Cell of which `cell_key` is the hash.

    Args:
        ignored: names of attributes that are left out, of all Cells in it.
    """
    walk = _Walk(ignored)
    try:
        walk.add(cell)
    except UnknownSourceError:
        return None
    return walk.parts


class _Walk:
    """Describes values one after another as `parts`; a value that was met before by its number."""

    def __init__(self, ignored: frozenset[str]) -> None:
        self.ignored = ignored
        self.parts: list[str] = []
        self.seen: dict[int, int] = {}
        self.held: list[Any] = []
        """Objects that were met: as long as they live, no other has their id."""

    def add(self, value: Any) -> None:
        if isinstance(value, SIMPLE):
            self.parts.append(repr(value))
        elif isinstance(value, ms.dtype.Type | Path | np.generic | enum.Enum) or hasattr(type(value), "__members__"):
            self.parts.append(f"{type(value).__name__} {value}")
        elif (number := self.seen.get(id(value))) is not None:
            self.parts.append(f"number {number}")
        else:
            self.seen[id(value)] = len(self.seen)
            self.held.append(value)
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, Parameter):
            self.parts.append(f"parameter {value.name} {value.shape} {value.dtype} {value.requires_grad}")
        elif isinstance(value, Tensor):
            self.parts.append(f"tensor {value.shape} {value.dtype} {hashlib.sha256(value.get_bytes()).hexdigest()}")
        elif isinstance(value, np.ndarray):
            self.parts.append(f"array {value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}")
        elif isinstance(value, Report):
            self.parts.append("report")  # of layouts; the graph of one device does not depend on them
        elif isinstance(value, Mapping):
            self.parts.append(f"mapping of {len(value)}")
            for name, entry in value.items():
                self.add(name)
                self.add(entry)
        elif isinstance(value, list | tuple | set | frozenset):
            self.parts.append(f"{type(value).__name__} of {len(value)}")
            for item in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
                self.add(item)
        elif isinstance(value, type):
            self.parts.append(_source(value))
        elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | functools.partial):
            self._add_function(value)
        else:
            self._add_object(value)

    def _add_function(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, types.MethodType):
            self.add([value.__func__, value.__self__])
        else:
            self.parts.append(_source(value))
            if isinstance(value, types.FunctionType):
                self._add_code(value.__code__)  # two lambdas of a function have one name
                self.add(
                    [value.__defaults__, value.__kwdefaults__, [_content(cell) for cell in value.__closure__ or ()]]
                )

    def _add_code(self, code: types.CodeType) -> None:
        self.add([code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, code.co_freevars])
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant)
            else:
                self.add(constant)

    def _add_object(self, value: Any) -> None:
        self.parts.append(_source(type(value)))
        attributes: Mapping[str, Any]
        if isinstance(value, Primitive):
            own = {name: at for name, at in vars(value).items() if name != "attrs"}
            attributes = {name: at for name, at in {**own, **value.attrs}.items() if name not in LEFT_BY_COMPILATION}
        elif dataclasses.is_dataclass(value):
            attributes = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif isinstance(value, nn.Cell):
            hidden = (BARE - OF_GRAPHS) | LEFT_BY_COMPILATION | self.ignored
            attributes = {n: at for n, at in vars(value).items() if n not in hidden or ("hook" in n and at)}
        elif hasattr(value, "__dict__"):
            attributes = vars(value)
        else:
            raise UnknownSourceError(repr(value))
        self.add(attributes)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        raise UnknownSourceError("an empty variable") from None


def _source(value: Any) -> str:
    """Name of a class or function.

    Raises:
        UnknownSourceError: its source is a user's.
    """
    is_local_class = isinstance(value, type) and "<locals>" in value.__qualname__  # which sees variables of a function
    if is_local_class or (value.__module__ or "").partition(".")[0] not in PACKAGES:
        raise UnknownSourceError(f"{value.__module__}.{value.__qualname__}")
    return f"{value.__module__}.{value.__qualname__}"
