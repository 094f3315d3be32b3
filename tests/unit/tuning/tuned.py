# SPDX-License-Identifier: Apache-2.0
"""Requests of searches on small clusters."""

import json
from pathlib import Path

from sporeloom.cli.tune import TuneConfig, check

CLUSTER = {
    "chip": "ascend910b",
    "peak_tflops": 100,
    "memory_gb": 64,
    "memory_gb_per_s": 1000,
    "devices_per_node": 4,
    "intra_node_gb_per_s": 100,
    "inter_node_gb_per_s": 25,
    "reserved_gb": 0.1,
}


def tune_config(folder: Path, devices=8, batch=16, model=None, cluster=None, **flags) -> TuneConfig:
    """The flags of a search on a cluster file, whose fields are those of CLUSTER and `cluster`. `model`: a folder."""
    path = folder / "cluster.yaml"
    path.write_text(json.dumps({**CLUSTER, **(cluster or {})}))
    given = {"model": model or "pangu", "size": "2.6b", "out": folder / "tuned", **flags}
    return TuneConfig(cluster=path, devices=devices, global_batch_size=batch, **given)


def tune_request(folder: Path, **flags):
    """The request of `tune_config`."""
    return check(tune_config(folder, **flags))
