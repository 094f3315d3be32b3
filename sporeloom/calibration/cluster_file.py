# SPDX-License-Identifier: Apache-2.0
"""Cluster files of measured machines."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from typing import Any

import yaml

from sporeloom.calibration.samples import GIGA, MachineRates, rounded
from sporeloom.planner.cluster import Cluster, Efficiency
from sporeloom.runtime.launch import free_memory_gb

CHIP = "cpu"


def cluster_of(levels: Sequence[MachineRates]) -> Cluster:
    """This machine as a cluster of one server, whose devices are processes.

    Args:
        levels: by number of processes, the smallest first.
    """
    alone, all_of_them, free_gb = levels[0], levels[-1], free_memory_gb()
    assert free_gb is not None  # checked before anything is measured
    memory = free_gb * GIGA / 2**30 / all_of_them.processes
    return Cluster(
        chip=CHIP,
        peak_tflops=rounded(alone.flops / 1e12),
        memory_gb=rounded(memory),
        memory_gb_per_s=rounded(alone.bytes_per_s / GIGA),
        devices_per_node=all_of_them.processes,
        intra_node_gb_per_s=rounded(alone.bytes_per_s / GIGA),
        inter_node_gb_per_s=rounded(alone.bytes_per_s / GIGA),
        host_gb_per_s=rounded(alone.bytes_per_s / GIGA),
        alignment=1,
        reserved_gb=min(0.4, rounded(memory / 2)),
        flash_attention=False,
        fused=False,  # MindSpore's CPU kernels are those of single operators
        measured=[level.as_process_rates(alone) for level in levels],
    )


def as_yaml(cluster: Cluster, quick: bool) -> str:
    """The text of the file."""
    cores = os.cpu_count() or 1
    head = [
        f"# Measured by sporeloom calibrate{' --quick' if quick else ''} on {cores} cores of {platform.machine()}; "
        "a device is a process.",
        "# Links are given as fast as memory; what collectives reach of it is in `measured`, by processes running at once.",
    ]
    values = {name: value for name, value in dataclasses.asdict(cluster).items() if value is not None}
    defaults = {field.name: field.default for field in dataclasses.fields(Efficiency)}
    for level in values["measured"]:
        level["efficiency"] = {n: v for n, v in level["efficiency"].items() if v != defaults[n]}
    return "\n".join([*head, yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=200)])


class _Dumper(yaml.SafeDumper):
    """Writes mappings of plain values in one line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        is_plain = not any(isinstance(value, list | dict) for value in dict(mapping).values())
        return super().represent_mapping(tag, mapping, flow_style=is_plain or flow_style)
