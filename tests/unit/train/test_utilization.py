# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a step by the formula of arXiv:2205.05198, and what is reported of them."""

import dataclasses

import pytest
from conftest import CONFIGS, ROOT

from sporeloom.core.errors import ConfigError
from sporeloom.strategy.config import Recompute
from sporeloom.train.checks import check
from sporeloom.train.plain_text import TrainConfig
from sporeloom.train.utilization import Utilization, uncounted

TEXT = ROOT / "examples" / "small_town.txt"


def run_of(tmp_path, strategy=None, **flags):
    config = TrainConfig(data=TEXT, output_dir=tmp_path / "out", batch_size=8, strategy=strategy, **flags)
    return check(config, None)


def model_flops(model, tokens, seq_len):
    """Forward and backward: 6 an entry of a matrix and token, 12 a position, feature and layer for attention."""
    width, layers = model.hidden_size, model.num_layers
    matrices = layers * (4 * width**2 + 2 * width * model.ffn_size) + model.vocab_size * width
    return tokens * (6 * matrices + 12 * seq_len * width * layers)


def test_flops_are_those_of_the_formula(tmp_path):
    run = run_of(tmp_path)
    flops = Utilization(run, "CPU").of_step(8, 128)
    assert flops.model == flops.hardware == pytest.approx(model_flops(run.model, 8 * 128, 128), rel=1e-12)


def test_a_step_of_other_sizes_is_counted_by_them(tmp_path):
    run = run_of(tmp_path)
    assert Utilization(run, "CPU").of_step(4, 64).model == pytest.approx(model_flops(run.model, 256, 64), rel=1e-12)


@pytest.mark.parametrize("name", ["pangu_tiny_dp4", "pangu_tiny_dp2_tp2_zero", "pangu_tiny_dp2_pp2"])
def test_each_device_has_its_share(tmp_path, name):
    run = run_of(tmp_path, CONFIGS / f"{name}.yaml")
    flops = Utilization(run, "CPU").of_step(8, 128)
    assert flops.model == pytest.approx(model_flops(run.model, 1024, 128) / run.strategy.mesh.size, rel=1e-12)


def test_recomputation_counts_for_the_hardware_alone(tmp_path):
    run = run_of(tmp_path)
    full = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, recompute=Recompute(kind="full")))
    flops = Utilization(full, "Ascend").of_step(8, 128)
    head = 6 * 1024 * run.model.vocab_size * run.model.hidden_size
    model = model_flops(run.model, 1024, 128)
    assert flops.model == pytest.approx(model, rel=1e-12)
    last = 2 * 1024 * run.model.num_layers * run.model.hidden_size * run.model.ffn_size  # no gradient needs its result
    again = (model - head) / 3 - last  # the layers' forward pass but the last product
    assert flops.hardware == pytest.approx(model + again, rel=1e-12)


def test_utilization_is_a_fraction_of_the_chip(tmp_path):
    run = run_of(tmp_path, chip="ascend910b")
    use = Utilization(run, "Ascend")
    flops = use.of_step(8, 128)
    rates = use.rates(1024, flops, 0.5)
    assert rates == {
        "tokens_per_s_per_device": 2048.0,
        "flops_per_s_per_device": flops.model / 0.5,
        "mfu": pytest.approx(flops.model / 0.5 / 376e12),
        "hfu": pytest.approx(flops.hardware / 0.5 / 376e12),
    }


def test_without_a_chip_there_is_no_utilization(tmp_path):
    use = Utilization(run_of(tmp_path), "CPU")
    assert set(use.rates(1024, use.of_step(8, 128), 1.0)) == {"tokens_per_s_per_device", "flops_per_s_per_device"}


def test_tokens_are_divided_by_the_devices(tmp_path):
    use = Utilization(run_of(tmp_path, CONFIGS / "pangu_tiny_dp4.yaml"), "CPU")
    assert use.rates(1000, None, 2.0) == {"tokens_per_s_per_device": 125.0}


def test_steps_that_drop_tokens_have_no_flops(tmp_path):
    run = run_of(tmp_path, random_ltd_min_value=64)
    assert uncounted(run) == "random layerwise token dropping"
    assert Utilization(run, "CPU").of_step(8, 128) is None


def test_an_unknown_chip_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(ConfigError, match=r"--chip ascend910x: not known; did you mean .*; known: .*h100"):
        run_of(tmp_path, chip="ascend910x")
