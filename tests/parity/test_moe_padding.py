# SPDX-License-Identifier: Apache-2.0
"""Padding is no token of a layer of experts: of the same texts in longer rows the same choices are dropped. Where a model is
compared with another, or with itself, nothing is dropped."""

import dataclasses
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from test_moe import layer_of, random_case, reference, weights_of

from sporeloom.data.batch import make_batch
from sporeloom.data.examples import Example, example_batch
from sporeloom.models.config import NO_LABEL, ModelConfig
from sporeloom.models.family import family_module
from sporeloom.nn.objectives import PairwiseReward, Policy, Preference
from sporeloom.nn.routing import TokenGroups
from sporeloom.train.metrics import expert_metrics

ms.set_context(mode=ms.GRAPH_MODE)


class Padded(nn.Cell):
    """sum(output * weights) + the router's losses, and the output, of tokens that their labels tell from padding."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.token_groups = layer, TokenGroups(layer.config)

    def construct(self, x, labels, tokens, shares, output_gradient):
        y, losses = self.layer(x, tokens, shares, None, self.token_groups(labels, tokens))
        return ops.ReduceSum()(y * output_gradient) + losses[0], y


def padded(x, lengths, width, fill):
    """Rows (B, L, D) of which the first `lengths` are real -> (B, width, D); elsewhere what `fill` draws."""
    found = fill((len(x), width, x.shape[2]))
    for row, length in enumerate(lengths):
        found[row, :length] = x[row, :length]
    return found


def of_rows(case, values, lengths):
    """Objective, choices dropped, and entropies added up, of each row alone, without padding."""
    objective, dropped, entropy = 0.0, 0, 0.0
    for row, length in enumerate(lengths):
        alone = dataclasses.replace(
            case,
            experts={**case.experts, "capacity_group": int(length)},
            shares=case.shares[row : row + 1],
            output_gradient=case.output_gradient[row : row + 1, :length],
        )
        x = case.x[row : row + 1, :length]
        _, own, lost = reference(alone, values, x)
        logits = x[0] @ values["router.weight"].T
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        if case.experts["router"] == "sigmoid":
            probs = 1 / (1 + np.exp(-logits))
            probs /= probs.sum(1, keepdims=True)
        objective, dropped, entropy = objective + own, dropped + lost, entropy - (probs * np.log(probs)).sum()
    return objective, dropped, entropy


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6, 11])
def test_a_layer_does_not_see_padding(seed):
    """Against NumPy on the rows without it: output, objective, gradients, and what is counted."""
    case, draw = random_case(seed), np.random.default_rng(100 + seed)
    case.experts |= {"capacity_group": None, "balance_over": "group"}
    case.shares = draw.random(case.batch)
    width = case.length + 5
    lengths = draw.integers(1, case.length + 1, case.batch)
    layer = layer_of(case.d, case.ffn, case.gated, **case.experts)
    layer.attach_counter("count")
    left = weights_of(layer, case.values)
    assert set(left) == {"count"}
    x = padded(case.x, lengths, width, lambda shape: draw.normal(0, 5, shape)).astype(np.float32)
    gradient = padded(case.output_gradient, lengths, width, np.zeros).astype(np.float32)
    labels = np.where(np.arange(width) < lengths[:, None], 1, NO_LABEL).astype(np.int32)
    rows, by_row = x.reshape(-1, case.d), gradient.reshape(-1, case.d)
    inputs = (rows, labels, np.zeros_like(labels), case.shares.astype(np.float32), by_row)
    net, weights = Padded(layer), ms.ParameterTuple(layer.trainable_params())
    ((objective, _), (of_x, of_weights)) = ms.value_and_grad(net, 0, weights, has_aux=True)(*map(Tensor, inputs))
    wanted, dropped, entropy = of_rows(case, case.values, lengths)
    assert float(objective.asnumpy()) == pytest.approx(wanted, abs=1e-4)
    gradients = {w.name.removeprefix("layer."): g.asnumpy() for w, g in zip(weights, of_weights, strict=True)}
    counts = gradients.pop(next(name for name in gradients if name.endswith("count")))
    k = case.experts["experts_per_token"]
    assert counts[:-2].sum() == k * lengths.sum() and counts[-2] == dropped
    assert counts[-1] == pytest.approx(entropy, rel=1e-4)
    of_padding = of_x.asnumpy().reshape(x.shape)[labels == NO_LABEL]
    np.testing.assert_array_equal(of_padding, 0)
    step = 1e-6
    for name, value in gradients.items():
        direction = draw.normal(size=value.shape)

        def at(distance, name=name, direction=direction):
            moved = case.values[name] + distance * direction.reshape(case.values[name].shape)
            return of_rows(case, {**case.values, name: moved}, lengths)[0]

        slope = (at(step) - at(-step)) / (2 * step)
        assert (value * direction).sum() == pytest.approx(slope, rel=1e-4, abs=1e-4), name


BOTH = {"balance_loss": 0.1, "router_z_loss": 0.01}
MODELS = {
    "switch": {"num_experts": 4, "experts_per_token": 1, "capacity_factor": 0.75, **BOTH},
    "gshard": {"num_experts": 6, "experts_per_token": 2, "capacity_factor": 0.8, "normalize": "after_drop", **BOTH},
    "whole batch": {"num_experts": 4, "experts_per_token": 2, "capacity_factor": 0.5, "balance_over": "batch", **BOTH},
    "moge": {
        "num_experts": 4,
        "experts_per_token": 2,
        "router": "grouped",
        "balance_bias_rate": 0.1,
        "balance_loss": 0.1,
    },
    "sigma": {"num_experts": 4, "experts_per_token": 1, "router": "hash", "num_domains": 2, "capacity_factor": 0.5},
}


def network(experts, loss=None, **changes):
    """A model of two layers, of which the second has experts, with a loss and weights that differ from token to token."""
    config = ModelConfig(
        **{"vocab_size": 48, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "seq_len": 64, "dropout_rate": 0.0},
        **{"query_layer": False, "experts": {"first_dense_layers": 1, **experts}, **changes},
    )
    net = family_module("pangu", "model").ModelWithLoss(config, loss)
    for number, parameter in enumerate(net.get_parameters()):
        noise = np.random.default_rng(number).normal(0, 0.3, parameter.shape).astype(np.float32)
        parameter.set_data(Tensor(noise if "bias" not in parameter.name else 0 * noise))
    return net.set_train()


def texts():
    draw = np.random.default_rng(7)
    lengths = (13, 5, 9, 3, 12, 7)
    return [Example(tuple(draw.integers(10, 48, n).tolist()), (False, False, *(True,) * (n - 2))) for n in lengths]


def batch_of(kind, width):
    if kind == "pretraining":
        samples, counts = np.full((6, width + 1), 9, np.int32), np.array([len(text.tokens) for text in texts()])
        for row, text in enumerate(texts()):
            samples[row, : counts[row]] = text.tokens
        return make_batch(samples, 9, 6, counts=counts)
    if kind == "padded by the tokenizer":  # its pad token is loss_ignore_id
        samples = np.full((6, width + 1), 6, np.int32)
        for row, text in enumerate(texts()):
            samples[row, : len(text.tokens)] = text.tokens
        return make_batch(samples, 9, 6)
    rows = (
        [[text] for text in texts()] if kind == "examples" else [texts()[:1], texts()[1:4], texts()[4:5], texts()[5:]]
    )
    batch = example_batch(rows, width)
    return batch._replace(loss_weights=batch.loss_weights / batch.loss_weights.sum(dtype=np.float32))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("switch", "examples"),
        ("whole batch", "pretraining"),
        ("moge", "packed"),
        ("sigma", "examples"),
        ("gshard", "padded by the tokenizer"),
    ],
)
def test_longer_rows_change_nothing(model, kind):
    """Loss with the routers' losses, gradients, choices dropped, and the load of each expert."""
    found = []
    for width in (17, 40):
        net = network(MODELS[model])
        net.model.layers[1].mlp.attach_counter("count")
        weights = ms.ParameterTuple(net.trainable_params())
        loss, gradients = ms.value_and_grad(net, None, weights)(*map(Tensor, batch_of(kind, width)))
        named = {w.name: g.asnumpy() for w, g in zip(weights, gradients, strict=True)}
        found.append((float(loss.asnumpy().reshape(())), named.pop("count"), named))
    (loss, counts, gradients), (other_loss, other_counts, others) = found
    k = MODELS[model]["experts_per_token"]
    real = sum(len(text.tokens) - (kind != "padded by the tokenizer") for text in texts())
    assert counts[:-2].sum() == k * real
    assert (counts[-2] > 0) == ("capacity_factor" in MODELS[model])
    np.testing.assert_array_equal(other_counts[:-1], counts[:-1])
    assert other_loss == pytest.approx(loss, rel=1e-6)
    largest = max(np.abs(value).max() for value in gradients.values())
    for name, value in gradients.items():
        assert np.abs(others[name] - value).max() <= 1e-5 * largest, name


@pytest.mark.parametrize(("model", "group"), [("gshard", 8), ("sigma", None)])
def test_a_policy_and_its_reference_are_one_function_whatever_the_capacity(model, group):
    """DPO begins at log 2, and ratios at 1, also of models that drop half their tokens in pretraining."""
    experts = {**MODELS[model], "capacity_factor": 0.25, "capacity_group": group}
    batch = batch_of("examples", 16)
    weights = batch.loss_weights * np.float32(1 / 3 / batch.loss_weights.max())  # a pair's share at each token
    of_text = [Tensor(array) for array in batch._replace(loss_weights=weights)]
    net = network(experts, Preference())
    log_probs = net.set_train(False)(*of_text).asnumpy()
    loss = net.set_train()(*of_text, Tensor(log_probs))
    assert float(loss.asnumpy().reshape(())) == pytest.approx(math.log(2), abs=1e-6)

    more = np.random.default_rng(1).normal(1, 1, batch.tokens.shape).astype(np.float32)  # advantages
    inputs = [*of_text, *map(Tensor, (more, log_probs, log_probs, np.zeros_like(more)))]
    surrogate = network(experts, Policy(beta=1.0, kl="k3"))(*inputs)
    assert float(surrogate.asnumpy().reshape(())) == pytest.approx(-(more * weights).sum(), rel=1e-5)

    reward = network(experts, PairwiseReward(), value_head=True, tied_embedding=False)
    last = np.zeros_like(weights)
    last[np.arange(6), [len(text.tokens) - 2 for text in texts()]] = 1 / 3
    inputs = [*of_text[:3], Tensor(last)]
    values = (reward.set_train(False)(*inputs).asnumpy() * (last > 0)).sum(1)  # what scores texts later
    trained = reward.set_train()(*inputs, Tensor(np.zeros_like(last)))
    wanted = np.log1p(np.exp(-(values[::2] - values[1::2]))).mean()
    assert float(trained.asnumpy().reshape(())) == pytest.approx(wanted, rel=1e-5)


def test_metrics_count_tokens_and_a_hash_router_tells_no_entropy():
    experts = network(MODELS["gshard"]).model.config.mixture
    counts = np.array([[4, 2, 0, 2, 1, 1, 3, 7.5], [2, 2, 2, 2, 1, 1, 0, 2.5]], np.float32)  # of 5 tokens
    assert expert_metrics(counts, experts) == {
        "dropped_tokens": 3,
        "busiest_expert": pytest.approx(4 / (10 / 6)),
        "router_entropy": pytest.approx((7.5 / 5 + 2.5 / 5) / 2),
    }
    sigma = network(MODELS["sigma"]).model.config.mixture
    assert "router_entropy" not in expert_metrics(np.array([[4, 2, 0, 2, 3, 3]], np.float32), sigma)
