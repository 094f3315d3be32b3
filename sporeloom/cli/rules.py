# SPDX-License-Identifier: Apache-2.0
"""List the operators of a custom network that the rules of a strategy can name.

    sporeloom rules net.py
    sporeloom rules net.py:Net --inputs 8x32:float32 8x10:float32

An operator that is an attribute of a Cell has a path, by which a rule finds it. Others (ops.matmul(x, w), x + y) are named
by their Cell and kind, which --inputs shows. A rule is worth writing for products with large weights and for large tables;
all else follows from these.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from sporeloom.core.command_line import argument, option, parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.core.lines import first_line
from sporeloom.runtime.environment import prepare_environment

INPUT = re.compile(r"(\d+(?:x\d+)*|scalar):(\w+)")


@dataclass(frozen=True, kw_only=True)
class RulesConfig:
    network: str = argument(
        "FILE or FILE:NAME: a Cell, or a class or function at the top of a Python file that returns one when "
        "called without arguments; without NAME, the only one in the file. The file is run"
    )
    inputs: tuple[str, ...] = option(
        (),
        "shape and element type of each input, as in 8x32:float32; the network is compiled, and all shapes are "
        "shown (default: no shapes)",
    )


def main(argv: Sequence[str]) -> int:
    config = parse_args(RulesConfig, __doc__, argv)
    inputs = [described_input(text) for text in config.inputs]
    prepare_environment()
    import_module("mindspore").set_device("CPU")
    net = network_of(config.network)
    addressable = import_module("sporeloom.parallel.addressable")  # loads MindSpore
    shapes, functional = _shapes(net, inputs) if inputs else (None, {})
    print(addressable.table_of_operators(net, shapes))
    if functional:
        print("\nOperators that are not attributes of a Cell; a rule for one leaves its weight replicated:")
        for path, (kind, (given, made)) in functional.items():
            print(f"{path}  {kind}  {', '.join(map(str, given))} -> {', '.join(map(str, made))}")
    return 0


def described_input(text: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    found = INPUT.fullmatch(text)
    try:
        if found:
            sizes = () if found[1] == "scalar" else tuple(map(int, found[1].split("x")))
            return sizes, np.dtype(found[2])
    except TypeError:
        pass
    raise ConfigError(f"--inputs {text}: write shape:type, as in 8x32:float32 or scalar:int32")


def network_of(text: str) -> Any:
    """Create the Cell that a file defines.

    Raises:
        ConfigError: there is none, or several, or the file cannot be run.
    """
    _, _, value = defined(text)
    return made(text, value)


def made(text: str, value: Any) -> Any:
    """Create the Cell that a class or function makes, or take a Cell as it is.

    Args:
        text: names it in messages.

    Raises:
        ConfigError: it cannot be called without arguments, or makes no Cell.
    """
    nn = import_module("mindspore").nn
    try:
        net = value() if callable(value) and not isinstance(value, nn.Cell) else value
    except Exception as error:
        raise ConfigError(f"{text}: {type(error).__name__}: {first_line(error)}") from None
    if not isinstance(net, nn.Cell):
        raise ConfigError(f"{text}: is not a Cell and returns none")
    return net


def defined(text: str) -> tuple[Path, str, Any]:
    """Run a file, and find what FILE:NAME names, or the only Cell in FILE: its path, name and value.

    Raises:
        ConfigError: there is none, or several, or the file cannot be run.
    """
    nn = import_module("mindspore").nn
    file, _, name = text.partition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    sys.argv = [file]  # a script may look at its arguments
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{text}: {type(error).__name__}: {first_line(error)}") from None
    own = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, nn.Cell)
        or (inspect.isclass(value) and issubclass(value, nn.Cell) and value.__module__ == path.stem)
    }
    if name and not hasattr(module, name):
        raise ConfigError(f"{file}: has no {name}; it has {', '.join(own) or 'no Cell'}")
    if not name and len(own) != 1:
        raise ConfigError(f"{file}: has {', '.join(own) or 'no Cell'}; name one, as in {file}:{next(iter(own), 'Net')}")
    name = name or next(iter(own))
    return path, name, getattr(module, name)


def _shapes(net: Any, inputs: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """List shapes by path, and kind and shapes of the operators that are not attributes of a Cell.

    Raises:
        ConfigError: MindSpore cannot compile the network for these inputs.
    """
    compiler, mindir = import_module("sporeloom.runtime.spmd.compile"), import_module("sporeloom.partition.mindir")
    import_module("mindspore").set_context(mode=0)  # graphs
    graph = mindir.read_graph(compiler.compile_for_one_device(net.set_train(False), inputs))
    types = {**graph.parameters, **graph.inputs}
    for node in graph.nodes:
        types |= zip(node.outputs, node.types, strict=True)
    shapes: dict[str, Any] = {}
    functional, paths = {}, import_module("sporeloom.partition.paths").functional_paths(graph)
    path_of = {output: path for path, output in paths.items()}
    for node in graph.nodes:
        given = [types[name].shape for name in node.flat_inputs() if types.get(name) is not None]
        made = [type.shape for type in node.types if type is not None]
        if node.path:
            shapes.setdefault(node.path, (given, made))
        elif node.outputs and node.outputs[0] in path_of:
            functional[path_of[node.outputs[0]]] = node.kind, (given, made)
    return shapes, functional
