# SPDX-License-Identifier: Apache-2.0
"""The layer of experts against reference outputs and against NumPy, forward and gradients."""

import dataclasses
import json
import math

import mindspore as ms
import numpy as np
import pytest
from conftest import shared
from mindspore import Tensor, nn, ops

from sporeloom.models.config import ModelConfig
from sporeloom.models.parameters import decoder_specs
from sporeloom.nn.decoder import Decoder
from sporeloom.nn.moe import MoE
from sporeloom.nn.routing import HashRouter

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
    """sum(output * weights) + the router's losses, what the reference takes gradients of; and the output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x, tokens, shares, output_gradient):
        y, losses = self.layer(x, tokens, shares)
        objective = ops.ReduceSum()(y * output_gradient)
        return (objective if losses is None else objective + losses[0]), y


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
    specs = decoder_specs(config).within(f"{config.layers[0]}.mlp")
    return MoE(config, specs, ms.float32, 0).set_train()


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
    ((objective, output), (of_x, of_weights)) = ms.value_and_grad(net, 0, weights, has_aux=True)(*inputs)
    gradients = {w.name.removeprefix("layer."): g.asnumpy() for w, g in zip(weights, of_weights, strict=True)}
    return (
        output.asnumpy().reshape(x.shape),
        float(objective.asnumpy()),
        {"x": of_x.asnumpy().reshape(x.shape), **gradients},
    )


def variants():
    try:
        return json.loads((shared(CASE) / "config.json").read_text())["variants"]
    except pytest.skip.Exception:
        return [{"name": "absent"}]


@pytest.mark.parametrize("variant", variants(), ids=lambda v: v["name"])
def test_switch(variant):
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


@dataclasses.dataclass
class Case:
    """A layer of experts and its batch, drawn at random."""

    experts: dict
    gated: bool
    batch: int
    length: int
    d: int
    ffn: int
    values: dict
    x: np.ndarray
    shares: np.ndarray
    output_gradient: np.ndarray


def random_case(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 4))
    router = ["softmax", "grouped", "sigmoid"][seed % 3]
    num_experts = k * int(rng.integers(2, 4)) if router == "grouped" else int(rng.integers(max(k, 2), 8))
    batch, length = int(rng.integers(1, 4)), int(rng.choice([6, 8, 12]))
    group = int(rng.choice([length // 2, length, batch * length]))
    capacity = [None, 0.6, 1.0, 1.5][seed % 4]
    normalize = ["none", "before_drop", "after_drop"][seed // 3 % 3]
    experts = {
        "num_experts": num_experts,
        "experts_per_token": k,
        "router": router,
        "normalize": "before_drop" if capacity is None and normalize == "after_drop" else normalize,
        "capacity_factor": capacity,
        "capacity_group": group,
        "router_scale": seed % 5 == 0,
        "routed_scaling_factor": 2.5 if seed % 4 == 1 else 1.0,
        "balance": ["all", "first"][seed // 2 % 2],
        "balance_over": ["group", "batch"][seed // 5 % 2],
        "balance_loss": 0.05,
        "router_z_loss": 0.01 * (seed % 2),
        "balance_bias_rate": 0.1 * (seed % 6 == 5),
        "shared_ffn_hidden_size": 10 * (seed % 3 == 1),
    }
    d, ffn, gated = 8, 12, seed % 2 == 0
    wide = {"gate": (ffn, d), "up": (ffn, d), "down": (d, ffn)} if gated else {"up": (ffn, d), "down": (d, ffn)}
    shapes = {"router.weight": (num_experts, d)}
    shapes |= {f"experts.{name}.weight": (num_experts, *shape) for name, shape in wide.items()}
    if not gated:
        shapes |= {"experts.up.bias": (num_experts, 1, ffn), "experts.down.bias": (num_experts, 1, d)}
    if experts["router_scale"]:
        shapes["weights.scale"] = (1, num_experts)
    if experts["balance_bias_rate"]:
        shapes["choices.balance_bias"] = (num_experts,)
    if width := experts["shared_ffn_hidden_size"]:
        narrow = {"gate": (width, d), "up": (width, d), "down": (d, width)}
        shapes |= {f"shared.{name}.weight": narrow[name] for name in wide}
        shapes |= {} if gated else {"shared.up.bias": (width,), "shared.down.bias": (d,)}
    values = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    groups = batch * length // group
    shares = rng.random(groups)
    x, gradient = rng.normal(size=(batch, length, d)), rng.normal(size=(batch, length, d))
    return Case(experts, gated, batch, length, d, ffn, values, x, shares / shares.sum(), gradient)


def mlp(values, prefix, x, gated, expert=None):
    def of(name):
        value = values[prefix + name]
        return value if expert is None else value[expert]

    if gated:
        a = of("gate.weight") @ x
        return of("down.weight") @ (a / (1 + np.exp(-a)) * (of("up.weight") @ x))
    a = of("up.weight") @ x + of("up.bias").reshape(-1)
    phi = 0.5 * (1 + np.vectorize(math.erf)(a / math.sqrt(2)))
    return of("down.weight") @ (a * phi) + of("down.bias").reshape(-1)


def reference(case, values, x):
    """Output, objective and choices dropped, token by token in float64."""
    settings, rows = case.experts, x.reshape(-1, case.d)
    num_experts, k, group = settings["num_experts"], settings["experts_per_token"], settings["capacity_group"]
    capacity = group
    if settings["capacity_factor"] is not None:
        capacity = min(group, math.ceil(k * group * settings["capacity_factor"] / num_experts))
    logits = rows @ values["router.weight"].T
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probs = 1 / (1 + np.exp(-logits)) if settings["router"] == "sigmoid" else shifted / shifted.sum(1, keepdims=True)
    judged = probs + values.get("choices.balance_bias", 0.0)
    choices = []
    for scores in judged:
        if settings["router"] == "grouped":
            size = num_experts // k
            choices.append([g * size + int(scores[g * size : (g + 1) * size].argmax()) for g in range(k)])
        else:
            choices.append(list(np.argsort(-scores, kind="stable")[:k]))
    output, losses, dropped = np.zeros_like(rows), [], 0
    for start in range(0, len(rows), group):
        taken, kept = np.zeros(num_experts, int), set()
        for j in range(k):  # all first choices before all second ones
            for t in range(start, start + group):
                if taken[choices[t][j]] < capacity:
                    kept.add((t, j))
                taken[choices[t][j]] += 1
        dropped += k * group - len(kept)
        for t in range(start, start + group):
            weights = np.array([probs[t, e] for e in choices[t]])
            mine = np.array([(t, j) in kept for j in range(k)])
            if settings["normalize"] == "after_drop":
                weights = weights * mine / ((weights * mine).sum() + 1e-9)
            elif settings["normalize"] == "before_drop":
                weights = weights / (weights.sum() + 1e-9) * mine
            else:
                weights = weights * mine
            for j in range(k):
                factor = weights[j] * settings["routed_scaling_factor"]
                if settings["router_scale"]:
                    factor = factor * values["weights.scale"][0, choices[t][j]]
                if mine[j]:
                    output[t] += factor * mlp(values, "experts.", rows[t], case.gated, choices[t][j])
    if settings["shared_ffn_hidden_size"]:
        output += np.stack([mlp(values, "shared.", row, case.gated) for row in rows])

    def balance(of):
        counted = [e for t in of for e in (choices[t] if settings["balance"] == "all" else choices[t][:1])]
        share = np.bincount(counted, minlength=num_experts) / len(counted)
        return num_experts * (share * probs[of].mean(0)).sum()

    z = np.log(np.exp(logits).sum(1)) ** 2
    for index, start in enumerate(range(0, len(rows), group)):
        tokens = list(range(start, start + group))
        over = list(range(len(rows))) if settings["balance_over"] == "batch" else tokens
        losses.append(case.shares[index] * settings["balance_loss"] * balance(over))
        losses.append(case.shares[index] * settings["router_z_loss"] * z[tokens].mean())
    output = output.reshape(x.shape)
    return output, (output * case.output_gradient).sum() + sum(losses), dropped


@pytest.mark.parametrize("seed", range(8))
def test_random_layers_against_numpy(seed):
    case = random_case(seed)
    layer = layer_of(case.d, case.ffn, case.gated, **case.experts)
    assert not weights_of(layer, case.values)
    output, objective, gradients = outputs_and_gradients(
        layer, case.x.astype(np.float32), case.shares, case.output_gradient
    )
    wanted, wanted_objective, dropped = reference(case, case.values, case.x)
    np.testing.assert_allclose(output, wanted, atol=1e-5)
    assert objective == pytest.approx(wanted_objective, abs=1e-4)
    assert (dropped > 0) <= (case.experts["capacity_factor"] is not None)
    rng, step = np.random.default_rng(seed), 1e-6
    for name in gradients:  # along one direction of each tensor
        value = case.x if name == "x" else case.values[name]
        direction = rng.normal(size=value.shape)

        def at(distance, name=name, value=value, direction=direction):
            moved = {**case.values, name: value + distance * direction}
            return reference(case, moved, moved.pop("x", case.x))[1]

        slope = (at(step) - at(-step)) / (2 * step)
        assert (gradients[name] * direction).sum() == pytest.approx(slope, rel=1e-4, abs=1e-4), name


def hashed(**experts):
    """A model of two layers whose experts go by the token's id and domain."""
    settings = {"num_experts": 6, "experts_per_token": 1, "router": "hash", "num_domains": 3, **experts}
    sizes = {"vocab_size": 24, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "seq_len": 16}
    return ModelConfig(**sizes, query_layer=False, dropout_rate=0.0, experts=settings)


@pytest.mark.parametrize("domain", [0, 1, 2])
def test_a_token_goes_to_an_expert_of_its_domain(domain):
    ids = np.arange(3 * 24, dtype=np.int32).reshape(3, 24)  # each id in each domain, the model's own first
    choices = HashRouter(hashed(domain=domain), 1)(Tensor(ids), 3, 24).asnumpy()[..., 0]
    for row, experts in enumerate(choices):
        group = (domain + row) % 3
        assert np.bincount(experts, minlength=6).tolist() == [12 if e // 2 == group else 0 for e in range(6)]
        again = HashRouter(hashed(domain=group), 1)(Tensor(ids[:1]), 1, 24).asnumpy()[0, :, 0]
        np.testing.assert_array_equal(experts, again)
    np.testing.assert_array_equal(
        HashRouter(hashed(num_domains=1), 1)(Tensor(ids[:1]), 1, 24).asnumpy()[0, :, 0],
        np.random.default_rng(np.random.SeedSequence([0, 1])).permutation(24) % 6,
    )


def test_ids_of_a_domain_give_what_a_model_of_that_domain_gives():
    config, rng = hashed(), np.random.default_rng(0)
    tokens, positions = rng.integers(0, 24, (2, 16)), Tensor(np.tile(np.arange(16, dtype=np.int32), (2, 1)))
    nets = [Decoder(config.with_domain(domain)).set_train(False) for domain in (0, 2)]
    for net in nets:
        weights_of(
            net, {p.name: np.random.default_rng(i).normal(0, 0.2, p.shape) for i, p in enumerate(net.get_parameters())}
        )

    def logits(net, ids):
        return net(Tensor(ids.astype(np.int32)), positions).asnumpy()

    of_first, of_last = logits(nets[0], tokens), logits(nets[1], tokens)
    assert np.abs(of_first - of_last).max() > 0.01
    np.testing.assert_allclose(logits(nets[0], tokens + 2 * 24), of_last, atol=1e-6)
    mixed = tokens + np.array([[2 * 24], [0]])
    np.testing.assert_allclose(logits(nets[0], mixed)[:16], of_last[:16], atol=1e-6)
    np.testing.assert_allclose(logits(nets[0], mixed)[16:], of_first[16:], atol=1e-6)
