# SPDX-License-Identifier: Apache-2.0
"""A parameter as data: its name, shape and initial value; and the sizes that parts depend on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

Shape = tuple[int, ...]
Use = Literal["matrix", "vector", "table", "sink", "channels"]
"""matrix: every token is multiplied with all of it; vector: norms, biases and factors; table: rows are looked up; sink: keys
and values in front of each sequence; channels: a convolution, whose channels are multiplied one by one."""
Sharding = Literal["whole", "tp", "kv"]
"""Sharding by tensor parallelism: every rank holds all of it, or a shard, or a shard for each head of keys and values
at most."""
InitRule = Literal["embedding_std", "qkv_std", "matrix_std", "output_std", "attention_gain", "mlp_gain"]
"""A number of initial values that the model's configuration determines (`sporeloom.models.parameters.init_numbers`)."""


class InitialValue(NamedTuple):
    """Initial value of a parameter's entries."""

    kind: Literal["constant", "normal", "truncated_normal", "uniform"]
    number: float | InitRule
    """The constant; the standard deviation; or the bound, of values on both sides of 0. MindSpore's truncated normal values
    end at -2 and 2 whatever their standard deviation is."""

    def resolved(self, numbers: Mapping[InitRule, float]) -> InitialValue:
        """The same with the number of its rule."""
        return self if isinstance(self.number, float) else self._replace(number=numbers[self.number])

    @property
    def value(self) -> float:
        """The number of a resolved one."""
        assert isinstance(self.number, float), f"{self.number} is not resolved"
        return self.number


ZEROS, ONES = InitialValue("constant", 0.0), InitialValue("constant", 1.0)
QKV, MATRIX = InitialValue("normal", "qkv_std"), InitialValue("normal", "matrix_std")
OUTPUT = InitialValue("normal", "output_std")
"""Initial value of the matrices that write to the residual stream."""


class ParameterSpec(NamedTuple):
    """A parameter of a part."""

    name: str
    shape: Shape
    init: InitialValue
    use: Use = "vector"
    sharding: Sharding = "whole"

    @property
    def num_entries(self) -> int:
        return math.prod(self.shape)

    def within(self, path: str) -> ParameterSpec:
        """The same parameter of a part that is at `path` in the model."""
        return self._replace(name=f"{path}.{self.name}")


Specs = Iterator[ParameterSpec]


class ParameterSpecs(dict[str, ParameterSpec]):
    """Parameters of a part of the model by their names within it."""

    @classmethod
    def of(cls, specs: Iterable[ParameterSpec]) -> ParameterSpecs:
        return cls((spec.name, spec) for spec in specs)

    def within(self, path: str) -> ParameterSpecs:
        """Parameters of the part that is at `path` in this one."""
        prefix = f"{path}."
        return ParameterSpecs(
            (name.removeprefix(prefix), spec) for name, spec in self.items() if name.startswith(prefix)
        )


def linear(
    name: str,
    inner: int,
    outer: int,
    bias: bool,
    init: InitialValue,
    sharding: Sharding = "whole",
    of_bias: Sharding = "whole",
) -> Specs:
    """A matrix (outer, inner), and a bias."""
    yield ParameterSpec(f"{name}.weight", (outer, inner), init, "matrix", sharding)
    if bias:
        yield ParameterSpec(f"{name}.bias", (outer,), ZEROS, "vector", of_bias)


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
