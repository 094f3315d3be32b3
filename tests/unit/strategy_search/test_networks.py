# SPDX-License-Identifier: Apache-2.0
"""Strategies of custom networks: planted optima, costs from one graph of one device, `auto_parallel` with a cluster."""

from pathlib import Path

from conftest import call

from sporeloom.strategy.loader import load_strategy

WORKER = Path(__file__).with_name("network_worker.py")
SLOW = {"devices_per_node": 8, "intra_node_gb_per_s": 1}


def test_large_weights_are_sharded_and_many_rows_are_divided(tmp_path):
    """Where links are slow, what is sent decides: activations of few rows, or gradients of few weights."""
    few_rows, *_ = call(WORKER, "best", str(tmp_path), 4, 512, SLOW)
    many_rows, *_ = call(WORKER, "best", str(tmp_path), 4096, 8, SLOW)
    assert few_rows["dp"] == 1 and many_rows["dp"] == 2


def test_costs_come_from_one_graph_of_one_device(tmp_path):
    found = call(WORKER, "every_cost", str(tmp_path))
    assert (
        len(found) > 5 and any(name.startswith("pp") for name in found) and any("recompute" in name for name in found)
    )
    assert all(reused == own for reused, own in found.values()), found


def test_little_memory_shards_then_recomputes_then_refuses(tmp_path):
    def of(memory_mb):
        return call(WORKER, "best", str(tmp_path), 512, 64, {"memory_gb": 0.1 + memory_mb / 1024})

    enough, refused = of(64), of(0.1)
    assert enough[1:3] == [False, False]
    assert "nothing fits: the nearest" in refused


def test_a_network_that_no_strategy_can_train_is_refused_once(tmp_path):
    (without_loss,), (other_inputs,) = call(WORKER, "refused", str(tmp_path))
    assert without_loss.startswith("the network returns [8, 4] and no loss: wrap it")
    assert other_inputs.startswith("MindSpore cannot compile the network: For 'MatMul'")


def test_auto_keeps_its_choice_and_needs_inputs(tmp_path):
    text, is_equal, searches, problem = call(WORKER, "chosen_once", str(tmp_path))
    assert (
        text.startswith("# Chosen by auto_parallel, devices=4, cluster=ascend910b: simulated step")
        and "mesh: {" in text
    )
    assert is_equal and searches == 1
    assert problem == (
        'auto_parallel(net, "auto", cluster=...) simulates a step: give inputs=[...], the arrays of a batch'
    )


def test_the_command_searches_a_network_in_a_file(tmp_path):
    code, values, page = call(WORKER, "searched", str(tmp_path))
    assert (
        code == 0 and len(values["simulated"]) == 3 and values["inputs"]["model"]["network"] == "network_worker.py:Net"
    )
    for point in values["front"]:
        assert load_strategy(tmp_path / "out" / point["strategy"]).mesh.size == 2
        assert point["rows_per_s"] == 8 / point["step_time_s"] and point["closed_form"] is None
    assert "Strategies of network_worker.py:Net" in page and "rows/s" in page
