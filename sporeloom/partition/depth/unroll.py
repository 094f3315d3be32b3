# SPDX-License-Identifier: Apache-2.0
"""Writes the graph of any depth from the form that graphs of two depths have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.depth.entries import IDS, NAMES_OF_NODES, Entry, Label, read_entries
from sporeloom.partition.depth.form import (
    NUM_BLOCKS,
    AtEnd,
    EntryForm,
    EveryBlock,
    FromBlock,
    GraphForm,
    Reference,
    common_form,
)
from sporeloom.partition.depth.layout import Fixed, Layout
from sporeloom.partition.depth.units import Units

NUM_UNITS = NUM_BLOCKS + 2, NUM_BLOCKS + 3
"""Layer units of the two graphs."""
_BATCH = re.compile(r"^batch\d+$")
"""Name of an input of a step, with its number."""
_NUMBERS = re.compile(r"(_\d+)+$")

Written = Callable[[str], bytes]
"""Content of a constant by its name."""


def unrolled(
    models: Sequence[mind_ir.ModelProto],
    units: Units,
    num_units: int,
    of_inputs: Sequence[Sequence[str]],
    labels: Sequence[Label],
    written: Written,
) -> mind_ir.ModelProto:
    """The graph of one device with `num_units` layer units.

    It is equal to the compiled one but for the names of values, and the order of values that nothing but an order of side
    effects waits for.

    Args:
        models: graphs with NUM_UNITS layer units.
        of_inputs: for each of them, and for the result, what each input is.
        labels: for each of them, names of the constants that depend on the number of a layer.
        written: content of such a constant in the result.

    Raises:
        IrregularDepthError: the two graphs do not differ by equal layers alone.
    """
    layouts = [
        Layout(read_entries(model, units, names, label), count)
        for model, count, names, label in zip(models, NUM_UNITS, of_inputs[:2], labels, strict=True)
    ]
    form = common_form(*layouts)
    return _Writer(form, models[1], units, num_units, written).model()


class _Writer:
    def __init__(self, form: GraphForm, model: mind_ir.ModelProto, units: Units, num_units: int, written: Written):
        self.form, self.units, self.num_units, self.num_blocks = form, units, num_units, num_units - 2
        self.written, self.prefix = written, f"{model.graph.name}:"
        self.result = mind_ir.ModelProto()
        self.result.CopyFrom(model)
        for field in ("node", "parameter", "input", "output"):
            self.result.graph.ClearField(field)
        self.result.ClearField("primitives")
        self.names: list[str] = []
        self.primitives: dict[tuple[int, tuple[str, ...]], str] = {}
        self.segments, self.blocks = self._starts()

    def _starts(self) -> tuple[list[int], list[list[int]]]:
        """Position of each segment, and of each block of each region."""
        segments, blocks, at = list[int](), list[list[int]](), 0
        for number, segment in enumerate(self.form.segments):
            segments.append(at)
            at += len(segment)
            if number == len(self.form.regions):
                break
            region, found = self.form.regions[number], list[int]()
            for block in self._order(region.ascending):
                found.append(at)
                at += len(self._block(number, block))
            blocks.append(found if region.ascending else found[::-1])
        return segments, blocks

    def _order(self, ascending: bool) -> range:
        return range(self.num_blocks) if ascending else range(self.num_blocks - 1, -1, -1)

    def _block(self, region: int, block: int) -> list[EntryForm]:
        form = self.form.regions[region]
        return form.first if block == 0 else form.last if block == self.num_blocks - 1 else form.inner

    def model(self) -> mind_ir.ModelProto:
        for number, segment in enumerate(self.form.segments):
            for form in segment:
                self._write(form, None)
            if number < len(self.form.regions):
                for block in self._order(self.form.regions[number].ascending):
                    for form in self._block(number, block):
                        self._write(form, block)
        return self.result

    def _positions(self, references: Sequence[Any], block: int | None) -> Iterator[int | None]:
        for each in references:
            if isinstance(each, EveryBlock):
                for other in self._order(each.ascending):
                    yield from (self.blocks[region][other] + offset for region, offset in each.items)
            else:
                yield self._position(each, block)

    def _position(self, reference: Reference, block: int | None) -> int | None:
        if reference is None:
            return None
        if isinstance(reference, Fixed):
            return self.segments[reference.segment] + reference.offset
        if isinstance(reference, FromBlock):
            assert block is not None
            return self.blocks[reference.region][block + reference.distance] + reference.offset
        assert isinstance(reference, AtEnd)
        distance = reference.distance
        at = distance if reference.end == "first" else self.num_blocks - 1 - distance
        return self.blocks[reference.region][at] + reference.offset

    def _unit(self, reference: Any, block: int | None) -> int:
        if block is not None:
            return int(reference) + block + 1
        return int(reference.distance if reference.end == "first" else self.num_units - 1 - reference.distance)

    def _write(self, form: EntryForm, block: int | None) -> None:
        entry, position = form.entry, len(self.names)
        found = iter([self._unit(each, block) for each in form.units])
        texts = [self.units.joined(text, found) for text in entry.texts]
        graph = self.result.graph
        if entry.kind == "outputs":
            for proto, at in zip(entry.proto, self._positions(form.inputs, block), strict=True):
                assert at is not None
                graph.output.add().CopyFrom(proto)
                graph.output[-1].name = self.names[at]
            return
        if entry.kind in ("parameter", "input"):
            into = graph.parameter if entry.kind == "parameter" else graph.input
            into.add().CopyFrom(entry.proto)
            if entry.kind == "parameter":
                name = into[-1].ref_key = texts[0]
            else:
                name = _BATCH.sub(f"batch{len(graph.input) - 1}", entry.proto.name.rpartition(":")[2])
            into[-1].name = self.prefix + name
            self.names.append(self.prefix + name)
            return
        node = graph.node.add()
        node.CopyFrom(entry.proto)
        is_operator = entry.kind in ("operator", "tuple")
        stem = _NUMBERS.sub("", entry.proto.name.split(":")[-2 if is_operator else -1])
        name = f"{self.prefix}{stem}{':' if is_operator else '_'}{position}"
        node.name = node.output[0] = name
        self.names.append(name)
        if entry.kind == "labelled":
            node.attribute[0].tensors[0].raw_data = self.written(texts[0])
        elif is_operator:
            self._write_operator(node, form, block, texts)

    def _write_operator(self, node: mind_ir.NodeProto, form: EntryForm, block: int | None, texts: list[str]) -> None:
        del node.input[:]
        node.input.extend(self.names[at] for at in self._positions(form.inputs, block) if at is not None)
        if form.entry.kind == "tuple":
            del node.attribute[:]
        node.domain = texts[0]
        node.op_type = f"REF::{self._primitive(form.entry, tuple(texts[1:]))}"
        ids = dict(zip(sorted(_id_names(node)), self._positions(form.ids, block), strict=True))
        for each in node.primal_attr:
            if each.name in ids:
                at = ids[each.name]
                each.s = b"" if at is None else str(at).encode()
        for each in node.node_attr:
            if each.name in ids and (at := ids[each.name]) is not None:
                each.i = at
        kept = [each for each in node.primal_attr if each.name not in NAMES_OF_NODES]
        if len(kept) < len(node.primal_attr):
            del node.primal_attr[:]
            node.primal_attr.extend(kept)

    def _primitive(self, entry: Entry, texts: tuple[str, ...]) -> str:
        """Name of the primitive of a node, which is added if there is none yet."""
        key = id(entry.primitive), texts
        if key not in self.primitives:
            added = self.result.primitives.add()
            added.CopyFrom(entry.primitive)
            added.name = f"{added.op_type}:{len(self.primitives)}"
            remaining = iter(texts)
            for attribute in added.attribute:
                if attribute.s:
                    attribute.s = next(remaining).encode()
            self.primitives[key] = added.name
        return self.primitives[key]


def _id_names(node: mind_ir.NodeProto) -> set[str]:
    return {each.name for each in (*node.primal_attr, *node.node_attr)} & set(IDS)
