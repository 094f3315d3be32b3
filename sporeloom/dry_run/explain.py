# SPDX-License-Identifier: Apache-2.0
"""How one parameter or operator got its layout: which rule and line, which others it beat, what each rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mindspore.nn.utils import no_init_parameters

from sporeloom.dry_run.config import DryRun, DryRunConfig
from sporeloom.dry_run.partitioned import partition_model
from sporeloom.dry_run.pool import compile_ranks
from sporeloom.errors import ConfigError, did_you_mean
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.models.paths import path_matches
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.report import DERIVED, ParameterReport
from sporeloom.parallel.sharding import Operator, ParameterUse, operators, parameter_uses
from sporeloom.partition.held import item_size
from sporeloom.planner.task import PLAIN_TEXT
from sporeloom.strategy.config import Rule, Strategy
from sporeloom.strategy.layout import show

SHOWN = 4
"""Rules told of those that a layout is derived from."""


def explain(family: str, model: ModelConfig, strategy: Strategy, name: str) -> str:
    """Where the layout of `name` comes from: a parameter's name or an operator's path, or the end of one.

    Raises:
        ConfigError: there is no such parameter or operator, or the strategy's engine tells nothing of it.
    """
    strategy = strategy.for_devices()
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    found = operators(net)
    uses: dict[str, ParameterUse] = {}
    for use in parameter_uses(found):
        if any(path_matches(rule.pattern, use.operator.path) for rule in strategy.rules.operators):
            uses.setdefault(use.parameter.name, use)
    report = parallelize(net, strategy)
    parameters = [p for p in report.parameters if path_matches(name, p.name)]
    chosen = [operator for operator in found if path_matches(name, operator.path)]
    if not parameters and not chosen:
        paths = [p.name for p in report.parameters] + [operator.path for operator in found]
        length = name.count(".") + 1
        ends = {".".join(path.split(".")[-length:]) for path in paths}
        raise ConfigError(f"explain {name}: no parameter or operator ends so{did_you_mean(name, ends)}")
    lines = [f"{strategy.source}: {strategy.mesh}"]
    parameters = _with_derived(parameters, family, model, strategy)
    for parameter in parameters:
        lines += ["", *_parameter(parameter)]
        if parameter.rule in ("", DERIVED):
            lines += _around(parameter.name, found, strategy.rules.operators)
        if found_use := uses.get(parameter.name):
            lines.append(f"  it is input {found_use.position} of {found_use.operator.path}")
            lines += _rules(strategy.rules.operators, found_use.operator.path, found_use.position)
    graph = _Values(family, model, strategy) if chosen and strategy.engine == "spmd" else None
    for operator in chosen:
        lines += [
            "",
            f"operator {operator.path}, {operator.primitive.name}",
            *(graph.lines(operator.path) if graph else []),
        ]
        lines += _rules(strategy.rules.operators, operator.path, None) or [
            "  no rule is for it: its layout follows from those of its inputs",
            *_around(operator.path, found, strategy.rules.operators),
        ]
    return "\n".join(lines)


class _Values:
    """Layouts of the values in a training step's graph, as `engine: spmd` partitions it, and the collectives for them."""

    def __init__(self, family: str, model: ModelConfig, strategy: Strategy):
        batch = strategy.mesh.dp * strategy.num_microbatches(), model.seq_len
        self.sharded = partition_model(family, model, strategy, batch).cut.sharded
        self.makers = {name: node for node in self.sharded.result.graph.nodes for name in node.outputs}

    def lines(self, path: str) -> list[str]:
        """The layouts of an operator's inputs and outputs, and the collectives of it and of its gradient."""
        result, layouts = self.sharded.result, self.sharded.result.layouts
        nodes = [node for node in self.sharded.source.nodes if f".{node.path}".endswith(f".{path}") and node.path]
        lines = []
        for node in nodes[:1]:
            given = [str(layouts[name]) for name in node.flat_inputs() if name in layouts]
            outputs = [str(layouts[name]) for name in node.outputs if name in layouts]
            lines.append(f"  values: {', '.join(given)} -> {', '.join(outputs)}")
            of_gradient = {n.outputs[0] for n in self.sharded.source.nodes if n.forward == node.outputs[0]}
            for each in result.communications:
                maker = self.makers.get(each.value)
                is_forward = each.consumer == node.path
                if is_forward or each.consumer in of_gradient or (maker and maker.forward == node.outputs[0]):
                    what, sent = "forward" if is_forward else "backward", each.elements * item_size(each.dtype)
                    lines.append(
                        f"  {what}: {each.kind} over {'*'.join(each.axes)}, a rank sends {sent:,} bytes a microbatch"
                    )
        return lines


def _with_derived(
    parameters: Sequence[ParameterReport], family: str, model: ModelConfig, strategy: Strategy
) -> list[ParameterReport]:
    """With the layouts that MindSpore derives where no rule is: what the stage of each compiles to, from small depths."""
    derives = strategy.engine != "spmd" and strategy.mesh.stage_size > 1
    stages = sorted({p.stage for p in parameters if not p.rule}) if derives else []
    ranks = [strategy.mesh.ranks_of_stage(stage).start for stage in stages]
    if not ranks:
        return list(parameters)
    config = DryRunConfig(model=family, strategy=Path(strategy.source), fast=True)
    batch = strategy.mesh.dp * strategy.num_parts()
    compiled = compile_ranks(DryRun(config, model, strategy, ranks, batch, model.seq_len, PLAIN_TEXT))
    held = {(report.stage, p.name): p for report in compiled for p in report.parameters}
    result = []
    for p in parameters:
        if (known := held.get((p.stage, p.name))) and not p.rule:
            shape, layout = tuple(known.local_shape), tuple(map(tuple, known.layout))
            shards = known.optimizer_shards
            p = dataclasses.replace(p, local_shape=shape, layout=layout, optimizer_shards=shards, rule=known.rule)
        result.append(p)
    return result


def _around(path: str, found: Sequence[Operator], rules: Sequence[Rule]) -> list[str]:
    """The rules from which the layout of `path` follows: those of the operators in the nearest cell that has any."""
    while path:
        path = path.rpartition(".")[0]
        near = [o for o in found if o.path.startswith(f"{path}." if path else "")]
        ruled = [(o.path, rule) for o in near for rule in rules if path_matches(rule.pattern, o.path)]
        if ruled:
            last = dict(ruled)  # the last rule of each operator
            return [f"  from {rule.source}: {rule.pattern}, of {name}" for name, rule in list(last.items())[:SHOWN]]
    return []


def _parameter(p: ParameterReport) -> list[str]:
    lines = [
        f"parameter {p.name}: {list(p.global_shape)} -> {list(p.local_shape)} on each rank of stage {p.stage}, "
        f"{p.num_parts} different parts"
    ]
    if not p.rule:
        lines.append("  no rule is for it, and nothing shards it: whole on every rank")
    elif p.rule == DERIVED:
        lines.append(f"  no rule is for it: MindSpore derived {show(p.layout)}")
    elif p.optimizer_shards > 1:
        lines.append(f"  layout {show(p.layout)}, then optimizer parallel shards dim 0 over {p.optimizer_shards} ranks")
    else:
        lines.append(f"  layout {show(p.layout)}")
    return lines


def _rules(rules: Sequence[Rule], path: str, position: int | None) -> list[str]:
    matching = [rule for rule in rules if path_matches(rule.pattern, path)]
    lines = []
    for rule in reversed(matching):
        layouts = rule.inputs if position is None else rule.inputs[position : position + 1]
        said = ", ".join(show(layout) for layout in layouts) or "nothing"
        if rule.outputs and position is None:
            said += " -> " + ", ".join(show(layout) for layout in rule.outputs)
        lines.append(
            f"  {'rule' if rule is matching[-1] else 'beaten, as an earlier one:'} {rule.source}: {rule.pattern}: {said}"
        )
    return lines
