# SPDX-License-Identifier: Apache-2.0
"""The loss of sparse attention's indexer against its formula in float64, and its gradients against finite differences."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

from sporeloom.models.family import size_config
from sporeloom.models.parameters import decoder_specs
from sporeloom.models.parts.indexer import IndexerConfig
from sporeloom.models.parts.latent_attention import LatentConfig
from sporeloom.nn.latent_attention import LatentAttention, attach_dense_warmup
from sporeloom.train.metrics import layer_metrics

HIDDEN, HEADS, SINKS, TOP_K, COEFFICIENT = 8, 3, 2, 3, 0.7
LATENT = {"query_width": 6, "kv_width": 5, "nope_dim": 4, "rope_dim": 2, "value_dim": 3, "num_sinks": SINKS}
DOCUMENTS = ((8,), (3, 5))
"""Lengths of the documents of each row."""
LENGTH = 8


pytestmark = pytest.mark.usefixtures("pynative")


def attention(top_k=TOP_K):
    indexer = IndexerConfig(layers=(0,), top_k=top_k, num_heads=2, head_dim=4, loss_coefficient=COEFFICIENT)
    config = dataclasses.replace(
        size_config("pangu", "2_tiny"),
        hidden_size=HIDDEN,
        num_heads=HEADS,
        latent=LatentConfig(**LATENT),
        indexer=indexer,
        windows=(),
    )
    cell, rng = (
        LatentAttention(config, decoder_specs(config).within("layers.0.attention"), ms.float32),
        np.random.default_rng(1),
    )
    for parameter in cell.get_parameters():
        parameter.set_data(Tensor(rng.normal(size=parameter.shape).astype(np.float32)))
    return cell.set_train()


def visible():
    """(B, T, T): the tokens that each may attend to, those of its document up to itself."""
    seen = np.zeros((len(DOCUMENTS), LENGTH, LENGTH), bool)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            seen[row, start : start + length, start : start + length] = np.tri(length, dtype=bool)
            start += length
    return seen


def batch():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(len(DOCUMENTS), LENGTH, HIDDEN)).astype(np.float32)
    weights = rng.uniform(size=(len(DOCUMENTS), LENGTH)).astype(np.float32)
    weights[0, 5:] = 0  # padding
    return x, weights / weights.sum()


def inputs(x, weights):
    bias = np.where(visible(), 0.0, -10000.0)[:, None].astype(np.float32)
    bias = np.concatenate([np.zeros((*bias.shape[:3], SINKS), np.float32), bias], -1)
    angles = [
        Tensor(np.full((*weights.shape, 1, LATENT["rope_dim"]), value, np.float32)) for value in (1, 0)
    ]  # no rotation
    flat = Tensor(x.reshape(-1, HIDDEN))
    return flat, flat, Tensor(bias), angles, None, None, (Tensor(weights), None)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rms(x, weight, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def probabilities(w, x, allowed):
    """Attention probabilities of each head, (B, H, T, M + T)."""
    rows, nope, width = len(x), LATENT["nope_dim"], LATENT["kv_width"]
    latent = rms(x @ w["query_down.weight"].T, w["query_norm.weight"])
    q = (latent @ w["query_up.weight"].T).reshape(rows, LENGTH, HEADS, -1)
    down = x @ w["kv_down.weight"].T
    sinks = np.broadcast_to(w["sink_latents"].reshape(1, SINKS, width), (rows, SINKS, width))
    latents = rms(np.concatenate([sinks, down[..., :width]], 1), w["kv_norm.weight"])
    shared = np.broadcast_to(w["sink_keys"].reshape(1, SINKS, -1), (rows, SINKS, LATENT["rope_dim"]))
    shared = np.concatenate([shared, down[..., width:]], 1)
    k = (latents @ w["kv_up.weight"].T).reshape(rows, SINKS + LENGTH, HEADS, -1)[..., :nope]
    scores = np.einsum("bthf,bshf->bhts", q[..., :nope], k) + np.einsum("bthf,bsf->bhts", q[..., nope:], shared)
    scores /= np.sqrt(nope + LATENT["rope_dim"])
    seen = np.concatenate([np.ones((*allowed.shape[:2], SINKS), bool), allowed], -1)
    return softmax(np.where(seen[:, None], scores, -np.inf)), latent


def divergences(w, x, top_k, is_dense):
    """KL divergence of each token, (B, T)."""
    rows, seen = len(x), visible()
    _, latent = probabilities(w, x, seen)
    q = (latent @ w["indexer.query.weight"].T).reshape(rows, LENGTH, 2, -1)
    k = rms(x @ w["indexer.key.weight"].T, w["indexer.key_norm.weight"])
    heads = np.maximum(np.einsum("bthf,bsf->bhts", q, k), 0) * (2 * k.shape[-1]) ** -0.5
    scores = np.einsum("bhts,bth->bts", heads, x @ w["indexer.weights.weight"].T)
    scores = np.where(seen, scores, -np.inf)
    least = np.sort(scores, -1)[..., -min(top_k, LENGTH), None]
    chosen = seen if is_dense else seen & (scores >= least)
    p = probabilities(w, x, chosen)[0].sum(1)[..., SINKS:]
    p /= p.sum(-1, keepdims=True)
    q = softmax(np.where(chosen, scores, -np.inf))
    return (p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1))).sum(-1)


def expected(w, x, weights, top_k, is_dense):
    return COEFFICIENT * (divergences(w, x, top_k, is_dense) * weights).sum()


@pytest.mark.parametrize(("top_k", "is_dense"), [(TOP_K, False), (TOP_K, True), (LENGTH, False)])
def test_the_loss_and_its_gradients_are_those_of_the_formula(top_k, is_dense):
    cell, (x, weights) = attention(top_k), batch()
    if is_dense:
        attach_dense_warmup(cell)
    trained = ParameterTuple(list(cell.get_parameters()))
    names = [name for name, _ in cell.parameters_and_names()]
    w = {name: parameter.asnumpy().astype(np.float64) for name, parameter in zip(names, trained, strict=True)}
    given = inputs(x, weights)
    loss, (of_x, of_weights) = ms.value_and_grad(
        lambda flat: cell(flat, flat, *given[2:])[1].sum(), grad_position=0, weights=trained
    )(given[0])
    wide = x.astype(np.float64)
    np.testing.assert_allclose(loss.asnumpy(), expected(w, wide, weights, top_k, is_dense), rtol=1e-5)
    assert not of_x.asnumpy().any()
    for name, found in zip(names, of_weights, strict=True):
        if not name.startswith("indexer."):
            assert not found.asnumpy().any(), name
            continue
        differences = np.zeros(w[name].shape)
        for place in np.ndindex(differences.shape):
            change = np.zeros(differences.shape)
            change[place] = 1e-6
            sides = [expected({**w, name: w[name] + s * change}, wide, weights, top_k, is_dense) for s in (1, -1)]
            # The attention is constant: of what the indexer reads nothing changes, but of the choice, which does not either.
            differences[place] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(
            found.asnumpy(), differences, atol=2e-5 * max(1, np.abs(differences).max()), err_msg=name
        )
        assert np.abs(differences).max() > 1e-3, name


def test_in_the_dense_warmup_a_token_attends_to_all_visible_ones():
    cell, (x, weights) = attention(), batch()
    given = inputs(x, weights)
    sparse = cell(*given)[0].asnumpy()
    np.testing.assert_allclose(cell(*given[:-1]).asnumpy(), sparse, atol=1e-6)  # as without the loss
    attach_dense_warmup(cell)
    dense = cell(*given)[0].asnumpy()
    all_chosen = attention(LENGTH)(*given)[0].asnumpy()
    np.testing.assert_array_equal(dense, all_chosen)
    assert np.abs(dense - sparse).max() > 1e-2
    np.testing.assert_allclose(cell(*given[:-1]).asnumpy(), sparse, atol=1e-6)  # validation is sparse


def test_what_is_not_trained_on_does_not_count():
    cell, (x, weights) = attention(), batch()
    loss = cell(*inputs(x, weights))[1].asnumpy()
    changed = x.copy()
    changed[0, 5:] += 1.0  # padding, behind all other tokens of its row
    np.testing.assert_allclose(cell(*inputs(changed, weights))[1].asnumpy(), loss, rtol=1e-6)
    changed[1, :3] += 1.0  # another document's tokens reach none of the second's
    alone = np.where(np.arange(LENGTH) >= 3, weights, 0) * np.array([[0], [1]], np.float32)
    first, second = (cell(*inputs(each, alone))[1].asnumpy() for each in (x, changed))
    np.testing.assert_allclose(first, second, rtol=1e-6)


def test_metrics_are_the_mean_over_layers():
    model = size_config("pangu", "2_tiny")
    model = dataclasses.replace(model, indexer=dataclasses.replace(model.indexer, loss_coefficient=0.1))
    experts = np.concatenate([np.full(8, 4.0), [0.0, 3.0]])
    counts = np.concatenate([*[experts] * 4, [0.5, 0.25]]).astype(np.float32)  # of multi-token prediction, too
    told = layer_metrics(counts, model)
    assert told["indexer_loss"] == 0.375
    assert told["busiest_expert"] == 1.0
    without = dataclasses.replace(model, experts=None)
    assert layer_metrics(counts[-2:], without) == {"indexer_loss": 0.375}
