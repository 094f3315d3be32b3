# SPDX-License-Identifier: Apache-2.0
"""`sporeloom rules`: the operators of a network of the user's, and rules that a strategy file takes as they are printed."""

import re

import numpy as np
import pytest
import yaml
from conftest import call, run, tool

pytestmark = pytest.mark.slow

NETWORK = """
import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
import numpy as np


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(16, 64), nn.Dense(64, 16)
        self.add, self.activation = ops.Add(), nn.GELU()

    def construct(self, x):
        return self.add(x, self.down(self.activation(self.up(x))))


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = Parameter(Tensor(np.ones((128, 16)), ms.float32))
        self.gather, self.block, self.head = ops.Gather(), Block(), nn.Dense(16, 8)

    def construct(self, ids):
        return self.head(self.block(self.gather(self.table, ids, 0)) * 2.0)


number = 3
"""
PRINTED = {
    "block.up.matmul": "[[dp, ~], [tp, ~]]",
    "block.down.matmul": "[[dp, tp], [~, tp]]",
    "gather": "[[tp, ~], [dp, ~]]",
}


@pytest.fixture
def network(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NETWORK)
    return path


def rules(*arguments):
    return tool("tools/rules.py", *arguments)


def rows(outcome):
    assert outcome.code == 0, outcome.output
    return {
        line.split()[0]: line for line in outcome.output.split("\n\n")[0].split("\n") if "." in line or "gather" in line
    }


def test_each_operator_has_its_kind_shapes_and_rule(network):
    outcome = rules(f"{network}:Net", "--inputs", "4x6:int32")
    found = rows(outcome)
    table, product = (" ".join(found[path].split()[1:]) for path in ("gather", "block.up.matmul"))
    assert table == "Gather (128, 16), (4, 6) -> (4, 6, 16) [[tp, ~], [dp, ~]]"
    assert product == "MatMul (24, 16), (64, 16) -> (24, 64) [[dp, ~], [tp, ~]]"
    assert {path for path, line in found.items() if "[[" in line} == set(PRINTED)  # the others follow
    assert "Add" in found["block.add"]
    assert re.search(r"\nMuls?  Muls?  \(4, 6, 16\) -> ", outcome.output), outcome.output  # * 2.0


def test_without_inputs_it_names_the_parameters(network):
    found = rows(rules(f"{network}:Net"))
    assert "block.up.weight (64, 16)" in found["block.up.matmul"]
    assert "table (128, 16)" in found["gather"] and "[[" not in found["gather"]  # of how many dims its indices are


def test_a_strategy_takes_the_rules_as_they_are_printed(network, tmp_path):
    found = rows(rules(f"{network}:Net", "--inputs", "4x6:int32"))
    operators = {path: found[path][found[path].index("[[") :] for path in PRINTED}
    assert operators == PRINTED
    lines = "".join(f"    {path}: {layouts}\n" for path, layouts in operators.items())
    strategy = tmp_path / "s.yaml"
    strategy.write_text(f"mesh: {{dp: 2, tp: 2}}\nrules:\n  operators:\n{lines}")
    assert yaml.safe_load(strategy.read_text())["rules"]["operators"]["gather"] == [["tp", None], ["dp", None]]
    script = tmp_path / "forward.py"
    script.write_text(SCRIPT)
    one = call("tests/script_worker.py", "run", script, "alone")
    for said in call("tests/script_worker.py", "run", script, strategy, processes=4):
        shapes, values = said.strip().split("\n")
        assert shapes == "(64, 16) (32, 16) (16, 32)"  # the table and both products
        np.testing.assert_allclose(np.array(values.split(), float), np.array(one.split(), float), rtol=1e-5, atol=1e-6)


SCRIPT = """
import sys
from pathlib import Path
import mindspore as ms
import numpy as np

ms.set_device("CPU")
ms.set_context(mode=ms.GRAPH_MODE)
sys.path.insert(0, str(Path(__file__).parent))
from net import Net
from sporeloom import auto_parallel

ms.set_seed(1)
net, ids = Net(), ms.Tensor(np.arange(24).reshape(4, 6), ms.int32)
if sys.argv[1] == "alone":
    print(*net(ids).asnumpy().ravel())
else:
    out = auto_parallel(net, sys.argv[1])(ids)
    held = {p.name: p.shape for p in net.get_parameters()}
    print(held["table"], held["block.up.weight"], held["block.down.weight"])
    print(*out.asnumpy().ravel())
"""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (("{net}",), "has Block, Net; name one, as in"),
        (("{net}:Nett",), "has no Nett; it has Block, Net"),
        (("{net}:number",), "is not a Cell and returns none"),
        (("no.py",), "there is no such file"),
        (("{net}:Net", "--inputs", "4by6"), "--inputs 4by6: write shape:type"),
        (("{net}:Net", "--inputs", "4x6:int33"), "--inputs 4x6:int33: write shape:type"),
        (("{net}:Net", "--inputs", "4x6:int32", "4x6:int32"), "MindSpore cannot compile the network"),
    ],
)
def test_a_mistake_is_one_line(network, what, message):
    outcome = rules(*(each.format(net=network) for each in what))
    assert outcome.code == 2 and message in outcome.output
    assert "Traceback" not in outcome.output


def test_a_network_that_does_not_compile_is_one_line_without_a_trace_of_mindspore(network):
    outcome = run("-m", "sporeloom", "rules", f"{network}:Net", "--inputs", "4x6:int32", "4x6:int32")
    assert outcome.code == 2 and outcome.output.count("\n") == 1
    assert outcome.output.startswith("error: MindSpore cannot compile the network")
