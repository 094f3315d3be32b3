# SPDX-License-Identifier: Apache-2.0
"""How one parameter or operator got its layout: which rule and line, which others it beat, what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore.nn.utils import no_init_parameters

from mindloom.errors import ConfigError, did_you_mean
from mindloom.family import family_module
from mindloom.model_config import DecoderConfig
from mindloom.parallel.parallelize import parallelize
from mindloom.parallel.report import ParameterReport
from mindloom.parallel.sharding import Use, operators, parameter_uses, path_matches
from mindloom.strategy.config import Rule, Strategy
from mindloom.strategy.layout import show


def explain(family: str, model: DecoderConfig, strategy: Strategy, name: str) -> str:
    """Where the layout of `name` comes from: a parameter's name or an operator's path, or the end of one.

    Raises:
        ConfigError: there is no such parameter or operator.
    """
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    found = operators(net)
    uses: dict[str, Use] = {}
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
    for parameter in parameters:
        lines += ["", *_parameter(parameter)]
        if found_use := uses.get(parameter.name):
            lines.append(f"  it is input {found_use.position} of {found_use.operator.path}")
            lines += _rules(strategy.rules.operators, found_use.operator.path, found_use.position)
    for operator in chosen:
        lines += ["", f"operator {operator.path}, {operator.primitive.name}"]
        lines += _rules(strategy.rules.operators, operator.path, None)
    return "\n".join(lines)


def _parameter(p: ParameterReport) -> list[str]:
    lines = [
        f"parameter {p.name}: {list(p.global_shape)} -> {list(p.local_shape)} on each rank of stage {p.stage}, "
        f"{p.num_parts} different parts"
    ]
    if not p.rule:
        lines.append("  no rule is for it: whole on every rank, unless MindSpore derives a cut (a dry run shows it)")
    elif p.optimizer_shards > 1:
        lines.append(f"  layout {show(p.layout)}, then optimizer parallel cuts dim 0 over {p.optimizer_shards} ranks")
    else:
        lines.append(f"  layout {show(p.layout)}")
    return lines


def _rules(rules: Sequence[Rule], path: str, position: int | None) -> list[str]:
    matching = [rule for rule in rules if path_matches(rule.pattern, path)]
    if not matching:
        return ["  no rule is for it: MindSpore derives its layout from the rules of the operators around it"]
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
