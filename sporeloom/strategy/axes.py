# SPDX-License-Identifier: Apache-2.0
"""The axes of a mesh as data: one row an axis. `Mesh` has their degrees, and the text of each for the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: the use of the ranks along it, and the settings that it refuses."""

    name: str
    part_of: str = ""
    """The axis that it is a part of; empty: an axis of its own."""
    shards: Literal["layers", "batch", "tokens", "experts", "features"]
    """The thing that each rank has a part of."""
    divides: tuple[str, ...] = ()
    """Sizes of a model that its degree must divide, as fields of the configuration; see `checks.sizes_of`."""
    is_replica: bool = False
    """Whether its ranks hold the same weights, so that optimizer parallelism shards these over them."""
    shards_heads: bool = False
    """Whether attention has its heads sharded over it (cp: with Ulysses)."""
    needs_rules: bool = True
    """Whether an axis that no rule names is refused, because all its ranks would do the same."""
    is_shown: bool = False
    """Whether degree 1 is printed, too."""
    is_for_training: bool = False
    """Whether its ranks take sequences of their own in inference, as those of dp do."""
    uses_alltoall: bool = False
    """Whether MindSpore should move dims between its ranks in all-to-alls."""
    needs_names: bool = False
    """Whether MindSpore cannot derive layouts from numbers of shards where it is used with another axis."""
    parts: tuple[str, ...] = ()
    """Names in rules for parts of it (see `sporeloom.strategy.layout`)."""
    set_by: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    """Names in rules that stand for it only where a key of the strategy has a value, and for nothing elsewhere."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Situation -> why it is refused with this axis."""


ROWS = (
    Axis(name="pp", shards="layers", is_shown=True),
    Axis(name="dp", shards="batch", is_replica=True, needs_rules=False, is_shown=True, parts=("ep", "edp")),
    Axis(
        name="cp",
        shards="tokens",
        is_replica=True,
        shards_heads=True,
        is_for_training=True,
        uses_alltoall=True,
        needs_names=True,
        set_by={"cp_tokens": ("context_parallel", "gather"), "cp_heads": ("context_parallel", "ulysses")},
        refuses={
            "sampling": "texts are sampled a token at a time",
            "random-LTD": "--random-ltd-min-value needs full sequences on every rank",
        },
    ),
    Axis(name="ep", part_of="dp", shards="experts", uses_alltoall=True, divides=("experts.num_experts",)),
    Axis(
        name="tp",
        shards="features",
        shards_heads=True,
        is_shown=True,
        divides=(
            "num_heads",
            "ffn_hidden_size",
            "vocab_size",
            "experts.ffn_hidden_size",
            "experts.shared_ffn_hidden_size",
        ),
        parts=("kv", "group"),
        set_by={"sp": ("sequence_parallel", True)},
    ),
)
"""In the usual order, outer to inner."""
BY_NAME = {axis.name: axis for axis in ROWS}
AXES = tuple(axis.name for axis in ROWS if not axis.part_of)
"""Names of the axes of their own, in the usual order. A strategy file may order them otherwise."""
PART_NAMES = tuple(axis.name for axis in ROWS if axis.part_of)
LAYOUT_AXES = tuple(axis.name for axis in ROWS if not axis.part_of and axis.shards != "layers")
"""Names of the axes that shard dims of tensors."""
