# SPDX-License-Identifier: Apache-2.0
"""Copies of a microbatch: what a strategy with them wants of a batch, and who cannot have them."""

import numpy as np
import pytest
from mindspore import nn

from sporeloom import auto_parallel, certify
from sporeloom.certification.shrink import small_strategies
from sporeloom.core.errors import ConfigError
from sporeloom.strategy.checks import batch_problems
from sporeloom.strategy.loader import load_strategy

TEXT = "mesh: {pp: 2, dp: 2}\nrules: {}\npipeline: {num_microbatches: 4}\nmicro_batch_interleave: 2\n"


def test_every_copy_wants_a_sequence_of_each_replica(write):
    strategy = load_strategy(write("s.yaml", TEXT))
    assert strategy.num_parts() == 8
    assert batch_problems(strategy, 32, 64) == []
    (problem,) = batch_problems(strategy, 24, 64)
    assert (
        "by dp 2 x 4 microbatches x 2 interleaved microbatches (micro_batch_interleave) = 16; use 16 or 32" in problem
    )
    assert batch_problems(strategy, 24, 64, training=False) == []


def test_a_network_of_ones_own_whose_loss_may_be_a_mean_has_none(write, tmp_path):
    with pytest.raises(ConfigError, match=r"s.yaml:4: micro_batch_interleave: .* remove it"):
        auto_parallel(nn.Dense(2, 2), write("s.yaml", TEXT))
    with pytest.raises(ConfigError, match=r"s.yaml:4: micro_batch_interleave: .* remove it"):
        certify(TwoLayers, [np.ones((16, 8), np.float32)], write("s.yaml", TEXT), out=tmp_path / "c")


def test_a_network_of_ones_own_is_not_for_mindspores_partitioner(write):
    text = "mesh: {dp: 2}\nrules: {}\nengine: mindspore\n"
    with pytest.raises(ConfigError, match=r"s.yaml:3: engine: MindSpore's partitioner is for the model families only"):
        auto_parallel(nn.Dense(2, 2), write("s.yaml", text))


def test_the_optimizer_of_a_script_of_ones_own_is_not_moved(write):
    text = "mesh: {dp: 2}\nrules: {}\noffload: {optimizer: true}\n"
    with pytest.raises(ConfigError, match=r"s.yaml:3: offload.optimizer: .* cannot be moved"):
        auto_parallel(nn.Dense(2, 2), write("s.yaml", text))


def test_our_own_graphs_compute_a_microbatch_at_once(write):
    with pytest.raises(
        ConfigError, match=r"s.yaml:4: micro_batch_interleave: engine spmd runs each microbatch at once"
    ):
        small_strategies(load_strategy(write("s.yaml", TEXT)), num_layers=4, processes=4)


class TwoLayers(nn.Cell):
    """Never called."""
