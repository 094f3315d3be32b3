# SPDX-License-Identifier: Apache-2.0
"""bfloat16 in float32: every operator's result is the nearest bfloat16, as NumPy rounds it; half the bytes travel."""

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from sporeloom.core.errors import ConfigError
from sporeloom.mindspore_compat.names import mind_ir
from sporeloom.runtime.cpu.bfloat16 import NARROW_ID, in_bfloat16, widen_bfloat16
from sporeloom.runtime.engine import Engine
from sporeloom.strategy.config import SINGLE_DEVICE

rng = np.random.default_rng(5)
PARTS = ((slice(3), "left"), (slice(3, None), "right"))
X, W, B = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 8), (6, 8), (6,)))


class Narrow(nn.Cell):
    """A biased product of float32 weights in bfloat16, added to a sum that is kept in bfloat16; gives all of them."""

    dtype = ms.bfloat16

    def __init__(self):
        super().__init__()
        self.weight, self.bias = Parameter(Tensor(W), name="weight"), Parameter(Tensor(B), name="bias")
        self.kept = Parameter(Tensor(np.full((4, 6), 0.25), ms.bfloat16), name="kept", requires_grad=False)
        self.matmul, self.add, self.mul = ops.MatMul(transpose_b=True), ops.Add(), ops.Mul()
        self.cast, self.assign = ops.Cast(), ops.Assign()

    def construct(self, x):
        narrow = self.cast(x, ms.bfloat16)
        product = self.matmul(narrow, self.cast(self.weight, ms.bfloat16))
        y = self.add(product, self.cast(self.bias, ms.bfloat16))
        kept = self.assign(self.kept, self.add(self.kept, y))
        return self.cast(y, ms.float32), self.cast(self.mul(kept, kept), ms.float32)


def rounded(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_each_result_is_rounded_and_what_is_kept_goes_on():
    engine, net = Engine.start(SINGLE_DEVICE), Narrow().set_train(False)
    kept = np.full((4, 6), 0.25, np.float32)
    y = rounded(rounded(rounded(X) @ rounded(W).T) + rounded(B))
    for _ in range(2):
        kept = rounded(kept + y)
        got = [value.asnumpy() for value in engine.run(net, Tensor(X))]
        np.testing.assert_array_equal(got[0], y)
        np.testing.assert_array_equal(got[1], rounded(kept * kept))
    assert not np.array_equal(y, X @ W.T + B)
    assert engine.rounded == {"Cast": 3, "MatMul": 1, "Add": 2, "Mul": 1}


class AllNarrow(nn.Cell):
    """Rows of a table in bfloat16, multiplied: nothing is cast."""

    dtype = ms.bfloat16

    def __init__(self):
        super().__init__()
        self.table = Parameter(Tensor(X, ms.bfloat16), name="table")
        self.weight = Parameter(Tensor(W, ms.bfloat16), name="weight")
        self.gather, self.matmul = ops.Gather(), ops.MatMul(transpose_b=True)

    def construct(self, rows):
        return self.matmul(self.gather(self.table, rows, 0), self.weight)


def test_a_network_without_a_cast_is_rounded_too():
    engine, rows = Engine.start(SINGLE_DEVICE), np.array([2, 0], np.int32)
    got = engine.run(AllNarrow().set_train(False), Tensor(rows)).asnumpy()
    np.testing.assert_array_equal(got.astype(np.float32), rounded(rounded(X[rows]) @ rounded(W).T))
    assert engine.rounded == {"MatMul": 1}


class Joined(nn.Cell):
    """Two matrices side by side, as in rotary positions: the gradient splits a tensor."""

    def __init__(self):
        super().__init__()
        self.cast, self.join, self.mul, self.sum = ops.Cast(), ops.Concat(-1), ops.Mul(), ops.ReduceSum()
        self.left, self.right = (Parameter(Tensor(X[:, part]), name=name) for part, name in PARTS)

    def construct(self, x):
        joined = self.join((self.cast(self.left, ms.bfloat16), self.cast(self.right, ms.bfloat16)))
        return self.sum(self.cast(self.mul(joined, self.cast(x, ms.bfloat16)), ms.float32))


class Gradient(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net, self.weights = net, ParameterTuple(net.trainable_params())
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, x):
        return self.grad(self.net, self.weights)(x)


def test_a_tensor_is_split_without_rounding():
    got = Engine.start(SINGLE_DEVICE).run(Gradient(Joined()).set_train(False), Tensor(X))
    for gradient, (part, _) in zip(got, PARTS, strict=True):
        np.testing.assert_array_equal(gradient.asnumpy(), rounded(X)[:, part])


def test_an_operator_with_several_results_is_refused():
    model = mind_ir.ModelProto()
    model.primitives.add(name="Pair", op_type="TopK")
    node = model.graph.node.add(op_type="REF::Pair", output=["y"])
    shapes = node.attribute.add(name="shape")
    for _ in range(2):
        shapes.values.add().tensors.add(data_type=mind_ir.TensorProto.BFLOAT16)
    with pytest.raises(ConfigError, match="TopK gives several results"):
        widen_bfloat16(model)


def test_a_message_travels_as_bfloat16_and_comes_back_as_float32():
    seen = []
    send = in_bfloat16(lambda x: seen.append(x) or x + x)
    result = send(X)
    assert seen[0].dtype == ml_dtypes.bfloat16 and seen[0].nbytes * 2 == X.nbytes
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, rounded(2 * rounded(X)))


def test_an_operator_that_is_told_its_type_in_an_unknown_way_is_refused():
    model = mind_ir.ModelProto()
    model.primitives.add(name="Fill", op_type="FillV9")
    constant = model.graph.node.add(op_type="Constant", output=["type"])
    constant.attribute.add(name="value", type=mind_ir.AttributeProto.INT64, i=NARROW_ID)
    node = model.graph.node.add(op_type="REF::Fill", input=["type"], output=["y"])
    shape = node.attribute.add(name="shape", type=mind_ir.AttributeProto.TENSORS)
    shape.tensors.add(dims=[2], data_type=mind_ir.TensorProto.BFLOAT16)
    with pytest.raises(ConfigError, match="FillV9 gives it as its input 0 says"):
        widen_bfloat16(model)
