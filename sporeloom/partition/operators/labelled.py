# SPDX-License-Identifier: Apache-2.0
"""Operators that are defined by one line of labels, one label for each dim.

`"n c .., o c .. -> +c n o .."` is a convolution. A letter is a dim that may be sharded, equally wherever it occurs: rows (n)
and output channels (o) here. `+c` marks an output as a sum over the input channels: a partial sum if they are sharded. `.` is
an unsharded dim, `..` are all remaining dims, unsharded, and `*` all remaining dims, each of which may be sharded. `-` is
an input that is not a tensor, `=` an input that is the shape of the output and becomes the local shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sporeloom.partition.layout import NONE, ValueLayout
from sporeloom.partition.operation import Handler, Operand, Operation, Plan, UnknownValueError
from sporeloom.strategy.layout import Dim, Layout, Shape

WHOLE = "."
Labels = tuple[str, ...]


def expanded(term: str, num_dims: int) -> Labels:
    """Expand a term to one label for each dim of a tensor: `*` and `..` stand for all remaining dims."""
    words = term.split()
    left = num_dims - len(words) + 1
    labels: list[str] = []
    for word in words:
        if word == "*":
            labels += [f"*{i}" for i in range(left)]
        else:
            labels += [WHOLE] * left if word == ".." else [word]
    if len(labels) != num_dims:
        raise UnknownValueError(f"{num_dims} dims are not {term}")
    return tuple(labels)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An input, with one label for each dim."""

    index: int
    labels: Labels
    operand: Operand


def along(op: Operation, line: str, linear: Sequence[int] = (), first: Sequence[int] = ()) -> Plan:
    """Plan an operator whose dims are labelled by `line`.

    Args:
        linear: inputs in which it is linear: a partial sum in exactly one stays pending if the outputs are not larger.
        first: inputs whose sharding takes precedence over that of larger inputs.
    """
    given, made = (side.split(", ") for side in line.split(" -> "))
    tensors = list(_tensors(op, given))
    keep = _kept(op, tensors, linear)
    sizes = _sizes(tensors)
    sharding = _sharding(op, tensors, sizes, first, keep)

    def dims(labels: Labels, shape: Shape) -> Layout:
        pairs = zip(labels, shape, strict=True)
        return tuple(sharding.get(label, ()) if size == sizes.get(label) else () for label, size in pairs)

    wanted = {t.index: ValueLayout(dims(t.labels, t.operand.shape), t.operand.partial & keep) for t in tensors}
    outputs: list[ValueLayout | None] = []
    for type, term in zip(op.types, made * len(op.types) if len(made) == 1 else made, strict=True):
        if type is None:
            outputs.append(None)
            continue
        summed, term = _summed(term)
        labels = expanded(term, len(type.shape))
        if any(label != WHOLE and sizes.get(label) != size for label, size in zip(labels, type.shape, strict=True)):
            raise UnknownValueError(f"{op.kind}: {type.shape} is not {term}")
        over = (axis for label, axes in sharding.items() if label in summed or label[0] in summed for axis in axes)
        outputs.append(ValueLayout(dims(labels, type.shape), keep.union(over)))
    shapes = {
        i: outputs[0].local_shape(op.output.shape, op.grid) for i, t in enumerate(given) if t == "=" and outputs[0]
    }
    return Plan(op.as_they_are(wanted), tuple(outputs), shapes)


def _summed(term: str) -> tuple[list[str], str]:
    """The labels that an output is summed over, and the term without them."""
    words = term.split()
    return [word[1:] for word in words if word[0] == "+"], " ".join(word for word in words if word[0] != "+")


def _tensors(op: Operation, terms: Sequence[str]) -> Iterator[_Tensor]:
    for index, (term, operand) in enumerate(zip(terms, op.operands, strict=False)):
        if term not in "-=" and isinstance(operand, Operand) and operand.type is not None:
            yield _Tensor(index, expanded(term, len(operand.shape)), operand)


def _kept(op: Operation, tensors: Sequence[_Tensor], linear: Sequence[int]) -> frozenset[str]:
    """Axes of partial sums that may stay pending."""
    pending = [t for t in tensors if t.operand.partial]
    if len(pending) != 1 or pending[0].index not in linear:
        return NONE
    (one,) = pending
    assert one.operand.type is not None
    if sum(type.num_elements for type in op.types if type) > one.operand.type.num_elements:
        return NONE  # the smaller tensor is cheaper to reduce
    return one.operand.partial - frozenset(axis for t in tensors for dim in t.operand.dims for axis in dim)


def _sizes(tensors: Sequence[_Tensor]) -> dict[str, int]:
    """Label -> size of its dim; a tensor that is broadcast along it has size 1 there."""
    sizes: dict[str, int] = {}
    for t in tensors:
        for label, size in zip(t.labels, t.operand.shape, strict=True):
            if label != WHOLE:
                sizes[label] = max(sizes.get(label, 1), size)
    return sizes


def _sharding(
    op: Operation, tensors: Sequence[_Tensor], sizes: Mapping[str, int], first: Sequence[int], keep: frozenset[str]
) -> dict[str, Dim]:
    """Label -> axes that shard it, each axis once: those of the largest tensor with a sharded dim of that label."""

    def order(t: _Tensor) -> tuple[bool, int]:
        assert t.operand.type is not None
        return t.index not in first, -t.operand.type.num_elements

    decided: dict[str, Dim] = {}
    used = set(keep)
    for t in sorted(tensors, key=order):
        for label, size, axes in zip(t.labels, t.operand.shape, t.operand.dims, strict=True):
            if label != WHOLE and label not in decided and size == sizes[label] and (axes or t.index in first):
                (decided[label],) = op.fit([axes], (size,), frozenset(used))
                used.update(decided[label])
    return decided


def _is_plain(op: Operation) -> bool:
    """Whether images have the layout NCHW or NCDHW: some operators also take an image without a batch dim."""
    formats = (op.attributes.get(name, "NCHW") for name in ("format", "data_format"))
    return len(op.tensor(0).shape) == (5 if "3D" in op.kind else 4) and all(f in ("NCHW", "NCDHW") for f in formats)


def of_images(op: Operation, line: str, linear: Sequence[int] = ()) -> Plan:
    if not _is_plain(op):
        raise UnknownValueError(f"{op.kind}: no rows, or channels last")
    return along(op, line, linear)


def evaluated(op: Operation, line: str, is_training: int) -> Plan:
    """Batch normalization with given statistics, or its gradient; with batch statistics it is decomposed or unsharded."""
    if op.constant(is_training):
        raise UnknownValueError(f"{op.kind}: statistics of the batch")
    return along(op, line)


def convolution(op: Operation, line: str) -> Plan:
    """A convolution: channels may be sharded unless it is a grouped convolution."""
    if int(op.attributes.get("group", op.attributes.get("groups", 1))) > 1:
        return of_images(op, re.sub(r"\b[oc]\b", WHOLE, line), (0, 1))
    plan = of_images(op, line, (0, 1))
    if "out_channel" not in op.attributes:
        return plan
    degree = next(op.grid.degree(d) for d in _of_label(plan, line, "o"))
    return replace(plan, attributes={"out_channel": int(op.attributes["out_channel"]) // degree})


def _of_label(plan: Plan, line: str, label: str) -> Iterator[Dim]:
    """Axes by which a plan shards the input dims with a label."""
    for index, term in enumerate(line.split(" -> ")[0].split(", ")):
        layout = plan.inputs[index]
        if isinstance(layout, ValueLayout) and label in term.split():
            yield layout.dims[expanded(term, len(layout.dims)).index(label)]


def bias(op: Operation, line: str, position: int, linear: Sequence[int] = ()) -> Plan:
    """A bias along the channels: input `position` gives the format, channels in dim 1 or last."""
    if op.constant(position) not in (0, "NCHW"):
        raise UnknownValueError(f"{op.kind}: channels last")
    return along(op, line, linear)


def slope(op: Operation) -> Plan:
    """PReLU, whose slope is one number or one for each channel, or its gradients."""
    is_gradient = op.kind == "PReLUGrad"
    label = WHOLE if op.tensor(2 if is_gradient else 1).shape == (1,) else "c"
    if not is_gradient:
        return along(op, f"n c *, {label} -> n c *")
    of_weight = "+n +c +* ." if label == WHOLE else "+n +* c"
    return along(op, f"n c *, n c *, {label} -> n c *, {of_weight}")


FEATURES = "n c .. -> n c .."
POOL_GRADIENT = "n c .., n c .., n c .. -> n c .."

HANDLERS: dict[str, Handler] = {
    "BiasAdd": partial(bias, line="n c *, c -> n c *", position=2),
    "BiasAddGrad": partial(bias, line="n c * -> +n +* c", position=1, linear=(0,)),
    **dict.fromkeys(("Conv2D", "Conv3D"), partial(convolution, line="n c .., o c .. -> +c n o ..")),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv2DTranspose", "Conv3DTranspose"),
        partial(convolution, line="n o .., o c .., = -> +o n c .."),
    ),
    "Conv2DBackpropFilter": partial(convolution, line="n o .., n c .., = -> +n o c .."),
    "Conv3DBackpropInput": partial(convolution, line="o c .., n o .., = -> +o n c .."),  # inputs in another order
    "Conv3DBackpropFilter": partial(convolution, line="n c .., n o .., = -> +n o c .."),
    **dict.fromkeys(
        ("MaxPool", "MaxPool3D", "ResizeBilinearV2", "ResizeNearestNeighborV2"), partial(of_images, line=FEATURES)
    ),
    **dict.fromkeys(("AvgPool", "AvgPool3D", "AdaptiveAvgPool2D"), partial(of_images, line=FEATURES, linear=(0,))),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), partial(of_images, line=POOL_GRADIENT)),
    **dict.fromkeys(("MaxPoolWithArgmaxV2", "MaxPool3DWithArgmax"), partial(of_images, line=FEATURES)),
    **dict.fromkeys(("MaxPoolGradWithArgmaxV2", "MaxPool3DGradWithArgmax"), partial(of_images, line=POOL_GRADIENT)),
    "AvgPoolGrad": partial(of_images, line=POOL_GRADIENT),
    "ResizeBilinearGrad": partial(of_images, line="n c .., n c .. -> n c .."),
    "AdaptiveAvgPool2DGrad": partial(of_images, line="n c .., = -> n c ..", linear=(0,)),
    "AdaptiveMaxPool2D": partial(of_images, line=FEATURES),
    "AdaptiveMaxPool2DGrad": partial(of_images, line=POOL_GRADIENT),
    "PReLU": slope,
    "PReLUGrad": slope,
    "CTCLossV2": partial(along, line=". n ., n ., n, n -> n, n . ."),
    "CTCLossV2Grad": partial(along, line="n, . n ., n ., n, n, n, n . . -> . n ."),
    "BatchNorm": partial(evaluated, is_training=5, line="n .., ., ., ., . -> n .., ., ., ., ."),
    "BatchNormGrad": partial(evaluated, is_training=6, line="n .., n .., ., ., ., . -> n .., +n ., +n ."),
    "GroupNorm": partial(along, line="n .., -, ., . -> n .., n ., n ."),
    "GroupNormGrad": partial(along, line="n .., n .., n ., n ., . -> n .., +n ., +n ."),
    **dict.fromkeys(("Tril", "Triu"), partial(along, line="* . . -> * . .", linear=(0,))),
    "Flatten": partial(along, line="n .. -> n .", linear=(0,)),
}
