# SPDX-License-Identifier: Apache-2.0
"""Replace parts and parameters of a network."""

from collections.abc import Callable

from mindspore import Parameter, nn

from sporeloom.mindspore_compat.names import own_parameters


def replace_cell(net: nn.Cell, path: str, part: nn.Cell) -> None:
    """Put `part` where `path` is; its parameters are named after that, in a network that is itself part of another, too."""
    known, first = next(iter(net.parameters_and_names()))
    prefix = first.name.removesuffix(known)
    parent_path, _, name = path.rpartition(".")
    parent = net
    for component in filter(None, parent_path.split(".")):
        parent = getattr(parent, component) if not component.isdigit() else parent[int(component)]
    setattr(parent, name, part)
    for parameter_name, parameter in own_parameters(part).items():  # the Cell it was set on names it after itself only
        parameter.name = f"{prefix}{path}.{parameter_name}"


def share_parameters(
    net: nn.Cell, source: nn.Cell, chosen: Callable[[Parameter], bool] = lambda parameter: True
) -> None:
    """Let `net` compute with chosen parameters of `source`, a network with the same parts, in place of its own."""
    parts = dict(source.cells_and_names())
    for path, cell in net.cells_and_names():
        theirs = own_parameters(parts[path]) if path in parts else {}
        for name, parameter in theirs.items():
            if chosen(parameter):
                own_parameters(cell)[name] = parameter
