# SPDX-License-Identifier: Apache-2.0
"""Explain the layout of a parameter or operator: the rule that sets it, overridden rules, and collectives."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore.nn.utils import no_init_parameters

from sporeloom.core.errors import ConfigError, did_you_mean
from sporeloom.dry_run.partitioned import partition_model
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.models.paths import path_matches
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.report import ParameterReport
from sporeloom.parallel.rule_table import RuleTable
from sporeloom.partition.sharded_graph import item_size
from sporeloom.strategy.config import Rule, Strategy
from sporeloom.strategy.layout import show

MAX_NEARBY_RULES = 4
"""Maximum number of rules listed for an operator without a rule of its own."""


def explain(family: str, model: ModelConfig, strategy: Strategy, name: str) -> str:
    """Explain the layout of `name`: a parameter's name or an operator's path, or the end of one.

    Raises:
        ConfigError: there is no such parameter or operator, or the strategy's graphs cannot be described.
    """
    if problems := strategy.graph_problems():
        raise ConfigError(problems)
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    report = parallelize(net, strategy)
    rules, found = report.rules, report.rules.operators
    parameters = [p for p in report.parameters if path_matches(name, p.name)]
    chosen = [operator for operator in found if path_matches(name, operator.path)]
    if not parameters and not chosen:
        paths = [p.name for p in report.parameters] + [operator.path for operator in found]
        length = name.count(".") + 1
        ends = {".".join(path.split(".")[-length:]) for path in paths}
        raise ConfigError(f"explain {name}: no parameter or operator has such a name{did_you_mean(name, ends)}")
    lines = [f"{strategy.source}: {strategy.mesh}"]
    for parameter in parameters:
        lines += ["", *_parameter(parameter)]
        if not parameter.rule:
            lines += _nearby(parameter.name, rules)
        if parameter.name in rules.used_layouts:
            used, *_ = rules.used_layouts[parameter.name]
            lines.append(f"  it is input {used.position} of {used.operator.path}")
            lines += _rules(rules.written_rules(used.operator.path), used.position)
    graph = _TrainingGraph(family, model, strategy) if chosen and strategy.mesh.size > 1 else None
    for operator in chosen:
        lines += ["", f"operator {operator.path}, {operator.primitive.name}"]
        lines += graph.layouts_and_collectives(operator.path) if graph else []
        lines += _rules(rules.written_rules(operator.path), None) or [
            "  no rule is for it: its layout follows from those of its inputs",
            *_nearby(operator.path, rules),
        ]
    return "\n".join(lines)


class _TrainingGraph:
    """The partitioned graph of a training step: layouts of its values, and the collectives for them."""

    def __init__(self, family: str, model: ModelConfig, strategy: Strategy):
        batch = strategy.mesh.dp * strategy.num_microbatches(), model.seq_len
        self.sharded = partition_model(family, model, strategy, batch).cut.sharded
        self.makers = {name: node for node in self.sharded.result.graph.nodes for name in node.outputs}

    def layouts_and_collectives(self, path: str) -> list[str]:
        """Format the layouts of an operator's inputs and outputs, and the collectives of the operator and its gradient."""
        result, layouts = self.sharded.result, self.sharded.result.layouts
        nodes = [node for node in self.sharded.source.nodes if f".{node.path}".endswith(f".{path}") and node.path]
        lines = []
        for node in nodes[:1]:
            inputs = [str(layouts[name]) for name in node.flat_inputs() if name in layouts]
            outputs = [str(layouts[name]) for name in node.outputs if name in layouts]
            lines.append(f"  values: {', '.join(inputs)} -> {', '.join(outputs)}")
            of_gradient = {n.outputs[0] for n in self.sharded.source.nodes if n.forward == node.outputs[0]}
            for each in result.communications:
                maker = self.makers.get(each.value)
                is_forward = each.consumer == node.path
                if is_forward or each.consumer in of_gradient or (maker and maker.forward == node.outputs[0]):
                    phase, sent = "forward" if is_forward else "backward", each.elements * item_size(each.dtype)
                    lines.append(
                        f"  {phase}: {each.kind} over {'*'.join(each.axes)}, a rank sends {sent:,} bytes a microbatch"
                    )
        return lines


def _nearby(path: str, rules: RuleTable) -> list[str]:
    """List the rules that determine the layout of `path` indirectly: those of the operators in the nearest Cell that has
    any."""
    while path:
        path = path.rpartition(".")[0]
        near = [(name, rule) for name, rule in rules.owners.items() if name.startswith(f"{path}." if path else "")]
        if near:
            return [f"  nearby rule {rule.source}: {rule.pattern}, of {name}" for name, rule in near[:MAX_NEARBY_RULES]]
    return []


def _parameter(p: ParameterReport) -> list[str]:
    lines = [
        f"parameter {p.name}: {list(p.global_shape)} -> {list(p.local_shape)} on each rank of stage {p.stage}, "
        f"{p.num_parts} different shards"
    ]
    optimizer = f"optimizer parallel shards dim 0 over {p.optimizer_shards} ranks"
    if p.rule:
        lines.append(f"  layout {show(p.layout)}" + (f", then {optimizer}" if p.optimizer_shards > 1 else ""))
    elif p.optimizer_shards > 1:
        lines.append(f"  no rule is for it; {optimizer}")
    else:
        lines.append("  no rule is for it, and nothing shards it: replicated on every rank")
    return lines


def _rules(matching: Sequence[Rule], position: int | None) -> list[str]:
    """List the matching rules, the effective one first. `position`: of one input, or None for all."""
    lines = []
    for rule in reversed(matching):
        layouts = rule.inputs if position is None else rule.inputs[position : position + 1]
        text = ", ".join(show(layout) for layout in layouts) or "nothing"
        if rule.outputs and position is None:
            text += " -> " + ", ".join(show(layout) for layout in rule.outputs)
        effect = "rule" if rule is matching[-1] else "overridden by a later rule:"
        lines.append(f"  {effect} {rule.source}: {rule.pattern}: {text}")
    return lines
