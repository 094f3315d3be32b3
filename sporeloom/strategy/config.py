# SPDX-License-Identifier: Apache-2.0
"""A strategy as dataclasses: what a strategy file may say. `loader` reads it, `checks` holds it against a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, cast

from sporeloom.errors import ConfigError
from sporeloom.numbers import Count, Depth, Natural, Positive
from sporeloom.strategy.layout import Layout
from sporeloom.strategy.listed_schedule import ListedSchedule
from sporeloom.strategy.mesh import Mesh

ContextMethod = Literal["gather", "ulysses"]
Schedule = Literal["1f1b", "gpipe", "seqpipe", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v"]
Order = Schedule | ListedSchedule
V_SHAPED: tuple[Schedule, ...] = ("zero_bubble_v", "dualpipe_v")
"""Schedules whose 2 virtual stages go down the stages and up again."""
Partitioner = Literal["mindspore", "spmd"]


def stage_of_part(part: int, num_stages: int, schedule: Order) -> int:
    """The stage that holds a virtual stage: they are assigned in turn, down and up again, or as a file says."""
    if isinstance(schedule, ListedSchedule):
        return schedule.stage_of(part)
    stage = part % num_stages
    return num_stages - 1 - stage if schedule in V_SHAPED and part >= num_stages else stage


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How the layers are distributed to the pipeline stages; without a setting, evenly."""

    weights: list[Positive] | None = None
    """Relative load of each stage, or virtual stage in the order of the layers: they are distributed in this proportion, at
    least one each."""
    num_layers: list[Count] | None = None
    """Layers of each stage, or virtual stage in their order, spelled out."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline parallelism: the batch is split into microbatches that follow each other through the stages."""

    num_microbatches: Depth = 1
    """Microbatches of one step; at least as many as stages. More of them make the idle part (bubble) smaller."""
    stages: Literal["uniform"] | Stages = "uniform"
    """`uniform`, `{weights: [...]}` or `{num_layers: [...]}`."""
    virtual_stages: Depth = 1
    """Parts of the model that each stage holds, assigned in turn (interleaving): with v of them filling and draining the
    pipeline takes a v-th of the time, and v times as much is sent between stages."""
    schedule: str = "1f1b"
    """Order in which stages work on microbatches: `1f1b`, a forward and a backward in turn; `gpipe`, all forward first;
    `seqpipe`, which interleaves virtual stages otherwise; `zero_bubble_h1`, 1f1b whose backward passes are taken apart to
    fill the idle time; `zero_bubble_v` and `dualpipe_v`, where they are, too, and whose 2 virtual stages go down the stages
    and up again; or a CSV file of your own, relative to this one (docs/how-to/pipelines.md). MindSpore's own pipelines, on
    devices, have no zero_bubble_h1, dualpipe_v and files, and gpipe with virtual stages alone."""
    listed: ListedSchedule | None = field(default=None, metadata={"hidden": True})
    """What the file says, if `schedule` is one."""

    @property
    def order(self) -> Order:
        """The schedule, to be asked what follows from it."""
        return self.listed or cast("Schedule", self.schedule)


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Layers whose activations are computed again in the backward pass instead of kept."""

    layers: Literal["all"] | list[Natural] = "all"
    """`all`, or layer numbers from 0."""
    kind: Literal["full", "selective"] = "full"
    """`full`: everything in the layer. `selective`: only the operators the rules list under `selective`, those that keep
    much and are cheap: what attention makes between its products."""
    per_stage: list[Natural] | None = None
    """Instead of `layers`: how many layers of each stage, its first ones."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What lies in the host's memory and is moved to the device when it is needed. CPU processes have one memory: they
    compute the same without moving anything."""

    optimizer: bool = False
    """AdamW's moments; the host's processors update the parameters."""
    layers: Literal["all"] | list[Natural] = field(default_factory=list)
    """`all`, or layer numbers from 0: those whose activations wait for the backward pass there."""


@dataclass(frozen=True, kw_only=True)
class OptimizerParallel:
    """Each parameter, its gradient and optimizer state are sharded over the replicas too (ZeRO)."""

    axis: Literal["dp"] = "dp"
    """Mesh axis of the replicas."""
    threshold_kb: Natural = 0
    """Parameters smaller than this, in KB of this rank's part, stay whole."""
    shard_size: Natural | None = None
    """Sharded over groups of this many replicas instead of all of them."""
    shard_accumulated_gradients: bool = False
    """In a pipeline: shard the gradients while microbatches add up, too. Less memory, a reduce-scatter per microbatch."""
    reshard_after_forward: bool = False
    """Give up a layer's gathered weights after its forward pass and gather them again when it is computed again (ZeRO 3). Of
    weights a device then holds two layers at once instead of all, and it gathers them twice. For one microbatch a
    step, without a pipeline, with `recompute: {layers: all}`; not for experts, adapters and copies."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Layouts of the operators whose path ends with `pattern`: `*` is one component of a path, `up|gate` either of two."""

    pattern: str
    inputs: tuple[Layout, ...]
    """One layout for each tensor input."""
    outputs: tuple[Layout, ...] | None = None
    """Only where it is not implied by the inputs, as for a reduce-scatter after a matrix product."""
    local: bool = False
    """Each rank runs the operator on its own parts as it stands: MindSpore neither judges nor changes it. For indices
    that count within a rank's part. Needs the layouts of the outputs."""
    optional: bool = False
    """Written as `pattern?`: for some models only, may match nothing."""
    source: str = ""
    """file:line"""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the strategy knows about a family of models."""

    layers: tuple[str, ...] = ()
    """Patterns of the Cells that a pipeline assigns to stages and recompute wraps, in order."""
    first_stage: tuple[str, ...] = ()
    """Patterns of the cells that go with the first layer."""
    last_stage: tuple[str, ...] = ()
    """Patterns of the cells that go with the last layer."""
    selective: tuple[str, ...] = ()
    """Patterns of the operators that selective recomputation computes again."""
    tied: tuple[str, ...] = ()
    """Patterns of the parameters the first and the last stage both use. In a pipeline they are sent every step, and
    MindSpore cannot shard what it sends: optimizer parallel leaves them whole. A network one of whose Cells says
    `tied_embedding = False` has none."""
    operators: tuple[Rule, ...] = ()
    """Later rules win."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one model runs on many devices."""

    mesh: Mesh = field(default_factory=Mesh)
    """Degrees of the mesh axes; their product is the number of processes."""
    rules: Rules = field(default_factory=Rules)
    """A rules file, relative to this one, or `{base: FILE, operators: {...}}` to add to one or several, or to stand alone."""
    pipeline: Pipeline = field(default_factory=Pipeline)
    """Microbatches and stages, when mesh.pp > 1."""
    recompute: Recompute | None = None
    """Which layers to compute twice; none without this key."""
    offload: Offload | None = None
    """What lies in the host's memory; nothing without this key."""
    optimizer_parallel: OptimizerParallel | None = None
    """Shard parameters and optimizer state over the replicas; off without this key."""
    sequence_parallel: bool = False
    """Shard the tokens over tp where a layer works on each token alone (the axis `sp` of the rules)."""
    context_parallel: Literal["gather", "ulysses"] = "gather"
    """How attention sees whole sequences, when mesh.cp > 1: `gather`, each rank has its part of the queries and gathers all
    keys and values; `ulysses`, all-to-alls give each rank whole sequences of a part of the heads, and take them back."""
    micro_batch_interleave: Depth = 1
    """Copies that each microbatch (without a pipeline: the batch) is split into, so that devices can compute one while
    another communicates; the same arithmetic. MindSpore orders their collectives where `mesh.pp` is 1."""
    engine: Partitioner | None = None
    """Who shards graphs for CPU processes: `spmd`, which compiles the graph of one device once for all ranks and shards that
    (`sporeloom.partition`), or `mindspore`, whose compiler does so for every rank anew. Without it `spmd`, but in dry runs,
    in certificates, on devices, and in pipelines of users' networks `mindspore`."""
    source: str = field(default="<strategy>", compare=False, metadata={"hidden": True})
    """Name of the file, for messages."""
    lines: dict[str, int] = field(default_factory=dict, compare=False, repr=False, metadata={"hidden": True})
    """Line of each key, for messages."""

    @property
    def is_spmd(self) -> bool:
        """Whether the graph of one device is compiled, and sharded afterwards."""
        return self.engine != "mindspore" and self.mesh.size > 1

    def by_mindspore(self) -> Strategy:
        """The same, whose graphs MindSpore shards.

        Raises:
            ConfigError: it cannot.
        """
        if problems := self.mindspore_problems():
            raise ConfigError(problems)
        return replace(self, engine="mindspore")

    def mindspore_problems(self) -> list[str]:
        """What MindSpore's own pipelines do not have."""
        pipeline, lacks = self.pipeline, ""
        if pipeline.listed or pipeline.schedule in ("zero_bubble_h1", "dualpipe_v"):
            lacks = f"no {'schedules from files' if pipeline.listed else pipeline.schedule}"
        elif pipeline.schedule == "gpipe" and pipeline.virtual_stages == 1:
            lacks = "no gpipe without virtual stages"
        if not lacks:
            return []
        return [
            f"{self.at('pipeline.schedule')}: MindSpore's own pipelines, which run on devices and are dry-run and certified, "
            f"have {lacks}; take {'zero_bubble_v' if pipeline.schedule == 'dualpipe_v' else '1f1b'}"
        ]

    @property
    def optimizer_on_host(self) -> bool:
        """Whether AdamW's moments lie in the host's memory."""
        return self.offload is not None and self.offload.optimizer

    @property
    def gathers_twice(self) -> bool:
        """Whether weights are gathered again for the backward pass."""
        return self.optimizer_parallel is not None and self.optimizer_parallel.reshard_after_forward

    @property
    def num_virtual_stages(self) -> int:
        """Parts into which the pipeline splits the layers."""
        return self.mesh.pp * self.pipeline.virtual_stages

    def stage_of_part(self, part: int) -> int:
        """The stage that holds a part of the layers."""
        return stage_of_part(part, self.mesh.pp, self.pipeline.order)

    @property
    def stage_of_loss(self) -> int:
        """The stage that holds the last part of the model."""
        return self.stage_of_part(self.num_virtual_stages - 1)

    def num_microbatches(self, accumulate: int = 1) -> int:
        """Parts of a step's batch that follow each other: a pipeline's, or those `accumulate` asks for without one."""
        return self.pipeline.num_microbatches if self.mesh.pp > 1 else accumulate

    def num_parts(self, accumulate: int = 1) -> int:
        """Times a step runs the network: on each copy of each microbatch."""
        return self.num_microbatches(accumulate) * self.micro_batch_interleave

    def at(self, key: str) -> str:
        """`file:line: key`, for messages."""
        known = key
        while known and known not in self.lines:
            known = known.rpartition(".")[0]
        line = f":{self.lines.get(known, 1)}" if self.lines else ""  # a script has none
        return f"{self.source}{line}: {key}"


SINGLE_DEVICE = Strategy(source="one device")
