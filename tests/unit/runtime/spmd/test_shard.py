# SPDX-License-Identifier: Apache-2.0
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal
from mindspore.nn.utils import no_init_parameters

from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.partition.mindir import read_graph
from sporeloom.runtime.spmd.compile import compile_for_one_device, with_global_shapes
from sporeloom.runtime.spmd.program import keep_slice
from sporeloom.runtime.spmd.shard import Decisions, GridLayout, layouts_of, partition_for_rank


class Product(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.arange(12, dtype=np.float32).reshape(4, 3)), name="weight")
        self.matmul = ops.MatMul()

    def construct(self, x):
        return self.matmul(x, self.weight)


def test_a_second_graph_is_compiled_of_whole_parameters_too():
    ms.set_context(mode=ms.GRAPH_MODE)
    net, inputs = Product(), [((2, 4), np.float32)]
    first = compile_for_one_device(net, inputs)
    layout = GridLayout(ValueLayout((("dp",), ())), DeviceGrid({"dp": 2}), (2, 3))
    keep_slice(net.weight, layout.stored_slice((4, 3), 1, {}))  # as the program of rank 1 leaves it
    with with_global_shapes(net.get_parameters(), {id(net.weight): (4, 3)}):
        second = compile_for_one_device(net, inputs)
    shapes = [[tuple(p.dims) for p in model.graph.parameter] for model in (first, second)]
    assert shapes == [[(4, 3)], [(4, 3)]]
    np.testing.assert_array_equal(net.weight.asnumpy(), np.arange(6, 12, dtype=np.float32).reshape(2, 3))


def test_an_operator_keeps_its_path_in_the_graph():
    ms.set_context(mode=ms.GRAPH_MODE)
    model = compile_for_one_device(Product(), [((2, 4), np.float32)])
    (path,) = [a.s.decode() for p in model.primitives if p.op_type == "MatMul" for a in p.attribute if a.name == "path"]
    assert path == "matmul"


def test_what_waits_for_nothing_is_not_a_node():
    """MindSpore's recomputation makes such, and no kernel takes a Depend of one input."""
    ms.set_context(mode=ms.GRAPH_MODE)
    model = compile_for_one_device(Product(), [((2, 4), np.float32)])
    (product,) = [node for node in model.graph.node if len(node.input) >= 2 and node.op_type != "Constant"][:1]
    kind_of_product = next(p.op_type for p in model.primitives if p.name == product.op_type.removeprefix("REF::"))
    weight = next(name for name in product.input if name.endswith("weight") or "Load" in name)
    nothing = mind_ir.NodeProto(op_type="REF::tuple", output=["nothing"])
    waiting = mind_ir.NodeProto(op_type="REF::wait", input=[weight, "nothing"], output=["waiting"])
    for name, kind in (("tuple", "MakeTuple"), ("wait", "Depend")):
        model.primitives.add(name=name, op_type=kind)
    product.input[list(product.input).index(weight)] = "waiting"
    place = list(model.graph.node).index(product)
    nodes = [*model.graph.node[:place], nothing, waiting, *model.graph.node[place:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    graph = read_graph(model)
    assert {node.kind for node in graph.nodes if weight in node.inputs} == {kind_of_product}


def test_a_state_lies_as_its_parameter_if_it_has_its_shape():
    decided = {"up.weight": (("tp",), ())}
    shapes = {"up.weight": (8, 4), "adam_m.up.weight": (8, 4), "adafactor_rows.up.weight": (8,), "rate": ()}
    assert set(layouts_of(shapes, decided)) == {"up.weight", "adam_m.up.weight"}


def test_gradients_know_whose_they_are():
    ms.set_context(mode=ms.GRAPH_MODE)

    class Squares(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net, self.square, self.sum = Product(), ops.Square(), ops.ReduceSum()

        def construct(self, x):
            return self.sum(self.square(self.net(x)))

    class Step(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = Squares()
            self.weights = (self.net.net.weight,)
            self.grad = ops.GradOperation(get_by_list=True, get_all=True)

        def construct(self, x):
            return self.net(x), self.grad(self.net, self.weights)(x)

    graph = read_graph(compile_for_one_device(Step(), [((2, 4), np.float32)]))
    products = [node for node in graph.nodes if node.kind == "MatMul"]
    (forward,) = [node for node in products if not node.forward]
    of_x, of_weight = (node for node in products if node.forward)
    assert of_x.forward == of_weight.forward == forward.outputs[0]


def test_compiling_draws_no_parameter():
    ms.set_context(mode=ms.GRAPH_MODE)
    with no_init_parameters():
        net = nn.Dense(4, 3, weight_init=Normal(), bias_init="ones")
    model = compile_for_one_device(net, [((2, 4), np.float32)])
    assert {p.name.rpartition(":")[2]: tuple(p.dims) for p in model.graph.parameter} == {"weight": (3, 4), "bias": (3,)}
    assert all(parameter.has_init for parameter in net.get_parameters())
    assert "init_parameters_data" not in vars(net)


def test_a_ranks_graph_has_no_item_that_nobody_uses_and_each_constant_once():
    """MindSpore chooses a kernel for each node of each rank: they are what its compilation takes."""
    ms.set_context(mode=ms.GRAPH_MODE)

    class Thirds(nn.Cell):
        def __init__(self):
            super().__init__()
            self.split, self.sum = ops.Split(1, 3), ops.ReduceSum()

        def construct(self, x, y):
            _, second, _ = self.split(x)
            _, _, third = self.split(y)
            return self.sum(second) + self.sum(third)

    model = compile_for_one_device(Thirds(), [((4, 6), np.float32)] * 2)
    graph, sharded = partition_for_rank(model, Decisions(DeviceGrid({"dp": 2})), 1)
    assert sum(c.kind == "AllReduce" for c in sharded.communications) == 1
    kinds = {p.name: p.op_type for p in graph.model.primitives}
    nodes = [(kinds.get(n.op_type.removeprefix("REF::"), n.op_type), n) for n in graph.model.graph.node]
    assert [kind for kind, _ in nodes].count("Split") == [kind for kind, _ in nodes].count("TupleGetItem") == 2
    written = [n.attribute[0].SerializeToString() for kind, n in nodes if kind == "Constant" and "sharded" in n.name]
    assert len(set(written)) == len(written) > 0
