# SPDX-License-Identifier: Apache-2.0
"""The setting that chooses who partitions, and where it is not there yet."""

import pytest
import yaml
from conftest import in_process, tool

from sporeloom.core.errors import ConfigError
from sporeloom.parallel.parallelize import shards_itself
from sporeloom.strategy.loader import load_strategy, strategy_of
from sporeloom.strategy.text import strategy_text


def of(mesh, **settings):
    return strategy_of({"mesh": mesh, "engine": "spmd", **settings}, "s.yaml")


def test_without_the_key_it_is_spmd():
    without = strategy_of({"mesh": {"dp": 2}})
    assert without.engine is None and without.is_spmd and not without.by_mindspore().is_spmd
    assert strategy_of({"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}}).is_spmd
    assert not strategy_of({"mesh": {"dp": 1}}).is_spmd  # one device has nothing to shard
    assert not strategy_of({"mesh": {"dp": 2}, "engine": "mindspore"}).is_spmd


def test_a_written_strategy_keeps_it(write):
    path = write("s.yaml", strategy_text(of({"dp": 2, "tp": 2}), "decoder"))
    assert yaml.safe_load(path.read_text())["engine"] == "spmd"
    assert load_strategy(path).engine == load_strategy(path, for_inference=True).engine == "spmd"
    assert "engine" not in strategy_text(strategy_of({"mesh": {"dp": 2}}), "decoder")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": {"dp": 2}, "engine": "spdm"}, "spdm"),
    ],
)
def test_what_it_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        strategy_of(settings, "s.yaml")


def test_our_own_graphs_are_the_default_everywhere():
    ours, default = of({"dp": 2}), strategy_of({"mesh": {"dp": 2}})
    for strategy in (ours, default):
        assert strategy.is_spmd and shards_itself(strategy)
        assert strategy.device_problems() == strategy.graph_problems() == []
    schedule = {"num_microbatches": 2, "schedule": "zero_bubble_h1"}
    assert not strategy_of({"mesh": {"pp": 2}, "pipeline": schedule}).device_problems()
    with pytest.raises(ConfigError, match="have no zero_bubble_h1; use 1f1b, or remove `engine: mindspore`"):
        strategy_of({"mesh": {"pp": 2}, "pipeline": schedule, "engine": "mindspore"}, "s.yaml")


def test_engine_mindspore_is_neither_counted_nor_proved():
    other = strategy_of({"mesh": {"dp": 2}, "engine": "mindspore"}, "s.yaml")
    assert other.device_problems() == []
    (problem,) = other.graph_problems()
    assert problem.startswith(
        "s.yaml: engine: mindspore lets MindSpore partition, whose graphs are neither counted nor"
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"offload": {"layers": [1]}}, "offload.layers: engine spmd keeps all activations"),
        ({"micro_batch_interleave": 2}, "micro_batch_interleave: engine spmd runs each microbatch at once"),
    ],
)
def test_what_our_graphs_would_leave_out_on_devices_is_refused_there(write, settings, key):
    """A CPU process computes the same without it; a dry run would describe what is not so."""
    ours = of({"dp": 2}, rules="decoder", **settings)
    (problem,) = ours.device_problems()
    assert key in problem and "write `engine: mindspore`" in problem
    assert ours.graph_problems() == [problem]
    assert len(strategy_of({"mesh": {"dp": 2}, "rules": "decoder", **settings}).device_problems()) == 1
    assert not strategy_of({"mesh": {"dp": 2}, "rules": "decoder", "engine": "mindspore", **settings}).device_problems()
    path = write("s.yaml", strategy_text(ours, "decoder"))
    outcome = in_process("tools/dry_run.py", "--model", "pangu", "--size", "tiny", "--strategy", path)
    assert outcome.code == 2 and key.partition(":")[2] in outcome.output


def test_explain_says_what_lies_where_and_what_an_operator_sends(write):
    path = write("s.yaml", strategy_text(of({"dp": 2, "tp": 2}), "decoder"))

    def explained(name):
        asked = ("explain", name, "--model", "pangu", "--size", "tiny", "--strategy", path)
        outcome = tool("tools/dry_run.py", *asked)
        assert outcome.code == 0, outcome.output
        return outcome.output

    down, up = explained("layers.0.mlp.down.matmul"), explained("layers.0.mlp.up.matmul")
    assert "values: [dp, tp], [~, tp] -> [dp, ~]" in down
    size = 128 * 128 * 4  # tokens of a replica x hidden size, float32; on two ranks an all-reduce sends as much once
    assert f"forward: AllReduce over tp, a rank sends {size:,} bytes a microbatch" in down
    assert "forward:" not in up
    assert f"backward: AllReduce over tp, a rank sends {size:,} bytes a microbatch" in up
    query = explained("layers.0.attention.query.weight")
    assert "[128, 128] -> [64, 128] on each rank of stage 0, 2 different shards" in query
