# SPDX-License-Identifier: Apache-2.0
"""The device mesh: coordinates of ranks, and groups of ranks. All arithmetic of ranks is here."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sporeloom.core.numbers import Count
from sporeloom.strategy.axes import AXES, BY_NAME, LAYOUT_AXES, PART_NAMES, ROWS

SERVER, EVEN = 8, (1, 2, 4, 8)
"""Devices of a server of the first Ascend 910, and the numbers of them per server that MindSpore accepts in a
group."""


@functools.cache
def _is_even(degree: int, stride: int) -> bool:
    counts = set(Counter(place * stride // SERVER for place in range(degree)).values())
    return len(counts) == 1 and counts <= set(EVEN)


@dataclass(frozen=True, init=False)
class Mesh:
    """Degrees of the mesh axes. Their order, outer to inner, is the order in which they are given: neighbouring
    ranks differ in the last one, so it should have the fastest links."""

    pp: Count = 1
    """Pipeline stages; always the outermost axis."""
    dp: Count = 1
    """Data parallel replicas: each takes a shard of the batch."""
    cp: Count = 1
    """Context parallel ranks: each takes a shard of every sequence, and shards whatever the rules shard over cp."""
    ep: Count = 1
    """Expert parallel ranks: neighbours along dp, which ep divides, each with some of the experts. Without dp, dp
    is ep. Or more than dp: all of dp and a part of tp, which then shards no expert."""
    tp: Count = 1
    """Tensor parallel ranks: each holds a shard of every large matrix."""
    order: tuple[str, ...] = field(default=AXES, metadata={"hidden": True})
    """All axes, outer to inner."""

    def __init__(self, *, order: Sequence[str] | None = None, **degrees: Any):
        if unknown := set(degrees) - BY_NAME.keys():
            raise TypeError(
                f"no axes of a mesh: {', '.join(sorted(unknown))}; there are {', '.join((*AXES, *PART_NAMES))}"
            )
        object.__setattr__(self, "ep", degrees.get("ep", 1))
        degrees = {"dp" if axis == "ep" and "dp" not in degrees else axis: n for axis, n in degrees.items()}
        for axis in AXES:
            object.__setattr__(self, axis, degrees.get(axis, 1))
        cutting = [axis for axis in order or degrees if axis in AXES and degrees.get(axis, 1) != 1]
        usual = [axis for axis in AXES if axis in cutting]
        others = [axis for axis in AXES if axis not in cutting]  # of one rank: their order means nothing
        object.__setattr__(self, "order", AXES if cutting == usual else (*cutting, *others))

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.size // self.pp

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights, over which optimizer parallelism can shard them."""
        return math.prod(self.degree(axis.name) for axis in ROWS if axis.is_replica)

    @property
    def head_shards(self) -> int:
        """Number of ranks over which attention can have its heads sharded."""
        return math.prod(self.degree(axis.name) for axis in ROWS if axis.shards_heads)

    def for_inference(self) -> Mesh:
        """The same ranks without the axes that are for training, along which they become replicas."""
        degrees = {axis.name: self.degree(axis.name) for axis in ROWS}
        removed = [axis.name for axis in ROWS if axis.is_for_training and degrees[axis.name] > 1]
        if not removed:
            return self
        degrees["dp"] *= math.prod(degrees.pop(axis) for axis in removed)
        return Mesh(order=tuple(axis for axis in self.order if axis not in removed), **degrees)

    @property
    def first_rank_of_last_stage(self) -> int:
        """The logging rank: it has losses and logits."""
        return self.ranks_of_stage(self.pp - 1).start

    @property
    def derives_layouts(self) -> bool:
        """Whether MindSpore derives layouts from the rules of other operators: it does on stages of 2^n ranks only."""
        return self.stage_size & (self.stage_size - 1) == 0

    @property
    def sharding_axes(self) -> dict[str, int]:
        """Degrees above 1 of the axes within a stage, outer to inner: MindSpore's device matrix."""
        return {axis: self.degree(axis) for axis in self.order if axis in LAYOUT_AXES and self.degree(axis) > 1}

    @property
    def uneven_groups(self) -> str:
        """Axes within a stage whose groups MindSpore refuses on the first Ascend 910, and only there; for
        messages."""
        axes = (f"{axis} {n}" for axis, n in self.sharding_axes.items() if not _is_even(n, self.stride(axis)))
        return " and ".join(axes)

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees to print: pp, dp and tp, and every other above 1, outer to inner."""
        return {
            axis: self.degree(axis)
            for axis in (*self.order, *PART_NAMES)
            if BY_NAME[axis].is_shown or self.degree(axis) > 1
        }

    @property
    def expert_axes(self) -> tuple[str, str]:
        """dp as two axes: replicas of the same experts, outer, and ep, the ranks that the experts are sharded
        over."""
        return f"dp:{self.dp // self.ep}", f"dp/{self.dp // self.ep}"

    @property
    def expert_parts(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The axes whose ranks hold the same experts, those that shard the set of experts (ep), and those that
        shard each expert."""
        if self.ep <= self.dp:
            return *self.parted("dp", self.dp // self.ep), ("tp",)
        over_tp, rest = self.parted("tp", self.ep // self.dp)
        return (), ("dp", *over_tp) if self.dp > 1 else over_tp, rest

    def degree(self, axis: str) -> int:
        """Degree of an axis, or of a part of one (see `parted`)."""
        name, outer, inner = part_of_axis(axis)
        degree: int = getattr(self, name)
        return outer or (degree // inner if inner else degree)

    def parted(self, axis: str, most: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split `axis` in two: the part that shards `most` things, and the rest, along which neighbours hold the
        same. Either may be the full axis or empty; of tp 8 and `most` 2 they are `tp:2`, its two halves, and
        `tp/2`, the four ranks in each."""
        parts = math.gcd(self.degree(axis), most)
        if parts in (1, self.degree(axis)):
            return ((), (axis,)) if parts == 1 else ((axis,), ())
        return (f"{axis}:{parts}",), (f"{axis}/{parts}",)

    def coordinate(self, rank: int, axis: str) -> int:
        """Coordinate of `rank` along `axis`, or along a part of one."""
        if axis == "ep" and self.ep > self.dp:
            over_dp, over_tp = self.coordinate(rank, "dp"), self.coordinate(rank, self.expert_parts[1][-1])
            return over_dp * (self.ep // self.dp) + over_tp
        name, outer, inner = part_of_axis(self.expert_axes[1] if axis == "ep" else axis)
        if outer or inner:
            place, rest = self.coordinate(rank, name), self.degree(name) // (outer or inner)
            return place // rest if outer else place % rest
        return rank // self.stride(axis) % self.degree(axis)

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; 0 along the axes that are not given."""
        return sum(self.stride(axis) * place for axis, place in coordinates.items())

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` in their coordinates along `axes` only, ascending, including itself."""
        if "ep" in axes and self.ep > self.dp:
            further = (part for part in self.expert_parts[1] if part_of_axis(part)[0] not in axes)
            axes = (*(axis for axis in axes if axis != "ep"), *further)
        axes = tuple(axis for axis in axes if axis != "ep" or "dp" not in axes)  # a part of it
        base = rank - sum(self.stride(axis) * self.coordinate(rank, axis) for axis in axes)
        places = itertools.product(*(range(self.degree(axis)) for axis in axes))
        return sorted(base + self.rank_at(dict(zip(axes, place, strict=True))) for place in places)

    def ranks_of_stage(self, stage: int) -> range:
        """The ranks of one pipeline stage."""
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    def stride(self, axis: str) -> int:
        """Distance of ranks that are neighbours along `axis`, or along a part of one."""
        name, outer, _ = part_of_axis("dp" if axis == "ep" else axis)
        inner = math.prod(self.degree(further) for further in self.order[self.order.index(name) + 1 :])
        return inner * (self.degree(name) // outer if outer else 1)

    def __str__(self) -> str:
        parts = {axis: f"{axis} {degree}" for axis, degree in self.degrees.items() if axis != "ep"}
        if self.ep > 1:
            parts["dp"] += f" (ep {self.ep})"
        return " x ".join(parts.values()) + f" = {self.size}"


def part_of_axis(axis: str) -> tuple[str, int, int]:
    """Parse the name of an axis: N of `NAME:N`, its outer part, or of `NAME/N`, the rest; 0: not such a part."""
    name, _, outer = axis.partition(":")
    name, _, inner = name.partition("/")
    return name, int(outer or 0), int(inner or 0)
