# SPDX-License-Identifier: Apache-2.0
"""Random layerwise token dropping: its schedule, its draws and its layers against NumPy."""

import json
import math

import mindspore as ms
import numpy as np
import pytest

from sporeloom.core.command_line import parse_args
from sporeloom.core.errors import ConfigError
from sporeloom.data.batch import document_positions
from sporeloom.data.random_ltd import RandomLTD, draw_kept
from sporeloom.data.sample_order import Sizes
from sporeloom.models.family import family_module, size_config
from sporeloom.nn.token_drop import attach_token_drop
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.trainer import train

LAYERS, SHAPE, EOD = (1, 2), (3, 24), 7


def test_the_schedule_is_deepspeeds():
    """`fixed_linear` of its random_ltd_schedule, for steps from 0."""
    dropping = RandomLTD(LAYERS, 4, min_value=128, max_value=2048, require_steps=1000, seq_per_step=16)
    for step in (0, 1, 7, 8, 9, 499, 500, 999, 1000, 5000):
        value = math.floor((float(step) / 1000) ** 1.0 * (2048 - 128) + 128)
        assert dropping.kept(step, 2048) == min(value - value % 16, 2048)
    assert (dropping.kept(0, 2048), dropping.kept(1000, 2048), dropping.kept(1000, 512)) == (128, 2048, 512)


def test_tokens_are_counted_for_each_layer_that_sees_them():
    dropping, sizes = RandomLTD(LAYERS, 5, 16, 64, 3, 16), Sizes((8,), (64,))
    assert dropping.lengths(sizes, 10) == [16, 32, 48, 64]
    assert [dropping.layer_tokens(step, sizes) for step in (0, 3)] == [8 * (2 * 16 + 3 * 64), 8 * 5 * 64]


def test_draws_are_without_replacement_in_order_and_lead_back():
    batch, length = SHAPE
    kept, back = draw_kept(5, 4, LAYERS, np.arange(batch), SHAPE, 10)
    for row in range(batch):
        for layer in range(2):
            places, way = kept[row].reshape(2, 10)[layer], back[row].reshape(2, length)[layer]
            assert (np.diff(places) > 0).all()
            assert places[0] >= 0
            assert places[-1] < length
            joined = np.concatenate([-places - 1, np.arange(length)])  # what the layer gave, then all as it was
            expected = np.where(np.isin(np.arange(length), places), -np.arange(length) - 1, np.arange(length))
            np.testing.assert_array_equal(joined[way], expected)


def test_draws_differ_by_seed_step_row_and_layer_but_not_by_who_draws():
    kept, _ = draw_kept(5, 4, LAYERS, np.arange(3), SHAPE, 10)
    some, _ = draw_kept(5, 4, LAYERS, np.array([2]), SHAPE, 10)
    np.testing.assert_array_equal(some[2], kept[2])
    assert not some[:2].any()
    sets = {tuple(part) for row in kept for part in row.reshape(2, 10)}
    sets |= {tuple(draw_kept(seed, step, (1,), np.array([0]), SHAPE, 10)[0][0]) for seed, step in ((6, 4), (5, 5))}
    assert len(sets) == 8


def test_every_token_is_drawn_as_often_as_any_other():
    drawn = np.concatenate([draw_kept(1, step, (1,), np.arange(64), (64, 32), 8)[0].reshape(-1) for step in range(50)])
    counts = np.bincount(drawn, minlength=32)
    deviation = math.sqrt(3200 * 0.25 * 0.75)
    assert abs(counts - 800).max() < 5 * deviation


@pytest.mark.parametrize("size", ["tiny", "embedded_tiny"])
def test_a_layer_sees_what_is_drawn_for_it_and_nothing_else(size):
    """Sequence by sequence against the same layers, given those tokens and a mask that NumPy made."""
    batch, length = SHAPE
    model = family_module("pangu", "model").ModelWithLoss(size_config("pangu", size)).model
    attach_token_drop(model, LAYERS)
    rng = np.random.default_rng(0)
    tokens = rng.integers(8, 100, SHAPE)
    tokens[:, [5, 11]] = EOD
    positions = document_positions(tokens, EOD)
    kept, back = draw_kept(3, 0, LAYERS, np.arange(batch), SHAPE, 10)
    x = rng.standard_normal((batch * length, model.config.hidden_size)).astype(np.float32)
    everything = (ms.Tensor(kept), ms.Tensor(back), ms.Tensor(positions))
    for number, layer in enumerate(LAYERS):
        got = model.layers[layer](ms.Tensor(x), None, kept=everything).asnumpy().reshape(batch, length, -1)
        for row, rows in enumerate(x.reshape(batch, length, -1)):
            places = kept[row].reshape(2, 10)[number]
            document = (places - positions[row, places])[:, None]
            visible = (document <= places[None]) & (places[None] <= places[:, None])
            bias = ms.Tensor(np.where(visible, 0.0, -10000.0).astype(np.float32)[None, None])
            here = ms.Tensor(positions[row, places][None])
            angles = model.angles(here) if model.has_rotary else None
            expected = rows.copy()
            expected[places] = model.layers[layer].whole(ms.Tensor(rows[places]), bias, angles).asnumpy()
            np.testing.assert_allclose(got[row], expected, atol=2e-5)


def run(folder, data, *words):
    config = parse_args(TrainConfig, "", ["--data", str(data), "--output-dir", str(folder), "--seq-len", "32", *words])
    train(check(config, num_processes=1))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("\n\n".join(f"第{i}个城市很小。" * 8 for i in range(40)))
    return path


def test_all_tokens_kept_is_the_run_without(tmp_path, text):
    plain = run(tmp_path / "plain", text, "--steps", "2")
    full = run(tmp_path / "full", text, "--steps", "2", "--random-ltd-min-value", "32")
    assert [(step["loss"], step["grad_norm"]) for step in full] == [(step["loss"], step["grad_norm"]) for step in plain]
    assert full[1]["consumed_layer_tokens"] == 2 * 8 * 32 * 4


def test_a_resumed_run_draws_and_counts_as_if_it_had_not_stopped(tmp_path, text):
    words = (
        "--random-ltd-min-value",
        "16",
        "--random-ltd-require-steps",
        "3",
        "--save-every",
        "2",
        "--warmup-steps",
        "1",
    )
    words += ("--decay-steps", "9")
    whole = run(tmp_path / "whole", text, "--steps", "4", *words)
    run(tmp_path / "parts", text, "--steps", "2", *words)
    resumed = run(tmp_path / "parts", text, "--steps", "4", *words, "--resume")
    names = ("step", "loss", "kept_tokens", "consumed_layer_tokens")
    assert [[step[name] for name in names] for step in resumed] == [[step[name] for name in names] for step in whole]
    assert [step["kept_tokens"] for step in whole] == [16, 16, 16, 32]
    with pytest.raises(ConfigError, match="data random_ltd was"):
        run(tmp_path / "parts", text, "--steps", "6", *words, "--resume", "--random-ltd-layers", "1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--random-ltd-min-value 24", "--random-ltd-min-value 24 is not a multiple of --random-ltd-seq-per-step 16"),
        ("--random-ltd-min-value 48", "48 is outside 1 .. 32"),
        ("--random-ltd-min-value 16 --random-ltd-layers 1-3", "layer 3 is outside 0 .. 2"),
        ("--random-ltd-min-value 16 --random-ltd-layers 2-1", "layers are counted from 0, the first one first"),
        ("--random-ltd-min-value 1 --random-ltd-seq-per-step 1 --steps 40", "lengths is a graph to compile"),
        ("--random-ltd-min-value 16 --size switch_tiny", "expert capacity is counted"),
        ("--random-ltd-layers 1", "need --random-ltd-min-value"),
        ("--random-ltd-min-value 16 --certificate c.json", "it covers layers that process all tokens"),
        ("--random-ltd-min-value 16 --strategy pangu_tiny_cp2_tp2", "leave cp out"),
        (
            "--random-ltd-min-value 5 --random-ltd-seq-per-step 5 --batch-size 2 --strategy pangu_tiny_dp2_tp2_sp",
            "1 sequences of 5 tokens are not divisible by tp 2",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(tmp_path, text, words, told):
    config = parse_args(
        TrainConfig, "", ["--data", str(text), "--output-dir", str(tmp_path), "--seq-len", "32", *words.split()]
    )
    with pytest.raises(ConfigError) as caught:
        check(config, num_processes=None)
    assert any(told in problem for problem in caught.value.problems)
