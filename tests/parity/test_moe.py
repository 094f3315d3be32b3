# SPDX-License-Identifier: Apache-2.0
"""The layer of experts against reference outputs and against NumPy, forward and gradients."""

import json
import math

import mindspore as ms
import numpy as np
import pytest
from conftest import shared
from mindspore import Tensor, nn, ops

from mindloom.models.config import ModelConfig
from mindloom.nn.moe import MoE

CASE = "golden_modern/switch_moe_case_a"
NAMES = {
    "router": "router.weight",
    "w_gate": "experts.gate.weight",
    "w_up": "experts.up.weight",
    "w_down": "experts.down.weight",
    "w1": "experts.up.weight",
    "b1": "experts.up.bias",
    "w2": "experts.down.weight",
    "b2": "experts.down.bias",
}


ms.set_context(mode=ms.GRAPH_MODE)


class Objective(nn.Cell):
    """sum(output * weights) + the router's losses: what the reference takes gradients of."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x, tokens, shares, output_gradient):
        y, losses = self.layer(x, tokens, shares)
        objective = ops.ReduceSum()(y * output_gradient)
        return objective if losses is None else objective + losses[0]


def layer_of(d, ffn, gated, **experts):
    activation = {"activation": "silu", "gated_mlp": True, "mlp_bias": False} if gated else {"activation": "gelu"}
    config = ModelConfig(
        vocab_size=64,
        hidden_size=d,
        num_layers=1,
        num_heads=1,
        query_layer=False,
        ffn_hidden_size=ffn,
        dropout_rate=0.0,
        experts=experts,
        **activation,
    )
    return MoE(config, 0, ms.float32).set_train()


def weights_of(layer, values):
    own = {parameter.name: parameter for parameter in layer.get_parameters()}
    for name, value in values.items():
        parameter = own.pop(name)
        parameter.set_data(Tensor(value.astype(np.float32).reshape(parameter.shape)))
    return own


def outputs_and_gradients(layer, x, shares, output_gradient):
    """Layer's output, objective and gradients by parameter, with that of x."""
    batch, length, d = x.shape
    tokens = Tensor(np.zeros((batch, length), np.int32))
    rows, net = Tensor(x.reshape(-1, d)), Objective(layer)
    weights = ms.ParameterTuple(layer.trainable_params())
    inputs = (rows, tokens, Tensor(shares.astype(np.float32)), Tensor(output_gradient.reshape(-1, d)))
    grad = ops.GradOperation(get_all=True, get_by_list=True)(net, weights)
    (of_x, *_), of_weights = grad(*inputs)
    output = layer(rows, tokens)[0].asnumpy().reshape(x.shape)
    gradients = {w.name.removeprefix("layer."): g.asnumpy() for w, g in zip(weights, of_weights, strict=True)}
    return output, float(net(*inputs).asnumpy()), {"x": of_x.asnumpy().reshape(x.shape), **gradients}


def variants():
    try:
        return json.loads((shared(CASE) / "config.json").read_text())["variants"]
    except pytest.skip.Exception:
        return [{"name": "absent"}]


@pytest.mark.parametrize("variant", variants(), ids=lambda v: v["name"])
@pytest.mark.parametrize("balance", ["all"])
def test_switch(variant, balance):
    folder = shared(CASE)
    config = json.loads((folder / "config.json").read_text())
    golden = dict(np.load(folder / "golden.npz"))
    name, gated, by_row = variant["name"], variant["expert"] == "swiglu", variant["groups"] == "row"
    x, batch, length = golden["x"].astype(np.float32), config["batch"], config["seq"]
    layer = layer_of(
        config["hidden"],
        config["expert_ffn"],
        gated,
        num_experts=config["num_experts"],
        experts_per_token=variant["k"],
        normalize=variant["norm"],
        capacity_factor=variant["cf"],
        capacity_group=length if by_row else batch * length,
        balance=balance,
        balance_loss=config["aux_coef"],
        router_z_loss=config["z_coef"],
    )
    used = {k: v for k, v in NAMES.items() if f"{name}.grad.{k}" in golden}
    assert not weights_of(layer, {ours: golden[f"w.{theirs}"] for theirs, ours in used.items()})
    groups = batch if by_row else 1
    output, objective, gradients = outputs_and_gradients(
        layer, x, np.full(groups, 1 / groups), golden["output_gradient"].astype(np.float32)
    )
    np.testing.assert_allclose(output, golden[f"{name}.output"], atol=1e-5)
    assert objective == pytest.approx(float(golden[f"{name}.objective"]), abs=1e-4, rel=1e-5)
    for theirs, ours in {"x": "x", **used}.items():
        wanted = golden[f"{name}.grad.{theirs}"].reshape(gradients[ours].shape)
        np.testing.assert_allclose(gradients[ours], wanted, atol=2e-5, err_msg=theirs)
