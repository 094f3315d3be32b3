# SPDX-License-Identifier: Apache-2.0
"""The devices and links a job runs on."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sporeloom.errors import ConfigError, did_you_mean
from sporeloom.numbers import Count, NotNegative, Positive, Rate
from sporeloom.reader import fields_from, read_yaml
from sporeloom.shipped import CLUSTERS, shipped_or_file
from sporeloom.strategy.mesh import Mesh

FITTED = Path(__file__).with_name("fitted.yaml")
CHIPS = Path(__file__).with_name("chips.yaml")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What a chip makes of its data sheet; fitted on published runs by benchmarks/fit_planner.py."""

    matmul: Positive
    """Share of peak FLOP/s that a large matrix product reaches."""
    attention: Positive
    """The same, for the products inside attention."""
    memory: Positive
    """Share of memory bandwidth that passes over activations reach."""
    intra_node: Positive
    inter_node: Positive
    """Share of the links' bandwidth that collectives reach."""
    layer_overhead_us: NotNegative
    """Launches and gaps of one layer's forward pass, whatever its size."""
    fp8: Positive = 1.0
    """How much faster matrix products are in fp8 than in bf16."""


@dataclass(frozen=True, kw_only=True)
class ExpertEfficiency:
    """What layers of experts make of a chip; fitted on published runs by benchmarks/fit_experts.py, the same for all."""

    products: Positive
    """Share of a large product's speed that those of experts reach."""
    all_to_all: Positive
    """Share of the links' speed that all-to-alls reach."""
    overlap: Rate
    """Of a layer's products, behind which its all-to-alls hide where virtual stages interleave microbatches."""
    attention: Positive
    """How many times faster attention kernels are than in the runs of dense models, which are older."""
    passes: NotNegative
    """Over the rows of experts: they are put in order, weighted and added up."""
    layer_overhead_us: NotNegative
    """Launches and gaps of one layer's forward pass, besides those of a dense one."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Servers of equal chips. Bandwidths in GB/s and one direction, for one device."""

    chip: str
    """A name in sporeloom/planner/fitted.yaml."""
    peak_tflops: Positive
    """Dense, fp16 or bf16."""
    memory_gb: Positive
    """Of a device, in GB of 2^30 bytes."""
    memory_gb_per_s: Positive
    devices_per_node: Count
    intra_node_gb_per_s: Positive
    inter_node_gb_per_s: Positive
    host_gb_per_s: Positive = 32.0
    """To the host's memory: PCIe 4 with 16 lanes where the chip's data sheet says no other."""
    alignment: Count = 8
    """Matrix units want lengths that are multiples of this."""
    reserved_gb: Positive = 2.0
    """Kept by the framework and the collective library on every device."""
    flash_attention: bool = False
    """Attention runs in one kernel that keeps no scores."""
    even_groups: bool = False
    """MindSpore refuses groups that have other than 1, 2, 4 or 8 devices of a server, or not as many of each."""
    efficiency: Efficiency | None = field(default=None)
    experts: ExpertEfficiency | None = field(default=None)

    @classmethod
    def of_chip(cls, chip: str, **changes: Any) -> Cluster:
        """A cluster as the chip's data sheet has it, with `changes`."""
        sheet = {name: value for name, value in chips()[chip].items() if name != "names"}
        return cls(**{"chip": chip, **sheet, **changes})

    @property
    def fitted(self) -> Efficiency:
        return self.efficiency or fitted_efficiency(self.chip)

    @property
    def fitted_experts(self) -> ExpertEfficiency:
        return self.experts or ExpertEfficiency(**_fitted()["experts"])

    def refuses(self, mesh: Mesh) -> str | None:
        """Why MindSpore makes no groups of such a mesh here, if so."""
        if not self.even_groups or not mesh.uneven_groups:
            return None
        return (
            f"{mesh.uneven_groups}: MindSpore refuses such groups on {self.chip}; there one has 1, 2, 4 or 8 devices "
            "of a server, as many of each"
        )

    @property
    def usable_bytes(self) -> float:
        return (self.memory_gb - self.reserved_gb) * 2**30


@functools.cache
def chips() -> dict[str, Any]:
    """Data sheets by name of the chip."""
    return read_yaml(CHIPS).mapping


@functools.cache
def _fitted() -> dict[str, Any]:
    return read_yaml(FITTED).mapping


def fitted_efficiency(chip: str) -> Efficiency:
    """What was fitted for a chip."""
    return Efficiency(**_fitted()["chips"][chip])


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Shares of the computation behind which collectives hide; fitted, the same for all chips."""

    gradients: float
    """Of the last microbatch's backward pass, behind which gradients are reduced."""
    weights: float
    """Of the passes for which sharded weights are gathered."""

    @classmethod
    @functools.cache
    def fitted(cls) -> Overlap:
        return cls(**_fitted()["overlap"])


def read_cluster(path: Path) -> Cluster:
    """A cluster file, or the shipped one of that name: a chip, and what differs from its data sheet.

    Raises:
        ConfigError: unreadable, unknown chip, a field that is unknown, wrong or not positive.
    """
    document = read_yaml(shipped_or_file(path, CLUSTERS))
    given = document.mapping
    chip = given.get("chip")
    if not isinstance(chip, str) or chip not in chips():
        raise ConfigError(
            f"{document.at(('chip',))}: chip {str(chip)[:100]} is not known{did_you_mean(str(chip), chips())}; "
            f"known: {', '.join(chips())}"
        )
    sheet = Cluster.of_chip(str(chip))
    if isinstance(given.get("efficiency"), dict):
        given["efficiency"] = {**dataclasses.asdict(sheet.fitted), **given["efficiency"]}
    return fields_from(Cluster, document, sheet)
