# SPDX-License-Identifier: Apache-2.0
"""Refusals of `sporeloom certify`, before anything is compiled."""

from pathlib import Path

import pytest

from sporeloom.certification.config import CertifyConfig, check
from sporeloom.core.errors import ConfigError

MEASURED = """\
chip: mine
peak_tflops: 0.1
memory_gb: 4
memory_gb_per_s: 5
devices_per_node: 2
intra_node_gb_per_s: 10
inter_node_gb_per_s: 10
measured:
- processes: 2
  efficiency: {matmul: 1, attention: 1, memory: 1, intra_node: 1, inter_node: 1, layer_overhead_us: 160}
"""


def test_a_cluster_measured_with_too_few_processes_is_named_and_not_the_strategy(tmp_path, write):
    config = CertifyConfig(
        strategy=Path("pangu_tiny_dp2_tp2"), cluster=write("mine.yaml", MEASURED), out=tmp_path / "out"
    )
    with pytest.raises(ConfigError) as refused:
        check(config)
    (problem,) = refused.value.problems
    assert problem.startswith("cluster mine: measured with at most 2 processes at once on its cores, the job has 4;")
