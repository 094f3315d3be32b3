# SPDX-License-Identifier: Apache-2.0
"""MindSpore's gradients of communication operators, without the branches that an operator's attributes exclude.

MindSpore parses the Python function of the gradient again for every operator, one for each parameter, and infers types in all
of its branches: dumps of norms, means, sparse gradients. Most conditions are numbers that are known when the function is
created. Evaluating them first reduces the time to compile by two fifths and changes nothing in the graph
(benchmarks/results/compile_passes.md).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from sporeloom.core.scratch import scratch_folder
from sporeloom.mindspore_compat.names import bprop_getters, grad_comm_ops

PLAIN = (bool, int, float, type(None))
Known = tuple[tuple[str, Any], ...]


@contextlib.contextmanager
def decided_branches() -> Iterator[None]:
    """Create gradients of communication operators without dead branches within the block."""
    before = {}
    if grad_comm_ops:
        before = {key: make for key, make in bprop_getters.items() if make.__module__ == grad_comm_ops.__name__}
    with scratch_folder() as folder:
        functions = Decided(folder)
        bprop_getters.update({key: functions.deciding(make) for key, make in before.items()})
        try:
            yield
        finally:
            bprop_getters.update(before)


class Decided:
    """Functions without dead branches. Their source texts are in `folder`, because MindSpore parses the file of a
    function."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._factories: dict[tuple[CodeType, Known], FunctionType | None] = {}

    def deciding(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def made(primitive: Any) -> Any:
            function = make(primitive)
            return self.decided(function) if isinstance(function, FunctionType) else function

        return made

    def decided(self, function: FunctionType) -> FunctionType:
        """`function` without the branches excluded by the numbers that it closes over; `function` itself if there are
        none."""
        values = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # unset: it belongs to a branch that is not taken
                values[name] = cell.cell_contents
        known = tuple(sorted((name, value) for name, value in values.items() if isinstance(value, PLAIN)))
        key = function.__code__, known
        if key not in self._factories:
            self._factories[key] = self._factory(*key)
        make = self._factories[key]
        if make is None:
            return function
        names = make.__code__.co_varnames[: make.__code__.co_argcount]
        if not set(names) <= values.keys():
            return function
        result = FunctionType(make.__code__, function.__globals__)(*(values[name] for name in names))
        assert isinstance(result, FunctionType)
        return result

    def _factory(self, code: CodeType, known: Known) -> FunctionType | None:
        """A function of the remaining closure variables that returns the function without dead branches; None if it has
        none."""
        (definition,) = ast.parse(textwrap.dedent("".join(inspect.getsourcelines(code)[0]))).body
        branches = _Branches(dict(known))
        definition = ast.fix_missing_locations(branches.visit(definition))
        if not branches.num_decided:
            return None
        used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
        names = [name for name in code.co_freevars if name in used]
        body = textwrap.indent(ast.unparse(definition), "    ")
        text = f"def make({', '.join(names)}):\n{body}\n    return {code.co_name}\n"
        path = self.folder / f"gradient_{len(self._factories)}.py"
        path.write_text(text, encoding="utf-8")
        space: dict[str, Any] = {}
        exec(compile(text, str(path), "exec"), space)
        made = space["make"]
        assert isinstance(made, FunctionType)
        return made


class _Branches(ast.NodeTransformer):
    """Replaces each `if` whose condition is known by the branch that is taken."""

    def __init__(self, known: dict[str, Any]):
        self.known, self.num_decided = known, 0

    def visit_If(self, node: ast.If) -> Any:
        decision = self._decision(node.test)
        if decision is None:
            return self.generic_visit(node)
        self.num_decided += 1
        taken = [self.visit(child) for child in (node.body if decision else node.orelse)]
        flat = [child for part in taken for child in (part if isinstance(part, list) else [part])]
        return flat or ast.Pass()

    def _decision(self, test: ast.expr) -> bool | None:
        """Value of a condition; None if unknown. `a and b` is false if either is; conditions have no side effects."""
        if isinstance(test, ast.BoolOp):
            found = [self._decision(value) for value in test.values]
            ends = isinstance(test.op, ast.Or)
            if ends in found:
                return ends
            return None if None in found else not ends
        names = [child.id for child in ast.walk(test) if isinstance(child, ast.Name)]
        allowed = (ast.Name, ast.Constant, ast.Compare, ast.UnaryOp, ast.Not, ast.expr_context, ast.cmpop)
        if not all(isinstance(child, allowed) for child in ast.walk(test)) or not set(names) <= self.known.keys():
            return None
        return bool(eval(compile(ast.Expression(test), "<condition>", "eval"), {}, dict(self.known)))
