# SPDX-License-Identifier: Apache-2.0
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from sporeloom.core.errors import ConfigError
from sporeloom.train.checks import check
from sporeloom.train.loss_scale import LossScale
from sporeloom.train.optim import SGD, AdamW, is_decayed
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.schedules import learning_rate


def test_the_rate_warms_up_linearly_then_follows_the_cosine_of_the_absolute_step():
    rates = [learning_rate(step, 1.0, 0.1, warmup_steps=4, decay_steps=20) for step in range(1, 31)]
    assert rates[:3] == [0.25, 0.5, 0.75]
    for step in (4, 10, 19):
        assert rates[step - 1] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * step / 20)))
    assert rates[19:] == pytest.approx([0.1] * 11)


def test_inverse_sqrt_is_constant_and_then_falls_with_the_root_of_the_step():
    rates = [learning_rate(step, 0.01, 1e-4, 2, 10, "inverse-sqrt") for step in (1, 2, 10, 40, 1_000_000)]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.005, 1e-4])


def test_biases_and_norms_are_not_decayed_and_embeddings_are():
    assert is_decayed("model.embedding.word.weight")
    assert is_decayed("model.layers.0.attention.query.weight")
    assert not is_decayed("model.layers.0.attention.query.bias")
    assert not is_decayed("model.layers.0.mlp_norm.weight")
    assert not is_decayed("model.final_norm.weight")


def numpy_adamw(w, grads, lr, wd, bias_correction, b1=0.9, b2=0.95, eps=1e-8):
    w = w.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if bias_correction else (m, v)
        w = w - lr * (m_hat / (np.sqrt(v_hat) + eps) + wd * w)
    return w


@pytest.mark.parametrize("bias_correction", [False, True])
def test_adamw_equals_its_formula(bias_correction):
    ms.set_context(mode=ms.GRAPH_MODE)
    rng = np.random.RandomState(0)
    start = {"a.weight": rng.randn(3, 4), "a.bias": rng.randn(4)}
    parameters = [Parameter(Tensor(v.astype(np.float32)), name=n) for n, v in start.items()]
    optimizer = AdamW(parameters, weight_decay=0.1, bias_correction=bias_correction)
    grads = [[rng.randn(*v.shape).astype(np.float32) for v in start.values()] for _ in range(4)]
    for step, gradients in enumerate(grads, 1):
        optimizer.prepare(step, 0.01)
        optimizer(tuple(map(Tensor, gradients)))
    for i, (name, value) in enumerate(start.items()):
        expected = numpy_adamw(value, [g[i] for g in grads], 0.01, 0.1 if name == "a.weight" else 0.0, bias_correction)
        np.testing.assert_allclose(parameters[i].asnumpy(), expected, rtol=2e-6, atol=1e-6)


def test_sgd_subtracts_the_gradient():
    ms.set_context(mode=ms.GRAPH_MODE)
    parameter = Parameter(Tensor(np.ones(3, np.float32)), name="w")
    optimizer = SGD([parameter])
    optimizer.prepare(1, 0.5)
    optimizer((Tensor(np.array([1.0, 2.0, 4.0], np.float32)),))
    assert parameter.asnumpy().tolist() == [0.5, 0.0, -1.0]


def test_a_run_reports_all_its_problems_at_once(tmp_path, write):
    strategy = write("s.yaml", "mesh: {tp: 8}\n")
    config = TrainConfig(
        data=tmp_path / "none.txt", strategy=strategy, steps=0, seq_len=4000, tokenizer=tmp_path / "no.model"
    )
    with pytest.raises(ConfigError) as caught:
        check(config, num_processes=2)
    text = str(caught.value)
    for part in (
        "none.txt",
        "--steps must be at least 1",
        "--seq-len 4000",
        "no.model",
        "tp 8 = 8 processes, but 2",
        "num_heads = 4",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "pango"}, "--model pango is unknown; did you mean pangu?"),
        ({"size": "13bb"}, "--size 13bb is unknown; did you mean 13b?"),
        ({"learning_rate": -1.0}, "--learning-rate must be at least 0"),
        ({"adam_beta2": 1.0}, "--adam-beta2 must be in [0, 1), got 1.0"),
    ],
)
def test_a_wrong_choice_comes_with_the_right_ones(write, change, message):
    with pytest.raises(ConfigError) as caught:
        check(TrainConfig(data=write("a.txt", "text"), **change), num_processes=1)
    assert message in str(caught.value)


def test_fields_of_the_model_can_be_replaced_by_a_file(write):
    data, config = write("a.txt", "text"), write("m.json", '{"hidden_size": 32, "num_headz": 2}')
    with pytest.raises(ConfigError, match=r"m.json:1: num_headz is unknown; did you mean num_heads\?"):
        check(TrainConfig(data=data, config=config), num_processes=1)
    run = check(TrainConfig(data=data, config=write("m.json", '{"hidden_size": 32}'), dropout=0.2), num_processes=1)
    assert (run.model.hidden_size, run.model.dropout_rate) == (32, 0.2)


def test_float16_gets_a_loss_scale_and_others_only_if_asked(write):
    data = write("a.txt", "text")
    half = write("m.json", '{"compute_dtype": "float16"}')
    assert check(TrainConfig(data=data, config=half), num_processes=1).loss_scale == 2**32
    assert check(TrainConfig(data=data, config=half, loss_scale=1024), num_processes=1).loss_scale == 1024
    assert check(TrainConfig(data=data), num_processes=1).loss_scale is None
    with pytest.raises(ConfigError, match="adafactor has no loss scaling"):
        check(TrainConfig(data=data, config=half, optimizer="adafactor"), num_processes=1)
    with pytest.raises(ConfigError, match="--loss-scale-factor must be above 1, got 1"):
        check(TrainConfig(data=data, loss_scale_factor=1.0), num_processes=1)


def test_muon_is_refused_where_matrices_are_sharded_by_mindspore(write):
    data, mesh = write("a.txt", "text"), "mesh: {dp: 2, tp: 2}\nrules: decoder\n"
    sharded = write("mindspore.yaml", f"{mesh}engine: mindspore\n")
    with pytest.raises(ConfigError, match=r"engine: --optimizer muon needs full matrices.*give engine: spmd"):
        check(TrainConfig(data=data, strategy=sharded, optimizer="muon"), num_processes=4)
    ours = write("ours.yaml", mesh)
    assert check(TrainConfig(data=data, strategy=ours, optimizer="muon"), num_processes=4).config.muon_nesterov
    replicas = write("replicas.yaml", "mesh: {dp: 2}\nengine: mindspore\nrules: decoder\n")
    assert check(TrainConfig(data=data, strategy=replicas, optimizer="muon"), num_processes=2)


def test_a_loss_scale_falls_after_an_overflow_and_rises_after_a_window():
    scale = LossScale(8.0, factor=2.0, window=3)
    assert [scale.follow(fine) and scale.value for fine in (True, True, True, False, True, True)] == [8, 8, 16, 8, 8, 8]
    again = LossScale(1.0, window=3)
    again.restore(scale.state())
    assert again.follow(True) and again.value == 16
    fixed = LossScale(2.0, window=0)
    assert [fixed.follow(True) and fixed.value for _ in range(5)] == [2] * 5
    assert fixed.follow(False) and fixed.value == 1
    assert not fixed.follow(False)  # there is no smaller scale: the run is to end
