# SPDX-License-Identifier: Apache-2.0
"""The devices and links of a job."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.core.numbers import Bounds, Count, NotNegative, Positive, Rate, number_problems
from sporeloom.core.reader import fields_from, read_yaml
from sporeloom.core.shipped import CLUSTERS, shipped_or_file
from sporeloom.strategy.mesh import Mesh

FITTED = Path(__file__).with_name("fitted.yaml")
CHIPS = Path(__file__).with_name("chips.yaml")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Efficiency of a chip, relative to its data sheet; fitted on published runs by benchmarks/fit_planner.py."""

    matmul: Positive
    """Fraction of peak FLOP/s that a large matrix product reaches."""
    attention: Positive
    """The same, for the products inside attention."""
    memory: Positive
    """Fraction of memory bandwidth that passes over activations reach."""
    intra_node: Positive
    inter_node: Positive
    """Fraction of the links' bandwidth that collectives reach."""
    layer_overhead_us: NotNegative
    """Launches and gaps of one layer's forward pass, independent of its size."""
    fp8: Positive = 1.0
    """Speed-up of matrix products in fp8 over bf16."""
    float32: Positive | None = None
    """Speed of matrix products in float32, relative to bf16; None: as the planner assumes."""
    launch_us: NotNegative | None = None
    """Overhead of one kernel, measured; None: a share of a layer's."""
    graph_us: NotNegative = 0.0
    """Overhead of one call of a graph."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLine:
    """Seconds of an operator (on top of its launch) or of a collective by its bytes: a line through measurements."""

    kind: str
    ranks: Count = 1
    """Ranks that take part in a collective."""
    latency_us: NotNegative
    gb_per_s: Positive

    def seconds(self, num_bytes: float) -> float:
        return self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)


@dataclass(frozen=True, kw_only=True)
class ProcessRates:
    """Rates that each process reaches while `processes` of them run at once on the cores that they share."""

    processes: Count
    efficiency: Efficiency
    operators: list[MeasuredLine] = field(default_factory=list)
    """Rates by the bytes that an operator reads and writes."""
    collectives: list[MeasuredLine] = field(default_factory=list)
    """Rates by the bytes of the unsharded tensor."""
    operators_at_once: Count = 1
    """Operators of a graph that a process runs at once. With 1, collectives are operators like all others, and nothing is
    computed meanwhile."""


@dataclass(frozen=True, kw_only=True)
class ExpertEfficiency:
    """Efficiency of layers with experts; fitted on published runs by benchmarks/fit_experts.py, the same for all
    chips."""

    products: Positive
    """Fraction of a large product's speed that those of experts reach."""
    all_to_all: Positive
    """Fraction of the links' bandwidth that all-to-alls reach, where the cluster gives no efficiency of its own."""
    overlap: Rate
    """Fraction of a layer's computation that hides all-to-alls of another microbatch, where engines run both at once."""
    passes: NotNegative
    """Number of passes over the rows of experts: they are put in order, weighted and added up."""
    layer_overhead_us: NotNegative
    """Launches and gaps of one layer's forward pass, besides those of a dense one."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of the network between servers and the whole cluster: a super node, a rack, a leaf switch."""

    devices: Count
    """Number of devices that it connects."""
    gb_per_s: Positive
    """Bandwidth in GB/s and one direction, for one device, to the other servers of the level."""
    links: Literal["server", "network"] = "server"
    """Kind of links: those inside a server, or those of the network, whose fitted efficiency they have."""
    oversubscription: Annotated[float, Bounds(1)] = 1.0
    """Bandwidth that its devices have together, divided by what the level carries when all send."""
    latency_us: NotNegative = 0.0
    """Latency of a message between servers of the level, beyond that of one inside a server."""
    port_gb_per_s: Positive | None = None
    """Bandwidth of one device that sends while others do not; None: `gb_per_s`."""
    all_to_all_gb_per_s: Positive | None = None
    """Bandwidth of each device in an all-to-all of the whole level, where its bisection has less; None: no less."""

    def __post_init__(self) -> None:
        problems = [*number_problems(self, str), *_port_problems("port_gb_per_s", self.port_gb_per_s, self.gb_per_s)]
        if problems:
            raise ConfigError(problems)


def _port_problems(name: str, port: float | None, gb_per_s: float) -> Iterator[str]:
    if port is not None and port < gb_per_s:
        yield f"{name} {port:g} is below the {gb_per_s:g} GB/s that each device has when all send"


@dataclass(frozen=True)
class Link:
    """Links of one level, for one device."""

    devices: float
    """Number of devices that they connect; infinite for the network."""
    gb_per_s: float
    efficiency: float
    below: int = 1
    """Number of devices of a unit below, which share what leaves it."""
    oversubscription: float = 1.0
    latency_s: float = 0.0
    port_gb_per_s: float | None = None
    all_to_all_gb_per_s: float = math.inf

    def rate(self, senders: int) -> float:
        """GB/s that each of so many devices of a unit below reaches: its own link's, or its share of what leaves the unit."""
        port = (self.port_gb_per_s or self.gb_per_s) / self.gb_per_s
        return self.gb_per_s * self.efficiency * min(port, self.below / (senders * self.oversubscription))

    def all_to_all_rate(self, senders: int) -> float:
        """The same in an all-to-all, by the data sheet: without an efficiency."""
        return min(self.rate(senders) / self.efficiency, self.all_to_all_gb_per_s)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Servers of equal chips. Bandwidths in GB/s and one direction, for one device."""

    chip: str
    """Name in sporeloom/planner/fitted.yaml."""
    unpublished: str | None = None
    """Name of the devices, in the plural, where they are not `chip` but have its efficiencies, as no run on them is
    published: plans have no interval."""
    peak_tflops: Positive
    """FLOP/s of dense fp16 or bf16 products."""
    memory_gb: Positive
    """Memory of a device, in GB of 2^30 bytes."""
    memory_gb_per_s: Positive
    devices_per_node: Count
    intra_node_gb_per_s: Positive
    inter_node_gb_per_s: Positive
    """Bandwidth of the network when all devices send."""
    inter_node_port_gb_per_s: Positive | None = None
    """The same of one device that sends while others of its server, or of the largest level's unit, do not; None: no more."""
    levels: list[Level] = field(default_factory=list)
    """Levels between servers and the network, the smallest first; none: servers are connected by the network alone."""
    host_gb_per_s: Positive = 32.0
    """Bandwidth to the host's memory: PCIe 4 with 16 lanes where the chip's data sheet gives no other."""
    alignment: Count = 8
    """Matrix units need lengths that are multiples of this."""
    reserved_gb: Positive = 2.0
    """Memory reserved by the framework and the collective library on every device."""
    flash_attention: bool = False
    """Attention runs in one kernel that stores no scores."""
    even_groups: bool = False
    """MindSpore refuses groups that do not have 1, 2, 4 or 8 devices of a server, the same number on each."""
    efficiency: Efficiency | None = field(default=None)
    experts: ExpertEfficiency | None = field(default=None)
    fused: bool = True
    """Operators between products and collectives run as one kernel, which reads and writes once."""
    measured: list[ProcessRates] = field(default_factory=list)
    """Rates of a machine whose processes share its cores, by their number, as `sporeloom calibrate` writes them."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        if self.reserved_gb >= self.memory_gb:
            yield f"reserved_gb {self.reserved_gb:g} leaves nothing of memory_gb {self.memory_gb:g}; give a smaller one"
        if self.measured and self.efficiency:
            yield "efficiency would be ignored, as each entry of `measured` has its own; give one of the two"
        yield from _port_problems("inter_node_port_gb_per_s", self.inter_node_port_gb_per_s, self.inter_node_gb_per_s)
        inner = self.devices_per_node
        for number, level in enumerate(self.levels):
            if level.devices <= inner or level.devices % inner:
                yield (
                    f"levels[{number}].devices {level.devices} is not a larger multiple of the {inner} devices that the "
                    "level below it connects; list levels from the smallest to the largest"
                )
            inner = level.devices

    @classmethod
    def of_chip(cls, chip: str, **changes: Any) -> Cluster:
        """A cluster with the values of the chip's data sheet, with `changes`."""
        sheet = {name: value for name, value in chips()[chip].items() if name != "names"}
        return cls(**{"chip": chip, **sheet, **changes})

    @property
    def has_grouped_products(self) -> bool:
        """Whether experts can compute their own rows alone: MindSpore has no such product for GPUs."""
        return self.is_cpu or self.chip.startswith("ascend")

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are processes of a machine without devices."""
        return self.chip == "cpu"

    @property
    def goes_by_levels(self) -> bool:
        """Whether its library, HCCL, has collectives that go level by level."""
        return self.chip.startswith("ascend")

    @property
    def fitted(self) -> Efficiency:
        if self.measured:
            return self.measured[0].efficiency
        return self.efficiency or fitted_efficiency(self.chip)

    @functools.cached_property
    def links(self) -> tuple[Link, ...]:
        """Links inside a server, of each level, and of the network."""
        fitted = self.fitted
        efficiency = {"server": fitted.intra_node, "network": fitted.inter_node}
        levels = [
            Link(
                level.devices,
                level.gb_per_s,
                efficiency[level.links],
                below,
                level.oversubscription,
                level.latency_us * 1e-6,
                level.port_gb_per_s,
                level.all_to_all_gb_per_s or math.inf,
            )
            for below, level in zip(self.units, self.levels, strict=False)
        ]
        inside = Link(self.devices_per_node, self.intra_node_gb_per_s, fitted.intra_node)
        network = Link(
            math.inf,
            self.inter_node_gb_per_s,
            fitted.inter_node,
            self.units[-1],
            port_gb_per_s=self.inter_node_port_gb_per_s,
        )
        return inside, *levels, network

    @functools.cached_property
    def units(self) -> tuple[int, ...]:
        """Number of devices that a server connects, and a unit of each level."""
        return self.devices_per_node, *(level.devices for level in self.levels)

    def with_running(self, processes: int) -> Cluster:
        """This cluster with the rates of so many processes running at once, or of the next larger number that was measured.

        Raises:
            ConfigError: fewer were measured.
        """
        if not self.measured:
            return self
        enough = [each for each in self.measured if each.processes >= processes]
        if not enough:
            most = max(each.processes for each in self.measured)
            raise ConfigError(
                f"cluster {self.chip}: measured with at most {most} processes at once on its cores, the job has {processes}; "
                f"run sporeloom calibrate --launch {processes}"
            )
        return dataclasses.replace(self, measured=[min(enough, key=lambda each: each.processes)])

    @property
    def fitted_experts(self) -> ExpertEfficiency:
        return self.experts or ExpertEfficiency(**_fitted()["experts"])

    def share_of_all_to_all(self, link: Link) -> float:
        """Fraction of a link's bandwidth that all-to-alls reach."""
        is_given = self.experts is None and (self.efficiency or self.measured)
        return link.efficiency if is_given else self.fitted_experts.all_to_all

    def refuses(self, mesh: Mesh) -> str | None:
        """Why MindSpore does not create the groups of such a mesh on this cluster; None if it does."""
        if not self.even_groups or not mesh.uneven_groups:
            return None
        return (
            f"{mesh.uneven_groups}: MindSpore refuses such groups on {self.chip}; there one has 1, 2, 4 or 8 devices "
            "of a server, as many of each"
        )

    @property
    def device_name(self) -> str:
        """Name of the devices in plans, without line breaks."""
        return " ".join((self.unpublished or self.chip).split())

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
    """Fitted efficiency of a chip."""
    return Efficiency(**_fitted()["chips"][chip])


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Fractions of the computation that hide collectives; fitted, the same for all chips."""

    gradients: float
    """Fraction of the last microbatch's backward pass that hides the reduction of gradients."""
    weights: float
    """Fraction of the passes that hides the gathering of sharded weights."""
    contention: float = 0.0
    """Fraction of the time of hidden collectives of sharded weights by which they slow the computation down: their kernels
    occupy cores and memory bandwidth."""

    @classmethod
    @functools.cache
    def fitted(cls) -> Overlap:
        return cls(**_fitted()["overlap"])


def read_cluster(path: Path) -> Cluster:
    """Load a cluster file, or the built-in one of that name: a chip, and its differences from the data sheet.

    Raises:
        ConfigError: unreadable, unknown chip, a field that is unknown, wrong or not positive.
    """
    document = read_yaml(shipped_or_file(path, CLUSTERS))
    given = document.mapping
    chip = given.get("chip")
    if given.get("measured") and isinstance(chip, str):  # it needs no data sheet
        return fields_from(Cluster, document)
    if not isinstance(chip, str) or chip not in chips():
        raise ConfigError(
            f"{document.at(('chip',))}: chip {str(chip)[:100]} is not known{did_you_mean(str(chip), chips())}; "
            f"known: {', '.join(chips())}"
        )
    sheet = Cluster.of_chip(str(chip))
    if isinstance(given.get("efficiency"), dict):
        given["efficiency"] = {**dataclasses.asdict(sheet.fitted), **given["efficiency"]}
    return fields_from(Cluster, document, sheet)
