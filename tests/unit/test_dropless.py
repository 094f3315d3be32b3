# SPDX-License-Identifier: Apache-2.0
"""Experts without a capacity limit: their products with their own rows, against experts with capacity for all tokens."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import GroupedMatmulV4

from sporeloom.core.errors import ConfigError
from sporeloom.core.grouped_product import grouped_outer_product, grouped_product
from sporeloom.inference.model import build_model
from sporeloom.models.cells import ExpertCell
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module, size_config
from sporeloom.models.parameters import decoder_specs
from sporeloom.models.parts.experts import choices_of_part
from sporeloom.nn import dropless
from sporeloom.nn.dropless import GroupedProduct
from sporeloom.nn.moe import ExpertLinear, ExpertMLPs, MoE
from sporeloom.parallel.parallelize import parallelize
from sporeloom.planner.cluster import Cluster
from sporeloom.planner.dimensions import of_decoder
from sporeloom.planner.parallelism import Parallelism
from sporeloom.planner.search import evaluate
from sporeloom.runtime.cpu.grouped import exchange_grouped_products
from sporeloom.runtime.spmd.compile import compile_for_one_device
from sporeloom.strategy.config import Rule
from sporeloom.strategy.loader import strategy_of

ms.set_context(mode=ms.GRAPH_MODE)
BATCH, LENGTH, WIDTH, FFN = 2, 20, 16, 24
ROUTERS = {
    "softmax": {"num_experts": 6, "experts_per_token": 2, "balance_loss": 0.1, "router_z_loss": 0.01},
    "sigmoid": {"num_experts": 4, "experts_per_token": 3, "router": "sigmoid", "normalize": "before_drop"},
    "hash": {"num_experts": 4, "experts_per_token": 1, "router": "hash"},
}


def layer_of(experts, gated, sorts_rows=True):
    activation = {"activation": "silu", "gated_mlp": True, "mlp_bias": False} if gated else {"activation": "gelu"}
    config = ModelConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=1,
        query_layer=False,
        ffn_hidden_size=FFN,
        dropout_rate=0.0,
        experts=experts,
        **activation,
    )
    layer = MoE(config, decoder_specs(config).within(f"{config.layers[0]}.mlp"), ms.float32, 0).set_train()
    layer.sorts_rows = sorts_rows
    for number, parameter in enumerate(layer.get_parameters()):
        value = np.random.default_rng(number).normal(0, 0.3, parameter.shape)
        parameter.set_data(Tensor(value.astype(np.float32)))
    return layer


class Objective(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x, tokens, shares, groups):
        y, losses = self.layer(x, tokens, shares, None, groups)
        objective = ops.ReduceSum()(ops.square(y))
        return (objective if losses is None else objective + losses[0]), y


def computed(layer):
    """Output, objective and gradients for a batch whose second row ends with padding."""
    rng = np.random.default_rng(7)
    x = Tensor(rng.normal(size=(BATCH * LENGTH, WIDTH)).astype(np.float32))
    tokens = Tensor(rng.integers(0, 64, (BATCH, LENGTH)).astype(np.int32))
    is_token = np.ones((BATCH, LENGTH), np.float32)
    is_token[1, 13:] = 0
    counts = is_token.sum(1)
    groups = (Tensor(is_token), Tensor(counts), Tensor(counts[:, None].astype(np.int32)))
    weights = ms.ParameterTuple(layer.trainable_params())
    shares = Tensor(np.full(BATCH, 1 / BATCH, np.float32))
    net = ms.value_and_grad(Objective(layer), 0, weights, has_aux=True)
    (objective, y), (of_x, of_weights) = net(x, tokens, shares, groups)
    return float(objective.asnumpy()), [each.asnumpy() for each in (y, of_x, *of_weights)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("router", ROUTERS)
def test_sorted_rows_give_what_capacity_for_all_tokens_does(router, gated):
    objective, found = computed(layer_of(ROUTERS[router], gated))
    expected, values = computed(layer_of(ROUTERS[router], gated, sorts_rows=False))
    assert objective == pytest.approx(expected, rel=1e-5)
    for one, other in zip(found, values, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


class Step(nn.Cell):
    """Gradients of a layer, as they are compiled for several devices."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weights = layer, ms.ParameterTuple(layer.trainable_params())
        self.grad = ops.GradOperation(get_all=True, get_by_list=True)

    def loss(self, x, tokens):
        return ops.ReduceSum()(ops.square(self.layer(x, tokens)[0]))

    def construct(self, x, tokens):
        return self.grad(self.loss, self.weights)(x, tokens)


def sizes(model):
    """Kind of each operator with a result, and its number of entries."""
    kinds = {f"REF::{p.name}": p.op_type for p in model.primitives}
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "shape" and attribute.tensors:
                yield kinds.get(node.op_type, node.op_type), int(np.prod(attribute.tensors[0].dims))


def graph(sorts_rows):
    layer = layer_of({"num_experts": 8, "experts_per_token": 1}, True, sorts_rows)
    for _, cell in layer.cells_and_names():
        if isinstance(cell, GroupedProduct):
            cell.operator_on_cpu = True
    inputs = [((BATCH * LENGTH, WIDTH), np.float32), ((BATCH, LENGTH), np.int32)]
    return compile_for_one_device(Step(layer), inputs)


def test_no_result_has_a_row_of_each_token_for_each_expert():
    weights, rows = 8 * FFN * WIDTH, BATCH * LENGTH * FFN
    assert max(size for _, size in sizes(graph(True))) == weights
    assert max(size for _, size in sizes(graph(False))) == 8 * rows > weights


def test_the_operator_is_replaced_by_numpy_forward_and_backward():
    model = graph(True)
    assert sum(p.op_type == "GroupedMatmulV4" for p in model.primitives) > 0
    exchange_grouped_products(model)
    assert not [node for node in model.graph.node if "GroupedMatmulV4" in node.op_type]
    assert sum("pyfunc" in node.op_type for node in model.graph.node) == 9  # three matrices: y, and two gradients


class ByOffsets(nn.Cell):
    def __init__(self):
        super().__init__()
        self.product = GroupedMatmulV4()

    def construct(self, x, weight, ends):
        rest = (None, None, None, 3, 0, 0, 0, None)
        return self.product((x,), (weight,), None, None, None, None, None, None, ends, *rest)[0]


def test_another_form_of_the_operator_is_refused():
    shapes = [((6, 4), np.float32), ((2, 4, 3), np.float32), ((2,), np.int64)]
    with pytest.raises(ConfigError, match=r"GroupedMatmulV4 of .*a group_list of counts"):
        exchange_grouped_products(compile_for_one_device(ByOffsets(), shapes))


def test_products_of_groups_of_which_some_are_empty():
    rng, counts = np.random.default_rng(0), np.array([3, 0, 4, 1])
    x, y, w = (rng.normal(size=shape).astype(np.float32) for shape in ((10, 5), (10, 6), (4, 6, 5)))
    expert = np.repeat(np.arange(4), counts)
    found = grouped_product(x, w, counts)
    np.testing.assert_allclose(found[:8], np.einsum("rk,rnk->rn", x[:8], w[expert]), rtol=1e-5, atol=1e-6)
    assert not found[8:].any()
    expected = np.zeros_like(w)
    np.add.at(expected, expert, np.einsum("rn,rk->rnk", y[:8], x[:8]))
    np.testing.assert_allclose(grouped_outer_product(x, y, counts), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="are not in 7 rows"):
        grouped_product(x[:7], w, counts)


class OwnRows(nn.Cell):
    """Experts whose last rows are other ranks'; results of these are 0."""

    def __init__(self, config):
        super().__init__()
        self.experts = ExpertMLPs(config, decoder_specs(config).within(f"{config.layers[0]}.mlp.experts"), ms.float32)

    def construct(self, x, counts, experts, away):
        y = self.experts(x, counts, experts, away)
        return ops.ReduceSum()(ops.square(y)), y


@pytest.mark.parametrize("gated", [True, False])
def test_undefined_rows_of_other_ranks_have_no_part_in_results_and_gradients(gated, monkeypatch):
    def with_undefined_rows(x, weight, counts):
        y = grouped_product(x, weight, counts)
        y[int(counts.sum()) :] = np.nan
        return y

    monkeypatch.setattr(dropless, "grouped_product", with_undefined_rows)
    layer = layer_of({"num_experts": 3, "experts_per_token": 1}, gated)
    net, rng = OwnRows(layer.config), np.random.default_rng(5)
    for number, parameter in enumerate(net.get_parameters()):
        parameter.set_data(Tensor(np.random.default_rng(number).normal(0, 0.3, parameter.shape).astype(np.float32)))
    x, counts = rng.normal(size=(10, WIDTH)).astype(np.float32), np.array([3, 0, 4])
    experts, weights = np.array([0, 0, 0, 2, 2, 2, 2, 1, 1, 0], np.int32), ms.ParameterTuple(net.trainable_params())

    def results(rows):
        inputs = (x[:rows], counts, experts[:rows], np.arange(rows) >= 7)
        (_, y), (of_x, of_weights) = ms.value_and_grad(net, 0, weights, has_aux=True)(*map(Tensor, inputs))
        return [each.asnumpy() for each in (y, of_x, *of_weights)]

    found, expected = results(10), results(7)
    for one, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(one[:7], other, rtol=1e-4, atol=1e-5)
        assert not one[7:].any()
    for one, other in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (12, 3), (12, 4), (12, 6)])
def test_no_more_choices_of_a_token_are_of_a_rank_than_it_has_rows_for(experts, chosen, is_grouped):
    rng, group = np.random.default_rng(0), experts // chosen
    for parts in (n for n in range(1, experts + 1) if experts % n == 0):
        most = 0
        for _ in range(2000):
            drawn = (
                np.arange(chosen) * group + rng.integers(0, group, chosen) if is_grouped else rng.permutation(experts)
            )
            most = max(most, np.bincount(drawn[:chosen] // (experts // parts)).max())
        assert most == choices_of_part(experts, chosen, parts, is_grouped)


class Products(nn.Cell):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def construct(self, x, counts, experts):
        return self.linear(x, counts, experts)


def test_sorted_rows_are_multiplied_with_the_matrices_of_their_experts():
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=1, num_heads=1, query_layer=False, ffn_hidden_size=64,
        experts={"num_experts": 3, "experts_per_token": 1},
    )  # fmt: skip
    specs = decoder_specs(config).within(f"{config.layers[0]}.mlp.experts.up")
    linear = ExpertLinear(specs, ms.float32)
    rng, counts = np.random.default_rng(3), np.array([4, 0, 2])
    for parameter in linear.get_parameters():
        parameter.set_data(Tensor(rng.uniform(0, 2, parameter.shape).astype(np.float32)))
    x, experts = rng.normal(size=(6, 32)).astype(np.float32), np.repeat(np.arange(3), counts).astype(np.int32)
    found = Products(linear)(Tensor(x), Tensor(counts), Tensor(experts)).asnumpy()
    everywhere = linear(Tensor(np.stack([x] * 3))).asnumpy()  # (E, R, out)
    np.testing.assert_allclose(found, everywhere[experts, np.arange(6)], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "rules", "engine", "sorts"),
    [
        ({}, "decoder", "spmd", True),
        ({"dp": 2, "tp": 2}, "decoder", "spmd", True),
        ({"dp": 2, "ep": 2}, "experts", "spmd", True),
        ({"dp": 2, "ep": 2}, "decoder", "spmd", False),  # no rule has each rank sort its own rows
        ({"dp": 2, "ep": 2, "cp": 2}, "experts", "spmd", False),
        ({"dp": 2}, "experts", "mindspore", False),
    ],
)
def test_rows_are_sorted_where_training_can_and_never_in_inference(mesh, rules, engine, sorts):
    strategy = strategy_of({"mesh": mesh, "rules": rules, "engine": engine})
    config = size_config("pangu", "gshard_tiny")
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, capacity_factor=None))
    assert strategy.sorts_expert_rows == sorts
    net = family_module("pangu", "model").Model(config)
    if engine != "mindspore":
        parallelize(net, strategy, whole=False)
        assert {cell.sorts_rows for _, cell in net.cells_and_names() if isinstance(cell, ExpertCell)} == {sorts}
        net = build_model("pangu", config, strategy)
        assert {cell.sorts_rows for _, cell in net.cells_and_names() if isinstance(cell, ExpertCell)} == {False}


def test_a_rule_that_sorts_the_rows_of_all_ranks_is_refused():
    config = size_config("pangu", "gshard_tiny")
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, capacity_factor=None))
    strategy = strategy_of({"mesh": {"dp": 2, "ep": 2}, "rules": "experts"})
    rule = Rule(pattern="layers.1.mlp.by_expert.pick", inputs=((("dp",), ()), (("dp",),)), source="own.yaml:3")
    rules = dataclasses.replace(strategy.rules, operators=(*strategy.rules.operators, rule))
    with pytest.raises(ConfigError, match=r"own\.yaml:3: layers\.1\.mlp\.by_expert\.pick: each rank sorts the rows"):
        parallelize(
            family_module("pangu", "model").Model(config), dataclasses.replace(strategy, rules=rules), whole=False
        )


def test_more_ranks_than_experts_are_refused_before_rows_are_split():
    config = size_config("pangu", "gshard_tiny")
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, capacity_factor=None))
    strategy = strategy_of({"mesh": {"dp": 64, "ep": 64}, "rules": "experts"})
    with pytest.raises(ConfigError, match="not divisible"):
        parallelize(family_module("pangu", "model").Model(config), strategy, whole=False)


@pytest.mark.parametrize(("chip", "rows"), [("ascend910b", 1.0), ("h100", 4.0)])
def test_plans_count_the_rows_that_devices_compute(chip, rows):
    config = size_config("pangu", "gshard_tiny")
    config = dataclasses.replace(
        config, experts=dataclasses.replace(config.experts, num_experts=8, experts_per_token=2, capacity_factor=None)
    )
    dims = of_decoder(config)
    option = evaluate(dims, Parallelism(own_graphs=True, dp=2), Cluster.of_chip(chip))
    assert option.job.expert_rows(dims) == rows


@pytest.mark.parametrize(
    ("mesh", "rows", "kept"),
    [
        ({"dp": 4, "ep": 2}, 1.0, 4),  # 2 choices of the tokens of 2 ranks
        ({"dp": 8, "ep": 8}, 1.0, 8),  # one expert a rank, so one choice of a token
        ({"dp": 2, "ep": 4, "tp": 2, "expert_tp": 1}, 1.0, 4),  # tokens of 2 ranks: those of tp have the same
        ({"dp": 2, "ep": 2, "cp": 2}, 4.0, None),
    ],
)
def test_plans_count_the_rows_of_ranks_that_gather_tokens(mesh, rows, kept):
    config = size_config("pangu", "gshard_tiny")
    config = dataclasses.replace(
        config, experts=dataclasses.replace(config.experts, num_experts=8, experts_per_token=2, capacity_factor=None)
    )
    dims, job = of_decoder(config), Parallelism(own_graphs=True, **mesh)
    assert job.expert_rows(dims) == rows
    assert job.computes_own_rows(dims) == (kept is not None)
    if kept is not None:
        assert job.sorted_rows(dims) == kept
        before = evaluate(dims, dataclasses.replace(job, sorts_rows=False), Cluster.of_chip("ascend910b"))
        option = evaluate(dims, job, Cluster.of_chip("ascend910b"))
        assert option.seconds < before.seconds and option.peak_bytes <= before.peak_bytes
