# SPDX-License-Identifier: Apache-2.0
"""Whole graphs, sharded, then computed by all ranks at once in NumPy: they give what one device gives."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import COMPUTE_ALL, Builder, check, on_all_ranks, sent, type_of
from kinds import COMPUTE, SAMPLES, Draw

from sporeloom.partition.graph import Graph, Node, TensorType
from sporeloom.partition.grid import DeviceGrid
from sporeloom.partition.layout import ValueLayout, fitted
from sporeloom.partition.operation import Pin
from sporeloom.partition.propagate import shard_graph
from sporeloom.partition.sharded_graph import PartitionError


def mlp_step(random):
    """Forward and backward of x W1 tanh W2 and its squares, two layers by hand."""
    b = Builder()
    x = b.tensor("x", random.standard_normal((8, 4)))
    w1 = b.tensor("w1", random.standard_normal((12, 4)), is_parameter=True)
    w2 = b.tensor("w2", random.standard_normal((6, 12)), is_parameter=True)
    h = b.node("MatMul", x, w1, False, True, path="up.matmul")
    a = b.node("Tanh", h)
    y = b.node("MatMul", a, w2, False, True, path="down.matmul")
    loss = b.node("ReduceSum", b.node("Square", y), (), False)
    dy = b.node("Muls", y, 2.0)
    dw2 = b.node("MatMul", dy, a, True, False)
    dh = b.node("TanhGrad", a, b.node("MatMul", dy, w2, False, False))
    dw1 = b.node("MatMul", dh, x, True, False)
    norm = b.node("AddN", tuple(b.node("ReduceSum", b.node("Square", g), (), False) for g in (dw1, dw2)))
    return b, loss, dw1, dw2, norm


MEGATRON = {"w1": (("tp",), ()), "w2": ((), ("tp",))}
GRID = DeviceGrid({"dp": 2, "tp": 2})


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        MEGATRON,
        {"w1": (("tp", "dp"), ()), "w2": (("dp",), ("tp",))},
        {"w1": ((), ("dp", "tp")), "w2": (("dp",), ())},
    ],
    ids=["replicated", "megatron", "zero", "odd"],
)
@pytest.mark.parametrize("batch", [("dp",), ("dp", "tp"), ()], ids=str)
def test_a_training_step_gives_the_loss_gradients_and_norm_of_one_device(parameters, batch):
    b, *outputs = mlp_step(np.random.default_rng(1))
    check(b, outputs, GRID, parameters, {"x": (batch, ())})


def test_megatrons_scheme_costs_one_sum_a_pass_and_one_a_gradient():
    b, *outputs = mlp_step(np.random.default_rng(1))
    sharded = check(b, outputs[:1], GRID, MEGATRON, {"x": (("dp",), ())})
    kinds = [(c.kind, c.axes) for c in sharded.communications]
    assert ("AllReduce", ("tp",)) in kinds
    assert kinds.count(("AllReduce", ("dp",))) == 3  # two gradients, which the norm wants, and the loss


def clipped_step():
    """A step that scales its gradients by their norm, then updates the weights."""
    b, _, dw1, dw2, norm = mlp_step(np.random.default_rng(1))
    new = [
        b.node("Assign", w, b.node("Sub", w, b.node("Mul", g, norm)), side_effect_mem=True)
        for w, g in (("w1", dw1), ("w2", dw2))
    ]
    return b, norm, new


def test_a_gradient_that_a_norm_and_an_update_use_is_added_up_once():
    b, norm, new = clipped_step()
    sharded = check(b, [norm, *new], GRID, {}, {"x": (("dp",), ())})
    # 12 x 4 and 6 x 12 elements, 2 x (2 - 1) / 2 of them; the norm is of whole gradients.
    assert sent(sharded) == [("AllReduce", ("dp",), 48), ("AllReduce", ("dp",), 72)]


def test_of_a_parameter_that_replicas_share_out_a_rank_gets_its_part_of_the_gradient_alone():
    b, norm, new = clipped_step()
    zero = {"w1": (("dp",), ()), "w2": (("dp",), ())}
    sharded = check(b, [norm, *new], GRID, zero, {"x": (("dp",), ())})
    gathers = [("AllGather", ("dp",), 24), ("AllGather", ("dp",), 36)]  # weights, for the products
    scatters = [("ReduceScatter", ("dp",), 24), ("ReduceScatter", ("dp",), 36)]
    assert sent(sharded) == [*gathers, ("AllReduce", ("dp",), 1), *scatters]


def test_a_gradient_of_a_product_with_itself_over_the_batch_is_right():
    """x^T x of a sharded batch, cubed: what MindSpore's pass adjust_all_reduce_mul_add gets wrong."""
    random = np.random.default_rng(2)
    b = Builder()
    x, w = b.tensor("x", random.standard_normal((8, 4))), b.tensor("w", random.standard_normal((4, 4)), True)
    h = b.node("MatMul", x, w, False, False)
    gram = b.node("MatMul", h, h, True, False)
    cubed = b.node("Mul", b.node("Square", gram), gram)
    dgram = b.node("Muls", b.node("Square", gram), 3.0)
    dh = b.node("AddN", (b.node("MatMul", h, dgram, False, True), b.node("MatMul", h, dgram, False, False)))
    dw = b.node("MatMul", x, dh, True, False)
    check(b, [b.node("ReduceSum", cubed, (), False), dw], GRID, {}, {"x": (("dp",), ())})
    check(b, [dw], GRID, {"w": ((), ("tp",))}, {"x": (("dp",), ())})


def test_an_unknown_operator_is_given_whole_inputs_and_reported():
    b = Builder()
    x = b.tensor("x", np.random.default_rng(3).standard_normal((8, 4)))
    y = b.node("Mystery", b.node("Square", x))
    sharded = check(b, [b.node("ReduceSum", y, (0,), False)], GRID, {}, {"x": (("dp",), ("tp",))})
    assert sharded.unsharded == {"Mystery": 1}


def test_what_a_handler_communicates_is_reported_like_what_a_layout_costs():
    b = Builder()
    x = b.tensor("x", np.random.default_rng(3).standard_normal((8, 4)))
    sharded = check(b, [b.node("ReduceMax", x, (0,), False)], GRID, {}, {"x": (("dp",), ())})
    (found,) = sharded.communications
    assert (found.kind, found.axes, found.elements) == ("AllReduce", ("dp",), 4)  # 2 x 4 x (2 - 1) / 2


def test_a_pinned_operator_gets_the_layouts_that_its_rule_says():
    b, *outputs = mlp_step(np.random.default_rng(1))
    pinned = {"up.matmul": Pin(((("dp", "tp"), ()), ((), ())))}
    sharded = check(b, outputs, GRID, {}, {"x": (("dp",), ())}, pinned)
    assert sharded.layouts["x"] == ValueLayout((("dp", "tp"), ()))


def test_a_pinned_operator_gives_the_layout_that_its_rule_says():
    b, *outputs = mlp_step(np.random.default_rng(1))
    pinned = {"up.matmul": Pin(((("dp",), ()), ((), ())), ((("dp", "tp"), ()),))}
    sharded = check(b, outputs, GRID, {}, {"x": (("dp",), ())}, pinned)
    (name,) = [node.outputs[0] for node in b.graph.nodes if node.path == "up.matmul"]
    assert sharded.layouts[name] == ValueLayout((("dp", "tp"), ()))


def test_a_rule_shards_a_constant_for_its_operator():
    b, random = Builder(), np.random.default_rng(1)
    x = b.tensor("x", random.standard_normal((8, 4)))
    heads = b.constant(random.standard_normal((1, 4)))
    b.graph.nodes[-1] = replace(b.graph.nodes[-1], types=(type_of(b.values[heads]),))
    y = b.node("Mul", b.node("Mul", x, heads, path="per_head"), 2.0)
    pinned = {"per_head": Pin((((), ()), ((), ("tp",))))}
    sharded = check(b, [y], GRID, {}, {}, pinned)
    assert sharded.layouts[y] == ValueLayout(((), ("tp",)))


def test_an_operator_whose_users_take_their_parts_of_its_result_is_left_out():
    b, random = Builder(), np.random.default_rng(1)
    x, y = b.tensor("x", random.standard_normal((8, 1))), b.tensor("y", random.standard_normal((8, 4)))
    z = b.node("Mul", b.node("Tile", x, (1, 4)), b.node("Exp", y, path="exp"))
    sharded = check(b, [z], GRID, {}, {}, {"exp": Pin((((), ("tp",)),))})
    (tile,) = [node for node in sharded.graph.nodes if node.kind == "Tile"]
    assert tile.types[0].shape == (8, 4 // GRID.degrees["tp"])
    (made,) = [made for name, made in sharded.made.items() if name.startswith("Tile")]
    assert made == (tile.outputs[0], ValueLayout(((), ("tp",)))), "its value is still known by its name"


def test_a_value_is_known_by_its_name_where_its_only_user_takes_it_in_another_layout_than_its_rule():
    b, random = Builder(), np.random.default_rng(1)
    x, y = b.tensor("x", random.standard_normal((8, 1))), b.tensor("y", random.standard_normal((8, 4)))
    tiled = b.node("Tile", x, (1, 4))
    z = b.node("Mul", b.node("Exp", y), tiled, path="product")
    sharded = check(b, [z], GRID, {}, {}, {"product": Pin((((), ("dp",)), ((), ("tp",))))})
    (tile,) = [node for node in sharded.graph.nodes if node.kind == "Tile"]
    assert sharded.made[tiled] == (tile.outputs[0], ValueLayout(((), ("dp",))))


def test_a_rule_that_speaks_of_other_dims_than_an_operator_has_is_refused_with_its_line():
    b, *_ = mlp_step(np.random.default_rng(1))
    pinned = {"up.matmul": Pin(((("dp",), (), ()), ((), ())), source="rules.yaml:7")}
    with pytest.raises(PartitionError, match=r"rules\.yaml:7: up\.matmul, MatMul: input 1 has shape .* has 3 dims"):
        shard_graph(b.graph, GRID, {}, {}, pinned)


def test_a_local_operator_is_run_by_each_rank_on_its_own_part():
    b = Builder()
    x = b.tensor("x", np.arange(8.0))
    b.node("Mystery", x, path="cache.pick")
    last = b.graph.nodes[-1].outputs[0]
    pinned = {"cache.pick": Pin(((("dp",),),), ((("dp",),),), local=True, source="rules.yaml:9")}
    b.graph.outputs.append(last)
    sharded = shard_graph(b.graph, GRID, {}, {}, pinned)
    assert sharded.layouts[last] == ValueLayout((("dp",),)) and not sharded.unsharded
    pinned["cache.pick"] = Pin(((("dp",),),), local=True, source="rules.yaml:9")
    with pytest.raises(PartitionError, match=r"rules\.yaml:9: cache\.pick"):
        shard_graph(b.graph, GRID, {}, {}, pinned)


def test_what_an_input_was_before_it_was_sharded_is_not_gathered_again():
    b = Builder()
    x = b.tensor("x", np.arange(48.0).reshape(12, 4))
    part = b.node("StridedSlice", x, (6, 0), (12, 4), (1, 1))
    sharded = check(b, [part], GRID, {}, {x: (("dp",), ())})
    assert [c.consumer for c in sharded.communications] == ["an output of the graph"]
    assert sharded.layouts[part] == ValueLayout((("dp",), ()))


def test_a_rule_for_an_operator_leaves_the_parameter_that_is_written_where_it_is():
    b, *_, dw1, _, _ = mlp_step(np.random.default_rng(1))
    new = b.node("Assign", "w1", b.node("Sub", "w1", b.node("Muls", dw1, 0.1)), side_effect_mem=True)
    pinned = {"up.matmul": Pin(((("dp",), ()), ((), ())))}
    sharded = check(b, [new], GRID, {"w1": (("tp",), ())}, {"x": (("dp",), ())}, pinned)
    (written,) = [node for node in sharded.graph.nodes if node.kind == "Assign"]
    assert written.inputs[0] == "w1"


def test_a_sharded_parameter_is_updated_by_its_own_part_of_a_gradient():
    b, *_, dw1, dw2, _ = mlp_step(np.random.default_rng(1))
    new = [
        b.node("Assign", name, b.node("Sub", name, b.node("Muls", g, 0.1)), side_effect_mem=True)
        for name, g in (("w1", dw1), ("w2", dw2))
    ]
    sharded = check(b, new, GRID, {"w1": (("tp", "dp"), ()), "w2": (("dp",), ("tp",))}, {"x": (("dp",), ())})
    kinds = [c.kind for c in sharded.communications]
    assert "ReduceScatter" in kinds


def test_no_copy_of_a_parameter_outlives_what_it_was_made_of():
    b = Builder()
    w = b.tensor("w", np.arange(8.0).reshape(4, 2), True)
    before = b.node("ReverseV2", w, (0,))  # gathers dim 0
    b.node("Assign", w, b.node("Muls", w, 2.0), side_effect_mem=True)
    after = b.node("ReverseV2", w, (0,))
    b.graph.outputs = [before, after]
    sharded = shard_graph(b.graph, GRID, {"w": (("dp",), ())}, {})
    gathers = [node for node in sharded.graph.nodes if node.kind == "AllGather" and node.inputs[0] == "w"]
    assert len(gathers) == 2


def test_a_write_that_is_not_element_by_element_is_refused_of_a_sharded_parameter():
    b = Builder()
    w, rows = b.tensor("w", np.zeros((4, 2)), True), b.tensor("rows", np.ones((2, 2)))
    b.graph.nodes.append(
        Node("Scatter", (w, rows), ("y",), (TensorType((4, 2), "float64"),), {"side_effect_mem": True})
    )
    b.graph.outputs = ["y"]
    with pytest.raises(PartitionError, match="leave that parameter unsharded"):
        shard_graph(b.graph, GRID, {"w": (("dp",), ())}, {})


@pytest.mark.parametrize("of_state", [(), ((), ("dp",)), (("dp",), ())], ids=str)
def test_a_state_that_is_written_beside_a_weight_lies_as_that_does(of_state):
    """A rank would write a slice of it that nobody reads again."""
    b = Builder()
    w, state = (b.tensor(name, np.ones((4, 2)), True) for name in ("net.w", "own"))
    g = b.tensor("g", np.ones((4, 2)))
    kind = ("ApplyMomentum", (w, state, g), ("y",), (TensorType((4, 2), "float64"),), {"side_effect_mem": True})
    b.graph.nodes.append(Node(*kind))
    b.graph.outputs = ["y"]
    layouts = {"net.w": (("dp",), ()), **({"own": of_state} if of_state else {})}
    if of_state == layouts["net.w"]:
        (written,) = [
            node for node in shard_graph(b.graph, GRID, layouts, {}).graph.nodes if node.kind == "ApplyMomentum"
        ]
        assert written.inputs[:2] == ("net.w", "own")
        return
    with pytest.raises(PartitionError, match=r"own is not sharded as net\.w is, .* its name is PREFIX\.net\.w"):
        shard_graph(b.graph, GRID, layouts, {})


def test_a_sharded_parameter_is_not_handed_as_a_copy_to_an_operator_that_may_write_it():
    b = Builder()
    w = b.tensor("w", np.ones((4, 2)), True)
    mystery = b.node("Mystery", w)
    check(b, [mystery], GRID)  # replicated: it may
    with pytest.raises(PartitionError, match="is given w itself and may write it: leave that parameter unsharded"):
        shard_graph(b.graph, GRID, {"w": (("dp",), ())}, {})


def before(graph, name):
    """Outputs of the nodes that a value needs, its own included."""
    by_output, found, todo = {out: n for n in graph.nodes for out in n.outputs}, set(), [name]
    while todo:
        node = by_output.get(todo.pop())
        if node and node.outputs not in found:
            found.add(node.outputs)
            todo += node.flat_inputs()
    return found


def batch_norm(x, scale, shift, moving_mean, moving_variance, *_):
    mean, variance = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
    y = (x - mean) / np.sqrt(variance + 0.1) * scale[:, None] + shift[:, None]
    return y, mean.reshape(-1), variance.reshape(-1), mean.reshape(-1), 1 / np.sqrt(variance + 0.1).reshape(-1)


def batch_norm_grad(dy, x, scale, mean, inverse, *_):
    normal = (x - mean[:, None]) * inverse[:, None]
    d = dy * scale[:, None]
    means = [(a.mean((0, 2), keepdims=True)) for a in (d, d * normal)]
    dx = inverse[:, None] * (d - means[0] - normal * means[1])
    return dx, (dy * normal).sum((0, 2)), dy.sum((0, 2))


@pytest.mark.parametrize("dims", [(("dp",), (), ()), (("dp",), ("tp",), ()), (("dp", "tp"), (), ()), ((), (), ("dp",))])
def test_a_batch_norm_takes_the_mean_of_the_whole_batch(dims, monkeypatch):
    more = {
        "BatchNorm": batch_norm,
        "BatchNormGrad": batch_norm_grad,
        "Depend": lambda x, *_: x,
        "Rsqrt": lambda x: x**-0.5,
    }
    monkeypatch.setattr("graphs.COMPUTE_ALL", {**COMPUTE_ALL, **more})
    random = np.random.default_rng(5)
    b = Builder()
    x, dy = (b.tensor(name, random.standard_normal((8, 4, 6))) for name in ("x", "dy"))
    weights = [b.tensor(name, random.random(4), True) for name in ("scale", "shift", "mean", "variance")]
    given = (x, *weights, True, 0.1, 0.25, 0)
    y = b.node("BatchNorm", *given, "x", side_effect_mem=True)  # its last input only says what it waits for
    dx = b.node("BatchNormGrad", dy, x, "scale", y[:-1] + "3", y[:-1] + "4", y[:-1] + "4", True, 0.1, 0)
    sharded = check(b, [y, y[:-1] + "3", dx, dx[:-1] + "1", dx[:-1] + "2"], GRID, {}, {"x": dims, "dy": dims})
    # An update of the scale by its gradient waits until nobody reads the old one, of which a Reshape is a view.
    backward = before(sharded.graph, sharded.graph.outputs[2])
    views = {"scale"}
    for n in sharded.graph.nodes:
        views |= {n.outputs[0]} if n.kind in ("Reshape", "Depend") and n.inputs[0] in views else set()
    readers = {n.outputs for n in sharded.graph.nodes if views & set(n.flat_inputs())}
    assert len(readers & backward) >= 2
    assert readers & backward <= before(sharded.graph, sharded.graph.outputs[3])
    held = on_all_ranks(sharded, b, {}, GRID)
    written = {n.inputs[0]: held[n.outputs[0]] for n in sharded.graph.nodes if n.kind == "Assign"}
    whole, count = b.values["x"], 8 * 6
    for rank in range(GRID.size):
        expected = 0.75 * b.values["mean"] + 0.25 * whole.mean((0, 2))
        np.testing.assert_allclose(written["mean"][rank], expected, rtol=1e-12)
        expected = 0.75 * b.values["variance"] + 0.25 * whole.var((0, 2)) * count / (count - 1)
        np.testing.assert_allclose(written["variance"][rank], expected, rtol=1e-12)


def test_a_batch_norm_reads_its_parameters_after_what_it_waits_for(monkeypatch):
    """It is given these as they stand: an optimizer before it in the graph writes them."""
    more = {"BatchNorm": batch_norm, "BatchNormGrad": batch_norm_grad, "Depend": lambda x, *_: x}
    monkeypatch.setattr("graphs.COMPUTE_ALL", {**COMPUTE_ALL, **more})
    random, b = np.random.default_rng(5), Builder()
    x, dy = (b.tensor(name, random.standard_normal((8, 4, 6))) for name in ("x", "dy"))
    weights = [b.tensor(name, random.random(4), True) for name in ("scale", "shift", "mean", "variance")]
    state = b.tensor("state", np.zeros(()))
    y = b.node("BatchNorm", x, *weights, True, 0.1, 0.25, 0, state, side_effect_mem=True)
    b.node("BatchNormGrad", dy, x, "scale", y[:-1] + "3", y[:-1] + "4", y[:-1] + "4", True, 0.1, 0)
    sharded = shard_graph(b.graph, GRID, {}, {"x": (("dp",), (), ()), "dy": (("dp",), (), ())})
    read = [node for node in sharded.graph.nodes if set(weights) & set(node.flat_inputs()) and node.kind != "Assign"]
    assert {node.kind for node in read} == {"Depend"}
    after = [(node.inputs[0], "state" if "state" in node.inputs else "dy") for node in read]
    assert sorted(after) == sorted([*((name, "state") for name in weights), ("scale", "dy")])
    behind_dy = {"dy"} | {out for node in sharded.graph.nodes if "dy" in node.inputs for out in node.outputs}
    assert all(set(node.inputs[1:]) & ({"state"} | behind_dy) for node in read)


def test_so_it_is_where_a_sharded_one_must_be_gathered():
    random, b = np.random.default_rng(5), Builder()
    x = b.tensor("x", random.standard_normal((8, 4, 6)))
    weights = [b.tensor(name, random.random(4), True) for name in ("scale", "shift", "mean", "variance")]
    types = (TensorType((8, 4, 6), "float64"), *(TensorType((4,), "float64"),) * 4)
    b.tensor("state", np.zeros(()))
    known = [b.constant(each) for each in (False, 0.1, 0.25, 0)]
    outputs = tuple(f"y#{i}" for i in range(5))
    b.graph.nodes.append(Node("BatchNorm", (x, *weights, *known, "state"), outputs, types, {"side_effect_mem": True}))
    b.graph.outputs = ["y#0"]
    graph = shard_graph(b.graph, GRID, {"scale": (("dp",),)}, {"x": (("dp",), (), ())}).graph
    (gathered,) = [node for node in graph.nodes if node.kind == "AllGather" and node.types[0].shape == (4,)]
    (waiting,) = [node for node in graph.nodes if node.outputs == gathered.inputs]
    assert (waiting.kind, waiting.inputs) == ("Depend", ("scale", "state"))


def test_ranks_that_hold_the_same_drop_the_same(monkeypatch):
    """Each draws anew here, as with other seeds: what counts is what the first one drew."""
    random = np.random.default_rng(6)

    def dropout(x, keep, *_):
        mask = (random.random(x.shape) < keep).astype(float)
        return x * mask / keep, mask

    def gradient(dy, mask, keep_prob):
        return dy * mask / keep_prob

    more = {"Dropout": dropout, "DropoutGrad": gradient, "BroadcastTo": lambda x, shape: np.broadcast_to(x, shape)}
    monkeypatch.setattr("graphs.COMPUTE_ALL", {**COMPUTE_ALL, **more})
    b = Builder()
    x = b.tensor("x", random.standard_normal((8, 6)))
    y = b.node("Dropout", b.node("Square", x), 0.5, 0, 0, side_effect_hidden=True)
    back = b.node("DropoutGrad", b.node("Square", y), y[:-1] + "1", keep_prob=0.5)
    b.graph.outputs = [y, y[:-1] + "1", back]
    sharded = shard_graph(b.graph, GRID, {}, {"x": (("dp",), ("tp",))})
    held = on_all_ranks(sharded, b, {}, GRID)
    assert not sharded.unsharded
    dropped, mask, gradients = (held[name] for name in sharded.graph.outputs)
    for of_rank in range(GRID.size):
        np.testing.assert_array_equal(mask[of_rank], mask[0])
        np.testing.assert_allclose(dropped[of_rank], b.values["x"] ** 2 * mask[0] / 0.5)
        np.testing.assert_allclose(gradients[of_rank], dropped[of_rank] ** 2 * mask[0] / 0.5)
    assert 0 < mask[0].sum() < mask[0].size


def test_whole_numbers_that_ranks_draw_each_by_themselves_are_refused():
    b = Builder()
    b.graph.nodes.append(Node("Draw", (), ("y",), (TensorType((4,), "int32"),), {"side_effect_hidden": True}))
    b.graph.outputs = ["y"]
    with pytest.raises(PartitionError, match="draw floats and convert them"):
        shard_graph(b.graph, GRID, {}, {})


def test_a_copy_of_a_value_is_written_only_if_nobody_else_looks_at_it():
    b = Builder()
    x = b.tensor("x", np.ones((4, 2)))
    b.node("Square", x)
    for name in ("square", "again"):
        b.graph.nodes.append(Node("Write", (x,), (name,), (TensorType((4, 2), "float64"),), {"side_effect_mem": True}))
    b.graph.outputs = ["square"]
    with pytest.raises(PartitionError, match="writes a value that others use, too"):
        shard_graph(b.graph, GRID, {}, {"x": (("dp",), ())})
    del b.graph.nodes[-1], b.graph.nodes[0]
    assert shard_graph(b.graph, GRID, {}, {"x": (("dp",), ())}).unsharded == {"Write": 1}


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_in_random_layouts(seed):
    """A dozen operators, each on values that are there: sums stay pending over several of them."""
    draw, random = Draw(seed), np.random.default_rng(seed)
    grid = DeviceGrid([{"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 3, "dp": 2}, {"dp": 2, "cp": 2, "tp": 2}][seed % 4])
    axes = list(grid.degrees)
    b = Builder()
    names = [b.tensor(f"x{i}", draw.of(12, 12)) for i in range(2)]
    names += [b.tensor(f"w{i}", draw.of(12, 12), True) for i in range(2)]

    def random_dims():
        places = {axis: int(random.integers(-1, 2)) for axis in axes}
        wanted = [[a for a in axes if places[a] == dim] for dim in range(2)]
        return fitted(wanted, (12, 12), grid)

    for _ in range(12):
        kind = str(random.choice(["Add", "Sub", "Mul", "MatMul", "AddN", "Transpose", "Tanh", "Maximum", "Scaled"]))
        x, y, z = (str(n) for n in random.choice(names, 3))
        if kind == "MatMul":
            names.append(b.node("Tanh", b.node("MatMul", x, y, draw.flag(), draw.flag())))
            names.append(b.node("MatMul", x, y, draw.flag(), draw.flag()))
        elif kind == "AddN":
            names.append(b.node("AddN", (x, y, z)))
        elif kind == "Transpose":
            names.append(b.node("Transpose", x, (1, 0)))
        elif kind == "Scaled":
            names.append(b.node("Mul", x, b.node("ReduceSum", y, (int(random.integers(2)),), True)))
        else:
            names.append(b.node(kind, x) if kind == "Tanh" else b.node(kind, x, y))
        if np.abs(b.values[names[-1]]).max() > 1e4:
            names.append(b.node("Tanh", names.pop()))
    parameters = {name: random_dims() for name in b.graph.parameters}
    check(b, names[4:], grid, parameters, {name: random_dims() for name in b.graph.inputs})


def test_the_samples_of_all_kinds_are_computed_here_too():
    assert set(SAMPLES) <= set(COMPUTE)


@pytest.mark.parametrize(
    ("before", "after", "used", "pending"),
    [
        ("bfloat16", "float32", False, True),
        ("float16", "float32", False, True),
        ("float32", "bfloat16", False, False),  # rounds: a sum of rounded numbers is another one
        ("bfloat16", "int32", False, False),
        ("bfloat16", "float32", True, False),  # something else wants it added up at once
    ],
)
def test_gradients_are_added_up_after_they_are_widened(before, after, used, pending):
    """Once for all microbatches, and in the wider type; nothing but outputs may be made of the cast."""
    wide, narrow = TensorType((4, 4), after), TensorType((4, 4), before)
    x, loss = TensorType((8, 4), before), TensorType((), after)
    constants = [
        Node("Constant", (), (name,), (None,), value=value) for name, value in (("f", False), ("t", True), ("d", ()))
    ]
    nodes = [
        *constants,
        Node("MatMul", ("x", "dy", "t", "f"), ("dw",), (narrow,)),
        Node("Cast", ("dw", "f"), ("gradient",), (wide,)),
        Node("ReduceSum", ("gradient" if used else "w", "d", "f"), ("loss",), (loss,)),
    ]
    graph = Graph({"w": wide}, {"x": x, "dy": x}, nodes, ["loss", "gradient"])
    rows = (("dp",), ())
    sharded = shard_graph(graph, GRID, {}, {"x": rows, "dy": rows}, gathers_outputs=False)
    assert sharded.layouts["gradient"].partial == ({"dp"} if pending else set())
    assert [c.dtype for c in sharded.communications] == ([] if pending else [before])
