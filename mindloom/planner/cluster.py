# SPDX-License-Identifier: Apache-2.0
"""The devices and links a job runs on."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindloom.errors import ConfigError, did_you_mean
from mindloom.planner.dimensions import checked, read_mapping

FITTED = Path(__file__).with_name("fitted.yaml")
CHIPS = Path(__file__).with_name("chips.yaml")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What a chip makes of its data sheet; fitted on published runs by benchmarks/fit_planner.py."""

    matmul: float
    """Share of peak FLOP/s that a large matrix product reaches."""
    attention: float
    """The same, for the products inside attention."""
    memory: float
    """Share of memory bandwidth that passes over activations reach."""
    intra_node: float
    inter_node: float
    """Share of the links' bandwidth that collectives reach."""
    layer_overhead_us: float
    """Launches and gaps of one layer's forward pass, whatever its size."""
    fp8: float = 1.0
    """How much faster matrix products are in fp8 than in bf16."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Servers of equal chips. Bandwidths in GB/s and one direction, for one device."""

    chip: str
    """A name in mindloom/planner/fitted.yaml."""
    peak_tflops: float
    """Dense, fp16 or bf16."""
    memory_gb: float
    """Of a device, in GB of 2^30 bytes."""
    memory_gb_per_s: float
    devices_per_node: int
    intra_node_gb_per_s: float
    inter_node_gb_per_s: float
    alignment: int = 8
    """Matrix units want lengths that are multiples of this."""
    reserved_gb: float = 2.0
    """Kept by the framework and the collective library on every device."""
    flash_attention: bool = False
    """Attention runs in one kernel that keeps no scores."""
    efficiency: Efficiency | None = field(default=None)

    @classmethod
    def of_chip(cls, chip: str, **changes: Any) -> Cluster:
        """A cluster as the chip's data sheet has it, with `changes`."""
        sheet = {name: value for name, value in chips()[chip].items() if name != "names"}
        return cls(**{"chip": chip, **sheet, **changes})

    @property
    def fitted(self) -> Efficiency:
        return self.efficiency or fitted_efficiency(self.chip)

    @property
    def usable_bytes(self) -> float:
        return (self.memory_gb - self.reserved_gb) * 2**30


@functools.cache
def chips() -> dict[str, Any]:
    """Data sheets by name of the chip."""
    return read_mapping(CHIPS)


@functools.cache
def _fitted() -> dict[str, Any]:
    return read_mapping(FITTED)


def fitted_efficiency(chip: str) -> Efficiency:
    """What was fitted for a chip."""
    return Efficiency(**_fitted()["chips"][chip])


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Shares of the computation behind which collectives hide; fitted, the same for all chips."""

    gradients: float
    """Of the last microbatch's backward pass, behind which gradients are reduced."""
    weights: float
    """Of the passes for which cut weights are gathered."""

    @classmethod
    @functools.cache
    def fitted(cls) -> Overlap:
        return cls(**_fitted()["overlap"])


def read_cluster(path: Path) -> Cluster:
    """A cluster file: a chip, and what differs from its data sheet.

    Raises:
        ConfigError: unreadable, unknown chip, a field that is unknown, wrong or not positive.
    """
    values = read_mapping(path)
    chip = values.pop("chip", None)
    if chip not in chips():
        raise ConfigError(
            f"{path}: chip {chip} is not known{did_you_mean(str(chip), chips())}; known: {', '.join(chips())}"
        )
    sheet = Cluster.of_chip(chip)
    if isinstance(values.get("efficiency"), dict):
        merged = {**dataclasses.asdict(sheet.fitted), **values["efficiency"]}
        values["efficiency"] = checked(Efficiency, merged, f"{path}: efficiency")
    known = {field.name: getattr(sheet, field.name) for field in dataclasses.fields(Cluster)}
    cluster: Cluster = checked(Cluster, {**known, **values}, str(path))
    problems = [
        f"{path}: {name} must be positive, got {value}"
        for name, value in dataclasses.asdict(cluster).items()
        if not isinstance(value, bool) and isinstance(value, int | float) and value <= 0
    ]
    if problems:
        raise ConfigError(problems)
    return cluster
