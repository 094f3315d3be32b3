# SPDX-License-Identifier: Apache-2.0
"""Searches for custom networks, in processes of a farm."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import yaml
from mindspore import nn, ops
from tuned import CLUSTER

from sporeloom.cli.tune import main
from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.compile import cost_of
from sporeloom.dry_run.partitioned import partition_custom
from sporeloom.planner.cluster import read_cluster
from sporeloom.strategy.loader import strategy_of
from sporeloom.strategy_search import networks
from sporeloom.strategy_search.networks import Network, fastest


class Block(nn.Cell):
    def __init__(self, width):
        super().__init__()
        self.up, self.act, self.down = nn.Dense(width, 4 * width), nn.ReLU(), nn.Dense(4 * width, width)

    def construct(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Cell):
    """Rows -> loss."""

    def __init__(self, width=16, num_blocks=2):
        super().__init__()
        self.blocks = nn.CellList([Block(width) for _ in range(num_blocks)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return ops.square(x).mean()


def _cluster(folder, **changes):
    path = Path(folder) / "cluster.json"
    path.write_text(json.dumps({**CLUSTER, **changes}))
    return path


def _network(rows, width):
    return Network(lambda: Net(width), [((rows, width), np.float32)])


def best(folder, rows, width, changes):
    """The fastest strategy of 2 devices: its mesh, whether it shards weights and recomputes; or why there is none."""
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        found, _, number = fastest(_network(rows, width), 2, read_cluster(_cluster(folder, **changes)))
    except ConfigError as error:
        return error.problems[0]
    strategy = found.strategy
    return strategy.mesh.degrees, strategy.optimizer_parallel is not None, strategy.recompute is not None, number


def refused(folder):
    """Messages about networks of which no step can be simulated: one returns predictions, the inputs of one do not fit."""
    ms.set_context(mode=ms.GRAPH_MODE)
    cluster, found = read_cluster(_cluster(folder)), []
    for network in (
        Network(lambda: nn.Dense(16, 4), [((8, 16), np.float32)]),
        Network(lambda: Net(16), [((8, 12), np.float32)]),
    ):
        try:
            network.check(2, cluster)
        except ConfigError as error:
            found.append(error.problems)
    _network(8, 16).check(2, cluster)
    return found


def every_cost(folder):
    """The cost of each candidate, from one graph of one device and from its own."""
    ms.set_context(mode=ms.GRAPH_MODE)
    network, cluster, found = _network(8, 16), read_cluster(_cluster(folder)), {}
    for one in list(network.candidates(2))[::3]:
        strategy = strategy_of(yaml.safe_load(network.text(one)))
        own = partition_custom(network.make, strategy, network.inputs)
        ranks = range(0, 2, strategy.mesh.stage_size)
        costs = network.cost(one, cluster), cost_of(own, ranks, {}, cluster)
        found[one.name] = [[cost.seconds, *cost.pool_bytes.values()] for cost in costs]
    return found


def chosen_once(folder):
    """The text of `auto`, the number of searches of two starts, and what a start without inputs says."""
    ms.set_context(mode=ms.GRAPH_MODE)
    out, searches, search = Path(folder) / "chosen.yaml", [], networks.fastest
    networks.fastest = lambda *given: searches.append(given) or search(*given)
    given = [np.zeros((8, 16), np.float32)], 4, _cluster(folder), None, out
    try:
        out.write_text(networks.choice(Net(), *given))
        again = networks.choice(Net(), *given)
        networks.choice(Net(), [], *given[1:])
    except ConfigError as error:
        return out.read_text(), again == out.read_text(), len(searches), error.problems[0]
    finally:
        networks.fastest = search


def searched(folder):
    """The result of the command for the network of this file."""
    words = [
        "--network",
        f"{__file__}:Net",
        "--inputs",
        "8x16:float32",
        "--cluster",
        str(_cluster(folder)),
        "--devices",
        "2",
    ]
    code = main([*words, "--simulate", "3", "--certify", "0", "--out", f"{folder}/out"])
    return code, json.loads(Path(folder, "out/tune.json").read_text()), Path(folder, "out/tune.html").read_text()
