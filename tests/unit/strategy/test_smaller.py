# SPDX-License-Identifier: Apache-2.0
"""Strategies for fewer devices than a file is for."""

from pathlib import Path

import pytest
from conftest import CONFIGS

from sporeloom.core.errors import ConfigError
from sporeloom.strategy.loader import load_strategy
from sporeloom.strategy.smaller import nearest_strategy, settings_text, smaller_meshes


def nearest(path, devices, problems=lambda strategy: [], least=1):
    found = nearest_strategy(Path(path), load_strategy(path).mesh, range(least, devices + 1), problems)
    return None if found is None else found[1]


@pytest.mark.parametrize(
    ("name", "devices", "wanted"),
    [
        ("pangu_tiny_dp2_tp2", 4, {"dp": 2, "tp": 2}),
        ("pangu_tiny_dp2_tp2_zero", 3, {"tp": 2}),
        ("pangu_tiny_dp2_tp2_zero", 1, {}),
        ("pangu_tiny_dp4_zero", 3, {"dp": 2}),  # MindSpore takes no 3 devices
        ("pangu_tiny_dp2_pp2", 3, {"pp": 2}),
        ("pangu_tiny_tp2_pp2_interleaved", 3, {"tp": 2}),
        ("pangu_tiny_cp2_tp2", 2, {"tp": 2}),
        ("pangu_pro_moe_tiny_ep2_pp2", 2, {"pp": 2}),
        ("pangu_200b_dp16_tp8_pp16", 2047, {"pp": 16, "dp": 15, "tp": 8}),
        ("pangu_200b_dp16_tp8_pp16", 127, {"pp": 8, "dp": 1, "tp": 8}),
    ],
)
def test_dp_is_reduced_first_and_tp_last(name, devices, wanted):
    mesh = nearest(name, devices).mesh
    assert {axis: degree for axis, degree in mesh.degrees.items() if degree > 1} == {
        axis: degree for axis, degree in wanted.items() if degree > 1
    }


def test_a_mesh_that_the_run_refuses_is_passed_by():
    strategy = nearest("pangu_200b_dp16_tp8_pp16", 2047, lambda each: ["no"] if 1024 % each.mesh.dp else [])
    assert (strategy.mesh.pp, strategy.mesh.dp, strategy.mesh.tp) == (16, 8, 8)
    assert nearest("pangu_tiny_dp2_tp2", 3, lambda each: ["never"]) is None
    assert nearest("pangu_tiny_dp2_tp2", 0) is None


def test_a_nearer_mesh_that_is_too_small_is_passed_by(write):
    path = write("strategy.yaml", "mesh: {dp: 4, tp: 2}\n")
    found = [nearest(path, 4, lambda each: ["no"] if each.mesh.dp == 2 else [], least).mesh for least in (1, 3)]
    assert [(mesh.dp, mesh.tp) for mesh in found] == [(1, 2), (4, 1)]


@pytest.mark.parametrize(("devices", "dp", "groups"), [(3, 2, None), (4, 4, 4)])
def test_groups_of_replicas_that_do_not_divide_a_mesh_are_given_up(write, devices, dp, groups):
    path = write("strategy.yaml", "mesh: {dp: 8}\noptimizer_parallel: {axis: dp, shard_size: 4}\n")
    strategy = nearest(path, devices)
    assert (strategy.mesh.dp, strategy.optimizer_parallel.shard_size) == (dp, groups)


def test_every_smaller_mesh_fits_and_none_is_there_twice():
    found = smaller_meshes(load_strategy("pangu_200b_dp16_tp8_pp16").mesh, 100)
    assert found and all(mesh.size <= 100 for mesh in found) and len(set(found)) == len(found)


def test_what_is_written_is_read_as_the_same_strategy(write):
    """Files that the strategy names, relative to its own folder, are found from any other."""
    write("given/own.yaml", "operators: {mlp.up.matmul: [[dp, ~], [tp, ~]]}\n")
    write("given/order.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    path = write(
        "given/strategy.yaml",
        f"mesh: {{pp: 2, dp: 4, tp: 2}}\nrules: {{base: [{CONFIGS}/rules/decoder.yaml, own.yaml]}}\n"
        "pipeline: {num_microbatches: 2, schedule: order.csv}\nrecompute: {per_stage: [1, 0]}\n"
        "optimizer_parallel: {axis: dp}\nsequence_parallel: true\n",
    )
    for devices, lost in ((15, set()), (4, {"optimizer_parallel"}), (3, {"pipeline", "optimizer_parallel"})):
        settings, strategy = nearest_strategy(
            path, load_strategy(path).mesh, range(1, devices + 1), lambda strategy: []
        )
        copy = write(f"other/{devices}.yaml", settings_text(settings, "a test"))
        read = load_strategy(copy)
        assert (read.mesh, read.pipeline, read.recompute) == (strategy.mesh, strategy.pipeline, strategy.recompute)
        assert [rule.pattern for rule in read.rules.operators] == [rule.pattern for rule in strategy.rules.operators]
        assert set(load_strategy(path).lines) & {"pipeline", "optimizer_parallel"} - set(settings) == lost
    with pytest.raises(ConfigError):
        load_strategy(write("wrong.yaml", settings_text({**settings, "mesh": {"dq": 2}}, "a typing error")))
