# SPDX-License-Identifier: Apache-2.0
"""Apply a Strategy to any Cell, in a fixed order: shard, recompute, stages. Returns a Report of what was done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import mindspore as ms
from mindspore import nn

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import NO_PARTITIONER, GradAccumulation, MicroBatchInterleaved, numpy_type
from sporeloom.models.cells import ExpertCell, FlashCell, GroupedProductCell, HeadCopier, TyingCell
from sporeloom.models.paths import path_matches
from sporeloom.parallel.layers import forward_layers, layers_of, matching_cells
from sporeloom.parallel.operators import Operator, operators, parameter_uses
from sporeloom.parallel.report import ParameterReport, Report
from sporeloom.parallel.rule_table import RuleTable, match_rules
from sporeloom.parallel.sharding import (
    LARGE_OPERATORS,
    UNKNOWN_OPERATORS,
    is_functional,
    parts_of_heads,
    shard_as_told,
    with_parts_of_axes,
)
from sporeloom.strategy.axes import BY_NAME
from sporeloom.strategy.checks import spans_tensor_parallel
from sporeloom.strategy.config import SORTED_ROWS, Rule, Strategy
from sporeloom.strategy.layout import Layout, LayoutError, Shape, degrees, local_shape
from sporeloom.strategy.mesh import Mesh, part_of_axis
from sporeloom.strategy.stages import (
    in_proportion,
    layers_of_stages,
    offloaded_layers,
    part_of_layers,
    recomputed_layers,
)


def parallelize(net: nn.Cell, strategy: Strategy, whole: bool = True) -> Report:
    """Change `net`, a training or inference network written for one device, to run as `strategy` says.

    `whole=False`: `net` is a part of what the rules are for (a model without its loss), so some may match nothing.

    Optimizer parallel and the number of stages are MindSpore settings of the whole process: `runtime` makes them.

    Raises:
        ConfigError: a rule that matches nothing, a parameter that cannot be sharded, stages for which there are no layers,
            experts over ranks of tp by MindSpore, or no partitioner in this MindSpore where it should shard.
    """
    if NO_PARTITIONER and strategy.mesh.size > 1 and not shards_itself(strategy):
        raise ConfigError(f"{strategy.at('engine')}: {NO_PARTITIONER}")
    if strategy.mesh.ep > strategy.mesh.dp and not shards_itself(strategy):
        raise ConfigError(spans_tensor_parallel(strategy))
    kv_parts, group_parts = parts_of_heads(net, strategy.mesh)
    resolved = with_parts_of_axes(strategy.rules.operators, kv_parts, group_parts, strategy.mesh)
    found = operators(net)
    rules = match_rules(found, parameter_uses(found), strategy.rules.operators, resolved)
    for _, cell in net.cells_and_names():
        if isinstance(cell, HeadCopier):
            cell.repeats_heads = bool(group_parts)
        if isinstance(cell, FlashCell):
            cell.flash_on_cpu = shards_itself(strategy)
        if isinstance(cell, GroupedProductCell):
            cell.operator_on_cpu = shards_itself(strategy)
        if isinstance(cell, ExpertCell):
            cell.sorts_rows = strategy.sorts_expert_rows
    wants_layers = strategy.rules.layers or strategy.mesh.pp > 1 or strategy.recompute or strategy.offload
    layers = layers_of(net, strategy.rules.layers) if wants_layers else []
    _check(net, strategy, rules, layers, whole)
    _split_experts(net, strategy, rules)
    if not shards_itself(strategy):
        for operator in rules.operators:
            if rule := rules.rule(operator.path):
                shard_as_told(operator.primitive, rule, strategy.mesh)
    recomputed = _recompute_and_offload(net, strategy, rules.operators, layers)
    parts = _parts_of_cells(net, strategy, layers)
    stages = {path: strategy.stage_of_part(part) for path, part in parts.items()}
    if not shards_itself(strategy):
        _assign_stages(net, strategy, parts)
    tied = _exclude_from_optimizer_parallel(net, strategy)
    net.parallel_report = Report(  # the engine checks it against the compiler
        mesh=strategy.mesh,
        parameters=_parameter_reports(net, strategy, rules, stages),
        unmatched_rules=[f"{rule.source}: {rule.pattern}" for rule in rules.unused()],
        optimizer_parallel=strategy.optimizer_parallel is not None,
        layers_of_stages=_layers_of_stages(layers, strategy),
        stage_of_loss=strategy.stage_of_loss,
        recomputed=recomputed,
        tied=tied,
        parts=parts,
        reshards=strategy.gathers_twice,
        is_spmd=shards_itself(strategy),
        rules=rules,
        functional=[rule for rule in resolved if is_functional(rule.pattern)] if shards_itself(strategy) else [],
    )
    return net.parallel_report


def _split_experts(net: nn.Cell, strategy: Strategy, rules: RuleTable) -> None:
    """Let each rank of expert parallelism sort the rows of its experts.

    Raises:
        ConfigError: a rule of one layer lets all ranks together sort them.
    """
    problems = []
    for path, cell in net.cells_and_names():
        if isinstance(cell, ExpertCell) and cell.sorts_rows and strategy.mesh.ep > 1:
            for name in SORTED_ROWS:
                rule = rules.rule(f"{path}.{name}" if path else name)
                if rule is None or not rule.local:
                    found = f"{rule.source}: {rule.pattern}" if rule else f"{path}.{name} has no rule"
                    problems.append(f"{found}: each rank sorts the rows of its experts; write `local: true`")
            cell.split_experts(strategy.mesh.ep)
    if problems:
        raise ConfigError(problems)


def _recompute_and_offload(
    net: nn.Cell, strategy: Strategy, found: Sequence[Operator], layers: Sequence[str]
) -> list[str]:
    """Mark the layers that are recomputed or offloaded. Returns the former."""
    recomputed = [layers[i] for i in recomputed_layers(len(layers), strategy)]
    cells = dict(net.cells_and_names())
    if strategy.recompute and strategy.recompute.kind == "selective":
        _recompute_operators(strategy, found, recomputed)
    else:
        for path in recomputed:
            cells[path].recompute()
    for number in offloaded_layers(len(layers), strategy):
        cells[layers[number]].offload()
    return recomputed


def _exclude_from_optimizer_parallel(net: nn.Cell, strategy: Strategy) -> list[str]:
    """Keep scalars, which crash MindSpore when it shards them, and tied parameters whole. Returns the names of the latter,
    which MindSpore's pipelines send from stage to stage."""
    models = [cell for _, cell in net.cells_and_names() if isinstance(cell, TyingCell)]
    ties, tied = all(model.tied_embedding for model in models), list[str]()
    for parameter in net.get_parameters():
        is_tied = ties and any(path_matches(pattern, parameter.name) for pattern in strategy.rules.tied)
        is_sent = is_tied and strategy.stage_of_loss > 0 and not shards_itself(strategy)
        tied += [parameter.name] if is_sent else []
        if is_sent or not parameter.shape:
            parameter.parallel_optimizer = False
    return tied


def shards_itself(strategy: Strategy) -> bool:
    """Whether graphs are compiled for one device and sharded by `sporeloom.partition`."""
    return strategy.is_spmd


def _recompute_operators(strategy: Strategy, found: Sequence[Operator], layers: Sequence[str]) -> None:
    """Operators of these layers that the rules list under `selective`.

    Raises:
        ConfigError: the rules call none so.
    """
    chosen = [
        operator
        for operator in found
        if any(path_matches(pattern, operator.path) for pattern in strategy.rules.selective)
        and any(operator.path.startswith(layer + ".") for layer in layers)
    ]
    if layers and not chosen:
        raise ConfigError(
            f"{strategy.at('recompute.kind')}: no operator matches `selective` of the rules; list some there, or use full"
        )
    for operator in chosen:
        operator.primitive.recompute()


def wrap(net: nn.Cell, strategy: Strategy, accumulate: int = 1) -> nn.Cell:
    """Build the inner part of a training step: the batch is split into microbatches first, in a pipeline or to
    save memory, and these into interleaved microbatches that devices work on in turn.

    Our own models are compiled once for all microbatches, in two thirds of the time; a user's network as it stands.
    """
    if shards_itself(strategy):
        return net  # microbatches are a step's own business there, and interleaving is for devices
    repeats = strategy.mesh.size > 1 and strategy.num_microbatches(accumulate) > 1
    if repeats:
        keep_as_function(net)
    if strategy.micro_batch_interleave > 1:
        net = MicroBatchInterleaved(net, strategy.micro_batch_interleave)
        if strategy.mesh.pp > 1:  # MindSpore 2.9 would order their collectives in a circle
            for cut in net.interleave_inputs:
                cut.strided_slice.del_prim_attr("interleave_num")
    # MindSpore's virtual stages and offloading of layers need forward and backward as functions.
    if strategy.pipeline.virtual_stages > 1 or (strategy.offload and strategy.offload.layers):
        keep_as_function(net)
    if strategy.mesh.pp > 1:
        return nn.PipelineCell(net, strategy.pipeline.num_microbatches)
    return GradAccumulation(net, accumulate) if accumulate > 1 and strategy.mesh.size > 1 else net


def keep_as_function(net: nn.Cell) -> None:
    """Let MindSpore compile a Cell once, however often it is called, as its decorator `lazy_inline` does for a
    class."""
    net.cell_init_args = f"lazy_inline_{type(net).__name__}"


def _check(net: nn.Cell, strategy: Strategy, rules: RuleTable, layers: Sequence[str], whole: bool) -> None:
    problems = [
        *_rule_problems(net, strategy, rules, whole),
        *([] if shards_itself(strategy) else _operator_problems(strategy, rules)),
        *([] if shards_itself(strategy) else _lookup_problems(rules, strategy.mesh)),
        *_mesh_problems(strategy, rules.rules, layers),
    ]
    if problems:
        raise ConfigError(problems)


def _rule_problems(net: nn.Cell, strategy: Strategy, rules: RuleTable, whole: bool) -> list[str]:
    """Check the rules against the network: list those that match nothing, or shard a parameter that cannot be
    sharded so."""
    problems = [
        f"{rule.source}: {pattern} matches no operator of {type(net).__name__}; correct the path, "
        "or write it with a trailing ? if it is for other models"
        for rule, pattern in rules.incomplete()
        if whole and not (is_functional(pattern) and shards_itself(strategy))
    ]
    for use in rules.uses:
        for position in rules.matches.get(use.operator.path, ()):
            rule = rules.rules[position]
            if (layout := use.layout(rule)) is None:
                continue
            try:
                local_shape(layout, tuple(use.parameter.shape), strategy.mesh)
            except LayoutError as error:
                problems.append(f"{rule.source}: {use.parameter.name}: {error}")
    return problems


def _operator_problems(strategy: Strategy, rules: RuleTable) -> list[str]:
    """List operators that MindSpore cannot partition without a rule."""
    mesh, problems = strategy.mesh, list[str]()
    if not mesh.derives_layouts:
        problems += [
            f"{strategy.at('mesh')}: {mesh}: MindSpore derives layouts on stages of 2^n ranks only, and no rule "
            f"is for {o.path}; remove `engine: mindspore`, or write one"
            for o in rules.operators
            if o.primitive.name in LARGE_OPERATORS and o.path not in rules.matches
        ][:3]
    problems += [
        f"{strategy.at('rules')}: MindSpore cannot partition {o.path}, a {o.primitive.name}, and no rule lets "
        "each rank compute its shard: write one with `local: true`, or for the model families with experts use "
        "rules/experts.yaml"
        for o in rules.operators
        if mesh.size > mesh.pp
        and o.primitive.name in UNKNOWN_OPERATORS
        and not any(rule.local for rule in rules.written_rules(o.path))
    ][:1]
    return problems


def _mesh_problems(strategy: Strategy, rules: Sequence[Rule], layers: Sequence[str]) -> list[str]:
    """Check for axes that no rule uses, and the stages against the layers."""
    mesh = strategy.mesh
    cut = {part_of_axis(axis)[0] for rule in rules for layout in rule.inputs for dim in layout for axis in dim}
    problems = [
        f"{strategy.at('mesh.' + axis)} = {mesh.degree(axis)}, but no rule shards anything over {axis}: all its ranks would "
        "do the same; write a rule for it, or leave it out"
        for axis in mesh.sharding_axes
        if BY_NAME[axis].needs_rules and axis not in cut
    ]
    if mesh.pp > 1 and not layers:
        problems.append(
            f"{strategy.at('rules')}: no cell matches `layers`, so there are no layers to assign to {mesh.pp} stages"
        )
    elif strategy.num_virtual_stages > len(layers) > 0:
        virtual = strategy.pipeline.virtual_stages
        parts = f"{mesh.pp} stages{f' x {virtual} virtual ones' if virtual > 1 else ''}"
        problems.append(f"{strategy.at('mesh.pp')} = {parts} are more than the {len(layers)} layers")
    if strategy.recompute and not layers:
        problems.append(f"{strategy.at('recompute')}: no cell matches `layers` of the rules")
    return problems


def _lookup_problems(rules: RuleTable, mesh: Mesh) -> Iterator[str]:
    """List embedding tables with sharded rows and sharded indices whose axes together do not cover the mesh, which
    MindSpore needs."""
    for use in rules.uses:
        rule = rules.rule(use.operator.path)
        if use.operator.primitive.name != "Gather" or use.position != 0 or rule is None or rule.local:
            continue
        rows = rule.inputs[0][0] if rule.inputs and rule.inputs[0] else ()
        of_indices = {axis for layout in rule.inputs[1:] for dim in layout for axis in dim if mesh.degree(axis) > 1}
        missing = [axis for axis in mesh.sharding_axes if axis not in {*rows, *of_indices}]
        if missing and of_indices and any(mesh.degree(axis) > 1 for axis in rows):
            cut, together = ", ".join(rows), f"dp, {missing[0]}"
            indices = f"[{together}]" if len(rule.inputs[1]) > 1 else f"[[{together}]]"
            yield (
                f"{rule.source}: {rule.pattern}: the rows of {use.parameter.name} are sharded over {cut}, so the indices "
                f"must be sharded over {', '.join(missing)}, too: [[{cut}, ~], {indices}], or not at all"
            )


def _parts_of_cells(net: nn.Cell, strategy: Strategy, layers: Sequence[str]) -> dict[str, int]:
    """Path of each Cell that the rules name -> the part of the model that contains it; empty without a pipeline."""
    if strategy.mesh.pp == 1:
        return {}
    parts = dict(zip(layers, part_of_layers(len(layers), strategy), strict=True))
    for aside in forward_layers(net, strategy.rules.layers):
        parts |= zip(aside, part_of_layers(len(aside), in_proportion(strategy)), strict=True)
    every = tuple(f"{layer}." for layer in parts)
    for patterns, part in (
        (strategy.rules.first_stage, 0),
        (strategy.rules.last_stage, strategy.num_virtual_stages - 1),
    ):
        found = matching_cells(net, patterns)  # `norm` is the end of layers.0.norm, too, which goes with its layer
        parts |= {path: part for path in found if not path.startswith(every)}
    return parts


def _assign_stages(net: nn.Cell, strategy: Strategy, parts: Mapping[str, int]) -> None:
    """Set the pipeline stage, and virtual stage, of each Cell in MindSpore."""
    for path, cell in net.cells_and_names():
        if path in parts:
            cell.pipeline_stage = strategy.stage_of_part(parts[path])
            if strategy.pipeline.virtual_stages > 1:
                cell.pipeline_segment = parts[path] // strategy.mesh.pp


def _layers_of_stages(layers: Sequence[str], strategy: Strategy) -> list[list[str]]:
    if not layers:
        return []
    return [[layers[number] for number in stage] for stage in layers_of_stages(len(layers), strategy)]


def _parameter_reports(
    net: nn.Cell, strategy: Strategy, rules: RuleTable, stages: dict[str, int]
) -> list[ParameterReport]:
    reports = []
    for parameter in net.get_parameters():
        whole: Shape = tuple(parameter.shape)
        used = rules.used_layouts.get(parameter.name)
        layout, rule_source = (used[1], used[2].source) if used else (((),) * len(whole), "")
        part = local_shape(layout, whole, strategy.mesh)
        shards = _optimizer_shards(parameter, layout, part, strategy)
        if shards > 1:
            part = (part[0] // shards, *part[1:])
        holders = [path for path in stages if parameter.name.startswith(path + ".")]
        stage = stages[max(holders, key=len)] if holders else 0
        reports.append(ParameterReport(parameter.name, whole, part, layout, shards, stage, rule_source))
    return reports


def _optimizer_shards(parameter: ms.Parameter, layout: Layout, part: Shape, strategy: Strategy) -> int:
    """Number of ranks over which MindSpore's optimizer parallel shards dim 0 further: all that hold the same
    shard."""
    zero, mesh = strategy.optimizer_parallel, strategy.mesh
    if zero is None or not part or not parameter.parallel_optimizer:
        return 1
    cut = 1
    for parts in degrees(layout, mesh):
        cut *= parts
    replicas = zero.shard_size or mesh.stage_size // cut
    size = numpy_type(parameter.dtype)().itemsize
    for length in part:
        size *= length
    return replicas if part[0] % replicas == 0 and size >= zero.threshold_kb * 1024 else 1
