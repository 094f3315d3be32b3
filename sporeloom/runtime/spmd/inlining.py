# SPDX-License-Identifier: Apache-2.0
"""Inlines every call of a function into the calling graph.

MindSpore represents a lazily inlined Cell as a function: its forward function returns its result and its backward function, a
closure over activations. The graph is evaluated symbolically: a call copies the function's nodes, while closures and
the tuples that contain them exist only during the evaluation. The result contains no functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sporeloom.mindspore_compat.names import mind_ir

SELECT = "Select:of two branches"
EFFECTS = ("side_effect_mem", "side_effect_io", "side_effect_hidden")


class InliningError(RuntimeError):
    """The graph uses functions in an unsupported way."""


class BranchError(InliningError):
    """The graph branches on a value, and both branches cannot be computed."""

    def __init__(self, place: str, why: str):
        super().__init__(why)
        self.place = place
        """Domain of the branching node, in MindSpore's notation."""


class Closure(NamedTuple):
    """A function with its first arguments."""

    function: str
    captured: tuple[Value, ...]


class Items(NamedTuple):
    """A tuple that contains a closure, which no node can produce."""

    items: tuple[Value, ...]


class Choice(NamedTuple):
    """One of two functions, selected by a value on the device."""

    condition: str
    taken: Value
    other: Value
    place: str
    """Domain of the selecting node."""


Value = str | Closure | Items | Choice
"""The name of a node's result, or a value that no node can produce."""


def inline_functions(model: mind_ir.ModelProto) -> int:
    """Inline all calls in `model`, in place. Returns their number.

    If a value selects one of two functions without side effects, both are computed and each of their results is
    selected.

    Raises:
        InliningError: a function is used in an unsupported way.
    """
    return _Inliner(model).run() if model.functions else 0


class _Inliner:
    def __init__(self, model: mind_ir.ModelProto):
        self.model = model
        self.functions = {function.name: function for function in model.functions}
        self.kinds = {p.name: p.op_type for p in model.primitives}
        self.made: dict[str, mind_ir.NodeProto] = {}
        """Result -> node of the new graph, in order."""
        self.tuples: dict[str, Sequence[str]] = {}
        """Result of a tuple node -> its items."""
        self.calls = 0
        self.active: list[str] = []
        """Functions that are being inlined."""
        self.branches: list[str] = []
        """Domains of the nodes that selected them."""
        self.writes = {p.name for p in model.primitives if any(a.name in EFFECTS and _truth(a) for a in p.attribute)}

    def run(self) -> int:
        main = self.model.graph
        # Constants are defined at their first use, and are used everywhere.
        for graph in (main, *self.model.functions):
            for node in graph.node:
                if node.op_type == "Constant":
                    self.made[node.output[0]] = _copy(node)
        env = self._evaluate(main, {}, "")
        for output in main.output:
            value = env[output.name]
            if not isinstance(value, str):
                raise InliningError("the graph gives a function")
            output.name = value
        del main.node[:]
        main.node.extend(self.made.values())
        del self.model.functions[:]
        kept = [p for p in self.model.primitives if p.op_type not in ("Partial", "Switch")]  # no longer called
        del self.model.primitives[:]
        self.model.primitives.extend(kept)
        return self.calls

    def _evaluate(self, graph: mind_ir.GraphProto, env: dict[str, Value], suffix: str) -> dict[str, Value]:
        for node in graph.node:
            if node.op_type == "Constant":
                continue
            target = node.op_type.removeprefix("REF::")
            arguments = [env.get(name, self._function_or(name)) for name in node.input]
            called = Closure(target, ()) if target in self.functions else env.get(target)
            if isinstance(called, Closure | Choice):
                result = self._call(called, arguments, node)
            else:
                result = self._operator(node, self.kinds.get(target, node.op_type), arguments, suffix)
            env[node.output[0]] = result
        return env

    def _call(self, called: Value, arguments: Sequence[Value], node: mind_ir.NodeProto) -> Value:
        if isinstance(called, Choice):
            self.branches.append(called.place)
            taken, other = (self._call(each, arguments, node) for each in (called.taken, called.other))
            chosen = self._chosen(called.condition, taken, other)
            self.branches.pop()
            return chosen
        if not isinstance(called, Closure):
            raise InliningError(f"{node.name} calls what is not a function")
        if called.function in self.active:
            raise BranchError((self.branches or [node.domain])[-1], "it loops as long as a value says")
        function, given = self.functions[called.function], (*called.captured, *arguments)
        if len(function.input) != len(given):
            raise InliningError(f"{function.name} takes {len(function.input)} arguments, not {len(given)}")
        self.calls += 1
        env = {i.name: value for i, value in zip(function.input, given, strict=True)}
        self.active.append(called.function)
        env = self._evaluate(function, env, f"~{self.calls}")
        self.active.pop()
        return env.get(function.output[0].name, function.output[0].name)

    def _chosen(self, condition: str, taken: Value, other: Value) -> Value:
        """Select between the results of two functions."""
        if taken == other:
            return taken
        items = [self._items(each) for each in (taken, other)]
        if items[0] is not None and items[1] is not None and len(items[0]) == len(items[1]):
            return Items(tuple(self._chosen(condition, *pair) for pair in zip(*items, strict=True)))
        if isinstance(taken, str) and isinstance(other, str) and items == [None, None]:
            return self._selected(condition, taken, other)
        if isinstance(taken, Closure | Choice) and isinstance(other, Closure | Choice):
            return Choice(condition, taken, other, self.branches[-1])
        raise BranchError(self.branches[-1], "its ways give different things")

    def _items(self, value: Value) -> Sequence[Value] | None:
        return value.items if isinstance(value, Items) else self.tuples.get(value) if isinstance(value, str) else None

    def _selected(self, condition: str, taken: str, other: str) -> str:
        shapes = [self._shape(each) for each in (taken, other)]
        dims = [[(tuple(t.dims), t.data_type) for a in shape for t in a.tensors] for shape in shapes]
        if not dims[0] or dims[0] != dims[1]:
            raise BranchError(self.branches[-1], "its ways give different shapes or types")
        if SELECT not in self.kinds:
            self.kinds[SELECT] = self.model.primitives.add(name=SELECT, op_type="Select").op_type
        name = f"select.{len(self.made)}"
        node = mind_ir.NodeProto(output=[name], op_type=f"REF::{SELECT}", domain=self.branches[-1])
        node.attribute.extend(shapes[0])
        return self._add(node, [condition, taken, other], name)

    def _operator(self, node: mind_ir.NodeProto, kind: str, arguments: Sequence[Value], suffix: str) -> Value:
        if kind == "Partial":
            return Closure(node.input[0], tuple(arguments[1:]))
        if kind == "Switch" and isinstance(arguments[0], str):
            self.branches.append(node.domain)
            chosen = self._chosen(arguments[0], *arguments[1:])
            self.branches.pop()
            return chosen
        if self.branches and node.op_type.removeprefix("REF::") in self.writes:
            raise BranchError(self.branches[-1], f"one of its ways writes something ({kind})")
        names = [name for argument in arguments for name in ([argument] if isinstance(argument, str) else ())]
        if kind == "TupleGetItem" and names and names[0] in self.tuples:
            # No node that unpacks it: MindSpore's runtime would lose the dependencies of an item of a tuple.
            return self.tuples[names[0]][_number(self.made[names[1]])]
        if len(names) == len(arguments):
            name = self._add(node, names, node.output[0] + suffix)
            self.tuples |= {name: names} if kind == "MakeTuple" else {}
            return name
        if kind == "MakeTuple":
            return Items(tuple(arguments))
        if kind == "TupleGetItem" and isinstance(arguments[0], Items) and isinstance(arguments[1], str):
            return arguments[0].items[_number(self.made[arguments[1]])]
        if kind == "Depend":
            needed = [leaf for argument in arguments[1:] for leaf in _leaves(argument)]
            return self._after(arguments[0], needed, node, suffix)
        if kind == "UpdateState":  # a chain, because MindSpore ignores further inputs
            state, *needed = [leaf for argument in arguments for leaf in _leaves(argument)]
            for i, leaf in enumerate(needed):
                last = "" if i == len(needed) - 1 else f"~{i}"
                state = self._add(node, [state, leaf], f"{node.output[0]}{suffix}{last}")
            return state
        raise InliningError(f"{kind} ({node.name}) takes a function")

    def _function_or(self, name: str) -> Value:
        return Closure(name, ()) if name in self.functions else name

    def _add(self, node: mind_ir.NodeProto, inputs: Sequence[str], name: str) -> str:
        copied = _copy(node)
        copied.output[0] = copied.name = name
        copied.input[:] = inputs
        self.made[name] = copied
        return name

    def _after(self, value: Value, needed: Sequence[str], node: mind_ir.NodeProto, suffix: str) -> Value:
        """`value`, with dependencies on all values in `needed`."""
        if isinstance(value, Items):
            parts = (self._after(each, needed, node, f"{suffix}~{i}") for i, each in enumerate(value.items))
            return Items(tuple(parts))
        if isinstance(value, Closure | Choice):
            return value
        for i, name in enumerate(needed):
            after = mind_ir.NodeProto(input=[value, name], op_type=node.op_type, domain=node.domain)
            after.attribute.extend(self._shape(value))
            value = f"{node.output[0]}{suffix}~{i}"
            after.output.append(value)
            after.name = value
            self.made[value] = after
        return value

    def _shape(self, name: str) -> list[mind_ir.AttributeProto]:
        """The attribute with the shape and type of a value or constant."""
        if name in self.made:
            said = next((a for a in self.made[name].attribute if a.name in ("shape", "value")), None)
            if said is None:
                return []
            if said.name == "shape" or not said.tensors:
                return [said] if said.name == "shape" else []
            tensor = said.tensors[0]
        else:
            graph = self.model.graph
            parameter = next((p for p in graph.parameter if p.name == name), None)
            tensor = parameter or next(i for i in graph.input if i.name == name).tensor[0]
        shape = mind_ir.AttributeProto(name="shape", type=mind_ir.AttributeProto.TENSORS)
        shape.tensors.add(dims=tensor.dims, data_type=tensor.data_type)
        return [shape]


def _copy(node: mind_ir.NodeProto) -> mind_ir.NodeProto:
    return mind_ir.NodeProto.FromString(node.SerializeToString())


def _number(node: mind_ir.NodeProto) -> int:
    return next(a for a in node.attribute if a.name == "value").i


def _truth(attribute: mind_ir.AttributeProto) -> bool:
    return bool(attribute.ints[0] if attribute.ints else attribute.i)


def _leaves(value: Value) -> list[str]:
    """Results that a value depends on; of a call its results, or the values captured by its backward function if it has
    none."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Closure):
        return [leaf for each in value.captured for leaf in _leaves(each)]
    if isinstance(value, Choice):
        return [value.condition, *_leaves(value.taken), *_leaves(value.other)]
    results = [item for item in value.items if not isinstance(item, Closure | Choice)] or value.items
    return [leaf for item in results for leaf in _leaves(item)]
