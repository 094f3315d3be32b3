# SPDX-License-Identifier: Apache-2.0
"""A strategy as dataclasses: the keys of a strategy file. `loader` reads it, `checks` validates it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, cast

from sporeloom.core.errors import ConfigError
from sporeloom.core.numbers import Count, Depth, Natural, Positive
from sporeloom.models.paths import path_matches
from sporeloom.strategy.axes import ROWS
from sporeloom.strategy.layout import Layout
from sporeloom.strategy.listed_schedule import ListedSchedule
from sporeloom.strategy.mesh import Mesh

ContextMethod = Literal["gather", "ulysses"]
Schedule = Literal["1f1b", "gpipe", "seqpipe", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v"]
Order = Schedule | ListedSchedule
V_SHAPED: tuple[Schedule, ...] = ("zero_bubble_v", "dualpipe_v")
"""Schedules whose 2 virtual stages run through the stages first down, then up."""
Partitioner = Literal["mindspore", "spmd"]


def stage_of_part(part: int, num_stages: int, schedule: Order) -> int:
    """The stage that a virtual stage belongs to: they are assigned in turn, or down and up again, or as a file
    says."""
    if isinstance(schedule, ListedSchedule):
        return schedule.stage_of(part)
    stage = part % num_stages
    return num_stages - 1 - stage if schedule in V_SHAPED and part >= num_stages else stage


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Distribution of the layers over the pipeline stages; even without a setting."""

    weights: list[Positive] | None = None
    """Relative load of each stage, or of each virtual stage in the order of the layers: they are distributed in
    this proportion, at least one each."""
    num_layers: list[Count] | None = None
    """Number of layers of each stage, or of each virtual stage in order."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline parallelism: the batch is split into microbatches that pass through the stages one after another."""

    num_microbatches: Depth = 1
    """microbatches of one step; at least as many as stages. More of them reduce the idle time (pipeline bubble)."""
    stages: Literal["uniform"] | Stages = "uniform"
    """`uniform`, `{weights: [...]}` or `{num_layers: [...]}`."""
    virtual_stages: Depth = 1
    """Number of model parts on each stage, assigned in turn (interleaved schedule): with v of them filling and
    draining the pipeline takes a v-th of the time, and v times as much is sent between stages."""
    schedule: str = "1f1b"
    """Order in which stages work on microbatches: `1f1b`, a forward and a backward in turn; `gpipe`, all forward
    first; `seqpipe`, another interleaving of virtual stages; `zero_bubble_h1`, 1f1b whose backward passes are
    split to fill the idle time; `zero_bubble_v` and `dualpipe_v`, with split backward passes, too, and 2
    virtual stages that run down the stages and up again; or a custom CSV file, relative to this one
    (docs/how-to/pipelines.md). MindSpore's own pipelines (`engine: mindspore`) have neither zero_bubble_h1, dualpipe_v
    nor files, and gpipe only with virtual stages."""
    listed: ListedSchedule | None = field(default=None, metadata={"hidden": True})
    """The contents of the file, if `schedule` is one."""

    @property
    def order(self) -> Order:
        """The schedule: its name, or the contents of its file."""
        return self.listed or cast("Schedule", self.schedule)


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Layers whose activations are recomputed in the backward pass instead of kept."""

    layers: Literal["all"] | list[Natural] = "all"
    """`all`, or layer numbers from 0."""
    kind: Literal["full", "selective"] = "full"
    """`full`: everything in the layer. `selective`: only the operators that the rules list under `selective`,
    which keep much memory and are cheap: those between attention's matrix products."""
    per_stage: list[Natural] | None = None
    """Instead of `layers`: number of recomputed layers of each stage, its first ones."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """State that is kept in the host's memory and moved to the device when it is needed. CPU processes have one memory:
    they compute the same without moving anything."""

    optimizer: bool = False
    """AdamW's moments; the host's processors update the parameters."""
    layers: Literal["all"] | list[Natural] = field(default_factory=list)
    """`all`, or layer numbers from 0: those whose activations wait for the backward pass there. On devices it needs
    `engine: mindspore`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerParallel:
    """Shard each parameter, its gradient and optimizer state over the replicas, too (ZeRO)."""

    axis: Literal["dp"] = "dp"
    """Mesh axis of the replicas."""
    threshold_kb: Natural = 0
    """Parameters smaller than this, in KB of this rank's shard, stay unsharded over the replicas."""
    shard_size: Natural | None = None
    """Shard over groups of this many replicas instead of all of them."""
    shard_accumulated_gradients: bool = False
    """ZeRO-2 with microbatches: reduce-scatter the gradients of each and add up shards, as `reshard_after_forward`
    does. Less memory, a reduce-scatter per microbatch instead of one per step."""
    reshard_after_forward: bool = False
    """ZeRO-3 / FSDP: gather a weight when its first operator in the forward pass is due, release it after the last one, and
    gather it again for the backward pass, in a pipeline for each microbatch. A device then holds the gathered weights
    of a layer or two at once instead of all, and gathers them twice."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Layouts of the operators whose path ends with `pattern`: `*` is one component of a path, `up|gate` either of
    two."""

    pattern: str
    inputs: tuple[Layout, ...]
    """One layout for each tensor input."""
    outputs: tuple[Layout, ...] | None = None
    """Layout of the output, only where the inputs do not imply it, as for a reduce-scatter after a matrix product."""
    local: bool = False
    """Each rank runs the operator on its own shards as it stands: MindSpore neither checks nor changes it. For
    indices that count within a rank's shard. Needs the layouts of the outputs."""
    optional: bool = False
    """Written as `pattern?`: it may match nothing, as it is for some models only."""
    source: str = ""
    """Its position as file:line."""

    @property
    def keeps_experts(self) -> bool:
        """Whether each rank of expert parallelism runs the operator on what it has."""
        return self.local and "'ep'" in str(self.inputs)


SORTED_ROWS = (
    *(f"order.{name}" for name in ("sort", "unsort", "expert")),
    *(f"by_expert.{name}" for name in ("pick", "unpick")),
    *(f"by_token.{name}" for name in ("pick", "unpick", "pick_weight", "pick_weight_back", "unpick_weight")),
)
"""Operators on rows that are sorted by expert, whose indices count within a rank's rows under expert parallelism."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The part of a strategy that depends on the family of models."""

    layers: tuple[str, ...] = ()
    """Patterns of the Cells that a pipeline assigns to stages and recompute wraps, in order."""
    first_stage: tuple[str, ...] = ()
    """Patterns of the cells that go with the first layer."""
    last_stage: tuple[str, ...] = ()
    """Patterns of the cells that go with the last layer."""
    selective: tuple[str, ...] = ()
    """Patterns of the operators that are recomputed selectively."""
    tied: tuple[str, ...] = ()
    """Patterns of the parameters that both the first and the last stage use. In a pipeline they are sent every
    step, and MindSpore cannot shard what it sends: optimizer parallel leaves them unsharded. A network one of
    whose Cells has `tied_embedding = False` has none."""
    operators: tuple[Rule, ...] = ()
    """Rules of operators; later ones win."""

    @property
    def keeps_sorted_rows(self) -> bool:
        """Whether each rank of expert parallelism runs `SORTED_ROWS` on rows of its own: all ranks together would not
        compute what the operators say."""
        last = (
            next((r for r in reversed(self.operators) if path_matches(r.pattern, name)), None) for name in SORTED_ROWS
        )
        return all(rule is not None and rule.keeps_experts for rule in last)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Distribution of one model over many devices."""

    mesh: Mesh = field(default_factory=Mesh)
    """Degrees of the mesh axes; their product is the number of processes."""
    rules: Rules = field(default_factory=Rules)
    """A rules file, relative to this one, or `{base: FILE, operators: {...}}` to add to one or several, or to stand alone."""
    pipeline: Pipeline = field(default_factory=Pipeline)
    """Microbatches and stages, when mesh.pp > 1."""
    recompute: Recompute | None = None
    """Layers to recompute; none without this key."""
    offload: Offload | None = None
    """State kept in the host's memory; none without this key."""
    optimizer_parallel: OptimizerParallel | None = None
    """Shard parameters and optimizer state over the replicas; off without this key."""
    sequence_parallel: bool = False
    """Shard the tokens over tp where a layer works on each token alone (the axis `sp` of the rules)."""
    context_parallel: Literal["gather", "ulysses"] = "gather"
    """Method by which attention reads full sequences, when mesh.cp > 1: `gather`, each rank has its shard of the queries and
    gathers all keys and values; `ulysses`, all-to-alls give each rank full sequences of some heads, and back."""
    micro_batch_interleave: Depth = 1
    """Interleaved microbatches: number of copies that each microbatch (without a pipeline: the batch) is split
    into, so that devices can compute one while another communicates; the arithmetic is the same. On devices it needs
    `engine: mindspore`, which orders their collectives where `mesh.pp` is 1."""
    engine: Partitioner | None = None
    """Partitioner of graphs. Default: `spmd`, everywhere: the graph of one device is compiled once for all ranks and sharded
    by this package (`sporeloom.partition`). `mindspore` is for runs of the model families on devices, with MindSpore 2.9 to
    2.11: its compiler shards the graph, once for every rank; CPU processes, dry runs and certificates refuse it. Neither has
    ever run on Ascend hardware."""
    source: str = field(default="<strategy>", compare=False, metadata={"hidden": True})
    """Name of the file, for messages."""
    lines: dict[str, int] = field(default_factory=dict, compare=False, repr=False, metadata={"hidden": True})
    """Line of each key, for messages."""

    @property
    def is_spmd(self) -> bool:
        """Whether the graph of one device is compiled, and sharded afterwards."""
        return self.engine != "mindspore" and self.mesh.size > 1

    @property
    def sorts_expert_rows(self) -> bool:
        """Whether experts without a capacity limit compute their own rows alone in training, where the device has products
        of groups. Not under MindSpore's partitioner, which shards by shapes; and with expert parallelism neither under
        context parallelism, as tokens would be gathered over both, nor by rules without layouts of sorted rows."""
        mesh = self.mesh
        shared = mesh.ep == 1 or (mesh.cp == 1 and self.rules.keeps_sorted_rows)
        return shared and (self.is_spmd or mesh.size == 1)

    def graph_problems(self) -> list[str]:
        """List why dry runs and certificates, which read this package's own graphs, cannot describe this strategy."""
        if self.engine == "mindspore":
            return [
                f"{self.at('engine')}: mindspore lets MindSpore partition, whose graphs are neither counted nor proved here; "
                "remove the line to describe and run this package's own"
            ]
        return self.device_problems()

    def device_problems(self) -> list[str]:
        """List what the engine does not support on devices. CPU processes compute the same without it."""
        if self.engine == "mindspore":
            return self.mindspore_problems()
        offload = self.offload
        lacking = [
            ("offload.layers", offload is not None and bool(offload.layers), "keeps all activations on the device"),
            ("micro_batch_interleave", self.micro_batch_interleave > 1, "runs each microbatch at once"),
        ]
        return [
            f"{self.at(key)}: engine spmd {what} on devices; remove it, or write `engine: mindspore`"
            for key, is_set, what in lacking
            if is_set
        ]

    def axis_problems(self, situation: str) -> list[str]:
        """List the axes that a situation refuses (`Axis.refuses`)."""
        return [
            f"{self.at(f'mesh.{axis.name}')}: {axis.refuses[situation]}; leave {axis.name} out"
            for axis in ROWS
            if situation in axis.refuses and self.mesh.degree(axis.name) > 1
        ]

    def by_mindspore(self) -> Strategy:
        """The same strategy, with graphs that MindSpore shards.

        Raises:
            ConfigError: it cannot.
        """
        if problems := self.mindspore_problems():
            raise ConfigError(problems)
        return replace(self, engine="mindspore")

    def mindspore_problems(self) -> list[str]:
        """List what MindSpore's own pipelines do not support."""
        pipeline, lacks = self.pipeline, ""
        if pipeline.listed or pipeline.schedule in ("zero_bubble_h1", "dualpipe_v"):
            lacks = f"no {'schedules from files' if pipeline.listed else pipeline.schedule}"
        elif pipeline.schedule == "gpipe" and pipeline.virtual_stages == 1:
            lacks = "no gpipe without virtual stages"
        if not lacks:
            return []
        other = ", or remove `engine: mindspore`" if self.engine == "mindspore" else ""
        return [
            f"{self.at('pipeline.schedule')}: MindSpore's own pipelines have {lacks}; use "
            f"{'zero_bubble_v' if pipeline.schedule == 'dualpipe_v' else '1f1b'}{other}"
        ]

    @property
    def optimizer_on_host(self) -> bool:
        """Whether AdamW's moments are kept in the host's memory."""
        return self.offload is not None and self.offload.optimizer

    @property
    def gathers_twice(self) -> bool:
        """Whether weights are resharded after the forward pass and gathered again for the backward pass."""
        return self.optimizer_parallel is not None and self.optimizer_parallel.reshard_after_forward

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are reduce-scattered in each microbatch, so that what is added up is sharded."""
        zero = self.optimizer_parallel
        return zero is not None and (zero.shard_accumulated_gradients or zero.reshard_after_forward)

    @property
    def num_virtual_stages(self) -> int:
        """Number of parts into which the pipeline splits the layers."""
        return self.mesh.pp * self.pipeline.virtual_stages

    def stage_of_part(self, part: int) -> int:
        """Stage that holds a part of the layers."""
        return stage_of_part(part, self.mesh.pp, self.pipeline.order)

    @property
    def stage_of_loss(self) -> int:
        """Stage that holds the last part of the model."""
        return self.stage_of_part(self.num_virtual_stages - 1)

    def num_microbatches(self, accumulate: int = 1) -> int:
        """Number of microbatches of a step: the pipeline's, or without one the gradient accumulation steps."""
        return self.pipeline.num_microbatches if self.mesh.pp > 1 else accumulate

    def num_parts(self, accumulate: int = 1) -> int:
        """Number of times that a step runs the network: once for each interleaved copy of each microbatch."""
        return self.num_microbatches(accumulate) * self.micro_batch_interleave

    def at(self, key: str) -> str:
        """`file:line: key`, for messages."""
        known = key
        while known and known not in self.lines:
            known = known.rpartition(".")[0]
        line = f":{self.lines.get(known, 1)}" if self.lines else ""  # a script has none
        return f"{self.source}{line}: {key}"


SINGLE_DEVICE = Strategy(source="one device")
