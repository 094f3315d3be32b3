# SPDX-License-Identifier: Apache-2.0
"""Layouts of products of groups of rows with the matrix of each group."""

import pytest

from sporeloom.core.grouped_product import SHARE_OF_ROWS
from sporeloom.partition.graph import TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import NONE, ValueLayout
from sporeloom.partition.operation import Operand, Operation
from sporeloom.partition.operators import plan

ROWS, EXPERTS, WIDTH, OUT = 8, 4, 6, 12
GRID = DeviceGrid({"dp": 2, "ep": 2, "tp": 2})


def planned(x, w, counts=NONE, group_type=0, list_type=1, bias=None, groups=(), **attributes):
    """The plan of rows and matrices with these layouts; of the gradient of the matrices if `group_type` is 2."""
    shapes = ((ROWS, WIDTH), (EXPERTS, WIDTH, OUT)) if group_type == 0 else ((WIDTH, ROWS), (ROWS, OUT))
    result = (ROWS, OUT) if group_type == 0 else (EXPERTS, WIDTH, OUT)

    def tensor(shape, dims, partial=NONE, dtype="float32"):
        return Operand(TensorType(shape, dtype), ValueLayout(dims, frozenset(partial)))

    def constant(value):
        return Operand(None, None, value, True)

    tensors = [(tensor(shape, dims),) for shape, dims in zip(shapes, (x, w), strict=True)]
    none = [constant(None)] * 3
    settings = [constant(value) for value in (3, group_type, list_type, 0, None)]
    operands = (
        *tensors,
        constant(bias),
        *none,
        *none[:2],
        tensor((EXPERTS,), (groups,), counts, "int64"),
        *none,
        *settings,
    )
    return plan(Operation("GroupedMatmulV4", operands, (TensorType(result, "float32"),), attributes, GRID))


def test_ranks_with_their_own_rows_of_each_group_and_columns_of_the_matrices():
    found = planned((("dp",), ()), ((), (), ("tp",)), {"dp"})
    assert found.outputs == (ValueLayout((("dp",), ("tp",))),)
    assert found.inputs[:2] == ((ValueLayout((("dp",), ())),), (ValueLayout(((), (), ("tp",))),))
    assert found.inputs[8] == ValueLayout(((),), frozenset({"dp"}))  # as many rows as a rank has


def test_a_sharded_inner_dim_makes_a_partial_sum():
    found = planned((("dp",), ("tp",)), ((), ("tp",), ()), {"dp"})
    assert found.outputs == (ValueLayout((("dp",), ()), frozenset({"tp"})),)


def test_rows_are_gathered_where_the_counts_are_of_all_rows():
    found = planned((("dp",), ()), ((), (), ()))
    assert found.inputs[0] == (ValueLayout(((), ())),)
    assert found.inputs[8] == ValueLayout(((),))


def test_every_rank_has_the_matrices_of_all_groups():
    found = planned((("dp",), ()), (("tp",), (), ()), {"dp"})
    assert found.inputs[1] == (ValueLayout(((), (), ())),)


def test_gradients_of_matrices_are_partial_sums_over_the_ranks_with_rows():
    found = planned(((), ("dp",)), (("dp",), ("tp",)), {"dp"}, group_type=2)
    assert found.outputs == (ValueLayout(((), (), ("tp",)), frozenset({"dp"})),)
    assert found.inputs[:2] == ((ValueLayout(((), ("dp",))),), (ValueLayout((("dp",), ("tp",))),))


def test_ranks_that_sort_rows_have_the_matrices_of_their_groups():
    given = {"counts": {"dp"}, "groups": ("ep",), SHARE_OF_ROWS: 0.5}
    found = planned((("ep", "dp"), ()), (("ep",), (), ("tp",)), **given)
    assert found.outputs == (ValueLayout((("ep", "dp"), ("tp",))),)
    assert found.inputs[:2] == ((ValueLayout((("ep", "dp"), ())),), (ValueLayout((("ep",), (), ("tp",))),))
    assert found.inputs[8] == ValueLayout((("ep",),), frozenset({"dp"}))
    found = planned(((), ("ep", "dp")), (("ep", "dp"), ("tp",)), **given, group_type=2)
    assert found.outputs == (ValueLayout((("ep",), (), ("tp",)), frozenset({"dp"})),)


def test_other_products_have_the_matrices_of_all_groups_on_each_rank():
    found = planned((("ep", "dp"), ()), (("ep",), (), ()), {"dp"}, groups=("ep",))
    assert found.inputs[:2] == ((ValueLayout(((), ())),), (ValueLayout(((), (), ())),))
    assert found.inputs[8] == ValueLayout(((),))


@pytest.mark.parametrize("given", [{"list_type": 0}, {"bias": 1.0}])
def test_other_forms_are_computed_unsharded(given):
    assert planned((("dp",), ()), ((), (), ()), {"dp"}, **given) is None
