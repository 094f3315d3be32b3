# SPDX-License-Identifier: Apache-2.0
"""A parameter as data, and the sizes that parts depend on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

Shape = tuple[int, ...]
Use = Literal["matrix", "vector", "table", "sink", "channels"]
"""matrix: every token is multiplied with all of it; vector: norms, biases and factors; table: rows are looked up; sink: keys
and values in front of each sequence; channels: a convolution, whose channels are multiplied one by one."""
Sharding = Literal["whole", "tp", "kv"]
"""Sharding by tensor parallelism: every rank holds all of it, or a shard, or a shard for each head of keys and values
at most."""


class ParameterSpec(NamedTuple):
    """A parameter of a part."""

    name: str
    shape: Shape
    use: Use = "vector"
    sharding: Sharding = "whole"

    @property
    def num_entries(self) -> int:
        return math.prod(self.shape)

    def within(self, path: str) -> ParameterSpec:
        """The same parameter of a part that is at `path` in the model."""
        return self._replace(name=f"{path}.{self.name}")


Specs = Iterator[ParameterSpec]


def linear(
    name: str, inner: int, outer: int, bias: bool, sharding: Sharding = "whole", of_bias: Sharding = "whole"
) -> Specs:
    """A matrix (outer, inner), and a bias."""
    yield ParameterSpec(f"{name}.weight", (outer, inner), "matrix", sharding)
    if bias:
        yield ParameterSpec(f"{name}.bias", (outer,), "vector", of_bias)


def num_entries(specs: Iterable[ParameterSpec], use: Use | None = None, *shardings: Sharding) -> int:
    """Number of entries of parameters, of those with this use and sharding."""
    return sum(
        spec.num_entries for spec in specs if use in (None, spec.use) and (not shardings or spec.sharding in shardings)
    )


class LayerSizes(Protocol):
    """Sizes and choices of a layer: of a model's configuration, and of the planner's dimensions."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def query_size(self) -> int: ...
    @property
    def kv_size(self) -> int: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def output_bias(self) -> bool: ...
    @property
    def gated_mlp(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def has_norm_bias(self) -> bool: ...
