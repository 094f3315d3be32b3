# SPDX-License-Identifier: Apache-2.0
"""Gradients without dead branches do what they did, and the compiled graph is the same."""

import inspect
import types

import pytest
from conftest import CONFIGS, call
from mindspore.ops._grad_experimental import grad_comm_ops
from mindspore.ops._grad_experimental.grad_base import bprop_getters

from sporeloom.runtime.gradients import Decided, decided_branches


def made(mean, dumps, scale=None, name="w"):
    def bprop(x, dout):
        if name and dumps:
            x = "dumped"
        if mean is not None and x == "odd":
            return x
        if mean:
            dout = dout * scale
        elif not dumps:
            dout = -dout
        return x, dout

    return bprop


@pytest.mark.parametrize("mean", [True, False, None])
@pytest.mark.parametrize("dumps", [True, False])
@pytest.mark.parametrize("x", ["even", "odd"])
def test_decided_functions_give_what_they_gave(tmp_path, mean, dumps, x):
    function = made(mean, dumps, 3.0)
    decided = Decided(tmp_path).decided(function)
    assert decided(x, 2.0) == function(x, 2.0)
    text = inspect.getsource(decided)
    assert ("dumped" in text) == dumps
    assert ("* scale" in text) == bool(mean)
    assert ('"odd"' in text.replace("'", '"')) == (mean is not None)


def test_a_function_with_nothing_to_decide_is_left_alone(tmp_path):
    scale = [2.0]

    def bprop(x):
        return x * scale[0] if x else x

    assert Decided(tmp_path).decided(bprop) is bprop


def test_the_registry_is_as_before_afterwards():
    before = dict(bprop_getters.items())
    with decided_branches():
        changed = [key for key, make in bprop_getters.items() if make is not before[key]]
    assert dict(bprop_getters.items()) == before
    assert len(changed) == sum(make.__module__ == grad_comm_ops.__name__ for make in before.values()) > 20
    assert all(isinstance(make, types.FunctionType) for make in before.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2_tp2", "dp2_pp2_zero", "dp2_tp2_sp"])
def test_the_graph_is_the_same(name):
    plain, fast = call("tests/configs/graph_worker.py", "both_ways", CONFIGS / f"pangu_tiny_{name}.yaml", timeout=200)
    assert fast == plain
    assert any("AllReduce" in node or "ReduceScatter" in node for node in plain)
