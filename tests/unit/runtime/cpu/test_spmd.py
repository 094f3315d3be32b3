# SPDX-License-Identifier: Apache-2.0
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout
from sporeloom.runtime.cpu.executor import keep_slice
from sporeloom.runtime.cpu.spmd import GridLayout, compile_for_one_device, layouts_of, whole_again


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
    keep_slice(net.weight, layout.slices((4, 3), 1, {}))  # as the program of rank 1 leaves it
    with whole_again(net.get_parameters(), {id(net.weight): (4, 3)}):
        second = compile_for_one_device(net, inputs)
    shapes = [[tuple(p.dims) for p in model.graph.parameter] for model in (first, second)]
    assert shapes == [[(4, 3)], [(4, 3)]]
    np.testing.assert_array_equal(net.weight.asnumpy(), np.arange(6, 12, dtype=np.float32).reshape(2, 3))


def test_an_operator_keeps_its_path_in_the_graph():
    ms.set_context(mode=ms.GRAPH_MODE)
    model = compile_for_one_device(Product(), [((2, 4), np.float32)])
    (path,) = [a.s.decode() for p in model.primitives if p.op_type == "MatMul" for a in p.attribute if a.name == "path"]
    assert path == "matmul"


def test_a_state_lies_as_its_parameter_if_it_has_its_shape():
    decided = {"up.weight": (("tp",), ())}
    shapes = {"up.weight": (8, 4), "adam_m.up.weight": (8, 4), "adafactor_rows.up.weight": (8,), "rate": ()}
    assert set(layouts_of(shapes, decided)) == {"up.weight", "adam_m.up.weight"}
