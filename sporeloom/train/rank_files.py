# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own checkpoint files of every rank, for users who load them with MindSpore."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from sporeloom.checkpoint.contents import logical_name
from sporeloom.core.errors import ConfigError
from sporeloom.core.files import flush_all, partial_name
from sporeloom.core.hashes import write_hashes
from sporeloom.models.config import ModelConfig
from sporeloom.models.family import family_module
from sporeloom.parallel.parallelize import parallelize
from sporeloom.parallel.parts import held_part
from sporeloom.parallel.report import ParameterReport, Report
from sporeloom.runtime.by_mindspore.layout_files import layout_file
from sporeloom.strategy.config import Strategy

LAYOUTS = "layouts"


def write_rank_files(
    folder: Path, weights: Mapping[str, NDArray[Any]], family: str, model: ModelConfig, strategy: Strategy
) -> None:
    """Write `rank_0/checkpoint_0.ckpt`, ... under the network's parameter names, and `layouts/` with what MindSpore's
    `transform_checkpoints` needs to know of them. Shards follow from the rules of the strategy; nothing is compiled.

    Raises:
        ConfigError: the folder exists, or the rules do not fit the model.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists; choose another name")
    strategy, partial = strategy.by_mindspore(), partial_name(folder)
    with no_init_parameters():
        net = family_module(family, "model").ModelWithLoss(model)
    report = parallelize(net, strategy)
    mesh = strategy.mesh
    try:
        (partial / LAYOUTS).mkdir(parents=True)
        for rank in range(mesh.size):
            stage = mesh.coordinate(rank, "pp")
            held = [parameter for parameter in report.parameters if stage in _stages(parameter, report, strategy)]
            shards = {p.name: weights[logical_name(p.name)][held_part(p, mesh, rank).slices] for p in held}
            entries = [{"name": name, "data": Tensor(np.ascontiguousarray(shard))} for name, shard in shards.items()]
            (partial / f"rank_{rank}").mkdir()
            ms.save_checkpoint(entries, str(partial / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"))
            (partial / LAYOUTS / f"strategy_{rank}.ckpt").write_bytes(layout_file(held, net, mesh, stage))
        write_hashes(partial)
        flush_all(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stages(parameter: ParameterReport, report: Report, strategy: Strategy) -> set[int]:
    """Stages that hold a parameter: a tied one is in the last stage as well."""
    return {parameter.stage, strategy.stage_of_loss if parameter.name in report.tied else parameter.stage}
