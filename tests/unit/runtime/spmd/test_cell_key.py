# SPDX-License-Identifier: Apache-2.0
"""Whatever changes a graph changes its key; what does not, as the mesh, leaves it. A user's source is in no key."""

import dataclasses
import operator
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from conftest import CONFIGS
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters

from sporeloom.dry_run.cells import model_cell
from sporeloom.inference.model import build_model
from sporeloom.models.adapters import LoRAConfig
from sporeloom.models.family import family_module, size_config
from sporeloom.models.weight_formats import WEIGHT_FORMATS
from sporeloom.nn.lora import attach_adapters
from sporeloom.nn.loss import BatchTokenLosses
from sporeloom.nn.objectives import PairwiseReward, Policy, Preference
from sporeloom.planner.task import PLAIN_TEXT
from sporeloom.runtime.spmd.cell_key import cell_key
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.simulation.intervals import daly, young
from sporeloom.strategy.config import SINGLE_DEVICE
from sporeloom.strategy.loader import load_strategy

TINY = dataclasses.replace(size_config("pangu", "tiny"), num_layers=1)


def with_loss(objective, config=TINY, lora=None):
    with no_init_parameters():
        net = family_module("pangu", "model").ModelWithLoss(config, objective)
        if lora:
            attach_adapters(net.model, lora)
    return net


NETWORKS = {
    "policy": lambda: with_loss(Policy()),
    "policy at another temperature": lambda: with_loss(Policy(temperature=0.5)),
    "policy with another bound": lambda: with_loss(Policy(epsilon=0.1)),
    "policy with a penalty": lambda: with_loss(Policy(beta=0.1)),
    "cispo": lambda: with_loss(Policy(is_cispo=True)),
    "preference": lambda: with_loss(Preference()),
    "preference, smoothed": lambda: with_loss(Preference(label_smoothing=0.1)),
    "preference, hinge": lambda: with_loss(Preference("hinge")),
    "reward": lambda: with_loss(PairwiseReward()),
    "reward, centered": lambda: with_loss(PairwiseReward(0.1)),
    "losses of tokens": lambda: with_loss(BatchTokenLosses()),
    "two layers": lambda: with_loss(BatchTokenLosses(), TINY.with_layers(2)),
    "dropout": lambda: with_loss(BatchTokenLosses(), dataclasses.replace(TINY, dropout_rate=0.1)),
    "half precision": lambda: with_loss(BatchTokenLosses(), dataclasses.replace(TINY, compute_dtype="float16")),
    "adapters": lambda: with_loss(BatchTokenLosses(), lora=LoRAConfig(r=2)),
    "adapters of another scale": lambda: with_loss(BatchTokenLosses(), lora=LoRAConfig(r=2, lora_alpha=1.0)),
    "training": lambda: with_loss(BatchTokenLosses()).set_train(),
    "inference": lambda: build_model("pangu", TINY, SINGLE_DEVICE),
    "inference with caches": lambda: build_model("pangu", TINY, SINGLE_DEVICE, (2, 16)),
    "inference with longer caches": lambda: build_model("pangu", TINY, SINGLE_DEVICE, (2, 32)),
    **{
        f"inference with {name}": lambda weights=weights: build_model("pangu", TINY, SINGLE_DEVICE, (2, 16), weights)
        for name, weights in WEIGHT_FORMATS.items()
        if name in ("int8", "int4-g64", "int4-g32", "int4-asym-g32")
    },
    "inference with drafts": lambda: build_model("pangu", TINY, SINGLE_DEVICE, (2, 16), num_drafts=4),
    "inference with several adapters": lambda: build_model(
        "pangu", TINY, SINGLE_DEVICE, (2, 16), ranks={"attention.query": [2, 4]}
    ),
}


def test_networks_that_differ_have_keys_that_differ_and_a_second_of_each_has_the_same():
    ms.set_device("CPU")
    first, second = ({name: cell_key(make()) for name, make in NETWORKS.items()} for _ in range(2))
    assert None not in first.values() and first == second
    assert len(set(first.values())) == len(NETWORKS)


@pytest.mark.parametrize("size", ["2_tiny", "ultra_moe_tiny", "pro_moe_tiny", "sigma_tiny"])
def test_networks_of_all_parts_have_keys(size):
    config = size_config("pangu", size)
    assert (
        cell_key(with_loss(BatchTokenLosses(), config)) == cell_key(with_loss(BatchTokenLosses(), config)) is not None
    )


def test_meshes_share_a_graph_and_recomputation_has_its_own():
    def key(strategy):
        return cell_key(model_cell("pangu", TINY.with_layers(2), strategy, (8, 64), False, 1, PLAIN_TEXT).cell)

    names = ("dp4", "dp2_tp2", "dp2_tp2_zero", "tp2_pp2", "dp2_tp2_sp", "cp2_tp2")
    keys = {key(load_strategy(CONFIGS / f"pangu_tiny_{name}.yaml")) for name in names}
    recomputed = [
        key(load_strategy(CONFIGS / f"pangu_tiny_tp2_pp2_{name}.yaml")) for name in ("recompute", "selective")
    ]
    assert len(keys) == 1 and len({*keys, *recomputed, None}) == 4


class Users(nn.Cell):
    """Whose source may change without notice."""

    def construct(self, x):
        return x


def test_what_holds_something_of_a_users_has_no_key():
    assert cell_key(nn.SequentialCell([nn.ReLU()])) is not None
    assert cell_key(nn.SequentialCell([nn.ReLU(), Users()])) is None
    hooked = nn.ReLU()
    hooked.register_backward_hook(lambda cell, taken, given: taken)
    assert cell_key(hooked) is None
    for value in (lambda x: x, [].append, {}.get, partial({}.get, 1), range(3), object()):
        assert holding(value) is None


VALUES = [
    *(None, True, 1, 1.0, "1", b"1", (1,), [1], {1}, {"a": 1}, {"a": 2}, {"b": 1}, ms.float32, ms.float16),
    *(np.ones(2), np.ones(3), np.zeros(2), np.ones(2, np.float32), np.float32(1)),
    *(Tensor([1.0]), Tensor([2.0]), Tensor([1.0], ms.float16), Tensor([1.0], ms.bfloat16)),
    *(Parameter(Tensor([1.0]), name="a"), Parameter(Tensor([1.0]), name="b"), Parameter(Tensor([1.0, 2.0]), name="a")),
    Parameter(Tensor([1.0]), name="a", requires_grad=False),
    *(
        ops.Softmax(-1),
        ops.Softmax(-2),
        ops.ReduceSum(),
        ops.ReduceSum(True),
        ops.MatMul(),
        ops.MatMul(transpose_b=True),
    ),
    *(nn.ReLU(), nn.GELU(), nn.Dropout(p=0.1), nn.Dropout(p=0.2), nn.Dropout(p=0.1).set_train()),
    *(young, daly, partial(young, 1.0), partial(young, 2.0), partial(young, pause=1.0), operator.add, nn.ReLU),
    *(SINGLE_DEVICE, dataclasses.replace(SINGLE_DEVICE, source="other"), TINY, TINY.with_layers(3)),
]


def holding(value):
    holder = nn.ReLU()
    object.__setattr__(holder, "value", value)
    return cell_key(holder)


def test_every_kind_of_value_counts():
    keys = [holding(value) for value in VALUES]
    known = [key for key in keys if key is not None]
    assert len(set(known)) == len(known) >= len(VALUES) - 1  # operator.add is no function of these packages
    assert holding(ops.Softmax(-1)) == holding(ops.Softmax(-1))


def of_package(function):
    function.__module__ = "sporeloom.nn.loss"
    return function


def test_functions_of_one_line_differ_by_what_they_call_and_hold():
    def made(number):
        return lambda x: x + number

    def called():
        return later

    functions = [lambda x: x.relu(), lambda x: x.gelu(), lambda x: x in {"ab", "cd"}, lambda x: [y for y in x]]  # noqa: C416
    functions += [lambda x: [-y for y in x], made(1), made(2), lambda x, *, y=1: x, lambda x, *, y=2: x]
    keys = [holding(of_package(each)) for each in functions]
    assert None not in keys and len(set(keys)) == len(keys)
    assert holding(of_package(called)) is None  # its variable has no value yet
    later = None


def test_one_operator_of_two_cells_is_not_two_operators():
    shared = ops.Add()
    assert holding([shared, shared]) != holding([ops.Add(), ops.Add()])


def test_compilation_leaves_the_key_as_it_was():
    ms.set_context(mode=ms.GRAPH_MODE)
    net, _, inputs, *_ = model_cell("pangu", TINY, SINGLE_DEVICE, (8, 64), True, 1, PLAIN_TEXT)
    before = cell_key(net)
    compile_for_one_device(net, inputs)
    assert cell_key(net) == before is not None
