# SPDX-License-Identifier: Apache-2.0
"""Cluster files with measured rates."""

import dataclasses
from pathlib import Path

import pytest

from sporeloom.core.errors import ConfigError
from sporeloom.dry_run.time.device_model import DeviceModel
from sporeloom.planner.cluster import Cluster, read_cluster
from sporeloom.planner.rates import FLOAT32_SPEED, float32_speed

SHEET = """\
chip: mine
peak_tflops: 0.1
memory_gb: 4
memory_gb_per_s: 10
devices_per_node: 4
intra_node_gb_per_s: 10
inter_node_gb_per_s: 10
"""
LEVEL = """\
- processes: {}
  efficiency: {{matmul: {}, attention: 1.0, memory: 1.0, intra_node: 0.5, inter_node: 0.5, layer_overhead_us: 160}}
"""


def read(folder, text):
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_a_job_has_the_rates_of_as_many_processes_or_the_next_number(tmp_path):
    cluster = read(tmp_path, SHEET + "measured:\n" + LEVEL.format(4, 0.25) + LEVEL.format(1, 1.0))
    speeds = {n: cluster.with_running(n).fitted.matmul for n in (1, 2, 3, 4)}
    assert speeds == {1: 1.0, 2: 0.25, 3: 0.25, 4: 0.25}
    with pytest.raises(
        ConfigError, match=r"at most 4 processes at once .* the job has 8; run sporeloom calibrate --launch 8"
    ):
        cluster.with_running(8)


def test_a_measured_file_is_complete_and_its_numbers_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"peak_tflops missing"):
        read(tmp_path, SHEET.replace("peak_tflops: 0.1\n", "") + "measured:\n" + LEVEL.format(1, 1.0))
    with pytest.raises(ConfigError, match=r"matmul must be above 0"):
        read(tmp_path, SHEET + "measured:\n" + LEVEL.format(1, -1.0))
    with pytest.raises(ConfigError, match="chip mine is not known"):
        read(tmp_path, SHEET)


def test_efficiencies_beside_measured_ones_are_refused(tmp_path):
    fitted = "efficiency: {matmul: 0.5, attention: 1, memory: 1, intra_node: 1, inter_node: 1, layer_overhead_us: 0}\n"
    with pytest.raises(ConfigError, match="efficiency would be ignored"):
        read(tmp_path, SHEET + fitted + "measured:\n" + LEVEL.format(1, 1.0))


def test_a_reservation_of_all_memory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reserved_gb 8 leaves nothing of memory_gb 4"):
        read(tmp_path, "chip: h100\nmemory_gb: 4\nreserved_gb: 8\n")


def test_without_measured_fields_nothing_changes():
    cluster = read_cluster(Path("ascend910b"))
    assert cluster.with_running(4096) is cluster
    device, fitted = DeviceModel(cluster), cluster.fitted
    assert (device.launch, device.graph) == (fitted.layer_overhead_us * 1e-6 / 16, 0.0)
    assert float32_speed(cluster) == FLOAT32_SPEED
    assert device.operator("GeLU", 1e9) == device.passes(1e9)


def test_efficiencies_with_measured_launches_replace_those_of_layers():
    cluster = Cluster.of_chip("h100")
    efficiency = dataclasses.replace(cluster.fitted, launch_us=5.0, graph_us=7.0, float32=0.25)
    device = DeviceModel(dataclasses.replace(cluster, efficiency=efficiency))
    assert (device.launch, device.graph) == pytest.approx((5e-6, 7e-6))
    assert device.product(1e12, 0, True) == pytest.approx(4 * device.product(1e12, 0, False))
